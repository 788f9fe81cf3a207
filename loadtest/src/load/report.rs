//! What a run came to: figures, limits met or missed, series over time; as text and as JSON.
//!
//! *Owns*: the report's form, its figures, the text.
//! *Does not own*: counting (`record`), the page (`html`), what two reports say of each other (`compare`).

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, ensure};
use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

use super::machine::Limits as MachineLimits;
use super::record::{Counts, Record, Recorder};
use super::sample::Sample;
use super::scenario::{Load, Phase, Scenario};
use crate::bench::median;

/// Of the JSON.
const FORM: u32 = 1;

/// Everything that is known of a scenario's runs.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Report {
    /// Of this JSON.
    pub form: u32,
    /// The scenario's name, or the trace's file.
    pub scenario: String,
    /// Its text.
    pub text: String,
    /// What was changed of it by flags.
    pub changes: String,
    /// How it was run.
    pub command: String,
    /// When, in UTC.
    pub date: String,
    /// Where.
    pub machine: Machine,
    /// What the machine can do, where that was measured.
    pub limits: Option<MachineLimits>,
    /// Each run.
    pub runs: Vec<Run>,
}

/// Where it ran.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Machine {
    /// Processors.
    pub cores: usize,
    /// What they are.
    pub processor: String,
    /// Memory, GB.
    pub memory_gb: f64,
    /// Of Linux.
    pub kernel: String,
    /// Whether the rig, and so most likely the service, is not optimised: then figures say nothing.
    pub is_debug: bool,
}

/// One run.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Run {
    /// Of which seed.
    pub seed: u64,
    /// How long records were due.
    pub seconds: f64,
    /// All loads together.
    pub figures: Vec<Figure>,
    /// Each of them.
    pub loads: Vec<LoadFigures>,
    /// What had to be.
    pub checks: Vec<Check>,
    /// How long each entry of `series` is.
    pub slot_s: f64,
    /// Over time.
    pub series: Vec<Second>,
    /// What was done to it.
    pub happened: Vec<Happened>,
    /// What was seen of processes and pods.
    pub samples: Vec<Sample>,
    /// Rows that came into each table.
    pub tables: BTreeMap<String, u64>,
    /// Errors, and how often each came.
    pub errors: Vec<(String, u64)>,
    /// What the auditor found, where it was asked.
    pub audit: Option<String>,
}

/// Something measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Figure {
    /// What.
    pub name: String,
    /// How much.
    pub value: f64,
    /// Of what.
    pub unit: String,
    /// Which is better.
    pub better: Better,
}

/// Which of two figures is better.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Better {
    /// The greater.
    Higher,
    /// The smaller.
    Lower,
    /// It is only told.
    Neither,
}

/// One load's.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct LoadFigures {
    /// Of the scenario.
    pub name: String,
    /// All it came to.
    pub figures: Vec<Figure>,
    /// Over time, ms.
    pub ack_p99_ms: Vec<Option<f64>>,
}

/// A limit of the scenario.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Check {
    /// Of what.
    pub name: String,
    /// The limit.
    pub limit: f64,
    /// Whether it is the least that has to be, and not the most.
    pub at_least: bool,
    /// What it was; None: it was not measured, and so is not met.
    pub figure: Option<f64>,
}

impl Check {
    /// Whether it is met.
    pub fn is_met(&self) -> bool {
        self.figure
            .is_some_and(|figure| if self.at_least { figure >= self.limit } else { figure <= self.limit })
    }
}

/// A second, or some, of all loads together.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Second {
    /// Records that were due in it.
    pub due: u64,
    /// Records that were sent in it.
    pub sent: u64,
    /// Records that were acked in it.
    pub durable: u64,
    /// Their payload, MB.
    pub durable_mb: f64,
    /// Records that came into a table in it, as far as that is told.
    pub committed: u64,
    /// From due to durable, of what was due in it: 50, 99 and 99.9 of 100 were faster, ms.
    pub ack_ms: Option<[f64; 3]>,
    /// From due to in the table, likewise.
    pub committed_ms: Option<[f64; 3]>,
    /// The most that something was sent late in it, ms.
    pub late_ms_max: f64,
}

/// Something that was done.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Happened {
    /// Seconds since the beginning.
    pub from_s: f64,
    /// When it was done.
    pub to_s: f64,
    /// What.
    pub name: String,
}

