//! A table's task: gathers durable batches, writes what is eligible, has it committed, tells and releases.
//!
//! *Owns*: what waits for the table (in memory within the pod's budget, else in the log alone), held runs, the
//! order of a flush: judge, set aside, write, commit, tell, release.
//! *Does not own*: what is judged and comes of it (`round`), the rule and the commit (`home`), files (`parquet`), which
//! tables there are (`table`).
//! Keeps P7 here: memory beyond the budget is given up, never data.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use object_store::ObjectStoreExt;
use object_store::path::Path;
use sluice_shared::error::Error;
use sluice_shared::ids::{StreamId, TableName};
use sluice_shared::lifecycle::{TaskScope, now_us};
use tokio::sync::{Notify, oneshot};
use tokio::time::Instant;

use super::TablesConfig;
use super::batch::{Batch, BatchError};
use super::delta::{DataFile, DeltaError, Shape};
use super::home::{CommitOutcome, CommitRequest, HomeConfig, HomeError, HomeHandle, View};
use super::parquet::{EncodeError, Encoded, encode};
use super::rejected::{self, RejectError, Rejects};
use super::round::{Entry, Progress, Round, Written, groups, sources};
use crate::stream::progress::StreamProgress;
use crate::wal::{Durable, Wal, WalError};

/// With held runs the table is read anew at least so often (DESIGN section 11 rule 10).
const HELD_RELOAD: Duration = Duration::from_secs(1);
/// Pauses after failures grow from this to `PAUSE_MAX`.
const PAUSE_MIN: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// Files that one flush encodes at the same time at most.
const FILES_AT_ONCE_MAX: usize = 8;

/// Memory that waiting batches of all tables of a pod may hold.
#[derive(Debug)]
pub struct Budget {
    used: AtomicU64,
    most: u64,
}

/// A batch's part of the budget, until it is dropped.
#[derive(Debug)]
#[must_use]
pub(super) struct Permit {
    budget: Arc<Budget>,
    bytes: u64,
}

impl Budget {
    /// A budget of so many bytes.
    pub fn new(most: u64) -> Self {
        Self { used: AtomicU64::new(0), most }
    }

