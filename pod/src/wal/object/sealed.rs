//! Taking a log over: where it ends is made final by a seal in place of the first object that is missing; then it is read.
//!
//! The writer puts each object if absent, and tells of none before all that precede it are there. So with a seal at the
//! first missing number nothing that was told of is behind it, and the writer, whatever it was doing meanwhile, finds the
//! seal and ends. Several pods may take one log over at one time: the first seal counts, all read the same, and what the
//! one has committed the other finds in the table.
//!
//! A seal counts only where its number was not trimmed before it was put: a number that is missing may have been there and
//! be deleted, which `first.json` says before it is done. A seal stays when all else of its log is deleted: a writer that
//! was stopped for however long must find it.
//!
//! An object that is missing although a later one shows that it was there is no end either: the seal goes behind all that is
//! there, what is before the gap can be read, and the gap is named when its turn comes.
//!
//! *Owns*: the seal, reading a sealed log, deleting it.
//! *Does not own*: when a log is taken over, what its entries mean (`adopt`).

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use sluice_shared::ids::{LogId, PodId, WalPosition};

use super::super::segment::{Chain, ENTRY_HEADER};
use super::super::{Durable, WalError};
use super::FLIGHTS_MAX;
use super::folder::{Folder, LogHeader, LogStore, Put};
use super::form::{self, EntryPlace, Fault, Kind, Object, SEAL_BYTES};
use super::groups::Groups;

/// A log that nobody can write to any more.
pub struct SealedLog {
    /// What it says of itself.
    pub header: LogHeader,
    groups: Arc<Groups>,
    /// The number to read next.
    at: u64,
    /// That of the seal.
    end: u64,
    /// What the next group must carry; None before the first one.
    chain: Option<Chain>,
}

impl SealedLog {
    /// Ends the log of another pod, or of this pod's former life, for good. None where it is done with: all of it is
    /// committed.
    ///
    /// # Errors
    /// `Store`, `NewerFormat`; `CorruptObject` where what was stored is damaged or missing.
    pub async fn seal(logs: &LogStore, log: LogId, adopter: &PodId) -> Result<Option<Self>, WalError> {
        let folder = logs.folder(log);
        let Some(header) = folder.header().await? else { return Ok(None) };
        if header.log != log {
            let reason = format!("its header is that of log {}", header.log.0);
            return Err(folder.corrupt(0, reason));
        }
        let (mut at, listed) = (folder.first().await?, folder.numbers().await?);
        loop {
            at = end_of(&folder, at, &listed).await?;
            let seal = form::encode_seal(log, &header.owner, adopter, at);
            let put = folder.put_new(at, seal).await?;
            if put == Put::Exists {
                match folder.object(at).await? {
                    Some(bytes) if !is_seal(&folder, at, &bytes)? => {
                        at += 1;
                        continue;
                    }
                    Some(_) => {}
                    // It was trimmed in between.
                    None => at = folder.first().await?.max(at),
                }
            }
            let first = folder.first().await?;
            let is_there = folder.header().await?.is_some();
            let is_void = first > at || !is_there;
            if is_void && put == Put::Done {
                folder.delete(at).await?;
            }
            if !is_there {
                return Ok(None);
            }
            if !is_void && (put == Put::Done || folder.has(at).await?) {
                let groups = Arc::new(Groups::new(folder, true));
                return Ok(Some(Self { header, groups, at: first, end: at, chain: None }));
            }
            at = at.max(first);
        }
    }

    /// What is damaged or missing of a log whose writer is gone, without ending it. None where all of it can be read, or it is
    /// done with.
    ///
    /// # Errors
    /// `Store`, `NewerFormat`.
    pub async fn damage(logs: &LogStore, log: LogId) -> Result<Option<WalError>, WalError> {
        match Self::read_all(logs, log).await {
            Ok(()) | Err(WalError::Done { .. }) => Ok(None),
            Err(damage @ WalError::CorruptObject { .. }) => Ok(Some(damage)),
            Err(error) => Err(error),
        }
    }

    async fn read_all(logs: &LogStore, log: LogId) -> Result<(), WalError> {
        let folder = logs.folder(log);
        let Some(header) = logs.header(log).await? else { return Ok(()) };
        let (at, listed) = (folder.first().await?, folder.numbers().await?);
        let end = end_of(&folder, at, &listed).await?;
        let mut log = Self { header, groups: Arc::new(Groups::new(folder, true)), at, end, chain: None };
        while log.next_group().await?.is_some() {}
        Ok(())
    }

