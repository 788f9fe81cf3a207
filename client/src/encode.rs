//! Payloads: records to frames of bounded size, and the rest of a frame whose first records are covered.
//!
//! *Owns*: splitting NDJSON at line ends, slicing and encoding Arrow batches, cutting both.
//! *Does not own*: what a payload means (the pod decodes it), when it is sent. Pure functions.

use arrow::array::RecordBatch;
use arrow::buffer::Buffer;
use arrow::datatypes::Schema;
use arrow::error::ArrowError;
use arrow::ipc::reader::StreamDecoder;
use arrow::ipc::writer::StreamWriter;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use bytes::{Bytes, BytesMut};
use sluice_shared::frame::{Encoding, messages};

use crate::error::Error;
use crate::window::Chunk;

/// A record that is larger than a frame may be: which of the call's records, and its size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TooLarge {
    pub(crate) record: u64,
    pub(crate) bytes: usize,
}

/// Splits newline-delimited JSON at line ends into chunks of about `chunk_bytes`, never above `limit`, without
/// copying. Blank lines are no records. Each chunk ends with a line end.
pub(crate) fn split_lines(text: &Bytes, chunk_bytes: usize, limit: usize) -> Result<Vec<Chunk>, TooLarge> {
    let mut chunks = Vec::new();
    let (mut start, mut records, mut records_before) = (0, 0u32, 0u64);
    let mut at = 0;
    while at < text.len() {
        let line_end = text[at..].iter().position(|b| *b == b'\n').map_or(text.len(), |n| at + n + 1);
        let is_record = !text[at..line_end].trim_ascii().is_empty();
        if is_record && line_end - at > limit {
            return Err(TooLarge { record: records_before, bytes: line_end - at });
        }
        if line_end - start > chunk_bytes.min(limit) && at > start {
            push_lines(&mut chunks, text.slice(start..at), records);
            (start, records) = (at, 0);
        }
        records += u32::from(is_record);
        records_before += u64::from(is_record);
        at = line_end;
    }
    push_lines(&mut chunks, text.slice(start..), records);
    Ok(chunks)
}

fn push_lines(chunks: &mut Vec<Chunk>, payload: Bytes, records: u32) {
    if records == 0 {
        return;
    }
    let payload = if payload.ends_with(b"\n") {
        payload
    } else {
        let mut ended = BytesMut::with_capacity(payload.len() + 1);
        ended.extend_from_slice(&payload);
        ended.extend_from_slice(b"\n");
        ended.freeze()
    };
    chunks.push(Chunk { records, payload });
}

/// The schema as the `open` frame carries it: base64 of an Arrow IPC stream without batches.
pub(crate) fn schema_text(schema: &Schema) -> Result<String, ArrowError> {
    let mut bytes = Vec::new();
    StreamWriter::try_new(&mut bytes, schema)?.finish()?;
    Ok(BASE64_STANDARD.encode(bytes))
}

/// Slices and encodes a batch: each chunk is one Arrow IPC stream of about `chunk_bytes`, never above `limit`.
pub(crate) fn encode_batch(
    batch: &RecordBatch,
    chunk_bytes: usize,
    limit: usize,
) -> Result<Vec<Chunk>, BatchFault> {
    let mut chunks = Vec::new();
    let rows_max = rows_for(batch, chunk_bytes.min(limit));
    let mut row = 0;
    while row < batch.num_rows() {
        let rows = rows_max.min(batch.num_rows() - row);
        encode_rows(batch, row, rows, limit, &mut chunks)?;
        row += rows;
    }
    Ok(chunks)
}

/// Why a batch cannot be encoded.
#[derive(Debug)]
pub(crate) enum BatchFault {
    TooLarge(TooLarge),
    Arrow(ArrowError),
}

impl From<ArrowError> for BatchFault {
    fn from(error: ArrowError) -> Self {
        Self::Arrow(error)
    }
}

fn encode_rows(
    batch: &RecordBatch,
    row: usize,
    rows: usize,
    limit: usize,
    chunks: &mut Vec<Chunk>,
) -> Result<(), BatchFault> {
    let payload = encode_whole(&batch.slice(row, rows))?;
    if payload.len() <= limit {
        let records = u32::try_from(rows).expect("a frame of under 4 GiB");
        chunks.push(Chunk { records, payload });
        return Ok(());
    }
    if rows == 1 {
        return Err(BatchFault::TooLarge(TooLarge { record: row as u64, bytes: payload.len() }));
    }
    drop(payload);
    // Rows are of unequal size: halving finds what fits.
    encode_rows(batch, row, rows / 2, limit, chunks)?;
    encode_rows(batch, row + rows / 2, rows - rows / 2, limit, chunks)
}

fn encode_whole(batch: &RecordBatch) -> Result<Bytes, ArrowError> {
    let mut bytes = Vec::new();
    let mut writer = StreamWriter::try_new(&mut bytes, &batch.schema())?;
    writer.write(batch)?;
    writer.finish()?;
    drop(writer);
    Ok(bytes.into())
}

/// How many rows make about `bytes`, by the batch's mean.
fn rows_for(batch: &RecordBatch, bytes: usize) -> usize {
    let sizes = batch.columns().iter().map(|column| {
        let data = column.to_data();
        data.get_slice_memory_size().unwrap_or_else(|_| column.get_array_memory_size())
    });
    let row_bytes = sizes.sum::<usize>() / batch.num_rows().max(1);
    (bytes / row_bytes.max(1)).max(1)
}

/// The payload without its first `records`.
pub(crate) fn cut(encoding: Encoding, payload: &Bytes, records: usize) -> Result<Bytes, Error> {
    match encoding {
        Encoding::Json => Ok(cut_lines(payload, records)),
        Encoding::Arrow => cut_batches(payload, records),
        Encoding::Protobuf | Encoding::Avro => Ok(cut_messages(payload, records)),
    }
}

