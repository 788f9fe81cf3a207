//! `sluice.v1` frames, and WebSocket frames, that cannot be taken: the stream ends, what came before stays.

use rand::rngs::StdRng;
use rand::{Rng, RngExt, SeedableRng};
use serde_json::json;
use sluice_shared::error::ErrorKind;
use tokio_tungstenite::tungstenite::Message;

use crate::ledger::Ledger;
use crate::server::Server;
use crate::wire::Producer;

fn records(first_offset: u64, count: u32, payload: &str) -> Message {
    let header = [&[0x02][..], &first_offset.to_be_bytes(), &count.to_be_bytes()].concat();
    Message::binary([&header, payload.as_bytes()].concat())
}

/// A record, then the bad message: refused by this code; the record stays, and good producers go on.
async fn check(server: &Server, ledger: &mut Ledger<'_>, bad: Message, code: &str, offset: Option<u64>) {
    let shown = format!("{bad:?}").chars().take(100).collect::<String>();
    let mut producer = Producer::framed(server, &ledger.table, json!({})).await;
    ledger.send_framed(&mut producer).await;
    producer.send(bad).await;
    let (error, close) = producer.refusal().await;
    assert_eq!(
        (error.code.as_str(), close, error.kind),
        (code, 1008, ErrorKind::Invalid),
        "{shown}: {error}"
    );
    assert_eq!(error.offset, offset, "{shown}");
    ledger.good().await;
}

#[tokio::test]
async fn bad_frames_are_refused_by_name_and_offset() {
    let server = Server::start(&[]);
    let mut ledger = Ledger::create(&server, "t", &[]).await;
    let record = "{\"id\":999}";
    for (bad, code, offset) in [
        (records(2, 1, record), "offset_gap", Some(2)),
        (records(u64::MAX, 1, record), "offset_gap", Some(u64::MAX)),
        (records(0, 1, record), "offset_goes_back", Some(0)),
        (records(1, 0, ""), "count_mismatch", Some(1)),
        (records(1, 0, record), "count_mismatch", Some(1)),
        (records(1, 2, record), "count_mismatch", Some(1)),
        (records(1, 1, "{\"id\":999}\n{\"id\":999}"), "count_mismatch", Some(1)),
        (records(1, u32::MAX, record), "count_mismatch", Some(1)),
        (records(u64::MAX, u32::MAX, record), "count_mismatch", Some(u64::MAX)),
        (records(1, 1, ""), "count_mismatch", Some(1)),
        (records(1, 1, "\n \n\r\n"), "count_mismatch", Some(1)),
        (Message::binary(vec![]), "empty_frame", None),
        (Message::binary(b"\x02\0\0".to_vec()), "truncated_frame", None),
        (Message::binary(b"\x00".to_vec()), "unknown_frame_kind", None),
        (Message::binary(b"\x7f{}".to_vec()), "unknown_frame_kind", None),
        (Message::binary(b"\x82{\"durable\":7}".to_vec()), "unknown_frame_kind", None),
        (Message::binary(b"\x01{}".to_vec()), "already_open", None),
        (Message::binary(b"\x03[]".to_vec()), "invalid_frame", None),
        (Message::binary(b"\x03{\"when\":\"never\"}".to_vec()), "invalid_frame", None),
        (Message::text("{\"id\":999}"), "text_in_framed_mode", None),
    ] {
        check(&server, &mut ledger, bad, code, offset).await;
    }
    ledger.check().await;
    server.expect_no_stream().await;
    server.end();
}

#[tokio::test]
async fn a_stream_begins_at_its_next_offset_and_nowhere_else() {
    let server = Server::start(&[]);
    let mut ledger = Ledger::create(&server, "t", &[]).await;
    for offset in [1, u64::MAX, u64::MAX - 1, 1 << 63] {
        let mut producer = Producer::framed(&server, "t", json!({})).await;
        producer.records(offset, 1, b"{\"id\":999}").await;
        let (error, close) = producer.refusal().await;
        assert_eq!((error.code.as_str(), close, error.offset), ("offset_gap", 1008, Some(offset)), "{error}");
        ledger.good().await;
    }
    let open = json!({ "name": "n" });
    let mut producer = Producer::framed(&server, "t", open.clone()).await;
    ledger.send_framed(&mut producer).await;
    ledger.send_framed(&mut producer).await;
    for (offset, code) in [(0, "offset_goes_back"), (1, "offset_goes_back"), (3, "offset_gap")] {
        let mut producer = Producer::framed(&server, "t", open.clone()).await;
        assert_eq!(producer.next_offset, 2);
        producer.records(offset, 1, b"{\"id\":999}").await;
        assert_eq!(producer.refusal().await.0.code, code);
    }
    let mut producer = Producer::framed(&server, "t", open).await;
    ledger.send_framed(&mut producer).await;
    drop(producer);
    ledger.good().await;
    ledger.check().await;
    server.end();
}

