//! Births and deaths: phases, the two stop signals, the one place that spawns, and the one clock.
//!
//! *Owns*: `Phase`, `TaskScope`, where blocking work goes, OS signals, wall-clock time.
//! *Does not own*: what a task does when it is told to drain.

use std::collections::BTreeMap;
use std::fmt;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::str::FromStr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures_util::FutureExt;
use futures_util::future::Either;
use serde::{Deserialize, Serialize};
use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::task::{JoinError, spawn_blocking, yield_now};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::fault;

/// Where a pod is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// Replaying its log; takes no streams yet.
    Joining,
    /// Takes streams.
    Active,
    /// Takes no new streams; finishes what it has accepted.
    Draining,
    /// Holds nothing any more.
    Drained,
    /// At the end of its drain, but its log holds what is in no table: it has to be started again.
    Undrained,
}

impl Phase {
    const ALL: [(Self, &'static str); 5] = [
        (Self::Joining, "joining"),
        (Self::Active, "active"),
        (Self::Draining, "draining"),
        (Self::Drained, "drained"),
        (Self::Undrained, "undrained"),
    ];
}

impl Phase {
    /// Whether its drain has come to its end: it is a new process that would take streams.
    pub fn is_over(self) -> bool {
        matches!(self, Self::Drained | Self::Undrained)
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = Self::ALL.iter().find(|(phase, _)| phase == self).map_or("", |(_, name)| name);
        f.write_str(name)
    }
}

impl FromStr for Phase {
    type Err = UnknownPhase;

    fn from_str(text: &str) -> Result<Self, UnknownPhase> {
        let phase = Self::ALL.iter().find(|(_, name)| *name == text).map(|(phase, _)| *phase);
        phase.ok_or_else(|| UnknownPhase(text.to_owned()))
    }
}

/// A phase that there is not.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no phase of a pod: expected joining, active, draining, drained or undrained")]
pub struct UnknownPhase(String);

/// What a panic in a task ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnPanic {
    /// The process: a pod's state may be broken, and replay recovers it.
    EndProcess,
    /// That task alone.
    EndTask,
}

/// Tasks that belong together, and their two signals. Clones share one scope.
///
/// *Drain* asks to finish; *cancel* asks to stop now. Cancelling also drains.
#[derive(Clone)]
pub struct TaskScope {
    shared: Arc<Shared>,
}

struct Shared {
    on_panic: OnPanic,
    tracker: TaskTracker,
    drain: CancellationToken,
    cancel: CancellationToken,
    next_task: AtomicU64,
    running: Mutex<BTreeMap<u64, &'static str>>,
}

impl TaskScope {
    /// An empty scope.
    pub fn new(on_panic: OnPanic) -> Self {
        let cancel = CancellationToken::new();
        Self {
            shared: Arc::new(Shared {
                on_panic,
                tracker: TaskTracker::new(),
                drain: cancel.child_token(),
                cancel,
                next_task: AtomicU64::new(0),
                running: Mutex::default(),
            }),
        }
    }

    /// Spawns a task on the current runtime. It should end soon after `cancelled`.
    pub fn spawn(&self, name: &'static str, task: impl Future<Output = ()> + Send + 'static) {
        let shared = Arc::clone(&self.shared);
        let id = shared.next_task.fetch_add(1, Ordering::Relaxed);
        shared.running.lock().unwrap_or_else(PoisonError::into_inner).insert(id, name);
        // No block that awaits it: that would hold it twice, once captured and once awaited.
        self.shared.tracker.spawn(AssertUnwindSafe(task).catch_unwind().map(move |outcome| {
            shared.running.lock().unwrap_or_else(PoisonError::into_inner).remove(&id);
            if outcome.is_err() {
                tracing::error!(task = name, "task panicked");
                if shared.on_panic == OnPanic::EndProcess {
                    std::process::abort();
                }
            }
        }));
    }

    /// Asks all tasks to finish what they have.
    pub fn drain(&self) {
        self.shared.drain.cancel();
    }

    /// Asks all tasks to stop now.
    pub fn cancel(&self) {
        self.shared.cancel.cancel();
    }

    /// Resolves when the scope drains or is cancelled.
    pub async fn draining(&self) {
        self.shared.drain.cancelled().await;
    }

    /// Whether the scope drains or is cancelled.
    pub fn is_draining(&self) -> bool {
        self.shared.drain.is_cancelled()
    }

    /// Resolves when the scope is cancelled.
    pub async fn cancelled(&self) {
        self.shared.cancel.cancelled().await;
    }

    /// Waits until all tasks have ended; after `deadline` gives up and names the late ones.
    ///
    /// # Errors
    /// The names of the tasks that still run.
    pub async fn join(&self, deadline: Duration) -> Result<(), Vec<&'static str>> {
        self.shared.tracker.close();
        let waited = tokio::time::timeout(deadline, self.shared.tracker.wait()).await;
        waited.map_err(|_| {
            let running = self.shared.running.lock().unwrap_or_else(PoisonError::into_inner);
            running.values().copied().collect()
        })
    }
}

