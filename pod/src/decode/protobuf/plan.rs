//! How the fields of a message go into the columns of a table: made once a stream, followed for each record.
//!
//! *Owns*: which field goes into which column, which types fit, what is refused at open.
//! *Does not own*: the descriptor's names (`descriptor`), reading values (`value`).
//!
//! Columns and fields are matched by name, structs and messages likewise. Types fit as follows; what is beyond a column's
//! range is refused value by value.
//!
//! | column | fields |
//! |---|---|
//! | bool | bool |
//! | int8 to int64, decimal | all integers, enums |
//! | float32 | float |
//! | float64 | double, float |
//! | string | string, enums by their names |
//! | decimal | string |
//! | binary | bytes |
//! | date | int32, sint32, sfixed32 (days since 1970-01-01), string |
//! | timestamp, `timestamp_ntz` | int64, sint64, sfixed64 (microseconds since 1970-01-01), string |
//! | list | repeated |
//! | map | map, its keys as text |
//! | struct | message |

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use arrow::datatypes::{DataType, Field, Fields};
use prost_types::field_descriptor_proto::{Label, Type};
use prost_types::{DescriptorProto, EnumDescriptorProto, FieldDescriptorProto};
use sluice_shared::error::Error;
use sluice_shared::frame::UnknownFields;
use sluice_shared::protobuf::{NUMBER_MAX, WireType};
use sluice_shared::table::types;

use super::super::conform::null_bytes;
use super::super::fault::{below, cut, mismatch, unknown_field};
use super::descriptor::{Holds, Named, Types, invalid, is_repeated, type_text};

/// Most fields in a plan: a message may be part of many others, each time anew.
const FIELDS_PLANNED_MAX: usize = 100_000;

/// How a message goes into columns that stand side by side.
pub(super) struct MessagePlan {
    fields: Vec<FieldPlan>,
    /// Place in `fields` by field number, where numbers are dense.
    dense: Vec<u32>,
    /// The same for the others, by rising number.
    sparse: Vec<(u32, u32)>,
    /// Columns that must be in each message.
    pub(super) required: Vec<usize>,
    /// Columns whose values are messages by themselves, with their fields' places.
    pub(super) structs: Vec<(usize, usize)>,
    /// Columns of maps.
    pub(super) maps: Vec<usize>,
    /// Lists and maps that may not be null: without a value they are empty.
    pub(super) never_null: Vec<usize>,
    /// The columns of each oneof.
    pub(super) oneofs: Vec<Vec<usize>>,
    /// Bytes of a row of nulls, at least.
    pub(super) row_bytes: usize,
}

pub(super) struct FieldPlan {
    number: u32,
    /// Its column; of no meaning where it is skipped.
    pub(super) place: usize,
    pub(super) oneof: Option<usize>,
    pub(super) read: Read,
}

/// What is done with a field's value.
pub(super) enum Read {
    Skip,
    One(Scalar),
    Many(Scalar),
    Message(Box<MessagePlan>),
    Messages(Box<MessagePlan>),
    Map(Box<MapPlan>),
}

pub(super) struct MapPlan {
    pub(super) key: Scalar,
    /// `One` or `Message`.
    pub(super) value: Read,
    /// Bytes of an entry, at least.
    pub(super) entry_bytes: usize,
}

/// A value that is no message.
pub(super) struct Scalar {
    pub(super) wire: WireType,
    pub(super) kind: Kind,
    /// Bytes of a value in its column, at least.
    pub(super) bytes: usize,
}

/// Names by number.
pub(super) type Names = HashMap<i32, Box<str>>;

pub(super) enum Kind {
    Bool,
    Integer(Integer),
    Float,
    Double,
    Text,
    Bytes,
    /// An enum's names by number.
    Name(Arc<Names>),
}

#[derive(Debug, Clone, Copy)]
pub(super) enum Integer {
    Int32,
    Int64,
    Uint32,
    Uint64,
    Sint32,
    Sint64,
    Fixed32,
    Fixed64,
    Sfixed32,
    Sfixed64,
}

