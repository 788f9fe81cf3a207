//! The offset gate: a frame goes on only if its offsets are exactly the next ones.
//!
//! *Owns*: the next offset of one stream.
//! *Does not own*: what happens to frames that may pass.
//! Keeps P1: what passes has no gap and never goes back.

use sluice_shared::ids::OffsetRange;

/// The next offset of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gate {
    next: u64,
}

/// What to do with a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Admit {
    /// Take it.
    Next,
    /// Take it, but for its first `skip` records, which are here already.
    Overlap {
        /// How many to leave out.
        skip: u64,
    },
    /// Drop it: it is here already.
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
        Self { next }
    }

    /// The offset that has to come next.
    pub fn next(&self) -> u64 {
        self.next
    }

    /// Judges a frame, and counts it as taken where it may pass.
    pub fn admit(&mut self, offsets: OffsetRange) -> Admit {
        if offsets.start > self.next {
            return Admit::Gap { expected: self.next };
        }
        if offsets.end <= self.next {
            return Admit::Duplicate;
        }
        let skip = self.next - offsets.start;
        self.next = offsets.end;
        if skip == 0 { Admit::Next } else { Admit::Overlap { skip } }
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
        assert_eq!(gate.admit(range(12, 5)), Admit::Overlap { skip: 3 });
        assert_eq!(gate.admit(range(18, 1)), Admit::Gap { expected: 17 });
        assert_eq!(gate.next(), 17);
    }

    proptest! {
        #[test]
        fn what_passes_is_every_offset_once_in_order(frames in prop::collection::vec((0u64..50, 0u64..10), 0..100)) {
            let mut gate = Gate::at(0);
            let mut passed = Vec::new();
            for (start, count) in frames {
                match gate.admit(range(start, count)) {
                    Admit::Next => passed.extend(start..start + count),
                    Admit::Overlap { skip } => passed.extend(start + skip..start + count),
                    Admit::Duplicate | Admit::Gap { .. } => {}
                }
            }
            prop_assert_eq!(passed, (0..gate.next()).collect::<Vec<_>>());
        }
    }
}