/// Whether all tasks here share one thread. Then there is no other to give work to, and what blocks is done in place: a
/// simulation, whose time is not the machine's, runs the service so.
pub fn is_on_one_thread() -> bool {
    Handle::try_current().is_ok_and(|handle| handle.runtime_flavor() == RuntimeFlavor::CurrentThread)
}

/// Runs work that blocks where it holds up no task. It has begun when this returns, unless there is one thread alone.
///
/// # Errors
/// Where the work panicked.
pub fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> impl Future<Output = Result<T, JoinError>> + Send {
    if !is_on_one_thread() {
        return Either::Left(spawn_blocking(work));
    }
    Either::Right(async move {
        // Others have their turn, as they would have while a thread is at it.
        yield_now().await;
        Ok(work())
    })
}

/// As `blocking`, for short work on what the caller has borrowed.
pub fn block_in_place<T>(work: impl FnOnce() -> T) -> T {
    if is_on_one_thread() { work() } else { tokio::task::block_in_place(work) }
}

/// SIGTERMs and SIGINTs, as they come: the first asks for a drain, the next to be quick about it.
pub struct Terminations {
    terminate: tokio::signal::unix::Signal,
    interrupt: tokio::signal::unix::Signal,
}

impl Terminations {
    /// From now on neither ends the process by itself, and none is lost between two calls of `next`.
    ///
    /// # Errors
    /// Where the signal handlers cannot be installed.
    pub fn new() -> std::io::Result<Self> {
        use tokio::signal::unix::{SignalKind, signal};
        Ok(Self { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
    }

    /// Resolves at the next one; several of a kind in a row may be one.
    pub async fn next(&mut self) {
        tokio::select! {
            biased; // the order is of no consequence: both mean the same
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

/// Asks a drain that is under way to be quick. Clones share one.
///
/// A hurried drain waits for no peer and commits nothing more, but leaves out no flush: what was accepted is durable at its
/// end, and the next start goes on from there.
#[derive(Debug, Clone, Default)]
pub struct Hurry {
    hurried: CancellationToken,
}

impl Hurry {
    /// From now on.
    pub fn hurry(&self) {
        self.hurried.cancel();
    }

    /// Resolves once there is a hurry.
    pub async fn hurried(&self) {
        self.hurried.cancelled().await;
    }
}

/// SIGHUPs, as they come. Once this was made they do not end the process.
pub struct Hangups(tokio::signal::unix::Signal);

impl Hangups {
    /// None where the process stands on a terminal, or handlers cannot be installed: whoever closes that means the end.
    pub fn new() -> Option<Self> {
        use std::io::IsTerminal;
        use tokio::signal::unix::{SignalKind, signal};
        if std::io::stdin().is_terminal() {
            return None;
        }
        signal(SignalKind::hangup()).ok().map(Self)
    }

    /// Resolves at the next one; several in a row may be one.
    pub async fn next(&mut self) {
        // `None` means that no more can come.
        if self.0.recv().await.is_none() {
            std::future::pending().await
        }
    }
}

/// Wall-clock time in microseconds since 1970-01-01 UTC: for `_ingested_at` and people, never for ordering.
#[allow(clippy::disallowed_methods, reason = "the one place that reads the wall clock")]
pub fn now_us() -> i64 {
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let now = i64::try_from(since_epoch.as_micros()).unwrap_or(i64::MAX);
    now.saturating_add(fault::clock_ms().saturating_mul(1000))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_late_task_is_named() {
        let scope = TaskScope::new(OnPanic::EndTask);
        scope.spawn("sleeper", std::future::pending());
        assert_eq!(scope.join(Duration::from_millis(10)).await, Err(vec!["sleeper"]));
    }

    #[tokio::test]
    async fn cancelling_also_drains() {
        let scope = TaskScope::new(OnPanic::EndTask);
        let task = scope.clone();
        scope.spawn("worker", async move { task.draining().await });
        scope.cancel();
        assert_eq!(scope.join(Duration::from_secs(5)).await, Ok(()));
    }

    #[tokio::test]
    async fn one_thread_does_blocking_work_itself() {
        let here = std::thread::current().id();
        assert_eq!(blocking(|| std::thread::current().id()).await.expect("no panic"), here);
        assert_eq!(block_in_place(|| std::thread::current().id()), here);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 1)]
    async fn several_threads_give_blocking_work_away() {
        let worker = TaskScope::new(OnPanic::EndTask);
        let (told, threads) = tokio::sync::oneshot::channel();
        worker.spawn("worker", async move {
            let there = blocking(|| std::thread::current().id()).await.expect("no panic");
            // Nobody asks any more where the test has failed already.
            let _ = told.send((std::thread::current().id(), there));
        });
        let (here, there) = threads.await.expect("told");
        assert_ne!(here, there);
    }

    #[tokio::test]
    async fn a_panic_ends_one_task_alone() {
        let scope = TaskScope::new(OnPanic::EndTask);
        scope.spawn("faulty", async { panic!("on purpose") });
        assert_eq!(scope.join(Duration::from_secs(5)).await, Ok(()));
    }
}
