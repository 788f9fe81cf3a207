//! Records that may not enter their table: they are set aside, by name, in `<table>__rejected`. So are those that were
//! refused, where the table keeps them (`sluice.on_invalid = quarantine`), and those that an operator gave up (`give_up`).
//!
//! *Owns*: that table's columns, the form of a record there, how it is appended to.
//! *Does not own*: which records are set aside (`watermark`, `parquet`).
//! A crash between setting aside and releasing the log brings a record of another session, or of other columns, here
//! twice, under one stream, session and offset; none ever vanishes. A refused record comes once.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use arrow::array::{ArrayRef, BinaryArray, Int64Array, RecordBatch, RecordBatchOptions, StringArray};
use arrow::datatypes::{DataType, Field, Schema};
use arrow::error::ArrowError;
use arrow::json::LineDelimitedWriter;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};
use sluice_shared::ids::{OffsetRange, SessionId, StreamId};
use sluice_shared::table::TableSpec;

use super::batch::{Batch, Reason, Refusal, Run};
use super::delta::{DataFile, Delta, DeltaError, Put};
use super::parquet::{EncodeError, encode_rows, run_slices};

/// What a table's name gets for its rejected records.
pub const SUFFIX: &str = "__rejected";
/// Why a record stands there that an operator has given up.
const RELEASED: &str = "released";
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
    records: Vec<Reject>,
}

#[derive(Debug)]
struct Reject {
    stream: StreamId,
    offset: u64,
    session: SessionId,
    reason: &'static str,
    /// Of a record that was refused, or given up.
    refused: Option<Reason>,
    /// As it was sent, where that is known.
    raw: Option<Box<[u8]>>,
    /// As JSON, or as it was sent where that is text.
    record: Option<String>,
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
        let run_of = &batch.runs[run];
        let (slices, row_offsets) = run_slices(batch, run, offsets);
        let mut records = Vec::new();
        for rows in slices {
            records.extend(as_json(&rows)?);
        }
        self.records.extend(row_offsets.into_iter().zip(records).map(|(offset, record)| Reject {
            stream: run_of.stream.clone(),
            offset,
            session: run_of.session,
            reason: cause.as_str(),
            refused: None,
            raw: None,
            record: Some(record),
        }));
        Ok(())
    }

    /// Takes a record that was refused, and is to be kept as it was sent.
    pub fn quarantine(&mut self, run: &Run, refusal: &Refusal, raw: &[u8]) {
        let is_text = |text: &&str| !text.contains(|c: char| c.is_control() && !c.is_ascii_whitespace());
        let record = std::str::from_utf8(raw).ok().filter(is_text).map(str::to_owned);
        self.records.push(Reject {
            stream: run.stream.clone(),
            offset: refusal.offset,
            session: run.session,
            reason: refusal.reason.code,
            refused: Some(refusal.reason.clone()),
            raw: Some(raw.into()),
            record,
        });
    }

    /// Takes offsets whose records are given up: nobody has them any more.
    pub fn release(&mut self, stream: &StreamId, session: SessionId, offsets: OffsetRange, why: &str) {
        let reason = Reason { code: RELEASED, column: None, message: why.to_owned() };
        self.records.extend((offsets.start..offsets.end).map(|offset| Reject {
            stream: stream.clone(),
            offset,
            session,
            reason: RELEASED,
            refused: Some(reason.clone()),
            raw: None,
            record: None,
        }));
    }

    /// How many.
    pub fn len(&self) -> usize {
        self.records.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.records.is_empty()
    }

    /// Up to which offset the streams' refused records are in the table once all of these are.
    fn reaches(&self) -> BTreeMap<String, i64> {
        let mut reaches = BTreeMap::new();
        for reject in self.records.iter().filter(|reject| reject.refused.is_some()) {
            let reach = reaches.entry(transaction(&reject.stream)).or_insert(0);
            *reach = as_number(reject.offset).max(*reach);
        }
        reaches
    }

    /// The rows with the columns that the table has: it can be older than some.
    fn rows(&self, reaches: &BTreeMap<String, i64>, columns: &Schema) -> Result<RecordBatch, ArrowError> {
        let is_there = |reject: &Reject| {
            let reach = reaches.get(&transaction(&reject.stream));
            reject.refused.is_some() && reach.is_some_and(|reach| as_number(reject.offset) <= *reach)
        };
        let records: Vec<&Reject> = self.records.iter().filter(|reject| !is_there(reject)).collect();
        let texts = |text: fn(&Reject) -> Option<&str>| -> ArrayRef {
            Arc::new(records.iter().map(|reject| text(reject)).collect::<StringArray>())
        };
        let numbers = |number: fn(&Reject) -> u64| -> ArrayRef {
            Arc::new(records.iter().map(|reject| as_number(number(reject))).collect::<Int64Array>())
        };
        let of = |column: &Arc<Field>| match column.name().as_str() {
            "_stream" => texts(|reject| Some(reject.stream.as_str())),
            "_offset" => numbers(|reject| reject.offset),
            "_session" => numbers(|reject| reject.session.0),
            "reason" => texts(|reject| Some(reject.reason)),
            "field" => texts(|reject| reject.refused.as_ref()?.column.as_deref()),
            "message" => texts(|reject| Some(&reject.refused.as_ref()?.message)),
            "record" => texts(|reject| reject.record.as_deref()),
            "raw" => {
                let raw = records.iter().map(|reject| reject.raw.as_deref());
                Arc::new(raw.collect::<BinaryArray>())
            }
            _ => arrow::array::new_null_array(column.data_type(), records.len()),
        };
        let options = RecordBatchOptions::new().with_row_count(Some(records.len()));
        let arrays = columns.fields().iter().map(of).collect();
        RecordBatch::try_new_with_options(Arc::new(columns.clone()), arrays, &options)
    }
}

