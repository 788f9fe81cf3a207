//! A day of a pool that scales itself, with the autoscaler's own `desired_pods`: by what it sees alone, with forecasts, and
//! beside an oracle that knows the whole day.
//!
//! Streams stay where they are: new ones, and those that connect again, go to the less loaded of two pods by the last
//! reports; pods take 20 s to start, and a pod that goes is drained. Shedding is left out, which is the harder case.
//!
//! *Owns*: the days, the bounds that a day has to keep, the table and the plots. *Does not own*: the pool (`scaling/world.rs`).

mod world;

use std::fmt;
use std::time::Duration;

use sluice_autoscaler::policy::{History, Policy, desired_pods};

use crate::plot::{Line, Mark, TimePlot};
use world::World;

const HOUR: u64 = 3600;
const DAY: u64 = 24 * HOUR;
/// The mean load above which a pool is too small: where placement stops.
const BOUND: f64 = 0.9;
/// The load that the oracle makes its pool for: that at which the policy would add pods.
const ORACLE_LOAD: f64 = 0.65;
/// The oracle keeps a pod that it needs again within this.
const ORACLE_QUIET: u64 = 600;
/// From a decision to a pod that takes streams.
pub const START_S: u64 = 20;

/// Longest that a pool may be too small, all told: three times the proof and the start of pods, as three doublings take.
const OVER_S_MAX: u64 = 90;
/// Changes of direction within any hour.
const TURNS_MAX: usize = 2;
/// Where the pool is above its aim for longer than this without forecasts, they halve the time at least.
const TIGHT_S: u64 = 300;
/// Pod hours of a whole day beside the oracle's.
const COST_MAX: f64 = 1.25;

/// What happens on the day.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// Four times as many streams, over three hours.
    Campaign,
    /// A firmware makes a cohort of devices send a hundred times as much, from one second to the next, for an hour.
    FirmwareFault,
    /// One tenant grows to two fifths of the traffic, and stays.
    Whale,
}

impl Event {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Campaign, Self::FirmwareFault, Self::Whale];

    /// In the table, and in the names of plots.
    pub fn name(self) -> &'static str {
        match self {
            Self::Campaign => "campaign",
            Self::FirmwareFault => "firmware-fault",
            Self::Whale => "whale",
        }
    }

    /// Second of the day at which it begins.
    pub fn begins(self) -> u64 {
        match self {
            Self::Campaign => 9 * HOUR,
            Self::FirmwareFault => 14 * HOUR,
            Self::Whale => 8 * HOUR,
        }
    }

    /// How many times as many streams as on other days.
    fn surge(self, second: u64) -> f64 {
        match self {
            Self::Campaign => {
                let since = second.saturating_sub(self.begins()) as f64 / HOUR as f64;
                // Up within three quarters of an hour, down within two hours.
                1.0 + 3.0 * (since / 0.75).min(1.0) * (1.0 - (since - 3.0) / 2.0).clamp(0.0, 1.0)
            }
            _ => 1.0,
        }
    }

    /// How many times as much each device of the cohort sends.
    fn fault(self, second: u64) -> f64 {
        let is_on = self == Self::FirmwareFault && (self.begins()..self.begins() + HOUR).contains(&second);
        if is_on { 100.0 } else { 1.0 }
    }

    /// How many times as much the tenant sends: a twentieth of the traffic becomes two fifths within eight hours.
    fn whale(self, second: u64) -> f64 {
        let since = second.saturating_sub(self.begins()) as f64 / (8 * HOUR) as f64;
        if self == Self::Whale { 1.0 + 12.0 * since.min(1.0) } else { 1.0 }
    }
}

/// What is simulated.
#[derive(Debug, Clone)]
pub struct Options {
    /// The same seed gives the same days.
    pub seed: u64,
    /// Days that the autoscaler has seen before the one that counts.
    pub days_before: u64,
    /// The part of the day that is simulated and counts, as seconds of it.
    pub hours: std::ops::Range<u64>,
    /// From one look of the autoscaler to the next.
    pub interval_s: u64,
    /// The events.
    pub events: Vec<Event>,
}

impl Default for Options {
    fn default() -> Self {
        Self { seed: 1, days_before: 1, hours: 0..24, interval_s: 2, events: Event::ALL.to_vec() }
    }
}

