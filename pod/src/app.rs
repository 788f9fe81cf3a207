//! A pod as a whole: replay the log, take streams, and in the end finish what was accepted.
//!
//! *Owns*: the order of births and deaths of a pod's parts.
//! *Does not own*: any of the parts.
//! Keeps P3: a log that fails ends the process, so that nothing is acked that is not on stable storage.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::TryStreamExt;
use sluice_shared::error::Error;
use sluice_shared::ids::{LogId, PodId, TableName};
use sluice_shared::lifecycle::{Hurry, OnPanic, Phase, TaskScope, blocking};
use sluice_shared::link::{self, Gathered, PipeDialer, PipeListener, PodAddress};
use sluice_shared::membership::Membership;
use sluice_shared::pool::PoolView;
use sluice_shared::proto::MESSAGE_BYTES_MAX;
use sluice_shared::proto::pod_server::PodServer;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::time::Instant as Now;
use tonic::transport::server::TcpIncoming;
use uuid::Uuid;

use crate::admission::Admission;
use crate::adopt::{Adopter, Adoptions};
use crate::config::{Join, LogKind, PodConfig};
use crate::conflict::Conflicts;
use crate::drained::{DrainedLogs, LOG_RELEASED};
use crate::duty::{Duty, Parts, Undrained};
use crate::lane::{Lanes, Limits};
use crate::machine::Machine;
use crate::pool::Pool;
use crate::release::{Hearing, Releaser};
use crate::service::PodService;
use crate::stream::Reach;
use crate::stream::record::LogEntry;
use crate::stream::{DETACHED_KEPT, Streams};
use crate::table::batch::Batch;
use crate::table::{Clock, Storage, Tables, TablesConfig};
use crate::wal::{ObjectLogConfig, Replay, Wal, WalConfig};

/// Groups of the log are cut at this size.
const GROUP_BYTES_MAX: u64 = 4 << 20;
/// An Arrow frame may decode to this much more than its largest wire size.
const DECODED_FACTOR: usize = 8;
/// How often streams are looked through for those whose gateways have not come back.
const SWEEP_INTERVAL: Duration = Duration::from_secs(30);
/// Streams of a pod that drains go to the first pods of their table's order, or to some behind these.
const NEIGHBOURS: usize = 2;
/// Exit status of a process that finds itself in a pool that it cannot be in.
const EXIT_CONFLICT: i32 = 78;
/// A pod that runs looks so often whether its log was released.
const RELEASE_INTERVAL: Duration = Duration::from_secs(5);
/// How long a pod that starts asks a tables' store that fails, and how often.
const STORE_PATIENCE: Duration = Duration::from_secs(10);
const STORE_PAUSE: Duration = Duration::from_secs(1);
/// A log whose pod has been gone for long enough is looked at within seconds, and again some seconds after a failure.
const TAKEN_OVER_WITHIN: Duration = Duration::from_secs(30);
/// How long a pod that starts waits for the first word of the others.
const MEETING_MAX: Duration = Duration::from_secs(1);

/// How a pod is reached.
pub enum Listen {
    /// At the address in its configuration.
    Tcp,
    /// From within this process; who calls has the other end.
    Pipe(PipeListener, PipeDialer),
}

impl Listen {
    fn in_process(&self) -> Option<PodAddress> {
        match self {
            Self::Pipe(_, dialer) => Some(PodAddress::InProcess(dialer.clone())),
            Self::Tcp => None,
        }
    }
}

/// A running pod. Dropping it cancels its tasks; `end` ends them in good order.
pub struct Pod {
    id: PodId,
    address: Option<SocketAddr>,
    service: PodService,
    wal: Wal,
}

impl Pod {
    /// Opens the log, replays it into the tables, and starts to take streams.
    ///
    /// # Errors
    /// `Invalid` for a configuration or a log that cannot be used as it is; `Unavailable` where storage or the
    /// address cannot be had.
    pub async fn start(config: PodConfig, listen: Listen, membership: Membership) -> Result<Self, Error> {
        Self::start_on(Machine::this(), config, listen, membership).await
    }

