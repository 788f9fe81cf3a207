//! How long a pod takes to come back to a log that is full of what is in no table yet.
//!
//! A pod that never flushes its tables is fed until its log has so much, killed (`kill -9`), and started again: once as it
//! was, so that nothing but the log is in its way, and once as usual, so that it commits at the same time.
//!
//! *Owns*: the scenario and its figures.
//! *Does not own*: the processes (`cluster`), what is sent (`workload`).

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, ensure};
use rand::SeedableRng;
use rand::rngs::StdRng;
use sluice_client::Client;
use tokio::time::{Instant, sleep};

use crate::cluster::Cluster;
use crate::table;
use crate::workload::Shape;

const TABLE: &str = "recovery";
/// Records of one send.
const SEND_ROWS: usize = 500;
/// Sends that differ: more than a file's dictionaries hold.
const SENDS: u64 = 64;
/// A pod with 1 GiB of log is to be active again within this time.
pub const AIM: Duration = Duration::from_secs(10);
/// How long a table may take to have everything.
const COMMIT_TIMEOUT: Duration = Duration::from_secs(600);
const LOOK_INTERVAL: Duration = Duration::from_millis(100);

/// What is to be measured.
pub struct Options {
    /// The program.
    pub sluice: PathBuf,
    /// Data and logs go below it.
    pub dir: PathBuf,
    /// Of the log.
    pub bytes: u64,
}

/// What came out.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Outcome {
    /// Bytes of the log's segments.
    pub log_bytes: u64,
    /// Records in it.
    pub records: u64,
    /// Reading the same files from start to end, just before.
    pub read: Duration,
    /// From the start of the process to its taking streams, while nothing is committed,
    pub active_alone: Duration,
    /// and while it commits.
    pub active: Duration,
    /// From the start of the process to the first ack of a new stream.
    pub acked: Duration,
    /// From the start of the process until all is in the table.
    pub committed: Duration,
}

impl Outcome {
    /// Whether the pod was active in time, for as much log as it had.
    pub fn is_met(&self) -> bool {
        let gib = (self.log_bytes as f64 / f64::from(1 << 30)).max(1.0);
        self.active.as_secs_f64() <= AIM.as_secs_f64() * gib
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = self.log_bytes >> 20;
        writeln!(f, "{mib} MiB of log, {} records, none of them in the table", self.records)?;
        let rows = [
            ("the log's files are read from start to end", self.read),
            ("the pod is active, committing nothing", self.active_alone),
            ("the pod is active", self.active),
            ("a new stream has its first ack", self.acked),
            ("all is in the table", self.committed),
        ];
        for (what, took) in rows {
            writeln!(f, "{:>8.2} s  {what}", took.as_secs_f64())?;
        }
        write!(f, "aim: active within {} s for 1 GiB", AIM.as_secs())
    }
}

/// Measures. The thread that calls must outlive it.
///
/// # Errors
/// A process that does not start or stay alive, a stream that fails, records that do not arrive.
pub async fn run(options: &Options) -> anyhow::Result<Outcome> {
    let size = (options.bytes * 2).max(1 << 30).to_string();
    let env = [
        ("SLUICE_POD__FLUSH_INTERVAL_MS", "1000000000"),
        ("SLUICE_POD__TARGET_FILE_BYTES", "1024GiB"),
        ("SLUICE_POD__WAL_BYTES_MAX", size.as_str()),
    ];
    let mut cluster = Cluster::start(&options.sluice, &options.dir, &env)?;
    let wal_dir = options.dir.join("data/pods/pod-1/wal");
    let records = fill(&cluster, &wal_dir, options.bytes).await?;
    cluster.kill_pod()?;
    let (log_bytes, read) = read_all(&wal_dir)?;

    let begun = Instant::now();
    cluster.start_pod()?;
    let active_alone = begun.elapsed();
    cluster.kill_pod()?;
    cluster.set_env("SLUICE_POD__FLUSH_INTERVAL_MS", "1000");
    cluster.set_env("SLUICE_POD__TARGET_FILE_BYTES", "128MiB");
    let begun = Instant::now();
    cluster.start_pod()?;
    let active = begun.elapsed();
    let client = Client::connect(cluster.url()).await?;
    let mut stream = client.stream(TABLE).schema(Shape::Blob.schema()).open().await?;
    stream.send_batch(Shape::Blob.batch(0, 1, &mut StdRng::seed_from_u64(0))).await?;
    stream.durable().await?;
    let acked = begun.elapsed();
    let table_dir = cluster.table_dir(TABLE);
    while table::count_rows(&table_dir)? < records + 1 {
        ensure!(begun.elapsed() < COMMIT_TIMEOUT, "not all is in the table\n{}", cluster.log_tails());
        sleep(LOOK_INTERVAL).await;
    }
    let committed = begun.elapsed();
    stream.finish().await?;
    cluster.drain()?;
    let rows = table::count_rows(&table_dir)?;
    ensure!(rows == records + 1, "{rows} rows, {records} and one more were sent");
    Ok(Outcome { log_bytes, records, read, active_alone, active, acked, committed })
}

/// Sends until the log has so many bytes, all of them durable. Answers how many records that were.
async fn fill(cluster: &Cluster, wal_dir: &Path, bytes: u64) -> anyhow::Result<u64> {
    let client = Client::connect(cluster.url()).await?;
    let mut stream = client.stream(TABLE).schema(Shape::Blob.schema()).open().await?;
    let mut random = StdRng::seed_from_u64(1);
    let batches: Vec<_> = (0..SENDS).map(|_| Shape::Blob.batch(0, SEND_ROWS, &mut random)).collect();
    let mut records = 0;
    for (sends, batch) in (1..).zip(batches.iter().cycle()) {
        stream.send_batch(batch.clone()).await?;
        records += SEND_ROWS as u64;
        if sends % SENDS == 0 {
            stream.durable().await?;
            if log_bytes(wal_dir)? >= bytes {
                return Ok(records);
            }
        }
    }
    anyhow::bail!("an endless cycle has ended")
}

/// The segments, but for the one that is made ahead.
fn segments(wal_dir: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let context = || wal_dir.display().to_string();
    let mut segments = Vec::new();
    for entry in std::fs::read_dir(wal_dir).with_context(context)? {
        let path = entry.with_context(context)?.path();
        let stem = path.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
        if path.extension().is_some_and(|extension| extension == "wal") && stem.parse::<u64>().is_ok() {
            segments.push(path);
        }
    }
    segments.sort();
    segments.pop();
    Ok(segments)
}

fn log_bytes(wal_dir: &Path) -> anyhow::Result<u64> {
    segments(wal_dir)?.iter().map(|path| Ok(path.metadata()?.len())).sum()
}

/// Reads the log as a start does, and nothing else.
fn read_all(wal_dir: &Path) -> anyhow::Result<(u64, Duration)> {
    let begun = Instant::now();
    let mut bytes = 0;
    for path in segments(wal_dir)? {
        bytes += std::fs::read(&path).with_context(|| path.display().to_string())?.len() as u64;
    }
    Ok((bytes, begun.elapsed()))
}
