//! What the columns of all three signals are made of.
//!
//! *Owns*: times, ids, attributes, lists, and the columns of resource and scope. A core.
//! *Does not own*: which columns a signal has (`logs`, `spans`, `metrics`), where rows are cut into frames (`flat`).
//!
//! A row is appended whole whatever is in it; what a column cannot hold is null there and noted in `Misfit`, and the row
//! is left out in the end. So columns always have one length.

use std::collections::HashMap;
use std::sync::Arc;

use arrow::array::{
    Array, ArrayBuilder, ArrayRef, Float64Builder, Int64Builder, ListArray, MapBuilder, MapFieldNames,
    StringBuilder, StructArray, TimestampMicrosecondBuilder,
};
use arrow::buffer::{NullBuffer, OffsetBuffer, ScalarBuffer};
use arrow::datatypes::{DataType, Field, Fields};
use sluice_shared::error::Error;
use sluice_shared::protobuf::{Reader, WireType};
use sluice_shared::table::types;

use super::value::{key_value, text, utf8};

/// Nanoseconds of a microsecond.
const MICROSECOND: u64 = 1000;
/// The attribute of a resource that has a column of its own.
const SERVICE_NAME: &str = "service.name";

/// Names a column and holds it.
pub(super) type Named = (&'static str, ArrayRef);

/// Why the present row cannot be kept: the first thing that did not fit.
#[derive(Debug, Default)]
pub(super) struct Misfit(pub(super) Option<String>);

impl Misfit {
    /// A number that may have 64 bits in a column that has 63 and a sign.
    pub(super) fn signed(&mut self, column: &str, value: u64) -> Option<i64> {
        let signed = i64::try_from(value).ok();
        if signed.is_none() && self.0.is_none() {
            self.0 = Some(format!("column {column}: {value} is out of the range of int64"));
        }
        signed
    }

    /// A time in nanoseconds; zero is unknown.
    pub(super) fn nanos(&mut self, column: &str, value: u64) -> Option<i64> {
        if value == 0 { None } else { self.signed(column, value) }
    }
}

/// Microseconds of nanoseconds; zero is unknown. Rounded down: the nanoseconds stand in a column of their own.
pub(super) fn append_time(times: &mut TimestampMicrosecondBuilder, nanos: u64) {
    times.append_option((nanos > 0).then_some((nanos / MICROSECOND).cast_signed()));
}

/// A builder of times.
pub(super) fn times() -> TimestampMicrosecondBuilder {
    TimestampMicrosecondBuilder::new().with_data_type(types::timestamp_utc())
}

/// Lower-case hex; what is empty is null.
pub(super) fn append_id(ids: &mut StringBuilder, id: &[u8]) {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    if id.is_empty() {
        return ids.append_null();
    }
    let digit = |nibble: u8| char::from(DIGITS[usize::from(nibble & 15)]);
    let hex: String = id.iter().flat_map(|byte| [digit(byte >> 4), digit(*byte)]).collect();
    ids.append_value(hex);
}

/// Text that is null where it is empty: protobuf does not tell one from the other.
pub(super) fn append_text(texts: &mut StringBuilder, text: &str) {
    texts.append_option((!text.is_empty()).then_some(text));
}

/// The word for an enum's number; the number itself where there is none.
pub(super) fn append_word(words: &mut StringBuilder, known: &[&str], number: u64) {
    match usize::try_from(number).ok().and_then(|number| known.get(number)) {
        Some(word) => words.append_value(word),
        None => words.append_value(number.cast_signed().to_string()),
    }
}

/// Calls `each` with the messages of a repeated field.
pub(super) fn for_each<'a>(
    message: &Reader<'a>,
    number: u32,
    mut each: impl FnMut(Reader<'a>) -> Result<(), Error>,
) -> Result<(), Error> {
    let mut message = message.clone();
    while !message.is_done() {
        let tag = message.tag()?;
        if (tag.number, tag.wire) == (number, WireType::Delimited) {
            each(message.nested()?)?;
        } else {
            message.skip(tag)?;
        }
    }
    Ok(())
}

/// A column of attributes, `map<string, string>`. Of a key that stands there twice the last value counts.
pub(super) struct Attributes(MapBuilder<StringBuilder, StringBuilder>);

impl Attributes {
    pub(super) fn new() -> Self {
        let names = MapFieldNames { entry: "key_value".into(), key: "key".into(), value: "value".into() };
        Self(MapBuilder::new(Some(names), StringBuilder::new(), StringBuilder::new()))
    }

    /// The `KeyValue`s of a message's repeated field.
    pub(super) fn append(&mut self, message: &Reader<'_>, number: u32) -> Result<(), Error> {
        for (key, value) in last_of_each(message, number)? {
            self.0.keys().append_value(key);
            self.0.values().append_option(value.map(text).transpose()?.flatten());
        }
        self.close(true);
        Ok(())
    }

    fn append_ready(&mut self, ready: &[(String, Option<String>)]) {
        for (key, value) in ready {
            self.0.keys().append_value(key);
            self.0.values().append_option(value.as_ref());
        }
        self.close(true);
    }

    fn close(&mut self, is_valid: bool) {
        self.0.append(is_valid).expect("keys and values are appended together");
    }

    pub(super) fn finish(&mut self) -> ArrayRef {
        Arc::new(self.0.finish())
    }
}

type Pair<'a> = (&'a str, Option<Reader<'a>>);

fn last_of_each<'a>(message: &Reader<'a>, number: u32) -> Result<Vec<Pair<'a>>, Error> {
    /// So many are searched without a map.
    const FEW: usize = 16;
    let (mut pairs, mut places): (Vec<Pair<'a>>, HashMap<&'a str, usize>) = Default::default();
    for_each(message, number, |pair| {
        let (key, value) = key_value(pair)?;
        if pairs.len() == FEW && places.is_empty() {
            places.extend(pairs.iter().enumerate().map(|(place, (key, _))| (*key, place)));
        }
        let known = if pairs.len() < FEW {
            pairs.iter().position(|(known, _)| *known == key)
        } else {
            places.get(key).copied()
        };
        match known {
            Some(place) => pairs[place].1 = value,
            None => {
                if pairs.len() >= FEW {
                    places.insert(key, pairs.len());
                }
                pairs.push((key, value));
            }
        }
        Ok(())
    })?;
    Ok(pairs)
}

