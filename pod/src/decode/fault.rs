//! Why a record is refused, while it is on its way up from the value to the record.
//!
//! *Owns*: the path to the column, the lengths of what is told, what is wrong with a stream's schema in words.
//! *Does not own*: which codes there are (`table/batch.rs`).

use std::fmt::Display;

use arrow::datatypes::Fields;
use sluice_shared::error::Error;
use sluice_shared::table::nearest_name;

use crate::table::batch::{Reason, ReasonCode};

/// Longest message, in characters.
const MESSAGE_CHARS_MAX: usize = 200;
/// Longest column path, in characters: producers choose the names of unknown fields.
const COLUMN_CHARS_MAX: usize = 255;
/// Longest piece of a producer's value in a message, in characters.
const SHOWN_CHARS_MAX: usize = 40;

/// Boxed, so that the way of a record that fits stays cheap.
#[derive(Debug)]
pub(super) struct Fault(Box<FaultBody>);

#[derive(Debug)]
struct FaultBody {
    code: ReasonCode,
    path: String,
    message: String,
}

impl Fault {
    pub(super) fn new(code: ReasonCode, message: impl Into<String>) -> Self {
        Self(Box::new(FaultBody { code, path: String::new(), message: message.into() }))
    }

    /// The value is of a type that the column does not take.
    pub(super) fn wrong_type(expected: impl Display, got: impl Display) -> Self {
        Self::new(ReasonCode::WrongType, format!("expected {expected}, got {got}"))
    }

    /// The value is of the right type, but the column cannot hold it.
    pub(super) fn out_of_range(value: impl Display, column_type: impl Display) -> Self {
        Self::new(ReasonCode::OutOfRange, format!("{value} is out of the range of {column_type}"))
    }

    /// There is no value where there must be one.
    pub(super) fn missing() -> Self {
        Self::new(ReasonCode::MissingValue, "missing or null, but the column may not be null")
    }

    /// Found below this name.
    #[must_use]
    pub(super) fn within(mut self, name: &str) -> Self {
        let below = std::mem::take(&mut self.0.path);
        let dot = if below.is_empty() || below.starts_with('[') { "" } else { "." };
        self.0.path = format!("{}{dot}{below}", cut_to(name, COLUMN_CHARS_MAX));
        self
    }

    /// Found in the element of this place of a list.
    #[must_use]
    pub(super) fn at_element(self, place: usize) -> Self {
        self.within(&format!("[{place}]"))
    }

    pub(super) fn into_reason(self) -> Reason {
        let FaultBody { code, path, message } = *self.0;
        let column = (!path.is_empty()).then(|| cut_to(&path, COLUMN_CHARS_MAX));
        Reason { code: code.as_str(), column, message: cut_to(&message, MESSAGE_CHARS_MAX) }
    }
}

/// A producer's text, short enough for a message.
pub(super) fn cut(text: &str) -> String {
    cut_to(text, SHOWN_CHARS_MAX)
}

/// A path of columns, short enough to be told: a schema's names have no bound.
pub(super) fn cut_path(path: &str) -> String {
    cut_to(path, COLUMN_CHARS_MAX)
}

/// The path of a field below another.
pub(super) fn below(path: &str, name: &str) -> String {
    if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") }
}

/// A stream's schema has a column as what the table's cannot take.
pub(super) fn mismatch(path: &str, why: &str) -> Error {
    Error::invalid("schema_mismatch", format!("column {:?}: {why}", cut(path))).at_column(cut_path(path))
}

/// A stream's schema lacks a column that may not be null.
pub(super) fn missing_column(path: &str, why: &str) -> Error {
    Error::invalid("missing_column", format!("column {:?}: {why}", cut(path))).at_column(cut_path(path))
}

/// A stream's schema, called `whose`, has a field that the table does not have.
pub(super) fn unknown_field(whose: &str, path: &str, name: &str, columns: &Fields) -> Error {
    let advice = advice_for_unknown(name, columns);
    let message = format!("{whose} has {:?}, the table has no such column: {advice}", cut(path));
    Error::invalid("unknown_field", message).at_column(cut_path(path))
}

/// What to do about a field that is none of these columns.
pub(super) fn advice_for_unknown(name: &str, columns: &Fields) -> String {
    match nearest_name(name, columns.iter().map(|column| column.name().as_str())) {
        Some(nearest) => format!("did you mean {nearest:?}?"),
        None => "leave it out, add the column, or open the stream with unknown=ignore".to_owned(),
    }
}

fn cut_to(text: &str, chars_max: usize) -> String {
    match text.char_indices().nth(chars_max) {
        Some(_) => text.chars().take(chars_max - 1).chain(['…']).collect(),
        None => text.to_owned(),
    }
}
