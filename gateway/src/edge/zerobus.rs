//! Zerobus gRPC: what Databricks's clients speak, so that they work with nothing changed but the endpoint.
//!
//! Its offsets count requests, ours count records: each request is remembered until all its records are durable. Its
//! clients kill a stream whose acks go back or too far, take no answer for a single bad record, and reconnect without a
//! pause when an open stream fails for a reason that may pass: so such a failure is told late. A request is taken whole
//! or not at all.
//!
//! A persistent stream is a named one. Its id says its table and its name, so that any gateway can resume it; the log
//! and the table know where each of its requests ends.
//!
//! *Owns*: what the messages of the service mean.
//! *Does not own*: what a stream means (`session`), the HTTP/2 connection (`app`), Arrow (`flight`).

pub(crate) mod flight;
mod calls;
mod details;
mod dialect;
mod records;

use std::sync::Arc;

use sluice_shared::error::Error;
use sluice_shared::frame::{Encoding, GatewayFrame};
use sluice_shared::ids::{StreamName, TableName};
use sluice_shared::proto::Existence;
use sluice_shared::proto::zerobus::{
    CreateIngestStreamRequest, EphemeralStreamRequest, EphemeralStreamResponse, PersistentStreamRequest,
    PersistentStreamResponse, ResumeIngestStreamRequest, RetireStreamRequest, RetireStreamResponse,
    resume_ingest_stream_request, retire_stream_request, zerobus_server,
};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};
use uuid::Uuid;

use crate::app::App;
use crate::auth::{Credential, Privilege};
use crate::edge::PERSISTENT;
use crate::session::{self, Edge, Ended, Input, Records};
use crate::upstream::OpenTerms;
use calls::{Call, Place, admit, status};
use dialect::{Ask, Dialect, Ephemeral, Persistent};

/// Where the service is mounted.
pub(crate) const PATH: &str = "/databricks.zerobus.Zerobus/{method}";
/// Answers that may wait for a client to read them.
const ANSWERS_WAITING_MAX: usize = 8;
/// Of a message, beside its records.
const MESSAGE_OVERHEAD_BYTES: usize = 1 << 20;

/// The service.
#[derive(Clone)]
pub(crate) struct Zerobus {
    app: Arc<App>,
}

impl Zerobus {
    /// The service as it is mounted.
    pub(crate) fn server(app: Arc<App>) -> zerobus_server::ZerobusServer<Self> {
        let message_bytes_max = app.config.frame_bytes_max.as_usize() + MESSAGE_OVERHEAD_BYTES;
        zerobus_server::ZerobusServer::new(Self { app }).max_decoding_message_size(message_bytes_max)
    }

    /// Answers at once: clients send nothing before they have the response's headers.
    fn stream<D: Dialect>(
        &self,
        request: Request<Streaming<D::Request>>,
    ) -> Result<Response<Answers<D::Response>>, Status> {
        let (table, credential) = admit(request.metadata(), &self.app)?;
        let (answers, receiver) = mpsc::channel(ANSWERS_WAITING_MAX);
        let (_, extensions, requests) = request.into_parts();
        let call = Call::new(requests, answers, "send smaller messages").carried(&extensions, &self.app);
        let edge = ZerobusEdge::<D> { call, credential, encoding: Encoding::Json, resumes: false };
        self.app.scope.spawn("zerobus stream", serve(edge, table, Arc::clone(&self.app)));
        Ok(Response::new(ReceiverStream::new(receiver)))
    }
}

type Answers<A> = ReceiverStream<Result<A, Status>>;

#[tonic::async_trait]
impl zerobus_server::Zerobus for Zerobus {
    type EphemeralStreamStream = Answers<EphemeralStreamResponse>;
    type PersistentStreamStream = Answers<PersistentStreamResponse>;

    async fn ephemeral_stream(
        &self,
        request: Request<Streaming<EphemeralStreamRequest>>,
    ) -> Result<Response<Self::EphemeralStreamStream>, Status> {
        self.stream::<Ephemeral>(request)
    }

    async fn persistent_stream(
        &self,
        request: Request<Streaming<PersistentStreamRequest>>,
    ) -> Result<Response<Self::PersistentStreamStream>, Status> {
        self.stream::<Persistent>(request)
    }

