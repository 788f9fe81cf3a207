//! `sluice up`, `sluice gateway`, `sluice pod`: start, say where, run until a signal, drain.
//!
//! *Owns*: putting a process together from its parts, the order in which they drain.
//! *Does not own*: the parts.

use std::io::ErrorKind;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use sluice_autoscaler::driver::process::DRAINED_MARK;
use sluice_gateway::{AuthMode, Gateway, GatewayConfig, certificate_files, make_self_signed, make_token_key};
use sluice_pod::app::{Listen, Pod};
use sluice_pod::config::{AfterDrain, LogKind, PodConfig};
use sluice_pod::drained::LOG_RELEASED;
use sluice_pod::duty::Undrained;
use sluice_pod::table::TablesPlace;
use sluice_shared::config::{ByteSize, Loaded, Places};
use sluice_shared::error::Error;
use sluice_shared::ids::PodId;
use sluice_shared::lifecycle::{Hangups, Hurry, OnPanic, TaskScope, Terminations};
use sluice_shared::link::{self, PodAddress};
use sluice_shared::membership::Membership;

use crate::check::{Aim, Faults};
use crate::cluster::{self, ClusterArgs};
use crate::config::Config;
use crate::print;
use crate::scale::{self, PodCount};

/// How long producers have to finish when the gateway drains.
pub(crate) const GATEWAY_DRAIN: Duration = Duration::from_secs(20);
/// Pods on one machine: more bring nothing there.
pub(crate) const PODS_MAX: usize = 16;
/// Exit status after a second signal: what is not committed is so at the next start.
const EXIT_HURRIED: u8 = 130;
/// Exit status after a drain that has left in a log what is in no table: the volume is still needed.
pub(crate) const EXIT_UNDRAINED: u8 = 69;
/// Exit status of a pod that may not be in its pool, as it is now (`pod/src/app.rs`).
const EXIT_CONFLICT: u8 = 78;

/// What `sluice up` can be told on the command line.
#[derive(Args)]
pub(crate) struct UpArgs {
    /// How many pods in this process; or from how many to how many processes of their own, such as 1..6, as the load asks for.
    #[arg(long, default_value = "1", value_name = "N|MIN..MAX")]
    pods: PodCount,
    /// Where the write-ahead logs, the tables and the certificate are kept.
    #[arg(long, value_name = "DIR", default_value = "data")]
    data: PathBuf,
    /// Where the tables are, if not below --data: a directory, or s3://BUCKET/PREFIX.
    #[arg(long, value_name = "PLACE")]
    tables: Option<TablesPlace>,
    /// Where producers connect [default: 127.0.0.1:7070].
    #[arg(long, value_name = "HOST:PORT")]
    listen: Option<String>,
    /// Where producers connect over TLS [default: off].
    #[arg(long, value_name = "HOST:PORT")]
    tls_listen: Option<String>,
    /// Whether a table that does not exist is made from the first records [default: true].
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    auto_create: Option<bool>,
    /// How the write-ahead logs are kept: on a disk, or as objects beside the tables [default: disk].
    #[arg(long, value_name = "disk|object")]
    log: Option<LogKind>,
    /// Start although records in the middle of a log are damaged, giving those up.
    #[arg(long)]
    accept_loss: bool,
    /// Says what is wrong with the configuration, all of it, and starts nothing: status 0 where it is good, else 2.
    #[arg(long)]
    check_config: bool,
}

/// What `sluice gateway` can be told on the command line.
#[derive(Args)]
pub(crate) struct GatewayArgs {
    /// Where producers connect.
    #[arg(long, value_name = "HOST:PORT")]
    listen: Option<String>,
    /// Where producers connect over TLS [default: off]; needs gateway.tls_cert and gateway.tls_key.
    #[arg(long, value_name = "HOST:PORT")]
    tls_listen: Option<String>,
    #[command(flatten)]
    cluster: ClusterArgs,
    /// A pod, as `id=host:port`. May be given more than once.
    #[arg(long = "pod", value_name = "ID=HOST:PORT")]
    pods: Vec<String>,
    /// Says what is wrong with the configuration, all of it, and starts nothing: status 0 where it is good, else 2.
    #[arg(long)]
    check_config: bool,
}

