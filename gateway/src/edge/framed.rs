//! `sluice.v1` over any transport: what its frames mean to a session.
//!
//! *Owns*: the producer's frames as inputs, `open` as the terms of a stream.
//! *Does not own*: how frames travel (`websocket`, `quic`), their bytes (`sluice_shared::frame`).

use base64::Engine;
use bytes::Bytes;
use sluice_shared::error::Error;
use sluice_shared::frame::{Encoding, Open, ProducerFrame, count_lines, count_messages};
use sluice_shared::ids::TableName;

use crate::auth::Credential;
use crate::edge::{PERSISTENT, POSTED};
use crate::session::{Input, Records};
use crate::upstream::OpenTerms;

/// A frame after `open`.
pub(crate) fn input(frame: Bytes, encoding: Encoding) -> Input {
    match ProducerFrame::decode(frame) {
        Ok(ProducerFrame::Records { first_offset, count, payload }) => {
            match miscounted(first_offset, count, &payload, encoding) {
                None => Input::Records(Records { first_offset: Some(first_offset), count, payload }),
                Some(error) => Input::Refused(error),
            }
        }
        Ok(ProducerFrame::Finish(finish)) => Input::Finish(finish.when),
        Ok(ProducerFrame::Open(_)) => {
            let message = "second `open` frame: this stream is open already; open another one beside it";
            Input::Refused(Error::invalid("already_open", message))
        }
        Err(error) => Input::Refused(error),
    }
}

fn miscounted(first_offset: u64, count: u32, payload: &[u8], encoding: Encoding) -> Option<Error> {
    let found = match encoding {
        _ if count == 0 => 0,
        Encoding::Json => count_lines(payload),
        Encoding::Protobuf | Encoding::Avro => match count_messages(payload) {
            Ok(found) => found,
            Err(error) => return Some(error.at_offset(first_offset)),
        },
        // Whether the batch has that many rows is seen when the pod reads it.
        Encoding::Arrow => return None,
    };
    if count > 0 && found == count as usize {
        return None;
    }
    let what = if encoding == Encoding::Json { "lines that are not blank" } else { "messages" };
    let message = if count == 0 {
        "records frame that counts 0 records: state how many its payload holds, at least 1".to_owned()
    } else {
        format!("records frame that counts {count} records: its payload has {found} {what}")
    };
    Some(Error::invalid("count_mismatch", message).at_offset(first_offset))
}

/// The first frame.
///
/// # Errors
/// `Invalid` for any other than `open`.
pub(crate) fn open(frame: Bytes) -> Result<Open, Error> {
    match ProducerFrame::decode(frame)? {
        ProducerFrame::Open(open) => Ok(open),
        ProducerFrame::Records { .. } => Err(expected_open("a records frame")),
        ProducerFrame::Finish(_) => Err(expected_open("a finish frame")),
    }
}

pub(crate) fn expected_open(got: &str) -> Error {
    Error::invalid("expected_open", format!("expected an `open` frame first, got {got}"))
}

/// A frame has begun and does not go on.
pub(crate) fn frame_timeout() -> Error {
    let message =
        "a frame that has begun brought too little in gateway.read_timeout_ms: send it again on a new stream";
    Error::unavailable("frame_timeout", message)
}

/// What the stream is to be opened with.
///
/// # Errors
/// `Invalid` for a schema that is no base64, and for a new stream that is to be resumed.
pub(crate) fn terms(open: Open, table: TableName) -> Result<OpenTerms, Error> {
    let schema = match open.schema {
        None => Bytes::new(),
        Some(text) => {
            base64::engine::general_purpose::STANDARD.decode(&text).map(Bytes::from).map_err(|error| {
                let what = "its schema is not base64 of an Arrow IPC schema or a descriptor";
                let message = format!("`open`: {what}: {error}");
                Error::invalid("invalid_schema", message)
            })?
        }
    };
    let credential = Credential::token(open.token.as_deref());
    if let Some(reserved) = [POSTED, PERSISTENT]
        .iter()
        .find(|reserved| open.name.as_ref().is_some_and(|name| name.as_str().starts_with(**reserved)))
    {
        let message = format!("no stream can be named {reserved}…: such names are given by Sluice itself");
        return Err(Error::invalid("reserved_name", message));
    }
    let terms = match open.name {
        Some(name) => OpenTerms::named(table, open.encoding, credential, name),
        None if open.resume_at.is_some_and(|offset| offset > 0) => {
            let message = "`resume_at` without a stream name: only a named stream can be resumed; a new one begins at 0";
            return Err(Error::invalid("resume_without_name", message));
        }
        None => OpenTerms::ephemeral(table, open.encoding, credential),
    };
    Ok(OpenTerms {
        resume_at: open.resume_at,
        unknown: open.unknown,
        schema,
        rate_bytes_per_s: open.rate_bytes_per_s,
        ..terms
    })
}
