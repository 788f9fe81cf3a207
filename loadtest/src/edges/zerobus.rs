//! A Zerobus server that acks everything and keeps nothing: what its clients can reach at most.
//!
//! *Owns*: `EphemeralStream`, its acks.
//! *Does not own*: what clients send: nothing of it is looked at.

use std::net::SocketAddr;
use std::pin::Pin;

use anyhow::Context;
use futures_util::stream::unfold;
use futures_util::{FutureExt, Stream};
use sluice_shared::proto::zerobus::ephemeral_stream_request::Payload as Ask;
use sluice_shared::proto::zerobus::ephemeral_stream_response::Payload as Answer;
use sluice_shared::proto::zerobus::zerobus_server::{Zerobus, ZerobusServer};
use sluice_shared::proto::zerobus::{
    self, EphemeralStreamRequest, EphemeralStreamResponse, PersistentStreamRequest, PersistentStreamResponse,
    RetireStreamRequest, RetireStreamResponse,
};
use tokio::net::TcpListener;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status, Streaming};

use super::{CALL_WINDOW_BYTES, CONNECTION_WINDOW_BYTES, MESSAGE_BYTES_MAX};

/// Requests that one ack covers at most, where they come faster than acks are asked for.
const REQUESTS_PER_ACK_MAX: usize = 256;

/// Serves until it is killed; prints where.
///
/// # Errors
/// It cannot listen there.
pub async fn serve(listen: SocketAddr) -> anyhow::Result<()> {
    let listener = TcpListener::bind(listen).await.with_context(|| format!("cannot listen on {listen}"))?;
    println!("listens on {}", listener.local_addr()?);
    serve_on(listener).await
}

async fn serve_on(listener: TcpListener) -> anyhow::Result<()> {
    let server = tonic::transport::Server::builder()
        .initial_stream_window_size(CALL_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .add_service(ZerobusServer::new(NullZerobus).max_decoding_message_size(MESSAGE_BYTES_MAX));
    let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
    Ok(server.serve_with_incoming(incoming).await?)
}

struct NullZerobus;

type Answers<A> = Pin<Box<dyn Stream<Item = Result<A, Status>> + Send>>;

#[tonic::async_trait]
impl Zerobus for NullZerobus {
    type EphemeralStreamStream = Answers<EphemeralStreamResponse>;
    type PersistentStreamStream = Answers<PersistentStreamResponse>;

    /// Answers at once: clients send nothing before they have the response's headers.
    async fn ephemeral_stream(
        &self,
        request: Request<Streaming<EphemeralStreamRequest>>,
    ) -> Result<Response<Self::EphemeralStreamStream>, Status> {
        let call = Call { requests: request.into_inner(), failure: None };
        let answers = unfold(call, |mut call| async move { Some((call.next_answer().await?, call)) });
        Ok(Response::new(Box::pin(answers)))
    }

    async fn persistent_stream(
        &self,
        _: Request<Streaming<PersistentStreamRequest>>,
    ) -> Result<Response<Self::PersistentStreamStream>, Status> {
        Err(Status::unimplemented("this server has ephemeral streams alone"))
    }

    async fn retire_stream(
        &self,
        _: Request<RetireStreamRequest>,
    ) -> Result<Response<RetireStreamResponse>, Status> {
        Err(Status::unimplemented("this server has ephemeral streams alone"))
    }
}

struct Call {
    requests: Streaming<EphemeralStreamRequest>,
    /// Came behind requests that were to be acked first.
    failure: Option<Status>,
}

impl Call {
    /// The answer to all requests that are there; None at the end.
    async fn next_answer(&mut self) -> Option<Result<EphemeralStreamResponse, Status>> {
        if let Some(failure) = self.failure.take() {
            return Some(Err(failure));
        }
        let mut request = match self.requests.message().await {
            Ok(request) => request?,
            Err(failure) => return Some(Err(failure)),
        };
        for _ in 1..REQUESTS_PER_ACK_MAX {
            // It has an answer of its own.
            if matches!(request.payload, Some(Ask::CreateStream(_))) {
                break;
            }
            match self.requests.message().now_or_never() {
                Some(Ok(Some(next))) => request = next,
                Some(Err(failure)) => {
                    self.failure = Some(failure);
                    break;
                }
                // An end is met again by the next call.
                Some(Ok(None)) | None => break,
            }
        }
        Some(answer(request))
    }
}

fn answer(request: EphemeralStreamRequest) -> Result<EphemeralStreamResponse, Status> {
    let offset = match request.payload {
        Some(Ask::CreateStream(_)) => {
            let created = zerobus::CreateIngestStreamResponse { stream_id: Some("null".to_owned()) };
            return Ok(EphemeralStreamResponse { payload: Some(Answer::CreateStreamResponse(created)) });
        }
        Some(Ask::IngestRecord(record)) => record.offset_id,
        Some(Ask::IngestRecordBatch(batch)) => batch.offset_id,
        None => return Err(Status::invalid_argument("a request of a kind that is not known")),
    };
    let offset = offset.ok_or_else(|| Status::invalid_argument("a request without `offset_id`"))?;
    let ack = zerobus::IngestRecordResponse { durability_ack_up_to_offset: Some(offset) };
    Ok(EphemeralStreamResponse { payload: Some(Answer::IngestRecordResponse(ack)) })
}