/// What `sluice pod` can be told on the command line.
#[derive(Args)]
pub(crate) struct PodArgs {
    /// The pod's name.
    #[arg(long)]
    id: Option<PodId>,
    /// Where gateways reach it.
    #[arg(long, value_name = "HOST:PORT")]
    listen: Option<String>,
    /// Where its write-ahead log and the tables are kept, laid out as by `sluice up`.
    #[arg(long, value_name = "DIR")]
    data: Option<PathBuf>,
    /// Where the tables are, if not below --data: a directory, or s3://BUCKET/PREFIX.
    #[arg(long, value_name = "PLACE")]
    tables: Option<TablesPlace>,
    #[command(flatten)]
    cluster: ClusterArgs,
    /// Another pod of the pool, as `id=host:port`. May be given more than once.
    #[arg(long = "peer", value_name = "ID=HOST:PORT")]
    peers: Vec<String>,
    /// Whether a table that does not exist is made from the first records [default: false].
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    auto_create: Option<bool>,
    /// How the write-ahead log is kept: on a disk, or as objects beside the tables [default: disk].
    #[arg(long, value_name = "disk|object")]
    log: Option<LogKind>,
    /// Start although records in the middle of the log are damaged, giving those up.
    #[arg(long)]
    accept_loss: bool,
    /// Says what is wrong with the configuration, all of it, and starts nothing: status 0 where it is good, else 2.
    #[arg(long)]
    check_config: bool,
}

/// Runs everything in this process, or everything but the pods.
pub(crate) async fn up(file: Option<&Path>, args: UpArgs) -> anyhow::Result<ExitCode> {
    let (count, data) = (args.pods, args.data.clone());
    let config = match prepare(file, args).await? {
        ControlFlow::Continue(config) => config,
        ControlFlow::Break(checked) => return Ok(checked),
    };
    let PodCount::Fixed(count) = count else { return scale::up(file, &data, config, count).await };
    let (membership, pods) = start_pods(&data, &config.pod, count).await?;
    let certificate = config.gateway.tls_cert.clone().unwrap_or_default();
    let gateway = Gateway::start(config.gateway, membership).await?;
    print::answer(format_args!("sluice is up: {count} pod(s) in this process"))?;
    say_where(&gateway, &certificate, &data)?;
    let drain = async move |hurry| {
        gateway.drain_or_hurry(GATEWAY_DRAIN, &hurry).await;
        let drained = pods.into_iter().map(|pod| pod.drain_or_hurry(&hurry));
        exit_drained(futures_util::future::join_all(drained).await)
    };
    run_until_signal(drain, std::future::pending()).await
}

/// The configuration, with what it names there: directories, certificate, key. Only checked where that is asked for.
async fn prepare(file: Option<&Path>, args: UpArgs) -> anyhow::Result<ControlFlow<ExitCode, Config>> {
    let (loaded, aim) = (Config::load(file)?, aim(args.check_config));
    let mut places = loaded.places.clone();
    let mut config = loaded.config.clone();
    let auto_create_by_file = loaded.sets("pod", "auto_create").then_some(config.pod.auto_create);
    listen_by_flags(&mut config.gateway, &mut places, args.listen, args.tls_listen);
    config.pod.auto_create = args.auto_create.or(auto_create_by_file).unwrap_or(true);
    config.pod.log = args.log.unwrap_or(config.pod.log);
    config.pod.accept_loss |= args.accept_loss;
    config.pod.tables_dir = args.tables.unwrap_or_else(|| tables_below(&args.data));
    let made = Made::fill_in(&mut config.gateway, &args.data.join("gateway"));
    // Nothing is made, and no log is opened, for a process that cannot listen.
    let mut faults = Faults::new(&places, aim);
    add_unheeded(&loaded, &mut faults);
    faults.gateway(&config.gateway, &made.without(&config.gateway)).await;
    faults.extend(config.pod.faults());
    faults.directory("--data", &args.data);
    faults.tables("--tables", &config.pod.tables_dir).await;
    if let PodCount::Fixed(count) = args.pods {
        faults.check(check_pods(&args.data, count));
    }
    if aim == Aim::Check {
        return faults.told(file).map(ControlFlow::Break);
    }
    faults.none()?;
    make_data_dir(&args.data)?;
    made.make(&config.gateway)?;
    Ok(ControlFlow::Continue(config))
}

