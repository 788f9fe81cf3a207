//! ◆ The prefix rule: which runs may enter a table, given how far each of its streams has come.
//!
//! A stream's mark says how far it is in the table, and which session brought it there, from where. The rule
//! judges one run at a time against a working copy, so that two runs of one round cannot both pass with the
//! same records. A mark remembers the latest takeovers of its stream: a replay is known as one only where the
//! records at those offsets came from the same session; all others are set aside, never dropped.
//!
//! *Owns*: marks, the verdict, the map's form as Arrow IPC.
//! *Does not own*: when a map is read or written, and that it changes atomically with the records (`home`).
//! Keeps P2.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, RecordBatch, StringArray, UInt64Array};
use arrow::datatypes::{DataType, Field, Schema, UInt64Type};
use arrow::error::ArrowError;
use arrow::ipc::writer::StreamWriter;
use bytes::Bytes;
use sluice_shared::fault::{self, Bug};
use sluice_shared::ids::{LogId, OffsetRange, SessionId, StreamId, TableId};
use sluice_shared::requests::Boundary;
use uuid::Uuid;

use crate::decode::ipc;

/// How many takeovers of a stream a mark remembers. Of older sessions it cannot tell a replay from a rival.
pub const TAKEOVERS_MAX: usize = 16;
/// The map's form, raised when its meaning changes: an older program must not pass over what it does not know.
const FORMAT: &str = "1";
/// The form that has boundaries too, used where there are any.
const FORMAT_WITH_BOUNDARIES: &str = "2";

/// How far a stream is in the table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mark {
    /// The session that brought it there.
    pub session: SessionId,
    /// First offset of that session.
    pub start: u64,
    /// One more than the last offset.
    pub next: u64,
    /// Offsets of the sessions before, rising and without gaps, ending at `start`.
    pub before: Vec<(SessionId, OffsetRange)>,
    /// Of a stream that counts its requests: where the last one that is in the table ends.
    pub boundary: Option<Boundary>,
}

impl Mark {
    /// A stream of which `session` has brought nothing yet.
    pub fn new(session: SessionId) -> Self {
        Self { session, start: 0, next: 0, before: Vec::new(), boundary: None }
    }

    /// The offsets that came from `session`, as far as they are remembered.
    fn of(&self, session: SessionId) -> OffsetRange {
        if session == self.session {
            return OffsetRange { start: self.start, end: self.next };
        }
        let found = self.before.iter().find(|(earlier, _)| *earlier == session);
        found.map_or(OffsetRange { start: 0, end: 0 }, |(_, offsets)| *offsets)
    }

    fn advance(&mut self, run: &RunKey) {
        let session = run.session;
        if session != self.session {
            if self.before.len() == TAKEOVERS_MAX {
                self.before.remove(0);
            }
            self.before.push((self.session, OffsetRange { start: self.start, end: self.next }));
            (self.session, self.start) = (session, self.next);
        }
        self.next = run.end;
        self.boundary = run.boundary.or(self.boundary);
    }
}

/// A run as the rule sees it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RunKey {
    /// The stream.
    pub stream: StreamId,
    /// Whose records.
    pub session: SessionId,
    /// First offset.
    pub start: u64,
    /// One more than the last offset.
    pub end: u64,
    /// Of a stream that counts its requests: where the last one that ends before `end` does.
    pub boundary: Option<Boundary>,
}

/// What is to become of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// All of it continues the stream.
    Commit,
    /// All of it is in the table already.
    Duplicate,
    /// What is before `from` is in the table already; the rest continues the stream.
    Partial {
        /// First offset to commit.
        from: u64,
    },
    /// Records before it are missing: it waits for them.
    Held,
    /// Some of it meets records of another session, or comes after a newer one has taken over.
    Fenced {
        /// What to set aside, rising.
        aside: Vec<OffsetRange>,
        /// First offset to commit, where the run's end continues the stream.
        commit_from: Option<u64>,
    },
}

