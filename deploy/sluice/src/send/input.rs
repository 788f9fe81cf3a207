//! What is to be sent: a file or standard input as pieces of NDJSON or Arrow batches, in order.
//!
//! *Owns*: recognising the format, reading it in bounded pieces.
//! *Does not own*: streams. Reading blocks: it runs on a thread of its own.

use std::fs::File;
use std::io::{Cursor, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use arrow::array::RecordBatch;
use arrow::csv;
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use arrow::ipc::reader::{FileReader, StreamReader};
use bytes::{Bytes, BytesMut};
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use regex::Regex;

/// NDJSON is read in pieces of about this size.
const PIECE_BYTES: usize = 256 << 10;
/// As much of an input is looked at to recognise it, and to infer the types of CSV.
const HEAD_BYTES: usize = 1 << 20;
/// Longest line: what the gateway takes at most, and some.
const LINE_BYTES_MAX: usize = 64 << 20;

/// How records are written down.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Format {
    /// One JSON object a line.
    Ndjson,
    /// Comma-separated values with a header line.
    Csv,
    /// Apache Parquet.
    Parquet,
    /// Arrow IPC, file or stream.
    Arrow,
}

/// Consecutive records.
#[derive(Debug)]
pub(crate) enum Piece {
    /// Whole lines.
    Json(Bytes),
    /// Rows.
    Batch(RecordBatch),
}

/// An input that has been recognised.
pub(crate) struct Input {
    /// The columns; None for NDJSON.
    pub(crate) schema: Option<SchemaRef>,
    /// Its pieces.
    pub(crate) pieces: Box<dyn Iterator<Item = Result<Piece>> + Send>,
}

impl std::fmt::Debug for Input {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Input").field("schema", &self.schema).finish_non_exhaustive()
    }
}

/// Opens `file`, or standard input where it is None.
pub(crate) fn open(file: Option<PathBuf>, format: Option<Format>, batch_rows: usize) -> Result<Input> {
    let Some(path) = file else {
        return read_from(std::io::stdin(), format, batch_rows).context("standard input");
    };
    let what = path.display().to_string();
    let opened = File::open(&path).with_context(|| format!("cannot open {what}"))?;
    if opened.metadata().is_ok_and(|metadata| metadata.is_dir()) {
        bail!("{what} is a directory: name a file, or `-` for standard input");
    }
    open_file(opened, format.or_else(|| by_extension(&path)), batch_rows).context(what)
}

fn open_file(mut file: File, format: Option<Format>, batch_rows: usize) -> Result<Input> {
    let format = match format {
        Some(format) => format,
        None => by_content(&head(&mut file)?),
    };
    // A pipe cannot be rewound, and has no end to read a footer from.
    if file.rewind().is_err() {
        return read_from(file, Some(format), batch_rows);
    }
    match format {
        Format::Parquet => parquet(file, batch_rows),
        Format::Arrow => {
            let is_file = head_of(&mut file, 6)? == b"ARROW1";
            file.seek(SeekFrom::Start(0))?;
            if is_file { arrow_file(file) } else { arrow_stream(file) }
        }
        other => read_from(file, Some(other), batch_rows),
    }
}

fn read_from(
    mut reader: impl Read + Send + 'static,
    format: Option<Format>,
    batch_rows: usize,
) -> Result<Input> {
    if format == Some(Format::Ndjson) {
        // Lines go out as they come: a slow source must not wait for a full head.
        return Ok(Input { schema: None, pieces: Box::new(Lines::new(reader)) });
    }
    let head = head(&mut reader)?;
    let format = format.unwrap_or_else(|| by_content(&head));
    match format {
        Format::Ndjson => {
            Ok(Input { schema: None, pieces: Box::new(Lines::new(Cursor::new(head).chain(reader))) })
        }
        Format::Csv => csv_input(head, reader, batch_rows),
        Format::Arrow if !head.starts_with(b"ARROW1") => arrow_stream(Cursor::new(head).chain(reader)),
        Format::Arrow => arrow_file(Cursor::new(whole(head, reader)?)),
        Format::Parquet => parquet(whole(head, reader)?, batch_rows),
    }
}

fn head(reader: &mut impl Read) -> Result<Vec<u8>> {
    head_of(reader, HEAD_BYTES)
}

fn head_of(reader: &mut impl Read, bytes: usize) -> Result<Vec<u8>> {
    let mut head = Vec::new();
    reader.take(bytes as u64).read_to_end(&mut head).context("cannot read")?;
    Ok(head)
}