    /// Bytes in use.
    pub fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    fn take(self: &Arc<Self>, bytes: u64) -> Option<Permit> {
        let fits = |used: u64| used.checked_add(bytes).filter(|sum| *sum <= self.most);
        let taken = self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits);
        taken.ok().map(|_| Permit { budget: Arc::clone(self), bytes })
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.budget.used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// What waits, and who waits for that.
#[derive(Default)]
struct Waiting {
    entries: VecDeque<Entry>,
    bytes: u64,
    since: Option<Instant>,
    /// What waits is to be flushed now.
    hurried: bool,
    drains: Vec<oneshot::Sender<()>>,
    /// The task is gone: nothing is taken any more.
    ended: bool,
}

/// Counts for people.
#[derive(Debug, Default)]
pub struct Counts {
    /// Runs that wait for their predecessors.
    pub held_runs: AtomicU64,
    /// Records set aside in `<table>__rejected`, those that were refused included.
    pub set_aside: AtomicU64,
    /// Log entries that a stopped table keeps.
    pub stranded: AtomicU64,
    /// Batches that were read back from the log.
    pub read_back: AtomicU64,
    /// When the oldest batch in work was sealed; 0 where there is none.
    oldest_us: AtomicU64,
}

/// An open table, as its task and its handles share it.
pub struct OpenTable {
    pub(super) name: TableName,
    pub(super) home: HomeHandle,
    pub(super) home_config: HomeConfig,
    pub(super) counts: Counts,
    config: TablesConfig,
    wal: Wal,
    budget: Arc<Budget>,
    waiting: Mutex<Waiting>,
    wake: Notify,
    followers: Mutex<HashMap<StreamId, Arc<StreamProgress>>>,
    stopped: OnceLock<Error>,
    /// Why the flush in work did not come through so far.
    failing: Mutex<Option<String>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl OpenTable {
    /// Opens a table and starts its task.
    ///
    /// # Errors
    /// As `HomeHandle::start`.
    pub(super) async fn start(
        home_config: HomeConfig,
        config: TablesConfig,
        wal: Wal,
        budget: Arc<Budget>,
        scope: &TaskScope,
    ) -> Result<Arc<Self>, HomeError> {
        let home = HomeHandle::start(home_config.clone(), scope).await?;
        let table = Arc::new(Self {
            name: home_config.name.clone(),
            home,
            home_config,
            counts: Counts::default(),
            config,
            wal,
            budget,
            waiting: Mutex::default(),
            wake: Notify::new(),
            followers: Mutex::default(),
            stopped: OnceLock::new(),
            failing: Mutex::default(),
        });
        let task = TableTask {
            table: Arc::clone(&table),
            held: Vec::new(),
            reloaded: Instant::now(),
            scope: scope.clone(),
        };
        scope.spawn("table", task.run());
        Ok(table)
    }

    /// Why nothing is written to the table any more.
    pub(super) fn stopped(&self) -> Option<&Error> {
        self.stopped.get()
    }

    /// The last error while flushes fail.
    pub(super) fn failing(&self) -> Option<String> {
        lock(&self.failing).clone()
    }

    /// Takes a durable batch: never blocks, for it is called on the log's threads.
    pub(super) fn offer(&self, durable: Durable, batch: Arc<Batch>) {
        let bytes = batch.memory_bytes() as u64;
        let sealed_us = batch.ingested_at_us;
        let rows = self.budget.take(bytes).map(|permit| (batch, Some(permit)));
        let mut waiting = lock(&self.waiting);
        if waiting.ended {
            // Dropped, not released: the log keeps it.
            self.counts.stranded.fetch_add(1, Ordering::Relaxed);
            return;
        }
        waiting.entries.push_back(Entry { durable, rows, bytes, sealed_us, open: None });
        waiting.bytes += bytes;
        let is_first = waiting.since.is_none();
        waiting.since.get_or_insert_with(Instant::now);
        let is_due = waiting.bytes >= self.config.target_file_bytes;
        drop(waiting);
        if is_first || is_due {
            self.wake.notify_one();
        }
    }

    /// The streams of a batch from the old life's log are taken for ended until they are opened again.
    pub(super) fn replaying(&self, batch: &Batch) {
        for run in batch.runs.iter().filter(|run| run.stream.is_ephemeral()) {
            self.home.ended(&run.stream, run.offsets.end);
        }
    }

    pub(super) fn follow(&self, stream: &StreamId, progress: Arc<StreamProgress>) {
        lock(&self.followers).insert(stream.clone(), Arc::clone(&progress));
        self.home.opened(stream);
        let view = self.home.view();
        progress.committed(view.map.next(stream), view.version.number());
        if let Some(error) = self.stopped() {
            progress.fail(error.clone());
        }
    }

    pub(super) fn unfollow(&self, stream: &StreamId, ended: Option<u64>) {
        lock(&self.followers).remove(stream);
        if let Some(end) = ended {
            self.home.ended(stream, end);
        }
    }

    fn tell(&self, view: &View) {
        for (stream, progress) in lock(&self.followers).iter() {
            progress.committed(view.map.next(stream), view.version.number());
        }
    }

    /// What waits is flushed now, not when its time has come.
    pub(super) fn hurry(&self) {
        lock(&self.waiting).hurried = true;
        self.wake.notify_one();
    }

    /// Resolves when all that was offered is settled, held runs excepted.
    pub(super) async fn drain(&self) {
        let (drained, done) = oneshot::channel();
        {
            let mut waiting = lock(&self.waiting);
            if waiting.ended {
                return;
            }
            waiting.drains.push(drained);
        }
        self.wake.notify_one();
        // The task answers, or has ended.
        let _ = done.await;
    }

    /// Age of the oldest batch that is not committed.
    pub(super) fn lag(&self) -> Duration {
        let in_work = self.counts.oldest_us.load(Ordering::Relaxed);
        let waiting = lock(&self.waiting).entries.front().map(|entry| entry.sealed_us);
        let in_work = i64::try_from(in_work).ok().filter(|us| *us > 0);
        let oldest = in_work.into_iter().chain(waiting).min();
        let age_us = oldest.map_or(0, |us| now_us().saturating_sub(us));
        Duration::from_micros(u64::try_from(age_us).unwrap_or(0))
    }
}

/// What to do next.
enum Next {
    Flush,
    /// Look again whether held runs have become eligible.
    Reload,
    Stop,
}

/// Why a flush did not come through.
#[derive(Debug, thiserror::Error)]
enum FlushError {
    #[error(transparent)]
    Home(#[from] HomeError),
    #[error("read back from the log: {0}")]
    Log(#[from] WalError),
    #[error("read back from the log: {0}")]
    Batch(#[from] BatchError),
    #[error("encode a file: {0}")]
    Encode(#[from] EncodeError),
    #[error("write a file: {0}")]
    Store(#[from] object_store::Error),
    #[error("write a file: {0}")]
    Delta(#[from] DeltaError),
    #[error("set records aside: {0}")]
    Reject(#[from] RejectError),
    #[error("a task of the flush ended early: {0}")]
    Task(#[from] tokio::task::JoinError),
}

struct TableTask {
    table: Arc<OpenTable>,
    /// Entries with runs that wait for their predecessors, without their rows.
    held: Vec<Entry>,
    /// When the table was last read anew for them.
    reloaded: Instant,
    scope: TaskScope,
}

impl TableTask {
    async fn run(mut self) {
        while self.table.stopped().is_none() {
            match self.next().await {
                Next::Stop => break,
                Next::Flush => {
                    // A steady flow of runs that are all held must not keep the table from being read anew.
                    if self.held_reload().is_some_and(|at| at <= Instant::now()) {
                        self.reload().await;
                    }
                    let entries = self.take();
                    self.settle(entries).await;
                }
                Next::Reload => self.reload().await,
            }
            self.answer_drains().await;
        }
        let mut waiting = lock(&self.table.waiting);
        waiting.ended = true;
        // Whoever drains is answered by that.
        waiting.drains.clear();
    }

    /// When held runs want the table to be read anew.
    fn held_reload(&self) -> Option<Instant> {
        (!self.held.is_empty()).then_some(self.reloaded + HELD_RELOAD)
    }

    async fn reload(&mut self) {
        self.reloaded = Instant::now();
        match self.table.home.reload().await {
            Ok(view) => self.table.tell(&view),
            Err(HomeError::Stopped(error)) => self.stop(&error),
            Err(HomeError::Again(error)) => {
                tracing::warn!(table = %self.table.name, %error, "cannot read the table anew: trying again");
            }
        }
        self.settle(Vec::new()).await;
    }

    async fn next(&self) -> Next {
        let table = &self.table;
        loop {
            let (is_due, since, drains) = {
                let waiting = lock(&table.waiting);
                let is_full = waiting.hurried || waiting.bytes >= table.config.target_file_bytes;
                (is_full, waiting.since, !waiting.drains.is_empty())
            };
            let is_hasty = drains || self.scope.is_draining();
            if since.is_some() && (is_due || is_hasty) || drains {
                return Next::Flush;
            }
            let flush_at = since.map(|since| since + table.config.flush_interval);
            tokio::select! {
                biased; // stopping wins; a flush brings held runs with it
                () = self.scope.cancelled() => return Next::Stop,
                () = table.wake.notified() => {}
                () = self.scope.draining(), if !self.scope.is_draining() => {}
                () = at(flush_at) => return Next::Flush,
                () = at(self.held_reload()) => return Next::Reload,
            }
        }
    }

    /// Takes what is at hand for one flush.
    fn take(&self) -> Vec<Entry> {
        let most = self.table.config.target_file_bytes.saturating_mul(files_at_once() as u64);
        let mut waiting = lock(&self.table.waiting);
        waiting.hurried = false;
        let (mut taken, mut bytes) = (Vec::new(), 0);
        while let Some(entry) =
            waiting.entries.pop_front_if(|entry| bytes == 0 || bytes + entry.bytes <= most)
        {
            bytes += entry.bytes;
            taken.push(entry);
        }
        waiting.bytes -= bytes;
        waiting.since = waiting.entries.front().map(|_| Instant::now());
        if let Some(oldest) = taken.iter().chain(&self.held).map(|entry| entry.sealed_us).min() {
            let oldest = u64::try_from(oldest).unwrap_or(0);
            self.table.counts.oldest_us.store(oldest, Ordering::Relaxed);
        }
        taken
    }

    /// Flushes until it comes through, the table is stopped, or the pod stops.
    async fn settle(&mut self, entries: Vec<Entry>) {
        let mut at_hand = std::mem::take(&mut self.held);
        at_hand.extend(entries);
        let (mut pause, mut progress) = (PAUSE_MIN, Progress::default());
        while !at_hand.is_empty() && self.table.stopped().is_none() {
            let flushed = self.flush(&mut at_hand, &mut progress).await;
            *lock(&self.table.failing) = flushed.as_ref().err().map(ToString::to_string);
            match flushed {
                Ok(()) => break,
                Err(FlushError::Home(HomeError::Stopped(error))) => self.stop(&error),
                Err(error) => {
                    tracing::warn!(table = %self.table.name, %error, "flush failed: trying again");
                    let cancelled = tokio::select! {
                        biased; // stopping wins over waiting
                        () = self.scope.cancelled() => true,
                        () = tokio::time::sleep(pause) => false,
                    };
                    if cancelled {
                        break;
                    }
                    pause = (pause * 2).min(PAUSE_MAX);
                }
            }
        }
        if self.table.stopped().is_some() {
            self.strand(&mut at_hand);
        }
        let oldest = at_hand.iter().map(|entry| entry.sealed_us).min().unwrap_or(0);
        self.table.counts.oldest_us.store(u64::try_from(oldest).unwrap_or(0), Ordering::Relaxed);
        let held: usize = at_hand.iter().filter_map(|entry| entry.open.as_ref()).map(Vec::len).sum();
        self.table.counts.held_runs.store(held as u64, Ordering::Relaxed);
        self.held = at_hand;
    }

    /// One round: everything at hand that is eligible goes into one version. Leaves held entries in `at_hand`.
    async fn flush(&self, at_hand: &mut Vec<Entry>, progress: &mut Progress) -> Result<(), FlushError> {
        self.load(at_hand, |entry| entry.open.is_none()).await?;
        for entry in at_hand.iter_mut().filter(|entry| entry.open.is_none()) {
            entry.open = entry.rows.as_ref().map(|(batch, _)| Entry::runs(batch));
        }
        let mut view = View::clone(&self.table.home.view());
        loop {
            let mut round = Round::judge(&view, at_hand);
            self.load_eligible(at_hand, &round).await?;
            let rejects = round.rejects(&view.version.shape, at_hand, &progress.aside);
            let (rejects, parts) = rejects.map_err(RejectError::from)?;
            self.set_aside(rejects, &round).await?;
            progress.aside.extend(parts);
            self.write(&view.version.shape, at_hand, &round, &mut progress.written).await?;
            let request = CommitRequest {
                shape: Arc::clone(&view.version.shape),
                files: progress.written.offer(),
                runs: round.judged(),
            };
            match self.table.home.commit(request).await? {
                CommitOutcome::Committed(view) => {
                    self.table.tell(&view);
                    round.settle(at_hand);
                    return Ok(());
                }
                CommitOutcome::Changed(newer) => {
                    self.table.tell(&newer);
                    view = newer;
                }
            }
        }
    }

    async fn load_eligible(&self, at_hand: &mut [Entry], round: &Round) -> Result<(), FlushError> {
        let mut wanted = vec![false; at_hand.len()];
        round.runs.iter().filter(|run| run.needs_rows()).for_each(|run| wanted[run.entry] = true);
        let mut wanted = wanted.into_iter();
        self.load(at_hand, |_| wanted.next().unwrap_or(false)).await
    }

    /// Reads rows back from the log. They may exceed the budget by one flush.
    async fn load(
        &self,
        at_hand: &mut [Entry],
        mut wanted: impl FnMut(&Entry) -> bool,
    ) -> Result<(), FlushError> {
        for entry in at_hand {
            if !wanted(entry) || entry.rows.is_some() {
                continue;
            }
            // One entry at a time, on this thread: the log's page is most likely still in memory.
            let bytes = tokio::task::block_in_place(|| self.table.wal.read(&entry.durable))?;
            let batch = Arc::new(Batch::decode(bytes)?);
            let permit = self.table.budget.take(batch.memory_bytes() as u64);
            entry.rows = Some((batch, permit));
            self.table.counts.read_back.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }

    async fn set_aside(&self, rejects: Rejects, round: &Round) -> Result<(), FlushError> {
        if rejects.is_empty() {
            return Ok(());
        }
        let table = &self.table;
        let count = rejects.len();
        let config = &table.home_config;
        let directory = config.directory.as_ref().to_owned() + rejected::SUFFIX;
        rejected::append(&config.delta, &config.store, &directory.into(), &rejects).await?;
        for run in round.runs.iter().filter(|run| !run.aside.is_empty()) {
            let (stream, session, aside) = (&run.key.stream, run.key.session.0, &run.aside);
            tracing::error!(
                table = %table.name, %stream, session, ?aside,
                "records set aside in the rejected table"
            );
        }
        table.counts.set_aside.fetch_add(count as u64, Ordering::Relaxed);
        Ok(())
    }

    /// Writes files for all eligible pieces that no file has yet; files with other pieces are given up.
    async fn write(
        &self,
        shape: &Arc<Shape>,
        at_hand: &[Entry],
        round: &Round,
        written: &mut Written,
    ) -> Result<(), FlushError> {
        let mut pieces = round.pieces();
        let (standing, unnamed) = written.keep(shape, &pieces, Instant::now());
        self.delete(unnamed).await;
        pieces.retain(|piece| !standing.contains(piece));
        let mut encoding = Vec::new();
        for group in groups(at_hand, pieces, self.table.config.target_file_bytes) {
            let sources = sources(at_hand, &group);
            let shape = Arc::clone(shape);
            encoding.push((group, tokio::task::spawn_blocking(move || encode(&shape, &sources))));
        }
        for (group, encoded) in encoding {
            let files = self.put(encoded.await??).await?;
            written.add(group, files, Instant::now());
        }
        Ok(())
    }

    /// Stores files: all, or none.
    async fn put(&self, encoded: Vec<Encoded>) -> Result<Vec<DataFile>, FlushError> {
        let (mut files, mut paths) = (Vec::new(), Vec::new());
        for mut file in encoded {
            let content = std::mem::take(&mut file.bytes);
            let bytes = content.len() as u64;
            // It can be there in spite of an error.
            paths.push(file.path.clone());
            let put = self.table.home_config.store.put(&file.path, content.into()).await;
            match put.map_err(FlushError::from).and_then(|_| Ok(file.into_file(bytes)?)) {
                Ok(file) => files.push(file),
                Err(error) => {
                    self.delete(paths).await;
                    return Err(error);
                }
            }
        }
        Ok(files)
    }

    /// Deletes files that no commit can have named. What cannot be deleted is left to the sweep.
    async fn delete(&self, unnamed: Vec<Path>) {
        for path in unnamed {
            let _ = self.table.home_config.store.delete(&path).await;
        }
    }

    fn stop(&self, error: &Error) {
        tracing::error!(table = %self.table.name, %error, "table stopped: its batches stay in the log");
        let _ = self.table.stopped.set(error.clone());
        for progress in lock(&self.table.followers).values() {
            progress.fail(error.clone());
        }
    }

    /// Keeps entries in the log, by dropping them without release.
    fn strand(&self, at_hand: &mut Vec<Entry>) {
        let waiting = std::mem::take(&mut lock(&self.table.waiting).entries);
        lock(&self.table.waiting).bytes = 0;
        lock(&self.table.waiting).since = None;
        for entry in at_hand.drain(..).chain(waiting) {
            let (table, wal_position) = (&self.table.name, entry.durable.position());
            let runs = entry.open.unwrap_or_default();
            let runs: Vec<_> =
                runs.iter().map(|(_, key)| format!("{} {}..{}", key.stream, key.start, key.end)).collect();
            tracing::error!(%table, %wal_position, ?runs, "batch not committed: it stays in the log");
            self.table.counts.stranded.fetch_add(1, Ordering::Relaxed);
        }
    }

    async fn answer_drains(&mut self) {
        let drains = {
            let mut waiting = lock(&self.table.waiting);
            if !waiting.entries.is_empty() || waiting.drains.is_empty() {
                return;
            }
            std::mem::take(&mut waiting.drains)
        };
        if !self.held.is_empty() {
            self.reload().await;
        }
        for (_, key) in self.held.iter().filter_map(|entry| entry.open.as_ref()).flatten() {
            let (table, stream) = (&self.table.name, &key.stream);
            let (first, end) = (key.start, key.end);
            tracing::warn!(%table, %stream, first, end, "run held at the drain: its predecessors are missing");
        }
        for drained in drains {
            // Whoever waited may have given up.
            let _ = drained.send(());
        }
    }
}

async fn at(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}

fn files_at_once() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get).min(FILES_AT_ONCE_MAX)
}
