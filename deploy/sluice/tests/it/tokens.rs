//! Clients, secrets and tokens, through the real binary; and that no secret gets into anything that it says.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;
use sluice_loadtest::cluster::Process;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::server::soon;

fn sluice(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sluice"));
    command.args(args);
    command
}

/// Status and all that it said.
fn run(command: &mut Command) -> (i32, String) {
    let Output { status, stdout, stderr } = command.output().expect("runs");
    let said = [stdout, stderr].concat();
    (status.code().expect("ends by itself"), String::from_utf8(said).expect("UTF-8"))
}

/// A secret and its hash, as the program makes them.
fn make_secret() -> (String, String) {
    let (status, said) = run(&mut sluice(&["secret"]));
    let of = |name: &str| {
        let line = said.lines().find_map(|line| line.strip_prefix(name)).expect("a line for it");
        line.trim().to_owned()
    };
    assert_eq!(status, 0, "{said}");
    (of("secret "), of("secret_sha256 "))
}

/// `sluice up` with two clients: `loader` may do everything in `main.default`, `reader` only describe.
struct Guarded {
    process: Process,
    address: String,
    dir: TempDir,
    loader: String,
    reader: String,
}

impl Guarded {
    fn start() -> Self {
        let dir = TempDir::new().expect("a directory");
        let ((loader, loader_hash), (reader, reader_hash)) = (make_secret(), make_secret());
        let config = format!(
            "[[gateway.clients]]\nid = \"loader\"\nsecret_sha256 = \"{loader_hash}\"\n\
             grants = [{{ tables = \"main.default.*\", privileges = [\"write\", \"create\", \"describe\"] }}]\n\
             [[gateway.clients]]\nid = \"reader\"\nsecret_sha256 = \"{reader_hash}\"\n\
             grants = [{{ tables = \"main.default.*\", privileges = [\"describe\"] }}]\n\
             [log]\nfilter = \"trace\"\n"
        );
        let file = dir.path().join("sluice.toml");
        fs::write(&file, config).expect("written");
        let mut command = sluice(&["--config"]);
        command.arg(&file).args(["up", "--listen", "127.0.0.1:0", "--data"]).arg(dir.path().join("data"));
        let (process, line) = Process::start("sluice", command, "ws://", dir.path()).expect("starts");
        let address =
            line.split_once("ws://").and_then(|(_, rest)| rest.split('/').next()).expect("an address");
        Self { process, address: address.to_owned(), dir, loader, reader }
    }

    fn run(&self, args: &[&str], env: &[(&str, &str)]) -> (i32, String) {
        let url = format!("ws://{}", self.address);
        run(sluice(args).args(["--url", &url]).envs(env.iter().copied()))
    }

    async fn exchange(&self, request: &str) -> String {
        let mut socket = TcpStream::connect(&self.address).await.expect("connects");
        socket.write_all(request.as_bytes()).await.expect("sends");
        let mut answer = String::new();
        soon("the answer", socket.read_to_string(&mut answer)).await.expect("reads");
        answer
    }
}

fn files_below(dir: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).expect("readable") {
        let path = entry.expect("an entry").path();
        if path.is_dir() { files_below(&path, found) } else { found.push(path) }
    }
}

#[tokio::test]
async fn a_client_sends_with_its_secret_and_the_secret_is_told_nowhere() {
    let guarded = Guarded::start();
    let records = guarded.dir.path().join("records.ndjson");
    fs::write(&records, "{\"id\":1}\n{\"id\":2}\n").expect("written");
    let send = ["send", "readings", records.to_str().expect("text"), "--quiet"];
    let as_client = |id, secret| [("SLUICE_CLIENT_ID", id), ("SLUICE_CLIENT_SECRET", secret)];
    let canary = "canary_wrong_secret_4711";
    let mut said = String::new();
    let mut check = |(status, text): (i32, String), expected: i32, part: &str| {
        assert_eq!(status, expected, "{text}");
        assert!(text.contains(part), "{part:?} in {text}");
        said.push_str(&text);
    };
    check(guarded.run(&send, &[]), 2, "there is no token");
    check(guarded.run(&send, &as_client("loader", canary)), 2, "no client of this gateway");
    check(guarded.run(&send, &as_client("reader", &guarded.reader)), 2, "`write` on main.default.readings");
    check(guarded.run(&send, &[("SLUICE_TOKEN", canary)]), 2, "the token is not valid");
    check(guarded.run(&send, &as_client("loader", &guarded.loader)), 0, "sent 2 records: 2 in the table");
    check(guarded.run(&["tables"], &as_client("reader", &guarded.reader)), 0, "main.default.readings");
    check(guarded.run(&["tables", "readings"], &[]), 2, "there is no token");
    let flags = ["tables", "readings", "--client-id", "reader", "--client-secret", guarded.reader.as_str()];
    check(guarded.run(&flags, &[]), 0, "\"rows\": 2");
    let token = fetch_token(&guarded).await;
    check(guarded.run(&["tables", "--token", &token], &[]), 0, "main.default.readings");
    check(guarded.run(&["tables"], &[("SLUICE_TOKEN", &token)]), 0, "main.default.readings");
    let key_file = guarded.dir.path().join("data/gateway/token.key");
    let key = fs::read_to_string(&key_file).expect("`up` made a key").trim().to_owned();
    said.push_str(&bad_requests(&guarded, canary, &token).await);
    guarded.process.terminate().expect("drains");
    let mut files = Vec::new();
    files_below(guarded.dir.path(), &mut files);
    let mut bytes_seen = 0;
    for file in files.iter().filter(|file| **file != key_file) {
        let bytes = fs::read(file).expect("readable");
        bytes_seen += bytes.len();
        said.push_str(&String::from_utf8_lossy(&bytes));
    }
    assert!(
        bytes_seen > 10_000 && said.contains("gateway listens"),
        "the log of the gateway is among the files"
    );
    let signature = token.rsplit('.').next().expect("a signature");
    for (what, secret) in [
        ("a client's secret", guarded.loader.as_str()),
        ("a client's secret", &guarded.reader),
        ("what was no secret", canary),
        ("a token", &token),
        ("a token's signature", signature),
        ("the key", &key),
    ] {
        assert!(!said.contains(secret), "{what} is told: {}", around(&said, secret));
    }
}

