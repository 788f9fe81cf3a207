//! Each rule of the policy by itself, then what has to hold whatever the load does.
//!
//! *Owns*: a pool so simple that a test can say what it carries. *Does not own*: placement (`loadtest sim policy`).

use proptest::prelude::*;

use super::*;

const SECOND: u64 = 1000;
const MINUTE: u64 = 60 * SECOND;
const HOUR: u64 = 60 * MINUTE;
const DAY: u64 = 24 * HOUR;
/// A Thursday in 1970 is as good as any: far enough from 0 to look back.
const BEGIN: u64 = 40 * DAY;

/// A pool that does what it is told, and shares its demand evenly among its active pods.
struct Pool {
    policy: Policy,
    history: History,
    now_ms: u64,
    step_ms: u64,
    /// When each pod was started.
    started: Vec<u64>,
    refused: u64,
    report_age: Option<Duration>,
    lag: Duration,
    decisions: Vec<(u64, Decision)>,
}

impl Pool {
    fn new(policy: Policy, pods: usize) -> Self {
        Self {
            policy,
            history: History::new(),
            now_ms: BEGIN,
            step_ms: 5 * SECOND,
            started: vec![0; pods],
            refused: 0,
            report_age: Some(Duration::ZERO),
            lag: Duration::ZERO,
            decisions: Vec::new(),
        }
    }

    fn pods(&self) -> u32 {
        self.started.len() as u32
    }

    fn observation(&self, demand: f64) -> Observation {
        let ready = |started: &u64| started + ms(self.policy.start) <= self.now_ms;
        let active = self.started.iter().filter(|started| ready(started)).count().max(1);
        let pod = |(n, started): (usize, &u64)| PodSample {
            id: format!("pod-{}", n + 1),
            phase: if ready(started) { PodPhase::Active } else { PodPhase::Joining },
            load: if ready(started) { (demand / active as f64).min(1.0) } else { 0.0 },
            report_age: self.report_age,
            streams: 100,
            refused: if n == 0 { self.refused } else { 0 },
            lag: self.lag,
        };
        Observation {
            now_ms: self.now_ms,
            replicas: self.pods(),
            pods: self.started.iter().enumerate().map(pod).collect(),
        }
    }

    /// One step: seen, decided, done.
    fn step(&mut self, demand: f64) -> Decision {
        self.now_ms += self.step_ms;
        self.history.observe(&self.observation(demand));
        self.decide()
    }

    fn decide(&mut self) -> Decision {
        let decision = desired_pods(&self.history, &self.policy, self.now_ms);
        self.decisions.push((self.now_ms, decision));
        self.started.resize(decision.pods as usize, self.now_ms);
        decision
    }

    fn run(&mut self, for_ms: u64, demand: impl Fn(u64) -> f64) -> Decision {
        let begin = self.now_ms;
        let mut decision = self.step(demand(0));
        while self.now_ms < begin + for_ms {
            decision = self.step(demand(self.now_ms - begin));
        }
        decision
    }

    /// Changes of direction, as an hour has at most.
    fn turns_in_an_hour(&self) -> usize {
        let mut turns: Vec<u64> = Vec::new();
        let mut before = None;
        for (at, decision) in &self.decisions {
            let direction = decision.direction();
            if direction != "hold" {
                if before.is_some_and(|before| before != direction) {
                    turns.push(*at);
                }
                before = Some(direction);
            }
        }
        turns
            .iter()
            .map(|at| turns.iter().filter(|other| (*at..*at + HOUR).contains(*other)).count())
            .max()
            .unwrap_or(0)
    }
}

fn up_to(max: u32) -> Policy {
    Policy { max, ..Policy::default() }
}

#[test]
fn without_reports_there_are_as_many_as_the_least() {
    let decision = desired_pods(&History::new(), &Policy { min: 3, ..Policy::default() }, BEGIN);
    assert_eq!((decision.pods, decision.reason), (3, Reason::NoReports));
}

