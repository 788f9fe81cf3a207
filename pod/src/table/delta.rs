//! Delta Lake: snapshots, commits, checkpoints. The only module that touches delta_kernel.
//!
//! *Owns*: the table's metadata as the pod sees it (`Shape`), one version of a table (`Version`), how a commit is
//! put and what its answer means, checkpoints and checksums.
//! *Does not own*: what is committed and what to do about a conflict (`home`), Parquet (`parquet`).
//! Keeps the local-disk half of P4: everything goes through one store that flushes file and directory.

pub mod live;

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use arrow::array::{Array, AsArray, RecordBatch};
use arrow::datatypes::{DataType, Schema, SchemaRef, TimeUnit};
use arrow::datatypes::{
    Date32Type, Decimal128Type, Float32Type, Float64Type, Int8Type, Int16Type, Int32Type, Int64Type,
    TimestampMicrosecondType,
};
use delta_kernel::committer::FileSystemCommitter;
use delta_kernel::engine::arrow_conversion::{TryFromArrow, TryIntoArrow};
use delta_kernel::engine::arrow_data::{ArrowEngineData, EngineDataArrowExt};
use delta_kernel::expressions::{DecimalData, Scalar};
use delta_kernel::schema::{DecimalType, StructType};
use delta_kernel::snapshot::{IncrementalReplay, Snapshot, SnapshotRef};
use delta_kernel::table_features::ColumnMappingMode;
use delta_kernel::transaction::create_table::create_table;
use delta_kernel::transaction::data_layout::DataLayout;
use delta_kernel::transaction::{BoundWriteContext, CommitResult, UpdateTableOperation, WriteState};
use delta_kernel::{FileMeta, KernelError};
use delta_kernel_default_engine::parquet::DataFileMetadata;
use delta_kernel_default_engine::stats::FileStatsAccumulator;
use delta_kernel_default_engine::{DefaultEngine, DefaultEngineBuilder, build_add_file_metadata};
use futures_util::StreamExt;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};
use sluice_shared::ids::{TableId, TableVersion};
use sluice_shared::table::TableSpec;

use super::directory;
use super::executor::Executor;
use crate::threads::Crew;

/// The application transaction that names a version's watermark map.
pub const TRANSACTION: &str = "sluice.watermarks";
/// What stands in `commitInfo.engineInfo`.
const ENGINE_INFO: &str = concat!("sluice/", env!("CARGO_PKG_VERSION"));
/// How often a refresh is tried again that met a listing with a hole.
const REFRESHES_MAX: u64 = 20;
/// With this property the map's number could be forgotten, and rows doubled.
const TRANSACTION_RETENTION: &str = "delta.setTransactionRetentionDuration";

/// Where a table is made in memory before it is made in earnest.
const REHEARSAL_URL: &str = "memory:///table/";

/// Each holds a thread while the store's own work, which it waits for, needs another one.
static KERNEL: Crew = Crew::of(KERNEL_CALLS_MAX);
const KERNEL_CALLS_MAX: usize = 64;

type Engine = DefaultEngine<Executor>;

