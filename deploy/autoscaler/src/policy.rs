//! How many pods there should be: a pure function of what was seen.
//!
//! *Out*: the larger the overload, the shorter the proof. A forecast may raise the number, never lower it.
//! *In*: one at a time, after a quiet period, and never to fewer pods than carry what the quiet period had.
//!
//! Load stays where it is when a pod is added, until streams come or are moved: so a pod that has just been added is
//! given time before another is added for the same reason.
//!
//! *Owns*: the rules and their order. *Does not own*: clocks, pods, how they are started (`driver`).

mod forecast;
mod history;
#[cfg(test)]
mod tests;

use std::fmt;
use std::time::Duration;

pub use forecast::{Forecasts, Score};
pub use history::{History, Observation, PodPhase, PodSample};
use history::{Tick, ms};

/// Overloads and how long each has to last: a mean load, and the time.
const PROOFS: [(f64, Duration); 3] =
    [(0.65, Duration::from_secs(60)), (0.8, Duration::from_secs(15)), (FULL, Duration::from_secs(5))];
/// Above it pods are full: what they report says no more how much is wanted, so that the pool is doubled.
const FULL: f64 = 0.95;
/// A tenth of the pods above it for `HOT_FOR` asks for one more.
const HOT: f64 = 0.8;
const HOT_FOR: Duration = Duration::from_secs(15);
/// Load per pod that the pool is made for.
const TARGET: f64 = 0.6;
/// Load per pod up to which a forecast is let go: beyond it the pool would grow anyhow.
const TARGET_EXPECTED: f64 = 0.65;
/// A pod is taken out when the others would carry less than this each. The distance to the least proof is what
/// keeps a constant load from making the pool swing.
const IN_BELOW: f64 = 0.5;
/// The pool at most doubles within this.
const GROWTH_WINDOW: Duration = Duration::from_secs(15);
/// The demand of now is the mean over this.
const NOW: Duration = Duration::from_secs(5);

/// What an operator decides.
#[derive(Debug, Clone, PartialEq)]
pub struct Policy {
    /// Never fewer pods.
    pub min: u32,
    /// Never more.
    pub max: u32,
    /// Whether forecasts count.
    pub predicts: bool,
    /// From the decision to a pod that takes streams.
    pub start: Duration,
    /// What a forecast looks ahead beyond that.
    pub margin: Duration,
    /// How long the demand has to have been small before a pod is taken out.
    pub quiet: Duration,
    /// From one pod that is taken out to the next.
    pub in_interval: Duration,
    /// From the last pod that was added to the first that is taken out.
    pub after_out: Duration,
    /// Changes from out to in or back are at least this far from each other, or the second is out.
    pub turn: Duration,
    /// An older report is as good as none.
    pub stale: Duration,
    /// A pod with records that wait longer for their table has a backlog.
    pub lag_max: Duration,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            min: 1,
            max: 8,
            predicts: true,
            start: Duration::from_secs(20),
            margin: Duration::from_secs(40),
            quiet: Duration::from_secs(600),
            in_interval: Duration::from_secs(60),
            after_out: Duration::from_secs(300),
            turn: Duration::from_secs(3600),
            stale: Duration::from_secs(30),
            lag_max: Duration::from_secs(10),
        }
    }
}

/// Why the number is what it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reason {
    /// Nothing was seen yet.
    NoReports,
    /// Neither much nor little.
    WithinBounds,
    /// Fewer than the least, or more than the most that were asked for.
    Limits,
    /// The pods' mean load has been too high for long enough.
    MeanHigh,
    /// The pods are full.
    Full,
    /// Some pods have been hot for long enough, and the others are not idle.
    SomeHot,
    /// Streams are refused, and the pods are not idle.
    Refused,
    /// More is needed soon if the demand goes on growing.
    Trend,
    /// More is needed soon if the demand is as on earlier days.
    Season,
    /// More would be needed, but there are as many as there may be.
    AtMost,
    /// More was added a moment ago; it has to have its say first.
    JustAdded,
    /// One can go: it has been quiet for long enough.
    Quiet,
    /// One could go, but reports are missing or old.
    Stale,
    /// One could go, but another is still on its way out.
    DrainRuns,
    /// One could go, but another is still starting.
    Starting,
    /// One could go, but records wait for their tables.
    Backlog,
    /// One could go, but it has not been quiet for long enough.
    NotQuietYet,
    /// One could go, but a forecast wants it.
    Expected,
    /// One could go, but the pool changed its direction a short time ago.
    Restless,
}

