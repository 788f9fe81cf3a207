//! A scripted pod, and producers of both kinds.
//!
//! *Owns*: the fake pod's script and memory, how a test waits for something (never by sleeping).
//! *Does not own*: the tests.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use futures_util::{SinkExt, StreamExt};
use serde_json::Value;
use sluice_gateway::{Gateway, GatewayConfig};
use sluice_shared::error::Error;
use sluice_shared::frame::{Finish, FinishWhen, GatewayFrame, ProducerFrame};
use sluice_shared::ids::PodId;
use sluice_shared::lifecycle::{OnPanic, TaskScope};
use sluice_shared::link::{self, PodAddress};
use sluice_shared::membership::Membership;
use sluice_shared::proto::pod_server::{Pod, PodServer};
use sluice_shared::proto::stream_request::Kind as Asked;
use sluice_shared::proto::stream_response::Kind as Answer;
use sluice_shared::proto::{self, MESSAGE_BYTES_MAX, StreamRequest, StreamResponse};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;
use tokio_tungstenite::{MaybeTlsStream, WebSocketStream};
use tonic::{Request, Response, Status, Streaming};

/// Nothing here takes this long: a test that waits longer has failed.
const PATIENCE: Duration = Duration::from_secs(20);

/// Waits for `future`, but not for ever.
pub(crate) async fn soon<T>(what: &str, future: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, future).await.unwrap_or_else(|_| panic!("waited in vain for {what}"))
}

type Answers = mpsc::Sender<Result<StreamResponse, Status>>;

/// What the pod is to do, and what it has seen.
#[derive(Default)]
pub(crate) struct Memory {
    /// Ack each request at once.
    pub(crate) acks: bool,
    /// Frames are not kept.
    pub(crate) forgets: bool,
    /// Records whose payload holds this are refused.
    pub(crate) refuses: Option<&'static str>,
    /// What the next opens are answered with instead of `opened`.
    pub(crate) open_failures: VecDeque<Error>,
    /// First offset of a new session of a named stream.
    pub(crate) next_offset: u64,
    /// How many requests those before it are.
    pub(crate) requests: u64,
    pub(crate) retired: Vec<proto::RetireRequest>,
    pub(crate) opens: Vec<proto::Open>,
    /// Per open, the frames that came on that call.
    pub(crate) frames: Vec<Vec<proto::Frame>>,
    pub(crate) finishes: Vec<proto::Finish>,
    pub(crate) specs: Vec<Bytes>,
    /// Calls whose streams have left.
    pub(crate) leaves: Vec<usize>,
    /// What the pod was asked to do by the admin API.
    pub(crate) drains: Vec<proto::DrainRequest>,
    pub(crate) joins: usize,
    /// What it says of itself; nothing for an active pod.
    pub(crate) status: Option<proto::PodStatus>,
    /// What it answers a join with.
    pub(crate) join_failure: Option<Error>,
    pub(crate) releases: Vec<proto::ReleaseRequest>,
    pub(crate) release_failure: Option<Error>,
    calls: Vec<Answers>,
}

impl Memory {
    /// Payloads of all calls, in order.
    pub(crate) fn payload(&self) -> Vec<u8> {
        self.frames.iter().flatten().flat_map(|frame| frame.payload.to_vec()).collect()
    }

    pub(crate) fn records(&self) -> u64 {
        self.frames.iter().flatten().map(|frame| u64::from(frame.count)).sum()
    }
}

/// A pod that does as it is told.
#[derive(Clone)]
pub(crate) struct FakePod {
    pub(crate) id: PodId,
    memory: std::sync::Arc<watch::Sender<Memory>>,
    scope: TaskScope,
    dialer: link::PipeDialer,
}

impl FakePod {
    pub(crate) fn start(id: &str) -> Self {
        let (dialer, listener) = link::pipe();
        let memory = std::sync::Arc::new(watch::Sender::new(Memory { acks: true, ..Memory::default() }));
        let pod =
            Self { id: id.parse().expect("valid"), memory, scope: TaskScope::new(OnPanic::EndTask), dialer };
        let service = PodServer::new(pod.clone()).max_decoding_message_size(MESSAGE_BYTES_MAX);
        let (scope, server) = (pod.scope.clone(), link::server());
        pod.scope.spawn("fake pod", async move {
            tokio::select! {
                biased; // a kill is at once
                () = scope.cancelled() => {}
                _ = server.serve_with_incoming(service, listener) => {}
            }
        });
        pod
    }

