//! An Avro schema: its types by name, and the columns that it would make.
//!
//! *Owns*: reading a schema's JSON, names and namespaces, the map of Avro types to Arrow's.
//! *Does not own*: how the values go into a table that there is (`plan`).
//!
//! Aliases and defaults are for readers of files and play no part: columns and fields are matched by name, and what is
//! written is what is there.

use std::collections::HashMap;
use std::sync::Arc;

use arrow::datatypes::{DataType, Field, Schema, TimeUnit};
use serde_json::Value;
use sluice_shared::error::Error;
use sluice_shared::table::{FIELDS_MAX, NESTING_MAX, types};

use super::super::fault::{cut, cut_path};

/// Most types of a schema, each mention counted.
const TYPES_MAX: usize = 20_000;

/// Longest name of a type, with its namespace: what is within has the namespace too.
const NAME_BYTES_MAX: usize = 1_024;

/// Place of a type in its schema.
pub(super) type TypeId = usize;

#[derive(Debug, Clone)]
pub(super) enum Type {
    Null,
    Boolean,
    Int(Unit),
    Long(Unit),
    Float,
    Double,
    Bytes(Option<u32>),
    /// Its bytes, and the scale of a decimal.
    Fixed(usize, Option<u32>),
    Text,
    Enum(Arc<[Box<str>]>),
    Array(TypeId),
    Map(TypeId),
    Union(Vec<TypeId>),
    Record(Vec<(String, TypeId)>),
}

/// What a number counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Unit {
    None,
    Days,
    /// A time: how many of it a microsecond has, or how many microseconds it has, and whether it is of UTC.
    Millis(bool),
    Micros(bool),
    Nanos(bool),
}

/// A schema's types; the first is its own.
pub(super) struct Types {
    types: Vec<Type>,
    names: HashMap<String, TypeId>,
}

impl Types {
    /// Reads a schema: a record's.
    ///
    /// # Errors
    /// `Invalid` (`invalid_avro_schema`).
    pub(super) fn read(json: &[u8]) -> Result<Self, Error> {
        let value: Value = serde_json::from_slice(json).map_err(|error| invalid(&error.to_string()))?;
        let mut types = Self { types: Vec::new(), names: HashMap::new() };
        let root = types.add(&value, "")?;
        match &types.types[root] {
            Type::Record(_) if root == 0 => Ok(types),
            _ => Err(invalid("the outermost type is no record")),
        }
    }

    pub(super) fn of(&self, id: TypeId) -> &Type {
        &self.types[id]
    }

    /// Its fields.
    pub(super) fn root(&self) -> &[(String, TypeId)] {
        match &self.types[0] {
            Type::Record(fields) => fields,
            _ => unreachable!("`read` takes only a record"),
        }
    }

    fn push(&mut self, of: Type) -> Result<TypeId, Error> {
        if self.types.len() == TYPES_MAX {
            return Err(invalid(&format!("more than {TYPES_MAX} types")));
        }
        self.types.push(of);
        Ok(self.types.len() - 1)
    }

    fn add(&mut self, value: &Value, namespace: &str) -> Result<TypeId, Error> {
        match value {
            Value::String(name) => self.add_named(name, namespace, value),
            Value::Array(branches) => self.add_union(branches, namespace),
            Value::Object(_) => match &value["type"] {
                Value::String(name) => self.add_named(name, namespace, value),
                inner @ (Value::Array(_) | Value::Object(_)) => self.add(inner, namespace),
                _ => Err(invalid("a type without a name")),
            },
            _ => Err(invalid("a type that is neither name, object nor union")),
        }
    }

    /// A primitive or complex type by its word, with what `of` says of it; or one that was defined before.
    fn add_named(&mut self, name: &str, namespace: &str, of: &Value) -> Result<TypeId, Error> {
        let plain = match name {
            "null" => Type::Null,
            "boolean" => Type::Boolean,
            "int" => Type::Int(unit(of, false)),
            "long" => Type::Long(unit(of, true)),
            "float" => Type::Float,
            "double" => Type::Double,
            "bytes" => Type::Bytes(scale(of)),
            "string" => Type::Text,
            "array" => Type::Array(self.add(&of["items"], namespace)?),
            "map" => Type::Map(self.add(&of["values"], namespace)?),
            "record" | "error" => return self.add_record(of, namespace),
            "enum" => Type::Enum(symbols(of)?),
            "fixed" => {
                let size = of["size"].as_u64().and_then(|size| usize::try_from(size).ok());
                Type::Fixed(size.ok_or_else(|| invalid("a fixed without size"))?, scale(of))
            }
            _ => {
                let known = self.names.get(&full(name, namespace)).or_else(|| self.names.get(name));
                return known
                    .copied()
                    .ok_or_else(|| invalid(&format!("type {:?} is not defined", cut(name))));
            }
        };
        let is_named = matches!(plain, Type::Enum(_) | Type::Fixed(..));
        let id = self.push(plain)?;
        if is_named {
            self.define(of, namespace, id)?;
        }
        Ok(id)
    }

