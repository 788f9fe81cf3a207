//! The log in the tables' own store: one object a group, put if absent, so that a pod needs no disk and any other can take
//! its log over.
//!
//! Entries gather for an interval, or until they are many enough, and go out as one object under the next number. A few may
//! be on their way at once; they are told of in order, each after all before it. A put that failed is tried again, with the
//! same bytes, until it comes through: the object is there whole or not at all, so that nothing is doubted but whether a
//! lost reply was a yes. That is seen by the object's nonce. Another nonce under our number means that this log was taken
//! over (`sealed.rs`): nothing more is told, and the process ends. While nothing is written the next number is looked at
//! now and then, so that a process that was stopped for long finds out before it has taken a record.
//!
//! A log has one life: a pod that starts begins a new one, and takes over those of its former lives.
//!
//! *Owns*: when a group goes out, the order of groups, the limit in bytes, trimming.
//! *Does not own*: objects' bytes (`form.rs`), names and calls (`folder.rs`), taking over (`sealed.rs`, `adopt`).
//! Keeps P3: a `then` runs only when its group and all before it are stored; after a failure none runs.
//! Keeps P7: entries wait within the slots, objects within `bytes_max`.

pub(super) mod form;
mod folder;
mod groups;
mod sealed;
#[cfg(debug_assertions)]
pub(super) mod fuzzing;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::stream::FuturesOrdered;
use sluice_shared::fault::{self, Point};
use sluice_shared::ids::{LogId, PodId, WalPosition};
use sluice_shared::lifecycle::{OnPanic, TaskScope};
use tokio::sync::{Notify, Semaphore, watch};
use tokio::time::Instant;
use uuid::Uuid;

pub use folder::{LogHeader, LogStore};
pub use sealed::SealedLog;

use super::segment::{BLOCK, Chain};
use super::writer::{Ending, Gate, Pending};
use super::{Durable, WalError, WalStatus};
use folder::Put;
use form::{EntryPlace, GroupObject};
pub(crate) use groups::Groups;

/// Objects that may be on their way at once. Who takes a log over relies on it: it never grows.
const FLIGHTS_MAX: usize = 4;
/// Entries that may wait to be taken into a group. More than on a disk: they wait for an interval, not for a flush.
const SLOTS: usize = 32;
/// Pauses before a put is tried again grow from this to `PAUSE_MAX`.
const PAUSE_MIN: Duration = Duration::from_millis(20);
const PAUSE_MAX: Duration = Duration::from_secs(1);
/// A put that fails for so long is told as a log that is full: new streams go elsewhere.
const FAILING_TOLD: Duration = Duration::from_secs(1);
/// Between two times that released groups are deleted: each costs a put.
const TRIM_PAUSE: Duration = Duration::from_millis(500);
/// A log that writes nothing looks so often whether it was taken over.
const LOOK_INTERVAL: Duration = Duration::from_secs(2);

/// How a log in the tables' store is kept.
#[derive(Debug, Clone)]
pub struct ObjectLogConfig {
    /// The pod that it belongs to.
    pub owner: PodId,
    /// How long an entry waits for others at most.
    pub interval: Duration,
    /// Bytes of entries that go out at once.
    pub group_bytes_max: u64,
    /// Largest entry.
    pub payload_bytes_max: u64,
    /// Most bytes of objects that are not trimmed. At the limit slots wait.
    pub bytes_max: u64,
}

/// A log that this process writes. Clones share it; when the last one is dropped the log writes what it has and ends.
#[derive(Clone)]
pub(super) struct ObjectLog {
    pub(super) shared: Arc<Shared>,
    _owner: Arc<Owner>,
}

/// Ends the tasks with the last handle.
struct Owner(Arc<Shared>);

impl Drop for Owner {
    fn drop(&mut self) {
        self.0.begin_close();
    }
}

/// The log, as its handles and tasks see it.
pub(super) struct Shared {
    pub(super) config: ObjectLogConfig,
    pub(super) groups: Arc<Groups>,
    pub(super) slots: Arc<Semaphore>,
    pub(super) gate: watch::Sender<Gate>,
    state: Mutex<State>,
    /// For the writer.
    work: Notify,
    /// Each time when nothing is left to tell.
    told: Notify,
    ended: watch::Sender<bool>,
    on_failure: Box<dyn Fn(&WalError) + Send + Sync>,
}

