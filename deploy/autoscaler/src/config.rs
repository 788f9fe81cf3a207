//! What the autoscaler can be told.
//!
//! *Owns*: the `[autoscaler]` section and its validation. *Does not own*: where it comes from (`shared::config`).

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use serde::Deserialize;
use sluice_shared::config::ConfigError;

use crate::driver::kubernetes::Target;
use crate::driver::process::Template;
use crate::policy::Policy;

/// A pod of a StatefulSet that is being restarted is seen drained for less: what has gone is shown for a minute.
const DRAINED_FOR_GOOD: Duration = Duration::from_secs(120);

/// Who starts pods and ends them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DriverKind {
    /// This process, on this machine.
    Process,
    /// Kubernetes, told the number of a StatefulSet's replicas.
    Kubernetes,
    /// Somebody else, who asks for the number, such as KEDA.
    None,
}

impl FromStr for DriverKind {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        match text {
            "process" => Ok(Self::Process),
            "kubernetes" => Ok(Self::Kubernetes),
            "none" => Ok(Self::None),
            _ => {
                let message = format!("no driver {text:?}: there are process, kubernetes and none");
                Err(ConfigError::Relation(message))
            }
        }
    }
}

/// The `[autoscaler]` section.
#[derive(Debug, Clone, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AutoscalerConfig {
    /// `host:port` of `/metrics`, `/healthz` and `/v1/decision`; port 0 takes any free one, `off` none.
    pub listen: String,
    /// `host:port` of KEDA's external scaler (gRPC), or `off`.
    pub keda_listen: String,
    /// Admin APIs of gateways, as `http://host:port`; any one of them is asked.
    pub gateways: Vec<String>,
    /// File of the admin APIs' secret (`gateway.admin_secret_sha256` is its hash), where they have one.
    pub admin_secret_file: Option<PathBuf>,
    /// Who starts pods and ends them.
    pub driver: DriverKind,
    /// Never fewer pods.
    pub min: u32,
    /// Never more.
    pub max: u32,
    /// From one look at the pool to the next.
    pub interval_ms: u64,
    /// Whether forecasts count.
    pub predict: bool,
    /// From the decision to a pod that takes streams.
    pub start_s: u64,
    /// How long the load has to have been small before a pod is drained.
    pub quiet_s: u64,
    /// From the last pod that was added to the first that is drained, at least.
    pub after_out_s: u64,
    /// From one pod that is drained to the next.
    pub in_interval_s: u64,
    /// A drain that would be a change of direction waits until the last change is so long ago.
    pub turn_s: u64,
    /// How long a drain may take.
    pub drain_deadline_s: u64,
    /// For driver `process`: the program and the arguments of a pod, with `{n}`, `{id}`, `{port}` and `{gossip_port}`; empty
    /// is `sluice pod` with those.
    pub command: Vec<String>,
    /// For driver `process`: where the pods' logs are, as `pod-1` and so on below it.
    pub pods_dir: PathBuf,
    /// For driver `process`: pod 3 listens on this port and 3 more.
    pub port_base: u16,
    /// For driver `process`: pod 3 gossips on this port and 3 more.
    pub gossip_port_base: u16,
    /// For driver `kubernetes`: the name of the StatefulSet.
    pub stateful_set: String,
    /// For driver `kubernetes`: its namespace; empty is the service account's.
    pub namespace: String,
    /// For driver `kubernetes`: where the API is.
    pub api: String,
    /// For driver `kubernetes`: where the service account's token and authority are.
    pub account_dir: PathBuf,
}

impl Default for AutoscalerConfig {
    fn default() -> Self {
        Self {
            listen: "127.0.0.1:7074".to_owned(),
            keda_listen: "off".to_owned(),
            admin_secret_file: None,
            gateways: vec!["http://127.0.0.1:7073".to_owned()],
            driver: DriverKind::Process,
            min: 1,
            max: 8,
            interval_ms: 1000,
            predict: true,
            start_s: 20,
            quiet_s: 600,
            after_out_s: 300,
            in_interval_s: 60,
            turn_s: 3600,
            drain_deadline_s: 60,
            command: Vec::new(),
            pods_dir: "data/pods".into(),
            port_base: 7170,
            gossip_port_base: 7270,
            stateful_set: "sluice-pod".to_owned(),
            namespace: String::new(),
            api: "https://kubernetes.default.svc".to_owned(),
            account_dir: "/var/run/secrets/kubernetes.io/serviceaccount".into(),
        }
    }
}

