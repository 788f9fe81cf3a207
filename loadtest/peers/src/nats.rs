//! NATS JetStream among the contenders: a server of its own for each run, a connection and a stream for each producer.
//!
//! *Owns*: what is published, and what of its acks counts.
//! *Does not own*: the server (`sluice_loadtest::peers::nats_server`), windows and clocks (`sluice_loadtest::peers`).

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{anyhow, ensure};
use async_nats::header::{NATS_BATCH_COMMIT, NATS_BATCH_COMMIT_FINAL, NATS_BATCH_ID, NATS_BATCH_SEQUENCE};
use async_nats::jetstream::context::{Context, ContextBuilder, PublishAckFuture};
use async_nats::jetstream::stream::{Config, StorageType};
use async_nats::{HeaderMap, Subject};
use bytes::Bytes;
use sluice_loadtest::peers::calls::{Acked, Peer, PeerStream};
use sluice_loadtest::peers::measure::measure_peer;
use sluice_loadtest::peers::nats_server::{NatsServer, Sync};
use sluice_loadtest::peers::{Contender, Durability, Ground, Run, Running, Work};

/// A message waits for all before it, each with a flush of its own.
const ACK_TIMEOUT: Duration = Duration::from_secs(120);
/// More than any work has under way on one connection.
const ACKS_MAX: usize = 16_384;

/// JetStream with one setting.
pub(crate) struct Nats {
    server: PathBuf,
    name: &'static str,
    sync: Sync,
    /// Whether a batch is kept as a whole, and acked once, or each message by itself.
    atomic: bool,
}

impl Nats {
    /// All settings that are compared.
    pub(crate) fn all(server: &Path) -> [Self; 3] {
        let settings = [
            ("nats-flushed", Sync::Always, false),
            ("nats-flushed-atomic", Sync::Always, true),
            ("nats-default", Sync::Default, false),
        ];
        settings.map(|(name, sync, atomic)| Self { server: server.to_owned(), name, sync, atomic })
    }

    async fn run_once(&self, Ground { dir, work, run }: Ground<'_>) -> anyhow::Result<Run> {
        let server = NatsServer::start(&self.server, dir, self.sync)?;
        let peer = JetStream { atomic: self.atomic };
        let measured = measure_peer(peer, (server.address(), &[server.pid()]), work, run).await;
        let measured = measured.map_err(|error| anyhow!("{error:#}\n{}", server.log_tail()))?;
        let kept = kept(server.address(), work).await?;
        ensure!(kept == measured.records, "{} records were acked, the streams have {kept}", measured.records);
        server.stop()?;
        Ok(measured)
    }
}

impl Contender for Nats {
    fn name(&self) -> &'static str {
        self.name
    }

    fn durability(&self) -> Durability {
        let Durability { flushed, how } = self.sync.durability();
        let acks = if self.atomic { "atomic batches, an ack each" } else { "an ack for each message" };
        Durability { flushed, how: format!("{how}; {acks}") }
    }

    fn takes(&self, work: &Work) -> bool {
        // A batch of one is one message.
        !self.atomic || work.rows > 1
    }

    fn run<'a>(&'a self, ground: Ground<'a>) -> Running<'a> {
        Box::pin(self.run_once(ground))
    }
}

struct JetStream {
    atomic: bool,
}

struct Publisher {
    context: Context,
    subject: Subject,
    atomic: bool,
    /// Batches so far: each has its own name.
    batches: u64,
}

fn name(number: usize) -> String {
    format!("bench-{number}")
}

async fn context(address: &str) -> anyhow::Result<Context> {
    let client = async_nats::connect(format!("nats://{address}")).await?;
    let context = ContextBuilder::new()
        .timeout(ACK_TIMEOUT)
        .max_ack_inflight(ACKS_MAX)
        .backpressure_on_inflight(true)
        .build(client);
    Ok(context)
}

/// Messages in all streams of a run.
async fn kept(address: &str, work: &Work) -> anyhow::Result<u64> {
    let context = context(address).await?;
    let mut messages = 0;
    for number in 0..work.producers {
        messages += context.get_stream(name(number)).await?.cached_info().state.messages;
    }
    Ok(messages)
}

impl Peer for JetStream {
    type Stream = Publisher;

    async fn open(&self, address: &str, number: usize) -> anyhow::Result<Publisher> {
        let (context, name) = (context(address).await?, name(number));
        let config = Config {
            name: name.clone(),
            subjects: vec![name.clone()],
            storage: StorageType::File,
            num_replicas: 1,
            allow_atomic_publish: self.atomic,
            ..Config::default()
        };
        context.create_stream(config).await?;
        Ok(Publisher { context, subject: name.into(), atomic: self.atomic, batches: 0 })
    }
}

impl PeerStream for Publisher {
    async fn send(&mut self, records: &[Bytes]) -> anyhow::Result<Acked> {
        if self.atomic {
            return self.send_atomic(records).await;
        }
        let mut acks = Vec::with_capacity(records.len());
        for record in records {
            acks.push(self.context.publish(self.subject.clone(), record.clone()).await?);
        }
        Ok(Box::pin(all(acks)))
    }
}

/// The last of them is not always the latest: each one counts.
async fn all(acks: Vec<PublishAckFuture>) -> anyhow::Result<()> {
    for ack in acks {
        ack.await?;
    }
    Ok(())
}

impl Publisher {
    async fn send_atomic(&mut self, records: &[Bytes]) -> anyhow::Result<Acked> {
        self.batches += 1;
        let batch = self.batches.to_string();
        let client = self.context.client();
        let mut commit = None;
        for (number, record) in (1..).zip(records) {
            let mut headers = HeaderMap::new();
            headers.insert(NATS_BATCH_ID, batch.as_str());
            headers.insert(NATS_BATCH_SEQUENCE, number.to_string());
            let (subject, record) = (self.subject.clone(), record.clone());
            if number < records.len() {
                client.publish_with_headers(subject, headers, record).await?;
            } else {
                headers.insert(NATS_BATCH_COMMIT, NATS_BATCH_COMMIT_FINAL);
                commit = Some(self.context.publish_with_headers(subject, headers, record).await?);
            }
        }
        let (commit, rows) = (commit.ok_or_else(|| anyhow!("a batch of nothing"))?, records.len() as u64);
        Ok(Box::pin(async move {
            let size = commit.await?.batch_size;
            ensure!(size == Some(rows), "{rows} messages were sent as a batch, the ack is of {size:?}");
            Ok(())
        }))
    }
}
