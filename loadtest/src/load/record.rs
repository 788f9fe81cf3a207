//! What is counted and timed while load runs: of each load as a whole, and by the second.
//!
//! Latencies count from the moment at which a message was due, whenever it was sent, and stand at the second in which it was
//! due: so a time in which nothing could be sent shows as what it was to those who wanted to send.
//!
//! *Owns*: the counters and histograms.
//! *Does not own*: when something is due (`source`), how figures look (`report`).

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hdrhistogram::Histogram;

/// Latencies above are counted as this.
const LATENCY_US_MAX: u64 = 600_000_000;
/// So many points in time at most, so that a run of hours fits into memory too.
const SLOTS_MAX: u64 = 900;

/// Counts of one load, all of them since its beginning.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    /// Records that were due.
    pub(crate) due: u64,
    pub(crate) sent: u64,
    pub(crate) sent_bytes: u64,
    pub(crate) durable: u64,
    pub(crate) durable_bytes: u64,
    pub(crate) committed: u64,
    pub(crate) committed_bytes: u64,
    pub(crate) rejected: u64,
    /// Records that were sent again on another stream after a lost connection: they may be there twice.
    pub(crate) doubtful: u64,
    /// Records that are durable, and whose commit was not told.
    pub(crate) untold: u64,
    pub(crate) opened: u64,
    pub(crate) reconnects: u64,
    pub(crate) errors: u64,
}

/// A second, or some.
#[derive(Debug, Clone, Default)]
pub(crate) struct Slot {
    pub(crate) due: u64,
    pub(crate) sent: u64,
    pub(crate) durable: u64,
    pub(crate) durable_bytes: u64,
    pub(crate) committed: u64,
    /// Of what was due in this time, µs.
    pub(crate) ack: Option<Histogram<u32>>,
    pub(crate) committed_after: Option<Histogram<u32>>,
    /// The most that something was sent late in this time, µs.
    pub(crate) late_us_max: u64,
}

/// One load's.
#[derive(Debug)]
pub(crate) struct Record {
    pub(crate) counts: Counts,
    /// From due to durable, µs.
    pub(crate) ack: Histogram<u64>,
    /// From due to in the table, µs.
    pub(crate) committed: Histogram<u64>,
    /// From due to sent, µs.
    pub(crate) late: Histogram<u64>,
    /// The part of it that is the rig's own: it could have sent, and had not come to it.
    pub(crate) own_late: Histogram<u64>,
    pub(crate) slots: Vec<Slot>,
    /// When something was last told to be durable,
    pub(crate) durable_at: Duration,
    /// and to be in the table.
    pub(crate) committed_at: Duration,
    /// The first errors, and how often each came.
    pub(crate) errors: Vec<(String, u64)>,
}

/// Those of all loads.
#[derive(Debug)]
pub(crate) struct Recorder {
    loads: Vec<Mutex<Record>>,
    pub(crate) slot: Duration,
}

/// Different errors that are kept.
const ERRORS_MAX: usize = 20;

fn whole() -> Histogram<u64> {
    Histogram::new_with_bounds(1, LATENCY_US_MAX, 3).expect("constants that fit")
}

fn part() -> Histogram<u32> {
    Histogram::new_with_bounds(1, LATENCY_US_MAX, 2).expect("constants that fit")
}

impl Recorder {
    /// For so many loads over about this time.
    pub(crate) fn new(loads: usize, lasts: Duration) -> Self {
        let slot = Duration::from_secs(lasts.as_secs().div_ceil(SLOTS_MAX).max(1));
        let one = || {
            Mutex::new(Record {
                counts: Counts::default(),
                ack: whole(),
                committed: whole(),
                late: whole(),
                own_late: whole(),
                slots: Vec::new(),
                durable_at: Duration::ZERO,
                committed_at: Duration::ZERO,
                errors: Vec::new(),
            })
        };
        Self { loads: (0..loads).map(|_| one()).collect(), slot }
    }

    /// One load's.
    pub(crate) fn load(&self, number: usize) -> MutexGuard<'_, Record> {
        self.loads[number].lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn loads(&self) -> usize {
        self.loads.len()
    }

    /// The counts of all loads together.
    pub(crate) fn counts(&self) -> Counts {
        (0..self.loads.len()).map(|number| self.load(number).counts).fold(Counts::default(), Counts::plus)
    }

    fn slot_of(&self, at: Duration) -> usize {
        usize::try_from(at.as_micros() / self.slot.as_micros())
            .unwrap_or(usize::MAX)
            .min(SLOTS_MAX as usize * 2)
    }

