//! The loop: look at the pool, decide, have the driver come a step nearer, and say why.
//!
//! *Owns*: the task, its listeners, its log lines. *Does not own*: the rules (`policy`), the doing (`driver`).

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use http::StatusCode;
use sluice_shared::lifecycle::{OnPanic, TaskScope, now_us};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior};
use tonic::transport::server::TcpIncoming;

use crate::admin::{Admin, Pool};
use crate::config::{AutoscalerConfig, DriverKind};
use crate::driver::kubernetes::StatefulSet;
use crate::driver::process::ProcessPods;
use crate::driver::{Action, Advisor, Driver, DriverError};
use crate::http::HttpError;
use crate::keda::Scaler;
use crate::metrics::{Failed, Metrics};
use crate::policy::{Decision, History, Observation, Policy, Reason, desired_pods};

/// A loop that has not come round for so long is stuck.
const STUCK_AFTER: Duration = Duration::from_secs(60);
/// A decision that stays the same is told again as often, for those who read only the newest lines.
const TELL_AGAIN: Duration = Duration::from_secs(600);
/// How long the listeners have to end.
const LISTENERS_END: Duration = Duration::from_secs(2);

/// Why it did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// A gateway's address is none.
    #[error("autoscaler.gateways: {0}")]
    Gateways(#[from] HttpError),
    /// The driver lacks something.
    #[error("autoscaler.driver: {0}")]
    Driver(#[from] DriverError),
    /// The admin APIs' secret cannot be read.
    #[error("cannot read autoscaler.admin_secret_file {path}: {source}")]
    Secret {
        /// Which file.
        path: String,
        /// Why.
        source: std::io::Error,
    },
    /// The address cannot be had.
    #[error("cannot listen on {listen:?} ({key}): {source}")]
    Listen {
        /// Which address.
        listen: String,
        /// By which key.
        key: &'static str,
        /// Why.
        source: std::io::Error,
    },
}

/// What is known last, for those who ask.
#[derive(Debug, Clone, Default)]
pub struct Known {
    /// The last decision.
    pub decision: Option<Decision>,
    /// When a gateway last said what the pool is.
    pub seen: Option<Instant>,
    /// When the loop last came round.
    looked: Option<Instant>,
}

impl Known {
    /// The decision, if the pool was seen within `age`.
    pub fn fresh(&self, age: Duration) -> Option<Decision> {
        self.decision.filter(|_| self.seen.is_some_and(|seen| seen.elapsed() <= age))
    }
}

/// An autoscaler that runs.
pub struct Autoscaler {
    /// The loop alone: it ends before the listeners, so that its end can be watched.
    looking: TaskScope,
    listening: TaskScope,
    address: Option<SocketAddr>,
    keda_address: Option<SocketAddr>,
    known: watch::Receiver<Known>,
}

impl Autoscaler {
    /// With the driver that the configuration names.
    ///
    /// # Errors
    /// As `start`, and what the driver lacks.
    pub async fn start_configured(config: &AutoscalerConfig) -> Result<Self, StartError> {
        match config.driver {
            DriverKind::Process => Self::start(config, ProcessPods::new(config.template())?).await,
            DriverKind::Kubernetes => Self::start(config, StatefulSet::new(config.target())?).await,
            DriverKind::None => Self::start(config, Advisor).await,
        }
    }

    /// Listens, then looks at the pool until it is told to drain.
    ///
    /// # Errors
    /// An address cannot be had, or is none.
    pub async fn start(config: &AutoscalerConfig, driver: impl Driver + 'static) -> Result<Self, StartError> {
        let admin = Admin::new(&config.gateways, secret(config)?)?;
        let listener = bind(&config.listen, "autoscaler.listen").await?;
        let keda = bind(&config.keda_listen, "autoscaler.keda_listen").await?;
        let address_of =
            |listener: &Option<TcpListener>| listener.as_ref().and_then(|one| one.local_addr().ok());
        let (address, keda_address) = (address_of(&listener), address_of(&keda));
        let metrics = Arc::new(Metrics::new());
        let (tell, known) = watch::channel(Known { looked: Some(Instant::now()), ..Known::default() });
        let (looking, listening) = (TaskScope::new(OnPanic::EndProcess), TaskScope::new(OnPanic::EndTask));
        if let Some(listener) = listener {
            serve_pages(&listening, listener, Arc::clone(&metrics), known.clone());
        }
        if let Some(listener) = keda {
            serve_keda(&listening, listener, known.clone());
        }
        let task = AutoscalerTask {
            admin,
            driver,
            metrics,
            policy: config.policy(),
            history: History::new(),
            pool: Pool::default(),
            tell,
            interval: config.interval(),
            begin: Instant::now(),
            begin_ms: u64::try_from(now_us() / 1000).unwrap_or_default(),
            told: None,
            failing: false,
        };
        looking.spawn("autoscaler", task.run(looking.clone()));
        Ok(Self { looking, listening, address, keda_address, known })
    }

    /// Where `/metrics` is.
    pub fn address(&self) -> Option<SocketAddr> {
        self.address
    }

    /// Where KEDA asks.
    pub fn keda_address(&self) -> Option<SocketAddr> {
        self.keda_address
    }

    /// What is known last, and each change of it.
    pub fn known(&self) -> watch::Receiver<Known> {
        self.known.clone()
    }

    /// Stops deciding, has the driver end what ends with it, then stops listening.
    pub async fn drain(self) {
        self.looking.drain();
        // The driver has bounds of its own for each pod.
        if self.looking.join(Duration::from_secs(24 * 3600)).await.is_err() {
            tracing::error!("the autoscaler's driver does not end");
        }
        self.listening.drain();
        if let Err(late) = self.listening.join(LISTENERS_END).await {
            tracing::warn!(?late, "listeners did not end in time");
            self.listening.cancel();
        }
    }
}

struct AutoscalerTask<D> {
    admin: Admin,
    driver: D,
    metrics: Arc<Metrics>,
    policy: Policy,
    history: History,
    /// As last seen.
    pool: Pool,
    tell: watch::Sender<Known>,
    interval: Duration,
    /// Time is the wall clock's at the start, and from then on a clock that nobody sets.
    begin: Instant,
    begin_ms: u64,
    /// What was last said, and when.
    told: Option<(u32, u32, Reason, Instant)>,
    /// Whether the last look at the pool failed: said once.
    failing: bool,
}

impl<D: Driver> AutoscalerTask<D> {
    async fn run(mut self, scope: TaskScope) {
        let mut ticks = tokio::time::interval(self.interval);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                biased; // an autoscaler that is asked to end decides nothing more
                () = scope.draining() => break,
                _ = ticks.tick() => self.look().await,
            }
        }
        self.driver.end().await;
    }

    async fn look(&mut self) {
        let is_seen = self.see().await;
        let replicas = match self.driver.replicas(&self.pool).await {
            Ok(replicas) => replicas,
            Err(error) => return self.driver_failed(&error),
        };
        let now_ms = self.begin_ms + u64::try_from(self.begin.elapsed().as_millis()).unwrap_or_default();
        if is_seen {
            self.history.observe(&Observation { now_ms, replicas, pods: self.pool.samples() });
        }
        let mut decision = desired_pods(&self.history, &self.policy, now_ms);
        if decision.reason == Reason::NoReports {
            // Pods that have a log are started although no gateway says so, and stay.
            decision.pods = decision.pods.max(replicas);
            decision.terms.replicas = replicas;
        }
        self.explain(&decision);
        self.tell.send_modify(|known| {
            known.decision = Some(decision);
            known.looked = Some(Instant::now());
            known.seen = if is_seen { known.looked } else { known.seen };
        });
        match self.driver.step(decision.pods, &self.pool, &mut self.admin).await {
            Ok(actions) => actions.iter().for_each(|action| self.acted(action)),
            Err(error) => self.driver_failed(&error),
        }
    }

    async fn see(&mut self) -> bool {
        match self.admin.pool().await {
            Ok(pool) => {
                if self.failing {
                    tracing::info!("a gateway says again what the pool is");
                }
                self.failing = false;
                self.pool = pool;
                true
            }
            Err(error) => {
                self.metrics.error(Failed::Gateways, 1);
                if !self.failing {
                    tracing::warn!(%error, "cannot see the pool: none is taken out until it is seen again");
                }
                self.failing = true;
                false
            }
        }
    }

    /// One line for each decision that is another than before, and now and then for one that stays.
    fn explain(&mut self, decision: &Decision) {
        self.metrics.decided(decision);
        let Decision { pods, reason, terms } = decision;
        let is_told = self.told.is_some_and(|(told_pods, told_replicas, told_reason, at)| {
            (told_pods, told_replicas, told_reason) == (*pods, terms.replicas, *reason)
                && at.elapsed() < TELL_AGAIN
        });
        if is_told {
            return;
        }
        self.told = Some((*pods, terms.replicas, *reason, Instant::now()));
        tracing::info!(
            direction = decision.direction(),
            pods,
            replicas = terms.replicas,
            reason = reason.name(),
            why = %reason,
            %terms,
            "decided"
        );
    }

    fn acted(&self, action: &Action) {
        self.metrics.acted(action);
        tracing::info!(%action, "driver");
    }

    fn driver_failed(&self, error: &DriverError) {
        self.metrics.error(Failed::Driver, 1);
        tracing::warn!(%error, "the driver cannot come nearer to the number of pods; it tries again");
        self.tell.send_modify(|known| known.looked = Some(Instant::now()));
    }
}