/// A column of lists, whose elements lie in builders of their own.
#[derive(Default)]
pub(super) struct Lists {
    ends: Vec<usize>,
    valid: Vec<bool>,
}

impl Lists {
    /// Ends the row's list: `len` elements are there in all.
    pub(super) fn close(&mut self, len: usize, is_valid: bool) {
        self.ends.push(len);
        self.valid.push(is_valid);
    }

    pub(super) fn finish(&mut self, elements: ArrayRef) -> ArrayRef {
        // A row is at most as large as its request, so that elements are counted in 32 bits.
        let end = |end: usize| i32::try_from(end).expect("a frame's elements are bounded");
        let offsets: Vec<i32> = std::iter::once(0).chain(self.ends.drain(..).map(end)).collect();
        let field = Arc::new(element_field(elements.data_type().clone()));
        let nulls = NullBuffer::from(std::mem::take(&mut self.valid));
        let nulls = Some(nulls).filter(|nulls| nulls.null_count() > 0);
        Arc::new(ListArray::new(field, OffsetBuffer::new(ScalarBuffer::from(offsets)), elements, nulls))
    }
}

fn element_field(element: DataType) -> Field {
    match types::list(element, true) {
        DataType::List(field) => field.as_ref().clone(),
        other => Field::new("element", other, true),
    }
}

/// A column of `list<int64>`; null in rows that have no such list.
#[derive(Default)]
pub(super) struct Ints {
    lists: Lists,
    values: Int64Builder,
}

