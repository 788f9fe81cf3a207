//! What a run of producers saw: each record that was sent, each answer that was given.
//!
//! Where the rig itself may be killed, or its verdict is to be asked for once more, notes go to a file as well, one for a
//! stream, which only grows. A line is an event:
//!
//! | line | |
//! |---|---|
//! | `stream ID` | the stream is this one, as it stands in `_stream` |
//! | `sent HASH …` | records with these contents are about to be sent, at the next offsets; hashes in hexadecimal |
//! | `durable N` | all records before offset N were said to be durable |
//! | `committed N V` | all records before offset N were said to be in version V of the table |
//! | `rejected N` | the record of offset N was said to be refused, or would have been, had its producer been there |
//! | `resumed N` | the producer has come back and goes on at offset N: what it sent from there on is not in the stream |
//!
//! *Owns*: the notes, one set a stream; its producer alone writes them; the file's form.
//! *Does not own*: the verdict (`auditor`).

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs::File;
use std::io::Write as _;
use std::ops::Deref;
use std::path::Path;

use anyhow::{Context, bail, ensure};

/// `committed: next - 1, version` was said.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Promise {
    /// All records before this offset,
    pub next: u64,
    /// can be read in this version of the table and in all later ones.
    pub version: u64,
}

/// One stream's notes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct StreamHistory {
    /// The stream's id, as it stands in `_stream`.
    pub stream: String,
    /// Hash of each record's content, by offset.
    pub sent: Vec<u64>,
    /// Records before this offset were said to be durable.
    pub durable_next: u64,
    /// By rising offset and version.
    pub committed: Vec<Promise>,
    /// Records that were said to be refused.
    pub rejected: BTreeSet<u64>,
}

impl StreamHistory {
    /// Records were sent, at the next offsets.
    pub fn sent(&mut self, hashes: &[u64]) {
        self.sent.extend_from_slice(hashes);
    }

    /// Records before `next` are durable.
    pub fn durable(&mut self, next: u64) {
        self.durable_next = self.durable_next.max(next);
    }

    /// Records before `next` are in the table. Told again and again: only what is new is noted.
    pub fn committed(&mut self, next: u64, version: u64) {
        let promise = Promise { next, version };
        if next > 0 && self.committed.last().is_none_or(|last| *last != promise) {
            self.committed.push(promise);
        }
        self.durable(next);
    }

    /// The stream goes on at `next`: what was sent from there on is not in it.
    fn resumed(&mut self, next: u64) {
        self.sent.truncate(usize::try_from(next).unwrap_or(usize::MAX));
        self.rejected.retain(|offset| *offset < next);
    }

    fn apply(&mut self, line: &str) -> anyhow::Result<()> {
        let (event, rest) = line.split_once(' ').with_context(|| format!("no event: {line:.100}"))?;
        let number = |text: &str| text.parse::<u64>().with_context(|| format!("no number: {text:.100}"));
        match event {
            "stream" => rest.clone_into(&mut self.stream),
            "sent" => {
                let hashes = rest.split(' ').map(|hash| u64::from_str_radix(hash, 16));
                self.sent(&hashes.collect::<Result<Vec<u64>, _>>().context("sent")?);
            }
            "durable" => self.durable(number(rest)?),
            "committed" => {
                let (next, version) = rest.split_once(' ').context("committed: no version")?;
                self.committed(number(next)?, number(version)?);
            }
            "rejected" => drop(self.rejected.insert(number(rest)?)),
            "resumed" => self.resumed(number(rest)?),
            other => bail!("no event: {other:.100}"),
        }
        Ok(())
    }
}

/// One stream's notes, and the file in which they stand as well.
#[derive(Debug)]
pub struct Notebook {
    notes: StreamHistory,
    file: File,
}

impl Deref for Notebook {
    type Target = StreamHistory;

    fn deref(&self) -> &StreamHistory {
        &self.notes
    }
}

impl Notebook {
    /// An empty one, with a file of its own at `path`.
    ///
    /// # Errors
    /// It is there already, or cannot be made.
    pub fn begin(path: &Path) -> anyhow::Result<Self> {
        let made = path.parent().map_or(Ok(()), std::fs::create_dir_all);
        let file = made.and_then(|()| File::options().append(true).create_new(true).open(path));
        let file = file.with_context(|| format!("notes of a producer: {}", path.display()))?;
        Ok(Self { notes: StreamHistory::default(), file })
    }

    /// The stream has this id.
    ///
    /// # Errors
    /// As of all that is noted: it cannot be written.
    pub fn stream(&mut self, id: &str) -> anyhow::Result<()> {
        self.note(format!("stream {id}"))
    }

