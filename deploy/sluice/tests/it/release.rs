//! A lost volume, with real processes: what an operator sees of it, gives up, and is left with.
//!
//! *Owns*: `sluice release` and what becomes of the pool by it.
//! *Does not own*: when a release is refused otherwise (`pod/tests/it/tables/release.rs`), the admin API's words (`gateway`).

use std::fs;
use std::process::{Command, Output};

use serde_json::{Value, json};

use crate::adopt::{next_offset, send_named};
use crate::pool::{Pool, Producer, command};
use crate::server::until;

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
    println!("{dry}");
    assert!(dry.contains("would be given up: 70 offsets in 2 range(s)"), "{dry}");
    assert!(named(&dry).iter().any(|line| line.contains("other") && line.contains(" 0- ")), "{dry}");
    pool.refuse(&["release", "--log", &log], &["--dry-run", "--yes"]);
    let said = pool.say(&["release", "--log", &log, "--yes"]);
    println!("{said}");
    assert_eq!(named(&said), named(&dry), "what was named before");
    let rows = async || described(&pool).filter(|(of, _)| of["rows"] == 40 && of["held_runs"] == 0);
    let (shown, note) = until("what waited", rows).await;
    assert!(note.is_empty() && shown["held"] == json!([]), "{shown} {note}");
    assert_eq!(next_offset(&pool, "other").await, 0);
    producer.send().await;
    drop(loader);
    assert_eq!(next_offset(&pool, "loader").await, 70);
    let data = pool.dir.path().join("data");
    let verified = ["verify", "t", "--every-version", "--data", data.to_str().expect("text")];
    let Output { status, stdout, .. } = command(&verified).output().expect("runs");
    let verified = String::from_utf8(stdout).expect("UTF-8");
    println!("{verified}");
    assert!(status.success() && verified.contains("main.default.t__rejected: 70; no fault"), "{verified}");
    // It was not lost after all: what was given up stays so.
    fs::rename(&aside, &volume).expect("moved back");
    let mut pod = Command::new(env!("CARGO_BIN_EXE_sluice"));
    pod.args(["pod", "--id", "pod-1", "--listen", "127.0.0.1:0", "--gossip-listen", "127.0.0.1:0"]);
    let Output { status, stderr, .. } = pod.arg("--data").arg(&data).output().expect("ends by itself");
    let said = String::from_utf8_lossy(&stderr);
    assert_eq!(status.code(), Some(EXIT_CONFLICT), "{said}");
    assert!(said.contains(&log) && said.contains("was released by an operator"), "{said}");
    // With a new log it is welcome.
    fs::rename(&volume, &aside).expect("moved away");
    pool.start_pod(0, &[slow]);
    pool.until_phases(["active", "active"]).await;
    let unknown = ["release", "--log", "00000000-0000-0000-0000-000000000001", "--dry-run"];
    pool.refuse(&unknown, &["ever heard of log", &log]);
    pool.end();
}
