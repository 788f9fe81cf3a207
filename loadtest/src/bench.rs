//! The bench: three kinds of load on a gateway and a pod in processes of their own, and each edge of the gateway.
//!
//! *Owns*: the rows, how each is run, what is measured.
//! *Does not own*: sending (`producer`), edges one by one (`edges`), the machine's limits (`machine`), aims and how
//! figures look (`report`).

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, ensure};
use hdrhistogram::Histogram;
use rand::SeedableRng;
use rand::rngs::StdRng;
use serde::Serialize;
use sluice_client::Client;
use sluice_gateway::make_self_signed;
use sluice_shared::frame::Encoding;
use sluice_shared::lifecycle::{OnPanic, TaskScope};
use tokio::sync::{Semaphore, mpsc, watch};

use crate::cluster::{Cluster, cpu_of};
use crate::edges::{self, EdgeFigures, Transport};
use crate::load::messages::Message;
use crate::load::target::Target;
use crate::load::target::framed::{Quic, Speech, WebSocket};
use crate::machine::{self, Limits, Steps};
use crate::producer::{Frame, Latencies, Pace, Producer, Sent, SharedLatencies};
use crate::table::count_rows;
use crate::workload::{self, Shape};

const TABLE: &str = "bench";
/// Payload that is made beforehand and sent over and over: more than any cache or compression window holds.
pub const FEED_BYTES: usize = 48 << 20;
const FEED_FRAMES_MAX: usize = 2000;
/// The load at which latency is measured, of what the row sustains.
const LIGHT_LOAD: f64 = 0.1;
/// At a given rate one frame goes out at each of these.
const FRAME_INTERVAL: Duration = Duration::from_millis(1);
/// Connections that are being made at the same time: listen queues are short.
const CONNECTING_MAX: usize = 32;
/// Which all streams of a run share, where they can.
const QUIC_CONNECTIONS: usize = 10;
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
    /// Runs of each row; the median counts.
    pub runs: usize,
    /// Whether the machine and the latency at light load are measured too.
    pub with_limits: bool,
    /// Keys of the rows to run; empty for all.
    pub only: Vec<char>,
    /// The program that has the bare receivers beside which edges are measured; None: edges are left out.
    pub loadtest: Option<PathBuf>,
}

/// What stands for all edges among the keys of rows.
pub const EDGES_KEY: char = 'e';

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
    /// The rate that is aimed at, records/s.
    #[serde(skip)]
    aimed_rate: Option<f64>,
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
    aimed_rate: None,
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
        // 100 MB/s of them.
        aimed_rate: Some(94_250.0),
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
        aimed_rate: Some(100_000.0),
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
        while bytes < feed_bytes && frames.len() < FEED_FRAMES_MAX {
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

/// Figures of one run.
#[derive(Debug, Clone, Serialize)]
pub struct Run {
    /// Records, all committed and found in the table.
    pub records: u64,
    /// From the first send until the last commit was told.
    pub seconds: f64,
    /// Records by that time.
    pub records_per_s: f64,
    /// Payload by that time, MB/s.
    pub mb_per_s: f64,
    /// Records by the time from the first send until the last ack.
    pub durable_records_per_s: f64,
    /// Payload by that time, MB/s.
    pub durable_mb_per_s: f64,
    /// From sending a frame to its ack.
    pub ack: Quantiles,
    /// From sending a frame to its commit.
    pub committed: Quantiles,
    /// CPU time of each process per GB of payload.
    pub cpu: Cpu,
}

/// In milliseconds.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Quantiles {
    /// Median.
    pub p50_ms: f64,
    /// 99 of 100 were faster.
    pub p99_ms: f64,
}

/// Seconds per GB of payload.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Cpu {
    /// The gateway's.
    pub gateway_s_per_gb: f64,
    /// The pod's.
    pub pod_s_per_gb: f64,
    /// The bench's own.
    pub producer_s_per_gb: f64,
}

/// Figures of one row.
#[derive(Debug, Clone, Serialize)]
pub struct RowFigures {
    /// Which.
    pub row: Row,
    /// Each run, in order.
    pub runs: Vec<Run>,
    /// The run with the median rate.
    pub median: Run,
    /// The same kind of records at given rates, a frame each millisecond.
    pub paced: Vec<Paced>,
}