    async fn retire_stream(
        &self,
        request: Request<RetireStreamRequest>,
    ) -> Result<Response<RetireStreamResponse>, Status> {
        let (header, credential) = admit(request.metadata(), &self.app)?;
        let retire = async {
            let RetireStreamRequest { table_name, identifier } = request.into_inner();
            let id = identifier.map(|retire_stream_request::Identifier::StreamId(id)| id);
            let (table, name) = persistent(&id.unwrap_or_default())?;
            let permit = self.app.auth.check(&credential, &table, Privilege::Write)?;
            agreed(table_name.as_deref().map(str::parse).transpose()?, Some(&table))?;
            agreed(header, Some(&table))?;
            self.app.upstream.retire_stream(&table, &name, &permit).await
        };
        match retire.await {
            Ok(()) => Ok(Response::new(RetireStreamResponse {})),
            Err(error) => {
                self.app.metrics.error(&error);
                Err(status(&error))
            }
        }
    }
}

async fn serve<D: Dialect>(mut edge: ZerobusEdge<D>, table: Option<TableName>, app: Arc<App>) {
    let ended = match edge.terms(table, &app).await {
        Ok(terms) => Box::pin(session::run(&mut edge, &app, terms)).await,
        Err(ended) => ended,
    };
    edge.call.close(ended, &app).await;
}

/// One call.
struct ZerobusEdge<D: Dialect> {
    call: Call<D::Request, D::Response>,
    credential: Credential,
    encoding: Encoding,
    /// The client goes on with a stream that is there.
    resumes: bool,
}

impl<D: Dialect> ZerobusEdge<D> {
    /// What the stream is to be opened with: the first request says it.
    async fn terms(&mut self, table: Option<TableName>, app: &App) -> Result<OpenTerms, Ended> {
        let terms = match self.call.first(app).await?.and_then(D::read) {
            Some(Ask::Create(create)) => {
                create_terms(create, table, D::IS_PERSISTENT, self.credential.clone())
            }
            Some(Ask::Resume(resume)) => {
                self.resumes = true;
                resume_terms(resume, table, self.credential.clone())
            }
            _ => {
                let message = "the first request has to open a stream, within the handshake timeout";
                Err(Error::invalid("expected_create_stream", message))
            }
        };
        let terms = terms.map_err(Ended::Failed)?;
        self.encoding = terms.encoding;
        Ok(terms)
    }

    /// Takes a request. None where it brings no records.
    fn take(&mut self, request: D::Request) -> Result<Option<Records>, Error> {
        let (offset, records) = match D::read(request) {
            Some(Ask::Record(request)) => (request.offset_id, records::one(request.record)),
            Some(Ask::Batch(request)) => (request.offset_id, records::many(request.batch)),
            Some(Ask::Create(_) | Ask::Resume(_)) => {
                let message = "a call carries one stream, and this one has it already";
                return Err(Error::invalid("already_open", message));
            }
            None => return Err(Error::invalid("unknown_request", "a request of a kind that is not known")),
        };
        let (_, records) =
            records.filter(|(encoding, _)| *encoding == self.encoding).ok_or_else(records::wrong_kind)?;
        let (payload, count) = records::payload(self.encoding, records.as_slice())?;
        if D::IS_PERSISTENT && count == 0 {
            let message = "a batch without records: nothing would make its offset durable";
            return Err(Error::invalid("empty_batch", message));
        }
        let place = self.call.sent.push(offset, count, D::IS_PERSISTENT)?;
        if place == Place::Duplicate || count == 0 {
            self.ack(self.call.sent.durable_next);
            return Ok(None);
        }
        Ok(Some(Records { first_offset: None, count, payload }))
    }

    fn ack(&mut self, durable_next: u64) {
        if let Some(offset) = self.call.sent.durable(durable_next) {
            self.call.answers.tell(D::write(dialect::ack(offset)));
        }
    }
}

impl<D: Dialect> Edge for ZerobusEdge<D> {
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

    fn moves_when_expired(&self) -> bool {
        true
    }

