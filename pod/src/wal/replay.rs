//! Recovery: which groups belong to the log, and their entries once more.
//!
//! A segment belongs to the life (epoch) that its header names. Where an older life ends is written in the
//! identity: up to there every group must be whole, and what stands behind is not looked at. Only the end of the
//! newest life must be found: it is before the first group that is missing or damaged. That cut is a torn tail,
//! and harmless, unless a whole later header of the same life says that the missing group was durable: then it is
//! corruption, and nothing is changed unless the operator accepts the loss.
//!
//! *Owns*: the decision where the log ends, the new life's identity, replay.
//! *Does not own*: what replayed entries mean.

use std::collections::{BTreeMap, VecDeque};
use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;
use sluice_shared::fault::{self, Bug, Point};
use sluice_shared::ids::{Epoch, WalPosition};

use super::disk::{Disk, Listing};
use super::identity::{End, Identity};
use super::keeper::SPARES_MAX;
use super::segment::{self, BLOCK, Chain, Entry, FORMAT, Fault, GroupHeader, HeaderFault, SegmentHeader};
use super::writer::{Shared, Written};
use super::{Durable, WalConfig, WalError};

/// A segment with entries to replay.
#[derive(Debug, Clone, Copy)]
pub(super) struct Found {
    pub(super) number: u64,
    pub(super) file_bytes: u64,
    pub(super) entries: u64,
    epoch: Epoch,
    first: Chain,
    /// What follows its last group.
    next: Chain,
    /// Where its last group ends.
    end: u64,
}

/// What a log's directory was found to hold, and the identity of its new life.
pub(super) struct Recovered {
    pub(super) identity: Identity,
    pub(super) found: Vec<Found>,
    /// Spare files of the size in use.
    pub(super) spares: Vec<u64>,
    /// Number for the next spare file.
    pub(super) spare_number: u64,
}

/// The first place where the log does not go on.
#[derive(Debug, Clone)]
struct Break {
    position: WalPosition,
    reason: String,
    /// Known to have been durable, whatever later groups say.
    durable: bool,
}

/// Reads the directory, decides where the log ends, and begins the new life durably.
pub(super) fn recover(disk: &Disk, config: &WalConfig) -> Result<Recovered, WalError> {
    let mut listing = disk.list()?;
    let identity = match disk.read_identity()? {
        Some(identity) => identity,
        None if listing.segments.is_empty() => Identity::fresh(config.owner.clone()),
        None => {
            let reason = "it is missing, and there are segments".to_owned();
            return Err(WalError::Identity { file: disk.identity_path(), reason });
        }
    };
    if identity.owner != config.owner {
        let (found, expected) = (format!("pod {}", identity.owner), format!("pod {}", config.owner));
        return Err(WalError::Foreign { file: disk.identity_path(), found, expected });
    }
    let oldest = disk.read_oldest()?;
    // Those before were released, and about to be taken away.
    let kept = listing.segments.split_off(&oldest.unwrap_or(0));
    let released = std::mem::replace(&mut listing.segments, kept);
    let scan = Scan::new(disk, &identity, &listing, oldest);
    let (found, chain) = scan.settle(config.accept_loss)?;
    // What a process that was killed has written and not flushed was read from the page cache. It counts from here on,
    // as what the identity names, and must be there after a power loss.
    for found in found.iter().filter(|found| found.epoch == identity.epoch) {
        disk.flush(found.number)?;
    }
    let identity = next_life(&identity, &found, chain, &listing);
    listing.segments.extend(released);
    // Before segments without a group are taken away.
    disk.write_oldest(found.first().map(|first| first.number))?;
    disk.write_identity(&identity)?;
    let (spares, spare_number) = tidy(disk, config, &listing, &found)?;
    Ok(Recovered { identity, found, spares, spare_number })
}

