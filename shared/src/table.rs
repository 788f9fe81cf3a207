//! What a table is: schema, partitioning, properties, and their form in JSON.
//!
//! *Owns*: the table spec, its JSON form, its limits, which Arrow types Sluice takes (`table/types.rs`), which
//! properties (`table/properties.rs`).
//! *Does not own*: Delta's own metadata (`pod/src/table/delta.rs`), decoding of records.
//! Every name and type that Delta would refuse is refused here, before anything is created.

use std::collections::{BTreeMap, HashSet};

use arrow::datatypes::{DataType, Field, Fields, Schema, SchemaRef};
use serde::Deserialize;

use crate::error::Error;

pub mod properties;
pub mod types;

/// Most columns of a table.
pub const COLUMNS_MAX: usize = 2_000;
/// Most fields of a table, nested ones included.
pub const FIELDS_MAX: usize = 10_000;
/// Deepest nesting: a list of int64 has 2.
pub const NESTING_MAX: usize = 32;
/// Longest name of a column or nested field, in bytes.
pub const FIELD_NAME_BYTES_MAX: usize = 255;

/// Columns that Sluice adds; producers' columns may not begin like them.
pub const RESERVED_PREFIXES: [&str; 3] = ["_stream", "_offset", "_ingested_at"];
/// Delta refuses these in names, unless the table maps its columns, which few other writers can.
const FORBIDDEN_CHARACTERS: &str = " ,;{}()\n\t=";
/// What a table is to look like.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TableSpec {
    /// The producers' columns, in order; without the system columns.
    pub schema: SchemaRef,
    /// Names of the columns that the table is partitioned by, in order.
    pub partition_columns: Vec<String>,
    /// Delta table properties, and Sluice's own (`sluice.*`).
    pub properties: BTreeMap<String, String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SpecJson {
    schema: SchemaJson,
    #[serde(default)]
    partition_columns: Vec<String>,
    #[serde(default)]
    properties: BTreeMap<String, String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SchemaJson {
    fields: Vec<types::FieldJson>,
}

impl TableSpec {
    /// A spec whose schema is normalised, and that has passed all checks.
    ///
    /// # Errors
    /// `Invalid`: a type that no table takes, a bad or repeated name, too many columns, partition columns that do
    /// not fit, properties that are unknown or harmful.
    pub fn new(
        schema: SchemaRef,
        partition_columns: Vec<String>,
        properties: BTreeMap<String, String>,
    ) -> Result<Self, Error> {
        let schema = Self::normalise(&schema)?;
        check_columns(&schema)?;
        check_partition_columns(&schema, &partition_columns)?;
        properties::check(&properties)?;
        Ok(Self { schema, partition_columns, properties })
    }

    /// Reads `{"schema":{"fields":[{"name":…,"type":…,"nullable":…}]},"partition_columns":[…],"properties":{…}}`.
    ///
    /// `type` is either text, as `types::parse` takes it, or a type object of Arrow's JSON integration format.
    /// `nullable` is true where it is not given.
    ///
    /// # Errors
    /// `Invalid`: not that JSON, unknown keys, and all that `new` refuses.
    pub fn from_json(json: &[u8]) -> Result<Self, Error> {
        let invalid = |why: String| {
            Error::invalid(
                "invalid_table_spec",
                format!(
                    "table spec: {why}; expected {{\"schema\":{{\"fields\":[{{\"name\":\"id\",\"type\":\"int64\",\
                     \"nullable\":false}}]}},\"partition_columns\":[],\"properties\":{{}}}}"
                ),
            )
        };
        // serde would read an array as a struct's fields in order.
        if json.trim_ascii_start().first() != Some(&b'{') {
            return Err(invalid("not a JSON object".to_owned()));
        }
        let spec: SpecJson = serde_json::from_slice(json).map_err(|error| invalid(error.to_string()))?;
        let fields: Vec<Field> = spec.schema.fields.iter().map(types::from_json).collect::<Result<_, _>>()?;
        Self::new(Schema::new(fields).into(), spec.partition_columns, spec.properties)
    }

    /// The spec as `from_json` reads it, with types as text.
    pub fn to_json(&self) -> serde_json::Value {
        let field = |field: &std::sync::Arc<Field>| {
            serde_json::json!({
                "name": field.name(),
                "type": types::text(field.data_type()),
                "nullable": field.is_nullable(),
            })
        };
        serde_json::json!({
            "schema": { "fields": self.schema.fields().iter().map(field).collect::<Vec<_>>() },
            "partition_columns": self.partition_columns,
            "properties": self.properties,
        })
    }

    /// Whether the table carries `_stream`, `_offset` and `_ingested_at`. It does unless told otherwise.
    pub fn system_columns(&self) -> bool {
        self.properties.get(properties::SYSTEM_COLUMNS).is_none_or(|value| value != "false")
    }

    /// The types that a table takes for those of an Arrow schema: unsigned integers one size up, all texts to
    /// Utf8, all timestamps to microseconds, dictionaries to their values, and so on. Metadata is dropped.
    ///
    /// # Errors
    /// `Invalid` (`unsupported_type`): names the column, its type, and what to send instead.
    pub fn normalise(schema: &Schema) -> Result<SchemaRef, Error> {
        let fields: Vec<Field> =
            schema.fields().iter().map(|field| types::normalise(field)).collect::<Result<_, _>>()?;
        Ok(Schema::new(fields).into())
    }
}

/// The producers' columns, as a pod describes its table to people (`{"spec":{"schema":{"fields":[…]}}}`). A type that is
/// not known here counts as text. None where that is no description.
pub fn described_columns(description: &[u8]) -> Option<SchemaRef> {
    let description: serde_json::Value = serde_json::from_slice(description).ok()?;
    let fields = description["spec"]["schema"]["fields"].as_array()?;
    let field = |field: &serde_json::Value| {
        let name = field["name"].as_str().unwrap_or_default();
        let data_type = field["type"].as_str().and_then(|text| types::parse(text).ok());
        Field::new(name, data_type.unwrap_or(DataType::Utf8), field["nullable"] != false)
    };
    Some(Schema::new(fields.iter().map(field).collect::<Vec<_>>()).into())
}

/// The known name that `unknown` was probably meant to be.
pub fn nearest_name<'a>(unknown: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    const DISTANCE_MAX: usize = 2;
    const NAME_BYTES_MAX: usize = 64;
    if unknown.is_empty() || unknown.len() > NAME_BYTES_MAX {
        return None;
    }
    // The edit distance is dear, and producers choose how often it is asked for.
    let ends = |name: &str| {
        let bytes = name.as_bytes();
        (bytes.first().map(u8::to_ascii_lowercase), bytes.last().map(u8::to_ascii_lowercase))
    };
    let (first, last) = ends(unknown);
    let folded = unknown.to_ascii_lowercase();
    known
        .filter(|name| name.len() <= NAME_BYTES_MAX && name.len().abs_diff(unknown.len()) <= DISTANCE_MAX)
        .filter(|name| ends(name).0 == first || ends(name).1 == last)
        .map(|name| (crate::config::distance(&folded, &name.to_ascii_lowercase()), name))
        .filter(|(distance, _)| *distance <= DISTANCE_MAX)
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, name)| name)
}