    pub(crate) fn address(&self) -> (PodId, PodAddress) {
        (self.id.clone(), PodAddress::InProcess(self.dialer.clone()))
    }

    pub(crate) fn tell(&self, change: impl FnOnce(&mut Memory)) {
        self.memory.send_modify(change);
    }

    pub(crate) fn see<T>(&self, look: impl FnOnce(&Memory) -> T) -> T {
        look(&self.memory.borrow())
    }

    pub(crate) async fn until(&self, what: &str, mut holds: impl FnMut(&Memory) -> bool) {
        let mut memory = self.memory.subscribe();
        let waited = soon(what, memory.wait_for(|memory| holds(memory))).await;
        drop(waited.expect("the pod lives"));
    }

    /// Answers on a call, in the order of their opens.
    pub(crate) async fn answer_on(&self, call: usize, answer: Answer) {
        let call = self.see(|memory| memory.calls[call].clone());
        call.send(Ok(StreamResponse { kind: Some(answer) })).await.expect("the call is open");
    }

    /// Answers on the newest call.
    pub(crate) async fn answer(&self, answer: Result<Answer, Status>) {
        let call = self.see(|memory| memory.calls.last().cloned()).expect("a call");
        let response = answer.map(|kind| StreamResponse { kind: Some(kind) });
        call.send(response).await.expect("the call is open");
    }

    pub(crate) async fn ack(&self, durable_next: u64) {
        self.answer(Ok(Answer::Ack(proto::Ack { durable_next, committed_next: 0, version: 0 }))).await;
    }

    /// The call breaks, as when the pod dies.
    pub(crate) async fn break_call(&self) {
        self.answer(Err(Status::unavailable("killed"))).await;
    }

    /// The pod is gone, with its link.
    pub(crate) fn kill(&self) {
        self.scope.cancel();
    }

    fn status_now(&self) -> proto::PodStatus {
        let active = || proto::PodStatus { phase: "active".to_owned(), ..proto::PodStatus::default() };
        self.see(|memory| memory.status.clone()).unwrap_or_else(active)
    }

    fn opened(&self, open: &proto::Open) -> proto::Opened {
        let new_session = open.session == 0;
        let end = self.see(|memory| memory.next_offset);
        let next_offset = open.resume_at.unwrap_or(if new_session { end } else { 0 });
        proto::Opened {
            stream: if new_session { format!("{}#1", open.name) } else { open.stream.clone() },
            session: if new_session { 7 } else { open.session },
            next_offset,
            stream_end: end.max(next_offset),
            schema_id: 3,
            schema_pinned: true,
            requests: self.see(|memory| memory.requests),
        }
    }

    fn responses_to(&self, call: usize, asked: Asked) -> Vec<Answer> {
        let mut answers = Vec::new();
        self.tell(|memory| match asked {
            Asked::Open(_) => {}
            Asked::Leave(_) => memory.leaves.push(call),
            Asked::Finish(finish) => {
                memory.finishes.push(finish);
                if memory.acks {
                    answers.push(Answer::Finished(proto::Finished {}));
                }
            }
            Asked::Frames(frames) => {
                let refuses = memory.refuses;
                let refused = frames.frames.iter().flat_map(|frame| refused(frame, refuses)).collect();
                answers.push(Answer::Rejections(proto::Rejections { rejections: refused }));
                let next =
                    frames.frames.last().map_or(0, |frame| frame.first_offset + u64::from(frame.count));
                if memory.acks {
                    let ack = proto::Ack { durable_next: next, committed_next: next, version: next * 10 };
                    answers.push(Answer::Ack(ack));
                }
                if !memory.forgets {
                    memory.frames[call].extend(frames.frames);
                }
            }
        });
        answers
    }
}

fn refused(frame: &proto::Frame, refuses: Option<&'static str>) -> Vec<proto::Rejection> {
    let Some(refuses) = refuses else { return Vec::new() };
    let text = String::from_utf8_lossy(&frame.payload).into_owned();
    let lines = text.lines().filter(|line| !line.trim().is_empty()).enumerate();
    let refused = lines.filter(|(_, line)| line.contains(refuses));
    refused
        .map(|(at, line)| proto::Rejection {
            offset: frame.first_offset + at as u64,
            code: "not_json".to_owned(),
            column: String::new(),
            message: format!("no JSON: {line}"),
            quarantined: false,
        })
        .collect()
}

