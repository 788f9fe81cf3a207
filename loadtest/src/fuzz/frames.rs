//! `sluice.v1`: frames of both ways, however their bytes are cut, and the records that a frame's payload has.
//!
//! *Owns*: what must hold of them.
//! *Does not own*: their form (`sluice_shared::frame`, `prefixed`).

use bytes::Bytes;
use sluice_gateway::fuzzing::follow_frames;
use sluice_shared::error::{Error, ErrorKind};
use sluice_shared::frame::{
    Ack, Encoding, GatewayFrame, Move, Open, Opened, ProducerFrame, Rejected, UnknownFields,
    bytes_of_records, count_lines, count_messages, lines, messages,
};
use sluice_shared::ids::{PodId, StreamId, StreamName, TableName};
use sluice_shared::prefixed::{FrameReader, prefix};

use super::draw::Draw;

/// Limit of frames behind prefixes.
const FRAME_BYTES_MAX: usize = 600;

/// By its first byte an input is a producer's frame, a gateway's, frames behind their prefixes, a payload of records, the
/// bytes of a WebSocket, or a name. Frames and names that are read are written so that they are read as the same again;
/// pieces do not show; counts agree with what is there.
pub(super) fn frames(input: &[u8]) {
    let mut draw = Draw::new(input);
    match draw.below(6) {
        0 => {
            let Ok(frame) = ProducerFrame::decode(Bytes::copy_from_slice(draw.rest())) else { return };
            assert_eq!(ProducerFrame::decode(frame.encode()).expect("own bytes"), frame);
        }
        1 => {
            let Ok(frame) = GatewayFrame::decode(draw.rest()) else { return };
            assert_eq!(GatewayFrame::decode(&frame.encode()).expect("own bytes"), frame);
        }
        2 => {
            let pieces = draw.pieces();
            assert_eq!(read(&pieces), read(&[&pieces.concat()]), "pieces show");
        }
        3 => payload(&mut draw),
        4 => {
            let pieces = draw.pieces();
            assert_eq!(follow_frames(&pieces), follow_frames(&[&pieces.concat()]), "pieces show");
        }
        _ => name(&mut draw),
    }
}

/// The frames of prefixed bytes, whether one has begun, and the code of their end.
fn read(pieces: &[&[u8]]) -> (Vec<Bytes>, bool, Option<String>) {
    let (mut reader, mut frames) = (FrameReader::new(FRAME_BYTES_MAX), Vec::new());
    for piece in pieces {
        reader.push(piece);
        loop {
            match reader.next_frame() {
                Ok(Some(frame)) => {
                    assert!(frame.len() <= FRAME_BYTES_MAX, "{} bytes", frame.len());
                    frames.push(frame);
                }
                Ok(None) => break,
                Err(error) => return (frames, true, Some(error.code)),
            }
        }
    }
    (frames, !reader.is_empty(), None)
}

fn payload(draw: &mut Draw<'_>) {
    let first = draw.below(16);
    let payload = draw.rest();
    let count = count_lines(payload);
    assert_eq!(lines(payload).count(), count);
    let end = bytes_of_records(Encoding::Json, payload, first);
    assert_eq!(end.is_some(), first <= count);
    assert_eq!(end.map(|end| count_lines(&payload[..end])), end.map(|_| first));
    let framed = count_messages(payload);
    let read = messages(payload).count();
    assert!(
        framed.as_ref().is_ok_and(|count| *count == read) || framed.is_err(),
        "{framed:?}, {read} are read"
    );
    let end = bytes_of_records(Encoding::Avro, payload, first);
    assert_eq!(end.is_some(), first <= read);
    let before = end.map(|end| count_messages(&payload[..end]).expect("whole messages"));
    assert_eq!(before, end.map(|_| first));
}

fn name(draw: &mut Draw<'_>) {
    let Ok(text) = std::str::from_utf8(draw.rest()) else { return };
    if let Ok(table) = text.parse::<TableName>() {
        assert_eq!(table.as_str().parse::<TableName>().expect("a whole name"), table);
    }
    if let Ok(stream) = text.parse::<StreamName>() {
        assert_eq!(stream.as_str(), text);
        let id = StreamId::named(&stream, 1);
        assert_eq!(id.as_str().parse::<StreamId>().expect("an id"), id);
    }
    if let Ok(pod) = text.parse::<PodId>() {
        assert_eq!(pod.as_str(), text);
    }
    if let Ok(stream) = text.parse::<StreamId>() {
        assert_eq!(stream.as_str(), text);
    }
}

/// One frame of each kind, payloads, a WebSocket's bytes, names.
pub(super) fn frame_seeds() -> Vec<Vec<u8>> {
    let open = Open {
        table: "t".parse().ok(),
        name: "stream".parse().ok(),
        resume_at: Some(7),
        encoding: Encoding::Arrow,
        unknown: UnknownFields::Ignore,
        schema: Some("/////w==".to_owned()),
        token: Some("secret".to_owned()),
        rate_bytes_per_s: Some(1_000),
    };
    let records =
        ProducerFrame::Records { first_offset: 7, count: 2, payload: Bytes::from_static(b"{\"n\":1}\n{}\n") };
    let producers = [ProducerFrame::Open(open), records, ProducerFrame::Finish(Default::default())];
    let opened = Opened {
        stream: StreamId::named(&"stream".parse().expect("a valid name"), 0),
        next_offset: 7,
        stream_end: 9,
        window_bytes: 1 << 20,
        frame_bytes_max: 10 << 20,
        requests: 0,
    };
    let rejected = Rejected {
        offset: 7,
        code: "wrong_type".to_owned(),
        column: Some("n".to_owned()),
        message: "no number".to_owned(),
        quarantined: true,
    };
    let gateways = [
        GatewayFrame::Opened(opened),
        GatewayFrame::Ack(Ack { durable: Some(7), committed: Some(3), version: Some(2) }),
        GatewayFrame::Rejected(rejected),
        GatewayFrame::Move(Move { after_ms: 100 }),
        GatewayFrame::Error(Error::new(ErrorKind::Fenced, "fenced", "another producer")),
    ];
    let mut seeds: Vec<Vec<u8>> =
        producers.iter().map(|frame| [&[0][..], &frame.encode()].concat()).collect();
    seeds.extend(gateways.iter().map(|frame| [&[1][..], &frame.encode()].concat()));
    let prefixed = producers.map(|frame| [&prefix(&frame.encode())[..], &frame.encode()].concat()).concat();
    seeds.push([&[2, 3, 2, 90, 200][..], &prefixed].concat());
    seeds.push(b"\x03\x02{\"n\":1}\n \r\n{}\n\n{\"n\":2}".to_vec());
    seeds.push(b"\x03\x02\x03abc\x00\x01x\x80\x01".to_vec());
    // Text in two fragments, a ping between them, a close.
    let websocket =
        b"\x01\x83\x01\x02\x03\x04abc\x89\x00\x80\xfe\x00\x04\x01\x02\x03\x04abcd\x88\x80\x00\x00\x00\x00";
    seeds.push([&[4, 2, 3, 9][..], websocket].concat());
    seeds.extend(["main.default.t", "a/b", "pod-1"].map(|name| [&[5][..], name.as_bytes()].concat()));
    seeds
}
