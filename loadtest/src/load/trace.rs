//! Traces of what once happened: a file of records with their times, cut into streams, as they are to be sent again.
//!
//! All of it is in memory: as much as some times the unpacked file.
//!
//! *Owns*: reading Parquet, CSV and NDJSON, the order of records, what is wrong with a file.
//! *Does not own*: when records are sent (`source`).

use std::fmt;
use std::fs::File;
use std::io::{BufReader, Read};
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, anyhow, bail, ensure};
use arrow::array::{Array, ArrayRef, AsArray, RecordBatch, StringArray, make_array};
use arrow::compute::{CastOptions, cast, cast_with_options, concat_batches};
use arrow::csv::ReaderBuilder as CsvBuilder;
use arrow::csv::reader::Format;
use arrow::datatypes::{
    DataType, Field, Float32Type, Float64Type, Int64Type, Schema, SchemaRef, TimeUnit,
    TimestampMicrosecondType, UInt64Type,
};
use arrow::json::ReaderBuilder as JsonBuilder;
use arrow::json::reader::infer_json_schema;
use arrow::json::writer::{LineDelimited, WriterBuilder};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD as BASE64;
use bytes::Bytes;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use sluice_shared::table::RESERVED_PREFIXES;

const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";
/// Streams are connections.
const STREAMS_MAX: usize = 20_000;
/// Where epochs of seconds, milliseconds and microseconds end: in the year 5138, 1973 and 1973 of the next one.
const SECONDS_MAX: f64 = 100_000_000_000.0;
const MILLIS_MAX: f64 = 100_000_000_000_000.0;
const MICROS_MAX: f64 = 100_000_000_000_000_000.0;

/// What is in a file.
#[derive(Debug)]
pub(crate) struct Trace {
    /// Of its table.
    pub(crate) schema: SchemaRef,
    /// By the stream's value.
    pub(crate) streams: Vec<TracedStream>,
    pub(crate) records: usize,
    /// What is not sent as it stands in the file.
    pub(crate) notes: Vec<String>,
    /// The earliest.
    pub(crate) first: Moment,
    /// And the latest.
    pub(crate) last: Moment,
}

/// When a record is of.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Moment {
    /// In the file, from 1.
    row: usize,
    /// µs since 1970.
    us: i64,
}

impl fmt::Display for Moment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { row, us } = self;
        match chrono::DateTime::from_timestamp_micros(*us) {
            Some(time) => write!(f, "row {row}, {}", time.format("%Y-%m-%dT%H:%M:%S%.fZ")),
            None => write!(f, "row {row}, {us} µs since 1970"),
        }
    }
}

/// The records of one value, in the order of their times.
#[derive(Debug)]
pub(crate) struct TracedStream {
    pub(crate) value: String,
    /// JSON, one record a line.
    pub(crate) text: Bytes,
    /// Of each record µs since the first one of the file, and where it ends in the text.
    pub(crate) records: Vec<(u64, usize)>,
}

/// Rows of a file, each as it is to be sent.
struct Rows {
    /// Of their table.
    schema: SchemaRef,
    /// µs since 1970.
    times: Vec<i64>,
    /// Which streams they are of.
    values: StringArray,
    /// JSON, one record a line.
    text: Bytes,
    notes: Vec<String>,
}

impl Trace {
    /// Reads a file: `.parquet`, `.csv`, `.ndjson` or `.jsonl`, the latter three also behind `.gz` or `.zst`.
    ///
    /// # Errors
    /// It cannot be read, has no such columns, or a row without time or stream: by file, row and column.
    pub(crate) fn read(path: &Path, time: &str, stream: &str) -> anyhow::Result<Self> {
        let read = || Self::of(rows(path, time, stream)?, stream);
        read().with_context(|| path.display().to_string())
    }

