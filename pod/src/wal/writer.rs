//! Groups: taking what waits, writing it, and telling of it in order.
//!
//! Two writer threads do the same: form a group, one at a time, since each group names its predecessor's checksum;
//! write and flush it, both at once; then mark it done. Whoever finds the oldest group done tells of it and of those
//! behind it that are done too, one thread at a time. The state's lock is shared, against the house rule, since
//! both threads, the keeper and all appenders meet there; it is held for moves of a few pointers only.
//!
//! *Owns*: the log's shared state, the order of groups, the durable frontier, fail-stop.
//! *Does not own*: files (`disk.rs`), bytes (`segment.rs`), making and trimming segments (`keeper.rs`), the same work done
//! by tasks (`stepped.rs`).
//! Keeps P3: a `then` runs only when its group and all before it are flushed; after a failure none runs.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use sluice_shared::fault::{self, Bug};
use sluice_shared::ids::{Epoch, LogId, PodId, WalPosition};
use tokio::sync::{Notify, Semaphore, watch};

use super::bell::Bell;
use super::disk::{AlignedBuffer, Disk, SegmentFile, WRITERS};
use super::replay::Recovered;
use super::segment::{self, BLOCK, Chain, ENTRY_HEADER, GROUP_HEADER, GroupPlace, SegmentHeader};
use super::{Durable, SLOTS, Slot, WalConfig, WalError, WalStatus, keeper};
use crate::threads::ask_for_real_time;

/// Groups that may be written and not yet told of: a slow `then` holds the log back, not the memory.
const FLIGHTS_MAX: usize = 4;
/// A writer's buffer to begin with; it grows to the largest group seen.
const BUFFER_BYTES: usize = 256 << 10;
/// Pause between tries to make a segment on a full disk.
pub(super) const ROOM_RETRY: Duration = Duration::from_millis(if cfg!(test) { 10 } else { 1_000 });
/// While groups come, it is said this often how far they are durable: what is lost of what was durable before is missed by
/// the next start. A flush a second of a sector, beside those of the groups.
pub(super) const MARK_EVERY: Duration = Duration::from_millis(if cfg!(test) { 10 } else { 1_000 });

type Then = Box<dyn FnOnce(Durable) + Send>;

/// An entry that waits to be taken into a group.
pub(super) struct Pending {
    pub(super) payload: Vec<Bytes>,
    pub(super) bytes: usize,
    pub(super) then: Then,
    pub(super) slot: Slot,
}

/// Where an entry stands in its segment, and how its bytes are checked.
#[derive(Debug, Clone, Copy)]
pub(super) struct Written {
    pub(super) offset: u64,
    pub(super) payload_bytes: usize,
    pub(super) seed: u32,
}

/// An entry in a group, which waits to be durable.
struct Callback {
    entry: Written,
    then: Then,
}

/// A group on its way.
struct Flight {
    number: u64,
    segment: u64,
    done: bool,
    callbacks: Vec<Callback>,
}

/// Whether slots are given out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Gate {
    Open,
    /// Entries wait for room.
    Full,
    /// Failed, or being closed.
    Shut,
}

/// How far the log's end has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ending {
    No,
    /// What is appended is still written.
    Closing,
    Failed,
}

/// A segment that still has entries, or is being written.
pub(super) struct Live {
    pub(super) bytes: u64,
    pub(super) outstanding: u64,
}

/// The segment that is being written.
struct Active {
    file: Arc<SegmentFile>,
    offset: u64,
}

/// What the threads share.
pub(super) struct State {
    queue: VecDeque<Pending>,
    active: Option<Active>,
    /// Made ahead.
    pub(super) next: Option<Arc<SegmentFile>>,
    /// Number of the segment to make after that.
    pub(super) next_segment: u64,
    pub(super) live: BTreeMap<u64, Live>,
    /// Numbers of the spare files, all of the size in use.
    pub(super) spares: Vec<u64>,
    pub(super) spare_number: u64,
    flights: VecDeque<Flight>,
    /// Emptied vectors of callbacks, for the next flights.
    emptied: Vec<Vec<Callback>>,
    /// Whether a thread is telling of groups.
    delivering: bool,
    /// What the next group follows; not there while a writer forms that one's predecessor.
    chain: Option<Chain>,
    /// The durable frontier.
    pub(super) durable: u64,
    /// What the next start will be told of it.
    pub(super) marked: u64,
    /// It is time to tell it more.
    pub(super) mark_due: bool,
    /// A writer waits for a segment.
    starved: bool,
    /// The last try to make one found no room.
    pub(super) no_room: bool,
    /// Something has changed since: try again.
    pub(super) retry_room: bool,
    pub(super) ending: Ending,
    pub(super) writers: usize,
}

