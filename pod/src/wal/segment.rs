//! The bytes of a segment: how groups of entries are written down, and how they are told from anything else.
//!
//! # Format, version 1
//!
//! A log is a directory:
//!
//! | file | holds |
//! |---|---|
//! | `identity` | log id, owner, epoch, where each older life ends (see `identity.rs`) |
//! | `oldest` | which segments have to be there, and through which group the log was durable (see `bounds.rs`) |
//! | `lock` | locked by the process that has the log open; its process id |
//! | `<number, 20 digits>.wal` | a segment |
//! | `spare-<n>.wal` | a segment's worth of written blocks that waits to become a segment |
//!
//! A segment is a file of a fixed size: a header in the first block, then groups. Blocks are 4,096 bytes; the
//! header and each group start at a block's edge, so that direct I/O can write them. All numbers are
//! little-endian. Checksums are CRC32C (Castagnoli), *seeded*: the checksum goes on from the seed as if the seed
//! were the checksum of bytes before.
//!
//! **Segment header**, 160 bytes, the block's rest is zero:
//!
//! | at | type | what |
//! |---|---|---|
//! | 0 | 8 bytes | `SLUICEWS` |
//! | 8 | u32 | format version |
//! | 12 | u32 | checksum of bytes 0..12 and 16..160 |
//! | 16 | 16 bytes | log id |
//! | 32 | u64 | epoch |
//! | 40 | u64 | segment number |
//! | 48 | u64 | bytes of the segment |
//! | 56 | u64 | number of the first group; 0 while there is none |
//! | 64 | u32 | checksum of the group before the first one |
//! | 68 | u8, 63 bytes | length of the owner's name, and the name |
//!
//! The header is written twice: when the segment is made ahead of its use, and again in one write with its first
//! group, from then on with the group's number. It fits a disk sector, so that it is always one of the two.
//!
//! **Group**: a header of 88 bytes, then its entries one after the other, then zeros to the block's end:
//!
//! | at | type | what |
//! |---|---|---|
//! | 0 | 8 bytes | `SLUICEWG` |
//! | 8 | u32 | format version |
//! | 12 | u32 | checksum of bytes 0..12 and 16..88, seeded by the segment |
//! | 16 | 16 bytes | log id |
//! | 32 | u64 | epoch |
//! | 40 | u64 | segment number |
//! | 48 | u64 | offset of the group in the segment |
//! | 56 | u64 | group number: 1, 2, 3, … over the log's whole life, without a gap |
//! | 64 | u64 | durable frontier: the highest group number that was durable when this was written, with all before |
//! | 72 | u32 | bytes of the entries with their headers |
//! | 76 | u32 | how many entries |
//! | 80 | u32 | checksum (the one at 12) of the group before |
//! | 84 | u32 | checksum of the entries' headers one after the other, seeded by the group |
//!
//! **Entry**: u32 length, u32 checksum of length and payload seeded by the group, payload.
//!
//! The segment's seed is the checksum of log id, epoch and segment number; the group's seed goes on from it over
//! the group's number. So whatever a recycled file still holds is never taken for its new content. Since a
//! group's checksum covers its entries' checksums, and its successor holds it, the groups form a chain.
//!
//! A later version keeps the first 12 bytes of the segment header, so that an older program can say no by name.
//!
//! *Owns*: encoding and decoding of segment headers, groups and entries.
//! *Does not own*: files, which groups belong to the log (`replay.rs`), when something is durable (`writer.rs`).

#[cfg(debug_assertions)]
pub(super) mod mend;

use std::ops::Range;

use bytes::Bytes;
use crc32c::{crc32c, crc32c_append};
use serde::{Deserialize, Serialize};
use sluice_shared::ids::{Epoch, LogId, PodId};

/// Everything starts at a multiple of this.
pub(super) const BLOCK: usize = 4096;
/// The version that this program writes, and the newest that it reads.
pub(super) const FORMAT: u32 = 1;
const SEGMENT_MAGIC: [u8; 8] = *b"SLUICEWS";
const GROUP_MAGIC: [u8; 8] = *b"SLUICEWG";
const SEGMENT_HEADER: usize = 160;
pub(super) const GROUP_HEADER: usize = 88;
pub(super) const ENTRY_HEADER: usize = 8;
/// Copied and summed at once, so that the second pass finds the bytes in the cache.
const COPY_CHUNK: usize = 32 << 10;

