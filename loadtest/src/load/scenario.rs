//! What a scenario says: how much of what is sent where and when, what happens meanwhile, and what must not come of it.
//!
//! *Owns*: the TOML form, the scenarios that come with the program, what is wrong with one.
//! *Does not own*: running it (`load`).

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, bail, ensure};
use serde::Deserialize;
use sluice_shared::frame::Encoding;

use super::curve::Curve;
use super::source::Spacing;
use crate::edges::Transport;
use crate::workload::Shape;

/// Name and text of each scenario that comes with the program.
const BUILT_IN: &[(&str, &str)] = &[
    ("steady", include_str!("../../scenarios/steady.toml")),
    ("burst", include_str!("../../scenarios/burst.toml")),
    ("campaign", include_str!("../../scenarios/campaign.toml")),
    ("whale", include_str!("../../scenarios/whale.toml")),
    ("thousand-small", include_str!("../../scenarios/thousand-small.toml")),
    ("ten-thousand-idle", include_str!("../../scenarios/ten-thousand-idle.toml")),
    ("hot-table", include_str!("../../scenarios/hot-table.toml")),
    ("many-tables", include_str!("../../scenarios/many-tables.toml")),
    ("firmware-fault", include_str!("../../scenarios/firmware-fault.toml")),
    ("reconnect-storm", include_str!("../../scenarios/reconnect-storm.toml")),
    ("slow-acks", include_str!("../../scenarios/slow-acks.toml")),
    ("rolling-restart", include_str!("../../scenarios/rolling-restart.toml")),
    ("scale-out", include_str!("../../scenarios/scale-out.toml")),
    ("scale-in", include_str!("../../scenarios/scale-in.toml")),
    ("slow-store", include_str!("../../scenarios/slow-store.toml")),
];

/// Of a run, and of whatever happens in it.
pub(crate) const SECONDS_MAX: f64 = 86_400.0;
const STREAMS_MAX: usize = 100_000;
const FRAME_RECORDS_MAX: usize = 1_000_000;
const PROCESSES_MAX: usize = 1_000;
const MESSAGE_BYTES_MAX: usize = 32 << 20;
/// Records a second.
const RATE_MAX: f64 = 1e9;
/// Of a rate.
const TIMES_MAX: f64 = 1e6;

fn count(what: &str, value: usize, max: usize) -> anyhow::Result<()> {
    ensure!((1..=max).contains(&value), "{what} = {value}: expected 1 to {max}");
    Ok(())
}

fn moment(what: &str, seconds: f64) -> anyhow::Result<()> {
    ensure!(
        (0.0..=SECONDS_MAX).contains(&seconds),
        "{what} = {seconds}: expected 0 to {SECONDS_MAX} seconds"
    );
    Ok(())
}

/// A scenario, as it is written.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scenario {
    /// One line on what it is.
    pub about: String,
    /// The same seed sends the same records at the same times.
    #[serde(default = "one")]
    pub seed: u64,
    /// How long records are sent.
    pub seconds: f64,
    /// Where to.
    #[serde(default)]
    pub pool: Pool,
    /// What is sent.
    #[serde(rename = "load")]
    pub loads: Vec<Load>,
    /// How the load changes.
    #[serde(default, rename = "phase")]
    pub phases: Vec<Phase>,
    /// What happens meanwhile.
    #[serde(default, rename = "event")]
    pub events: Vec<Event>,
    /// What must not come of it.
    #[serde(default)]
    pub limits: Limits,
}

/// The service that is started for it.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Pool {
    /// Pods; with `pods_max` at least so many.
    pub pods: usize,
    /// The pool scales itself, up to so many pods: `sluice up`, with one gateway.
    pub pods_max: Option<usize>,
    /// Gateways.
    pub gateways: usize,
    /// Variables for its processes.
    pub env: BTreeMap<String, String>,
}

impl Default for Pool {
    fn default() -> Self {
        Self { pods: 1, pods_max: None, gateways: 1, env: BTreeMap::new() }
    }
}

