//! `sluice up`, `sluice gateway`, `sluice pod`: start, say where, run until a signal, drain.
//!
//! *Owns*: putting a process together from its parts, the order in which they drain.
//! *Does not own*: the parts.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use sluice_gateway::{AuthMode, Gateway, GatewayConfig, certificate_files, make_self_signed, make_token_key};
use sluice_pod::app::{Listen, Pod};
use sluice_pod::config::{AfterDrain, PodConfig};
use sluice_shared::config::{ByteSize, Loaded};
use sluice_shared::ids::PodId;
use sluice_shared::lifecycle::{Hangups, OnPanic, TaskScope, terminated};
use sluice_shared::link::{self, PodAddress};
use sluice_shared::membership::Membership;
use tokio::net::{TcpListener, UdpSocket};

use crate::cluster::{self, ClusterArgs};
use crate::config::Config;
use crate::print;

/// How long producers have to finish when the gateway drains.
const GATEWAY_DRAIN: Duration = Duration::from_secs(20);
/// Pods in one process: more bring nothing on one machine.
const PODS_MAX: usize = 16;
/// Exit status after a second signal: what is durable is committed at the next start.
const EXIT_HURRIED: u8 = 130;

/// What `sluice up` can be told on the command line.
#[derive(Args)]
pub(crate) struct UpArgs {
    /// How many pods.
    #[arg(long, default_value_t = 1)]
    pods: usize,
    /// Where the write-ahead logs, the tables and the certificate are kept.
    #[arg(long, value_name = "DIR", default_value = "data")]
    data: PathBuf,
    /// Where producers connect [default: 127.0.0.1:7070].
    #[arg(long, value_name = "HOST:PORT")]
    listen: Option<String>,
    /// Where producers connect over TLS [default: off].
    #[arg(long, value_name = "HOST:PORT")]
    tls_listen: Option<String>,
    /// Whether a table that does not exist is made from the first records [default: true].
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    auto_create: Option<bool>,
    /// Start although records in the middle of a log are damaged, giving those up.
    #[arg(long)]
    accept_loss: bool,
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
    #[command(flatten)]
    cluster: ClusterArgs,
    /// Another pod of the pool, as `id=host:port`. May be given more than once.
    #[arg(long = "peer", value_name = "ID=HOST:PORT")]
    peers: Vec<String>,
    /// Whether a table that does not exist is made from the first records [default: false].
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    auto_create: Option<bool>,
    /// Start although records in the middle of the log are damaged, giving those up.
    #[arg(long)]
    accept_loss: bool,
}

/// Runs everything in this process.
pub(crate) async fn up(file: Option<&Path>, args: UpArgs) -> anyhow::Result<ExitCode> {
    anyhow::ensure!((1..=PODS_MAX).contains(&args.pods), "--pods {}: expected 1 to {PODS_MAX}", args.pods);
    let loaded = Config::load(file)?;
    refuse_unheeded(&loaded)?;
    let auto_create_by_file = loaded.sets("pod", "auto_create").then_some(loaded.config.pod.auto_create);
    let mut config = loaded.config;
    config.gateway.listen = args.listen.unwrap_or(config.gateway.listen);
    config.gateway.tls_listen = args.tls_listen.or(config.gateway.tls_listen);
    config.pod.auto_create = args.auto_create.or(auto_create_by_file).unwrap_or(true);
    config.pod.accept_loss |= args.accept_loss;
    let makes_certificate = config.gateway.tls_cert.is_none() && config.gateway.tls_key.is_none();
    let certificate_dir = args.data.join("gateway");
    if makes_certificate {
        let (cert, key) = certificate_files(&certificate_dir);
        (config.gateway.tls_cert, config.gateway.tls_key) = (Some(cert), Some(key));
    }
    let makes_key = config.gateway.token_key.is_none()
        && config.gateway.auth_mode().is_ok_and(|mode| mode == AuthMode::Tokens);
    let key_file = certificate_dir.join("token.key");
    if makes_key {
        config.gateway.token_key = Some(key_file.clone());
    }
    // Nothing is made, and no log is opened, for a process that cannot listen.
    config.gateway.validate()?;
    config.pod.validate()?;
    check_gateway(&config.gateway).await?;
    make_data_dir(&args.data)?;
    check_pods(&args.data, args.pods)?;
    let tls = config.gateway.tls_address();
    if makes_certificate && let Some(listen) = tls.or(config.gateway.quic_address()) {
        make_self_signed(&certificate_dir, listen.rsplit_once(':').map_or("", |(host, _)| host))?;
    }
    if makes_key {
        make_token_key(&key_file)?;
    }
    let listeners: Vec<_> = (1..=args.pods).map(|n| (pod_id(n), link::pipe())).collect();
    let addresses: Vec<(PodId, PodAddress)> = listeners
        .iter()
        .map(|(id, (dialer, _))| (id.clone(), PodAddress::InProcess(dialer.clone())))
        .collect();
    let membership = Membership::fixed(addresses);
    let mut pods = Vec::new();
    for (id, (dialer, listener)) in listeners {
        let shared = config.pod.clone();
        let memory_bytes = ByteSize(shared.memory_bytes.0 / args.pods as u64);
        let pod = PodConfig { memory_bytes, ..below(&args.data, PodConfig { id, ..shared }) };
        pods.push(Pod::start(pod, Listen::Pipe(listener, dialer), membership.clone()).await?);
    }
    let certificate = config.gateway.tls_cert.clone().unwrap_or_default();
    let gateway = Gateway::start(config.gateway, membership).await?;
    print::answer(format_args!("sluice is up: {} pod(s) in this process", pods.len()))?;
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
    print::answer(format_args!("  data        {}", args.data.display()))?;
    print::answer("Ctrl-C drains: everything accepted is committed before the exit.")?;
    run_until_signal(async move {
        gateway.drain(GATEWAY_DRAIN).await;
        futures_util::future::join_all(pods.into_iter().map(Pod::drain)).await;
    })
    .await
}

