//! Tables: durable batches in, committed table versions out.
//!
//! *Owns*: which tables there are and which are open, their specs, batches whose table is gone.
//! *Does not own*: flushing (`table/task`), the commit (`table/home`), the way to it (`table/route`), what other pods ask
//! (`table/serve`), files (`table/parquet`), Delta Lake (`table/delta`).

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use arrow::datatypes::{Field, Schema, SchemaRef};
use futures_util::StreamExt;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt, PutMode, PutOptions};
use sluice_shared::error::{Error, ErrorKind};
use sluice_shared::ids::{PodId, SchemaId, StreamId, TableId, TableName};
use sluice_shared::lifecycle::TaskScope;
use sluice_shared::table::TableSpec;
use sluice_shared::table::properties::{ON_INVALID, QUARANTINE};
use tokio::sync::OwnedMutexGuard;
use uuid::Uuid;

use crate::drained::DrainedLogs;
use crate::owners::Owners;
use crate::pool::Pool;
use crate::stream::Reach;
use crate::stream::progress::StreamProgress;
use crate::wal::{Durable, LogStore, Wal};
use batch::Batch;
use bucket::Asked;
use delta::{Delta, DeltaError, Shape};
use held::Holding;
use home::{HomeConfig, HomeError};
use open::{Budget, OpenTable};
use stranded::Stranded;
pub use stranded::StrandedRange;

pub use place::{Stores, TablesPlace};

pub mod batch;
pub mod watermark;
pub mod ended;
mod dictionary;
mod directory;
mod faulty;
mod place;
mod bucket;
mod executor;
pub mod delta;
pub mod parquet;
pub mod home;
mod wire;
mod serve;
mod route;
pub mod rejected;
mod round;
pub mod held;
mod stranded;
mod give_up;
pub mod open;
mod task;
pub mod verify;

/// Longest wait for the log, before it is said what a table holds.
const SETTLE_MAX: Duration = Duration::from_secs(3);
/// Pause before storage is asked again at the start.
const REPLAY_PAUSE: Duration = Duration::from_secs(1);

/// What tells the time by which ended streams are forgotten. A test has its own.
#[derive(Clone)]
pub struct Clock(Arc<dyn Fn() -> Instant + Send + Sync>);

impl Clock {
    /// The machine's.
    pub fn system() -> Self {
        Self::new(Instant::now)
    }

    /// One that says what `now` says.
    pub fn new(now: impl Fn() -> Instant + Send + Sync + 'static) -> Self {
        Self(Arc::new(now))
    }

    fn now(&self) -> Instant {
        (self.0)()
    }
}

impl fmt::Debug for Clock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Clock").field(&self.now()).finish()
    }
}

/// How tables are kept.
#[derive(Debug, Clone)]
pub struct TablesConfig {
    /// Where the tables are, as `catalog/schema/table` below it.
    pub root: TablesPlace,
    /// This pod.
    pub pod: PodId,
    /// The others, and which of them is a table's home.
    pub pool: Pool,
    /// How long a durable batch waits at most before it is written.
    pub flush_interval: Duration,
    /// Rows in memory that make a flush at once, and bound what goes into one file.
    pub target_file_bytes: u64,
    /// Memory that all waiting batches of the pod may hold; beyond, they are read back from the log.
    pub memory_bytes: u64,
    /// A checkpoint and a checksum are written at each version that is a multiple of this.
    pub checkpoint_interval: u64,
    /// How long the map keeps an ephemeral stream after its end at least: longer than a gateway may try to send it
    /// again, since what comes of a stream that is forgotten is held for ever, or doubled.
    pub ended_kept: Duration,
    /// By which that is measured.
    pub clock: Clock,
}

/// All tables of a pod. Clones share them.
#[derive(Clone)]
pub struct Tables {
    shared: Arc<Shared>,
}

/// The place of one table: whoever opens it first holds it meanwhile.
type Slot = Arc<tokio::sync::Mutex<Option<Arc<OpenTable>>>>;

