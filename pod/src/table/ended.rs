//! ◆ Ended streams of a table, and when its map may forget them.
//!
//! A run of a stream without a mark would be taken for the stream's beginning, and its rows doubled. So a stream is
//! forgotten only when nobody can bring a run of it any more: neither a log (of all that the table has heard of,
//! each must be trimmed past the stream's end) nor a gateway (which may send again what it has not seen acked).
//!
//! Only endings in this pod's own log are judged here, wherever the table's home is: it is told. A table that knows
//! another log forgets nothing: whether that one is past a stream's end is not known to this pod. A log never leaves the
//! map, so that this lasts.
//!
//! *Owns*: which streams have ended, where and when; the rule by which they may be forgotten.
//! *Does not own*: how a stream ends (`stream`), the map and its commit (`home`), the log.
//! Keeps P2, and P7 for the map.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

use sluice_shared::ids::{LogId, StreamId, WalPosition};

use super::watermark::WatermarkMap;

/// How a stream ended.
#[derive(Debug, Clone)]
pub struct Ending {
    /// The stream.
    pub stream: StreamId,
    /// One more than its last offset.
    pub end: u64,
    /// Everything that the log has of it stands before this position.
    pub log_end: WalPosition,
    /// When it was seen to have ended.
    pub at: Instant,
}

/// Streams that have ended, in the order in which they did.
#[derive(Debug)]
pub struct EndedStreams {
    /// This pod's log.
    log: LogId,
    /// How long after its end a stream may still be sent again.
    kept: Duration,
    /// By a number that rises, and with it `log_end` and `at`.
    endings: BTreeMap<u64, Ending>,
    numbers: HashMap<StreamId, u64>,
    next_number: u64,
}

impl EndedStreams {
    /// None yet. `log` is this pod's log; a stream is remembered for `kept` after its end at least.
    pub fn new(log: LogId, kept: Duration) -> Self {
        Self { log, kept, endings: BTreeMap::new(), numbers: HashMap::new(), next_number: 0 }
    }

    /// A stream has ended. Of endings of one stream the latest counts, and the highest offset. `log_end` and `at`
    /// never go back.
    pub fn ended(&mut self, mut ending: Ending) {
        let earlier = self.reopened(&ending.stream);
        ending.end = earlier.map_or(0, |earlier| earlier.end).max(ending.end);
        if ending.end == 0 {
            return; // without a record there is no mark
        }
        self.numbers.insert(ending.stream.clone(), self.next_number);
        self.endings.insert(self.next_number, ending);
        self.next_number += 1;
    }

    /// A stream that was thought to have ended goes on. Answers what was thought.
    pub fn reopened(&mut self, stream: &StreamId) -> Option<Ending> {
        self.endings.remove(&self.numbers.remove(stream)?)
    }

    /// The streams in `map` that may be forgotten now that the log is trimmed to `trimmed`. Answers them again until
    /// a map without them is given. Looks at no ending that is not due, but for one.
    pub fn due(&mut self, map: &WatermarkMap, trimmed: WalPosition, now: Instant) -> Vec<StreamId> {
        if !map.logs.iter().eq([&self.log]) {
            self.endings.clear();
            self.numbers.clear();
            return Vec::new();
        }
        let (mut due, mut done) = (Vec::new(), Vec::new());
        for Ending { stream, end, log_end, at } in self.endings.values() {
            if trimmed < *log_end || now.saturating_duration_since(*at) < self.kept {
                break;
            }
            // Short of its end, a stream has rows that are on no known way to the table: its mark stays.
            let stream = stream.clone();
            if map.next(&stream) >= *end { due.push(stream) } else { done.push(stream) }
        }
        for stream in done {
            self.reopened(&stream);
        }
        due
    }
}

#[cfg(test)]
mod tests {
    use rand::rngs::StdRng;
    use rand::{RngExt, SeedableRng};
    use sluice_shared::ids::{SessionId, TableId};
    use uuid::Uuid;