/// Starts pods in this process.
async fn start_pods(data: &Path, shared: &PodConfig, count: usize) -> anyhow::Result<(Membership, Vec<Pod>)> {
    let listeners: Vec<_> = (1..=count).map(|n| (pod_id(n), link::pipe())).collect();
    let addresses: Vec<(PodId, PodAddress)> = listeners
        .iter()
        .map(|(id, (dialer, _))| (id.clone(), PodAddress::InProcess(dialer.clone())))
        .collect();
    let membership = Membership::fixed(addresses);
    let mut pods = Vec::new();
    for (id, (dialer, listener)) in listeners {
        forget_drain(data, &id)?;
        let memory_bytes = ByteSize(shared.memory_bytes.0 / count as u64);
        let pod = PodConfig { wal_dir: wal_below(data, &id), id, memory_bytes, ..shared.clone() };
        pods.push(Pod::start(pod, Listen::Pipe(listener, dialer), membership.clone()).await?);
    }
    Ok((membership, pods))
}

/// Where everything is, and how it ends.
pub(crate) fn say_where(gateway: &Gateway, certificate: &Path, data: &Path) -> anyhow::Result<()> {
    let certificate = certificate.display();
    if let Some(address) = gateway.plain_address() {
        print::answer(format_args!("  producers   ws://{address}/v1/tables/TABLE/stream"))?;
    }
    if let Some(address) = gateway.tls_address() {
        print::answer(format_args!("  producers   wss://{address} (certificate {certificate})"))?;
    }
    if let Some(address) = gateway.quic_address() {
        print::answer(format_args!("  producers   quic://{address} (certificate {certificate})"))?;
    }
    let scheme = if gateway.plain_address().is_some() { "http" } else { "https" };
    print::answer(format_args!("  tables      {scheme}://{}/v1/tables", gateway.address()))?;
    if let Some(address) = gateway.admin_address() {
        print::answer(format_args!("  admin API   http://{address}/v1/pods"))?;
    }
    print::answer(format_args!("  data        {}", data.display()))?;
    print::answer("Ctrl-C drains: everything accepted is committed before the exit.")
}

/// Runs a gateway alone.
pub(crate) async fn gateway(file: Option<&Path>, args: GatewayArgs) -> anyhow::Result<ExitCode> {
    let (loaded, aim) = (Config::load(file)?, aim(args.check_config));
    let (mut config, mut places) = (loaded.config.gateway, loaded.places);
    let cluster = args.cluster.over(loaded.config.cluster);
    listen_by_flags(&mut config, &mut places, args.listen, args.tls_listen);
    let mut faults = Faults::new(&places, aim);
    faults.gateway(&config, &config).await;
    faults.extend(cluster.validate().err());
    let mut pods = faults.check(pod_addresses(&args.pods)).unwrap_or_default();
    pods.extend(config.pod_addresses().unwrap_or_default());
    if args.pods.is_empty() && config.pods.is_empty() && cluster.gossip_listen.is_none() {
        faults
            .add("a gateway needs pods: give --pod ID=HOST:PORT, or --gossip-listen and --seed to find them");
    }
    if aim == Aim::Check {
        return faults.told(file);
    }
    faults.none()?;
    let scope = TaskScope::new(OnPanic::EndTask);
    let membership = cluster::join(&cluster, &cluster::gateway_name(), pods, &scope).await?;
    let gateway = Gateway::start(config, membership).await?;
    if let Some(address) = gateway.plain_address() {
        print::answer(format_args!("gateway listens on ws://{address}"))?;
    }
    if let Some(address) = gateway.tls_address() {
        print::answer(format_args!("gateway listens on wss://{address}"))?;
    }
    if let Some(address) = gateway.quic_address() {
        print::answer(format_args!("gateway listens on quic://{address}"))?;
    }
    if let Some(address) = gateway.admin_address() {
        print::answer(format_args!("  admin API   http://{address}/v1/pods"))?;
    }
    let drain = async move |hurry| {
        gateway.drain_or_hurry(GATEWAY_DRAIN, &hurry).await;
        ExitCode::SUCCESS
    };
    run_until_signal(drain, std::future::pending()).await
}