/// What the next group must carry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Chain {
    /// Its number.
    pub(super) group: u64,
    /// Its predecessor's checksum.
    pub(super) previous: u32,
}

impl Chain {
    /// Before the first group of a log.
    pub(super) const START: Self = Self { group: 1, previous: 0 };
}

/// The first block of a segment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SegmentHeader {
    pub(super) log: LogId,
    pub(super) owner: PodId,
    pub(super) epoch: Epoch,
    pub(super) segment: u64,
    pub(super) segment_bytes: u64,
    /// What its first group carries; None before there is one.
    pub(super) first: Option<Chain>,
}

/// Why a block is no segment header.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum HeaderFault {
    /// Written by a newer program.
    Newer(u32),
    /// Not what any program wrote.
    Damaged(String),
}

/// A group's header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct GroupHeader {
    pub(super) epoch: Epoch,
    pub(super) offset: u64,
    pub(super) number: u64,
    /// The durable frontier when it was written.
    pub(super) durable: u64,
    pub(super) body_bytes: u32,
    pub(super) entries: u32,
    pub(super) previous: u32,
    entries_checksum: u32,
    checksum: u32,
}

/// A whole group, all checksums verified.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Group {
    pub(super) header: GroupHeader,
    /// Where the next group starts.
    pub(super) end: u64,
    /// What the next group must carry.
    pub(super) next: Chain,
    seed: u32,
}

/// An entry in a verified group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Entry {
    /// Offset of its header in the segment.
    pub(super) offset: u64,
    /// Its payload in the segment.
    pub(super) payload: Range<usize>,
    /// Seeds its checksum.
    pub(super) seed: u32,
}

/// The first thing in a segment that is no group of the chain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Fault {
    /// Where the group should start.
    pub(super) offset: u64,
    /// What is wrong.
    pub(super) reason: String,
}

/// Where a group goes, and what it says besides its entries.
#[derive(Debug, Clone, Copy)]
pub(super) struct GroupPlace {
    pub(super) log: LogId,
    pub(super) epoch: Epoch,
    pub(super) segment: u64,
    pub(super) offset: u64,
    pub(super) chain: Chain,
    pub(super) durable: u64,
}

/// A place where a group may stand.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    pub(super) log: LogId,
    pub(super) epoch: Epoch,
    pub(super) segment: u64,
    pub(super) offset: u64,
}

impl GroupPlace {
    /// Seeds the checksums of the group's entries.
    pub(super) fn seed(&self) -> u32 {
        group_seed(segment_seed(self.log, self.epoch, self.segment), self.chain.group)
    }
}

/// `bytes` up to the next block's edge.
pub(super) fn padded(bytes: usize) -> usize {
    bytes.next_multiple_of(BLOCK)
}

/// Largest payload that a segment of this size can take.
pub(super) fn payload_bytes_max(segment_bytes: u64) -> u64 {
    segment_bytes.saturating_sub((BLOCK + GROUP_HEADER + ENTRY_HEADER) as u64)
}

/// Checks an entry's bytes, header and payload, against its seed and the length that it should have.
pub(super) fn entry_is_whole(bytes: &[u8], payload_bytes: usize, seed: u32) -> bool {
    bytes.len() == ENTRY_HEADER + payload_bytes
        && u32_at(bytes, 0) as usize == payload_bytes
        && u32_at(bytes, 4) == entry_checksum(seed, bytes)
}

impl SegmentHeader {
    /// Writes the header over a block.
    pub(super) fn encode(&self, block: &mut [u8]) {
        block[..BLOCK].fill(0);
        put(block, 0, &SEGMENT_MAGIC);
        put(block, 8, &FORMAT.to_le_bytes());
        put(block, 16, self.log.0.as_bytes());
        put(block, 32, &self.epoch.0.to_le_bytes());
        put(block, 40, &self.segment.to_le_bytes());
        put(block, 48, &self.segment_bytes.to_le_bytes());
        if let Some(first) = self.first {
            put(block, 56, &first.group.to_le_bytes());
            put(block, 64, &first.previous.to_le_bytes());
        }
        let owner = self.owner.as_str().as_bytes();
        block[68] = u8::try_from(owner.len()).expect("a pod id has at most 63 characters");
        put(block, 69, owner);
        let checksum = header_checksum(0, &SEGMENT_MAGIC, &block[16..SEGMENT_HEADER]);
        put(block, 12, &checksum.to_le_bytes());
    }

