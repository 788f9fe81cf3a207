//! The pods that a gateway can see: who they are, their phase, how loaded they are as far as this viewer knows, the
//! traffic of each table, and each table's ring order over the pods.
//!
//! What is known is always late. A report says how a pod was when it was made; what this viewer has placed since is
//! added until a report covers it (M. Dahlin, Interpreting Stale Load Information, 2000); and a report that grows old
//! says less and less.
//!
//! *Owns*: the pool view, corrected load, how far each table spreads. A view is soft state: rebuilt from what is known,
//! never stored. Time is given to it.
//! *Does not own*: the ring (`ring`), what is kept of it (`firsts`), how reports arrive, the choice of a pod
//! (`gateway/src/placement.rs`).

mod ring;
mod firsts;
mod rate;

use std::borrow::Cow;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::ids::{PodId, TableName};
use crate::lifecycle::Phase;
use crate::link::PodAddress;

use firsts::Firsts;

pub use rate::TableRate;
pub use ring::TableRing;

/// A report this old begins to decay toward the mean of the pool.
const REPORT_FRESH: Duration = Duration::from_secs(5);
/// A pod whose report is this old is silent: not placed on while there are others.
pub const REPORT_DEAD: Duration = Duration::from_secs(15);
/// A report covers what was placed so long before it was made: by then the stream sends, and the pod has measured it.
const SETTLING: Duration = Duration::from_secs(1);
/// An own placement counts no longer than this, whether or not a report has come: one that is lost must not weigh for ever.
/// Not shorter either: where reports are late, what was placed is all that is known.
const PLACED_MAX: Duration = REPORT_DEAD;
/// Ages, and what follows from them, are brought up to date so often.
const ADVANCE_STEP: Duration = Duration::from_millis(100);
/// Tables that are named by no report are looked after so often.
const SWEEP_PAUSE: Duration = Duration::from_secs(10);
/// Tables that a load report names.
pub const TABLES_REPORTED_MAX: usize = 64;
/// What a pod is taken to carry until it says so itself.
pub const CAPACITY_BYTES_PER_S: f64 = 200e6;

/// What a pod says about its load: four budget fractions, 0 idle and 1 full, and what they come from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LoadReport {
    /// Rises with each report of one life of the pod.
    pub sequence: u64,
    /// Of the bytes that are accepted and not yet durable, or of what the pod can take in a second, whichever is more.
    pub ingress: f64,
    /// Of its processor time.
    pub cpu: f64,
    /// Of the time in which its log is busy with a flush.
    pub log: f64,
    /// Of the memory for durable batches, or of its log's space, whichever is more.
    pub memory: f64,
    /// What the pod can carry, as it has measured itself.
    pub capacity_bytes_per_s: f64,
    /// What it takes now.
    pub bytes_per_s: f64,
    /// Streams that are open.
    pub streams: u32,
    /// Age of the oldest durable record that is not committed.
    pub lag_ms: u64,
    /// Opens that it has refused, since its start.
    pub refused: u64,
    /// Its busiest tables, at most `TABLES_REPORTED_MAX`.
    pub tables: Vec<TableLoad>,
    /// Since the report was made. The receiver's: it is not sent.
    #[serde(skip)]
    pub age: Duration,
}

/// One table's traffic on one pod.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TableLoad {
    /// The table.
    pub table: TableName,
    /// Bytes that its streams send.
    pub bytes_per_s: f64,
    /// How many those are.
    pub streams: u32,
}

impl LoadReport {
    /// The load of the pod: the largest of its fractions.
    pub fn fraction(&self) -> f64 {
        self.ingress.max(self.cpu).max(self.log).max(self.memory)
    }

    /// The pod has none any more, nor anything that waits.
    pub fn forget_streams(&mut self) {
        self.sequence += 1;
        (self.bytes_per_s, self.streams, self.lag_ms) = (0.0, 0, 0);
        self.tables.clear();
    }
}

impl Default for LoadReport {
    fn default() -> Self {
        Self {
            sequence: 0,
            ingress: 0.0,
            cpu: 0.0,
            log: 0.0,
            memory: 0.0,
            capacity_bytes_per_s: CAPACITY_BYTES_PER_S,
            bytes_per_s: 0.0,
            streams: 0,
            lag_ms: 0,
            refused: 0,
            tables: Vec::new(),
            age: Duration::ZERO,
        }
    }
}

