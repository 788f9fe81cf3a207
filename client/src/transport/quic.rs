//! One QUIC connection that carries one stream, ALPN `sluice/1`.
//!
//! *Owns*: the handshake, frames behind their lengths, reading while writing, quinn's limits.
//! *Does not own*: what the frames mean.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use quinn::crypto::rustls::QuicClientConfig;
use quinn::{
    ClientConfig, ConnectionError, Endpoint, IdleTimeout, MtuDiscoveryConfig, ReadError, RecvStream,
    SendStream, TransportConfig, TransportErrorCode, VarInt, WriteError,
};
use rustls::version::TLS13;
use sluice_shared::error::{Error as GatewayError, ErrorKind, QUIC_OK};
use sluice_shared::frame::{GatewayFrame, QUIC_ALPN, QUIC_DATAGRAM_BYTES_MAX};
use sluice_shared::prefixed::{FrameReader, prefix};
use tokio::time::Instant;

use crate::error::Error;
use crate::transport::trust::{self, Trust};
use crate::transport::{
    CONNECT_TIMEOUT, Event, FRAME_BYTES_MAX, GatewayUrl, broke_protocol, lost, timed_out,
};

/// What a gateway may send before it is read: acks are small.
const RECEIVE_WINDOW_BYTES: u32 = 1 << 20;
/// Written and not yet received: at 100 ms a stream carries 80 MB/s, if the gateway's window lets it.
const SEND_WINDOW_BYTES: u64 = 8 << 20;
/// A gateway that is silent for so long is gone.
const IDLE_TIMEOUT_MS: u32 = 60_000;
/// Also keeps the mappings of NATs, many of which last for 30 s.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(15);
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);
/// Frames written before the connection is read again.
const WRITES_PER_READ: usize = 16;
/// Added to the alerts of TLS, to make codes of QUIC.
const TLS_ALERTS: u64 = 0x100;
/// Taken from the connection at a time; each is of one packet.
const CHUNKS_PER_READ: usize = 8;

fn client_config(trust: &Trust) -> Result<ClientConfig, Error> {
    let tls = trust.tls(&[&TLS13], &[QUIC_ALPN])?;
    let crypto = QuicClientConfig::try_from(tls)
        .map_err(|error| GatewayError::internal(format!("TLS configuration: {error}")))?;
    let mut discovery = MtuDiscoveryConfig::default();
    discovery.upper_bound(QUIC_DATAGRAM_BYTES_MAX);
    let mut transport = TransportConfig::default();
    transport
        .mtu_discovery_config(Some(discovery))
        .max_concurrent_bidi_streams(0_u32.into())
        .max_concurrent_uni_streams(0_u32.into())
        .datagram_receive_buffer_size(None)
        .stream_receive_window(RECEIVE_WINDOW_BYTES.into())
        .receive_window(RECEIVE_WINDOW_BYTES.into())
        .send_window(SEND_WINDOW_BYTES)
        .max_idle_timeout(Some(IdleTimeout::from(VarInt::from_u32(IDLE_TIMEOUT_MS))))
        .keep_alive_interval(Some(KEEP_ALIVE_INTERVAL));
    let mut config = ClientConfig::new(Arc::new(crypto));
    config.transport_config(Arc::new(transport));
    Ok(config)
}

pub(crate) struct Connection {
    send: SendStream,
    recv: RecvStream,
    frames: FrameReader,
    /// What is left of the frame that is being written: its prefix and itself.
    writing: [Bytes; 2],
    /// The gateway takes no more: what it has to say about that is read.
    is_stopped: bool,
    connection: quinn::Connection,
    endpoint: Endpoint,
    url: GatewayUrl,
}

impl Connection {
    /// Connects, and begins the stream.
    pub(crate) async fn connect(url: &GatewayUrl, trust: &Trust) -> Result<Self, Error> {
        let config = trust.quic(client_config)?;
        let connecting = tokio::time::timeout(CONNECT_TIMEOUT, dial(url, config)).await;
        let (endpoint, connection) =
            connecting.map_err(|_| timed_out(url, "connecting", CONNECT_TIMEOUT))??;
        let (send, recv) = connection.open_bi().await.map_err(|error| failed(url, &error))?;
        Ok(Self {
            send,
            recv,
            frames: FrameReader::new(FRAME_BYTES_MAX),
            writing: Default::default(),
            is_stopped: false,
            connection,
            endpoint,
            url: url.clone(),
        })
    }

