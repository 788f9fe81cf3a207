//! The admin API: the pool as this gateway sees it, and the wishes that it passes on to the pods.
//!
//! Each pod owns its phase: a drain or a join is a call to that pod, and any gateway can make it. The API has a listener of
//! its own, which producers do not reach.
//!
//! *Owns*: its listener, paths, parameters, what is shown.
//! *Does not own*: the pool (`upstream`), what a drain is (`pod/src/duty.rs`).
//! Keeps P7: its connections are bounded, no request's body is read, and who says nothing is closed.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::rejection::{PathRejection, QueryRejection};
use axum::extract::{FromRequestParts, Path, Query, Request, State};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, get, post};
use futures_util::StreamExt;
use futures_util::future::join_all;
use futures_util::stream::FuturesUnordered;
use http::header::{AUTHORIZATION, CONTENT_TYPE, ORIGIN};
use http::{Method, StatusCode, Uri};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use sluice_shared::error::{Error, ErrorKind};
use sluice_shared::ids::{PodId, TableName};
use sluice_shared::lifecycle::Phase;
use sluice_shared::link::Wire;
use sluice_shared::membership::{Members, PodMember};
use sluice_shared::proto::{DrainRequest, JoinRequest, PodStatus, ReleaseRequest, StatusRequest};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout};
use tower::ServiceExt;

use crate::app::App;
use crate::auth::SecretHash;
use crate::edge::http::{METRICS, Refusal, json_response};
use crate::placement::StreamHints;
use crate::socket::{Counted, Socket};

/// Connections at one time; beyond, they wait in the kernel. Few people and programs ask.
const CONNECTIONS_MAX: usize = 64;
/// Of a request's head.
const HEAD_BYTES_MAX: usize = 16 << 10;
/// After an accept that failed, mostly for lack of file descriptors: until some may be free again.
const ACCEPT_PAUSE: Duration = Duration::from_secs(1);
/// How long a pod may take to answer.
const POD_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest piece of a request that a message repeats, in characters.
const SHOWN_CHARS: usize = 100;
/// Streams in one answer.
const STREAMS_SHOWN_MAX: usize = 10_000;
/// What a pod that is past its drain answers to a join (`pod/src/duty.rs`).
const POD_ENDED: &str = "pod_ended";
/// What a pod answers to a release of what is there, or holds nothing (`pod/src/release.rs`).
const NOT_LOST: [&str; 3] = ["log_in_use", "log_is_empty", "log_is_whole"];
const OPENAPI: &str = include_str!("admin/openapi.json");

/// Serves the API where the configuration says; None where it says nowhere.
///
/// # Errors
/// `Unavailable` where the address cannot be had.
pub(crate) async fn start(app: &Arc<App>) -> Result<Option<SocketAddr>, Error> {
    let Some(listen) = app.config.admin_address() else { return Ok(None) };
    let cannot = |error: std::io::Error| {
        let message = format!("cannot listen on {listen:?} (gateway.admin_listen): {error}");
        Error::unavailable("cannot_listen", message)
    };
    let listener = TcpListener::bind(&listen).await.map_err(cannot)?;
    let address = listener.local_addr().map_err(cannot)?;
    tracing::info!(%address, "admin API listens");
    app.background.spawn("admin", accept(listener, router(Arc::clone(app)), Arc::clone(app)));
    Ok(Some(address))
}

