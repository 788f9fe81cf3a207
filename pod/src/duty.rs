//! A pod's phase: what it says of itself to the pool, how it is let in, and how it drains.
//!
//! A drain hands the streams over first: their gateways are asked, at a pace, and open them elsewhere. Until the last one
//! has left, or the deadline has come, the drain can be taken back. Then what is accepted is committed, and the pod is
//! drained.
//!
//! *Owns*: the phase, the order of a drain, the reports of load.
//! *Does not own*: how a stream moves (`gateway/src/session.rs`), what a load is (`load`).
//! Keeps P5: a pod that drains ends no producer's connection.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rand::RngExt;
use sluice_shared::config::ByteSize;
use sluice_shared::error::Error;
use sluice_shared::ids::{LogId, PodId, StreamId, TableId};
use sluice_shared::lifecycle::{Hurry, Phase, TaskScope};
use sluice_shared::link::PodAddress;
use sluice_shared::membership::{Membership, PodState};
use sluice_shared::pool::LoadReport;
use sluice_shared::proto;
use tokio::sync::watch;
use tokio::time::Instant;
use uuid::Uuid;

use crate::admission::Admission;
use crate::adopt::Adoptions;
use crate::lane::Lanes;
use crate::load::{Meter, Sample, by_table};
use crate::pool::Pool;
use crate::shed::{Shedder, StreamLoad as Movable};
use crate::stream::{StreamLoad, Streams};
use crate::table::Tables;
use crate::threads::cores;
use crate::wal::Wal;

/// How often the pod looks at its load. Each look that shows much else is reported.
const LOOK_INTERVAL: Duration = Duration::from_millis(200);
/// A report is made so often at least, give or take a tenth, so that those of a pool do not all come at once.
const REPORT_INTERVAL: Duration = Duration::from_secs(1);
/// A change that is reported at once.
const CHANGE_TOLD: f64 = 0.10;
/// A gateway that found no place for a stream is asked again after this time.
const ASK_AGAIN: Duration = Duration::from_secs(1);
/// From the announcement of a drain to the first stream's leave: gossip takes some of it.
const NOTICE: Duration = Duration::from_millis(500);
/// A drain looks again so often whether held runs have been released.
const COMMIT_AGAIN: Duration = Duration::from_millis(500);
/// Streams are asked in steps of this length.
const PACE_STEP: Duration = Duration::from_millis(20);
/// Why a stream moves, as its gateway is told.
const DRAINING: &str = "its pod drains";
const HOT: &str = "its pod is hot";

/// How fast a drain goes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pace {
    /// For how long streams are handed over at most; what is left then is ended, and opened elsewhere.
    pub patience: Duration,
    /// Streams that are asked to leave in a second.
    pub streams_per_s: f64,
}

/// A drain as it was wished.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Order {
    deadline: Instant,
    streams_per_s: f64,
    /// Although no other pod takes streams.
    forced: bool,
}

/// The pod's parts that a phase is about.
pub struct Parts {
    /// Its name.
    pub id: PodId,
    /// Where it stands in the pool.
    pub membership: Membership,
    /// Which tables it writes.
    pub tables_id: Uuid,
    /// The pool as it sees it.
    pub pool: Pool,
    /// Where it stands otherwise.
    pub zone: Option<String>,
    /// Its tasks.
    pub scope: TaskScope,
    /// Its ingress budget.
    pub admission: Admission,
    /// Its streams.
    pub streams: Streams,
    /// Its lanes.
    pub lanes: Arc<Lanes>,
    /// Its tables.
    pub tables: Tables,
    /// Its log.
    pub wal: Wal,
    /// Where that is, for people.
    pub log_place: String,
    /// Where the logs in the tables' store are.
    pub logs_place: String,
    /// What became of those of its former lives.
    pub adoptions: Adoptions,
    /// Memory for durable batches.
    pub memory_bytes_max: u64,
    /// Bytes that get in within a second, where there is such a limit.
    pub bytes_per_s_max: Option<u64>,
    /// How it drains unless told otherwise.
    pub pace: Pace,
    /// Tells the processor time that it has used.
    pub processor_time: fn() -> Duration,
}

