//! Zerobus's Arrow mode: Arrow Flight's `DoPut` with JSON metadata.
//!
//! The first message is the schema; each that follows is one record batch, whose rows are records. Acks count rows, and
//! may end inside a batch.
//!
//! *Owns*: Flight's messages, their form as Arrow IPC streams, the JSON beside them.
//! *Does not own*: what is in a batch (the pod), what a stream means (`session`).

use std::sync::Arc;

use arrow::ipc::{MessageHeader, root_as_message};
use bytes::{BufMut, Bytes, BytesMut};
use serde::Deserialize;
use serde_json::json;
use sluice_shared::error::Error;
use sluice_shared::frame::{Encoding, GatewayFrame};
use sluice_shared::ids::TableName;
use sluice_shared::proto::flight::flight_service_server::{FlightService, FlightServiceServer};
use sluice_shared::proto::flight::{FlightData, PutResult};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use super::calls::{Call, admit, status};
use super::{ANSWERS_WAITING_MAX, MESSAGE_OVERHEAD_BYTES};
use crate::app::App;
use crate::auth::Credential;
use crate::session::{self, Edge, Ended, Input, Records};
use crate::upstream::OpenTerms;

/// Where the service is mounted.
pub(crate) const PATH: &str = "/arrow.flight.protocol.FlightService/{method}";
/// Before each message of an Arrow IPC stream, with its length.
const CONTINUATION: [u8; 4] = [0xff; 4];
const IPC_ALIGN: usize = 8;

/// The service.
#[derive(Clone)]
pub(crate) struct Flight {
    app: Arc<App>,
}

impl Flight {
    /// The service as it is mounted.
    pub(crate) fn server(app: Arc<App>) -> FlightServiceServer<Self> {
        let message_bytes_max = app.config.frame_bytes_max.as_usize() + MESSAGE_OVERHEAD_BYTES;
        FlightServiceServer::new(Self { app }).max_decoding_message_size(message_bytes_max)
    }
}

#[tonic::async_trait]
impl FlightService for Flight {
    type DoPutStream = ReceiverStream<Result<PutResult, Status>>;

    async fn do_put(
        &self,
        request: Request<Streaming<FlightData>>,
    ) -> Result<Response<Self::DoPutStream>, Status> {
        let (table, credential) = admit(request.metadata(), &self.app)?;
        let table = table.ok_or_else(|| {
            let message = "no header x-databricks-zerobus-table-name: in Arrow mode it names the table";
            status(&Error::invalid("invalid_table_name", message))
        })?;
        let (answers, receiver) = mpsc::channel(ANSWERS_WAITING_MAX);
        let (_, extensions, requests) = request.into_parts();
        let edge = FlightEdge {
            call: Call::new(requests, answers, "send smaller batches").carried(&extensions, &self.app),
            credential,
            schema: Bytes::new(),
            last_offset: -1,
        };
        self.app.scope.spawn("flight stream", serve(edge, table, Arc::clone(&self.app)));
        Ok(Response::new(ReceiverStream::new(receiver)))
    }
}

async fn serve(mut edge: FlightEdge, table: TableName, app: Arc<App>) {
    let ended = match edge.terms(table, &app).await {
        Ok(terms) => Box::pin(session::run(&mut edge, &app, terms)).await,
        Err(ended) => ended,
    };
    edge.call.close(ended, &app).await;
}

/// One call.
struct FlightEdge {
    call: Call<FlightData, PutResult>,
    credential: Credential,
    /// The schema message as it begins each frame.
    schema: Bytes,
    /// Of the last message that is wholly acked.
    last_offset: i64,
}

/// What comes with each batch.
#[derive(Deserialize)]
struct Metadata {
    offset_id: i64,
}

impl FlightEdge {
    /// What the stream is to be opened with: the headers and the schema say it.
    async fn terms(&mut self, table: TableName, app: &App) -> Result<OpenTerms, Ended> {
        let Some(first) = self.call.first(app).await? else {
            return Err(Ended::Failed(expected_schema("nothing within the handshake timeout")));
        };
        match header_of(&first.data_header).map_err(Ended::Failed)? {
            (MessageHeader::Schema, _) => {}
            (other, _) => return Err(Ended::Failed(expected_schema(&format!("{other:?}")))),
        }
        let mut schema = BytesMut::new();
        put_message(&mut schema, &first.data_header, &[]);
        self.schema = schema.freeze();
        let terms = OpenTerms::ephemeral(table, Encoding::Arrow, self.credential.clone());
        Ok(OpenTerms { schema: self.schema.clone(), whole_requests: true, ..terms })
    }

