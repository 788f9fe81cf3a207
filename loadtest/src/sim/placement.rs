//! Placing and shedding, judged: balance under old reports, files, reconnects, a death, pods that join; and the same at size.
//!
//! *Owns*: the scenarios, the aims, the table and the plots.
//! *Does not own*: the world (`world`), what is measured in it (`figures`).

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;
use std::time::Instant;

use anyhow::Context;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use sluice_gateway::placement::{StreamHints, place};
use sluice_shared::ids::TableName;
use sluice_shared::link::PodAddress;
use sluice_shared::pool::{
    CAPACITY_BYTES_PER_S, LoadReport, PodView, PoolView, TABLES_REPORTED_MAX, TableLoad,
};

use super::figures::{Figures, quantile};
use super::policy::Policy;
use super::world::{Scenario, World, draw_table, shares};
use crate::plot::{BarPlot, Level, Line, Mark, TimePlot};
use crate::report::Aim;

/// Ages of reports, in seconds from one to the next.
const AGES_S: [f64; 4] = [0.2, 1.0, 5.0, 15.0];
/// Of those the one at which most is judged, and the one that is judged more mildly.
const JUDGED_S: f64 = 5.0;
const OLD_S: f64 = 15.0;
/// Reports that are made so often cost the simulator most, and say least: fewer seeds do.
const OFTEN_S: f64 = 0.5;
const SEEDS_OFTEN_MAX: u64 = 2;
const POLICIES: [Policy; 6] = [
    Policy::Sluice,
    Policy::PlaceOnly,
    Policy::TwoChoices,
    Policy::LeastLoaded,
    Policy::Random,
    Policy::Hash,
];
/// Hottest pod over the mean: 99 % of the time outside upheavals, and after a death.
const HOTTEST_MAX: f64 = 1.25;
const HOTTEST_OLD_MAX: f64 = 1.4;
const HOTTEST_DEATH_MAX: f64 = 1.3;
/// Seconds in a thousand in which a pod is above its capacity. Not none: of streams that are heavier than what a pod at the
/// bound has left there is one in every tenth world or so, and nobody can know before it sends.
const OVERFULL_MAX: f64 = 1.0;
/// Load per pod and table, in that of two choices.
const PER_PAIR_MIN: f64 = 3.3;
const STICKY_MIN: f64 = 0.95;
/// Decisions that are timed.
const DECISIONS: usize = 200_000;

/// What to simulate.
#[derive(Debug, Clone)]
pub struct Options {
    /// How many worlds; of each seed one.
    pub seeds: u64,
    /// Also 2,000 pods with a million streams.
    pub at_size: bool,
}

/// One figure with its aim.
#[derive(Debug, Clone)]
pub struct Judged {
    /// What was measured.
    pub name: String,
    /// How much.
    pub value: f64,
    /// What is aimed at.
    pub aim: Aim,
}