/// Streams that are alike.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Load {
    /// In the report.
    pub name: String,
    /// How many at one time.
    #[serde(default = "one_usize")]
    pub streams: usize,
    /// Their table; with several, `TABLE_1` and so on.
    #[serde(default = "default_table")]
    pub table: String,
    /// How many tables.
    #[serde(default = "one_usize")]
    pub tables: usize,
    /// Which stream goes to which: `even`, `zipf:1.1` or `hot:0.5`.
    #[serde(default)]
    pub choice: Choice,
    /// How records travel.
    #[serde(default = "default_transport")]
    pub transport: Transport,
    /// How they are encoded.
    #[serde(default)]
    pub encoding: Encoding,
    /// What they are like.
    #[serde(default = "default_shape")]
    pub shape: Shape,
    /// Records of a message.
    #[serde(default = "one_usize")]
    pub frame_records: usize,
    /// Records a second of all its streams together, or `"full"`: as fast as the window lets.
    pub rate: Option<Rate>,
    /// Records a second of each stream, in place of `rate`.
    pub rate_per_stream: Option<f64>,
    /// How messages follow each other.
    #[serde(default)]
    pub spacing: Spacing,
    /// Whether streams have names, and are resumed when a connection is lost.
    #[serde(default)]
    pub named: bool,
    /// Over HTTP: whether an answer waits for the table, and not only for the log.
    #[serde(default)]
    pub wait_committed: bool,
    /// Over QUIC: streams that share a connection.
    #[serde(default = "one_usize")]
    pub streams_per_connection: usize,
    /// Its part of the run, in seconds.
    #[serde(default)]
    pub from: f64,
    /// Until the end unless given.
    pub until: Option<f64>,
    /// Its streams come within this time.
    #[serde(default)]
    pub within: f64,
    /// A stream ends after about so long, and another takes its place.
    pub stream_seconds: Option<f64>,
    /// What must not come of it.
    #[serde(default)]
    pub limits: LoadLimits,
}

/// Records a second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Rate {
    /// So many.
    Records(f64),
    /// As fast as there is room.
    Full,
}

impl<'de> Deserialize<'de> for Rate {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Written {
            Number(f64),
            Word(String),
        }
        match Written::deserialize(from)? {
            Written::Number(rate) => Ok(Self::Records(rate)),
            Written::Word(word) if word == "full" => Ok(Self::Full),
            Written::Word(word) => Err(serde::de::Error::custom(format!(
                "{word:?} is no rate: expected records a second, or \"full\""
            ))),
        }
    }
}

/// How streams choose their tables.
#[derive(Debug, Clone, Copy, PartialEq, Default, Deserialize)]
#[serde(try_from = "String")]
pub enum Choice {
    /// One after the other.
    #[default]
    Even,
    /// The n-th table as often as 1/n to this power.
    Zipf(f64),
    /// This share of the streams to the first table, the others evenly.
    Hot(f64),
}

impl TryFrom<String> for Choice {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let number =
            |number: &str| number.parse::<f64>().ok().filter(|number| number.is_finite() && *number >= 0.0);
        let choice = match text.split_once(':') {
            None if text == "even" => Some(Self::Even),
            Some(("zipf", power)) => number(power).map(Self::Zipf),
            Some(("hot", share)) => number(share).filter(|share| *share <= 1.0).map(Self::Hot),
            _ => None,
        };
        choice
            .ok_or_else(|| format!("{text:?} is no choice of tables: expected even, zipf:POWER or hot:SHARE"))
    }
}

impl Choice {
    /// The table of a stream, by its number. A stream's table depends on nothing else.
    pub(crate) fn table_of(self, stream: usize, streams: usize, tables: usize) -> usize {
        let place = (stream as f64 + 0.5) / streams.max(1) as f64;
        match self {
            Self::Even => stream % tables.max(1),
            Self::Hot(share) if place < share || tables < 2 => 0,
            Self::Hot(_) => 1 + stream % (tables - 1),
            Self::Zipf(power) => {
                let weight = |table: usize| (table as f64 + 1.0).powf(-power);
                let all: f64 = (0..tables).map(weight).sum();
                let mut below = 0.0;
                let found = (0..tables).find(|table| {
                    below += weight(*table) / all;
                    place < below
                });
                found.unwrap_or(tables.saturating_sub(1))
            }
        }
    }
}