impl Happened {
    /// The load changes.
    fn of(phase: &Phase) -> Self {
        let load = phase.load.as_ref().map_or_else(String::new, |load| format!("{load} "));
        let name = format!("{load}× {}", phase.times);
        Self { from_s: phase.at, to_s: phase.at + phase.within, name }
    }
}

/// What a run's figures are made of.
pub(crate) struct Measured<'a> {
    pub(crate) scenario: &'a Scenario,
    pub(crate) recorder: &'a Recorder,
    /// All was due at once: rates are those until the last of it was told.
    pub(crate) is_backlog: bool,
    pub(crate) happened: Vec<Happened>,
    pub(crate) samples: Vec<Sample>,
    /// Rows that came into the tables; None: they could not be counted.
    pub(crate) tables: Option<BTreeMap<String, u64>>,
    /// Processes that ended by themselves.
    pub(crate) died: Vec<Happened>,
    /// What the auditor found, and whether it is good.
    pub(crate) audit: Option<(String, bool)>,
}

const QUANTILES: [f64; 3] = [0.5, 0.99, 0.999];

fn figure(name: &str, value: f64, unit: &str, better: Better) -> Figure {
    Figure { name: name.to_owned(), value, unit: unit.to_owned(), better }
}

fn ms(histogram: &Histogram<u64>, quantile: f64) -> Option<f64> {
    (!histogram.is_empty()).then(|| histogram.value_at_quantile(quantile) as f64 / 1e3)
}

fn three(histogram: &Histogram<u32>) -> [f64; 3] {
    QUANTILES.map(|quantile| histogram.value_at_quantile(quantile) as f64 / 1e3)
}

/// Latencies of some loads together.
struct Whole {
    ack: Histogram<u64>,
    committed: Histogram<u64>,
    late: Histogram<u64>,
    own_late: Histogram<u64>,
}

impl Whole {
    fn of(record: &Record) -> Self {
        let Record { ack, committed, late, own_late, .. } = record;
        Self {
            ack: ack.clone(),
            committed: committed.clone(),
            late: late.clone(),
            own_late: own_late.clone(),
        }
    }

    fn add(&mut self, record: &Record) {
        // Of the same bounds: adding cannot fail.
        let _ = self.ack.add(&record.ack);
        let _ = self.committed.add(&record.committed);
        let _ = self.late.add(&record.late);
        let _ = self.own_late.add(&record.own_late);
    }

    fn figures(&self) -> Vec<Figure> {
        let all = [
            ("ack p50", &self.ack, 0.5),
            ("ack p99", &self.ack, 0.99),
            ("ack p99.9", &self.ack, 0.999),
            ("ack max", &self.ack, 1.0),
            ("committed p50", &self.committed, 0.5),
            ("committed p99", &self.committed, 0.99),
            ("committed max", &self.committed, 1.0),
            ("sent late p99", &self.late, 0.99),
            ("sent late max", &self.late, 1.0),
            ("rig's own lag p99", &self.own_late, 0.99),
            ("rig's own lag max", &self.own_late, 1.0),
        ];
        let timed = all.into_iter().filter_map(|(name, histogram, quantile)| {
            Some(figure(name, ms(histogram, quantile)?, "ms", Better::Lower))
        });
        timed.collect()
    }
}

/// Records and payload of some loads, by the end of the time in which records were due.
#[derive(Default, Clone, Copy)]
struct InTime {
    due: u64,
    durable: u64,
    durable_bytes: u64,
    committed: u64,
}

impl InTime {
    fn of(record: &Record, slots: &Range<usize>) -> Self {
        record.slots.iter().take(slots.end).skip(slots.start).fold(Self::default(), |sum, slot| Self {
            due: sum.due + slot.due,
            durable: sum.durable + slot.durable,
            durable_bytes: sum.durable_bytes + slot.durable_bytes,
            committed: sum.committed + slot.committed,
        })
    }

    fn plus(self, other: Self) -> Self {
        Self {
            due: self.due + other.due,
            durable: self.durable + other.durable,
            durable_bytes: self.durable_bytes + other.durable_bytes,
            committed: self.committed + other.committed,
        }
    }

    /// Within so many seconds each.
    fn figures(self, within: &Within, tells_commits: bool) -> Vec<Figure> {
        let mut figures = Vec::new();
        figures.extend(within.due.map(|s| figure("records due", self.due as f64 / s, "/s", Better::Neither)));
        let (durable, bytes) = (self.durable as f64, self.durable_bytes as f64 / 1e6);
        figures.push(figure("records durable", durable / within.durable, "/s", Better::Higher));
        figures.push(figure("payload durable", bytes / within.durable, "MB/s", Better::Higher));
        if tells_commits {
            let rate = self.committed as f64 / within.committed;
            figures.push(figure("records committed", rate, "/s", Better::Higher));
        }
        figures
    }
}

