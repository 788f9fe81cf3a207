//! Rows to Parquet: which rows of which batches, as the table has them now, split by partition values.
//!
//! *Owns*: the system columns, casting of rows of an older schema, Parquet settings, file names.
//! *Does not own*: which runs are eligible (`home`), Delta's side of a file (`delta`), the thread it runs on.

use std::borrow::Cow;
use std::collections::HashMap;
use std::io::{self, Write};
use std::ops::Range;
use std::sync::Arc;

use arrow::array::{
    Array, ArrayRef, AsArray, Int64Array, RecordBatch, RecordBatchOptions, StringBuilder,
    TimestampMicrosecondArray, UInt64Array, new_null_array,
};
use arrow::buffer::BooleanBuffer;
use arrow::compute::{
    CastOptions, can_cast_types, cast_with_options, concat_batches, filter_record_batch, take_record_batch,
};
use arrow::datatypes::{DataType, Field, Schema, SchemaRef, TimeUnit};
use arrow::error::ArrowError;
use arrow::row::{RowConverter, SortField};
use bytes::Bytes;
use object_store::PutPayload;
use object_store::path::Path;
use parquet::arrow::ArrowWriter;
use parquet::arrow::arrow_writer::ArrowWriterOptions;
use parquet::basic::{Compression, ZstdLevel};
use parquet::errors::ParquetError;
use parquet::file::properties::{EnabledStatistics, WriterProperties};
use parquet::schema::types::ColumnPath;
use sluice_shared::ids::OffsetRange;

use super::batch::{Batch, Run, chunk_bytes};
use super::delta::{DataFile, DeltaError, FileStats, Place, Shape};
use super::dictionary;
use crate::threads;

/// Rows go to the writer in portions of at least so many: statistics are taken per portion.
const PORTION_ROWS: usize = 8192;
/// A row group's rows at most.
const ROW_GROUP_ROWS: usize = 1 << 20;
/// And its bytes, about: until a group is closed it is in memory, and then for a moment twice.
const ROW_GROUP_BYTES: usize = 32 << 20;
/// Pieces in which a file is in memory: one that grows as a whole takes up to twice its length, and is copied to grow.
const PIECE_BYTES: usize = 1 << 20;

/// The columns that let any reader prove and sort by order.
pub fn system_fields() -> [Field; 3] {
    let utc = DataType::Timestamp(TimeUnit::Microsecond, Some("UTC".into()));
    [
        Field::new("_stream", DataType::Utf8, true),
        Field::new("_offset", DataType::Int64, true),
        Field::new("_ingested_at", utc, true),
    ]
}

/// Whether a table has the system columns.
pub fn has_system_columns(schema: &Schema) -> bool {
    let has = |field: &Field| {
        schema.field_with_name(field.name()).is_ok_and(|f| f.data_type() == field.data_type())
    };
    system_fields().iter().all(has)
}

/// A table's columns without the system columns.
pub fn producers_schema(schema: &SchemaRef) -> SchemaRef {
    if !has_system_columns(schema) {
        return Arc::clone(schema);
    }
    let system = system_fields();
    let is_system = |name: &str| system.iter().any(|field| field.name() == name);
    let fields = schema.fields().iter().filter(|field| !is_system(field.name())).cloned();
    Arc::new(Schema::new(fields.collect::<Vec<_>>()))
}

