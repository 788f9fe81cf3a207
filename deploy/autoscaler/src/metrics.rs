//! What the autoscaler counts.
//!
//! *Owns*: the names (`sluice_autoscaler_*`), the registry. *Does not own*: when something is counted.

use std::sync::atomic::AtomicU64;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use sluice_shared::telemetry::metrics_text;

use crate::driver::Action;
use crate::policy::{Decision, Reason};

type Level = Gauge<f64, AtomicU64>;

/// Why which way. Bounded: reasons are names in the source.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Why {
    direction: &'static str,
    reason: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct What {
    action: &'static str,
}

/// Who did not do what he was asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Failed {
    Gateways,
    Driver,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Of {
    of: &'static str,
}

/// Counters and gauges of one autoscaler.
pub(crate) struct Metrics {
    registry: Registry,
    desired: Gauge,
    pods: Gauge,
    active: Gauge,
    mean: Level,
    p90: Level,
    demand: Level,
    expected: Gauge,
    decisions: Family<Why, Counter>,
    actions: Family<What, Counter>,
    errors: Family<Of, Counter>,
}

impl Metrics {
    /// All at zero, with a series for each reason.
    pub(crate) fn new() -> Self {
        let mut metrics = Self {
            registry: Registry::default(),
            desired: Gauge::default(),
            pods: Gauge::default(),
            active: Gauge::default(),
            mean: Level::default(),
            p90: Level::default(),
            demand: Level::default(),
            expected: Gauge::default(),
            decisions: Family::default(),
            actions: Family::default(),
            errors: Family::default(),
        };
        metrics.register();
        for reason in Reason::ALL {
            let directions: &[&str] = match reason {
                Reason::Limits => &["in", "out"],
                Reason::Quiet => &["in"],
                Reason::MeanHigh
                | Reason::Full
                | Reason::SomeHot
                | Reason::Refused
                | Reason::Trend
                | Reason::Season => &["out"],
                _ => &["hold"],
            };
            for direction in directions {
                drop(metrics.decisions.get_or_create(&Why { direction, reason: reason.name() }));
            }
        }
        for of in [Failed::Gateways, Failed::Driver] {
            metrics.error(of, 0);
        }
        metrics
    }

    fn register(&mut self) {
        let to = self.registry.sub_registry_with_prefix("sluice_autoscaler");
        to.register("desired_pods", "Pods that there should be", self.desired.clone());
        to.register("pods", "Pods that run and are not on their way out", self.pods.clone());
        to.register("active_pods", "Pods that a gateway sees active", self.active.clone());
        to.register(
            "load_mean",
            "Load per active pod, refused streams included: 1 is full",
            self.mean.clone(),
        );
        to.register("load_p90", "Nine in ten active pods are loaded no more than this", self.p90.clone());
        to.register("demand_pods", "Pods' worth of load, refused streams included", self.demand.clone());
        to.register("expected_pods", "Pods that the forecasts ask for", self.expected.clone());
        to.register("decisions", "Decisions, by direction and reason", self.decisions.clone());
        to.register("actions", "What the driver did", self.actions.clone());
        to.register("errors", "Looks at the pool, and steps of the driver, that failed", self.errors.clone());
    }

    pub(crate) fn decided(&self, decision: &Decision) {
        let terms = &decision.terms;
        self.desired.set(decision.pods.into());
        self.pods.set(terms.replicas.into());
        self.active.set(terms.active.into());
        self.mean.set(terms.mean);
        self.p90.set(terms.p90);
        self.demand.set(terms.demand);
        self.expected.set(terms.predicted.into());
        let why = Why { direction: decision.direction(), reason: decision.reason.name() };
        self.decisions.get_or_create(&why).inc();
    }

    pub(crate) fn acted(&self, action: &Action) {
        let action = match action {
            Action::Started(_) => "start",
            Action::Restarted(_) => "restart",
            Action::Draining(_) => "drain",
            Action::Rejoined(_) => "join",
            Action::Ended(_) => "end",
            Action::Scaled { .. } => "scale",
        };
        self.actions.get_or_create(&What { action }).inc();
    }

    pub(crate) fn error(&self, of: Failed, count: u64) {
        let of = if of == Failed::Gateways { "gateways" } else { "driver" };
        self.errors.get_or_create(&Of { of }).inc_by(count);
    }

    /// In the Prometheus text format.
    pub(crate) fn text(&self) -> String {
        metrics_text(&self.registry)
    }
}
