//! Tokens and grants on every edge: who is not let in hears why, and no pod hears of it.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use base64::Engine;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use bytes::Bytes;
use futures_util::StreamExt;
use serde_json::{Value, json};
use sluice_gateway::{ClientEntry, Gateway, GatewayConfig, SecretHash};
use sluice_shared::error::{Error, ErrorKind};
use sluice_shared::frame::{FinishWhen, GatewayFrame};
use sluice_shared::membership::Membership;
use sluice_shared::proto::flight::FlightData;
use sluice_shared::proto::flight::flight_service_client::FlightServiceClient;
use sluice_shared::proto::zerobus::ephemeral_stream_request::Payload as Ask;
use sluice_shared::proto::zerobus::ephemeral_stream_response::Payload as Answer;
use sluice_shared::proto::zerobus::ingest_record_request::Record;
use sluice_shared::proto::zerobus::zerobus_client::ZerobusClient;
use sluice_shared::proto::zerobus::{
    CreateIngestStreamRequest, EphemeralStreamRequest, IngestRecordRequest, PersistentStreamRequest,
    RecordType, ResumeIngestStreamRequest, RetireStreamRequest, persistent_stream_request,
    resume_ingest_stream_request, retire_stream_request,
};
use tempfile::TempDir;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_tungstenite::tungstenite;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;
use tonic::{Code, Request, Status};

use crate::harness::{FakePod, Producer, gateway_with, metric, raw, soon, split};

const KEY: [u8; 32] = [9; 32];
const SECRET: &str = "sluice_secret_of_the_plant";
const FLIGHTS: &str = "main.default.flights";

/// A gateway that asks for tokens. `plant` may do everything with `flights`; `guest` may write there, `other` elsewhere.
struct Guarded {
    pod: FakePod,
    gateway: Gateway,
    _dir: TempDir,
}

impl Guarded {
    async fn start() -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let pod = FakePod::start("pod-1");
        let gateway = gateway_with(&[&pod], |config| guard(config, dir.path())).await;
        Self { pod, gateway, _dir: dir }
    }

    async fn token(&self, client: &str) -> String {
        let (status, body) = self.ask_token(&basic(client, SECRET), "grant_type=client_credentials").await;
        assert_eq!(
            (status, &body["token_type"], &body["expires_in"]),
            (200, &json!("Bearer"), &json!(3600)),
            "{body}"
        );
        body["access_token"].as_str().expect("a token").to_owned()
    }

    async fn ask_token(&self, headers: &str, form: &str) -> (u16, Value) {
        let form_type = "content-type: application/x-www-form-urlencoded\r\n";
        let (status, body) =
            self.request("POST", "/oidc/v1/token", &format!("{form_type}{headers}"), form).await;
        (status, serde_json::from_str(&body).unwrap_or_else(|_| panic!("JSON: {body}")))
    }

    async fn request(&self, method: &str, path: &str, headers: &str, body: &str) -> (u16, String) {
        let answer = self.raw(method, path, headers, body).await;
        let (status, body) = split(&answer);
        if !answer.to_ascii_lowercase().contains("transfer-encoding: chunked") {
            return (status, body);
        }
        // The answers here come in one chunk.
        let text = body.split("\r\n").nth(1).expect("a chunk");
        (status, text.to_owned())
    }

    async fn raw(&self, method: &str, path: &str, headers: &str, body: &str) -> String {
        let head = format!("{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{headers}");
        let request = format!("{head}content-length: {}\r\n\r\n{body}", body.len());
        raw(self.gateway.address(), request.as_bytes()).await
    }

    fn opens(&self) -> usize {
        self.pod.see(|memory| memory.opens.len())
    }

    /// What every edge is tried with: a token, and the kind of the refusal.
    async fn cases(&self) -> [(Option<String>, Option<ErrorKind>); 6] {
        let good = self.token("plant").await;
        let forged = format!("{}x", &good[..good.len() - 1]);
        [
            (None, Some(ErrorKind::Unauthorized)),
            (Some("not.a.token".to_owned()), Some(ErrorKind::Unauthorized)),
            (Some(forged), Some(ErrorKind::Unauthorized)),
            (Some(signed(now_s() - 7200, now_s() - 3600)), Some(ErrorKind::Unauthorized)),
            (Some(self.token("other").await), Some(ErrorKind::Forbidden)),
            (Some(good), None),
        ]
    }
}

