//! Logs in the tables' store, with real processes: pods that are killed, stopped and drained.
//!
//! *Owns*: what becomes of a log whose pod is gone, as producers, readers and operators see it.
//! *Does not own*: the pool otherwise (`pool`), the log itself (`pod/src/wal/object`), faults at random (`loadtest`).

use std::fs;

use futures_util::{SinkExt, StreamExt};
use serde_json::Value;
use tokio_tungstenite::tungstenite::Message;

use crate::pool::{Pool, Producer};
use crate::server::{PATIENCE, soon, until};

/// As it stands in `pod/src/app.rs`, and in README.
const EXIT_FENCED: i32 = 75;
/// Records are durable long before they are committed.
const ENV: [(&str, &str); 3] = [
    ("SLUICE_POD__LOG", "object"),
    ("SLUICE_POD__ADOPT_AFTER_MS", "1000"),
    ("SLUICE_POD__FLUSH_INTERVAL_MS", "1500"),
];

/// How many objects each log has left, the logs without any included.
fn logs(pool: &Pool) -> Vec<Vec<String>> {
    let folder = pool.dir.path().join("data/tables/_sluice/wal");
    let names = |path: &std::path::Path| {
        let entries = fs::read_dir(path).expect("a folder");
        let names = entries.map(|entry| entry.expect("readable").file_name().into_string().expect("text"));
        names.collect::<Vec<_>>()
    };
    names(&folder).iter().map(|log| names(&folder.join(log))).collect()
}

/// Until all that is left of a number of logs is a seal each.
async fn until_sealed(pool: &Pool, sealed: usize) {
    let seen = async || {
        let seals = logs(pool).iter().filter(|names| names.len() == 1 && names[0].len() == 20).count();
        (seals == sealed).then_some(())
    };
    until("the end of the logs that were taken over", seen).await;
}

/// Says of a named stream where it goes on, once that can be said.
pub(crate) async fn next_offset(pool: &Pool, name: &str) -> u64 {
    let url = format!("{}/v1/tables/t/stream?name={name}", pool.url);
    let opened = async || {
        let (mut socket, _) = Box::pin(tokio_tungstenite::connect_async(&url)).await.ok()?;
        match socket.next().await?.ok()? {
            Message::Text(text) => serde_json::from_str::<Value>(&text).ok()?["next_offset"].as_u64(),
            _ => None,
        }
    };
    until("the named stream", opened).await
}

/// Sends records to a named stream, and answers when all are durable.
pub(crate) async fn send_named(pool: &Pool, name: &str, records: u64) -> Producer {
    let url = format!("{}/v1/tables/t/stream?name={name}", pool.url);
    let (mut socket, _) = Box::pin(tokio_tungstenite::connect_async(url)).await.expect("connects");
    let mut producer = None;
    for id in 0..records {
        socket.send(Message::text(format!("{{\"id\":{id}}}"))).await.expect("sends");
    }
    loop {
        let message = soon("an ack", socket.next()).await.expect("open").expect("no failure");
        let Message::Text(text) = message else { continue };
        let heard: Value = serde_json::from_str(&text).expect("JSON");
        if let Some(stream) = heard["stream"].as_str() {
            producer = Some(stream.to_owned());
        }
        if heard["durable"].as_u64() == Some(records - 1) {
            let stream = producer.take().expect("opened");
            return Producer::of(socket, stream, records);
        }
    }
}

#[tokio::test]
async fn a_killed_pods_log_is_taken_over_and_its_streams_open_elsewhere() {
    let mut pool = Pool::start(&ENV, &[]).await;
    let mut producer = Producer::connect(&pool).await;
    producer.send().await;
    let holder = pool.holder(1).await;
    let named = send_named(&pool, "loader", 50).await;
    // Wherever that one is: both pods get to die. The first one never comes back.
    pool.take(holder).kill().expect("ran until then");
    producer.send().await;
    until_sealed(&pool, 1).await;
    assert_eq!(next_offset(&pool, "loader").await, 50);
    pool.check(&[producer, named]).await;
    // A pod that comes back takes the log of its own former life over at once, with nobody else there.
    let mut producer = Producer::connect(&pool).await;
    producer.send().await;
    pool.take(1 - holder).kill().expect("ran until then");
    pool.start_pod(1 - holder, &ENV);
    producer.send().await;
    until_sealed(&pool, 2).await;
    pool.end();
}

#[tokio::test]
async fn a_stopped_pod_that_goes_on_later_is_fenced_and_ends() {
    let mut pool = Pool::start(&ENV, &[]).await;
    let mut producer = Producer::connect(&pool).await;
    producer.send().await;
    let holder = pool.holder(1).await;
    let mut stopped = pool.take(holder);
    stopped.signal(libc::SIGSTOP).expect("runs");
    producer.send().await;
    until_sealed(&pool, 1).await;
    stopped.signal(libc::SIGCONT).expect("is there");
    let status = stopped.ends(PATIENCE).expect("ends");
    assert_eq!(status.code(), Some(EXIT_FENCED), "{}", stopped.log_tail());
    let log = stopped.log_tail();
    let by = format!("was taken over by pod pod-{}", 2 - holder);
    assert!(log.contains(&by) && log.contains("the process ends"), "no {by} in {log}");
    producer.send().await;
    pool.check(&[producer]).await;
    pool.end();
}

#[tokio::test]
async fn nothing_is_left_of_the_logs_of_pods_that_drain() {
    let mut pool = Pool::start(&ENV, &[]).await;
    let mut producer = Producer::connect(&pool).await;
    producer.send().await;
    for nth in 0..2 {
        let pod = pool.take(nth);
        if nth == 0 {
            producer.send_during(move || pod.terminate()).await.expect("drains");
            assert_eq!(logs(&pool).iter().filter(|names| names.is_empty()).count(), 1, "{:?}", logs(&pool));
            pool.check(std::slice::from_ref(&producer)).await;
        } else {
            pod.terminate().expect("drains");
        }
    }
    assert_eq!(logs(&pool), [Vec::<String>::new(), Vec::new()]);
    let notes = fs::read_dir(pool.dir.path().join("data/tables/_sluice/logs")).expect("a folder");
    for note in notes {
        let said = fs::read_to_string(note.expect("readable").path()).expect("text");
        assert_eq!(said, "{\"holds_nothing\":true}\n");
    }
}
