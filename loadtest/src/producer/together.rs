//! Many streams that begin at one moment and send until a deadline: what a run of a bench is.
//!
//! *Owns*: opening them all first, the moment when they begin, the sum of what they did.
//! *Does not own*: one stream (`producer`), processes and their CPU time, what the figures are for.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Context;
use sluice_shared::frame::Encoding;
use sluice_shared::lifecycle::{OnPanic, TaskScope};
use tokio::sync::{Semaphore, mpsc, watch};

use super::{Latencies, Pace, Producer, Sent, SharedLatencies};
use crate::load::messages::Message;
use crate::load::target::Target;

/// Connections that are being made at the same time: listen queues are short.
const CONNECTING_MAX: usize = 32;

/// What they are to do.
pub(crate) struct Plan<'a> {
    /// `host:port`.
    pub address: &'a str,
    /// Trusted, where the transport is encrypted.
    pub certificate: Option<&'a Path>,
    /// Streams take them in turn.
    pub tables: Vec<String>,
    pub streams: usize,
    pub encoding: Encoding,
    /// Of each message, where the transport asks.
    pub rows: u32,
    pub messages: Arc<[Message]>,
    /// Each stream begins so many messages after the one before, so that they do not all send the same.
    pub step: usize,
    pub pace: Pace,
}

/// Streams that are all open, and have sent nothing.
pub(crate) struct Together {
    go: watch::Sender<Option<Instant>>,
    reports: mpsc::Receiver<Report>,
    streams: usize,
    latencies: SharedLatencies,
    /// They end with it.
    _scope: TaskScope,
}

/// What all streams did.
pub(crate) struct Sum {
    /// When they began to send.
    pub began: Instant,
    /// All of them committed.
    pub records: u64,
    /// Their payload.
    pub bytes: u64,
    /// From the beginning until the last of them was known to be durable.
    pub durable_after: Duration,
    pub latencies: Latencies,
}

impl Together {
    /// Opens all streams.
    ///
    /// # Errors
    /// One that cannot be opened.
    pub(crate) async fn open<T: Target>(target: T, plan: &Plan<'_>) -> anyhow::Result<Self> {
        let latencies: SharedLatencies = Arc::new(Mutex::new(Latencies::new()?));
        let (go, started) = watch::channel(None::<Instant>);
        let (report, mut reports) = mpsc::channel(2 * plan.streams);
        let (target, connecting) = (Arc::new(target), Arc::new(Semaphore::new(CONNECTING_MAX)));
        let scope = TaskScope::new(OnPanic::EndTask);
        for number in 0..plan.streams {
            let stream = StreamTask {
                target: Arc::clone(&target),
                address: plan.address.to_owned(),
                certificate: plan.certificate.map(Path::to_owned),
                table: plan.tables[number % plan.tables.len()].clone(),
                encoding: plan.encoding,
                rows: plan.rows,
                messages: Arc::clone(&plan.messages),
                first: number * plan.step,
                pace: plan.pace,
                connecting: Arc::clone(&connecting),
                latencies: Arc::clone(&latencies),
                started: started.clone(),
            };
            scope.spawn("bench stream", stream.run(report.clone()));
        }
        drop(report);
        for _ in 0..plan.streams {
            let is_open = next_report(&mut reports).await.context("opening")?.is_none();
            anyhow::ensure!(is_open, "a stream is done before all are open");
        }
        Ok(Self { go, reports, streams: plan.streams, latencies, _scope: scope })
    }

    /// Lets them all send for so long, and waits until all is committed.
    ///
    /// # Errors
    /// A lost connection, a rejected record, an answer that makes no sense.
    pub(crate) async fn send(mut self, lasts: Duration) -> anyhow::Result<Sum> {
        let began = Instant::now();
        self.go.send(Some(began + lasts)).context("all streams have gone")?;
        let (mut records, mut bytes, mut durable_at) = (0, 0, began);
        for _ in 0..self.streams {
            let sent = next_report(&mut self.reports).await?.context("a stream opened twice")?;
            records += sent.records;
            bytes += sent.bytes;
            durable_at = durable_at.max(sent.durable_at);
        }
        let latencies = self.latencies.lock().unwrap_or_else(PoisonError::into_inner).clone();
        Ok(Sum { began, records, bytes, durable_after: durable_at.duration_since(began), latencies })
    }
}

/// None: the stream is open.
type Report = anyhow::Result<Option<Sent>>;

async fn next_report(reports: &mut mpsc::Receiver<Report>) -> Report {
    reports.recv().await.context("a stream's task panicked")?
}

/// One stream: reports once when it is open, once when it is done.
struct StreamTask<T> {
    target: Arc<T>,
    address: String,
    certificate: Option<PathBuf>,
    table: String,
    encoding: Encoding,
    rows: u32,
    messages: Arc<[Message]>,
    first: usize,
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
        let at = (&*self.address, self.certificate.as_deref());
        Producer::open(&*self.target, at, &self.table, (self.encoding, self.rows)).await
    }

    async fn send(&mut self, producer: Producer<T>) -> anyhow::Result<Sent> {
        let deadline = *self.started.wait_for(Option::is_some).await?;
        let deadline = deadline.context("just waited for it")?;
        producer.run((&self.messages, self.first), self.pace, deadline, &self.latencies).await
    }
}
