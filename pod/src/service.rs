//! The pod service: what gateways and other pods can ask of a pod.
//!
//! *Owns*: the calls, opening a stream (table, record, fences), passing frames on, telling acks.
//! *Does not own*: the wire (`shared::proto`), order (`stream`), decoding (`lane`).
//! Keeps P3 and P8 on the way out: refusals are told before the ack that covers them.

mod open;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use sluice_shared::error::Error;
use sluice_shared::fault::{self, Point, Then};
use sluice_shared::frame::{Encoding, bytes_of_records};
use sluice_shared::ids::{LogId, OffsetRange, SessionId, StreamId, TableName};
use sluice_shared::lifecycle::TaskScope;
use sluice_shared::proto;
use sluice_shared::proto::stream_request::Kind as Ask;
use sluice_shared::proto::stream_response::Kind as Answer;
use sluice_shared::requests::RequestSpan;
use sluice_shared::table::TableSpec;
use tokio::sync::{mpsc, oneshot, watch};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use self::open::{Early, Opened, Opener};
use crate::admission::Admission;
use crate::duty::{Duty, Pace};
use crate::lane::Lanes;
use crate::pool::Pool;
use crate::release::Releaser;
use crate::stream::ack::AckTracker;
use crate::stream::record::LogEntry;
use crate::stream::{FrameParts, Hold, Reach, Sent, Streams};
use crate::table::Tables;
use crate::table::batch::Refusal;

/// Answers that may wait for one gateway to read them.
const ANSWERS_WAITING_MAX: usize = 8;
/// Refusals of one stream that may wait to be told before it takes another frame.
const REFUSALS_WAITING_MAX: usize = 4096;
/// Refusals told in one message.
const REFUSALS_PER_MESSAGE: usize = 500;
/// Records of a frame that are passed at once: of more, refusals would wait for which the stream was not held up.
const RECORDS_AT_ONCE: u32 = 16 << 10;
/// Code of the error that ends a call whose stream a newer call has taken over.
const SUPERSEDED: &str = "superseded";
/// How long a call may take to say what it wants.
const OPEN_DEADLINE: Duration = Duration::from_secs(10);

/// Everything that a call needs. Clones share it.
#[derive(Clone)]
pub struct PodService {
    /// Where calls run.
    pub scope: TaskScope,
    /// The ingress budget.
    pub admission: Admission,
    /// The streams of this pod.
    pub streams: Streams,
    /// Its lanes.
    pub lanes: Arc<Lanes>,
    /// Its tables.
    pub tables: Tables,
    /// Its log.
    pub log: LogEntry,
    /// The pod's phase.
    pub duty: Duty,
    /// The other pods.
    pub pool: Pool,
    /// Gives up what is lost.
    pub releaser: Releaser,
    /// Whether tables are made from the first records.
    pub auto_create: bool,
    /// Largest decoded size of one Arrow frame.
    pub decoded_bytes_max: usize,
}

type StreamAnswer = Result<proto::StreamResponse, Status>;

#[tonic::async_trait]
impl proto::pod_server::Pod for PodService {
    type StreamStream = ReceiverStream<StreamAnswer>;

    async fn stream(
        &self,
        request: Request<Streaming<proto::StreamRequest>>,
    ) -> Result<Response<Self::StreamStream>, Status> {
        let (answers, receiver) = mpsc::channel(ANSWERS_WAITING_MAX);
        let call = Call { service: self.clone(), requests: request.into_inner(), answers };
        self.scope.spawn("stream", call.run());
        Ok(Response::new(ReceiverStream::new(receiver)))
    }

    async fn fence(
        &self,
        request: Request<proto::FenceRequest>,
    ) -> Result<Response<proto::FenceResponse>, Status> {
        let request = request.into_inner();
        let Reach { next, boundary } = self.fence_stream(&request).await?;
        let requests = boundary.map(proto::Boundary::from);
        Ok(Response::new(proto::FenceResponse { durable_next: next, requests }))
    }

