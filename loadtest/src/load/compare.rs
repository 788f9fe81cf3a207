//! What two reports say of each other: whether a change made something faster or slower, as far as their runs can tell.
//!
//! A difference is shown where two tests agree, both at 95 %: ranks that chance alone would not give (the exact two-sided
//! permutation test of the rank sum, H. Mann and D. Whitney, 1947), and an interval of the ratio of the medians, by
//! resampling the runs (the percentile bootstrap, B. Efron, 1979; seeded, so that the same reports compare the same), that
//! does not hold 1. Three runs against three can never show anything: of the 20 ways to deal out their ranks two are as far
//! apart as can be, which is one in ten.
//!
//! *Owns*: the comparison and its words. A core.
//! *Does not own*: the reports.

use std::fmt;

use anyhow::ensure;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde::Serialize;

use super::report::{Better, Report, number};
use crate::bench;

/// Beyond it chance is not to blame.
const P_MAX: f64 = 0.05;
/// Loads that are farther apart are not the same.
const DUE_APART_MAX: f64 = 0.02;
/// In a scenario's text.
const FULL_RATE: &str = "rate = \"full\"";
/// The machine's speeds differ so far from one moment to the next.
const SPEED_APART_MAX: f64 = 0.2;
const RESAMPLES: usize = 10_000;
const SEED: u64 = 1;
/// More ways to deal out ranks are not all tried.
const WAYS_MAX: f64 = 200_000.0;

/// What is said of a figure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Word {
    /// The second is better.
    Better,
    /// The second is worse.
    Worse,
    /// The runs tell them apart, and are not of the same work.
    Differs,
    /// The runs do not tell them apart.
    NoDifferenceShown,
    /// There are too few runs to tell anything apart.
    NothingCanBeSaid,
}

/// One figure of both.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Compared {
    /// Which.
    pub name: String,
    /// Of what.
    pub unit: String,
    /// Of the first report's runs.
    pub before: f64,
    /// Of the second's.
    pub after: f64,
    /// After in befores; None where that is 0.
    pub ratio: Option<f64>,
    /// Of the ratio, at 95 %.
    pub interval: Option<(f64, f64)>,
    /// How likely chance alone sets the ranks so far apart.
    pub p: f64,
    /// What it comes to.
    pub word: Word,
    /// Whether it is of those by which the second report is worse: the fewer they are, the rarer chance alone is a verdict.
    pub decides: bool,
}

/// Both reports.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Comparison {
    /// Runs of each.
    pub runs: (usize, usize),
    /// In what else they differ.
    pub differ: Vec<String>,
    /// Figures that both have.
    pub figures: Vec<Compared>,
}

/// Those that decide, beside figures that the scenario has limits for.
const DECIDE: [&str; 3] = ["records durable", "ack p99", "committed p99"];

impl Comparison {
    /// Whether the second report is shown to be worse in what decides.
    pub fn is_worse(&self) -> bool {
        self.figures.iter().any(|figure| figure.decides && figure.word == Word::Worse)
    }
}

/// Compares two reports of one scenario.
///
/// # Errors
/// They are of different scenarios, unless that is said to be meant.
pub fn compare(before: &Report, after: &Report, force: bool) -> anyhow::Result<Comparison> {
    let mut differ = Vec::new();
    let mut same = |what: &str, one: &str, other: &str| {
        if one != other {
            differ.push(format!("{what}: {one:?} and {other:?}"));
        }
    };
    same("scenario", &before.scenario, &after.scenario);
    same("changes of it", &before.changes, &after.changes);
    let has_same_text = before.text == after.text;
    same("its text", if has_same_text { "" } else { "one" }, if has_same_text { "" } else { "another" });
    ensure!(
        force || differ.is_empty(),
        "these are not of the same scenario ({}): --force compares them all the same",
        differ.join("; ")
    );
    let is_forced = !differ.is_empty();
    differ.extend(other_machine(before, after));
    let other_work = is_forced.then(|| other_work(before, after)).flatten();
    differ.extend(other_work.clone());
    let runs = (before.runs.len(), after.runs.len());
    let names = before.runs.first().map(|run| run.figures.clone()).unwrap_or_default();
    let limited: Vec<&str> =
        before.runs.iter().flat_map(|run| &run.checks).map(|check| check.name.as_str()).collect();
    let values = |report: &Report, name: &str| -> Vec<f64> {
        report.runs.iter().filter_map(|run| run.figure(name)).collect()
    };
    let figures = names.iter().filter(|figure| figure.better != Better::Neither).filter_map(|figure| {
        let (old, new) = (values(before, &figure.name), values(after, &figure.name));
        (!old.is_empty() && !new.is_empty()).then(|| {
            let (ratio, interval) = ratio(&old, &new);
            let p = chance(&old, &new);
            let word =
                word((old.len(), new.len()), figure.better, (median(&old), median(&new)), (p, interval));
            let word = match word {
                Word::Better | Word::Worse if other_work.is_some() => Word::Differs,
                word => word,
            };
            let (name, unit) = (figure.name.clone(), figure.unit.clone());
            let decides = DECIDE.contains(&name.as_str()) || limited.contains(&name.as_str());
            let (before, after) = (median(&old), median(&new));
            Compared { name, unit, before, after, ratio, interval, p, word, decides }
        })
    });
    let figures = figures.collect();
    Ok(Comparison { runs, differ, figures })
}

