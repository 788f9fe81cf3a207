//! Names and paths: what no table, stream or request may be called.

use std::collections::BTreeSet;

use serde_json::json;

use crate::ledger::Ledger;
use crate::server::{Server, check_refusal};
use crate::wire::Producer;

#[tokio::test]
async fn a_table_that_is_not_there_is_refused_and_not_made() {
    let server = Server::start(&[]);
    check_refusal("GET", server.request("GET", "/v1/tables/nothing", "").await, (404, "table_not_found"));
    for framed in [false, true] {
        let mut producer = Producer::connect(&server, "nothing/stream", framed).await;
        if framed {
            producer.frame(0x01, b"{}").await;
        } else {
            producer.text("{\"id\":1}").await;
        }
        let (error, close) = producer.refusal().await;
        assert_eq!((error.code.as_str(), close), ("table_not_found", 4404), "{error}");
    }
    server.expect_no_table("nothing").await;
    let mut ledger = Ledger::create(&server, "nothing", &[]).await;
    ledger.good().await;
    ledger.check().await;
    server.end();
}

#[tokio::test]
async fn a_bad_table_name_is_refused_in_every_place_that_takes_one() {
    let server = Server::start(&[]);
    let mut ledger = Ledger::create(&server, "t", &[]).await;
    let spec = r#"{"schema":{"fields":[{"name":"id","type":"int64"}]}}"#;
    let long = "a".repeat(246);
    let bad = [
        "..",
        ".",
        "%2e%2e",
        "../x",
        "..%2Fx",
        "a/b",
        "a%2Fb",
        "",
        "%00",
        "a%00",
        "a..b",
        "a.b.c.d",
        "a%20b",
        "%ff",
        "na%C3%AFve",
        "a\\b",
        "a;b",
        &long,
    ];
    let upgrade = "connection: Upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n\
                   sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n";
    for name in bad {
        let path = format!("/v1/tables/{name}");
        check_refusal(name, server.request("GET", &path, "").await, (400, "invalid_table_name"));
        check_refusal(name, server.put(name, spec).await, (400, "invalid_table_name"));
        let stream = format!("GET {path}/stream HTTP/1.1\r\nhost: x\r\n{upgrade}\r\n");
        check_refusal(name, server.raw(stream.as_bytes()).await, (400, "invalid_table_name"));
    }
    for (name, code) in
        [("..", "invalid_frame"), ("", "invalid_frame"), (&long, "invalid_frame"), ("u", "table_mismatch")]
    {
        let mut producer = Producer::connect(&server, "t/stream", true).await;
        producer.frame(0x01, json!({ "table": name }).to_string().as_bytes()).await;
        let (error, close) = producer.refusal().await;
        assert_eq!((error.code.as_str(), close), (code, 1008), "{name}: {error}");
        ledger.good().await;
    }
    let (_, tables) = server.request("GET", "/v1/tables", "").await;
    assert_eq!(tables, r#"{"tables":["main.default.t"]}"#);
    let made = std::fs::read_dir(server.tables_dir()).expect("readable");
    let made: BTreeSet<_> = made.map(|entry| entry.expect("an entry").file_name()).collect();
    assert_eq!(made, BTreeSet::from(["_sluice".into(), "main".into()]));
    ledger.check().await;
    server.end();
}

#[tokio::test]
async fn a_bad_stream_name_is_refused() {
    let server = Server::start(&[]);
    let mut ledger = Ledger::create(&server, "t", &[]).await;
    let long = "n".repeat(201);
    for name in ["", "a%20b", "%00", "a%ff", "%F0%9F%98%80", "a%23b", &long] {
        let path = format!("/v1/tables/t/stream?name={name}");
        check_refusal(name, server.request("GET", &path, "").await, (400, "invalid_stream_name"));
    }
    for name in ["", "a b", "\0", "😀", &long] {
        let mut producer = Producer::connect(&server, "t/stream", true).await;
        producer.frame(0x01, json!({ "name": name }).to_string().as_bytes()).await;
        assert_eq!(producer.refusal().await.0.code, "invalid_frame", "{name}");
        ledger.good().await;
    }
    // At its limit, and with all that looks like a path.
    let name = format!("../..//{}", "n".repeat(193));
    let mut producer = Producer::plain_at(&server, &format!("t/stream?name={name}")).await;
    ledger.send(&mut producer).await;
    assert!(producer.stream.starts_with(&name), "{}", producer.stream);
    drop(producer);
    let mut other = Producer::connect(&server, "t/stream?name=a", true).await;
    other.frame(0x01, br#"{"name":"b"}"#).await;
    assert_eq!(other.refusal().await.0.code, "stream_name_mismatch");
    drop(other);
    ledger.good().await;
    ledger.check().await;
    server.end();
}

#[tokio::test]
async fn wrong_methods_paths_and_upgrades_are_json_errors() {
    let server = Server::start(&[("SLUICE_GATEWAY__HANDSHAKE_TIMEOUT_MS", "1000")]);
    let mut ledger = Ledger::create(&server, "t", &[]).await;
    for (method, path, status, code) in [
        ("GET", "/nowhere", 404, "unknown_path"),
        ("GET", "/v2/tables", 404, "unknown_path"),
        ("GET", "/v1/tables/t/nothing", 400, "invalid_table_name"),
        ("GET", "//v1/tables", 404, "unknown_path"),
        ("GET", "/../../etc/passwd", 404, "unknown_path"),
        ("DELETE", "/v1/tables/t", 405, "method_not_allowed"),
        ("POST", "/v1/tables/t", 405, "method_not_allowed"),
        ("POST", "/v1/tables", 405, "method_not_allowed"),
        ("PUT", "/v1/tables", 405, "method_not_allowed"),
        ("POST", "/v1/tables/t/stream", 405, "method_not_allowed"),
        ("PUT", "/healthz", 405, "method_not_allowed"),
        ("BREW", "/v1/tables/t", 405, "method_not_allowed"),
        ("GET", "/v1/tables/t/stream", 426, "upgrade_required"),
        ("GET", "/v1/tables/t/stream?nam=x", 400, "invalid_query"),
        ("GET", "/v1/tables/t/stream?unknown=maybe", 400, "invalid_query"),
        ("GET", "/v1/tables/t/stream?name=a&name=b", 400, "invalid_query"),
    ] {
        let case = format!("{method} {path}");
        check_refusal(&case, server.request(method, path, "").await, (status, code));
    }
    let upgrade = "host: x\r\nconnection: Upgrade\r\nupgrade: websocket\r\n";
    for (headers, status, code) in [
        ("sec-websocket-version: 12\r\n", 426, "websocket_version"),
        ("sec-websocket-version: 13\r\n", 400, "websocket_key"),
        ("sec-websocket-version: 13\r\nsec-websocket-key: short\r\n", 400, "websocket_key"),
    ] {
        let request = format!("GET /v1/tables/t/stream HTTP/1.1\r\n{upgrade}{headers}\r\n");
        check_refusal(headers, server.raw(request.as_bytes()).await, (status, code));
    }
    for request in
        [&b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n"[..], b"GET\r\n\r\n", b"\0\0\0\0\r\n\r\n"]
    {
        assert_eq!(server.raw(request).await.0, 400, "{request:?}");
    }
    ledger.good().await;
    ledger.check().await;
    server.end();
}