    async fn retire(
        &self,
        request: Request<proto::RetireRequest>,
    ) -> Result<Response<proto::RetireResponse>, Status> {
        let proto::RetireRequest { table, name, client } = request.into_inner();
        let name = name.parse().map_err(Error::from)?;
        self.retire_stream(&table_name(&table)?, name, &client).await?;
        Ok(Response::new(proto::RetireResponse {}))
    }

    async fn create_table(
        &self,
        request: Request<proto::CreateTableRequest>,
    ) -> Result<Response<proto::TableDescription>, Status> {
        let request = request.into_inner();
        let name = table_name(&request.table)?;
        let spec = TableSpec::from_json(&request.spec)?;
        self.tables.create(&name, spec).await?;
        self.describe(&name).await
    }

    async fn describe_table(
        &self,
        request: Request<proto::DescribeTableRequest>,
    ) -> Result<Response<proto::TableDescription>, Status> {
        let proto::DescribeTableRequest { table, whole_pool } = request.into_inner();
        let name = table_name(&table)?;
        if !whole_pool {
            return self.describe(&name).await;
        }
        let mut description = self.tables.describe(&name).await?;
        self.releaser.describe_waiting(&name, &mut description).await?;
        Ok(Response::new(described(&name, &description)))
    }

    async fn list_tables(
        &self,
        _: Request<proto::ListTablesRequest>,
    ) -> Result<Response<proto::ListTablesResponse>, Status> {
        let tables = self.tables.list().await?;
        let tables = tables.iter().map(|name| name.as_str().to_owned()).collect();
        Ok(Response::new(proto::ListTablesResponse { tables }))
    }

    async fn drain(
        &self,
        request: Request<proto::DrainRequest>,
    ) -> Result<Response<proto::PodStatus>, Status> {
        let proto::DrainRequest { deadline_ms, streams_per_s, force } = request.into_inner();
        let Pace { patience, streams_per_s: usual } = self.duty.pace();
        let patience = if deadline_ms == 0 { patience } else { Duration::from_millis(deadline_ms) };
        let streams_per_s = if streams_per_s > 0.0 { streams_per_s } else { usual };
        self.duty.drain(Pace { patience, streams_per_s }, force);
        Ok(Response::new(self.duty.status()))
    }

    async fn join(&self, _: Request<proto::JoinRequest>) -> Result<Response<proto::PodStatus>, Status> {
        self.duty.join()?;
        Ok(Response::new(self.duty.status()))
    }

    async fn status(&self, _: Request<proto::StatusRequest>) -> Result<Response<proto::PodStatus>, Status> {
        Ok(Response::new(self.duty.status()))
    }

    async fn commit(
        &self,
        request: Request<proto::CommitRequest>,
    ) -> Result<Response<proto::CommitResponse>, Status> {
        Ok(Response::new(self.tables.commit_for(request.into_inner()).await?))
    }

    async fn watermarks(
        &self,
        request: Request<proto::WatermarksRequest>,
    ) -> Result<Response<proto::WatermarksResponse>, Status> {
        Ok(Response::new(self.tables.watermarks_for(request.into_inner()).await?))
    }

    async fn release(
        &self,
        request: Request<proto::ReleaseRequest>,
    ) -> Result<Response<proto::ReleaseResponse>, Status> {
        let (releaser, request) = (self.releaser.clone(), request.into_inner());
        let report = self.to_its_end(async move { releaser.release(request).await }).await?;
        Ok(Response::new(proto::ReleaseResponse { report }))
    }

    async fn holdings(
        &self,
        request: Request<proto::HoldingsRequest>,
    ) -> Result<Response<proto::HoldingsResponse>, Status> {
        Ok(Response::new(self.releaser.holdings(request.into_inner()).await?))
    }

    async fn drop_stranded(
        &self,
        request: Request<proto::DropStrandedRequest>,
    ) -> Result<Response<proto::DropStrandedResponse>, Status> {
        let (releaser, request) = (self.releaser.clone(), request.into_inner());
        let dropped = self.to_its_end(async move { releaser.drop_own_stranded(request).await }).await?;
        Ok(Response::new(dropped))
    }
}

fn described(name: &TableName, description: &serde_json::Value) -> proto::TableDescription {
    let description = Bytes::from(description.to_string());
    proto::TableDescription { table: name.as_str().to_owned(), description }
}