    /// A message has gone out `at`, of so many records and bytes; it could have gone at `could`.
    pub(crate) fn sent(&self, load: usize, sent: Sent) {
        let (slot, due_slot) = (self.slot_of(sent.at), self.slot_of(sent.due));
        let late = micros(sent.at.saturating_sub(sent.due));
        let mut record = self.load(load);
        record.counts.due += sent.rows;
        record.counts.sent += sent.rows;
        record.counts.sent_bytes += sent.bytes;
        record.late.saturating_record(late);
        record.own_late.saturating_record(micros(sent.at.saturating_sub(sent.could)));
        record.slot(due_slot).due += sent.rows;
        let slot = record.slot(slot);
        slot.sent += sent.rows;
        slot.late_us_max = slot.late_us_max.max(late);
    }

    /// A message that was due, and could not be sent before it all ended, at `at`: it was waited for so long at least.
    pub(crate) fn unsent(
        &self,
        load: usize,
        at: Duration,
        (due, rows): (Duration, u64),
        tells_commits: bool,
    ) {
        let slot = self.slot_of(due);
        let mut record = self.load(load);
        record.counts.due += rows;
        record.slot(slot).due += rows;
        record.never(slot, micros(at.saturating_sub(due)), tells_commits);
    }

    /// Messages that were sent, and were waited for in vain until `at`.
    pub(crate) fn unacked(
        &self,
        load: usize,
        at: Duration,
        dues: impl Iterator<Item = Duration>,
        tells_commits: bool,
    ) {
        let mut record = self.load(load);
        for due in dues {
            record.never(self.slot_of(due), micros(at.saturating_sub(due)), tells_commits);
        }
    }

    /// Counts in one go whatever an answer covers.
    pub(crate) fn told(&self, load: usize, at: Duration, covered: impl Iterator<Item = Covered>) {
        let slot = self.slot_of(at);
        let mut record = self.load(load);
        for one in covered {
            let (after, due_slot) = (micros(at.saturating_sub(one.due)), self.slot_of(one.due));
            if one.is_commit {
                record.committed_at = record.committed_at.max(at);
                record.counts.committed += one.rows;
                record.counts.committed_bytes += one.bytes;
                record.slot(slot).committed += one.rows;
                record.committed_after(due_slot, after);
            } else {
                record.durable_at = record.durable_at.max(at);
                record.counts.durable += one.rows;
                record.counts.durable_bytes += one.bytes;
                let slot = record.slot(slot);
                slot.durable += one.rows;
                slot.durable_bytes += one.bytes;
                record.acked_after(due_slot, after);
            }
        }
    }

    /// Durable records whose commit was waited for in vain, until `at`: it took at least so long.
    pub(crate) fn untold(&self, load: usize, at: Duration, waited_for: impl Iterator<Item = Covered>) {
        let mut record = self.load(load);
        for one in waited_for {
            let (waited, due_slot) = (micros(at.saturating_sub(one.due)), self.slot_of(one.due));
            record.counts.untold += one.rows;
            record.committed_after(due_slot, waited);
        }
    }

    /// When something was last told.
    pub(crate) fn told_at(&self) -> Duration {
        let last = (0..self.loads.len()).map(|number| {
            let record = self.load(number);
            record.durable_at.max(record.committed_at)
        });
        last.max().unwrap_or_default()
    }

    /// Something went wrong.
    pub(crate) fn error(&self, load: usize, what: String) {
        let mut record = self.load(load);
        record.counts.errors += 1;
        if let Some(known) = record.errors.iter_mut().find(|known| known.0 == what) {
            known.1 += 1;
        } else if record.errors.len() < ERRORS_MAX {
            record.errors.push((what, 1));
        }
    }
}

/// A message that has gone out; times since the load's beginning.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sent {
    pub(crate) at: Duration,
    pub(crate) due: Duration,
    /// When nothing but the rig itself stood in the way.
    pub(crate) could: Duration,
    pub(crate) rows: u64,
    pub(crate) bytes: u64,
}

/// A message that an answer covers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Covered {
    pub(crate) due: Duration,
    pub(crate) rows: u64,
    pub(crate) bytes: u64,
    pub(crate) is_commit: bool,
}

impl Record {
    /// Of a message that was due in this slot neither ack nor commit has come for so long.
    fn never(&mut self, due_slot: usize, waited_us: u64, tells_commits: bool) {
        self.acked_after(due_slot, waited_us);
        if tells_commits {
            self.committed_after(due_slot, waited_us);
        }
    }

    fn acked_after(&mut self, due_slot: usize, us: u64) {
        self.ack.saturating_record(us);
        self.slot(due_slot).ack.get_or_insert_with(part).saturating_record(us);
    }

    fn committed_after(&mut self, due_slot: usize, us: u64) {
        self.committed.saturating_record(us);
        self.slot(due_slot).committed_after.get_or_insert_with(part).saturating_record(us);
    }

