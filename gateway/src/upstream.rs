//! The way to the pods: which ones there are, opening a stream on one, and the table calls.
//!
//! *Owns*: one channel per pod, the pool view and what it says of own placements, the retries of an open.
//! *Does not own*: the stream once it is open (`session`), the choice (`placement`).
//! Keeps P5: a stream that lost its pod is placed again, for as long as it takes or is allowed.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream::{FuturesUnordered, StreamExt};
use rand::rngs::StdRng;
use rand::{RngExt, make_rng};
use sluice_shared::error::{Error, ErrorKind};
use sluice_shared::frame::{Encoding, UnknownFields};
use sluice_shared::ids::{PodId, SessionId, StreamId, StreamName, TableName};
use sluice_shared::lifecycle::{Phase, TaskScope};
use sluice_shared::link::{self, PodAddress, PodLink};
use sluice_shared::membership::{Members, Membership};
use sluice_shared::pool::{OwnPlacement, PoolView};
use sluice_shared::proto::pod_client::PodClient;
use sluice_shared::proto::{
    self, MESSAGE_BYTES_MAX, StreamRequest, StreamResponse, stream_request, stream_response,
};
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;
use tonic::transport::Channel;
use uuid::Uuid;

use crate::auth::{Credential, Permit, Right};
use crate::config::GatewayConfig;
use crate::placement::{self, Explanation, NoPlace, StreamHints, explain};

/// Requests of one stream between session and link. Two: one on its way, one ready. More would only take
/// frames out of the window's reach to merge them.
const REQUESTS_WAITING_MAX: usize = 2;
/// Pods that one open asks, the first included.
const PODS_ASKED_MAX: usize = 3;
/// How long a pod that failed is set aside.
const ASIDE: Duration = Duration::from_secs(1);
const BACKOFF_MIN: Duration = Duration::from_millis(50);
const BACKOFF_MAX: Duration = Duration::from_secs(2);
/// What a producer is told to wait when no pod has room.
const BUSY_RETRY_AFTER: Duration = Duration::from_secs(1);
/// A table call may have to write to an object store.
const TABLE_CALL_TIMEOUT: Duration = Duration::from_secs(30);
/// A release asks all pods, and may have much to name.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(300);
const READY_TIMEOUT: Duration = Duration::from_secs(1);

/// All that a pod must know to take a stream, for the first time or again.
#[derive(Debug, Clone)]
pub(crate) struct OpenTerms {
    /// The table.
    pub(crate) table: TableName,
    /// Makes it a named stream.
    pub(crate) name: Option<StreamName>,
    /// Chosen here for an ephemeral stream; answered by the pod for a named one.
    pub(crate) stream: Option<StreamId>,
    /// None: begin a new session of a named stream.
    pub(crate) session: Option<SessionId>,
    /// First offset that is still held here, or that a named stream's producer has had no answer for.
    pub(crate) resume_at: Option<u64>,
    /// Where the stream ended when its session began.
    pub(crate) stream_end: u64,
    /// Of the payloads.
    pub(crate) encoding: Encoding,
    /// As its edge has it, what the producer presents; `session::run` judges it.
    pub(crate) right: Right,
    /// Fields that the table does not have.
    pub(crate) unknown: UnknownFields,
    /// Arrow IPC schema, protobuf descriptor or Avro schema, where the producer stated one.
    pub(crate) schema: Bytes,
    /// What the session is pinned to.
    pub(crate) schema_id: Option<u64>,
    /// What the producer expects to send.
    pub(crate) rate_bytes_per_s: Option<u64>,
    /// The pod that held the stream last.
    pub(crate) last_pod: Option<PodId>,
    /// What the producer sends at once is taken whole or not at all, and of a named stream it is counted.
    pub(crate) whole_requests: bool,
    /// Whether a named stream may be, or has to be, there already.
    pub(crate) existence: proto::Existence,
    /// The stream was at another pod before.
    pub(crate) moves: bool,
    /// Tells this hold on the stream from all others, whichever pods it is opened at.
    pub(crate) claim: Uuid,
}

impl OpenTerms {
    /// A new stream that ends with its producer's connection.
    pub(crate) fn ephemeral(table: TableName, encoding: Encoding, credential: Credential) -> Self {
        Self {
            stream: Some(StreamId::ephemeral()),
            session: Some(SessionId(1)),
            ..Self::new(table, encoding, credential)
        }
    }

