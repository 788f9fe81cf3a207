//! A pool in virtual time: pods, gateways with their views, streams that come, go, grow heavy and are moved.
//!
//! Decisions are those of the service: `placement::place` on a `PoolView` of each gateway, `Shedder` on each pod. What is
//! made up is the world: who sends how much, when reports arrive, what dies. The same seed gives the same history.
//!
//! *Owns*: the world, its events and their order.
//! *Does not own*: any rule of placing or shedding; what is measured (`figures`); policies to compare with (`policy`).

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use sluice_pod::shed::{Shedder, StreamLoad};
use sluice_shared::ids::{PodId, TableName};
use sluice_shared::pool::{
    CAPACITY_BYTES_PER_S, LoadReport, PodView, PoolView, TABLES_REPORTED_MAX, TableLoad,
};

use super::figures::Figures;
use super::policy::{Asked, Gateway, Policy};

/// When the pool is filled; nothing before that is measured.
pub(super) const FILLED_S: f64 = 60.0;
/// How often figures are taken.
const SAMPLE_S: f64 = 1.0;
/// Lost streams are back on a pod within so much.
const LOST_S: f64 = 0.5;
/// Until membership says that a pod is dead.
const GOSSIP_S: f64 = 1.0;
/// Streams that had to reconnect do so within so much.
const RECONNECT_S: f64 = 3.0;
/// Which share of streams that is.
const RECONNECT_SHARE: f64 = 0.25;
/// A handoff takes so long.
const HANDOFF_S: f64 = 0.2;

/// How large, and what happens.
#[derive(Debug, Clone)]
pub struct Scenario {
    /// Of everything that is drawn.
    pub seed: u64,
    /// How many at the start.
    pub pods: usize,
    /// How many.
    pub gateways: usize,
    /// How many.
    pub tables: usize,
    /// Streams that are open at one time, on average.
    pub streams: usize,
    /// Load of the mean pod.
    pub load: f64,
    /// Seconds from one report of a pod to the next.
    pub report_every_s: f64,
    /// Seconds that a report is on its way.
    pub report_late_s: f64,
    /// Who decides.
    pub policy: Policy,
    /// When a quarter of the streams lose their connection.
    pub storm_at_s: f64,
    /// When a pod dies.
    pub death_at_s: f64,
    /// When pods join.
    pub join_at_s: f64,
    /// How many.
    pub joiners: usize,
    /// How long it goes on.
    pub until_s: f64,
}

/// Exponent of the tables' popularity.
const ZIPF: f64 = 1.05;
/// Sigma of the logarithm of streams' rates.
const RATE_SIGMA: f64 = 1.2;
/// A stream's mean life.
const LIFE_S: f64 = 1800.0;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// A producer that was never there before opens a stream.
    Arrive,
    /// A stream is placed, anew or again.
    Open(u32),
    /// Its producer closes it.
    Close(u32),
    /// A pod makes a report, if it is still alive.
    Report(u32),
    /// A report arrives.
    Deliver(u32),
    /// A pod hands a stream off.
    Leave(u32),
    Sample,
    Storm,
    Death,
    Join,
    /// Membership reaches all.
    Members,
}

/// One stream.
pub(super) struct Stream {
    table: u32,
    /// What it sends, as a fraction of a pod's capacity. Known to nobody when it opens.
    load: f64,
    gateway: u32,
    pod: Option<u32>,
    last_pod: Option<u32>,
    /// Where its pod lists it.
    place: u32,
    opened_s: f64,
    is_handed_off: bool,
    moved_s: Option<f64>,
    is_closed: bool,
}

/// One pod.
pub(super) struct Pod {
    id: PodId,
    pub(super) is_alive: bool,
    joined_s: f64,
    pub(super) load: f64,
    streams: Vec<u32>,
    /// Load and streams of each table.
    tables: BTreeMap<u32, (f64, u32)>,
    sequence: u64,
    shedder: Shedder,
    reports: Vec<LoadReport>,
}

