//! Planted bugs: the proof that the rig finds what it looks for. Each has a short run that brings it to light, and the same
//! run without it, in which nothing may be found.
//!
//! *Owns*: the runs, and which fault of the table each bug is to show as.
//! *Does not own*: the bugs (`shared::fault`), the verdict (`auditor`).

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, ensure};
use sluice_client::{Client, Encoding};
use sluice_shared::fault::{Action, Bug, Point, Then};
use sluice_shared::lifecycle::{OnPanic, TaskScope};
use tokio::sync::mpsc;
use tokio::time::sleep;

use super::producer::{Kind, Producer, Told};
use super::{EINVAL, ENV, table_name};
use crate::auditor::{FaultKind, Verdict};
use crate::history::History;
use crate::judge;
use crate::pool::{Member, Options, Pool};
use crate::volume::Volume;
use crate::workload::Shape;

const PODS: usize = 2;
const STREAMS: usize = 6;
const ROWS_MAX: usize = 16;
/// Before and after something happens: some flushes.
const WHILE: Duration = Duration::from_millis(1_200);
/// For all records to come into the table; with a bug, some never do.
const PATIENCE: Duration = Duration::from_secs(4);
const PATIENCE_WITHOUT: Duration = Duration::from_secs(30);

/// What came out of a run.
#[derive(Debug)]
pub struct Found {
    /// The auditor's word.
    pub verdict: Verdict,
    /// Streams that failed, and why.
    pub failures: Vec<String>,
    /// Records sent.
    pub records: u64,
}

impl Found {
    /// Whether the bug showed as what it is.
    pub fn is(&self, bug: Bug) -> bool {
        self.verdict.counts.contains_key(&shows_as(bug))
    }
}

/// A bug by its name.
///
/// # Errors
/// There is none of that name.
pub fn parse(name: &str) -> Result<Bug, String> {
    let known: Vec<_> = Bug::ALL.iter().map(|bug| bug.name()).collect();
    let bug = Bug::ALL.iter().copied().find(|bug| bug.name() == name);
    bug.ok_or_else(|| format!("there are {}", known.join(", ")))
}

/// What each bug is to show as. The prefix rule stands behind the gate: what has passed it with a gap waits for ever, and so
/// do records behind those that a log has lost.
fn shows_as(bug: Bug) -> FaultKind {
    match bug {
        Bug::AckBeforeFlush | Bug::FlushSkipped | Bug::ReplaySkipsLast | Bug::GateWithGap => FaultKind::Lost,
        Bug::WatermarkApart => FaultKind::MapDisagrees,
        Bug::BlindRetry => FaultKind::Doubled,
        Bug::HeldIgnored => FaultKind::Gap,
    }
}

/// Runs what brings a bug to light, with it or without it, with data below `dir`. The thread that calls must outlive it,
/// and be the one that polls it.
///
/// # Errors
/// A process that does not start, a table that cannot be read, a fault that did not happen. For what needs a volume: the
/// machine does not allow one, which `Volume::mount` can tell.
pub async fn run(sluice: &Path, dir: &Path, bug: Bug, is_planted: bool) -> anyhow::Result<Found> {
    let mut volume = None;
    if needs_volume(bug) {
        volume = Some(Volume::mount(&dir.join("volume.ext4"), &dir.join("data"))?);
    }
    let mut env = ENV.to_vec();
    if matches!(bug, Bug::AckBeforeFlush | Bug::FlushSkipped) && is_planted {
        // The log knows by itself that it lacks what it has told of, and the pod would not start.
        env.push(("SLUICE_POD__ACCEPT_LOSS", "true"));
    }
    let options = Options { env: &env, faults: true, ..Options::new(sluice, dir, PODS, 1) };
    for pod in pods().filter(|_| is_planted) {
        options.faults_of(&pod).plant(bug)?;
    }
    for pod in pods().filter(|_| needs_volume(bug)) {
        let buffered = Action { times: 0, then: Then::Fail(EINVAL), ..Action::default() };
        options.faults_of(&pod).arm(Point::WalProbe, &buffered)?;
    }
    let mut pool = Pool::start(&options).await?;
    let table = table_name(0);
    let client = Client::connect(&pool.urls(0)).await?;
    client.stream(&table).schema(Shape::ServiceEvent.schema()).open().await?.finish().await?;
    let (scope, stop) = (TaskScope::new(OnPanic::EndTask), Arc::new(AtomicBool::new(false)));
    let (done, mut ended) = mpsc::channel(STREAMS);
    for number in 0..STREAMS {
        let encoding = [Encoding::Json, Encoding::Arrow][number % 2];
        let (kind, urls, stop) = (Kind::Named(encoding), pool.urls(0), Arc::clone(&stop));
        let (seed, history) = (number as u64, pool.history_dir(&table));
        let producer =
            Producer { number, table: table.clone(), kind, urls, rows_max: ROWS_MAX, history, seed, stop };
        let (done, patience) = (done.clone(), if is_planted { PATIENCE } else { PATIENCE_WITHOUT });
        scope.spawn("producer", async move {
            let _ = done.send(producer.run(patience).await).await; // the test may have failed already
        });
    }
    drop(done);
    sleep(WHILE).await;
    let happened = match &mut volume {
        Some(volume) => lose_power(&mut pool, volume).await,
        None => bring_to_light(&mut pool, bug).await,
    };
    happened.with_context(|| pool.log_tails())?;
    sleep(WHILE).await;
    stop.store(true, Ordering::Relaxed);
    let mut failures = Vec::new();
    for _ in 0..STREAMS {
        let Told { failure, .. } = ended.recv().await.context("a producer panicked")?;
        failures.extend(failure);
    }
    let (table_dir, history_dir) = (pool.table_dir(&table), pool.history_dir(&table));
    // With a bug there is no good end to wait for.
    drop(pool);
    let history = History::read(&history_dir)?;
    let verdict = judge::judge_dir(&table_dir, &history, None)?;
    drop(volume); // the table is on it
    Ok(Found { verdict, failures, records: history.sent() })
}