impl MessagePlan {
    /// A plan for a table's columns.
    ///
    /// # Errors
    /// `Invalid`: `invalid_descriptor`, `schema_mismatch`, `unknown_field`.
    pub(super) fn new(
        root: &DescriptorProto,
        columns: &Fields,
        unknown: UnknownFields,
    ) -> Result<Self, Error> {
        let mut planner = Planner { types: Types::of(root)?, unknown, planned: 0, names: HashMap::new() };
        planner.message(&Named { name: root.name().to_owned(), message: root }, columns, "")
    }

    /// The field of this number, if anything is to be done with it.
    #[inline]
    pub(super) fn field(&self, number: u32) -> Option<&FieldPlan> {
        match self.dense.get(number as usize) {
            Some(place) => self.fields.get(*place as usize),
            None => self.sparse_field(number),
        }
    }

    fn sparse_field(&self, number: u32) -> Option<&FieldPlan> {
        let found = self.sparse.binary_search_by_key(&number, |(number, _)| *number).ok()?;
        self.fields.get(self.sparse[found].1 as usize)
    }

    /// The plan of the message in the field at `field`.
    pub(super) fn nested(&self, field: usize) -> &Self {
        match &self.fields[field].read {
            Read::Message(plan) => plan,
            _ => unreachable!("`structs` names only such fields"),
        }
    }

    fn index(&mut self) {
        let dense_max = (4 * self.fields.len() + 32) as u32;
        for (place, field) in (0_u32..).zip(&self.fields) {
            if field.number > dense_max {
                self.sparse.push((field.number, place));
                continue;
            }
            if self.dense.len() <= field.number as usize {
                self.dense.resize(field.number as usize + 1, u32::MAX);
            }
            self.dense[field.number as usize] = place;
        }
        self.sparse.sort_unstable();
    }
}

/// A plan being made.
struct Planner<'a> {
    types: Types<'a>,
    unknown: UnknownFields,
    planned: usize,
    /// Of enums that were met, by where they stand: many fields may share a large one.
    names: HashMap<usize, Arc<Names>>,
}

impl<'a> Planner<'a> {
    fn message(&mut self, named: &Named<'a>, columns: &Fields, path: &str) -> Result<MessagePlan, Error> {
        let message = named.message;
        self.check_fields(message)?;
        let mut plan = MessagePlan {
            fields: Vec::with_capacity(columns.len()),
            dense: Vec::new(),
            sparse: Vec::new(),
            required: Vec::new(),
            structs: Vec::new(),
            maps: Vec::new(),
            never_null: Vec::new(),
            oneofs: vec![Vec::new(); message.oneof_decl.len()],
            row_bytes: columns.iter().map(|column| null_bytes(column.data_type())).sum(),
        };
        let places: HashMap<&str, usize> =
            columns.iter().enumerate().map(|(place, column)| (column.name().as_str(), place)).collect();
        for field in &message.field {
            match places.get(field.name()) {
                Some(place) => {
                    let path = below(path, field.name());
                    let read = self.read(field, &columns[*place], &named.name, &path)?;
                    plan.add(field, *place, &columns[*place], read);
                }
                None if self.unknown == UnknownFields::Refuse => {
                    let path = below(path, field.name());
                    return Err(unknown_field("the descriptor", &path, field.name(), columns));
                }
                None => plan.add_skipped(field),
            }
        }
        let sent: HashSet<&str> = message.field.iter().map(FieldDescriptorProto::name).collect();
        let missing =
            columns.iter().find(|column| !column.is_nullable() && !sent.contains(column.name().as_str()));
        if let Some(column) = missing {
            let why = "it may not be null, and the descriptor does not have it";
            return Err(mismatch(&below(path, column.name()), why));
        }
        plan.index();
        Ok(plan)
    }

