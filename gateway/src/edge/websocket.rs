//! WebSocket: plain JSON texts, or the binary frames of `sluice.v1`.
//!
//! *Owns*: the upgraded socket: its limits, pings, write deadline and close.
//! *Does not own*: the upgrade's headers (`http`), what frames mean (`framed`), offsets and acks (`session`).
//! Keeps P7: every buffer of a socket is bounded, and a producer that takes no bytes is closed.

pub(super) mod echo;
mod frames;
#[cfg(debug_assertions)]
pub(super) mod fuzzing;

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use futures_util::{SinkExt, StreamExt};
use serde_json::json;
use sluice_shared::error::{Error, ErrorKind};
use sluice_shared::frame::{Ack, Encoding, GatewayFrame, Open, RECORDS_HEADER_BYTES, UnknownFields};
use sluice_shared::ids::{StreamName, TableName};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::{Instant, Interval, MissedTickBehavior, Sleep, sleep, timeout};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::error::{CapacityError, Error as SocketError, ProtocolError};
use tokio_tungstenite::tungstenite::protocol::{CloseFrame, Role, WebSocketConfig};
use tokio_tungstenite::tungstenite::{Message, Utf8Bytes};

use crate::app::App;
use crate::auth::{Credential, Right};
use crate::edge::{framed, json_text};
use crate::progress::{FRAME_STEP_BYTES, Progress};
use crate::session::{self, Edge, Ended, Input, Records};
use crate::socket::Socket;
use crate::upstream::OpenTerms;
use frames::{FRAGMENTS_MAX, Watched};

/// Allocated per connection, and filled with zeros before each read: what ten thousand idle connections hold. It bounds a
/// read, of which a large frame takes some more.
const READ_BUFFER_BYTES: usize = 8 << 10;
/// Acks are gathered up to this before they are written unasked.
const WRITE_BUFFER_BYTES: usize = 4 << 10;
/// Bytes that may wait for the socket before a session keeps its news to itself.
const TELL_BYTES: usize = 32 << 10;
/// Above what can wait: `TELL_BYTES`, one more message of the largest kind, pings and the close.
const WRITE_BUFFER_BYTES_MAX: usize = 256 << 10;
/// A silent connection is asked whether it is still there.
const PING_INTERVAL: Duration = Duration::from_secs(30);
/// Not even a pong in this long, as ticks see it: it is not.
const SILENCE_MAX: Duration = Duration::from_secs(65);
/// After a close the rest of what the producer sends is thrown away for this long. Without it the kernel
/// answers unread bytes with a reset, which takes the error frame with it.
const LINGER: Duration = Duration::from_secs(2);

/// What the URL and the headers say of a stream.
#[derive(Debug, Clone)]
pub(crate) struct Request {
    pub(crate) table: TableName,
    pub(crate) name: Option<StreamName>,
    pub(crate) resume_at: Option<u64>,
    pub(crate) unknown: UnknownFields,
    /// Of the header; without one, of `open`.
    pub(crate) credential: Credential,
    /// Subprotocol `sluice.v1`.
    pub(crate) framed: bool,
}

/// Speaks to one producer until one side ends it. `buffered` are bytes that were read along with the upgrade.
pub(crate) async fn serve(socket: Socket, buffered: Vec<u8>, request: Request, app: Arc<App>) {
    let mut edge = WebSocketEdge::new(socket, buffered, request.framed, &app).await;
    // What happens once is boxed: a stream's task holds room for all that it will ever wait for.
    let ended = match Box::pin(edge.terms(request, &app)).await {
        Ok(terms) => Box::pin(session::run(&mut edge, &app, terms)).await,
        Err(ended) => ended,
    };
    Box::pin(edge.close(ended, &app)).await;
}

enum Mode {
    Plain,
    /// The encoding is known once `open` has come.
    Framed(Encoding),
}

