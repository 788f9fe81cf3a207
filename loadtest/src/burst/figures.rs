//! From what was seen and heard to a table of aims, and to plots.
//!
//! *Owns*: the aims, and whether they are met. A core.
//! *Does not own*: how it came about (`burst`), the verdicts (`auditor`).

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::Duration;

use super::Scenario;
use crate::auditor::Verdict;
use crate::elastic::Wait;
use crate::history::History;
use crate::plot::{Level, Line, Mark, TimePlot};
use crate::pool::SeenPod;

/// The p99 of acks is that of the records that were due within so long.
const WINDOW: Duration = Duration::from_secs(5);
/// The first streams find a pool that has done nothing yet.
const WARM_UP: Duration = Duration::from_secs(5);
/// The bound of the p99 of acks, as a multiple of that before the burst: all of it shares a few processors.
const P99_TIMES: f64 = 5.0;
/// From the load's coming to the first pod that takes streams: the proof (15 s), and a pod's start.
const FIRST_POD_AIM: Duration = Duration::from_secs(25);
/// From the load's coming to acks that are in time again, and stay so.
const RECOVERY_AIM: Duration = Duration::from_secs(90);
/// From the burst's end to the pool as it was, beside the quiet time that is asked for.
const BACK_AIM: Duration = Duration::from_secs(60);
/// Of the streams that come once there are more pods, those that go to the new ones.
const NEW_SHARE_AIM: f64 = 0.5;
/// Height of one plot.
const PLOT_PX: usize = 380;

/// The pool at one moment, since the run's beginning.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Seen {
    pub(super) at: Duration,
    pub(super) pods: Vec<SeenPod>,
}

/// When what was.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Times {
    /// The burst.
    pub(super) from: Duration,
    pub(super) to: Duration,
    /// When the pool was as before, if it was in time.
    pub(super) back: Option<Duration>,
    pub(super) end: Duration,
}

/// What came out.
#[derive(Debug)]
pub struct Outcome {
    pub(super) scenario: Scenario,
    pub(super) frame_bytes: f64,
    pub(super) times: Times,
    pub(super) seen: Vec<Seen>,
    pub(super) waits: Vec<Wait>,
    /// When each stream opened, and on which pod; no pod where it had gone before it was looked for.
    pub(super) placed: Vec<(Duration, Option<String>)>,
    pub(super) failed: Vec<String>,
    pub(super) reconnects: u64,
    pub(super) histories: BTreeMap<String, History>,
    pub(super) verdicts: BTreeMap<String, Verdict>,
}

/// A line of the table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Row {
    /// What it is about.
    pub what: &'static str,
    /// What it should be; none where there is nothing to be met.
    pub aim: Option<String>,
    /// What it is.
    pub figure: String,
    /// Whether that is as it should be.
    pub is_met: bool,
    /// Whether it is a promise, whatever the machine: all others are times.
    pub is_promise: bool,
}

impl Seen {
    /// Pods that take streams.
    pub(super) fn active(&self) -> usize {
        self.pods.iter().filter(|pod| pod.phase == "active").count()
    }

    /// Pods that have not ended.
    pub(super) fn running(&self) -> usize {
        self.pods.iter().filter(|pod| !matches!(pod.phase.as_str(), "drained" | "undrained" | "lost")).count()
    }

    pub(super) fn phases(&self) -> Vec<(&str, &str)> {
        self.pods.iter().map(|pod| (pod.id.as_str(), pod.phase.as_str())).collect()
    }

    fn ids(&self) -> impl Iterator<Item = &str> {
        self.pods.iter().map(|pod| pod.id.as_str())
    }
}

impl fmt::Display for Seen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (nth, SeenPod { id, phase, streams, load, .. }) in self.pods.iter().enumerate() {
            let comma = if nth > 0 { ", " } else { "" };
            write!(f, "{comma}{id} {phase} ({streams} streams, load {load:.2})")?;
        }
        Ok(())
    }
}

/// By nearest rank, of the records that were due in this span. None where there are none.
fn p99(waits: &[Wait], from: Duration, to: Duration) -> Option<Duration> {
    let within = waits.iter().filter(|wait| (from..to).contains(&wait.due));
    let mut waits: Vec<Duration> = within.map(|wait| wait.durable.saturating_sub(wait.due)).collect();
    waits.sort_unstable();
    Some(*waits.get((waits.len() * 99).div_ceil(100).checked_sub(1)?)?)
}