impl Ints {
    /// Numbers of a repeated field, in a run or each by itself: eight bytes each, or varints.
    pub(super) fn append(
        &mut self,
        message: Option<(&Reader<'_>, u32)>,
        column: &str,
        misfit: &mut Misfit,
    ) -> Result<(), Error> {
        if let Some((message, number)) = message {
            numbers(message, number, |value| self.values.append_option(misfit.signed(column, value)))?;
        }
        self.lists.close(self.values.len(), message.is_some());
        Ok(())
    }

    pub(super) fn finish(&mut self) -> ArrayRef {
        let values = Arc::new(self.values.finish());
        self.lists.finish(values)
    }
}

/// A column of `list<float64>`; null in rows that have no such list.
#[derive(Default)]
pub(super) struct Doubles {
    lists: Lists,
    values: Float64Builder,
}

impl Doubles {
    pub(super) fn append(&mut self, message: Option<(&Reader<'_>, u32)>) -> Result<(), Error> {
        if let Some((message, number)) = message {
            numbers(message, number, |bits| self.values.append_value(f64::from_bits(bits)))?;
        }
        self.lists.close(self.values.len(), message.is_some());
        Ok(())
    }

    pub(super) fn finish(&mut self) -> ArrayRef {
        let values = Arc::new(self.values.finish());
        self.lists.finish(values)
    }
}

/// Field of exponential buckets: its counts are varints, all other lists have eight bytes a number.
pub(super) const VARINT_COUNTS: u32 = 2;

fn numbers(message: &Reader<'_>, number: u32, mut each: impl FnMut(u64)) -> Result<(), Error> {
    let mut message = message.clone();
    while !message.is_done() {
        let tag = message.tag()?;
        match tag.wire {
            WireType::Delimited if tag.number == number => {
                let mut run = message.nested()?;
                while !run.is_done() {
                    let is_varint = number == VARINT_COUNTS;
                    each(if is_varint { run.varint()? } else { u64::from_le_bytes(run.fixed64()?) });
                }
            }
            WireType::Fixed64 if tag.number == number => each(u64::from_le_bytes(message.fixed64()?)),
            WireType::Varint if tag.number == number => each(message.varint()?),
            _ => message.skip(tag)?,
        }
    }
    Ok(())
}

/// A struct of columns that may all be null.
pub(super) fn structure(columns: Vec<Named>) -> ArrayRef {
    let field = |(name, column): &Named| Field::new(*name, column.data_type().clone(), true);
    let fields: Fields = columns.iter().map(field).collect();
    Arc::new(StructArray::new(fields, columns.into_iter().map(|(_, column)| column).collect(), None))
}

/// What a record's row says of where the record is from: read once for all of its records.
#[derive(Debug, Default)]
pub(super) struct Origin {
    resource: Part,
    resource_schema_url: String,
    service_name: Option<String>,
    scope: Part,
    scope_schema_url: String,
    name: String,
    version: String,
}

/// Attributes as they go into each row.
#[derive(Debug, Default)]
struct Part {
    attributes: Vec<(String, Option<String>)>,
    dropped: u64,
    bytes: usize,
}

impl Part {
    /// Of a message whose attributes and their dropped count have these numbers.
    fn read(message: Option<&Reader<'_>>, attributes: u32, dropped: u32) -> Result<Self, Error> {
        let Some(message) = message else { return Ok(Self::default()) };
        let mut part = Self::default();
        for (key, value) in last_of_each(message, attributes)? {
            let value = value.map(text).transpose()?.flatten().map(std::borrow::Cow::into_owned);
            part.bytes += key.len() + value.as_ref().map_or(0, String::len);
            part.attributes.push((key.to_owned(), value));
        }
        let mut message = message.clone();
        while !message.is_done() {
            let tag = message.tag()?;
            match (tag.number, tag.wire) {
                (number, WireType::Varint) if number == dropped => part.dropped = message.varint()?,
                _ => message.skip(tag)?,
            }
        }
        Ok(part)
    }
}

impl Origin {
    /// Reads the head of a resource's records: fields 1 (the resource) and 3 (its schema).
    pub(super) fn of_resource(records: &Reader<'_>) -> Result<Self, Error> {
        let (resource, schema_url) = head(records)?;
        let resource = Part::read(resource.as_ref(), 1, 2)?;
        let named = resource.attributes.iter().find(|(key, _)| key == SERVICE_NAME);
        let service_name = named.and_then(|(_, value)| value.clone());
        Ok(Self { resource, resource_schema_url: schema_url.to_owned(), service_name, ..Self::default() })
    }

