//! HTTP posts: a body of records, and one answer when all of them are durable, or committed.
//!
//! *Owns*: headers and query of a post, the answer, what an idempotency key names.
//! *Does not own*: what a stream means (`session`), paths (`http`), reading and cutting bodies (`body`, `split`).
//! Keeps P7: of a body only what the session's window takes is in memory.

pub(super) mod body;
pub(super) mod coding;
mod parquet;
mod split;
#[cfg(debug_assertions)]
pub(super) mod fuzzing;

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use http::header::{ACCEPT_ENCODING, CONTENT_ENCODING, CONTENT_TYPE, HeaderMap};
use http::request::Parts;
use http::{HeaderValue, StatusCode, Version};
use serde::Deserialize;
use serde_json::{Value, json};
use sluice_shared::error::{Error, ErrorKind};
use sluice_shared::frame::{Encoding, FinishWhen, GatewayFrame, Rejected, UnknownFields};
use sluice_shared::ids::{StreamId, StreamName, TableName, TableVersion};
use sluice_shared::table::described_columns;
use uuid::Uuid;

use crate::app::App;
use crate::auth::Credential;
use crate::edge::POSTED;
use crate::edge::http::{Granted, Refusal, ToWrite, json_response};
use crate::session::{self, Edge, Ended, Input, going_away};
use crate::upstream::OpenTerms;
use body::{Body, Rest};
use coding::Coding;
use parquet::Parquet;
use split::{Ready, Splitter};

/// Refused records that an answer names; it counts all of them.
const REJECTED_NAMED_MAX: usize = 100;
/// Longest key, in bytes.
const KEY_BYTES_MAX: usize = 255;
const KEY: &str = "idempotency-key";
const TYPES: &str = "application/x-ndjson (or application/jsonl), application/json, text/csv, \
                     application/vnd.apache.arrow.stream, application/vnd.apache.parquet";

/// What may stand after the `?`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Query {
    #[serde(default)]
    wait: FinishWhen,
    #[serde(default)]
    unknown: UnknownFields,
}

/// `POST /v1/tables/{table}/records`.
pub(crate) async fn records(
    State(app): State<Arc<App>>,
    table: Result<Granted<ToWrite>, Refusal>,
    request: Request,
) -> Response {
    let (parts, body) = request.into_parts();
    let posted = async {
        let query = axum::extract::Query::<Query>::try_from_uri(&parts.uri).map_err(|error| {
            let known = "known are wait=durable or wait=committed, and unknown=ignore or unknown=refuse";
            Error::invalid("invalid_query", format!("{}; {known}", error.body_text()))
        })?;
        Post::of(table?.table, &parts, query.0, Kinds::All, &app).await
    };
    let (answer, rest) = match posted.await {
        Ok(post) => {
            let (result, told, rest) = Box::pin(post.carry(body, &app)).await;
            (
                result
                    .map(|()| json_response(told.json().to_string()))
                    .unwrap_or_else(|error| told.refuse(error)),
                rest,
            )
        }
        Err(refusal) => (refusal.into_response(), Rest::all(body)),
    };
    behind(answer, rest, parts.version)
}

/// `POST /zerobus/v1/tables/{table}/insert`, as Databricks's Zerobus has it.
pub(crate) async fn insert(
    State(app): State<Arc<App>>,
    table: Result<Granted<ToWrite>, Refusal>,
    request: Request,
) -> Response {
    let (parts, body) = request.into_parts();
    let posted = async { Post::of(table?.table, &parts, Query::default(), Kinds::Array, &app).await };
    let (answer, rest) = match posted.await {
        Ok(post) => {
            let (result, told, rest) = Box::pin(post.carry(body, &app)).await;
            let answer = match result.and_then(|()| told.check_all_in()) {
                Ok(()) => json_response("{}"),
                Err(error) => zerobus_refusal(error.into()),
            };
            (answer, rest)
        }
        Err(refusal) => (zerobus_refusal(refusal), Rest::all(body)),
    };
    behind(answer, rest, parts.version)
}

/// An answer that comes before the body has ended must survive the rest of it. HTTP/2 has calls of its own.
pub(super) fn behind(answer: Response, rest: Rest, version: Version) -> Response {
    if version >= Version::HTTP_2 { answer } else { rest.behind(answer) }
}

