//! One log's objects in the store of the tables, below `_sluice/wal/<log id>/`.
//!
//! | object | holds |
//! |---|---|
//! | `header.json` | format, log id, owner, when it was begun; there from before the first group until all is committed |
//! | `first.json` | the first number that is kept: written before what is below it is deleted |
//! | `<number, 20 digits>` | a group, or the seal (`form.rs`); numbers begin at 1 |
//!
//! Groups are put *if absent*, each when it is known that the one before is: so the log ends before the first number that
//! is missing. A number below the one in `first.json` is not missing but trimmed: whoever finds none at a number has to
//! look there again, and then whether the header is still there, in this order. A log without a header is done with.
//!
//! *Owns*: names, every call on the store, what an answer of the store means.
//! *Does not own*: objects' bytes (`form.rs`), when what is put and deleted (`object.rs`, `sealed.rs`).

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::TryStreamExt;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt, PutMode};
use serde::{Deserialize, Serialize};
use sluice_shared::fault::{self, Point};
use sluice_shared::ids::{LogId, PodId};
use sluice_shared::lifecycle::now_us;

use super::super::WalError;
use super::form::{self, Kind, Object, SEAL_BYTES};

/// Where logs are kept.
#[derive(Debug, Clone)]
pub struct LogStore {
    store: Arc<dyn ObjectStore>,
    /// The folder of all logs.
    path: Path,
    /// Where the store is a directory of this machine, or one mounted here: the folder in it.
    directory: Option<PathBuf>,
}

/// What a log says of itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogHeader {
    format: u32,
    /// The log.
    pub log: LogId,
    /// The pod that writes it.
    pub owner: PodId,
    /// When it was begun, µs since 1970-01-01 UTC.
    pub begun_us: i64,
}

#[derive(Serialize, Deserialize)]
struct First {
    first: u64,
}

/// One log's folder.
#[derive(Debug, Clone)]
pub(super) struct Folder {
    logs: LogStore,
    pub(super) log: LogId,
    path: Path,
}

/// What became of a put-if-absent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Put {
    Done,
    /// There is an object already.
    Exists,
}

impl LogStore {
    /// Logs below the tables' root. `directory` is that root in the file system, where the store is one.
    pub fn new(store: Arc<dyn ObjectStore>, root: &Path, directory: Option<PathBuf>) -> Self {
        let directory = directory.map(|root| root.join("_sluice").join("wal"));
        Self { store, path: root.clone().join("_sluice").join("wal"), directory }
    }

    /// All logs that have left anything.
    ///
    /// # Errors
    /// `Store` where it cannot be listed.
    pub async fn list(&self) -> Result<Vec<LogId>, WalError> {
        let listed = self.store.list_with_delimiter(Some(&self.path)).await;
        let listed = listed.map_err(|error| failed("list the logs in", &self.path, error))?;
        let ids = listed.common_prefixes.iter().filter_map(Path::filename);
        Ok(ids.filter_map(|id| id.parse().ok().map(LogId)).collect())
    }

    /// What a log says of itself; None where it is done with.
    ///
    /// # Errors
    /// `Store`, `NewerFormat`, `CorruptObject`, also where there are objects of records and no header.
    pub async fn header(&self, log: LogId) -> Result<Option<LogHeader>, WalError> {
        let folder = self.folder(log);
        let header = folder.header().await?;
        if header.is_some() {
            return Ok(header);
        }
        // The header goes last, when all that had records has gone.
        let numbers = folder.numbers().await?;
        let Some((number, _)) = numbers.iter().find(|(_, bytes)| **bytes > SEAL_BYTES) else {
            return Ok(None);
        };
        for seal in numbers.range(..number).map(|(seal, _)| *seal) {
            let bytes = folder.object(seal).await?;
            let object = bytes.and_then(|bytes| form::decode(&bytes, log, seal).ok());
            if object.is_some_and(|object| object.kind == Kind::Seal) {
                // A writer that was stopped meanwhile has put it on its way to the seal, and told of nothing.
                return Ok(None);
            }
        }
        let reason = format!("it is missing, though {} is there: restore it", folder.name_of(*number));
        Err(corrupt(&folder.header_path(), reason))
    }

