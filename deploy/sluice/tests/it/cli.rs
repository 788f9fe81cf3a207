//! The program as a person meets it: what commands print, refuse and leave behind.
//!
//! *Owns*: running the real binary, on a directory and a port of its own.
//! *Does not own*: promises about records; those are judged by `loadtest`.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use serde_json::{Value, json};
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
        command.arg(dir.path().join("data")).args(args).stdout(Stdio::piped()).stderr(log);
        let mut child = command.spawn().expect("starts");
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

#[test]
fn a_variable_that_sets_nothing_is_refused_by_every_command() {
    for command in [&["up", "--listen", "127.0.0.1:0"][..], &["send", "t"], &["tables"]] {
        let (status, _, error) = run(sluice(command).env("SLUICE_POD_SEGMENT_BYTES", "64MiB"));
        assert_eq!(status, 2, "{command:?}: {error}");
        assert!(error.contains("did you mean `SLUICE_POD__SEGMENT_BYTES`?"), "{error}");
    }
}

#[test]
fn nothing_is_made_for_an_address_that_cannot_be_had() {
    let dir = tempfile::tempdir().expect("temporary directory");
    let data = dir.path().join("data").display().to_string();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("binds");
    let taken = taken.local_addr().expect("bound").to_string();
    for command in ["up", "pod"] {
        for (listen, advice) in
            [("foo", "expected HOST:PORT"), (&taken, "give another address with --listen")]
        {
            let (status, _, error) = run(&mut sluice(&[command, "--data", &data, "--listen", listen]));
            assert_eq!(status, 2, "{error}");
            assert!(error.contains(advice), "{error}");
            assert!(
                !fs::exists(&data).expect("looked up"),
                "{command} --listen {listen} made its data directory"
            );
        }
    }
}

#[test]
fn up_heeds_the_file_or_refuses_its_key_by_name() {
    let dir = tempfile::tempdir().expect("temporary directory");
    let file = dir.path().join("sluice.toml").display().to_string();
    fs::write(&file, "[pod]\nauto_create = false\n").expect("written");
    let send = |up: &Up| up.run(&["send", "t", &up.file("one.ndjson", "{\"n\":1}\n")]);
    let (status, _, error) = send(&Up::start(&["--config", &file]));
    assert_eq!(status, 2, "{error}");
    assert!(error.contains("there is no table main.default.t"), "{error}");
    assert!(error.contains("--auto-create"), "{error}");
    for flag in [&["--auto-create"][..], &["--auto-create", "true"]] {
        let (status, _, error) = send(&Up::start(&[flag, &["--config", &file]].concat()));
        assert_eq!(status, 0, "a flag beats the file: {error}");
    }
    for (text, key) in [
        ("[pod]\nid = 'a'", "pod.id"),
        ("[pod]\nwal_dir = 'data'", "pod.wal_dir"),
        ("[pod]\ntables_dir = 'data'", "pod.tables_dir"),
        ("[pod]\nlisten = '127.0.0.1:1'", "pod.listen"),
        ("[[gateway.pods]]\nid = 'a'\naddress = 'a:1'", "gateway.pods"),
    ] {
        fs::write(&file, text).expect("written");
        let data = dir.path().join("data").display().to_string();
        let (status, _, error) =
            run(&mut sluice(&["up", "--listen", "127.0.0.1:0", "--config", &file, "--data", &data]));
        assert_eq!(status, 2, "{error}");
        assert!(error.contains(key) && error.contains("remove the key"), "{error}");
    }
}

#[test]
fn without_tls_and_quic_no_certificate_is_made_or_missed() {
    let dir = tempfile::tempdir().expect("temporary directory");
    let file = dir.path().join("sluice.toml");
    fs::write(&file, "[gateway]\nquic_listen = \"off\"\n").expect("written");
    let up = Up::start(&["--config", file.to_str().expect("UTF-8")]);
    assert!(!up.dir.path().join("data/gateway/quic.crt").exists());
}

#[test]
fn a_data_directory_that_cannot_be_made_is_told_with_the_flag() {
    for command in ["up", "pod"] {
        let (status, _, error) = run(&mut sluice(&[command, "--listen", "127.0.0.1:0", "--data", "/proc/x"]));
        assert_eq!(status, 2);
        let expected = ["--data", "cannot write to /proc", "name a directory that can be written"];
        assert!(expected.iter().all(|part| error.contains(part)), "{error}");
    }
}

/// The table as JSON.
#[test]
fn pods_whose_logs_are_there_are_not_left_out() {
    let mut up = Up::start(&["--pods", "2"]);
    up.child.kill().expect("was running");
    up.child.wait().expect("ends");
    let data = up.dir.path().join("data").display().to_string();
    let (status, _, told) = run(&mut sluice(&["up", "--listen", "127.0.0.1:0", "--data", &data]));
    assert_eq!(status, 2, "{told}");
    assert!(told.contains("the log of pod pod-2") && told.contains("--pods 2"), "{told}");
}

