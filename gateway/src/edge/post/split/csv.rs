//! CSV with a header line: each row becomes a JSON record.
//!
//! *Owns*: the line that has begun, the header, blank lines. A core.
//! *Does not own*: cells and how they are written (`sluice_shared::csv`), frames (`split`).

use arrow::datatypes::SchemaRef;
use sluice_shared::csv::{BYTE_ORDER_MARK, Cells, Columns};
use sluice_shared::error::Error;

use super::Ready;

/// Cuts rows.
#[derive(Debug)]
pub(crate) struct Csv {
    table: Option<SchemaRef>,
    ignore_unknown: bool,
    /// Once the header has come.
    columns: Option<Columns>,
    /// Of the row that has begun.
    cells: Cells,
    /// The line that has begun.
    rest: Vec<u8>,
    /// Lines that were taken.
    lines: u64,
}

impl Csv {
    pub(super) fn new(table: Option<SchemaRef>, ignore_unknown: bool) -> Self {
        Self { table, ignore_unknown, columns: None, cells: Cells::default(), rest: Vec::new(), lines: 0 }
    }

    pub(super) fn push(&mut self, piece: &[u8], ready: &mut Ready) -> Result<(), Error> {
        let mut lines = piece.split_inclusive(|byte| *byte == b'\n');
        if !self.rest.is_empty() {
            let Some(line) = lines.next() else { return Ok(()) };
            ready.check_record(self.rest.len() + line.len())?;
            self.rest.extend_from_slice(line);
            if !line.ends_with(b"\n") {
                return Ok(());
            }
            let line = std::mem::take(&mut self.rest);
            self.take_line(&line, ready)?;
        }
        for line in lines {
            if line.ends_with(b"\n") {
                self.take_line(line, ready)?;
            } else {
                ready.check_record(line.len())?;
                self.rest.extend_from_slice(line);
            }
        }
        Ok(())
    }

    fn take_line(&mut self, line: &[u8], ready: &mut Ready) -> Result<(), Error> {
        self.lines += 1;
        let line = if self.lines == 1 { line.strip_prefix(BYTE_ORDER_MARK).unwrap_or(line) } else { line };
        if !self.cells.is_open() {
            if line.trim_ascii().is_empty() {
                return Ok(());
            }
            self.cells.clear();
        }
        let goes_on = self.cells.take_line(line);
        ready.check_record(self.cells.bytes())?;
        if goes_on { Ok(()) } else { self.end_row(ready) }
    }

    fn end_row(&mut self, ready: &mut Ready) -> Result<(), Error> {
        if let Some(columns) = &self.columns {
            return ready.add_line(|line| columns.write_row(line, &self.cells));
        }
        if self.cells.is_open() {
            return Err(Error::invalid("invalid_csv", "the header line has a quote that is never closed"));
        }
        let columns = Columns::new(&self.cells, self.table.as_deref(), self.ignore_unknown);
        let columns = columns.map_err(|misfit| {
            let message = format!("{misfit}: mend the header; ?unknown=ignore leaves unknown columns out");
            Error::invalid("invalid_csv", message)
        })?;
        self.columns = Some(columns);
        Ok(())
    }

    pub(super) fn finish(&mut self, ready: &mut Ready) -> Result<(), Error> {
        let line = std::mem::take(&mut self.rest);
        if !line.is_empty() {
            self.take_line(&line, ready)?;
        }
        // A quote that is never closed.
        if self.cells.is_open() { self.end_row(ready) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::datatypes::{DataType, Field, Schema};
    use proptest::prelude::*;

    use super::super::Splitter;
    use super::super::tests::{check_cuts, records};
    use super::*;

    fn table() -> SchemaRef {
        let fields = vec![Field::new("n", DataType::Int64, false), Field::new("s", DataType::Utf8, true)];
        Arc::new(Schema::new(fields))
    }

    fn check(body: &str, expected: &[&str], code: Option<&str>) {
        let expected: Vec<String> = expected.iter().map(|line| (*line).to_owned()).collect();
        let got = records(Splitter::csv(Some(table()), false), &[body.as_bytes()]);
        assert_eq!(got, (expected, code.map(str::to_owned)), "{body}");
    }

    #[test]
    fn rows_are_records_as_the_table_wants_them() {
        check("", &[], None);
        check("n,s\n", &[], None);
        check(
            "\u{feff}s,n\r\n12,07\r\n\r\n\"two\nlines\",NA\nx",
            &[
                "{\"s\":\"12\",\"n\":7}",
                "{\"s\":\"two\\u000alines\"}",
                "\"a row of 1 cells, where the header has 2\"",
            ],
            None,
        );
        check("n,s\n1,\"x\ny", &["\"a row with a quote that is never closed\""], None);
    }

    #[test]
    fn a_header_that_does_not_fit_is_refused() {
        for body in ["n,n\n1,2", "n,t\n1,2", "s\nx\n", "n,\"s\n"] {
            check(body, &[], Some("invalid_csv"));
        }
        let got = records(Splitter::csv(Some(table()), true), &[b"n,t\n1,2"]);
        assert_eq!(got, (vec!["{\"n\":1,\"t\":\"2\"}".to_owned()], None));
        let got = records(Splitter::csv(None, false), &[b"any,thing\n1,x"]);
        assert_eq!(got, (vec!["{\"any\":1,\"thing\":\"x\"}".to_owned()], None));
    }

    proptest! {
        #[test]
        fn pieces_do_not_show(body in "[1a\",\r\n]{0,60}", places in prop::collection::vec(any::<usize>(), 0..9)) {
            let body = format!("n,s\n{body}");
            check_cuts(|| Splitter::csv(Some(table()), false), body.as_bytes(), &places);
        }
    }
}
