//! Whether a pod takes a frame now, and whether it takes a new stream at all.
//!
//! *Owns*: the ingress budget, in bytes of frames that are accepted but not yet durable.
//! *Does not own*: the order of frames (`stream::gate`), the memory of durable batches (`table`).
//! Keeps P7: waiting for a permit is the back-pressure; permits are served in the order they were asked for (P9).

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use sluice_shared::error::Error;
use sluice_shared::ids::PodId;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::wal::Wal;

/// Budget is counted in units of this many bytes, so that it fits the semaphore.
const UNIT_BYTES: usize = 1024;
/// What a record may cost beside its payload: room for its refusal.
const RECORD_BYTES: usize = 200;
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
}

impl Admission {
    /// A budget of `ingress_bytes`.
    pub fn new(pod: PodId, wal: Wal, ingress_bytes: usize) -> Self {
        let units_max = (ingress_bytes / UNIT_BYTES).clamp(1, Semaphore::MAX_PERMITS.min(u32::MAX as usize));
        Self { pod, wal, units: Arc::new(Semaphore::new(units_max)), units_max, refused: Arc::default() }
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

    /// Waits for the budget of a frame of `records` records and `payload_bytes`. One that is larger than the whole budget
    /// takes all of it.
    pub async fn admit(&self, payload_bytes: usize, records: u32) -> Permit {
        let bytes = (records as usize).saturating_mul(RECORD_BYTES).saturating_add(payload_bytes);
        let units = bytes.div_ceil(UNIT_BYTES).clamp(1, self.units_max);
        let units = u32::try_from(units).expect("clamped to u32");
        let units = Arc::clone(&self.units).acquire_many_owned(units).await;
        Permit { _units: units.expect("the semaphore is never closed") }
    }
}
