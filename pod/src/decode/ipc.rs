//! The messages of an Arrow IPC stream, and the guard that stands before their decoding.
//!
//! *Owns*: cutting a stream into messages; bounding, from headers alone, what decoding would allocate; reading a whole stream
//! that a pod has written.
//! *Does not own*: decoding (the arrow crate), schemas and columns of producers (`arrow`).
//!
//! The arrow crate allocates what the sender's length prefixes ask for, and a forged one ends the process: nothing
//! may be decoded before `check_batch` has passed it.

use std::panic::{AssertUnwindSafe, catch_unwind};

use ::arrow::array::RecordBatch;
use ::arrow::buffer::Buffer;
use ::arrow::datatypes::SchemaRef;
use ::arrow::error::ArrowError;
use ::arrow::ipc::reader::StreamDecoder;
use ::arrow::ipc::{self, MessageHeader};
use bytes::Bytes;
use sluice_shared::error::Error;

/// Bytes of the uncompressed length before each compressed buffer.
const PREFIX_BYTES: usize = 8;
/// The prefix of a buffer that is not compressed after all.
const NOT_COMPRESSED: i64 = -1;
const CONTINUATION: [u8; 4] = [0xff; 4];

/// One message of a stream: where it stands, and its header.
pub(super) struct FramedMessage<'a> {
    /// First byte, of the length before the header.
    pub start: usize,
    /// Bytes of length and header together.
    pub head_bytes: usize,
    /// The header.
    pub message: ipc::Message<'a>,
    /// What follows the header.
    pub body: &'a [u8],
}

impl FramedMessage<'_> {
    /// One past the last byte.
    pub(super) fn end(&self) -> usize {
        self.start + self.head_bytes + self.body.len()
    }
}

/// No Arrow IPC stream.
pub(super) fn invalid(why: impl std::fmt::Display) -> Error {
    Error::invalid(
        "invalid_arrow",
        format!("Arrow IPC: {why}; a frame holds one whole IPC stream: schema, dictionaries, batches"),
    )
}

fn truncated(at: usize, payload: &[u8]) -> Error {
    invalid(format!(
        "truncated: the message at byte {at} goes on after the {} bytes there are",
        payload.len()
    ))
}

/// The message at `at`; `None` at the stream's end.
pub(super) fn message(payload: &[u8], at: usize) -> Result<Option<FramedMessage<'_>>, Error> {
    let word = |at: usize| -> Option<[u8; 4]> { payload.get(at..at.checked_add(4)?)?.try_into().ok() };
    if at == payload.len() {
        return Ok(None);
    }
    let mut length_at = at;
    if word(at).ok_or_else(|| truncated(at, payload))? == CONTINUATION {
        length_at += 4;
    }
    let length = i32::from_le_bytes(word(length_at).ok_or_else(|| truncated(at, payload))?);
    let header_at = length_at + 4;
    if length == 0 {
        let rest = payload.len() - header_at;
        return if rest == 0 {
            Ok(None)
        } else {
            Err(invalid(format!("{rest} bytes after the end of the stream")))
        };
    }
    let length =
        usize::try_from(length).map_err(|_| invalid(format!("a header of {length} bytes at byte {at}")))?;
    let header = payload.get(header_at..header_at + length).ok_or_else(|| truncated(at, payload))?;
    let message = ipc::root_as_message(header)
        .map_err(|error| invalid(format!("the header at byte {at} is garbled: {error}")))?;
    let body_at = header_at + length;
    let body_bytes = usize::try_from(message.bodyLength())
        .map_err(|_| invalid(format!("a body of {} bytes at byte {at}", message.bodyLength())))?;
    let body_end = body_at.checked_add(body_bytes).ok_or_else(|| truncated(at, payload))?;
    let body = payload.get(body_at..body_end).ok_or_else(|| truncated(at, payload))?;
    Ok(Some(FramedMessage { start: at, head_bytes: body_at - at, message, body }))
}

/// How many bytes decoding may still make.
#[derive(Debug, Clone, Copy)]
pub(super) struct Budget {
    pub left: usize,
    pub max: usize,
}

impl Budget {
    pub(super) fn new(max: usize) -> Self {
        // Offsets of the table's types have 31 bits.
        let max = max.min(i32::MAX as usize);
        Self { left: max, max }
    }

