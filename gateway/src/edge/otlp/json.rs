//! OTLP's JSON to its protobuf, so that both forms take one way from there.
//!
//! *Owns*: the names of fields, how JSON has their values. A core.
//! *Does not own*: what they mean (`flat` and the columns).
//!
//! The text is translated as it is read; no tree of it is built. As OTLP has it: names in lowerCamelCase, ids in hex,
//! 64-bit integers as text or numbers, enums as numbers, bytes in base64, `null` for what is absent, and fields that are
//! not known are passed over.

use std::fmt;

use base64::Engine as _;
use base64::alphabet::{STANDARD, URL_SAFE};
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use serde::de::{DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};
use sluice_shared::error::Error;

use super::Signal;
use super::wire::{FIXED32, FIXED64, VARINT, begin_message, end_message, put_bytes, put_tag, put_varint};

const LENIENT: GeneralPurposeConfig =
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent);
/// Integers that a 64-bit float holds exactly.
const EXACT_MAX: f64 = 9_007_199_254_740_992.0;

/// How a field's value lies in JSON and on the wire.
#[derive(Debug, Clone, Copy)]
enum Kind {
    Bool,
    /// An integer of any length, or an enum's number.
    Int,
    /// An integer whose sign goes into its last bit.
    Signed,
    Fixed32,
    Fixed64,
    Double,
    Text,
    /// An id.
    Hex,
    Base64,
    Message(&'static [Field]),
}

/// A field of a message.
#[derive(Debug, Clone, Copy)]
struct Field {
    name: &'static str,
    number: u32,
    kind: Kind,
    /// An array of values.
    many: bool,
}

const fn one(name: &'static str, number: u32, kind: Kind) -> Field {
    Field { name, number, kind, many: false }
}

const fn many(name: &'static str, number: u32, kind: Kind) -> Field {
    Field { name, number, kind, many: true }
}

static ANY_VALUE: [Field; 7] = [
    one("stringValue", 1, Kind::Text),
    one("boolValue", 2, Kind::Bool),
    one("intValue", 3, Kind::Int),
    one("doubleValue", 4, Kind::Double),
    one("arrayValue", 5, Kind::Message(&ARRAY)),
    one("kvlistValue", 6, Kind::Message(&KEY_VALUES)),
    one("bytesValue", 7, Kind::Base64),
];
static ARRAY: [Field; 1] = [many("values", 1, Kind::Message(&ANY_VALUE))];
static KEY_VALUES: [Field; 1] = [many("values", 1, Kind::Message(&KEY_VALUE))];
static KEY_VALUE: [Field; 2] = [one("key", 1, Kind::Text), one("value", 2, Kind::Message(&ANY_VALUE))];

static RESOURCE: [Field; 2] =
    [many("attributes", 1, Kind::Message(&KEY_VALUE)), one("droppedAttributesCount", 2, Kind::Int)];
static SCOPE: [Field; 4] = [
    one("name", 1, Kind::Text),
    one("version", 2, Kind::Text),
    many("attributes", 3, Kind::Message(&KEY_VALUE)),
    one("droppedAttributesCount", 4, Kind::Int),
];

static LOGS: [Field; 1] = [many("resourceLogs", 1, Kind::Message(&RESOURCE_LOGS))];
static RESOURCE_LOGS: [Field; 3] = [
    one("resource", 1, Kind::Message(&RESOURCE)),
    many("scopeLogs", 2, Kind::Message(&SCOPE_LOGS)),
    one("schemaUrl", 3, Kind::Text),
];
static SCOPE_LOGS: [Field; 3] = [
    one("scope", 1, Kind::Message(&SCOPE)),
    many("logRecords", 2, Kind::Message(&LOG_RECORD)),
    one("schemaUrl", 3, Kind::Text),
];
static LOG_RECORD: [Field; 11] = [
    one("timeUnixNano", 1, Kind::Fixed64),
    one("severityNumber", 2, Kind::Int),
    one("severityText", 3, Kind::Text),
    one("body", 5, Kind::Message(&ANY_VALUE)),
    many("attributes", 6, Kind::Message(&KEY_VALUE)),
    one("droppedAttributesCount", 7, Kind::Int),
    one("flags", 8, Kind::Fixed32),
    one("traceId", 9, Kind::Hex),
    one("spanId", 10, Kind::Hex),
    one("observedTimeUnixNano", 11, Kind::Fixed64),
    one("eventName", 12, Kind::Text),
];

static SPANS: [Field; 1] = [many("resourceSpans", 1, Kind::Message(&RESOURCE_SPANS))];
static RESOURCE_SPANS: [Field; 3] = [
    one("resource", 1, Kind::Message(&RESOURCE)),
    many("scopeSpans", 2, Kind::Message(&SCOPE_SPANS)),
    one("schemaUrl", 3, Kind::Text),
];
static SCOPE_SPANS: [Field; 3] = [
    one("scope", 1, Kind::Message(&SCOPE)),
    many("spans", 2, Kind::Message(&SPAN)),
    one("schemaUrl", 3, Kind::Text),
];
static SPAN: [Field; 16] = [
    one("traceId", 1, Kind::Hex),
    one("spanId", 2, Kind::Hex),
    one("traceState", 3, Kind::Text),
    one("parentSpanId", 4, Kind::Hex),
    one("name", 5, Kind::Text),
    one("kind", 6, Kind::Int),
    one("startTimeUnixNano", 7, Kind::Fixed64),
    one("endTimeUnixNano", 8, Kind::Fixed64),
    many("attributes", 9, Kind::Message(&KEY_VALUE)),
    one("droppedAttributesCount", 10, Kind::Int),
    many("events", 11, Kind::Message(&EVENT)),
    one("droppedEventsCount", 12, Kind::Int),
    many("links", 13, Kind::Message(&LINK)),
    one("droppedLinksCount", 14, Kind::Int),
    one("status", 15, Kind::Message(&STATUS)),
    one("flags", 16, Kind::Fixed32),
];
static EVENT: [Field; 4] = [
    one("timeUnixNano", 1, Kind::Fixed64),
    one("name", 2, Kind::Text),
    many("attributes", 3, Kind::Message(&KEY_VALUE)),
    one("droppedAttributesCount", 4, Kind::Int),
];
static LINK: [Field; 6] = [
    one("traceId", 1, Kind::Hex),
    one("spanId", 2, Kind::Hex),
    one("traceState", 3, Kind::Text),
    many("attributes", 4, Kind::Message(&KEY_VALUE)),
    one("droppedAttributesCount", 5, Kind::Int),
    one("flags", 6, Kind::Fixed32),
];
static STATUS: [Field; 2] = [one("message", 2, Kind::Text), one("code", 3, Kind::Int)];

static METRICS: [Field; 1] = [many("resourceMetrics", 1, Kind::Message(&RESOURCE_METRICS))];
static RESOURCE_METRICS: [Field; 3] = [
    one("resource", 1, Kind::Message(&RESOURCE)),
    many("scopeMetrics", 2, Kind::Message(&SCOPE_METRICS)),
    one("schemaUrl", 3, Kind::Text),
];
static SCOPE_METRICS: [Field; 3] = [
    one("scope", 1, Kind::Message(&SCOPE)),
    many("metrics", 2, Kind::Message(&METRIC)),
    one("schemaUrl", 3, Kind::Text),
];
static METRIC: [Field; 9] = [
    one("name", 1, Kind::Text),
    one("description", 2, Kind::Text),
    one("unit", 3, Kind::Text),
    one("gauge", 5, Kind::Message(&GAUGE)),
    one("sum", 7, Kind::Message(&SUM)),
    one("histogram", 9, Kind::Message(&HISTOGRAM)),
    one("exponentialHistogram", 10, Kind::Message(&EXPONENTIAL_HISTOGRAM)),
    one("summary", 11, Kind::Message(&SUMMARY)),
    many("metadata", 12, Kind::Message(&KEY_VALUE)),
];
static GAUGE: [Field; 1] = [many("dataPoints", 1, Kind::Message(&NUMBER_POINT))];
static SUM: [Field; 3] = [
    many("dataPoints", 1, Kind::Message(&NUMBER_POINT)),
    one("aggregationTemporality", 2, Kind::Int),
    one("isMonotonic", 3, Kind::Bool),
];
static HISTOGRAM: [Field; 2] =
    [many("dataPoints", 1, Kind::Message(&HISTOGRAM_POINT)), one("aggregationTemporality", 2, Kind::Int)];
static EXPONENTIAL_HISTOGRAM: [Field; 2] =
    [many("dataPoints", 1, Kind::Message(&EXPONENTIAL_POINT)), one("aggregationTemporality", 2, Kind::Int)];
static SUMMARY: [Field; 1] = [many("dataPoints", 1, Kind::Message(&SUMMARY_POINT))];
static NUMBER_POINT: [Field; 7] = [
    one("startTimeUnixNano", 2, Kind::Fixed64),
    one("timeUnixNano", 3, Kind::Fixed64),
    one("asDouble", 4, Kind::Double),
    many("exemplars", 5, Kind::Message(&EXEMPLAR)),
    one("asInt", 6, Kind::Fixed64),
    many("attributes", 7, Kind::Message(&KEY_VALUE)),
    one("flags", 8, Kind::Int),
];
static HISTOGRAM_POINT: [Field; 11] = [
    one("startTimeUnixNano", 2, Kind::Fixed64),
    one("timeUnixNano", 3, Kind::Fixed64),
    one("count", 4, Kind::Fixed64),
    one("sum", 5, Kind::Double),
    many("bucketCounts", 6, Kind::Fixed64),
    many("explicitBounds", 7, Kind::Double),
    many("exemplars", 8, Kind::Message(&EXEMPLAR)),
    many("attributes", 9, Kind::Message(&KEY_VALUE)),
    one("flags", 10, Kind::Int),
    one("min", 11, Kind::Double),
    one("max", 12, Kind::Double),
];
static EXPONENTIAL_POINT: [Field; 14] = [
    many("attributes", 1, Kind::Message(&KEY_VALUE)),
    one("startTimeUnixNano", 2, Kind::Fixed64),
    one("timeUnixNano", 3, Kind::Fixed64),
    one("count", 4, Kind::Fixed64),
    one("sum", 5, Kind::Double),
    one("scale", 6, Kind::Signed),
    one("zeroCount", 7, Kind::Fixed64),
    one("positive", 8, Kind::Message(&BUCKETS)),
    one("negative", 9, Kind::Message(&BUCKETS)),
    one("flags", 10, Kind::Int),
    many("exemplars", 11, Kind::Message(&EXEMPLAR)),
    one("min", 12, Kind::Double),
    one("max", 13, Kind::Double),
    one("zeroThreshold", 14, Kind::Double),
];
static BUCKETS: [Field; 2] = [one("offset", 1, Kind::Signed), many("bucketCounts", 2, Kind::Int)];
static SUMMARY_POINT: [Field; 7] = [
    one("startTimeUnixNano", 2, Kind::Fixed64),
    one("timeUnixNano", 3, Kind::Fixed64),
    one("count", 4, Kind::Fixed64),
    one("sum", 5, Kind::Double),
    many("quantileValues", 6, Kind::Message(&QUANTILE)),
    many("attributes", 7, Kind::Message(&KEY_VALUE)),
    one("flags", 8, Kind::Int),
];
static QUANTILE: [Field; 2] = [one("quantile", 1, Kind::Double), one("value", 2, Kind::Double)];
static EXEMPLAR: [Field; 6] = [
    one("timeUnixNano", 2, Kind::Fixed64),
    one("asDouble", 3, Kind::Double),
    one("spanId", 4, Kind::Hex),
    one("traceId", 5, Kind::Hex),
    one("asInt", 6, Kind::Fixed64),
    many("filteredAttributes", 7, Kind::Message(&KEY_VALUE)),
];

/// A request in JSON as the same request in protobuf.
///
/// # Errors
/// `Invalid` (`malformed_json`): no JSON, or a field with a value that is not its own; where in the text.
pub(super) fn to_protobuf(signal: Signal, json: &[u8]) -> Result<Vec<u8>, Error> {
    let fields: &'static [Field] = match signal {
        Signal::Logs => &LOGS,
        Signal::Traces => &SPANS,
        Signal::Metrics => &METRICS,
    };
    let malformed = |error: serde_json::Error| {
        Error::invalid("malformed_json", format!("not an OTLP request in JSON: {error}"))
    };
    let mut out = Vec::with_capacity(json.len());
    let mut deserializer = serde_json::Deserializer::from_slice(json);
    let mut known = 0;
    let body = Body { fields, out: &mut out, known: &mut known };
    let unknown = deserializer.deserialize_map(body).map_err(malformed)?;
    deserializer.end().map_err(malformed)?;
    // Fields that are not known are passed over, but not a whole request: it was meant for another path, or is misspelt.
    match unknown {
        Some(unknown) if known == 0 => {
            let message = format!("the request has {unknown:?} and no {:?}: nothing to take", fields[0].name);
            Err(Error::invalid("nothing_known", message))
        }
        _ => Ok(out),
    }
}