fn around(text: &str, part: &str) -> String {
    let at = text.find(part).unwrap_or(0);
    let line = text[..at].rfind('\n').map_or(0, |end| end + 1);
    text[line..at].to_owned()
}

async fn fetch_token(guarded: &Guarded) -> String {
    let form = format!("grant_type=client_credentials&client_id=loader&client_secret={}", guarded.loader);
    let head = "POST /oidc/v1/token HTTP/1.1\r\nhost: x\r\nconnection: close\r\n";
    let answer = guarded.exchange(&format!("{head}content-length: {}\r\n\r\n{form}", form.len())).await;
    let body: Value = serde_json::from_str(answer.split("\r\n\r\n").nth(1).expect("a body")).expect("JSON");
    body["access_token"].as_str().expect("a token").to_owned()
}

/// Requests that are refused with a secret in them, in every place that takes one, and in some that do not.
async fn bad_requests(guarded: &Guarded, canary: &str, token: &str) -> String {
    let mut said = String::new();
    let cut = &token[..token.len() - 2];
    let form = format!("grant_type=client_credentials&client_id={canary}&client_secret={canary}");
    for request in [
        format!(
            "GET /v1/tables HTTP/1.1\r\nhost: x\r\nconnection: close\r\nauthorization: Bearer {canary}\r\n\r\n"
        ),
        format!("GET /v1/tables HTTP/1.1\r\nhost: x\r\nconnection: close\r\nauthorization: {canary}\r\n\r\n"),
        format!(
            "GET /v1/tables HTTP/1.1\r\nhost: x\r\nconnection: close\r\nauthorization: Bearer {cut}\r\n\r\n"
        ),
        format!(
            "GET /v1/tables/readings/stream?token={canary} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
        ),
        format!(
            "POST /oidc/v1/token HTTP/1.1\r\nhost: x\r\nconnection: close\r\nauthorization: Basic {canary}\r\n\r\n"
        ),
        format!(
            "POST /oidc/v1/token HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{form}",
            form.len()
        ),
    ] {
        let answer = guarded.exchange(&request).await;
        assert!(answer.starts_with("HTTP/1.1 40"), "{answer}");
        said.push_str(&answer);
    }
    said
}

#[test]
fn who_may_write_is_said_before_others_can_reach_it() {
    let dir = TempDir::new().expect("a directory");
    let data = dir.path().join("data");
    let up = |more: &[(&str, &str)]| {
        let data = data.to_str().expect("text");
        run(sluice(&["up", "--listen", "0.0.0.0:0", "--data", data]).envs(more.iter().copied()))
    };
    let (status, said) = up(&[]);
    assert_eq!(status, 2, "{said}");
    assert!(said.contains("gateway.clients") && said.contains("gateway.auth"), "{said}");
    assert!(!data.exists(), "nothing is made for a gateway that does not start");
    // The secret itself, where its hash belongs.
    let file = dir.path().join("sluice.toml");
    fs::write(&file, "[[gateway.clients]]\nid = \"a\"\nsecret_sha256 = \"canary_secret\"\n")
        .expect("written");
    let file = file.to_str().expect("text");
    let in_file = run(&mut sluice(&["--config", file, "up", "--listen", "127.0.0.1:0", "--data", "nowhere"]));
    let in_variable =
        up(&[("SLUICE_GATEWAY__CLIENTS", "[{ id = \"a\", secret_sha256 = \"canary_secret\" }]")]);
    for (status, said) in [in_file, in_variable] {
        assert_eq!(status, 2, "{said}");
        assert!(said.contains("64 hex digits") && said.contains("sluice secret"), "{said}");
        assert!(!said.contains("canary"), "{said}");
    }
}