    /// A new session of the named stream.
    pub(crate) fn named(
        table: TableName,
        encoding: Encoding,
        credential: Credential,
        name: StreamName,
    ) -> Self {
        Self { name: Some(name), ..Self::new(table, encoding, credential) }
    }

    fn new(table: TableName, encoding: Encoding, credential: Credential) -> Self {
        Self {
            table,
            name: None,
            stream: None,
            session: None,
            resume_at: None,
            stream_end: 0,
            encoding,
            right: Right::Claimed(credential),
            unknown: UnknownFields::Refuse,
            schema: Bytes::new(),
            schema_id: None,
            rate_bytes_per_s: None,
            last_pod: None,
            whole_requests: false,
            existence: proto::Existence::Any,
            moves: false,
            claim: Uuid::new_v4(),
        }
    }

    fn to_wire(&self) -> proto::Open {
        let encoding = match self.encoding {
            Encoding::Json => proto::Encoding::Json,
            Encoding::Arrow => proto::Encoding::Arrow,
            Encoding::Protobuf => proto::Encoding::Protobuf,
            Encoding::Avro => proto::Encoding::Avro,
        };
        let permit = match &self.right {
            Right::Granted(permit) => Some(permit),
            Right::Claimed(_) => None,
        };
        proto::Open {
            table: self.table.to_string(),
            name: self.name.as_ref().map(ToString::to_string).unwrap_or_default(),
            stream: self.stream.as_ref().map(ToString::to_string).unwrap_or_default(),
            session: self.session.map_or(0, |session| session.0),
            resume_at: self.resume_at,
            stream_end: self.stream_end,
            encoding: encoding.into(),
            ignore_unknown: self.unknown == UnknownFields::Ignore,
            schema: self.schema.clone(),
            schema_id: self.schema_id.unwrap_or_default(),
            schema_pinned: self.schema_id.is_some(),
            may_not_create: !permit.is_some_and(|permit| permit.may_create),
            client: permit.map(Permit::client).unwrap_or_default(),
            whole_requests: self.whole_requests,
            existence: self.existence.into(),
            moves: self.moves,
            claim: self.claim.as_bytes().to_vec().into(),
        }
    }
}

/// What the pod answered to an open.
#[derive(Debug, Clone)]
pub(crate) struct Opened {
    pub(crate) stream: StreamId,
    pub(crate) session: SessionId,
    /// First offset to send.
    pub(crate) next_offset: u64,
    /// One more than the last offset that the stream has.
    pub(crate) stream_end: u64,
    /// Of a stream that counts its requests: how many are durable, all before `next_offset`.
    pub(crate) requests: u64,
    pub(crate) schema_id: Option<u64>,
}

/// One open stream on one pod.
pub(crate) struct Call {
    pub(crate) opened: Opened,
    pub(crate) requests: mpsc::Sender<StreamRequest>,
    pub(crate) responses: Streaming<StreamResponse>,
    pub(crate) placed: Placed,
}

/// A stream's share of its pod's load, as this gateway sees it; given back when it is dropped, unless a report has
/// covered it by then.
pub(crate) struct Placed {
    upstream: Arc<Upstream>,
    pub(crate) pod: PodId,
    own: OwnPlacement,
}

impl Drop for Placed {
    fn drop(&mut self) {
        self.upstream.pool().view.give_back(&self.own);
    }
}

/// The pods, as all sessions of a gateway share them. The lock is held for microseconds, never across an await.
pub(crate) struct Upstream {
    membership: Membership,
    links: Mutex<HashMap<PodId, Link>>,
    pool: Mutex<Pool>,
    open_timeout: Duration,
    unavailable_timeout: Duration,
}

/// The way to one pod.
struct Link {
    address: PodAddress,
    /// Of the pod, as it is known: one that was started again is reached anew.
    life: u64,
    client: PodClient<Channel>,
    link: PodLink,
}

struct Pool {
    view: PoolView,
    aside_until: HashMap<PodId, Instant>,
    rng: StdRng,
}

