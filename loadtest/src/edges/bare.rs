//! A receiver that does nothing but hand on what comes: the same transport library and the same link to the pod as a
//! gateway, in a process of its own.
//!
//! Beside that it does what no gateway can leave out: it gathers small payloads to frames of the size in which gateways
//! send them, waits for the pod where too much is not acked, and acks. It does not keep frames to send them again, looks
//! into no record, and believes what producers say.
//!
//! *Owns*: the program, the link, the order in which things are done.
//! *Does not own*: how payloads come (`framed`, `http`, `grpc`).

mod framed;
mod grpc;
mod http;

use std::collections::VecDeque;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use anyhow::{Context, bail};
use bytes::{BufMut, Bytes, BytesMut};
use clap::{Args, ValueEnum};
use futures_util::FutureExt;
use sluice_shared::lifecycle::{OnPanic, TaskScope};
use sluice_shared::link::{self, PodAddress};
use sluice_shared::proto::pod_client::PodClient;
use sluice_shared::proto::stream_request::Kind as Ask;
use sluice_shared::proto::stream_response::Kind as Answer;
use sluice_shared::proto::{self, MESSAGE_BYTES_MAX, StreamRequest, StreamResponse};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;

use super::{TABLE, Transport};

/// As gateways have them (`gateway/src/session.rs`, `session/window.rs`, `upstream.rs`), so that the pod gets the same
/// frames in the same requests.
const WINDOW_BYTES: usize = 8 << 20;
const SMALL_BYTES: usize = 4 << 10;
const MERGED_BYTES_MAX: usize = 64 << 10;
const REQUEST_BYTES: usize = 1 << 20;
const REQUESTS_WAITING_MAX: usize = 2;
const PAYLOADS_IN_A_ROW_MAX: usize = 256;

/// The command line.
#[derive(Debug, Args)]
pub struct Options {
    /// What is received.
    kind: Kind,
    /// The pod's address.
    #[arg(long)]
    pod: SocketAddr,
    /// Records of a message, where it does not say so itself.
    #[arg(long)]
    rows: u32,
    /// The certificate of QUIC, PEM.
    #[arg(long)]
    cert: PathBuf,
    /// Its key.
    #[arg(long)]
    key: PathBuf,
}

/// What is received.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Kind {
    Websocket,
    Quic,
    Http,
    Grpc,
}

/// What the command line calls a transport's receiver.
pub(super) fn name(transport: Transport) -> &'static str {
    match transport {
        Transport::WebSocketFrames | Transport::WebSocketTexts => "websocket",
        Transport::Quic => "quic",
        Transport::Http => "http",
        Transport::Zerobus | Transport::Flight => "grpc",
    }
}

/// Receives until it is killed.
///
/// # Errors
/// It cannot listen.
pub async fn run(options: Options) -> anyhow::Result<()> {
    let forward = Forward {
        pod: PodAddress::Tcp(options.pod.to_string()),
        rows: options.rows,
        scope: TaskScope::new(OnPanic::EndTask),
    };
    if options.kind == Kind::Quic {
        return framed::listen_quic(forward, &options.cert, &options.key).await;
    }
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.context("no free port")?;
    println!("listens on {}", listener.local_addr()?);
    if options.kind == Kind::Grpc {
        return grpc::serve(forward, listener).await;
    }
    loop {
        let (socket, _) = listener.accept().await?;
        socket.set_nodelay(true)?;
        let connection = forward.clone();
        match options.kind {
            Kind::Websocket => {
                forward.spawn(async move { framed::serve_websocket(socket, &connection).await })
            }
            _ => forward.spawn(async move { http::serve(socket, connection).await }),
        }
    }
}

/// The way to the pod, as all connections share it.
#[derive(Clone)]
struct Forward {
    pod: PodAddress,
    rows: u32,
    scope: TaskScope,
}