/// The times, in seconds, by which rates are.
#[derive(Clone)]
struct Within {
    /// None: all was due at once.
    due: Option<f64>,
    durable: f64,
    committed: f64,
    /// Entries of the series.
    slots: Range<usize>,
}

impl Measured<'_> {
    /// Puts it all together.
    pub(crate) fn run(self) -> Run {
        let slot_s = self.recorder.slot.as_secs_f64();
        let within = self.within();
        let (mut in_time, mut whole) = (InTime::default(), None::<Whole>);
        let (mut loads, mut errors) = (Vec::new(), BTreeMap::new());
        for (number, load) in self.scenario.loads.iter().enumerate() {
            let record = self.recorder.load(number);
            in_time = in_time.plus(InTime::of(&record, &within.slots));
            match &mut whole {
                Some(whole) => whole.add(&record),
                None => whole = Some(Whole::of(&record)),
            }
            let within = self.within_of(load, &within);
            let mut figures = InTime::of(&record, &within.slots).figures(&within, load.tells_commits());
            figures.extend(Whole::of(&record).figures());
            figures.extend(counted(&record.counts));
            record.errors.iter().for_each(|(what, count)| *errors.entry(what.clone()).or_insert(0) += count);
            let p99 =
                |slot: &super::record::Slot| Some(slot.ack.as_ref()?.value_at_quantile(0.99) as f64 / 1e3);
            let ack_p99_ms = record.slots.iter().map(p99).collect();
            loads.push(LoadFigures { name: load.name.clone(), figures, ack_p99_ms });
        }
        let counts = self.recorder.counts();
        // Of some alone it would look as if the others were late.
        let all_tell = self.scenario.loads.iter().all(Load::tells_commits);
        let mut figures = in_time.figures(&within, all_tell);
        figures.extend(whole.map(|whole| whole.figures()).unwrap_or_default());
        figures.extend(counted(&counts));
        figures.extend(self.arrived(&counts));
        figures.extend(self.seen());
        let checks = self.checks(&figures, &loads);
        let seconds = self.seconds();
        let mut happened: Vec<Happened> = self.scenario.phases.iter().map(Happened::of).collect();
        errors.extend(self.died.iter().map(|died| (format!("{}, at {:.0} s", died.name, died.to_s), 1)));
        happened.extend(self.happened);
        happened.extend(self.died);
        happened.sort_by(|a, b| a.from_s.total_cmp(&b.from_s));
        Run {
            seed: self.scenario.seed,
            seconds,
            figures,
            loads,
            checks,
            slot_s,
            series: series(self.recorder),
            happened,
            samples: self.samples,
            tables: self.tables.unwrap_or_default(),
            errors: errors.into_iter().collect(),
            audit: self.audit.map(|(text, _)| text),
        }
    }

    /// How long records were due, or a backlog took.
    fn seconds(&self) -> f64 {
        let told_at = self.recorder.told_at().as_secs_f64();
        if self.is_backlog { told_at.max(f64::EPSILON) } else { self.scenario.seconds }
    }

    fn within(&self) -> Within {
        if self.is_backlog {
            let last = |at: fn(&Record) -> Duration| {
                let all = (0..self.recorder.loads()).map(|number| at(&self.recorder.load(number)));
                all.max().unwrap_or_default().as_secs_f64().max(f64::EPSILON)
            };
            let (durable, committed) = (last(|record| record.durable_at), last(|record| record.committed_at));
            return Within { due: None, durable, committed, slots: 0..usize::MAX };
        }
        let slot_s = self.recorder.slot.as_secs_f64();
        let slots = ((self.scenario.seconds / slot_s).floor() as usize).max(1);
        let seconds = slots as f64 * slot_s;
        Within { due: Some(seconds), durable: seconds, committed: seconds, slots: 0..slots }
    }

    /// The part of it in which this load was sent: by the entries of the series, and how long it is.
    fn within_of(&self, load: &Load, all: &Within) -> Within {
        let until = load.until.unwrap_or(f64::INFINITY).min(self.scenario.seconds);
        if self.is_backlog || (load.from == 0.0 && until == self.scenario.seconds) {
            return all.clone();
        }
        let slot_s = self.recorder.slot.as_secs_f64();
        let slots = (load.from / slot_s).floor() as usize..(until / slot_s).ceil() as usize;
        let seconds = until - load.from;
        Within { due: Some(seconds), durable: seconds, committed: seconds, slots }
    }

    /// What the tables hold beside what was acked and sent, where that is known.
    fn arrived(&self, counts: &Counts) -> Vec<Figure> {
        let Some(tables) = &self.tables else { return Vec::new() };
        let rows: u64 = tables.values().sum();
        let acked = counts.durable.saturating_sub(counts.rejected);
        let once = counts.sent.saturating_sub(counts.rejected);
        let lost = acked.saturating_sub(rows) as f64;
        let doubled = rows.saturating_sub(once + counts.doubtful) as f64;
        vec![
            figure("rows in the tables", rows as f64, "", Better::Neither),
            figure("lost", lost, "", Better::Lower),
            figure("doubled", doubled, "", Better::Lower),
        ]
    }

    /// What samples come to.
    fn seen(&self) -> Vec<Figure> {
        let mut figures = Vec::new();
        let seconds = self.seconds();
        let within = || self.samples.iter().filter(|sample| sample.at_s <= seconds);
        let count = within().count().max(1) as f64;
        // `up` is gateway and autoscaler in one.
        for (kind, begins) in
            [("rig", ["loadtest"; 2]), ("gateways", ["gateway", "up"]), ("pods", ["pod"; 2])]
        {
            let is_of = |name: &str| begins.iter().any(|begin| name.starts_with(begin));
            let own = |sample: &Sample| -> (f64, f64) {
                let of = sample.processes.iter().filter(|(name, _)| is_of(name));
                of.fold((0.0, 0.0), |(cpus, rss), (_, usage)| (cpus + usage.cpus, rss + usage.rss_mb))
            };
            let all: Vec<(f64, f64)> = within().map(own).collect();
            let cpus = all.iter().map(|one| one.0).sum::<f64>() / count;
            let rss = all.iter().map(|one| one.1).fold(0.0, f64::max);
            if rss > 0.0 {
                figures.push(figure(&format!("CPU of {kind}"), cpus, "cores", Better::Lower));
                figures.push(figure(&format!("memory of {kind}, max"), rss, "MB", Better::Lower));
            }
        }
        let pods = self.samples.iter().flat_map(|sample| sample.pods.values());
        if let Some(lag) = pods.filter_map(|pod| pod.lag_ms).reduce(f64::max) {
            figures.push(figure("lag max", lag, "ms", Better::Lower));
        }
        let active = |sample: &Sample| sample.pods.values().filter(|pod| pod.phase == "active").count();
        if let Some(most) = self.samples.iter().map(active).max().filter(|most| *most > 0) {
            figures.push(figure("pods, max", most as f64, "", Better::Neither));
        }
        figures
    }

    fn checks(&self, figures: &[Figure], loads: &[LoadFigures]) -> Vec<Check> {
        let limits = &self.scenario.limits;
        let value = |figures: &[Figure], name: &str| {
            figures.iter().find(|figure| figure.name == name).map(|figure| figure.value)
        };
        let mut checks = Vec::new();
        let mut check = |name: &str, limit: Option<f64>, at_least: bool| {
            let figure = value(figures, name);
            checks.extend(limit.map(|limit| Check { name: name.to_owned(), limit, at_least, figure }));
        };
        check("ack p50", limits.ack_p50_ms, false);
        check("ack p99", limits.ack_p99_ms, false);
        check("ack p99.9", limits.ack_p999_ms, false);
        check("committed p50", limits.committed_p50_ms, false);
        check("committed p99", limits.committed_p99_ms, false);
        check("lag max", limits.lag_ms, false);
        check("rig's own lag p99", limits.own_late_p99_ms, false);
        check("records durable", limits.records_per_s_min, true);
        check("payload durable", limits.mb_per_s_min, true);
        check("pods, max", limits.pods_min, true);
        check("connections lost", limits.reconnects, false);
        check("errors", limits.errors.or(Some(0.0)), false);
        check("refused", limits.refused.or(Some(0.0)), false);
        check("not acked", limits.unacked.or(Some(0.0)), false);
        check("lost", limits.lost.or(Some(0.0)), false);
        check("doubled", limits.doubled.or(Some(0.0)), false);
        check("rows in the tables", Some(1.0), true);
        for (load, figures) in self.scenario.loads.iter().zip(loads) {
            let limits = [
                ("ack p50", load.limits.ack_p50_ms, false),
                ("ack p99", load.limits.ack_p99_ms, false),
                ("committed p99", load.limits.committed_p99_ms, false),
                ("records durable", load.limits.records_per_s_min, true),
            ];
            for (name, limit, at_least) in limits {
                let figure = value(&figures.figures, name);
                let name = format!("{}: {name}", load.name);
                checks.extend(limit.map(|limit| Check { name, limit, at_least, figure }));
            }
        }
        if !self.died.is_empty() {
            let (name, figure) =
                ("processes that ended by themselves".to_owned(), Some(self.died.len() as f64));
            checks.push(Check { name, limit: 0.0, at_least: false, figure });
        }
        if let Some((_, is_good)) = &self.audit {
            let figure = Some(if *is_good { 0.0 } else { 1.0 });
            checks.push(Check { name: "promises broken".to_owned(), limit: 0.0, at_least: false, figure });
        }
        checks
    }
}

