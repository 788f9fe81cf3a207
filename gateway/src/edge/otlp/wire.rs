//! Protobuf as it is written: what answers and the translation from JSON need.
//!
//! *Owns*: tags, varints, lengths on their way out. A core.
//! *Does not own*: reading (`sluice_shared::protobuf`).

/// Of lengths that are written before what they measure: a varint of five bytes, whatever its value. Readers take it.
const LENGTH_BYTES: usize = 5;

/// A varint's wire type.
pub(super) const VARINT: u8 = 0;
/// That of eight bytes.
pub(super) const FIXED64: u8 = 1;
/// That of bytes with a length.
const DELIMITED: u8 = 2;
/// That of four bytes.
pub(super) const FIXED32: u8 = 5;

/// Seven bits a byte, the lowest first.
pub(super) fn put_varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// A field's number, and how its value lies there.
pub(super) fn put_tag(out: &mut Vec<u8>, number: u32, wire: u8) {
    put_varint(out, u64::from(number) << 3 | u64::from(wire));
}

/// A number; zero is what is not sent.
pub(super) fn put_number(out: &mut Vec<u8>, number: u32, value: u64) {
    if value > 0 {
        put_tag(out, number, VARINT);
        put_varint(out, value);
    }
}

/// Text, bytes or a message.
pub(super) fn put_bytes(out: &mut Vec<u8>, number: u32, value: &[u8]) {
    put_tag(out, number, DELIMITED);
    put_varint(out, value.len() as u64);
    out.extend_from_slice(value);
}

/// Begins a message whose length is not known yet; `end_message` takes the answer.
pub(super) fn begin_message(out: &mut Vec<u8>, number: u32) -> usize {
    put_tag(out, number, DELIMITED);
    out.extend_from_slice(&[0; LENGTH_BYTES]);
    out.len()
}

/// Ends the message that began at `start`.
pub(super) fn end_message(out: &mut [u8], start: usize) {
    let mut length = out.len() - start;
    for (place, byte) in out[start - LENGTH_BYTES..start].iter_mut().enumerate() {
        let more = if place + 1 < LENGTH_BYTES { 0x80 } else { 0 };
        *byte = (length & 0x7f) as u8 | more;
        length >>= 7;
    }
}