/// Runs a pod alone.
pub(crate) async fn pod(file: Option<&Path>, args: PodArgs) -> anyhow::Result<ExitCode> {
    let (loaded, aim) = (Config::load(file)?, aim(args.check_config));
    let (mut config, mut places) = (loaded.config.pod, loaded.places);
    let cluster = args.cluster.over(loaded.config.cluster);
    config.id = args.id.unwrap_or(config.id);
    if let Some(listen) = args.listen {
        config.listen = listen;
        places.set("pod", "listen", "--listen".to_owned());
    }
    config.auto_create = args.auto_create.unwrap_or(config.auto_create);
    config.log = args.log.unwrap_or(config.log);
    config.accept_loss |= args.accept_loss;
    if let Some(data) = &args.data {
        (config.wal_dir, config.tables_dir) = (wal_below(data, &config.id), tables_below(data));
        places.set("pod", "wal_dir", "--data".to_owned());
        places.set("pod", "tables_dir", "--data".to_owned());
    }
    if let Some(tables) = args.tables {
        config.tables_dir = tables;
        places.set("pod", "tables_dir", "--tables".to_owned());
    }
    let mut faults = Faults::new(&places, aim);
    faults.pod(&config).await;
    faults.extend(cluster.validate().err());
    faults.listener("pod.listen", Some(&config.listen)).await;
    let peers = faults.check(pod_addresses(&args.peers)).unwrap_or_default();
    if aim == Aim::Check {
        return faults.told(file);
    }
    faults.none()?;
    args.data.as_deref().map_or(Ok(()), make_data_dir)?;
    let scope = TaskScope::new(OnPanic::EndTask);
    let membership = cluster::join(&cluster, config.id.as_str(), peers, &scope).await?;
    let after_drain = config.after_drain;
    let mut signals = Signals::new()?;
    let start = Box::pin(Pod::start(config, Listen::Tcp, membership));
    let pod = match signals.unless_ended(start).await {
        None => return Ok(ExitCode::from(EXIT_HURRIED)),
        Some(started) => started?,
    };
    if let Some(address) = pod.address() {
        print::answer(format_args!("pod {} listens on {address}", pod.id()))?;
    }
    let duty = pod.duty().clone();
    let ended = async move {
        duty.drained().await;
        // What is left is committed by the next process alone: who waits here keeps it from its table.
        if after_drain == AfterDrain::Wait && duty.left().is_none() {
            std::future::pending().await
        }
    };
    signals.run(async move |hurry| exit_drained([pod.drain_or_hurry(&hurry).await]), ended).await
}

/// How the process ends after its pods have drained, and what is said of those that have not to the end.
fn exit_drained(pods: impl IntoIterator<Item = Option<Undrained>>) -> ExitCode {
    let left: Vec<Undrained> = pods.into_iter().flatten().collect();
    left.iter().for_each(|left| print::note(format_args!("not drained: {left}")));
    if left.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(EXIT_UNDRAINED) }
}

/// How a process ends that an error has ended. Whoever starts it again on a log that was released would only be told so
/// again.
pub(crate) fn exit_failed(error: &anyhow::Error) -> ExitCode {
    let is_released = error.downcast_ref::<Error>().is_some_and(|error| error.code == LOG_RELEASED);
    ExitCode::from(if is_released { EXIT_CONFLICT } else { 2 })
}

