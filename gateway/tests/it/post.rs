//! Posts of records: bodies of every kind, and the one answer to them.

use std::io::Write;
use std::sync::Arc;

use ::arrow::array::{ArrayRef, Int64Array, RecordBatch};
use ::arrow::ipc::reader::StreamReader;
use ::arrow::ipc::writer::StreamWriter;
use axum::body::Body;
use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::{Value, json};
use sluice_gateway::{Gateway, GatewayConfig};
use sluice_shared::error::Error;
use sluice_shared::proto::stream_response::Kind as Answer;
use sluice_shared::proto::{self, Encoding};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tower::ServiceExt;

use crate::harness::{FakePod, gateway, gateway_with, metric, soon, split};

const PATH: &str = "/v1/tables/flights/records";
const INSERT: &str = "/zerobus/v1/tables/main.default.flights/insert";
const NDJSON: &str = "content-type: application/x-ndjson\r\n";

/// A post whose body is sent bit by bit.
struct Posting {
    socket: TcpStream,
}

impl Posting {
    /// Sends the head of a chunked body.
    async fn begin(gateway: &Gateway, path: &str, headers: &str) -> Self {
        let mut socket = TcpStream::connect(gateway.address()).await.expect("connects");
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n{headers}\r\n"
        );
        socket.write_all(head.as_bytes()).await.expect("sends");
        Self { socket }
    }

    async fn send(&mut self, chunk: &[u8]) {
        let head = format!("{:x}\r\n", chunk.len());
        let sending = async {
            self.socket.write_all(head.as_bytes()).await?;
            self.socket.write_all(chunk).await?;
            self.socket.write_all(b"\r\n").await
        };
        soon("sending", sending).await.expect("sends");
    }

    async fn end(mut self) -> (u16, Value) {
        self.socket.write_all(b"0\r\n\r\n").await.expect("sends");
        self.answer().await
    }

    async fn answer(mut self) -> (u16, Value) {
        let (status, body) = split(&self.head_and_body().await);
        (status, from_chunks(&body))
    }

    async fn head_and_body(&mut self) -> String {
        let mut answer = Vec::new();
        soon("the answer", self.socket.read_to_end(&mut answer)).await.expect("reads");
        String::from_utf8(answer).expect("text")
    }
}

/// The JSON of an answer, whether it came with a length or in chunks.
fn from_chunks(body: &str) -> Value {
    let json = body.find('{').zip(body.rfind('}')).map_or("", |(start, end)| &body[start..=end]);
    serde_json::from_str(json).unwrap_or_else(|_| panic!("no JSON: {body:?}"))
}

async fn post_at(gateway: &Gateway, path: &str, headers: &str, body: &[u8]) -> (u16, Value) {
    let mut socket = TcpStream::connect(gateway.address()).await.expect("connects");
    let length = body.len();
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {length}\r\n{headers}\r\n"
    );
    socket.write_all(head.as_bytes()).await.expect("sends");
    socket.write_all(body).await.expect("sends");
    Posting { socket }.answer().await
}

pub(crate) async fn post(gateway: &Gateway, headers: &str, body: &[u8]) -> (u16, Value) {
    post_at(gateway, PATH, headers, body).await
}

fn lines(pod: &FakePod) -> Vec<String> {
    let text = pod.see(|memory| {
        let frames = memory.frames.iter().flatten();
        frames.flat_map(|frame| [&frame.payload[..], b"\n"].concat()).collect::<Vec<u8>>()
    });
    sluice_shared::frame::lines(&text).map(|line| String::from_utf8_lossy(line).into_owned()).collect()
}

pub(crate) fn check_error((status, body): (u16, Value), expected: (u16, &str)) {
    assert_eq!((status, body["error"]["code"].as_str()), (expected.0, Some(expected.1)), "{body}");
    assert!(body["error"]["message"].as_str().is_some_and(|message| message.len() > 20), "{body}");
}

fn gzip(text: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(text).expect("written");
    encoder.finish().expect("written")
}

fn ipc(ids: &[&[i64]]) -> Vec<u8> {
    let batch = |ids: &[i64]| {
        let column: ArrayRef = Arc::new(Int64Array::from(ids.to_vec()));
        RecordBatch::try_from_iter([("id", column)]).expect("fits")
    };
    let mut writer = StreamWriter::try_new(Vec::new(), &batch(&[]).schema()).expect("a schema");
    ids.iter().for_each(|ids| writer.write(&batch(ids)).expect("fits"));
    writer.into_inner().expect("written")
}