    /// As of any transport: see `transport::Connection`.
    pub(crate) fn poll_io(
        &mut self,
        cx: &mut Context<'_>,
        unsent: &mut dyn FnMut() -> Option<Bytes>,
    ) -> Poll<Result<Event, Error>> {
        if let Poll::Ready(event) = self.poll_read(cx) {
            return Poll::Ready(event);
        }
        for _ in 0..WRITES_PER_READ {
            if let Err(error) = ready!(self.poll_write(cx)) {
                return Poll::Ready(Err(error));
            }
            let Some(frame) = unsent() else { return Poll::Pending };
            self.writing = [Bytes::copy_from_slice(&prefix(&frame)), frame];
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    fn poll_read(&mut self, cx: &mut Context<'_>) -> Poll<Result<Event, Error>> {
        loop {
            let broke = |error: GatewayError| broke_protocol(&self.url, &error.message);
            if let Some(frame) = self.frames.next_frame().map_err(broke)? {
                return Poll::Ready(GatewayFrame::decode(&frame).map(Event::Frame).map_err(broke));
            }
            let mut chunks = [const { Bytes::new() }; CHUNKS_PER_READ];
            let read = ready!(pin!(self.recv.read_chunks(&mut chunks)).poll(cx));
            match read {
                Ok(Some(count)) => chunks[..count].iter().for_each(|chunk| self.frames.push(chunk)),
                Ok(None) => return Poll::Ready(Ok(Event::Finished)),
                Err(ReadError::Reset(code)) => return Poll::Ready(Ok(self.closed(code, "reset the stream"))),
                Err(ReadError::ConnectionLost(error)) => return Poll::Ready(Err(failed(&self.url, &error))),
                Err(error) => return Poll::Ready(Err(lost(&self.url, &error.to_string()))),
            }
        }
    }

    /// Writes what is left of the present frame.
    fn poll_write(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Error>> {
        while self.writing.iter().any(|part| !part.is_empty()) {
            if self.is_stopped {
                return Poll::Pending;
            }
            let left =
                if self.writing[0].is_empty() { &mut self.writing[1..] } else { &mut self.writing[..] };
            let written = ready!(pin!(self.send.write_chunks(left)).poll(cx));
            match written {
                Ok(_) => {}
                // Its error is on the way, or has been read.
                Err(WriteError::Stopped(_)) => self.is_stopped = true,
                Err(WriteError::ConnectionLost(error)) => return Poll::Ready(Err(failed(&self.url, &error))),
                Err(error) => return Poll::Ready(Err(lost(&self.url, &error.to_string()))),
            }
        }
        Poll::Ready(Ok(()))
    }

    /// When the gateway was last heard of: the connection itself sees to that, and is lost when it falls silent.
    pub(crate) fn heard_at(&self) -> Instant {
        Instant::now()
    }

    /// Says goodbye, without insisting.
    pub(crate) async fn close(mut self) {
        // Everything that mattered has been acknowledged: a failure here is of no consequence.
        let _ = self.send.finish();
        self.connection.close(VarInt::from_u32(QUIC_OK), b"");
        let _ = tokio::time::timeout(CLOSE_TIMEOUT, self.endpoint.wait_idle()).await;
    }

    fn closed(&self, code: VarInt, how: &str) -> Event {
        let kind = ErrorKind::from_quic_code(code.into_inner()).unwrap_or(ErrorKind::Unavailable);
        let message = format!("gateway {} {how} with code {code}", self.url);
        Event::Closed(GatewayError::new(kind, "closed", message).into())
    }
}

async fn dial(url: &GatewayUrl, config: ClientConfig) -> Result<(Endpoint, quinn::Connection), Error> {
    let name = url.host().trim_matches(['[', ']']);
    let addresses = tokio::net::lookup_host((name, url.port())).await;
    let addresses = addresses.map_err(|error| lost(url, &error.to_string()))?;
    let mut failure = lost(url, "its name has no address");
    for address in addresses {
        let endpoint = endpoint_for(address).map_err(|error| lost(url, &error.to_string()))?;
        let connecting = endpoint.connect_with(config.clone(), address, name);
        match connecting.map_err(|error| lost(url, &error.to_string()))?.await {
            Ok(connection) => return Ok((endpoint, connection)),
            Err(error) => failure = failed(url, &error),
        }
    }
    Err(failure)
}

fn endpoint_for(address: SocketAddr) -> std::io::Result<Endpoint> {
    let any: SocketAddr = match address {
        SocketAddr::V4(_) => (Ipv4Addr::UNSPECIFIED, 0).into(),
        SocketAddr::V6(_) => (Ipv6Addr::UNSPECIFIED, 0).into(),
    };
    Endpoint::client(any)
}

fn failed(url: &GatewayUrl, error: &ConnectionError) -> Error {
    match error {
        ConnectionError::ApplicationClosed(close) => {
            let reason = String::from_utf8_lossy(&close.reason);
            match ErrorKind::from_quic_code(close.error_code.into_inner()) {
                None => lost(url, "it closed the connection"),
                Some(kind) => {
                    let code = close.error_code;
                    let message = format!("gateway {url} closed the connection with code {code}: {reason}");
                    GatewayError::new(kind, "closed", message).into()
                }
            }
        }
        // Our own refusal of the gateway, and the gateway's of us.
        ConnectionError::TransportError(error) if is_tls(error.code) => insecure(url, error, error.code),
        ConnectionError::ConnectionClosed(close) if is_tls(close.error_code) => {
            insecure(url, close, close.error_code)
        }
        ConnectionError::TimedOut => lost(url, "it has gone silent, or nobody is there"),
        other => lost(url, &other.to_string()),
    }
}

fn insecure(url: &GatewayUrl, what: &dyn std::fmt::Display, code: TransportErrorCode) -> Error {
    let alert = u8::try_from(u64::from(code) - TLS_ALERTS).unwrap_or_default();
    let advice = trust::refusal_by_alert(alert).map(|advice| format!(": {advice}")).unwrap_or_default();
    Error::Insecure { url: url.to_string(), what: format!("{what}{advice}") }
}

/// TLS alerts travel as codes of their own (RFC 9001 section 4.8).
fn is_tls(code: TransportErrorCode) -> bool {
    (TLS_ALERTS..TLS_ALERTS + 0x100).contains(&u64::from(code))
}
