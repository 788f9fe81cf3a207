//! Producers without any client library: WebSocket messages, and the bytes below them.
//!
//! *Owns*: connecting, both forms of what a gateway says, reading on to what a test waits for.
//! *Does not own*: which rows that makes (`ledger`).

use std::time::Duration;

use futures_util::{SinkExt, StreamExt};
use serde_json::{Value, json};
use sluice_shared::error::Error;
use sluice_shared::frame::{Ack, GatewayFrame, ProducerFrame, Rejected};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;

use crate::server::{Server, soon};

/// What a producer hears.
#[derive(Debug)]
pub(crate) enum Heard {
    Frame(GatewayFrame),
    /// A close, with its code.
    Close(u16),
    /// The connection is gone without a close.
    Lost,
}

/// A stream's producer.
pub(crate) struct Producer {
    pub(crate) socket: WebSocketStream<TcpStream>,
    /// Empty until it is opened.
    pub(crate) stream: String,
    pub(crate) next_offset: u64,
}

impl Producer {
    /// Connects to a path below `/v1/tables/`, in plain JSON or in `sluice.v1`.
    pub(crate) async fn connect(server: &Server, path: &str, framed: bool) -> Self {
        let socket = TcpStream::connect(server.address).await.expect("connects");
        Self::upgrade(server, socket, path, framed).await
    }

    pub(crate) async fn upgrade(server: &Server, socket: TcpStream, path: &str, framed: bool) -> Self {
        socket.set_nodelay(true).expect("sets an option");
        let url = format!("ws://{}/v1/tables/{path}", server.address);
        let mut request = url.into_client_request().expect("a URL");
        if framed {
            request.headers_mut().insert("sec-websocket-protocol", "sluice.v1".parse().expect("a header"));
        }
        let upgrading = tokio_tungstenite::client_async(request, socket);
        let (socket, _) = soon("the upgrade", upgrading).await.expect("upgrades");
        Self { socket, stream: String::new(), next_offset: 0 }
    }

    /// A plain stream, opened.
    pub(crate) async fn plain(server: &Server, table: &str) -> Self {
        Self::plain_at(server, &format!("{table}/stream")).await
    }

    pub(crate) async fn plain_at(server: &Server, path: &str) -> Self {
        let mut producer = Self::connect(server, path, false).await;
        producer.opened().await;
        producer
    }

    /// A `sluice.v1` stream, opened with this body.
    pub(crate) async fn framed(server: &Server, table: &str, open: Value) -> Self {
        let mut producer = Self::connect(server, &format!("{table}/stream"), true).await;
        producer.frame(0x01, open.to_string().as_bytes()).await;
        producer.opened().await;
        producer
    }

    pub(crate) async fn arrow(server: &Server, table: &str) -> Self {
        Self::framed(server, table, json!({"encoding": "arrow"})).await
    }

    async fn opened(&mut self) {
        match self.hear().await {
            Heard::Frame(GatewayFrame::Opened(opened)) => {
                self.stream = opened.stream.as_str().to_owned();
                self.next_offset = opened.next_offset;
            }
            other => panic!("expected `opened`, heard {other:?}"),
        }
    }

    /// Whether the message could be sent: not after the gateway has closed.
    pub(crate) async fn send(&mut self, message: Message) -> bool {
        soon("sending", self.socket.send(message)).await.is_ok()
    }

    pub(crate) async fn text(&mut self, text: &str) -> bool {
        self.send(Message::text(text)).await
    }

    /// A `sluice.v1` frame of any kind.
    pub(crate) async fn frame(&mut self, kind: u8, body: &[u8]) -> bool {
        self.send(Message::binary([&[kind], body].concat())).await
    }

    pub(crate) async fn records(&mut self, first_offset: u64, count: u32, payload: &[u8]) -> bool {
        let payload = payload.to_vec().into();
        let frame = ProducerFrame::Records { first_offset, count, payload }.encode();
        self.send(Message::Binary(frame)).await
    }

    /// Bytes below the WebSocket's frames.
    pub(crate) async fn bytes(&mut self, bytes: &[u8]) {
        soon("sending", self.socket.get_mut().write_all(bytes)).await.expect("sends");
    }