    fn tell(&mut self, frame: &GatewayFrame) {
        let answer = match frame {
            GatewayFrame::Opened(opened) => {
                self.call.opened = true;
                self.call.sent.begin(opened.requests, opened.next_offset);
                if self.resumes {
                    dialect::resumed(opened.requests)
                } else {
                    dialect::created(stream_id(opened.stream.as_str()))
                }
            }
            GatewayFrame::Ack(ack) => {
                if let Some(durable) = ack.durable {
                    self.ack(durable + 1);
                }
                return;
            }
            GatewayFrame::Move(moving) => dialect::close(moving.after_ms),
            // A table that keeps refused records keeps this one. How the session ended is told by `close`.
            GatewayFrame::Rejected(_) | GatewayFrame::Error(_) => return,
        };
        self.call.answers.tell(D::write(answer));
    }
}

fn create_terms(
    create: CreateIngestStreamRequest,
    in_header: Option<TableName>,
    is_persistent: bool,
    credential: Credential,
) -> Result<OpenTerms, Error> {
    let named = create.table_name.as_deref().map(str::parse::<TableName>).transpose()?;
    agreed(in_header.clone(), named.as_ref())?;
    let table = named.or(in_header);
    let table =
        table.ok_or_else(|| Error::invalid("invalid_table_name", "`create_stream` names no table"))?;
    let (encoding, schema) =
        records::encoding(create.record_type, create.descriptor_proto, create.avro_schema_json)?;
    if is_persistent && encoding == Encoding::Avro {
        let message = "persistent streams carry JSON or protobuf: a resume could not state an Avro schema";
        return Err(Error::invalid("record_type", message));
    }
    let terms = if is_persistent {
        let name = format!("{PERSISTENT}{}/{}", table, Uuid::now_v7().simple()).parse()?;
        OpenTerms { existence: Existence::New, ..OpenTerms::named(table, encoding, credential, name) }
    } else {
        OpenTerms::ephemeral(table, encoding, credential)
    };
    Ok(OpenTerms { schema, whole_requests: true, ..terms })
}

fn resume_terms(
    resume: ResumeIngestStreamRequest,
    in_header: Option<TableName>,
    credential: Credential,
) -> Result<OpenTerms, Error> {
    let id = resume.identifier.map(|resume_ingest_stream_request::Identifier::StreamId(id)| id);
    let (table, name) = persistent(&id.unwrap_or_default())?;
    agreed(in_header, Some(&table))?;
    let (encoding, schema) = records::encoding(resume.record_type, resume.descriptor_proto, None)?;
    let terms = OpenTerms::named(table, encoding, credential, name);
    Ok(OpenTerms { schema, whole_requests: true, existence: Existence::Old, ..terms })
}

/// What clients know a stream by: of a persistent one its name, less what all of them begin with.
fn stream_id(stream: &str) -> String {
    let name = stream.strip_prefix(PERSISTENT).and_then(|rest| rest.rsplit_once('#'));
    name.map_or(stream, |(name, _)| name).to_owned()
}

/// The table and the name of a persistent stream, which its id says.
fn persistent(id: &str) -> Result<(TableName, StreamName), Error> {
    let parts = id.split_once('/').filter(|(_, uuid)| Uuid::try_parse(uuid).is_ok());
    let table = parts.and_then(|(table, _)| table.parse::<TableName>().ok());
    match (table, format!("{PERSISTENT}{id}").parse()) {
        (Some(table), Ok(name)) => Ok((table, name)),
        _ => {
            let shown: String = id.chars().take(100).collect();
            let message = format!("no persistent stream has the id {shown:?}");
            Err(Error::not_found("stream_not_found", message))
        }
    }
}

/// # Errors
/// Where a header, or a field, names another table than the stream does.
fn agreed(other: Option<TableName>, table: Option<&TableName>) -> Result<(), Error> {
    match (other, table) {
        (Some(other), Some(table)) if other != *table => {
            let message = format!("the stream is of table {table}, the call of {other}: they must agree");
            Err(Error::invalid("table_mismatch", message))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_says_its_table_and_its_name() {
        let create = CreateIngestStreamRequest {
            table_name: Some("readings".to_owned()),
            record_type: Some(2),
            ..CreateIngestStreamRequest::default()
        };
        let terms = create_terms(create, None, true, Credential::default()).expect("valid");
        let name = terms.name.expect("named");
        let id = stream_id(&format!("{name}#0"));
        assert_eq!(persistent(&id).expect("own id"), ("readings".parse().expect("valid"), name));
        for id in ["", "main.default.readings", "a b/0", "main.default.readings/0", "/", "~0/1"] {
            assert_eq!(persistent(id).expect_err(id).code, "stream_not_found");
        }
    }
}