struct State {
    queue: VecDeque<Pending>,
    queued_bytes: u64,
    /// When the oldest entry of the queue came.
    since: Option<Instant>,
    /// Somebody waits for all that is queued.
    hurried: u32,
    /// The next group's number.
    next: u64,
    /// Groups that are formed and not told of.
    untold: usize,
    /// Since when puts have failed.
    failing: Option<Instant>,
    ending: Ending,
    /// The tasks that still run.
    tasks: usize,
}

/// An entry in a group, which waits to be stored.
type Callback = (EntryPlace, Box<dyn FnOnce(Durable) + Send>);

/// A group on its way.
struct Flight {
    number: u64,
    callbacks: Vec<Callback>,
}

/// What the writer does next.
enum Next {
    Form,
    /// Nothing more will come.
    End,
}

impl ObjectLog {
    /// Begins a log, and its tasks. `on_failure` is called once, when the log was taken over or cannot go on: nothing
    /// becomes durable any more, and the process should end.
    pub(super) async fn begin(
        logs: &LogStore,
        config: ObjectLogConfig,
        on_failure: Box<dyn Fn(&WalError) + Send + Sync>,
    ) -> Result<Self, WalError> {
        config.validate()?;
        let folder = logs.folder(LogId(Uuid::new_v4()));
        folder.begin(&config.owner).await?;
        tracing::info!(log = %folder.log.0, folder = ?folder.name_of(1), "log begun in the tables' store");
        let state = State {
            queue: VecDeque::with_capacity(SLOTS),
            queued_bytes: 0,
            since: None,
            hurried: 0,
            next: 1,
            untold: 0,
            failing: None,
            ending: Ending::No,
            tasks: 2,
        };
        let shared = Arc::new(Shared {
            config,
            groups: Arc::new(Groups::new(folder, false)),
            slots: Arc::new(Semaphore::new(SLOTS)),
            gate: watch::Sender::new(Gate::Open),
            state: Mutex::new(state),
            work: Notify::new(),
            told: Notify::new(),
            ended: watch::Sender::new(false),
            on_failure,
        });
        // Its own: the log outlives what appends to it. A panic, such as in a `then`, must not leave it hanging.
        let scope = TaskScope::new(OnPanic::EndProcess);
        scope.spawn("object log", Writer::new(Arc::clone(&shared)).run());
        scope.spawn("object log trim", trim(Arc::clone(&shared)));
        Ok(Self { _owner: Arc::new(Owner(Arc::clone(&shared))), shared })
    }
}

impl ObjectLogConfig {
    fn validate(&self) -> Result<(), WalError> {
        let refuse = |what: String| Err(WalError::Config(what));
        if self.interval.is_zero() || self.group_bytes_max == 0 {
            return refuse(
                "interval and group_bytes_max of a log in the tables' store have to be above 0".to_owned(),
            );
        }
        let (most, entry) = (self.bytes_max, self.payload_bytes_max);
        if most < entry {
            return refuse(format!("bytes_max is {most}: it has to hold an entry of {entry}"));
        }
        Ok(())
    }
}