/// How one way to scale did on one day.
#[derive(Debug, Clone)]
pub struct Figures {
    /// `reactive`, `predictive` or `oracle`.
    pub name: &'static str,
    /// Seconds in which all pods together were above the bound.
    pub over_s: u64,
    /// Seconds in which they were above the load that the pool is made for.
    pub tight_s: u64,
    /// The longest time on end with some pod full.
    pub full_s: u64,
    /// Opens that were refused, and tried again.
    pub refused: u64,
    /// Hours of all pods, those that start and drain included.
    pub pod_hours: f64,
    /// The most pods.
    pub pods_max: u32,
    /// Streams moved by drains.
    pub moves: u64,
    /// The most changes of direction within an hour.
    pub turns: usize,
    /// Active pods each minute.
    pub pods: Vec<(f64, f64)>,
}

/// One day, each way.
#[derive(Debug, Clone)]
pub struct Day {
    /// What happened.
    pub event: Event,
    /// How the two policies and the oracle did.
    pub ways: Vec<Figures>,
    /// Pods' worth of traffic each minute.
    pub demand: Vec<(f64, f64)>,
    /// Bounds that were missed, as sentences.
    pub missed: Vec<String>,
}

/// All days.
#[derive(Debug, Clone)]
pub struct Report {
    /// In order.
    pub days: Vec<Day>,
}

/// Simulates.
pub fn run(options: &Options, note: &dyn Fn(&str)) -> Report {
    let day = |event: &Event| {
        note(&format!("{}: seed {}", event.name(), options.seed));
        run_day(options, *event)
    };
    Report { days: options.events.iter().map(day).collect() }
}

fn run_day(options: &Options, event: Event) -> Day {
    let (reactive, _) = follow(options, event, "reactive", false);
    let (predictive, demand) = follow(options, event, "predictive", true);
    let oracle = oracle(&demand);
    let minutes = |values: &[f64]| {
        let every = values.iter().enumerate().step_by(60);
        every
            .map(|(second, value)| {
                ((options.hours.start * HOUR) as f64 / 3600.0 + second as f64 / 3600.0, *value)
            })
            .collect()
    };
    let oracle_pods: Vec<f64> = oracle.iter().map(|pods| f64::from(*pods)).collect();
    let known = Figures {
        name: "oracle",
        over_s: demand
            .iter()
            .zip(&oracle)
            .filter(|(demand, pods)| **demand > BOUND * f64::from(**pods))
            .count() as u64,
        tight_s: 0,
        full_s: 0,
        refused: 0,
        pod_hours: oracle_pods.iter().sum::<f64>() / HOUR as f64,
        pods_max: oracle.iter().copied().max().unwrap_or(0),
        moves: 0,
        turns: 0,
        pods: minutes(&oracle_pods),
    };
    let mut day =
        Day { event, ways: vec![reactive, predictive, known], demand: minutes(&demand), missed: Vec::new() };
    day.missed = misses(&day, options.hours == (0..24));
    day
}

fn misses(day: &Day, is_whole: bool) -> Vec<String> {
    let [reactive, predictive, oracle] = &day.ways[..] else { return Vec::new() };
    let mut missed = Vec::new();
    let mut check = |is_kept: bool, what: String| {
        if !is_kept {
            missed.push(format!("{}: {what}", day.event.name()));
        }
    };
    for way in [reactive, predictive] {
        let Figures { name, over_s, turns, pod_hours, .. } = way;
        check(
            *over_s <= OVER_S_MAX,
            format!("{name} is above the bound for {over_s} s, at most {OVER_S_MAX}"),
        );
        check(
            *turns <= TURNS_MAX,
            format!("{name} changes direction {turns} times within an hour, at most {TURNS_MAX}"),
        );
        let cost = pod_hours / oracle.pod_hours;
        check(
            cost <= COST_MAX || !is_whole,
            format!("{name} takes {cost:.2} times the oracle's pod hours, at most {COST_MAX}"),
        );
    }
    let (with, without) = (predictive.over_s, reactive.over_s);
    check(
        with <= without,
        format!("with forecasts the pool is above the bound for {with} s, {without} without"),
    );
    let (with, without) = (predictive.tight_s, reactive.tight_s);
    let halves = without <= TIGHT_S || 2 * with <= without;
    check(
        halves,
        format!("with forecasts the pool is above {ORACLE_LOAD} for {with} s, more than half of {without} s"),
    );
    missed
}

