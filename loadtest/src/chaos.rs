//! Chaos: a pool of real processes under everything that can happen to one, by a schedule that a seed decides; then the
//! auditor judges every version of every table, and a reader that is not ours reads the last one.
//!
//! *Owns*: the run, who is down and why, what is done when.
//! *Does not own*: the schedule (`schedule`), the load (`producer`), the processes (`pool`), what is made of it (`outcome`,
//! `auditor`).
//! Tests P1 to P6 and P8 on real processes.

pub mod bugs;
mod outcome;
pub(crate) mod producer;
pub mod schedule;

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, anyhow, bail, ensure};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};
use sluice_client::Encoding;
use sluice_shared::fault::{Action, Point, Then};
use sluice_shared::lifecycle::{OnPanic, TaskScope};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep};

use crate::cluster::Process;
use crate::history::History;
use crate::judge::{self, OtherReader};
use crate::pool::{Member, Options, Pool, table_name};
use crate::volume::Volume;
pub use outcome::{Figures, Outcome};
use producer::{Kind, Producer, Told};
use schedule::{Act, Kinds, Step, World, schedule};

/// Between two looks at who has ended.
const TICK: Duration = Duration::from_millis(20);
/// A death that has not come in this time comes in the next pod.
const DEATH_WAIT: Duration = Duration::from_millis(1_500);
/// So many more drains are tried for a death in a handoff.
const HANDOFFS_MAX: usize = 5;
/// What goes wrong at a point is taken back after this.
const FAULT_LASTS: Duration = Duration::from_secs(3);
/// For all records to come into their tables once all is calm.
const FINISH_TIMEOUT: Duration = Duration::from_secs(90);
/// A pod whose log has failed ends with it.
const EXIT_LOG_FAILED: i32 = 74;
/// And one whose log holds what is in no table at the end of its drain.
const EXIT_UNDRAINED: i32 = 69;
/// One whose log was taken over ends with it.
const EXIT_FENCED: i32 = 75;
/// A pod that is to drain before it has started ends with it.
const EXIT_INTERRUPTED: i32 = 130;
/// The pod whose log is written through the page cache.
const BUFFERED: &str = "pod-2";
const ENOSPC: i32 = 28;
const EINVAL: i32 = 22;
/// What a pod of the rig is told: small segments, so that many are made and taken away; short waits.
const ENV: [(&str, &str); 6] = [
    ("SLUICE_POD__SEGMENT_BYTES", "1MiB"),
    ("SLUICE_POD__RECORD_BYTES_MAX", "100KiB"),
    ("SLUICE_POD__WAL_BYTES_MAX", "32MiB"),
    ("SLUICE_POD__FLUSH_INTERVAL_MS", "300"),
    ("SLUICE_POD__CHECKPOINT_INTERVAL", "20"),
    ("SLUICE_POD__DRAIN_TIMEOUT_MS", "5000"),
];

/// The same where its log is in the tables' store: who is gone for long is not waited for.
const OBJECT_ENV: [(&str, &str); 3] = [
    ("SLUICE_POD__LOG", "object"),
    ("SLUICE_POD__LOG_GROUP_BYTES", "512KiB"),
    ("SLUICE_POD__ADOPT_AFTER_MS", "1000"),
];

/// How hard it is.
#[derive(Debug, Clone)]
pub struct Scenario {
    /// Everything that is random comes from it, but for the machine's share.
    pub seed: u64,
    /// How long things happen.
    pub lasts: Duration,
    /// Which.
    pub kinds: Kinds,
    /// Pods.
    pub pods: usize,
    /// Gateways.
    pub gateways: usize,
    /// Tables; half of the streams go into the first.
    pub tables: usize,
    /// Streams at one time.
    pub streams: usize,
    /// Records of one send, at most.
    pub rows_max: usize,
    /// Python with `deltalake`, where there is one.
    pub python: Option<PathBuf>,
    /// Pods keep their logs in the tables' store: each start takes that of the life before over, others that of a pod that
    /// is gone for long.
    pub object_log: bool,
}

