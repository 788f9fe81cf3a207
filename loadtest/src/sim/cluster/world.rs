//! The simulated world: its processes, what happens to them by the seed, and how it ends.
//!
//! Time passes in ticks. In each the processes run one after the other, each on its own clock, then what has ended is taken
//! away and what is due happens. After the faults everything is healed, and all streams have to come to their end.
//!
//! *Owns*: the schedule, lives and deaths of processes, the notes' collection.
//! *Does not own*: what processes do (`process`, `producer`), the verdict (`cluster`).

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, bail};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use sluice_client::Client;
use sluice_shared::error::ErrorKind;

use super::host::{Host, Start};
use super::net::{Net, Pair, pair};
use super::process::{Planted, Shown, State, Surroundings, gossip_address};
use super::producer::{NamedStream, Producer};
use super::store::{Store, Weather};

/// Processes run for so long in one go.
const TICK: Duration = Duration::from_millis(4);
/// A process that could not start is started again after so long.
const RESTART_PAUSE: Duration = Duration::from_millis(500);
/// Until a stream that waits for its table looks again.
const TABLE_PAUSE: Duration = Duration::from_millis(100);
/// For all streams to come to their end once everything is healed.
const FINISH_MAX: Duration = Duration::from_secs(120);

/// How large it is, and how long it is bad.
#[derive(Debug, Clone, Copy)]
pub struct Plan {
    /// Pods.
    pub pods: usize,
    /// Gateways.
    pub gateways: usize,
    /// Named streams, each with a producer.
    pub streams: usize,
    /// For so long things go wrong.
    pub bad_for: Duration,
    /// What is wrong on purpose.
    pub planted: Planted,
}

impl Default for Plan {
    fn default() -> Self {
        Self { pods: 3, gateways: 2, streams: 4, bad_for: Duration::from_secs(5), planted: Planted::Nothing }
    }
}

/// What has happened, counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Pods that were killed.
    pub pods_killed: u64,
    /// Gateways that were killed.
    pub gateways_killed: u64,
    /// Pods that drained to their end.
    pub pods_drained: u64,
    /// Processes that stood still for a while.
    pub paused: u64,
    /// Connections and networks that were cut or held up.
    pub cuts: u64,
    /// Producers that vanished.
    pub producers_killed: u64,
    /// Producers that took a stream over from one that was alive.
    pub rivals: u64,
    /// Virtual milliseconds.
    pub virtual_ms: u64,
}

enum Kind {
    Pod,
    Gateway,
}

/// A pod or a gateway, over its lives.
struct Node {
    kind: Kind,
    name: String,
    host: Option<Host>,
    shown: Shown,
    start_at: Option<Duration>,
    paused_until: Option<Duration>,
}

/// A producer's process.
struct Sender {
    host: Host,
    stream: usize,
    outcome: Arc<Mutex<Option<anyhow::Result<()>>>>,
}

/// Something that is over at a time.
enum Relief {
    Held(Vec<Pair>),
    Weather,
}

/// The world.
pub struct World {
    plan: Plan,
    random: StdRng,
    start: Start,
    now: Duration,
    net_host: Host,
    surroundings: Surroundings,
    nodes: Vec<Node>,
    streams: Vec<NamedStream>,
    senders: Vec<Sender>,
    /// When a producer of a stream without one begins.
    follow_at: Vec<Option<Duration>>,
    stop: Arc<AtomicBool>,
    reliefs: Vec<(Duration, Relief)>,
    /// What has happened.
    pub counts: Counts,
    /// What processes died of that is no fault of the world.
    pub faults: Vec<String>,
}

impl World {
    /// A world whose processes have not begun yet, with logs below `dir`.
    ///
    /// # Errors
    /// Where there is no runtime.
    pub fn new(seed: u64, plan: Plan, dir: &Path) -> anyhow::Result<Self> {
        let mut random = StdRng::seed_from_u64(seed);
        let start = Start::now();
        let net_host = Host::begin(start, Duration::ZERO)?;
        let names = (1..=plan.pods).map(|n| format!("pod-{n}"));
        let names: Vec<_> = names.chain((1..=plan.gateways).map(|n| format!("gateway-{n}"))).collect();
        let members = (0..).zip(&names).map(|(number, name)| (name.clone(), gossip_address(number)));
        let members: Vec<_> = members.collect();
        let surroundings = Surroundings {
            net: Net::new(random.random(), net_host.spawner(), &members),
            store: Store::new(random.random()),
            dir: dir.to_owned(),
            members,
            planted: plan.planted,
        };
        let nodes = names.into_iter().map(|name| Node {
            kind: if name.starts_with("pod") { Kind::Pod } else { Kind::Gateway },
            name,
            host: None,
            shown: Shown::new(),
            start_at: Some(Duration::ZERO),
            paused_until: None,
        });
        let mut nodes: Vec<Node> = nodes.collect();
        // Some join when others are at work.
        for node in &mut nodes[1..plan.pods] {
            let late = plan.bad_for.mul_f64(random.random_range(0.0..0.7));
            node.start_at = Some(if random.random_bool(0.3) { late } else { Duration::ZERO });
        }
        Ok(Self {
            nodes,
            streams: (1..=plan.streams as u64).map(NamedStream::new).collect(),
            senders: Vec::new(),
            follow_at: vec![Some(Duration::ZERO); plan.streams],
            stop: Arc::default(),
            reliefs: Vec::new(),
            counts: Counts::default(),
            faults: Vec::new(),
            now: Duration::ZERO,
            plan,
            random,
            start,
            net_host,
            surroundings,
        })
    }

