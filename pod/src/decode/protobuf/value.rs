//! Values of the wire to the columns that a plan has chosen for them.
//!
//! *Owns*: reading a scalar, a map's key.
//! *Does not own*: which field goes where (`plan`), messages and lists (`protobuf`), ranges of columns (`plain`).
//!
//! Nothing is altered silently: a 32-bit field with more bits on the wire is out of its range, where other readers of
//! protobuf cut it.

use std::io::Write as _;

use sluice_shared::protobuf::{Reader, WireType};

use super::super::column::{Bytes, Column, Values};
use super::super::fault::Fault;
use super::super::plain::{append_integer, append_text, append_utf8, utf8};
use super::plan::{Integer, Kind, Scalar};

/// A varint, a length or a number of zero.
const ZEROS: [u8; 8] = [0; 8];

impl Scalar {
    /// Whether a value lies there as it has to.
    #[inline]
    pub(super) fn check(&self, got: WireType) -> Result<(), Fault> {
        check_wire(self.wire, got)
    }

    /// Appends the value to a column.
    #[inline]
    pub(super) fn append(&self, column: &mut Column, reader: &mut Reader<'_>) -> Result<(), Fault> {
        match &self.kind {
            Kind::Bool => self.append_bool(column, reader)?,
            Kind::Integer(integer) => append_integer(column, integer.read(reader)?)?,
            Kind::Float => match &mut column.values {
                Values::Float32(values) => values.push(f32::from_le_bytes(reader.fixed32()?)),
                Values::Float64(values) => values.push(f32::from_le_bytes(reader.fixed32()?).into()),
                _ => unplanned(),
            },
            Kind::Double => match &mut column.values {
                Values::Float64(values) => values.push(f64::from_le_bytes(reader.fixed64()?)),
                _ => unplanned(),
            },
            Kind::Text => append_utf8(column, reader.delimited()?)?,
            Kind::Bytes => match &mut column.values {
                Values::Binary(values) => values.append(reader.delimited()?),
                _ => unplanned(),
            },
            Kind::Name(names) => {
                let number = Integer::Int32.read(reader)?;
                let name = i32::try_from(number).ok().and_then(|number| names.get(&number));
                let name = name.ok_or_else(|| Fault::out_of_range(number, "the enum's values"))?;
                append_text(column, name)?;
            }
        }
        column.validity.append_non_null();
        column.rows += 1;
        Ok(())
    }

    /// Appends what a map's value is that was not sent: what zeros on the wire are.
    pub(super) fn append_default(&self, column: &mut Column) -> Result<(), Fault> {
        self.append(column, &mut Reader::new(&ZEROS))
    }

    fn append_bool(&self, column: &mut Column, reader: &mut Reader<'_>) -> Result<(), Fault> {
        match &mut column.values {
            Values::Bool(bits) => bits.append(reader.varint()? != 0),
            _ => unplanned(),
        }
        Ok(())
    }

    /// The value as a map's key, without closing it.
    pub(super) fn append_key(&self, keys: &mut Bytes, reader: &mut Reader<'_>) -> Result<(), Fault> {
        match &self.kind {
            Kind::Text => keys.bytes.extend_from_slice(utf8(reader.delimited()?)?.as_bytes()),
            Kind::Bool => {
                keys.bytes.extend_from_slice(if reader.varint()? == 0 { b"false" } else { b"true" })
            }
            Kind::Integer(integer) => {
                write!(keys.bytes, "{}", integer.read(reader)?).expect("memory takes all that is written");
            }
            _ => unplanned(),
        }
        Ok(())
    }

    /// The key that was not sent, without closing it.
    pub(super) fn append_default_key(&self, keys: &mut Bytes) -> Result<(), Fault> {
        self.append_key(keys, &mut Reader::new(&ZEROS))
    }
}

#[inline]
pub(super) fn check_wire(expected: WireType, got: WireType) -> Result<(), Fault> {
    if expected == got { Ok(()) } else { Err(Fault::wrong_type(expected.name(), got.name())) }
}

impl Integer {
    #[inline]
    fn read(self, reader: &mut Reader<'_>) -> Result<i128, Fault> {
        Ok(match self {
            Self::Int64 => reader.varint()?.cast_signed().into(),
            Self::Uint64 => reader.varint()?.into(),
            Self::Sint64 => unzigzag(reader.varint()?).into(),
            Self::Int32 => {
                let value = reader.varint()?.cast_signed();
                i32::try_from(value).map_err(|_| Fault::out_of_range(value, "the field (int32)"))?.into()
            }
            Self::Uint32 => bits32(reader.varint()?)?.into(),
            Self::Sint32 => unzigzag(bits32(reader.varint()?)?.into()).into(),
            Self::Fixed32 => u32::from_le_bytes(reader.fixed32()?).into(),
            Self::Fixed64 => u64::from_le_bytes(reader.fixed64()?).into(),
            Self::Sfixed32 => i32::from_le_bytes(reader.fixed32()?).into(),
            Self::Sfixed64 => i64::from_le_bytes(reader.fixed64()?).into(),
        })
    }
}

fn bits32(value: u64) -> Result<u32, Fault> {
    u32::try_from(value).map_err(|_| Fault::out_of_range(value, "the field (32 bits)"))
}

fn unzigzag(value: u64) -> i64 {
    (value >> 1).cast_signed() ^ -(value & 1).cast_signed()
}

fn unplanned() -> ! {
    unreachable!("the plan pairs only kinds and columns that fit")
}
