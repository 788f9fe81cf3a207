//! Zerobus gRPC: what Databricks's clients speak, so that they work with nothing changed but the endpoint.
//!
//! Its offsets count requests, ours count records: each request is remembered until all its records are durable. Its
//! clients kill a stream whose acks go back or too far, take no answer for a single bad record, and reconnect without a
//! pause when an open stream fails for a reason that may pass: so such a failure is told late.
//!
//! *Owns*: the service's messages, the map from requests to records, the pace of failures.
//! *Does not own*: what a stream means (`session`), the HTTP/2 connection (`app`).

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use sluice_shared::error::Error;
use sluice_shared::frame::{Encoding, FinishWhen, GatewayFrame, Rejected, UnknownFields};
use sluice_shared::ids::{OffsetRange, SessionId, StreamId, TableName};
use sluice_shared::proto::zerobus::ephemeral_stream_request::Payload as Ask;
use sluice_shared::proto::zerobus::ephemeral_stream_response::Payload as Answer;
use sluice_shared::proto::zerobus::ingest_record_batch_request::Batch;
use sluice_shared::proto::zerobus::ingest_record_request::Record;
use sluice_shared::proto::zerobus::{self, EphemeralStreamRequest, EphemeralStreamResponse, RecordType};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::metadata::MetadataMap;
use tonic::{Request, Response, Status, Streaming};

use crate::app::App;
use crate::edge::json_text;
use crate::session::{self, Edge, Ended, Input, Records};
use crate::upstream::OpenTerms;

/// Where the service is mounted.
pub(crate) const PATH: &str = "/databricks.zerobus.Zerobus/{method}";
/// Names the table in each call's headers; clients with headers of their own may leave it out.
const TABLE_HEADER: &str = "x-databricks-zerobus-table-name";
/// Answers that may wait for a client to read them.
const ANSWERS_WAITING_MAX: usize = 8;
/// After a failure that may pass clients reconnect at once, some 800 times a second: they are told this much later.
const TARPIT: Duration = Duration::from_secs(1);

/// The service.
#[derive(Clone)]
pub(crate) struct Zerobus {
    app: Arc<App>,
}

impl Zerobus {
    /// The service as it is mounted.
    pub(crate) fn server(app: Arc<App>) -> zerobus::zerobus_server::ZerobusServer<Self> {
        let message_bytes_max = app.config.frame_bytes_max.as_usize() + MESSAGE_OVERHEAD_BYTES;
        let server = zerobus::zerobus_server::ZerobusServer::new(Self { app });
        server.max_decoding_message_size(message_bytes_max)
    }
}

/// Of a message, beside its records.
const MESSAGE_OVERHEAD_BYTES: usize = 1 << 20;

type StreamAnswer = Result<EphemeralStreamResponse, Status>;

#[tonic::async_trait]
impl zerobus::zerobus_server::Zerobus for Zerobus {
    type EphemeralStreamStream = ReceiverStream<StreamAnswer>;

    /// Answers at once: clients send nothing before they have the response's headers.
    async fn ephemeral_stream(
        &self,
        request: Request<Streaming<EphemeralStreamRequest>>,
    ) -> Result<Response<Self::EphemeralStreamStream>, Status> {
        let table = table_header(request.metadata()).map_err(|error| status(&error))?;
        let (answers, receiver) = mpsc::channel(ANSWERS_WAITING_MAX);
        let edge = ZerobusEdge::new(request.into_inner(), answers);
        self.app.scope.spawn("zerobus stream", serve(edge, table, Arc::clone(&self.app)));
        Ok(Response::new(ReceiverStream::new(receiver)))
    }
}

fn table_header(headers: &MetadataMap) -> Result<Option<TableName>, Error> {
    let Some(value) = headers.get(TABLE_HEADER) else { return Ok(None) };
    let text = value.to_str().map_err(|_| {
        Error::invalid("invalid_table_name", format!("header {TABLE_HEADER} is not printable ASCII"))
    })?;
    Ok(Some(text.parse()?))
}

fn status(error: &Error) -> Status {
    let code = Status::from(error.clone()).code();
    let mut message = error.message.clone();
    if let Some(column) = &error.column {
        message = format!("column {column}: {message}");
    }
    Status::new(code, format!("{message} [{}]", error.code))
}

async fn serve(mut edge: ZerobusEdge, table: Option<TableName>, app: Arc<App>) {
    let ended = match edge.terms(table, &app).await {
        Ok(terms) => Box::pin(session::run(&mut edge, &app, terms)).await,
        Err(ended) => ended,
    };
    edge.close(ended, &app).await;
}

