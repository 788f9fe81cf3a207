//! The streams of this gateway, for people: where each one is, and how far it has come.
//!
//! *Owns*: the list, the streams' traffic.
//! *Does not own*: the streams (`session`), which say what is shown of them.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use sluice_shared::ids::{PodId, StreamId, StreamName, TableName};
use sluice_shared::lifecycle::TaskScope;
use tokio::time::Instant;

use crate::session::Window;
use crate::upstream::OpenTerms;

/// How often the traffic is looked at.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);
/// How much one look changes a stream's traffic.
const RATE_STEP: f64 = 0.3;

/// What is shown of one stream.
pub(crate) struct StreamInfo {
    pub(crate) stream: StreamId,
    pub(crate) table: TableName,
    pub(crate) name: Option<StreamName>,
    opened: Instant,
    pod: Mutex<PodId>,
    /// How often it has gone on at another pod.
    moves: AtomicU32,
    next_offset: AtomicU64,
    durable_next: AtomicU64,
    window_bytes: AtomicU64,
    /// Payload bytes that were taken from its producer.
    taken: AtomicU64,
    /// How many those were at the last look.
    looked: AtomicU64,
    bytes_per_s: AtomicU64,
}

impl StreamInfo {
    pub(crate) fn pod(&self) -> PodId {
        self.pod.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn to_json(&self) -> serde_json::Value {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        serde_json::json!({
            "stream": self.stream,
            "table": self.table,
            "name": self.name,
            "pod": self.pod(),
            "bytes_per_s": count(&self.bytes_per_s),
            "open_for_ms": u64::try_from(self.opened.elapsed().as_millis()).unwrap_or(u64::MAX),
            "moves": self.moves.load(Ordering::Relaxed),
            "next_offset": count(&self.next_offset),
            "durable_next": count(&self.durable_next),
            "window_bytes": count(&self.window_bytes),
        })
    }
}

/// All streams of a gateway.
#[derive(Default)]
pub(crate) struct Streams {
    open: Arc<Mutex<Open>>,
}

#[derive(Default)]
struct Open {
    next: u64,
    streams: HashMap<u64, Arc<StreamInfo>>,
}

impl Streams {
    fn open(&self) -> MutexGuard<'_, Open> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Shows a stream for as long as the answer lives.
    pub(crate) fn show(&self, terms: &OpenTerms, stream: &StreamId, pod: &PodId) -> Shown {
        let info = Arc::new(StreamInfo {
            stream: stream.clone(),
            table: terms.table.clone(),
            name: terms.name.clone(),
            opened: Instant::now(),
            pod: Mutex::new(pod.clone()),
            moves: AtomicU32::new(0),
            next_offset: AtomicU64::new(0),
            durable_next: AtomicU64::new(0),
            window_bytes: AtomicU64::new(0),
            taken: AtomicU64::new(0),
            looked: AtomicU64::new(0),
            bytes_per_s: AtomicU64::new(0),
        });
        let mut open = self.open();
        let number = open.next;
        open.next += 1;
        open.streams.insert(number, Arc::clone(&info));
        drop(open);
        Shown { info, open: Arc::clone(&self.open), number }
    }

    /// All of them, the oldest first.
    pub(crate) fn all(&self) -> Vec<Arc<StreamInfo>> {
        let mut streams: Vec<_> =
            self.open().streams.iter().map(|(number, info)| (*number, Arc::clone(info))).collect();
        streams.sort_by_key(|(number, _)| *number);
        streams.into_iter().map(|(_, info)| info).collect()
    }

    /// Looks at their traffic from time to time, until the end of `scope`.
    pub(crate) async fn look(&self, scope: &TaskScope) {
        loop {
            tokio::select! {
                biased; // the end first
                () = scope.cancelled() => return,
                () = tokio::time::sleep(LOOK_INTERVAL) => {}
            }
            for stream in self.all() {
                let taken = stream.taken.load(Ordering::Relaxed);
                let now = taken.saturating_sub(stream.looked.swap(taken, Ordering::Relaxed)) as f64;
                let before = stream.bytes_per_s.load(Ordering::Relaxed) as f64;
                let rate = before + (now / LOOK_INTERVAL.as_secs_f64() - before) * RATE_STEP;
                stream.bytes_per_s.store(rate as u64, Ordering::Relaxed);
            }
        }
    }
}

/// A stream that is shown until this is dropped.
pub(crate) struct Shown {
    info: Arc<StreamInfo>,
    open: Arc<Mutex<Open>>,
    number: u64,
}

impl Shown {
    /// How far it has come, and how many bytes its producer has sent since it was shown last.
    pub(crate) fn reached(&self, window: &Window, taken: u64) {
        self.info.taken.fetch_add(taken, Ordering::Relaxed);
        self.info.next_offset.store(window.next_offset(), Ordering::Relaxed);
        self.info.durable_next.store(window.first_held(), Ordering::Relaxed);
        self.info.window_bytes.store(window.bytes() as u64, Ordering::Relaxed);
    }

    /// What it has been seen to send, in bytes per second; None where that is nothing.
    pub(crate) fn rate(&self) -> Option<u64> {
        Some(self.info.bytes_per_s.load(Ordering::Relaxed)).filter(|rate| *rate > 0)
    }

    /// It goes on at this pod.
    pub(crate) fn is_at(&self, pod: &PodId) {
        let mut at = self.info.pod.lock().unwrap_or_else(PoisonError::into_inner);
        if *at != *pod {
            at.clone_from(pod);
            self.info.moves.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl Drop for Shown {
    fn drop(&mut self) {
        self.open.lock().unwrap_or_else(PoisonError::into_inner).streams.remove(&self.number);
    }
}
