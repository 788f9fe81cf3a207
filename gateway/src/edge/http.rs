//! HTTP: paths, tables, health, metrics, and the upgrade to WebSocket. Every error is JSON: `{"error":{…}}`.
//!
//! *Owns*: paths, headers, statuses.
//! *Does not own*: what comes after the upgrade (`websocket`), posts of records (`post`), what a table is (the pods).

use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::rejection::PathRejection;
use axum::extract::{Extension, FromRequestParts, Path, Request, State};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use bytes::Bytes;
use http::header::{
    CONNECTION, CONTENT_TYPE, HeaderMap, HeaderName, RETRY_AFTER, SEC_WEBSOCKET_ACCEPT, SEC_WEBSOCKET_KEY,
    SEC_WEBSOCKET_PROTOCOL, SEC_WEBSOCKET_VERSION, UPGRADE, WWW_AUTHENTICATE,
};
use http::{HeaderValue, Method, StatusCode, Uri, Version};
use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use serde_json::{Value, json};
use sluice_shared::error::{Error, ErrorKind};
use sluice_shared::frame::{SUBPROTOCOL, UnknownFields};
use sluice_shared::ids::TableName;
use tokio_tungstenite::tungstenite::handshake::derive_accept_key;
use tower::ServiceExt;

use crate::app::{App, Connection};
use crate::auth::{Credential, Privilege};
use crate::edge::heads::Http1Socket;
use crate::edge::zerobus::flight::{self, Flight};
use crate::edge::zerobus::{self, Zerobus};
use crate::edge::{catalog, grpc, oidc, otlp, post as posts, websocket};
use crate::session::going_away;

/// A table spec is a schema and some properties.
const SPEC_BYTES_MAX: usize = 1 << 20;
const BODY_TIMEOUT: Duration = Duration::from_secs(30);
/// Base64 of the 16 bytes that RFC 6455 asks for.
const WEBSOCKET_KEY_CHARS: usize = 24;
const JSON: HeaderValue = HeaderValue::from_static("application/json");
pub(crate) const METRICS: HeaderValue = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
const TABLES: &str = "/v1/tables/";

const ABOUT: &str = "\
Sluice: streams of records into Delta Lake tables, in order, exactly once.

Send, with any WebSocket tool:
  ws://HOST/v1/tables/TABLE/stream
  a text message is one JSON object, an array of them, or one a line;
  the answers are {\"durable\":N} and {\"committed\":N,\"version\":V}: records 0 to N are safe, or in the table.
  ?name=NAME makes a stream that can be resumed; ?unknown=ignore drops fields that the table does not have.

Or in one go:
  POST /v1/tables/TABLE/records (NDJSON, JSON, CSV or an Arrow IPC stream, by Content-Type; gzip or zstd)
  ?wait=committed answers when all is in the table; an Idempotency-Key makes it safe to send again.

OpenTelemetry: OTLP over gRPC, or POST /v1/logs   POST /v1/traces   POST /v1/metrics

Tables:  GET /v1/tables   GET /v1/tables/TABLE   PUT /v1/tables/TABLE (a table spec in JSON)
State:   GET /healthz   GET /readyz   GET /metrics
Tokens:  POST /oidc/v1/token (grant_type=client_credentials), then Authorization: Bearer TOKEN, where clients are configured
";

/// All paths.
pub(crate) fn router(app: Arc<App>) -> Router {
    let read_timeout = app.config.read_timeout();
    let grpc = move |request: Request| grpc::watched(request, read_timeout);
    Router::new()
        .route("/", get(async || ABOUT))
        .route("/healthz", get(async || "ok\n"))
        .route("/readyz", get(ready))
        .route("/metrics", get(metrics))
        .route("/v1/tables", get(list_tables))
        .route("/v1/tables/{table}", get(describe_table).put(create_table))
        .route("/v1/tables/{table}/stream", get(stream))
        .route("/v1/tables/{table}/records", post(posts::records))
        .route("/zerobus/v1/tables/{table}/insert", post(posts::insert))
        .route("/oidc/v1/token", post(oidc::token))
        .route("/api/2.1/unity-catalog/tables/{table}", get(catalog::table))
        .route_service(zerobus::PATH, Zerobus::server(Arc::clone(&app)).map_request(grpc))
        .route_service(flight::PATH, Flight::server(Arc::clone(&app)).map_request(grpc))
        .merge(otlp::routes(&app))
        .fallback(unknown_path)
        .method_not_allowed_fallback(unknown_method)
        .with_state(app)
}

/// Upgrades whatever comes, to an echo.
pub(crate) fn echo_router(app: Arc<App>) -> Router {
    Router::new().fallback(echo).with_state(app)
}

/// An error with the status and headers that HTTP has for it.
pub(crate) struct Refusal {
    pub(super) error: Box<Error>,
    pub(crate) status: StatusCode,
    pub(super) header: Option<(HeaderName, HeaderValue)>,
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        let status =
            StatusCode::from_u16(error.kind.http_status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        // Whole seconds, rounded up: a caller that obeys must not come too early.
        let mut header = error.retry_after_ms.map(|ms| (RETRY_AFTER, HeaderValue::from(ms.div_ceil(1000))));
        if error.kind == ErrorKind::Unauthorized {
            header = Some((WWW_AUTHENTICATE, HeaderValue::from_static("Bearer realm=\"sluice\"")));
        }
        Self { error: Box::new(error), status, header }
    }
}

impl Refusal {
    pub(crate) fn with(code: &str, message: impl Into<String>, status: StatusCode) -> Self {
        Self { error: Box::new(Error::invalid(code, message)), status, header: None }
    }

    /// Answers with a body of its own.
    pub(super) fn respond(self, body: Value) -> Response {
        let mut response = json_response(body.to_string());
        *response.status_mut() = self.status;
        response.headers_mut().extend(self.header);
        response.extensions_mut().insert(Code(*self.error));
        response
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let body = json!({ "error": self.error });
        self.respond(body)
    }
}

/// Rides on a refusal's response to where errors are counted.
#[derive(Clone)]
pub(crate) struct Code(pub(crate) Error);

pub(crate) fn json_response(body: impl Into<Body>) -> Response {
    ([(CONTENT_TYPE, JSON)], body.into()).into_response()
}

async fn ready(State(app): State<Arc<App>>) -> Result<&'static str, Refusal> {
    if app.scope.is_draining() {
        return Err(going_away().into());
    }
    let ready = app.upstream.is_ready().await;
    let message =
        "no pod answers: streams cannot be opened; see cluster.seeds or gateway.pods, and whether they run";
    ready.then_some("ready\n").ok_or_else(|| Error::unavailable("no_pod_answers", message).into())
}

