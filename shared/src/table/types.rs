//! Column types: as short text, as Arrow's JSON type objects, and what each Arrow type becomes in a table.
//!
//! *Owns*: the text form and its grammar, the JSON type objects, `normalise`.
//! *Does not own*: the conversion of values (`pod/src/decode/`).
//!
//! The table types are: bool, int8, int16, int32, int64, float32, float64, decimal(p,s), string, binary, date,
//! timestamp (µs, UTC), timestamp_ntz (µs, no zone), `list<T>`, `map<string,T>`, `struct<a: T, b: T not null>`.

use std::fmt::Write as _;
use std::sync::Arc;

use arrow::datatypes::{DataType, Field, FieldRef, Fields, IntervalUnit, TimeUnit, UnionMode};
use serde::Deserialize;
use serde_json::Value;

use super::{NESTING_MAX, cut, nearest_name};
use crate::error::Error;

/// Most digits of a decimal.
pub const DECIMAL_PRECISION_MAX: u8 = 38;
/// Names of nested fields, as the Delta kernel has them, so that nothing is renamed on the way to a file.
const LIST_ELEMENT: &str = "element";
const MAP_ENTRIES: &str = "key_value";
const MAP_KEY: &str = "key";
const MAP_VALUE: &str = "value";
/// The zone of all timestamps that have one.
const UTC: &str = "UTC";

/// The types that are one word.
const WORDS: [(&str, DataType); 11] = [
    ("bool", DataType::Boolean),
    ("int8", DataType::Int8),
    ("int16", DataType::Int16),
    ("int32", DataType::Int32),
    ("int64", DataType::Int64),
    ("float32", DataType::Float32),
    ("float64", DataType::Float64),
    ("string", DataType::Utf8),
    ("binary", DataType::Binary),
    ("date", DataType::Date32),
    ("timestamp_ntz", DataType::Timestamp(TimeUnit::Microsecond, None)),
];
/// The types that are more, for advice.
const OTHERS: [&str; 5] = ["timestamp", "decimal", "list", "map", "struct"];

/// A timestamp in microseconds, in UTC.
pub fn timestamp_utc() -> DataType {
    DataType::Timestamp(TimeUnit::Microsecond, Some(UTC.into()))
}

/// A list as a table has it.
pub fn list(element: DataType, nullable: bool) -> DataType {
    DataType::List(Arc::new(Field::new(LIST_ELEMENT, element, nullable)))
}

/// A map from text as a table has it.
pub fn map(value: DataType, nullable: bool) -> DataType {
    let entries = vec![Field::new(MAP_KEY, DataType::Utf8, false), Field::new(MAP_VALUE, value, nullable)];
    DataType::Map(Arc::new(Field::new(MAP_ENTRIES, DataType::Struct(entries.into()), false)), false)
}

/// A type as text. Types that no table takes come out as Arrow writes them.
pub fn text(data_type: &DataType) -> String {
    let mut text = String::new();
    write_type(&mut text, data_type);
    text
}

fn write_type(out: &mut String, data_type: &DataType) {
    if let Some((word, _)) = WORDS.iter().find(|(_, known)| known == data_type) {
        return out.push_str(word);
    }
    match data_type {
        DataType::Timestamp(TimeUnit::Microsecond, Some(zone)) if zone.as_ref() == UTC => {
            out.push_str("timestamp");
        }
        DataType::Decimal128(precision, scale) => {
            write_text(out, format_args!("decimal({precision},{scale})"))
        }
        DataType::List(element) => {
            out.push_str("list<");
            write_nested(out, element);
            out.push('>');
        }
        DataType::Map(entries, _) => match entries.data_type() {
            DataType::Struct(fields) if fields.len() == 2 => {
                out.push_str("map<");
                write_type(out, fields[0].data_type());
                out.push_str(", ");
                write_nested(out, &fields[1]);
                out.push('>');
            }
            _ => write_text(out, format_args!("{data_type}")),
        },
        DataType::Struct(fields) => {
            out.push_str("struct<");
            for (place, field) in fields.iter().enumerate() {
                out.push_str(if place > 0 { ", " } else { "" });
                write_name(out, field.name());
                out.push_str(": ");
                write_nested(out, field);
            }
            out.push('>');
        }
        _ => write_text(out, format_args!("{data_type}")),
    }
}

fn write_text(out: &mut String, text: std::fmt::Arguments<'_>) {
    out.write_fmt(text).expect("writing to a string cannot fail");
}