/// All that came of it.
#[derive(Debug, Clone, Default)]
pub struct Outcome {
    /// Policies and ages.
    pub rows: Vec<Row>,
    /// Figures with an aim.
    pub judged: Vec<Judged>,
    /// Decisions per second on one core: of 20 pods, of 2,000.
    pub decisions: Vec<(usize, f64)>,
    /// Name and SVG.
    pub plots: Vec<(&'static str, String)>,
}

/// One policy with reports of one age, over all seeds.
#[derive(Debug, Clone)]
pub struct Row {
    policy: Policy,
    every_s: f64,
    runs: Vec<Figures>,
}

/// The pool that all is compared in.
pub fn small(seed: u64, policy: Policy, report_every_s: f64) -> Scenario {
    Scenario {
        seed,
        pods: 20,
        gateways: 6,
        tables: 200,
        streams: 3_000,
        load: 0.6,
        report_every_s,
        report_late_s: 0.0,
        policy,
        storm_at_s: 400.0,
        death_at_s: 550.0,
        join_at_s: 700.0,
        joiners: 4,
        until_s: 1200.0,
    }
}

/// A pool that no machine of ours can hold.
fn large(policy: Policy) -> Scenario {
    let small = small(1, policy, JUDGED_S);
    let (storm_at_s, death_at_s, join_at_s) = (200.0, 220.0, 240.0);
    let (pods, gateways, tables, streams) = (2_000, 6, 20_000, 1_000_000);
    let joiners = pods / 10;
    Scenario {
        pods,
        gateways,
        tables,
        streams,
        storm_at_s,
        death_at_s,
        join_at_s,
        joiners,
        until_s: 480.0,
        ..small
    }
}

/// Simulates and judges.
///
/// # Errors
/// Where a plot cannot be drawn.
pub fn run(options: &Options, progress: &dyn Fn(&str)) -> anyhow::Result<Outcome> {
    let mut outcome = Outcome::default();
    for policy in POLICIES {
        for every_s in AGES_S {
            progress(&format!("{}, reports each {every_s} s", policy.name()));
            let seeds = if every_s < OFTEN_S { options.seeds.min(SEEDS_OFTEN_MAX) } else { options.seeds };
            outcome.rows.push(Row::new(policy, every_s, seeds));
        }
    }
    outcome.judged = judge(&outcome.rows);
    outcome.plots = plots(&outcome.rows)?;
    outcome.decisions.push((20, decisions_per_s(20)));
    if options.at_size {
        progress("2,000 pods, a million streams: sluice");
        let sluice = World::new(large(Policy::Sluice)).run();
        progress("2,000 pods, a million streams: two choices");
        let two = World::new(large(Policy::TwoChoices)).run();
        outcome.judged.extend(judge_at_size(&sluice, &two));
        outcome.plots.push(("placement-at-size.svg", size_plot(&sluice, &two)?));
        outcome.decisions.push((2_000, decisions_per_s(2_000)));
    }
    Ok(outcome)
}

/// The figures that have an aim. Of those that happen once in a run, every seed's has to meet it where a stream as heavy
/// as half a pod, which nobody can foresee, does not decide; else the median seed's.
pub fn judge(rows: &[Row]) -> Vec<Judged> {
    let row =
        |policy: Policy, every_s: f64| rows.iter().find(|row| row.policy == policy && row.every_s == every_s);
    let (Some(sluice), Some(two)) = (row(Policy::Sluice, JUDGED_S), row(Policy::TwoChoices, JUDGED_S)) else {
        return Vec::new();
    };
    let name = |what: &str| format!("{what}, reports 5 s old");
    let mut judged = vec![
        at_most(name("hottest pod / mean, 99 % of the time"), sluice.hottest(0.99), HOTTEST_MAX),
        at_most(
            name("seconds in 1,000 with a pod above capacity"),
            sluice.mean(Figures::overfull),
            OVERFULL_MAX,
        ),
        at_least(
            name("bytes per pod and table / two choices"),
            sluice.median(Figures::per_pair) / two.median(Figures::per_pair),
            PER_PAIR_MIN,
        ),
        at_least(name("reconnects to the same pod, least seed"), sluice.least(Figures::sticky), STICKY_MIN),
        at_most(
            name("hottest pod / mean, 5 s after a death"),
            sluice.median(Figures::after_death),
            HOTTEST_DEATH_MAX,
        ),
        at_most(name("hottest new pod / mean, all seeds"), sluice.greatest(Figures::new_pod), 1.0),
        at_most(
            name("streams moved twice in 5 min, all seeds"),
            sluice.greatest(|run| run.moved_again as f64),
            0.0,
        ),
    ];
    if let Some(old) = row(Policy::Sluice, OLD_S) {
        let name = "hottest pod / mean, 99 % of the time, reports 15 s old".to_owned();
        judged.insert(1, at_most(name, old.hottest(0.99), HOTTEST_OLD_MAX));
    }
    judged
}

fn judge_at_size(sluice: &Figures, two: &Figures) -> Vec<Judged> {
    let name = |what: &str| format!("2,000 pods: {what}");
    vec![
        at_most(name("hottest pod / mean, 99 % of the time"), quantile(sluice.calm(), 0.99), HOTTEST_MAX),
        at_most(name("seconds in 1,000 with a pod above capacity"), sluice.overfull(), OVERFULL_MAX),
        at_least(
            name("bytes per pod and table / two choices"),
            sluice.per_pair() / two.per_pair(),
            PER_PAIR_MIN,
        ),
        at_least(name("reconnects to the same pod"), sluice.sticky(), STICKY_MIN),
        at_most(name("hottest pod / mean, 5 s after a death"), sluice.after_death(), HOTTEST_DEATH_MAX),
        at_most(name("hottest new pod / mean"), sluice.new_pod(), 1.0),
        at_most(name("streams moved twice in 5 min"), sluice.moved_again as f64, 0.0),
    ]
}

fn at_most(name: String, value: f64, most: f64) -> Judged {
    Judged { name, value, aim: Aim::AtMost(most) }
}

fn at_least(name: String, value: f64, least: f64) -> Judged {
    Judged { name, value, aim: Aim::AtLeast(least) }
}

impl Judged {
    /// Whether the aim is met; of what is not a number it is not.
    pub fn is_met(&self) -> bool {
        match self.aim {
            Aim::AtLeast(least) => self.value >= least,
            Aim::AtMost(most) => self.value <= most,
        }
    }
}

impl Row {
    /// One policy, for each seed.
    pub fn new(policy: Policy, every_s: f64, seeds: u64) -> Self {
        let runs = (1..=seeds).map(|seed| World::new(small(seed, policy, every_s)).run()).collect();
        Self { policy, every_s, runs }
    }

