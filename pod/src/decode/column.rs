//! Columns that grow by JSON values and can be cut back, so that a refused record leaves no trace.
//!
//! *Owns*: which JSON value fits which type, null and missing values, nested columns, cutting back.
//! *Does not own*: the parsing of records (`tape`), of dates and decimals (`text`), the verdict's words (`fault`), values
//! of other encodings (`plain`).
//!
//! Nothing is altered silently. Integers take only numbers without point or exponent; floats take any number and round
//! it to the nearest float, as JSON's own readers do, large integers included; text takes only strings, booleans only
//! true and false; decimals take numbers and strings that fit exactly; binary takes base64; dates and timestamps take
//! text (`text`) or an integer of days or microseconds since 1970-01-01 UTC.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use arrow::array::{
    ArrayRef, BinaryArray, BooleanArray, BooleanBufferBuilder, Decimal128Array, ListArray, MapArray,
    NullBufferBuilder, PrimitiveArray, StringArray, StructArray,
};
use arrow::buffer::{Buffer, NullBuffer, OffsetBuffer, ScalarBuffer};
use arrow::datatypes::{
    ArrowPrimitiveType, DataType, Date32Type, Field, FieldRef, Fields, Float32Type, Float64Type, Int8Type,
    Int16Type, Int32Type, Int64Type, TimeUnit, TimestampMicrosecondType,
};
use simd_json::{Node, StaticNode};
use sluice_shared::error::Error;
use sluice_shared::frame::UnknownFields;
use sluice_shared::table::types;

use super::fault::{Fault, advice_for_unknown, cut};
use super::tape::Record;
use super::text::{self, DecimalShape, TextFault, Zone};
use crate::table::batch::ReasonCode;

/// Columns side by side: those of a table, or the fields of a struct.
pub(super) struct Columns {
    pub(super) fields: Fields,
    /// Where the column of each name is.
    places: HashMap<Box<str>, usize>,
    /// The column that came behind each when it was last looked up; before all, the first one's. Most producers write their
    /// fields in one order.
    next: Vec<usize>,
    pub(super) columns: Vec<Column>,
    pub(super) rows: usize,
}

/// One column. After each record it has one value more, or as many as before.
pub(super) struct Column {
    pub(super) data_type: DataType,
    pub(super) nullable: bool,
    pub(super) validity: NullBufferBuilder,
    pub(super) values: Values,
    pub(super) rows: usize,
}

pub(super) enum Values {
    Bool(BooleanBufferBuilder),
    Int8(Vec<i8>),
    Int16(Vec<i16>),
    Int32(Vec<i32>),
    Int64(Vec<i64>),
    Float32(Vec<f32>),
    Float64(Vec<f64>),
    Decimal(Vec<i128>, DecimalShape),
    Text(Bytes),
    Binary(Bytes),
    Date(Vec<i32>),
    Timestamp(Vec<i64>, Zone),
    List { offsets: Vec<i32>, element: FieldRef, column: Box<Column> },
    Struct(Columns),
    Map { offsets: Vec<i32>, entries: FieldRef, keys: Bytes, values: Box<Column> },
}

/// Texts or byte strings, end to end.
pub(super) struct Bytes {
    pub(super) offsets: Vec<i32>,
    pub(super) bytes: Vec<u8>,
}

impl Columns {
    /// Empty columns.
    ///
    /// # Errors
    /// `Invalid` where a type is none of a table's.
    pub(super) fn new(fields: &Fields) -> Result<Self, Error> {
        let columns = fields.iter().map(|field| Column::new(field)).collect::<Result<_, _>>()?;
        let places = fields.iter().enumerate().map(|(place, field)| (field.name().as_str().into(), place));
        let next = (0..=fields.len()).collect();
        Ok(Self { places: places.collect(), next, columns, rows: 0, fields: fields.clone() })
    }

    pub(super) fn rows(&self) -> usize {
        self.rows
    }

    /// Bytes that the values hold.
    pub(super) fn bytes(&self) -> usize {
        self.columns.iter().map(Column::bytes).sum()
    }

