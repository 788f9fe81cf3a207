//! A sealed batch on its way to stable storage, with those who wait for it.
//!
//! *Owns*: fitting batches into log entries, telling streams that their records are durable, or never will be.
//! *Does not own*: what goes into a batch (`lane`), its bytes (`table::batch`), the log (`wal`).

use std::fmt::Display;
use std::sync::Arc;

use bytes::Bytes;
use sluice_shared::error::Error;

use crate::admission::Permit;
use crate::stream::progress::StreamProgress;
use crate::table::Table;
use crate::table::batch::{Batch, Refusal};
use crate::wal::{Durable, Slot, Wal};

/// A batch that takes no more records.
pub struct Sealed {
    /// What the log keeps of it.
    pub batch: Batch,
    pub(super) table: Table,
    /// One for each run.
    pub(super) progresses: Vec<Arc<StreamProgress>>,
    /// Given back when the batch is durable.
    pub(super) permits: Vec<Permit>,
}

impl Sealed {
    /// Appends the batch to the log, as one entry where it fits, else as several: rows can be many times as large as
    /// what they were decoded from.
    pub(super) async fn append(self, wal: &Wal, slot: Slot) {
        let mut slot = Some(slot);
        // The part that comes first is on top.
        let mut parts = vec![self];
        while let Some(part) = parts.pop() {
            let payload = match part.batch.encode() {
                Ok(payload) => payload,
                Err(error) => return part.fail(&error, parts),
            };
            let bytes: usize = payload.iter().map(Bytes::len).sum();
            if bytes as u64 > wal.payload_bytes_max() {
                drop(payload);
                match part.split() {
                    Ok((first, rest)) => parts.extend([rest, first]),
                    Err(part) => return part.fail(&format!("one record has {bytes} bytes there"), parts),
                }
                continue;
            }
            let slot = match slot.take() {
                Some(slot) => slot,
                None => wal.slot().await,
            };
            let appended = wal.append(slot, payload, Box::new(move |durable| part.durable(durable)));
            appended.expect("the size was checked");
        }
    }

    /// Two batches of about half the records each, in order; itself where it has one record only.
    fn split(self) -> Result<(Self, Self), Box<Self>> {
        let Self { batch, table, progresses, permits } = self;
        let (first, rest) = match batch.split() {
            Ok(halves) => halves,
            Err(batch) => return Err(Box::new(Self { batch: *batch, table, progresses, permits })),
        };
        // The run at the cut is in both.
        let last = progresses.len() - rest.runs.len();
        let first = Self {
            progresses: progresses[..first.runs.len()].to_vec(),
            batch: first,
            table: table.clone(),
            permits: Vec::new(),
        };
        Ok((first, Self { progresses: progresses[last..].to_vec(), batch: rest, table, permits }))
    }

    /// Runs on a log writer's thread: tells the streams, then hands the batch to its table.
    fn durable(mut self, durable: Durable) {
        for (run, progress) in self.batch.runs.iter_mut().zip(&self.progresses) {
            if !run.refused.is_empty() {
                progress.refused(run.refused.iter_mut().map(Refusal::tell));
            }
            if let Some(boundary) = run.boundary() {
                progress.whole(boundary);
            }
            progress.durable(run.offsets.end);
        }
        self.table.offer(durable, Arc::new(self.batch));
    }

    /// The batch cannot be written in any form: a bug. Its streams end at the first offset concerned, and so do those
    /// of the parts behind it, in which the same streams may go on.
    fn fail(self, error: &dyn Display, behind: Vec<Self>) {
        tracing::error!(table = %self.batch.table, %error, "a batch cannot be written to the log");
        for part in std::iter::once(self).chain(behind.into_iter().rev()) {
            for (run, progress) in part.batch.runs.iter().zip(&part.progresses) {
                let (table, offset) = (&part.batch.table, run.offsets.start);
                let message = format!("table {table}: records cannot be written to the log: {error}");
                progress.fault(offset, Error::internal(message).at_offset(offset));
            }
        }
    }
}