fn cut_messages(payload: &Bytes, records: usize) -> Bytes {
    let last = records.checked_sub(1).and_then(|last| messages(payload).nth(last));
    let at = last.map_or(0, |last| last.as_ptr().addr() - payload.as_ptr().addr() + last.len());
    payload.slice(at..)
}

fn cut_lines(payload: &Bytes, mut records: usize) -> Bytes {
    let mut at = 0;
    while records > 0 && at < payload.len() {
        let line_end = payload[at..].iter().position(|b| *b == b'\n').map_or(payload.len(), |n| at + n + 1);
        records -= usize::from(!payload[at..line_end].trim_ascii().is_empty());
        at = line_end;
    }
    payload.slice(at..)
}

/// Every payload of this client holds one batch.
fn cut_batches(payload: &Bytes, records: usize) -> Result<Bytes, Error> {
    let mut buffer = Buffer::from(payload.clone());
    let batch = StreamDecoder::new().decode(&mut buffer)?;
    let batch = batch.filter(|batch| batch.num_rows() > records);
    let batch =
        batch.ok_or_else(|| Error::Encoding("an own frame holds fewer records than it said".into()))?;
    Ok(encode_whole(&batch.slice(records, batch.num_rows() - records))?)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::array::{ArrayRef, AsArray, Int64Array, StringArray};
    use arrow::datatypes::Int64Type;
    use proptest::prelude::*;

    use super::*;

    fn batch(rows: usize) -> RecordBatch {
        let numbers: ArrayRef = Arc::new(Int64Array::from_iter_values(0..rows as i64));
        let texts: ArrayRef = Arc::new(StringArray::from_iter_values((0..rows).map(|n| "x".repeat(n % 50))));
        RecordBatch::try_from_iter([("n", numbers), ("text", texts)]).expect("fits")
    }

    fn decoded(payload: &Bytes) -> RecordBatch {
        let mut buffer = Buffer::from(payload.clone());
        StreamDecoder::new().decode(&mut buffer).expect("own bytes").expect("one batch")
    }

    #[test]
    fn a_line_over_the_limit_is_named() {
        let text = Bytes::from_static(b"{}\n\n{\"a\":1}\n{}\n");
        assert_eq!(split_lines(&text, 64, 7), Err(TooLarge { record: 1, bytes: 8 }));
    }

    #[test]
    fn the_last_line_need_not_end() {
        let chunks = split_lines(&Bytes::from_static(b" \n{}\r\n{}"), 64, 64).expect("small");
        assert_eq!(chunks, [Chunk { records: 2, payload: Bytes::from_static(b" \n{}\r\n{}\n") }]);
        assert_eq!(split_lines(&Bytes::from_static(b"\n \n"), 64, 64), Ok(vec![]));
    }

    #[test]
    fn large_batches_are_sliced_in_order() {
        let whole = batch(10_000);
        let chunks = encode_batch(&whole, 16 << 10, 32 << 10).expect("encodes");
        assert!(chunks.len() > 5);
        let mut row = 0;
        for chunk in &chunks {
            assert!(chunk.payload.len() <= 32 << 10);
            let rows = chunk.records as usize;
            assert_eq!(decoded(&chunk.payload), whole.slice(row, rows));
            row += rows;
        }
        assert_eq!(row, 10_000);
    }

    #[test]
    fn a_row_over_the_limit_is_named() {
        let texts: ArrayRef = Arc::new(StringArray::from_iter_values(
            (0..100).map(|n| "x".repeat(if n == 70 { 9000 } else { 1 })),
        ));
        let batch = RecordBatch::try_from_iter([("text", texts)]).expect("fits");
        let fault = encode_batch(&batch, 8000, 8000).expect_err("too large");
        assert!(matches!(fault, BatchFault::TooLarge(TooLarge { record: 70, .. })), "{fault:?}");
    }

    #[test]
    fn arrow_is_cut_by_rows() {
        let chunks = encode_batch(&batch(100), 1 << 20, 1 << 20).expect("encodes");
        let rest = decoded(&cut(Encoding::Arrow, &chunks[0].payload, 30).expect("cuts"));
        assert_eq!(rest, batch(100).slice(30, 70));
        assert_eq!(rest.column(0).as_primitive::<Int64Type>().value(0), 30);
        assert!(cut(Encoding::Arrow, &chunks[0].payload, 100).is_err());
    }

    proptest! {
        #[test]
        fn lines_come_through_whole(lines in proptest::collection::vec("[a-z \r]{0,12}", 0..60), size in 16..64usize) {
            let text = Bytes::from(lines.join("\n"));
            let is_record = |line: &&[u8]| !line.trim_ascii().is_empty();
            let expected: Vec<Vec<u8>> =
                text.split(|b| *b == b'\n').filter(is_record).map(<[u8]>::to_vec).collect();
            let mut got: Vec<Vec<u8>> = Vec::new();
            for chunk in split_lines(&text, size, 64).expect("short lines") {
                let before = got.len();
                got.extend(chunk.payload.split(|b| *b == b'\n').filter(is_record).map(<[u8]>::to_vec));
                prop_assert_eq!(got.len() - before, chunk.records as usize);
                prop_assert!(chunk.payload.len() <= size.max(16) + 1);
            }
            prop_assert_eq!(&got, &expected);
            for records in 0..expected.len() {
                let rest = cut(Encoding::Json, &text, records).expect("cuts");
                let rest: Vec<Vec<u8>> =
                    rest.split(|b| *b == b'\n').filter(is_record).map(<[u8]>::to_vec).collect();
                prop_assert_eq!(&rest, &expected[records..]);
            }
        }
    }
}