/// One pod as a gateway, or another pod, sees it.
#[derive(Debug, Clone)]
pub struct PodView {
    /// Its name.
    pub id: PodId,
    /// Where it listens.
    pub address: PodAddress,
    /// Where it is in its life: only active pods take streams.
    pub phase: Phase,
    /// Where it stands, such as an availability zone; None where that is not said.
    pub zone: Option<String>,
    /// For how long it has been active.
    pub active_for: Duration,
    /// What it last said about its load.
    pub load: LoadReport,
    /// What this viewer has placed on it that no report covers yet, as a fraction of its capacity.
    pub placed: f64,
    /// Set aside for a moment, since a call to it has just failed: placed on only where nothing else is left.
    pub aside: bool,
}

impl PodView {
    /// An active pod of which nothing else is known.
    pub fn active(id: PodId, address: PodAddress) -> Self {
        Self {
            id,
            address,
            phase: Phase::Active,
            zone: None,
            active_for: Duration::MAX,
            load: LoadReport::default(),
            placed: 0.0,
            aside: false,
        }
    }
}

/// Which pods are looked at: all that are active, and of those the best that there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trust {
    /// Heard of lately, and not set aside.
    Well,
    /// Not set aside.
    NotAside,
    /// Whichever are active.
    Any,
}

impl Trust {
    /// Whether it has this pod among those to be looked at.
    pub fn takes(self, pod: &PodView) -> bool {
        let is_good = match self {
            Self::Well => !pod.aside && pod.load.age <= REPORT_DEAD,
            Self::NotAside => !pod.aside,
            Self::Any => true,
        };
        pod.phase == Phase::Active && is_good
    }
}

/// A pod with its load as this viewer has to take it.
#[derive(Debug, Clone, Copy)]
pub struct PodLoad<'a> {
    /// The pod.
    pub pod: &'a PodView,
    /// What it has reported, drawn toward the mean as the report grows old.
    pub reported: f64,
    /// With what was placed on it since: by this viewer, and by as much by each other gateway.
    pub load: f64,
}

/// Pods taken together.
#[derive(Debug, Clone, Copy, Default)]
pub struct Sums {
    /// How many.
    pub pods: usize,
    raw: f64,
    reported: f64,
    load: f64,
    capacity_bytes_per_s: f64,
    bytes_per_s: f64,
    streams: f64,
}

impl Sums {
    /// Mean of the corrected loads.
    pub fn load(&self) -> f64 {
        self.load / self.pods.max(1) as f64
    }

    /// Mean of what a pod can carry.
    pub fn capacity_bytes_per_s(&self) -> f64 {
        if self.pods == 0 { CAPACITY_BYTES_PER_S } else { self.capacity_bytes_per_s / self.pods as f64 }
    }

    /// Mean of what a stream sends; None where no pod has told of any.
    pub fn stream_bytes_per_s(&self) -> Option<f64> {
        (self.streams >= 1.0).then(|| self.bytes_per_s / self.streams)
    }

    fn count(&mut self, pod: &PodLoad<'_>, sign: f64) {
        self.pods = if sign > 0.0 { self.pods + 1 } else { self.pods.saturating_sub(1) };
        self.raw += sign * pod.pod.load.fraction();
        self.reported += sign * pod.reported;
        self.load += sign * pod.load;
        self.capacity_bytes_per_s += sign * pod.pod.load.capacity_bytes_per_s;
        self.bytes_per_s += sign * pod.pod.load.bytes_per_s;
        self.streams += sign * f64::from(pod.pod.load.streams);
    }
}

/// What one viewer has placed on one pod: to be given back where the pod did not take the stream, or the stream ends
/// before a report covers it. Giving back twice, or late, changes nothing.
#[derive(Debug)]
#[must_use = "a stream that was not opened must be given back"]
pub struct OwnPlacement {
    pod: PodId,
    number: u64,
}

/// What is kept of a pod beside what others may see.
#[derive(Debug, Clone, Default)]
struct Ledger {
    /// When its last report was made.
    made_at: Option<Instant>,
    active_since: Option<Instant>,
    /// The report, drawn toward the mean by its age.
    reported: f64,
    /// Placed and not covered, oldest first.
    placed: VecDeque<Entry>,
}

