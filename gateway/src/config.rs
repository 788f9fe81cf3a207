//! The gateway's configuration.
//!
//! *Owns*: its keys, their defaults, the relations between them.
//! *Does not own*: where they come from (`sluice_shared::config::load`).

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use sluice_shared::config::{ByteSize, ConfigError};
use sluice_shared::error::Error;
use sluice_shared::ids::{PodId, TableName};
use sluice_shared::link::PodAddress;
use sluice_shared::proto::MESSAGE_BYTES_MAX;

/// Largest `frame_bytes_max`: a frame must fit in one message to a pod, envelope included.
const FRAME_BYTES_LIMIT: u64 = MESSAGE_BYTES_MAX as u64 - (1 << 20);
/// Smallest window and frame limit that make sense.
const BYTES_MIN: u64 = 1 << 10;
/// 20 minutes.
const UNAVAILABLE_TIMEOUT_MS_MAX: u64 = 1_200_000;

/// Configuration of a gateway.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GatewayConfig {
    /// Where producers connect, as `host:port`. Port 0 takes a free one.
    pub listen: String,
    /// Where producers connect over QUIC (UDP): as `listen` unless given, `off` or nothing for nowhere. Needs a
    /// certificate.
    pub quic_listen: Option<String>,
    /// The certificate of QUIC, PEM, with its chain. Read again when the files change.
    pub tls_cert: Option<PathBuf>,
    /// Its private key, PEM.
    pub tls_key: Option<PathBuf>,
    /// Bytes of one stream that are kept until they are durable. At the limit the producer is slowed.
    pub window_bytes: ByteSize,
    /// Largest message, frame and record.
    pub frame_bytes_max: ByteSize,
    /// Where OTLP's log records go that name no table.
    pub otlp_logs_table: Option<TableName>,
    /// Where its spans go.
    pub otlp_traces_table: Option<TableName>,
    /// Where its data points go.
    pub otlp_metrics_table: Option<TableName>,
    /// Where Parquet bodies are kept while they are read; the system's directory for such files unless given.
    pub scratch_dir: Option<PathBuf>,
    /// Largest Parquet body.
    pub parquet_bytes_max: ByteSize,
    /// The pods. The all-in-one program fills them in itself.
    pub pods: Vec<PodEntry>,
    /// Producer connections at one time.
    pub connections_max: usize,
    /// How long a producer may take to send a request's header, and to finish its WebSocket upgrade.
    pub handshake_timeout_ms: u64,
    /// How long a socket may take no bytes at all while there is something to tell its producer, and how long a
    /// post's body may bring none while it is read.
    pub write_timeout_ms: u64,
    /// How long a pod may take to answer one `open`.
    pub open_timeout_ms: u64,
    /// How long a stream waits for a pod to take it again, before its producer is told `Unavailable`.
    pub unavailable_timeout_ms: u64,
    /// How long the close of a connection waits until all that was received is durable.
    pub close_timeout_ms: u64,
}

/// A pod by name and place.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PodEntry {
    /// Its name, which it keeps across restarts.
    pub id: PodId,
    /// `host:port`.
    pub address: String,
}

impl Default for GatewayConfig {
    fn default() -> Self {
        Self {
            listen: "127.0.0.1:7070".to_owned(),
            quic_listen: None,
            tls_cert: None,
            tls_key: None,
            window_bytes: ByteSize::mib(8),
            frame_bytes_max: ByteSize::mib(10),
            otlp_logs_table: None,
            otlp_traces_table: None,
            otlp_metrics_table: None,
            scratch_dir: None,
            parquet_bytes_max: ByteSize::mib(8 << 10),
            pods: Vec::new(),
            connections_max: 16_000,
            handshake_timeout_ms: 10_000,
            write_timeout_ms: 30_000,
            open_timeout_ms: 10_000,
            unavailable_timeout_ms: 600_000,
            close_timeout_ms: 10_000,
        }
    }
}