impl Upstream {
    /// The pods that `membership` knows; none is connected yet.
    ///
    /// # Errors
    /// `Invalid` for an address that cannot be one.
    pub(crate) fn new(config: &GatewayConfig, membership: Membership) -> Result<Self, Error> {
        let members = membership.now();
        for pod in members.pods.values() {
            link::channel(&pod.state.address)?;
        }
        let pool = Pool { view: PoolView::new([]), aside_until: HashMap::new(), rng: make_rng() };
        let upstream = Self {
            membership,
            links: Mutex::default(),
            pool: Mutex::new(pool),
            open_timeout: config.open_timeout(),
            unavailable_timeout: config.unavailable_timeout(),
        };
        upstream.learn(&members);
        Ok(upstream)
    }

    /// Follows what the membership says, until the end of `scope`.
    pub(crate) async fn follow(self: Arc<Self>, scope: TaskScope) {
        let mut members = self.membership.watch();
        loop {
            let newest = Arc::clone(&members.borrow_and_update());
            self.learn(&newest);
            tokio::select! {
                biased; // the end first
                () = scope.cancelled() => return,
                changed = members.changed() => if changed.is_err() { return },
            }
        }
    }

    /// The pool as it was last heard of.
    pub(crate) fn members(&self) -> Arc<Members> {
        self.membership.now()
    }

    /// Where a stream would go now, and why.
    pub(crate) fn explain(&self, table: &TableName, hints: &StreamHints<'_>) -> Explanation {
        let mut pool = self.pool();
        pool.return_from_aside();
        let Pool { view, rng, .. } = &mut *pool;
        view.advance(Instant::now().into_std());
        explain(view, table, hints, rng)
    }

    /// The pool as placement sees it.
    pub(crate) fn view(&self) -> PoolView {
        self.pool().view.clone()
    }

    fn learn(&self, members: &Members) {
        self.links().retain(|id, link| {
            let known = members.pods.get(id);
            if let Some(pod) = known.filter(|pod| pod.lost.is_some()) {
                if pod.state.phase != Phase::Drained {
                    tracing::warn!(pod = %id, "a pod is lost: its streams are opened elsewhere");
                }
                link.link.cut();
                return false;
            }
            // Calls over a link that is dropped go on.
            known.is_some_and(|pod| pod.state.address == link.address && pod.life == link.life)
        });
        members.teach(&mut self.pool().view, Instant::now());
    }

    fn links(&self) -> MutexGuard<'_, HashMap<PodId, Link>> {
        self.links.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens a stream on the pod that placement chooses; where that one is busy or gone, on the next ones.
    ///
    /// # Errors
    /// `Busy` or `Unavailable` where none of them takes it; what the pod said where it refuses.
    pub(crate) async fn open(self: &Arc<Self>, terms: &OpenTerms) -> Result<Box<Call>, Error> {
        self.open_besides(terms, Vec::new()).await
    }

    /// Opens a stream that `from` hands over on another pod.
    ///
    /// # Errors
    /// As `open`: the stream stays where it is.
    pub(crate) async fn hand_over(
        self: Arc<Self>,
        terms: OpenTerms,
        from: PodId,
    ) -> Result<Box<Call>, Error> {
        self.open_besides(&OpenTerms { moves: true, ..terms }, vec![from]).await
    }

    async fn open_besides(
        self: &Arc<Self>,
        terms: &OpenTerms,
        mut tried: Vec<PodId>,
    ) -> Result<Box<Call>, Error> {
        let Right::Granted(_) = terms.right else {
            return Err(Error::internal("a stream whose producer was not judged was to be opened"));
        };
        let mut refusal = None;
        for _ in 0..PODS_ASKED_MAX {
            let placed = match self.place(terms, &tried) {
                Ok(placed) => placed,
                Err(no_place) => return Err(refusal.unwrap_or_else(|| no_place_error(no_place, terms))),
            };
            let pod = placed.pod.clone();
            match self.open_on(placed, terms).await {
                Ok(call) => return Ok(call),
                Err(error) if is_loss(&error) || error.retryable => {
                    let error = self.named(&pod, error);
                    tracing::debug!(%pod, table = %terms.table, %error, "a pod did not take a stream");
                    if is_loss(&error) {
                        self.set_aside(&pod);
                    }
                    tried.push(pod);
                    refusal = Some(error);
                }
                Err(error) => return Err(with_way_out(error)),
            }
        }
        Err(refusal.unwrap_or_else(|| no_place_error(NoPlace::Empty, terms)))
    }

