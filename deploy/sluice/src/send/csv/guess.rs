//! The columns of a table that does not exist yet, from the first rows of a CSV file.
//!
//! *Owns*: which type all cells of a column are of. A core.
//! *Does not own*: whether the columns make a table: the pod says so.
//!
//! Nothing is guessed that would lose something: a number with zeros in front, or with more digits than int64 holds, is
//! text (it is likely to be a code), and a column of mixed values is text. Timestamps with `Z` or an offset are
//! `timestamp`, those without are `timestamp_ntz`.

use std::io::Read;
use std::sync::Arc;

use anyhow::Result;
use arrow::datatypes::{DataType, Field, Schema, SchemaRef, TimeUnit};
use chrono::{DateTime, NaiveDate, NaiveDateTime};
use sluice_shared::table::types;

use super::rows::Rows;
use super::{is_json_number, is_missing};

/// What the cells of a column have been so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Nothing,
    Bool,
    Int,
    Float,
    Date,
    Timestamp,
    TimestampNtz,
    Text,
}

/// The columns that the header names. Rows of another length are passed over: they are refused when they are sent.
pub(super) fn schema(mut rows: Rows<impl Read>) -> Result<SchemaRef> {
    let mut columns: Vec<(String, Kind)> = Vec::new();
    if let Some(header) = rows.next_row()? {
        let name = |cell: &[u8]| (String::from_utf8_lossy(cell).into_owned(), Kind::Nothing);
        columns = header.cells.iter().map(name).collect();
    }
    while let Some(row) = rows.next_row()? {
        if row.is_open || row.cells.count() != columns.len() {
            continue;
        }
        for ((_, kind), cell) in columns.iter_mut().zip(row.cells.iter()) {
            if *kind != Kind::Text && !is_missing(cell) {
                *kind = kind.joined(kind_of(cell));
            }
        }
    }
    let field = |(name, kind): (String, Kind)| Field::new(name, kind.data_type(), true);
    Ok(Arc::new(Schema::new(columns.into_iter().map(field).collect::<Vec<_>>())))
}

impl Kind {
    fn joined(self, other: Self) -> Self {
        match (self, other) {
            (Self::Nothing, kind) => kind,
            (Self::Int, Self::Float) | (Self::Float, Self::Int) => Self::Float,
            (one, other) if one == other => one,
            _ => Self::Text,
        }
    }

    fn data_type(self) -> DataType {
        match self {
            Self::Nothing | Self::Text => DataType::Utf8,
            Self::Bool => DataType::Boolean,
            Self::Int => DataType::Int64,
            Self::Float => DataType::Float64,
            Self::Date => DataType::Date32,
            Self::Timestamp => types::timestamp_utc(),
            Self::TimestampNtz => DataType::Timestamp(TimeUnit::Microsecond, None),
        }
    }
}

fn kind_of(cell: &[u8]) -> Kind {
    let Ok(text) = std::str::from_utf8(cell) else { return Kind::Text };
    if is_json_number(cell) {
        let is_whole = !text.contains(['.', 'e', 'E']);
        return match (is_whole, text.parse::<i64>().is_ok(), text.parse::<f64>()) {
            (true, true, _) => Kind::Int,
            (false, _, Ok(number)) if number.is_finite() => Kind::Float,
            _ => Kind::Text,
        };
    }
    if text.eq_ignore_ascii_case("true") || text.eq_ignore_ascii_case("false") {
        return Kind::Bool;
    }
    time_kind(text).unwrap_or(Kind::Text)
}

fn time_kind(text: &str) -> Option<Kind> {
    let date = text.get(..10)?;
    date.parse::<NaiveDate>().ok().filter(|_| date.as_bytes()[4] == b'-' && date.as_bytes()[7] == b'-')?;
    if text.len() == 10 {
        return Some(Kind::Date);
    }
    if !matches!(text.as_bytes()[10], b'T' | b't' | b' ') || is_finer_than_micro(text) {
        return None;
    }
    let text = format!("{date}T{}", text.get(11..)?);
    if DateTime::parse_from_rfc3339(&text).is_ok() {
        return Some(Kind::Timestamp);
    }
    let has_seconds = text.as_bytes().get(16) == Some(&b':') && text.len() >= 19;
    NaiveDateTime::parse_from_str(&text, "%Y-%m-%dT%H:%M:%S%.f").ok().filter(|_| has_seconds)?;
    Some(Kind::TimestampNtz)
}

fn is_finer_than_micro(text: &str) -> bool {
    let fraction = text.split_once('.').map_or("", |(_, fraction)| fraction);
    let digits = fraction.bytes().take_while(u8::is_ascii_digit);
    digits.skip(6).any(|digit| digit != b'0')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(cells: &[&str], expected: &str) {
        let text = format!("c,d\n{}", cells.iter().map(|cell| format!("{cell},x\n")).collect::<String>());
        let schema = schema(Rows::new(text.as_bytes())).expect("readable");
        assert_eq!(types::text(schema.field(0).data_type()), expected, "{cells:?}");
    }

    #[test]
    fn a_type_fits_all_cells() {
        check(&["1", "-20", "NA", ""], "int64");
        check(&["1", "2.5", "1e3"], "float64");
        check(&["true", "FALSE"], "bool");
        check(&["", "NA"], "string");
        check(&["1", "x"], "string");
        check(&["2013-01-01"], "date");
        check(&["2013-01-01", "2013-02-30"], "string");
        check(&["2013-1-1", "20130101x"], "string");
    }

    #[test]
    fn what_would_lose_something_is_text() {
        check(&["08540", "10001"], "string");
        check(&["123456789012345678901"], "string");
        check(&["2013-01-01 00:00:00.123456789Z"], "string");
        check(&["1e999"], "string");
    }

    #[test]
    fn a_zone_makes_the_timestamp() {
        check(&["2026-01-01 00:00:00.000000Z", "2026-01-01T01:00:00+01:00"], "timestamp");
        check(&["2026-01-01 00:00:00", "2026-01-01T00:00:00.5"], "timestamp_ntz");
        check(&["2026-01-01 00:00:00", "2026-01-01 00:00:00Z"], "string");
        check(&["2026-01-01 00:00", "2026-01-01"], "string");
    }

    #[test]
    fn rows_of_another_length_say_nothing() {
        let schema = schema(Rows::new(&b"a,b\n1,2\nx\n3,4,5\n"[..])).expect("readable");
        assert_eq!(schema.field(0).data_type(), &DataType::Int64);
    }
}