pub(super) fn next_life(
    old: &Identity,
    found: &[Found],
    chain: Option<Chain>,
    listing: &Listing,
) -> Identity {
    let ends: BTreeMap<u64, End> = found
        .iter()
        .map(|found| (found.epoch.0, End { epoch: found.epoch, segment: found.number, offset: found.end }))
        .collect();
    let first_on_disk = listing.segments.keys().next().copied();
    Identity {
        format: FORMAT,
        log: old.log,
        owner: old.owner.clone(),
        epoch: Epoch(old.epoch.0 + 1),
        first_segment: match found.last() {
            Some(last) => last.number + 1,
            None => first_on_disk.unwrap_or(old.first_segment),
        },
        chain: chain.unwrap_or(old.chain),
        ends: ends.into_values().collect(),
    }
}

/// Makes segments behind the end spare files, the last one first, so that a crash leaves no hole; then removes
/// the spare files that are of no use.
fn tidy(
    disk: &Disk,
    config: &WalConfig,
    listing: &Listing,
    found: &[Found],
) -> Result<(Vec<u64>, u64), WalError> {
    let mut spares = listing.spares.clone();
    let mut spare_number = spares.keys().next_back().map_or(0, |last| last + 1);
    let kept: u64 = found.iter().map(|found| found.file_bytes).sum();
    for (number, bytes) in listing.segments.iter().rev() {
        if found.iter().any(|found| found.number == *number) {
            continue;
        }
        disk.retire(*number, spare_number)?;
        spares.insert(spare_number, *bytes);
        spare_number += 1;
    }
    let mut room = config.bytes_max.saturating_sub(kept);
    let mut useful = Vec::new();
    for (spare, bytes) in spares {
        if bytes == config.segment_bytes && bytes <= room && useful.len() < SPARES_MAX {
            room -= bytes;
            useful.push(spare);
        } else {
            disk.remove_spare(spare)?;
        }
    }
    Ok((useful, spare_number))
}

/// Walks the segments in order.
pub(super) struct Scan<'a> {
    disk: &'a Disk,
    identity: &'a Identity,
    listing: &'a Listing,
    /// The oldest segment that has to be there, as far as known.
    oldest: Option<u64>,
    /// The segment in hand; one buffer for all.
    bytes: Vec<u8>,
    found: Vec<Found>,
    /// What the next group must carry; None before the first group on disk.
    chain: Option<Chain>,
    /// Why the last segment's groups ended; forgotten when the next segment goes on from there.
    pending: Option<Break>,
}

/// What a segment is, by its header.
enum Kind {
    /// Its life ended before it, or without a group: nothing in it counts.
    Leftover,
    /// Of an older life. Some offset where it is the last one of it.
    Older(Option<u64>),
    /// Of the newest life.
    Newest,
}

impl<'a> Scan<'a> {
    pub(super) fn new(
        disk: &'a Disk,
        identity: &'a Identity,
        listing: &'a Listing,
        oldest: Option<u64>,
    ) -> Self {
        let (bytes, found) = (Vec::new(), Vec::new());
        Self { disk, identity, listing, oldest, bytes, found, chain: None, pending: None }
    }

    /// Decides where the log ends: the segments with groups up to there, and what the next group must carry. Changes
    /// nothing.
    pub(super) fn settle(mut self, accept_loss: bool) -> Result<(Vec<Found>, Option<Chain>), WalError> {
        if let Some(broken) = self.run()? {
            self.judge(&broken, accept_loss)?;
        }
        Ok((self.found, self.chain))
    }

    /// Finds all groups of the log, up to the first break that matters.
    fn run(&mut self) -> Result<Option<Break>, WalError> {
        if let Some(oldest) = self.oldest.filter(|oldest| !self.listing.segments.contains_key(oldest)) {
            return Ok(Some(self.missing(oldest)));
        }
        let mut previous = None;
        for number in self.listing.segments.keys().copied() {
            if previous.is_some_and(|previous| previous + 1 != number) {
                return Ok(Some(self.missing(previous.map_or(0, |previous| previous + 1))));
            }
            if let Some(broken) = self.segment(number)? {
                return Ok(Some(broken));
            }
            previous = Some(number);
        }
        // The last life that has ended may have lost all of its files, and those before it the groups in theirs.
        let settled = self.identity.ends.iter().map(|end| end.segment).max();
        let is_short = |last: &u64| settled.is_some_and(|settled| *last < settled);
        let unfinished = previous.filter(is_short).map(|last| last + 1);
        Ok(unfinished.map(|number| self.missing(number)).or_else(|| self.pending.take()))
    }

