//! A pod's memory while it works.
//!
//! *Owns*: looking at it each second; clearing data files away meanwhile, where a run is too long for the disk.
//! *Does not own*: the run.

use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime};

use anyhow::Context;

use crate::cluster::resident_bytes_of;

const INTERVAL: Duration = Duration::from_secs(1);
/// A data file that is so old has been committed, or its run has failed.
const CLEARED_AFTER: Duration = Duration::from_secs(60);

/// Looks until it is told to end.
pub(super) struct Watch {
    end: SyncSender<()>,
    thread: JoinHandle<anyhow::Result<Vec<u64>>>,
}

impl Watch {
    /// `cleared`: directories of tables whose data files go when they are old. No reader may come to them.
    pub(super) fn start(pid: u32, cleared: Vec<PathBuf>) -> Self {
        let (end, ended) = sync_channel(1);
        let thread = std::thread::spawn(move || {
            let mut seen = Vec::new();
            while ended.recv_timeout(INTERVAL) == Err(RecvTimeoutError::Timeout) {
                seen.push(resident_bytes_of(pid)?);
                cleared.iter().try_for_each(|table| clear(table))?;
            }
            Ok(seen)
        });
        Self { end, thread }
    }

    /// What was seen.
    ///
    /// # Errors
    /// The process has gone; a file could not be removed.
    pub(super) fn end(self) -> anyhow::Result<Vec<u64>> {
        // It is gone only where it has failed: that is told below.
        let _ = self.end.send(());
        self.thread.join().ok().context("the thread that looks at memory panicked")?
    }
}

fn clear(table: &Path) -> anyhow::Result<()> {
    let is_old = |at: SystemTime| at.elapsed().is_ok_and(|age| age > CLEARED_AFTER);
    for entry in std::fs::read_dir(table).with_context(|| table.display().to_string())? {
        let path = entry?.path();
        let is_data = path.extension().is_some_and(|extension| extension == "parquet");
        if is_data && is_old(path.metadata()?.modified()?) {
            std::fs::remove_file(&path).with_context(|| path.display().to_string())?;
        }
    }
    Ok(())
}
