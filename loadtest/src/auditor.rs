//! The judge: does a table hold what its producers were promised, in each of its versions?
//!
//! Of each stream, each version must hold exactly a prefix of what was sent, less the records that were refused by
//! name: each once, unaltered, in order within each file; versions only grow; what was said to be committed in a
//! version is in it; what was said to be durable is in the last one.
//!
//! *Owns*: the verdict. A core: it is given the producers' notes and the rows.
//! *Does not own*: reading tables (`table`), taking notes (`history`).
//! Judges P1, P2, P3, P4 and P8.

use std::collections::{BTreeMap, HashMap};
use std::fmt;

use crate::history::History;
use crate::table::{FileRows, Marks, Row};

/// Of each kind so many faults are kept; all are counted.
const KEPT_PER_KIND: u64 = 10;

/// What a table's version holds that it should not, or lacks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// In which version of the table.
    pub version: u64,
    /// Of which stream.
    pub stream: String,
    /// The offset at which it shows.
    pub offset: u64,
    /// What is wrong.
    pub kind: FaultKind,
}

/// What can be wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FaultKind {
    /// Said to be durable, and not in the last version.
    Lost,
    /// More than once in one version.
    Doubled,
    /// Missing, while a later record of its stream is there.
    Gap,
    /// After a later record of its stream in the same file.
    Disordered,
    /// Another content than was sent at this offset.
    Altered,
    /// No such record was ever sent.
    NeverSent,
    /// Said to be refused, and yet there.
    RefusedButThere,
    /// Said to be in this version, and not there.
    CommittedButAbsent,
    /// In an earlier version, and no more in this one.
    Vanished,
    /// The version's watermark map says otherwise than its rows.
    MapDisagrees,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { version, stream, offset, kind } = self;
        write!(f, "version {version}, stream {stream}, offset {offset}: {}", kind.words())
    }
}

impl FaultKind {
    fn words(self) -> &'static str {
        match self {
            Self::Lost => "lost: it was acknowledged as durable",
            Self::Doubled => "is there more than once",
            Self::Gap => "is missing before a later record, and was not refused",
            Self::Disordered => "stands after a later record in its file",
            Self::Altered => "has another content than was sent",
            Self::NeverSent => "was never sent",
            Self::RefusedButThere => "was answered as rejected and is there",
            Self::CommittedButAbsent => "was answered as committed by this version and is absent",
            Self::Vanished => "was there in an earlier version",
            Self::MapDisagrees => "is where the watermark map and the rows disagree",
        }
    }
}

/// What came out.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Verdict {
    /// Versions judged.
    pub versions: u64,
    /// Rows in the last of them.
    pub rows: u64,
    /// Some of the faults of each kind.
    pub faults: Vec<Fault>,
    /// How many there are of each kind.
    pub counts: BTreeMap<FaultKind, u64>,
}

impl Verdict {
    /// Whether all promises were kept.
    pub fn is_clean(&self) -> bool {
        self.counts.is_empty()
    }

    fn add(&mut self, fault: Fault) {
        let count = self.counts.entry(fault.kind).or_default();
        *count += 1;
        if *count <= KEPT_PER_KIND {
            self.faults.push(fault);
        }
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} versions judged, {} rows in the last: ", self.versions, self.rows)?;
        if self.is_clean() {
            return write!(f, "all promises kept");
        }
        for (kind, count) in &self.counts {
            write!(f, "\n  {count} × {kind:?}")?;
        }
        self.faults.iter().try_for_each(|fault| write!(f, "\n  {fault}"))
    }
}

/// Judges a table's versions, one after the other, from the first.
pub struct Auditor<'h> {
    history: &'h History,
    places: HashMap<&'h str, usize>,
    /// Of each stream: one more than the highest offset in the version before.
    held_next: Vec<u64>,
    last: Tally,
    last_version: u64,
    verdict: Verdict,
}

/// Of each stream, how often each of its records is in a version.
#[derive(Default)]
struct Tally {
    times: Vec<Vec<u8>>,
}

impl<'h> Auditor<'h> {
    /// A judge of what these notes are about.
    pub fn new(history: &'h History) -> Self {
        let places = history.streams.iter().enumerate();
        Self {
            history,
            places: places.map(|(place, stream)| (stream.stream.as_str(), place)).collect(),
            held_next: vec![0; history.streams.len()],
            last: Tally::default(),
            last_version: 0,
            verdict: Verdict::default(),
        }
    }