/// What a pod's logs still hold at its end, and no table has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Undrained {
    /// The pod.
    pub pod: PodId,
    /// Where its log is.
    pub log_place: String,
    /// Entries of it.
    pub entries: u64,
    /// And their bytes.
    pub bytes: u64,
    /// Runs that wait for records which other logs may have.
    pub held_runs: u64,
    /// Entries whose table is gone, or is not written any more.
    pub stranded: u64,
    /// Where logs of its former lives are that may hold something too, and why they were not taken over.
    pub former: BTreeMap<String, String>,
}

impl fmt::Display for Undrained {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { pod, log_place, entries, bytes, held_runs, stranded, former } = self;
        write!(f, "pod {pod} ends, and has not drained: ")?;
        if *entries > 0 {
            let bytes = ByteSize(*bytes);
            write!(
                f,
                "its log in {log_place} still holds {entries} entries ({bytes}) that are in no table; keep them, and start the \
                 pod again on them: it commits what it can"
            )?;
        }
        for (nth, (place, why)) in former.iter().enumerate() {
            let before = if nth > 0 || *entries > 0 { "; " } else { "" };
            write!(f, "{before}the log of a former life in {place} was not taken over to its end: {why}")?;
        }
        if *held_runs > 0 {
            write!(f, "; {held_runs} runs wait for records of other logs: `sluice tables TABLE` says which")?;
        }
        if *stranded > 0 {
            write!(
                f,
                "; {stranded} entries are of tables that are gone: `sluice release --table` gives them up"
            )?;
        }
        Ok(())
    }
}

/// A pod's phase and what it is doing about it. Clones share it.
#[derive(Clone)]
pub struct Duty {
    shared: Arc<Shared>,
}

struct Shared {
    parts: Parts,
    /// Where the others reach the pod; not known before it listens.
    address: watch::Sender<Option<PodAddress>>,
    phase: watch::Sender<Phase>,
    order: watch::Sender<Option<Order>>,
    hurry: Hurry,
    load: Mutex<LoadReport>,
    left: Mutex<Option<Undrained>>,
}

impl Duty {
    /// A pod that is joining.
    pub fn new(parts: Parts) -> Self {
        let (phase, order) = (watch::Sender::new(Phase::Joining), watch::Sender::new(None));
        let (address, load, left) = (watch::Sender::new(None), Mutex::default(), Mutex::default());
        let hurry = Hurry::default();
        Self { shared: Arc::new(Shared { parts, address, phase, order, hurry, load, left }) }
    }

    /// The pod listens there from now on; `held`: it takes no streams before it is told to `join`.
    pub fn listens(&self, address: PodAddress, held: bool) {
        let shared = &self.shared;
        shared.address.send_replace(Some(address));
        if !held {
            shared.phase.send_replace(Phase::Active);
        }
        self.announce();
        shared.parts.scope.spawn("reports", self.clone().report());
        shared.parts.scope.spawn("drain", self.clone().run());
    }

    /// Where the pod is in its life.
    pub fn phase(&self) -> Phase {
        *self.shared.phase.borrow()
    }