    fn hottest(&self, share: f64) -> f64 {
        quantile(self.runs.iter().flat_map(Figures::calm), share)
    }

    fn median(&self, value: impl Fn(&Figures) -> f64) -> f64 {
        quantile(self.runs.iter().map(value), 0.5)
    }

    fn mean(&self, value: impl Fn(&Figures) -> f64) -> f64 {
        self.runs.iter().map(value).sum::<f64>() / self.runs.len() as f64
    }

    fn greatest(&self, value: impl Fn(&Figures) -> f64) -> f64 {
        self.runs.iter().map(value).fold(f64::NAN, f64::max)
    }

    fn least(&self, value: impl Fn(&Figures) -> f64) -> f64 {
        self.runs.iter().map(value).fold(f64::NAN, f64::min)
    }
}

impl Outcome {
    /// Whether every aim is met.
    pub fn is_met(&self) -> bool {
        self.judged.iter().all(Judged::is_met)
    }

    /// Tables for people.
    pub fn to_text(&self) -> String {
        let mut text = format!(
            "{:<20} {:>7} {:>15} {:>8} {:>9} {:>9} {:>14} {:>7}\n",
            "policy",
            "reports",
            "hottest/mean",
            "fullest",
            "per pair",
            "same pod",
            "after a death",
            "new pod"
        );
        for row in &self.rows {
            // To a text nothing fails to be written.
            let _ = writeln!(
                text,
                "{:<20} {:>5} s {:>7.2} ({:.2}) {:>8.2} {:>9.4} {:>7.1} % {:>7.2} ({:.2}) {:>7.2}",
                row.policy.name(),
                row.every_s,
                row.hottest(0.5),
                row.hottest(0.99),
                row.greatest(Figures::fullest),
                row.median(Figures::per_pair),
                100.0 * row.median(Figures::sticky),
                row.median(Figures::after_death),
                row.greatest(Figures::after_death),
                row.greatest(Figures::new_pod),
            );
        }
        for judged in &self.judged {
            let Judged { name, value, aim } = judged;
            let aim = match aim {
                Aim::AtLeast(least) => format!("at least {least}"),
                Aim::AtMost(most) => format!("at most {most}"),
            };
            let verdict = if judged.is_met() { "met" } else { "MISSED" };
            let _ = writeln!(text, "{name:<66} {value:>7.3}  {aim:<14} {verdict}");
        }
        for (pods, rate) in &self.decisions {
            let _ = writeln!(text, "decisions per second and core, {pods} pods: {rate:.0}");
        }
        text
    }