    /// Reads the head of a scope's records: the same fields.
    pub(super) fn enter_scope(&mut self, records: &Reader<'_>) -> Result<(), Error> {
        let (scope, schema_url) = head(records)?;
        self.scope = Part::read(scope.as_ref(), 3, 4)?;
        schema_url.clone_into(&mut self.scope_schema_url);
        (self.name, self.version) = (String::new(), String::new());
        let Some(mut scope) = scope else { return Ok(()) };
        while !scope.is_done() {
            let tag = scope.tag()?;
            match (tag.number, tag.wire) {
                (1, WireType::Delimited) => utf8(scope.delimited()?)?.clone_into(&mut self.name),
                (2, WireType::Delimited) => utf8(scope.delimited()?)?.clone_into(&mut self.version),
                _ => scope.skip(tag)?,
            }
        }
        Ok(())
    }

    /// Bytes that it adds to each row, about.
    pub(super) fn bytes(&self) -> usize {
        self.resource.bytes + self.scope.bytes + self.name.len() + self.resource_schema_url.len()
    }
}

fn head<'a>(records: &Reader<'a>) -> Result<(Option<Reader<'a>>, &'a str), Error> {
    let (mut records, mut from, mut schema_url) = (records.clone(), None, "");
    while !records.is_done() {
        let tag = records.tag()?;
        match (tag.number, tag.wire) {
            (1, WireType::Delimited) => from = Some(records.nested()?),
            (3, WireType::Delimited) => schema_url = utf8(records.delimited()?)?,
            _ => records.skip(tag)?,
        }
    }
    Ok((from, schema_url))
}

/// The columns that say where a record is from.
pub(super) struct OriginColumns {
    service_name: StringBuilder,
    resource: Attributes,
    resource_dropped: Int64Builder,
    resource_schema_url: StringBuilder,
    name: StringBuilder,
    version: StringBuilder,
    scope: Attributes,
    scope_dropped: Int64Builder,
    scope_schema_url: StringBuilder,
}

impl OriginColumns {
    pub(super) fn new() -> Self {
        Self {
            service_name: StringBuilder::new(),
            resource: Attributes::new(),
            resource_dropped: Int64Builder::new(),
            resource_schema_url: StringBuilder::new(),
            name: StringBuilder::new(),
            version: StringBuilder::new(),
            scope: Attributes::new(),
            scope_dropped: Int64Builder::new(),
            scope_schema_url: StringBuilder::new(),
        }
    }

    pub(super) fn append(&mut self, origin: &Origin, misfit: &mut Misfit) {
        self.service_name.append_option(origin.service_name.as_ref());
        self.resource.append_ready(&origin.resource.attributes);
        let dropped = misfit.signed("resource.dropped_attributes_count", origin.resource.dropped);
        self.resource_dropped.append_option(dropped);
        append_text(&mut self.resource_schema_url, &origin.resource_schema_url);
        append_text(&mut self.name, &origin.name);
        append_text(&mut self.version, &origin.version);
        self.scope.append_ready(&origin.scope.attributes);
        let dropped = misfit.signed("instrumentation_scope.dropped_attributes_count", origin.scope.dropped);
        self.scope_dropped.append_option(dropped);
        append_text(&mut self.scope_schema_url, &origin.scope_schema_url);
    }

    /// `service_name`, then the others, which come last in each table.
    pub(super) fn finish(&mut self, schema_url: &'static str) -> (Named, Vec<Named>) {
        let resource = structure(vec![
            ("attributes", self.resource.finish()),
            ("dropped_attributes_count", Arc::new(self.resource_dropped.finish())),
        ]);
        let scope = structure(vec![
            ("name", Arc::new(self.name.finish())),
            ("version", Arc::new(self.version.finish())),
            ("attributes", self.scope.finish()),
            ("dropped_attributes_count", Arc::new(self.scope_dropped.finish())),
        ]);
        let last: Vec<Named> = vec![
            ("resource", resource),
            ("resource_schema_url", Arc::new(self.resource_schema_url.finish())),
            ("instrumentation_scope", scope),
            (schema_url, Arc::new(self.scope_schema_url.finish())),
        ];
        (("service_name", Arc::new(self.service_name.finish())), last)
    }
}
