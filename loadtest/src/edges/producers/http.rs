//! A producer that posts one long body, in chunks.
//!
//! *Owns*: what HTTP says.
//! *Does not own*: the pace (`producers`): a post has one ack, so that the receiver's own window is the bound.

use anyhow::{Context, ensure};
use bytes::{Buf, Bytes};
use sluice_shared::frame::Encoding;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};

use super::{ENDED, Receiver};
use crate::edges::TABLE;
use crate::load::messages::{Body, Load, Message};
use crate::load::target::{Answers, Outbound, Told};

/// The end of an Arrow IPC stream.
const IPC_END: [u8; 8] = [0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0];

/// Connects, and sends the head of a post.
pub(super) async fn open(target: &Receiver, load: &Load) -> anyhow::Result<(HttpOut, HttpAnswers)> {
    let is_arrow = load.encoding == Encoding::Arrow;
    let content_type = if is_arrow { "application/vnd.apache.arrow.stream" } else { "application/x-ndjson" };
    let socket = TcpStream::connect(target.address).await.context("cannot connect")?;
    socket.set_nodelay(true)?;
    let (read, write) = socket.into_split();
    let mut out = HttpOut { socket: write, is_arrow };
    let head = format!(
        "POST /v1/tables/{TABLE}/records HTTP/1.1\r\nhost: {}\r\ncontent-type: {content_type}\r\n\
         transfer-encoding: chunked\r\nconnection: close\r\n\r\n",
        target.address
    );
    out.socket.write_all(head.as_bytes()).await?;
    if is_arrow {
        out.chunk(load.schema.clone()).await?;
    }
    Ok((out, HttpAnswers { socket: read, has_answered: false }))
}

pub(super) struct HttpOut {
    socket: OwnedWriteHalf,
    is_arrow: bool,
}

impl HttpOut {
    async fn chunk(&mut self, bytes: Bytes) -> anyhow::Result<()> {
        let head = Bytes::from(format!("{:x}\r\n", bytes.len()));
        let mut chunk = head.chain(bytes).chain(&b"\r\n"[..]);
        while chunk.has_remaining() {
            self.socket.write_buf(&mut chunk).await?;
        }
        Ok(())
    }
}

impl Outbound for HttpOut {
    async fn send(&mut self, _: u64, message: &Message) -> anyhow::Result<()> {
        let Body::Payload(payload) = &message.body else {
            anyhow::bail!("a chunk has its records in one piece")
        };
        self.chunk(payload.clone()).await
    }

    async fn flush(&mut self) -> anyhow::Result<()> {
        Ok(())
    }

    async fn finish(&mut self) -> anyhow::Result<()> {
        if self.is_arrow {
            self.chunk(Bytes::from_static(&IPC_END)).await?;
        }
        Ok(self.socket.write_all(b"0\r\n\r\n").await?)
    }
}

pub(super) struct HttpAnswers {
    socket: OwnedReadHalf,
    has_answered: bool,
}

impl Answers for HttpAnswers {
    /// The one answer, which covers all.
    async fn next(&mut self) -> anyhow::Result<Option<Told>> {
        if std::mem::replace(&mut self.has_answered, true) {
            return Ok(None);
        }
        let mut answer = String::new();
        self.socket.read_to_string(&mut answer).await.context("the connection is lost")?;
        ensure!(answer.starts_with("HTTP/1.1 200 "), "the post was answered {answer:?}");
        let refused_none = !answer.contains("\"rejected_total\"") || answer.contains("\"rejected_total\":0,");
        ensure!(refused_none, "good records were rejected: {answer:?}");
        Ok(Some(Told::durable(ENDED - 1)))
    }
}
