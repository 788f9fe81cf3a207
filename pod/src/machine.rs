//! What a pod takes from the machine that it runs on; a simulation has another one.
//!
//! *Owns*: the list of these things, and what they are in earnest.
//! *Does not own*: what is done with them; threads (`sluice_shared::lifecycle::is_on_one_thread`).

use std::sync::Arc;
use std::time::Duration;

use sluice_shared::lifecycle::TaskScope;

use crate::load::processor_time;
use crate::table::Stores;
use crate::wal::stepped::Pace;
use crate::wal::{Replay, Wal, WalConfig, WalError};

/// Exit status of a process whose log has failed.
const EXIT_LOG_FAILED: i32 = 74;

/// A machine.
#[derive(Clone)]
pub struct Machine {
    /// Where tables are stored.
    pub stores: Stores,
    /// Tells the processor time that the pod has used.
    pub processor_time: fn() -> Duration,
    /// The disk that the log is on; None for one that threads write.
    pub log_pace: Option<Pace>,
    /// Ends the pod at once: its log has failed.
    pub end: Arc<dyn Fn() + Send + Sync>,
}

impl Machine {
    /// The one that this process runs on.
    pub fn this() -> Self {
        Self {
            stores: Stores::disk(),
            processor_time,
            log_pace: None,
            end: Arc::new(|| std::process::exit(EXIT_LOG_FAILED)),
        }
    }

    /// Opens a log. Blocks.
    ///
    /// # Errors
    /// As `Wal::open`.
    pub fn open_log(&self, config: WalConfig, scope: &TaskScope) -> Result<(Wal, Replay), WalError> {
        let (pod, end) = (config.owner.clone(), Arc::clone(&self.end));
        let on_failure = move |error: &WalError| {
            tracing::error!(%pod, %error, "the log has failed: nothing can be acked any more, the process ends");
            end();
        };
        match &self.log_pace {
            None => Wal::open(config, Box::new(on_failure)),
            Some(pace) => Wal::open_stepped(config, Box::new(on_failure), pace, scope),
        }
    }
}