    /// Records are about to be sent, at the next offsets.
    ///
    /// # Errors
    /// As `stream`.
    pub fn sent(&mut self, hashes: &[u64]) -> anyhow::Result<()> {
        let mut line = "sent".to_owned();
        hashes.iter().for_each(|hash| write!(line, " {hash:x}").expect("a string takes it"));
        if hashes.is_empty() { Ok(()) } else { self.note(line) }
    }

    /// Records before `next` are durable. Told again and again: only what is new is noted, here and below.
    ///
    /// # Errors
    /// As `stream`.
    pub fn durable(&mut self, next: u64) -> anyhow::Result<()> {
        if next > self.durable_next { self.note(format!("durable {next}")) } else { Ok(()) }
    }

    /// Records before `next` are in the table.
    ///
    /// # Errors
    /// As `stream`.
    pub fn committed(&mut self, next: u64, version: u64) -> anyhow::Result<()> {
        let is_new = next > 0 && self.committed.last() != Some(&Promise { next, version });
        if is_new { self.note(format!("committed {next} {version}")) } else { Ok(()) }
    }

    /// The record of this offset was refused.
    ///
    /// # Errors
    /// As `stream`.
    pub fn rejected(&mut self, offset: u64) -> anyhow::Result<()> {
        if self.rejected.contains(&offset) { Ok(()) } else { self.note(format!("rejected {offset}")) }
    }

    /// The stream goes on at `next`: what was sent from there on is not in it.
    ///
    /// # Errors
    /// As `stream`.
    pub fn resumed(&mut self, next: u64) -> anyhow::Result<()> {
        self.note(format!("resumed {next}"))
    }

    /// First the file: it says no less than what came of it.
    fn note(&mut self, mut line: String) -> anyhow::Result<()> {
        self.notes.apply(&line)?;
        line.push('\n');
        self.file.write_all(line.as_bytes()).context("notes of a producer")
    }
}

/// All streams into one table.
#[derive(Debug, Clone, Default)]
pub struct History {
    /// Each stream once.
    pub streams: Vec<StreamHistory>,
}

impl History {
    /// All notes below a directory. A last line without an end is none: whoever wrote it was killed.
    ///
    /// # Errors
    /// It cannot be read, or a line is no event.
    pub fn read(dir: &Path) -> anyhow::Result<Self> {
        let entries = std::fs::read_dir(dir).with_context(|| format!("notes in {}", dir.display()))?;
        let mut paths = entries.map(|entry| Ok(entry?.path())).collect::<std::io::Result<Vec<_>>>()?;
        paths.sort();
        let mut history = Self::default();
        for path in paths {
            let text = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
            let whole = text.rfind('\n').map_or("", |end| &text[..end]);
            let mut notes = StreamHistory::default();
            for (number, line) in (1..).zip(whole.lines()) {
                notes.apply(line).with_context(|| format!("{}, line {number}", path.display()))?;
            }
            // One that never had a stream has sent nothing.
            ensure!(notes.sent.is_empty() || !notes.stream.is_empty(), "{}: no stream", path.display());
            if !notes.stream.is_empty() {
                history.streams.push(notes);
            }
        }
        Ok(history)
    }

    /// Records that were sent.
    pub fn sent(&self) -> u64 {
        self.streams.iter().map(|stream| stream.sent.len() as u64).sum()
    }

    /// Records that were refused.
    pub fn rejected(&self) -> u64 {
        self.streams.iter().map(|stream| stream.rejected.len() as u64).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_noted_is_read_again() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("table/1.notes");
        let mut notes = Notebook::begin(&path).expect("begun");
        notes.stream("s#1").expect("noted");
        notes.sent(&[7, u64::MAX, 9, 3]).expect("noted");
        notes.rejected(1).expect("noted");
        notes.rejected(3).expect("noted");
        notes.committed(2, 5).expect("noted");
        notes.durable(1).expect("known already");
        notes.resumed(3).expect("noted");
        notes.sent(&[4]).expect("noted");
        let expected = StreamHistory {
            stream: "s#1".into(),
            sent: vec![7, u64::MAX, 9, 4],
            durable_next: 2,
            committed: vec![Promise { next: 2, version: 5 }],
            rejected: [1].into(),
        };
        assert_eq!(*notes, expected);
        // The rig is killed within a line.
        notes.file.write_all(b"durable 4").expect("written");
        drop(Notebook::begin(&dir.path().join("table/2.notes")).expect("one that never had a stream"));
        let read = || History::read(&dir.path().join("table"));
        assert_eq!(read().expect("notes").streams, [expected]);
        assert!(Notebook::begin(&path).is_err(), "notes are never begun anew");
        notes.file.write_all(b"\nx 1\n").expect("written");
        let error = format!("{:#}", read().expect_err("no event"));
        assert!(error.contains("line 9: no event"), "{error}");
    }
}
