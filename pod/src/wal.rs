//! The write-ahead log: takes opaque entries, says when each is on stable storage, gives them back after a crash.
//!
//! There are two stores behind one seam. On a *disk* (`writer.rs`) entries that wait are written together as one group, with
//! one flush; while it is on its way the next ones gather, so that groups grow with load and nothing waits for a timer. Two
//! groups may be on their way at once. The files' format is described in `wal/segment.rs`. In the tables' own store
//! (`object.rs`) a group is an object, which gathers for an interval; any pod can take such a log over.
//!
//! *Owns*: the log's directory or folder, order and durability of entries, segments and their trimming, epochs.
//! *Does not own*: what entries mean (`table/batch.rs`), when an entry is committed (`table/home.rs`).
//! Keeps P3: only this module makes a [`Durable`], and only after the flush that covers it and all before it.
//! Keeps P7: entries wait within the slots, files and objects within `bytes_max`.

mod segment;
mod identity;
mod bounds;
mod disk;
mod replay;
mod bell;
mod writer;
mod keeper;
mod object;
pub mod stepped;
#[cfg(debug_assertions)]
pub mod fuzzing;
#[cfg(test)]
mod tests;

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use sluice_shared::ids::{Epoch, LogId, PodId, WalPosition};
use sluice_shared::lifecycle::{TaskScope, block_in_place};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

use object::{Groups, ObjectLog};
pub use object::{LogHeader, LogStore, ObjectLogConfig, SealedLog};
pub use replay::Replay;
use writer::{Gate, Shared, Written};

/// Entries that may wait to be taken into a group.
const SLOTS: usize = 8;
/// Smallest segment: the header's block and some groups.
const SEGMENT_BYTES_MIN: u64 = 16 << 10;
/// Largest segment: recovery holds one in memory.
const SEGMENT_BYTES_MAX: u64 = 1 << 30;

/// How a log is kept.
#[derive(Debug, Clone)]
pub struct WalConfig {
    /// Its directory; made where it does not exist.
    pub dir: PathBuf,
    /// The pod that it belongs to. The log of another is refused.
    pub owner: PodId,
    /// Size of a segment: a multiple of 4 KiB, from 16 KiB to 1 GiB.
    pub segment_bytes: u64,
    /// Most bytes that all segments may take together; at least two segments. At the limit slots wait.
    pub bytes_max: u64,
    /// Most bytes of a group; one entry may be larger.
    pub group_bytes_max: u64,
    /// Write past the page cache. Falls back by itself where the file system refuses.
    pub direct_io: bool,
    /// Start even where damage means that durable entries are lost: cut the log there, and log what is lost.
    pub accept_loss: bool,
}

impl WalConfig {
    /// The usual sizes.
    pub fn new(dir: PathBuf, owner: PodId) -> Self {
        Self {
            dir,
            owner,
            segment_bytes: 64 << 20,
            bytes_max: 4 << 30,
            group_bytes_max: 4 << 20,
            direct_io: true,
            accept_loss: false,
        }
    }

    fn validate(&self) -> Result<(), WalError> {
        let segment = self.segment_bytes;
        if !segment.is_multiple_of(segment::BLOCK as u64)
            || !(SEGMENT_BYTES_MIN..=SEGMENT_BYTES_MAX).contains(&segment)
        {
            let rule = "it must be a multiple of 4096, from 16384 (16 KiB) to 1073741824 (1 GiB)";
            return Err(WalError::Config(format!("segment_bytes is {segment}: {rule}")));
        }
        if self.bytes_max < 2 * segment {
            let least = 2 * segment;
            let rule = "the log needs room for two segments, one in use and one made ahead";
            return Err(WalError::Config(format!(
                "bytes_max is {}: {rule}; set it to at least {least}",
                self.bytes_max
            )));
        }
        if self.group_bytes_max < segment::BLOCK as u64 {
            let given = self.group_bytes_max;
            return Err(WalError::Config(format!("group_bytes_max is {given}: set it to at least 4096")));
        }
        Ok(())
    }
}