    /// The namespace of what is within.
    fn define(&mut self, of: &Value, namespace: &str, id: TypeId) -> Result<String, Error> {
        let name = of["name"].as_str().ok_or_else(|| invalid("a named type without name"))?;
        let name = full(name, of["namespace"].as_str().unwrap_or(namespace));
        if name.len() > NAME_BYTES_MAX {
            return Err(invalid(&format!("a type's name of more than {NAME_BYTES_MAX} bytes")));
        }
        let within = name.rsplit_once('.').map_or(String::new(), |(within, _)| within.to_owned());
        match self.names.insert(name, id) {
            None => Ok(within),
            Some(_) => Err(invalid("a name is defined twice")),
        }
    }

    fn add_record(&mut self, of: &Value, namespace: &str) -> Result<TypeId, Error> {
        let id = self.push(Type::Record(Vec::new()))?;
        let within = self.define(of, namespace, id)?;
        let fields = of["fields"].as_array().ok_or_else(|| invalid("a record without fields"))?;
        let mut read: Vec<(String, TypeId)> = Vec::with_capacity(fields.len());
        let mut names = std::collections::HashSet::new();
        for field in fields {
            let name = field["name"].as_str().ok_or_else(|| invalid("a field without name"))?;
            if !names.insert(name) {
                return Err(invalid(&format!("field {:?} stands in its record twice", cut(name))));
            }
            read.push((name.to_owned(), self.add(&field["type"], &within)?));
        }
        self.types[id] = Type::Record(read);
        Ok(id)
    }

    fn add_union(&mut self, branches: &[Value], namespace: &str) -> Result<TypeId, Error> {
        // Its own place first, so that a schema's first type is the outermost.
        let id = self.push(Type::Union(Vec::new()))?;
        let ids: Vec<TypeId> =
            branches.iter().map(|branch| self.add(branch, namespace)).collect::<Result<_, _>>()?;
        if ids.is_empty() || ids.iter().any(|id| matches!(self.types[*id], Type::Union(_))) {
            return Err(invalid("a union of nothing, or within a union"));
        }
        self.types[id] = Type::Union(ids);
        Ok(id)
    }

    /// A type for a message.
    pub(super) fn text(&self, id: TypeId) -> String {
        match &self.types[id] {
            Type::Null => "null".to_owned(),
            Type::Boolean => "boolean".to_owned(),
            Type::Int(unit) => format!("int{}", unit.text()),
            Type::Long(unit) => format!("long{}", unit.text()),
            Type::Float => "float".to_owned(),
            Type::Double => "double".to_owned(),
            Type::Bytes(None) => "bytes".to_owned(),
            Type::Fixed(size, None) => format!("fixed({size})"),
            Type::Bytes(Some(scale)) | Type::Fixed(_, Some(scale)) => format!("decimal of scale {scale}"),
            Type::Text => "string".to_owned(),
            Type::Enum(_) => "enum".to_owned(),
            Type::Array(_) => "array".to_owned(),
            Type::Map(_) => "map".to_owned(),
            Type::Union(_) => "union".to_owned(),
            Type::Record(_) => "record".to_owned(),
        }
    }
}

impl Unit {
    fn text(self) -> &'static str {
        match self {
            Self::None => "",
            Self::Days => " (date)",
            Self::Millis(_) => " (milliseconds)",
            Self::Micros(_) => " (microseconds)",
            Self::Nanos(_) => " (nanoseconds)",
        }
    }
}

pub(super) fn invalid(why: &str) -> Error {
    let message =
        format!("Avro schema: {why}; expected the JSON of a record's schema, all named types defined in it");
    Error::invalid("invalid_avro_schema", message)
}

fn full(name: &str, namespace: &str) -> String {
    if namespace.is_empty() || name.contains('.') { name.to_owned() } else { format!("{namespace}.{name}") }
}

