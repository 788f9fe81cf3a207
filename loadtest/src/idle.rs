//! What an idle stream costs: many of them on one gateway and one pod.
//!
//! *Owns*: opening them, the memory of both processes before and after.
//! *Does not own*: the processes (`pool`), the connections (`producer`).

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, anyhow, ensure};
use rand::SeedableRng;
use rand::rngs::StdRng;
use sluice_client::Client;
use sluice_shared::frame::Encoding;
use sluice_shared::lifecycle::{OnPanic, TaskScope};
use tokio::sync::{Semaphore, mpsc};
use tokio::time::Instant;

use crate::load::target::framed::{Speech, WebSocket};
use crate::pool::{Options as PoolOptions, Pool};
use crate::producer::{Idle, Producer};
use crate::workload::{self, Shape};

const TABLE: &str = "idle";
/// An idle stream takes at most so much of each process.
const STREAM_BYTES_AIM: u64 = 20 << 10;
/// Connections that are made at one time.
const CONNECTING_MAX: usize = 32;
/// The memory of a process has settled when it has not grown by a hundredth for so long.
const SETTLED_AFTER: Duration = Duration::from_secs(3);
const SETTLE_TIMEOUT: Duration = Duration::from_secs(30);
const OPEN_TIMEOUT: Duration = Duration::from_secs(300);

/// What is to be measured.
pub struct Options {
    /// The program.
    pub sluice: PathBuf,
    /// Data and logs go below it.
    pub dir: PathBuf,
    /// How many streams.
    pub streams: usize,
}

/// Resident memory of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Memory {
    /// With one stream that has come and gone,
    pub before: u64,
    /// and with all of them open.
    pub after: u64,
}

/// What came out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Outcome {
    /// Streams that were open.
    pub streams: u64,
    /// The gateway's memory.
    pub gateway: Memory,
    /// The pod's.
    pub pod: Memory,
}

impl Memory {
    fn of_a_stream(self, streams: u64) -> u64 {
        self.after.saturating_sub(self.before) / streams.max(1)
    }
}

impl Outcome {
    /// Whether a stream takes as little as it should, of both.
    pub fn is_met(&self) -> bool {
        [self.gateway, self.pod].iter().all(|memory| memory.of_a_stream(self.streams) <= STREAM_BYTES_AIM)
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} idle streams, each with one record sent", self.streams)?;
        for (name, memory) in [("gateway", self.gateway), ("pod", self.pod)] {
            let (each, aim) = (memory.of_a_stream(self.streams), STREAM_BYTES_AIM);
            let word = if each <= aim { "met" } else { "MISSED" };
            let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
            let kib = |bytes: u64| bytes as f64 / f64::from(1 << 10);
            let (before, after) = (mib(memory.before), mib(memory.after));
            let (each, aim) = (kib(each), kib(aim));
            writeln!(
                f,
                "{name:<8} {before:>7.1} MiB, then {after:>7.1} MiB: {each:>5.1} KiB a stream (aim: {aim}, {word})"
            )?;
        }
        Ok(())
    }
}

/// Opens all, lets them rest, and measures. The thread that calls must outlive it.
///
/// # Errors
/// A process that does not start or drain; a stream that does not open, or ends.
pub async fn run(options: &Options, say: &(dyn Fn(&str) + Sync)) -> anyhow::Result<Outcome> {
    let env = [
        // They all come from one address, as those behind a load balancer do.
        ("SLUICE_GATEWAY__CONNECTIONS_PER_PEER_MAX", "16000"),
        ("SLUICE_GATEWAY__CONNECTS_PER_PEER_PER_S", "100000"),
    ];
    let Options { sluice, dir, streams } = options;
    let pool = Pool::start(&PoolOptions { env: &env, ..PoolOptions::new(sluice, dir, 1, 1) }).await?;
    let measured = measure(&pool, *streams, say).await;
    let outcome = measured.map_err(|error| anyhow!("{error:#}\n{}", pool.log_tails()))?;
    Ok(outcome)
}

async fn measure(pool: &Pool, streams: usize, say: &(dyn Fn(&str) + Sync)) -> anyhow::Result<Outcome> {
    let client = Client::connect(&pool.urls(0)).await?;
    let batch = Shape::ServiceEvent.batch(0, 1, &mut StdRng::seed_from_u64(1));
    let mut first = client.stream(TABLE).schema(Shape::ServiceEvent.schema()).open().await?;
    first.send_batch(batch.clone()).await?;
    first.finish().await?;
    let record = workload::json_lines(&batch)?;
    let (gateway, pod) = (pool.gateway(0)?, pool.pod("pod-1")?);
    let before = (settled(&|| gateway.resident_bytes()).await?, settled(&|| pod.resident_bytes()).await?);

    let (scope, connecting) = (TaskScope::new(OnPanic::EndTask), Arc::new(Semaphore::new(CONNECTING_MAX)));
    let (opened, mut opens) = mpsc::channel(streams.max(1));
    for _ in 0..streams {
        let (address, record) = (pool.urls(0).replace("ws://", ""), record.clone());
        let (opened, connecting) = (opened.clone(), Arc::clone(&connecting));
        scope.spawn("producer", async move {
            let open = async {
                let _permit = connecting.acquire().await?;
                let target = WebSocket(Speech::Frames);
                let producer = Producer::open(&target, (&address, None), TABLE, (Encoding::Json, 1)).await?;
                producer.send_one(record).await
            };
            // Whoever waits has gone only when the test has failed already.
            let _ = opened.send(open.await).await;
        });
    }
    drop(opened);
    let mut idle: Vec<Idle<WebSocket>> = Vec::with_capacity(streams);
    while let Some(open) = tokio::time::timeout(OPEN_TIMEOUT, opens.recv()).await.context("opening")? {
        idle.push(open.with_context(|| format!("stream {}", idle.len() + 1))?);
        if idle.len().is_multiple_of(1000) {
            say(&format!("{} streams are open", idle.len()));
        }
    }
    ensure!(idle.len() == streams, "{} of {streams} streams have opened", idle.len());
    let after = (settled(&|| gateway.resident_bytes()).await?, settled(&|| pod.resident_bytes()).await?);
    let (_, admin) = pool.admins().next().context("no gateway runs")?;
    let total = admin.get("/v1/streams?table=idle").await?["total"].as_u64();
    ensure!(total == Some(streams as u64), "the gateway has {total:?} streams open, not {streams}");
    drop(idle);
    Ok(Outcome {
        streams: streams as u64,
        gateway: Memory { before: before.0, after: after.0 },
        pod: Memory { before: before.1, after: after.1 },
    })
}

/// What it is once it grows no more.
async fn settled(read: &(dyn Fn() -> anyhow::Result<u64> + Sync)) -> anyhow::Result<u64> {
    let (asked, mut held, mut since) = (Instant::now(), read()?, Instant::now());
    while since.elapsed() < SETTLED_AFTER && asked.elapsed() < SETTLE_TIMEOUT {
        tokio::time::sleep(Duration::from_millis(100)).await;
        let now = read()?;
        if now.abs_diff(held) > held / 100 {
            (held, since) = (now, Instant::now());
        }
    }
    read()
}