/// One call.
struct ZerobusEdge {
    requests: Streaming<EphemeralStreamRequest>,
    answers: mpsc::Sender<StreamAnswer>,
    /// Told, and not yet taken by the call.
    waiting: VecDeque<EphemeralStreamResponse>,
    encoding: Encoding,
    opened: bool,
    /// The client has half-closed.
    finished: bool,
    sent: Requests,
    /// Why the stream has to end: a record that was refused.
    refused: Option<Error>,
}

/// Requests whose records are not all durable.
#[derive(Debug, Default)]
struct Requests {
    /// By rising offset.
    open: VecDeque<Sent>,
    /// Offset of the next request.
    next: i64,
    /// One more than the offset of the last record.
    records_end: u64,
    durable_next: u64,
    /// The first refused record: neither its request nor a later one is ever acked.
    refused_at: Option<u64>,
}

/// A request that was received.
#[derive(Debug, Clone, Copy)]
struct Sent {
    offset: i64,
    records: OffsetRange,
}

impl Requests {
    /// Takes a request of `records` records.
    ///
    /// # Errors
    /// An offset that is not the next one.
    fn push(&mut self, offset: Option<i64>, records: u32) -> Result<(), Error> {
        let expected = self.next;
        let got = offset.ok_or_else(|| Error::invalid("missing_offset", "a request without `offset_id`"))?;
        if got != expected {
            let message = format!("Non-incremental offset: expected {expected}, actual {got}");
            return Err(Error::invalid("offset_gap", message));
        }
        self.next += 1;
        let start = self.records_end;
        self.records_end += u64::from(records);
        self.open.push_back(Sent { offset: got, records: OffsetRange { start, end: self.records_end } });
        Ok(())
    }

    /// The last request that is newly covered, when all records before `next` are durable.
    fn durable(&mut self, next: u64) -> Option<i64> {
        self.durable_next = self.durable_next.max(next);
        let covered = self.refused_at.map_or(self.durable_next, |refused| refused.min(self.durable_next));
        let mut last = None;
        while self.open.front().is_some_and(|sent| sent.records.end <= covered) {
            last = self.open.pop_front().map(|sent| sent.offset);
        }
        last
    }

    /// The request that holds a record, and the record's place in it.
    fn request_of(&self, record: u64) -> Option<(i64, u64)> {
        let at = self.open.partition_point(|sent| sent.records.end <= record);
        let sent = self.open.get(at).filter(|sent| sent.records.contains(record))?;
        Some((sent.offset, record - sent.records.start))
    }
}

impl ZerobusEdge {
    fn new(requests: Streaming<EphemeralStreamRequest>, answers: mpsc::Sender<StreamAnswer>) -> Self {
        Self {
            requests,
            answers,
            waiting: VecDeque::new(),
            encoding: Encoding::Json,
            opened: false,
            finished: false,
            sent: Requests::default(),
            refused: None,
        }
    }

    /// What the stream is to be opened with: the first request says it.
    async fn terms(&mut self, table: Option<TableName>, app: &App) -> Result<OpenTerms, Ended> {
        let first = tokio::select! {
            biased; // drain first: the client may never say anything
            () = app.scope.draining() => return Err(Ended::Failed(session::going_away())),
            first = tokio::time::timeout(app.config.handshake_timeout(), self.requests.message()) => first,
        };
        let create = match first {
            Ok(Ok(Some(EphemeralStreamRequest { payload: Some(Ask::CreateStream(create)) }))) => create,
            Ok(Ok(None) | Err(_)) => return Err(Ended::Gone),
            Ok(Ok(Some(_))) | Err(_) => {
                let message = "the first request has to be `create_stream`, within the handshake timeout";
                return Err(Ended::Failed(Error::invalid("expected_create_stream", message)));
            }
        };
        let terms = open_terms(create, table).map_err(Ended::Failed)?;
        self.encoding = terms.encoding;
        Ok(terms)
    }

