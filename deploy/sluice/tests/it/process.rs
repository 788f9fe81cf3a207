//! The process itself: its files, its log, its configuration, its memory.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use futures_util::SinkExt;
use sluice_loadtest::cluster::{Cluster, Process};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_tungstenite::tungstenite::Message;

use crate::server::{Server, soon, until};

async fn is_healthy(address: &str) -> bool {
    let asked = async {
        let mut socket = TcpStream::connect(address).await?;
        socket.write_all(b"GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await?;
        let mut answer = String::new();
        socket.read_to_string(&mut answer).await?;
        Ok::<_, std::io::Error>(answer.starts_with("HTTP/1.1 200"))
    };
    matches!(tokio::time::timeout(std::time::Duration::from_secs(1), asked).await, Ok(Ok(true)))
}

#[tokio::test]
async fn a_gateway_without_free_files_accepts_again_when_there_are_some() {
    const FILES: usize = 64;
    let dir = tempfile::tempdir().expect("a directory");
    let mut command = Command::new("sh");
    let limited = format!("ulimit -n {FILES} && exec \"$0\" \"$@\"");
    command.args(["-c", &limited, env!("CARGO_BIN_EXE_sluice"), "gateway"]);
    command.args(["--listen", "127.0.0.1:0", "--pod", "pod-1=127.0.0.1:1"]);
    let (process, line) = Process::start("gateway", command, "ws://", dir.path()).expect("starts");
    let address = line.split_once("ws://").expect("an address").1.trim().to_owned();
    assert!(is_healthy(&address).await);
    let mut taken = Vec::new();
    for _ in 0..2 * FILES {
        // Those that are not accepted wait in the kernel.
        taken.push(TcpStream::connect(&address).await.expect("connects"));
    }
    let log = dir.path().join("gateway.log");
    let complains =
        async || fs::read_to_string(&log).ok().filter(|log| log.contains("cannot accept")).map(drop);
    until("a line in the log", complains).await;
    assert!(!is_healthy(&address).await, "there are more files than it may have");
    drop(taken);
    until("an answer", async || is_healthy(&address).await.then_some(())).await;
    let lines = fs::read_to_string(&log).expect("a log").matches("cannot accept").count();
    assert!(lines < 5, "{lines} lines about it");
    process.terminate().expect("drains");
}

#[tokio::test]
async fn what_producers_send_is_no_line_of_the_log() {
    let server = Server::with_auto_create(true, &[("SLUICE_LOG__FILTER", "debug")]);
    let planted = "PLANTED";
    let long = "l".repeat(8000);
    for path in [
        format!("/v1/tables/a%0a{planted}"),
        format!("/v1/tables/a%1b%5b31m{planted}"),
        format!("/v1/tables/{long}"),
        format!("/v1/tables/t/stream?name=a%0a{planted}"),
        format!("/nowhere%0d%0a{planted}"),
    ] {
        let head =
            format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\nuser-agent: \x1b[31m{planted}");
        let (status, _) = server.raw(format!("{head}\r\n\r\n").as_bytes()).await;
        assert!((400..500).contains(&status), "{path:.60}: {status}");
    }
    let mut producer = crate::wire::Producer::plain(&server, "t").await;
    let bad = format!("{{\"a\\u000a{planted}\\u001b[31m\": \"\\u001b[31m\n{planted}\\u0000\"");
    producer.text(&bad).await;
    drop(producer);
    server.expect_no_stream().await;
    let log = server.log();
    assert!(log.contains("stream"), "{log}");
    assert!(!log.contains('\u{1b}') && !log.contains('\0'), "{log}");
    assert!(!log.lines().any(|line| line.trim_start().starts_with(planted)), "{log}");
    let longest = log.lines().map(str::len).max();
    assert!(longest < Some(4000), "a line of {longest:?} bytes");
    server.end();
}

#[test]
fn a_configuration_that_cannot_be_is_refused_by_its_key() {
    let dir = tempfile::tempdir().expect("a directory");
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("binds");
    let taken = taken.local_addr().expect("bound").to_string();
    let certificate = "tls_cert = \"/nowhere.crt\"\ntls_key = \"/nowhere.key\"\n";
    for (text, expected) in [
        ("tls_listen = \"127.0.0.1:0\"".to_owned(), "gateway.tls_listen without gateway.tls_cert"),
        (format!("{certificate}tls_listen = \"127.0.0.1:0\""), "gateway.tls_cert, /nowhere.crt"),
        ("listen = \"off\"".to_owned(), "gateway.tls_listen is not set"),
        (format!("listen = \"{taken}\""), "gateway.listen"),
        (format!("{certificate}tls_listen = \"{taken}\""), "gateway.tls_listen"),
        ("connections_per_peer_max = 0".to_owned(), "gateway.connections_per_peer_max is 0"),
        ("connects_per_peer_per_s = 0".to_owned(), "gateway.connects_per_peer_per_s is 0"),
        ("read_timeout_ms = 0".to_owned(), "gateway.read_timeout_ms is 0"),
        ("memory_bytes = \"1KiB\"".to_owned(), "gateway.memory_bytes is 1KiB"),
        ("allowed_origins = [\"example\"]".to_owned(), "gateway.allowed_origins has \"example\""),
        ("allowed_orgins = []".to_owned(), "allowed_origins"),
        ("read_timeout_ms = \"soon\"".to_owned(), "read_timeout_ms"),
    ] {
        let file = dir.path().join("sluice.toml");
        let listen = if text.contains("\nlisten") || text.starts_with("listen") {
            ""
        } else {
            "listen = \"127.0.0.1:0\"\n"
        };
        fs::write(&file, format!("[gateway]\nquic_listen = \"off\"\n{listen}{text}\n")).expect("written");
        let (status, said) = gateway_with(&file);
        assert_eq!(status, Some(2), "{text}: {said}");
        assert!(said.contains(expected), "{text}: {said}");
    }
}

fn gateway_with(file: &Path) -> (Option<i32>, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sluice"));
    command.arg("--config").arg(file).args(["gateway", "--pod", "pod-1=127.0.0.1:1"]);
    let Output { status, stdout, stderr } = command.output().expect("ends by itself");
    (status.code(), [String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr)].concat())
}

#[tokio::test]
async fn the_memory_of_a_gateway_is_bounded_while_its_pod_stands_still() {
    const MEMORY: u64 = 64 << 20;
    const STREAMS: usize = 60;
    const RECORD: usize = 64 << 10;
    const RECORDS: usize = 96;
    let dir = tempfile::tempdir().expect("a directory");
    let sluice = Path::new(env!("CARGO_BIN_EXE_sluice"));
    let limit = [("SLUICE_GATEWAY__MEMORY_BYTES", "64MiB"), ("SLUICE_POD__FLUSH_INTERVAL_MS", "50")];
    let cluster = Cluster::start(sluice, dir.path(), &limit).expect("starts");
    let url = format!("{}/v1/tables/t/stream", cluster.url());
    let mut producers = Vec::new();
    for _ in 0..STREAMS {
        let (mut socket, _) = Box::pin(tokio_tungstenite::connect_async(&url)).await.expect("connects");
        // Its stream is open, and the table is there.
        socket.send(Message::text("{\"x\":\"\"}")).await.expect("sends");
        until_durable(&mut socket, 0).await;
        producers.push(socket);
    }
    let (gateway, pod) = (cluster.gateway().expect("runs").pid(), cluster.pod().expect("runs").pid());
    let before = resident_bytes(gateway);
    signal(pod, "-STOP");
    let record = format!("{{\"x\":\"{}\"}}", "x".repeat(RECORD));
    // 360 MiB in all.
    let sending = producers.into_iter().map(|mut socket| {
        let record = record.clone();
        async move {
            for _ in 0..RECORDS {
                socket.send(Message::text(record.clone())).await.expect("sends");
            }
            until_durable(&mut socket, RECORDS as u64).await;
        }
    });
    let mut all = std::pin::pin!(futures_util::future::join_all(sending));
    let still = tokio::time::timeout(std::time::Duration::from_secs(4), all.as_mut()).await;
    assert!(still.is_err(), "nothing is acked");
    let grown = resident_bytes(gateway).saturating_sub(before);
    signal(pod, "-CONT");
    // A byte of the budget may be there twice, in its window and encoded on its way to the pod; then there are the frames
    // of each stream that are being read.
    let bound = 2 * MEMORY + (STREAMS * 6 * RECORD) as u64;
    assert!(grown < bound, "{} MiB more than before", grown >> 20);
    soon("all records", all).await;
    cluster.drain().expect("drains");
}

type Socket = tokio_tungstenite::WebSocketStream<tokio_tungstenite::MaybeTlsStream<TcpStream>>;

async fn until_durable(socket: &mut Socket, offset: u64) {
    let acked = format!("{{\"durable\":{offset}}}");
    let heard = async {
        loop {
            let message = futures_util::StreamExt::next(socket).await.expect("open").expect("no failure");
            if message.to_text().is_ok_and(|text| text == acked) {
                return;
            }
        }
    };
    soon("an ack", heard).await;
}

fn signal(pid: u32, which: &str) {
    assert!(Command::new("kill").args([which, &pid.to_string()]).status().expect("runs").success());
}

fn resident_bytes(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("the process is there");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("its memory");
    line.trim().trim_end_matches("kB").trim().parse::<u64>().expect("a number of kB") << 10
}

#[tokio::test]
async fn an_autoscaler_says_where_it_is_and_ends_well() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut command = Command::new(env!("CARGO_BIN_EXE_sluice"));
    // Nobody is there: that is no reason to end.
    command.args(["autoscaler", "--driver", "none", "--listen", "127.0.0.1:0"]);
    command.args(["--gateway", "http://127.0.0.1:1"]);
    let (process, line) = Process::start("autoscaler", command, "/metrics", dir.path()).expect("starts");
    let address =
        line.split_once("http://").and_then(|(_, rest)| rest.split('/').next()).expect("an address");
    assert!(is_healthy(address).await);
    let decides =
        async || get(address, "/v1/decision").await.filter(|said| said.contains("no_reports")).map(drop);
    until("a decision", decides).await;
    process.terminate().expect("ends");
    let log = fs::read_to_string(dir.path().join("autoscaler.log")).expect("a log");
    assert!(log.contains("cannot see the pool") && log.contains("reason=\"no_reports\""), "{log}");
}

