//! A table's schema from its first records.
//!
//! *Owns*: which type fits all values of a column.
//! *Does not own*: whether the columns make a table (`sluice_shared::table::TableSpec`).
//!
//! All columns are nullable, in the order in which they first appear. Integers become int64, or float64 where one has
//! more than 64 bits; numbers of both kinds float64; text becomes a timestamp or a date where all of it is one; what
//! was only ever null, or an empty array's element, becomes string. Other mixtures are an error: a guess would
//! refuse half of the records that come later.

use std::collections::HashMap;
use std::sync::Arc;

use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use simd_json::{Node, StaticNode};
use sluice_shared::error::Error;
use sluice_shared::frame::lines;
use sluice_shared::table::{COLUMNS_MAX, FIELDS_MAX, NESTING_MAX, types};

use super::fault::Fault;
use super::tape::{Record, TapeParser};
use super::text::{self, Zone};
use crate::table::batch::ReasonCode;

/// What the values of a column have been so far.
#[derive(Debug, Default)]
enum Seen {
    #[default]
    Nothing,
    Bool,
    Int,
    Float,
    Date,
    Timestamp,
    Text,
    List(Box<Seen>),
    Struct(Shape),
}

/// Fields in the order in which they appeared.
#[derive(Debug, Default)]
struct Shape {
    places: HashMap<String, usize>,
    fields: Vec<(String, Seen)>,
}

/// The schema that fits all records of an NDJSON payload. Records that are no JSON objects are passed over: they are
/// refused when they are decoded.
///
/// # Errors
/// `Invalid` (`cannot_infer`): no usable record, a column of several types (names both), an object without fields,
/// too many columns, too deep nesting.
pub fn infer(payload: &[u8]) -> Result<SchemaRef, Error> {
    let mut parser = TapeParser::new();
    let mut shape = Shape::default();
    let mut conflict = None;
    for (place, text) in lines(payload).enumerate() {
        let read = parser.parse(text, |record| {
            if let Node::Object { .. } = record.node(0)
                && let Err(fault) = shape.see(record, 0, 1)
            {
                conflict = Some(fault);
            }
            Ok(())
        });
        // Not JSON: its own refusal tells so.
        let _ = read;
        if let Some(fault) = conflict.take() {
            return Err(cannot_infer(fault, Some(place + 1)));
        }
    }
    if shape.fields.is_empty() {
        let why = "no record is a JSON object with a field: send one, or create the table with a schema";
        return Err(Error::invalid("cannot_infer", why));
    }
    let fields = shape.fields().map_err(|fault| cannot_infer(fault, None))?;
    Ok(Arc::new(Schema::new(fields)))
}

/// `record` is the one that showed it, counted from 1.
fn cannot_infer(fault: Fault, record: Option<usize>) -> Error {
    let reason = fault.into_reason();
    let column = reason.column.unwrap_or_default();
    let record = record.map_or_else(String::new, |record| format!(" (seen in record {record})"));
    let why = format!(
        "cannot infer a schema: column {column:?}: {}{record}; create the table with a schema",
        reason.message
    );
    Error::invalid("cannot_infer", why).at_column(column)
}

impl Shape {
    fn see(&mut self, record: &mut Record<'_>, at: usize, depth: usize) -> Result<(), Fault> {
        let Node::Object { len, .. } = record.node(at) else { return Ok(()) };
        let mut key_at = at + 1;
        for _ in 0..len {
            let key = record.key(key_at);
            let place = self.place(key, depth)?;
            self.fields[place].1.see(record, key_at + 1, depth).map_err(|fault| fault.within(key))?;
            key_at = record.after(key_at + 1);
        }
        Ok(())
    }

    fn place(&mut self, key: &str, depth: usize) -> Result<usize, Fault> {
        if let Some(place) = self.places.get(key) {
            return Ok(*place);
        }
        let max = if depth == 1 { COLUMNS_MAX } else { FIELDS_MAX };
        if self.fields.len() == max {
            return Err(Fault::new(ReasonCode::CannotInfer, format!("more than {max} fields")));
        }
        self.places.insert(key.to_owned(), self.fields.len());
        self.fields.push((key.to_owned(), Seen::Nothing));
        Ok(self.fields.len() - 1)
    }