/// The log, as its handles and threads see it.
pub(super) struct Shared {
    pub(super) disk: Disk,
    pub(super) log: LogId,
    pub(super) owner: PodId,
    pub(super) epoch: Epoch,
    pub(super) segment_bytes: u64,
    pub(super) bytes_max: u64,
    group_bytes_max: usize,
    real_time: AtomicBool,
    /// Of entries that are not released.
    pub(super) entry_bytes: AtomicU64,
    state: Mutex<State>,
    /// For the writers.
    pub(super) work: Bell,
    /// For the keeper.
    pub(super) chores: Bell,
    on_failure: Box<dyn Fn(&WalError) + Send + Sync>,
    pub(super) slots: Arc<Semaphore>,
    pub(super) gate: watch::Sender<Gate>,
    pub(super) ended: watch::Sender<bool>,
    /// Each time when nothing is left to tell.
    told: Notify,
}

/// A group that a writer has taken and must write.
pub(super) struct Taken {
    pub(super) file: Arc<SegmentFile>,
    pub(super) place: GroupPlace,
    /// Whether it is the segment's first, which is written with the segment's header.
    first: bool,
}

impl Taken {
    /// Where its bytes go in the segment.
    pub(super) fn offset(&self) -> u64 {
        if self.first { 0 } else { self.place.offset }
    }
}

/// What a writer can do.
pub(super) enum Formed<T> {
    /// Write this group.
    Group(T),
    /// Wait until there is something to write and a place for it.
    Nothing,
    /// End: nothing more will come.
    End,
}

/// A writer's own memory, reused for all its groups.
pub(super) struct Scratch {
    pub(super) buffer: AlignedBuffer,
    payloads: Vec<Vec<Bytes>>,
    slots: Vec<Slot>,
}

/// Starts the threads. Returns whether the writers got real-time priority.
pub(super) fn start(shared: &Arc<Shared>) -> Result<bool, WalError> {
    let (answer, answers) = sync_channel(WRITERS);
    let mut started = spawn(shared, "sluice-wal-keeper".to_owned(), keeper::run);
    for writer in 0..WRITERS {
        let answer = answer.clone();
        let run = move |shared: &Arc<Shared>| run(shared, writer, &answer);
        started = started.and_then(|()| spawn(shared, format!("sluice-wal-{writer}"), run));
    }
    drop(answer);
    if let Err(source) = started {
        shared.stop();
        let path = shared.disk.identity_path();
        return Err(WalError::Io { action: "start the threads of log", path, source });
    }
    let real_time = answers.iter().take(WRITERS).all(|real_time| real_time);
    shared.real_time.store(real_time, Ordering::Relaxed);
    Ok(real_time)
}

fn spawn(
    shared: &Arc<Shared>,
    name: String,
    run: impl FnOnce(&Arc<Shared>) + Send + 'static,
) -> std::io::Result<()> {
    let shared = Arc::clone(shared);
    let thread = std::thread::Builder::new().name(name);
    thread.spawn(move || {
        let guard = PanicGuard(&shared);
        run(&shared);
        drop(guard);
    })?;
    Ok(())
}

/// A panic, such as in a `then`, must end the log as a failed flush does, not leave it hanging.
struct PanicGuard<'a>(&'a Shared);

impl Drop for PanicGuard<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.fail(&WalError::Panicked);
            self.0.writer_ended();
            self.0.ended.send_replace(true);
        }
    }
}

