//! What a pod can be told, with defaults that suit one machine.
//!
//! *Owns*: the `[pod]` section and its validation.
//! *Does not own*: where it comes from (`shared::config`).

use std::path::PathBuf;
use std::time::Duration;

use serde::Deserialize;
use sluice_shared::config::{self, ByteSize, ConfigError};
use sluice_shared::ids::PodId;

use crate::duty::Pace;
use crate::table::TablesPlace;
use crate::threads::cores;

/// Smallest log segment: a batch of the largest record has to fit.
const SEGMENT_BYTES_MIN: u64 = 1 << 20;

/// Longest time that a log in the tables' store may let records wait for others.
const LOG_INTERVAL_MS_MAX: u64 = 10_000;
/// Shortest time after which a log is taken over: gossip itself needs some of it.
const ADOPT_AFTER_MS_MIN: u64 = 1_000;

/// The `[pod]` section.
#[derive(Debug, Clone, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PodConfig {
    /// Name of the pod; stays the same across restarts, and belongs to its log.
    pub id: PodId,
    /// `host:port` of the pod service; port 0 takes any free one.
    pub listen: String,
    /// How the write-ahead log is kept.
    pub log: LogKind,
    /// Where the write-ahead log lives, where it is on a disk.
    pub wal_dir: PathBuf,
    /// Where the tables live, as `catalog/schema/table` below it: a directory, or `s3://bucket/prefix`. Shared by all pods
    /// of a pool.
    pub tables_dir: TablesPlace,
    /// Whether a table that does not exist is made from the first records of its first stream.
    pub auto_create: bool,
    /// Decoding threads; 0 is one a core, at most 8.
    pub lanes: usize,
    /// Bytes of frames that are accepted but not yet durable, over all streams.
    pub ingress_bytes: ByteSize,
    /// Bytes of frames that get in within a second, where there is such a limit; beyond it producers are slowed. What the pod
    /// can carry is then known, and need not be found out.
    pub bytes_per_s_max: Option<ByteSize>,
    /// Bytes of durable batches that wait in memory to be committed; past it they are read back from the log.
    pub memory_bytes: ByteSize,
    /// Largest single record.
    pub record_bytes_max: ByteSize,
    /// Size of a log segment; largest entry of a log in the tables' store.
    pub segment_bytes: ByteSize,
    /// Size of the whole log; when nothing can be trimmed, producers are slowed.
    pub wal_bytes_max: ByteSize,
    /// How long records wait for others until they go into the tables' store as one object of the log.
    pub log_interval_ms: u64,
    /// They go earlier when they reach this size.
    pub log_group_bytes: ByteSize,
    /// How long a pod has to be gone until another one takes its log in the tables' store over.
    pub adopt_after_ms: u64,
    /// Whether the log starts although records in its middle are damaged, giving those up.
    pub accept_loss: bool,
    /// Within which a durable record is to be in the table: it waits so long, less what writing the last files took (at most
    /// half of it).
    pub flush_interval_ms: u64,
    /// A table is flushed earlier when its waiting batches reach this size.
    pub target_file_bytes: ByteSize,
    /// Table versions from one checkpoint to the next.
    pub checkpoint_interval: u64,
    /// `host:port` by which gateways and other pods reach the pod, where that is not `listen`.
    pub advertise: Option<String>,
    /// Whether the pod takes streams once it is ready, or waits to be let in.
    pub join: Join,
    /// For how long a drain waits for gateways to take their streams elsewhere.
    pub drain_timeout_ms: u64,
    /// How many streams a draining pod hands over in a second.
    pub drain_streams_per_s: u32,
    /// What the process does once a drain that it was asked for is done.
    pub after_drain: AfterDrain,
}

/// How the write-ahead log is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogKind {
    /// In a directory of the pod's own: the pod needs it back after a crash.
    Disk,
    /// As objects beside the tables: any other pod can take it over.
    Object,
}

impl std::str::FromStr for LogKind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "disk" => Ok(Self::Disk),
            "object" => Ok(Self::Object),
            other => Err(format!("{other:?} is no kind of log: expected disk or object")),
        }
    }
}

/// When a pod takes streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Join {
    /// Once it is ready.
    Ready,
    /// Once it is told to.
    Held,
}

/// What a process does that holds nothing any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AfterDrain {
    /// It ends.
    Exit,
    /// It waits for its SIGTERM: for orchestrators that would start an ended one again.
    Wait,
}

impl Default for PodConfig {
    fn default() -> Self {
        Self {
            id: "pod-1".parse().expect("a valid pod id"),
            listen: "127.0.0.1:7171".to_owned(),
            log: LogKind::Disk,
            wal_dir: "data/pods/pod-1/wal".into(),
            tables_dir: PathBuf::from("data/tables").into(),
            auto_create: false,
            lanes: 0,
            ingress_bytes: ByteSize::mib(256),
            bytes_per_s_max: None,
            memory_bytes: ByteSize::mib(1024),
            record_bytes_max: ByteSize::mib(10),
            segment_bytes: ByteSize::mib(64),
            wal_bytes_max: ByteSize::mib(4096),
            log_interval_ms: 50,
            log_group_bytes: ByteSize::mib(4),
            adopt_after_ms: 15_000,
            accept_loss: false,
            flush_interval_ms: 1000,
            target_file_bytes: ByteSize::mib(128),
            checkpoint_interval: 100,
            advertise: None,
            join: Join::Ready,
            drain_timeout_ms: 30_000,
            drain_streams_per_s: 500,
            after_drain: AfterDrain::Exit,
        }
    }
}