/// Runs a gateway alone.
pub(crate) async fn gateway(file: Option<&Path>, args: GatewayArgs) -> anyhow::Result<ExitCode> {
    let loaded = Config::load(file)?.config;
    let (mut config, cluster) = (loaded.gateway, args.cluster.over(loaded.cluster));
    cluster.validate()?;
    config.listen = args.listen.unwrap_or(config.listen);
    config.tls_listen = args.tls_listen.or(config.tls_listen);
    config.validate()?;
    check_gateway(&config).await?;
    let mut pods = pod_addresses(&args.pods)?;
    for entry in &config.pods {
        pods.push((entry.id.clone(), entry.address.parse()?));
    }
    anyhow::ensure!(
        !pods.is_empty() || cluster.gossip_listen.is_some(),
        "a gateway needs pods: give --gossip-listen and --seed to find them, or --pod ID=HOST:PORT"
    );
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
    run_until_signal(async move { gateway.drain(GATEWAY_DRAIN).await }).await
}

/// Runs a pod alone.
pub(crate) async fn pod(file: Option<&Path>, args: PodArgs) -> anyhow::Result<ExitCode> {
    let loaded = Config::load(file)?.config;
    let (mut config, cluster) = (loaded.pod, args.cluster.over(loaded.cluster));
    cluster.validate()?;
    config.id = args.id.unwrap_or(config.id);
    config.listen = args.listen.unwrap_or(config.listen);
    config.auto_create = args.auto_create.unwrap_or(config.auto_create);
    config.accept_loss |= args.accept_loss;
    if let Some(data) = &args.data {
        config = below(data, config);
    }
    config.validate()?;
    check_listen(&config.listen, "pod.listen").await?;
    args.data.as_deref().map_or(Ok(()), make_data_dir)?;
    let scope = TaskScope::new(OnPanic::EndTask);
    let peers = pod_addresses(&args.peers)?;
    let membership = cluster::join(&cluster, config.id.as_str(), peers, &scope).await?;
    let after_drain = config.after_drain;
    let pod = Pod::start(config, Listen::Tcp, membership).await?;
    if let Some(address) = pod.address() {
        print::answer(format_args!("pod {} listens on {address}", pod.id()))?;
    }
    let duty = pod.duty().clone();
    let is_over = async move {
        match after_drain {
            AfterDrain::Exit => duty.drained().await,
            AfterDrain::Wait => std::future::pending().await,
        }
    };
    run_until(is_over, pod.drain()).await
}

/// Keys that `sluice up` decides itself: passing over them would keep data where nobody looks for it.
const UP_DECIDES: [(&str, &str, &str); 5] = [
    ("pod", "id", "its pods are pod-1, pod-2, …"),
    ("pod", "listen", "its pods are reached within the process"),
    ("pod", "wal_dir", "it keeps the logs below --data"),
    ("pod", "tables_dir", "it keeps the tables below --data"),
    ("gateway", "pods", "its pods are in the process; --pods says how many"),
];