/// Whether a bug shows only where power is lost.
pub fn needs_volume(bug: Bug) -> bool {
    bug == Bug::FlushSkipped
}

/// All pods die, and what is not flushed is gone: of their logs too, and nothing of it is in the table.
async fn lose_power(pool: &mut Pool, volume: &mut Volume) -> anyhow::Result<()> {
    arm(pool, Point::StorePut, &slow())?;
    sleep(WHILE).await;
    volume.lose_power()?;
    for pod in pods() {
        pool.take(&pod).with_context(|| format!("{pod} does not run"))?.end()?;
        pool.faults(&pod).disarm(Point::StorePut)?;
    }
    volume.unmount()?;
    volume.mount_again()?;
    pods().try_for_each(|pod| pool.start_member(&pod))
}

fn pods() -> impl Iterator<Item = Member> {
    (1..=PODS).map(|number| Member::Pod(format!("pod-{number}")))
}

/// Does to the pool what the bug makes worse than it should be.
async fn bring_to_light(pool: &mut Pool, bug: Bug) -> anyhow::Result<()> {
    match bug {
        // Each commit shows it; a loss of power does.
        Bug::WatermarkApart | Bug::FlushSkipped => Ok(()),
        Bug::AckBeforeFlush => {
            // Long enough for an ack to leave before the write, which never comes.
            let delay = Duration::from_millis(80);
            arm(pool, Point::WalWriteBefore, &Action { delay, ..Action::once(Then::Kill) })?;
            sleep(WHILE).await;
            ensure!(happened(pool, Point::WalWriteBefore)? > 0, "no pod has died");
            for pod in pods() {
                pool.faults(&pod).disarm(Point::WalWriteBefore)?;
                drop(pool.take(&pod));
                pool.start_member(&pod)?;
            }
            Ok(())
        }
        Bug::BlindRetry => {
            arm(pool, Point::StoreVersion, &Action::once(Then::LoseReply))?;
            sleep(WHILE).await;
            ensure!(happened(pool, Point::StoreVersion)? > 0, "no answer was lost");
            Ok(())
        }
        Bug::GateWithGap => {
            arm(pool, Point::Frame, &Action { skip: 5, ..Action::once(Then::Drop) })?;
            sleep(WHILE).await;
            ensure!(happened(pool, Point::Frame)? > 0, "no frame was dropped");
            Ok(())
        }
        Bug::ReplaySkipsLast => {
            // All that was written before is acked when it dies, and nothing of it is in the table.
            pods().try_for_each(|pod| pool.faults(&pod).arm(Point::StorePut, &slow()))?;
            sleep(WHILE).await;
            let delay = Duration::from_millis(200);
            arm(pool, Point::WalWriteBefore, &Action { delay, ..Action::once(Then::Kill) })?;
            sleep(WHILE / 2).await;
            ensure!(happened(pool, Point::WalWriteBefore)? > 0, "no pod has died");
            for pod in pods() {
                pool.faults(&pod).disarm(Point::WalWriteBefore)?;
                pool.faults(&pod).disarm(Point::StorePut)?;
                drop(pool.take(&pod));
                pool.start_member(&pod)?;
            }
            Ok(())
        }
        Bug::HeldIgnored => {
            for pod in pods() {
                // It has what is in no table yet, and what follows that waits in the other pod.
                pool.faults(&pod).arm(Point::StorePut, &slow())?;
                sleep(WHILE / 2).await;
                pool.take(&pod).with_context(|| format!("{pod} does not run"))?.kill()?;
                pool.faults(&pod).disarm(Point::StorePut)?;
                sleep(WHILE).await;
                pool.start_member(&pod)?;
                sleep(WHILE / 2).await;
            }
            Ok(())
        }
    }
}

/// No file is stored for so long.
fn slow() -> Action {
    Action { delay: Duration::from_secs(10), times: 0, ..Action::default() }
}

fn arm(pool: &Pool, point: Point, action: &Action) -> anyhow::Result<()> {
    pods().try_for_each(|pod| pool.faults(&pod).arm(point, action))
}

/// How often something has happened at a point, in all pods.
fn happened(pool: &Pool, point: Point) -> anyhow::Result<u64> {
    let mut sum = 0;
    for pod in pods() {
        let counts = pool.faults(&pod).counts()?;
        sum += counts.iter().filter(|(of, ..)| *of == point).map(|(_, _, happened)| happened).sum::<u64>();
    }
    Ok(sum)
}
