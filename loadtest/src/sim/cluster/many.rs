//! Many seeds, each in a process of its own, some at a time.
//!
//! *Owns*: the processes, the figures.
//! *Does not own*: what a seed does (`cluster`).

use std::fmt;
use std::ops::RangeInclusive;
use std::process::{Command, Output, Stdio};
use std::sync::Mutex;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use anyhow::Context;

/// What came out of many seeds.
#[derive(Debug)]
pub struct Figures {
    /// How many.
    pub seeds: u64,
    /// Those that broke a promise, with what they said.
    pub broken: Vec<(u64, String)>,
    /// Records sent in all of them.
    pub records: u64,
    /// In earnest.
    pub took: Duration,
}

impl Figures {
    /// Whether all promises were kept.
    pub fn is_clean(&self) -> bool {
        self.broken.is_empty()
    }
}

impl fmt::Display for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (seed, said) in &self.broken {
            writeln!(f, "--- seed {seed}\n{}", said.trim_end())?;
        }
        let Self { seeds, records, broken, took } = self;
        let per_hour = *seeds as f64 * 3600.0 / took.as_secs_f64().max(1e-9);
        let failed: Vec<_> = broken.iter().map(|(seed, _)| seed.to_string()).collect();
        let failed = if failed.is_empty() { "none".to_owned() } else { failed.join(", ") };
        write!(
            f,
            "sim cluster: {seeds} seeds, {records} records, {per_hour:.0} seeds an hour, seeds that broke a promise: {failed}"
        )
    }
}

/// Runs all seeds, `at_once` at a time. `more` goes to each process behind its seed.
///
/// # Errors
/// Where this program cannot be started again.
pub fn run(seeds: RangeInclusive<u64>, at_once: usize, more: &[String]) -> anyhow::Result<Figures> {
    let program = std::env::current_exe().context("where this program is")?;
    let begun = Instant::now();
    let (first, last) = (*seeds.start(), *seeds.end());
    let waiting = Mutex::new(seeds);
    let done = Mutex::new(Vec::new());
    let run_some = || -> anyhow::Result<()> {
        loop {
            let next = waiting.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some(seed) = next else { return Ok(()) };
            let mut command = Command::new(&program);
            command.args(["sim", "cluster", "--seed", &seed.to_string()]).args(more).stdin(Stdio::null());
            let output = command.output().context("cannot start a simulation")?;
            done.lock().unwrap_or_else(PoisonError::into_inner).push((seed, output));
        }
    };
    std::thread::scope(|threads| {
        let running: Vec<_> = (0..at_once.max(1)).map(|_| threads.spawn(run_some)).collect();
        running.into_iter().try_for_each(|thread| thread.join().expect("it does not panic"))
    })?;
    let mut done = done.into_inner().unwrap_or_else(PoisonError::into_inner);
    done.sort_by_key(|(seed, _)| *seed);
    let records = done.iter().map(|(_, output)| records_of(output)).sum();
    let broken = done.iter().filter(|(_, output)| !output.status.success());
    let broken = broken.map(|(seed, output)| (*seed, said(output))).collect();
    Ok(Figures { seeds: last - first + 1, broken, records, took: begun.elapsed() })
}

fn said(output: &Output) -> String {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    format!("{}{}({})", text(&output.stderr), text(&output.stdout), output.status)
}

/// Out of the last line: `seed 7: 123 records, …`.
fn records_of(output: &Output) -> u64 {
    let text = String::from_utf8_lossy(&output.stdout);
    let line = text.lines().last().unwrap_or_default();
    let words = line.split_once(": ").and_then(|(_, rest)| rest.split_once(" records"));
    words.and_then(|(records, _)| records.parse().ok()).unwrap_or(0)
}
