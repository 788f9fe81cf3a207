//! The load-test rig: scenarios and traces, sent by the clock whatever the service does, and reports of what came of it.
//!
//! *Owns*: one run, from starting the service to counting the rows of its tables.
//! *Does not own*: the parts (below), the command line (`main`).

pub mod compare;
mod curve;
pub mod events;
mod flight;
pub mod html;
pub mod machine;
pub(crate) mod messages;
mod record;
pub mod replay;
pub mod report;
mod sample;
pub mod scenario;
pub mod site;
mod source;
mod stream;
pub(crate) mod target;
mod timer;
mod trace;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use arrow::datatypes::SchemaRef;
use bytes::Bytes;
use futures_util::{StreamExt, TryStreamExt};
use indicatif::{ProgressBar, ProgressStyle};
use sluice_client::Client;
use sluice_shared::lifecycle::{OnPanic, TaskScope, now_us};
use tokio::sync::{Semaphore, mpsc, watch};

use crate::edges::{Edge, Transport};
use crate::history::History;
use crate::judge::judge_dir;
use events::Events;
use messages::Load as Messages;
use record::Recorder;
use report::{Measured, Run};
use sample::Watch;
use scenario::{Load, Scenario};
use site::{Existing, Site, table_dir};
use source::{Made, Pace, Source};
use stream::{Kick, Plan, Shared, StreamTask};
use target::Target;
use target::framed::{Quic, Speech, WebSocket};
use target::grpc::{Flight, Zerobus};
use target::http::Http;
use timer::Timer;

/// Connections that are made at the same time: listen queues are short.
const CONNECTING_MAX: usize = 64;
/// Tables that are made at the same time.
const MAKING_MAX: usize = 16;
/// Payload of a load that is made beforehand and sent over and over, at most.
const FEED_BYTES_MAX: f64 = 24.0 * 1024.0 * 1024.0;
/// For streams that are behind to send what was due, and for all to be told.
const GRACE: Duration = Duration::from_secs(60);
/// Between all streams' opening and the first record.
const BEGINS_IN: Duration = Duration::from_millis(50);
const PROGRESS_INTERVAL: Duration = Duration::from_millis(250);

/// How a scenario is run.
pub struct Options<'a> {
    /// The program, where one is started.
    pub sluice: PathBuf,
    /// Data and logs go below it.
    pub dir: &'a Path,
    /// Runs against it, in place of a pool that is started.
    pub existing: Option<Existing>,
    /// Whether every version of each table is judged, by notes of all that was sent. Only over protocols that tell which
    /// stream in the table theirs is.
    pub audit: bool,
    /// What it is called where it is told of.
    pub name: &'a str,
    /// Hears how it goes.
    pub say: &'a (dyn Fn(&str) + Sync),
}

/// A load as it is sent.
pub(crate) struct Sending {
    /// What its streams have in common.
    pub(crate) load: Load,
    /// Of its tables.
    pub(crate) schema: SchemaRef,
    /// As `messages::Load` has them; without, streams have sources of their own.
    pub(crate) encoded: Bytes,
    pub(crate) hashes: Option<Arc<[Vec<u64>]>>,
    pub(crate) streams: Vec<Stream>,
}

/// One of its streams.
pub(crate) struct Stream {
    pub(crate) table: String,
    pub(crate) source: Source,
    /// Seconds since the beginning.
    pub(crate) opens: f64,
    /// In place of one that is made.
    pub(crate) name: Option<String>,
}

/// Runs a scenario once. The thread that calls must outlive it.
///
/// # Errors
/// A service that does not start, drain or open streams, something that cannot be made to happen. What the limits are for is
/// not an error here: it is in the run.
pub async fn run(options: &Options<'_>, scenario: &Scenario) -> anyhow::Result<Run> {
    events::check(scenario, &options.sluice, options.existing.is_none())?;
    for load in scenario.loads.iter().filter(|_| options.audit) {
        ensure!(
            load.tells_streams(),
            "--audit: load {:?}: over {} producers do not hear what their streams are called in the table; leave --audit \
             out, or send it over websocket or quic",
            load.name,
            load.transport.word()
        );
    }
    (options.say)("encodes records");
    let loads: Vec<Sending> = scenario
        .loads
        .iter()
        .map(|load| made(load, scenario, options.audit))
        .collect::<anyhow::Result<_>>()?;
    run_loads(options, scenario, loads).await
}

