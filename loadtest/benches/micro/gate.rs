//! The stream's gate.
//!
//! *Owns*: frames that come in order, and frames that come again.
//! *Does not own*: what a frame costs beside the gate (`lane`).

use divan::counter::ItemsCount;
use divan::{Bencher, black_box};
use sluice_pod::stream::gate::Gate;
use sluice_shared::ids::OffsetRange;

const FRAMES: u64 = 1_000;
const FRAME_RECORDS: u64 = 10;

fn frames() -> Vec<OffsetRange> {
    let range = |frame| OffsetRange::from_count(frame * FRAME_RECORDS, FRAME_RECORDS).expect("small");
    (0..FRAMES).map(range).collect()
}

fn admit_all(bencher: Bencher<'_, '_>, gate: impl Fn() -> Gate) {
    let frames = frames();
    bencher.counter(ItemsCount::new(frames.len())).bench_local(|| {
        let mut gate = gate();
        for offsets in &frames {
            black_box(gate.admit(black_box(*offsets)));
        }
        gate
    });
}

/// Each frame is the next one. An item is a frame.
#[divan::bench]
fn in_order(bencher: Bencher<'_, '_>) {
    admit_all(bencher, || Gate::at(0));
}

/// A new call sends all of it again.
#[divan::bench]
fn sent_again(bencher: Bencher<'_, '_>) {
    admit_all(bencher, || {
        let mut gate = Gate::at(FRAMES * FRAME_RECORDS);
        gate.resume(0);
        gate
    });
}