/// As few pods as keep the load, each started in time and kept where it is needed again soon.
fn oracle(demand: &[f64]) -> Vec<u32> {
    let needs: Vec<u32> = demand.iter().map(|demand| (demand / ORACLE_LOAD).ceil().max(1.0) as u32).collect();
    // It runs from a pod's start before the need to the end of a short while without it.
    let from_need = |second: usize| {
        let from = second.saturating_sub(ORACLE_QUIET as usize);
        let to = (second + START_S as usize).min(needs.len() - 1);
        let again = (second + ORACLE_QUIET as usize).min(needs.len() - 1);
        let kept = needs[from..=second].iter().max().min(needs[second..=again].iter().max());
        needs[second..=to].iter().max().max(kept).copied().unwrap_or(1)
    };
    (0..needs.len()).map(from_need).collect()
}

/// A day as the policy goes through it; and the demand of each second that counts.
fn follow(options: &Options, event: Event, name: &'static str, predicts: bool) -> (Figures, Vec<f64>) {
    let policy = Policy { predicts, max: 64, start: Duration::from_secs(START_S), ..Policy::default() };
    let mut world = World::new(options.seed, options.hours.start * HOUR);
    let mut history = History::new();
    let mut figures = Figures {
        name,
        over_s: 0,
        tight_s: 0,
        full_s: 0,
        refused: 0,
        pod_hours: 0.0,
        pods_max: 0,
        moves: 0,
        turns: 0,
        pods: Vec::new(),
    };
    let (mut demand, mut turns, mut full_s) = (Vec::new(), Turns::default(), 0);
    let last = options.days_before * DAY + options.hours.end * HOUR;
    for second in options.hours.start * HOUR..last {
        let (of_day, counts) =
            (second % DAY, second >= options.days_before * DAY + options.hours.start * HOUR);
        // The event is of the last day alone.
        let traffic = Traffic::at(of_day, (second / DAY == options.days_before).then_some(event));
        world.step(second, &traffic);
        if second % options.interval_s == 0 {
            let now_ms = second * 1000;
            history.observe(&world.observation(now_ms));
            let decision = desired_pods(&history, &policy, now_ms);
            world.scale(second, decision.pods);
            turns.note(second, decision.direction(), counts);
        }
        if counts {
            full_s = if world.is_some_full() { full_s + 1 } else { 0 };
            figures.full_s = figures.full_s.max(full_s);
            let load = world.demand() / f64::from(world.active().max(1));
            figures.over_s += u64::from(load > BOUND);
            figures.tight_s += u64::from(load > ORACLE_LOAD);
            figures.pod_hours += f64::from(world.processes()) / HOUR as f64;
            figures.pods_max = figures.pods_max.max(world.processes());
            if demand.len() % 60 == 0 {
                figures.pods.push((of_day as f64 / HOUR as f64, f64::from(world.active())));
            }
            demand.push(world.demand());
        } else {
            world.forget_counts();
        }
    }
    (figures.refused, figures.moves) = world.counts();
    figures.turns = turns.most_in_an_hour();
    (figures, demand)
}

/// What the traffic of a second is made of, beside that of an ordinary night.
#[derive(Debug, Clone, Copy)]
struct Traffic {
    /// Times as many streams.
    streams: f64,
    /// Times as much from each device.
    fault: f64,
    /// Times as much from the tenant.
    whale: f64,
}

impl Traffic {
    fn at(second: u64, event: Option<Event>) -> Self {
        let hours = second as f64 / HOUR as f64;
        // The least at four in the morning, the most twelve hours later.
        let daily = 1.0 + 0.4 * ((hours - 10.0) / 24.0 * std::f64::consts::TAU).sin();
        Self {
            streams: daily * event.map_or(1.0, |event| event.surge(second)),
            fault: event.map_or(1.0, |event| event.fault(second)),
            whale: event.map_or(1.0, |event| event.whale(second)),
        }
    }
}

#[derive(Default)]
struct Turns {
    before: Option<&'static str>,
    at: Vec<u64>,
}

impl Turns {
    fn note(&mut self, second: u64, direction: &'static str, counts: bool) {
        if direction == "hold" {
            return;
        }
        if counts && self.before.is_some_and(|before| before != direction) {
            self.at.push(second);
        }
        self.before = Some(direction);
    }

    fn most_in_an_hour(&self) -> usize {
        let within = |from: &u64| self.at.iter().filter(|at| (*from..from + HOUR).contains(*at)).count();
        self.at.iter().map(within).max().unwrap_or(0)
    }
}

impl Report {
    /// Whether all bounds are kept.
    pub fn is_met(&self) -> bool {
        self.days.iter().all(|day| day.missed.is_empty())
    }
}

