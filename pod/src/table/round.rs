//! A round of a flush: every run at hand, judged against one version, and what follows from that.
//!
//! *Owns*: what is at hand of a batch, which rows are set aside, which go into which file, which files stand, which
//! entries are done with.
//! *Does not own*: the rule (`watermark`), the flush's order and all that waits (`task`), files' bytes (`parquet`).

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use arrow::array::RecordBatch;
use object_store::path::Path;
use sluice_shared::ids::{OffsetRange, StreamId};
use tokio::time::Instant;

use super::batch::{Batch, Run};
use super::delta::{DataFile, Shape};
use super::open::Permit;
use super::parquet::{Piece, Source, has_unplaced, misfits, unplaced};
use super::rejected::{Cause, Rejects};
use super::watermark::{RunKey, Verdict, WatermarkMap, judge_all};
use crate::wal::Durable;

/// Older files are written anew: a sweep takes files for orphans that no version names for days.
pub(super) const FILE_AGE_MAX: Duration = Duration::from_secs(24 * 60 * 60);

/// A durable batch that is not committed yet.
pub(super) struct Entry {
    pub(super) durable: Durable,
    /// Not there where the budget was used up, or while its runs are held: the log has it.
    pub(super) rows: Option<(Arc<Batch>, Permit)>,
    /// Bytes of its rows in memory, as far as known; else of its entry in the log.
    pub(super) bytes: u64,
    /// When it was sealed; when it was offered where that is not known.
    pub(super) sealed_us: i64,
    /// Its runs that are not settled, with their index in the batch. Not there until the rows were looked at.
    pub(super) open: Option<Vec<(usize, RunKey)>>,
}

impl Entry {
    pub(super) fn runs(batch: &Batch) -> Vec<(usize, RunKey)> {
        batch.runs.iter().map(run_key).enumerate().collect()
    }
}

fn run_key(run: &Run) -> RunKey {
    let (start, end) = (run.offsets.start, run.offsets.end);
    RunKey { stream: run.stream.clone(), session: run.session, start, end, boundary: run.boundary() }
}

/// A run at hand and its verdict.
pub(super) struct JudgedRun {
    pub(super) entry: usize,
    /// Index in the batch.
    run: usize,
    pub(super) key: RunKey,
    verdict: Verdict,
    /// What of it is set aside, and why.
    pub(super) aside: Vec<(OffsetRange, Cause)>,
    /// Its rows do not fit the table any more: the mark passes, the rows are set aside.
    misfit: bool,
}

impl JudgedRun {
    fn needs_rows(&self) -> bool {
        !matches!(self.verdict, Verdict::Held | Verdict::Duplicate)
    }
}

/// All runs at hand, judged against one version.
pub(super) struct Round {
    pub(super) runs: Vec<JudgedRun>,
}

impl Round {
    /// Takes in entries of about `bytes_max`, and one at least: what is left over is held, for another round. A handoff that has
    /// come to its end can make all that a log holds eligible at once.
    pub(super) fn judge(map: &WatermarkMap, at_hand: &[Entry], bytes_max: u64) -> Self {
        let all = Self::judge_some(map, at_hand, |_| true);
        let mut wanted: Vec<usize> = all.eligible().map(|run| run.entry).collect();
        wanted.dedup();
        let mut bytes = 0;
        wanted.retain(|entry| {
            let is_first = bytes == 0;
            bytes += at_hand[*entry].bytes;
            is_first || bytes <= bytes_max
        });
        if bytes <= bytes_max {
            return all;
        }
        let wanted: HashSet<usize> = wanted.into_iter().collect();
        let some = Self::judge_some(map, at_hand, |entry| wanted.contains(&entry));
        // After crashes what comes first can be in a later entry.
        let has_eligible = some.eligible().next().is_some();
        if has_eligible { some } else { all }
    }

    fn judge_some(map: &WatermarkMap, at_hand: &[Entry], is_wanted: impl Fn(usize) -> bool) -> Self {
        let open = at_hand.iter().enumerate().flat_map(|(entry, at_hand)| {
            at_hand.open.iter().flatten().map(move |(run, key)| (entry, *run, key.clone()))
        });
        let open: Vec<_> = open.collect();
        let keys = open.iter().filter(|(entry, ..)| is_wanted(*entry)).map(|(.., key)| key.clone());
        let (verdicts, _) = judge_all(map, &keys.collect::<Vec<RunKey>>());
        let mut verdicts = verdicts.into_iter();
        let runs = open.into_iter().map(|(entry, run, key)| {
            let verdict = if is_wanted(entry) { verdicts.next() } else { None };
            let verdict = verdict.unwrap_or(Verdict::Held);
            let aside = match &verdict {
                Verdict::Fenced { aside, .. } => aside.iter().map(|part| (*part, Cause::Fenced)).collect(),
                _ => Vec::new(),
            };
            JudgedRun { entry, run, key, verdict, aside, misfit: false }
        });
        Self { runs: runs.collect() }
    }

