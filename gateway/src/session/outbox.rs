//! What a session has yet to tell its producer.
//!
//! Acks are cumulative, so of several that wait only the newest is kept: a slow reader costs no memory.
//!
//! *Owns*: the order of what is told: refusals before the ack that covers them.
//! *Does not own*: when there is room to tell it.
//! Keeps P3 and P4 (what is told never goes back) and P8 (each refusal is told once).

use std::collections::{BTreeSet, VecDeque};

use sluice_shared::frame::{Ack, GatewayFrame, Rejected};
use sluice_shared::ids::{TableVersion, last_before};

/// Refusals that may wait. At the limit the session takes no more answers from its pod.
const REFUSALS_WAITING_MAX: usize = 4096;

/// What is to be told.
#[derive(Debug, Default)]
pub(crate) struct Outbox {
    refusals: VecDeque<Rejected>,
    /// Offsets of refusals that no told or waiting ack covers: a replay brings those again.
    refused: BTreeSet<u64>,
    known: Frontiers,
    told: Frontiers,
}

#[derive(Debug, Default, Clone, Copy)]
struct Frontiers {
    durable_next: u64,
    committed_next: u64,
    version: TableVersion,
}

impl Outbox {
    /// For a stream whose first `next_offset` records are known to be durable.
    pub(crate) fn new(next_offset: u64) -> Self {
        let start = Frontiers { durable_next: next_offset, ..Frontiers::default() };
        Self { known: start, told: start, ..Self::default() }
    }

    /// Whether another answer of a pod may be taken in.
    pub(crate) fn has_room(&self) -> bool {
        self.refusals.len() < REFUSALS_WAITING_MAX
    }

    /// A record was refused. Whether that is news.
    pub(crate) fn refuse(&mut self, rejected: Rejected) -> bool {
        let news = rejected.offset >= self.known.durable_next && self.refused.insert(rejected.offset);
        if news {
            self.refusals.push_back(rejected);
        }
        news
    }

    /// All before these offsets is durable, and committed in `version`. Frontiers only rise.
    pub(crate) fn ack(&mut self, durable_next: u64, committed_next: u64, version: TableVersion) {
        if durable_next > self.known.durable_next {
            self.known.durable_next = durable_next;
            self.refused = self.refused.split_off(&durable_next);
        }
        if committed_next > self.known.committed_next {
            (self.known.committed_next, self.known.version) = (committed_next, version);
        }
    }

    /// Takes what is to be told next.
    pub(crate) fn next(&mut self) -> Option<GatewayFrame> {
        if let Some(rejected) = self.refusals.pop_front() {
            return Some(GatewayFrame::Rejected(rejected));
        }
        let durable = (self.known.durable_next > self.told.durable_next)
            .then(|| last_before(self.known.durable_next))
            .flatten();
        let committed = (self.known.committed_next > self.told.committed_next)
            .then(|| last_before(self.known.committed_next))
            .flatten();
        if durable.is_none() && committed.is_none() {
            return None;
        }
        let version = committed.map(|_| self.known.version);
        self.told = self.known;
        Some(GatewayFrame::Ack(Ack { durable, committed, version }))
    }

    /// Whether nothing is to be told.
    pub(crate) fn is_empty(&self) -> bool {
        self.refusals.is_empty()
            && self.known.durable_next == self.told.durable_next
            && self.known.committed_next == self.told.committed_next
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rejected(offset: u64) -> Rejected {
        let (code, message) = ("not_json".to_owned(), "no".to_owned());
        Rejected { offset, code, column: None, message, quarantined: false }
    }

    fn ack(durable: Option<u64>, committed: Option<(u64, u64)>) -> Option<GatewayFrame> {
        let (committed, version) = committed.unzip();
        Some(GatewayFrame::Ack(Ack { durable, committed, version }))
    }

    #[test]
    fn only_the_newest_ack_is_told() {
        let mut outbox = Outbox::new(0);
        outbox.ack(3, 0, 0);
        outbox.ack(9, 4, 7);
        assert_eq!(outbox.next(), ack(Some(8), Some((3, 7))));
        assert_eq!(outbox.next(), None);
        assert!(outbox.is_empty());
    }

    #[test]
    fn acks_never_go_back() {
        let mut outbox = Outbox::new(5);
        outbox.ack(3, 0, 0);
        assert!(outbox.is_empty());
        outbox.ack(8, 6, 2);
        assert_eq!(outbox.next(), ack(Some(7), Some((5, 2))));
        outbox.ack(7, 4, 1);
        assert!(outbox.is_empty());
    }

    #[test]
    fn refusals_come_before_the_ack_that_covers_them() {
        let mut outbox = Outbox::new(0);
        outbox.refuse(rejected(1));
        outbox.ack(3, 0, 0);
        assert_eq!(outbox.next(), Some(GatewayFrame::Rejected(rejected(1))));
        assert_eq!(outbox.next(), ack(Some(2), None));
    }

    #[test]
    fn a_replay_tells_no_refusal_twice() {
        let mut outbox = Outbox::new(0);
        assert!(outbox.refuse(rejected(4)));
        assert!(!outbox.refuse(rejected(4)));
        outbox.ack(5, 0, 0);
        assert!(!outbox.refuse(rejected(4)));
        assert!(outbox.refuse(rejected(5)));
    }

    #[test]
    fn a_full_outbox_takes_no_more_answers() {
        let mut outbox = Outbox::new(0);
        (0..REFUSALS_WAITING_MAX as u64).for_each(|offset| assert!(outbox.refuse(rejected(offset))));
        assert!(!outbox.has_room());
    }
}
