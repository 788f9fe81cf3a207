//! The bench: what a gateway and a pod, in processes of their own, do with each kind of load; whether work costs more as there is
//! more of it; a pod's memory; and each edge of the gateway.
//!
//! *Owns*: the rows, how often each is run, what is measured.
//! *Does not own*: one run (`run`), growth (`growth`), memory (`memory`), edges one by one (`edges`), the machine's limits
//! (`machine`), aims and how figures look (`report`).

pub mod growth;
mod memory;
pub mod run;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use rand::SeedableRng;
use rand::rngs::StdRng;
use serde::Serialize;
use sluice_shared::frame::Encoding;

use crate::edges::{self, EdgeFigures, Transport};
use crate::machine::{self, Limits, Steps};
use crate::producer::{Frame, Pace};
use crate::workload::{self, Shape};
use growth::{Growth, Versions};
use run::{Load, Run, run_once};

/// Payload that is made beforehand and sent over and over: more than any cache or compression window holds.
pub const FEED_BYTES: usize = 48 << 20;
/// Loads at which acks and commits are timed, of what the row sustains.
const LOADS: [f64; 2] = [LIGHT_LOAD, 0.5];
pub(crate) const LIGHT_LOAD: f64 = 0.1;
/// At a given rate one frame goes out at each of these.
const FRAME_INTERVAL: Duration = Duration::from_millis(1);
/// How long each of the machine's limits is measured.
const MEASURE: Duration = Duration::from_secs(1);
/// Edges are many, and nothing grows in a gateway.
const EDGE_RUN_MAX: Duration = Duration::from_secs(3);
pub(crate) const SEED: u64 = 20_260_101;

/// How long and how often.
#[derive(Debug, Clone)]
pub struct Options {
    /// The program to measure.
    pub sluice: PathBuf,
    /// Data goes below it; it is to be on the disk that is measured.
    pub dir: PathBuf,
    /// Length of a run.
    pub run: Duration,
    /// Runs of each row; medians count.
    pub runs: usize,
    /// Whether the machine and latencies at given loads are measured too, and anything is aimed at.
    pub with_limits: bool,
    /// Keys of the rows to run; empty for all.
    pub only: Vec<char>,
    /// The program that has the bare receivers beside which edges are measured; None: edges are left out.
    pub loadtest: Option<PathBuf>,
    /// How far work grows.
    pub growth: GrowthMax,
    /// How long a pod's memory is looked at.
    pub memory: Duration,
}

/// How far work grows.
#[derive(Debug, Clone, Copy)]
pub struct GrowthMax {
    /// Streams of one table.
    pub streams: usize,
    /// Tables of 1,000 streams.
    pub tables: usize,
    /// Versions of a table.
    pub versions: usize,
}

/// What stands for all edges among the keys of rows,
pub const EDGES_KEY: char = 'e';
/// for streams, tables and versions that become more,
const STREAMS_KEY: char = 's';
const TABLES_KEY: char = 't';
const VERSIONS_KEY: char = 'v';
/// and for memory.
const MEMORY_KEY: char = 'm';

/// Keys of rows, as they are asked for.
///
/// # Errors
/// One that there is not.
pub fn parse_rows(text: &str) -> Result<String, String> {
    let others = [EDGES_KEY, STREAMS_KEY, TABLES_KEY, VERSIONS_KEY, MEMORY_KEY];
    let known: String = ROWS.iter().map(|row| row.key).chain(others).collect();
    match text.chars().find(|key| !known.contains(*key)) {
        Some(key) => Err(format!("there is no row {key:?}: of {known:?} some, together, such as `ab`")),
        None => Ok(text.to_owned()),
    }
}

/// One kind of load.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Row {
    /// As the figures are called: a, b, c, d, q.
    pub key: char,
    /// For people.
    pub title: &'static str,
    #[serde(skip)]
    shape: Shape,
    #[serde(skip)]
    transport: Transport,
    #[serde(skip)]
    encoding: Encoding,
    #[serde(skip)]
    pub(crate) frame_rows: usize,
    #[serde(skip)]
    streams: usize,
    #[serde(skip)]
    pace: Pace,
}

const SINGLE: Row = Row {
    key: 'c',
    title: "1,000 streams, one JSON record a frame, at most 64 without an ack",
    shape: Shape::ServiceEvent,
    transport: Transport::WebSocketFrames,
    encoding: Encoding::Json,
    frame_rows: 1,
    streams: 1000,
    pace: Pace::UnderWay(64),
};

