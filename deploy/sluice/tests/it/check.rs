//! `--check-config`: what is wrong with a configuration, where, and nothing started.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use sluice_gateway::make_self_signed;
use tempfile::TempDir;

use crate::server::Server;

const PODS: &str = "[[gateway.pods]]\nid = \"pod-1\"\naddress = \"127.0.0.1:1\"\n";

/// A directory with a configuration, a certificate and its key.
struct Scratch {
    dir: TempDir,
    cert: PathBuf,
    key: PathBuf,
}

impl Scratch {
    fn new() -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let (cert, key) = make_self_signed(&dir.path().join("tls"), "").expect("made");
        Self { dir, cert, key }
    }

    fn file(&self) -> PathBuf {
        self.dir.path().join("sluice.toml")
    }

    /// Exit status, standard output, and the lines of standard error. What it would start ends the test by not ending.
    fn run(&self, text: &str, args: &[&str], env: &[(&str, &str)]) -> (Option<i32>, String, Vec<String>) {
        fs::write(self.file(), text).expect("written");
        let mut command = Command::new(env!("CARGO_BIN_EXE_sluice"));
        command.arg("--config").arg(self.file()).args(args).envs(env.iter().copied());
        let Output { status, stdout, stderr } = command.current_dir(&self.dir).output().expect("runs");
        let said = String::from_utf8_lossy(&stderr).lines().map(str::to_owned).collect();
        (status.code(), String::from_utf8_lossy(&stdout).into_owned(), said)
    }

    fn tls(&self) -> String {
        format!("tls_cert = {:?}\ntls_key = {:?}\n", self.cert, self.key)
    }

    fn expect_good(&self, text: &str, args: &[&str]) {
        let (status, said, complaints) = self.run(text, args, &[]);
        assert_eq!((status, &complaints[..]), (Some(0), &[][..]), "{text}");
        assert_eq!(said, format!("configuration is good: {}\n", self.file().display()), "{text}");
    }

    /// Each of `expected` is a line of its own, behind the place in the file where it is mended.
    fn expect(&self, text: &str, args: &[&str], expected: &[(&str, &str)]) {
        let (status, said, complaints) = self.run(text, args, &[]);
        assert_eq!((status, &*said), (Some(2), ""), "{text}: {complaints:?}");
        let file = self.file().display().to_string();
        for (at, (line, complaint)) in expected.iter().enumerate() {
            let told = complaints.get(at).map_or("", String::as_str);
            let begins = format!("error: {}", line.replace("FILE", &file));
            assert!(told.starts_with(&begins) && told.contains(complaint), "{text}: {told} for {complaint}");
        }
        assert_eq!(complaints.len(), expected.len(), "{text}: {complaints:?}");
    }
}

#[test]
fn a_good_configuration_is_said_to_be_so_and_nothing_is_made() {
    let scratch = Scratch::new();
    let before = fs::read_dir(&scratch.dir).expect("there").count();
    scratch.expect_good("", &["up", "--check-config"]);
    let tls = format!("[gateway]\nlisten = \"127.0.0.1:0\"\ntls_listen = \"[::1]:7443\"\n{}", scratch.tls());
    scratch.expect_good(&tls, &["up", "--pods", "2", "--check-config"]);
    scratch.expect_good(&format!("{tls}{PODS}"), &["gateway", "--check-config"]);
    scratch.expect_good("", &["gateway", "--check-config", "--pod", "pod-1=127.0.0.1:1"]);
    scratch.expect_good("[pod]\nlanes = 1\n", &["pod", "--check-config", "--data", "not/there/yet"]);
    // The configuration itself.
    assert_eq!(fs::read_dir(&scratch.dir).expect("there").count(), before + 1);
}

#[tokio::test]
async fn the_configuration_of_a_running_process_is_good_although_its_port_is_taken() {
    let server = Server::start(&[]);
    let scratch = Scratch::new();
    let text = format!("[gateway]\nlisten = \"{}\"\n{}{PODS}", server.address, scratch.tls());
    scratch.expect_good(&text, &["gateway", "--check-config"]);
    let (status, _, complaints) = scratch.run(&text, &["gateway"], &[]);
    assert_eq!(status, Some(2));
    assert!(complaints.iter().any(|line| line.contains("another process")), "{complaints:?}");
    server.end();
}

