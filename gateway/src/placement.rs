//! Which pod takes a stream: bounded table affinity, two random choices, correction for stale reports.
//!
//! A pure function of the pool view, shared by gateway, simulator and `explain`. A small table's streams stay
//! on its home, so that its files are few and large; a hot table spreads over the first pods of its order. A decision
//! costs some look-ups on the ring, however large the pool: what is known of all pods together is kept in the view, and
//! so are the first pods of hot tables.
//!
//! Sources: two choices under stale data (M. Mitzenmacher, 2000), own placements since the last report
//! (M. Dahlin, 2000), bounded loads on a ring (Mirrokni, Thorup, Zadimoghaddam, 2017).
//!
//! *Owns*: the rules and their numbers.
//! *Does not own*: how the view is learned; corrected load and spread (`sluice_shared::pool`); how a decision is told
//! (`explain`); whether the pod agrees: it is the judge, and may answer `Busy`.
//! Keeps P9: no pod is filled past its bound while others have room.

mod explain;

use std::time::Duration;

use rand::{Rng, RngExt};
use sluice_shared::ids::{PodId, TableName};
use sluice_shared::pool::{PodLoad, PodView, PoolView, Sums, Trust};

pub use explain::{Explained, Explanation, explain};

/// A pod may stand this much above the mean.
const BOUND_OVER_MEAN: f64 = 1.25;
/// A stream returns to its last pod even if that stands a little over the bound: its log and files are there.
const STICKY_OVER_BOUND: f64 = 1.1;
/// Below this no pod is taken to be loaded: in an idle pool "above the mean" says nothing, and must not
/// scatter a small table.
const BOUND_MIN: f64 = 0.25;
/// A pod that reports more takes nothing new. Guesses about own placements do not count here.
const HARD_LIMIT: f64 = 0.9;
/// What a stream is taken to add when nothing is known, as a fraction of a pod.
const STREAM_LOAD_UNKNOWN: f64 = 0.002;
/// What any stream is taken to add at least: many idle ones are something too.
const STREAM_LOAD_MIN: f64 = 0.0002;
/// A pod that has just become active is the home of its share of all tables at once, and nobody's guess includes that:
/// a stream weighs double there, and less so until this time is over.
const SLOW_START: Duration = Duration::from_secs(30);
/// So long it is filled to a little less than the mean: what comes to it is what nobody has seen yet, and hot pods shed
/// to it all at once.
const NEW_POD: Duration = Duration::from_secs(180);
const NEW_UNDER_MEAN: f64 = 0.85;
/// Random pods that are looked at for one that may be used, before all are.
const DRAWS_MAX: usize = 16;
/// Of a table that stands on more pods than this two are drawn by their places; else all are looked at first.
const WALK_MAX: usize = 32;
/// Pods beyond its own that are looked at where a table overflows.
const OVERFLOW_MAX: usize = 32;

/// What is known of the stream to place.
#[derive(Debug, Clone, Copy, Default)]
pub struct StreamHints<'a> {
    /// The pod that held it last.
    pub last_pod: Option<&'a PodId>,
    /// What its producer expects to send, or what it has been seen to send.
    pub rate_bytes_per_s: Option<u64>,
    /// Pods that have refused it just now, or that it has to leave.
    pub tried: &'a [PodId],
}

/// Which rule decided.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Rule {
    /// Back to the pod that held it last.
    Sticky,
    /// The less loaded of two among the table's candidates.
    TwoChoices,
    /// The candidates are over the bound: the next in the table's order that is not.
    Overflow,
    /// All are over the bound: the less loaded of two in the whole pool.
    WholePool,
}

/// A decision.
#[derive(Debug, Clone, PartialEq)]
pub struct Placement {
    /// The pod to open the stream on.
    pub pod: PodId,
    /// Why that one.
    pub rule: Rule,
    /// What is to be noted as placed on that pod (`PoolView::placed`), as a fraction of its capacity.
    pub adds: f64,
    /// Load up to which a pod took the stream.
    pub bound: f64,
    /// On how many pods the table stands, as far as the viewer places it.
    pub spread: usize,
}

/// No pod can take the stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoPlace {
    /// No pod is active, or all that are have refused this stream.
    Empty,
    /// All pods report that they are full: a sign to scale out.
    Full,
}

