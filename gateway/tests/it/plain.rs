//! Plain JSON over WebSocket.

use serde_json::json;
use tokio_tungstenite::tungstenite::Message;

use futures_util::{SinkExt, StreamExt};

use crate::harness::{FakePod, Producer, gateway, gateway_with, soon};

#[tokio::test]
async fn any_form_of_records_gets_offsets_and_acks() {
    let pod = FakePod::start("pod-1");
    let gateway = gateway(&[&pod]).await;
    let mut producer = Producer::plain(&gateway).await;
    producer.text("{\"a\":1}").await;
    assert_eq!(producer.json().await, json!({"durable": 0}));
    assert_eq!(producer.json().await, json!({"committed": 0, "version": 10}));
    producer.text("[{\"a\":2},{\"a\":3}]").await;
    producer.until_durable(2).await;
    producer.text("{\"a\":4}\n\n{\"a\":5}\n").await;
    producer.until_durable(4).await;
    producer.text("  \n").await;
    producer.text("{\"finish\":true}").await;
    producer.until_durable(5).await;
    assert_eq!(pod.see(|memory| memory.records()), 6, "a blank text is no record, a control-like one is");
    assert!(pod.see(|memory| memory.finishes.is_empty()));
}

#[tokio::test]
async fn small_messages_become_few_frames() {
    let pod = FakePod::start("pod-1");
    let gateway = gateway(&[&pod]).await;
    let mut producer = Producer::plain(&gateway).await;
    for n in 0..2000 {
        producer.socket.feed(Message::text(format!("{{\"n\":{n}}}"))).await.expect("sends");
    }
    producer.socket.flush().await.expect("sends");
    producer.until_durable(1999).await;
    let expected: String = (0..2000).map(|n| format!("{{\"n\":{n}}}\n")).collect();
    let (text, frames) = pod.see(|memory| {
        let lines = memory.frames[0].iter().map(|frame| {
            let text = String::from_utf8(frame.payload.to_vec()).expect("text");
            if text.ends_with('\n') { text } else { text + "\n" }
        });
        (lines.collect::<String>(), memory.frames[0].len())
    });
    assert_eq!(text, expected, "in order, each once");
    assert!(frames < 500, "{frames} frames for 2000 records");
}

#[tokio::test]
async fn a_refused_record_is_named_before_its_ack() {
    let pod = FakePod::start("pod-1");
    pod.tell(|memory| memory.refuses = Some("bad"));
    let gateway = gateway(&[&pod]).await;
    let mut producer = Producer::plain(&gateway).await;
    producer.text("{\"a\":1}\nbad\n{\"a\":2}").await;
    let rejected = json!({"rejected": {"offset": 1, "code": "not_json", "message": "no JSON: bad"}});
    assert_eq!(producer.json().await, rejected);
    assert_eq!(producer.json().await, json!({"durable": 2}));
}

#[tokio::test]
async fn bad_input_is_named_after_what_came_before_is_durable() {
    let pod = FakePod::start("pod-1");
    let gateway = gateway_with(&[&pod], |config| config.frame_bytes_max.0 = 2048).await;
    let large = "x".repeat(2049);
    let not_utf8 = tokio_tungstenite::tungstenite::protocol::frame::Frame::message(
        vec![b'"', 0xff, b'"'],
        tokio_tungstenite::tungstenite::protocol::frame::coding::OpCode::Data(
            tokio_tungstenite::tungstenite::protocol::frame::coding::Data::Text,
        ),
        true,
    );
    for (number, (message, code, close)) in [
        (Message::binary(vec![0_u8, 159, 146, 150]), "binary_in_plain_mode", 1008),
        (Message::text(large), "record_too_large", 1009),
        (Message::Frame(not_utf8), "invalid_utf8", 1007),
    ]
    .into_iter()
    .enumerate()
    {
        let mut producer = Producer::plain(&gateway).await;
        producer.text("{\"a\":1}").await;
        producer.socket.send(message).await.expect("sends");
        let (error, closed) = producer.refusal().await;
        assert_eq!((error.code.as_str(), closed), (code, close), "{error}");
        assert_eq!(pod.see(|memory| memory.records()), number as u64 + 1);
        if code == "record_too_large" {
            assert!(error.message.contains("2049") && error.message.contains("2048"), "{error}");
        }
    }
}

#[tokio::test]
async fn a_close_is_answered_when_all_is_durable() {
    let pod = FakePod::start("pod-1");
    pod.tell(|memory| memory.acks = false);
    let gateway = gateway(&[&pod]).await;
    let mut producer = Producer::plain(&gateway).await;
    producer.text("{\"a\":1}").await;
    producer.text("{\"a\":2}").await;
    producer.socket.close(None).await.expect("closes");
    pod.until("all records and the finish", |memory| memory.records() == 2 && memory.finishes.len() == 1)
        .await;
    let early = futures_util::FutureExt::now_or_never(producer.socket.next());
    assert!(early.is_none(), "answered before all was durable: {early:?}");
    pod.ack(2).await;
    pod.answer(Ok(sluice_shared::proto::stream_response::Kind::Finished(sluice_shared::proto::Finished {})))
        .await;
    assert!(producer.message().await.is_close());
}

#[tokio::test]
async fn a_close_is_not_answered_when_records_may_be_lost() {
    let pod = FakePod::start("pod-1");
    pod.tell(|memory| memory.acks = false);
    let gateway = gateway_with(&[&pod], |config| config.close_timeout_ms = 50).await;
    let mut producer = Producer::plain(&gateway).await;
    producer.text("{\"a\":1}").await;
    producer.socket.close(None).await.expect("closes");
    let answer = soon("the end", producer.socket.next()).await;
    assert!(!matches!(answer, Some(Ok(Message::Close(_)))), "{answer:?}");
}

#[tokio::test]
async fn what_a_vanished_producer_sent_is_kept() {
    let pod = FakePod::start("pod-1");
    let gateway = gateway(&[&pod]).await;
    let mut producer = Producer::plain(&gateway).await;
    for n in 0..100 {
        producer.text(&format!("{{\"n\":{n}}}")).await;
    }
    drop(producer);
    pod.until("all records and the finish", |memory| memory.records() == 100 && memory.finishes.len() == 1)
        .await;
}

#[tokio::test]
async fn only_a_named_stream_can_be_resumed() {
    let pod = FakePod::start("pod-1");
    pod.tell(|memory| memory.next_offset = 9);
    let gateway = gateway(&[&pod]).await;
    let mut named = Producer::connect(&gateway, "t/stream?name=n&resume_at=4", None).await;
    assert_eq!(named.json().await["next_offset"], 4);
    assert_eq!(pod.see(|memory| memory.opens[0].resume_at), Some(4));
    let mut nameless = Producer::connect(&gateway, "t/stream?resume_at=4", None).await;
    assert_eq!(nameless.json().await["error"]["code"], "resume_without_name");
}

#[tokio::test]
async fn names_that_other_edges_give_are_not_taken() {
    let pod = FakePod::start("pod-1");
    let gateway = gateway(&[&pod]).await;
    for name in ["post/1", "zerobus/main.default.t/1"] {
        let mut producer = Producer::connect(&gateway, &format!("t/stream?name={name}"), None).await;
        assert_eq!(producer.json().await["error"]["code"], "reserved_name", "{name}");
    }
    assert!(pod.see(|memory| memory.opens.is_empty()));
}
