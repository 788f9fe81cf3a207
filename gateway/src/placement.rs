//! Which pod takes a stream: bounded table affinity, two random choices, correction for stale reports.
//!
//! A pure function of the pool view, shared by gateway, simulator and `explain`. A small table's streams stay
//! on its home, so that its files are few and large; a hot table spreads over the first pods of its order.
//!
//! Sources: two choices under stale data (M. Mitzenmacher, 2000), own placements since the last report
//! (M. Dahlin, 2000), bounded loads on a ring (Mirrokni, Thorup, Zadimoghaddam, 2017).
//!
//! *Owns*: the rules and their numbers.
//! *Does not own*: how the view is learned; whether the pod agrees: it is the judge, and may answer `Busy`.
//! Keeps P9: no pod is filled past its bound while others have room.

use std::time::Duration;

use rand::{Rng, RngExt};
use sluice_shared::ids::{PodId, TableName};
use sluice_shared::lifecycle::Phase;
use sluice_shared::pool::{PodView, PoolView, TableRate};

/// Share of one pod that a table may fill before it spreads to the next.
const TABLE_SHARE: f64 = 0.10;
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
const STREAM_LOAD_MIN: f64 = 0.002;
/// A report this old begins to decay toward the mean of the pool.
const REPORT_FRESH: Duration = Duration::from_secs(5);
/// A pod whose report is this old is not placed on while there are others.
const REPORT_DEAD: Duration = Duration::from_secs(15);

/// What is known of the stream to place.
#[derive(Debug, Clone, Copy, Default)]
pub struct StreamHints<'a> {
    /// The pod that held it last.
    pub last_pod: Option<&'a PodId>,
    /// What its producer expects to send.
    pub rate_bytes_per_s: Option<u64>,
    /// Pods that have refused it just now.
    pub tried: &'a [PodId],
}

/// Which rule decided.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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

/// A pod and its load as the decision saw it.
#[derive(Debug, Clone, PartialEq)]
pub struct Candidate {
    /// The pod.
    pub pod: PodId,
    /// Corrected load.
    pub load: f64,
}

/// A decision, and what it was made from.
#[derive(Debug, Clone, PartialEq)]
pub struct Placement {
    /// The pod to open the stream on.
    pub pod: PodId,
    /// Why that one.
    pub rule: Rule,
    /// The pods that the table stands on at its present rate, its home first.
    pub candidates: Vec<Candidate>,
    /// Load up to which a pod took the stream.
    pub bound: f64,
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
        .sticky(hints)
        .or_else(|| choice.two_choices(rng))
        .or_else(|| choice.overflow())
        .or_else(|| choice.whole_pool(rng))
        .ok_or(NoPlace::Full)?;
    let candidate = |ranked: &Ranked<'_>| Candidate { pod: ranked.pod.id.clone(), load: ranked.load };
    Ok(Placement {
        pod: pod.pod.id.clone(),
        rule,
        candidates: choice.order[..choice.spread].iter().map(candidate).collect(),
        bound: choice.bound,
    })
}

/// What a stream is expected to add to a pod, as a fraction of its capacity.
pub fn stream_load(view: &PoolView, table: &TableName, rate: Option<u64>, pod: &PodView) -> f64 {
    let known = view.tables.get(table).filter(|table| table.streams > 0);
    let average = known.map(|table| table.bytes_per_s / f64::from(table.streams));
    let rate = rate.map(|rate| rate as f64).or(average).unwrap_or(0.0);
    (rate / pod.load.capacity_bytes_per_s).clamp(STREAM_LOAD_MIN, 1.0)
}

#[derive(Clone, Copy)]
struct Ranked<'a> {
    pod: &'a PodView,
    /// What the pod reports, decayed by age.
    reported: f64,
    /// With own placements on top.
    load: f64,
    /// What this stream would add.
    adds: f64,
}

/// All that the rules look at.
struct Choice<'a> {
    /// Pods that may be used, in the table's order.
    order: Vec<Ranked<'a>>,
    /// How many of them the table stands on.
    spread: usize,
    /// Load up to which a pod takes a stream.
    bound: f64,
}

