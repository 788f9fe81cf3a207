//! `sluice.v1`: the frames that producers and gateways exchange over WebSocket and QUIC.
//!
//! One kind byte, then the body. Control bodies are JSON, readable in any debugger; the body of `records` is
//! `u64 first offset`, `u32 count` (both big-endian), then the payload as the producer encoded it.
//!
//! *Owns*: the bytes of each frame, and refusing those that are none.
//! *Does not own*: what a frame means to a session. Offsets here are inclusive, as on every producer wire.

use std::fmt;

use bytes::{BufMut, Bytes, BytesMut};
use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::ids::{StreamId, StreamName, TableName, TableVersion};

/// WebSocket subprotocol.
pub const SUBPROTOCOL: &str = "sluice.v1";
/// QUIC's name for the same frames (ALPN): each bidirectional stream carries one stream, see `prefixed`.
pub const QUIC_ALPN: &[u8] = b"sluice/1";
/// The largest datagram that is sent to a gateway over QUIC, and that it takes, where the way there carries it: loopback does,
/// and jumbo frames. Ten of these are the most that one call sends, which is less than the 65,507 of UDP.
pub const QUIC_DATAGRAM_BYTES_MAX: u16 = 6_000;
/// Bytes before the payload of `records`: kind, first offset, count.
pub const RECORDS_HEADER_BYTES: usize = 1 + 8 + 4;
/// Largest payload of one frame unless configured otherwise, in bytes.
pub const FRAME_BYTES_MAX: usize = 10 << 20;

const OPEN: u8 = 0x01;
const RECORDS: u8 = 0x02;
const FINISH: u8 = 0x03;
const OPENED: u8 = 0x81;
const ACK: u8 = 0x82;
const REJECTED: u8 = 0x83;
const MOVE: u8 = 0x84;
const ERROR: u8 = 0x85;

/// How the payload of `records` is encoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Encoding {
    /// Newline-delimited JSON objects.
    #[default]
    Json,
    /// One complete Arrow IPC stream (schema, batches) per frame.
    Arrow,
    /// Length-delimited protobuf messages: before each a varint of its length in bytes.
    Protobuf,
    /// Avro data in binary encoding without header, before each a varint of its length in bytes.
    Avro,
}

impl fmt::Display for Encoding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Json => "JSON",
            Self::Arrow => "Arrow",
            Self::Protobuf => "protobuf",
            Self::Avro => "Avro",
        })
    }
}

/// What to do with fields that the table does not have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum UnknownFields {
    /// Refuse the record.
    #[default]
    Refuse,
    /// Drop the field, keep the record.
    Ignore,
}

/// First frame of a stream, from the producer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Open {
    /// The table; must agree with the URL where that names one too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub table: Option<TableName>,
    /// Makes it a named stream.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<StreamName>,
    /// Of a named stream: the first offset that the producer has had no answer for. It sends from there, and hears
    /// again which of its records were refused; none is written twice. Without it a stream is resumed where it ends.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resume_at: Option<u64>,
    /// Encoding of all `records` frames to come.
    #[serde(default)]
    pub encoding: Encoding,
    /// Fields that the table does not have.
    #[serde(default)]
    pub unknown: UnknownFields,
    /// Base64 of an Arrow IPC schema or, of a protobuf stream, of the message's serialized `DescriptorProto`, of an Avro
    /// stream, of its schema's JSON: creates the table where it does not exist, and is checked where it does. Protobuf
    /// and Avro streams must have it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub schema: Option<String>,
    /// Bearer token, where the transport carries none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token: Option<String>,
    /// Expected bytes per second; helps placement.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate_bytes_per_s: Option<u64>,
}

/// When a `finish` is answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FinishWhen {
    /// All is on stable storage.
    #[default]
    Durable,
    /// All is in a table version.
    Committed,
}

/// No more records.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Finish {
    /// What the answer waits for.
    #[serde(default)]
    pub when: FinishWhen,
}

