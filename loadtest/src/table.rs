//! A second opinion on Delta tables: reads every version from the log's JSON files and the Parquet files themselves.
//!
//! It shares no code with the pod's writer, so that a mistake there is not made twice. Checkpoints are ignored: the
//! log must still have its first entry.
//!
//! *Owns*: the log's actions as far as rows depend on them, rows by file, in the file's order.
//! *Does not own*: the verdict (`auditor`).

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, bail, ensure};
use arrow::array::{Array, ArrayRef, AsArray, RecordBatch, RecordBatchOptions, StringArray};
use arrow::compute::cast;
use arrow::datatypes::{DataType, Field, Int64Type, Schema, UInt64Type};
use arrow::ipc::reader::StreamReader;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use serde::Deserialize;

use crate::workload::row_hashes;

/// A row by its place and its content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Row {
    /// Value of `_offset`.
    pub offset: u64,
    /// Of the producer's columns, by `workload::row_hashes`.
    pub hash: u64,
}

/// Rows of one stream that stand together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RowRun {
    /// Value of `_stream`.
    pub stream: String,
    /// In the file's order.
    pub rows: Vec<Row>,
}

/// Rows of one data file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileRows {
    /// As the log has it.
    pub path: String,
    /// In the file's order.
    pub runs: Vec<RowRun>,
}

impl FileRows {
    /// How many rows there are.
    pub fn rows(&self) -> u64 {
        self.runs.iter().map(|run| run.rows.len() as u64).sum()
    }
}

/// One version of a table.
#[derive(Debug, Clone)]
pub struct Version {
    /// Its number.
    pub version: u64,
    /// The files that make it up, in the order in which they came.
    pub files: Vec<Arc<FileRows>>,
    /// The watermark map that the version names: of each stream, one more than its highest offset.
    pub marks: Option<Arc<Marks>>,
}

