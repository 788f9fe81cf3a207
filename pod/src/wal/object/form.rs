//! The bytes of a log's objects: a group of entries, or the seal behind the last one.
//!
//! # Format, version 1
//!
//! An object has the form of a segment (`wal/segment.rs`) with one group: the segment's header in the first block, with
//! the object's number as segment number and the group's number as that of the first group, which are the same; then the
//! group. A *seal* is the first block alone, of a higher epoch, and names no group. In the header's block also stands:
//!
//! | at | type | what |
//! |---|---|---|
//! | 160 | u32 | 1: a group; 2: a seal |
//! | 164 | u32 | checksum of bytes 160..164 and 168..256, seeded by the header's checksum |
//! | 168 | 16 bytes | nonce: made anew for each object, to tell a lost reply from a rival |
//! | 184 | u64 | the first number whose object was kept when this was written |
//! | 192 | u8, 63 bytes | length of the writer's name, and the name: of a seal, the pod that took the log over |
//!
//! *Owns*: encoding and decoding of objects.
//! *Does not own*: where objects are kept (`folder.rs`), what follows from them (`sealed.rs`).

use bytes::Bytes;
use crc32c::crc32c_append;
use sluice_shared::ids::{Epoch, LogId, PodId};
use uuid::Uuid;

use super::super::segment::{
    self, BLOCK, Chain, ENTRY_HEADER, FORMAT, GROUP_HEADER, GroupPlace, HeaderFault, SegmentHeader,
};

/// The life that writes the log.
pub(in crate::wal) const EPOCH: Epoch = Epoch(1);
/// The life that begins when the log is taken over: nothing is written in it but the seal.
const SEALED_EPOCH: Epoch = Epoch(2);
/// A seal's bytes: every group has more.
pub(super) const SEAL_BYTES: u64 = BLOCK as u64;

const KIND: usize = 160;
const TAIL_CHECKSUM: usize = 164;
const TAIL: usize = 168;
const NONCE: usize = 168;
const KEPT: usize = 184;
const WRITER: usize = 192;
const TAIL_END: usize = 256;
const GROUP: u32 = 1;
const SEAL: u32 = 2;

/// A group's place in its log.
#[derive(Debug, Clone)]
pub(super) struct GroupObject<'a> {
    pub(super) log: LogId,
    pub(super) owner: &'a PodId,
    pub(super) nonce: Uuid,
    pub(super) chain: Chain,
    /// The highest number of which, and of all before, it is known that it is stored.
    pub(super) durable: u64,
    /// The first number that is kept.
    pub(super) kept: u64,
}

/// An entry of a group that was encoded: where its header stands in the object, and what its checksum goes on from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct EntryPlace {
    pub(super) offset: u64,
    pub(super) payload_bytes: usize,
    pub(super) seed: u32,
}

/// What an object is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Object {
    pub(super) nonce: Uuid,
    pub(super) kept: u64,
    pub(super) writer: PodId,
    pub(super) kind: Kind,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Kind {
    Seal,
    Group {
        /// What it carries itself.
        chain: Chain,
        /// What the next one must carry.
        next: Chain,
        durable: u64,
        entries: Vec<EntryPlace>,
    },
}

/// Why bytes are no object of the log.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// Written by a newer program.
    Newer(u32),
    /// Not what any program wrote there.
    Damaged(String),
}

/// Encodes a group. Answers the object, where its entries stand, and what the next group must carry.
pub(super) fn encode_group(
    of: &GroupObject<'_>,
    payloads: &[Vec<Bytes>],
) -> (Vec<u8>, Vec<EntryPlace>, Chain) {
    let payload_bytes = payloads.iter().flatten().map(Bytes::len).sum();
    let mut bytes = vec![0; BLOCK + segment::group_bytes(payloads.len(), payload_bytes)];
    let (number, offset) = (of.chain.group, BLOCK as u64);
    let header = SegmentHeader {
        log: of.log,
        owner: of.owner.clone(),
        epoch: EPOCH,
        segment: number,
        segment_bytes: bytes.len() as u64,
        first: Some(of.chain),
    };
    header.encode(&mut bytes);
    put_tail(&mut bytes, GROUP, of.nonce, of.kept, of.owner);
    let place = GroupPlace {
        log: of.log,
        epoch: EPOCH,
        segment: number,
        offset,
        chain: of.chain,
        durable: of.durable,
    };
    let next = segment::encode_group(&mut bytes[BLOCK..], &place, payloads);
    let (seed, mut at) = (place.seed(), BLOCK + GROUP_HEADER);
    let places = payloads.iter().map(|payload| {
        let payload_bytes = payload.iter().map(Bytes::len).sum();
        let entry = EntryPlace { offset: at as u64, payload_bytes, seed };
        at += ENTRY_HEADER + payload_bytes;
        entry
    });
    let places = places.collect();
    (bytes, places, next)
}

