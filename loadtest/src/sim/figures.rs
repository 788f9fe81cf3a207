//! What is measured in a simulated pool.
//!
//! *Owns*: samples, and what is made of them.
//! *Does not own*: what is aimed at (`placement`).

use super::world::{FILLED_S, Scenario};

/// A reconnect of the storm is over after so long.
const STORM_S: f64 = 10.0;
/// Streams are there, and reports of them too: from here on balance is judged.
const CALM_AFTER_S: f64 = 60.0;
/// A death and pods that join are judged on their own for so long.
const UPHEAVAL_S: f64 = 120.0;
/// A dead pod's streams are on other pods.
const DEATH_SETTLED_S: f64 = 5.0;
/// How long is looked then.
const DEATH_JUDGED_S: f64 = 10.0;
/// A pod that has joined is new for so long; later it is one like all others, above or below the mean.
const JOINED_S: f64 = 180.0;
/// A stream that is moved again within so much has gone to and fro.
const MOVED_AGAIN_S: f64 = 300.0;

/// The pool at one moment; loads are fractions of a pod.
#[derive(Debug, Clone, Copy)]
pub struct Sample {
    /// When.
    pub at_s: f64,
    /// Mean load of the pods that are alive.
    pub mean: f64,
    /// Load of the hottest one.
    pub hottest: f64,
    /// Load of the hottest of those that have joined.
    pub new: f64,
    /// Load per pod and table that the pod has.
    pub per_pair: f64,
}

/// What was measured.
#[derive(Debug, Clone)]
pub struct Figures {
    storm_at_s: f64,
    death_at_s: f64,
    join_at_s: f64,
    /// One each second, from when the pool is filled.
    pub samples: Vec<Sample>,
    /// Streams that found a pod.
    pub placed: u64,
    /// Times that a stream found none.
    pub refused: u64,
    /// Streams that were handed off by hot pods.
    pub moves: u64,
    /// Of those the ones that had been handed off shortly before.
    pub moved_again: u64,
    back: u64,
    back_on_same: u64,
}

impl Figures {
    pub(super) fn new(scenario: &Scenario) -> Self {
        Self {
            storm_at_s: scenario.storm_at_s,
            death_at_s: scenario.death_at_s,
            join_at_s: scenario.join_at_s,
            samples: Vec::new(),
            placed: 0,
            refused: 0,
            moves: 0,
            moved_again: 0,
            back: 0,
            back_on_same: 0,
        }
    }

    pub(super) fn sample(&mut self, at_s: f64, [mean, hottest, new]: [f64; 3], per_pair: f64) {
        self.samples.push(Sample { at_s, mean, hottest, new, per_pair });
    }

    pub(super) fn came_back(&mut self, at_s: f64, on_same: bool) {
        if (self.storm_at_s..self.storm_at_s + STORM_S).contains(&at_s) {
            self.back += 1;
            self.back_on_same += u64::from(on_same);
        }
    }

    pub(super) fn moved(&mut self, at_s: f64, before_s: Option<f64>) {
        self.moves += 1;
        self.moved_again += u64::from(before_s.is_some_and(|before| at_s - before < MOVED_AGAIN_S));
    }

    /// Hottest pod over the mean, at each moment outside upheavals.
    pub fn calm(&self) -> impl Iterator<Item = f64> {
        let upheavals = [self.death_at_s, self.join_at_s];
        let is_calm = move |sample: &&Sample| {
            let is_upheaval = upheavals.iter().any(|at| (*at..*at + UPHEAVAL_S).contains(&sample.at_s));
            sample.at_s >= FILLED_S + CALM_AFTER_S && !is_upheaval
        };
        self.samples.iter().filter(is_calm).map(Sample::ratio)
    }

    /// Load of the hottest pod at any time.
    pub fn fullest(&self) -> f64 {
        self.samples.iter().map(|sample| sample.hottest).fold(0.0, f64::max)
    }

    /// Seconds in a thousand in which a pod is above its capacity.
    pub fn overfull(&self) -> f64 {
        let over = self.samples.iter().filter(|sample| sample.hottest > 1.0).count();
        1000.0 * over as f64 / self.samples.len() as f64
    }

    /// Load per pod and table, on average.
    pub fn per_pair(&self) -> f64 {
        let calm = self.samples.iter().filter(|sample| sample.at_s >= FILLED_S + CALM_AFTER_S);
        let (sum, count) = calm.fold((0.0, 0_u32), |(sum, count), sample| (sum + sample.per_pair, count + 1));
        sum / f64::from(count)
    }

    /// Share of the reconnects that came back to the pod that they had left.
    pub fn sticky(&self) -> f64 {
        self.back_on_same as f64 / self.back as f64
    }

    /// Hottest pod over the mean, once a dead pod's streams are placed again.
    pub fn after_death(&self) -> f64 {
        let from = self.death_at_s + DEATH_SETTLED_S;
        self.greatest(from..from + DEATH_JUDGED_S, Sample::ratio)
    }

    /// Hottest of the pods that have joined over the mean, from then on.
    pub fn new_pod(&self) -> f64 {
        self.greatest(self.join_at_s..self.join_at_s + JOINED_S, |sample| sample.new / sample.mean)
    }

    fn greatest(&self, span: std::ops::Range<f64>, value: impl Fn(&Sample) -> f64) -> f64 {
        let inside = self.samples.iter().filter(|sample| span.contains(&sample.at_s));
        inside.map(value).fold(f64::NAN, f64::max)
    }
}

impl Sample {
    /// Hottest pod over the mean.
    pub fn ratio(&self) -> f64 {
        self.hottest / self.mean
    }
}

/// The value below which this share of all lies.
pub fn quantile(values: impl Iterator<Item = f64>, share: f64) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    let at = (share * values.len() as f64) as usize;
    values.get(at.min(values.len().saturating_sub(1))).copied().unwrap_or(f64::NAN)
}
