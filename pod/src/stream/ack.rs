//! What is still to be told to a stream's gateway.
//!
//! *Owns*: the only place that makes an `Ack`.
//! *Does not own*: the frontiers (`progress`).
//! Keeps P3: acks are cumulative and never go back.

use sluice_shared::proto::Ack;

use super::progress::Progress;

/// What has been told so far.
#[derive(Debug, Default)]
pub struct AckTracker {
    durable_next: u64,
    committed_next: u64,
}

impl AckTracker {
    /// Starts where the gateway knows everything before `durable_next` to be durable.
    pub fn at(durable_next: u64) -> Self {
        Self { durable_next, committed_next: 0 }
    }

    /// The ack that tells what is new, if anything is.
    ///
    /// After a restart the table may hold records that the gateway has yet to send again. They are not acked before
    /// they have been: an ack would keep the gateway from sending them, the gate would find a gap, and what was
    /// refused among them would go unannounced.
    pub fn next(&mut self, progress: &Progress) -> Option<Ack> {
        let (durable_next, committed_next) = (progress.told_durable(), progress.told_committed());
        if durable_next <= self.durable_next && committed_next <= self.committed_next {
            return None;
        }
        self.durable_next = self.durable_next.max(durable_next);
        self.committed_next = self.committed_next.max(committed_next);
        Some(Ack {
            durable_next: self.durable_next,
            committed_next: self.committed_next,
            version: progress.version,
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use sluice_shared::ids::OffsetRange;

    use super::*;

    #[test]
    fn nothing_new_is_no_ack() {
        let mut tracker = AckTracker::at(5);
        assert_eq!(tracker.next(&Progress { durable_next: 5, ..Progress::default() }), None);
        let ack = tracker.next(&Progress { durable_next: 7, ..Progress::default() }).expect("new");
        assert_eq!((ack.durable_next, ack.committed_next), (7, 0));
    }

    #[test]
    fn a_commit_is_not_told_before_the_refusals_among_it() {
        // After a crash the table may be ahead of what is being resent: refusals are told as it becomes durable again.
        let mut tracker = AckTracker::at(5);
        let ahead = Progress { durable_next: 5, committed_next: 9, version: 3, ..Progress::default() };
        assert_eq!(tracker.next(&ahead).map(|ack| (ack.durable_next, ack.committed_next)), Some((5, 5)));
        let resent = Progress { durable_next: 9, ..ahead };
        assert_eq!(tracker.next(&resent).map(|ack| (ack.durable_next, ack.committed_next)), Some((9, 9)));
    }

    #[test]
    fn what_is_sent_again_is_not_acked_before_it_is_judged() {
        let mut tracker = AckTracker::at(2);
        let again = |start| OffsetRange { start, end: 7 };
        let mut progress =
            Progress { durable_next: 9, committed_next: 8, again: again(2), ..Progress::default() };
        assert_eq!(tracker.next(&progress).map(|ack| (ack.durable_next, ack.committed_next)), Some((2, 2)));
        progress.again = again(5);
        assert_eq!(tracker.next(&progress).map(|ack| (ack.durable_next, ack.committed_next)), Some((5, 5)));
        assert!(!progress.covers(6, false) && progress.covers(5, true));
        progress.again = again(7);
        assert_eq!(tracker.next(&progress).map(|ack| (ack.durable_next, ack.committed_next)), Some((9, 8)));
    }

    proptest! {
        #[test]
        fn acks_never_go_back(steps in prop::collection::vec((0u64..100, 0u64..100), 0..50)) {
            let mut tracker = AckTracker::default();
            let mut last = (0, 0);
            for (durable_next, committed_next) in steps {
                let progress = Progress { durable_next, committed_next, ..Progress::default() };
                if let Some(ack) = tracker.next(&progress) {
                    prop_assert!((ack.durable_next, ack.committed_next) > last);
                    prop_assert!(ack.durable_next >= last.0 && ack.committed_next >= last.1);
                    prop_assert!(ack.committed_next <= ack.durable_next);
                    last = (ack.durable_next, ack.committed_next);
                }
            }
        }
    }
}
