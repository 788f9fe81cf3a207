//! What is to be sent: a file or standard input as pieces of JSON records or Arrow batches, in order.
//!
//! *Owns*: recognising the format, reading what has a schema of its own.
//! *Does not own*: text (`json`, `csv`), streams. Reading blocks: it runs on a thread of its own.

use std::fs::File;
use std::io::{Cursor, Read, Seek};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use arrow::array::RecordBatch;
use arrow::datatypes::SchemaRef;
use arrow::ipc::reader::{FileReader, StreamReader};
use bytes::Bytes;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use sluice_client::Encoding;

use super::csv;
use super::json::{Lines, Values};
use super::piece::{Payload, Piece};

/// As much of an input is looked at to recognise it, and to guess the types of CSV.
const HEAD_BYTES: usize = 1 << 20;

/// How records are written down.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Format {
    /// One JSON object a line; an array of objects, and objects over several lines, are read too.
    Ndjson,
    /// Comma-separated values with a header line.
    Csv,
    /// Apache Parquet.
    Parquet,
    /// Arrow IPC, file or stream.
    Arrow,
}

/// What is known of an input before it is read.
pub(crate) struct Wanted {
    /// None: by content, then by the file's name.
    pub(crate) format: Option<Format>,
    /// Rows in a batch.
    pub(crate) batch_rows: usize,
    /// Asks for the table; only CSV has to know it.
    pub(crate) table: Box<dyn FnOnce() -> Result<csv::Table> + Send>,
}

/// An input that has been recognised.
pub(crate) struct Input {
    /// What to make the table from, where it does not exist.
    pub(crate) schema: Option<SchemaRef>,
    /// What the pieces hold.
    pub(crate) encoding: Encoding,
    /// What the places of records count.
    pub(crate) unit: &'static str,
    /// Its pieces.
    pub(crate) pieces: Pieces,
}

type Pieces = Box<dyn Iterator<Item = Result<Piece>> + Send>;

impl std::fmt::Debug for Input {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Input").field("schema", &self.schema).finish_non_exhaustive()
    }
}

/// Opens `file`, or standard input where it is None.
pub(crate) fn open(file: Option<PathBuf>, wanted: Wanted) -> Result<Input> {
    let Some(path) = file else {
        return read_from(std::io::stdin(), wanted).context("standard input");
    };
    let what = path.display().to_string();
    let opened = File::open(&path).with_context(|| format!("cannot open {what}"))?;
    if opened.metadata().is_ok_and(|metadata| metadata.is_dir()) {
        bail!("{what} is a directory: name a file, or `-` for standard input");
    }
    open_file(opened, &path, wanted).context(what)
}

fn open_file(mut file: File, path: &Path, mut wanted: Wanted) -> Result<Input> {
    // A pipe cannot be rewound, and has no end to read a footer from.
    if !file.metadata().is_ok_and(|metadata| metadata.is_file()) {
        wanted.format = wanted.format.or_else(|| by_extension(path));
        return read_from(file, wanted);
    }
    let head = head(&mut file)?;
    file.rewind().context("cannot read")?;
    match format(&wanted, Some(path), &head)? {
        Format::Parquet => parquet(file, wanted.batch_rows),
        Format::Arrow if head.starts_with(b"ARROW1") => arrow_file(file),
        Format::Arrow => arrow_stream(file),
        Format::Ndjson => Ok(json(&head, file)),
        Format::Csv => csv_input(Vec::new(), file, wanted.table),
    }
}

fn read_from(mut reader: impl Read + Send + 'static, wanted: Wanted) -> Result<Input> {
    if wanted.format == Some(Format::Ndjson) {
        // Lines go out as they come: a slow source must not wait for a full head.
        return Ok(text(None, Box::new(Lines::new(reader))));
    }
    let head = head(&mut reader)?;
    match format(&wanted, None, &head)? {
        Format::Ndjson => Ok(json(&head.clone(), Cursor::new(head).chain(reader))),
        Format::Csv => csv_input(head, reader, wanted.table),
        Format::Arrow if !head.starts_with(b"ARROW1") => arrow_stream(Cursor::new(head).chain(reader)),
        Format::Arrow => arrow_file(Cursor::new(whole(head, reader)?)),
        Format::Parquet => parquet(whole(head, reader)?, wanted.batch_rows),
    }
}