/// The fields of one message, to its wire. Answers a name that is not known.
struct Body<'b> {
    fields: &'static [Field],
    out: &'b mut Vec<u8>,
    known: &'b mut usize,
}

impl<'de> Visitor<'de> for Body<'_> {
    type Value = Option<String>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Option<String>, A::Error> {
        let mut unknown = None;
        while let Some(field) = map.next_key_seed(Name(self.fields))? {
            match field {
                Ok(field) => {
                    *self.known += 1;
                    map.next_value_seed(FieldValue { field, out: &mut *self.out, in_list: false })?;
                }
                Err(name) => {
                    unknown = unknown.or(Some(name));
                    map.next_value::<IgnoredAny>()?;
                }
            }
        }
        Ok(unknown)
    }
}

/// A name among the fields of a message; the name again where it is not known.
struct Name(&'static [Field]);

impl<'de> DeserializeSeed<'de> for Name {
    type Value = Result<&'static Field, String>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for Name {
    type Value = Result<&'static Field, String>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a field's name")
    }

    fn visit_str<E>(self, name: &str) -> Result<Self::Value, E> {
        let field = self.0.iter().find(|field| field.name == name);
        Ok(field.ok_or_else(|| name.chars().take(100).collect()))
    }
}

/// A field's value, to the wire.
struct FieldValue<'b> {
    field: &'static Field,
    out: &'b mut Vec<u8>,
    in_list: bool,
}