    fn missing(&self, segment: u64) -> Break {
        let position = WalPosition { segment, offset: 0 };
        Break { position, reason: "the file is missing".to_owned(), durable: true }
    }

    fn segment(&mut self, number: u64) -> Result<Option<Break>, WalError> {
        self.disk.load(number, &mut self.bytes)?;
        let header = match SegmentHeader::decode(&self.bytes) {
            Ok(header) => header,
            Err(HeaderFault::Newer(found)) => {
                let file = self.disk.segment_path(number);
                return Err(WalError::NewerFormat { file, found, known: FORMAT });
            }
            Err(HeaderFault::Damaged(reason)) => return Ok(self.damaged_header(number, reason)),
        };
        self.check_owner(number, &header)?;
        if header.segment != number {
            let reason = format!("the file holds segment {}", header.segment);
            return Ok(Some(Break {
                position: WalPosition { segment: number, offset: 0 },
                reason,
                durable: true,
            }));
        }
        match self.kind(&header)? {
            Kind::Leftover => Ok(None),
            Kind::Older(end) => Ok(self.groups(&header, end, true)),
            Kind::Newest => Ok(self.groups(&header, None, false)),
        }
    }

    /// Without a group behind it, it is a segment that was never used, or the torn first write of one; but not where the
    /// identity says that an older life has gone as far.
    fn damaged_header(&mut self, number: u64, reason: String) -> Option<Break> {
        let is_older = self.identity.ends.iter().any(|end| number <= end.segment);
        let has_group = segment::headers_from(&self.bytes, self.identity.log, number, 0).next().is_some();
        let durable = is_older || has_group;
        let broken = Break { position: WalPosition { segment: number, offset: 0 }, reason, durable };
        if !durable && self.pending.is_none() {
            self.pending = Some(broken);
            return None;
        }
        durable.then_some(broken)
    }

    fn check_owner(&self, number: u64, header: &SegmentHeader) -> Result<(), WalError> {
        if header.log == self.identity.log && header.owner == self.identity.owner {
            return Ok(());
        }
        let name = |log: sluice_shared::ids::LogId, owner: &sluice_shared::ids::PodId| {
            format!("log {} of pod {owner}", log.0)
        };
        Err(WalError::Foreign {
            file: self.disk.segment_path(number),
            found: name(header.log, &header.owner),
            expected: name(self.identity.log, &self.identity.owner),
        })
    }

    fn kind(&self, header: &SegmentHeader) -> Result<Kind, WalError> {
        let newest = self.identity.epoch;
        if header.epoch > newest {
            let (segment, found) = (header.segment, header.epoch.0);
            let reason = format!(
                "it is of epoch {}, but segment {segment} is of epoch {found}: it is an old copy",
                newest.0
            );
            return Err(WalError::Identity { file: self.disk.identity_path(), reason });
        }
        Ok(match self.identity.end_of(header.epoch) {
            Some(end) if header.segment > end.segment => Kind::Leftover,
            Some(end) => Kind::Older((header.segment == end.segment).then_some(end.offset)),
            None if header.epoch == newest => Kind::Newest,
            None => Kind::Leftover,
        })
    }

    /// Takes the groups of a segment. `end` is where they are known to end; `older` that they are known to be durable.
    fn groups(&mut self, header: &SegmentHeader, end: Option<u64>, older: bool) -> Option<Break> {
        let number = header.segment;
        let at = |offset| WalPosition { segment: number, offset };
        let Some(first) = header.first else {
            let reason = "the segment's header names no first group".to_owned();
            let broken = Break { position: at(BLOCK as u64), reason, durable: older };
            if older {
                return Some(broken);
            }
            self.pending.get_or_insert(broken);
            return None;
        };
        // Behind no group, what a damaged segment before this one held does not show in where this one goes on.
        let follows = self.chain.map_or(self.pending.is_none(), |chain| chain == first);
        if !follows {
            let expected = self.chain.map_or(0, |chain| chain.group);
            let reason = format!("segment {number} starts with group {}, not {expected}", first.group);
            let broken = Break { position: at(0), reason, durable: older };
            return Some(
                self.pending
                    .take()
                    .map_or(broken, |pending| Break { durable: older | pending.durable, ..pending }),
            );
        }
        self.pending = None;
        let (found, fault) = walk(&self.bytes, header, first, end.unwrap_or(u64::MAX));
        self.chain = Some(found.next);
        if found.next != first {
            self.found.push(found);
        }
        let fault = fault?;
        let broken = Break { position: at(fault.offset), reason: fault.reason, durable: end.is_some() };
        if end.is_some() {
            return Some(broken);
        }
        self.pending = Some(broken);
        None
    }