impl<'a> Choice<'a> {
    fn new(view: &'a PoolView, table: &TableName, hints: &StreamHints<'_>) -> Result<Self, NoPlace> {
        let usable = usable(view, table, hints.tried);
        if usable.is_empty() {
            return Err(NoPlace::Empty);
        }
        let pods = usable.len() as f64;
        let reported_mean = usable.iter().map(|pod| pod.load.fraction()).sum::<f64>() / pods;
        let rank = |pod: &'a PodView| {
            let reported = decayed(pod, reported_mean);
            let load = reported + f64::from(view.gateways.max(1)) * pod.placed;
            Ranked { pod, reported, load, adds: stream_load(view, table, hints.rate_bytes_per_s, pod) }
        };
        let order: Vec<Ranked<'a>> = usable.into_iter().map(rank).collect();
        let mean = order.iter().map(|pod| pod.load).sum::<f64>() / pods;
        let adds = order.iter().map(|pod| pod.adds).fold(0.0, f64::max);
        let bound = (BOUND_OVER_MEAN * mean).max(mean + adds).max(BOUND_MIN);
        let spread = spread(view.tables.get(table), &order);
        Ok(Self { order, spread, bound })
    }

    fn fits(&self, pod: &Ranked<'_>, bound: f64) -> bool {
        pod.load + pod.adds <= bound && pod.reported < HARD_LIMIT
    }

    fn sticky(&self, hints: &StreamHints<'_>) -> Option<(Ranked<'a>, Rule)> {
        let last = self.order.iter().find(|ranked| Some(&ranked.pod.id) == hints.last_pod)?;
        self.fits(last, STICKY_OVER_BOUND * self.bound).then_some((*last, Rule::Sticky))
    }

    fn two_choices(&self, rng: &mut impl Rng) -> Option<(Ranked<'a>, Rule)> {
        let better = less_loaded_of_two(&self.order[..self.spread], rng)?;
        self.fits(&better, self.bound).then_some((better, Rule::TwoChoices))
    }

    fn overflow(&self) -> Option<(Ranked<'a>, Rule)> {
        let next = self.order.iter().find(|pod| self.fits(pod, self.bound))?;
        Some((*next, Rule::Overflow))
    }

    fn whole_pool(&self, rng: &mut impl Rng) -> Option<(Ranked<'a>, Rule)> {
        let open: Vec<Ranked<'a>> =
            self.order.iter().filter(|pod| pod.reported < HARD_LIMIT).copied().collect();
        Some((less_loaded_of_two(&open, rng)?, Rule::WholePool))
    }
}

/// The pods that may be used, in the table's order: those that are well, else those of which nothing was
/// heard for long, else those that were set aside.
fn usable<'a>(view: &'a PoolView, table: &TableName, tried: &[PodId]) -> Vec<&'a PodView> {
    let open: Vec<&PodView> =
        view.order(table).filter(|pod| pod.phase == Phase::Active && !tried.contains(&pod.id)).collect();
    let well = |pod: &&PodView| !pod.aside && pod.load.age <= REPORT_DEAD;
    for good in [&well as &dyn Fn(&&PodView) -> bool, &|pod: &&PodView| !pod.aside] {
        let chosen: Vec<&PodView> = open.iter().copied().filter(|pod| good(pod)).collect();
        if !chosen.is_empty() {
            return chosen;
        }
    }
    open
}

/// A report that grows old says less and less: it decays toward the mean.
fn decayed(pod: &PodView, mean: f64) -> f64 {
    let span = (REPORT_DEAD - REPORT_FRESH).as_secs_f64();
    let staleness = (pod.load.age.saturating_sub(REPORT_FRESH).as_secs_f64() / span).min(1.0);
    let reported = pod.load.fraction();
    reported + (mean - reported) * staleness
}

