//! ◆ What waits for records that are not here, and which those are.
//!
//! The same rule that holds a run back says what would let it in: it is judged against the marks, and where it is held
//! the offsets before it are missing. Runs have to be those of all pods, else what another one holds looks missing.
//!
//! *Owns*: held runs in short, the gaps before them.
//! *Does not own*: the rule (`watermark`), whether the missing records may still come (`release`).
//! Keeps P2.

use sluice_shared::ids::{OffsetRange, SessionId, StreamId, TableId, TableName};

use super::watermark::{RunKey, Verdict, WatermarkMap, Working};

/// Runs of one stream and session that wait, one behind the other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeldRange {
    /// The stream.
    pub stream: StreamId,
    /// Whose records.
    pub session: SessionId,
    /// Which ones.
    pub offsets: OffsetRange,
    /// In how many runs.
    pub runs: u64,
    /// When the first of them was sealed, µs since 1970-01-01 UTC.
    pub since_us: i64,
}

/// What a pod has of a table that is not in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holding {
    /// The table's name.
    pub table: TableName,
    /// The table.
    pub id: TableId,
    /// What waits.
    pub held: Vec<HeldRange>,
    /// Entries of the pod's log for it that are not written any more.
    pub stranded: u64,
    /// And those for other tables that had its name.
    pub gone: u64,
    /// Age of the oldest record that is not committed.
    pub lag_ms: u64,
}

/// Offsets of a stream that are missing: what is behind them waits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gap {
    /// As the run that would close it.
    pub key: RunKey,
    /// What waits behind it, up to the next gap.
    pub runs: u64,
    /// Records of these.
    pub records: u64,
    /// Since when.
    pub since_us: i64,
}

/// Held runs in short. They may overlap, where a log was replayed.
pub(super) fn ranges<'r>(runs: impl Iterator<Item = (&'r RunKey, i64)>) -> Vec<HeldRange> {
    let mut runs: Vec<_> = runs.collect();
    runs.sort_by(|a, b| a.0.cmp(b.0));
    let mut ranges: Vec<HeldRange> = Vec::new();
    for (run, since_us) in runs {
        match ranges.last_mut() {
            Some(last)
                if last.stream == run.stream
                    && last.session == run.session
                    && run.start <= last.offsets.end =>
            {
                last.offsets.end = last.offsets.end.max(run.end);
                last.runs += 1;
                last.since_us = last.since_us.min(since_us);
            }
            _ => ranges.push(HeldRange {
                stream: run.stream.clone(),
                session: run.session,
                offsets: OffsetRange { start: run.start, end: run.end },
                runs: 1,
                since_us,
            }),
        }
    }
    ranges
}

