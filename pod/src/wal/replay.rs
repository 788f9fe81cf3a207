//! Recovery: which groups belong to the log, and their entries once more.
//!
//! A segment belongs to the life (epoch) that its header names. Where an older life ends is written in the
//! identity: up to there every group must be whole, and what stands behind is not looked at. Only the end of the
//! newest life must be found: it is before the first group that is missing or damaged. That cut is a torn tail,
//! and harmless, unless it is known that the missing group was durable: then it is corruption, and nothing is changed
//! unless the operator accepts the loss. It is known from
//!
//! - a whole later header of the same life, which says so of the groups before it,
//! - the file `oldest`, which says so of the groups that were durable some time before the end (all, after a clean stop),
//!   and which segments have to be there (`bounds.rs`),
//! - the file's length and header: a segment has all its bytes and a whole header, durably, before it has a number, and the
//!   header, rewritten with the first group, fits a sector.
//!
//! Otherwise no more than a warning can be given, where something of this life stands behind the cut.
//!
//! *Owns*: the decision where the log ends, the new life's identity, replay.
//! *Does not own*: what replayed entries mean.

use std::collections::{BTreeMap, VecDeque};
use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;
use sluice_shared::fault::{self, Bug, Point};
use sluice_shared::ids::{Epoch, WalPosition};

use super::bounds::{Bounds, Reached};
use super::disk::{Disk, Listing};
use super::identity::{End, Identity};
use super::keeper::SPARES_MAX;
use super::segment::{
    self, BLOCK, Chain, Entry, FORMAT, Fault, GroupHeader, HeaderFault, Place, SegmentHeader,
};
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

/// Where the log's groups end, and the files go on.
#[derive(Debug, Default)]
pub(super) struct Settled {
    /// The segments with groups up to there.
    pub(super) found: Vec<Found>,
    /// What the next group must carry.
    pub(super) chain: Option<Chain>,
    pub(super) cut: Option<Cut>,
}

/// A tail of the newest life of which it is not known that it was durable.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Cut {
    pub(super) position: WalPosition,
    reason: String,
    /// How many whole headers of groups stand behind it.
    groups: usize,
    /// How many bytes that are not zero, up to where the last of these groups ends.
    bytes: usize,
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
    let known = disk.read_bounds()?;
    let identity = identity(disk, config, &listing, known.ok())?;
    let bounds = bounds(disk, config, &identity, &listing, known)?;
    // Those before were released, and about to be taken away.
    let kept = listing.segments.split_off(&bounds.oldest.unwrap_or(0));
    let released = std::mem::replace(&mut listing.segments, kept);
    let scan = Scan::new(disk, &identity, &listing, bounds);
    let Settled { found, chain, cut } = scan.settle(config.accept_loss)?;
    if let Some(cut) = &cut {
        cut.warn(disk);
    }
    // What a process that was killed has written and not flushed was read from the page cache. It counts from here on,
    // as what the identity names, and must be there after a power loss.
    for found in found.iter().filter(|found| found.epoch == identity.epoch) {
        disk.flush(found.number)?;
    }
    let identity = next_life(&identity, &found, chain, &listing);
    listing.segments.extend(released);
    // Before segments without a group are taken away. How far the old life had come goes on to count until the new one
    // begins.
    disk.change_bounds(|bounds| bounds.oldest = found.first().map(|first| first.number))?;
    disk.write_identity(&identity)?;
    let (spares, spare_number) = tidy(disk, config, &listing, &found)?;
    Ok(Recovered { identity, found, spares, spare_number })
}

/// Whose log this is; a new one's where there is none yet.
fn identity(
    disk: &Disk,
    config: &WalConfig,
    listing: &Listing,
    bounds: Option<Bounds>,
) -> Result<Identity, WalError> {
    let had_segments = bounds.is_some_and(|bounds| bounds.reached.is_some());
    let identity = match disk.read_identity()? {
        Some(identity) => identity,
        None if listing.segments.is_empty() && !had_segments => Identity::fresh(config.owner.clone()),
        None => {
            let reason = if listing.segments.is_empty() {
                "it is missing, and so are segments that have to be there"
            } else {
                "it is missing, and there are segments"
            };
            return Err(WalError::Identity { file: disk.identity_path(), reason: reason.to_owned() });
        }
    };
    if identity.owner != config.owner {
        let (found, expected) = (format!("pod {}", identity.owner), format!("pod {}", config.owner));
        return Err(WalError::Foreign { file: disk.identity_path(), found, expected });
    }
    Ok(identity)
}

