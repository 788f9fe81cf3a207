//! Targets that have a transport of messages: WebSocket, with frames of `sluice.v1` or plain texts, and QUIC.
//!
//! *Owns*: what these protocols say, and which streams share a connection of QUIC.
//! *Does not own*: when what is sent.

use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, bail};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use bytes::Bytes;
use futures_util::stream::{SplitSink, SplitStream};
use futures_util::{SinkExt, StreamExt};
use quinn::crypto::rustls::QuicClientConfig;
use quinn::{
    ClientConfig, Connection, Endpoint, MtuDiscoveryConfig, RecvStream, SendStream, TransportConfig,
};
use rustls::RootCertStore;
use rustls::crypto::ring;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::version::TLS13;
use serde::Deserialize;
use sluice_shared::frame::{
    Encoding, Finish, FinishWhen, GatewayFrame, Open, ProducerFrame, QUIC_ALPN, QUIC_DATAGRAM_BYTES_MAX,
    SUBPROTOCOL, UnknownFields,
};
use sluice_shared::ids::TableName;
use sluice_shared::prefixed::{FrameReader, prefix};
use tokio::net::TcpStream;
use tokio::sync::Mutex;
use tokio_tungstenite::tungstenite::Message as SocketMessage;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;
use tokio_tungstenite::tungstenite::http::HeaderValue;
use tokio_tungstenite::tungstenite::protocol::WebSocketConfig;
use tokio_tungstenite::{MaybeTlsStream, WebSocketStream, connect_async_with_config};

use super::{Answers, Ask, Opened, Outbound, Refused, Room, Target, Told, after};
use crate::load::messages::{Body, Message};

const READ_BUFFER_BYTES: usize = 8 << 10;
/// Plain texts are told no window.
const TEXT_WINDOW_BYTES: u64 = 4 << 20;
/// Answers are small.
const ANSWER_BYTES_MAX: usize = 1 << 20;
/// Written and not yet received.
const SEND_WINDOW_BYTES: u64 = 8 << 20;
/// Taken from the connection at a time.
const CHUNKS_PER_READ: usize = 8;

type Socket = WebSocketStream<MaybeTlsStream<TcpStream>>;

/// What is said over a WebSocket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Speech {
    Frames,
    Texts,
}

/// A connection for each stream.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WebSocket(pub(crate) Speech);

impl Target for WebSocket {
    type Out = SocketOut;
    type Answers = SocketAnswers;

    async fn open(&self, ask: &Ask<'_>) -> anyhow::Result<Opened<Self>> {
        let Self(speech) = *self;
        let url = format!("ws://{}/v1/tables/{}/stream", ask.address, ask.table);
        let mut request = url.into_client_request()?;
        if speech == Speech::Frames {
            request.headers_mut().insert("sec-websocket-protocol", HeaderValue::from_static(SUBPROTOCOL));
        }
        // A thousand connections with the default of 128 KiB each would measure the machine's memory.
        let config = WebSocketConfig::default().read_buffer_size(READ_BUFFER_BYTES);
        let connecting = Box::pin(connect_async_with_config(request, Some(config), true));
        let (mut socket, _) = connecting.await.context("cannot connect")?;
        if speech == Speech::Frames {
            socket.send(SocketMessage::Binary(open_frame(ask, None).encode())).await?;
        }
        let (sink, stream) = socket.split();
        let mut answers = SocketAnswers { stream, speech };
        let begin = answers.begin().await?;
        let out = SocketOut { sink, speech, finish: finish_frame(ask) };
        Ok(begin.opened(out, answers))
    }
}

/// What is told of a stream that has opened.
struct Begin {
    stream: String,
    next_offset: u64,
    window_bytes: u64,
}

impl Begin {
    fn of(frame: GatewayFrame) -> anyhow::Result<Self> {
        match frame {
            GatewayFrame::Opened(opened) => Ok(Self {
                stream: opened.stream.to_string(),
                next_offset: opened.next_offset,
                window_bytes: opened.window_bytes,
            }),
            GatewayFrame::Error(error) => Err(refused(&error).into()),
            other => bail!("the answer to open is {other:?}"),
        }
    }

    fn opened<T: Target>(self, out: T::Out, answers: T::Answers) -> Opened<T> {
        let bytes = usize::try_from(self.window_bytes).unwrap_or(usize::MAX);
        let room = Room { bytes, messages: usize::MAX };
        Opened { out, answers, next_offset: self.next_offset, stream: Some(self.stream), room }
    }
}

fn open_frame(ask: &Ask<'_>, table: Option<TableName>) -> ProducerFrame {
    ProducerFrame::Open(Open {
        table,
        name: ask.name.and_then(|name| name.parse().ok()),
        resume_at: ask.resume_at,
        encoding: ask.encoding,
        unknown: UnknownFields::Refuse,
        schema: (ask.encoding == Encoding::Protobuf).then(|| BASE64_STANDARD.encode(ask.schema)),
        token: None,
        rate_bytes_per_s: None,
    })
}