    /// Opens a stream again after its pod was lost, trying until a pod takes it.
    ///
    /// # Errors
    /// What a pod said where it refuses for good; the last failure when the time is up.
    pub(crate) async fn reopen(self: Arc<Self>, terms: OpenTerms) -> Result<Box<Call>, Error> {
        let terms = OpenTerms { moves: true, ..terms };
        let deadline = Instant::now() + self.unavailable_timeout;
        let mut backoff = BACKOFF_MIN;
        loop {
            let error = match self.open(&terms).await {
                Ok(call) => return Ok(call),
                Err(error) if is_loss(&error) || error.retryable => error,
                Err(error) => return Err(error),
            };
            let wait = backoff.mul_f64(self.pool().rng.random_range(0.5..1.0));
            if Instant::now() + wait > deadline {
                return Err(gave_up(self.unavailable_timeout, &error));
            }
            tokio::time::sleep(wait).await;
            backoff = (backoff * 2).min(BACKOFF_MAX);
        }
    }

    /// A call to this pod has failed: others are preferred for a moment.
    pub(crate) fn set_aside(&self, pod: &PodId) {
        let mut pool = self.pool();
        pool.aside_until.insert(pod.clone(), Instant::now() + ASIDE);
        pool.view.update(pod, |pod| pod.aside = true);
    }

    fn place(self: &Arc<Self>, terms: &OpenTerms, tried: &[PodId]) -> Result<Placed, NoPlace> {
        let mut pool = self.pool();
        pool.return_from_aside();
        let (last_pod, rate) = (terms.last_pod.as_ref(), terms.rate_bytes_per_s);
        let hints = StreamHints { last_pod, rate_bytes_per_s: rate, tried };
        let Pool { view, rng, .. } = &mut *pool;
        let now = Instant::now().into_std();
        view.advance(now);
        let placement = placement::place(view, &terms.table, &hints, rng)?;
        let own = view.placed(&placement.pod, placement.adds, now);
        tracing::debug!(table = %terms.table, pod = %placement.pod, rule = ?placement.rule, "placed a stream");
        Ok(Placed { upstream: Arc::clone(self), pod: placement.pod, own })
    }

    async fn open_on(&self, placed: Placed, terms: &OpenTerms) -> Result<Box<Call>, Error> {
        let mut client = self.client(&placed.pod)?;
        let (requests, receiver) = mpsc::channel(REQUESTS_WAITING_MAX);
        let open = stream_request::Kind::Open(Box::new(terms.to_wire()));
        let sent = requests.try_send(StreamRequest { kind: Some(open) });
        sent.map_err(|_| Error::internal("a new request queue has no room for its open"))?;
        let opening = async {
            let mut responses = client.stream(ReceiverStream::new(receiver)).await?.into_inner();
            let first = responses.message().await?;
            Ok::<_, Error>((responses, first))
        };
        let Ok(opened) = timeout(self.open_timeout, opening).await else {
            let (pod, after) = (&placed.pod, self.open_timeout);
            return Err(Error::unavailable(
                TRANSPORT,
                format!("pod {pod} did not answer an open in {after:?}"),
            ));
        };
        let (responses, first) = opened?;
        let opened = read_opened(first, &placed.pod)?;
        Ok(Box::new(Call { opened, requests, responses, placed }))
    }

    pub(crate) fn client(&self, pod: &PodId) -> Result<PodClient<Channel>, Error> {
        let mut links = self.links();
        if let Some(link) = links.get(pod) {
            return Ok(link.client.clone());
        }
        let members = self.membership.now();
        let known = members.pods.get(pod).filter(|known| known.lost.is_none());
        let known = known.ok_or_else(|| Error::unavailable(TRANSPORT, "the pod has gone"))?;
        let (address, life) = (known.state.address.clone(), known.life);
        let link = link::link(&address)?;
        let client = PodClient::new(link.channel.clone())
            .max_decoding_message_size(MESSAGE_BYTES_MAX)
            .max_encoding_message_size(MESSAGE_BYTES_MAX);
        links.insert(pod.clone(), Link { address, life, client: client.clone(), link });
        Ok(client)
    }

