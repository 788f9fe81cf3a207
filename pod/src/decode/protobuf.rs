//! Protobuf messages to rows: a stream's plan, made of its descriptor, drives the wire straight into the columns.
//!
//! *Owns*: the walk over a message's fields, what is absent, what stands there more than once.
//! *Does not own*: the wire (`sluice_shared::protobuf`), which field goes where (`protobuf/plan`), values
//! (`protobuf/value`), the rows and their bounds (`rows`).
//! Keeps P8: a record is appended whole, or refused by name and cut away again; lengths before the records keep those
//! around it readable.
//!
//! A payload is messages one after the other, before each a varint of its length. Of a field that is not repeated the
//! last value counts, of a oneof its last member; messages that stand there twice are merged; numbers that the descriptor
//! does not have are skipped. The descriptor does not say whether it is proto2 or proto3, so what is absent is null,
//! whatever the default: in a column that may not be null the record is refused. A producer of proto3 declares such fields
//! `optional`, so that zero and the empty string are sent. Lists and maps that may not be null are empty where nothing was
//! sent. A map that has one key twice is refused, as in JSON.

mod descriptor;
mod plan;
mod value;

use std::collections::HashSet;

use arrow::datatypes::SchemaRef;
use sluice_shared::error::Error;
use sluice_shared::frame::{UnknownFields, messages};
use sluice_shared::protobuf::{Malformed, Reader, WireType};
use sluice_shared::table::TableSpec;

use self::plan::{FieldPlan, MapPlan, MessagePlan, Read, Scalar};
use self::value::check_wire;
use super::Decoded;
use super::budget::Budget;
use super::column::{Bytes, Column, Columns, Values, offset};
use super::fault::{Fault, cut};
use super::rows::{Payload, Rows};
use crate::table::batch::{Reason, ReasonCode};

/// Maps of up to so many entries are searched for a key that stands there twice without a set.
const SMALL_MAP_ENTRIES: usize = 8;
/// Field numbers of a map's entry.
const KEY: u32 = 1;
const VALUE: u32 = 2;

impl From<Malformed> for Fault {
    fn from(malformed: Malformed) -> Self {
        Self::new(ReasonCode::NotProtobuf, malformed.to_string())
    }
}

/// One stream's decoder.
pub struct ProtobufDecoder {
    plan: MessagePlan,
}

impl ProtobufDecoder {
    /// A decoder of the message that a serialized `DescriptorProto` describes, to a table's schema.
    ///
    /// # Errors
    /// `Invalid`: `invalid_descriptor`; `schema_mismatch` with the column where types do not fit, or where the descriptor
    /// lacks one that may not be null; `unknown_field` where it has one that the table does not have.
    pub fn new(table: &SchemaRef, descriptor: &[u8], unknown: UnknownFields) -> Result<Self, Error> {
        let root = descriptor::read(descriptor)?;
        Ok(Self { plan: MessagePlan::new(&root, table.fields(), unknown)? })
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
            let mut budget = Budget::new(row_bytes_max);
            budget.spend(self.plan.row_bytes)?;
            self.plan.read(columns, &mut Reader::new(record), &mut budget)?;
            self.plan.complete(columns)?;
            Ok(record.len() + budget.spent())
        })
    }
}

/// The schema of a table whose records are such messages. Enums are int32: their numbers outlive their names.
///
/// # Errors
/// `Invalid`: `invalid_descriptor`, `unsupported_type`.
pub fn table_schema(descriptor: &[u8]) -> Result<SchemaRef, Error> {
    TableSpec::normalise(&descriptor::schema(&descriptor::read(descriptor)?)?)
}

impl MessagePlan {
    /// Appends a message's fields to columns whose row is still open: `complete` closes it.
    fn read(&self, columns: &mut Columns, reader: &mut Reader<'_>, budget: &mut Budget) -> Result<(), Fault> {
        while !reader.is_done() {
            let tag = reader.tag()?;
            let Some(field) = self.field(tag.number) else {
                reader.skip(tag)?;
                continue;
            };
            if let Read::Skip = field.read {
                reader.skip(tag)?;
            } else {
                let (rows, column) = (columns.rows, &mut columns.columns[field.place]);
                let read = field.read.append(tag.wire, column, rows, (reader, budget));
                read.map_err(|fault| fault.within(columns.fields[field.place].name()))?;
            }
            if field.oneof.is_some() {
                self.clear_others(field, columns, budget)?;
            }
        }
        Ok(())
    }

