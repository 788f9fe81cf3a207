//! The quiet life: records, acks, windows, ends.

use std::sync::Arc;

use arrow::array::{ArrayRef, Int64Array, RecordBatch};
use arrow::buffer::Buffer;
use arrow::ipc::reader::StreamDecoder;
use bytes::Bytes;
use serde_json::json;
use sluice_client::{Encoding, Error, UnknownFields};
use sluice_shared::frame::FinishWhen;

use crate::fake::{FakeGateway, Records, within};

const STREAM: &str = "~018f0000000070008000000000000000";

fn numbers(range: std::ops::Range<i64>) -> RecordBatch {
    let column: ArrayRef = Arc::new(Int64Array::from_iter_values(range));
    RecordBatch::try_from_iter([("n", column)]).expect("fits")
}

pub(crate) fn decoded(records: &Records) -> RecordBatch {
    let mut buffer = Buffer::from(Bytes::from(records.payload.clone()));
    StreamDecoder::new().decode(&mut buffer).expect("valid").expect("one batch")
}

#[tokio::test]
async fn records_are_numbered_acknowledged_and_committed() {
    let gateway = FakeGateway::start().await;
    let client = gateway.client().await.token("secret");
    let producer = async {
        let builder = client.stream("flights").name("loader-1").unknown_fields(UnknownFields::Ignore);
        let mut stream = builder.encoding(Encoding::Json).open().await.expect("opens");
        assert_eq!(stream.send_json(&json!({"n": 0})).await.expect("sent"), 0);
        assert_eq!(stream.durable().await.expect("durable"), Some(0));
        let range = stream.send_ndjson("{\"n\":1}\n\n{\"n\":2}").await.expect("sent");
        assert_eq!((range.start, range.end), (1, 3));
        let committed = stream.committed().await.expect("committed").expect("some");
        assert_eq!((committed.offset, committed.version, committed.unconfirmed), (2, Some(7), 0));
        assert_eq!(stream.progress().stream_id().as_deref(), Some("loader-1#1"));
        stream.finish().await.expect("finished")
    };
    let server = async {
        let (mut connection, open) = gateway.open_at("loader-1#1", 0).await;
        assert_eq!(connection.path, "/v1/tables/main.default.flights/stream");
        assert_eq!(open.table.expect("table").as_str(), "main.default.flights");
        assert_eq!(open.name.expect("name").as_str(), "loader-1");
        assert_eq!((open.unknown, open.token.as_deref()), (UnknownFields::Ignore, Some("secret")));
        assert_eq!(connection.records().await.lines(), ["{\"n\":0}"]);
        connection.durable(0).await;
        let rest: Vec<String> =
            connection.records_between(1, 3).await.iter().flat_map(Records::lines).collect();
        assert_eq!(rest, ["{\"n\":1}", "", "{\"n\":2}"]);
        connection.committed(2, 7).await;
        assert_eq!(connection.finish().await.when, FinishWhen::Committed);
        connection.close(1000).await;
    };
    let (summary, ()) = within(async { tokio::join!(producer, server) }).await;
    assert_eq!((summary.records, summary.durable, summary.committed), (3, Some(2), Some(2)));
    assert_eq!((summary.version, summary.unconfirmed), (Some(7), 0));
}

#[tokio::test]
async fn small_records_travel_together_while_acks_are_due() {
    let gateway = FakeGateway::start().await;
    let client = gateway.client().await;
    let producer = async {
        let mut stream = client.stream("t").open().await.expect("opens");
        for n in 0..5000 {
            assert_eq!(stream.send_json(&json!({"n": n})).await.expect("sent"), n);
        }
        stream.finish_durable().await.expect("finished")
    };
    let server = async {
        let (mut connection, _) = gateway.open_at(STREAM, 0).await;
        let frames = connection.records_between(0, 5000).await;
        assert!(frames.len() < 50, "{} frames", frames.len());
        let lines: Vec<String> = frames.iter().flat_map(Records::lines).collect();
        let expected: Vec<String> = (0..5000).map(|n| format!("{{\"n\":{n}}}")).collect();
        assert_eq!(lines, expected);
        assert_eq!(connection.finish().await.when, FinishWhen::Durable);
        connection.durable(4999).await;
        assert!(connection.read().await.is_none());
    };
    let (summary, ()) = within(async { tokio::join!(producer, server) }).await;
    assert_eq!((summary.records, summary.durable, summary.committed), (5000, Some(4999), None));
}