    /// Takes bytes away.
    pub(super) fn spend(&mut self, bytes: usize) -> Result<(), Error> {
        let max = self.max;
        self.left = self.left.checked_sub(bytes).ok_or_else(|| {
            Error::invalid(
                "decoded_too_large",
                format!(
                    "the frame would have more than {max} bytes when decoded: send fewer records per frame"
                ),
            )
        })?;
        Ok(())
    }
}

/// Rows of a batch or dictionary message, once its lengths are known to be sound and within the budget.
pub(super) fn check_message(framed: &FramedMessage<'_>, budget: &mut Budget) -> Result<usize, Error> {
    let batch = match framed.message.header_type() {
        MessageHeader::RecordBatch => framed.message.header_as_record_batch(),
        MessageHeader::DictionaryBatch => {
            framed.message.header_as_dictionary_batch().and_then(|dictionary| dictionary.data())
        }
        other => return Err(invalid(format!("a message of kind {other:?} at byte {}", framed.start))),
    };
    let batch = batch.ok_or_else(|| invalid(format!("no batch in the message at byte {}", framed.start)))?;
    check_batch(batch, framed, budget)
}

/// Schema and batches of a stream that a pod has written, in the log, in a table's storage or for another pod. Guarded all
/// the same: bytes that were kept can be others than were written, and a panic would come again at each start.
///
/// # Errors
/// Where it is none that a pod writes.
pub(crate) fn read_written(stream: &Bytes) -> Result<(SchemaRef, Vec<RecordBatch>), ArrowError> {
    // Nothing is compressed: no buffer is larger than its place.
    let (mut at, mut budget) = (0, Budget::new(stream.len()));
    let refused = |error: Error| ArrowError::IpcError(error.message);
    while let Some(framed) = message(stream, at).map_err(refused)? {
        if at > 0 {
            check_message(&framed, &mut budget).map_err(refused)?;
        }
        at = framed.end();
    }
    let read = catch_unwind(AssertUnwindSafe(|| -> Result<_, ArrowError> {
        let (mut rest, mut decoder, mut batches) =
            (Buffer::from(stream.clone()), StreamDecoder::new(), vec![]);
        while let Some(batch) = decoder.decode(&mut rest)? {
            batches.push(batch);
        }
        decoder.finish()?;
        let schema = decoder.schema().ok_or_else(|| ArrowError::IpcError("there is no schema".to_owned()))?;
        Ok((schema, batches))
    }));
    read.unwrap_or_else(|_| Err(ArrowError::IpcError("lengths that contradict their types".to_owned())))
}

fn check_batch(
    batch: ipc::RecordBatch<'_>,
    framed: &FramedMessage<'_>,
    budget: &mut Budget,
) -> Result<usize, Error> {
    let unsound = |what: &str| invalid(format!("{what} in the batch at byte {}", framed.start));
    let length_max = i64::from(i32::MAX);
    for node in batch.nodes().into_iter().flatten() {
        if !(0..=length_max).contains(&node.length()) || !(0..=node.length()).contains(&node.null_count()) {
            return Err(unsound("an impossible length or null count"));
        }
    }
    for buffer in batch.buffers().into_iter().flatten() {
        let range = usize::try_from(buffer.offset()).ok().zip(usize::try_from(buffer.length()).ok());
        let bytes = range.and_then(|(offset, length)| framed.body.get(offset..offset.checked_add(length)?));
        let bytes = bytes.ok_or_else(|| unsound("a buffer outside of the body"))?;
        let decoded = match batch.compression() {
            Some(_) if !bytes.is_empty() => {
                uncompressed_bytes(bytes).ok_or_else(|| unsound("a bad buffer length"))?
            }
            _ => bytes.len(),
        };
        budget.spend(decoded)?;
    }
    if !(0..=length_max).contains(&batch.length()) {
        return Err(unsound("an impossible number of rows"));
    }
    usize::try_from(batch.length()).map_err(|_| unsound("an impossible number of rows"))
}

fn uncompressed_bytes(buffer: &[u8]) -> Option<usize> {
    let prefix = i64::from_le_bytes(buffer.get(..PREFIX_BYTES)?.try_into().ok()?);
    match prefix {
        NOT_COMPRESSED => Some(buffer.len() - PREFIX_BYTES),
        _ => usize::try_from(prefix).ok(),
    }
}
