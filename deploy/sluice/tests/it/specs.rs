//! Table specs that make no table: refused before anything is made.

use serde_json::{Value, json};

use crate::ledger::Ledger;
use crate::server::{Server, check_refusal};

fn spec(fields: Value) -> String {
    json!({ "schema": { "fields": fields } }).to_string()
}

fn column(name: &str, kind: &str) -> Value {
    json!([{ "name": "id", "type": "int64" }, { "name": name, "type": kind }])
}

fn named(name: &str) -> String {
    spec(column(name, "string"))
}

fn typed(kind: &str) -> String {
    spec(column("c", kind))
}

fn partitioned(columns: &[&str]) -> String {
    let fields = json!([{ "name": "id", "type": "int64" }, { "name": "l", "type": "list<int64>" }]);
    json!({ "schema": { "fields": fields }, "partition_columns": columns }).to_string()
}

fn with_property(name: &str, value: &str) -> String {
    let fields = json!([{ "name": "id", "type": "int64" }]);
    json!({ "schema": { "fields": fields }, "properties": { name: value } }).to_string()
}

/// Refuses a spec; then a good one of the same name makes a table that works.
async fn check(server: &Server, number: usize, (spec, code): (String, &str)) {
    let table = format!("t{number}");
    let shown = spec.chars().take(150).collect::<String>();
    check_refusal(&shown, server.put(&table, &spec).await, (400, code));
    server.expect_no_table(&table).await;
    let mut ledger = Ledger::create(server, &table, &[]).await;
    ledger.good().await;
    ledger.check().await;
}

#[tokio::test]
async fn what_is_no_spec_is_refused_and_leaves_nothing() {
    let server = Server::start(&[]);
    let deep = "[".repeat(10_000) + &"]".repeat(10_000);
    let fields = r#"{"schema":{"fields":[{"name":"id","type":"int64"}]}"#;
    let cases = [
        String::new(),
        "nonsense".to_owned(),
        "[]".to_owned(),
        "{}".to_owned(),
        "null".to_owned(),
        "\u{feff}{}".to_owned(),
        format!("{fields},\"partitions\":[]}}"),
        format!("{fields},\"schema\":{{\"fields\":[]}}}}"),
        format!("{fields},\"properties\":{{\"a\":1}}}}"),
        format!("{fields},\"properties\":{deep}}}"),
        format!("{fields}}}}}"),
        r#"{"schema":{"fields":[{"name":"id\ud800","type":"int64"}]}}"#.to_owned(),
        r#"{"schema":{"fields":[{"name":"id"}]}}"#.to_owned(),
        r#"{"schema":{"fields":[{"name":7,"type":"int64"}]}}"#.to_owned(),
    ];
    for (number, case) in cases.into_iter().enumerate() {
        check(&server, number, (case, "invalid_table_spec")).await;
    }
    server.end();
}

#[tokio::test]
async fn bad_columns_and_types_are_refused_and_leave_nothing() {
    let server = Server::start(&[]);
    let many: Vec<_> = (0..2001).map(|n| json!({ "name": format!("c{n}"), "type": "int8" })).collect();
    let deep = "list<".repeat(10_000) + "int8" + &">".repeat(10_000);
    let twice =
        |a: &str, b: &str| spec(json!([{ "name": a, "type": "int8" }, { "name": b, "type": "int8" }]));
    let cases = [
        (typed("intt64"), "invalid_type"),
        (typed(""), "invalid_type"),
        (typed("list<int64"), "invalid_type"),
        (typed("list<int64>>"), "invalid_type"),
        (typed("map<int64,string>"), "invalid_type"),
        (typed("struct<>"), "invalid_type"),
        (typed("struct<a: int64, a: string>"), "invalid_schema"),
        (typed("decimal(39,0)"), "invalid_type"),
        (typed("decimal(5,6)"), "invalid_type"),
        (typed("decimal(99999999999999999999,1)"), "invalid_type"),
        (typed(&deep), "invalid_type"),
        (typed(&"x".repeat(900_000)), "invalid_type"),
        (spec(json!([])), "invalid_schema"),
        (spec(json!(many)), "invalid_schema"),
        (twice("c", "c"), "invalid_schema"),
        (twice("c", "C"), "invalid_schema"),
        (named(""), "invalid_schema"),
        (named("a b"), "invalid_schema"),
        (named("a\0b"), "invalid_schema"),
        (named("a\nb"), "invalid_schema"),
        (named("a,b"), "invalid_schema"),
        (named("_stream"), "invalid_schema"),
        (named("_offset"), "invalid_schema"),
        (named("_Ingested_At"), "invalid_schema"),
        (named("_offset2"), "invalid_schema"),
        (named(&"n".repeat(256)), "invalid_schema"),
        (named(&"n".repeat(1_000_000)), "invalid_schema"),
        (named(&"😀".repeat(200_000)), "invalid_schema"),
        (named(&"😀".repeat(1000)), "invalid_schema"),
    ];
    for (number, case) in cases.into_iter().enumerate() {
        check(&server, number, case).await;
    }
    server.end();
}

