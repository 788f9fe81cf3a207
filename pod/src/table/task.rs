//! A table's task: gathers durable batches, writes what is eligible, has it committed, tells and releases.
//!
//! *Owns*: held runs, when a table is flushed, the order of a flush: judge, set aside, write, commit, tell, release.
//! *Does not own*: what waits for the table (`open`), what is judged and comes of it (`round`), the rule and the commit
//! (`home`), the way there, which may lead to another pod (`route`), files (`parquet`).

use std::collections::BTreeSet;
use std::sync::atomic::Ordering;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use object_store::ObjectStoreExt;
use object_store::path::Path;
use sluice_shared::fault::{self, Bug, Point};
use sluice_shared::ids::StreamId;
use sluice_shared::lifecycle::TaskScope;
use tokio::sync::watch;
use tokio::time::Instant;

use super::batch::{Batch, BatchError};
use super::delta::{DataFile, DeltaError, Shape};
use super::held::{self, HeldRange};
use super::home::{CommitRequest, HomeError, Outcome, View};
use super::open::{OpenTable, lock};
use super::parquet::{EncodeError, Encoded, encode};
use super::rejected::{self, RejectError, Rejects};
use super::round::{Entry, Progress, Round, Written, groups, rows_bytes, sources};
use super::route::{Known, Marks, News, Routed};
use super::watermark::{RunKey, Verdict, WatermarkMap, judge};
use crate::stream::progress::StreamProgress;
use crate::threads::{Crew, cores};
use crate::wal::WalError;

/// With held runs the table is read anew at least so often (DESIGN section 11 rule 10).
const HELD_RELOAD: Duration = Duration::from_secs(1);
/// Runs that have been held for so long are told of, and as long as they are, so often.
const HELD_TOLD: Duration = Duration::from_secs(60);
/// Streams that one question to another home is about at most.
const ASKED_MAX: usize = 1000;
/// Answers in a row by which something has to be judged anew, after which a flush pauses: each time some other pod has
/// been faster, which cannot go on.
const JUDGED_ANEW_MAX: u32 = 20;
/// Files are ready for a round of the home before it begins: by this part of the interval, or twice what writing took.
const LEAD_PART: u32 = 10;
/// Files take at most this part of the interval off the time that rows wait: there would be ever more, and smaller ones.
const WRITING_PART: u32 = 2;
/// Pauses after failures grow from this to `PAUSE_MAX`.
const PAUSE_MIN: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// Files that one flush encodes at the same time at most.
const FILES_AT_ONCE_MAX: usize = 8;

/// Files that all tables encode at the same time at most: more would only take memory, and threads, from each other.
static ENCODERS: LazyLock<Crew> = LazyLock::new(|| Crew::of((2 * cores()).max(FILES_AT_ONCE_MAX)));

/// What to do next.
enum Next {
    Flush,
    /// Look again whether held runs have become eligible.
    Reload,
    /// Others have committed.
    Heard(News),
    /// The table's home may be another one.
    Moved,
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

pub(super) struct TableTask {
    table: Arc<OpenTable>,
    /// Entries with runs that wait for their predecessors, without their rows.
    held: Vec<Entry>,
    /// Since when there have been some, or when that was last told.
    held_since: Option<Instant>,
    /// When the table was last read anew for them.
    reloaded: Instant,
    /// When another home was last asked how far streams are.
    asked_at: Instant,
    /// What this pod's home commits for others.
    views: watch::Receiver<Arc<View>>,
    /// Told when the table's home may have moved.
    moves: watch::Receiver<u64>,
    /// When the home means to commit again.
    next_round: Option<Instant>,
    /// How long the last flush took until it had its files.
    writing: Duration,
    /// Not to wait for the home's next round.
    is_urgent: bool,
    scope: TaskScope,
}

impl TableTask {
    /// Of a table that has just been opened.
    pub(super) fn new(table: &Arc<OpenTable>, scope: &TaskScope) -> Self {
        Self {
            table: Arc::clone(table),
            held: Vec::new(),
            held_since: None,
            reloaded: Instant::now(),
            asked_at: Instant::now(),
            views: table.home.views(),
            moves: table.route.pool.changed(),
            next_round: None,
            writing: Duration::ZERO,
            is_urgent: false,
            scope: scope.clone(),
        }
    }

