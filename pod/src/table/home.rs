//! A table's home: the only place in this pod that commits to the table, for this pod and for others that ask.
//!
//! A commit is a watermark map, put if absent under a new number, and then a Delta commit that names it. One commit
//! takes all requests that have come in since the last one; where several pods ask, it waits for them, so that the
//! rate of commits is that of one pod. A request is taken whole or not at all, and only where each of its runs gets
//! the verdict that its files were written by. Whoever else commits meanwhile, another pod's home or a foreign writer,
//! makes ours a conflict: the table is read anew and the runs are judged again. That is also how a commit is recognised
//! whose answer was lost, and why two pods that both hold themselves for the home do no harm.
//!
//! *Owns*: the newest known version and its map, the numbers of maps, rounds, conflicts, checkpoints, forgetting
//! ended streams in a commit.
//! *Does not own*: files (the table's task writes them), what is at hand (the task), which pod is home (`pool`), the way
//! there (`route`), the rules (`watermark`, `ended`).
//! Keeps P2 and P4. Maps are never deleted: each version that can still be read needs its own, and versions are not
//! cleaned up yet.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use arrow::array::{AsArray, RecordBatch};
use arrow::datatypes::Int64Type;
use futures_util::StreamExt;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt, PutMode};
use sluice_shared::error::Error;
use sluice_shared::fault::{self, Bug, Point};
use sluice_shared::ids::{LogId, PodId, StreamId, TableId, TableName, TableVersion};
use sluice_shared::lifecycle::{TaskScope, now_us};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;
use uuid::Uuid;

use super::Clock;
use super::delta::{Delta, DeltaError, Put, TRANSACTION, Version};
use super::ended::{EndedStreams, Ending};
use super::round::FILE_AGE_MAX;
use super::watermark::{MapError, RunKey, Verdict, WatermarkMap, Working};
use crate::wal::Wal;

/// Requests that wait for the home at most.
const MAILBOX: usize = 64;
/// How often a load is tried again that met another pod's first commit.
const LOADS_MAX: u32 = 5;
/// Tries at one commit before its table's task pauses, and looks whether it has to end.
const COMMIT_TRIES_MAX: u32 = 10;
/// Longest pause after a conflict grows to this.
const CONFLICT_PAUSE_MAX: Duration = Duration::from_millis(50);
/// Urgent requests wait for this part of the interval between rounds.
const URGENT_PART: u32 = 10;
/// A pod counts as one that commits here for so many intervals after it last asked.
const ASKER_INTERVALS: u32 = 4;

/// A version of the table and its map: what `committed` means.
#[derive(Debug, Clone)]
pub struct View {
    /// The version.
    pub version: Version,
    /// How far each stream is in it.
    pub map: Arc<WatermarkMap>,
}

/// Files and the runs in them, with the verdicts that they were written by: committed together, or not at all.
#[derive(Debug, Clone)]
pub struct CommitRequest {
    /// Who asks.
    pub pod: PodId,
    /// The table that the runs are for.
    pub table: TableId,
    /// The newest version that the asker knows of.
    pub version: TableVersion,
    /// The shape that the files were made for, by its fingerprint.
    pub shape: u64,
    /// The asker's log: it is registered with the table where it is not.
    pub log: LogId,
    /// Not to wait for the next round.
    pub urgent: bool,
    /// The runs at hand, less those that are held.
    pub runs: Vec<(RunKey, Verdict)>,
    /// What the table's log is to say of the files: they have all rows that the verdicts commit, and no others.
    pub adds: Vec<RecordBatch>,
    /// Ended streams that neither the asker's log nor a gateway can bring again (`ended`).
    pub ended: Vec<StreamId>,
}

impl CommitRequest {
    /// Asks for nothing but that a log is registered.
    fn is_registration(&self) -> bool {
        self.runs.is_empty() && self.adds.is_empty()
    }

