//! The elastic test: a pool under steady load while its pods drain, join, die and hang, and a gateway dies; then the
//! auditor judges every version of every table, and producers tell how long they had to wait.
//!
//! *Owns*: the scenario and its phases.
//! *Does not own*: the processes (`pool`), the load (`producer`), what is made of it (`figures`, `auditor`).
//! Tests P1 to P6 on real processes.

mod figures;
pub(crate) mod producer;

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, anyhow, bail, ensure};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use sluice_client::{Client, Progress};
use sluice_shared::lifecycle::{OnPanic, TaskScope};
use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::auditor::Verdict;
use crate::history::History;
use crate::judge::judge_dir;
use crate::pool::{Options, Pool, table_name};
pub(crate) use figures::Wait;
pub use figures::{Pauses, Row, Span};
use producer::{Opened, Producer, Told};

/// For all streams to open, and to finish.
const STREAMS_TIMEOUT: Duration = Duration::from_secs(90);
/// What each stream of the hot table says that it will send. Some ten such streams take a pod's share, so that the table
/// stands on all pods from the beginning, as a table does whose streams send so much.
const HOT_RATE: u64 = 4_000_000;
/// A drain's handoff pauses a stream at most so long,
const HANDOFF_AIM: Duration = Duration::from_millis(100);
/// the death of its pod so long,
const KILL_AIM: Duration = Duration::from_secs(1);
/// and a pod that hangs.
const HANG_AIM: Duration = Duration::from_secs(3);

/// What happens to the pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Nothing.
    Steady,
    /// The pod with most streams drains, and does not come back.
    Drain,
    /// So many pods join.
    Add(usize),
    /// `kill -9` of the pod with most streams.
    Kill,
    /// What was killed starts again, with its log.
    Restart,
    /// The pod with most streams hangs (SIGSTOP) for so long.
    Hang(Duration),
    /// `kill -9` of a gateway, which starts again when its streams are elsewhere.
    KillGateway,
    /// Each pod in turn drains and starts again.
    Roll,
}

/// How hard it is.
#[derive(Debug, Clone)]
pub struct Scenario {
    /// Records, and who sends what, come from it.
    pub seed: u64,
    /// Pods at first.
    pub pods: usize,
    /// Gateways.
    pub gateways: usize,
    /// Streams, half of them into the first table.
    pub streams: usize,
    /// Tables.
    pub tables: usize,
    /// Records of each stream in a second.
    pub records_per_s: f64,
    /// How long the load goes on after each phase's events.
    pub settle: Duration,
    /// What happens, in this order.
    pub phases: Vec<Phase>,
}

impl Scenario {
    /// Everything that can happen, once.
    pub fn seeded(seed: u64) -> Self {
        Self {
            seed,
            pods: 4,
            gateways: 2,
            streams: 200,
            tables: 20,
            records_per_s: 10.0,
            settle: Duration::from_secs(6),
            phases: vec![
                Phase::Steady,
                Phase::Drain,
                Phase::Add(2),
                Phase::Kill,
                Phase::Restart,
                Phase::Hang(Duration::from_secs(10)),
                Phase::KillGateway,
                Phase::Roll,
            ],
        }
    }
}

/// What came out.
#[derive(Debug)]
pub struct Outcome {
    /// The auditor's word on each table.
    pub verdicts: BTreeMap<String, Verdict>,
    /// Records sent.
    pub sent: u64,
    /// A row for each phase.
    pub rows: Vec<Row>,
}

impl Outcome {
    /// Whether all promises were kept, and all records are in their tables.
    pub fn is_kept(&self) -> bool {
        let rows: u64 = self.verdicts.values().map(|verdict| verdict.rows).sum();
        self.verdicts.values().all(Verdict::is_clean)
            && rows == self.sent
            && self.rows.iter().all(Row::is_quiet)
    }

    /// Whether all pauses are as short as they should be.
    pub fn is_in_time(&self) -> bool {
        self.rows.iter().all(Row::is_in_time)
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", figures::head())?;
        self.rows.iter().try_for_each(|row| writeln!(f, "{row}"))?;
        let (mut versions, mut rows, mut broken) = (0, 0, 0);
        for (table, verdict) in &self.verdicts {
            (versions, rows) = (versions + verdict.versions, rows + verdict.rows);
            if !verdict.is_clean() {
                broken += 1;
                writeln!(f, "{table}: {verdict}")?;
            }
        }
        let (tables, sent) = (self.verdicts.len(), self.sent);
        write!(f, "{sent} records sent, {rows} rows in {tables} tables, {versions} versions judged: ")?;
        match broken {
            0 if rows == sent => write!(f, "all promises kept"),
            _ => write!(f, "PROMISES BROKEN in {broken} tables"),
        }
    }
}