#[derive(Debug, Clone, Copy)]
struct Entry {
    number: u64,
    load: f64,
    at: Instant,
}

/// The pool as a gateway sees it.
#[derive(Debug, Clone)]
pub struct PoolView {
    /// All pods, by id.
    pods: Vec<PodView>,
    /// Beside each pod.
    ledgers: Vec<Ledger>,
    /// Places of the active ones among all, in the ring's order of pods.
    active: Vec<usize>,
    ring: Arc<TableRing>,
    /// Of hot tables, on that ring.
    firsts: Firsts,
    /// Those that are well.
    well: Sums,
    /// Their number by zone.
    zones: HashMap<String, usize>,
    /// Gateways that place on the same pods.
    pub gateways: u32,
    /// Where the viewer stands.
    pub zone: Option<String>,
    /// Traffic of the tables that are known to have any.
    pub tables: HashMap<TableName, TableRate>,
    placements: u64,
    advanced_at: Option<Instant>,
    swept_at: Option<Instant>,
}

impl PoolView {
    /// A view of these pods. Of two with one id the later one counts.
    pub fn new(pods: impl IntoIterator<Item = PodView>) -> Self {
        let pods = sorted(pods);
        let mut view = Self {
            ledgers: vec![Ledger::default(); pods.len()],
            active: active_places(&pods),
            ring: Arc::new(TableRing::new(active_ids(&pods).cloned())),
            pods,
            firsts: Firsts::default(),
            well: Sums::default(),
            zones: HashMap::new(),
            gateways: 1,
            zone: None,
            tables: HashMap::new(),
            placements: 0,
            advanced_at: None,
            swept_at: None,
        };
        view.recount();
        view
    }

    /// Now these are the pods. Of those that stay, what they reported and what was placed on them is kept; the ring is
    /// built anew only where other pods are active than before, which costs some 0.1 ms a pod.
    pub fn set_members(&mut self, pods: impl IntoIterator<Item = PodView>, now: Instant) {
        let ring = Arc::clone(&self.ring);
        self.set_members_on(pods, &ring, now);
    }

    /// As `set_members`, with a ring that was built beforehand, outside of any lock. It is used where it has the pods that
    /// are active now.
    pub fn set_members_on(
        &mut self,
        pods: impl IntoIterator<Item = PodView>,
        ring: &Arc<TableRing>,
        now: Instant,
    ) {
        let mut pods = sorted(pods);
        let mut old: HashMap<PodId, (PodView, Ledger)> = self
            .pods
            .drain(..)
            .zip(self.ledgers.drain(..))
            .map(|(pod, ledger)| (pod.id.clone(), (pod, ledger)))
            .collect();
        for pod in &mut pods {
            let mut ledger = Ledger::default();
            if let Some((known, kept)) = old.remove(&pod.id) {
                (pod.load, pod.placed, pod.aside, ledger) = (known.load, known.placed, known.aside, kept);
            }
            ledger.active_since = now.checked_sub(pod.active_for);
            self.ledgers.push(ledger);
        }
        self.pods = pods;
        for (gone, _) in old.into_values() {
            self.count_tables(&gone.load.tables, -1.0);
        }
        if !active_ids(&self.pods).eq(self.ring.pods()) {
            self.firsts.clear();
        }
        self.ring = if active_ids(&self.pods).eq(ring.pods()) {
            Arc::clone(ring)
        } else {
            Arc::new(TableRing::new(active_ids(&self.pods).cloned()))
        };
        self.active = active_places(&self.pods);
        self.recount();
    }

    /// The ring, for another view of the same pods.
    pub fn ring(&self) -> Arc<TableRing> {
        Arc::clone(&self.ring)
    }

    /// All pods, by id.
    pub fn pods(&self) -> &[PodView] {
        &self.pods
    }

    /// One pod.
    pub fn pod(&self, id: &PodId) -> Option<&PodView> {
        self.find(id).map(|place| &self.pods[place])
    }

