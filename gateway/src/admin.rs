//! The admin API: the pool as this gateway sees it, and the wishes that it passes on to the pods.
//!
//! Each pod owns its phase: a drain or a join is a call to that pod, and any gateway can make it. The API has a listener of
//! its own, which producers do not reach.
//!
//! *Owns*: paths, parameters, what is shown.
//! *Does not own*: the pool (`upstream`), what a drain is (`pod/src/duty.rs`).

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::rejection::QueryRejection;
use axum::extract::{FromRequestParts, Path, Query, Request, State};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use http::header::{AUTHORIZATION, CONTENT_TYPE};
use http::{StatusCode, Uri};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use sluice_shared::error::{Error, ErrorKind};
use sluice_shared::ids::{PodId, TableName};
use sluice_shared::lifecycle::Phase;
use sluice_shared::membership::{Members, PodMember};
use sluice_shared::proto::{DrainRequest, JoinRequest, PodStatus, StatusRequest};
use tokio::net::TcpListener;
use tokio::time::{Instant, timeout};

use crate::app::App;
use crate::auth::SecretHash;
use crate::edge::http::{METRICS, Refusal, json_response};

/// How long a pod may take to answer.
const POD_TIMEOUT: Duration = Duration::from_secs(5);
/// Streams in one answer.
const STREAMS_SHOWN_MAX: usize = 10_000;
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
    let (router, scope) = (router(Arc::clone(app)), app.background.clone());
    tracing::info!(%address, "admin API listens");
    app.background.spawn("admin", async move {
        tokio::select! {
            biased; // the end first
            () = scope.cancelled() => {}
            served = axum::serve(listener, router).into_future() => {
                if let Err(error) = served {
                    tracing::error!(%error, "the admin API has ended");
                }
            }
        }
    });
    Ok(Some(address))
}

fn router(app: Arc<App>) -> Router {
    let authorized = middleware::from_fn_with_state(Arc::clone(&app), authorized);
    Router::new()
        .route("/v1/pods", get(list_pods))
        .route("/v1/pods/{pod}", get(show_pod))
        .route("/v1/pods/{pod}/drain", post(drain))
        .route("/v1/pods/{pod}/join", post(join))
        .route("/v1/streams", get(list_streams))
        .route("/v1/tables", get(list_tables))
        .route("/metrics", get(metrics))
        .route_layer(authorized)
        .route("/healthz", get(async || "ok\n"))
        .route("/openapi.json", get(async || json_response(OPENAPI)))
        .fallback(unknown_path)
        .method_not_allowed_fallback(unknown_method)
        .with_state(app)
}

/// Lets in who knows the secret, where there is one.
async fn authorized(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let Some(expected) = &app.config.admin_secret_sha256 else { return next.run(request).await };
    let token = request.headers().get(AUTHORIZATION).and_then(|value| value.to_str().ok());
    let token = token.and_then(|value| value.strip_prefix("Bearer "));
    if token.is_some_and(|token| SecretHash::of(token) == *expected) {
        return next.run(request).await;
    }
    let message =
        "the admin API needs its secret (gateway.admin_secret_sha256): Authorization: Bearer SECRET";
    Refusal::from(Error::unauthorized("admin_secret", message)).into_response()
}

async fn unknown_path(uri: Uri) -> Refusal {
    let message = format!("the admin API has no {}: see /openapi.json", uri.path());
    Refusal::from(Error::not_found("not_found", message))
}

async fn unknown_method(uri: Uri) -> Refusal {
    let message = format!("{} does not take this method: see /openapi.json", uri.path());
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

async fn list_pods(State(app): State<Arc<App>>) -> Response {
    let members = app.upstream.members();
    let pods: Vec<Value> = members.pods.iter().map(|(id, pod)| pod_json(id, pod)).collect();
    json_response(json!({ "gateways": members.gateways.len().max(1), "pods": pods }).to_string())
}

async fn show_pod(State(app): State<Arc<App>>, Path(pod): Path<String>) -> Result<Response, Refusal> {
    let (id, members) = find(&app, &pod)?;
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
    Path(pod): Path<String>,
    Asked(query): Asked<DrainQuery>,
) -> Result<Response, Refusal> {
    let (id, members) = find(&app, &pod)?;
    let deadline_ms = query.deadline.as_deref().map(duration_ms).transpose()?.unwrap_or(0);
    if let Some(pace) = query.pace.filter(|pace| !(pace.is_finite() && *pace > 0.0)) {
        let message =
            format!("pace is {pace}: expected how many streams a second leave the pod, more than 0");
        return Err(Error::invalid("invalid_pace", message).into());
    }
    let is_active = |pod: &PodMember| pod.lost.is_none() && pod.state.phase == Phase::Active;
    let others = members.pods.iter().filter(|(other, pod)| **other != id && is_active(pod)).count();
    if others == 0 && is_active(&members.pods[&id]) && !query.force {
        let message = format!(
            "pod {id} is the last one that takes streams: its producers would have nowhere to go; start another one \
             first, or say force=true"
        );
        return Err(Refusal::with("last_pod", message, StatusCode::CONFLICT));
    }
    let mut client = app.upstream.client(&id).map_err(|error| gone(&id, &error))?;
    let request = DrainRequest { deadline_ms, streams_per_s: query.pace.unwrap_or(0.0) };
    let status = answered(&id, client.drain(request)).await?;
    tracing::info!(pod = %id, deadline_ms, pace = query.pace, "pod was asked to drain");
    Ok(accepted(&id, &members, status))
}

async fn join(State(app): State<Arc<App>>, Path(pod): Path<String>) -> Result<Response, Refusal> {
    let (id, members) = find(&app, &pod)?;
    let mut client = app.upstream.client(&id).map_err(|error| gone(&id, &error))?;
    let status = answered(&id, client.join(JoinRequest {})).await.map_err(|error| {
        let is_late = error.code == "pod_ended";
        let mut refusal = Refusal::from(error);
        if is_late {
            refusal.status = StatusCode::CONFLICT;
        }
        refusal
    })?;
    tracing::info!(pod = %id, "pod was asked to join");
    Ok(accepted(&id, &members, status))
}

fn accepted(id: &PodId, members: &Members, status: PodStatus) -> Response {
    let mut response = json_response(with_status(id, &members.pods[id], Some(status)).to_string());
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
        Error::not_found("pod_not_found", format!("this gateway knows no pod {pod:?}; it knows {known}"))
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
        Some(_) if state.phase != Phase::Drained => "lost".to_owned(),
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

/// What the pod itself says counts more than what was heard of it.
fn with_status(id: &PodId, pod: &PodMember, status: Option<PodStatus>) -> Value {
    let mut shown = pod_json(id, pod);
    let Some(status) = status else { return shown };
    let drains = status.phase == Phase::Draining.to_string();
    if drains {
        shown["left"] = json!({
            "streams": status.streams,
            "bytes": status.bytes,
            "tables": status.tables,
            "log_entries": status.log_entries,
            "deadline_ms": status.deadline_ms,
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