#[tonic::async_trait]
impl Pod for FakePod {
    type StreamStream = ReceiverStream<Result<StreamResponse, Status>>;

    async fn stream(
        &self,
        request: Request<Streaming<StreamRequest>>,
    ) -> Result<Response<Self::StreamStream>, Status> {
        let mut requests = request.into_inner();
        let first = requests.message().await?.and_then(|request| request.kind);
        let Some(Asked::Open(open)) = first else { return Err(Status::invalid_argument("expected open")) };
        let opened = self.opened(&open);
        let mut failure = None;
        self.tell(|memory| {
            memory.opens.push(*open);
            failure = memory.open_failures.pop_front();
        });
        if let Some(failure) = failure {
            return Err(failure.into());
        }
        let (answers, receiver) = mpsc::channel(64);
        let response = StreamResponse { kind: Some(Answer::Opened(opened)) };
        answers.send(Ok(response)).await.map_err(|_| Status::cancelled("gone"))?;
        let mut call = 0;
        self.tell(|memory| {
            call = memory.frames.len();
            memory.frames.push(Vec::new());
            memory.calls.push(answers.clone());
        });
        let pod = self.clone();
        self.scope.spawn("fake call", async move {
            while let Ok(Some(request)) = requests.message().await {
                for kind in request.kind.into_iter().flat_map(|asked| pod.responses_to(call, asked)) {
                    if answers.send(Ok(StreamResponse { kind: Some(kind) })).await.is_err() {
                        return;
                    }
                }
            }
        });
        Ok(Response::new(ReceiverStream::new(receiver)))
    }

    async fn fence(&self, _: Request<proto::FenceRequest>) -> Result<Response<proto::FenceResponse>, Status> {
        Err(Status::unimplemented("not asked by gateways"))
    }

    async fn retire(
        &self,
        request: Request<proto::RetireRequest>,
    ) -> Result<Response<proto::RetireResponse>, Status> {
        self.tell(|memory| memory.retired.push(request.into_inner()));
        Ok(Response::new(proto::RetireResponse {}))
    }

    async fn create_table(
        &self,
        request: Request<proto::CreateTableRequest>,
    ) -> Result<Response<proto::TableDescription>, Status> {
        let proto::CreateTableRequest { table, spec } = request.into_inner();
        self.tell(|memory| memory.specs.push(spec.clone()));
        Ok(Response::new(proto::TableDescription { table, description: spec }))
    }

    async fn describe_table(
        &self,
        request: Request<proto::DescribeTableRequest>,
    ) -> Result<Response<proto::TableDescription>, Status> {
        let table = request.into_inner().table;
        if let Some(description) =
            self.see(|memory| memory.specs.last().cloned()).filter(|_| table.ends_with("flights"))
        {
            return Ok(Response::new(proto::TableDescription { table, description }));
        }
        Err(Error::not_found("table_not_found", format!("no table {table}: create it first")).into())
    }

    async fn list_tables(
        &self,
        _: Request<proto::ListTablesRequest>,
    ) -> Result<Response<proto::ListTablesResponse>, Status> {
        Ok(Response::new(proto::ListTablesResponse { tables: vec!["main.default.flights".to_owned()] }))
    }

    async fn drain(
        &self,
        request: Request<proto::DrainRequest>,
    ) -> Result<Response<proto::PodStatus>, Status> {
        let request = request.into_inner();
        let (phase, deadline_ms) = ("draining".to_owned(), request.deadline_ms);
        self.tell(|memory| {
            memory.drains.push(request);
            memory.status = Some(proto::PodStatus { phase, deadline_ms, ..proto::PodStatus::default() });
        });
        Ok(Response::new(self.status_now()))
    }

    async fn join(&self, _: Request<proto::JoinRequest>) -> Result<Response<proto::PodStatus>, Status> {
        if let Some(failure) = self.see(|memory| memory.join_failure.clone()) {
            return Err(failure.into());
        }
        self.tell(|memory| (memory.joins, memory.status) = (memory.joins + 1, None));
        Ok(Response::new(self.status_now()))
    }

