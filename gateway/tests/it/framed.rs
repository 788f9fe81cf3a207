//! `sluice.v1` over WebSocket.

use sluice_shared::error::ErrorKind;
use sluice_shared::frame::{Ack, FinishWhen, GatewayFrame};
use tokio_tungstenite::tungstenite::Message;

use crate::harness::{FakePod, Producer, gateway, gateway_with};

#[tokio::test]
async fn the_subprotocol_is_chosen_from_what_is_offered() {
    let pod = FakePod::start("pod-1");
    let gateway = gateway(&[&pod]).await;
    let both = Producer::connect(&gateway, "flights/stream", Some("mqtt, sluice.v1")).await;
    assert_eq!(both.subprotocol.as_deref(), Some("sluice.v1"));
}

#[tokio::test]
async fn others_than_ours_get_plain_json() {
    let pod = FakePod::start("pod-1");
    let gateway = gateway(&[&pod]).await;
    // The client library refuses an answer without one of the offered subprotocols, so look at the bytes.
    let request = "GET /v1/tables/t/stream HTTP/1.1\r\nhost: x\r\nconnection: Upgrade\r\nupgrade: websocket\r\n\
                   sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\
                   sec-websocket-protocol: mqtt\r\n\r\n";
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let mut socket = tokio::net::TcpStream::connect(gateway.address()).await.expect("connects");
    socket.write_all(request.as_bytes()).await.expect("sends");
    let mut answer = Vec::new();
    while !String::from_utf8_lossy(&answer).contains("next_offset") {
        assert!(socket.read_buf(&mut answer).await.expect("reads") > 0);
    }
    let answer = String::from_utf8_lossy(&answer);
    assert!(answer.starts_with("HTTP/1.1 101"), "{answer}");
    assert!(answer.contains("s3pPLMBiTxaQ9kYGzzhZRbK+xOo="), "the key of RFC 6455: {answer}");
    assert!(!answer.to_lowercase().contains("sec-websocket-protocol"), "{answer}");
}

#[tokio::test]
async fn records_are_acked_and_a_finish_closes() {
    let pod = FakePod::start("pod-1");
    let gateway = gateway(&[&pod]).await;
    let mut producer = Producer::framed(&gateway).await;
    producer.records(0, 2, "{\"a\":1}\n{\"a\":2}\n").await;
    let ack = Ack { durable: Some(1), committed: Some(1), version: Some(20) };
    assert_eq!(producer.frame().await, GatewayFrame::Ack(ack));
    producer.finish(FinishWhen::Committed).await;
    producer.expect_close(1000).await;
    assert!(pod.see(|memory| memory.finishes[0].committed));
}

#[tokio::test]
async fn open_says_what_the_pod_is_told() {
    let pod = FakePod::start("pod-1");
    pod.tell(|memory| memory.next_offset = 40);
    let gateway = gateway(&[&pod]).await;
    let mut producer = Producer::connect(&gateway, "flights/stream?unknown=ignore", Some("sluice.v1")).await;
    let open = r#"{"name":"a-1","resume_at":38,"encoding":"arrow","schema":"AAEC"}"#;
    producer.binary(format!("\x01{open}").as_bytes()).await;
    let GatewayFrame::Opened(opened) = producer.frame().await else { panic!("expected opened") };
    assert_eq!((opened.stream.as_str(), opened.next_offset, opened.stream_end), ("a-1#1", 38, 40));
    assert_eq!((opened.window_bytes, opened.frame_bytes_max), (8 << 20, 10 << 20));
    let open = pod.see(|memory| memory.opens[0].clone());
    assert_eq!(
        (open.table.as_str(), open.name.as_str(), open.stream.as_str()),
        ("main.default.flights", "a-1", "")
    );
    assert_eq!((open.session, open.resume_at, open.encoding, open.ignore_unknown), (0, Some(38), 2, true));
    assert_eq!(&open.schema[..], [0, 1, 2]);
    producer.records(38, 7, "any bytes\n\n").await;
    producer.until_durable(44).await;
}

#[tokio::test]
async fn protobuf_messages_are_counted_and_carried() {
    let pod = FakePod::start("pod-1");
    let gateway = gateway(&[&pod]).await;
    let open = b"\x01{\"encoding\":\"protobuf\",\"schema\":\"AAEC\"}";
    for (payload, code) in
        [("\u{1}a\u{0}", None), ("\u{1}a", Some("count_mismatch")), ("\u{1}a\u{9}", Some("invalid_framing"))]
    {
        let mut producer = Producer::connect(&gateway, "flights/stream", Some("sluice.v1")).await;
        producer.binary(open).await;
        let GatewayFrame::Opened(_) = producer.frame().await else { panic!("expected opened") };
        producer.records(0, 2, payload).await;
        match code {
            None => producer.until_durable(1).await,
            Some(code) => assert_eq!(producer.refusal().await.0.code, code),
        }
    }
    assert!(pod.see(|memory| memory.opens.iter().all(|open| (open.encoding, open.schema.len()) == (3, 3))));
}

