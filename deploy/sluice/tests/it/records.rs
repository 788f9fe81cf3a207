//! JSON records that do not fit: named by offset, code and column; the records around them go on.

use sluice_shared::frame::Rejected;

use crate::ledger::Ledger;
use crate::server::Server;
use crate::wire::Producer;

const COLUMNS: [(&str, &str); 9] = [
    ("n", "int32"),
    ("f", "float64"),
    ("s", "string"),
    ("d", "decimal(10,2)"),
    ("t", "timestamp"),
    ("b", "binary"),
    ("l", "list<int64>"),
    ("o", "struct<a: int64>"),
    ("m", "map<string,int64>"),
];
const RECORD_BYTES_MAX: usize = 2 << 20;
const FRAME_BYTES_MAX: usize = 6 << 20;

fn server() -> Server {
    let record = RECORD_BYTES_MAX.to_string();
    let frame = FRAME_BYTES_MAX.to_string();
    let limits =
        [("SLUICE_POD__RECORD_BYTES_MAX", record.as_str()), ("SLUICE_GATEWAY__FRAME_BYTES_MAX", &frame)];
    Server::start(&limits)
}

/// Good, bad, good; message by message, and as one frame. The bad one is refused by this code and column.
async fn check(ledger: &mut Ledger<'_>, server: &Server, bad: &[u8], code: &str, column: Option<&str>) {
    let shown = String::from_utf8_lossy(&bad[..bad.len().min(100)]).into_owned();
    let is_refusal = |refused: Vec<Rejected>| {
        let named: Vec<_> =
            refused.iter().map(|r| (r.offset, r.code.as_str(), r.column.as_deref())).collect();
        assert_eq!(named, [(1, code, column)], "{shown}: {refused:?}");
        assert!(refused[0].message.chars().count() <= 1024, "{refused:?}");
    };
    if let Ok(text) = std::str::from_utf8(bad) {
        let mut producer = Producer::plain(server, &ledger.table).await;
        ledger.send(&mut producer).await;
        assert!(producer.text(text).await, "{shown}");
        let refused = producer.until_durable(1).await;
        is_refusal(refused);
        producer.next_offset = 2;
        ledger.send(&mut producer).await;
    }
    let (first, last) = (ledger.id(), ledger.id());
    let lines =
        [format!("{{\"id\":{first}}}\n").as_bytes(), bad, format!("\n{{\"id\":{last}}}").as_bytes()].concat();
    let mut producer = Producer::framed(server, &ledger.table, serde_json::json!({})).await;
    assert!(producer.records(0, 3, &lines).await, "{shown}");
    is_refusal(producer.until_durable(2).await);
    ledger.owe(&producer.stream, 0, first);
    ledger.owe(&producer.stream, 2, last);
    drop(producer);
    ledger.good().await;
}

#[tokio::test]
async fn what_is_no_json_object_is_refused() {
    let server = server();
    let mut ledger = Ledger::create(&server, "t", &COLUMNS).await;
    let unclosed = "[".repeat(10_000);
    let objects = "{\"id\":".repeat(10_000);
    let deep = format!("{}{}", "{\"id\":[".repeat(10_000), "]}".repeat(10_000));
    for bad in [
        "nonsense",
        "{\"id\":1",
        "{\"id\":1}}",
        "{\"id\":1,}",
        "{\"id\":01}",
        "{\"id\":+1}",
        "{\"id\":0x1}",
        "{id:1}",
        "{'id':1}",
        "{\"id\" 1}",
        "{\"id\":1} {\"id\":2}",
        "{\"id\":1,\"f\":NaN}",
        "{\"id\":1,\"f\":Infinity}",
        "{\"id\":1,\"f\":-Infinity}",
        "{\"id\":1,\"f\":.5}",
        "{\"id\":1,\"s\":\"a\0b\"}",
        "{\"id\":1\0}",
        "\u{feff}{\"id\":1}",
        "{\"id\":1,\"s\":\"\\x\"}",
        "{\"id\":1,\"s\":\"\\u12\"}",
        "{\"id\":1,\"s\":\"\\ud800\"}",
        "{\"id\":1,\"s\":\"\\udc00\"}",
        "{\"id\":1,\"s\":\"\\ud800\\u0041\"}",
        "{\"id\":1,\"s\":\"\\ud800\\ud800\"}",
        &unclosed,
        &objects,
        &deep,
        &format!("{{\"id\":1,\"l\":{deep}}}"),
        &format!("{{\"id\":1,\"x\":{deep}}}"),
    ] {
        check(&mut ledger, &server, bad.as_bytes(), "not_json", None).await;
    }
    for bad in [
        &b"\xff"[..],
        b"{\"id\":1,\"s\":\"\xff\"}",
        b"{\"id\":1,\"s\":\"\xed\xa0\x80\"}",
        b"{\"id\":1,\"\xc3\":1}",
    ] {
        check(&mut ledger, &server, bad, "not_json", None).await;
    }
    for bad in ["42", "\"text\"", "null", "true", "[{\"id\":1}]x"] {
        let code = if bad.ends_with('x') { "not_json" } else { "wrong_type" };
        check(&mut ledger, &server, bad.as_bytes(), code, None).await;
    }
    ledger.check().await;
    server.end();
}