/// Encodes the seal that `writer` puts in place of the object of this number.
pub(super) fn encode_seal(log: LogId, owner: &PodId, writer: &PodId, number: u64) -> Bytes {
    let mut bytes = vec![0; BLOCK];
    let header = SegmentHeader {
        log,
        owner: owner.clone(),
        epoch: SEALED_EPOCH,
        segment: number,
        segment_bytes: SEAL_BYTES,
        first: None,
    };
    header.encode(&mut bytes);
    put_tail(&mut bytes, SEAL, Uuid::new_v4(), number, writer);
    bytes.into()
}

/// Reads the object of this number. All checksums are verified.
pub(super) fn decode(bytes: &[u8], log: LogId, number: u64) -> Result<Object, Fault> {
    let header = SegmentHeader::decode(bytes).map_err(|fault| match fault {
        HeaderFault::Newer(found) => Fault::Newer(found),
        HeaderFault::Damaged(reason) => Fault::Damaged(reason),
    })?;
    if header.log != log || header.segment != number {
        let (found, at) = (header.log.0, header.segment);
        return Err(Fault::Damaged(format!("it is object {at} of log {found}")));
    }
    let (kind, nonce, kept, writer) = read_tail(bytes).map_err(Fault::Damaged)?;
    if header.segment_bytes != bytes.len() as u64 {
        let (is, should) = (bytes.len(), header.segment_bytes);
        return Err(Fault::Damaged(format!("it has {is} bytes, not {should}")));
    }
    let kind = match (kind, header.first) {
        (SEAL, None) => Kind::Seal,
        (GROUP, Some(chain)) => read_group(bytes, &header, chain).map_err(Fault::Damaged)?,
        (kind, first) => {
            return Err(Fault::Damaged(format!("an object of kind {kind} with group {first:?}")));
        }
    };
    Ok(Object { nonce, kept, writer, kind })
}

/// The nonce alone.
pub(super) fn nonce_of(bytes: &[u8], log: LogId, number: u64) -> Option<Uuid> {
    let header = SegmentHeader::decode(bytes).ok()?;
    let (_, nonce, ..) = read_tail(bytes).ok()?;
    (header.log == log && header.segment == number).then_some(nonce)
}

fn read_group(bytes: &[u8], header: &SegmentHeader, chain: Chain) -> Result<Kind, String> {
    let group = segment::read_group(bytes, header, BLOCK as u64, chain).map_err(|fault| fault.reason)?;
    if group.end != bytes.len() as u64 || chain.group != header.segment {
        return Err(format!("group {} is not all that is in it", chain.group));
    }
    let entries = group.entries(bytes).map(|entry| EntryPlace {
        offset: entry.offset,
        payload_bytes: entry.payload.len(),
        seed: entry.seed,
    });
    Ok(Kind::Group { chain, next: group.next, durable: group.header.durable, entries: entries.collect() })
}

fn put_tail(block: &mut [u8], kind: u32, nonce: Uuid, kept: u64, writer: &PodId) {
    block[KIND..KIND + 4].copy_from_slice(&kind.to_le_bytes());
    block[NONCE..NONCE + 16].copy_from_slice(nonce.as_bytes());
    block[KEPT..KEPT + 8].copy_from_slice(&kept.to_le_bytes());
    let writer = writer.as_str().as_bytes();
    block[WRITER] = u8::try_from(writer.len()).expect("a pod id has at most 63 characters");
    block[WRITER + 1..WRITER + 1 + writer.len()].copy_from_slice(writer);
    let checksum = tail_checksum(block);
    block[TAIL_CHECKSUM..TAIL_CHECKSUM + 4].copy_from_slice(&checksum.to_le_bytes());
}

fn read_tail(block: &[u8]) -> Result<(u32, Uuid, u64, PodId), String> {
    if block.len() < BLOCK {
        return Err("it is cut short".to_owned());
    }
    let number = |at: usize| u32::from_le_bytes(block[at..at + 4].try_into().expect("four bytes"));
    if number(TAIL_CHECKSUM) != tail_checksum(block) {
        return Err("what stands behind its header does not match its checksum".to_owned());
    }
    let nonce = Uuid::from_bytes(block[NONCE..NONCE + 16].try_into().expect("sixteen bytes"));
    let kept = u64::from_le_bytes(block[KEPT..KEPT + 8].try_into().expect("eight bytes"));
    let length = usize::from(block[WRITER]).min(TAIL_END - WRITER - 1);
    let writer = std::str::from_utf8(&block[WRITER + 1..WRITER + 1 + length]).ok();
    let writer = writer.and_then(|name| name.parse().ok()).ok_or("its writer is no pod id")?;
    Ok((number(KIND), nonce, kept, writer))
}

/// Puts that checksum right over bytes that a fuzzer has changed.
#[cfg(debug_assertions)]
pub(super) fn mend_tail(block: &mut [u8]) {
    if block.len() >= TAIL_END {
        let checksum = tail_checksum(block);
        block[TAIL_CHECKSUM..TAIL_CHECKSUM + 4].copy_from_slice(&checksum.to_le_bytes());
    }
}