/// Chooses the pod for a stream of `table`. The same view, hints and state of `rng` give the same answer.
///
/// # Errors
/// `NoPlace`.
pub fn place(
    view: &PoolView,
    table: &TableName,
    hints: &StreamHints<'_>,
    rng: &mut impl Rng,
) -> Result<Placement, NoPlace> {
    let choice = Choice::new(view, table, hints)?;
    let (pod, rule) = choice
        .sticky()
        .or_else(|| choice.two_choices(rng))
        .or_else(|| choice.overflow(rng))
        .or_else(|| choice.whole_pool(rng))
        .ok_or(NoPlace::Full)?;
    let adds = choice.adds(pod.pod);
    // What returns is in the pod's report still, or was a moment ago: it is no sign that other gateways send more there.
    let adds = if rule == Rule::Sticky { adds / f64::from(view.gateways.max(1)) } else { adds };
    let spread = choice.spread;
    Ok(Placement { pod: pod.pod.id.clone(), rule, adds, bound: choice.bound, spread })
}

/// All that the rules look at.
struct Choice<'a> {
    view: &'a PoolView,
    table: &'a TableName,
    hints: &'a StreamHints<'a>,
    /// The best pods that there are.
    trust: Trust,
    /// What the stream is expected to send.
    bytes_per_s: f64,
    /// Least that it is taken to add.
    adds_min: f64,
    /// How many of the table's order it stands on.
    reach: usize,
    /// Of those as many as are the viewer's to place on.
    spread: usize,
    /// Load up to which a pod takes the stream.
    bound: f64,
    /// Of all pods that may be used.
    mean: f64,
}

impl<'a> Choice<'a> {
    fn new(view: &'a PoolView, table: &'a TableName, hints: &'a StreamHints<'a>) -> Result<Self, NoPlace> {
        let trust = best_trust(view, hints.tried).ok_or(NoPlace::Empty)?;
        let sums = view.sums(trust);
        let (known, mean) = (expected_rate(view, table, hints, &sums), sums.load());
        let adds_min = if known.is_some() { STREAM_LOAD_MIN } else { STREAM_LOAD_UNKNOWN };
        let bytes_per_s = known.unwrap_or_default();
        let adds = (bytes_per_s / sums.capacity_bytes_per_s()).clamp(adds_min, 1.0);
        let bound = (BOUND_OVER_MEAN * mean).max(mean + adds).clamp(BOUND_MIN, HARD_LIMIT);
        let reach = view.spread(table).min(sums.pods).max(1);
        let spread = near_share(view, reach, sums.pods);
        Ok(Self { view, table, hints, trust, bytes_per_s, adds_min, reach, spread, bound, mean })
    }

    /// What the stream is expected to add to this pod.
    fn adds(&self, pod: &PodView) -> f64 {
        let adds = (self.bytes_per_s / pod.load.capacity_bytes_per_s).clamp(self.adds_min, 1.0);
        let age = pod.active_for.as_secs_f64() / SLOW_START.as_secs_f64();
        adds * (2.0 - age.min(1.0))
    }

    fn is_usable(&self, pod: &PodView) -> bool {
        self.trust.takes(pod) && !self.hints.tried.contains(&pod.id)
    }

    /// Whether the pod takes the stream, at so many times the bound.
    fn fits(&self, pod: &PodLoad<'_>, times: f64) -> bool {
        pod.load + self.adds(pod.pod) <= times * self.bound_of(pod.pod) && pod.reported < HARD_LIMIT
    }

    fn bound_of(&self, pod: &PodView) -> f64 {
        if pod.active_for < NEW_POD {
            self.bound.min((NEW_UNDER_MEAN * self.mean).max(BOUND_MIN))
        } else {
            self.bound
        }
    }