    pub(super) async fn run(mut self) {
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
                Next::Heard(news) => {
                    if self.table.learn(&news) && !self.held.is_empty() {
                        self.settle(Vec::new()).await;
                    }
                }
                Next::Moved => self.move_home().await,
            }
            self.answer_drains().await;
        }
        let mut waiting = lock(&self.table.waiting);
        waiting.ended = true;
        // Whoever drains is answered by that.
        waiting.drains.clear();
    }

    /// When held runs want the table to be read anew: a home elsewhere is asked all the time.
    fn held_reload(&self) -> Option<Instant> {
        (!self.held.is_empty()).then_some(self.reloaded + HELD_RELOAD)
    }

    async fn reload(&mut self) {
        self.reloaded = Instant::now();
        let heard = if self.table.route.is_remote() {
            let known = self.table.known();
            let streams = self.asked(&known.map);
            self.table.route.watch(known.version, &known.shape.id, streams, Duration::ZERO).await
        } else {
            None
        };
        let reloaded = match heard {
            Some(news) => Ok(news),
            None => self.table.home.reload().await.map(News::View),
        };
        match reloaded {
            Ok(news) => drop(self.table.learn(&news)),
            Err(HomeError::Stopped(error)) => self.table.stop(&error),
            Err(HomeError::Again(error)) => {
                tracing::warn!(table = %self.table.name, %error, "cannot read the table anew: trying again");
            }
        }
        self.settle(Vec::new()).await;
    }

    /// What others have committed is read ahead of the first commit, which would else wait for that. What is held is
    /// judged anew, for the new home may have what the old one had not.
    async fn move_home(&mut self) {
        let is_behind = self.table.home.view().version.number() < self.table.known().version;
        if !self.held.is_empty() || is_behind && !self.table.route.is_remote() {
            self.reload().await;
        }
    }

    /// The streams whose way into the table is for others to tell, and how far they are known to be: those of held runs,
    /// and those that are durable further than they are committed. Of too many each time others: some may wait for long.
    fn asked(&self, map: &WatermarkMap) -> Vec<(StreamId, u64)> {
        let held = self.held.iter().filter_map(|entry| entry.open.as_ref()).flatten();
        let mut streams: BTreeSet<StreamId> = held.map(|(_, run)| run.stream.clone()).collect();
        {
            let followers = lock(&self.table.followers);
            let is_behind = |stream: &StreamId, progress: &StreamProgress| {
                let next = map.next(stream);
                progress.settled_at(next.saturating_add(1)).is_some_and(|durable| durable > next)
            };
            let behind = followers.iter().filter(|(stream, progress)| is_behind(stream, progress));
            streams.extend(behind.map(|(stream, _)| stream.clone()));
        }
        let (count, first) = (streams.len(), rand::random::<u32>() as usize);
        let some = streams.iter().cycle().skip(first % count.max(1)).take(count.min(ASKED_MAX));
        some.map(|stream| (stream.clone(), map.next(stream))).collect()
    }

    /// Resolves with what others have committed of streams that wait for it: another home tells, and this pod's reads the
    /// table, for others may have committed past it. Asks from `ask_at` on.
    async fn hear(&self, ask_at: Instant) -> News {
        let route = &self.table.route;
        if route.pool.is_alone() {
            return std::future::pending().await;
        }
        tokio::time::sleep_until(ask_at).await;
        loop {
            let known = self.table.known();
            let streams = self.asked(&known.map);
            if !streams.is_empty() && route.is_remote() {
                match route.watch(known.version, &known.shape.id, streams, HELD_RELOAD).await {
                    // It has waited as long as it was to.
                    Some(News::Marks(Marks { marks, .. })) if marks.is_empty() => continue,
                    Some(news) => return news,
                    None => {}
                }
            } else if !streams.is_empty()
                && let Ok(view) = route.home.reload_older(HELD_RELOAD).await
                && !self.table.has_learned(&view)
            {
                return News::View(view);
            }
            tokio::time::sleep(HELD_RELOAD).await;
        }
    }

    async fn next(&mut self) -> Next {
        let (mut views, mut moves) = (self.views.clone(), self.moves.clone());
        let ask_at = if self.held.is_empty() { self.asked_at + HELD_RELOAD } else { self.asked_at };
        if ask_at <= Instant::now() {
            self.asked_at = Instant::now();
        }
        let next = self.next_of(&mut views, &mut moves, ask_at).await;
        (self.views, self.moves) = (views, moves);
        // Held runs have waited enough.
        self.is_urgent = !matches!(next, Next::Flush) || self.is_hasty();
        next
    }

    /// Somebody waits for the flush, or it is one by size.
    fn is_hasty(&self) -> bool {
        let waiting = lock(&self.table.waiting);
        let is_full = waiting.bytes >= self.table.config.target_file_bytes;
        is_full || waiting.hurried || !waiting.drains.is_empty() || self.scope.is_draining()
    }

    async fn next_of(
        &self,
        views: &mut watch::Receiver<Arc<View>>,
        moves: &mut watch::Receiver<u64>,
        ask_at: Instant,
    ) -> Next {
        let table = &self.table;
        let mut hear = std::pin::pin!(self.hear(ask_at));
        loop {
            if table.stopped().is_some() {
                return Next::Flush; // to leave what there is to the log
            }
            let (is_due, since, drains) = {
                let waiting = lock(&table.waiting);
                let is_full = waiting.hurried || waiting.bytes >= table.config.target_file_bytes;
                (is_full, waiting.since, !waiting.drains.is_empty())
            };
            let is_hasty = drains || self.scope.is_draining();
            if since.is_some() && (is_due || is_hasty) || drains {
                return Next::Flush;
            }
            let flush_at = since
                .map(|since| flush_at(since, table.config.flush_interval, self.writing, self.next_round));
            let reload_at = self.held_reload().filter(|_| !table.route.is_remote());
            tokio::select! {
                biased; // stopping wins; a flush brings held runs with it
                () = self.scope.cancelled() => return Next::Stop,
                () = table.wake.notified() => {}
                () = self.scope.draining(), if !self.scope.is_draining() => {}
                () = at(flush_at) => return Next::Flush,
                Ok(()) = moves.changed() => return Next::Moved,
                Ok(()) = views.changed() => {
                    let view = View::clone(&views.borrow_and_update());
                    if !table.has_learned(&view) {
                        return Next::Heard(News::View(view));
                    }
                }
                () = at(reload_at) => return Next::Reload,
                news = &mut hear => return Next::Heard(news),
            }
        }
    }

    /// Of rows, for one flush: so many files are encoded at the same time, of rows for which there is memory.
    fn flush_bytes_max(&self) -> u64 {
        let files = cores().min(FILES_AT_ONCE_MAX) as u64;
        self.table.config.target_file_bytes.saturating_mul(files).min(self.table.budget.flush_bytes_max())
    }

    /// Takes what is at hand for one flush.
    fn take(&self) -> Vec<Entry> {
        let most = self.flush_bytes_max();
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
        waiting.taken += taken.len() as u64;
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
                // Entries that are done with are no longer at hand, so that nothing stands of what was written.
                Ok(()) if self.is_any_eligible(&at_hand) => progress = Progress::default(),
                Ok(()) => break,
                Err(FlushError::Home(HomeError::Stopped(error))) => self.table.stop(&error),
                Err(error) => {
                    tracing::warn!(table = %self.table.name, %error, "flush failed: trying again");
                    if fault::has(Bug::BlindRetry) {
                        progress.written.give_up();
                    }
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
        if held > 0 || !lock(&self.table.held).is_empty() {
            *lock(&self.table.held) = Arc::new(held_ranges(&at_hand));
        }
        self.held = at_hand;
        self.tell_held(held);
    }

    /// A handoff is over in a moment. What waits for longer may do so for ever.
    fn tell_held(&mut self, runs: usize) {
        let since = *self.held_since.get_or_insert_with(Instant::now);
        if runs == 0 {
            self.held_since = None;
        } else if since.elapsed() >= HELD_TOLD {
            self.held_since = Some(Instant::now());
            let table = &self.table.name;
            tracing::warn!(%table, runs,
                "runs wait for records that are in the log of a pod that is not there: `sluice tables` says which; where \
                 that log is lost for good, `sluice release` gives them up");
        }
    }

    /// Whether what has been learned meanwhile makes some run at hand eligible: nobody would be told of it again.
    fn is_any_eligible(&self, at_hand: &[Entry]) -> bool {
        let known = self.table.known();
        let is_eligible = |run: &RunKey| judge(known.map.mark(&run.stream), run) != Verdict::Held;
        at_hand.iter().filter_map(|entry| entry.open.as_ref()).flatten().any(|(_, run)| is_eligible(run))
    }

    /// One round: what is eligible of that at hand goes into one version. Leaves held entries in `at_hand`, and what was too
    /// much for the round.
    async fn flush(&mut self, at_hand: &mut Vec<Entry>, progress: &mut Progress) -> Result<(), FlushError> {
        let begun = Instant::now();
        self.load(at_hand, |entry| entry.open.is_none()).await?;
        for entry in at_hand.iter_mut().filter(|entry| entry.open.is_none()) {
            entry.open = entry.rows.as_ref().map(|(batch, _)| Entry::runs(batch));
        }
        let mut is_rewritten = false;
        for _ in 0..JUDGED_ANEW_MAX {
            let known = self.table.known();
            let mut round = Round::judge(&known.map, at_hand, self.flush_bytes_max());
            let request = self.table.request(&known);
            let Known { shape, map, .. } = known;
            // Learning changes it in place where nobody else has it.
            drop(map);
            if self.load_eligible(at_hand, &round).await? {
                continue; // some of it is not at hand any more
            }
            let rejects = round.rejects(&shape, at_hand, &progress.aside);
            let (rejects, parts) = rejects.map_err(RejectError::from)?;
            self.set_aside(rejects, &round).await?;
            progress.aside.extend(parts);
            self.write(&shape, at_hand, &round, &mut progress.written).await?;
            let runs = round.judged();
            if runs.is_empty() {
                round.settle(at_hand);
                return Ok(()); // all are held
            }
            let (urgent, adds) = (self.is_urgent, progress.written.offer());
            let request = CommitRequest { urgent, runs, adds, ..request };
            self.writing = begun.elapsed();
            let route = &self.table.route;
            // Files that have just been written are not old: the home's clock is far from this pod's.
            let routed =
                if is_rewritten { route.commit_here(request).await } else { route.commit(request).await };
            let Routed { outcome, news, next } = routed?;
            self.next_round = next;
            self.table.learn(&news);
            match outcome {
                Outcome::Committed => {
                    round.settle(at_hand);
                    return Ok(());
                }
                Outcome::Changed => {}
                Outcome::Rewrite | Outcome::Reshaped => {
                    is_rewritten |= outcome == Outcome::Rewrite;
                    progress.written.give_up();
                }
            }
        }
        let what =
            format!("table {}: runs were judged anew {JUDGED_ANEW_MAX} times in a row", self.table.name);
        Err(HomeError::Again(what).into())
    }

    async fn load_eligible(&self, at_hand: &mut [Entry], round: &Round) -> Result<bool, FlushError> {
        let mut wanted = vec![false; at_hand.len()];
        round.eligible().for_each(|run| wanted[run.entry] = true);
        let mut wanted = wanted.into_iter();
        self.load(at_hand, |_| wanted.next().unwrap_or(false)).await
    }

    /// Reads rows back from the log, at the cost of what comes later to the budget. Answers whether some entries turned out
    /// to be done with: they have no open runs then.
    async fn load(
        &self,
        at_hand: &mut [Entry],
        mut wanted: impl FnMut(&Entry) -> bool,
    ) -> Result<bool, FlushError> {
        let mut some_done = false;
        for entry in at_hand {
            if !wanted(entry) || entry.rows.is_some() {
                continue;
            }
            let bytes = match self.table.wal.read_back(&entry.durable).await {
                // Of a log that was taken over: another pod has committed all of it.
                Err(WalError::Done { .. }) => {
                    entry.open = Some(Vec::new());
                    some_done = true;
                    continue;
                }
                read => read?,
            };
            let batch = Arc::new(Batch::decode(bytes)?);
            let permit = self.table.budget.claim(batch.memory_bytes() as u64);
            entry.rows = Some((batch, permit));
            self.table.counts.read_back.fetch_add(1, Ordering::Relaxed);
        }
        Ok(some_done)
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
            // A file is hardly ever larger than its rows.
            let permit = self.table.budget.claim(rows_bytes(at_hand, &group));
            let shape = Arc::clone(shape);
            encoding.push((group, permit, ENCODERS.begin(move || encode(&shape, &sources)).await));
        }
        for (group, permit, encoded) in encoding {
            let encoded = encoded.await??;
            pass(Point::ParquetClosed)?;
            let files = self.put(encoded).await?;
            drop(permit);
            pass(Point::ParquetStored)?;
            written.add(group, files, Instant::now());
        }
        Ok(())
    }

    /// Stores files: all, or none.
    async fn put(&self, encoded: Vec<Encoded>) -> Result<Vec<DataFile>, FlushError> {
        let (mut files, mut paths) = (Vec::new(), Vec::new());
        for mut file in encoded {
            let content = std::mem::take(&mut file.content);
            let bytes = content.content_length() as u64;
            // It can be there in spite of an error.
            paths.push(file.path.clone());
            let put = self.table.home_config.store.put(&file.path, content).await;
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
            self.table.strand(entry.durable);
        }
    }

    async fn answer_drains(&mut self) {
        let drains: Vec<_> = {
            let mut waiting = lock(&self.table.waiting);
            let taken = waiting.taken;
            waiting.drains.extract_if(.., |(offered, _)| *offered <= taken).collect()
        };
        if drains.is_empty() {
            return;
        }
        if !self.held.is_empty() {
            self.reload().await;
        }
        for (_, key) in self.held.iter().filter_map(|entry| entry.open.as_ref()).flatten() {
            let (table, stream) = (&self.table.name, &key.stream);
            let (first, end) = (key.start, key.end);
            tracing::warn!(%table, %stream, first, end, "run is not committed: what comes before it is not here");
        }
        for (_, drained) in drains {
            // Whoever waited may have given up.
            let _ = drained.send(());
        }
    }
}