#[tokio::test]
async fn a_body_of_each_kind_is_its_records() {
    for (kind, body) in [
        ("application/x-ndjson", "{\"a\":1}\n\n{\"a\":2}"),
        ("application/jsonl; charset=utf-8", "{\"a\":1}\n{\"a\":2}\n"),
        ("application/json", "[{\"a\":1},\n{\"a\":2}]"),
        ("Application/JSON", "{\"a\":1}\n{\"a\":2}\n"),
        ("text/csv", "a\r\n1\r\n2\r\n"),
    ] {
        let pod = FakePod::start("pod-1");
        let gateway = gateway(&[&pod]).await;
        let headers = format!("content-type: {kind}\r\n");
        let (status, answer) = post(&gateway, &headers, body.as_bytes()).await;
        assert_eq!(status, 200, "{kind}: {answer}");
        let stream = answer["stream"].as_str().expect("a stream");
        assert!(stream.starts_with('~'), "{stream}");
        let expected = json!({
            "stream": stream, "records": 2, "rejected": [], "rejected_total": 0,
            "durable": 1, "committed": 1, "version": 20,
        });
        assert_eq!(answer, expected, "{kind}");
        assert_eq!(lines(&pod), ["{\"a\":1}", "{\"a\":2}"], "{kind}");
        assert!(pod.see(|memory| memory.finishes.iter().all(|finish| !finish.committed)));
    }
}

#[tokio::test]
async fn csv_cells_are_written_as_the_table_has_them() {
    let pod = FakePod::start("pod-1");
    let gateway = gateway(&[&pod]).await;
    let fields = json!([{"name": "zip", "type": "string"}, {"name": "n", "type": "int64"}]);
    let description = json!({"spec": {"schema": {"fields": fields}}}).to_string();
    pod.tell(|memory| memory.specs.push(description.into()));
    let csv = "content-type: text/csv\r\n";
    assert_eq!(post(&gateway, csv, b"zip,n\n08540,7\n12,\n").await.0, 200);
    assert_eq!(lines(&pod), ["{\"zip\":\"08540\",\"n\":7}", "{\"zip\":\"12\"}"]);
    check_error(post(&gateway, csv, b"zip,m\n1,2\n").await, (400, "invalid_csv"));
    let path = format!("{PATH}?unknown=ignore");
    assert_eq!(post_at(&gateway, &path, csv, b"zip,m\n1,2\n").await.0, 200);
    assert!(pod.see(|memory| memory.opens.last().expect("an open").ignore_unknown));
}

#[tokio::test]
async fn an_arrow_stream_is_sent_on_as_whole_streams() {
    let pod = FakePod::start("pod-1");
    let gateway = gateway(&[&pod]).await;
    let body = ipc(&[&[1, 2, 3], &[], &[4]]);
    let headers = "content-type: application/vnd.apache.arrow.stream\r\n";
    let mut posting = Posting::begin(&gateway, PATH, headers).await;
    for chunk in body.chunks(100) {
        posting.send(chunk).await;
    }
    let (status, answer) = posting.end().await;
    assert_eq!((status, &answer["records"]), (200, &json!(4)), "{answer}");
    assert_eq!(pod.see(|memory| memory.opens[0].encoding()), Encoding::Arrow);
    let payloads =
        pod.see(|memory| memory.frames[0].iter().map(|frame| frame.payload.clone()).collect::<Vec<_>>());
    let mut rows = 0;
    for payload in payloads {
        let reader = StreamReader::try_new(std::io::Cursor::new(payload), None).expect("a stream");
        rows += reader.map(|batch| batch.expect("a batch").num_rows()).sum::<usize>();
    }
    assert_eq!(rows, 4);
    check_error(post(&gateway, headers, &body[..body.len() - 20]).await, (400, "invalid_arrow"));
}

#[tokio::test]
async fn compressed_bodies_are_read_wherever_their_chunks_end() {
    let text: String = (0..2000).map(|n| format!("{{\"n\":{n}}}\n")).collect();
    let zstded = zstd::encode_all(text.as_bytes(), 1).expect("encoded");
    for (name, body) in [("gzip", gzip(text.as_bytes())), ("zstd", zstded)] {
        let pod = FakePod::start("pod-1");
        let gateway = gateway(&[&pod]).await;
        let headers = format!("{NDJSON}content-encoding: {name}\r\n");
        let mut posting = Posting::begin(&gateway, PATH, &headers).await;
        for chunk in body.chunks(97) {
            posting.send(chunk).await;
        }
        let (status, answer) = posting.end().await;
        assert_eq!((status, &answer["records"]), (200, &json!(2000)), "{name}: {answer}");
        assert_eq!(lines(&pod), text.lines().collect::<Vec<_>>());
        let answer = post(&gateway, &headers, &body[..body.len() - 3]).await;
        check_error(answer, (400, "body_cut_off"));
        check_error(post(&gateway, &headers, text.as_bytes()).await, (400, "invalid_encoding"));
    }
}

