//! How figures of contenders are read: side by side, by work, with what an ack promised; and the aims.
//!
//! *Owns*: the aims, reasons why one may be missed, doubts, the text.
//! *Does not own*: measuring.

use std::fmt;

use serde::Serialize;

use super::{Figures, Run, Side, Work, WorkFigures};
use crate::bench::median;
use crate::report::number;

/// An ack that comes sooner than this part of a flush is hardly one that waited for it.
const FLUSH_PART_MIN: f64 = 0.5;

/// So many times the rate of a rival that flushes before its acks too, in the same rounds.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Aim {
    work: &'static str,
    ours: &'static str,
    times: f64,
    theirs: &'static str,
    /// Why it cannot be met, where that is known.
    reason: Option<&'static str>,
}

const fn aim(work: &'static str, ours: &'static str, times: f64, theirs: &'static str) -> Aim {
    Aim { work, ours, times, theirs, reason: None }
}

impl Aim {
    const fn because(self, reason: &'static str) -> Self {
        Self { reason: Some(reason), ..self }
    }
}

const ONE_UNDER_WAY: &str =
    "four records under way are four records a flush, whoever flushes them: see the bound above";

/// What is aimed at.
const AIMS: [Aim; 9] = [
    aim("batch-100", "sluice-websocket", 2.0, "iggy-tcp-flushed"),
    aim("batch-1000", "sluice-websocket", 1.0, "iggy-tcp-flushed"),
    aim("batch-1000", "sluice-quic", 2.0, "iggy-quic-flushed"),
    aim("single-1", "sluice-websocket", 15.0, "nats-flushed").because(ONE_UNDER_WAY),
    aim("single-1", "sluice-websocket", 15.0, "iggy-tcp-flushed").because(ONE_UNDER_WAY),
    aim("single-256", "sluice-websocket", 15.0, "nats-flushed"),
    aim("single-256", "sluice-websocket", 15.0, "iggy-tcp-flushed"),
    aim("single-streams", "sluice-websocket", 15.0, "nats-flushed"),
    aim("single-streams", "sluice-websocket", 15.0, "iggy-tcp-flushed"),
];

/// How an aim came out.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// So many times the rival.
    Met(f64),
    /// Without a reason.
    Missed(f64),
    /// With one.
    MissedFor(f64, &'static str),
    /// One of the two has no figure, or did not flush.
    NotJudged(String),
}

/// Figures and what they say.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// What was measured.
    pub figures: Figures,
    /// Aims of the works that ran, where any are judged.
    pub aims: Vec<(Aim, Outcome)>,
    /// Acks that came too soon for what they promise.
    pub doubts: Vec<String>,
}

impl Report {
    /// Judges, or only shows: runs that are too short to say something are not judged.
    pub fn new(figures: Figures, with_aims: bool) -> Self {
        let of = |work: &str| figures.works.iter().find(|figures| figures.work.name == work);
        let judged = |aim: &Aim| of(aim.work).map(|work| (*aim, outcome(aim, work)));
        let aims = AIMS.iter().filter(|_| with_aims).filter_map(judged).collect();
        let doubts = figures.works.iter().flat_map(doubts).collect();
        Self { figures, aims, doubts }
    }

    /// Whether Sluice has a figure wherever it ran, and no aim is missed without a reason.
    pub fn is_met(&self) -> bool {
        let sides = self.figures.works.iter().flat_map(|work| &work.sides);
        let failed = sides.filter(|side| side.name.starts_with("sluice")).any(|side| side.failed.is_some());
        !failed && !self.aims.iter().any(|(_, outcome)| matches!(outcome, Outcome::Missed(_)))
    }

    /// Whether every contender has a figure of every work that it takes.
    pub fn is_whole(&self) -> bool {
        let mut sides = self.figures.works.iter().flat_map(|work| &work.sides);
        sides.all(|side| side.failed.is_none())
    }

    /// Everything, for programs.
    ///
    /// # Errors
    /// Never: it is all numbers and texts.
    pub fn json(&self) -> anyhow::Result<String> {
        Ok(serde_json::to_string_pretty(self)?)
    }
}

fn outcome(aim: &Aim, figures: &WorkFigures) -> Outcome {
    let of = |name: &str| -> Result<f64, String> {
        let side = figures.sides.iter().find(|side| side.name == name);
        let side = side.ok_or_else(|| format!("{name} is not there"))?;
        if !side.durability.flushed {
            return Err(format!("{name} does not flush before its acks"));
        }
        if side.failed.is_some() {
            return Err(format!("{name} failed"));
        }
        side.median.as_ref().map(|run| run.records_per_s).ok_or_else(|| format!("{name} has no figure"))
    };
    let times = match (of(aim.ours), of(aim.theirs)) {
        (Ok(ours), Ok(theirs)) => ours / theirs,
        (Err(why), _) | (_, Err(why)) => return Outcome::NotJudged(why),
    };
    match aim.reason {
        _ if times >= aim.times => Outcome::Met(times),
        Some(reason) => Outcome::MissedFor(times, reason),
        None => Outcome::Missed(times),
    }
}