struct WebSocketEdge {
    socket: WebSocketStream<Watched>,
    mode: Mode,
    /// Told and not flushed, in bytes.
    waiting_bytes: usize,
    /// While a flush waits: until when the socket must take a byte, and how many it had taken.
    stall: Option<(Pin<Box<Sleep>>, u64)>,
    write_timeout: Duration,
    /// While a message has begun.
    progress: Progress,
    ping: Interval,
    /// When the last tick was that found bytes of the producer, and how far they had come then.
    heard_at: Instant,
    heard: u64,
    /// The producer has begun to close. The answer is written with the next touch of the socket, so it is not
    /// touched until all is durable.
    closing: bool,
    broken: Option<&'static str>,
}

impl WebSocketEdge {
    async fn new(socket: Socket, buffered: Vec<u8>, framed: bool, app: &App) -> Self {
        let message_max =
            app.config.frame_bytes_max.as_usize() + if framed { RECORDS_HEADER_BYTES } else { 0 };
        let limits = WebSocketConfig::default()
            .read_buffer_size(READ_BUFFER_BYTES)
            .write_buffer_size(WRITE_BUFFER_BYTES)
            .max_write_buffer_size(WRITE_BUFFER_BYTES_MAX)
            .max_message_size(Some(message_max))
            .max_frame_size(Some(message_max));
        let socket = Watched::new(socket, &buffered);
        let socket = WebSocketStream::from_partially_read(socket, buffered, Role::Server, Some(limits)).await;
        let mut ping = tokio::time::interval_at(Instant::now() + PING_INTERVAL, PING_INTERVAL);
        ping.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Self {
            socket,
            mode: if framed { Mode::Framed(Encoding::Json) } else { Mode::Plain },
            waiting_bytes: 0,
            stall: None,
            write_timeout: app.config.write_timeout(),
            progress: Progress::new(app.config.read_timeout(), FRAME_STEP_BYTES),
            ping,
            heard_at: Instant::now(),
            heard: 0,
            closing: false,
            broken: None,
        }
    }

    /// What the stream is to be opened with: in `sluice.v1` the first frame says it.
    async fn terms(&mut self, request: Request, app: &App) -> Result<OpenTerms, Ended> {
        if !request.framed {
            let open = Open {
                table: None,
                name: None,
                encoding: Encoding::Json,
                unknown: request.unknown,
                ..no_open()
            };
            return open_terms(open, request).map_err(Ended::Failed);
        }
        let message = tokio::select! {
            biased; // cancel first: the producer may never say anything
            () = app.scope.draining() => return Err(Ended::Failed(session::going_away())),
            message = timeout(app.config.handshake_timeout(), self.first_message()) => message,
        };
        let Ok(message) = message else {
            let after = app.config.handshake_timeout();
            return Err(Ended::Failed(framed::expected_open(&format!("nothing within {after:?}"))));
        };
        let open = read_open(message?).map_err(Ended::Failed)?;
        self.mode = Mode::Framed(open.encoding);
        open_terms(open, request).map_err(Ended::Failed)
    }

    async fn first_message(&mut self) -> Result<Message, Ended> {
        loop {
            match self.socket.next().await {
                Some(Ok(Message::Ping(_) | Message::Pong(_))) => {}
                Some(Ok(Message::Close(_))) => {
                    self.closing = true;
                    return Err(Ended::Closed);
                }
                Some(Ok(message)) => return Ok(message),
                Some(Err(error)) => {
                    return Err(match self.read_failure(&error) {
                        Input::Refused(error) => Ended::Failed(error),
                        _ => Ended::Gone,
                    });
                }
                None => return Err(Ended::Gone),
            }
        }
    }

    fn poll(&mut self, cx: &mut Context<'_>, read: bool) -> Poll<Input> {
        if let Some(why) = self.broken {
            return Poll::Ready(Input::Gone(why));
        }
        // Writing first: acks let the producer go on.
        if let Poll::Ready(input) = self.poll_flush(cx) {
            return Poll::Ready(input);
        }
        if read {
            if let Poll::Ready(input) = self.poll_read(cx) {
                return Poll::Ready(input);
            }
        } else {
            // What is not read cannot be held against the producer.
            self.heard_at = Instant::now();
            self.progress.rest();
        }
        self.poll_ping(cx)
    }