/// Formats with a footer need all of it.
fn whole(mut head: Vec<u8>, mut reader: impl Read) -> Result<Bytes> {
    reader.read_to_end(&mut head).context("cannot read")?;
    Ok(head.into())
}

fn by_extension(path: &Path) -> Option<Format> {
    match path.extension()?.to_str()?.to_ascii_lowercase().as_str() {
        "ndjson" | "jsonl" | "json" => Some(Format::Ndjson),
        "csv" => Some(Format::Csv),
        "parquet" | "pq" => Some(Format::Parquet),
        "arrow" | "arrows" | "ipc" | "feather" => Some(Format::Arrow),
        _ => None,
    }
}

fn by_content(head: &[u8]) -> Format {
    if head.starts_with(b"PAR1") {
        Format::Parquet
    } else if head.starts_with(b"ARROW1") || head.starts_with(&[0xff; 4]) {
        Format::Arrow
    } else if head.trim_ascii_start().first().is_none_or(|first| *first == b'{') {
        Format::Ndjson
    } else {
        Format::Csv
    }
}

fn parquet(reader: impl parquet::file::reader::ChunkReader + 'static, batch_rows: usize) -> Result<Input> {
    let builder = ParquetRecordBatchReaderBuilder::try_new(reader).context("not a Parquet file")?;
    let schema = Arc::clone(builder.schema());
    let reader = builder.with_batch_size(batch_rows).build().context("not a Parquet file")?;
    Ok(batches(schema, reader))
}

fn arrow_file(reader: impl Read + Seek + Send + 'static) -> Result<Input> {
    let reader = FileReader::try_new(reader, None).context("not an Arrow IPC file")?;
    Ok(batches(reader.schema(), reader))
}

fn arrow_stream(reader: impl Read + Send + 'static) -> Result<Input> {
    let reader = StreamReader::try_new(reader, None).context("not an Arrow IPC stream")?;
    Ok(batches(reader.schema(), reader))
}

fn csv_input(head: Vec<u8>, reader: impl Read + Send + 'static, batch_rows: usize) -> Result<Input> {
    let nulls = Regex::new("^(NA)?$").context("the pattern of missing values")?;
    let format = csv::reader::Format::default().with_header(true).with_null_regex(nulls.clone());
    // Only whole lines: half a value would be of another type.
    let lines_end = head.iter().rposition(|b| *b == b'\n').map_or(head.len(), |at| at + 1);
    let (inferred, _) =
        format.infer_schema(&head[..lines_end], None).context("not CSV with a header line")?;
    let fields = inferred.fields().iter().map(|field| match field.data_type() {
        DataType::Null => Arc::new(Field::new(field.name(), DataType::Utf8, true)),
        _ => Arc::new(field.as_ref().clone().with_nullable(true)),
    });
    let schema = Arc::new(Schema::new(fields.collect::<Vec<_>>()));
    let reader = csv::ReaderBuilder::new(Arc::clone(&schema))
        .with_header(true)
        .with_null_regex(nulls)
        .with_batch_size(batch_rows)
        .build(Cursor::new(head).chain(reader))
        .context("not CSV with a header line")?;
    Ok(batches(schema, reader))
}

fn batches<E>(
    schema: SchemaRef,
    reader: impl Iterator<Item = Result<RecordBatch, E>> + Send + 'static,
) -> Input
where
    E: std::error::Error + Send + Sync + 'static,
{
    let pieces = reader.map(|batch| batch.map(Piece::Batch).context("cannot read the next records"));
    Input { schema: Some(schema), pieces: Box::new(pieces) }
}

/// Whole lines in pieces; what one read brings goes out at once.
struct Lines<R> {
    reader: R,
    rest: BytesMut,
    ended: bool,
}

impl<R: Read> Lines<R> {
    fn new(reader: R) -> Self {
        Self { reader, rest: BytesMut::new(), ended: false }
    }

    fn next_piece(&mut self) -> Result<Option<Bytes>> {
        while !self.ended {
            let held = self.rest.len();
            self.rest.resize(held + PIECE_BYTES, 0);
            let read = self.reader.read(&mut self.rest[held..]);
            let read = match read {
                Ok(read) => read,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {
                    self.rest.truncate(held);
                    continue;
                }
                Err(error) => return Err(error).context("cannot read the next records"),
            };
            self.rest.truncate(held + read);
            self.ended = read == 0;
            if let Some(at) = self.rest[held..].iter().rposition(|b| *b == b'\n') {
                return Ok(Some(self.rest.split_to(held + at + 1).freeze()));
            }
            if self.rest.len() > LINE_BYTES_MAX {
                bail!("a line of more than {} MiB: is this newline-delimited JSON?", LINE_BYTES_MAX >> 20);
            }
        }
        let last = self.rest.split().freeze();
        Ok((!last.is_empty()).then_some(last))
    }
}