/// In the form of Databricks's APIs.
pub(super) fn zerobus_refusal(refusal: Refusal) -> Response {
    let code = match refusal.error.kind {
        ErrorKind::Invalid => "INVALID_PARAMETER_VALUE",
        ErrorKind::Unauthorized => "UNAUTHENTICATED",
        ErrorKind::Forbidden => "PERMISSION_DENIED",
        ErrorKind::NotFound => "NOT_FOUND",
        ErrorKind::Busy => "RESOURCE_EXHAUSTED",
        ErrorKind::Unavailable => "UNAVAILABLE",
        ErrorKind::Fenced => "ABORTED",
        ErrorKind::Internal => "INTERNAL",
    };
    let column = refusal.error.column.as_ref().map(|column| format!("column {column}: ")).unwrap_or_default();
    let message = format!("{column}{} [{}]", refusal.error.message, refusal.error.code);
    refusal.respond(json!({ "error_code": code, "message": message }))
}

/// Which bodies a path takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kinds {
    All,
    /// A JSON array.
    Array,
}

/// A post whose head is read.
struct Post {
    terms: OpenTerms,
    wait: FinishWhen,
    coding: Coding,
    unpacker: Unpacker,
}

/// What makes frames of a body.
enum Unpacker {
    Splitter(Splitter),
    Parquet(Parquet),
}

impl Post {
    async fn of(
        table: TableName,
        parts: &Parts,
        query: Query,
        kinds: Kinds,
        app: &App,
    ) -> Result<Self, Refusal> {
        let coding = coding(&parts.headers)?;
        let name = key(&parts.headers)?;
        let kind = body_kind(&parts.headers, kinds)?;
        if app.scope.is_draining() {
            return Err(going_away().into());
        }
        let unpacker = match kind {
            BodyKind::Parquet => {
                let (directory, max) = (app.config.scratch_dir(), app.config.parquet_bytes_max.0);
                Unpacker::Parquet(Parquet::new(&directory, max, Arc::clone(&app.unpacking))?)
            }
            BodyKind::Lines => Unpacker::Splitter(Splitter::lines()),
            BodyKind::Values => Unpacker::Splitter(Splitter::values(kinds == Kinds::Array)),
            BodyKind::Arrow => Unpacker::Splitter(Splitter::arrow()),
            BodyKind::Csv => {
                let columns = match app.upstream.describe_table(&table).await {
                    Ok(description) => described_columns(&description),
                    Err(error) if error.kind == ErrorKind::NotFound => None,
                    Err(error) => return Err(error.into()),
                };
                let ignore_unknown = query.unknown == UnknownFields::Ignore;
                Unpacker::Splitter(Splitter::csv(columns, ignore_unknown))
            }
        };
        let is_arrow = matches!(kind, BodyKind::Arrow | BodyKind::Parquet);
        let encoding = if is_arrow { Encoding::Arrow } else { Encoding::Json };
        let terms = open_terms(table, name, encoding, Credential::of(&parts.headers));
        let terms = OpenTerms { unknown: query.unknown, ..terms };
        Ok(Self { terms, wait: query.wait, coding, unpacker })
    }

    /// Carries the body to its end, or to that of its stream.
    async fn carry(self, body: axum::body::Body, app: &App) -> (Result<(), Error>, Told, Rest) {
        let mut edge = PostEdge {
            body: Body::new(body, self.coding, app.config.read_timeout()),
            unpacker: self.unpacker,
            ready: Ready::new(app.config.frame_bytes_max.as_usize()),
            wait: self.wait,
            at: At::Reading,
            told: Told::default(),
        };
        let ended = session::run(&mut edge, app, self.terms).await;
        let result = match ended {
            Ended::Finished | Ended::Closed => Ok(()),
            Ended::Failed(error) => Err(error),
            Ended::Gone => Err(going_away()),
        };
        (result, edge.told, edge.body.into_rest())
    }
}

fn open_terms(
    table: TableName,
    name: Option<StreamName>,
    encoding: Encoding,
    credential: Credential,
) -> OpenTerms {
    match name {
        None => OpenTerms::ephemeral(table, encoding, credential),
        // A key's records are sent from the first on, whatever of them is there: the pod judges them again.
        Some(name) => OpenTerms { resume_at: Some(0), ..OpenTerms::named(table, encoding, credential, name) },
    }
}