/// Answer to `open`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Opened {
    /// The stream's id, as it stands in `_stream`.
    pub stream: StreamId,
    /// First offset to send. Greater than 0 when a named stream is resumed.
    pub next_offset: u64,
    /// One more than the last offset that the stream has. Beyond `next_offset` where the producer sends again what it
    /// has had no answer for.
    #[serde(default)]
    pub stream_end: u64,
    /// How much may be sent without an ack, in bytes; beyond it the gateway stops reading.
    pub window_bytes: u64,
    /// Largest payload of one frame, in bytes.
    pub frame_bytes_max: u64,
    /// Of a stream that counts its requests: how many are durable, which are all before `next_offset`. No frame of
    /// `sluice.v1` says it.
    #[serde(skip)]
    pub requests: u64,
}

/// Cumulative: everything up to and including these offsets. At least one of `durable` and `committed` is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Ack {
    /// On stable storage.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub durable: Option<u64>,
    /// In the table.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub committed: Option<u64>,
    /// The table version in which they can be read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<TableVersion>,
}

/// A record that does not fit its table. The records around it are not affected.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rejected {
    /// Its offset.
    pub offset: u64,
    /// Stable, machine-readable reason in `snake_case`.
    pub code: String,
    /// The column to blame, dotted for nested ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub column: Option<String>,
    /// What is wrong with it.
    pub message: String,
    /// It is kept in `<table>__rejected`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub quarantined: bool,
}

/// The gateway is going away.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Move {
    /// Reconnect within this time.
    pub after_ms: u64,
}

/// A frame from a producer.
#[derive(Debug, Clone, PartialEq)]
pub enum ProducerFrame {
    /// First frame of a stream.
    Open(Open),
    /// Consecutive records.
    Records {
        /// Offset of the first.
        first_offset: u64,
        /// How many.
        count: u32,
        /// As the producer encoded them.
        payload: Bytes,
    },
    /// No more records.
    Finish(Finish),
}

/// A frame from a gateway.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GatewayFrame {
    /// Answer to `open`.
    Opened(Opened),
    /// Progress.
    Ack(Ack),
    /// A record was refused.
    Rejected(Rejected),
    /// Reconnect elsewhere.
    Move(Move),
    /// The stream has ended.
    Error(Error),
}

impl ProducerFrame {
    /// The frame's bytes.
    pub fn encode(&self) -> Bytes {
        match self {
            Self::Open(open) => control(OPEN, open),
            Self::Finish(finish) => control(FINISH, finish),
            Self::Records { first_offset, count, payload } => {
                let mut bytes = BytesMut::with_capacity(RECORDS_HEADER_BYTES + payload.len());
                bytes.put_u8(RECORDS);
                bytes.put_u64(*first_offset);
                bytes.put_u32(*count);
                bytes.put_slice(payload);
                bytes.freeze()
            }
        }
    }

    /// Reads a frame without copying its payload.
    ///
    /// # Errors
    /// `Invalid` for an empty frame, an unknown kind, a short header, or a control body that is not its JSON.
    pub fn decode(mut bytes: Bytes) -> Result<Self, Error> {
        let Some(&kind) = bytes.first() else {
            return Err(Error::invalid("empty_frame", "empty frame: expected a kind byte and a body"));
        };
        match kind {
            OPEN => parse("open", &bytes[1..]).map(Self::Open),
            FINISH if bytes.len() == 1 => Ok(Self::Finish(Finish::default())),
            FINISH => parse("finish", &bytes[1..]).map(Self::Finish),
            RECORDS if bytes.len() < RECORDS_HEADER_BYTES => Err(Error::invalid(
                "truncated_frame",
                format!(
                    "records frame of {} bytes: its header alone has {RECORDS_HEADER_BYTES}",
                    bytes.len()
                ),
            )),
            RECORDS => {
                let header = bytes.split_to(RECORDS_HEADER_BYTES);
                let first_offset = u64::from_be_bytes(header[1..9].try_into().expect("eight bytes"));
                let count = u32::from_be_bytes(header[9..13].try_into().expect("four bytes"));
                Ok(Self::Records { first_offset, count, payload: bytes })
            }
            other => Err(Error::invalid(
                "unknown_frame_kind",
                format!(
                    "frame of unknown kind 0x{other:02x}: expected open 0x01, records 0x02 or finish 0x03 \
                     (subprotocol {SUBPROTOCOL})"
                ),
            )),
        }
    }
}