/// All of it.
pub struct World {
    scenario: Scenario,
    start: Instant,
    now_s: f64,
    /// Of producers: the same whoever decides and whenever reports come.
    rng: StdRng,
    /// Of all else.
    chance: StdRng,
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    scheduled: u64,
    pub(super) pods: Vec<Pod>,
    streams: Vec<Stream>,
    tables: Vec<TableName>,
    /// Cumulated shares of the tables.
    shares: Vec<f64>,
    gateways: Vec<Gateway>,
    /// The pool as pods see it.
    view: PoolView,
    pub(super) figures: Figures,
}

impl World {
    /// The world at its beginning.
    pub fn new(scenario: Scenario) -> Self {
        let rng = StdRng::seed_from_u64(scenario.seed);
        let tables = (0..scenario.tables).map(|n| name(&format!("table_{n}"))).collect();
        let shares = shares(scenario.tables);
        let pods: Vec<Pod> = (0..scenario.pods).map(|n| Pod::new(n, f64::NEG_INFINITY)).collect();
        let mut view = PoolView::new(pods.iter().map(|pod| pod.view(0.0)));
        view.gateways = u32::try_from(scenario.gateways).unwrap_or(u32::MAX);
        let views = if scenario.policy.has_own_views() { scenario.gateways } else { 1 };
        let gateways = (0..views).map(|n| Gateway::new(view.clone(), scenario.seed ^ n as u64)).collect();
        let figures = Figures::new(&scenario);
        let mut world = Self {
            start: Instant::now(),
            now_s: 0.0,
            rng,
            chance: StdRng::seed_from_u64(!scenario.seed),
            events: BinaryHeap::new(),
            scheduled: 0,
            pods,
            streams: Vec::new(),
            tables,
            shares,
            gateways,
            view,
            figures,
            scenario,
        };
        world.schedule_all();
        world
    }

    /// Lets it go on to its end, and answers what was measured.
    pub fn run(mut self) -> Figures {
        while let Some(Reverse((at_us, _, event))) = self.events.pop() {
            self.now_s = at_us as f64 / 1e6;
            if self.now_s > self.scenario.until_s {
                break;
            }
            self.happen(event);
        }
        self.figures
    }

    fn schedule_all(&mut self) {
        for _ in 0..self.scenario.streams {
            let at = self.rng.random_range(0.0..FILLED_S);
            self.at(at, Event::Arrive);
        }
        let every_s = LIFE_S / self.scenario.streams as f64;
        let mut at = 0.0;
        while at < self.scenario.until_s {
            at += self.exponential(every_s);
            self.at(at, Event::Arrive);
        }
        for pod in 0..self.scenario.pods {
            let at = self.chance.random_range(0.0..self.scenario.report_every_s);
            self.at(at, Event::Report(pod as u32));
        }
        self.at(FILLED_S, Event::Sample);
        self.at(self.scenario.storm_at_s, Event::Storm);
        self.at(self.scenario.death_at_s, Event::Death);
        self.at(self.scenario.join_at_s, Event::Join);
    }

    fn at(&mut self, at_s: f64, event: Event) {
        // Of two at one time the one that was scheduled first comes first.
        self.scheduled += 1;
        self.events.push(Reverse(((at_s * 1e6) as u64, self.scheduled, event)));
    }

    fn after(&mut self, seconds: f64, event: Event) {
        self.at(self.now_s + seconds, event);
    }

    fn exponential(&mut self, mean: f64) -> f64 {
        let u: f64 = self.rng.random_range(f64::EPSILON..1.0);
        -mean * u.ln()
    }