    use super::super::watermark::{Mark, RunKey, Verdict, judge_all};
    use super::*;

    const KEPT: Duration = Duration::from_secs(10);
    const OWN: LogId = LogId(Uuid::from_u128(1));
    const RIVAL: LogId = LogId(Uuid::from_u128(2));

    fn at_segment(segment: u64) -> WalPosition {
        WalPosition { segment, offset: 0 }
    }

    /// A map of these logs in which each stream has come so far.
    fn map(logs: &[LogId], streams: &[(&StreamId, u64)]) -> WatermarkMap {
        let mark = |next| Mark { next, ..Mark::new(SessionId(0)) };
        let marks = streams.iter().map(|(stream, next)| ((*stream).clone(), mark(*next))).collect();
        let mut map = WatermarkMap::empty(TableId("t".into())).successor(1, Uuid::nil(), marks);
        map.logs = logs.iter().copied().collect();
        map
    }

    /// What is asked of a stream that ended at offset 5, in segment 2.
    struct Asked {
        logs: Vec<LogId>,
        next: u64,
        trimmed: WalPosition,
        since: Duration,
    }

    impl Asked {
        fn new() -> Self {
            Self { logs: vec![OWN], next: 5, trimmed: at_segment(3), since: KEPT }
        }

        fn is_due(&self) -> bool {
            let (stream, at) = (StreamId::ephemeral(), Instant::now());
            let mut ended = EndedStreams::new(OWN, KEPT);
            ended.ended(Ending { stream: stream.clone(), end: 5, log_end: at_segment(3), at });
            let due = ended.due(&map(&self.logs, &[(&stream, self.next)]), self.trimmed, at + self.since);
            assert!(due.is_empty() || due == [stream]);
            !due.is_empty()
        }
    }

    #[test]
    fn a_stream_is_due_only_when_nothing_can_bring_it_again() {
        let check = |expected: bool, change: &dyn Fn(&mut Asked)| {
            let mut asked = Asked::new();
            change(&mut asked);
            let Asked { logs, next, trimmed, since } = &asked;
            assert_eq!(
                asked.is_due(),
                expected,
                "{logs:?}, at {next}, trimmed to {trimmed}, after {since:?}"
            );
        };
        check(true, &|_| {});
        check(true, &|asked| (asked.next, asked.trimmed) = (6, at_segment(4)));
        check(false, &|asked| asked.next = 4);
        check(false, &|asked| asked.trimmed = at_segment(2));
        check(false, &|asked| asked.since = KEPT - Duration::from_millis(1));
        check(false, &|asked| asked.logs = vec![OWN, RIVAL]);
        check(false, &|asked| asked.logs = vec![RIVAL]);
        check(false, &|asked| asked.logs = vec![]);
    }

    #[test]
    fn a_reopened_stream_is_due_by_its_last_end() {
        let (stream, start) = (StreamId::ephemeral(), Instant::now());
        let map = map(&[OWN], &[(&stream, 5)]);
        let mut ended = EndedStreams::new(OWN, KEPT);
        let ending =
            |end, segment, at| Ending { stream: stream.clone(), end, log_end: at_segment(segment), at };
        ended.ended(ending(5, 1, start));
        ended.reopened(&stream);
        assert!(ended.due(&map, at_segment(9), start + 9 * KEPT).is_empty(), "it is open");
        ended.ended(ending(5, 3, start + KEPT));
        assert!(ended.due(&map, at_segment(2), start + 9 * KEPT).is_empty(), "its last runs are in the log");
        assert!(ended.due(&map, at_segment(3), start + KEPT).is_empty(), "it may be sent again");
        let due = ended.due(&map, at_segment(3), start + 2 * KEPT);
        assert_eq!(due, std::slice::from_ref(&stream));
        assert_eq!(ended.due(&map, at_segment(3), start + 2 * KEPT), due, "until it is forgotten");
        let mut without = map.clone();
        without.forget(&stream);
        assert!(ended.due(&without, at_segment(3), start + 2 * KEPT).is_empty());
        assert!(ended.endings.is_empty() && ended.numbers.is_empty(), "nothing is left of it");
    }