    fn fields(self) -> Result<Vec<Field>, Fault> {
        let field = |(name, seen): (String, Seen)| {
            let data_type = seen.data_type().map_err(|fault| fault.within(&name))?;
            Ok(Field::new(name, data_type, true))
        };
        self.fields.into_iter().map(field).collect()
    }
}

impl Seen {
    fn see(&mut self, record: &mut Record<'_>, at: usize, depth: usize) -> Result<(), Fault> {
        if depth > NESTING_MAX {
            return Err(Fault::new(ReasonCode::CannotInfer, format!("nested deeper than {NESTING_MAX}")));
        }
        match record.node(at) {
            Node::Static(StaticNode::Null) => Ok(()),
            Node::Static(StaticNode::Bool(_)) => self.join(Self::Bool),
            Node::Static(StaticNode::I64(_)) => self.join(Self::Int),
            Node::Static(StaticNode::U64(value)) if i64::try_from(value).is_ok() => self.join(Self::Int),
            Node::Static(_) => self.join(Self::Float),
            Node::String(text) => self.join(kind_of(text)),
            Node::Array { len, .. } => {
                self.join(Self::List(Box::default()))?;
                let Self::List(element) = self else { return Ok(()) };
                let mut element_at = at + 1;
                for place in 0..len {
                    element.see(record, element_at, depth + 1).map_err(|fault| fault.at_element(place))?;
                    element_at = record.after(element_at);
                }
                Ok(())
            }
            Node::Object { .. } => {
                self.join(Self::Struct(Shape::default()))?;
                let Self::Struct(shape) = self else { return Ok(()) };
                shape.see(record, at, depth + 1)
            }
        }
    }

    /// Widens to what also fits a value of this kind.
    fn join(&mut self, other: Self) -> Result<(), Fault> {
        use Seen::{Bool, Date, Float, Int, List, Nothing, Struct, Text, Timestamp};
        match (&*self, &other) {
            (Bool, Bool) | (Int, Int) | (Float, Int | Float) | (Text, Text | Date | Timestamp) => Ok(()),
            (Date, Date) | (Timestamp, Timestamp) | (List(_), List(_)) | (Struct(_), Struct(_)) => Ok(()),
            (Nothing, _) | (Int, Float) => {
                *self = other;
                Ok(())
            }
            (Date | Timestamp, Text | Date | Timestamp) => {
                *self = Text;
                Ok(())
            }
            _ => Err(Fault::new(
                ReasonCode::CannotInfer,
                format!("both {} and {} values", self.word(), other.word()),
            )),
        }
    }

    fn word(&self) -> &'static str {
        match self {
            Self::Nothing => "null",
            Self::Bool => "bool",
            Self::Int => "int64",
            Self::Float => "float64",
            Self::Date | Self::Timestamp | Self::Text => "string",
            Self::List(_) => "list",
            Self::Struct(_) => "struct",
        }
    }

    fn data_type(self) -> Result<DataType, Fault> {
        Ok(match self {
            Self::Nothing | Self::Text => DataType::Utf8,
            Self::Bool => DataType::Boolean,
            Self::Int => DataType::Int64,
            Self::Float => DataType::Float64,
            Self::Date => DataType::Date32,
            Self::Timestamp => types::timestamp_utc(),
            Self::List(element) => types::list(element.data_type()?, true),
            Self::Struct(shape) if shape.fields.is_empty() => {
                return Err(Fault::new(ReasonCode::CannotInfer, "an object without fields in all records"));
            }
            Self::Struct(shape) => DataType::Struct(shape.fields()?.into()),
        })
    }
}