/// Of each stream, one more than its highest offset, as the service has it.
pub type Marks = HashMap<String, u64>;

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Action {
    add: Option<Add>,
    remove: Option<Remove>,
    meta_data: Option<MetaData>,
    txn: Option<Transaction>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Transaction {
    app_id: String,
    version: u64,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Add {
    path: String,
    #[serde(default)]
    partition_values: BTreeMap<String, Option<String>>,
    stats: Option<String>,
    deletion_vector: Option<serde_json::Value>,
}

#[derive(Debug, Deserialize)]
struct Remove {
    path: String,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct MetaData {
    id: String,
    schema_string: String,
}

#[derive(Debug, Deserialize)]
struct Stats {
    #[serde(rename = "numRecords")]
    num_records: u64,
}

/// The application transaction whose version is the number of the watermark map.
const WATERMARKS: &str = "sluice.watermarks";

/// Type of each column whose type is a simple one, by the table's metadata.
type ColumnTypes = HashMap<String, String>;

/// Reads all versions of the table in `root`, first to last. Files are read once.
///
/// # Errors
/// No table, a log with a hole or without its beginning, a file that is missing or garbled, a row without stream
/// or offset, statistics that do not agree with their file, anything that this reader does not know.
pub fn read_versions(root: &Path) -> anyhow::Result<Vec<Version>> {
    let (mut types, mut table_id, mut marks) = (ColumnTypes::new(), String::new(), None);
    let mut live: Vec<Arc<FileRows>> = Vec::new();
    let mut versions = Vec::new();
    for (version, path) in log_files(root)?.into_iter().enumerate() {
        let context = || format!("table {}, version {version}", root.display());
        let (mut added, mut removed) = (Vec::new(), Vec::new());
        for action in read_actions(&path).with_context(context)? {
            if let Some(meta_data) = action.meta_data {
                types = column_types(&meta_data).with_context(context)?;
                table_id = meta_data.id;
            }
            if let Some(txn) = action.txn.filter(|txn| txn.app_id == WATERMARKS) {
                marks = Some(Arc::new(read_marks(root, &table_id, txn.version).with_context(context)?));
            }
            removed.extend(action.remove.map(|remove| remove.path));
            added.extend(action.add);
        }
        for path in &removed {
            let before = live.len();
            live.retain(|file| file.path != *path);
            ensure!(live.len() < before, "{}: removes {path:?}, which is not in the table", context());
        }
        for add in added {
            let is_new = live.iter().all(|file| file.path != add.path);
            ensure!(is_new, "{}: adds {:?}, which is in the table", context(), add.path);
            live.push(Arc::new(read_file(root, &add, &types).with_context(context)?));
        }
        versions.push(Version { version: version as u64, files: live.clone(), marks: marks.clone() });
    }
    Ok(versions)
}

/// How many rows the last version has, by its files' footers: cheap.
///
/// # Errors
/// As `read_versions`.
pub fn count_rows(root: &Path) -> anyhow::Result<u64> {
    live(root)?.iter().map(|add| Ok(parquet_rows(&open_parquet(root, &add.path)?))).sum()
}

/// As many as the log says: for a table whose data files are cleared away while it grows.
///
/// # Errors
/// A log that cannot be read; a file without a number of its records.
pub fn count_rows_told(root: &Path) -> anyhow::Result<u64> {
    let told = |add: &Add| -> anyhow::Result<u64> {
        let stats = add.stats.as_deref().with_context(|| format!("file {:?} has no statistics", add.path))?;
        Ok(serde_json::from_str::<Stats>(stats)?.num_records)
    };
    live(root)?.iter().map(told).sum()
}

/// The data files of the last version.
fn live(root: &Path) -> anyhow::Result<Vec<Add>> {
    let mut live: HashMap<String, Add> = HashMap::new();
    for path in log_files(root)? {
        for action in read_actions(&path)? {
            if let Some(remove) = action.remove {
                live.remove(&remove.path);
            }
            live.extend(action.add.map(|add| (add.path.clone(), add)));
        }
    }
    Ok(live.into_values().collect())
}

fn log_files(root: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let log = root.join("_delta_log");
    let entries = std::fs::read_dir(&log)
        .with_context(|| format!("{} is not readable: no Delta table there?", log.display()))?;
    let mut numbers = Vec::new();
    for entry in entries {
        let path = entry?.path();
        let is_commit = path.extension().is_some_and(|extension| extension == "json");
        let stem = path.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
        if is_commit && stem.len() == 20 {
            numbers.push((stem.parse::<u64>().with_context(|| path.display().to_string())?, path));
        }
    }
    numbers.sort();
    for (expected, (number, path)) in (0..).zip(&numbers) {
        ensure!(*number == expected, "{}: version {expected} is missing before it", path.display());
    }
    ensure!(!numbers.is_empty(), "{} has no version", log.display());
    Ok(numbers.into_iter().map(|(_, path)| path).collect())
}

fn read_actions(path: &Path) -> anyhow::Result<Vec<Action>> {
    let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
    let lines = text.lines().filter(|line| !line.trim().is_empty());
    let actions = lines.map(|line| {
        serde_json::from_str(line).with_context(|| format!("{}: no action: {line:.200}", path.display()))
    });
    actions.collect()
}

fn column_types(meta_data: &MetaData) -> anyhow::Result<ColumnTypes> {
    let schema: serde_json::Value = serde_json::from_str(&meta_data.schema_string).context("schemaString")?;
    let fields = schema["fields"].as_array().context("schemaString has no fields")?;
    let simple = fields.iter().filter_map(|field| Some((field["name"].as_str()?, field["type"].as_str()?)));
    Ok(simple.map(|(name, kind)| (name.to_owned(), kind.to_owned())).collect())
}

fn read_marks(root: &Path, table_id: &str, number: u64) -> anyhow::Result<Marks> {
    let path = root.join(format!("_sluice/watermarks/{table_id}/{number:020}.arrow"));
    let file = File::open(&path).with_context(|| format!("watermark map {}", path.display()))?;
    let mut marks = Marks::new();
    for batch in StreamReader::try_new(file, None)? {
        let batch = batch?;
        let column = |name: &str, kind: &DataType| -> anyhow::Result<ArrayRef> {
            let column = batch.column_by_name(name);
            Ok(cast(column.with_context(|| format!("{}: no column {name:?}", path.display()))?, kind)?)
        };
        let (streams, ends) = (column("stream", &DataType::Utf8)?, column("end", &DataType::UInt64)?);
        let ends = ends.as_primitive::<UInt64Type>().values();
        for (stream, end) in streams.as_string::<i32>().iter().zip(ends) {
            // A stream has one row for each of its sessions.
            let mark = marks.entry(stream.unwrap_or_default().to_owned()).or_default();
            *mark = (*mark).max(*end);
        }
    }
    Ok(marks)
}

fn open_parquet(root: &Path, path: &str) -> anyhow::Result<ParquetRecordBatchReaderBuilder<File>> {
    let path = root.join(percent_decoded(path)?);
    let file = File::open(&path).with_context(|| format!("data file {}", path.display()))?;
    ParquetRecordBatchReaderBuilder::try_new(file).with_context(|| format!("data file {}", path.display()))
}

fn parquet_rows(reader: &ParquetRecordBatchReaderBuilder<File>) -> u64 {
    u64::try_from(reader.metadata().file_metadata().num_rows()).unwrap_or(0)
}

fn read_file(root: &Path, add: &Add, types: &ColumnTypes) -> anyhow::Result<FileRows> {
    ensure!(add.deletion_vector.is_none(), "file {:?} has a deletion vector: not known here", add.path);
    let reader = open_parquet(root, &add.path)?;
    if let Some(stats) = &add.stats {
        let stats: Stats = serde_json::from_str(stats).with_context(|| format!("stats {stats:.200}"))?;
        let rows = parquet_rows(&reader);
        ensure!(
            stats.num_records == rows,
            "file {:?}: {rows} rows, stats say {}",
            add.path,
            stats.num_records
        );
    }
    let mut runs = Vec::new();
    for batch in reader.with_batch_size(8192).build()? {
        let batch = with_partition_columns(&batch?, add, types)?;
        append_rows(&batch, &mut runs).with_context(|| format!("file {:?}", add.path))?;
    }
    Ok(FileRows { path: add.path.clone(), runs })
}

/// The rows of a file that somebody else has read, partition columns and all.
///
/// # Errors
/// A row without stream or offset, a column of a type that is not known here.
pub fn runs_of(batches: &[RecordBatch]) -> anyhow::Result<Vec<RowRun>> {
    let mut runs = Vec::new();
    batches.iter().try_for_each(|batch| append_rows(batch, &mut runs))?;
    Ok(runs)
}

fn append_rows(batch: &RecordBatch, runs: &mut Vec<RowRun>) -> anyhow::Result<()> {
    let column = |name: &str, kind: &DataType| -> anyhow::Result<ArrayRef> {
        let column = batch.column_by_name(name).with_context(|| format!("no column {name:?}"))?;
        ensure!(column.null_count() == 0, "column {name:?} has nulls");
        Ok(cast(column, kind)?)
    };
    let (streams, offsets) = (column("_stream", &DataType::Utf8)?, column("_offset", &DataType::Int64)?);
    let (streams, offsets) = (streams.as_string::<i32>(), offsets.as_primitive::<Int64Type>());
    for (row, hash) in row_hashes(batch)?.into_iter().enumerate() {
        let offset = u64::try_from(offsets.value(row)).context("a negative offset")?;
        let stream = streams.value(row);
        if runs.last().is_none_or(|run| run.stream != stream) {
            runs.push(RowRun { stream: stream.to_owned(), rows: Vec::new() });
        }
        runs.last_mut().expect("just pushed").rows.push(Row { offset, hash });
    }
    Ok(())
}

/// Partition columns are not in the files: they are the same for all rows of one.
fn with_partition_columns(
    batch: &RecordBatch,
    add: &Add,
    types: &ColumnTypes,
) -> anyhow::Result<RecordBatch> {
    let mut fields: Vec<Arc<Field>> = batch.schema_ref().fields().iter().map(Arc::clone).collect();
    let mut columns = batch.columns().to_vec();
    for (name, value) in &add.partition_values {
        let kind =
            types.get(name).with_context(|| format!("partition column {name:?} is not in the schema"))?;
        let text = StringArray::from(vec![value.as_deref(); batch.num_rows()]);
        let column = cast(&text, &partition_type(kind)?)?;
        fields.push(Arc::new(Field::new(name, column.data_type().clone(), true)));
        columns.push(column);
    }
    let options = RecordBatchOptions::new().with_row_count(Some(batch.num_rows()));
    Ok(RecordBatch::try_new_with_options(Arc::new(Schema::new(fields)), columns, &options)?)
}

fn partition_type(kind: &str) -> anyhow::Result<DataType> {
    Ok(match kind {
        "string" => DataType::Utf8,
        "byte" | "short" | "integer" | "long" => DataType::Int64,
        "float" | "double" => DataType::Float64,
        "boolean" => DataType::Boolean,
        "date" => DataType::Date32,
        other => bail!("a partition column of type {other:?}: not known here"),
    })
}

fn percent_decoded(path: &str) -> anyhow::Result<String> {
    let mut bytes = Vec::with_capacity(path.len());
    let mut rest = path.bytes();
    while let Some(byte) = rest.next() {
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let mut digit = || rest.next().and_then(|digit| char::from(digit).to_digit(16));
        let (Some(high), Some(low)) = (digit(), digit()) else { bail!("path {path:?}: `%` without digits") };
        bytes.push((high * 16 + low) as u8);
    }
    String::from_utf8(bytes).with_context(|| format!("path {path:?}"))
}

#[cfg(test)]
mod tests {
    use arrow::array::Int64Array;
    use parquet::arrow::ArrowWriter;
    use serde_json::json;

    use super::*;

    struct Table {
        dir: tempfile::TempDir,
        versions: usize,
    }

    impl Table {
        fn new(partitioned: bool) -> Self {
            let dir = tempfile::tempdir().expect("a directory");
            std::fs::create_dir(dir.path().join("_delta_log")).expect("a directory");
            let fields = json!([{"name": "n", "type": "long"}, {"name": "day", "type": "date"}]);
            let schema = json!({"type": "struct", "fields": fields}).to_string();
            let columns: &[&str] = if partitioned { &["day"] } else { &[] };
            let mut table = Self { dir, versions: 0 };
            table.commit(&[
                json!({"metaData": {"id": "t", "schemaString": schema, "partitionColumns": columns}}),
            ]);
            table
        }

        fn commit(&mut self, actions: &[serde_json::Value]) {
            let text: String = actions.iter().map(|action| format!("{action}\n")).collect();
            let path = self.dir.path().join(format!("_delta_log/{:020}.json", self.versions));
            std::fs::write(path, text).expect("written");
            self.versions += 1;
        }

        fn write(&self, name: &str, rows: &[(&str, i64, i64)]) {
            let columns: Vec<(&str, ArrayRef)> = vec![
                ("n", Arc::new(Int64Array::from_iter_values(rows.iter().map(|row| row.2)))),
                ("_stream", Arc::new(StringArray::from_iter_values(rows.iter().map(|row| row.0)))),
                ("_offset", Arc::new(Int64Array::from_iter_values(rows.iter().map(|row| row.1)))),
            ];
            let batch = RecordBatch::try_from_iter(columns).expect("a batch");
            let file = File::create(self.dir.path().join(name)).expect("a file");
            let mut writer = ArrowWriter::try_new(file, batch.schema(), None).expect("a writer");
            writer.write(&batch).expect("written");
            writer.close().expect("closed");
        }

        fn add(&self, name: &str, rows: &[(&str, i64, i64)]) -> serde_json::Value {
            self.write(name, rows);
            let stats = json!({"numRecords": rows.len()}).to_string();
            json!({"add": {"path": name, "partitionValues": {}, "stats": stats}})
        }
    }

    #[test]
    fn every_version_is_read() {
        let mut table = Table::new(false);
        let one = table.add("a.parquet", &[("s#1", 0, 5), ("s#1", 1, 6), ("t#1", 0, 7)]);
        table.commit(&[one]);
        let two = table.add("b.parquet", &[("s#1", 0, 5), ("s#1", 1, 6), ("t#1", 0, 7), ("t#1", 1, 8)]);
        table.commit(&[json!({"remove": {"path": "a.parquet"}}), two]);
        let versions = read_versions(table.dir.path()).expect("a table");
        let rows: Vec<u64> = versions.iter().map(|v| v.files.iter().map(|file| file.rows()).sum()).collect();
        assert_eq!(rows, [0, 3, 4]);
        assert_eq!(count_rows(table.dir.path()).expect("a table"), 4);
        let (old, new) = (&versions[1].files[0], &versions[2].files[0]);
        assert_eq!(old.runs[0], new.runs[0], "the same rows in another file");
        assert_eq!(new.runs[1].rows.iter().map(|row| row.offset).collect::<Vec<_>>(), [0, 1]);
        assert_ne!(old.runs[0].rows[0].hash, old.runs[0].rows[1].hash);
    }

    #[test]
    fn partition_values_count_as_content() {
        let mut table = Table::new(true);
        for (name, day) in [("day=1/a%20b.parquet", "2026-01-01"), ("day=2/a.parquet", "2026-01-02")] {
            let path = percent_decoded(name).expect("a path");
            std::fs::create_dir_all(table.dir.path().join(&path).parent().expect("one")).expect("made");
            table.write(&path, &[("s#1", 0, 5)]);
            table.commit(&[json!({"add": {"path": name, "partitionValues": {"day": day}}})]);
        }
        let versions = read_versions(table.dir.path()).expect("a table");
        let hash = |file: usize| versions[2].files[file].runs[0].rows[0].hash;
        assert_ne!(hash(0), hash(1));
    }

    #[test]
    fn what_is_wrong_with_a_table_is_named() {
        let refused = |table: &Table, words: &str| {
            let error = read_versions(table.dir.path()).expect_err(words);
            assert!(format!("{error:#}").contains(words), "{error:#}");
        };
        let mut table = Table::new(false);
        table.versions += 1;
        table.commit(&[]);
        refused(&table, "version 1 is missing");
        let mut table = Table::new(false);
        table.commit(&[json!({"add": {"path": "none.parquet"}})]);
        refused(&table, "none.parquet");
        let mut table = Table::new(false);
        table.commit(&[json!({"remove": {"path": "x.parquet"}})]);
        refused(&table, "not in the table");
        let mut table = Table::new(false);
        table.write("a.parquet", &[("s#1", 0, 5)]);
        table.commit(&[json!({"add": {"path": "a.parquet", "stats": "{\"numRecords\":2}"}})]);
        refused(&table, "stats say 2");
    }
}