fn invalid_schema(column: &str, why: String) -> Error {
    Error::invalid("invalid_schema", why).at_column(column)
}

fn check_columns(schema: &Schema) -> Result<(), Error> {
    let columns = schema.fields().len();
    if columns == 0 {
        return Err(Error::invalid("invalid_schema", "the schema has no column: a table needs at least one"));
    }
    if columns > COLUMNS_MAX {
        let why = format!("the schema has {columns} columns: a table takes at most {COLUMNS_MAX}");
        return Err(Error::invalid("invalid_schema", why));
    }
    for field in schema.fields() {
        let name = field.name();
        let folded = name.to_ascii_lowercase();
        if let Some(prefix) = RESERVED_PREFIXES.iter().find(|prefix| folded.starts_with(**prefix)) {
            let why = format!("column {}: names that begin with {prefix} are reserved; rename it", cut(name));
            return Err(invalid_schema(name, why));
        }
    }
    let mut fields = 0;
    check_fields(schema.fields(), "", &mut fields)
}

fn check_fields(fields: &Fields, path: &str, seen: &mut usize) -> Result<(), Error> {
    let mut names = HashSet::new();
    *seen += fields.len();
    if *seen > FIELDS_MAX {
        let why = format!("the schema has more than {FIELDS_MAX} fields, nested ones included");
        return Err(Error::invalid("invalid_schema", why));
    }
    for field in fields {
        let name = field.name();
        let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
        if let Some(why) = bad_name(name) {
            return Err(invalid_schema(&path, format!("column {}: {why}", cut(&path))));
        }
        if !names.insert(name.to_lowercase()) {
            let why =
                format!("column {} stands there twice: names must differ in more than case", cut(&path));
            return Err(invalid_schema(&path, why));
        }
        check_nested(field.data_type(), &path, seen)?;
    }
    Ok(())
}