    /// A torn tail is cut. Damage to what was durable is an error, or a named loss where that is accepted.
    fn judge(&mut self, broken: &Break, accept_loss: bool) -> Result<(), WalError> {
        let rest = self.rest(broken.position)?;
        let group = self.chain.map(|chain| chain.group).or_else(|| self.first_missing(broken, &rest));
        let proof = group.and_then(|group| {
            let of_life = |header: &GroupHeader| header.epoch == self.identity.epoch;
            rest.headers.iter().find(|(_, header)| of_life(header) && header.durable >= group)
        });
        if proof.is_none() && !broken.durable {
            if !rest.headers.is_empty() {
                let (position, groups) = (broken.position, rest.headers.len());
                tracing::info!(wal_position = %position, groups, reason = %broken.reason, "torn tail of the log cut");
            }
            return Ok(());
        }
        let mut reason = broken.reason.clone();
        if let Some((segment, header)) = proof {
            let (number, offset, durable) = (header.number, header.offset, header.durable);
            reason.push_str(&format!(
                "; group {number} at {segment}:{offset} says that all through group {durable} were durable"
            ));
        }
        let segment = self.disk.segment_path(broken.position.segment);
        let error = WalError::Corrupt { segment, position: broken.position, reason };
        if !accept_loss {
            return Err(error);
        }
        rest.log_loss(broken, group, &error);
        Ok(())
    }

    /// The number of the first group that is missing, where none stands before it.
    fn first_missing(&self, broken: &Break, rest: &Rest) -> Option<u64> {
        if broken.position.segment == self.identity.first_segment {
            return Some(self.identity.chain.group);
        }
        // Others of its life were released, how many is not known; the last one is before those that are whole.
        rest.headers.iter().map(|(_, header)| header.number.saturating_sub(1).max(1)).min()
    }

    /// What stands from a position to the log's end.
    fn rest(&mut self, from: WalPosition) -> Result<Rest, WalError> {
        let mut rest = Rest::default();
        for number in self.listing.segments.range(from.segment..).map(|(number, _)| *number) {
            self.disk.load(number, &mut self.bytes)?;
            let offset = if number == from.segment { from.offset } else { 0 };
            let headers = segment::headers_from(&self.bytes, self.identity.log, number, offset);
            rest.headers.extend(headers.map(|header| (number, header)));
            rest.segments.push(self.disk.segment_path(number));
        }
        Ok(rest)
    }
}

/// The part of the log behind a break.
#[derive(Default)]
struct Rest {
    segments: Vec<PathBuf>,
    /// Whole group headers, with their segments.
    headers: Vec<(u64, GroupHeader)>,
}

impl Rest {
    fn log_loss(&self, broken: &Break, group: Option<u64>, error: &WalError) {
        let last = self.headers.iter().map(|(_, header)| header.number).max();
        let (first, last) = (group.unwrap_or(0), last.or(group).unwrap_or(0));
        let entries: u64 = self.headers.iter().map(|(_, header)| u64::from(header.entries)).sum();
        let bytes: u64 = self.headers.iter().map(|(_, header)| u64::from(header.body_bytes)).sum();
        tracing::error!(
            wal_position = %broken.position,
            first_group = first,
            last_group = last,
            entries_at_least = entries,
            bytes_at_least = bytes,
            segments = ?self.segments,
            error = error as &dyn std::error::Error,
            "loss accepted: all groups from here on are discarded"
        );
    }
}

