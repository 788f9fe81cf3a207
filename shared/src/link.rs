//! How to reach a pod: over TCP, or over an in-process pipe that carries the very same service.
//!
//! *Owns*: pod addresses, opening a channel to one and cutting it, the pipe's two ends, TCP and pipe as one (`Wire`).
//! *Does not own*: retries, and what is said over the channel.

mod gathered;

use std::fmt;
use std::io;
use std::pin::Pin;
use std::str::FromStr;
use std::task::{Context, Poll};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, DuplexStream, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tonic::transport::{Channel, Endpoint, Uri};

use crate::error::Error;

pub use gathered::Gathered;

/// Bytes that a pipe holds per direction.
const PIPE_BYTES: usize = 1 << 20;
/// Dials that may wait for the pod to accept them.
const DIALS_WAITING_MAX: usize = 16;
/// HTTP/2 flow-control windows. Each call has its own budget; that of the link is never the one that is used up, or a few
/// calls that nobody reads would hold up all others.
const LINK_WINDOW_BYTES: u32 = 1 << 30;
const CALL_WINDOW_BYTES: u32 = 2 << 20;
/// Largest HTTP/2 frame that a pod takes: a request is written and read in one piece, where the default of 16 KiB would
/// cut it in many.
const LINK_FRAME_BYTES: u32 = 1 << 20;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(2);
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(4);

/// Where a pod listens.
#[derive(Clone)]
pub enum PodAddress {
    /// `host:port`.
    Tcp(String),
    /// In this very process.
    InProcess(PipeDialer),
}

impl PartialEq for PodAddress {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Tcp(one), Self::Tcp(other)) => one == other,
            (Self::InProcess(one), Self::InProcess(other)) => one.pipes.same_channel(&other.pipes),
            _ => false,
        }
    }
}

impl Eq for PodAddress {}

impl FromStr for PodAddress {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let port =
            text.rsplit_once(':').and_then(|(host, port)| (!host.is_empty()).then(|| port.parse::<u16>()));
        match port {
            Some(Ok(_)) => Ok(Self::Tcp(text.to_owned())),
            _ => Err(Error::invalid(
                "invalid_pod_address",
                format!("pod address {text:?}: expected host:port"),
            )),
        }
    }
}

impl fmt::Display for PodAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(authority) => f.write_str(authority),
            Self::InProcess(_) => f.write_str("in-process"),
        }
    }
}

impl fmt::Debug for PodAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A channel to a pod, which can be cut.
#[derive(Clone)]
pub struct PodLink {
    /// What calls go over.
    pub channel: Channel,
    cut: CancellationToken,
}

impl PodLink {
    /// Ends the connection at once, and with it all calls: for a pod that others say is lost, since one that has only
    /// stopped keeps its connections. The link cannot be used any more.
    pub fn cut(&self) {
        self.cut.cancel();
    }
}

/// Opens a channel to a pod. Does not wait for the pod: the first call connects, and a lost connection is
/// made again by the next call.
///
/// # Errors
/// `Invalid` where the address is no authority.
pub fn channel(address: &PodAddress) -> Result<Channel, Error> {
    link(address).map(|link| link.channel)
}

/// As `channel`, with the means to cut it.
///
/// # Errors
/// As `channel`.
pub fn link(address: &PodAddress) -> Result<PodLink, Error> {
    let authority = match address {
        PodAddress::Tcp(authority) => authority.clone(),
        PodAddress::InProcess(_) => "in-process.invalid".to_owned(),
    };
    let endpoint = Endpoint::from_shared(format!("http://{authority}"))
        .map_err(|error| {
            Error::invalid("invalid_pod_address", format!("pod address {authority:?}: {error}"))
        })?
        .connect_timeout(CONNECT_TIMEOUT)
        .initial_connection_window_size(LINK_WINDOW_BYTES)
        .initial_stream_window_size(CALL_WINDOW_BYTES)
        .http2_keep_alive_interval(KEEPALIVE_INTERVAL)
        .keep_alive_timeout(KEEPALIVE_TIMEOUT)
        .keep_alive_while_idle(true);
    let cut = CancellationToken::new();
    let channel = match address {
        PodAddress::Tcp(_) => {
            let cut = cut.clone();
            endpoint.connect_with_connector_lazy(tower::service_fn(move |_: Uri| {
                let (authority, cut) = (authority.clone(), cut.clone());
                async move {
                    let stream = TcpStream::connect(authority).await?;
                    stream.set_nodelay(true)?;
                    io::Result::Ok(TokioIo::new(Severable::new(Gathered::new(stream), cut)))
                }
            }))
        }
        PodAddress::InProcess(dialer) => {
            let (dialer, cut) = (dialer.clone(), cut.clone());
            endpoint.connect_with_connector_lazy(tower::service_fn(move |_: Uri| {
                let (dialer, cut) = (dialer.clone(), cut.clone());
                async move {
                    let pipe = dialer.dial().await?;
                    io::Result::Ok(TokioIo::new(Severable::new(Gathered::new(pipe), cut)))
                }
            }))
        }
    };
    Ok(PodLink { channel, cut })
}

