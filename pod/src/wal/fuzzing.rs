//! For fuzzers: a log made by the log's own encoder, changed at will, and read by its own recovery and replay; only its
//! files are in memory. In builds with assertions alone, where nothing else calls it.
//!
//! *Owns*: making such a log, reading it.
//! *Does not own*: what is changed, and what must hold then (`loadtest`).

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use sluice_shared::ids::{Epoch, LogId, PodId, WalPosition};
use uuid::Uuid;

use super::bounds::{Bounds, Reached};
use super::disk::Disk;
use super::identity::{End, Identity};
use super::replay::{self, Recovered, Replay, Scan, Settled};
use super::segment::{self, BLOCK, Chain, FORMAT, GROUP_HEADER, GroupPlace, SegmentHeader, mend};
use super::writer::Shared;
use super::{WalConfig, WalError};

pub use super::object::fuzzing::{MadeUpObject, ReadObject};

/// A group to be written.
#[derive(Debug, Clone, Default)]
pub struct GroupPlan {
    /// Its entries.
    pub payloads: Vec<Bytes>,
    /// How many groups of its life before it were not known to be durable when it was written.
    pub lag: u64,
}

/// A group that was written.
#[derive(Debug, Clone)]
pub struct GroupMade {
    /// Its segment.
    pub segment: u64,
    /// Where it begins there.
    pub offset: usize,
    /// The life that wrote it.
    pub life: u64,
    /// Its number.
    pub number: u64,
    /// What it says of those before: through this number they are durable.
    pub durable: u64,
    /// Its entries.
    pub payloads: Vec<Bytes>,
    header: Vec<u8>,
}

impl GroupMade {
    /// Whether its header, not its entries, still stands in these segments as it was written.
    pub fn header_stands_in(&self, segments: &BTreeMap<u64, Vec<u8>>) -> bool {
        let bytes = segments.get(&self.segment).and_then(|segment| segment.get(self.offset..));
        bytes.is_some_and(|bytes| bytes.starts_with(&self.header))
    }
}

/// A log's files.
#[derive(Debug, Clone)]
pub struct MadeUpLog {
    /// The segments by number.
    pub segments: BTreeMap<u64, Vec<u8>>,
    /// What was written, in order.
    pub groups: Vec<GroupMade>,
    identity: Identity,
    /// What the next group carries.
    chain: Chain,
    first: u64,
    /// The newest segment of the newest life.
    made: Option<u64>,
}

impl MadeUpLog {
    /// An empty log, whose first segment will have this number.
    pub fn new(owner: PodId, first: u64) -> Self {
        let identity = Identity {
            format: FORMAT,
            log: LogId(Uuid::from_u128(7)),
            owner,
            epoch: Epoch(1),
            first_segment: first,
            chain: Chain::START,
            ends: Vec::new(),
            bounded: false,
        };
        let (segments, groups) = (BTreeMap::new(), Vec::new());
        Self { segments, groups, identity, chain: Chain::START, first, made: None }
    }

    /// The number of the newest life.
    pub fn life(&self) -> u64 {
        self.identity.epoch.0
    }

    /// What is written from here on is another life's, as after a restart.
    pub fn begin_life(&mut self) {
        if let Some(last) = self.groups.last().filter(|last| last.life == self.identity.epoch.0) {
            let payload_bytes = last.payloads.iter().map(Bytes::len).sum();
            let end = last.offset + segment::group_bytes(last.payloads.len(), payload_bytes);
            let end = End { epoch: self.identity.epoch, segment: last.segment, offset: end as u64 };
            self.identity.ends.push(end);
        }
        self.identity.epoch.0 += 1;
        self.identity.first_segment = self.next_segment();
        self.identity.chain = self.chain;
        self.made = None;
    }

    fn next_segment(&self) -> u64 {
        self.segments.keys().next_back().map_or(self.first, |last| last + 1)
    }