    /// Reads a segment's first block.
    pub(super) fn decode(segment: &[u8]) -> Result<Self, HeaderFault> {
        let damaged = |reason: &str| HeaderFault::Damaged(reason.to_owned());
        let block = segment.get(..SEGMENT_HEADER).ok_or_else(|| damaged("the header is cut short"))?;
        if block[..8] != SEGMENT_MAGIC {
            return Err(damaged("the header does not start with SLUICEWS"));
        }
        let (format, checksum) = (u32_at(block, 8), u32_at(block, 12));
        // Computed with our version in its place, so that damage to the version field is not taken for another.
        let whole = checksum == header_checksum(0, &SEGMENT_MAGIC, &block[16..]);
        match format {
            FORMAT if whole => {}
            newer if newer > FORMAT && !whole => return Err(HeaderFault::Newer(newer)),
            _ => return Err(damaged("the header does not match its checksum")),
        }
        let owner =
            block.get(69..69 + usize::from(block[68])).and_then(|name| std::str::from_utf8(name).ok());
        let owner =
            owner.and_then(|name| name.parse().ok()).ok_or_else(|| damaged("the owner is no pod id"))?;
        let first = Chain { group: u64_at(block, 56), previous: u32_at(block, 64) };
        Ok(Self {
            log: log_at(block, 16),
            owner,
            epoch: Epoch(u64_at(block, 32)),
            segment: u64_at(block, 40),
            segment_bytes: u64_at(block, 48),
            first: (first.group > 0).then_some(first),
        })
    }
}

/// Bytes of a group, padding included.
pub(super) fn group_bytes(entries: usize, payload_bytes: usize) -> usize {
    padded(GROUP_HEADER + entries * ENTRY_HEADER + payload_bytes)
}

/// Writes a group to the start of `out`, which must have room for [`group_bytes`]. Returns what the next one
/// must carry.
pub(super) fn encode_group(out: &mut [u8], place: &GroupPlace, payloads: &[Vec<Bytes>]) -> Chain {
    let seed = place.seed();
    let mut entries_checksum = seed;
    let mut at = GROUP_HEADER;
    for payload in payloads {
        let header = at;
        at = encode_entry(out, at, payload, seed);
        entries_checksum = crc32c_append(entries_checksum, &out[header..header + ENTRY_HEADER]);
    }
    out[at..padded(at)].fill(0);
    let body_bytes = u32::try_from(at - GROUP_HEADER).expect("a segment is smaller than 4 GiB");
    let entries = u32::try_from(payloads.len()).expect("fewer entries than bytes");
    put(out, 0, &GROUP_MAGIC);
    put(out, 8, &FORMAT.to_le_bytes());
    put(out, 16, place.log.0.as_bytes());
    put(out, 32, &place.epoch.0.to_le_bytes());
    put(out, 40, &place.segment.to_le_bytes());
    put(out, 48, &place.offset.to_le_bytes());
    put(out, 56, &place.chain.group.to_le_bytes());
    put(out, 64, &place.durable.to_le_bytes());
    put(out, 72, &body_bytes.to_le_bytes());
    put(out, 76, &entries.to_le_bytes());
    put(out, 80, &place.chain.previous.to_le_bytes());
    put(out, 84, &entries_checksum.to_le_bytes());
    let segment_seed = segment_seed(place.log, place.epoch, place.segment);
    let checksum = header_checksum(segment_seed, &GROUP_MAGIC, &out[16..GROUP_HEADER]);
    put(out, 12, &checksum.to_le_bytes());
    Chain { group: place.chain.group + 1, previous: checksum }
}

