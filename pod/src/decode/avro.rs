//! Avro data to rows: a stream's plan, made of its schema, drives the bytes straight into the columns.
//!
//! *Owns*: reading values, blocks of arrays and maps, what is skipped.
//! *Does not own*: the schema (`avro/schema`), which field goes where (`avro/plan`), ranges of columns (`plain`), the rows
//! and their bounds (`rows`).
//! Keeps P8: a record is appended whole, or refused by name and cut away again; lengths before the records keep those
//! around it readable.
//!
//! A payload is data in Avro's binary encoding, without header or fingerprint, one after the other; before each stands a
//! varint of its length, as before a protobuf message, and a datum has to fill it. Records are read as they were written:
//! schemas are not resolved beyond names and types.

mod plan;
mod schema;

use std::collections::HashSet;

use arrow::datatypes::SchemaRef;
use sluice_shared::error::Error;
use sluice_shared::frame::{UnknownFields, messages};
use sluice_shared::table::{TableSpec, types};

use self::plan::{Elements, Planner, Read, RecordPlan};
use self::schema::{Type, TypeId, Types};
use super::Decoded;
use super::budget::Budget;
use super::column::{Column, Columns, Values, offset};
use super::fault::{Fault, cut};
use super::plain::{append_decimal, append_integer, append_text, append_utf8, utf8};
use super::rows::{Payload, Rows};
use crate::table::batch::{Reason, ReasonCode};

/// Deepest nesting of values that are skipped.
const SKIPPED_DEPTH_MAX: usize = 64;

/// One stream's decoder.
pub struct AvroDecoder {
    types: Types,
    plan: RecordPlan,
}

impl AvroDecoder {
    /// A decoder of records of an Avro schema, to a table's schema.
    ///
    /// # Errors
    /// `Invalid`: `invalid_avro_schema`; `schema_mismatch` with the column where types do not fit, or where the schema
    /// lacks one that may not be null; `unknown_field` where it has one that the table does not have.
    pub fn new(table: &SchemaRef, schema: &[u8], unknown: UnknownFields) -> Result<Self, Error> {
        let types = Types::read(schema)?;
        let mut planner = Planner { types: &types, unknown, planned: 0 };
        let plan = planner.record(types.root(), table.fields(), "")?;
        Ok(Self { types, plan })
    }

    /// Appends the records of a payload to rows of the decoder's table. Stops before a record as soon as the rows held and
    /// what was refused have `bytes_max` bytes. For each refused record calls `refuse` with its place in the payload,
    /// counted from 0. Records end before a length that does not fit: count them first (`count_messages`).
    pub fn append_within(
        &self,
        rows: &mut Rows,
        payload: &[u8],
        bytes_max: usize,
        refuse: &mut dyn FnMut(usize, Reason),
    ) -> Decoded {
        let row_bytes_max = rows.row_bytes_max();
        rows.append(Payload { bytes: payload, bytes_max, refuse }, messages(payload), |columns, record| {
            let budget = Budget::new(row_bytes_max);
            let mut reader = Reader { types: &self.types, bytes: record, at: 0, budget };
            reader.record(&self.plan, columns)?;
            match record.len() - reader.at {
                0 => Ok(record.len() + reader.budget.spent()),
                left => Err(malformed(reader.at, &format!("{left} bytes after the record's last field"))),
            }
        })
    }
}

/// The schema of a table whose records are of an Avro schema. Decimals have 38 digits.
///
/// # Errors
/// `Invalid`: `invalid_avro_schema`, `unsupported_type`.
pub fn table_schema(schema: &[u8]) -> Result<SchemaRef, Error> {
    TableSpec::normalise(&schema::columns(&Types::read(schema)?)?)
}

/// A place in a record.
struct Reader<'a> {
    types: &'a Types,
    bytes: &'a [u8],
    at: usize,
    budget: Budget,
}

impl<'a> Reader<'a> {
    fn record(&mut self, plan: &RecordPlan, columns: &mut Columns) -> Result<(), Fault> {
        self.budget.spend(plan.row_bytes)?;
        for (read, place) in &plan.fields {
            if let Read::Skip(id) = read {
                self.skip(*id, 0)?;
                continue;
            }
            let appended = self.append(read, &mut columns.columns[*place]);
            appended.map_err(|fault| fault.within(columns.fields[*place].name()))?;
        }
        columns.complete()?;
        columns.rows += 1;
        Ok(())
    }