#[tokio::test]
async fn the_answer_waits_as_long_as_it_was_asked_to() {
    let pod = FakePod::start("pod-1");
    let gateway = gateway(&[&pod]).await;
    let path = format!("{PATH}?wait=committed&unknown=ignore");
    let (status, answer) = post_at(&gateway, &path, NDJSON, b"{}\n{}\n").await;
    assert_eq!((status, &answer["committed"], &answer["version"]), (200, &json!(1), &json!(20)), "{answer}");
    assert!(pod.see(|memory| memory.finishes[0].committed && memory.opens[0].ignore_unknown));
    let (status, answer) = post(&gateway, NDJSON, b"").await;
    assert_eq!((status, &answer["records"], &answer["durable"]), (200, &json!(0), &Value::Null), "{answer}");
}

#[tokio::test]
async fn refused_records_are_named_and_the_first_hundred_told() {
    let pod = FakePod::start("pod-1");
    pod.tell(|memory| memory.refuses = Some("bad"));
    let gateway = gateway(&[&pod]).await;
    let body = format!("{{}}\nbad\n{{}}\n{}", "bad\n".repeat(150));
    let (status, answer) = post(&gateway, NDJSON, body.as_bytes()).await;
    assert_eq!((status, &answer["rejected_total"]), (200, &json!(151)), "{answer}");
    let rejected = answer["rejected"].as_array().expect("a list");
    assert_eq!(rejected.len(), 100);
    assert_eq!(rejected[0], json!({"offset": 1, "code": "not_json", "message": "no JSON: bad"}));
    assert_eq!(answer["durable"], 152);
}

#[tokio::test]
async fn a_key_names_a_stream_that_is_sent_from_its_start() {
    let pod = FakePod::start("pod-1");
    let gateway = gateway(&[&pod]).await;
    let keyed = |key: &str| format!("{NDJSON}idempotency-key: {key}\r\n");
    let mut answers = Vec::new();
    for key in ["load 1", "load 1", "load 2"] {
        let (status, answer) = post(&gateway, &keyed(key), b"{}\n{}\n").await;
        assert_eq!(status, 200, "{answer}");
        answers.push(answer);
        pod.tell(|memory| memory.next_offset = 2);
    }
    assert_eq!(answers[0], answers[1]);
    let opens = pod.see(|memory| memory.opens.clone());
    assert!(
        opens[0].name.starts_with("post/") && opens[0].name.len() == "post/".len() + 36,
        "{:?}",
        opens[0]
    );
    assert_eq!(opens[0].name, opens[1].name);
    assert_ne!(opens[0].name, opens[2].name);
    assert!(
        opens.iter().all(|open| open.resume_at == Some(0) && open.session == 0 && open.stream.is_empty())
    );
    for bad in [keyed(""), keyed(&"k".repeat(300)), format!("{}idempotency-key: b\r\n", keyed("a"))] {
        check_error(post(&gateway, &bad, b"{}").await, (400, "invalid_idempotency_key"));
    }
}

#[tokio::test]
async fn what_the_pod_says_comes_with_its_status() {
    let pod = FakePod::start("pod-1");
    let gateway = gateway(&[&pod]).await;
    let wait = std::time::Duration::from_millis(1500);
    for (error, expected) in [
        (Error::fenced("a newer session owns the stream"), (409, "fenced")),
        (Error::not_found("table_not_found", "no such table: create it first"), (404, "table_not_found")),
        (Error::busy("wal_full", "the log of pod-1 is full of records", wait), (429, "wal_full")),
    ] {
        pod.tell(|memory| memory.open_failures.push_back(error));
        let length = "{}\n".len();
        let mut socket = TcpStream::connect(gateway.address()).await.expect("connects");
        let request = format!(
            "POST {PATH} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{NDJSON}content-length: {length}\r\n\r\n{{}}\n"
        );
        socket.write_all(request.as_bytes()).await.expect("sends");
        let answer = Posting { socket }.head_and_body().await;
        assert_eq!(answer.contains("retry-after: 2\r\n"), expected.0 == 429, "{answer}");
        let (status, body) = split(&answer);
        check_error((status, from_chunks(&body)), expected);
    }
}

