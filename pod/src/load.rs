//! How loaded this pod is: what it reports to gateways and to the other pods.
//!
//! Four fractions, each of a budget; the largest is the load. They go up at once and come down slowly, so that a report
//! that is some seconds old still warns of a burst.
//!
//! *Owns*: what counts as load, the estimate of what the pod can carry.
//! *Does not own*: what follows from a load (placement, shedding), where the figures are kept.

use std::collections::HashMap;
use std::fs;
use std::time::Duration;

use sluice_shared::ids::TableName;
use sluice_shared::pool::{CAPACITY_BYTES_PER_S, LoadReport, TABLES_REPORTED_MAX, TableLoad};

use crate::stream::StreamLoad;

/// A load comes down to a third in this time.
const DECAY: Duration = Duration::from_secs(10);
/// Accepted bytes that wait longer for their durability than this mean that the log is full.
const LOG_WAIT_FULL: Duration = Duration::from_millis(250);
/// Fractions stay below the limit from which gateways ask a pod no more: what slows all streams alike is no reason to refuse
/// one, and a pod whose log is full says so itself, with what helps.
const MOST: f64 = 0.89;
/// Memory that is used up costs reads from the log, and is no end either.
const MEMORY_WEIGHT: f64 = 0.8;
/// Busier than this, the pod's traffic says something of what it can carry.
const TELLING_LOAD: f64 = 0.2;
/// How much one such look changes the estimate.
const CAPACITY_STEP: f64 = 0.05;
const CAPACITY_MIN: f64 = 1e6;
/// Over how many seconds it is averaged what gets in.
const RATE_MEMORY_S: f64 = 2.0;
/// The rate under which a wait says nothing.
const RATE_MIN: f64 = 1e6;
/// Ticks of `/proc/self/stat` in a second, as the kernel shows them to programs.
const TICKS_PER_S: u64 = 100;

/// The figures of one moment.
#[derive(Debug, Clone, Copy, Default)]
pub struct Sample {
    /// Since the last one.
    pub elapsed: Duration,
    /// Processor time of the process since the last one.
    pub cpu: Duration,
    /// Processors that it may use.
    pub cores: usize,
    /// Bytes that are accepted and not durable.
    pub ingress_bytes: u64,
    /// How many those may be.
    pub ingress_bytes_max: u64,
    /// Bytes of durable batches in memory.
    pub memory_bytes: u64,
    /// How many those may be.
    pub memory_bytes_max: u64,
    /// Bytes of the log that are not released.
    pub log_bytes: u64,
    /// How many those may be.
    pub log_bytes_max: u64,
    /// Bytes that producers send in a second.
    pub bytes_per_s: f64,
}

/// Turns samples into reports.
#[derive(Debug, Default)]
pub struct Meter {
    sequence: u64,
    ingress: f64,
    cpu: f64,
    log: f64,
    memory: f64,
    capacity: Option<f64>,
    /// Bytes that had got in at the last look, and how many do in a second.
    admitted: u64,
    rate: f64,
    /// More never gets in, whatever the pod could carry.
    limit: Option<f64>,
}

impl Meter {
    /// For a pod that lets in no more than `bytes_per_s_max`.
    pub fn new(bytes_per_s_max: Option<u64>) -> Self {
        Self { limit: bytes_per_s_max.map(|limit| limit as f64), ..Self::default() }
    }

    /// What gets in in a second, of which `admitted` bytes have so far, `elapsed` after the last look.
    pub fn rate(&mut self, admitted: u64, elapsed: Duration) -> f64 {
        let new = admitted.saturating_sub(std::mem::replace(&mut self.admitted, admitted)) as f64;
        let seconds = elapsed.as_secs_f64().max(0.001);
        self.rate += (new / seconds - self.rate) * (seconds / RATE_MEMORY_S).min(1.0);
        self.rate
    }

