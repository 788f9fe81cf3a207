//! For fuzzers: bodies cut without a connection. In builds with assertions alone, where nothing else calls it.
//!
//! *Owns*: that.
//! *Does not own*: what must hold (`loadtest`).

use arrow::datatypes::SchemaRef;
use bytes::Bytes;

use super::split::{Ready, Splitter};

/// What a body is.
#[derive(Debug, Clone)]
pub enum Body {
    /// One JSON record a line.
    Lines,
    /// One JSON object, or an array.
    Values,
    /// An array and nothing else.
    Array,
    /// CSV with a header line, for a table with this schema where it exists.
    Csv(Option<SchemaRef>),
    /// An Arrow IPC stream.
    Arrow,
}

/// Cuts a body that comes in these pieces: its frames, each with its count of records, and the code of the error that it
/// ends with.
pub fn split_body(
    body: &Body,
    pieces: &[&[u8]],
    record_bytes_max: usize,
) -> (Vec<(u32, Bytes)>, Option<String>) {
    let mut splitter = match body {
        Body::Lines => Splitter::lines(),
        Body::Values => Splitter::values(false),
        Body::Array => Splitter::values(true),
        Body::Csv(table) => Splitter::csv(table.clone(), false),
        Body::Arrow => Splitter::arrow(),
    };
    let mut ready = Ready::new(record_bytes_max);
    let mut pieces = pieces.iter();
    let pushed = pieces.try_for_each(|piece| splitter.push(Bytes::copy_from_slice(piece), &mut ready));
    let ended = pushed.and_then(|()| splitter.finish(&mut ready));
    let frames = std::iter::from_fn(|| ready.next()).map(|frame| (frame.count, frame.payload));
    (frames.collect(), ended.err().map(|error| error.code))
}