struct Shared {
    config: TablesConfig,
    wal: Wal,
    scope: TaskScope,
    store: Arc<dyn ObjectStore>,
    /// The root's path in the store.
    root: Path,
    /// What stands before a path in a URL.
    base: String,
    delta: Delta,
    budget: Arc<Budget>,
    open: Mutex<HashMap<TableName, Slot>>,
    /// Log entries of tables that are not written any more.
    stranded: Arc<Stranded>,
}

/// The place of tables, reached.
#[derive(Debug, Clone)]
pub struct Storage {
    /// The store.
    pub stores: Stores,
    /// The tables' root in it.
    pub root: Path,
    /// How the store's paths are known to others: what stands before them in a URL.
    base: String,
    /// The root in the file system, where the store is one.
    directory: Option<PathBuf>,
    /// Of a bucket: where it is asked.
    asked: Option<Asked>,
}

impl Storage {
    /// That of tables in this place. A directory is in `disk`, and made where it is missing.
    ///
    /// # Errors
    /// Where the root cannot be made or opened.
    pub fn at(disk: &Stores, place: &TablesPlace) -> Result<Self, Error> {
        place.check_name()?;
        match place {
            TablesPlace::Directory(root) => {
                let attempted = format!("make the tables' directory {}", root.display());
                delta::make_directory(root).map_err(|error| storage(&attempted, &error))?;
                Self::opened(disk, root).map_err(|error| storage(&attempted, &*error))
            }
            TablesPlace::S3 { .. } => Self::there(place),
        }
    }

    /// That of tables which are there already; nothing is made.
    ///
    /// # Errors
    /// Where the root cannot be opened.
    pub fn there(place: &TablesPlace) -> Result<Self, Error> {
        let failed = |error: &dyn std::error::Error| storage(&format!("open {place}"), error);
        place.check_name()?;
        match place {
            TablesPlace::Directory(root) => {
                Self::opened(&Stores::disk(), root).map_err(|error| failed(&*error))
            }
            TablesPlace::S3 { bucket, prefix } => {
                let stores = Stores::bucket(bucket).map_err(|error| failed(&error))?;
                let (base, asked) = (format!("s3://{bucket}"), Some(place::asked(bucket)));
                Ok(Self { stores, root: prefix.clone(), base, directory: None, asked })
            }
        }
    }

    fn opened(disk: &Stores, root: &std::path::Path) -> Result<Self, Box<dyn std::error::Error>> {
        let directory = root.canonicalize()?;
        let root = Path::from_absolute_path(&directory)?;
        let (stores, base) = (disk.clone(), "file://".to_owned());
        Ok(Self { stores, root, base, directory: Some(directory), asked: None })
    }

    /// What an error of the store means. What a bucket says and will say again is no reason to wait.
    fn failed(&self, attempted: &str, error: &object_store::Error) -> Error {
        let Some(asked) = &self.asked else { return storage(attempted, error) };
        let explained = asked.explain(error);
        let message = format!("cannot {attempted}: {}", explained.text);
        match explained.stays {
            true => Error::invalid("tables_store", message),
            false => Error::unavailable("storage", message),
        }
    }

    /// Something below the tables' root, as people know it.
    pub fn place(&self, below: &str) -> String {
        format!("{}/{}/{below}", self.base, self.root)
    }

    /// Logs that are kept beside the tables.
    pub fn logs(&self) -> LogStore {
        LogStore::new(Arc::clone(&self.stores.tables), &self.root, self.directory.clone())
    }
}

/// An open table. Clones share it.
#[derive(Clone)]
pub struct Table {
    open: Arc<OpenTable>,
    id: TableId,
    schema: SchemaRef,
    schema_id: SchemaId,
}

fn storage(attempted: &str, error: &dyn std::error::Error) -> Error {
    Error::unavailable("storage", format!("cannot {attempted}: {error}"))
}

