//! Notes, beside the tables, of logs that hold nothing any more: a pod that drained and is gone need not be asked what it
//! has of a stream.
//!
//! A session of a named stream asks every log that the stream's record names (`stream/record`), and opens nowhere while
//! one of them cannot be asked. A note stands in for the answer "nothing that is not in the table". It is good evidence
//! although it may grow old at once: it is read after the new session has been recorded, so that a pod that is back by
//! then refuses all older sessions.
//!
//! *Owns*: the notes, one object for each log that has ever drained.
//! *Does not own*: when a log holds nothing (`duty`), what a session asks (`service/open`).
//! Keeps P3: a note is withdrawn, durably, before its log takes anything.

use std::sync::Arc;

use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};
use sluice_shared::error::Error;
use sluice_shared::ids::LogId;

/// What a note says of a log that holds nothing,
const HOLDS_NOTHING: &[u8] = b"{\"holds_nothing\":true}\n";
/// and of one that may hold something again. Notes are replaced, never deleted: all stores make a put durable.
const MAY_HOLD: &[u8] = b"{\"holds_nothing\":false}\n";

/// The notes of all logs below one root of tables.
pub struct DrainedLogs {
    store: Arc<dyn ObjectStore>,
    folder: Path,
}

impl DrainedLogs {
    /// Those in the storage of tables below `root`.
    pub fn new(store: Arc<dyn ObjectStore>, root: &Path) -> Self {
        Self { store, folder: root.clone().join("_sluice").join("logs") }
    }

    /// Notes that `log` holds nothing that is not in a table. Nothing may be written to it from then on, until the note
    /// is withdrawn.
    ///
    /// # Errors
    /// `Unavailable` where the storage fails.
    pub async fn note(&self, log: LogId) -> Result<(), Error> {
        self.put(log, HOLDS_NOTHING).await
    }

    /// Withdraws the note, where there is one: `log` is about to be written.
    ///
    /// # Errors
    /// `Unavailable` where the storage fails.
    pub async fn withdraw(&self, log: LogId) -> Result<(), Error> {
        if self.holds_nothing(log).await? { self.put(log, MAY_HOLD).await } else { Ok(()) }
    }

    /// Whether there is a note.
    ///
    /// # Errors
    /// `Unavailable` where the storage fails.
    pub async fn holds_nothing(&self, log: LogId) -> Result<bool, Error> {
        let read = async { self.store.get(&self.path(log)).await?.bytes().await };
        match read.await {
            Ok(bytes) => Ok(bytes == HOLDS_NOTHING),
            Err(object_store::Error::NotFound { .. }) => Ok(false),
            Err(error) => Err(failed("read", log, &error)),
        }
    }

    async fn put(&self, log: LogId, says: &'static [u8]) -> Result<(), Error> {
        let put = self.store.put(&self.path(log), says.into()).await;
        put.map(drop).map_err(|error| failed("write", log, &error))
    }

    fn path(&self, log: LogId) -> Path {
        self.folder.clone().join(format!("{}.json", log.0))
    }
}

fn failed(what: &str, log: LogId, error: &dyn std::fmt::Display) -> Error {
    let message = format!("cannot {what} the note on whether log {} holds anything: {error}", log.0);
    Error::unavailable("storage", message)
}

#[cfg(test)]
mod tests {
    use object_store::memory::InMemory;
    use uuid::Uuid;

    use super::*;

    #[tokio::test]
    async fn a_note_is_there_until_it_is_withdrawn() {
        let logs = DrainedLogs::new(Arc::new(InMemory::new()), &Path::from("tables"));
        let (log, other) = (LogId(Uuid::from_u128(1)), LogId(Uuid::from_u128(2)));
        logs.withdraw(log).await.expect("nothing to withdraw");
        for _ in 0..2 {
            assert!(!logs.holds_nothing(log).await.expect("read"));
            logs.note(log).await.expect("written");
            assert!(logs.holds_nothing(log).await.expect("read"));
            assert!(!logs.holds_nothing(other).await.expect("read"), "another log's note");
            logs.withdraw(log).await.expect("written");
        }
    }
}