/// Runs loads that are made up already.
pub(crate) async fn run_loads(
    options: &Options<'_>,
    scenario: &Scenario,
    loads: Vec<Sending>,
) -> anyhow::Result<Run> {
    (options.say)("starts the service");
    let mut site = match options.existing.clone() {
        Some(existing) => Site::existing(existing).await?,
        None => Site::start(&options.sluice, options.dir, scenario).await?,
    };
    let tables: BTreeMap<String, SchemaRef> = loads
        .iter()
        .flat_map(|load| load.streams.iter().map(|stream| (stream.table.clone(), Arc::clone(&load.schema))))
        .collect();
    let names: Vec<String> = tables.keys().cloned().collect();
    let ran = Box::pin(send(options, scenario, (&mut site, tables), loads)).await;
    let ran = ran.inspect_err(|_| (options.say)(&site.log_tails()));
    let died = site.died()?;
    died.iter().for_each(|(who, how)| (options.say)(&format!("{who} ended by itself ({how})")));
    // What went wrong comes last.
    let (shared, happened, samples, before) = ran?;
    let died = died.iter().map(|(who, how)| {
        let seen = samples.iter().rev().find(|sample| sample.processes.contains_key(who));
        let from_s = seen.map_or(0.0, |sample| sample.at_s);
        let to_s = samples.iter().map(|sample| sample.at_s).find(|at| *at > from_s).unwrap_or(from_s);
        report::Happened { from_s, to_s, name: format!("{who} ended by itself ({how})") }
    });
    let died: Vec<report::Happened> = died.collect();
    (options.say)(match site {
        Site::Existing(_) => "waits for the last commits, and asks for the tables' rows",
        Site::Pool(_) | Site::Up(_) => "ends the service, and counts rows",
    });
    let expected = before.values().sum::<u64>() + shared.recorder.counts().durable;
    // What was measured is told also where nobody is left to count.
    let counted = site.finish(options.dir, &names, expected).await;
    let counted = counted
        .inspect_err(|error| (options.say)(&format!("the tables' rows are not known: {error:#}")))
        .ok();
    let rows = counted.map(|mut rows| {
        rows.iter_mut().for_each(|(table, rows)| *rows -= before.get(table).copied().unwrap_or(0).min(*rows));
        rows
    });
    let audit = (options.audit && rows.is_some()).then(|| judge(options, &shared, &names)).transpose()?;
    let recorder = &shared.recorder;
    let is_backlog = shared.is_backlog;
    Ok(Measured { scenario, recorder, is_backlog, happened, samples, tables: rows, died, audit }.run())
}

type Sent = (Arc<Shared>, Vec<report::Happened>, Vec<sample::Sample>, BTreeMap<String, u64>);

/// Opens all streams, sends, and waits until all is told.
async fn send(
    options: &Options<'_>,
    scenario: &Scenario,
    (site, tables): (&mut Site, BTreeMap<String, SchemaRef>),
    loads: Vec<Sending>,
) -> anyhow::Result<Sent> {
    let addresses = site.addresses();
    let names: Vec<String> = tables.keys().cloned().collect();
    make_tables(&addresses, tables).await?;
    let before = site.rows_before(&names).await?;
    let (shared, begin, kick) = shared(&loads, scenario.seconds);
    let (alive, mut ended) = mpsc::channel(1);
    (options.say)("opens streams");
    let certificate = site.certificate(options.dir);
    let run = format!("{}-{:x}", options.name, now_us());
    let (opened, mut opens) = mpsc::channel(CONNECTING_MAX);
    let (mut plans, mut load_names, mut first) = (Vec::new(), Vec::new(), 0);
    for (number, sending) in loads.into_iter().enumerate() {
        load_names.push(sending.load.name.clone());
        let spawned = spawn(
            Spawning {
                scenario,
                number,
                addresses: &addresses,
                certificate: certificate.clone(),
                run: &run,
                shared: &shared,
                opened: &opened,
                alive: &alive,
            },
            sending,
        )?;
        first += spawned.1;
        plans.push(spawned.0);
    }
    drop((opened, alive));
    for _ in 0..first {
        opens.recv().await.context("a stream's task panicked")?.context("before the first record")?;
    }
    let watch = Watch::default();
    watch.look(site);
    let began = Instant::now() + BEGINS_IN;
    begin.send(Some(began)).context("all streams have gone")?;
    let mut events =
        Events { site, watch: &watch, plans: &plans, names: load_names, kick, began, say: options.say };
    let seen = Mutex::new(Vec::new());
    let work = async {
        let happened = events.run(&scenario.events).await?;
        while ended.recv().await.is_some() {}
        anyhow::Ok(happened)
    };
    let happened = tokio::select! {
        biased; // the end of it ends the looking
        happened = work => happened?,
        () = sample::look(began, &watch, &seen) => Vec::new(),
        () = show(&shared, began, scenario.seconds) => Vec::new(),
    };
    let samples = seen.into_inner().unwrap_or_else(PoisonError::into_inner);
    Ok((shared, happened, samples, before))
}

