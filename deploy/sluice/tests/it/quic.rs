//! `sluice send` over QUIC, on good networks and bad ones.

use std::fmt::Write as _;
use std::fs;
use std::net::{SocketAddr, UdpSocket};
use std::path::PathBuf;
use std::process::{Command, Output};
use std::sync::{Arc, Mutex, PoisonError};

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use sluice_client::{Client, Error};
use sluice_loadtest::cluster::Process;
use sluice_loadtest::table::read_versions;
use sluice_shared::error::ErrorKind;
use sluice_shared::frame::Encoding;
use tempfile::TempDir;

const RECORDS: u64 = 5000;
/// Of each packet, in both directions.
const LOSS: f64 = 0.05;
const SEED: u64 = 7;

/// `sluice up` that is reached over QUIC alone.
struct Up {
    process: Option<Process>,
    address: SocketAddr,
    websocket: String,
    dir: TempDir,
}

impl Up {
    fn start() -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let mut command = Command::new(env!("CARGO_BIN_EXE_sluice"));
        command.args(["up", "--listen", "127.0.0.1:0", "--data"]).arg(dir.path().join("data"));
        let (process, line) = Process::start("sluice", command, "quic://", dir.path()).expect("starts");
        let address = line.split_once("quic://").and_then(|(_, rest)| rest.split(' ').next());
        let address = address.and_then(|address| address.parse().ok()).expect("an address");
        // Said a line before.
        let said = fs::read_to_string(dir.path().join("sluice.log")).expect("a log");
        let websocket =
            said.split_whitespace().find_map(|word| word.strip_prefix("ws://")?.split('/').next());
        let websocket = websocket.map(|address| format!("ws://{address}"));
        Self { process: Some(process), address, websocket: websocket.expect("an address"), dir }
    }

    fn certificate(&self) -> PathBuf {
        self.dir.path().join("data/gateway/quic.crt")
    }

    /// Writes a file of records.
    fn records(&self) -> PathBuf {
        let mut text = String::new();
        for id in 0..RECORDS {
            writeln!(text, "{{\"id\":{id},\"note\":\"{}\"}}", "x".repeat(100)).expect("in memory");
        }
        let file = self.dir.path().join("records.ndjson");
        fs::write(&file, text).expect("written");
        file
    }

    /// Sends the file by way of `address`; answers the exit status, and what was said.
    fn send(&self, address: SocketAddr, args: &[&str]) -> (Option<i32>, String) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_sluice"));
        command.args(["send", "t", "--quiet", "--url", &format!("quic://{address}")]).args(args);
        let Output { status, stdout, stderr } = command.arg(self.records()).output().expect("runs");
        (status.code(), [String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr)].concat())
    }

    /// The table has each record once, in the streams' order, and Sluice drains.
    fn check(mut self) {
        self.process.take().expect("ended once").terminate().expect("drains");
        let versions = read_versions(&self.dir.path().join("data/tables/main/default/t")).expect("a table");
        let last = versions.last().expect("a version");
        let runs = last.files.iter().flat_map(|file| &file.runs);
        let offsets: Vec<u64> = runs.flat_map(|run| run.rows.iter().map(|row| row.offset)).collect();
        assert_eq!(offsets, (0..RECORDS).collect::<Vec<_>>());
    }
}

/// Carries packets to `gateway` and back, and loses some of them.
fn lossy_relay(gateway: SocketAddr) -> SocketAddr {
    let front = Arc::new(UdpSocket::bind("127.0.0.1:0").expect("binds"));
    let back = Arc::new(UdpSocket::bind("127.0.0.1:0").expect("binds"));
    back.connect(gateway).expect("connects");
    let address = front.local_addr().expect("bound");
    let client = Arc::new(Mutex::new(None));
    let (from, to, known) = (Arc::clone(&front), Arc::clone(&back), Arc::clone(&client));
    carry(SEED, move |packet, is_lost| {
        let Ok((length, client)) = from.recv_from(packet) else { return };
        *known.lock().unwrap_or_else(PoisonError::into_inner) = Some(client);
        if !is_lost {
            // What cannot be sent is lost too.
            let _ = to.send(&packet[..length]);
        }
    });
    carry(SEED + 1, move |packet, is_lost| {
        let Ok(length) = back.recv(packet) else { return };
        let client = *client.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(client) = client.filter(|_| !is_lost) {
            // What cannot be sent is lost too.
            let _ = front.send_to(&packet[..length], client);
        }
    });
    address
}