/// Why Delta Lake could not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum DeltaError {
    /// There is no table.
    #[error("no Delta table at /{0}")]
    NotFound(Path),
    /// The table has what Sluice cannot write to.
    #[error("the table {0}")]
    Unsupported(String),
    /// The kernel refused, or storage failed.
    #[error("delta: {0}")]
    Kernel(KernelError),
    /// Storage failed.
    #[error("storage: {0}")]
    Store(#[from] object_store::Error),
    /// A table that can be has not been made: storage failed.
    #[error("storage: {0}")]
    NotMade(KernelError),
    /// The blocking task did not end well.
    #[error("delta task: {0}")]
    Task(#[from] tokio::task::JoinError),
}

impl From<KernelError> for DeltaError {
    fn from(error: KernelError) -> Self {
        match error {
            KernelError::Unsupported(what) => Self::Unsupported(format!("cannot be written to: {what}")),
            other => Self::Kernel(other),
        }
    }
}

/// What a table is, as long as its metadata stays the same.
pub struct Shape {
    /// The table's identity.
    pub id: TableId,
    /// All columns.
    pub schema: SchemaRef,
    /// The columns that stand in files: all but those that the table is partitioned by.
    pub file_schema: SchemaRef,
    /// Columns that the table is partitioned by, in order.
    pub partition_columns: Vec<String>,
    /// The metadata's properties.
    pub properties: BTreeMap<String, String>,
    /// The version from which this was first read.
    pub version: TableVersion,
    /// Tells shapes that differ apart, in all pods alike.
    pub fingerprint: u64,
    write: Arc<WriteState>,
}

impl Shape {
    /// Whether files made for one fit the other.
    pub fn is_same(&self, other: &Self) -> bool {
        self.id == other.id
            && self.schema == other.schema
            && self.partition_columns == other.partition_columns
            && self.properties == other.properties
    }

    /// Where a file with these partition values goes. `row` of `columns` has the values, in order.
    ///
    /// # Errors
    /// Where a value cannot be one.
    pub fn place(&self, columns: &[Arc<dyn Array>], row: usize) -> Result<Place, DeltaError> {
        let mut builder = self.write.write_context_builder();
        if !self.partition_columns.is_empty() {
            let values = self.partition_columns.iter().zip(columns);
            let values = values.map(|(name, column)| Ok((name.clone(), scalar(column, row)?)));
            builder = builder.with_partition_values(values.collect::<Result<HashMap<_, _>, DeltaError>>()?);
        }
        Ok(Place::new(builder.build()?))
    }
}

impl fmt::Debug for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shape").field("id", &self.id).field("version", &self.version).finish_non_exhaustive()
    }
}

/// A directory of the table, and what is known of the files in it.
pub struct Place {
    context: BoundWriteContext,
    /// Below the table's root, URL-encoded. Chosen once: the kernel can make up another one each time it is asked.
    directory: String,
    /// Whether its name tells the values of all partition columns.
    pub tells_values: bool,
}

impl Place {
    fn new(context: BoundWriteContext) -> Self {
        let (directory, root) = (context.write_dir(), context.table_root_dir().path());
        let below = directory.path().strip_prefix(root).expect("a directory of the table");
        let directory = directory::bounded(below).into_owned();
        Self { tells_values: directory::tells_values(&directory), context, directory }
    }

    /// Statistics of a file that goes here.
    pub fn stats(&self) -> FileStats {
        FileStats(FileStatsAccumulator::new(
            self.context.stats_columns(),
            self.context.physical_data_schema().as_ref(),
        ))
    }

    /// A new file's path in the store.
    ///
    /// # Errors
    /// Where the directory is no path.
    pub fn path(&self, name: &str) -> Result<Path, DeltaError> {
        let root = self.context.table_root_dir().path();
        let path = Path::from_url_path(format!("{root}{}{name}", self.directory));
        Ok(path.map_err(object_store::Error::from)?)
    }

    /// A file that has been written here.
    ///
    /// # Errors
    /// Where its statistics cannot be made.
    pub fn file(&self, name: &str, bytes: u64, stats: FileStats) -> Result<DataFile, DeltaError> {
        let url = self.context.table_root_dir().join(&format!("{}{name}", self.directory));
        let url = url.map_err(KernelError::from)?;
        let modified_ms = sluice_shared::lifecycle::now_us() / 1000;
        let Some(stats) = stats.0.finish()? else {
            return Err(KernelError::generic("a file without rows").into());
        };
        let metadata = DataFileMetadata::new(FileMeta::new(url, modified_ms, bytes), stats);
        let add = build_add_file_metadata(metadata, &self.context)?.try_into_record_batch()?;
        Ok(DataFile { add, path: self.path(name)?, bytes })
    }
}

/// Statistics of a file in the making.
pub struct FileStats(FileStatsAccumulator);

impl FileStats {
    /// Takes rows in.
    ///
    /// # Errors
    /// Where a column has no statistics that the table asks for.
    pub fn merge(&mut self, rows: &RecordBatch) -> Result<(), DeltaError> {
        Ok(self.0.merge(rows)?)
    }
}

/// A file that is written and may be committed.
#[derive(Debug, Clone)]
pub struct DataFile {
    /// What the log says of it.
    pub(super) add: RecordBatch,
    /// Where it is in the store.
    pub path: Path,
    /// Its size.
    pub bytes: u64,
}

