//! Lanes: a pod's CPU-bound workers. A lane decodes the frames of many streams into one batch per table.
//!
//! A lane takes whatever frames wait, and seals a batch whenever the log can take one. While the log is busy the
//! lane gathers more: batches grow with load by themselves, and at low load a record waits for nothing.
//!
//! *Owns*: open batches, and when they are sealed.
//! *Does not own*: order within a stream (`stream::gate`), sealed batches (`lane/sealed`), stable storage (`wal`).
//! Keeps P8: a record that does not fit is noted in its run and told once that is durable.

mod sealed;

use std::collections::{HashMap, VecDeque};
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use ::arrow::array::RecordBatch;
use bytes::Bytes;
use sluice_shared::error::Error;
use sluice_shared::frame::{Encoding, bytes_of_records, count_lines, count_messages, lines, messages};
use sluice_shared::ids::{OffsetRange, SchemaId, StreamId, TableId};
use sluice_shared::lifecycle::{TaskScope, blocking, is_on_one_thread, now_us};
use sluice_shared::requests::RequestSpan;
use tokio::sync::mpsc;
use tokio::task::JoinError;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::admission::Permit;
use crate::decode::json::JsonDecoder;
use crate::decode::{Decoded, arrow};
use crate::stream::progress::StreamProgress;
use crate::stream::{FrameParts, Stream};
use crate::table::Table;
use crate::table::batch::{Batch, Reason, ReasonCode, Refusal, Run, chunk_bytes};
use crate::threads::hand_on;
use crate::wal::Wal;

pub use sealed::Sealed;

/// Frames that may wait for one lane; their bytes are bounded by the ingress budget.
const FRAMES_WAITING_MAX: usize = 4096;
/// A lane that holds this many payload bytes seals before it takes more.
const BATCH_BYTES_MAX: usize = 4 << 20;
/// So does one whose rows have become this large: a record of three bytes can be a row of thousands in a wide table.
const ROWS_BYTES_MAX: usize = 16 << 20;
/// Decoders of tables that have no open batch are kept for the next one, up to so many.
const IDLE_DECODERS_MAX: usize = 256;
/// Of a record that is sent again and was given up.
const GIVEN_UP: &str = "an operator has given this record up, since the log that had it was lost: it is in no table; send it \
     again at an offset of its own";

/// What one frame may ask of a lane.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Largest single record, as sent.
    pub record_bytes_max: usize,
    /// Largest single record as a row.
    pub row_bytes_max: usize,
}

/// A frame that has passed its stream's gate.
pub struct LaneFrame {
    /// Its stream.
    pub stream: Arc<Stream>,
    /// Its offsets.
    pub offsets: OffsetRange,
    /// How many of its first records are here already: they are only judged.
    pub here: usize,
    /// Its payload and budget.
    pub parts: FrameParts,
}

/// The lanes of a pod.
pub struct Lanes {
    senders: Vec<mpsc::Sender<LaneFrame>>,
    closing: CancellationToken,
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// Lanes that are no threads.
    tasks: TaskTracker,
}

impl Lanes {
    /// Starts `count` lanes, each on its own thread; where all tasks share one thread, as tasks of the scope.
    ///
    /// # Errors
    /// Where the machine refuses another thread.
    pub fn start(count: usize, wal: &Wal, limits: Limits, scope: &TaskScope) -> std::io::Result<Self> {
        let (closing, tasks) = (CancellationToken::new(), TaskTracker::new());
        let (mut senders, mut threads) = (Vec::new(), Vec::new());
        for number in 0..count {
            let (sender, frames) = mpsc::channel(FRAMES_WAITING_MAX);
            let task = LaneTask {
                frames,
                closing: closing.clone(),
                wal: wal.clone(),
                limits,
                open: HashMap::new(),
                sealing_order: VecDeque::new(),
                idle: HashMap::new(),
                rest: None,
                held: Held::default(),
            };
            senders.push(sender);
            if is_on_one_thread() {
                scope.spawn("lane", tasks.track_future(task.run()));
                continue;
            }
            let runtime = tokio::runtime::Builder::new_current_thread().build()?;
            let thread = std::thread::Builder::new().name(format!("lane-{number}"));
            threads.push(thread.spawn(move || {
                hand_on();
                runtime.block_on(task.run());
            })?);
        }
        Ok(Self { senders, closing, threads: Mutex::new(threads), tasks })
    }