fn run(shared: &Arc<Shared>, writer: usize, answer: &SyncSender<bool>) {
    // The receiver waits for one answer of each writer.
    let _ = answer.send(ask_for_real_time());
    let mut scratch = Scratch::new();
    while let Some((taken, bytes)) = shared.form(&mut scratch) {
        let is_told_first = fault::has(Bug::AckBeforeFlush);
        if is_told_first {
            shared.complete(taken.place.chain.group);
        }
        let written = taken.file.write(writer, scratch.buffer.bytes(bytes), taken.offset());
        match written {
            Ok(()) if is_told_first => {}
            Ok(()) => shared.complete(taken.place.chain.group),
            Err(error) => shared.fail(&error),
        }
    }
    shared.writer_ended();
}

impl Scratch {
    pub(super) fn new() -> Self {
        Self { buffer: AlignedBuffer::zeroed(BUFFER_BYTES), payloads: Vec::new(), slots: Vec::new() }
    }
}

impl State {
    /// Bytes of all files that the log has.
    pub(super) fn file_bytes(&self, segment_bytes: u64) -> u64 {
        let more = self.spares.len() as u64 + u64::from(self.next.is_some());
        self.live.values().map(|live| live.bytes).sum::<u64>() + more * segment_bytes
    }

    /// The oldest segment, where all its entries are released and it is not being written: once the writers have ended, the
    /// last one too, so that a log that holds nothing is not replayed.
    pub(super) fn trimmable(&self) -> Option<u64> {
        let (number, live) = self.live.first_key_value()?;
        let active = self.active.as_ref().filter(|_| self.writers > 0);
        let written = active.is_some_and(|active| active.file.number == *number);
        (live.outstanding == 0 && !written).then_some(*number)
    }

    fn activate(&mut self, file: Arc<SegmentFile>, bytes: u64) {
        self.live.insert(file.number, Live { bytes, outstanding: 0 });
        self.active = Some(Active { file, offset: BLOCK as u64 });
    }

    fn tail(&self) -> WalPosition {
        match &self.active {
            Some(active) => WalPosition { segment: active.file.number, offset: active.offset },
            None => WalPosition { segment: self.upcoming(), offset: BLOCK as u64 },
        }
    }

    /// Number of the next segment to be written, made ahead or not.
    fn upcoming(&self) -> u64 {
        self.next.as_ref().map_or(self.next_segment, |next| next.number)
    }

    fn gate(&self) -> Gate {
        match self.ending {
            Ending::No if self.starved && self.no_room => Gate::Full,
            Ending::No => Gate::Open,
            Ending::Closing | Ending::Failed => Gate::Shut,
        }
    }
}

