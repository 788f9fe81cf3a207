//! Records that cost more than their bytes say.

use crate::ledger::Ledger;
use crate::server::Server;
use crate::wire::Producer;

#[tokio::test]
async fn rows_much_wider_than_their_records_end_no_stream_but_their_own() {
    const COLUMNS: usize = 1999;
    let server = Server::start(&[]);
    let names: Vec<String> = (0..COLUMNS).map(|n| format!("c{n}")).collect();
    let columns: Vec<(&str, &str)> = names.iter().map(|name| (name.as_str(), "int64")).collect();
    let mut ledger = Ledger::create(&server, "t", &columns).await;
    // Each row has 16 KB: more than a log segment takes together.
    let wide = "{\"id\":999}\n".repeat(4900);
    let mut bystander = Producer::plain(&server, "t").await;
    let mut producer = Producer::framed(&server, "t", serde_json::json!({})).await;
    producer.records(0, 4900, wide.as_bytes()).await;
    let id = ledger.id();
    assert!(bystander.text(&format!("{{\"id\":{id}}}")).await);
    assert_eq!(bystander.until_durable(bystander.next_offset).await, []);
    ledger.owe(&bystander.stream, bystander.next_offset, id);
    bystander.next_offset += 1;
    let refused = producer.outcome(4899).await.expect("no failure");
    assert_eq!(refused.len(), 0);
    (0..4900).for_each(|offset| ledger.owe(&producer.stream, offset, None));
    ledger.check().await;
    server.end();
}

#[tokio::test]
async fn many_refusals_of_one_producer_end_no_other_stream_and_take_bounded_memory() {
    /// Each refusal takes some 200 bytes: 240 MB, if nothing held them back. The budgets, and one flush of the table,
    /// let a part of that through.
    const FRAMES: u64 = 60;
    const RECORDS: u64 = 20_000;
    const GROWTH_BYTES_MAX: u64 = 160 << 20;
    let server =
        Server::start(&[("SLUICE_POD__INGRESS_BYTES", "16MiB"), ("SLUICE_POD__MEMORY_BYTES", "16MiB")]);
    let mut ledger = Ledger::create(&server, "t", &[]).await;
    let mut bad = Producer::framed(&server, "t", serde_json::json!({})).await;
    let before = server.memory_bytes();
    for n in 0..FRAMES {
        let frame = "x\n".repeat(RECORDS as usize);
        assert!(bad.records(n * RECORDS, RECORDS as u32, frame.as_bytes()).await);
    }
    let refused = bad.outcome(FRAMES * RECORDS - 1).await.expect("no failure");
    assert_eq!(refused.len() as u64, FRAMES * RECORDS);
    let grown = server.memory_bytes().saturating_sub(before);
    assert!(grown < GROWTH_BYTES_MAX, "grew by {} MiB", grown >> 20);
    drop(bad);
    ledger.good().await;
    ledger.check().await;
    server.end();
}