    fn of(rows: Rows, stream: &str) -> anyhow::Result<Self> {
        let Rows { schema, times, values, text, notes } = rows;
        let mut ends = vec![0];
        // A text within a record has its line ends escaped.
        ends.extend(memchr::memchr_iter(b'\n', &text).map(|at| at + 1));
        let records = times.len();
        ensure!(ends.len() == records + 1, "{} of {records} rows are one line of JSON each", ends.len() - 1);
        let mut order: Vec<usize> = (0..records).collect();
        // Stable: rows of one time keep their order.
        order.sort_by_key(|row| (values.value(*row), times[*row]));
        let first = (0..records).min_by_key(|row| times[*row]).context("no rows")?;
        let last = (0..records).max_by_key(|row| times[*row]).context("no rows")?;
        let mut streams: Vec<TracedStream> = Vec::new();
        for rows in order.chunk_by(|a, b| values.value(*a) == values.value(*b)) {
            ensure!(
                streams.len() < STREAMS_MAX,
                "column {stream} has more than {STREAMS_MAX} values, and each is a connection: choose another"
            );
            let value = rows.first().map_or("", |row| values.value(*row)).to_owned();
            let mut own = Vec::with_capacity(rows.iter().map(|row| ends[row + 1] - ends[*row]).sum());
            let record = |row: &usize| {
                own.extend_from_slice(&text[ends[*row]..ends[row + 1]]);
                (times[*row].abs_diff(times[first]), own.len())
            };
            let records = rows.iter().map(record).collect();
            streams.push(TracedStream { value, text: Bytes::from(own), records });
        }
        let moment = |row: usize| Moment { row: row + 1, us: times[row] };
        let (first, last) = (moment(first), moment(last));
        Ok(Self { schema, streams, records, notes, first, last })
    }

    /// From the first record to the last, µs.
    pub(crate) fn span_us(&self) -> u64 {
        self.last.us.abs_diff(self.first.us)
    }
}

/// Every row of a file.
fn rows(path: &Path, time: &str, stream: &str) -> anyhow::Result<Rows> {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default().to_ascii_lowercase();
    let packed = [".gz", ".zst"].into_iter().find(|end| name.ends_with(end));
    let kind = packed.map_or(name.as_str(), |end| name.trim_end_matches(end));
    let kind = kind.rsplit_once('.').map(|(_, kind)| kind).unwrap_or_default();
    let file = File::open(path)?;
    if kind == "parquet" && packed.is_none() {
        return of_batch(&parquet(file)?, time, stream);
    }
    ensure!(
        matches!(kind, "csv" | "ndjson" | "jsonl"),
        "expected .parquet, .csv, .ndjson or .jsonl, the latter three also with .gz or .zst"
    );
    let mut text = Vec::new();
    match packed {
        Some(".gz") => flate2::read::MultiGzDecoder::new(BufReader::new(file)).read_to_end(&mut text)?,
        Some(_) => zstd::Decoder::new(file)?.read_to_end(&mut text)?,
        None => BufReader::new(file).read_to_end(&mut text)?,
    };
    let text = text.strip_prefix(BYTE_ORDER_MARK).unwrap_or(&text);
    match kind {
        "csv" => of_batch(&csv(text, time, stream)?, time, stream),
        _ => ndjson(text, time, stream).or_else(|error| check_lines(text).and(Err(error))),
    }
}

/// Rows that have to be made JSON first.
fn of_batch(batch: &RecordBatch, time: &str, stream: &str) -> anyhow::Result<Rows> {
    let batch = plain(batch)?;
    let times = times(column(&batch, time)?, time)?;
    let values = texts(column(&batch, stream)?, stream)?;
    let (batch, left_out) = without_reserved(&batch)?;
    let notes = notes(&batch, &left_out);
    Ok(Rows { schema: batch.schema(), times, values, text: json(&batch)?, notes })
}

/// What is not sent as it stands in the file.
fn notes(batch: &RecordBatch, left_out: &[String]) -> Vec<String> {
    let mut notes = Vec::new();
    if !left_out.is_empty() {
        notes.push(format!("leaves out columns that the service writes itself: {}", left_out.join(", ")));
    }
    for (field, column) in batch.schema_ref().fields().iter().zip(batch.columns()) {
        let count = not_finite(column);
        if count > 0 {
            notes.push(format!(
                "column {}: {count} times NaN or infinite, which JSON has not: sent as null",
                field.name()
            ));
        }
    }
    notes
}