    /// The lane that is to take frames of `stream`: always the same, so that its records stay in order.
    pub fn of(&self, stream: &StreamId) -> mpsc::Sender<LaneFrame> {
        let hash = crc32c::crc32c(stream.as_str().as_bytes()) as usize;
        self.senders[hash % self.senders.len()].clone()
    }

    /// Takes no more frames, and waits until those that were taken are sealed and given to the log.
    ///
    /// # Errors
    /// Where a lane panicked.
    pub async fn close(&self) -> Result<(), JoinError> {
        self.closing.cancel();
        self.tasks.close();
        self.tasks.wait().await;
        let threads = std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner));
        let join = move || {
            for thread in threads {
                assert!(thread.join().is_ok(), "a lane panicked");
            }
        };
        blocking(join).await
    }
}

struct LaneTask {
    frames: mpsc::Receiver<LaneFrame>,
    closing: CancellationToken,
    wal: Wal,
    limits: Limits,
    /// Batches that still take records.
    open: HashMap<Target, OpenBatch>,
    /// The keys of `open`, the oldest first: no table starves another.
    sealing_order: VecDeque<Target>,
    /// Decoders without an open batch.
    idle: HashMap<Target, JsonDecoder>,
    /// What a frame has left, whose first records have filled a batch.
    rest: Option<LaneFrame>,
    /// In the open batches.
    held: Held,
}

/// How much is held.
#[derive(Debug, Clone, Copy, Default)]
struct Held {
    /// As it was sent.
    payload_bytes: usize,
    /// As rows and refusals.
    rows_bytes: usize,
}

impl Held {
    fn has_room(self) -> bool {
        self.payload_bytes < BATCH_BYTES_MAX && self.rows_bytes < ROWS_BYTES_MAX
    }

    fn add(&mut self, other: Self) {
        self.payload_bytes += other.payload_bytes;
        self.rows_bytes += other.rows_bytes;
    }

    fn subtract(&mut self, other: Self) {
        self.payload_bytes -= other.payload_bytes;
        self.rows_bytes -= other.rows_bytes;
    }
}

/// Records of one table and one schema go into one batch.
type Target = (TableId, SchemaId);

/// A batch that still takes records. Its rows are `chunks`, then what `json` holds: rows of all encodings but Arrow.
pub struct OpenBatch {
    table: Table,
    json: Option<JsonDecoder>,
    chunks: Vec<RecordBatch>,
    runs: Vec<OpenRun>,
    permits: Vec<Permit>,
    /// Of `chunks`, and of what was refused.
    closed_bytes: usize,
    held: Held,
}

/// What was read of a frame.
struct Read {
    /// One more than the last offset.
    end: u64,
    payload_bytes: usize,
    refused: Vec<Refusal>,
}

impl Read {
    fn of(decoded: Decoded, offsets: OffsetRange, refused: Vec<Refusal>) -> Self {
        let end = offsets.start + (decoded.accepted + decoded.refused) as u64;
        Self { end, payload_bytes: decoded.payload_bytes, refused }
    }
}

struct OpenRun {
    run: Run,
    progress: Arc<StreamProgress>,
}

