//! The file that says which log a directory holds: id, owner, epoch, and where its older lives end.
//!
//! Two lines: JSON, and its CRC32C in hexadecimal. It is replaced as a whole (new file, flush, rename, flush of the
//! directory) at each start, before anything of the new life is written. That one rename makes a new life begin,
//! and makes final where the old one was cut: what stands after an end that is written here is never read again.
//!
//! *Owns*: the identity's bytes.
//! *Does not own*: what follows from it (`replay.rs`), writing it safely (`disk.rs`).

use std::path::Path;

use crc32c::crc32c;
use serde::{Deserialize, Serialize};
use sluice_shared::ids::{Epoch, LogId, PodId};

use super::WalError;
use super::segment::{Chain, FORMAT};

/// Which log this is, and how far its history is settled.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Identity {
    pub(super) format: u32,
    pub(super) log: LogId,
    pub(super) owner: PodId,
    /// The newest life.
    pub(super) epoch: Epoch,
    /// The first segment of that life.
    pub(super) first_segment: u64,
    /// What the first group of that life carries.
    pub(super) chain: Chain,
    /// Ends of the older lives that still had segments when this one began, oldest first.
    pub(super) ends: Vec<End>,
    /// Whether the file `oldest` says which segments of that life have to be there: it is damage where it does not. Older
    /// programs left none, or one that says less.
    #[serde(default)]
    pub(super) bounded: bool,
}

/// Where an older life ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct End {
    pub(super) epoch: Epoch,
    /// Its last segment that holds a group.
    pub(super) segment: u64,
    /// Where in it the last group ends.
    pub(super) offset: u64,
}

impl Identity {
    /// Of a log that does not exist yet.
    pub(super) fn fresh(owner: PodId) -> Self {
        let log = LogId(uuid::Uuid::new_v4());
        let epoch = Epoch(0);
        let (first_segment, chain, ends) = (0, Chain::START, Vec::new());
        Self { format: FORMAT, log, owner, epoch, first_segment, chain, ends, bounded: false }
    }

    /// The end of an older life.
    pub(super) fn end_of(&self, epoch: Epoch) -> Option<End> {
        self.ends.iter().find(|end| end.epoch == epoch).copied()
    }

    pub(super) fn encode(&self) -> String {
        let json = serde_json::to_string(self).expect("an identity is plain text and numbers");
        let checksum = crc32c(json.as_bytes());
        format!("{json}\n{checksum:08x}\n")
    }

    pub(super) fn decode(text: &[u8], file: &Path) -> Result<Self, WalError> {
        #[derive(Deserialize)]
        struct Version {
            format: u32,
        }
        let damaged = |reason: &str| WalError::Identity { file: file.to_owned(), reason: reason.to_owned() };
        let text = std::str::from_utf8(text).map_err(|_| damaged("it is not text"))?;
        let (json, checksum) = text.trim_end().rsplit_once('\n').ok_or_else(|| damaged("it is cut short"))?;
        if u32::from_str_radix(checksum, 16) != Ok(crc32c(json.as_bytes())) {
            return Err(damaged("it does not match its checksum"));
        }
        let parsed = |error: serde_json::Error| damaged(&error.to_string());
        let found = serde_json::from_str::<Version>(json).map_err(parsed)?.format;
        if found > FORMAT {
            return Err(WalError::NewerFormat { file: file.to_owned(), found, known: FORMAT });
        }
        serde_json::from_str(json).map_err(parsed)
    }
}
