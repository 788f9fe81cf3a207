//! JSON input: one record a line, or values over several lines, alone or in one array.
//!
//! *Owns*: cutting text into whole records, and their lines.
//! *Does not own*: whether they are JSON: that is for the pod to refuse, by record.

use std::io::{ErrorKind, Read};

use anyhow::{Context, Result, bail};
use bytes::{Bytes, BytesMut};

use super::piece::{Payload, Piece};

/// Text is read in pieces of about this size.
const PIECE_BYTES: usize = 256 << 10;
/// Longest record: what the gateway takes at most, and some.
pub(super) const RECORD_BYTES_MAX: usize = 64 << 20;

/// Reads what there is, up to `buffer.len()`; 0 at the end.
fn read_some(reader: &mut impl Read, buffer: &mut [u8]) -> Result<usize> {
    loop {
        match reader.read(buffer) {
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            read => return read.context("cannot read the next records"),
        }
    }
}

/// Whole lines in pieces; what one read brings goes out at once.
pub(super) struct Lines<R> {
    reader: R,
    rest: BytesMut,
    /// The line at which `rest` begins.
    line: u64,
    ended: bool,
}

impl<R: Read> Lines<R> {
    pub(super) fn new(reader: R) -> Self {
        Self { reader, rest: BytesMut::new(), line: 1, ended: false }
    }

    fn next_text(&mut self) -> Result<Option<Bytes>> {
        while !self.ended {
            let held = self.rest.len();
            self.rest.resize(held + PIECE_BYTES, 0);
            let read = read_some(&mut self.reader, &mut self.rest[held..]);
            self.rest.truncate(held + *read.as_ref().unwrap_or(&0));
            self.ended = read? == 0;
            if let Some(at) = self.rest[held..].iter().rposition(|b| *b == b'\n') {
                return Ok(Some(self.rest.split_to(held + at + 1).freeze()));
            }
            if self.rest.len() > RECORD_BYTES_MAX {
                let (line, limit) = (self.line, RECORD_BYTES_MAX >> 20);
                bail!("line {line} has more than {limit} MiB: is this newline-delimited JSON?");
            }
        }
        let last = self.rest.split().freeze();
        Ok((!last.is_empty()).then_some(last))
    }

    fn piece(&mut self, text: Bytes) -> Piece {
        let mut places = Vec::new();
        for line in text.split_inclusive(|b| *b == b'\n') {
            // As `sluice_shared::frame::lines` has it.
            if line.iter().any(|b| !matches!(b, b' ' | b'\t' | b'\r' | b'\n')) {
                places.push(self.line);
            }
            self.line += 1;
        }
        Piece { payload: Payload::Json(text), places }
    }
}

impl<R: Read> Iterator for Lines<R> {
    type Item = Result<Piece>;

    fn next(&mut self) -> Option<Self::Item> {
        let text = self.next_text().transpose()?;
        Some(text.map(|text| self.piece(text)))
    }
}

/// Values that need not keep to lines: those of one array, or one after the other.
pub(super) struct Values<R> {
    reader: R,
    cut: Cut,
    ended: bool,
}

/// Cuts text into values by their brackets.
struct Cut {
    /// Whether the values stand in an array, and how far that is.
    array: Array,
    depth: usize,
    in_string: bool,
    escaped: bool,
    /// The value that has begun.
    value: Vec<u8>,
    begun_at: u64,
    line: u64,
    /// Whole values, one a line.
    whole: BytesMut,
    places: Vec<u64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Array {
    None,
    Before,
    Within,
    After,
}

impl<R: Read> Values<R> {
    /// `in_array`: the text is one array.
    pub(super) fn new(reader: R, in_array: bool) -> Self {
        let array = if in_array { Array::Before } else { Array::None };
        let (value, whole, places) = (Vec::new(), BytesMut::new(), Vec::new());
        let cut = Cut {
            array,
            depth: 0,
            in_string: false,
            escaped: false,
            value,
            begun_at: 1,
            line: 1,
            whole,
            places,
        };
        Self { reader, cut, ended: false }
    }

    fn next_piece(&mut self) -> Result<Option<Piece>> {
        let mut buffer = vec![0; PIECE_BYTES];
        while !self.ended && self.cut.places.is_empty() {
            let read = read_some(&mut self.reader, &mut buffer)?;
            self.ended = read == 0;
            buffer[..read].iter().for_each(|byte| self.cut.take(*byte));
            if self.ended {
                self.cut.end_value();
            }
            if self.cut.value.len() > RECORD_BYTES_MAX {
                let (line, limit) = (self.cut.begun_at, RECORD_BYTES_MAX >> 20);
                bail!("the JSON value that begins in line {line} has more than {limit} MiB");
            }
        }
        if !self.cut.places.is_empty() {
            let payload = Payload::Json(self.cut.whole.split().freeze());
            return Ok(Some(Piece { payload, places: std::mem::take(&mut self.cut.places) }));
        }
        if self.cut.array == Array::Within {
            self.cut.array = Array::After;
            bail!("the array is not closed: the end of the input is missing");
        }
        Ok(None)
    }
}

impl<R: Read> Iterator for Values<R> {
    type Item = Result<Piece>;

