//! The program's configuration: one file with a section for each part.
//!
//! *Owns*: the sections, and where `sluice up` keeps things below its data directory.
//! *Does not own*: the keys of a section (`GatewayConfig`, `PodConfig`, `AutoscalerConfig`).

use std::path::Path;

use anyhow::Context;
use serde::Deserialize;
use sluice_autoscaler::AutoscalerConfig;
use sluice_gateway::GatewayConfig;
use sluice_pod::config::PodConfig;
use sluice_shared::config::{self, Loaded};
use sluice_shared::membership::ClusterConfig;
use sluice_shared::telemetry::{self, LogFormat};

/// Everything that a configuration file can say.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Config {
    /// The gateway.
    pub(crate) gateway: GatewayConfig,
    /// The pod; in `sluice up`, what its pods have in common.
    pub(crate) pod: PodConfig,
    /// How gateways and pods find each other.
    pub(crate) cluster: ClusterConfig,
    /// The autoscaler; in `sluice up --pods 1..6`, of the pods that it starts.
    pub(crate) autoscaler: AutoscalerConfig,
    /// The log lines.
    pub(crate) log: LogConfig,
}

/// The `[log]` section.
#[derive(Debug, Clone, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct LogConfig {
    /// `tracing` directives, such as `info,sluice_pod=debug`.
    pub(crate) filter: String,
    /// For people or for machines.
    pub(crate) format: LogFormat,
}

impl Default for LogConfig {
    fn default() -> Self {
        Self {
            filter: "info,chitchat=error,delta_kernel=warn,delta_kernel_default_engine=warn".to_owned(),
            format: LogFormat::Text,
        }
    }
}

/// The sections that there are.
const SECTIONS: [&str; 5] = ["gateway", "pod", "cluster", "autoscaler", "log"];

impl Config {
    /// Reads the file and the environment, and sets up the log.
    pub(crate) fn load(file: Option<&Path>) -> anyhow::Result<Loaded<Self>> {
        let loaded: Loaded<Self> = config::load(file, &SECTIONS)?;
        let log = &loaded.config.log;
        telemetry::init_logs(&log.filter, log.format)
            .with_context(|| format!("log.filter {:?}", log.filter))?;
        Ok(loaded)
    }

    /// For commands that read no configuration: a variable that is meant to set something is not passed over.
    pub(crate) fn check_environment() -> anyhow::Result<()> {
        Ok(config::check_environment(&SECTIONS)?)
    }
}