fn kind_of(text: &str) -> Seen {
    if text::date(text).is_ok() {
        Seen::Date
    } else if text.as_bytes().get(10) != Some(&b' ') && text::timestamp(text, Zone::Required).is_ok() {
        Seen::Timestamp
    } else {
        Seen::Text
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::json::JsonDecoder;
    use super::*;
    use sluice_shared::frame::UnknownFields;

    /// The inferred columns as `name type`, or the column that stops it.
    fn check(payload: &str, expected: Result<&str, &str>) {
        let inferred = infer(payload.as_bytes());
        let got = match &inferred {
            Ok(schema) => {
                assert!(schema.fields().iter().all(|field| field.is_nullable()));
                let column =
                    |field: &Arc<Field>| format!("{} {}", field.name(), types::text(field.data_type()));
                Ok(schema.fields().iter().map(column).collect::<Vec<_>>().join("; "))
            }
            Err(error) => {
                assert_eq!(error.code, "cannot_infer", "{error}");
                Err(error.column.clone().unwrap_or_default())
            }
        };
        assert_eq!(got, expected.map(str::to_owned).map_err(str::to_owned), "{payload}: {inferred:?}");
    }

    #[test]
    fn types_fit_all_values() {
        check(r#"{"b":true,"a":1}"#, Ok("b bool; a int64"));
        check("{\"a\":1}\n{\"a\":null,\"c\":\"x\"}\n{\"a\":2.5}", Ok("a float64; c string"));
        check("{\"a\":9223372036854775808}", Ok("a float64"));
        check("{\"a\":9223372036854775807}", Ok("a int64"));
        check("{\"a\":null}", Ok("a string"));
        check("{\"a\":\"2013-01-01\"}\n{\"a\":null}", Ok("a date"));
        check("{\"a\":\"2013-01-01\"}\n{\"a\":\"soon\"}", Ok("a string"));
        check("{\"a\":\"2013-01-01T00:00:00Z\"}", Ok("a timestamp"));
        check("{\"a\":\"2013-01-01T00:00:00Z\"}\n{\"a\":\"2013-01-01\"}", Ok("a string"));
        check("{\"a\":\"2013-01-01T00:00:00\"}", Ok("a string"));
        check(r#"{"a":[1,null,2.5],"b":[],"c":{"d":[{"e":1}]}}"#, {
            Ok("a list<float64>; b list<string>; c struct<d: list<struct<e: int64>>>")
        });
        check("{\"c\":{\"d\":1}}\nnot json\n[1]\n{\"c\":{\"e\":\"x\"}}", Ok("c struct<d: int64, e: string>"));
    }

    #[test]
    fn the_record_that_fits_no_type_is_counted() {
        let error = infer(b"{\"a\":1.5}\n\n{\"a\":2}\n{\"a\":\"x\"}").expect_err("mixed").to_string();
        assert!(error.contains("column \"a\": both float64 and string values (seen in record 3)"), "{error}");
    }

    #[test]
    fn what_fits_nothing_is_named() {
        check("{\"a\":1}\n{\"a\":\"x\"}", Err("a"));
        check("{\"a\":{\"b\":[1]}}\n{\"a\":{\"b\":[true]}}", Err("a.b[0]"));
        check("{\"a\":[1]}\n{\"a\":{}}", Err("a"));
        check("{\"a\":{}}", Err("a"));
        check("", Err(""));
        check("{}\n[]\nx", Err(""));
        let deep = format!("{{\"a\":{}1{}}}", "[".repeat(40), "]".repeat(40));
        assert!(infer(deep.as_bytes()).is_err());
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(payload: Vec<u8>) {
            let _ = infer(&payload);
        }

        #[test]
        fn records_fit_the_schema_inferred_from_them(
            records in prop::collection::vec(("[a-c]", prop::option::of(any::<i64>()), any::<bool>(), "\\PC{0,5}"), 1..8),
        ) {
            let line = |(name, n, b, s): &(String, Option<i64>, bool, String)| {
                serde_json::json!({"n": n, "b": b, "s": s, "o": {name: n}, "l": [n, 1.5]}).to_string()
            };
            let payload = records.iter().map(line).collect::<Vec<_>>().join("\n");
            let schema = infer(payload.as_bytes()).expect("one type per column");
            let mut decoder = JsonDecoder::new(schema, 10_000).expect("a table's schema");
            let decoded = decoder.append(payload.as_bytes(), UnknownFields::Refuse, &mut |_, reason| panic!("{reason:?}"));
            prop_assert_eq!(decoded.accepted, records.len());
        }
    }
}
