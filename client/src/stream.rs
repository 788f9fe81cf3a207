//! The sender's handle of a stream.
//!
//! *Owns*: offsets as the sender sees them, waiting for room, waiting for acks.
//! *Does not own*: the connection and what is unacknowledged (`task`), the bytes of frames (`encode`).
//! Keeps P7 for the producer: a send waits until its bytes fit the window.

use std::sync::Arc;
use std::time::Duration;

use arrow::array::RecordBatch;
use arrow::datatypes::SchemaRef;
use bytes::Bytes;
use serde::Serialize;
use sluice_shared::frame::{Encoding, FinishWhen, Rejected};
use sluice_shared::ids::{OffsetRange, TableVersion, last_before};
use sluice_shared::lifecycle::{OnPanic, TaskScope};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use crate::config::{OnRejected, Settings};
use crate::encode::{self, BatchFault, TooLarge};
use crate::error::Error;
use crate::outbox::Outbox;
use crate::task::{Begin, Phase, Shown, StreamTask};
use crate::window::Chunk;

/// Rejected records that wait to be taken; more are only counted.
const REJECTED_WAITING_MAX: usize = 10_000;
/// Frames of about this size keep the path busy: while one is made durable the next is under way.
const FRAME_BYTES: usize = 256 << 10;

/// A stream of records into one table. Dropping it without [`Stream::finish`] ends it at once: what was not yet
/// durable may be lost.
pub struct Stream {
    encoding: Option<Encoding>,
    /// Until the first record decides how to open.
    unopened: Option<(Settings, Option<OnRejected>)>,
    outbox: Arc<Outbox>,
    shown: watch::Receiver<Shown>,
    shown_by: Option<watch::Sender<Shown>>,
    rejected: mpsc::Receiver<Rejected>,
    rejected_by: Option<mpsc::Sender<Rejected>>,
    scope: TaskScope,
    /// What the task last showed, as far as each send needs it.
    room: Room,
    first: u64,
    next: u64,
    pushed_bytes: u64,
    scratch: Vec<u8>,
}

#[derive(Clone, Copy, Default)]
struct Room {
    released_bytes: u64,
    window_bytes: u64,
    frame_bytes_max: usize,
}

/// Records that can be read in the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Committed {
    /// The last of them.
    pub offset: u64,
    /// The table version in which they can be read. None only for an ephemeral stream that lost its gateway.
    pub version: Option<TableVersion>,
    /// Records of an ephemeral stream that were durable when its gateway was lost: they will be committed, but
    /// nobody is left to say when. Always 0 for a named stream.
    pub unconfirmed: u64,
}

/// What became of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Summary {
    /// Records sent through this handle.
    pub records: u64,
    /// Those of them that did not fit the table.
    pub rejected: u64,
    /// Last durable offset.
    pub durable: Option<u64>,
    /// Last committed offset.
    pub committed: Option<u64>,
    /// The table version in which everything through `committed` can be read.
    pub version: Option<TableVersion>,
    /// As in [`Committed::unconfirmed`].
    pub unconfirmed: u64,
}

/// A stream without a connection, which it is trying to make again. Nothing is lost: what was not acknowledged is kept.
#[derive(Debug, Clone)]
pub struct Reconnecting {
    /// For how long nothing has moved.
    pub lasts: Duration,
    /// How long the stream goes on trying before it ends with an error.
    pub gives_up_in: Duration,
    /// What the last try failed with.
    pub last: Error,
}

impl Stream {
    pub(crate) fn new(settings: Settings, on_rejected: Option<OnRejected>) -> Self {
        let (shown_by, shown) = watch::channel(Shown::default());
        let (rejected_by, rejected) = mpsc::channel(REJECTED_WAITING_MAX);
        Self {
            encoding: None,
            unopened: Some((settings, on_rejected)),
            outbox: Arc::default(),
            shown,
            shown_by: Some(shown_by),
            rejected,
            rejected_by: Some(rejected_by),
            scope: TaskScope::new(OnPanic::EndTask),
            room: Room::default(),
            first: 0,
            next: 0,
            pushed_bytes: 0,
            scratch: Vec::new(),
        }
    }