/// The stream that an idempotency key names: a key may hold what no stream name may.
fn key(headers: &HeaderMap) -> Result<Option<StreamName>, Refusal> {
    let Some(key) = headers.get(KEY) else { return Ok(None) };
    let bytes = key.as_bytes();
    if bytes.is_empty() || bytes.len() > KEY_BYTES_MAX || headers.get_all(KEY).iter().count() > 1 {
        let message = format!("`Idempotency-Key` must stand there once, with 1 to {KEY_BYTES_MAX} bytes");
        return Err(Error::invalid("invalid_idempotency_key", message).into());
    }
    let named = [b"sluice:idempotency-key:", bytes].concat();
    let name = format!("{POSTED}{}", Uuid::new_v5(&Uuid::NAMESPACE_URL, &named));
    Ok(Some(name.parse().map_err(Error::from)?))
}

pub(super) fn coding(headers: &HeaderMap) -> Result<Coding, Refusal> {
    let Some(named) = headers.get(CONTENT_ENCODING) else { return Ok(Coding::Identity) };
    let known = named.to_str().ok().and_then(Coding::named);
    let unknown = || {
        let message = format!("Content-Encoding {named:?} is not known: known are {}", coding::KNOWN);
        let mut refusal = Refusal::with("unsupported_encoding", message, StatusCode::UNSUPPORTED_MEDIA_TYPE);
        refusal.header = Some((ACCEPT_ENCODING, HeaderValue::from_static(coding::KNOWN)));
        refusal
    };
    Ok(known.ok_or_else(unknown)??)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BodyKind {
    Lines,
    Values,
    Csv,
    Arrow,
    Parquet,
}

fn body_kind(headers: &HeaderMap, kinds: Kinds) -> Result<BodyKind, Refusal> {
    let stated = headers.get(CONTENT_TYPE).map(|stated| String::from_utf8_lossy(stated.as_bytes()));
    let essence = stated.as_ref().and_then(|stated| stated.split(';').next()).unwrap_or_default();
    let kind = match essence.trim().to_ascii_lowercase().as_str() {
        "application/x-ndjson" | "application/ndjson" | "application/jsonl" => Some(BodyKind::Lines),
        "application/json" => Some(BodyKind::Values),
        "" if kinds == Kinds::Array => Some(BodyKind::Values),
        "text/csv" => Some(BodyKind::Csv),
        "application/vnd.apache.arrow.stream" => Some(BodyKind::Arrow),
        "application/vnd.apache.parquet" | "application/x-parquet" => Some(BodyKind::Parquet),
        _ => None,
    };
    let kind = kind.filter(|kind| kinds == Kinds::All || *kind == BodyKind::Values);
    kind.ok_or_else(|| {
        let types = if kinds == Kinds::All { TYPES } else { "application/json" };
        let what = match stated {
            Some(stated) => format!("Content-Type {:?}", stated.chars().take(100).collect::<String>()),
            None => "a body without Content-Type".to_owned(),
        };
        let message = format!("{what} is not taken here: send {types}");
        Refusal::with("unsupported_type", message, StatusCode::UNSUPPORTED_MEDIA_TYPE)
    })
}

/// What the producer is to hear in the end.
#[derive(Debug, Default)]
struct Told {
    stream: Option<StreamId>,
    /// Records that were handed to the session.
    records: u64,
    /// The first ones.
    rejected: Vec<Rejected>,
    rejected_total: u64,
    /// Of those, how many are kept beside their table.
    quarantined: u64,
    durable: Option<u64>,
    committed: Option<u64>,
    version: Option<TableVersion>,
}

impl Told {
    fn json(&self) -> Value {
        json!({
            "stream": self.stream,
            "records": self.records,
            "rejected": self.rejected,
            "rejected_total": self.rejected_total,
            "durable": self.durable,
            "committed": self.committed,
            "version": self.version,
        })
    }

    /// The error, and what has become of the records before it.
    fn refuse(&self, error: Error) -> Response {
        let mut refusal = Refusal::from(error);
        match refusal.error.code.as_str() {
            "body_timeout" => refusal.status = StatusCode::REQUEST_TIMEOUT,
            "body_too_large" => refusal.status = StatusCode::PAYLOAD_TOO_LARGE,
            _ => {}
        }
        let mut body = self.json();
        body["error"] = json!(refusal.error);
        refusal.respond(body)
    }

    /// # Errors
    /// The first record that was refused.
    fn check_all_in(&self) -> Result<(), Error> {
        if self.quarantined == self.rejected_total {
            return Ok(());
        }
        let Some(first) = self.rejected.first() else { return Ok(()) };
        let column = first.column.as_ref().map(|column| format!(", column {column}")).unwrap_or_default();
        let (refused, records) = (self.rejected_total, self.records);
        let message = format!(
            "record {}{column}: {}; {refused} of {records} records were refused, the others are taken",
            first.offset, first.message
        );
        Err(Error::invalid(&first.code, message).at_offset(first.offset))
    }
}

/// How far the body is.
#[derive(Debug, Clone, PartialEq, Eq)]
enum At {
    Reading,
    /// The body is there as a whole, and not all of its records are ready.
    Unpacking,
    /// What is ready is still to be taken, then this.
    Failing(Error),
    Finishing,
    Done,
}

struct PostEdge {
    body: Body,
    unpacker: Unpacker,
    ready: Ready,
    wait: FinishWhen,
    at: At,
    told: Told,
}

impl PostEdge {
    async fn read(&mut self) -> Result<(), Error> {
        match self.body.next().await? {
            Some(piece) => match &mut self.unpacker {
                Unpacker::Splitter(splitter) => {
                    let before = self.ready.records();
                    splitter.push(piece, &mut self.ready)?;
                    if self.ready.records() > before {
                        self.body.record_ended();
                    }
                    Ok(())
                }
                Unpacker::Parquet(parquet) => parquet.push(piece).await,
            },
            None => {
                self.at = At::Unpacking;
                Ok(())
            }
        }
    }

    async fn unpack(&mut self) -> Result<(), Error> {
        let goes_on = match &mut self.unpacker {
            Unpacker::Splitter(splitter) => splitter.finish(&mut self.ready).map(|()| false),
            Unpacker::Parquet(parquet) => parquet.unpack(&mut self.ready).await,
        };
        if !goes_on? {
            self.at = At::Finishing;
        }
        Ok(())
    }
}

impl Edge for PostEdge {
    async fn next(&mut self, read: bool) -> Input {
        if !read {
            self.body.pause();
            return std::future::pending().await;
        }
        loop {
            if let Some(records) = self.ready.next() {
                self.told.records += u64::from(records.count);
                return Input::Records(records);
            }
            match std::mem::replace(&mut self.at, At::Done) {
                At::Reading => {
                    self.at = At::Reading;
                    if let Err(error) = self.read().await {
                        self.at = At::Failing(error.at_offset(self.ready.records()));
                    }
                }
                At::Unpacking => {
                    self.at = At::Unpacking;
                    if let Err(error) = self.unpack().await {
                        self.at = At::Failing(error.at_offset(self.ready.records()));
                    }
                }
                At::Failing(error) => return Input::Refused(error),
                At::Finishing => return Input::Finish(self.wait),
                At::Done => return std::future::pending().await,
            }
        }
    }

    fn has_room(&self) -> bool {
        true
    }

    fn is_clear(&self) -> bool {
        true
    }

    fn tell(&mut self, frame: &GatewayFrame) {
        match frame {
            GatewayFrame::Opened(opened) => self.told.stream = Some(opened.stream.clone()),
            GatewayFrame::Ack(ack) => {
                self.told.durable = ack.durable.or(self.told.durable);
                self.told.committed = ack.committed.or(self.told.committed);
                self.told.version = ack.version.or(self.told.version);
            }
            GatewayFrame::Rejected(rejected) => {
                self.told.rejected_total += 1;
                self.told.quarantined += u64::from(rejected.quarantined);
                if self.told.rejected.len() < REJECTED_NAMED_MAX {
                    self.told.rejected.push(rejected.clone());
                }
            }
            // The answer is all that a producer hears, and `carry` has how the session ended.
            GatewayFrame::Move(_) | GatewayFrame::Error(_) => {}
        }
    }
}