fn encode_entry(out: &mut [u8], at: usize, payload: &[Bytes], seed: u32) -> usize {
    let length: usize = payload.iter().map(Bytes::len).sum();
    let length = u32::try_from(length).expect("a segment is smaller than 4 GiB").to_le_bytes();
    put(out, at, &length);
    let mut checksum = crc32c_append(seed, &length);
    let mut to = at + ENTRY_HEADER;
    for chunk in payload.iter().flat_map(|part| part.chunks(COPY_CHUNK)) {
        put(out, to, chunk);
        checksum = crc32c_append(checksum, &out[to..to + chunk.len()]);
        to += chunk.len();
    }
    put(out, at + 4, &checksum.to_le_bytes());
    to
}

/// Reads the group that should start at `offset` of the segment and carry what `chain` says.
pub(super) fn read_group(
    segment: &[u8],
    header: &SegmentHeader,
    offset: u64,
    chain: Chain,
) -> Result<Group, Fault> {
    let fault = |reason: String| Fault { offset, reason };
    let group = GroupHeader::decode(segment, header.log, header.segment, offset).map_err(fault)?;
    if group.epoch != header.epoch {
        return Err(fault(format!(
            "a group of epoch {} in a segment of epoch {}",
            group.epoch.0, header.epoch.0
        )));
    }
    if group.number != chain.group || group.previous != chain.previous {
        return Err(fault(format!("group {} does not follow group {}", group.number, chain.group - 1)));
    }
    let next = group.number.checked_add(1).ok_or_else(|| fault("no group can follow it".to_owned()))?;
    let seed = group_seed(segment_seed(header.log, header.epoch, header.segment), group.number);
    let end = check_entries(segment, &group, seed).map_err(fault)?;
    Ok(Group { header: group, end, next: Chain { group: next, previous: group.checksum }, seed })
}

/// Verifies the entries of a group. Returns where the group ends.
fn check_entries(segment: &[u8], group: &GroupHeader, seed: u32) -> Result<u64, String> {
    let named = |what: &str| format!("group {}: {what}", group.number);
    let start = to_usize(group.offset) + GROUP_HEADER;
    let body_end = start + group.body_bytes as usize;
    if padded(body_end) > segment.len() {
        return Err(named("reaches beyond the segment's end"));
    }
    let mut at = start;
    let mut entries_checksum = seed;
    for index in 0..group.entries {
        if body_end - at < ENTRY_HEADER || body_end - at - ENTRY_HEADER < u32_at(segment, at) as usize {
            return Err(named(&format!("entry {index} reaches beyond the group's end")));
        }
        let payload_bytes = u32_at(segment, at) as usize;
        let next = at + ENTRY_HEADER + payload_bytes;
        if !entry_is_whole(&segment[at..next], payload_bytes, seed) {
            return Err(named(&format!("entry {index} does not match its checksum")));
        }
        entries_checksum = crc32c_append(entries_checksum, &segment[at..at + ENTRY_HEADER]);
        at = next;
    }
    if at != body_end || entries_checksum != group.entries_checksum {
        return Err(named("the entries are not those of the header"));
    }
    Ok(padded(body_end) as u64)
}

impl Group {
    /// The entries of this group, which was read from `segment`.
    pub(super) fn entries(&self, segment: &[u8]) -> impl Iterator<Item = Entry> {
        let mut at = to_usize(self.header.offset) + GROUP_HEADER;
        let seed = self.seed;
        (0..self.header.entries).map(move |_| {
            let start = at + ENTRY_HEADER;
            let entry =
                Entry { offset: at as u64, payload: start..start + u32_at(segment, at) as usize, seed };
            at = entry.payload.end;
            entry
        })
    }
}

/// Where a group ends, by its header, that was begun here and whose header is no longer whole: all but one of the fields that
/// are known of it are as they should be. What a recycled file held before differs in more.
pub(super) fn begun_until(segment: &[u8], place: &Place, chain: Chain) -> Option<u64> {
    let header = segment.get(to_usize(place.offset)..).and_then(|rest| rest.get(..GROUP_HEADER))?;
    let is_known = [
        header[..8] == GROUP_MAGIC,
        u32_at(header, 8) == FORMAT,
        log_at(header, 16) == place.log,
        u64_at(header, 32) == place.epoch.0,
        u64_at(header, 40) == place.segment,
        u64_at(header, 48) == place.offset,
        u64_at(header, 56) == chain.group,
        u32_at(header, 80) == chain.previous,
    ];
    let differ = is_known.iter().filter(|is_known| !**is_known).count();
    (differ <= 1).then(|| end_of(place.offset, u32_at(header, 72)))
}

