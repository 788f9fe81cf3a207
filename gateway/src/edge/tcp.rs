//! TCP: the listeners, TLS, and which HTTP a connection speaks.
//!
//! *Owns*: accepting (of a pipe too, for simulations), refusing, handshakes and their bounds, the limits of HTTP/1 and HTTP/2.
//! *Does not own*: how many connections there may be (`app`), what requests mean (`http`, `gate`).
//! Keeps P7: connections and handshakes are bounded, and one that says nothing is closed.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::body::Incoming;
use hyper::server::conn::{http1, http2};
use hyper_util::rt::{TokioIo, TokioTimer};
use rustls::version::{TLS12, TLS13};
use sluice_shared::error::Error;
use sluice_shared::lifecycle::TaskScope;
use sluice_shared::link::{PipeListener, Wire};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout};
use tokio_rustls::TlsAcceptor;
use tower::ServiceExt;

use crate::app::{App, Connection};
use crate::certificate::Certificate;
use crate::edge::gate::Gate;
use crate::edge::grpc::{CALL, CallEnd};
use crate::edge::heads::{HEAD_BYTES_MAX, Http1Socket};
use crate::edge::http;
use crate::socket::{Begins, Counted, Socket, TLS_HANDSHAKE};

/// HTTP/2 receive windows, per call and per connection: at the default of 64 KiB a client 100 ms away sends 0.6 MB/s.
const CALL_WINDOW_BYTES: u32 = 4 << 20;
const CONNECTION_WINDOW_BYTES: u32 = 16 << 20;
/// Of a body in one read, which becomes a frame or few: heads have a bound of their own (`heads`).
const READ_BYTES_MAX: usize = 256 << 10;
/// Of an HTTP/2 frame: at the default of 16 KiB a batch comes in many pieces, which have to be put together.
const FRAME_BYTES_MAX: u32 = 1 << 20;
const CALLS_PER_CONNECTION_MAX: u32 = 1000;
/// Calls that a client has reset before they were looked at: beyond, it does nothing else, and its connection ends.
const RESETS_WAITING_MAX: usize = 20;
/// Answers to a call that may wait for the connection.
const SEND_BUFFER_BYTES: usize = 256 << 10;
/// A silent HTTP/2 connection is asked whether it is still there, and closed without an answer. So is one that is
/// stuck within a frame of HTTP/2, since it cannot answer.
const PING_INTERVAL: Duration = Duration::from_secs(30);
const PING_TIMEOUT: Duration = Duration::from_secs(20);
/// TLS handshakes at one time.
const HANDSHAKES_MAX: usize = 1024;
/// After an accept that failed, mostly for lack of file descriptors: until some may be free again.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Between two lines in the log that say so.
const ACCEPT_LOG_PAUSE: Duration = Duration::from_secs(10);
/// Behind a hint the rest of what came is thrown away for this long. Without it the kernel answers unread bytes with
/// a reset, which takes the hint with it.
const LINGER: Duration = Duration::from_millis(250);

/// A listener, and what is spoken there.
pub(crate) struct Listener {
    source: Source,
    /// None: no TLS.
    tls: Option<Tls>,
}

enum Source {
    Tcp(TcpListener),
    Pipe(PipeListener),
}

impl Source {
    async fn accept(&mut self) -> std::io::Result<(Wire, IpAddr)> {
        match self {
            Self::Tcp(listener) => {
                let (tcp, peer) = listener.accept().await?;
                // Acks are small and must not wait for more.
                let _ = tcp.set_nodelay(true);
                Ok((Wire::Tcp(tcp), peer.ip()))
            }
            Self::Pipe(pipes) => match pipes.accept().await {
                Some(pipe) => Ok((Wire::Pipe(pipe), Ipv4Addr::LOCALHOST.into())),
                None => std::future::pending().await, // nobody can dial any more
            },
        }
    }
}

struct Tls {
    acceptor: TlsAcceptor,
    handshakes: Arc<Semaphore>,
}

impl Listener {
    /// Binds.
    ///
    /// # Errors
    /// `Unavailable`, naming the key, where it cannot bind; those of a TLS configuration.
    pub(crate) async fn bind(
        listen: &str,
        key: &str,
        certificate: Option<&Arc<Certificate>>,
    ) -> Result<(SocketAddr, Self), Error> {
        let tcp = TcpListener::bind(listen).await;
        let bound = tcp.and_then(|tcp| Ok((tcp.local_addr()?, tcp)));
        let (address, tcp) = bound.map_err(|error| {
            Error::unavailable("cannot_listen", format!("cannot listen on {listen} ({key}): {error}"))
        })?;
        let acceptor = certificate.map(tls_acceptor).transpose()?;
        let tls =
            acceptor.map(|acceptor| Tls { acceptor, handshakes: Arc::new(Semaphore::new(HANDSHAKES_MAX)) });
        Ok((address, Self { source: Source::Tcp(tcp), tls }))
    }