/// Makes a gateway ask for tokens.
pub(crate) fn guard(config: &mut GatewayConfig, dir: &Path) {
    let key_file = dir.join("token.key");
    std::fs::write(&key_file, STANDARD.encode(KEY)).expect("written");
    std::fs::set_permissions(&key_file, std::fs::Permissions::from_mode(0o600)).expect("set");
    let client = |id: &str, tables: &str, privileges: Value| ClientEntry {
        id: id.to_owned(),
        secret_sha256: SecretHash::of(SECRET),
        grants: serde_json::from_value(json!([{ "tables": tables, "privileges": privileges }]))
            .expect("grants"),
    };
    config.clients = vec![
        client("plant", "flights", json!(["write", "create", "describe"])),
        client("guest", "main.default.fl*", json!(["write"])),
        client("other", "main.default.others", json!(["write", "create", "describe"])),
    ];
    config.token_key = Some(key_file);
}

fn basic(client: &str, secret: &str) -> String {
    format!("authorization: Basic {}\r\n", STANDARD.encode(format!("{client}:{secret}")))
}

fn bearer(token: Option<&str>) -> String {
    token.map(|token| format!("authorization: Bearer {token}\r\n")).unwrap_or_default()
}

#[allow(clippy::disallowed_methods, reason = "a token's times are the wall clock's")]
fn now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_secs()
}

/// A token for `flights`, made without the code under test.
fn signed(nbf: u64, exp: u64) -> String {
    signed_for(FLIGHTS, nbf, exp)
}

/// A token that holds for a while, to write to this table.
pub(crate) fn token_for(table: &str) -> String {
    signed_for(table, now_s(), now_s() + 600)
}

fn signed_for(table: &str, nbf: u64, exp: u64) -> String {
    let part = |value: Value| URL_SAFE_NO_PAD.encode(value.to_string());
    let grants = json!([{ "tables": table, "privileges": ["write"] }]);
    let claims = json!({ "iss": "sluice", "aud": "sluice-gateway", "sub": "plant", "iat": nbf, "nbf": nbf, "exp": exp,
                         "grants": grants });
    let text = format!("{}.{}", part(json!({ "alg": "HS256", "typ": "JWT" })), part(claims));
    let tag = ring::hmac::sign(&ring::hmac::Key::new(ring::hmac::HMAC_SHA256, &KEY), text.as_bytes());
    format!("{text}.{}", URL_SAFE_NO_PAD.encode(tag))
}

fn check_kind(case: &str, got: Option<&Error>, expected: Option<ErrorKind>) {
    assert_eq!(got.map(|error| error.kind), expected, "{case}: {got:?}");
    let Some(error) = got else { return };
    let code = if error.kind == ErrorKind::Forbidden { "missing_privilege" } else { error.code.as_str() };
    assert_eq!(error.code, code);
    assert!(
        error.kind != ErrorKind::Forbidden || error.message.contains("`write` on main.default.flights"),
        "{error}"
    );
}

fn http_error(case: &str, status: u16, body: &str) -> Option<Error> {
    if matches!(status, 101 | 200 | 201) {
        return None;
    }
    let mut body: Value = serde_json::from_str(body).unwrap_or_else(|_| panic!("{case}: {status} {body}"));
    let error: Error = serde_json::from_value(body["error"].take()).expect("an error");
    assert_eq!(status, error.kind.http_status(), "{case}");
    Some(error)
}

