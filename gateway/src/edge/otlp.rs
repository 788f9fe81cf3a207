//! OTLP: what OpenTelemetry's exporters speak. Logs, spans and metrics into one table each, a row a record.
//!
//! Over gRPC and HTTP, in protobuf and JSON. A request goes from its bytes into the columns of its signal's table; the
//! table is made with those columns where there is none. It is answered when all of its records are durable, and those
//! that were refused are told as partial success. As all exporters are, these are at least once: one that hears nothing
//! sends again.
//!
//! *Owns*: the signals, which table a request is for, the budget of requests.
//! *Does not own*: the calls (`grpc`, `http`), the rows (`flat`), the streams they go into (`streams`).
//! Keeps P7: requests that are not answered have a budget in bytes; beyond, exporters are told to come back.

mod answer;
mod columns;
mod flat;
#[cfg(debug_assertions)]
pub(super) mod fuzzing;
mod grpc;
mod http;
mod json;
mod logs;
mod metrics;
mod spans;
mod streams;
#[cfg(test)]
mod tests;
mod value;
mod wire;

use std::sync::Arc;
use std::time::Duration;

use ::http::header::HeaderMap;
use axum::Router;
use axum::extract::Request;
use axum::routing::post;
use bytes::{Bytes, BytesMut};
use sluice_shared::error::Error;
use sluice_shared::ids::TableName;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::app::App;
use crate::auth::{Credential, Privilege};
use crate::edge::post::body::Body;
use crate::edge::post::coding::Coding;
use crate::session::going_away;
use answer::Partial;
use flat::Flat;
use streams::{Key, PodRefused, Streams};

/// Names the table, as Databricks's exporters are configured to.
const TABLE_HEADER: &str = "x-databricks-zerobus-table-name";
/// Bytes of all requests that are not answered, and of their rows. Twenty of the largest requests.
const UNANSWERED_BYTES_MAX: usize = 256 << 20;
const BUSY_RETRY_AFTER: Duration = Duration::from_secs(1);
/// Code of the error that HTTP has a status for.
const TOO_LARGE: &str = "request_too_large";

/// A kind of telemetry, with its own path and columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Signal {
    Logs,
    Traces,
    Metrics,
}

impl Signal {
    const ALL: [Self; 3] = [Self::Logs, Self::Traces, Self::Metrics];

    /// Where posts go.
    fn path(self) -> &'static str {
        match self {
            Self::Logs => "/v1/logs",
            Self::Traces => "/v1/traces",
            Self::Metrics => "/v1/metrics",
        }
    }

    /// Where calls go.
    fn call(self) -> &'static str {
        match self {
            Self::Logs => "/opentelemetry.proto.collector.logs.v1.LogsService/Export",
            Self::Traces => "/opentelemetry.proto.collector.trace.v1.TraceService/Export",
            Self::Metrics => "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export",
        }
    }

    /// The table of requests that name none, and the key that configures it.
    fn default_table(self, app: &App) -> (Option<TableName>, &'static str) {
        let config = &app.config;
        match self {
            Self::Logs => (config.otlp_logs_table.clone(), "gateway.otlp_logs_table"),
            Self::Traces => (config.otlp_traces_table.clone(), "gateway.otlp_traces_table"),
            Self::Metrics => (config.otlp_metrics_table.clone(), "gateway.otlp_metrics_table"),
        }
    }

    /// What a record is called.
    fn record(self) -> &'static str {
        match self {
            Self::Logs => "log record",
            Self::Traces => "span",
            Self::Metrics => "data point",
        }
    }

    /// How partial success counts records, in JSON.
    fn rejected(self) -> &'static str {
        match self {
            Self::Logs => "rejectedLogRecords",
            Self::Traces => "rejectedSpans",
            Self::Metrics => "rejectedDataPoints",
        }
    }
}

/// How a request is written; its answer is too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    Protobuf,
    Json,
}

impl Form {
    fn content_type(self) -> &'static str {
        match self {
            Self::Protobuf => "application/x-protobuf",
            Self::Json => "application/json",
        }
    }
}

/// All paths.
pub(crate) fn routes(app: &Arc<App>) -> Router<Arc<App>> {
    let otlp = Arc::new(Otlp {
        app: Arc::clone(app),
        streams: Arc::new(Streams::new(Arc::clone(app))),
        budget: Budget::new(UNANSWERED_BYTES_MAX),
    });
    Signal::ALL.into_iter().fold(Router::new(), |router, signal| {
        let (over_http, over_grpc) = (Arc::clone(&otlp), Arc::clone(&otlp));
        router
            .route(signal.path(), post(move |request: Request| http::export(over_http, signal, request)))
            .route(signal.call(), post(move |request: Request| grpc::export(over_grpc, signal, request)))
    })
}

/// What all requests share.
struct Otlp {
    app: Arc<App>,
    streams: Arc<Streams>,
    budget: Budget,
}

/// Bytes that requests may have until they are answered.
struct Budget {
    bytes: usize,
    free: Arc<Semaphore>,
}

/// Bytes, and their place in the budget.
struct Held {
    bytes: Bytes,
    _room: Room,
}

/// A share of the budget; given back when it is dropped.
struct Room(Option<OwnedSemaphorePermit>);

impl Budget {
    fn new(bytes: usize) -> Self {
        Self { bytes, free: Arc::new(Semaphore::new(bytes)) }
    }

