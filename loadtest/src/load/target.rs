//! What load is sent to: a protocol in which streams are opened, messages sent, and told how far they are kept.
//!
//! A service that is none of ours becomes a target by one more file here: something that opens streams, a way out for
//! their messages, and a way back for what is told of them.
//!
//! *Owns*: the seam, what is asked for and told over it.
//! *Does not own*: what the protocols say (`framed`, `grpc`, `http`), when what is sent (`stream`, `edges`).

pub(crate) mod framed;
pub(crate) mod grpc;
pub(crate) mod http;

use std::fmt;
use std::path::Path;

use anyhow::ensure;
use bytes::Bytes;
use sluice_shared::frame::Encoding;

use super::messages::Message;

/// Beyond all offsets.
const OFFSET_MAX: u64 = 1 << 62;

/// Opens streams of one protocol.
pub(crate) trait Target: Send + Sync + 'static {
    /// The way out of a stream.
    type Out: Outbound;
    /// The way back.
    type Answers: Answers;

    /// Connects, and opens a stream.
    fn open(&self, ask: &Ask<'_>) -> impl Future<Output = anyhow::Result<Opened<Self>>> + Send;
}

/// What a stream is to be.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ask<'a> {
    /// `host:port`.
    pub(crate) address: &'a str,
    /// Trusted, where the transport is encrypted.
    pub(crate) certificate: Option<&'a Path>,
    pub(crate) table: &'a str,
    /// Makes it one that can be resumed, where the protocol has such.
    pub(crate) name: Option<&'a str>,
    /// Of a stream that is resumed: the first offset that is not known to be durable.
    pub(crate) resume_at: Option<u64>,
    pub(crate) encoding: Encoding,
    /// As in `messages::Load`.
    pub(crate) schema: &'a Bytes,
    /// Records of each message.
    pub(crate) rows: u32,
    /// Whether the end is told when all is in the table, and not as soon as it is durable.
    pub(crate) until_committed: bool,
}

/// An open stream.
pub(crate) struct Opened<T: Target + ?Sized> {
    pub(crate) out: T::Out,
    pub(crate) answers: T::Answers,
    /// The first offset to send.
    pub(crate) next_offset: u64,
    /// As it stands in the table, where the protocol tells it.
    pub(crate) stream: Option<String>,
    pub(crate) room: Room,
}

/// What may be sent before an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Room {
    pub(crate) bytes: usize,
    pub(crate) messages: usize,
}

/// Of a stream, as far as something is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Told {
    /// All records before this offset are durable.
    pub(crate) durable_next: Option<u64>,
    /// All records before this offset are in the table,
    pub(crate) committed_next: Option<u64>,
    /// in this version of it.
    pub(crate) version: Option<u64>,
    /// The record of this offset was refused.
    pub(crate) rejected: Option<u64>,
    /// The stream is to go elsewhere.
    pub(crate) moves: bool,
}

impl Told {
    pub(crate) fn durable(next: u64) -> Self {
        Self { durable_next: Some(next), ..Self::default() }
    }
}

/// The way out of an open stream.
pub(crate) trait Outbound: Send {
    /// Sends a message, perhaps only as far as a buffer.
    fn send(
        &mut self,
        first_offset: u64,
        message: &Message,
    ) -> impl Future<Output = anyhow::Result<()>> + Send;
    /// What waits in buffers goes out.
    fn flush(&mut self) -> impl Future<Output = anyhow::Result<()>> + Send;
    /// Says that there is no more, where the answers still come after that.
    fn finish(&mut self) -> impl Future<Output = anyhow::Result<()>> + Send;
}

/// The way back.
pub(crate) trait Answers: Send {
    /// What is told next; None at the end.
    fn next(&mut self) -> impl Future<Output = anyhow::Result<Option<Told>>> + Send;
}

/// The service says no: that is no lost connection.
#[derive(Debug)]
pub(crate) struct Refused(pub(crate) String);

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "refused: {}", self.0)
    }
}

impl std::error::Error for Refused {}

/// One more than an offset that was told.
pub(crate) fn after(offset: Option<u64>) -> anyhow::Result<Option<u64>> {
    ensure!(offset.is_none_or(|offset| offset < OFFSET_MAX), "an ack of an impossible offset");
    Ok(offset.map(|offset| offset + 1))
}