/// A change of the load.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Phase {
    /// When it begins, in seconds.
    pub at: f64,
    /// How long it takes.
    #[serde(default)]
    pub within: f64,
    /// What the load then is, as a multiple of its rate.
    pub times: f64,
    /// Of one load alone.
    pub load: Option<String>,
}

/// Something that happens.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Event {
    /// When, in seconds.
    pub at: f64,
    /// What.
    #[serde(rename = "do")]
    pub what: What,
    /// To which pod, such as `pod-2`.
    pub pod: Option<String>,
    /// To which gateway, from 1.
    pub gateway: Option<usize>,
    /// How many pods are added.
    #[serde(default = "one_usize")]
    pub count: usize,
    /// How long it lasts, in seconds.
    pub lasts: Option<f64>,
    /// Of which share of the streams.
    pub share: Option<f64>,
    /// Of which load.
    pub load: Option<String>,
    /// By how much it is slower.
    pub delay_ms: Option<u64>,
}

/// What can happen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum What {
    /// A pod drains, and its process ends.
    Drain,
    /// `kill -9` of a pod or gateway.
    Kill,
    /// One that has ended starts again.
    Start,
    /// Pods join.
    Add,
    /// A pod or gateway stands still (SIGSTOP) for `lasts`.
    Stop,
    /// Each pod in turn drains and starts again.
    RollingRestart,
    /// Producers drop their connections and come back.
    Reconnect,
    /// Producers wait for `delay_ms` before each look at their answers.
    SlowAcks,
    /// What pods put into the store of tables takes `delay_ms` longer. Needs a build with fault points.
    SlowStore,
}

impl What {
    /// As a scenario has it.
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::Drain => "drain",
            Self::Kill => "kill",
            Self::Start => "start",
            Self::Add => "add",
            Self::Stop => "stop",
            Self::RollingRestart => "rolling-restart",
            Self::Reconnect => "reconnect",
            Self::SlowAcks => "slow-acks",
            Self::SlowStore => "slow-store",
        }
    }
}

/// Of all loads together. Times in milliseconds.
#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limits {
    /// From due to durable.
    pub ack_p50_ms: Option<f64>,
    /// From due to durable.
    pub ack_p99_ms: Option<f64>,
    /// From due to durable.
    pub ack_p999_ms: Option<f64>,
    /// From due to in the table.
    pub committed_p50_ms: Option<f64>,
    /// From due to in the table.
    pub committed_p99_ms: Option<f64>,
    /// The most that a pod said of its oldest record that is not in the table.
    pub lag_ms: Option<f64>,
    /// Openings that failed, and streams that ended by an error: none unless given.
    pub errors: Option<f64>,
    /// Records that the service did not take: none unless given.
    pub refused: Option<f64>,
    /// Records that were acked and are not in the table: none unless given.
    pub lost: Option<f64>,
    /// Records that are there twice: none unless given, beyond those whose connection was lost without a name.
    pub doubled: Option<f64>,
    /// Records that were due, or sent, and not acked in the end: none unless given.
    pub unacked: Option<f64>,
    /// Connections that were lost.
    pub reconnects: Option<f64>,
    /// At least so many durable records a second.
    pub records_per_s_min: Option<f64>,
    /// At least so many MB durable a second.
    pub mb_per_s_min: Option<f64>,
    /// At least so many pods took streams at one time.
    pub pods_min: Option<f64>,
    /// The rig itself was so late at most, for 99 of 100 messages.
    pub own_late_p99_ms: Option<f64>,
}

/// Of one load.
#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LoadLimits {
    /// From due to durable.
    pub ack_p50_ms: Option<f64>,
    /// From due to durable.
    pub ack_p99_ms: Option<f64>,
    /// From due to in the table.
    pub committed_p99_ms: Option<f64>,
    /// At least so many durable records a second, while it runs.
    pub records_per_s_min: Option<f64>,
}

fn one() -> u64 {
    1
}

fn one_usize() -> usize {
    1
}

fn default_table() -> String {
    "events".to_owned()
}

fn default_transport() -> Transport {
    Transport::WebSocketFrames
}

fn default_shape() -> Shape {
    Shape::ServiceEvent
}

/// The scenarios that come with the program, by their names.
///
/// # Errors
/// One that is wrong: that is a fault of the program.
pub fn built_in() -> anyhow::Result<Vec<(&'static str, Scenario)>> {
    BUILT_IN.iter().map(|(name, text)| Ok((*name, Scenario::parse(name, text)?))).collect()
}