impl<R: Read> Iterator for Lines<R> {
    type Item = Result<Piece>;

    fn next(&mut self) -> Option<Self::Item> {
        self.next_piece().map(|piece| piece.map(Piece::Json)).transpose()
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use arrow::array::{Array, AsArray};
    use arrow::datatypes::Int64Type;
    use arrow::ipc::writer::{FileWriter, StreamWriter};
    use parquet::arrow::ArrowWriter;

    use super::*;

    fn file(bytes: &[u8]) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new().expect("temporary file");
        file.write_all(bytes).expect("written");
        file
    }

    fn rows(input: Input) -> Vec<RecordBatch> {
        let batch = |piece: Result<Piece>| match piece.expect("readable") {
            Piece::Batch(batch) => batch,
            Piece::Json(_) => panic!("JSON"),
        };
        input.pieces.map(batch).collect()
    }

    fn sample() -> RecordBatch {
        let input = read_from(&b"n,text\n1,a\nNA,b\n3,\n"[..], None, 8192).expect("CSV");
        rows(input).remove(0)
    }

    #[test]
    fn csv_has_types_and_missing_values() {
        let batch = sample();
        assert_eq!(batch.schema().field(0).data_type(), &DataType::Int64);
        let numbers = batch.column(0).as_primitive::<Int64Type>();
        assert_eq!(numbers.iter().collect::<Vec<_>>(), [Some(1), None, Some(3)]);
        assert!(batch.column(1).is_null(2), "an empty value is a missing one");
    }

    #[test]
    fn formats_are_recognised_by_content() {
        let batch = sample();
        let (mut stream, mut whole, mut parquet) = (Vec::new(), Vec::new(), Vec::new());
        let mut writer = StreamWriter::try_new(&mut stream, &batch.schema()).expect("writer");
        writer.write(&batch).and_then(|()| writer.finish()).expect("written");
        let mut writer = FileWriter::try_new(&mut whole, &batch.schema()).expect("writer");
        writer.write(&batch).and_then(|()| writer.finish()).expect("written");
        let mut writer = ArrowWriter::try_new(&mut parquet, batch.schema(), None).expect("writer");
        writer.write(&batch).expect("written");
        writer.close().expect("written");
        for bytes in [stream, whole, parquet] {
            let file = file(&bytes);
            assert_eq!(
                rows(open(Some(file.path().into()), None, 8192).expect("known")),
                std::slice::from_ref(&batch)
            );
            assert_eq!(
                rows(read_from(Cursor::new(bytes), None, 8192).expect("known")),
                std::slice::from_ref(&batch)
            );
        }
    }

    #[test]
    fn lines_are_never_torn() {
        /// Gives a few bytes at a time.
        struct Drip(Cursor<Vec<u8>>);
        impl Read for Drip {
            fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
                let few = buffer.len().min(3);
                self.0.read(&mut buffer[..few])
            }
        }
        let text = b"{\"a\":1}\n\n{\"a\":22}\n{\"a\":333}".to_vec();
        let pieces: Vec<Bytes> = Lines::new(Drip(Cursor::new(text.clone())))
            .map(|piece| match piece.expect("readable") {
                Piece::Json(lines) => lines,
                Piece::Batch(_) => panic!("batch"),
            })
            .collect();
        assert_eq!(pieces.concat(), text);
        assert!(pieces[..pieces.len() - 1].iter().all(|piece| piece.ends_with(b"\n")));
    }

    #[test]
    fn what_cannot_be_read_is_named() {
        for (path, expected) in [("/no/such/file", "cannot open /no/such/file"), ("/", "is a directory")] {
            let error = format!("{:#}", open(Some(path.into()), None, 1).expect_err(path));
            assert!(error.contains(expected), "{error}");
        }
        let not_parquet = open(Some(file(b"PAR1 but no more").path().into()), None, 1).expect_err("broken");
        assert!(format!("{not_parquet:#}").contains("not a Parquet file"), "{not_parquet:#}");
    }
}