impl Scenario {
    /// Everything, in a pool of two gateways and three pods.
    pub fn seeded(seed: u64, lasts: Duration) -> Self {
        let (kinds, pods, gateways) = (Kinds::All, 3, 2);
        let python = judge::find_python();
        let (tables, streams, rows_max) = (3, 14, 16);
        Self { seed, lasts, kinds, pods, gateways, tables, streams, rows_max, python, object_log: false }
    }

    fn world(&self) -> World {
        let Self { pods, gateways, kinds, object_log, .. } = *self;
        World { pods, gateways, kinds, object_log }
    }

    /// What happens, in words.
    pub fn schedule(&self) -> Vec<Step> {
        schedule(self.seed, self.lasts, self.world())
    }

    fn kind_of(&self, stream: usize) -> Kind {
        if self.kinds == Kinds::Ends {
            let kinds = [Kind::Named(Encoding::Json), Kind::Named(Encoding::Arrow), Kind::Ephemeral];
            return kinds[stream % kinds.len()];
        }
        match stream % 7 {
            0 | 3 => Kind::Named(Encoding::Json),
            1 => Kind::Named(Encoding::Arrow),
            4 => Kind::Vanishing(Encoding::Json),
            5 => Kind::Vanishing(Encoding::Arrow),
            _ => Kind::Ephemeral,
        }
    }

    fn table_of(&self, stream: usize) -> String {
        table_name(if stream.is_multiple_of(2) { 0 } else { (1 + stream / 2) % self.tables })
    }
}

/// Runs the scenario with data below `dir`, and tells `say` where it is. The thread that calls must outlive it, and be
/// the one that polls it.
///
/// # Errors
/// A process that ends for no reason, or does not start; a table that cannot be read. Broken promises and streams that
/// fail are not errors here: they are in the outcome.
pub async fn run(
    sluice: &Path,
    dir: &Path,
    scenario: &Scenario,
    say: &(dyn Fn(&str) + Sync),
) -> anyhow::Result<Outcome> {
    let steps = scenario.schedule();
    steps.iter().for_each(|step| say(&step.to_string()));
    let mut figures = Figures { deaths: scenario.world().deaths(), ..Figures::default() };
    let volume = mount(dir, scenario, &mut figures);
    let of_log: &[_] = if scenario.object_log { &OBJECT_ENV } else { &[] };
    let env = [ENV.as_slice(), of_log].concat();
    let options = Options {
        env: &env,
        faults: true,
        cuts: scenario.kinds == Kinds::All,
        ..Options::new(sluice, dir, scenario.pods, scenario.gateways)
    };
    let buffered = Action { times: 0, then: Then::Fail(EINVAL), ..Action::default() };
    options.faults_of(&Member::Pod(BUFFERED.to_owned())).arm(Point::WalProbe, &buffered)?;
    let pool = Pool::start(&options).await?;
    let mut run = Run::new(pool, scenario, say, volume, figures);
    let ran = run.all(&steps).await;
    let told = ran.map_err(|error| anyhow!("{error:#}\n{}", run.pool.log_tails()))?;
    run.count()?;
    let Run { pool, mut figures, volume, .. } = run;
    let names: Vec<String> = (0..scenario.tables).map(table_name).collect();
    let dirs: BTreeMap<String, (PathBuf, PathBuf)> = names
        .into_iter()
        .map(|name| (name.clone(), (pool.table_dir(&name), pool.history_dir(&name))))
        .collect();
    say("all streams have ended: the pool drains");
    pool.drain().await?;
    say("the auditor reads");
    told.iter().for_each(|told| figures.add(told));
    let mut outcome =
        Outcome { seed: scenario.seed, lasts: scenario.lasts, verdicts: BTreeMap::new(), figures };
    let other = OtherReader::new(scenario.python.as_deref());
    if other.is_none() {
        outcome.figures.skip("a reader that is not ours (no Python with deltalake)");
    }
    for (name, (table_dir, history_dir)) in dirs {
        let history = History::read(&history_dir)?;
        outcome.figures.records += history.sent();
        let verdict = judge::judge_dir(&table_dir, &history, other.as_ref());
        outcome.verdicts.insert(name.clone(), verdict.with_context(|| format!("table {name}"))?);
    }
    drop(volume); // the tables are on it
    Ok(outcome)
}

