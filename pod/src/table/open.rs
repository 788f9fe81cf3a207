//! An open table as its task and its handles share it: what waits, who follows, what is known.
//!
//! *Owns*: batches that wait for the table (in memory within the pod's budget, else in the log alone), the streams that
//! are told, what this pod knows of the table, why nothing is written any more.
//! *Does not own*: when and how that is flushed (`task`), the way to the home (`route`).
//! Keeps P7 here: memory beyond the budget is given up, never data.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use sluice_shared::error::Error;
use sluice_shared::ids::{StreamId, TableName};
use sluice_shared::lifecycle::{TaskScope, now_us};
use tokio::sync::{Notify, OnceCell, oneshot};
use tokio::time::Instant;

use super::TablesConfig;
use super::batch::Batch;
use super::held::{HeldRange, Holding};
use super::home::{CommitRequest, HomeConfig, HomeError, HomeHandle, View};
use super::round::Entry;
use super::route::{Known, Marks, News, Route};
use super::stranded::Stranded;
use super::task::TableTask;
use crate::stream::progress::StreamProgress;
use crate::wal::{Durable, Wal};

/// Memory for what is durable and not committed, of all tables of a pod: batches that wait, and files until they are stored.
/// Batches that have just come get half of it: a quarter is for those that a flush has to read back meanwhile, and a quarter
/// for its files.
#[derive(Debug)]
pub struct Budget {
    /// Batches that have not left memory since they came.
    kept: AtomicU64,
    /// What flushes need beside them.
    claimed: AtomicU64,
    most: u64,
}

/// A part of the budget, until it is dropped.
#[derive(Debug)]
#[must_use]
pub(super) struct Permit {
    budget: Arc<Budget>,
    bytes: u64,
    is_kept: bool,
}

/// Rows of one flush may be so many bytes however little memory there is.
const FLUSH_BYTES_MIN: u64 = 8 << 20;

impl Budget {
    /// A budget of so many bytes.
    pub fn new(most: u64) -> Self {
        Self { kept: AtomicU64::new(0), claimed: AtomicU64::new(0), most }
    }

    /// Bytes in use.
    pub fn used(&self) -> u64 {
        self.kept.load(Ordering::Relaxed) + self.claimed.load(Ordering::Relaxed)
    }

    /// Bytes of rows that one flush may read back.
    pub(super) fn flush_bytes_max(&self) -> u64 {
        (self.most / 4).max(FLUSH_BYTES_MIN)
    }

