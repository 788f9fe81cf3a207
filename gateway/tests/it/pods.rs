//! Pods that die, refuse, and lie.

use std::time::Duration;

use sluice_shared::error::{Error, ErrorKind};
use sluice_shared::frame::GatewayFrame;
use sluice_shared::proto::stream_response::Kind as Answer;
use sluice_shared::proto::{self};

use crate::harness::{FakePod, Memory, Producer, gateway, gateway_with, metric};

#[tokio::test]
async fn a_replay_is_the_same_frames_and_the_producer_sees_nothing() {
    let pod = FakePod::start("pod-1");
    pod.tell(|memory| memory.acks = false);
    let gateway = gateway(&[&pod]).await;
    let mut producer = Producer::framed(&gateway).await;
    for n in 0..20 {
        producer.records(n * 2, 2, "{\"a\":1}\n{\"b\":2}").await;
        pod.until("the records", |memory| memory.records() == (n + 1) * 2).await;
    }
    pod.ack(10).await;
    producer.until_durable(9).await;
    pod.break_call().await;
    pod.until("the replay", |memory| memory.frames.len() == 2 && memory.frames[1].len() == 15).await;
    let (first, second) = pod.see(|memory| (memory.opens[0].clone(), memory.opens[1].clone()));
    assert_eq!((&second.stream, second.session, second.resume_at), (&first.stream, 1, Some(10)));
    assert_eq!((second.schema_id, second.schema_pinned), (3, true));
    pod.see(|memory| assert_eq!(memory.frames[0][5..], memory.frames[1][..]));
    pod.tell(|memory| memory.acks = true);
    producer.records(40, 1, "{}").await;
    producer.until_durable(40).await;
    assert_eq!(metric(gateway.address(), "sluice_gateway_replayed_frames_total").await, 15);
    assert_eq!(metric(gateway.address(), "sluice_gateway_reopens_total").await, 1);
}

#[tokio::test]
async fn a_killed_pods_streams_go_on_at_another() {
    let pods = [FakePod::start("pod-1"), FakePod::start("pod-2")];
    pods.iter().for_each(|pod| pod.tell(|memory| memory.acks = false));
    let gateway = gateway(&[&pods[0], &pods[1]]).await;
    let mut producer = Producer::plain(&gateway).await;
    producer.text("{\"a\":1}").await;
    let at = pods.iter().position(|pod| pod.see(|memory| !memory.opens.is_empty())).expect("one has it");
    let (first, second) = (&pods[at], &pods[1 - at]);
    first.until("the record", |memory| memory.records() == 1).await;
    first.kill();
    // The calls of a killed server end; so does the one that is open.
    first.break_call().await;
    second.until("the replay", |memory| memory.records() == 1).await;
    assert_eq!(first.see(|memory| memory.payload()), second.see(|memory| memory.payload()));
    second.ack(1).await;
    producer.until_durable(0).await;
}

fn handoff() -> Answer {
    Answer::Handoff(proto::Handoff { reason: "its pod drains".to_owned() })
}

#[tokio::test]
async fn a_stream_that_is_handed_over_goes_on_at_another_pod_without_a_replay() {
    let pods = [FakePod::start("pod-1"), FakePod::start("pod-2")];
    pods.iter().for_each(|pod| pod.tell(|memory| memory.acks = false));
    let gateway = gateway(&[&pods[0], &pods[1]]).await;
    let mut producer = Producer::framed(&gateway).await;
    producer.records(0, 2, "{\"a\":1}\n{\"b\":2}").await;
    let at = pods.iter().position(|pod| pod.see(|memory| !memory.opens.is_empty())).expect("one has it");
    let (first, second) = (&pods[at], &pods[1 - at]);
    first.until("the records", |memory| memory.records() == 2).await;
    first.answer(Ok(handoff())).await;
    // It comes behind the handoff, and is not for this pod any more.
    producer.records(2, 1, "{\"c\":3}").await;
    assert!(second.see(|memory| memory.opens.is_empty()), "what was sent is not durable yet");
    first.ack(2).await;
    second.until("the third record", |memory| memory.records() == 1).await;
    first.until("the leave", |memory| memory.leaves == [0]).await;
    let (old, new) =
        (first.see(|memory| memory.opens[0].clone()), second.see(|memory| memory.opens[0].clone()));
    assert_eq!((&new.stream, new.session, new.resume_at), (&old.stream, old.session, Some(2)));
    assert_eq!(first.see(Memory::records), 2);
    second.ack(3).await;
    producer.until_durable(2).await;
    assert_eq!(metric(gateway.address(), "sluice_gateway_handoffs_total").await, 1);
    assert_eq!(metric(gateway.address(), "sluice_gateway_replayed_frames_total").await, 0);
    assert_eq!(metric(gateway.address(), "sluice_gateway_reopens_total").await, 0);
}