impl Verdict {
    /// First offset to commit, where there is any.
    pub fn commit_from(&self, run: &RunKey) -> Option<u64> {
        match self {
            Self::Commit => Some(run.start),
            Self::Partial { from } => Some(*from),
            Self::Fenced { commit_from, .. } => *commit_from,
            Self::Duplicate | Self::Held => None,
        }
    }
}

/// All streams of a table, as one version of it has them.
#[derive(Debug, Clone, PartialEq)]
pub struct WatermarkMap {
    /// The table.
    pub table: TableId,
    /// The map's number; 0 for the empty map of a table that never had one.
    pub number: u64,
    /// Number of the map that this one was made from.
    pub predecessor: u64,
    /// Made anew for each attempt to claim a number: tells a lost reply from a rival.
    pub nonce: Uuid,
    /// All logs that have ever been registered with the table.
    pub logs: BTreeSet<LogId>,
    marks: HashMap<StreamId, Mark>,
}

/// A working copy: a map, and what has changed on top of it.
#[derive(Debug)]
pub struct Working<'a> {
    map: &'a WatermarkMap,
    changed: HashMap<StreamId, Mark>,
}

/// Judges a run by the mark of its stream.
pub fn judge(mark: Option<&Mark>, run: &RunKey) -> Verdict {
    if run.end <= run.start {
        return Verdict::Duplicate;
    }
    let held = if fault::has(Bug::HeldIgnored) { Verdict::Commit } else { Verdict::Held };
    let Some(mark) = mark else {
        return if run.start == 0 { Verdict::Commit } else { held };
    };
    let is_older = run.session < mark.session;
    if run.start >= mark.next {
        return match (is_older, run.start == mark.next) {
            (true, _) => fenced(vec![OffsetRange { start: run.start, end: run.end }], None),
            (false, true) => Verdict::Commit,
            (false, false) => held,
        };
    }
    let own = mark.of(run.session);
    // A newer session goes on at the mark; what an older one has beyond its own offsets comes too late.
    let judged_end = if is_older { run.end } else { run.end.min(mark.next) };
    let commit_from = (judged_end < run.end).then_some(mark.next);
    let before = OffsetRange { start: run.start, end: own.start.min(judged_end) };
    let after = OffsetRange { start: own.end.max(run.start), end: judged_end };
    let aside: Vec<_> = if own.is_empty() || own.end <= run.start || own.start >= judged_end {
        vec![OffsetRange { start: run.start, end: judged_end }]
    } else {
        [before, after].into_iter().filter(|offsets| !offsets.is_empty()).collect()
    };
    match (aside.is_empty(), commit_from) {
        (true, None) => Verdict::Duplicate,
        (true, Some(from)) => Verdict::Partial { from },
        (false, commit_from) => fenced(aside, commit_from),
    }
}

fn fenced(aside: Vec<OffsetRange>, commit_from: Option<u64>) -> Verdict {
    Verdict::Fenced { aside, commit_from }
}

impl<'a> Working<'a> {
    /// Nothing changed yet.
    pub fn new(map: &'a WatermarkMap) -> Self {
        Self { map, changed: HashMap::new() }
    }

    /// Judges a run and takes what of it may be committed. Runs must come in their order (`RunKey: Ord`).
    pub fn take(&mut self, run: &RunKey) -> Verdict {
        let mark = self.changed.get(&run.stream).or_else(|| self.map.marks.get(&run.stream));
        let verdict = judge(mark, run);
        if verdict.commit_from(run).is_some() {
            let mut mark = mark.cloned().unwrap_or_else(|| Mark::new(run.session));
            mark.advance(run);
            self.changed.insert(run.stream.clone(), mark);
        }
        verdict
    }

    /// Takes runs that were judged elsewhere, where each gets the same verdict here; else none of them.
    pub fn take_all(&mut self, judged: &[(RunKey, Verdict)]) -> bool {
        let mut order: Vec<&(RunKey, Verdict)> = judged.iter().collect();
        order.sort_by(|a, b| a.0.cmp(&b.0));
        let mut before: Vec<(&StreamId, Option<Mark>)> = Vec::new();
        for (run, verdict) in order {
            if before.last().is_none_or(|(stream, _)| **stream != run.stream) {
                before.push((&run.stream, self.changed.get(&run.stream).cloned()));
            }
            if self.take(run) == *verdict {
                continue;
            }
            for (stream, mark) in before {
                match mark {
                    Some(mark) => drop(self.changed.insert(stream.clone(), mark)),
                    None => drop(self.changed.remove(stream)),
                }
            }
            return false;
        }
        true
    }

