//! For fuzzers: objects made by the log's own encoder, changed at will, and read by its own reader. In builds with
//! assertions alone, where nothing else calls it.
//!
//! *Owns*: making such objects, reading them.
//! *Does not own*: what is changed, and what must hold then (`loadtest`).

use bytes::Bytes;
use sluice_shared::ids::{LogId, PodId};
use uuid::Uuid;

use super::super::segment::{self, BLOCK, Chain, ENTRY_HEADER, mend};
use super::form::{self, GroupObject, Kind};

const LOG: LogId = LogId(Uuid::from_u128(7));

/// An object of a log.
#[derive(Debug, Clone)]
pub struct MadeUpObject {
    /// Its number.
    pub number: u64,
    /// As it is stored.
    pub bytes: Vec<u8>,
}

/// What was read of one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReadObject {
    /// Of a group; None of a seal.
    pub payloads: Option<Vec<Bytes>>,
    /// The first number that was kept.
    pub kept: u64,
    /// Who wrote it.
    pub writer: PodId,
}

impl MadeUpObject {
    /// A group of these entries.
    pub fn group(owner: &PodId, number: u64, payloads: &[Bytes]) -> Self {
        let chain = Chain { group: number, previous: 77 };
        let (nonce, durable) = (Uuid::from_u128(9), number.saturating_sub(1));
        let of = GroupObject { log: LOG, owner, nonce, chain, durable, kept: number.saturating_sub(3) };
        let parts: Vec<Vec<Bytes>> = payloads.iter().map(|payload| vec![payload.clone()]).collect();
        Self { number, bytes: form::encode_group(&of, &parts).0 }
    }

    /// The seal that `writer` puts.
    pub fn seal(owner: &PodId, writer: &PodId, number: u64) -> Self {
        Self { number, bytes: form::encode_seal(LOG, owner, writer, number).to_vec() }
    }

    /// Puts all its checksums right.
    pub fn mend(&mut self) {
        mend::header(&mut self.bytes);
        form::mend_tail(&mut self.bytes);
        mend::group(&mut self.bytes, BLOCK);
    }

    /// Reads it as whoever takes the log over does; None where it is none.
    ///
    /// # Panics
    /// Where an entry is not what its checksum is over.
    pub fn read(&self) -> Option<ReadObject> {
        let object = form::decode(&self.bytes, LOG, self.number).ok()?;
        let payloads = match object.kind {
            Kind::Seal => None,
            Kind::Group { entries, .. } => Some(entries),
        };
        let payload = |place: form::EntryPlace| {
            let start = usize::try_from(place.offset).unwrap_or(usize::MAX);
            let entry = &self.bytes[start..start + ENTRY_HEADER + place.payload_bytes];
            assert!(segment::entry_is_whole(entry, place.payload_bytes, place.seed), "{place:?}");
            Bytes::copy_from_slice(&entry[ENTRY_HEADER..])
        };
        let payloads = payloads.map(|entries| entries.into_iter().map(payload).collect());
        Some(ReadObject { payloads, kept: object.kept, writer: object.writer })
    }
}