    /// As `start`, on another machine than this.
    ///
    /// # Errors
    /// As `start`.
    pub async fn start_on(
        machine: Machine,
        config: PodConfig,
        listen: Listen,
        membership: Membership,
    ) -> Result<Self, Error> {
        config.validate().map_err(|error| Error::invalid("invalid_config", error.to_string()))?;
        let scope = TaskScope::new(OnPanic::EndProcess);
        let storage = Storage::at(&machine.stores, &config.tables_dir)?;
        let tables_id = meet(&machine, &config, &storage, &membership, &scope).await?;
        let pool = Pool::new(config.id.clone(), membership.now().view(Now::now()));
        let (opened, tables_opened) = watch::channel(None);
        scope.spawn("pool", follow(membership.clone(), pool.clone(), tables_opened, scope.clone()));
        let (wal, replay) = open_log(&machine, &config, &storage, &scope).await?;
        let kept = tables_config(&config, pool.clone());
        let tables = Tables::on(storage.clone(), kept, wal.clone(), scope.clone());
        take_log(&tables, wal.log_id(), &config, &machine, &scope).await?;
        let streams = Streams::default();
        replay_log(replay, &streams, &tables, &config.id).await?;
        opened.send_replace(Some(tables.clone()));
        let lanes = start_lanes(&config, &wal, &scope)?;
        let (rate, room) = (config.bytes_per_s_max.map(|rate| rate.0), config.ingress_bytes.as_usize());
        let admission = Admission::new(config.id.clone(), wal.clone(), room, rate);
        let (members, adoptions) = (membership.clone(), Adoptions::default());
        let duty = Duty::new(Parts {
            id: config.id.clone(),
            zone: membership.now().zone.clone(),
            membership,
            tables_id,
            pool: pool.clone(),
            scope: scope.clone(),
            admission: admission.clone(),
            streams: streams.clone(),
            lanes: Arc::clone(&lanes),
            tables: tables.clone(),
            wal: wal.clone(),
            log_place: log_place(&config, &storage, wal.log_id()),
            logs_place: storage.place("_sluice/wal"),
            adoptions: adoptions.clone(),
            memory_bytes_max: config.memory_bytes.0,
            bytes_per_s_max: rate,
            pace: config.pace(),
            processor_time: machine.processor_time,
        });
        let log = LogEntry { log: wal.log_id(), pod: config.id.clone() };
        let parts = (tables.clone(), pool.clone(), log.clone(), adoptions);
        let releaser = releaser(&config, &storage, members.clone(), parts);
        let service = PodService {
            scope: scope.clone(),
            admission,
            streams: streams.clone(),
            lanes,
            tables,
            log,
            duty: duty.clone(),
            pool,
            releaser,
            auto_create: config.auto_create,
            decoded_bytes_max: config.record_bytes_max.as_usize() * DECODED_FACTOR,
        };
        scope.spawn("sweep", sweep(scope.clone(), streams));
        scope.spawn("adopter", adopter(&config, &storage, members, &service).run());
        let in_process = listen.in_process();
        let address = serve(&config, listen, service.clone()).await?;
        let reached = reached(&config, address, in_process)?;
        duty.listens(reached, config.join == Join::Held);
        let (phase, shown) = (duty.phase(), address.map(tracing::field::display));
        tracing::info!(pod = %config.id, %phase, address = shown, log = %wal.log_id().0, "pod is ready");
        Ok(Self { id: config.id, address, service, wal })
    }

    /// Where the pod listens, where that is TCP.
    pub fn address(&self) -> Option<SocketAddr> {
        self.address
    }

    /// The pod's name.
    pub fn id(&self) -> &PodId {
        &self.id
    }

    /// Where it is in its life.
    pub fn duty(&self) -> &Duty {
        &self.service.duty
    }

    /// Takes nothing new, hands over its streams, makes durable what was accepted, commits it, and ends. Answers what its
    /// logs still hold, if that is anything: runs that wait for other logs until the deadline, or whose table is gone; logs of
    /// its former lives that are damaged.
    pub async fn drain(self) -> Option<Undrained> {
        self.drain_or_hurry(&Hurry::default()).await
    }