    fn poll_flush(&mut self, cx: &mut Context<'_>) -> Poll<Input> {
        if self.waiting_bytes == 0 {
            return Poll::Pending;
        }
        match self.socket.poll_flush_unpin(cx) {
            Poll::Ready(Ok(())) => {
                self.waiting_bytes = 0;
                self.stall = None;
                Poll::Ready(Input::Cleared)
            }
            Poll::Ready(Err(_)) => Poll::Ready(Input::Gone("connection lost while writing")),
            Poll::Pending => self.poll_stall(cx),
        }
    }

    fn poll_stall(&mut self, cx: &mut Context<'_>) -> Poll<Input> {
        let written = self.socket.get_ref().socket.written();
        if self.stall.as_ref().is_none_or(|(_, before)| *before != written) {
            self.stall = Some((Box::pin(sleep(self.write_timeout)), written));
        }
        let Some((deadline, _)) = &mut self.stall else { return Poll::Pending };
        ready!(deadline.as_mut().poll(cx));
        self.broken = Some(SLOW_CONSUMER);
        Poll::Ready(Input::Gone(SLOW_CONSUMER))
    }

    fn poll_read(&mut self, cx: &mut Context<'_>) -> Poll<Input> {
        loop {
            let message = match self.socket.poll_next_unpin(cx) {
                Poll::Ready(Some(Ok(message))) => message,
                Poll::Ready(Some(Err(error))) => return Poll::Ready(self.read_failure(&error)),
                Poll::Ready(None) => return Poll::Ready(Input::Gone(CONNECTION_LOST)),
                Poll::Pending => return self.poll_progress(cx),
            };
            let input = match (message, &self.mode) {
                (Message::Close(_), _) => {
                    self.closing = true;
                    Some(Input::Closed)
                }
                (Message::Text(text), Mode::Plain) => plain_records(text),
                (Message::Binary(_), Mode::Plain) => Some(Input::Refused(binary_in_plain_mode())),
                (Message::Binary(bytes), Mode::Framed(encoding)) => Some(framed::input(bytes, *encoding)),
                (Message::Text(_), Mode::Framed(_)) => Some(Input::Refused(text_in_framed_mode())),
                (Message::Ping(_) | Message::Pong(_) | Message::Frame(_), _) => None,
            };
            if let Some(input) = input {
                return Poll::Ready(input);
            }
        }
    }

    /// A message that has begun must go on; between messages a stream may be silent for ever.
    fn poll_progress(&mut self, cx: &mut Context<'_>) -> Poll<Input> {
        let frames = &self.socket.get_ref().frames;
        if !frames.has_begun() {
            return Poll::Pending;
        }
        ready!(self.progress.poll(cx, frames.moved, false));
        Poll::Ready(Input::Refused(framed::frame_timeout()))
    }

    fn read_failure(&self, error: &SocketError) -> Input {
        if self.socket.get_ref().is_flooded {
            let message = format!("a message in more than {FRAGMENTS_MAX} fragments: send larger ones");
            return Input::Refused(Error::invalid(TOO_MANY_FRAGMENTS, message));
        }
        read_failure(error)
    }

    fn poll_ping(&mut self, cx: &mut Context<'_>) -> Poll<Input> {
        ready!(self.ping.poll_tick(cx));
        let moved = self.socket.get_ref().frames.moved;
        if moved != self.heard {
            (self.heard, self.heard_at) = (moved, Instant::now());
        }
        if self.heard_at.elapsed() > SILENCE_MAX {
            return Poll::Ready(Input::Gone("no answer to pings"));
        }
        if self.has_room() {
            self.write(Message::Ping(Bytes::new()));
        }
        // The caller comes again: to flush, and to wait for the next tick.
        Poll::Ready(Input::Cleared)
    }

    fn write(&mut self, message: Message) {
        // Where the socket would block the message waits in its buffer, which has room: see `TELL_BYTES`.
        self.waiting_bytes += message.len() + 16;
        if self.socket.start_send_unpin(message).is_err() {
            self.broken = Some("connection lost while writing");
        }
    }