impl State {
    fn gate(&self, bytes: u64, bytes_max: u64) -> Gate {
        let is_failing = self.failing.is_some_and(|since| since.elapsed() >= FAILING_TOLD);
        match self.ending {
            Ending::No if is_failing || bytes >= bytes_max => Gate::Full,
            Ending::No => Gate::Open,
            Ending::Closing | Ending::Failed => Gate::Shut,
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn log(&self) -> LogId {
        self.groups.folder.log
    }

    pub(super) fn enqueue(&self, entry: Pending) {
        let mut state = self.lock();
        if state.ending != Ending::No {
            drop(state);
            drop(entry);
            return;
        }
        state.queued_bytes += entry.bytes as u64;
        state.since.get_or_insert_with(Instant::now);
        state.queue.push_back(entry);
        drop(state);
        self.work.notify_one();
    }

    /// Where the next group goes.
    pub(super) fn tail(&self) -> WalPosition {
        WalPosition { segment: self.lock().next, offset: BLOCK as u64 }
    }

    /// The first number that nothing has been written to.
    pub(super) fn untouched(&self) -> WalPosition {
        WalPosition { segment: self.lock().next, offset: 0 }
    }

    /// Everything before is released, and no start replays it.
    pub(super) fn trimmed(&self) -> WalPosition {
        let next = self.lock().next;
        WalPosition { segment: self.groups.first().unwrap_or(next), offset: 0 }
    }

    pub(super) fn status(&self) -> WalStatus {
        let (bytes_used, outstanding) = self.groups.totals();
        WalStatus {
            bytes_used,
            bytes_max: self.config.bytes_max,
            full: *self.gate.borrow() == Gate::Full,
            direct_io: false,
            real_time: false,
            outstanding,
            entry_bytes: self.groups.entry_bytes.load(Ordering::Relaxed),
        }
    }

    /// Lets waiters for a slot see whether there is room. Logs the change, both ways.
    fn show_gate(&self, state: &State) {
        let (bytes, bytes_max) = (self.groups.totals().0, self.config.bytes_max);
        let gate = state.gate(bytes, bytes_max);
        let before = self.gate.send_replace(gate);
        match (before, gate) {
            (Gate::Open, Gate::Full) => {
                let why = "log is full: producers wait until tables commit, or the store takes objects again";
                tracing::warn!(bytes, bytes_max, failing = state.failing.is_some(), "{why}");
            }
            (Gate::Full, Gate::Open) => tracing::info!("log has room again"),
            _ => {}
        }
    }

    pub(super) fn begin_close(&self) {
        let mut state = self.lock();
        if state.ending == Ending::No {
            state.ending = Ending::Closing;
        }
        self.show_gate(&state);
        drop(state);
        self.wake();
    }

    fn wake(&self) {
        self.work.notify_one();
        self.groups.released.notify_one();
    }

    pub(super) async fn ended(&self) {
        let mut ended = self.ended.subscribe();
        // The sender lives in `self`: waiting for it cannot fail.
        let _ = ended.wait_for(|ended| *ended).await;
    }

    fn task_ended(&self) {
        let mut state = self.lock();
        state.tasks -= 1;
        let is_last = state.tasks == 0;
        drop(state);
        if is_last {
            self.ended.send_replace(true);
        }
    }

    /// Resolves when all that was appended is durable and told, or the log has failed.
    pub(super) async fn settled(&self) {
        let _hurried = Hurried::new(self);
        loop {
            let told = self.told.notified();
            {
                let state = self.lock();
                let is_empty = state.queue.is_empty() && state.untold == 0;
                if is_empty || state.ending == Ending::Failed {
                    return;
                }
            }
            told.await;
        }
    }

    /// Deletes what is left of a log of which nothing is needed, and which is closed. Nothing stays of it.
    pub(super) async fn delete(&self) -> Result<(), WalError> {
        let next = self.lock().next;
        self.groups.delete(next, None).await
    }

    /// Fail-stop: nothing is written or told of any more. Only the first failure counts.
    fn fail(&self, error: &WalError) {
        let mut state = self.lock();
        if state.ending == Ending::Failed {
            return;
        }
        state.ending = Ending::Failed;
        let queue = std::mem::take(&mut state.queue);
        self.show_gate(&state);
        drop(state);
        let cause = error as &dyn std::error::Error;
        tracing::error!(error = cause, "log failed: nothing becomes durable any more");
        (self.on_failure)(error);
        drop(queue);
        self.wake();
        self.told.notify_waiters();
    }

    /// A read of an entry failed. One that is missing shows that the log was taken over.
    pub(super) fn read_failed(&self, error: &WalError) {
        if matches!(error, WalError::Fenced { .. }) {
            self.fail(error);
        }
    }

    /// Resolves when a group is due: entries have waited long enough, or are enough.
    async fn due(&self) -> Next {
        loop {
            let work = self.work.notified();
            let at = {
                let state = self.lock();
                let is_closing = state.ending != Ending::No;
                match state.since {
                    _ if state.ending == Ending::Failed => return Next::End,
                    None if is_closing => return Next::End,
                    None => None,
                    Some(_) if is_closing || state.hurried > 0 => return Next::Form,
                    Some(_) if state.queued_bytes >= self.config.group_bytes_max => return Next::Form,
                    Some(since) if since.elapsed() >= self.config.interval => return Next::Form,
                    Some(since) => Some(since + self.config.interval),
                }
            };
            tokio::select! {
                biased; // the order is of no consequence: both lead to another look
                () = work => {}
                () = sleep_until(at) => {}
            }
        }
    }
}

/// While it lives, no entry waits for others.
struct Hurried<'a>(&'a Shared);

impl<'a> Hurried<'a> {
    fn new(shared: &'a Shared) -> Self {
        shared.lock().hurried += 1;
        shared.work.notify_one();
        Self(shared)
    }
}

impl Drop for Hurried<'_> {
    fn drop(&mut self) {
        self.0.lock().hurried -= 1;
    }
}