/// Held runs, as others are to see them.
fn held_ranges(at_hand: &[Entry]) -> Vec<HeldRange> {
    let runs = at_hand.iter().flat_map(|entry| {
        let open = entry.open.iter().flatten();
        open.map(|(_, run)| (run, entry.sealed_us))
    });
    held::ranges(runs)
}

/// When a batch that came at `since` is flushed at the latest: its files are to be there an interval after it came. A home that
/// commits for several pods does so at intervals: files are to be there just before a round, so that rows wait for the one and
/// not for the other too.
fn flush_at(since: Instant, interval: Duration, writing: Duration, round: Option<Instant>) -> Instant {
    let Some(round) = round.filter(|round| *round + interval > since) else {
        return since + interval - writing.min(interval / WRITING_PART);
    };
    let lead = (writing * 2).clamp(interval / LEAD_PART, interval / 2);
    flush_before(since, interval, round.checked_sub(lead).unwrap_or(round))
}

/// The last moment that is not later than an interval after `since` and lies before a round; where there is none, the
/// moment before the next round. `ready` is before one of them.
fn flush_before(since: Instant, interval: Duration, mut ready: Instant) -> Instant {
    let latest = since + interval;
    if ready > latest {
        return ready.min(latest + interval);
    }
    while ready + interval <= latest && !interval.is_zero() {
        ready += interval;
    }
    if ready > since { ready } else { latest }
}

