//! Bare receivers of the two gRPC calls, Zerobus's `EphemeralStream` and Arrow Flight's `DoPut`.
//!
//! *Owns*: the server's set-up, the payload that pods take of a request.
//! *Does not own*: the link to the pod (`bare`).

use anyhow::{Context, bail};
use bytes::{BufMut, Bytes, BytesMut};
use prost::encoding::{encode_varint, encoded_len_varint};
use sluice_shared::proto::flight::flight_service_server::{FlightService, FlightServiceServer};
use sluice_shared::proto::flight::{FlightData, PutResult};
use sluice_shared::proto::zerobus::ephemeral_stream_request::Payload as Ask;
use sluice_shared::proto::zerobus::ephemeral_stream_response::Payload as Answer;
use sluice_shared::proto::zerobus::ingest_record_batch_request::Batch;
use sluice_shared::proto::zerobus::ingest_record_request::Record;
use sluice_shared::proto::zerobus::zerobus_server::{Zerobus, ZerobusServer};
use sluice_shared::proto::zerobus::{
    self, EphemeralStreamRequest, EphemeralStreamResponse, PersistentStreamRequest, PersistentStreamResponse,
    RetireStreamRequest, RetireStreamResponse,
};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status, Streaming};

use super::{Forward, Payload, Receiver, carry};
use crate::edges::{CALL_WINDOW_BYTES, CONNECTION_WINDOW_BYTES, MESSAGE_BYTES_MAX};

/// Answers that may wait for a client to read them.
const ANSWERS_WAITING_MAX: usize = 8;
/// A message of this size comes in one piece, if its sender likes.
const HTTP_FRAME_BYTES: u32 = 1 << 20;
/// Before each message of an Arrow IPC stream, with its length.
const CONTINUATION: [u8; 4] = [0xff; 4];