    /// Its last report.
    pub fn load(&self) -> LoadReport {
        self.shared.load.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Resolves when the pod's drain is over. Whether it holds nothing any more, `left` tells.
    pub async fn drained(&self) {
        let mut phase = self.shared.phase.subscribe();
        // The sender lives in `shared`: waiting for it cannot fail.
        let _ = phase.wait_for(|phase| phase.is_over()).await;
    }

    /// What the pod's log holds at the end of its drain.
    pub fn left(&self) -> Option<Undrained> {
        self.shared.left.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Resolves when the pool has had time to hear what the pod said last.
    pub async fn told(&self) {
        self.shared.parts.membership.told().await;
    }

    /// How the pod drains unless it is told otherwise.
    pub fn pace(&self) -> Pace {
        self.shared.parts.pace
    }

    /// Asks the pod to drain: from now on it takes no streams. While it does so already, the newer wish counts. Unless it
    /// is `forced`, the pod takes streams again where it finds that no other one does.
    pub fn drain(&self, Pace { patience, streams_per_s }: Pace, forced: bool) {
        let shared = &self.shared;
        let deadline = Instant::now() + patience;
        let order = Order { deadline, streams_per_s: streams_per_s.max(1.0), forced };
        // Phase and wish change together, as in `join`: what comes last counts, of both.
        shared.phase.send_modify(|phase| {
            shared.order.send_replace(Some(order));
            if matches!(*phase, Phase::Joining | Phase::Active) {
                *phase = Phase::Draining;
            }
        });
    }

    /// No gateway is waited for any more, and nothing is committed.
    pub fn hurry(&self) {
        self.shared.hurry.hurry();
    }

    /// Lets the pod in, or takes its drain back.
    ///
    /// # Errors
    /// `Invalid` where its drain has come too far.
    pub fn join(&self) -> Result<(), Error> {
        let shared = &self.shared;
        let mut is_late = false;
        shared.phase.send_modify(|phase| match *phase {
            Phase::Drained | Phase::Undrained => is_late = true,
            Phase::Draining if shared.parts.scope.is_draining() => is_late = true,
            Phase::Joining | Phase::Active | Phase::Draining => {
                shared.order.send_replace(None);
                *phase = Phase::Active;
            }
        });
        if is_late {
            let message =
                format!("pod {} has drained, or nearly so: start it again to let it in", shared.parts.id);
            return Err(Error::invalid("pod_ended", message));
        }
        self.announce();
        Ok(())
    }

    /// Whether a new stream may open here.
    ///
    /// # Errors
    /// `Unavailable` where the pod is not active.
    pub fn check_open(&self) -> Result<(), Error> {
        let (id, phase) = (&self.shared.parts.id, self.phase());
        match phase {
            Phase::Active => Ok(()),
            Phase::Joining => {
                let message = format!("pod {id} was not let in yet: open the stream elsewhere");
                Err(Error::unavailable("joining", message))
            }
            Phase::Draining | Phase::Drained | Phase::Undrained => {
                let message = format!("pod {id} is going away: open the stream elsewhere");
                Err(Error::unavailable("draining", message))
            }
        }
    }

    /// What there is to know of the pod's phase, and of what is left to do.
    pub fn status(&self) -> proto::PodStatus {
        let Parts { id, streams, wal, log_place, tables, .. } = &self.shared.parts;
        let order = *self.shared.order.borrow();
        let left = order.map(|order| order.deadline.saturating_duration_since(Instant::now()));
        let log = wal.status();
        proto::PodStatus {
            pod: id.to_string(),
            phase: self.phase().to_string(),
            streams: u32::try_from(streams.held().len()).unwrap_or(u32::MAX),
            bytes: log.entry_bytes,
            tables: u32::try_from(tables.unfinished().0).unwrap_or(u32::MAX),
            deadline_ms: left.map_or(0, |left| u64::try_from(left.as_millis()).unwrap_or(u64::MAX)),
            log_entries: log.outstanding,
            log_place: log_place.clone(),
            former_logs: self.former().into_keys().map(|log| self.place_of(log)).collect(),
        }
    }

    fn announce(&self) {
        let Parts { id, membership, tables_id, zone, .. } = &self.shared.parts;
        let Some(address) = self.shared.address.borrow().clone() else { return };
        let (phase, zone, tables) = (self.phase(), zone.clone(), Some(*tables_id));
        let state = PodState { address, phase, zone, tables, load: self.load() };
        membership.announce_pod(id, state);
    }

    /// Reports the pod's load until its end.
    async fn report(self) {
        let Parts { scope, processor_time, .. } = &self.shared.parts;
        let (mut meter, mut shedder) = (Meter::new(self.shared.parts.bytes_per_s_max), Shedder::default());
        let (mut told, mut told_at) = (0.0, None::<Instant>);
        let (mut looked, mut cpu) = (Instant::now(), processor_time());
        let mut wait = REPORT_INTERVAL;
        loop {
            tokio::select! {
                biased; // the end first
                () = scope.cancelled() => return,
                () = tokio::time::sleep(LOOK_INTERVAL) => {}
            }
            let (elapsed, used) = (looked.elapsed(), processor_time());
            let traffic = self.shared.parts.streams.traffic(elapsed);
            let load = self.look(&mut meter, &traffic, elapsed, used.saturating_sub(cpu));
            (looked, cpu) = (Instant::now(), used);
            *self.shared.load.lock().unwrap_or_else(PoisonError::into_inner) = load;
            self.shed(&mut shedder, &traffic);
            let fraction = self.load().fraction();
            if told_at.is_none_or(|at| at.elapsed() >= wait) || (fraction - told).abs() > CHANGE_TOLD {
                self.announce();
                (told, told_at) = (fraction, Some(Instant::now()));
                wait = REPORT_INTERVAL.mul_f64(rand::rng().random_range(0.9..1.1));
            }
        }
    }

    /// The load as it is now, `elapsed` after the last look.
    fn look(
        &self,
        meter: &mut Meter,
        traffic: &[StreamLoad],
        elapsed: Duration,
        cpu: Duration,
    ) -> LoadReport {
        let Parts { tables, admission, .. } = &self.shared.parts;
        // Not the sum of the streams' rates: of streams that come and go there is always less than was let in.
        let bytes_per_s = meter.rate(admission.admitted(), elapsed);
        let held = traffic.iter().filter(|stream| stream.held).count();
        LoadReport {
            streams: u32::try_from(held).unwrap_or(u32::MAX),
            tables: by_table(traffic),
            lag_ms: u64::try_from(tables.unfinished().1.as_millis()).unwrap_or(u64::MAX),
            refused: admission.refused(),
            ..meter.measure(&self.sample(elapsed, cpu, bytes_per_s))
        }
    }

    /// Where the pod is hot and others are not, asks the gateways of some streams to go on with them elsewhere.
    fn shed(&self, shedder: &mut Shedder, traffic: &[StreamLoad]) {
        let Parts { id, pool, streams, .. } = &self.shared.parts;
        if self.phase() != Phase::Active {
            return;
        }
        let (view, now) = (pool.view(), Instant::now().into_std());
        let Some(excess) = shedder.observe(id, &view, now) else { return };
        let held = traffic.iter().enumerate().filter(|(_, stream)| stream.held);
        let movable = held.map(|(nth, stream)| Movable {
            stream: nth,
            table: &stream.table,
            bytes_per_s: stream.bytes_per_s,
            open_for: stream.here_for,
            is_resumed: stream.has_moved,
        });
        let movable: Vec<_> = movable.collect();
        let chosen = shedder.choose(excess, (id, &view), &movable, now);
        if !chosen.is_empty() {
            let streams = chosen.len();
            tracing::info!(pod = %id, streams, ?excess, "pod is hot: gateways are to go on with streams elsewhere");
        }
        for stream in chosen.into_iter().map(|nth| &traffic[nth]) {
            streams.ask_handoff(&stream.stream, &stream.table_id, HOT);
        }
    }

    fn sample(&self, elapsed: Duration, cpu: Duration, bytes_per_s: f64) -> Sample {
        let Parts { admission, tables, wal, memory_bytes_max, .. } = &self.shared.parts;
        let (ingress_bytes, ingress_bytes_max) = admission.used();
        let log = wal.status();
        Sample {
            elapsed,
            cpu,
            cores: cores(),
            ingress_bytes,
            ingress_bytes_max,
            memory_bytes: tables.memory_bytes(),
            memory_bytes_max: *memory_bytes_max,
            log_bytes: log.bytes_used,
            log_bytes_max: log.bytes_max,
            bytes_per_s,
        }
    }

    /// Follows the wishes until the pod is drained.
    async fn run(self) {
        let Parts { id, scope, streams, lanes, wal, .. } = &self.shared.parts;
        let mut orders = self.shared.order.subscribe();
        loop {
            tokio::select! {
                biased; // the end first
                () = scope.cancelled() => return,
                wished = orders.wait_for(Option::is_some) => if wished.is_err() { return },
            }
            tracing::info!(pod = %id, streams = streams.held().len(), "pod is draining");
            self.announce();
            self.give_notice().await;
            if self.hand_over(&mut orders).await {
                break;
            }
            self.announce();
            tracing::info!(pod = %id, "pod takes streams again");
        }
        scope.drain();
        if lanes.close().await.is_err() {
            tracing::error!(pod = %id, "a lane panicked while the pod drained");
        }
        // The tables get what the lanes have handed to the log only once it is durable.
        wal.settled().await;
        tokio::select! {
            biased; // what is committed needs no hurry
            () = self.commit_all() => {}
            () = self.shared.hurry.hurried() => {}
        }
        let left = self.note_empty_log().await;
        self.shared.left.lock().unwrap_or_else(PoisonError::into_inner).clone_from(&left);
        self.shared.phase.send_replace(if left.is_none() { Phase::Drained } else { Phase::Undrained });
        self.shared.load.lock().unwrap_or_else(PoisonError::into_inner).forget_streams();
        self.announce();
        match left {
            None => tracing::info!(pod = %id, "pod has drained"),
            Some(left) => tracing::warn!("{left}"),
        }
    }

    /// Commits what is in the log, and in those of former lives. Runs whose predecessors are in another pod's log are waited
    /// for until the deadline: that pod may be about to commit them.
    async fn commit_all(&self) {
        let Parts { tables, adoptions, .. } = &self.shared.parts;
        let deadline = self.shared.order.borrow().map(|order| order.deadline);
        loop {
            tables.drain().await;
            let is_late = deadline.is_none_or(|deadline| Instant::now() >= deadline);
            if (tables.held_runs() == 0 && !adoptions.may_end()) || is_late {
                return;
            }
            tokio::time::sleep(COMMIT_AGAIN).await;
        }
    }

    /// Whoever looks for records in this pod's log finds that there are none, though the pod is gone. What there is where
    /// that is not so.
    async fn note_empty_log(&self) -> Option<Undrained> {
        let Parts { id, tables, wal, log_place, .. } = &self.shared.parts;
        let (log, former) = (wal.status(), self.former());
        let left = || Undrained {
            pod: id.clone(),
            log_place: log_place.clone(),
            entries: log.outstanding,
            bytes: log.entry_bytes,
            held_runs: tables.held_runs(),
            stranded: tables.stranded(),
            former: former.iter().map(|(log, why)| (self.place_of(*log), why.clone())).collect(),
        };
        if log.outstanding > 0 {
            return Some(left());
        }
        if let Err(error) = tables.drained_logs().note(wal.log_id()).await {
            tracing::warn!(pod = %id, %error, "named streams that were here wait for this pod until it is back");
        } else if let Err(error) = wal.close_for_good().await {
            let error = &error as &dyn std::error::Error;
            tracing::warn!(pod = %id, error, "objects of the log are left: another pod, or the next start, deletes them");
        }
        (!former.is_empty()).then(left)
    }

    /// Logs of the pod's former lives that may hold something, and why.
    fn former(&self) -> BTreeMap<LogId, String> {
        let former = self.shared.parts.adoptions.former().into_iter();
        let late = || "the drain's end came before; another pod goes on, or the next start".to_owned();
        former.map(|(log, why)| (log, why.unwrap_or_else(late))).collect()
    }

    fn place_of(&self, log: LogId) -> String {
        format!("{}/{}", self.shared.parts.logs_place, log.0)
    }

    /// Gives the other pods, which have to hear of it first, time to open the tables whose streams come to them; and this
    /// one to hear that another one drains too.
    async fn give_notice(&self) {
        let is_forced = self.shared.order.borrow().is_none_or(|order| order.forced);
        if is_forced && (self.shared.parts.streams.held().is_empty() || !self.has_others()) {
            return;
        }
        tokio::select! {
            biased; // a hurry first
            () = self.shared.hurry.hurried() => {}
            () = tokio::time::sleep(NOTICE) => {}
        }
    }

    /// Asks gateways to take their streams elsewhere until none is left or the deadline has come. False where the wish
    /// was taken back.
    async fn hand_over(&self, orders: &mut watch::Receiver<Option<Order>>) -> bool {
        let streams = &self.shared.parts.streams;
        let mut asked: HashMap<(TableId, StreamId), Instant> = HashMap::new();
        let mut allowance = 0.0;
        loop {
            let Some(order) = *orders.borrow_and_update() else { return false };
            let (held, now) = (streams.held(), Instant::now());
            if !order.forced && self.is_last() && self.take_back() {
                return false;
            }
            // Where no other pod takes streams, gateways have to wait for one, and this one need not.
            if held.is_empty() || now >= order.deadline || !self.has_others() {
                if !held.is_empty() {
                    tracing::warn!(streams = held.len(), "streams did not leave in time: their calls end");
                }
                return self.is_past_return();
            }
            allowance =
                (allowance + order.streams_per_s * PACE_STEP.as_secs_f64()).min(order.streams_per_s.max(1.0));
            for (table, stream) in held {
                if allowance < 1.0 {
                    break;
                }
                let key = (table, stream);
                if asked.get(&key).is_some_and(|at| now.duration_since(*at) < ASK_AGAIN) {
                    continue;
                }
                if streams.ask_handoff(&key.1, &key.0, DRAINING) {
                    allowance -= 1.0;
                    asked.insert(key, now);
                }
            }
            tokio::select! {
                biased; // the order is of no consequence: both lead to another look
                () = self.shared.hurry.hurried() => return self.is_past_return(),
                changed = orders.changed() => if changed.is_err() { return true },
                () = tokio::time::sleep(PACE_STEP) => {}
            }
        }
    }

    /// Whether another pod takes streams.
    fn has_others(&self) -> bool {
        let Parts { id, membership, .. } = &self.shared.parts;
        let members = membership.now();
        members.pods.iter().any(|(other, pod)| other != id && pod.is(Phase::Active))
    }

    /// Whether nobody would take streams once this pod has gone. Of pods that drain at the same time the first by name
    /// stays.
    fn is_last(&self) -> bool {
        let Parts { id, membership, .. } = &self.shared.parts;
        let members = membership.now();
        let mut others = members.pods.iter().filter(|(other, _)| *other != id);
        !others.any(|(other, pod)| pod.is(Phase::Active) || (pod.is(Phase::Draining) && other < id))
    }

    /// Takes an unforced drain back; false where it has come too far.
    fn take_back(&self) -> bool {
        let id = &self.shared.parts.id;
        tracing::warn!(pod = %id, "no other pod takes streams: the drain is taken back; start another pod, or force it");
        self.join().is_ok()
    }

    /// From here on the drain cannot be taken back, unless that has just been done.
    fn is_past_return(&self) -> bool {
        let mut is_past = false;
        // `join` changes the phase under the same lock.
        self.shared.phase.send_if_modified(|phase| {
            is_past = *phase == Phase::Draining;
            if is_past {
                self.shared.parts.scope.drain();
            }
            false
        });
        is_past
    }
}