/// One record a line.
fn json(batch: &RecordBatch) -> anyhow::Result<Bytes> {
    let mut text = Vec::with_capacity(batch.get_array_memory_size());
    // Left out in a map, an entry without a value would be none.
    let schema = batch.schema();
    let with_nulls =
        schema.flattened_fields().iter().any(|field| matches!(field.data_type(), DataType::Map(..)));
    let mut writer =
        WriterBuilder::new().with_explicit_nulls(with_nulls).build::<_, LineDelimited>(&mut text);
    writer.write(&with_base64(batch)?)?;
    writer.finish()?;
    drop(writer);
    Ok(Bytes::from(text))
}

fn parquet(file: File) -> anyhow::Result<RecordBatch> {
    let builder = ParquetRecordBatchReaderBuilder::try_new(file)?;
    let schema = Arc::clone(builder.schema());
    let batches = builder.build()?.collect::<Result<Vec<_>, _>>()?;
    Ok(concat_batches(&schema, &batches)?)
}

/// Whole numbers some of which begin with zeros are texts (post codes, identifiers), and so is what names streams.
fn csv(text: &[u8], time: &str, stream: &str) -> anyhow::Result<RecordBatch> {
    let format = Format::default().with_header(true);
    let (inferred, _) = format.infer_schema(text, None)?;
    let read = |schema: Schema| -> anyhow::Result<RecordBatch> {
        let schema = Arc::new(schema);
        let reader = CsvBuilder::new(Arc::clone(&schema)).with_format(format.clone()).build(text)?;
        let batches = reader.collect::<Result<Vec<_>, _>>()?;
        Ok(concat_batches(&schema, &batches)?)
    };
    let kinds = |kind: &dyn Fn(usize, &Field) -> DataType| {
        let fields = inferred.fields().iter().enumerate();
        Schema::new(
            fields.map(|(at, field)| Field::new(field.name(), kind(at, field), true)).collect::<Vec<_>>(),
        )
    };
    let texts = read(kinds(&|_, _| DataType::Utf8))?;
    let has_zeros = |at: usize| {
        let begins = |text: &str| {
            text.len() > 1 && text.starts_with('0') && text.bytes().all(|byte| byte.is_ascii_digit())
        };
        texts.column(at).as_string::<i32>().iter().flatten().any(begins)
    };
    read(kinds(&|at, field| match field.data_type() {
        _ if field.name() == stream && stream != time => DataType::Utf8,
        kind if kind.is_numeric() && has_zeros(at) => DataType::Utf8,
        kind => kind.clone(),
    }))
}

fn is_reserved(name: &str) -> bool {
    let folded = name.to_ascii_lowercase();
    RESERVED_PREFIXES.iter().any(|prefix| folded.starts_with(prefix))
}

/// A table that the service wrote has columns that it writes anew.
fn without_reserved(batch: &RecordBatch) -> anyhow::Result<(RecordBatch, Vec<String>)> {
    let names = batch.schema_ref().fields().iter().map(|field| field.name().clone()).enumerate();
    let (out, kept): (Vec<_>, Vec<_>) = names.partition(|(_, name)| is_reserved(name));
    let kept: Vec<usize> = kept.into_iter().map(|(at, _)| at).collect();
    ensure!(!kept.is_empty(), "there is no column but those that the service writes itself");
    Ok((batch.project(&kept)?, out.into_iter().map(|(_, name)| name).collect()))
}

