//! The streams that this pod holds: who may send into them, and where they stand.
//!
//! *Owns*: the registry of open streams, taking over a stream by a newer call, fences, what the log holds of
//! streams that are not open.
//! *Does not own*: named streams' records (`stream::record`), decoding (`lane`), the calls (`service`).
//! Keeps P1: admitting a frame and handing it to its lane are one step that only the current holder can take.

pub mod gate;
pub mod ack;
pub mod progress;
pub mod record;

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use sluice_shared::error::Error;
use sluice_shared::frame::{Encoding, UnknownFields};
use sluice_shared::ids::{OffsetRange, SessionId, StreamId, TableId, TableName};
use sluice_shared::requests::{Boundary, RequestSpan};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use self::gate::{Admit, Gate};
use self::progress::StreamProgress;
use crate::decode::arrow::ArrowDecoder;
use crate::decode::described::DescribedDecoder;
use crate::lane::LaneFrame;
use crate::table::Table;

/// How long a stream without a call is kept for its gateway to come back. Longer than a gateway tries to reach
/// a lost pod: a stream that could still be resent must not be forgotten.
pub const DETACHED_KEPT: Duration = Duration::from_secs(30 * 60);
/// Over how many seconds a stream's traffic is averaged.
const RATE_MEMORY_S: f64 = 5.0;
/// How long a fence waits for what an older session has in flight.
const FENCE_DEADLINE: Duration = Duration::from_secs(30);

/// How far a log, or a table, has a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Reach {
    /// One more than the highest offset; 0 where there is none.
    pub next: u64,
    /// Of a stream that counts its requests: where the last one that is wholly there ends.
    pub boundary: Option<Boundary>,
}

impl Reach {
    /// The farther of both.
    pub fn max(self, other: Self) -> Self {
        Self { next: self.next.max(other.next), boundary: self.boundary.max(other.boundary) }
    }
}

/// One stream, as its calls, its lane and its table share it.
pub struct Stream {
    /// Its identity.
    pub id: StreamId,
    /// The producer's hold that it serves.
    pub session: SessionId,
    /// Where its records go.
    pub table: Table,
    /// How its frames are encoded.
    pub encoding: Encoding,
    /// What becomes of fields that the table does not have.
    pub unknown: UnknownFields,
    /// A record that is refused ends the stream before its request.
    pub whole_requests: bool,
    /// How far it has come.
    pub progress: Arc<StreamProgress>,
    /// Reads its Arrow frames. Only its lane locks it.
    pub arrow: Mutex<ArrowDecoder>,
    /// Reads its protobuf or Avro frames.
    pub described: Option<DescribedDecoder>,
    entrance: Mutex<Entrance>,
    /// It was at another pod before.
    has_moved: bool,
    /// Offsets that an operator has given up: who sends them again is told so.
    pub released: Vec<OffsetRange>,
    /// Since when it has been here.
    opened: Instant,
    /// Bytes of frames that were taken since its traffic was last looked at.
    taken: AtomicU64,
    /// Its traffic as it was then, in bytes per second.
    rate: AtomicU64,
}

/// A stream's traffic.
#[derive(Debug, Clone)]
pub struct StreamLoad {
    /// The stream.
    pub stream: StreamId,
    /// Where its records go.
    pub table: TableName,
    /// Which table that is.
    pub table_id: TableId,
    /// What it sends.
    pub bytes_per_s: f64,
    /// For how long it has been here.
    pub here_for: Duration,
    /// Whether a gateway holds it.
    pub held: bool,
    /// Whether it was at another pod before.
    pub has_moved: bool,
}

/// Who may send, and which offset is next.
struct Entrance {
    gate: Gate,
    /// Number of the call that holds the stream; 0 when none does.
    holder: u64,
    holder_ends: CancellationToken,
    detached_since: Option<Instant>,
}

/// A call's hold on a stream.
#[derive(Clone)]
pub struct Hold {
    /// The stream.
    pub stream: Arc<Stream>,
    holder: u64,
    /// Cancelled when a newer call takes the stream over.
    pub superseded: CancellationToken,
}

/// What has become of a frame.
#[derive(Debug, PartialEq, Eq)]
pub enum Sent {
    /// It is in its lane.
    Taken,
    /// It was here before.
    Duplicate,
    /// Records before it are missing.
    Gap {
        /// The offset that should have come.
        expected: u64,
    },
    /// The stream is another call's, or fenced.
    NotHolder,
}

