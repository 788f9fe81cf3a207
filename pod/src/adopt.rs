//! Adoption: logs in the tables' store whose pods are gone are taken over, committed, and deleted.
//!
//! A pod that starts takes over those of its own former lives at once. Those of others wait until their pod has been gone
//! for the configured time; then the first active pod in the ring order of the log's id takes it over. Nothing depends on
//! who that is: two pods that take one log over at one time do the same work twice, and one that dies midway leaves it to
//! the next, which begins anew. What is in the tables already is dropped by the prefix rule.
//!
//! A log that an operator has released is nobody's to take.
//!
//! *Owns*: which logs this pod takes over and when, their way into the tables, the note that nothing is left.
//! *Does not own*: the seal and the objects (`wal/object/sealed.rs`), the tables, who is in the pool (`membership`).
//! Keeps P2 and P3: a log is deleted only when all of it is committed, and its note is written before.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use sluice_shared::error::Error;
use sluice_shared::fault::{self, Point};
use sluice_shared::ids::{LogId, PodId, TableName};
use sluice_shared::lifecycle::TaskScope;
use sluice_shared::membership::Membership;
use tokio::sync::Semaphore;
use tokio::time::Instant;

use crate::app::chain;
use crate::drained::Release;
use crate::pool::Pool;
use crate::table::Tables;
use crate::table::batch::Batch;
use crate::wal::{LogHeader, LogStore, SealedLog, WalError};

/// Logs are looked for so often. Each look is one listing.
const LOOK_INTERVAL: Duration = Duration::from_secs(2);
/// After a failure a log is tried again so much later.
const TRY_AGAIN: Duration = Duration::from_secs(10);
/// Logs that are read at one time. Others wait for their runs' predecessors meanwhile: any number of them.
const READ_AT_ONCE: usize = 2;

/// What an adopter needs.
#[derive(Clone)]
pub struct Adopter {
    /// Where the logs are.
    pub logs: LogStore,
    /// This pod.
    pub pod: PodId,
    /// Its own log, if it is one of them.
    pub own: LogId,
    /// Who is there.
    pub membership: Membership,
    /// The pool as this pod sees it.
    pub pool: Pool,
    /// Where entries go.
    pub tables: Tables,
    /// Its tasks.
    pub scope: TaskScope,
    /// How long a pod has to be gone.
    pub after: Duration,
    /// What this pod is doing about logs, for others to see.
    pub adoptions: Adoptions,
}

/// What a pod does about logs. Clones share it.
#[derive(Clone, Default)]
pub struct Adoptions(Shared);

impl Adoptions {
    /// The logs that are being taken over.
    pub fn ongoing(&self) -> BTreeSet<LogId> {
        lock(&self.0).ongoing.iter().copied().collect()
    }

    /// The logs that this pod has tried to take over and found damaged, and how.
    pub fn damaged(&self) -> BTreeMap<LogId, String> {
        lock(&self.0).damaged.iter().map(|(log, how)| (*log, how.clone())).collect()
    }

    /// Logs of this pod's former lives that may hold what is in no table, and why they were not taken over yet, as far as
    /// that is known.
    pub fn former(&self) -> BTreeMap<LogId, Option<String>> {
        lock(&self.0).former.iter().map(|(log, why)| (*log, why.clone())).collect()
    }

    /// Whether waiting may bring the end of a log of this pod's former lives.
    pub fn may_end(&self) -> bool {
        let known = lock(&self.0);
        !known.looked || known.former.keys().any(|log| !known.stuck.contains(log))
    }

    /// Whether a log is of no concern to this pod any more.
    pub fn is_done(&self, log: LogId) -> bool {
        lock(&self.0).done.contains(&log)
    }
}