#[test]
fn all_that_is_wrong_is_told_with_the_line_of_its_key() {
    let scratch = Scratch::new();
    let text = "# of the plant\n[gateway]\nlisten = \"7070\"\nconnections_max = 0\nread_timeout_ms = 0\n\n[pod]\n\
                target_file_bytes = 0\nsegment_bytes = \"1MiB\"\nrecord_bytes_max = \"0MiB\"\n";
    scratch.expect(
        text,
        &["up", "--check-config"],
        &[
            ("FILE, line 4: ", "gateway.connections_max is 0"),
            ("FILE, line 5: ", "gateway.read_timeout_ms is 0"),
            ("FILE, line 3: ", "gateway.listen is \"7070\": expected HOST:PORT"),
            ("FILE, line 10: ", "pod.record_bytes_max is 0"),
            ("FILE, line 8: ", "pod.target_file_bytes is 0"),
        ],
    );
    // A default does not fit what was set: the line is of that.
    let pod = ["pod", "--check-config"];
    scratch.expect("[pod]\n\nrecord_bytes_max = \"100MiB\"\n", &pod, &[("FILE, line 3: ", "segment_bytes")]);
    scratch.expect("[pod]\nlisten = \"::1:7\"\n", &pod, &[("FILE, line 2: ", "pod.listen is \"::1:7\"")]);
    let nowhere = [("FILE, line 2: ", "pod.tables_dir, /dev/null/t: cannot write to /dev/null")];
    scratch.expect("[pod]\ntables_dir = \"/dev/null/t\"\n", &pod, &nowhere);
    let unheeded = [("FILE, line 2: ", "`sluice up` cannot heed pod.id")];
    scratch.expect("[pod]\nid = \"a\"\n", &["up", "--check-config"], &unheeded);
}

#[test]
fn files_and_addresses_of_a_gateway_are_looked_at() {
    let scratch = Scratch::new();
    let gateway = ["gateway", "--check-config"];
    let check = |text: &str, expected: &[(&str, &str)]| {
        scratch.expect(&format!("[gateway]\n{text}{PODS}"), &gateway, expected);
    };
    let tls = scratch.tls();
    check(
        &format!("listen = \"0.0.0.0:7070\"\nauth = \"open\"\ntls_listen = \"localhost:7070\"\n{tls}"),
        &[("FILE, line 4: ", "gateway.listen 0.0.0.0:7070: one port cannot be both")],
    );
    check("listen = \"192.0.2.1:7070\"\nauth = \"open\"\n", &[("FILE, line 2: ", "no such address")]);
    check("scratch_dir = \"/nowhere\"\n", &[("FILE, line 2: ", "gateway.scratch_dir, /nowhere")]);
    let swapped = format!("tls_cert = {:?}\ntls_key = {:?}\n", scratch.key, scratch.key);
    check(&swapped, &[("FILE, line 2: ", "no certificate in PEM")]);
    check(&tls.replace("quic.key", "none.key"), &[("FILE, line 3: ", "none.key: ")]);
    check(
        &format!("{PODS}[[gateway.pods]]\nid = \"b\"\naddress = \"h:1\"\n"),
        &[("FILE, line 2: ", "pod-1 twice")],
    );
    check(
        "[[gateway.pods]]\nid = \"b\"\naddress = \"127.0.0.1:1\"\n",
        &[("FILE, line 2: ", "pods b and pod-1")],
    );
    scratch.expect("", &gateway, &[("a gateway needs pods", "--pod ID=HOST:PORT")]);
    set_mode(&scratch.key, 0o644);
    check(&tls, &[("FILE, line 3: ", "its mode 644 lets others read")]);
    set_mode(&scratch.key, 0o640);
    scratch.expect_good(&format!("[gateway]\n{tls}{PODS}"), &gateway);
    let token_key = scratch.dir.path().join("token.key");
    fs::write(&token_key, "0123456789abcdef".repeat(4)).expect("written");
    set_mode(&token_key, 0o604);
    let tokens = format!("auth = \"tokens\"\ntoken_key = {token_key:?}\n");
    check(&tokens, &[("FILE, line 3: ", "its mode 604 lets others read")]);
    set_mode(&token_key, 0o600);
    scratch.expect_good(&format!("[gateway]\n{tokens}{PODS}"), &gateway);
}

