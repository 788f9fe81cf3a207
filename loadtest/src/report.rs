//! How figures are read: each beside the machine's limit, with its aim and whether that is met.
//!
//! *Owns*: the aims, the table, the JSON.
//! *Does not own*: measuring.

use std::fmt;

use serde::Serialize;
use sluice_pod::config::PodConfig;

use crate::bench::growth::{Commits, Growth, Point, Versions};
use crate::bench::run::Run;
use crate::bench::{Figures, LIGHT_LOAD, Paced, Row, RowFigures, median};
use crate::edges::{self, EdgeFigures};
use crate::machine::{Codec, Limits, Steps};

/// (a), MB/s of payload, to durable and to committed.
const ARROW_DURABLE_MIN: f64 = 400.0;
const ARROW_COMMITTED_MIN: f64 = 150.0;
/// (b), (c) and (q), records/s to durable.
const JSON_DURABLE_MIN: f64 = 500_000.0;
const SINGLE_DURABLE_MIN: f64 = 200_000.0;
const QUIC_DURABLE_MIN: f64 = 120_000.0;
/// Acks at the light load, in flushes of the same size at the same pace on the bare machine.
const ACK_P50_FLUSHES_MAX: f64 = 1.5;
const ACK_P99_FLUSHES_MAX: f64 = 3.0;
/// Time to committed at half load, ms.
const COMMITTED_P50_MS_MAX: f64 = 1000.0;
const COMMITTED_P99_MS_MAX: f64 = 2500.0;
/// CPU of gateway and pod for (a), in that of receiving, decoding, log write and Parquet done bare.
const CPU_MAX: f64 = 1.3;
/// CPU of the gateway, in that of a receiver that does nothing but forward.
const EDGE_CPU_MAX: f64 = 1.5;
/// A rate is flat where it stays above this of the first,
const FLAT_RATE_MIN: f64 = 0.8;
/// and a time where it stays below this of the first.
const FLAT_TIME_MAX: f64 = 1.2;
/// Hundreds of commits that make one figure.
const HUNDREDS: usize = 5;
/// Memory of the second half of the long run, at most, in that of the first.
const FLAT_MEMORY_MAX: f64 = 1.1;
/// What a pod may take beside `pod.memory_bytes` and `pod.ingress_bytes`: files that are being encoded, the program.
const POD_REST_BYTES: f64 = (256 << 20) as f64;

/// What one core of the machine encodes of (a) as Parquet where the rates that are aimed at were met, MB/s.
const PARQUET_OF_AIMS: f64 = 222.0;

/// Why an aim is missed, where that is known of every machine: by the beginning of the figure's name. Without one the bench
/// fails.
const REASONS: [(&str, &str); 6] = [
    ("zerobus-json of 250 B: gateway CPU", ONE_BY_ONE),
    ("(a) CPU of gateway and pod", BESIDE_THE_BARE_SUM),
    ("10,000 streams: records", SOCKETS),
    ("10.0 tables: records, to durable", SMALL_FILES),
    ("100 tables: records", SMALL_FILES),
    ("1,000 tables: records", SMALL_FILES),
];
const BESIDE_THE_BARE_SUM: &str = "the bare sum has one receiver, and neither files that are written nor copies; by profile of \
     the pod, 9 % is what files of the table take on their way into the page cache, 16 % are copies into groups of the log, \
     out of HTTP/2 messages and among Parquet's pages, and 5 % the second receiver";
const ONE_BY_ONE: &str = "a request of one small record costs the gateway about a microsecond; by profile 14 % are copies, out \
     of HTTP/2, into frames of many records and into the link's messages, 12 % protobuf and 9 % the first look at each \
     request's length, while it is in no cache; the bare receiver joins nothing, and looks at no text";
const BARE_CHAIN: &str = "a flush and two bare round trips between threads that sleep take longer than that by themselves, on \
     the machine at rest (a line below); a record passes five threads of three processes, and its ack four";
const LATE_WAKES: &str = "on the machine at rest a flush and two bare round trips, each at its p99, take longer than that by \
     themselves (a line below): once in a hundred times a thread that sleeps wakes late, and a record and its ack wake nine; \
     with the log in memory, and no files made, p99 is a third of what it is, and still above";
