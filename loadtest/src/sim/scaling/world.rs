//! A pool and its streams, second by second.
//!
//! *Owns*: streams that come, connect again and go; pods that start, take and drain. *Does not own*: how many there are.

use std::time::Duration;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use sluice_autoscaler::policy::{Observation, PodPhase, PodSample};

use super::{START_S, Traffic};

/// Streams that come each second of an ordinary day, and how long they stay: some 2,000 at a time.
const COME_PER_S: f64 = 3.4;
const STAY_S: f64 = 600.0;
/// Mean load of one of them; the mean of all pods' worth of traffic is then some 4.
const RATE: f64 = 0.002;
/// Devices, and the load of each: they stay for ever, but connect again now and then.
const DEVICES: usize = 600;
const DEVICE_RATE: f64 = 0.0001;
/// Streams of the one tenant, and the load of each: a twentieth of the traffic.
const WHALES: usize = 100;
const WHALE_RATE: f64 = 0.002;
/// After so long a stream that stays has connected again.
const RECONNECT_S: f64 = 1200.0;
/// A pod that is fuller takes no new stream.
const REFUSES_AT: f64 = 0.95;
/// Refused, a producer tries again after so long at most.
const RETRY_S: u64 = 5;
/// Streams that a drain moves each second, and what it takes to commit the rest.
const DRAIN_PACE: usize = 200;
const COMMIT_S: u64 = 5;
/// What is left of a load report after a second without load: up at once, down within some ten seconds.
const DECAY: f64 = 0.9;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Ordinary,
    Device,
    Whale,
}

impl Kind {
    fn factor(self, traffic: &Traffic) -> f64 {
        match self {
            Self::Ordinary => 1.0,
            Self::Device => traffic.fault,
            Self::Whale => traffic.whale,
        }
    }
}

#[derive(Debug, Clone, Copy)]
struct Stream {
    kind: Kind,
    rate: f64,
    /// None while it is refused.
    pod: Option<u64>,
    ends: Option<u64>,
    moves_at: u64,
}

#[derive(Debug, Clone)]
struct Pod {
    number: u64,
    started: u64,
    /// Since when it drains, and when its last stream was gone.
    draining: bool,
    empty_since: Option<u64>,
    /// By kind.
    carried: [f64; 3],
    streams: u32,
    load: f64,
    reported: f64,
    refused: u64,
}

impl Pod {
    fn is_active(&self, second: u64) -> bool {
        !self.draining && second >= self.started + START_S
    }
}

/// The pool.
pub(super) struct World {
    random: StdRng,
    now: u64,
    pods: Vec<Pod>,
    next_pod: u64,
    streams: Vec<Stream>,
    demand: f64,
    refused: u64,
    moves: u64,
}

impl World {
    /// Eight pods that have run for long, and the streams of a night.
    pub(super) fn new(seed: u64, now: u64) -> Self {
        let mut world = Self {
            random: StdRng::seed_from_u64(seed),
            now,
            pods: Vec::new(),
            next_pod: 0,
            streams: Vec::new(),
            demand: 0.0,
            refused: 0,
            moves: 0,
        };
        (0..8).for_each(|_| world.start_pod(None));
        let devices = std::iter::repeat_n((Kind::Device, DEVICE_RATE), DEVICES);
        let whales = std::iter::repeat_n((Kind::Whale, WHALE_RATE), WHALES);
        for (kind, rate) in devices.chain(whales) {
            let moves_at = now + world.after(RECONNECT_S);
            world.streams.push(Stream { kind, rate, pod: None, ends: None, moves_at });
        }
        (0..(COME_PER_S * STAY_S) as usize).for_each(|_| world.come());
        world.open_waiting();
        world
    }

    fn start_pod(&mut self, at: Option<u64>) {
        self.next_pod += 1;
        self.pods.push(Pod {
            number: self.next_pod,
            started: at.unwrap_or_else(|| self.now.saturating_sub(START_S)),
            draining: false,
            empty_since: None,
            carried: [0.0; 3],
            streams: 0,
            load: 0.0,
            reported: 0.0,
            refused: 0,
        });
    }

    /// Seconds until something happens that happens each `mean_s` on average.
    fn after(&mut self, mean_s: f64) -> u64 {
        let chance: f64 = self.random.random::<f64>();
        (-mean_s * (1.0 - chance).ln()) as u64 + 1
    }

    fn come(&mut self) {
        // Some send ten times as much as others.
        let rate = RATE * 2.0 * 10f64.powf(self.random.random::<f64>() - 1.0) / 0.78;
        let (ends, moves_at) = (self.now + self.after(STAY_S), self.now + self.after(RECONNECT_S));
        self.streams.push(Stream { kind: Kind::Ordinary, rate, pod: None, ends: Some(ends), moves_at });
    }

    /// A second passes.
    pub(super) fn step(&mut self, second: u64, traffic: &Traffic) {
        self.now = second;
        let comers = COME_PER_S * traffic.streams;
        let whole = comers as usize + usize::from(self.random.random::<f64>() < comers.fract());
        (0..whole).for_each(|_| self.come());
        self.end_streams();
        self.drain();
        self.open_waiting();
        self.sum_up(traffic);
    }

    fn end_streams(&mut self) {
        let mut n = 0;
        while n < self.streams.len() {
            let stream = self.streams[n];
            if stream.ends.is_some_and(|ends| ends <= self.now) {
                self.leave(n);
                self.streams.swap_remove(n);
                continue;
            }
            if stream.moves_at <= self.now && stream.pod.is_some() {
                self.leave(n);
                self.streams[n].moves_at = self.now + self.after(RECONNECT_S);
            }
            n += 1;
        }
    }

