//! Targets of the two gRPC calls: Zerobus's `EphemeralStream` and Arrow Flight's `DoPut`.
//!
//! *Owns*: what these calls say.
//! *Does not own*: when what is sent.

use anyhow::{Context, bail, ensure};
use bytes::Bytes;
use serde::Deserialize;
use sluice_shared::frame::Encoding;
use sluice_shared::proto::flight::flight_service_client::FlightServiceClient;
use sluice_shared::proto::flight::{FlightData, PutResult};
use sluice_shared::proto::zerobus::ephemeral_stream_request::Payload as Say;
use sluice_shared::proto::zerobus::ephemeral_stream_response::Payload as Answer;
use sluice_shared::proto::zerobus::ingest_record_batch_request::Batch;
use sluice_shared::proto::zerobus::ingest_record_request::Record;
use sluice_shared::proto::zerobus::zerobus_client::ZerobusClient;
use sluice_shared::proto::zerobus::{self, EphemeralStreamRequest, EphemeralStreamResponse, RecordType};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Streaming};

use super::{Answers, Ask, Opened, Outbound, Room, Target, Told, after};
use crate::load::messages::{Body, Message};

/// Requests between the producer and its call.
const WAITING_MAX: usize = 64;
/// These calls tell no window: as one of `sluice.v1` has it.
const ROOM: Room = Room { bytes: 4 << 20, messages: usize::MAX };
const TABLE_HEADER: &str = "x-databricks-zerobus-table-name";

async fn connect(ask: &Ask<'_>) -> anyhow::Result<Channel> {
    let endpoint = Endpoint::from_shared(format!("http://{}", ask.address))?.tcp_nodelay(true);
    endpoint.connect().await.context("cannot connect")
}

/// A call's requests, and the call with the header that names the table.
fn call<Q>(ask: &Ask<'_>) -> anyhow::Result<(mpsc::Sender<Q>, Request<ReceiverStream<Q>>)> {
    let (requests, receiver) = mpsc::channel(WAITING_MAX);
    let mut call = Request::new(ReceiverStream::new(receiver));
    call.metadata_mut().insert(TABLE_HEADER, ask.table.parse()?);
    Ok((requests, call))
}

/// Requests of an open call.
pub(crate) struct CallOut<Q> {
    /// None once all is said.
    requests: Option<mpsc::Sender<Q>>,
    rows: u64,
    make: fn(i64, &Message, Encoding) -> anyhow::Result<Q>,
    encoding: Encoding,
}

impl<Q: Send> Outbound for CallOut<Q> {
    async fn send(&mut self, first_offset: u64, message: &Message) -> anyhow::Result<()> {
        let request = (self.make)(i64::try_from(first_offset / self.rows)?, message, self.encoding)?;
        let requests = self.requests.as_ref().context("all was said")?;
        requests.send(request).await.ok().context("the call has ended")
    }

    async fn flush(&mut self) -> anyhow::Result<()> {
        Ok(())
    }

    async fn finish(&mut self) -> anyhow::Result<()> {
        self.requests = None;
        Ok(())
    }
}

/// An ephemeral stream on a connection of its own.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Zerobus;

impl Target for Zerobus {
    type Out = CallOut<EphemeralStreamRequest>;
    type Answers = ZerobusAnswers;

    async fn open(&self, ask: &Ask<'_>) -> anyhow::Result<Opened<Self>> {
        let mut client = ZerobusClient::new(connect(ask).await?);
        let (requests, request) = call(ask)?;
        let kind = match ask.encoding {
            Encoding::Json => RecordType::Json,
            Encoding::Protobuf => RecordType::Proto,
            other => bail!("no {other} is sent over Zerobus here"),
        };
        let create = zerobus::CreateIngestStreamRequest {
            table_name: Some(ask.table.to_owned()),
            descriptor_proto: (kind == RecordType::Proto).then(|| ask.schema.clone()),
            record_type: Some(kind.into()),
            avro_schema_json: None,
        };
        requests.send(EphemeralStreamRequest { payload: Some(Say::CreateStream(create)) }).await?;
        let mut answers = client.ephemeral_stream(request).await?.into_inner();
        let stream = match answers.message().await?.and_then(|answer| answer.payload) {
            Some(Answer::CreateStreamResponse(_)) => None,
            other => bail!("the answer to create_stream is {other:?}"),
        };
        let (rows, encoding) = (u64::from(ask.rows), ask.encoding);
        let out = CallOut { requests: Some(requests), rows, make: zerobus_request, encoding };
        let answers = ZerobusAnswers { answers, rows };
        Ok(Opened { out, answers, next_offset: 0, stream, room: ROOM })
    }
}

