//! SIGTERM more than once, SIGHUP without end: drains are hurried, and nothing that was acked is lost.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use futures_util::{SinkExt, StreamExt};
use serde_json::Value;
use sluice_loadtest::cluster::{Cluster, Process};
use tempfile::TempDir;
use tokio::net::TcpStream;
use tokio_tungstenite::tungstenite::Message;

use crate::server::{soon, until};

/// A gateway waits for producers and pods for 20 s; one in a hurry waits for nobody.
const HURRIED: Duration = Duration::from_secs(10);
/// As a shell reports a program that SIGINT has ended.
const EXIT_HURRIED: i32 = 130;

type Socket = tokio_tungstenite::WebSocketStream<tokio_tungstenite::MaybeTlsStream<TcpStream>>;

/// `sluice up` on the same data each time it is started.
struct Up {
    dir: TempDir,
}

impl Up {
    fn new() -> Self {
        Self { dir: tempfile::tempdir().expect("a directory") }
    }

    /// The process, and where producers connect.
    fn start(&self) -> (Process, String) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_sluice"));
        command.args(["up", "--listen", "127.0.0.1:0", "--data"]).arg(self.dir.path().join("data"));
        command.env("SLUICE_POD__FLUSH_INTERVAL_MS", "20");
        let (process, line) = Process::start("sluice", command, "ws://", self.dir.path()).expect("starts");
        let url = line.split_whitespace().find_map(|word| word.strip_suffix("/v1/tables/TABLE/stream"));
        (process, url.expect("an address").to_owned())
    }

    fn table_dir(&self) -> std::path::PathBuf {
        self.dir.path().join("data/tables/main/default/t")
    }
}

async fn connect(url: &str) -> Socket {
    let url = format!("{url}/v1/tables/t/stream");
    soon("a connection", Box::pin(tokio_tungstenite::connect_async(url))).await.expect("connects").0
}

async fn send(socket: &mut Socket, numbers: std::ops::Range<u64>) {
    for id in numbers {
        socket.send(Message::text(format!("{{\"id\":{id}}}"))).await.expect("sends");
    }
}

/// Hears on until an ack of this kind covers `offset`; answers what the last one of it said.
async fn heard(socket: &mut Socket, kind: &str, offset: u64) -> u64 {
    let hearing = async {
        loop {
            let message = socket.next().await.expect("open").expect("no failure");
            let said: Value = serde_json::from_str(message.to_text().expect("text")).unwrap_or_default();
            if let Some(acked) = said[kind].as_u64().filter(|acked| *acked >= offset) {
                return acked;
            }
        }
    };
    soon(kind, hearing).await
}

fn signal(process: &Process, which: &str) {
    let pid = process.pid().to_string();
    assert!(Command::new("kill").args([which, &pid]).status().expect("runs").success());
}

async fn says(dir: &Path, log: &str, what: &str) {
    let log = dir.join(log);
    let said = async || fs::read_to_string(&log).ok().filter(|log| log.contains(what)).map(drop);
    until(what, said).await;
}

/// The rows that `sluice tables` tells of, once there are so many.
async fn rows(url: &str, at_least: u64) -> u64 {
    let look = async || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_sluice"));
        let output = command.args(["tables", "t", "--url", url]).output().expect("runs");
        let described: Value = serde_json::from_slice(&output.stdout).ok()?;
        described["rows"].as_u64().filter(|rows| *rows >= at_least)
    };
    until("the rows", look).await
}

#[tokio::test]
async fn a_gateway_in_a_hurry_does_not_wait_for_a_pod_that_stands_still() {
    let dir = tempfile::tempdir().expect("a directory");
    let sluice = Path::new(env!("CARGO_BIN_EXE_sluice"));
    let mut cluster = Cluster::start(sluice, dir.path(), &[]).expect("starts");
    let mut socket = connect(cluster.url()).await;
    send(&mut socket, 0..1).await;
    heard(&mut socket, "durable", 0).await;
    signal(cluster.pod().expect("runs"), "-STOP");
    send(&mut socket, 1..10).await;
    let mut gateway = cluster.take_gateway().expect("runs");
    signal(&gateway, "-TERM");
    says(dir.path(), "gateway.log", "draining: once more").await;
    assert!(gateway.ends(Duration::from_millis(300)).is_err(), "it waits for what is not durable");
    signal(&gateway, "-TERM");
    let status = gateway.ends(HURRIED).expect("ends");
    assert_eq!(status.code(), Some(EXIT_HURRIED));
    signal(cluster.pod().expect("runs"), "-CONT");
    cluster.drain_pod().expect("drains");
}

