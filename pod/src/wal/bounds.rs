//! ◆ The file `oldest`: which segments have to be there, and through which group the log was durable.
//!
//! Two slots of a disk sector each, written in turns, so that one is always whole:
//!
//! | at | type | what |
//! |---|---|---|
//! | 0 | u64 | turn: the slot with the higher one counts |
//! | 8 | u64 | the oldest segment that has to be there; all ones while none has to |
//! | 16 | u32 | checksum of bytes 0..16 |
//! | 20 | u32 | checksum of bytes 0..20 and 24..48 |
//! | 24 | u64 | the epoch that the next two are of |
//! | 32 | u64 | the newest segment that was made; all ones while none has to be there |
//! | 40 | u64 | a group: it and all before it are durable |
//!
//! Older programs wrote the first 20 bytes, and zeros behind them.
//!
//! The file never claims what is not so: a segment is named after it was made, and before its first group is taken; a group
//! after it was told of; a segment that is taken away is given up here before. A power loss at any point between leaves more
//! on the disk than the file asks for, never less.
//!
//! *Owns*: these bytes, what may be claimed when.
//! *Does not own*: writing them safely (`disk.rs`), when (`keeper.rs`), what follows from them (`replay.rs`).

use crc32c::{crc32c, crc32c_append};
use sluice_shared::ids::Epoch;

/// Bytes of a slot: a disk sector.
pub(super) const SLOT: usize = 512;
/// What is written of it.
const SLOT_BYTES: usize = 48;
/// Stands in the place of a segment's number.
const NO_SEGMENT: u64 = u64::MAX;

/// What a start has to find.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Bounds {
    /// The oldest segment that has to be there.
    pub(super) oldest: Option<u64>,
    /// How far a life has come; what the identity names as ended is known better from there.
    pub(super) reached: Option<Reached>,
}

/// How far a life has come at least.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Reached {
    /// The life.
    pub(super) epoch: Epoch,
    /// The newest of its segments: it and all from the oldest one on have to be there.
    pub(super) newest: u64,
    /// This group and all before it are durable.
    pub(super) durable: u64,
}

/// A slot's content.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Slot {
    pub(super) turn: u64,
    pub(super) bounds: Bounds,
}

impl Bounds {
    /// Segments before this one are about to be taken away.
    pub(super) fn release(&mut self, oldest: Option<u64>) {
        self.oldest = oldest;
        if oldest.is_none() {
            self.reached = None;
        }
    }

    /// A segment of this life stands in the directory, durably, with its header.
    pub(super) fn make(&mut self, epoch: Epoch, segment: u64) {
        self.oldest.get_or_insert(segment);
        self.reached = Some(Reached { epoch, newest: segment, durable: 0 });
    }

    /// All groups of this life through this one are durable.
    pub(super) fn reach(&mut self, epoch: Epoch, durable: u64) {
        if let Some(reached) = self.reached.as_mut().filter(|reached| reached.epoch == epoch) {
            reached.durable = durable;
        }
    }
}

impl Slot {
    pub(super) fn encode(self) -> [u8; SLOT_BYTES] {
        let number = |segment: Option<u64>| segment.unwrap_or(NO_SEGMENT).to_le_bytes();
        let mut slot = [0; SLOT_BYTES];
        slot[..8].copy_from_slice(&self.turn.to_le_bytes());
        slot[8..16].copy_from_slice(&number(self.bounds.oldest));
        let checksum = crc32c(&slot[..16]);
        slot[16..20].copy_from_slice(&checksum.to_le_bytes());
        let reached = self.bounds.reached;
        slot[24..32].copy_from_slice(&reached.map_or(0, |reached| reached.epoch.0).to_le_bytes());
        slot[32..40].copy_from_slice(&number(reached.map(|reached| reached.newest)));
        slot[40..].copy_from_slice(&reached.map_or(0, |reached| reached.durable).to_le_bytes());
        let checksum = crc32c_append(crc32c(&slot[..20]), &slot[24..]);
        slot[20..24].copy_from_slice(&checksum.to_le_bytes());
        slot
    }