    /// One more than the stream's last offset, with what was taken; 0 if there is none.
    pub fn next(&self, stream: &StreamId) -> u64 {
        self.changed.get(stream).map_or_else(|| self.map.next(stream), |mark| mark.next)
    }

    /// The streams that have come further.
    pub fn into_changes(self) -> HashMap<StreamId, Mark> {
        self.changed
    }
}

/// Judges runs in their order against one working copy; answers in the order in which they were given.
pub fn judge_all(map: &WatermarkMap, runs: &[RunKey]) -> (Vec<Verdict>, HashMap<StreamId, Mark>) {
    let mut order: Vec<usize> = (0..runs.len()).collect();
    order.sort_by(|a, b| runs[*a].cmp(&runs[*b]));
    let mut working = Working::new(map);
    let mut verdicts = vec![Verdict::Held; runs.len()];
    for index in order {
        verdicts[index] = working.take(&runs[index]);
    }
    (verdicts, working.into_changes())
}

/// Why bytes are no map.
#[derive(Debug, thiserror::Error)]
pub enum MapError {
    /// Not what `encode` makes.
    #[error("watermark map: {0}")]
    Garbled(String),
    /// Not Arrow IPC.
    #[error("watermark map")]
    Arrow(#[from] ArrowError),
}

impl WatermarkMap {
    /// The map of a table that has none.
    pub fn empty(table: TableId) -> Self {
        Self {
            table,
            number: 0,
            predecessor: 0,
            nonce: Uuid::nil(),
            logs: BTreeSet::new(),
            marks: HashMap::new(),
        }
    }

    /// The map that follows this one, under a new number.
    pub fn successor(&self, number: u64, nonce: Uuid, changes: HashMap<StreamId, Mark>) -> Self {
        let mut next = Self { number, predecessor: self.number, nonce, ..self.clone() };
        next.marks.extend(changes);
        next
    }

    /// The mark of a stream.
    pub fn mark(&self, stream: &StreamId) -> Option<&Mark> {
        self.marks.get(stream)
    }

    /// One more than the stream's last offset in the table; 0 if there is none.
    pub fn next(&self, stream: &StreamId) -> u64 {
        self.mark(stream).map_or(0, |mark| mark.next)
    }

    /// Takes over what another pod knows of a stream.
    pub fn learn(&mut self, stream: StreamId, mark: Option<Mark>) {
        match mark {
            Some(mark) => drop(self.marks.insert(stream, mark)),
            None => drop(self.marks.remove(&stream)),
        }
    }

    /// Forgets a stream.
    pub fn forget(&mut self, stream: &StreamId) {
        self.marks.remove(stream);
    }

    /// All streams.
    pub fn streams(&self) -> impl ExactSizeIterator<Item = (&StreamId, &Mark)> {
        self.marks.iter()
    }

