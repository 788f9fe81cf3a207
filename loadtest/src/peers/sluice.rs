//! Sluice among the contenders: one gateway, one pod, every record checked and on its way into a table.
//!
//! *Owns*: its transports, and how a work's records are encoded for each.
//! *Does not own*: what the protocols say (`load::target`), the processes (`cluster`).

use std::path::{Path, PathBuf};

use anyhow::{anyhow, ensure};
use sluice_client::Client;
use sluice_shared::frame::Encoding;

use super::measure::{SHAPE, Site, TABLE, batches, measure};
use super::{Contender, Durability, Ground, Run, Running, Work};
use crate::bench::run::QUIC_CONNECTIONS;
use crate::cluster::Cluster;
use crate::edges::Transport;
use crate::load::messages::Load;
use crate::load::target::framed::{Quic, Speech, WebSocket};
use crate::load::target::grpc::Zerobus;
use crate::load::target::{Answers, Ask, Opened, Target, Told};
use crate::table::count_rows;

/// Sluice over one of its transports.
pub struct Sluice {
    program: PathBuf,
    name: &'static str,
    transport: Transport,
}

impl Sluice {
    /// Over each of the transports that are compared.
    pub fn all(program: &Path) -> [Self; 3] {
        let transports = [
            ("sluice-websocket", Transport::WebSocketFrames),
            ("sluice-quic", Transport::Quic),
            ("sluice-zerobus", Transport::Zerobus),
        ];
        transports.map(|(name, transport)| Self { program: program.to_owned(), name, transport })
    }

    /// One record alone would be mostly schema as Arrow.
    fn encoding(&self, work: &Work) -> Encoding {
        match self.transport {
            Transport::Zerobus => Encoding::Json,
            _ if work.rows == 1 => Encoding::Json,
            _ => Encoding::Arrow,
        }
    }

    async fn run_once(&self, ground: Ground<'_>) -> anyhow::Result<Run> {
        let load = batches(self.transport, self.encoding(ground.work), ground.work)?;
        let (cluster, cert) = Cluster::start_with_tls(&self.program, ground.dir, &[])?;
        let measured = self.measure(&cluster, &cert, ground, &load).await;
        let run = measured.map_err(|error| anyhow!("{error:#}\n{}", cluster.log_tails()))?;
        let table_dir = cluster.table_dir(TABLE);
        cluster.drain()?;
        let (rows, records) = (count_rows(&table_dir)?, run.records);
        ensure!(rows == records, "{records} records were acked, the table has {rows} rows");
        Ok(run)
    }

    async fn measure(
        &self,
        cluster: &Cluster,
        certificate: &Path,
        Ground { work, run, .. }: Ground<'_>,
        load: &Load,
    ) -> anyhow::Result<Run> {
        let client = Client::connect(cluster.url()).await?;
        client.stream(TABLE).schema(SHAPE.schema()).open().await?.finish().await?;
        let pids = [cluster.gateway()?.pid(), cluster.pod()?.pid()];
        let address = cluster.url().trim_start_matches("ws://");
        let site = Site { address, certificate: Some(certificate), pids: &pids };
        match self.transport {
            Transport::Quic => {
                let target = Quic::new(work.producers.div_ceil(QUIC_CONNECTIONS))?;
                let site = Site { address: cluster.quic_address()?, ..site };
                Box::pin(measure(target, &site, (work, load), run)).await
            }
            Transport::Zerobus => Box::pin(measure(Durable(Zerobus), &site, (work, load), run)).await,
            _ => Box::pin(measure(WebSocket(Speech::Frames), &site, (work, load), run)).await,
        }
    }
}

impl Contender for Sluice {
    fn name(&self) -> &'static str {
        self.name
    }

    fn durability(&self) -> Durability {
        let cpu = match self.transport {
            Transport::Zerobus => "CPU until the last ack",
            _ => "CPU until all is in the table",
        };
        Durability { flushed: true, how: format!("a pod's log, as it always is; {cpu}") }
    }

    fn run<'a>(&'a self, ground: Ground<'a>) -> Running<'a> {
        Box::pin(self.run_once(ground))
    }
}

/// A protocol that tells nothing after durable: what is durable is all that is waited for. The rows are counted later.
struct Durable<T>(T);

struct DurableAnswers<A>(A);

impl<T: Target> Target for Durable<T> {
    type Out = T::Out;
    type Answers = DurableAnswers<T::Answers>;

    async fn open(&self, ask: &Ask<'_>) -> anyhow::Result<Opened<Self>> {
        let Opened { out, answers, next_offset, stream, room } = self.0.open(ask).await?;
        Ok(Opened { out, answers: DurableAnswers(answers), next_offset, stream, room })
    }
}

impl<A: Answers> Answers for DurableAnswers<A> {
    async fn next(&mut self) -> anyhow::Result<Option<Told>> {
        let told = self.0.next().await?;
        Ok(told.map(|told| Told { committed_next: told.durable_next, ..told }))
    }
}
