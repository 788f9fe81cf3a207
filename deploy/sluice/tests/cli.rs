//! The program as a person meets it: what commands print, refuse and leave behind.
//!
//! *Owns*: running the real binary, on a directory and a port of its own.
//! *Does not own*: promises about records; those are judged by `loadtest`.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Output, Stdio};

use tempfile::TempDir;

fn sluice(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sluice"));
    command.args(args);
    command
}

/// Status, standard output, standard error.
fn run(command: &mut Command) -> (i32, String, String) {
    let Output { status, stdout, stderr } = command.output().expect("runs");
    let text = |bytes| String::from_utf8(bytes).expect("UTF-8");
    (status.code().expect("ends by itself"), text(stdout), text(stderr))
}

/// `sluice up` on a free port, killed when it is dropped.
struct Up {
    child: Child,
    url: String,
    dir: TempDir,
}

impl Up {
    fn start(args: &[&str]) -> Self {
        let dir = tempfile::tempdir().expect("temporary directory");
        let mut command = sluice(&["up", "--listen", "127.0.0.1:0", "--data"]);
        let log = File::create(dir.path().join("log")).expect("created");
        let mut child = command.arg(dir.path().join("data")).args(args).stdout(Stdio::piped()).stderr(log);
        let mut child = child.spawn().expect("starts");
        let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines().map_while(Result::ok);
        let url = lines.find_map(|line| {
            let at = line.find("ws://")?;
            line[at..].split("/v1").next().map(str::to_owned)
        });
        let log = fs::read_to_string(dir.path().join("log")).expect("readable");
        assert!(url.is_some(), "it says where: {log}");
        Self { url: url.unwrap_or_default(), child, dir }
    }

    /// Writes a file beside the data.
    fn file(&self, name: &str, text: impl AsRef<[u8]>) -> String {
        let path = self.dir.path().join(name);
        fs::write(&path, text).expect("written");
        path.display().to_string()
    }

    fn run(&self, args: &[&str]) -> (i32, String, String) {
        run(sluice(args).args(["--url", &self.url]))
    }
}

impl Drop for Up {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs it with the reading ends of its pipes closed.
fn run_unread(command: &mut Command) -> i32 {
    let pipe = || {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        writer
    };
    command.stdout(pipe()).stderr(pipe()).status().expect("runs").code().expect("ends by itself")
}

#[test]
fn output_that_nobody_reads_is_no_failure() {
    let up = Up::start(&[]);
    let good = up.file("good.ndjson", "{\"n\":1}\n");
    let bad = up.file("bad.ndjson", "{\"n\":\"x\"}\n");
    assert_eq!(run_unread(&mut sluice(&["send", "t", &good, "--url", &up.url])), 0);
    assert_eq!(run_unread(&mut sluice(&["send", "t", &bad, "--url", &up.url])), 1, "a record was rejected");
    assert_eq!(run_unread(&mut sluice(&["tables", "--url", &up.url])), 0);
    assert_eq!(run_unread(&mut sluice(&["tables", "nothing", "--url", &up.url])), 2);
    let full = File::options().write(true).open("/dev/full").expect("opens");
    let (status, _, error) = run(sluice(&["tables", "--url", &up.url]).stdout(full));
    assert_eq!(status, 2);
    assert!(error.contains("cannot write to standard output"), "{error}");
}