/// A volume for all that pods keep, where the machine allows it.
fn mount(dir: &Path, scenario: &Scenario, figures: &mut Figures) -> Option<Volume> {
    if scenario.kinds != Kinds::All {
        return None;
    }
    let made = std::fs::create_dir_all(dir).map_err(anyhow::Error::from);
    match made.and_then(|()| Volume::mount(&dir.join("volume.ext4"), &dir.join("data"))) {
        Ok(volume) => Some(volume),
        Err(why) => {
            figures.skip(&format!("power loss, and a disk that is really full ({why:#})"));
            None
        }
    }
}

/// What is to be done at some time.
#[derive(Debug)]
enum Later {
    Start(Member),
    Continue(Member),
    /// A death that has not come is to come elsewhere: so many pods are left to try.
    Die(Member, Point, usize),
    /// The same of a gateway: so many drains are left to try.
    DieInHandoff(Member, Point, usize),
    Disarm(Member, Point),
    /// A storm goes on: so many kills are left.
    Storm(Member, u32),
    Empty,
}

struct Run<'a> {
    pool: Pool,
    scenario: &'a Scenario,
    say: &'a (dyn Fn(&str) + Sync),
    volume: Option<Volume>,
    /// The machine's share of chance: how long who is down stays down.
    random: StdRng,
    began: Instant,
    later: Vec<(Instant, Later)>,
    /// SIGTERM was sent to them.
    draining: BTreeSet<Member>,
    /// Until then they may fail, for that was asked for: to start, or by their logs.
    failing: BTreeMap<Member, Instant>,
    figures: Figures,
}

impl<'a> Run<'a> {
    fn new(
        pool: Pool,
        scenario: &'a Scenario,
        say: &'a (dyn Fn(&str) + Sync),
        volume: Option<Volume>,
        figures: Figures,
    ) -> Self {
        Self {
            pool,
            scenario,
            say,
            volume,
            random: StdRng::seed_from_u64(!scenario.seed),
            began: Instant::now(),
            later: Vec::new(),
            draining: BTreeSet::new(),
            failing: BTreeMap::new(),
            figures,
        }
    }

    /// On a slow machine a pod alone may be starting each time that it is to drain: where nothing but its ends is looked at, it
    /// is waited for, and all that follows comes later.
    fn is_early(&mut self, step: &Step) -> bool {
        let ends = self.scenario.kinds == Kinds::Ends;
        matches!(&step.act, Act::Drain(member) if ends && !self.is_ready(member))
    }

    async fn all(&mut self, steps: &[Step]) -> anyhow::Result<Vec<Told>> {
        self.pool.make_tables(self.scenario.tables).await?;
        let (scope, stop) = (TaskScope::new(OnPanic::EndTask), Arc::new(AtomicBool::new(false)));
        let mut ended = self.start_producers(&scope, &stop);
        self.began = Instant::now();
        let mut late = Duration::ZERO;
        for step in steps {
            while self.began.elapsed() < step.at + late {
                self.tick().await?;
            }
            let due = Instant::now();
            while self.is_early(step) && due.elapsed() < FINISH_TIMEOUT {
                self.tick().await?;
            }
            late += due.elapsed();
            self.act(&step.act).with_context(|| step.to_string())?;
        }
        while self.began.elapsed() < self.scenario.lasts {
            self.tick().await?;
        }
        (self.say)("calm: all that is down starts again");
        self.calm().await?;
        if self.scenario.pods > 1 {
            (self.say)("the pod with the most streams hands them over");
            self.hand_over().await?;
            self.calm().await?;
        }
        stop.store(true, Ordering::Relaxed);
        let mut told = Vec::new();
        let mut since = Instant::now();
        while told.len() < self.scenario.streams {
            match tokio::time::timeout(TICK, ended.recv()).await {
                Ok(next) => {
                    told.push(next.context("a producer panicked")?);
                    since = Instant::now();
                }
                // Also now one may die, of what it had met before it was taken back.
                Err(_) => self.tick().await?,
            }
            ensure!(since.elapsed() < 2 * FINISH_TIMEOUT, "producers have not ended in time");
        }
        self.until_taken_over().await?;
        Ok(told)
    }

