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
}