    /// The streams and what was seen of them.
    pub fn streams(&self) -> &[NamedStream] {
        &self.streams
    }

    /// The object store.
    pub fn store(&self) -> &Store {
        &self.surroundings.store
    }

    /// Runs to the end.
    ///
    /// # Errors
    /// Streams that do not come to their end in time.
    pub fn run(&mut self) -> anyhow::Result<()> {
        let mut next = Duration::from_millis(self.random.random_range(100..1_500));
        while self.now < self.plan.bad_for {
            self.tick()?;
            if self.now >= next {
                self.something_happens();
                let longest = if self.random.random_bool(0.3) { 100 } else { 1_000 };
                next = self.now + Duration::from_millis(self.random.random_range(0..longest));
            }
        }
        self.heal();
        let finish_by = self.now + FINISH_MAX;
        while !self.is_over() {
            self.tick()?;
            if self.now > finish_by {
                bail!("{}", self.stuck());
            }
        }
        self.counts.virtual_ms = u64::try_from(self.now.as_millis()).unwrap_or(u64::MAX);
        Ok(())
    }

    /// All that was sent is answered for: no producer is at it any more, and each stream's last one has finished it.
    fn is_over(&self) -> bool {
        let nobody_comes = self.senders.is_empty() && self.follow_at.iter().all(Option::is_none);
        nobody_comes && self.streams.iter().all(|stream| stream.notes().is_finished)
    }

    /// Who has not come to its end.
    fn stuck(&self) -> String {
        let mut text =
            format!("streams have not come to their end {} s after all was healed:", FINISH_MAX.as_secs());
        for stream in self.streams.iter().filter(|stream| !stream.notes().is_finished) {
            let notes = stream.notes();
            let history = &notes.history;
            let (sent, durable) = (history.sent.len(), history.durable_next);
            let committed = history.committed.last().map_or(0, |promise| promise.next);
            text += &format!(
                "\n  stream {}: {sent} sent, {durable} durable, {committed} committed",
                stream.number
            );
        }
        for node in &self.nodes {
            let failure = node.shown.failure.lock().unwrap_or_else(PoisonError::into_inner).clone();
            text += &format!("\n  {}: {:?} {failure}", node.name, node.shown.state());
        }
        text
    }

    fn tick(&mut self) -> anyhow::Result<()> {
        self.begin_what_is_due()?;
        self.relieve();
        self.now += TICK;
        let now = self.now;
        self.net_host.step(now);
        for node in &mut self.nodes {
            let Some(host) = &mut node.host else { continue };
            match node.paused_until {
                Some(until) if until > now => {}
                Some(_) => {
                    node.paused_until = None;
                    host.jump(now);
                }
                None => host.step(now),
            }
        }
        for sender in &mut self.senders {
            sender.host.step(now);
        }
        self.take_away_nodes();
        self.take_away_senders();
        self.streams.iter().for_each(NamedStream::look);
        Ok(())
    }

    fn begin_what_is_due(&mut self) -> anyhow::Result<()> {
        for at in 0..self.nodes.len() {
            if self.nodes[at].start_at.is_some_and(|due| due <= self.now) {
                self.begin_node(at)?;
            }
        }
        for stream in 0..self.streams.len() {
            if self.follow_at[stream].is_some_and(|due| due <= self.now) {
                self.begin_sender(stream)?;
            }
        }
        Ok(())
    }

    fn begin_node(&mut self, at: usize) -> anyhow::Result<()> {
        let host = Host::begin(self.start, self.now)?;
        let seed = self.random.random();
        let node = &mut self.nodes[at];
        (node.shown, node.start_at, node.paused_until) = (Shown::new(), None, None);
        let (surroundings, name, shown) = (self.surroundings.clone(), node.name.clone(), node.shown.clone());
        match node.kind {
            Kind::Pod => host.spawn("pod", surroundings.pod(name, seed, shown)),
            Kind::Gateway => host.spawn("gateway", surroundings.gateway(name, shown)),
        }
        node.host = Some(host);
        Ok(())
    }