/// Logical types that are not known are what they are made of.
fn unit(of: &Value, is_long: bool) -> Unit {
    match (of["logicalType"].as_str().unwrap_or_default(), is_long) {
        ("date", false) => Unit::Days,
        ("timestamp-millis", true) => Unit::Millis(true),
        ("timestamp-micros", true) => Unit::Micros(true),
        ("timestamp-nanos", true) => Unit::Nanos(true),
        ("local-timestamp-millis", true) => Unit::Millis(false),
        ("local-timestamp-micros", true) => Unit::Micros(false),
        ("local-timestamp-nanos", true) => Unit::Nanos(false),
        _ => Unit::None,
    }
}

/// Of a decimal.
fn scale(of: &Value) -> Option<u32> {
    let is_decimal = of["logicalType"].as_str() == Some("decimal");
    is_decimal.then(|| of["scale"].as_u64().map_or(0, |scale| u32::try_from(scale).unwrap_or(u32::MAX)))
}

fn symbols(of: &Value) -> Result<Arc<[Box<str>]>, Error> {
    let symbols = of["symbols"].as_array().ok_or_else(|| invalid("an enum without symbols"))?;
    let symbol = |symbol: &Value| symbol.as_str().map(Into::into);
    symbols.iter().map(symbol).collect::<Option<_>>().ok_or_else(|| invalid("a symbol that is no text"))
}

/// The columns that a record makes, all nullable, in its order.
///
/// # Errors
/// `Invalid` (`unsupported_type`) for what no column can hold, or nesting without end.
pub(super) fn columns(of: &Types) -> Result<Schema, Error> {
    let mut made = Columns { types: of, fields: 0 };
    Ok(Schema::new(made.of(of.root(), "", 1)?))
}

struct Columns<'a> {
    types: &'a Types,
    /// How many there are, nested ones included.
    fields: usize,
}

impl Columns<'_> {
    fn of(&mut self, fields: &[(String, TypeId)], path: &str, depth: usize) -> Result<Vec<Field>, Error> {
        let column = |(name, id): &(String, TypeId)| {
            let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
            Ok(Field::new(name, self.column(*id, &path, depth)?, true))
        };
        fields.iter().map(column).collect()
    }

    fn column(&mut self, id: TypeId, path: &str, depth: usize) -> Result<DataType, Error> {
        self.fields += 1;
        if depth > NESTING_MAX || self.fields > FIELDS_MAX {
            let why = format!("more than {NESTING_MAX} levels or {FIELDS_MAX} fields: does it hold itself?");
            return Err(unsupported(path, &why));
        }
        let timestamp = |utc: bool| match utc {
            true => types::timestamp_utc(),
            false => DataType::Timestamp(TimeUnit::Microsecond, None),
        };
        Ok(match self.types.of(id) {
            Type::Boolean => DataType::Boolean,
            Type::Int(Unit::Days) => DataType::Date32,
            Type::Int(_) => DataType::Int32,
            Type::Long(Unit::Millis(utc) | Unit::Micros(utc) | Unit::Nanos(utc)) => timestamp(*utc),
            Type::Long(_) => DataType::Int64,
            Type::Float => DataType::Float32,
            Type::Double => DataType::Float64,
            Type::Bytes(Some(scale)) | Type::Fixed(_, Some(scale)) => match i8::try_from(*scale) {
                // The digits that a schema states need not hold what is written.
                Ok(scale @ 0..=38) => DataType::Decimal128(38, scale),
                _ => return Err(unsupported(path, "a decimal of more than 38 digits")),
            },
            Type::Bytes(None) | Type::Fixed(_, None) => DataType::Binary,
            Type::Text | Type::Enum(_) => DataType::Utf8,
            Type::Array(items) => types::list(self.column(*items, path, depth + 1)?, true),
            Type::Map(values) => types::map(self.column(*values, path, depth + 1)?, true),
            Type::Record(fields) if fields.is_empty() => {
                return Err(unsupported(path, "a record without fields"));
            }
            Type::Record(fields) => DataType::Struct(self.of(fields, path, depth + 1)?.into()),
            Type::Union(branches) => {
                let mut others = branches.iter().filter(|id| !matches!(self.types.of(**id), Type::Null));
                match (others.next(), others.next()) {
                    (Some(only), None) => self.column(*only, path, depth)?,
                    _ => return Err(unsupported(path, "a union of more than null and one type")),
                }
            }
            Type::Null => return Err(unsupported(path, "null by itself")),
        })
    }
}

fn unsupported(path: &str, why: &str) -> Error {
    Error::invalid(
        "unsupported_type",
        format!("field {:?} of the Avro schema makes no column: {why}", cut(path)),
    )
    .at_column(cut_path(path))
}