/// Which segments have to be there. Where that should be known and is not, it is damage like any other.
fn bounds(
    disk: &Disk,
    config: &WalConfig,
    identity: &Identity,
    listing: &Listing,
    known: Result<Bounds, &'static str>,
) -> Result<Bounds, WalError> {
    let path = disk.bounds_path();
    let reason = match known {
        Ok(bounds) => {
            if let Some(reached) = bounds.reached.filter(|reached| reached.epoch > identity.epoch) {
                let (newest, known) = (identity.epoch.0, reached.epoch.0);
                let reason = format!(
                    "it is of epoch {newest}, but {} is of epoch {known}: it is an old copy",
                    path.display()
                );
                return Err(WalError::Identity { file: disk.identity_path(), reason });
            }
            return Ok(bounds);
        }
        Err(reason) => reason,
    };
    if !identity.bounded {
        // Older programs left none, or went on without. A new log has none yet.
        if identity.epoch > Epoch(0) {
            tracing::warn!(path = %path.display(), reason, "whether the log's first segments are missing is not known");
        }
        return Ok(Bounds::default());
    }
    let first = listing.segments.keys().next().copied().unwrap_or(identity.first_segment);
    let reason = format!(
        "{reason}, and it says which segments and groups have to be there: whether some are lost is not known; those that \
         are there are kept with --accept-loss"
    );
    let position = WalPosition { segment: first, offset: 0 };
    let error = WalError::Corrupt { segment: path, position, reason };
    if !config.accept_loss {
        return Err(error);
    }
    tracing::error!(error = &error as &dyn std::error::Error, "loss accepted, as far as there is one");
    Ok(Bounds::default())
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
        bounded: true,
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
    /// How far the newest life has come at least, as far as known.
    reached: Option<Reached>,
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
    pub(super) fn new(disk: &'a Disk, identity: &'a Identity, listing: &'a Listing, bounds: Bounds) -> Self {
        let (bytes, found, oldest) = (Vec::new(), Vec::new(), bounds.oldest);
        let reached = bounds.reached.filter(|reached| reached.epoch == identity.epoch);
        Self { disk, identity, listing, oldest, reached, bytes, found, chain: None, pending: None }
    }

    /// Decides where the log ends. Changes nothing.
    pub(super) fn settle(mut self, accept_loss: bool) -> Result<Settled, WalError> {
        let cut = match self.run()? {
            Some(broken) => self.judge(&broken, accept_loss)?,
            None => None,
        };
        Ok(Settled { found: self.found, chain: self.chain, cut })
    }

    /// Finds all groups of the log, up to the first break that matters.
    fn run(&mut self) -> Result<Option<Break>, WalError> {
        if let Some(oldest) = self.oldest.filter(|oldest| !self.listing.segments.contains_key(oldest)) {
            return Ok(Some(self.missing(oldest, oldest)));
        }
        let mut previous = None;
        for number in self.listing.segments.keys().copied() {
            if let Some(previous) = previous.filter(|previous| previous + 1 != number) {
                return Ok(Some(self.missing(previous + 1, number - 1)));
            }
            if let Some(broken) = self.segment(number)? {
                return Ok(Some(broken));
            }
            previous = Some(number);
        }
        // The last life that has ended may have lost all of its files, and those before it the groups in theirs; the newest
        // one its last files.
        let ends = self.identity.ends.iter().map(|end| end.segment);
        let settled = ends.chain(self.reached.map(|reached| reached.newest)).max();
        let unfinished = previous.zip(settled).filter(|(last, settled)| last < settled);
        Ok(unfinished.map(|(last, settled)| self.missing(last + 1, settled)).or_else(|| self.pending.take()))
    }

    /// Segments are missing from one to another, which is the last one.
    fn missing(&self, segment: u64, last: u64) -> Break {
        let position = WalPosition { segment, offset: 0 };
        let reason = match last - segment {
            0 => "the file is missing".to_owned(),
            _ => format!("the file is missing, and so are those behind it through segment {last}"),
        };
        Break { position, reason, durable: true }
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
        let kind = self.kind(&header)?;
        if header.epoch != self.identity.epoch && self.is_of_newest(number) {
            let (found, newest) = (header.epoch.0, self.identity.epoch.0);
            let reason = format!(
                "the header is of epoch {found}, but epoch {newest} has made this segment: it is an old copy"
            );
            let position = WalPosition { segment: number, offset: 0 };
            return Ok(Some(Break { position, reason, durable: true }));
        }
        match kind {
            Kind::Leftover => Ok(None),
            Kind::Older(end) => Ok(self.groups(&header, end, true)),
            Kind::Newest => Ok(self.groups(&header, None, false)),
        }
    }

    /// Whether it is known that the newest life has made this segment.
    fn is_of_newest(&self, number: u64) -> bool {
        self.reached.is_some_and(|reached| (self.identity.first_segment..=reached.newest).contains(&number))
    }

    /// A segment has a whole header before it has its number, and the rewriting of the header cannot tear it. Of one that
    /// the new life has not yet taken away, and that no older one had come to, nothing counts; nor does what stands where
    /// nobody knows how far the newest life had come, unless there is a group.
    fn damaged_header(&mut self, number: u64, reason: String) -> Option<Break> {
        let settled = self.identity.ends.iter().map(|end| end.segment);
        let must_be = settled.chain(self.reached.map(|reached| reached.newest)).any(|last| number <= last);
        let has_group = segment::headers_from(&self.bytes, self.identity.log, number, 0).next().is_some();
        let durable = must_be || has_group;
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
        self.pending = Some(match cut_short(&self.bytes, header) {
            // Of an older life it is known what was in it.
            Some(reason) if !older => Break { reason, durable: true, ..broken },
            _ => broken,
        });
        None
    }

    /// A torn tail is cut. Damage to what was durable is an error, or a named loss where that is accepted.
    fn judge(&mut self, broken: &Break, accept_loss: bool) -> Result<Option<Cut>, WalError> {
        let rest = self.rest(broken.position)?;
        let group = self.chain.map(|chain| chain.group).or_else(|| self.first_missing(broken, &rest));
        let harm = rest.harm.clone().filter(|_| !broken.durable);
        let proof = group.and_then(|group| self.proof(group, &rest)).or(harm);
        if proof.is_none() && !broken.durable {
            return Ok(rest.cut(broken));
        }
        let reason = format!("{}{}", broken.reason, proof.unwrap_or_default());
        let segment = self.disk.segment_path(broken.position.segment);
        let error = WalError::Corrupt { segment, position: broken.position, reason };
        if !accept_loss {
            return Err(error);
        }
        rest.log_loss(broken, group, &error);
        Ok(None)
    }

    /// What says that this group was durable.
    fn proof(&self, group: u64, rest: &Rest) -> Option<String> {
        let later = self.of_life(rest).find(|(_, header)| header.durable >= group).map(|(segment, header)| {
            let (number, offset, durable) = (header.number, header.offset, header.durable);
            format!("; group {number} at {segment}:{offset} says that all through group {durable} were durable")
        });
        let reached = self.reached.filter(|reached| reached.durable >= group).map(|reached| {
            let file = self.disk.bounds_path();
            format!("; {} says that all through group {} were durable", file.display(), reached.durable)
        });
        reached.or(later)
    }

    /// Whole headers of the newest life.
    fn of_life<'r>(&self, rest: &'r Rest) -> impl Iterator<Item = &'r (u64, GroupHeader)> + use<'r> {
        let epoch = self.identity.epoch;
        rest.headers.iter().filter(move |(_, header)| header.epoch == epoch)
    }

    /// The number of the first group that is missing, where none stands before it.
    fn first_missing(&self, broken: &Break, rest: &Rest) -> Option<u64> {
        if broken.position.segment == self.identity.first_segment {
            return Some(self.identity.chain.group);
        }
        // Others of its life were released, how many is not known. What is missing is the segment's first group: where its
        // own header is whole it says which, and otherwise the one before those that are whole is missing too.
        let is_first = |segment, offset| segment == broken.position.segment && offset == BLOCK as u64;
        let missing = |(segment, header): &(u64, GroupHeader)| match is_first(*segment, header.offset) {
            true => header.number,
            false => header.number.saturating_sub(1).max(1),
        };
        self.of_life(rest).map(missing).min()
    }

    /// What stands from a position to the log's end.
    fn rest(&mut self, from: WalPosition) -> Result<Rest, WalError> {
        let mut rest = Rest::default();
        let (log, epoch) = (self.identity.log, self.identity.epoch);
        let mut next = from.segment;
        for number in self.listing.segments.range(from.segment..).map(|(number, _)| *number) {
            rest.note_missing(next, number);
            next = number + 1;
            self.disk.load(number, &mut self.bytes)?;
            let must_be = self.reached.is_some_and(|reached| number <= reached.newest);
            if must_be && let Some(reason) = harm(&self.bytes, number) {
                rest.harm.get_or_insert(format!("; and in segment {number} behind it: {reason}"));
            }
            let offset = if number == from.segment { from.offset } else { 0 };
            let headers: Vec<_> = segment::headers_from(&self.bytes, log, number, offset).collect();
            let place = Place { log, epoch, segment: number, offset };
            let begun = self.chain.and_then(|chain| segment::begun_until(&self.bytes, &place, chain));
            let of_life = headers.iter().filter(|header| header.epoch == epoch);
            let end = of_life.clone().map(GroupHeader::end).chain(begun).max().unwrap_or(0);
            rest.groups += of_life.count();
            rest.bytes += bytes_between(&self.bytes, offset.max(BLOCK as u64), end);
            rest.headers.extend(headers.into_iter().map(|header| (number, header)));
            rest.segments.push(self.disk.segment_path(number));
        }
        rest.note_missing(next, self.reached.map_or(0, |reached| reached.newest + 1));
        Ok(rest)
    }
}