    /// Adds to what a request has. It never waits: those that wait would hold what others wait for.
    ///
    /// # Errors
    /// `Busy`: the budget is used up.
    fn take(&self, room: &mut Room, bytes: usize) -> Result<(), Error> {
        let wanted = u32::try_from(bytes).unwrap_or(u32::MAX);
        let more = Arc::clone(&self.free).try_acquire_many_owned(wanted).map_err(|_| {
            let message = format!(
                "OTLP requests that are not answered have {} bytes at this gateway, and they are used: try again \
                 later, or another gateway",
                self.bytes
            );
            Error::busy("requests_waiting", message, BUSY_RETRY_AFTER)
        })?;
        match &mut room.0 {
            Some(held) => held.merge(more),
            None => room.0 = Some(more),
        }
        Ok(())
    }
}

impl Otlp {
    /// Reads a body to its end.
    ///
    /// # Errors
    /// `Invalid`: cut off, too large, not compressed as it says; `Busy`.
    async fn read(&self, body: &mut Body) -> Result<Held, Error> {
        let (mut read, mut room) = (BytesMut::new(), Room(None));
        while let Some(piece) = body.next().await? {
            self.add(&mut read, &mut room, &piece)?;
        }
        Ok(Held { bytes: read.freeze(), _room: room })
    }

    /// Decompresses a message.
    ///
    /// # Errors
    /// As `read`.
    fn decompress(&self, mut coding: Coding, mut message: Bytes) -> Result<Held, Error> {
        let (mut read, mut room) = (BytesMut::new(), Room(None));
        loop {
            let piece = coding.step(&mut message)?;
            if piece.is_empty() {
                break;
            }
            self.add(&mut read, &mut room, &piece)?;
        }
        if !coding.is_whole() {
            return Err(Error::invalid("body_cut_off", "the end of the message's compression is missing"));
        }
        Ok(Held { bytes: read.freeze(), _room: room })
    }

    fn add(&self, read: &mut BytesMut, room: &mut Room, piece: &[u8]) -> Result<(), Error> {
        let max = self.app.config.frame_bytes_max;
        if read.len() + piece.len() > max.as_usize() {
            let message =
                format!("a request of more than {max} (gateway.frame_bytes_max): send smaller ones");
            return Err(Error::invalid(TOO_LARGE, message));
        }
        self.budget.take(room, piece.len())?;
        read.extend_from_slice(piece);
        Ok(())
    }

    /// Takes a request's records, and answers when they are durable.
    ///
    /// # Errors
    /// `Invalid`: malformed, or without a table. What the stream ends with: none of the request may be in the table then,
    /// or some.
    async fn export(&self, key: &Key, form: Form, message: Held) -> Result<Partial, Error> {
        let signal = key.signal;
        if self.app.scope.is_draining() {
            return Err(going_away());
        }
        let mut flat = self.flatten(signal, form, &message)?;
        let mut room = Room(None);
        self.budget.take(&mut room, flat.bytes())?;
        drop(message);
        let frames = std::mem::take(&mut flat.frames);
        let refused =
            if frames.is_empty() { PodRefused::default() } else { self.streams.export(key, frames).await? };
        self.app.metrics.rejected_records.inc_by(flat.refused.len() as u64);
        Ok(partial(signal, &flat, refused))
    }

    fn flatten(&self, signal: Signal, form: Form, message: &Held) -> Result<Flat, Error> {
        let frame_bytes_max = self.app.config.frame_bytes_max.as_usize();
        match form {
            Form::Protobuf => flat::flatten(signal, &message.bytes, frame_bytes_max),
            Form::Json => {
                let message = json::to_protobuf(signal, &message.bytes)?;
                flat::flatten(signal, &message, frame_bytes_max)
            }
        }
    }

    /// Which stream a request goes into. Each request is judged, before its body is read: the stream may be open already.
    ///
    /// # Errors
    /// `Unauthorized`, `Forbidden`; `Invalid` without a table.
    fn key(&self, signal: Signal, headers: &HeaderMap) -> Result<Key, Error> {
        let credential = Credential::of(headers);
        let access = self.app.auth.access(&credential)?;
        let table = match headers.get(TABLE_HEADER) {
            Some(named) => named
                .to_str()
                .map_err(|_| {
                    let message = format!("header {TABLE_HEADER} is not printable ASCII");
                    Error::invalid("invalid_table_name", message)
                })?
                .parse()?,
            None => {
                let (table, config) = signal.default_table(&self.app);
                table.ok_or_else(|| {
                    let message = format!(
                        "no table for these {}s: name one in header {TABLE_HEADER}, or set {config}",
                        signal.record()
                    );
                    Error::invalid("no_table", message)
                })?
            }
        };
        access.check(&table, Privilege::Write)?;
        Ok(Key { signal, table, credential })
    }
}

/// How many records were refused, here and by the pod, and which was the first.
fn partial(signal: Signal, flat: &Flat, by_pod: PodRefused) -> Partial {
    let here = flat.refused.first().map(|refused| (refused.place, refused.why.clone()));
    let there = by_pod.first.map(|(row, rejected)| {
        let column = rejected.column.map(|column| format!("column {column}: ")).unwrap_or_default();
        let kept = if rejected.quarantined { " (it is kept beside the table)" } else { "" };
        (flat.place_of(row), format!("{column}{}{kept}", rejected.message))
    });
    let rejected = flat.refused.len() as u64 + by_pod.count;
    let first = here.into_iter().chain(there).min_by_key(|(place, _)| *place);
    let message = first.map(|(place, why)| {
        format!(
            "{} {place} of the request (from 0): {why}; {rejected} refused, the others are in",
            signal.record()
        )
    });
    Partial { rejected, message: message.unwrap_or_default() }
}
