//! Zerobus gRPC: what Databricks's clients speak, so that they work with nothing changed but the endpoint.
//!
//! Its offsets count requests, ours count records: each request is remembered until all its records are durable. Its
//! clients kill a stream whose acks go back or too far, take no answer for a single bad record, and reconnect without a
//! pause when an open stream fails for a reason that may pass: so such a failure is told late.
//!
//! *Owns*: the messages of `EphemeralStream`.
//! *Does not own*: what a stream means (`session`), the HTTP/2 connection (`app`), Arrow (`flight`).

pub(crate) mod flight;
mod calls;

use std::sync::Arc;

use bytes::{BufMut, Bytes, BytesMut};
use sluice_shared::error::Error;
use sluice_shared::frame::{Encoding, GatewayFrame, UnknownFields};
use sluice_shared::ids::{SessionId, StreamId, TableName};
use sluice_shared::proto::zerobus::ephemeral_stream_request::Payload as Ask;
use sluice_shared::proto::zerobus::ephemeral_stream_response::Payload as Answer;
use sluice_shared::proto::zerobus::ingest_record_batch_request::Batch;
use sluice_shared::proto::zerobus::ingest_record_request::Record;
use sluice_shared::proto::zerobus::{self, EphemeralStreamRequest, EphemeralStreamResponse, RecordType};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use crate::app::App;
use crate::edge::json_text;
use crate::session::{self, Edge, Ended, Input, Records};
use crate::upstream::OpenTerms;
use calls::{Call, status, table_header};

/// Where the service is mounted.
pub(crate) const PATH: &str = "/databricks.zerobus.Zerobus/{method}";
/// Answers that may wait for a client to read them.
const ANSWERS_WAITING_MAX: usize = 8;

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
        let (_, extensions, requests) = request.into_parts();
        let call = Call::new(requests, answers, "send smaller messages").carried(&extensions, &self.app);
        let edge = ZerobusEdge { call, encoding: Encoding::Json };
        self.app.scope.spawn("zerobus stream", serve(edge, table, Arc::clone(&self.app)));
        Ok(Response::new(ReceiverStream::new(receiver)))
    }
}

async fn serve(mut edge: ZerobusEdge, table: Option<TableName>, app: Arc<App>) {
    let ended = match edge.terms(table, &app).await {
        Ok(terms) => Box::pin(session::run(&mut edge, &app, terms)).await,
        Err(ended) => ended,
    };
    edge.call.close(ended, &app).await;
}

/// One call.
struct ZerobusEdge {
    call: Call<EphemeralStreamRequest, EphemeralStreamResponse>,
    encoding: Encoding,
}

impl ZerobusEdge {
    /// What the stream is to be opened with: the first request says it.
    async fn terms(&mut self, table: Option<TableName>, app: &App) -> Result<OpenTerms, Ended> {
        let Some(EphemeralStreamRequest { payload: Some(Ask::CreateStream(create)) }) =
            self.call.first(app).await?
        else {
            let message = "the first request has to be `create_stream`, within the handshake timeout";
            return Err(Ended::Failed(Error::invalid("expected_create_stream", message)));
        };
        let terms = open_terms(create, table).map_err(Ended::Failed)?;
        self.encoding = terms.encoding;
        Ok(terms)
    }

    /// Takes a request. None where it brings no records.
    fn take(&mut self, request: EphemeralStreamRequest) -> Result<Option<Records>, Error> {
        let (offset, records) = match request.payload {
            Some(Ask::IngestRecord(request)) => (request.offset_id, one(request.record)),
            Some(Ask::IngestRecordBatch(request)) => (request.offset_id, many(request.batch)),
            Some(Ask::CreateStream(_)) => {
                let message = "second `create_stream`: a call carries one stream";
                return Err(Error::invalid("already_open", message));
            }
            None => return Err(Error::invalid("unknown_request", "a request of a kind that is not known")),
        };
        let (_, records) =
            records.filter(|(encoding, _)| *encoding == self.encoding).ok_or_else(wrong_kind)?;
        let (payload, count) = payload(self.encoding, &records)?;
        self.call.sent.push(offset, count)?;
        if count == 0 {
            self.ack(self.call.sent.durable_next);
            return Ok(None);
        }
        Ok(Some(Records { first_offset: None, count, payload }))
    }

    fn ack(&mut self, durable_next: u64) {
        if let Some(offset) = self.call.sent.durable(durable_next) {
            let ack = zerobus::IngestRecordResponse { durability_ack_up_to_offset: Some(offset) };
            self.answer(Answer::IngestRecordResponse(ack));
        }
    }

    fn answer(&mut self, answer: Answer) {
        self.call.answers.tell(EphemeralStreamResponse { payload: Some(answer) });
    }
}