    /// The next thing that is no ping.
    pub(crate) async fn hear(&mut self) -> Heard {
        soon("a message", self.next()).await
    }

    async fn next(&mut self) -> Heard {
        loop {
            return match self.socket.next().await {
                Some(Ok(Message::Ping(_) | Message::Pong(_))) => continue,
                Some(Ok(Message::Close(close))) => {
                    Heard::Close(close.map_or(1005, |close| close.code.into()))
                }
                Some(Ok(Message::Text(text))) => Heard::Frame(plain_frame(&text)),
                Some(Ok(message)) => {
                    Heard::Frame(GatewayFrame::decode(&message.into_data()).expect("a gateway's frame"))
                }
                Some(Err(_)) | None => Heard::Lost,
            };
        }
    }

    /// Hears something already there, and waits no longer than this for it.
    pub(crate) async fn hear_within(&mut self, wait: Duration) -> Option<Heard> {
        tokio::time::timeout(wait, self.hear()).await.ok()
    }

    /// Reads on until all up to `offset` is durable; answers what was refused.
    pub(crate) async fn until_durable(&mut self, offset: u64) -> Vec<Rejected> {
        self.until_ack(|ack| ack.durable >= Some(offset)).await
    }

    /// Reads on until all up to `offset` is in the table; answers what was refused.
    pub(crate) async fn until_committed(&mut self, offset: u64) -> Vec<Rejected> {
        self.until_ack(|ack| ack.committed >= Some(offset)).await
    }

    async fn until_ack(&mut self, is_there: impl Fn(&Ack) -> bool) -> Vec<Rejected> {
        let mut refused = Vec::new();
        loop {
            match self.hear().await {
                Heard::Frame(GatewayFrame::Ack(ack)) if is_there(&ack) => return refused,
                Heard::Frame(GatewayFrame::Ack(_)) => {}
                Heard::Frame(GatewayFrame::Rejected(rejected)) => refused.push(rejected),
                other => panic!("stream {}: expected acks, heard {other:?}", self.stream),
            }
        }
    }

    /// Reads on to the error and to the close; answers both.
    pub(crate) async fn refusal(&mut self) -> (Error, u16) {
        match self.outcome(u64::MAX).await {
            Err(refused) => refused,
            Ok(_) => panic!("stream {}: all is durable", self.stream),
        }
    }

    /// Reads on until all up to `offset` is durable (what was refused), or to an error and its close.
    pub(crate) async fn outcome(&mut self, offset: u64) -> Result<Vec<Rejected>, (Error, u16)> {
        let (mut error, mut refused) = (None, Vec::new());
        loop {
            match self.hear().await {
                Heard::Frame(GatewayFrame::Error(told)) => error = Some(told),
                Heard::Frame(GatewayFrame::Rejected(rejected)) => refused.push(rejected),
                Heard::Frame(GatewayFrame::Ack(ack)) if ack.durable >= Some(offset) => return Ok(refused),
                Heard::Close(code) => return Err((error.expect("an error before the close"), code)),
                Heard::Lost => panic!("stream {}: lost without a close, after {error:?}", self.stream),
                Heard::Frame(_) => {}
            }
        }
    }

    /// The connection's end by a reset: what is on its way is thrown away.
    pub(crate) fn reset(self) {
        self.socket.get_ref().set_zero_linger().expect("sets an option");
    }
}

fn plain_frame(text: &str) -> GatewayFrame {
    let mut value: Value = serde_json::from_str(text).unwrap_or_else(|_| panic!("expected JSON, got {text}"));
    let expect = "a plain answer of the known form";
    if value.get("error").is_some() {
        return GatewayFrame::Error(serde_json::from_value(value["error"].take()).expect(expect));
    }
    if value.get("rejected").is_some() {
        return GatewayFrame::Rejected(serde_json::from_value(value["rejected"].take()).expect(expect));
    }
    if value.get("move").is_some() {
        return GatewayFrame::Move(serde_json::from_value(value["move"].take()).expect(expect));
    }
    if value.get("stream").is_some() {
        (value["window_bytes"], value["frame_bytes_max"]) = (json!(0), json!(0));
        return GatewayFrame::Opened(serde_json::from_value(value).expect(expect));
    }
    GatewayFrame::Ack(serde_json::from_value(value).expect(expect))
}
