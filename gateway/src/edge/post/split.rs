//! A body to frames of records, whatever it is made of and wherever its chunks end.
//!
//! *Owns*: which kinds of body there are, the sizes of records and frames. A core.
//! *Does not own*: reading (`body`), what a record holds (the pod judges it).
//! Keeps P7 (what is held of a body is one record, or one message) and P8 (each part becomes a record, or an error).

mod arrow;
mod csv;
mod lines;
mod values;

use std::collections::VecDeque;

use ::arrow::datatypes::SchemaRef;
use bytes::Bytes;
use sluice_shared::error::Error;
use sluice_shared::frame::count_lines;

use crate::session::Records;

/// Frames are not made larger than this, unless one record is.
const FRAME_BYTES: usize = 256 << 10;

/// Cuts one kind of body.
pub(super) enum Splitter {
    /// One JSON record a line.
    Lines(lines::Lines),
    /// One JSON object, or an array.
    Values(values::Values),
    /// CSV with a header line.
    Csv(Box<csv::Csv>),
    /// An Arrow IPC stream.
    Arrow(arrow::Arrow),
}

impl Splitter {
    pub(super) fn lines() -> Self {
        Self::Lines(lines::Lines::default())
    }

    /// `array_only`: what is no array is refused.
    pub(super) fn values(array_only: bool) -> Self {
        Self::Values(values::Values::new(array_only))
    }

    /// `table` is its schema, where it exists.
    pub(super) fn csv(table: Option<SchemaRef>, ignore_unknown: bool) -> Self {
        Self::Csv(Box::new(csv::Csv::new(table, ignore_unknown)))
    }

    pub(super) fn arrow() -> Self {
        Self::Arrow(arrow::Arrow::default())
    }

    /// Takes the next piece of the body. What is whole with it is ready, after an error too.
    ///
    /// # Errors
    /// `Invalid`: the body cannot be read on from here.
    pub(super) fn push(&mut self, piece: Bytes, ready: &mut Ready) -> Result<(), Error> {
        let pushed = match self {
            Self::Lines(lines) => lines.push(piece, ready),
            Self::Values(values) => values.push(&piece, ready),
            Self::Csv(csv) => csv.push(&piece, ready),
            Self::Arrow(arrow) => arrow.push(&piece, ready),
        };
        ready.flush();
        pushed
    }

    /// The body has ended.
    ///
    /// # Errors
    /// `Invalid`: not here.
    pub(super) fn finish(&mut self, ready: &mut Ready) -> Result<(), Error> {
        let finished = match self {
            Self::Lines(lines) => lines.finish(ready),
            Self::Values(values) => values.finish(ready),
            Self::Csv(csv) => csv.finish(ready),
            Self::Arrow(arrow) => arrow.finish(),
        };
        ready.flush();
        finished
    }
}

/// Frames that are cut and not taken yet.
pub(super) struct Ready {
    frames: VecDeque<Records>,
    /// Lines being gathered to a frame.
    text: Vec<u8>,
    lines: u32,
    /// Records that were ever cut.
    records: u64,
    record_bytes_max: usize,
}

impl Ready {
    /// No record may be larger than `record_bytes_max`.
    pub(super) fn new(record_bytes_max: usize) -> Self {
        Self { frames: VecDeque::new(), text: Vec::new(), lines: 0, records: 0, record_bytes_max }
    }

    /// The next frame.
    pub(super) fn next(&mut self) -> Option<Records> {
        self.frames.pop_front()
    }

    /// Bytes that a record, and a frame that is taken whole, may have.
    pub(super) fn record_bytes_max(&self) -> usize {
        self.record_bytes_max
    }

    /// How many records were ever cut: the offset of the next one.
    pub(super) fn records(&self) -> u64 {
        self.records
    }

    /// Bytes of a frame, unless one record is larger.
    fn frame_bytes(&self) -> usize {
        self.record_bytes_max.min(FRAME_BYTES)
    }

    /// Takes a whole frame.
    pub(super) fn push(&mut self, count: u32, payload: Bytes) {
        if count > 0 {
            self.records += u64::from(count);
            self.frames.push_back(Records { first_offset: None, count, payload });
        }
    }

    /// Takes whole lines, blank ones among them.
    fn push_lines(&mut self, payload: Bytes) {
        let count = u32::try_from(count_lines(&payload)).expect("a frame of few bytes has few lines");
        self.push(count, payload);
    }

