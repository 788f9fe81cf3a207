//! Whether a pod takes a frame now, and whether it takes a new stream at all.
//!
//! *Owns*: the ingress budget, in bytes of frames that are accepted but not yet durable; how many bytes a second get in.
//! *Does not own*: the order of frames (`stream::gate`), the memory of durable batches (`table`).
//! Keeps P7: waiting for a permit is the back-pressure; permits are served in the order they were asked for (P9).

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use sluice_shared::error::Error;
use sluice_shared::ids::PodId;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, sleep_until};

use crate::wal::Wal;

/// Budget is counted in units of this many bytes, so that it fits the semaphore.
const UNIT_BYTES: usize = 1024;
/// What a record may cost beside its payload: room for its refusal.
const RECORD_BYTES: usize = 200;
/// A pod that was idle for a moment makes up for it, so that its rate is not lost to the gaps between frames.
const RATE_SLACK: Duration = Duration::from_millis(100);
const RETRY_AFTER_FULL: Duration = Duration::from_secs(2);

/// Bytes of the ingress budget, held until the frame is durable.
#[must_use = "dropping a permit gives its bytes back"]
#[derive(Debug)]
pub struct Permit {
    _units: OwnedSemaphorePermit,
}

/// The pod's ingress budget.
#[derive(Clone)]
pub struct Admission {
    pod: PodId,
    wal: Wal,
    units: Arc<Semaphore>,
    units_max: usize,
    refused: Arc<AtomicU64>,
    /// Payload bytes that were let in, since the pod's start.
    admitted: Arc<AtomicU64>,
    rate: Option<Rate>,
}

/// Frames pass as if each took its length over the rate, one after the other, in the order in which they came.
#[derive(Clone)]
struct Rate {
    bytes_per_s: f64,
    /// When the frames that were let in will have passed.
    free: Arc<Mutex<Instant>>,
}

impl Admission {
    /// A budget of `ingress_bytes`; no more than `bytes_per_s_max`, where that is given, get in.
    pub fn new(pod: PodId, wal: Wal, ingress_bytes: usize, bytes_per_s_max: Option<u64>) -> Self {
        let units_max = (ingress_bytes / UNIT_BYTES).clamp(1, Semaphore::MAX_PERMITS.min(u32::MAX as usize));
        let units = Arc::new(Semaphore::new(units_max));
        let rate = bytes_per_s_max.map(Rate::new);
        Self { pod, wal, units, units_max, refused: Arc::default(), admitted: Arc::default(), rate }
    }

    /// Whether a new stream may open here.
    ///
    /// # Errors
    /// `Busy` while the log's disk is full.
    pub fn check_open(&self) -> Result<(), Error> {
        if !self.wal.status().full {
            return Ok(());
        }
        self.refused.fetch_add(1, Ordering::Relaxed);
        let message = format!(
            "pod {} takes no new streams: its write-ahead log is full and nothing can be trimmed yet; \
             make room on its disk or wait for its tables to commit",
            self.pod
        );
        Err(Error::busy("wal_full", message, RETRY_AFTER_FULL))
    }

    /// How much of the budget is in use, in bytes, and how much there is.
    pub fn used(&self) -> (u64, u64) {
        let used = self.units_max.saturating_sub(self.units.available_permits());
        ((used * UNIT_BYTES) as u64, (self.units_max * UNIT_BYTES) as u64)
    }

    /// Opens that were refused, since the pod's start.
    pub fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }

    /// Payload bytes that were let in, since the pod's start.
    pub fn admitted(&self) -> u64 {
        self.admitted.load(Ordering::Relaxed)
    }

    /// Waits for its turn and for the budget of a frame of `records` records and `payload_bytes`. One that is larger than
    /// the whole budget takes all of it.
    pub async fn admit(&self, payload_bytes: usize, records: u32) -> Permit {
        // First the turn: what only waits for that must not look like a log that is slow.
        if let Some(rate) = &self.rate {
            rate.turn(payload_bytes).await;
        }
        let bytes = (records as usize).saturating_mul(RECORD_BYTES).saturating_add(payload_bytes);
        let units = bytes.div_ceil(UNIT_BYTES).clamp(1, self.units_max);
        let units = u32::try_from(units).expect("clamped to u32");
        let units = Arc::clone(&self.units).acquire_many_owned(units).await;
        self.admitted.fetch_add(payload_bytes as u64, Ordering::Relaxed);
        Permit { _units: units.expect("the semaphore is never closed") }
    }
}

impl Rate {
    fn new(bytes_per_s: u64) -> Self {
        Self { bytes_per_s: bytes_per_s.max(1) as f64, free: Arc::new(Mutex::new(Instant::now())) }
    }

    /// Waits until the frames before this one have passed.
    async fn turn(&self, bytes: usize) {
        let begin = self.begin(bytes, Instant::now());
        sleep_until(begin).await;
    }

    /// When a frame that came at `now` may pass.
    fn begin(&self, bytes: usize, now: Instant) -> Instant {
        let lasts = Duration::from_secs_f64(bytes as f64 / self.bytes_per_s);
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let begin = (*free).max(now.checked_sub(RATE_SLACK).unwrap_or(now));
        *free = begin + lasts;
        begin
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_than_the_rate_gets_in_and_idleness_is_no_credit() {
        let (rate, began) = (Rate::new(1000), Instant::now());
        let last = |frames: usize, now: Instant| {
            let begins: Vec<Instant> = (0..frames).map(|_| rate.begin(100, now)).collect();
            begins.last().expect("some").saturating_duration_since(now)
        };
        // The last of them begins when those before have passed: 2,000 bytes in 2 s, give or take the slack.
        assert!((1900..=2000).contains(&last(21, began).as_millis()));
        let later = last(21, began + Duration::from_secs(60));
        assert!((1900..=2000).contains(&later.as_millis()), "a minute of idleness is no credit: {later:?}");
    }
}