    /// Writes the plots into a directory.
    ///
    /// # Errors
    /// Where it cannot be written.
    pub fn write_plots(&self, dir: &Path) -> anyhow::Result<()> {
        std::fs::create_dir_all(dir).with_context(|| dir.display().to_string())?;
        for (name, svg) in &self.plots {
            let path = dir.join(name);
            std::fs::write(&path, svg).with_context(|| path.display().to_string())?;
        }
        Ok(())
    }
}

fn line(name: &str, figures: &Figures) -> Line {
    let points = figures.samples.iter().map(|sample| (sample.at_s, sample.ratio())).collect();
    Line { name: name.to_owned(), points, is_stepped: false }
}

fn marks(scenario: &Scenario) -> Vec<Mark> {
    let mark = |x: f64, name: &str| Mark { x, name: name.to_owned() };
    let joiners = format!("{} join", scenario.joiners);
    vec![
        mark(scenario.storm_at_s, "a quarter reconnects"),
        mark(scenario.death_at_s, "a pod dies"),
        mark(scenario.join_at_s, &joiners),
    ]
}

fn plots(rows: &[Row]) -> anyhow::Result<Vec<(&'static str, String)>> {
    let judged = || rows.iter().filter(|row| row.every_s == JUDGED_S);
    // The hash stands at five times the mean: in one plot with it nothing else could be seen.
    let lines = judged().filter(|row| row.policy != Policy::Hash);
    let lines = lines.filter_map(|row| Some(line(row.policy.name(), row.runs.first()?)));
    let balance = TimePlot {
        title: "Hottest pod, reports 5 s old: 20 pods, 3,000 streams, one seed".to_owned(),
        x: "time, s".to_owned(),
        y: "load of the hottest pod / mean".to_owned(),
        y_to: 1.5,
        lines: lines.collect(),
        marks: marks(&small(1, Policy::Sluice, JUDGED_S)),
        levels: vec![Level { y: HOTTEST_MAX, name: "aim".to_owned() }],
        ..TimePlot::default()
    };
    let two = judged().find(|row| row.policy == Policy::TwoChoices).map(|row| row.median(Figures::per_pair));
    let files = BarPlot {
        title: "Data of one table that one pod gathers in a second: the larger, the larger are files"
            .to_owned(),
        x: "MB/s per pod and table, pods of 200 MB/s".to_owned(),
        bars: judged()
            .map(|row| (row.policy.name().to_owned(), mb_per_s(row.median(Figures::per_pair))))
            .collect(),
        levels: two
            .map(|two| Level {
                y: mb_per_s(PER_PAIR_MIN * two),
                name: format!("{PER_PAIR_MIN} × two choices"),
            })
            .into_iter()
            .collect(),
    };
    Ok(vec![("placement-balance.svg", balance.to_svg()?), ("placement-files.svg", files.to_svg()?)])
}

fn mb_per_s(load: f64) -> f64 {
    load * CAPACITY_BYTES_PER_S / 1e6
}

fn size_plot(sluice: &Figures, two: &Figures) -> anyhow::Result<String> {
    let new = sluice.samples.iter().map(|sample| (sample.at_s, sample.new / sample.mean)).collect();
    let plot = TimePlot {
        title: "2,000 pods, 1,000,000 streams, reports 5 s old".to_owned(),
        x: "time, s".to_owned(),
        y: "load / mean".to_owned(),
        y_to: 1.5,
        lines: vec![
            line("hottest pod", sluice),
            line("hottest pod, two choices", two),
            Line { name: "hottest new pod".to_owned(), points: new, is_stepped: false },
        ],
        marks: marks(&large(Policy::Sluice)),
        levels: vec![Level { y: HOTTEST_MAX, name: "aim".to_owned() }],
        ..TimePlot::default()
    };
    plot.to_svg()
}

/// How many streams one core places, with what the view has to note for each. Tables are as popular as in the simulated
/// pool, so that the hottest stand on hundreds of pods, and are asked for most often.
pub fn decisions_per_s(pods: usize) -> f64 {
    let mut rng = StdRng::seed_from_u64(1);
    let names: Vec<TableName> = (0..pods * 10).filter_map(|n| format!("table_{n}").parse().ok()).collect();
    let shares = shares(names.len());
    let address = PodAddress::Tcp("127.0.0.1:1".to_owned());
    let members =
        (0..pods).filter_map(|n| Some(PodView::active(format!("pod-{n}").parse().ok()?, address.clone())));
    let mut view = PoolView::new(members);
    view.gateways = 6;
    let start = Instant::now();
    for pod in view.pods().to_vec() {
        let ingress = rng.random_range(0.4..0.7);
        // Of 512 streams; a report names each table once.
        let mut streams: BTreeMap<usize, u32> = BTreeMap::new();
        for _ in 0..512 {
            *streams.entry(draw_table(&shares, &mut rng)).or_default() += 1;
        }
        let tables = streams.into_iter().take(TABLES_REPORTED_MAX).map(|(table, streams)| TableLoad {
            table: names[table].clone(),
            bytes_per_s: f64::from(streams) * ingress * CAPACITY_BYTES_PER_S / 512.0,
            streams,
        });
        let tables = tables.collect();
        let bytes_per_s = ingress * CAPACITY_BYTES_PER_S;
        let report =
            LoadReport { sequence: 1, ingress, bytes_per_s, streams: 512, tables, ..LoadReport::default() };
        view.report(&pod.id, report, start);
    }
    let asked: Vec<usize> = (0..DECISIONS).map(|_| draw_table(&shares, &mut rng)).collect();
    let begun = Instant::now();
    let mut placed = 0_usize;
    for table in asked {
        let now = Instant::now();
        view.advance(now);
        if let Ok(placement) = place(&view, &names[table], &StreamHints::default(), &mut rng) {
            let opened = view.placed(&placement.pod, placement.adds, now);
            // As if it had ended: else the pool would only fill.
            view.give_back(&opened);
            placed += 1;
        }
    }
    placed as f64 / begun.elapsed().as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Three seeds, and reports of one age: seconds. `make sim-placement` has all.
    #[test]
    fn a_small_pool_meets_the_aims() {
        println!("seeds 1 to 3");
        let rows = [Row::new(Policy::Sluice, JUDGED_S, 3), Row::new(Policy::TwoChoices, JUDGED_S, 3)];
        let judged = judge(&rows);
        let missed: Vec<&Judged> = judged.iter().filter(|judged| !judged.is_met()).collect();
        assert!(judged.len() >= 7 && missed.is_empty(), "{missed:?}");
    }

    #[test]
    fn what_herds_is_caught() {
        println!("seed 1");
        let rows = [Row::new(Policy::LeastLoaded, JUDGED_S, 1)];
        assert!(rows[0].hottest(0.99) > 2.0, "the world is too kind: {}", rows[0].hottest(0.99));
    }

    #[test]
    fn the_same_seed_gives_the_same_history() {
        let shorter = |seed: u64| Scenario { until_s: 450.0, ..small(seed, Policy::Sluice, 1.0) };
        let loads = |seed: u64| {
            let figures = World::new(shorter(seed)).run();
            let samples =
                figures.samples.iter().map(|sample| (sample.hottest.to_bits(), sample.per_pair.to_bits()));
            (samples.collect::<Vec<_>>(), figures.placed, figures.moves)
        };
        assert_eq!(loads(3), loads(3));
        assert_ne!(loads(3), loads(4));
    }
}