/// Keys that `sluice up` decides itself: passing over them would keep data where nobody looks for it.
const UP_DECIDES: [(&str, &str, &str); 5] = [
    ("pod", "id", "its pods are pod-1, pod-2, …"),
    ("pod", "listen", "its pods are reached within the process"),
    ("pod", "wal_dir", "it keeps the logs below --data"),
    ("pod", "tables_dir", "it keeps the tables below --data, or where --tables says"),
    ("gateway", "pods", "its pods are in the process; --pods says how many"),
];

fn add_unheeded(loaded: &Loaded<Config>, faults: &mut Faults<'_>) {
    for (section, key, why) in UP_DECIDES {
        if loaded.sets(section, key) {
            let advice = "remove the key, or run `sluice pod` and `sluice gateway`";
            faults.add(format_args!("`sluice up` cannot heed {section}.{key}: {why}; {advice}"));
        }
    }
}

fn aim(check_config: bool) -> Aim {
    if check_config { Aim::Check } else { Aim::Start }
}

fn listen_by_flags(
    config: &mut GatewayConfig,
    places: &mut Places,
    listen: Option<String>,
    tls_listen: Option<String>,
) {
    if let Some(listen) = listen {
        config.listen = listen;
        places.set("gateway", "listen", "--listen".to_owned());
    }
    if tls_listen.is_some() {
        config.tls_listen = tls_listen;
        places.set("gateway", "tls_listen", "--tls-listen".to_owned());
    }
}

/// The files that `sluice up` makes itself, where the configuration names none.
struct Made {
    certificate_dir: Option<PathBuf>,
    key_file: Option<PathBuf>,
}

impl Made {
    fn fill_in(config: &mut GatewayConfig, dir: &Path) -> Self {
        let is_needed = config.tls_address().or(config.quic_address()).is_some();
        let makes_certificate = is_needed && config.tls_cert.is_none() && config.tls_key.is_none();
        if makes_certificate {
            let (cert, key) = certificate_files(dir);
            (config.tls_cert, config.tls_key) = (Some(cert), Some(key));
        }
        let makes_key =
            config.token_key.is_none() && config.auth_mode().is_ok_and(|mode| mode == AuthMode::Tokens);
        let key_file = makes_key.then(|| dir.join("token.key"));
        config.token_key = config.token_key.take().or(key_file.clone());
        Self { certificate_dir: makes_certificate.then(|| dir.to_owned()), key_file }
    }

    /// The configuration without the files that have yet to be made.
    fn without(&self, config: &GatewayConfig) -> GatewayConfig {
        let mut config = config.clone();
        let is_there = |file: &Option<PathBuf>| file.as_deref().is_some_and(Path::exists);
        if self.certificate_dir.is_some() && !(is_there(&config.tls_cert) && is_there(&config.tls_key)) {
            (config.tls_cert, config.tls_key) = (None, None);
        }
        if self.key_file.is_some() && !is_there(&config.token_key) {
            config.token_key = None;
        }
        config
    }

    fn make(&self, config: &GatewayConfig) -> anyhow::Result<()> {
        let listen = config.tls_address().or(config.quic_address());
        if let (Some(dir), Some(listen)) = (&self.certificate_dir, listen) {
            make_self_signed(dir, listen.rsplit_once(':').map_or("", |(host, _)| host))?;
        }
        self.key_file.as_deref().map_or(Ok(()), make_token_key)?;
        Ok(())
    }
}

fn make_data_dir(dir: &Path) -> anyhow::Result<()> {
    let advice = || {
        format!(
            "cannot make the data directory {}: name one with --data DIR that can be written",
            dir.display()
        )
    };
    std::fs::create_dir_all(dir).with_context(advice)
}

