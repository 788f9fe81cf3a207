//! The gateway as a whole: start, what all tasks share, drain.
//!
//! *Owns*: which listeners there are, places for connections, the scope of all tasks.
//! *Does not own*: what a connection says (`edge`), who has how many of them (`peers`).
//! Keeps P7: connections are bounded.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::Router;
use prometheus_client::metrics::gauge::Gauge;
use sluice_shared::error::Error;
use sluice_shared::lifecycle::{Hurry, OnPanic, TaskScope};
use sluice_shared::link::PipeListener;
use sluice_shared::membership::{GatewayMember, Membership};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

use crate::admin;
use crate::auth::Auth;
use crate::budget::Budget;
use crate::certificate::{self, Certificate};
use crate::config::GatewayConfig;
use crate::edge::{http, quic, tcp};
use crate::metrics::Metrics;
use crate::peers::{PeerLimits, PeerPlace, Peers, Refused};
use crate::streams::Streams;
use crate::upstream::Upstream;

/// Parquet bodies that are unpacked at the same time: each can take as much memory as its largest rows have.
const UNPACKING_MAX: usize = 2;
/// When a connection that was refused may be tried again.
const REFUSED_RETRY: Duration = Duration::from_secs(1);
/// What is cancelled ends at once, or is stuck.
const CANCEL_DEADLINE: Duration = Duration::from_secs(1);

/// A running gateway. Dropping it cancels its tasks; `drain` ends them in good order.
pub struct Gateway {
    plain_address: Option<SocketAddr>,
    tls_address: Option<SocketAddr>,
    quic_address: Option<SocketAddr>,
    admin_address: Option<SocketAddr>,
    certificate: Option<Arc<Certificate>>,
    app: Arc<App>,
}

/// What all tasks of a gateway share.
pub(crate) struct App {
    pub(crate) config: GatewayConfig,
    pub(crate) auth: Auth,
    pub(crate) upstream: Arc<Upstream>,
    pub(crate) streams: Streams,
    pub(crate) metrics: Metrics,
    /// Of producers: what a drain waits for.
    pub(crate) scope: TaskScope,
    /// Of what serves them until they have gone.
    pub(crate) background: TaskScope,
    pub(crate) budget: Arc<Budget>,
    places: Arc<Semaphore>,
    /// For Parquet bodies that are unpacked.
    pub(crate) unpacking: Arc<Semaphore>,
    peers: Arc<Peers>,
}

impl App {
    /// A place for one more connection of an address.
    ///
    /// # Errors
    /// `Busy` where there are as many as may be, in all or of this address.
    pub(crate) fn place(&self, peer: IpAddr) -> Result<Connection, Error> {
        let too_many = |what: &str, key: &str| {
            let message = format!("{what} than gateway.{key} allows: try again, or another gateway");
            Error::busy("too_many_connections", message, REFUSED_RETRY)
        };
        let permit = Arc::clone(&self.places).try_acquire_owned();
        let permit = permit.map_err(|_| too_many("more connections", "connections_max"))?;
        let of_peer = self.peers.place(peer, Instant::now()).map_err(|refused| match refused {
            Refused::TooMany => too_many("more connections of your address", "connections_per_peer_max"),
            Refused::TooFast => {
                too_many("more new connections a second of your address", "connects_per_peer_per_s")
            }
        })?;
        self.metrics.connections.inc();
        let place = Place {
            _permit: permit,
            _of_peer: of_peer,
            open: self.metrics.connections.clone(),
            paused: AtomicUsize::new(0),
        };
        Ok(Connection { place: Arc::new(place) })
    }
}

/// A place among the connections; given back when the last clone is dropped.
#[derive(Clone)]
pub(crate) struct Connection {
    place: Arc<Place>,
}

struct Place {
    _permit: OwnedSemaphorePermit,
    _of_peer: PeerPlace,
    open: Gauge,
    /// Streams of this connection that are not read at the moment.
    paused: AtomicUsize,
}