/// Carries packets in one direction, on a thread that lasts as long as the test.
fn carry(seed: u64, mut one: impl FnMut(&mut [u8], bool) + Send + 'static) {
    std::thread::spawn(move || {
        let (mut random, mut packet) = (StdRng::seed_from_u64(seed), vec![0; 1 << 16]);
        loop {
            one(&mut packet, random.random_bool(LOSS));
        }
    });
}

#[test]
fn a_file_goes_in_over_quic_and_again_by_name_adds_nothing() {
    let up = Up::start();
    let certificate = up.certificate().display().to_string();
    for expected in ["5000 records: 5000 in the table", "0 rejected, 5000 were there before"] {
        let (status, said) = up.send(up.address, &["--ca", &certificate, "--name", "loader"]);
        assert_eq!(status, Some(0), "{said}");
        assert!(said.contains(expected), "{said}");
    }
    up.check();
}

#[test]
fn where_packets_are_lost_no_record_is() {
    let up = Up::start();
    let certificate = up.certificate().display().to_string();
    let relay = lossy_relay(up.address);
    let (status, said) = up.send(relay, &["--ca", &certificate]);
    assert_eq!(status, Some(0), "seed {SEED}: {said}");
    up.check();
}

#[test]
fn a_certificate_is_trusted_on_request_alone() {
    let up = Up::start();
    let (status, said) = up.send(up.address, &[]);
    assert_eq!(status, Some(2), "{said}");
    assert!(said.contains("certificate"), "{said}");
    let (status, said) = up.send(up.address, &["--ca", "/nowhere.crt"]);
    assert_eq!(status, Some(2), "{said}");
    assert!(said.contains("/nowhere.crt"), "{said}");
}

fn is_fenced(error: &Error) -> bool {
    matches!(error, Error::Gateway(error) if error.kind == ErrorKind::Fenced)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_named_stream_is_one_stream_whichever_way_its_producers_come() {
    let up = Up::start();
    let quic = Client::connect(&format!("quic://{}", up.address)).await.expect("connects");
    let quic = quic.ca_certificate(up.certificate()).expect("a certificate");
    let websocket = Client::connect(&up.websocket).await.expect("connects");
    let record = |id: u64| serde_json::json!({ "id": id });
    let mut older = websocket.stream("t").name("one").encoding(Encoding::Json).open().await.expect("opens");
    for id in 0..3 {
        older.send_json(&record(id)).await.expect("sends");
    }
    older.durable().await.expect("durable");
    let mut newer = quic.stream("t").name("one").encoding(Encoding::Json).open().await.expect("opens");
    assert_eq!(newer.next_offset(), 3);
    newer.send_json(&record(3)).await.expect("sends");
    newer.durable().await.expect("durable");
    let error = match older.send_json(&record(99)).await {
        Ok(_) => older.durable().await.expect_err("fenced"),
        Err(error) => error,
    };
    assert!(is_fenced(&error), "{error:?}");
    // And back again.
    let back = websocket.stream("t").name("one").encoding(Encoding::Json).open().await.expect("opens");
    assert_eq!(back.next_offset(), 4);
    let error = newer.finish().await.expect_err("fenced");
    assert!(is_fenced(&error), "{error:?}");
    back.finish().await.expect("finishes");
    let mut up = up;
    up.process.take().expect("runs").terminate().expect("drains");
    let versions = read_versions(&up.dir.path().join("data/tables/main/default/t")).expect("a table");
    let runs = versions.last().expect("a version").files.iter().flat_map(|file| &file.runs);
    let offsets: Vec<u64> = runs.flat_map(|run| run.rows.iter().map(|row| row.offset)).collect();
    assert_eq!(offsets, [0, 1, 2, 3]);
}