/// A log without its pod keeps records that were acked out of their tables, and streams that it has wait for it.
fn check_pods(data: &Path, pods: usize) -> anyhow::Result<()> {
    let dir = |number: usize| data.join("pods").join(pod_id(number).as_str());
    // One that was drained for good holds nothing.
    let has_log = |number: &usize| dir(*number).is_dir() && !dir(*number).join(DRAINED_MARK).exists();
    match (pods + 1..=PODS_MAX).rev().find(has_log) {
        Some(most) => anyhow::bail!(
            "{} has the log of pod {}, which may hold records that are in no table yet: start it too, with --pods {most}",
            data.display(),
            pod_id(most)
        ),
        None => Ok(()),
    }
}

/// The log of a pod that starts is in use from now on.
fn forget_drain(data: &Path, id: &PodId) -> anyhow::Result<()> {
    let mark = data.join("pods").join(id.as_str()).join(DRAINED_MARK);
    match std::fs::remove_file(&mark) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", mark.display()))
        }
        _ => Ok(()),
    }
}

fn pod_id(number: usize) -> PodId {
    format!("pod-{number}").parse().expect("a valid pod id")
}

/// A log's place below a data directory.
fn wal_below(data: &Path, id: &PodId) -> PathBuf {
    data.join("pods").join(id.as_str()).join("wal")
}

/// And that of the tables.
fn tables_below(data: &Path) -> TablesPlace {
    data.join("tables").into()
}

fn pod_addresses(texts: &[String]) -> anyhow::Result<Vec<(PodId, PodAddress)>> {
    let parsed = texts.iter().map(|text| {
        let (id, address) =
            text.split_once('=').with_context(|| format!("{text:?}: expected ID=HOST:PORT"))?;
        Ok((id.parse()?, address.parse()?))
    });
    parsed.collect()
}

/// Waits for SIGINT or SIGTERM, or for the work to end by itself; then drains. A second signal hurries the drain, a third
/// one ends the process at once: what is durable is then committed at the next start.
pub(crate) async fn run_until_signal(
    drain: impl AsyncFnOnce(Hurry) -> ExitCode,
    ended: impl Future<Output = ()>,
) -> anyhow::Result<ExitCode> {
    Signals::new()?.run(drain, ended).await
}

/// What ends a process in good order.
struct Signals {
    terminations: Terminations,
    /// It means what it says on a terminal alone: elsewhere it asks to read files again, and ends nobody.
    _hangups: Option<Hangups>,
}

impl Signals {
    /// From now on none ends the process by itself.
    fn new() -> anyhow::Result<Self> {
        let terminations = Terminations::new().context("cannot wait for signals")?;
        Ok(Self { terminations, _hangups: Hangups::new() })
    }

    /// Starts what is to be ended by them. None where one comes before that is done.
    async fn unless_ended<T>(&mut self, start: impl Future<Output = T>) -> Option<T> {
        tokio::select! {
            biased; // what is started is ended in good order
            started = start => Some(started),
            () = self.terminations.next() => {
                print::note("ended before it had started: what its log holds is committed at the next start");
                None
            }
        }
    }

    async fn run(
        self,
        drain: impl AsyncFnOnce(Hurry) -> ExitCode,
        ended: impl Future<Output = ()>,
    ) -> anyhow::Result<ExitCode> {
        let Self { terminations: mut signals, _hangups } = self;
        tokio::select! {
            biased; // the order is of no consequence: both lead to the drain
            () = ended => {}
            () = signals.next() => print::note(
                "draining: once more to commit no more (what is durable is then committed at the next start)",
            ),
        }
        let hurry = Hurry::default();
        let mut draining = pin!(drain(hurry.clone()));
        tokio::select! {
            biased; // a drain that is done needs no hurry
            exit = &mut draining => return Ok(exit),
            () = signals.next() => hurry.hurry(),
        }
        print::note("flushing what was accepted: once more to end at once");
        tokio::select! {
            biased; // the same
            _ = draining => {}
            () = signals.next() => {}
        }
        Ok(ExitCode::from(EXIT_HURRIED))
    }
}
