//! Judging a table: every version by the auditor, as our own reader has it and as one that is not ours has it.
//!
//! *Owns*: who reads what.
//! *Does not own*: the verdict (`auditor`), our reader (`table`), the other one (`deploy/conformance/read_table.py`).

use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use anyhow::{Context, ensure};
use arrow::ipc::reader::StreamReader;
use serde::Deserialize;

use crate::auditor::{Auditor, Verdict};
use crate::history::History;
use crate::table::{self, FileRows, Version};

/// From the workspace: where `make` keeps Pythons that have `deltalake`.
const PYTHONS: [&str; 2] = ["target/venv/bin/python", "target/conformance/bin/python"];
const SCRIPT: &str = "deploy/conformance/read_table.py";

/// Judges every version of a table that was read.
pub fn judge(versions: &[Version], history: &History) -> Verdict {
    let mut auditor = Auditor::new(history);
    for version in versions {
        auditor.version(version.version, version.files.iter().map(Arc::as_ref), version.marks.as_deref());
    }
    auditor.finish()
}

/// Reads a table and judges it; the `other` reader, if there is one, has to read the same.
///
/// # Errors
/// It cannot be read, or not by both in the same way.
pub fn judge_dir(
    table_dir: &Path,
    history: &History,
    other: Option<&OtherReader>,
) -> anyhow::Result<Verdict> {
    let versions = table::read_versions(table_dir)?;
    if let Some(other) = other {
        other.agrees(table_dir, &versions)?;
    }
    Ok(judge(&versions, history))
}

fn workspace() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(Path::new("."))
}

/// A Python with `deltalake`, where `make` has made one.
pub fn find_python() -> Option<PathBuf> {
    PYTHONS.iter().map(|path| workspace().join(path)).find(|path| path.is_file())
}

/// delta-rs for the log, by its Python package, and Arrow's C++ for the files.
pub struct OtherReader {
    python: PathBuf,
}

#[derive(Deserialize)]
struct Read {
    /// As the log has them; the rows of each are in a file that is named by its place here.
    files: Vec<String>,
    /// Of each version, the places of its files.
    versions: Vec<Vec<usize>>,
}

impl OtherReader {
    /// One, where there is a Python for it.
    pub fn new(python: Option<&Path>) -> Option<Self> {
        python.map(|python| Self { python: python.to_owned() })
    }