/// A connection that ends when it is cut.
struct Severable<S> {
    io: S,
    cut: Pin<Box<WaitForCancellationFutureOwned>>,
}

impl<S> Severable<S> {
    fn new(io: S, cut: CancellationToken) -> Self {
        Self { io, cut: Box::pin(cut.cancelled_owned()) }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Severable<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.cut.as_mut().poll(cx).is_ready() {
            let message = "the pod is lost: nothing is heard of it";
            return Poll::Ready(Err(io::Error::new(io::ErrorKind::ConnectionAborted, message)));
        }
        Pin::new(&mut self.io).poll_read(cx, buf)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Severable<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}

/// A server builder whose windows and keep-alives fit what `channel` asks for.
pub fn server() -> tonic::transport::Server {
    tonic::transport::Server::builder()
        .tcp_nodelay(true)
        .initial_connection_window_size(LINK_WINDOW_BYTES)
        .initial_stream_window_size(CALL_WINDOW_BYTES)
        .max_frame_size(Some(LINK_FRAME_BYTES))
        .http2_keepalive_interval(Some(KEEPALIVE_INTERVAL))
        .http2_keepalive_timeout(Some(KEEPALIVE_TIMEOUT))
        .max_concurrent_streams(None)
}

/// A connection: in earnest, or within a process. What it costs is a branch for each read or write.
pub enum Wire {
    /// Over the network.
    Tcp(TcpStream),
    /// Over a pipe.
    Pipe(DuplexStream),
}

impl Wire {
    /// Connects to `host:port`.
    ///
    /// # Errors
    /// Those of the socket.
    pub async fn connect(authority: &str) -> io::Result<Self> {
        let tcp = TcpStream::connect(authority).await?;
        tcp.set_nodelay(true)?;
        Ok(Self::Tcp(tcp))
    }
}

impl AsyncRead for Wire {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(tcp) => Pin::new(tcp).poll_read(cx, buffer),
            Self::Pipe(pipe) => Pin::new(pipe).poll_read(cx, buffer),
        }
    }
}

impl AsyncWrite for Wire {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Tcp(tcp) => Pin::new(tcp).poll_write(cx, bytes),
            Self::Pipe(pipe) => Pin::new(pipe).poll_write(cx, bytes),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Tcp(tcp) => Pin::new(tcp).poll_write_vectored(cx, parts),
            Self::Pipe(pipe) => Pin::new(pipe).poll_write_vectored(cx, parts),
        }
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            Self::Tcp(tcp) => tcp.is_write_vectored(),
            Self::Pipe(pipe) => pipe.is_write_vectored(),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(tcp) => Pin::new(tcp).poll_flush(cx),
            Self::Pipe(pipe) => Pin::new(pipe).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(tcp) => Pin::new(tcp).poll_shutdown(cx),
            Self::Pipe(pipe) => Pin::new(pipe).poll_shutdown(cx),
        }
    }
}

/// The caller's end of a pod in this process.
#[derive(Clone)]
pub struct PipeDialer {
    pipes: mpsc::Sender<DuplexStream>,
}

/// The pod's end: a stream of accepted pipes, as a gRPC server takes them.
pub struct PipeListener {
    pipes: mpsc::Receiver<DuplexStream>,
}

/// Both ends of an in-process listener.
pub fn pipe() -> (PipeDialer, PipeListener) {
    let (sender, receiver) = mpsc::channel(DIALS_WAITING_MAX);
    (PipeDialer { pipes: sender }, PipeListener { pipes: receiver })
}

impl PipeDialer {
    /// A new pipe to whoever listens.
    ///
    /// # Errors
    /// `ConnectionRefused` where nobody does any more.
    pub async fn dial(&self) -> io::Result<DuplexStream> {
        let (ours, theirs) = tokio::io::duplex(PIPE_BYTES);
        let refused = |_| io::Error::new(io::ErrorKind::ConnectionRefused, "the in-process pod has ended");
        self.pipes.send(theirs).await.map_err(refused)?;
        Ok(ours)
    }
}

impl PipeListener {
    /// The next pipe that is dialled; None once nobody can dial any more.
    pub async fn accept(&mut self) -> Option<DuplexStream> {
        self.pipes.recv().await
    }
}

impl tokio_stream::Stream for PipeListener {
    type Item = io::Result<DuplexStream>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.pipes.poll_recv(cx).map(|pipe| pipe.map(Ok))
    }
}