/// Why a log cannot be opened, read or written.
#[derive(Debug, thiserror::Error)]
pub enum WalError {
    /// Values that make no log.
    #[error("log configuration: {0}")]
    Config(String),
    /// Another process has the log open.
    #[error(
        "log {dir} is in use by process {holder}: end that process, or give this pod a directory of its own"
    )]
    Locked {
        /// The log's directory.
        dir: PathBuf,
        /// The other's process id, as far as known.
        holder: String,
    },
    /// The files belong to another pod or another log.
    #[error(
        "{file} belongs to {found}, not to {expected}: nothing was changed; give this pod its own directory"
    )]
    Foreign {
        /// The file that says so.
        file: PathBuf,
        /// Whose it is.
        found: String,
        /// Whose it should be.
        expected: String,
    },
    /// The files were written by a newer program.
    #[error(
        "{file} has format version {found}, this program knows up to {known}: nothing was changed; start a newer program"
    )]
    NewerFormat {
        /// The file that says so.
        file: PathBuf,
        /// Its version.
        found: u32,
        /// The newest that this program reads.
        known: u32,
    },
    /// The file that names the log is damaged or does not fit the segments.
    #[error(
        "log identity {file}: {reason}; restore it, or move the directory away and with it what the log holds"
    )]
    Identity {
        /// The identity file.
        file: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// Something that was durable is damaged or missing.
    #[error(
        "log segment {segment} is corrupt at byte {} (position {position}): {reason}; restore the file, or start with \
         --accept-loss to give up all entries from there on",
        position.offset
    )]
    Corrupt {
        /// The segment file.
        segment: PathBuf,
        /// Where the damage starts.
        position: WalPosition,
        /// What is wrong, and how it is known that this was durable.
        reason: String,
    },
    /// The operating system refused.
    #[error("cannot {action} {path}")]
    Io {
        /// What was attempted.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// Why it failed.
        source: std::io::Error,
    },
    /// The entry does not fit a segment.
    #[error(
        "an entry of {bytes} bytes does not fit the log, whose segments take {bytes_max}: raise segment_bytes, \
         or seal smaller batches"
    )]
    EntryTooLarge {
        /// The entry's bytes.
        bytes: u64,
        /// Most that fits.
        bytes_max: u64,
    },
    /// The tables' store refused.
    #[error("cannot {action} {object} in the tables' store")]
    Store {
        /// What was attempted.
        action: &'static str,
        /// On what.
        object: String,
        /// Why it failed.
        source: object_store::Error,
    },
    /// An object of a log that was stored is damaged or missing.
    #[error(
        "log object {object} is corrupt: {reason}; restore it: nothing of its log is given up meanwhile, unless you say so \
         (sluice release --log)"
    )]
    CorruptObject {
        /// Its name in the tables' store.
        object: String,
        /// What is wrong, and how it is known that it was stored.
        reason: String,
    },
    /// Another pod has taken the log over.
    #[error(
        "log {} was taken over{}: {object} is not this process's; what was acked is safe there, and nothing more can be",
        log.0, by.as_ref().map(|pod| format!(" by pod {pod}")).unwrap_or_default()
    )]
    Fenced {
        /// The log.
        log: LogId,
        /// The object that shows it.
        object: String,
        /// Who did, as far as known.
        by: Option<PodId>,
    },
    /// All of the log is committed, and it is deleted.
    #[error("log {} is done with: another pod has committed all of it", log.0)]
    Done {
        /// The log.
        log: LogId,
    },
    /// A thread of the log panicked; its state cannot be trusted.
    #[error("a thread of the log panicked: the process must end and recover from the log")]
    Panicked,
}

/// The right to append one entry.
#[must_use = "a slot that is not used keeps others waiting"]
#[derive(Debug)]
pub struct Slot {
    _permit: OwnedSemaphorePermit,
}

/// Proof that an entry is on stable storage. Only the log makes it. Keeps the entry's segment until released.
#[must_use = "dropped without release, it keeps its segment from being trimmed until the next start"]
pub struct Durable {
    kept: Kept,
    position: WalPosition,
    payload_bytes: u64,
    seed: u32,
}

/// Where an entry is kept.
enum Kept {
    OnDisk(Arc<Shared>),
    InObject(Arc<Groups>),
}

impl Kept {
    /// Bytes of the entries that are not released.
    fn entry_bytes(&self) -> &AtomicU64 {
        match self {
            Self::OnDisk(shared) => &shared.entry_bytes,
            Self::InObject(groups) => &groups.entry_bytes,
        }
    }
}

