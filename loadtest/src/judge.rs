//! Judging a table: every version by our own reader and the auditor, the last one by a reader that is not ours too.
//!
//! *Owns*: who reads what.
//! *Does not own*: the verdict (`auditor`), our reader (`table`), the other one (`deploy/conformance/read_table.py`).

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use anyhow::{Context, ensure};
use serde::Deserialize;

use crate::auditor::{Auditor, Verdict};
use crate::history::History;
use crate::table;

/// From the workspace: where `make` keeps Pythons that have `deltalake`.
const PYTHONS: [&str; 2] = ["target/venv/bin/python", "target/conformance/bin/python"];
const SCRIPT: &str = "deploy/conformance/read_table.py";

/// Judges every version of a table.
///
/// # Errors
/// It cannot be read.
pub fn judge(table_dir: &Path, history: &History) -> anyhow::Result<Verdict> {
    let mut auditor = Auditor::new(history);
    for version in table::read_versions(table_dir)? {
        auditor.version(version.version, version.files.iter().map(Arc::as_ref), version.marks.as_deref());
    }
    Ok(auditor.finish())
}

fn workspace() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(Path::new("."))
}

/// A Python with `deltalake`, where `make` has made one.
pub fn find_python() -> Option<PathBuf> {
    PYTHONS.iter().map(|path| workspace().join(path)).find(|path| path.is_file())
}

/// delta-rs, by its Python package.
pub struct OtherReader {
    python: PathBuf,
}

/// A stream's rows.
#[derive(Debug, PartialEq, Eq, Deserialize)]
struct StreamRows {
    rows: u64,
    distinct: u64,
    first: u64,
    last: u64,
}

#[derive(Deserialize)]
struct Read {
    version: u64,
    streams: BTreeMap<String, StreamRows>,
}

impl OtherReader {
    /// One, where there is a Python for it.
    pub fn new(python: Option<&Path>) -> Option<Self> {
        python.map(|python| Self { python: python.to_owned() })
    }

    /// Whether it reads the same streams, rows and offsets of the last version as our reader.
    ///
    /// # Errors
    /// It does not, or cannot be run.
    pub fn agrees(&self, table_dir: &Path) -> anyhow::Result<()> {
        let last = table::read_versions(table_dir)?.pop().context("no version")?;
        let mut ours: BTreeMap<String, (u64, BTreeSet<u64>)> = BTreeMap::new();
        for run in last.files.iter().flat_map(|file| &file.runs) {
            let (rows, offsets) = ours.entry(run.stream.clone()).or_default();
            *rows += run.rows.len() as u64;
            offsets.extend(run.rows.iter().map(|row| row.offset));
        }
        let ours: BTreeMap<String, StreamRows> = ours
            .into_iter()
            .map(|(stream, (rows, offsets))| {
                let (first, last) = (offsets.first().copied(), offsets.last().copied());
                let distinct = offsets.len() as u64;
                (stream, StreamRows { rows, distinct, first: first.unwrap_or(0), last: last.unwrap_or(0) })
            })
            .collect();
        let read = Command::new(&self.python).arg(workspace().join(SCRIPT)).arg(table_dir).output();
        let read = read.with_context(|| self.python.display().to_string())?;
        ensure!(read.status.success(), "{SCRIPT}: {}", String::from_utf8_lossy(&read.stderr));
        let read: Read = serde_json::from_slice(&read.stdout).context(SCRIPT)?;
        ensure!(read.version == last.version, "delta-rs reads version {}, we {}", read.version, last.version);
        for (stream, rows) in &ours {
            let other = read.streams.get(stream);
            ensure!(other == Some(rows), "stream {stream}: delta-rs reads {other:?}, we {rows:?}");
        }
        ensure!(
            read.streams.len() == ours.len(),
            "delta-rs reads {} streams, we {}",
            read.streams.len(),
            ours.len()
        );
        Ok(())
    }
}