fn finish_frame(ask: &Ask<'_>) -> Bytes {
    let when = if ask.until_committed { FinishWhen::Committed } else { FinishWhen::Durable };
    ProducerFrame::Finish(Finish { when }).encode()
}

fn records_frame(first_offset: u64, message: &Message) -> anyhow::Result<Bytes> {
    let Body::Payload(payload) = &message.body else { bail!("a frame has its records in one piece") };
    let records = ProducerFrame::Records { first_offset, count: message.rows, payload: payload.clone() };
    Ok(records.encode())
}

fn told(frame: GatewayFrame) -> anyhow::Result<Told> {
    match frame {
        GatewayFrame::Ack(ack) => Ok(Told {
            durable_next: after(ack.durable.max(ack.committed))?,
            committed_next: after(ack.committed)?,
            version: ack.version,
            ..Told::default()
        }),
        GatewayFrame::Rejected(rejected) => Ok(Told { rejected: Some(rejected.offset), ..Told::default() }),
        GatewayFrame::Move(_) => Ok(Told { moves: true, ..Told::default() }),
        GatewayFrame::Error(error) => Err(refused(&error).into()),
        GatewayFrame::Opened(_) => bail!("opened twice"),
    }
}

fn refused(error: &sluice_shared::error::Error) -> Refused {
    Refused(format!("{}: {}", error.code, error.message))
}

pub(crate) struct SocketOut {
    sink: SplitSink<Socket, SocketMessage>,
    speech: Speech,
    finish: Bytes,
}

impl Outbound for SocketOut {
    async fn send(&mut self, first_offset: u64, message: &Message) -> anyhow::Result<()> {
        let message = match &message.body {
            Body::Text(text) => SocketMessage::Text(text.clone()),
            _ => SocketMessage::Binary(records_frame(first_offset, message)?),
        };
        Ok(self.sink.feed(message).await?)
    }

    async fn flush(&mut self) -> anyhow::Result<()> {
        Ok(self.sink.flush().await?)
    }

    async fn finish(&mut self) -> anyhow::Result<()> {
        match self.speech {
            Speech::Frames => Ok(self.sink.send(SocketMessage::Binary(self.finish.clone())).await?),
            // Behind a close no acks are told.
            Speech::Texts => Ok(()),
        }
    }
}

pub(crate) struct SocketAnswers {
    stream: SplitStream<Socket>,
    speech: Speech,
}

/// An answer as plain text.
#[derive(Deserialize)]
struct Text {
    stream: Option<String>,
    next_offset: Option<u64>,
    durable: Option<u64>,
    committed: Option<u64>,
    version: Option<u64>,
    rejected: Option<RejectedText>,
}

#[derive(Deserialize)]
struct RejectedText {
    offset: u64,
}

impl SocketAnswers {
    async fn message(&mut self) -> anyhow::Result<Option<SocketMessage>> {
        loop {
            match self.stream.next().await.transpose().context("the connection is lost")? {
                None | Some(SocketMessage::Close(_)) => return Ok(None),
                Some(SocketMessage::Ping(_) | SocketMessage::Pong(_)) => {}
                Some(message) => return Ok(Some(message)),
            }
        }
    }

    async fn begin(&mut self) -> anyhow::Result<Begin> {
        match self.message().await?.context("closed before the stream was opened")? {
            SocketMessage::Binary(frame) => Begin::of(GatewayFrame::decode(&frame)?),
            SocketMessage::Text(text) => {
                let Text { stream, next_offset, .. } =
                    serde_json::from_str(&text).with_context(|| format!("unexpected answer {text}"))?;
                let next_offset = next_offset.with_context(|| format!("the stream is not open: {text}"))?;
                Ok(Begin { stream: stream.unwrap_or_default(), next_offset, window_bytes: TEXT_WINDOW_BYTES })
            }
            other => bail!("unexpected message {other:?}"),
        }
    }
}

impl Answers for SocketAnswers {
    async fn next(&mut self) -> anyhow::Result<Option<Told>> {
        match self.message().await? {
            None => Ok(None),
            Some(SocketMessage::Binary(frame)) if self.speech == Speech::Frames => {
                told(GatewayFrame::decode(&frame)?).map(Some)
            }
            Some(SocketMessage::Text(text)) if self.speech == Speech::Texts => {
                let Text { durable, committed, version, rejected, .. } =
                    serde_json::from_str(&text).with_context(|| format!("unexpected answer {text}"))?;
                let rejected = rejected.map(|rejected| rejected.offset);
                let (durable_next, committed_next) = (after(durable.max(committed))?, after(committed)?);
                Ok(Some(Told { durable_next, committed_next, version, rejected, moves: false }))
            }
            Some(other) => bail!("unexpected message {other:?}"),
        }
    }
}