#[test]
fn the_larger_the_overload_the_shorter_the_proof() {
    let proof = |load: f64| {
        let mut pool = Pool::new(Policy { predicts: false, ..up_to(8) }, 2);
        pool.step_ms = SECOND;
        pool.run(90 * SECOND, |_| 0.4);
        let begin = pool.now_ms;
        (0..200).find_map(|_| (pool.step(2.0 * load).pods > 2).then_some((pool.now_ms - begin) / SECOND))
    };
    assert_eq!(proof(0.64), None);
    assert_eq!(proof(0.7), Some(60));
    assert_eq!(proof(0.85), Some(15));
    assert_eq!(proof(1.0), Some(5));
}

#[test]
fn the_pool_grows_to_what_the_load_asks_for_at_once() {
    let mut pool = Pool::new(Policy { predicts: false, ..up_to(20) }, 10);
    let decision = pool.run(65 * SECOND, |_| 7.0);
    assert_eq!((decision.pods, decision.terms.reactive), (12, 12), "{decision:?}");
}

#[test]
fn full_pods_double_once_and_then_wait_for_those_that_start() {
    let mut pool = Pool::new(Policy { predicts: false, ..up_to(64) }, 2);
    pool.step_ms = SECOND;
    pool.run(6 * SECOND, |_| 30.0);
    assert_eq!(pool.pods(), 4);
    pool.run(18 * SECOND, |_| 30.0);
    assert_eq!(pool.pods(), 4, "the new ones are not up");
    pool.run(8 * SECOND, |_| 30.0);
    assert_eq!(pool.pods(), 8);
}

#[test]
fn the_pool_at_most_doubles_within_a_moment() {
    let mut pool = Pool::new(up_to(64), 2);
    let step = Policy { start: Duration::ZERO, ..pool.policy.clone() };
    pool.policy = step;
    pool.step_ms = SECOND;
    pool.run(120 * SECOND, |_| 60.0);
    for (at, decision) in &pool.decisions {
        let before = pool.decisions.iter().find(|(other, _)| other + 15 * SECOND > *at);
        let before = before.expect("a decision").1.terms.replicas;
        assert!(decision.pods <= before * 2, "{before} to {} pods", decision.pods);
    }
    assert_eq!(pool.pods(), 64);
}

#[test]
fn refusals_count_as_demand() {
    let mut pool = Pool::new(up_to(8), 2);
    pool.step_ms = SECOND;
    pool.run(60 * SECOND, |_| 1.1);
    assert_eq!(pool.pods(), 2);
    pool.refused += 1;
    let decision = pool.step(1.1);
    assert_eq!((decision.pods, decision.reason), (3, Reason::Refused));
    assert!(decision.terms.demand > 1.1 && decision.terms.refused == 1, "{decision:?}");
    // Those who are refused ask again and again.
    pool.refused += 1_000_000;
    assert!(pool.step(1.1).terms.demand <= 2.2);
}

#[test]
fn refusals_of_idle_pods_do_not_make_the_pool_grow_without_end() {
    let mut pool = Pool::new(up_to(8), 2);
    pool.step_ms = SECOND;
    for _ in 0..600 {
        pool.refused += 1;
        pool.step(0.2);
    }
    assert_eq!(pool.pods(), 2);
}

#[test]
fn one_more_comes_when_some_are_hot_and_has_its_say_before_the_next() {
    let mut pool = Pool::new(up_to(30), 10);
    pool.step_ms = SECOND;
    let mut reasons = Vec::new();
    for _ in 0..50 {
        pool.now_ms += SECOND;
        let mut seen = pool.observation(5.8);
        seen.pods[..2].iter_mut().for_each(|pod| pod.load = 0.9);
        pool.history.observe(&seen);
        let decision = pool.decide();
        reasons.extend((decision.direction() != "hold").then_some((decision.pods, decision.reason)));
    }
    assert_eq!(reasons, [(11, Reason::SomeHot)]);
}

#[test]
fn a_hot_pod_among_idle_ones_asks_for_none() {
    let mut pool = Pool::new(up_to(8), 2);
    for _ in 0..500 {
        pool.now_ms += 5 * SECOND;
        let mut seen = pool.observation(0.2);
        seen.pods[0].load = 0.95;
        seen.pods[1].load = 0.0;
        pool.history.observe(&seen);
        let decision = pool.decide();
        assert_eq!(decision.pods, 2, "{decision:?}");
    }
}