    /// Takes a sample; answers the load as it is now. Streams, tables and lag are the caller's.
    pub fn measure(&mut self, sample: &Sample) -> LoadReport {
        let cores = sample.cores.max(1) as f64;
        let cpu = ratio(sample.cpu.as_secs_f64(), sample.elapsed.as_secs_f64() * cores);
        // By Little's law: what waits, over how fast it leaves.
        let wait = sample.ingress_bytes as f64 / sample.bytes_per_s.max(RATE_MIN);
        let log = wait / LOG_WAIT_FULL.as_secs_f64();
        let busiest = cpu.max(log.min(1.0));
        if busiest >= TELLING_LOAD {
            let seen = (sample.bytes_per_s / busiest).max(CAPACITY_MIN);
            let known = self.capacity.unwrap_or(CAPACITY_BYTES_PER_S);
            self.capacity = Some(known + (seen - known) * CAPACITY_STEP);
        }
        let capacity_bytes_per_s =
            self.capacity.unwrap_or(CAPACITY_BYTES_PER_S).min(self.limit.unwrap_or(f64::INFINITY));
        let budget = ratio(sample.ingress_bytes as f64, sample.ingress_bytes_max as f64);
        let ingress = budget.max(sample.bytes_per_s / capacity_bytes_per_s);
        let in_memory = ratio(sample.memory_bytes as f64, sample.memory_bytes_max as f64);
        let in_log = ratio(sample.log_bytes as f64, sample.log_bytes_max as f64);
        let decay = (-sample.elapsed.as_secs_f64() / DECAY.as_secs_f64()).exp();
        let smooth = |old: &mut f64, now: f64| {
            *old = if now >= *old { now } else { now + (*old - now) * decay };
            *old
        };
        self.sequence += 1;
        LoadReport {
            sequence: self.sequence,
            ingress: smooth(&mut self.ingress, ingress.min(MOST)),
            cpu: smooth(&mut self.cpu, cpu.min(MOST)),
            log: smooth(&mut self.log, log.min(MOST)),
            memory: smooth(&mut self.memory, (in_memory * MEMORY_WEIGHT).max(in_log).min(MOST)),
            capacity_bytes_per_s,
            bytes_per_s: sample.bytes_per_s,
            ..LoadReport::default()
        }
    }
}

fn ratio(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { part / whole } else { 0.0 }
}

/// The busiest tables among these streams.
pub fn by_table(streams: &[StreamLoad]) -> Vec<TableLoad> {
    let mut tables: HashMap<&TableName, TableLoad> = HashMap::new();
    for stream in streams.iter().filter(|stream| stream.held) {
        let new = || TableLoad { table: stream.table.clone(), bytes_per_s: 0.0, streams: 0 };
        let table = tables.entry(&stream.table).or_insert_with(new);
        table.bytes_per_s += stream.bytes_per_s;
        table.streams += 1;
    }
    let mut tables: Vec<TableLoad> = tables.into_values().collect();
    tables.sort_by(|a, b| b.bytes_per_s.total_cmp(&a.bytes_per_s).then_with(|| a.table.cmp(&b.table)));
    tables.truncate(TABLES_REPORTED_MAX);
    tables
}