#[test]
fn an_autoscaler_that_cannot_work_says_why() {
    let dir = tempfile::tempdir().expect("a directory");
    for (flags, why) in [
        (["--driver", "docker"], "there are process, kubernetes and none"),
        (["--driver", "kubernetes"], "automountServiceAccountToken"),
        (["--min", "0"], "autoscaler.min is 0"),
        (["--gateway", "here"], "expected http://HOST:PORT"),
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_sluice"));
        let ended = command.current_dir(dir.path()).arg("autoscaler").args(flags).output().expect("runs");
        let said = String::from_utf8_lossy(&ended.stderr).into_owned();
        assert!(ended.status.code() == Some(2) && said.contains(why), "{flags:?}: {said}");
    }
}

/// `sluice up --pods 1..3`: the pods that the gateway sees active, by id.
async fn active_pods(admin: &str) -> Vec<String> {
    let Some(text) = get(admin, "/v1/pods").await else { return Vec::new() };
    let shown: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let pods = shown["pods"].as_array().expect("pods").iter();
    let active = pods.filter(|pod| pod["phase"] == "active");
    active.map(|pod| pod["id"].as_str().expect("an id").to_owned()).collect()
}

async fn get(address: &str, path: &str) -> Option<String> {
    let mut socket = TcpStream::connect(address).await.ok()?;
    let request = format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
    socket.write_all(request.as_bytes()).await.ok()?;
    let mut answer = String::new();
    socket.read_to_string(&mut answer).await.ok()?;
    answer.split_once("\r\n\r\n").map(|(_, body)| body.to_owned())
}