impl GatewayFrame {
    /// The frame's bytes.
    pub fn encode(&self) -> Bytes {
        match self {
            Self::Opened(body) => control(OPENED, body),
            Self::Ack(body) => control(ACK, body),
            Self::Rejected(body) => control(REJECTED, body),
            Self::Move(body) => control(MOVE, body),
            Self::Error(body) => control(ERROR, body),
        }
    }

    /// Reads a frame.
    ///
    /// # Errors
    /// `Invalid` for an empty frame, an unknown kind, or a body that is not its JSON.
    pub fn decode(bytes: &[u8]) -> Result<Self, Error> {
        let Some((&kind, body)) = bytes.split_first() else {
            return Err(Error::invalid("empty_frame", "empty frame from the gateway"));
        };
        match kind {
            OPENED => parse("opened", body).map(Self::Opened),
            ACK => parse("ack", body).map(Self::Ack),
            REJECTED => parse("rejected", body).map(Self::Rejected),
            MOVE => parse("move", body).map(Self::Move),
            ERROR => parse("error", body).map(Self::Error),
            other => Err(Error::invalid(
                "unknown_frame_kind",
                format!("frame of unknown kind 0x{other:02x} from the gateway: is the client older than it?"),
            )),
        }
    }
}

/// Number of records in an NDJSON payload: its lines that are not blank.
pub fn count_lines(payload: &[u8]) -> usize {
    lines(payload).count()
}

/// The records of an NDJSON payload: its lines, between `\n`, that are not blank. A `\r` at the end of a line
/// is still there, as are spaces: both are white space to JSON.
pub fn lines(payload: &[u8]) -> impl Iterator<Item = &[u8]> {
    let mut start = 0;
    // The end of the payload ends a line too.
    memchr::memchr_iter(b'\n', payload).chain(std::iter::once(payload.len())).filter_map(move |end| {
        let line = &payload[start..end];
        start = end + 1;
        line.iter().any(|b| !matches!(b, b' ' | b'\t' | b'\r')).then_some(line)
    })
}

/// Number of records in a payload of length-delimited messages.
///
/// # Errors
/// `Invalid` (`invalid_framing`) where a length is none, or reaches beyond the payload.
pub fn count_messages(payload: &[u8]) -> Result<usize, Error> {
    let (mut count, mut at) = (0, 0);
    while at < payload.len() {
        let Some((_, end)) = message_at(payload, at) else {
            let left = payload.len() - at;
            let message = format!(
                "payload of {} bytes: message {count}, at byte {at}, has no length that fits the {left} bytes left; \
                 before each message stands a varint of its length",
                payload.len()
            );
            return Err(Error::invalid("invalid_framing", message));
        };
        (count, at) = (count + 1, end);
    }
    Ok(count)
}

/// The records of a payload of length-delimited messages, up to the first length that does not fit.
pub fn messages(payload: &[u8]) -> impl Iterator<Item = &[u8]> {
    let mut at = 0;
    std::iter::from_fn(move || {
        let (start, end) = message_at(payload, at)?;
        at = end;
        Some(&payload[start..end])
    })
}

/// Bytes of a payload up to the end of its first `records` records. None where it has fewer, or is Arrow, which is read
/// as a whole.
pub fn bytes_of_records(encoding: Encoding, payload: &[u8], records: usize) -> Option<usize> {
    let Some(last) = records.checked_sub(1) else { return Some(0) };
    let record = match encoding {
        Encoding::Json => lines(payload).nth(last),
        Encoding::Protobuf | Encoding::Avro => messages(payload).nth(last),
        Encoding::Arrow => None,
    }?;
    Some(record.as_ptr().addr() - payload.as_ptr().addr() + record.len())
}

/// Start and end of the message whose length stands at `at`.
fn message_at(payload: &[u8], at: usize) -> Option<(usize, usize)> {
    let (mut length, mut start) = (0_usize, at);
    // Five bytes hold more than the longest frame.
    for shift in [0, 7, 14, 21, 28] {
        let byte = *payload.get(start)?;
        start += 1;
        length |= usize::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            let end = start.checked_add(length)?;
            return (end <= payload.len()).then_some((start, end));
        }
    }
    None
}

fn control(kind: u8, body: &impl Serialize) -> Bytes {
    let mut bytes = vec![kind];
    serde_json::to_writer(&mut bytes, body).expect("control bodies are plain JSON");
    bytes.into()
}