/// Follows the chain of groups in a segment up to `end`, or to the first fault.
fn walk(bytes: &[u8], header: &SegmentHeader, first: Chain, end: u64) -> (Found, Option<Fault>) {
    let mut found = Found {
        number: header.segment,
        file_bytes: bytes.len() as u64,
        entries: 0,
        epoch: header.epoch,
        first,
        next: first,
        end: BLOCK as u64,
    };
    while found.end < end {
        let group = match segment::read_group(bytes, header, found.end, found.next) {
            Ok(group) => group,
            Err(fault) => return (found, Some(fault)),
        };
        found.entries += u64::from(group.header.entries);
        (found.end, found.next) = (group.end, group.next);
    }
    (found, None)
}

/// All entries of the log's older lives, in order. Holds one segment in memory. What is not taken counts as
/// outstanding until the next start.
pub struct Replay {
    shared: Arc<Shared>,
    segments: std::vec::IntoIter<Found>,
    current: Option<Cursor>,
    bytes: Vec<u8>,
}

/// How far replay has come in a segment.
struct Cursor {
    found: Found,
    header: SegmentHeader,
    at: u64,
    chain: Chain,
    entries: VecDeque<Entry>,
}

impl Replay {
    pub(super) fn new(shared: Arc<Shared>, found: Vec<Found>) -> Self {
        Self { shared, segments: found.into_iter(), current: None, bytes: Vec::new() }
    }

    fn open(&mut self, found: Found) -> Result<Cursor, WalError> {
        self.shared.disk.load(found.number, &mut self.bytes)?;
        let header = SegmentHeader::decode(&self.bytes).map_err(|fault| {
            let reason = format!("changed since the start: {fault:?}");
            self.corrupt(found.number, 0, reason)
        })?;
        Ok(Cursor { found, header, at: BLOCK as u64, chain: found.first, entries: VecDeque::new() })
    }

    fn corrupt(&self, segment: u64, offset: u64, reason: String) -> WalError {
        let position = WalPosition { segment, offset };
        WalError::Corrupt { segment: self.shared.disk.segment_path(segment), position, reason }
    }

    /// The next entry; None at the end.
    fn advance(&mut self) -> Result<Option<(Durable, Bytes)>, WalError> {
        loop {
            let Some(cursor) = &mut self.current else {
                let Some(found) = self.segments.next() else {
                    self.bytes = Vec::new();
                    return Ok(None);
                };
                self.current = Some(self.open(found)?);
                continue;
            };
            if let Some(entry) = cursor.entries.pop_front() {
                // An entry that cannot be read is a log that cannot be: errors are planned elsewhere.
                let _ = fault::hit(Point::WalReplay);
                let payload = Bytes::copy_from_slice(&self.bytes[entry.payload.clone()]);
                let written =
                    Written { offset: entry.offset, payload_bytes: payload.len(), seed: entry.seed };
                return Ok(Some((Durable::of(&self.shared, cursor.found.number, written), payload)));
            }
            if cursor.at >= cursor.found.end {
                self.current = None;
                continue;
            }
            match segment::read_group(&self.bytes, &cursor.header, cursor.at, cursor.chain) {
                Ok(group) => {
                    let is_last = self.segments.len() == 0 && group.end >= cursor.found.end;
                    if !(is_last && fault::has(Bug::ReplaySkipsLast)) {
                        cursor.entries.extend(group.entries(&self.bytes));
                    }
                    (cursor.at, cursor.chain) = (group.end, group.next);
                }
                Err(fault) => {
                    let number = cursor.found.number;
                    return Err(self.corrupt(
                        number,
                        fault.offset,
                        format!("changed since the start: {}", fault.reason),
                    ));
                }
            }
        }
    }
}

impl Iterator for Replay {
    type Item = Result<(Durable, Bytes), WalError>;

    fn next(&mut self) -> Option<Self::Item> {
        let next = self.advance();
        if next.is_err() {
            // What follows a failure would be out of order.
            self.segments = Vec::new().into_iter();
            self.current = None;
        }
        next.transpose()
    }
}
