//! The gateway as a whole: bind, accept, drain.
//!
//! *Owns*: the listener, the limit on connections, the scope of all tasks.
//! *Does not own*: what a connection says (`edge`).
//! Keeps P7: connections are bounded, and one that says nothing is closed.

use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::body::Incoming;
use hyper::server::conn::{http1, http2};
use hyper_util::rt::{TokioIo, TokioTimer};
use prometheus_client::metrics::gauge::Gauge;
use sluice_shared::error::Error;
use sluice_shared::ids::PodId;
use sluice_shared::lifecycle::{OnPanic, TaskScope};
use sluice_shared::link::PodAddress;
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tower::ServiceExt;

use crate::config::GatewayConfig;
use crate::edge::{http, quic};
use crate::metrics::Metrics;
use crate::upstream::Upstream;

/// Bytes of a request's header.
const HEADER_BYTES_MAX: usize = 16 << 10;
/// HTTP/2 receive windows, per call and per connection: at the default of 64 KiB a client 100 ms away sends 0.6 MB/s.
const CALL_WINDOW_BYTES: u32 = 4 << 20;
const CONNECTION_WINDOW_BYTES: u32 = 16 << 20;
const CALLS_PER_CONNECTION_MAX: u32 = 1000;
/// A silent HTTP/2 connection is asked whether it is still there, and closed without an answer.
const PING_INTERVAL: Duration = Duration::from_secs(30);
const PING_TIMEOUT: Duration = Duration::from_secs(20);
/// An HTTP/2 connection begins `PRI * HTTP/2.0`. No other method begins with its first two bytes, `PROPFIND` and
/// `PROPPATCH` excepted, which nobody sends here.
const HTTP2_START: [u8; 2] = *b"PR";
/// After an accept that failed, mostly for lack of file descriptors: until some may be free again.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// What is cancelled ends at once, or is stuck.
const CANCEL_DEADLINE: Duration = Duration::from_secs(1);
const TOO_MANY: &[u8] = b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\n\
    connection: close\r\nretry-after: 1\r\n\r\n\
    {\"error\":{\"kind\":\"Busy\",\"code\":\"too_many_connections\",\"message\":\"this gateway has as many \
    connections as gateway.connections_max allows: try again, or another gateway\",\"retryable\":true,\
    \"retry_after_ms\":1000}}";

/// A running gateway. Dropping it cancels its tasks; `drain` ends them in good order.
pub struct Gateway {
    address: SocketAddr,
    quic_address: Option<SocketAddr>,
    app: Arc<App>,
}

/// What all tasks of a gateway share.
pub(crate) struct App {
    pub(crate) config: GatewayConfig,
    pub(crate) upstream: Arc<Upstream>,
    pub(crate) metrics: Metrics,
    pub(crate) scope: TaskScope,
    places: Arc<Semaphore>,
}

impl App {
    /// A place for one more connection; None where there are as many as may be.
    pub(crate) fn place(&self) -> Option<Connection> {
        let permit = Arc::clone(&self.places).try_acquire_owned().ok()?;
        self.metrics.connections.inc();
        let place = Place { _permit: permit, open: self.metrics.connections.clone() };
        Some(Connection { _place: Arc::new(place) })
    }
}

/// A place among the connections; given back when the last clone is dropped.
#[derive(Clone)]
pub(crate) struct Connection {
    _place: Arc<Place>,
}

struct Place {
    _permit: OwnedSemaphorePermit,
    open: Gauge,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.open.dec();
    }
}

impl Gateway {
    /// Binds the listener and serves producers. The pods need not be up yet.
    ///
    /// # Errors
    /// `Invalid` for a configuration, certificate or pod address that cannot be; `Unavailable` where the listener cannot bind.
    pub async fn start(config: GatewayConfig, pods: Vec<(PodId, PodAddress)>) -> Result<Self, Error> {
        Self::start_with(config, pods, http::router).await
    }

    /// Not a gateway: sends WebSocket messages back, whatever the path, over all that producers' messages come
    /// through. Conformance suites test that; nothing but `examples/websocket_echo.rs` starts it.
    ///
    /// # Errors
    /// As `start`.
    #[doc(hidden)]
    pub async fn start_echo(config: GatewayConfig) -> Result<Self, Error> {
        Self::start_with(config, Vec::new(), http::echo_router).await
    }

    async fn start_with(
        config: GatewayConfig,
        pods: Vec<(PodId, PodAddress)>,
        router: fn(Arc<App>) -> Router,
    ) -> Result<Self, Error> {
        config.validate().map_err(|error| Error::invalid("invalid_configuration", error.to_string()))?;
        let listener = TcpListener::bind(&config.listen).await;
        let bound = listener.and_then(|listener| Ok((listener.local_addr()?, listener)));
        let (address, listener) = bound.map_err(|error| {
            let message = format!("cannot listen on {} (gateway.listen): {error}", config.listen);
            Error::unavailable("cannot_listen", message)
        })?;
        let upstream = Arc::new(Upstream::new(&config, pods)?);
        let scope = TaskScope::new(OnPanic::EndTask);
        let places = Arc::new(Semaphore::new(config.connections_max));
        let app = Arc::new(App { config, upstream, metrics: Metrics::new(), scope, places });
        let quic_address = quic::start(address, &app).await?;
        app.scope.spawn("accept", accept(listener, router(Arc::clone(&app)), Arc::clone(&app)));
        tracing::info!(%address, "gateway listens");
        Ok(Self { address, quic_address, app })
    }

