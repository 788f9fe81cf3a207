//! CSV files as records.
//!
//! *Owns*: pieces of records and their lines.
//! *Does not own*: cutting rows (`rows`), types of a table that does not exist (`guess`), how cells are written
//! (`sluice_shared::csv`).

mod guess;
mod rows;

use std::io::{Cursor, Read};

use anyhow::{Result, anyhow};
use arrow::datatypes::SchemaRef;
use bytes::Bytes;
use sluice_shared::csv::{Columns, HeaderMisfit};

use super::piece::{Payload, Piece};
use rows::Rows;

/// Records go out in pieces of about this size.
const PIECE_BYTES: usize = 256 << 10;

/// What is known of the table before the file is read.
pub(crate) struct Table {
    /// Its columns; None where it does not exist.
    pub(crate) schema: Option<SchemaRef>,
    /// Whether columns that it does not have are left out.
    pub(crate) ignore_unknown: bool,
}

/// The records of a CSV input.
pub(super) struct Records<R> {
    rows: Rows<R>,
    columns: Columns,
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
        let schema = table.schema.as_ref().or(guessed.as_ref());
        let header = rows.next_row()?.map(|row| row.cells);
        let columns = match (header, schema) {
            (Some(header), Some(schema)) => {
                Some(Columns::new(header, Some(schema), table.ignore_unknown).map_err(advised)?)
            }
            _ => None,
        };
        let guessed = guessed.filter(|_| columns.is_some());
        Ok((guessed, Self { rows, columns: columns.unwrap_or_default() }))
    }
}

type Chain<R> = std::io::Chain<Cursor<Bytes>, R>;

fn advised(misfit: HeaderMisfit) -> anyhow::Error {
    match misfit {
        HeaderMisfit::Unknown { .. } => {
            anyhow!("{misfit}: mend the header, or leave such columns out with --unknown ignore")
        }
        other => other.into(),
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
            self.columns.write_row(&mut text, row.cells);
            text.push(b'\n');
        }
        Ok((!places.is_empty()).then(|| Piece { payload: Payload::Json(text.into()), places }))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::datatypes::{DataType, Field, Schema};
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