impl Stream {
    /// A stream that expects `next_offset`, not yet held by a call.
    pub fn new(opening: Opening, next_offset: u64, decoded_bytes_max: usize) -> Self {
        let progress = Arc::new(StreamProgress::default());
        progress.durable(next_offset);
        Self {
            arrow: Mutex::new(ArrowDecoder::new(opening.table.schema().clone(), decoded_bytes_max)),
            id: opening.id,
            session: opening.session,
            table: opening.table,
            encoding: opening.encoding,
            unknown: opening.unknown,
            whole_requests: opening.whole_requests,
            described: opening.described,
            progress,
            entrance: Mutex::new(Entrance {
                gate: Gate::at(next_offset),
                holder: 0,
                holder_ends: CancellationToken::new(),
                detached_since: Some(Instant::now()),
            }),
            has_moved: opening.has_moved,
            released: opening.released,
            opened: Instant::now(),
            taken: AtomicU64::new(0),
            rate: AtomicU64::new(0),
        }
    }

    /// The offset that has to come next.
    pub fn next_offset(&self) -> u64 {
        self.entrance().gate.next()
    }

    /// The offset that its call has to send next. One that sends again may end before all of that has come.
    pub fn sent_offset(&self) -> u64 {
        self.entrance().gate.sent()
    }

    fn reach(&self, end: u64) -> Reach {
        Reach { next: end, boundary: self.progress.boundary() }
    }

    fn entrance(&self) -> MutexGuard<'_, Entrance> {
        self.entrance.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the present holder's call and keeps out all that come.
    fn close(&self, error: Error) {
        let mut entrance = self.entrance();
        entrance.holder = u64::MAX;
        self.progress.fail(error);
        entrance.holder_ends.cancel();
    }
}

impl Hold {
    /// Passes a frame through the gate and into its lane, in one step. `room` is the frame's place in the lane.
    pub fn send(&self, offsets: OffsetRange, room: mpsc::Permit<'_, LaneFrame>, frame: FrameParts) -> Sent {
        let mut entrance = self.stream.entrance();
        if entrance.holder != self.holder {
            return Sent::NotHolder;
        }
        let here = match entrance.gate.admit(offsets) {
            Admit::Next => 0,
            Admit::Overlap { here } => here,
            Admit::Duplicate => return Sent::Duplicate,
            Admit::Gap { expected } => return Sent::Gap { expected },
        };
        let here = usize::try_from(here).expect("at most the frame's records");
        self.stream.taken.fetch_add(frame.payload.len() as u64, Ordering::Relaxed);
        room.send(LaneFrame { stream: Arc::clone(&self.stream), offsets, here, parts: frame });
        Sent::Taken
    }

    /// Lets go of the stream, so that it is kept for a while and can be reopened.
    pub fn detach(&self) {
        let mut entrance = self.stream.entrance();
        if entrance.holder == self.holder {
            entrance.holder = 0;
            entrance.detached_since = Some(Instant::now());
        }
    }
}

/// A frame's payload and its share of the ingress budget.
pub struct FrameParts {
    /// As the producer encoded it.
    pub payload: bytes::Bytes,
    /// Of a stream that counts them: the requests that it is made of.
    pub requests: Option<RequestSpan>,
    /// Held until the frame is durable.
    pub permit: crate::admission::Permit,
}

/// What a call asks for when it opens a stream, once the table is known.
pub struct Opening {
    /// The stream.
    pub id: StreamId,
    /// Its session.
    pub session: SessionId,
    /// Its table.
    pub table: Table,
    /// How its frames are encoded.
    pub encoding: Encoding,
    /// Fields that the table does not have.
    pub unknown: UnknownFields,
    /// A record that is refused ends the stream before its request.
    pub whole_requests: bool,
    /// Of a protobuf or Avro stream: reads its frames.
    pub described: Option<DescribedDecoder>,
    /// It was at another pod before.
    pub has_moved: bool,
    /// Offsets that an operator has given up, by rising offset.
    pub released: Vec<OffsetRange>,
}

/// All streams of this pod.
#[derive(Clone, Default)]
pub struct Streams {
    shared: Arc<Mutex<Registry>>,
}