fn end_of(offset: u64, body_bytes: u32) -> u64 {
    offset.saturating_add(padded(GROUP_HEADER + body_bytes as usize) as u64)
}

impl GroupHeader {
    /// Where the group ends.
    pub(super) fn end(&self) -> u64 {
        end_of(self.offset, self.body_bytes)
    }

    /// Reads a group's header of any epoch; its entries are not looked at.
    fn decode(segment: &[u8], log: LogId, number: u64, offset: u64) -> Result<Self, String> {
        let header = segment.get(to_usize(offset)..).and_then(|rest| rest.get(..GROUP_HEADER));
        let header = header.ok_or("the segment ends before the group's header")?;
        if header[..8] != GROUP_MAGIC {
            return Err("no group starts here".to_owned());
        }
        let epoch = Epoch(u64_at(header, 32));
        let checksum = header_checksum(segment_seed(log, epoch, number), &GROUP_MAGIC, &header[16..]);
        if u32_at(header, 8) != FORMAT || u32_at(header, 12) != checksum {
            return Err("the group's header does not match its checksum".to_owned());
        }
        let placed =
            log_at(header, 16) == log && u64_at(header, 40) == number && u64_at(header, 48) == offset;
        if !placed {
            return Err("the group belongs elsewhere".to_owned());
        }
        Ok(Self {
            epoch,
            offset,
            number: u64_at(header, 56),
            durable: u64_at(header, 64),
            body_bytes: u32_at(header, 72),
            entries: u32_at(header, 76),
            previous: u32_at(header, 80),
            entries_checksum: u32_at(header, 84),
            checksum,
        })
    }
}

/// All whole group headers of this log and segment from `from` on, wherever they stand. What such a header says
/// of the groups before it is true even where its own entries are torn.
pub(super) fn headers_from(
    segment: &[u8],
    log: LogId,
    number: u64,
    from: u64,
) -> impl Iterator<Item = GroupHeader> {
    let offsets = (to_usize(from).max(BLOCK).next_multiple_of(BLOCK)..segment.len()).step_by(BLOCK);
    offsets.filter_map(move |offset| GroupHeader::decode(segment, log, number, offset as u64).ok())
}

fn segment_seed(log: LogId, epoch: Epoch, segment: u64) -> u32 {
    let seed = crc32c_append(crc32c(log.0.as_bytes()), &epoch.0.to_le_bytes());
    crc32c_append(seed, &segment.to_le_bytes())
}

fn group_seed(segment_seed: u32, group: u64) -> u32 {
    crc32c_append(segment_seed, &group.to_le_bytes())
}

fn entry_checksum(seed: u32, entry: &[u8]) -> u32 {
    crc32c_append(crc32c_append(seed, &entry[..4]), &entry[ENTRY_HEADER..])
}

fn header_checksum(seed: u32, magic: &[u8; 8], rest: &[u8]) -> u32 {
    crc32c_append(crc32c_append(crc32c_append(seed, magic), &FORMAT.to_le_bytes()), rest)
}