    fn check_fields(&mut self, message: &DescriptorProto) -> Result<(), Error> {
        self.planned += message.field.len() + message.oneof_decl.len();
        if self.planned > FIELDS_PLANNED_MAX {
            return Err(invalid(&format!("more than {FIELDS_PLANNED_MAX} fields, nested ones included")));
        }
        let (mut numbers, mut names) = (HashSet::new(), HashSet::new());
        for field in &message.field {
            let (name, number) = (cut(field.name()), field.number());
            if !u32::try_from(number).is_ok_and(|number| (1..=NUMBER_MAX).contains(&number)) {
                return Err(invalid(&format!("field {name:?} has number {number}")));
            }
            if !numbers.insert(number) || !names.insert(field.name()) {
                return Err(invalid(&format!(
                    "the name or number of field {name:?} ({number}) stands there twice"
                )));
            }
        }
        Ok(())
    }

    fn read(
        &mut self,
        field: &'a FieldDescriptorProto,
        to: &Field,
        within: &str,
        path: &str,
    ) -> Result<Read, Error> {
        let held = self.types.holds(field, within);
        let read = match (held, to.data_type()) {
            (Some(Holds::Map(key, value, entry)), DataType::Map(entries, _)) => {
                self.map((key, value), &entry, entries, path)?.map(|map| Read::Map(Box::new(map)))
            }
            (Some(Holds::Map(..)), _) => None,
            (Some(held), DataType::List(element)) if is_repeated(field) => {
                match self.value(held, element.data_type(), path)? {
                    Some(Read::One(scalar)) => Some(Read::Many(scalar)),
                    Some(Read::Message(plan)) => Some(Read::Messages(plan)),
                    _ => None,
                }
            }
            (Some(held), to) if !is_repeated(field) => self.value(held, to, path)?,
            _ => None,
        };
        read.ok_or_else(|| {
            let (from, to) = (type_text(field), types::text(to.data_type()));
            mismatch(path, &format!("the descriptor has it as {from}, the table as {to}, which does not fit"))
        })
    }

    /// `One` or `Message`; None where the types do not fit.
    fn value(&mut self, held: Holds<'a>, to: &DataType, path: &str) -> Result<Option<Read>, Error> {
        Ok(match (held, to) {
            (Holds::Scalar(kind), to) => scalar(kind, to).map(Read::One),
            (Holds::Enum(of), DataType::Utf8) => of.map(|of| Read::One(self.named(of, to))),
            (Holds::Enum(_), to) => scalar(Type::Enum, to).map(Read::One),
            (Holds::Message(named), DataType::Struct(fields)) => {
                Some(Read::Message(Box::new(self.message(&named, fields, path)?)))
            }
            _ => None,
        })
    }

    /// An enum's value by its name.
    fn named(&mut self, of: &EnumDescriptorProto, to: &DataType) -> Scalar {
        let names = self.names.entry(std::ptr::from_ref(of).addr());
        let names = names.or_insert_with(|| Arc::new(names_by_number(of)));
        Scalar { wire: WireType::Varint, kind: Kind::Name(Arc::clone(names)), bytes: null_bytes(to) }
    }

    fn map(
        &mut self,
        (key, value): (&'a FieldDescriptorProto, &'a FieldDescriptorProto),
        entry: &Named<'a>,
        entries: &Field,
        path: &str,
    ) -> Result<Option<MapPlan>, Error> {
        let DataType::Struct(columns) = entries.data_type() else { return Ok(None) };
        let key = self.types.holds(key, &entry.name).and_then(|held| map_key(&held));
        let value = match self.types.holds(value, &entry.name) {
            Some(held) if !is_repeated(value) => self.value(held, columns[1].data_type(), path)?,
            _ => None,
        };
        let entry_bytes = columns.iter().map(|column| null_bytes(column.data_type())).sum();
        Ok(key.zip(value).map(|(key, value)| MapPlan { key, value, entry_bytes }))
    }
}

impl MessagePlan {
    fn add(&mut self, field: &FieldDescriptorProto, place: usize, column: &Field, read: Read) {
        if field.label() == Label::Required {
            self.required.push(place);
        }
        match &read {
            Read::Message(_) => self.structs.push((place, self.fields.len())),
            Read::Map(_) => self.maps.push(place),
            _ => {}
        }
        if !column.is_nullable() && column.data_type().is_nested() && !matches!(read, Read::Message(_)) {
            self.never_null.push(place);
        }
        let oneof = self.oneof(field);
        if let Some(oneof) = oneof {
            self.oneofs[oneof].push(place);
        }
        self.fields.push(FieldPlan { number: number(field), place, oneof, read });
    }