    /// Writes a segment with these groups, and a free block behind them. Without a group it is one that was made ahead.
    pub fn add_segment(&mut self, groups: Vec<GroupPlan>) {
        let number = self.next_segment();
        let group_bytes = |group: &GroupPlan| {
            segment::group_bytes(group.payloads.len(), group.payloads.iter().map(Bytes::len).sum())
        };
        let mut bytes = vec![0; 2 * BLOCK + groups.iter().map(group_bytes).sum::<usize>()];
        let header = SegmentHeader {
            log: self.identity.log,
            owner: self.identity.owner.clone(),
            epoch: self.identity.epoch,
            segment: number,
            segment_bytes: bytes.len() as u64,
            first: (!groups.is_empty()).then_some(self.chain),
        };
        header.encode(&mut bytes);
        let mut offset = BLOCK;
        for group in groups {
            let place = GroupPlace {
                log: header.log,
                epoch: header.epoch,
                segment: number,
                offset: offset as u64,
                chain: self.chain,
                durable: (self.chain.group - 1).saturating_sub(group.lag).max(self.identity.chain.group - 1),
            };
            let parts: Vec<Vec<Bytes>> = group.payloads.iter().map(|payload| vec![payload.clone()]).collect();
            self.chain = segment::encode_group(&mut bytes[offset..], &place, &parts);
            self.groups.push(GroupMade {
                segment: number,
                offset,
                life: header.epoch.0,
                number: place.chain.group,
                durable: place.durable,
                header: bytes[offset..offset + GROUP_HEADER].to_vec(),
                payloads: group.payloads.clone(),
            });
            offset += group_bytes(&group);
        }
        self.segments.insert(number, bytes);
        self.made = Some(number);
    }

    /// Puts the checksum of a segment's header right.
    pub fn mend_header(&mut self, segment: u64) {
        if let Some(bytes) = self.segments.get_mut(&segment) {
            mend::header(bytes);
        }
    }

    /// Puts the checksums of the group right that begins at `offset`.
    pub fn mend_group(&mut self, segment: u64, offset: usize) {
        if let Some(bytes) = self.segments.get_mut(&segment) {
            mend::group(bytes, offset);
        }
    }

    /// Reads the log as a start does: decides where it ends, then all entries up to there. It knows which segments have to be
    /// there where it knows a group through which all are `durable`.
    ///
    /// # Errors
    /// As `Wal::open` and `Replay`.
    pub fn replay(
        self,
        durable: Option<u64>,
        accept_loss: bool,
    ) -> Result<Vec<(WalPosition, Bytes)>, WalError> {
        let (disk, listing) = Disk::made_up(self.segments)?;
        let mut bounds = Bounds::default();
        if let Some(durable) = durable {
            let epoch = self.identity.epoch;
            bounds.release(Some(self.first));
            bounds.reached = self.made.map(|newest| Reached { epoch, newest, durable });
        }
        let scan = Scan::new(&disk, &self.identity, &listing, bounds);
        let Settled { found, chain, .. } = scan.settle(accept_loss)?;
        let identity = replay::next_life(&self.identity, &found, chain, &listing);
        let config = WalConfig::new(Path::new("/").to_owned(), identity.owner.clone());
        let (spares, spare_number) = (Vec::new(), 0);
        let recovered = Recovered { identity, found, spares, spare_number };
        let shared = Shared::new(disk, &config, &recovered, Box::new(|_| {}));
        let entries = Replay::new(Arc::new(shared), recovered.found);
        entries.map(|entry| entry.map(|(durable, payload)| (durable.position(), payload))).collect()
    }
}

/// Reads an identity, behind whose text its checksum is put where `mends`. What is one must be read back as it was.
///
/// # Errors
/// As a start's.
///
/// # Panics
/// Where it is read back as another.
pub fn read_identity(text: &[u8], mends: bool) -> Result<(), WalError> {
    let file = Path::new("identity");
    let mut text = text.to_vec();
    if mends {
        let checksum = crc32c::crc32c(&text);
        text.extend_from_slice(format!("\n{checksum:08x}\n").as_bytes());
    }
    let identity = Identity::decode(&text, file)?;
    let again = Identity::decode(identity.encode().as_bytes(), file)?;
    assert_eq!(identity, again, "an identity is written as it was read");
    Ok(())
}

/// The bytes of an identity's text, without its checksum: a seed.
pub fn identity_text() -> Vec<u8> {
    let mut log = MadeUpLog::new("pod-1".parse().expect("a valid id"), 3);
    log.add_segment(vec![GroupPlan { payloads: vec![Bytes::from_static(b"entry")], lag: 0 }]);
    log.begin_life();
    let text = log.identity.encode();
    text.lines().next().unwrap_or_default().as_bytes().to_vec()
}
