//! The bytes that all windows of one gateway hold together.
//!
//! Up to half of the budget every stream takes what its own window allows. Beyond, a stream that already holds more
//! than a fair part of the other half takes no more; at the budget only a stream that holds nothing does. So the sum is
//! bounded by the budget and one frame a stream, and no stream waits for another one's acks: each may always hold one
//! frame.
//!
//! *Owns*: the sum, and who may add to it.
//! *Does not own*: the frames (`session/window`), waiting (`session`).
//! Keeps P7 for the gateway as a whole, and P9: a stream that is not acked takes no other one's part.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// What all streams share.
#[derive(Debug)]
pub(crate) struct Budget {
    bytes_max: u64,
    held: AtomicU64,
    streams: AtomicU64,
}

impl Budget {
    /// Of so many bytes.
    pub(crate) fn new(bytes_max: u64) -> Arc<Self> {
        Arc::new(Self { bytes_max, held: AtomicU64::new(0), streams: AtomicU64::new(0) })
    }

    /// The part of one more stream.
    pub(crate) fn share(self: &Arc<Self>) -> Share {
        self.streams.fetch_add(1, Ordering::Relaxed);
        Share { budget: Arc::clone(self), bytes: 0 }
    }
}

/// What one stream holds of the budget; given back when it is dropped.
#[derive(Debug)]
pub(crate) struct Share {
    budget: Arc<Budget>,
    bytes: u64,
}

impl Share {
    /// Whether so many bytes more may be taken. Streams that ask at one time may both be told yes: the sum is over by
    /// a frame a thread then.
    pub(crate) fn has_room(&self, bytes: usize) -> bool {
        if self.bytes == 0 {
            return true;
        }
        let (bytes, half) = (bytes as u64, self.budget.bytes_max / 2);
        let after = self.budget.held.load(Ordering::Relaxed).saturating_add(bytes);
        if after <= half {
            return true;
        }
        let streams = self.budget.streams.load(Ordering::Relaxed).max(1);
        after <= self.budget.bytes_max && self.bytes + bytes <= half / streams
    }

    /// Takes bytes, whether there is room or not: they are here already.
    pub(crate) fn take(&mut self, bytes: usize) {
        self.bytes += bytes as u64;
        self.budget.held.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Gives back some of what was taken.
    pub(crate) fn give_back(&mut self, bytes: usize) {
        let bytes = (bytes as u64).min(self.bytes);
        self.bytes -= bytes;
        self.budget.held.fetch_sub(bytes, Ordering::Relaxed);
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.budget.held.fetch_sub(self.bytes, Ordering::Relaxed);
        self.budget.streams.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Takes pieces until there is no room; answers how many bytes went in.
    fn fill(share: &mut Share, piece: usize) -> usize {
        let mut taken = 0;
        while share.has_room(piece) {
            share.take(piece);
            taken += piece;
        }
        taken
    }

    #[test]
    fn one_stream_has_the_half_and_the_others_what_is_fair() {
        let budget = Budget::new(1000);
        let (mut hot, mut second, mut third) = (budget.share(), budget.share(), budget.share());
        assert_eq!(fill(&mut hot, 10), 500, "alone it has the free half");
        assert_eq!(fill(&mut second, 10), 160, "a third of the other half");
        assert_eq!(fill(&mut third, 10), 160);
        assert!(!hot.has_room(1), "it holds more than its part");
        hot.give_back(400);
        assert!(second.has_room(10), "there is room again below the half");
        drop(hot);
        assert_eq!(fill(&mut second, 10) + fill(&mut third, 10), 180 + 90);
    }

    #[test]
    fn who_holds_nothing_may_always_take_one_frame() {
        let budget = Budget::new(1000);
        let (mut first, mut second) = (budget.share(), budget.share());
        first.take(5000);
        assert!(second.has_room(5000));
        second.take(5000);
        assert!(!first.has_room(0) && !second.has_room(0));
    }

    proptest! {
        #[test]
        fn the_sum_is_bounded_and_nobody_is_stuck(
            steps in prop::collection::vec((0_usize..12, 1_usize..300, any::<bool>()), 1..300),
        ) {
            const BYTES_MAX: u64 = 1000;
            const FRAME_MAX: u64 = 300;
            let budget = Budget::new(BYTES_MAX);
            let mut shares: Vec<Share> = Vec::new();
            for (at, bytes, takes) in steps {
                // Streams open as they come: an early one holds more than what is fair later.
                while shares.len() <= at {
                    shares.push(budget.share());
                }
                let streams = shares.len() as u64;
                let share = &mut shares[at];
                if takes && share.has_room(bytes) {
                    share.take(bytes);
                } else if !takes {
                    share.give_back(bytes);
                }
                let sum: u64 = shares.iter().map(|share| share.bytes).sum();
                prop_assert_eq!(sum, budget.held.load(Ordering::Relaxed));
                prop_assert!(sum <= BYTES_MAX + streams * FRAME_MAX, "{} of {} streams", sum, streams);
                prop_assert!(shares.iter().all(|share| share.bytes > 0 || share.has_room(300)));
            }
            drop(shares);
            prop_assert_eq!(budget.held.load(Ordering::Relaxed), 0);
            prop_assert_eq!(budget.streams.load(Ordering::Relaxed), 0);
        }
    }
}
