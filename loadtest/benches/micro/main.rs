//! Micro-benchmarks of what every record passes: each of the service's own functions alone, on the records of the load tests.
//! `make bench-micro`; what all of it together does is in `loadtest bench`.
//!
//! *Owns*: the inputs of each, and that they are taken: a figure of records that were refused would say nothing.
//! *Does not own*: the records (`workload`), what the machine can do (`machine`).

mod pod;
mod gate;
mod frame;
mod json;
mod lane;
mod log;
mod parquet;
mod placement;

use std::path::Path;

use arrow::array::RecordBatch;
use rand::SeedableRng;
use rand::rngs::StdRng;
use sluice_loadtest::workload::Shape;
use tempfile::TempDir;

const SEED: u64 = 7;
/// Larger than any record here, and any row.
const RECORD_BYTES_MAX: usize = 10 << 20;

fn main() {
    divan::main();
}

fn random() -> StdRng {
    StdRng::seed_from_u64(SEED)
}

/// The first `rows` records, in batches of at most `each`.
fn batches(shape: Shape, rows: usize, each: usize) -> Vec<RecordBatch> {
    let mut random = random();
    let firsts = (0..rows).step_by(each);
    firsts.map(|first| shape.batch(first as u64, each.min(rows - first), &mut random)).collect()
}

/// A directory that goes with its handle, on the disk that has the build.
fn directory() -> TempDir {
    let place = Path::new(env!("CARGO_TARGET_TMPDIR"));
    std::fs::create_dir_all(place).and_then(|()| TempDir::new_in(place)).expect("cargo writes beside it")
}