impl LaneTask {
    async fn run(mut self) {
        let wal = self.wal.clone();
        loop {
            if self.open.is_empty() && self.rest.is_none() {
                tokio::select! {
                    biased; // frames first: closing waits until none is left
                    frame = self.frames.recv() => match frame {
                        Some(frame) => self.take(frame),
                        None => return,
                    },
                    () = self.closing.cancelled(), if !self.frames.is_closed() => self.frames.close(),
                }
            }
            self.take_waiting();
            if self.open.is_empty() {
                continue; // frames of failed streams, or the closing
            }
            let mut slot = pin!(wal.slot());
            let slot = loop {
                let has_room = self.held.has_room() && self.rest.is_none();
                tokio::select! {
                    biased; // a free slot first: while the log is idle nothing is worth waiting for
                    slot = &mut slot => break slot,
                    Some(frame) = self.frames.recv(), if has_room => self.take(frame),
                }
            };
            self.seal_oldest().append(&wal, slot).await;
        }
    }

    fn take_waiting(&mut self) {
        while self.held.has_room() {
            match self.rest.take().or_else(|| self.frames.try_recv().ok()) {
                Some(frame) => self.take(frame),
                None => return,
            }
        }
    }

    fn take(&mut self, frame: LaneFrame) {
        let stream = Arc::clone(&frame.stream);
        if stream.progress.has_fault() {
            return; // what follows a frame that could not be read is given up
        }
        let start = frame.offsets.start;
        let target = (stream.table.id().clone(), stream.table.schema_id());
        let open = self.open.entry(target.clone()).or_insert_with(|| {
            self.sealing_order.push_back(target.clone());
            OpenBatch::new(stream.table.clone(), self.idle.remove(&target))
        });
        let before = open.held;
        match open.append(frame, self.limits) {
            Ok(rest) => self.rest = rest,
            Err(error) => {
                let offset = error.offset.unwrap_or(start);
                stream.progress.fault(offset, error.at_offset(offset));
            }
        }
        self.held.subtract(before);
        self.held.add(open.held);
        if open.runs.is_empty() {
            self.discard(target);
        }
    }

    /// Gives up a batch that was just begun, and into which nothing came.
    fn discard(&mut self, target: Target) {
        let Some(open) = self.open.remove(&target) else { return };
        self.sealing_order.pop_back();
        self.held.subtract(open.held);
        self.keep(target, open.json);
    }

    /// Keeps a decoder without rows for the next batch.
    fn keep(&mut self, target: Target, json: Option<JsonDecoder>) {
        if let Some(decoder) = json
            && self.idle.len() < IDLE_DECODERS_MAX
        {
            self.idle.insert(target, decoder);
        }
    }

    fn seal_oldest(&mut self) -> Sealed {
        let target = self.sealing_order.pop_front().expect("called with an open batch");
        let open = self.open.remove(&target).expect("in step with the order");
        self.held.subtract(open.held);
        let (sealed, json) = open.seal();
        self.keep(target, json);
        sealed
    }
}

impl OpenBatch {
    /// An empty batch of a table. `json` is what sealing another one of the same schema has left.
    pub fn new(table: Table, json: Option<JsonDecoder>) -> Self {
        Self {
            table,
            json,
            chunks: Vec::new(),
            runs: Vec::new(),
            permits: Vec::new(),
            closed_bytes: 0,
            held: Held::default(),
        }
    }