fn write_nested(out: &mut String, field: &Field) {
    write_type(out, field.data_type());
    out.push_str(if field.is_nullable() { "" } else { " not null" });
}

fn write_name(out: &mut String, name: &str) {
    if name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_') {
        out.push_str(name);
    } else {
        write_text(out, format_args!("`{}`", name.replace('`', "``")));
    }
}

/// Reads a type from its text. Names in a struct that hold more than letters, digits and `_` stand in backticks.
///
/// # Errors
/// `Invalid` (`invalid_type`): where in the text, and what was expected.
pub fn parse(text: &str) -> Result<DataType, Error> {
    let mut parser = Parser { text, at: 0 };
    let parsed = parser.data_type(1)?;
    parser.spaces();
    if parser.at < text.len() {
        return Err(parser.expected("the end of the type"));
    }
    Ok(parsed)
}

struct Parser<'a> {
    text: &'a str,
    at: usize,
}

impl<'a> Parser<'a> {
    fn data_type(&mut self, depth: usize) -> Result<DataType, Error> {
        if depth > NESTING_MAX {
            return Err(self.invalid(&format!("nested deeper than {NESTING_MAX}")));
        }
        self.spaces();
        let start = self.at;
        let word = self.word();
        if let Some((_, known)) = WORDS.iter().find(|(name, _)| *name == word) {
            return Ok(known.clone());
        }
        match word {
            "timestamp" => Ok(timestamp_utc()),
            "decimal" => self.decimal(),
            "list" => self.list(depth),
            "map" => self.map(depth),
            "struct" => self.structure(depth),
            _ => {
                self.at = start;
                let known = || WORDS.iter().map(|(name, _)| *name).chain(OTHERS);
                let advice = match nearest_name(word, known()) {
                    Some(nearest) => format!("; did you mean {nearest}?"),
                    None => format!("; known are {}", known().collect::<Vec<_>>().join(", ")),
                };
                Err(self.invalid(&format!("unknown type {}{advice}", cut(word))))
            }
        }
    }

    fn decimal(&mut self) -> Result<DataType, Error> {
        self.sign('(')?;
        let precision = self.number()?;
        self.sign(',')?;
        let scale = self.number()?;
        self.sign(')')?;
        if !(1..=DECIMAL_PRECISION_MAX).contains(&precision) || scale > precision {
            return Err(self.invalid("decimal(p,s) needs 1 <= p <= 38 and 0 <= s <= p"));
        }
        Ok(DataType::Decimal128(precision, scale.cast_signed()))
    }

    fn list(&mut self, depth: usize) -> Result<DataType, Error> {
        self.sign('<')?;
        let (element, nullable) = self.nested(depth)?;
        self.sign('>')?;
        Ok(list(element, nullable))
    }

    fn map(&mut self, depth: usize) -> Result<DataType, Error> {
        self.sign('<')?;
        self.spaces();
        if self.word() != "string" {
            return Err(self.expected("`string`: the keys of a map are text"));
        }
        self.sign(',')?;
        let (value, nullable) = self.nested(depth)?;
        self.sign('>')?;
        Ok(map(value, nullable))
    }

    fn structure(&mut self, depth: usize) -> Result<DataType, Error> {
        self.sign('<')?;
        let mut fields = Vec::new();
        loop {
            let name = self.name()?;
            self.sign(':')?;
            let (data_type, nullable) = self.nested(depth)?;
            fields.push(Field::new(name, data_type, nullable));
            if !self.takes(',') {
                break;
            }
        }
        self.sign('>')?;
        Ok(DataType::Struct(fields.into()))
    }

    /// A type below another, and whether it is nullable.
    fn nested(&mut self, depth: usize) -> Result<(DataType, bool), Error> {
        let data_type = self.data_type(depth + 1)?;
        self.spaces();
        let before = self.at;
        if self.word() != "not" {
            self.at = before;
            return Ok((data_type, true));
        }
        self.spaces();
        if self.word() != "null" {
            return Err(self.expected("`not null`"));
        }
        Ok((data_type, false))
    }

    fn name(&mut self) -> Result<String, Error> {
        self.spaces();
        if !self.takes('`') {
            let word = self.word();
            return if word.is_empty() { Err(self.expected("a field's name")) } else { Ok(word.to_owned()) };
        }
        let mut name = String::new();
        loop {
            let Some(length) = self.rest().find('`') else {
                return Err(self.expected("a closing backtick"));
            };
            name.push_str(&self.rest()[..length]);
            self.at += length + 1;
            if !self.rest().starts_with('`') {
                return Ok(name);
            }
            name.push('`');
            self.at += 1;
        }
    }