type Began = watch::Sender<Option<Instant>>;

/// What streams have in common, and the ways to tell them that it begins, and to come back.
fn shared(loads: &[Sending], seconds: f64) -> (Arc<Shared>, Began, watch::Sender<Kick>) {
    let (begin, began) = watch::channel(None);
    let (kick, kicks) = watch::channel(Kick::default());
    let lasts = Duration::from_secs_f64(seconds);
    let shared = Shared {
        recorder: Recorder::new(loads.len(), lasts),
        timer: Timer::start(),
        connecting: Semaphore::new(CONNECTING_MAX),
        began,
        kicks,
        lasts,
        is_backlog: loads.iter().flat_map(|load| &load.streams).all(|stream| stream.source.is_backlog()),
        scope: TaskScope::new(OnPanic::EndTask),
        notes: Mutex::default(),
    };
    (Arc::new(shared), begin, kick)
}

/// What spawning a load's streams needs.
struct Spawning<'a> {
    scenario: &'a Scenario,
    number: usize,
    addresses: &'a [String],
    certificate: Option<PathBuf>,
    run: &'a str,
    shared: &'a Arc<Shared>,
    opened: &'a mpsc::Sender<anyhow::Result<()>>,
    alive: &'a mpsc::Sender<()>,
}

/// Starts a load's streams; what they have in common, and how many of them open before the beginning.
fn spawn(with: Spawning<'_>, sending: Sending) -> anyhow::Result<(Arc<Plan>, usize)> {
    let load = &sending.load;
    let names = load.named.then(|| format!("{}-{}", with.run, load.name));
    let plan = Arc::new(Plan {
        number: with.number,
        addresses: with.addresses.to_vec(),
        certificate: with.certificate.clone(),
        encoding: load.encoding,
        schema: sending.encoded.clone(),
        rows: u32::try_from(load.frame_records)?,
        names,
        tells_commits: load.tells_commits(),
        lasts: load.stream_seconds.map(Duration::from_secs_f64),
        hashes: sending.hashes.clone(),
        answer_delay_ms: AtomicU64::new(0),
    });
    let streams = sending.streams;
    let common = (&with, &plan);
    let first = match load.transport {
        Transport::WebSocketFrames => spawn_on(common, WebSocket(Speech::Frames), streams),
        Transport::WebSocketTexts => spawn_on(common, WebSocket(Speech::Texts), streams),
        Transport::Quic => spawn_on(common, Quic::new(load.streams_per_connection)?, streams),
        Transport::Http => spawn_on(common, Http { wait_committed: load.wait_committed }, streams),
        Transport::Zerobus => spawn_on(common, Zerobus, streams),
        Transport::Flight => spawn_on(common, Flight, streams),
    };
    Ok((plan, first))
}

