//! What `sluice send` shows while it works: a progress bar, or plain lines where there is no terminal.
//!
//! *Owns*: counting across streams, drawing on standard error.
//! *Does not own*: the final summary.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use sluice_client::{Progress, Reconnecting, Rejected};
use tokio::time::Instant;

use crate::print;

/// Rejected records that are named; more are counted.
pub(crate) const REJECTED_SHOWN_MAX: usize = 20;
const DRAW_INTERVAL: Duration = Duration::from_millis(200);
const LINE_INTERVAL: Duration = Duration::from_secs(3);

/// Counts of all streams of a run.
#[derive(Default)]
pub(crate) struct Counts {
    records: AtomicU64,
    bytes: AtomicU64,
    streams: Mutex<Vec<(u64, Progress)>>,
    rejected: Mutex<Rejects>,
}

/// Rejected records.
#[derive(Default, Clone)]
pub(crate) struct Rejects {
    pub(crate) count: u64,
    /// The first of them.
    pub(crate) first: Vec<Refusal>,
}

/// A rejected record.
#[derive(Debug, Clone)]
pub(crate) struct Refusal {
    /// Where it stands in the input.
    pub(crate) place: String,
    /// Why it was rejected.
    pub(crate) rejected: Rejected,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Rejected { column, message, quarantined, .. } = &self.rejected;
        let column = column.as_ref().map_or_else(String::new, |column| format!(", column {column}"));
        let kept = if *quarantined { "; it is in the table's __rejected" } else { "" };
        write!(f, "rejected: {}{column}: {message}{kept}", self.place)
    }
}

impl Counts {
    /// Adds a stream whose first record has offset `first`.
    pub(crate) fn add_stream(&self, first: u64, progress: Progress) {
        self.streams.lock().unwrap_or_else(PoisonError::into_inner).push((first, progress));
    }

    pub(crate) fn add(&self, records: u64, bytes: u64) {
        self.records.fetch_add(records, Ordering::Relaxed);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn reject(&self, refusal: Refusal) {
        let mut rejects = self.rejected.lock().unwrap_or_else(PoisonError::into_inner);
        rejects.count += 1;
        if rejects.first.len() < REJECTED_SHOWN_MAX {
            rejects.first.push(refusal);
        }
    }

    pub(crate) fn records(&self) -> u64 {
        self.records.load(Ordering::Relaxed)
    }

    pub(crate) fn rejects(&self) -> Rejects {
        self.rejected.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn line(&self, elapsed: Duration) -> String {
        let (mut durable, mut committed) = (0, 0);
        let mut outages = Vec::new();
        for (first, progress) in self.streams.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            let from_first =
                |offset: Option<u64>| offset.map_or(0, |offset| (offset + 1).saturating_sub(*first));
            durable += from_first(progress.durable());
            committed += from_first(progress.committed().map(|committed| committed.offset));
            outages.extend(progress.reconnecting());
        }
        let megabytes = self.bytes.load(Ordering::Relaxed) as f64 / 1e6;
        let rate = megabytes / elapsed.as_secs_f64().max(0.001);
        let rejected = self.rejected.lock().unwrap_or_else(PoisonError::into_inner).count;
        let rejected = if rejected > 0 { format!(", {rejected} rejected") } else { String::new() };
        format!(
            "{} records sent, {rate:.1} MB/s, {durable} durable, {committed} committed{rejected}{}",
            self.records(),
            outage_text(&outages)
        )
    }
}

/// What is said of streams that have no connection: of the one that gives up first.
fn outage_text(outages: &[Reconnecting]) -> String {
    let Some(first) = outages.iter().min_by_key(|outage| outage.gives_up_in) else { return String::new() };
    let streams = if outages.len() > 1 { format!(" of {} streams", outages.len()) } else { String::new() };
    format!(
        "; connection{streams} lost for {} s, trying again, giving up in {} s: {}",
        first.lasts.as_secs(),
        first.gives_up_in.as_secs(),
        first.last
    )
}

/// Shows the counts until it is dropped.
pub(crate) async fn show(counts: Arc<Counts>) {
    let bar = ProgressBar::new_spinner();
    bar.set_style(ProgressStyle::default_spinner());
    let started = Instant::now();
    let is_terminal = !bar.is_hidden();
    let mut ticks = tokio::time::interval(if is_terminal { DRAW_INTERVAL } else { LINE_INTERVAL });
    ticks.tick().await;
    loop {
        ticks.tick().await;
        let line = counts.line(started.elapsed());
        if is_terminal {
            bar.set_message(line);
            bar.tick();
        } else {
            print::note(line);
        }
    }
}
