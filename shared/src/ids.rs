//! Names and numbers that identify things, and the only arithmetic that is done on them.
//!
//! *Owns*: validation of names, half-open offset ranges, their conversion to the inclusive ones of the wire.
//! *Does not own*: what the ids point at.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// Longest part of a table name, in characters: file systems take 255 for a directory, and `__rejected` must fit too.
pub const TABLE_NAME_PART_MAX: usize = 245;
/// Longest stream name, in characters.
pub const STREAM_NAME_MAX: usize = 200;

/// A name that does not follow its rules; says which name, and what is allowed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("invalid {what} {name:?}: {rule}")]
pub struct InvalidName {
    /// What was being named: `table name`, `stream name`, `pod id`.
    pub what: &'static str,
    /// The offending name, shortened for display.
    pub name: String,
    /// What is allowed instead.
    pub rule: &'static str,
}

impl InvalidName {
    fn new(what: &'static str, name: &str, rule: &'static str) -> Self {
        let mut shown: String = name.chars().take(64).collect();
        if shown.len() < name.len() {
            shown.push('…');
        }
        Self { what, name: shown, rule }
    }
}

/// Full name of a table: `catalog.schema.table`. Missing parts come from the defaults `main.default`.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct TableName(Arc<str>);

impl TableName {
    const RULE: &'static str =
        "use one to three parts joined by dots, each 1 to 245 of the characters A-Z a-z 0-9 _";

    /// The whole name, `catalog.schema.table`.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Path of the table below a storage root: `catalog/schema/table`. Safe, since parts hold no separators.
    pub fn path(&self) -> String {
        self.0.replace('.', "/")
    }
}

impl FromStr for TableName {
    type Err = InvalidName;

    fn from_str(text: &str) -> Result<Self, InvalidName> {
        let part_is_good = |part: &str| {
            (1..=TABLE_NAME_PART_MAX).contains(&part.len())
                && part.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
        };
        let parts: Vec<&str> = text.split('.').collect();
        if parts.len() > 3 || !parts.iter().all(|part| part_is_good(part)) {
            return Err(InvalidName::new("table name", text, Self::RULE));
        }
        let full = match parts[..] {
            [table] => format!("main.default.{table}"),
            [schema, table] => format!("main.{schema}.{table}"),
            _ => text.to_owned(),
        };
        Ok(Self(full.into()))
    }
}

/// The name that a producer gave a named stream; unique within its table.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct StreamName(Arc<str>);

impl StreamName {
    const RULE: &'static str = "use 1 to 200 of the characters A-Z a-z 0-9 _ - . : / @ =";

    /// The name as the producer wrote it.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for StreamName {
    type Err = InvalidName;

    fn from_str(text: &str) -> Result<Self, InvalidName> {
        let good = |b: u8| b.is_ascii_alphanumeric() || b"_-.:/@=".contains(&b);
        if text.is_empty() || text.len() > STREAM_NAME_MAX || !text.bytes().all(good) {
            return Err(InvalidName::new("stream name", text, Self::RULE));
        }
        Ok(Self(text.into()))
    }
}

/// Identity of a stream, never reused: `name#incarnation` for a named stream, `~uuid` for an ephemeral one.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct StreamId(Arc<str>);

impl StreamId {
    const RULE: &'static str = "expected `name#incarnation` or `~uuid`";

    /// A new ephemeral stream.
    pub fn ephemeral() -> Self {
        Self(format!("~{}", uuid::Uuid::now_v7().simple()).into())
    }

    /// The `incarnation`-th stream of this name in its table.
    pub fn named(name: &StreamName, incarnation: u64) -> Self {
        Self(format!("{}#{incarnation}", name.as_str()).into())
    }

    /// The name that its producer chose, if it did.
    pub fn name(&self) -> Option<StreamName> {
        self.0.rsplit_once('#').and_then(|(name, _)| name.parse().ok())
    }

    /// Whether the stream ends with its producer's connection.
    pub fn is_ephemeral(&self) -> bool {
        self.0.starts_with('~')
    }

    /// The id as text, as it stands in `_stream`.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for StreamId {
    type Err = InvalidName;

    fn from_str(text: &str) -> Result<Self, InvalidName> {
        let invalid = || InvalidName::new("stream id", text, Self::RULE);
        if let Some(uuid) = text.strip_prefix('~') {
            uuid::Uuid::try_parse(uuid).map_err(|_| invalid())?;
        } else {
            let (name, incarnation) = text.rsplit_once('#').ok_or_else(invalid)?;
            name.parse::<StreamName>().map_err(|_| invalid())?;
            incarnation.parse::<u64>().map_err(|_| invalid())?;
        }
        Ok(Self(text.into()))
    }
}