/// The beginning of each window of this span, and its p99.
fn windows(waits: &[Wait], from: Duration, to: Duration) -> Vec<(Duration, Duration)> {
    let count = (to.saturating_sub(from).as_secs() / WINDOW.as_secs()) as u32;
    let begins = (0..count).map(|nth| from + WINDOW * nth);
    begins.filter_map(|begin| Some((begin, p99(waits, begin, begin + WINDOW)?))).collect()
}

/// From when on, since the first of these windows, all are within the bound.
fn within_for_good(windows: &[(Duration, Duration)], bound: Duration) -> Option<Duration> {
    let first = windows.first()?.0;
    match windows.iter().rposition(|window| window.1 > bound) {
        None => Some(Duration::ZERO),
        Some(late) => windows.get(late + 1).map(|window| window.0 - first),
    }
}

impl Outcome {
    /// Whether all promises were kept, the pool grew and shrank, and no producer noticed.
    pub fn is_kept(&self) -> bool {
        self.rows().iter().all(|row| row.is_met || !row.is_promise)
    }

    /// Whether everything is as it should be.
    pub fn is_met(&self) -> bool {
        self.rows().iter().all(|row| row.is_met)
    }

    /// Records that were sent.
    pub fn sent(&self) -> u64 {
        self.histories.values().map(History::sent).sum()
    }

    /// The table.
    pub fn rows(&self) -> Vec<Row> {
        let parts = [self.of_load(), self.of_growth(), self.of_end(), self.of_acks(), self.of_promises()];
        parts.into_iter().flatten().collect()
    }

    /// Bytes that were to be sent, in a second.
    fn load(&self, from: Duration, to: Duration) -> f64 {
        let frames = self.waits.iter().filter(|wait| (from..to).contains(&wait.due)).count();
        frames as f64 * self.frame_bytes / to.saturating_sub(from).as_secs_f64().max(1e-9)
    }

    fn load_before(&self) -> f64 {
        self.load(WARM_UP.min(self.times.from / 2), self.times.from)
    }

    fn load_in_burst(&self) -> f64 {
        self.load(self.times.from + WINDOW, self.times.to)
    }

    fn of_load(&self) -> Vec<Row> {
        let capacity = self.scenario.pod_bytes_per_s as f64;
        let text = |load: f64| format!("{:.2} MB/s, of {:.1} pods", load / 1e6, load / capacity);
        vec![
            Row::info("load before the burst", text(self.load_before())),
            Row::info("load in the burst", text(self.load_in_burst())),
        ]
    }

    fn of_growth(&self) -> Vec<Row> {
        let Times { from, to, .. } = self.times;
        let min = self.scenario.min as usize;
        // With fewer the burst would not get in.
        let needed = (self.load_in_burst() / self.scenario.pod_bytes_per_s as f64).ceil() as usize;
        let needed = needed.max(min + 1);
        let most = self.seen.iter().filter(|seen| seen.at < to).map(Seen::active).max().unwrap_or(0);
        let first = self.seen.iter().find(|seen| seen.at >= from && seen.active() > min).map(|seen| seen.at);
        let after = first.map(|first| first - from);
        let old: BTreeSet<&str> = self.seen.first().into_iter().flat_map(Seen::ids).collect();
        let came = |at: &Duration| first.is_some_and(|first| (first..to).contains(at));
        let placed = self.placed.iter().filter(|(at, _)| came(at)).filter_map(|(_, pod)| pod.as_deref());
        let (all, to_new) =
            placed.fold((0, 0), |(all, to_new), pod| (all + 1, to_new + usize::from(!old.contains(pod))));
        let share = to_new as f64 / f64::from(all.max(1));
        vec![
            Row::promise("pods at most", format!("{needed} or more"), most.to_string(), most >= needed),
            Row::time(
                "the first one is added after",
                format!("{} s", FIRST_POD_AIM.as_secs()),
                seconds(after),
                after.is_some_and(|after| after <= FIRST_POD_AIM),
            ),
            Row::promise(
                "streams that come from then on, at new pods",
                format!("{:.0} %", NEW_SHARE_AIM * 100.0),
                format!("{:.0} % of {all}", share * 100.0),
                share >= NEW_SHARE_AIM,
            ),
        ]
    }

