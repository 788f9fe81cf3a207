//! Records that only their stream's schema explains: protobuf and Avro.
//!
//! *Owns*: which decoder a stream needs.
//! *Does not own*: the decoders.

use arrow::datatypes::SchemaRef;
use sluice_shared::error::Error;
use sluice_shared::frame::{Encoding, UnknownFields};

use super::Decoded;
use super::avro::{self, AvroDecoder};
use super::protobuf::{self, ProtobufDecoder};
use super::rows::Rows;
use crate::table::batch::Reason;

/// One stream's decoder.
pub enum DescribedDecoder {
    /// Of protobuf messages.
    Protobuf(ProtobufDecoder),
    /// Of Avro data.
    Avro(AvroDecoder),
}

impl DescribedDecoder {
    /// The decoder of a stream of this encoding to a table's schema; None where the records explain themselves.
    ///
    /// # Errors
    /// `Invalid`, where the stream's schema is none or does not fit the table's.
    pub fn new(
        encoding: Encoding,
        table: &SchemaRef,
        schema: &[u8],
        unknown: UnknownFields,
    ) -> Result<Option<Self>, Error> {
        Ok(match encoding {
            Encoding::Json | Encoding::Arrow => None,
            Encoding::Protobuf => Some(Self::Protobuf(ProtobufDecoder::new(table, schema, unknown)?)),
            Encoding::Avro => Some(Self::Avro(AvroDecoder::new(table, schema, unknown)?)),
        })
    }

    /// As the decoders' `append_within`.
    pub fn append_within(
        &self,
        rows: &mut Rows,
        payload: &[u8],
        bytes_max: usize,
        refuse: &mut dyn FnMut(usize, Reason),
    ) -> Decoded {
        match self {
            Self::Protobuf(decoder) => decoder.append_within(rows, payload, bytes_max, refuse),
            Self::Avro(decoder) => decoder.append_within(rows, payload, bytes_max, refuse),
        }
    }
}

/// The schema of a table for a stream's records; None where the records explain themselves. What no decoder can be made of
/// makes no table either: it would be there without its stream.
///
/// # Errors
/// `Invalid`, where the stream's schema is none or makes no table.
pub fn table_schema(encoding: Encoding, schema: &[u8]) -> Result<Option<SchemaRef>, Error> {
    let table = match encoding {
        Encoding::Json | Encoding::Arrow => return Ok(None),
        Encoding::Protobuf => protobuf::table_schema(schema)?,
        Encoding::Avro => avro::table_schema(schema)?,
    };
    DescribedDecoder::new(encoding, &table, schema, UnknownFields::Refuse)?;
    Ok(Some(table))
}