/// At a given rate.
#[derive(Debug, Clone, Serialize)]
pub struct Paced {
    /// At which, for people.
    pub rate: &'static str,
    /// Whether it is a light load: the one at which acks are to be as fast as the disk.
    pub is_light: bool,
    /// The run.
    pub run: Run,
    /// Bytes of a frame.
    pub frame_bytes: f64,
    /// What a step of that size costs the bare machine at that pace, measured just before.
    pub steps: Steps,
}

/// Everything that was measured.
#[derive(Debug, Clone, Serialize)]
pub struct Figures {
    /// By row.
    pub rows: Vec<RowFigures>,
    /// Each edge of the gateway.
    pub edges: Vec<EdgeFigures>,
    /// What the machine can do.
    pub limits: Option<Limits>,
    /// Whether anything is aimed at.
    #[serde(skip)]
    pub with_aims: bool,
}

/// Runs the bench. The thread that calls must outlive it; `tell` hears how it goes.
///
/// # Errors
/// Anything that fails: there are no figures of a service that does not work.
pub async fn run(options: &Options, tell: &dyn Fn(&str)) -> anyhow::Result<Figures> {
    std::fs::create_dir_all(&options.dir).with_context(|| options.dir.display().to_string())?;
    let edges_alone = options.only == [EDGES_KEY];
    let limits = (options.with_limits && !edges_alone).then(|| {
        tell("the machine's limits");
        let feed = |row: &Row| Feed::new(row.shape, row.encoding, row.frame_rows);
        let protobuf = Feed::new(ROWS[1].shape, Encoding::Protobuf, ROWS[1].frame_rows)?;
        let feeds = [&feed(&ROWS[0])?, &feed(&ROWS[1])?, &protobuf];
        machine::measure(&options.dir, feeds, MEASURE)
    });
    let limits = limits.transpose()?;
    let mut rows = Vec::new();
    for row in ROWS.iter().filter(|row| options.only.is_empty() || options.only.contains(&row.key)) {
        let figures = run_row(options, row, tell).await;
        rows.push(figures.with_context(|| format!("row ({}): {}", row.key, row.title))?);
    }
    let with_edges = options.only.is_empty() || options.only.contains(&EDGES_KEY);
    let edges = match options.loadtest.clone().filter(|_| with_edges) {
        Some(loadtest) => Box::pin(edges::run(&edge_options(options, loadtest), tell)).await?,
        None => Vec::new(),
    };
    Ok(Figures { rows, edges, limits, with_aims: options.with_limits })
}

fn edge_options(options: &Options, loadtest: PathBuf) -> edges::Options {
    edges::Options {
        sluice: options.sluice.clone(),
        loadtest,
        dir: options.dir.clone(),
        run: options.run.min(EDGE_RUN_MAX),
        runs: options.runs,
        feed_bytes: FEED_BYTES,
        only: Vec::new(),
    }
}

async fn run_row(options: &Options, row: &Row, tell: &dyn Fn(&str)) -> anyhow::Result<RowFigures> {
    let feed = Feed::new(row.shape, row.encoding, row.frame_rows)?;
    let mut runs = Vec::new();
    for number in 1..=options.runs.max(1) {
        tell(&format!("({}) {}: run {number} of {}", row.key, row.title, options.runs.max(1)));
        let load = Load { transport: row.transport, streams: row.streams, pace: row.pace, run: options.run };
        runs.push(run_once(options, &feed, &load).await?);
    }
    let mut by_rate = runs.clone();
    by_rate.sort_by(|one, other| one.records_per_s.total_cmp(&other.records_per_s));
    let median = by_rate.swap_remove(by_rate.len() / 2);
    let mut paced = Vec::new();
    let paces =
        [("10 % load", true, Some(median.records_per_s * LIGHT_LOAD)), ("aimed rate", false, row.aimed_rate)];
    for (rate, is_light, records_per_s) in paces {
        let is_wanted = options.with_limits && row.pace == Pace::Full;
        if let Some(records_per_s) = records_per_s.filter(|_| is_wanted) {
            tell(&format!("({}) at {records_per_s:.0} records/s: {rate}", row.key));
            paced.push(run_paced(options, row, records_per_s, (rate, is_light)).await?);
        }
    }
    Ok(RowFigures { row: *row, runs, median, paced })
}