#[tokio::test]
async fn a_stream_that_no_other_pod_takes_stays_where_it_is() {
    let pod = FakePod::start("pod-1");
    let gateway = gateway(&[&pod]).await;
    let mut producer = Producer::framed(&gateway).await;
    producer.records(0, 1, "{\"a\":1}").await;
    producer.until_durable(0).await;
    for offset in 1..4 {
        pod.answer(Ok(handoff())).await;
        producer.records(offset, 1, "{\"b\":2}").await;
        producer.until_durable(offset).await;
    }
    pod.see(|memory| assert_eq!((memory.opens.len(), memory.leaves.len()), (1, 0)));
}

#[tokio::test]
async fn a_pod_that_dies_while_it_hands_over_costs_a_replay() {
    let pods = [FakePod::start("pod-1"), FakePod::start("pod-2")];
    pods.iter().for_each(|pod| pod.tell(|memory| memory.acks = false));
    let gateway = gateway(&[&pods[0], &pods[1]]).await;
    let mut producer = Producer::framed(&gateway).await;
    producer.records(0, 1, "{\"a\":1}").await;
    let at = pods.iter().position(|pod| pod.see(|memory| !memory.opens.is_empty())).expect("one has it");
    let (first, second) = (&pods[at], &pods[1 - at]);
    first.until("the record", |memory| memory.records() == 1).await;
    first.answer(Ok(handoff())).await;
    producer.records(1, 1, "{\"b\":2}").await;
    first.kill();
    first.break_call().await;
    second.until("both records", |memory| memory.records() == 2).await;
    second.ack(2).await;
    producer.until_durable(1).await;
    assert!(first.see(|memory| memory.leaves.is_empty()));
}

#[tokio::test]
async fn a_replay_tells_no_refusal_twice() {
    let pod = FakePod::start("pod-1");
    pod.tell(|memory| (memory.acks, memory.refuses) = (false, Some("bad")));
    let gateway = gateway(&[&pod]).await;
    let mut producer = Producer::framed(&gateway).await;
    producer.records(0, 2, "bad\n{}").await;
    assert!(matches!(producer.frame().await, GatewayFrame::Rejected(rejected) if rejected.offset == 0));
    pod.break_call().await;
    pod.until("the replay", |memory| memory.frames.len() == 2 && memory.records() == 4).await;
    pod.ack(2).await;
    assert!(matches!(producer.frame().await, GatewayFrame::Ack(ack) if ack.durable == Some(1)));
}

#[tokio::test]
async fn a_busy_pod_is_passed_over() {
    let pods = [FakePod::start("pod-1"), FakePod::start("pod-2")];
    let busy = || Error::busy("wal_full", "the log is full", Duration::from_millis(700));
    for pod in &pods {
        pod.tell(|memory| memory.open_failures.push_back(busy()));
    }
    let gateway = gateway(&[&pods[0], &pods[1]]).await;
    let mut producer = Producer::connect(&gateway, "flights/stream", None).await;
    let (error, close) = producer.refusal().await;
    assert_eq!((error.kind, close, error.retry_after_ms), (ErrorKind::Busy, 1013, Some(700)));
    pods[0].tell(|memory| memory.open_failures.push_back(busy()));
    Producer::plain(&gateway).await;
}