/// Why rows could not become files.
#[derive(Debug, thiserror::Error)]
pub enum EncodeError {
    /// The rows do not fit the table as it is now.
    #[error(transparent)]
    Misfit(#[from] Misfit),
    /// Delta's side.
    #[error(transparent)]
    Delta(#[from] DeltaError),
    /// Arrow's side.
    #[error("rows: {0}")]
    Arrow(#[from] ArrowError),
    /// Parquet's side.
    #[error("parquet: {0}")]
    Parquet(#[from] ParquetError),
}

/// Rows of an older schema that cannot be cast.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("column `{column}`: {why}")]
pub struct Misfit {
    /// Which column.
    pub column: String,
    /// Why its values do not fit.
    pub why: String,
}

/// A run's offsets from `from` to its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Piece {
    /// Index of the run in its batch.
    pub run: usize,
    /// First offset to take.
    pub from: u64,
}

/// Rows to write: some runs' ends, by rising run.
#[derive(Debug, Clone)]
pub struct Source {
    /// Where the rows are.
    pub batch: Arc<Batch>,
    /// Which of them.
    pub pieces: Vec<Piece>,
}

impl Source {
    fn rows(&self) -> usize {
        let rows = self.pieces.iter().map(|piece| {
            let run = &self.batch.runs[piece.run];
            run.rows() - rows_before(run, piece.from)
        });
        rows.sum()
    }
}

/// A file's bytes, not yet stored.
pub struct Encoded {
    /// Where it goes.
    pub path: Path,
    /// Its bytes.
    pub content: PutPayload,
    name: String,
    place: Place,
    stats: FileStats,
}

impl Encoded {
    /// The file, once its `content` of so many `bytes` is stored.
    ///
    /// # Errors
    /// Where its statistics cannot be made.
    pub fn into_file(self, bytes: u64) -> Result<DataFile, DeltaError> {
        self.place.file(&self.name, bytes, self.stats)
    }
}

/// Encodes rows: a file for each combination of partition values. Takes long: call it on a blocking thread.
///
/// # Errors
/// `Misfit` where rows do not fit the table; else a broken invariant.
pub fn encode(shape: &Shape, sources: &[Source]) -> Result<Vec<Encoded>, EncodeError> {
    threads::give_way();
    let mut files = Files::new(shape, sources.iter().map(Source::rows).sum())?;
    let mut portion = Portion::default();
    for source in sources {
        for rows in source_rows(shape, source)? {
            if let Some(rows) = portion.add(rows, PORTION_ROWS)? {
                files.write(&rows)?;
            }
        }
    }
    if let Some(rows) = portion.rest()? {
        files.write(&rows)?;
    }
    files.finish()
}

/// Encodes rows that have the table's columns already.
///
/// # Errors
/// A broken invariant.
pub fn encode_rows(shape: &Shape, rows: &RecordBatch) -> Result<Vec<Encoded>, EncodeError> {
    let mut files = Files::new(shape, rows.num_rows())?;
    files.write(rows)?;
    files.finish()
}

/// Which runs of a batch do not fit the table as it is now: none in steady state, found by schema alone.
pub fn misfits(shape: &Shape, batch: &Batch) -> Vec<(usize, Misfit)> {
    let target = producers_schema(&shape.schema);
    if batch.chunks.iter().all(|chunk| align(&target, chunk).is_ok()) {
        return Vec::new();
    }
    let runs = batch.runs.iter().enumerate().filter_map(|(index, run)| {
        let slices = slices(batch, run_rows(batch, index, run.offsets.start));
        let misfit = slices.iter().find_map(|rows| align(&target, rows).err())?;
        Some((index, misfit))
    });
    runs.collect()
}

/// Whether a batch may have rows that no partition takes.
pub fn has_unplaced(shape: &Shape, batch: &Batch) -> bool {
    let target = producers_schema(&shape.schema);
    // Where a run fits no more the others are looked at one by one.
    let takes_all = |chunk| align(&target, chunk).is_ok_and(|rows| placed(shape, &rows).is_none());
    !shape.partition_columns.is_empty() && !batch.chunks.iter().all(takes_all)
}

/// Offsets of a run from `from` on whose rows no partition takes. The run must be no misfit.
pub fn unplaced(shape: &Shape, batch: &Batch, run: usize, from: u64) -> Vec<OffsetRange> {
    let target = producers_schema(&shape.schema);
    let (slices, offsets) = run_slices(batch, run, OffsetRange { start: from, ..batch.runs[run].offsets });
    let takes = slices.iter().flat_map(|rows| match align(&target, rows).map(|rows| placed(shape, &rows)) {
        Ok(Some(placed)) => placed.iter().collect(),
        _ => vec![true; rows.num_rows()],
    });
    let mut unplaced: Vec<OffsetRange> = Vec::new();
    for (offset, _) in offsets.into_iter().zip(takes).filter(|(_, takes)| !takes) {
        match unplaced.last_mut() {
            Some(last) if last.end == offset => last.end += 1,
            _ => unplaced.push(OffsetRange { start: offset, end: offset + 1 }),
        }
    }
    unplaced
}

/// Which rows have partition values that Delta has a text for, and so a partition; None where all have.
fn placed(shape: &Shape, rows: &RecordBatch) -> Option<BooleanBuffer> {
    let columns = shape.partition_columns.iter().filter_map(|name| {
        let field = shape.schema.field_with_name(name).ok()?;
        let column = rows.column_by_name(name)?;
        // Empty texts and bytes are null to Delta.
        let fits = |bytes: &[u8]| field.is_nullable() || !bytes.is_empty();
        let placed = |takes: &dyn Fn(usize) -> bool| {
            BooleanBuffer::collect_bool(rows.num_rows(), |row| column.is_null(row) || takes(row))
        };
        match field.data_type() {
            DataType::Utf8 if !field.is_nullable() => {
                let texts = column.as_string::<i32>();
                Some(placed(&|row| fits(texts.value(row).as_bytes())))
            }
            DataType::Binary => {
                let values = column.as_binary::<i32>();
                Some(placed(&|row| fits(values.value(row)) && str::from_utf8(values.value(row)).is_ok()))
            }
            _ => None,
        }
    });
    let placed = columns.reduce(|a, b| &a & &b)?;
    (placed.count_set_bits() < rows.num_rows()).then_some(placed)
}

/// A run's rows at these offsets, and which of the offsets have one.
pub fn run_slices(batch: &Batch, run: usize, offsets: OffsetRange) -> (Vec<RecordBatch>, Vec<u64>) {
    let row_offsets: Vec<u64> = row_offsets(&batch.runs[run], offsets).collect();
    let rows = run_rows(batch, run, offsets.start);
    (slices(batch, rows.start..rows.start + row_offsets.len()), row_offsets)
}

fn row_offsets(run: &Run, offsets: OffsetRange) -> impl Iterator<Item = u64> {
    let refused = &run.refused[run.refused.partition_point(|refusal| refusal.offset < offsets.start)..];
    let mut refused = refused.iter().map(|refusal| refusal.offset).peekable();
    (offsets.start..offsets.end).filter(move |offset| refused.next_if_eq(offset).is_none())
}

fn run_rows(batch: &Batch, index: usize, from: u64) -> Range<usize> {
    let first: usize = batch.runs[..index].iter().map(Run::rows).sum();
    let run = &batch.runs[index];
    first + rows_before(run, from)..first + run.rows()
}

fn rows_before(run: &Run, from: u64) -> usize {
    let refused = run.refused.partition_point(|refusal| refusal.offset < from);
    usize::try_from(from - run.offsets.start).unwrap_or(usize::MAX) - refused
}

fn slices(batch: &Batch, rows: Range<usize>) -> Vec<RecordBatch> {
    let (mut first, mut slices) = (0, Vec::new());
    for chunk in &batch.chunks {
        let end = first + chunk.num_rows();
        let (from, to) = (rows.start.max(first), rows.end.min(end));
        if from < to {
            slices.push(chunk.slice(from - first, to - from));
        }
        first = end;
    }
    slices
}

/// Neighbouring rows of one batch, with their system columns.
struct Segment {
    rows: Range<usize>,
    streams: StringBuilder,
    offsets: Vec<i64>,
}

fn segments(source: &Source) -> Vec<Segment> {
    let mut segments: Vec<Segment> = Vec::new();
    let (mut first, mut pieces) = (0, source.pieces.iter().peekable());
    for (index, run) in source.batch.runs.iter().enumerate() {
        let end = first + run.rows();
        if let Some(piece) = pieces.next_if(|piece| piece.run == index) {
            let rows = first + rows_before(run, piece.from)..end;
            match segments.last_mut() {
                Some(last) if last.rows.end == rows.start => last.rows.end = rows.end,
                _ => segments.push(Segment {
                    rows: rows.clone(),
                    streams: StringBuilder::new(),
                    offsets: Vec::new(),
                }),
            }
            let segment = segments.last_mut().expect("just made");
            rows.for_each(|_| segment.streams.append_value(run.stream.as_str()));
            let offsets = row_offsets(run, OffsetRange { start: piece.from, ..run.offsets });
            segment.offsets.extend(offsets.map(|offset| i64::try_from(offset).unwrap_or(i64::MAX)));
        }
        first = end;
    }
    segments
}

fn source_rows(shape: &Shape, source: &Source) -> Result<Vec<RecordBatch>, EncodeError> {
    let target = producers_schema(&shape.schema);
    let with_system = has_system_columns(&shape.schema);
    let mut rows = Vec::new();
    for mut segment in segments(source) {
        let count = segment.rows.len();
        let ingested_at = TimestampMicrosecondArray::from_value(source.batch.ingested_at_us, count);
        let system: [ArrayRef; 3] = [
            Arc::new(segment.streams.finish()),
            Arc::new(Int64Array::from(std::mem::take(&mut segment.offsets))),
            Arc::new(ingested_at.with_timezone("UTC")),
        ];
        let mut first = 0;
        for slice in slices(&source.batch, segment.rows.clone()) {
            let aligned = align(&target, &slice)?;
            let columns = if with_system {
                let system = system.each_ref().map(|column| column.slice(first, slice.num_rows()));
                with_system_columns(&shape.schema, &aligned, system)
            } else {
                aligned.columns().to_vec()
            };
            first += slice.num_rows();
            rows.push(RecordBatch::try_new(Arc::clone(&shape.schema), columns)?);
        }
    }
    Ok(rows)
}

fn with_system_columns(schema: &Schema, rows: &RecordBatch, system: [ArrayRef; 3]) -> Vec<ArrayRef> {
    let named: HashMap<String, ArrayRef> =
        system_fields().into_iter().map(|field| field.name().clone()).zip(system).collect();
    let mut own = rows.columns().iter();
    let columns = schema.fields().iter().map(|field| match named.get(field.name()) {
        Some(column) => Arc::clone(column),
        None => Arc::clone(own.next().expect("the producers' columns are the others")),
    });
    columns.collect()
}

/// Rows as the table has them now: by name, missing ones null, cast where no value is lost.
fn align(target: &SchemaRef, rows: &RecordBatch) -> Result<RecordBatch, Misfit> {
    let misfit = |column: &str, why: String| Misfit { column: column.to_owned(), why };
    let schema = rows.schema();
    for (field, column) in schema.fields().iter().zip(rows.columns()) {
        if target.field_with_name(field.name()).is_err() && column.null_count() < column.len() {
            return Err(misfit(field.name(), "the table has no such column any more".to_owned()));
        }
    }
    let columns = target.fields().iter().map(|field| {
        let column = match rows.column_by_name(field.name()) {
            Some(column) => cast(column, field)?,
            None => new_null_array(field.data_type(), rows.num_rows()),
        };
        if !field.is_nullable() && column.null_count() > 0 {
            return Err(misfit(field.name(), "the table allows no nulls in it".to_owned()));
        }
        Ok(column)
    });
    let columns = columns.collect::<Result<Vec<_>, Misfit>>()?;
    let options = RecordBatchOptions::new().with_row_count(Some(rows.num_rows()));
    RecordBatch::try_new_with_options(Arc::clone(target), columns, &options)
        .map_err(|error| misfit("(all)", error.to_string()))
}

fn cast(column: &ArrayRef, field: &Field) -> Result<ArrayRef, Misfit> {
    let (from, to) = (column.data_type(), field.data_type());
    if from == to {
        return Ok(Arc::clone(column));
    }
    let misfit = |why: String| Misfit { column: field.name().clone(), why };
    if !can_cast_types(from, to) {
        return Err(misfit(format!("{from} cannot become the table's {to}")));
    }
    let options = CastOptions { safe: false, ..CastOptions::default() };
    cast_with_options(column, to, &options).map_err(|error| misfit(error.to_string()))
}

/// Gathers small slices.
#[derive(Default)]
struct Portion {
    rows: Vec<RecordBatch>,
    count: usize,
}

impl Portion {
    fn add(&mut self, rows: RecordBatch, enough: usize) -> Result<Option<RecordBatch>, ArrowError> {
        self.count += rows.num_rows();
        self.rows.push(rows);
        if self.count < enough { Ok(None) } else { self.rest() }
    }

    fn rest(&mut self) -> Result<Option<RecordBatch>, ArrowError> {
        self.count = 0;
        let rows = std::mem::take(&mut self.rows);
        match &rows[..] {
            [] => Ok(None),
            [only] => Ok(Some(only.clone())),
            [first, ..] => concat_batches(&first.schema(), &rows).map(Some),
        }
    }
}

/// What a writer has written so far.
#[derive(Default)]
struct Pieces {
    full: Vec<Bytes>,
    last: Vec<u8>,
}

impl Write for Pieces {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let (taken, _) = bytes.split_at(bytes.len().min(PIECE_BYTES - self.last.len()));
        self.last.extend_from_slice(taken);
        if self.last.len() == PIECE_BYTES {
            self.full.push(std::mem::take(&mut self.last).into());
        }
        Ok(taken.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl From<Pieces> for PutPayload {
    fn from(pieces: Pieces) -> Self {
        pieces.full.into_iter().chain([pieces.last.into()]).collect()
    }
}

struct FileWriter {
    name: String,
    place: Place,
    stats: FileStats,
    writer: ArrowWriter<Pieces>,
    /// Which columns statistics are taken of.
    file_indices: Arc<[usize]>,
}

/// How a file of about so many rows is written, by the first of them.
///
/// # Errors
/// A broken invariant.
pub fn properties(first: &RecordBatch, rows: usize) -> Result<WriterProperties, EncodeError> {
    let bytes = chunk_bytes(first).max(1);
    let group_rows = ROW_GROUP_BYTES.saturating_mul(first.num_rows()) / bytes;
    let mut properties = WriterProperties::builder()
        .set_compression(Compression::ZSTD(ZstdLevel::try_new(1)?))
        .set_statistics_enabled(EnabledStatistics::Chunk)
        .set_max_row_group_row_count(Some(ROW_GROUP_ROWS))
        .set_max_row_group_bytes(Some(ROW_GROUP_BYTES))
        .set_created_by(concat!("sluice ", env!("CARGO_PKG_VERSION")).to_owned());
    for column in dictionary::without(first, rows.min(group_rows).min(ROW_GROUP_ROWS))? {
        properties = properties.set_column_dictionary_enabled(ColumnPath::new(vec![column]), false);
    }
    Ok(properties.build())
}

impl FileWriter {
    /// Where the directory does not tell the partition values the file has them too: other readers than those that
    /// go by paths alone are to pass over them.
    fn new(
        shape: &Shape,
        place: Place,
        file_indices: Arc<[usize]>,
        properties: WriterProperties,
    ) -> Result<Self, EncodeError> {
        let options = ArrowWriterOptions::new().with_properties(properties).with_skip_arrow_metadata(true);
        let schema = if place.tells_values { &shape.file_schema } else { &shape.schema };
        let writer = ArrowWriter::try_new_with_options(Pieces::default(), Arc::clone(schema), options)?;
        let name = format!("part-{}.parquet", uuid::Uuid::now_v7());
        Ok(Self { name, stats: place.stats(), place, writer, file_indices })
    }

    fn write(&mut self, rows: &RecordBatch) -> Result<(), EncodeError> {
        let in_file = rows.project(&self.file_indices)?;
        self.stats.merge(&in_file)?;
        Ok(self.writer.write(if self.place.tells_values { &in_file } else { rows })?)
    }

    fn finish(self) -> Result<Encoded, EncodeError> {
        let content = self.writer.into_inner()?.into();
        let path = self.place.path(&self.name)?;
        Ok(Encoded { path, content, name: self.name, place: self.place, stats: self.stats })
    }
}

/// One open file for each combination of partition values.
struct Files<'a> {
    shape: &'a Shape,
    /// Of all files together.
    rows: usize,
    partition_indices: Vec<usize>,
    file_indices: Arc<[usize]>,
    keys: Option<RowConverter>,
    open: HashMap<Box<[u8]>, FileWriter>,
}

impl<'a> Files<'a> {
    fn new(shape: &'a Shape, rows: usize) -> Result<Self, EncodeError> {
        let index = |name: &String| shape.schema.index_of(name);
        let partition_indices =
            shape.partition_columns.iter().map(index).collect::<Result<Vec<usize>, ArrowError>>()?;
        let file_indices =
            (0..shape.schema.fields().len()).filter(|i| !partition_indices.contains(i)).collect();
        let fields =
            partition_indices.iter().map(|i| SortField::new(shape.schema.field(*i).data_type().clone()));
        let keys =
            (!partition_indices.is_empty()).then(|| RowConverter::new(fields.collect())).transpose()?;
        Ok(Self { shape, rows, partition_indices, file_indices, keys, open: HashMap::new() })
    }

    /// Passes over rows that no partition takes: they are set aside.
    fn write(&mut self, rows: &RecordBatch) -> Result<(), EncodeError> {
        let Some(keys) = &self.keys else {
            return self.write_to(Box::default(), rows, &[], 0);
        };
        let placed = placed(self.shape, rows).map(|placed| filter_record_batch(rows, &placed.into()));
        let rows = placed.transpose()?.map_or(Cow::Borrowed(rows), Cow::Owned);
        let rows = rows.as_ref();
        let columns: Vec<ArrayRef> =
            self.partition_indices.iter().map(|index| Arc::clone(rows.column(*index))).collect();
        let converted = keys.convert_columns(&columns)?;
        let mut groups: HashMap<Box<[u8]>, Vec<u64>> = HashMap::new();
        for (row, key) in (0u64..).zip(converted.iter()) {
            match groups.get_mut(key.as_ref()) {
                Some(group) => group.push(row),
                None => drop(groups.insert(key.as_ref().into(), vec![row])),
            }
        }
        for (key, group) in groups {
            let first = usize::try_from(group[0]).unwrap_or(usize::MAX);
            let rows = if group.len() == rows.num_rows() {
                rows.clone()
            } else {
                take_record_batch(rows, &UInt64Array::from(group))?
            };
            self.write_to(key, &rows, &columns, first)?;
        }
        Ok(())
    }

    fn write_to(
        &mut self,
        key: Box<[u8]>,
        rows: &RecordBatch,
        columns: &[ArrayRef],
        row: usize,
    ) -> Result<(), EncodeError> {
        let file = match self.open.entry(key) {
            std::collections::hash_map::Entry::Occupied(open) => open.into_mut(),
            std::collections::hash_map::Entry::Vacant(vacant) => {
                let place = self.shape.place(columns, row)?;
                let properties = properties(rows, self.rows)?;
                let indices = Arc::clone(&self.file_indices);
                vacant.insert(FileWriter::new(self.shape, place, indices, properties)?)
            }
        };
        file.write(rows)
    }

    fn finish(self) -> Result<Vec<Encoded>, EncodeError> {
        self.open.into_values().map(FileWriter::finish).collect()
    }
}

#[cfg(test)]
mod tests {
    use arrow::array::StringArray;
    use parquet::file::reader::{FileReader, SerializedFileReader};

    use super::*;

    #[test]
    fn columns_whose_values_hardly_come_again_are_smaller_without_a_dictionary() {
        let ids = (0..40_000u64).map(|number| format!("{:032x}", number.wrapping_mul(0x9e37_79b9_7f4a_7c15)));
        let ids: ArrayRef = Arc::new(StringArray::from_iter_values(ids));
        let regions = (0..40_000).map(|number| ["eu-west", "us-east", "ap-south"][number % 3]);
        let regions: ArrayRef = Arc::new(StringArray::from_iter_values(regions));
        let rows = RecordBatch::try_from_iter([("id", ids), ("region", regions)]).expect("a batch");
        let sizes = |properties| {
            let mut writer = ArrowWriter::try_new(Vec::new(), rows.schema(), Some(properties)).expect("fits");
            writer.write(&rows).expect("in memory");
            let file = SerializedFileReader::new(Bytes::from(writer.into_inner().expect("in memory")));
            let file = file.expect("a file");
            let columns = file.metadata().row_group(0).columns();
            let [id, region] = columns else { panic!("{} columns", columns.len()) };
            let has = [id, region].map(|column| column.dictionary_page_offset().is_some());
            (has, [id, region].map(|column| column.compressed_size()))
        };
        let zstd = Compression::ZSTD(ZstdLevel::try_new(1).expect("a level"));
        let (all, with) = sizes(WriterProperties::builder().set_compression(zstd).build());
        let (own, without) = sizes(properties(&rows.slice(0, PORTION_ROWS), rows.num_rows()).expect("fit"));
        assert_eq!((all, own), ([true, true], [false, true]));
        assert!(without[0] <= with[0] && without[1] == with[1], "{without:?} with {with:?}");
    }
}
