//! Where a gateway is, and the connections that reach it.
//!
//! *Owns*: gateway URLs, what all transports have in common.
//! *Does not own*: what is said over a connection (`task`).

pub(crate) mod websocket;
pub(crate) mod quic;
pub(crate) mod trust;

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::Uri;
use sluice_shared::frame::{GatewayFrame, Open, Opened, ProducerFrame};
use sluice_shared::link::{PipeDialer, Wire};
use tokio::time::Instant;

use crate::error::Error;
use trust::Trust;

/// Port of a gateway whose URL names none.
const PORT: u16 = 7070;
/// Until frames can be sent.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// For the answer to `open`: the gateway may have to ask several pods.
const OPEN_TIMEOUT: Duration = Duration::from_secs(30);
/// A gateway's frames are small control bodies.
const FRAME_BYTES_MAX: usize = 1 << 20;

/// How gateways are reached that speak WebSocket.
#[derive(Clone, Default)]
pub(crate) enum Way {
    /// Over the network.
    #[default]
    Network,
    /// Within this process, by `host:port`: for simulations.
    Pipes(Arc<dyn Fn(&str) -> PipeDialer + Send + Sync>),
}

impl Way {
    async fn to(&self, authority: &str) -> std::io::Result<Wire> {
        match self {
            Self::Network => Wire::connect(authority).await,
            Self::Pipes(dialer) => dialer(authority).dial().await.map(Wire::Pipe),
        }
    }
}

impl fmt::Debug for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Network => "network",
            Self::Pipes(_) => "pipes",
        })
    }
}

/// A gateway's address.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct GatewayUrl {
    scheme: Scheme,
    authority: String,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Scheme {
    Ws,
    Wss,
    Quic,
}

impl GatewayUrl {
    /// Where streams into `table` are opened.
    pub(crate) fn stream(&self, table: &str) -> String {
        format!("{}://{}/v1/tables/{table}/stream", self.scheme, self.authority)
    }

    /// Host and port.
    pub(crate) fn authority(&self) -> &str {
        &self.authority
    }

    pub(crate) fn is_tls(&self) -> bool {
        self.scheme == Scheme::Wss
    }

    pub(crate) fn is_quic(&self) -> bool {
        self.scheme == Scheme::Quic
    }

    pub(crate) fn host(&self) -> &str {
        self.split().0
    }

    fn port(&self) -> u16 {
        self.split().1.parse().expect("a port was put there")
    }

    fn split(&self) -> (&str, &str) {
        self.authority.rsplit_once(':').expect("a port was put there")
    }
}

impl FromStr for GatewayUrl {
    type Err = Error;

    fn from_str(url: &str) -> Result<Self, Error> {
        let invalid = |why: &str| Error::Url { url: url.to_owned(), why: why.to_owned() };
        let uri: Uri = url.parse().map_err(|error| invalid(&format!("{error}; expected ws://host:port")))?;
        let scheme = match uri.scheme_str() {
            Some("ws" | "http") => Scheme::Ws,
            Some("quic") => Scheme::Quic,
            Some("wss" | "https") => Scheme::Wss,
            _ => return Err(invalid("expected ws://, wss://, http://, https:// or quic://, then host:port")),
        };
        if !matches!(uri.path(), "" | "/") || uri.query().is_some() {
            return Err(invalid("expected no path behind host:port"));
        }
        let authority = uri.authority().ok_or_else(|| invalid("it names no host"))?;
        if authority.host().is_empty() || authority.as_str().contains('@') {
            return Err(invalid("expected host:port without a user"));
        }
        let port = match authority.as_str().strip_prefix(authority.host()) {
            Some("") => PORT,
            _ => authority.port_u16().ok_or_else(|| invalid("its port is none: expected 1 to 65535"))?,
        };
        Ok(Self { scheme, authority: format!("{}:{port}", authority.host()) })
    }
}

impl fmt::Display for GatewayUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}", self.scheme, self.authority)
    }
}

impl fmt::Display for Scheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ws => "ws",
            Self::Wss => "wss",
            Self::Quic => "quic",
        })
    }
}

impl fmt::Debug for GatewayUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A connection that carries one stream.
pub(crate) struct Connection {
    url: GatewayUrl,
    io: Io,
}

enum Io {
    WebSocket(Box<websocket::Connection>),
    Quic(Box<quic::Connection>),
}

/// What a connection has to say.
pub(crate) enum Event {
    Frame(GatewayFrame),
    /// The gateway closed in an orderly way.
    Closed(Error),
    /// The same, and it says that all was well.
    Finished,
}