#[test]
fn one_at_a_time_goes_after_a_quiet_period() {
    let mut pool = Pool::new(Policy { predicts: false, ..up_to(8) }, 6);
    pool.run(10 * MINUTE - 10 * SECOND, |_| 0.9);
    assert_eq!((pool.pods(), pool.decisions.last().expect("one").1.reason), (6, Reason::NotQuietYet));
    pool.run(10 * MINUTE, |_| 0.9);
    assert_eq!((pool.pods(), pool.decisions.last().expect("one").1.reason), (2, Reason::WithinBounds));
    let gone: Vec<u64> =
        pool.decisions.iter().filter(|(_, one)| one.direction() == "in").map(|(at, _)| *at).collect();
    assert!(gone.windows(2).all(|pair| pair[1] - pair[0] >= MINUTE), "{gone:?}");
    assert!(pool.decisions.iter().all(|(_, one)| one.terms.replicas.saturating_sub(one.pods) <= 1));
}

#[test]
fn never_below_what_the_others_can_carry() {
    let mut pool = Pool::new(Policy { predicts: false, ..up_to(8) }, 3);
    // One peak within each quiet period is enough.
    pool.run(2 * HOUR, |at| if at % (9 * MINUTE) < 20 * SECOND { 1.05 } else { 0.3 });
    assert_eq!(pool.pods(), 3);
    pool.run(HOUR, |_| 0.95);
    assert_eq!(pool.pods(), 2);
}

/// A pool that would go in at once, but for what `spoil` does to each observation.
fn check_hold(reason: Reason, spoil: impl Fn(&mut Observation)) {
    let mut pool = Pool::new(Policy { predicts: false, ..up_to(8) }, 4);
    for spoilt in [true, false] {
        for _ in 0..140 {
            pool.now_ms += 5 * SECOND;
            let mut seen = pool.observation(0.4);
            if spoilt {
                spoil(&mut seen);
            }
            pool.history.observe(&seen);
            pool.decide();
        }
        let last = pool.decisions.last().expect("one").1;
        if spoilt {
            assert_eq!((last.pods, last.reason), (4, reason));
        } else {
            assert!(pool.pods() < 4, "the cause is gone: {last:?}");
        }
    }
}

#[test]
fn none_goes_while_something_is_unclear() {
    check_hold(Reason::Stale, |seen| seen.pods[1].report_age = Some(Duration::from_secs(31)));
    check_hold(Reason::Stale, |seen| seen.pods[1].report_age = None);
    check_hold(Reason::Stale, |seen| seen.pods[1].phase = PodPhase::Lost);
    check_hold(Reason::DrainRuns, |seen| seen.pods[3].phase = PodPhase::Draining);
    check_hold(Reason::Starting, |seen| seen.pods[3].phase = PodPhase::Joining);
    check_hold(Reason::Starting, |seen| drop(seen.pods.pop()));
    check_hold(Reason::Backlog, |seen| seen.pods[0].lag = Duration::from_secs(11));
}

#[test]
fn none_goes_when_nothing_was_seen_for_a_while() {
    let mut pool = Pool::new(up_to(8), 4);
    pool.run(12 * MINUTE, |_| 1.6);
    assert_eq!(pool.pods(), 4);
    pool.run(5 * SECOND, |_| 0.3);
    pool.now_ms += 31 * SECOND;
    let decision = pool.decide();
    assert_eq!((decision.pods, decision.reason), (4, Reason::Stale));
    // The gap is no quiet time either.
    assert_eq!(pool.run(9 * MINUTE, |_| 0.3).reason, Reason::NotQuietYet);
}

#[test]
fn a_growing_demand_is_met_before_it_is_there() {
    let first_out = |predicts| {
        let mut pool = Pool::new(Policy { predicts, ..up_to(20) }, 4);
        pool.run(10 * MINUTE, |_| 2.2);
        pool.run(10 * MINUTE, |at| 2.2 + at as f64 / MINUTE as f64 * 0.3);
        let (at, decision) = pool.decisions.iter().find(|(_, one)| one.direction() == "out").expect("grows");
        (*at, decision.reason)
    };
    let ((foreseen, why), (reacted, because)) = (first_out(true), first_out(false));
    assert!(foreseen + MINUTE / 2 <= reacted, "{foreseen} {reacted}");
    assert_eq!((why, because), (Reason::Trend, Reason::MeanHigh));
}

