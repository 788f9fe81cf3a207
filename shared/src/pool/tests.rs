//! What a view knows, and what it makes of it.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::rate::TABLE_SHARE;
use super::*;

fn pod(number: usize, phase: Phase) -> PodView {
    let id = format!("pod-{number}").parse().expect("valid");
    let address = "127.0.0.1:1".parse().expect("valid");
    PodView { phase, ..PodView::active(id, address) }
}

fn view(phases: &[Phase]) -> PoolView {
    PoolView::new(phases.iter().enumerate().map(|(number, phase)| pod(number, *phase)))
}

fn table(number: u32) -> TableName {
    format!("t{number}").parse().expect("valid")
}

#[test]
fn an_empty_pool_has_no_home() {
    assert!(PoolView::new([]).home(&table(0)).is_none());
    assert!(view(&[Phase::Draining]).home(&table(0)).is_none());
}

#[test]
fn the_order_does_not_change_between_releases() {
    // Homes are agreed on without talking: another hash in a later release would split the pool in two.
    let view = view(&[Phase::Active; 5]);
    let homes: Vec<&str> =
        (0..6).map(|n| view.home(&table(n)).expect("there are pods").id.as_str()).collect();
    assert_eq!(homes, HOMES_OF_FIVE);
}

const HOMES_OF_FIVE: [&str; 6] = ["pod-0", "pod-4", "pod-2", "pod-3", "pod-4", "pod-4"];

#[test]
fn tables_with_similar_names_spread() {
    let view = view(&[Phase::Active; 5]);
    let homes: BTreeSet<&PodId> =
        (0..40).map(|n| &view.home(&table(n)).expect("there are pods").id).collect();
    assert_eq!(homes.len(), 5);
}

#[test]
fn tables_spread_evenly() {
    let view = view(&[Phase::Active; 8]);
    let mut tables_of: HashMap<&PodId, u32> = HashMap::new();
    for n in 0..8_000 {
        *tables_of.entry(&view.home(&table(n)).expect("there are pods").id).or_default() += 1;
    }
    assert!(tables_of.values().all(|tables| (700..=1350).contains(tables)), "{tables_of:?}");
}

fn phases() -> impl Strategy<Value = Vec<Phase>> {
    let phase = prop_oneof![Just(Phase::Active), Just(Phase::Joining), Just(Phase::Draining)];
    prop::collection::vec(phase, 0..12)
}

proptest! {
    #[test]
    fn the_order_ends_and_names_each_active_pod_once(phases in phases(), n: u32) {
        let view = view(&phases);
        let order: Vec<&PodId> = view.order(&table(n)).map(|pod| &pod.id).collect();
        let once: BTreeSet<&PodId> = order.iter().copied().collect();
        let active = phases.iter().filter(|phase| **phase == Phase::Active).count();
        prop_assert_eq!(order.len(), active);
        prop_assert_eq!(once.len(), active);
        prop_assert!(view.order(&table(n)).all(|pod| pod.phase == Phase::Active));
    }

    #[test]
    fn a_pod_that_leaves_moves_only_its_own_tables(n: u32, leaver in 0_usize..6) {
        let before = view(&[Phase::Active; 6]);
        let mut phases = [Phase::Active; 6];
        phases[leaver] = Phase::Draining;
        let after = view(&phases);
        let home = |view: &PoolView| view.home(&table(n)).map(|pod| pod.id.clone()).expect("there are pods");
        let left = format!("pod-{leaver}");
        prop_assert!(home(&before).as_str() == left || home(&before) == home(&after));
    }
}

fn report(sequence: u64, load: f64, tables: &[(u32, f64, u32)]) -> LoadReport {
    let tables =
        tables.iter().map(|&(n, bytes_per_s, streams)| TableLoad { table: table(n), bytes_per_s, streams });
    LoadReport { sequence, ingress: load, tables: tables.collect(), ..LoadReport::default() }
}

fn id(number: usize) -> PodId {
    format!("pod-{number}").parse().expect("valid")
}

fn s(seconds: f64) -> Duration {
    Duration::from_secs_f64(seconds)
}

fn placed_on(view: &PoolView, number: usize) -> f64 {
    view.pod(&id(number)).expect("a pod of the view").placed
}

fn load_of(view: &PoolView, number: usize) -> f64 {
    view.load(&id(number)).expect("a pod of the view").load
}

