//! How far a stream has come, as told by the log and the table, and read by the stream's task.
//!
//! *Owns*: the durable and committed frontiers of one open stream, the refusals that wait to be told.
//! *Does not own*: the frontiers' truth: only a durable group raises the one, only a commit the other.
//! Keeps P3 and P4: both frontiers only rise.

use std::sync::{Mutex, OnceLock, PoisonError};

use sluice_shared::error::Error;
use sluice_shared::ids::{OffsetRange, TableVersion};
use sluice_shared::requests::Boundary;
use tokio::sync::Notify;

use crate::table::batch::Refusal;

/// Shared by a stream's task, the lane, the log's completion and the table. All methods are cheap and never block.
#[derive(Debug, Default)]
pub struct StreamProgress {
    state: Mutex<Progress>,
    failure: OnceLock<Error>,
    changed: Notify,
    /// For those who wait for a frontier and are not the stream's task.
    moved: Notify,
}

/// What has happened since the stream's task last looked.
#[derive(Debug, Default, Clone)]
pub struct Progress {
    /// One more than the last durable offset.
    pub durable_next: u64,
    /// Of a stream that counts its requests: where the last durable one ends.
    pub boundary: Option<Boundary>,
    /// One more than the last committed offset.
    pub committed_next: u64,
    /// The table version in which `0..committed_next` can be read.
    pub version: TableVersion,
    /// The stream failed at this offset: nothing from here on becomes durable.
    pub fault_at: Option<u64>,
    /// Refusals that are not yet told. They come before the ack that covers them.
    pub refusals: Vec<Refusal>,
    /// Its gateway is to go on with it elsewhere; why.
    pub handoff: Option<&'static str>,
    /// What is in the log already, and is sent again only for its refusals. Its start rises as that is judged.
    pub again: OffsetRange,
}

impl Progress {
    /// How much of what is durable may be told: not what is sent again and has yet to be judged.
    pub fn told_durable(&self) -> u64 {
        if self.again.is_empty() { self.durable_next } else { self.durable_next.min(self.again.start) }
    }

    /// How much of what is committed may be told. A stream that is resent after a crash can be further in the table
    /// than it is durable here; its refusals are told again only as it becomes so.
    pub fn told_committed(&self) -> u64 {
        self.committed_next.min(self.told_durable())
    }

    /// Whether all before `next` is durable, or even committed.
    pub fn covers(&self, next: u64, committed: bool) -> bool {
        let reached = if committed { self.told_committed() } else { self.told_durable() };
        reached >= next
    }
}

impl StreamProgress {
    /// These will be durable next.
    pub fn refused(&self, refusals: impl Iterator<Item = Refusal>) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.refusals.extend(refusals);
    }

    /// Resolves when at most `most` refusals are untold: a stream whose gateway does not listen takes no more frames, and
    /// costs the others nothing.
    pub async fn refusals_at_most(&self, most: usize) {
        loop {
            let moved = self.moved.notified();
            if self.state.lock().unwrap_or_else(PoisonError::into_inner).refusals.len() <= most {
                return;
            }
            moved.await;
        }
    }

    /// All before `next` is durable.
    pub fn durable(&self, next: u64) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.durable_next = state.durable_next.max(next);
        drop(state);
        self.changed.notify_one();
        self.moved.notify_waiters();
    }

    /// The stream's gateway is to go on with it elsewhere.
    pub fn ask_handoff(&self, reason: &'static str) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).handoff = Some(reason);
        self.changed.notify_one();
    }

    /// The request that ends there is durable, and all before it are.
    pub fn whole(&self, boundary: Boundary) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.boundary = state.boundary.max(Some(boundary));
    }

    /// Where the last durable request ends.
    pub fn boundary(&self) -> Option<Boundary> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).boundary
    }

    /// A new call begins: it sends `again`, which is in the log or on its way there, and then what follows.
    pub fn resume(&self, again: OffsetRange) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).again = again;
    }

    /// What was sent again has been judged up to `next`: these were refused.
    pub fn judged(&self, next: u64, refusals: Vec<Refusal>) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.again.start = state.again.start.max(next);
        state.refusals.extend(refusals);
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

    /// The stream cannot go on. The first failure stays. What was accepted still becomes durable.
    pub fn fail(&self, error: Error) {
        let _ = self.failure.set(error);
        self.changed.notify_one();
    }

    /// The frame at `offset` cannot be read: it and all that follow are given up.
    pub fn fault(&self, offset: u64, error: Error) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        // What was sent before, and only its repetition cannot be read, becomes durable all the same.
        let at = offset.max(state.again.end);
        state.fault_at.get_or_insert(at);
        drop(state);
        self.fail(error);
        self.moved.notify_waiters();
    }

    /// Whether a frame could not be read.
    pub fn has_fault(&self) -> bool {
        // Without a failure, the usual case, no lock is taken. The lane, which sets both, sees them in order.
        self.failure.get().is_some()
            && self.state.lock().unwrap_or_else(PoisonError::into_inner).fault_at.is_some()
    }

    /// Why the stream cannot go on.
    pub fn failure(&self) -> Option<&Error> {
        self.failure.get()
    }

    /// Takes the refusals that are durable, copies the frontiers.
    pub fn take(&self) -> Progress {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let durable_next = state.durable_next;
        let (refusals, early) = std::mem::take(&mut state.refusals)
            .into_iter()
            .partition(|refusal| refusal.offset < durable_next);
        state.refusals = early;
        let taken = Progress { refusals, ..*state };
        state.handoff = None;
        drop(state);
        if !taken.refusals.is_empty() {
            self.moved.notify_waiters();
        }
        taken
    }

    /// Resolves when all before `next` is durable, or before the fault where there is one before `next`.
    /// Answers that offset: all before it is in the log, and nothing else will be.
    pub async fn settled(&self, next: u64) -> u64 {
        loop {
            let moved = self.moved.notified();
            if let Some(end) = self.settled_at(next) {
                return end;
            }
            moved.await;
        }
    }

    /// As `settled`, without waiting: None while something is in flight.
    pub fn settled_at(&self, next: u64) -> Option<u64> {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let end = next.min(state.fault_at.unwrap_or(u64::MAX));
        (state.durable_next >= end).then_some(end)
    }

    /// Resolves when something has changed since the last time. For one waiter.
    pub async fn changed(&self) {
        self.changed.notified().await;
    }
}