/// Serves connections until the gateway has drained.
async fn accept(listener: TcpListener, router: Router, app: Arc<App>) {
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        let accepted = tokio::select! {
            biased; // the end first
            () = app.background.cancelled() => return,
            accepted = next(&listener, &places) => accepted,
        };
        match accepted {
            Ok((tcp, place)) => {
                let serving = serve(tcp, place, router.clone(), Arc::clone(&app));
                app.background.spawn("admin connection", serving);
            }
            Err(error) => {
                tracing::warn!(%error, "the admin API cannot accept connections");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

async fn next(
    listener: &TcpListener,
    places: &Arc<Semaphore>,
) -> std::io::Result<(TcpStream, OwnedSemaphorePermit)> {
    let place = Arc::clone(places).acquire_owned().await.map_err(std::io::Error::other)?;
    Ok((listener.accept().await?.0, place))
}

/// One connection, for as long as its client asks, and takes what is answered.
async fn serve(tcp: TcpStream, place: OwnedSemaphorePermit, router: Router, app: Arc<App>) {
    let socket = TokioIo::new(Socket::plain(Counted::new(Wire::Tcp(tcp)), app.config.write_timeout()));
    let mut builder = http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(app.config.handshake_timeout())
        .max_buf_size(HEAD_BYTES_MAX);
    let service =
        hyper::service::service_fn(move |request: http::Request<Incoming>| router.clone().oneshot(request));
    tokio::select! {
        biased; // the end first
        () = app.background.cancelled() => {}
        served = builder.serve_connection(socket, service) => {
            if let Err(error) = served {
                tracing::debug!(%error, "a connection of the admin API ended");
            }
        }
    }
    drop(place);
}

/// All paths that need the secret, where there is one.
fn routes() -> [(&'static str, &'static str, MethodRouter<Arc<App>>); 9] {
    [
        ("get", "/v1/pods", get(list_pods)),
        ("get", "/v1/pods/{pod}", get(show_pod)),
        ("post", "/v1/pods/{pod}/drain", post(drain)),
        ("post", "/v1/pods/{pod}/join", post(join)),
        ("get", "/v1/streams", get(list_streams)),
        ("get", "/v1/tables", get(list_tables)),
        ("get", "/v1/explain", get(explain)),
        ("post", "/v1/release", post(release)),
        ("get", "/metrics", get(metrics)),
    ]
}

/// All paths that need none.
fn open_routes() -> [(&'static str, &'static str, MethodRouter<Arc<App>>); 2] {
    [
        ("get", "/healthz", get(async || "ok\n")),
        ("get", "/openapi.json", get(async || json_response(OPENAPI))),
    ]
}

fn router(app: Arc<App>) -> Router {
    let authorized = middleware::from_fn_with_state(Arc::clone(&app), authorized);
    let add = |router: Router<Arc<App>>, (_, path, route)| router.route(path, route);
    let secret = routes().into_iter().fold(Router::new(), add);
    let secret = secret.route_layer(authorized).route_layer(middleware::from_fn(no_page));
    let all = open_routes().into_iter().fold(secret, add);
    all.fallback(unknown_path).method_not_allowed_fallback(unknown_method).with_state(app)
}

/// Lets in who knows the secret, where there is one.
async fn authorized(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let Some(expected) = &app.config.admin_secret_sha256 else { return next.run(request).await };
    let token = request.headers().get(AUTHORIZATION).and_then(|value| value.to_str().ok());
    let bearer = token.and_then(|value| value.split_once(' '));
    let token =
        bearer.filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer")).map(|(_, token)| token.trim());
    if token.is_some_and(|token| SecretHash::of(token) == *expected) {
        return next.run(request).await;
    }
    let message =
        "the admin API needs its secret (gateway.admin_secret_sha256): Authorization: Bearer SECRET";
    Refusal::from(Error::unauthorized("admin_secret", message)).into_response()
}

/// Browsers say for which page they send a request, and send a plain POST for any page whatever: one that an operator
/// looks at must not drain the pool.
async fn no_page(request: Request, next: Next) -> Response {
    let Some(origin) = request.headers().get(ORIGIN).filter(|_| !request.method().is_safe()) else {
        return next.run(request).await;
    };
    let shown: String = String::from_utf8_lossy(origin.as_bytes()).chars().take(SHOWN_CHARS).collect();
    let message =
        format!("pages, such as {shown:?}, may change nothing here: ask by `sluice`, or without a browser");
    Refusal::with("origin_not_allowed", message, StatusCode::FORBIDDEN).into_response()
}

async fn unknown_path(uri: Uri) -> Refusal {
    let shown: String = uri.path().chars().take(SHOWN_CHARS).collect();
    let message = format!("the admin API has no {shown:?}: see /openapi.json");
    Refusal::from(Error::not_found("not_found", message))
}

async fn unknown_method(method: Method, uri: Uri) -> Refusal {
    let message = format!("{method} is not for {:?}: see /openapi.json", uri.path());
    Refusal::with("method_not_allowed", message, StatusCode::METHOD_NOT_ALLOWED)
}

async fn metrics(State(app): State<Arc<App>>) -> Response {
    ([(CONTENT_TYPE, METRICS)], app.metrics.text()).into_response()
}

/// Query parameters; what is wrong with them is told as every error is.
struct Asked<T>(T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequestParts<S> for Asked<T> {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut http::request::Parts, state: &S) -> Result<Self, Refusal> {
        let asked = Query::<T>::from_request_parts(parts, state).await;
        asked.map(|Query(asked)| Self(asked)).map_err(|error: QueryRejection| {
            let message = format!("query parameters of {}: {}", parts.uri.path(), error.body_text());
            Error::invalid("invalid_query", message).into()
        })
    }
}

/// The name in a path, whatever it is.
struct Named(String);

impl<S: Send + Sync> FromRequestParts<S> for Named {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut http::request::Parts, state: &S) -> Result<Self, Refusal> {
        let named = Path::<String>::from_request_parts(parts, state).await;
        named.map(|Path(name)| Self(name)).map_err(|error: PathRejection| {
            Error::invalid("invalid_path", format!("the pod in the path: {}", error.body_text())).into()
        })
    }
}

async fn list_pods(State(app): State<Arc<App>>) -> Response {
    let members = app.upstream.members();
    let pods = join_all(members.pods.iter().map(async |(id, pod)| match pod.is_heard {
        true => pod_json(id, pod),
        false => unheard(id, pod, status(&app, id).await),
    }));
    let pods = pods.await;
    json_response(json!({ "gateways": members.gateways.len().max(1), "pods": pods }).to_string())
}

async fn show_pod(State(app): State<Arc<App>>, Named(pod): Named) -> Result<Response, Refusal> {
    let (id, members) = find(&app, &pod)?;
    if !members.pods[&id].is_heard {
        return Ok(json_response(unheard(&id, &members.pods[&id], status(&app, &id).await).to_string()));
    }
    let status = if members.pods[&id].lost.is_some() { None } else { status(&app, &id).await.ok() };
    Ok(json_response(with_status(&id, &members.pods[&id], status).to_string()))
}

/// How a drain is to go.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct DrainQuery {
    /// Such as `60s`, `500ms`, `2m`; seconds without a unit.
    deadline: Option<String>,
    /// Streams in a second.
    pace: Option<f64>,
    /// The last active pod, too.
    #[serde(default)]
    force: bool,
}

async fn drain(
    State(app): State<Arc<App>>,
    Named(pod): Named,
    Asked(query): Asked<DrainQuery>,
) -> Result<Response, Refusal> {
    let (id, members) = find(&app, &pod)?;
    let deadline_ms = query.deadline.as_deref().map(duration_ms).transpose()?.unwrap_or(0);
    if let Some(pace) = query.pace.filter(|pace| !(pace.is_finite() && *pace > 0.0)) {
        let message =
            format!("pace is {pace}: expected how many streams a second leave the pod, more than 0");
        return Err(Error::invalid("invalid_pace", message).into());
    }
    if !query.force && members.pods[&id].is(Phase::Active) && !has_others(&app, &members, &id).await {
        let message = format!(
            "pod {id} is the last one that takes streams: its producers would have nowhere to go; start another one \
             first, or say force=true"
        );
        return Err(Refusal::with("last_pod", message, StatusCode::CONFLICT));
    }
    if members.pods[&id].state.phase.is_over() {
        return Ok(accepted(&id, &members, None));
    }
    let mut client = app.upstream.client(&id).map_err(|error| gone(&id, &error))?;
    let streams_per_s = query.pace.unwrap_or(0.0);
    let request = DrainRequest { deadline_ms, streams_per_s, force: query.force };
    let status = answered(&id, client.drain(request)).await?;
    tracing::info!(pod = %id, deadline_ms, pace = query.pace, "pod was asked to drain");
    Ok(accepted(&id, &members, Some(status)))
}

/// Whether another pod takes streams. It is asked: one that was told to drain a moment ago is active still as far as
/// was heard.
async fn has_others(app: &App, members: &Members, id: &PodId) -> bool {
    let others = members.pods.iter().filter(|(other, pod)| *other != id && pod.is(Phase::Active));
    let mut asked: FuturesUnordered<_> = others.map(|(other, _)| status(app, other)).collect();
    while let Some(answer) = asked.next().await {
        if answer.is_ok_and(|status| status.phase == Phase::Active.to_string()) {
            return true;
        }
    }
    false
}

async fn join(State(app): State<Arc<App>>, Named(pod): Named) -> Result<Response, Refusal> {
    let (id, members) = find(&app, &pod)?;
    if members.pods[&id].state.phase.is_over() {
        let message = format!("pod {id} has drained: start it again to let it in");
        return Err(Refusal::with(POD_ENDED, message, StatusCode::CONFLICT));
    }
    let mut client = app.upstream.client(&id).map_err(|error| gone(&id, &error))?;
    let status = answered(&id, client.join(JoinRequest {})).await.map_err(|error| {
        let is_late = error.code == POD_ENDED;
        let mut refusal = Refusal::from(error);
        if is_late {
            refusal.status = StatusCode::CONFLICT;
        }
        refusal
    })?;
    tracing::info!(pod = %id, "pod was asked to join");
    Ok(accepted(&id, &members, Some(status)))
}

fn accepted(id: &PodId, members: &Members, status: Option<PodStatus>) -> Response {
    let mut response = json_response(with_status(id, &members.pods[id], status).to_string());
    *response.status_mut() = StatusCode::ACCEPTED;
    response
}

async fn status(app: &App, id: &PodId) -> Result<PodStatus, Error> {
    let mut client = app.upstream.client(id)?;
    answered(id, client.status(StatusRequest {})).await
}

async fn answered(
    id: &PodId,
    call: impl Future<Output = Result<tonic::Response<PodStatus>, tonic::Status>>,
) -> Result<PodStatus, Error> {
    match timeout(POD_TIMEOUT, call).await {
        Ok(Ok(answer)) => Ok(answer.into_inner()),
        Ok(Err(status)) => {
            let error = Error::from(status);
            Err(if error.kind == ErrorKind::Unavailable { gone(id, &error) } else { error })
        }
        Err(_) => {
            Err(Error::unavailable("pod_timeout", format!("pod {id} did not answer in {POD_TIMEOUT:?}")))
        }
    }
}

fn gone(id: &PodId, error: &Error) -> Error {
    Error::unavailable("pod_unreachable", format!("pod {id} cannot be reached: {}", error.message))
}

/// The pod of this name.
fn find(app: &App, pod: &str) -> Result<(PodId, Arc<Members>), Refusal> {
    let members = app.upstream.members();
    let id = pod.parse::<PodId>().ok().filter(|id| members.pods.contains_key(id));
    let id = id.ok_or_else(|| {
        let known: Vec<&str> = members.pods.keys().map(PodId::as_str).collect();
        let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
        let shown: String = pod.chars().take(SHOWN_CHARS).collect();
        Error::not_found("pod_not_found", format!("this gateway knows no pod {shown:?}; it knows {known}"))
    })?;
    Ok((id, members))
}

fn duration_ms(text: &str) -> Result<u64, Error> {
    let units = [("ms", 1.0), ("s", 1e3), ("m", 60e3), ("h", 3600e3), ("", 1e3)];
    let parsed = units.iter().find_map(|(unit, factor)| {
        let number: f64 = text.strip_suffix(unit)?.parse().ok()?;
        (number.is_finite() && number > 0.0).then(|| (number * factor).ceil() as u64)
    });
    parsed.ok_or_else(|| {
        let message = format!("deadline is {text:?}: expected a time, such as 60s, 500ms or 2m");
        Error::invalid("invalid_deadline", message)
    })
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

fn pod_json(id: &PodId, pod: &PodMember) -> Value {
    let (state, load, now) = (&pod.state, &pod.state.load, Instant::now());
    let phase = match pod.lost {
        Some(_) if !state.phase.is_over() => "lost".to_owned(),
        _ => state.phase.to_string(),
    };
    json!({
        "id": id,
        "address": state.address.to_string(),
        "phase": phase,
        "zone": state.zone,
        "active_for_ms": pod.active_since.map(|since| millis(now.duration_since(since))),
        "report_age_ms": millis(now.duration_since(pod.heard)),
        "load": load.fraction(),
        "fractions": { "ingress": load.ingress, "cpu": load.cpu, "log": load.log, "memory": load.memory },
        "capacity_bytes_per_s": load.capacity_bytes_per_s,
        "bytes_per_s": load.bytes_per_s,
        "streams": load.streams,
        "lag_ms": load.lag_ms,
        "refused": load.refused,
        "tables": load.tables,
    })
}

/// A pod that was named by hand says nothing of itself but when it is asked, and of its load nothing even then.
fn unheard(id: &PodId, pod: &PodMember, status: Result<PodStatus, Error>) -> Value {
    let is_there = status.is_ok();
    let mut shown = with_status(id, pod, status.ok());
    if !is_there {
        (shown["phase"], shown["streams"]) = ("lost".into(), 0.into());
    }
    for key in
        ["load", "report_age_ms", "fractions", "capacity_bytes_per_s", "bytes_per_s", "lag_ms", "refused"]
    {
        shown[key] = Value::Null;
    }
    shown
}

/// What the pod itself says counts more than what was heard of it.
fn with_status(id: &PodId, pod: &PodMember, status: Option<PodStatus>) -> Value {
    let mut shown = pod_json(id, pod);
    let Some(status) = status else { return shown };
    let has_more = [Phase::Draining, Phase::Undrained].iter().any(|phase| status.phase == phase.to_string());
    if has_more {
        shown["left"] = json!({
            "streams": status.streams,
            "bytes": status.bytes,
            "tables": status.tables,
            "log_entries": status.log_entries,
            "deadline_ms": status.deadline_ms,
            "log": status.log_place,
            "former_logs": status.former_logs,
        });
    }
    shown["phase"] = status.phase.into();
    shown["streams"] = status.streams.into();
    shown
}

/// Which streams are asked for.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct StreamsQuery {
    table: Option<String>,
    pod: Option<String>,
}

async fn list_streams(
    State(app): State<Arc<App>>,
    Asked(query): Asked<StreamsQuery>,
) -> Result<Response, Refusal> {
    let table = query.table.map(|table| table.parse::<TableName>()).transpose().map_err(Error::from)?;
    let mut streams = app.streams.all();
    streams.retain(|stream| {
        table.as_ref().is_none_or(|table| stream.table == *table)
            && query.pod.as_ref().is_none_or(|pod| stream.pod().as_str() == pod)
    });
    let shown: Vec<Value> = streams.iter().take(STREAMS_SHOWN_MAX).map(|stream| stream.to_json()).collect();
    Ok(json_response(json!({ "streams": shown, "total": streams.len() }).to_string()))
}

async fn list_tables(State(app): State<Arc<App>>) -> Response {
    let (members, view) = (app.upstream.members(), app.upstream.view());
    let mut tables: Vec<_> = view.tables.iter().collect();
    tables.sort_by(|a, b| b.1.bytes_per_s.total_cmp(&a.1.bytes_per_s).then_with(|| a.0.cmp(b.0)));
    let shown = tables.into_iter().map(|(name, rate)| {
        let has = |pod: &&PodMember| pod.state.load.tables.iter().any(|table| table.table == *name);
        let pods = members.pods.iter().filter(|(_, pod)| pod.lost.is_none() && has(pod)).map(|(id, _)| id);
        json!({
            "table": name,
            "bytes_per_s": rate.bytes_per_s,
            "streams": rate.streams,
            "home": view.home(name).map(|pod| &pod.id),
            "pods": pods.collect::<Vec<_>>(),
        })
    });
    json_response(json!({ "tables": shown.collect::<Vec<_>>() }).to_string())
}

/// Of which placement.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ExplainQuery {
    table: String,
    stream: Option<String>,
    rate: Option<u64>,
}