impl Edge for ZerobusEdge {
    async fn next(&mut self, read: bool) -> Input {
        loop {
            let request = match self.call.next(read).await {
                Ok(request) => request,
                Err(input) => return input,
            };
            match self.take(request) {
                Ok(Some(records)) => return Input::Records(records),
                Ok(None) => {}
                Err(error) => return Input::Refused(error),
            }
        }
    }

    fn has_room(&self) -> bool {
        self.call.answers.has_room()
    }

    fn is_clear(&self) -> bool {
        self.call.answers.is_clear()
    }

    fn tell(&mut self, frame: &GatewayFrame) {
        match frame {
            GatewayFrame::Opened(opened) => {
                self.call.opened = true;
                let stream_id = Some(opened.stream.as_str().to_owned());
                self.answer(Answer::CreateStreamResponse(zerobus::CreateIngestStreamResponse { stream_id }));
            }
            GatewayFrame::Ack(ack) => {
                if let Some(durable) = ack.durable {
                    self.ack(durable + 1);
                }
            }
            GatewayFrame::Rejected(rejected) => self.call.refuse(rejected),
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
    let (encoding, schema) = encoding(create.record_type, create.descriptor_proto, create.avro_schema_json)?;
    Ok(OpenTerms {
        table,
        name: None,
        stream: Some(StreamId::ephemeral()),
        session: Some(SessionId(1)),
        resume_at: None,
        stream_end: 0,
        encoding,
        unknown: UnknownFields::Refuse,
        schema,
        schema_id: None,
        rate_bytes_per_s: None,
        last_pod: None,
    })
}

/// How records are encoded, and the schema that says so.
fn encoding(
    record_type: Option<i32>,
    descriptor: Option<Bytes>,
    avro_schema: Option<String>,
) -> Result<(Encoding, Bytes), Error> {
    let invalid = |message: &str| Err(Error::invalid("record_type", message));
    match RecordType::try_from(record_type.unwrap_or(RecordType::Proto as i32)) {
        Ok(RecordType::Json) => Ok((Encoding::Json, Bytes::new())),
        Ok(RecordType::Proto) => match descriptor.filter(|descriptor| !descriptor.is_empty()) {
            Some(descriptor) => Ok((Encoding::Protobuf, descriptor)),
            None => invalid("record type PROTO: `create_stream` lacks `descriptor_proto`"),
        },
        Ok(RecordType::Avro) => match avro_schema.filter(|schema| !schema.is_empty()) {
            Some(schema) => Ok((Encoding::Avro, schema.into())),
            None => invalid("record type AVRO: `create_stream` lacks `avro_schema_json`"),
        },
        Ok(RecordType::Unspecified) | Err(_) => invalid("`record_type` has to be PROTO, JSON or AVRO"),
    }
}

fn wrong_kind() -> Error {
    Error::invalid("record_type", "a record of another type than `create_stream` said")
}

/// The records of a request: their payload as pods take it, and how many.
fn payload(encoding: Encoding, records: &[Bytes]) -> Result<(Bytes, u32), Error> {
    let count = u32::try_from(records.len());
    let count = count.map_err(|_| Error::invalid("too_many_records", "a batch of more than 2^32 records"))?;
    if let (Encoding::Json, [one]) = (encoding, records) {
        return Ok((json_text::record(one.clone()), 1));
    }
    let bytes: usize = records.iter().map(|record| record.len() + VARINT_BYTES_MAX).sum();
    let mut payload = BytesMut::with_capacity(bytes);
    for record in records {
        if encoding == Encoding::Json {
            payload.extend_from_slice(&json_text::record(record.clone()));
            payload.extend_from_slice(b"\n");
        } else {
            put_varint(&mut payload, record.len());
            payload.extend_from_slice(record);
        }
    }
    Ok((payload.freeze(), count))
}

const VARINT_BYTES_MAX: usize = 10;

/// A length as protobuf writes it: seven bits a byte, the lowest first.
fn put_varint(to: &mut BytesMut, mut value: usize) {
    while value >= 0x80 {
        to.put_u8(value as u8 | 0x80);
        value >>= 7;
    }
    to.put_u8(value as u8);
}

fn one(record: Option<Record>) -> Option<(Encoding, Vec<Bytes>)> {
    match record? {
        Record::JsonRecord(text) => Some((Encoding::Json, vec![text])),
        Record::ProtoEncodedRecord(message) => Some((Encoding::Protobuf, vec![message])),
        Record::AvroEncodedRecord(datum) => Some((Encoding::Avro, vec![datum])),
    }
}

fn many(batch: Option<Batch>) -> Option<(Encoding, Vec<Bytes>)> {
    match batch? {
        Batch::JsonBatch(batch) => Some((Encoding::Json, batch.records)),
        Batch::ProtoEncodedBatch(batch) => Some((Encoding::Protobuf, batch.records)),
        Batch::AvroBatch(batch) => Some((Encoding::Avro, batch.records)),
    }
}