#[test]
fn own_placements_count_until_a_report_covers_them() {
    let (mut view, start) = (view(&[Phase::Active; 2]), Instant::now());
    view.gateways = 3;
    let _first = view.placed(&id(0), 0.1, start);
    let _second = view.placed(&id(0), 0.2, start + s(0.8));
    assert!((load_of(&view, 0) - 0.9).abs() < 1e-9, "three gateways do as this one");
    // Made before the streams can have been measured.
    view.report(&id(0), report(1, 0.0, &[]), start + s(0.9));
    assert!((placed_on(&view, 0) - 0.3).abs() < 1e-9);
    // Late on its way: made when the first had settled, and the second had not.
    view.report(&id(0), LoadReport { age: s(0.5), ..report(2, 0.1, &[]) }, start + s(1.6));
    assert!((placed_on(&view, 0) - 0.2).abs() < 1e-9);
    view.report(&id(0), report(3, 0.3, &[]), start + s(2.0));
    assert_eq!((placed_on(&view, 0), load_of(&view, 0)), (0.0, 0.3), "nothing counts twice");
}

#[test]
fn what_no_report_covers_is_forgotten_in_time() {
    let (mut view, start) = (view(&[Phase::Active; 2]), Instant::now());
    let _open = view.placed(&id(1), 0.1, start);
    view.advance(start + PLACED_MAX - s(0.2));
    assert!(placed_on(&view, 1) > 0.0);
    view.advance(start + PLACED_MAX);
    assert_eq!(placed_on(&view, 1), 0.0);
}

#[test]
fn a_refused_stream_is_given_back_once() {
    let (mut view, start) = (view(&[Phase::Active; 2]), Instant::now());
    let refused = view.placed(&id(0), 0.1, start);
    let _open = view.placed(&id(0), 0.2, start);
    view.give_back(&refused);
    view.give_back(&refused);
    assert!((placed_on(&view, 0) - 0.2).abs() < 1e-9);
    view.report(&id(0), report(1, 0.2, &[]), start + s(2.0));
    view.give_back(&refused);
    assert_eq!(placed_on(&view, 0), 0.0);
}

#[test]
fn a_report_decays_toward_the_mean_and_one_that_comes_twice_is_as_old_as_before() {
    let (mut view, start) = (view(&[Phase::Active; 2]), Instant::now());
    view.report(&id(0), report(1, 0.8, &[]), start);
    view.report(&id(1), report(1, 0.4, &[]), start);
    view.advance(start + s(5.0));
    assert!((load_of(&view, 0) - 0.8).abs() < 1e-9);
    view.report(&id(0), report(1, 0.8, &[]), start + s(9.0));
    view.advance(start + s(10.0));
    assert!((load_of(&view, 0) - 0.7).abs() < 1e-9, "half of the way");
    view.advance(start + s(16.0));
    assert_eq!(view.sums(Trust::Well).pods, 0);
    assert_eq!(view.sums(Trust::NotAside).pods, 2);
}

#[test]
fn tables_are_summed_over_pods_and_forgotten_with_them() {
    let (mut view, start) = (view(&[Phase::Active; 3]), Instant::now());
    let tenth = 0.1 * CAPACITY_BYTES_PER_S;
    view.report(&id(0), report(1, 0.5, &[(1, 2.5 * tenth, 5), (2, 10.0, 1)]), start);
    view.report(&id(1), report(1, 0.5, &[(1, tenth, 2)]), start);
    let rate = view.tables[&table(1)];
    assert_eq!((rate.bytes_per_s, rate.streams, view.spread(&table(1))), (3.5 * tenth, 7, 4));
    view.report(&id(0), report(2, 0.5, &[(2, 10.0, 1)]), start + s(1.0));
    assert_eq!((view.tables[&table(1)].streams, view.spread(&table(1))), (2, 4), "it draws back slowly");
    view.set_members([pod(1, Phase::Active), pod(2, Phase::Active)], start + s(2.0));
    assert_eq!(view.tables.get(&table(2)).map_or(0, |rate| rate.streams), 0);
    let mut now = start;
    for _ in 0..4 {
        now += s(300.0);
        view.advance(now);
    }
    assert_eq!(view.tables.keys().collect::<Vec<_>>(), [&table(1)]);
}

#[test]
fn pods_that_stay_keep_what_is_known_of_them() {
    let (mut view, start) = (view(&[Phase::Active; 2]), Instant::now());
    view.report(&id(0), report(1, 0.6, &[]), start);
    let _open = view.placed(&id(0), 0.1, start);
    let new = PodView { active_for: Duration::ZERO, ..pod(2, Phase::Active) };
    view.set_members([pod(0, Phase::Active), pod(1, Phase::Draining), new], start);
    view.advance(start + s(1.0));
    assert!((load_of(&view, 0) - 0.7).abs() < 1e-9);
    assert_eq!(view.pod(&id(2)).expect("joined").active_for, s(1.0));
    assert!(view.order(&table(0)).all(|pod| pod.id != id(1)));
}