    /// Appends the object at `at`. After a fault, `truncate` to the rows before.
    pub(super) fn append(
        &mut self,
        record: &mut Record<'_>,
        at: usize,
        unknown: UnknownFields,
    ) -> Result<(), Fault> {
        let Node::Object { len, .. } = record.node(at) else {
            return Err(Fault::wrong_type("an object", record.shown(at)));
        };
        let mut key_at = at + 1;
        let mut behind = 0;
        for _ in 0..len {
            let key = record.key(key_at);
            let value_at = key_at + 1;
            key_at = record.after(value_at);
            let Some(place) = self.place(key, behind) else {
                match unknown {
                    UnknownFields::Ignore => continue,
                    UnknownFields::Refuse => return Err(self.unknown_field(key)),
                }
            };
            behind = place + 1;
            let column = &mut self.columns[place];
            if column.rows > self.rows {
                return Err(Fault::new(ReasonCode::DuplicateField, "the field stands in the record twice")
                    .within(key));
            }
            column.append(record, value_at, unknown).map_err(|fault| fault.within(key))?;
        }
        self.complete()?;
        self.rows += 1;
        Ok(())
    }

    fn place(&mut self, key: &str, behind: usize) -> Option<usize> {
        let guess = self.next[behind];
        if self.fields.get(guess).is_some_and(|field| field.name() == key) {
            return Some(guess);
        }
        let place = *self.places.get(key)?;
        self.next[behind] = place;
        Some(place)
    }

    /// Gives the fields that the record did not have their null.
    pub(super) fn complete(&mut self) -> Result<(), Fault> {
        for (column, field) in self.columns.iter_mut().zip(&self.fields) {
            if column.rows == self.rows {
                column.append_null().map_err(|fault| fault.within(field.name()))?;
            }
        }
        Ok(())
    }

    fn unknown_field(&self, key: &str) -> Fault {
        let advice = advice_for_unknown(key, &self.fields);
        let message = format!("the table has no column {:?}: {advice}", cut(key));
        Fault::new(ReasonCode::UnknownField, message).within(&cut(key))
    }

    /// A row that a null struct covers.
    fn append_covered(&mut self) {
        self.columns.iter_mut().for_each(Column::append_covered);
        self.rows += 1;
    }

    /// Cuts back to this many rows; columns may have one more than `self.rows`.
    pub(super) fn truncate(&mut self, rows: usize) {
        self.columns.iter_mut().for_each(|column| column.truncate(rows));
        self.rows = rows;
    }

    /// Takes the values out, as arrays of the fields' types.
    pub(super) fn finish(&mut self) -> Vec<ArrayRef> {
        self.rows = 0;
        self.columns.iter_mut().map(Column::finish).collect()
    }
}

impl Column {
    fn new(field: &Field) -> Result<Self, Error> {
        let data_type = field.data_type().clone();
        let values = Values::new(&data_type).map_err(|mut error| {
            let below = error.column.take().map_or_else(String::new, |below| format!(".{below}"));
            error.at_column(format!("{}{below}", field.name()))
        })?;
        let validity = NullBufferBuilder::new(0);
        Ok(Self { data_type, nullable: field.is_nullable(), validity, values, rows: 0 })
    }

    fn bytes(&self) -> usize {
        // Bits of validity are counted where nulls have made them real.
        self.validity.allocated_size() + self.values.bytes()
    }

    fn append(&mut self, record: &mut Record<'_>, at: usize, unknown: UnknownFields) -> Result<(), Fault> {
        if let Node::Static(StaticNode::Null) = record.node(at) {
            return self.append_null();
        }
        self.values.append(record, at, unknown, &self.data_type)?;
        self.validity.append_non_null();
        self.rows += 1;
        Ok(())
    }

    pub(super) fn append_null(&mut self) -> Result<(), Fault> {
        if !self.nullable {
            return Err(Fault::missing());
        }
        self.append_covered();
        Ok(())
    }

    /// A null, or in a column without nulls some value that a null above it covers.
    fn append_covered(&mut self) {
        self.values.append_zero();
        self.validity.append(!self.nullable);
        self.rows += 1;
    }

    pub(super) fn truncate(&mut self, rows: usize) {
        // A value whose append failed half-way may have left some of its parts.
        self.values.truncate(rows);
        self.validity.truncate(rows);
        self.rows = self.rows.min(rows);
    }

    fn finish(&mut self) -> ArrayRef {
        self.rows = 0;
        let nulls = self.validity.finish();
        self.values.finish(&self.data_type, nulls)
    }
}