fn doubts(figures: &WorkFigures) -> Vec<String> {
    let flush_ms = median(&figures.flush_ms, |ms| *ms);
    let flushed = figures.sides.iter().filter(|side| side.durability.flushed);
    let too_soon = flushed.filter_map(|side| {
        let p50_ms = side.median.as_ref().map(|run| run.ack.p50_ms)?;
        (p50_ms < FLUSH_PART_MIN * flush_ms).then(|| {
            format!(
                "{}: half of {}'s acks came within {p50_ms:.3} ms, where a flush takes {flush_ms:.3} ms: look at its setting",
                figures.work.name, side.name
            )
        })
    });
    too_soon.collect()
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for why in &self.figures.left_out {
            writeln!(f, "left out: {why}")?;
        }
        for work in &self.figures.works {
            write_work(f, work)?;
        }
        writeln!(f)?;
        for doubt in &self.doubts {
            writeln!(f, "doubt: {doubt}")?;
        }
        for (aim, outcome) in &self.aims {
            let Aim { work, ours, times, theirs, .. } = aim;
            write!(f, "aim: {work}: {ours} ≥ {times} × {theirs}: ")?;
            match outcome {
                Outcome::Met(times) => writeln!(f, "{times:.2} ×: met")?,
                Outcome::Missed(times) => writeln!(f, "{times:.2} ×: MISSED")?,
                Outcome::MissedFor(times, reason) => writeln!(f, "{times:.2} ×: missed: {reason}")?,
                Outcome::NotJudged(why) => writeln!(f, "not judged: {why}")?,
            }
        }
        Ok(())
    }
}

fn under_way(work: &Work) -> f64 {
    (work.producers * work.rows * usize::from(work.window)) as f64
}

fn write_work(f: &mut fmt::Formatter<'_>, figures: &WorkFigures) -> fmt::Result {
    let work = &figures.work;
    writeln!(f, "\n{}: {}", work.name, work.title)?;
    let (flush_ms, trip_ms) = (median(&figures.flush_ms, |ms| *ms), median(&figures.round_trip_ms, |ms| *ms));
    let least = figures.flush_ms.iter().copied().fold(f64::MAX, f64::min);
    let most = figures.flush_ms.iter().copied().fold(0.0, f64::max);
    writeln!(
        f,
        "  bare machine: write and flush of a batch {flush_ms:.3} ms ({least:.3} to {most:.3}), round trip {trip_ms:.3} ms; {} \
         records under way by a flush and two trips: {} /s",
        number(under_way(work)),
        number(under_way(work) / (flush_ms + 2.0 * trip_ms) * 1e3),
    )?;
    let head = ["", "records/s", "MB/s", "ack p50 ms", "p99 ms", "server CPU s/GB", "client", "flushed"];
    let mut lines = vec![(head.map(str::to_owned), String::new())];
    lines.extend(figures.sides.iter().map(|side| (cells(side), by_run(side))));
    let width =
        |column: usize| lines.iter().map(|(cells, _)| cells[column].chars().count()).max().unwrap_or(0);
    let widths: [usize; 8] = std::array::from_fn(width);
    for (cells, rest) in &lines {
        write!(f, "  {:<1$}", cells[0], widths[0])?;
        for (cell, width) in cells.iter().zip(widths).skip(1) {
            write!(f, "  {cell:>width$}")?;
        }
        writeln!(f, "  {rest}")?;
    }
    Ok(())
}

fn cells(side: &Side) -> [String; 8] {
    let of = |figure: &dyn Fn(&Run) -> String| side.median.as_ref().map(figure).unwrap_or_default();
    [
        side.name.to_owned(),
        of(&|run| number(run.records_per_s)),
        of(&|run| number(run.mb_per_s)),
        of(&|run| number(run.ack.p50_ms)),
        of(&|run| number(run.ack.p99_ms)),
        of(&|run| run.server_s_per_gb.map_or_else(|| "not known".to_owned(), number)),
        of(&|run| number(run.client_s_per_gb)),
        if side.durability.flushed { "yes" } else { "NO" }.to_owned(),
    ]
}