    /// Whose a log is by its first group that can be read: what there is to go by where its header is missing or damaged.
    ///
    /// # Errors
    /// `Store`.
    pub async fn writer(&self, log: LogId) -> Result<Option<PodId>, WalError> {
        let folder = self.folder(log);
        for number in folder.numbers().await?.into_keys() {
            let Some(bytes) = folder.object(number).await? else { continue };
            if let Ok(Object { writer, kind: Kind::Group { .. }, .. }) = form::decode(&bytes, log, number) {
                return Ok(Some(writer));
            }
        }
        Ok(None)
    }

    pub(super) fn folder(&self, log: LogId) -> Folder {
        Folder { logs: self.clone(), log, path: self.path.clone().join(log.0.to_string()) }
    }
}

impl Folder {
    /// Whether puts are flushes of a file system: after an error it is not known whether what is there will stay.
    pub(super) fn is_directory(&self) -> bool {
        self.logs.directory.is_some()
    }

    /// Begins the log.
    pub(super) async fn begin(&self, owner: &PodId) -> Result<(), WalError> {
        let header =
            LogHeader { format: form::KNOWN, log: self.log, owner: owner.clone(), begun_us: now_us() };
        let bytes = serde_json::to_vec(&header).expect("a header is plain JSON");
        // The id is new: whoever may have put it is this process.
        let path = self.header_path();
        let put = self.logs.store.put(&path, bytes.into()).await;
        put.map(drop).map_err(|error| failed("write", &path, error))
    }

    pub(super) async fn header(&self) -> Result<Option<LogHeader>, WalError> {
        #[derive(Deserialize)]
        struct Version {
            format: u32,
        }
        let path = self.header_path();
        let Some(bytes) = self.read(&path).await? else { return Ok(None) };
        let garbled = |error: serde_json::Error| corrupt(&path, error.to_string());
        let found = serde_json::from_slice::<Version>(&bytes).map_err(garbled)?.format;
        if found > form::KNOWN {
            return Err(WalError::NewerFormat { file: path.as_ref().into(), found, known: form::KNOWN });
        }
        serde_json::from_slice(&bytes).map(Some).map_err(garbled)
    }

    /// The first number that is kept.
    pub(super) async fn first(&self) -> Result<u64, WalError> {
        let path = self.first_path();
        let Some(bytes) = self.read(&path).await? else { return Ok(1) };
        let first: First =
            serde_json::from_slice(&bytes).map_err(|error| corrupt(&path, error.to_string()))?;
        Ok(first.first)
    }

    pub(super) async fn put_first(&self, first: u64) -> Result<(), WalError> {
        let path = self.first_path();
        let bytes = serde_json::to_vec(&First { first }).expect("a number is plain JSON");
        let put = self.logs.store.put(&path, bytes.into()).await;
        put.map(drop).map_err(|error| failed("write", &path, error))
    }

    /// Puts an object where there is none of this number.
    pub(super) async fn put_new(&self, number: u64, bytes: Bytes) -> Result<Put, WalError> {
        let path = self.object_path(number);
        match self.logs.store.put_opts(&path, bytes.into(), PutMode::Create.into()).await {
            Ok(_) => Ok(Put::Done),
            Err(object_store::Error::AlreadyExists { .. }) => Ok(Put::Exists),
            Err(error) => Err(failed("write", &path, error)),
        }
    }

    /// The object of this number, where there is one.
    pub(super) async fn object(&self, number: u64) -> Result<Option<Bytes>, WalError> {
        self.read(&self.object_path(number)).await
    }

