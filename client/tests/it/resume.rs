//! Lost connections: exactly what is not covered is sent again.

use std::sync::Arc;

use arrow::array::{ArrayRef, AsArray, Int64Array, RecordBatch};
use arrow::datatypes::Int64Type;
use serde_json::json;
use sluice_client::{Client, Encoding, Error};
use sluice_shared::frame::ProducerFrame;

use crate::fake::{FakeGateway, Records, hasty, within};
use crate::flow::decoded;

const EPHEMERAL: [&str; 2] = ["~018f0000000070008000000000000001", "~018f0000000070008000000000000002"];

fn lines(frames: &[Records]) -> Vec<String> {
    frames.iter().flat_map(Records::lines).collect()
}

fn expected(range: std::ops::Range<u64>) -> Vec<String> {
    range.map(|n| format!("{{\"n\":{n}}}")).collect()
}

#[tokio::test]
async fn a_named_stream_is_resumed_inside_a_frame() {
    let gateway = FakeGateway::start().await;
    let client = gateway.client().await;
    let producer = async {
        let builder = client.stream("t").name("n").retry(hasty()).encoding(Encoding::Json);
        let mut stream = builder.open().await.expect("opens");
        let text: String = expected(0..30).iter().map(|line| format!("{line}\n")).collect();
        stream.send_ndjson(text).await.expect("sent");
        assert_eq!(stream.durable().await.expect("durable"), Some(29));
        assert_eq!(stream.progress().reconnects(), 1);
        assert_eq!(stream.send_json(&json!({"n": 30})).await.expect("sent"), 30);
        stream.finish_durable().await.expect("finished")
    };
    let server = async {
        let (mut connection, _) = gateway.open_at("n#1", 0).await;
        connection.records_between(0, 30).await;
        connection.durable(3).await;
        drop(connection);
        // The gateway had made more durable than it could say, and cannot tell again what was refused of it.
        let (mut connection, open) = gateway.open_at("n#1", 17).await;
        assert_eq!(open.resume_at, Some(4));
        assert_eq!(lines(&connection.records_between(17, 30).await), expected(17..30));
        connection.durable(29).await;
        assert_eq!(lines(&[connection.records().await]), expected(30..31));
        connection.durable(30).await;
        connection.finish().await;
    };
    let (summary, ()) = within(async { tokio::join!(producer, server) }).await;
    assert_eq!((summary.records, summary.durable), (31, Some(30)));
}

#[tokio::test]
async fn rejections_that_were_lost_with_a_connection_are_heard_once() {
    let gateway = FakeGateway::start().await;
    let client = gateway.client().await;
    let producer = async {
        let builder = client.stream("t").name("n").retry(hasty()).encoding(Encoding::Json);
        let mut stream = builder.open().await.expect("opens");
        stream.send_ndjson(expected(0..10).join("\n")).await.expect("sent");
        stream.durable().await.expect("durable");
        stream.rejected().iter().map(|rejected| rejected.offset).collect::<Vec<_>>()
    };
    let server = async {
        let (mut connection, open) = gateway.open_at("n#1", 0).await;
        assert_eq!(open.resume_at, None);
        connection.records_between(0, 10).await;
        connection.reject(2).await;
        connection.durable(4).await;
        connection.reject(5).await;
        drop(connection);
        // All of it is durable by now; what has had no answer comes again.
        let (mut connection, open) = gateway.open_at("n#1", 5).await;
        assert_eq!(open.resume_at, Some(5));
        assert_eq!(lines(&connection.records_between(5, 10).await), expected(5..10));
        for refused in [5, 8] {
            connection.reject(refused).await;
        }
        connection.durable(9).await;
    };
    let (rejected, ()) = within(async { tokio::join!(producer, server) }).await;
    assert_eq!(rejected, [2, 5, 8]);
}

#[tokio::test]
async fn arrow_frames_are_resumed_by_rows() {
    let gateway = FakeGateway::start().await;
    let client = gateway.client().await;
    let producer = async {
        let mut stream = client.stream("t").name("n").retry(hasty()).open().await.expect("opens");
        let column: ArrayRef = Arc::new(Int64Array::from_iter_values(0..100));
        let batch = RecordBatch::try_from_iter([("n", column)]).expect("fits");
        stream.send_batch(batch).await.expect("sent");
        stream.durable().await.expect("durable")
    };
    let server = async {
        let (mut connection, _) = gateway.open_at("n#1", 0).await;
        connection.records_between(0, 100).await;
        drop(connection);
        let (mut connection, _) = gateway.open_at("n#1", 42).await;
        let rest = decoded(&connection.records().await);
        let numbers = rest.column(0).as_primitive::<Int64Type>().values().to_vec();
        assert_eq!(numbers, (42..100).collect::<Vec<i64>>());
        connection.durable(99).await;
    };
    let (durable, ()) = within(async { tokio::join!(producer, server) }).await;
    assert_eq!(durable, Some(99));
}

