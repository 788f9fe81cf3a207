//! What came out of chaos, in figures.
//!
//! *Owns*: the counts, the line that sums them up.
//! *Does not own*: the verdict (`auditor`).

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::Duration;

use sluice_shared::fault::{Counts, Point};

use super::producer::Told;
use super::schedule::DEATHS_OF_GATEWAYS;
use crate::auditor::{FaultKind, Verdict};
use crate::pool::Member;

/// What has happened.
#[derive(Debug, Default)]
pub struct Figures {
    /// `kill -9` of pods and of gateways, and their deaths at points.
    pub pod_kills: u64,
    /// As `pod_kills`.
    pub gateway_kills: u64,
    /// Drains that have ended well.
    pub drains: u64,
    /// Connections that were cut.
    pub cuts: u64,
    /// Connections that producers lost.
    pub lost: u64,
    /// How often producers vanished.
    pub vanished: u64,
    /// How often one was fenced by a try of its own.
    pub fenced: u64,
    /// Streams there were.
    pub streams: u64,
    /// Records sent.
    pub records: u64,
    /// Records that fit no table.
    pub bad: u64,
    /// Streams that failed, and why.
    pub failures: Vec<String>,
    /// Of each point: passes, what happened there, deaths there.
    pub points: BTreeMap<Point, (u64, u64, u64)>,
    /// Other things that were done.
    pub others: BTreeMap<&'static str, u64>,
    /// What this machine does not allow.
    pub skipped: BTreeSet<String>,
    /// Points at which pods were to die.
    pub deaths: Vec<Point>,
}

impl Figures {
    pub(super) fn killed(&mut self, member: &Member) {
        match member {
            Member::Pod(_) => self.pod_kills += 1,
            Member::Gateway(_) => self.gateway_kills += 1,
        }
    }

    pub(super) fn died(&mut self, member: &Member, point: Point) {
        self.killed(member);
        self.points.entry(point).or_default().2 += 1;
    }

    pub(super) fn count(&mut self, what: &'static str) {
        *self.others.entry(what).or_default() += 1;
    }

    pub(super) fn skip(&mut self, what: &str) {
        self.skipped.insert(what.to_owned());
    }

    pub(super) fn passed(&mut self, counts: &Counts) {
        for (point, passes, happened) in counts {
            let entry = self.points.entry(*point).or_default();
            entry.0 += passes;
            entry.1 += happened;
        }
    }

    pub(super) fn add(&mut self, told: &Told) {
        self.lost += told.lost;
        self.vanished += told.vanished;
        self.fenced += told.fenced;
        self.bad += told.bad;
        self.streams += told.notes.len() as u64;
        self.failures.extend(told.failure.clone());
    }

    /// Points of the code path that were never passed.
    pub fn never_passed(&self) -> Vec<&'static str> {
        let all = self.deaths.iter().chain(&DEATHS_OF_GATEWAYS);
        let never = all.filter(|point| self.points.get(point).is_none_or(|(passes, ..)| *passes == 0));
        never.map(|point| point.name()).collect()
    }
}

/// What came out.
#[derive(Debug)]
pub struct Outcome {
    /// As the scenario's.
    pub seed: u64,
    /// As the scenario's.
    pub lasts: Duration,
    /// The auditor's word on each table.
    pub verdicts: BTreeMap<String, Verdict>,
    /// What was done.
    pub figures: Figures,
}

impl Outcome {
    /// Whether all promises were kept, and no stream failed.
    pub fn is_kept(&self) -> bool {
        self.verdicts.values().all(Verdict::is_clean) && self.figures.failures.is_empty()
    }

    fn faults(&self, kinds: &[FaultKind]) -> u64 {
        let counts = self.verdicts.values().flat_map(|verdict| &verdict.counts);
        counts.filter(|(kind, _)| kinds.contains(kind)).map(|(_, count)| count).sum()
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let figures = &self.figures;
        for (point, (passes, happened, deaths)) in &figures.points {
            writeln!(f, "{:16} {passes:8} passes {happened:6} faults {deaths:4} deaths", point.name())?;
        }
        figures.skipped.iter().try_for_each(|what| writeln!(f, "left out: {what}"))?;
        figures.failures.iter().try_for_each(|failure| writeln!(f, "FAILED: {failure}"))?;
        for (table, verdict) in self.verdicts.iter().filter(|(_, verdict)| !verdict.is_clean()) {
            writeln!(f, "{table}: {verdict}")?;
        }
        let all: u64 = self.verdicts.values().flat_map(|verdict| verdict.counts.values()).sum();
        let [lost, doubled, disordered, gaps] = [
            self.faults(&[FaultKind::Lost, FaultKind::CommittedButAbsent, FaultKind::Vanished]),
            self.faults(&[FaultKind::Doubled]),
            self.faults(&[FaultKind::Disordered]),
            self.faults(&[FaultKind::Gap]),
        ];
        let other = all - lost - doubled - disordered - gaps;
        let versions: u64 = self.verdicts.values().map(|verdict| verdict.versions).sum();
        let at_points: u64 = figures.points.values().map(|(_, happened, _)| happened).sum();
        let others: Vec<String> =
            figures.others.iter().map(|(what, count)| format!("{count} {what}")).collect();
        let others = if others.is_empty() { String::new() } else { format!(", {}", others.join(", ")) };
        write!(
            f,
            "chaos: seed {}, {} s: {} pod kills, {} gateway kills, {} drains, {} cuts, {at_points} faults at \
             points{others}; \
             {} records of {} streams ({} producers vanished, {} connections lost, {} fenced by their own), \
             {versions} versions of {} tables: \
             {lost} lost, {doubled} doubled, {disordered} out of order, {gaps} gaps, {other} other; {} streams failed",
            self.seed,
            self.lasts.as_secs(),
            figures.pod_kills,
            figures.gateway_kills,
            figures.drains,
            figures.cuts,
            figures.records,
            figures.streams,
            figures.vanished,
            figures.lost,
            figures.fenced,
            self.verdicts.len(),
            figures.failures.len(),
        )
    }
}