impl Connection {
    /// Whether a stream of this connection is not read at the moment: what it does not take can be in the way of the
    /// others, whose producer is not to blame then.
    pub(crate) fn is_paused(&self) -> bool {
        self.place.paused.load(Ordering::Relaxed) > 0
    }
}

/// Whether one stream of a connection is not read at the moment.
pub(crate) struct Pause {
    connection: Connection,
    on: bool,
}

impl Pause {
    pub(crate) fn of(connection: Connection) -> Self {
        Self { connection, on: false }
    }

    pub(crate) fn set(&mut self, on: bool) {
        let paused = &self.connection.place.paused;
        match (self.on, on) {
            (false, true) => paused.fetch_add(1, Ordering::Relaxed),
            (true, false) => paused.fetch_sub(1, Ordering::Relaxed),
            _ => return,
        };
        self.on = on;
    }

    pub(crate) fn excuses(&self) -> bool {
        self.connection.is_paused()
    }
}

impl Drop for Pause {
    fn drop(&mut self) {
        self.set(false);
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.open.dec();
    }
}

impl Gateway {
    /// Binds the listeners and serves producers. The pods need not be up yet; `membership` says which there are.
    ///
    /// # Errors
    /// `Invalid` for a configuration, certificate or pod address that cannot be; `Unavailable` where a listener cannot bind.
    pub async fn start(config: GatewayConfig, membership: Membership) -> Result<Self, Error> {
        Self::start_with(config, membership, None, http::router).await
    }

    /// As `start`, and producers also come by these pipes: a simulation has no other way, and turns the listeners off.
    ///
    /// # Errors
    /// As `start`.
    pub async fn start_on(
        config: GatewayConfig,
        membership: Membership,
        pipes: PipeListener,
    ) -> Result<Self, Error> {
        Self::start_with(config, membership, Some(pipes), http::router).await
    }

    /// Not a gateway: sends WebSocket messages back, whatever the path, over all that producers' messages come
    /// through. Conformance suites test that; nothing but `examples/websocket_echo.rs` starts it.
    ///
    /// # Errors
    /// As `start`.
    #[doc(hidden)]
    pub async fn start_echo(config: GatewayConfig) -> Result<Self, Error> {
        Self::start_with(config, Membership::fixed(Vec::new()), None, http::echo_router).await
    }

    async fn start_with(
        config: GatewayConfig,
        membership: Membership,
        pipes: Option<PipeListener>,
        router: fn(Arc<App>) -> Router,
    ) -> Result<Self, Error> {
        if pipes.is_none() {
            config.validate().map_err(|error| Error::invalid("invalid_configuration", error.to_string()))?;
        }
        let auth = Auth::new(&config)?;
        let certificate = Certificate::of(&config)?.map(Arc::new);
        let mut listeners: Vec<_> = pipes.map(tcp::Listener::pipe).into_iter().collect();
        let mut addresses = [None, None];
        for (at, (listen, key, certificate)) in [
            (config.plain_address(), "gateway.listen", None),
            (config.tls_address(), "gateway.tls_listen", certificate.as_ref()),
        ]
        .into_iter()
        .enumerate()
        {
            let Some(listen) = listen else { continue };
            let (address, listener) = tcp::Listener::bind(listen, key, certificate).await?;
            tracing::info!(%address, tls = certificate.is_some(), "gateway listens");
            addresses[at] = Some(address);
            listeners.push(listener);
        }
        let upstream = Arc::new(Upstream::new(&config, membership.clone())?);
        let app = Arc::new(App {
            auth,
            upstream,
            streams: Streams::default(),
            metrics: Metrics::new(),
            scope: TaskScope::new(OnPanic::EndTask),
            background: TaskScope::new(OnPanic::EndTask),
            budget: Budget::new(config.memory_bytes.0),
            places: Arc::new(Semaphore::new(config.connections_max)),
            unpacking: Arc::new(Semaphore::new(UNPACKING_MAX)),
            peers: Peers::new(PeerLimits {
                connections_max: config.connections_per_peer_max,
                connects_per_s: config.connects_per_peer_per_s,
            }),
            config,
        });
        let quic_address = quic::start(certificate.as_ref(), &app).await?;
        for listener in listeners {
            app.scope.spawn("accept", tcp::accept(listener, router(Arc::clone(&app)), Arc::clone(&app)));
        }
        let background = &app.background;
        background.spawn("pool", Arc::clone(&app.upstream).follow(background.clone()));
        let looking = Arc::clone(&app);
        background.spawn("streams", async move { looking.streams.look(&looking.background).await });
        let admin_address = admin::start(&app).await?;
        let admin = admin_address.map(|address| address.to_string());
        membership.announce_gateway(GatewayMember { admin });
        if let Some(certificate) = &certificate {
            app.scope.spawn("certificate", certificate::watch(Arc::clone(certificate), app.scope.clone()));
        }
        let [plain_address, tls_address] = addresses;
        Ok(Self { plain_address, tls_address, quic_address, admin_address, certificate, app })
    }

