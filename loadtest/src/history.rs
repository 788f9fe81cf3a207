//! What a run of producers saw: each record that was sent, each answer that was given.
//!
//! *Owns*: the notes, one set a stream; its producer alone writes them.
//! *Does not own*: the verdict (`auditor`).

use std::collections::BTreeSet;

/// `committed: next - 1, version` was said.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Promise {
    /// All records before this offset,
    pub next: u64,
    /// can be read in this version of the table and in all later ones.
    pub version: u64,
}

/// One stream's notes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct StreamHistory {
    /// The stream's id, as it stands in `_stream`.
    pub stream: String,
    /// Hash of each record's content, by offset.
    pub sent: Vec<u64>,
    /// Records before this offset were said to be durable.
    pub durable_next: u64,
    /// By rising offset and version.
    pub committed: Vec<Promise>,
    /// Records that were said to be refused.
    pub rejected: BTreeSet<u64>,
}

impl StreamHistory {
    /// Records were sent, at the next offsets.
    pub fn sent(&mut self, hashes: &[u64]) {
        self.sent.extend_from_slice(hashes);
    }

    /// Records before `next` are durable.
    pub fn durable(&mut self, next: u64) {
        self.durable_next = self.durable_next.max(next);
    }

    /// Records before `next` are in the table. Told again and again: only what is new is noted.
    pub fn committed(&mut self, next: u64, version: u64) {
        let promise = Promise { next, version };
        if next > 0 && self.committed.last().is_none_or(|last| *last != promise) {
            self.committed.push(promise);
        }
        self.durable(next);
    }
}

/// All streams into one table.
#[derive(Debug, Clone, Default)]
pub struct History {
    /// Each stream once.
    pub streams: Vec<StreamHistory>,
}

impl History {
    /// Records that were sent.
    pub fn sent(&self) -> u64 {
        self.streams.iter().map(|stream| stream.sent.len() as u64).sum()
    }

    /// Records that were refused.
    pub fn rejected(&self) -> u64 {
        self.streams.iter().map(|stream| stream.rejected.len() as u64).sum()
    }
}