/// Cuts the connection after each possible number of frames and acks in turn; the gateway keeps some of what it
/// was sent, as a real one does.
#[tokio::test]
async fn whatever_is_cut_each_record_arrives_once() {
    const RECORDS: u64 = 40;
    const CUTS: usize = 4;
    for frames_before_cut in 0..6 {
        for kept_back in [0, 1, 5] {
            let gateway = FakeGateway::start().await;
            let client = gateway.client().await;
            let producer = async {
                let builder = client.stream("t").name("n").retry(hasty());
                let mut stream = builder.open().await.expect("opens");
                for n in 0..RECORDS {
                    stream.send_json(&json!({"n": n})).await.expect("sent");
                    tokio::task::yield_now().await;
                }
                stream.finish_durable().await.expect("finished")
            };
            let server = async {
                let mut held: Vec<String> = Vec::new();
                for _ in 0..CUTS {
                    let (mut connection, _) = gateway.open_at("n#1", held.len() as u64).await;
                    for _ in 0..frames_before_cut {
                        let Some(ProducerFrame::Records { first_offset: first, count, payload }) =
                            connection.read().await
                        else {
                            break;
                        };
                        assert_eq!(first, held.len() as u64);
                        held.extend(Records { first, count, payload: payload.to_vec() }.lines());
                    }
                    // What was not acknowledged may be lost with the gateway.
                    held.truncate(held.len().saturating_sub(kept_back));
                }
                let (mut connection, _) = gateway.open_at("n#1", held.len() as u64).await;
                held.extend(lines(&connection.records_between(held.len() as u64, RECORDS).await));
                connection.durable(RECORDS - 1).await;
                connection.finish().await;
                held
            };
            let (summary, held) = within(async { tokio::join!(producer, server) }).await;
            assert_eq!(held, expected(0..RECORDS), "cut after {frames_before_cut}, {kept_back} lost");
            assert_eq!(summary.durable, Some(RECORDS - 1));
        }
    }
}

#[tokio::test]
async fn an_ephemeral_stream_goes_on_as_a_new_one() {
    let gateway = FakeGateway::start().await;
    let client = gateway.client().await;
    let producer = async {
        let mut stream = client.stream("t").retry(hasty()).open().await.expect("opens");
        let text: String = expected(0..10).iter().map(|line| format!("{line}\n")).collect();
        stream.send_ndjson(text).await.expect("sent");
        stream.durable().await.expect("durable");
        assert_eq!(stream.rejected().iter().map(|r| r.offset).collect::<Vec<_>>(), [5]);
        assert_eq!(stream.send_json(&json!({"n": 10})).await.expect("sent"), 10);
        let summary = stream.finish().await.expect("finished");
        (summary.committed, summary.version, summary.unconfirmed, summary.rejected)
    };
    let server = async {
        let (mut connection, _) = gateway.open_at(EPHEMERAL[0], 0).await;
        connection.records_between(0, 10).await;
        connection.committed(1, 4).await;
        connection.durable(3).await;
        connection.reject(5).await;
        drop(connection);
        // Offsets 4 to 9 come again, as 0 to 5 of a new stream.
        let (mut connection, _) = gateway.open_at(EPHEMERAL[1], 0).await;
        assert_eq!(lines(&connection.records_between(0, 6).await), expected(4..10));
        connection.reject(1).await;
        connection.durable(5).await;
        assert_eq!(connection.records().await.first, 6);
        connection.finish().await;
        connection.committed(6, 9).await;
    };
    let (outcome, ()) = within(async { tokio::join!(producer, server) }).await;
    assert_eq!(outcome, (Some(10), Some(9), 2, 1));
}

#[tokio::test]
async fn a_gateway_that_goes_away_is_left_when_all_is_acknowledged() {
    let (old, new) = (FakeGateway::start().await, FakeGateway::start().await);
    let client = Client::connect(&format!("{},{}", old.url(), new.url())).await.expect("valid");
    let producer = async {
        let mut stream = client.stream("t").name("n").retry(hasty()).open().await.expect("opens");
        stream.send_json(&json!({"n": 0})).await.expect("sent");
        stream.durable().await.expect("durable");
        while stream.progress().reconnects() == 0 {
            tokio::task::yield_now().await;
        }
        stream.send_json(&json!({"n": 1})).await.expect("sent");
        stream.finish_durable().await.expect("finished").records
    };
    let server = async {
        let (mut connection, _) = old.open_at("n#1", 0).await;
        connection.records().await;
        connection.going_away(60_000).await;
        connection.durable(0).await;
        assert!(connection.read().await.is_none(), "it leaves");
        let (mut connection, _) = new.open_at("n#1", 1).await;
        assert_eq!(connection.records().await.first, 1);
        connection.durable(1).await;
        connection.finish().await;
    };
    let (records, ()) = within(async { tokio::join!(producer, server) }).await;
    assert_eq!(records, 2);
}

#[tokio::test]
async fn a_gateway_that_forgot_what_was_durable_is_not_believed() {
    let gateway = FakeGateway::start().await;
    let client = gateway.client().await;
    let producer = async {
        let mut stream = client.stream("t").name("n").retry(hasty()).open().await.expect("opens");
        stream.send_ndjson("{}\n{}\n").await.expect("sent");
        stream.committed().await.expect_err("broken promise")
    };
    let server = async {
        let (mut connection, _) = gateway.open_at("n#1", 0).await;
        connection.records_between(0, 2).await;
        connection.durable(1).await;
        drop(connection);
        gateway.open_at("n#1", 1).await
    };
    let (error, _) = within(async { tokio::join!(producer, server) }).await;
    assert!(matches!(&error, Error::Protocol { what, .. } if what.contains("may be lost")), "{error}");
}