    /// Takes one record that `write` writes: a line without its end, and not blank.
    fn add_line(&mut self, write: impl FnOnce(&mut Vec<u8>)) -> Result<(), Error> {
        let start = self.text.len();
        write(&mut self.text);
        if let Err(error) = self.check_record(self.text.len() - start) {
            self.text.truncate(start);
            return Err(error);
        }
        self.text.push(b'\n');
        if self.text.len() > self.frame_bytes() && start > 0 {
            let line = self.text.split_off(start);
            self.flush();
            self.text = line;
        }
        self.lines += 1;
        Ok(())
    }

    fn flush(&mut self) {
        let (lines, text) = (std::mem::take(&mut self.lines), std::mem::take(&mut self.text));
        self.push(lines, text.into());
    }

    /// # Errors
    /// `Invalid`: a record of so many bytes is too large.
    fn check_record(&self, bytes: usize) -> Result<(), Error> {
        let max = self.record_bytes_max;
        if bytes <= max {
            return Ok(());
        }
        let message =
            format!("a record of {bytes} bytes or more: the limit is {max} (gateway.frame_bytes_max)");
        Err(Error::invalid("record_too_large", message))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All frames of a body that comes in these pieces, and how it ends.
    pub(super) fn frames(
        mut splitter: Splitter,
        pieces: &[&[u8]],
        record_bytes_max: usize,
    ) -> (Vec<Records>, Result<(), Error>) {
        let mut ready = Ready::new(record_bytes_max);
        let mut pushed = Ok(());
        for piece in pieces {
            pushed = splitter.push(Bytes::copy_from_slice(piece), &mut ready);
            if pushed.is_err() {
                break;
            }
        }
        let ended = pushed.and_then(|()| splitter.finish(&mut ready));
        let frames: Vec<Records> = std::iter::from_fn(|| ready.next()).collect();
        let count: u64 = frames.iter().map(|frame| u64::from(frame.count)).sum();
        assert_eq!(count, ready.records());
        (frames, ended)
    }

    /// The lines of a body of text, and the code of its error.
    pub(super) fn records(splitter: Splitter, pieces: &[&[u8]]) -> (Vec<String>, Option<String>) {
        let (frames, ended) = frames(splitter, pieces, 1 << 20);
        let mut records = Vec::new();
        for frame in frames {
            let lines = sluice_shared::frame::lines(&frame.payload);
            let lines: Vec<String> = lines.map(|line| String::from_utf8_lossy(line).into_owned()).collect();
            assert_eq!(lines.len(), frame.count as usize);
            records.extend(lines);
        }
        (records, ended.err().map(|error| error.code))
    }

    /// The body in pieces that end at these places, taken modulo its length.
    pub(super) fn cut<'a>(body: &'a [u8], places: &[usize]) -> Vec<&'a [u8]> {
        let mut places: Vec<usize> = places.iter().map(|place| place % (body.len() + 1)).collect();
        places.extend([0, body.len()]);
        places.sort_unstable();
        places.windows(2).map(|ends| &body[ends[0]..ends[1]]).collect()
    }

    /// One body gives the same records in one piece and in many.
    pub(super) fn check_cuts(splitter: impl Fn() -> Splitter, body: &[u8], places: &[usize]) {
        let whole = records(splitter(), &[body]);
        assert_eq!(records(splitter(), &cut(body, places)), whole, "{:?}", String::from_utf8_lossy(body));
    }

    #[test]
    fn frames_are_bounded_and_so_are_records() {
        let body: Vec<u8> = (0..200).flat_map(|n| format!("{{\"n\":{n}}}\n").into_bytes()).collect();
        for (name, make) in
            [("lines", Splitter::lines as fn() -> Splitter), ("values", || Splitter::values(false))]
        {
            let (got, ended) = frames(make(), &[&body], 100);
            ended.expect(name);
            assert_eq!(got.iter().map(|frame| frame.count).sum::<u32>(), 200);
            assert!(got.iter().all(|frame| frame.payload.len() <= 101), "{name}");
        }
        let long = [b"{}\n{\"s\":\"", &b"x".repeat(200)[..], b"\"}\n{}"].concat();
        for make in [Splitter::lines as fn() -> Splitter, || Splitter::values(false)] {
            let (got, ended) = frames(make(), &[&long[..40], &long[40..]], 100);
            assert_eq!(got.iter().map(|frame| frame.count).sum::<u32>(), 1);
            assert_eq!(ended.expect_err("too large").code, "record_too_large");
        }
    }
}