    /// Judges one version by its files, and by its watermark map where it has one.
    pub fn version<'f>(
        &mut self,
        version: u64,
        files: impl IntoIterator<Item = &'f FileRows>,
        marks: Option<&Marks>,
    ) {
        let mut tally =
            Tally { times: self.history.streams.iter().map(|stream| vec![0; stream.sent.len()]).collect() };
        self.verdict.versions += 1;
        self.verdict.rows = 0;
        for file in files {
            self.file(version, file, &mut tally);
        }
        for place in 0..self.history.streams.len() {
            self.stream(version, place, &tally.times[place]);
            if let Some(marks) = marks {
                self.mark(version, place, marks, &tally.times[place]);
            }
        }
        (self.last, self.last_version) = (tally, version);
    }

    /// Judges what must be true at the end, and answers all.
    pub fn finish(mut self) -> Verdict {
        let history = self.history;
        for (place, stream) in history.streams.iter().enumerate() {
            let times = self.last.times.get(place).map_or(&[][..], Vec::as_slice);
            let absent =
                absent_before(times, stream.durable_next, &|offset| stream.rejected.contains(&offset));
            for offset in absent {
                self.add(self.last_version, place, offset, FaultKind::Lost);
            }
            // Of a version that does not exist nothing can be read.
            let unseen = stream.committed.iter().find(|promise| promise.version > self.last_version);
            if let Some(promise) = unseen {
                self.add(promise.version, place, promise.next - 1, FaultKind::CommittedButAbsent);
            }
        }
        self.verdict
    }

    fn file(&mut self, version: u64, file: &FileRows, tally: &mut Tally) {
        let mut latest: HashMap<usize, u64> = HashMap::new();
        for run in &file.runs {
            self.verdict.rows += run.rows.len() as u64;
            let Some(&place) = self.places.get(run.stream.as_str()) else {
                let offset = run.rows.first().map_or(0, |row| row.offset);
                let stream = run.stream.clone();
                self.verdict.add(Fault { version, stream, offset, kind: FaultKind::NeverSent });
                continue;
            };
            for row in &run.rows {
                if latest.insert(place, row.offset).is_some_and(|latest| latest > row.offset) {
                    self.add(version, place, row.offset, FaultKind::Disordered);
                }
                self.row(version, place, *row, &mut tally.times[place]);
            }
        }
    }

    fn row(&mut self, version: u64, place: usize, row: Row, times: &mut [u8]) {
        let stream = &self.history.streams[place];
        let index = usize::try_from(row.offset).unwrap_or(usize::MAX);
        let Some(sent) = stream.sent.get(index) else {
            return self.add(version, place, row.offset, FaultKind::NeverSent);
        };
        let refused = !stream.rejected.is_empty() && stream.rejected.contains(&row.offset);
        if *sent != row.hash {
            self.add(version, place, row.offset, FaultKind::Altered);
        }
        if refused {
            self.add(version, place, row.offset, FaultKind::RefusedButThere);
        }
        times[index] = times[index].saturating_add(1);
        if times[index] == 2 {
            self.add(version, place, row.offset, FaultKind::Doubled);
        }
    }

    fn stream(&mut self, version: u64, place: usize, times: &[u8]) {
        let stream = &self.history.streams[place];
        let refused = |offset: u64| stream.rejected.contains(&offset);
        let next = times.iter().rposition(|times| *times > 0).map_or(0, |last| last as u64 + 1);
        for offset in absent_before(times, next, &refused) {
            self.add(version, place, offset, FaultKind::Gap);
        }
        if next < self.held_next[place] {
            self.add(version, place, next, FaultKind::Vanished);
        }
        self.held_next[place] = next;
        // Promises rise: the last that this version has to keep covers those before it.
        let due = stream.committed.iter().filter(|promise| promise.version <= version).map(|p| p.next).max();
        for offset in absent_before(times, due.unwrap_or(0), &refused) {
            self.add(version, place, offset, FaultKind::CommittedButAbsent);
        }
    }

    /// The map may be ahead of the rows by refused records alone.
    fn mark(&mut self, version: u64, place: usize, marks: &Marks, times: &[u8]) {
        let stream = &self.history.streams[place];
        let next = self.held_next[place];
        match marks.get(&stream.stream) {
            // An ephemeral stream that has ended leaves the map some time.
            None if next == 0 || stream.stream.starts_with('~') => {}
            None => self.add(version, place, next, FaultKind::MapDisagrees),
            Some(mark) if *mark < next => self.add(version, place, *mark, FaultKind::MapDisagrees),
            Some(mark) => {
                let refused = |offset: u64| stream.rejected.contains(&offset);
                let absent = absent_before(times, *mark, &refused);
                if let Some(offset) = absent.into_iter().find(|offset| *offset >= next) {
                    self.add(version, place, offset, FaultKind::MapDisagrees);
                }
            }
        }
    }

    fn add(&mut self, version: u64, place: usize, offset: u64, kind: FaultKind) {
        let stream = self.history.streams[place].stream.clone();
        self.verdict.add(Fault { version, stream, offset, kind });
    }
}

