//! CSV input (RFC 4180, with a header line) as JSON records, each cell written as its column's type wants it.
//!
//! *Owns*: which cell becomes which JSON value, headers that do not fit the table.
//! *Does not own*: cutting rows (`rows`), types of a table that does not exist (`guess`), the verdict on a value: what
//! is no number in a column of numbers goes out as a string, and the pod refuses that record by column and value.
//!
//! An empty cell and `NA` are no value. Lists, maps and structs are written in JSON.

mod guess;
mod rows;

use std::collections::HashSet;
use std::io::{Cursor, Read};

use anyhow::{Result, bail};
use arrow::datatypes::{DataType, SchemaRef};
use bytes::Bytes;
use serde::de::IgnoredAny;

use super::piece::{Payload, Piece};
use rows::{Cells, Rows};

/// Records go out in pieces of about this size.
const PIECE_BYTES: usize = 256 << 10;

/// What is known of the table before the file is read.
pub(crate) struct Table {
    /// Its columns; None where it does not exist.
    pub(crate) schema: Option<SchemaRef>,
    /// Whether columns that it does not have are left out.
    pub(crate) ignore_unknown: bool,
}

/// How a cell of a column is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Written {
    Text,
    Bool,
    Number,
    /// A date or timestamp: text, or a count of days or microseconds.
    Time,
    Json,
}

struct Column {
    /// The name as a JSON string, and a colon.
    key: Vec<u8>,
    written: Written,
}

/// The records of a CSV input.
pub(super) struct Records<R> {
    rows: Rows<R>,
    columns: Vec<Column>,
}

impl<R: Read> Records<Chain<R>> {
    /// Begins with the `head` that has been read of the input. Answers the columns of a table that does not exist yet,
    /// guessed from the head.
    ///
    /// # Errors
    /// The header names a column twice, or does not fit the table.
    pub(super) fn open(head: Vec<u8>, rest: R, table: &Table) -> Result<(Option<SchemaRef>, Self)> {
        // Only whole lines: half a value would be of another type.
        let lines_end = head.iter().rposition(|b| *b == b'\n').map_or(head.len(), |at| at + 1);
        let guessed = match table.schema {
            Some(_) => None,
            None => Some(guess::schema(Rows::new(&head[..lines_end]))?),
        };
        let mut rows = Rows::new(Cursor::new(Bytes::from(head)).chain(rest));
        let mut header = Vec::new();
        if let Some(row) = rows.next_row()? {
            header = row.cells.iter().map(|cell| String::from_utf8_lossy(cell).into_owned()).collect();
        }
        let schema = table.schema.as_ref().or(guessed.as_ref());
        let columns = match schema {
            Some(schema) if !header.is_empty() => columns(&header, schema, table.ignore_unknown)?,
            _ => Vec::new(),
        };
        let is_empty = columns.is_empty();
        Ok((guessed.filter(|_| !is_empty), Self { rows, columns }))
    }
}

type Chain<R> = std::io::Chain<Cursor<Bytes>, R>;

fn columns(header: &[String], schema: &SchemaRef, ignore_unknown: bool) -> Result<Vec<Column>> {
    let mut seen = HashSet::new();
    if let Some(twice) = header.iter().find(|name| !seen.insert(name.as_str())) {
        bail!("the header line names column {twice:?} twice");
    }
    let of_table = || schema.fields().iter().map(|field| field.name().as_str());
    if !ignore_unknown && let Some(unknown) = header.iter().find(|name| schema.field_with_name(name).is_err())
    {
        let known = of_table().collect::<Vec<_>>().join(", ");
        bail!(
            "the header line names column {unknown:?}, which the table does not have (it has {known}): mend the \
             header, or leave such columns out with --unknown ignore"
        );
    }
    let is_missing = |name: &&str| !seen.contains(*name);
    let needed =
        schema.fields().iter().filter(|field| !field.is_nullable()).map(|field| field.name().as_str());
    if let Some(missing) = needed.clone().find(is_missing) {
        bail!("the header line does not name column {missing:?}, which may not be null in the table");
    }
    let column = |name: &String| {
        let mut key = Vec::new();
        write_text(&mut key, name.as_bytes());
        key.push(b':');
        Column {
            key,
            written: schema.field_with_name(name).map_or(Written::Text, |field| written(field.data_type())),
        }
    };
    Ok(header.iter().map(column).collect())
}

fn written(data_type: &DataType) -> Written {
    match data_type {
        DataType::Boolean => Written::Bool,
        DataType::Date32 | DataType::Timestamp(..) => Written::Time,
        DataType::List(_) | DataType::Map(..) | DataType::Struct(_) => Written::Json,
        DataType::Decimal128(..) => Written::Number,
        other if other.is_numeric() => Written::Number,
        _ => Written::Text,
    }
}

impl<R: Read> Iterator for Records<R> {
    type Item = Result<Piece>;

    fn next(&mut self) -> Option<Self::Item> {
        self.next_piece().transpose()
    }
}

