//! Notes, beside the tables, of which pod a log on a disk is of: once the disk is lost, that is known nowhere else.
//!
//! *Owns*: the notes, one object for each log that a pod has ever opened on a disk.
//! *Does not own*: whose a log in the tables' store is: that stands in its header (`wal/object/folder`).

use std::collections::BTreeMap;
use std::sync::Arc;

use futures_util::TryStreamExt;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};
use serde::{Deserialize, Serialize};
use sluice_shared::error::Error;
use sluice_shared::ids::{LogId, PodId};

use crate::drained::DrainedLogs;

#[derive(Serialize, Deserialize)]
struct Note {
    pod: PodId,
}

/// The notes of all logs below one root of tables.
pub struct Owners {
    store: Arc<dyn ObjectStore>,
    folder: Path,
}

impl Owners {
    /// Those in the storage of tables below `root`.
    pub fn new(store: Arc<dyn ObjectStore>, root: &Path) -> Self {
        Self { store, folder: root.clone().join("_sluice").join("owners") }
    }

    /// Notes that `log` is the pod's.
    ///
    /// # Errors
    /// `Unavailable` where the storage fails.
    pub async fn note(&self, log: LogId, pod: &PodId) -> Result<(), Error> {
        let says = serde_json::to_vec(&Note { pod: pod.clone() });
        let says = says.map_err(|error| failed("write", &self.folder, &error))?;
        let path = self.folder.clone().join(format!("{}.json", log.0));
        let put = self.store.put(&path, says.into()).await;
        put.map(drop).map_err(|error| failed("write", &path, &error))
    }

    /// The logs on disks that are the pod's, and that nobody knows to hold nothing, but `own`.
    ///
    /// # Errors
    /// `Unavailable` where the storage fails.
    pub async fn others_of(
        &self,
        pod: &PodId,
        own: LogId,
        drained: &DrainedLogs,
    ) -> Result<Vec<LogId>, Error> {
        let mut others = Vec::new();
        for (log, _) in self.all().await?.into_iter().filter(|(log, owner)| owner == pod && *log != own) {
            if !drained.holds_nothing(log).await? {
                others.push(log);
            }
        }
        Ok(others)
    }

    /// All that is noted. What is no note is passed over.
    ///
    /// # Errors
    /// `Unavailable` where the storage fails.
    pub async fn all(&self) -> Result<BTreeMap<LogId, PodId>, Error> {
        let listed = self.store.list(Some(&self.folder)).try_collect::<Vec<_>>().await;
        let listed = listed.map_err(|error| failed("list", &self.folder, &error))?;
        let mut owners = BTreeMap::new();
        for path in listed.into_iter().map(|object| object.location) {
            let log = path.filename().and_then(|name| name.strip_suffix(".json")?.parse().ok());
            let Some(log) = log.map(LogId) else { continue };
            let read = async { self.store.get(&path).await?.bytes().await };
            let says = read.await.map_err(|error| failed("read", &path, &error))?;
            owners.extend(serde_json::from_slice::<Note>(&says).ok().map(|note| (log, note.pod)));
        }
        Ok(owners)
    }
}

fn failed(what: &str, path: &Path, error: &dyn std::fmt::Display) -> Error {
    Error::unavailable("storage", format!("cannot {what} which pods logs are of, in /{path}: {error}"))
}

#[cfg(test)]
mod tests {
    use object_store::memory::InMemory;
    use uuid::Uuid;

    use super::*;

    #[tokio::test]
    async fn a_log_is_of_the_pod_that_opened_it_last() {
        let owners = Owners::new(Arc::new(InMemory::new()), &Path::from("tables"));
        let (log, other) = (LogId(Uuid::from_u128(1)), LogId(Uuid::from_u128(2)));
        let pod = |name: &str| name.parse::<PodId>().expect("valid");
        for (log, name) in [(log, "pod-1"), (other, "pod-2"), (log, "pod-3")] {
            owners.note(log, &pod(name)).await.expect("noted");
        }
        assert_eq!(owners.all().await.expect("read"), [(log, pod("pod-3")), (other, pod("pod-2"))].into());
    }

    #[tokio::test]
    async fn logs_that_a_pod_had_and_may_hold_something_are_found() {
        let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        let root = Path::from("tables");
        let (owners, drained) = (Owners::new(Arc::clone(&store), &root), DrainedLogs::new(store, &root));
        let (log, pod) = (|n| LogId(Uuid::from_u128(n)), |name: &str| name.parse::<PodId>().expect("valid"));
        for (n, name) in [(1, "pod-1"), (2, "pod-1"), (3, "pod-2"), (4, "pod-1")] {
            owners.note(log(n), &pod(name)).await.expect("noted");
        }
        drained.note(log(2)).await.expect("it holds nothing");
        let others = async || owners.others_of(&pod("pod-1"), log(4), &drained).await.expect("read");
        assert_eq!(others().await, [log(1)]);
        drained.withdraw(log(2)).await.expect("it is written again");
        assert_eq!(others().await, [log(1), log(2)]);
    }
}