#[test]
fn a_report_from_who_knows_whom_breaks_nothing() {
    let (mut view, start) = (view(&[Phase::Active; 2]), Instant::now());
    let wild = LoadReport {
        cpu: f64::NAN,
        memory: -1.0,
        capacity_bytes_per_s: 0.0,
        bytes_per_s: f64::INFINITY,
        ..report(1, 0.2, &[(1, f64::NAN, 3)])
    };
    view.report(&id(0), wild, start);
    assert_eq!(load_of(&view, 0), 1.0, "a pod that reports nonsense is not the one to fill");
    assert!(view.sums(Trust::Well).load().is_finite());
    assert_eq!(view.tables[&table(1)].bytes_per_s, 0.0);
}

proptest! {
    #[test]
    fn sums_kept_by_the_way_are_those_of_a_count(
        steps in prop::collection::vec((0..5_usize, 0..6_u8, 0.0..1.0_f64, 0..4_u32), 1..60),
    ) {
        let (mut view, start) = (view(&[Phase::Active; 5]), Instant::now());
        let (mut now, mut open) = (start, Vec::new());
        for (n, (number, what, load, named)) in steps.into_iter().enumerate() {
            match what {
                0 => view.report(&id(number), report(n as u64 + 1, load, &[(named, load * 1e8, 2)]), now),
                1 | 2 => open.push(view.placed(&id(number), load, now)),
                3 => if let Some(placement) = open.pop() { view.give_back(&placement) },
                4 => view.update(&id(number), |pod| pod.aside = load < 0.5),
                _ => { now += s(4.0 * load); view.advance(now); }
            }
            let (kept, counted) = (view.sums(Trust::Well), view.sum(Trust::Well));
            prop_assert_eq!(kept.pods, counted.pods);
            prop_assert!((kept.load() - counted.load()).abs() < 1e-6, "{} {}", kept.load(), counted.load());
            let streams: u32 = view.tables.values().map(|rate| rate.streams).sum();
            let told: u32 = view.pods().iter().flat_map(|pod| &pod.load.tables).map(|table| table.streams).sum();
            prop_assert_eq!(streams, told);
        }
    }
}

/// A view of so many pods in which one table is as hot as so many; and one that keeps nothing of it.
fn hot_and_cold(pods: usize, filled: f64) -> (PoolView, PoolView) {
    let (cold, start) = (PoolView::new((0..pods).map(|n| pod(n, Phase::Active))), Instant::now());
    let mut hot = cold.clone();
    let bytes_per_s = filled * TABLE_SHARE * CAPACITY_BYTES_PER_S;
    hot.report(&id(0), report(1, 0.5, &[(1, bytes_per_s, 100)]), start);
    (hot, cold)
}

#[test]
fn what_is_kept_of_a_hot_table_is_its_order() {
    let (hot, cold) = hot_and_cold(200, 40.0);
    assert!((40..200).contains(&hot.firsts.of(&table(1)).len()));
    let ids = |view: &PoolView| view.order(&table(1)).map(|pod| pod.id.clone()).collect::<Vec<_>>();
    assert_eq!(ids(&hot), ids(&cold), "also beyond what is kept");
    for (view, asked) in [(&hot, 40), (&cold, 40), (&hot, 150), (&hot, 300)] {
        let table = table(1);
        let (pods, pod) = view.first(&table, asked);
        let first: Vec<PodId> = (0..pods).map(|nth| pod(nth).pod.id.clone()).collect();
        assert_eq!(first, ids(&cold)[..asked.min(200)], "{asked}");
    }
}

#[test]
fn what_is_kept_goes_with_the_ring_and_with_the_table() {
    let (mut hot, _) = hot_and_cold(50, 40.0);
    let start = Instant::now();
    hot.set_members((0..50).map(|n| pod(n, Phase::Active)), start);
    assert!(!hot.firsts.of(&table(1)).is_empty(), "the same pods are active");
    hot.set_members((1..50).map(|n| pod(n, Phase::Active)), start);
    assert!(hot.firsts.of(&table(1)).is_empty());
    assert!(hot.order(&table(1)).all(|pod| pod.id != id(0)));
    let hottest = 40.0 * TABLE_SHARE * CAPACITY_BYTES_PER_S;
    hot.report(&id(2), report(1, 0.5, &[(1, hottest, 100)]), start);
    assert_eq!(hot.firsts.of(&table(1)).len(), 49);
    hot.report(&id(2), report(2, 0.5, &[]), start);
    for n in 1..=50 {
        hot.advance(start + s(300.0) * n);
    }
    assert!(hot.tables.is_empty() && hot.firsts.of(&table(1)).is_empty());
}
