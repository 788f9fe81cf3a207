//! Consecutive records, and where in the input each of them stands.
//!
//! *Owns*: pieces, and from which offset of a stream one gets back to a line of the file. A core.
//! *Does not own*: reading (`input`), sending.

use std::collections::VecDeque;

use arrow::array::RecordBatch;
use bytes::Bytes;
use sluice_shared::frame::lines;

/// Consecutive records.
#[derive(Debug)]
pub(crate) struct Piece {
    /// The records.
    pub(crate) payload: Payload,
    /// Of each record the line, or row, of the input at which it begins, counted from 1.
    pub(crate) places: Vec<u64>,
}

/// Records as they are sent.
#[derive(Debug)]
pub(crate) enum Payload {
    /// One JSON object a line.
    Json(Bytes),
    /// Rows.
    Batch(RecordBatch),
}

impl Piece {
    /// The piece without its first `records`.
    pub(crate) fn without_first(mut self, records: u64) -> Self {
        let records = usize::try_from(records).unwrap_or(usize::MAX).min(self.places.len());
        self.places.drain(..records);
        self.payload = match self.payload {
            Payload::Json(text) => {
                let first = lines(&text).nth(records);
                let start = first.map_or(text.len(), |line| line.as_ptr().addr() - text.as_ptr().addr());
                Payload::Json(text.slice(start..))
            }
            Payload::Batch(rows) => Payload::Batch(rows.slice(records, rows.num_rows() - records)),
        };
        self
    }
}

/// Which offset of a stream came from where. Runs of records that follow one another in both take one entry.
#[derive(Debug, Default)]
pub(crate) struct Places {
    /// Offset and place of the first record of each run.
    runs: VecDeque<(u64, u64)>,
}

impl Places {
    /// The record at `offset` stands at `place`. Offsets only rise.
    pub(crate) fn add(&mut self, offset: u64, place: u64) {
        let follows = self.runs.back().is_some_and(|(first, at)| {
            place.checked_sub(*at).is_some_and(|lines| offset.checked_sub(*first) == Some(lines))
        });
        if !follows {
            self.runs.push_back((offset, place));
        }
    }

    /// Where the record at `offset` stands.
    pub(crate) fn of(&self, offset: u64) -> Option<u64> {
        let after = self.runs.partition_point(|(first, _)| *first <= offset);
        let (first, place) = self.runs.get(after.checked_sub(1)?)?;
        Some(place + (offset - first))
    }

    /// Nothing before `offset` will be asked for any more.
    pub(crate) fn forget_before(&mut self, offset: u64) {
        while self.runs.get(1).is_some_and(|(first, _)| *first <= offset) {
            self.runs.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_found_again_until_they_are_forgotten() {
        let mut places = Places::default();
        // A header, then a blank line after the third record, then a record of several lines.
        for (offset, place) in [(10, 2), (11, 3), (12, 4), (13, 6), (14, 7), (15, 12)] {
            places.add(offset, place);
        }
        assert_eq!(places.runs.len(), 3, "a run takes one entry");
        let of = |places: &Places| (9..16).map(|offset| places.of(offset)).collect::<Vec<_>>();
        assert_eq!(of(&places), [None, Some(2), Some(3), Some(4), Some(6), Some(7), Some(12)]);
        places.forget_before(14);
        assert_eq!(of(&places)[4..], [Some(6), Some(7), Some(12)]);
        assert_eq!(places.of(12), None);
    }

    #[test]
    fn records_are_left_out_with_their_places() {
        let piece = |text: &'static [u8], places: &[u64]| Piece {
            payload: Payload::Json(text.into()),
            places: places.to_vec(),
        };
        for (records, rest, places) in
            [(0, &b"\n1\n2\n3\n"[..], &[2, 3, 4][..]), (2, b"3\n", &[4]), (3, b"", &[]), (9, b"", &[])]
        {
            let left = piece(b"\n1\n2\n3\n", &[2, 3, 4]).without_first(records);
            let Payload::Json(text) = left.payload else { panic!("JSON") };
            assert_eq!(lines(&text).collect::<Vec<_>>(), lines(rest).collect::<Vec<_>>());
            assert_eq!(left.places, places);
        }
    }
}