async fn explain(
    State(app): State<Arc<App>>,
    Asked(query): Asked<ExplainQuery>,
) -> Result<Response, Refusal> {
    let table: TableName = query.table.parse().map_err(Error::from)?;
    let stream = query.stream.map(|stream| {
        let shown = app.streams.all().into_iter().find(|shown| shown.stream.as_str() == stream);
        shown.ok_or_else(|| {
            let message =
                format!("this gateway has no stream {stream}: see /v1/streams, and other gateways' too");
            Error::not_found("stream_not_found", message)
        })
    });
    let last_pod = stream.transpose()?.map(|stream| stream.pod());
    let hints = StreamHints { last_pod: last_pod.as_ref(), rate_bytes_per_s: query.rate, tried: &[] };
    let explained = app.upstream.explain(&table, &hints);
    let explained = serde_json::to_string(&explained).map_err(|error| Error::internal(error.to_string()))?;
    Ok(json_response(explained))
}

/// What is lost, as an operator says: a log, a pod's logs, or what a table waits for.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ReleaseQuery {
    #[serde(default)]
    log: String,
    #[serde(default)]
    pod: String,
    #[serde(default)]
    table: String,
    #[serde(default)]
    stream: String,
    #[serde(default)]
    dry_run: bool,
    #[serde(default)]
    whole: bool,
}

