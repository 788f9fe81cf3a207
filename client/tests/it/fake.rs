//! A gateway under a test's control: each connection is accepted, read and answered by the test itself.
//!
//! *Owns*: the server's half of the handshake, and reading and writing frames.
//! *Does not own*: any behaviour of its own.

use std::time::Duration;

use futures_util::{SinkExt, StreamExt};
use sluice_client::{Client, RetryPolicy};
use sluice_shared::error::Error;
use sluice_shared::frame::{
    Ack, Finish, GatewayFrame, Move, Open, Opened, ProducerFrame, Rejected, SUBPROTOCOL,
};
use tokio::net::{TcpListener, TcpStream};
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::handshake::server::{ErrorResponse, Request, Response};
use tokio_tungstenite::tungstenite::protocol::CloseFrame;
use tokio_tungstenite::{WebSocketStream, accept_hdr_async};

/// No scenario takes so long unless something hangs.
const PATIENCE: Duration = Duration::from_secs(20);

pub(crate) struct FakeGateway {
    listener: TcpListener,
}

pub(crate) struct FakeConnection {
    socket: WebSocketStream<TcpStream>,
    pub(crate) path: String,
}

/// A `records` frame as it came.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Records {
    pub(crate) first: u64,
    pub(crate) count: u32,
    pub(crate) payload: Vec<u8>,
}

impl Records {
    pub(crate) fn next(&self) -> u64 {
        self.first + u64::from(self.count)
    }

    pub(crate) fn lines(&self) -> Vec<String> {
        let text = String::from_utf8(self.payload.clone()).expect("JSON");
        text.lines().map(str::to_owned).collect()
    }
}

impl FakeGateway {
    pub(crate) async fn start() -> Self {
        Self { listener: TcpListener::bind("127.0.0.1:0").await.expect("binds") }
    }

    pub(crate) fn url(&self) -> String {
        format!("ws://{}", self.listener.local_addr().expect("bound"))
    }

    pub(crate) async fn client(&self) -> Client {
        Client::connect(&self.url()).await.expect("valid URL")
    }

    /// The next connection, upgraded.
    #[allow(clippy::result_large_err, reason = "the signature of tungstenite's callback")]
    pub(crate) async fn accept(&self) -> FakeConnection {
        let (tcp, _) = within(self.listener.accept()).await.expect("accepts");
        let mut path = String::new();
        let upgrade = |request: &Request, mut response: Response| -> Result<Response, ErrorResponse> {
            path = request.uri().to_string();
            let offered = request.headers().get("sec-websocket-protocol").cloned();
            assert_eq!(offered.as_ref().and_then(|v| v.to_str().ok()), Some(SUBPROTOCOL));
            response.headers_mut().insert("sec-websocket-protocol", offered.expect("just seen"));
            Ok(response)
        };
        let socket = within(accept_hdr_async(tcp, upgrade)).await.expect("upgrades");
        FakeConnection { socket, path }
    }

    /// Accepts a connection and drops it before the upgrade.
    pub(crate) async fn accept_and_drop(&self) {
        drop(within(self.listener.accept()).await.expect("accepts"));
    }

    /// Accepts, and answers the upgrade with this HTTP response.
    pub(crate) async fn accept_with_http(&self, response: &str) {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let (mut tcp, _) = within(self.listener.accept()).await.expect("accepts");
        let mut head = vec![0; 4096];
        let mut read = 0;
        while !head[..read].ends_with(b"\r\n\r\n") {
            read += within(tcp.read(&mut head[read..])).await.expect("reads");
        }
        tcp.write_all(response.as_bytes()).await.expect("writes");
    }

    /// Accepts and opens a stream at `next_offset`.
    pub(crate) async fn open_at(&self, stream: &str, next_offset: u64) -> (FakeConnection, Open) {
        self.open_with(stream, next_offset, 8 << 20, 10 << 20).await
    }