fn refuse_unheeded(loaded: &Loaded<Config>) -> anyhow::Result<()> {
    for (section, key, why) in UP_DECIDES {
        anyhow::ensure!(
            !loaded.sets(section, key),
            "`sluice up` cannot heed {section}.{key}: {why}; remove the key, or run `sluice pod` and `sluice gateway`"
        );
    }
    Ok(())
}

/// Whether the address can be had, before anything is made on disk. It is bound for good later: what takes it in
/// between is told then.
async fn check_listen(listen: &str, key: &str) -> anyhow::Result<()> {
    TcpListener::bind(listen).await.map(drop).or_else(|error| cannot_listen(listen, key, &error))
}

/// The same for all addresses of a gateway.
async fn check_gateway(config: &GatewayConfig) -> anyhow::Result<()> {
    for (listen, key) in
        [(config.plain_address(), "gateway.listen"), (config.tls_address(), "gateway.tls_listen")]
    {
        if let Some(listen) = listen {
            check_listen(listen, key).await?;
        }
    }
    let Some(listen) = config.quic_address().filter(|_| config.tls_cert.is_some()) else { return Ok(()) };
    let key = "gateway.quic_listen, UDP; `off` switches QUIC off";
    UdpSocket::bind(listen).await.map(drop).or_else(|error| cannot_listen(listen, key, &error))
}

fn cannot_listen(listen: &str, key: &str, error: &std::io::Error) -> anyhow::Result<()> {
    let advice = match error.kind() {
        ErrorKind::InvalidInput => "expected HOST:PORT, such as 127.0.0.1:7070",
        ErrorKind::AddrInUse => "another process listens there; give another address with --listen HOST:PORT",
        ErrorKind::AddrNotAvailable => "this machine has no such address",
        ErrorKind::PermissionDenied => "ports below 1024 need a right to them; choose a higher one",
        _ => "expected HOST:PORT of this machine",
    };
    anyhow::bail!("cannot listen on {listen:?} ({key}): {error}: {advice}")
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
    let has_log = |number: &usize| data.join("pods").join(pod_id(*number).as_str()).is_dir();
    match (pods + 1..=PODS_MAX).rev().find(has_log) {
        Some(most) => anyhow::bail!(
            "{} has the log of pod {}, which may hold records that are in no table yet: start it too, with --pods {most}",
            data.display(),
            pod_id(most)
        ),
        None => Ok(()),
    }
}

fn pod_id(number: usize) -> PodId {
    format!("pod-{number}").parse().expect("a valid pod id")
}

/// The layout below a data directory.
fn below(data: &Path, config: PodConfig) -> PodConfig {
    let wal_dir = data.join("pods").join(config.id.as_str()).join("wal");
    PodConfig { wal_dir, tables_dir: data.join("tables"), ..config }
}

fn pod_addresses(texts: &[String]) -> anyhow::Result<Vec<(PodId, PodAddress)>> {
    let parsed = texts.iter().map(|text| {
        let (id, address) =
            text.split_once('=').with_context(|| format!("{text:?}: expected ID=HOST:PORT"))?;
        Ok((id.parse()?, address.parse()?))
    });
    parsed.collect()
}

/// Waits for SIGINT or SIGTERM, then drains. A second signal ends the process at once: what is durable is then
/// committed at the next start.
async fn run_until_signal(drain: impl Future<Output = ()>) -> anyhow::Result<ExitCode> {
    run_until(std::future::pending(), drain).await
}

/// As `run_until_signal`, and without a signal where it `is_over`: a pod that was asked elsewhere to drain has done so.
async fn run_until(
    is_over: impl Future<Output = ()>,
    drain: impl Future<Output = ()>,
) -> anyhow::Result<ExitCode> {
    // It means what it says on a terminal alone: elsewhere it asks to read files again, and ends nobody.
    let _hangups = Hangups::new();
    tokio::select! {
        biased; // what is over needs no signal
        () = is_over => {
            drain.await;
            return Ok(ExitCode::SUCCESS);
        }
        signal = terminated() => signal.context("cannot wait for signals")?,
    }
    print::note("draining: once more to end at once (what is durable is then committed at the next start)");
    tokio::select! {
        biased; // a drain that is done needs no hurry
        () = drain => Ok(ExitCode::SUCCESS),
        _ = terminated() => Ok(ExitCode::from(EXIT_HURRIED)),
    }
}
