//! The program over TLS: `sluice up`, `sluice send` and `sluice tables`.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output};

use sluice_gateway::make_self_signed;
use sluice_loadtest::cluster::Process;
use tempfile::TempDir;

use crate::server::until;

/// `sluice up` that is reached over TLS alone.
struct Up {
    process: Process,
    url: String,
    dir: TempDir,
}

impl Up {
    fn start() -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let mut command = Command::new(env!("CARGO_BIN_EXE_sluice"));
        command.args(["up", "--listen", "off", "--tls-listen", "127.0.0.1:0", "--data"]);
        command.arg(dir.path().join("data"));
        let (process, line) = Process::start("sluice", command, "wss://", dir.path()).expect("starts");
        let address = line.split_once("wss://").and_then(|(_, rest)| rest.split(' ').next());
        // The certificate is made out to the name as well.
        let port = address.and_then(|address| address.rsplit_once(':')).map(|(_, port)| port.to_owned());
        let url = format!("wss://localhost:{}", port.expect("a port"));
        Self { process, url, dir }
    }

    fn certificate(&self) -> PathBuf {
        self.dir.path().join("data/gateway/quic.crt")
    }

    /// Exit status, and what was said.
    fn run(&self, args: &[&str]) -> (Option<i32>, String) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_sluice"));
        let Output { status, stdout, stderr } = command.args(args).output().expect("runs");
        (status.code(), [String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr)].concat())
    }
}

#[test]
fn a_file_goes_in_over_tls_and_again_by_name_adds_nothing() {
    let up = Up::start();
    let file = up.dir.path().join("readings.csv");
    let rows: String = (0..5000).map(|id| format!("{id},sensor-{id}\n")).collect();
    fs::write(&file, format!("id,sensor\n{rows}")).expect("written");
    let (file, certificate) = (file.display().to_string(), up.certificate().display().to_string());
    for expected in ["5000 records: 5000 in the table", "0 rejected, 5000 were there before"] {
        let args = ["send", "t", &file, "--quiet", "--url", &up.url, "--ca", &certificate, "--name", "n"];
        let (status, said) = up.run(&args);
        assert_eq!(status, Some(0), "{said}");
        assert!(said.contains(expected), "{said}");
    }
    let (status, said) = up.run(&["tables", "--url", &up.url, "--ca", &certificate]);
    assert_eq!((status, said.trim()), (Some(0), "main.default.t"));
    let (status, said) = up.run(&["tables", "--url", &up.url]);
    assert_eq!(status, Some(2), "{said}");
    assert!(said.contains("certificate"), "{said}");
    up.process.terminate().expect("drains");
}

#[tokio::test]
async fn hangups_end_nothing_and_a_new_certificate_is_read() {
    let up = Up::start();
    let made = up.dir.path().join("new");
    let (new_cert, new_key) = make_self_signed(&made, "").expect("made");
    let kept = up.certificate();
    fs::copy(&new_key, kept.with_extension("key")).expect("copied");
    fs::copy(&new_cert, &kept).expect("copied");
    let trusted = new_cert.display().to_string();
    let read = async || {
        for _ in 0..20 {
            let pid = up.process.pid().to_string();
            assert!(Command::new("kill").args(["-HUP", &pid]).status().expect("runs").success());
        }
        let (status, _) = up.run(&["tables", "--url", &up.url, "--ca", &trusted]);
        (status == Some(0)).then_some(())
    };
    until("the new certificate", read).await;
    up.process.terminate().expect("drains");
}