    fn slot(&mut self, at: usize) -> &mut Slot {
        if self.slots.len() <= at {
            self.slots.resize_with(at + 1, Slot::default);
        }
        &mut self.slots[at]
    }
}

impl Counts {
    pub(crate) fn plus(self, other: Self) -> Self {
        Self {
            due: self.due + other.due,
            sent: self.sent + other.sent,
            sent_bytes: self.sent_bytes + other.sent_bytes,
            durable: self.durable + other.durable,
            durable_bytes: self.durable_bytes + other.durable_bytes,
            committed: self.committed + other.committed,
            committed_bytes: self.committed_bytes + other.committed_bytes,
            rejected: self.rejected + other.rejected,
            doubtful: self.doubtful + other.doubtful,
            untold: self.untold + other.untold,
            opened: self.opened + other.opened,
            reconnects: self.reconnects + other.reconnects,
            errors: self.errors + other.errors,
        }
    }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn a_latency_counts_from_when_it_was_due_and_stands_there() {
        let recorder = Recorder::new(1, Duration::from_secs(10));
        // Due in second 0, sent in second 2 because nothing could be sent before, durable in second 3.
        let (due, at) = (500 * MS, 2_600 * MS);
        recorder.sent(0, Sent { at, due, could: 2_599 * MS, rows: 10, bytes: 100 });
        let covered = Covered { due, rows: 10, bytes: 100, is_commit: false };
        recorder.told(0, 3_500 * MS, std::iter::once(covered));
        let record = recorder.load(0);
        assert_eq!(record.slots.iter().map(|slot| slot.due).collect::<Vec<_>>(), [10, 0, 0, 0]);
        assert_eq!(record.slots.iter().map(|slot| slot.sent).collect::<Vec<_>>(), [0, 0, 10, 0]);
        assert_eq!(record.slots.iter().map(|slot| slot.durable).collect::<Vec<_>>(), [0, 0, 0, 10]);
        assert!(record.slots[0].ack.is_some() && record.slots[3].ack.is_none());
        assert!((2_990_000..3_010_000).contains(&record.ack.value_at_quantile(0.5)));
        assert!((2_090_000..2_110_000).contains(&record.late.value_at_quantile(0.5)));
        assert!((990..1_010).contains(&record.own_late.value_at_quantile(0.5)));
    }

    #[test]
    fn a_commit_that_is_not_told_took_as_long_as_was_waited() {
        let recorder = Recorder::new(1, Duration::from_secs(10));
        let covered = |due| Covered { due, rows: 10, bytes: 100, is_commit: true };
        recorder.told(0, 1_500 * MS, std::iter::once(covered(500 * MS)));
        recorder.untold(0, 70_000 * MS, [covered(2_000 * MS), covered(3_000 * MS)].into_iter());
        let record = recorder.load(0);
        assert_eq!((record.counts.committed, record.counts.untold), (10, 20));
        assert!((66_900_000..67_100_000).contains(&record.committed.value_at_quantile(0.5)));
        assert!(record.slots[2].committed_after.is_some() && record.slots[3].committed_after.is_some());
        assert_eq!(record.committed_at, 1_500 * MS);
    }

    #[test]
    fn what_is_never_acked_took_as_long_as_was_waited() {
        let recorder = Recorder::new(1, Duration::from_secs(10));
        let covered = Covered { due: 500 * MS, rows: 10, bytes: 100, is_commit: false };
        recorder.told(0, 501 * MS, std::iter::once(covered));
        recorder.unacked(0, 70_000 * MS, std::iter::once(2_000 * MS), true);
        recorder.unsent(0, 70_000 * MS, (3_000 * MS, 10), true);
        recorder.unsent(0, 70_000 * MS, (4_000 * MS, 10), false);
        let record = recorder.load(0);
        assert_eq!((record.ack.len(), record.committed.len(), record.counts.due), (4, 2, 20));
        assert!((65_900_000..66_100_000).contains(&record.ack.value_at_quantile(0.5)), "{:?}", record.ack);
        let stalled = |slot: usize| record.slots[slot].ack.as_ref().map(|ack| ack.max() > 60_000_000);
        assert_eq!([0, 2, 3, 4].map(stalled), [Some(false), Some(true), Some(true), Some(true)]);
    }

    #[test]
    fn a_long_run_has_slots_of_more_than_a_second() {
        let recorder = Recorder::new(1, Duration::from_secs(7200));
        assert_eq!(recorder.slot, Duration::from_secs(8));
        for _ in 0..3 {
            recorder.error(0, "x".to_owned());
        }
        assert_eq!(recorder.load(0).errors, [("x".to_owned(), 3)]);
    }
}
