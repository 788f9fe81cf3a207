//! `GET /api/2.1/unity-catalog/tables/{table}`: a table's columns in Unity Catalog's words, as far as the tools of
//! Databricks's clients ask for them.
//!
//! *Owns*: names of types, the form of the answer and of its errors.
//! *Does not own*: what the columns are (the pods).

use std::sync::Arc;

use arrow::datatypes::{DataType, Field};
use axum::extract::State;
use axum::response::Response;
use serde_json::{Value, json};
use sluice_shared::error::Error;
use sluice_shared::ids::TableName;
use sluice_shared::table::described_columns;

use crate::app::App;
use crate::edge::http::{Granted, Refusal, ToDescribe, json_response};
use crate::edge::post::zerobus_refusal;

/// Answers as Unity Catalog would.
pub(super) async fn table(
    State(app): State<Arc<App>>,
    table: Result<Granted<ToDescribe>, Refusal>,
) -> Response {
    match described(&app, table).await {
        Ok(body) => json_response(body.to_string()),
        Err(refusal) => zerobus_refusal(refusal),
    }
}

async fn described(app: &App, table: Result<Granted<ToDescribe>, Refusal>) -> Result<Value, Refusal> {
    let Granted { table, .. } = table?;
    let description = app.upstream.describe_table(&table).await?;
    let broken = || Error::internal(format!("the description of {table} has no columns"));
    Ok(in_their_words(&table, &description).ok_or_else(broken)?)
}

fn in_their_words(table: &TableName, description: &[u8]) -> Option<Value> {
    let fields = described_columns(description)?;
    let description: Value = serde_json::from_slice(description).ok()?;
    let partitions = description["spec"]["partition_columns"].as_array().cloned().unwrap_or_default();
    let column = |(position, field): (usize, &Arc<Field>)| {
        let partition_index = partitions.iter().position(|name| name == field.name().as_str());
        column(position, field, partition_index)
    };
    let mut names = table.as_str().split('.');
    Some(json!({
        "catalog_name": names.next(),
        "schema_name": names.next(),
        "name": names.next(),
        "full_name": table,
        "table_id": description["id"],
        "table_type": "MANAGED",
        "data_source_format": "DELTA",
        "columns": fields.fields().iter().enumerate().map(column).collect::<Vec<_>>(),
    }))
}

fn column(position: usize, field: &Field, partition_index: Option<usize>) -> Value {
    let (type_name, type_text) = type_names(field.data_type());
    let mut column = json!({
        "name": field.name(),
        "type_text": type_text,
        "type_name": type_name,
        "type_json": spark_field(field).to_string(),
        "position": position,
        "nullable": field.is_nullable(),
    });
    if let DataType::Decimal128(precision, scale) = field.data_type() {
        (column["type_precision"], column["type_scale"]) = ((*precision).into(), (*scale).into());
    }
    if let Some(index) = partition_index {
        column["partition_index"] = index.into();
    }
    column
}

/// Their `type_name`, and the type as SQL has it.
fn type_names(data_type: &DataType) -> (&'static str, String) {
    let (name, text) = match data_type {
        DataType::Boolean => ("BOOLEAN", "boolean"),
        DataType::Int8 => ("BYTE", "tinyint"),
        DataType::Int16 => ("SHORT", "smallint"),
        DataType::Int32 => ("INT", "int"),
        DataType::Int64 => ("LONG", "bigint"),
        DataType::Float32 => ("FLOAT", "float"),
        DataType::Float64 => ("DOUBLE", "double"),
        DataType::Binary => ("BINARY", "binary"),
        DataType::Date32 => ("DATE", "date"),
        DataType::Timestamp(_, Some(_)) => ("TIMESTAMP", "timestamp"),
        DataType::Timestamp(_, None) => ("TIMESTAMP_NTZ", "timestamp_ntz"),
        DataType::Decimal128(precision, scale) => {
            return ("DECIMAL", format!("decimal({precision},{scale})"));
        }
        DataType::List(element) => return ("ARRAY", format!("array<{}>", type_names(element.data_type()).1)),
        DataType::Map(entries, _) => {
            let (key, value) = key_and_value(entries);
            return (
                "MAP",
                format!("map<{},{}>", type_names(key.data_type()).1, type_names(value.data_type()).1),
            );
        }
        DataType::Struct(fields) => {
            let named = |field: &Arc<Field>| format!("{}:{}", field.name(), type_names(field.data_type()).1);
            return ("STRUCT", format!("struct<{}>", fields.iter().map(named).collect::<Vec<_>>().join(",")));
        }
        _ => ("STRING", "string"),
    };
    (name, text.to_owned())
}