#[tokio::test]
async fn values_that_do_not_fit_are_refused_by_column() {
    let server = server();
    let mut ledger = Ledger::create(&server, "t", &COLUMNS).await;
    let digits = "9".repeat(100_000);
    let deep = format!("{}{}", "[".repeat(1000), "]".repeat(1000));
    let objects = format!("{}1{}", "{\"a\":".repeat(1000), "}".repeat(1000));
    for (value, code, column) in [
        ("\"id\":\"x\"".to_owned(), "wrong_type", "id"),
        ("\"id\":1.0".to_owned(), "wrong_type", "id"),
        ("\"id\":true".to_owned(), "wrong_type", "id"),
        ("\"id\":null".to_owned(), "missing_value", "id"),
        ("\"n\":1".to_owned(), "missing_value", "id"),
        ("\"id\":9223372036854775808".to_owned(), "out_of_range", "id"),
        (format!("\"id\":{digits}"), "out_of_range", "id"),
        (format!("\"id\":-{digits}"), "out_of_range", "id"),
        ("\"id\":1,\"n\":3000000000".to_owned(), "out_of_range", "n"),
        ("\"id\":1,\"f\":1e999".to_owned(), "out_of_range", "f"),
        ("\"id\":1,\"f\":-1e99999999999".to_owned(), "out_of_range", "f"),
        ("\"id\":1,\"f\":\"NaN\"".to_owned(), "wrong_type", "f"),
        ("\"id\":1,\"f\":\"Infinity\"".to_owned(), "wrong_type", "f"),
        ("\"id\":1,\"d\":\"1e999999999\"".to_owned(), "out_of_range", "d"),
        ("\"id\":1,\"d\":1e-999999999".to_owned(), "out_of_range", "d"),
        (format!("\"id\":1,\"d\":\"{digits}\""), "out_of_range", "d"),
        ("\"id\":1,\"d\":\"NaN\"".to_owned(), "wrong_type", "d"),
        ("\"id\":1,\"t\":\"2026-13-01T00:00:00Z\"".to_owned(), "out_of_range", "t"),
        ("\"id\":1,\"t\":\"yesterday\"".to_owned(), "wrong_type", "t"),
        ("\"id\":1,\"t\":9223372036854775807".to_owned(), "out_of_range", "t"),
        ("\"id\":1,\"b\":\"*\"".to_owned(), "wrong_type", "b"),
        ("\"id\":1,\"l\":{}".to_owned(), "wrong_type", "l"),
        ("\"id\":1,\"l\":[1,\"x\"]".to_owned(), "wrong_type", "l[1]"),
        ("\"id\":1,\"o\":{\"a\":\"x\"}".to_owned(), "wrong_type", "o.a"),
        ("\"id\":1,\"o\":{\"x\":1}".to_owned(), "unknown_field", "o.x"),
        ("\"id\":1,\"o\":[]".to_owned(), "wrong_type", "o"),
        ("\"id\":1,\"m\":{\"k\":\"x\"}".to_owned(), "wrong_type", "m.k"),
        ("\"id\":1,\"m\":{\"k\":1,\"k\":2}".to_owned(), "duplicate_field", "m.k"),
        ("\"id\":1,\"id\":2".to_owned(), "duplicate_field", "id"),
        ("\"id\":1,\"o\":{\"a\":1,\"a\":2}".to_owned(), "duplicate_field", "o.a"),
        ("\"id\":1,\"x\":2".to_owned(), "unknown_field", "x"),
        ("\"id\":1,\"_stream\":\"x\"".to_owned(), "unknown_field", "_stream"),
        (format!("\"id\":1,\"s\":{deep}"), "wrong_type", "s"),
        (format!("\"id\":1,\"l\":{deep}"), "wrong_type", "l[0]"),
        (format!("\"id\":1,\"o\":{objects}"), "wrong_type", "o.a"),
        (format!("\"id\":1,\"x\":{deep}"), "unknown_field", "x"),
    ] {
        check(&mut ledger, &server, format!("{{{value}}}").as_bytes(), code, Some(column)).await;
    }
    check(&mut ledger, &server, b"{\"id\":1,\"\":2}", "unknown_field", None).await;
    ledger.check().await;
    server.end();
}