#[tokio::test]
async fn the_first_frame_must_open_the_stream() {
    let pod = FakePod::start("pod-1");
    let gateway = gateway_with(&[&pod], |config| config.handshake_timeout_ms = 300).await;
    let cases: [(Option<Message>, &str); 7] = [
        (Some(Message::binary(b"\x02\0\0\0\0\0\0\0\0\0\0\0\x01{}".to_vec())), "expected_open"),
        (Some(Message::binary(b"\x03".to_vec())), "expected_open"),
        (None, "expected_open"),
        (Some(Message::text("{}")), "text_in_framed_mode"),
        (Some(Message::binary(b"\x01{\"table\":\"other\"}".to_vec())), "table_mismatch"),
        (Some(Message::binary(b"\x01{\"schema\":\"*\"}".to_vec())), "invalid_schema"),
        (Some(Message::binary(b"\x7fgarbage".to_vec())), "unknown_frame_kind"),
    ];
    for (message, code) in cases {
        let mut producer = Producer::connect(&gateway, "flights/stream", Some("sluice.v1")).await;
        if let Some(message) = message {
            futures_util::SinkExt::send(&mut producer.socket, message).await.expect("sends");
        }
        let (error, close) = producer.refusal().await;
        assert_eq!((error.code.as_str(), close), (code, 1008), "{error}");
    }
    assert!(pod.see(|memory| memory.opens.is_empty()));
}

#[tokio::test]
async fn bad_frames_are_refused_by_name_and_offset() {
    let pod = FakePod::start("pod-1");
    let gateway = gateway(&[&pod]).await;
    for (number, (first_offset, count, payload, code)) in [
        (3, 1, "{}", "offset_gap"),
        (0, 1, "{}", "offset_goes_back"),
        (1, 0, "", "count_mismatch"),
        (1, 2, "{}\n\n \n", "count_mismatch"),
    ]
    .into_iter()
    .enumerate()
    {
        let mut producer = Producer::framed(&gateway).await;
        producer.records(0, 1, "{}").await;
        producer.records(first_offset, count, payload).await;
        let (error, close) = producer.refusal().await;
        assert_eq!((error.code.as_str(), close, error.kind), (code, 1008, ErrorKind::Invalid), "{error}");
        assert_eq!(error.offset, Some(first_offset));
        assert_eq!(pod.see(|memory| memory.records()), number as u64 + 1, "what came before is kept");
    }
}

#[tokio::test]
async fn an_offset_error_names_both_offsets() {
    let pod = FakePod::start("pod-1");
    let gateway = gateway(&[&pod]).await;
    let mut producer = Producer::framed(&gateway).await;
    producer.records(17, 1, "{}").await;
    let (error, _) = producer.refusal().await;
    assert!(error.message.contains("17") && error.message.contains("expected 0"), "{error}");
}

#[tokio::test]
async fn other_garbage_is_refused_by_name() {
    let pod = FakePod::start("pod-1");
    let gateway = gateway(&[&pod]).await;
    for (bytes, code) in [
        (&b"\x01{}"[..], "already_open"),
        (b"\x7f", "unknown_frame_kind"),
        (b"\x02\0", "truncated_frame"),
        (b"", "empty_frame"),
        (b"\x03[]", "invalid_frame"),
    ] {
        let mut producer = Producer::framed(&gateway).await;
        producer.binary(bytes).await;
        let (error, close) = producer.refusal().await;
        assert_eq!((error.code.as_str(), close), (code, 1008), "{error}");
    }
    let mut producer = Producer::framed(&gateway).await;
    producer.text("{}").await;
    assert_eq!(producer.refusal().await.0.code, "text_in_framed_mode");
}

#[tokio::test]
async fn nothing_may_follow_a_finish() {
    let pod = FakePod::start("pod-1");
    pod.tell(|memory| memory.acks = false);
    let gateway = gateway_with(&[&pod], |config| config.close_timeout_ms = 50).await;
    let mut producer = Producer::framed(&gateway).await;
    producer.finish(FinishWhen::Durable).await;
    producer.records(0, 1, "{}").await;
    assert_eq!(producer.refusal().await.0.code, "after_finish");
    assert_eq!(pod.see(|memory| memory.records()), 0);
}