/// The offsets before `next` that are not there and were not refused.
fn absent_before(times: &[u8], next: u64, refused: &dyn Fn(u64) -> bool) -> Vec<u64> {
    let there = |offset: u64| {
        usize::try_from(offset).ok().and_then(|offset| times.get(offset)).is_some_and(|times| *times > 0)
    };
    (0..next).filter(|offset| !there(*offset) && !refused(*offset)).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use proptest::sample::Index;

    use super::*;
    use crate::history::StreamHistory;
    use crate::table::RowRun;

    /// A history and versions that keep every promise. Each version is its list of files.
    #[derive(Debug, Clone)]
    struct Kept {
        history: History,
        versions: Vec<Vec<FileRows>>,
        marks: Vec<Marks>,
    }

    /// Streams of some records, some refused; versions that move each stream on by some steps.
    fn kept() -> impl Strategy<Value = Kept> {
        let stream = (1..40usize, proptest::collection::btree_set(0..40u64, 0..5));
        let steps = proptest::collection::vec(proptest::collection::vec(0..12u64, 3), 1..6);
        (proptest::collection::vec(stream, 1..4), steps).prop_map(|(streams, steps)| build(&streams, &steps))
    }

    fn build(streams: &[(usize, std::collections::BTreeSet<u64>)], steps: &[Vec<u64>]) -> Kept {
        let mut history = History::default();
        for (number, (records, rejected)) in streams.iter().enumerate() {
            history.streams.push(StreamHistory {
                stream: format!("s{number}#1"),
                sent: (0..*records as u64).map(|offset| number as u64 * 1000 + offset).collect(),
                rejected: rejected.iter().copied().filter(|offset| *offset < *records as u64).collect(),
                ..StreamHistory::default()
            });
        }
        let (mut versions, mut marks) = (vec![Vec::new()], vec![Marks::new()]);
        for (number, step) in steps.iter().enumerate() {
            let mut file = FileRows { path: format!("{number}"), runs: Vec::new() };
            for (stream, step) in history.streams.iter_mut().zip(step) {
                let from = stream.durable_next;
                let to = (from + step).min(stream.sent.len() as u64);
                let offsets = (from..to).filter(|offset| !stream.rejected.contains(offset));
                let rows = offsets.map(|offset| Row { offset, hash: stream.sent[offset as usize] });
                file.runs.push(RowRun { stream: stream.stream.clone(), rows: rows.collect() });
                stream.committed(to, number as u64 + 1);
            }
            let mark = |stream: &StreamHistory| (stream.stream.clone(), stream.durable_next);
            marks.push(history.streams.iter().map(mark).collect());
            let mut files: Vec<FileRows> = versions.last().expect("the empty one").clone();
            files.push(file);
            versions.push(files);
        }
        Kept { history, versions, marks }
    }

    fn judge(kept: &Kept) -> Verdict {
        let mut auditor = Auditor::new(&kept.history);
        for (version, files) in kept.versions.iter().enumerate() {
            auditor.version(version as u64, files, kept.marks.get(version));
        }
        auditor.finish()
    }

    /// Changes a run with at least `rows` rows in the last version; false where there is none.
    fn change(kept: &mut Kept, at: Index, rows: usize, change: impl FnOnce(&mut Vec<Row>)) -> bool {
        let files = kept.versions.last_mut().expect("a version").iter_mut();
        let mut runs: Vec<_> =
            files.flat_map(|file| &mut file.runs).filter(|run| run.rows.len() >= rows).collect();
        if runs.is_empty() {
            return false;
        }
        let place = at.index(runs.len());
        change(&mut runs[place].rows);
        true
    }

    fn found(kept: &Kept, kind: FaultKind) -> bool {
        judge(kept).counts.contains_key(&kind)
    }

    proptest! {
        #[test]
        fn kept_promises_are_found_kept(kept in kept()) {
            let verdict = judge(&kept);
            prop_assert!(verdict.is_clean(), "{}", verdict);
        }

        #[test]
        fn a_lost_record_is_found(mut kept in kept(), at: Index) {
            let changed = change(&mut kept, at, 1, |rows| { rows.pop(); });
            prop_assume!(changed);
            prop_assert!(found(&kept, FaultKind::Lost));
            prop_assert!(found(&kept, FaultKind::CommittedButAbsent));
        }

        #[test]
        fn a_doubled_record_is_found(mut kept in kept(), at: Index) {
            let changed = change(&mut kept, at, 1, |rows| rows.push(rows[rows.len() - 1]));
            prop_assume!(changed);
            prop_assert!(found(&kept, FaultKind::Doubled));
        }

        #[test]
        fn a_record_that_is_skipped_is_found(mut kept in kept(), at: Index) {
            let changed = change(&mut kept, at, 2, |rows| { rows.remove(0); });
            prop_assume!(changed);
            prop_assert!(found(&kept, FaultKind::Gap));
        }

        #[test]
        fn records_out_of_order_are_found(mut kept in kept(), at: Index) {
            let changed = change(&mut kept, at, 2, |rows| rows.swap(0, 1));
            prop_assume!(changed);
            prop_assert!(found(&kept, FaultKind::Disordered));
        }

        #[test]
        fn an_altered_record_is_found(mut kept in kept(), at: Index, flip in 0..64u32) {
            let changed = change(&mut kept, at, 1, |rows| rows[0].hash ^= 1 << flip);
            prop_assume!(changed);
            prop_assert!(found(&kept, FaultKind::Altered));
        }

        #[test]
        fn a_record_that_nobody_sent_is_found(mut kept in kept(), at: Index, beyond in 1000..2000u64) {
            let mut other = kept.clone();
            let changed = change(&mut kept, at, 1, |rows| rows.push(Row { offset: beyond, hash: 0 }));
            prop_assume!(changed);
            prop_assert!(found(&kept, FaultKind::NeverSent));
            let run = RowRun { stream: "x#1".to_owned(), rows: vec![Row { offset: 0, hash: 0 }] };
            let last = other.versions.last_mut().expect("a version");
            last.push(FileRows { path: "x".to_owned(), runs: vec![run] });
            prop_assert!(found(&other, FaultKind::NeverSent));
        }

        #[test]
        fn a_refused_record_that_is_there_is_found(mut kept in kept(), at: Index) {
            let mut offset = None;
            change(&mut kept, at, 1, |rows| offset = Some(rows[0].offset));
            let Some(offset) = offset else { return Ok(()) };
            for stream in &mut kept.history.streams {
                stream.rejected.insert(offset);
            }
            prop_assert!(found(&kept, FaultKind::RefusedButThere));
        }

        #[test]
        fn an_unannounced_refusal_is_a_gap(mut kept in kept()) {
            let hidden = kept.history.streams.iter_mut().find_map(|stream| {
                let refused = *stream.rejected.first()?;
                // Only where a later record shows that the prefix went past it.
                let is_passed = (refused + 1..stream.durable_next).any(|n| !stream.rejected.contains(&n));
                is_passed.then(|| stream.rejected.remove(&refused))
            });
            prop_assume!(hidden.is_some());
            prop_assert!(found(&kept, FaultKind::Gap));
        }

        #[test]
        fn a_commit_that_comes_after_its_promise_is_found(mut kept in kept(), place: Index) {
            let place = place.index(kept.history.streams.len());
            let stream = &mut kept.history.streams[place];
            let holds = |version: usize| kept.versions[version].iter()
                .flat_map(|file| &file.runs).filter(|run| run.stream == stream.stream)
                .map(|run| run.rows.len()).sum::<usize>();
            let promised = (1..kept.versions.len()).find(|v| holds(*v) > holds(*v - 1));
            let Some(promised) = promised else { return Ok(()) };
            for promise in stream.committed.iter_mut().filter(|p| p.version == promised as u64) {
                promise.version -= 1;
            }
            prop_assert!(found(&kept, FaultKind::CommittedButAbsent));
        }

        #[test]
        fn a_version_that_forgets_is_found(mut kept in kept()) {
            let had_rows = kept.versions.last().expect("one").iter().flat_map(|f| &f.runs).any(|r| !r.rows.is_empty());
            prop_assume!(had_rows);
            kept.versions.push(Vec::new());
            prop_assert!(found(&kept, FaultKind::Vanished));
        }

        #[test]
        fn a_map_that_lags_or_leads_is_found(mut kept in kept(), place: Index, leads: bool) {
            let place = place.index(kept.history.streams.len());
            let stream = &kept.history.streams[place];
            let (next, sent) = (stream.durable_next, stream.sent.len() as u64);
            let is_there = |offset: &u64| !stream.rejected.contains(offset);
            let wrong = if leads { (next..sent).find(is_there).map(|offset| offset + 1) } else {
                (0..next).rev().find(is_there)
            };
            let Some(wrong) = wrong else { return Ok(()) };
            kept.marks.last_mut().expect("a version").insert(stream.stream.clone(), wrong);
            prop_assert!(found(&kept, FaultKind::MapDisagrees));
        }

        #[test]
        fn a_promised_version_that_does_not_exist_is_found(mut kept in kept()) {
            let beyond = kept.versions.len() as u64 + 3;
            kept.history.streams[0].committed(1, beyond);
            prop_assert!(found(&kept, FaultKind::CommittedButAbsent));
        }
    }
}