impl Reason {
    /// All of them: a metric has a series for each from the beginning.
    pub const ALL: [Self; 19] = [
        Self::NoReports,
        Self::WithinBounds,
        Self::Limits,
        Self::MeanHigh,
        Self::Full,
        Self::SomeHot,
        Self::Refused,
        Self::Trend,
        Self::Season,
        Self::AtMost,
        Self::JustAdded,
        Self::Quiet,
        Self::Stale,
        Self::DrainRuns,
        Self::Starting,
        Self::Backlog,
        Self::NotQuietYet,
        Self::Expected,
        Self::Restless,
    ];

    /// Its stable name, for metrics and logs.
    pub fn name(self) -> &'static str {
        match self {
            Self::NoReports => "no_reports",
            Self::WithinBounds => "within_bounds",
            Self::Limits => "limits",
            Self::MeanHigh => "mean_high",
            Self::Full => "full",
            Self::SomeHot => "some_hot",
            Self::Refused => "refused",
            Self::Trend => "trend",
            Self::Season => "season",
            Self::AtMost => "at_most",
            Self::JustAdded => "just_added",
            Self::Quiet => "quiet",
            Self::Stale => "stale",
            Self::DrainRuns => "drain_runs",
            Self::Starting => "starting",
            Self::Backlog => "backlog",
            Self::NotQuietYet => "not_quiet_yet",
            Self::Expected => "expected",
            Self::Restless => "restless",
        }
    }

    fn as_text(self) -> &'static str {
        match self {
            Self::NoReports => "no pod has been seen yet",
            Self::WithinBounds => "load is within its bounds",
            Self::Limits => "the number is outside of its limits",
            Self::MeanHigh => "mean load has been too high for long enough",
            Self::Full => "pods are full",
            Self::SomeHot => "some pods have been hot for long enough",
            Self::Refused => "streams are refused",
            Self::Trend => "demand is growing",
            Self::Season => "demand grew at this time before",
            Self::AtMost => "more would be needed than there may be",
            Self::JustAdded => "pods were just added, and have to have their say first",
            Self::Quiet => "it has been quiet for long enough",
            Self::Stale => "reports are missing or old: none is taken out",
            Self::DrainRuns => "a drain runs: no other is begun",
            Self::Starting => "pods are starting: none is taken out",
            Self::Backlog => "records wait for their tables: none is taken out",
            Self::NotQuietYet => "it has not been quiet for long enough",
            Self::Expected => "demand is expected back",
            Self::Restless => "the pool changed its direction a short time ago: none is taken out",
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_text())
    }
}

/// What a decision was made of.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Terms {
    /// Pods that the driver was told to run.
    pub replicas: u32,
    /// Of those that are seen, the active ones.
    pub active: u32,
    /// Load per active pod, refused streams included.
    pub mean: f64,
    /// Nine in ten active pods are loaded no more than this.
    pub p90: f64,
    /// Pods' worth of load over the last seconds, refused streams included.
    pub demand: f64,
    /// The most within the quiet period.
    pub demand_max: f64,
    /// Opens refused of late.
    pub refused: u64,
    /// Pods that the load of now asks for; 0 where it asks for nothing.
    pub reactive: u32,
    /// Demand by the trend.
    pub trend: f64,
    /// Demand by the season; 0 where there is none that is believed.
    pub season: f64,
    /// Pods that the forecasts ask for.
    pub predicted: u32,
}

