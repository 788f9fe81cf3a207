//! A gateway's admin API, as its contract says, over a pool that a test makes up.
//!
//! *Owns*: the pool, what was asked of it.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Json;
use axum::Router;
use axum::extract::{Path as UrlPath, RawQuery, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use serde_json::{Value, json};
use sluice_shared::lifecycle::{OnPanic, TaskScope};
use tokio::net::TcpListener;

/// How long anything may take here.
pub(crate) const DEADLINE: Duration = Duration::from_secs(30);

/// A pod of the made-up pool.
#[derive(Clone)]
pub(crate) struct FakePod {
    pub(crate) phase: &'static str,
    pub(crate) load: f64,
    pub(crate) refused: u64,
}

impl FakePod {
    pub(crate) fn active(load: f64) -> Self {
        Self { phase: "active", load, refused: 0 }
    }
}

/// What a test sets and looks at.
#[derive(Default)]
pub(crate) struct FakePool {
    pub(crate) pods: BTreeMap<String, FakePod>,
    /// `drain pod-2?deadline=60s` and the like.
    pub(crate) asked: Vec<String>,
    /// Children below this directory are the pods, and share this demand.
    pub(crate) children: Option<(PathBuf, f64)>,
    /// What callers have to know.
    pub(crate) secret: Option<&'static str>,
    /// Every request is answered so.
    pub(crate) broken: Option<StatusCode>,
}

impl FakePool {
    /// Children that have said where they are, and not that they have ended.
    fn look(&mut self) {
        let Some((dir, demand)) = &self.children else { return };
        let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
        let is_running = |path: &Path| path.join("pid").exists() && !path.join("drained").exists();
        let ids: Vec<String> = entries
            .filter(|entry| is_running(&entry.path()))
            .filter_map(|entry| entry.file_name().into_string().ok())
            .collect();
        let load = (demand / ids.len().max(1) as f64).min(1.0);
        self.pods = ids.into_iter().map(|id| (id, FakePod::active(load))).collect();
    }
}

/// An admin API that runs.
pub(crate) struct Fake {
    pub(crate) pool: Arc<Mutex<FakePool>>,
    pub(crate) address: SocketAddr,
    scope: TaskScope,
}

type Shared = Arc<Mutex<FakePool>>;

impl Fake {
    pub(crate) async fn start() -> Self {
        let pool = Shared::default();
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let router = Router::new()
            .route("/v1/pods", get(pods))
            .route("/v1/pods/{id}/{wish}", post(wish))
            .with_state(Arc::clone(&pool));
        let scope = TaskScope::new(OnPanic::EndTask);
        let ending = scope.clone();
        scope.spawn("fake admin", async move {
            let served = axum::serve(listener, router);
            served.with_graceful_shutdown(async move { ending.draining().await }).await.expect("served");
        });
        Self { pool, address, scope }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub(crate) fn set(&self, id: &str, pod: FakePod) {
        self.pool.lock().expect("lock").pods.insert(id.to_owned(), pod);
    }

    pub(crate) fn asked(&self) -> Vec<String> {
        self.pool.lock().expect("lock").asked.clone()
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.scope.cancel();
    }
}

fn refuse(status: StatusCode, code: &str, message: &str) -> Response {
    let error = json!({ "error": { "kind": "NotFound", "code": code, "message": message } });
    (status, Json(error)).into_response()
}

async fn pods(State(shared): State<Shared>, headers: HeaderMap) -> Response {
    let mut pool = shared.lock().expect("lock");
    let said = headers.get("authorization").and_then(|value| value.to_str().ok());
    if pool.secret.is_some_and(|secret| said != Some(&format!("Bearer {secret}"))) {
        return refuse(StatusCode::UNAUTHORIZED, "admin_secret", "the admin API needs its secret");
    }
    if let Some(status) = pool.broken {
        return refuse(status, "draining", "this gateway is going away");
    }
    pool.look();
    let shown: Vec<Value> = pool.pods.iter().map(|(id, pod)| show(id, pod)).collect();
    Json(json!({ "gateways": 1, "pods": shown })).into_response()
}

fn show(id: &str, pod: &FakePod) -> Value {
    let FakePod { phase, load, refused } = pod;
    json!({
        "id": id, "address": "127.0.0.1:7171", "phase": phase, "zone": null, "active_for_ms": 100_000,
        "report_age_ms": 300, "load": load, "fractions": { "ingress": load, "cpu": 0.0, "log": 0.0, "memory": 0.0 },
        "capacity_bytes_per_s": 2e8, "bytes_per_s": 1e6, "streams": 10, "lag_ms": 900, "refused": refused,
        "tables": [{ "table": "main.default.t", "bytes_per_s": 1e6, "streams": 10 }],
    })
}

async fn wish(
    State(shared): State<Shared>,
    UrlPath((id, wish)): UrlPath<(String, String)>,
    RawQuery(query): RawQuery,
) -> Response {
    let mut pool = shared.lock().expect("lock");
    pool.look();
    let query = query.map(|query| format!("?{query}")).unwrap_or_default();
    pool.asked.push(format!("{wish} {id}{query}"));
    let active = pool.pods.values().filter(|pod| pod.phase == "active").count();
    let children = pool.children.clone();
    let Some(pod) = pool.pods.get_mut(&id) else {
        return refuse(StatusCode::NOT_FOUND, "pod_not_found", &format!("no pod {id}"));
    };
    match (wish.as_str(), pod.phase) {
        ("drain", "active") if active == 1 => {
            return refuse(StatusCode::CONFLICT, "last_pod", &format!("{id} is the last active pod"));
        }
        ("drain", "active") => pod.phase = "draining",
        ("join", "drained") => {
            return refuse(StatusCode::CONFLICT, "pod_ended", &format!("{id} has drained"));
        }
        ("join", _) => pod.phase = "active",
        _ => {}
    }
    if let Some((dir, _)) = children.filter(|_| wish == "drain") {
        std::fs::write(dir.join(&id).join("go"), "").expect("written");
    }
    (StatusCode::ACCEPTED, Json(show(&id, pod))).into_response()
}