fn check_nested(data_type: &DataType, path: &str, seen: &mut usize) -> Result<(), Error> {
    match data_type {
        DataType::Struct(fields) => check_fields(fields, path, seen),
        DataType::List(element) => check_nested(element.data_type(), path, seen),
        DataType::Map(entries, _) => match entries.data_type() {
            DataType::Struct(fields) if fields.len() == 2 => check_nested(fields[1].data_type(), path, seen),
            _ => Ok(()),
        },
        _ => Ok(()),
    }
}

fn bad_name(name: &str) -> Option<String> {
    if name.is_empty() {
        return Some("a name may not be empty".to_owned());
    }
    if name.len() > FIELD_NAME_BYTES_MAX {
        return Some(format!("a name may have at most {FIELD_NAME_BYTES_MAX} bytes"));
    }
    let bad = name.chars().find(|c| FORBIDDEN_CHARACTERS.contains(*c) || c.is_control())?;
    Some(format!("a name may not hold {bad:?} (Delta refuses any of {FORBIDDEN_CHARACTERS:?}); rename it"))
}

fn check_partition_columns(schema: &Schema, partition_columns: &[String]) -> Result<(), Error> {
    let invalid = |column: &str, why: &str| {
        let why = format!("partition column {}: {why}", cut(column));
        Err(Error::invalid("invalid_partition_columns", why).at_column(column))
    };
    let mut seen = HashSet::new();
    for column in partition_columns {
        let Ok(field) = schema.field_with_name(column) else {
            let names = schema.fields().iter().map(|field| field.name().as_str());
            return match nearest_name(column, names) {
                Some(nearest) => invalid(column, &format!("no such column; did you mean {nearest}?")),
                None => invalid(column, "no such column"),
            };
        };
        if field.data_type().is_nested() {
            return invalid(
                column,
                "lists, structs and maps cannot partition a table; choose a plain column",
            );
        }
        if !seen.insert(column) {
            return invalid(column, "named twice");
        }
    }
    if partition_columns.len() == schema.fields().len() {
        return invalid(&partition_columns.join(","), "at least one column must not be a partition column");
    }
    Ok(())
}