    fn instant(&self) -> Instant {
        self.start + Duration::from_secs_f64(self.now_s)
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Arrive => self.arrive(),
            Event::Open(stream) => self.open(stream),
            Event::Close(stream) => self.close(stream),
            Event::Report(pod) => self.make_report(pod),
            Event::Deliver(pod) => self.deliver(pod),
            Event::Leave(stream) => self.leave(stream),
            Event::Sample => self.sample(),
            Event::Storm => self.storm(),
            Event::Death => self.death(),
            Event::Join => self.join(),
            Event::Members => self.tell_members(),
        }
    }

    fn arrive(&mut self) {
        let table = draw_table(&self.shares, &mut self.rng) as u32;
        let mean = self.scenario.load * self.scenario.pods as f64 / self.scenario.streams as f64;
        let load = (mean.ln() - RATE_SIGMA * RATE_SIGMA / 2.0 + RATE_SIGMA * self.normal()).exp();
        let gateway = self.rng.random_range(0..self.scenario.gateways) as u32;
        let stream = self.streams.len() as u32;
        self.streams.push(Stream {
            table,
            load,
            gateway,
            pod: None,
            last_pod: None,
            place: 0,
            opened_s: self.now_s,
            is_handed_off: false,
            moved_s: None,
            is_closed: false,
        });
        let life = self.exponential(LIFE_S);
        if self.now_s + life < self.scenario.until_s {
            self.after(life, Event::Close(stream));
        }
        self.open(stream);
    }

    /// By Box and Muller.
    fn normal(&mut self) -> f64 {
        let (u, v): (f64, f64) = (self.rng.random_range(f64::EPSILON..1.0), self.rng.random_range(0.0..1.0));
        (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()
    }

    fn open(&mut self, number: u32) {
        let stream = &self.streams[number as usize];
        if stream.is_closed || stream.pod.is_some() {
            return;
        }
        // A session hands its stream off, and replays it after a death: it has seen what the stream sends, and which
        // pod it has to leave. A producer that comes back says nothing but who it is.
        let leaves =
            stream.is_handed_off || stream.last_pod.is_some_and(|pod| !self.pods[pod as usize].is_alive);
        let last_pod = stream.last_pod.map(|pod| self.pods[pod as usize].id.clone());
        let asked = Asked {
            table: &self.tables[stream.table as usize],
            last_pod: last_pod.as_ref().filter(|_| !leaves),
            tried: last_pod.as_slice().get(..usize::from(leaves)).unwrap_or_default(),
            rate_bytes_per_s: leaves.then_some((stream.load * CAPACITY_BYTES_PER_S) as u64),
        };
        let gateway = stream.gateway as usize % self.gateways.len();
        let now = self.instant();
        let chosen = self.scenario.policy.choose(&mut self.gateways[gateway], &asked, now);
        let Some(chosen) = chosen.and_then(|id| number_of(&id)) else {
            self.figures.refused += 1;
            self.after(1.0, Event::Open(number));
            return;
        };
        if !self.pods[chosen].is_alive {
            self.after(0.05, Event::Open(number));
            return;
        }
        self.attach(number, chosen as u32);
    }

    fn attach(&mut self, number: u32, chosen: u32) {
        let (pod, stream) = (&mut self.pods[chosen as usize], &mut self.streams[number as usize]);
        if stream.last_pod.is_some() && !stream.is_handed_off {
            self.figures.came_back(self.now_s, stream.last_pod == Some(chosen));
        }
        stream.pod = Some(chosen);
        stream.place = pod.streams.len() as u32;
        stream.opened_s = self.now_s;
        pod.streams.push(number);
        pod.load += stream.load;
        let table = pod.tables.entry(stream.table).or_default();
        *table = (table.0 + stream.load, table.1 + 1);
        self.figures.placed += 1;
    }

    fn detach(&mut self, number: u32) {
        let stream = &mut self.streams[number as usize];
        let Some(holder) = stream.pod.take() else { return };
        stream.last_pod = Some(holder);
        let (table, load, place) = (stream.table, stream.load, stream.place);
        let pod = &mut self.pods[holder as usize];
        pod.streams.swap_remove(place as usize);
        let moved = pod.streams.get(place as usize).copied();
        pod.load = if pod.streams.is_empty() { 0.0 } else { pod.load - load };
        if let Some(of_table) = pod.tables.get_mut(&table) {
            *of_table = (of_table.0 - load, of_table.1 - 1);
            if of_table.1 == 0 {
                pod.tables.remove(&table);
            }
        }
        if let Some(moved) = moved {
            self.streams[moved as usize].place = place;
        }
    }

    fn close(&mut self, number: u32) {
        self.detach(number);
        self.streams[number as usize].is_closed = true;
    }

    fn make_report(&mut self, number: u32) {
        let pod = &mut self.pods[number as usize];
        if !pod.is_alive {
            return;
        }
        let report = pod.report(&self.tables, self.scenario.report_late_s);
        pod.reports.push(report);
        self.after(self.scenario.report_late_s, Event::Deliver(number));
        // A tenth of jitter, so that pods do not stay in step.
        let jitter = self.chance.random_range(0.9..1.1);
        self.after(self.scenario.report_every_s * jitter, Event::Report(number));
    }

    fn deliver(&mut self, number: u32) {
        let now = self.instant();
        let pod = &mut self.pods[number as usize];
        let report = pod.reports.remove(0);
        for gateway in &mut self.gateways {
            gateway.view.report(&pod.id, report.clone(), now);
        }
        if !self.scenario.policy.sheds() {
            return;
        }
        self.view.report(&pod.id, report, now);
        self.view.advance(now);
        self.shed(number);
    }

    fn shed(&mut self, number: u32) {
        let now = self.instant();
        let (now_s, streams, tables) = (self.now_s, &self.streams, &self.tables);
        let pod = &mut self.pods[number as usize];
        let Some(excess) = pod.shedder.observe(&pod.id, &self.view, now).filter(|_| pod.is_alive) else {
            return;
        };
        let of = |number: &u32| {
            let stream = &streams[*number as usize];
            StreamLoad {
                stream: *number,
                table: &tables[stream.table as usize],
                bytes_per_s: stream.load * CAPACITY_BYTES_PER_S,
                open_for: Duration::from_secs_f64(now_s - stream.opened_s),
                is_resumed: stream.last_pod.is_some(),
            }
        };
        let loads: Vec<_> = pod.streams.iter().map(of).collect();
        let chosen = pod.shedder.choose(excess, (&pod.id, &self.view), &loads, now);
        for stream in chosen {
            self.figures.moved(now_s, self.streams[stream as usize].moved_s);
            self.streams[stream as usize].moved_s = Some(now_s);
            self.after(HANDOFF_S, Event::Leave(stream));
        }
    }

    fn leave(&mut self, number: u32) {
        if self.streams[number as usize].pod.is_none() {
            return;
        }
        self.detach(number);
        self.streams[number as usize].is_handed_off = true;
        self.open(number);
    }

    fn storm(&mut self) {
        for number in 0..self.streams.len() as u32 {
            let is_open = self.streams[number as usize].pod.is_some();
            if is_open && self.rng.random_bool(RECONNECT_SHARE) {
                self.detach(number);
                let gateway = self.rng.random_range(0..self.scenario.gateways) as u32;
                let stream = &mut self.streams[number as usize];
                (stream.gateway, stream.is_handed_off) = (gateway, false);
                let after = self.rng.random_range(0.0..RECONNECT_S);
                self.after(after, Event::Open(number));
            }
        }
    }

    /// Of the first half of the pods one dies, whichever.
    fn death(&mut self) {
        let dies = self.rng.random_range(0..self.pods.len().div_ceil(2));
        self.pods[dies].is_alive = false;
        let id = self.pods[dies].id.clone();
        for gateway in &mut self.gateways {
            gateway.view.update(&id, |pod| pod.aside = true);
        }
        for number in self.pods[dies].streams.clone() {
            self.detach(number);
            self.streams[number as usize].is_handed_off = false;
            let after = self.rng.random_range(0.0..LOST_S);
            self.after(after, Event::Open(number));
        }
        self.after(GOSSIP_S, Event::Members);
    }

    fn join(&mut self) {
        for _ in 0..self.scenario.joiners {
            let number = self.pods.len();
            self.pods.push(Pod::new(number, self.now_s));
            self.after(0.1, Event::Report(number as u32));
        }
        self.tell_members();
    }

    fn tell_members(&mut self) {
        let now = self.instant();
        let members = || {
            self.pods.iter().filter(|pod| pod.is_alive).map(|pod| pod.view(self.now_s)).collect::<Vec<_>>()
        };
        self.view.set_members(members(), now);
        let ring = self.view.ring();
        for gateway in &mut self.gateways {
            gateway.view.set_members_on(members(), &ring, now);
        }
    }

    fn sample(&mut self) {
        let joined = self.scenario.join_at_s;
        let alive = || self.pods.iter().filter(|pod| pod.is_alive);
        let pods = alive().count() as f64;
        let total: f64 = alive().map(|pod| pod.load).sum();
        let hottest = alive().map(|pod| pod.load).fold(0.0, f64::max);
        let new = alive().filter(|pod| pod.joined_s >= joined).map(|pod| pod.load).fold(0.0, f64::max);
        let pairs: usize = alive().map(|pod| pod.tables.len()).sum();
        self.figures.sample(self.now_s, [total / pods, hottest, new], total / pairs.max(1) as f64);
        self.after(SAMPLE_S, Event::Sample);
    }
}