/// One endpoint, and connections that some streams share.
#[derive(Debug)]
pub(crate) struct Quic {
    endpoint: Endpoint,
    streams_per_connection: usize,
    /// The connection to an address that is being filled, and how many streams were opened on it.
    filling: Mutex<HashMap<String, (Connection, usize)>>,
}

impl Quic {
    /// Nothing is connected yet.
    pub(crate) fn new(streams_per_connection: usize) -> anyhow::Result<Self> {
        let endpoint = Endpoint::client((Ipv4Addr::LOCALHOST, 0).into())?;
        Ok(Self {
            endpoint,
            streams_per_connection: streams_per_connection.max(1),
            filling: Mutex::default(),
        })
    }

    async fn connection(&self, ask: &Ask<'_>) -> anyhow::Result<Connection> {
        // Held while it connects: others are to find the new connection, and not to make one each.
        let mut filling = self.filling.lock().await;
        if let Some((connection, streams)) = filling.get_mut(ask.address)
            && *streams < self.streams_per_connection
            && connection.close_reason().is_none()
        {
            *streams += 1;
            return Ok(connection.clone());
        }
        let config = quic_config(ask.certificate.context("QUIC needs a certificate to trust")?)?;
        let address: SocketAddr = ask.address.parse().with_context(|| ask.address.to_owned())?;
        let name = address.ip().to_string();
        let connecting = self.endpoint.connect_with(config, address, &name)?;
        let connection = connecting.await.context("cannot connect")?;
        filling.insert(ask.address.to_owned(), (connection.clone(), 1));
        Ok(connection)
    }
}

impl Target for Quic {
    type Out = QuicOut;
    type Answers = QuicAnswers;

    async fn open(&self, ask: &Ask<'_>) -> anyhow::Result<Opened<Self>> {
        let connection = self.connection(ask).await?;
        let (send, recv) = connection.open_bi().await?;
        let mut out = QuicOut { send, finish: finish_frame(ask) };
        out.write(open_frame(ask, Some(ask.table.parse()?)).encode()).await?;
        let frames = FrameReader::new(ANSWER_BYTES_MAX);
        let mut answers = QuicAnswers { recv, frames, _connection: connection };
        let frame = answers.frame().await?.context("closed before the stream was opened")?;
        Ok(Begin::of(frame)?.opened(out, answers))
    }
}

fn quic_config(certificate: &Path) -> anyhow::Result<ClientConfig> {
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_file_iter(certificate)? {
        roots.add(certificate?)?;
    }
    let tls = rustls::ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_protocol_versions(&[&TLS13])?;
    let mut tls = tls.with_root_certificates(roots).with_no_client_auth();
    tls.alpn_protocols = vec![QUIC_ALPN.to_vec()];
    let mut transport = TransportConfig::default();
    let mut discovery = MtuDiscoveryConfig::default();
    discovery.upper_bound(QUIC_DATAGRAM_BYTES_MAX);
    // In turn, many small streams would fill many packets: as they are written, few.
    transport.send_window(SEND_WINDOW_BYTES).mtu_discovery_config(Some(discovery)).send_fairness(false);
    let mut config = ClientConfig::new(Arc::new(QuicClientConfig::try_from(tls)?));
    config.transport_config(Arc::new(transport));
    Ok(config)
}

pub(crate) struct QuicOut {
    send: SendStream,
    finish: Bytes,
}

impl QuicOut {
    async fn write(&mut self, frame: Bytes) -> anyhow::Result<()> {
        let mut parts = [Bytes::copy_from_slice(&prefix(&frame)), frame];
        Ok(self.send.write_all_chunks(&mut parts).await?)
    }
}

impl Outbound for QuicOut {
    async fn send(&mut self, first_offset: u64, message: &Message) -> anyhow::Result<()> {
        self.write(records_frame(first_offset, message)?).await
    }

    async fn flush(&mut self) -> anyhow::Result<()> {
        Ok(())
    }

    async fn finish(&mut self) -> anyhow::Result<()> {
        self.write(self.finish.clone()).await?;
        Ok(self.send.finish()?)
    }
}

pub(crate) struct QuicAnswers {
    recv: RecvStream,
    frames: FrameReader,
    _connection: Connection,
}

impl QuicAnswers {
    async fn frame(&mut self) -> anyhow::Result<Option<GatewayFrame>> {
        loop {
            if let Some(frame) = self.frames.next_frame()? {
                return Ok(Some(GatewayFrame::decode(&frame)?));
            }
            let mut chunks = [const { Bytes::new() }; CHUNKS_PER_READ];
            match self.recv.read_chunks(&mut chunks).await? {
                Some(count) => chunks[..count].iter().for_each(|chunk| self.frames.push(chunk)),
                None => return Ok(None),
            }
        }
    }
}

impl Answers for QuicAnswers {
    async fn next(&mut self) -> anyhow::Result<Option<Told>> {
        self.frame().await?.map(told).transpose()
    }
}