    fn decode(slot: &[u8]) -> Option<Self> {
        let slot = slot.get(..SLOT_BYTES)?;
        let number = |at: usize| u64::from_le_bytes(slot[at..at + 8].try_into().expect("eight bytes"));
        let checksum = |at: usize| u32::from_le_bytes(slot[at..at + 4].try_into().expect("four bytes"));
        let segment = |at: usize| Some(number(at)).filter(|segment| *segment != NO_SEGMENT);
        let turn = number(0);
        if turn == 0 || checksum(16) != crc32c(&slot[..16]) {
            return None;
        }
        let is_older_form = slot[20..].iter().all(|byte| *byte == 0);
        if !is_older_form && checksum(20) != crc32c_append(crc32c(&slot[..20]), &slot[24..]) {
            return None;
        }
        let newest = segment(32).filter(|_| !is_older_form);
        let reached = newest.map(|newest| Reached { epoch: Epoch(number(24)), newest, durable: number(40) });
        Some(Self { turn, bounds: Bounds { oldest: segment(8), reached } })
    }

    /// The slot of a file that counts; and whether one is damaged, which may be the one that counts. From the second turn on
    /// both have been written.
    pub(super) fn newest(file: &[u8]) -> (Option<Self>, bool) {
        let slots = [0, SLOT].map(|at| {
            let slot = file.get(at..file.len().min(at + SLOT)).unwrap_or_default();
            (Self::decode(slot), slot)
        });
        let newest = slots.iter().filter_map(|(read, _)| *read).max_by_key(|slot| slot.turn);
        let both_written = newest.is_some_and(|slot| slot.turn > 1);
        let is_damaged = slots
            .iter()
            .any(|(read, slot)| read.is_none() && (both_written || slot.iter().any(|byte| *byte != 0)));
        (newest, is_damaged)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn some(turn: u64) -> Slot {
        let mut bounds = Bounds::default();
        bounds.make(Epoch(3), 7);
        bounds.reach(Epoch(3), 40 + turn);
        Slot { turn, bounds }
    }

    fn file(slots: [&[u8]; 2]) -> Vec<u8> {
        let mut file = vec![0; 2 * SLOT];
        for (at, slot) in slots.into_iter().enumerate() {
            file[at * SLOT..][..slot.len()].copy_from_slice(slot);
        }
        file
    }

    #[test]
    fn the_later_turn_counts_and_any_flipped_bit_is_seen() {
        let whole = file([&some(8).encode(), &some(7).encode()]);
        assert_eq!(Slot::newest(&whole), (Some(some(8)), false));
        for bit in 0..SLOT_BYTES * 8 {
            let mut damaged = whole.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Slot::newest(&damaged), (Some(some(7)), true), "bit {bit}");
        }
        for half in [0, SLOT] {
            let mut damaged = whole.clone();
            damaged[half..half + SLOT].fill(0);
            assert!(Slot::newest(&damaged).1, "both were written");
        }
        assert!(Slot::newest(&whole[..SLOT]).1, "a half is cut off");
        assert_eq!(Slot::newest(&file([&[], &some(1).encode()])), (Some(some(1)), false), "written once");
        assert_eq!(Slot::newest(&[]), (None, false));
        assert_eq!(Slot::newest(&file([&[], &[]])), (None, false), "made, and not written yet");
    }

    #[test]
    fn a_slot_of_an_older_program_says_nothing_of_the_end() {
        let mut bounds = Bounds::default();
        bounds.release(Some(7));
        let older = file([&some(4).encode()[..20], &some(5).encode()[..20]]);
        assert_eq!(Slot::newest(&older), (Some(Slot { turn: 5, bounds }), false));
        let none = Slot { turn: 1, bounds: Bounds::default() };
        assert_eq!(Slot::newest(&file([&[], &none.encode()])), (Some(none), false));
    }

    #[test]
    fn what_is_claimed_is_of_one_life() {
        let mut bounds = some(1).bounds;
        bounds.reach(Epoch(4), 90);
        assert_eq!(bounds, some(1).bounds, "another life's groups are not this one's");
        bounds.make(Epoch(4), 9);
        assert_eq!(bounds.oldest, Some(7));
        assert_eq!(bounds.reached, Some(Reached { epoch: Epoch(4), newest: 9, durable: 0 }));
        bounds.release(Some(9));
        assert_eq!(bounds.oldest, Some(9));
        bounds.release(None);
        assert_eq!(bounds, Bounds::default());
    }
}
