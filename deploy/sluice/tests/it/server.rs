//! The program under test, and plain HTTP to it.
//!
//! *Owns*: starting and ending the process, requests and their answers, metrics.
//! *Does not own*: WebSockets (`wire`).

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use serde_json::Value;
use sluice_loadtest::cluster::Process;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::Instant;

/// Nothing here takes this long: a test that waits longer has failed.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);
/// Between two looks at what tells of no change by itself.
const POLL: Duration = Duration::from_millis(10);

/// Waits for `future`, but not for ever.
pub(crate) async fn soon<T>(what: &str, future: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, future).await.unwrap_or_else(|_| panic!("waited in vain for {what}"))
}

/// Looks again and again until there is something to see.
pub(crate) async fn until<T>(what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(seen) = look().await {
            return seen;
        }
        assert!(Instant::now() < deadline, "waited in vain for {what}");
        tokio::time::sleep(POLL).await;
    }
}

/// `sluice up` on a free port, with its data below a directory of its own. Killed when it is dropped.
pub(crate) struct Server {
    /// Taken by `end` alone.
    process: Option<Process>,
    pub(crate) address: SocketAddr,
    dir: TempDir,
}

impl Server {
    /// Tables are made by `PUT` alone. `env` is set over short flushes.
    pub(crate) fn start(env: &[(&str, &str)]) -> Self {
        Self::with_auto_create(false, env)
    }

    pub(crate) fn with_auto_create(auto_create: bool, env: &[(&str, &str)]) -> Self {
        let dir = TempDir::new().expect("a directory");
        let mut command = Command::new(env!("CARGO_BIN_EXE_sluice"));
        command.args(["up", "--listen", "127.0.0.1:0", "--auto-create", &auto_create.to_string(), "--data"]);
        command.arg(dir.path().join("data")).env("SLUICE_POD__FLUSH_INTERVAL_MS", "20");
        command.envs(env.iter().copied());
        let (process, line) = Process::start("sluice", command, "ws://", dir.path()).expect("starts");
        let address = line.split_once("ws://").and_then(|(_, rest)| rest.split('/').next());
        let address = address.and_then(|address| address.parse().ok());
        let address = address.unwrap_or_else(|| panic!("no address in {line:?}"));
        Self { process: Some(process), address, dir }
    }

    /// It has not ended, and drains now: everything accepted is committed, and no task is stuck.
    pub(crate) fn end(mut self) {
        self.process.take().expect("ended once").terminate().expect("drains");
    }

    /// What it has logged.
    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("sluice.log")).expect("a log")
    }

    pub(crate) fn tables_dir(&self) -> PathBuf {
        self.dir.path().join("data/tables")
    }

    pub(crate) fn table_dir(&self, table: &str) -> PathBuf {
        self.tables_dir().join("main/default").join(table)
    }

    /// Bytes of memory that the process holds.
    pub(crate) fn memory_bytes(&self) -> u64 {
        let pid = self.process.as_ref().expect("runs").pid();
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("the process is there");
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("its memory");
        let kib: u64 = line.trim().trim_end_matches("kB").trim().parse().expect("a number of kB");
        kib << 10
    }

    /// Sends bytes as they are; answers status and body.
    pub(crate) async fn raw(&self, request: &[u8]) -> (u16, String) {
        let exchange = async {
            let mut socket = TcpStream::connect(self.address).await.expect("connects");
            socket.write_all(request).await.expect("sends");
            let mut answer = Vec::new();
            // Where the server has closed already the rest of the request meets a reset; the answer is there.
            while !is_whole(&answer) && socket.read_buf(&mut answer).await.is_ok_and(|read| read > 0) {}
            String::from_utf8_lossy(&answer).into_owned()
        };
        let answer = soon("an HTTP answer", exchange).await;
        let status = answer.split(' ').nth(1).and_then(|status| status.parse().ok());
        let body = answer.split_once("\r\n\r\n").map_or("", |(_, body)| body);
        (status.unwrap_or_else(|| panic!("no HTTP answer: {answer:?}")), body.to_owned())
    }

    pub(crate) async fn request(&self, method: &str, path: &str, body: &str) -> (u16, String) {
        let length = body.len();
        let head = format!("{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n");
        self.raw(format!("{head}content-length: {length}\r\n\r\n{body}").as_bytes()).await
    }

    pub(crate) async fn put(&self, table: &str, spec: &str) -> (u16, String) {
        self.request("PUT", &format!("/v1/tables/{table}"), spec).await
    }

    /// What there is to know of a table; None where there is none.
    pub(crate) async fn describe(&self, table: &str) -> Option<Value> {
        let (status, body) = self.request("GET", &format!("/v1/tables/{table}"), "").await;
        let body: Value = serde_json::from_str(&body).unwrap_or_else(|_| panic!("JSON: {body:?}"));
        if status == 404 {
            assert_eq!(body["error"]["code"], "table_not_found", "{body}");
            return None;
        }
        assert_eq!(status, 200, "{table}: {body}");
        Some(body)
    }

    /// There is no table of this name, nor anything that could have become one.
    pub(crate) async fn expect_no_table(&self, table: &str) {
        assert_eq!(self.describe(table).await, None);
        let (status, tables) = self.request("GET", "/v1/tables", "").await;
        assert_eq!(status, 200, "{tables}");
        assert!(!tables.contains(&format!(".{table}\"")), "{table} is listed: {tables}");
        let dir = self.table_dir(table);
        assert!(!dir.exists(), "{} is left behind", dir.display());
    }

    /// The value of one metric; 0 where it was never counted.
    pub(crate) async fn metric(&self, name: &str) -> u64 {
        let (_, text) = self.request("GET", "/metrics", "").await;
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.and_then(|value| value.parse().ok()).unwrap_or(0)
    }

    /// No session is left of the producers that are gone.
    pub(crate) async fn expect_no_stream(&self) {
        let look = async || (self.metric("sluice_gateway_streams").await == 0).then_some(());
        until("the end of all streams", look).await;
        assert_eq!(self.metric("sluice_gateway_window_bytes").await, 0);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(process) = self.process.as_ref().filter(|_| std::thread::panicking()) {
            eprintln!("{}", process.log_tail());
        }
    }
}

/// Whether an HTTP answer has come with as much of a body as it states.
fn is_whole(answer: &[u8]) -> bool {
    let answer = String::from_utf8_lossy(answer);
    let Some((head, body)) = answer.split_once("\r\n\r\n") else { return false };
    let stated = head
        .lines()
        .find_map(|line| line.to_ascii_lowercase().strip_prefix("content-length:")?.trim().parse().ok());
    stated.is_some_and(|length: usize| body.len() >= length)
}

/// An HTTP refusal has this status and code, and says enough.
pub(crate) fn check_refusal(case: &str, (status, body): (u16, String), expected: (u16, &str)) {
    let body: Value = serde_json::from_str(&body).unwrap_or_else(|_| panic!("{case:.200}: JSON: {body:?}"));
    let error = &body["error"];
    assert_eq!((status, error["code"].as_str()), (expected.0, Some(expected.1)), "{case:.200}: {body:.2000}");
    let message = error["message"].as_str().expect("a message");
    assert!(message.len() > 20, "{case:.200}: {body}");
    assert!(body.to_string().len() < 8 << 10, "{case:.200}: an answer of {} bytes", body.to_string().len());
}