/// Name and text of a scenario, from a file or of those that come with the program.
///
/// # Errors
/// There is none of this name, or the file cannot be read.
pub fn find(named: &str) -> anyhow::Result<(String, String)> {
    if let Some((name, text)) = BUILT_IN.iter().find(|(name, _)| *name == named) {
        return Ok(((*name).to_owned(), (*text).to_owned()));
    }
    let path = Path::new(named);
    if !path.is_file() {
        let known: Vec<&str> = BUILT_IN.iter().map(|(name, _)| *name).collect();
        bail!("{named}: neither a file nor a scenario that comes with the program: {}", known.join(", "));
    }
    let text = std::fs::read_to_string(path).with_context(|| named.to_owned())?;
    let name = path.file_stem().and_then(|stem| stem.to_str()).unwrap_or(named);
    Ok((name.to_owned(), text))
}

impl Scenario {
    /// Reads one.
    ///
    /// # Errors
    /// It is not as it has to be: with the line, and what is known.
    pub fn parse(name: &str, text: &str) -> anyhow::Result<Self> {
        let scenario: Self =
            toml::from_str(text).map_err(|error| anyhow::anyhow!("scenario {name}: {error}"))?;
        scenario.check().with_context(|| format!("scenario {name}"))?;
        Ok(scenario)
    }

    /// The same with other times, rates and streams: `seconds` long, all moments in proportion.
    ///
    /// # Errors
    /// It is more than can be sent.
    pub fn scaled(mut self, seconds: Option<f64>, rate: f64, streams: f64) -> anyhow::Result<Self> {
        let time = seconds.map_or(1.0, |seconds| seconds / self.seconds);
        self.seconds *= time;
        for load in &mut self.loads {
            load.from *= time;
            load.within *= time;
            load.until = load.until.map(|until| until * time);
            load.stream_seconds = load.stream_seconds.map(|lasts| lasts * time);
            load.streams = ((load.streams as f64 * streams).round() as usize).max(1);
            load.rate_per_stream = load.rate_per_stream.map(|each| each * rate);
            if let Some(Rate::Records(records)) = &mut load.rate {
                *records *= rate;
            }
        }
        for phase in &mut self.phases {
            phase.at *= time;
            phase.within *= time;
        }
        for event in &mut self.events {
            event.at *= time;
            event.lasts = event.lasts.map(|lasts| lasts * time);
        }
        self.check()?;
        Ok(self)
    }

    /// How this load changes over time.
    pub(crate) fn curve_of(&self, load: &str) -> Arc<Curve> {
        let mut curve = Curve::level();
        let mut phases: Vec<&Phase> =
            self.phases.iter().filter(|phase| phase.load.as_deref().is_none_or(|of| of == load)).collect();
        phases.sort_by(|a, b| a.at.total_cmp(&b.at));
        phases.iter().for_each(|phase| curve.go(phase.at, phase.within, phase.times));
        Arc::new(curve)
    }

    fn check(&self) -> anyhow::Result<()> {
        ensure!(
            (1.0..=SECONDS_MAX).contains(&self.seconds),
            "seconds = {}: expected 1 to {SECONDS_MAX}, a day",
            self.seconds
        );
        ensure!(!self.loads.is_empty(), "no [[load]]: nothing would be sent");
        count("[pool]: pods", self.pool.pods, PROCESSES_MAX)?;
        count("[pool]: gateways", self.pool.gateways, PROCESSES_MAX)?;
        if let Some(max) = self.pool.pods_max {
            ensure!(max >= self.pool.pods, "[pool]: pods_max = {max} is less than pods = {}", self.pool.pods);
            ensure!(self.pool.gateways == 1, "[pool]: a pool that scales itself has one gateway");
            let has_quic = self.loads.iter().any(|load| load.transport == Transport::Quic);
            ensure!(!has_quic, "[pool]: a pool that scales itself has no QUIC here");
        }
        for load in &self.loads {
            load.check(self.seconds).with_context(|| format!("load {:?}", load.name))?;
            let same = self.loads.iter().filter(|other| other.name == load.name).count();
            ensure!(same == 1, "load {:?}: there are {same} of this name", load.name);
        }
        for (number, phase) in self.phases.iter().enumerate() {
            let place = || format!("phase {} (at = {})", number + 1, phase.at);
            let check = || {
                moment("at", phase.at)?;
                moment("within", phase.within)?;
                ensure!((0.0..=TIMES_MAX).contains(&phase.times), "times: expected 0 to {TIMES_MAX}");
                anyhow::Ok(())
            };
            check().with_context(place)?;
            self.check_load(phase.load.as_deref()).with_context(place)?;
        }
        for (number, event) in self.events.iter().enumerate() {
            let place = || format!("event {} (at = {}, do = {:?})", number + 1, event.at, event.what.word());
            self.check_event(event).with_context(place)?;
        }
        Ok(())
    }