    /// As `drain`; once there is a hurry no gateway is waited for and nothing more is committed. What was accepted is made
    /// durable all the same, and the next start commits it.
    pub async fn drain_or_hurry(self, hurry: &Hurry) -> Option<Undrained> {
        let duty = self.service.duty.clone();
        if !duty.phase().is_over() {
            duty.drain(duty.pace(), true);
            tokio::select! {
                biased; // what has drained needs no hurry
                () = duty.drained() => {}
                () = hurry.hurried() => {
                    tracing::warn!(pod = %self.id, "in a hurry: what is not committed yet is so at the next start");
                    duty.hurry();
                    duty.drained().await;
                }
            }
        }
        tokio::select! {
            biased; // who is in a hurry may be taken for lost
            () = hurry.hurried() => {}
            () = duty.told() => {}
        }
        self.end().await;
        duty.left()
    }

    /// Ends what has drained.
    pub async fn end(self) {
        self.service.scope.cancel();
        if let Err(late) = self.service.scope.join(Duration::from_secs(5)).await {
            tracing::warn!(pod = %self.id, tasks = ?late, "tasks did not end in time");
        }
        self.wal.close().await;
    }
}

/// Hears of the others, and whether this pod can be in a pool with them, before anything is replayed into tables that may
/// be others than theirs. Answers which tables it has.
async fn meet(
    machine: &Machine,
    config: &PodConfig,
    storage: &Storage,
    membership: &Membership,
    scope: &TaskScope,
) -> Result<Uuid, Error> {
    let tables_id = patiently(|| Tables::identity(storage)).await?;
    membership.met(MEETING_MAX).await;
    let mut conflicts = Conflicts::new(config.id.clone(), membership.life(), tables_id);
    conflicts.look(&membership.now(), Now::now())?;
    let watch = watch_conflicts(membership.clone(), conflicts, machine.clone(), scope.clone());
    scope.spawn("conflicts", watch);
    Ok(tables_id)
}

/// The tables' store may be away for a moment, also while a pod starts.
async fn patiently<T, F: Future<Output = Result<T, Error>>>(ask: impl Fn() -> F) -> Result<T, Error> {
    let deadline = tokio::time::Instant::now() + STORE_PATIENCE;
    loop {
        match ask().await {
            Err(error) if error.retryable && tokio::time::Instant::now() < deadline => {
                tracing::warn!(%error, "the start waits for the tables' store");
                tokio::time::sleep(STORE_PAUSE).await;
            }
            answer => return answer,
        }
    }
}

fn start_lanes(config: &PodConfig, wal: &Wal, scope: &TaskScope) -> Result<Arc<Lanes>, Error> {
    let record_bytes_max = config.record_bytes_max.as_usize();
    // A single row has to fit a segment of the log, with what Arrow adds to it.
    let segment_bytes = usize::try_from(wal.payload_bytes_max()).unwrap_or(usize::MAX);
    let row_bytes_max = (record_bytes_max * DECODED_FACTOR).min(segment_bytes / 2);
    let limits = Limits { record_bytes_max, row_bytes_max };
    let lanes = Lanes::start(config.lane_count(), wal, limits, scope).map_err(|error| {
        Error::unavailable("no_threads", format!("pod {}: cannot start its lanes: {error}", config.id))
    })?;
    Ok(Arc::new(lanes))
}

/// Ends the process when it is seen that this pod cannot be in the pool. What it has acked is in its log.
async fn watch_conflicts(
    membership: Membership,
    mut conflicts: Conflicts,
    machine: Machine,
    scope: TaskScope,
) {
    let mut members = membership.watch();
    loop {
        let newest = Arc::clone(&members.borrow_and_update());
        if let Err(error) = conflicts.look(&newest, Now::now()) {
            tracing::error!(%error, "the pod cannot be in this pool: the process ends");
            return (machine.end)(EXIT_CONFLICT);
        }
        tokio::select! {
            biased; // the end first
            () = scope.draining() => return,
            changed = members.changed() => if changed.is_err() { return },
        }
    }
}

