//! The burst: a pool that scales itself under steady load, then under several times the load within two seconds, as
//! producers that come, then under the steady load again. Producers come and go all the time: a pod that was added is of
//! use to those that come after it.
//!
//! Each pod lets in so many bytes a second and no more (`pod.bytes_per_s_max`): pods that share a machine's processors
//! would otherwise have no load of their own that a further pod could take over.
//!
//! *Owns*: the scenario, who sends when, what is looked at meanwhile.
//! *Does not own*: a single stream (`elastic::producer`), what is made of what was seen (`figures`), the judge (`auditor`).
//! Tests P1 to P6 on real processes.

mod figures;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{anyhow, ensure};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use sluice_client::Client;
use sluice_shared::lifecycle::{OnPanic, TaskScope};
use tokio::sync::mpsc;
use tokio::time::{Instant, MissedTickBehavior, sleep_until};

use crate::elastic::producer::{Opened, Producer, Told};
use crate::history::History;
use crate::judge::judge_dir;
use crate::pool::make_tables;
use crate::up::Up;
use crate::workload::{self, Shape};
pub use figures::{Outcome, Row};
use figures::{Seen, Times};

/// The load comes within this time.
const COMES_WITHIN: Duration = Duration::from_secs(2);
/// Between two looks at the pool.
const LOOK_INTERVAL: Duration = Duration::from_millis(500);
/// For streams to finish once they have stopped sending.
const FINISH_TIMEOUT: Duration = Duration::from_secs(120);
/// Streams that have opened or ended and were not looked at yet.
const NEWS_MAX: usize = 4096;
/// Records whose mean length is the load's unit.
const LENGTH_RECORDS: usize = 1000;

/// How hard it is.
#[derive(Debug, Clone)]
pub struct Scenario {
    /// Records, and how long each stream lasts, come from it.
    pub seed: u64,
    /// Pods before and after,
    pub min: u32,
    /// and at most.
    pub max: u32,
    /// What a pod lets in within a second.
    pub pod_bytes_per_s: u64,
    /// Tables.
    pub tables: usize,
    /// Streams at one time, before and after.
    pub streams: usize,
    /// So many times as many are there in the burst.
    pub times: usize,
    /// Records of about 250 bytes in a frame.
    pub records: usize,
    /// From frame to frame.
    pub interval: Duration,
    /// A stream is there for half as long to one and a half times as long, then another one comes.
    pub lasts: Duration,
    /// Steady load before the burst.
    pub before: Duration,
    /// The burst.
    pub burst: Duration,
    /// For the pool to be as it was, from the burst's end.
    pub after_max: Duration,
    /// How long the load has to have been small before a pod goes.
    pub quiet_s: u64,
}

impl Scenario {
    /// What fits on two cores.
    pub fn seeded(seed: u64) -> Self {
        Self {
            seed,
            min: 2,
            max: 6,
            pod_bytes_per_s: 320 << 10,
            tables: 6,
            streams: 20,
            times: 5,
            records: 8,
            interval: Duration::from_millis(200),
            lasts: Duration::from_secs(15),
            before: Duration::from_secs(20),
            burst: Duration::from_secs(110),
            after_max: Duration::from_secs(120),
            quiet_s: 15,
        }
    }

    fn table_of(&self, stream: u64) -> usize {
        usize::try_from(stream).unwrap_or(0) % self.tables
    }

    /// Bytes that each stream sends in a second.
    fn stream_bytes_per_s(&self) -> anyhow::Result<f64> {
        let mut random = StdRng::seed_from_u64(self.seed);
        let text = workload::json_lines(&Shape::ServiceEvent.batch(0, LENGTH_RECORDS, &mut random))?;
        let record = text.len() as f64 / LENGTH_RECORDS as f64;
        Ok(record * self.records as f64 / self.interval.as_secs_f64())
    }
}

fn table_name(table: usize) -> String {
    format!("burst_{table}")
}

