//! Records that may not enter their table: they are set aside, by name, in `<table>__rejected`.
//!
//! *Owns*: that table's columns, the form of a record there, how it is appended to.
//! *Does not own*: which records are set aside (`watermark`, `parquet`).
//! A crash between setting aside and releasing the log brings a record here twice, under one stream, session
//! and offset; none ever vanishes.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use arrow::array::{Int64Array, RecordBatch, StringArray};
use arrow::datatypes::{DataType, Field, Schema};
use arrow::error::ArrowError;
use arrow::json::LineDelimitedWriter;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};
use sluice_shared::ids::{OffsetRange, StreamId};
use sluice_shared::table::TableSpec;

use super::batch::{Batch, Run};
use super::delta::{DataFile, Delta, DeltaError, Put, Version};
use super::parquet::{EncodeError, encode_rows, run_slices};

/// What a table's name gets for its rejected records.
pub const SUFFIX: &str = "__rejected";
/// Conflicts in a row before the caller has to come again.
const CONFLICTS_MAX: u32 = 100;

/// Why, as it stands in the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// Another session's records are, or will be, at these offsets.
    Fenced,
    /// The table's columns have changed so that the record no longer fits.
    SchemaChanged,
    /// No partition takes it: the value of a partition column has no text in Delta.
    BadPartitionValue,
}

impl Cause {
    /// As text.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Fenced => "fenced",
            Self::SchemaChanged => "schema_changed",
            Self::BadPartitionValue => "bad_partition_value",
        }
    }
}

/// Why records could not be set aside.
#[derive(Debug, thiserror::Error)]
pub enum RejectError {
    /// Delta's side.
    #[error(transparent)]
    Delta(#[from] DeltaError),
    /// Parquet's side.
    #[error(transparent)]
    Encode(#[from] EncodeError),
    /// A record has no form in JSON.
    #[error("record as JSON: {0}")]
    Arrow(#[from] ArrowError),
    /// Storage failed.
    #[error("storage: {0}")]
    Store(#[from] object_store::Error),
    /// Others commit without a pause.
    #[error("too many conflicts in a row")]
    Contended,
}

/// Records to be set aside.
#[derive(Debug, Default)]
pub struct Rejects {
    streams: Vec<StreamId>,
    offsets: Vec<i64>,
    sessions: Vec<i64>,
    causes: Vec<&'static str>,
    records: Vec<String>,
}

impl Rejects {
    /// Takes a run's records at `offsets`.
    ///
    /// # Errors
    /// Where a record has no form in JSON.
    pub fn add(
        &mut self,
        batch: &Batch,
        run: usize,
        offsets: OffsetRange,
        cause: Cause,
    ) -> Result<(), ArrowError> {
        let Run { stream, session, .. } = &batch.runs[run];
        let (slices, row_offsets) = run_slices(batch, run, offsets);
        for rows in slices {
            self.records.extend(as_json(&rows)?);
        }
        for offset in &row_offsets {
            self.streams.push(stream.clone());
            self.offsets.push(i64::try_from(*offset).unwrap_or(i64::MAX));
            self.sessions.push(i64::try_from(session.0).unwrap_or(i64::MAX));
            self.causes.push(cause.as_str());
        }
        Ok(())
    }

    /// How many.
    pub fn len(&self) -> usize {
        self.offsets.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.offsets.is_empty()
    }

    fn into_rows(self) -> Result<RecordBatch, ArrowError> {
        let streams = StringArray::from_iter_values(self.streams.iter().map(StreamId::as_str));
        RecordBatch::try_new(
            Arc::new(schema()),
            vec![
                Arc::new(streams),
                Arc::new(Int64Array::from(self.offsets)),
                Arc::new(Int64Array::from(self.sessions)),
                Arc::new(StringArray::from(self.causes)),
                Arc::new(StringArray::from(self.records)),
            ],
        )
    }
}

fn schema() -> Schema {
    let field = |name, data_type| Field::new(name, data_type, true);
    Schema::new(vec![
        field("_stream", DataType::Utf8),
        field("_offset", DataType::Int64),
        field("_session", DataType::Int64),
        field("reason", DataType::Utf8),
        field("record", DataType::Utf8),
    ])
}

fn as_json(rows: &RecordBatch) -> Result<Vec<String>, ArrowError> {
    if rows.num_rows() == 0 {
        return Ok(Vec::new());
    }
    let mut text = Vec::new();
    let mut writer = LineDelimitedWriter::new(&mut text);
    writer.write(rows)?;
    writer.finish()?;
    drop(writer);
    let text = String::from_utf8(text).map_err(|error| ArrowError::JsonError(error.to_string()))?;
    Ok(text.lines().map(str::to_owned).collect())
}

/// Appends records to the table in `directory`, which is made where it is missing.
///
/// # Errors
/// Where nothing was appended, or perhaps.
pub async fn append(
    delta: &Delta,
    store: &Arc<dyn ObjectStore>,
    directory: &Path,
    rejects: Rejects,
) -> Result<(), RejectError> {
    if !delta.exists(directory).await? {
        let properties = BTreeMap::from([("sluice.system_columns".to_owned(), "false".to_owned())]);
        let spec = TableSpec { schema: Arc::new(schema()), partition_columns: Vec::new(), properties };
        delta.create(directory, &schema(), &spec).await?;
    }
    let version = delta.load(directory).await?;
    let files = write(store, &version.shape, &rejects.into_rows()?).await?;
    let appended = commit(delta, version, &files).await;
    if !matches!(appended, Ok(()) | Err(Answer::Lost(_))) {
        // No version can name them. What cannot be deleted is left to the sweep.
        for file in &files {
            let _ = store.delete(&file.path).await;
        }
    }
    appended.map_err(|(Answer::Lost(error) | Answer::Not(error))| error)
}

/// Why a commit was not answered with a version.
enum Answer {
    /// It may be in or not.
    Lost(RejectError),
    /// It is not in.
    Not(RejectError),
}

async fn commit(delta: &Delta, mut version: Version, files: &[DataFile]) -> Result<(), Answer> {
    for tries in 1..=CONFLICTS_MAX {
        match delta.commit(&version, files, None).await {
            Put::Committed(_) => return Ok(()),
            Put::Unknown(error) => return Err(Answer::Lost(error.into())),
            Put::Conflict => {
                let pause = Duration::from_millis(u64::from(tries));
                tokio::time::sleep(pause.mul_f64(rand::random::<f64>())).await;
                version = delta.refresh(&version).await.map_err(|error| Answer::Not(error.into()))?;
            }
        }
    }
    Err(Answer::Not(RejectError::Contended))
}

async fn write(
    store: &Arc<dyn ObjectStore>,
    shape: &super::delta::Shape,
    rows: &RecordBatch,
) -> Result<Vec<DataFile>, RejectError> {
    let mut files = Vec::new();
    for mut encoded in encode_rows(shape, rows)? {
        let content = std::mem::take(&mut encoded.bytes);
        let bytes = content.len() as u64;
        store.put(&encoded.path, content.into()).await?;
        files.push(encoded.into_file(bytes)?);
    }
    Ok(files)
}