impl Durable {
    /// Where the entry stands.
    pub fn position(&self) -> WalPosition {
        self.position
    }

    /// Bytes of the payload.
    pub fn payload_bytes(&self) -> u64 {
        self.payload_bytes
    }

    /// The entry is committed durably elsewhere: the log need not keep it.
    pub fn release(self) {
        self.kept.entry_bytes().fetch_sub(self.payload_bytes, Ordering::Relaxed);
        match &self.kept {
            Kept::OnDisk(shared) => shared.release(self.position.segment),
            Kept::InObject(groups) => groups.release(self.position.segment),
        }
    }
}

impl fmt::Debug for Durable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Durable({}, {} bytes)", self.position, self.payload_bytes)
    }
}

/// How a log is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WalStatus {
    /// Bytes from the oldest segment that is still needed to the tail.
    pub bytes_used: u64,
    /// Most bytes that all segments may take together.
    pub bytes_max: u64,
    /// Whether entries wait for room: the limit is reached, or the disk is full.
    pub full: bool,
    /// Whether writes go past the page cache.
    pub direct_io: bool,
    /// Whether the writer threads run at real-time priority.
    pub real_time: bool,
    /// Entries that are written or being written, and not released.
    pub outstanding: u64,
    /// Bytes of those that are durable: of what they hold, not of what stands between them or is made ahead. Entries of
    /// former lives count once they are read.
    pub entry_bytes: u64,
}

/// A write-ahead log. Clones share it; when the last one is dropped the log writes what it has and ends.
#[derive(Clone)]
pub struct Wal {
    store: Store,
}

#[derive(Clone)]
enum Store {
    Disk(Arc<Owner>),
    Object(ObjectLog),
}

/// Ends the threads with the last handle.
struct Owner(Arc<Shared>);

impl Drop for Owner {
    fn drop(&mut self) {
        self.0.begin_close();
    }
}

impl Wal {
    /// Opens or creates the log, durably raises its epoch, and starts its threads. `on_failure` is called once, by
    /// a thread of the log, when a write or flush failed: nothing becomes durable any more, and the process should
    /// end. Blocks while it reads the old segments.
    ///
    /// # Errors
    /// A log in use, of another owner, of a newer format; damage to what was durable, unless `accept_loss`.
    pub fn open(
        config: WalConfig,
        on_failure: Box<dyn Fn(&WalError) + Send + Sync>,
    ) -> Result<(Self, Replay), WalError> {
        config.validate()?;
        let disk = disk::Disk::open(&config.dir, config.direct_io)?;
        Self::open_on(disk, config, on_failure)
    }

    /// Which log a directory holds, if any.
    ///
    /// # Errors
    /// Where that cannot be read.
    pub fn id_in(dir: &Path) -> Result<Option<LogId>, WalError> {
        Ok(disk::identity_in(dir)?.map(|identity| identity.log))
    }

    fn open_on(
        disk: disk::Disk,
        config: WalConfig,
        on_failure: Box<dyn Fn(&WalError) + Send + Sync>,
    ) -> Result<(Self, Replay), WalError> {
        Self::start_on(disk, config, on_failure, writer::start)
    }

    /// As `open`, with tasks of this scope in the place of threads, on a disk of this pace.
    ///
    /// # Errors
    /// As `open`.
    pub fn open_stepped(
        config: WalConfig,
        on_failure: Box<dyn Fn(&WalError) + Send + Sync>,
        pace: &stepped::Pace,
        scope: &TaskScope,
    ) -> Result<(Self, Replay), WalError> {
        config.validate()?;
        let disk = disk::Disk::open(&config.dir, config.direct_io)?;
        Self::start_on(disk, config, on_failure, |shared| {
            stepped::start(shared, pace, scope);
            Ok(false)
        })
    }