impl Values {
    fn new(data_type: &DataType) -> Result<Self, Error> {
        Ok(match data_type {
            DataType::Boolean => Self::Bool(BooleanBufferBuilder::new(0)),
            DataType::Int8 => Self::Int8(Vec::new()),
            DataType::Int16 => Self::Int16(Vec::new()),
            DataType::Int32 => Self::Int32(Vec::new()),
            DataType::Int64 => Self::Int64(Vec::new()),
            DataType::Float32 => Self::Float32(Vec::new()),
            DataType::Float64 => Self::Float64(Vec::new()),
            DataType::Decimal128(precision, scale @ 0..) => {
                let shape = DecimalShape { precision: *precision, scale: scale.cast_unsigned() };
                Self::Decimal(Vec::new(), shape)
            }
            DataType::Utf8 => Self::Text(Bytes::new()),
            DataType::Binary => Self::Binary(Bytes::new()),
            DataType::Date32 => Self::Date(Vec::new()),
            DataType::Timestamp(TimeUnit::Microsecond, zone) => {
                let zone = if zone.is_some() { Zone::Required } else { Zone::Absent };
                Self::Timestamp(Vec::new(), zone)
            }
            DataType::List(element) => {
                let column = Box::new(Column::new(element)?);
                Self::List { offsets: vec![0], element: element.clone(), column }
            }
            DataType::Struct(fields) if !fields.is_empty() => Self::Struct(Columns::new(fields)?),
            DataType::Map(entries, false) => match entries.data_type() {
                DataType::Struct(fields) if fields.len() == 2 && *fields[0].data_type() == DataType::Utf8 => {
                    let values = Box::new(Column::new(&fields[1])?);
                    Self::Map { offsets: vec![0], entries: entries.clone(), keys: Bytes::new(), values }
                }
                _ => return Err(unsupported(data_type)),
            },
            _ => return Err(unsupported(data_type)),
        })
    }

    fn bytes(&self) -> usize {
        match self {
            // A byte for each bit: so no list under the bound on bytes has more elements than offsets can count.
            Self::Bool(bits) => bits.len(),
            Self::Int8(values) => size_of_val(&values[..]),
            Self::Int16(values) => size_of_val(&values[..]),
            Self::Int32(values) | Self::Date(values) => size_of_val(&values[..]),
            Self::Int64(values) | Self::Timestamp(values, _) => size_of_val(&values[..]),
            Self::Float32(values) => size_of_val(&values[..]),
            Self::Float64(values) => size_of_val(&values[..]),
            Self::Decimal(values, _) => size_of_val(&values[..]),
            Self::Text(values) | Self::Binary(values) => values.size(),
            Self::List { offsets, column, .. } => size_of_val(&offsets[..]) + column.bytes(),
            Self::Struct(columns) => columns.bytes(),
            Self::Map { offsets, keys, values, .. } => {
                size_of_val(&offsets[..]) + keys.size() + values.bytes()
            }
        }
    }

    fn append(
        &mut self,
        record: &mut Record<'_>,
        at: usize,
        unknown: UnknownFields,
        data_type: &DataType,
    ) -> Result<(), Fault> {
        match self {
            Self::Bool(bits) => match record.node(at) {
                Node::Static(StaticNode::Bool(value)) => bits.append(value),
                _ => return Err(Fault::wrong_type("true or false", record.shown(at))),
            },
            Self::Int8(values) => values.push(integer(record, at, data_type)?),
            Self::Int16(values) => values.push(integer(record, at, data_type)?),
            Self::Int32(values) => values.push(integer(record, at, data_type)?),
            Self::Int64(values) => values.push(integer(record, at, data_type)?),
            Self::Float32(values) => values.push(float32(record, at)?),
            Self::Float64(values) => values.push(float64(record, at)?),
            Self::Decimal(values, shape) => values.push(decimal(record, at, *shape, data_type)?),
            Self::Text(values) => match record.node(at) {
                Node::String(text) => values.append(text.as_bytes()),
                _ => return Err(Fault::wrong_type("a string", record.shown(at))),
            },
            Self::Binary(values) => match record.node(at) {
                Node::String(text) if text::base64(text, &mut values.bytes).is_ok() => values.close(),
                _ => return Err(Fault::wrong_type("a string of base64", record.shown(at))),
            },
            Self::Date(values) => values.push(date(record, at)?),
            Self::Timestamp(values, zone) => values.push(timestamp(record, at, *zone)?),
            Self::List { offsets, column, .. } => {
                append_list(column, record, at, unknown)?;
                offsets.push(offset(column.rows));
            }
            Self::Struct(columns) => columns.append(record, at, unknown)?,
            Self::Map { offsets, keys, values, .. } => {
                append_map(keys, values, (record, at), unknown)?;
                offsets.push(offset(values.rows));
            }
        }
        Ok(())
    }

