//! First records that make no table, where tables are made from first records.

use base64::Engine;
use serde_json::json;

use crate::arrow::{ids, ipc, schema_of};
use crate::ledger::Ledger;
use crate::server::Server;
use crate::wire::Producer;

#[tokio::test]
async fn first_records_that_make_no_table_are_refused_and_leave_nothing() {
    let server = Server::with_auto_create(true, &[]);
    let nested = |depth: usize| format!("{{\"id\":{}{}}}", "[".repeat(depth), "]".repeat(depth));
    let many: Vec<String> = (0..2001).map(|n| format!("\"c{n}\":1")).collect();
    let key = |name: &str| format!("{{\"id\":1,{}:1}}", json!(name));
    let cases = [
        ("nonsense".to_owned(), "cannot_infer"),
        ("{}".to_owned(), "cannot_infer"),
        ("[1,2,3]".to_owned(), "cannot_infer"),
        ("{\"id\":1}\n{\"id\":\"x\"}".to_owned(), "cannot_infer"),
        ("{\"id\":{}}".to_owned(), "cannot_infer"),
        (nested(33), "cannot_infer"),
        (nested(10_000), "cannot_infer"),
        (format!("{{{}}}", many.join(",")), "cannot_infer"),
        (key(""), "invalid_schema"),
        (key("a b"), "invalid_schema"),
        (key("a\0b"), "invalid_schema"),
        (key("_offset"), "invalid_schema"),
        (key("ID"), "invalid_schema"),
        (key(&"n".repeat(256)), "invalid_schema"),
        (key(&"n".repeat(1 << 20)), "invalid_schema"),
        (key(&"😀".repeat(2000)), "invalid_schema"),
    ];
    for (number, (text, code)) in cases.into_iter().enumerate() {
        let table = format!("t{number}");
        let mut producer = Producer::plain(&server, &table).await;
        producer.text(&text).await;
        let (error, close) = producer.refusal().await;
        assert_eq!((error.code.as_str(), close, error.offset), (code, 1008, Some(0)), "{text:.100}: {error}");
        server.expect_no_table(&table).await;
        let mut ledger = Ledger::new(&server, &table);
        ledger.good().await;
        ledger.check().await;
    }
    server.expect_no_stream().await;
    server.end();
}

#[tokio::test]
async fn a_stated_schema_that_makes_no_table_is_refused_and_leaves_nothing() {
    let server = Server::with_auto_create(true, &[]);
    let base64 = |bytes: &[u8]| base64::engine::general_purpose::STANDARD.encode(bytes);
    let good = ipc(&ids(&[]), None);
    let cases = [
        ("*".to_owned(), "invalid_schema"),
        (base64(b"nonsense"), "invalid_arrow"),
        (base64(&good[..good.len() / 4]), "invalid_arrow"),
        (base64(&[0xff; 64]), "invalid_arrow"),
        (base64(&schema_of("t", "time64")), "unsupported_type"),
        (base64(&schema_of("_offset", "int64")), "invalid_schema"),
        (base64(&schema_of(&"n".repeat(1 << 20), "int64")), "invalid_schema"),
        (base64(&schema_of(&"😀".repeat(2000), "time64")), "unsupported_type"),
    ];
    for (number, (schema, code)) in cases.into_iter().enumerate() {
        let table = format!("t{number}");
        let mut producer = Producer::connect(&server, &format!("{table}/stream"), true).await;
        let open = json!({ "encoding": "arrow", "schema": schema });
        producer.frame(0x01, open.to_string().as_bytes()).await;
        let (error, close) = producer.refusal().await;
        assert_eq!((error.code.as_str(), close), (code, 1008), "{schema:.100}: {error}");
        server.expect_no_table(&table).await;
        let mut ledger = Ledger::new(&server, &table);
        ledger.good().await;
        ledger.check().await;
    }
    server.end();
}