#[tokio::test]
async fn bad_partitions_and_properties_are_refused_and_leave_nothing() {
    let server = Server::start(&[]);
    let cases = [
        (partitioned(&["nothing"]), "invalid_partition_columns"),
        (partitioned(&["ID"]), "invalid_partition_columns"),
        (partitioned(&["id", "id"]), "invalid_partition_columns"),
        (partitioned(&["l"]), "invalid_partition_columns"),
        (partitioned(&["_offset"]), "invalid_partition_columns"),
        (partitioned(&[&"n".repeat(1_000_000)]), "invalid_partition_columns"),
        (with_property("", "x"), "invalid_property"),
        (with_property("sluice.systemcolumns", "false"), "invalid_property"),
        (with_property("sluice.system_columns", "maybe"), "invalid_property"),
        (with_property("sluice.nothing", "1"), "invalid_property"),
        (with_property("delta.enableChangeDataFeed", "maybe"), "invalid_property"),
        (with_property("delta.appendOnly", "1"), "invalid_property"),
        (with_property("delta.checkpointInterval", "never"), "invalid_property"),
        (with_property("delta.logRetentionDuration", "yesterday"), "invalid_property"),
        (with_property("delta.columnMapping.mode", "name"), "invalid_property"),
        (with_property("delta.setTransactionRetentionDuration", "interval 1 day"), "invalid_property"),
    ];
    for (number, case) in cases.into_iter().enumerate() {
        check(&server, number, case).await;
    }
    server.end();
}

#[tokio::test]
async fn a_property_of_deltas_is_refused_or_makes_a_table_that_works() {
    let server = Server::start(&[]);
    let properties = [
        ("delta.nothing", "1"),
        ("delta.feature.nothing", "supported"),
        ("delta.feature.appendOnly", "supported"),
        ("delta.feature.columnMapping", "supported"),
        ("delta.feature.catalogManaged", "supported"),
        ("delta.columnMapping.mode", "id"),
        ("delta.columnMapping.mode", "none"),
        ("delta.appendOnly", "true"),
        ("delta.enableChangeDataFeed", "true"),
        ("delta.enableDeletionVectors", "true"),
        ("delta.enableInCommitTimestamps", "true"),
        ("delta.enableRowTracking", "true"),
        ("delta.enableIcebergCompatV1", "true"),
        ("delta.enableTypeWidening", "true"),
        ("delta.checkpointPolicy", "v2"),
        ("delta.checkpointInterval", "never"),
        ("delta.logRetentionDuration", "yesterday"),
        ("delta.dataSkippingNumIndexedCols", "-7"),
        ("delta.dataSkippingStatsColumns", "nothing"),
        ("delta.minWriterVersion", "99"),
        ("delta.constraints.c", "id < 0"),
        ("some property", "\0"),
    ];
    for (number, (name, value)) in properties.into_iter().enumerate() {
        let table = format!("t{number}");
        let (status, body) = server.put(&table, &with_property(name, value)).await;
        println!("{name} = {value}: {status} {body:.200}");
        let mut ledger = match status {
            201 => Ledger::new(&server, &table),
            _ => {
                let answer = serde_json::from_str::<Value>(&body).expect("JSON");
                assert_eq!((status, &answer["error"]["kind"]), (400, &json!("Invalid")), "{body}");
                server.expect_no_table(&table).await;
                Ledger::create(&server, &table, &[]).await
            }
        };
        ledger.good().await;
        ledger.check().await;
    }
    server.end();
}

#[tokio::test]
async fn a_table_that_is_there_keeps_its_shape() {
    let server = Server::start(&[]);
    let mut ledger = Ledger::create(&server, "t", &[("n", "int32")]).await;
    ledger.good().await;
    let before = server.describe("t").await;
    for other in [named("n"), typed("int32"), partitioned(&["id"]), with_property("a", "b")] {
        check_refusal(&other, server.put("t", &other).await, (400, "table_exists"));
    }
    let large = format!("{{\"schema\":{}", " ".repeat(1 << 20));
    check_refusal("1 MiB", server.put("t", &large).await, (413, "spec_too_large"));
    assert_eq!(
        server.describe("t").await.map(|t| t["version"].clone()),
        before.map(|t| t["version"].clone())
    );
    ledger.good().await;
    ledger.check().await;
    server.end();
}