/// Whether an error of the store is about the place itself: to try again is of no use before a person has acted.
fn never_passes(error: &(dyn std::error::Error + 'static)) -> bool {
    use std::io::ErrorKind::{InvalidFilename, NotADirectory, PermissionDenied, ReadOnlyFilesystem};
    let of_place = [InvalidFilename, NotADirectory, PermissionDenied, ReadOnlyFilesystem];
    let mut said = String::new();
    let mut next = Some(error);
    while let Some(cause) = next {
        if cause.downcast_ref::<std::io::Error>().is_some_and(|io| of_place.contains(&io.kind())) {
            return true;
        }
        said.push_str(&cause.to_string());
        next = cause.source();
    }
    // The kernel keeps words alone; so does a bucket.
    let words =
        ["Not a directory", "File name too long", "Permission denied", "Read-only file system", "KeyTooLong"];
    words.iter().any(|word| said.contains(word))
}

fn not_made(name: &TableName, error: &dyn std::error::Error) -> Error {
    let message = format!(
        "table {name} cannot be made, and trying again does not help: {error}; see pod.tables_dir, which all pods have to be \
         able to write below, or choose another name"
    );
    Error::invalid("table_not_made", message)
}

fn home_error(error: HomeError) -> Error {
    match error {
        HomeError::Again(what) => Error::unavailable("storage", what),
        HomeError::Stopped(error) => error,
    }
}

impl Tables {
    /// Tables at `config.root`, fed from `wal`. Must be called in a runtime.
    ///
    /// # Errors
    /// Where the root cannot be made or opened.
    pub fn new(config: TablesConfig, wal: Wal, scope: TaskScope) -> Result<Self, Error> {
        let storage = Storage::at(&Stores::disk(), &config.root)?;
        Ok(Self::on(storage, config, wal, scope))
    }

    /// Tables that are kept there.
    pub fn on(storage: Storage, config: TablesConfig, wal: Wal, scope: TaskScope) -> Self {
        let Storage { stores: Stores { tables: store, kernels }, root, base, .. } = storage;
        let delta = Delta::with_kernel_on(kernels, Arc::clone(&store));
        let budget = Arc::new(Budget::new(config.memory_bytes));
        let (open, stranded) = (Mutex::default(), Arc::default());
        let shared = Shared { config, wal, scope, store, root, base, delta, budget, open, stranded };
        Self { shared: Arc::new(shared) }
    }

    /// What tells the tables that are kept there from those of any other directory: all pods of a pool have to write the
    /// same. Made by whoever comes first.
    ///
    /// # Errors
    /// Where storage fails.
    pub async fn identity(kept: &Storage) -> Result<Uuid, Error> {
        let (store, path) = (&kept.stores.tables, kept.root.clone().join("_sluice").join("identity"));
        let new = Uuid::new_v4();
        let options = PutOptions { mode: PutMode::Create, ..PutOptions::default() };
        match store.put_opts(&path, new.to_string().into(), options).await {
            Ok(_) => return Ok(new),
            Err(object_store::Error::AlreadyExists { .. }) => {}
            Err(error) => return Err(kept.failed(&format!("write {path}"), &error)),
        }
        let read = async { store.get(&path).await?.bytes().await };
        let bytes = read.await.map_err(|error| kept.failed(&format!("read {path}"), &error))?;
        let text = std::str::from_utf8(&bytes).ok().and_then(|text| text.trim().parse().ok());
        text.ok_or_else(|| {
            let message = format!("/{path} is no UUID: restore it, or remove it while no pod runs");
            Error::invalid("tables_identity", message)
        })
    }

    /// The table of this name.
    ///
    /// # Errors
    /// NotFound `table_not_found`; Invalid where its features are not supported; Unavailable where storage is.
    pub async fn open(&self, name: &TableName) -> Result<Table, Error> {
        let table = self.look(name).await?;
        // Outside of the slot: that may ask another pod, which looks into its own.
        table.register().await.map_err(home_error)?;
        Ok(Table::new(&table))
    }

    /// The table of this name, for those who have no runs for it: its log is not registered with the table.
    async fn look(&self, name: &TableName) -> Result<Arc<OpenTable>, Error> {
        let mut open = self.slot(name).await;
        self.open_in(&mut open, name).await
    }

    /// Opens a table in its slot, which is the caller's meanwhile: two open tables of one name would each tell their
    /// own streams alone what is committed, and be rivals at each commit.
    async fn open_in(
        &self,
        open: &mut Option<Arc<OpenTable>>,
        name: &TableName,
    ) -> Result<Arc<OpenTable>, Error> {
        if let Some(table) = open.as_ref().filter(|table| table.stopped().is_none()) {
            return Ok(Arc::clone(table));
        }
        // A stopped table is opened again: a person may have mended it, or made it anew.
        let shared = &self.shared;
        let parts = (Arc::clone(&shared.budget), Arc::clone(&shared.stranded));
        match OpenTable::start(self.home_config(name), shared.config.clone(), parts, &shared.scope).await {
            Ok(table) => {
                *open = Some(Arc::clone(&table));
                Ok(table)
            }
            Err(error) => {
                self.clear(open, name);
                Err(home_error(error))
            }
        }
    }

    /// The slot of a name. It may be taken out of the map while this waits for it; then the new one counts.
    async fn slot(&self, name: &TableName) -> OwnedMutexGuard<Option<Arc<OpenTable>>> {
        loop {
            let slot = Arc::clone(self.open_slots().entry(name.clone()).or_default());
            let open = Arc::clone(&slot).lock_owned().await;
            if self.open_slots().get(name).is_some_and(|there| Arc::ptr_eq(there, &slot)) {
                return open;
            }
        }
    }

    /// Names that are no table leave nothing behind.
    fn clear(&self, open: &Option<Arc<OpenTable>>, name: &TableName) {
        if open.is_none() {
            self.open_slots().remove(name);
        }
    }

    fn open_slots(&self) -> std::sync::MutexGuard<'_, HashMap<TableName, Slot>> {
        self.shared.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn home_config(&self, name: &TableName) -> HomeConfig {
        let shared = &self.shared;
        HomeConfig {
            name: name.clone(),
            directory: self.directory(name),
            store: Arc::clone(&shared.store),
            delta: shared.delta.clone(),
            wal: shared.wal.clone(),
            ended_kept: shared.config.ended_kept,
            clock: shared.config.clock.clone(),
            checkpoint_interval: shared.config.checkpoint_interval,
            commit_interval: shared.config.flush_interval,
        }
    }

    fn directory(&self, name: &TableName) -> Path {
        name.as_str().split('.').fold(self.shared.root.clone(), Path::join)
    }

    /// Makes a table, or opens the one that is there with the same spec.
    ///
    /// # Errors
    /// Invalid `table_exists` where it is there with another spec, which names the difference.
    pub async fn create(&self, name: &TableName, spec: TableSpec) -> Result<Table, Error> {
        if let Some(of) = name.as_str().strip_suffix(rejected::SUFFIX) {
            let message = format!(
                "no table can be made as {name}: that is where rejected records of {of} go, and it is made for them"
            );
            return Err(Error::invalid("reserved_table", message));
        }
        let with_system = spec.properties.get("sluice.system_columns").is_none_or(|value| value != "false");
        let system = parquet::system_fields().into_iter().filter(|_| with_system).map(Arc::new);
        let fields: Vec<_> = spec.schema.fields().iter().cloned().chain(system).collect();
        let schema = Schema::new(fields);
        let invalid = |error: &DeltaError| {
            Error::invalid("invalid_table", format!("table {name} cannot be made: {error}"))
        };
        let stored = delta::as_stored(&schema).map_err(|error| invalid(&error))?;
        let directory = self.directory(name);
        let looked = |exists: Result<bool, DeltaError>| {
            exists.map_err(|error| match never_passes(&error) {
                true => not_made(name, &error),
                false => storage("look for the table", &error),
            })
        };
        let mut open = self.slot(name).await;
        if !looked(self.shared.delta.exists(&directory).await)? {
            let created = self.shared.delta.create(&directory, &schema, &spec).await;
            // Another pod may have made it meanwhile; here nobody can, with its slot taken.
            if let Err(error) = created
                && !looked(self.shared.delta.exists(&directory).await)?
            {
                self.clear(&open, name);
                return Err(match error {
                    _ if never_passes(&error) => not_made(name, &error),
                    DeltaError::Store(_) | DeltaError::NotMade(_) => {
                        storage(&format!("make table {name}"), &error)
                    }
                    _ => invalid(&error),
                });
            }
            // Whoever still holds the one that was there before finds out at its next commit.
            *open = None;
        }
        let table = self.open_in(&mut open, name).await?;
        drop(open);
        table.register().await.map_err(home_error)?;
        match difference(&table.home.view().version.shape, &stored, &spec) {
            None => Ok(Table::new(&table)),
            Some(difference) => {
                let what = format!("table {name} is there with another spec: {difference}");
                Err(Error::invalid("table_exists", what))
            }
        }
    }

    /// Notes of logs that hold nothing any more, of all pods that keep their tables here.
    pub fn drained_logs(&self) -> DrainedLogs {
        DrainedLogs::new(Arc::clone(&self.shared.store), &self.shared.root)
    }

    /// Where a table of this name is, or would be.
    pub fn place(&self, name: &TableName) -> (Arc<dyn ObjectStore>, Path) {
        (Arc::clone(&self.shared.store), self.directory(name))
    }

    /// Which pods the logs on disks are, or were, of.
    pub fn owners(&self) -> Owners {
        Owners::new(Arc::clone(&self.shared.store), &self.shared.root)
    }

    /// That the store is there at all: one that is not mounted looks as if every table had been dropped.
    ///
    /// # Errors
    /// Unavailable where it is not.
    pub async fn check_storage(&self) -> Result<(), Error> {
        let identity = self.shared.root.clone().join("_sluice").join("identity");
        let head = self.shared.store.head(&identity).await;
        head.map(drop).map_err(|error| storage("see that the tables' store is there", &error))
    }

    /// Names of all tables, sorted.
    ///
    /// # Errors
    /// Where storage cannot be listed.
    pub async fn list(&self) -> Result<Vec<TableName>, Error> {
        let mut level = vec![self.shared.root.clone()];
        for _ in 0..3 {
            let mut below = Vec::new();
            for directory in level {
                let listed = self.shared.store.list_with_delimiter(Some(&directory)).await;
                let listed = listed.map_err(|error| storage("list the tables", &error))?.common_prefixes;
                // Beside the tables are the logs: no catalog.
                below.extend(listed.into_iter().filter(|path| path.filename() != Some("_sluice")));
            }
            level = below;
        }
        let mut names = Vec::new();
        for directory in level {
            let mut log = self.shared.store.list(Some(&directory.clone().join("_delta_log")));
            let is_table = log.next().await.is_some_and(|meta| meta.is_ok());
            let name = directory
                .prefix_match(&self.shared.root)
                .map(|parts| parts.map(|part| part.as_ref().to_owned()).collect::<Vec<_>>().join("."));
            names.extend(name.filter(|_| is_table).and_then(|name| name.parse::<TableName>().ok()));
        }
        names.sort();
        Ok(names)
    }

    /// What there is to know of a table, for people.
    ///
    /// # Errors
    /// As `open`.
    pub async fn describe(&self, name: &TableName) -> Result<serde_json::Value, Error> {
        let table = self.look(name).await?;
        let view = table.home.reload().await.map_err(home_error)?;
        let totals = self.shared.delta.totals(&view.version).await;
        let totals = totals.map_err(|error| storage("count the table's rows", &error))?;
        let shape = &view.version.shape;
        let counts = &table.counts;
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let (stranded, gone) = self.shared.stranded.count(name, None);
        Ok(serde_json::json!({
            "table": name,
            "id": shape.id,
            "version": view.version.number(),
            "location": format!("{}/{}", self.shared.base, self.directory(name)),
            "spec": spec_json(shape),
            "rows": totals.rows,
            "files": totals.files,
            "bytes": totals.bytes,
            "streams": view.map.streams().len(),
            "held_runs": count(&counts.held_runs),
            "set_aside_records": count(&counts.set_aside),
            "stranded_entries": stranded + gone,
            "failing": table.failing(),
            "lag_ms": u64::try_from(table.lag().as_millis()).unwrap_or(u64::MAX),
        }))
    }

    /// Takes a batch from the old life's log. What is in the table already is dropped by the prefix rule; a batch
    /// whose table is gone, or was made anew, stays in the log and is named in an error.
    pub async fn replay(&self, durable: Durable, batch: Batch) {
        self.take(durable, batch, true).await;
    }

    /// Takes a batch from a log that was taken over, as `replay` does: but its streams may be open here already.
    pub async fn adopt(&self, durable: Durable, batch: Batch) {
        self.take(durable, batch, false).await;
    }

    async fn take(&self, durable: Durable, batch: Batch, is_at_start: bool) {
        let name = batch.table.clone();
        let error = loop {
            match self.open(&name).await {
                Ok(table) if *table.id() == batch.table_id => {
                    if is_at_start {
                        table.open.replaying(&batch);
                    }
                    return table.offer(durable, Arc::new(batch));
                }
                Ok(table) => {
                    let (new, old) = (&table.id().0, &batch.table_id.0);
                    break Error::not_found(
                        "table_replaced",
                        format!("table id {old} is gone, {new} is there"),
                    );
                }
                Err(error) if error.kind == ErrorKind::Unavailable && !self.shared.scope.is_draining() => {
                    tracing::warn!(table = %name, %error, "replay waits for the table");
                    tokio::time::sleep(REPLAY_PAUSE).await;
                }
                Err(error) => break error,
            }
        };
        let runs: Vec<_> = batch.runs.iter().map(|run| (&run.stream, run.offsets)).collect();
        let wal_position = durable.position();
        let is_first = self.shared.stranded.add(&name, batch.table_id.clone(), durable);
        if is_first {
            tracing::error!(table = %name, %wal_position, ?runs, %error,
                "a batch without its table stays in the log, until `sluice release --table` gives it up; further ones of \
                 the table are told of at `debug`");
        } else {
            tracing::debug!(table = %name, %wal_position, ?runs, %error, "a batch without its table stays in the log");
        }
    }

    /// Resolves when all that was offered is committed. Held runs are logged by stream and offsets.
    pub async fn drain(&self) {
        let slots: Vec<Slot> = self.open_slots().values().cloned().collect();
        let mut tables = Vec::new();
        for slot in slots {
            tables.extend(slot.lock().await.clone());
        }
        futures_util::future::join_all(tables.iter().map(|table| table.drain())).await;
    }

    /// Log entries that stay there because their tables are not written any more, of all tables.
    pub fn stranded(&self) -> u64 {
        self.shared.stranded.total()
    }

    /// What is durable here and in no table, of the one of this name or of all. `settled`: what may be committed is so by
    /// then. Of none that is not open here: there is nothing of it.
    pub async fn holdings(&self, name: Option<&TableName>, settled: bool) -> Vec<Holding> {
        let slots: Vec<(TableName, Slot)> = {
            let open = self.open_slots();
            let is_asked = |(of, _): &(&TableName, &Slot)| name.is_none_or(|name| name == *of);
            open.iter().filter(is_asked).map(|(of, slot)| (of.clone(), Arc::clone(slot))).collect()
        };
        let mut tables = Vec::new();
        for (_, slot) in &slots {
            tables.extend(slot.lock().await.clone());
        }
        if settled {
            // What was acked by now is offered to its table by then. A log that is full, perhaps by what is held, does not
            // settle: nothing is acked then.
            let _ = tokio::time::timeout(SETTLE_MAX, self.shared.wal.settled()).await;
            futures_util::future::join_all(tables.iter().map(|table| table.drain())).await;
        }
        let mut holdings: Vec<Holding> = tables.iter().map(|table| table.holding()).collect();
        let is_asked = |of: &TableName| name.is_none_or(|name| name == of);
        let gone = self.shared.stranded.names().into_iter().filter(is_asked);
        let gone: Vec<_> = gone.filter(|of| holdings.iter().all(|there| there.table != *of)).collect();
        holdings.extend(gone.into_iter().map(|table| {
            let (_, gone) = self.shared.stranded.count(&table, None);
            Holding { table, id: TableId("".into()), held: Vec::new(), stranded: 0, gone, lag_ms: 0 }
        }));
        holdings
    }

    /// Names the records of entries whose table is gone; in earnest, their log lets go of them. Those of the table `kept`
    /// stay.
    ///
    /// # Errors
    /// Unavailable where an entry cannot be read back.
    pub async fn drop_stranded(
        &self,
        name: &TableName,
        kept: Option<&TableId>,
        in_earnest: bool,
    ) -> Result<Vec<StrandedRange>, Error> {
        let shared = &self.shared;
        let given_up = shared.stranded.give_up(&shared.wal, name, kept, in_earnest).await;
        let given_up =
            given_up.map_err(|error| storage(&format!("read what the log has of table {name}"), &error))?;
        for StrandedRange { table: id, stream, session, offsets } in given_up.iter().filter(|_| in_earnest) {
            let (session, first, last) = (session.0, offsets.start, offsets.end.saturating_sub(1));
            tracing::warn!(table = %name, table_id = %id.0, %stream, session, first, last,
                "records of a table that is gone, given up by an operator");
        }
        Ok(given_up)
    }

    /// How many tables have records that are durable and not committed, and for how long the oldest has been so.
    pub fn unfinished(&self) -> (usize, Duration) {
        let slots: Vec<Slot> = self.open_slots().values().cloned().collect();
        // One that is just being opened has none.
        let lags = slots.iter().filter_map(|slot| Some(slot.try_lock().ok()?.as_ref()?.lag()));
        let lags: Vec<Duration> = lags.filter(|lag| !lag.is_zero()).collect();
        (lags.len(), lags.into_iter().max().unwrap_or_default())
    }

    /// Runs of all tables that wait for their predecessors.
    pub fn held_runs(&self) -> u64 {
        let slots: Vec<Slot> = self.open_slots().values().cloned().collect();
        let held = slots.iter().filter_map(|slot| {
            Some(slot.try_lock().ok()?.as_ref()?.counts.held_runs.load(Ordering::Relaxed))
        });
        held.sum()
    }

    /// Bytes that waiting batches hold in memory.
    pub fn memory_bytes(&self) -> u64 {
        self.shared.budget.used()
    }
}

/// How a table differs from a spec, in words.
fn difference(shape: &Shape, wanted: &Schema, spec: &TableSpec) -> Option<String> {
    for field in wanted.fields() {
        match shape.schema.field_with_name(field.name()) {
            Err(_) => return Some(format!("it has no column `{}`", field.name())),
            Ok(there) if there != field.as_ref() => {
                return Some(format!("its column {}, not {}", column_text(there), column_text(field)));
            }
            Ok(_) => {}
        }
    }
    let more = shape.schema.fields().iter().find(|field| wanted.field_with_name(field.name()).is_err());
    if let Some(field) = more {
        return Some(format!("it also has the column {}", column_text(field)));
    }
    if shape.schema.fields() != wanted.fields() {
        return Some("its columns are in another order".to_owned());
    }
    if shape.partition_columns != spec.partition_columns {
        let (there, wanted) = (&shape.partition_columns, &spec.partition_columns);
        return Some(format!("it is partitioned by {there:?}, not {wanted:?}"));
    }
    let own = |properties: &BTreeMap<String, String>| -> BTreeMap<String, String> {
        // What Delta does not store, and what it adds by itself.
        let is_stored = |key: &str| {
            !key.starts_with("delta.feature.") && !key.starts_with("delta.rowTracking.materialized")
        };
        properties.iter().filter(|(key, _)| is_stored(key)).map(|(k, v)| (k.clone(), v.clone())).collect()
    };
    let (there, wanted) = (own(&shape.properties), own(&spec.properties));
    (there != wanted).then(|| format!("its properties are {there:?}, not {wanted:?}"))
}

fn column_text(field: &Field) -> String {
    let nullable = if field.is_nullable() { "" } else { " not null" };
    format!("`{}` is {}{nullable}", field.name(), field.data_type())
}

fn spec_json(shape: &Shape) -> serde_json::Value {
    let spec = TableSpec {
        schema: parquet::producers_schema(&shape.schema),
        partition_columns: shape.partition_columns.clone(),
        properties: shape.properties.clone(),
    };
    spec.to_json()
}

impl Table {
    fn new(open: &Arc<OpenTable>) -> Self {
        let view = open.home.view();
        let shape = &view.version.shape;
        Self {
            open: Arc::clone(open),
            id: shape.id.clone(),
            schema: parquet::producers_schema(&shape.schema),
            schema_id: SchemaId(shape.version),
        }
    }

    /// Its name.
    pub fn name(&self) -> &TableName {
        &self.open.name
    }

    /// Its identity.
    pub fn id(&self) -> &TableId {
        &self.id
    }

    /// The producers' columns.
    pub fn schema(&self) -> &SchemaRef {
        &self.schema
    }

    /// Which schema that is.
    pub fn schema_id(&self) -> SchemaId {
        self.schema_id
    }

    /// Whether records that do not fit are kept beside it.
    pub fn quarantines(&self) -> bool {
        let properties = &self.open.home.view().version.shape.properties;
        properties.get(ON_INVALID).is_some_and(|value| value == QUARANTINE)
    }

    /// Takes a durable batch. Never blocks; callable from any thread.
    pub fn offer(&self, durable: Durable, batch: Arc<Batch>) {
        self.open.offer(durable, batch);
    }

    /// Tells `progress` how far the stream is committed, at once and from now on.
    pub fn follow(&self, stream: &StreamId, progress: Arc<StreamProgress>) {
        self.open.follow(stream, progress);
    }

    /// Ends `follow`. `ended`: the stream will send no more, and all of it before that offset is in the log. A later
    /// commit takes it out of the map (`ended`), unless another log than this pod's may have runs of the table.
    pub fn unfollow(&self, stream: &StreamId, ended: Option<u64>) {
        self.open.unfollow(stream, ended);
    }

    /// What waits is flushed now, not when its time has come.
    pub fn hurry(&self) {
        self.open.hurry();
    }

    /// What the table has of the stream, freshly read from it.
    ///
    /// # Errors
    /// Where the table cannot be read.
    pub async fn watermark(&self, stream: &StreamId) -> Result<Reach, Error> {
        let view = self.open.home.reload().await.map_err(home_error)?;
        let reach = |mark: &watermark::Mark| Reach { next: mark.next, boundary: mark.boundary };
        Ok(view.map.mark(stream).map(reach).unwrap_or_default())
    }

    /// Where the table is stored, and its prefix there.
    pub fn store(&self) -> (Arc<dyn ObjectStore>, Path) {
        let config = &self.open.home_config;
        (Arc::clone(&config.store), config.directory.clone())
    }
}