#[tokio::test]
async fn large_batches_are_sliced_to_the_gateways_frames() {
    let gateway = FakeGateway::start().await;
    let client = gateway.client().await;
    let producer = async {
        let mut stream = client.stream("t").open().await.expect("opens");
        let range = stream.send_batch(numbers(0..20_000)).await.expect("sent");
        assert_eq!((range.start, range.end), (0, 20_000));
        let mixed = stream.send_json(&json!({})).await.expect_err("Arrow stream");
        assert!(matches!(mixed, Error::MixedEncodings { .. }), "{mixed}");
        stream.durable().await.expect("durable")
    };
    let server = async {
        let (mut connection, open) = gateway.open_with(STREAM, 0, 8 << 20, 16 << 10).await;
        assert_eq!(open.encoding, Encoding::Arrow);
        assert!(open.schema.is_some(), "creates the table");
        let frames = connection.records_between(0, 20_000).await;
        assert!(frames.len() > 5);
        for frame in &frames {
            assert!(frame.payload.len() <= 16 << 10);
            assert_eq!(decoded(frame), numbers(frame.first as i64..frame.next() as i64));
        }
        connection.durable(19_999).await;
    };
    let (durable, ()) = within(async { tokio::join!(producer, server) }).await;
    assert_eq!(durable, Some(19_999));
}

#[tokio::test]
async fn a_full_window_makes_senders_wait() {
    let gateway = FakeGateway::start().await;
    let client = gateway.client().await;
    let record = json!({"text": "x".repeat(1000)});
    let producer = async {
        let mut stream = client.stream("t").encoding(Encoding::Json).open().await.expect("opens");
        let mut sent = 0;
        // The gateway's window of 10,000 bytes is smaller than the own one.
        while tokio::time::timeout(std::time::Duration::from_millis(300), stream.send_json(&record))
            .await
            .is_ok()
        {
            sent += 1;
        }
        assert_eq!(sent, 9, "each record has 1,012 bytes");
        (stream, sent)
    };
    let server = async {
        let (mut connection, _) = gateway.open_with(STREAM, 0, 10_000, 10 << 20).await;
        let first = connection.records().await;
        (connection, first)
    };
    let ((mut stream, sent), (mut connection, first)) =
        within(async { tokio::join!(producer, server) }).await;
    // An ack makes room.
    let rest = async {
        connection.records_between(first.next(), sent).await;
        connection.durable(sent - 1).await;
        connection.records().await
    };
    let (offset, records) = within(async { tokio::join!(stream.send_json(&record), rest) }).await;
    assert_eq!((offset.expect("sent"), records.first), (sent, sent));
}

#[tokio::test]
async fn a_record_larger_than_the_window_goes_alone() {
    let gateway = FakeGateway::start().await;
    let client = gateway.client().await;
    let producer = async {
        let mut stream = client.stream("t").window_bytes(100).open().await.expect("opens");
        stream.send_json(&json!({"text": "x".repeat(5000)})).await.expect("sent");
        let error = stream.send_json(&json!({"text": "x".repeat(20_000)})).await.expect_err("too large");
        assert!(matches!(error, Error::RecordTooLarge { offset: 1, limit: 10_000, .. }), "{error}");
        stream.durable().await.expect("goes on")
    };
    let server = async {
        let (mut connection, _) = gateway.open_with(STREAM, 0, 8 << 20, 10_000).await;
        connection.records().await;
        connection.durable(0).await;
    };
    let (durable, ()) = within(async { tokio::join!(producer, server) }).await;
    assert_eq!(durable, Some(0));
}

#[tokio::test]
async fn rejected_records_are_told_by_name() {
    let gateway = FakeGateway::start().await;
    let client = gateway.client().await;
    let producer = async {
        let mut stream = client.stream("t").open().await.expect("opens");
        stream.send_ndjson("{}\n{}\n{}\n").await.expect("sent");
        stream.durable().await.expect("durable");
        let rejected: Vec<u64> = stream.rejected().iter().map(|rejected| rejected.offset).collect();
        assert_eq!(rejected, [1]);
        assert_eq!(stream.rejected(), []);
        stream.finish_durable().await.expect("finished").rejected
    };
    let server = async {
        let (mut connection, _) = gateway.open_at(STREAM, 0).await;
        connection.records_between(0, 3).await;
        connection.reject(1).await;
        connection.durable(2).await;
        connection.finish().await;
    };
    let (rejected, ()) = within(async { tokio::join!(producer, server) }).await;
    assert_eq!(rejected, 1);
}

#[tokio::test]
async fn a_stream_without_records_ends_at_once() {
    let gateway = FakeGateway::start().await;
    let client = gateway.client().await;
    let producer = async {
        let stream = client.stream("t").name("n").encoding(Encoding::Json).open().await.expect("opens");
        assert_eq!(stream.next_offset(), 40);
        stream.finish().await.expect("finished")
    };
    let server = async {
        let (mut connection, _) = gateway.open_at("n#1", 40).await;
        connection.finish().await;
        connection.close(1000).await;
    };
    let (summary, ()) = within(async { tokio::join!(producer, server) }).await;
    assert_eq!((summary.records, summary.durable, summary.committed), (0, Some(39), Some(39)));
}

#[tokio::test]
async fn a_dropped_stream_ends_its_connection() {
    let gateway = FakeGateway::start().await;
    let client = gateway.client().await;
    let producer = async {
        let mut stream = client.stream("t").open().await.expect("opens");
        stream.send_json(&json!({})).await.expect("sent");
    };
    let server = async {
        let (mut connection, _) = gateway.open_at(STREAM, 0).await;
        while connection.read().await.is_some() {}
    };
    within(async { tokio::join!(producer, server) }).await;
}