/// A column as Spark, and so Delta's log, writes it.
fn spark_field(field: &Field) -> Value {
    json!({ "name": field.name(), "type": spark_type(field.data_type()), "nullable": field.is_nullable(), "metadata": {} })
}

fn spark_type(data_type: &DataType) -> Value {
    match data_type {
        DataType::Int8 => json!("byte"),
        DataType::Int16 => json!("short"),
        DataType::Int32 => json!("integer"),
        DataType::Int64 => json!("long"),
        DataType::List(element) => {
            let (element_type, nullable) = (spark_type(element.data_type()), element.is_nullable());
            json!({ "type": "array", "elementType": element_type, "containsNull": nullable })
        }
        DataType::Map(entries, _) => {
            let (key, value) = key_and_value(entries);
            let (key_type, value_type) = (spark_type(key.data_type()), spark_type(value.data_type()));
            let nullable = value.is_nullable();
            json!({ "type": "map", "keyType": key_type, "valueType": value_type, "valueContainsNull": nullable })
        }
        DataType::Struct(fields) => {
            let fields: Vec<Value> = fields.iter().map(|field| spark_field(field)).collect();
            json!({ "type": "struct", "fields": fields })
        }
        other => json!(type_names(other).1),
    }
}

fn key_and_value(entries: &Field) -> (&Field, &Field) {
    match entries.data_type() {
        DataType::Struct(fields) if fields.len() == 2 => (&fields[0], &fields[1]),
        // Arrow's own constructor lets no other through.
        _ => (entries, entries),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_named_as_unity_catalog_names_them() {
        let types = [
            ("bool", "BOOLEAN", "boolean", json!("boolean")),
            ("int8", "BYTE", "tinyint", json!("byte")),
            ("int64", "LONG", "bigint", json!("long")),
            ("float64", "DOUBLE", "double", json!("double")),
            ("decimal(10,2)", "DECIMAL", "decimal(10,2)", json!("decimal(10,2)")),
            ("string", "STRING", "string", json!("string")),
            ("timestamp", "TIMESTAMP", "timestamp", json!("timestamp")),
            ("timestamp_ntz", "TIMESTAMP_NTZ", "timestamp_ntz", json!("timestamp_ntz")),
            (
                "list<int32>",
                "ARRAY",
                "array<int>",
                json!({ "type": "array", "elementType": "integer", "containsNull": true }),
            ),
            (
                "map<string,date>",
                "MAP",
                "map<string,date>",
                json!({ "type": "map", "keyType": "string", "valueType": "date", "valueContainsNull": true }),
            ),
            (
                "struct<a: int16>",
                "STRUCT",
                "struct<a:smallint>",
                json!({ "type": "struct", "fields": [{ "name": "a", "type": "short", "nullable": true, "metadata": {} }] }),
            ),
        ];
        for (ours, name, text, spark) in types {
            let fields = json!([{ "name": "c", "type": ours, "nullable": false }]);
            let description =
                json!({ "id": "x", "spec": { "schema": { "fields": fields }, "partition_columns": ["c"] } });
            let table: TableName = "readings".parse().expect("valid");
            let told = in_their_words(&table, description.to_string().as_bytes()).expect(ours);
            assert_eq!(told["full_name"], "main.default.readings");
            assert_eq!((&told["catalog_name"], &told["name"]), (&json!("main"), &json!("readings")));
            let column = &told["columns"][0];
            assert_eq!((&column["type_name"], &column["type_text"]), (&json!(name), &json!(text)), "{ours}");
            assert_eq!((&column["partition_index"], &column["nullable"]), (&json!(0), &json!(false)));
            let type_json: Value =
                serde_json::from_str(column["type_json"].as_str().expect("text")).expect("JSON");
            assert_eq!(
                type_json,
                json!({ "name": "c", "type": spark, "nullable": false, "metadata": {} }),
                "{ours}"
            );
        }
    }
}