impl Day {
    /// The day as a plot.
    ///
    /// # Errors
    /// It has no minute.
    pub fn to_svg(&self) -> anyhow::Result<String> {
        let of_ways = self.ways.iter().map(|way| Line {
            name: way.name.to_owned(),
            points: way.pods.clone(),
            is_stepped: true,
        });
        let demand = Line { name: "demand".to_owned(), points: self.demand.clone(), is_stepped: false };
        let plot = TimePlot {
            title: format!("Pods of a day with a {}", self.event.name()),
            x: "hour of the day".to_owned(),
            y: "pods".to_owned(),
            lines: std::iter::once(demand).chain(of_ways).collect(),
            marks: vec![Mark {
                x: self.event.begins() as f64 / HOUR as f64,
                name: self.event.name().to_owned(),
            }],
            ..TimePlot::default()
        };
        plot.to_svg()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "| day with a | scaled | above {BOUND}, s | above {ORACLE_LOAD}, s | some pod full, s on end | refused opens \
             | pod hours | of the oracle's | most pods | moves | turns/h |"
        )?;
        writeln!(f, "|---|---|---|---|---|---|---|---|---|---|---|")?;
        for day in &self.days {
            let oracle = day.ways.last().map_or(1.0, |way| way.pod_hours);
            for way in &day.ways {
                let Figures {
                    name, over_s, tight_s, full_s, refused, pod_hours, pods_max, moves, turns, ..
                } = way;
                let cost = pod_hours / oracle;
                writeln!(
                    f,
                    "| {} | {name} | {over_s} | {tight_s} | {full_s} | {refused} | {pod_hours:.1} | {cost:.2} | {pods_max} \
                     | {moves} | {turns} |",
                    day.event.name()
                )?;
            }
        }
        for missed in self.days.iter().flat_map(|day| &day.missed) {
            writeln!(f, "MISSED: {missed}")?;
        }
        let verdict = if self.is_met() { "All bounds are kept" } else { "Not all bounds are kept" };
        write!(
            f,
            "{verdict}: at most {OVER_S_MAX} s above {BOUND}, {TURNS_MAX} changes of direction within an hour, {COST_MAX} times \
             the oracle's pod hours; with forecasts not longer above {BOUND} than without, and half as long above {ORACLE_LOAD}."
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn short(event: Event, hours: std::ops::Range<u64>) -> Report {
        let options =
            Options { days_before: 0, hours, interval_s: 5, events: vec![event], ..Options::default() };
        run(&options, &|_| {})
    }

    #[test]
    fn a_fault_is_met_within_its_bounds() {
        let report = short(Event::FirmwareFault, 13..16);
        assert!(report.is_met(), "{report}");
        let reactive = &report.days[0].ways[0];
        assert!(reactive.pods_max >= 10 && reactive.over_s > 0, "there is nothing to meet: {report}");
        assert!(report.days[0].to_svg().expect("a plot").contains("firmware-fault"));
    }

    #[test]
    fn the_same_seed_gives_the_same_day() {
        let figures = || format!("{:?}", short(Event::Campaign, 9..10));
        assert_eq!(figures(), figures());
    }

    #[test]
    fn the_oracle_is_there_in_time_and_does_not_swing() {
        let mut demand = vec![0.6; 3 * HOUR as usize];
        demand[5000..5100].fill(2.5);
        demand[5400..5500].fill(2.5);
        let pods = oracle(&demand);
        let (before, at) = (5000 - START_S as usize, 4);
        assert_eq!((pods[before - 1], pods[before], pods[5250], pods[5399], pods[5600]), (1, at, at, at, 1));
    }

    #[test]
    fn a_bound_that_is_missed_is_told() {
        let mut report = short(Event::Whale, 8..9);
        report.days[0].ways[1].over_s = OVER_S_MAX + 1;
        report.days[0].ways[0].turns = 3;
        report.days[0].ways[1].pod_hours = 1.3 * report.days[0].ways[2].pod_hours;
        let missed = misses(&report.days[0], true);
        assert!(missed.iter().any(|one| one.contains("predictive is above the bound")), "{missed:?}");
        assert!(missed.iter().any(|one| one.contains("changes direction 3 times")), "{missed:?}");
        assert!(missed.iter().any(|one| one.contains("predictive takes 1.30 times")), "{missed:?}");
        report.days[0].missed = missed;
        assert!(!report.is_met() && report.to_string().contains("MISSED"));
    }
}