fn described(up: &Up, table: &str) -> serde_json::Value {
    let (status, text, error) = up.run(&["tables", table]);
    assert_eq!(status, 0, "{error}");
    serde_json::from_str(&text).expect("JSON")
}

#[test]
fn a_csv_cell_that_does_not_fit_is_named_by_line_column_and_value_and_the_others_go_on() {
    let up = Up::start(&[]);
    let first = up.file("first.csv", "n,at,note\n1,2026-01-01 00:00:00.000000Z,a\n2,,\n");
    let (status, summary, error) = up.run(&["send", "t", &first]);
    assert_eq!((status, error.as_str()), (0, ""), "{summary}");
    let columns = described(&up, "t")["spec"]["schema"]["fields"].to_string();
    assert!(columns.contains(r#""name":"at","nullable":true,"type":"timestamp""#), "{columns}");
    let second = up.file(
        "second.csv",
        "note,n,at\n\"two\nlines\",3,2026-01-01 00:00:00Z\n\nx,many,2026-01-01T00:00:00Z\ny,5\nz,6,soon\n0123,7,\n",
    );
    let (status, summary, error) = up.run(&["send", "t", &second, "--name", "a"]);
    assert_eq!(status, 1, "{error}");
    let expected = [
        format!("rejected: {second}, line 5, column n: expected an integer (int64), got \"many\""),
        format!(
            "rejected: {second}, line 6: expected an object, got \"a row of 2 cells, where the header has"
        ),
        format!(
            "rejected: {second}, line 7, column at: expected YYYY-MM-DDThh:mm:ss[.ffffff] with Z or an offset"
        ),
    ];
    for (line, expected) in error.lines().zip(&expected) {
        assert!(line.starts_with(expected), "{line}\nis not\n{expected}");
    }
    assert_eq!(error.lines().count(), 3, "{error}");
    assert!(summary.starts_with("sent 5 records: 2 in the table (version "), "{summary}");
    assert!(summary.ends_with("), 3 rejected\n"), "{summary}");
    assert_eq!(described(&up, "t")["rows"], 4);
    let (status, summary, error) = up.run(&["send", "t", &second, "--name", "a"]);
    assert_eq!(status, 0, "what is there is skipped: {error}");
    assert!(summary.contains("5 were there before"), "{summary}");
}

#[test]
fn rejected_records_are_named_by_their_line_whichever_stream_they_are_in() {
    let up = Up::start(&[]);
    up.run(&["send", "t", &up.file("first.ndjson", "{\"o\":\"a\",\"n\":1}\n")]);
    let lines =
        "{\"o\":\"a\",\"n\":2}\n\n{\"o\":\"b\",\"n\":\"x\"}\n{\"o\":\"a\",\"n\":\"y\"}\n{\"o\":\"b\"\n";
    let file = up.file("second.ndjson", lines);
    let (status, _, error) = up.run(&["send", "t", &file, "--stream-by", "o"]);
    assert_eq!(status, 1, "{error}");
    for expected in ["line 3, column n: ", "line 4, column n: ", "line 5: not a JSON object"] {
        assert!(error.contains(&format!("rejected: {file}, {expected}")), "{expected}: {error}");
    }
    let array = up.file("array.json", "[\n  {\"n\": 3},\n  {\n    \"n\": \"z\"\n  }\n]\n");
    let (status, summary, error) = up.run(&["send", "t", &array]);
    assert_eq!(status, 1, "{error}");
    assert!(error.contains(&format!("rejected: {array}, line 3, column n: ")), "{error}");
    assert!(summary.starts_with("sent 2 records: 1 in the table"), "{summary}");
}

#[test]
fn an_input_without_records_says_that_no_table_was_made() {
    let up = Up::start(&[]);
    for name in ["empty.ndjson", "empty.csv", "empty.json"] {
        let file = up.file(name, "");
        let (status, said, error) = up.run(&["send", "t", &file]);
        assert_eq!(status, 0, "{error}");
        assert_eq!(said, "no records: table main.default.t does not exist and was not made\n");
    }
    up.run(&["send", "t", &up.file("one.ndjson", "{\"n\":1}\n")]);
    let (_, said, _) = up.run(&["send", "t", &up.file("header.csv", "n\n")]);
    assert_eq!(said, "no records: table main.default.t is as it was\n");
}

#[test]
fn a_header_that_the_table_does_not_have_is_refused_before_anything_is_sent() {
    let up = Up::start(&[]);
    up.run(&["send", "t", &up.file("one.ndjson", "{\"n\":1}\n")]);
    let file = up.file("more.csv", "n,extra\n2,x\n");
    let (status, _, error) = up.run(&["send", "t", &file]);
    assert_eq!(status, 2, "{error}");
    assert!(error.contains("column \"extra\", which the table does not have (it has n)"), "{error}");
    let (status, _, error) = up.run(&["send", "t", &file, "--unknown", "ignore"]);
    assert_eq!(status, 0, "{error}");
    assert_eq!(described(&up, "t")["rows"], 2);
}

#[test]
fn compressed_input_is_refused_by_its_name() {
    let up = Up::start(&[]);
    let file = up.file("more.csv.gz", b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03");
    let (status, _, told) = up.run(&["send", "t", &file]);
    assert_eq!(status, 2, "{told}");
    assert!(told.contains("this is gzip: decompress it first"), "{told}");
}

/// Puts a version after the table's last one, which adds what `change` makes of the last file that was added.
fn commit_by_hand(table: &Path, change: impl FnOnce(&mut Value)) -> u64 {
    let log = table.join("_delta_log");
    let names = fs::read_dir(&log).expect("a log").map(|entry| entry.expect("entry").path());
    let mut commits: Vec<PathBuf> = names
        .filter(|path| path.extension().is_some_and(|extension| extension == "json"))
        .filter(|path| path.file_stem().is_some_and(|stem| stem.len() == 20))
        .collect();
    commits.sort();
    let text: String = commits.iter().map(|path| fs::read_to_string(path).expect("readable")).collect();
    let mut actions = text.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
    let mut action = actions.rfind(|action| action.get("add").is_some()).expect("a file");
    change(&mut action);
    let version = commits.len() as u64;
    fs::write(log.join(format!("{version:020}.json")), format!("{action}\n")).expect("written");
    version
}

#[test]
fn verify_counts_what_each_stream_has_and_names_what_must_not_be() {
    let mut up = Up::start(&[]);
    let first = up.file("first.ndjson", "{\"n\":1}\n");
    assert_eq!(up.run(&["send", "t", &first, "--name", "maker"]).0, 0, "it makes the table");
    let three = up.file("three.ndjson", "{\"n\":1}\n{\"n\":\"bad\"}\n{\"n\":3}\n");
    assert_eq!(up.run(&["send", "t", &three, "--name", "loader"]).0, 1, "one is rejected");
    up.child.kill().expect("running");
    let data = up.dir.path().join("data").display().to_string();
    let verify = |table: &str, more: &[&str]| run(sluice(&["verify", table, "--data", &data]).args(more));

    let (status, text, error) = verify("t", &[]);
    assert_eq!(status, 0, "{text}{error}");
    let line = text.lines().find(|line| line.starts_with("loader#")).expect("its stream");
    let numbers: Vec<&str> = line.split_whitespace().skip(1).collect();
    assert_eq!(numbers, ["0", "2", "2", "0", "1", "0", "3", "absent:", "1"], "{text}");
    assert!(text.contains("3 records of 2 streams; absent: 1, refused by name or lost"), "{text}");
    assert_eq!(verify("t", &["--every-version"]).0, 0);

    // What a broken writer would do: the same file once more, under another name.
    let table = up.dir.path().join("data/tables/main/default/t");
    let mut original = String::new();
    let version = commit_by_hand(&table, |action| {
        action["add"]["path"].as_str().expect("a path").clone_into(&mut original);
        fs::copy(table.join(&original), table.join("copy.parquet")).expect("copied");
        action["add"]["path"] = "copy.parquet".into();
    });
    let (status, text, _) = verify("t", &["--every-version"]);
    assert_eq!(status, 1, "{text}");
    assert!(
        text.contains("FAULT stream loader#0: 2 offsets are there more than once, the first is 0"),
        "{text}"
    );
    let (status, text, _) = verify("t", &["--json", "--version", &(version - 1).to_string()]);
    let report: Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!((status, &report["streams"][0]["records"], &report["faults"]), (0, &json!(2), &json!([])));
    // And one that takes rows out, both copies.
    for path in ["copy.parquet", &original] {
        commit_by_hand(&table, |action| *action = json!({"remove": {"path": path, "dataChange": true}}));
    }
    let (status, text, _) = verify("t", &["--every-version"]);
    assert_eq!(status, 1);
    assert!(
        text.contains("FAULT stream loader#0: 2 offsets of the version before are gone, the first is 0"),
        "{text}"
    );

    let (status, _, error) = verify("nothing", &[]);
    assert_eq!(status, 2);
    assert!(error.contains("table main.default.nothing: no Delta table at"), "{error}");
    let (status, _, error) = run(&mut sluice(&["verify", "t", "--data", "/nowhere"]));
    assert_eq!(status, 2);
    assert!(error.contains("no tables in /nowhere/tables: name the directory with --data"), "{error}");
    let (status, _, error) = verify("t", &["--version", "99"]);
    assert_eq!(status, 2);
    assert!(error.contains("has no version 99: its newest is"), "{error}");
    fs::remove_file(table.join("copy.parquet")).expect("removed");
    let (status, _, error) = verify("t", &["--version", &version.to_string()]);
    assert_eq!(status, 2);
    assert!(error.contains("copy.parquet"), "{error}");
}