const SLOWER_CORES: &str = "a core of this machine encodes (a) as Parquet at less than nine tenths of the speed of those on \
     which the aims were met: read the ratios";
const SOCKETS: &str = "by profile the pod's link and files take 31 % of both cores, its lanes 28 %, the gateway 22 % and the \
     producer 15 %: each stream has a socket, tasks and messages of its own for ten records at a time, and a wake finds one or \
     two frames, where it finds dozens of a few streams";
const SMALL_FILES: &str = "each table's flush is a file and a commit of its own, however few rows it has, and files of many \
     tables are encoded by all cores, where one table leaves a core to the log; of 1,000 tables, by profile, encoding takes 19 % \
     of both cores, Delta's commits 8 %, files that are created and flushed 7 % and tables' tasks 4 %, and all that each \
     record costs in lanes and on links costs two fifths more than with few tables, with pages, caches and threads cold";

/// One line of the table.
#[derive(Debug, Clone, Serialize)]
pub struct Figure {
    /// What was measured.
    pub name: String,
    /// How much.
    pub value: f64,
    /// Of what.
    pub unit: &'static str,
    /// What the machine can do.
    pub limit: Option<Limit>,
    /// What is aimed at.
    pub aim: Option<Aim>,
    /// Why it is missed, where that is known.
    pub reason: Option<&'static str>,
}

/// What the machine can do, in the figure's unit.
#[derive(Debug, Clone, Serialize)]
pub struct Limit {
    /// What was measured.
    pub name: &'static str,
    /// How much.
    pub value: f64,
}

/// What is aimed at, in the figure's unit.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Aim {
    /// So much or more.
    AtLeast(f64),
    /// So much or less.
    AtMost(f64),
}

impl Figure {
    fn new(name: String, value: f64, unit: &'static str) -> Self {
        let known = REASONS.iter().find(|(begin, _)| name.starts_with(begin));
        let reason = known.map(|(_, reason)| *reason);
        Self { name, value, unit, limit: None, aim: None, reason }
    }

    fn beside(mut self, limit: Option<(&'static str, f64)>) -> Self {
        self.limit = limit.map(|(name, value)| Limit { name, value });
        self
    }

    fn aiming(mut self, aim: Option<Aim>) -> Self {
        self.aim = aim;
        self
    }

    /// Where nothing else is known already.
    fn because(mut self, reason: Option<&'static str>) -> Self {
        self.reason = self.reason.or(reason);
        self
    }

    /// The figure in units of its limit.
    pub fn ratio(&self) -> Option<f64> {
        self.limit.as_ref().map(|limit| self.value / limit.value)
    }

    /// Whether its aim is met; None where it has none.
    pub fn is_met(&self) -> Option<bool> {
        self.aim.map(|aim| match aim {
            Aim::AtLeast(least) => self.value >= least,
            Aim::AtMost(most) => self.value <= most,
        })
    }
}

/// All lines, in the order in which they are shown.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// The table.
    pub lines: Vec<Figure>,
    /// What it was made from.
    pub figures: Figures,
}

impl Report {
    /// Puts figures, limits and aims together.
    pub fn new(figures: Figures) -> Self {
        let mut lines = Vec::new();
        for row in &figures.rows {
            lines.extend(row_lines(row, figures.limits.as_ref()));
        }
        for growth in &figures.growth {
            lines.extend(growth_lines(growth));
        }
        lines.extend(figures.versions.iter().flat_map(version_lines));
        let slower = slower_cores(figures.limits.as_ref());
        lines.extend(figures.long.iter().flat_map(|run| long_lines(run, slower)));
        lines.extend(figures.edges.iter().flat_map(edge_lines));
        if !figures.with_aims {
            lines.iter_mut().for_each(|line| line.aim = None);
        }
        Self { lines, figures }
    }

    /// Whether every aim is met, or why not is known.
    pub fn is_met(&self) -> bool {
        self.lines.iter().all(|line| line.is_met() != Some(false) || line.reason.is_some())
    }
}

