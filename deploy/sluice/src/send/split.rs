//! `--stream-by`: which records belong to which stream, by the value of a column.
//!
//! *Owns*: taking pieces apart by value, names of streams for values. Pure functions.
//! *Does not own*: the streams.

use std::borrow::Cow;
use std::collections::HashMap;

use anyhow::{Context, Result};
use arrow::array::{Array, AsArray, RecordBatch, UInt32Array};
use arrow::compute::{cast, take_record_batch};
use arrow::datatypes::DataType;
use bytes::{Bytes, BytesMut};
use serde_json::Value;
use sluice_shared::frame::lines;

use super::piece::{Payload, Piece};

/// How the stream of records without a value is called.
const NO_VALUE: &str = "null";

/// Records by value, values by first appearance, records in order.
pub(crate) fn split(piece: Piece, column: &str) -> Result<Vec<(String, Piece)>> {
    match &piece.payload {
        Payload::Json(text) => Ok(split_lines(text, &piece.places, column)),
        Payload::Batch(rows) => split_batch(rows, &piece.places, column),
    }
}

fn split_batch(batch: &RecordBatch, places: &[u64], column: &str) -> Result<Vec<(String, Piece)>> {
    let values = batch.column_by_name(column).with_context(|| {
        let known: Vec<String> = batch.schema().fields().iter().map(|field| field.name().clone()).collect();
        format!("--stream-by {column}: no such column; there are {}", known.join(", "))
    })?;
    let texts =
        cast(values, &DataType::Utf8).with_context(|| format!("--stream-by {column}: not a plain value"))?;
    let texts = texts.as_string::<i32>();
    let mut groups: Groups<'_, Vec<u32>> = Groups::default();
    for (row, place) in places.iter().enumerate() {
        let value = if texts.is_null(row) { NO_VALUE } else { texts.value(row) };
        let number = u32::try_from(row).context("a batch of 2^32 rows")?;
        groups.of(value.into(), *place).push(number);
    }
    let piece = |(value, rows, places): (_, Vec<u32>, _)| {
        let payload = Payload::Batch(take_record_batch(batch, &UInt32Array::from(rows))?);
        Ok((value, Piece { payload, places }))
    };
    groups.groups.into_iter().map(piece).collect()
}

/// What is not a JSON object has no value.
fn split_lines(text: &Bytes, places: &[u64], column: &str) -> Vec<(String, Piece)> {
    let mut groups: Groups<'_, BytesMut> = Groups::default();
    for (line, place) in lines(text).zip(places) {
        let record: Option<Value> = serde_json::from_slice(line).ok();
        let value = match record.as_ref().and_then(|record| record.get(column)) {
            None | Some(Value::Null) => NO_VALUE.to_owned(),
            Some(Value::String(text)) => text.clone(),
            Some(other) => other.to_string(),
        };
        let group = groups.of(value.into(), *place);
        group.extend_from_slice(line);
        group.extend_from_slice(b"\n");
    }
    let piece = |(value, text, places): (_, BytesMut, _)| {
        (value, Piece { payload: Payload::Json(text.freeze()), places })
    };
    groups.groups.into_iter().map(piece).collect()
}

/// Values, what of the piece is theirs, and its places.
struct Groups<'a, T> {
    at: HashMap<Cow<'a, str>, usize>,
    groups: Vec<(String, T, Vec<u64>)>,
}

impl<T> Default for Groups<'_, T> {
    fn default() -> Self {
        Self { at: HashMap::new(), groups: Vec::new() }
    }
}

impl<'a, T: Default> Groups<'a, T> {
    /// The group of a value, to which a record at `place` is about to be added.
    fn of(&mut self, value: Cow<'a, str>, place: u64) -> &mut T {
        let groups = &mut self.groups;
        let at = *self.at.entry(value).or_insert_with_key(|value| {
            groups.push((value.clone().into_owned(), T::default(), Vec::new()));
            groups.len() - 1
        });
        let (_, records, places) = &mut self.groups[at];
        places.push(place);
        records
    }
}

/// Name of the stream for a value. What no stream name may hold is written as `=XX`, so that no two values share
/// a name.
pub(crate) fn stream_name(prefix: &str, value: &str) -> String {
    let mut name = format!("{prefix}-");
    for byte in value.bytes() {
        if byte.is_ascii_alphanumeric() || b"_-.:/@".contains(&byte) {
            name.push(char::from(byte));
        } else {
            name.push_str(&format!("={byte:02X}"));
        }
    }
    name
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::array::{ArrayRef, Int64Array, StringArray};

    use super::*;

    #[test]
    fn rows_keep_their_order_within_a_value() {
        let origins: ArrayRef =
            Arc::new(StringArray::from(vec![Some("JFK"), Some("EWR"), None, Some("JFK")]));
        let numbers: ArrayRef = Arc::new(Int64Array::from(vec![0, 1, 2, 3]));
        let batch = RecordBatch::try_from_iter([("origin", origins), ("n", numbers)]).expect("fits");
        let groups = split_batch(&batch, &[1, 2, 3, 4], "origin").expect("splits");
        let got: Vec<(&str, &[u64])> =
            groups.iter().map(|(value, piece)| (value.as_str(), &piece.places[..])).collect();
        assert_eq!(got, [("JFK", &[1, 4][..]), ("EWR", &[2]), ("null", &[3])]);
        let Payload::Batch(rows) = &groups[0].1.payload else { panic!("JSON") };
        assert_eq!(rows.column(1).as_ref(), &Int64Array::from(vec![0, 3]) as &dyn Array);
        let error = split_batch(&batch, &[], "dest").expect_err("unknown").to_string();
        assert!(error.contains("there are origin, n"), "{error}");
    }

    #[test]
    fn lines_keep_their_order_within_a_value() {
        let text = Bytes::from_static(b"{\"o\":\"a\",\"n\":0}\n\n{\"o\":7}\nnot json\n{\"n\":1,\"o\":\"a\"}");
        let groups = split_lines(&text, &[1, 3, 4, 5], "o");
        let got: Vec<(&str, &[u8], &[u64])> = groups
            .iter()
            .map(|(value, piece)| {
                let Payload::Json(text) = &piece.payload else { panic!("a batch") };
                (value.as_str(), &text[..], &piece.places[..])
            })
            .collect();
        let expected: [(&str, &[u8], &[u64]); 3] = [
            ("a", b"{\"o\":\"a\",\"n\":0}\n{\"n\":1,\"o\":\"a\"}\n", &[1, 5]),
            ("7", b"{\"o\":7}\n", &[3]),
            ("null", b"not json\n", &[4]),
        ];
        assert_eq!(got, expected);
    }

    #[test]
    fn no_two_values_share_a_name() {
        assert_eq!(stream_name("flights", "JFK"), "flights-JFK");
        assert_eq!(stream_name("t", "a b=é"), "t-a=20b=3D=C3=A9");
    }
}