    /// The runs whose rows are wanted.
    pub(super) fn eligible(&self) -> impl Iterator<Item = &JudgedRun> {
        self.runs.iter().filter(|run| run.needs_rows())
    }

    /// What must be set aside before anything is committed, less what is in `done`: the records, and what they are.
    pub(super) fn rejects(
        &mut self,
        shape: &Shape,
        at_hand: &[Entry],
        done: &SetAside,
    ) -> Result<(Rejects, SetAside), arrow::error::ArrowError> {
        let (mut rejects, mut news) = (Rejects::default(), SetAside::new());
        let mut checked: HashMap<usize, (Vec<usize>, bool)> = HashMap::new();
        for run in self.runs.iter_mut().filter(|run| run.needs_rows()) {
            let (batch, _) = at_hand[run.entry].rows.as_ref().expect("loaded");
            let (misfits, has_unplaced) = checked.entry(run.entry).or_insert_with(|| {
                let misfits = misfits(shape, batch).into_iter().map(|(run, _)| run);
                (misfits.collect(), has_unplaced(shape, batch))
            });
            if let Some(from) = run.verdict.commit_from(&run.key) {
                run.misfit = misfits.contains(&run.run);
                if run.misfit {
                    run.aside.push((OffsetRange { start: from, end: run.key.end }, Cause::SchemaChanged));
                } else if *has_unplaced {
                    let unplaced = unplaced(shape, batch, run.run, from).into_iter();
                    run.aside.extend(unplaced.map(|offsets| (offsets, Cause::BadPartitionValue)));
                }
            }
            let from = run.verdict.commit_from(&run.key).unwrap_or(u64::MAX);
            let is_settled =
                |offset| offset >= from || run.aside.iter().any(|(aside, _)| aside.contains(offset));
            let run_of = &batch.runs[run.run];
            for refusal in run_of.refused.iter().filter(|refusal| is_settled(refusal.offset)) {
                let offsets = OffsetRange { start: refusal.offset, end: refusal.offset + 1 };
                let part = (run.entry, run.run, offsets);
                if let Some(raw) = &refusal.raw
                    && !done.contains(&part)
                    && news.insert(part)
                {
                    rejects.quarantine(run_of, refusal, raw);
                }
            }
            for (offsets, cause) in &run.aside {
                let part = (run.entry, run.run, *offsets);
                if !done.contains(&part) && news.insert(part) {
                    rejects.add(batch, run.run, *offsets, *cause)?;
                }
            }
        }
        Ok((rejects, news))
    }

    /// What goes into files: each stream's in its order, and as it came where that is so. Runs without rows need none.
    pub(super) fn pieces(&self) -> Vec<EntryPiece> {
        let eligible = self.runs.iter().filter(|run| !run.misfit);
        let pieces = eligible.filter_map(|run| {
            let from = run.verdict.commit_from(&run.key)?;
            Some((&run.key.stream, EntryPiece { entry: run.entry, piece: Piece { run: run.run, from } }))
        });
        let mut pieces: Vec<_> = pieces.collect();
        let mut reached: HashMap<&StreamId, u64> = HashMap::new();
        let in_order = pieces.iter().all(|(stream, entry)| {
            let from = entry.piece.from;
            reached.insert(stream, from).is_none_or(|before| before < from)
        });
        if !in_order {
            // After crashes the log can have a stream's records twice, cut differently, and the earlier ones later.
            pieces.sort_by_key(|(stream, entry)| (*stream, entry.piece.from));
        }
        pieces.into_iter().map(|(_, piece)| piece).collect()
    }

    pub(super) fn judged(&self) -> Vec<(RunKey, Verdict)> {
        let judged = self.runs.iter().filter(|run| run.verdict != Verdict::Held);
        judged.map(|run| (run.key.clone(), run.verdict.clone())).collect()
    }

    /// Releases the entries that are done with, and lets go of the rows of those that are held.
    pub(super) fn settle(&self, at_hand: &mut Vec<Entry>) {
        let mut held: Vec<Vec<bool>> = at_hand.iter().map(|_| Vec::new()).collect();
        for run in &self.runs {
            held[run.entry].push(run.verdict == Verdict::Held);
        }
        let entries = std::mem::take(at_hand);
        for (mut entry, held) in entries.into_iter().zip(held) {
            let mut held = held.into_iter();
            let open = entry.open.get_or_insert_default();
            open.retain(|_| held.next().unwrap_or(false));
            if open.is_empty() {
                entry.durable.release();
            } else {
                entry.rows = None;
                at_hand.push(entry);
            }
        }
    }
}