#[tokio::test]
async fn heads_that_cannot_be_taken_are_refused_before_the_body() {
    let pod = FakePod::start("pod-1");
    let gateway = gateway(&[&pod]).await;
    let none = post(&gateway, "", b"{}").await;
    assert!(
        none.1["error"]["message"].as_str().is_some_and(|message| message.contains("text/csv")),
        "{none:?}"
    );
    check_error(none, (415, "unsupported_type"));
    let form = "content-type: application/x-www-form-urlencoded\r\n";
    check_error(post(&gateway, form, &vec![b'x'; 3 << 20]).await, (415, "unsupported_type"));
    let brotli = format!("{NDJSON}content-encoding: br\r\n");
    check_error(post(&gateway, &brotli, b"{}").await, (415, "unsupported_encoding"));
    for query in ["wait=never", "wiat=durable", "unknown=maybe"] {
        let path = format!("{PATH}?{query}");
        check_error(post_at(&gateway, &path, NDJSON, b"{}").await, (400, "invalid_query"));
    }
    check_error(
        post_at(&gateway, "/v1/tables/a..b/records", NDJSON, b"{}").await,
        (400, "invalid_table_name"),
    );
    assert!(pod.see(|memory| memory.opens.is_empty()));
    let name = "sluice_gateway_errors_total{code=\"unsupported_type\"}";
    assert_eq!(metric(gateway.address(), name).await, 2);
}

#[tokio::test]
async fn a_body_that_goes_wrong_leaves_what_came_before_it_durable() {
    let pod = FakePod::start("pod-1");
    let gateway = gateway_with(&[&pod], |config| config.frame_bytes_max.0 = 2048).await;
    let long = [b"{}\n{}\n", &vec![b'x'; 5000][..], b"\n{}\n"].concat();
    let (status, answer) = post(&gateway, NDJSON, &long).await;
    assert_eq!((&answer["error"]["offset"], &answer["durable"]), (&json!(2), &json!(1)), "{answer}");
    check_error((status, answer), (400, "record_too_large"));
    let json = "content-type: application/json\r\n";
    let (status, answer) = post(&gateway, json, b"[{\"a\":1},{\"a\":2").await;
    assert_eq!((&answer["error"]["offset"], &answer["durable"]), (&json!(1), &json!(0)), "{answer}");
    check_error((status, answer), (400, "invalid_json"));
}

#[tokio::test]
async fn a_body_that_is_cut_off_is_no_whole_body() {
    let pod = FakePod::start("pod-1");
    let gateway = gateway(&[&pod]).await;
    let mut posting = Posting::begin(&gateway, PATH, NDJSON).await;
    posting.send(b"{\"a\":1}\n{\"a\":2").await;
    pod.until("a record", |memory| memory.records() == 1).await;
    posting.socket.shutdown().await.expect("shuts down");
    let (status, answer) = posting.answer().await;
    assert_eq!((&answer["error"]["offset"], &answer["durable"]), (&json!(1), &json!(0)), "{answer}");
    check_error((status, answer), (400, "body_cut_off"));
    let mut posting = Posting::begin(&gateway, PATH, NDJSON).await;
    posting.send(b"{\"a\":3}\n{\"a\":4").await;
    pod.until("two records", |memory| memory.records() == 2).await;
    posting.socket.set_zero_linger().expect("sets an option");
    drop(posting);
    while metric(gateway.address(), "sluice_gateway_streams").await > 0 {
        tokio::task::yield_now().await;
    }
    assert_eq!(lines(&pod), ["{\"a\":1}", "{\"a\":3}"]);
}

#[tokio::test]
async fn a_body_that_does_not_come_is_not_waited_for() {
    let pod = FakePod::start("pod-1");
    let gateway = gateway_with(&[&pod], |config| config.write_timeout_ms = 200).await;
    let mut posting = Posting::begin(&gateway, PATH, NDJSON).await;
    posting.send(b"{}\n{").await;
    let (status, answer) = posting.answer().await;
    assert_eq!((&answer["error"]["offset"], &answer["durable"]), (&json!(1), &json!(0)), "{answer}");
    check_error((status, answer), (408, "body_timeout"));
}