    /// `start` tells whether the writers have real-time priority.
    fn start_on(
        disk: disk::Disk,
        config: WalConfig,
        on_failure: Box<dyn Fn(&WalError) + Send + Sync>,
        start: impl FnOnce(&Arc<Shared>) -> Result<bool, WalError>,
    ) -> Result<(Self, Replay), WalError> {
        let recovered = replay::recover(&disk, &config)?;
        let shared = Arc::new(Shared::new(disk, &config, &recovered, on_failure));
        let wal = Self { store: Store::Disk(Arc::new(Owner(Arc::clone(&shared)))) };
        let real_time = start(&shared)?;
        let status = wal.status();
        tracing::info!(
            dir = %config.dir.display(),
            epoch = recovered.identity.epoch.0,
            entries = status.outstanding,
            direct_io = status.direct_io,
            real_time,
            "log opened"
        );
        Ok((wal, Replay::new(shared, recovered.found)))
    }

    /// Begins a log in the tables' store, with its tasks on this runtime. `on_failure` is called once, when the log was
    /// taken over or cannot go on: nothing becomes durable any more, and the process should end.
    ///
    /// # Errors
    /// A configuration that cannot be; a store that cannot be written.
    pub async fn begin(
        logs: &LogStore,
        config: ObjectLogConfig,
        on_failure: Box<dyn Fn(&WalError) + Send + Sync>,
    ) -> Result<Self, WalError> {
        let log = ObjectLog::begin(logs, config, on_failure).await?;
        Ok(Self { store: Store::Object(log) })
    }

    fn entrance(&self) -> (&watch::Sender<Gate>, &Arc<Semaphore>) {
        match &self.store {
            Store::Disk(log) => (&log.0.gate, &log.0.slots),
            Store::Object(log) => (&log.shared.gate, &log.shared.slots),
        }
    }

    /// Resolves when the log can take one more entry; while it is full, when it has room again. Never resolves
    /// once the log has failed or is being closed. May be dropped at any time.
    pub async fn slot(&self) -> Slot {
        let (gate, slots) = self.entrance();
        let mut gate = gate.subscribe();
        loop {
            let open = gate.wait_for(|gate| *gate == Gate::Open).await.map(|_| ());
            let permit = Arc::clone(slots).acquire_owned().await;
            if let (Ok(()), Ok(permit)) = (open, permit)
                && *gate.borrow() == Gate::Open
            {
                return Slot { _permit: permit };
            }
        }
    }

    /// Appends an entry, the parts of `payload` one after the other. `then` runs on a thread of the log, in log
    /// order, once the entry is on stable storage; it must be short, since later entries wait for it. If the log
    /// fails first, or is being closed, `then` is dropped and never called.
    ///
    /// # Errors
    /// An entry that does not fit a segment.
    pub fn append(
        &self,
        slot: Slot,
        payload: Vec<Bytes>,
        then: Box<dyn FnOnce(Durable) + Send>,
    ) -> Result<(), WalError> {
        let bytes: usize = payload.iter().map(Bytes::len).sum();
        let bytes_max = self.payload_bytes_max();
        if bytes as u64 > bytes_max {
            return Err(WalError::EntryTooLarge { bytes: bytes as u64, bytes_max });
        }
        let entry = writer::Pending { payload, bytes, then, slot };
        match &self.store {
            Store::Disk(log) => log.0.enqueue(entry),
            Store::Object(log) => log.shared.enqueue(entry),
        }
        Ok(())
    }

    /// Largest entry that fits a segment, or an object.
    pub fn payload_bytes_max(&self) -> u64 {
        match &self.store {
            Store::Disk(log) => segment::payload_bytes_max(log.0.segment_bytes),
            Store::Object(log) => log.shared.config.payload_bytes_max,
        }
    }

    /// Reads an entry back, of this log or of one that was taken over. Blocks its thread where it is on a disk.
    ///
    /// # Errors
    /// Where the store fails, or the entry does not match its checksum; `Done` where a log that was taken over is done with.
    pub async fn read_back(&self, durable: &Durable) -> Result<Bytes, WalError> {
        let groups = match &durable.kept {
            Kept::OnDisk(shared) => {
                // On this thread: the log's page is most likely still in memory.
                return block_in_place(|| Self::read_of(shared, durable));
            }
            Kept::InObject(groups) => groups,
        };
        let read = groups.read(durable.position, durable.payload_bytes, durable.seed).await;
        if let (Err(error), Store::Object(log)) = (&read, &self.store) {
            log.shared.read_failed(error);
        }
        read
    }