    /// Appends one value.
    fn append(&mut self, read: &Read, column: &mut Column) -> Result<(), Fault> {
        match read {
            Read::Null => return column.append_null(),
            Read::Union(branches) => {
                let at = self.at;
                let branch = usize::try_from(self.long()?).ok().and_then(|branch| branches.get(branch));
                let branch = branch.ok_or_else(|| malformed(at, "a branch that the union does not have"))?;
                return self.append(branch, column);
            }
            Read::Array(elements) => self.array(elements, column)?,
            Read::Map(elements) => self.map(elements, column)?,
            Read::Record(plan) => match &mut column.values {
                Values::Struct(columns) => self.record(plan, columns)?,
                _ => unplanned(),
            },
            Read::Int => append_integer(column, self.int()?.into())?,
            Read::Long => append_integer(column, self.long()?.into())?,
            Read::Multiplied(by) => append_integer(column, i128::from(self.long()?) * i128::from(*by))?,
            Read::Divided(by) => {
                let value = self.long()?;
                if value % by != 0 {
                    let to = format!("{}: digits below the microsecond", types::text(&column.data_type));
                    return Err(Fault::out_of_range(value, to));
                }
                append_integer(column, (value / by).into())?;
            }
            Read::Text => append_utf8(column, self.delimited()?)?,
            Read::Enum(symbols) => {
                let at = self.at;
                let symbol = usize::try_from(self.long()?).ok().and_then(|symbol| symbols.get(symbol));
                let symbol = symbol.ok_or_else(|| malformed(at, "a symbol that the enum does not have"))?;
                append_text(column, symbol)?;
            }
            Read::Decimal(shift, size) => {
                let bytes = match size {
                    Some(size) => self.take(*size)?,
                    None => self.delimited()?,
                };
                append_decimal(column, bytes, *shift)?;
            }
            plain => self.append_plain(plain, column)?,
        }
        column.validity.append_non_null();
        column.rows += 1;
        Ok(())
    }

    fn append_plain(&mut self, read: &Read, column: &mut Column) -> Result<(), Fault> {
        match (read, &mut column.values) {
            (Read::Bool, Values::Bool(bits)) => match self.take(1)? {
                [byte @ 0..=1] => bits.append(*byte == 1),
                _ => return Err(malformed(self.at - 1, "a boolean that is neither 0 nor 1")),
            },
            (Read::Float, Values::Float32(values)) => values.push(f32::from_le_bytes(self.fixed()?)),
            (Read::Float, Values::Float64(values)) => values.push(f32::from_le_bytes(self.fixed()?).into()),
            (Read::Double, Values::Float64(values)) => values.push(f64::from_le_bytes(self.fixed()?)),
            (Read::Bytes, Values::Binary(values)) => values.append(self.delimited()?),
            (Read::Fixed(size), Values::Binary(values)) => values.append(self.take(*size)?),
            _ => unplanned(),
        }
        Ok(())
    }

    fn array(&mut self, elements: &Elements, column: &mut Column) -> Result<(), Fault> {
        let Values::List { offsets, column: items, .. } = &mut column.values else { unplanned() };
        let first = items.rows;
        while let Some(count) = self.block()? {
            for _ in 0..count {
                self.budget.spend(elements.bytes)?;
                let (place, start) = (items.rows - first, self.at);
                self.append(&elements.read, items).map_err(|fault| fault.at_element(place))?;
                self.check_moved(start)?;
            }
        }
        offsets.push(offset(items.rows));
        Ok(())
    }

    fn map(&mut self, elements: &Elements, column: &mut Column) -> Result<(), Fault> {
        let Values::Map { offsets, keys, values, .. } = &mut column.values else { unplanned() };
        let mut seen = HashSet::new();
        while let Some(count) = self.block()? {
            for _ in 0..count {
                self.budget.spend(elements.bytes)?;
                let key = utf8(self.delimited()?)?;
                if !seen.insert(key) {
                    let fault = Fault::new(ReasonCode::DuplicateField, "the key stands in the map twice");
                    return Err(fault.within(&cut(key)));
                }
                keys.append(key.as_bytes());
                self.append(&elements.read, values).map_err(|fault| fault.within(&cut(key)))?;
            }
        }
        offsets.push(offset(values.rows));
        Ok(())
    }

