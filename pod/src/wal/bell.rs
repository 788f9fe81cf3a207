//! What the log's workers wait at, be they threads or tasks.
//!
//! *Owns*: waiting and being woken, both ways at once.
//! *Does not own*: what is waited for: whoever is woken looks for itself.

use std::sync::{Condvar, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;

/// Rung when there may be something to do.
#[derive(Default)]
pub(super) struct Bell {
    threads: Condvar,
    tasks: Notify,
}

impl Bell {
    /// Wakes a worker, if one waits.
    pub(super) fn notify_one(&self) {
        self.threads.notify_one();
        self.tasks.notify_one();
    }

    /// Wakes all that wait.
    pub(super) fn notify_all(&self) {
        self.threads.notify_all();
        self.tasks.notify_waiters();
    }

    /// A thread waits.
    pub(super) fn wait<'a, T>(&self, state: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
        self.threads.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    /// A thread waits, but not for longer than that; tells whether it was that long.
    pub(super) fn wait_at_most<'a, T>(
        &self,
        state: MutexGuard<'a, T>,
        most: Duration,
    ) -> (MutexGuard<'a, T>, bool) {
        let waited = self.threads.wait_timeout(state, most);
        let (state, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
        (state, timeout.timed_out())
    }

    /// A task waits.
    pub(super) async fn rung(&self) {
        self.tasks.notified().await;
    }
}