fn put(out: &mut [u8], at: usize, bytes: &[u8]) {
    out[at..at + bytes.len()].copy_from_slice(bytes);
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

fn log_at(bytes: &[u8], at: usize) -> LogId {
    LogId(uuid::Uuid::from_bytes(bytes[at..at + 16].try_into().expect("sixteen bytes")))
}

fn to_usize(offset: u64) -> usize {
    usize::try_from(offset).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use proptest::prelude::*;
    use proptest::sample::Index;

    use super::*;

    const SEGMENT_BYTES: usize = 64 << 10;

    fn header(segment: u64, first: Option<Chain>) -> SegmentHeader {
        SegmentHeader {
            log: LogId(uuid::Uuid::from_u128(0x5105_1ce0_0000_4000_8000_0000_0000_0001)),
            owner: "pod-1".parse().expect("valid"),
            epoch: Epoch(2),
            segment,
            segment_bytes: SEGMENT_BYTES as u64,
            first,
        }
    }

    /// Writes groups of entries one after the other. Returns where each starts and where its padding does.
    fn write(segment: &mut [u8], header: &SegmentHeader, groups: &[Vec<Vec<u8>>]) -> Vec<Range<usize>> {
        header.encode(segment);
        let (mut chain, mut at) = (header.first.expect("in use"), BLOCK);
        let write_group = |entries: &Vec<Vec<u8>>| {
            let offset = at as u64;
            let durable = chain.group - 1;
            let (log, epoch, number) = (header.log, header.epoch, header.segment);
            let place = GroupPlace { log, epoch, segment: number, offset, chain, durable };
            // Payloads come in parts.
            let halves = |entry: &Vec<u8>| {
                let (head, tail) = entry.split_at(entry.len() / 2);
                vec![Bytes::copy_from_slice(head), Bytes::copy_from_slice(tail)]
            };
            let payloads: Vec<Vec<Bytes>> = entries.iter().map(halves).collect();
            chain = encode_group(&mut segment[at..], &place, &payloads);
            let payload_bytes: usize = entries.iter().map(Vec::len).sum();
            let filled = at..at + GROUP_HEADER + entries.len() * ENTRY_HEADER + payload_bytes;
            at += group_bytes(entries.len(), payload_bytes);
            filled
        };
        groups.iter().map(write_group).collect()
    }

    /// All that the chain reaches from the segment's first group on.
    fn scan(segment: &[u8], header: &SegmentHeader) -> (Vec<Vec<Vec<u8>>>, Fault) {
        let (mut chain, mut at, mut groups) = (header.first.expect("in use"), BLOCK as u64, Vec::new());
        loop {
            match read_group(segment, header, at, chain) {
                Err(fault) => return (groups, fault),
                Ok(group) => {
                    let entries = group.entries(segment);
                    groups.push(entries.map(|entry| segment[entry.payload].to_vec()).collect());
                    (at, chain) = (group.end, group.next);
                }
            }
        }
    }

    fn first(group: u64) -> Option<Chain> {
        Some(Chain { group, previous: 0xabcd })
    }

    fn some_groups() -> impl Strategy<Value = Vec<Vec<Vec<u8>>>> {
        let entry = prop_oneof![
            3 => prop::collection::vec(any::<u8>(), 0..40),
            1 => (any::<u8>(), 0_usize..5_000).prop_map(|(byte, length)| vec![byte; length]),
        ];
        prop::collection::vec(prop::collection::vec(entry, 1..4), 1..4)
    }

    proptest! {
        /// A recycled file: whatever it held, as the same log's earlier segment, is never seen again.
        #[test]
        fn a_scan_finds_exactly_what_was_written(old in some_groups(), new in some_groups()) {
            let mut segment = vec![0; SEGMENT_BYTES];
            write(&mut segment, &header(6, first(30)), &old);
            let header = header(7, first(40));
            let filled = write(&mut segment, &header, &new);
            prop_assert_eq!(SegmentHeader::decode(&segment), Ok(header.clone()));
            let (found, fault) = scan(&segment, &header);
            prop_assert_eq!(found, new);
            prop_assert_eq!(fault.offset as usize, padded(filled.last().expect("a group").end));
        }

        /// The naive model: groups before the damage are found, the damaged one and those after it are not.
        #[test]
        fn a_flipped_bit_ends_the_chain_at_its_group(
            groups in some_groups(), at in any::<Index>(), bit in 0..8,
        ) {
            let header = header(7, first(40));
            let mut segment = vec![0; SEGMENT_BYTES];
            let filled = write(&mut segment, &header, &groups);
            let end = padded(filled.last().expect("a group").end);
            let at = BLOCK + at.index(end - BLOCK);
            segment[at] ^= 1_u8 << bit;
            let hit = filled.iter().position(|filled| filled.contains(&at));
            let expected = &groups[..hit.unwrap_or(groups.len())];
            let (found, fault) = scan(&segment, &header);
            prop_assert_eq!(&found[..], expected);
            prop_assert_eq!(fault.offset as usize, hit.map_or(end, |hit| filled[hit].start));
        }

        /// Power was lost: a part of the new sectors is there, in between is what the file held before.
        #[test]
        fn a_torn_write_ends_the_chain_at_its_group(
            old in some_groups(), new in some_groups(), sectors in prop::collection::vec(any::<bool>(), 128),
        ) {
            let mut torn = vec![0; SEGMENT_BYTES];
            write(&mut torn, &header(6, first(30)), &old);
            let header = header(7, first(40));
            let mut whole = torn.clone();
            let filled = write(&mut whole, &header, &new);
            for (index, written) in sectors.iter().enumerate() {
                let sector = index * 512..(index + 1) * 512;
                if *written || index < 8 {
                    torn[sector.clone()].copy_from_slice(&whole[sector]);
                }
            }
            let lost = filled.iter().position(|filled| torn[filled.clone()] != whole[filled.clone()]);
            prop_assert_eq!(&scan(&torn, &header).0[..], &new[..lost.unwrap_or(new.len())]);
        }

        /// Garbage is no header and no group, and reading it does not panic.
        #[test]
        fn garbage_is_refused(bytes in prop::collection::vec(any::<u8>(), 0..9_000)) {
            prop_assert!(SegmentHeader::decode(&bytes).is_err());
            let header = header(7, first(40));
            prop_assert!(read_group(&bytes, &header, BLOCK as u64, Chain::START).is_err());
            prop_assert_eq!(headers_from(&bytes, header.log, 7, 0).count(), 0);
        }
    }

    #[test]
    fn a_damaged_header_is_told_from_a_newer_one() {
        let mut segment = vec![0; BLOCK];
        header(7, None).encode(&mut segment);
        for bit in 0..SEGMENT_HEADER * 8 {
            let mut damaged = segment.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            let decoded = SegmentHeader::decode(&damaged);
            assert!(matches!(decoded, Err(HeaderFault::Damaged(_))), "bit {bit}: {decoded:?}");
        }
        put(&mut segment, 8, &2_u32.to_le_bytes());
        put(&mut segment, 12, &77_u32.to_le_bytes());
        assert_eq!(SegmentHeader::decode(&segment), Err(HeaderFault::Newer(2)));
    }

    #[test]
    fn headers_are_found_wherever_they_stand() {
        let mut segment = vec![0; SEGMENT_BYTES];
        let groups: Vec<Vec<Vec<u8>>> = (0..4).map(|n| vec![vec![n; 5_000]]).collect();
        let header = header(7, first(40));
        let filled = write(&mut segment, &header, &groups);
        segment[filled[1].start] ^= 1;
        let numbers = |log, number| -> Vec<u64> {
            headers_from(&segment, log, number, 0).map(|header| header.number).collect()
        };
        assert_eq!(numbers(header.log, 7), [40, 42, 43]);
        assert_eq!(numbers(header.log, 8), [0_u64; 0]);
        assert_eq!(numbers(LogId(uuid::Uuid::nil()), 7), [0_u64; 0]);
    }

    #[test]
    fn a_group_of_another_history_is_not_in_the_chain() {
        let mut segment = vec![0; SEGMENT_BYTES];
        let header = header(7, first(40));
        write(&mut segment, &header, &[vec![b"entry".to_vec()]]);
        let read = |chain| read_group(&segment, &header, BLOCK as u64, chain);
        assert!(read(Chain { group: 40, previous: 0xabcd }).is_ok());
        assert!(read(Chain { group: 40, previous: 0xabce }).is_err(), "another predecessor");
        assert!(read(Chain { group: 41, previous: 0xabcd }).is_err(), "another number");
    }

    /// Bytes of version 1, which every later program must read, and which this one must write.
    #[test]
    fn the_bytes_of_version_1_stay() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/wal-v1/00000000000000000003.wal");
        let groups = [
            vec![b"first entry".to_vec()],
            vec![Vec::new(), (0..=255).collect(), vec![7; 5_000]],
            vec![b"last entry".to_vec()],
        ];
        let mut segment = vec![0; SEGMENT_BYTES];
        write(&mut segment, &header(3, first(17)), &groups);
        let golden = std::fs::read(&path).unwrap_or_default();
        if golden != segment {
            let written = std::env::temp_dir().join("sluice-golden-3.wal");
            std::fs::write(&written, &segment).expect("written");
            panic!("{} differs from what this program writes, {}", path.display(), written.display());
        }
        let read = SegmentHeader::decode(&golden).expect("a header");
        assert_eq!(scan(&golden, &read).0, groups);
    }
}