    fn number(&mut self) -> Result<u8, Error> {
        self.spaces();
        let digits = self.rest().bytes().take_while(u8::is_ascii_digit).count();
        let number = self.rest()[..digits].parse().map_err(|_| self.expected("a number from 0 to 38"))?;
        self.at += digits;
        Ok(number)
    }

    fn word(&mut self) -> &'a str {
        let is_word = |b: &u8| b.is_ascii_alphanumeric() || *b == b'_';
        let length = self.rest().bytes().take_while(is_word).count();
        let word = &self.rest()[..length];
        self.at += length;
        word
    }

    fn sign(&mut self, sign: char) -> Result<(), Error> {
        if self.takes(sign) { Ok(()) } else { Err(self.expected(&format!("`{sign}`"))) }
    }

    fn takes(&mut self, sign: char) -> bool {
        self.spaces();
        let there = self.rest().starts_with(sign);
        self.at += if there { sign.len_utf8() } else { 0 };
        there
    }

    fn spaces(&mut self) {
        self.at += self.rest().len() - self.rest().trim_start().len();
    }

    fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    fn expected(&self, what: &str) -> Error {
        self.invalid(&format!("expected {what}"))
    }

    fn invalid(&self, why: &str) -> Error {
        let why = format!("type {} at character {}: {why}", cut(self.text), self.at + 1);
        Error::invalid("invalid_type", why)
    }
}

/// A field of a schema in JSON.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct FieldJson {
    name: String,
    r#type: Value,
    #[serde(default = "yes")]
    nullable: bool,
    #[serde(default)]
    children: Vec<FieldJson>,
}

fn yes() -> bool {
    true
}

/// A field from its JSON, with the type as it was written; `normalise` comes after.
pub(super) fn from_json(json: &FieldJson) -> Result<Field, Error> {
    let data_type = match &json.r#type {
        Value::String(text) if json.children.is_empty() => parse(text),
        Value::String(_) => {
            Err(Error::invalid("invalid_type", "`children` go with a type object, not with text"))
        }
        Value::Object(_) => from_type_object(json),
        _ => {
            Err(Error::invalid("invalid_type", "`type` is text, such as \"int64\", or an Arrow type object"))
        }
    };
    let in_column = |mut error: Error| {
        let column =
            error.column.take().map_or_else(|| json.name.clone(), |below| format!("{}.{below}", json.name));
        error.message = format!("column {}: {}", cut(&json.name), error.message);
        error.at_column(column)
    };
    Ok(Field::new(&json.name, data_type.map_err(in_column)?, json.nullable))
}

/// A type object of Arrow's JSON integration format.
#[derive(Deserialize)]
#[serde(tag = "name", rename_all = "lowercase", deny_unknown_fields)]
enum TypeObject {
    Null,
    Bool,
    #[serde(rename_all = "camelCase")]
    Int {
        bit_width: u8,
        is_signed: bool,
    },
    FloatingPoint {
        precision: FloatPrecision,
    },
    Utf8,
    LargeUtf8,
    Utf8View,
    Binary,
    LargeBinary,
    BinaryView,
    #[serde(rename_all = "camelCase")]
    FixedSizeBinary {
        byte_width: i32,
    },
    #[serde(rename_all = "camelCase")]
    Decimal {
        precision: u8,
        scale: i8,
        #[serde(default)]
        bit_width: Option<u16>,
    },
    Date {
        unit: DateUnit,
    },
    Time {},
    Timestamp {
        unit: Unit,
        #[serde(default)]
        timezone: Option<String>,
    },
    Duration {},
    Interval {},
    List,
    LargeList,
    #[serde(rename_all = "camelCase")]
    FixedSizeList {
        list_size: i32,
    },
    Struct,
    #[serde(rename_all = "camelCase")]
    Map {
        #[serde(default)]
        keys_sorted: bool,
    },
    Union {},
}

#[derive(Deserialize)]
#[serde(rename_all = "UPPERCASE")]
enum FloatPrecision {
    Half,
    Single,
    Double,
}

#[derive(Deserialize)]
#[serde(rename_all = "UPPERCASE")]
enum DateUnit {
    Day,
    Millisecond,
}

#[derive(Deserialize)]
#[serde(rename_all = "UPPERCASE")]
enum Unit {
    Second,
    Millisecond,
    Microsecond,
    Nanosecond,
}