impl fmt::Display for Terms {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} of {} active, mean {:.2}, p90 {:.2}, demand {:.2} (most {:.2}), refused {}, asks for {}; trend {:.2}, \
             season {:.2}, expects {}",
            self.active,
            self.replicas,
            self.mean,
            self.p90,
            self.demand,
            self.demand_max,
            self.refused,
            self.reactive,
            self.trend,
            self.season,
            self.predicted
        )
    }
}

/// What there should be, and why.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Decision {
    /// So many pods.
    pub pods: u32,
    /// Why.
    pub reason: Reason,
    /// What it was made of.
    pub terms: Terms,
}

impl Decision {
    /// `out`, `in` or `hold`.
    pub fn direction(&self) -> &'static str {
        match self.pods.cmp(&self.terms.replicas) {
            std::cmp::Ordering::Greater => "out",
            std::cmp::Ordering::Less => "in",
            std::cmp::Ordering::Equal => "hold",
        }
    }
}

/// How many pods there should be at `now_ms`, by what was seen until then.
pub fn desired_pods(history: &History, policy: &Policy, now_ms: u64) -> Decision {
    let Some(last) = history.last() else {
        return Decision { pods: policy.min, reason: Reason::NoReports, terms: Terms::default() };
    };
    let (reactive, why) = reactive(history, policy, last, now_ms);
    let (terms, expected) = terms(history, policy, last, now_ms, reactive);
    let decide = |pods, reason| Decision { pods, reason, terms };
    if !(policy.min..=policy.max).contains(&last.replicas) {
        return decide(last.replicas.clamp(policy.min, policy.max), Reason::Limits);
    }
    let wanted = reactive.max(terms.predicted);
    if wanted > last.replicas {
        let reason = if reactive >= terms.predicted { why } else { expected };
        let before = history.replicas_ago(now_ms, GROWTH_WINDOW).unwrap_or(last.replicas);
        let pods = wanted.min(before.saturating_mul(2)).min(policy.max).max(last.replicas);
        let held = if last.replicas == policy.max { Reason::AtMost } else { Reason::JustAdded };
        return decide(pods, if pods > last.replicas { reason } else { held });
    }
    match may_go(history, policy, &terms, now_ms) {
        Reason::Quiet => decide(last.replicas - 1, Reason::Quiet),
        other => decide(last.replicas, other),
    }
}

fn terms(history: &History, policy: &Policy, last: &Tick, now_ms: u64, reactive: u32) -> (Terms, Reason) {
    let demand = mean(history.since(now_ms, NOW).map(|tick| tick.demand)).unwrap_or(last.demand);
    let horizon = policy.start + policy.margin;
    let (mut extra, mut season) = (0.0, 0.0);
    if policy.predicts {
        // A trend is a line drawn on: no farther than twice what there is.
        extra = (history.forecasts.trend_per_minute() * horizon.as_secs_f64() / 60.0).min(demand);
        season = history.forecasts.season(now_ms, horizon).unwrap_or(0.0);
    }
    let by_trend = if extra > 0.0 { pods_for(demand + extra, TARGET_EXPECTED) } else { 0 };
    let by_season = pods_for(season, TARGET_EXPECTED);
    let terms = Terms {
        replicas: last.replicas,
        active: last.active,
        mean: last.mean,
        p90: last.p90,
        demand,
        demand_max: history.since(now_ms, policy.quiet).map(|tick| tick.demand).fold(0.0, f64::max),
        refused: history.since(now_ms, HOT_FOR).map(|tick| tick.refused).sum(),
        reactive,
        trend: demand + extra,
        season,
        predicted: by_trend.max(by_season),
    };
    (terms, if by_trend >= by_season { Reason::Trend } else { Reason::Season })
}