    /// The last member of a oneof that is sent takes the others' place.
    fn clear_others(
        &self,
        field: &FieldPlan,
        columns: &mut Columns,
        budget: &mut Budget,
    ) -> Result<(), Fault> {
        let members = field.oneof.map_or(&[][..], |oneof| &self.oneofs[oneof]);
        for place in members.iter().filter(|place| **place != field.place) {
            let column = &mut columns.columns[*place];
            if column.rows > columns.rows {
                column.truncate(columns.rows);
                budget.spend(super::conform::null_bytes(&column.data_type))?;
            }
        }
        Ok(())
    }

    /// Closes the row: what was not sent is null.
    fn complete(&self, columns: &mut Columns) -> Result<(), Fault> {
        let rows = columns.rows;
        for place in &self.required {
            if columns.columns[*place].rows == rows {
                let fault = Fault::new(ReasonCode::MissingValue, "missing, but its descriptor requires it");
                return Err(fault.within(columns.fields[*place].name()));
            }
        }
        for (place, field) in &self.structs {
            let column = &mut columns.columns[*place];
            if column.rows > rows
                && let Values::Struct(nested) = &mut column.values
            {
                let completed = self.nested(*field).complete(nested);
                completed.map_err(|fault| fault.within(columns.fields[*place].name()))?;
            }
        }
        for place in &self.maps {
            let checked = check_keys(&columns.columns[*place], rows);
            checked.map_err(|fault| fault.within(columns.fields[*place].name()))?;
        }
        for place in &self.never_null {
            let column = &mut columns.columns[*place];
            if column.rows == rows {
                column.values.append_zero();
                column.validity.append_non_null();
                column.rows += 1;
            }
        }
        columns.complete()?;
        columns.rows += 1;
        Ok(())
    }
}