/// What is different about where they were made.
fn other_machine(before: &Report, after: &Report) -> Vec<String> {
    let (one, other) = (&before.machine, &after.machine);
    let mut differ = Vec::new();
    let mut same = |what: &str, one: String, other: String| {
        if one != other {
            differ.push(format!("{what}: {one} and {other}"));
        }
    };
    same("processor", one.processor.clone(), other.processor.clone());
    same("cores", one.cores.to_string(), other.cores.to_string());
    same("optimised", (!one.is_debug).to_string(), (!other.is_debug).to_string());
    if let (Some(before), Some(after)) = (&before.limits, &after.limits) {
        for ((what, one), (_, other)) in before.speeds().into_iter().zip(after.speeds()) {
            if is_apart(one, other, SPEED_APART_MAX) {
                let (one, other) = (number(one), number(other));
                differ.push(format!("the machine's speed, {what}: {one} and {other} MB/s"));
            }
        }
    }
    differ
}

/// How their loads differ. What is sent as fast as there is room is due as fast as the service takes it.
fn other_work(before: &Report, after: &Report) -> Option<String> {
    let due = |report: &Report| -> Option<f64> {
        let due: Vec<f64> = report.runs.iter().filter_map(|run| run.figure("records due")).collect();
        (!due.is_empty() && !report.text.contains(FULL_RATE)).then(|| median(&due))
    };
    let (one, other) = (due(before)?, due(after)?);
    is_apart(one, other, DUE_APART_MAX).then(|| {
        let (one, other) = (number(one), number(other));
        format!("their work: {one} and {other} records/s were due, so that no figure is better or worse")
    })
}

fn is_apart(one: f64, other: f64, share: f64) -> bool {
    (one - other).abs() > one.max(other) * share
}

fn word(
    runs: (usize, usize),
    better: Better,
    (before, after): (f64, f64),
    (p, interval): (f64, Option<(f64, f64)>),
) -> Word {
    // Two: as far apart as can be, in the one direction and in the other.
    if 2.0 / ways(runs) > P_MAX {
        return Word::NothingCanBeSaid;
    }
    let excludes_1 = interval.is_none_or(|(low, high)| low > 1.0 || high < 1.0);
    match p <= P_MAX && excludes_1 && before != after {
        false => Word::NoDifferenceShown,
        true if (after > before) == (better == Better::Higher) => Word::Better,
        true => Word::Worse,
    }
}

fn median(values: &[f64]) -> f64 {
    bench::median(values, |value| *value)
}

/// Of the medians, and its interval.
fn ratio(before: &[f64], after: &[f64]) -> (Option<f64>, Option<(f64, f64)>) {
    if before.iter().any(|value| *value <= 0.0) {
        return (None, None);
    }
    let ratio = median(after) / median(before);
    if before.len() < 2 || after.len() < 2 {
        return (Some(ratio), None);
    }
    let mut random = StdRng::seed_from_u64(SEED);
    let mut again = |of: &[f64]| -> f64 {
        let drawn: Vec<f64> = (0..of.len()).map(|_| of[random.random_range(0..of.len())]).collect();
        median(&drawn)
    };
    let mut ratios: Vec<f64> = (0..RESAMPLES).map(|_| again(after) / again(before)).collect();
    ratios.sort_by(f64::total_cmp);
    let at = |share: f64| ratios[((RESAMPLES - 1) as f64 * share).round() as usize];
    (Some(ratio), Some((at(0.025), at(0.975))))
}

/// In how many ways ranks can be dealt out.
fn ways((one, other): (usize, usize)) -> f64 {
    (1..=one).map(|n| (other + n) as f64 / n as f64).product()
}