fn row_lines(row: &RowFigures, limits: Option<&Limits>) -> Vec<Figure> {
    let (key, runs) = (row.row.key, &row.runs);
    let name = |what: &str| format!("({key}) {what}");
    let line = |what, unit, figure: fn(&Run) -> f64| Figure::new(name(what), median(runs, figure), unit);
    let codec = limits.map(|limits| if key == 'a' { &limits.arrow } else { &limits.json });
    let parquet = |figure: fn(&Codec) -> f64| codec.map(|codec| ("Parquet zstd-1, one core", figure(codec)));
    let flush = limits.map(|limits| ("4 KiB flush, idle", limits.disk.flush_4k_us / 1e3));
    let disk = limits.map(|limits| ("disk in sequence", limits.disk.write_mb_per_s));
    let bare = limits.zip(codec).map(|(limits, codec)| {
        ("receive + decode + log + Parquet, bare", limits.receive_cpu_s_per_gb + codec.bare_cpu_s_per_gb())
    });
    let aim = |aims: &[(char, f64)]| {
        aims.iter().find(|(wanted, _)| *wanted == key).map(|(_, least)| Aim::AtLeast(*least))
    };
    let slower = slower_cores(limits);
    let durable = [('b', JSON_DURABLE_MIN), ('c', SINGLE_DURABLE_MIN), ('q', QUIC_DURABLE_MIN)];
    let cpu = bare.filter(|_| key == 'a').map(|(_, bare)| Aim::AtMost(CPU_MAX * bare));
    let mut lines = vec![
        line("payload, to durable", "MB/s", |run| run.durable_mb_per_s)
            .beside(disk)
            .aiming(aim(&[('a', ARROW_DURABLE_MIN)]))
            .because(slower),
        line("records, to durable", "/s", |run| run.durable_records_per_s)
            .aiming(aim(&durable))
            .because(slower),
        line("payload, to committed", "MB/s", |run| run.mb_per_s)
            .beside(parquet(|codec| codec.parquet_mb_per_s))
            .aiming(aim(&[('a', ARROW_COMMITTED_MIN)]))
            .because(slower),
        line("records, to committed", "/s", |run| run.records_per_s)
            .beside(parquet(|codec| codec.parquet_records_per_s)),
        line("ack p50, full load", "ms", |run| run.ack.p50_ms).beside(flush),
        line("ack p99, full load", "ms", |run| run.ack.p99_ms).beside(flush),
        line("committed p50, full load", "ms", |run| run.committed.p50_ms),
        line("committed p99, full load", "ms", |run| run.committed.p99_ms),
        line("CPU of gateway and pod", "s/GB", |run| run.cpu.gateway_s_per_gb + run.cpu.pod_s_per_gb)
            .beside(bare)
            .aiming(cpu),
        line("CPU of the gateway", "s/GB", |run| run.cpu.gateway_s_per_gb),
        line("CPU of the producer (the bench)", "s/GB", |run| run.cpu.producer_s_per_gb),
    ];
    lines.extend(row.paced.iter().flat_map(|paced| paced_lines(key, paced)));
    lines
}

fn slower_cores(limits: Option<&Limits>) -> Option<&'static str> {
    limits.filter(|limits| limits.arrow.parquet_mb_per_s < 0.9 * PARQUET_OF_AIMS).map(|_| SLOWER_CORES)
}

fn paced_lines(key: char, paced: &Paced) -> Vec<Figure> {
    let bare = |figure: fn(&Steps) -> f64| median(&paced.steps, figure);
    let flush_ms = bare(|steps| steps.flush.p50_ms);
    let chain_ms = bare(|steps| steps.flush.p50_ms + 2.0 * steps.round_trip.p50_ms);
    let late_ms = bare(|steps| steps.flush.p99_ms + 2.0 * steps.round_trip.p99_ms);
    let flush = Some(("flush of a frame, at that pace", flush_ms));
    let percent = 100.0 * paced.load;
    let line =
        |what: &str, unit, value| Figure::new(format!("({key}) {what}, {percent} % load"), value, unit);
    let run = |what, figure: fn(&Run) -> f64| line(what, "ms", median(&paced.runs, figure));
    let is_light = paced.load == LIGHT_LOAD;
    let at_most = |most: f64| (!is_light).then_some(Aim::AtMost(most));
    let ack = |line: Figure, flushes: f64, (bare_ms, reason)| {
        let most = flushes * flush_ms;
        let known = (bare_ms > most).then_some(reason);
        line.beside(flush).aiming(is_light.then_some(Aim::AtMost(most))).because(known)
    };
    vec![
        line("payload", "MB/s", median(&paced.runs, |run| run.mb_per_s)),
        line("a frame", "KB", paced.frame_bytes / 1e3),
        ack(run("ack p50", |run| run.ack.p50_ms), ACK_P50_FLUSHES_MAX, (chain_ms, BARE_CHAIN)),
        ack(run("ack p99", |run| run.ack.p99_ms), ACK_P99_FLUSHES_MAX, (late_ms, LATE_WAKES)),
        line("a bare flush and two bare round trips", "ms", chain_ms).beside(flush),
        line("the same, each at its p99", "ms", late_ms).beside(flush),
        run("committed p50", |run| run.committed.p50_ms).aiming(at_most(COMMITTED_P50_MS_MAX)),
        run("committed p99", |run| run.committed.p99_ms).aiming(at_most(COMMITTED_P99_MS_MAX)),
    ]
}