    pub(super) fn append_zero(&mut self) {
        match self {
            Self::Bool(bits) => bits.append(false),
            Self::Int8(values) => values.push(0),
            Self::Int16(values) => values.push(0),
            Self::Int32(values) | Self::Date(values) => values.push(0),
            Self::Int64(values) | Self::Timestamp(values, _) => values.push(0),
            Self::Float32(values) => values.push(0.0),
            Self::Float64(values) => values.push(0.0),
            Self::Decimal(values, _) => values.push(0),
            Self::Text(values) | Self::Binary(values) => values.close(),
            Self::List { offsets, column, .. } => offsets.push(offset(column.rows)),
            Self::Struct(columns) => columns.append_covered(),
            Self::Map { offsets, values, .. } => offsets.push(offset(values.rows)),
        }
    }

    fn truncate(&mut self, rows: usize) {
        match self {
            Self::Bool(bits) => bits.truncate(rows),
            Self::Int8(values) => values.truncate(rows),
            Self::Int16(values) => values.truncate(rows),
            Self::Int32(values) | Self::Date(values) => values.truncate(rows),
            Self::Int64(values) | Self::Timestamp(values, _) => values.truncate(rows),
            Self::Float32(values) => values.truncate(rows),
            Self::Float64(values) => values.truncate(rows),
            Self::Decimal(values, _) => values.truncate(rows),
            Self::Text(values) | Self::Binary(values) => values.truncate(rows),
            Self::List { offsets, column, .. } => column.truncate(cut_offsets(offsets, rows)),
            Self::Struct(columns) => columns.truncate(rows),
            Self::Map { offsets, keys, values, .. } => {
                let entries = cut_offsets(offsets, rows);
                keys.truncate(entries);
                values.truncate(entries);
            }
        }
    }

    fn finish(&mut self, data_type: &DataType, nulls: Option<NullBuffer>) -> ArrayRef {
        match self {
            Self::Bool(bits) => Arc::new(BooleanArray::new(bits.finish(), nulls)),
            Self::Int8(values) => primitive::<Int8Type>(values, nulls),
            Self::Int16(values) => primitive::<Int16Type>(values, nulls),
            Self::Int32(values) => primitive::<Int32Type>(values, nulls),
            Self::Int64(values) => primitive::<Int64Type>(values, nulls),
            Self::Float32(values) => primitive::<Float32Type>(values, nulls),
            Self::Float64(values) => primitive::<Float64Type>(values, nulls),
            Self::Date(values) => primitive::<Date32Type>(values, nulls),
            Self::Decimal(values, _) => {
                let array = Decimal128Array::new(take(values).into(), nulls);
                Arc::new(array.with_data_type(data_type.clone()))
            }
            Self::Timestamp(values, _) => {
                let array = PrimitiveArray::<TimestampMicrosecondType>::new(take(values).into(), nulls);
                Arc::new(array.with_data_type(data_type.clone()))
            }
            Self::Text(values) => {
                let (offsets, bytes) = values.finish();
                let array = StringArray::try_new(offsets, bytes, nulls);
                Arc::new(array.expect("strings of the parser are UTF-8"))
            }
            Self::Binary(values) => {
                let (offsets, bytes) = values.finish();
                Arc::new(BinaryArray::new(offsets, bytes, nulls))
            }
            Self::List { offsets, element, column } => {
                let offsets = take_offsets(offsets);
                Arc::new(ListArray::new(element.clone(), offsets, column.finish(), nulls))
            }
            Self::Struct(columns) => {
                let fields = columns.fields.clone();
                Arc::new(StructArray::new(fields, columns.finish(), nulls))
            }
            Self::Map { offsets, entries, keys, values } => {
                let DataType::Struct(fields) = entries.data_type() else {
                    unreachable!("`new` takes only entries that are a struct")
                };
                let (key_offsets, key_bytes) = keys.finish();
                let keys = StringArray::try_new(key_offsets, key_bytes, None);
                let keys: ArrayRef = Arc::new(keys.expect("keys of the parser are UTF-8"));
                let pairs = StructArray::new(fields.clone(), vec![keys, values.finish()], None);
                Arc::new(MapArray::new(entries.clone(), take_offsets(offsets), pairs, nulls, false))
            }
        }
    }
}

