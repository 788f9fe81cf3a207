//! Each target of the fuzzer on the inputs that are kept, on its seeds, and on some thousands that are like them.
//!
//! *Owns*: which inputs `make test` runs.
//! *Does not own*: the targets (`sluice_loadtest::fuzz`), millions of inputs (`make fuzz`).

use std::panic::{AssertUnwindSafe, catch_unwind};

use rand::SeedableRng;
use rand::rngs::StdRng;
use sluice_loadtest::fuzz::memory::Counted;
use sluice_loadtest::fuzz::{Target, mutate};

#[global_allocator]
static ALLOCATOR: Counted = Counted;

/// Some seconds in all, unoptimised.
const EXECUTIONS: usize = 4_000;
const SEED: u64 = 7;

fn check(name: &str) {
    let target = Target::named(name).expect("a target of this name");
    let mut inputs: Vec<Vec<u8>> = (target.seeds)();
    assert!(inputs.iter().all(|seed| seed.len() <= target.input_bytes_max), "a seed is too long to grow");
    let kept = target.kept().expect("a directory of inputs");
    for (file, input) in kept {
        println!("{}", file.display());
        target.execute(&input);
        inputs.push(input);
    }
    for input in &inputs {
        target.execute(input);
    }
    println!("seed {SEED}");
    let mut random = StdRng::seed_from_u64(SEED);
    for _ in 0..EXECUTIONS {
        let input = mutate::like(&inputs, target.input_bytes_max, &mut random);
        let run = catch_unwind(AssertUnwindSafe(|| target.execute(&input)));
        assert!(run.is_ok(), "{name} fails on {}", input.escape_ascii());
    }
}

macro_rules! checks {
    ($($name:ident,)*) => {
        $(#[test]
        fn $name() {
            check(stringify!($name));
        })*

        #[test]
        fn every_target_is_run() {
            let run = [$(stringify!($name)),*];
            assert_eq!(sluice_loadtest::fuzz::TARGETS.map(|target| target.name), run);
        }
    };
}

checks! {
    wal_segments,
    wal_objects,
    wal_batch,
    watermarks,
    frames,
    json,
    arrow,
    protobuf,
    avro,
    posts,
    otlp,
    tables,
}

/// Memory is counted where this allocator is: the bounds of targets are none elsewhere.
#[test]
fn memory_that_is_held_is_counted() {
    let peak = sluice_loadtest::fuzz::memory::peak_of(|| drop(std::hint::black_box(vec![0_u8; 1 << 20])));
    assert!((1 << 20..2 << 20).contains(&peak), "{peak} bytes");
}
