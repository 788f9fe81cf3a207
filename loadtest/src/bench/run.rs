//! One run of the bench: a fresh service, a load on it until a deadline, and what came of it.
//!
//! *Owns*: the processes of a run, its streams, its figures.
//! *Does not own*: which loads there are (`bench`), sending (`producer`).

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, ensure};
use hdrhistogram::Histogram;
use serde::Serialize;
use sluice_client::Client;
use sluice_gateway::make_self_signed;
use sluice_shared::frame::Encoding;
use sluice_shared::lifecycle::{OnPanic, TaskScope};
use tokio::sync::{Semaphore, mpsc, watch};

use super::memory::Watch;
use super::{Feed, Options};
use crate::cluster::{Cluster, cpu_of};
use crate::edges::Transport;
use crate::load::messages::Message;
use crate::load::target::Target;
use crate::load::target::framed::{Quic, Speech, WebSocket};
use crate::producer::{Frame, Latencies, Pace, Producer, Sent, SharedLatencies};
use crate::table::{count_rows, count_rows_told};

/// Connections that are being made at the same time: listen queues are short.
const CONNECTING_MAX: usize = 32;
/// Which all streams of a run share, where they can.
const QUIC_CONNECTIONS: usize = 10;
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
    let dir = tempfile::tempdir_in(&options.dir)?;
    let (cert, key) = make_self_signed(dir.path(), "127.0.0.1")?;
    let path = |file: &Path| file.display().to_string();
    let tls = [("SLUICE_GATEWAY__TLS_CERT", &*path(&cert)), ("SLUICE_GATEWAY__TLS_KEY", &*path(&key))];
    let cluster = Cluster::start(&options.sluice, dir.path(), &[&tls[..], &ONE_ADDRESS].concat())?;
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
    let client = Client::connect(cluster.url()).await?;
    for number in 0..load.tables {
        client.stream(table(number)).schema(feed.shape.schema()).open().await?.finish().await?;
    }
    let latencies: SharedLatencies = Arc::new(Mutex::new(Latencies::new()?));
    let (go, started) = watch::channel(None::<Instant>);
    let (report, mut reports) = mpsc::channel(2 * load.streams);
    let connecting = Arc::new(Semaphore::new(CONNECTING_MAX));
    let scope = TaskScope::new(OnPanic::EndTask);
    let target = Arc::new(target);
    let messages: Arc<[Message]> = feed.frames.iter().map(Frame::message).collect();
    for number in 0..load.streams {
        let stream = StreamTask {
            target: Arc::clone(&target),
            address: address.to_owned(),
            certificate: certificate.to_owned(),
            table: table(number % load.tables),
            encoding: feed.encoding,
            messages: Arc::clone(&messages),
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
    let tables = (0..load.tables).map(|number| cluster.table_dir(&table(number)));
    let watch =
        Watch::start(cluster.pod()?.pid(), if load.clears_files { tables.collect() } else { Vec::new() });
    let (before, began) = (CpuTimes::now(cluster)?, Instant::now());
    go.send(Some(began + load.lasts)).context("all streams have gone")?;
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
        pod_memory: watch.end()?,
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
    table: String,
    encoding: Encoding,
    messages: Arc<[Message]>,
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
        Producer::open(&*self.target, at, &self.table, self.encoding).await
    }

    async fn send(&mut self, producer: Producer<T>) -> anyhow::Result<Sent> {
        let deadline = *self.started.wait_for(Option::is_some).await?;
        let deadline = deadline.context("just waited for it")?;
        // Each stream begins at another place, so that they do not all send the same.
        producer.run((&self.messages, self.number), self.pace, deadline, &self.latencies).await
    }
}
