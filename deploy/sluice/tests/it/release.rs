//! A lost volume, with real processes: what an operator sees of it, gives up, and is left with.
//!
//! *Owns*: `sluice release` and what becomes of the pool by it.
//! *Does not own*: when a release is refused otherwise (`pod/tests/it/tables/release.rs`), the admin API's words (`gateway`).

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use futures_util::{SinkExt, StreamExt};
use serde_json::{Value, json};
use tokio_tungstenite::tungstenite::Message;

use crate::adopt::{next_offset, send_named};
use crate::pool::{Pool, Producer, command};
use crate::server::{soon, until};

/// As it stands in `pod/src/app.rs`, and in README.
const EXIT_CONFLICT: i32 = 78;

fn described(pool: &Pool) -> Option<(Value, String)> {
    let output = command(&["tables", "t", "--url", &pool.url]).output().expect("runs");
    let note = String::from_utf8(output.stderr).expect("UTF-8");
    Some((serde_json::from_slice(&output.stdout).ok()?, note))
}

/// The ranges that are named, less the words around them.
fn named(said: &str) -> Vec<&str> {
    said.lines().filter(|line| line.starts_with("main.default.t ")).collect()
}

/// Opens a named stream from its first offset on, and sends so many records: which of them are refused as released.
async fn sent_again(pool: &Pool, name: &str, records: u64) -> Vec<u64> {
    let url = format!("{}/v1/tables/t/stream?name={name}&resume_at=0", pool.url);
    let (mut socket, _) = Box::pin(tokio_tungstenite::connect_async(url)).await.expect("connects");
    for id in 0..records {
        socket.send(Message::text(format!("{{\"id\":{id}}}"))).await.expect("sends");
    }
    let mut refused = Vec::new();
    loop {
        let message = soon("an answer", socket.next()).await.expect("open").expect("no failure");
        let Message::Text(text) = message else { continue };
        let said: Value = serde_json::from_str(&text).expect("JSON");
        if let Some(offset) = said["rejected"]["offset"].as_u64() {
            assert_eq!(said["rejected"]["code"], "released", "{said}");
            refused.push(offset);
        }
        if said["durable"] == records - 1 {
            return refused;
        }
    }
}

/// It was not lost after all: what was given up stays so, however the log is started.
fn comes_back_in_vain(pool: &Pool, (volume, aside): (&Path, &Path), log: &str) {
    let ends = |mut command: Command| {
        let Output { status, stderr, .. } = command.output().expect("ends by itself");
        let said = String::from_utf8_lossy(&stderr);
        assert_eq!(status.code(), Some(EXIT_CONFLICT), "{said}");
        assert!(said.contains(log) && said.contains("was released by an operator"), "{said}");
    };
    let (data, elsewhere) = (pool.dir.path().join("data"), pool.dir.path().join("elsewhere"));
    fs::rename(aside, volume).expect("moved back");
    let mut pod = command(&["pod", "--id", "pod-1", "--listen", "127.0.0.1:0"]);
    pod.args(["--gossip-listen", "127.0.0.1:0", "--data"]).arg(&data);
    ends(pod);
    fs::create_dir_all(elsewhere.join("pods")).expect("made");
    fs::rename(volume, elsewhere.join("pods/pod-1")).expect("moved away");
    let mut up = command(&["up", "--listen", "127.0.0.1:0", "--tables"]);
    up.arg(data.join("tables")).arg("--data").arg(&elsewhere).env("SLUICE_GATEWAY__ADMIN_LISTEN", "off");
    ends(up);
}