const DURABLE: fn(&Run) -> f64 = |run| run.durable_records_per_s;
const COMMITTED: fn(&Run) -> f64 = |run| run.records_per_s;

/// Beside the first, and judged by it.
fn growth_lines(growth: &Growth) -> Vec<Figure> {
    let of = growth.of;
    let rates = [("durable", DURABLE), ("committed", COMMITTED)];
    let lines = rates.iter().flat_map(|(what, rate)| {
        let rate_of = move |point: &Point| median(&point.runs, rate);
        let first = growth.points.first().map_or(f64::NAN, rate_of);
        growth.points.iter().map(move |point| {
            let name = format!("{} {of}: records, to {what}", number(point.count as f64));
            let line = Figure::new(name, rate_of(point), "/s").beside(Some(("with one", first)));
            line.aiming((point.count > 1).then_some(Aim::AtLeast(FLAT_RATE_MIN * first)))
        })
    });
    lines.collect()
}

/// Those from version 1, 101, 1,001 on, and the last ones. Later ones are medians of some hundreds.
fn version_lines(versions: &Versions) -> Vec<Figure> {
    let points = &versions.points[..];
    let last = points.len().saturating_sub(HUNDREDS).max(1);
    let shown = points.iter().enumerate().filter(|(at, _)| [0, 1, 10, last].contains(at));
    let lines = shown.map(|(at, Commits { from, .. })| {
        let name = format!("a record to its commit, p50, from version {from} on");
        let some = &points[at..points.len().min(at + if at < 10 { 1 } else { HUNDREDS })];
        let young = median(some, |commits| commits.young.p50_ms);
        let line = Figure::new(name, median(some, |commits| commits.old.p50_ms), "ms");
        let line = line.beside(Some(("into a table without a history, in turn", young)));
        line.aiming((at > 0).then_some(Aim::AtMost(FLAT_TIME_MAX * young)))
    });
    lines.collect()
}

fn long_lines(run: &Run, slower: Option<&'static str>) -> Vec<Figure> {
    let (early, late) = run.pod_memory.split_at(run.pod_memory.len() / 2);
    let most = |memory: &[u64]| memory.iter().max().map_or(f64::NAN, |bytes| *bytes as f64 / 1e6);
    // As they are where nobody sets them.
    let config = PodConfig::default();
    let budget_mb = (config.memory_bytes.0 + config.ingress_bytes.0) as f64 / 1e6;
    let name = |what: &str| format!("(a) for {:.0} s: {what}", run.seconds);
    vec![
        Figure::new(name("payload, to committed"), run.mb_per_s, "MB/s")
            .aiming(Some(Aim::AtLeast(ARROW_COMMITTED_MIN)))
            .because(slower),
        Figure::new(name("memory of the pod, most of the first half"), most(early), "MB")
            .beside(Some(("its budget", budget_mb)))
            .aiming(Some(Aim::AtMost(budget_mb + POD_REST_BYTES / 1e6))),
        Figure::new(name("memory of the pod, most of the second half"), most(late), "MB")
            .beside(Some(("first half", most(early))))
            .aiming(Some(Aim::AtMost(FLAT_MEMORY_MAX * most(early)))),
    ]
}

