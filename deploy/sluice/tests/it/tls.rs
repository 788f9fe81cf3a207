//! The program over TLS: `sluice up`, `sluice send` and `sluice tables`.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
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
        Self::with(&[], tempfile::tempdir().expect("a directory"))
    }

    fn with(env: &[(&str, &str)], dir: TempDir) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_sluice"));
        command.args(["up", "--listen", "off", "--tls-listen", "127.0.0.1:0", "--data"]);
        command.arg(dir.path().join("data")).envs(env.iter().copied());
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

#[test]
fn who_has_a_certificate_of_the_authority_is_let_in_over_tls_and_quic() {
    let dir = tempfile::tempdir().expect("a directory");
    let written = |name: &str, text: String| {
        let file = dir.path().join(name);
        fs::write(&file, text).expect("written");
        file.display().to_string()
    };
    let mut params = CertificateParams::new(Vec::new()).expect("valid");
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority =
        CertifiedIssuer::self_signed(params, KeyPair::generate().expect("a key")).expect("signed");
    let key = KeyPair::generate().expect("a key");
    let cert = CertificateParams::new(vec!["plant-7".to_owned()]).expect("valid").signed_by(&key, &authority);
    let ca = written("clients.crt", authority.pem());
    let (cert, key) =
        (written("own.crt", cert.expect("signed").pem()), written("own.key", key.serialize_pem()));
    let stranger = make_self_signed(&dir.path().join("stranger"), "").expect("made");
    let stranger = [stranger.0, stranger.1].map(|file| file.display().to_string());
    let file = written("readings.ndjson", "{\"id\":1}\n{\"id\":2}\n".to_owned());
    let quic = ("SLUICE_GATEWAY__QUIC_LISTEN", "127.0.0.1:0");
    let up = Up::with(&[("SLUICE_GATEWAY__TLS_CLIENT_CA", &ca), quic], dir);
    let certificate = up.certificate().display().to_string();
    let told = fs::read_to_string(up.dir.path().join("sluice.log")).expect("a log");
    let port = told
        .split_once("gateway listens for QUIC address=127.0.0.1:")
        .and_then(|(_, rest)| rest.split('\n').next());
    let quic = format!("quic://localhost:{}", port.expect("a port").trim());
    for url in [&up.url, &quic] {
        let args = ["send", "t", &file, "--quiet", "--url", url, "--ca", &certificate];
        let with = |cert: &str, key: &str| up.run(&[&args[..], &["--cert", cert, "--key", key]].concat());
        let (status, said) = with(&cert, &key);
        assert_eq!(status, Some(0), "{url}: {said}");
        assert!(said.contains("2 in the table"), "{url}: {said}");
        let (status, said) = up.run(&args);
        assert_eq!(status, Some(2), "{url}: {said}");
        assert!(said.contains("asks for a client certificate"), "{url}: {said}");
        let (status, said) = with(&stranger[0], &stranger[1]);
        assert_eq!(status, Some(2), "{url}: {said}");
        assert!(said.contains("does not take our client certificate"), "{url}: {said}");
        let (status, said) = with(&cert, &stranger[1]);
        assert_eq!(status, Some(2), "{url}: {said}");
        assert!(said.contains("quic.key: with its certificate"), "{url}: {said}");
    }
    let args = ["tables", "--url", &up.url, "--ca", &certificate, "--cert", &cert, "--key", &key];
    assert_eq!(up.run(&args), (Some(0), "main.default.t\n".to_owned()));
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