/// The rows.
pub const ROWS: [Row; 5] = [
    Row {
        key: 'a',
        title: "one stream, Arrow frames of 1,000 records of about 1 KB",
        shape: Shape::Blob,
        transport: Transport::WebSocketFrames,
        encoding: Encoding::Arrow,
        frame_rows: 1000,
        streams: 1,
        pace: Pace::Full,
    },
    Row {
        key: 'b',
        title: "one stream, JSON records of about 250 B, nine columns",
        shape: Shape::ServiceEvent,
        transport: Transport::WebSocketFrames,
        encoding: Encoding::Json,
        frame_rows: 1000,
        streams: 1,
        pace: Pace::Full,
    },
    SINGLE,
    Row { key: 'q', title: "as (c), over QUIC, on ten connections", transport: Transport::Quic, ..SINGLE },
    Row {
        key: 'd',
        title: "1,000 streams, one JSON record a frame, each waits for its ack",
        pace: Pace::UnderWay(1),
        ..SINGLE
    },
];

/// Frames that are sent over and over.
#[derive(Debug, Clone)]
pub struct Feed {
    /// What the records look like.
    pub shape: Shape,
    /// How they are encoded.
    pub encoding: Encoding,
    /// All different.
    pub frames: Arc<[Frame]>,
}

impl Feed {
    fn new(shape: Shape, encoding: Encoding, frame_rows: usize) -> anyhow::Result<Self> {
        Self::of(shape, encoding, frame_rows, FEED_BYTES)
    }

    /// Frames of so many records, until there are so many bytes of them.
    pub(crate) fn of(
        shape: Shape,
        encoding: Encoding,
        frame_rows: usize,
        feed_bytes: usize,
    ) -> anyhow::Result<Self> {
        let mut random = StdRng::seed_from_u64(SEED);
        let (mut frames, mut bytes, mut first) = (Vec::new(), 0, 0);
        while bytes < feed_bytes {
            let batch = shape.batch(first, frame_rows, &mut random);
            let payload = match encoding {
                Encoding::Arrow => workload::ipc_stream(&batch)?,
                Encoding::Json => workload::json_lines(&batch)?,
                Encoding::Protobuf => workload::messages(&batch)?,
                Encoding::Avro => anyhow::bail!("no workload is Avro"),
            };
            bytes += payload.len();
            first += frame_rows as u64;
            frames.push(Frame { rows: u32::try_from(frame_rows)?, payload });
        }
        Ok(Self { shape, encoding, frames: frames.into() })
    }
}

/// Figures of one row.
#[derive(Debug, Clone, Serialize)]
pub struct RowFigures {
    /// Which.
    pub row: Row,
    /// Each run, in order.
    pub runs: Vec<Run>,
    /// The same kind of records at given rates, a frame each millisecond.
    pub paced: Vec<Paced>,
}

/// At a given load.
#[derive(Debug, Clone, Serialize)]
pub struct Paced {
    /// Of what the row sustains.
    pub load: f64,
    /// Bytes of a frame.
    pub frame_bytes: f64,
    /// Each run, in order,
    pub runs: Vec<Run>,
    /// and what a step of that size cost the bare machine at that pace, measured just before each.
    pub steps: Vec<Steps>,
}

/// Everything that was measured.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Figures {
    /// By row.
    pub rows: Vec<RowFigures>,
    /// Work that grows.
    pub growth: Vec<Growth>,
    /// History that grows.
    pub versions: Option<Versions>,
    /// One long run at full load.
    pub long: Option<Run>,
    /// Each edge of the gateway.
    pub edges: Vec<EdgeFigures>,
    /// What the machine can do.
    pub limits: Option<Limits>,
    /// Whether anything is aimed at.
    #[serde(skip)]
    pub with_aims: bool,
}

impl Options {
    fn wants(&self, key: char) -> bool {
        self.only.is_empty() || self.only.contains(&key)
    }

    fn edges(&self, loadtest: PathBuf) -> edges::Options {
        edges::Options {
            sluice: self.sluice.clone(),
            loadtest,
            dir: self.dir.clone(),
            run: self.run.min(EDGE_RUN_MAX),
            runs: self.runs,
            feed_bytes: FEED_BYTES,
            only: Vec::new(),
        }
    }
}