    fn begin_sender(&mut self, stream: usize) -> anyhow::Result<()> {
        // The table's columns come from the first stream that states a schema, not from what the first lines look like.
        if !self.has_table(stream) {
            self.follow_at[stream] = Some(self.now + TABLE_PAUSE);
            return Ok(());
        }
        self.follow_at[stream] = None;
        let host = Host::begin(self.start, self.now)?;
        let me = format!("producer-{}", stream + 1);
        let mut gateways: Vec<String> =
            (1..=self.plan.gateways).map(|n| format!("ws://gateway-{n}:7070")).collect();
        let first = self.random.random_range(0..gateways.len());
        gateways.rotate_left(first);
        let (net, urls) = (self.surroundings.net.clone(), gateways.join(","));
        let (named, seed, stop) =
            (self.streams[stream].clone(), self.random.random(), Arc::clone(&self.stop));
        let outcome = Arc::new(Mutex::new(None));
        let told = Arc::clone(&outcome);
        host.spawn("producer", async move {
            let sending = async {
                let client = Client::connect(&urls).await.context("URLs of gateways")?;
                let client = client.over_pipes(move |authority| {
                    let gateway = authority.rsplit_once(':').map_or(authority, |(name, _)| name);
                    net.way(&me, gateway)
                });
                Box::pin(Producer { client, stream: named, seed, stop }.run()).await
            };
            let ended = sending.await;
            *told.lock().unwrap_or_else(PoisonError::into_inner) = Some(ended);
        });
        self.senders.push(Sender { host, stream, outcome });
        Ok(())
    }

    /// Whether a stream's table is there, or is made by that stream.
    fn has_table(&self, stream: usize) -> bool {
        let wanted = &self.streams[stream];
        let makes = |stream: &NamedStream| stream.states_schema() && stream.table() == wanted.table();
        makes(wanted)
            || self.streams.iter().any(|stream| makes(stream) && !stream.notes().history.stream.is_empty())
    }

    fn take_away_nodes(&mut self) {
        for at in 0..self.nodes.len() {
            let shown = self.nodes[at].shown.clone();
            let has_ended = matches!(shown.state(), State::Ended | State::Failed);
            if self.nodes[at].host.is_none() || !(has_ended || shown.is_doomed.load(Ordering::Relaxed)) {
                continue;
            }
            if shown.state() == State::Ended && matches!(self.nodes[at].kind, Kind::Pod) {
                self.counts.pods_drained += 1;
            }
            self.kill_node(at, RESTART_PAUSE);
        }
    }

    fn take_away_senders(&mut self) {
        for sender in std::mem::take(&mut self.senders) {
            let ended = sender.outcome.lock().unwrap_or_else(PoisonError::into_inner).take();
            let Some(ended) = ended else {
                self.senders.push(sender);
                continue;
            };
            sender.host.kill();
            let Err(error) = ended else { continue };
            if !is_fenced(&error) {
                self.faults.push(format!("stream {}: its producer failed: {error:#}", sender.stream + 1));
            }
            // Whoever has taken its stream over goes on.
            if !self.senders.iter().any(|other| other.stream == sender.stream) {
                self.follow_at[sender.stream] = Some(self.now + RESTART_PAUSE);
            }
        }
    }

    fn kill_node(&mut self, at: usize, down_for: Duration) {
        let start_at = self.now + down_for;
        let node = &mut self.nodes[at];
        if let Some(host) = node.host.take() {
            host.kill();
        }
        (node.start_at, node.paused_until) = (Some(start_at), None);
    }

    /// A time up to that, mostly short.
    fn some_time(&mut self, longest: Duration) -> Duration {
        let part = self.random.random::<f64>();
        longest.mul_f64(part * part)
    }

    fn something_happens(&mut self) {
        let pods = self.plan.pods;
        let pod = self.random.random_range(0..pods);
        let gateway = pods + self.random.random_range(0..self.plan.gateways);
        match self.random.random_range(0..100) {
            0..25 => self.crash(pod),
            25..32 => self.crash(gateway),
            32..42 => self.nodes[pod].shown.drain.notify_one(),
            42..54 => self.pause(pod),
            54..58 => self.pause(gateway),
            58..68 => self.cut_somewhere(),
            68..78 => self.part(pod),
            78..86 => self.bad_weather(),
            86..94 => self.producer_vanishes(),
            _ => self.rival(),
        }
    }

    fn crash(&mut self, at: usize) {
        let down_for = self.some_time(Duration::from_secs(4));
        match self.nodes[at].kind {
            Kind::Pod => self.counts.pods_killed += 1,
            Kind::Gateway => self.counts.gateways_killed += 1,
        }
        // As at a power loss: those at the other ends are not told that it is gone.
        if self.random.random_bool(0.3) {
            self.hold_all_of(at, down_for);
        }
        self.kill_node(at, down_for);
    }