#[tokio::test]
async fn a_websocket_is_refused_before_its_upgrade() {
    let guarded = Guarded::start().await;
    for (token, expected) in guarded.cases().await {
        let before = guarded.opens();
        let url = format!("ws://{}/v1/tables/flights/stream", guarded.gateway.address());
        let mut request = url.into_client_request().expect("a URL");
        if let Some(token) = &token {
            request
                .headers_mut()
                .insert("authorization", format!("Bearer {token}").parse().expect("a header"));
        }
        let connected = Box::pin(soon("the upgrade", tokio_tungstenite::connect_async(request))).await;
        let error = match connected {
            Ok((socket, _)) => {
                let mut producer = Producer { socket, subprotocol: None };
                assert_eq!(producer.json().await["next_offset"], 0);
                None
            }
            Err(tungstenite::Error::Http(response)) => {
                let told = response.headers().contains_key("www-authenticate");
                assert_eq!(told, expected == Some(ErrorKind::Unauthorized));
                let body =
                    String::from_utf8_lossy(response.body().as_deref().unwrap_or_default()).into_owned();
                http_error("websocket", response.status().as_u16(), &body)
            }
            Err(other) => panic!("{other}"),
        };
        check_kind("websocket", error.as_ref(), expected);
        assert_eq!(guarded.opens() - before, usize::from(expected.is_none()));
    }
    // In the address it counts for nothing: addresses get into logs.
    let token = guarded.token("plant").await;
    let path = format!("/v1/tables/flights/stream?token={token}");
    let upgrade =
        "upgrade: websocket\r\nsec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n";
    let (status, body) = guarded.request("GET", &path, upgrade, "").await;
    assert_eq!(status, 400, "{body}");
    assert!(!body.contains(&token), "{body}");
}

#[tokio::test]
async fn the_open_frame_carries_a_token_where_the_header_has_none() {
    let guarded = Guarded::start().await;
    for (token, expected) in guarded.cases().await {
        let before = guarded.opens();
        let mut producer = Producer::connect(&guarded.gateway, "flights/stream", Some("sluice.v1")).await;
        producer.binary(&[b"\x01", json!({ "token": token }).to_string().as_bytes()].concat()).await;
        let error = match producer.frame().await {
            GatewayFrame::Opened(_) => None,
            GatewayFrame::Error(error) => {
                producer.expect_close(error.kind.websocket_close_code()).await;
                Some(error)
            }
            other => panic!("{other:?}"),
        };
        check_kind("sluice.v1", error.as_ref(), expected);
        assert_eq!(guarded.opens() - before, usize::from(expected.is_none()));
    }
}

#[tokio::test]
async fn posts_need_a_token_for_their_table() {
    let guarded = Guarded::start().await;
    for (token, expected) in guarded.cases().await {
        let headers = format!("content-type: application/x-ndjson\r\n{}", bearer(token.as_deref()));
        let (status, body) =
            guarded.request("POST", "/v1/tables/flights/records", &headers, "{\"a\":1}\n").await;
        check_kind("records", http_error("records", status, &body).as_ref(), expected);
        // Of a body of CSV the pod would be asked for the table's columns.
        let headers = format!("content-type: text/csv\r\n{}", bearer(token.as_deref()));
        let (status, body) = guarded.request("POST", "/v1/tables/flights/records", &headers, "a\n1\n").await;
        check_kind("csv", http_error("csv", status, &body).as_ref(), expected);
        let headers = format!("content-type: application/json\r\n{}", bearer(token.as_deref()));
        let (status, body) = guarded
            .request("POST", &format!("/zerobus/v1/tables/{FLIGHTS}/insert"), &headers, "[{\"a\":1}]")
            .await;
        let (expected_status, code) = match expected {
            Some(ErrorKind::Unauthorized) => (401, json!("UNAUTHENTICATED")),
            Some(_) => (403, json!("PERMISSION_DENIED")),
            None => (200, Value::Null),
        };
        let body: Value = serde_json::from_str(&body).expect("JSON");
        assert_eq!((status, &body["error_code"]), (expected_status, &code), "{body}");
    }
    assert_eq!(guarded.opens(), 3);
}