    fn check_load(&self, named: Option<&str>) -> anyhow::Result<()> {
        let Some(named) = named else { return Ok(()) };
        let known: Vec<&str> = self.loads.iter().map(|load| load.name.as_str()).collect();
        ensure!(known.contains(&named), "there is no load {named:?}: there are {}", known.join(", "));
        Ok(())
    }

    fn check_event(&self, event: &Event) -> anyhow::Result<()> {
        let Event { what, pod, gateway, lasts, share, load, delay_ms, .. } = event;
        moment("at", event.at)?;
        lasts.map_or(Ok(()), |lasts| moment("lasts", lasts))?;
        count("count", event.count, PROCESSES_MAX)?;
        gateway.map_or(Ok(()), |gateway| count("gateway", gateway, self.pool.gateways))?;
        ensure!(event.at <= self.seconds, "at is after the end (seconds = {})", self.seconds);
        self.check_load(load.as_deref())?;
        let is_to_member = matches!(what, What::Kill | What::Start | What::Stop);
        ensure!(!is_to_member || pod.is_some() != gateway.is_some(), "needs either pod or gateway");
        ensure!(*what != What::Drain || pod.is_some(), "needs pod");
        let has_delay = matches!(what, What::SlowAcks | What::SlowStore);
        ensure!(!has_delay || delay_ms.is_some(), "needs delay_ms");
        let has_length = has_delay || *what == What::Stop;
        ensure!(!has_length || lasts.is_some_and(|lasts| lasts > 0.0), "needs lasts, in seconds");
        ensure!(share.is_none_or(|share| (0.0..=1.0).contains(&share)), "share: expected 0 to 1");
        let is_to_pool = !matches!(what, What::Reconnect | What::SlowAcks);
        ensure!(
            !is_to_pool || self.pool.pods_max.is_none(),
            "a pool that scales itself (pods_max) is left alone: only reconnect and slow-acks can happen to it"
        );
        Ok(())
    }
}

impl Load {
    fn check(&self, seconds: f64) -> anyhow::Result<()> {
        let Self { streams, tables, frame_records, transport, encoding, .. } = self;
        count("streams", *streams, STREAMS_MAX)?;
        count("tables", *tables, STREAMS_MAX)?;
        count("frame_records", *frame_records, FRAME_RECORDS_MAX)?;
        let bytes = frame_records.saturating_mul(self.shape.about_bytes());
        ensure!(
            bytes <= MESSAGE_BYTES_MAX,
            "frame_records = {frame_records}: about {bytes} bytes a message, and at most {MESSAGE_BYTES_MAX} are sent here"
        );
        count("streams_per_connection", self.streams_per_connection, STREAMS_MAX)?;
        moment("from", self.from)?;
        moment("within", self.within)?;
        let until = self.until.unwrap_or(seconds).min(seconds);
        ensure!(
            self.from + self.within < until,
            "all its streams are to be open, from + within, before {until} s"
        );
        match (self.rate, self.rate_per_stream) {
            (Some(Rate::Records(rate)), None) | (None, Some(rate)) => {
                ensure!((0.0..=RATE_MAX).contains(&rate), "a rate of {rate}: expected 0 to {RATE_MAX}");
            }
            (Some(Rate::Full), None) => {}
            _ => bail!("expected either rate or rate_per_stream"),
        }
        let is_sent = match transport {
            Transport::WebSocketTexts => *encoding == Encoding::Json && *frame_records == 1,
            Transport::Http => matches!(encoding, Encoding::Json | Encoding::Arrow),
            Transport::Zerobus => matches!(encoding, Encoding::Json | Encoding::Protobuf),
            Transport::Flight => *encoding == Encoding::Arrow,
            Transport::WebSocketFrames | Transport::Quic => *encoding != Encoding::Avro,
        };
        ensure!(
            is_sent,
            "no {encoding} in messages of {frame_records} records is sent over {} here",
            transport.word()
        );
        let is_named = matches!(transport, Transport::WebSocketFrames | Transport::Quic);
        ensure!(!self.named || is_named, "named: only over websocket and quic");
        ensure!(!self.wait_committed || *transport == Transport::Http, "wait_committed: only over http");
        let lasts = self.stream_seconds.unwrap_or(1.0);
        ensure!(
            lasts > 0.0 && lasts <= SECONDS_MAX,
            "stream_seconds: expected more than 0, up to {SECONDS_MAX}"
        );
        Ok(())
    }