/// Name of a pod, chosen by its operator and kept across restarts.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct PodId(Arc<str>);

impl PodId {
    const RULE: &'static str = "use 1 to 63 of the characters a-z 0-9 -";

    /// The id as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for PodId {
    type Err = InvalidName;

    fn from_str(text: &str) -> Result<Self, InvalidName> {
        let good = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
        if text.is_empty() || text.len() > 63 || !text.bytes().all(good) {
            return Err(InvalidName::new("pod id", text, Self::RULE));
        }
        Ok(Self(text.into()))
    }
}

macro_rules! text_id {
    ($name:ident) => {
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
        impl TryFrom<String> for $name {
            type Error = InvalidName;
            fn try_from(text: String) -> Result<Self, InvalidName> {
                text.parse()
            }
        }
        impl From<$name> for String {
            fn from(id: $name) -> String {
                id.0.as_ref().to_owned()
            }
        }
    };
}

text_id!(TableName);
text_id!(StreamName);
text_id!(StreamId);
text_id!(PodId);

/// Identity of a Delta table (`metaData.id`): rows belong to a table, not to a name.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct TableId(pub Arc<str>);

/// A table version, as Delta Lake counts them.
pub type TableVersion = u64;

/// Version of the table from whose metadata a schema was read; a session is pinned to one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct SchemaId(pub u64);

/// Number of a producer's hold on a named stream. A greater one fences the smaller. Ephemeral streams have only 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct SessionId(pub u64);

/// A log's life number, raised durably at each recovery.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Epoch(pub u64);

/// Identity of one write-ahead log; stays with its directory, not with the pod that opens it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct LogId(pub uuid::Uuid);

/// A place in a write-ahead log. Ordered as written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct WalPosition {
    /// Number of the segment, counted from 0 over the log's whole life.
    pub segment: u64,
    /// Byte offset in the segment.
    pub offset: u64,
}

impl fmt::Display for WalPosition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.segment, self.offset)
    }
}

/// Half-open range of offsets in one stream: `start..end`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub struct OffsetRange {
    /// First offset.
    pub start: u64,
    /// One more than the last offset.
    pub end: u64,
}

impl OffsetRange {
    /// `count` offsets from `start`. None where the end would not fit.
    pub fn from_count(start: u64, count: u64) -> Option<Self> {
        Some(Self { start, end: start.checked_add(count)? })
    }

    /// How many offsets.
    pub fn count(&self) -> u64 {
        self.end - self.start
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.end <= self.start
    }

    /// Whether `offset` is one of them.
    pub fn contains(&self, offset: u64) -> bool {
        (self.start..self.end).contains(&offset)
    }
}

/// The last offset before `next`, as the producers' wire says it; None where nothing is covered yet.
pub fn last_before(next: u64) -> Option<u64> {
    next.checked_sub(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_names_are_completed_with_the_defaults() {
        let full = |text: &str| text.parse::<TableName>().expect("valid").as_str().to_owned();
        assert_eq!(full("flights"), "main.default.flights");
        assert_eq!(full("ops.flights"), "main.ops.flights");
        assert_eq!(full("lake.ops.flights"), "lake.ops.flights");
    }

    #[test]
    fn bad_table_names_are_refused_by_name() {
        let long = "a".repeat(246);
        assert!(long[1..].parse::<TableName>().is_ok());
        for bad in
            ["", ".", "..", "a..b", "../etc", "a/b", "a.b.c.d", "naïve", "a b", "a\0b", "table.", &long]
        {
            let error = bad.parse::<TableName>().expect_err(bad);
            assert!(error.to_string().starts_with("invalid table name"), "{error}");
            assert!(error.to_string().len() < 300, "{error}");
        }
    }

    #[test]
    fn stream_ids_round_trip() {
        let name: StreamName = "plant-7/line:2".parse().expect("valid");
        for id in [StreamId::ephemeral(), StreamId::named(&name, 3)] {
            assert_eq!(id.as_str().parse::<StreamId>().expect("valid"), id);
        }
        assert!("plain".parse::<StreamId>().is_err());
        assert!("~not-a-uuid".parse::<StreamId>().is_err());
    }
}
