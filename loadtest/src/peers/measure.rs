//! One run of a work on a service that is there: the same for all of them.
//!
//! *Owns*: the streams of a run, wall time from the first send to the last ack, CPU time.
//! *Does not own*: when a batch goes out and when its ack came (`producer`), starting services (`sluice`, `nats_server`).

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use bytes::Bytes;
use sluice_shared::frame::Encoding;
use sluice_shared::lifecycle::{OnPanic, TaskScope};
use tokio::sync::{Semaphore, mpsc, watch};

use super::calls::{Calls, Peer};
use super::{Run, Work};
use crate::bench::FEED_BYTES;
use crate::bench::run::quantiles;
use crate::cluster::cpu_of;
use crate::edges::{Edge, Transport};
use crate::load::messages::Load;
use crate::load::target::{Ask, Target};
use crate::producer::{Latencies, Pace, Producer, Sent, SharedLatencies};
use crate::workload::Shape;

/// The table, where there are tables.
pub(super) const TABLE: &str = "bench";
/// What all records are like.
pub(super) const SHAPE: Shape = Shape::Blob;
/// Connections that are being made at the same time: listen queues are short.
const CONNECTING_MAX: usize = 32;
/// Each stream begins so many batches after the one before, so that they do not all send the same.
const STREAM_STEP: usize = 400;

/// The batches of a work, as a transport takes them.
pub(super) fn batches(transport: Transport, encoding: Encoding, work: &Work) -> anyhow::Result<Load> {
    Load::new(&Edge { name: "peers", transport, encoding, rows: work.rows }, SHAPE, FEED_BYTES)
}

/// A service that is there.
pub(super) struct Site<'a> {
    /// `host:port`.
    pub(super) address: &'a str,
    /// Trusted, where the transport is encrypted.
    pub(super) certificate: Option<&'a Path>,
    /// Its processes; empty where they are not known.
    pub(super) pids: &'a [u32],
}

/// Runs a work on a service that is none of ours: its records are those that Sluice gets, one by one as JSON.
///
/// # Errors
/// A connection that is lost, a batch that is refused.
pub async fn measure_peer(
    peer: impl Peer,
    (address, pids): (&str, &[u32]),
    work: &Work,
    run: Duration,
) -> anyhow::Result<Run> {
    // Of all that is made for an edge this is what has its records one by one.
    let load = batches(Transport::Zerobus, Encoding::Json, work)?;
    let site = Site { address, certificate: None, pids };
    Box::pin(measure(Calls::new(peer), &site, (work, &load), run)).await
}

/// Runs a work.
pub(super) async fn measure<T: Target>(
    target: T,
    site: &Site<'_>,
    (work, load): (&Work, &Load),
    run: Duration,
) -> anyhow::Result<Run> {
    let latencies: SharedLatencies = Arc::new(Mutex::new(Latencies::new()?));
    let (go, started) = watch::channel(None::<Instant>);
    let (report, mut reports) = mpsc::channel(2 * work.producers);
    let (target, connecting) = (Arc::new(target), Arc::new(Semaphore::new(CONNECTING_MAX)));
    let scope = TaskScope::new(OnPanic::EndTask);
    for number in 0..work.producers {
        let stream = StreamTask {
            target: Arc::clone(&target),
            address: site.address.to_owned(),
            certificate: site.certificate.map(Path::to_owned),
            load: load.clone(),
            number,
            pace: Pace::UnderWay(work.window),
            connecting: Arc::clone(&connecting),
            latencies: Arc::clone(&latencies),
            started: started.clone(),
        };
        scope.spawn("peers stream", stream.run(report.clone()));
    }
    drop(report);
    for _ in 0..work.producers {
        ensure!(
            next_report(&mut reports).await.context("opening")?.is_none(),
            "a stream is done before all are open"
        );
    }
    let (server_before, client_before, began) = (cpu_of_all(site.pids)?, cpu_of("self")?, Instant::now());
    go.send(Some(began + run)).context("all streams have gone")?;
    let (mut records, mut bytes, mut acked_at) = (0, 0, began);
    for _ in 0..work.producers {
        let sent = next_report(&mut reports).await?.context("a stream opened twice")?;
        records += sent.records;
        bytes += sent.bytes;
        acked_at = acked_at.max(sent.durable_at);
    }
    let per_gb = |cpu: Duration| cpu.as_secs_f64() / (bytes.max(1) as f64 / 1e9);
    let server = cpu_of_all(site.pids)?.saturating_sub(server_before);
    let client = cpu_of("self")?.saturating_sub(client_before);
    let seconds = acked_at.duration_since(began).as_secs_f64();
    ensure!(records > 0 && seconds > 0.0, "nothing was acked");
    let latencies = latencies.lock().unwrap_or_else(PoisonError::into_inner);
    let acked = latencies.ack.len() * work.rows as u64;
    ensure!(acked == records, "{records} records were sent, {acked} were acked");
    Ok(Run {
        records,
        seconds,
        records_per_s: records as f64 / seconds,
        mb_per_s: bytes as f64 / 1e6 / seconds,
        ack: quantiles(&latencies.ack),
        server_s_per_gb: (!site.pids.is_empty()).then(|| per_gb(server)),
        client_s_per_gb: per_gb(client),
    })
}

fn cpu_of_all(pids: &[u32]) -> anyhow::Result<Duration> {
    let mut all = Duration::ZERO;
    for pid in pids {
        all += cpu_of(&pid.to_string())?;
    }
    Ok(all)
}

/// None: the stream is open.
type Report = anyhow::Result<Option<Sent>>;

async fn next_report(reports: &mut mpsc::Receiver<Report>) -> Report {
    reports.recv().await.context("a stream's task panicked")?
}

/// One stream of a run: reports once when it is open, once when it is done.
struct StreamTask<T> {
    target: Arc<T>,
    address: String,
    certificate: Option<PathBuf>,
    load: Load,
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
        let ask = Ask {
            address: &self.address,
            certificate: self.certificate.as_deref(),
            table: TABLE,
            name: None,
            resume_at: None,
            encoding: self.load.encoding,
            schema: &Bytes::new(),
            rows: self.load.rows,
            until_committed: true,
        };
        let opened = self.target.open(&ask).await.with_context(|| self.address.clone())?;
        Ok(Producer { opened })
    }

    async fn send(&mut self, producer: Producer<T>) -> anyhow::Result<Sent> {
        let deadline = *self.started.wait_for(Option::is_some).await?;
        let deadline = deadline.context("just waited for it")?;
        let batches = (&*self.load.messages, self.number * STREAM_STEP);
        producer.run(batches, self.pace, deadline, &self.latencies).await
    }
}