fn pass(point: Point) -> Result<(), FlushError> {
    fault::hit(point)
        .map_err(|source| object_store::Error::Generic { store: "faults", source: source.into() }.into())
}

async fn at(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_ready_just_before_the_homes_round() {
        let (start, interval) = (Instant::now(), Duration::from_millis(1_000));
        let at = |ms: u64| start + Duration::from_millis(ms);
        // Files that take no time are begun a tenth of the interval before a round.
        let check = |since: u64, round: u64, expected: u64| {
            let flushed = flush_at(at(since), interval, Duration::ZERO, Some(at(round)));
            assert_eq!(flushed, at(expected), "since {since}, round {round}");
        };
        check(5_000, 6_000, 5_900); // rows that came just after a round
        check(5_900, 7_000, 6_900); // a steady flow
        check(5_100, 7_000, 6_900); // while the last files waited for their round
        check(5_000, 4_400, 5_300); // the next round after the one that was told
        check(5_000, 9_100, 7_000);
        check(5_000, 5_100, 6_000);
        check(5_000, 4_000, 6_000); // a round of long ago
    }

    #[test]
    fn files_are_ready_an_interval_after_their_rows_where_nobody_else_commits() {
        let (since, interval) = (Instant::now(), Duration::from_millis(1_000));
        for (writing, expected) in [(0, 1_000), (10, 990), (400, 600), (500, 500), (9_000, 500)] {
            let flushed = flush_at(since, interval, Duration::from_millis(writing), None);
            assert_eq!(flushed, since + Duration::from_millis(expected), "files that take {writing} ms");
        }
    }
}
