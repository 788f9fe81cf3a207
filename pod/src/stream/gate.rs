//! The offset gate: a frame goes on only if its offsets are exactly the next ones.
//!
//! *Owns*: the next offset of one stream, and of the call that sends into it: a call may begin with what is here
//! already, to hear its refusals again.
//! *Does not own*: what happens to frames that may pass.
//! Keeps P1: what passes has no gap and never goes back.

use sluice_shared::fault::{self, Bug};
use sluice_shared::ids::OffsetRange;

/// The next offset of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gate {
    next: u64,
    /// One more than the last offset that the present call has sent. Never beyond `next`.
    sent: u64,
}

/// What to do with a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Admit {
    /// Take it.
    Next,
    /// Its first `here` records are here already: take the rest.
    Overlap {
        /// How many; at most all.
        here: u64,
    },
    /// Drop it: the call has sent it before.
    Duplicate,
    /// Refuse it: records before it are missing.
    Gap {
        /// The offset that should have come.
        expected: u64,
    },
}

impl Gate {
    /// A gate that expects `next`.
    pub fn at(next: u64) -> Self {
        Self { next, sent: next }
    }

    /// A new call sends from `offset` on. What lies between the gate and a later offset has become durable elsewhere.
    pub fn resume(&mut self, offset: u64) {
        self.next = self.next.max(offset);
        self.sent = offset;
    }

    /// The offset that has to come next.
    pub fn next(&self) -> u64 {
        self.next
    }

    /// The offset that the present call has to send next: before `next` where it sends again.
    pub fn sent(&self) -> u64 {
        self.sent
    }

    /// Judges a frame, and counts it as taken where it may pass.
    pub fn admit(&mut self, offsets: OffsetRange) -> Admit {
        if offsets.start > self.sent && !fault::has(Bug::GateWithGap) {
            return Admit::Gap { expected: self.sent };
        }
        if offsets.end <= self.sent {
            return Admit::Duplicate;
        }
        let here = self.next.min(offsets.end).saturating_sub(offsets.start);
        self.sent = offsets.end;
        self.next = self.next.max(offsets.end);
        if here == 0 { Admit::Next } else { Admit::Overlap { here } }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn range(start: u64, count: u64) -> OffsetRange {
        OffsetRange::from_count(start, count).expect("small")
    }

    #[test]
    fn a_frame_is_the_next_a_duplicate_an_overlap_or_a_gap() {
        let mut gate = Gate::at(10);
        assert_eq!(gate.admit(range(10, 5)), Admit::Next);
        assert_eq!(gate.admit(range(10, 5)), Admit::Duplicate);
        assert_eq!(gate.admit(range(12, 5)), Admit::Overlap { here: 3 });
        assert_eq!(gate.admit(range(18, 1)), Admit::Gap { expected: 17 });
        assert_eq!(gate.next(), 17);
    }

    #[test]
    fn a_new_call_may_send_again_but_not_leave_out() {
        let mut gate = Gate::at(10);
        gate.resume(4);
        assert_eq!(gate.admit(range(10, 1)), Admit::Gap { expected: 4 });
        assert_eq!(gate.admit(range(4, 3)), Admit::Overlap { here: 3 });
        assert_eq!(gate.admit(range(4, 3)), Admit::Duplicate);
        assert_eq!(gate.admit(range(7, 5)), Admit::Overlap { here: 3 });
        assert_eq!(gate.admit(range(12, 1)), Admit::Next);
        gate.resume(20);
        assert_eq!(gate.admit(range(13, 1)), Admit::Duplicate);
        assert_eq!(gate.admit(range(20, 1)), Admit::Next);
    }

    proptest! {
        #[test]
        fn what_passes_is_every_offset_once_in_order(
            frames in prop::collection::vec((0u64..50, 0u64..10, prop::option::weighted(0.1, 0u64..50)), 0..100),
        ) {
            let mut gate = Gate::at(0);
            let mut passed = Vec::new();
            for (start, count, resume) in frames {
                if let Some(offset) = resume.filter(|offset| *offset <= gate.next()) {
                    gate.resume(offset);
                }
                match gate.admit(range(start, count)) {
                    Admit::Next => passed.extend(start..start + count),
                    Admit::Overlap { here } => passed.extend(start + here..start + count),
                    Admit::Duplicate | Admit::Gap { .. } => {}
                }
            }
            prop_assert_eq!(passed, (0..gate.next()).collect::<Vec<_>>());
        }
    }
}
