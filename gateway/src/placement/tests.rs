//! The rules by name, and what holds whatever the view.

use std::collections::HashSet;

use proptest::prelude::*;
use rand::SeedableRng;
use rand::rngs::StdRng;
use sluice_shared::lifecycle::Phase;
use sluice_shared::pool::{CAPACITY_BYTES_PER_S, LoadReport, REPORT_DEAD, TableRate};

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
    let bytes_per_s = pods * 0.1 * CAPACITY_BYTES_PER_S;
    view.tables.insert(table(), TableRate::new(bytes_per_s, 100, CAPACITY_BYTES_PER_S));
    view
}

#[test]
fn a_small_table_stays_on_its_home() {
    let mut view = PoolView::new((0..6).map(pod));
    let home = view.home(&table()).expect("there are pods").id.clone();
    for _ in 0..100 {
        let placement = place_new(&view).expect("there are pods");
        assert_eq!((&placement.pod, placement.rule), (&home, Rule::TwoChoices));
        view.update(&home, |pod| pod.placed += STREAM_LOAD_UNKNOWN);
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
        let placement = place(&view, &table(), &StreamHints::default(), &mut rng).expect("there are pods");
        assert_eq!(placement.spread, 3);
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
    let phase = prop_oneof![3 => Just(Phase::Active), 1 => Just(Phase::Draining), 1 => Just(Phase::Joining)];
    (phase, 0.0..1.0_f64, 0_u64..30, 0.0..0.5_f64, any::<bool>()).prop_map(
        move |(phase, fraction, age, placed, aside)| PodView {
            phase,
            load: LoadReport { ingress: fraction, age: Duration::from_secs(age), ..LoadReport::default() },
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

#[test]
fn a_new_pod_is_not_filled_past_the_mean() {
    let mut view = PoolView::new((0..4).map(|n| loaded(n, 0.5)));
    let home = order(&view)[0].clone();
    view.update(&home, |pod| (pod.load.ingress, pod.active_for) = (0.45, Duration::ZERO));
    assert_eq!(place_new(&view).expect("there are pods").rule, Rule::Overflow);
    view.update(&home, |pod| pod.active_for = NEW_POD);
    assert_eq!(place_new(&view).expect("there are pods").pod, home);
}

#[test]
fn a_stream_weighs_double_on_a_pod_that_has_just_begun() {
    let young = |seconds| PodView { active_for: Duration::from_secs(seconds), ..pod(0) };
    let adds = |pod: PodView| place_new(&PoolView::new([pod])).expect("one pod").adds;
    let old = adds(pod(0));
    assert_eq!([adds(young(0)), adds(young(15)), adds(young(30))], [2.0 * old, 1.5 * old, old]);
}

fn zoned(number: usize, zone: &str, load: f64) -> PodView {
    PodView { zone: Some(zone.to_owned()), ..loaded(number, load) }
}

#[test]
fn the_own_zone_comes_first_until_it_is_over_the_bound() {
    let zones = ["a", "b", "c"];
    let mut view = at_rate(PoolView::new((0..9).map(|n| zoned(n, zones[n % 3], 0.5))), 5.5);
    view.zone = Some("b".to_owned());
    let mut rng = rng();
    let zone_of =
        |view: &PoolView, placement: &Placement| view.pod(&placement.pod).and_then(|pod| pod.zone.clone());
    for _ in 0..50 {
        let placement = place(&view, &table(), &StreamHints::default(), &mut rng).expect("there are pods");
        assert_eq!((placement.spread, zone_of(&view, &placement).as_deref()), (2, Some("b")));
    }
    for n in [1, 4, 7] {
        view.update(&id(n), |pod| pod.load.ingress = 0.8);
    }
    let placement = place(&view, &table(), &StreamHints::default(), &mut rng).expect("there are pods");
    assert_eq!(placement.rule, Rule::Overflow);
    assert_ne!(zone_of(&view, &placement).as_deref(), Some("b"));
}

#[test]
fn what_returns_is_not_taken_for_what_all_gateways_send() {
    let mut view = PoolView::new((0..2).map(pod));
    view.gateways = 4;
    let last = id(1);
    let hints = StreamHints { last_pod: Some(&last), ..StreamHints::default() };
    let placement = place(&view, &table(), &hints, &mut rng()).expect("there are pods");
    assert_eq!((placement.rule, placement.adds), (Rule::Sticky, STREAM_LOAD_UNKNOWN / 4.0));
}

#[test]
fn an_explanation_names_every_pod_and_why() {
    let draining = PodView { phase: Phase::Draining, ..pod(5) };
    let mut view = PoolView::new((0..5).map(|n| loaded(n, 0.5)).chain([draining]));
    let order = order(&view);
    view.update(&order[0], |pod| pod.load.ingress = 0.8);
    view.update(&order[1], |pod| pod.aside = true);
    view.update(&order[2], |pod| pod.load.age = REPORT_DEAD + Duration::from_secs(1));
    let tried = [order[4].clone()];
    let hints = StreamHints { tried: &tried, ..StreamHints::default() };
    let told = explain(&view, &table(), &hints, &mut rng());
    assert_eq!((told.home.as_ref(), told.pod.as_ref()), (Some(&order[0]), Some(&order[3])));
    assert_eq!((told.rule, told.spread, told.candidates.len()), (Some(Rule::Overflow), 1, 6));
    let why = |pod: &PodId| {
        let told = told.candidates.iter().find(|told| told.pod == *pod).expect("each pod is told of");
        (told.usable, told.why_not.clone().unwrap_or_default())
    };
    let begins = [
        (order[0].clone(), true, "0.80 with the stream, over the bound"),
        (order[1].clone(), false, "set aside"),
        (order[2].clone(), false, "silent: its last report is 16 s old"),
        (order[3].clone(), true, ""),
        (order[4].clone(), false, "has refused"),
        (id(5), false, "draining"),
    ];
    for (pod, usable, begin) in begins {
        let (is_usable, text) = why(&pod);
        assert!(is_usable == usable && text.starts_with(begin), "{pod}: {is_usable} {text:?}");
    }
    let json = serde_json::to_value(&told).expect("JSON");
    assert_eq!(json["rule"], "overflow");
    assert_eq!(json["candidates"][0]["report_age_ms"], 0);
}

#[test]
fn an_empty_pool_is_explained_too() {
    let told = explain(&PoolView::new([]), &table(), &StreamHints::default(), &mut rng());
    assert!(told.pod.is_none() && told.refusal.is_some_and(|why| why.contains("no pod is active")));
    let full = explain(
        &PoolView::new((0..3).map(|n| loaded(n, 0.95))),
        &table(),
        &StreamHints::default(),
        &mut rng(),
    );
    assert!(full.refusal.is_some_and(|why| why.contains("full")));
    assert!(
        full.candidates
            .iter()
            .all(|told| told.why_not.as_deref().is_some_and(|why| why.contains("take nothing")))
    );
}

/// A pool in which a table stands on more pods than are looked at one by one.
fn wide(load: f64) -> (PoolView, Vec<PodId>) {
    let view = at_rate(PoolView::new((0..200).map(|n| loaded(n, load))), 99.5);
    let order = order(&view);
    (view, order)
}

fn place_many(view: &PoolView, hints: &StreamHints<'_>) -> (HashSet<PodId>, HashSet<Rule>) {
    let mut rng = rng();
    let placed = || place(view, &table(), hints, &mut rng).map(|placement| (placement.pod, placement.rule));
    std::iter::repeat_with(placed).take(2_000).map(|placed| placed.expect("there are pods")).unzip()
}

#[test]
fn a_very_hot_table_is_drawn_from_all_that_it_stands_on_and_no_others() {
    let (mut view, order) = wide(0.5);
    view.update(&order[3], |pod| pod.aside = true);
    let tried = [order[5].clone()];
    let (pods, rules) = place_many(&view, &StreamHints { tried: &tried, ..StreamHints::default() });
    let open = |id: &&PodId| **id != order[3] && **id != order[5];
    assert_eq!(pods, order[..100].iter().filter(open).cloned().collect());
    assert_eq!(rules, HashSet::from([Rule::TwoChoices]));
}

#[test]
fn a_very_hot_table_overflows_inside_first_and_then_just_beyond() {
    let (mut view, order) = wide(0.4);
    for id in &order[..100] {
        view.update(id, |pod| pod.load.ingress = 0.85);
    }
    let (pods, rules) = place_many(&view, &StreamHints::default());
    assert_eq!((pods, rules), (HashSet::from([order[100].clone()]), HashSet::from([Rule::Overflow])));
    // Now half of its own have room.
    for id in order[..100].iter().step_by(2) {
        view.update(id, |pod| pod.load.ingress = 0.4);
    }
    let (pods, rules) = place_many(&view, &StreamHints::default());
    let inside = pods.iter().filter(|id| order[..100].contains(id)).count();
    assert_eq!(rules, HashSet::from([Rule::TwoChoices, Rule::Overflow]));
    assert!(inside == 50 && pods.len() <= 51, "{inside} of {}", pods.len());
}

#[test]
fn a_very_hot_table_stays_in_the_own_zone() {
    let zones = ["a", "b", "c", "d"];
    let mut view = at_rate(PoolView::new((0..200).map(|n| zoned(n, zones[n % 4], 0.5))), 99.5);
    view.zone = Some("b".to_owned());
    let first: HashSet<PodId> = order(&view)[..100].iter().cloned().collect();
    let (pods, rules) = place_many(&view, &StreamHints::default());
    assert!(rules.contains(&Rule::TwoChoices));
    let is_near = |id: &PodId| view.pod(id).and_then(|pod| pod.zone.as_deref()) == Some("b");
    assert!(pods.iter().all(is_near) && pods.is_subset(&first) && pods.len() > 15, "{}", pods.len());
}

#[test]
fn where_all_that_is_looked_at_is_over_the_bound_the_whole_pool_is_drawn_from() {
    // The last pods of the order are cool, and too far for a walk.
    let mut view = PoolView::new((0..200).map(|n| loaded(n, 0.6)));
    let order = order(&view);
    for id in &order[100..] {
        view.update(id, |pod| pod.load.ingress = 0.2);
    }
    let (pods, rules) = place_many(&view, &StreamHints::default());
    assert_eq!(rules, HashSet::from([Rule::WholePool]));
    let cool = pods.iter().filter(|id| order[100..].contains(id)).count();
    assert!(cool > 90, "of two the less loaded one: {cool} of {}", pods.len());
}