fn counted(counts: &Counts) -> Vec<Figure> {
    vec![
        figure("records sent", counts.sent as f64, "", Better::Neither),
        figure("records acked", counts.durable as f64, "", Better::Neither),
        figure("not acked", counts.due.saturating_sub(counts.durable) as f64, "", Better::Lower),
        figure("commits not told", counts.untold as f64, "", Better::Lower),
        figure("refused", counts.rejected as f64, "", Better::Lower),
        figure("may be there twice", counts.doubtful as f64, "", Better::Lower),
        figure("streams opened", counts.opened as f64, "", Better::Neither),
        figure("connections lost", counts.reconnects as f64, "", Better::Lower),
        figure("errors", counts.errors as f64, "", Better::Lower),
    ]
}

fn series(recorder: &Recorder) -> Vec<Second> {
    type Merged = (Option<Histogram<u32>>, Option<Histogram<u32>>);
    let mut seconds: Vec<(Second, Merged)> = Vec::new();
    let merge = |into: &mut Option<Histogram<u32>>, from: &Option<Histogram<u32>>| match (into, from) {
        // Of the same bounds: adding cannot fail.
        (Some(into), Some(from)) => drop(into.add(from)),
        (into @ None, Some(from)) => *into = Some(from.clone()),
        (_, None) => {}
    };
    for number in 0..recorder.loads() {
        let record = recorder.load(number);
        if seconds.len() < record.slots.len() {
            seconds.resize_with(record.slots.len(), Default::default);
        }
        for (slot, (second, (ack, committed))) in record.slots.iter().zip(&mut seconds) {
            second.due += slot.due;
            second.sent += slot.sent;
            second.durable += slot.durable;
            second.durable_mb += slot.durable_bytes as f64 / 1e6;
            second.committed += slot.committed;
            second.late_ms_max = second.late_ms_max.max(slot.late_us_max as f64 / 1e3);
            merge(ack, &slot.ack);
            merge(committed, &slot.committed_after);
        }
    }
    let done = |(second, (ack, committed)): (Second, Merged)| Second {
        ack_ms: ack.as_ref().map(three),
        committed_ms: committed.as_ref().map(three),
        ..second
    };
    seconds.into_iter().map(done).collect()
}