    fn read_of(shared: &Shared, durable: &Durable) -> Result<Bytes, WalError> {
        let (position, payload_bytes) = (durable.position, durable.payload_bytes);
        let length = segment::ENTRY_HEADER + usize::try_from(payload_bytes).unwrap_or(usize::MAX);
        let entry = shared.disk.read(position, length)?;
        if !segment::entry_is_whole(&entry, length - segment::ENTRY_HEADER, durable.seed) {
            let segment = shared.disk.segment_path(position.segment);
            let reason = "a durable entry does not match its checksum when read back".to_owned();
            return Err(WalError::Corrupt { segment, position, reason });
        }
        Ok(entry.slice(segment::ENTRY_HEADER..))
    }

    /// The log's identity, which stays with its directory or folder.
    pub fn log_id(&self) -> LogId {
        match &self.store {
            Store::Disk(log) => log.0.log,
            Store::Object(log) => log.shared.log(),
        }
    }

    /// The number of this life of the log.
    pub fn epoch(&self) -> Epoch {
        match &self.store {
            Store::Disk(log) => log.0.epoch,
            Store::Object(_) => object::form::EPOCH,
        }
    }

    /// Where the next group goes.
    pub fn tail(&self) -> WalPosition {
        match &self.store {
            Store::Disk(log) => log.0.tail(),
            Store::Object(log) => log.shared.tail(),
        }
    }

    /// The start of the first segment that nothing has been written to: once the log is trimmed to there, all
    /// that is in it now is gone.
    pub fn untouched(&self) -> WalPosition {
        match &self.store {
            Store::Disk(log) => log.0.untouched(),
            Store::Object(log) => log.shared.untouched(),
        }
    }

    /// Everything before is released, and durably gone from the store: no start replays it.
    pub fn trimmed(&self) -> WalPosition {
        match &self.store {
            Store::Disk(log) => log.0.trimmed(),
            Store::Object(log) => log.shared.trimmed(),
        }
    }

    /// How the log is doing.
    pub fn status(&self) -> WalStatus {
        match &self.store {
            Store::Disk(log) => log.0.status(),
            Store::Object(log) => log.shared.status(),
        }
    }

    /// Resolves when the entries appended so far are durable and their `then`s have run, or the log has failed.
    pub async fn settled(&self) {
        match &self.store {
            Store::Disk(log) => log.0.settled().await,
            Store::Object(log) => log.shared.settled().await,
        }
    }

    /// Takes no more entries, waits until those appended are durable and their `then`s have run (or the log has
    /// failed), ends the threads or tasks, and unlocks the directory.
    pub async fn close(&self) {
        match &self.store {
            Store::Disk(log) => {
                log.0.begin_close();
                let mut ended = log.0.ended.subscribe();
                // The sender lives in `log`: waiting for it cannot fail.
                let _ = ended.wait_for(|ended| *ended).await;
            }
            Store::Object(log) => {
                log.shared.begin_close();
                log.shared.ended().await;
            }
        }
    }

    /// Closes a log in the tables' store, of which nothing is needed any more: nothing is left of it then. With one on a
    /// disk the next start goes on.
    ///
    /// # Errors
    /// `Store` where something is left.
    pub async fn close_for_good(&self) -> Result<(), WalError> {
        let Store::Object(log) = &self.store else { return Ok(()) };
        self.close().await;
        log.shared.delete().await
    }
}

impl fmt::Debug for Wal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Wal({}, epoch {}, tail {})", self.log_id().0, self.epoch().0, self.tail())
    }
}

impl Durable {
    fn of(shared: &Arc<Shared>, segment: u64, entry: Written) -> Self {
        let position = WalPosition { segment, offset: entry.offset };
        let payload_bytes = entry.payload_bytes as u64;
        Self::kept(Kept::OnDisk(Arc::clone(shared)), position, payload_bytes, entry.seed)
    }

    fn in_object(groups: &Arc<Groups>, position: WalPosition, payload_bytes: u64, seed: u32) -> Self {
        Self::kept(Kept::InObject(Arc::clone(groups)), position, payload_bytes, seed)
    }

    fn kept(kept: Kept, position: WalPosition, payload_bytes: u64, seed: u32) -> Self {
        kept.entry_bytes().fetch_add(payload_bytes, Ordering::Relaxed);
        Self { kept, position, payload_bytes, seed }
    }
}