async fn release(
    State(app): State<Arc<App>>,
    Asked(query): Asked<ReleaseQuery>,
) -> Result<Response, Refusal> {
    let ReleaseQuery { log, pod, table, stream, dry_run, whole } = query;
    if [&log, &pod, &table].iter().filter(|named| !named.is_empty()).count() != 1 {
        let message = "name what is lost by one of `log`, `pod` and `table`";
        return Err(Error::invalid("invalid_release", message).into());
    }
    let request = ReleaseRequest { log, pod, table, stream, dry_run, whole };
    let report = app.upstream.release(&request).await.map_err(|error| {
        let is_there = NOT_LOST.contains(&error.code.as_str());
        let mut refusal = Refusal::from(error);
        if is_there {
            refusal.status = StatusCode::CONFLICT;
        }
        refusal
    })?;
    Ok(json_response(report))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn each_route_is_described_and_nothing_else_is() {
        let described: Value = serde_json::from_str(OPENAPI).expect("JSON");
        let paths = described["paths"].as_object().expect("paths").iter();
        let described: BTreeSet<(String, String)> = paths
            .flat_map(|(path, methods)| {
                methods.as_object().expect("methods").keys().map(|method| (method.clone(), path.clone()))
            })
            .collect();
        let all = routes().into_iter().chain(open_routes());
        let served: BTreeSet<_> = all.map(|(method, path, _)| (method.to_owned(), path.to_owned())).collect();
        assert_eq!(served, described);
    }
}
