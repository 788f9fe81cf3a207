//! The groups of one log that are still needed, as whoever writes it or has taken it over counts them.
//!
//! *Owns*: which entries are released, reading an entry back, trimming.
//! *Does not own*: when an entry is released (`table`), names and calls (`folder.rs`).
//! Keeps P7: bytes of groups that are not trimmed are counted here.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::AtomicU64;
use std::sync::{Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use sluice_shared::fault::{self, Point};
use sluice_shared::ids::WalPosition;
use tokio::sync::Notify;

use super::super::WalError;
use super::super::segment::{ENTRY_HEADER, entry_is_whole};
use super::folder::Folder;

/// Groups that may still be needed.
pub(crate) struct Groups {
    pub(super) folder: Folder,
    /// Whether the log was taken over from its writer.
    adopted: bool,
    live: Mutex<BTreeMap<u64, Live>>,
    /// Of entries that are not released.
    pub(crate) entry_bytes: AtomicU64,
    /// Told when a group has no entry any more that is needed.
    pub(super) released: Notify,
}

#[derive(Debug, Clone, Copy)]
struct Live {
    bytes: u64,
    outstanding: u64,
}

impl Groups {
    pub(super) fn new(folder: Folder, adopted: bool) -> Self {
        Self {
            folder,
            adopted,
            live: Mutex::default(),
            entry_bytes: AtomicU64::new(0),
            released: Notify::new(),
        }
    }

    fn live(&self) -> MutexGuard<'_, BTreeMap<u64, Live>> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn add(&self, number: u64, bytes: u64, entries: usize) {
        self.live().insert(number, Live { bytes, outstanding: entries as u64 });
    }

    /// One entry of a group is no longer needed.
    pub(crate) fn release(&self, number: u64) {
        let mut live = self.live();
        let group = live.get_mut(&number).expect("a group with unreleased entries is kept");
        group.outstanding -= 1;
        let is_last = group.outstanding == 0;
        drop(live);
        if is_last {
            self.released.notify_waiters();
            self.released.notify_one();
        }
    }

    /// Reads an entry back.
    pub(crate) async fn read(
        &self,
        position: WalPosition,
        payload_bytes: u64,
        seed: u32,
    ) -> Result<Bytes, WalError> {
        let number = position.segment;
        let end = position.offset + ENTRY_HEADER as u64 + payload_bytes;
        let Some(entry) = self.folder.part(number, position.offset..end).await? else {
            return Err(self.missing(number).await?);
        };
        let bytes = usize::try_from(payload_bytes).unwrap_or(usize::MAX);
        if !entry_is_whole(&entry, bytes, seed) {
            let reason = format!("the entry at byte {} does not match its checksum", position.offset);
            return Err(self.folder.corrupt(number, reason));
        }
        Ok(entry.slice(ENTRY_HEADER..))
    }

    /// Why the object of an entry that is not released is missing. Only who has committed all of a log deletes it, and says
    /// so before: see `folder.rs`.
    async fn missing(&self, number: u64) -> Result<WalError, WalError> {
        let folder = &self.folder;
        let first = folder.first().await?;
        let is_deleted = first > number || folder.header().await?.is_none();
        Ok(match (is_deleted, self.adopted) {
            (false, _) => folder.corrupt(number, "it is missing, though it is still needed".to_owned()),
            (true, true) => WalError::Done { log: folder.log },
            (true, false) => WalError::Fenced { log: folder.log, object: folder.name_of(number), by: None },
        })
    }

    /// Bytes of groups that are not trimmed, entries that are not released.
    pub(super) fn totals(&self) -> (u64, u64) {
        let live = self.live();
        live.values().fold((0, 0), |(bytes, outstanding), group| {
            (bytes + group.bytes, outstanding + group.outstanding)
        })
    }

    /// The first group that is not trimmed.
    pub(super) fn first(&self) -> Option<u64> {
        self.live().keys().next().copied()
    }

    /// Deletes the log, of which nothing before `end` is needed: all but the object of the number `kept`.
    pub(super) async fn delete(&self, end: u64, kept: Option<u64>) -> Result<(), WalError> {
        // Whoever else reads it finds out by this that what is missing has been there.
        self.folder.put_first(end).await?;
        // A list that is behind says nothing of some that are there.
        let mut numbers: BTreeSet<u64> = self.live().keys().copied().collect();
        numbers.extend(self.folder.numbers().await?.into_keys());
        for number in numbers.into_iter().filter(|number| Some(*number) != kept) {
            self.folder.delete(number).await?;
        }
        self.folder.delete_head().await
    }

    /// The groups that can be trimmed, oldest first: what is before any that is still needed.
    pub(super) fn trimmable(&self) -> Vec<u64> {
        let live = self.live();
        live.iter().take_while(|(_, group)| group.outstanding == 0).map(|(number, _)| *number).collect()
    }

    /// Deletes the groups that can be trimmed. `first.json` says so before: a number that is missing is then known to be
    /// trimmed. Answers whether anything was.
    pub(super) async fn trim(&self) -> Result<bool, WalError> {
        let numbers = self.trimmable();
        let Some(last) = numbers.last() else { return Ok(false) };
        self.folder.put_first(last + 1).await?;
        fault::pass(Point::TrimBefore);
        for number in numbers {
            self.folder.delete(number).await?;
            self.live().remove(&number);
        }
        fault::pass(Point::TrimAfter);
        Ok(true)
    }

    /// Resolves when no entry is needed any more.
    pub(super) async fn all_released(&self) {
        loop {
            let released = self.released.notified();
            if self.totals().1 == 0 {
                return;
            }
            released.await;
        }
    }
}
