//! Back-pressure in both directions.

use std::time::Duration;

use futures_util::SinkExt;
use sluice_shared::config::ByteSize;
use tokio_tungstenite::tungstenite::Message;

use crate::harness::{FakePod, Producer, gateway_with, metric, soon};

#[tokio::test]
async fn without_acks_the_gateway_stops_reading_at_its_window() {
    const WINDOW: usize = 1 << 20;
    const RECORD: usize = 64 << 10;
    let pod = FakePod::start("pod-1");
    pod.tell(|memory| memory.acks = false);
    let gateway = gateway_with(&[&pod], |config| config.window_bytes = ByteSize(WINDOW as u64)).await;
    let mut producer = Producer::plain(&gateway).await;
    let record = format!("\"{}\"", "x".repeat(RECORD - 2));
    let mut sent = 0_u64;
    // Kernel buffers take some megabytes; then the producer's own transport holds it up.
    let blocked = async {
        while sent < 1000 {
            producer.socket.send(Message::text(record.clone())).await.expect("sends");
            sent += 1;
        }
    };
    assert!(tokio::time::timeout(Duration::from_secs(2), blocked).await.is_err(), "64 MB went in");
    let (bytes, records) = pod.see(|memory| (memory.payload().len(), memory.records()));
    assert!(bytes <= WINDOW, "{bytes}");
    assert!(bytes > WINDOW - 2 * RECORD - 4096, "{bytes}");
    let window = metric(gateway.address(), "sluice_gateway_window_bytes").await;
    assert!(window as usize <= WINDOW && window as usize >= bytes, "{window}");
    // Acks make room, and everything goes on from where it stood.
    pod.tell(|memory| memory.acks = true);
    pod.ack(records).await;
    pod.until("more records", |memory| memory.records() >= sent).await;
}

#[tokio::test]
async fn a_producer_that_takes_no_bytes_is_closed() {
    let pod = FakePod::start("pod-1");
    pod.tell(|memory| memory.refuses = Some("bad"));
    let small = |config: &mut sluice_gateway::GatewayConfig| {
        (config.write_timeout_ms, config.window_bytes) = (300, ByteSize(128 << 10));
    };
    let gateway = gateway_with(&[&pod], small).await;
    let mut producer = Producer::plain(&gateway).await;
    // Each line is answered by far more bytes than it has; the producer never reads them.
    let many = "bad\n".repeat(10_000);
    let flood = async { while producer.socket.send(Message::text(many.clone())).await.is_ok() {} };
    soon("the close", flood).await;
    let name = "sluice_gateway_errors_total{code=\"slow_consumer\"}";
    assert_eq!(metric(gateway.address(), name).await, 1);
    assert_eq!(metric(gateway.address(), "sluice_gateway_streams").await, 0);
}

#[tokio::test]
async fn a_message_over_the_window_passes_alone() {
    let pod = FakePod::start("pod-1");
    let gateway = gateway_with(&[&pod], |config| config.window_bytes = ByteSize(2048)).await;
    let mut producer = Producer::plain(&gateway).await;
    let record = format!("\"{}\"", "x".repeat(100_000));
    for n in 0..5 {
        producer.text(&record).await;
        producer.text("1").await;
        producer.until_durable(n * 2 + 1).await;
    }
    assert_eq!(pod.see(|memory| memory.records()), 10);
}
