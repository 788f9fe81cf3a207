//! Table properties: Sluice's own, and what Delta's own take.
//!
//! *Owns*: which are refused, and why.
//! *Does not own*: whether Delta's kernel makes a table with them (`pod/src/table/delta.rs`).
//! Delta stores values as text, whatever they are: what is of the wrong type would be found by the first reader that
//! minds, or by none.

use std::collections::BTreeMap;

use super::{cut, nearest_name};
use crate::error::Error;

/// Whether `_stream`, `_offset` and `_ingested_at` are added.
pub(super) const SYSTEM_COLUMNS: &str = "sluice.system_columns";
/// What becomes of records that do not fit.
pub const ON_INVALID: &str = "sluice.on_invalid";
/// They are kept in `<table>__rejected`.
pub const QUARANTINE: &str = "quarantine";
/// All properties of our own.
const OWN_PROPERTIES: [&str; 2] = [SYSTEM_COLUMNS, ON_INVALID];
/// Delta's own switches begin so, besides those in `KINDS`. Some readers cannot open a table at all where one is
/// neither true nor false.
const DELTA_SWITCHES: &str = "delta.enable";
/// Delta would make such a table, and the pod could not open it.
const COLUMN_MAPPING: &str = "delta.columnMapping.mode";
/// Would let Delta forget our watermark transaction, and records would come twice.
const TRANSACTION_RETENTION: &str = "delta.setTransactionRetentionDuration";

/// What a property takes.
#[derive(Debug, Clone, Copy)]
enum Kind {
    Switch,
    /// A whole number from this on.
    Number(i64),
    /// `interval 7 days`.
    Interval,
    /// Bytes, with or without a unit.
    Size,
    OneOf(&'static [&'static str]),
}

const KINDS: [(&str, Kind); 21] = [
    (SYSTEM_COLUMNS, Kind::Switch),
    (ON_INVALID, Kind::OneOf(&["refuse", QUARANTINE])),
    ("delta.appendOnly", Kind::Switch),
    ("delta.autoOptimize.autoCompact", Kind::Switch),
    ("delta.autoOptimize.optimizeWrite", Kind::Switch),
    ("delta.checkpoint.writeStatsAsJson", Kind::Switch),
    ("delta.checkpoint.writeStatsAsStruct", Kind::Switch),
    ("delta.randomizeFilePrefixes", Kind::Switch),
    ("delta.rowTrackingSuspended", Kind::Switch),
    ("delta.tuneFileSizesForRewrites", Kind::Switch),
    ("delta.checkpointInterval", Kind::Number(1)),
    ("delta.columnMapping.maxColumnId", Kind::Number(0)),
    ("delta.dataSkippingNumIndexedCols", Kind::Number(-1)),
    ("delta.inCommitTimestampEnablementTimestamp", Kind::Number(0)),
    ("delta.inCommitTimestampEnablementVersion", Kind::Number(0)),
    ("delta.randomPrefixLength", Kind::Number(1)),
    ("delta.deletedFileRetentionDuration", Kind::Interval),
    ("delta.logRetentionDuration", Kind::Interval),
    ("delta.targetFileSize", Kind::Size),
    ("delta.checkpointPolicy", Kind::OneOf(&["classic", "v2"])),
    ("delta.isolationLevel", Kind::OneOf(&["Serializable", "WriteSerializable", "SnapshotIsolation"])),
];

fn kind(name: &str) -> Option<Kind> {
    let known = KINDS.iter().find(|(known, _)| *known == name).map(|(_, kind)| *kind);
    known.or_else(|| name.starts_with(DELTA_SWITCHES).then_some(Kind::Switch))
}

impl Kind {
    fn takes(self, value: &str) -> bool {
        match self {
            Self::Switch => matches!(value, "true" | "false"),
            Self::Number(least) => value.parse().is_ok_and(|number: i64| number >= least),
            Self::Interval => is_interval(value),
            Self::Size => {
                let digits = value.trim_end_matches(|c: char| c.is_ascii_alphabetic());
                let unit = value[digits.len()..].to_ascii_lowercase();
                let units = ["", "b", "k", "kb", "m", "mb", "g", "gb"];
                units.contains(&unit.as_str()) && Self::Number(1).takes(digits)
            }
            Self::OneOf(values) => values.contains(&value),
        }
    }

    fn text(self) -> String {
        match self {
            Self::Switch => "true or false".to_owned(),
            Self::Number(least) => format!("a whole number from {least} on"),
            Self::Interval => "a time as in `interval 7 days`".to_owned(),
            Self::Size => "bytes, as in 104857600 or 100mb".to_owned(),
            Self::OneOf(values) => values.join(" or "),
        }
    }
}

fn is_interval(value: &str) -> bool {
    let value = value.to_ascii_lowercase();
    let [word, number, unit] = value.split_whitespace().collect::<Vec<_>>()[..] else { return false };
    let unit = unit.strip_suffix('s').unwrap_or(unit);
    let units = ["nanosecond", "microsecond", "millisecond", "second", "minute", "hour", "day", "week"];
    word == "interval" && Kind::Number(0).takes(number) && units.contains(&unit)
}

pub(super) fn check(properties: &BTreeMap<String, String>) -> Result<(), Error> {
    for (name, value) in properties {
        let invalid = |why: &str| {
            Err(Error::invalid("invalid_property", format!("table property {}: {why}", cut(name))))
        };
        if name.is_empty() {
            return invalid("a name may not be empty");
        }
        if name.eq_ignore_ascii_case(TRANSACTION_RETENTION) {
            return invalid(
                "refused, since Delta would then forget which records are in the table, and they could come \
                 twice; leave it out",
            );
        }
        if name.starts_with("sluice.") && !OWN_PROPERTIES.contains(&name.as_str()) {
            return match nearest_name(name, OWN_PROPERTIES.into_iter()) {
                Some(nearest) => invalid(&format!("unknown; did you mean {nearest}?")),
                None => invalid(&format!("unknown; known are {}", OWN_PROPERTIES.join(", "))),
            };
        }
        if name.eq_ignore_ascii_case(COLUMN_MAPPING) && value != "none" {
            return invalid("tables that map their columns cannot be written to yet; leave it out");
        }
        if let Some(kind) = kind(name).filter(|kind| !kind.takes(value)) {
            return invalid(&format!("expected {}, got {}", kind.text(), cut(value)));
        }
    }
    Ok(())
}
