//! What the policy remembers: the last hour second by second, two weeks minute by minute, and when the pool changed size.
//!
//! *Owns*: turning reports into demand, the bounds of what is kept.
//! *Does not own*: what follows from it (`policy`), forecasts (`policy/forecast.rs`).

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::forecast::Forecasts;

/// How long single observations are kept: the longest look back of a rule is an hour.
const RECENT: Duration = Duration::from_secs(3600);
/// Bound on them, whatever the interval.
const RECENT_MAX: usize = 8192;
/// Refused opens count as demand for this long.
const REFUSED_FOR: Duration = Duration::from_secs(15);
/// Bound on remembered changes of size; only the last hour's matter.
const MOVES_MAX: usize = 256;

/// Where a pod is in its life, as the admin API says it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PodPhase {
    /// Replays its log; takes no streams yet.
    Joining,
    /// Takes streams.
    Active,
    /// Hands its streams over.
    Draining,
    /// Holds nothing any more.
    Drained,
    /// At the end of its drain, but its log still holds something: it is to be started again.
    Undrained,
    /// Not heard of any more; its log may still hold something.
    Lost,
    /// A phase that this version does not know.
    #[serde(other)]
    Unknown,
}

/// One pod in one observation.
#[derive(Debug, Clone, PartialEq)]
pub struct PodSample {
    /// Its name.
    pub id: String,
    /// Where it is in its life.
    pub phase: PodPhase,
    /// The largest of its budget fractions: 0 idle, 1 full.
    pub load: f64,
    /// Since its report was made; none where it has made none.
    pub report_age: Option<Duration>,
    /// Streams that it has.
    pub streams: u32,
    /// Opens that it has refused since it started.
    pub refused: u64,
    /// Age of its oldest durable record that is in no table yet.
    pub lag: Duration,
}

/// What was seen at one moment.
#[derive(Debug, Clone, PartialEq)]
pub struct Observation {
    /// When, in milliseconds since 1970 (season means minutes of a day and of a week).
    pub now_ms: u64,
    /// How many pods the driver was told to run.
    pub replicas: u32,
    /// The pods that a gateway sees.
    pub pods: Vec<PodSample>,
}

/// An observation, summed up.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tick {
    pub(super) at_ms: u64,
    pub(super) replicas: u32,
    pub(super) active: u32,
    pub(super) joining: u32,
    pub(super) draining: u32,
    pub(super) lost: u32,
    /// Pods' worth of load, refused streams included.
    pub(super) demand: f64,
    /// Load per active pod, refused streams included.
    pub(super) mean: f64,
    /// Nine in ten active pods are loaded no more than this.
    pub(super) p90: f64,
    /// Opens refused since the observation before.
    pub(super) refused: u64,
    /// The oldest report; infinite where one is missing.
    pub(super) oldest_report: Duration,
    pub(super) lag: Duration,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Move {
    pub(super) at_ms: u64,
    pub(super) is_out: bool,
    /// Whether the move before went the other way.
    pub(super) turns: bool,
}

/// All that a decision rests on. Grows to a bound, and only by `observe`.
#[derive(Debug, Clone, Default)]
pub struct History {
    recent: VecDeque<Tick>,
    moves: VecDeque<Move>,
    refused: HashMap<String, u64>,
    pub(super) forecasts: Forecasts,
}

impl History {
    /// Nothing yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes in what was seen. One that is older than the last is dropped: a clock that was set back must not undo history.
    pub fn observe(&mut self, seen: &Observation) {
        if self.recent.back().is_some_and(|last| seen.now_ms <= last.at_ms) {
            return;
        }
        let refused = self.newly_refused(seen);
        let tick = self.sum_up(seen, refused);
        self.note_move(tick);
        self.recent.push_back(tick);
        let keep_from = seen.now_ms.saturating_sub(ms(RECENT));
        while self.recent.len() > RECENT_MAX || self.recent.front().is_some_and(|tick| tick.at_ms < keep_from)
        {
            self.recent.pop_front();
        }
        let extra = super::forecast::trend(&self.recent, seen.now_ms);
        self.forecasts.observe(seen.now_ms, tick.demand, extra);
    }

    fn newly_refused(&mut self, seen: &Observation) -> u64 {
        let mut sum = 0;
        for pod in &seen.pods {
            // A pod that restarted counts from nothing again. What one had refused before it was first seen is old news.
            let before = self.refused.get(&pod.id).copied().unwrap_or(pod.refused);
            sum += pod.refused.checked_sub(before).unwrap_or(pod.refused);
        }
        self.refused = seen.pods.iter().map(|pod| (pod.id.clone(), pod.refused)).collect();
        sum
    }

