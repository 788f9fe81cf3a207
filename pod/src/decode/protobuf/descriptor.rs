//! A message's descriptor: its types by name, and the columns that it would make.
//!
//! *Owns*: reading a serialized `DescriptorProto`, finding nested types, the map of protobuf types to Arrow's.
//! *Does not own*: how the messages go into a table that there is (`plan`).
//!
//! The descriptor stands alone, without its file: what a field refers to must be nested in it. Its package is unknown, so
//! that a name like `.shop.Order.Item` is found by the longest of its ends that names a type. Syntax is not carried
//! either, and defaults are not applied.

use std::collections::HashMap;

use super::super::fault::{cut, cut_path};
use arrow::datatypes::{DataType, Field, Fields, Schema};
use prost::Message as _;
use prost_types::field_descriptor_proto::{Label, Type};
use prost_types::{DescriptorProto, EnumDescriptorProto, FieldDescriptorProto};
use sluice_shared::error::Error;
use sluice_shared::table::{FIELDS_MAX, NESTING_MAX, types};

/// What a descriptor must be.
const EXPECTED: &str =
    "expected a serialized google.protobuf.DescriptorProto, with the types that it refers to nested in it";

/// Most types that a descriptor may have, and longest name of one: both are remembered in full.
const TYPES_MAX: usize = 2_000;
const TYPE_NAME_BYTES_MAX: usize = 4_096;

/// A descriptor and the types in it.
pub(super) struct Types<'a> {
    messages: HashMap<String, &'a DescriptorProto>,
    enums: HashMap<String, &'a EnumDescriptorProto>,
}

/// A message among the types, and its name there, which begins with the outermost message's.
#[derive(Clone)]
pub(super) struct Named<'a> {
    pub(super) name: String,
    pub(super) message: &'a DescriptorProto,
}

