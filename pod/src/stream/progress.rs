//! How far a stream has come, as told by the log and the table, and read by the stream's task.
//!
//! *Owns*: the durable and committed frontiers of one open stream, the refusals that wait to be told.
//! *Does not own*: the frontiers' truth: only a durable group raises the one, only a commit the other.
//! Keeps P3 and P4: both frontiers only rise.

use std::sync::{Mutex, OnceLock, PoisonError};

use sluice_shared::error::Error;
use sluice_shared::ids::TableVersion;
use tokio::sync::Notify;

use crate::table::batch::Refusal;

/// Shared by a stream's task, the lane, the log's completion and the table. All methods are cheap and never block.
#[derive(Debug, Default)]
pub struct StreamProgress {
    state: Mutex<Progress>,
    failure: OnceLock<Error>,
    changed: Notify,
}

/// What has happened since the stream's task last looked.
#[derive(Debug, Default, Clone)]
pub struct Progress {
    /// One more than the last durable offset.
    pub durable_next: u64,
    /// One more than the last committed offset.
    pub committed_next: u64,
    /// The table version in which `0..committed_next` can be read.
    pub version: TableVersion,
    /// Durable refusals that are not yet told. They come before the ack that covers them.
    pub refusals: Vec<Refusal>,
}

impl StreamProgress {
    /// All before `next` is durable; `refusals` are among it.
    pub fn durable(&self, next: u64, refusals: &[Refusal]) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.durable_next = state.durable_next.max(next);
        state.refusals.extend_from_slice(refusals);
        drop(state);
        self.changed.notify_one();
    }

    /// All before `next` can be read in `version`.
    pub fn committed(&self, next: u64, version: TableVersion) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if next <= state.committed_next {
            return;
        }
        (state.committed_next, state.version) = (next, version);
        drop(state);
        self.changed.notify_one();
    }

    /// The stream cannot go on. The first failure stays.
    pub fn fail(&self, error: Error) {
        let _ = self.failure.set(error);
        self.changed.notify_one();
    }

    /// Why the stream cannot go on.
    pub fn failure(&self) -> Option<&Error> {
        self.failure.get()
    }

    /// Takes the refusals, copies the frontiers.
    pub fn take(&self) -> Progress {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let refusals = std::mem::take(&mut state.refusals);
        Progress { refusals, ..*state }
    }

    /// Resolves when something has changed since the last time. For one waiter.
    pub async fn changed(&self) {
        self.changed.notified().await;
    }
}