#[tokio::test]
async fn tables_are_made_described_and_listed_by_whom_may() {
    let guarded = Guarded::start().await;
    let spec = "{\"schema\":{\"fields\":[{\"name\":\"id\",\"type\":\"int64\"}]}}";
    let call = async |token: Option<&str>, method: &str, path: &str| {
        let (status, body) =
            guarded.request(method, path, &bearer(token), if method == "PUT" { spec } else { "" }).await;
        (status, body)
    };
    let (plant, guest) = (guarded.token("plant").await, guarded.token("guest").await);
    for (method, path) in
        [("PUT", "/v1/tables/flights"), ("GET", "/v1/tables/flights"), ("GET", "/v1/tables")]
    {
        let (status, body) = call(None, method, path).await;
        check_kind(path, http_error(path, status, &body).as_ref(), Some(ErrorKind::Unauthorized));
    }
    for (method, privilege) in [("PUT", "create"), ("GET", "describe")] {
        let (status, body) = call(Some(&guest), method, "/v1/tables/flights").await;
        let error = http_error(method, status, &body).expect("refused");
        assert_eq!(error.kind, ErrorKind::Forbidden);
        assert!(error.message.contains(&format!("`{privilege}` on main.default.flights")), "{error}");
    }
    assert!(guarded.pod.see(|memory| memory.specs.is_empty()));
    assert_eq!(call(Some(&plant), "PUT", "/v1/tables/flights").await.0, 201);
    assert_eq!(call(Some(&plant), "GET", "/v1/tables/flights").await.0, 200);
    assert_eq!(
        call(Some(&plant), "GET", "/v1/tables").await,
        (200, format!("{{\"tables\":[\"{FLIGHTS}\"]}}"))
    );
    assert_eq!(call(Some(&guest), "GET", "/v1/tables").await, (200, "{\"tables\":[]}".to_owned()));
    // One that is there and one that is not are refused in the same words.
    let words = async |table: &str| {
        let (status, body) = call(Some(&guest), "GET", &format!("/v1/tables/{table}")).await;
        (status, body.replace(table, "TABLE"))
    };
    assert_eq!(words("flights").await, words("flowers").await);
    for path in ["/healthz", "/readyz", "/metrics"] {
        assert_eq!(call(None, "GET", path).await.0, 200, "{path}");
    }
    assert!(
        metric(guarded.gateway.address(), "sluice_gateway_errors_total{code=\"missing_privilege\"}").await
            >= 2
    );
}

#[tokio::test]
async fn columns_are_told_in_unity_catalogs_words_and_errors_in_its_form() {
    let guarded = Guarded::start().await;
    guarded.pod.tell(|memory| {
        let spec =
            "{\"spec\":{\"schema\":{\"fields\":[{\"name\":\"id\",\"type\":\"int64\",\"nullable\":false}]}}}";
        memory.specs.push(Bytes::from_static(spec.as_bytes()));
    });
    let path = format!("/api/2.1/unity-catalog/tables/{FLIGHTS}");
    let get = async |path: &str, token: Option<&str>| {
        let (status, body) = guarded.request("GET", path, &bearer(token), "").await;
        (status, serde_json::from_str::<Value>(&body).unwrap_or_else(|_| panic!("JSON: {body}")))
    };
    let plant = guarded.token("plant").await;
    let (status, told) = get(&path, Some(&plant)).await;
    assert_eq!((status, &told["columns"][0]["type_text"]), (200, &json!("bigint")), "{told}");
    assert_eq!(get(&path, None).await.1["error_code"], "UNAUTHENTICATED");
    let (status, refused) = get(&path, Some(&guarded.token("guest").await)).await;
    assert_eq!((status, &refused["error_code"]), (403, &json!("PERMISSION_DENIED")));
}