/// Seeded by the header's own, so that neither counts without the other.
fn tail_checksum(block: &[u8]) -> u32 {
    let seed = u32::from_le_bytes(block[12..16].try_into().expect("four bytes"));
    crc32c_append(crc32c_append(seed, &block[KIND..KIND + 4]), &block[TAIL..TAIL_END])
}

/// The newest version that this program reads.
pub(super) const KNOWN: u32 = FORMAT;

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: LogId = LogId(Uuid::from_u128(7));

    fn pod(name: &str) -> PodId {
        name.parse().expect("valid")
    }

    fn object(owner: &PodId) -> GroupObject<'_> {
        let nonce = Uuid::from_u128(9);
        GroupObject { log: LOG, owner, nonce, chain: Chain { group: 5, previous: 77 }, durable: 3, kept: 2 }
    }

    fn payloads() -> Vec<Vec<Bytes>> {
        vec![
            vec![Bytes::from_static(b"first "), Bytes::from_static(b"entry")],
            vec![],
            vec![vec![7; 5_000].into()],
        ]
    }

    #[test]
    fn a_group_is_read_back_as_it_was() {
        let owner = pod("pod-1");
        let (bytes, places, next) = encode_group(&object(&owner), &payloads());
        let read = decode(&bytes, LOG, 5).expect("whole");
        assert_eq!((read.nonce, read.kept, &read.writer), (Uuid::from_u128(9), 2, &owner));
        let chain = Chain { group: 5, previous: 77 };
        assert_eq!(read.kind, Kind::Group { chain, next, durable: 3, entries: places.clone() });
        let payload = |place: &EntryPlace| {
            let start = usize::try_from(place.offset).expect("small") + ENTRY_HEADER;
            bytes[start..start + place.payload_bytes].to_vec()
        };
        let read: Vec<Vec<u8>> = places.iter().map(payload).collect();
        assert_eq!(read, [b"first entry".to_vec(), Vec::new(), vec![7; 5_000]]);
        assert_eq!(nonce_of(&bytes, LOG, 5), Some(Uuid::from_u128(9)));
        assert_eq!(nonce_of(&bytes, LOG, 6), None, "another object's");
    }

    #[test]
    fn a_seal_names_who_took_the_log_over_and_is_shorter_than_any_group() {
        let seal = encode_seal(LOG, &pod("pod-1"), &pod("pod-2"), 6);
        let read = decode(&seal, LOG, 6).expect("whole");
        assert_eq!((read.kind, read.writer.as_str()), (Kind::Seal, "pod-2"));
        assert_eq!(seal.len() as u64, SEAL_BYTES);
        let (group, ..) = encode_group(&object(&pod("pod-1")), &[vec![]]);
        assert!(group.len() as u64 > SEAL_BYTES);
        assert_ne!(encode_seal(LOG, &pod("pod-1"), &pod("pod-2"), 6), seal, "each has its nonce");
    }

    /// Objects that version 1 wrote: what is stored now must be readable for good.
    #[test]
    fn objects_of_version_1_are_read_and_written() {
        let owner = pod("pod-1");
        let (group, ..) = encode_group(&object(&owner), &payloads());
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/object-v1");
        let golden = std::fs::read(&path).unwrap_or_default();
        if golden != group {
            let written = std::env::temp_dir().join("sluice-golden-object");
            std::fs::write(&written, &group).expect("written");
            panic!("{} is not what is written now, {}", path.display(), written.display());
        }
        assert!(
            matches!(decode(&golden, LOG, 5).expect("whole").kind, Kind::Group { entries, .. } if entries.len() == 3)
        );
    }

    #[test]
    fn no_flipped_bit_and_no_cut_is_overlooked() {
        let owner = pod("pod-1");
        let (whole, ..) = encode_group(&object(&owner), &payloads());
        let seal = encode_seal(LOG, &owner, &owner, 5).to_vec();
        for (bytes, used) in [(&whole, BLOCK + GROUP_HEADER + 3 * ENTRY_HEADER + 5_011), (&seal, TAIL_END)] {
            for at in (0..TAIL_END).chain(BLOCK..used).filter(|at| *at < bytes.len()) {
                // Padding between the header's fields and behind them means nothing.
                let mut damaged = bytes.clone();
                damaged[at] ^= 0x10;
                assert!(decode(&damaged, LOG, 5).is_err(), "byte {at} of {}", bytes.len());
            }
            for cut in [0, 11, 160, TAIL_END, BLOCK - 1, BLOCK, bytes.len() - 1] {
                if cut < bytes.len() {
                    assert!(decode(&bytes[..cut], LOG, 5).is_err(), "cut at {cut} of {}", bytes.len());
                }
            }
        }
        assert!(decode(&whole, LOG, 6).is_err() && decode(&whole, LogId(Uuid::from_u128(8)), 5).is_err());
        let mut newer = whole.clone();
        (newer[8], newer[12]) = (2, !newer[12]);
        assert_eq!(decode(&newer, LOG, 5), Err(Fault::Newer(2)));
    }
}