async fn metrics(State(app): State<Arc<App>>) -> impl IntoResponse {
    ([(CONTENT_TYPE, METRICS)], app.metrics.text())
}

/// Those that the caller may describe.
async fn list_tables(State(app): State<Arc<App>>, headers: HeaderMap) -> Result<Response, Refusal> {
    let access = app.auth.access(&Credential::of(&headers))?;
    let may_know =
        |name: &String| name.parse().is_ok_and(|table: TableName| access.allows(&table, Privilege::Describe));
    let tables: Vec<String> = app.upstream.list_tables().await?.into_iter().filter(may_know).collect();
    Ok(json_response(json!({ "tables": tables }).to_string()))
}

async fn describe_table(
    State(app): State<Arc<App>>,
    Granted { table, .. }: Granted<ToDescribe>,
) -> Result<Response, Refusal> {
    Ok(json_response(app.upstream.describe_table_in_pool(&table).await?))
}

async fn create_table(
    State(app): State<Arc<App>>,
    Granted { table, .. }: Granted<ToCreate>,
    request: Request,
) -> Result<Response, Refusal> {
    let spec = read_spec(request.into_body()).await?;
    // Two that make the same table at one time may both be told that they did.
    let existed = app.upstream.describe_table(&table).await.is_ok();
    let description = app.upstream.create_table(&table, spec).await?;
    let status = if existed { StatusCode::OK } else { StatusCode::CREATED };
    Ok((status, json_response(description)).into_response())
}

async fn read_spec(body: Body) -> Result<Bytes, Refusal> {
    // A length that is stated is believed, so that nobody sends in vain.
    let stated = hyper::body::Body::size_hint(&body).lower();
    if stated > SPEC_BYTES_MAX as u64 {
        let message = format!("table spec of {stated} bytes: the limit is {SPEC_BYTES_MAX}");
        return Err(Refusal::with("spec_too_large", message, StatusCode::PAYLOAD_TOO_LARGE));
    }
    let limited = axum::body::to_bytes(body, SPEC_BYTES_MAX);
    let Ok(read) = tokio::time::timeout(BODY_TIMEOUT, limited).await else {
        let message = format!("the table spec did not arrive within {BODY_TIMEOUT:?}");
        return Err(Refusal::with("body_timeout", message, StatusCode::REQUEST_TIMEOUT));
    };
    read.map_err(|error| {
        let message = format!("cannot read the table spec (at most {SPEC_BYTES_MAX} bytes): {error}");
        Refusal::with("unreadable_body", message, StatusCode::PAYLOAD_TOO_LARGE)
    })
}