/// Serves both until it is killed.
pub(super) async fn serve(forward: Forward, listener: TcpListener) -> anyhow::Result<()> {
    let service = Service { forward };
    let server = tonic::transport::Server::builder()
        .initial_stream_window_size(CALL_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_frame_size(HTTP_FRAME_BYTES)
        .add_service(ZerobusServer::new(service.clone()).max_decoding_message_size(MESSAGE_BYTES_MAX))
        .add_service(FlightServiceServer::new(service).max_decoding_message_size(MESSAGE_BYTES_MAX));
    let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
    Ok(server.serve_with_incoming(incoming).await?)
}

#[derive(Clone)]
struct Service {
    forward: Forward,
}

type Answers<A> = mpsc::Sender<Result<A, Status>>;

#[tonic::async_trait]
impl Zerobus for Service {
    type EphemeralStreamStream = ReceiverStream<Result<EphemeralStreamResponse, Status>>;
    type PersistentStreamStream = ReceiverStream<Result<PersistentStreamResponse, Status>>;

    async fn ephemeral_stream(
        &self,
        request: Request<Streaming<EphemeralStreamRequest>>,
    ) -> Result<Response<Self::EphemeralStreamStream>, Status> {
        let (answers, receiver) = mpsc::channel(ANSWERS_WAITING_MAX);
        let (requests, forward) = (request.into_inner(), self.forward.clone());
        self.forward.spawn(async move { zerobus_stream(requests, answers, &forward).await });
        Ok(Response::new(ReceiverStream::new(receiver)))
    }

    async fn persistent_stream(
        &self,
        _: Request<Streaming<PersistentStreamRequest>>,
    ) -> Result<Response<Self::PersistentStreamStream>, Status> {
        Err(Status::unimplemented("no edge is measured with it"))
    }

    async fn retire_stream(
        &self,
        _: Request<RetireStreamRequest>,
    ) -> Result<Response<RetireStreamResponse>, Status> {
        Err(Status::unimplemented("no edge is measured with it"))
    }
}

async fn zerobus_stream(
    mut requests: Streaming<EphemeralStreamRequest>,
    answers: Answers<EphemeralStreamResponse>,
    forward: &Forward,
) -> anyhow::Result<()> {
    match requests.message().await?.and_then(|request| request.payload) {
        Some(Ask::CreateStream(_)) => {}
        other => bail!("expected create_stream first, got {other:?}"),
    }
    let link = forward.open().await?;
    let created = zerobus::CreateIngestStreamResponse { stream_id: Some("~bare".to_owned()) };
    let created = EphemeralStreamResponse { payload: Some(Answer::CreateStreamResponse(created)) };
    answers.send(Ok(created)).await?;
    carry(&mut ZerobusReceiver { requests, answers, rows: u64::from(forward.rows) }, link).await
}

struct ZerobusReceiver {
    requests: Streaming<EphemeralStreamRequest>,
    answers: Answers<EphemeralStreamResponse>,
    rows: u64,
}

impl Receiver for ZerobusReceiver {
    async fn next(&mut self) -> anyhow::Result<Option<Payload>> {
        let Some(request) = self.requests.message().await? else { return Ok(None) };
        let payload = match request.payload {
            Some(Ask::IngestRecord(request)) => match request.record {
                Some(Record::JsonRecord(record)) => Payload { count: 1, bytes: record, is_line: true },
                other => bail!("unexpected record {other:?}"),
            },
            Some(Ask::IngestRecordBatch(request)) => joined(request.batch.context("no batch")?)?,
            other => bail!("unexpected request {other:?}"),
        };
        Ok(Some(payload))
    }

    async fn ack(&mut self, durable_next: u64) -> anyhow::Result<()> {
        let Some(last) = (durable_next / self.rows).checked_sub(1) else { return Ok(()) };
        let durability_ack_up_to_offset = Some(i64::try_from(last)?);
        let ack = zerobus::IngestRecordResponse { durability_ack_up_to_offset };
        let ack = EphemeralStreamResponse { payload: Some(Answer::IngestRecordResponse(ack)) };
        Ok(self.answers.send(Ok(ack)).await?)
    }
}

/// A batch as pods take it: in one piece, which cannot be had without a copy.
fn joined(batch: Batch) -> anyhow::Result<Payload> {
    let (records, is_json) = match batch {
        Batch::JsonBatch(batch) => (batch.records, true),
        Batch::ProtoEncodedBatch(batch) => (batch.records, false),
        Batch::AvroBatch(_) => bail!("no edge sends Avro"),
    };
    let head = |record: &Bytes| if is_json { 1 } else { encoded_len_varint(record.len() as u64) };
    let bytes = records.iter().map(|record| record.len() + head(record)).sum();
    let mut payload = BytesMut::with_capacity(bytes);
    for record in &records {
        if is_json {
            payload.put_slice(record);
            payload.put_u8(b'\n');
        } else {
            encode_varint(record.len() as u64, &mut payload);
            payload.put_slice(record);
        }
    }
    Ok(Payload { count: u32::try_from(records.len())?, bytes: payload.freeze(), is_line: false })
}

#[tonic::async_trait]
impl FlightService for Service {
    type DoPutStream = ReceiverStream<Result<PutResult, Status>>;

    async fn do_put(
        &self,
        request: Request<Streaming<FlightData>>,
    ) -> Result<Response<Self::DoPutStream>, Status> {
        let (answers, receiver) = mpsc::channel(ANSWERS_WAITING_MAX);
        let (requests, forward) = (request.into_inner(), self.forward.clone());
        self.forward.spawn(async move { flight_stream(requests, answers, &forward).await });
        Ok(Response::new(ReceiverStream::new(receiver)))
    }
}

async fn flight_stream(
    mut requests: Streaming<FlightData>,
    answers: Answers<PutResult>,
    forward: &Forward,
) -> anyhow::Result<()> {
    let first = requests.message().await?.context("expected the schema first")?;
    let mut schema = BytesMut::new();
    put_message(&mut schema, &first)?;
    let link = forward.open().await?;
    let rows = u64::from(forward.rows);
    let mut receiver = FlightReceiver { requests, answers, schema: schema.freeze(), rows };
    receiver.ack(0).await?;
    carry(&mut receiver, link).await
}

struct FlightReceiver {
    requests: Streaming<FlightData>,
    answers: Answers<PutResult>,
    /// As it begins each frame.
    schema: Bytes,
    rows: u64,
}

impl Receiver for FlightReceiver {
    async fn next(&mut self) -> anyhow::Result<Option<Payload>> {
        let Some(message) = self.requests.message().await? else { return Ok(None) };
        let bytes = self.schema.len() + message.data_header.len() + message.data_body.len() + 16;
        let mut payload = BytesMut::with_capacity(bytes);
        payload.put_slice(&self.schema);
        put_message(&mut payload, &message)?;
        Ok(Some(Payload { count: u32::try_from(self.rows)?, bytes: payload.freeze(), is_line: false }))
    }

    async fn ack(&mut self, durable_next: u64) -> anyhow::Result<()> {
        let offset = i64::try_from(durable_next / self.rows)? - 1;
        let acked = format!("{{\"ack_up_to_offset\":{offset},\"ack_up_to_records\":{durable_next}}}");
        Ok(self.answers.send(Ok(PutResult { app_metadata: acked.into() })).await?)
    }
}

/// A message as it stands in an Arrow IPC stream. Senders pad headers to eight bytes.
fn put_message(to: &mut BytesMut, message: &FlightData) -> anyhow::Result<()> {
    to.put_slice(&CONTINUATION);
    to.put_u32_le(u32::try_from(message.data_header.len())?);
    to.put_slice(&message.data_header);
    to.put_slice(&message.data_body);
    Ok(())
}