    async fn status(&self, _: Request<proto::StatusRequest>) -> Result<Response<proto::PodStatus>, Status> {
        Ok(Response::new(self.status_now()))
    }

    async fn commit(
        &self,
        _: Request<proto::CommitRequest>,
    ) -> Result<Response<proto::CommitResponse>, Status> {
        Err(Status::unimplemented("not asked by gateways"))
    }

    async fn watermarks(
        &self,
        _: Request<proto::WatermarksRequest>,
    ) -> Result<Response<proto::WatermarksResponse>, Status> {
        Err(Status::unimplemented("not asked by gateways"))
    }

    async fn release(
        &self,
        request: Request<proto::ReleaseRequest>,
    ) -> Result<Response<proto::ReleaseResponse>, Status> {
        let request = request.into_inner();
        if let Some(failure) = self.see(|memory| memory.release_failure.clone()) {
            return Err(failure.into());
        }
        let report = format!("{{\"dry_run\":{}}}", request.dry_run).into();
        self.tell(|memory| memory.releases.push(request));
        Ok(Response::new(proto::ReleaseResponse { report }))
    }

    async fn holdings(
        &self,
        _: Request<proto::HoldingsRequest>,
    ) -> Result<Response<proto::HoldingsResponse>, Status> {
        Err(Status::unimplemented("not asked by gateways"))
    }

    async fn drop_stranded(
        &self,
        _: Request<proto::DropStrandedRequest>,
    ) -> Result<Response<proto::DropStrandedResponse>, Status> {
        Err(Status::unimplemented("not asked by gateways"))
    }
}

/// A gateway on a free port, with short deadlines where a test waits for one.
pub(crate) async fn gateway(pods: &[&FakePod]) -> Gateway {
    gateway_with(pods, |_| {}).await
}

pub(crate) async fn gateway_with(pods: &[&FakePod], change: impl FnOnce(&mut GatewayConfig)) -> Gateway {
    let mut config = GatewayConfig { listen: "127.0.0.1:0".to_owned(), ..GatewayConfig::default() };
    change(&mut config);
    Gateway::start(config, Membership::fixed(pods.iter().map(|pod| pod.address()).collect()))
        .await
        .expect("starts")
}

/// A producer with a WebSocket.
pub(crate) struct Producer {
    pub(crate) socket: WebSocketStream<MaybeTlsStream<TcpStream>>,
    pub(crate) subprotocol: Option<String>,
}

impl Producer {
    /// Connects to a path below `/v1/tables/`, offering these subprotocols.
    pub(crate) async fn connect(gateway: &Gateway, path: &str, offer: Option<&str>) -> Self {
        let url = format!("ws://{}/v1/tables/{path}", gateway.address());
        let mut request = url.into_client_request().expect("a URL");
        if let Some(offer) = offer {
            request.headers_mut().insert("sec-websocket-protocol", offer.parse().expect("a header"));
        }
        let connecting = Box::pin(tokio_tungstenite::connect_async(request));
        let (socket, response) = soon("the upgrade", connecting).await.expect("upgrades");
        let chosen = response.headers().get("sec-websocket-protocol");
        let subprotocol = chosen.map(|chosen| chosen.to_str().expect("text").to_owned());
        Self { socket, subprotocol }
    }

    /// A plain stream to `flights`, opened.
    pub(crate) async fn plain(gateway: &Gateway) -> Self {
        let mut producer = Self::connect(gateway, "flights/stream", None).await;
        let opened = producer.json().await;
        assert_eq!(opened["next_offset"], 0, "{opened}");
        assert!(opened["stream"].as_str().is_some_and(|id| id.starts_with('~')), "{opened}");
        producer
    }

    /// A `sluice.v1` stream to `flights`, opened.
    pub(crate) async fn framed(gateway: &Gateway) -> Self {
        let mut producer = Self::connect(gateway, "flights/stream", Some("sluice.v1")).await;
        producer.binary(b"\x01{}").await;
        let opened = producer.frame().await;
        assert!(matches!(opened, GatewayFrame::Opened(_)), "{opened:?}");
        producer
    }

    pub(crate) async fn text(&mut self, text: &str) {
        soon("sending", self.socket.send(Message::text(text))).await.expect("sends");
    }