    /// Ends the connection as the session did.
    async fn close(mut self, ended: Ended, app: &App) {
        if self.broken == Some(SLOW_CONSUMER) {
            let message = format!("took no bytes for {:?}", self.write_timeout);
            app.metrics.error(&Error::busy("slow_consumer", message, Duration::ZERO));
            return;
        }
        let (code, reason) = match ended {
            Ended::Gone => return,
            // The answer to the close, which waits in the socket, says that all is durable.
            Ended::Closed => (None, String::new()),
            // It must not be said, so there is no answer at all.
            Ended::Failed(error) if self.closing => return app.metrics.error(&error),
            Ended::Finished if self.closing => (None, String::new()),
            Ended::Finished => (Some(1000), String::new()),
            Ended::Failed(error) => {
                tracing::info!(code = error.code, %error, "stream refused");
                app.metrics.error(&error);
                let code = close_code(&error);
                self.tell(&GatewayFrame::Error(error.clone()));
                (Some(code), error.code)
            }
        };
        self.leave(code, reason).await;
    }

    /// Closes with a code, or answers the producer's close.
    async fn leave(mut self, code: Option<u16>, reason: String) {
        if let Some(code) = code {
            let close = CloseFrame { code: code.into(), reason: reason.into() };
            self.write(Message::Close(Some(close)));
        }
        let deadline = self.write_timeout;
        let left = timeout(deadline, self.socket.flush()).await;
        if matches!(left, Ok(Ok(()))) {
            self.linger().await;
        }
    }

    async fn linger(mut self) {
        let socket = &mut self.socket.get_mut().socket;
        let rest = async {
            socket.shutdown().await?;
            let mut buffer = vec![0; READ_BUFFER_BYTES];
            while socket.read(&mut buffer).await? > 0 {}
            Ok::<_, std::io::Error>(())
        };
        // Nothing is owed to the producer any more, whatever comes of this.
        let _ = timeout(LINGER, rest).await;
    }
}

const SLOW_CONSUMER: &str = "slow_consumer";
const CONNECTION_LOST: &str = "connection lost";

impl Edge for WebSocketEdge {
    async fn next(&mut self, read: bool) -> Input {
        if self.closing {
            return std::future::pending().await;
        }
        std::future::poll_fn(|cx| self.poll(cx, read)).await
    }

    fn has_room(&self) -> bool {
        self.waiting_bytes < TELL_BYTES || self.closing
    }

    fn is_clear(&self) -> bool {
        self.waiting_bytes == 0 || self.closing
    }

    fn tell(&mut self, frame: &GatewayFrame) {
        // After its close a producer takes nothing more in.
        if self.closing {
            return;
        }
        match self.mode {
            Mode::Framed(_) => self.write(Message::Binary(frame.encode())),
            Mode::Plain => {
                for text in plain_texts(frame) {
                    self.write(Message::Text(text.into()));
                }
            }
        }
    }
}

/// A frame for the producer as JSON texts.
fn plain_texts(frame: &GatewayFrame) -> Vec<String> {
    let text = |value: serde_json::Value| vec![value.to_string()];
    match frame {
        GatewayFrame::Opened(opened) => {
            text(json!({"stream": opened.stream, "next_offset": opened.next_offset}))
        }
        GatewayFrame::Rejected(rejected) => text(json!({"rejected": rejected})),
        GatewayFrame::Move(moving) => text(json!({"move": moving})),
        GatewayFrame::Error(error) => text(json!({"error": error})),
        GatewayFrame::Ack(Ack { durable, committed, version }) => {
            let durable = durable.map(|durable| format!("{{\"durable\":{durable}}}"));
            let version = version.unwrap_or_default();
            let committed =
                committed.map(|committed| format!("{{\"committed\":{committed},\"version\":{version}}}"));
            durable.into_iter().chain(committed).collect()
        }
    }
}