    /// Where producers connect: without TLS, unless that is off.
    ///
    /// # Panics
    /// Never: one of the two is on, says `GatewayConfig::validate`.
    pub fn address(&self) -> SocketAddr {
        self.plain_address.or(self.tls_address).expect("`validate` refuses a gateway without any")
    }

    /// Where producers connect without TLS; None where that is off.
    pub fn plain_address(&self) -> Option<SocketAddr> {
        self.plain_address
    }

    /// Where producers connect over TLS; None where that is off.
    pub fn tls_address(&self) -> Option<SocketAddr> {
        self.tls_address
    }

    /// Where producers connect over QUIC; None where it is off.
    pub fn quic_address(&self) -> Option<SocketAddr> {
        self.quic_address
    }

    /// Where the admin API listens; None where it is off.
    pub fn admin_address(&self) -> Option<SocketAddr> {
        self.admin_address
    }

    /// Reads certificate, key and authorities again if their files have changed, as a SIGHUP has it do.
    pub fn reread_certificates(&self) {
        if let Some(certificate) = &self.certificate {
            certificate.look();
        }
    }

    /// Takes no new connections, asks producers to move, makes what they sent durable, and ends. What is left
    /// at the deadline is cancelled.
    pub async fn drain(&self, deadline: Duration) {
        self.drain_or_hurry(deadline, &Hurry::default()).await;
    }

    /// As `drain`; once there is a hurry the deadline is now. Producers send again what was not acked.
    pub async fn drain_or_hurry(&self, deadline: Duration, hurry: &Hurry) {
        self.app.scope.drain();
        let drained = tokio::select! {
            biased; // what has drained needs no hurry
            drained = self.app.scope.join(deadline) => drained,
            () = hurry.hurried() => self.app.scope.join(Duration::ZERO).await,
        };
        if let Err(late) = drained {
            tracing::warn!(late = late.len(), tasks = ?names(&late), "gateway cancels what did not drain in time");
            self.app.scope.cancel();
            if let Err(stuck) = self.app.scope.join(CANCEL_DEADLINE).await {
                tracing::error!(?stuck, "tasks did not end when cancelled");
            }
        }
        self.app.background.cancel();
        if let Err(stuck) = self.app.background.join(CANCEL_DEADLINE).await {
            tracing::error!(?stuck, "tasks did not end when cancelled");
        }
        tracing::info!("gateway drained");
    }
}

/// Each once: a task a connection would make a long line.
fn names(tasks: &[&'static str]) -> BTreeSet<&'static str> {
    tasks.iter().copied().collect()
}

impl Drop for Gateway {
    fn drop(&mut self) {
        self.app.scope.cancel();
        self.app.background.cancel();
    }
}