    /// Decodes a frame to the end of the batch, until that is full: answers what is left of the frame then.
    ///
    /// # Errors
    /// A frame that cannot be read. Nothing of it is in the batch.
    pub fn append(&mut self, frame: LaneFrame, limits: Limits) -> Result<Option<LaneFrame>, Error> {
        let LaneFrame { stream, offsets, here, parts: FrameParts { payload, mut requests, permit } } = frame;
        if here > 0 {
            self.close_json(); // rows that are cut away must not be among others
        }
        let chunks_before = self.chunks.len();
        let Read { end: read_to, mut payload_bytes, mut refused } =
            self.read(&stream, &payload, offsets, limits)?;
        let mut end = read_to;
        let mut start = offsets.start;
        if here > 0 {
            self.close_json();
            start = end.min(start + here as u64);
            let new = refused.split_off(refused.partition_point(|refusal| refusal.offset < start));
            self.cut(chunks_before, (start - offsets.start) as usize - refused.len());
            let mut old = std::mem::replace(&mut refused, new);
            if self.table.quarantines() {
                old.iter_mut().for_each(|refusal| refusal.raw = Some(Box::default())); // it is kept since then
            } else if stream.whole_requests {
                old.clear(); // they were taken, whatever their table has become since
            }
            let again = OffsetRange { start: offsets.start, end: start };
            stream.progress.judged(start, with_released(old, &stream.released, again));
        }
        let quarantines = !refused.is_empty() && self.table.quarantines();
        if quarantines {
            keep_raw(&stream, &payload, offsets.start, &mut refused);
        }
        let mut fault = None;
        if stream.whole_requests {
            let read = OffsetRange { start, end };
            let goes_on = end < offsets.end;
            let bad = refused.first().filter(|_| !quarantines).cloned();
            (end, fault) = whole(read, goes_on, bad, requests.as_ref());
            let kept = refused.partition_point(|refusal| refusal.offset < end);
            self.cut_end((read_to - end) as usize - (refused.len() - kept));
            refused.truncate(kept);
        }
        if end < read_to {
            let bytes = bytes_of_records(stream.encoding, &payload, (end - offsets.start) as usize);
            payload_bytes = bytes.unwrap_or(payload.len());
        }
        self.closed_bytes += refused.iter().map(Refusal::memory_bytes).sum::<usize>();
        self.held.payload_bytes += payload_bytes;
        self.held.rows_bytes = self.closed_bytes + self.json.as_ref().map_or(0, JsonDecoder::bytes);
        let rest = requests.as_mut().map(|requests| requests.split_off(end));
        if start < end {
            self.add_run(&stream, OffsetRange { start, end }, refused, requests);
        }
        if let Some(error) = fault {
            stream.progress.fault(end, error);
            return Ok(None);
        }
        if end == offsets.end {
            self.permits.push(permit);
            return Ok(None);
        }
        let here = here.saturating_sub((end - offsets.start) as usize);
        let parts = FrameParts { payload: payload.slice(payload_bytes..), requests: rest, permit };
        Ok(Some(LaneFrame { stream, offsets: OffsetRange { start: end, ..offsets }, here, parts }))
    }

    fn read(
        &mut self,
        stream: &Stream,
        payload: &Bytes,
        offsets: OffsetRange,
        limits: Limits,
    ) -> Result<Read, Error> {
        let mut refused = Vec::new();
        let mut refuse = |index: usize, reason: Reason| {
            refused.push(Refusal { offset: offsets.start + index as u64, reason, raw: None });
        };
        match stream.encoding {
            Encoding::Json => {
                check_count(offsets, count_lines(payload), "lines")?;
                let json = self.gatherer(limits)?;
                let bytes_max = json.bytes() + ROWS_BYTES_MAX;
                let decoded = json.append_within(payload, stream.unknown, bytes_max, &mut refuse);
                Ok(Read::of(decoded, offsets, refused))
            }
            Encoding::Protobuf | Encoding::Avro => {
                check_count(offsets, count_messages(payload)?, "messages")?;
                let decoder = stream.described.as_ref().expect("made when such a stream is opened");
                let rows = self.gatherer(limits)?.gathered();
                let bytes_max = rows.bytes() + ROWS_BYTES_MAX;
                let decoded = decoder.append_within(rows, payload, bytes_max, &mut refuse);
                Ok(Read::of(decoded, offsets, refused))
            }
            Encoding::Arrow => {
                let count = usize::try_from(offsets.count()).expect("a frame fits in memory");
                let mut decoder = stream.arrow.lock().unwrap_or_else(PoisonError::into_inner);
                let chunks = decoder.decode(payload, count, stream.unknown, &mut refuse)?;
                self.close_json();
                for chunk in chunks {
                    self.closed_bytes += chunk_bytes(&chunk);
                    self.chunks.push(chunk);
                }
                Ok(Read { end: offsets.end, payload_bytes: payload.len(), refused })
            }
        }
    }