    /// A run in the pod's log.
    struct Logged {
        segment: u64,
        run: RunKey,
        settled: bool,
    }

    /// A stream as its gateway has it.
    struct Sent {
        id: StreamId,
        next: u64,
        is_open: bool,
        /// When it ended, or lost its pod.
        left: Instant,
    }

    /// A pod with its log and a table, the gateways, and another pod that is sent some streams. Gateways send streams
    /// again until shortly before they may be forgotten. The other pod's log is never trimmed.
    struct World {
        random: StdRng,
        now: Instant,
        map: WatermarkMap,
        content: HashMap<StreamId, Vec<u64>>,
        ended: EndedStreams,
        log: Vec<Logged>,
        segment: u64,
        streams: Vec<Sent>,
        rival: Vec<RunKey>,
        has_rival: bool,
        forgotten: usize,
    }

    impl World {
        fn new(seed: u64) -> Self {
            Self {
                random: StdRng::seed_from_u64(seed),
                now: Instant::now(),
                map: map(&[OWN], &[]),
                content: HashMap::new(),
                ended: EndedStreams::new(OWN, KEPT),
                log: Vec::new(),
                segment: 0,
                streams: Vec::new(),
                rival: Vec::new(),
                has_rival: seed % 2 == 1,
                forgotten: 0,
            }
        }

        fn step(&mut self) {
            self.now += Duration::from_millis(self.random.random_range(0..1_500));
            match self.random.random_range(0..20) {
                0..3 => self.open(),
                3..8 => self.send(),
                8..11 => self.end(),
                11..13 => self.send_again(),
                13..16 => self.commit(),
                16..18 => self.segment += 1,
                18 => self.crash(),
                _ => self.rival_commits(),
            }
        }

        fn trimmed(&self) -> WalPosition {
            let needed = self.log.iter().filter(|logged| !logged.settled).map(|logged| logged.segment).min();
            at_segment(needed.unwrap_or(self.segment).min(self.segment))
        }

        fn untouched(&self) -> WalPosition {
            let is_touched = self.log.iter().any(|logged| logged.segment == self.segment);
            at_segment(self.segment + u64::from(is_touched))
        }

        fn open(&mut self) {
            let id = StreamId::ephemeral();
            self.streams.push(Sent { id, next: 0, is_open: true, left: self.now });
        }

        /// Some stream that is open, or may be sent again.
        fn some(&mut self, is_open: bool) -> Option<usize> {
            let late = KEPT - Duration::from_secs(1);
            let fits = |sent: &Sent| sent.is_open == is_open && (is_open || self.now - sent.left < late);
            let fitting: Vec<_> = (0..self.streams.len()).filter(|at| fits(&self.streams[*at])).collect();
            (!fitting.is_empty()).then(|| fitting[self.random.random_range(0..fitting.len())])
        }

        fn append(&mut self, at: usize, start: u64, end: u64) {
            let stream = self.streams[at].id.clone();
            let run = RunKey { stream, session: SessionId(0), start, end, boundary: None };
            self.log.push(Logged { segment: self.segment, run, settled: false });
        }

        fn send(&mut self) {
            let Some(at) = self.some(true) else { return };
            let (start, end) =
                (self.streams[at].next, self.streams[at].next + self.random.random_range(1..4));
            self.append(at, start, end);
            self.streams[at].next = end;
        }

        fn end(&mut self) {
            let Some(at) = self.some(true) else { return };
            let (log_end, now) = (self.untouched(), self.now);
            let stream = &mut self.streams[at];
            (stream.is_open, stream.left) = (false, now);
            self.ended.ended(Ending { stream: stream.id.clone(), end: stream.next, log_end, at: now });
        }