fn by_run(side: &Side) -> String {
    let rates: Vec<String> = side.runs.iter().map(|run| number(run.records_per_s)).collect();
    let failed = side.failed.as_ref().and_then(|failed| failed.lines().next());
    let failed = failed.map(|failed| format!("; FAILED: {failed}")).unwrap_or_default();
    format!("{}; by run: {}{failed}", side.durability.how, rates.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::run::Quantiles;
    use crate::peers::{Durability, WORKS};

    fn side(name: &'static str, flushed: bool, records_per_s: f64) -> Side {
        let run = Run {
            records: 1,
            seconds: 1.0,
            records_per_s,
            mb_per_s: records_per_s / 1e3,
            ack: Quantiles { p50_ms: 1.0, p99_ms: 2.0 },
            server_s_per_gb: None,
            client_s_per_gb: 1.0,
        };
        let durability = Durability { flushed, how: "so".to_owned() };
        Side { name, durability, runs: vec![run.clone()], median: Some(run), failed: None }
    }

    fn report(work: &str, sides: Vec<Side>) -> Report {
        let work = *WORKS.iter().find(|one| one.name == work).expect("a work");
        let works =
            vec![WorkFigures { work, flush_ms: vec![0.5, 3.0, 1.0], round_trip_ms: vec![0.5], sides }];
        Report::new(Figures { works, left_out: vec!["iggy: no address".to_owned()] }, true)
    }

    fn outcomes(report: &Report) -> Vec<Outcome> {
        report.aims.iter().map(|(_, outcome)| outcome.clone()).collect()
    }

    #[test]
    fn an_aim_is_met_missed_or_not_judged() {
        let ours = || side("sluice-websocket", true, 200.0);
        let met = report("batch-100", vec![ours(), side("iggy-tcp-flushed", true, 100.0)]);
        assert_eq!((outcomes(&met), met.is_met()), (vec![Outcome::Met(2.0)], true));
        let missed = report("batch-100", vec![ours(), side("iggy-tcp-flushed", true, 125.0)]);
        assert_eq!((outcomes(&missed), missed.is_met()), (vec![Outcome::Missed(1.6)], false));
        let told = |what: &str| vec![Outcome::NotJudged(format!("iggy-tcp-flushed {what}"))];
        let alone = report("batch-100", vec![ours()]);
        assert_eq!((outcomes(&alone), alone.is_met()), (told("is not there"), true));
        let unflushed = report("batch-100", vec![ours(), side("iggy-tcp-flushed", false, 1.0)]);
        assert_eq!(outcomes(&unflushed), told("does not flush before its acks"));
        let failed = Side { failed: Some("lost".to_owned()), ..side("iggy-tcp-flushed", true, 1.0) };
        let failed = report("batch-100", vec![ours(), failed]);
        assert_eq!((outcomes(&failed), failed.is_met()), (told("failed"), true));
    }

    #[test]
    fn a_reason_excuses_and_a_failure_of_ours_does_not_pass() {
        let excused =
            report("single-1", vec![side("sluice-websocket", true, 10.0), side("nats-flushed", true, 5.0)]);
        assert_eq!(outcomes(&excused)[0], Outcome::MissedFor(2.0, ONE_UNDER_WAY));
        assert!(excused.is_met());
        let failed = Side { failed: Some("lost".to_owned()), ..side("sluice-quic", true, 1.0) };
        let failed = report("single-1", vec![failed]);
        assert!(!failed.is_met() && !failed.is_whole());
    }

    #[test]
    fn acks_that_are_faster_than_the_disk_are_doubted() {
        let mut quick = side("nats-flushed", true, 10.0);
        quick.median.as_mut().expect("a run").ack.p50_ms = 0.4;
        let mut unflushed = side("nats-default", false, 10.0);
        unflushed.median.as_mut().expect("a run").ack.p50_ms = 0.1;
        let report = report("single-1", vec![quick, unflushed, side("sluice-websocket", true, 10.0)]);
        assert_eq!(report.doubts.len(), 1, "{:?}", report.doubts);
        assert!(report.doubts[0].contains("nats-flushed"), "{:?}", report.doubts);
    }

    #[test]
    fn the_text_says_what_an_ack_promised_and_who_is_left_out() {
        let failed = Side { failed: Some("lost\nits log".to_owned()), ..side("nats-default", false, 5.0) };
        let text = report("single-1", vec![side("sluice-websocket", true, 12_345.0), failed]).to_string();
        for expected in [
            "left out: iggy: no address",
            "flush of a batch 1.000 ms (0.500 to 3.000), round trip 0.500 ms",
            "4.00 records under way by a flush and two trips: 2,000 /s",
            "12,345",
            "so; by run: 5.00; FAILED: lost\n",
            "aim: single-1: sluice-websocket ≥ 15 × nats-flushed: not judged: nats-flushed is not there",
        ] {
            assert!(text.contains(expected), "no {expected:?} in\n{text}");
        }
    }
}