/// The answer to a call of Zerobus with one record: None where it was acked.
async fn zerobus(guarded: &Guarded, token: Option<&str>, names_table: bool) -> Option<Status> {
    let mut client =
        ZerobusClient::connect(format!("http://{}", guarded.gateway.address())).await.expect("connects");
    let (requests, receiver) = mpsc::channel(4);
    let mut request = Request::new(ReceiverStream::new(receiver));
    put_headers(request.metadata_mut(), token, names_table);
    let send = async |payload| {
        let request = EphemeralStreamRequest { payload: Some(payload) };
        let _ = requests.send(request).await;
    };
    let mut answers = match soon("headers", client.ephemeral_stream(request)).await {
        Ok(answers) => answers.into_inner(),
        Err(status) => return Some(status),
    };
    let (table_name, record_type) = (Some(FLIGHTS.to_owned()), Some(RecordType::Json.into()));
    send(Ask::CreateStream(CreateIngestStreamRequest { table_name, record_type, ..Default::default() }))
        .await;
    let record = Some(Record::JsonRecord(Bytes::from_static(b"{}")));
    send(Ask::IngestRecord(IngestRecordRequest { offset_id: Some(0), record })).await;
    loop {
        match soon("an answer", answers.message()).await {
            Err(status) => return Some(status),
            Ok(answer) => {
                if let Some(Answer::IngestRecordResponse(_)) = answer.expect("not the end").payload {
                    return None;
                }
            }
        }
    }
}

fn put_headers(headers: &mut tonic::metadata::MetadataMap, token: Option<&str>, names_table: bool) {
    if let Some(token) = token {
        headers.insert("authorization", format!("Bearer {token}").parse().expect("a header"));
    }
    if names_table {
        headers.insert("x-databricks-zerobus-table-name", FLIGHTS.parse().expect("a header"));
    }
}

fn check_status(case: &str, got: Option<&Status>, expected: Option<ErrorKind>) {
    let code = match expected {
        None => None,
        Some(ErrorKind::Forbidden) => Some(Code::PermissionDenied),
        Some(_) => Some(Code::Unauthenticated),
    };
    assert_eq!(got.map(Status::code), code, "{case}: {got:?}");
}

#[tokio::test]
async fn zerobus_calls_need_a_token_for_their_table() {
    let guarded = Guarded::start().await;
    for (token, expected) in guarded.cases().await {
        for names_table in [true, false] {
            let got = zerobus(&guarded, token.as_deref(), names_table).await;
            check_status("zerobus", got.as_ref(), expected);
        }
        let url = format!("http://{}", guarded.gateway.address());
        let mut client = FlightServiceClient::connect(url).await.expect("connects");
        let mut request = Request::new(tokio_stream::iter([FlightData::default()]));
        put_headers(request.metadata_mut(), token.as_deref(), true);
        let answered = match soon("headers", client.do_put(request)).await {
            Ok(mut answers) => soon("an answer", answers.get_mut().message()).await.err(),
            Err(status) => Some(status),
        };
        // What was sent is no schema: who is let in hears that.
        match expected {
            None => assert_eq!(answered.map(|status| status.code()), Some(Code::InvalidArgument)),
            _ => check_status("flight", answered.as_ref(), expected),
        }
    }
    assert_eq!(guarded.opens(), 2);
}

#[tokio::test]
async fn a_persistent_stream_is_gone_on_with_and_retired_by_whom_may_write_to_its_table() {
    let guarded = Guarded::start().await;
    // The id names the table, whatever the headers do not say.
    let id = format!("{FLIGHTS}/{}", uuid::Uuid::now_v7().simple());
    for (token, expected) in guarded.cases().await {
        let url = format!("http://{}", guarded.gateway.address());
        let mut client = ZerobusClient::connect(url).await.expect("connects");
        let identifier = Some(resume_ingest_stream_request::Identifier::StreamId(id.clone()));
        let resume = ResumeIngestStreamRequest {
            identifier,
            record_type: Some(RecordType::Json.into()),
            descriptor_proto: None,
        };
        let first = PersistentStreamRequest {
            payload: Some(persistent_stream_request::Payload::ResumeStream(resume)),
        };
        let mut request = Request::new(tokio_stream::iter([first]));
        put_headers(request.metadata_mut(), token.as_deref(), false);
        let answered = match soon("headers", client.persistent_stream(request)).await {
            Ok(mut answers) => soon("an answer", answers.get_mut().message()).await.err(),
            Err(status) => Some(status),
        };
        check_status("resume", answered.as_ref(), expected);
        let identifier = Some(retire_stream_request::Identifier::StreamId(id.clone()));
        let mut request = Request::new(RetireStreamRequest { table_name: None, identifier });
        put_headers(request.metadata_mut(), token.as_deref(), false);
        let retired = soon("an answer", client.retire_stream(request)).await.err();
        check_status("retire", retired.as_ref(), expected);
    }
    assert_eq!((guarded.opens(), guarded.pod.see(|memory| memory.retired.len())), (1, 1));
}