/// What a field holds.
pub(super) enum Holds<'a> {
    Scalar(Type),
    Enum(Option<&'a EnumDescriptorProto>),
    Message(Named<'a>),
    /// Key and value.
    Map(&'a FieldDescriptorProto, &'a FieldDescriptorProto, Named<'a>),
}

/// Reads a descriptor.
///
/// # Errors
/// `Invalid` (`invalid_descriptor`).
pub(super) fn read(bytes: &[u8]) -> Result<DescriptorProto, Error> {
    let descriptor = DescriptorProto::decode(bytes).map_err(|error| invalid(&error.to_string()))?;
    match descriptor.name() {
        "" => Err(invalid("the message has no name")),
        _ => Ok(descriptor),
    }
}

pub(super) fn invalid(why: &str) -> Error {
    Error::invalid("invalid_descriptor", format!("descriptor: {why}; {EXPECTED}"))
}

impl<'a> Types<'a> {
    /// # Errors
    /// `Invalid` (`invalid_descriptor`) where there are too many, or names are too long.
    pub(super) fn of(root: &'a DescriptorProto) -> Result<Self, Error> {
        let mut types = Self { messages: HashMap::new(), enums: HashMap::new() };
        types.add(root.name().to_owned(), root)?;
        Ok(types)
    }

    fn add(&mut self, name: String, message: &'a DescriptorProto) -> Result<(), Error> {
        let types = self.messages.len() + self.enums.len() + message.enum_type.len();
        if types >= TYPES_MAX || name.len() > TYPE_NAME_BYTES_MAX {
            let why = format!(
                "more than {TYPES_MAX} types, or a type's name of more than {TYPE_NAME_BYTES_MAX} bytes"
            );
            return Err(invalid(&why));
        }
        for nested in &message.nested_type {
            self.add(format!("{name}.{}", nested.name()), nested)?;
        }
        self.enums
            .extend(message.enum_type.iter().map(|nested| (format!("{name}.{}", nested.name()), nested)));
        self.messages.insert(name, message);
        Ok(())
    }

    /// What a field of the message `within` holds. None where its type is not in the descriptor, or no type at all.
    pub(super) fn holds(&self, field: &'a FieldDescriptorProto, within: &str) -> Option<Holds<'a>> {
        match Type::try_from(field.r#type?).ok()? {
            Type::Group => None,
            Type::Enum => {
                Some(Holds::Enum(find(&self.enums, field.type_name(), within).map(|(_, found)| found)))
            }
            Type::Message => {
                let (name, message) = find(&self.messages, field.type_name(), within)?;
                let named = Named { name, message };
                if !message.options.as_ref().is_some_and(|options| options.map_entry()) {
                    return Some(Holds::Message(named));
                }
                let of = |number: i32| message.field.iter().find(|field| field.number() == number);
                Some(Holds::Map(of(1)?, of(2)?, named)).filter(|_| is_repeated(field))
            }
            scalar => Some(Holds::Scalar(scalar)),
        }
    }
}

/// By its absolute name: the longest end that is known. By a relative one: in the innermost message that has it.
fn find<T: Copy>(known: &HashMap<String, T>, name: &str, within: &str) -> Option<(String, T)> {
    if name.len() > TYPE_NAME_BYTES_MAX {
        return None;
    }
    let found = |name: &str| known.get(name).map(|found| (name.to_owned(), *found));
    if let Some(absolute) = name.strip_prefix('.') {
        let starts = std::iter::once(0).chain(absolute.match_indices('.').map(|(dot, _)| dot + 1));
        return starts.filter_map(|start| found(&absolute[start..])).next();
    }
    let scopes = std::iter::successors(Some(within), |scope| scope.rsplit_once('.').map(|(outer, _)| outer));
    scopes.map(|scope| format!("{scope}.{name}")).find_map(|name| found(&name)).or_else(|| found(name))
}

pub(super) fn is_repeated(field: &FieldDescriptorProto) -> bool {
    field.label() == Label::Repeated
}

/// A field's type for a message.
pub(super) fn type_text(field: &FieldDescriptorProto) -> String {
    let kind = field.r#type.and_then(|kind| Type::try_from(kind).ok());
    let name = kind.map_or("a field without type", |kind| kind.as_str_name());
    let name = name.trim_start_matches("TYPE_").to_ascii_lowercase();
    let label = if is_repeated(field) { "repeated " } else { "" };
    match field.type_name() {
        "" => format!("{label}{name}"),
        of => format!("{label}{name} {}", cut(of)),
    }
}

/// The columns that a message makes, all nullable, in the order of its descriptor.
///
/// # Errors
/// `Invalid`: `unsupported_type` for a field that no column can hold, or nesting without end.
pub(super) fn schema(root: &DescriptorProto) -> Result<Schema, Error> {
    let mut columns = Columns { types: Types::of(root)?, fields: 0 };
    let named = Named { name: root.name().to_owned(), message: root };
    Ok(Schema::new(columns.of(&named, "", 1)?))
}

/// Columns being made.
struct Columns<'a> {
    types: Types<'a>,
    /// How many there are, nested ones included.
    fields: usize,
}

impl<'a> Columns<'a> {
    fn of(&mut self, message: &Named<'a>, path: &str, depth: usize) -> Result<Fields, Error> {
        let fields = message.message.field.iter();
        fields.map(|field| self.column(field, &message.name, path, depth)).collect()
    }

    fn column(
        &mut self,
        field: &'a FieldDescriptorProto,
        within: &str,
        path: &str,
        depth: usize,
    ) -> Result<Field, Error> {
        let path = if path.is_empty() { field.name().to_owned() } else { format!("{path}.{}", field.name()) };
        self.fields += 1;
        if depth > NESTING_MAX || self.fields > FIELDS_MAX {
            let why = format!(
                "more than {NESTING_MAX} levels or {FIELDS_MAX} fields: does the message hold itself?"
            );
            return Err(unsupported(&path, &why));
        }
        let data_type = match self.types.holds(field, within) {
            Some(Holds::Map(_, value, entry)) => {
                types::map(self.column(value, &entry.name, &path, depth + 1)?.data_type().clone(), true)
            }
            Some(held) => {
                let element = self.data_type(&held, &path, depth)?;
                if is_repeated(field) { types::list(element, true) } else { element }
            }
            None => {
                let why = format!("{} is not nested in the descriptor, or is a group", type_text(field));
                return Err(unsupported(&path, &why));
            }
        };
        Ok(Field::new(field.name(), data_type, true))
    }

    fn data_type(&mut self, held: &Holds<'a>, path: &str, depth: usize) -> Result<DataType, Error> {
        Ok(match held {
            Holds::Message(named) if named.message.field.is_empty() => {
                return Err(unsupported(path, "a message without fields"));
            }
            Holds::Message(named) => DataType::Struct(self.of(named, path, depth + 1)?),
            Holds::Map(..) => return Err(unsupported(path, "a map's entry by itself")),
            Holds::Enum(_) => DataType::Int32,
            Holds::Scalar(scalar) => match scalar {
                Type::Double => DataType::Float64,
                Type::Float => DataType::Float32,
                Type::Int32 | Type::Sint32 | Type::Sfixed32 => DataType::Int32,
                Type::Int64 | Type::Sint64 | Type::Sfixed64 => DataType::Int64,
                Type::Uint32 | Type::Fixed32 => DataType::UInt32,
                Type::Uint64 | Type::Fixed64 => DataType::UInt64,
                Type::Bool => DataType::Boolean,
                Type::String => DataType::Utf8,
                Type::Bytes => DataType::Binary,
                Type::Group | Type::Message | Type::Enum => return Err(unsupported(path, "no scalar")),
            },
        })
    }
}

fn unsupported(path: &str, why: &str) -> Error {
    Error::invalid(
        "unsupported_type",
        format!("field {:?} of the descriptor makes no column: {why}", cut(path)),
    )
    .at_column(cut_path(path))
}