    /// Where producers connect.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Where producers connect over QUIC; None where it is off.
    pub fn quic_address(&self) -> Option<SocketAddr> {
        self.quic_address
    }

    /// Takes no new connections, asks producers to move, makes what they sent durable, and ends. What is left
    /// at the deadline is cancelled.
    pub async fn drain(&self, deadline: Duration) {
        self.app.scope.drain();
        if let Err(late) = self.app.scope.join(deadline).await {
            tracing::warn!(?late, "gateway cancels what did not drain in time");
            self.app.scope.cancel();
            if let Err(stuck) = self.app.scope.join(CANCEL_DEADLINE).await {
                tracing::error!(?stuck, "tasks did not end when cancelled");
            }
        }
        tracing::info!("gateway drained");
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        self.app.scope.cancel();
    }
}

async fn accept(listener: TcpListener, router: Router, app: Arc<App>) {
    loop {
        let accepted = tokio::select! {
            biased; // drain first: a storm of connections must not hold it up
            () = app.scope.draining() => return,
            accepted = listener.accept() => accepted,
        };
        let socket = match accepted {
            Ok((socket, _)) => socket,
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let Some(connection) = app.place() else {
            refuse(socket);
            continue;
        };
        app.scope.spawn("connection", serve(socket, router.clone(), connection, Arc::clone(&app)));
    }
}

/// Says why, without waiting: a new connection's send buffer has room for it.
fn refuse(mut socket: TcpStream) {
    let _ = futures_util::FutureExt::now_or_never(socket.write_all(TOO_MANY));
}

async fn serve(socket: TcpStream, router: Router, connection: Connection, app: Arc<App>) {
    // Acks are small and must not wait for more.
    let _ = socket.set_nodelay(true);
    let counting = Arc::clone(&app);
    let service = hyper::service::service_fn(move |mut request: hyper::Request<Incoming>| {
        request.extensions_mut().insert(connection.clone());
        let (router, app) = (router.clone(), Arc::clone(&counting));
        async move {
            let response = router.oneshot(request).await?;
            if let Some(http::Code(error)) = response.extensions().get() {
                app.metrics.error(error);
            }
            Ok::<_, std::convert::Infallible>(response)
        }
    });
    let is_http2 = tokio::select! {
        biased; // drain first: the client may never say anything
        () = app.scope.draining() => return,
        is_http2 = tokio::time::timeout(app.config.handshake_timeout(), begins_http2(&socket)) => is_http2,
    };
    let served = match is_http2 {
        Ok(Ok(true)) => {
            let serving = http2_builder(app.scope.clone()).serve_connection(TokioIo::new(socket), service);
            until_drained!(serving, app)
        }
        Ok(Ok(false)) => {
            let mut builder = http1::Builder::new();
            builder
                .timer(TokioTimer::new())
                .header_read_timeout(app.config.handshake_timeout())
                .max_buf_size(HEADER_BYTES_MAX);
            let serving = builder.serve_connection(TokioIo::new(socket), service).with_upgrades();
            until_drained!(serving, app)
        }
        Ok(Err(_)) | Err(_) => return tracing::debug!("a connection that said nothing"),
    };
    if let Err(error) = served {
        tracing::debug!(%error, "connection ended");
    }
}

/// Serves a connection to its end; when the gateway drains, only what has begun. A macro, since the two protocols'
/// connections have no trait in common.
macro_rules! until_drained {
    ($serving:expr, $app:expr) => {{
        let mut serving = pin!($serving);
        tokio::select! {
            biased; // requests first: the signals only have to be seen between them
            served = serving.as_mut() => served,
            () = $app.scope.draining() => {
                serving.as_mut().graceful_shutdown();
                tokio::select! {
                    biased; // a request that ends in time is answered
                    served = serving => served,
                    () = $app.scope.cancelled() => Ok(()),
                }
            }
        }
    }};
}
use until_drained;

/// Where HTTP/2 runs the requests of a connection.
#[derive(Clone)]
struct InScope(TaskScope);

impl<F: Future<Output: Send> + Send + 'static> hyper::rt::Executor<F> for InScope {
    fn execute(&self, request: F) {
        self.0.spawn("request", async move { drop(request.await) });
    }
}

fn http2_builder(scope: TaskScope) -> http2::Builder<InScope> {
    let mut builder = http2::Builder::new(InScope(scope));
    builder
        .timer(TokioTimer::new())
        .initial_stream_window_size(CALL_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_concurrent_streams(CALLS_PER_CONNECTION_MAX)
        .max_header_list_size(HEADER_BYTES_MAX as u32)
        .keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(PING_TIMEOUT);
    builder
}

/// Looks at the first bytes of a connection, and leaves them there.
async fn begins_http2(socket: &TcpStream) -> std::io::Result<bool> {
    /// Between looks at a first byte that came alone.
    const PAUSE: Duration = Duration::from_millis(5);
    loop {
        let mut start = [0; HTTP2_START.len()];
        match socket.peek(&mut start).await? {
            0 => return Err(std::io::ErrorKind::UnexpectedEof.into()),
            got if start[..got] != HTTP2_START[..got] => return Ok(false),
            got if got == start.len() => return Ok(true),
            _ => tokio::time::sleep(PAUSE).await,
        }
    }
}