#[tokio::test]
async fn whether_the_table_may_be_made_goes_with_the_stream() {
    let guarded = Guarded::start().await;
    for (client, may_not) in [("plant", false), ("guest", true)] {
        let token = guarded.token(client).await;
        assert!(zerobus(&guarded, Some(&token), true).await.is_none());
        let told = guarded.pod.see(|memory| memory.opens.last().map(|open| open.may_not_create));
        assert_eq!(told, Some(may_not), "{client}");
    }
}

#[tokio::test]
async fn a_stream_outlives_its_token_for_the_grace_and_ends_after_its_acks() {
    let guarded = Guarded::start().await;
    // One second of the grace is left.
    let token = signed(now_s() - 3600, now_s() - 58);
    let mut producer = Producer::connect(&guarded.gateway, "flights/stream", Some("sluice.v1")).await;
    producer.binary(&[b"\x01", json!({ "token": token }).to_string().as_bytes()].concat()).await;
    assert!(matches!(producer.frame().await, GatewayFrame::Opened(_)));
    guarded.pod.tell(|memory| memory.acks = false);
    producer.records(0, 1, "{}").await;
    guarded
        .pod
        .until("the record and the end", |memory| memory.records() == 1 && !memory.finishes.is_empty())
        .await;
    guarded.pod.ack(1).await;
    guarded.pod.answer(Ok(sluice_shared::proto::stream_response::Kind::Finished(Default::default()))).await;
    assert!(matches!(producer.frame().await, GatewayFrame::Ack(ack) if ack.durable == Some(0)));
    let GatewayFrame::Error(error) = producer.frame().await else { panic!("expected the end") };
    assert_eq!(
        (error.code.as_str(), error.kind, error.retryable),
        ("auth_expired", ErrorKind::Unauthorized, true)
    );
    producer.expect_close(4401).await;
}

#[tokio::test]
async fn a_stream_that_is_finished_before_its_token_expires_ends_well() {
    let guarded = Guarded::start().await;
    guarded.pod.tell(|memory| memory.acks = false);
    let token = signed(now_s() - 3600, now_s() - 58);
    let mut producer = Producer::connect(&guarded.gateway, "flights/stream", Some("sluice.v1")).await;
    producer.binary(&[b"\x01", json!({ "token": token }).to_string().as_bytes()].concat()).await;
    assert!(matches!(producer.frame().await, GatewayFrame::Opened(_)));
    producer.records(0, 1, "{}").await;
    producer.finish(FinishWhen::Durable).await;
    guarded.pod.until("the end", |memory| !memory.finishes.is_empty()).await;
    // The token has two seconds left: nothing is told when they are over.
    let told = tokio::time::timeout(Duration::from_secs(3), producer.socket.next()).await;
    assert!(told.is_err(), "{told:?}");
    guarded.pod.ack(1).await;
    guarded.pod.answer(Ok(sluice_shared::proto::stream_response::Kind::Finished(Default::default()))).await;
    producer.expect_close(1000).await;
}