    /// Takes a request. None where it brings no records.
    fn take(&mut self, request: EphemeralStreamRequest) -> Result<Option<Records>, Error> {
        let (offset, records) = match request.payload {
            Some(Ask::IngestRecord(one)) => (one.offset_id, json_record(one.record)?),
            Some(Ask::IngestRecordBatch(many)) => (many.offset_id, json_batch(many.batch)?),
            Some(Ask::CreateStream(_)) => {
                let message = "second `create_stream`: a call carries one stream";
                return Err(Error::invalid("already_open", message));
            }
            None => return Err(Error::invalid("unknown_request", "a request of a kind that is not known")),
        };
        let (payload, count) = records;
        self.sent.push(offset, count)?;
        if count == 0 {
            self.ack(self.sent.durable_next);
            return Ok(None);
        }
        Ok(Some(Records { first_offset: None, count, payload }))
    }

    fn ack(&mut self, durable_next: u64) {
        if let Some(offset) = self.sent.durable(durable_next) {
            let ack = zerobus::IngestRecordResponse { durability_ack_up_to_offset: Some(offset) };
            self.answer(Answer::IngestRecordResponse(ack));
        }
    }

    fn answer(&mut self, answer: Answer) {
        self.waiting.push_back(EphemeralStreamResponse { payload: Some(answer) });
        self.flush();
    }

    /// Hands over what the call takes without waiting.
    fn flush(&mut self) {
        while let Ok(room) = self.answers.try_reserve() {
            let Some(answer) = self.waiting.pop_front() else { return };
            room.send(Ok(answer));
        }
    }

    fn refuse(&mut self, rejected: &Rejected) {
        if self.sent.refused_at.is_some_and(|first| first <= rejected.offset) {
            return;
        }
        self.sent.refused_at = Some(rejected.offset);
        let place = match self.sent.request_of(rejected.offset) {
            Some((request, record)) => format!("request {request}, record {record}"),
            None => format!("record {}", rejected.offset),
        };
        let column = rejected.column.as_ref().map(|column| format!(", column {column}")).unwrap_or_default();
        let message = format!("{place}{column}: {}", rejected.message);
        self.refused = Some(Error::invalid(&rejected.code, message));
    }

    /// Ends the call as the session did.
    async fn close(self, ended: Ended, app: &App) {
        let Ended::Failed(error) = ended else { return };
        tracing::info!(code = error.code, %error, "zerobus stream refused");
        app.metrics.error(&error);
        if self.opened && error.retryable {
            tokio::select! {
                biased; // the gateway's end does not wait for it
                () = app.scope.cancelled() => {}
                () = tokio::time::sleep(TARPIT) => {}
            }
        }
        // A client that is gone needs no answer.
        let _ = self.answers.send(Err(status(&error))).await;
    }
}

impl Edge for ZerobusEdge {
    async fn next(&mut self, read: bool) -> Input {
        loop {
            if let Some(error) = self.refused.take() {
                return Input::Refused(error);
            }
            let reading = read && !self.finished;
            let request = tokio::select! {
                biased; // what was told leaves first: acks let the client go on
                room = self.answers.reserve(), if !self.waiting.is_empty() => {
                    let (Ok(room), Some(answer)) = (room, self.waiting.pop_front()) else {
                        return Input::Gone("call ended");
                    };
                    room.send(Ok(answer));
                    return Input::Cleared;
                }
                () = self.answers.closed() => return Input::Gone("call ended"),
                request = self.requests.message(), if reading => request,
            };
            match request {
                Ok(Some(request)) => match self.take(request) {
                    Ok(Some(records)) => return Input::Records(records),
                    Ok(None) => {}
                    Err(error) => return Input::Refused(error),
                },
                Ok(None) => {
                    self.finished = true;
                    return Input::Finish(FinishWhen::Durable);
                }
                Err(error) if error.code() == tonic::Code::OutOfRange => {
                    let message = format!("{}: send smaller messages", error.message());
                    return Input::Refused(Error::invalid("record_too_large", message));
                }
                Err(_) => return Input::Gone("connection lost"),
            }
        }
    }

    fn has_room(&self) -> bool {
        self.waiting.is_empty() && self.answers.capacity() > 0
    }

    fn is_clear(&self) -> bool {
        self.waiting.is_empty()
    }

    fn tell(&mut self, frame: &GatewayFrame) {
        match frame {
            GatewayFrame::Opened(opened) => {
                self.opened = true;
                let stream_id = Some(opened.stream.as_str().to_owned());
                self.answer(Answer::CreateStreamResponse(zerobus::CreateIngestStreamResponse { stream_id }));
            }
            GatewayFrame::Ack(ack) => {
                if let Some(durable) = ack.durable {
                    self.ack(durable + 1);
                }
            }
            GatewayFrame::Rejected(rejected) => self.refuse(rejected),
            GatewayFrame::Move(moving) => {
                let seconds = Some(i64::try_from(moving.after_ms / 1000).unwrap_or(i64::MAX));
                let nanos = Some((moving.after_ms % 1000) as i32 * 1_000_000);
                let duration = Some(zerobus::Duration { seconds, nanos });
                self.answer(Answer::CloseStreamSignal(zerobus::CloseStreamSignal { duration }));
            }
            // How the session ended is told by `close`.
            GatewayFrame::Error(_) => {}
        }
    }
}