fn table_name(text: &str) -> Result<TableName, Error> {
    Ok(text.parse::<TableName>()?)
}

impl PodService {
    async fn describe(&self, name: &TableName) -> Result<Response<proto::TableDescription>, Status> {
        let description = self.tables.describe(name).await?;
        Ok(Response::new(described(name, &description)))
    }

    /// Goes on to its end although nobody waits for it any more: what is given up half way is to be known whole.
    async fn to_its_end<T: Send + 'static>(
        &self,
        work: impl Future<Output = Result<T, Error>> + Send + 'static,
    ) -> Result<T, Error> {
        let (answer, answered) = oneshot::channel();
        // An answer that nobody waits for any more is no failure.
        self.scope.spawn("release", async move { drop(answer.send(work.await)) });
        answered.await.map_err(|_| self.draining())?
    }

    async fn fence_stream(&self, request: &proto::FenceRequest) -> Result<Reach, Error> {
        let ours = self.log.log;
        if request.log.parse().ok().map(LogId) != Some(ours) {
            let message = format!(
                "pod {} writes log {}, not {}, which stream {} may have records in: bring that log's volume back, or where it \
                 is lost for good give its records up: sluice release --log {}",
                self.log.pod, ours.0, request.log, request.stream, request.log
            );
            return Err(Error::unavailable("log_not_here", message));
        }
        let stream: StreamId = request.stream.parse()?;
        let table = self.tables.open(&table_name(&request.table)?).await?;
        self.streams.fence(table.id(), &stream, SessionId(request.session)).await
    }
}

/// One `Stream` call.
struct Call {
    service: PodService,
    requests: Streaming<proto::StreamRequest>,
    answers: mpsc::Sender<StreamAnswer>,
}

/// How a call ended.
enum End {
    /// All that was asked for has been answered.
    Finished,
    /// The gateway went away; it may come back.
    Detached,
    /// The gateway goes on with the stream at another pod.
    Left,
    /// The gateway is told why.
    Failed(Error),
}

impl Call {
    async fn run(mut self) {
        // Boxed, so that its room is given back: the call lasts much longer.
        let (end, hold) = match Box::pin(self.open()).await {
            Ok(opened) => {
                let hold = opened.hold.clone();
                (self.serve(opened).await, Some(hold))
            }
            Err(end) => (end, None),
        };
        if let Some(hold) = hold {
            match &end {
                End::Finished => self.service.streams.end(&hold),
                End::Left => self.service.streams.leave(&hold),
                End::Failed(error) if !error.retryable => self.service.streams.end(&hold),
                End::Detached | End::Failed(_) => hold.detach(),
            }
        }
        if let End::Failed(error) = end {
            tracing::debug!(code = error.code, %error, "stream call failed");
            let _ = self.answers.send(Err(error.into())).await; // a gateway that is gone needs no answer
        }
    }

    async fn open(&mut self) -> Result<Opened, End> {
        let first = tokio::time::timeout(OPEN_DEADLINE, self.requests.message()).await;
        let open = match first {
            Ok(Ok(Some(proto::StreamRequest { kind: Some(Ask::Open(open)) }))) => *open,
            Ok(Ok(None) | Err(_)) => return Err(End::Detached),
            Ok(Ok(Some(_))) | Err(_) => {
                let message = "stream call: the first message has to be `open`, within ten seconds";
                return Err(End::Failed(Error::invalid("expected_open", message)));
            }
        };
        let opener = Opener { service: &self.service, requests: &mut self.requests, answers: &self.answers };
        tokio::select! {
            biased; // cancelled first: an open may take long
            () = self.service.scope.draining() => Err(End::Failed(self.service.draining())),
            // Whoever asked has gone, and may have opened the stream elsewhere: a session that is begun now would fence that.
            () = self.answers.closed() => Err(End::Detached),
            opened = opener.open(open) => opened,
        }
    }