/// The log is in use from now on, unless an operator has given it up; and whose it is, is known should it be lost.
async fn take_log(
    tables: &Tables,
    log: LogId,
    config: &PodConfig,
    machine: &Machine,
    scope: &TaskScope,
) -> Result<(), Error> {
    patiently(|| async { tables.drained_logs().withdraw(log).await }).await?;
    if config.log == LogKind::Disk
        && let Err(error) = tables.owners().note(log, &config.id).await
    {
        tracing::warn!(pod = %config.id, log = %log.0, %error, "should its disk be lost, the log is known by its id alone");
    }
    scope.spawn("other logs", tell_other_logs(tables.clone(), log, config.clone()));
    scope.spawn("released", watch_release(tables.clone(), log, machine.clone(), scope.clone()));
    Ok(())
}

/// A pod that begins with an empty directory may have had another one, whose volume was not mounted.
async fn tell_other_logs(tables: Tables, log: LogId, config: PodConfig) {
    let others = match tables.owners().others_of(&config.id, log, &tables.drained_logs()).await {
        Ok(others) => others,
        Err(error) => {
            return tracing::warn!(pod = %config.id, %error, "cannot see whether the pod had another log");
        }
    };
    for other in others {
        let (pod, dir, other) = (&config.id, config.wal_dir.display(), other.0);
        tracing::warn!(%pod, own = %log.0, log = %other, "the pod had another log, which may hold what is in no table yet: drain \
            the pod, mount that log's volume at {dir}, and start it again; where it is lost for good: sluice release --log \
            {other}");
    }
}

/// Ends the process when its log is released while it runs: an operator took the pod for lost, which was only stopped.
async fn watch_release(tables: Tables, log: LogId, machine: Machine, scope: TaskScope) {
    loop {
        tokio::select! {
            biased; // the end first
            () = scope.draining() => return,
            () = tokio::time::sleep(RELEASE_INTERVAL) => {}
        }
        if let Err(error) = tables.drained_logs().check_not_released(log).await
            && error.code == LOG_RELEASED
        {
            tracing::error!(%error, "the process ends");
            return (machine.end)(EXIT_CONFLICT);
        }
    }
}

/// Keeps the pool as the membership has it.
async fn follow(
    membership: Membership,
    pool: Pool,
    tables: watch::Receiver<Option<Tables>>,
    scope: TaskScope,
) {
    let mut members = membership.watch();
    let mut view = PoolView::new([]);
    let mut leaving = BTreeSet::new();
    loop {
        let newest = Arc::clone(&members.borrow_and_update());
        newest.teach(&mut view, Now::now());
        pool.update(view.clone());
        let draining = newest.pods.iter().filter(|(_, pod)| pod.is(Phase::Draining));
        let draining: BTreeSet<PodId> = draining.map(|(id, _)| id.clone()).collect();
        if let Some(tables) = tables.borrow().clone() {
            for pod in draining.difference(&leaving).filter(|pod| *pod != pool.me()) {
                let load = newest.pods[pod].state.load.tables.iter();
                let coming =
                    load.map(|load| load.table.clone()).filter(|table| is_near(&view, table, pool.me()));
                scope.spawn("prepare", prepare(tables.clone(), coming.collect()));
            }
        }
        leaving = draining;
        tokio::select! {
            biased; // the end first
            () = scope.cancelled() => return,
            changed = members.changed() => if changed.is_err() { return },
        }
    }
}

/// Whether streams of the table that leave another pod may come to this one.
fn is_near(view: &PoolView, table: &TableName, me: &PodId) -> bool {
    view.order(table).take(view.spread(table) + NEIGHBOURS).any(|pod| pod.id == *me)
}

/// Opens tables before their streams come: the first open of one takes many times as long as that of a stream.
async fn prepare(tables: Tables, coming: Vec<TableName>) {
    for table in coming {
        if let Err(error) = tables.open(&table).await {
            tracing::debug!(%table, %error, "a table that a draining pod has cannot be opened here yet");
        }
    }
}