    fn next(&mut self) -> Option<Self::Item> {
        self.next_piece().transpose()
    }
}

impl Cut {
    fn take(&mut self, byte: u8) {
        self.line += u64::from(byte == b'\n');
        if self.in_string {
            self.in_string = self.escaped || byte != b'"';
            self.escaped = !self.escaped && byte == b'\\';
            // A line that ends within a string is no JSON either way; a record is one line here.
            self.value.push(if byte == b'\n' { b'\t' } else { byte });
            return;
        }
        match (byte, self.depth) {
            (b' ' | b'\t' | b'\r' | b'\n', 0) => self.end_value(),
            (b' ' | b'\t' | b'\r' | b'\n', _) => self.value.push(b' '),
            (b'[', 0) if self.array == Array::Before => self.array = Array::Within,
            (b']', 0) if self.array == Array::Within => {
                self.end_value();
                self.array = Array::After;
            }
            (b',', 0) if self.array == Array::Within => self.end_value(),
            _ => self.take_structure(byte),
        }
    }

    fn take_structure(&mut self, byte: u8) {
        if self.value.is_empty() {
            self.begun_at = self.line;
        }
        self.value.push(byte);
        match byte {
            b'"' => self.in_string = true,
            b'{' | b'[' => self.depth += 1,
            b'}' | b']' => {
                self.depth = self.depth.saturating_sub(1);
                if self.depth == 0 {
                    self.end_value();
                }
            }
            _ => {}
        }
    }

    fn end_value(&mut self) {
        if !self.value.is_empty() {
            self.whole.extend_from_slice(&self.value);
            self.whole.extend_from_slice(b"\n");
            self.places.push(self.begun_at);
            self.value.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use super::*;

    /// Gives a few bytes at a time.
    struct Drip(Cursor<Vec<u8>>);

    impl Read for Drip {
        fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
            let few = buffer.len().min(3);
            self.0.read(&mut buffer[..few])
        }
    }

    fn drip(text: &str) -> Drip {
        Drip(Cursor::new(text.as_bytes().to_vec()))
    }

    fn text(piece: Piece) -> Bytes {
        let Payload::Json(text) = piece.payload else { panic!("a batch") };
        text
    }

    /// Line and text of each record.
    fn records(pieces: impl Iterator<Item = Result<Piece>>) -> Result<Vec<(u64, String)>> {
        let mut records = Vec::new();
        for piece in pieces {
            let piece = piece?;
            let places = piece.places.clone();
            let text = text(piece);
            let lines: Vec<&[u8]> = sluice_shared::frame::lines(&text).collect();
            assert_eq!(lines.len(), places.len(), "each record has its place");
            let line = |line: &[u8]| String::from_utf8_lossy(line).into_owned();
            records.extend(places.into_iter().zip(lines.into_iter().map(line)));
        }
        Ok(records)
    }

    #[test]
    fn lines_are_never_torn() {
        let whole = "{\"a\":1}\n\n{\"a\":22}\n{\"a\":333}";
        let pieces: Vec<Bytes> =
            Lines::new(drip(whole)).map(|piece| text(piece.expect("readable"))).collect();
        assert_eq!(pieces.concat(), whole.as_bytes());
        assert!(pieces[..pieces.len() - 1].iter().all(|piece| piece.ends_with(b"\n")));
        let lines: Vec<u64> =
            records(Lines::new(drip(whole))).expect("readable").iter().map(|(n, _)| *n).collect();
        assert_eq!(lines, [1, 3, 4]);
    }

    fn check(text: &str, in_array: bool, expected: &[(u64, &str)]) {
        let got = records(Values::new(drip(text), in_array)).expect(text);
        let got: Vec<(u64, &str)> = got.iter().map(|(line, record)| (*line, record.as_str())).collect();
        assert_eq!(got, expected, "{text}");
    }

    #[test]
    fn values_of_an_array_are_records_wherever_their_lines_end() {
        check("[]", true, &[]);
        check(
            "[\n {\"a\": 1},\n {\n  \"a\": [\n2]\n }\n]\n",
            true,
            &[(2, "{\"a\": 1}"), (3, "{   \"a\": [ 2]  }")],
        );
        check(r#"[{"a":"]},{\"\\"},{"b":2}]"#, true, &[(1, r#"{"a":"]},{\"\\"}"#), (1, r#"{"b":2}"#)]);
        check("[1, \"x\",{}]", true, &[(1, "1"), (1, "\"x\""), (1, "{}")]);
        check("[{}] rest", true, &[(1, "{}"), (1, "rest")]);
        check("[{},\n{\"a\":\"x\ny\"}]", true, &[(1, "{}"), (2, "{\"a\":\"x\ty\"}")]);
        check("{\n\"a\": 1\n}\n{\n\"a\": 2\n}", false, &[(1, "{ \"a\": 1 }"), (4, "{ \"a\": 2 }")]);
    }

    #[test]
    fn an_array_without_an_end_is_told_after_what_it_has() {
        for (text, record) in
            [("[{\"a\":1},\n{\"a\":2}", (2, "{\"a\":2}")), ("[{\"a\":1},\n{\"a\"", (2, "{\"a\""))]
        {
            let mut values = Values::new(Cursor::new(text.as_bytes().to_vec()), true);
            let got = records(values.by_ref().take(1)).expect("readable");
            let last = got.last().map(|(line, text)| (*line, text.as_str()));
            let more = records(values.by_ref().take(1));
            let (last, error) = match more {
                Ok(more) => (more.last().map(|(line, text)| (*line, text.clone())), values.next()),
                Err(error) => (last.map(|(line, text)| (line, text.to_owned())), Some(Err(error))),
            };
            assert_eq!(last, Some((record.0, record.1.to_owned())), "{text}");
            let error = error.expect("one more").expect_err("not closed").to_string();
            assert!(error.contains("the array is not closed"), "{error}");
        }
    }
}
