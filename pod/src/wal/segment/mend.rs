//! Checksums put right over bytes that a fuzzer has changed: else the reader never gets to what else it has to check.
//!
//! *Owns*: which bytes each checksum of a segment is over, once more than the reader.
//! *Does not own*: what was changed.

use super::{
    ENTRY_HEADER, FORMAT, GROUP_HEADER, GROUP_MAGIC, SEGMENT_HEADER, SEGMENT_MAGIC, crc32c_append,
    entry_checksum, group_seed, header_checksum, log_at, put, segment_seed, u32_at, u64_at,
};
use sluice_shared::ids::Epoch;

/// Of the segment's header. A version is left as it is.
pub(in crate::wal) fn header(segment: &mut [u8]) {
    if let Some(block) = segment.get_mut(..SEGMENT_HEADER) {
        let checksum = header_checksum(0, &SEGMENT_MAGIC, &block[16..]);
        put(block, 12, &checksum.to_le_bytes());
    }
}

/// Of the group that starts at `offset`, and of its entries as far as their lengths lead.
pub(in crate::wal) fn group(segment: &mut [u8], offset: usize) {
    let Some(group) = segment.get_mut(offset..).filter(|group| group.len() >= GROUP_HEADER) else { return };
    let of_segment = segment_seed(log_at(group, 16), Epoch(u64_at(group, 32)), u64_at(group, 40));
    let seed = group_seed(of_segment, u64_at(group, 56));
    let end = group.len().min(GROUP_HEADER + u32_at(group, 72) as usize);
    let (mut at, mut of_entries) = (GROUP_HEADER, seed);
    for _ in 0..u32_at(group, 76) {
        if end - at < ENTRY_HEADER || end - at - ENTRY_HEADER < u32_at(group, at) as usize {
            break;
        }
        let next = at + ENTRY_HEADER + u32_at(group, at) as usize;
        let checksum = entry_checksum(seed, &group[at..next]);
        put(group, at + 4, &checksum.to_le_bytes());
        of_entries = crc32c_append(of_entries, &group[at..at + ENTRY_HEADER]);
        at = next;
    }
    put(group, 8, &FORMAT.to_le_bytes());
    put(group, 84, &of_entries.to_le_bytes());
    let checksum = header_checksum(of_segment, &GROUP_MAGIC, &group[16..GROUP_HEADER]);
    put(group, 12, &checksum.to_le_bytes());
}