    /// For what can be left to the log.
    pub(super) fn take(self: &Arc<Self>, bytes: u64) -> Option<Permit> {
        let room = self.most.saturating_sub(self.claimed.load(Ordering::Relaxed)).min(self.most / 2);
        let fits = |kept: u64| kept.checked_add(bytes).filter(|sum| *sum <= room);
        let taken = self.kept.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits);
        taken.ok().map(|_| Permit { budget: Arc::clone(self), bytes, is_kept: true })
    }

    /// For what a flush cannot do without: there may be more than there should be, and so much less is taken until it is
    /// given back.
    pub(super) fn claim(self: &Arc<Self>, bytes: u64) -> Permit {
        self.claimed.fetch_add(bytes, Ordering::Relaxed);
        Permit { budget: Arc::clone(self), bytes, is_kept: false }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let part = if self.is_kept { &self.budget.kept } else { &self.budget.claimed };
        part.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// What waits, and who waits for that.
#[derive(Default)]
pub(super) struct Waiting {
    pub(super) entries: VecDeque<Entry>,
    pub(super) bytes: u64,
    pub(super) since: Option<Instant>,
    /// What waits is to be flushed now.
    pub(super) hurried: bool,
    /// Batches that were ever offered, and those of them that were taken for a flush.
    pub(super) offered: u64,
    pub(super) taken: u64,
    /// Who waits until as many as these have been taken, and settled.
    pub(super) drains: Vec<(u64, oneshot::Sender<()>)>,
    /// The task is gone: nothing is taken any more.
    pub(super) ended: bool,
}

/// Counts for people.
#[derive(Debug, Default)]
pub struct Counts {
    /// Runs that wait for their predecessors.
    pub held_runs: AtomicU64,
    /// Records set aside in `<table>__rejected`, those that were refused included.
    pub set_aside: AtomicU64,
    /// Batches that were read back from the log.
    pub read_back: AtomicU64,
    /// When the oldest batch in work was sealed; 0 where there is none.
    pub(super) oldest_us: AtomicU64,
}

/// An open table, as its task and its handles share it.
pub struct OpenTable {
    pub(super) name: TableName,
    pub(super) home: HomeHandle,
    pub(super) home_config: HomeConfig,
    pub(super) counts: Counts,
    pub(super) route: Route,
    known: Mutex<Known>,
    /// The pod's log is registered with the table.
    registered: OnceCell<()>,
    pub(super) config: TablesConfig,
    pub(super) wal: Wal,
    pub(super) budget: Arc<Budget>,
    pub(super) waiting: Mutex<Waiting>,
    pub(super) wake: Notify,
    pub(super) followers: Mutex<HashMap<StreamId, Arc<StreamProgress>>>,
    /// What the last flush left held.
    pub(super) held: Mutex<Arc<Vec<HeldRange>>>,
    /// Where entries go that are not written any more.
    pub(super) stranded: Arc<Stranded>,
    pub(super) stopped: OnceLock<Error>,
    /// Why the flush in work did not come through so far.
    pub(super) failing: Mutex<Option<String>>,
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
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
        shared: (Arc<Budget>, Arc<Stranded>),
        scope: &TaskScope,
    ) -> Result<Arc<Self>, HomeError> {
        let ((budget, stranded), wal) = (shared, home_config.wal.clone());
        let home = HomeHandle::start(home_config.clone(), scope).await?;
        let table = Arc::new(Self {
            name: home_config.name.clone(),
            route: Route { pool: config.pool.clone(), table: home_config.name.clone(), home: home.clone() },
            known: Mutex::new(Known::from(&*home.view())),
            registered: OnceCell::new(),
            home,
            home_config,
            counts: Counts::default(),
            config,
            wal,
            budget,
            waiting: Mutex::default(),
            wake: Notify::new(),
            followers: Mutex::default(),
            held: Mutex::default(),
            stranded,
            stopped: OnceLock::new(),
            failing: Mutex::default(),
        });
        scope.spawn("table", TableTask::new(&table, scope).run());
        Ok(table)
    }

    /// A log registers before its first durable run, so that streams are not forgotten while it may hold their runs.
    /// A pod that is no more than the table's home has none. It is also the table's first map, which holds no stream:
    /// losing it loses nothing.
    ///
    /// # Errors
    /// As `Route::commit`.
    pub(super) async fn register(&self) -> Result<(), HomeError> {
        let register = async || {
            let known = self.known();
            if known.map.logs.contains(&self.wal.log_id()) {
                return Ok(());
            }
            let routed = self.route.commit(self.request(&known)).await?;
            self.learn(&routed.news);
            Ok(())
        };
        self.registered.get_or_try_init(register).await.map(|_| ())
    }

    pub(super) fn request(&self, known: &Known) -> CommitRequest {
        CommitRequest {
            pod: self.config.pod.clone(),
            table: known.shape.id.clone(),
            version: known.version,
            shape: known.shape.fingerprint,
            log: self.wal.log_id(),
            urgent: false,
            runs: Vec::new(),
            adds: Vec::new(),
            // This pod's home knows them anyway.
            ended: if self.route.is_remote() { self.home.due(&known.map) } else { Vec::new() },
        }
    }

    /// What is known of the table.
    pub(super) fn known(&self) -> Known {
        lock(&self.known).clone()
    }

    /// Whether all of this is known: it is after a commit of this pod's own.
    pub(super) fn has_learned(&self, view: &View) -> bool {
        let known = lock(&self.known);
        known.version > view.version.number() || Arc::ptr_eq(&known.map, &view.map)
    }

    /// Takes news, and tells the streams that have come further. Answers whether they were no older than what was known.
    pub(super) fn learn(&self, news: &News) -> bool {
        // Held meanwhile: who begins to follow a stream has what was known before, or is told.
        let mut known = lock(&self.known);
        if !known.learn(news) {
            return false;
        }
        let followers = lock(&self.followers);
        match news {
            News::View(View { version, map }) => {
                for (stream, progress) in followers.iter() {
                    progress.committed(map.next(stream), version.number());
                }
            }
            News::Marks(Marks { version, marks, .. }) => {
                for (stream, mark) in marks {
                    if let (Some(progress), Some(mark)) = (followers.get(stream), mark) {
                        progress.committed(mark.next, *version);
                    }
                }
            }
        }
        true
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
        let rows = self.budget.take(bytes).map(|permit| (batch, permit));
        let mut waiting = lock(&self.waiting);
        if waiting.ended {
            drop(waiting);
            return self.strand(durable);
        }
        waiting.entries.push_back(Entry { durable, rows, bytes, sealed_us, open: None });
        waiting.bytes += bytes;
        waiting.offered += 1;
        let is_first = waiting.since.is_none();
        waiting.since.get_or_insert_with(Instant::now);
        let is_due = waiting.bytes >= self.config.target_file_bytes;
        drop(waiting);
        if is_first || is_due {
            self.wake.notify_one();
        }
    }

    /// Leaves an entry to the log: it is not released.
    pub(super) fn strand(&self, durable: Durable) {
        self.stranded.add(&self.name, self.known().shape.id.clone(), durable);
    }

    /// The streams of a batch from the old life's log are taken for ended until they are opened again.
    pub(super) fn replaying(&self, batch: &Batch) {
        for run in batch.runs.iter().filter(|run| run.stream.is_ephemeral()) {
            self.home.ended(&run.stream, run.offsets.end);
        }
    }

    pub(super) fn follow(&self, stream: &StreamId, progress: Arc<StreamProgress>) {
        let known = lock(&self.known);
        lock(&self.followers).insert(stream.clone(), Arc::clone(&progress));
        progress.committed(known.map.next(stream), known.version);
        drop(known);
        self.home.opened(stream);
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

    /// Nothing is written to the table any more.
    pub(super) fn stop(&self, error: &Error) {
        tracing::error!(table = %self.name, %error, "table stopped: its batches stay in the log");
        let _ = self.stopped.set(error.clone());
        for progress in lock(&self.followers).values() {
            progress.fail(error.clone());
        }
        self.wake.notify_one();
    }

    /// What waits is flushed now, not when its time has come.
    pub(super) fn hurry(&self) {
        lock(&self.waiting).hurried = true;
        self.wake.notify_one();
    }

    /// Resolves when all that was offered by now is settled, held runs excepted.
    pub(super) async fn drain(&self) {
        let (drained, done) = oneshot::channel();
        {
            let mut waiting = lock(&self.waiting);
            if waiting.ended {
                return;
            }
            let offered = waiting.offered;
            waiting.drains.push((offered, drained));
        }
        self.wake.notify_one();
        // The task answers, or has ended.
        let _ = done.await;
    }

    /// What this pod has of the table that is not in it.
    pub(super) fn holding(&self) -> Holding {
        let id = self.known().shape.id.clone();
        let (stranded, gone) = self.stranded.count(&self.name, Some(&id));
        Holding {
            table: self.name.clone(),
            id,
            held: Vec::clone(&*lock(&self.held)),
            stranded,
            gone,
            lag_ms: u64::try_from(self.lag().as_millis()).unwrap_or(u64::MAX),
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_of_the_budget_is_left_to_flushes() {
        let budget = Arc::new(Budget::new(100));
        let kept = budget.take(45).expect("there is room");
        assert!(budget.take(6).is_none(), "that half is not for what comes");
        let second = budget.take(5).expect("there is room");
        let read_back = budget.claim(60);
        assert_eq!(budget.used(), 110);
        drop(kept);
        assert!(budget.take(36).is_none(), "what is read back counts too");
        let third = budget.take(35).expect("there is room");
        assert_eq!(budget.used(), 100);
        drop((second, read_back));
        assert!(budget.take(16).is_none());
        drop((third, budget.take(15).expect("there is room")));
        assert_eq!(budget.used(), 0);
        assert!(budget.take(50).is_some() && budget.take(51).is_none());
    }
}
