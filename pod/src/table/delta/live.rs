//! Versions read back: which files are live in one, and columns of their rows. For checks: the service reads no rows.
//!
//! *Owns*: opening a version by its number, its files, reading them less what deletion vectors take out.
//! *Does not own*: what the rows should be (`verify`).

use std::sync::Arc;

use arrow::array::RecordBatch;
use delta_kernel::engine::arrow_data::EngineDataArrowExt;
use delta_kernel::scan::Scan;
use delta_kernel::scan::state::{ScanFile, transform_to_logical};
use delta_kernel::snapshot::{Snapshot, SnapshotRef};
use delta_kernel::{Engine as _, FileMeta, KernelError};
use futures_util::StreamExt;
use object_store::ObjectStore;
use object_store::path::Path;
use sluice_shared::ids::{TableId, TableVersion};

use super::{Delta, DeltaError, Engine, TRANSACTION, blocking, url};

/// One version of a table, to be read.
#[derive(Clone)]
pub struct Reading {
    snapshot: SnapshotRef,
    engine: Arc<Engine>,
    map: Option<u64>,
}

/// A file that is live in a version, and how it is read.
#[derive(Clone)]
pub struct LiveFile {
    file: ScanFile,
    scan: Arc<Scan>,
    engine: Arc<Engine>,
}

impl Delta {
    /// Opens a version: the newest where none is named.
    ///
    /// # Errors
    /// NotFound; where there is no such version any more, or storage fails.
    pub async fn read(&self, directory: &Path, number: Option<TableVersion>) -> Result<Reading, DeltaError> {
        if !self.exists(directory).await? {
            return Err(DeltaError::NotFound(directory.clone()));
        }
        let (engine, url) = (Arc::clone(&self.engine), url(directory));
        blocking(move || {
            let builder = Snapshot::builder_for(url);
            let builder = match number {
                Some(number) => builder.at_version(number),
                None => builder,
            };
            let snapshot = builder.build(&*engine)?;
            let map = snapshot.get_app_id_version(TRANSACTION, &*engine)?.and_then(|map| map.try_into().ok());
            Ok(Reading { snapshot, engine, map })
        })
        .await
    }

    /// The oldest version whose commit the log still has.
    ///
    /// # Errors
    /// Where the log cannot be listed.
    pub async fn oldest(&self, directory: &Path) -> Result<Option<TableVersion>, DeltaError> {
        let log = directory.clone().join("_delta_log");
        let mut listed = self.store.list(Some(&log));
        let mut oldest: Option<TableVersion> = None;
        while let Some(meta) = listed.next().await.transpose()? {
            let number = meta.location.filename().and_then(|name| name.strip_suffix(".json")?.parse().ok());
            oldest = oldest.into_iter().chain(number).min();
        }
        Ok(oldest)
    }
}

impl Reading {
    /// Its number.
    pub fn number(&self) -> TableVersion {
        self.snapshot.version()
    }

    /// Number of its watermark map, where there is one.
    pub fn map(&self) -> Option<u64> {
        self.map
    }

    /// The table's identity.
    pub fn table_id(&self) -> TableId {
        TableId(self.snapshot.table_configuration().metadata().id().into())
    }

    /// A property of the table.
    pub fn property(&self, name: &str) -> Option<&str> {
        self.snapshot.metadata_configuration().get(name).map(String::as_str)
    }

    /// Its files, of which these columns are to be read. None where the table lacks one of them.
    ///
    /// # Errors
    /// Where the log cannot be read.
    pub async fn files(&self, columns: &[&str]) -> Result<Option<Vec<LiveFile>>, DeltaError> {
        let schema = self.snapshot.schema();
        if columns.iter().any(|column| schema.field(column).is_none()) {
            return Ok(None);
        }
        let schema = schema.project(columns)?;
        let (engine, snapshot) = (Arc::clone(&self.engine), Arc::clone(&self.snapshot));
        blocking(move || {
            let scan = Arc::new(snapshot.scan_builder().with_schema(schema).build()?);
            let mut files = Vec::new();
            for scanned in scan.scan_metadata(&*engine)? {
                files = scanned?.visit_scan_files(files, |files, file| files.push(file))?;
            }
            let live = files.into_iter();
            let live =
                live.map(|file| LiveFile { file, scan: Arc::clone(&scan), engine: Arc::clone(&engine) });
            Ok(Some(live.collect()))
        })
        .await
    }
}

impl LiveFile {
    /// Tells it from other files, and from itself with fewer rows taken out.
    ///
    /// # Errors
    /// Where its deletion vector is garbled.
    pub fn key(&self) -> Result<(String, u64), DeltaError> {
        Ok((self.file.path.clone(), self.file.dv_info.cardinality()?.unwrap_or(0)))
    }

    /// Its rows, in their order.
    ///
    /// # Errors
    /// Where it is missing, cut or garbled.
    pub async fn rows(&self) -> Result<Vec<RecordBatch>, DeltaError> {
        let LiveFile { file, scan, engine } = self.clone();
        blocking(move || {
            let root = scan.snapshot().table_root();
            let location = root.join(&file.path).map_err(KernelError::from)?;
            let size =
                u64::try_from(file.size).map_err(|_| KernelError::generic("a file of negative size"))?;
            let meta = FileMeta { location, last_modified: file.modification_time, size };
            let mut left = file.dv_info.get_selection_vector(&*engine, root)?;
            let (physical, logical) = (scan.physical_schema(), scan.logical_schema());
            let read = engine.parquet_handler().read_parquet_files(&[meta], Arc::clone(physical), None)?;
            let mut batches = Vec::new();
            for batch in read {
                let batch =
                    transform_to_logical(&*engine, batch?, physical, logical, file.transform.clone())?;
                let rest = left.as_mut().map(|left| left.split_off(batch.len().min(left.len())));
                let selected = std::mem::replace(&mut left, rest);
                let batch = match selected {
                    Some(mut selected) => {
                        // What lies behind the vector's end was not taken out.
                        selected.resize(batch.len(), true);
                        batch.apply_selection_vector(selected)?
                    }
                    None => batch,
                };
                batches.push(batch.try_into_record_batch()?);
            }
            Ok(batches)
        })
        .await
    }
}