    pub(crate) async fn binary(&mut self, bytes: &[u8]) {
        soon("sending", self.socket.send(Message::binary(bytes.to_vec()))).await.expect("sends");
    }

    pub(crate) async fn records(&mut self, first_offset: u64, count: u32, payload: &str) {
        let payload = Bytes::copy_from_slice(payload.as_bytes());
        self.binary(&ProducerFrame::Records { first_offset, count, payload }.encode()).await;
    }

    pub(crate) async fn finish(&mut self, when: FinishWhen) {
        self.binary(&ProducerFrame::Finish(Finish { when }).encode()).await;
    }

    /// The next message that is no ping.
    pub(crate) async fn message(&mut self) -> Message {
        loop {
            let message = soon("a message", self.socket.next()).await.expect("open").expect("no failure");
            if !matches!(message, Message::Ping(_) | Message::Pong(_)) {
                return message;
            }
        }
    }

    pub(crate) async fn json(&mut self) -> Value {
        let message = self.message().await;
        let text = message.to_text().unwrap_or_else(|_| panic!("expected text, got {message:?}"));
        serde_json::from_str(text).unwrap_or_else(|_| panic!("expected JSON, got {message:?}"))
    }

    pub(crate) async fn frame(&mut self) -> GatewayFrame {
        let message = self.message().await;
        assert!(message.is_binary(), "expected a frame, got {message:?}");
        GatewayFrame::decode(&message.into_data()).expect("a frame")
    }

    /// Reads on until everything before `next` is durable.
    pub(crate) async fn until_durable(&mut self, offset: u64) {
        loop {
            let durable = match self.message().await {
                Message::Text(text) => {
                    serde_json::from_str::<Value>(&text).expect("JSON")["durable"].as_u64()
                }
                message => match GatewayFrame::decode(&message.into_data()).expect("a frame") {
                    GatewayFrame::Ack(ack) => ack.durable,
                    _ => None,
                },
            };
            if durable == Some(offset) {
                return;
            }
        }
    }

    /// Reads on to the error, and to the close; answers both.
    pub(crate) async fn refusal(&mut self) -> (Error, u16) {
        let mut error = None;
        loop {
            let message = self.message().await;
            match message {
                Message::Close(close) => {
                    let code = close.map_or(1005, |close| close.code.into());
                    return (error.expect("an error before the close"), code);
                }
                Message::Text(text) => {
                    let mut value: Value = serde_json::from_str(&text).expect("JSON");
                    if value.get("error").is_some() {
                        error = Some(serde_json::from_value(value["error"].take()).expect("an error"));
                    }
                }
                message => {
                    if let Ok(GatewayFrame::Error(told)) = GatewayFrame::decode(&message.into_data()) {
                        error = Some(told);
                    }
                }
            }
        }
    }

    pub(crate) async fn expect_close(&mut self, expected: u16) {
        loop {
            if let Message::Close(close) = self.message().await {
                assert_eq!(close.map(|close| u16::from(close.code)), Some(expected));
                return;
            }
        }
    }
}

/// Sends bytes as they are, and reads the answer up to `bytes_max` or the end.
pub(crate) async fn raw(address: SocketAddr, request: &[u8]) -> String {
    let mut socket = TcpStream::connect(address).await.expect("connects");
    socket.write_all(request).await.expect("sends");
    let mut answer = Vec::new();
    soon("the answer", socket.read_to_end(&mut answer)).await.expect("reads");
    String::from_utf8_lossy(&answer).into_owned()
}

/// Status and body of a request without a body.
pub(crate) async fn get(address: SocketAddr, method: &str, path: &str) -> (u16, String) {
    let request = format!("{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
    split(&raw(address, request.as_bytes()).await)
}

pub(crate) fn split(answer: &str) -> (u16, String) {
    let status = answer.split(' ').nth(1).and_then(|status| status.parse().ok());
    let body = answer.split_once("\r\n\r\n").map_or("", |(_, body)| body);
    (status.unwrap_or_else(|| panic!("no HTTP answer: {answer:?}")), body.to_owned())
}

/// The value of one metric.
pub(crate) async fn metric(address: SocketAddr, name: &str) -> u64 {
    let (_, text) = get(address, "GET", "/metrics").await;
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.and_then(|value| value.parse().ok()).unwrap_or(0)
}