    /// What gathers the rows of single records, whichever stream and encoding they are of.
    fn gatherer(&mut self, limits: Limits) -> Result<&mut JsonDecoder, Error> {
        let json = match self.json.take() {
            Some(json) => json,
            None => JsonDecoder::new(self.table.schema().clone(), limits.record_bytes_max)?
                .with_rows_up_to(limits.row_bytes_max),
        };
        Ok(self.json.insert(json))
    }

    fn add_run(
        &mut self,
        stream: &Stream,
        offsets: OffsetRange,
        refused: Vec<Refusal>,
        requests: Option<RequestSpan>,
    ) {
        if let Some(OpenRun { run, progress }) = self.runs.last_mut()
            && Arc::ptr_eq(progress, &stream.progress)
            && run.offsets.end == offsets.start
        {
            run.offsets.end = offsets.end;
            run.refused.extend(refused);
            if let (Some(run), Some(more)) = (&mut run.requests, requests) {
                run.extend(more);
            }
            return;
        }
        // An ephemeral stream is never asked how many are durable.
        let requests = requests.filter(|_| !stream.id.is_ephemeral()).map(Box::new);
        let run = Run { stream: stream.id.clone(), session: stream.session, offsets, refused, requests };
        self.runs.push(OpenRun { run, progress: Arc::clone(&stream.progress) });
    }

    /// Moves the rows out of the columns that single records fill, so that what comes next stands behind them.
    fn close_json(&mut self) {
        if let Some(json) = &mut self.json
            && json.rows() > 0
        {
            self.closed_bytes += json.bytes();
            self.chunks.push(json.finish());
        }
    }

    /// Drops the first `rows` rows of the chunks from `chunk` on.
    fn cut(&mut self, chunk: usize, mut rows: usize) {
        for part in self.chunks.split_off(chunk) {
            let dropped = rows.min(part.num_rows());
            rows -= dropped;
            if dropped < part.num_rows() {
                self.chunks.push(part.slice(dropped, part.num_rows() - dropped));
            }
        }
    }

    /// Drops the last `rows` rows.
    fn cut_end(&mut self, mut rows: usize) {
        if rows == 0 {
            return; // the usual case: what single records fill stays open for more
        }
        self.close_json();
        while rows > 0
            && let Some(chunk) = self.chunks.pop()
        {
            let kept = chunk.num_rows().saturating_sub(rows);
            rows = rows.saturating_sub(chunk.num_rows());
            if kept > 0 {
                self.chunks.push(chunk.slice(0, kept));
            }
        }
    }

    /// The batch as the log takes it, and the decoder that it had, without rows.
    pub fn seal(mut self) -> (Sealed, Option<JsonDecoder>) {
        self.close_json();
        let json = self.json.take();
        let (runs, progresses) = self.runs.into_iter().map(|open| (open.run, open.progress)).unzip();
        let batch = Batch {
            table: self.table.name().clone(),
            table_id: self.table.id().clone(),
            schema_id: self.table.schema_id(),
            ingested_at_us: now_us(),
            runs,
            chunks: self.chunks,
            schema: self.table.schema().clone(),
        };
        (Sealed { batch, table: self.table, progresses, permits: self.permits }, json)
    }
}