impl Bytes {
    fn new() -> Self {
        Self { offsets: vec![0], bytes: Vec::new() }
    }

    pub(super) fn append(&mut self, value: &[u8]) {
        self.bytes.extend_from_slice(value);
        self.close();
    }

    /// Ends the value whose bytes have been appended.
    pub(super) fn close(&mut self) {
        self.offsets.push(offset(self.bytes.len()));
    }

    fn size(&self) -> usize {
        size_of_val(&self.offsets[..]) + self.bytes.len()
    }

    fn truncate(&mut self, rows: usize) {
        let bytes = cut_offsets(&mut self.offsets, rows);
        self.bytes.truncate(bytes);
    }

    fn finish(&mut self) -> (OffsetBuffer<i32>, Buffer) {
        (take_offsets(&mut self.offsets), Buffer::from_vec(take(&mut self.bytes)))
    }
}

fn unsupported(data_type: &DataType) -> Error {
    Error::invalid("unsupported_type", format!("JSON cannot be decoded to {}", types::text(data_type)))
}

/// Takes the values; the next ones find as much room as these had, so that a steady load never grows.
fn take<T>(values: &mut Vec<T>) -> Vec<T> {
    let room = values.len();
    std::mem::replace(values, Vec::with_capacity(room))
}

fn take_offsets(offsets: &mut Vec<i32>) -> OffsetBuffer<i32> {
    let taken = take(offsets);
    offsets.push(0);
    OffsetBuffer::new(ScalarBuffer::from(taken))
}

/// Cuts offsets back to this many rows; how many elements these have.
fn cut_offsets(offsets: &mut Vec<i32>, rows: usize) -> usize {
    offsets.truncate(rows + 1);
    offsets.last().map_or(0, |last| usize::try_from(*last).expect("offsets are not negative"))
}

pub(super) fn offset(elements: usize) -> i32 {
    i32::try_from(elements).expect("callers take the rows out long before they have 2 GiB (BYTES_MAX)")
}

fn primitive<T: ArrowPrimitiveType>(values: &mut Vec<T::Native>, nulls: Option<NullBuffer>) -> ArrayRef {
    Arc::new(PrimitiveArray::<T>::new(take(values).into(), nulls))
}

fn append_list(
    column: &mut Column,
    record: &mut Record<'_>,
    at: usize,
    unknown: UnknownFields,
) -> Result<(), Fault> {
    let Node::Array { len, .. } = record.node(at) else {
        return Err(Fault::wrong_type("an array", record.shown(at)));
    };
    let mut element_at = at + 1;
    for place in 0..len {
        column.append(record, element_at, unknown).map_err(|fault| fault.at_element(place))?;
        element_at = record.after(element_at);
    }
    Ok(())
}

fn append_map(
    keys: &mut Bytes,
    values: &mut Column,
    (record, at): (&mut Record<'_>, usize),
    unknown: UnknownFields,
) -> Result<(), Fault> {
    let Node::Object { len, .. } = record.node(at) else {
        return Err(Fault::wrong_type("an object", record.shown(at)));
    };
    let mut seen = HashSet::with_capacity(len);
    let mut key_at = at + 1;
    for _ in 0..len {
        let key = record.key(key_at);
        if !seen.insert(key) {
            return Err(
                Fault::new(ReasonCode::DuplicateField, "the key stands in the map twice").within(&cut(key))
            );
        }
        keys.append(key.as_bytes());
        values.append(record, key_at + 1, unknown).map_err(|fault| fault.within(&cut(key)))?;
        key_at = record.after(key_at + 1);
    }
    Ok(())
}

fn integer<T: TryFrom<i64>>(record: &mut Record<'_>, at: usize, data_type: &DataType) -> Result<T, Fault> {
    let value = match record.node(at) {
        Node::Static(StaticNode::I64(value)) => T::try_from(value).ok(),
        Node::Static(StaticNode::U64(value)) => {
            i64::try_from(value).ok().and_then(|value| T::try_from(value).ok())
        }
        // What has more than 64 bits comes as a double.
        Node::Static(StaticNode::F64(_)) if !record.number_text(at).contains(['.', 'e', 'E']) => None,
        _ => {
            return Err(Fault::wrong_type(
                format!("an integer ({})", types::text(data_type)),
                record.shown(at),
            ));
        }
    };
    value.ok_or_else(|| Fault::out_of_range(record.shown(at), types::text(data_type)))
}

/// The nearest double.
#[allow(
    clippy::cast_precision_loss,
    reason = "a JSON number in a float column is rounded to the nearest float"
)]
fn float64(record: &mut Record<'_>, at: usize) -> Result<f64, Fault> {
    match record.node(at) {
        Node::Static(StaticNode::F64(value)) if value.is_finite() => Ok(value),
        Node::Static(StaticNode::F64(_)) => Err(Fault::out_of_range(record.shown(at), "float64")),
        Node::Static(StaticNode::I64(value)) => Ok(value as f64),
        Node::Static(StaticNode::U64(value)) => Ok(value as f64),
        _ => Err(Fault::wrong_type("a number (float64)", record.shown(at))),
    }
}