fn head(reader: &mut impl Read) -> Result<Vec<u8>> {
    let mut head = Vec::new();
    reader.take(HEAD_BYTES as u64).read_to_end(&mut head).context("cannot read")?;
    Ok(head)
}

/// Formats with a footer need all of it.
fn whole(mut head: Vec<u8>, mut reader: impl Read) -> Result<Bytes> {
    reader.read_to_end(&mut head).context("cannot read")?;
    Ok(head.into())
}

/// What the bytes prove counts most, then what the caller says, then the file's name, then what the text looks like.
fn format(wanted: &Wanted, path: Option<&Path>, head: &[u8]) -> Result<Format> {
    let proven = by_magic(head);
    match (wanted.format, proven) {
        (Some(said @ (Format::Ndjson | Format::Csv)), Some(proven)) => {
            bail!("--format says {said:?}, but this is {proven:?}: leave --format away")
        }
        (Some(said), _) => Ok(said),
        (None, Some(proven)) => Ok(proven),
        (None, None) if let Some(coding) = compressed(head) => {
            bail!("this is {coding}: decompress it first, as in `{} -dc FILE | sluice send TABLE`", coding)
        }
        (None, None) => Ok(path.and_then(by_extension).unwrap_or_else(|| by_text(head))),
    }
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

fn by_magic(head: &[u8]) -> Option<Format> {
    if head.starts_with(b"PAR1") {
        Some(Format::Parquet)
    } else if head.starts_with(b"ARROW1") || head.starts_with(&[0xff; 4]) {
        Some(Format::Arrow)
    } else {
        None
    }
}

fn compressed(head: &[u8]) -> Option<&'static str> {
    let codings =
        [(&b"\x1f\x8b"[..], "gzip"), (b"\x28\xb5\x2f\xfd", "zstd"), (b"BZh", "bzip2"), (b"\xfd7zXZ", "xz")];
    codings.iter().find(|(magic, _)| head.starts_with(magic)).map(|(_, coding)| *coding)
}

fn by_text(head: &[u8]) -> Format {
    let text = head.trim_ascii_start();
    let second = text.get(1..).unwrap_or_default().trim_ascii_start().first();
    match (text.first(), second) {
        (None | Some(b'{'), _) | (Some(b'['), None | Some(b'{' | b']')) => Format::Ndjson,
        _ => Format::Csv,
    }
}

/// A record a line, unless the head shows an array, or an object that does not end in its line.
fn json(head: &[u8], reader: impl Read + Send + 'static) -> Input {
    let begun = head.trim_ascii_start();
    let first_line = begun.split(|b| *b == b'\n').next().unwrap_or_default();
    if begun.starts_with(b"[") {
        text(None, Box::new(Values::new(reader, true)))
    } else if first_line.trim_ascii() == b"{" {
        text(None, Box::new(Values::new(reader, false)))
    } else {
        text(None, Box::new(Lines::new(reader)))
    }
}

fn csv_input(
    mut head_read: Vec<u8>,
    mut reader: impl Read + Send + 'static,
    table: impl FnOnce() -> Result<csv::Table>,
) -> Result<Input> {
    if head_read.is_empty() {
        head_read = head(&mut reader)?;
    }
    let (schema, records) = csv::Records::open(head_read, reader, &table()?)?;
    Ok(text(schema, Box::new(records)))
}