/// A stream is known by its table too: names are only unique within one.
type Key = (TableId, StreamId);

#[derive(Default)]
struct Registry {
    calls: u64,
    open: HashMap<Key, Arc<Stream>>,
    /// Of named streams that are not open: what this pod's log has.
    logged: HashMap<Key, Reach>,
    /// Sessions older than these are refused.
    fences: HashMap<Key, SessionId>,
}

impl Streams {
    fn registry(&self) -> MutexGuard<'_, Registry> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The log holds `reach` of `stream`: found at replay.
    pub fn logged(&self, table: &TableId, stream: &StreamId, reach: Reach) {
        if stream.is_ephemeral() {
            return; // its gateway says itself from where it resends
        }
        let key = (table.clone(), stream.clone());
        let mut registry = self.registry();
        let logged = registry.logged.entry(key).or_default();
        *logged = reach.max(*logged);
    }

    /// Opens a stream for a call, or takes it over from an older call of the same session.
    ///
    /// `next_offset` is where a stream that is not open here goes on; from `resume_at` on the call sends. What is
    /// before the stream's end is only judged.
    ///
    /// # Errors
    /// `Fenced` where a newer session holds the stream; the stream's own failure where it had one.
    pub fn open(
        &self,
        opening: Opening,
        next_offset: u64,
        resume_at: u64,
        decoded_bytes_max: usize,
    ) -> Result<Hold, Error> {
        let key = (opening.table.id().clone(), opening.id.clone());
        let mut registry = self.registry();
        if registry.fences.get(&key).is_some_and(|fence| opening.session < *fence) {
            return Err(fenced(&opening.id, opening.session));
        }
        registry.calls += 1;
        let holder = registry.calls;
        let held = registry.open.get(&key).filter(|stream| stream.session == opening.session);
        let stream = match held {
            Some(stream) => Arc::clone(stream),
            None => {
                let stream = Arc::new(Stream::new(opening, next_offset, decoded_bytes_max));
                stream.table.follow(&stream.id, Arc::clone(&stream.progress));
                registry.open.insert(key, Arc::clone(&stream));
                stream
            }
        };
        drop(registry);
        if let Some(failure) = stream.progress.failure() {
            return Err(failure.clone());
        }
        let superseded = CancellationToken::new();
        let mut entrance = stream.entrance();
        entrance.holder_ends.cancel();
        entrance.holder_ends = superseded.clone();
        entrance.holder = holder;
        entrance.detached_since = None;
        let next = entrance.gate.next();
        if resume_at > next {
            // It was elsewhere meanwhile, and what became durable there is acked.
            stream.progress.durable(resume_at);
        }
        stream.progress.resume(OffsetRange { start: resume_at, end: next });
        entrance.gate.resume(resume_at);
        drop(entrance);
        Ok(Hold { stream, holder, superseded })
    }

    /// Ends a stream whose records are all in the log: its producer will send no more, or it has failed.
    pub fn end(&self, hold: &Hold) {
        let stream = &hold.stream;
        let is_held = stream.entrance().holder == hold.holder;
        if let Some(end) = stream.progress.settled_at(stream.next_offset()).filter(|_| is_held) {
            self.forget(stream, end);
        }
    }

    /// Ends a stream here that goes on at another pod: its table is flushed at once, since what follows there waits for
    /// what is here.
    pub fn leave(&self, hold: &Hold) {
        let stream = &hold.stream;
        let is_held = stream.entrance().holder == hold.holder;
        let Some(end) = stream.progress.settled_at(stream.next_offset()).filter(|_| is_held) else {
            return hold.detach();
        };
        if self.take_out(stream, end, None) {
            stream.table.hurry();
        }
    }

    /// Asks the gateway of a stream to go on with it at another pod. Whether there is such a stream, held by one.
    pub fn ask_handoff(&self, stream: &StreamId, table: &TableId, reason: &'static str) -> bool {
        let key = (table.clone(), stream.clone());
        let open = self.registry().open.get(&key).cloned();
        let held = open.filter(|stream| stream.entrance().holder != 0);
        held.inspect(|stream| stream.progress.ask_handoff(reason)).is_some()
    }

    /// `end` is one more than the last offset that the log holds.
    fn forget(&self, stream: &Arc<Stream>, end: u64) {
        self.take_out(stream, end, stream.id.is_ephemeral().then_some(end));
    }