    fn pause(&mut self, at: usize) {
        let paused_for = self.some_time(Duration::from_secs(6));
        if self.nodes[at].host.is_some() {
            self.counts.paused += 1;
            self.nodes[at].paused_until = Some(self.now + paused_for);
        }
    }

    /// Names of all that a process talks to.
    fn others(&self, at: usize) -> Vec<String> {
        let nodes = self.nodes.iter().enumerate().filter(|(other, _)| *other != at);
        let producers = (1..=self.plan.streams).map(|n| format!("producer-{n}"));
        nodes.map(|(_, node)| node.name.clone()).chain(producers).collect()
    }

    fn cut_somewhere(&mut self) {
        let at = self.random.random_range(0..self.nodes.len());
        let others = self.others(at);
        let other = self.random.random_range(0..others.len());
        self.surroundings.net.cut(&pair(&self.nodes[at].name, &others[other]));
        self.counts.cuts += 1;
    }

    /// Nothing gets to a process, or only to some others, for a while.
    fn part(&mut self, at: usize) {
        let parted_for = self.some_time(Duration::from_secs(5));
        self.counts.cuts += 1;
        if self.random.random_bool(0.5) {
            return self.hold_all_of(at, parted_for);
        }
        let others = self.others(at);
        let other = self.random.random_range(0..others.len());
        self.hold(at, vec![others[other].clone()], parted_for);
    }

    fn hold_all_of(&mut self, at: usize, held_for: Duration) {
        self.hold(at, self.others(at), held_for);
    }

    fn hold(&mut self, at: usize, others: Vec<String>, held_for: Duration) {
        let pairs: Vec<Pair> = others.iter().map(|other| pair(&self.nodes[at].name, other)).collect();
        pairs.iter().for_each(|pair| self.surroundings.net.hold(pair, true));
        self.reliefs.push((self.now + held_for, Relief::Held(pairs)));
    }

    fn bad_weather(&mut self) {
        let bad_for = self.some_time(Duration::from_secs(3));
        let slow = self.random.random_bool(0.4);
        self.surroundings.store.set(Weather {
            delay_max: Duration::from_millis(if slow { 300 } else { 10 }),
            failing: if self.random.random_bool(0.6) { self.random.random_range(0.0..0.5) } else { 0.0 },
            lost_replies: if self.random.random_bool(0.6) { self.random.random_range(0.0..0.5) } else { 0.0 },
        });
        self.reliefs.push((self.now + bad_for, Relief::Weather));
    }

    fn producer_vanishes(&mut self) {
        if self.senders.is_empty() {
            return;
        }
        let sender = self.senders.remove(self.random.random_range(0..self.senders.len()));
        sender.host.kill();
        self.counts.producers_killed += 1;
        if !self.senders.iter().any(|other| other.stream == sender.stream) {
            let pause = self.some_time(Duration::from_secs(2));
            self.follow_at[sender.stream] = Some(self.now + pause);
        }
    }

    fn rival(&mut self) {
        let stream = self.random.random_range(0..self.streams.len());
        if self.follow_at[stream].is_none() {
            self.follow_at[stream] = Some(self.now);
            self.counts.rivals += 1;
        }
    }

    fn relieve(&mut self) {
        let now = self.now;
        let (due, rest) = std::mem::take(&mut self.reliefs).into_iter().partition(|(at, _)| *at <= now);
        self.reliefs = rest;
        let due: Vec<(Duration, Relief)> = due;
        for (_, relief) in due {
            match relief {
                Relief::Weather => self.surroundings.store.set(Weather::FAIR),
                Relief::Held(pairs) => pairs.iter().for_each(|pair| self.surroundings.net.hold(pair, false)),
            }
        }
    }

    /// Nothing goes wrong any more, and producers are told to finish.
    fn heal(&mut self) {
        self.reliefs.iter_mut().for_each(|(at, _)| *at = Duration::ZERO);
        self.relieve();
        self.surroundings.net.heal();
        self.surroundings.store.set(Weather::FAIR);
        for node in &mut self.nodes {
            node.paused_until = node.paused_until.map(|_| self.now);
            node.start_at = node.start_at.map(|_| self.now);
        }
        self.follow_at.iter_mut().for_each(|at| *at = at.map(|_| self.now));
        self.stop.store(true, Ordering::Relaxed);
    }
}

fn is_fenced(error: &anyhow::Error) -> bool {
    let of_client = error.downcast_ref::<sluice_client::Error>();
    matches!(of_client, Some(sluice_client::Error::Gateway(error)) if error.kind == ErrorKind::Fenced)
}