/// Processor time that this process has used so far; zero where the system does not say.
pub fn processor_time() -> Duration {
    let read = || {
        let stat = fs::read_to_string("/proc/self/stat").ok()?;
        // Behind the name, which may hold anything: state, then numbers; the 12th and 13th of these are what we want.
        let (_, numbers) = stat.rsplit_once(')')?;
        let mut numbers = numbers.split_ascii_whitespace().skip(11);
        let (user, system): (u64, u64) = (numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?);
        Some(Duration::from_millis((user + system) * 1000 / TICKS_PER_S))
    };
    read().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn idle() -> Sample {
        Sample {
            elapsed: SECOND,
            cores: 2,
            ingress_bytes_max: 100 << 20,
            memory_bytes_max: 1 << 30,
            log_bytes_max: 4 << 30,
            ..Sample::default()
        }
    }

    #[test]
    fn an_idle_pod_has_no_load() {
        let report = Meter::default().measure(&idle());
        assert_eq!((report.fraction(), report.capacity_bytes_per_s), (0.0, CAPACITY_BYTES_PER_S));
    }

    #[test]
    fn load_rises_at_once_and_comes_down_slowly() {
        let mut meter = Meter::default();
        let busy = Sample { cpu: SECOND, ..idle() };
        assert!((meter.measure(&busy).cpu - 0.5).abs() < 1e-9);
        let after = meter.measure(&idle());
        assert!((0.4..0.5).contains(&after.cpu), "{after:?}");
        let much_later = meter.measure(&Sample { elapsed: Duration::from_secs(60), ..idle() });
        assert!(much_later.cpu < 0.01, "{much_later:?}");
        assert!(much_later.sequence > after.sequence);
    }

    #[test]
    fn a_pod_is_asked_whatever_its_load() {
        let slow = Sample { cpu: SECOND * 2, ingress_bytes: 100 << 20, memory_bytes: 1 << 30, ..idle() };
        for sample in [slow, Sample { log_bytes: 4 << 30, ..idle() }] {
            let report = Meter::default().measure(&sample);
            assert!((0.8..0.9).contains(&report.fraction()), "{report:?}");
        }
    }

    #[test]
    fn capacity_comes_near_to_what_the_pod_does_when_it_is_busy() {
        let mut meter = Meter::default();
        let busy = Sample { cpu: SECOND, bytes_per_s: 30e6, ..idle() };
        let report = (0..200).map(|_| meter.measure(&busy)).last().expect("some");
        assert!((report.capacity_bytes_per_s - 60e6).abs() < 1e6, "{report:?}");
    }

    #[test]
    fn a_pod_at_its_limit_says_so() {
        let mut meter = Meter::new(Some(2_000_000));
        let half = meter.measure(&Sample { bytes_per_s: 1e6, ..idle() });
        assert!((half.fraction() - 0.5).abs() < 1e-9 && half.capacity_bytes_per_s == 2e6, "{half:?}");
        let full = meter.measure(&Sample { bytes_per_s: 2e6, ..idle() });
        assert!((0.8..0.9).contains(&full.fraction()), "{full:?}");
    }

    #[test]
    fn what_gets_in_is_averaged_over_some_seconds_whoever_sends_it() {
        let mut meter = Meter::default();
        let step = Duration::from_millis(200);
        let after = |meter: &mut Meter, from: u64, bytes: u64| {
            (1..=50).map(|n| meter.rate(from + n * bytes, step)).last().expect("some")
        };
        let busy = after(&mut meter, 0, 20_000);
        assert!((95e3..=100e3).contains(&busy), "100,000 bytes in a second: {busy}");
        let idle = after(&mut meter, 1_000_000, 0);
        assert!((0.0..1e3).contains(&idle), "{idle}");
    }

    #[test]
    fn tables_are_told_by_their_traffic() {
        let stream = |table: &str, bytes_per_s| StreamLoad {
            stream: sluice_shared::ids::StreamId::ephemeral(),
            table: table.parse().expect("valid"),
            table_id: sluice_shared::ids::TableId("t".into()),
            bytes_per_s,
            here_for: SECOND,
            held: true,
            has_moved: false,
        };
        let tables = by_table(&[stream("a", 1.0), stream("b", 5.0), stream("a", 2.0)]);
        let told: Vec<_> =
            tables.iter().map(|table| (table.table.as_str(), table.bytes_per_s, table.streams)).collect();
        assert_eq!(told, [("main.default.b", 5.0, 1), ("main.default.a", 3.0, 2)]);
    }

    #[test]
    fn processor_time_moves() {
        let before = processor_time();
        let mut sum = 0u64;
        while processor_time() == before {
            sum = std::hint::black_box(sum.wrapping_add(1));
        }
        assert!(processor_time() > before);
    }
}