#[tokio::test]
async fn a_zerobus_stream_with_an_expired_token_is_asked_to_come_again() {
    let guarded = Guarded::start().await;
    let token = signed(now_s() - 3600, now_s() - 58);
    let mut client =
        ZerobusClient::connect(format!("http://{}", guarded.gateway.address())).await.expect("connects");
    let (requests, receiver) = mpsc::channel(4);
    let mut request = Request::new(ReceiverStream::new(receiver));
    put_headers(request.metadata_mut(), Some(&token), true);
    let mut answers = soon("headers", client.ephemeral_stream(request)).await.expect("let in").into_inner();
    let (table_name, record_type) = (Some(FLIGHTS.to_owned()), Some(RecordType::Json.into()));
    let create = CreateIngestStreamRequest { table_name, record_type, ..Default::default() };
    let open = EphemeralStreamRequest { payload: Some(Ask::CreateStream(create)) };
    requests.send(open).await.expect("sent");
    let mut told = Vec::new();
    let status = loop {
        match soon("an answer", answers.message()).await {
            Ok(answer) => told.push(answer.expect("not the end").payload),
            Err(status) => break status,
        }
    };
    let signals =
        told.iter().flatten().filter(|answer| matches!(answer, Answer::CloseStreamSignal(_))).count();
    assert_eq!((signals, status.code()), (1, Code::Unavailable), "{told:?} {status:?}");
    assert!(status.message().contains("[auth_expired]"), "{status:?}");
}

#[tokio::test]
async fn tokens_are_given_as_oauth_has_it() {
    let guarded = Guarded::start().await;
    let grant = "grant_type=client_credentials";
    let answer = guarded.raw("POST", "/oidc/v1/token", &basic("plant", SECRET), grant).await;
    let head = answer.split("\r\n\r\n").next().expect("a head").to_ascii_lowercase();
    assert!(head.contains("cache-control: no-store") && head.contains("pragma: no-cache"), "{head}");
    let in_form = format!("{grant}&client_id=plant&client_secret={SECRET}&scope=all-apis&unknown=1");
    assert_eq!(guarded.ask_token("", &in_form).await.0, 200);
    let known = guarded.raw("POST", "/oidc/v1/token", &basic("plant", "wrong"), grant).await;
    let unknown = guarded.raw("POST", "/oidc/v1/token", &basic("nobody", "wrong"), grant).await;
    let without_date = |answer: &str| {
        let lines = answer.lines().filter(|line| !line.to_ascii_lowercase().starts_with("date:"));
        lines.collect::<Vec<_>>().join("\n")
    };
    assert_eq!(without_date(&known), without_date(&unknown));
    assert!(known.to_ascii_lowercase().contains("www-authenticate: basic"), "{known}");
    let plant = basic("plant", SECRET);
    let twice = format!("{in_form}&{grant}");
    let cases: [(&str, &str, u16, &str); 10] = [
        (&basic("plant", "wrong"), grant, 401, "invalid_client"),
        (&basic("plant", ""), grant, 401, "invalid_client"),
        ("", grant, 401, "invalid_client"),
        ("authorization: Bearer x\r\n", grant, 401, "invalid_client"),
        ("authorization: Basic !\r\n", grant, 401, "invalid_client"),
        (&plant, "", 400, "invalid_request"),
        (&plant, &in_form, 400, "invalid_request"),
        ("", &twice, 400, "invalid_request"),
        (&plant, "grant_type=password&username=a&password=b", 400, "unsupported_grant_type"),
        (
            &plant,
            "grant_type=client_credentials&authorization_details=x",
            400,
            "invalid_authorization_details",
        ),
    ];
    for (headers, form, status, error) in cases {
        let (got, body) = guarded.ask_token(headers, form).await;
        assert_eq!((got, &body["error"]), (status, &json!(error)), "{form}: {body}");
        assert!(body["error_description"].as_str().is_some_and(|text| text.len() > 10), "{body}");
    }
}

/// As the clients of Databricks ask.
fn details(table: &str, privileges: &[&str]) -> String {
    let kind = "unity_catalog_privileges";
    let of = |object_type: &str, path: &str, privileges: &[&str]| {
        let mut detail = json!({ "type": kind, "privileges": privileges });
        (detail["object_type"], detail["object_full_path"]) = (object_type.into(), path.into());
        detail
    };
    let mut of_table = of("TABLE", table, privileges);
    of_table["operations"] = json!(["zerobuswrite"]);
    let details = json!([
        of("CATALOG", "main", &["USE CATALOG"]),
        of("SCHEMA", "main.default", &["USE SCHEMA"]),
        of_table
    ]);
    let encoded: String = details.to_string().bytes().map(|byte| format!("%{byte:02x}")).collect();
    format!("grant_type=client_credentials&authorization_details={encoded}")
}