    /// Of logs in the tables' store those of the pods that run alone are left, once all others are committed.
    async fn until_taken_over(&mut self) -> anyhow::Result<()> {
        let asked = Instant::now();
        while self.scenario.object_log {
            let logs = self.pool.object_logs()?;
            if logs.len() == self.scenario.pods {
                break;
            }
            ensure!(asked.elapsed() < FINISH_TIMEOUT, "not all logs were taken over: {logs:?}");
            self.tick().await?;
        }
        Ok(())
    }

    fn start_producers(&self, scope: &TaskScope, stop: &Arc<AtomicBool>) -> mpsc::Receiver<Told> {
        let mut random = StdRng::seed_from_u64(self.scenario.seed);
        let (done, ended) = mpsc::channel(self.scenario.streams);
        for number in 0..self.scenario.streams {
            let producer = Producer {
                number,
                table: self.scenario.table_of(number),
                kind: self.scenario.kind_of(number),
                urls: self.pool.urls(number),
                rows_max: self.scenario.rows_max,
                history: self.pool.history_dir(&self.scenario.table_of(number)),
                seed: random.random(),
                stop: Arc::clone(stop),
            };
            let done = done.clone();
            scope.spawn("producer", async move {
                // Whoever waits has gone only when the test has failed already.
                let _ = done.send(producer.run(FINISH_TIMEOUT).await).await;
            });
        }
        ended
    }

    /// Looks who has ended, and does what is due.
    async fn tick(&mut self) -> anyhow::Result<()> {
        for member in self.pool.members() {
            let ended = self.pool.process(&member).map(|process| process.ended()).transpose()?.flatten();
            if let Some(status) = ended {
                self.ended(&member, status)?;
                self.is_down(member);
            }
        }
        let now = Instant::now();
        let (due, later) = std::mem::take(&mut self.later).into_iter().partition(|(at, _)| *at <= now);
        self.later = later;
        let due: Vec<(Instant, Later)> = due;
        for (_, due) in due {
            self.do_later(due)?;
        }
        sleep(TICK).await;
        Ok(())
    }

    fn at(&mut self, wait: Duration, what: Later) {
        self.later.push((Instant::now() + wait, what));
    }

    /// It starts again after a while; what was to be continued is not there any more.
    fn is_down(&mut self, member: Member) {
        self.later.retain(|(_, later)| !matches!(later, Later::Continue(of) if *of == member));
        let longest = if self.scenario.kinds == Kinds::All { 1_200 } else { 100 };
        let wait = Duration::from_millis(self.random.random_range(0..longest));
        self.at(wait, Later::Start(member));
    }

    /// Takes note of an end that nobody has brought about from here, unless there is a reason.
    fn ended(&mut self, member: &Member, status: ExitStatus) -> anyhow::Result<()> {
        let process = self.pool.take(member);
        let was_ready = process.as_ref().is_some_and(Process::is_ready);
        let killed = self.pool.faults(member).take_killed()?;
        let was_draining = self.draining.remove(member);
        let may_fail = matches!(member, Member::Pod(_)) && self.may_fail(member);
        // Before it can hear a signal that ends it.
        let is_interrupted = |status: ExitStatus| {
            status.code() == Some(EXIT_INTERRUPTED) || status.signal() == Some(libc::SIGTERM)
        };
        if let Some(point) = killed.filter(|_| status.signal() == Some(libc::SIGABRT)) {
            self.died(member, point, was_ready);
        } else if was_draining && (status.success() || status.code() == Some(EXIT_UNDRAINED)) {
            // Where another pod is down, what waits for its log stays behind until the next start.
            self.figures.drains += 1;
        } else if was_draining && !was_ready && is_interrupted(status) {
            self.figures.count("start interrupted");
        } else if self.scenario.object_log && status.code() == Some(EXIT_FENCED) {
            self.figures.count("pods fenced");
        } else if may_fail && status.code() == Some(EXIT_LOG_FAILED) {
            self.figures.count("log failed");
        } else if may_fail && !was_ready {
            self.figures.count("start failed");
        } else {
            let log = process.map(|process| process.log_tail()).unwrap_or_default();
            bail!("{member} has ended by itself: {status}\n{log}");
        }
        Ok(())
    }

