//! Records as Zerobus's requests bring them, and as pods take them.
//!
//! *Owns*: the kinds of records, the payload of a request.
//! *Does not own*: their decoding (the pod's `decode`).

use bytes::{BufMut, Bytes, BytesMut};
use sluice_shared::error::Error;
use sluice_shared::frame::Encoding;
use sluice_shared::proto::zerobus::RecordType;
use sluice_shared::proto::zerobus::ingest_record_batch_request::Batch;
use sluice_shared::proto::zerobus::ingest_record_request::Record;

use crate::edge::json_text;

/// How records are encoded, and the schema that says so.
pub(super) fn encoding(
    record_type: Option<i32>,
    descriptor: Option<Bytes>,
    avro_schema: Option<String>,
) -> Result<(Encoding, Bytes), Error> {
    let invalid = |message: &str| Err(Error::invalid("record_type", message));
    match RecordType::try_from(record_type.unwrap_or(RecordType::Proto as i32)) {
        Ok(RecordType::Json) => Ok((Encoding::Json, Bytes::new())),
        Ok(RecordType::Proto) => match descriptor.filter(|descriptor| !descriptor.is_empty()) {
            Some(descriptor) => Ok((Encoding::Protobuf, descriptor)),
            None => invalid("record type PROTO: `create_stream` lacks `descriptor_proto`"),
        },
        Ok(RecordType::Avro) => match avro_schema.filter(|schema| !schema.is_empty()) {
            Some(schema) => Ok((Encoding::Avro, schema.into())),
            None => invalid("record type AVRO: `create_stream` lacks `avro_schema_json`"),
        },
        Ok(RecordType::Unspecified) | Err(_) => invalid("`record_type` has to be PROTO, JSON or AVRO"),
    }
}

pub(super) fn wrong_kind() -> Error {
    Error::invalid("record_type", "a record of another type than `create_stream` said")
}

/// The records of a request: their payload as pods take it, and how many.
pub(super) fn payload(encoding: Encoding, records: &[Bytes]) -> Result<(Bytes, u32), Error> {
    let count = u32::try_from(records.len());
    let count = count.map_err(|_| Error::invalid("too_many_records", "a batch of more than 2^32 records"))?;
    if let (Encoding::Json, [one]) = (encoding, records) {
        return Ok((json_text::record(one.clone()), 1));
    }
    let bytes: usize = records.iter().map(|record| record.len() + VARINT_BYTES_MAX).sum();
    let mut payload = BytesMut::with_capacity(bytes);
    for record in records {
        if encoding == Encoding::Json {
            payload.extend_from_slice(&json_text::record(record.clone()));
            payload.extend_from_slice(b"\n");
        } else {
            put_varint(&mut payload, record.len());
            payload.extend_from_slice(record);
        }
    }
    Ok((payload.freeze(), count))
}

const VARINT_BYTES_MAX: usize = 10;

/// A length as protobuf writes it: seven bits a byte, the lowest first.
fn put_varint(to: &mut BytesMut, mut value: usize) {
    while value >= 0x80 {
        to.put_u8(value as u8 | 0x80);
        value >>= 7;
    }
    to.put_u8(value as u8);
}

/// The records of a request: mostly one, for which no list is made.
pub(super) enum Records {
    One(Bytes),
    Many(Vec<Bytes>),
}

impl Records {
    pub(super) fn as_slice(&self) -> &[Bytes] {
        match self {
            Self::One(one) => std::slice::from_ref(one),
            Self::Many(many) => many,
        }
    }
}

pub(super) fn one(record: Option<Record>) -> Option<(Encoding, Records)> {
    let (encoding, record) = match record? {
        Record::JsonRecord(text) => (Encoding::Json, text),
        Record::ProtoEncodedRecord(message) => (Encoding::Protobuf, message),
        Record::AvroEncodedRecord(datum) => (Encoding::Avro, datum),
    };
    Some((encoding, Records::One(record)))
}

pub(super) fn many(batch: Option<Batch>) -> Option<(Encoding, Records)> {
    let (encoding, records) = match batch? {
        Batch::JsonBatch(batch) => (Encoding::Json, batch.records),
        Batch::ProtoEncodedBatch(batch) => (Encoding::Protobuf, batch.records),
        Batch::AvroBatch(batch) => (Encoding::Avro, batch.records),
    };
    Some((encoding, Records::Many(records)))
}
