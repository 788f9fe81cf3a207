//! Bare receivers of messages: WebSocket and QUIC.
//!
//! *Owns*: the two libraries' set-up, which is that of the gateway; the few words that a producer waits for.
//! *Does not own*: the link to the pod (`bare`).

use std::net::{Ipv4Addr, UdpSocket};
use std::path::Path;
use std::pin::pin;
use std::sync::Arc;

use anyhow::{bail, ensure};
use bytes::{BufMut, Bytes, BytesMut};
use futures_util::{SinkExt, StreamExt};
use quinn::crypto::rustls::QuicServerConfig;
use quinn::{Endpoint, EndpointConfig, RecvStream, SendStream, ServerConfig, TokioRuntime, TransportConfig};
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::version::TLS13;
use sluice_shared::frame::{
    Ack, GatewayFrame, Opened, ProducerFrame, QUIC_ALPN, QUIC_DATAGRAM_BYTES_MAX, RECORDS_HEADER_BYTES,
    SUBPROTOCOL,
};
use sluice_shared::ids::StreamId;
use sluice_shared::prefixed::{PREFIX_BYTES, prefix};
use tokio::net::TcpStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::handshake::server::{Request, Response};
use tokio_tungstenite::tungstenite::http::HeaderValue;
use tokio_tungstenite::tungstenite::protocol::WebSocketConfig;
use tokio_tungstenite::{WebSocketStream, accept_hdr_async_with_config};

use super::{Forward, Payload, Receiver, carry};

/// As gateways have them (`gateway/src/edge/websocket.rs`, `quic.rs`).
const READ_BUFFER_BYTES: usize = 32 << 10;
const STREAM_WINDOW_BYTES: u32 = 2 << 20;
const QUIC_WINDOW_BYTES: u32 = 16 << 20;
const CHUNKS_PER_READ: usize = 32;
const SUBPROTOCOL_HEADER: &str = "sec-websocket-protocol";

/// Speaks to one producer.
pub(super) async fn serve_websocket(socket: TcpStream, forward: &Forward) -> anyhow::Result<()> {
    let mut is_framed = false;
    #[expect(clippy::result_large_err, reason = "the library's own type")]
    let answer = |request: &Request, mut response: Response| {
        is_framed = request.headers().contains_key(SUBPROTOCOL_HEADER);
        if is_framed {
            response.headers_mut().insert(SUBPROTOCOL_HEADER, HeaderValue::from_static(SUBPROTOCOL));
        }
        Ok(response)
    };
    let limits = WebSocketConfig::default().read_buffer_size(READ_BUFFER_BYTES);
    let socket = accept_hdr_async_with_config(socket, answer, Some(limits)).await?;
    let mut receiver = SocketReceiver { socket, is_framed, rows: forward.rows };
    if is_framed {
        ensure!(receiver.next().await?.is_none(), "records before `open`");
    }
    let link = forward.open().await?;
    let opened = if is_framed {
        Message::Binary(opened())
    } else {
        Message::text("{\"next_offset\":0,\"stream\":\"~bare\"}")
    };
    receiver.socket.send(opened).await?;
    carry(&mut receiver, link).await?;
    // Whether the producer waits for this or has gone is all the same.
    let _ = receiver.socket.close(None).await;
    Ok(())
}

fn opened() -> Bytes {
    let opened = Opened {
        stream: StreamId::ephemeral(),
        next_offset: 0,
        stream_end: 0,
        window_bytes: super::WINDOW_BYTES as u64,
        frame_bytes_max: super::MESSAGE_BYTES_MAX as u64,
        requests: 0,
    };
    GatewayFrame::Opened(opened).encode()
}

fn ack(durable_next: u64) -> Bytes {
    GatewayFrame::Ack(Ack { durable: durable_next.checked_sub(1), ..Ack::default() }).encode()
}

/// None for any other frame than records: `open` and `finish` are where they belong.
fn payload(frame: Bytes) -> anyhow::Result<Option<Payload>> {
    match ProducerFrame::decode(frame)? {
        ProducerFrame::Records { count, payload, .. } => {
            Ok(Some(Payload { count, bytes: payload, is_line: false }))
        }
        ProducerFrame::Open(_) | ProducerFrame::Finish(_) => Ok(None),
    }
}

struct SocketReceiver {
    socket: WebSocketStream<TcpStream>,
    is_framed: bool,
    rows: u32,
}