    fn do_later(&mut self, due: Later) -> anyhow::Result<()> {
        match due {
            Later::Start(member) => self.start(member),
            Later::Continue(member) => self.signal(&member, libc::SIGCONT),
            Later::Die(member, point, left) => {
                if self.pool.faults(&member).disarm(point)? && left > 0 {
                    self.die(self.next(&member), point, left - 1)?;
                }
                Ok(())
            }
            Later::DieInHandoff(member, point, left) => {
                if self.pool.faults(&member).disarm(point)? && left > 0 {
                    self.die_in_handoff(self.next(&member), point, left - 1)?;
                }
                Ok(())
            }
            Later::Disarm(member, point) => self.pool.faults(&member).disarm(point).map(|_| ()),
            Later::Storm(member, left) => self.storm(&member, left),
            Later::Empty => self.volume.as_ref().map_or(Ok(()), Volume::empty),
        }
    }

    /// Others go on while a pod starts: what it waits for may be theirs to give back. How it ends is seen as later ends are.
    fn start(&mut self, member: Member) -> anyhow::Result<()> {
        if self.pool.process(&member).is_some() {
            return Ok(());
        }
        let Err(error) = self.pool.launch_member(&member) else { return Ok(()) };
        let point = self.pool.faults(&member).take_killed()?.ok_or(error)?;
        self.died(&member, point, false);
        self.is_down(member);
        Ok(())
    }

    fn died(&mut self, member: &Member, point: Point, was_ready: bool) {
        let when = if was_ready { "" } else { ", while it started" };
        (self.say)(&format!("{member} has died at {}{when}", point.name()));
        self.figures.died(member, point);
    }

    fn may_fail_for(&mut self, member: &Member, lasts: Duration) {
        self.failing.insert(member.clone(), Instant::now() + lasts + FAULT_LASTS);
    }

    fn may_fail(&self, member: &Member) -> bool {
        self.failing.get(member).is_some_and(|until| Instant::now() < *until)
    }

    fn signal(&mut self, member: &Member, signal: i32) -> anyhow::Result<()> {
        self.pool.process(member).map_or(Ok(()), |process| process.signal(signal))
    }

    /// Whether it ran until now.
    fn kill(&mut self, member: &Member) -> anyhow::Result<bool> {
        let Some(process) = self.pool.take(member) else { return Ok(false) };
        let status = process.end()?;
        if status.signal() == Some(libc::SIGKILL) {
            self.draining.remove(member);
            self.figures.killed(member);
        } else {
            self.ended(member, status)?;
        }
        self.is_down(member.clone());
        Ok(true)
    }

    fn storm(&mut self, member: &Member, left: u32) -> anyhow::Result<()> {
        let was_there = self.kill(member)?;
        if left > 1 {
            let wait = Duration::from_millis(self.random.random_range(20..300));
            self.at(wait, Later::Storm(member.clone(), if was_there { left - 1 } else { left }));
            if was_there {
                self.later.retain(|(_, later)| !matches!(later, Later::Start(of) if of == member));
                self.start(member.clone())?;
            }
        }
        Ok(())
    }

    fn drain(&mut self, member: &Member) -> anyhow::Result<()> {
        // A second signal would hurry it, which is another way to end.
        if self.pool.process(member).is_some() && !self.draining.contains(member) {
            self.signal(member, libc::SIGTERM)?;
            self.draining.insert(member.clone());
        }
        Ok(())
    }

    fn die(&mut self, member: Member, point: Point, left: usize) -> anyhow::Result<()> {
        self.pool.faults(&member).arm(point, &Action::once(Then::Kill))?;
        let mut wait = DEATH_WAIT;
        if is_of_starts(point) {
            // It comes after a while.
            self.kill(&member)?;
            wait *= 2;
        }
        self.at(wait, Later::Die(member, point, left));
        Ok(())
    }