async fn sleep_until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}

/// The one task that forms groups and tells of them.
struct Writer {
    shared: Arc<Shared>,
    /// What the next group carries.
    chain: Chain,
    /// All groups up to this one are stored.
    durable: u64,
}

impl Writer {
    fn new(shared: Arc<Shared>) -> Self {
        Self { shared, chain: Chain::START, durable: 0 }
    }

    async fn run(mut self) {
        let shared = Arc::clone(&self.shared);
        let mut flights = FuturesOrdered::new();
        let mut is_ending = false;
        while !is_ending || !flights.is_empty() {
            let has_room = !is_ending && flights.len() < FLIGHTS_MAX;
            tokio::select! {
                biased; // what is stored is told first: producers wait for it
                Some(flown) = flights.next() => match flown {
                    Ok(flight) => self.tell(flight),
                    Err(error) => {
                        shared.fail(&error);
                        break;
                    }
                },
                next = shared.due(), if has_room => match next {
                    Next::Form => {
                        let (flight, bytes, nonce) = self.form();
                        let storing = store(Arc::clone(&shared), flight.number, bytes, nonce);
                        flights.push_back(async move { storing.await.map(|()| flight) });
                    }
                    Next::End => is_ending = true,
                },
                () = tokio::time::sleep(LOOK_INTERVAL), if flights.is_empty() && !is_ending => {
                    if let Err(error) = self.look().await {
                        shared.fail(&error);
                        break;
                    }
                }
            }
        }
        drop(flights);
        shared.task_ended();
    }

    /// Takes what waits, as one group.
    fn form(&mut self) -> (Flight, Bytes, Uuid) {
        let shared = &self.shared;
        let number = self.chain.group;
        let (mut payloads, mut thens, mut slots) = (Vec::new(), Vec::new(), Vec::new());
        let mut state = shared.lock();
        let mut bytes = 0;
        while let Some(entry) = state
            .queue
            .pop_front_if(|entry| bytes == 0 || bytes + entry.bytes as u64 <= shared.config.group_bytes_max)
        {
            bytes += (entry.bytes as u64).max(1);
            state.queued_bytes -= entry.bytes as u64;
            payloads.push(entry.payload);
            thens.push(entry.then);
            slots.push(entry.slot);
        }
        state.since = state.since.filter(|_| !state.queue.is_empty());
        state.next = number + 1;
        state.untold += 1;
        drop(state);
        // Wakes the appenders that wait for a slot: they gather the next group while this one is stored.
        drop(slots);
        let nonce = Uuid::new_v4();
        let group = GroupObject {
            log: shared.log(),
            owner: &shared.config.owner,
            nonce,
            chain: self.chain,
            durable: self.durable,
            kept: shared.groups.first().unwrap_or(number),
        };
        let (object, places, next) = form::encode_group(&group, &payloads);
        self.chain = next;
        shared.groups.add(number, object.len() as u64, places.len());
        shared.show_gate(&shared.lock());
        (Flight { number, callbacks: places.into_iter().zip(thens).collect() }, object.into(), nonce)
    }

    /// A group and all before it are stored.
    fn tell(&mut self, flight: Flight) {
        let Flight { number, callbacks } = flight;
        let shared = &self.shared;
        if shared.lock().ending == Ending::Failed {
            return;
        }
        self.durable = number;
        for (place, then) in callbacks {
            let position = WalPosition { segment: number, offset: place.offset };
            then(Durable::in_object(&shared.groups, position, place.payload_bytes as u64, place.seed));
        }
        shared.lock().untold -= 1;
        shared.told.notify_waiters();
    }