impl Read {
    /// Appends a value of the wire to a column, of whose values `rows` are closed.
    #[inline]
    fn append(
        &self,
        wire: WireType,
        column: &mut Column,
        rows: usize,
        (reader, budget): (&mut Reader<'_>, &mut Budget),
    ) -> Result<(), Fault> {
        match self {
            Self::One(scalar) => {
                scalar.check(wire)?;
                if column.rows > rows {
                    column.truncate(rows);
                }
                scalar.append(column, reader)
            }
            Self::Many(scalar) => append_many(scalar, wire, column, rows, (reader, budget)),
            Self::Message(plan) => {
                check_wire(WireType::Delimited, wire)?;
                if column.rows == rows {
                    column.validity.append_non_null();
                    column.rows += 1;
                }
                let Values::Struct(columns) = &mut column.values else { unplanned() };
                plan.read(columns, &mut reader.nested()?, budget)
            }
            Self::Messages(plan) => {
                check_wire(WireType::Delimited, wire)?;
                append_element(plan, column, rows, (reader, budget))
            }
            Self::Map(plan) => {
                check_wire(WireType::Delimited, wire)?;
                plan.append(column, rows, (&mut reader.nested()?, budget))
            }
            Self::Skip => unplanned(),
        }
    }
}

/// Elements, packed or one by one.
fn append_many(
    scalar: &Scalar,
    wire: WireType,
    column: &mut Column,
    rows: usize,
    (reader, budget): (&mut Reader<'_>, &mut Budget),
) -> Result<(), Fault> {
    let Values::List { offsets, column: elements, .. } = &mut column.values else { unplanned() };
    let first = closed_elements(offsets, rows);
    let mut append = |reader: &mut Reader<'_>| {
        budget.spend(scalar.bytes)?;
        let place = elements.rows - first;
        scalar.append(elements, reader).map_err(|fault| fault.at_element(place))
    };
    if wire == WireType::Delimited && scalar.wire != WireType::Delimited {
        let mut packed = reader.nested()?;
        while !packed.is_done() {
            append(&mut packed)?;
        }
    } else {
        scalar.check(wire)?;
        append(reader)?;
    }
    let end = offset(elements.rows);
    extend_to(column, rows, end);
    Ok(())
}

fn append_element(
    plan: &MessagePlan,
    column: &mut Column,
    rows: usize,
    (reader, budget): (&mut Reader<'_>, &mut Budget),
) -> Result<(), Fault> {
    let Values::List { offsets, column: elements, .. } = &mut column.values else { unplanned() };
    let Values::Struct(columns) = &mut elements.values else { unplanned() };
    budget.spend(plan.row_bytes)?;
    let place = elements.rows - closed_elements(offsets, rows);
    let read = plan.read(columns, &mut reader.nested()?, budget).and_then(|()| plan.complete(columns));
    read.map_err(|fault| fault.at_element(place))?;
    elements.validity.append_non_null();
    elements.rows += 1;
    let end = offset(elements.rows);
    extend_to(column, rows, end);
    Ok(())
}

/// Where the list after so many others begins.
fn closed_elements(offsets: &[i32], rows: usize) -> usize {
    usize::try_from(offsets[rows]).expect("offsets are not negative")
}

/// The open value of a list or map reaches to this element now.
fn extend_to(column: &mut Column, rows: usize, end: i32) {
    let (Values::List { offsets, .. } | Values::Map { offsets, .. }) = &mut column.values else {
        unplanned()
    };
    if column.rows > rows {
        offsets[rows + 1] = end;
        return;
    }
    offsets.push(end);
    column.validity.append_non_null();
    column.rows += 1;
}

impl MapPlan {
    /// Appends an entry. Of a key or value that is not sent it has the default, as protobuf's maps do.
    fn append(
        &self,
        column: &mut Column,
        rows: usize,
        (entry, budget): (&mut Reader<'_>, &mut Budget),
    ) -> Result<(), Fault> {
        let Values::Map { keys, values, .. } = &mut column.values else { unplanned() };
        budget.spend(self.entry_bytes)?;
        let key_start = keys.bytes.len();
        let entries = values.rows;
        let mut has_key = false;
        while !entry.is_done() {
            let tag = entry.tag()?;
            match tag.number {
                KEY => {
                    self.key.check(tag.wire)?;
                    keys.bytes.truncate(key_start);
                    self.key.append_key(keys, entry)?;
                    has_key = true;
                }
                VALUE => {
                    let read = self.value.append(tag.wire, values, entries, (entry, budget));
                    read.map_err(|fault| fault.within(&shown_key(&keys.bytes[key_start..])))?;
                }
                _ => entry.skip(tag)?,
            }
        }
        if !has_key {
            self.key.append_default_key(keys)?;
        }
        keys.close();
        self.close_value(values, entries)
            .map_err(|fault| fault.within(&shown_key(&keys.bytes[key_start..])))?;
        let end = offset(values.rows);
        extend_to(column, rows, end);
        Ok(())
    }

    fn close_value(&self, values: &mut Column, entries: usize) -> Result<(), Fault> {
        match &self.value {
            Read::One(scalar) if values.rows == entries => scalar.append_default(values),
            Read::Message(plan) => {
                if values.rows == entries {
                    values.validity.append_non_null();
                    values.rows += 1;
                }
                let Values::Struct(columns) = &mut values.values else { unplanned() };
                plan.complete(columns)
            }
            _ => Ok(()),
        }
    }
}

/// A key for a message.
fn shown_key(key: &[u8]) -> String {
    cut(&String::from_utf8_lossy(key))
}

fn key_bytes(keys: &Bytes, place: usize) -> &[u8] {
    &keys.bytes[closed_elements(&keys.offsets, place)..closed_elements(&keys.offsets, place + 1)]
}

/// Refuses a key that stands twice in the open map after `rows` others.
fn check_keys(column: &Column, rows: usize) -> Result<(), Fault> {
    let Values::Map { offsets, keys, .. } = &column.values else { unplanned() };
    if column.rows == rows {
        return Ok(());
    }
    let entries = closed_elements(offsets, rows)..closed_elements(offsets, rows + 1);
    let twice = if entries.len() <= SMALL_MAP_ENTRIES {
        let stands_before = |place: &usize| {
            (entries.start..*place).any(|before| key_bytes(keys, before) == key_bytes(keys, *place))
        };
        entries.clone().find(stands_before)
    } else {
        let mut seen = HashSet::with_capacity(entries.len());
        entries.clone().find(|place| !seen.insert(key_bytes(keys, *place)))
    };
    match twice {
        Some(place) => {
            let fault = Fault::new(ReasonCode::DuplicateField, "the key stands in the map twice");
            Err(fault.within(&shown_key(key_bytes(keys, place))))
        }
        None => Ok(()),
    }
}

fn unplanned() -> ! {
    unreachable!("the plan pairs only fields and columns that fit")
}

#[cfg(test)]
mod tests;
