//! Whether work costs more as there is more of it: more streams, more tables, a longer history.
//!
//! *Owns*: the sizes, the loads, how they are measured.
//! *Does not own*: a run (`run`), what is flat enough (`report`).

use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};
use hdrhistogram::Histogram;
use rand::SeedableRng;
use rand::rngs::StdRng;
use serde::Serialize;
use sluice_client::Client;
use sluice_shared::frame::Encoding;

use super::run::{Load, Quantiles, Run, quantiles, run_in};
use super::{Feed, Options, SEED};
use crate::cluster::Cluster;
use crate::edges::Transport;
use crate::producer::Pace;
use crate::workload::Shape;

/// Small enough that ten thousand of them are no burden, and large enough that a frame is not all that is measured.
const FRAME_ROWS: usize = 10;
/// Frames of all streams without an ack, where that is within what one stream may have: enough that no stream waits for another
/// one's acks, and no more than the kernel's buffers hold.
const UNDER_WAY: usize = 65_536;
const UNDER_WAY_OF_ONE: (usize, usize) = (8, 2_048);
/// Runs are so many times as long as other rows': 1,000 tables have nothing in them for the first seconds, and take seconds for
/// their last files.
const RUN_TIMES: u32 = 2;
/// So many write where tables become more.
const STREAMS: usize = 1000;
/// Commits that make one figure.
const COMMITS: usize = 100;
const TABLE: &str = "versions";

/// The same load, divided among more and more of one thing.
#[derive(Debug, Clone, Serialize)]
pub struct Growth {
    /// Of what: `streams`, `tables`.
    pub of: &'static str,
    /// By how many there are.
    pub points: Vec<Point>,
}

/// With so many of them.
#[derive(Debug, Clone, Serialize)]
pub struct Point {
    /// How many.
    pub count: usize,
    /// All runs.
    pub runs: Vec<Run>,
}

/// Time from sending a record to its commit, each record in a version of its own.
#[derive(Debug, Clone, Serialize)]
pub struct Versions {
    /// By so many commits each.
    pub points: Vec<Commits>,
}

/// Some commits in a row. The machine is faster now and slower then: so in turn with each goes one to a table without a history.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Commits {
    /// The version of the first.
    pub from: u64,
    /// Of the table that has one version after the other.
    pub old: Quantiles,
    /// Of one that began with these commits.
    pub young: Quantiles,
}

/// 1, 10, 100 … `most`.
fn tens(most: usize) -> impl Iterator<Item = usize> {
    std::iter::successors(Some(1), |count| Some(count * 10)).take_while(move |count| *count <= most)
}

/// One table, and 1 to `most` streams.
pub(super) async fn streams(options: &Options, most: usize, tell: &dyn Fn(&str)) -> anyhow::Result<Growth> {
    let counts: Vec<_> = tens(most).map(|count| (count, (count, 1))).collect();
    grow(options, "streams", &counts, tell).await
}

/// As many streams as ever, and 1 to `most` tables.
pub(super) async fn tables(options: &Options, most: usize, tell: &dyn Fn(&str)) -> anyhow::Result<Growth> {
    let streams = STREAMS.min(most);
    let counts: Vec<_> = tens(most).map(|count| (count, (streams, count))).collect();
    grow(options, "tables", &counts, tell).await
}

async fn grow(
    options: &Options,
    of: &'static str,
    counts: &[(usize, (usize, usize))],
    tell: &dyn Fn(&str),
) -> anyhow::Result<Growth> {
    let feed = Feed::new(Shape::ServiceEvent, Encoding::Json, FRAME_ROWS)?;
    let mut points: Vec<_> =
        counts.iter().map(|(count, _)| Point { count: *count, runs: Vec::new() }).collect();
    // All that runs leave is deleted at the end: ext4 without a journal looks for inodes past those that were freed within the
    // last minutes, which with the files of 1,000 tables takes a pod more time than all else.
    let ground = tempfile::tempdir_in(&options.dir)?;
    let lasts = options.run * RUN_TIMES;
    // In turns, so that what changes in the machine meanwhile meets all of them.
    for number in 1..=options.runs {
        for (point, (count, (streams, tables))) in points.iter_mut().zip(counts) {
            tell(&format!("{count} {of}: run {number} of {}", options.runs));
            let (least, most) = UNDER_WAY_OF_ONE;
            let under_way = u16::try_from((UNDER_WAY / streams).clamp(least, most))?;
            let load = Load {
                transport: Transport::WebSocketFrames,
                streams: *streams,
                tables: *tables,
                pace: Pace::UnderWay(under_way),
                lasts,
                clears_files: false,
            };
            let dir = ground.path().join(format!("{count}-{number}"));
            std::fs::create_dir(&dir)?;
            let run = run_in(&dir, options, &feed, &load).await;
            point.runs.push(run.with_context(|| format!("{count} {of}"))?);
        }
    }
    Ok(Growth { of, points })
}

/// A table of `most` versions, by a pod that commits as often as it can.
pub(super) async fn versions(
    options: &Options,
    most: usize,
    tell: &dyn Fn(&str),
) -> anyhow::Result<Versions> {
    tell(&format!("{most} versions of a table"));
    let dir = tempfile::tempdir_in(&options.dir)?;
    let cluster = Cluster::start(&options.sluice, dir.path(), &[("SLUICE_POD__FLUSH_INTERVAL_MS", "1")])?;
    let measured = commits(&cluster, most).await;
    let versions = measured.map_err(|error| anyhow!("{error:#}\n{}", cluster.log_tails()))?;
    cluster.drain()?;
    Ok(versions)
}

async fn commits(cluster: &Cluster, most: usize) -> anyhow::Result<Versions> {
    let client = Client::connect(cluster.url()).await?;
    let batch = Shape::ServiceEvent.batch(0, 1, &mut StdRng::seed_from_u64(SEED));
    let mut old = client.stream(TABLE).schema(batch.schema()).open().await?;
    let mut points = Vec::new();
    let times = Histogram::<u64>::new_with_bounds(1, Duration::from_secs(60).as_micros() as u64, 3)?;
    for begin in (0..most).step_by(COMMITS) {
        let mut young = client.stream(format!("{TABLE}_{begin}")).schema(batch.schema()).open().await?;
        let (mut of_old, mut of_young) = (times.clone(), times.clone());
        for _ in 0..COMMITS.min(most - begin) {
            for (stream, times) in [(&mut old, &mut of_old), (&mut young, &mut of_young)] {
                let began = Instant::now();
                stream.send_batch(batch.clone()).await?;
                stream.committed().await?;
                times.saturating_record(began.elapsed().as_micros() as u64);
            }
        }
        young.finish().await?;
        let (old, young) = (quantiles(&of_old), quantiles(&of_young));
        points.push(Commits { from: begin as u64 + 1, old, young });
    }
    let version = old.progress().committed().and_then(|last| last.version).context("nothing is committed")?;
    anyhow::ensure!(version >= most as u64, "{most} commits made {version} versions");
    old.finish().await?;
    Ok(Versions { points })
}