    /// It dies while a pod hands over its streams, if one of them is its own: else the next one does.
    fn die_in_handoff(&mut self, member: Member, point: Point, left: usize) -> anyhow::Result<()> {
        self.pool.faults(&member).arm(point, &Action::once(Then::Kill))?;
        // One that starts, or drains already, has nothing to hand over.
        let ready: Vec<Member> = self.pods().into_iter().filter(|pod| self.is_ready(pod)).collect();
        if let Some(pod) = ready.choose(&mut self.random) {
            self.drain(pod)?;
        }
        self.at(DEATH_WAIT, Later::DieInHandoff(member, point, left));
        Ok(())
    }

    /// The next one of its kind.
    fn next(&self, member: &Member) -> Member {
        let kind = std::mem::discriminant(member);
        let of_kind = |other: &Member| std::mem::discriminant(other) == kind;
        let all: Vec<Member> = self.pool.members().into_iter().filter(of_kind).collect();
        let place = all.iter().position(|other| other == member).unwrap_or(0);
        all[(place + 1) % all.len()].clone()
    }

    fn act(&mut self, act: &Act) -> anyhow::Result<()> {
        match act {
            // Where nothing else happens, drains come to their ends.
            Act::Kill(member) if self.scenario.kinds == Kinds::Ends && self.draining.contains(member) => {
                Ok(())
            }
            Act::Kill(member) => self.kill(member).map(|_| ()),
            Act::Away(member, lasts) => {
                self.kill(member)?;
                self.later.retain(|(_, later)| !matches!(later, Later::Start(of) if of == member));
                self.at(*lasts, Later::Start(member.clone()));
                Ok(())
            }
            Act::Storm(member, times) => self.storm(member, *times),
            Act::Stop(member, lasts) => {
                if self.pool.process(member).is_some() {
                    self.signal(member, libc::SIGSTOP)?;
                    self.figures.count("stopped");
                    self.at(*lasts, Later::Continue(member.clone()));
                }
                Ok(())
            }
            Act::Drain(member) => self.drain(member),
            Act::DrainInCrash { drains, dies } => {
                self.kill(dies)?;
                self.drain(drains)
            }
            Act::Die(member, point) => self.die(member.clone(), *point, self.scenario.pods - 1),
            Act::DieInHandoff(member, point) => self.die_in_handoff(member.clone(), *point, HANDOFFS_MAX),
            Act::Fault(member, point, action) => self.fault(member, *point, action),
            Act::Cut(member, bytes) => {
                self.pool.cutter_of(member).iter().for_each(|cutter| cutter.cut_after(*bytes));
                Ok(())
            }
            Act::Clock(member, ms) => {
                self.figures.count("clock wrong");
                self.pool.faults(member).set_clock(*ms)
            }
            Act::FullDisk(lasts) => self.full_disk(*lasts),
            Act::PowerLoss => self.power_loss(),
        }
    }

    fn fault(&mut self, member: &Member, point: Point, action: &Action) -> anyhow::Result<()> {
        // Only one log is written so that its flush is a step of its own.
        let member =
            &if point == Point::WalFlushBefore { Member::Pod(BUFFERED.to_owned()) } else { member.clone() };
        if action.then != Then::GoOn {
            self.may_fail_for(member, FAULT_LASTS);
        }
        self.pool.faults(member).arm(point, action)?;
        self.at(FAULT_LASTS, Later::Disarm(member.clone(), point));
        Ok(())
    }

    fn is_ready(&mut self, member: &Member) -> bool {
        !self.draining.contains(member) && self.pool.process(member).is_some_and(|process| process.is_ready())
    }

    fn pods(&self) -> Vec<Member> {
        self.pool.members().into_iter().filter(|member| matches!(member, Member::Pod(_))).collect()
    }