impl PodConfig {
    /// Within which a durable record is to be in the table: it waits so long, less what writing the last files took (at most
    /// half of it).
    pub fn flush_interval(&self) -> Duration {
        Duration::from_millis(self.flush_interval_ms)
    }

    /// How long a pod has to be gone until its log is taken over.
    pub fn adopt_after(&self) -> Duration {
        Duration::from_millis(self.adopt_after_ms)
    }

    /// How the pod drains unless it is told otherwise.
    pub fn pace(&self) -> Pace {
        let patience = Duration::from_millis(self.drain_timeout_ms);
        Pace { patience, streams_per_s: f64::from(self.drain_streams_per_s) }
    }

    /// How many lanes there are.
    pub fn lane_count(&self) -> usize {
        if self.lanes == 0 { cores().min(8) } else { self.lanes }
    }

    /// Checks the values, alone and against each other.
    ///
    /// # Errors
    /// Names the keys at fault, and what they have to be: the first of `faults`.
    pub fn validate(&self) -> Result<(), ConfigError> {
        self.faults().into_iter().next().map_or(Ok(()), Err)
    }

    /// All that `validate` refuses.
    pub fn faults(&self) -> Vec<ConfigError> {
        let mut faults = Vec::new();
        let mut refuse = |message: String| faults.push(ConfigError::Relation(message));
        if self.segment_bytes.0 < SEGMENT_BYTES_MIN || self.segment_bytes.0 < 2 * self.record_bytes_max.0 {
            refuse(format!(
                "pod.segment_bytes is {}: it has to be at least 1MiB and twice pod.record_bytes_max ({})",
                self.segment_bytes, self.record_bytes_max
            ));
        }
        if self.wal_bytes_max.0 < 4 * self.segment_bytes.0 {
            refuse(format!(
                "pod.wal_bytes_max is {}: it has to hold four segments of pod.segment_bytes ({})",
                self.wal_bytes_max, self.segment_bytes
            ));
        }
        if self.log == LogKind::Object && self.log_group_bytes > self.segment_bytes {
            refuse(format!(
                "pod.log_group_bytes is {}: an object of the log takes at most pod.segment_bytes ({})",
                self.log_group_bytes, self.segment_bytes
            ));
        }
        if self.log_interval_ms > LOG_INTERVAL_MS_MAX {
            refuse(format!(
                "pod.log_interval_ms is {}: each record waits for that, so that at most {LOG_INTERVAL_MS_MAX} is allowed",
                self.log_interval_ms
            ));
        }
        if self.adopt_after_ms < ADOPT_AFTER_MS_MIN {
            refuse(format!(
                "pod.adopt_after_ms is {}: a pod that is only slow would be ended; at least {ADOPT_AFTER_MS_MIN}",
                self.adopt_after_ms
            ));
        }
        if self.ingress_bytes < self.record_bytes_max {
            refuse(format!(
                "pod.ingress_bytes is {}: it has to hold one record of pod.record_bytes_max ({})",
                self.ingress_bytes, self.record_bytes_max
            ));
        }
        for (key, value, what) in [
            ("bytes_per_s_max", self.bytes_per_s_max.map_or(1, |rate| rate.0), "no record would get in"),
            ("record_bytes_max", self.record_bytes_max.0, "no record would fit"),
            ("log_interval_ms", self.log_interval_ms, "it has to be 1 or more"),
            ("log_group_bytes", self.log_group_bytes.0, "it has to be 1 or more"),
            ("flush_interval_ms", self.flush_interval_ms, "it has to be 1 or more"),
            ("checkpoint_interval", self.checkpoint_interval, "it has to be 1 or more"),
            (
                "drain_streams_per_s",
                u64::from(self.drain_streams_per_s),
                "no stream would ever be handed over",
            ),
            ("target_file_bytes", self.target_file_bytes.0, "no row would fit in a file"),
        ] {
            if value == 0 {
                refuse(format!("pod.{key} is 0: {what}"));
            }
        }
        faults.extend(config::check_listen("pod.listen", &self.listen).err());
        let advertise =
            self.advertise.as_deref().map(|address| config::check_listen("pod.advertise", address));
        faults.extend(advertise.and_then(Result::err));
        faults
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_fit_together() {
        PodConfig::default().validate().expect("valid");
    }

    #[test]
    fn a_segment_has_to_hold_a_record() {
        let config = PodConfig { segment_bytes: ByteSize::mib(8), ..PodConfig::default() };
        let error = config.validate().expect_err("too small").to_string();
        assert!(error.contains("pod.segment_bytes is 8MiB"), "{error}");
    }
}