fn open_terms(
    create: zerobus::CreateIngestStreamRequest,
    in_header: Option<TableName>,
) -> Result<OpenTerms, Error> {
    let named = create.table_name.as_deref().map(str::parse::<TableName>).transpose()?;
    let table = match (named, in_header) {
        (Some(named), Some(header)) if named != header => {
            let message =
                format!("`create_stream` names table {named}, the header {header}: they must agree");
            return Err(Error::invalid("table_mismatch", message));
        }
        (Some(table), _) | (None, Some(table)) => table,
        (None, None) => {
            return Err(Error::invalid("invalid_table_name", "`create_stream` names no table"));
        }
    };
    match RecordType::try_from(create.record_type.unwrap_or(RecordType::Proto as i32)) {
        Ok(RecordType::Json) => {}
        Ok(other) => {
            let message = format!("record type {}: this gateway takes JSON", other.as_str_name());
            return Err(Error::invalid("record_type", message));
        }
        Err(_) => {
            return Err(Error::invalid("record_type", "an unknown record type: this gateway takes JSON"));
        }
    }
    Ok(OpenTerms {
        table,
        name: None,
        stream: Some(StreamId::ephemeral()),
        session: Some(SessionId(1)),
        resume_at: None,
        encoding: Encoding::Json,
        unknown: UnknownFields::Refuse,
        schema: Bytes::new(),
        schema_id: None,
        rate_bytes_per_s: None,
        last_pod: None,
    })
}

fn wrong_kind() -> Error {
    Error::invalid("record_type", "a record of another type than `create_stream` said")
}

fn json_record(record: Option<Record>) -> Result<(Bytes, u32), Error> {
    match record {
        Some(Record::JsonRecord(text)) => Ok((json_text::record(text), 1)),
        _ => Err(wrong_kind()),
    }
}

fn json_batch(batch: Option<Batch>) -> Result<(Bytes, u32), Error> {
    let Some(Batch::JsonBatch(batch)) = batch else { return Err(wrong_kind()) };
    let count = u32::try_from(batch.records.len());
    let count = count.map_err(|_| Error::invalid("too_many_records", "a batch of more than 2^32 records"))?;
    let bytes: usize = batch.records.iter().map(|record| record.len() + 1).sum();
    let mut payload = BytesMut::with_capacity(bytes);
    for record in batch.records {
        payload.extend_from_slice(&json_text::record(record));
        payload.extend_from_slice(b"\n");
    }
    Ok((payload.freeze(), count))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn requests(records: &[u32]) -> Requests {
        let mut requests = Requests::default();
        for (offset, records) in records.iter().enumerate() {
            requests.push(Some(offset as i64), *records).expect("in order");
        }
        requests
    }

    #[test]
    fn a_request_is_acked_when_all_its_records_are_durable_and_only_once() {
        let mut requests = requests(&[1, 3, 0, 2]);
        assert_eq!(requests.durable(1), Some(0));
        assert_eq!(requests.durable(3), None);
        assert_eq!(requests.durable(4), Some(2));
        assert_eq!(requests.durable(4), None);
        assert_eq!(requests.durable(6), Some(3));
    }

    #[test]
    fn neither_the_request_of_a_refused_record_nor_a_later_one_is_acked() {
        let mut requests = requests(&[1, 3, 2]);
        requests.refused_at = Some(2);
        assert_eq!(requests.request_of(2), Some((1, 1)));
        assert_eq!(requests.durable(6), Some(0));
        assert_eq!(requests.durable(6), None);
    }

    #[test]
    fn offsets_are_every_number_once() {
        let mut requests = requests(&[1, 1]);
        assert_eq!(requests.push(Some(1), 1).expect_err("again").code, "offset_gap");
        assert_eq!(requests.push(Some(3), 1).expect_err("gap").code, "offset_gap");
        assert_eq!(requests.push(None, 1).expect_err("none").code, "missing_offset");
        requests.push(Some(2), 1).expect("the next one");
    }
}