impl From<Unit> for TimeUnit {
    fn from(unit: Unit) -> Self {
        match unit {
            Unit::Second => Self::Second,
            Unit::Millisecond => Self::Millisecond,
            Unit::Microsecond => Self::Microsecond,
            Unit::Nanosecond => Self::Nanosecond,
        }
    }
}

fn from_type_object(json: &FieldJson) -> Result<DataType, Error> {
    let invalid = |why: String| Error::invalid("invalid_type", format!("Arrow type object: {why}"));
    let object = TypeObject::deserialize(&json.r#type).map_err(|error| invalid(error.to_string()))?;
    let children: Vec<FieldRef> =
        json.children.iter().map(|child| from_json(child).map(Arc::new)).collect::<Result<_, _>>()?;
    let wanted = match object {
        TypeObject::List | TypeObject::LargeList | TypeObject::FixedSizeList { .. } => Some(1),
        TypeObject::Map { .. } => Some(1),
        TypeObject::Struct | TypeObject::Union {} => None,
        _ => Some(0),
    };
    if let Some(wanted) = wanted.filter(|wanted| *wanted != children.len()) {
        return Err(invalid(format!("needs {wanted} `children`, has {}", children.len())));
    }
    arrow_type(object, children).ok_or_else(|| invalid("no such width".to_owned()))
}

/// The Arrow type of a type object; `None` where Arrow has none of that width.
fn arrow_type(object: TypeObject, children: Vec<FieldRef>) -> Option<DataType> {
    let child = || children.first().cloned();
    Some(match object {
        TypeObject::Null => DataType::Null,
        TypeObject::Bool => DataType::Boolean,
        TypeObject::Int { bit_width, is_signed } => return integer(bit_width, is_signed),
        TypeObject::FloatingPoint { precision: FloatPrecision::Half } => DataType::Float16,
        TypeObject::FloatingPoint { precision: FloatPrecision::Single } => DataType::Float32,
        TypeObject::FloatingPoint { precision: FloatPrecision::Double } => DataType::Float64,
        TypeObject::Utf8 => DataType::Utf8,
        TypeObject::LargeUtf8 => DataType::LargeUtf8,
        TypeObject::Utf8View => DataType::Utf8View,
        TypeObject::Binary => DataType::Binary,
        TypeObject::LargeBinary => DataType::LargeBinary,
        TypeObject::BinaryView => DataType::BinaryView,
        TypeObject::FixedSizeBinary { byte_width } => DataType::FixedSizeBinary(byte_width),
        TypeObject::Decimal { precision, scale, bit_width } => match bit_width.unwrap_or(128) {
            32 => DataType::Decimal32(precision, scale),
            64 => DataType::Decimal64(precision, scale),
            128 => DataType::Decimal128(precision, scale),
            256 => DataType::Decimal256(precision, scale),
            _ => return None,
        },
        TypeObject::Date { unit: DateUnit::Day } => DataType::Date32,
        TypeObject::Date { unit: DateUnit::Millisecond } => DataType::Date64,
        TypeObject::Time {} => DataType::Time64(TimeUnit::Microsecond),
        TypeObject::Timestamp { unit, timezone } => {
            DataType::Timestamp(unit.into(), timezone.map(|zone| zone.into()))
        }
        TypeObject::Duration {} => DataType::Duration(TimeUnit::Microsecond),
        TypeObject::Interval {} => DataType::Interval(IntervalUnit::MonthDayNano),
        TypeObject::List => DataType::List(child()?),
        TypeObject::LargeList => DataType::LargeList(child()?),
        TypeObject::FixedSizeList { list_size } => DataType::FixedSizeList(child()?, list_size),
        TypeObject::Struct => DataType::Struct(children.into()),
        TypeObject::Map { keys_sorted } => DataType::Map(child()?, keys_sorted),
        TypeObject::Union {} => DataType::Union([].into_iter().collect(), UnionMode::Sparse),
    })
}

fn integer(bit_width: u8, is_signed: bool) -> Option<DataType> {
    Some(match (bit_width, is_signed) {
        (8, true) => DataType::Int8,
        (16, true) => DataType::Int16,
        (32, true) => DataType::Int32,
        (64, true) => DataType::Int64,
        (8, false) => DataType::UInt8,
        (16, false) => DataType::UInt16,
        (32, false) => DataType::UInt32,
        (64, false) => DataType::UInt64,
        _ => return None,
    })
}

/// A column as a table takes it; see `TableSpec::normalise`.
pub(super) fn normalise(field: &Field) -> Result<Field, Error> {
    normalise_field(field, field.name(), field.name(), 1)
}

fn normalise_field(field: &Field, name: &str, path: &str, depth: usize) -> Result<Field, Error> {
    if depth > NESTING_MAX {
        let why = format!("column {}: nested deeper than {NESTING_MAX}; flatten it", cut(path));
        return Err(Error::invalid("invalid_schema", why).at_column(path));
    }
    let data_type = normalise_type(field.data_type(), path, depth)?;
    Ok(Field::new(name, data_type, field.is_nullable()))
}

fn normalise_type(data_type: &DataType, path: &str, depth: usize) -> Result<DataType, Error> {
    let refused = |advice: &str| {
        let why = format!("column {}: a table cannot hold Arrow's {data_type}: {advice}", cut(path));
        Err(Error::invalid("unsupported_type", why).at_column(path))
    };
    Ok(match data_type {
        DataType::Boolean
        | DataType::Int8
        | DataType::Int16
        | DataType::Int32
        | DataType::Int64
        | DataType::Float32
        | DataType::Float64
        | DataType::Utf8
        | DataType::Binary
        | DataType::Date32 => data_type.clone(),
        DataType::UInt8 => DataType::Int16,
        DataType::UInt16 => DataType::Int32,
        DataType::UInt32 => DataType::Int64,
        DataType::UInt64 => DataType::Decimal128(20, 0),
        DataType::Float16 => DataType::Float32,
        DataType::LargeUtf8 | DataType::Utf8View => DataType::Utf8,
        DataType::LargeBinary | DataType::BinaryView => DataType::Binary,
        DataType::FixedSizeBinary(1..) => DataType::Binary,
        DataType::Date64 => DataType::Date32,
        DataType::Timestamp(_, None) => DataType::Timestamp(TimeUnit::Microsecond, None),
        DataType::Timestamp(_, Some(_)) => timestamp_utc(),
        DataType::Decimal32(precision, scale)
        | DataType::Decimal64(precision, scale)
        | DataType::Decimal128(precision, scale)
        | DataType::Decimal256(precision, scale) => match (*precision, *scale) {
            (precision @ 1..=DECIMAL_PRECISION_MAX, scale @ 0..) if scale.cast_unsigned() <= precision => {
                DataType::Decimal128(precision, scale)
            }
            _ => return refused("send a decimal(p,s) with 1 <= p <= 38 and 0 <= s <= p"),
        },
        DataType::Dictionary(_, value) if value.is_nested() => return refused("send the values themselves"),
        DataType::Dictionary(_, value) => return normalise_type(value, path, depth),
        DataType::List(element) | DataType::LargeList(element) | DataType::FixedSizeList(element, 1..) => {
            let element = normalise_field(element, LIST_ELEMENT, &format!("{path}[]"), depth + 1)?;
            DataType::List(Arc::new(element))
        }
        DataType::Struct(fields) if fields.is_empty() => return refused("a struct needs at least one field"),
        DataType::Struct(fields) => DataType::Struct(normalise_fields(fields, path, depth)?),
        DataType::Map(entries, _) => return normalise_map(entries, path, depth),
        DataType::Time32(_) | DataType::Time64(_) => return refused("send a timestamp, or text"),
        DataType::Duration(_) | DataType::Interval(_) => {
            return refused("send an int64, with its unit in the column's name");
        }
        DataType::Null => {
            return refused("leave the column out, or give it the type that its values will have");
        }
        _ => return refused("send one of the types in Sluice's list (README, types)"),
    })
}

fn normalise_fields(fields: &Fields, path: &str, depth: usize) -> Result<Fields, Error> {
    let below = |field: &FieldRef| {
        normalise_field(field, field.name(), &format!("{path}.{}", field.name()), depth + 1)
    };
    fields.iter().map(below).collect()
}

fn normalise_map(entries: &Field, path: &str, depth: usize) -> Result<DataType, Error> {
    let refused = |why: &str| {
        let why = format!("column {}: {why}", cut(path));
        Err(Error::invalid("unsupported_type", why).at_column(path))
    };
    let DataType::Struct(fields) = entries.data_type() else {
        return refused("a map's entries are a struct");
    };
    let [key, value] = &fields[..] else { return refused("a map's entries have a key and a value") };
    if normalise_type(key.data_type(), path, depth)? != DataType::Utf8 {
        return refused("the keys of a map must be text: convert them, or send a list of structs");
    }
    let value = normalise_field(value, MAP_VALUE, &format!("{path}{{}}"), depth + 1)?;
    Ok(map(value.data_type().clone(), value.is_nullable()))
}