/// Pods that the load of now asks for, 0 where it asks for nothing. Grows with each observation's load and refusals.
fn reactive(history: &History, policy: &Policy, last: &Tick, now_ms: u64) -> (u32, Reason) {
    let least = |window, of: fn(&Tick) -> f64| {
        let is_proven = history.covers(now_ms, window, window.min(policy.stale));
        if is_proven { history.since(now_ms, window).map(of).fold(f64::INFINITY, f64::min) } else { 0.0 }
    };
    let demand = mean(history.since(now_ms, NOW).map(|tick| tick.demand)).unwrap_or(0.0);
    let mut asked = (0, Reason::WithinBounds);
    let mut ask = |pods: u32, reason| {
        if pods > asked.0 {
            asked = (pods, reason);
        }
    };
    if last.active > 0 && PROOFS.iter().any(|(load, window)| least(*window, |tick| tick.mean) > *load) {
        if least(PROOFS[2].1, |tick| tick.mean) > FULL {
            ask(last.active.saturating_mul(2), Reason::Full);
        }
        ask(pods_for(demand, TARGET), Reason::MeanHigh);
    }
    // One more only once the last ones had their time: streams do not move at once. And only where it would stay: one
    // stream that fills a pod, or one pod that is ill, would otherwise make the pool grow without end.
    let settled = history
        .last_move(|one| one.is_out)
        .is_none_or(|out| now_ms.saturating_sub(out.at_ms) > ms(policy.start + HOT_FOR));
    if settled && last.active > 0 && last.active >= last.replicas && last.mean > IN_BELOW {
        if history.since(now_ms, HOT_FOR).any(|tick| tick.refused > 0) {
            ask(last.replicas.saturating_add(1), Reason::Refused);
        }
        if least(HOT_FOR, |tick| tick.p90) > HOT {
            ask(last.replicas.saturating_add(1), Reason::SomeHot);
        }
    }
    asked
}

/// `Quiet` where one pod can go, or else why none does.
fn may_go(history: &History, policy: &Policy, terms: &Terms, now_ms: u64) -> Reason {
    let Some(last) = history.last() else { return Reason::NoReports };
    let left = terms.replicas.saturating_sub(1);
    let fits = |demand: f64| demand < IN_BELOW * f64::from(left);
    if left < policy.min || left == 0 || !fits(terms.demand) {
        return Reason::WithinBounds;
    }
    let old = now_ms.saturating_sub(last.at_ms) > ms(policy.stale) || last.oldest_report > policy.stale;
    let since = |one: Option<history::Move>| one.map_or(u64::MAX, |one| now_ms.saturating_sub(one.at_ms));
    if old || last.lost > 0 {
        Reason::Stale
    } else if last.draining > 0 {
        Reason::DrainRuns
    } else if last.joining > 0 || last.active < last.replicas {
        Reason::Starting
    } else if last.lag > policy.lag_max {
        Reason::Backlog
    } else if !fits(terms.demand_max)
        || !history.covers(now_ms, policy.quiet, policy.stale)
        || history.since(now_ms, policy.quiet).any(|tick| tick.refused > 0)
        || last.p90 > HOT
        || since(history.last_move(|one| one.is_out)) < ms(policy.after_out)
        || since(history.last_move(|one| !one.is_out)) < ms(policy.in_interval)
    {
        Reason::NotQuietYet
    } else if terms.predicted > left {
        Reason::Expected
    } else if history.last_move(|_| true).is_some_and(|one| one.is_out)
        && since(history.last_move(|one| one.turns)) < ms(policy.turn)
    {
        // Out is never kept waiting, so in waits: no `turn`, an hour by default, has more than two changes of direction.
        Reason::Restless
    } else {
        Reason::Quiet
    }
}

fn pods_for(demand: f64, load: f64) -> u32 {
    // What rounding adds must not cost a pod.
    let pods = (demand / load - 1e-9).ceil();
    if pods >= f64::from(u32::MAX) { u32::MAX } else { pods.max(0.0) as u32 }
}

fn mean(values: impl Iterator<Item = f64>) -> Option<f64> {
    let (sum, count) = values.fold((0.0, 0u32), |(sum, count), value| (sum + value, count + 1));
    (count > 0).then(|| sum / f64::from(count))
}