/// One version of a table.
#[derive(Clone)]
pub struct Version {
    /// What the table is.
    pub shape: Arc<Shape>,
    /// Number of the watermark map, where there is one.
    pub map: Option<u64>,
    directory: Path,
    snapshot: SnapshotRef,
    /// What tells this version's log file from another of the same number, in a table made anew.
    tag: Tag,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Tag(Option<String>, u64, i64);

impl Version {
    /// Its number.
    pub fn number(&self) -> TableVersion {
        self.snapshot.version()
    }
}

impl fmt::Debug for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.directory, self.number())
    }
}

/// How a commit ended.
#[derive(Debug)]
pub enum Put {
    /// It is the table's newest version.
    Committed(Box<Version>),
    /// Another writer took the version: refresh.
    Conflict,
    /// It may be in or not: refresh, and look at the map's number.
    Unknown(DeltaError),
}

/// Counts for people.
#[derive(Debug, Clone, Copy, Default)]
pub struct Totals {
    /// Rows, as far as files have statistics.
    pub rows: u64,
    /// Live files.
    pub files: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// The way to Delta tables in one store.
#[derive(Clone)]
pub struct Delta {
    engine: Arc<Engine>,
    store: Arc<dyn ObjectStore>,
}

impl Delta {
    /// Must be called in a runtime.
    pub fn new(store: Arc<dyn ObjectStore>) -> Self {
        Self::with_kernel_on(Arc::clone(&store), store)
    }

    /// Where the kernel is to reach the same store by another way: on one thread it cannot wait for anything.
    pub fn with_kernel_on(kernels: Arc<dyn ObjectStore>, store: Arc<dyn ObjectStore>) -> Self {
        Self { engine: Arc::new(engine_on(kernels)), store }
    }

    /// Puts version 0, where nobody else has. Whether this call did it is not told: load and compare.
    ///
    /// # Errors
    /// Where the kernel refuses the spec, or storage fails.
    pub async fn create(
        &self,
        directory: &Path,
        schema: &Schema,
        spec: &TableSpec,
    ) -> Result<(), DeltaError> {
        let schema = Arc::new(StructType::try_from_arrow(schema).map_err(KernelError::from)?);
        let (engine, url, spec) = (Arc::clone(&self.engine), url(directory), spec.clone());
        let rehearsal = engine_on(Arc::new(InMemory::new()));
        let local = format!("/{directory}");
        let created = blocking(move || {
            // What the kernel refuses, or makes and cannot open, must not leave a directory behind.
            put_first(&rehearsal, REHEARSAL_URL, &schema, &spec)?;
            shape(&Snapshot::builder_for(REHEARSAL_URL).build(&rehearsal)?, &rehearsal)?;
            // The kernel wants a local table's directory to be there.
            make_directory(std::path::Path::new(&local))
                .map_err(|error| DeltaError::NotMade(error.into()))?;
            // The kernel has taken it once.
            put_first(&engine, &url, &schema, &spec).map_err(|error| match error {
                DeltaError::Kernel(error) => DeltaError::NotMade(error),
                other => other,
            })
        });
        created.await
    }

    /// Whether there is any Delta log.
    ///
    /// # Errors
    /// Where storage fails.
    pub async fn exists(&self, directory: &Path) -> Result<bool, DeltaError> {
        let log = directory.clone().join("_delta_log");
        Ok(self.store.list(Some(&log)).next().await.transpose()?.is_some())
    }

    /// The newest version, read anew.
    ///
    /// # Errors
    /// NotFound; Unsupported; where storage fails.
    pub async fn load(&self, directory: &Path) -> Result<Version, DeltaError> {
        if !self.exists(directory).await? {
            return Err(DeltaError::NotFound(directory.clone()));
        }
        let (engine, url) = (Arc::clone(&self.engine), url(directory));
        let snapshot = retried(|| {
            let (engine, url) = (Arc::clone(&engine), url.clone());
            move || {
                let builder = Snapshot::builder_for(url);
                Ok(builder.with_incremental_crc_replay(IncrementalReplay::Unlimited).build(&*engine)?)
            }
        });
        self.version(directory, snapshot.await?, None).await
    }

    /// The newest version. A table that was made anew is read anew.
    ///
    /// # Errors
    /// As `load`.
    pub async fn refresh(&self, version: &Version) -> Result<Version, DeltaError> {
        if self.tag(&version.directory, version.number()).await?.as_ref() != Some(&version.tag) {
            return self.load(&version.directory).await;
        }
        let (engine, old) = (Arc::clone(&self.engine), Arc::clone(&version.snapshot));
        let snapshot = retried(|| {
            let (engine, old) = (Arc::clone(&engine), Arc::clone(&old));
            move || {
                let builder = Snapshot::builder_from(old);
                Ok(builder.with_incremental_crc_replay(IncrementalReplay::Unlimited).build(&*engine)?)
            }
        });
        self.version(&version.directory, snapshot.await?, Some(version)).await
    }

