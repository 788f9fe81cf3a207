//! How to reach a pod: over TCP, or over an in-process pipe that carries the very same service.
//!
//! *Owns*: pod addresses, opening a channel to one, the pipe's two ends.
//! *Does not own*: retries, and what is said over the channel.

use std::fmt;
use std::io;
use std::pin::Pin;
use std::str::FromStr;
use std::task::{Context, Poll};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use tokio::io::DuplexStream;
use tokio::sync::mpsc;
use tonic::transport::{Channel, Endpoint, Uri};

use crate::error::Error;

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

/// Opens a channel to a pod. Does not wait for the pod: the first call connects, and a lost connection is
/// made again by the next call.
///
/// # Errors
/// `Invalid` where the address is no authority.
pub fn channel(address: &PodAddress) -> Result<Channel, Error> {
    let authority = match address {
        PodAddress::Tcp(authority) => authority.as_str(),
        PodAddress::InProcess(_) => "in-process.invalid",
    };
    let endpoint = Endpoint::from_shared(format!("http://{authority}"))
        .map_err(|error| {
            Error::invalid("invalid_pod_address", format!("pod address {authority:?}: {error}"))
        })?
        .connect_timeout(CONNECT_TIMEOUT)
        .tcp_nodelay(true)
        .initial_connection_window_size(LINK_WINDOW_BYTES)
        .initial_stream_window_size(CALL_WINDOW_BYTES)
        .http2_keep_alive_interval(KEEPALIVE_INTERVAL)
        .keep_alive_timeout(KEEPALIVE_TIMEOUT)
        .keep_alive_while_idle(true);
    Ok(match address {
        PodAddress::Tcp(_) => endpoint.connect_lazy(),
        PodAddress::InProcess(dialer) => {
            let dialer = dialer.clone();
            endpoint.connect_with_connector_lazy(tower::service_fn(move |_: Uri| {
                let dialer = dialer.clone();
                async move { dialer.dial().await.map(TokioIo::new) }
            }))
        }
    })
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
    async fn dial(&self) -> io::Result<DuplexStream> {
        let (ours, theirs) = tokio::io::duplex(PIPE_BYTES);
        let refused = |_| io::Error::new(io::ErrorKind::ConnectionRefused, "the in-process pod has ended");
        self.pipes.send(theirs).await.map_err(refused)?;
        Ok(ours)
    }
}

impl tokio_stream::Stream for PipeListener {
    type Item = io::Result<DuplexStream>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.pipes.poll_recv(cx).map(|pipe| pipe.map(Ok))
    }
}
