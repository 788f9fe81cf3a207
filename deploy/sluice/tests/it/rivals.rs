//! Two producers of one name, where nobody has made the table yet: nothing says who was there first but their records.
//!
//! *Owns*: what each of the two is told, and that what was acked is the one's whose rows are in the table.

use crate::ledger::Ledger;
use crate::server::Server;
use crate::wire::Producer;

const RECORDS: u64 = 3;

/// Sends records with ids from `first` on. Whether they are durable; else its producer was fenced.
async fn send(producer: &mut Producer, first: i64) -> bool {
    for id in (first..).take(RECORDS as usize) {
        producer.text(&format!("{{\"id\":{id}}}")).await;
    }
    match producer.outcome(RECORDS - 1).await {
        Ok(_) => true,
        Err((error, close)) => {
            assert_eq!((error.code.as_str(), close, error.retryable), ("fenced", 4409, false), "{error}");
            false
        }
    }
}

#[tokio::test]
async fn an_idle_producer_is_fenced_by_one_whose_records_made_the_table() {
    let server = Server::with_auto_create(true, &[]);
    let mut ledger = Ledger::new(&server, "t");
    let mut idle = Producer::plain_at(&server, "t/stream?name=loader").await;
    let mut quick = Producer::plain_at(&server, "t/stream?name=loader").await;
    assert!(send(&mut quick, 100).await);
    quick.until_committed(RECORDS - 1).await;
    for offset in 0..RECORDS {
        ledger.owe(&quick.stream, offset, 100 + offset as i64);
    }
    drop(quick);
    assert!(!send(&mut idle, 200).await, "its session is not the one that the stream has");
    let again = Producer::plain_at(&server, "t/stream?name=loader").await;
    assert_eq!(again.next_offset, RECORDS);
    drop(again);
    ledger.check().await;
    server.end();
}

#[tokio::test]
async fn another_stream_that_makes_the_table_makes_nobody_else_first() {
    let server = Server::with_auto_create(true, &[]);
    let mut ledger = Ledger::new(&server, "t");
    let mut idle = Producer::plain_at(&server, "t/stream?name=loader").await;
    ledger.good().await;
    let mut quick = Producer::plain_at(&server, "t/stream?name=loader").await;
    assert!(send(&mut quick, 100).await);
    for offset in 0..RECORDS {
        ledger.owe(&quick.stream, offset, 100 + offset as i64);
    }
    assert!(!send(&mut idle, 200).await);
    ledger.check().await;
    server.end();
}

#[tokio::test]
async fn of_two_that_race_one_is_acked_and_it_is_the_one_whose_rows_are_there() {
    let server = Server::with_auto_create(true, &[]);
    let mut ledger = Ledger::new(&server, "t");
    let mut pairs = Vec::new();
    for name in 0..8 {
        let path = format!("t/stream?name=loader-{name}");
        let [one, two] = [Producer::plain_at(&server, &path).await, Producer::plain_at(&server, &path).await];
        pairs.push((one, two));
    }
    let races = pairs.iter_mut().zip(1..).map(|((one, two), pair)| async move {
        let (first, second) = (pair * 1000, pair * 1000 + 500);
        let acked = tokio::join!(send(one, first), send(two, second));
        assert_ne!(acked.0, acked.1, "one of the two is");
        (one.stream.clone(), if acked.0 { first } else { second })
    });
    for (stream, first) in futures_util::future::join_all(races).await {
        for offset in 0..RECORDS {
            ledger.owe(&stream, offset, first + offset as i64);
        }
    }
    drop(pairs);
    ledger.check().await;
    server.end();
}