async fn run_paced(
    options: &Options,
    row: &Row,
    records_per_s: f64,
    (rate, is_light): (&'static str, bool),
) -> anyhow::Result<Paced> {
    let rows = records_per_s * FRAME_INTERVAL.as_secs_f64();
    let feed = Feed::new(row.shape, row.encoding, (rows.round() as usize).max(1))?;
    let bytes: usize = feed.frames.iter().map(|frame| frame.payload.len()).sum();
    let frame_bytes = bytes as f64 / feed.frames.len() as f64;
    let steps = machine::steps(&options.dir, frame_bytes as usize, FRAME_INTERVAL)?;
    let pace = Pace::Each(FRAME_INTERVAL);
    let load = Load { transport: row.transport, streams: 1, pace, run: options.run };
    Ok(Paced { rate, is_light, run: run_once(options, &feed, &load).await?, frame_bytes, steps })
}

struct Load {
    transport: Transport,
    streams: usize,
    pace: Pace,
    run: Duration,
}

/// A fresh service each time: nothing is carried over.
async fn run_once(options: &Options, feed: &Feed, load: &Load) -> anyhow::Result<Run> {
    let dir = tempfile::tempdir_in(&options.dir)?;
    let (cert, key) = make_self_signed(dir.path(), "127.0.0.1")?;
    let path = |file: &Path| file.display().to_string();
    let env = [("SLUICE_GATEWAY__TLS_CERT", &*path(&cert)), ("SLUICE_GATEWAY__TLS_KEY", &*path(&key))];
    let cluster = Cluster::start(&options.sluice, dir.path(), &env)?;
    let measured = match load.transport {
        Transport::Quic => {
            let target = Quic::new(load.streams.div_ceil(QUIC_CONNECTIONS))?;
            measure(&cluster, (target, cluster.quic_address()?, &cert), feed, load).await
        }
        _ => {
            let address = cluster.url().trim_start_matches("ws://");
            measure(&cluster, (WebSocket(Speech::Frames), address, &cert), feed, load).await
        }
    };
    let measured = measured.map_err(|error| anyhow!("{error:#}\n{}", cluster.log_tails()))?;
    let table_dir = cluster.table_dir(TABLE);
    cluster.drain()?;
    let rows = count_rows(&table_dir)?;
    let records = measured.records;
    ensure!(rows == records, "{records} records were sent and committed, the table has {rows} rows");
    Ok(measured)
}

struct CpuTimes([Duration; 3]);

impl CpuTimes {
    fn now(cluster: &Cluster) -> anyhow::Result<Self> {
        Ok(Self([cluster.gateway()?.cpu()?, cluster.pod()?.cpu()?, cpu_of("self")?]))
    }

    fn since(&self, before: &Self, bytes: u64) -> Cpu {
        let per_gb = |part: usize| {
            self.0[part].saturating_sub(before.0[part]).as_secs_f64() / (bytes.max(1) as f64 / 1e9)
        };
        Cpu { gateway_s_per_gb: per_gb(0), pod_s_per_gb: per_gb(1), producer_s_per_gb: per_gb(2) }
    }
}

async fn measure<T: Target>(
    cluster: &Cluster,
    (target, address, certificate): (T, &str, &Path),
    feed: &Feed,
    load: &Load,
) -> anyhow::Result<Run> {
    let client = Client::connect(cluster.url()).await?;
    client.stream(TABLE).schema(feed.shape.schema()).open().await?.finish().await?;
    let latencies: SharedLatencies = Arc::new(Mutex::new(Latencies::new()?));
    let (go, started) = watch::channel(None::<Instant>);
    let (report, mut reports) = mpsc::channel(2 * load.streams);
    let connecting = Arc::new(Semaphore::new(CONNECTING_MAX));
    let scope = TaskScope::new(OnPanic::EndTask);
    let target = Arc::new(target);
    for number in 0..load.streams {
        let stream = StreamTask {
            target: Arc::clone(&target),
            address: address.to_owned(),
            certificate: certificate.to_owned(),
            feed: feed.clone(),
            number,
            pace: load.pace,
            connecting: Arc::clone(&connecting),
            latencies: Arc::clone(&latencies),
            started: started.clone(),
        };
        scope.spawn("bench stream", stream.run(report.clone()));
    }
    drop(report);
    for _ in 0..load.streams {
        next_report(&mut reports).await.context("opening")?;
    }
    let (before, began) = (CpuTimes::now(cluster)?, Instant::now());
    go.send(Some(began + load.run)).context("all streams have gone")?;
    let (mut records, mut bytes, mut durable_at) = (0, 0, began);
    for _ in 0..load.streams {
        let sent = next_report(&mut reports).await?.context("a stream opened twice")?;
        records += sent.records;
        bytes += sent.bytes;
        durable_at = durable_at.max(sent.durable_at);
    }
    let durable_seconds = durable_at.duration_since(began).as_secs_f64();
    let seconds = began.elapsed().as_secs_f64();
    let cpu = CpuTimes::now(cluster)?.since(&before, bytes);
    let latencies = latencies.lock().unwrap_or_else(PoisonError::into_inner);
    Ok(Run {
        records,
        seconds,
        records_per_s: records as f64 / seconds,
        mb_per_s: bytes as f64 / 1e6 / seconds,
        durable_records_per_s: records as f64 / durable_seconds,
        durable_mb_per_s: bytes as f64 / 1e6 / durable_seconds,
        ack: quantiles(&latencies.ack),
        committed: quantiles(&latencies.committed),
        cpu,
    })
}

/// None: the stream is open.
type Report = anyhow::Result<Option<Sent>>;

async fn next_report(reports: &mut mpsc::Receiver<Report>) -> Report {
    reports.recv().await.context("a stream's task panicked")?
}

pub(crate) fn quantiles(histogram: &Histogram<u64>) -> Quantiles {
    let ms = |quantile| histogram.value_at_quantile(quantile) as f64 / 1e3;
    Quantiles { p50_ms: ms(0.5), p99_ms: ms(0.99) }
}

/// One stream of a run: reports once when it is open, once when it is done.
struct StreamTask<T> {
    target: Arc<T>,
    address: String,
    certificate: PathBuf,
    feed: Feed,
    number: usize,
    pace: Pace,
    connecting: Arc<Semaphore>,
    latencies: SharedLatencies,
    started: watch::Receiver<Option<Instant>>,
}

impl<T: Target> StreamTask<T> {
    async fn run(mut self, report: mpsc::Sender<Report>) {
        let outcome = match self.open().await {
            Ok(producer) => {
                // Whoever waits has gone only when the run has failed already.
                let _ = report.send(Ok(None)).await;
                self.send(producer).await.map(Some)
            }
            Err(error) => Err(error),
        };
        let _ = report.send(outcome).await;
    }

    async fn open(&self) -> anyhow::Result<Producer<T>> {
        let _permit = self.connecting.acquire().await?;
        let at = (&*self.address, Some(&*self.certificate));
        Producer::open(&*self.target, at, TABLE, self.feed.encoding).await
    }

    async fn send(&mut self, producer: Producer<T>) -> anyhow::Result<Sent> {
        let deadline = *self.started.wait_for(Option::is_some).await?;
        let deadline = deadline.context("just waited for it")?;
        // Each stream begins at another place, so that they do not all send the same.
        let (end, begin) = self.feed.frames.split_at(self.number % self.feed.frames.len());
        let messages: Vec<Message> =
            begin.iter().chain(end).take(frames_kept(self.pace)).map(Frame::message).collect();
        producer.run(&messages, self.pace, deadline, &self.latencies).await
    }
}

/// A thousand streams need no list of all frames each.
fn frames_kept(pace: Pace) -> usize {
    match pace {
        Pace::Full | Pace::Each(_) => FEED_FRAMES_MAX,
        Pace::UnderWay(_) => 100,
    }
}

/// The default directory for data: beside the programs, so that it is on the disk of the build.
pub fn default_dir(sluice: &Path) -> PathBuf {
    sluice.parent().unwrap_or(Path::new(".")).join("bench-data")
}