#[tokio::test]
async fn a_lost_volumes_records_are_given_up_by_name_and_its_streams_go_on() {
    // The first pod commits nothing before it is killed; until then all streams are there.
    let slow = ("SLUICE_POD__FLUSH_INTERVAL_MS", "120000");
    let second = [("SLUICE_POD__JOIN", "held"), ("SLUICE_POD__FLUSH_INTERVAL_MS", "50")];
    let mut pool = Pool::start(&[slow], &second).await;
    // It has pods commit what they can: so before there is anything.
    pool.refuse(&["release", "--pod", "pod-1", "--dry-run"], &["is not lost", "pod pod-1 is there"]);
    let mut producer = Producer::connect(&pool).await;
    producer.send().await;
    let mut loader = send_named(&pool, "loader", 50).await;
    let other = send_named(&pool, "other", 30).await;
    drop(other);
    pool.say(&["join", "pod-2"]);
    pool.until_phases(["active", "active"]).await;
    pool.take(0).kill().expect("ran until then");
    let (volume, aside) = (pool.dir.path().join("data/pods/pod-1"), pool.dir.path().join("aside"));
    fs::rename(&volume, &aside).expect("moved away");
    producer.send().await;
    loader.send().await;
    pool.until_phases(["lost", "active"]).await;
    let waits =
        async || described(&pool).filter(|(of, _)| of["held"].as_array().is_some_and(|held| held.len() == 2));
    let (shown, note) = until("what waits, for people", waits).await;
    let gap = |stream: &str| {
        let held = shown["held"].as_array().expect("a list").iter();
        held.clone().find(|gap| gap["stream"] == stream).expect("it waits").clone()
    };
    assert_eq!(gap(&producer.stream)["missing"], json!([0, 20]), "{shown}");
    assert_eq!(gap(&loader.stream)["missing"], json!([0, 50]), "{shown}");
    assert_eq!(gap(&loader.stream)["pods"], json!(["pod-2"]), "{shown}");
    assert_eq!(shown["waits_for_logs"][0]["pod"], "pod-1", "{shown}");
    let log = shown["waits_for_logs"][0]["log"].as_str().expect("a log").to_owned();
    assert!(note.contains(&format!("log {log} of pod-1")) && note.contains("sluice release --log"), "{note}");
    let dry = pool.say(&["release", "--pod", "pod-1", "--dry-run"]);
    assert!(dry.contains("would be given up: 70 offsets in 2 range(s)"), "{dry}");
    assert!(named(&dry).iter().any(|line| line.contains("other") && line.contains(" 0- ")), "{dry}");
    pool.refuse(&["release", "--log", &log], &["--dry-run", "--yes"]);
    let said = pool.say(&["release", "--log", &log, "--yes"]);
    assert_eq!(named(&said), named(&dry), "what was named before");
    let rows = async || described(&pool).filter(|(of, _)| of["rows"] == 40 && of["held_runs"] == 0);
    let (shown, note) = until("what waited", rows).await;
    assert!(note.is_empty() && shown["held"] == json!([]), "{shown} {note}");
    let again = pool.say(&["release", "--log", &log, "--yes"]);
    assert!(again.starts_with("given up: 0 offsets in 0 range(s)\n"), "{again}");
    assert!(named(&again).is_empty() && again.contains("was released before, at 20"), "{again}");
    pool.refuse(&["release", "--log", "nope", "--yes"], &["'nope'", "such as", "sluice tables TABLE"]);
    pool.refuse(&["release", "--table", "nope", "--yes"], &["there is no table main.default.nope"]);
    assert_eq!(next_offset(&pool, "other").await, 0);
    producer.send().await;
    drop(loader);
    assert_eq!(next_offset(&pool, "loader").await, 70);
    // A producer that sends all of it once more hears what was given up, as it hears of bad records.
    assert_eq!(sent_again(&pool, "loader", 70).await, (0..50).collect::<Vec<_>>());
    let log_of_pod = fs::read_to_string(pool.dir.path().join("pod-2.log")).expect("a log");
    assert!(!log_of_pod.contains("at the drain"), "it does not drain");
    let data = pool.dir.path().join("data");
    let verified = ["verify", "t", "--every-version", "--data", data.to_str().expect("text")];
    let Output { status, stdout, .. } = command(&verified).output().expect("runs");
    let verified = String::from_utf8(stdout).expect("UTF-8");
    println!("{verified}");
    assert!(status.success() && verified.contains("main.default.t__rejected: 70; no fault"), "{verified}");
    comes_back_in_vain(&pool, (&volume, &aside), &log);
    // With a new log it is welcome.
    pool.start_pod(0, &[slow]);
    pool.until_phases(["active", "active"]).await;
    let unknown = ["release", "--log", "00000000-0000-0000-0000-000000000001", "--dry-run"];
    pool.refuse(&unknown, &["ever heard of log", &log]);
    pool.end();
}