    /// The version of an application transaction, where there is one: reads the log.
    ///
    /// # Errors
    /// Where storage fails.
    pub async fn reach(&self, version: &Version, transaction: &str) -> Result<Option<i64>, DeltaError> {
        let (engine, snapshot) = (Arc::clone(&self.engine), Arc::clone(&version.snapshot));
        let transaction = transaction.to_owned();
        blocking(move || Ok(snapshot.get_app_id_version(&transaction, &*engine)?)).await
    }

    /// Puts a version after `base`: what `adds` say of files, and application transactions with their versions.
    pub async fn commit(
        &self,
        base: &Version,
        adds: Vec<RecordBatch>,
        transactions: Vec<(String, i64)>,
    ) -> Put {
        // A put into the log of a table that is gone would make a table with a hole in its log.
        match self.tag(&base.directory, base.number()).await {
            Ok(tag) if tag.as_ref() == Some(&base.tag) => {}
            Ok(_) => return Put::Conflict,
            Err(error) => return Put::Unknown(error),
        }
        let (engine, snapshot) = (Arc::clone(&self.engine), Arc::clone(&base.snapshot));
        let put = blocking(move || {
            let mut builder = snapshot.update_table(UpdateTableOperation::StreamingUpdate, ENGINE_INFO, true);
            for (transaction, version) in transactions {
                builder = builder.with_transaction_id(transaction, version);
            }
            if !adds.is_empty() {
                builder = builder.with_blind_append();
            }
            let mut transaction = builder.build(&*engine, Box::new(FileSystemCommitter::new()))?;
            for add in adds {
                transaction.add_files(Box::new(ArrowEngineData::new(add)));
            }
            Ok(match transaction.commit(&*engine)? {
                CommitResult::Committed(committed) => committed.post_commit_snapshot().cloned(),
                CommitResult::Conflicted(_) => None,
                CommitResult::Retryable(retryable) => return Err(retryable.error.into()),
            })
        });
        match put.await {
            Ok(Some(snapshot)) => match self.version(&base.directory, snapshot, Some(base)).await {
                Ok(version) => Put::Committed(Box::new(version)),
                Err(error) => Put::Unknown(error),
            },
            Ok(None) => Put::Conflict,
            Err(error) => Put::Unknown(error),
        }
    }

    /// Writes a checkpoint and a checksum of this version.
    ///
    /// # Errors
    /// Where storage fails.
    pub async fn checkpoint(&self, version: &Version) -> Result<Version, DeltaError> {
        let (engine, snapshot) = (Arc::clone(&self.engine), Arc::clone(&version.snapshot));
        let snapshot = blocking(move || {
            let (_, snapshot) = snapshot.checkpoint(&*engine, None)?;
            Ok(snapshot.write_checksum(&*engine)?.1)
        });
        Ok(Version { snapshot: snapshot.await?, ..version.clone() })
    }

    /// Counts over all live files: reads the log.
    ///
    /// # Errors
    /// Where storage fails.
    pub async fn totals(&self, version: &Version) -> Result<Totals, DeltaError> {
        let (engine, snapshot) = (Arc::clone(&self.engine), Arc::clone(&version.snapshot));
        let counted = blocking(move || {
            let mut totals = Totals::default();
            for scanned in snapshot.scan_builder().build()?.scan_metadata(&*engine)? {
                totals = scanned?.visit_scan_files(totals, |totals, file| {
                    totals.files += 1;
                    totals.bytes += u64::try_from(file.size).unwrap_or(0);
                    totals.rows += file.stats.map_or(0, |stats| stats.num_records);
                })?;
            }
            Ok(totals)
        });
        counted.await
    }