    /// Takes an open stream, of which the log holds all before `end`, out of the registry; `ended` where it has ended there
    /// for good. Whether it was still in it.
    fn take_out(&self, stream: &Arc<Stream>, end: u64, ended: Option<u64>) -> bool {
        let key = (stream.table.id().clone(), stream.id.clone());
        let mut registry = self.registry();
        if !registry.open.get(&key).is_some_and(|open| Arc::ptr_eq(open, stream)) {
            return false;
        }
        registry.open.remove(&key);
        if !stream.id.is_ephemeral() {
            let logged = registry.logged.entry(key).or_default();
            *logged = stream.reach(end).max(*logged);
        }
        // Under the registry's lock, as `follow` is: a stream that is just opened again has not ended.
        stream.table.unfollow(&stream.id, ended);
        true
    }

    /// Refuses sessions of `stream` older than `session` from now on, waits until what they have in flight is
    /// durable, and answers what this pod's log holds.
    ///
    /// # Errors
    /// `Unavailable` where the log does not come to rest in time.
    pub async fn fence(&self, table: &TableId, id: &StreamId, session: SessionId) -> Result<Reach, Error> {
        let key = (table.clone(), id.clone());
        let (older, logged) = {
            let mut registry = self.registry();
            let fence = registry.fences.entry(key.clone()).or_insert(session);
            *fence = session.max(*fence);
            let older = registry.open.get(&key).filter(|stream| stream.session < session).cloned();
            (older, registry.logged.get(&key).copied().unwrap_or_default())
        };
        let Some(older) = older else { return Ok(logged) };
        older.close(fenced(id, older.session));
        let accepted = older.next_offset();
        let settled = tokio::time::timeout(FENCE_DEADLINE, older.progress.settled(accepted)).await;
        let end = settled.map_err(|_| {
            let message = format!("stream {id}: the log did not take in time what an older session had sent");
            Error::unavailable("fence_timeout", message)
        })?;
        self.forget(&older, end);
        Ok(older.reach(end).max(logged))
    }

    /// Forgets the streams whose gateways have not come back.
    pub fn sweep(&self, now: Instant) {
        let long_gone = |stream: &Arc<Stream>| {
            let since = stream.entrance().detached_since;
            since.is_some_and(|since| now.duration_since(since) > DETACHED_KEPT)
        };
        let gone: Vec<_> = self.registry().open.values().filter(|s| long_gone(s)).cloned().collect();
        for stream in gone {
            if let Some(end) = stream.progress.settled_at(stream.next_offset()) {
                self.forget(&stream, end);
            }
        }
    }

    /// The streams that gateways hold at the moment, by table.
    pub fn held(&self) -> Vec<(TableId, StreamId)> {
        let registry = self.registry();
        let held = registry.open.iter().filter(|(_, stream)| stream.entrance().holder != 0);
        held.map(|(key, _)| key.clone()).collect()
    }

    /// The traffic of all streams since this was last asked, `elapsed` ago.
    pub fn traffic(&self, elapsed: Duration) -> Vec<StreamLoad> {
        let seconds = elapsed.as_secs_f64().max(0.001);
        let streams: Vec<Arc<Stream>> = self.registry().open.values().cloned().collect();
        let load = |stream: Arc<Stream>| {
            let now = stream.taken.swap(0, Ordering::Relaxed) as f64 / seconds;
            let before = stream.rate.load(Ordering::Relaxed) as f64;
            let bytes_per_s = before + (now - before) * (elapsed.as_secs_f64() / RATE_MEMORY_S).min(1.0);
            stream.rate.store(bytes_per_s as u64, Ordering::Relaxed);
            StreamLoad {
                stream: stream.id.clone(),
                table: stream.table.name().clone(),
                table_id: stream.table.id().clone(),
                bytes_per_s,
                here_for: stream.opened.elapsed(),
                held: stream.entrance().holder != 0,
                has_moved: stream.has_moved,
            }
        };
        streams.into_iter().map(load).collect()
    }

    /// How many streams are open.
    pub fn count(&self) -> usize {
        self.registry().open.len()
    }
}

fn fenced(stream: &StreamId, session: SessionId) -> Error {
    Error::fenced(format!(
        "stream {stream}: another producer has taken it over from session {}; only one producer at a time may \
         send into a named stream",
        session.0
    ))
}