impl Shared {
    pub(super) fn new(
        disk: Disk,
        config: &WalConfig,
        recovered: &Recovered,
        on_failure: Box<dyn Fn(&WalError) + Send + Sync>,
    ) -> Self {
        let live = recovered
            .found
            .iter()
            .map(|found| (found.number, Live { bytes: found.file_bytes, outstanding: found.entries }));
        let state = State {
            queue: VecDeque::with_capacity(SLOTS),
            active: None,
            next: None,
            next_segment: recovered.identity.first_segment,
            live: live.collect(),
            spares: recovered.spares.clone(),
            spare_number: recovered.spare_number,
            flights: VecDeque::with_capacity(FLIGHTS_MAX),
            emptied: Vec::with_capacity(FLIGHTS_MAX),
            delivering: false,
            chain: Some(recovered.identity.chain),
            durable: recovered.identity.chain.group - 1,
            marked: recovered.identity.chain.group - 1,
            mark_due: false,
            starved: false,
            no_room: false,
            retry_room: true,
            ending: Ending::No,
            writers: WRITERS,
        };
        let capacity = config.segment_bytes - BLOCK as u64;
        let group_bytes_max = config.group_bytes_max.min(capacity);
        Self {
            disk,
            log: recovered.identity.log,
            owner: config.owner.clone(),
            epoch: recovered.identity.epoch,
            segment_bytes: config.segment_bytes,
            bytes_max: config.bytes_max,
            group_bytes_max: usize::try_from(group_bytes_max).unwrap_or(usize::MAX),
            real_time: AtomicBool::new(false),
            entry_bytes: AtomicU64::new(0),
            state: Mutex::new(state),
            work: Bell::default(),
            chores: Bell::default(),
            on_failure,
            slots: Arc::new(Semaphore::new(SLOTS)),
            gate: watch::Sender::new(Gate::Open),
            ended: watch::Sender::new(false),
            told: Notify::new(),
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn enqueue(&self, entry: Pending) {
        let mut state = self.lock();
        if state.ending != Ending::No {
            drop(state);
            drop(entry);
            return;
        }
        state.queue.push_back(entry);
        drop(state);
        self.work.notify_one();
    }

    /// One entry of a segment is no longer needed.
    pub(super) fn release(&self, segment: u64) {
        let mut state = self.lock();
        let live = state.live.get_mut(&segment).expect("a segment with unreleased entries is kept");
        live.outstanding -= 1;
        let trimmable = state.trimmable().is_some();
        drop(state);
        if trimmable {
            self.chores.notify_one();
        }
    }

    pub(super) fn tail(&self) -> WalPosition {
        self.lock().tail()
    }

    pub(super) fn untouched(&self) -> WalPosition {
        let state = self.lock();
        let segment = match &state.active {
            Some(active) => active.file.number + u64::from(active.offset > BLOCK as u64),
            None => state.upcoming(),
        };
        WalPosition { segment, offset: 0 }
    }

    pub(super) fn trimmed(&self) -> WalPosition {
        let state = self.lock();
        let oldest = state.live.first_key_value().map(|(number, _)| *number);
        WalPosition { segment: oldest.unwrap_or_else(|| state.upcoming()), offset: 0 }
    }

    pub(super) fn status(&self) -> WalStatus {
        let state = self.lock();
        let unused = state.active.as_ref().map_or(0, |active| self.segment_bytes - active.offset);
        let bytes_live: u64 = state.live.values().map(|live| live.bytes).sum();
        WalStatus {
            bytes_used: bytes_live - unused,
            bytes_max: self.bytes_max,
            full: state.gate() == Gate::Full,
            direct_io: self.disk.direct(),
            real_time: self.real_time.load(Ordering::Relaxed),
            outstanding: state.live.values().map(|live| live.outstanding).sum(),
            entry_bytes: self.entry_bytes.load(Ordering::Relaxed),
        }
    }

    pub(super) fn begin_close(&self) {
        let mut state = self.lock();
        if state.ending == Ending::No {
            state.ending = Ending::Closing;
        }
        self.show_gate(&state);
        drop(state);
        self.wake_all();
    }

    fn wake_all(&self) {
        self.work.notify_all();
        self.chores.notify_all();
    }

    /// Lets waiters for a slot see whether there is room. Logs the change, both ways.
    pub(super) fn show_gate(&self, state: &State) {
        let gate = state.gate();
        let before = self.gate.send_replace(gate);
        match (before, gate) {
            (Gate::Open, Gate::Full) => {
                let (files, max) = (state.file_bytes(self.segment_bytes), self.bytes_max);
                tracing::warn!(
                    bytes = files,
                    bytes_max = max,
                    "log is full: producers wait until tables commit, or the disk has room"
                );
            }
            (Gate::Full, Gate::Open) => tracing::info!("log has room again"),
            _ => {}
        }
    }

    /// Takes what waits, as one group, into the writer's buffer. Returns the bytes to write; None at the end.
    fn form(&self, scratch: &mut Scratch) -> Option<(Taken, usize)> {
        let taken = self.take(scratch)?;
        let bytes = self.encode(&taken, scratch);
        Some((taken, bytes))
    }

    /// As `form`, for those who cannot wait.
    pub(super) fn try_form(&self, scratch: &mut Scratch) -> Formed<(Taken, usize)> {
        let taken = self.take_now(&mut self.lock(), scratch);
        match taken {
            Formed::Group(taken) => {
                let bytes = self.encode(&taken, scratch);
                Formed::Group((taken, bytes))
            }
            Formed::Nothing => Formed::Nothing,
            Formed::End => Formed::End,
        }
    }

    fn encode(&self, taken: &Taken, scratch: &mut Scratch) -> usize {
        // Wakes the appenders that wait for a slot: they gather the next group while this one is written.
        scratch.slots.clear();
        let payload_bytes = scratch.payloads.iter().flatten().map(Bytes::len).sum();
        let group_bytes = segment::group_bytes(scratch.payloads.len(), payload_bytes);
        let head = if taken.first { BLOCK } else { 0 };
        let bytes = head + group_bytes;
        self.fit(&mut scratch.buffer, bytes);
        let out = scratch.buffer.bytes_mut(bytes);
        if taken.first {
            self.header(taken.place.segment, Some(taken.place.chain)).encode(out);
        }
        let chain = segment::encode_group(&mut out[head..], &taken.place, &scratch.payloads);
        let mut state = self.lock();
        state.chain = Some(chain);
        self.wake_writer(&state);
        drop(state);
        scratch.payloads.clear();
        bytes
    }

    /// Grows the buffer where needed; gives back what only a single large entry needed.
    fn fit(&self, buffer: &mut AlignedBuffer, bytes: usize) {
        let usual = self.group_bytes_max + BLOCK;
        if buffer.capacity() < bytes {
            *buffer = AlignedBuffer::zeroed(bytes.max((2 * buffer.capacity()).min(usual)));
        } else if buffer.capacity() > segment::padded(usual) && bytes <= usual {
            *buffer = AlignedBuffer::zeroed(usual);
        }
    }

    pub(super) fn header(&self, segment: u64, first: Option<Chain>) -> SegmentHeader {
        let (log, owner, epoch) = (self.log, self.owner.clone(), self.epoch);
        SegmentHeader { log, owner, epoch, segment, segment_bytes: self.segment_bytes, first }
    }

    /// A writer that waits may go on, if there is something to write. Each wake-up costs the others time.
    fn wake_writer(&self, state: &State) {
        if !state.queue.is_empty() {
            self.work.notify_one();
        }
    }

    /// Waits until there is something to write and a place for it. Until `form` is done no other writer takes.
    fn take(&self, scratch: &mut Scratch) -> Option<Taken> {
        let mut state = self.lock();
        loop {
            match self.take_now(&mut state, scratch) {
                Formed::Group(taken) => return Some(taken),
                Formed::Nothing => state = self.work.wait(state),
                Formed::End => return None,
            }
        }
    }

    fn take_now(&self, state: &mut State, scratch: &mut Scratch) -> Formed<Taken> {
        let closing = match state.ending {
            Ending::Failed => return Formed::End,
            Ending::Closing => true,
            Ending::No => false,
        };
        let first_bytes = state.queue.front().map(|entry| segment::group_bytes(1, entry.bytes));
        match (first_bytes, state.chain) {
            (None, _) if closing => Formed::End,
            (Some(bytes), Some(chain))
                if state.flights.len() < FLIGHTS_MAX && self.has_place(state, bytes as u64) =>
            {
                state.chain = None;
                Formed::Group(self.fill(state, chain, scratch))
            }
            _ => Formed::Nothing,
        }
    }

    /// Whether a group of `bytes` fits the active segment, or the one made ahead, which is then the active one.
    fn has_place(&self, state: &mut State, bytes: u64) -> bool {
        let room = state.active.as_ref().map_or(0, |active| self.segment_bytes - active.offset);
        if bytes <= room {
            return true;
        }
        let next = state.next.take();
        state.starved = next.is_none();
        if let Some(next) = next {
            state.activate(next, self.segment_bytes);
        }
        self.show_gate(state);
        self.chores.notify_one();
        !state.starved
    }

    /// Moves entries from the queue into a group at the active segment's end.
    fn fill(&self, state: &mut State, chain: Chain, scratch: &mut Scratch) -> Taken {
        let active = state.active.as_mut().expect("there is a place");
        let room = usize::try_from(self.segment_bytes - active.offset).unwrap_or(usize::MAX);
        let limit = self.group_bytes_max.min(room);
        let (segment, offset) = (active.file.number, active.offset);
        let place =
            GroupPlace { log: self.log, epoch: self.epoch, segment, offset, chain, durable: state.durable };
        let mut callbacks = state.emptied.pop().unwrap_or_default();
        let (seed, mut at) = (place.seed(), GROUP_HEADER);
        while let Some(entry) = state.queue.front() {
            let next = at + ENTRY_HEADER + entry.bytes;
            if !callbacks.is_empty() && segment::padded(next) > limit {
                break;
            }
            let Some(Pending { payload, bytes, then, slot }) = state.queue.pop_front() else { break };
            let entry = Written { offset: offset + at as u64, payload_bytes: bytes, seed };
            callbacks.push(Callback { entry, then });
            scratch.payloads.push(payload);
            scratch.slots.push(slot);
            at = next;
        }
        active.offset += segment::padded(at) as u64;
        let file = Arc::clone(&active.file);
        let live = state.live.get_mut(&segment).expect("the active segment is live");
        live.outstanding += callbacks.len() as u64;
        state.flights.push_back(Flight { number: chain.group, segment, done: false, callbacks });
        Taken { file, place, first: offset == BLOCK as u64 }
    }

    /// A group is flushed: tells of all that is durable now, unless another thread is at it.
    pub(super) fn complete(self: &Arc<Self>, number: u64) {
        let mut state = self.lock();
        if let Some(flight) = state.flights.iter_mut().find(|flight| flight.number == number) {
            flight.done = true;
        }
        if state.delivering {
            return;
        }
        state.delivering = true;
        while let Some(mut flight) = state.next_durable() {
            drop(state);
            for callback in flight.callbacks.drain(..) {
                let durable = Durable::of(self, flight.segment, callback.entry);
                (callback.then)(durable);
            }
            state = self.lock();
            state.emptied.push(flight.callbacks);
            self.wake_writer(&state);
        }
        state.delivering = false;
        drop(state);
        self.told.notify_waiters();
    }

    /// Whether all that was appended is durable, and told.
    fn is_settled(&self) -> bool {
        let state = self.lock();
        // Without the chain a writer forms a group that is in neither.
        let is_forming = state.chain.is_none();
        let is_empty = state.queue.is_empty() && state.flights.is_empty() && !is_forming && !state.delivering;
        // A log that has failed tells nothing any more.
        is_empty || state.ending == Ending::Failed
    }

    /// Resolves when all that was appended is durable, and told.
    pub(super) async fn settled(&self) {
        loop {
            let told = self.told.notified();
            if self.is_settled() {
                return;
            }
            told.await;
        }
    }

    /// Fail-stop: nothing is written or told of any more. Only the first failure counts.
    pub(super) fn fail(&self, error: &WalError) {
        let mut state = self.lock();
        if state.ending == Ending::Failed {
            return;
        }
        state.ending = Ending::Failed;
        let queue = std::mem::take(&mut state.queue);
        let flights = std::mem::take(&mut state.flights);
        self.show_gate(&state);
        drop(state);
        tracing::error!(
            error = error as &dyn std::error::Error,
            "log failed: nothing becomes durable any more"
        );
        (self.on_failure)(error);
        drop((queue, flights));
        self.wake_all();
        self.told.notify_waiters();
    }

    /// Ends threads that have not begun to work.
    fn stop(&self) {
        let mut state = self.lock();
        state.ending = Ending::Failed;
        state.writers = 0;
        drop(state);
        self.wake_all();
    }

    pub(super) fn writer_ended(&self) {
        let mut state = self.lock();
        state.writers = state.writers.saturating_sub(1);
        drop(state);
        self.wake_all();
    }

    /// Waits for a chore, no longer than until the next try or mark is due.
    pub(super) fn wait_for_chore<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        let most = state.chore_wait();
        let (mut state, is_due) = self.chores.wait_at_most(state, most);
        if is_due {
            state.chores_due();
        }
        state
    }

    /// A segment has been made.
    pub(super) fn segment_made(&self, file: SegmentFile) {
        let mut state = self.lock();
        state.next = Some(Arc::new(file));
        state.next_segment += 1;
        state.no_room = false;
        self.show_gate(&state);
        drop(state);
        self.work.notify_one();
    }
}

impl State {
    /// How long the keeper may wait.
    pub(super) fn chore_wait(&self) -> Duration {
        if self.no_room { ROOM_RETRY } else { MARK_EVERY }
    }

    /// That time has passed.
    pub(super) fn chores_due(&mut self) {
        self.retry_room |= self.no_room;
        self.mark_due = true;
    }

    /// The oldest group on its way, once it is done; raises the frontier.
    fn next_durable(&mut self) -> Option<Flight> {
        if self.ending == Ending::Failed || !self.flights.front().is_some_and(|flight| flight.done) {
            return None;
        }
        let flight = self.flights.pop_front()?;
        self.durable = flight.number;
        Some(flight)
    }
}
