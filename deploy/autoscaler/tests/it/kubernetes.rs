//! A StatefulSet over an API server that stands for Kubernetes: what it is asked, and what its refusals are called.

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use rustls::ServerConfig;
use rustls::pki_types::PrivateKeyDer;
use serde_json::json;
use sluice_autoscaler::admin::{Admin, Pool};
use sluice_autoscaler::driver::kubernetes::{StatefulSet, Target};
use sluice_autoscaler::driver::{Action, Driver};
use sluice_shared::lifecycle::{OnPanic, TaskScope};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;

use crate::fake::{Fake, FakePod};

const TOKEN: &str = "a.service.token";

#[derive(Debug, Clone, PartialEq, Eq)]
struct Asked {
    line: String,
    token: String,
    content_type: String,
    body: String,
}

#[derive(Default)]
struct Api {
    replicas: u32,
    version: u64,
    asked: Vec<Asked>,
    /// The next patch is answered so, with the reason Kubernetes would give.
    fails: Option<(u16, &'static str)>,
}

struct ApiServer {
    api: Arc<Mutex<Api>>,
    target: Target,
    scope: TaskScope,
    _account: tempfile::TempDir,
}

impl ApiServer {
    async fn start(replicas: u32) -> Self {
        let api = Arc::new(Mutex::new(Api { replicas, version: 7, ..Api::default() }));
        let made = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).expect("a certificate");
        let account = tempfile::tempdir().expect("a directory");
        for (name, text) in
            [("token", format!("{TOKEN}\n")), ("namespace", "lake".to_owned()), ("ca.crt", made.cert.pem())]
        {
            std::fs::write(account.path().join(name), text).expect("written");
        }
        let key = PrivateKeyDer::try_from(made.signing_key.serialize_der()).expect("a key");
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let tls = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .expect("versions")
            .with_no_client_auth()
            .with_single_cert(vec![made.cert.der().clone()], key)
            .expect("a certificate");
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let url = format!("https://{}", listener.local_addr().expect("an address"));
        let scope = TaskScope::new(OnPanic::EndTask);
        scope.spawn(
            "fake API",
            serve(listener, TlsAcceptor::from(Arc::new(tls)), Arc::clone(&api), scope.clone()),
        );
        let target = Target {
            api: url,
            account_dir: account.path().to_owned(),
            namespace: None,
            stateful_set: "sluice-pod".to_owned(),
            drain_deadline: Duration::from_secs(90),
            drained_for_good: Duration::from_secs(3600),
        };
        Self { api, target, scope, _account: account }
    }

    fn driver(&self) -> StatefulSet {
        StatefulSet::new(self.target.clone()).expect("a driver")
    }

    fn replicas(&self) -> u32 {
        self.api.lock().expect("lock").replicas
    }

    fn patches(&self) -> Vec<Asked> {
        let api = self.api.lock().expect("lock");
        api.asked.iter().filter(|asked| asked.line.starts_with("PATCH")).cloned().collect()
    }
}

impl Drop for ApiServer {
    fn drop(&mut self) {
        self.scope.cancel();
    }
}

async fn serve(listener: TcpListener, tls: TlsAcceptor, api: Arc<Mutex<Api>>, scope: TaskScope) {
    loop {
        let tcp = tokio::select! {
            biased; // a test that has ended asks nothing more
            () = scope.cancelled() => return,
            tcp = listener.accept() => tcp.expect("a connection").0,
        };
        let (tls, api) = (tls.clone(), Arc::clone(&api));
        scope.spawn("fake API's connection", async move {
            // One that does not trust the certificate hangs up.
            let Ok(io) = tls.accept(tcp).await else { return };
            let service = hyper::service::service_fn(move |request| answer(request, Arc::clone(&api)));
            let _ =
                hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(io), service).await;
        });
    }
}