impl Receiver for SocketReceiver {
    async fn next(&mut self) -> anyhow::Result<Option<Payload>> {
        match self.socket.next().await.transpose()? {
            Some(Message::Binary(frame)) => payload(frame),
            Some(Message::Text(text)) => {
                Ok(Some(Payload { count: self.rows, bytes: text.into(), is_line: true }))
            }
            None | Some(Message::Close(_)) => Ok(None),
            Some(other) => bail!("unexpected message {other:?}"),
        }
    }

    async fn ack(&mut self, durable_next: u64) -> anyhow::Result<()> {
        let told = match (self.is_framed, durable_next.checked_sub(1)) {
            (true, _) => Message::Binary(ack(durable_next)),
            (false, Some(durable)) => Message::text(format!("{{\"durable\":{durable}}}")),
            (false, None) => return Ok(()),
        };
        Ok(self.socket.send(told).await?)
    }
}

/// Receives over QUIC until it is killed.
pub(super) async fn listen_quic(forward: Forward, cert: &Path, key: &Path) -> anyhow::Result<()> {
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?;
    let mut config = EndpointConfig::default();
    config.max_udp_payload_size(QUIC_DATAGRAM_BYTES_MAX)?;
    let endpoint = Endpoint::new(config, Some(quic_config(cert, key)?), socket, Arc::new(TokioRuntime))?;
    println!("listens on {}", endpoint.local_addr()?);
    while let Some(incoming) = endpoint.accept().await {
        let connection = forward.clone();
        forward.spawn(async move {
            let accepted = incoming.await?;
            let (send, recv) = accepted.accept_bi().await?;
            let receiver = QuicReceiver { send, recv, bytes: BytesMut::new() };
            serve_quic(receiver, &connection).await?;
            accepted.closed().await;
            Ok(())
        });
    }
    Ok(())
}

fn quic_config(cert: &Path, key: &Path) -> anyhow::Result<ServerConfig> {
    let chain = CertificateDer::pem_file_iter(cert)?.collect::<Result<Vec<_>, _>>()?;
    let tls = rustls::ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_protocol_versions(&[&TLS13])?;
    let mut tls = tls.with_no_client_auth().with_single_cert(chain, PrivateKeyDer::from_pem_file(key)?)?;
    tls.alpn_protocols = vec![QUIC_ALPN.to_vec()];
    let mut transport = TransportConfig::default();
    transport.stream_receive_window(STREAM_WINDOW_BYTES.into()).receive_window(QUIC_WINDOW_BYTES.into());
    let mut config = ServerConfig::with_crypto(Arc::new(QuicServerConfig::try_from(tls)?));
    config.transport_config(Arc::new(transport));
    Ok(config)
}

async fn serve_quic(mut receiver: QuicReceiver, forward: &Forward) -> anyhow::Result<()> {
    ensure!(receiver.next().await?.is_none(), "records before `open`");
    let link = forward.open().await?;
    receiver.tell(opened()).await?;
    carry(&mut receiver, link).await?;
    Ok(receiver.send.finish()?)
}

struct QuicReceiver {
    send: SendStream,
    recv: RecvStream,
    /// What has come of the present frame, and of those behind it.
    bytes: BytesMut,
}

impl QuicReceiver {
    async fn tell(&mut self, frame: Bytes) -> anyhow::Result<()> {
        let mut parts = [Bytes::copy_from_slice(&prefix(&frame)), frame];
        Ok(self.send.write_all_chunks(&mut parts).await?)
    }

    /// The next whole frame. Memory for it is taken once, as its length is known: its bytes are copied once.
    fn frame(&mut self) -> Option<Bytes> {
        let prefix = self.bytes.first_chunk::<PREFIX_BYTES>()?;
        let whole = PREFIX_BYTES + u32::from_be_bytes(*prefix) as usize;
        if self.bytes.len() < whole {
            self.bytes.reserve(whole - self.bytes.len());
            return None;
        }
        Some(self.bytes.split_to(whole).freeze().slice(PREFIX_BYTES..))
    }
}

impl Receiver for QuicReceiver {
    async fn next(&mut self) -> anyhow::Result<Option<Payload>> {
        loop {
            if let Some(frame) = self.frame() {
                return payload(frame);
            }
            let mut chunks = [const { Bytes::new() }; CHUNKS_PER_READ];
            let read = pin!(self.recv.read_chunks(&mut chunks)).await?;
            let Some(count) = read else {
                ensure!(self.bytes.len() < RECORDS_HEADER_BYTES, "a frame that is cut off");
                return Ok(None);
            };
            chunks[..count].iter().for_each(|chunk| self.bytes.put_slice(chunk));
        }
    }

    async fn ack(&mut self, durable_next: u64) -> anyhow::Result<()> {
        self.tell(ack(durable_next)).await
    }
}