    fn pool(&self) -> MutexGuard<'_, Pool> {
        self.pool.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All pods that take calls.
    fn clients(&self) -> Vec<(PodId, PodClient<Channel>)> {
        let pods: Vec<PodId> = self.pool().view.pods().iter().map(|pod| pod.id.clone()).collect();
        pods.into_iter().filter_map(|pod| Some((pod.clone(), self.client(&pod).ok()?))).collect()
    }

    fn home(&self, table: &TableName) -> Result<(PodId, PodClient<Channel>), Error> {
        let home = self.pool().view.home(table).map(|pod| pod.id.clone()).ok_or_else(no_pods)?;
        let client = self.client(&home)?;
        Ok((home, client))
    }

    /// A failure of the way to a pod says which pod, and where it was looked for.
    fn named(&self, pod: &PodId, mut error: Error) -> Error {
        if is_loss(&error) {
            let address =
                self.pool().view.pod(pod).map(|pod| format!(" ({})", pod.address)).unwrap_or_default();
            let what = error.message.strip_prefix("pod link: ").unwrap_or(&error.message);
            error.message = format!("pod {pod}{address} cannot be reached: {what}; is it running?");
        }
        error
    }

    /// Creates a table at its home. `spec` is JSON, and passed on as it is.
    ///
    /// # Errors
    /// What the pod says of the spec; `Unavailable` where it does not answer.
    pub(crate) async fn create_table(&self, table: &TableName, spec: Bytes) -> Result<Bytes, Error> {
        let (pod, mut home) = self.home(table)?;
        let request = proto::CreateTableRequest { table: table.to_string(), spec };
        let description = answered(home.create_table(request)).await;
        description.map(|description| description.description).map_err(|error| self.named(&pod, error))
    }

    /// Describes a table, as JSON.
    ///
    /// # Errors
    /// `NotFound`; `Unavailable` where the table's home does not answer.
    pub(crate) async fn describe_table(&self, table: &TableName) -> Result<Bytes, Error> {
        self.describe(table, false).await
    }

    /// As `describe_table`, with what waits for the table at all pods.
    ///
    /// # Errors
    /// As `describe_table`.
    pub(crate) async fn describe_table_in_pool(&self, table: &TableName) -> Result<Bytes, Error> {
        self.describe(table, true).await
    }

    async fn describe(&self, table: &TableName, whole_pool: bool) -> Result<Bytes, Error> {
        let (pod, mut home) = self.home(table)?;
        let request = proto::DescribeTableRequest { table: table.to_string(), whole_pool };
        let description = answered(home.describe_table(request)).await;
        description.map(|description| description.description).map_err(|error| self.named(&pod, error))
    }

    /// Names of all tables, from the first pod that answers.
    ///
    /// # Errors
    /// `Unavailable` where none does.
    pub(crate) async fn list_tables(&self) -> Result<Vec<String>, Error> {
        let mut failure = no_pods();
        for (pod, mut client) in self.clients() {
            match answered(client.list_tables(proto::ListTablesRequest {})).await {
                Ok(response) => return Ok(response.tables),
                Err(error) => failure = self.named(&pod, error),
            }
        }
        Err(failure)
    }

    /// Has lost records given up, by any pod that takes calls; answers its report, in JSON.
    ///
    /// # Errors
    /// What the pod says of the wish; `Unavailable` where no pod answers.
    pub(crate) async fn release(&self, request: &proto::ReleaseRequest) -> Result<Bytes, Error> {
        let mut failure = no_pods();
        for (pod, mut client) in self.clients() {
            let call = timeout(RELEASE_TIMEOUT, client.release(request.clone())).await;
            let error = match call {
                Ok(Ok(answer)) => return Ok(answer.into_inner().report),
                Ok(Err(status)) => self.named(&pod, Error::from(status)),
                Err(_) => {
                    let message = format!(
                        "pod {pod} goes on with it, and has not come to its end in {RELEASE_TIMEOUT:?}"
                    );
                    return Err(Error::unavailable("pod_timeout", message));
                }
            };
            // Another pod would say the same, unless this one could not be asked.
            if !is_loss(&error) {
                return Err(error);
            }
            failure = error;
        }
        Err(failure)
    }