fn secret(config: &AutoscalerConfig) -> Result<Option<String>, StartError> {
    let Some(path) = &config.admin_secret_file else { return Ok(None) };
    let unread = |source| StartError::Secret { path: path.display().to_string(), source };
    Ok(Some(std::fs::read_to_string(path).map_err(unread)?.trim().to_owned()))
}

async fn bind(listen: &str, key: &'static str) -> Result<Option<TcpListener>, StartError> {
    if listen == "off" {
        return Ok(None);
    }
    let bound = TcpListener::bind(listen).await;
    bound.map(Some).map_err(|source| StartError::Listen { listen: listen.to_owned(), key, source })
}

#[derive(Clone)]
struct Pages {
    metrics: Arc<Metrics>,
    known: watch::Receiver<Known>,
}

fn serve_pages(
    scope: &TaskScope,
    listener: TcpListener,
    metrics: Arc<Metrics>,
    known: watch::Receiver<Known>,
) {
    let router = Router::new()
        .route("/metrics", get(|State(pages): State<Pages>| async move { pages.metrics.text() }))
        .route("/healthz", get(|State(pages): State<Pages>| async move { health(&pages.known.borrow()) }))
        .route(
            "/v1/decision",
            get(|State(pages): State<Pages>| async move { decision(&pages.known.borrow()) }),
        )
        .with_state(Pages { metrics, known });
    let ending = scope.clone();
    scope.spawn("autoscaler pages", async move {
        let served =
            axum::serve(listener, router).with_graceful_shutdown(async move { ending.draining().await });
        if let Err(error) = served.await {
            tracing::error!(%error, "the autoscaler's pages ended");
        }
    });
}

