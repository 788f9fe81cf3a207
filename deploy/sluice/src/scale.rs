//! `sluice autoscaler` and `sluice up --pods 1..6`: a pool that is as large as its load asks for.
//!
//! *Owns*: flags, what a pod's process is started with.
//! *Does not own*: the number of pods, who starts them (`sluice_autoscaler`).

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::str::FromStr;
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use sluice_autoscaler::driver::process::{ProcessPods, undrained};
use sluice_autoscaler::{Autoscaler, AutoscalerConfig, DriverKind};
use sluice_gateway::Gateway;
use sluice_pod::config::LogKind;
use sluice_shared::lifecycle::{Hurry, OnPanic, TaskScope, Terminations};
use sluice_shared::membership::ClusterConfig;

use crate::cluster;
use crate::config::Config;
use crate::print;
use crate::up::{EXIT_UNDRAINED, GATEWAY_DRAIN, PODS_MAX, run_until_signal, say_where};

/// How long the first pods are waited for before it is said that all is up.
const FIRST_PODS: Duration = Duration::from_secs(60);
/// A child on this machine takes streams so soon, unless its log is long.
const CHILD_START_S: u64 = 5;

/// How many pods `sluice up` runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PodCount {
    /// So many, in this process.
    Fixed(usize),
    /// As many as the load asks for, each a process of its own.
    Range {
        /// Never fewer.
        min: u32,
        /// Never more.
        max: u32,
    },
}

impl FromStr for PodCount {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |text: &str| text.parse::<usize>().ok().filter(|number| (1..=PODS_MAX).contains(number));
        let count = match text.split_once("..") {
            None => number(text).map(Self::Fixed),
            Some((min, max)) => number(min)
                .zip(number(max))
                .filter(|(min, max)| min <= max)
                .map(|(min, max)| Self::Range { min: min as u32, max: max as u32 }),
        };
        count.ok_or_else(|| format!("expected 1 to {PODS_MAX}, or a range such as 1..6"))
    }
}

/// What `sluice autoscaler` can be told on the command line.
#[derive(Args)]
pub(crate) struct AutoscalerArgs {
    /// A gateway's admin API, as http://HOST:PORT. May be given more than once: any that answers will do [default:
    /// http://127.0.0.1:7073].
    #[arg(long = "gateway", value_name = "URL")]
    gateways: Vec<String>,
    /// Who starts pods and ends them: process, kubernetes, or none (KEDA asks for the number) [default: process].
    #[arg(long, value_name = "DRIVER")]
    driver: Option<DriverKind>,
    /// Never fewer pods [default: 1].
    #[arg(long)]
    min: Option<u32>,
    /// Never more pods [default: 8].
    #[arg(long)]
    max: Option<u32>,
    /// Where /metrics, /healthz and /v1/decision are, or off [default: 127.0.0.1:7074].
    #[arg(long, value_name = "HOST:PORT")]
    listen: Option<String>,
    /// Where KEDA asks, or off [default: off].
    #[arg(long, value_name = "HOST:PORT")]
    keda_listen: Option<String>,
    /// For the driver process: where logs and tables are kept, laid out as by `sluice up` [default: data].
    #[arg(long, value_name = "DIR")]
    data: Option<PathBuf>,
    /// For the driver process: whom the pods find the others by, a gateway's --gossip-listen. May be given more than once.
    #[arg(long = "seed", value_name = "HOST:PORT")]
    seeds: Vec<String>,
}

/// Runs an autoscaler alone.
pub(crate) async fn autoscaler(file: Option<&Path>, args: AutoscalerArgs) -> anyhow::Result<ExitCode> {
    let mut config = Config::load(file)?.config.autoscaler;
    if !args.gateways.is_empty() {
        config.gateways = args.gateways;
    }
    config.driver = args.driver.unwrap_or(config.driver);
    (config.min, config.max) = (args.min.unwrap_or(config.min), args.max.unwrap_or(config.max));
    config.listen = args.listen.unwrap_or(config.listen);
    config.keda_listen = args.keda_listen.unwrap_or(config.keda_listen);
    config.validate()?;
    if config.driver == DriverKind::Process {
        let data = args.data.unwrap_or_else(|| PathBuf::from("data"));
        config.pods_dir = data.join("pods");
        if config.command.is_empty() {
            let flags = ["--listen", "127.0.0.1:{port}", "--gossip-listen", "127.0.0.1:{gossip_port}"];
            config.command = pod_command(file, &data, &args.seeds, &flags.map(str::to_owned))?;
        }
    }
    let autoscaler = Autoscaler::start_configured(&config).await?;
    say(&autoscaler, &config)?;
    let pods_dir = (config.driver == DriverKind::Process).then_some(config.pods_dir);
    let drain = async move |_| {
        autoscaler.drain().await;
        pods_dir.map_or(ExitCode::SUCCESS, |pods_dir| exit_ended(&pods_dir))
    };
    run_until_signal(drain, std::future::pending()).await
}