#[tokio::test]
async fn a_token_can_be_asked_for_one_table() {
    let guarded = Guarded::start().await;
    let ask = async |client: &str, table: &str, privileges: &[&str]| {
        guarded.ask_token(&basic(client, SECRET), &details(table, privileges)).await
    };
    let (status, body) = ask("plant", FLIGHTS, &["SELECT", "MODIFY"]).await;
    assert_eq!(status, 200, "{body}");
    let token = body["access_token"].as_str().expect("a token");
    assert!(zerobus(&guarded, Some(token), true).await.is_none());
    assert!(!guarded.pod.see(|memory| memory.opens[0].may_not_create), "it goes with `write`");
    for (client, table, privileges, lacks) in [
        ("guest", FLIGHTS, ["SELECT", "MODIFY"], "`describe` (SELECT) on main.default.flights"),
        ("plant", "main.default.nowhere", ["MODIFY", "SELECT"], "`write` (MODIFY) on main.default.nowhere"),
    ] {
        let (status, body) = ask(client, table, &privileges).await;
        assert_eq!((status, &body["error"]), (403, &json!("access_denied")), "{body}");
        assert!(body["error_description"].as_str().is_some_and(|text| text.contains(lacks)), "{body}");
    }
    for (table, privileges) in [("a/b", "MODIFY"), (FLIGHTS, "OWN")] {
        assert_eq!(ask("plant", table, &[privileges]).await.1["error"], "invalid_authorization_details");
    }
}

#[tokio::test]
async fn an_open_gateway_takes_any_token_and_gives_one_to_anybody() {
    let pod = FakePod::start("pod-1");
    let gateway = gateway_with(&[&pod], |_| {}).await;
    let guarded = Guarded { pod, gateway, _dir: tempfile::tempdir().expect("a directory") };
    let token = guarded.token("whoever").await;
    for token in [None, Some(token.as_str()), Some("nonsense")] {
        assert!(zerobus(&guarded, token, true).await.is_none());
    }
    assert!(!guarded.pod.see(|memory| memory.opens[0].may_not_create));
}

#[tokio::test]
async fn what_cannot_guard_does_not_start() {
    let start = async |listen: &str, token_key: Option<std::path::PathBuf>| {
        let clients =
            vec![ClientEntry { id: "a".to_owned(), secret_sha256: SecretHash::of("a"), grants: Vec::new() }];
        let clients = if token_key.is_some() { clients } else { Vec::new() };
        let config = GatewayConfig { listen: listen.to_owned(), clients, token_key, ..Default::default() };
        Gateway::start(config, Membership::fixed(Vec::new())).await.err().expect("refused").to_string()
    };
    let nobody_said = start("0.0.0.0:0", None).await;
    assert!(nobody_said.contains("gateway.clients") && nobody_said.contains("gateway.auth"), "{nobody_said}");
    let no_file = start("127.0.0.1:0", Some("/nowhere/token.key".into())).await;
    assert!(no_file.contains("gateway.token_key, /nowhere/token.key"), "{no_file}");
}

#[tokio::test]
async fn a_stream_ends_by_a_close_and_not_by_silence() {
    // A token that has the whole of its life left sets no early end.
    let guarded = Guarded::start().await;
    let token = signed(now_s(), now_s() + 600);
    let mut producer = Producer::connect(&guarded.gateway, "flights/stream", Some("sluice.v1")).await;
    producer.binary(&[b"\x01", json!({ "token": token }).to_string().as_bytes()].concat()).await;
    assert!(matches!(producer.frame().await, GatewayFrame::Opened(_)));
    producer.records(0, 1, "{}").await;
    producer.until_durable(0).await;
    let more = tokio::time::timeout(Duration::from_millis(300), producer.socket.next()).await;
    assert!(!matches!(more, Ok(Some(Ok(Message::Close(_))))), "{more:?}");
}