    fn sum_up(&self, seen: &Observation, refused: u64) -> Tick {
        let count = |phase| seen.pods.iter().filter(|pod| pod.phase == phase).count() as u32;
        let carries = |pod: &&PodSample| matches!(pod.phase, PodPhase::Active | PodPhase::Draining);
        let carried: f64 = seen.pods.iter().filter(carries).map(|pod| finite(pod.load)).sum();
        let streams: u32 = seen.pods.iter().filter(carries).map(|pod| pod.streams).sum();
        let mut loads: Vec<f64> = seen
            .pods
            .iter()
            .filter(|pod| pod.phase == PodPhase::Active)
            .map(|pod| finite(pod.load))
            .collect();
        loads.sort_by(f64::total_cmp);
        let p90 = loads.get((loads.len() * 9).div_ceil(10).saturating_sub(1)).copied().unwrap_or(0.0);
        let refused_lately =
            refused + self.since(seen.now_ms, REFUSED_FOR).map(|tick| tick.refused).sum::<u64>();
        // Producers that were refused try again: their number is exaggerated, so that they at most double the demand.
        let wanted = refused_lately as f64 * carried / f64::from(streams.max(1));
        let demand = carried + wanted.min(carried);
        let active = count(PodPhase::Active);
        // A draining pod has nothing to say that is needed, but its load counts; a joining one need not report yet.
        let reports = seen.pods.iter().filter(|pod| pod.phase == PodPhase::Active);
        let ages = reports.map(|pod| pod.report_age.unwrap_or(Duration::MAX));
        Tick {
            at_ms: seen.now_ms,
            replicas: seen.replicas,
            active,
            joining: count(PodPhase::Joining),
            draining: count(PodPhase::Draining),
            lost: count(PodPhase::Lost) + count(PodPhase::Undrained) + count(PodPhase::Unknown),
            demand,
            mean: demand / f64::from(active.max(1)),
            p90,
            refused,
            oldest_report: ages.max().unwrap_or_default(),
            lag: seen.pods.iter().map(|pod| pod.lag).max().unwrap_or_default(),
        }
    }

    fn note_move(&mut self, tick: Tick) {
        let Some(before) = self.recent.back().map(|tick| tick.replicas) else { return };
        if before == tick.replicas {
            return;
        }
        let is_out = tick.replicas > before;
        let turns = self.moves.back().is_some_and(|last| last.is_out != is_out);
        self.moves.push_back(Move { at_ms: tick.at_ms, is_out, turns });
        if self.moves.len() > MOVES_MAX {
            self.moves.pop_front();
        }
    }

    pub(super) fn last(&self) -> Option<&Tick> {
        self.recent.back()
    }

    /// Observations of the last `window`, newest first.
    pub(super) fn since(&self, now_ms: u64, window: Duration) -> impl Iterator<Item = &Tick> {
        let from = now_ms.saturating_sub(ms(window));
        self.recent.iter().rev().take_while(move |tick| tick.at_ms > from)
    }

    /// Whether the last `window` was observed from its beginning, without a gap longer than `gap_max`.
    pub(super) fn covers(&self, now_ms: u64, window: Duration, gap_max: Duration) -> bool {
        let from = now_ms.saturating_sub(ms(window));
        let mut later = now_ms;
        for tick in self.recent.iter().rev() {
            if later.saturating_sub(tick.at_ms) > ms(gap_max) {
                return false;
            }
            later = tick.at_ms;
            if later <= from {
                return true;
            }
        }
        false
    }

    /// How many pods there were `ago`, as far as is known.
    pub(super) fn replicas_ago(&self, now_ms: u64, ago: Duration) -> Option<u32> {
        let within = self.since(now_ms, ago).last();
        within.or(self.recent.back()).map(|tick| tick.replicas)
    }

    pub(super) fn last_move(&self, is_wanted: impl Fn(&Move) -> bool) -> Option<Move> {
        self.moves.iter().rev().find(|one| is_wanted(one)).copied()
    }
}

pub(super) fn ms(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// A pod that reports no number is taken for full: it is in no state to be relied on.
fn finite(load: f64) -> f64 {
    if load.is_finite() { load.max(0.0) } else { 1.0 }
}