impl<R: Read> Records<R> {
    fn next_piece(&mut self) -> Result<Option<Piece>> {
        let (mut text, mut places) = (Vec::new(), Vec::new());
        while text.len() < PIECE_BYTES
            && let Some(row) = self.rows.next_row()?
        {
            places.push(row.line);
            let columns = self.columns.len();
            if row.is_open {
                write_text(&mut text, b"a row with a quote that is never closed");
            } else if row.cells.count() == columns {
                write_record(&mut text, &self.columns, row.cells);
            } else {
                // No object, so that the pod refuses it: offsets keep counting the rows of the file.
                let fault = format!("a row of {} cells, where the header has {columns}", row.cells.count());
                write_text(&mut text, fault.as_bytes());
            }
            text.push(b'\n');
        }
        Ok((!places.is_empty()).then(|| Piece { payload: Payload::Json(text.into()), places }))
    }
}

fn write_record(out: &mut Vec<u8>, columns: &[Column], cells: &Cells) {
    out.push(b'{');
    let begin = out.len();
    for (column, cell) in columns.iter().zip(cells.iter()) {
        if is_missing(cell) {
            continue;
        }
        if out.len() > begin {
            out.push(b',');
        }
        out.extend_from_slice(&column.key);
        write_cell(out, column.written, cell);
    }
    out.push(b'}');
}

fn is_missing(cell: &[u8]) -> bool {
    cell.is_empty() || cell == b"NA"
}

fn write_cell(out: &mut Vec<u8>, written: Written, cell: &[u8]) {
    let plain = cell.trim_ascii();
    let as_it_stands = match written {
        Written::Text => None,
        Written::Number => json_number(plain),
        Written::Time => Some(plain).filter(|cell| is_whole_number(cell)),
        Written::Bool if plain.eq_ignore_ascii_case(b"true") => Some(&b"true"[..]),
        Written::Bool if plain.eq_ignore_ascii_case(b"false") => Some(&b"false"[..]),
        Written::Bool => None,
        Written::Json => Some(plain).filter(|cell| is_json_line(cell)),
    };
    match as_it_stands {
        Some(value) => out.extend_from_slice(value),
        None if written == Written::Text => write_text(out, cell),
        None => write_text(out, plain),
    }
}

/// The cell as JSON writes numbers, where it is one: without a plus, and without zeros in front.
fn json_number(cell: &[u8]) -> Option<&[u8]> {
    if is_json_number(cell) {
        return Some(cell);
    }
    let unsigned = cell.strip_prefix(b"+").unwrap_or(cell);
    let zeros = unsigned.iter().take_while(|b| **b == b'0').count();
    // A zero before the end of the whole part stays.
    let stripped = &unsigned[zeros..];
    let start =
        if stripped.first().is_some_and(u8::is_ascii_digit) { zeros } else { zeros.saturating_sub(1) };
    Some(&unsigned[start..]).filter(|cell| is_json_number(cell))
}

/// RFC 8259 section 6.
fn is_json_number(cell: &[u8]) -> bool {
    let digits = |text: &[u8]| text.iter().take_while(|b| b.is_ascii_digit()).count();
    let mut rest = cell.strip_prefix(b"-").unwrap_or(cell);
    let whole = digits(rest);
    if whole == 0 || (whole > 1 && rest[0] == b'0') {
        return false;
    }
    rest = &rest[whole..];
    if let Some(fraction) = rest.strip_prefix(b".") {
        let count = digits(fraction);
        if count == 0 {
            return false;
        }
        rest = &fraction[count..];
    }
    let Some(exponent) = rest.strip_prefix(b"e").or_else(|| rest.strip_prefix(b"E")) else {
        return rest.is_empty();
    };
    let exponent = exponent.strip_prefix(b"-").or_else(|| exponent.strip_prefix(b"+")).unwrap_or(exponent);
    digits(exponent) > 0 && digits(exponent) == exponent.len()
}

fn is_whole_number(cell: &[u8]) -> bool {
    is_json_number(cell) && cell.iter().all(|b| b.is_ascii_digit() || *b == b'-')
}

/// A line end within it would end the record.
fn is_json_line(cell: &[u8]) -> bool {
    !cell.contains(&b'\n') && serde_json::from_slice::<IgnoredAny>(cell).is_ok()
}