    fn of_end(&self) -> Vec<Row> {
        let Times { to, back, .. } = self.times;
        let aim = BACK_AIM + Duration::from_secs(self.scenario.quiet_s);
        let after = back.map(|back| back - to);
        let min = self.scenario.min;
        let figure = after.map_or("it is not", |_| "it is").to_owned();
        vec![
            Row::promise(
                "after the burst the pool is as before",
                format!("{min} pods"),
                figure,
                after.is_some(),
            ),
            Row::time(
                "and that after",
                format!("{} s", aim.as_secs()),
                seconds(after),
                after.is_some_and(|after| after <= aim),
            ),
        ]
    }

    /// The p99 before the burst, and the bound that follows.
    fn bound(&self) -> (Duration, Duration) {
        let from = self.times.from;
        let before = p99(&self.waits, WARM_UP.min(from / 2), from).unwrap_or_default();
        (before, before.mul_f64(P99_TIMES))
    }

    fn of_acks(&self) -> Vec<Row> {
        let Times { from, to, end, .. } = self.times;
        let (before, bound) = self.bound();
        let during = windows(&self.waits, from, to);
        let recovered = within_for_good(&during, bound);
        let after = windows(&self.waits, to + WINDOW, end);
        let worst = |windows: &[(Duration, Duration)]| windows.iter().map(|window| window.1).max();
        let after = worst(&after);
        vec![
            Row::info("ack p99 before the burst", millis(Some(before))),
            Row::info("ack p99 in the worst 5 s of it", millis(worst(&during))),
            Row::time(
                "ack p99 under 5 times that before again, and for good, after",
                format!("{} s", RECOVERY_AIM.as_secs()),
                seconds(recovered),
                recovered.is_some_and(|after| after <= RECOVERY_AIM),
            ),
            Row::time(
                "ack p99 in the worst 5 s after the burst, drains and all",
                millis(Some(bound)),
                millis(after),
                after.is_some_and(|after| after <= bound),
            ),
        ]
    }

    fn of_promises(&self) -> Vec<Row> {
        let (sent, failed) = (self.sent(), self.failed.len());
        let rows: u64 = self.verdicts.values().map(|verdict| verdict.rows).sum();
        let broken = self.verdicts.values().filter(|verdict| !verdict.is_clean()).count();
        let is_clean = broken == 0 && self.verdicts.len() == self.histories.len() && rows == sent && sent > 0;
        let clean = if is_clean { "kept".to_owned() } else { format!("BROKEN in {broken} tables") };
        let streams: usize = self.histories.values().map(|history| history.streams.len()).sum();
        let all = self.seen.iter().flat_map(|seen| &seen.pods);
        let lost: BTreeSet<&str> = all.filter(|pod| pod.phase == "lost").map(|pod| pod.id.as_str()).collect();
        let failures = format!("{failed} of {}", streams + failed);
        vec![
            Row::promise("producers that saw an error", "0".to_owned(), failures, failed == 0),
            Row::promise(
                "pods that were taken for lost",
                "0".to_owned(),
                lost.len().to_string(),
                lost.is_empty(),
            ),
            Row::promise(
                "connections lost",
                "0".to_owned(),
                self.reconnects.to_string(),
                self.reconnects == 0,
            ),
            Row::promise(
                "promises, in every version of each table",
                "kept".to_owned(),
                format!("{clean}: {sent} records sent, {rows} rows"),
                is_clean,
            ),
        ]
    }

    /// Load, pods, streams of each pod, and the p99 of acks over time, one below the other.
    ///
    /// # Errors
    /// There is nothing to draw.
    pub fn to_svg(&self) -> anyhow::Result<String> {
        let plots = [self.plot_load(), self.plot_pods(), self.plot_streams(), self.plot_acks()];
        let height = plots.len() * PLOT_PX;
        let mut svg =
            format!("<svg width=\"800\" height=\"{height}\" xmlns=\"http://www.w3.org/2000/svg\">\n");
        for (nth, plot) in plots.iter().enumerate() {
            let (below, one) = (nth * PLOT_PX, plot.to_svg()?);
            svg += &format!("<g transform=\"translate(0,{below})\">\n{one}</g>\n");
        }
        svg += "</svg>\n";
        Ok(svg)
    }

