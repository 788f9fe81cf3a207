//! How the fields of a record go into the columns of a table: made once a stream, followed for each record.
//!
//! *Owns*: which field goes into which column, which types fit, what is refused at open.
//! *Does not own*: the schema (`schema`), reading values (`avro`).
//!
//! Columns and fields are matched by name. Integers go into integer and decimal columns, an int also into a date and a long
//! (microseconds) into a timestamp; times of a unit only into timestamps; text into text, decimals and times; enums into
//! text; bytes and fixed into binary, or as decimals into decimals of at least their scale; float into both floats. All
//! branches of a union have to fit; null does always, and is refused record by record where it may not be.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use arrow::datatypes::{DataType, Fields};
use sluice_shared::error::Error;
use sluice_shared::frame::UnknownFields;
use sluice_shared::table::types;

use super::super::conform::null_bytes;
use super::super::fault::{below, mismatch, missing_column, unknown_field};
use super::schema::{Type, TypeId, Types, Unit, invalid};

/// Most values in a plan: a record may be part of many others, each time anew.
const PLANNED_MAX: usize = 100_000;

/// What is done with a value.
pub(super) enum Read {
    /// It is of no column.
    Skip(TypeId),
    Null,
    Bool,
    Int,
    Long,
    /// A long of which so many make a microsecond.
    Divided(i64),
    /// A long of so many microseconds.
    Multiplied(i64),
    Float,
    Double,
    Text,
    Enum(Arc<[Box<str>]>),
    Bytes,
    Fixed(usize),
    /// A decimal in bytes, by so many powers of ten below its column's; the length where it is fixed.
    Decimal(u32, Option<usize>),
    Array(Box<Elements>),
    Map(Box<Elements>),
    Union(Vec<Read>),
    Record(Box<RecordPlan>),
}

pub(super) struct Elements {
    pub(super) read: Read,
    /// Bytes of one, at least.
    pub(super) bytes: usize,
}

pub(super) struct RecordPlan {
    /// In the order in which they are written, with their columns.
    pub(super) fields: Vec<(Read, usize)>,
    /// Bytes of a row of nulls, at least.
    pub(super) row_bytes: usize,
}

pub(super) struct Planner<'a> {
    pub(super) types: &'a Types,
    pub(super) unknown: UnknownFields,
    pub(super) planned: usize,
}

impl Planner<'_> {
    /// # Errors
    /// `Invalid`: `schema_mismatch`, `unknown_field`, `invalid_avro_schema`.
    pub(super) fn record(
        &mut self,
        fields: &[(String, TypeId)],
        columns: &Fields,
        path: &str,
    ) -> Result<RecordPlan, Error> {
        let places: HashMap<&str, usize> =
            columns.iter().enumerate().map(|(place, column)| (column.name().as_str(), place)).collect();
        let mut planned = Vec::with_capacity(fields.len());
        self.plan(fields.len())?;
        for (name, id) in fields {
            let path = below(path, name);
            planned.push(match places.get(name.as_str()) {
                Some(place) => (self.value(*id, columns[*place].data_type(), &path)?, *place),
                None if self.unknown == UnknownFields::Refuse => {
                    return Err(unknown_field("the Avro schema", &path, name, columns));
                }
                None => (Read::Skip(*id), usize::MAX),
            });
        }
        let sent: HashSet<&str> = fields.iter().map(|(name, _)| name.as_str()).collect();
        let missing = |name: &str| !sent.contains(name);
        if let Some(column) = columns.iter().find(|column| !column.is_nullable() && missing(column.name())) {
            let why = "it may not be null, and the Avro schema does not have it";
            return Err(missing_column(&below(path, column.name()), why));
        }
        let row_bytes = columns.iter().map(|column| null_bytes(column.data_type())).sum();
        Ok(RecordPlan { fields: planned, row_bytes })
    }

    fn plan(&mut self, values: usize) -> Result<(), Error> {
        self.planned += values;
        if self.planned <= PLANNED_MAX {
            return Ok(());
        }
        Err(invalid(&format!("more than {PLANNED_MAX} values in a record")))
    }

    fn value(&mut self, id: TypeId, to: &DataType, path: &str) -> Result<Read, Error> {
        self.plan(1)?;
        let types = self.types;
        let read = match (types.of(id), to) {
            (Type::Null, _) => Some(Read::Null),
            (Type::Union(branches), _) => {
                let branches = branches.iter().map(|branch| self.value(*branch, to, path));
                Some(Read::Union(branches.collect::<Result<_, _>>()?))
            }
            (Type::Array(items), DataType::List(element)) => {
                let (read, bytes) =
                    (self.value(*items, element.data_type(), path)?, null_bytes(element.data_type()));
                Some(Read::Array(Box::new(Elements { read, bytes: bytes.max(1) })))
            }
            (Type::Map(values), DataType::Map(entries, _)) => match entries.data_type() {
                DataType::Struct(columns) => {
                    let read = self.value(*values, columns[1].data_type(), path)?;
                    let bytes = columns.iter().map(|column| null_bytes(column.data_type())).sum();
                    Some(Read::Map(Box::new(Elements { read, bytes })))
                }
                _ => None,
            },
            (Type::Record(fields), DataType::Struct(columns)) => {
                Some(Read::Record(Box::new(self.record(fields, columns, path)?)))
            }
            (of, to) => plain(of, to),
        };
        read.ok_or_else(|| {
            let (from, to) = (types.text(id), types::text(to));
            mismatch(
                path,
                &format!("the Avro schema has it as {from}, the table as {to}, which does not fit"),
            )
        })
    }
}

fn plain(of: &Type, to: &DataType) -> Option<Read> {
    let takes_integers = matches!(
        to,
        DataType::Int8 | DataType::Int16 | DataType::Int32 | DataType::Int64 | DataType::Decimal128(..)
    );
    Some(match (of, to) {
        (Type::Boolean, DataType::Boolean) => Read::Bool,
        (Type::Int(Unit::None | Unit::Days), DataType::Date32) => Read::Int,
        (Type::Int(Unit::None), _) if takes_integers => Read::Int,
        (Type::Long(Unit::None), _) if takes_integers => Read::Long,
        (Type::Long(Unit::None), DataType::Timestamp(..)) => Read::Long,
        (Type::Long(unit), DataType::Timestamp(_, zone)) => match unit {
            Unit::Millis(utc) if *utc == zone.is_some() => Read::Multiplied(1000),
            Unit::Micros(utc) if *utc == zone.is_some() => Read::Long,
            Unit::Nanos(utc) if *utc == zone.is_some() => Read::Divided(1000),
            _ => return None,
        },
        (Type::Float, DataType::Float32 | DataType::Float64) => Read::Float,
        (Type::Double, DataType::Float64) => Read::Double,
        (
            Type::Text,
            DataType::Utf8 | DataType::Decimal128(..) | DataType::Date32 | DataType::Timestamp(..),
        ) => Read::Text,
        (Type::Enum(symbols), DataType::Utf8) => Read::Enum(Arc::clone(symbols)),
        (Type::Bytes(None), DataType::Binary) => Read::Bytes,
        (Type::Fixed(size, None), DataType::Binary) => Read::Fixed(*size),
        (Type::Bytes(Some(scale)), DataType::Decimal128(_, to)) => {
            Read::Decimal(u32::try_from(*to).ok()?.checked_sub(*scale)?, None)
        }
        (Type::Fixed(size, Some(scale)), DataType::Decimal128(_, to)) => {
            Read::Decimal(u32::try_from(*to).ok()?.checked_sub(*scale)?, Some(*size))
        }
        _ => return None,
    })
}