impl Connection {
    /// Connects, so that a stream into `table` can be opened.
    pub(crate) async fn connect(
        url: &GatewayUrl,
        table: &str,
        way: &Way,
        trust: &Trust,
    ) -> Result<Self, Error> {
        let io = match url.scheme {
            Scheme::Ws => {
                Io::WebSocket(Box::new(websocket::Connection::connect(url, table, way, None).await?))
            }
            Scheme::Wss => {
                let tls = Some(trust.http1()?);
                Io::WebSocket(Box::new(websocket::Connection::connect(url, table, way, tls).await?))
            }
            Scheme::Quic => Io::Quic(Box::new(Box::pin(quic::Connection::connect(url, trust)).await?)),
        };
        Ok(Self { url: url.clone(), io })
    }

    /// Opens the stream.
    pub(crate) async fn open(&mut self, open: Open) -> Result<Opened, Error> {
        let mut frame = Some(ProducerFrame::Open(open).encode());
        let opening = std::future::poll_fn(|cx| self.poll_io(cx, &mut || frame.take()));
        let opened = tokio::time::timeout(OPEN_TIMEOUT, opening).await;
        match opened.map_err(|_| timed_out(&self.url, "waiting for the answer to `open`", OPEN_TIMEOUT))?? {
            Event::Frame(GatewayFrame::Opened(opened)) => Ok(opened),
            Event::Frame(GatewayFrame::Error(error)) => Err(error.into()),
            Event::Frame(_) => Err(self.broke_protocol("its first frame was neither `opened` nor `error`")),
            Event::Closed(error) => Err(error),
            Event::Finished => Err(self.lost("it closed the connection before it answered `open`")),
        }
    }

    /// Reads what there is, then writes what `unsent` gives, as far as the connection takes it. Reading comes first:
    /// acks make room, and a gateway that cannot get rid of its acks would stop reading.
    pub(crate) fn poll_io(
        &mut self,
        cx: &mut Context<'_>,
        unsent: &mut dyn FnMut() -> Option<Bytes>,
    ) -> Poll<Result<Event, Error>> {
        match &mut self.io {
            Io::WebSocket(connection) => connection.poll_io(cx, unsent),
            Io::Quic(connection) => connection.poll_io(cx, unsent),
        }
    }

    /// When the gateway was last heard of.
    pub(crate) fn heard_at(&self) -> Instant {
        match &self.io {
            Io::WebSocket(connection) => connection.heard_at(),
            Io::Quic(connection) => connection.heard_at(),
        }
    }

    /// Says goodbye, without insisting.
    pub(crate) async fn close(self) {
        match self.io {
            Io::WebSocket(connection) => connection.close().await,
            Io::Quic(connection) => connection.close().await,
        }
    }

    pub(crate) fn lost(&self, what: &str) -> Error {
        lost(&self.url, what)
    }

    pub(crate) fn broke_protocol(&self, what: &str) -> Error {
        broke_protocol(&self.url, what)
    }
}

pub(crate) fn lost(url: &GatewayUrl, what: &str) -> Error {
    Error::Connection { url: url.to_string(), what: what.to_owned() }
}

pub(crate) fn broke_protocol(url: &GatewayUrl, what: &str) -> Error {
    Error::Protocol { url: url.to_string(), what: what.to_owned() }
}

pub(crate) fn timed_out(url: &GatewayUrl, doing: &str, after: Duration) -> Error {
    lost(url, &format!("timed out after {} s while {doing}", after.as_secs()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_of_gateways() {
        for (url, shown) in [
            ("ws://127.0.0.1:7070", "ws://127.0.0.1:7070"),
            ("http://localhost:80/", "ws://localhost:80"),
            ("ws://[::1]:7070", "ws://[::1]:7070"),
            ("ws://gateway", "ws://gateway:7070"),
            ("wss://gateway", "wss://gateway:7070"),
            ("https://localhost:443/", "wss://localhost:443"),
            ("quic://[::1]:70/", "quic://[::1]:70"),
            ("quic://gateway", "quic://gateway:7070"),
        ] {
            assert_eq!(url.parse::<GatewayUrl>().expect(url).to_string(), shown);
        }
        for url in [
            "",
            "localhost:7070",
            "wss://a:1/x",
            "ftp://a:1",
            "ws://a:1/v1",
            "ws://u@a:1",
            "ws://:1",
            "ws://a:99999",
            "ws://[::1]:65536",
        ] {
            let error = url.parse::<GatewayUrl>().expect_err(url).to_string();
            assert!(error.contains("invalid gateway URL"), "{error}");
        }
    }

    #[test]
    fn a_url_names_host_and_port() {
        let url: GatewayUrl = "quic://[::1]:70".parse().expect("valid");
        assert_eq!((url.host(), url.port()), ("[::1]", 70));
    }
}