fn address_in(log: &str, line: &str) -> Option<String> {
    let rest = log.lines().find_map(|one| one.trim().strip_prefix(line))?;
    Some(rest.split_once("://")?.1.split('/').next()?.to_owned())
}

#[tokio::test]
async fn pods_of_their_own_come_back_after_a_kill_and_drain_at_the_end() {
    let dir = tempfile::tempdir().expect("a directory");
    let data = dir.path().join("data");
    let mut command = Command::new(env!("CARGO_BIN_EXE_sluice"));
    command.args(["up", "--pods", "2..3", "--listen", "127.0.0.1:0", "--data"]).arg(&data);
    command.env("SLUICE_POD__FLUSH_INTERVAL_MS", "20");
    let (process, line) = Process::start("sluice", command, "/metrics", dir.path()).expect("starts");
    assert!(line.contains("metrics"), "{line}");
    let log = || fs::read_to_string(dir.path().join("sluice.log")).expect("a log");
    let producers = address_in(&log(), "producers").expect("an address");
    let admin = address_in(&log(), "admin API").expect("an address");
    assert_eq!(active_pods(&admin).await, ["pod-1", "pod-2"]);
    let url = format!("ws://{producers}/v1/tables/t/stream");
    let (mut socket, _) = tokio_tungstenite::connect_async(url).await.expect("connects");
    for offset in 0..3 {
        socket.send(Message::text(format!("{{\"n\":{offset}}}"))).await.expect("sent");
        until_durable(&mut socket, offset).await;
        if offset == 0 {
            let of_pod = "--id\0pod-1".to_owned();
            let pid = child_of(process.pid(), &of_pod).expect("a child");
            signal(pid, "-9");
            until("another process", async || child_of(process.pid(), &of_pod).filter(|other| *other != pid))
                .await;
        }
    }
    let children: Vec<u32> =
        (1..=2).filter_map(|n| child_of(process.pid(), &format!("--id\0pod-{n}"))).collect();
    assert_eq!(children.len(), 2);
    process.terminate().expect("drains");
    assert!(children.iter().all(|pid| !Path::new(&format!("/proc/{pid}")).exists()));
    for n in 1..=2 {
        assert!(data.join(format!("pods/pod-{n}/drained")).exists(), "pod-{n} has not drained: {}", log());
    }
}

/// The child whose command line has these words.
fn child_of(parent: u32, words: &str) -> Option<u32> {
    let processes = fs::read_dir("/proc").expect("processes").flatten();
    let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let is_it = |pid: &u32| {
        let of = |name: &str| fs::read_to_string(format!("/proc/{pid}/{name}")).unwrap_or_default();
        of("status").contains(&format!("PPid:\t{parent}\n")) && of("cmdline").contains(words)
    };
    pids.into_iter().find(is_it)
}
