//! Where a stream goes, in pools whose pods have all reported.
//!
//! *Owns*: the pool, a table that stands on one pod, and one that stands on a tenth of them.
//! *Does not own*: how views are kept.

use std::time::Instant;

use divan::counter::ItemsCount;
use divan::{Bencher, black_box};
use rand::RngExt;
use sluice_gateway::placement::{StreamHints, place};
use sluice_shared::ids::{PodId, TableName};
use sluice_shared::pool::{CAPACITY_BYTES_PER_S, LoadReport, PodView, PoolView, TableLoad};

/// Pods of the pool.
const PODS: [usize; 2] = [20, 2_000];

fn table() -> TableName {
    "events".parse().expect("a valid name")
}

/// Pods that are loaded by a fifth to a half; `filled` of them by the table alone.
fn view(pods: usize, filled: f64) -> PoolView {
    let id = |number| -> PodId { format!("pod-{number}").parse().expect("a valid name") };
    let address = || "127.0.0.1:1".parse().expect("an address");
    let mut view = PoolView::new((0..pods).map(|number| PodView::active(id(number), address())));
    let (mut random, now) = (crate::random(), Instant::now());
    for number in 0..pods {
        let fraction = random.random_range(0.2..0.5);
        let bytes_per_s = filled * CAPACITY_BYTES_PER_S / pods as f64;
        let load = TableLoad { table: table(), bytes_per_s, streams: 10 };
        let report = LoadReport {
            sequence: 1,
            ingress: fraction,
            bytes_per_s: fraction * CAPACITY_BYTES_PER_S,
            streams: 500,
            tables: vec![load],
            ..LoadReport::default()
        };
        view.report(&id(number), report, now);
    }
    view
}

fn place_all(bencher: Bencher<'_, '_>, view: &PoolView, spread: impl Fn(usize) -> bool) {
    let (table, mut random) = (table(), crate::random());
    let mut placed = || place(black_box(view), &table, &StreamHints::default(), &mut random);
    let first = placed().expect("there is room");
    assert!(spread(first.spread), "the table stands on {} pods", first.spread);
    bencher.counter(ItemsCount::new(1_u32)).bench_local(|| placed().expect("there is room"));
}

/// An item is a stream.
#[divan::bench(args = PODS)]
fn small_table(bencher: Bencher<'_, '_>, pods: usize) {
    place_all(bencher, &view(pods, 0.001), |spread| spread == 1);
}

/// An item is a stream.
#[divan::bench(args = PODS)]
fn hot_table(bencher: Bencher<'_, '_>, pods: usize) {
    place_all(bencher, &view(pods, pods as f64 / 100.0), |spread| spread > 1);
}
