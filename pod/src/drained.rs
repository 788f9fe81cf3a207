//! Notes, beside the tables, of logs that hold nothing any more: a pod that drained and is gone need not be asked what it
//! has of a stream. Of a log that an operator has released there is one too: what it holds is given up.
//!
//! A session of a named stream asks every log that the stream's record names (`stream/record`), and opens nowhere while
//! one of them cannot be asked. A note stands in for the answer "nothing that is not in the table". It is good evidence
//! although it may grow old at once: it is read after the new session has been recorded, so that a pod that is back by
//! then refuses all older sessions.
//!
//! *Owns*: the notes, one object for each log that has ever drained, or was released.
//! *Does not own*: when a log holds nothing (`duty`), what a session asks (`service/open`), what is given up (`release`).
//! Keeps P3: a note is withdrawn, durably, before its log takes anything. A release is never withdrawn: nobody waits for
//! that log any more, so that nothing may be acked from it.

use std::sync::Arc;

use bytes::Bytes;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};
use serde::{Deserialize, Serialize};
use sluice_shared::error::Error;
use sluice_shared::ids::{LogId, PodId};

/// What a note says of a log that holds nothing,
const HOLDS_NOTHING: &[u8] = b"{\"holds_nothing\":true}\n";
/// and of one that may hold something again. Notes are replaced, never deleted: all stores make a put durable.
const MAY_HOLD: &[u8] = b"{\"holds_nothing\":false}\n";

/// Code of the error that a released log cannot be used.
pub const LOG_RELEASED: &str = "log_released";

/// What a note says of a log that an operator has given up.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Release {
    /// The pod that has done it.
    pub by: PodId,
    /// When, µs since 1970-01-01 UTC.
    pub at_us: i64,
}

impl Release {
    /// When, for people.
    pub fn at(&self) -> String {
        as_text(self.at_us)
    }
}

#[derive(Serialize, Deserialize)]
struct Note {
    holds_nothing: bool,
    released: Release,
}

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
        self.put(log, Bytes::from_static(HOLDS_NOTHING)).await
    }

    /// Withdraws the note, where there is one: `log` is about to be written.
    ///
    /// # Errors
    /// `Invalid` (`LOG_RELEASED`) where it was released; `Unavailable` where the storage fails.
    pub async fn withdraw(&self, log: LogId) -> Result<(), Error> {
        let Some(says) = self.read(log).await? else { return Ok(()) };
        self.check(log, &says)?;
        if says == HOLDS_NOTHING { self.put(log, Bytes::from_static(MAY_HOLD)).await } else { Ok(()) }
    }

    /// Whether nobody has to wait for the log: it holds nothing, or was released.
    ///
    /// # Errors
    /// `Unavailable` where the storage fails.
    pub async fn holds_nothing(&self, log: LogId) -> Result<bool, Error> {
        let says = self.read(log).await?;
        Ok(says.is_some_and(|says| says == HOLDS_NOTHING || release(&says).is_some()))
    }

    /// The log's release, where there was one.
    ///
    /// # Errors
    /// `Unavailable` where the storage fails.
    pub async fn released(&self, log: LogId) -> Result<Option<Release>, Error> {
        Ok(self.read(log).await?.as_deref().and_then(release))
    }

    /// That the log was not released.
    ///
    /// # Errors
    /// `Invalid` (`LOG_RELEASED`) where it was; `Unavailable` where the storage fails.
    pub async fn check_not_released(&self, log: LogId) -> Result<(), Error> {
        self.read(log).await?.map_or(Ok(()), |says| self.check(log, &says))
    }

    fn check(&self, log: LogId, says: &[u8]) -> Result<(), Error> {
        let Some(Release { by, at_us }) = release(says) else { return Ok(()) };
        let message = format!(
            "log {} was released by an operator ({}, by pod {by}, noted in /{}): what it has that is in no table was given up, \
             and nothing more may be acked from it; move its directory away, and the pod starts with a new log",
            log.0,
            as_text(at_us),
            self.path(log)
        );
        Err(Error::invalid(LOG_RELEASED, message))
    }

    /// Notes that `log` is released, if that is not noted yet: nobody waits for it from now on.
    ///
    /// # Errors
    /// `Unavailable` where the storage fails.
    pub async fn release(&self, log: LogId, release: Release) -> Result<(), Error> {
        if self.released(log).await?.is_some() {
            return Ok(());
        }
        let note = Note { holds_nothing: true, released: release };
        let says = serde_json::to_vec(&note).map_err(|error| failed("write", log, &error))?;
        self.put(log, says.into()).await
    }

    async fn read(&self, log: LogId) -> Result<Option<Bytes>, Error> {
        let read = async { self.store.get(&self.path(log)).await?.bytes().await };
        match read.await {
            Ok(bytes) => Ok(Some(bytes)),
            Err(object_store::Error::NotFound { .. }) => Ok(None),
            Err(error) => Err(failed("read", log, &error)),
        }
    }

    async fn put(&self, log: LogId, says: Bytes) -> Result<(), Error> {
        let put = self.store.put(&self.path(log), says.into()).await;
        put.map(drop).map_err(|error| failed("write", log, &error))
    }

    fn path(&self, log: LogId) -> Path {
        self.folder.clone().join(format!("{}.json", log.0))
    }
}

fn release(says: &[u8]) -> Option<Release> {
    serde_json::from_slice::<Note>(says).ok().map(|note| note.released)
}

/// A time for people.
fn as_text(at_us: i64) -> String {
    let at = chrono::DateTime::from_timestamp_micros(at_us);
    at.map_or_else(|| at_us.to_string(), |at| at.format("%Y-%m-%dT%H:%M:%SZ").to_string())
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

    #[tokio::test]
    async fn a_release_is_never_withdrawn_and_the_first_one_counts() {
        let logs = DrainedLogs::new(Arc::new(InMemory::new()), &Path::from("tables"));
        let log = LogId(Uuid::from_u128(1));
        let release = |at_us| Release { by: "pod-2".parse().expect("valid"), at_us };
        logs.check_not_released(log).await.expect("it was not");
        for at_us in [1_700_000_000_000_000, 2] {
            logs.release(log, release(at_us)).await.expect("noted");
            let refused = logs.withdraw(log).await.expect_err("refused");
            assert_eq!(
                (refused.code.as_str(), &refused),
                (LOG_RELEASED, &logs.check_not_released(log).await.expect_err("it was"))
            );
            assert!(refused.message.contains("2023-11-14T22:13:20Z, by pod pod-2"), "{refused}");
            assert!(logs.holds_nothing(log).await.expect("read"), "nobody waits for it");
            assert_eq!(logs.released(log).await.expect("read"), Some(release(1_700_000_000_000_000)));
        }
        let other = LogId(Uuid::from_u128(2));
        logs.note(other).await.expect("noted");
        assert_eq!(logs.released(other).await.expect("read"), None, "it has drained");
    }
}