    fn plot(&self, title: &str, y: &str, lines: Vec<Line>, levels: Vec<Level>) -> TimePlot {
        let mark = |at: Duration, name: &str| Mark { x: at.as_secs_f64(), name: name.to_owned() };
        let Times { from, to, back, .. } = self.times;
        let mut marks = vec![mark(from, "burst"), mark(to, "its end")];
        marks.extend(back.map(|back| mark(back, "pool as before")));
        let (title, x, y) = (title.to_owned(), "time, s".to_owned(), y.to_owned());
        TimePlot { title, x, y, lines, marks, levels, ..TimePlot::default() }
    }

    fn plot_load(&self) -> TimePlot {
        let line = |name: &str, at: fn(&Wait) -> Duration| {
            let mut frames: BTreeMap<u64, u32> =
                (0..self.times.end.as_secs()).map(|second| (second, 0)).collect();
            self.waits.iter().for_each(|wait| *frames.entry(at(wait).as_secs()).or_default() += 1);
            let mb = |frames: u32| f64::from(frames) * self.frame_bytes / 1e6;
            let points = frames.into_iter().map(|(second, frames)| (second as f64, mb(frames))).collect();
            Line { name: name.to_owned(), points, is_stepped: false }
        };
        let lines = vec![line("due", |wait| wait.due), line("durable", |wait| wait.durable)];
        self.plot("Load", "MB/s", lines, Vec::new())
    }

    fn over_time(&self, name: &str, value: impl Fn(&Seen) -> f64) -> Line {
        let points = self.seen.iter().map(|seen| (seen.at.as_secs_f64(), value(seen))).collect();
        Line { name: name.to_owned(), points, is_stepped: true }
    }

    fn plot_pods(&self) -> TimePlot {
        let running = self.over_time("running", |seen| seen.running() as f64);
        let active = self.over_time("that take streams", |seen| seen.active() as f64);
        self.plot("Pods", "pods", vec![running, active], Vec::new())
    }

    fn plot_streams(&self) -> TimePlot {
        let ids: BTreeSet<&str> = self.seen.iter().flat_map(Seen::ids).collect();
        let streams = |seen: &Seen, id: &str| {
            let pod = seen.pods.iter().find(|pod| pod.id == id);
            pod.map_or(0.0, |pod| pod.streams as f64)
        };
        let lines = ids.into_iter().map(|id| self.over_time(id, |seen| streams(seen, id))).collect();
        self.plot("Streams of each pod", "streams", lines, Vec::new())
    }

    /// By its logarithm: what is normal and what an overload does are a thousandfold apart.
    fn plot_acks(&self) -> TimePlot {
        let log = |wait: Duration| (wait.as_secs_f64() * 1000.0).max(1.0).log10();
        let points = (0..self.times.end.as_secs()).filter_map(|second| {
            let at = Duration::from_secs(second);
            Some((second as f64, log(p99(&self.waits, at, at + Duration::from_secs(1))?)))
        });
        let name = "of the records that were due in this second".to_owned();
        let line = Line { name, points: points.collect(), is_stepped: false };
        let (before, bound) = self.bound();
        let level = |wait: Duration, name: &str| Level {
            y: log(wait),
            name: format!("{name}: {}", millis(Some(wait))),
        };
        let levels = vec![level(before, "before"), level(bound, "bound")];
        self.plot("Ack p99", "log10 of ms: 1 is 10 ms, 3 is 1 s", vec![line], levels)
    }
}

fn seconds(time: Option<Duration>) -> String {
    time.map_or("never".to_owned(), |time| format!("{:.1} s", time.as_secs_f64()))
}

fn millis(time: Option<Duration>) -> String {
    time.map_or("–".to_owned(), |time| format!("{} ms", time.as_millis()))
}

impl Row {
    fn info(what: &'static str, figure: String) -> Self {
        Self { what, aim: None, figure, is_met: true, is_promise: false }
    }

    fn promise(what: &'static str, aim: String, figure: String, is_met: bool) -> Self {
        Self { what, aim: Some(aim), figure, is_met, is_promise: true }
    }