    fn full_disk(&mut self, lasts: Duration) -> anyhow::Result<()> {
        let Some(volume) = &self.volume else {
            let point = if self.scenario.object_log { Point::StoreLog } else { Point::WalCreate };
            let action = Action { times: 10, then: Then::Fail(ENOSPC), ..Action::default() };
            return self.pods().iter().try_for_each(|pod| self.fault(pod, point, &action));
        };
        volume.fill()?;
        // A pod that starts on a full disk may not find the room for its identity.
        self.pods().iter().for_each(|pod| self.may_fail_for(pod, lasts));
        self.figures.count("disk full");
        self.at(lasts, Later::Empty);
        Ok(())
    }

    fn power_loss(&mut self) -> anyhow::Result<()> {
        let Some(volume) = &self.volume else { return Ok(()) };
        volume.lose_power()?;
        self.figures.count("power lost");
        // The power of the whole machine, not of its disk alone.
        for pod in self.pods() {
            self.may_fail_for(&pod, Duration::ZERO);
            self.kill(&pod)?;
        }
        let volume = self.volume.as_mut().context("it was there")?;
        volume.unmount()?;
        volume.mount_again()?;
        volume.empty()
    }

    /// Nothing happens any more, and all run and see each other.
    async fn calm(&mut self) -> anyhow::Result<()> {
        for member in self.pool.members() {
            let faults = self.pool.faults(&member);
            let is_wanted = |point: &&Point| **point != Point::WalProbe;
            for point in Point::ALL.iter().filter(is_wanted) {
                faults.disarm(*point)?;
            }
            self.pool.cutter_of(&member).iter().for_each(|cutter| cutter.leave_alone());
            self.signal(&member, libc::SIGCONT)?;
        }
        self.volume.as_ref().map_or(Ok(()), Volume::empty)?;
        self.later.retain(|(_, later)| matches!(later, Later::Start(_)));
        let asked = Instant::now();
        loop {
            // First: one may have died just now, at what was taken back above.
            self.tick().await?;
            if self.later.is_empty() && self.draining.is_empty() && self.is_whole().await {
                return Ok(());
            }
            if asked.elapsed() > FINISH_TIMEOUT {
                bail!(
                    "the pool is not whole again; draining: {:?}; to come: {:?}",
                    self.draining,
                    self.later
                );
            }
        }
    }

    /// Drains the pod with the most streams, so that some are handed over whatever has become of earlier drains.
    async fn hand_over(&mut self) -> anyhow::Result<()> {
        let asked = Instant::now();
        loop {
            let mut streams = BTreeMap::<String, usize>::new();
            for (_, admin) in self.pool.admins() {
                // One that does not answer is about to be found dead.
                let places = admin.places().await.unwrap_or_default();
                places.into_values().for_each(|pod| *streams.entry(pod).or_default() += 1);
            }
            let fullest = streams.into_iter().max_by_key(|(_, streams)| *streams);
            if let Some(pod) = fullest.map(|(pod, _)| Member::Pod(pod)).filter(|pod| self.is_ready(pod)) {
                return self.drain(&pod);
            }
            ensure!(asked.elapsed() < FINISH_TIMEOUT, "no pod has a stream");
            self.tick().await?;
        }
    }

    /// Whether all run, and all gateways see all pods active.
    async fn is_whole(&mut self) -> bool {
        for member in self.pool.members() {
            if !self.is_ready(&member) {
                return false;
            }
            // A gateway that does not answer is about to be found dead.
            if let Member::Pod(id) = &member
                && !matches!(self.pool.sees_otherwise(id, "active").await, Ok(None))
            {
                return false;
            }
        }
        true
    }

    /// Takes what the processes and the cutters have counted.
    fn count(&mut self) -> anyhow::Result<()> {
        for member in self.pool.members() {
            self.figures.passed(&self.pool.faults(&member).counts()?);
            self.figures.cuts += self.pool.cutter_of(&member).map_or(0, |cutter| cutter.cuts());
        }
        Ok(())
    }
}

/// Whether a pod comes to a point when it starts, and finds the log of its former life: seldom else.
fn is_of_starts(point: Point) -> bool {
    use Point::{AdoptAfter, AdoptBefore, AdoptNoted, AdoptSealed, LogDelete, WalReplay};
    matches!(point, WalReplay | AdoptBefore | AdoptSealed | AdoptAfter | AdoptNoted | LogDelete)
}