/// None where the text holds no record.
fn plain_records(text: Utf8Bytes) -> Option<Input> {
    let lines = json_text::split(text.into());
    match lines.count {
        Some(0) => None,
        Some(count) => Some(Input::Records(Records { first_offset: None, count, payload: lines.payload })),
        None => Some(Input::Refused(too_many_records())),
    }
}

fn read_open(message: Message) -> Result<Open, Error> {
    match message {
        Message::Binary(bytes) => framed::open(bytes),
        Message::Text(_) => Err(text_in_framed_mode()),
        _ => Err(framed::expected_open("a control frame")),
    }
}

/// What the `open` frame says together with the URL.
fn open_terms(mut open: Open, request: Request) -> Result<OpenTerms, Error> {
    if let Some(table) = open.table.take().filter(|table| *table != request.table) {
        let message = format!("`open` names table {table}, the URL {}: they must agree", request.table);
        return Err(Error::invalid("table_mismatch", message));
    }
    if let (Some(name), Some(in_url)) = (&open.name, &request.name)
        && name != in_url
    {
        let message = format!("`open` names stream {name:?}, the URL {in_url:?}: they must agree");
        return Err(Error::invalid("stream_name_mismatch", message));
    }
    open.name = open.name.or(request.name);
    open.resume_at = open.resume_at.or(request.resume_at);
    if request.unknown == UnknownFields::Ignore {
        open.unknown = UnknownFields::Ignore;
    }
    let mut terms = framed::terms(open, request.table)?;
    if request.credential.is_given() {
        terms.right = Right::Claimed(request.credential);
    }
    Ok(terms)
}

fn no_open() -> Open {
    Open {
        table: None,
        name: None,
        resume_at: None,
        encoding: Encoding::Json,
        unknown: UnknownFields::Refuse,
        schema: None,
        token: None,
        rate_bytes_per_s: None,
    }
}

fn read_failure(error: &SocketError) -> Input {
    match error {
        SocketError::Capacity(CapacityError::MessageTooLong { size, max_size }) => {
            let message = format!("message of {size} bytes: the limit is {max_size}; send smaller messages");
            Input::Refused(Error::invalid(RECORD_TOO_LARGE, message))
        }
        SocketError::Utf8(why) => {
            let message = format!("text message that is not UTF-8: {why}");
            Input::Refused(Error::invalid(INVALID_UTF8, message))
        }
        SocketError::Protocol(ProtocolError::ResetWithoutClosingHandshake) => Input::Gone(CONNECTION_LOST),
        SocketError::Protocol(why) => {
            Input::Refused(Error::invalid(WEBSOCKET_PROTOCOL, format!("not the WebSocket protocol: {why}")))
        }
        _ => Input::Gone(CONNECTION_LOST),
    }
}

const RECORD_TOO_LARGE: &str = "record_too_large";
const TOO_MANY_FRAGMENTS: &str = "too_many_fragments";
const INVALID_UTF8: &str = "invalid_utf8";
const WEBSOCKET_PROTOCOL: &str = "websocket_protocol";

/// RFC 6455 has codes of its own for some errors; all others have those of their kind.
fn close_code(error: &Error) -> u16 {
    match error.code.as_str() {
        _ if error.kind != ErrorKind::Invalid => error.kind.websocket_close_code(),
        RECORD_TOO_LARGE | TOO_MANY_FRAGMENTS => 1009,
        INVALID_UTF8 => 1007,
        WEBSOCKET_PROTOCOL => 1002,
        _ => error.kind.websocket_close_code(),
    }
}

fn binary_in_plain_mode() -> Error {
    let message = "binary message on a plain connection: send JSON texts, or offer the subprotocol sluice.v1";
    Error::invalid("binary_in_plain_mode", message)
}

fn text_in_framed_mode() -> Error {
    let message = "text message on a sluice.v1 connection: send binary frames, or offer no subprotocol";
    Error::invalid("text_in_framed_mode", message)
}

fn too_many_records() -> Error {
    Error::invalid(
        "too_many_records",
        "more records in one message than can be counted: send smaller messages",
    )
}