async fn start(sluice: &Path, dir: &Path, scenario: &Scenario) -> anyhow::Result<Up> {
    let (quiet, bytes_per_s) = (scenario.quiet_s.to_string(), scenario.pod_bytes_per_s.to_string());
    let env = [
        ("SLUICE_POD__BYTES_PER_S_MAX", bytes_per_s.as_str()),
        ("SLUICE_POD__SEGMENT_BYTES", "8MiB"),
        ("SLUICE_POD__RECORD_BYTES_MAX", "1MiB"),
        ("SLUICE_AUTOSCALER__QUIET_S", &quiet),
        ("SLUICE_AUTOSCALER__AFTER_OUT_S", &quiet),
        ("SLUICE_AUTOSCALER__IN_INTERVAL_S", "2"),
        ("SLUICE_AUTOSCALER__TURN_S", "0"),
    ];
    Up::start(sluice, dir, scenario.min as usize..=scenario.max as usize, &env).await
}

/// Runs the scenario with data below `dir`, and tells `say` where it is. The thread that calls must outlive it.
///
/// # Errors
/// A process that does not start, drain or stay alive, a table that cannot be read. Broken promises, and producers that
/// fail, are not errors here: they are in the outcome.
pub async fn run(
    sluice: &Path,
    dir: &Path,
    scenario: &Scenario,
    say: &(dyn Fn(&str) + Sync),
) -> anyhow::Result<Outcome> {
    let service = start(sluice, dir, scenario).await?;
    let ran = Box::pin(load(&service, scenario, say)).await;
    let mut outcome = ran.map_err(|error| anyhow!("{error:#}\n{}", service.process.log_tail()))?;
    say("all streams have ended: the pool drains");
    service.process.terminate()?;
    say("the auditor reads");
    for (name, history) in &outcome.histories {
        let table = dir.join("data/tables/main/default").join(name);
        outcome.verdicts.insert(name.clone(), judge_dir(&table, history, None)?);
    }
    Ok(outcome)
}

/// Sends the load, looks at the pool, and waits until all streams have ended.
async fn load(service: &Up, scenario: &Scenario, say: &(dyn Fn(&str) + Sync)) -> anyhow::Result<Outcome> {
    let client = Client::connect(&service.url).await?;
    make_tables(&client, (0..scenario.tables).map(table_name)).await?;
    let scope = TaskScope::new(OnPanic::EndTask);
    let (opened, opens) = mpsc::channel(NEWS_MAX);
    let (done, ended) = mpsc::channel(NEWS_MAX);
    let crowd = Arc::new(Crowd {
        scenario: scenario.clone(),
        client,
        rate: scenario.stream_bytes_per_s()? as u64,
        began: Instant::now(),
        scope: scope.clone(),
        begun: AtomicU64::new(0),
        seats: AtomicU64::new(0),
        steady_is_over: AtomicBool::new(false),
        burst_is_over: AtomicBool::new(false),
        opened,
        done,
    });
    let mut look = Look::new(service, scenario, say, crowd.began, (opens, ended));
    crowd.come(0..scenario.streams, Part::Steady);
    look.until("steady", scenario.before, |_| false).await?;
    let from = crowd.began.elapsed();
    crowd.come(scenario.streams..scenario.streams * scenario.times, Part::Burst);
    look.until("burst", scenario.burst, |_| false).await?;
    crowd.burst_is_over.store(true, Ordering::Relaxed);
    let to = crowd.began.elapsed();
    let min = scenario.min as usize;
    let is_back = |seen: &Seen| seen.running() == min && seen.active() == min;
    let is_back = look.until("after", scenario.after_max, is_back).await?;
    let back = is_back.then(|| crowd.began.elapsed());
    // Of the pool that is as it was, too, it is to be seen how fast it answers.
    look.until("quiet", scenario.lasts, |_| false).await?;
    crowd.steady_is_over.store(true, Ordering::Relaxed);
    look.finish(&crowd).await?;
    let end = crowd.began.elapsed();
    let times = Times { from, to, back, end };
    let Look { seen, told, failed, first_places, reconnects, opens_at, .. } = look;
    let mut histories: BTreeMap<String, History> = BTreeMap::new();
    (0..scenario.tables).for_each(|table| drop(histories.insert(table_name(table), History::default())));
    let mut waits = Vec::new();
    for Told { number, notes, waits: own } in told {
        let table = table_name(scenario.table_of(number as u64));
        histories.entry(table).or_default().streams.push(notes);
        waits.extend(own);
    }
    Ok(Outcome {
        scenario: scenario.clone(),
        frame_bytes: scenario.stream_bytes_per_s()? * scenario.interval.as_secs_f64(),
        times,
        seen,
        waits,
        placed: opens_at.into_iter().map(|(id, at)| (at, first_places.get(&id).cloned())).collect(),
        failed,
        reconnects,
        histories,
        verdicts: BTreeMap::new(),
    })
}

