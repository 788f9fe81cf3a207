//! A target that is posted to: each message is a request, and its answer the ack.
//!
//! *Owns*: what HTTP/1.1 says, one request after the other on one connection.
//! *Does not own*: when what is sent.

use anyhow::{Context, bail, ensure};
use bytes::{Buf, Bytes, BytesMut};
use serde::Deserialize;
use sluice_shared::frame::Encoding;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::mpsc;

use super::{Answers, Ask, Opened, Outbound, Refused, Room, Target, Told};
use crate::load::messages::{Body, Message};

/// One request at a time: the next may not be read before its answer is written.
const ROOM: Room = Room { bytes: usize::MAX, messages: 1 };
/// Of an answer.
const ANSWER_BYTES_MAX: usize = 1 << 20;
/// Refused records are told with the answer, one by one.
const END_OF_HEAD: &[u8] = b"\r\n\r\n";

/// A connection for each stream. `wait_committed`: the answer is that the records are in the table.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Http {
    pub(crate) wait_committed: bool,
}

impl Target for Http {
    type Out = HttpOut;
    type Answers = HttpAnswers;

    async fn open(&self, ask: &Ask<'_>) -> anyhow::Result<Opened<Self>> {
        let kind = match ask.encoding {
            Encoding::Json => "application/x-ndjson",
            Encoding::Arrow => "application/vnd.apache.arrow.stream",
            other => bail!("no {other} is posted here"),
        };
        let wait = if self.wait_committed { "committed" } else { "durable" };
        let head = format!(
            "POST /v1/tables/{}/records?wait={wait} HTTP/1.1\r\nhost: {}\r\ncontent-type: {kind}\r\ncontent-length: ",
            ask.table, ask.address
        );
        let socket = TcpStream::connect(ask.address).await.context("cannot connect")?;
        socket.set_nodelay(true)?;
        let (read, write) = socket.into_split();
        let (sent, asked) = mpsc::channel(ROOM.messages);
        Ok(Opened {
            out: HttpOut { socket: write, head: head.into(), sent: Some(sent) },
            answers: HttpAnswers {
                socket: read,
                asked,
                awaited: None,
                buffer: BytesMut::new(),
                wait_committed: self.wait_committed,
            },
            next_offset: 0,
            stream: None,
            room: ROOM,
        })
    }
}

/// Requests.
pub(crate) struct HttpOut {
    socket: OwnedWriteHalf,
    head: Bytes,
    /// Where the records of each request begin and how many there are; None once all is said.
    sent: Option<mpsc::Sender<(u64, u32)>>,
}

impl Outbound for HttpOut {
    async fn send(&mut self, first_offset: u64, message: &Message) -> anyhow::Result<()> {
        let Body::Payload(payload) = &message.body else { bail!("a post has its records in one piece") };
        let sent = self.sent.as_ref().context("all was said")?;
        sent.send((first_offset, message.rows)).await.ok().context("the connection has ended")?;
        let length = Bytes::from(format!("{}\r\n\r\n", payload.len()));
        let mut request = self.head.clone().chain(length).chain(payload.clone());
        while request.has_remaining() {
            self.socket.write_buf(&mut request).await?;
        }
        Ok(())
    }

    async fn flush(&mut self) -> anyhow::Result<()> {
        Ok(())
    }

    async fn finish(&mut self) -> anyhow::Result<()> {
        self.sent = None;
        Ok(())
    }
}

/// Answers, in the order of the requests. Whoever stops waiting for one loses nothing of it.
pub(crate) struct HttpAnswers {
    socket: OwnedReadHalf,
    asked: mpsc::Receiver<(u64, u32)>,
    /// The request whose answer comes next.
    awaited: Option<(u64, u32)>,
    buffer: BytesMut,
    wait_committed: bool,
}

#[derive(Deserialize)]
struct Answer {
    #[serde(default)]
    rejected_total: u64,
}

impl HttpAnswers {
    /// Waits for an answer; its body.
    async fn answer(&mut self) -> anyhow::Result<Bytes> {
        let head_bytes = loop {
            let found = self.buffer.windows(END_OF_HEAD.len()).position(|bytes| bytes == END_OF_HEAD);
            if let Some(at) = found {
                break at + END_OF_HEAD.len();
            }
            self.more().await?;
        };
        let head = std::str::from_utf8(&self.buffer[..head_bytes]).context("an answer that is no text")?;
        let lengths = head.lines().filter_map(|line| line.split_once(':'));
        let mut length = lengths.filter(|(name, _)| name.eq_ignore_ascii_case("content-length"));
        let (_, length) = length.next().with_context(|| format!("an answer without a length: {head}"))?;
        let length: usize = length.trim().parse().with_context(|| format!("no length: {head}"))?;
        ensure!(length <= ANSWER_BYTES_MAX, "an answer of {length} bytes");
        let is_good = head.starts_with("HTTP/1.1 200 ");
        let first_line = head.lines().next().unwrap_or_default().to_owned();
        while self.buffer.len() < head_bytes + length {
            self.more().await?;
        }
        let body = self.buffer.split_to(head_bytes + length).freeze().slice(head_bytes..);
        if !is_good {
            return Err(Refused(format!("{first_line}: {}", String::from_utf8_lossy(&body))).into());
        }
        Ok(body)
    }

    async fn more(&mut self) -> anyhow::Result<()> {
        let read = self.socket.read_buf(&mut self.buffer).await.context("the connection is lost")?;
        ensure!(read > 0, "the connection is lost: it was closed before an answer");
        Ok(())
    }
}

impl Answers for HttpAnswers {
    async fn next(&mut self) -> anyhow::Result<Option<Told>> {
        if self.awaited.is_none() {
            self.awaited = self.asked.recv().await;
        }
        let Some((first, rows)) = self.awaited else { return Ok(None) };
        let body = self.answer().await?;
        self.awaited = None;
        let answer: Answer = serde_json::from_slice(&body).context("an answer that is no JSON")?;
        if answer.rejected_total > 0 {
            return Err(Refused(format!("records: {}", String::from_utf8_lossy(&body))).into());
        }
        let next = first + u64::from(rows);
        let committed_next = self.wait_committed.then_some(next);
        Ok(Some(Told { committed_next, ..Told::durable(next) }))
    }
}