    /// Whether a sweep may take some file for an orphan: one whose age is not known counts as new.
    fn is_old(&self) -> bool {
        let oldest_ms = now_us() / 1000 - i64::try_from(FILE_AGE_MAX.as_millis()).unwrap_or(i64::MAX);
        let is_old = |add: &RecordBatch| {
            let modified = add.column_by_name("modificationTime");
            let modified = modified.and_then(|modified| modified.as_primitive_opt::<Int64Type>());
            modified.is_some_and(|modified| modified.iter().flatten().any(|at| at < oldest_ms))
        };
        self.adds.iter().any(is_old)
    }
}

/// What has become of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The rows can be read in the answer's version.
    Committed,
    /// A verdict no longer stands: judge anew by the answer's version.
    Changed,
    /// The files are too old: write them anew.
    Rewrite,
    /// The table's metadata are not those that the files were made for.
    Reshaped,
}

/// How a request ended, where nothing failed.
#[derive(Debug, Clone)]
pub struct Answer {
    /// What has become of it.
    pub outcome: Outcome,
    /// The table thereafter.
    pub view: View,
    /// When the home means to commit again; None where it does so as soon as it is asked.
    pub next: Option<Duration>,
}

/// Why the home could not do it.
#[derive(Debug, Clone, thiserror::Error)]
pub enum HomeError {
    /// Not now: nothing is lost, try again.
    #[error("{0}")]
    Again(String),
    /// Not before a person acts.
    #[error("{0}")]
    Stopped(Error),
}

type Reply<T> = oneshot::Sender<Result<T, HomeError>>;

enum HomeMessage {
    /// Commit files and runs.
    Commit(CommitRequest, Reply<Answer>),
    /// Read the table anew, where it was last read so long ago.
    Reload(Duration, Reply<View>),
}

/// The way to a table's home.
#[derive(Clone)]
pub struct HomeHandle {
    messages: mpsc::Sender<HomeMessage>,
    view: watch::Receiver<Arc<View>>,
    forgetting: Forgetting,
}

/// The table's ended streams, as those who see streams end and the home share them, and the log that they were in.
#[derive(Clone)]
struct Forgetting {
    ended: Arc<Mutex<EndedStreams>>,
    wal: Wal,
    clock: Clock,
}