/// What is sent again and was refused, with what an operator has given up meanwhile: no table has that, whatever it is.
fn with_released(mut old: Vec<Refusal>, released: &[OffsetRange], again: OffsetRange) -> Vec<Refusal> {
    for given_up in released {
        let (start, end) = (given_up.start.max(again.start), given_up.end.min(again.end));
        if start >= end {
            continue;
        }
        old.retain(|refusal| refusal.offset < start || refusal.offset >= end);
        old.extend((start..end).map(|offset| Refusal {
            offset,
            reason: Reason {
                code: ReasonCode::Released.as_str(),
                column: None,
                message: GIVEN_UP.to_owned(),
            },
            raw: None,
        }));
    }
    old.sort_by_key(|refusal| refusal.offset);
    old
}

/// Gives refused records, by rising offset, what was sent.
fn keep_raw(stream: &Stream, payload: &Bytes, first: u64, refused: &mut [Refusal]) {
    let mut wanted = refused.iter_mut().peekable();
    let mut keep = |index: usize, record: &[u8]| {
        // A copy: else one bad record would hold the whole frame.
        if let Some(refusal) = wanted.next_if(|refusal| refusal.offset == first + index as u64) {
            refusal.raw = Some(record.into());
        }
    };
    match stream.encoding {
        Encoding::Json => lines(payload).enumerate().for_each(|(index, record)| keep(index, record)),
        Encoding::Protobuf | Encoding::Avro => {
            messages(payload).enumerate().for_each(|(index, record)| keep(index, record));
        }
        Encoding::Arrow => {
            let places: Vec<usize> = wanted.map(|refusal| (refusal.offset - first) as usize).collect();
            for (refusal, record) in refused.iter_mut().zip(arrow::rows_as_json(payload, &places)) {
                refusal.raw = Some(record.into());
            }
        }
    }
}

/// Up to where a frame of whole requests is taken that was read so far, and why nothing behind that is.
fn whole(
    read: OffsetRange,
    goes_on: bool,
    bad: Option<Refusal>,
    requests: Option<&RequestSpan>,
) -> (u64, Option<Error>) {
    let last_before = |offset| requests.map_or(offset, |requests| requests.last_before(offset).offset);
    if let Some(bad) = bad {
        return (last_before(bad.offset).max(read.start), Some(refusal_error(&bad)));
    }
    let end = last_before(read.end);
    if !goes_on || end < read.start {
        return (read.end, None);
    }
    // Its first request has had all the room that there is.
    let fault = (end == read.start).then(|| {
        let mib = ROWS_BYTES_MAX >> 20;
        let message =
            format!("a request that becomes more than {mib} MiB of rows: send fewer records at once");
        Error::invalid("request_too_large", message).at_offset(end)
    });
    (end, fault)
}

fn refusal_error(refusal: &Refusal) -> Error {
    let Reason { code, column, message } = refusal.reason.clone();
    let error = Error::invalid(code, message).at_offset(refusal.offset);
    match column {
        Some(column) => error.at_column(column),
        None => error,
    }
}

/// A payload must hold as many records as its frame says.
fn check_count(offsets: OffsetRange, found: usize, what: &str) -> Result<(), Error> {
    let count = offsets.count();
    if found as u64 == count {
        return Ok(());
    }
    let message = format!("frame of {count} records: its payload has {found} {what}");
    Err(Error::invalid("count_mismatch", message))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_given_up_is_refused_whatever_is_sent_again() {
        let refusal = |offset| Refusal {
            offset,
            reason: Reason { code: ReasonCode::WrongType.as_str(), column: None, message: String::new() },
            raw: None,
        };
        let range = |start, end| OffsetRange { start, end };
        let released = [range(0, 3), range(5, 7), range(9, 20)];
        let told = with_released([1, 4, 6, 8].map(refusal).to_vec(), &released, range(2, 10));
        let told: Vec<_> = told.iter().map(|refusal| (refusal.offset, refusal.reason.code)).collect();
        let (bad, gone) = ("wrong_type", "released");
        // The first one is not sent again: it stays as it is.
        let expected = [(1, bad), (2, gone), (4, bad), (5, gone), (6, gone), (8, bad), (9, gone)];
        assert_eq!(told, expected);
    }
}
