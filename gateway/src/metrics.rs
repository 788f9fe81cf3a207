//! What the gateway counts.
//!
//! *Owns*: the names (`sluice_gateway_*`), the registry.
//! *Does not own*: when something is counted.

use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use sluice_shared::error::Error;
use sluice_shared::telemetry::metrics_text;

/// Bounds of the pauses' histogram.
const PAUSES_S: [f64; 9] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 3.0];

/// A failure's stable code. Bounded: codes are names in the source.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct Code {
    code: String,
}

/// Counters and gauges of one gateway.
pub(crate) struct Metrics {
    registry: Registry,
    /// Producer connections that are open.
    pub(crate) connections: Gauge,
    /// Streams that are open.
    pub(crate) streams: Gauge,
    /// Records taken from producers.
    pub(crate) records: Counter,
    /// Their payload bytes.
    pub(crate) bytes: Counter,
    /// Acks told to producers.
    pub(crate) acks: Counter,
    /// Records refused by pods.
    pub(crate) rejected_records: Counter,
    /// Errors told to producers, by code.
    errors: Family<Code, Counter>,
    /// Streams that were opened again after a pod was lost.
    pub(crate) reopens: Counter,
    /// Streams that their pods have handed over.
    pub(crate) handoffs: Counter,
    /// For how long each of those was not forwarded.
    handoff_seconds: Histogram,
    /// Frames sent a second time.
    pub(crate) replayed_frames: Counter,
    /// Bytes of all windows: received, not yet durable.
    pub(crate) window_bytes: Gauge,
}

impl Metrics {
    /// All at zero.
    pub(crate) fn new() -> Self {
        let mut metrics = Self {
            registry: Registry::default(),
            connections: Gauge::default(),
            streams: Gauge::default(),
            records: Counter::default(),
            bytes: Counter::default(),
            acks: Counter::default(),
            rejected_records: Counter::default(),
            errors: Family::default(),
            reopens: Counter::default(),
            handoffs: Counter::default(),
            handoff_seconds: Histogram::new(PAUSES_S),
            replayed_frames: Counter::default(),
            window_bytes: Gauge::default(),
        };
        metrics.register();
        metrics
    }

    fn register(&mut self) {
        let to = self.registry.sub_registry_with_prefix("sluice_gateway");
        to.register("connections", "Producer connections that are open", self.connections.clone());
        to.register("streams", "Streams that are open", self.streams.clone());
        to.register("records", "Records taken from producers", self.records.clone());
        to.register("payload_bytes", "Payload bytes of those records", self.bytes.clone());
        to.register("acks", "Acks told to producers", self.acks.clone());
        to.register("rejected_records", "Records refused by pods", self.rejected_records.clone());
        to.register("errors", "Errors told to producers, by code", self.errors.clone());
        to.register("reopens", "Streams opened again after a pod was lost", self.reopens.clone());
        to.register("handoffs", "Streams that their pods have handed over", self.handoffs.clone());
        let help = "For how long a stream that was handed over was not forwarded";
        to.register("handoff_seconds", help, self.handoff_seconds.clone());
        to.register("replayed_frames", "Frames sent a second time", self.replayed_frames.clone());
        to.register("window_bytes", "Bytes received and not yet durable", self.window_bytes.clone());
    }

    /// A stream has another pod, after this pause.
    pub(crate) fn handoff(&self, pause: Duration) {
        self.handoffs.inc();
        self.handoff_seconds.observe(pause.as_secs_f64());
    }

    /// An error was told to a producer.
    pub(crate) fn error(&self, error: &Error) {
        self.errors.get_or_create(&Code { code: error.code.clone() }).inc();
    }

    /// In the Prometheus text format.
    pub(crate) fn text(&self) -> String {
        metrics_text(&self.registry)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_readme_lists_all_of_them() {
        let readme = include_str!("../../README.md");
        let text = Metrics::new().text();
        let names =
            text.lines().filter_map(|line| line.strip_prefix("# TYPE sluice_gateway_")?.split(' ').next());
        let missing: Vec<_> = names.filter(|name| !readme.contains(&format!("`{name}`"))).collect();
        assert_eq!(missing, Vec::<&str>::new());
    }

    #[test]
    fn metrics_are_named_for_the_gateway() {
        let metrics = Metrics::new();
        metrics.records.inc_by(3);
        metrics.error(&Error::invalid("offset_gap", "a gap"));
        let text = metrics.text();
        assert!(text.contains("\nsluice_gateway_records_total 3\n"), "{text}");
        assert!(text.contains("sluice_gateway_errors_total{code=\"offset_gap\"} 1"), "{text}");
    }
}