#[tokio::test]
async fn refusals_of_a_pod_reach_the_producer() {
    let pod = FakePod::start("pod-1");
    let gateway = gateway(&[&pod]).await;
    for (error, close) in [
        (Error::not_found("table_not_found", "no such table"), 4404),
        (Error::fenced("a newer session owns this stream"), 4409),
        (Error::invalid("schema_mismatch", "column a"), 1008),
        (Error::internal("broken"), 1011),
    ] {
        pod.tell(|memory| memory.open_failures.push_back(error.clone()));
        let mut producer = Producer::connect(&gateway, "flights/stream", None).await;
        let (mut refusal, code) = producer.refusal().await;
        if error.code == "table_not_found" {
            assert!(refusal.message.contains("--auto-create"), "what else can be done: {refusal}");
            refusal.message.truncate(error.message.len());
        }
        assert_eq!((refusal, code), (error, close));
    }
}

#[tokio::test]
async fn a_fenced_stream_ends() {
    let pod = FakePod::start("pod-1");
    let gateway = gateway(&[&pod]).await;
    let mut producer = Producer::framed(&gateway).await;
    pod.answer(Err(Error::fenced("session 8 owns it").into())).await;
    let (error, close) = producer.refusal().await;
    assert_eq!((error.kind, close), (ErrorKind::Fenced, 4409));
    assert_eq!(pod.see(|memory| memory.opens.len()), 1);
}

#[tokio::test]
async fn without_a_pod_the_producer_is_told_to_try_again() {
    let dead = FakePod::start("pod-1");
    dead.kill();
    let gateway = gateway(&[&dead]).await;
    let mut producer = Producer::connect(&gateway, "flights/stream", None).await;
    let (error, close) = producer.refusal().await;
    assert_eq!((error.kind, close, error.retryable), (ErrorKind::Unavailable, 1012, true));
    assert!(error.message.starts_with("pod pod-1 (in-process) cannot be reached: "), "{error}");
}

#[tokio::test]
async fn a_stream_that_no_pod_takes_again_ends_in_the_end() {
    let pod = FakePod::start("pod-1");
    let gateway = gateway_with(&[&pod], |config| config.unavailable_timeout_ms = 300).await;
    let mut producer = Producer::framed(&gateway).await;
    pod.tell(|memory| {
        memory.open_failures =
            (0..1000).map(|_| Error::unavailable("starting", "replaying the log")).collect();
    });
    pod.break_call().await;
    let (error, close) = producer.refusal().await;
    assert_eq!((error.code.as_str(), close), ("pods_unavailable", 1012));
    assert!(error.message.contains("replaying the log"), "{error}");
}

#[tokio::test]
async fn a_pod_that_counts_wrongly_is_not_believed() {
    let pod = FakePod::start("pod-1");
    let gateway = gateway(&[&pod]).await;
    let mut producer = Producer::framed(&gateway).await;
    pod.ack(5).await;
    let (error, close) = producer.refusal().await;
    assert_eq!((error.kind, close), (ErrorKind::Internal, 1011), "an ack beyond what was sent");
    let mut producer = Producer::framed(&gateway).await;
    pod.tell(|memory| memory.acks = false);
    producer.records(0, 1, "{}").await;
    pod.until("the record", |memory| memory.records() == 1).await;
    pod.answer(Ok(Answer::Finished(proto::Finished {}))).await;
    let (error, _) = producer.refusal().await;
    assert!(error.message.contains("offset 0 is not durable"), "{error}");
}

#[tokio::test]
async fn a_drain_moves_producers_and_keeps_what_they_sent() {
    let pod = FakePod::start("pod-1");
    let gateway = gateway(&[&pod]).await;
    let mut producer = Producer::framed(&gateway).await;
    producer.records(0, 1, "{}").await;
    producer.until_durable(0).await;
    let draining = gateway.drain(Duration::from_secs(10));
    let moving = async {
        assert!(matches!(producer.frame().await, GatewayFrame::Move(_)));
        producer.records(1, 1, "{}").await;
        let (error, close) = producer.refusal().await;
        assert_eq!((error.code.as_str(), close), ("gateway_draining", 1012));
    };
    tokio::join!(draining, moving);
    assert_eq!(pod.see(|memory| (memory.records(), memory.finishes.len())), (2, 1));
}