async fn unknown_path(uri: Uri) -> Refusal {
    let path = uri.path();
    // Below tables only a name that is none leads here: an empty one, or one with a slash.
    if let Some(name) = path.strip_prefix(TABLES) {
        let name = name.strip_suffix("/stream").or_else(|| name.strip_suffix("/records")).unwrap_or(name);
        if let Err(error) = name.parse::<TableName>() {
            return Error::from(error).into();
        }
    }
    let shown: String = path.chars().take(100).collect();
    Error::not_found("unknown_path", format!("no such path: {shown:?}; GET / lists what there is")).into()
}

async fn unknown_method(method: Method, uri: Uri) -> Refusal {
    let message = format!("{method} is not for {:?}; GET / lists what there is", uri.path());
    Refusal::with("method_not_allowed", message, StatusCode::METHOD_NOT_ALLOWED)
}

/// The table that a path names, with the caller's right to `P`: what HTTP asks of tables is judged here. Who has no valid
/// token hears nothing of the name.
pub(super) struct Granted<P> {
    pub(super) table: TableName,
    privilege: PhantomData<P>,
}

/// A privilege as a type, so that each handler says what it needs.
pub(super) trait Needed: Send {
    const PRIVILEGE: Privilege;
}

pub(super) struct ToDescribe;
pub(super) struct ToCreate;
pub(super) struct ToWrite;

impl Needed for ToDescribe {
    const PRIVILEGE: Privilege = Privilege::Describe;
}

impl Needed for ToCreate {
    const PRIVILEGE: Privilege = Privilege::Create;
}

impl Needed for ToWrite {
    const PRIVILEGE: Privilege = Privilege::Write;
}

impl<P: Needed> FromRequestParts<Arc<App>> for Granted<P> {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut http::request::Parts, app: &Arc<App>) -> Result<Self, Refusal> {
        let access = app.auth.access(&Credential::of(&parts.headers))?;
        let Table(table) = Table::from_request_parts(parts, app).await?;
        access.check(&table, P::PRIVILEGE)?;
        Ok(Self { table, privilege: PhantomData })
    }
}

/// The table that a path names.
struct Table(TableName);

impl<S: Send + Sync> FromRequestParts<S> for Table {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut http::request::Parts, state: &S) -> Result<Self, Refusal> {
        let name: Result<Path<String>, PathRejection> = Path::from_request_parts(parts, state).await;
        let Path(name) = name.map_err(|error| Error::invalid("invalid_table_name", error.body_text()))?;
        Ok(Self(name.parse().map_err(Error::from)?))
    }
}

/// What may stand after the `?` of a stream's URL.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct StreamQuery {
    name: Option<String>,
    resume_at: Option<u64>,
    #[serde(default)]
    unknown: UnknownFields,
}

async fn stream(
    State(app): State<Arc<App>>,
    Extension(connection): Extension<Connection>,
    table: Table,
    mut request: Request,
) -> Result<Response, Refusal> {
    let query = axum::extract::Query::<StreamQuery>::try_from_uri(request.uri()).map_err(|error| {
        let known = "known are name=…, resume_at=… and unknown=ignore or unknown=refuse";
        let message = format!("{}; {known}", error.body_text());
        Error::invalid("invalid_query", message)
    })?;
    let name = query.0.name.as_deref().map(str::parse).transpose().map_err(Error::from)?;
    let key = websocket_key(request.version(), request.headers())?;
    let framed = offers_subprotocol(request.headers());
    let credential = Credential::of(request.headers());
    // Whoever has a frame to say it in may; all others are judged before the upgrade.
    if !framed || credential.is_given() {
        app.auth.check(&credential, &table.0, Privilege::Write)?;
    }
    if app.scope.is_draining() {
        return Err(going_away().into());
    }
    let upgrade = hyper::upgrade::on(&mut request);
    let StreamQuery { resume_at, unknown, .. } = query.0;
    let stream = websocket::Request { table: table.0, name, resume_at, unknown, credential, framed };
    let scope = app.scope.clone();
    scope.spawn("stream", upgraded(upgrade, Some(stream), app, connection));
    Ok(switching_protocols(&key, framed))
}