fn zerobus_request(
    offset: i64,
    message: &Message,
    encoding: Encoding,
) -> anyhow::Result<EphemeralStreamRequest> {
    let Body::Records(records) = &message.body else { bail!("a request has its records one by one") };
    let offset_id = Some(offset);
    let payload = match (encoding, &**records) {
        (Encoding::Json, [one]) => {
            let record = Some(Record::JsonRecord(one.clone()));
            Say::IngestRecord(zerobus::IngestRecordRequest { offset_id, record })
        }
        (Encoding::Json, many) => {
            let batch = Some(Batch::JsonBatch(zerobus::JsonRecordBatch { records: many.to_vec() }));
            Say::IngestRecordBatch(zerobus::IngestRecordBatchRequest { offset_id, batch })
        }
        (_, many) => {
            let batch =
                Some(Batch::ProtoEncodedBatch(zerobus::ProtoEncodedRecordBatch { records: many.to_vec() }));
            Say::IngestRecordBatch(zerobus::IngestRecordBatchRequest { offset_id, batch })
        }
    };
    Ok(EphemeralStreamRequest { payload: Some(payload) })
}

pub(crate) struct ZerobusAnswers {
    answers: Streaming<EphemeralStreamResponse>,
    rows: u64,
}

impl Answers for ZerobusAnswers {
    /// Acks count requests.
    async fn next(&mut self) -> anyhow::Result<Option<Told>> {
        match self.answers.message().await?.map(|answer| answer.payload) {
            None => Ok(None),
            Some(Some(Answer::IngestRecordResponse(ack))) => {
                let offset = ack.durability_ack_up_to_offset.context("an ack without offset")?;
                let requests = after(Some(u64::try_from(offset)?))?;
                Ok(requests.map(|requests| Told::durable(requests * self.rows)))
            }
            Some(Some(Answer::CloseStreamSignal(_))) => Ok(Some(Told { moves: true, ..Told::default() })),
            Some(other) => bail!("unexpected answer {other:?}"),
        }
    }
}

/// A put, of batches of the load's schema, on a connection of its own.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Flight;

impl Target for Flight {
    type Out = CallOut<FlightData>;
    type Answers = FlightAnswers;

    async fn open(&self, ask: &Ask<'_>) -> anyhow::Result<Opened<Self>> {
        let mut client = FlightServiceClient::new(connect(ask).await?);
        let (requests, request) = call(ask)?;
        let schema = FlightData { data_header: ask.schema.clone(), ..FlightData::default() };
        requests.send(schema).await?;
        let mut answers = FlightAnswers { answers: client.do_put(request).await?.into_inner() };
        ensure!(answers.next().await? == Some(Told::durable(0)), "ended before the stream was opened");
        let (rows, encoding) = (u64::from(ask.rows), ask.encoding);
        let out = CallOut { requests: Some(requests), rows, make: flight_data, encoding };
        Ok(Opened { out, answers, next_offset: 0, stream: None, room: ROOM })
    }
}

fn flight_data(offset: i64, message: &Message, _: Encoding) -> anyhow::Result<FlightData> {
    let Body::Batch { header, body } = &message.body else { bail!("a put is of batches") };
    Ok(FlightData {
        data_header: header.clone(),
        app_metadata: Bytes::from(format!("{{\"offset_id\":{offset}}}")),
        data_body: body.clone(),
    })
}

pub(crate) struct FlightAnswers {
    answers: Streaming<PutResult>,
}

/// What comes with an answer.
#[derive(Deserialize)]
struct Acked {
    ack_up_to_records: u64,
}

impl Answers for FlightAnswers {
    async fn next(&mut self) -> anyhow::Result<Option<Told>> {
        let Some(answer) = self.answers.message().await? else { return Ok(None) };
        let acked: Acked = serde_json::from_slice(&answer.app_metadata)?;
        Ok(Some(Told::durable(acked.ack_up_to_records)))
    }
}