fn parse<'a, T: Deserialize<'a>>(kind: &str, body: &'a [u8]) -> Result<T, Error> {
    let invalid = |why: String| {
        Error::invalid(
            "invalid_frame",
            format!("{kind} frame: its body is not the JSON object of its kind: {why}"),
        )
    };
    // serde would read an array as a struct's fields in order.
    if body.first() != Some(&b'{') {
        return Err(invalid("expected `{`".to_owned()));
    }
    serde_json::from_slice(body).map_err(|error| invalid(error.to_string()))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn open_may_leave_everything_to_the_url() {
        let frame = ProducerFrame::decode(Bytes::from_static(b"\x01{}")).expect("valid");
        let ProducerFrame::Open(open) = frame else { panic!("{frame:?}") };
        assert_eq!((open.table, open.encoding, open.unknown), (None, Encoding::Json, UnknownFields::Refuse));
    }

    #[test]
    fn what_is_no_frame_is_refused_by_name() {
        for (bytes, code) in [
            (&b""[..], "empty_frame"),
            (b"\x7f{}", "unknown_frame_kind"),
            (b"\x02\x00\x00", "truncated_frame"),
            (b"\x01[]", "invalid_frame"),
            (b"\x01{\"tabel\":\"x\"}", "invalid_frame"),
            (b"\x01{\"table\":\"../x\"}", "invalid_frame"),
        ] {
            let error = ProducerFrame::decode(Bytes::from_static(bytes)).expect_err(code);
            assert_eq!(error.code, code);
        }
    }

    #[test]
    fn the_first_records_end_where_the_last_of_them_does() {
        let ends = |encoding, payload: &[u8]| [0, 1, 2, 3].map(|n| bytes_of_records(encoding, payload, n));
        assert_eq!(ends(Encoding::Json, b"{}\n \n{\"a\":1}\n"), [Some(0), Some(2), Some(12), None]);
        assert_eq!(ends(Encoding::Avro, b"\x02ab\x00"), [Some(0), Some(3), Some(4), None]);
        assert_eq!(ends(Encoding::Arrow, b"any"), [Some(0), None, None, None]);
    }

    #[test]
    fn blank_lines_are_no_records() {
        for (payload, count) in [
            ("", 0),
            ("\n\r\n \t\n", 0),
            ("{}", 1),
            ("{}\n", 1),
            ("\n{}\r\n\r\n{}\r\n", 2),
            (" {}\n\n  x", 2),
        ] {
            assert_eq!(count_lines(payload.as_bytes()), count, "{payload:?}");
        }
    }

    #[test]
    fn a_length_that_does_not_fit_is_no_framing() {
        for (payload, count) in [
            (&b""[..], Some(0)),
            (b"\x00", Some(1)),
            (b"\x01x\x00\x80\x00\x02yz", Some(4)),
            (b"\x01", None),
            (b"\x01x\x80", None),
            (b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", None),
            (b"\x80\x80\x80\x80\x80\x00", None),
        ] {
            let counted = count_messages(payload);
            assert_eq!(counted.as_ref().ok().copied(), count, "{payload:?}: {counted:?}");
            assert!(counted.is_ok_and(|count| count == messages(payload).count()) || count.is_none());
        }
        assert_eq!(messages(b"\x01x\x00\x02y").collect::<Vec<_>>(), [&b"x"[..], b""]);
    }

    proptest! {
        #[test]
        fn records_round_trip(first_offset: u64, count: u32, payload: Vec<u8>) {
            let frame = ProducerFrame::Records { first_offset, count, payload: payload.into() };
            prop_assert_eq!(ProducerFrame::decode(frame.encode()).expect("own bytes"), frame);
        }

        #[test]
        fn any_bytes_are_read_or_refused(bytes: Vec<u8>) {
            let _ = GatewayFrame::decode(&bytes);
            let _ = ProducerFrame::decode(bytes.into());
        }

        #[test]
        fn acks_round_trip(durable: Option<u64>, committed: Option<u64>, version: Option<u64>) {
            let frame = GatewayFrame::Ack(Ack { durable, committed, version });
            prop_assert_eq!(GatewayFrame::decode(&frame.encode()).expect("own bytes"), frame);
        }
    }
}
