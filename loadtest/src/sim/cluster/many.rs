//! Many seeds, each in a process of its own, some at a time.
//!
//! *Owns*: the processes, the figures.
//! *Does not own*: what a seed does (`cluster`).

use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
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
    /// Of all their histories: the same seeds give the same.
    pub hash: u64,
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
        let Self { seeds, records, hash, broken, took } = self;
        let per_hour = *seeds as f64 * 3600.0 / took.as_secs_f64().max(1e-9);
        let failed: Vec<_> = broken.iter().map(|(seed, _)| seed.to_string()).collect();
        let failed = if failed.is_empty() { "none".to_owned() } else { failed.join(", ") };
        write!(
            f,
            "sim cluster: {seeds} seeds, {records} records, histories {hash:016x}, {per_hour:.0} seeds an hour, seeds that broke \
             a promise: {failed}"
        )
    }
}

/// Seeds as they are asked for: `200`, or `201..300`.
///
/// # Errors
/// What is neither, or none.
pub fn parse(text: &str) -> Result<RangeInclusive<u64>, String> {
    let number = |text: &str| text.trim().parse::<u64>().ok();
    let seeds = match text.split_once("..") {
        Some((first, last)) => number(first).zip(number(last)).map(|(first, last)| first..=last),
        None => number(text).map(|count| 1..=count),
    };
    let seeds = seeds.filter(|seeds| !seeds.is_empty());
    seeds.ok_or_else(|| {
        "expected how many, such as 200, or the first and the last, such as 201..300".to_owned()
    })
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
    let told = || done.iter().map(|(_, output)| last_line(output));
    let records = told().map(|line| records_of(&line)).sum();
    let mut hasher = DefaultHasher::new();
    told().for_each(|line| line.hash(&mut hasher));
    let broken = done.iter().filter(|(_, output)| !output.status.success());
    let broken = broken.map(|(seed, output)| (*seed, said(output))).collect();
    Ok(Figures { seeds: last - first + 1, broken, records, hash: hasher.finish(), took: begun.elapsed() })
}

fn said(output: &Output) -> String {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    format!("{}{}({})", text(&output.stderr), text(&output.stdout), output.status)
}

/// `seed 7: 123 records, history …`.
fn last_line(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).lines().last().unwrap_or_default().to_owned()
}

fn records_of(line: &str) -> u64 {
    let words = line.split_once(": ").and_then(|(_, rest)| rest.split_once(" records"));
    words.and_then(|(records, _)| records.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_are_a_count_or_a_range() {
        assert_eq!(parse("200"), Ok(1..=200));
        assert_eq!(parse("7..9"), Ok(7..=9));
        for wrong in ["0", "9..7", "-5", "abc", "1..", "..", ""] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }
}