/// A producer's text as it stands in a message: quoted, escaped, cut.
pub(crate) fn cut(text: &str) -> String {
    const SHOWN_CHARS_MAX: usize = 64;
    match text.char_indices().nth(SHOWN_CHARS_MAX) {
        Some((end, _)) => format!("{:?}…", &text[..end]),
        None => format!("{text:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(json: &str) -> Result<TableSpec, Error> {
        TableSpec::from_json(json.as_bytes())
    }

    #[test]
    fn a_spec_comes_back_from_its_json() {
        let types = [
            "bool",
            "int8",
            "int16",
            "int32",
            "int64",
            "float32",
            "float64",
            "decimal(10,2)",
            "string",
            "binary",
            "date",
            "timestamp",
            "timestamp_ntz",
            "list<int64>",
            "list<list<string not null> not null>",
            "map<string, struct<a: int8, `b-c`: date not null>>",
            "struct<a: int64 not null, `x``:y`: bool>",
        ];
        let field = |(place, text): (usize, &&str)| {
            assert_eq!(types::text(&types::parse(text).expect("a type")), **text);
            format!(r#"{{"name":"c{place}","type":"{text}","nullable":{}}}"#, place % 2 == 0)
        };
        let fields = types.iter().enumerate().map(field).collect::<Vec<_>>().join(",");
        let json = format!(
            r#"{{"schema":{{"fields":[{fields}]}},"partition_columns":["c10"],
                "properties":{{"delta.appendOnly":"true","sluice.system_columns":"false"}}}}"#
        );
        let first = spec(&json).expect("a spec");
        assert!(!first.system_columns());
        assert_eq!(spec(&first.to_json().to_string()).expect("own JSON"), first);
    }

    #[test]
    fn arrow_type_objects_are_types_too() {
        let spec = spec(
            r#"{"schema":{"fields":[
                {"name":"a","type":{"name":"int","bitWidth":32,"isSigned":false},"nullable":false},
                {"name":"b","type":{"name":"timestamp","unit":"NANOSECOND","timezone":"Europe/Berlin"}},
                {"name":"c","type":{"name":"list"},"children":[{"name":"item","type":{"name":"utf8"},"nullable":true}]},
                {"name":"d","type":{"name":"floatingpoint","precision":"HALF"}},
                {"name":"e","type":{"name":"fixedsizebinary","byteWidth":16},"children":[]}]}}"#,
        );
        let spec = spec.expect("a spec");
        let texts: Vec<_> = spec.schema.fields().iter().map(|field| types::text(field.data_type())).collect();
        assert_eq!(texts, ["int64", "timestamp", "list<string>", "float32", "binary"]);
        assert!(spec.system_columns() && !spec.schema.field(0).is_nullable());
    }

    /// A spec of these columns and this rest: the code of its error, and a word of its message.
    fn check(columns: &str, rest: &str, code: &str, word: &str) {
        let error = spec(&format!(r#"{{"schema":{{"fields":[{columns}]}}{rest}}}"#)).expect_err(word);
        assert_eq!(error.code, code, "{error}");
        assert!(error.message.contains(word), "{error}");
    }

    #[test]
    fn deltas_properties_take_values_of_their_types() {
        for (name, value) in [
            ("delta.checkpointInterval", "10"),
            ("delta.dataSkippingNumIndexedCols", "-1"),
            ("delta.logRetentionDuration", "interval 30 days"),
            ("delta.deletedFileRetentionDuration", "INTERVAL 1 Week"),
            ("delta.checkpointPolicy", "classic"),
            ("delta.isolationLevel", "Serializable"),
            ("delta.targetFileSize", "104857600"),
            ("delta.targetFileSize", "100MB"),
            ("delta.nothing", "anything"),
            ("owner", "anyone"),
        ] {
            let properties = format!(r#"{{"{name}":"{value}"}}"#);
            let json = r#"{"schema":{"fields":[{"name":"a","type":"int64"}]},"properties":"#;
            spec(&format!("{json}{properties}}}")).expect(name);
        }
    }

    #[test]
    fn bad_specs_are_refused_by_name() {
        let a = r#"{"name":"a","type":"int64"}"#;
        check("", "", "invalid_schema", "no column");
        check(&format!("{a},{}", a.replace("\"a\"", "\"A\"")), "", "invalid_schema", "twice");
        for name in [
            "",
            "a b",
            "a,b",
            "a;b",
            "a{b",
            "a(b",
            "a=b",
            "a\\tb",
            "a\\nb",
            "_stream",
            "_OFFSET_x",
            "_ingested_at",
        ] {
            check(&a.replace("\"a\"", &format!("\"{name}\"")), "", "invalid_schema", "name");
        }
        check(r#"{"name":"a","type":"struct<`x y`: int8>"}"#, "", "invalid_schema", "a.x y");
        check(r#"{"name":"a","type":"strng"}"#, "", "invalid_type", "did you mean string?");
        check(r#"{"name":"a","type":"list<int64"}"#, "", "invalid_type", "expected `>`");
        check(r#"{"name":"a","type":"decimal(39,0)"}"#, "", "invalid_type", "38");
        check(r#"{"name":"a","type":"map<int64,bool>"}"#, "", "invalid_type", "keys");
        let deep = format!(r#"{{"name":"a","type":"{}int64{}"}}"#, "list<".repeat(40), ">".repeat(40));
        check(&deep, "", "invalid_type", "deeper");
        check(r#"{"name":"a","type":{"name":"duration"}}"#, "", "unsupported_type", "int64");
        check(r#"{"name":"a","type":{"name":"null"}}"#, "", "unsupported_type", "leave the column out");
        check(r#"{"name":"a","type":"int64","nulable":true}"#, "", "invalid_table_spec", "nullable");
        check(a, r#","partitions":[]"#, "invalid_table_spec", "partition_columns");
        check(a, r#","partition_columns":["b"]"#, "invalid_partition_columns", "no such column");
        check(a, r#","partition_columns":["a"]"#, "invalid_partition_columns", "at least one");
        let nested = format!(r#"{a},{{"name":"l","type":"list<int64>"}}"#);
        check(&nested, r#","partition_columns":["l"]"#, "invalid_partition_columns", "plain");
        check(
            a,
            r#","properties":{"sluice.system_column":"true"}"#,
            "invalid_property",
            "sluice.system_columns",
        );
        check(a, r#","properties":{"sluice.system_columns":"no"}"#, "invalid_property", "true or false");
        let retention = r#","properties":{"delta.setTransactionRetentionDuration":"interval 1 day"}"#;
        check(a, retention, "invalid_property", "twice");
        for property in [r#""delta.appendOnly":"1""#, r#""delta.enableChangeDataFeed":"maybe""#] {
            check(a, &format!(",\"properties\":{{{property}}}"), "invalid_property", "true or false");
        }
        for (property, word) in [
            (r#""delta.checkpointInterval":"never""#, "a whole number from 1"),
            (r#""delta.checkpointInterval":"0""#, "a whole number from 1"),
            (r#""delta.dataSkippingNumIndexedCols":"-7""#, "-1"),
            (r#""delta.logRetentionDuration":"yesterday""#, "interval 7 days"),
            (r#""delta.deletedFileRetentionDuration":"interval -1 day""#, "interval 7 days"),
            (r#""delta.checkpointPolicy":"v3""#, "classic or v2"),
            (r#""delta.targetFileSize":"big""#, "100mb"),
            (r#""delta.autoOptimize.autoCompact":"yes""#, "true or false"),
        ] {
            check(a, &format!(",\"properties\":{{{property}}}"), "invalid_property", word);
        }
        let mapping = r#","properties":{"delta.columnMapping.mode":"name"}"#;
        check(a, mapping, "invalid_property", "map their columns");
        assert_eq!(spec("[]").expect_err("no object").code, "invalid_table_spec");
        let wide: Vec<_> = (0..2001).map(|n| a.replace("\"a\"", &format!("\"c{n}\""))).collect();
        check(&wide.join(","), "", "invalid_schema", "2000");
    }
}