impl<'de> DeserializeSeed<'de> for FieldValue<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl FieldValue<'_> {
    fn refuse<E: serde::de::Error>(&self, got: impl fmt::Display) -> E {
        let expected = match (self.field.kind, self.field.many && !self.in_list) {
            (_, true) => "an array",
            (Kind::Bool, _) => "true or false",
            (Kind::Int | Kind::Signed | Kind::Fixed32 | Kind::Fixed64, _) => "an integer",
            (Kind::Double, _) => "a number",
            (Kind::Text, _) => "text",
            (Kind::Hex, _) => "an id in hex",
            (Kind::Base64, _) => "base64",
            (Kind::Message(_), _) => "an object",
        };
        E::custom(format!("field {}: expected {expected}, got {got}", self.field.name))
    }

    /// An element where elements are wanted, a value where one is.
    fn check_place<E: serde::de::Error>(&self, got: impl fmt::Display) -> Result<(), E> {
        if self.field.many == self.in_list { Ok(()) } else { Err(self.refuse(got)) }
    }

    fn put_integer<E: serde::de::Error>(self, value: i128) -> Result<(), E> {
        self.check_place(value)?;
        let (number, out_of_range) = (self.field.number, |range: &str| {
            E::custom(format!("field {}: {value} is out of the range of {range}", self.field.name))
        });
        let signed = i64::try_from(value).map(i64::cast_unsigned);
        let word = signed.or_else(|_| u64::try_from(value)).map_err(|_| out_of_range("64 bits"))?;
        match self.field.kind {
            Kind::Int => {
                put_tag(self.out, number, VARINT);
                put_varint(self.out, word);
            }
            Kind::Signed => {
                let signed = i32::try_from(value).map_err(|_| out_of_range("32 bits"))?;
                put_tag(self.out, number, VARINT);
                put_varint(self.out, u64::from(((signed << 1) ^ (signed >> 31)).cast_unsigned()));
            }
            Kind::Fixed32 => {
                let word = u32::try_from(value).map_err(|_| out_of_range("32 bits"))?;
                put_tag(self.out, number, FIXED32);
                self.out.extend_from_slice(&word.to_le_bytes());
            }
            Kind::Fixed64 => {
                put_tag(self.out, number, FIXED64);
                self.out.extend_from_slice(&word.to_le_bytes());
            }
            _ => return Err(self.refuse(value)),
        }
        Ok(())
    }

    fn put_double<E: serde::de::Error>(self, value: f64) -> Result<(), E> {
        self.check_place(value)?;
        put_tag(self.out, self.field.number, FIXED64);
        self.out.extend_from_slice(&value.to_le_bytes());
        Ok(())
    }

    fn put_delimited<E: serde::de::Error>(self, value: &[u8]) -> Result<(), E> {
        self.check_place("text")?;
        put_bytes(self.out, self.field.number, value);
        Ok(())
    }
}