/// Runs the scenario with data below `dir`, and tells `say` where it is. The thread that calls must outlive it.
///
/// # Errors
/// A process that does not start, drain or stay alive, a stream that fails, a table that cannot be read. Broken
/// promises are not errors here: they are in the outcome.
pub async fn run(
    sluice: &Path,
    dir: &Path,
    scenario: &Scenario,
    say: &(dyn Fn(&str) + Sync),
) -> anyhow::Result<Outcome> {
    let env = [("SLUICE_POD__SEGMENT_BYTES", "8MiB"), ("SLUICE_POD__RECORD_BYTES_MAX", "1MiB")];
    let options = Options { env: &env, ..Options::new(sluice, dir, scenario.pods, scenario.gateways) };
    let pool = Pool::start(&options).await?;
    let mut run = Run::new(pool, scenario, say);
    let ran = run.all().await;
    let told = ran.map_err(|error| anyhow!("{error:#}\n{}", run.pool.log_tails()))?;
    let Run { pool, spans, .. } = run;
    let names: Vec<String> = (0..scenario.tables).map(table_name).collect();
    let dirs: Vec<_> = names.iter().map(|name| pool.table_dir(name)).collect();
    say("all streams have ended: the pool drains");
    pool.drain().await?;
    say("the auditor reads");
    let mut histories = vec![History::default(); scenario.tables];
    let mut waits: Vec<Vec<Wait>> = vec![Vec::new(); scenario.streams];
    for Told { number, notes, waits: own } in told {
        histories[scenario.table_of(number)].streams.push(notes);
        waits[number] = own;
    }
    let mut verdicts = BTreeMap::new();
    for ((name, dir), history) in names.into_iter().zip(dirs).zip(&histories) {
        verdicts.insert(name, judge_dir(&dir, history, None)?);
    }
    let sent = histories.iter().map(History::sent).sum();
    Ok(Outcome { verdicts, sent, rows: figures::rows(spans, &waits) })
}

impl Scenario {
    /// Every other stream is the first table's, the rest go round the others.
    fn table_of(&self, stream: usize) -> usize {
        if stream.is_multiple_of(2) || self.tables == 1 { 0 } else { 1 + (stream / 2) % (self.tables - 1) }
    }
}

/// Where a stream is: gateway, pod, moves at that gateway.
type Place = (usize, String, u64);

struct Run<'a> {
    pool: Pool,
    scenario: &'a Scenario,
    say: &'a (dyn Fn(&str) + Sync),
    began: Instant,
    /// By their ids.
    numbers: HashMap<String, usize>,
    progress: Vec<Progress>,
    spans: Vec<Span>,
    /// The pod that was killed and is to come back.
    killed: Option<String>,
}

impl<'a> Run<'a> {
    fn new(pool: Pool, scenario: &'a Scenario, say: &'a (dyn Fn(&str) + Sync)) -> Self {
        let (numbers, progress, spans) = (HashMap::new(), Vec::new(), Vec::new());
        Self { pool, scenario, say, began: Instant::now(), numbers, progress, spans, killed: None }
    }

    async fn all(&mut self) -> anyhow::Result<Vec<Told>> {
        self.pool.make_tables(self.scenario.tables).await?;
        let (scope, stop) = (TaskScope::new(OnPanic::EndTask), Arc::new(AtomicBool::new(false)));
        let mut ended = self.start_streams(&scope, &stop).await?;
        for phase in &self.scenario.phases {
            self.phase(*phase, &mut ended).await.with_context(|| format!("phase {phase:?}"))?;
        }
        stop.store(true, Ordering::Relaxed);
        let mut told = Vec::new();
        while told.len() < self.scenario.streams {
            let next = tokio::time::timeout(STREAMS_TIMEOUT, ended.recv()).await;
            let next = next.with_context(|| {
                let all = self.scenario.streams;
                format!("{} of {all} streams have finished in {STREAMS_TIMEOUT:?}", told.len())
            });
            told.push(next?.context("a producer panicked")??);
        }
        Ok(told)
    }

    /// Answers once all are open.
    async fn start_streams(
        &mut self,
        scope: &TaskScope,
        stop: &Arc<AtomicBool>,
    ) -> anyhow::Result<mpsc::Receiver<anyhow::Result<Told>>> {
        let Scenario { streams, records_per_s, .. } = *self.scenario;
        let mut random = StdRng::seed_from_u64(self.scenario.seed);
        let (opened, mut opens) = mpsc::channel::<Opened>(streams);
        let (done, mut ended) = mpsc::channel(streams);
        for number in 0..streams {
            let table = self.scenario.table_of(number);
            let producer = Producer {
                number,
                table: table_name(table),
                client: Client::connect(&self.pool.urls(number / 2)).await?,
                seed: random.random(),
                records: 1,
                interval: Duration::from_secs_f64(1.0 / records_per_s),
                rate_hint: (table == 0).then_some(HOT_RATE),
                began: self.began,
                stop: Arc::clone(stop),
            };
            let (opened, done) = (opened.clone(), done.clone());
            scope.spawn("producer", async move {
                // Whoever waits has gone only when the test has failed already.
                let _ = done.send(producer.run(opened).await).await;
            });
        }
        drop(opened);
        let mut progress = BTreeMap::new();
        while let Ok(Some(open)) = tokio::time::timeout(STREAMS_TIMEOUT, opens.recv()).await {
            self.numbers.insert(open.stream, open.number);
            progress.insert(open.number, open.progress);
        }
        if let Ok(failed) = ended.try_recv() {
            failed?;
        }
        ensure!(progress.len() == streams, "{} of {streams} streams have opened", progress.len());
        self.progress = progress.into_values().collect();
        Ok(ended)
    }