fn edge_lines(figures: &EdgeFigures) -> [Figure; 3] {
    let line = |what, unit, figure: fn(&edges::Run) -> f64| {
        let name = format!("{} of {}: {what}", figures.edge.name, figures.shape);
        let bare = median(&figures.bare, figure);
        Figure::new(name, median(&figures.gateway, figure), unit)
            .beside(Some(("receive + forward, bare", bare)))
    };
    let cpu = line("gateway CPU", "s/GB", |run| run.cpu_s_per_gb);
    let most = cpu.limit.as_ref().map(|bare| Aim::AtMost(EDGE_CPU_MAX * bare.value));
    [
        cpu.aiming(most),
        line("payload, durable", "MB/s", |run| run.mb_per_s),
        line("records, durable", "/s", |run| run.records_per_s),
    ]
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(limits) = &self.figures.limits {
            write_limits(f, limits)?;
        }
        for row in &self.figures.rows {
            let rates = |rate: fn(&Run) -> f64| {
                row.runs.iter().map(|run| number(rate(run))).collect::<Vec<_>>().join(", ")
            };
            let (durable, committed) =
                (rates(|run| run.durable_records_per_s), rates(|run| run.records_per_s));
            let Row { key, title, .. } = row.row;
            writeln!(f, "({key}) {title}: records/s by run: durable {durable}; committed {committed}")?;
        }
        for edge in &self.figures.edges {
            let cpu = |runs: &[edges::Run]| {
                let runs: Vec<String> = runs.iter().map(|run| number(run.cpu_s_per_gb)).collect();
                runs.join(", ")
            };
            let (name, shape, kb) = (edge.edge.name, edge.shape, edge.message_bytes / 1e3);
            let (gateway, bare) = (cpu(&edge.gateway), cpu(&edge.bare));
            writeln!(
                f,
                "{name} of {shape}, {kb:.1} KB messages: CPU s/GB by run: gateway {gateway}; bare {bare}"
            )?;
        }
        writeln!(f)?;
        let head = ["figure", "value", "unit", "limit", "of", "ratio", "aim", "met"].map(str::to_owned);
        let mut cells = vec![head];
        cells.extend(self.lines.iter().map(cells_of));
        let width = |column: usize| cells.iter().map(|line| line[column].chars().count()).max().unwrap_or(0);
        let widths: [usize; 8] = std::array::from_fn(width);
        for line in &cells {
            for (column, (cell, width)) in line.iter().zip(widths).enumerate() {
                // Words to the left, numbers to the right.
                match column {
                    0 | 2 | 4 | 7 => write!(f, "{cell:<width$}  ")?,
                    _ => write!(f, "{cell:>width$}  ")?,
                }
            }
            writeln!(f)?;
        }
        for line in self.lines.iter().filter(|line| line.is_met() == Some(false)) {
            let why = line.reason.unwrap_or("nobody knows why: the bench fails");
            writeln!(f, "MISSED: {}: {why}", line.name)?;
        }
        Ok(())
    }
}

fn cells_of(figure: &Figure) -> [String; 8] {
    let aim = figure.aim.map(|aim| match aim {
        Aim::AtLeast(least) => format!("≥ {}", number(least)),
        Aim::AtMost(most) => format!("≤ {}", number(most)),
    });
    let met = figure.is_met().map(|met| if met { "met" } else { "MISSED" });
    [
        figure.name.clone(),
        number(figure.value),
        figure.unit.to_owned(),
        figure.limit.as_ref().map(|limit| number(limit.value)).unwrap_or_default(),
        figure.limit.as_ref().map(|limit| limit.name.to_owned()).unwrap_or_default(),
        figure.ratio().map(|ratio| format!("{ratio:.2}")).unwrap_or_default(),
        aim.unwrap_or_default(),
        met.unwrap_or_default().to_owned(),
    ]
}