/// Writes a JSON string. Bytes that are not UTF-8 stay: the pod names them.
fn write_text(out: &mut Vec<u8>, text: &[u8]) {
    out.push(b'"');
    let mut start = 0;
    for (at, byte) in text.iter().enumerate() {
        if !matches!(byte, b'"' | b'\\' | 0..=0x1f) {
            continue;
        }
        out.extend_from_slice(&text[start..at]);
        match byte {
            b'"' => out.extend_from_slice(b"\\\""),
            b'\\' => out.extend_from_slice(b"\\\\"),
            other => out.extend_from_slice(format!("\\u{other:04x}").as_bytes()),
        }
        start = at + 1;
    }
    out.extend_from_slice(&text[start..]);
    out.push(b'"');
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::datatypes::{Field, Schema};
    use sluice_shared::frame::lines;
    use sluice_shared::table::types;

    use super::*;

    /// A table of `name type` columns; `!` behind the type: may not be null.
    fn table(columns: &[(&str, &str)]) -> Table {
        let field = |(name, text): &(&str, &str)| {
            let (text, nullable) = text.strip_suffix('!').map_or((*text, true), |text| (text, false));
            Field::new(*name, types::parse(text).expect("a type"), nullable)
        };
        let schema = Arc::new(Schema::new(columns.iter().map(field).collect::<Vec<_>>()));
        Table { schema: Some(schema), ignore_unknown: false }
    }

    /// Line and text of each record.
    type Got = Vec<(u64, String)>;

    fn open(text: &str, table: &Table) -> Result<(Option<SchemaRef>, Got)> {
        let (schema, records) = Records::open(text.as_bytes().to_vec(), std::io::empty(), table)?;
        let mut got = Vec::new();
        for piece in records {
            let piece = piece?;
            let Payload::Json(text) = &piece.payload else { panic!("a batch") };
            let texts = lines(text).map(|line| String::from_utf8_lossy(line).into_owned());
            assert_eq!(lines(text).count(), piece.places.len());
            got.extend(piece.places.iter().copied().zip(texts));
        }
        Ok((schema, got))
    }

    #[test]
    fn cells_are_written_as_their_columns_want_them() {
        for (column, cell, expected) in [
            ("int64", "-12", "-12"),
            ("int64", "007", "7"),
            ("int64", "+5", "5"),
            ("int64", "0", "0"),
            ("int64", "00", "0"),
            ("int64", " 8 ", "8"),
            ("int64", "1.5", "1.5"),
            ("int64", "1,200", "\"1,200\""),
            ("int64", "--1", "\"--1\""),
            ("float64", "1e-3", "1e-3"),
            ("float64", "00.5", "0.5"),
            ("float64", "1.", "\"1.\""),
            ("float64", "NaN", "\"NaN\""),
            ("decimal(10,2)", "19.90", "19.90"),
            ("bool", "TRUE", "true"),
            ("bool", "yes", "\"yes\""),
            ("string", "12", "\"12\""),
            ("string", " a\"b\\\n", "\" a\\\"b\\\\\\u000a\""),
            ("date", "2013-01-31", "\"2013-01-31\""),
            ("date", "15000", "15000"),
            ("timestamp", "2026-01-01 00:00:00.000000Z", "\"2026-01-01 00:00:00.000000Z\""),
            ("timestamp", "1767225600000000", "1767225600000000"),
            ("list<int64>", "[1, 2]", "[1, 2]"),
            ("list<int64>", "1;2", "\"1;2\""),
        ] {
            let quoted = format!("c\n\"{}\"\n", cell.replace('"', "\"\""));
            let (schema, got) = open(&quoted, &table(&[("c", column)])).expect("fits");
            assert_eq!(
                (schema, got),
                (None, vec![(2, format!("{{\"c\":{expected}}}"))]),
                "{cell} in {column}"
            );
        }
    }

    #[test]
    fn what_is_missing_is_left_out_and_what_is_ragged_is_no_object() {
        let text = "\u{feff}a,b\r\n1,x\r\n\r\nNA,\r\n1,2,3\r\n\"4\",\"two\nlines\"\r\n5\r\n6,\"open\n";
        let (_, got) = open(text, &table(&[("a", "int64"), ("b", "string")])).expect("fits");
        let got: Vec<(u64, &str)> = got.iter().map(|(line, text)| (*line, text.as_str())).collect();
        let expected = [
            (2, "{\"a\":1,\"b\":\"x\"}"),
            (4, "{}"),
            (5, "\"a row of 3 cells, where the header has 2\""),
            (6, "{\"a\":4,\"b\":\"two\\u000alines\"}"),
            (8, "\"a row of 1 cells, where the header has 2\""),
            (9, "\"a row with a quote that is never closed\""),
        ];
        assert_eq!(got, expected);
    }

    #[test]
    fn a_header_that_does_not_fit_is_refused_at_once() {
        let mut table = table(&[("a", "int64!"), ("b", "string")]);
        for (text, expected) in [
            ("a,a\n", "column \"a\" twice"),
            ("a,c\n1,2\n", "column \"c\", which the table does not have (it has a, b)"),
            ("b\nx\n", "does not name column \"a\""),
        ] {
            let error = open(text, &table).expect_err(text).to_string();
            assert!(error.contains(expected), "{error}");
        }
        table.ignore_unknown = true;
        assert_eq!(open("a,c\n1,2\n", &table).expect("ignores").1.len(), 1);
    }

    #[test]
    fn a_table_that_does_not_exist_gets_its_columns_from_the_head() {
        let none = Table { schema: None, ignore_unknown: false };
        let (schema, got) = open("n,t\n1,2026-01-01 00:00:00.000000Z\nNA,\n", &none).expect("fits");
        let schema = schema.expect("guessed");
        assert_eq!(schema.field(0).data_type(), &DataType::Int64);
        assert_eq!(schema.field(1).data_type(), &types::timestamp_utc());
        assert_eq!(got.len(), 2);
        assert_eq!(open("", &none).expect("empty"), (None, Vec::new()));
    }
}