/// What is known of logs between two looks.
#[derive(Default)]
struct Known {
    /// Of nobody's concern any more.
    done: HashSet<LogId>,
    /// Being taken over by this pod.
    ongoing: HashSet<LogId>,
    /// Since when a log's pod has been gone, as far as was seen here.
    ownerless: HashMap<LogId, Instant>,
    /// Not to be tried before.
    not_before: HashMap<LogId, Instant>,
    /// Found damaged at the last try, and how.
    damaged: HashMap<LogId, String>,
    /// Whether all logs were looked at once.
    looked: bool,
    /// Of this pod's former lives, and not done: why the last try has failed.
    former: BTreeMap<LogId, Option<String>>,
    /// Trying again does not help, at the last try.
    stuck: HashSet<LogId>,
}

impl Known {
    fn finish(&mut self, log: LogId) {
        self.done.insert(log);
        self.damaged.remove(&log);
        self.former.remove(&log);
    }
}

type Shared = Arc<Mutex<Known>>;

fn lock(known: &Shared) -> MutexGuard<'_, Known> {
    known.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Adopter {
    /// Looks for logs, and takes over what is this pod's to take; while the pod drains, those of its former lives alone.
    pub async fn run(self) {
        let (known, reads) = (Arc::clone(&self.adoptions.0), Arc::new(Semaphore::new(READ_AT_ONCE)));
        loop {
            tokio::select! {
                biased; // the end first
                () = self.scope.cancelled() => return,
                looked = self.look(&known, &reads) => if let Err(error) = looked {
                    tracing::warn!(pod = %self.pod, %error, "cannot look for the logs of pods that are gone");
                },
            }
            tokio::select! {
                biased; // the end first
                () = self.scope.cancelled() => return,
                () = tokio::time::sleep(LOOK_INTERVAL) => {}
            }
        }
    }

    async fn look(&self, known: &Shared, reads: &Arc<Semaphore>) -> Result<(), WalError> {
        for log in self.logs.list().await? {
            let is_known = {
                let known = lock(known);
                let is_put_off = known.not_before.get(&log).is_some_and(|at| *at > Instant::now());
                is_put_off || known.done.contains(&log) || known.ongoing.contains(&log)
            };
            if log == self.own || is_known {
                continue;
            }
            let header = match self.logs.header(log).await {
                Ok(Some(header)) => header,
                Ok(None) => {
                    lock(known).finish(log);
                    continue;
                }
                Err(error) => {
                    // Its groups say whose it is.
                    if self.logs.writer(log).await.ok().flatten().as_ref() == Some(&self.pod) {
                        lock(known).former.insert(log, None);
                    }
                    self.put_off(known, log, &error);
                    continue;
                }
            };
            if header.owner == self.pod {
                lock(known).former.entry(log).or_default();
            }
            if self.is_due(known, &header, Instant::now()) {
                lock(known).ongoing.insert(log);
                let (adopter, known, reads) = (self.clone(), Arc::clone(known), Arc::clone(reads));
                self.scope.spawn("adopt", async move { adopter.adopt(header, &known, &reads).await });
            }
        }
        lock(known).looked = true;
        Ok(())
    }

    /// Whether the log is this pod's to take over, now.
    fn is_due(&self, known: &Shared, header: &LogHeader, now: Instant) -> bool {
        let LogHeader { log, owner, .. } = header;
        let mut known = lock(known);
        if *owner == self.pod {
            return true; // a former life: it is over, or about to find out
        }
        if self.scope.is_draining() {
            return false;
        }
        let members = self.membership.now();
        let lost = match members.pods.get(owner) {
            // It is there, and takes the logs of its former lives over itself.
            Some(pod) if pod.lost.is_none() => {
                known.ownerless.remove(log);
                return false;
            }
            Some(pod) => pod.lost,
            None => None,
        };
        let since = *known.ownerless.entry(*log).or_insert(now);
        let since = lost.map_or(since, |lost| lost.min(since));
        let is_long_gone = now.saturating_duration_since(since) >= self.after;
        is_long_gone && self.pool.view().order(&place(*log)).next().is_some_and(|pod| pod.id == self.pod)
    }

    fn put_off(&self, known: &Shared, log: LogId, error: &WalError) {
        let (pod, cause) = (&self.pod, error as &dyn std::error::Error);
        let mut known = lock(known);
        known.not_before.insert(log, Instant::now() + TRY_AGAIN);
        known.damaged.remove(&log);
        known.stuck.remove(&log);
        if matches!(error, WalError::CorruptObject { .. } | WalError::NewerFormat { .. }) {
            known.stuck.insert(log);
        }
        if let Some(why) = known.former.get_mut(&log) {
            *why = Some(chain(cause));
        }
        match error {
            WalError::CorruptObject { .. } => {
                known.damaged.insert(log, error.to_string());
                tracing::error!(%pod, log = %log.0, error = cause, "a log is taken over up to an object alone that is damaged or \
                    missing; restore it, or give up what is from there on: sluice release --log");
            }
            WalError::NewerFormat { .. } => {
                tracing::error!(%pod, log = %log.0, error = cause, "a newer Sluice has written a \
                log, which this pod cannot take over: start the pods with that version, and nothing of it is lost")
            }
            _ => {
                tracing::warn!(%pod, log = %log.0, error = cause, "cannot take a log over yet: trying again")
            }
        }
    }

    async fn adopt(&self, header: LogHeader, known: &Shared, reads: &Semaphore) {
        let LogHeader { log, owner, .. } = header;
        let adopted = tokio::select! {
            biased; // the end first: another pod begins anew
            () = self.scope.cancelled() => return,
            adopted = self.take_over(log, &owner, reads) => adopted,
        };
        match adopted {
            Ok(()) | Err(WalError::Done { .. }) => lock(known).finish(log),
            Err(error) => self.put_off(known, log, &error),
        }
        lock(known).ongoing.remove(&log);
    }

    async fn take_over(&self, log: LogId, owner: &PodId, reads: &Semaphore) -> Result<(), WalError> {
        if self.is_released(log).await {
            return Ok(());
        }
        let reading = reads.acquire().await;
        fault::pass(Point::AdoptBefore);
        let Some(mut sealed) = SealedLog::seal(&self.logs, log, &self.pod).await? else { return Ok(()) };
        fault::pass(Point::AdoptSealed);
        tracing::info!(pod = %self.pod, log = %log.0, %owner, "taking over the log of a pod that is gone");
        let (mut batches, mut records) = (0u64, 0u64);
        while let Some(entries) = sealed.next_group().await? {
            for (durable, bytes) in entries {
                let position = durable.position();
                let batch = Batch::decode(bytes).map_err(|error| {
                    let reason = format!("the entry at {position} is whole but no batch: {error}");
                    WalError::CorruptObject { object: format!("of log {}", log.0), reason }
                })?;
                batches += 1;
                records += batch.runs.iter().map(|run| run.offsets.count()).sum::<u64>();
                self.tables.adopt(durable, batch).await;
            }
        }
        drop(reading);
        sealed.released().await;
        fault::pass(Point::AdoptAfter);
        self.note(log).await;
        fault::pass(Point::AdoptNoted);
        sealed.delete().await?;
        tracing::info!(pod = %self.pod, log = %log.0, %owner, batches, records, "took over a log: all of it is committed");
        Ok(())
    }

    /// An operator has given up what is left of it: its objects stay as they are, for whoever wants to look into them.
    async fn is_released(&self, log: LogId) -> bool {
        // Where that cannot be read, the log cannot either.
        let released = self.tables.drained_logs().released(log).await.ok().flatten();
        if let Some(Release { by, .. }) = &released {
            tracing::info!(pod = %self.pod, log = %log.0, %by,
                "a log that an operator has released is not taken over: its objects stay in _sluice/wal");
        }
        released.is_some()
    }

    /// Whoever looks for records in the log finds that there are none. Nothing is deleted before that is written.
    async fn note(&self, log: LogId) {
        while let Err(error) = self.tables.drained_logs().note(log).await {
            let error: &Error = &error;
            tracing::warn!(pod = %self.pod, log = %log.0, %error, "a log that was taken over waits for its note");
            tokio::time::sleep(TRY_AGAIN / 10).await;
        }
    }
}

/// Logs stand in the ring as tables do: any name that is the log's alone.
fn place(log: LogId) -> TableName {
    format!("_sluice.logs.{}", log.0.simple()).parse().expect("letters and digits")
}