#[tokio::test]
async fn large_names_and_records_are_refused_and_cut() {
    let server = server();
    let mut ledger = Ledger::create(&server, "t", &COLUMNS).await;
    let name = "n".repeat(1 << 20);
    let bad = format!("{{\"id\":1,\"{name}\":1}}");
    check(&mut ledger, &server, bad.as_bytes(), "unknown_field", Some(&format!("{}…", &name[..39]))).await;
    let name = "😀".repeat(100_000);
    let bad = format!("{{\"id\":1,\"{name}\":1}}");
    check(&mut ledger, &server, bad.as_bytes(), "unknown_field", Some(&format!("{}…", "😀".repeat(39))))
        .await;
    let bad = format!("{{\"id\":1,\"m\":{{\"{name}\":\"x\"}}}}");
    check(&mut ledger, &server, bad.as_bytes(), "wrong_type", Some(&format!("m.{}…", "😀".repeat(39)))).await;
    let record = format!("{{\"id\":1,\"s\":\"{}\"}}", "x".repeat(RECORD_BYTES_MAX));
    check(&mut ledger, &server, record.as_bytes(), "record_too_large", None).await;
    for framed in [false, true] {
        let message = vec![b' '; FRAME_BYTES_MAX + 1];
        let open = serde_json::json!({});
        let mut producer = if framed {
            Producer::framed(&server, "t", open).await
        } else {
            Producer::plain(&server, "t").await
        };
        if framed {
            ledger.send_framed(&mut producer).await;
            producer.records(1, 1, &message).await;
        } else {
            ledger.send(&mut producer).await;
            producer.text(std::str::from_utf8(&message).expect("ASCII")).await;
        }
        let (error, close) = producer.refusal().await;
        assert_eq!((error.code.as_str(), close), ("record_too_large", 1009), "{error}");
        ledger.good().await;
    }
    ledger.check().await;
    server.end();
}

#[tokio::test]
async fn odd_records_that_fit_are_taken() {
    let server = server();
    let mut ledger = Ledger::create(&server, "t", &COLUMNS).await;
    let deep = format!("{}{}", "[".repeat(1000), "]".repeat(1000));
    let mut producer = Producer::plain_at(&server, "t/stream?unknown=ignore").await;
    let odd = [
        "\"s\":\"a\\u0000b\"".to_owned(),
        "\"s\":\"\\ud83d\\ude00\"".to_owned(),
        "\"s\":\"\"".to_owned(),
        "\"f\":-0.0".to_owned(),
        "\"f\":1e-400".to_owned(),
        format!("\"f\":0.{}", "1".repeat(10_000)),
        format!("\"x\":{deep}"),
        format!("\"{}\":1", "n".repeat(1 << 20)),
        "\"l\":[]".to_owned(),
        "\"m\":{}".to_owned(),
        "\"m\":{\"\":1}".to_owned(),
        format!("\"s\":\"{}\"", "x".repeat(RECORD_BYTES_MAX - 30)),
        "\"x\":1,\"x\":2".to_owned(),
    ];
    for (offset, odd) in odd.iter().enumerate() {
        let id = ledger.id();
        assert!(producer.text(&format!("{{\"id\":{id},{odd}}}")).await, "{odd:.100}");
        assert_eq!(producer.until_durable(offset as u64).await, [], "{odd:.100}");
        ledger.owe(&producer.stream, offset as u64, id);
    }
    // No records at all, in all forms.
    for nothing in ["", " ", "\n\n", "[]", "[ ]"] {
        assert!(producer.text(nothing).await);
    }
    producer.next_offset = odd.len() as u64;
    ledger.send(&mut producer).await;
    drop(producer);
    ledger.good().await;
    ledger.check().await;
    server.end();
}

#[tokio::test]
async fn each_of_many_refusals_in_one_message_is_told_once_and_in_order() {
    const RECORDS: u64 = 20_000;
    let server = server();
    let mut ledger = Ledger::create(&server, "t", &COLUMNS).await;
    let mut producer = Producer::plain(&server, "t").await;
    let mut lines = String::new();
    for offset in 0..RECORDS {
        if offset % 1000 == 7 {
            let id = ledger.id();
            lines.push_str(&format!("{{\"id\":{id}}}\n"));
            ledger.owe(&producer.stream, offset, id);
        } else {
            lines.push_str("{\"id\":\"x\"}\n");
        }
    }
    assert!(producer.text(&lines).await);
    let refused: Vec<u64> = producer.until_committed(RECORDS - 1).await.iter().map(|r| r.offset).collect();
    let expected: Vec<u64> = (0..RECORDS).filter(|offset| offset % 1000 != 7).collect();
    assert!(refused == expected, "{} refusals", refused.len());
    drop(producer);
    ledger.good().await;
    ledger.check().await;
    server.end();
}