    async fn serve(&mut self, opened: Opened) -> End {
        let Opened { hold, early, resume_at } = opened;
        let service = self.service.clone();
        let (finish, finishing) = watch::channel(None);
        let progress = Arc::clone(&hold.stream.progress);
        let receive = async {
            match receive(&service, &mut self.requests, &hold, early).await {
                Ok(Last::Finish(when)) => drop(finish.send(Some(when))),
                Ok(Last::Leave) => return End::Left,
                Ok(Last::Nothing) => return End::Detached,
                // Not the stream's failure: it goes on in another call.
                Err(error) if error.code == SUPERSEDED => return End::Failed(error),
                Err(error) => progress.fail(error),
            }
            std::future::pending().await // the answers end the call
        };
        tokio::select! {
            biased; // the ways to end first; then answers, which free the producer's window
            () = hold.superseded.cancelled() => superseded(&hold),
            () = service.scope.cancelled() => End::Failed(service.draining()),
            end = answer(&self.answers, &hold, finishing, resume_at) => end,
            end = receive => end,
        }
    }
}

impl PodService {
    fn draining(&self) -> Error {
        Error::unavailable(
            "draining",
            format!("pod {} is going away: open the stream elsewhere", self.log.pod),
        )
    }
}

fn superseded(hold: &Hold) -> End {
    match hold.stream.progress.failure() {
        Some(error) => End::Failed(error.clone()),
        None => End::Failed(Error::unavailable(
            SUPERSEDED,
            format!("stream {}: a newer call of its session has taken it over", hold.stream.id),
        )),
    }
}

/// The last thing that a gateway says in a call.
enum Last {
    Finish(proto::Finish),
    Leave,
    /// It has gone away without a word.
    Nothing,
}

/// Takes frames until the gateway has no more for this call, or something is wrong.
async fn receive(
    service: &PodService,
    requests: &mut Streaming<proto::StreamRequest>,
    hold: &Hold,
    early: Early,
) -> Result<Last, Error> {
    let lane = service.lanes.of(&hold.stream.id);
    for frame in early.frames {
        for part in parts(hold.stream.encoding, frame) {
            pass(service, &lane, hold, part).await?;
        }
    }
    if let Some(finish) = early.finish {
        return Ok(Last::Finish(finish));
    }
    loop {
        let request = tokio::select! {
            biased; // a pod that drains takes nothing new
            () = service.scope.draining() => return Err(service.draining()),
            request = requests.message() => request,
        };
        let Ok(Some(request)) = request else { return Ok(Last::Nothing) };
        match request.kind {
            Some(Ask::Frames(frames)) => {
                for frame in frames.frames {
                    for part in parts(hold.stream.encoding, frame) {
                        pass(service, &lane, hold, part).await?;
                    }
                }
            }
            Some(Ask::Finish(finish)) => return Ok(Last::Finish(finish)),
            Some(Ask::Leave(_)) => return Ok(Last::Leave),
            Some(Ask::Open(_)) | None => return Err(unexpected_message()),
        }
    }
}

fn unexpected_message() -> Error {
    Error::invalid("unexpected_message", "stream call: expected frames or finish after the open")
}

/// A frame of very many records in several, each behind the other; requests stay whole. One that is miscounted is
/// passed as it is, and refused by the lane.
fn parts(encoding: Encoding, mut frame: proto::Frame) -> Vec<proto::Frame> {
    let mut parts = Vec::new();
    while frame.count > RECORDS_AT_ONCE && frame.requests.is_none() {
        let end = bytes_of_records(encoding, &frame.payload, RECORDS_AT_ONCE as usize);
        let Some(end) = end else { break };
        let payload = frame.payload.split_to(end);
        parts.push(proto::Frame { count: RECORDS_AT_ONCE, payload, ..frame.clone() });
        frame.count -= RECORDS_AT_ONCE;
        frame.first_offset += u64::from(RECORDS_AT_ONCE);
    }
    parts.push(frame);
    parts
}