    /// Whether there is an object of this number.
    pub(super) async fn has(&self, number: u64) -> Result<bool, WalError> {
        let path = self.object_path(number);
        match self.logs.store.head(&path).await {
            Ok(_) => Ok(true),
            Err(object_store::Error::NotFound { .. }) => Ok(false),
            Err(error) => Err(failed("look for", &path, error)),
        }
    }

    /// A part of the object of this number, where there is one.
    pub(super) async fn part(&self, number: u64, range: Range<u64>) -> Result<Option<Bytes>, WalError> {
        let path = self.object_path(number);
        match self.logs.store.get_range(&path, range).await {
            Ok(bytes) => Ok(Some(bytes)),
            Err(object_store::Error::NotFound { .. }) => Ok(None),
            Err(error) => Err(failed("read", &path, error)),
        }
    }

    /// The numbers of all objects that are listed, with their lengths.
    pub(super) async fn numbers(&self) -> Result<BTreeMap<u64, u64>, WalError> {
        let listed = self.logs.store.list(Some(&self.path)).try_collect::<Vec<_>>().await;
        let listed = listed.map_err(|error| failed("list", &self.path, error))?;
        let number = |path: &Path| path.filename()?.parse().ok();
        Ok(listed.iter().filter_map(|meta| Some((number(&meta.location)?, meta.size))).collect())
    }

    /// Deletes the object of this number, where there is one.
    pub(super) async fn delete(&self, number: u64) -> Result<(), WalError> {
        self.delete_at(&self.object_path(number)).await
    }

    /// Deletes what a log is known by. From then on it is done with.
    pub(super) async fn delete_head(&self) -> Result<(), WalError> {
        fault::pass(Point::LogDelete);
        // Who finds no `first.json` asks for the header next, so that this order matters.
        self.delete_at(&self.header_path()).await?;
        self.delete_at(&self.first_path()).await?;
        self.delete_staged();
        Ok(())
    }

    pub(super) fn corrupt(&self, number: u64, reason: String) -> WalError {
        corrupt(&self.object_path(number), reason)
    }

    pub(super) fn name_of(&self, number: u64) -> String {
        self.object_path(number).as_ref().to_owned()
    }

    /// The path of an object, or what stands for it in messages.
    fn object_path(&self, number: u64) -> Path {
        self.path.clone().join(format!("{number:020}"))
    }

    fn header_path(&self) -> Path {
        self.path.clone().join("header.json")
    }

    fn first_path(&self) -> Path {
        self.path.clone().join("first.json")
    }

    async fn read(&self, path: &Path) -> Result<Option<Bytes>, WalError> {
        let read = async { self.logs.store.get(path).await?.bytes().await };
        match read.await {
            Ok(bytes) => Ok(Some(bytes)),
            Err(object_store::Error::NotFound { .. }) => Ok(None),
            Err(error) => Err(failed("read", path, error)),
        }
    }

    async fn delete_at(&self, path: &Path) -> Result<(), WalError> {
        match self.logs.store.delete(path).await {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
            Err(error) => Err(failed("delete", path, error)),
        }
    }

    /// A put that a crash cut short leaves a file `NAME#N` in a directory, which the store neither lists nor deletes.
    fn delete_staged(&self) {
        let Some(directory) = &self.logs.directory else { return };
        let Ok(entries) = std::fs::read_dir(directory.join(self.log.0.to_string())) else { return };
        for entry in entries.flatten() {
            if entry.file_name().to_string_lossy().contains('#') {
                // What stays takes room, and does no other harm.
                let _ = std::fs::remove_file(entry.path());
            }
        }
    }
}

fn failed(action: &'static str, path: &Path, source: object_store::Error) -> WalError {
    WalError::Store { action, object: path.as_ref().to_owned(), source }
}

fn corrupt(path: &Path, reason: String) -> WalError {
    WalError::CorruptObject { object: path.as_ref().to_owned(), reason }
}