/// Lines are sent as they are; where they have columns that the service writes itself, without these.
fn ndjson(text: &[u8], time: &str, stream: &str) -> anyhow::Result<Rows> {
    let (inferred, _) = infer_json_schema(text, None)?;
    let read = |schema: Schema| -> anyhow::Result<RecordBatch> {
        let schema = Arc::new(schema);
        // A stream may be called by a number here and by a text there.
        let reader = JsonBuilder::new(Arc::clone(&schema)).with_coerce_primitive(true).build(text)?;
        let batches = reader.collect::<Result<Vec<_>, _>>()?;
        Ok(concat_batches(&schema, &batches)?)
    };
    let fields = inferred.fields().iter();
    if fields.clone().any(|field| is_reserved(field.name())) {
        return of_batch(&read(inferred)?, time, stream);
    }
    let fields: Vec<Field> =
        fields.map(|field| Field::new(field.name(), known(field.data_type()), true)).collect();
    let schema = Arc::new(Schema::new(fields.clone()));
    let is_asked = |field: &Field| field.name() == time || field.name() == stream;
    let asked = read(Schema::new(fields.into_iter().filter(is_asked).collect::<Vec<_>>()))?;
    let column = |name: &str| column(&asked, name).map_err(|_| no_column(&schema, name));
    let (times, values) = (times(column(time)?, time)?, texts(column(stream)?, stream)?);
    let mut lines = Vec::with_capacity(text.len() + 1);
    for line in text.split(|byte| *byte == b'\n').map(<[u8]>::trim_ascii).filter(|line| !line.is_empty()) {
        lines.extend_from_slice(line);
        lines.push(b'\n');
    }
    Ok(Rows { schema, times, values, text: Bytes::from(lines), notes: Vec::new() })
}

/// Columns and fields without a single value are texts.
fn known(kind: &DataType) -> DataType {
    let of = |field: &Field| Arc::new(Field::new(field.name(), known(field.data_type()), true));
    match kind {
        DataType::Null => DataType::Utf8,
        DataType::Struct(fields) => DataType::Struct(fields.iter().map(|field| of(field)).collect()),
        DataType::List(field) => DataType::List(of(field)),
        other => other.clone(),
    }
}

/// Arrow's readers name lines only within a batch: the first that is no object of JSON.
fn check_lines(text: &[u8]) -> anyhow::Result<()> {
    for (number, line) in text.split(|byte| *byte == b'\n').enumerate() {
        if !line.trim_ascii().is_empty() {
            serde_json::from_slice::<serde_json::Map<String, serde_json::Value>>(line)
                .map_err(|error| anyhow!("line {}: expected one JSON object: {error}", number + 1))?;
        }
    }
    Ok(())
}

/// The same rows in the types that tables have.
fn plain(batch: &RecordBatch) -> anyhow::Result<RecordBatch> {
    let kind = |kind: &DataType, column: &ArrayRef| match kind {
        DataType::UInt64
            if column.as_primitive::<UInt64Type>().iter().flatten().any(|n| i64::try_from(n).is_err()) =>
        {
            DataType::Decimal128(20, 0)
        }
        DataType::LargeUtf8 | DataType::Utf8View => DataType::Utf8,
        DataType::Dictionary(_, value) => (**value).clone(),
        DataType::UInt8 | DataType::UInt16 | DataType::UInt32 | DataType::UInt64 => DataType::Int64,
        DataType::Float16 => DataType::Float32,
        DataType::Date64 => DataType::Timestamp(TimeUnit::Microsecond, Some("UTC".into())),
        DataType::Timestamp(_, None) => DataType::Timestamp(TimeUnit::Microsecond, None),
        DataType::Timestamp(_, Some(_)) => DataType::Timestamp(TimeUnit::Microsecond, Some("UTC".into())),
        DataType::LargeBinary | DataType::BinaryView | DataType::FixedSizeBinary(_) => DataType::Binary,
        // A column without a single value.
        DataType::Null => DataType::Utf8,
        other => other.clone(),
    };
    let (mut fields, mut columns) = (Vec::new(), Vec::new());
    for (field, column) in batch.schema_ref().fields().iter().zip(batch.columns()) {
        let kind = kind(field.data_type(), column);
        ensure!(
            !has_binary_within(field),
            "column {}: binary values within others are not replayed",
            field.name()
        );
        // What does not fit is an error, and not null.
        let options = CastOptions { safe: false, ..CastOptions::default() };
        let cast = cast_with_options(column, &kind, &options);
        columns.push(cast.with_context(|| format!("column {}", field.name()))?);
        fields.push(Field::new(field.name(), kind, true));
    }
    Ok(RecordBatch::try_new(Arc::new(Schema::new(fields)), columns)?)
}