    /// Pods that may be used, in the table's order; those of the viewer's zone first.
    fn order(&self) -> impl Iterator<Item = PodLoad<'a>> {
        let usable = |pod: &PodLoad<'_>| self.is_usable(pod.pod);
        let other_zones = self.view.zone.is_some().then(|| self.view.loads(self.table));
        let other_zones = other_zones.into_iter().flatten().filter(|pod| !self.is_near(pod));
        self.view.loads(self.table).filter(|pod| self.is_near(pod)).chain(other_zones).filter(usable)
    }

    /// Without zones all pods are near.
    fn is_near(&self, pod: &PodLoad<'_>) -> bool {
        self.view.zone.is_none() || self.view.zone == pod.pod.zone
    }

    fn sticky(&self) -> Option<(PodLoad<'a>, Rule)> {
        let last = self.view.load(self.hints.last_pod?)?;
        let fits = self.is_usable(last.pod) && self.fits(&last, STICKY_OVER_BOUND);
        fits.then_some((last, Rule::Sticky))
    }

    fn two_choices(&self, rng: &mut impl Rng) -> Option<(PodLoad<'a>, Rule)> {
        let better = if self.reach > WALK_MAX {
            let (pods, pod) = self.view.first(self.table, self.reach);
            self.draw_two(pods, pod, |pod| self.is_near(pod), rng)?
        } else {
            let candidates: Vec<PodLoad<'a>> = self.order().take(self.spread).collect();
            less_loaded_of_two(candidates.len(), |nth| candidates[nth], rng)?
        };
        self.fits(&better, 1.0).then_some((better, Rule::TwoChoices))
    }

    /// Not the whole order: where so many pods on end are over the bound, most are.
    fn overflow(&self, rng: &mut impl Rng) -> Option<(PodLoad<'a>, Rule)> {
        let next = if self.reach > WALK_MAX {
            let (pods, pod) = self.view.first(self.table, self.reach + OVERFLOW_MAX);
            let inside = (0..DRAWS_MAX).map(|_| rng.random_range(0..self.reach.min(pods)));
            let is_open = |pod: &PodLoad<'_>| self.is_usable(pod.pod) && self.is_near(pod);
            let mut drawn = inside.chain(self.reach..pods).map(pod);
            drawn.find(|pod| is_open(pod) && self.fits(pod, 1.0))?
        } else {
            self.order().take(WALK_MAX + OVERFLOW_MAX).find(|pod| self.fits(pod, 1.0))?
        };
        Some((next, Rule::Overflow))
    }

    fn whole_pool(&self, rng: &mut impl Rng) -> Option<(PodLoad<'a>, Rule)> {
        let (pods, pod) = self.view.active();
        let has_room = |pod: &PodLoad<'_>| pod.reported < HARD_LIMIT;
        let all = || {
            let is_open = |pod: &PodLoad<'_>| self.is_usable(pod.pod) && has_room(pod);
            (0..pods).map(&pod).filter(is_open).min_by(|a, b| a.load.total_cmp(&b.load))
        };
        Some((self.draw_two(pods, &pod, has_room, rng).or_else(all)?, Rule::WholePool))
    }

    /// The less loaded of the first two that are drawn and may be used.
    fn draw_two(
        &self,
        pods: usize,
        pod: impl Fn(usize) -> PodLoad<'a>,
        is_open: impl Fn(&PodLoad<'_>) -> bool,
        rng: &mut impl Rng,
    ) -> Option<PodLoad<'a>> {
        let drawn = (0..DRAWS_MAX.min(pods)).map(|_| pod(rng.random_range(0..pods)));
        let open = drawn.filter(|pod| self.is_usable(pod.pod) && is_open(pod));
        open.take(2).min_by(|a, b| a.load.total_cmp(&b.load))
    }
}

/// The pods that are well; else those of which nothing was heard for long; else those that were set aside.
fn best_trust(view: &PoolView, tried: &[PodId]) -> Option<Trust> {
    let is_left = |trust: Trust| {
        let gone = |(nth, id): (usize, &PodId)| {
            !tried[..nth].contains(id) && view.pod(id).is_some_and(|pod| trust.takes(pod))
        };
        view.sums(trust).pods > tried.iter().enumerate().filter(|tried| gone(*tried)).count()
    };
    [Trust::Well, Trust::NotAside, Trust::Any].into_iter().find(|trust| is_left(*trust))
}

/// What the stream will send: as stated, else as the others of its table do, else as any stream does.
fn expected_rate(view: &PoolView, table: &TableName, hints: &StreamHints<'_>, sums: &Sums) -> Option<f64> {
    let of_table = view.tables.get(table).filter(|rate| rate.streams > 0);
    let of_table = || of_table.map(|rate| rate.bytes_per_s / f64::from(rate.streams));
    hints.rate_bytes_per_s.map(|rate| rate as f64).or_else(of_table).or_else(|| sums.stream_bytes_per_s())
}

/// Where the viewer has a zone, a table's streams stand on its share of the table's pods there.
fn near_share(view: &PoolView, reach: usize, pods: usize) -> usize {
    let near = view.zone.as_deref().map(|zone| view.well_in(zone)).filter(|near| *near > 0);
    near.map_or(reach, |near| (reach * near).div_ceil(pods.max(1)).clamp(1, near))
}

fn less_loaded_of_two<'a>(
    pods: usize,
    pod: impl Fn(usize) -> PodLoad<'a>,
    rng: &mut impl Rng,
) -> Option<PodLoad<'a>> {
    let first = match pods {
        0 => return None,
        1 => return Some(pod(0)),
        _ => rng.random_range(0..pods),
    };
    // Any but the first, each equally likely.
    let second = (first + rng.random_range(1..pods)) % pods;
    let (first, second) = (pod(first), pod(second));
    Some(if second.load < first.load { second } else { first })
}

#[cfg(test)]
mod tests;