impl Forward {
    fn spawn(&self, connection: impl Future<Output = anyhow::Result<()>> + Send + 'static) {
        self.scope.spawn("bare connection", async move {
            if let Err(error) = connection.await {
                eprintln!("a connection ended: {error:#}");
            }
        });
    }

    /// Opens a stream on the pod.
    async fn open(&self) -> anyhow::Result<Link> {
        let mut client = PodClient::new(link::channel(&self.pod)?)
            .max_decoding_message_size(MESSAGE_BYTES_MAX)
            .max_encoding_message_size(MESSAGE_BYTES_MAX);
        let (requests, receiver) = mpsc::channel(REQUESTS_WAITING_MAX);
        let open =
            proto::Open { table: TABLE.to_owned(), stream: "~bare".to_owned(), ..proto::Open::default() };
        requests.send(StreamRequest { kind: Some(Ask::Open(Box::new(open))) }).await?;
        let mut responses = client.stream(ReceiverStream::new(receiver)).await?.into_inner();
        match responses.message().await?.and_then(|response| response.kind) {
            Some(Answer::Opened(_)) => Ok(Link { requests, responses }),
            other => bail!("the pod's answer to an open is {other:?}"),
        }
    }
}

/// An open stream on the pod.
struct Link {
    requests: mpsc::Sender<StreamRequest>,
    responses: Streaming<StreamResponse>,
}

/// Records as they came.
struct Payload {
    count: u32,
    bytes: Bytes,
    /// One JSON record without its line end, which pods have between records.
    is_line: bool,
}

/// The way to one producer.
trait Receiver: Send {
    /// The next payload; None at the end. May be dropped and called again.
    fn next(&mut self) -> impl Future<Output = anyhow::Result<Option<Payload>>> + Send;
    /// All records before this offset are durable.
    fn ack(&mut self, durable_next: u64) -> impl Future<Output = anyhow::Result<()>> + Send;
}

/// Carries a stream to its end.
async fn carry(receiver: &mut impl Receiver, link: Link) -> anyhow::Result<()> {
    let Link { requests, mut responses } = link;
    let (mut out, mut has_ended) = (Outgoing::default(), false);
    while !has_ended || !out.is_empty() {
        let reads = !has_ended && out.unacked_bytes < WINDOW_BYTES;
        tokio::select! {
            biased; // as a gateway: answers, then what waits, then more
            response = responses.message() => {
                let acked = acked(response?)?;
                out.acked(acked);
                receiver.ack(acked).await?;
            }
            room = requests.reserve(), if out.has_unsent() => room?.send(out.next_request()),
            payload = receiver.next(), if reads => {
                has_ended = !out.take(payload?);
                for _ in 1..PAYLOADS_IN_A_ROW_MAX {
                    if has_ended || out.unacked_bytes >= WINDOW_BYTES {
                        break;
                    }
                    let Some(payload) = receiver.next().now_or_never() else { break };
                    has_ended = !out.take(payload?);
                }
            }
        }
    }
    Ok(())
}

fn acked(response: Option<StreamResponse>) -> anyhow::Result<u64> {
    match response.and_then(|response| response.kind) {
        Some(Answer::Ack(ack)) => Ok(ack.durable_next),
        other => bail!("the pod's answer to frames is {other:?}"),
    }
}

/// Frames on their way to the pod.
#[derive(Default)]
struct Outgoing {
    unsent: VecDeque<proto::Frame>,
    /// Small payloads that are gathered; after all `unsent`.
    merging: BytesMut,
    merging_count: u32,
    next_offset: u64,
    /// Of each request that is not acked: its end, and its bytes.
    sent: VecDeque<(u64, usize)>,
    /// Of all that was pushed.
    unacked_bytes: usize,
}

impl Outgoing {
    fn is_empty(&self) -> bool {
        !self.has_unsent() && self.sent.is_empty()
    }