impl Forgetting {
    fn new(config: &HomeConfig) -> Self {
        let ended = EndedStreams::new(config.wal.log_id(), config.ended_kept);
        Self { ended: Arc::new(Mutex::new(ended)), wal: config.wal.clone(), clock: config.clock.clone() }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, EndedStreams> {
        self.ended.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ended(&self, stream: &StreamId, end: u64) {
        let mut ended = self.lock();
        let (log_end, at) = (self.wal.untouched(), self.clock.now());
        ended.ended(Ending { stream: stream.clone(), end, log_end, at });
    }

    fn due(&self, map: &WatermarkMap) -> Vec<StreamId> {
        self.lock().due(map, self.wal.trimmed(), self.clock.now())
    }

    /// Takes the streams that are due out of a map that is about to be put. Answers how many.
    fn forget(&self, map: &mut WatermarkMap) -> usize {
        let due = self.due(map);
        due.iter().for_each(|stream| map.forget(stream));
        due.len()
    }
}

/// Where a table is, and who asks.
#[derive(Clone)]
pub struct HomeConfig {
    /// Its name.
    pub name: TableName,
    /// Its directory in the store.
    pub directory: Path,
    /// The store.
    pub store: Arc<dyn ObjectStore>,
    /// The way to Delta.
    pub delta: Delta,
    /// This pod's log.
    pub wal: Wal,
    /// How long after its end a gateway may still send a stream again.
    pub ended_kept: Duration,
    /// By which that is measured.
    pub clock: Clock,
    /// Versions between checkpoints.
    pub checkpoint_interval: u64,
    /// Between two rounds, where several pods ask.
    pub commit_interval: Duration,
}

impl HomeHandle {
    /// Loads a table and starts its home.
    ///
    /// # Errors
    /// `Stopped` with NotFound where there is no table, or with what makes it unusable.
    pub async fn start(config: HomeConfig, scope: &TaskScope) -> Result<Self, HomeError> {
        let home = HomeTask::load(config).await?;
        home.take_over_ended();
        let (forgetting, view) = (home.forgetting.clone(), home.views.subscribe());
        let (messages, inbox) = mpsc::channel(MAILBOX);
        let stop = scope.clone();
        scope.spawn("table home", async move { home.run(inbox, stop).await });
        Ok(Self { messages, view, forgetting })
    }

    /// An ephemeral stream has ended: all of it before `end` is in the pod's log, and nothing else of it will be.
    /// A later commit forgets it.
    pub fn ended(&self, stream: &StreamId, end: u64) {
        self.forgetting.ended(stream, end);
    }

    /// The ended streams that are due, for a home elsewhere.
    pub fn due(&self, map: &WatermarkMap) -> Vec<StreamId> {
        self.forgetting.due(map)
    }

    /// An ephemeral stream is opened, perhaps again after it had ended: it is not forgotten meanwhile.
    pub fn opened(&self, stream: &StreamId) {
        self.forgetting.lock().reopened(stream);
    }

    /// The newest known version.
    pub fn view(&self) -> Arc<View> {
        Arc::clone(&self.view.borrow())
    }

    /// Told of each newer version.
    pub fn views(&self) -> watch::Receiver<Arc<View>> {
        self.view.clone()
    }

    /// Commits.
    ///
    /// # Errors
    /// `HomeError`.
    pub async fn commit(&self, request: CommitRequest) -> Result<Answer, HomeError> {
        let (answer, answered) = oneshot::channel();
        self.ask(HomeMessage::Commit(request, answer), answered).await
    }

    /// Reads the table anew.
    ///
    /// # Errors
    /// `HomeError`.
    pub async fn reload(&self) -> Result<View, HomeError> {
        self.reload_older(Duration::ZERO).await
    }

    /// Reads the table anew, unless that was done less than `age` ago: many may ask for it.
    ///
    /// # Errors
    /// `HomeError`.
    pub async fn reload_older(&self, age: Duration) -> Result<View, HomeError> {
        let (answer, answered) = oneshot::channel();
        self.ask(HomeMessage::Reload(age, answer), answered).await
    }

    async fn ask<T>(
        &self,
        message: HomeMessage,
        answered: oneshot::Receiver<Result<T, HomeError>>,
    ) -> Result<T, HomeError> {
        let gone = || HomeError::Again("the table's home has ended".to_owned());
        self.messages.send(message).await.map_err(|_| gone())?;
        answered.await.map_err(|_| gone())?
    }
}

struct HomeTask {
    config: HomeConfig,
    /// The newest known version and its map.
    view: View,
    views: watch::Sender<Arc<View>>,
    /// Highest number that a map is known to have, committed or not.
    highest: u64,
    /// Version of the last checkpoint that was due.
    checkpointed: u64,
    forgetting: Forgetting,
    /// Requests for the next round.
    waiting: Vec<(CommitRequest, Reply<Answer>)>,
    /// When the last round began.
    round_at: Option<Instant>,
    /// When the view was known to be the newest.
    read_at: Instant,
    /// When pods last asked.
    askers: HashMap<PodId, Instant>,
}

impl HomeTask {
    async fn run(mut self, mut inbox: mpsc::Receiver<HomeMessage>, stop: TaskScope) {
        loop {
            let due = self.due();
            let message = tokio::select! {
                biased; // stopping wins over more work; what has come in goes into the round
                () = stop.cancelled() => return,
                message = inbox.recv() => match message {
                    None => return,
                    message => message,
                },
                () = due_at(due) => None,
            };
            if let Some(message) = message {
                self.take(message).await;
                while let Ok(message) = inbox.try_recv() {
                    self.take(message).await;
                }
            }
            if self.due().is_some_and(|due| due <= Instant::now()) {
                self.round().await;
                // Not after a mere look at the table: that is for who commits.
                self.checkpoint_if_due().await;
            }
        }
    }

    async fn take(&mut self, message: HomeMessage) {
        match message {
            HomeMessage::Commit(request, answer) => {
                self.askers.insert(request.pod.clone(), Instant::now());
                self.waiting.push((request, answer));
            }
            HomeMessage::Reload(age, answer) => {
                let reloaded =
                    if age.is_zero() || self.read_at.elapsed() >= age { self.reload().await } else { Ok(()) };
                self.publish();
                // An answer that nobody waits for any more is no failure.
                let _ = answer.send(reloaded.map(|()| self.view.clone()));
            }
        }
    }

    /// When the next round is due. A pod that is the only one to ask need not wait for others.
    fn due(&self) -> Option<Instant> {
        let soonest = self.waiting.iter().map(|(request, _)| self.pause_of(request)).min()?;
        Some(self.round_at.filter(|_| self.is_shared()).map_or_else(Instant::now, |at| at + soonest))
    }

    fn pause_of(&self, request: &CommitRequest) -> Duration {
        let interval = self.config.commit_interval;
        match request.urgent {
            // Streams wait for it, on their way to a new pod, and it comes once for each log.
            _ if request.is_registration() => Duration::ZERO,
            true => interval / URGENT_PART,
            false => interval,
        }
    }

    /// Whether several pods ask.
    fn is_shared(&self) -> bool {
        let lately = self.config.commit_interval * ASKER_INTERVALS;
        self.askers.values().filter(|at| at.elapsed() < lately).count() > 1
    }

    fn publish(&self) {
        if self.views.borrow().version.number() != self.view.version.number() {
            self.views.send_replace(Arc::new(self.view.clone()));
        }
    }

    /// One version of all that waits.
    async fn round(&mut self) {
        let mut waiting = std::mem::take(&mut self.waiting);
        // Who asked may have given up, and commits by itself.
        waiting.retain(|(_, answer)| !answer.is_closed());
        let (requests, answers): (Vec<_>, Vec<_>) = waiting.into_iter().unzip();
        if requests.is_empty() {
            return;
        }
        let begun = Instant::now();
        self.round_at = Some(begun);
        let committed = self.commit(&requests).await;
        let committed = committed.and_then(|outcomes| pass(Point::AnswerBefore).map(|()| outcomes));
        self.publish();
        let next = (begun + self.config.commit_interval).saturating_duration_since(Instant::now());
        let next = Some(next).filter(|_| self.is_shared());
        match committed {
            Ok(outcomes) => {
                for (answer, outcome) in answers.into_iter().zip(outcomes) {
                    let _ = answer.send(Ok(Answer { outcome, view: self.view.clone(), next }));
                }
            }
            Err(error) => {
                for answer in answers {
                    let _ = answer.send(Err(error.clone()));
                }
            }
        }
    }

    async fn load(config: HomeConfig) -> Result<Self, HomeError> {
        let mut tries = 0;
        let (version, map) = loop {
            let version =
                config.delta.load(&config.directory).await.map_err(|error| failed(&config, error))?;
            match read_map(&config, &version).await {
                Ok(map) => break (version, map),
                Err(HomeError::Again(_)) if tries < LOADS_MAX => tries += 1,
                Err(error) => return Err(error),
            }
        };
        let (highest, checkpointed) = (map.number, version.number());
        let forgetting = Forgetting::new(&config);
        let view = View { version, map };
        Ok(Self {
            views: watch::Sender::new(Arc::new(view.clone())),
            config,
            view,
            highest,
            checkpointed,
            forgetting,
            waiting: Vec::new(),
            round_at: None,
            read_at: Instant::now(),
            askers: HashMap::new(),
        })
    }

    /// Which streams had ended was known to the pod's former life alone. Whatever is in the map now is taken for
    /// ended until it is opened: its gateway comes back within the time that ended streams are kept anyway, or never.
    fn take_over_ended(&self) {
        let ephemeral = self.view.map.streams().filter(|(stream, _)| stream.is_ephemeral());
        ephemeral.for_each(|(stream, mark)| self.forgetting.ended(stream, mark.next));
    }

    async fn commit(&mut self, requests: &[CommitRequest]) -> Result<Vec<Outcome>, HomeError> {
        // Where another pod was home until now, its askers know more than this one.
        let mut is_fresh = requests.iter().any(|request| request.version > self.view.version.number());
        if is_fresh {
            self.reload().await?;
        }
        let mut tries = 0;
        loop {
            let map = Arc::clone(&self.view.map);
            let mut working = Working::new(&map);
            let judged = requests.iter().map(|request| self.judge(request, &mut working));
            let outcomes: Vec<Outcome> = judged.collect();
            if !is_fresh && outcomes.iter().any(|outcome| *outcome != Outcome::Committed) {
                // Nobody is told by an old version that something does not stand.
                self.reload().await?;
                is_fresh = true;
                continue;
            }
            let changes = working.into_changes();
            let logs: BTreeSet<LogId> =
                requests.iter().map(|request| request.log).filter(|log| !map.logs.contains(log)).collect();
            if changes.is_empty() && logs.is_empty() {
                return Ok(outcomes);
            }
            let mut map = map.successor(0, Uuid::new_v4(), changes);
            map.logs.extend(logs);
            let forgotten = self.forgetting.forget(&mut map) + forget_for(requests, &mut map);
            let standing =
                requests.iter().zip(&outcomes).filter(|(_, outcome)| **outcome == Outcome::Committed);
            let adds = standing.flat_map(|(request, _)| request.adds.iter().cloned()).collect();
            if self.put(map, adds).await? {
                let (streams, requests) = (self.view.map.streams().len(), requests.len());
                tracing::debug!(table = %self.config.name, streams, forgotten, requests, "committed");
                return Ok(outcomes);
            }
            is_fresh = true;
            tries += 1;
            if tries == COMMIT_TRIES_MAX {
                let name = &self.config.name;
                return Err(HomeError::Again(format!(
                    "table {name}: {tries} tries to commit came to nothing"
                )));
            }
            self.pause(tries).await;
        }
    }

    /// Takes a request's runs into the working copy, all or none.
    fn judge(&self, request: &CommitRequest, working: &mut Working<'_>) -> Outcome {
        let shape = &self.view.version.shape;
        if request.is_registration() {
            return Outcome::Committed;
        }
        if request.table != shape.id || request.shape != shape.fingerprint {
            return Outcome::Reshaped;
        }
        if request.is_old() {
            return Outcome::Rewrite;
        }
        if working.take_all(&request.runs) { Outcome::Committed } else { Outcome::Changed }
    }

    /// Puts a version. False after a conflict or a lost answer; the table has been read anew then.
    async fn put(&mut self, map: WatermarkMap, adds: Vec<RecordBatch>) -> Result<bool, HomeError> {
        let map = self.claim(map).await?;
        pass(Point::MapStored)?;
        let number = i64::try_from(map.number).expect("a number for each commit");
        let mut transaction = vec![(TRANSACTION.to_owned(), number)];
        pass(Point::CommitBefore)?;
        if fault::has(Bug::WatermarkApart) && !adds.is_empty() {
            let alone = std::mem::take(&mut transaction);
            if let Put::Committed(version) =
                self.config.delta.commit(&self.view.version, Vec::new(), alone).await
            {
                self.view.version = *version;
            }
        }
        match self.config.delta.commit(&self.view.version, adds, transaction).await {
            Put::Committed(version) => {
                pass(Point::CommitAfter)?;
                self.view = View { version: *version, map: Arc::new(map) };
                self.read_at = Instant::now();
                return Ok(true);
            }
            Put::Conflict => {
                tracing::debug!(table = %self.config.name, version = self.view.version.number(), "commit conflict");
            }
            Put::Unknown(error) => {
                let table = &self.config.name;
                tracing::warn!(%table, %error, "commit without an answer: reading the table anew");
                if fault::has(Bug::BlindRetry) {
                    let newest = self.config.delta.refresh(&self.view.version).await;
                    self.view.version = newest.map_err(|error| failed(&self.config, error))?;
                    return Err(HomeError::Again("a commit without an answer".to_owned()));
                }
            }
        }
        self.reload().await?;
        Ok(false)
    }

    /// Writes the map under the next number that nobody has taken.
    async fn claim(&mut self, mut map: WatermarkMap) -> Result<WatermarkMap, HomeError> {
        loop {
            map.number = self.highest.max(self.view.map.number) + 1;
            self.highest = map.number;
            let bytes = map.encode().map_err(|error| again("encode the watermark map", &error))?;
            let path = map_path(&self.config.directory, &map.table.0, map.number);
            match self.config.store.put_opts(&path, bytes.into(), PutMode::Create.into()).await {
                Ok(_) => return Ok(map),
                // The store may have tried twice by itself, and met its own first try.
                Err(object_store::Error::AlreadyExists { .. }) => {
                    if self.nonce_at(&path).await? == Some(map.nonce) {
                        return Ok(map);
                    }
                }
                Err(error) => return Err(again("write the watermark map", &error)),
            }
        }
    }

    async fn nonce_at(&self, path: &Path) -> Result<Option<Uuid>, HomeError> {
        let read = async { self.config.store.get(path).await?.bytes().await };
        let bytes = read.await.map_err(|error| again("read a watermark map", &error))?;
        Ok(WatermarkMap::decode(&bytes).ok().map(|map| map.nonce))
    }

    async fn reload(&mut self) -> Result<(), HomeError> {
        let begun = Instant::now();
        let refreshed = self.config.delta.refresh(&self.view.version).await;
        let version = refreshed.map_err(|error| failed(&self.config, error))?;
        let name = &self.config.name;
        if version.shape.id != self.view.version.shape.id {
            let (old, new) = (&self.view.version.shape.id.0, &version.shape.id.0);
            let what = format!("table {name} was made anew: {old} is gone, {new} is there; open it again");
            return Err(HomeError::Stopped(Error::not_found("table_replaced", what)));
        }
        if version.map == Some(self.view.map.number) || (version.map.is_none() && self.view.map.number == 0) {
            self.view.version = version;
        } else {
            let map = read_map(&self.config, &version).await?;
            self.view = View { version, map };
        }
        self.read_at = begun;
        Ok(())
    }

    async fn pause(&self, tries: u32) {
        let most = Duration::from_millis(1 << tries.min(6)).min(CONFLICT_PAUSE_MAX);
        tokio::time::sleep(most.mul_f64(rand::random::<f64>())).await;
    }

    async fn checkpoint_if_due(&mut self) {
        let (number, interval) = (self.view.version.number(), self.config.checkpoint_interval.max(1));
        if number / interval == self.checkpointed / interval {
            return;
        }
        self.checkpointed = number;
        match self.config.delta.checkpoint(&self.view.version).await {
            Ok(version) => self.view.version = version,
            Err(error) => {
                tracing::warn!(table = %self.config.name, version = number, %error, "no checkpoint this time");
            }
        }
    }
}

/// Takes the streams that askers are done with out of a map that is about to be put: that one log is past a stream says
/// nothing of others. Answers how many.
fn forget_for(requests: &[CommitRequest], map: &mut WatermarkMap) -> usize {
    let is_sole = |request: &&CommitRequest| map.logs.iter().eq([&request.log]);
    let ended: Vec<&StreamId> = requests.iter().filter(is_sole).flat_map(|request| &request.ended).collect();
    ended.iter().for_each(|stream| map.forget(stream));
    ended.len()
}

async fn due_at(due: Option<Instant>) {
    match due {
        Some(due) => tokio::time::sleep_until(due).await,
        None => std::future::pending().await,
    }
}

fn pass(point: Point) -> Result<(), HomeError> {
    fault::hit(point).map_err(|error| HomeError::Again(format!("{}: {error}", point.name())))
}

fn again(attempted: &str, error: &dyn std::error::Error) -> HomeError {
    HomeError::Again(format!("cannot {attempted}: {error}"))
}

fn failed(config: &HomeConfig, error: DeltaError) -> HomeError {
    let name = &config.name;
    match error {
        DeltaError::NotFound(_) => {
            let how = format!("create it with PUT /v1/tables/{name}, or open the first stream with a schema");
            let what = format!("there is no table {name}: {how}");
            HomeError::Stopped(Error::not_found("table_not_found", what))
        }
        // What another writer has done to a table does not pass by itself: it must not hold up all others.
        DeltaError::Unsupported(what) => {
            HomeError::Stopped(Error::invalid("table_unsupported", format!("table {name} {what}")))
        }
        other => HomeError::Again(format!("table {name}: {other}")),
    }
}

fn maps_path(directory: &Path, table_id: &str) -> Path {
    directory.clone().join("_sluice").join("watermarks").join(table_id)
}

/// Where a map is in the store, of a table in `directory`.
pub(super) fn map_path(directory: &Path, table_id: &str, number: u64) -> Path {
    maps_path(directory, table_id).join(format!("{number:020}.arrow"))
}

fn lost(config: &HomeConfig, what: &str) -> HomeError {
    let name = &config.name;
    let how = "nothing is written to it, since rows could be doubled; restore the object, or the table";
    HomeError::Stopped(Error::internal(format!("table {name}: {what}: {how}")))
}

/// The map of a version. A missing one is never taken for an empty one.
async fn read_map(config: &HomeConfig, version: &Version) -> Result<Arc<WatermarkMap>, HomeError> {
    let id = &version.shape.id;
    let Some(number) = version.map else {
        ensure_never_mapped(config, version).await?;
        return Ok(Arc::new(WatermarkMap::empty(id.clone())));
    };
    let path = map_path(&config.directory, &id.0, number);
    let map = match read(config, &path).await? {
        Some(map) => map.map_err(|error| lost(config, &format!("{path}: {error}")))?,
        None => {
            return Err(lost(
                config,
                &format!("version {} names {path}, which is missing", version.number()),
            ));
        }
    };
    if map.table != *id || map.number != number {
        let (table, found) = (&map.table.0, map.number);
        return Err(lost(config, &format!("{path} is map {found} of table id {table}")));
    }
    Ok(Arc::new(map))
}

/// A first attempt that was never committed leaves a map behind: it follows none, and holds no stream.
async fn ensure_never_mapped(config: &HomeConfig, version: &Version) -> Result<(), HomeError> {
    let directory = maps_path(&config.directory, &version.shape.id.0);
    let mut listed = config.store.list(Some(&directory));
    while let Some(meta) = listed.next().await {
        let meta = meta.map_err(|error| again("list the watermark maps", &error))?;
        let path = meta.location;
        let orphan = match read(config, &path).await? {
            Some(Ok(map)) => map.predecessor == 0 && map.streams().len() == 0,
            Some(Err(_)) => false,
            None => true,
        };
        if !orphan {
            let newer = config.delta.refresh(version).await.map_err(|error| failed(config, error))?;
            if newer.map.is_some() {
                return Err(HomeError::Again("another pod has just registered with the table".to_owned()));
            }
            let number = version.number();
            return Err(lost(
                config,
                &format!("version {number} has lost its transaction, but {path} is there"),
            ));
        }
    }
    Ok(())
}

async fn read(config: &HomeConfig, path: &Path) -> Result<Option<Result<WatermarkMap, MapError>>, HomeError> {
    let read = async { config.store.get(path).await?.bytes().await };
    match read.await {
        Ok(bytes) => Ok(Some(WatermarkMap::decode(&bytes))),
        Err(object_store::Error::NotFound { .. }) => Ok(None),
        Err(error) => Err(again("read a watermark map", &error)),
    }
}

#[cfg(test)]
mod tests {
    use arrow::array::Int64Array;

    use super::*;

    #[test]
    fn files_that_a_sweep_may_take_are_to_be_written_anew() {
        let request = |ages_s: &[i64]| CommitRequest {
            pod: "pod-1".parse().expect("valid"),
            table: TableId("t".into()),
            version: 0,
            shape: 0,
            log: LogId(Uuid::nil()),
            urgent: false,
            runs: Vec::new(),
            adds: ages_s.iter().map(|age_s| add_of(*age_s)).collect(),
            ended: Vec::new(),
        };
        let day = 24 * 60 * 60;
        assert!(!request(&[]).is_old() && !request(&[0, day - 60, -day]).is_old());
        assert!(request(&[0, day + 60]).is_old());
        assert!(request(&[]).is_registration() && !request(&[0]).is_registration());
    }

    fn add_of(age_s: i64) -> RecordBatch {
        let modified = Int64Array::from(vec![now_us() / 1000 - age_s * 1000]);
        RecordBatch::try_from_iter([("modificationTime", Arc::new(modified) as _)]).expect("valid")
    }
}