async fn answer(
    request: Request<Incoming>,
    api: Arc<Mutex<Api>>,
) -> Result<Response<Full<Bytes>>, hyper::Error> {
    let header = |name: &str| {
        request.headers().get(name).and_then(|value| value.to_str().ok()).unwrap_or_default().to_owned()
    };
    let asked = Asked {
        line: format!("{} {}", request.method(), request.uri()),
        token: header("authorization"),
        content_type: header("content-type"),
        body: String::new(),
    };
    let is_patch = request.method() == "PATCH";
    let body = request.into_body().collect().await?.to_bytes();
    let mut api = api.lock().expect("lock");
    api.asked.push(Asked { body: String::from_utf8_lossy(&body).into_owned(), ..asked });
    if let Some((status, reason)) = api.fails.filter(|_| is_patch) {
        api.fails = None;
        let said = json!({ "kind": "Status", "status": "Failure", "reason": reason, "message": format!("it is {reason}") });
        let response = Response::builder().status(status).body(Full::new(Bytes::from(said.to_string())));
        return Ok(response.expect("an answer"));
    }
    if is_patch {
        let patch: serde_json::Value = serde_json::from_slice(&body).expect("JSON");
        api.replicas = patch["spec"]["replicas"].as_u64().expect("a number") as u32;
        api.version += 1;
    }
    let scale = json!({
        "kind": "Scale", "apiVersion": "autoscaling/v1",
        "metadata": { "name": "sluice-pod", "namespace": "lake", "resourceVersion": api.version.to_string() },
        "spec": { "replicas": api.replicas },
        "status": { "replicas": api.replicas, "selector": "app=sluice-pod" },
    });
    Ok(Response::new(Full::new(Bytes::from(scale.to_string()))))
}

struct Bed {
    api: ApiServer,
    fake: Fake,
    admin: Admin,
    driver: StatefulSet,
}

impl Bed {
    async fn new(replicas: u32) -> Self {
        let (api, fake) = (ApiServer::start(replicas).await, Fake::start().await);
        (0..replicas).for_each(|n| fake.set(&format!("sluice-pod-{n}"), FakePod::active(0.1)));
        let admin = Admin::new(&[fake.url()], None).expect("an address");
        let driver = api.driver();
        Self { api, fake, admin, driver }
    }

    /// As the loop does it: the pool, who stays, a step.
    async fn look(&mut self, pods: u32) -> (u32, Result<Vec<Action>, String>) {
        let pool = self.admin.pool().await.expect("a pool");
        let replicas = self.driver.replicas(&pool).await.expect("known");
        let stepped = self.driver.step(pods, &pool, &mut self.admin).await;
        (replicas, stepped.map_err(|error| error.to_string()))
    }
}

#[tokio::test]
async fn scale_out_patches_the_scale_and_nothing_else() {
    let mut bed = Bed::new(2).await;
    let (replicas, actions) = bed.look(4).await;
    assert_eq!((replicas, actions), (2, Ok(vec![Action::Scaled { from: 2, to: 4 }])));
    let path = "/apis/apps/v1/namespaces/lake/statefulsets/sluice-pod/scale";
    let asked = bed.api.api.lock().expect("lock").asked.clone();
    assert_eq!(asked[0].line, format!("GET {path}"));
    assert_eq!(asked[1].line, format!("PATCH {path}"));
    assert!(asked.iter().all(|one| one.token == format!("Bearer {TOKEN}")));
    assert_eq!(asked[1].content_type, "application/merge-patch+json");
    let body: serde_json::Value = serde_json::from_str(&asked[1].body).expect("JSON");
    assert_eq!(body, json!({ "metadata": { "resourceVersion": "7" }, "spec": { "replicas": 4 } }));
}

#[tokio::test]
async fn scale_in_drains_the_highest_first_and_lowers_the_number_when_it_holds_nothing() {
    let mut bed = Bed::new(3).await;
    assert_eq!(bed.look(1).await.1, Ok(vec![Action::Draining("sluice-pod-2".to_owned())]));
    // It drains: nothing else happens meanwhile, and it does not count any more.
    assert_eq!(bed.look(1).await, (2, Ok(vec![])));
    assert_eq!(bed.api.replicas(), 3);
    bed.fake.set("sluice-pod-2", FakePod { phase: "drained", ..FakePod::active(0.0) });
    assert_eq!(bed.look(1).await.1, Ok(vec![Action::Scaled { from: 3, to: 2 }]));
    assert_eq!(bed.look(1).await.1, Ok(vec![Action::Draining("sluice-pod-1".to_owned())]));
    assert_eq!(bed.fake.asked(), ["drain sluice-pod-2?deadline=90s", "drain sluice-pod-1?deadline=90s"]);
}