fn tables_config(config: &PodConfig, pool: Pool) -> TablesConfig {
    TablesConfig {
        root: config.tables_dir.clone(),
        pod: config.id.clone(),
        pool,
        flush_interval: config.flush_interval(),
        target_file_bytes: config.target_file_bytes.0,
        memory_bytes: config.memory_bytes.0,
        checkpoint_interval: config.checkpoint_interval,
        ended_kept: DETACHED_KEPT,
        clock: Clock::system(),
    }
}

fn releaser(
    config: &PodConfig,
    storage: &Storage,
    membership: Membership,
    (tables, pool, log, adoptions): (Tables, Pool, LogEntry, Adoptions),
) -> Releaser {
    let hears: Hearing = Arc::new(move || {
        let membership = membership.clone();
        Box::pin(async move { membership.heard().await })
    });
    let taken_over_within = config.adopt_after() + TAKEN_OVER_WITHIN;
    Releaser { tables, pool, log, logs: storage.logs(), adoptions, hears, taken_over_within }
}

fn adopter(config: &PodConfig, storage: &Storage, membership: Membership, service: &PodService) -> Adopter {
    Adopter {
        logs: storage.logs(),
        pod: config.id.clone(),
        own: service.log.log,
        membership,
        pool: service.pool.clone(),
        tables: service.tables.clone(),
        scope: service.scope.clone(),
        after: config.adopt_after(),
        adoptions: service.releaser.adoptions.clone(),
    }
}

/// The pod's log, and what its former life left there: in the tables' store that is in logs of their own (`adopt`).
async fn open_log(
    machine: &Machine,
    config: &PodConfig,
    storage: &Storage,
    scope: &TaskScope,
) -> Result<(Wal, Option<Replay>), Error> {
    let opened = match config.log {
        LogKind::Disk => {
            let wal_config = WalConfig {
                dir: config.wal_dir.clone(),
                owner: config.id.clone(),
                segment_bytes: config.segment_bytes.0,
                bytes_max: config.wal_bytes_max.0,
                group_bytes_max: GROUP_BYTES_MAX,
                direct_io: true,
                accept_loss: config.accept_loss,
            };
            let (machine, scope) = (machine.clone(), scope.clone());
            let opened = blocking(move || machine.open_log(wal_config, &scope)).await;
            let opened = opened.map_err(|error| Error::internal(format!("opening the log: {error}")))?;
            opened.map(|(wal, replay)| (wal, Some(replay)))
        }
        LogKind::Object => {
            check_no_disk_log(config, storage).await?;
            let wal_config = ObjectLogConfig {
                owner: config.id.clone(),
                interval: Duration::from_millis(config.log_interval_ms),
                group_bytes_max: config.log_group_bytes.0,
                payload_bytes_max: config.segment_bytes.0,
                bytes_max: config.wal_bytes_max.0,
            };
            let on_failure = machine.on_failure(config.id.clone());
            Wal::begin(&storage.logs(), wal_config, on_failure).await.map(|wal| (wal, None))
        }
    };
    opened.map_err(|error| Error::invalid("wal", format!("pod {}: {}", config.id, chain(&error))))
}

/// Where a pod's log is, for people.
fn log_place(config: &PodConfig, storage: &Storage, log: LogId) -> String {
    match config.log {
        LogKind::Disk => config.wal_dir.display().to_string(),
        LogKind::Object => storage.place(&format!("_sluice/wal/{}", log.0)),
    }
}

/// A log on a disk may hold what is in no table: it is not left lying there.
async fn check_no_disk_log(config: &PodConfig, storage: &Storage) -> Result<(), Error> {
    let dir = &config.wal_dir;
    let found = Wal::id_in(dir).map_err(|error| Error::invalid("wal", chain(&error)))?;
    let Some(log) = found else { return Ok(()) };
    let drained = DrainedLogs::new(Arc::clone(&storage.stores.tables), &storage.root);
    if drained.holds_nothing(log).await? {
        return Ok(());
    }
    let message = format!(
        "pod {}: pod.log is \"object\", but {} has its log on a disk, which may hold records that are in no table yet: start \
         it with pod.log = \"disk\" once more, and drain it",
        config.id,
        dir.display()
    );
    Err(Error::invalid("wal", message))
}