/// Which of the load a seat is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    /// It is there all the time.
    Steady,
    /// It comes with the burst.
    Burst,
}

/// All producers. Each has a seat, on which one stream comes after the other.
struct Crowd {
    scenario: Scenario,
    client: Client,
    /// Of each stream, bytes in a second.
    rate: u64,
    began: Instant,
    scope: TaskScope,
    /// Streams so far.
    begun: AtomicU64,
    /// Seats on which more streams may come.
    seats: AtomicU64,
    steady_is_over: AtomicBool,
    burst_is_over: AtomicBool,
    opened: mpsc::Sender<Opened>,
    done: mpsc::Sender<anyhow::Result<Told>>,
}

impl Crowd {
    /// Begins these seats.
    fn come(self: &Arc<Self>, seats: std::ops::Range<usize>, part: Part) {
        let count = seats.len().max(1) as f64;
        for (nth, seat) in seats.enumerate() {
            let (crowd, after) = (Arc::clone(self), COMES_WITHIN.mul_f64(nth as f64 / count));
            self.seats.fetch_add(1, Ordering::Relaxed);
            self.scope.spawn("seat", async move {
                crowd.seat(seat, part, after).await;
                crowd.seats.fetch_sub(1, Ordering::Release);
            });
        }
    }

    /// A stream comes when it is time, whether or not the one before has heard of all its records.
    async fn seat(&self, seat: usize, part: Part, after: Duration) {
        let mut random = StdRng::seed_from_u64(self.scenario.seed.wrapping_add(seat as u64));
        let mut next = Instant::now() + after;
        sleep_until(next).await;
        while !self.is_over(part) {
            let stop = Arc::new(AtomicBool::new(false));
            self.stream(&mut random, &stop);
            next += self.scenario.lasts.mul_f64(random.random_range(0.5..1.5));
            while !self.is_over(part) && Instant::now() < next {
                sleep_until(next.min(Instant::now() + LOOK_INTERVAL / 5)).await;
            }
            stop.store(true, Ordering::Relaxed);
        }
    }

    fn is_over(&self, part: Part) -> bool {
        match part {
            Part::Steady => self.steady_is_over.load(Ordering::Relaxed),
            Part::Burst => self.burst_is_over.load(Ordering::Relaxed),
        }
    }

    fn stream(&self, random: &mut StdRng, stop: &Arc<AtomicBool>) {
        let number = self.begun.fetch_add(1, Ordering::Relaxed);
        let producer = Producer {
            number: usize::try_from(number).unwrap_or(usize::MAX),
            table: table_name(self.scenario.table_of(number)),
            client: self.client.clone(),
            seed: random.random(),
            records: self.scenario.records,
            interval: self.scenario.interval,
            rate_hint: Some(self.rate),
            began: self.began,
            stop: Arc::clone(stop),
        };
        let (opened, done) = (self.opened.clone(), self.done.clone());
        self.scope.spawn("producer", async move {
            // Whoever waits has gone only when the test has failed already.
            let _ = done.send(producer.run(opened).await).await;
        });
    }
}