    /// Of connections within this process, without TLS.
    pub(crate) fn pipe(pipes: PipeListener) -> Self {
        Self { source: Source::Pipe(pipes), tls: None }
    }
}

fn tls_acceptor(certificate: &Arc<Certificate>) -> Result<TlsAcceptor, Error> {
    let tls = certificate.tls(&[&TLS13, &TLS12], &[b"h2", b"http/1.1"])?;
    Ok(TlsAcceptor::from(Arc::new(tls)))
}

/// Serves connections until the gateway drains.
pub(crate) async fn accept(mut listener: Listener, router: Router, app: Arc<App>) {
    let mut logged: Option<Instant> = None;
    loop {
        let accepted = tokio::select! {
            biased; // drain first: a storm of connections must not hold it up
            () = app.scope.draining() => return,
            accepted = listener.source.accept() => accepted,
        };
        let (wire, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                if logged.is_none_or(|at| at.elapsed() >= ACCEPT_LOG_PAUSE) {
                    tracing::warn!(%error, "cannot accept connections");
                    logged = Some(Instant::now());
                }
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let connection = match app.place(peer) {
            Ok(connection) => connection,
            Err(error) => {
                app.metrics.error(&error);
                refuse(wire, &error, listener.tls.is_some());
                continue;
            }
        };
        match (&listener.tls, wire) {
            (None, wire) | (Some(_), wire @ Wire::Pipe(_)) => {
                app.scope.spawn("connection", plain(wire, router.clone(), connection, Arc::clone(&app)));
            }
            (Some(tls), Wire::Tcp(tcp)) => {
                let Ok(permit) = Arc::clone(&tls.handshakes).try_acquire_owned() else {
                    let message = format!("{HANDSHAKES_MAX} TLS handshakes are under way: try again");
                    app.metrics.error(&Error::busy("too_many_handshakes", message, Duration::from_secs(1)));
                    continue;
                };
                let serving = under_tls(tcp, tls.acceptor.clone(), permit, router.clone(), connection);
                app.scope.spawn("tls connection", serving(Arc::clone(&app)));
            }
        }
    }
}

/// Says why, without waiting: a new connection's send buffer has room for it. Under TLS nothing can be said.
fn refuse(mut wire: Wire, error: &Error, is_tls: bool) {
    if !is_tls {
        let answer = answer("503 Service Unavailable", error);
        let _ = futures_util::FutureExt::now_or_never(wire.write_all(answer.as_bytes()));
    }
}

/// An answer to what was no request yet.
fn answer(status: &str, error: &Error) -> String {
    let body = serde_json::json!({ "error": error }).to_string();
    let retry = error.retry_after_ms.map(|ms| format!("retry-after: {}\r\n", ms.div_ceil(1000)));
    let (retry, length) = (retry.unwrap_or_default(), body.len());
    format!(
        "HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n{retry}\
         connection: close\r\n\r\n{body}"
    )
}

/// Says what is wrong with a connection that spoke something else, and ends it.
async fn hint(tcp: &mut (impl AsyncReadExt + AsyncWriteExt + Unpin), error: &Error, app: &App) {
    app.metrics.error(error);
    let told = async {
        tcp.write_all(answer("400 Bad Request", error).as_bytes()).await?;
        read_out(tcp).await
    };
    // Nothing is owed to such a peer, whatever comes of this.
    let _ = timeout(LINGER, told).await;
}

/// Says that nothing more is said, and throws away what still comes.
async fn read_out(tcp: &mut (impl AsyncReadExt + AsyncWriteExt + Unpin)) -> std::io::Result<()> {
    tcp.shutdown().await?;
    let mut rest = [0; 1024];
    while tcp.read(&mut rest).await? > 0 {}
    Ok(())
}

async fn plain(wire: Wire, router: Router, connection: Connection, app: Arc<App>) {
    let socket = Socket::plain(Counted::new(wire), app.config.write_timeout());
    serve(socket, router, connection, app).await;
}

/// A connection from its TLS handshake on.
fn under_tls(
    tcp: TcpStream,
    acceptor: TlsAcceptor,
    permit: OwnedSemaphorePermit,
    router: Router,
    connection: Connection,
) -> impl FnOnce(Arc<App>) -> std::pin::Pin<Box<dyn Future<Output = ()> + Send>> {
    move |app| {
        Box::pin(async move {
            let handshake = tokio::select! {
                biased; // drain first: the client may never say anything
                () = app.scope.draining() => return,
                handshake = timeout(app.config.handshake_timeout(), shake_hands(tcp, acceptor, &app)) => handshake,
            };
            drop(permit);
            match handshake {
                Ok(Some(socket)) => serve(socket, router, connection, app).await,
                Ok(None) => {}
                Err(_) => {
                    let message = "a TLS handshake that did not end in time";
                    app.metrics.error(&Error::invalid("handshake_timeout", message));
                }
            }
        })
    }
}

/// None where there is nobody to serve.
async fn shake_hands(mut tcp: TcpStream, acceptor: TlsAcceptor, app: &App) -> Option<Socket> {
    let mut first = [0];
    if tcp.peek(&mut first).await.ok()? > 0 && first[0] != TLS_HANDSHAKE {
        let message = "this port speaks TLS alone (gateway.tls_listen): use https:// or wss://";
        hint(&mut tcp, &Error::invalid("no_tls_on_tls_port", message), app).await;
        return None;
    }
    match acceptor.accept(Counted::new(Wire::Tcp(tcp))).into_fallible().await {
        Ok(tls) => Some(Socket::tls(tls, app.config.write_timeout())),
        Err((error, mut tcp)) => {
            app.metrics.error(&Error::invalid("tls_handshake", error.to_string()));
            tracing::debug!(%error, "TLS handshake failed");
            // The alert has been sent. A client whose certificate is refused has sent its request behind it already.
            let _ = timeout(LINGER, read_out(&mut tcp)).await;
            None
        }
    }
}

async fn serve(mut socket: Socket, router: Router, connection: Connection, app: Arc<App>) {
    let begins = tokio::select! {
        biased; // drain first: the client may never say anything
        () = app.scope.draining() => return,
        begins = timeout(app.config.handshake_timeout(), socket.begins()) => begins,
    };
    let Ok(Ok(begins)) = begins else {
        return tracing::debug!("a connection that said nothing");
    };
    let counting = Arc::clone(&app);
    let service = hyper::service::service_fn(move |request: hyper::Request<Incoming>| {
        respond(request, router.clone(), connection.clone(), Arc::clone(&counting))
    });
    let served = match begins {
        Begins::Tls => {
            let message = "this port speaks no TLS: use http:// or ws://, or the port of gateway.tls_listen";
            return hint(&mut socket, &Error::invalid("tls_on_plain_port", message), &app).await;
        }
        Begins::Http2 => {
            let serving = http2_builder(app.scope.clone()).serve_connection(TokioIo::new(socket), service);
            until_drained!(serving, app)
        }
        Begins::Http1 => {
            let mut builder = http1::Builder::new();
            builder
                .timer(TokioTimer::new())
                .header_read_timeout(app.config.handshake_timeout())
                .max_buf_size(READ_BYTES_MAX);
            let socket = TokioIo::new(Http1Socket::new(socket));
            let serving = builder.serve_connection(socket, service).with_upgrades();
            until_drained!(serving, app)
        }
    };
    if let Err(error) = served {
        count(&error, &app);
        tracing::debug!(%error, "connection ended");
    }
}

/// Connections that were ended for what their clients did, or did not.
fn count(error: &hyper::Error, app: &App) {
    let mut source = std::error::Error::source(error);
    let is_slow = std::iter::from_fn(|| {
        let this = source?;
        source = this.source();
        Some(this)
    })
    .filter_map(|error| error.downcast_ref::<std::io::Error>())
    .any(|error| error.kind() == std::io::ErrorKind::TimedOut);
    let code = match () {
        () if is_slow => "slow_consumer",
        () if error.is_parse() => "malformed_request",
        () if error.is_timeout() => "handshake_timeout",
        () => return,
    };
    app.metrics.error(&Error::invalid(code, error.to_string()));
}

async fn respond(
    mut request: hyper::Request<Incoming>,
    router: Router,
    connection: Connection,
    app: Arc<App>,
) -> Result<axum::response::Response, std::convert::Infallible> {
    let gate = Gate::of(&request);
    let checked = gate.check(&request, &app.config.allowed_origins);
    let is_refused = checked.is_err();
    request.extensions_mut().insert(connection);
    if let Ok(call) = CALL.try_with(CallEnd::clone) {
        request.extensions_mut().insert(call);
    }
    let response = match checked {
        Ok(()) => router.oneshot(request).await?,
        Err(refusal) => axum::response::IntoResponse::into_response(refusal),
    };
    if let Some(http::Code(error)) = response.extensions().get() {
        app.metrics.error(error);
    }
    Ok(gate.finish(response, is_refused))
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
        let end = CallEnd::default();
        let cut_off = end.clone();
        self.0.spawn(
            "request",
            CALL.scope(end, async move {
                tokio::select! {
                    biased; // a call that is cut off waits for nothing; what is dropped is reset
                    () = cut_off.is_cut_off() => {}
                    _ = request => {}
                }
            }),
        );
    }
}

fn http2_builder(scope: TaskScope) -> http2::Builder<InScope> {
    let mut builder = http2::Builder::new(InScope(scope));
    builder
        .timer(TokioTimer::new())
        .initial_stream_window_size(CALL_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_concurrent_streams(CALLS_PER_CONNECTION_MAX)
        .max_pending_accept_reset_streams(RESETS_WAITING_MAX)
        .max_send_buf_size(SEND_BUFFER_BYTES)
        .max_frame_size(FRAME_BYTES_MAX)
        .max_header_list_size(HEAD_BYTES_MAX as u32)
        .keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(PING_TIMEOUT);
    builder
}