async fn replay_log(
    mut replay: Option<Replay>,
    streams: &Streams,
    tables: &Tables,
    pod: &PodId,
) -> Result<(), Error> {
    let (mut batches, mut records) = (0u64, 0u64);
    while let Some(mut reading) = replay.take() {
        // Reading blocks; what it yields is given to the tables one by one, so that memory stays bounded.
        let read = blocking(move || (reading.next(), reading)).await;
        let (entry, reading) = read.map_err(|error| Error::internal(format!("reading the log: {error}")))?;
        replay = Some(reading);
        let Some(entry) = entry else { break };
        let (durable, bytes) =
            entry.map_err(|error| Error::invalid("wal", format!("pod {pod}: {}", chain(&error))))?;
        let position = durable.position();
        let batch = Batch::decode(bytes).map_err(|error| {
            let message =
                format!("pod {pod}: log entry at {position} is whole but no batch: {}", chain(&error));
            Error::invalid("wal_entry", format!("{message}; was it written by a newer Sluice?"))
        })?;
        for run in &batch.runs {
            let reach = Reach { next: run.offsets.end, boundary: run.boundary() };
            streams.logged(&batch.table_id, &run.stream, reach);
            records += run.offsets.count();
        }
        batches += 1;
        tables.replay(durable, batch).await;
    }
    if batches > 0 {
        tracing::info!(%pod, batches, records, "replayed the log");
    }
    Ok(())
}

async fn serve(config: &PodConfig, listen: Listen, service: PodService) -> Result<Option<SocketAddr>, Error> {
    let scope = service.scope.clone();
    let server = PodServer::new(service)
        .max_decoding_message_size(MESSAGE_BYTES_MAX)
        .max_encoding_message_size(MESSAGE_BYTES_MAX);
    let mut builder = link::server();
    let router = builder.add_service(server);
    let stop = {
        let scope = scope.clone();
        async move { scope.cancelled().await }
    };
    let (serving, address): (futures_util::future::BoxFuture<'static, _>, _) = match listen {
        Listen::Pipe(pipes, _) => {
            let incoming = pipes.map_ok(Gathered::new);
            (Box::pin(router.serve_with_incoming_shutdown(incoming, stop)), None)
        }
        Listen::Tcp => {
            let cannot = |error: std::io::Error| {
                let message = format!("pod {}: cannot listen on {}: {error}", config.id, config.listen);
                Error::unavailable("cannot_listen", message)
            };
            let listener = TcpListener::bind(&config.listen).await.map_err(cannot)?;
            let address = listener.local_addr().map_err(cannot)?;
            let incoming = TcpIncoming::from(listener).with_nodelay(Some(true)).map_ok(Gathered::new);
            (Box::pin(router.serve_with_incoming_shutdown(incoming, stop)), Some(address))
        }
    };
    scope.spawn("pod server", async move {
        if let Err(error) = serving.await {
            tracing::error!(%error, "the pod service has ended");
        }
    });
    Ok(address)
}

/// Where the others reach the pod.
fn reached(
    config: &PodConfig,
    listens: Option<SocketAddr>,
    in_process: Option<PodAddress>,
) -> Result<PodAddress, Error> {
    let named = config.advertise.clone().or_else(|| listens.map(|address| address.to_string()));
    let nowhere = || Error::internal("a pod that listens nowhere");
    named.map(PodAddress::Tcp).or(in_process).ok_or_else(nowhere)
}

async fn sweep(scope: TaskScope, streams: Streams) {
    let mut ticks = tokio::time::interval(SWEEP_INTERVAL);
    loop {
        tokio::select! {
            biased; // stopping first
            () = scope.draining() => return,
            _ = ticks.tick() => streams.sweep(Instant::now()),
        }
    }
}

/// An error with its causes, in one line.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut line = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        line.push_str(": ");
        line.push_str(&error.to_string());
        cause = error.source();
    }
    line
}
