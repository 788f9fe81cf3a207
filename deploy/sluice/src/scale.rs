//! `sluice autoscaler`: a pool that is as large as its load asks for.
//!
//! *Owns*: flags, what a pod's process is started with.
//! *Does not own*: the number of pods, who starts them (`sluice_autoscaler`).

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use clap::Args;
use sluice_autoscaler::{Autoscaler, AutoscalerConfig, DriverKind};

use crate::config::Config;
use crate::print;
use crate::up::run_until_signal;

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
            config.command = pod_command(file, &data, &args.seeds)?;
        }
    }
    let autoscaler = Autoscaler::start_configured(&config).await?;
    say(&autoscaler, &config)?;
    run_until_signal(autoscaler.drain()).await
}

/// `sluice pod` as this program, with what follows from the pod's number left open.
pub(crate) fn pod_command(file: Option<&Path>, data: &Path, seeds: &[String]) -> anyhow::Result<Vec<String>> {
    let program = std::env::current_exe().context("cannot find this program, to start pods by it")?;
    let text = |path: &Path| path.to_str().map(str::to_owned).with_context(|| format!("{path:?}: not UTF-8"));
    let mut words = vec![text(&program)?, "pod".to_owned()];
    if let Some(file) = file {
        words.extend(["--config".to_owned(), text(file)?]);
    }
    let own = ["--id", "{id}", "--listen", "127.0.0.1:{port}", "--gossip-listen", "127.0.0.1:{gossip_port}"];
    words.extend(own.map(str::to_owned));
    words.extend(["--data".to_owned(), text(data)?]);
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
