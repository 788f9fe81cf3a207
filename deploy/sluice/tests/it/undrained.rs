//! Drains that cannot come to their end, with real processes: what waits in a log for another one is not called drained.
//!
//! *Owns*: what an operator, and whoever starts processes, is told of it.
//! *Does not own*: what waits, and for what (`pod`); drains that come to their end (`pool`).

use std::fs;
use std::time::Duration;

use serde_json::Value;

use crate::pool::{Pool, Producer, command};
use crate::server::until;

/// As it stands in `deploy/sluice/src/up.rs`, and in README.
const EXIT_UNDRAINED: i32 = 69;
const ENDED: Duration = Duration::from_secs(20);

async fn rows(pool: &Pool, rows: u64) {
    let seen = async || {
        let output = command(&["tables", "t", "--url", &pool.url]).output().expect("runs");
        let shown: Value = serde_json::from_slice(&output.stdout).ok()?;
        (shown["rows"] == rows).then_some(())
    };
    until("the rows", seen).await;
}

#[tokio::test]
async fn a_drain_whose_deadline_comes_before_all_is_committed_says_so_and_by_its_status() {
    // The first pod commits nothing before it is killed; until then the stream is there. The second one would wait for a
    // SIGTERM once it has drained.
    let slow = ("SLUICE_POD__FLUSH_INTERVAL_MS", "120000");
    let second = [
        ("SLUICE_POD__JOIN", "held"),
        ("SLUICE_POD__FLUSH_INTERVAL_MS", "50"),
        ("SLUICE_POD__AFTER_DRAIN", "wait"),
    ];
    let mut pool = Pool::start(&[slow], &second).await;
    let mut producer = Producer::connect(&pool).await;
    producer.send().await;
    pool.say(&["join", "pod-2"]);
    pool.until_phases(["active", "active"]).await;
    pool.take(0).kill().expect("ran until then");
    producer.send().await;
    pool.until_phases(["lost", "active"]).await;
    drop(producer);
    let log =
        fs::canonicalize(pool.dir.path()).expect("there").join("data/pods/pod-2/wal").display().to_string();
    let (status, said, complained) = pool.run(&["drain", "pod-2", "--force", "--deadline", "1s", "--wait"]);
    println!("{said}{complained}");
    assert_eq!(status, 2, "{said}{complained}");
    assert!(
        !said.contains("is drained") && complained.contains("pod-2 has not drained"),
        "{said}{complained}"
    );
    assert!(complained.contains("start pod-2 again"), "{complained}");
    let ended = pool.take(1).ends(ENDED).expect("ends, although it was to wait");
    assert_eq!(ended.code(), Some(EXIT_UNDRAINED));
    let told = fs::read_to_string(pool.dir.path().join("pod-2.log")).expect("a log");
    let line = told.lines().find(|line| line.starts_with("not drained: ")).expect("a last word");
    for part in
        ["pod pod-2", &log, "entries (", "start the pod again", "1 runs wait for records of other logs"]
    {
        assert!(line.contains(part), "{part:?} is not in {line:?}");
    }
    let shown: Value = serde_json::from_str(&pool.say(&["pods", "pod-2", "--json"])).expect("JSON");
    assert_eq!(shown["phase"], "undrained", "{shown}");
    pool.refuse_after(&["drain", "pod-2", "--wait"], &["pod-2 has not drained"]);
    // Started again, with what they wait for, all of it is committed.
    pool.start_pod(0, &[("SLUICE_POD__FLUSH_INTERVAL_MS", "50")]);
    pool.start_pod(1, &[]);
    pool.until_phases(["active", "active"]).await;
    rows(&pool, 40).await;
    pool.end();
}

#[tokio::test]
async fn a_pod_whose_former_log_in_the_store_misses_an_object_has_not_drained() {
    let slow = [("SLUICE_POD__LOG", "object"), ("SLUICE_POD__FLUSH_INTERVAL_MS", "120000")];
    let mut pool = Pool::start(&slow, &[]).await;
    let mut producer = Producer::connect(&pool).await;
    for _ in 0..3 {
        producer.send().await;
    }
    let holder = pool.holder(1).await;
    drop(producer);
    let mut pod = pool.take(holder);
    pod.signal(libc::SIGKILL).expect("runs");
    let path = pool.dir.path().join(format!("pod-{}.log", holder + 1));
    let told = || fs::read_to_string(&path).expect("a log");
    let log =
        told().split_whitespace().find_map(|word| word.strip_prefix("log=")).expect("its id").to_owned();
    pod.ends(ENDED).expect("killed");
    let folder = pool.dir.path().join("data/tables/_sluice/wal").join(&log);
    fs::remove_file(folder.join(format!("{:020}", 2))).expect("an object");
    // Else the gateway may have the old life's address still.
    pool.until_phases(if holder == 0 { ["lost", "active"] } else { ["active", "lost"] }).await;
    pool.start_pod(holder, &slow);
    let named = async || told().contains("sluice release --log").then_some(());
    until("the error", named).await;
    pool.until_phases(["active", "active"]).await;
    let id = format!("pod-{}", holder + 1);
    let (status, said, complained) = pool.run(&["drain", &id, "--force", "--wait"]);
    assert_eq!(status, 2, "{said}{complained}");
    assert!(complained.contains(&log) && complained.contains("sluice release --log"), "{complained}");
    let ended = pool.take(holder).ends(ENDED).expect("it need not wait for its deadline");
    assert_eq!(ended.code(), Some(EXIT_UNDRAINED));
    let told = told();
    let line = told.lines().find(|line| line.starts_with("not drained: ")).expect("a last word");
    for part in [&id, &log, "the log of a former life in ", &format!("{:020}", 2), "it is missing"] {
        assert!(line.contains(part), "{part:?} is not in {line:?}");
    }
    assert!(!line.contains("entries"), "its own log is empty: {line}");
    let shown: Value = serde_json::from_str(&pool.say(&["pods", &id, "--json"])).expect("JSON");
    assert_eq!(shown["phase"], "undrained", "{shown}");
    assert!(folder.join("header.json").exists(), "it is kept");
    pool.end();
}

#[tokio::test]
async fn a_pod_that_starts_without_the_log_that_it_had_says_which_one_is_missing() {
    let slow = [("SLUICE_POD__FLUSH_INTERVAL_MS", "120000")];
    let mut pool = Pool::start(&slow, &[]).await;
    let told = |pool: &Pool, nth: usize| {
        fs::read_to_string(pool.dir.path().join(format!("pod-{}.log", nth + 1))).expect("a log")
    };
    let mut producer = Producer::connect(&pool).await;
    producer.send().await;
    let holder = pool.holder(1).await;
    drop(producer);
    let first = told(&pool, holder);
    assert!(!first.contains("had another log"), "{first}");
    let log = first.split_whitespace().find_map(|word| word.strip_prefix("log=")).expect("its id").to_owned();
    pool.take(holder).kill().expect("ran until then");
    let (volume, aside) =
        (pool.dir.path().join(format!("data/pods/pod-{}", holder + 1)), pool.dir.path().join("aside"));
    fs::rename(&volume, &aside).expect("not mounted");
    pool.start_pod(holder, &[]);
    let says = async || Some(told(&pool, holder)).filter(|told| told.contains("had another log"));
    let told = until("a warning", says).await;
    let line = told.lines().find(|line| line.contains("had another log")).expect("it is there");
    for part in ["WARN", &log, "mount that log's volume at", "pods/pod-", "sluice release --log"] {
        assert!(line.contains(part), "{part:?} is not in {line:?}");
    }
}