impl Pod {
    fn new(number: usize, joined_s: f64) -> Self {
        Self {
            id: name(&format!("pod-{number}")),
            is_alive: true,
            joined_s,
            load: 0.0,
            streams: Vec::new(),
            tables: BTreeMap::new(),
            sequence: 0,
            shedder: Shedder::default(),
            reports: Vec::new(),
        }
    }

    fn view(&self, now_s: f64) -> PodView {
        let address = sluice_shared::link::PodAddress::Tcp("127.0.0.1:1".to_owned());
        let active_for = Duration::try_from_secs_f64(now_s - self.joined_s).unwrap_or(Duration::MAX);
        PodView { active_for, ..PodView::active(self.id.clone(), address) }
    }

    fn report(&mut self, names: &[TableName], late_s: f64) -> LoadReport {
        self.sequence += 1;
        let mut busiest: Vec<(u32, (f64, u32))> =
            self.tables.iter().map(|(table, load)| (*table, *load)).collect();
        if busiest.len() > TABLES_REPORTED_MAX {
            busiest.select_nth_unstable_by(TABLES_REPORTED_MAX, |a, b| b.1.0.total_cmp(&a.1.0));
            busiest.truncate(TABLES_REPORTED_MAX);
        }
        let load = |(table, (load, streams)): (u32, (f64, u32))| TableLoad {
            table: names[table as usize].clone(),
            bytes_per_s: load * CAPACITY_BYTES_PER_S,
            streams,
        };
        LoadReport {
            sequence: self.sequence,
            ingress: self.load,
            bytes_per_s: self.load * CAPACITY_BYTES_PER_S,
            streams: self.streams.len() as u32,
            tables: busiest.into_iter().map(load).collect(),
            age: Duration::from_secs_f64(late_s),
            ..LoadReport::default()
        }
    }
}

/// Cumulated shares of so many tables, the most popular first.
pub(super) fn shares(tables: usize) -> Vec<f64> {
    let weights = (1..=tables).map(|n| (n as f64).powf(-ZIPF));
    let shares = weights.scan(0.0, |sum, weight| {
        *sum += weight;
        Some(*sum)
    });
    shares.collect()
}

/// A table, the more popular the more often.
pub(super) fn draw_table(shares: &[f64], rng: &mut StdRng) -> usize {
    let draw = rng.random_range(0.0..shares[shares.len() - 1]);
    shares.partition_point(|share| *share <= draw)
}

/// Pods are numbered as they come.
fn number_of(id: &PodId) -> Option<usize> {
    id.as_str().strip_prefix("pod-")?.parse().ok()
}

fn name<T: std::str::FromStr<Err: std::fmt::Debug>>(text: &str) -> T {
    text.parse().expect("made of letters and digits that any name may have")
}