        /// The gateway missed the last answers: it opens the stream again, and sends what it has not seen acked.
        fn send_again(&mut self) {
            let Some(at) = self.some(false) else { return };
            let end = self.streams[at].next;
            let start = self.random.random_range(0..=end);
            if self.has_rival && self.random.random_bool(0.3) {
                self.map.logs.insert(RIVAL);
                let stream = self.streams[at].id.clone();
                let run = RunKey { stream, session: SessionId(0), start, end, boundary: None };
                self.rival.push(run);
                return;
            }
            self.streams[at].is_open = true;
            self.ended.reopened(&self.streams[at].id);
            if start < end {
                self.append(at, start, end);
            }
        }

        /// The pod is killed and replays its log; the gateways of its streams come back, or do not.
        fn crash(&mut self) {
            let trimmed = self.trimmed();
            self.log.retain(|logged| logged.segment >= trimmed.segment);
            self.log.iter_mut().for_each(|logged| logged.settled = false);
            self.segment = self.untouched().segment;
            self.ended = EndedStreams::new(OWN, KEPT);
            let (log_end, at) = (self.untouched(), self.now);
            let in_map = self.map.streams().map(|(stream, mark)| (stream.clone(), mark.next));
            let in_log = self.log.iter().map(|logged| (logged.run.stream.clone(), logged.run.end));
            for (stream, end) in in_map.chain(in_log) {
                self.ended.ended(Ending { stream, end, log_end, at });
            }
            for stream in self.streams.iter_mut().filter(|stream| stream.is_open) {
                (stream.is_open, stream.left) = (false, at);
            }
        }

        fn commit(&mut self) {
            let waiting: Vec<usize> = (0..self.log.len()).filter(|at| !self.log[*at].settled).collect();
            let runs: Vec<RunKey> = waiting.iter().map(|at| self.log[*at].run.clone()).collect();
            let trimmed = self.trimmed();
            let held = self.put(runs, Some(trimmed));
            waiting.iter().zip(held).for_each(|(at, held)| self.log[*at].settled = !held);
            let trimmed = self.trimmed();
            self.log.retain(|logged| logged.segment >= trimmed.segment);
        }

        /// Sometimes it replays all that it ever had.
        fn rival_commits(&mut self) {
            let runs = self.rival.clone();
            self.put(runs, None);
        }

        /// Answers which runs are held.
        fn put(&mut self, runs: Vec<RunKey>, trimmed: Option<WalPosition>) -> Vec<bool> {
            let (verdicts, changes) = judge_all(&self.map, &runs);
            let mut judged: Vec<_> = runs.iter().zip(&verdicts).collect();
            judged.sort_by(|a, b| a.0.cmp(b.0));
            for (run, verdict) in judged {
                let from = verdict.commit_from(run).unwrap_or(run.end);
                self.content.entry(run.stream.clone()).or_default().extend(from..run.end);
            }
            self.map = self.map.successor(self.map.number + 1, Uuid::nil(), changes);
            if let Some(trimmed) = trimmed {
                let due = self.ended.due(&self.map, trimmed, self.now);
                due.iter().for_each(|stream| self.map.forget(stream));
                self.forgotten += due.len();
            }
            for (stream, content) in &self.content {
                assert!(content.iter().copied().eq(0..content.len() as u64), "{stream}: {content:?}");
            }
            verdicts.iter().map(|verdict| *verdict == Verdict::Held).collect()
        }

        fn finish(&mut self) {
            self.rival_commits();
            self.commit();
            assert!(self.log.iter().all(|logged| logged.settled), "a run is held for ever");
            for Sent { id, next, .. } in &self.streams {
                assert_eq!(self.content.get(id).map_or(0, Vec::len) as u64, *next, "{id}");
            }
        }
    }

    #[test]
    fn whatever_is_sent_or_replayed_again_each_record_is_there_once() {
        let mut forgotten = 0;
        for seed in 0..400 {
            println!("seed {seed}");
            let mut world = World::new(seed);
            for _ in 0..400 {
                world.step();
            }
            world.finish();
            forgotten += world.forgotten;
        }
        assert!(forgotten > 2_000, "{forgotten} streams forgotten: the test has tested little");
    }
}
