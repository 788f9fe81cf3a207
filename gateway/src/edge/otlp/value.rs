//! OTLP's `AnyValue` as text.
//!
//! *Owns*: which value becomes which text.
//! *Does not own*: where it goes (`columns`).
//!
//! Text is itself and bytes are base64. All else is JSON: `true`, `7`, `1.5`, `["a",1]`, `{"a":1}`; in there text has its
//! quotes, bytes are base64 in quotes, and so are the numbers that JSON does not have (`"NaN"`). What is unset is no value.

use std::borrow::Cow;
use std::fmt::Write as _;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use sluice_shared::error::Error;
use sluice_shared::protobuf::{Reader, WireType};

/// Lists and maps in one another.
const DEPTH_MAX: usize = 32;

/// What an `AnyValue` holds.
enum Value<'a> {
    Text(&'a str),
    Bool(bool),
    Int(i64),
    Double(f64),
    List(Reader<'a>),
    Map(Reader<'a>),
    Bytes(&'a [u8]),
}

/// Text of the wire.
pub(super) fn utf8(bytes: &[u8]) -> Result<&str, Error> {
    std::str::from_utf8(bytes).map_err(|error| {
        let shown: String = String::from_utf8_lossy(bytes).chars().take(40).collect();
        Error::invalid("not_utf8", format!("text that is not UTF-8: {error}: {shown:?}"))
    })
}

/// A value as text; None where it is unset.
pub(super) fn text(value: Reader<'_>) -> Result<Option<Cow<'_, str>>, Error> {
    Ok(Some(match read(value)? {
        None => return Ok(None),
        Some(Value::Text(text)) => Cow::Borrowed(text),
        Some(Value::Bytes(bytes)) => Cow::Owned(BASE64_STANDARD.encode(bytes)),
        Some(Value::Double(double)) if !double.is_finite() => Cow::Borrowed(no_json_number(double)),
        Some(value) => {
            let mut json = String::new();
            write(&mut json, value, 1)?;
            Cow::Owned(json)
        }
    }))
}

/// A `KeyValue`: its key, and its value where it has one.
pub(super) fn key_value<'a>(mut pair: Reader<'a>) -> Result<(&'a str, Option<Reader<'a>>), Error> {
    let (mut key, mut value) = ("", None);
    while !pair.is_done() {
        let tag = pair.tag()?;
        match (tag.number, tag.wire) {
            (1, WireType::Delimited) => key = utf8(pair.delimited()?)?,
            (2, WireType::Delimited) => value = Some(pair.nested()?),
            _ => pair.skip(tag)?,
        }
    }
    Ok((key, value))
}

fn read(mut any: Reader<'_>) -> Result<Option<Value<'_>>, Error> {
    let mut value = None;
    while !any.is_done() {
        let tag = any.tag()?;
        value = Some(match (tag.number, tag.wire) {
            (1, WireType::Delimited) => Value::Text(utf8(any.delimited()?)?),
            (2, WireType::Varint) => Value::Bool(any.varint()? != 0),
            (3, WireType::Varint) => Value::Int(any.varint()?.cast_signed()),
            (4, WireType::Fixed64) => Value::Double(f64::from_le_bytes(any.fixed64()?)),
            (5, WireType::Delimited) => Value::List(any.nested()?),
            (6, WireType::Delimited) => Value::Map(any.nested()?),
            (7, WireType::Delimited) => Value::Bytes(any.delimited()?),
            _ => {
                any.skip(tag)?;
                continue;
            }
        });
    }
    Ok(value)
}

fn write(json: &mut String, value: Value<'_>, depth: usize) -> Result<(), Error> {
    if depth > DEPTH_MAX {
        let message = format!("a value with lists and maps nested deeper than {DEPTH_MAX}: flatten it");
        return Err(Error::invalid("nested_too_deep", message));
    }
    match value {
        Value::Text(text) => quote(json, text),
        Value::Bool(value) => json.push_str(if value { "true" } else { "false" }),
        Value::Int(value) => put(json, format_args!("{value}")),
        Value::Double(value) if value.is_finite() => put(json, format_args!("{value:?}")),
        Value::Double(value) => put(json, format_args!("\"{}\"", no_json_number(value))),
        Value::Bytes(bytes) => put(json, format_args!("\"{}\"", BASE64_STANDARD.encode(bytes))),
        Value::List(list) => write_list(json, list, depth)?,
        Value::Map(map) => write_map(json, map, depth)?,
    }
    Ok(())
}

fn write_list(json: &mut String, mut list: Reader<'_>, depth: usize) -> Result<(), Error> {
    json.push('[');
    let mut comma = "";
    while !list.is_done() {
        let tag = list.tag()?;
        if (tag.number, tag.wire) != (1, WireType::Delimited) {
            list.skip(tag)?;
            continue;
        }
        json.push_str(std::mem::replace(&mut comma, ","));
        write_or_null(json, Some(list.nested()?), depth)?;
    }
    json.push(']');
    Ok(())
}

fn write_map(json: &mut String, mut map: Reader<'_>, depth: usize) -> Result<(), Error> {
    json.push('{');
    let mut comma = "";
    while !map.is_done() {
        let tag = map.tag()?;
        if (tag.number, tag.wire) != (1, WireType::Delimited) {
            map.skip(tag)?;
            continue;
        }
        let (key, value) = key_value(map.nested()?)?;
        json.push_str(std::mem::replace(&mut comma, ","));
        quote(json, key);
        json.push(':');
        write_or_null(json, value, depth)?;
    }
    json.push('}');
    Ok(())
}

fn write_or_null(json: &mut String, value: Option<Reader<'_>>, depth: usize) -> Result<(), Error> {
    match value.map(read).transpose()?.flatten() {
        Some(value) => write(json, value, depth + 1),
        None => {
            json.push_str("null");
            Ok(())
        }
    }
}

fn quote(json: &mut String, text: &str) {
    json.push_str(&serde_json::to_string(text).expect("text is always JSON"));
}

fn put(json: &mut String, text: std::fmt::Arguments<'_>) {
    json.write_fmt(text).expect("writing to a string cannot fail");
}

fn no_json_number(value: f64) -> &'static str {
    if value.is_nan() {
        "NaN"
    } else if value > 0.0 {
        "Infinity"
    } else {
        "-Infinity"
    }
}