    /// Takes a message. None where it brings no rows.
    fn take(&mut self, message: &FlightData) -> Result<Option<Records>, Error> {
        let metadata: Metadata = serde_json::from_slice(&message.app_metadata).map_err(|error| {
            let what = format!("app_metadata is not {{\"offset_id\":N}}: {error}");
            Error::invalid("missing_offset", what)
        })?;
        let rows = match header_of(&message.data_header)? {
            (MessageHeader::RecordBatch, rows) => rows,
            (other, _) => {
                let what = format!("a message of kind {other:?}: expected record batches of plain columns");
                return Err(Error::invalid("invalid_arrow", what));
            }
        };
        self.call.sent.push(Some(metadata.offset_id), rows, false)?;
        if rows == 0 {
            self.ack(self.call.sent.durable_next);
            return Ok(None);
        }
        let bytes = self.schema.len() + message.data_header.len() + message.data_body.len() + 2 * IPC_ALIGN;
        let mut payload = BytesMut::with_capacity(bytes);
        payload.put_slice(&self.schema);
        put_message(&mut payload, &message.data_header, &message.data_body);
        Ok(Some(Records { first_offset: None, count: rows, payload: payload.freeze() }))
    }

    fn ack(&mut self, durable_next: u64) {
        let before = self.call.sent.durable_next;
        let offset = self.call.sent.durable(durable_next);
        self.last_offset = offset.unwrap_or(self.last_offset);
        if offset.is_some() || self.call.sent.durable_next > before {
            self.tell_acked(None);
        }
    }

    fn tell_acked(&mut self, close_after_ms: Option<u64>) {
        let (offset, records) = (self.last_offset, self.call.sent.durable_next);
        let mut metadata = json!({ "ack_up_to_offset": offset, "ack_up_to_records": records });
        if let Some(ms) = close_after_ms {
            metadata["close_stream_duration_ms"] = ms.into();
        }
        self.call.answers.tell(PutResult { app_metadata: metadata.to_string().into() });
    }
}

impl Edge for FlightEdge {
    async fn next(&mut self, read: bool) -> Input {
        loop {
            let message = match self.call.next(read).await {
                Ok(message) => message,
                Err(input) => return input,
            };
            match self.take(&message) {
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

    fn moves_when_expired(&self) -> bool {
        true
    }

    fn tell(&mut self, frame: &GatewayFrame) {
        match frame {
            // Ready: clients wait for it before they send a batch.
            GatewayFrame::Opened(_) => {
                self.call.opened = true;
                self.tell_acked(None);
            }
            GatewayFrame::Ack(ack) => {
                if let Some(durable) = ack.durable {
                    self.ack(durable + 1);
                }
            }
            GatewayFrame::Move(moving) => self.tell_acked(Some(moving.after_ms)),
            // A table that keeps refused records keeps this one. How the session ended is told by `close`.
            GatewayFrame::Rejected(_) | GatewayFrame::Error(_) => {}
        }
    }
}

fn expected_schema(got: &str) -> Error {
    Error::invalid("expected_schema", format!("the first message has to be the schema, got {got}"))
}

/// The kind of a message, and its rows.
fn header_of(header: &[u8]) -> Result<(MessageHeader, u32), Error> {
    let message = root_as_message(header).map_err(|error| {
        Error::invalid("invalid_arrow", format!("data_header is no Arrow IPC message: {error}"))
    })?;
    let rows = message.header_as_record_batch().map_or(0, |batch| batch.length());
    let rows = u32::try_from(rows);
    let rows =
        rows.map_err(|_| Error::invalid("invalid_arrow", "a batch with an impossible number of rows"))?;
    Ok((message.header_type(), rows))
}

/// A message as it stands in an Arrow IPC stream.
fn put_message(to: &mut BytesMut, header: &[u8], body: &[u8]) {
    let padded = header.len().next_multiple_of(IPC_ALIGN);
    to.put_slice(&CONTINUATION);
    to.put_u32_le(u32::try_from(padded).expect("messages are bounded to some MiB"));
    to.put_slice(header);
    to.put_bytes(0, padded - header.len());
    to.put_slice(body);
}