    fn has_unsent(&self) -> bool {
        !self.unsent.is_empty() || self.merging_count > 0
    }

    /// Whether there was something to take.
    fn take(&mut self, payload: Option<Payload>) -> bool {
        let has_come = payload.is_some();
        payload.into_iter().for_each(|payload| self.push(payload));
        has_come
    }

    fn push(&mut self, payload: Payload) {
        let Payload { count, bytes, is_line } = payload;
        if bytes.len() > SMALL_BYTES {
            self.seal();
            self.unacked_bytes += bytes.len();
            self.frame(count, bytes);
            return;
        }
        if self.merging.len() + bytes.len() + 1 > MERGED_BYTES_MAX {
            self.seal();
        }
        if self.merging.is_empty() {
            self.merging.reserve(MERGED_BYTES_MAX);
        }
        let before = self.merging.len();
        self.merging.extend_from_slice(&bytes);
        if is_line {
            self.merging.put_u8(b'\n');
        }
        self.unacked_bytes += self.merging.len() - before;
        self.merging_count += count;
    }

    fn seal(&mut self) {
        if self.merging_count > 0 {
            let (count, payload) = (std::mem::take(&mut self.merging_count), self.merging.split().freeze());
            self.frame(count, payload);
        }
    }

    fn frame(&mut self, count: u32, payload: Bytes) {
        let frame = proto::Frame { first_offset: self.next_offset, count, payload, requests: None };
        self.next_offset += u64::from(count);
        self.unsent.push_back(frame);
    }

    fn next_request(&mut self) -> StreamRequest {
        self.seal();
        let (mut frames, mut bytes, mut end) = (Vec::new(), 0, 0);
        while let Some(frame) = self.unsent.front() {
            if bytes > 0 && bytes + frame.payload.len() > REQUEST_BYTES {
                break;
            }
            bytes += frame.payload.len();
            end = frame.first_offset + u64::from(frame.count);
            frames.extend(self.unsent.pop_front());
        }
        self.sent.push_back((end, bytes));
        StreamRequest { kind: Some(Ask::Frames(proto::Frames { frames })) }
    }

    fn acked(&mut self, durable_next: u64) {
        while self.sent.front().is_some_and(|(end, _)| *end <= durable_next) {
            let Some((_, bytes)) = self.sent.pop_front() else { break };
            self.unacked_bytes -= bytes;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn push(out: &mut Outgoing, bytes: usize) {
        out.push(Payload { count: 1, bytes: vec![b'x'; bytes].into(), is_line: true });
    }

    fn frames(out: &mut Outgoing) -> Vec<(u64, u32, usize)> {
        let Some(Ask::Frames(frames)) = out.next_request().kind else { panic!("frames") };
        frames.frames.iter().map(|frame| (frame.first_offset, frame.count, frame.payload.len())).collect()
    }

    #[test]
    fn frames_are_as_large_as_a_gateways() {
        let mut out = Outgoing::default();
        (0..3).for_each(|_| push(&mut out, 100));
        push(&mut out, SMALL_BYTES + 1);
        push(&mut out, 100);
        assert_eq!(frames(&mut out), [(0, 3, 303), (3, 1, SMALL_BYTES + 1), (4, 1, 101)]);
        assert!(!out.has_unsent() && !out.is_empty());
        out.acked(4);
        assert!(!out.is_empty());
        out.acked(5);
        assert!(out.is_empty());
        assert_eq!(out.unacked_bytes, 0);
    }

    #[test]
    fn requests_are_bounded() {
        let mut out = Outgoing::default();
        (0..3).for_each(|_| push(&mut out, REQUEST_BYTES / 2));
        assert_eq!(frames(&mut out).len(), 2);
        assert_eq!(frames(&mut out).len(), 1);
        push(&mut out, 2 * REQUEST_BYTES);
        assert_eq!(frames(&mut out), [(3, 1, 2 * REQUEST_BYTES)]);
    }
}
