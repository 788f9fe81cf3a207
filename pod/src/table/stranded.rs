//! Log entries whose table is not written any more: it was dropped, or made anew, or another writer has changed it so.
//!
//! Nothing is read from them here, and they are not released: their log keeps them, and a start offers them again. An
//! operator can give up those whose table is gone (`release`).
//!
//! *Owns*: which entries those are.
//! *Does not own*: why a table is not written (`open`), what is given up (`release`).

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use sluice_shared::ids::{OffsetRange, SessionId, StreamId, TableId, TableName};

use super::batch::Batch;
use crate::wal::{Durable, Wal, WalError};

/// The entries of all tables of a pod.
#[derive(Debug, Default)]
pub(super) struct Stranded {
    tables: Mutex<HashMap<TableName, Vec<(TableId, Durable)>>>,
}

/// Consecutive offsets of a stream in such entries.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StrandedRange {
    /// The table that they were for.
    pub table: TableId,
    /// The stream.
    pub stream: StreamId,
    /// Whose records.
    pub session: SessionId,
    /// Which ones.
    pub offsets: OffsetRange,
}

impl Stranded {
    fn lock(&self) -> MutexGuard<'_, HashMap<TableName, Vec<(TableId, Durable)>>> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps an entry. Whether it is the first one of its table.
    pub(super) fn add(&self, name: &TableName, table: TableId, durable: Durable) -> bool {
        let mut tables = self.lock();
        let entries = tables.entry(name.clone()).or_default();
        entries.push((table, durable));
        entries.len() == 1
    }

    /// How many entries of a name there are: for the table of this id, and for others.
    pub(super) fn count(&self, name: &TableName, table: Option<&TableId>) -> (u64, u64) {
        let tables = self.lock();
        let entries = tables.get(name).map_or(&[][..], Vec::as_slice);
        let here = entries.iter().filter(|(id, _)| Some(id) == table).count() as u64;
        (here, entries.len() as u64 - here)
    }

    /// Of which tables there are some.
    pub(super) fn names(&self) -> Vec<TableName> {
        self.lock().keys().cloned().collect()
    }

    /// How many there are of all tables.
    pub(super) fn total(&self) -> u64 {
        self.lock().values().map(|entries| entries.len() as u64).sum()
    }

    /// Names the records of the table's entries, less those of the table `kept`; in earnest, their log lets go of them.
    /// An entry that cannot be read stays, and is an error.
    ///
    /// # Errors
    /// Where an entry cannot be read back.
    pub(super) async fn give_up(
        &self,
        wal: &Wal,
        name: &TableName,
        kept: Option<&TableId>,
        in_earnest: bool,
    ) -> Result<Vec<StrandedRange>, WalError> {
        let taken = self.lock().remove(name).unwrap_or_default();
        let (mut left, mut ranges, mut failure) = (Vec::new(), Vec::new(), None);
        for (table, durable) in taken {
            if kept == Some(&table) || failure.is_some() {
                left.push((table, durable));
                continue;
            }
            match read(wal, &table, &durable).await {
                Ok(read) => {
                    ranges.extend(read);
                    match in_earnest {
                        true => durable.release(),
                        false => left.push((table, durable)),
                    }
                }
                // Another pod has committed all of its log.
                Err(WalError::Done { .. }) => durable.release(),
                Err(error) => {
                    failure = Some(error);
                    left.push((table, durable));
                }
            }
        }
        if !left.is_empty() {
            self.lock().entry(name.clone()).or_default().extend(left);
        }
        match failure {
            // What was let go of has been named nowhere else.
            Some(error) if ranges.is_empty() || !in_earnest => Err(error),
            Some(error) => {
                tracing::error!(table = %name, %error, "an entry of a table that is gone cannot be read: it stays");
                Ok(merged(ranges))
            }
            None => Ok(merged(ranges)),
        }
    }
}

async fn read(wal: &Wal, table: &TableId, durable: &Durable) -> Result<Vec<StrandedRange>, WalError> {
    let bytes = wal.read_back(durable).await?;
    let batch = Batch::decode(bytes).map_err(|error| WalError::CorruptObject {
        object: format!("entry at {} of log {}", durable.position(), wal.log_id().0),
        reason: format!("it is whole but no batch: {error}"),
    })?;
    let ranges = batch.runs.into_iter().map(|run| StrandedRange {
        table: table.clone(),
        stream: run.stream,
        session: run.session,
        offsets: run.offsets,
    });
    Ok(ranges.collect())
}

/// Ranges that touch or overlap become one.
fn merged(mut ranges: Vec<StrandedRange>) -> Vec<StrandedRange> {
    ranges.sort_by(|a, b| {
        let key = |range: &StrandedRange| (range.table.clone(), range.stream.clone(), range.session);
        key(a).cmp(&key(b)).then(a.offsets.start.cmp(&b.offsets.start))
    });
    let mut merged: Vec<StrandedRange> = Vec::new();
    for range in ranges {
        match merged.last_mut() {
            Some(last)
                if (&last.table, &last.stream, last.session)
                    == (&range.table, &range.stream, range.session)
                    && range.offsets.start <= last.offsets.end =>
            {
                last.offsets.end = last.offsets.end.max(range.offsets.end);
            }
            _ => merged.push(range),
        }
    }
    merged
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offsets_that_touch_are_named_once() {
        let range = |stream: &str, session, start, end| StrandedRange {
            table: TableId("t".into()),
            stream: StreamId::named(&stream.parse().expect("valid"), 1),
            session: SessionId(session),
            offsets: OffsetRange { start, end },
        };
        let all = vec![range("b", 1, 5, 9), range("a", 1, 10, 20), range("b", 1, 0, 5), range("b", 2, 9, 10)];
        let again = [range("a", 1, 12, 15), range("a", 1, 21, 22)];
        assert_eq!(
            merged(all.into_iter().chain(again).collect()),
            [range("a", 1, 10, 20), range("a", 1, 21, 22), range("b", 1, 0, 9), range("b", 2, 9, 10)]
        );
    }
}