/// How many floating-point numbers are none, at any depth.
fn not_finite(column: &ArrayRef) -> usize {
    match column.data_type() {
        DataType::Float32 => {
            let values = column.as_primitive::<Float32Type>();
            values.iter().flatten().filter(|value| !value.is_finite()).count()
        }
        DataType::Float64 => {
            let values = column.as_primitive::<Float64Type>();
            values.iter().flatten().filter(|value| !value.is_finite()).count()
        }
        _ => column.to_data().child_data().iter().map(|child| not_finite(&make_array(child.clone()))).sum(),
    }
}

/// Beneath the column itself.
fn has_binary_within(column: &Field) -> bool {
    let schema = Schema::new(vec![column.clone()]);
    schema.flattened_fields().iter().skip(1).any(|field| {
        use DataType::{Binary, BinaryView, FixedSizeBinary, LargeBinary};
        matches!(field.data_type(), Binary | LargeBinary | BinaryView | FixedSizeBinary(_))
    })
}

/// The same rows with binary values as JSON has them here: in base64.
fn with_base64(batch: &RecordBatch) -> anyhow::Result<RecordBatch> {
    let (mut fields, mut columns) = (Vec::new(), Vec::new());
    for (field, column) in batch.schema_ref().fields().iter().zip(batch.columns()) {
        let (kind, column): (_, ArrayRef) = match field.data_type() {
            DataType::Binary => {
                let values = column.as_binary::<i32>().iter();
                let texts: StringArray =
                    values.map(|value| value.map(|value| BASE64.encode(value))).collect();
                (DataType::Utf8, Arc::new(texts))
            }
            kind => (kind.clone(), Arc::clone(column)),
        };
        fields.push(Field::new(field.name(), kind, true));
        columns.push(column);
    }
    Ok(RecordBatch::try_new(Arc::new(Schema::new(fields)), columns)?)
}

fn column<'a>(batch: &'a RecordBatch, name: &str) -> anyhow::Result<&'a ArrayRef> {
    batch.column_by_name(name).ok_or_else(|| no_column(batch.schema_ref(), name))
}

fn no_column(schema: &Schema, name: &str) -> anyhow::Error {
    let known: Vec<&str> = schema.fields().iter().map(|field| field.name().as_str()).collect();
    anyhow!("there is no column {name}: there are {}", known.join(", "))
}

/// µs since 1970.
fn times(column: &ArrayRef, name: &str) -> anyhow::Result<Vec<i64>> {
    let place = |row: usize| format!("row {}, column {name}", row + 1);
    let whole = match column.data_type() {
        DataType::Int8 | DataType::Int16 | DataType::Int32 | DataType::Int64 => {
            cast(column, &DataType::Int64)?
        }
        DataType::Float32 | DataType::Float64 => {
            let numbers = cast(column, &DataType::Float64)?;
            let numbers = numbers.as_primitive::<Float64Type>();
            let micros = micros_of(numbers.iter().flatten().map(f64::abs).fold(0.0, f64::max));
            Arc::new(numbers.unary_opt::<_, Int64Type>(|number| {
                Some((number * micros).round() as i64).filter(|_| number.is_finite())
            })) as ArrayRef
        }
        DataType::Timestamp(..) | DataType::Date32 | DataType::Utf8 => {
            let micros = cast(column, &DataType::Timestamp(TimeUnit::Microsecond, None))
                .with_context(|| format!("column {name}"))?;
            Arc::new(micros.as_primitive::<TimestampMicrosecondType>().reinterpret_cast::<Int64Type>())
                as ArrayRef
        }
        other => bail!("column {name}: {other} is no time"),
    };
    // A text that is no time has become null.
    if let Some(row) = (0..whole.len()).find(|row| whole.is_null(*row)) {
        bail!(
            "{}: {}",
            place(row),
            if column.is_null(row) { "no value" } else { "no time (expected RFC 3339)" }
        );
    }
    let whole = whole.as_primitive::<Int64Type>().values();
    if !column.data_type().is_integer() {
        return Ok(whole.to_vec());
    }
    let micros = micros_of(whole.iter().map(|value| value.unsigned_abs()).max().unwrap_or(0) as f64);
    Ok(whole
        .iter()
        .map(|value| if micros >= 1.0 { value.saturating_mul(micros as i64) } else { value / 1_000 })
        .collect())
}