fn serve_keda(scope: &TaskScope, listener: TcpListener, known: watch::Receiver<Known>) {
    let ending = scope.clone();
    let service = Scaler::service(known, scope.clone());
    scope.spawn("keda", async move {
        let server = tonic::transport::Server::builder().add_service(service);
        let served = server.serve_with_incoming_shutdown(TcpIncoming::from(listener), async move {
            ending.draining().await
        });
        if let Err(error) = served.await {
            tracing::error!(%error, "the scaler for KEDA ended");
        }
    });
}

/// Alive as long as the loop comes round: a pool that is not seen is no reason to restart the autoscaler.
fn health(known: &Known) -> Response {
    match known.looked.map(|looked| looked.elapsed()) {
        Some(ago) if ago <= STUCK_AFTER => (StatusCode::OK, "ok\n").into_response(),
        ago => {
            let ago = ago.unwrap_or_default().as_secs();
            (StatusCode::SERVICE_UNAVAILABLE, format!("the loop has not come round for {ago} s\n"))
                .into_response()
        }
    }
}

fn decision(known: &Known) -> Response {
    let Some(Decision { pods, reason, terms }) = &known.decision else {
        return (StatusCode::SERVICE_UNAVAILABLE, "nothing was decided yet\n").into_response();
    };
    let seen_ms_ago = known.seen.map(|seen| u64::try_from(seen.elapsed().as_millis()).unwrap_or(u64::MAX));
    axum::Json(serde_json::json!({
        "pods": pods,
        "replicas": terms.replicas,
        "reason": reason.name(),
        "why": reason.to_string(),
        "terms": terms.to_string(),
        "seen_ms_ago": seen_ms_ago,
    }))
    .into_response()
}