fn text(schema: Option<SchemaRef>, pieces: Pieces) -> Input {
    Input { schema, encoding: Encoding::Json, unit: "line", pieces }
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

fn batches<E>(
    schema: SchemaRef,
    reader: impl Iterator<Item = Result<RecordBatch, E>> + Send + 'static,
) -> Input
where
    E: std::error::Error + Send + Sync + 'static,
{
    let mut next_row = 1;
    let pieces = reader.map(move |batch| {
        let rows = batch.context("cannot read the next records")?;
        let first = next_row;
        next_row += rows.num_rows() as u64;
        Ok(Piece { payload: Payload::Batch(rows), places: (first..next_row).collect() })
    });
    Input { schema: Some(schema), encoding: Encoding::Arrow, unit: "row", pieces: Box::new(pieces) }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use arrow::array::{ArrayRef, Int64Array, StringArray};
    use arrow::ipc::writer::{FileWriter, StreamWriter};
    use parquet::arrow::ArrowWriter;

    use super::*;

    fn file(bytes: &[u8], suffix: &str) -> tempfile::NamedTempFile {
        let mut file = tempfile::Builder::new().suffix(suffix).tempfile().expect("temporary file");
        file.write_all(bytes).expect("written");
        file
    }

    fn wanted(format: Option<Format>) -> Wanted {
        let table = Box::new(|| Ok(csv::Table { schema: None, ignore_unknown: false }));
        Wanted { format, batch_rows: 8192, table }
    }

    fn rows(input: Input) -> Vec<RecordBatch> {
        let batch = |piece: Result<Piece>| match piece.expect("readable").payload {
            Payload::Batch(batch) => batch,
            Payload::Json(_) => panic!("JSON"),
        };
        input.pieces.map(batch).collect()
    }

    fn texts(input: Input) -> String {
        let text = |piece: Result<Piece>| match piece.expect("readable").payload {
            Payload::Json(text) => String::from_utf8(text.to_vec()).expect("UTF-8"),
            Payload::Batch(_) => panic!("a batch"),
        };
        input.pieces.map(text).collect()
    }

    /// Parquet, and Arrow as a file and as a stream.
    fn binary_forms(batch: &RecordBatch) -> [Vec<u8>; 3] {
        let (mut stream, mut whole, mut parquet) = (Vec::new(), Vec::new(), Vec::new());
        let mut writer = StreamWriter::try_new(&mut stream, &batch.schema()).expect("writer");
        writer.write(batch).and_then(|()| writer.finish()).expect("written");
        let mut writer = FileWriter::try_new(&mut whole, &batch.schema()).expect("writer");
        writer.write(batch).and_then(|()| writer.finish()).expect("written");
        let mut writer = ArrowWriter::try_new(&mut parquet, batch.schema(), None).expect("writer");
        writer.write(batch).expect("written");
        writer.close().expect("written");
        [stream, whole, parquet]
    }

    #[test]
    fn formats_are_recognised_by_content_whatever_the_name() {
        let numbers: ArrayRef = Arc::new(Int64Array::from(vec![Some(1), None]));
        let names: ArrayRef = Arc::new(StringArray::from(vec!["a", "b"]));
        let batch = RecordBatch::try_from_iter([("n", numbers), ("text", names)]).expect("fits");
        for bytes in binary_forms(&batch) {
            for name in ["", ".ndjson", ".csv"] {
                let file = file(&bytes, name);
                let input = open(Some(file.path().into()), wanted(None)).expect("known");
                assert_eq!(input.unit, "row");
                assert_eq!(rows(input), std::slice::from_ref(&batch));
            }
            let piped = read_from(Cursor::new(bytes.clone()), wanted(None)).expect("known");
            assert_eq!(rows(piped), std::slice::from_ref(&batch));
            let file = file(&bytes, "");
            let error =
                open(Some(file.path().into()), wanted(Some(Format::Ndjson))).expect_err("contradicts");
            assert!(format!("{error:#}").contains("--format says Ndjson, but this is"), "{error:#}");
        }
    }

    #[test]
    fn text_is_recognised_too() {
        for (text, expected) in [
            ("{\"a\":1}\n{\"a\":2}\n", "{\"a\":1}\n{\"a\":2}\n"),
            ("\n[\n{\"a\":1},\n{\"a\":2}]", "{\"a\":1}\n{\"a\":2}\n"),
            ("[]", ""),
            ("{\n\"a\":1\n}\n", "{ \"a\":1 }\n"),
            ("a\n1\n", "{\"a\":1}\n"),
            ("[a],b\n1,2\n", "{\"[a]\":1,\"b\":2}\n"),
            ("", ""),
        ] {
            assert_eq!(texts(read_from(text.as_bytes(), wanted(None)).expect(text)), expected, "{text}");
            let file = file(text.as_bytes(), "");
            assert_eq!(texts(open(Some(file.path().into()), wanted(None)).expect(text)), expected, "{text}");
        }
    }

    #[test]
    fn what_cannot_be_read_is_named() {
        for (path, expected) in [("/no/such/file", "cannot open /no/such/file"), ("/", "is a directory")] {
            let error = format!("{:#}", open(Some(path.into()), wanted(None)).expect_err(path));
            assert!(error.contains(expected), "{error}");
        }
        let broken = file(b"PAR1 but no more", ".parquet");
        let error = open(Some(broken.path().into()), wanted(None)).expect_err("broken");
        assert!(format!("{error:#}").contains("not a Parquet file"), "{error:#}");
    }
}
