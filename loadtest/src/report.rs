//! How figures are read: each beside the machine's limit, with its aim and whether that is met.
//!
//! *Owns*: the aims, the table, the JSON.
//! *Does not own*: measuring.

use std::fmt;

use serde::Serialize;

use crate::bench::{Figures, Paced, RowFigures};
use crate::edges::{EdgeFigures, Side};
use crate::machine::{Codec, Limits};

/// (a), MB/s of payload.
const ARROW_MB_PER_S_MIN: f64 = 100.0;
/// (b), records/s.
const JSON_RECORDS_PER_S_MIN: f64 = 100_000.0;
/// Ack median at a tenth of the load, in flushes of the same size at the same pace on the bare machine.
const ACK_FLUSHES_MAX: f64 = 2.5;
/// Median of the time to committed, ms.
const COMMITTED_MS_MAX: f64 = 1500.0;
/// CPU of the pod, in that of decoding, log write and Parquet done bare.
const POD_CPU_MAX: f64 = 1.5;
/// CPU of the gateway, in that of a receiver that does nothing but forward.
const EDGE_CPU_MAX: f64 = 1.5;

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
        Self { name, value, unit, limit: None, aim: None }
    }

    fn beside(mut self, limit: Option<(&'static str, f64)>) -> Self {
        self.limit = limit.map(|(name, value)| Limit { name, value });
        self
    }

    fn aiming(mut self, aim: Option<Aim>) -> Self {
        self.aim = aim;
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
        let limits = figures.limits.as_ref();
        let rows = figures.rows.iter().flat_map(|row| row_lines(row, limits));
        let edges = figures.edges.iter().flat_map(|edge| edge_lines(edge, figures.with_aims));
        let lines = rows.chain(edges).collect();
        Self { lines, figures }
    }

    /// Whether every aim is met.
    pub fn is_met(&self) -> bool {
        self.lines.iter().all(|line| line.is_met() != Some(false))
    }
}

fn row_lines(row: &RowFigures, limits: Option<&Limits>) -> Vec<Figure> {
    let (key, median) = (row.row.key, &row.median);
    let codec = limits.map(|limits| if key == 'a' { &limits.arrow } else { &limits.json });
    let name = |what: &str| format!("({key}) {what}");
    let bare = codec.map(|codec| ("decode + log + Parquet, bare", codec.bare_cpu_s_per_gb()));
    let pod_aim = bare.filter(|_| row.row.frame_rows > 1).map(|(_, bare)| Aim::AtMost(POD_CPU_MAX * bare));
    let parquet = |figure: fn(&Codec) -> f64| codec.map(|codec| ("Parquet zstd-1, one core", figure(codec)));
    let flush = limits.map(|limits| ("4 KiB flush, idle", limits.disk.flush_4k_us / 1e3));
    let aims = |wanted: char, least: f64| (key == wanted && limits.is_some()).then_some(Aim::AtLeast(least));
    let mut lines = vec![
        Figure::new(name("records/s, to durable"), median.durable_records_per_s, "/s"),
        Figure::new(name("payload, to durable"), median.durable_mb_per_s, "MB/s"),
        Figure::new(name("records/s, to committed"), median.records_per_s, "/s")
            .beside(parquet(|codec| codec.parquet_records_per_s))
            .aiming(aims('b', JSON_RECORDS_PER_S_MIN)),
        Figure::new(name("payload, to committed"), median.mb_per_s, "MB/s")
            .beside(parquet(|codec| codec.parquet_mb_per_s))
            .aiming(aims('a', ARROW_MB_PER_S_MIN)),
        Figure::new(name("ack p50, full load"), median.ack.p50_ms, "ms").beside(flush),
        Figure::new(name("ack p99, full load"), median.ack.p99_ms, "ms").beside(flush),
        Figure::new(name("committed p50"), median.committed.p50_ms, "ms")
            .aiming(limits.map(|_| Aim::AtMost(COMMITTED_MS_MAX))),
        Figure::new(name("committed p99"), median.committed.p99_ms, "ms"),
        Figure::new(name("pod CPU"), median.cpu.pod_s_per_gb, "s/GB").beside(bare).aiming(pod_aim),
        Figure::new(name("gateway CPU"), median.cpu.gateway_s_per_gb, "s/GB"),
        Figure::new(name("producer CPU (the bench)"), median.cpu.producer_s_per_gb, "s/GB"),
    ];
    lines.extend(row.paced.iter().flat_map(|paced| paced_lines(key, paced)));
    lines
}