    /// The map's bytes: an Arrow IPC stream of one row per stream and session, each stream's sessions together
    /// and rising; what concerns the whole is in the schema's metadata.
    ///
    /// # Errors
    /// Where Arrow refuses, which it has no reason to.
    pub fn encode(&self) -> Result<Bytes, ArrowError> {
        let mut streams = Vec::with_capacity(self.marks.len());
        let (mut sessions, mut starts, mut ends) = (Vec::new(), Vec::new(), Vec::new());
        let mut boundaries = Vec::with_capacity(self.marks.len());
        for (stream, mark) in &self.marks {
            let last = (mark.session, OffsetRange { start: mark.start, end: mark.next });
            for (session, offsets) in mark.before.iter().chain([&last]) {
                streams.push(stream.as_str());
                sessions.push(session.0);
                starts.push(offsets.start);
                ends.push(offsets.end);
            }
            boundaries.resize(streams.len() - 1, None);
            boundaries.push(mark.boundary);
        }
        let schema = Arc::new(self.schema());
        let mut columns: Vec<ArrayRef> = vec![
            Arc::new(StringArray::from(streams)),
            Arc::new(UInt64Array::from(sessions)),
            Arc::new(UInt64Array::from(starts)),
            Arc::new(UInt64Array::from(ends)),
        ];
        if self.has_boundaries() {
            let column =
                |of: fn(Boundary) -> u64| boundaries.iter().map(|at| at.map(of)).collect::<UInt64Array>();
            columns.push(Arc::new(column(|boundary| boundary.offset)));
            columns.push(Arc::new(column(|boundary| boundary.requests)));
        }
        let batch = RecordBatch::try_new(Arc::clone(&schema), columns)?;
        let mut bytes = Vec::new();
        let mut writer = StreamWriter::try_new(&mut bytes, &schema)?;
        writer.write(&batch)?;
        writer.finish()?;
        drop(writer);
        Ok(bytes.into())
    }

    fn has_boundaries(&self) -> bool {
        self.marks.values().any(|mark| mark.boundary.is_some())
    }

    fn schema(&self) -> Schema {
        let format = if self.has_boundaries() { FORMAT_WITH_BOUNDARIES } else { FORMAT };
        let logs: Vec<String> = self.logs.iter().map(|log| log.0.to_string()).collect();
        let metadata = HashMap::from([
            ("format".to_owned(), format.to_owned()),
            ("table_id".to_owned(), self.table.0.as_ref().to_owned()),
            ("number".to_owned(), self.number.to_string()),
            ("predecessor".to_owned(), self.predecessor.to_string()),
            ("nonce".to_owned(), self.nonce.to_string()),
            ("logs".to_owned(), logs.join(",")),
        ]);
        Schema::new_with_metadata(columns_of(format), metadata)
    }

    /// Reads a map back.
    ///
    /// # Errors
    /// Where the bytes are none that `encode` makes.
    pub fn decode(bytes: &Bytes) -> Result<Self, MapError> {
        let (schema, batches) = ipc::read_written(bytes)?;
        let mut map = Self::from_metadata(schema.metadata())?;
        let format = schema.metadata().get("format").map_or(FORMAT, String::as_str);
        if schema.fields() != &columns_of(format).into() {
            return Err(MapError::Garbled(format!("unknown columns {:?}", schema.fields())));
        }
        batches.iter().try_for_each(|batch| map.add_rows(batch))?;
        Ok(map)
    }

    fn from_metadata(metadata: &arrow::datatypes::Metadata) -> Result<Self, MapError> {
        let text =
            |key: &str| metadata.get(key).ok_or_else(|| MapError::Garbled(format!("`{key}` is missing")));
        let garbled = |key: &str| MapError::Garbled(format!("`{key}` is garbled"));
        let number = |key: &str| text(key)?.parse::<u64>().map_err(|_| garbled(key));
        let format = text("format")?;
        if format != FORMAT && format != FORMAT_WITH_BOUNDARIES {
            let known = FORMAT_WITH_BOUNDARIES;
            return Err(MapError::Garbled(format!("format {format} is newer than this program's {known}")));
        }
        let logs = text("logs")?.split(',').filter(|id| !id.is_empty());
        let logs = logs.map(|id| id.parse().map(LogId).map_err(|_| garbled("logs")));
        Ok(Self {
            table: TableId(text("table_id")?.as_str().into()),
            number: number("number")?,
            predecessor: number("predecessor")?,
            nonce: text("nonce")?.parse().map_err(|_| garbled("nonce"))?,
            logs: logs.collect::<Result<_, _>>()?,
            marks: HashMap::new(),
        })
    }

