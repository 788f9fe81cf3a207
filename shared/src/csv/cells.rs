//! One row of CSV (RFC 4180) to cells, line by line.
//!
//! *Owns*: quotes, and line ends within them. A core.
//! *Does not own*: reading lines; what a cell means.

/// The cells of one row, without their quotes.
#[derive(Debug, Default)]
pub struct Cells {
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

impl Cells {
    /// How many have ended.
    pub fn count(&self) -> usize {
        self.ends.len()
    }

    /// Each, in order.
    pub fn iter(&self) -> impl Iterator<Item = &[u8]> {
        let starts = std::iter::once(0).chain(self.ends.iter().copied());
        starts.zip(&self.ends).map(|(start, end)| &self.text[start..*end])
    }

    /// Bytes of all cells together.
    pub fn bytes(&self) -> usize {
        self.text.len()
    }

    /// Whether a quote was opened and not closed: the row goes on in the next line.
    pub fn is_open(&self) -> bool {
        self.at == At::Quoted
    }

    /// Makes room for another row.
    pub fn clear(&mut self) {
        self.text.clear();
        self.ends.clear();
        self.at = At::CellStart;
    }

    /// Takes one line with its end. Whether the row goes on in the next one.
    pub fn take_line(&mut self, line: &[u8]) -> bool {
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

    fn check(lines: &[&str], expected: &[&str], is_open: bool) {
        let mut cells = Cells::default();
        for (at, line) in lines.iter().enumerate() {
            let goes_on = cells.take_line(line.as_bytes());
            assert_eq!(goes_on, at + 1 < lines.len() || is_open, "{line:?}");
        }
        let got: Vec<&[u8]> = cells.iter().collect();
        assert_eq!(got, expected.iter().map(|cell| cell.as_bytes()).collect::<Vec<_>>(), "{lines:?}");
        assert_eq!((cells.count(), cells.is_open()), (expected.len(), is_open));
    }

    #[test]
    fn quotes_are_taken_as_they_are_meant() {
        check(&["\"a,b\",\"c\"\"d\",\"\"\r\n"], &["a,b", "c\"d", ""], false);
        check(&["5\" pipe,\"x\"y,z"], &["5\" pipe", "xy", "z"], false);
        check(&["\"a\r\n", "\n", "b\",c\n"], &["a\r\n\nb", "c"], false);
        check(&["a,\"b\n", "c"], &["a"], true);
    }
}