#[tokio::test]
async fn a_pod_in_a_hurry_commits_at_its_next_start_what_it_cannot_commit_now() {
    let up = Up::new();
    let (mut process, url) = up.start();
    let mut socket = connect(&url).await;
    send(&mut socket, 0..1).await;
    heard(&mut socket, "committed", 0).await;
    // From now on no version can be written.
    let dir = up.table_dir().join("_sluice");
    let (maps, away) = (dir.join("watermarks"), dir.join("away"));
    fs::rename(&maps, &away).expect("renamed");
    fs::write(&maps, "").expect("written");
    send(&mut socket, 1..1000).await;
    heard(&mut socket, "durable", 999).await;
    signal(&process, "-TERM");
    says(up.dir.path(), "sluice.log", "pod is draining").await;
    assert!(process.ends(Duration::from_millis(300)).is_err(), "it waits for what is not committed");
    signal(&process, "-INT");
    let status = process.ends(HURRIED).expect("ends");
    assert_eq!(status.code(), Some(EXIT_HURRIED));
    says(up.dir.path(), "sluice.log", "in a hurry").await;
    says(up.dir.path(), "sluice.log", "pod pod-1 ends, and has not drained: its log in ").await;
    fs::remove_file(&maps).expect("removed");
    fs::rename(&away, &maps).expect("renamed");
    let (process, url) = up.start();
    assert_eq!(rows(&url, 1000).await, 1000);
    process.terminate().expect("drains");
}

#[tokio::test]
async fn signals_in_the_middle_of_records_lose_nothing_that_was_acked() {
    const RECORDS: u64 = 50_000;
    for signals in [1, 2, 3] {
        let up = Up::new();
        let (mut process, url) = up.start();
        let (mut sender, mut receiver) = connect(&url).await.split();
        let sending = async {
            for id in 0..RECORDS {
                // The gateway may end in the middle of them.
                if sender.send(Message::text(format!("{{\"id\":{id}}}"))).await.is_err() {
                    return;
                }
            }
        };
        let hearing = async {
            let mut acked = None;
            while let Some(Ok(message)) = receiver.next().await {
                let said: Value = serde_json::from_str(message.to_text().unwrap_or("")).unwrap_or_default();
                let was_quiet = acked.is_none();
                acked = said["durable"].as_u64().or(acked);
                if was_quiet && acked.is_some() {
                    // Two that come at once count as one.
                    let answers = ["draining: once more", "flushing what was accepted", ""];
                    for answer in &answers[..signals] {
                        signal(&process, "-TERM");
                        says(up.dir.path(), "sluice.log", answer).await;
                    }
                }
            }
            acked
        };
        let (_, acked) = soon("the end", futures_util::future::join(sending, hearing)).await;
        let acked = acked.expect("the first ack came before the signals");
        let status = process.ends(HURRIED).expect("ends");
        let expected = if signals == 1 { 0 } else { EXIT_HURRIED };
        assert_eq!(status.code(), Some(expected), "{signals} signals");
        let (process, url) = up.start();
        let rows = rows(&url, acked + 1).await;
        assert!(rows <= RECORDS, "{signals} signals: {rows} rows");
        process.terminate().expect("drains");
    }
}

/// Hangups as fast as a shell sends them, until it is dropped.
struct Storm(Child);

impl Storm {
    fn on(process: &Process) -> Self {
        let mut shell = Command::new("sh");
        shell.args(["-c", "while kill -HUP \"$0\"; do :; done", &process.pid().to_string()]);
        Self(shell.stderr(Stdio::null()).spawn().expect("starts"))
    }
}

impl Drop for Storm {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test]
async fn a_storm_of_hangups_holds_up_neither_records_nor_the_drain() {
    const RECORDS: u64 = 20_000;
    let up = Up::new();
    let (mut process, url) = up.start();
    let storm = Storm::on(&process);
    let mut socket = connect(&url).await;
    send(&mut socket, 0..RECORDS).await;
    heard(&mut socket, "durable", RECORDS - 1).await;
    signal(&process, "-TERM");
    assert_eq!(process.ends(HURRIED).expect("ends").code(), Some(0));
    drop(storm);
    let (process, url) = up.start();
    assert_eq!(rows(&url, RECORDS).await, RECORDS);
    process.terminate().expect("drains");
}