impl AutoscalerConfig {
    /// From one look at the pool to the next.
    pub fn interval(&self) -> Duration {
        Duration::from_millis(self.interval_ms)
    }

    /// How long a drain may take.
    pub fn drain_deadline(&self) -> Duration {
        Duration::from_secs(self.drain_deadline_s)
    }

    /// What the operator decided.
    pub fn policy(&self) -> Policy {
        Policy {
            min: self.min,
            max: self.max,
            predicts: self.predict,
            start: Duration::from_secs(self.start_s),
            quiet: Duration::from_secs(self.quiet_s),
            after_out: Duration::from_secs(self.after_out_s),
            in_interval: Duration::from_secs(self.in_interval_s),
            turn: Duration::from_secs(self.turn_s),
            ..Policy::default()
        }
    }

    /// What children are started with.
    pub fn template(&self) -> Template {
        Template {
            command: self.command.clone(),
            environment: Vec::new(),
            pods_dir: self.pods_dir.clone(),
            port_base: self.port_base,
            gossip_port_base: self.gossip_port_base,
            drain_deadline: self.drain_deadline(),
        }
    }

    /// The StatefulSet.
    pub fn target(&self) -> Target {
        Target {
            api: self.api.clone(),
            account_dir: self.account_dir.clone(),
            namespace: Some(self.namespace.clone()).filter(|namespace| !namespace.is_empty()),
            stateful_set: self.stateful_set.clone(),
            drain_deadline: self.drain_deadline(),
            drained_for_good: DRAINED_FOR_GOOD,
        }
    }

    /// Checks how the values go together.
    ///
    /// # Errors
    /// Names the keys at fault, and what they have to be.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let refuse = |message: String| Err(ConfigError::Relation(message));
        if self.min == 0 || self.max < self.min {
            return refuse(format!(
                "autoscaler.min is {} and autoscaler.max is {}: expected at least 1, and max not below min",
                self.min, self.max
            ));
        }
        if !(500..=5000).contains(&self.interval_ms) {
            return refuse(format!(
                "autoscaler.interval_ms is {}: expected 500 to 5000, since full pods are proven within 5 s",
                self.interval_ms
            ));
        }
        if self.gateways.is_empty() {
            return refuse(
                "autoscaler.gateways is empty: name a gateway's admin API, as http://127.0.0.1:7073"
                    .to_owned(),
            );
        }
        for (key, value, least, most) in [
            ("quiet_s", self.quiet_s, 5, 3000),
            ("after_out_s", self.after_out_s, 0, 3600),
            ("in_interval_s", self.in_interval_s, 1, 3600),
            ("turn_s", self.turn_s, 0, 3600),
        ] {
            if !(least..=most).contains(&value) {
                return refuse(format!(
                    "autoscaler.{key} is {value}: expected {least} to {most}: the autoscaler remembers an hour"
                ));
            }
        }
        let last = |base: u16| u32::from(base) + self.max;
        let overlap = self.port_base.abs_diff(self.gossip_port_base);
        if self.driver == DriverKind::Process
            && (last(self.port_base.max(self.gossip_port_base)) > u32::from(u16::MAX)
                || u32::from(overlap) < self.max)
        {
            return refuse(format!(
                "autoscaler.port_base {} and autoscaler.gossip_port_base {}: each needs {} ports of its own above it",
                self.port_base, self.gossip_port_base, self.max
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_fit_together() {
        AutoscalerConfig::default().validate().expect("valid");
    }

    #[test]
    fn what_does_not_fit_is_named() {
        let check = |key: &str, spoil: fn(&mut AutoscalerConfig)| {
            let mut config = AutoscalerConfig::default();
            spoil(&mut config);
            let error = config.validate().expect_err("does not fit").to_string();
            assert!(error.contains(key), "{error}");
        };
        check("autoscaler.min", |config| config.min = 0);
        check("autoscaler.max", |config| config.max = 0);
        check("autoscaler.interval_ms", |config| config.interval_ms = 1);
        check("autoscaler.gateways", |config| config.gateways.clear());
        check("autoscaler.quiet_s", |config| config.quiet_s = 1);
        check("autoscaler.after_out_s", |config| config.after_out_s = 4000);
        check("autoscaler.in_interval_s", |config| config.in_interval_s = 0);
        check("autoscaler.turn_s", |config| config.turn_s = 4000);
        check("autoscaler.port_base", |config| config.max = 200);
    }
}