    /// Only as a member of a oneof is it of any consequence: it takes the others' place.
    fn add_skipped(&mut self, field: &FieldDescriptorProto) {
        if let Some(oneof) = self.oneof(field) {
            let (number, place) = (number(field), usize::MAX);
            self.fields.push(FieldPlan { number, place, oneof: Some(oneof), read: Read::Skip });
        }
    }

    fn oneof(&self, field: &FieldDescriptorProto) -> Option<usize> {
        // An optional field of proto3 is alone in its oneof.
        let index = field.oneof_index.filter(|_| !field.proto3_optional())?;
        usize::try_from(index).ok().filter(|index| *index < self.oneofs.len())
    }
}

fn number(field: &FieldDescriptorProto) -> u32 {
    field.number().unsigned_abs()
}

fn scalar(from: Type, to: &DataType) -> Option<Scalar> {
    let (wire, integer) = match from {
        Type::Int32 | Type::Enum => (WireType::Varint, Some(Integer::Int32)),
        Type::Int64 => (WireType::Varint, Some(Integer::Int64)),
        Type::Uint32 => (WireType::Varint, Some(Integer::Uint32)),
        Type::Uint64 => (WireType::Varint, Some(Integer::Uint64)),
        Type::Sint32 => (WireType::Varint, Some(Integer::Sint32)),
        Type::Sint64 => (WireType::Varint, Some(Integer::Sint64)),
        Type::Fixed32 => (WireType::Fixed32, Some(Integer::Fixed32)),
        Type::Fixed64 => (WireType::Fixed64, Some(Integer::Fixed64)),
        Type::Sfixed32 => (WireType::Fixed32, Some(Integer::Sfixed32)),
        Type::Sfixed64 => (WireType::Fixed64, Some(Integer::Sfixed64)),
        Type::Bool => (WireType::Varint, None),
        Type::Float => (WireType::Fixed32, None),
        Type::Double => (WireType::Fixed64, None),
        Type::String | Type::Bytes => (WireType::Delimited, None),
        Type::Group | Type::Message => return None,
    };
    let kind = match (to, from, integer) {
        (DataType::Boolean, Type::Bool, _) => Kind::Bool,
        (DataType::Float32 | DataType::Float64, Type::Float, _) => Kind::Float,
        (DataType::Float64, Type::Double, _) => Kind::Double,
        (
            DataType::Utf8 | DataType::Decimal128(..) | DataType::Date32 | DataType::Timestamp(..),
            Type::String,
            _,
        ) => Kind::Text,
        (DataType::Binary, Type::Bytes, _) => Kind::Bytes,
        (DataType::Date32, Type::Int32 | Type::Sint32 | Type::Sfixed32, Some(integer))
        | (DataType::Timestamp(..), Type::Int64 | Type::Sint64 | Type::Sfixed64, Some(integer))
        | (
            DataType::Int8 | DataType::Int16 | DataType::Int32 | DataType::Int64 | DataType::Decimal128(..),
            _,
            Some(integer),
        ) => Kind::Integer(integer),
        _ => return None,
    };
    Some(Scalar { wire, kind, bytes: null_bytes(to) })
}

fn map_key(held: &Holds<'_>) -> Option<Scalar> {
    match held {
        Holds::Scalar(Type::String) => scalar(Type::String, &DataType::Utf8),
        Holds::Scalar(Type::Bool) => scalar(Type::Bool, &DataType::Boolean),
        Holds::Scalar(kind) => scalar(*kind, &DataType::Int64),
        _ => None,
    }
}

/// Of numbers with several names the first counts.
fn names_by_number(of: &EnumDescriptorProto) -> Names {
    of.value.iter().rev().map(|value| (value.number(), value.name().into())).collect()
}