    fn time(what: &'static str, aim: String, figure: String, is_met: bool) -> Self {
        Self { what, aim: Some(aim), figure, is_met, is_promise: false }
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { what, aim, figure, is_met, .. } = self;
        let verdict = match (aim, is_met) {
            (None, _) => "",
            (Some(_), true) => "met",
            (Some(_), false) => "MISSED",
        };
        write!(f, "| {what} | {} | {figure} | {verdict} |", aim.as_deref().unwrap_or("–"))
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "| | aim | figure | |\n|---|---|---|---|")?;
        self.rows().iter().try_for_each(|row| writeln!(f, "{row}"))?;
        for (table, verdict) in self.verdicts.iter().filter(|(_, verdict)| !verdict.is_clean()) {
            writeln!(f, "{table}: {verdict}")?;
        }
        self.failed.iter().try_for_each(|error| writeln!(f, "a producer failed: {error}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn s(s: u64) -> Duration {
        Duration::from_secs(s)
    }

    #[test]
    fn acks_are_in_time_for_good_after_the_last_window_that_was_not() {
        let bound = Duration::from_millis(50);
        let check = |slow: &[u64], expected: Option<u64>| {
            let wait = |begin: u64| if slow.contains(&begin) { s(1) } else { Duration::from_millis(5) };
            let windows: Vec<_> = (10..15).map(|begin| (s(begin), wait(begin))).collect();
            assert_eq!(within_for_good(&windows, bound), expected.map(s), "{slow:?}");
        };
        check(&[], Some(0));
        check(&[10], Some(1));
        check(&[10, 12], Some(3));
        check(&[14], None);
        assert_eq!(within_for_good(&[], bound), None);
    }

    #[test]
    fn a_p99_is_of_what_was_due_in_its_span() {
        let waits: Vec<Wait> =
            (1..=200).map(|ms| Wait { due: s(1), durable: s(1) + Duration::from_millis(ms) }).collect();
        assert_eq!(p99(&waits, s(1), s(2)), Some(Duration::from_millis(198)));
        assert_eq!(p99(&waits, s(2), s(3)), None);
        assert_eq!(windows(&waits, s(0), s(11)), [(s(0), Duration::from_millis(198))]);
    }

    /// Two pods, one more from 20 s to 60 s; the burst from 10 s to 40 s.
    fn outcome() -> Outcome {
        let pods = |at: u64| if (20..60).contains(&at) { 3 } else { 2 };
        let pod = |number: u64| SeenPod {
            id: format!("pod-{number}"),
            phase: "active".to_owned(),
            streams: 1,
            load: 0.5,
            lag_ms: None,
        };
        let seen = (0..70).map(|at| Seen { at: s(at), pods: (1..=pods(at)).map(pod).collect() }).collect();
        let waits =
            (0..700).map(|at| Duration::from_millis(100 * at)).map(|due| Wait { due, durable: due + s(1) });
        Outcome {
            scenario: Scenario::seeded(1),
            frame_bytes: 1000.0,
            times: Times { from: s(10), to: s(40), back: Some(s(60)), end: s(70) },
            seen,
            waits: waits.collect(),
            placed: vec![(s(25), Some("pod-3".to_owned())), (s(5), Some("pod-1".to_owned()))],
            failed: Vec::new(),
            reconnects: 0,
            histories: BTreeMap::new(),
            verdicts: BTreeMap::new(),
        }
    }

    #[test]
    fn what_is_missed_is_told() {
        let missed = |outcome: &Outcome| {
            let rows = outcome.rows().into_iter().filter(|row| !row.is_met);
            rows.map(|row| row.what.split_once(' ').map_or(row.what, |(first, _)| first)).collect::<Vec<_>>()
        };
        // Nothing was sent, which is no promise kept.
        assert_eq!(missed(&outcome()), ["promises,"]);
        let spoilt = Outcome { reconnects: 1, failed: vec!["x".to_owned()], ..outcome() };
        assert_eq!(missed(&spoilt), ["producers", "connections", "promises,"]);
        let mut spoilt = outcome();
        spoilt.placed[0].1 = Some("pod-1".to_owned());
        spoilt.times.back = None;
        spoilt.seen[60].pods[1].phase = "lost".to_owned();
        assert_eq!(missed(&spoilt), ["streams", "after", "and", "pods", "promises,"]);
        let mut spoilt = outcome();
        spoilt.seen.iter_mut().for_each(|seen| seen.pods.truncate(2));
        assert_eq!(missed(&spoilt), ["pods", "the", "streams", "promises,"]);
        let mut spoilt = outcome();
        spoilt.waits.iter_mut().filter(|wait| wait.due > s(11)).for_each(|wait| wait.durable += s(60));
        assert_eq!(missed(&spoilt), ["ack", "ack", "promises,"]);
        assert!(!spoilt.is_met() && spoilt.to_string().contains("MISSED"));
        assert!(spoilt.to_svg().expect("a plot").contains("Ack p99"));
    }
}