impl<'de> Visitor<'de> for FieldValue<'_> {
    type Value = ();

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "a value of field {}", self.field.name)
    }

    fn visit_unit<E: serde::de::Error>(self) -> Result<(), E> {
        if self.in_list { Err(self.refuse("null")) } else { Ok(()) }
    }

    fn visit_bool<E: serde::de::Error>(self, value: bool) -> Result<(), E> {
        if !matches!(self.field.kind, Kind::Bool) {
            return Err(self.refuse(value));
        }
        self.check_place(value)?;
        put_tag(self.out, self.field.number, VARINT);
        put_varint(self.out, u64::from(value));
        Ok(())
    }

    fn visit_u64<E: serde::de::Error>(self, value: u64) -> Result<(), E> {
        match self.field.kind {
            Kind::Double => self.put_double(value as f64),
            _ => self.put_integer(i128::from(value)),
        }
    }

    fn visit_i64<E: serde::de::Error>(self, value: i64) -> Result<(), E> {
        match self.field.kind {
            Kind::Double => self.put_double(value as f64),
            _ => self.put_integer(i128::from(value)),
        }
    }

    fn visit_f64<E: serde::de::Error>(self, value: f64) -> Result<(), E> {
        match self.field.kind {
            Kind::Double => self.put_double(value),
            // As protobuf's JSON has it: 1e3 and 5.0 are integers too.
            _ if value.fract() == 0.0 && value.abs() <= EXACT_MAX => self.put_integer(value as i128),
            _ => Err(self.refuse(value)),
        }
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<(), E> {
        let shown = || format!("{:?}", text.chars().take(40).collect::<String>());
        match self.field.kind {
            Kind::Text => self.put_delimited(text.as_bytes()),
            Kind::Hex => match from_hex(text) {
                Some(id) => self.put_delimited(&id),
                None => Err(self.refuse(shown())),
            },
            Kind::Base64 => match from_base64(text) {
                Some(bytes) => self.put_delimited(&bytes),
                None => Err(self.refuse(shown())),
            },
            // `parse` takes `NaN`, `Infinity` and `-Infinity` as protobuf's JSON writes them.
            Kind::Double => match text.parse() {
                Ok(value) => self.put_double(value),
                Err(_) => Err(self.refuse(shown())),
            },
            Kind::Int | Kind::Signed | Kind::Fixed32 | Kind::Fixed64 => match text.parse::<i128>() {
                Ok(value) => self.put_integer(value),
                Err(_) => Err(self.refuse(shown())),
            },
            Kind::Bool | Kind::Message(_) => Err(self.refuse(shown())),
        }
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<(), A::Error> {
        if !self.field.many || self.in_list {
            return Err(self.refuse("an array"));
        }
        let Self { field, out, .. } = self;
        while list.next_element_seed(FieldValue { field, out: &mut *out, in_list: true })?.is_some() {}
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<(), A::Error> {
        let Kind::Message(fields) = self.field.kind else { return Err(self.refuse("an object")) };
        self.check_place::<A::Error>("an object")?;
        let start = begin_message(self.out, self.field.number);
        Body { fields, out: &mut *self.out, known: &mut 0 }.visit_map(map)?;
        end_message(self.out, start);
        if u32::try_from(self.out.len()).is_err() {
            return Err(A::Error::custom("a request of more than 4 GiB"));
        }
        Ok(())
    }
}

fn from_hex(text: &str) -> Option<Vec<u8>> {
    let digit = |byte: u8| char::from(byte).to_digit(16).map(|digit| digit as u8);
    let pairs = text.as_bytes().chunks(2);
    pairs.map(|pair| Some(digit(pair[0])? << 4 | digit(*pair.get(1)?)?)).collect()
}

fn from_base64(text: &str) -> Option<Vec<u8>> {
    let alphabet = if text.contains(['-', '_']) { &URL_SAFE } else { &STANDARD };
    GeneralPurpose::new(alphabet, LENIENT).decode(text).ok()
}
