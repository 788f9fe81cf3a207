//! One run of a work on a service that is there: the same for all of them.
//!
//! *Owns*: what a run sends, wall time from the first send to the last ack, CPU time.
//! *Does not own*: its streams (`producer::together`), starting services (`sluice`, `nats_server`).

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::ensure;
use sluice_shared::frame::Encoding;

use super::calls::{Calls, Peer};
use super::{Run, Work};
use crate::bench::FEED_BYTES;
use crate::bench::run::quantiles;
use crate::cluster::cpu_of;
use crate::edges::{Edge, Transport};
use crate::load::messages::Load;
use crate::load::target::Target;
use crate::producer::Pace;
use crate::producer::together::{Plan, Sum, Together};
use crate::workload::Shape;

/// The table, where there are tables.
pub(super) const TABLE: &str = "bench";
/// What all records are like.
pub(super) const SHAPE: Shape = Shape::Blob;
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
    let plan = Plan {
        address: site.address,
        certificate: site.certificate,
        tables: vec![TABLE.to_owned()],
        streams: work.producers,
        encoding: load.encoding,
        rows: load.rows,
        messages: Arc::clone(&load.messages),
        step: STREAM_STEP,
        pace: Pace::UnderWay(work.window),
    };
    let streams = Together::open(target, &plan).await?;
    let (server_before, client_before) = (cpu_of_all(site.pids)?, cpu_of("self")?);
    let Sum { records, bytes, durable_after, latencies, .. } = streams.send(run).await?;
    let per_gb = |cpu: Duration| cpu.as_secs_f64() / (bytes.max(1) as f64 / 1e9);
    let server = cpu_of_all(site.pids)?.saturating_sub(server_before);
    let client = cpu_of("self")?.saturating_sub(client_before);
    let seconds = durable_after.as_secs_f64();
    ensure!(records > 0 && seconds > 0.0, "nothing was acked");
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
