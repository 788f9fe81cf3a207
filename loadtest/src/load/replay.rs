//! A trace sent again, as it was or faster: its gaps and bursts are those of the file.
//!
//! *Owns*: how a trace becomes a load.
//! *Does not own*: reading it (`trace`), sending it (`load`).

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, bail, ensure};
use bytes::Bytes;
use sluice_shared::ids::{StreamName, TableName};

use super::report::Run;
use super::scenario::{SECONDS_MAX, Scenario};
use super::source::{Source, Traced};
use super::trace::{Trace, TracedStream};
use super::{Options, Sending, Stream, run_loads};

/// Beyond the last record, for its second to be whole.
const TAIL_S: f64 = 1.0;

/// How fast.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Speed {
    /// So many times as fast as it was.
    Times(f64),
    /// As fast as there is room.
    Max,
}

impl std::str::FromStr for Speed {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let times = text.trim_end_matches('x').parse::<f64>().ok();
        match times.filter(|times| times.is_finite() && *times > 0.0) {
            Some(times) => Ok(Self::Times(times)),
            None if text == "max" => Ok(Self::Max),
            None => Err(format!("{text:?} is no speed: expected such as 10, 0.5 or max")),
        }
    }
}

/// What is replayed.
#[derive(Debug, Clone)]
pub struct Replay {
    /// Parquet, CSV or NDJSON.
    pub file: PathBuf,
    /// The column of times.
    pub time: String,
    /// The column whose values are streams.
    pub stream: String,
    /// How fast.
    pub speed: Speed,
    /// Where to.
    pub table: String,
    /// Whether streams have their values as names: then nothing is sent twice.
    pub named: bool,
    /// Records of a message at most.
    pub frame_records: usize,
    /// Pods that are started.
    pub pods: usize,
}

impl Replay {
    /// Of its file, as reports call it.
    pub fn name(&self) -> String {
        let name = self.file.file_name().and_then(|name| name.to_str()).unwrap_or("trace");
        name.to_owned()
    }

    /// Reads the file, and sends it. `say` of the options hears how large it is. The thread that calls must outlive it.
    ///
    /// # Errors
    /// The file is not as it has to be; as `load::run`.
    pub async fn run(&self, options: &Options<'_>) -> anyhow::Result<(String, Run)> {
        ensure!(!options.audit, "a replay is counted, not audited");
        let table: TableName = self.table.parse().with_context(|| format!("--table {}", self.table))?;
        let trace = Trace::read(&self.file, &self.time, &self.stream)?;
        let (records, streams) = (trace.records, trace.streams.len());
        (options.say)(&format!(
            "{records} records of {streams} streams, {:.1} s",
            trace.span_us() as f64 / 1e6
        ));
        trace.notes.iter().for_each(|note| (options.say)(note));
        let text = self.text(&trace)?;
        let scenario = Scenario::parse(&self.name(), &text)?;
        let schema = Arc::clone(&trace.schema);
        let streams =
            trace.streams.into_iter().map(|stream| self.stream_of(stream)).collect::<anyhow::Result<_>>()?;
        let Some(load) = scenario.loads.first().cloned() else { bail!("nothing to send") };
        let load = super::scenario::Load { table: table.to_string(), ..load };
        let sending = Sending { load, schema, encoded: Bytes::new(), hashes: None, streams };
        let run = run_loads(options, &scenario, vec![sending]).await?;
        Ok((text, run))
    }

    /// As a scenario would say it.
    fn text(&self, trace: &Trace) -> anyhow::Result<String> {
        let seconds = match self.speed {
            Speed::Times(times) => trace.span_us() as f64 / 1e6 / times + TAIL_S,
            Speed::Max => TAIL_S,
        };
        ensure!(
            seconds <= SECONDS_MAX,
            "at this speed it would take {:.0} hours: its first record is {}, its last one {}; raise --speed, or mend \
             times that are wrong",
            seconds / 3600.0,
            trace.first,
            trace.last
        );
        Ok(format!(
            "about = \"{} records of {}, streams by {}, times by {}, speed {}\"\nseconds = {seconds}\n\n[pool]\npods = {}\n\n\
             [[load]]\nname = \"trace\"\nstreams = {}\nframe_records = {}\nrate = \"full\"\n",
            trace.records,
            self.name().replace(['"', '\\'], "_"),
            self.stream.replace(['"', '\\'], "_"),
            self.time.replace(['"', '\\'], "_"),
            match self.speed {
                Speed::Times(times) => times.to_string(),
                Speed::Max => "max".to_owned(),
            },
            self.pods.max(1),
            trace.streams.len(),
            self.frame_records.max(1),
        ))
    }

    fn stream_of(&self, stream: TracedStream) -> anyhow::Result<Stream> {
        let TracedStream { value, text, mut records } = stream;
        if let Speed::Times(times) = self.speed {
            records.iter_mut().for_each(|record| record.0 = (record.0 as f64 / times) as u64);
        }
        if self.named {
            value.parse::<StreamName>().with_context(|| {
                format!("--named: column {}: leave --named out, or take another --stream", self.stream)
            })?;
        }
        let full = self.speed == Speed::Max;
        let traced = Traced { text, records, taken: 0, records_max: self.frame_records.max(1), full };
        Ok(Stream {
            table: self.table.clone(),
            source: Source::Traced(traced),
            opens: 0.0,
            name: self.named.then_some(value),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn speeds_are_read() {
        for (text, speed) in [("10", Speed::Times(10.0)), ("2x", Speed::Times(2.0)), ("max", Speed::Max)] {
            assert_eq!(text.parse::<Speed>(), Ok(speed));
        }
        for text in ["0", "-1", "fast", "inf"] {
            text.parse::<Speed>().expect_err(text);
        }
    }
}