fn set_mode(file: &Path, mode: u32) {
    fs::set_permissions(file, fs::Permissions::from_mode(mode)).expect("set");
}

#[test]
fn what_is_no_configuration_is_told_by_line_variable_or_flag() {
    let scratch = Scratch::new();
    let args = ["up", "--check-config"];
    for (text, expected) in [
        ("[gateway]\nlistem = \"x\"\n", ["line 2", "did you mean `listen`?"]),
        ("[gateway]\n\nlisten = 7\n", ["line 3", "expected a string"]),
        ("[gatway]\n", ["line 1", "did you mean `gateway`?"]),
        ("[log]\nfilter = \"a=b=c\"\n", ["log.filter", "error parsing level filter"]),
    ] {
        let (status, said, complaints) = scratch.run(text, &args, &[]);
        let complaints = complaints.join("\n");
        assert_eq!((status, &*said), (Some(2), ""), "{text}");
        assert!(expected.iter().all(|part| complaints.contains(part)), "{text}: {complaints}");
    }
    let in_file = "[gateway]\nlisten = \"a\"\n";
    let variable = [("SLUICE_GATEWAY__LISTEN", "b")];
    let (_, _, complaints) = scratch.run(in_file, &args, &variable);
    assert_eq!(complaints.len(), 1, "{complaints:?}");
    assert!(
        complaints[0].starts_with("error: variable SLUICE_GATEWAY__LISTEN: gateway.listen is \"b\""),
        "{complaints:?}"
    );
    let (_, _, complaints) = scratch.run(in_file, &[&args[..], &["--listen", "c"]].concat(), &variable);
    assert!(complaints[0].starts_with("error: --listen: gateway.listen is \"c\""), "{complaints:?}");
}

/// A bucket's store that answers all with the same refusal, or with an empty list, until the test ends.
fn answering(status: &'static str, body: &'static str) -> String {
    use std::io::{Read, Write};
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("binds");
    let url = format!("http://{}", listener.local_addr().expect("bound"));
    std::thread::spawn(move || {
        for mut socket in listener.incoming().flatten() {
            let _ = socket.read(&mut [0; 4096]);
            let head = format!("content-length: {}\r\nconnection: close\r\n\r\n", body.len());
            let _ = socket.write_all(format!("HTTP/1.1 {status}\r\n{head}{body}").as_bytes());
        }
    });
    url
}

#[test]
fn a_bucket_is_asked_and_what_is_wrong_with_it_is_said_with_how_to_mend_it() {
    const KEYS: [(&str, &str); 2] = [("AWS_ACCESS_KEY_ID", "a"), ("AWS_SECRET_ACCESS_KEY", "b")];
    let listed = "<ListBucketResult><Name>lake</Name><KeyCount>0</KeyCount><IsTruncated>false</IsTruncated></ListBucketResult>";
    let missing = "<Error><Code>NoSuchBucket</Code><Message>it does not exist</Message></Error>";
    let nobody =
        std::net::TcpListener::bind("127.0.0.1:0").and_then(|taken| taken.local_addr()).expect("free");
    let scratch = Scratch::new();
    let check = |endpoint: &str, args: &[&str]| {
        let env = [&KEYS[..], &[("AWS_ENDPOINT", endpoint)]].concat();
        let args = [&["up", "--listen", "127.0.0.1:0", "--tables", "s3://lake/raw"], args].concat();
        let (status, said, complaints) = scratch.run("", &args, &env);
        (status, [said, complaints.join("\n")].concat())
    };
    let good = answering("200 OK", listed);
    assert_eq!(check(&good, &["--check-config"]).0, Some(0));
    let none = answering("404 Not Found", missing);
    for args in [&["--check-config"][..], &[]] {
        let (status, said) = check(&none, args);
        assert_eq!(status, Some(2), "{said}");
        for part in ["no bucket \"lake\"", "AWS_ENDPOINT", &none] {
            assert!(said.contains(part), "{part:?} is not in {said}");
        }
        assert!(!said.contains("<Code>"), "{said}");
    }
    let (status, said) = check(&format!("http://{nobody}"), &["--check-config"]);
    assert!(status == Some(2) && said.contains("--tables, s3://lake/raw: cannot reach http://"), "{said}");
}