    /// Ends a named stream for good.
    ///
    /// # Errors
    /// `NotFound`; `Unavailable` where the table's home, or a log that has some of the stream, does not answer.
    pub(crate) async fn retire_stream(
        &self,
        table: &TableName,
        name: &StreamName,
        permit: &Permit,
    ) -> Result<(), Error> {
        let (pod, mut home) = self.home(table)?;
        let client = permit.client();
        let request = proto::RetireRequest { table: table.to_string(), name: name.to_string(), client };
        answered(home.retire(request)).await.map(|_| ()).map_err(|error| self.named(&pod, error))
    }

    /// Whether at least one pod answers.
    pub(crate) async fn is_ready(&self) -> bool {
        let ask = |(_, mut client): (PodId, PodClient<Channel>)| async move {
            timeout(READY_TIMEOUT, client.list_tables(proto::ListTablesRequest {})).await
        };
        let mut answers: FuturesUnordered<_> = self.clients().into_iter().map(ask).collect();
        while let Some(answer) = answers.next().await {
            if matches!(answer, Ok(Ok(_))) {
                return true;
            }
        }
        false
    }
}

impl Pool {
    fn return_from_aside(&mut self) {
        let now = Instant::now();
        let view = &mut self.view;
        self.aside_until.retain(|pod, until| {
            let stays = *until > now;
            if !stays {
                view.update(pod, |pod| pod.aside = false);
            }
            stays
        });
    }
}

/// Code of errors that the link makes itself (`sluice_shared::error`).
const TRANSPORT: &str = "transport";

/// Whether the pod, or the way to it, is lost: the pod itself has said nothing.
pub(crate) fn is_loss(error: &Error) -> bool {
    // HTTP/2 failures of a broken link come as `Internal` too.
    error.code == TRANSPORT && matches!(error.kind, ErrorKind::Unavailable | ErrorKind::Internal)
}

/// A pod that was to make the table itself would not say that there is none.
fn with_way_out(mut error: Error) -> Error {
    if error.code == "table_not_found" {
        error
            .message
            .push_str("; pods started with --auto-create (pod.auto_create) make tables from first records");
    }
    error
}

async fn answered<T>(
    call: impl Future<Output = Result<tonic::Response<T>, tonic::Status>>,
) -> Result<T, Error> {
    match timeout(TABLE_CALL_TIMEOUT, call).await {
        Ok(answer) => answer.map(tonic::Response::into_inner).map_err(Error::from),
        Err(_) => {
            let message = format!("the table's pod did not answer in {TABLE_CALL_TIMEOUT:?}: try again");
            Err(Error::unavailable("pod_timeout", message))
        }
    }
}

fn read_opened(response: Option<StreamResponse>, pod: &PodId) -> Result<Opened, Error> {
    let opened = match response.and_then(|response| response.kind) {
        Some(stream_response::Kind::Opened(opened)) => opened,
        Some(_) => return Err(Error::internal(format!("pod {pod} answered an open with something else"))),
        None => {
            return Err(Error::unavailable(TRANSPORT, format!("pod {pod} ended a call that it was to open")));
        }
    };
    let stream = opened.stream.parse().map_err(|error| {
        Error::internal(format!("pod {pod} answered an open with a stream id that is none: {error}"))
    })?;
    Ok(Opened {
        stream,
        session: SessionId(opened.session),
        next_offset: opened.next_offset,
        stream_end: opened.stream_end,
        requests: opened.requests,
        schema_id: opened.schema_pinned.then_some(opened.schema_id),
    })
}

fn no_pods() -> Error {
    Error::unavailable(
        "no_pods",
        "this gateway knows no active pod: start one, or see cluster.seeds (gateway.pods, where pods are named by hand)",
    )
}

fn no_place_error(no_place: NoPlace, terms: &OpenTerms) -> Error {
    match no_place {
        NoPlace::Empty => no_pods(),
        NoPlace::Full => {
            let message =
                format!("all pods are full: no room for a stream to {}; try again later", terms.table);
            Error::busy("pool_full", message, BUSY_RETRY_AFTER)
        }
    }
}

fn gave_up(after: Duration, last: &Error) -> Error {
    let message = format!("no pod took the stream again within {after:?}; the last one said: {last}");
    Error::unavailable("pods_unavailable", message)
}