    /// Changes what is known of one pod, except its phase: that changes the ring, so it takes `set_members`.
    pub fn update(&mut self, id: &PodId, change: impl FnOnce(&mut PodView)) {
        let Some(place) = self.find(id) else { return };
        let phase = self.pods[place].phase;
        self.change(place, |pod, _| {
            change(pod);
            pod.phase = phase;
        });
    }

    /// The active pods in the table's order, its home first.
    pub fn order(&self, table: &TableName) -> impl Iterator<Item = &PodView> {
        self.places(table).map(|place| &self.pods[self.active[place]])
    }

    /// The pod that alone commits to the table: the first active one in its order.
    pub fn home(&self, table: &TableName) -> Option<&PodView> {
        self.order(table).next()
    }

    /// On how many pods the table stands, where there are as many.
    pub fn spread(&self, table: &TableName) -> usize {
        self.tables.get(table).map_or(1, |rate| rate.spread.max(1))
    }

    /// The active pods with their loads, in the table's order.
    pub fn loads(&self, table: &TableName) -> impl Iterator<Item = PodLoad<'_>> {
        self.places(table).map(|place| self.load_at(self.active[place]))
    }

    /// Of the first so many of the table's order, as far as there are as many: their number, and any of them with its load.
    /// For random choices: of a hot table they are kept, and cost no look-up.
    pub fn first<'a>(&'a self, table: &TableName, pods: usize) -> (usize, impl Fn(usize) -> PodLoad<'a>) {
        let (pods, kept) = (pods.min(self.active.len()), self.firsts.of(table));
        let first =
            kept.get(..pods).map_or_else(|| self.ring.places(table).take(pods).collect(), Cow::Borrowed);
        (pods, move |nth| self.load_at(self.active[first[nth]]))
    }

    /// One pod with its load.
    pub fn load(&self, id: &PodId) -> Option<PodLoad<'_>> {
        self.find(id).map(|place| self.load_at(place))
    }

    /// How many pods are active, and any of them with its load: for random choices.
    pub fn active<'a>(&'a self) -> (usize, impl Fn(usize) -> PodLoad<'a>) {
        (self.active.len(), |nth| self.load_at(self.active[nth]))
    }

    /// All pods of this standing, taken together. Quick for those that are well.
    pub fn sums(&self, trust: Trust) -> Sums {
        match trust {
            Trust::Well => self.well,
            others => self.sum(others),
        }
    }

    /// How many of the pods that are well stand in a zone.
    pub fn well_in(&self, zone: &str) -> usize {
        self.zones.get(zone).copied().unwrap_or_default()
    }

    /// Takes a pod's report; its age is how long ago it was made. What was placed before that and had time to settle
    /// is covered by it. The same report again changes nothing: it must not look fresh.
    pub fn report(&mut self, id: &PodId, report: LoadReport, now: Instant) {
        let Some(place) = self.find(id) else { return };
        let is_known = self.ledgers[place].made_at.is_some();
        if is_known && self.pods[place].load.sequence == report.sequence {
            return;
        }
        let report = sane(report);
        let made_at = now.checked_sub(report.age);
        let old = std::mem::take(&mut self.pods[place].load.tables);
        self.count_tables(&old, -1.0);
        self.count_tables(&report.tables, 1.0);
        let capacity = self.well.capacity_bytes_per_s();
        // A table that only falls draws back slowly: that is seen to now and then, for all of them.
        for named in &report.tables {
            if let Some(rate) = self.tables.get_mut(&named.table) {
                rate.follow(capacity, now);
                self.firsts.keep(&self.ring, &named.table, rate.spread);
            }
        }
        self.change(place, |pod, ledger| {
            pod.load = report;
            ledger.made_at = made_at.or(Some(now));
            let covered = |entry: &Entry| made_at.is_some_and(|made_at| entry.at + SETTLING <= made_at);
            ledger.drop_first(pod, covered);
        });
    }

    /// Notes that this viewer has placed a stream that is expected to add so much to a pod.
    pub fn placed(&mut self, id: &PodId, load: f64, now: Instant) -> OwnPlacement {
        self.placements += 1;
        let number = self.placements;
        if let Some(place) = self.find(id) {
            self.change(place, |pod, ledger| {
                pod.placed += load;
                ledger.placed.push_back(Entry { number, load, at: now });
            });
        }
        OwnPlacement { pod: id.clone(), number }
    }

    /// The stream is not on the pod: it was refused, or has ended.
    pub fn give_back(&mut self, placement: &OwnPlacement) {
        let Some(place) = self.find(&placement.pod) else { return };
        let number = placement.number;
        let Ok(nth) = self.ledgers[place].placed.binary_search_by_key(&number, |entry| entry.number) else {
            return;
        };
        self.change(place, |pod, ledger| {
            if let Some(entry) = ledger.placed.remove(nth) {
                pod.placed = (pod.placed - entry.load).max(0.0);
            }
        });
    }

    /// Lets time pass: reports grow old, own placements are forgotten, tables draw back. Cheap where it was called a
    /// moment ago, so that it can be called before each decision.
    pub fn advance(&mut self, now: Instant) {
        if self.advanced_at.is_some_and(|at| now.saturating_duration_since(at) < ADVANCE_STEP) {
            return;
        }
        self.advanced_at = Some(now);
        for (pod, ledger) in self.pods.iter_mut().zip(&mut self.ledgers) {
            // Of a pod that has never reported, silence counts from when it was first seen.
            let made_at = *ledger.made_at.get_or_insert_with(|| now.checked_sub(pod.load.age).unwrap_or(now));
            pod.load.age = now.saturating_duration_since(made_at);
            pod.active_for =
                ledger.active_since.map_or(Duration::MAX, |since| now.saturating_duration_since(since));
            ledger.drop_first(pod, |entry| now.saturating_duration_since(entry.at) >= PLACED_MAX);
        }
        self.recount();
        if self.swept_at.is_none_or(|at| now.saturating_duration_since(at) >= SWEEP_PAUSE) {
            self.swept_at = Some(now);
            self.sweep(now);
        }
    }

    /// The table's order, as places among the active pods.
    fn places(&self, table: &TableName) -> impl Iterator<Item = usize> {
        let kept = self.firsts.of(table);
        let table = table.clone();
        let looked_up = move || self.ring.places(&table).skip(kept.len());
        kept.iter().copied().chain(std::iter::once_with(looked_up).flatten())
    }

    fn find(&self, id: &PodId) -> Option<usize> {
        self.pods.binary_search_by(|pod| pod.id.cmp(id)).ok()
    }

    fn load_at(&self, place: usize) -> PodLoad<'_> {
        let (pod, reported) = (&self.pods[place], self.ledgers[place].reported);
        PodLoad { pod, reported, load: reported + f64::from(self.gateways.max(1)) * pod.placed }
    }

    /// Changes one pod and keeps the sums right.
    fn change(&mut self, place: usize, change: impl FnOnce(&mut PodView, &mut Ledger)) {
        self.count(place, -1.0);
        change(&mut self.pods[place], &mut self.ledgers[place]);
        let mean = self.well.raw / self.well.pods.max(1) as f64;
        let is_counted = self.well.pods > 0;
        let pod = &self.pods[place];
        self.ledgers[place].reported =
            decayed(&pod.load, if is_counted { mean } else { pod.load.fraction() });
        self.count(place, 1.0);
    }

    fn count(&mut self, place: usize, sign: f64) {
        if !Trust::Well.takes(&self.pods[place]) {
            return;
        }
        let mut well = self.well;
        well.count(&self.load_at(place), sign);
        self.well = well;
        if let Some(zone) = &self.pods[place].zone {
            let pods = self.zones.entry(zone.clone()).or_default();
            *pods = if sign > 0.0 { *pods + 1 } else { pods.saturating_sub(1) };
        }
    }

    /// All sums anew: ages have changed, or pods, or nothing but the last digits.
    fn recount(&mut self) {
        let active = self.active.iter().map(|place| &self.pods[*place]).filter(|pod| Trust::Well.takes(pod));
        let (pods, raw) =
            active.fold((0_usize, 0.0), |(pods, raw), pod| (pods + 1, raw + pod.load.fraction()));
        for (pod, ledger) in self.pods.iter().zip(&mut self.ledgers) {
            let mean = if pods == 0 { pod.load.fraction() } else { raw / pods as f64 };
            ledger.reported = decayed(&pod.load, mean);
        }
        self.well = self.sum(Trust::Well);
        self.zones.clear();
        for pod in self.pods.iter().filter(|pod| Trust::Well.takes(pod)) {
            if let Some(zone) = &pod.zone {
                *self.zones.entry(zone.clone()).or_default() += 1;
            }
        }
    }

    fn sum(&self, trust: Trust) -> Sums {
        let mut sums = Sums::default();
        for place in self.active.iter().filter(|place| trust.takes(&self.pods[**place])) {
            sums.count(&self.load_at(*place), 1.0);
        }
        sums
    }

    fn count_tables(&mut self, loads: &[TableLoad], sign: f64) {
        for load in loads {
            let rate = match self.tables.get_mut(&load.table) {
                Some(rate) => rate,
                None => self.tables.entry(load.table.clone()).or_default(),
            };
            // What was added and is taken away again leaves a little, of either sign.
            rate.bytes_per_s = (rate.bytes_per_s + sign * load.bytes_per_s).max(0.0);
            let streams = if sign > 0.0 {
                rate.streams.saturating_add(load.streams)
            } else {
                rate.streams.saturating_sub(load.streams)
            };
            rate.streams = streams;
        }
    }

    fn sweep(&mut self, now: Instant) {
        let capacity = self.well.capacity_bytes_per_s();
        self.tables.retain(|_, rate| {
            rate.follow(capacity, now);
            !rate.is_gone()
        });
        let tables = &self.tables;
        self.firsts.retain(|table| tables.contains_key(table));
    }
}