async fn pass(
    service: &PodService,
    lane: &mpsc::Sender<crate::lane::LaneFrame>,
    hold: &Hold,
    frame: proto::Frame,
) -> Result<(), Error> {
    let (stream, first) = (&hold.stream.id, frame.first_offset);
    let offsets =
        OffsetRange::from_count(first, u64::from(frame.count)).filter(|offsets| !offsets.is_empty());
    let Some(offsets) = offsets else {
        let message = format!("stream {stream}: frame at offset {first} of {} records", frame.count);
        return Err(Error::invalid("empty_frame", message).at_offset(first));
    };
    let requests = frame.requests.map(RequestSpan::try_from).transpose()?;
    if let Some(requests) = requests.as_ref().filter(|requests| !requests.covers(offsets)) {
        let (start, end) = (requests.start.offset, requests.end().offset);
        let message = format!(
            "stream {stream}: frame of offsets {first} to {} of requests from {start} to {end}",
            offsets.end
        );
        return Err(Error::invalid("invalid_requests", message).at_offset(first));
    }
    if fault::take(Point::Frame).is_some_and(|action| action.then == Then::Drop) {
        return Ok(());
    }
    hold.stream.progress.refusals_at_most(REFUSALS_WAITING_MAX).await;
    let permit = service.admission.admit(frame.payload.len(), frame.count).await;
    let room = lane.reserve().await.map_err(|_| service.draining())?;
    match hold.send(offsets, room, FrameParts { payload: frame.payload, requests, permit }) {
        Sent::Taken | Sent::Duplicate => Ok(()),
        Sent::Gap { expected } => {
            let message =
                format!("stream {stream}: frame at offset {first}, expected {expected}: records are missing");
            Err(Error::invalid("offset_gap", message).at_offset(first))
        }
        Sent::NotHolder => {
            Err(Error::unavailable(SUPERSEDED, format!("stream {stream} is held by another call")))
        }
    }
}

/// Tells what becomes durable and committed until all is answered or the stream has failed.
async fn answer(
    answers: &mpsc::Sender<StreamAnswer>,
    hold: &Hold,
    mut finishing: watch::Receiver<Option<proto::Finish>>,
    resume_at: u64,
) -> End {
    let progress = &hold.stream.progress;
    let mut acks = AckTracker::at(resume_at);
    loop {
        let next = hold.stream.next_offset();
        let failure = progress.failure().filter(|_| progress.settled_at(next).is_some());
        let finish = *finishing.borrow_and_update();
        let now = progress.take();
        for refusals in now.refusals.chunks(REFUSALS_PER_MESSAGE) {
            if !tell(answers, Answer::Rejections(rejections(refusals))).await {
                return End::Detached;
            }
        }
        if let Some(ack) = acks.next(&now)
            && !tell(answers, Answer::Ack(ack)).await
        {
            return End::Detached;
        }
        if let Some(failure) = failure {
            return End::Failed(failure.clone());
        }
        if let Some(reason) = now.handoff.filter(|_| finish.is_none())
            && !tell(answers, Answer::Handoff(proto::Handoff { reason: reason.to_owned() })).await
        {
            return End::Detached;
        }
        if finish.is_some_and(|finish| now.covers(hold.stream.sent_offset(), finish.committed)) {
            let told = tell(answers, Answer::Finished(proto::Finished {})).await;
            return if told { End::Finished } else { End::Detached };
        }
        tokio::select! {
            biased; // the order is of no consequence: both lead to another look
            () = progress.changed() => {}
            Ok(()) = finishing.changed() => {}
        }
    }
}

async fn tell(answers: &mpsc::Sender<StreamAnswer>, answer: Answer) -> bool {
    let is_ack = matches!(answer, Answer::Ack(_));
    // An ack cannot fail but by its call's end: of what is planned here only waits and deaths count.
    if is_ack {
        fault::pass(Point::AckBefore);
    }
    let told = answers.send(Ok(proto::StreamResponse { kind: Some(answer) })).await.is_ok();
    if is_ack {
        fault::pass(Point::AckAfter);
    }
    told
}

fn rejections(refusals: &[Refusal]) -> proto::Rejections {
    let rejection = |refusal: &Refusal| proto::Rejection {
        offset: refusal.offset,
        code: refusal.reason.code.to_owned(),
        column: refusal.reason.column.clone().unwrap_or_default(),
        message: refusal.reason.message.clone(),
        quarantined: refusal.raw.is_some(),
    };
    proto::Rejections { rejections: refusals.iter().map(rejection).collect() }
}