/// Runs a gateway in this process, and pods in their own.
pub(crate) async fn up(
    file: Option<&Path>,
    data: &Path,
    config: Config,
    count: PodCount,
) -> anyhow::Result<ExitCode> {
    let scope = TaskScope::new(OnPanic::EndTask);
    let gossip_listen = config.cluster.gossip_listen.clone().or_else(|| Some("127.0.0.1:0".to_owned()));
    let gossip = ClusterConfig { gossip_listen, ..config.cluster.clone() };
    gossip.validate()?;
    let membership = cluster::join(&gossip, &cluster::gateway_name(), Vec::new(), &scope).await?;
    let seed = membership.gossip_address().context("the gateway does not gossip")?;
    let certificate = config.gateway.tls_cert.clone().unwrap_or_default();
    let gateway = Gateway::start(config.gateway.clone(), membership).await?;
    let admin = gateway.admin_address().context(
        "`sluice up --pods MIN..MAX` drains pods through the admin API, and gateway.admin_listen is off",
    )?;
    let scaling = scaling(file, data, &config, count)?;
    let scaling = AutoscalerConfig {
        gateways: vec![format!("http://{admin}")],
        command: pod_command(file, data, &[seed.to_string()], &own_flags(&config))?,
        ..scaling
    };
    let mut template = scaling.template();
    let memory_bytes = config.pod.memory_bytes.0 / u64::from(scaling.max);
    template.environment = vec![("SLUICE_POD__MEMORY_BYTES".to_owned(), memory_bytes.to_string())];
    let autoscaler = Autoscaler::start(&scaling, ProcessPods::new(template)?).await?;
    let mut known = autoscaler.known();
    let min = scaling.min;
    // What it answers is a lock on what is known: let go at once, or the autoscaler stands still.
    let first = async {
        known.wait_for(|known| known.decision.is_some_and(|one| one.terms.active >= min)).await.map(drop)
    };
    let mut signals = Terminations::new().context("cannot wait for signals")?;
    tokio::select! {
        biased; // whoever wants the end does not want to wait for the beginning
        () = signals.next() => {}
        first = tokio::time::timeout(FIRST_PODS, first) => {
            let are_up = if first.is_ok() { "is up" } else { "has no pods yet, see the log;" };
            let AutoscalerConfig { min, max, .. } = scaling;
            print::answer(format_args!("sluice {are_up}: {min} to {max} pods, each a process of its own"))?;
            say_where(&gateway, &certificate, data)?;
            say(&autoscaler, &scaling)?;
            let pods_dir = scaling.pods_dir.clone();
            let drain = async move |hurry| {
                end(gateway, autoscaler, &hurry).await;
                exit_ended(&pods_dir)
            };
            return run_until_signal(drain, std::future::pending()).await;
        }
    }
    end(gateway, autoscaler, &Hurry::default()).await;
    Ok(exit_ended(&scaling.pods_dir))
}

/// How the process ends after its children: some may have left in their logs what is in no table.
fn exit_ended(pods_dir: &Path) -> ExitCode {
    // A directory that cannot be read any more tells nothing.
    let left = undrained(pods_dir).unwrap_or_default();
    if left.is_empty() {
        return ExitCode::SUCCESS;
    }
    let left = left.into_iter().map(|n| format!("pod-{n}")).collect::<Vec<_>>().join(", ");
    print::note(format_args!(
        "not drained: the logs of {left} below {} may hold what is in no table; keep them, and start again on them: that is \
         committed then (what it is, the pods have said above)",
        pods_dir.display()
    ));
    ExitCode::from(EXIT_UNDRAINED)
}

/// Producers first, then pods: what the gateway still takes has somewhere to go.
async fn end(gateway: Gateway, autoscaler: Autoscaler, hurry: &Hurry) {
    gateway.drain_or_hurry(GATEWAY_DRAIN, hurry).await;
    autoscaler.drain().await;
}