impl Run {
    /// Whether all limits are met.
    pub fn is_met(&self) -> bool {
        self.checks.iter().all(Check::is_met)
    }

    /// A figure of all loads together.
    pub fn figure(&self, name: &str) -> Option<f64> {
        self.figures.iter().find(|figure| figure.name == name).map(|figure| figure.value)
    }
}

impl Report {
    /// Of runs that are to come.
    pub fn new(scenario: String, text: String, changes: String, command: String) -> Self {
        let date = chrono::DateTime::from_timestamp_micros(sluice_shared::lifecycle::now_us());
        Self {
            form: FORM,
            scenario,
            text,
            changes,
            command,
            date: date.unwrap_or_default().format("%Y-%m-%d %H:%M:%S UTC").to_string(),
            machine: Machine::here(),
            limits: None,
            runs: Vec::new(),
        }
    }

    /// Whether all limits are met in all runs.
    pub fn is_met(&self) -> bool {
        !self.runs.is_empty() && self.runs.iter().all(Run::is_met)
    }

    /// Reads one that was written as JSON.
    ///
    /// # Errors
    /// It is none.
    pub fn read(path: &Path) -> anyhow::Result<Self> {
        let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
        let report: Self = serde_json::from_str(&text)
            .with_context(|| format!("{}: no report of loadtest (--json)", path.display()))?;
        ensure!(report.form == FORM, "{}: a report of form {}, expected {FORM}", path.display(), report.form);
        Ok(report)
    }
}

