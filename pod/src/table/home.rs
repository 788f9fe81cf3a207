//! A table's home: the only place in this pod that commits to the table.
//!
//! A commit is a watermark map, put if absent under a new number, and then a Delta commit that names it. Whoever
//! else commits meanwhile, another pod's home or a foreign writer, makes ours a conflict: the table is read
//! anew and the runs are judged again. That is also how a commit is recognised whose answer was lost.
//!
//! *Owns*: the newest known version and its map, the numbers of maps, conflicts, checkpoints, forgetting ended
//! streams in a commit.
//! *Does not own*: files (the table's task writes them), what is at hand (the task), the rules (`watermark`, `ended`).
//! Keeps P2 and P4. Maps are never deleted: each version that can still be read needs its own, and versions are not
//! cleaned up yet.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::StreamExt;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt, PutMode};
use sluice_shared::error::Error;
use sluice_shared::ids::{StreamId, TableName};
use sluice_shared::lifecycle::TaskScope;
use tokio::sync::{mpsc, oneshot, watch};
use uuid::Uuid;

use super::Clock;
use super::delta::{DataFile, Delta, DeltaError, Put, Shape, TRANSACTION, Version};
use super::ended::{EndedStreams, Ending};
use super::watermark::{MapError, RunKey, Verdict, WatermarkMap, judge_all};
use crate::wal::Wal;

/// Requests that wait for the home at most.
const MAILBOX: usize = 16;
/// How often a load is tried again that met another pod's first commit.
const LOADS_MAX: u32 = 5;
/// Tries at one commit before its table's task pauses, and looks whether it has to end.
const COMMIT_TRIES_MAX: u32 = 10;
/// Longest pause after a conflict grows to this.
const CONFLICT_PAUSE_MAX: Duration = Duration::from_millis(50);

/// A version of the table and its map: what `committed` means.
#[derive(Debug, Clone)]
pub struct View {
    /// The version.
    pub version: Version,
    /// How far each stream is in it.
    pub map: Arc<WatermarkMap>,
}

/// Files and the runs in them, with the verdicts that they were written by.
#[derive(Debug, Clone)]
pub struct CommitRequest {
    /// The shape that the files were made for.
    pub shape: Arc<Shape>,
    /// All rows that the verdicts commit, and no others.
    pub files: Vec<DataFile>,
    /// The runs at hand, less those that are held.
    pub runs: Vec<(RunKey, Verdict)>,
}

/// How a commit ended, where nothing failed.
#[derive(Debug)]
pub enum CommitOutcome {
    /// The rows can be read in this version.
    Committed(View),
    /// The table has changed so that a verdict or the files no longer stand: judge anew by this version.
    Changed(View),
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

enum HomeMessage {
    /// Commit files and runs.
    Commit(CommitRequest, oneshot::Sender<Result<CommitOutcome, HomeError>>),
    /// Read the table anew.
    Reload(oneshot::Sender<Result<View, HomeError>>),
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

    /// Takes the streams that are due out of a map that is about to be put. Answers how many.
    fn forget(&self, map: &mut WatermarkMap) -> usize {
        let due = self.lock().due(map, self.wal.trimmed(), self.clock.now());
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
}

impl HomeHandle {
    /// Loads a table, registers the pod's log with it, and starts its home.
    ///
    /// # Errors
    /// `Stopped` with NotFound where there is no table, or with what makes it unusable.
    pub async fn start(config: HomeConfig, scope: &TaskScope) -> Result<Self, HomeError> {
        let mut home = HomeTask::load(config).await?;
        home.register().await?;
        home.take_over_ended();
        let forgetting = home.forgetting.clone();
        let (messages, inbox) = mpsc::channel(MAILBOX);
        let (views, view) = watch::channel(Arc::new(home.view.clone()));
        let stop = scope.clone();
        scope.spawn("table home", async move { home.run(inbox, views, stop).await });
        Ok(Self { messages, view, forgetting })
    }