/// The gaps before what all pods hold, in the order in which closing them lets everything in.
pub fn gaps(map: &WatermarkMap, held: &[HeldRange]) -> Vec<Gap> {
    let key = |held: &HeldRange| RunKey {
        stream: held.stream.clone(),
        session: held.session,
        start: held.offsets.start,
        end: held.offsets.end,
        boundary: None,
    };
    let mut runs: Vec<_> = held.iter().map(|held| (key(held), held)).collect();
    runs.sort_by(|a, b| a.0.cmp(&b.0));
    let (mut working, mut gaps) = (Working::new(map), Vec::<Gap>::new());
    for (run, held) in runs {
        let before = working.next(&run.stream);
        let verdict = working.take(&run);
        if verdict == Verdict::Held {
            let missing = RunKey { start: before, end: run.start, ..run.clone() };
            working.take(&missing);
            working.take(&run);
            gaps.push(Gap { key: missing, runs: 0, records: 0, since_us: held.since_us });
        }
        if let Some(gap) = gaps.last_mut().filter(|gap| gap.key.stream == run.stream) {
            gap.runs += held.runs;
            gap.records += run.end.saturating_sub(verdict.commit_from(&run).unwrap_or(run.start));
            gap.since_us = gap.since_us.min(held.since_us);
        }
    }
    gaps
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;
    use uuid::Uuid;

    use super::super::watermark::{Mark, judge_all};
    use super::*;

    fn stream(name: &str) -> StreamId {
        StreamId::named(&name.parse().expect("valid"), 1)
    }

    fn run(name: &str, session: u64, start: u64, end: u64) -> RunKey {
        RunKey { stream: stream(name), session: SessionId(session), start, end, boundary: None }
    }

    fn map(marks: &[(&str, u64, u64)]) -> WatermarkMap {
        let mark = |(name, session, next): &(&str, u64, u64)| {
            (stream(name), Mark { next: *next, ..Mark::new(SessionId(*session)) })
        };
        WatermarkMap::empty(TableId("t".into())).successor(1, Uuid::nil(), marks.iter().map(mark).collect())
    }

    fn held(runs: &[RunKey]) -> Vec<HeldRange> {
        ranges(runs.iter().map(|run| (run, 7)))
    }

    fn missing(map: &WatermarkMap, runs: &[RunKey]) -> Vec<RunKey> {
        gaps(map, &held(runs)).into_iter().map(|gap| gap.key).collect()
    }

    #[test]
    fn runs_that_follow_each_other_are_one_range() {
        let all = held(&[run("a", 1, 20, 30), run("a", 1, 10, 20), run("a", 1, 40, 50), run("b", 2, 0, 1)]);
        let short: Vec<_> =
            all.iter().map(|range| (range.offsets.start, range.offsets.end, range.runs)).collect();
        assert_eq!(short, [(10, 30, 2), (40, 50, 1), (0, 1, 1)]);
    }

    #[test]
    fn what_is_missing_is_what_no_pod_has() {
        let map = map(&[("a", 1, 5), ("c", 3, 9)]);
        assert_eq!(missing(&map, &[run("a", 1, 5, 10)]), []);
        assert_eq!(missing(&map, &[run("a", 1, 10, 20)]), [run("a", 1, 5, 10)]);
        assert_eq!(
            missing(&map, &[run("b", 1, 10, 20)]),
            [run("b", 1, 0, 10)],
            "nothing of it is in the table"
        );
        // One pod has 10 to 20, another what is behind 30.
        assert_eq!(
            missing(&map, &[run("a", 1, 30, 40), run("a", 1, 10, 20)]),
            [run("a", 1, 5, 10), run("a", 1, 20, 30)]
        );
        // A newer session waits behind an older one: each brings its own.
        assert_eq!(
            missing(&map, &[run("a", 2, 30, 40), run("a", 1, 10, 20)]),
            [run("a", 1, 5, 10), run("a", 2, 20, 30)]
        );
        // What comes too late for its session waits for nothing.
        assert_eq!(missing(&map, &[run("c", 2, 12, 20)]), []);
    }

    #[test]
    fn what_waits_is_counted_at_its_gap() {
        let gaps = gaps(&map(&[]), &held(&[run("a", 1, 10, 20), run("a", 1, 20, 25), run("a", 1, 30, 31)]));
        let counted: Vec<_> = gaps.iter().map(|gap| (gap.key.start, gap.runs, gap.records)).collect();
        assert_eq!(counted, [(0, 2, 15), (25, 1, 1)]);
    }

    proptest! {
        /// Once the gaps are closed nothing is held, and no gap holds an offset that some pod has, or the table.
        #[test]
        fn closing_the_gaps_lets_everything_in_and_gives_up_nothing_else(
            next in 0_u64..20,
            runs in prop::collection::vec((0_usize..2, 0_u64..60, 1_u64..10), 1..12),
        ) {
            let names = ["a", "b"];
            let runs: Vec<RunKey> =
                runs.into_iter().map(|(which, start, count)| run(names[which], 1, start, start + count)).collect();
            let map = map(&[("a", 1, next)]);
            let gaps = missing(&map, &runs);
            let all: Vec<RunKey> = runs.iter().chain(&gaps).cloned().collect();
            let (verdicts, marks) = judge_all(&map, &all);
            prop_assert!(!verdicts.contains(&Verdict::Held), "{:?}", verdicts);
            let mut reached: BTreeMap<&StreamId, u64> = BTreeMap::new();
            runs.iter().for_each(|run| {
                let end = reached.entry(&run.stream).or_default();
                *end = run.end.max(*end);
            });
            for (stream, end) in reached {
                let next = marks.get(stream).map_or(map.next(stream), |mark| mark.next);
                prop_assert_eq!(next, end.max(map.next(stream)));
            }
            for gap in &gaps {
                prop_assert!(gap.start < gap.end && gap.start >= map.next(&gap.stream));
                let is_had = |offset: u64| {
                    runs.iter().any(|run| run.stream == gap.stream && (run.start..run.end).contains(&offset))
                };
                prop_assert!(!(gap.start..gap.end).any(is_had));
            }
        }
    }
}