#[tokio::test]
async fn a_pod_whose_drain_has_left_something_in_its_log_is_drained_again_and_not_taken_away_before() {
    let mut bed = Bed::new(3).await;
    bed.look(1).await.1.expect("drains");
    bed.fake.set("sluice-pod-2", FakePod { phase: "undrained", ..FakePod::active(0.0) });
    assert_eq!(bed.look(1).await, (2, Ok(vec![])));
    // Its process has ended, and the kubelet has started it again.
    bed.fake.set("sluice-pod-2", FakePod::active(0.0));
    assert_eq!(bed.look(1).await, (2, Ok(vec![])));
    assert_eq!(bed.fake.asked(), ["drain sluice-pod-2?deadline=90s"; 2]);
    assert_eq!(bed.api.replicas(), 3);
    bed.fake.set("sluice-pod-2", FakePod { phase: "drained", ..FakePod::active(0.0) });
    assert_eq!(bed.look(1).await.1, Ok(vec![Action::Scaled { from: 3, to: 2 }]));
}

#[tokio::test]
async fn a_drain_is_taken_back_while_it_can_be() {
    let mut bed = Bed::new(3).await;
    bed.look(2).await.1.expect("drains");
    let (_, actions) = bed.look(4).await;
    let expected = [Action::Rejoined("sluice-pod-2".to_owned()), Action::Scaled { from: 3, to: 4 }];
    assert_eq!(actions.expect("done"), expected);
    assert_eq!(bed.look(4).await.0, 4);
}

#[tokio::test]
async fn a_pod_that_drains_unasked_is_restarting_and_stays() {
    let mut bed = Bed::new(3).await;
    for phase in ["draining", "drained"] {
        bed.fake.set("sluice-pod-2", FakePod { phase, ..FakePod::active(0.0) });
        assert_eq!(bed.look(3).await, (3, Ok(vec![])));
    }
    assert!(bed.api.patches().is_empty());
}

#[tokio::test]
async fn a_pod_that_stays_drained_is_taken_away_by_an_autoscaler_that_did_not_ask() {
    let mut bed = Bed::new(3).await;
    let target = Target { drained_for_good: Duration::ZERO, ..bed.api.target.clone() };
    bed.driver = StatefulSet::new(target).expect("a driver");
    bed.fake.set("sluice-pod-2", FakePod { phase: "drained", ..FakePod::active(0.0) });
    assert_eq!(bed.look(2).await, (2, Ok(vec![Action::Scaled { from: 3, to: 2 }])));
    assert!(bed.fake.asked().is_empty());
}

#[tokio::test]
async fn refusals_say_what_to_do() {
    for (status, reason, advice) in [
        (403, "Forbidden", "grant it get and patch on statefulsets/scale"),
        (409, "Conflict", "somebody else changed it"),
        (401, "Unauthorized", "token is not taken"),
        (404, "NotFound", "autoscaler.stateful_set"),
        (500, "InternalError", "tried again"),
    ] {
        let mut bed = Bed::new(1).await;
        bed.api.api.lock().expect("lock").fails = Some((status, reason));
        let error = bed.look(2).await.1.expect_err("refused");
        for part in [advice, &status.to_string(), &format!("it is {reason}"), "PATCH /apis/apps/v1"] {
            assert!(error.contains(part), "{part:?} is not in {error:?}");
        }
        assert!(!error.contains(TOKEN));
        // What went wrong does not stay: the next look reads anew.
        assert_eq!(bed.look(2).await.1, Ok(vec![Action::Scaled { from: 1, to: 2 }]));
    }
}

#[tokio::test]
async fn a_server_that_the_account_does_not_vouch_for_gets_no_token() {
    let (api, other) = (ApiServer::start(1).await, ApiServer::start(1).await);
    let target = Target { account_dir: other.target.account_dir.clone(), ..api.target.clone() };
    let mut driver = StatefulSet::new(target).expect("a driver");
    let error = driver.replicas(&Pool::default()).await.expect_err("not trusted").to_string();
    assert!(error.contains(&api.target.api), "{error}");
    assert!(api.api.lock().expect("lock").asked.is_empty());
}

#[tokio::test]
async fn a_service_account_that_is_not_there_is_named() {
    let api = ApiServer::start(1).await;
    let target = Target { account_dir: Path::new("/no/account").to_owned(), ..api.target.clone() };
    let error = StatefulSet::new(target).map(drop).expect_err("no account").to_string();
    assert!(
        error.contains("/no/account/ca.crt") && error.contains("automountServiceAccountToken"),
        "{error}"
    );
}