fn paced_lines(key: char, paced: &Paced) -> Vec<Figure> {
    let flush_ms = paced.steps.flush_us / 1e3;
    let flush = Some(("flush of a frame, at that pace", flush_ms));
    let name =
        |what: &str| format!("({key}) {what}, {}, {:.0} KB frames", paced.rate, paced.frame_bytes / 1e3);
    let ack_aim = paced.is_light.then_some(Aim::AtMost(ACK_FLUSHES_MAX * flush_ms));
    vec![
        Figure::new(name("payload"), paced.run.mb_per_s, "MB/s"),
        Figure::new(name("ack p50"), paced.run.ack.p50_ms, "ms").beside(flush).aiming(ack_aim),
        Figure::new(name("ack p99"), paced.run.ack.p99_ms, "ms").beside(flush),
        Figure::new(name("two loopback round trips of a frame"), 2.0 * paced.steps.round_trip_us / 1e3, "ms")
            .beside(flush),
        Figure::new(name("committed p50"), paced.run.committed.p50_ms, "ms")
            .aiming(Some(Aim::AtMost(COMMITTED_MS_MAX))),
        Figure::new(name("committed p99"), paced.run.committed.p99_ms, "ms"),
    ]
}

fn edge_lines(figures: &EdgeFigures, with_aims: bool) -> [Figure; 3] {
    let (gateway, bare) = (&figures.gateway.median, &figures.bare.median);
    let name = |what: &str| format!("{} of {}: {what}", figures.edge.name, figures.shape);
    let beside = |value| Some(("receive + forward, bare", value));
    [
        Figure::new(name("gateway CPU"), gateway.cpu_s_per_gb, "s/GB")
            .beside(beside(bare.cpu_s_per_gb))
            .aiming(with_aims.then_some(Aim::AtMost(EDGE_CPU_MAX * bare.cpu_s_per_gb))),
        Figure::new(name("payload, durable"), gateway.mb_per_s, "MB/s").beside(beside(bare.mb_per_s)),
        Figure::new(name("records, durable"), gateway.records_per_s, "/s").beside(beside(bare.records_per_s)),
    ]
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(limits) = &self.figures.limits {
            write_limits(f, limits)?;
        }
        for row in &self.figures.rows {
            let rates: Vec<String> = row.runs.iter().map(|run| number(run.records_per_s)).collect();
            writeln!(f, "({}) {}: records/s by run: {}", row.row.key, row.row.title, rates.join(", "))?;
        }
        for edge in &self.figures.edges {
            let cpu = |side: &Side| {
                let runs: Vec<String> = side.runs.iter().map(|run| number(run.cpu_s_per_gb)).collect();
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
        "  loopback TCP {} MB/s; memcpy {} MB/s",
        number(limits.loopback_mb_per_s),
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
    use crate::edges::{EDGES, Run};

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

    #[test]
    fn a_gateway_may_take_half_as_much_again_as_the_least() {
        let side = |cpu_s_per_gb| {
            let run = Run { records: 1, mb_per_s: 100.0, records_per_s: 1000.0, cpu_s_per_gb };
            Side { runs: vec![run], median: run }
        };
        for (gateway, with_aims, expected) in
            [(3.0, true, Some(true)), (3.1, true, Some(false)), (3.1, false, None)]
        {
            let (edge, gateway, bare) = (EDGES[0], side(gateway), side(2.0));
            let figures = EdgeFigures { edge, shape: "1 KB", message_bytes: 1e6, gateway, bare };
            let [cpu, ..] = edge_lines(&figures, with_aims);
            assert_eq!(cpu.is_met(), expected);
            assert_eq!(cpu.ratio(), Some(cpu.value / 2.0));
        }
    }
}