fn scaling(
    file: Option<&Path>,
    data: &Path,
    config: &Config,
    count: PodCount,
) -> anyhow::Result<AutoscalerConfig> {
    let (default, set) = (AutoscalerConfig::default(), config.autoscaler.clone());
    let (min, max) = match count {
        PodCount::Range { min, max } => (min, max),
        PodCount::Fixed(count) => (count as u32, count as u32),
    };
    let is_secret = config.gateway.admin_secret_sha256.is_some();
    anyhow::ensure!(
        !is_secret || set.admin_secret_file.is_some(),
        "the admin API has a secret (gateway.admin_secret_sha256): name its file in autoscaler.admin_secret_file{}",
        file.map(|file| format!(" of {}", file.display())).unwrap_or_default()
    );
    let scaling = AutoscalerConfig {
        driver: DriverKind::Process,
        min,
        max,
        pods_dir: data.join("pods"),
        start_s: if set.start_s == default.start_s { CHILD_START_S } else { set.start_s },
        // Several on one machine must not meet.
        listen: if set.listen == default.listen {
            beside(&config.gateway.listen)
        } else {
            set.listen.clone()
        },
        ..set
    };
    scaling.validate()?;
    Ok(scaling)
}

/// Four ports above where producers connect, as the admin API is three above.
fn beside(listen: &str) -> String {
    let port = listen.rsplit_once(':').and_then(|(_, port)| port.parse::<u16>().ok()).unwrap_or(0);
    let port = if port == 0 { 0 } else { port.checked_add(4).unwrap_or(0) };
    format!("127.0.0.1:{port}")
}

/// Any port will do: gossip says which one it is.
fn own_flags(config: &Config) -> Vec<String> {
    let any = "127.0.0.1:0".to_owned();
    let mut flags = vec!["--listen".to_owned(), any.clone(), "--gossip-listen".to_owned(), any];
    flags.push(format!("--auto-create={}", config.pod.auto_create));
    flags.extend(["--tables".to_owned(), config.pod.tables_dir.to_string()]);
    if config.pod.accept_loss {
        flags.push("--accept-loss".to_owned());
    }
    if config.pod.log == LogKind::Object {
        flags.extend(["--log".to_owned(), "object".to_owned()]);
    }
    flags
}

/// `sluice pod` as this program, with what follows from the pod's number left open.
fn pod_command(
    file: Option<&Path>,
    data: &Path,
    seeds: &[String],
    flags: &[String],
) -> anyhow::Result<Vec<String>> {
    let program = std::env::current_exe().context("cannot find this program, to start pods by it")?;
    let text = |path: &Path| path.to_str().map(str::to_owned).with_context(|| format!("{path:?}: not UTF-8"));
    let mut words = vec![text(&program)?, "pod".to_owned()];
    if let Some(file) = file {
        words.extend(["--config".to_owned(), text(file)?]);
    }
    words.extend(["--id".to_owned(), "{id}".to_owned(), "--data".to_owned(), text(data)?]);
    words.extend_from_slice(flags);
    for seed in seeds {
        words.extend(["--seed".to_owned(), seed.clone()]);
    }
    Ok(words)
}

fn say(autoscaler: &Autoscaler, config: &AutoscalerConfig) -> anyhow::Result<()> {
    let AutoscalerConfig { min, max, gateways, .. } = config;
    print::answer(format_args!(
        "autoscaler keeps {min} to {max} pods, by what {} says",
        gateways.join(" or ")
    ))?;
    if let Some(address) = autoscaler.address() {
        print::answer(format_args!("  decision    http://{address}/v1/decision"))?;
        print::answer(format_args!("  metrics     http://{address}/metrics"))?;
    }
    if let Some(address) = autoscaler.keda_address() {
        print::answer(format_args!("  KEDA        {address}"))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pods_are_a_number_or_a_range() {
        let check =
            |text: &str, expected: Option<PodCount>| assert_eq!(text.parse().ok(), expected, "{text}");
        check("2", Some(PodCount::Fixed(2)));
        check("1..6", Some(PodCount::Range { min: 1, max: 6 }));
        check("3..3", Some(PodCount::Range { min: 3, max: 3 }));
        for text in ["0", "17", "1..17", "0..2", "6..1", "..", "1..", "a", "1...3", "-1"] {
            check(text, None);
        }
    }

    #[test]
    fn the_autoscaler_listens_beside_its_gateway() {
        assert_eq!(beside("127.0.0.1:7070"), "127.0.0.1:7074");
        assert_eq!(beside("127.0.0.1:0"), "127.0.0.1:0");
        assert_eq!(beside("off"), "127.0.0.1:0");
    }
}