/// A piece of a batch at hand.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct EntryPiece {
    entry: usize,
    piece: Piece,
}

/// Pieces by file, in the order in which they came, each of about the target size.
pub(super) fn groups(at_hand: &[Entry], pieces: Vec<EntryPiece>, target: u64) -> Vec<Vec<EntryPiece>> {
    let mut groups: Vec<Vec<EntryPiece>> = Vec::new();
    let (mut bytes, mut last) = (0, None);
    for piece in pieces {
        if last != Some(piece.entry) {
            if bytes >= target || groups.is_empty() {
                groups.push(Vec::new());
                bytes = 0;
            }
            bytes += at_hand[piece.entry].bytes;
            last = Some(piece.entry);
        }
        groups.last_mut().expect("one was pushed").push(piece);
    }
    groups
}

/// Of the batches of a group: each counts once, in however many pieces it is.
pub(super) fn rows_bytes(at_hand: &[Entry], group: &[EntryPiece]) -> u64 {
    let entries: HashSet<usize> = group.iter().map(|piece| piece.entry).collect();
    entries.into_iter().map(|entry| at_hand[entry].bytes).sum()
}

pub(super) fn sources(at_hand: &[Entry], group: &[EntryPiece]) -> Vec<Source> {
    let mut sources: Vec<Source> = Vec::new();
    for pieces in group.chunk_by(|a, b| a.entry == b.entry && a.piece.run < b.piece.run) {
        let (batch, _) = at_hand[pieces[0].entry].rows.as_ref().expect("loaded");
        let pieces = pieces.iter().map(|piece| piece.piece).collect();
        sources.push(Source { batch: Arc::clone(batch), pieces });
    }
    sources
}

/// What a flush has done so far. It outlives failed attempts: each of them writing anew would fill the disk.
#[derive(Default)]
pub(super) struct Progress {
    pub(super) written: Written,
    pub(super) aside: SetAside,
}

/// What has been set aside: entry, run, offsets.
pub(super) type SetAside = HashSet<(usize, usize, OffsetRange)>;

/// Files of this flush that stand so far, with what is in them.
#[derive(Default)]
pub(super) struct Written {
    shape: Option<Arc<Shape>>,
    groups: Vec<WrittenGroup>,
}

struct WrittenGroup {
    pieces: Vec<EntryPiece>,
    files: Vec<DataFile>,
    at: Instant,
    /// A commit may have named the files, whatever it answered.
    offered: bool,
}

impl Written {
    /// Gives up files with other pieces than these, and old ones; answers which pieces the others have, and the files
    /// that may be deleted. Those that a commit may have named are left to the sweep (DESIGN section 11 rule 4).
    pub(super) fn keep(
        &mut self,
        shape: &Arc<Shape>,
        pieces: &[EntryPiece],
        now: Instant,
    ) -> (HashSet<EntryPiece>, Vec<Path>) {
        let same_shape = self.shape.as_ref().is_some_and(|last| last.is_same(shape));
        self.shape = Some(Arc::clone(shape));
        let eligible: HashSet<&EntryPiece> = pieces.iter().collect();
        let stands = |group: &WrittenGroup| {
            same_shape
                && now.duration_since(group.at) < FILE_AGE_MAX
                && group.pieces.iter().all(|piece| eligible.contains(piece))
        };
        let (kept, given_up): (Vec<_>, Vec<_>) = self.groups.drain(..).partition(stands);
        self.groups = kept;
        let unnamed = given_up.into_iter().filter(|group| !group.offered).flat_map(|group| group.files);
        let standing = self.groups.iter().flat_map(|group| group.pieces.iter().copied()).collect();
        (standing, unnamed.map(|file| file.path).collect())
    }

    pub(super) fn add(&mut self, pieces: Vec<EntryPiece>, files: Vec<DataFile>, at: Instant) {
        self.groups.push(WrittenGroup { pieces, files, at, offered: false });
    }

    /// What is said of all files, for a commit that names them.
    pub(super) fn offer(&mut self) -> Vec<RecordBatch> {
        self.groups.iter_mut().for_each(|group| group.offered = true);
        self.groups.iter().flat_map(|group| group.files.iter().map(|file| file.add.clone())).collect()
    }

    /// Gives up all files. They have been offered, so that none is deleted.
    pub(super) fn give_up(&mut self) {
        self.groups.clear();
    }
}
