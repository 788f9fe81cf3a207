//! Text to rows of cells, by RFC 4180, with the line at which each begins.
//!
//! *Owns*: quotes, line ends, blank lines, the byte order mark.
//! *Does not own*: what a cell means.

use std::io::{BufRead, BufReader, Read};

use anyhow::{Context, Result, bail};

use crate::send::json::RECORD_BYTES_MAX;

const BUFFER_BYTES: usize = 256 << 10;
/// What some programs put before UTF-8.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// Reads row by row.
pub(super) struct Rows<R> {
    reader: BufReader<R>,
    /// Lines read so far.
    lines: u64,
    line: Vec<u8>,
    cells: Cells,
}

/// The cells of one row, without their quotes.
#[derive(Default)]
pub(super) struct Cells {
    text: Vec<u8>,
    /// Where each cell has ended.
    ends: Vec<usize>,
    at: At,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum At {
    #[default]
    CellStart,
    Plain,
    Quoted,
    /// Behind a quote in quotes: the end of the cell, or the first of two.
    Quote,
}

/// A row.
pub(super) struct Row<'a> {
    /// The line at which it begins, counted from 1.
    pub(super) line: u64,
    pub(super) cells: &'a Cells,
    /// A quote was opened and the input has ended.
    pub(super) is_open: bool,
}

impl<R: Read> Rows<R> {
    pub(super) fn new(reader: R) -> Self {
        let reader = BufReader::with_capacity(BUFFER_BYTES, reader);
        Self { reader, lines: 0, line: Vec::new(), cells: Cells::default() }
    }

    /// The next row that is not blank.
    pub(super) fn next_row(&mut self) -> Result<Option<Row<'_>>> {
        self.cells.clear();
        loop {
            if !self.next_line()? {
                return Ok(None);
            }
            if !self.line.trim_ascii().is_empty() {
                break;
            }
        }
        let line = self.lines;
        let mut is_open = self.cells.take_line(&self.line);
        while is_open && self.next_line()? {
            is_open = self.cells.take_line(&self.line);
            if self.cells.text.len() > RECORD_BYTES_MAX {
                let limit = RECORD_BYTES_MAX >> 20;
                bail!(
                    "the row that begins in line {line} has more than {limit} MiB: is a quote not closed there?"
                );
            }
        }
        Ok(Some(Row { line, cells: &self.cells, is_open }))
    }

    /// Reads one line; false at the end.
    fn next_line(&mut self) -> Result<bool> {
        self.line.clear();
        let mut limited = (&mut self.reader).take(RECORD_BYTES_MAX as u64 + 1);
        let read = limited.read_until(b'\n', &mut self.line).context("cannot read the next rows")?;
        if read > RECORD_BYTES_MAX {
            bail!("line {} has more than {} MiB: is this CSV?", self.lines + 1, RECORD_BYTES_MAX >> 20);
        }
        self.lines += u64::from(read > 0);
        if self.lines == 1 && self.line.starts_with(BYTE_ORDER_MARK) {
            self.line.drain(..BYTE_ORDER_MARK.len());
        }
        Ok(read > 0)
    }
}

impl Cells {
    pub(super) fn count(&self) -> usize {
        self.ends.len()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &[u8]> {
        let starts = std::iter::once(0).chain(self.ends.iter().copied());
        starts.zip(&self.ends).map(|(start, end)| &self.text[start..*end])
    }

    fn clear(&mut self) {
        self.text.clear();
        self.ends.clear();
        self.at = At::CellStart;
    }

    /// Takes one line with its end. Whether the row goes on in the next one.
    fn take_line(&mut self, line: &[u8]) -> bool {
        let body = line.strip_suffix(b"\n").unwrap_or(line);
        let body = body.strip_suffix(b"\r").unwrap_or(body);
        body.iter().for_each(|byte| self.take(*byte));
        if self.at == At::Quoted {
            self.text.extend_from_slice(&line[body.len()..]);
            return true;
        }
        self.end_cell();
        false
    }

    fn take(&mut self, byte: u8) {
        match (self.at, byte) {
            (At::Quoted, b'"') => self.at = At::Quote,
            (At::Quoted, _) => self.text.push(byte),
            (_, b',') => self.end_cell(),
            (At::CellStart, b'"') => self.at = At::Quoted,
            (At::Quote, b'"') => {
                self.text.push(b'"');
                self.at = At::Quoted;
            }
            // A quote within a cell that has none at its start is a character like others.
            _ => {
                self.text.push(byte);
                self.at = At::Plain;
            }
        }
    }

    fn end_cell(&mut self) {
        self.ends.push(self.text.len());
        self.at = At::CellStart;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Line and cells of each row.
    fn check(text: &str, expected: &[(u64, &[&str])]) {
        let mut rows = Rows::new(text.as_bytes());
        let mut got = Vec::new();
        while let Some(row) = rows.next_row().expect("readable") {
            let cells = row.cells.iter().map(|cell| String::from_utf8_lossy(cell).into_owned());
            got.push((row.line, cells.collect::<Vec<_>>()));
        }
        let expected: Vec<(u64, Vec<String>)> = expected
            .iter()
            .map(|(line, cells)| (*line, cells.iter().map(|cell| (*cell).to_owned()).collect()))
            .collect();
        assert_eq!(got, expected, "{text:?}");
    }

    #[test]
    fn rows_begin_where_they_begin() {
        check("", &[]);
        check("a,b\n1,2", &[(1, &["a", "b"]), (2, &["1", "2"])]);
        check("a\r\n\r\n \r\nb\r\n", &[(1, &["a"]), (4, &["b"])]);
        check("\n\na,\n,\n", &[(3, &["a", ""]), (4, &["", ""])]);
        check("\"a\n\nb\",c\nd\n", &[(1, &["a\n\nb", "c"]), (4, &["d"])]);
    }

    #[test]
    fn quotes_are_taken_as_they_are_meant() {
        check("\"a,b\",\"c\"\"d\",\"\"", &[(1, &["a,b", "c\"d", ""])]);
        check("5\" pipe,\"x\"y,z", &[(1, &["5\" pipe", "xy", "z"])]);
        check("a,\"b\nc", &[(1, &["a"])]);
    }
}