impl GatewayConfig {
    /// Checks the values against each other.
    ///
    /// # Errors
    /// `Relation`, naming the key, its value and what it must be.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let refuse = |text: String| Err(ConfigError::Relation(text));
        for (key, size) in [("window_bytes", self.window_bytes), ("frame_bytes_max", self.frame_bytes_max)] {
            if size.0 < BYTES_MIN {
                return refuse(format!(
                    "gateway.{key} is {size}: it must be at least {}",
                    ByteSize(BYTES_MIN)
                ));
            }
        }
        if self.frame_bytes_max.0 > FRAME_BYTES_LIMIT {
            let (size, limit) = (self.frame_bytes_max, ByteSize(FRAME_BYTES_LIMIT));
            return refuse(format!(
                "gateway.frame_bytes_max is {size}: a message to a pod holds at most {limit}"
            ));
        }
        if self.connections_max == 0 {
            return refuse("gateway.connections_max is 0: no producer could connect".to_owned());
        }
        for (key, value) in self.timeouts() {
            if value == 0 {
                return refuse(format!("gateway.{key} is 0: it must be at least 1"));
            }
        }
        self.validate_quic()?;
        // Pods forget an ended stream after half an hour: one that could still be resent must not be forgotten.
        if self.unavailable_timeout_ms > UNAVAILABLE_TIMEOUT_MS_MAX {
            let (value, most) = (self.unavailable_timeout_ms, UNAVAILABLE_TIMEOUT_MS_MAX);
            return refuse(format!("gateway.unavailable_timeout_ms is {value}: it must be at most {most}"));
        }
        self.validate_pods()
    }

    fn validate_quic(&self) -> Result<(), ConfigError> {
        let text = match (&self.tls_cert, &self.tls_key) {
            (Some(_), None) => {
                "gateway.tls_cert without gateway.tls_key: a certificate needs its private key"
            }
            (None, Some(_)) => {
                "gateway.tls_key without gateway.tls_cert: a private key needs its certificate"
            }
            (None, None) if self.quic_listen.as_deref().is_some_and(|listen| !is_off(listen)) => {
                "gateway.quic_listen without gateway.tls_cert and gateway.tls_key: QUIC needs a certificate"
            }
            _ => return Ok(()),
        };
        Err(ConfigError::Relation(text.to_owned()))
    }

    /// Where to listen for QUIC; None for nowhere.
    pub fn quic_address(&self) -> Option<&str> {
        let listen = self.quic_listen.as_deref().unwrap_or(&self.listen);
        (!is_off(listen)).then_some(listen)
    }

    /// Where bodies are kept that cannot be read as they come.
    pub(crate) fn scratch_dir(&self) -> PathBuf {
        self.scratch_dir.clone().unwrap_or_else(std::env::temp_dir)
    }

    /// The files of certificate and key.
    pub(crate) fn tls_files(&self) -> Option<(&Path, &Path)> {
        Some((self.tls_cert.as_deref()?, self.tls_key.as_deref()?))
    }

    fn validate_pods(&self) -> Result<(), ConfigError> {
        for (at, pod) in self.pods.iter().enumerate() {
            if self.pods[..at].iter().any(|other| other.id == pod.id) {
                return Err(ConfigError::Relation(format!("gateway.pods names pod {} twice", pod.id)));
            }
            let parsed = pod.address.parse::<PodAddress>();
            parsed
                .map_err(|error| ConfigError::Relation(format!("gateway.pods, pod {}: {error}", pod.id)))?;
        }
        Ok(())
    }

    fn timeouts(&self) -> [(&'static str, u64); 5] {
        [
            ("handshake_timeout_ms", self.handshake_timeout_ms),
            ("write_timeout_ms", self.write_timeout_ms),
            ("open_timeout_ms", self.open_timeout_ms),
            ("unavailable_timeout_ms", self.unavailable_timeout_ms),
            ("close_timeout_ms", self.close_timeout_ms),
        ]
    }

    /// The configured pods, as `Gateway::start` takes them.
    ///
    /// # Errors
    /// `Invalid` for an address that is no `host:port`.
    pub fn pod_addresses(&self) -> Result<Vec<(PodId, PodAddress)>, Error> {
        self.pods.iter().map(|pod| Ok((pod.id.clone(), pod.address.parse()?))).collect()
    }

    pub(crate) fn handshake_timeout(&self) -> Duration {
        Duration::from_millis(self.handshake_timeout_ms)
    }

    pub(crate) fn write_timeout(&self) -> Duration {
        Duration::from_millis(self.write_timeout_ms)
    }

    pub(crate) fn open_timeout(&self) -> Duration {
        Duration::from_millis(self.open_timeout_ms)
    }

    pub(crate) fn unavailable_timeout(&self) -> Duration {
        Duration::from_millis(self.unavailable_timeout_ms)
    }

    pub(crate) fn close_timeout(&self) -> Duration {
        Duration::from_millis(self.close_timeout_ms)
    }
}

fn is_off(listen: &str) -> bool {
    matches!(listen, "" | "off")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(change: impl FnOnce(&mut GatewayConfig)) -> String {
        let mut config = GatewayConfig::default();
        change(&mut config);
        config.validate().expect_err("must be refused").to_string()
    }

    #[test]
    fn the_defaults_are_valid() {
        GatewayConfig::default().validate().expect("valid");
    }

    #[test]
    fn quic_listens_where_the_rest_does_unless_told_otherwise() {
        for (quic_listen, expected) in [
            (None, Some("127.0.0.1:7070")),
            (Some("[::]:1"), Some("[::]:1")),
            (Some("off"), None),
            (Some(""), None),
        ] {
            let quic_listen = quic_listen.map(str::to_owned);
            let config = GatewayConfig { quic_listen, ..GatewayConfig::default() };
            assert_eq!(config.quic_address(), expected);
        }
    }

    #[test]
    fn what_does_not_fit_together_is_refused_by_key() {
        assert!(refusal(|config| config.window_bytes = ByteSize(1)).contains("window_bytes is 1B"));
        assert!(
            refusal(|config| config.frame_bytes_max = ByteSize::mib(32)).contains("frame_bytes_max is 32MiB")
        );
        assert!(refusal(|config| config.write_timeout_ms = 0).contains("write_timeout_ms is 0"));
        assert!(refusal(|config| config.connections_max = 0).contains("connections_max"));
        assert!(refusal(|config| config.tls_cert = Some("a".into())).contains("without gateway.tls_key"));
        assert!(refusal(|config| config.tls_key = Some("a".into())).contains("without gateway.tls_cert"));
        assert!(refusal(|config| config.quic_listen = Some("[::]:1".to_owned())).contains("a certificate"));
        let pod = |address: &str| PodEntry { id: "a".parse().expect("valid"), address: address.to_owned() };
        assert!(refusal(|config| config.pods = vec![pod("x:1"), pod("y:1")]).contains("pod a twice"));
        assert!(refusal(|config| config.pods = vec![pod("nowhere")]).contains("expected host:port"));
    }
}
