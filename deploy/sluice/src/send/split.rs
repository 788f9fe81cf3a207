//! `--stream-by`: which records belong to which stream, by the value of a column.
//!
//! *Owns*: taking pieces apart by value, names of streams for values. Pure functions.
//! *Does not own*: the streams.

use std::collections::HashMap;

use anyhow::{Context, Result};
use arrow::array::{Array, AsArray, RecordBatch, UInt32Array};
use arrow::compute::{cast, take_record_batch};
use arrow::datatypes::DataType;
use bytes::{Bytes, BytesMut};
use serde_json::Value;

/// How the stream of records without a value is called.
const NO_VALUE: &str = "null";

/// Rows by value, values by first appearance, rows in order.
pub(crate) fn split_batch(batch: &RecordBatch, column: &str) -> Result<Vec<(String, RecordBatch)>> {
    let values = batch.column_by_name(column).with_context(|| {
        let known: Vec<String> = batch.schema().fields().iter().map(|field| field.name().clone()).collect();
        format!("--stream-by {column}: no such column; there are {}", known.join(", "))
    })?;
    let texts =
        cast(values, &DataType::Utf8).with_context(|| format!("--stream-by {column}: not a plain value"))?;
    let texts = texts.as_string::<i32>();
    let mut places: HashMap<&str, usize> = HashMap::new();
    let mut groups: Vec<(String, Vec<u32>)> = Vec::new();
    for row in 0..texts.len() {
        let value = if texts.is_null(row) { NO_VALUE } else { texts.value(row) };
        let place = *places.entry(value).or_insert_with(|| {
            groups.push((value.to_owned(), Vec::new()));
            groups.len() - 1
        });
        groups[place].1.push(u32::try_from(row).context("a batch of 2^32 rows")?);
    }
    let rows = |(value, rows)| Ok((value, take_record_batch(batch, &UInt32Array::from(rows))?));
    groups.into_iter().map(rows).collect()
}

/// Lines by value, values by first appearance, lines in order. What is not a JSON object has no value.
pub(crate) fn split_lines(lines: &Bytes, column: &str) -> Vec<(String, Bytes)> {
    let mut places: HashMap<String, usize> = HashMap::new();
    let mut groups: Vec<(String, BytesMut)> = Vec::new();
    for line in lines.split(|b| *b == b'\n').filter(|line| !line.trim_ascii().is_empty()) {
        let record: Option<Value> = serde_json::from_slice(line).ok();
        let value = match record.as_ref().and_then(|record| record.get(column)) {
            None | Some(Value::Null) => NO_VALUE.to_owned(),
            Some(Value::String(text)) => text.clone(),
            Some(other) => other.to_string(),
        };
        let place = *places.entry(value).or_insert_with_key(|value| {
            groups.push((value.clone(), BytesMut::new()));
            groups.len() - 1
        });
        groups[place].1.extend_from_slice(line);
        groups[place].1.extend_from_slice(b"\n");
    }
    groups.into_iter().map(|(value, lines)| (value, lines.freeze())).collect()
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

/// The lines without the first `records` of them.
pub(crate) fn skip_lines(lines: &Bytes, mut records: u64) -> (Bytes, u64) {
    let (wanted, mut at) = (records, 0);
    while records > 0 && at < lines.len() {
        let end = lines[at..].iter().position(|b| *b == b'\n').map_or(lines.len(), |n| at + n + 1);
        records -= u64::from(!lines[at..end].trim_ascii().is_empty());
        at = end;
    }
    (lines.slice(at..), wanted - records)
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
        let groups = split_batch(&batch, "origin").expect("splits");
        let got: Vec<(&str, usize)> =
            groups.iter().map(|(value, rows)| (value.as_str(), rows.num_rows())).collect();
        assert_eq!(got, [("JFK", 2), ("EWR", 1), ("null", 1)]);
        assert_eq!(groups[0].1.column(1).as_ref(), &Int64Array::from(vec![0, 3]) as &dyn Array);
        let error = split_batch(&batch, "dest").expect_err("unknown").to_string();
        assert!(error.contains("there are origin, n"), "{error}");
    }

    #[test]
    fn lines_keep_their_order_within_a_value() {
        let lines =
            Bytes::from_static(b"{\"o\":\"a\",\"n\":0}\n\n{\"o\":7}\nnot json\n{\"n\":1,\"o\":\"a\"}");
        let groups = split_lines(&lines, "o");
        let got: Vec<(&str, &[u8])> =
            groups.iter().map(|(value, lines)| (value.as_str(), &lines[..])).collect();
        let expected: [(&str, &[u8]); 3] = [
            ("a", b"{\"o\":\"a\",\"n\":0}\n{\"n\":1,\"o\":\"a\"}\n"),
            ("7", b"{\"o\":7}\n"),
            ("null", b"not json\n"),
        ];
        assert_eq!(got, expected);
    }

    #[test]
    fn no_two_values_share_a_name() {
        assert_eq!(stream_name("flights", "JFK"), "flights-JFK");
        assert_eq!(stream_name("t", "a b=é"), "t-a=20b=3D=C3=A9");
    }

    #[test]
    fn lines_are_skipped_by_record() {
        let lines = Bytes::from_static(b"\n1\n2\n3\n");
        assert_eq!(skip_lines(&lines, 2), (Bytes::from_static(b"3\n"), 2));
        assert_eq!(skip_lines(&lines, 5), (Bytes::new(), 3));
        assert_eq!(skip_lines(&lines, 0), (lines, 0));
    }
}