    /// Does what the phase is about, and lets the load go on for a while.
    async fn phase(
        &mut self,
        phase: Phase,
        ended: &mut mpsc::Receiver<anyhow::Result<Told>>,
    ) -> anyhow::Result<()> {
        let (before, lost_before) = (self.places().await?, self.reconnects());
        let from = self.began.elapsed();
        let name = self.act(phase, &before).await?;
        tokio::select! {
            biased; // a producer that fails ends the test at once
            failed = ended.recv() => match failed {
                Some(Err(error)) => return Err(error),
                _ => bail!("a producer stopped before it was told to"),
            },
            () = tokio::time::sleep(self.scenario.settle) => {}
        }
        let to = self.began.elapsed();
        let after = self.places().await?;
        let has_moved =
            |(stream, place): (&usize, &Place)| (before.get(stream) != Some(place)).then_some(*stream);
        let span = Span {
            name,
            from,
            to,
            moved: after.iter().filter_map(has_moved).collect(),
            lost: self.reconnects() - lost_before,
            is_quiet: phase != Phase::KillGateway,
            aim: phase.aim(),
        };
        let mut at: BTreeMap<&str, usize> = BTreeMap::new();
        after.values().for_each(|(_, pod, _)| *at.entry(pod).or_default() += 1);
        let (moved, lost) = (span.moved.len(), span.lost);
        (self.say)(&format!("{}: {moved} streams moved, {lost} connections lost; now {at:?}", span.name));
        self.spans.push(span);
        Ok(())
    }

    async fn act(&mut self, phase: Phase, places: &HashMap<usize, Place>) -> anyhow::Result<String> {
        let busiest = busiest(places)?;
        match phase {
            Phase::Steady => return Ok("steady".to_owned()),
            Phase::Drain => {
                self.pool.drain_pod(&busiest).await?;
                return Ok(format!("drain {busiest}"));
            }
            Phase::Add(count) => {
                for _ in 0..count {
                    self.pool.add_pod().await?;
                }
                return Ok(format!("add {count}"));
            }
            Phase::Kill => {
                self.pool.kill_pod(&busiest)?;
                self.killed = Some(busiest.clone());
            }
            Phase::Restart => {
                let killed = self.killed.take().context("no pod was killed before")?;
                self.pool.restart_pod(&killed).await?;
                return Ok(format!("start {killed} again"));
            }
            Phase::Hang(lasts) => {
                self.pool.stop_pod(&busiest, lasts).await?;
                self.pool.until_seen(&busiest, "active").await?;
                return Ok(format!("stop {busiest} for {} s", lasts.as_secs()));
            }
            Phase::KillGateway => {
                self.pool.kill_gateway(0)?;
                tokio::time::sleep(self.scenario.settle).await;
                self.pool.restart_gateway(0).await?;
                return Ok("kill -9 a gateway".to_owned());
            }
            Phase::Roll => {
                for pod in self.pool.running_pods() {
                    self.pool.drain_pod(&pod).await.with_context(|| pod.clone())?;
                    self.pool.restart_pod(&pod).await?;
                }
                return Ok("roll all pods".to_owned());
            }
        }
        Ok(format!("kill -9 {busiest}"))
    }

    /// Where each stream is.
    async fn places(&self) -> anyhow::Result<HashMap<usize, Place>> {
        let mut places = HashMap::new();
        for (gateway, admin) in self.pool.admins() {
            let shown = admin.get("/v1/streams").await?;
            for stream in shown["streams"].as_array().context("no list of streams")? {
                let text = |key: &str| stream[key].as_str().with_context(|| format!("no {key} in {stream}"));
                let number = self.numbers.get(text("stream")?);
                let place = (gateway, text("pod")?.to_owned(), stream["moves"].as_u64().unwrap_or(0));
                number.map(|number| places.insert(*number, place));
            }
        }
        Ok(places)
    }

    fn reconnects(&self) -> u64 {
        self.progress.iter().map(Progress::reconnects).sum()
    }
}

impl Phase {
    fn aim(self) -> Option<Duration> {
        match self {
            Self::Drain | Self::Roll => Some(HANDOFF_AIM),
            Self::Kill => Some(KILL_AIM),
            Self::Hang(_) => Some(HANG_AIM),
            Self::Steady | Self::Add(_) | Self::Restart | Self::KillGateway => None,
        }
    }
}

/// The pod with most streams.
fn busiest(places: &HashMap<usize, Place>) -> anyhow::Result<String> {
    let mut streams: BTreeMap<&str, usize> = BTreeMap::new();
    places.values().for_each(|(_, pod, _)| *streams.entry(pod).or_default() += 1);
    let most = streams.into_iter().max_by_key(|(_, streams)| *streams);
    Ok(most.context("no stream is anywhere")?.0.to_owned())
}