/// Runs the bench. The thread that calls must outlive it; `tell` hears how it goes.
///
/// # Errors
/// Anything that fails: there are no figures of a service that does not work.
pub async fn run(options: &Options, tell: &dyn Fn(&str)) -> anyhow::Result<Figures> {
    std::fs::create_dir_all(&options.dir).with_context(|| options.dir.display().to_string())?;
    let rows: Vec<&Row> = ROWS.iter().filter(|row| options.wants(row.key)).collect();
    let limits = (options.with_limits && !rows.is_empty()).then(|| {
        tell("the machine's limits");
        let protobuf = Feed::new(ROWS[1].shape, Encoding::Protobuf, ROWS[1].frame_rows)?;
        let feeds = [&ROWS[0].feed()?, &ROWS[1].feed()?, &protobuf];
        machine::measure(&options.dir, feeds, MEASURE)
    });
    let limits = limits.transpose()?;
    let mut figures = Figures {
        rows: Vec::new(),
        growth: Vec::new(),
        versions: None,
        long: None,
        edges: Vec::new(),
        limits,
        with_aims: options.with_limits,
    };
    for row in rows {
        let ran = run_row(options, row, tell).await;
        figures.rows.push(ran.with_context(|| format!("row ({}): {}", row.key, row.title))?);
    }
    let GrowthMax { streams, tables, versions } = options.growth;
    if options.wants(STREAMS_KEY) {
        figures.growth.push(growth::streams(options, streams, tell).await?);
    }
    if options.wants(TABLES_KEY) {
        figures.growth.push(growth::tables(options, tables, tell).await?);
    }
    if options.wants(VERSIONS_KEY) {
        figures.versions = Some(growth::versions(options, versions, tell).await.context("versions")?);
    }
    if options.wants(MEMORY_KEY) {
        tell(&format!("a pod's memory at full load, {} s", options.memory.as_secs()));
        let load = Load { lasts: options.memory, clears_files: true, ..ROWS[0].load(options) };
        let feed = ROWS[0].feed()?;
        figures.long = Some(run_once(options, &feed, &load).await.context("the long run")?);
    }
    if let Some(loadtest) = options.loadtest.clone().filter(|_| options.wants(EDGES_KEY)) {
        figures.edges = Box::pin(edges::run(&options.edges(loadtest), tell)).await?;
    }
    Ok(figures)
}

impl Row {
    fn feed(&self) -> anyhow::Result<Feed> {
        Feed::new(self.shape, self.encoding, self.frame_rows)
    }

    fn load(&self, options: &Options) -> Load {
        let Self { transport, streams, pace, .. } = *self;
        Load { transport, streams, tables: 1, pace, lasts: options.run, clears_files: false }
    }
}

async fn run_row(options: &Options, row: &Row, tell: &dyn Fn(&str)) -> anyhow::Result<RowFigures> {
    let feed = row.feed()?;
    let mut runs = Vec::new();
    for number in 1..=options.runs {
        tell(&format!("({}) {}: run {number} of {}", row.key, row.title, options.runs));
        runs.push(run_once(options, &feed, &row.load(options)).await?);
    }
    let sustained = median(&runs, |run| run.records_per_s);
    let mut paced = Vec::new();
    if options.with_limits && row.pace == Pace::Full {
        for load in LOADS {
            paced.push(run_paced(options, row, (load, sustained * load), tell).await?);
        }
    }
    Ok(RowFigures { row: *row, runs, paced })
}

async fn run_paced(
    options: &Options,
    row: &Row,
    (load, records_per_s): (f64, f64),
    tell: &dyn Fn(&str),
) -> anyhow::Result<Paced> {
    let rows = records_per_s * FRAME_INTERVAL.as_secs_f64();
    let feed = Feed::new(row.shape, row.encoding, (rows.round() as usize).max(1))?;
    let bytes: usize = feed.frames.iter().map(|frame| frame.payload.len()).sum();
    let frame_bytes = bytes as f64 / feed.frames.len() as f64;
    let (mut runs, mut steps) = (Vec::new(), Vec::new());
    for number in 1..=options.runs {
        let (key, percent) = (row.key, 100.0 * load);
        tell(&format!(
            "({key}) at {percent} % load, {records_per_s:.0} records/s: run {number} of {}",
            options.runs
        ));
        steps.push(machine::steps(&options.dir, frame_bytes as usize, FRAME_INTERVAL)?);
        let load = Load { streams: 1, pace: Pace::Each(FRAME_INTERVAL), ..row.load(options) };
        runs.push(run_once(options, &feed, &load).await?);
    }
    Ok(Paced { load, frame_bytes, runs, steps })
}

/// Of a figure of several runs; of an even number, the upper one.
pub fn median<T>(runs: &[T], figure: impl Fn(&T) -> f64) -> f64 {
    let mut values: Vec<f64> = runs.iter().map(figure).collect();
    values.sort_by(f64::total_cmp);
    let at = |place: usize| values.get(place).copied().unwrap_or(f64::NAN);
    (at(values.len().saturating_sub(1) / 2) + at(values.len() / 2)) / 2.0
}

/// The default directory for data: beside the programs, so that it is on the disk of the build.
pub fn default_dir(sluice: &Path) -> PathBuf {
    sluice.parent().unwrap_or(Path::new(".")).join("bench-data")
}