/// On how many pods the table stands.
fn spread(rate: Option<&TableRate>, order: &[Ranked<'_>]) -> usize {
    let Some(rate) = rate else { return 1 };
    let capacity =
        order.iter().map(|pod| pod.pod.load.capacity_bytes_per_s).sum::<f64>() / order.len() as f64;
    let wanted = (rate.bytes_per_s / (TABLE_SHARE * capacity)).ceil() as usize;
    wanted.max(rate.spread_min).clamp(1, order.len())
}

fn less_loaded_of_two<'a>(pods: &[Ranked<'a>], rng: &mut impl Rng) -> Option<Ranked<'a>> {
    let first = match pods {
        [] => return None,
        [only] => return Some(*only),
        _ => rng.random_range(0..pods.len()),
    };
    // Any but the first, each equally likely.
    let second = (first + rng.random_range(1..pods.len())) % pods.len();
    let (first, second) = (pods[first], pods[second]);
    Some(if second.load < first.load { second } else { first })
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;
    use rand::SeedableRng;
    use rand::rngs::StdRng;
    use sluice_shared::pool::LoadReport;

    use super::*;

    fn id(number: usize) -> PodId {
        format!("pod-{number}").parse().expect("valid")
    }

    fn pod(number: usize) -> PodView {
        PodView::active(id(number), "127.0.0.1:1".parse().expect("valid"))
    }

    fn loaded(number: usize, fraction: f64) -> PodView {
        PodView { load: LoadReport { ingress: fraction, ..LoadReport::default() }, ..pod(number) }
    }

    fn table() -> TableName {
        "flights".parse().expect("valid")
    }

    fn rng() -> StdRng {
        StdRng::seed_from_u64(7)
    }

    fn place_new(view: &PoolView) -> Result<Placement, NoPlace> {
        place(view, &table(), &StreamHints::default(), &mut rng())
    }

    fn order(view: &PoolView) -> Vec<PodId> {
        view.order(&table()).map(|pod| pod.id.clone()).collect()
    }

    fn at_rate(mut view: PoolView, pods: f64) -> PoolView {
        let bytes_per_s = pods * TABLE_SHARE * sluice_shared::pool::CAPACITY_BYTES_PER_S;
        view.tables.insert(table(), TableRate { bytes_per_s, streams: 10, spread_min: 0 });
        view
    }

    #[test]
    fn a_small_table_stays_on_its_home() {
        let mut view = PoolView::new((0..6).map(pod));
        let home = view.home(&table()).expect("there are pods").id.clone();
        for _ in 0..100 {
            let placement = place_new(&view).expect("there are pods");
            assert_eq!((&placement.pod, placement.rule), (&home, Rule::TwoChoices));
            view.update(&home, |pod| pod.placed += STREAM_LOAD_MIN);
        }
    }

    #[test]
    fn many_streams_of_one_table_overflow_to_the_same_next_pod() {
        let mut view = PoolView::new((0..6).map(pod));
        let order = order(&view);
        view.update(&order[0], |pod| pod.placed = 0.6);
        for _ in 0..20 {
            let placement = place_new(&view).expect("there are pods");
            assert_eq!((&placement.pod, placement.rule), (&order[1], Rule::Overflow));
        }
    }

    #[test]
    fn a_hot_table_spreads_over_the_first_of_its_order() {
        let view = at_rate(PoolView::new((0..10).map(pod)), 2.5);
        let order = order(&view);
        let mut rng = rng();
        let mut used = HashSet::new();
        for _ in 0..200 {
            let placement =
                place(&view, &table(), &StreamHints::default(), &mut rng).expect("there are pods");
            assert_eq!(placement.candidates.len(), 3);
            used.insert(placement.pod);
        }
        assert_eq!(used, order[..3].iter().cloned().collect());
    }

    #[test]
    fn a_stream_returns_to_its_last_pod_unless_that_is_full() {
        let mut view = PoolView::new((0..4).map(pod));
        let last = order(&view)[3].clone();
        let hints = StreamHints { last_pod: Some(&last), ..StreamHints::default() };
        let placement = place(&view, &table(), &hints, &mut rng()).expect("there are pods");
        assert_eq!((&placement.pod, placement.rule), (&last, Rule::Sticky));
        view.update(&last, |pod| pod.load.ingress = 0.95);
        let placement = place(&view, &table(), &hints, &mut rng()).expect("there are pods");
        assert_ne!(placement.pod, last);
    }

    #[test]
    fn a_full_pool_is_busy_and_an_empty_one_is_empty() {
        assert_eq!(place_new(&PoolView::new((0..3).map(|n| loaded(n, 0.95)))), Err(NoPlace::Full));
        assert_eq!(place_new(&PoolView::new([])), Err(NoPlace::Empty));
        let view = PoolView::new((0..2).map(pod));
        let tried = [id(0), id(1)];
        let hints = StreamHints { tried: &tried, ..StreamHints::default() };
        assert_eq!(place(&view, &table(), &hints, &mut rng()), Err(NoPlace::Empty));
    }

    #[test]
    fn own_guesses_alone_never_make_a_pool_full() {
        let view = PoolView::new((0..3).map(|n| PodView { placed: 40.0, ..pod(n) }));
        assert!(place_new(&view).is_ok());
    }

    #[test]
    fn all_over_the_bound_falls_back_to_the_whole_pool() {
        // A stream so heavy that it fits under no bound.
        let view = PoolView::new((0..3).map(|n| loaded(n, 0.85)));
        let hints = StreamHints { rate_bytes_per_s: Some(u64::MAX), ..StreamHints::default() };
        let placement = place(&view, &table(), &hints, &mut rng()).expect("below the hard limit");
        assert!(matches!(placement.rule, Rule::TwoChoices | Rule::WholePool), "{placement:?}");
    }

    #[test]
    fn a_silent_pod_is_used_only_when_nothing_else_is_left() {
        let silent = |number| {
            let mut silent = pod(number);
            silent.load.age = REPORT_DEAD + Duration::from_secs(1);
            silent
        };
        let view = PoolView::new([silent(0), silent(1), pod(2)]);
        assert_eq!(place_new(&view).expect("one is well").pod, id(2));
        let view = PoolView::new([silent(0), silent(1)]);
        assert!(place_new(&view).is_ok());
    }

    #[test]
    fn more_gateways_count_own_placements_more() {
        let mut view = PoolView::new((0..4).map(pod));
        let home = order(&view)[0].clone();
        view.update(&home, |pod| pod.placed = 0.05);
        assert_eq!(place_new(&view).expect("there are pods").pod, home);
        view.gateways = 10;
        assert_ne!(place_new(&view).expect("there are pods").pod, home);
    }

    fn any_pod(number: usize) -> impl Strategy<Value = PodView> {
        let phase =
            prop_oneof![3 => Just(Phase::Active), 1 => Just(Phase::Draining), 1 => Just(Phase::Joining)];
        (phase, 0.0..1.0_f64, 0_u64..30, 0.0..0.5_f64, any::<bool>()).prop_map(
            move |(phase, fraction, age, placed, aside)| PodView {
                phase,
                load: LoadReport {
                    ingress: fraction,
                    age: Duration::from_secs(age),
                    ..LoadReport::default()
                },
                placed,
                aside,
                ..pod(number)
            },
        )
    }

    fn any_view() -> impl Strategy<Value = PoolView> {
        let pods = (0..9_usize).map(any_pod).collect::<Vec<_>>();
        (pods, 0..10_usize, 1_u32..5, 0.0..12.0_f64).prop_map(|(pods, len, gateways, rate)| {
            let mut view = at_rate(PoolView::new(pods.into_iter().take(len)), rate);
            view.gateways = gateways;
            view
        })
    }

    proptest! {
        #[test]
        fn only_active_pods_and_set_aside_ones_last(view in any_view(), seed: u64, tried in 0..9_usize) {
            let tried = [id(tried)];
            let hints = StreamHints { tried: &tried, ..StreamHints::default() };
            let placed = place(&view, &table(), &hints, &mut StdRng::seed_from_u64(seed));
            let open = |pod: &&PodView| pod.phase == Phase::Active && pod.id != tried[0];
            let any_open = view.pods().iter().any(|pod| open(&pod));
            prop_assert_eq!(matches!(placed, Err(NoPlace::Empty)), !any_open);
            if let Ok(placement) = placed {
                let chosen = view.pod(&placement.pod).expect("a pod of the view");
                prop_assert!(open(&chosen));
                let another = view.pods().iter().any(|pod| open(&pod) && !pod.aside);
                prop_assert!(!chosen.aside || !another);
                let fresh = view.pods().iter().any(|pod| open(&pod) && !pod.aside && pod.load.age <= REPORT_DEAD);
                prop_assert!(chosen.load.age <= REPORT_DEAD || !fresh);
            }
        }

        #[test]
        fn the_same_seed_gives_the_same_answer(view in any_view(), seed: u64) {
            let once = || place(&view, &table(), &StreamHints::default(), &mut StdRng::seed_from_u64(seed));
            prop_assert_eq!(once(), once());
        }
    }
}