#[tokio::test]
async fn a_first_frame_that_opens_nothing_is_refused() {
    let server = Server::start(&[("SLUICE_GATEWAY__HANDSHAKE_TIMEOUT_MS", "500")]);
    let mut ledger = Ledger::create(&server, "t", &[]).await;
    let deep = format!("\x01{{\"table\":{}", "[".repeat(10_000));
    let long = format!("\x01{{\"{}\":1}}", "k".repeat(1 << 20));
    let cases: [(Option<Message>, &str); 16] = [
        (None, "expected_open"),
        (Some(records(0, 1, "{\"id\":999}")), "expected_open"),
        (Some(Message::binary(b"\x03".to_vec())), "expected_open"),
        (Some(Message::text("{}")), "text_in_framed_mode"),
        (Some(Message::binary(vec![])), "empty_frame"),
        (Some(Message::binary(b"\x7fgarbage".to_vec())), "unknown_frame_kind"),
        (Some(Message::binary(b"\x01".to_vec())), "invalid_frame"),
        (Some(Message::binary(b"\x01[]".to_vec())), "invalid_frame"),
        (Some(Message::binary(b"\x01{\"tabel\":\"t\"}".to_vec())), "invalid_frame"),
        (Some(Message::binary(b"\x01{\"encoding\":\"csv\"}".to_vec())), "invalid_frame"),
        (Some(Message::binary(b"\x01{\"encoding\":\"protobuf\"}".to_vec())), "missing_schema"),
        (Some(Message::binary(b"\x01{\"rate_bytes_per_s\":-1}".to_vec())), "invalid_frame"),
        (Some(Message::binary(b"\x01{\"name\":\"\xff\"}".to_vec())), "invalid_frame"),
        (Some(Message::binary(b"\x01{\"table\":\"t\",\"table\":\"t\"}".to_vec())), "invalid_frame"),
        (Some(Message::binary(deep.into_bytes())), "invalid_frame"),
        (Some(Message::binary(long.into_bytes())), "invalid_frame"),
    ];
    for (message, code) in cases {
        let shown = format!("{message:?}").chars().take(100).collect::<String>();
        let mut producer = Producer::connect(&server, "t/stream", true).await;
        if let Some(message) = message {
            producer.send(message).await;
        }
        let (error, close) = producer.refusal().await;
        assert_eq!((error.code.as_str(), close), (code, 1008), "{shown}: {error}");
        ledger.good().await;
    }
    for rate in [0, 1, u64::MAX] {
        let mut producer = Producer::framed(&server, "t", json!({ "rate_bytes_per_s": rate })).await;
        ledger.send_framed(&mut producer).await;
    }
    ledger.check().await;
    server.end();
}

#[tokio::test]
async fn binary_garbage_is_refused_in_both_modes() {
    const SEED: u64 = 7;
    println!("seed {SEED}");
    let server = Server::start(&[]);
    let mut ledger = Ledger::create(&server, "t", &[]).await;
    let mut random = StdRng::seed_from_u64(SEED);
    for _ in 0..40 {
        let mut garbage = vec![0; random.random_range(1..2000)];
        random.fill_bytes(&mut garbage);
        let mut producer = Producer::plain(&server, "t").await;
        ledger.send(&mut producer).await;
        producer.send(Message::binary(garbage.clone())).await;
        let (error, close) = producer.refusal().await;
        assert_eq!((error.code.as_str(), close), ("binary_in_plain_mode", 1008), "{error}");
        let mut producer = Producer::framed(&server, "t", json!({})).await;
        ledger.send_framed(&mut producer).await;
        producer.send(Message::binary(garbage.clone())).await;
        let (error, _) = producer.refusal().await;
        let codes =
            ["unknown_frame_kind", "truncated_frame", "invalid_frame", "offset_gap", "count_mismatch"];
        let of_first = ["already_open", "offset_goes_back"];
        assert!(codes.contains(&error.code.as_str()) || of_first.contains(&error.code.as_str()), "{error:?}");
    }
    ledger.good().await;
    ledger.check().await;
    server.end();
}

/// A masked WebSocket frame with this first byte; the mask is all zeros.
fn websocket(first: u8, payload: &[u8]) -> Vec<u8> {
    assert!(payload.len() < 65536, "one form of length is enough here");
    let length = u16::try_from(payload.len()).expect("checked");
    let mut bytes = vec![first];
    match length {
        0..126 => bytes.push(0x80 | payload.len() as u8),
        _ => bytes.extend([&[0x80 | 126][..], &length.to_be_bytes()].concat()),
    }
    bytes.extend([0; 4]);
    bytes.extend(payload);
    bytes
}

#[tokio::test]
async fn what_is_no_websocket_is_refused_with_the_codes_of_its_rfc() {
    let server = Server::start(&[]);
    let mut ledger = Ledger::create(&server, "t", &[]).await;
    for (bytes, code, close) in [
        (websocket(0x81, b"{\"id\":999,\"s\":\"\xff\"}"), "invalid_utf8", 1007),
        (websocket(0x81, b"\xed\xa0\x80"), "invalid_utf8", 1007),
        (websocket(0x81, b"\xc3"), "invalid_utf8", 1007),
        (websocket(0x83, b"x"), "websocket_protocol", 1002),
        (websocket(0xf1, b"{}"), "websocket_protocol", 1002),
        (websocket(0x80, b"{}"), "websocket_protocol", 1002),
        (websocket(0x89, &[0; 126]), "websocket_protocol", 1002),
        (websocket(0x09, b"x"), "websocket_protocol", 1002),
        (b"\x81\x02{}".to_vec(), "websocket_protocol", 1002),
        ([websocket(0x01, b"{"), websocket(0x81, b"}")].concat(), "websocket_protocol", 1002),
        (b"\x81\xff\xff\xff\xff\xff\xff\xff\xff\xff\0\0\0\0".to_vec(), "record_too_large", 1009),
        (b"GET / HTTP/1.1\r\n\r\n".to_vec(), "websocket_protocol", 1002),
    ] {
        let shown = format!("{:?}", String::from_utf8_lossy(&bytes[..bytes.len().min(40)]));
        let mut producer = Producer::plain(&server, "t").await;
        ledger.send(&mut producer).await;
        producer.bytes(&bytes).await;
        let (error, got) = producer.refusal().await;
        assert_eq!((error.code.as_str(), got), (code, close), "{shown}: {error}");
        ledger.good().await;
    }
    ledger.check().await;
    server.expect_no_stream().await;
    server.end();
}
