//! The rig on real processes, scaled down: what is sent arrives, what happens happens, and a limit that cannot be kept is
//! missed. How fast anything is, is of no interest here.

use std::path::PathBuf;

use sluice_loadtest::cluster::find_sluice;
use sluice_loadtest::load::replay::{Replay, Speed};
use sluice_loadtest::load::report::{Report, Run};
use sluice_loadtest::load::scenario::{Scenario, find};
use sluice_loadtest::load::{Options, html, run};

/// A debug build on a machine in use by others: no times count.
const NO_TIMES: &str = "ack_p99_ms committed_p99_ms";

async fn ran(scenario: &Scenario, audit: bool) -> Run {
    let dir = tempfile::tempdir().expect("a directory");
    let sluice = find_sluice().expect("the program under test");
    let options = Options {
        sluice,
        dir: dir.path(),
        existing: None,
        audit,
        name: "test",
        say: &|what| println!("{what}"),
    };
    let run = Box::pin(run(&options, scenario)).await.expect("a run");
    println!("{run}");
    run
}

/// A built-in scenario without its limits of time.
fn small(name: &str, seconds: f64, rate: f64, streams: f64) -> Scenario {
    let (name, text) = find(name).expect("a scenario");
    let is_time = |line: &&str| NO_TIMES.split(' ').any(|limit| line.starts_with(limit));
    let text: Vec<&str> = text.lines().filter(|line| !is_time(line)).collect();
    let scenario = Scenario::parse(&name, &text.join("\n")).expect("a scenario");
    scenario.scaled(Some(seconds), rate, streams).expect("as long as it is small")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_protocol_arrives_and_a_limit_that_cannot_be_kept_is_missed() {
    let loads = [
        "transport = \"websocket\"\nencoding = \"protobuf\"\nshape = \"nested\"\ntable = \"nested\"",
        "transport = \"websocket\"\nencoding = \"arrow\"\nshape = \"wide\"\ntable = \"wide\"",
        "transport = \"websocket-text\"\nframe_records = 1\ntable = \"texts\"",
        "transport = \"quic\"\nstreams_per_connection = 2\ntable = \"quic\"",
        "transport = \"http\"\nwait_committed = true\nframe_records = 10\nspacing = \"even\"\ntable = \"posted\"",
        "transport = \"http\"\nencoding = \"arrow\"\ntable = \"posted\"",
        "transport = \"zerobus\"\nshape = \"sensor\"\ntable = \"zerobus\"",
        "transport = \"zerobus\"\nencoding = \"protobuf\"\nshape = \"sensor\"\ntable = \"zerobus\"",
        "transport = \"flight\"\nencoding = \"arrow\"\nshape = \"payload\"\ntable = \"flight\"",
    ];
    let mut text = "about = \"all\"\nseconds = 2\n[limits]\nack_p99_ms = 0.001\n".to_owned();
    for (number, load) in loads.into_iter().enumerate() {
        let frame = if load.contains("frame_records") { "" } else { "frame_records = 2\n" };
        text += &format!("[[load]]\nname = \"{number}\"\nstreams = 2\nrate = 20\n{frame}{load}\n");
    }
    let scenario = Scenario::parse("all", &text).unwrap_or_else(|error| panic!("{error:#}"));
    let run = ran(&scenario, false).await;
    for load in &run.loads {
        let acked = load
            .figures
            .iter()
            .find(|figure| figure.name == "records acked")
            .map_or(0.0, |figure| figure.value);
        assert!(acked >= 10.0, "load {}: {acked} records acked", load.name);
    }
    let missed: Vec<&str> =
        run.checks.iter().filter(|check| !check.is_met()).map(|check| check.name.as_str()).collect();
    assert_eq!(missed, ["ack p99"], "the limit of a microsecond alone is missed");
    assert!(!run.is_met());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn producers_that_lose_their_connections_lose_nothing() {
    let run = ran(&small("reconnect-storm", 3.0, 0.04, 0.04), true).await;
    assert!(run.is_met(), "{run}");
    assert_eq!(run.figure("connections lost"), Some(40.0), "20 streams, twice");
    assert_eq!(run.happened.len(), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_store_is_slow_for_tables_and_for_nobody_else() {
    let run = ran(&small("slow-store", 3.0, 0.1, 0.2), true).await;
    assert!(run.is_met(), "{run}");
    let mut report = Report::new("slow-store".to_owned(), String::new(), String::new(), String::new());
    report.runs.push(run);
    let json = through_json(&report);
    assert_eq!(json.runs[0].checks.len(), report.runs[0].checks.len(), "what is written can be read");
    let page = html::page(&report).expect("a page");
    for part in ["Throughput", "store +300 ms", "Memory", "pod-2", "limits met"] {
        assert!(page.contains(part), "no {part:?} on the page");
    }
    assert!(!page.contains("src=") && !page.contains("href="), "a page that needs nothing else");
}

/// Through a file, as `--json` and `compare` do.
fn through_json(report: &Report) -> Report {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("report.json");
    std::fs::write(&path, serde_json::to_string(report).expect("JSON")).expect("written");
    Report::read(&path).expect("a report")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_trace_is_sent_again_with_its_gaps() {
    let dir = tempfile::tempdir().expect("a directory");
    let file: PathBuf = dir.path().join("trace.csv");
    let mut text = "at,device,celsius\n".to_owned();
    // Two bursts, two seconds apart.
    for n in 0..100 {
        text += &format!("2026-01-01T00:00:0{}.{:03}Z,device-{},{}\n", n / 50 * 2, n % 50, n % 4, n);
    }
    std::fs::write(&file, text).expect("written");
    let replay = Replay {
        file,
        time: "at".to_owned(),
        stream: "device".to_owned(),
        speed: Speed::Times(2.0),
        table: "replayed".to_owned(),
        named: true,
        frame_records: 10,
        pods: 1,
    };
    let options = Options {
        sluice: find_sluice().expect("the program under test"),
        dir: &dir.path().join("run"),
        existing: None,
        audit: false,
        name: "test",
        say: &|what| println!("{what}"),
    };
    let replayed = Box::pin(replay.run(&options)).await;
    let (_, run) = replayed.unwrap_or_else(|error| panic!("{error:#}"));
    println!("{run}");
    assert!(run.is_met(), "{run}");
    assert_eq!(run.figure("rows in the tables"), Some(100.0));
    assert_eq!(
        run.series.iter().map(|second| second.due).collect::<Vec<_>>()[..2],
        [50, 50],
        "a second apart"
    );
}
