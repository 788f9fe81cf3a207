//! A pod that acks all at once and keeps nothing, so that what stands before it is measured and no disk is.
//!
//! *Owns*: the pod's service over TCP, the count of what came.
//! *Does not own*: who calls it (a gateway, or `bare`).

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::Context;
use futures_util::{Stream, StreamExt};
use sluice_shared::lifecycle::{OnPanic, TaskScope};
use sluice_shared::link;
use sluice_shared::proto::pod_server::{Pod, PodServer};
use sluice_shared::proto::stream_request::Kind as Asked;
use sluice_shared::proto::stream_response::Kind as Answer;
use sluice_shared::proto::{self, MESSAGE_BYTES_MAX, StreamRequest, StreamResponse};
use tokio::net::TcpListener;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status, Streaming};

/// A running null pod. It ends when it is dropped.
pub(crate) struct NullPod {
    address: SocketAddr,
    tally: Arc<Tally>,
    scope: TaskScope,
}

/// What came since the start, in the pod's own count.
#[derive(Debug, Default)]
struct Tally {
    records: AtomicU64,
    bytes: AtomicU64,
}

impl NullPod {
    /// Listens on a free port of this machine alone.
    ///
    /// # Errors
    /// There is none.
    pub(crate) async fn start() -> anyhow::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await.context("null pod: no free port")?;
        let address = listener.local_addr()?;
        let tally = Arc::new(Tally::default());
        let service = PodServer::new(Service { tally: Arc::clone(&tally) })
            .max_decoding_message_size(MESSAGE_BYTES_MAX);
        let scope = TaskScope::new(OnPanic::EndTask);
        let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
        let (server, stop) = (link::server().add_service(service), scope.clone());
        scope.spawn("null pod", async move {
            tokio::select! {
                biased; // the end of a run waits for nobody
                () = stop.cancelled() => {}
                served = server.serve_with_incoming(incoming) => {
                    if let Err(error) = served {
                        tracing::error!(%error, "the null pod ended");
                    }
                }
            }
        });
        Ok(Self { address, tally, scope })
    }

    /// Where it listens.
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Records that came so far.
    pub(crate) fn records(&self) -> u64 {
        self.tally.records.load(Ordering::Relaxed)
    }

    /// Their payload.
    pub(crate) fn bytes(&self) -> u64 {
        self.tally.bytes.load(Ordering::Relaxed)
    }
}

impl Drop for NullPod {
    fn drop(&mut self) {
        self.scope.cancel();
    }
}

struct Service {
    tally: Arc<Tally>,
}

type Answers = Pin<Box<dyn Stream<Item = Result<StreamResponse, Status>> + Send>>;

#[tonic::async_trait]
impl Pod for Service {
    type StreamStream = Answers;

    async fn stream(&self, request: Request<Streaming<StreamRequest>>) -> Result<Response<Answers>, Status> {
        let tally = Arc::clone(&self.tally);
        // One answer a request, and neither a task nor a queue between the two.
        let answers = request.into_inner().map(move |request| {
            let asked = request?.kind.ok_or_else(|| Status::invalid_argument("a request of no kind"))?;
            Ok(StreamResponse { kind: Some(answer(asked, &tally)?) })
        });
        Ok(Response::new(Box::pin(answers)))
    }

    async fn fence(&self, _: Request<proto::FenceRequest>) -> Result<Response<proto::FenceResponse>, Status> {
        Err(not_here())
    }

    async fn retire(
        &self,
        _: Request<proto::RetireRequest>,
    ) -> Result<Response<proto::RetireResponse>, Status> {
        Err(not_here())
    }

    async fn create_table(
        &self,
        _: Request<proto::CreateTableRequest>,
    ) -> Result<Response<proto::TableDescription>, Status> {
        Err(not_here())
    }

    async fn describe_table(
        &self,
        _: Request<proto::DescribeTableRequest>,
    ) -> Result<Response<proto::TableDescription>, Status> {
        Err(not_here())
    }

    async fn list_tables(
        &self,
        _: Request<proto::ListTablesRequest>,
    ) -> Result<Response<proto::ListTablesResponse>, Status> {
        Ok(Response::new(proto::ListTablesResponse { tables: Vec::new() }))
    }

    async fn drain(&self, _: Request<proto::DrainRequest>) -> Result<Response<proto::PodStatus>, Status> {
        Err(not_here())
    }

    async fn join(&self, _: Request<proto::JoinRequest>) -> Result<Response<proto::PodStatus>, Status> {
        Err(not_here())
    }

    async fn status(&self, _: Request<proto::StatusRequest>) -> Result<Response<proto::PodStatus>, Status> {
        Err(not_here())
    }

    async fn commit(
        &self,
        _: Request<proto::CommitRequest>,
    ) -> Result<Response<proto::CommitResponse>, Status> {
        Err(not_here())
    }

    async fn watermarks(
        &self,
        _: Request<proto::WatermarksRequest>,
    ) -> Result<Response<proto::WatermarksResponse>, Status> {
        Err(not_here())
    }

    async fn release(
        &self,
        _: Request<proto::ReleaseRequest>,
    ) -> Result<Response<proto::ReleaseResponse>, Status> {
        Err(not_here())
    }

    async fn holdings(
        &self,
        _: Request<proto::HoldingsRequest>,
    ) -> Result<Response<proto::HoldingsResponse>, Status> {
        Err(not_here())
    }

    async fn drop_stranded(
        &self,
        _: Request<proto::DropStrandedRequest>,
    ) -> Result<Response<proto::DropStrandedResponse>, Status> {
        Err(not_here())
    }
}

fn not_here() -> Status {
    Status::unimplemented("the null pod takes streams alone")
}

fn answer(asked: Asked, tally: &Tally) -> Result<Answer, Status> {
    Ok(match asked {
        Asked::Open(open) => Answer::Opened(proto::Opened {
            stream: open.stream,
            session: 1,
            schema_id: 1,
            schema_pinned: true,
            ..proto::Opened::default()
        }),
        Asked::Frames(frames) => {
            let mut durable_next = None;
            for frame in &frames.frames {
                tally.records.fetch_add(u64::from(frame.count), Ordering::Relaxed);
                tally.bytes.fetch_add(frame.payload.len() as u64, Ordering::Relaxed);
                durable_next = Some(frame.first_offset + u64::from(frame.count));
            }
            let durable_next =
                durable_next.ok_or_else(|| Status::invalid_argument("a request without frames"))?;
            Answer::Ack(proto::Ack { durable_next, committed_next: 0, version: 0 })
        }
        Asked::Finish(_) | Asked::Leave(_) => Answer::Finished(proto::Finished {}),
    })
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    #[test]
    fn frames_are_counted_and_acked_up_to_their_end() {
        let frame = |first_offset, count| proto::Frame {
            first_offset,
            count,
            payload: Bytes::from_static(b"{}\n"),
            requests: None,
        };
        let tally = Tally::default();
        let frames = proto::Frames { frames: vec![frame(4, 2), frame(6, 3)] };
        let acked = answer(Asked::Frames(frames), &tally).expect("frames");
        assert_eq!(acked, Answer::Ack(proto::Ack { durable_next: 9, committed_next: 0, version: 0 }));
        assert_eq!((tally.records.into_inner(), tally.bytes.into_inner()), (5, 6));
    }
}
