//! What senders have handed over and the stream's task has not yet taken.
//!
//! Small records gather in one open chunk, which the task takes as soon as the connection is idle, or which is
//! sealed when it is large enough: records become few frames under load, and wait for nothing without.
//! The lock is held for the copy of one record; what lies here is bounded by the sender's window.
//!
//! *Owns*: gathering records into chunks, waking the task.
//! *Does not own*: the budget (`stream`), offsets (`window`).

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use bytes::{Bytes, BytesMut};
use sluice_shared::frame::FinishWhen;
use tokio::sync::Notify;

use crate::window::Chunk;

/// An open chunk of this size is sealed.
pub(crate) const CHUNK_BYTES: usize = 64 << 10;

#[derive(Default)]
pub(crate) struct Outbox {
    queue: Mutex<Queue>,
    wake: Notify,
}

#[derive(Default)]
struct Queue {
    sealed: VecDeque<Chunk>,
    open: BytesMut,
    open_records: u32,
    finish: Option<FinishWhen>,
}

/// What may be taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Take {
    /// Only chunks that are as large as they get.
    Sealed,
    /// The open one as well.
    All,
}

impl Outbox {
    /// Adds one record, with its line end.
    pub(crate) fn append(&self, record: &[u8]) {
        let mut queue = self.lock();
        if queue.open.len() + record.len() > CHUNK_BYTES {
            queue.seal();
        }
        if queue.open.capacity() == 0 {
            // Grown by doubling where records are rare, whole where they are many.
            let bytes = if queue.sealed.is_empty() { 1024 } else { CHUNK_BYTES };
            queue.open.reserve(bytes.max(record.len()));
        }
        queue.open.extend_from_slice(record);
        queue.open_records += 1;
        let is_first = queue.open_records == 1;
        drop(queue);
        if is_first {
            self.wake.notify_one();
        }
    }

    /// Adds records that are a frame of their own.
    pub(crate) fn push(&self, chunk: Chunk) {
        let mut queue = self.lock();
        queue.seal();
        queue.sealed.push_back(chunk);
        drop(queue);
        self.wake.notify_one();
    }

    /// No more records.
    pub(crate) fn finish(&self, when: FinishWhen) {
        self.lock().finish = Some(when);
        self.wake.notify_one();
    }

    /// The next chunk.
    pub(crate) fn take(&self, what: Take) -> Option<Chunk> {
        let mut queue = self.lock();
        if queue.sealed.is_empty() && (what == Take::All || queue.finish.is_some()) {
            queue.seal();
        }
        queue.sealed.pop_front()
    }

    /// Whether senders are done, and everything they sent was taken.
    pub(crate) fn finished(&self) -> Option<FinishWhen> {
        let queue = self.lock();
        queue.finish.filter(|_| queue.sealed.is_empty() && queue.open_records == 0)
    }

    /// Resolves when something was added since the last time.
    pub(crate) async fn added(&self) {
        self.wake.notified().await;
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        // Nothing under the lock can leave the queue half changed.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Queue {
    fn seal(&mut self) {
        if self.open_records > 0 {
            let payload: Bytes = std::mem::take(&mut self.open).freeze();
            self.sealed.push_back(Chunk { records: self.open_records, payload });
            self.open_records = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_records_gather_until_taken() {
        let outbox = Outbox::default();
        outbox.append(b"1\n");
        outbox.append(b"2\n");
        assert_eq!(outbox.take(Take::Sealed), None);
        let chunk = outbox.take(Take::All).expect("two records");
        assert_eq!((chunk.records, &chunk.payload[..]), (2, &b"1\n2\n"[..]));
        assert_eq!(outbox.take(Take::All), None);
    }

    #[test]
    fn order_is_kept_between_small_and_large() {
        let outbox = Outbox::default();
        outbox.append(b"1\n");
        outbox.push(Chunk { records: 1, payload: Bytes::from_static(b"2\n") });
        outbox.append(b"3\n");
        outbox.finish(FinishWhen::Durable);
        let taken: Vec<Bytes> = std::iter::from_fn(|| outbox.take(Take::Sealed)).map(|c| c.payload).collect();
        assert_eq!(taken, [&b"1\n"[..], b"2\n", b"3\n"]);
        assert_eq!(outbox.finished(), Some(FinishWhen::Durable));
    }

    #[test]
    fn chunks_are_bounded() {
        let outbox = Outbox::default();
        let record = [b'x'; 1000];
        for _ in 0..200 {
            outbox.append(&record);
        }
        let mut records = 0;
        while let Some(chunk) = outbox.take(Take::All) {
            assert!(chunk.payload.len() <= CHUNK_BYTES);
            records += chunk.records;
        }
        assert_eq!(records, 200);
    }
}
