//! One run of the bench: a fresh service, a load on it until a deadline, and what came of it.
//!
//! *Owns*: the processes of a run, its tables, its figures.
//! *Does not own*: which loads there are (`bench`), its streams (`producer::together`).

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{anyhow, ensure};
use hdrhistogram::Histogram;
use serde::Serialize;
use sluice_client::Client;

use super::memory::Watch;
use super::{Feed, Options};
use crate::cluster::{Cluster, cpu_of};
use crate::edges::Transport;
use crate::load::target::Target;
use crate::load::target::framed::{Quic, Speech, WebSocket};
use crate::producer::together::{Plan, Sum, Together};
use crate::producer::{Frame, Pace};
use crate::table::{count_rows, count_rows_told};

/// Which all streams of a run share, where they can.
pub(crate) const QUIC_CONNECTIONS: usize = 10;
/// All streams of a run come from one address, as those behind a load balancer do.
const ONE_ADDRESS: [(&str, &str); 2] = [
    ("SLUICE_GATEWAY__CONNECTIONS_PER_PEER_MAX", "16000"),
    ("SLUICE_GATEWAY__CONNECTS_PER_PEER_PER_S", "100000"),
];

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
    /// The pod's resident memory each second, in bytes.
    pub pod_memory: Vec<u64>,
}

/// In milliseconds.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Quantiles {
    /// Median.
    pub p50_ms: f64,
    /// 99 of 100 were faster.
    pub p99_ms: f64,
}

impl Quantiles {
    /// Of one time or more.
    pub(crate) fn of(mut times: Vec<Duration>) -> Self {
        times.sort();
        let at = |place: usize| times[place].as_secs_f64() * 1e3;
        Self { p50_ms: at(times.len() / 2), p99_ms: at(times.len() * 99 / 100) }
    }
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

/// What is asked of a fresh service.
pub(crate) struct Load {
    pub transport: Transport,
    pub streams: usize,
    /// Streams take them in turn.
    pub tables: usize,
    pub pace: Pace,
    pub lasts: Duration,
    /// Data files go a while after they were written, so that a long run does not fill the disk.
    pub clears_files: bool,
}

/// A fresh service each time: nothing is carried over.
pub(crate) async fn run_once(options: &Options, feed: &Feed, load: &Load) -> anyhow::Result<Run> {
    run_in(tempfile::tempdir_in(&options.dir)?.path(), options, feed, load).await
}

/// The same in a directory that stays.
pub(crate) async fn run_in(dir: &Path, options: &Options, feed: &Feed, load: &Load) -> anyhow::Result<Run> {
    let (cluster, cert) = Cluster::start_with_tls(&options.sluice, dir, &ONE_ADDRESS)?;
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
    let tables: Vec<PathBuf> = (0..load.tables).map(|number| cluster.table_dir(&table(number))).collect();
    cluster.drain()?;
    let count = if load.clears_files { count_rows_told } else { count_rows };
    let rows = tables.iter().map(|table| count(table)).sum::<anyhow::Result<u64>>()?;
    let records = measured.records;
    ensure!(rows == records, "{records} records were sent and committed, the tables have {rows} rows");
    Ok(measured)
}

fn table(number: usize) -> String {
    format!("bench_{number}")
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
    let tables: Vec<String> = (0..load.tables).map(table).collect();
    let client = Client::connect(cluster.url()).await?;
    for table in &tables {
        client.stream(table).schema(feed.shape.schema()).open().await?.finish().await?;
    }
    let dirs = tables.iter().map(|table| cluster.table_dir(table));
    let cleared = if load.clears_files { dirs.collect() } else { Vec::new() };
    let plan = Plan {
        address,
        certificate: Some(certificate),
        tables,
        streams: load.streams,
        encoding: feed.encoding,
        rows: 1,
        messages: feed.frames.iter().map(Frame::message).collect(),
        step: 1,
        pace: load.pace,
    };
    let streams = Together::open(target, &plan).await?;
    let watch = Watch::start(cluster.pod()?.pid(), cleared);
    let before = CpuTimes::now(cluster)?;
    let Sum { began, records, bytes, durable_after, latencies } = streams.send(load.lasts).await?;
    let (durable_seconds, seconds) = (durable_after.as_secs_f64(), began.elapsed().as_secs_f64());
    let cpu = CpuTimes::now(cluster)?.since(&before, bytes);
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
        pod_memory: watch.end()?,
    })
}

pub(crate) fn quantiles(histogram: &Histogram<u64>) -> Quantiles {
    let ms = |quantile| histogram.value_at_quantile(quantile) as f64 / 1e3;
    Quantiles { p50_ms: ms(0.5), p99_ms: ms(0.99) }
}