    fn add_rows(&mut self, batch: &RecordBatch) -> Result<(), MapError> {
        let streams = batch.column(0).as_string::<i32>();
        let numbers = |column: usize| batch.column(column).as_primitive::<UInt64Type>();
        let (sessions, starts, ends) = (numbers(1).values(), numbers(2).values(), numbers(3).values());
        let boundaries = (batch.num_columns() > 4).then(|| (numbers(4), numbers(5)));
        let boundary_of = |row: usize| {
            let (offsets, requests) = boundaries.filter(|(offsets, _)| offsets.is_valid(row))?;
            Some(Boundary { offset: offsets.value(row), requests: requests.value(row) })
        };
        for row in 0..batch.num_rows() {
            let garbled = |what: &str| MapError::Garbled(format!("stream {:?}: {what}", streams.value(row)));
            let stream: StreamId = streams.value(row).parse().map_err(|_| garbled("no stream id"))?;
            let (session, start, end) = (SessionId(sessions[row]), starts[row], ends[row]);
            if end < start {
                return Err(garbled("offsets going back"));
            }
            match self.marks.get_mut(&stream) {
                Some(mark) if mark.next == start && mark.session < session => {
                    mark.before.push((mark.session, OffsetRange { start: mark.start, end: mark.next }));
                    (mark.session, mark.start, mark.next) = (session, start, end);
                    mark.boundary = boundary_of(row);
                }
                Some(_) => return Err(garbled("sessions that do not follow each other")),
                None => {
                    let mark = Mark { start, next: end, boundary: boundary_of(row), ..Mark::new(session) };
                    self.marks.insert(stream, mark);
                }
            }
        }
        Ok(())
    }
}

fn columns_of(format: &str) -> Vec<Field> {
    let number = |name| Field::new(name, DataType::UInt64, false);
    let mut columns =
        vec![Field::new("stream", DataType::Utf8, false), number("session"), number("start"), number("end")];
    if format == FORMAT_WITH_BOUNDARIES {
        let boundaries = ["boundary_offset", "boundary_requests"];
        columns.extend(boundaries.map(|name| Field::new(name, DataType::UInt64, true)));
    }
    columns
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn stream() -> StreamId {
        StreamId::named(&"s".parse().expect("valid"), 1)
    }

    fn run(session: u64, start: u64, end: u64) -> RunKey {
        RunKey { stream: stream(), session: SessionId(session), start, end, boundary: None }
    }

    fn range(start: u64, end: u64) -> OffsetRange {
        OffsetRange { start, end }
    }

    /// Session 1 brought 0..5, session 3 brought 5..10.
    fn taken_over() -> Mark {
        Mark { start: 5, next: 10, before: vec![(SessionId(1), range(0, 5))], ..Mark::new(SessionId(3)) }
    }

    #[test]
    fn a_run_is_judged_by_where_it_begins_and_ends() {
        let mark = Mark { next: 10, ..Mark::new(SessionId(1)) };
        let check = |start, end, expected| assert_eq!(judge(Some(&mark), &run(1, start, end)), expected);
        check(10, 12, Verdict::Commit);
        check(0, 10, Verdict::Duplicate);
        check(3, 7, Verdict::Duplicate);
        check(7, 12, Verdict::Partial { from: 10 });
        check(11, 12, Verdict::Held);
        assert_eq!(judge(None, &run(1, 0, 3)), Verdict::Commit);
        assert_eq!(judge(None, &run(1, 1, 3)), Verdict::Held);
    }

    #[test]
    fn records_of_another_session_are_set_aside_not_dropped() {
        let check = |session, start, end, aside: &[(u64, u64)], commit_from| {
            let aside = aside.iter().map(|(start, end)| range(*start, *end)).collect();
            let expected = Verdict::Fenced { aside, commit_from };
            assert_eq!(judge(Some(&taken_over()), &run(session, start, end)), expected);
        };
        check(4, 8, 10, &[(8, 10)], None); // a newer one states offsets that are there
        check(4, 8, 12, &[(8, 10)], Some(10));
        check(1, 3, 7, &[(5, 7)], None); // an older one went on after the takeover
        check(1, 3, 12, &[(5, 12)], None);
        check(1, 10, 12, &[(10, 12)], None);
        check(2, 20, 22, &[(20, 22)], None);
        check(2, 4, 6, &[(4, 6)], None); // a session that brought nothing
        check(3, 3, 7, &[(3, 5)], None); // the replay of a run whose first part was set aside
        check(3, 3, 12, &[(3, 5)], Some(10));
    }

    #[test]
    fn a_replay_of_an_older_session_is_a_duplicate() {
        assert_eq!(judge(Some(&taken_over()), &run(1, 1, 5)), Verdict::Duplicate);
        assert_eq!(judge(Some(&taken_over()), &run(3, 5, 10)), Verdict::Duplicate);
        assert_eq!(judge(Some(&taken_over()), &run(3, 9, 11)), Verdict::Partial { from: 10 });
    }

    #[test]
    fn an_older_run_that_is_merely_late_is_committed_before_a_newer_one() {
        let map = WatermarkMap::empty(TableId("t".into()));
        let (verdicts, changes) = judge_all(&map, &[run(2, 5, 9), run(1, 0, 5)]);
        assert_eq!(verdicts, [Verdict::Commit, Verdict::Commit]);
        assert_eq!(changes[&stream()].before, [(SessionId(1), range(0, 5))]);
    }

    #[test]
    fn one_round_takes_each_record_once() {
        let map = WatermarkMap::empty(TableId("t".into()));
        let (verdicts, _) = judge_all(&map, &[run(1, 0, 5), run(1, 0, 5), run(1, 3, 8), run(1, 9, 10)]);
        assert_eq!(verdicts[..2], [Verdict::Commit, Verdict::Duplicate]);
        assert_eq!(verdicts[2..], [Verdict::Partial { from: 5 }, Verdict::Held]);
    }

    #[test]
    fn what_is_no_map_is_named() {
        let garbled = WatermarkMap::decode(&Bytes::new()).expect_err("no map").to_string();
        assert!(garbled.contains("watermark map"));
        let mut map = WatermarkMap::empty(TableId("t".into()));
        map.marks.insert(stream(), taken_over());
        let bytes = map.encode().expect("encodes");
        assert!(WatermarkMap::decode(&bytes.slice(..bytes.len() / 2)).is_err());
    }

    prop_compose! {
        fn any_mark()(
            lengths in prop::collection::vec((1u64..4, 1u64..50), 1..=TAKEOVERS_MAX),
            requests in prop::option::of(1u64..9),
        ) -> Mark {
            let mut mark = Mark::new(SessionId(0));
            for (step, length) in lengths {
                let boundary = requests.map(|requests| Boundary { offset: mark.next, requests });
                let run = RunKey { boundary, ..run(mark.session.0 + step, mark.next, mark.next + length) };
                if mark.next == 0 { mark.session = run.session; }
                mark.advance(&run);
            }
            mark
        }
    }

    proptest! {
        #[test]
        fn a_map_comes_back_from_its_bytes(marks in prop::collection::vec(any_mark(), 0..40), number: u64) {
            let mut map = WatermarkMap::empty(TableId("some-id".into()));
            map.logs = [LogId(Uuid::from_u128(7)), LogId(Uuid::from_u128(9))].into();
            let changes = marks.into_iter().map(|mark| (StreamId::ephemeral(), mark)).collect();
            let map = map.successor(number, Uuid::from_u128(number.into()), changes);
            prop_assert_eq!(WatermarkMap::decode(&map.encode().expect("encodes")).expect("own bytes"), map);
        }

        /// Each offset of a run is committed, a duplicate, set aside or held, and exactly one of them.
        #[test]
        fn every_record_has_one_fate(mark in any_mark(), session in 1u64..40, start in 0u64..900, length in 1u64..300) {
            let run = run(session, start, start + length);
            let verdict = judge(Some(&mark), &run);
            let from = verdict.commit_from(&run);
            let aside = match &verdict { Verdict::Fenced { aside, .. } => aside.clone(), _ => vec![] };
            for offset in run.start..run.end {
                let commits = from.is_some_and(|from| offset >= from);
                let is_aside = aside.iter().any(|range| range.contains(offset));
                let is_own = mark.of(run.session).contains(offset);
                let is_held = verdict == Verdict::Held;
                prop_assert_eq!(u8::from(commits) + u8::from(is_aside) + u8::from(is_held) + u8::from(is_own), 1);
                prop_assert!(!commits || offset >= mark.next);
            }
            prop_assert!(from.is_none_or(|from| from == mark.next));
        }
    }

    /// Pods replay overlapping, delayed and repeated runs in any order; a rival may commit between judging and
    /// committing. After every commit each stream is a prefix: every offset once, in order.
    #[derive(Debug, Clone)]
    struct Offered {
        stream: u8,
        start: u64,
        length: u64,
    }

    fn offered() -> impl Strategy<Value = Offered> {
        (0u8..3, 0u64..40, 1u64..15).prop_map(|(stream, start, length)| Offered { stream, start, length })
    }

    struct Model {
        streams: Vec<StreamId>,
        map: WatermarkMap,
        content: HashMap<StreamId, Vec<u64>>,
    }

    impl Model {
        /// One round of a pod: judges, then a rival may commit, then commits if the verdicts still stand.
        fn round(&mut self, at_hand: &mut Vec<RunKey>, rival: Option<RunKey>) -> Result<(), TestCaseError> {
            let (mut verdicts, mut changes) = judge_all(&self.map, at_hand);
            if let Some(rival) = rival {
                let mut rival = vec![rival];
                self.commit(&mut rival)?;
                let again = judge_all(&self.map, at_hand);
                (verdicts, changes) = again;
            }
            self.apply(at_hand, &verdicts, changes)
        }

        fn commit(&mut self, runs: &mut Vec<RunKey>) -> Result<(), TestCaseError> {
            let (verdicts, changes) = judge_all(&self.map, runs);
            self.apply(runs, &verdicts, changes)
        }

        fn apply(
            &mut self,
            runs: &mut Vec<RunKey>,
            verdicts: &[Verdict],
            changes: HashMap<StreamId, Mark>,
        ) -> Result<(), TestCaseError> {
            let mut judged: Vec<_> = runs.drain(..).zip(verdicts).collect();
            judged.sort_by(|a, b| a.0.cmp(&b.0));
            for (run, verdict) in judged {
                if let Some(from) = verdict.commit_from(&run) {
                    self.content.entry(run.stream.clone()).or_default().extend(from..run.end);
                }
                if *verdict == Verdict::Held {
                    runs.push(run);
                }
            }
            self.map = self.map.successor(self.map.number + 1, Uuid::nil(), changes);
            for stream in &self.streams {
                let content = self.content.get(stream).map_or(&[][..], Vec::as_slice);
                let prefix: Vec<u64> = (0..self.map.next(stream)).collect();
                prop_assert_eq!(content, &prefix[..]);
            }
            Ok(())
        }
    }

    proptest! {
        #[test]
        fn every_version_holds_a_prefix_of_every_stream(
            rounds in prop::collection::vec(
                (0usize..3, prop::collection::vec(offered(), 0..6), prop::option::of(offered())), 1..30),
        ) {
            let names = ["a", "b", "c"].map(|name| StreamId::named(&name.parse().expect("valid"), 1));
            let key = |offered: Offered| RunKey {
                stream: names[usize::from(offered.stream)].clone(),
                session: SessionId(1),
                start: offered.start,
                end: offered.start + offered.length,
                boundary: None,
            };
            let map = WatermarkMap::empty(TableId("t".into()));
            let mut model = Model { streams: names.to_vec(), map, content: HashMap::new() };
            let mut pods: Vec<Vec<RunKey>> = vec![Vec::new(); 3];
            for (pod, runs, rival) in rounds {
                pods[pod].extend(runs.into_iter().map(key));
                model.round(&mut pods[pod], rival.map(key))?;
            }
            // Whatever waited is in once its predecessors are.
            for stream in &names {
                let whole = RunKey { stream: stream.clone(), ..run(1, 0, 60) };
                model.commit(&mut vec![whole])?;
            }
            for pod in &mut pods {
                model.round(pod, None)?;
                prop_assert!(pod.is_empty());
            }
        }
    }
}