    /// Sends one record (anything that serialises to a JSON object) and answers its offset. Waits only for room
    /// in the window. Small records travel together; one that finds the path idle leaves at once.
    ///
    /// # Errors
    /// A value that cannot be serialised or is too large: nothing was sent. Or the stream's own failure.
    pub async fn send_json<T: Serialize + ?Sized>(&mut self, record: &T) -> Result<u64, Error> {
        self.begin(Encoding::Json, None).await?;
        self.scratch.clear();
        serde_json::to_writer(&mut self.scratch, record)
            .map_err(|error| Error::Encoding(error.to_string()))?;
        self.scratch.push(b'\n');
        if self.scratch.len() > self.room.frame_bytes_max {
            return Err(self.too_large(TooLarge { record: 0, bytes: self.scratch.len() }));
        }
        self.wait_for_room(self.scratch.len()).await?;
        self.outbox.append(&self.scratch);
        self.next += 1;
        Ok(self.next - 1)
    }

    /// Sends newline-delimited JSON objects as they are and answers their offsets. Blank lines are no records.
    ///
    /// # Errors
    /// A record that is too large: nothing was sent. Or the stream's own failure.
    pub async fn send_ndjson(&mut self, text: impl Into<Bytes>) -> Result<OffsetRange, Error> {
        self.begin(Encoding::Json, None).await?;
        let chunks = encode::split_lines(&text.into(), self.chunk_bytes(), self.room.frame_bytes_max);
        self.push(chunks.map_err(|fault| self.too_large(fault))?).await
    }

    /// Sends the rows of a batch and answers their offsets. A large batch becomes several frames.
    ///
    /// # Errors
    /// A row that is too large: nothing was sent. Or the stream's own failure.
    pub async fn send_batch(&mut self, batch: RecordBatch) -> Result<OffsetRange, Error> {
        self.begin(Encoding::Arrow, Some(batch.schema_ref())).await?;
        let chunks = encode::encode_batch(&batch, self.chunk_bytes(), self.room.frame_bytes_max);
        let chunks = chunks.map_err(|fault| match fault {
            BatchFault::TooLarge(fault) => self.too_large(fault),
            BatchFault::Arrow(error) => error.into(),
        })?;
        self.push(chunks).await
    }

    /// Waits until everything sent so far is on stable storage. Answers the last offset, None where nothing was
    /// ever sent.
    ///
    /// # Errors
    /// The stream's own failure.
    pub async fn durable(&mut self) -> Result<Option<u64>, Error> {
        let next = self.next;
        if self.unopened.is_none() {
            self.shown_once(|shown| shown.durable_next >= next).await?;
        }
        Ok(last_before(next))
    }

    /// Waits until everything sent so far can be read in the table. None where nothing was ever sent.
    ///
    /// # Errors
    /// The stream's own failure.
    pub async fn committed(&mut self) -> Result<Option<Committed>, Error> {
        let next = self.next;
        if self.unopened.is_some() || next == 0 {
            return Ok(None);
        }
        let shown = self.shown_once(|shown| shown.committed_next >= next).await?;
        Ok(shown.committed())
    }

    /// Takes the records that were rejected since the last call. At most 10,000 wait here: take them often, or
    /// open the stream with `on_rejected`. All are counted in [`Summary::rejected`].
    pub fn rejected(&mut self) -> Vec<Rejected> {
        std::iter::from_fn(|| self.rejected.try_recv().ok()).collect()
    }

    /// Ends the stream when everything sent can be read in the table.
    ///
    /// # Errors
    /// The stream's own failure.
    pub async fn finish(self) -> Result<Summary, Error> {
        self.finish_when(FinishWhen::Committed).await
    }