    /// The entries of the next group, in order; None at the end. `Done` where another pod has committed the log meanwhile.
    ///
    /// # Errors
    /// `Store`, `NewerFormat`, `Done`; `CorruptObject` where what was stored is damaged or missing.
    pub async fn next_group(&mut self) -> Result<Option<Vec<(Durable, Bytes)>>, WalError> {
        let folder = &self.groups.folder;
        while self.at < self.end {
            let number = self.at;
            let Some(bytes) = folder.object(number).await? else {
                let first = folder.first().await?;
                if folder.header().await?.is_none() {
                    return Err(WalError::Done { log: folder.log });
                }
                if first <= number {
                    return Err(missing(folder, number));
                }
                (self.at, self.chain) = (first, None);
                continue;
            };
            let Object { kind, .. } = decode(folder, number, &bytes)?;
            let Kind::Group { chain, next, entries, .. } = kind else {
                return Err(folder.corrupt(number, "a seal stands before the log's end".to_owned()));
            };
            if self.chain.is_some_and(|expected| expected != chain) {
                let reason = format!("group {} does not follow group {}", chain.group, chain.group - 1);
                return Err(folder.corrupt(number, reason));
            }
            (self.at, self.chain) = (number + 1, Some(next));
            self.groups.add(number, bytes.len() as u64, entries.len());
            return Ok(Some(entries.iter().map(|entry| self.entry(number, *entry, &bytes)).collect()));
        }
        Ok(None)
    }

    fn entry(&self, number: u64, place: EntryPlace, object: &Bytes) -> (Durable, Bytes) {
        let start = usize::try_from(place.offset).unwrap_or(usize::MAX) + ENTRY_HEADER;
        // A copy: else one entry that waits would hold the whole group.
        let payload = Bytes::copy_from_slice(&object[start..start + place.payload_bytes]);
        let position = WalPosition { segment: number, offset: place.offset };
        let durable = Durable::in_object(&self.groups, position, place.payload_bytes as u64, place.seed);
        (durable, payload)
    }

    /// Resolves when all entries that were read are released.
    pub async fn released(&self) {
        self.groups.all_released().await;
    }

    /// Entries that were read and are not released.
    pub fn outstanding(&self) -> u64 {
        self.groups.totals().1
    }

    /// Deletes the log, of which all entries are committed. Its seal stays.
    ///
    /// # Errors
    /// `Store`.
    pub async fn delete(self) -> Result<(), WalError> {
        self.groups.delete(self.end, Some(self.end)).await
    }
}

fn decode(folder: &Folder, number: u64, bytes: &[u8]) -> Result<Object, WalError> {
    form::decode(bytes, folder.log, number).map_err(|fault| match fault {
        Fault::Newer(found) => {
            WalError::NewerFormat { file: folder.name_of(number).into(), found, known: form::KNOWN }
        }
        Fault::Damaged(reason) => folder.corrupt(number, reason),
    })
}

/// Whether the log may end at a number under which little was listed: a seal, or nothing any more.
async fn may_end(folder: &Folder, number: u64) -> Result<bool, WalError> {
    folder.object(number).await?.map_or(Ok(true), |bytes| is_seal(folder, number, &bytes))
}

/// Whether the log ends here. Whatever is there and is no seal was put by its writer: an object that was cut or emptied is
/// passed over here, so that what is before it can be read, and named when its turn comes.
fn is_seal(folder: &Folder, number: u64, bytes: &[u8]) -> Result<bool, WalError> {
    match decode(folder, number, bytes) {
        Ok(object) => Ok(object.kind == Kind::Seal),
        Err(WalError::CorruptObject { .. }) => Ok(false),
        Err(error) => Err(error),
    }
}

fn missing(folder: &Folder, number: u64) -> WalError {
    let reason = "it is missing, though what was written later says that it was stored".to_owned();
    folder.corrupt(number, reason)
}

/// The first number from `at` on that holds no group, as far as was listed, and is no gap.
async fn end_of(folder: &Folder, mut at: u64, listed: &BTreeMap<u64, u64>) -> Result<u64, WalError> {
    loop {
        while let Some(bytes) = listed.get(&at) {
            if *bytes <= SEAL_BYTES && may_end(folder, at).await? {
                break;
            }
            at += 1;
        }
        match behind(folder, at, listed).await? {
            Behind::Nothing => return Ok(at),
            Behind::Kept(next) | Behind::Gap(next) => at = next,
        }
    }
}

/// What the objects behind a number that is missing say of it.
enum Behind {
    /// It was never there, as far as they know.
    Nothing,
    /// It was trimmed; from this number on all is kept.
    Kept(u64),
    /// It was there. Numbers before this one were too, or are looked at next.
    Gap(u64),
}

async fn behind(folder: &Folder, at: u64, listed: &BTreeMap<u64, u64>) -> Result<Behind, WalError> {
    for number in listed.range(at + 1..).map(|(number, _)| *number) {
        let Some(bytes) = folder.object(number).await? else { continue };
        // So many may be on their way at once: behind a gap they say nothing of what is in it.
        let far = number.saturating_sub(FLIGHTS_MAX as u64);
        let says_so = match decode(folder, number, &bytes) {
            Ok(Object { kind: Kind::Group { durable, .. }, .. }) => at <= far || durable >= at,
            // It is put where the first object is missing, or behind a gap.
            Ok(Object { kind: Kind::Seal, .. }) => true,
            // What it said nobody knows: rather a gap that is none than a seal before records that were told of.
            Err(WalError::CorruptObject { .. }) => true,
            Err(error) => return Err(error),
        };
        if says_so {
            let first = folder.first().await?;
            // Without a step for each number of a gap, which can be as long as the log ever was.
            return Ok(if first > at { Behind::Kept(first) } else { Behind::Gap((at + 1).max(far + 1)) });
        }
    }
    Ok(Behind::Nothing)
}