    /// Whether it finds the same files in each version, and in each file the same rows with the same contents, in order.
    ///
    /// # Errors
    /// It does not, or cannot be run.
    pub fn agrees(&self, table_dir: &Path, ours: &[Version]) -> anyhow::Result<()> {
        let out = tempfile::tempdir().context("a directory for rows")?;
        let script = workspace().join(SCRIPT);
        let read = Command::new(&self.python).arg(script).arg(table_dir).arg(out.path()).output();
        let read = read.with_context(|| self.python.display().to_string())?;
        ensure!(read.status.success(), "{SCRIPT}: {}", String::from_utf8_lossy(&read.stderr));
        let read: Read = serde_json::from_slice(&read.stdout).context(SCRIPT)?;
        let (theirs, count) = (read.versions.len(), ours.len());
        ensure!(theirs == count, "delta-rs reads {theirs} versions, we {count}");
        let mut known: HashMap<&str, Arc<FileRows>> = HashMap::new();
        for (version, places) in ours.iter().zip(&read.versions) {
            let number = version.version;
            let paths: BTreeSet<&str> =
                places.iter().filter_map(|place| read.files.get(*place).map(String::as_str)).collect();
            let expected: BTreeSet<&str> = version.files.iter().map(|file| file.path.as_str()).collect();
            ensure!(paths == expected, "version {number}: delta-rs reads files {paths:?}, we {expected:?}");
            known.extend(version.files.iter().map(|file| (file.path.as_str(), Arc::clone(file))));
        }
        for (place, path) in read.files.iter().enumerate() {
            let ours = known.get(path.as_str()).with_context(|| format!("file {path:?} is in no version"))?;
            let rows = File::open(out.path().join(format!("{place}.arrow")))?;
            let rows = StreamReader::try_new(BufReader::new(rows), None)?.collect::<Result<Vec<_>, _>>()?;
            let rows = table::runs_of(&rows).with_context(|| format!("file {path:?}"))?;
            ensure!(rows == ours.runs, "file {path:?}: Arrow's C++ reads other rows or contents than we");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use arrow::array::{ArrayRef, Int64Array, RecordBatch, StringArray};
    use parquet::arrow::ArrowWriter;
    use serde_json::json;

    use super::*;

    fn write(dir: &Path, name: &str, stream: &str, values: &[i64]) {
        let columns: Vec<(&str, ArrayRef)> = vec![
            ("n", Arc::new(Int64Array::from(values.to_vec()))),
            ("_stream", Arc::new(StringArray::from(vec![stream; values.len()]))),
            ("_offset", Arc::new(Int64Array::from_iter_values(0..values.len() as i64))),
        ];
        let batch = RecordBatch::try_from_iter(columns).expect("a batch");
        std::fs::create_dir_all(dir.join(name).parent().expect("one")).expect("made");
        let file = File::create(dir.join(name)).expect("a file");
        let mut writer = ArrowWriter::try_new(file, batch.schema(), None).expect("a writer");
        writer.write(&batch).expect("written");
        writer.close().expect("closed");
    }

    fn commit(dir: &Path, version: u64, actions: &[serde_json::Value]) {
        let text: String = actions.iter().map(|action| format!("{action}\n")).collect();
        std::fs::create_dir_all(dir.join("_delta_log")).expect("made");
        std::fs::write(dir.join(format!("_delta_log/{version:020}.json")), text).expect("written");
    }

    /// Two versions, of which the second has one file more, in a folder of its partition.
    fn table(dir: &Path) {
        let field =
            |name: &str, kind: &str| json!({"name": name, "type": kind, "nullable": true, "metadata": {}});
        let fields =
            [field("n", "long"), field("day", "date"), field("_stream", "string"), field("_offset", "long")];
        let schema = json!({"type": "struct", "fields": fields}).to_string();
        let meta_data = json!({"id": "3a0e8d6e-7d1c-4c43-8ac3-000000000000", "format": {"provider": "parquet", "options": {}},
            "schemaString": schema, "partitionColumns": ["day"], "configuration": {}, "createdTime": 0});
        let add = |path: &str, day: Option<&str>, rows: u64| {
            let stats = json!({"numRecords": rows}).to_string();
            json!({"add": {"path": path, "partitionValues": {"day": day}, "size": 1, "modificationTime": 0,
                "dataChange": true, "stats": stats}})
        };
        write(dir, "a b.parquet", "s#1", &[5, 6]);
        write(dir, "day=2026-01-02/c.parquet", "t#1", &[7]);
        let protocol = json!({"protocol": {"minReaderVersion": 1, "minWriterVersion": 2}});
        commit(dir, 0, &[protocol, json!({"metaData": meta_data}), add("a%20b.parquet", None, 2)]);
        commit(dir, 1, &[add("day=2026-01-02/c.parquet", Some("2026-01-02"), 1)]);
    }

    #[test]
    fn what_another_reader_reads_is_compared_to_the_last_value() {
        let Some(other) = OtherReader::new(find_python().as_deref()) else {
            return println!("left out: there is no Python with deltalake, which `make` makes");
        };
        let dir = tempfile::tempdir().expect("a directory");
        table(dir.path());
        let good = table::read_versions(dir.path()).expect("a table");
        other.agrees(dir.path(), &good).expect("the same");
        let refused = |ours: &[Version], words: &str| {
            let error = other.agrees(dir.path(), ours).expect_err(words);
            assert!(format!("{error:#}").contains(words), "{error:#}");
        };
        let changed = |change: &dyn Fn(&mut FileRows)| {
            let mut versions = good.clone();
            for version in &mut versions {
                change(Arc::make_mut(&mut version.files[0]));
            }
            versions
        };
        refused(&changed(&|file| file.runs[0].rows[1].hash ^= 1), "other rows or contents");
        refused(&changed(&|file| file.runs[0].rows[1].offset += 1), "other rows or contents");
        refused(&changed(&|file| "s#2".clone_into(&mut file.runs[0].stream)), "other rows or contents");
        refused(&changed(&|file| "d.parquet".clone_into(&mut file.path)), "version 0: delta-rs reads files");
        refused(&good[..1], "delta-rs reads 2 versions, we 1");
        let mut early = good.clone();
        early[0].files.push(Arc::clone(&good[1].files[1]));
        refused(&early, "version 0: delta-rs reads files");
        std::fs::write(dir.path().join("a b.parquet"), "no Parquet").expect("written");
        refused(&good, "read_table.py");
    }
}
