//! Producers that have a transport of messages: WebSocket, with frames of `sluice.v1` or plain texts, and QUIC.
//!
//! *Owns*: what these protocols say.
//! *Does not own*: the pace (`producers`).

use std::net::Ipv4Addr;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, bail, ensure};
use bytes::Bytes;
use futures_util::stream::{SplitSink, SplitStream};
use futures_util::{SinkExt, StreamExt};
use quinn::crypto::rustls::QuicClientConfig;
use quinn::{ClientConfig, Endpoint, RecvStream, SendStream, TransportConfig};
use rustls::RootCertStore;
use rustls::crypto::ring;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::version::TLS13;
use serde::Deserialize;
use sluice_shared::frame::{
    Encoding, Finish, GatewayFrame, Open, ProducerFrame, QUIC_ALPN, SUBPROTOCOL, UnknownFields,
};
use sluice_shared::ids::TableName;
use sluice_shared::prefixed::{FrameReader, prefix};
use tokio::net::TcpStream;
use tokio_tungstenite::tungstenite::Message as SocketMessage;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;
use tokio_tungstenite::tungstenite::http::HeaderValue;
use tokio_tungstenite::{MaybeTlsStream, WebSocketStream, connect_async_with_config};

use super::{Answers, Outbound, Target, after};
use crate::edges::TABLE;
use crate::edges::messages::{Body, Load, Message};

/// Answers are small.
const ANSWER_BYTES_MAX: usize = 1 << 20;
/// Written and not yet received.
const SEND_WINDOW_BYTES: u64 = 8 << 20;
/// Taken from the connection at a time.
const CHUNKS_PER_READ: usize = 8;

type Socket = WebSocketStream<MaybeTlsStream<TcpStream>>;

/// What is said over a WebSocket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Speech {
    Frames,
    Texts,
}

/// Connects, and opens a stream.
pub(super) async fn open_websocket(
    target: &Target,
    load: &Load,
    speech: Speech,
) -> anyhow::Result<(SocketOut, SocketAnswers)> {
    let mut request = format!("ws://{}/v1/tables/{TABLE}/stream", target.address).into_client_request()?;
    if speech == Speech::Frames {
        request.headers_mut().insert("sec-websocket-protocol", HeaderValue::from_static(SUBPROTOCOL));
    }
    let connecting = Box::pin(connect_async_with_config(request, None, true));
    let (mut socket, _) = connecting.await.context("cannot connect")?;
    if speech == Speech::Frames {
        socket.send(SocketMessage::Binary(open_frame(load.encoding, None).encode())).await?;
    }
    let (sink, stream) = socket.split();
    let mut answers = SocketAnswers { stream, speech };
    ensure!(answers.next().await? == Some(0), "closed before the stream was opened");
    Ok((SocketOut { sink, speech }, answers))
}

fn open_frame(encoding: Encoding, table: Option<TableName>) -> ProducerFrame {
    ProducerFrame::Open(Open {
        table,
        name: None,
        resume_at: None,
        encoding,
        unknown: UnknownFields::Refuse,
        schema: None,
        token: None,
        rate_bytes_per_s: None,
    })
}

fn records_frame(first_offset: u64, message: &Message) -> anyhow::Result<Bytes> {
    let Body::Payload(payload) = &message.body else { bail!("a frame has its records in one piece") };
    let records = ProducerFrame::Records { first_offset, count: message.rows, payload: payload.clone() };
    Ok(records.encode())
}

/// One more than the last offset that is acked.
fn durable_next(frame: GatewayFrame) -> anyhow::Result<Option<u64>> {
    match frame {
        GatewayFrame::Opened(opened) => Ok(Some(opened.next_offset)),
        GatewayFrame::Ack(ack) => after(ack.durable),
        other => bail!("unexpected answer {other:?}"),
    }
}

pub(super) struct SocketOut {
    sink: SplitSink<Socket, SocketMessage>,
    speech: Speech,
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
            Speech::Frames => {
                let finish = ProducerFrame::Finish(Finish::default()).encode();
                Ok(self.sink.send(SocketMessage::Binary(finish)).await?)
            }
            // Behind a close no acks are told.
            Speech::Texts => Ok(()),
        }
    }
}

pub(super) struct SocketAnswers {
    stream: SplitStream<Socket>,
    speech: Speech,
}

/// An answer as plain text.
#[derive(Deserialize)]
struct Told {
    next_offset: Option<u64>,
    durable: Option<u64>,
}

impl Answers for SocketAnswers {
    async fn next(&mut self) -> anyhow::Result<Option<u64>> {
        loop {
            let next = match self.stream.next().await.transpose().context("the connection is lost")? {
                None | Some(SocketMessage::Close(_)) => return Ok(None),
                Some(SocketMessage::Binary(frame)) if self.speech == Speech::Frames => {
                    durable_next(GatewayFrame::decode(&frame)?)?
                }
                Some(SocketMessage::Text(text)) if self.speech == Speech::Texts => {
                    let told: Told = serde_json::from_str(&text)?;
                    let next = told.next_offset.or(after(told.durable)?);
                    Some(next.with_context(|| format!("unexpected answer {text}"))?)
                }
                Some(SocketMessage::Ping(_) | SocketMessage::Pong(_)) => None,
                Some(other) => bail!("unexpected message {other:?}"),
            };
            if next.is_some() {
                return Ok(next);
            }
        }
    }
}

/// Connects, and opens a stream.
pub(super) async fn open_quic(target: &Target, load: &Load) -> anyhow::Result<(QuicOut, QuicAnswers)> {
    let endpoint = Endpoint::client((Ipv4Addr::LOCALHOST, 0).into())?;
    let config = quic_config(&target.certificate)?;
    let name = target.address.ip().to_string();
    let connection = endpoint.connect_with(config, target.address, &name)?.await.context("cannot connect")?;
    let (send, recv) = connection.open_bi().await?;
    let mut out = QuicOut { send };
    out.write(open_frame(load.encoding, Some(TABLE.parse()?)).encode()).await?;
    let frames = FrameReader::new(ANSWER_BYTES_MAX);
    let mut answers = QuicAnswers { recv, frames, _connection: connection, _endpoint: endpoint };
    ensure!(answers.next().await? == Some(0), "closed before the stream was opened");
    Ok((out, answers))
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
    transport.send_window(SEND_WINDOW_BYTES);
    let mut config = ClientConfig::new(Arc::new(QuicClientConfig::try_from(tls)?));
    config.transport_config(Arc::new(transport));
    Ok(config)
}

pub(super) struct QuicOut {
    send: SendStream,
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
        Ok(self.send.finish()?)
    }
}

pub(super) struct QuicAnswers {
    recv: RecvStream,
    frames: FrameReader,
    _connection: quinn::Connection,
    _endpoint: Endpoint,
}

impl Answers for QuicAnswers {
    async fn next(&mut self) -> anyhow::Result<Option<u64>> {
        loop {
            if let Some(frame) = self.frames.next_frame()? {
                match durable_next(GatewayFrame::decode(&frame)?)? {
                    None => continue,
                    told => return Ok(told),
                }
            }
            let mut chunks = [const { Bytes::new() }; CHUNKS_PER_READ];
            match self.recv.read_chunks(&mut chunks).await? {
                Some(count) => chunks[..count].iter().for_each(|chunk| self.frames.push(chunk)),
                None => return Ok(None),
            }
        }
    }
}