#[test]
fn a_step_is_no_trend() {
    let mut pool = Pool::new(up_to(20), 4);
    pool.run(10 * MINUTE, |_| 1.0);
    pool.run(5 * MINUTE, |_| 2.4);
    assert!(pool.decisions.iter().all(|(_, one)| one.terms.trend <= one.terms.demand + 1e-9));
}

/// A day with a step at noon.
fn noon(at_ms: u64) -> f64 {
    if (11 * HOUR..14 * HOUR).contains(&(at_ms % DAY)) { 5.0 } else { 1.5 }
}

#[test]
fn what_each_day_brings_is_expected() {
    let mut pool = Pool::new(up_to(20), 4);
    pool.step_ms = 15 * SECOND;
    let begin = pool.now_ms;
    pool.run(3 * DAY, |at| noon(begin + at));
    let at_noon = |day: u64| {
        let noon = BEGIN + day * DAY + 11 * HOUR;
        let before = pool.decisions.iter().rfind(|(at, _)| *at < noon).expect("one").1;
        (before.pods, before.terms.season)
    };
    assert_eq!(at_noon(0).1, 0.0);
    let (pods, season) = at_noon(2);
    assert!(pods >= 8 && season >= 5.0, "{pods} pods for {season}");
    assert!(
        pool.history.forecasts.season_score().loss < pool.history.forecasts.season_score().last_value_loss
    );
}

#[test]
fn a_forecast_that_loses_switches_itself_off() {
    let mut pool = Pool::new(up_to(20), 4);
    pool.step_ms = 15 * SECOND;
    // Each day's peak comes at another time: what yesterday had says nothing of today.
    let begin = pool.now_ms;
    pool.run(4 * DAY, |at| noon(begin + at + (begin + at) / DAY * 7 * HOUR));
    let score = pool.history.forecasts.season_score();
    assert!(score.minutes > 3000 && score.loss > score.last_value_loss, "{score:?}");
    assert!(pool.decisions.iter().rev().take(1000).all(|(_, one)| one.terms.season == 0.0));
}

#[test]
fn an_operator_s_limits_hold_at_once() {
    for (pods, expected) in [(1, 3), (9, 5)] {
        let mut pool = Pool::new(Policy { min: 3, max: 5, ..Policy::default() }, pods);
        let decision = pool.step(0.5);
        assert_eq!((decision.pods, decision.reason), (expected, Reason::Limits));
    }
}

/// The shapes of traffic that pools are told apart by.
fn shape(name: &str, at_ms: u64) -> f64 {
    let hours = at_ms as f64 / HOUR as f64;
    let wave = |period: f64| (hours / period * std::f64::consts::TAU).sin();
    match name {
        "ramp" => 0.5 + hours * 0.5,
        "spike" if (2.0..2.05).contains(&hours) => 12.0,
        "spike" => 1.0,
        "diurnal" => 4.0 + 3.0 * wave(24.0),
        "flash" if hours > 3.0 => 1.0 + 8.0 * (-(hours - 3.0)).exp(),
        "flash" => 1.0,
        "sawtooth" => 1.0 + 5.0 * (hours * 3.0).fract(),
        "flapping" if (at_ms / (13 * MINUTE)).is_multiple_of(2) => 5.0,
        "flapping" => 1.0,
        _ => 3.0,
    }
}

#[test]
fn no_hour_has_more_than_two_changes_of_direction() {
    for name in ["ramp", "spike", "diurnal", "flash", "sawtooth", "flapping", "constant"] {
        let mut pool = Pool::new(up_to(24), 2);
        pool.run(30 * HOUR, |at| shape(name, at));
        assert!(pool.turns_in_an_hour() <= 2, "{name}: {} changes", pool.turns_in_an_hour());
        let over =
            pool.decisions.iter().filter(|(_, one)| one.terms.demand > f64::from(one.terms.active) * 0.99);
        // Steps are met within two pods' starts each; the demand is cut at what the pods can say, 1 each.
        assert!(over.count() < 200, "{name}: too few pods for too long");
    }
}