    async fn version(
        &self,
        directory: &Path,
        snapshot: SnapshotRef,
        last: Option<&Version>,
    ) -> Result<Version, DeltaError> {
        let number = snapshot.version();
        let tag = self.tag(directory, number).await?;
        let tag = tag.ok_or_else(|| DeltaError::NotFound(directory.clone()))?;
        let (engine, directory) = (Arc::clone(&self.engine), directory.clone());
        let last = last.map(|version| Arc::clone(&version.shape));
        blocking(move || {
            let map = snapshot.get_app_id_version(TRANSACTION, &*engine)?;
            let shape = shape(&snapshot, &engine)?;
            let shape = last.filter(|last| last.is_same(&shape)).unwrap_or_else(|| Arc::new(shape));
            Ok(Version { shape, map: map.and_then(|map| map.try_into().ok()), directory, snapshot, tag })
        })
        .await
    }

    /// None where there is no such version. A store that fails is not taken for that: it would stop the table.
    async fn tag(&self, directory: &Path, version: TableVersion) -> Result<Option<Tag>, DeltaError> {
        let log = directory.clone().join("_delta_log").join(format!("{version:020}.json"));
        match self.store.head(&log).await {
            Ok(meta) => Ok(Some(Tag(meta.e_tag, meta.size, meta.last_modified.timestamp_micros()))),
            Err(object_store::Error::NotFound { .. }) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }
}

fn engine_on(store: Arc<dyn ObjectStore>) -> Engine {
    DefaultEngineBuilder::new(store).with_task_executor(Arc::new(Executor::here())).build()
}

/// Puts a table's version 0, where nobody else has.
fn put_first(
    engine: &Engine,
    url: &str,
    schema: &Arc<StructType>,
    spec: &TableSpec,
) -> Result<(), DeltaError> {
    let mut builder = create_table(url, Arc::clone(schema), ENGINE_INFO, false)
        .with_table_properties(spec.properties.clone());
    if !spec.partition_columns.is_empty() {
        builder = builder.with_data_layout(DataLayout::partitioned(spec.partition_columns.clone()));
    }
    let transaction = builder.build(engine, Box::new(FileSystemCommitter::new()))?;
    if let CommitResult::Committed(committed) = transaction.commit(engine)?
        && let Some(snapshot) = committed.post_commit_snapshot()
    {
        // Without it every snapshot reads the whole log.
        snapshot.write_checksum(engine)?;
    }
    Ok(())
}

/// A schema as a Delta table of it reads back.
///
/// # Errors
/// Where a column's type has no place in Delta Lake.
pub fn as_stored(schema: &Schema) -> Result<SchemaRef, DeltaError> {
    let schema = StructType::try_from_arrow(schema).map_err(KernelError::from)?;
    arrow_schema(&schema)
}

/// Field metadata of other writers is of no use here, and would make equal schemas differ.
fn arrow_schema(schema: &StructType) -> Result<SchemaRef, DeltaError> {
    let schema: Schema = schema.try_into_arrow().map_err(KernelError::from)?;
    let fields = schema.fields().iter().map(|field| field.as_ref().clone().with_metadata(HashMap::new()));
    Ok(Arc::new(Schema::new(fields.collect::<Vec<_>>())))
}

/// Makes a directory that survives a power loss: each new one is flushed in its parent.
pub(super) fn make_directory(path: &std::path::Path) -> std::io::Result<()> {
    if path.as_os_str().is_empty() || path.is_dir() {
        return Ok(());
    }
    let parent = path.parent().unwrap_or(std::path::Path::new("/"));
    make_directory(parent)?;
    match std::fs::create_dir(path) {
        Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    let parent = if parent.as_os_str().is_empty() { std::path::Path::new(".") } else { parent };
    std::fs::File::open(parent)?.sync_all()
}

fn url(directory: &Path) -> String {
    format!("file:///{directory}/")
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, DeltaError> + Send + 'static,
) -> Result<T, DeltaError> {
    KERNEL.begin(work).await.await?
}

/// A listing of a local directory can show version n + 1 without n: it is whole the next time.
async fn retried<T: Send + 'static, W>(work: impl Fn() -> W) -> Result<T, DeltaError>
where
    W: FnOnce() -> Result<T, DeltaError> + Send + 'static,
{
    let mut tries = 0;
    loop {
        match blocking(work()).await {
            Err(DeltaError::Kernel(KernelError::MissingVersion(_))) if tries < REFRESHES_MAX => {
                tries += 1;
                tokio::time::sleep(Duration::from_millis(1 + tries)).await;
            }
            done => return done,
        }
    }
}

fn shape(snapshot: &SnapshotRef, engine: &Engine) -> Result<Shape, DeltaError> {
    let configuration = snapshot.table_configuration();
    let properties: BTreeMap<_, _> = snapshot.metadata_configuration().clone().into_iter().collect();
    if configuration.column_mapping_mode() != ColumnMappingMode::None {
        return Err(DeltaError::Unsupported("maps its columns (delta.columnMapping.mode): not yet".into()));
    }
    if properties.contains_key(TRANSACTION_RETENTION) {
        let why = "it lets the table forget what is committed; unset it";
        return Err(DeltaError::Unsupported(format!("has {TRANSACTION_RETENTION}: {why}")));
    }
    let transaction = Arc::clone(snapshot)
        .update_table(UpdateTableOperation::StreamingUpdate, ENGINE_INFO, true)
        .build(engine, Box::new(FileSystemCommitter::new()))?;
    let schema = arrow_schema(&snapshot.schema())?;
    let partition_columns = transaction.logical_partition_columns().to_vec();
    let in_file = |name: &String| !partition_columns.contains(name);
    let file_fields = schema.fields().iter().filter(|field| in_file(field.name())).cloned();
    let file_schema = Arc::new(Schema::new(file_fields.collect::<Vec<_>>()));
    Ok(Shape {
        id: TableId(configuration.metadata().id().into()),
        fingerprint: fingerprint(&schema, &partition_columns, &properties),
        schema,
        file_schema,
        partition_columns,
        properties,
        version: snapshot.version(),
        write: transaction.write_state()?,
    })
}

/// FNV-1a over what `Shape::is_same` compares. Pods of releases that put it differently into words each commit for
/// themselves.
fn fingerprint(schema: &Schema, partition_columns: &[String], properties: &BTreeMap<String, String>) -> u64 {
    let fields = schema.fields().iter();
    let mut words: Vec<String> = fields
        .map(|field| format!("{}\n{}\n{}", field.name(), field.data_type(), field.is_nullable()))
        .collect();
    words.extend(partition_columns.iter().map(|column| format!("by\n{column}")));
    words.extend(properties.iter().map(|(key, value)| format!("{key}\n{value}")));
    words.join("\n\n").bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

fn scalar(column: &Arc<dyn Array>, row: usize) -> Result<Scalar, DeltaError> {
    let data_type = column.data_type();
    if column.is_null(row) {
        let data_type = delta_kernel::schema::DataType::try_from_arrow(data_type);
        return Ok(Scalar::Null(data_type.map_err(KernelError::from)?));
    }
    Ok(match data_type {
        DataType::Boolean => Scalar::Boolean(column.as_boolean().value(row)),
        DataType::Int8 => Scalar::Byte(column.as_primitive::<Int8Type>().value(row)),
        DataType::Int16 => Scalar::Short(column.as_primitive::<Int16Type>().value(row)),
        DataType::Int32 => Scalar::Integer(column.as_primitive::<Int32Type>().value(row)),
        DataType::Int64 => Scalar::Long(column.as_primitive::<Int64Type>().value(row)),
        DataType::Float32 => Scalar::Float(column.as_primitive::<Float32Type>().value(row)),
        DataType::Float64 => Scalar::Double(column.as_primitive::<Float64Type>().value(row)),
        DataType::Utf8 => Scalar::String(column.as_string::<i32>().value(row).to_owned()),
        DataType::Binary => Scalar::Binary(column.as_binary::<i32>().value(row).to_vec()),
        DataType::Date32 => Scalar::Date(column.as_primitive::<Date32Type>().value(row)),
        DataType::Timestamp(TimeUnit::Microsecond, zone) => {
            let at = column.as_primitive::<TimestampMicrosecondType>().value(row);
            if zone.is_some() { Scalar::Timestamp(at) } else { Scalar::TimestampNtz(at) }
        }
        DataType::Decimal128(precision, scale) => {
            let value = column.as_primitive::<Decimal128Type>().value(row);
            let scale = u8::try_from(*scale).map_err(|_| KernelError::generic("negative scale"))?;
            Scalar::Decimal(DecimalData::try_new(value, DecimalType::try_new(*precision, scale)?)?)
        }
        other => {
            return Err(DeltaError::Unsupported(format!("is partitioned by a column of type {other}")));
        }
    })
}

#[cfg(test)]
mod tests;
