//! For fuzzers: requests made rows without a connection. In builds with assertions alone, where nothing else calls it.
//!
//! *Owns*: that.
//! *Does not own*: what must hold (`loadtest`).

use arrow::datatypes::SchemaRef;
use bytes::Bytes;
use sluice_shared::error::Error;

use super::{Signal, flat, json};

/// A kind of telemetry.
#[derive(Debug, Clone, Copy)]
pub enum Telemetry {
    /// Log records.
    Logs,
    /// Spans.
    Traces,
    /// Data points.
    Metrics,
}

impl Telemetry {
    fn signal(self) -> Signal {
        match self {
            Self::Logs => Signal::Logs,
            Self::Traces => Signal::Traces,
            Self::Metrics => Signal::Metrics,
        }
    }

    /// The columns of its table.
    pub fn schema(self) -> SchemaRef {
        flat::schema(self.signal())
    }

    /// A request as frames, each with its count of rows, and how many of its records are refused.
    ///
    /// # Errors
    /// Those that its sender is told.
    pub fn flatten(
        self,
        is_json: bool,
        request: &[u8],
        frame_bytes_max: usize,
    ) -> Result<(Vec<(u32, Bytes)>, usize), Error> {
        let flat = if is_json {
            let request = json::to_protobuf(self.signal(), request)?;
            flat::flatten(self.signal(), &request, frame_bytes_max)?
        } else {
            flat::flatten(self.signal(), request, frame_bytes_max)?
        };
        let frames = flat.frames.into_iter().map(|frame| (frame.rows, frame.payload));
        Ok((frames.collect(), flat.refused.len()))
    }
}
