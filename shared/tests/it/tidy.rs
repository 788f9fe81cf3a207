//! The house rules as a test: headers, imports between crates, lengths, words that stand for unfinished work.

use std::fs;
use std::path::{Path, PathBuf};

const FUNCTION_LINES_MAX: usize = 70;
const FILE_LINES_MAX: usize = 900;
const LINE_CHARS_MAX: usize = 130;
/// Directories of the workspace that hold Rust.
const CRATES: [&str; 6] = ["shared", "client", "gateway", "pod", "loadtest", "deploy"];

struct Source {
    path: String,
    text: String,
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("below the workspace").to_owned()
}

fn collect(dir: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).expect("a directory of the workspace") {
        let path = entry.expect("readable").path();
        if path.is_dir() && !path.ends_with("target") {
            collect(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

fn sources() -> Vec<Source> {
    let root = root();
    let mut paths = Vec::new();
    CRATES.iter().for_each(|name| collect(&root.join(name), &mut paths));
    assert!(paths.len() > 20, "the sources were not found");
    let read = |path: PathBuf| Source {
        text: fs::read_to_string(&path).expect("UTF-8"),
        path: path.strip_prefix(&root).expect("below the root").display().to_string(),
    };
    paths.into_iter().map(read).collect()
}

/// Collects what breaks a rule, and fails with all of it.
fn check(rule: &str, broken_in: impl Fn(&Source) -> Vec<String>) {
    let broken: Vec<String> = sources()
        .iter()
        .flat_map(|source| broken_in(source).into_iter().map(move |what| format!("{}: {what}", source.path)))
        .collect();
    assert!(broken.is_empty(), "{rule}:\n{}", broken.join("\n"));
}

fn lines_with(source: &Source, is_bad: impl Fn(&str) -> bool) -> Vec<String> {
    let lines = source.text.lines().enumerate();
    lines
        .filter(|(_, line)| is_bad(line))
        .map(|(n, line)| format!("line {}: {}", n + 1, line.trim()))
        .collect()
}

#[test]
fn every_file_says_what_it_is() {
    check("a file begins with a `//!` header", |source| {
        let missing = !source.text.starts_with("//!");
        missing.then(|| "no header".to_owned()).into_iter().collect()
    });
}

#[test]
fn crates_import_only_whom_they_may() {
    let forbidden = |path: &str| -> &[&str] {
        match path.split('/').next().expect("a crate") {
            "shared" => &["sluice_client", "sluice_gateway", "sluice_pod", "sluice_loadtest"],
            "client" => &["sluice_gateway", "sluice_pod", "sluice_loadtest"],
            "gateway" => &["sluice_client", "sluice_pod", "sluice_loadtest"],
            "pod" => &["sluice_client", "sluice_gateway", "sluice_loadtest"],
            _ => &[],
        }
    };
    check("gateway and pod meet in shared; shared imports no sibling", |source| {
        let names = forbidden(&source.path);
        if source.path.ends_with("tests/it/tidy.rs") {
            return Vec::new();
        }
        lines_with(source, |line| names.iter().any(|name| line.contains(&format!("{name}::"))))
    });
}

#[test]
fn nothing_is_left_unfinished() {
    let words = [
        ["TO", "DO"],
        ["FIX", "ME"],
        ["todo!", "("],
        ["unimplemented!", "("],
        ["dbg!", "("],
        ["#[ign", "ore"],
    ]
    .map(|halves| halves.concat());
    check("no left-overs", |source| lines_with(source, |line| words.iter().any(|word| line.contains(word))));
}

#[test]
fn modules_are_named_files() {
    check("`foo.rs` beside `foo/`, never `mod.rs`", |source| {
        let is_mod = source.path.ends_with("/mod.rs");
        is_mod.then(|| "named mod.rs".to_owned()).into_iter().collect()
    });
}

#[test]
fn files_and_lines_are_short() {
    check("a file with two reasons to change is split", |source| {
        let lines = source.text.lines().count();
        let long = (lines > FILE_LINES_MAX).then(|| format!("{lines} lines"));
        long.into_iter().chain(lines_with(source, |line| line.chars().count() > LINE_CHARS_MAX)).collect()
    });
}

#[test]
fn functions_are_short() {
    check("a function has at most 70 lines", |source| long_functions(&source.text));
}

/// Relies on rustfmt: a function ends at the first `}` that is indented as its `fn` line.
fn long_functions(text: &str) -> Vec<String> {
    let lines: Vec<&str> = text.lines().collect();
    let is_function = |line: &str| {
        let code = line.trim_start();
        let words = code.split(' ').take_while(|word| !word.contains('('));
        !code.starts_with("//") && (code.starts_with("fn ") || words.clone().any(|word| word == "fn"))
    };
    let mut long = Vec::new();
    for (start, line) in lines.iter().enumerate().filter(|(_, line)| is_function(line)) {
        let indent = line.len() - line.trim_start().len();
        let end = format!("{}}}", " ".repeat(indent));
        let declared_only = line.ends_with(';');
        let length = lines[start..].iter().take_while(|line| **line != end && !declared_only).count();
        if length > FUNCTION_LINES_MAX {
            long.push(format!("line {}: {length} lines: {}", start + 1, line.trim()));
        }
    }
    long
}

#[test]
fn long_functions_are_found() {
    let body = "    x();\n".repeat(FUNCTION_LINES_MAX);
    assert_eq!(long_functions(&format!("fn f() {{\n{body}}}\n")).len(), 1);
    assert_eq!(long_functions("fn f() {\n    x();\n}\n").len(), 0);
}