    /// An ephemeral stream has ended: all of it before `end` is in the pod's log, and nothing else of it will be.
    /// A later commit forgets it.
    pub fn ended(&self, stream: &StreamId, end: u64) {
        self.forgetting.ended(stream, end);
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
    pub async fn commit(&self, request: CommitRequest) -> Result<CommitOutcome, HomeError> {
        let (answer, answered) = oneshot::channel();
        self.ask(HomeMessage::Commit(request, answer), answered).await
    }

    /// Reads the table anew.
    ///
    /// # Errors
    /// `HomeError`.
    pub async fn reload(&self) -> Result<View, HomeError> {
        let (answer, answered) = oneshot::channel();
        self.ask(HomeMessage::Reload(answer), answered).await
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
    /// Highest number that a map is known to have, committed or not.
    highest: u64,
    /// Version of the last checkpoint that was due.
    checkpointed: u64,
    forgetting: Forgetting,
}

impl HomeTask {
    async fn run(
        mut self,
        mut inbox: mpsc::Receiver<HomeMessage>,
        views: watch::Sender<Arc<View>>,
        stop: TaskScope,
    ) {
        loop {
            let message = tokio::select! {
                biased; // stopping wins over more work
                () = stop.cancelled() => return,
                message = inbox.recv() => message,
            };
            // An answer that nobody waits for any more is no failure.
            match message {
                None => return,
                Some(HomeMessage::Commit(request, answer)) => {
                    let outcome = self.commit(&request).await;
                    views.send_replace(Arc::new(self.view.clone()));
                    let _ = answer.send(outcome);
                }
                Some(HomeMessage::Reload(answer)) => {
                    let outcome = self.reload().await;
                    views.send_replace(Arc::new(self.view.clone()));
                    let _ = answer.send(outcome.map(|()| self.view.clone()));
                }
            }
            self.checkpoint_if_due().await;
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
        Ok(Self { config, view: View { version, map }, highest, checkpointed, forgetting })
    }

    /// Which streams had ended was known to the pod's former life alone. Whatever is in the map now is taken for
    /// ended until it is opened: its gateway comes back within the time that ended streams are kept anyway, or never.
    fn take_over_ended(&self) {
        let ephemeral = self.view.map.streams().filter(|(stream, _)| stream.is_ephemeral());
        ephemeral.for_each(|(stream, mark)| self.forgetting.ended(stream, mark.next));
    }

    /// A log registers before its first durable run, so that streams are not forgotten while it may hold their
    /// runs. It is also the table's first map, which holds no stream: losing it loses nothing.
    async fn register(&mut self) -> Result<(), HomeError> {
        let mut tries = 0;
        let log = self.config.wal.log_id();
        while !self.view.map.logs.contains(&log) {
            let mut map = self.view.map.successor(0, Uuid::new_v4(), std::collections::HashMap::new());
            map.logs.insert(log);
            self.put(map, &[]).await?;
            tries += 1;
            self.pause(tries).await;
        }
        Ok(())
    }

    async fn commit(&mut self, request: &CommitRequest) -> Result<CommitOutcome, HomeError> {
        let runs: Vec<RunKey> = request.runs.iter().map(|(run, _)| run.clone()).collect();
        let mut tries = 0;
        loop {
            let (verdicts, changes) = judge_all(&self.view.map, &runs);
            let stands = request.runs.iter().zip(&verdicts).all(|((_, planned), verdict)| planned == verdict);
            if !stands || !request.shape.is_same(&self.view.version.shape) {
                return Ok(CommitOutcome::Changed(self.view.clone()));
            }
            if changes.is_empty() {
                return Ok(CommitOutcome::Committed(self.view.clone()));
            }
            let mut map = self.view.map.successor(0, Uuid::new_v4(), changes);
            let forgotten = self.forgetting.forget(&mut map);
            if self.put(map, &request.files).await? {
                let streams = self.view.map.streams().len();
                tracing::debug!(table = %self.config.name, streams, forgotten, "committed");
                return Ok(CommitOutcome::Committed(self.view.clone()));
            }
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

    /// Puts a version. False after a conflict or a lost answer; the table has been read anew then.
    async fn put(&mut self, map: WatermarkMap, files: &[DataFile]) -> Result<bool, HomeError> {
        let map = self.claim(map).await?;
        let number = i64::try_from(map.number).expect("a number for each commit");
        let transaction = vec![(TRANSACTION.to_owned(), number)];
        match self.config.delta.commit(&self.view.version, files, transaction).await {
            Put::Committed(version) => {
                self.view = View { version: *version, map: Arc::new(map) };
                return Ok(true);
            }
            Put::Conflict => {
                tracing::debug!(table = %self.config.name, version = self.view.version.number(), "commit conflict");
            }
            Put::Unknown(error) => {
                let table = &self.config.name;
                tracing::warn!(%table, %error, "commit without an answer: reading the table anew");
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
            let path = map_path(&self.config, &map.table.0, map.number);
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
            return Ok(());
        }
        let map = read_map(&self.config, &version).await?;
        self.view = View { version, map };
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

fn maps_path(config: &HomeConfig, table_id: &str) -> Path {
    config.directory.clone().join("_sluice").join("watermarks").join(table_id)
}

fn map_path(config: &HomeConfig, table_id: &str, number: u64) -> Path {
    maps_path(config, table_id).join(format!("{number:020}.arrow"))
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
    let path = map_path(config, &id.0, number);
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
    let directory = maps_path(config, &version.shape.id.0);
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