    /// Ends the stream when everything sent is on stable storage. It is committed about a second later.
    ///
    /// # Errors
    /// The stream's own failure.
    pub async fn finish_durable(self) -> Result<Summary, Error> {
        self.finish_when(FinishWhen::Durable).await
    }

    /// The offset of the next record: greater than 0 at first where a named stream is resumed. Known once the
    /// stream is open: give `encoding` or `schema` to open it before the first record.
    pub fn next_offset(&self) -> u64 {
        self.next
    }

    /// Another view of the stream's progress, to be read or awaited elsewhere while this handle sends.
    pub fn progress(&self) -> Progress {
        Progress { shown: self.shown.clone() }
    }

    /// Opens the stream if nothing has yet, and holds its encoding.
    pub(crate) async fn begin(
        &mut self,
        encoding: Encoding,
        schema: Option<&SchemaRef>,
    ) -> Result<(), Error> {
        match self.encoding {
            Some(held) if held == encoding && self.unopened.is_none() => return Ok(()),
            Some(held) if held != encoding => {
                return Err(Error::MixedEncodings { stream: held, record: encoding });
            }
            _ => {}
        }
        let schema = schema.map(|schema| encode::schema_text(schema)).transpose()?;
        self.encoding = Some(encoding);
        if let (Some((settings, on_rejected)), Some(shown), Some(rejected)) =
            (self.unopened.take(), self.shown_by.take(), self.rejected_by.take())
        {
            let begin = Begin { settings, encoding, schema, on_rejected, rejected, shown };
            let task = StreamTask::new(begin, Arc::clone(&self.outbox), self.scope.clone());
            self.scope.spawn("client stream", task.run());
        }
        let shown = self.shown_once(|shown| matches!(shown.phase, Phase::Open)).await?;
        self.room = shown.room();
        (self.first, self.next) = (shown.first, shown.first);
        Ok(())
    }

    async fn finish_when(mut self, when: FinishWhen) -> Result<Summary, Error> {
        if self.unopened.is_some() {
            return Ok(Summary::default());
        }
        self.outbox.finish(when);
        let shown = self.shown_once(|shown| matches!(shown.phase, Phase::Finished)).await?;
        Ok(Summary {
            records: self.next - self.first,
            rejected: shown.rejected,
            durable: last_before(shown.durable_next),
            committed: last_before(shown.committed_next),
            version: shown.version,
            unconfirmed: shown.unconfirmed,
        })
    }

    async fn push(&mut self, chunks: Vec<Chunk>) -> Result<OffsetRange, Error> {
        let start = self.next;
        for chunk in chunks {
            self.wait_for_room(chunk.payload.len()).await?;
            self.next += u64::from(chunk.records);
            self.outbox.push(chunk);
        }
        Ok(OffsetRange { start, end: self.next })
    }

    /// Cheap while there is room and nothing failed: one atomic load.
    async fn wait_for_room(&mut self, bytes: usize) -> Result<(), Error> {
        let bytes = bytes as u64;
        if self.shown.has_changed().unwrap_or(true) {
            self.look()?;
        }
        loop {
            let held = self.pushed_bytes - self.room.released_bytes;
            if held == 0 || held + bytes <= self.room.window_bytes {
                self.pushed_bytes += bytes;
                return Ok(());
            }
            self.shown.changed().await.map_err(|_| Error::Closed)?;
            self.look()?;
        }
    }

    fn look(&mut self) -> Result<(), Error> {
        let ended = self.shown.has_changed().is_err();
        let shown = self.shown.borrow_and_update();
        shown.failure(ended)?;
        self.room = shown.room();
        Ok(())
    }

    async fn shown_once(&mut self, enough: impl Fn(&Shown) -> bool) -> Result<Shown, Error> {
        await_shown(&mut self.shown, enough).await
    }