#[allow(clippy::cast_possible_truncation, reason = "rounding is what a float32 column asks for")]
fn float32(record: &mut Record<'_>, at: usize) -> Result<f32, Fault> {
    match record.node(at) {
        Node::Static(StaticNode::F64(_) | StaticNode::I64(_) | StaticNode::U64(_)) => {
            let value = float64(record, at)? as f32;
            if value.is_finite() { Ok(value) } else { Err(Fault::out_of_range(record.shown(at), "float32")) }
        }
        _ => Err(Fault::wrong_type("a number (float32)", record.shown(at))),
    }
}

fn decimal(
    record: &mut Record<'_>,
    at: usize,
    shape: DecimalShape,
    data_type: &DataType,
) -> Result<i128, Fault> {
    let parsed = match record.node(at) {
        Node::String(text) => text::decimal(text, shape),
        Node::Static(StaticNode::F64(_) | StaticNode::I64(_) | StaticNode::U64(_)) => {
            text::decimal(record.number_text(at), shape)
        }
        _ => Err(TextFault::Form),
    };
    let column_type = || types::text(data_type);
    parsed.map_err(|fault| match fault {
        TextFault::Form => Fault::wrong_type(format!("a number ({})", column_type()), record.shown(at)),
        TextFault::Range(why) => Fault::out_of_range(record.shown(at), format!("{}: {why}", column_type())),
    })
}

fn date(record: &mut Record<'_>, at: usize) -> Result<i32, Fault> {
    const EXPECTED: &str = "a date, YYYY-MM-DD or days since 1970-01-01";
    let parsed = match record.node(at) {
        Node::String(text) => text::date(text),
        Node::Static(StaticNode::I64(_) | StaticNode::U64(_)) => {
            let day = integer::<i64>(record, at, &DataType::Date32)?;
            text::date_in_range(day).ok_or(TextFault::Range("outside of the years 1 to 9999"))
        }
        _ => Err(TextFault::Form),
    };
    parsed.map_err(|fault| time_fault(fault, (record, at), EXPECTED, "date"))
}

fn timestamp(record: &mut Record<'_>, at: usize, zone: Zone) -> Result<i64, Fault> {
    let parsed = match record.node(at) {
        Node::String(text) => text::timestamp(text, zone),
        Node::Static(StaticNode::I64(_) | StaticNode::U64(_)) => {
            let us = integer::<i64>(record, at, &DataType::Int64)?;
            text::timestamp_in_range(us).ok_or(TextFault::Range(
                "outside of the years 1 to 9999 (expected microseconds since 1970-01-01)",
            ))
        }
        _ => Err(TextFault::Form),
    };
    let (expected, column_type) = match zone {
        Zone::Required => (
            "YYYY-MM-DDThh:mm:ss[.ffffff] with Z or an offset, or microseconds since 1970-01-01",
            "timestamp",
        ),
        Zone::Absent => {
            ("YYYY-MM-DDThh:mm:ss[.ffffff] without zone, or microseconds since 1970-01-01", "timestamp_ntz")
        }
    };
    parsed.map_err(|fault| time_fault(fault, (record, at), expected, column_type))
}

fn time_fault(
    fault: TextFault,
    (record, at): (&mut Record<'_>, usize),
    expected: &str,
    column_type: &str,
) -> Fault {
    match fault {
        TextFault::Form => Fault::wrong_type(expected, record.shown(at)),
        TextFault::Range(why) => Fault::out_of_range(record.shown(at), format!("{column_type}: {why}")),
    }
}