impl Machine {
    fn here() -> Self {
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let after = |text: &str, key: &str| {
            let line = text.lines().find(|line| line.starts_with(key)).and_then(|line| line.split_once(':'));
            line.map(|(_, value)| value.trim().to_owned()).unwrap_or_default()
        };
        let kib = after(&read("/proc/meminfo"), "MemTotal");
        let kib = kib.split_whitespace().next().and_then(|kib| kib.parse::<f64>().ok()).unwrap_or(0.0);
        Self {
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            processor: after(&read("/proc/cpuinfo"), "model name"),
            memory_gb: kib * 1024.0 / 1e9,
            kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
            is_debug: cfg!(debug_assertions),
        }
    }
}

impl fmt::Display for Run {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_figures(f, &self.figures)?;
        if self.loads.len() > 1 {
            for load in &self.loads {
                let shown: Vec<String> =
                    ["records due", "records durable", "ack p50", "ack p99", "committed p99"]
                        .iter()
                        .filter_map(|name| load.figures.iter().find(|figure| figure.name == *name))
                        .map(|figure| format!("{} {} {}", figure.name, number(figure.value), figure.unit))
                        .collect();
                writeln!(f, "{}: {}", load.name, shown.join(", "))?;
            }
        }
        for (error, count) in &self.errors {
            writeln!(f, "error, {count} times: {error}")?;
        }
        for check in &self.checks {
            let sign = if check.at_least { "≥" } else { "≤" };
            let figure = check.figure.map_or("not measured".to_owned(), number);
            let word = if check.is_met() { "met" } else { "MISSED" };
            writeln!(f, "limit {} {sign} {}: {figure}: {word}", check.name, number(check.limit))?;
        }
        if let Some(audit) = &self.audit {
            writeln!(f, "audit: {audit}")?;
        }
        Ok(())
    }
}

/// Three digits that count; of what is whole all of them.
pub(crate) fn number(value: f64) -> String {
    match value.fract() == 0.0 && value.abs() < 1000.0 {
        true => format!("{value:.0}"),
        false => crate::report::number(value),
    }
}

/// In columns, names to the left.
fn write_figures(f: &mut fmt::Formatter<'_>, figures: &[Figure]) -> fmt::Result {
    let width = figures.iter().map(|figure| figure.name.chars().count()).max().unwrap_or(0);
    for figure in figures {
        let (name, value) = (&figure.name, number(figure.value));
        writeln!(f, "  {name:<width$}  {value:>12} {}", figure.unit)?;
    }
    Ok(())
}

/// Of several runs: each figure's median, least and most.
fn write_medians(f: &mut fmt::Formatter<'_>, runs: &[Run]) -> fmt::Result {
    let [first, _, ..] = runs else { return Ok(()) };
    let missed = runs.iter().filter(|run| !run.is_met()).count();
    writeln!(f, "medians of {} runs, least and most; in {missed} of them a limit was missed", runs.len())?;
    let width = first.figures.iter().map(|figure| figure.name.chars().count()).max().unwrap_or(0);
    for Figure { name, unit, .. } in &first.figures {
        let values: Vec<f64> = runs.iter().filter_map(|run| run.figure(name)).collect();
        let least = number(values.iter().copied().fold(f64::INFINITY, f64::min));
        let most = number(values.iter().copied().fold(f64::NEG_INFINITY, f64::max));
        let median = number(median(&values, |value| *value));
        writeln!(f, "  {name:<width$}  {median:>12} {unit:<5}  {least} to {most}")?;
    }
    Ok(())
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Machine { cores, processor, memory_gb, .. } = &self.machine;
        writeln!(f, "{} ({}) on {cores} × {processor}, {memory_gb:.0} GB", self.scenario, self.date)?;
        if self.machine.is_debug {
            writeln!(f, "this is a debug build: its figures say nothing (cargo build --release)")?;
        }
        for (number, run) in self.runs.iter().enumerate() {
            if self.runs.len() > 1 {
                writeln!(f, "run {} of {}", number + 1, self.runs.len())?;
            }
            write!(f, "{run}")?;
        }
        write_medians(f, &self.runs)?;
        if let (Some(limits), Some(run)) = (&self.limits, self.runs.last()) {
            write!(f, "{}", limits.beside(run))?;
        }
        Ok(())
    }
}