/// How likely the ranks are so far apart, or farther, where there is no difference.
fn chance(before: &[f64], after: &[f64]) -> f64 {
    let all: Vec<f64> = before.iter().chain(after).copied().collect();
    let (count, all_count) = (after.len(), all.len());
    let rank = |value: f64| {
        let below = all.iter().filter(|other| **other < value).count() as f64;
        let same = all.iter().filter(|other| **other == value).count() as f64;
        below + (same + 1.0) / 2.0
    };
    let ranks: Vec<f64> = all.iter().map(|value| rank(*value)).collect();
    let mean = count as f64 * (all_count as f64 + 1.0) / 2.0;
    let distance = |sum: f64| (sum - mean).abs();
    let seen = distance(ranks[before.len()..].iter().sum()) - 1e-9;
    let (mut ways_all, mut ways_far) = (0_u64, 0_u64);
    let mut take = |sum: f64| {
        ways_all += 1;
        ways_far += u64::from(distance(sum) >= seen);
    };
    if ways((before.len(), count)) <= WAYS_MAX {
        choose(&ranks, count, 0.0, &mut take);
    } else {
        let mut random = StdRng::seed_from_u64(SEED);
        for _ in 0..RESAMPLES {
            let mut left = ranks.clone();
            let sum = (0..count).map(|_| left.swap_remove(random.random_range(0..left.len()))).sum();
            take(sum);
        }
    }
    ways_far as f64 / ways_all.max(1) as f64
}

/// The sums of so many ranks, in all ways.
fn choose(ranks: &[f64], count: usize, sum: f64, take: &mut impl FnMut(f64)) {
    if count == 0 {
        return take(sum);
    }
    for first in 0..=ranks.len().saturating_sub(count) {
        let Some((rank, rest)) = ranks.get(first).map(|rank| (*rank, &ranks[first + 1..])) else { return };
        choose(rest, count - 1, sum + rank, take);
    }
}