/// What is seen of the pool and heard of the producers.
struct Look<'a> {
    service: &'a Up,
    scenario: &'a Scenario,
    say: &'a (dyn Fn(&str) + Sync),
    began: Instant,
    opens: mpsc::Receiver<Opened>,
    ended: mpsc::Receiver<anyhow::Result<Told>>,
    seen: Vec<Seen>,
    told: Vec<Told>,
    failed: Vec<String>,
    /// When each stream had opened.
    opens_at: BTreeMap<String, Duration>,
    /// Where it was when it was first looked for.
    first_places: BTreeMap<String, String>,
    progress: BTreeMap<usize, sluice_client::Progress>,
    reconnects: u64,
}

impl<'a> Look<'a> {
    fn new(
        service: &'a Up,
        scenario: &'a Scenario,
        say: &'a (dyn Fn(&str) + Sync),
        began: Instant,
        (opens, ended): (mpsc::Receiver<Opened>, mpsc::Receiver<anyhow::Result<Told>>),
    ) -> Self {
        Self {
            service,
            scenario,
            say,
            began,
            opens,
            ended,
            seen: Vec::new(),
            told: Vec::new(),
            failed: Vec::new(),
            opens_at: BTreeMap::new(),
            first_places: BTreeMap::new(),
            progress: BTreeMap::new(),
            reconnects: 0,
        }
    }

    /// Looks until this time has passed, or sooner where all is as it should be: then true.
    async fn until(
        &mut self,
        name: &str,
        lasts: Duration,
        is_good: impl Fn(&Seen) -> bool,
    ) -> anyhow::Result<bool> {
        let end = Instant::now() + lasts;
        let mut ticks = tokio::time::interval(LOOK_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        while Instant::now() < end {
            ticks.tick().await;
            self.hear();
            let seen = Seen { at: self.began.elapsed(), pods: self.service.admin.pods().await? };
            for (stream, pod) in self.service.admin.places().await? {
                self.first_places.entry(stream).or_insert(pod);
            }
            let is_other = self.seen.last().is_none_or(|last| last.phases() != seen.phases());
            if is_other {
                (self.say)(&format!("{:>5.1} s, {name}: {seen}", seen.at.as_secs_f64()));
            }
            let good = is_good(&seen);
            self.seen.push(seen);
            if good {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Takes in what producers have to tell.
    fn hear(&mut self) {
        while let Ok(Opened { number, stream, progress }) = self.opens.try_recv() {
            self.opens_at.insert(stream, self.began.elapsed());
            self.progress.insert(number, progress);
        }
        while let Ok(told) = self.ended.try_recv() {
            self.take(told);
        }
    }

    fn take(&mut self, told: anyhow::Result<Told>) {
        match told {
            Ok(told) => {
                let progress = self.progress.remove(&told.number);
                self.reconnects += progress.map_or(0, |progress| progress.reconnects());
                self.told.push(told);
            }
            Err(error) => {
                (self.say)(&format!("a producer failed: {error:#}"));
                self.failed.push(format!("{error:#}"));
            }
        }
    }

    /// Waits until all streams have told.
    async fn finish(&mut self, crowd: &Crowd) -> anyhow::Result<()> {
        let asked = Instant::now();
        let all = loop {
            self.hear();
            // No seat, no further stream: in this order the number is the last one.
            let seats = crowd.seats.load(Ordering::Acquire);
            let (all, count) =
                (crowd.begun.load(Ordering::Relaxed) as usize, self.told.len() + self.failed.len());
            if seats == 0 && count == all {
                break all;
            }
            ensure!(
                asked.elapsed() < FINISH_TIMEOUT,
                "{count} of {all} streams finished in {FINISH_TIMEOUT:?}"
            );
            tokio::time::sleep(LOOK_INTERVAL / 5).await;
        };
        let Scenario { streams, times, .. } = self.scenario;
        ensure!(all >= streams * times, "only {all} streams came: a test of nothing");
        Ok(())
    }
}