    fn leave(&mut self, n: usize) {
        let stream = &mut self.streams[n];
        let pod = stream.pod.take().and_then(|number| self.pods.iter_mut().find(|pod| pod.number == number));
        if let Some(pod) = pod {
            pod.carried[stream.kind as usize] -= stream.rate;
            pod.streams -= 1;
        }
    }

    /// Puts each stream that has no pod on the less loaded of two, or the least loaded one where both are full.
    fn open_waiting(&mut self) {
        let active: Vec<usize> = (0..self.pods.len()).filter(|n| self.pods[*n].is_active(self.now)).collect();
        if active.is_empty() {
            return;
        }
        for n in 0..self.streams.len() {
            // A refused one has its next try in `moves_at`.
            if self.streams[n].pod.is_some() {
                continue;
            }
            let pick = |random: &mut StdRng| active[random.random_range(0..active.len())];
            let (one, other) = (pick(&mut self.random), pick(&mut self.random));
            let reported = |pod: &usize| self.pods[*pod].reported;
            let mut chosen = if reported(&one) <= reported(&other) { one } else { other };
            if reported(&chosen) >= REFUSES_AT {
                let least = active.iter().copied().min_by(|a, b| reported(a).total_cmp(&reported(b)));
                chosen = least.unwrap_or(chosen);
            }
            if self.pods[chosen].reported >= REFUSES_AT {
                // Each tries again within some seconds, not all in each one.
                if self.random.random_range(0..RETRY_S) == 0 {
                    self.pods[chosen].refused += 1;
                    self.refused += 1;
                }
                continue;
            }
            let stream = &mut self.streams[n];
            let pod = &mut self.pods[chosen];
            stream.pod = Some(pod.number);
            pod.carried[stream.kind as usize] += stream.rate;
            pod.streams += 1;
            // What a gateway has placed since the last report counts as if it were reported.
            pod.reported += stream.rate;
        }
    }

    fn drain(&mut self) {
        let now = self.now;
        let Some(pod) = self.pods.iter().find(|pod| pod.draining) else { return };
        let number = pod.number;
        let its: Vec<usize> = (0..self.streams.len())
            .filter(|n| self.streams[*n].pod == Some(number))
            .take(DRAIN_PACE)
            .collect();
        self.moves += its.len() as u64;
        its.iter().for_each(|n| self.leave(*n));
        for pod in &mut self.pods {
            if pod.number == number && pod.streams == 0 {
                pod.empty_since.get_or_insert(now);
            }
        }
        self.pods.retain(|pod| pod.empty_since.is_none_or(|since| now < since + COMMIT_S));
    }

    fn sum_up(&mut self, traffic: &Traffic) {
        let kinds = [Kind::Ordinary, Kind::Device, Kind::Whale];
        for pod in &mut self.pods {
            let carried = kinds.iter().map(|kind| pod.carried[*kind as usize] * kind.factor(traffic));
            pod.load = carried.sum::<f64>().max(0.0);
            pod.reported = pod.load.min(1.0).max(pod.reported.min(1.0) * DECAY);
        }
        let waiting = self.streams.iter().filter(|stream| stream.pod.is_none());
        let waits: f64 = waiting.map(|stream| stream.rate * stream.kind.factor(traffic)).sum();
        self.demand = waits + self.pods.iter().map(|pod| pod.load).sum::<f64>();
    }

    /// As a gateway's admin API says it.
    pub(super) fn observation(&self, now_ms: u64) -> Observation {
        let sample = |pod: &Pod| PodSample {
            id: format!("pod-{}", pod.number),
            phase: if pod.draining {
                PodPhase::Draining
            } else if pod.is_active(self.now) {
                PodPhase::Active
            } else {
                PodPhase::Joining
            },
            load: pod.reported.min(1.0),
            report_age: Some(Duration::from_millis(500)),
            streams: pod.streams,
            refused: pod.refused,
            lag: Duration::from_secs(1),
        };
        Observation {
            now_ms,
            replicas: self.pods.iter().filter(|pod| !pod.draining).count() as u32,
            pods: self.pods.iter().map(sample).collect(),
        }
    }

    /// Starts pods, or drains the newest one.
    pub(super) fn scale(&mut self, second: u64, pods: u32) {
        let staying = self.pods.iter().filter(|pod| !pod.draining).count() as u32;
        (staying..pods).for_each(|_| self.start_pod(Some(second)));
        let is_draining = self.pods.iter().any(|pod| pod.draining);
        if pods < staying
            && !is_draining
            && let Some(last) = self.pods.last_mut()
        {
            last.draining = true;
        }
    }

    /// Pods' worth of what producers send, those that are refused included.
    pub(super) fn demand(&self) -> f64 {
        self.demand
    }

    pub(super) fn active(&self) -> u32 {
        self.pods.iter().filter(|pod| pod.is_active(self.now)).count() as u32
    }

    pub(super) fn processes(&self) -> u32 {
        self.pods.len() as u32
    }

    pub(super) fn is_some_full(&self) -> bool {
        self.pods.iter().any(|pod| pod.load >= 1.0)
    }

    /// Opens refused, and streams moved by drains.
    pub(super) fn counts(&self) -> (u64, u64) {
        (self.refused, self.moves)
    }

    pub(super) fn forget_counts(&mut self) {
        (self.refused, self.moves) = (0, 0);
    }
}