pub(crate) fn write_limits(f: &mut fmt::Formatter<'_>, limits: &Limits) -> fmt::Result {
    let disk = &limits.disk;
    let how = if disk.direct { "direct" } else { "buffered: no direct I/O here" };
    writeln!(f, "machine")?;
    writeln!(
        f,
        "  disk ({how}): {} MB/s in sequence, {:.2} CPU s/GB; write + flush p50 idle 4 KiB {:.3} ms, 64 KiB {:.3} ms; \
         all cores busy {:.3} and {:.3} ms",
        number(disk.write_mb_per_s),
        disk.write_cpu_s_per_gb,
        disk.flush_4k_us / 1e3,
        disk.flush_64k_us / 1e3,
        disk.flush_4k_busy_us / 1e3,
        disk.flush_64k_busy_us / 1e3,
    )?;
    writeln!(
        f,
        "  loopback TCP {} MB/s, its receiver {:.2} CPU s/GB; memcpy {} MB/s",
        number(limits.loopback_mb_per_s),
        limits.receive_cpu_s_per_gb,
        number(limits.memcpy_mb_per_s)
    )?;
    let codecs = [("Arrow IPC", &limits.arrow), ("JSON", &limits.json), ("protobuf", &limits.protobuf)];
    for (name, codec) in codecs {
        writeln!(
            f,
            "  one core, {name}, {:.0} B records: decode {} MB/s ({} /s), Parquet zstd-1 {} MB/s ({} /s); bare CPU s/GB: \
             decode {:.2} + log {:.2} + Parquet {:.2} = {:.2}",
            codec.record_bytes,
            number(codec.decode_mb_per_s),
            number(codec.decode_records_per_s),
            number(codec.parquet_mb_per_s),
            number(codec.parquet_records_per_s),
            codec.decode_cpu_s_per_gb,
            codec.wal_cpu_s_per_gb,
            codec.parquet_cpu_s_per_gb,
            codec.bare_cpu_s_per_gb(),
        )?;
    }
    Ok(())
}

