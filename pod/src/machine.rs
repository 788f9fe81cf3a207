//! What a pod takes from the machine that it runs on; a simulation has another one.
//!
//! *Owns*: the list of these things, and what they are in earnest.
//! *Does not own*: what is done with them; threads (`sluice_shared::lifecycle::is_on_one_thread`).

use std::sync::Arc;
use std::time::Duration;

use sluice_shared::ids::PodId;
use sluice_shared::lifecycle::TaskScope;

use crate::load::processor_time;
use crate::table::Stores;
use crate::wal::stepped::Pace;
use crate::wal::{Replay, Wal, WalConfig, WalError};

/// Exit status of a process whose log has failed.
const EXIT_LOG_FAILED: i32 = 74;
/// And of one whose log another pod has taken over.
const EXIT_FENCED: i32 = 75;

/// A machine.
#[derive(Clone)]
pub struct Machine {
    /// Where tables are stored.
    pub stores: Stores,
    /// Tells the processor time that the pod has used.
    pub processor_time: fn() -> Duration,
    /// The disk that the log is on; None for one that threads write.
    pub log_pace: Option<Pace>,
    /// Ends the pod at once, with this status: its log has failed, or it cannot be in its pool.
    pub end: Arc<dyn Fn(i32) + Send + Sync>,
}

impl Machine {
    /// The one that this process runs on.
    pub fn this() -> Self {
        Self {
            stores: Stores::disk(),
            processor_time,
            log_pace: None,
            end: Arc::new(|status| std::process::exit(status)),
        }
    }

    /// What is done when the log of `pod` fails.
    pub fn on_failure(&self, pod: PodId) -> Box<dyn Fn(&WalError) + Send + Sync> {
        let end = Arc::clone(&self.end);
        Box::new(move |error| {
            let status = if matches!(error, WalError::Fenced { .. }) { EXIT_FENCED } else { EXIT_LOG_FAILED };
            tracing::error!(%pod, %error, status, "nothing can be acked any more: the process ends");
            end(status);
        })
    }

    /// Opens a log on the disk. Blocks.
    ///
    /// # Errors
    /// As `Wal::open`.
    pub fn open_log(&self, config: WalConfig, scope: &TaskScope) -> Result<(Wal, Replay), WalError> {
        let on_failure = self.on_failure(config.owner.clone());
        match &self.log_pace {
            None => Wal::open(config, on_failure),
            Some(pace) => Wal::open_stepped(config, on_failure, pace, scope),
        }
    }
}