/// The application transaction whose version is the offset up to which a stream's refused records are in the table: a
/// record that is offered once more, after a crash or by another pod, is there already.
fn transaction(stream: &StreamId) -> String {
    format!("sluice.rejected.{stream}")
}

fn as_number(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

fn schema() -> Schema {
    let field = |name, data_type| Field::new(name, data_type, true);
    Schema::new(vec![
        field("_stream", DataType::Utf8),
        field("_offset", DataType::Int64),
        field("_session", DataType::Int64),
        field("reason", DataType::Utf8),
        field("field", DataType::Utf8),
        field("message", DataType::Utf8),
        field("record", DataType::Utf8),
        field("raw", DataType::Binary),
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
    rejects: &Rejects,
) -> Result<(), RejectError> {
    if !delta.exists(directory).await? {
        let properties = BTreeMap::from([("sluice.system_columns".to_owned(), "false".to_owned())]);
        let spec = TableSpec { schema: Arc::new(schema()), partition_columns: Vec::new(), properties };
        // Another one may be faster.
        if let Err(error) = delta.create(directory, &schema(), &spec).await
            && !delta.exists(directory).await?
        {
            return Err(error.into());
        }
    }
    let mut version = delta.load(directory).await?;
    for tries in 1..=CONFLICTS_MAX {
        let reaches = rejects.reaches();
        let mut there = BTreeMap::new();
        for transaction in reaches.keys() {
            let reach = delta.reach(&version, transaction).await?;
            there.extend(reach.map(|reach| (transaction.clone(), reach)));
        }
        let rows = rejects.rows(&there, &version.shape.schema)?;
        if rows.num_rows() == 0 {
            return Ok(());
        }
        let files = write(store, &version.shape, &rows).await?;
        let farther =
            |(transaction, reach): &(String, i64)| there.get(transaction).is_none_or(|old| old < reach);
        let adds = files.iter().map(|file| file.add.clone()).collect();
        match delta.commit(&version, adds, reaches.into_iter().filter(farther).collect()).await {
            Put::Committed(_) => return Ok(()),
            // It may be in or not. The next try finds what is, where it is a refused record.
            Put::Unknown(error) => return Err(error.into()),
            Put::Conflict => {
                // No version can name them. What cannot be deleted is left to the sweep.
                for file in &files {
                    let _ = store.delete(&file.path).await;
                }
                let pause = Duration::from_millis(u64::from(tries));
                tokio::time::sleep(pause.mul_f64(rand::random::<f64>())).await;
                version = delta.refresh(&version).await?;
            }
        }
    }
    Err(RejectError::Contended)
}

async fn write(
    store: &Arc<dyn ObjectStore>,
    shape: &super::delta::Shape,
    rows: &RecordBatch,
) -> Result<Vec<DataFile>, RejectError> {
    let mut files = Vec::new();
    for mut encoded in encode_rows(shape, rows)? {
        let content = std::mem::take(&mut encoded.content);
        let bytes = content.content_length() as u64;
        store.put(&encoded.path, content).await?;
        files.push(encoded.into_file(bytes)?);
    }
    Ok(files)
}