impl Compared {
    fn word(&self) -> &'static str {
        let is_speed = matches!(self.unit.as_str(), "ms" | "/s" | "MB/s");
        match (self.word, is_speed, self.decides) {
            (Word::Better, true, _) => "faster",
            (Word::Worse, true, true) => "SLOWER",
            (Word::Worse, true, false) => "slower",
            (Word::Better, false, _) => "better",
            (Word::Worse, false, true) => "WORSE",
            (Word::Worse, false, false) => "worse",
            (Word::Differs, ..) => "differs",
            (Word::NoDifferenceShown, ..) => "no difference shown",
            (Word::NothingCanBeSaid, ..) => "nothing can be said",
        }
    }
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (before, after) = self.runs;
        writeln!(
            f,
            "A: {before} runs, B: {after} runs; medians, B in A's with its interval at 95 % (bootstrap), p (rank sum)"
        )?;
        for differ in &self.differ {
            writeln!(f, "they differ in {differ}")?;
        }
        if self.figures.iter().all(|figure| figure.word == Word::NothingCanBeSaid) {
            writeln!(
                f,
                "so few runs cannot tell chance from a difference: take four or more of each (--runs 5)"
            )?;
        }
        let shown = |word: &Word| !matches!(word, Word::NothingCanBeSaid | Word::NoDifferenceShown);
        if self.figures.iter().any(|figure| shown(&figure.word)) {
            let by_chance = self.figures.len() as f64 * P_MAX;
            writeln!(
                f,
                "each figure is judged by itself: were nothing different, up to {} of these {} would be said to be",
                number(by_chance),
                self.figures.len()
            )?;
        }
        let width = self.figures.iter().map(|figure| figure.name.chars().count()).max().unwrap_or(0);
        for figure in &self.figures {
            let ratio = figure.ratio.map_or("–".to_owned(), |ratio| format!("{ratio:.3}"));
            let interval =
                figure.interval.map_or(String::new(), |(low, high)| format!("{low:.3} to {high:.3}"));
            writeln!(
                f,
                "{:<width$}  {:>10} {:>10} {:<5}  {ratio:>7}  {interval:<16}  p {:.3}  {}",
                figure.name,
                number(figure.before),
                number(figure.after),
                figure.unit,
                figure.p,
                figure.word()
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::report::{Figure, Run};
    use super::*;

    fn said(before: &[f64], after: &[f64], better: Better) -> Word {
        let (_, interval) = ratio(before, after);
        let p = chance(before, after);
        word((before.len(), after.len()), better, (median(before), median(after)), (p, interval))
    }

    #[test]
    fn what_is_apart_is_told_apart_and_noise_is_not() {
        let (low, high) = ([10.0, 11.0, 10.5, 10.2, 10.8], [20.0, 21.0, 19.5, 20.2, 20.8]);
        assert_eq!(said(&low, &high, Better::Higher), Word::Better);
        assert_eq!(said(&low, &high, Better::Lower), Word::Worse);
        assert_eq!(said(&high, &low, Better::Lower), Word::Better);
        assert_eq!(said(&low, &low, Better::Higher), Word::NoDifferenceShown);
        let noisy = [10.1, 10.9, 10.4, 10.6, 10.3];
        assert_eq!(said(&low, &noisy, Better::Higher), Word::NoDifferenceShown);
    }

    #[test]
    fn few_runs_say_nothing_however_far_apart() {
        assert_eq!(said(&[1.0], &[100.0], Better::Higher), Word::NothingCanBeSaid);
        assert_eq!(said(&[1.0, 1.1, 1.2], &[9.0, 9.1, 9.2], Better::Higher), Word::NothingCanBeSaid);
        assert_eq!(said(&[1.0, 1.1, 1.2, 1.3], &[9.0, 9.1, 9.2, 9.3], Better::Higher), Word::Better);
    }

    #[test]
    fn chance_is_that_of_the_tables() {
        // Mann and Whitney's table: of 4 and 4, all above all has 1 of 70 on each side.
        assert!((chance(&[1.0, 2.0, 3.0, 4.0], &[5.0, 6.0, 7.0, 8.0]) - 2.0 / 70.0).abs() < 1e-9);
        assert!((chance(&[1.0, 2.0, 3.0], &[1.0, 2.0, 3.0]) - 1.0).abs() < 1e-9);
        let many: Vec<f64> = (0..30).map(f64::from).collect();
        assert!(chance(&many, &many) > 0.9, "sampled");
        assert_eq!(ways((3, 3)).round(), 20.0);
    }

    #[test]
    fn reports_of_different_scenarios_are_not_compared_unless_that_is_meant() {
        let report = |text: &str| Report::new("x".to_owned(), text.to_owned(), String::new(), String::new());
        compare(&report("a"), &report("a"), false).expect("the same");
        let error = compare(&report("a"), &report("b"), false).expect_err("another text").to_string();
        assert!(error.contains("text") && error.contains("--force"), "{error}");
        let forced = compare(&report("a"), &report("b"), true).expect("forced");
        assert_eq!(forced.differ.len(), 1);
    }

    #[test]
    fn of_different_work_no_figure_is_better() {
        let report = |due: f64, text: &str| {
            let mut report = Report::new("x".to_owned(), text.to_owned(), due.to_string(), String::new());
            for run in 0..5 {
                let figure = |name: &str, better, value| Figure {
                    name: name.to_owned(),
                    unit: "/s".to_owned(),
                    value: value + f64::from(run),
                    better,
                };
                let figures = vec![
                    figure("records due", Better::Neither, due),
                    figure("records durable", Better::Higher, due),
                ];
                report.runs.push(Run { figures, ..Run::default() });
            }
            report
        };
        let of = |due: f64, text: &str| {
            compare(&report(1_000.0, text), &report(due, text), true).expect("that is meant")
        };
        let (close, full) = (of(1_010.0, ""), of(2_000.0, FULL_RATE));
        assert_eq!((close.figures[0].word, close.differ.len()), (Word::Better, 1));
        assert_eq!(full.figures[0].word, Word::Better);
        assert!(close.to_string().contains("faster") && !close.is_worse(), "{close}");
        assert!(of(990.0, "").is_worse() && of(990.0, "").to_string().contains("SLOWER"));
        let apart = of(2_000.0, "");
        assert_eq!(apart.figures[0].word, Word::Differs);
        assert!(apart.differ[1].contains("1,00") && apart.differ[1].contains("2,00"), "{apart}");
        assert!(!apart.to_string().contains("faster"), "{apart}");
    }

    #[test]
    fn nothing_is_in_the_way_of_zeros() {
        assert_eq!(ratio(&[0.0, 0.0], &[1.0, 2.0]), (None, None));
        assert_eq!(said(&[0.0; 5], &[0.0; 5], Better::Lower), Word::NoDifferenceShown);
        assert_eq!(said(&[0.0; 5], &[3.0; 5], Better::Lower), Word::Worse);
    }
}
