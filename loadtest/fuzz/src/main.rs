//! One target under libFuzzer: that of the program's name. With `--seeds=DIRECTORY` it writes its seeds there, says how long
//! inputs may be, and ends.
//!
//! *Owns*: what of a panic is told, and what of it ends the program.
//! *Does not own*: targets (`sluice_fuzz`), inputs (libFuzzer), runs of all targets (`run.py`).

#![no_main]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Mutex;

use sluice_fuzz::fuzz::Target;
use sluice_fuzz::fuzz::memory::Counted;

#[global_allocator]
static ALLOCATOR: Counted = Counted;

const TARGET: Target = Target::named(env!("CARGO_BIN_NAME")).expect("a program is named like its target");

/// What the last panic said. The service catches those of the arrow crate, which are none of its faults.
static LAST_PANIC: Mutex<String> = Mutex::new(String::new());

libfuzzer_sys::fuzz_target!(init: begin(), |input| execute(input));

/// Before the first input, and after libFuzzer's own hook was set, which would take every panic for an end.
fn begin() {
    std::panic::set_hook(Box::new(|panic| {
        if let Ok(mut last) = LAST_PANIC.lock() {
            *last = panic.to_string();
        }
    }));
    let directory =
        std::env::args().find_map(|argument| argument.strip_prefix("--seeds=").map(str::to_owned));
    if let Some(directory) = directory {
        for (number, seed) in (TARGET.seeds)().iter().enumerate() {
            let file = Path::new(&directory).join(format!("seed-{number:03}"));
            std::fs::write(&file, seed).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        }
        println!("{}", TARGET.input_bytes_max);
        std::process::exit(0);
    }
}

fn execute(input: &[u8]) {
    if catch_unwind(AssertUnwindSafe(|| TARGET.execute(input))).is_err() {
        eprintln!("{}", LAST_PANIC.lock().map_or_else(|_| String::new(), |last| last.clone()));
        std::process::abort();
    }
}