#[test]
fn lost_reports_on_the_way_down_keep_the_pool() {
    let mut pool = Pool::new(up_to(24), 8);
    pool.report_age = None;
    pool.run(5 * HOUR, |_| 0.5);
    assert_eq!(pool.pods(), 8);
}

/// Some minutes of any load, refusals and age of reports.
fn loads() -> impl Strategy<Value = Vec<(f64, u64, u64)>> {
    prop::collection::vec((0.0..12.0f64, 0..3u64, 0..40u64), 20..60)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn the_limits_hold_whatever_happens(loads in loads(), min in 1..4u32, more in 0..9u32, pods in 1..9u32) {
        let mut pool = Pool::new(Policy { min, max: min + more, ..Policy::default() }, pods.clamp(min, min + more) as usize);
        for (load, refused, age) in loads {
            pool.refused += refused / 2;
            pool.report_age = Some(Duration::from_secs(age));
            let decision = pool.run(MINUTE, |_| load);
            prop_assert!((min..=min + more).contains(&decision.pods));
        }
    }

    #[test]
    fn none_goes_on_old_reports(loads in loads(), pods in 1..9usize) {
        let mut pool = Pool::new(up_to(9), pods);
        pool.report_age = Some(Duration::from_secs(31));
        for (load, refused, _) in loads {
            pool.refused += refused / 2;
            pool.run(MINUTE, |_| load);
        }
        prop_assert!(pool.decisions.iter().all(|(_, one)| one.direction() != "in"));
    }

    #[test]
    fn a_constant_load_is_met_once(load in 0.0..12.0f64, noise in 0.0..0.03f64, pods in 1..20usize) {
        let mut pool = Pool::new(up_to(24), pods);
        let noisy = |at: u64| load * (1.0 + noise * ((at / 1000 * 7919 % 101) as f64 / 50.0 - 1.0));
        pool.run(2 * HOUR, noisy);
        let settled = pool.pods();
        // The noise goes on where it was: begun anew, its peaks would be farther apart once than a quiet period.
        pool.run(2 * HOUR, |at| noisy(2 * HOUR + at));
        prop_assert_eq!(pool.pods(), settled);
        prop_assert!(pool.turns_in_an_hour() <= 1, "{} changes", pool.turns_in_an_hour());
    }

    #[test]
    fn a_changing_load_turns_the_pool_twice_an_hour_at_most(loads in loads(), minutes in 1..15u64) {
        let mut pool = Pool::new(up_to(24), 2);
        for (load, _, _) in &loads {
            pool.run(minutes * MINUTE, |_| *load);
        }
        prop_assert!(pool.turns_in_an_hour() <= 2);
    }

    #[test]
    fn more_load_never_asks_for_fewer(loads in prop::collection::vec(0.0..1.0f64, 150), more in 1.0..1.5f64, pods in 2..9usize) {
        // Both histories are of one pool that is left as it is; what a pod reports may be anything.
        let asked = |factor: f64| {
            let mut pool = Pool::new(Policy { max: 1000, ..Policy::default() }, pods);
            for load in &loads {
                pool.now_ms += pool.step_ms;
                let mut seen = pool.observation(0.0);
                seen.pods.iter_mut().for_each(|pod| pod.load = load * factor);
                pool.history.observe(&seen);
            }
            desired_pods(&pool.history, &pool.policy, pool.now_ms).pods
        };
        prop_assert!(asked(1.0) <= asked(more));
    }

    #[test]
    fn more_load_at_one_moment_never_makes_the_reaction_smaller(
        loads in prop::collection::vec(0.0..1.0f64, 30), at in 0..30usize, more in 0.0..1.0f64, pods in 2..9usize,
    ) {
        let asked = |extra: f64| {
            let mut pool = Pool::new(Policy { max: 1000, predicts: false, ..Policy::default() }, pods);
            for (n, load) in loads.iter().enumerate() {
                pool.now_ms += pool.step_ms;
                let mut seen = pool.observation(0.0);
                let load = load + if n == at { extra } else { 0.0 };
                seen.pods.iter_mut().for_each(|pod| pod.load = load);
                pool.history.observe(&seen);
            }
            desired_pods(&pool.history, &pool.policy, pool.now_ms).pods
        };
        prop_assert!(asked(0.0) <= asked(more));
    }
}