/// The part of the log behind a break.
#[derive(Default)]
struct Rest {
    segments: Vec<PathBuf>,
    /// Whole group headers, with their segments.
    headers: Vec<(u64, GroupHeader)>,
    /// What no torn tail does to a segment.
    harm: Option<String>,
    /// How many of the headers are of the newest life.
    groups: usize,
    /// How many bytes that are not zero stand up to the end of the last one in each segment. What a recycled file held
    /// before does not count.
    bytes: usize,
}

impl Cut {
    fn warn(&self, disk: &Disk) {
        tracing::warn!(
            segment = %disk.segment_path(self.position.segment).display(),
            wal_position = %self.position,
            groups = self.groups,
            bytes = self.bytes,
            reason = self.reason,
            "the log's end is cut off: it was being written and not acked, unless the disk has lost or changed what it had \
             flushed"
        );
    }
}

impl Rest {
    fn note_missing(&mut self, from: u64, to: u64) {
        if from < to {
            self.harm.get_or_insert_with(|| format!("; and segments {from} through {} are missing", to - 1));
        }
    }

    /// None where nothing is left behind the break.
    fn cut(&self, broken: &Break) -> Option<Cut> {
        let (groups, bytes) = (self.groups, self.bytes);
        let cut = Cut { position: broken.position, reason: broken.reason.clone(), groups, bytes };
        (bytes > 0).then_some(cut)
    }

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

/// What is wrong with a segment of the newest life that cannot be with one that is torn.
fn harm(bytes: &[u8], number: u64) -> Option<String> {
    match SegmentHeader::decode(bytes) {
        Ok(header) if header.segment != number => Some(format!("the file holds segment {}", header.segment)),
        Ok(header) => header.first.and_then(|_| cut_short(bytes, &header)),
        Err(HeaderFault::Damaged(reason)) => Some(reason),
        Err(HeaderFault::Newer(_)) => None,
    }
}

/// Why a segment is not as long as it was made: written whole before it had a number, it is not torn but cut.
fn cut_short(bytes: &[u8], header: &SegmentHeader) -> Option<String> {
    let is_short = (bytes.len() as u64) < header.segment_bytes;
    is_short.then(|| format!("the file has {} of its {} bytes", bytes.len(), header.segment_bytes))
}

/// How many bytes are not zero.
fn bytes_between(bytes: &[u8], from: u64, to: u64) -> usize {
    let at = |offset| usize::try_from(offset).unwrap_or(usize::MAX).min(bytes.len());
    bytes.get(at(from)..at(to)).unwrap_or_default().iter().filter(|byte| **byte != 0).count()
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
                fault::pass(Point::WalReplay);
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
