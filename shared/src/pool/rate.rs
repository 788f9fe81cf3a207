//! A table's traffic over the whole pool, and on how many pods it therefore stands.
//!
//! *Owns*: when a table spreads and when it draws back.
//! *Does not own*: which pods those are (`ring`).

use std::time::{Duration, Instant};

/// Share of one pod that a table may fill before it spreads to the next.
pub(super) const TABLE_SHARE: f64 = 0.10;
/// A table draws back where it fills less than this of what it stands on.
const SHRINK_BELOW: f64 = 0.6;
/// And by one pod in so much time: files get smaller at once when a table spreads, and only slowly larger again.
const SHRINK_PAUSE: Duration = Duration::from_secs(300);

/// What is known of a table's traffic over the whole pool.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct TableRate {
    /// Bytes per second, all streams together.
    pub bytes_per_s: f64,
    /// Streams that are open.
    pub streams: u32,
    /// On how many pods it stands, where there are as many.
    pub spread: usize,
    /// When the spread changed last.
    changed_at: Option<Instant>,
}

impl TableRate {
    /// A table of which only this is known.
    pub fn new(bytes_per_s: f64, streams: u32, capacity_bytes_per_s: f64) -> Self {
        let spread = wanted(pods_filled(bytes_per_s, capacity_bytes_per_s));
        Self { bytes_per_s, streams, spread, changed_at: None }
    }

    /// Lets the spread follow the rate: at once where that grows, slowly where it shrinks.
    pub(super) fn follow(&mut self, capacity_bytes_per_s: f64, now: Instant) {
        let filled = pods_filled(self.bytes_per_s, capacity_bytes_per_s);
        let changed_at = *self.changed_at.get_or_insert(now);
        let wanted = wanted(filled);
        if wanted > self.spread {
            (self.spread, self.changed_at) = (wanted, Some(now));
        } else if wanted < self.spread
            && filled < SHRINK_BELOW * self.spread as f64
            && now.saturating_duration_since(changed_at) >= SHRINK_PAUSE
        {
            (self.spread, self.changed_at) = (self.spread - 1, Some(now));
        }
    }

    /// Whether forgetting it changes nothing. Less than a byte a second is what sums and differences leave behind.
    pub(super) fn is_gone(&self) -> bool {
        self.streams == 0 && self.bytes_per_s < 1.0 && self.spread <= 1
    }
}

fn pods_filled(bytes_per_s: f64, capacity_bytes_per_s: f64) -> f64 {
    bytes_per_s / (TABLE_SHARE * capacity_bytes_per_s)
}

fn wanted(filled: f64) -> usize {
    (filled.ceil() as usize).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rates are in pods that they fill, at a capacity of 10.
    fn spreads(rates: &[(u64, f64)]) -> Vec<usize> {
        let start = Instant::now();
        let mut table = TableRate::default();
        let mut at = |&(seconds, rate): &(u64, f64)| {
            table.bytes_per_s = rate;
            table.follow(10.0, start + Duration::from_secs(seconds));
            table.spread
        };
        rates.iter().map(&mut at).collect()
    }

    #[test]
    fn a_table_spreads_at_once() {
        assert_eq!(spreads(&[(0, 0.0), (1, 0.5), (2, 7.3), (3, 7.5), (4, 20.0)]), [1, 1, 8, 8, 20]);
    }

    #[test]
    fn it_draws_back_by_one_pod_in_five_minutes() {
        assert_eq!(
            spreads(&[(0, 8.0), (299, 1.0), (300, 1.0), (301, 1.0), (599, 1.0), (600, 1.0)]),
            [8, 8, 7, 7, 7, 6]
        );
    }

    #[test]
    fn it_does_not_draw_back_for_a_little_less() {
        assert_eq!(spreads(&[(0, 10.0), (1000, 6.1), (2000, 5.9), (3000, 5.5)]), [10, 10, 9, 9]);
    }

    #[test]
    fn growing_begins_the_pause_anew() {
        assert_eq!(spreads(&[(0, 5.0), (299, 6.0), (598, 1.0), (599, 1.0)]), [5, 6, 6, 5]);
    }
}