    /// How many values the next block of an array or map has; None after the last one.
    fn block(&mut self) -> Result<Option<u64>, Fault> {
        match self.long()? {
            0 => Ok(None),
            count @ 1.. => Ok(Some(count.unsigned_abs())),
            count => {
                // Its bytes follow, for those who skip it whole.
                self.long()?;
                Ok(Some(count.unsigned_abs()))
            }
        }
    }

    /// Of elements without bytes, such as nulls by themselves, a few bytes could tell any number.
    fn check_moved(&self, start: usize) -> Result<(), Fault> {
        if self.at > start { Ok(()) } else { Err(malformed(start, "elements without bytes are not taken")) }
    }

    fn skip(&mut self, id: TypeId, depth: usize) -> Result<(), Fault> {
        if depth > SKIPPED_DEPTH_MAX {
            return Err(malformed(self.at, &format!("values nested deeper than {SKIPPED_DEPTH_MAX}")));
        }
        // Records of nothing but nulls have no bytes: each value costs as if it had one.
        self.budget.spend(1)?;
        let types = self.types;
        match types.of(id) {
            Type::Null => Ok(()),
            Type::Boolean => self.take(1).map(drop),
            Type::Int(_) | Type::Long(_) | Type::Enum(_) => self.long().map(drop),
            Type::Float => self.take(4).map(drop),
            Type::Double => self.take(8).map(drop),
            Type::Bytes(_) | Type::Text => self.delimited().map(drop),
            Type::Fixed(size, _) => self.take(*size).map(drop),
            Type::Array(items) => self.skip_blocks(*items, false, depth),
            Type::Map(values) => self.skip_blocks(*values, true, depth),
            Type::Union(branches) => {
                let at = self.at;
                let branch = usize::try_from(self.long()?).ok().and_then(|branch| branches.get(branch));
                let branch = branch.ok_or_else(|| malformed(at, "a branch that the union does not have"))?;
                self.skip(*branch, depth + 1)
            }
            Type::Record(fields) => fields.iter().try_for_each(|(_, field)| self.skip(*field, depth + 1)),
        }
    }

    fn skip_blocks(&mut self, values: TypeId, keyed: bool, depth: usize) -> Result<(), Fault> {
        while let Some(count) = self.block()? {
            for _ in 0..count {
                let start = self.at;
                if keyed {
                    self.delimited()?;
                }
                self.skip(values, depth + 1)?;
                self.check_moved(start)?;
            }
        }
        Ok(())
    }

    fn int(&mut self) -> Result<i32, Fault> {
        let at = self.at;
        i32::try_from(self.long()?).map_err(|_| malformed(at, "an int of more than 32 bits"))
    }

    /// A varint of up to ten bytes, its sign in the lowest bit.
    #[inline]
    fn long(&mut self) -> Result<i64, Fault> {
        let (start, mut value) = (self.at, 0_u64);
        for (place, byte) in self.bytes[start..].iter().take(10).enumerate() {
            if place == 9 && *byte > 1 {
                break;
            }
            value |= u64::from(byte & 0x7f) << (7 * place);
            if *byte < 0x80 {
                self.at += place + 1;
                return Ok((value >> 1).cast_signed() ^ -(value & 1).cast_signed());
            }
        }
        Err(malformed(start, "no whole number of up to 64 bits"))
    }

    fn delimited(&mut self) -> Result<&'a [u8], Fault> {
        let start = self.at;
        match usize::try_from(self.long()?) {
            Ok(length) => self.take(length),
            Err(_) => Err(malformed(start, "a negative length")),
        }
    }

    fn take(&mut self, length: usize) -> Result<&'a [u8], Fault> {
        let left = self.bytes.len() - self.at;
        if length > left {
            return Err(malformed(self.at, &format!("{length} bytes are due, {left} are left")));
        }
        let taken = &self.bytes[self.at..self.at + length];
        self.at += length;
        Ok(taken)
    }

    fn fixed<const N: usize>(&mut self) -> Result<[u8; N], Fault> {
        let bytes = self.take(N)?;
        Ok(*bytes.first_chunk().expect("as many as asked for"))
    }
}

fn malformed(at: usize, why: &str) -> Fault {
    Fault::new(ReasonCode::NotAvro, format!("no datum of the stream's Avro schema: at byte {at}: {why}"))
}

fn unplanned() -> ! {
    unreachable!("the plan pairs only values and columns that fit")
}

#[cfg(test)]
mod tests;