#[tokio::test]
async fn a_producer_is_not_blamed_while_it_is_not_read() {
    let pod = FakePod::start("pod-1");
    pod.tell(|memory| memory.acks = false);
    let limit = |config: &mut GatewayConfig| {
        (config.write_timeout_ms, config.window_bytes.0) = (300, 4096);
    };
    let gateway = gateway_with(&[&pod], limit).await;
    let mut posting = Posting::begin(&gateway, PATH, NDJSON).await;
    for _ in 0..10 {
        posting.send(&b"{}\n".repeat(1000)).await;
    }
    // Three times as long as a body may bring nothing.
    tokio::time::sleep(std::time::Duration::from_millis(900)).await;
    let sent = pod.see(|memory| memory.records());
    assert!(sent < 10_000, "the window holds {sent} records");
    pod.tell(|memory| memory.acks = true);
    pod.ack(sent).await;
    let (status, answer) = posting.end().await;
    assert_eq!((status, &answer["records"]), (200, &json!(10_000)), "{answer}");
}

#[tokio::test]
async fn the_body_is_asked_for_by_who_expects_that() {
    let pod = FakePod::start("pod-1");
    let gateway = gateway(&[&pod]).await;
    let mut posting = Posting::begin(&gateway, PATH, &format!("{NDJSON}expect: 100-continue\r\n")).await;
    let mut head = [0; 25];
    soon("100", posting.socket.read_exact(&mut head)).await.expect("reads");
    assert_eq!(&head, b"HTTP/1.1 100 Continue\r\n\r\n");
    posting.send(b"{}\n").await;
    assert_eq!(posting.end().await.0, 200);
    let refused = Posting::begin(&gateway, PATH, "expect: 100-continue\r\n").await;
    check_error(refused.answer().await, (415, "unsupported_type"));
}

#[tokio::test]
async fn a_pod_that_is_lost_in_mid_body_shows_as_a_pause() {
    let pod = FakePod::start("pod-1");
    pod.tell(|memory| memory.acks = false);
    let gateway = gateway(&[&pod]).await;
    let mut posting = Posting::begin(&gateway, PATH, &format!("{NDJSON}idempotency-key: k\r\n")).await;
    posting.send(b"{\"a\":1}\n").await;
    pod.until("a record", |memory| memory.records() == 1).await;
    pod.tell(|memory| memory.acks = true);
    pod.break_call().await;
    posting.send(b"{\"a\":2}\n").await;
    let (status, answer) = posting.end().await;
    assert_eq!((status, &answer["records"], &answer["durable"]), (200, &json!(2), &json!(1)), "{answer}");
}

#[tokio::test]
async fn a_gateway_that_goes_away_answers_what_it_has() {
    let pod = FakePod::start("pod-1");
    pod.tell(|memory| memory.acks = false);
    let gateway = gateway(&[&pod]).await;
    let mut half = Posting::begin(&gateway, PATH, NDJSON).await;
    half.send(b"{\"a\":1}\n{\"a\":2").await;
    pod.until("a record", |memory| memory.records() == 1).await;
    let mut whole = Posting::begin(&gateway, PATH, NDJSON).await;
    whole.send(b"{\"a\":3}\n{\"a\":4}\n").await;
    whole.socket.write_all(b"0\r\n\r\n").await.expect("sends");
    pod.until("the finish", |memory| memory.finishes.len() == 1).await;
    let answers = async {
        // The one that has not finished is told first, and its records are made durable.
        pod.until("another finish", |memory| memory.finishes.len() == 2).await;
        for (call, records) in [(0, 1), (1, 2)] {
            pod.answer_on(
                call,
                Answer::Ack(proto::Ack { durable_next: records, committed_next: 0, version: 0 }),
            )
            .await;
            pod.answer_on(call, Answer::Finished(proto::Finished {})).await;
        }
        (half.answer().await, whole.answer().await)
    };
    let draining = gateway.drain(std::time::Duration::from_secs(15));
    let ((), (half, (status, whole))) = tokio::join!(draining, answers);
    assert_eq!((&half.1["durable"], &half.1["error"]["retryable"]), (&json!(0), &json!(true)), "{}", half.1);
    check_error(half, (503, "gateway_draining"));
    assert_eq!((status, &whole["durable"]), (200, &json!(1)), "{whole}");
}

