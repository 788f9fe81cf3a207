//! CSV (RFC 4180, with a header line) as JSON records, each cell written as its column's type wants it.
//!
//! *Owns*: which cell becomes which JSON value, headers that do not fit the table.
//! *Does not own*: reading and cutting text; types of a table that does not exist; the verdict on a value: what is no
//! number in a column of numbers goes out as a string, and the pod refuses that record by column and value.
//!
//! An empty cell and `NA` are no value. Lists, maps and structs are written in JSON.

mod cells;

use std::collections::HashSet;

use arrow::datatypes::{DataType, Schema};
use serde::de::IgnoredAny;

pub use cells::Cells;

/// What some programs put before UTF-8.
pub const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// A header line that cannot be taken.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HeaderMisfit {
    /// A name stands there twice.
    #[error("the header line names column {0:?} twice")]
    Twice(String),
    /// The table has no such column.
    #[error("the header line names column {column:?}, which the table does not have (it has {known})")]
    Unknown {
        /// As the header has it.
        column: String,
        /// The table's columns, joined by commas.
        known: String,
    },
    /// A column that may not be null is not named.
    #[error("the header line does not name column {0:?}, which may not be null in the table")]
    Missing(String),
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
    /// There is no table that says it: numbers and truth values as they stand, all else as text.
    AsItStands,
}

#[derive(Debug)]
struct Column {
    /// The name as a JSON string, and a colon.
    key: Vec<u8>,
    written: Written,
}

/// The columns that a header line names.
#[derive(Debug, Default)]
pub struct Columns {
    columns: Vec<Column>,
}

impl Columns {
    /// Of a header, for a table with this schema; without one cells are written as they stand.
    ///
    /// # Errors
    /// The header names a column twice, or does not fit the table.
    pub fn new(header: &Cells, table: Option<&Schema>, ignore_unknown: bool) -> Result<Self, HeaderMisfit> {
        let header: Vec<String> =
            header.iter().map(|cell| String::from_utf8_lossy(cell).into_owned()).collect();
        let mut seen = HashSet::new();
        if let Some(twice) = header.iter().find(|name| !seen.insert(name.as_str())) {
            return Err(HeaderMisfit::Twice(twice.clone()));
        }
        if let Some(table) = table {
            check_fit(&header, table, ignore_unknown)?;
        }
        let column = |name: &String| {
            let mut key = Vec::new();
            write_text(&mut key, name.as_bytes());
            key.push(b':');
            let of_field = |table: &Schema| {
                table.field_with_name(name).map_or(Written::Text, |field| written(field.data_type()))
            };
            Column { key, written: table.map_or(Written::AsItStands, of_field) }
        };
        Ok(Self { columns: header.iter().map(column).collect() })
    }

    /// Appends a row as one line of JSON, without its end. A row of another length than the header, and one whose
    /// quote is never closed, become a text that names the fault: no object, so that the pod refuses it, and offsets
    /// keep counting rows.
    pub fn write_row(&self, out: &mut Vec<u8>, cells: &Cells) {
        let expected = self.columns.len();
        if cells.is_open() {
            write_text(out, b"a row with a quote that is never closed");
        } else if cells.count() == expected {
            write_record(out, &self.columns, cells);
        } else {
            let fault = format!("a row of {} cells, where the header has {expected}", cells.count());
            write_text(out, fault.as_bytes());
        }
    }
}

fn check_fit(header: &[String], table: &Schema, ignore_unknown: bool) -> Result<(), HeaderMisfit> {
    let is_unknown = |name: &&String| table.field_with_name(name).is_err();
    if !ignore_unknown && let Some(unknown) = header.iter().find(is_unknown) {
        let known = table.fields().iter().map(|field| field.name().as_str()).collect::<Vec<_>>().join(", ");
        return Err(HeaderMisfit::Unknown { column: unknown.clone(), known });
    }
    let mut needed = table.fields().iter().filter(|field| !field.is_nullable());
    match needed.find(|field| !header.contains(field.name())) {
        Some(missing) => Err(HeaderMisfit::Missing(missing.name().clone())),
        None => Ok(()),
    }
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

/// Whether a cell is no value.
pub fn is_missing(cell: &[u8]) -> bool {
    cell.is_empty() || cell == b"NA"
}

fn write_cell(out: &mut Vec<u8>, written: Written, cell: &[u8]) {
    let plain = cell.trim_ascii();
    let as_it_stands = match written {
        Written::Text => None,
        Written::Number => json_number(plain),
        Written::Time => Some(plain).filter(|cell| is_whole_number(cell)),
        Written::Bool => truth(plain),
        Written::AsItStands if is_json_number(plain) => Some(plain),
        Written::AsItStands => truth(plain),
        Written::Json => Some(plain).filter(|cell| is_json_line(cell)),
    };
    match as_it_stands {
        Some(value) => out.extend_from_slice(value),
        None if matches!(written, Written::Text | Written::AsItStands) => write_text(out, cell),
        None => write_text(out, plain),
    }
}

fn truth(cell: &[u8]) -> Option<&'static [u8]> {
    if cell.eq_ignore_ascii_case(b"true") {
        return Some(b"true");
    }
    cell.eq_ignore_ascii_case(b"false").then_some(b"false")
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

/// Whether a cell is a number by RFC 8259 section 6.
pub fn is_json_number(cell: &[u8]) -> bool {
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
    use arrow::datatypes::Field;

    use super::*;

    fn row(line: &str, table: Option<&Schema>) -> String {
        let (mut header, mut cells, mut out) = (Cells::default(), Cells::default(), Vec::new());
        header.take_line(b"a,b");
        cells.take_line(line.as_bytes());
        Columns::new(&header, table, false).expect("fits").write_row(&mut out, &cells);
        String::from_utf8(out).expect("text")
    }

    #[test]
    fn cells_are_written_as_their_columns_want_them() {
        let fields = vec![Field::new("a", DataType::Utf8, true), Field::new("b", DataType::Int64, true)];
        let table = Schema::new(fields);
        assert_eq!(row("007,007", Some(&table)), r#"{"a":"007","b":7}"#);
        assert_eq!(row("true,x", Some(&table)), r#"{"a":"true","b":"x"}"#);
    }

    #[test]
    fn without_a_table_nothing_is_lost() {
        assert_eq!(row("007, 7", None), r#"{"a":"007","b":7}"#);
        assert_eq!(row("True, x ", None), r#"{"a":true,"b":" x "}"#);
        assert_eq!(row("NA,1e3", None), r#"{"b":1e3}"#);
        assert_eq!(row("1", None), r#""a row of 1 cells, where the header has 2""#);
        assert_eq!(row("1,\"2", None), r#""a row with a quote that is never closed""#);
    }
}