/// How many µs the unit of a time has, by the greatest of them: seconds, ms, µs or ns since 1970.
fn micros_of(most: f64) -> f64 {
    match most {
        most if most < SECONDS_MAX => 1e6,
        most if most < MILLIS_MAX => 1e3,
        most if most < MICROS_MAX => 1.0,
        _ => 1e-3,
    }
}

fn texts(column: &ArrayRef, name: &str) -> anyhow::Result<StringArray> {
    let texts = cast(column, &DataType::Utf8).with_context(|| format!("column {name}"))?;
    if let Some(row) = (0..texts.len()).find(|row| texts.is_null(*row)) {
        bail!("row {}, column {name}: no value, and so no stream", row + 1);
    }
    Ok(texts.as_string::<i32>().clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(name: &str, text: &[u8], time: &str, stream: &str) -> anyhow::Result<Trace> {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join(name);
        std::fs::write(&path, text).expect("written");
        Trace::read(&path, time, stream)
    }

    fn made(batch: &RecordBatch) -> anyhow::Result<Trace> {
        Trace::of(of_batch(batch, "at", "device")?, "device")
    }

    const CSV: &str =
        "at,device,n\n2026-01-01T00:00:02Z,b,1\n2026-01-01T00:00:00Z,a,2\n2026-01-01T00:00:00.5Z,b,3\n";

    fn shown(trace: &Trace) -> Vec<(String, Vec<u64>, String)> {
        let shown = trace.streams.iter().map(|stream| {
            let dues = stream.records.iter().map(|record| record.0).collect();
            (stream.value.clone(), dues, String::from_utf8_lossy(&stream.text).into_owned())
        });
        shown.collect()
    }

    #[test]
    fn records_come_by_stream_and_time_with_their_gaps() {
        let trace = read("x.csv", CSV.as_bytes(), "at", "device").expect("a trace");
        assert_eq!((trace.records, trace.span_us()), (3, 2_000_000));
        let seen = shown(&trace);
        assert_eq!((seen[0].0.as_str(), &seen[0].1), ("a", &vec![0]));
        assert_eq!((seen[1].0.as_str(), &seen[1].1), ("b", &vec![500_000, 2_000_000]));
        let lines: Vec<&str> = seen[1].2.lines().collect();
        assert!(lines[0].contains("\"n\":3") && lines[1].contains("\"n\":1"), "{lines:?}");
        assert_eq!(trace.streams[1].records[1].1, trace.streams[1].text.len());
    }

    #[test]
    fn what_begins_with_zeros_is_a_text_and_so_is_a_stream() {
        let text = "at,device,zip,n\n1,007,01234,1\n2,7,99999,20\n3,1e3,00001,300\n";
        let trace = read("x.csv", text.as_bytes(), "at", "device").expect("a trace");
        let seen = shown(&trace);
        let streams: Vec<&str> = seen.iter().map(|stream| stream.0.as_str()).collect();
        assert_eq!(streams, ["007", "1e3", "7"]);
        assert!(seen[0].2.contains("\"zip\":\"01234\"") && seen[0].2.contains("\"n\":1"), "{seen:?}");
    }

    #[test]
    fn columns_that_the_service_writes_are_left_out() {
        let text = "{\"_ingested_at\":1,\"_stream\":\"a\",\"n\":1}\n{\"_ingested_at\":2,\"_stream\":\"b\",\"n\":2}\n";
        let trace = read("x.ndjson", text.as_bytes(), "_ingested_at", "_stream").expect("a trace");
        assert!(trace.notes[0].ends_with("itself: _ingested_at, _stream"), "{:?}", trace.notes);
        let seen = shown(&trace);
        assert_eq!(seen[1], ("b".to_owned(), vec![1_000_000], "{\"n\":2}\n".to_owned()));
        let error = read("x.ndjson", b"{\"_ingested_at\":1,\"_stream\":\"a\"}\n", "_ingested_at", "_stream");
        assert!(error.expect_err("no column").to_string().contains("x.ndjson"));
    }

    #[test]
    fn types_are_those_of_all_rows_and_lines_of_json_go_as_they_are() {
        let mut json = "{\"at\":1,\"device\":\"a\",\"n\":5}\n".repeat(20_000);
        json += " {\"n\":18446744073709551615,\"device\":7, \"at\":2.5,\"new\":[]}\r\n\n{\"at\":3,\"device\":\"a\",\"n\":1.0e1}";
        let trace = read("x.ndjson", format!("\u{feff}{json}").as_bytes(), "at", "device").expect("a trace");
        let kinds: Vec<String> = trace
            .schema
            .fields()
            .iter()
            .map(|field| format!("{} {}", field.name(), field.data_type()))
            .collect();
        assert_eq!(kinds[..3], ["at Float64", "device Utf8", "n Float64"], "{kinds:?}");
        let seen = shown(&trace);
        assert_eq!((trace.records, seen[0].0.as_str(), seen[1].0.as_str()), (20_002, "7", "a"));
        assert_eq!(seen[0].1, [1_500_000]);
        assert_eq!(seen[0].2, "{\"n\":18446744073709551615,\"device\":7, \"at\":2.5,\"new\":[]}\n");
        assert!(seen[1].2.ends_with("\n{\"at\":3,\"device\":\"a\",\"n\":1.0e1}\n"));
        let mut csv = "at,device,n\n".to_owned() + &"2026-01-01T00:00:00Z,a,5\n".repeat(20_000);
        csv += "2026-01-01T00:00:00.75Z,a,5.5\n";
        let trace = read("x.csv", csv.as_bytes(), "at", "device").expect("a trace");
        let seen = shown(&trace);
        assert_eq!((trace.span_us(), seen[0].1.last()), (750_000, Some(&750_000)));
        assert!(seen[0].2.trim_end().ends_with("5.5}") && seen[0].2.contains(".75"), "the last row");
    }

    #[test]
    fn numbers_are_times_by_their_size_whole_or_not() {
        for (one, other) in [
            ("1767225600", "1767225602"),
            ("1767225600.0", "1767225602.0"),
            ("1767225600000", "1767225602000"),
            ("1767225600000.0", "1767225602000.0"),
            ("1767225600000000", "1767225602000000"),
            ("1767225600000000000", "1767225602000000000"),
        ] {
            let text = format!("at,device\n{one},a\n{other},a\n");
            let trace = read("x.csv", text.as_bytes(), "at", "device").expect("a trace");
            assert_eq!(trace.span_us(), 2_000_000, "{one}");
            assert_eq!(trace.first.to_string(), "row 1, 2026-01-01T00:00:00Z", "{one}");
        }
        let same = read("x.csv", b"at\n1767225600\n1767225602\n", "at", "at").expect("its own stream");
        assert_eq!(same.streams.len(), 2);
        read("x.ndjson", b"{\"at\":1e400,\"device\":1}\n", "at", "device").expect_err("no time");
    }

    #[test]
    fn no_value_becomes_null_unsaid() {
        let of = |name: &str, column: ArrayRef| {
            let at = Arc::new(arrow::array::Int64Array::from(vec![1; column.len()])) as ArrayRef;
            let device = Arc::new(StringArray::from(vec!["a"; column.len()])) as ArrayRef;
            let batch = RecordBatch::try_from_iter([("at", at), ("device", device), (name, column)]);
            let trace = made(&batch.expect("a batch")).expect("a trace");
            let text = shown(&trace)[0].2.clone();
            (trace, text)
        };
        let (trace, text) =
            of("n", Arc::new(arrow::array::UInt64Array::from(vec![Some(u64::MAX), Some(1), None])));
        assert_eq!(trace.schema.field(2).data_type(), &DataType::Decimal128(20, 0));
        assert!(text.contains("18446744073709551615"), "{text}");
        let (trace, _) = of("n", Arc::new(arrow::array::UInt64Array::from(vec![1])));
        assert_eq!(trace.schema.field(2).data_type(), &DataType::Int64);
        let floats = arrow::array::Float64Array::from(vec![f64::NAN, 1.5, f64::INFINITY]);
        let (trace, _) = of("x", Arc::new(floats.clone()));
        assert!(trace.notes[0].contains("column x: 2 times"), "{:?}", trace.notes);
        let field = Arc::new(Field::new("y", DataType::Float64, true));
        let (trace, _) =
            of("x", Arc::new(arrow::array::StructArray::from(vec![(field, Arc::new(floats) as ArrayRef)])));
        assert!(trace.notes[0].contains("column x: 2 times"), "{:?}", trace.notes);
        let mut map = arrow::array::MapBuilder::new(
            None,
            arrow::array::StringBuilder::new(),
            arrow::array::Int64Builder::new(),
        );
        map.keys().append_value("k");
        map.values().append_null();
        map.append(true).expect("an entry");
        let (_, text) = of("m", Arc::new(map.finish()));
        assert!(text.contains("{\"k\":null}"), "{text}");
    }

    #[test]
    fn binary_values_are_base64_and_those_within_others_are_refused() {
        let bytes: ArrayRef =
            Arc::new(arrow::array::BinaryArray::from_opt_vec(vec![Some(b"\xff\x00"), None]));
        let columns = |bytes: ArrayRef| {
            let at = Arc::new(arrow::array::Int64Array::from(vec![1, 2])) as ArrayRef;
            let device = Arc::new(StringArray::from(vec!["a", "a"])) as ArrayRef;
            RecordBatch::try_from_iter([("at", at), ("device", device), ("b", bytes)]).expect("a batch")
        };
        for kind in [DataType::Binary, DataType::LargeBinary, DataType::BinaryView] {
            let trace = made(&columns(cast(&bytes, &kind).expect("cast"))).expect("a trace");
            assert_eq!(trace.schema.field(2).data_type(), &DataType::Binary);
            assert!(
                shown(&trace)[0].2.starts_with("{\"at\":1,\"device\":\"a\",\"b\":\"/wA=\"}\n"),
                "{trace:?}"
            );
        }
        let field = Arc::new(Field::new("x", DataType::Binary, true));
        let within = Arc::new(arrow::array::StructArray::from(vec![(field, bytes)]));
        let error = made(&columns(within)).expect_err("within").to_string();
        assert!(error.contains("column b"), "{error}");
    }

    #[test]
    fn the_same_trace_is_read_from_json_and_packed() {
        let json =
            "{\"at\":1767225602,\"device\":\"b\",\"n\":1}\n{\"at\":1767225600,\"device\":\"a\",\"n\":2}\n";
        let plain = read("x.ndjson", json.as_bytes(), "at", "device").expect("a trace");
        assert_eq!(plain.span_us(), 2_000_000, "an epoch in seconds");
        let packed = zstd::encode_all(json.as_bytes(), 1).expect("packed");
        let packed = read("x.jsonl.zst", &packed, "at", "device").expect("a trace");
        assert_eq!(shown(&plain), shown(&packed));
    }

    #[test]
    fn what_is_wrong_is_named_by_file_row_and_column() {
        let refused = |name: &str, text: &str, time: &str, what: &[&str]| {
            let error = format!("{:#}", read(name, text.as_bytes(), time, "device").expect_err(text));
            assert!(what.iter().all(|what| error.contains(what)), "{what:?} are not all in: {error}");
        };
        refused("x.csv", CSV, "when", &["x.csv", "no column when", "at, device, n"]);
        refused(
            "x.csv",
            "at,device\n2026-01-01T00:00:00Z,a\nsoon,b\n",
            "at",
            &["x.csv", "row 2", "column at"],
        );
        refused(
            "x.csv",
            "at,device\n2026-01-01T00:00:00Z,a\n2026-01-01T00:00:00Z,\n",
            "at",
            &["row 2", "column device"],
        );
        refused("x.csv", "at,device\n2026-01-01T00:00:00Z\n", "at", &["x.csv", "line"]);
        refused("x.ndjson", "{\"at\":1,\"device\":\"a\"}\n{\"at\":\n", "at", &["x.ndjson", "line 2"]);
        refused("x.ndjson", "{\"at\":1,\"device\":\"a\"}\n\n[1]\n", "at", &["x.ndjson", "line 3", "object"]);
        refused("x.txt", "x", "at", &["x.txt", ".parquet"]);
    }
}