    pub(crate) async fn open_with(
        &self,
        stream: &str,
        next_offset: u64,
        window_bytes: u64,
        frame_bytes_max: u64,
    ) -> (FakeConnection, Open) {
        let mut connection = self.accept().await;
        let open = connection.open().await;
        let stream = stream.parse().expect("stream id");
        let stream_end = next_offset;
        let opened = Opened { stream, next_offset, stream_end, window_bytes, frame_bytes_max, requests: 0 };
        connection.send(GatewayFrame::Opened(opened)).await;
        (connection, open)
    }
}

impl FakeConnection {
    pub(crate) async fn open(&mut self) -> Open {
        match self.read().await {
            Some(ProducerFrame::Open(open)) => open,
            other => panic!("expected open, got {other:?}"),
        }
    }

    pub(crate) async fn records(&mut self) -> Records {
        match self.read().await {
            Some(ProducerFrame::Records { first_offset, count, payload }) => {
                Records { first: first_offset, count, payload: payload.to_vec() }
            }
            other => panic!("expected records, got {other:?}"),
        }
    }

    /// Reads records up to offset `next`, and checks that they are consecutive from `from` on.
    pub(crate) async fn records_between(&mut self, from: u64, next: u64) -> Vec<Records> {
        let (mut frames, mut at) = (Vec::new(), from);
        while at < next {
            let frame = self.records().await;
            assert_eq!(frame.first, at, "no gap, nothing twice");
            at = frame.next();
            frames.push(frame);
        }
        assert_eq!(at, next);
        frames
    }

    pub(crate) async fn finish(&mut self) -> Finish {
        match self.read().await {
            Some(ProducerFrame::Finish(finish)) => finish,
            other => panic!("expected finish, got {other:?}"),
        }
    }

    /// The next frame; None where the producer has gone.
    pub(crate) async fn read(&mut self) -> Option<ProducerFrame> {
        loop {
            match within(self.socket.next()).await? {
                Ok(Message::Binary(bytes)) => return Some(ProducerFrame::decode(bytes).expect("a frame")),
                Ok(Message::Close(_)) | Err(_) => return None,
                Ok(_) => {}
            }
        }
    }

    pub(crate) async fn send(&mut self, frame: GatewayFrame) {
        self.socket.send(Message::Binary(frame.encode())).await.expect("the client reads");
    }

    pub(crate) async fn durable(&mut self, offset: u64) {
        self.send(GatewayFrame::Ack(Ack { durable: Some(offset), committed: None, version: None })).await;
    }

    pub(crate) async fn committed(&mut self, offset: u64, version: u64) {
        let ack = Ack { durable: Some(offset), committed: Some(offset), version: Some(version) };
        self.send(GatewayFrame::Ack(ack)).await;
    }

    pub(crate) async fn reject(&mut self, offset: u64) {
        let (code, message) = ("wrong_type".to_owned(), "expected int64".to_owned());
        let (column, quarantined) = (Some("n".to_owned()), false);
        let rejected = Rejected { offset, code, column, message, quarantined };
        self.send(GatewayFrame::Rejected(rejected)).await;
    }

    pub(crate) async fn error(&mut self, error: Error) {
        self.send(GatewayFrame::Error(error)).await;
    }

    pub(crate) async fn going_away(&mut self, after_ms: u64) {
        self.send(GatewayFrame::Move(Move { after_ms })).await;
    }

    pub(crate) async fn close(mut self, code: u16) {
        let frame = CloseFrame { code: code.into(), reason: "".into() };
        let _ = self.socket.close(Some(frame)).await;
        while let Some(Ok(_)) = within(self.socket.next()).await {}
    }
}

/// Policy of tests: many tries, no long waits.
pub(crate) fn hasty() -> RetryPolicy {
    RetryPolicy {
        wait_min: Duration::from_millis(1),
        wait_max: Duration::from_millis(5),
        give_up_after: Duration::from_secs(10),
        give_up_opening_after: Duration::from_secs(5),
    }
}

pub(crate) async fn within<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, future).await.expect("something hangs")
}