    fn chunk_bytes(&self) -> usize {
        let window = usize::try_from(self.room.window_bytes).unwrap_or(usize::MAX);
        FRAME_BYTES.min((window / 4).max(1))
    }

    fn too_large(&self, fault: TooLarge) -> Error {
        let (offset, limit) = (self.next + fault.record, self.room.frame_bytes_max);
        Error::RecordTooLarge { offset, bytes: fault.bytes, limit }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.scope.cancel();
    }
}

/// A stream's progress: reading it costs next to nothing.
#[derive(Clone)]
pub struct Progress {
    shown: watch::Receiver<Shown>,
}

impl Progress {
    /// Last durable offset.
    pub fn durable(&self) -> Option<u64> {
        last_before(self.shown.borrow().durable_next)
    }

    /// What can be read in the table.
    pub fn committed(&self) -> Option<Committed> {
        self.shown.borrow().committed()
    }

    /// Records rejected so far.
    pub fn rejected(&self) -> u64 {
        self.shown.borrow().rejected
    }

    /// Connections that were lost and made again.
    pub fn reconnects(&self) -> u64 {
        self.shown.borrow().reconnects
    }

    /// Tells of a lost connection for as long as it is being made again.
    pub fn reconnecting(&self) -> Option<Reconnecting> {
        let outage = self.shown.borrow().outage.clone()?;
        let now = Instant::now();
        Some(Reconnecting {
            lasts: now.saturating_duration_since(outage.since),
            gives_up_in: outage.until.saturating_duration_since(now),
            last: outage.last,
        })
    }

    /// The stream's id, as it stands in `_stream`; None before it is open. An ephemeral stream gets a new one
    /// with each gateway.
    pub fn stream_id(&self) -> Option<String> {
        self.shown.borrow().stream.as_ref().map(|stream| stream.as_str().to_owned())
    }

    /// Payload bytes that are durable.
    pub fn durable_bytes(&self) -> u64 {
        self.shown.borrow().released_bytes
    }

    /// Waits until the record at `offset` is on stable storage.
    ///
    /// # Errors
    /// The stream's own failure.
    pub async fn durable_at(&mut self, offset: u64) -> Result<(), Error> {
        await_shown(&mut self.shown, |shown| shown.durable_next > offset).await.map(|_| ())
    }

    /// Waits until the record at `offset` can be read in the table.
    ///
    /// # Errors
    /// The stream's own failure.
    pub async fn committed_at(&mut self, offset: u64) -> Result<(), Error> {
        await_shown(&mut self.shown, |shown| shown.committed_next > offset).await.map(|_| ())
    }
}

async fn await_shown(
    shown: &mut watch::Receiver<Shown>,
    enough: impl Fn(&Shown) -> bool,
) -> Result<Shown, Error> {
    loop {
        let ended = shown.has_changed().is_err();
        {
            let now = shown.borrow_and_update();
            if enough(&now) {
                return Ok(now.clone());
            }
            now.failure(ended)?;
        }
        if shown.changed().await.is_err() {
            let now = shown.borrow();
            return if enough(&now) {
                Ok(now.clone())
            } else {
                Err(now.failure(true).err().unwrap_or(Error::Closed))
            };
        }
    }
}

impl Shown {
    fn room(&self) -> Room {
        let Self { released_bytes, window_bytes, frame_bytes_max, .. } = *self;
        Room { released_bytes, window_bytes, frame_bytes_max }
    }

    fn committed(&self) -> Option<Committed> {
        let offset = last_before(self.committed_next)?;
        Some(Committed { offset, version: self.version, unconfirmed: self.unconfirmed })
    }

    /// The stream's failure; `ended` says that its task is no more.
    fn failure(&self, ended: bool) -> Result<(), Error> {
        match &self.phase {
            Phase::Failed(error) => Err(error.clone()),
            _ if ended => Err(Error::Closed),
            _ => Ok(()),
        }
    }
}
