//! Logs and metrics: how a program sets them up.
//!
//! *Owns*: the log format, the metrics text format.
//! *Does not own*: what is logged or counted; each component registers its own struct of metrics.

use std::io::IsTerminal;

use prometheus_client::registry::Registry;
use tracing_subscriber::EnvFilter;

/// How log lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// One JSON object a line.
    Json,
}

/// At `trace` it tells whole messages, with the records and the token in them; at `debug` each close.
const NEVER_TRACED: &str = "tungstenite=info";

/// Installs the process's log subscriber. Lines go to standard error. A second call does nothing.
///
/// `filter` is a `tracing` directive list, such as `info,sluice_pod=debug`.
///
/// # Errors
/// Where the filter cannot be parsed.
pub fn init_logs(filter: &str, format: LogFormat) -> Result<(), tracing_subscriber::filter::ParseError> {
    let filter = EnvFilter::builder().parse(filter)?.add_directive(NEVER_TRACED.parse()?);
    let colours = std::io::stderr().is_terminal();
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(colours)
        // It would complain on standard error, and panic where that has no reader any more.
        .log_internal_errors(false);
    // A second installation is refused by `tracing`: harmless in tests that share a process.
    let _ = match format {
        LogFormat::Text => builder.with_target(false).try_init(),
        LogFormat::Json => builder.json().flatten_event(true).try_init(),
    };
    Ok(())
}

/// A registry's metrics in the Prometheus text format.
pub fn metrics_text(registry: &Registry) -> String {
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, registry).expect("writing to a string cannot fail");
    text
}