async fn echo(
    State(app): State<Arc<App>>,
    Extension(connection): Extension<Connection>,
    mut request: Request,
) -> Result<Response, Refusal> {
    let key = websocket_key(request.version(), request.headers())?;
    let upgrade = hyper::upgrade::on(&mut request);
    let scope = app.scope.clone();
    scope.spawn("echo", upgraded(upgrade, None, app, connection));
    Ok(switching_protocols(&key, false))
}

/// Serves a stream, or an echo where there is none.
async fn upgraded(
    upgrade: OnUpgrade,
    stream: Option<websocket::Request>,
    app: Arc<App>,
    connection: Connection,
) {
    let Ok(Ok(upgraded)) = tokio::time::timeout(app.config.handshake_timeout(), upgrade).await else {
        tracing::debug!("a connection was lost during its upgrade");
        return;
    };
    // What is read ahead is copied: hyper's buffer must not be held as long as the stream.
    let (socket, buffered) = match upgraded.downcast::<TokioIo<Http1Socket>>() {
        Ok(parts) => (parts.io.into_inner().socket, parts.read_buf.to_vec()),
        Err(upgraded) => return refuse_socket(upgraded),
    };
    match stream {
        // Apart, so that the room that the upgrade took is given back.
        Some(stream) => Box::pin(websocket::serve(socket, buffered, stream, app)).await,
        None => Box::pin(websocket::echo::serve(socket, buffered, app)).await,
    }
    drop(connection);
}

/// `tcp` hands hyper these sockets and no others.
fn refuse_socket(upgraded: Upgraded) {
    tracing::error!(?upgraded, "upgraded a connection that is not the socket that was accepted");
}

fn switching_protocols(key: &str, framed: bool) -> Response {
    let mut response = StatusCode::SWITCHING_PROTOCOLS.into_response();
    let headers = response.headers_mut();
    headers.insert(CONNECTION, HeaderValue::from_static("Upgrade"));
    headers.insert(UPGRADE, HeaderValue::from_static("websocket"));
    if let Ok(accept) = HeaderValue::from_str(&derive_accept_key(key.as_bytes())) {
        headers.insert(SEC_WEBSOCKET_ACCEPT, accept);
    }
    if framed {
        headers.insert(SEC_WEBSOCKET_PROTOCOL, HeaderValue::from_static(SUBPROTOCOL));
    }
    response
}

/// Checks the headers of an upgrade (RFC 6455 section 4.2.1) and answers the producer's key.
fn websocket_key(version: Version, headers: &HeaderMap) -> Result<String, Refusal> {
    let upgrades = has_token(headers, CONNECTION, "upgrade") && has_token(headers, UPGRADE, "websocket");
    if !upgrades || version != Version::HTTP_11 {
        let message = "this path speaks WebSocket: send GET over HTTP/1.1 with `Connection: Upgrade` and \
                       `Upgrade: websocket`";
        let mut refusal = Refusal::with("upgrade_required", message, StatusCode::UPGRADE_REQUIRED);
        refusal.header = Some((UPGRADE, HeaderValue::from_static("websocket")));
        return Err(refusal);
    }
    if !has_token(headers, SEC_WEBSOCKET_VERSION, "13") {
        let message = "WebSocket version is not 13: send `Sec-WebSocket-Version: 13`";
        let mut refusal = Refusal::with("websocket_version", message, StatusCode::UPGRADE_REQUIRED);
        refusal.header = Some((SEC_WEBSOCKET_VERSION, HeaderValue::from_static("13")));
        return Err(refusal);
    }
    let key = headers.get(SEC_WEBSOCKET_KEY).and_then(|key| key.to_str().ok());
    let valid = key.filter(|key| key.len() == WEBSOCKET_KEY_CHARS && key.ends_with("=="));
    let message = "`Sec-WebSocket-Key` must be base64 of 16 bytes, 24 characters";
    valid.map(str::to_owned).ok_or_else(|| Error::invalid("websocket_key", message).into())
}

/// Whether the producer can speak `sluice.v1`. One that offers only others gets plain JSON.
fn offers_subprotocol(headers: &HeaderMap) -> bool {
    tokens(headers, SEC_WEBSOCKET_PROTOCOL).any(|token| token == SUBPROTOCOL)
}

fn has_token(headers: &HeaderMap, name: HeaderName, wanted: &str) -> bool {
    tokens(headers, name).any(|token| token.eq_ignore_ascii_case(wanted))
}

fn tokens(headers: &HeaderMap, name: HeaderName) -> impl Iterator<Item = &str> {
    let values = headers.get_all(name).into_iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).map(str::trim).collect::<Vec<_>>().into_iter()
}