#[tokio::test]
async fn an_insert_is_all_or_an_error_in_the_words_of_zerobus() {
    let pod = FakePod::start("pod-1");
    pod.tell(|memory| memory.refuses = Some("bad"));
    let gateway = gateway(&[&pod]).await;
    let json = "content-type: application/json\r\n";
    assert_eq!(post_at(&gateway, INSERT, json, b"[{\"a\":1},{\"a\":2}]").await, (200, json!({})));
    assert_eq!(
        pod.see(|memory| (memory.records(), memory.opens[0].table.clone())),
        (2, "main.default.flights".into())
    );
    let (status, answer) = post_at(&gateway, INSERT, json, b"[{\"a\":1},\"bad\"]").await;
    assert_eq!((status, &answer["error_code"]), (400, &json!("INVALID_PARAMETER_VALUE")), "{answer}");
    let message = answer["message"].as_str().expect("a message");
    assert!(message.starts_with("record 1: no JSON: \"bad\"; 1 of 2 records"), "{message}");
    for (path, body, status, code) in [
        (INSERT, "{\"a\":1}", 400, "INVALID_PARAMETER_VALUE"),
        (INSERT, "[{\"a\":1}", 400, "INVALID_PARAMETER_VALUE"),
        ("/zerobus/v1/tables/a..b/insert", "[]", 400, "INVALID_PARAMETER_VALUE"),
    ] {
        let (got, answer) = post_at(&gateway, path, json, body.as_bytes()).await;
        assert_eq!((got, &answer["error_code"]), (status, &json!(code)), "{answer}");
    }
    pod.tell(|memory| memory.open_failures.push_back(Error::not_found("table_not_found", "no such table")));
    let (status, answer) = post_at(&gateway, INSERT, json, b"[]").await;
    assert_eq!((status, &answer["error_code"]), (404, &json!("NOT_FOUND")), "{answer}");
}

#[tokio::test]
async fn http_2_carries_posts_too() {
    let pod = FakePod::start("pod-1");
    let gateway = gateway(&[&pod]).await;
    let url = format!("http://{}", gateway.address());
    let endpoint = tonic::transport::Endpoint::from_shared(url).expect("a URL");
    let channel = soon("the handshake", endpoint.connect()).await.expect("HTTP/2");
    let chunks = ["{}\n{", "}\n"].map(Ok::<_, std::convert::Infallible>);
    let body = Body::from_stream(futures_util::stream::iter(chunks));
    let request = http::Request::post(PATH).header("content-type", "application/x-ndjson");
    let request = request.body(tonic::body::Body::new(body)).expect("a request");
    let response = soon("the answer", channel.oneshot(request)).await.expect("an answer");
    assert_eq!(response.status(), 200);
    let body = axum::body::to_bytes(Body::new(response.into_body()), 10_000).await.expect("a body");
    assert_eq!(serde_json::from_slice::<Value>(&body).expect("JSON")["records"], 2);
}

/// Bytes of memory that this process has ever held, or holds now.
fn memory_bytes(field: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("a process");
    let line = status.lines().find_map(|line| line.strip_prefix(field)).expect("its memory");
    line.trim().trim_end_matches("kB").trim().parse::<u64>().expect("a number of kB") << 10
}

#[tokio::test]
async fn a_body_of_any_length_takes_little_memory() {
    const BODY_BYTES: usize = 200 << 20;
    const GROWTH_BYTES_MAX: u64 = 64 << 20;
    let pod = FakePod::start("pod-1");
    pod.tell(|memory| memory.forgets = true);
    let gateway = gateway(&[&pod]).await;
    let line = format!("{{\"s\":\"{}\"}}\n", "x".repeat(1011));
    let chunk = line.repeat(256);
    let mut bomb = GzEncoder::new(Vec::new(), Compression::fast());
    (0..200).for_each(|_| bomb.write_all(chunk.as_bytes()).expect("written"));
    let bomb = bomb.finish().expect("written");
    let before = memory_bytes("VmRSS:");
    let mut posting = Posting::begin(&gateway, PATH, NDJSON).await;
    let chunks = BODY_BYTES / chunk.len();
    for _ in 0..chunks {
        posting.send(chunk.as_bytes()).await;
    }
    let (status, answer) = posting.end().await;
    assert_eq!((status, answer["records"].as_u64()), (200, Some(256 * chunks as u64)), "{answer}");
    let headers = format!("{NDJSON}content-encoding: gzip\r\n");
    let (status, answer) = post(&gateway, &headers, &bomb).await;
    assert_eq!((status, answer["records"].as_u64()), (200, Some(200 * 256)), "{answer}");
    let grown = memory_bytes("VmHWM:").saturating_sub(before);
    assert!(grown < GROWTH_BYTES_MAX, "grew by {} MiB", grown >> 20);
}