impl Ledger {
    fn drop_first(&mut self, pod: &mut PodView, is_done: impl Fn(&Entry) -> bool) {
        while let Some(entry) = self.placed.pop_front_if(|entry| is_done(entry)) {
            pod.placed = (pod.placed - entry.load).max(0.0);
        }
        if self.placed.is_empty() {
            // Nothing is left of it but the last digits of sums.
            pod.placed = 0.0;
        }
    }
}

fn sorted(pods: impl IntoIterator<Item = PodView>) -> Vec<PodView> {
    let mut sorted: Vec<PodView> = pods.into_iter().collect();
    // Stable, and of equal neighbours the first stays: so they are turned around before and after.
    sorted.reverse();
    sorted.sort_by(|a, b| a.id.cmp(&b.id));
    sorted.dedup_by(|later, first| later.id == first.id);
    sorted
}

fn active_places(pods: &[PodView]) -> Vec<usize> {
    pods.iter().enumerate().filter(|(_, pod)| pod.phase == Phase::Active).map(|(place, _)| place).collect()
}

fn active_ids(pods: &[PodView]) -> impl Iterator<Item = &PodId> {
    pods.iter().filter(|pod| pod.phase == Phase::Active).map(|pod| &pod.id)
}

/// A report that grows old says less and less: it decays toward the mean.
fn decayed(report: &LoadReport, mean: f64) -> f64 {
    let span = (REPORT_DEAD - REPORT_FRESH).as_secs_f64();
    let staleness = (report.age.saturating_sub(REPORT_FRESH).as_secs_f64() / span).min(1.0);
    let reported = report.fraction();
    reported + (mean - reported) * staleness
}

/// A report as it can be reckoned with, whoever sent it. Rates are whole numbers, so that what is added to a table's sum
/// can be taken from it again without a rest.
fn sane(mut report: LoadReport) -> LoadReport {
    let fraction = |value: f64| if value.is_finite() { value.max(0.0) } else { 1.0 };
    let rate = |value: f64| if value.is_finite() { value.max(0.0).round() } else { 0.0 };
    for value in [&mut report.ingress, &mut report.cpu, &mut report.log, &mut report.memory] {
        *value = fraction(*value);
    }
    let capacity = report.capacity_bytes_per_s;
    report.capacity_bytes_per_s =
        if capacity >= 1.0 && capacity.is_finite() { capacity } else { CAPACITY_BYTES_PER_S };
    report.bytes_per_s = rate(report.bytes_per_s);
    report.tables.truncate(TABLES_REPORTED_MAX);
    for table in &mut report.tables {
        table.bytes_per_s = rate(table.bytes_per_s);
    }
    report
}

#[cfg(test)]
mod tests;