/// Three digits that count, thousands apart.
pub(crate) fn number(value: f64) -> String {
    match value {
        value if value >= 1000.0 => {
            let digits = format!("{value:.0}");
            let groups: Vec<&str> = digits
                .as_bytes()
                .rchunks(3)
                .rev()
                .map(|group| std::str::from_utf8(group).unwrap_or_default())
                .collect();
            groups.join(",")
        }
        value if value >= 100.0 => format!("{value:.0}"),
        value if value >= 10.0 => format!("{value:.1}"),
        value if value >= 1.0 => format!("{value:.2}"),
        value => format!("{value:.3}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::run::{Cpu, Quantiles};
    use crate::edges::EDGES;

    #[test]
    fn numbers_are_short() {
        let shown = [1_234_567.8, 1000.0, 123.4, 12.34, 1.234, 0.1234].map(number);
        assert_eq!(shown, ["1,234,568", "1,000", "123", "12.3", "1.23", "0.123"]);
    }

    #[test]
    fn an_aim_is_met_or_missed() {
        let figure = |value, aim| Figure::new("x".to_owned(), value, "ms").aiming(aim).is_met();
        assert_eq!(figure(1.0, Some(Aim::AtMost(2.0))), Some(true));
        assert_eq!(figure(3.0, Some(Aim::AtMost(2.0))), Some(false));
        assert_eq!(figure(3.0, Some(Aim::AtLeast(2.0))), Some(true));
        assert_eq!(figure(1.0, Some(Aim::AtLeast(2.0))), Some(false));
        assert_eq!(figure(1.0, None), None);
    }

    fn nothing() -> Figures {
        Figures { with_aims: true, ..Figures::default() }
    }

    fn run_of(records_per_s: f64) -> Run {
        let none = Quantiles { p50_ms: 0.0, p99_ms: 0.0 };
        Run {
            records: 1,
            seconds: 1.0,
            records_per_s,
            mb_per_s: 0.0,
            durable_records_per_s: records_per_s,
            durable_mb_per_s: 0.0,
            ack: none,
            committed: none,
            cpu: Cpu { gateway_s_per_gb: 0.0, pod_s_per_gb: 0.0, producer_s_per_gb: 0.0 },
            pod_memory: Vec::new(),
        }
    }

    #[test]
    fn an_aim_that_is_missed_without_a_reason_fails() {
        let growth = |last| {
            let point = |count, rates: [f64; 3]| Point { count, runs: rates.map(run_of).to_vec() };
            Growth {
                of: "streams",
                points: vec![point(1, [90.0, 110.0, 100.0]), point(10, [0.0, last, 200.0])],
            }
        };
        for (last, is_met) in [(80.0, true), (79.0, false)] {
            let mut report = Report::new(Figures { growth: vec![growth(last)], ..nothing() });
            assert_eq!(report.is_met(), is_met, "{report}");
            report.lines.iter_mut().for_each(|line| line.reason = Some("known"));
            assert!(report.is_met());
            assert_eq!(report.to_string().contains("records, to durable: known"), !is_met, "{report}");
        }
        let unaimed = Figures { growth: vec![growth(0.0)], with_aims: false, ..nothing() };
        assert!(Report::new(unaimed).is_met());
    }

    #[test]
    fn a_late_ack_is_known_where_bare_steps_are_late_too() {
        let late = |p99_us| {
            let step = Quantiles { p50_ms: 0.1, p99_ms: p99_us / 1e3 };
            let times = Quantiles { p50_ms: 1.0, p99_ms: 5.0 };
            let paced = Paced {
                load: LIGHT_LOAD,
                frame_bytes: 1e3,
                runs: vec![Run { ack: times, ..run_of(1e3) }],
                steps: vec![Steps { flush: step, round_trip: step }],
            };
            let lines = paced_lines('a', &paced);
            let ack = |what: &str| lines.iter().find(|line| line.name.contains(what)).expect("a line");
            let (usual, seldom) = (ack("ack p50"), ack("ack p99"));
            assert_eq!([usual.is_met(), seldom.is_met()], [Some(false); 2]);
            // Of 100 µs three steps are more than one and a half.
            assert_eq!(usual.reason, Some(BARE_CHAIN));
            seldom.reason
        };
        assert_eq!([late(100.0), late(101.0)], [None, Some(LATE_WAKES)]);
    }

    #[test]
    fn memory_and_commits_have_to_stay_as_they_were() {
        let memory = |mb: [u64; 4]| {
            let long = Run { pod_memory: mb.map(|mb| mb * 1_000_000).to_vec(), ..run_of(1e6) };
            let report = Report::new(Figures { long: Some(long), ..nothing() });
            [1, 2].map(|line| report.lines[line].is_met())
        };
        assert_eq!(memory([500, 1000, 900, 1100]), [Some(true), Some(true)]);
        assert_eq!(memory([500, 1000, 900, 1101]), [Some(true), Some(false)]);
        assert_eq!(memory([500, 1700, 900, 1000]), [Some(false), Some(true)]);
        let met = |hundreds: &[(f64, f64)]| {
            let quantiles = |p50_ms| Quantiles { p50_ms, p99_ms: 0.0 };
            let points = hundreds.iter().enumerate().map(|(at, (old, young))| Commits {
                from: at as u64 * 100 + 1,
                old: quantiles(*old),
                young: quantiles(*young),
            });
            let versions = Versions { points: points.collect() };
            Report::new(Figures { versions: Some(versions), ..nothing() }).is_met()
        };
        assert!(met(&[(1.0, 1.0), (1.2, 1.0)]) && !met(&[(1.0, 1.0), (1.3, 1.0)]));
        assert!(met(&[(1.0, 1.0), (2.0, 2.0)]), "the machine is slower, and not the table");
        let slow = |count: usize| {
            let one = |at: usize| (if (10..10 + count).contains(&at) { 2.0 } else { 1.0 }, 1.0);
            met(&(0..30).map(one).collect::<Vec<_>>())
        };
        assert_eq!([slow(2), slow(3)], [true, false], "one hiccup is none of the history's");
    }

    #[test]
    fn a_gateway_may_take_half_as_much_again_as_the_least() {
        let side = |cpu| {
            let run = |cpu_s_per_gb| edges::Run {
                records: 1,
                mb_per_s: 100.0,
                records_per_s: 1000.0,
                cpu_s_per_gb,
            };
            [1.0, 9.0, cpu].map(run).to_vec()
        };
        for (gateway, expected) in [(3.0, Some(true)), (3.1, Some(false))] {
            let (edge, gateway, bare) = (EDGES[0], side(gateway), side(2.0));
            let figures = EdgeFigures { edge, shape: "1 KB", message_bytes: 1e6, gateway, bare };
            let [cpu, ..] = edge_lines(&figures);
            assert_eq!(cpu.is_met(), expected);
            assert_eq!(cpu.ratio(), Some(cpu.value / 2.0));
        }
    }
}