    /// Records a second of one stream; None: as fast as there is room.
    pub(crate) fn stream_rate(&self) -> Option<f64> {
        match (self.rate, self.rate_per_stream) {
            (_, Some(each)) => Some(each),
            (Some(Rate::Records(all)), None) => Some(all / self.streams as f64),
            (Some(Rate::Full) | None, None) => None,
        }
    }

    /// The name of one of its tables.
    pub(crate) fn table_name(&self, table: usize) -> String {
        if self.tables == 1 { self.table.clone() } else { format!("{}_{}", self.table, table + 1) }
    }

    /// Whether the protocol tells what its streams are called in the table.
    pub(crate) fn tells_streams(&self) -> bool {
        match self.transport {
            Transport::WebSocketFrames | Transport::WebSocketTexts | Transport::Quic => true,
            Transport::Http | Transport::Zerobus | Transport::Flight => false,
        }
    }

    /// Whether the protocol tells what is in the table.
    pub(crate) fn tells_commits(&self) -> bool {
        match self.transport {
            Transport::WebSocketFrames | Transport::WebSocketTexts | Transport::Quic => true,
            Transport::Http => self.wait_committed,
            Transport::Zerobus | Transport::Flight => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: &str = "about = \"x\"\nseconds = 10\n[[load]]\nname = \"a\"\nrate = 100\n";

    fn refused(text: &str, what: &[&str]) {
        let error = format!("{:#}", Scenario::parse("x", text).expect_err(text));
        assert!(what.iter().all(|what| error.contains(what)), "{what:?} are not all in: {error}");
    }

    #[test]
    fn every_scenario_of_the_program_is_right() {
        for (name, Scenario { about, .. }) in built_in().unwrap_or_else(|error| panic!("{error:#}")) {
            assert!(about.len() > 20, "{name}: {about}");
        }
    }

    #[test]
    fn what_is_wrong_is_named_with_its_line() {
        refused(&format!("{SMALL}rat = 1\n"), &["line 6", "rat", "rate_per_stream"]);
        refused(&SMALL.replace("100", "\"ful\""), &["line 5", "\"ful\"", "\"full\""]);
        refused(&format!("{SMALL}choice = \"zip\"\n"), &["line 6", "zipf:POWER"]);
        refused(&format!("{SMALL}transport = \"tcp\"\n"), &["line 6", "websocket", "quic"]);
        refused(&format!("{SMALL}rate_per_stream = 1\n"), &["load \"a\"", "either rate or"]);
        refused(&format!("{SMALL}transport = \"http\"\nnamed = true\n"), &["load \"a\"", "named"]);
        refused(
            &format!("{SMALL}[[event]]\nat = 1\ndo = \"kill\"\n"),
            &["event 1", "\"kill\"", "pod or gateway"],
        );
        refused(&format!("{SMALL}[[event]]\nat = 1\ndo = \"explode\"\n"), &["explode", "rolling-restart"]);
        refused(&format!("{SMALL}[[phase]]\nat = 1\ntimes = 2\nload = \"b\"\n"), &["\"b\"", "there are a"]);
        refused(&format!("{SMALL}[pool]\npods = 3\npods_max = 2\n"), &["pods_max"]);
    }

    #[test]
    fn no_number_is_beyond_what_can_be_sent() {
        for (line, what) in [
            ("from = -1", "from = -1"),
            ("within = 1e300", "within"),
            ("from = nan", "from = NaN"),
            ("within = 10", "from + within"),
            ("until = 0", "before 0 s"),
            ("stream_seconds = inf", "stream_seconds"),
            ("frame_records = 0", "frame_records = 0"),
            ("streams = 1_000_000_000_000", "streams"),
            ("[[event]]\nat = 1\ndo = \"stop\"\npod = \"pod-2\"\nlasts = 1e300", "lasts"),
            ("[[event]]\nat = 1\ndo = \"kill\"\ngateway = 0", "gateway = 0: expected 1 to 1"),
            ("[[event]]\nat = 1\ndo = \"add\"\ncount = 0", "count = 0"),
            ("[[phase]]\nat = nan\ntimes = 1", "at = NaN"),
            ("[[phase]]\nat = 1\ntimes = inf", "times"),
        ] {
            refused(&format!("{SMALL}{line}\n"), &[what]);
        }
        refused(&SMALL.replace("= 10\n", "= 0.5\n"), &["seconds = 0.5"]);
        refused(&SMALL.replace("100", "inf"), &["a rate of inf"]);
        let scenario = Scenario::parse("x", SMALL).expect("right");
        let error = scenario.clone().scaled(Some(1e9), 1.0, 1.0).expect_err("a day at most").to_string();
        assert!(error.contains("seconds"), "{error}");
        scenario.scaled(None, 1e12, 1.0).expect_err("too many records");
    }

    #[test]
    fn the_readme_names_every_key() {
        let readme = include_str!("../../../README.md");
        let (_, section) = readme.split_once("## Load tests").expect("the section");
        let (section, _) = section.split_once("\n## ").expect("its end");
        for (place, text) in [
            ("a scenario", "x = 1".to_owned()),
            ("[pool]", format!("{SMALL}[pool]\nx = 1")),
            ("[[load]]", format!("{SMALL}x = 1")),
            ("[load.limits]", format!("{SMALL}[load.limits]\nx = 1")),
            ("[[phase]]", format!("{SMALL}[[phase]]\nx = 1")),
            ("[[event]]", format!("{SMALL}[[event]]\nx = 1")),
            ("[limits]", format!("{SMALL}[limits]\nx = 1")),
        ] {
            let error = Scenario::parse("x", &text).expect_err(&text).to_string();
            let (_, expected) = error.split_once("expected one of").expect("what is known");
            let keys = expected.split('`').skip(1).step_by(2);
            let missing: Vec<&str> = keys.filter(|key| !section.contains(key)).collect();
            assert_eq!(missing, [""; 0], "README says nothing of keys of {place}");
        }
    }

    #[test]
    fn a_scenario_is_scaled_as_a_whole() {
        let text =
            format!("{SMALL}from = 2\n[[phase]]\nat = 5\ntimes = 3\n[[event]]\nat = 8\ndo = \"reconnect\"\n");
        let scenario =
            Scenario::parse("x", &text).expect("right").scaled(Some(2.0), 0.1, 3.0).expect("right");
        let load = &scenario.loads[0];
        assert_eq!(
            (scenario.seconds, load.from, load.streams, load.rate),
            (2.0, 0.4, 3, Some(Rate::Records(10.0)))
        );
        assert_eq!((scenario.phases[0].at, scenario.events[0].at), (1.0, 1.6));
        assert_eq!((scenario.curve_of("a").at(0.9), scenario.curve_of("a").at(1.0)), (1.0, 3.0));
    }

    #[test]
    fn streams_choose_tables() {
        let counts = |choice: Choice| {
            let mut counts = [0; 4];
            (0..100).for_each(|stream| counts[choice.table_of(stream, 100, 4)] += 1);
            counts
        };
        assert_eq!(counts(Choice::Even), [25; 4]);
        assert_eq!(counts(Choice::Hot(0.7)), [70, 10, 10, 10]);
        assert_eq!(counts(Choice::Zipf(0.0)), [25; 4]);
        assert_eq!(counts(Choice::Zipf(1.0)), [48, 24, 16, 12]);
    }
}