    /// Whether somebody has put an object where this log's next one goes.
    async fn look(&self) -> Result<(), WalError> {
        let number = self.chain.group;
        match self.shared.groups.folder.has(number).await {
            Ok(false) => Ok(()),
            Ok(true) => Err(self.shared.fenced(number).await),
            Err(error) => {
                tracing::debug!(%error, "cannot look whether the log was taken over");
                Ok(())
            }
        }
    }
}

impl Shared {
    /// Another one's object stands under this log's number.
    async fn fenced(&self, number: u64) -> WalError {
        let folder = &self.groups.folder;
        let seal = folder.object(number).await.ok().flatten();
        let seal = seal.and_then(|bytes| form::decode(&bytes, folder.log, number).ok());
        let (log, object) = (folder.log, folder.name_of(number));
        WalError::Fenced { log, object, by: seal.map(|seal| seal.writer) }
    }
}

/// Stores a group, however long that takes. Only a rival's object under its number is a failure, and, in a directory, one
/// whose flush failed.
async fn store(shared: Arc<Shared>, number: u64, bytes: Bytes, nonce: Uuid) -> Result<(), WalError> {
    let folder = &shared.groups.folder;
    let (mut pause, mut failed) = (PAUSE_MIN, None);
    loop {
        // Errors of the store have points of their own (`table/faulty.rs`).
        fault::pass(Point::LogPutBefore);
        let error = match put(&shared, number, &bytes, nonce).await {
            // It is there, and a power loss may take it away: no second flush can tell.
            Ok(Stored::Before) if failed.is_some() && folder.is_directory() => {
                return Err(failed.expect("looked at"));
            }
            Ok(Stored::Now | Stored::Before) => break,
            Err(error @ WalError::Fenced { .. }) => return Err(error),
            Err(error) => error,
        };
        shared.failing(true);
        warn_of(&error, "cannot store a group of the log: trying again");
        failed.get_or_insert(error);
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(PAUSE_MAX);
    }
    shared.failing(false);
    fault::pass(Point::LogPutAfter);
    Ok(())
}

fn warn_of(error: &WalError, what: &str) {
    tracing::warn!(error = error as &dyn std::error::Error, "{what}");
}

/// What is known of a group's object.
enum Stored {
    /// It was put just now.
    Now,
    /// An earlier try had put it.
    Before,
}

/// One try.
async fn put(shared: &Shared, number: u64, bytes: &Bytes, nonce: Uuid) -> Result<Stored, WalError> {
    let folder = &shared.groups.folder;
    if folder.put_new(number, bytes.clone()).await? == Put::Done {
        return Ok(Stored::Now);
    }
    match folder.object(number).await? {
        Some(there) if form::nonce_of(&there, folder.log, number) == Some(nonce) => Ok(Stored::Before),
        Some(_) => Err(shared.fenced(number).await),
        None => Err(folder.corrupt(number, "it is said to be there, and is not".to_owned())),
    }
}

impl Shared {
    fn failing(&self, is_failing: bool) {
        let mut state = self.lock();
        if is_failing {
            state.failing.get_or_insert_with(Instant::now);
        } else if state.failing.take().is_none() {
            return;
        }
        self.show_gate(&state);
    }
}

/// Deletes groups that are released, until the log is closed.
async fn trim(shared: Arc<Shared>) {
    loop {
        shared.groups.released.notified().await;
        if shared.lock().ending != Ending::No {
            break;
        }
        match shared.groups.trim().await {
            Ok(_) => shared.show_gate(&shared.lock()),
            Err(error) => {
                warn_of(&error, "cannot trim the log: trying again");
                shared.groups.released.notify_one();
            }
        }
        let mut gate = shared.gate.subscribe();
        tokio::select! {
            biased; // the end first
            _ = gate.wait_for(|gate| *gate == Gate::Shut) => {}
            () = tokio::time::sleep(TRIM_PAUSE) => {}
        }
    }
    shared.task_ended();
}