fn spawn_on<T: Target>((with, plan): (&Spawning<'_>, &Arc<Plan>), target: T, streams: Vec<Stream>) -> usize {
    let target = Arc::new(target);
    let mut first = 0;
    for (number, stream) in streams.into_iter().enumerate() {
        let opens = Duration::from_secs_f64(stream.opens);
        first += usize::from(opens.is_zero());
        let task = StreamTask {
            target: Arc::clone(&target),
            plan: Arc::clone(plan),
            shared: Arc::clone(with.shared),
            number,
            name: stream.name,
            table: stream.table,
            source: stream.source,
            opens,
            seed: seed_of(with.scenario.seed, with.number, number),
            alive: with.alive.clone(),
        };
        let opened = with.opened.clone();
        with.shared.scope.spawn("stream under load", async move { Box::pin(task.run(opened)).await });
    }
    first
}

/// Of a stream. Neighbours have nothing in common.
fn seed_of(seed: u64, load: usize, stream: usize) -> u64 {
    let mixed = seed ^ ((load as u64) << 40) ^ (stream as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed.wrapping_mul(0xd605_1c9d_4b1f_a3a5)
}

/// What a load of a scenario sends.
fn made(load: &Load, scenario: &Scenario, with_hashes: bool) -> anyhow::Result<Sending> {
    // A post is a whole body, as a frame is.
    let transport =
        if load.transport == Transport::Http { Transport::WebSocketFrames } else { load.transport };
    let edge = Edge { name: "load", transport, encoding: load.encoding, rows: load.frame_records };
    let seconds = load.until.unwrap_or(scenario.seconds).min(scenario.seconds) - load.from;
    // No more than is sent, and little is enough where many records are alike.
    let records = load.stream_rate().map_or(f64::INFINITY, |rate| rate * load.streams as f64 * seconds);
    let floor = (load.frame_records * load.shape.about_bytes() * 4) as f64;
    let bytes = (records * load.shape.about_bytes() as f64).max(floor).min(FEED_BYTES_MAX.max(floor));
    let messages = Arc::new(Messages::new(&edge, load.shape, bytes as usize)?);
    let hashes = with_hashes.then(|| messages.hashes(&edge, load.shape)).transpose()?;
    let curve = scenario.curve_of(&load.name);
    let number = scenario.loads.iter().position(|other| other.name == load.name).unwrap_or(0);
    let stream = |stream: usize| {
        let opens = load.from + load.within * stream as f64 / load.streams as f64;
        let pace = Pace {
            messages_per_s: load.stream_rate().map(|rate| rate / load.frame_records as f64),
            spacing: load.spacing,
            curve: Arc::clone(&curve),
            from: opens,
            until: load.until.unwrap_or(scenario.seconds).min(scenario.seconds),
        };
        let seed = seed_of(scenario.seed, number, stream);
        let table = load.table_name(load.choice.table_of(stream, load.streams, load.tables));
        let source = Source::Made(Box::new(Made::new(Arc::clone(&messages), pace, seed)));
        Stream { table, source, opens, name: None }
    };
    Ok(Sending {
        schema: load.shape.schema(),
        encoded: messages.schema.clone(),
        hashes,
        streams: (0..load.streams).map(stream).collect(),
        load: load.clone(),
    })
}

/// They are there before the first record, so that their types are not inferred.
async fn make_tables(addresses: &[String], tables: BTreeMap<String, SchemaRef>) -> anyhow::Result<()> {
    let client = Client::connect(&format!("ws://{}", addresses.first().context("no gateway")?)).await?;
    let making = tables.into_iter().map(|(table, schema)| {
        let client = client.clone();
        async move {
            let stream = client.stream(&table).schema(schema);
            let made = async { anyhow::Ok(stream.open().await?.finish_durable().await?) };
            made.await.map(drop).with_context(|| format!("making table {table}"))
        }
    });
    futures_util::stream::iter(making).buffer_unordered(MAKING_MAX).try_collect().await
}

fn judge(options: &Options<'_>, shared: &Shared, tables: &[String]) -> anyhow::Result<(String, bool)> {
    ensure!(options.existing.is_none(), "--audit needs a pool that is started for it");
    (options.say)("judges every version of each table");
    let mut histories: BTreeMap<&str, History> =
        tables.iter().map(|table| (table.as_str(), History::default())).collect();
    let notes = std::mem::take(&mut *shared.notes.lock().unwrap_or_else(PoisonError::into_inner));
    for (table, notes) in notes {
        if let Some(history) = histories.get_mut(table.as_str()) {
            history.streams.push(notes);
        }
    }
    let mut broken = BTreeSet::new();
    for (table, history) in &histories {
        let verdict = judge_dir(&table_dir(options.dir, table), history, None)
            .with_context(|| format!("table {table}"))?;
        if !verdict.is_clean() {
            broken.insert(format!("{table}: {verdict}"));
        }
    }
    let text = match broken.len() {
        0 => format!("all promises kept in every version of {} tables", histories.len()),
        _ => broken.iter().cloned().collect::<Vec<_>>().join("\n"),
    };
    Ok((text, broken.is_empty()))
}

/// A line that is drawn again and again, on a terminal alone.
async fn show(shared: &Shared, began: Instant, seconds: f64) {
    let bar = ProgressBar::new((seconds * 10.0) as u64);
    let style = ProgressStyle::with_template("{wide_bar} {msg}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    let mut before = (Instant::now(), shared.recorder.counts());
    loop {
        tokio::time::sleep(PROGRESS_INTERVAL).await;
        let (now, counts) = (Instant::now(), shared.recorder.counts());
        let elapsed = now.duration_since(began).as_secs_f64();
        let per_s = |count: u64, old: u64| {
            count.saturating_sub(old) as f64 / now.duration_since(before.0).as_secs_f64()
        };
        bar.set_position((elapsed.min(seconds) * 10.0) as u64);
        bar.set_message(format!(
            "{elapsed:.0} of {seconds:.0} s  due {:.0}/s  durable {:.0}/s  behind {}  errors {}",
            per_s(counts.due, before.1.due),
            per_s(counts.durable, before.1.durable),
            counts.due.saturating_sub(counts.durable),
            counts.errors,
        ));
        before = (now, counts);
    }
}
