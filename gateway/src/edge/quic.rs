//! QUIC, ALPN `sluice/1`: each bidirectional stream carries one stream, in frames of `sluice.v1` behind their lengths.
//!
//! A stream in good order ends by the FIN of both sides; another one by an `error` frame and a FIN, and the producer is
//! asked to stop sending with the error's code. Where nothing can be told the stream is reset: a FIN always says that
//! all went well, or was told.
//!
//! *Owns*: the UDP endpoint and its limits, handshakes, connections, the write deadline of each stream, codes.
//! *Does not own*: what frames mean (`framed`), offsets and acks (`session`), the certificate's files (`certificate`).
//! Keeps P7: windows, streams and handshakes are bounded, and a producer that takes no bytes is closed.

use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use quinn::crypto::rustls::QuicServerConfig;
use quinn::{
    Endpoint, EndpointConfig, IdleTimeout, Incoming, ReadError, RecvStream, SendStream, VarInt, WriteError,
};
use rustls::version::TLS13;
use sluice_shared::error::{Error, ErrorKind, QUIC_OK};
use sluice_shared::frame::{
    Encoding, FinishWhen, GatewayFrame, QUIC_ALPN, QUIC_DATAGRAM_BYTES_MAX, RECORDS_HEADER_BYTES,
};
use sluice_shared::prefixed::{FrameReader, prefix};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Sleep, sleep, timeout};
use tokio_util::task::TaskTracker;

use crate::app::{App, Connection, Pause};
use crate::certificate::Certificate;
use crate::edge::framed;
use crate::progress::{FRAME_STEP_BYTES, Progress};
use crate::session::{self, Edge, Ended, Input};
use crate::upstream::OpenTerms;

/// What a producer may send on one stream before it is read: at 100 ms a stream carries 20 MB/s.
const STREAM_WINDOW_BYTES: u32 = 2 << 20;
/// The same for a connection; unlimited unless set. Streams that are not read for a while hold their part of it.
const CONNECTION_WINDOW_BYTES: u32 = 16 << 20;
/// What a connection's acks may take until its producer has received them.
const SEND_WINDOW_BYTES: u64 = 1 << 20;
const STREAMS_PER_CONNECTION_MAX: u32 = 1000;
/// A connection that is silent for so long is gone. The shorter one of both sides' counts.
const IDLE_TIMEOUT_MS: u32 = 60_000;
/// Also keeps the mappings of NATs, many of which last for 30 s.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(15);
/// Handshakes at one time.
const HANDSHAKES_MAX: usize = 1024;
/// Above this many, clients have to prove their address first, which costs them a round trip and us no memory.
const HANDSHAKES_UNPROVEN_MAX: usize = 64;
/// Packets of clients whose handshake has not begun.
const INCOMING_BYTES_MAX: u64 = 8 << 20;
/// Bytes that may wait for the transport before a session keeps its news to itself.
const TELL_BYTES: usize = 32 << 10;
/// Taken from the transport at a time; each is of one packet.
const CHUNKS_PER_READ: usize = 32;

const SLOW_CONSUMER: &str = "slow_consumer";
const CONNECTION_LOST: &str = "connection lost";
const RESET: &str = "the producer reset the stream";
const STOPPED: &str = "the producer takes no more answers";

/// Binds the endpoint and serves it. None where QUIC is off.
///
/// # Errors
/// `Invalid` for a certificate that is none; `Unavailable` where it cannot bind.
pub(crate) async fn start(
    certificate: Option<&Arc<Certificate>>,
    app: &Arc<App>,
) -> Result<Option<SocketAddr>, Error> {
    let Some(listen) = app.config.quic_address() else {
        tracing::info!("QUIC is off");
        return Ok(None);
    };
    let Some(certificate) = certificate else {
        tracing::info!("QUIC is off: it needs a certificate (gateway.tls_cert, gateway.tls_key)");
        return Ok(None);
    };
    let failed = |error: std::io::Error| {
        let key = if app.config.quic_listen.is_some() { "gateway.quic_listen" } else { "gateway.listen" };
        let message = format!("cannot listen on {listen} over UDP ({key}, for QUIC): {error}");
        Error::unavailable("cannot_listen", message)
    };
    let socket = tokio::net::UdpSocket::bind(listen).await.and_then(tokio::net::UdpSocket::into_std);
    let runtime = Arc::new(quinn::TokioRuntime);
    let config = server_config(certificate)?;
    // Its own tasks end by themselves when the endpoint and the connections are dropped; they hold nothing of ours.
    let endpoint = socket
        .and_then(|socket| {
            let mut endpoint = EndpointConfig::default();
            endpoint
                .max_udp_payload_size(QUIC_DATAGRAM_BYTES_MAX)
                .expect("more than the least that QUIC asks for");
            Endpoint::new(endpoint, Some(config), socket, runtime)
        })
        .map_err(failed)?;
    let address = endpoint.local_addr().map_err(failed)?;
    app.scope.spawn("quic accept", accept(endpoint, Arc::clone(app)));
    tracing::info!(%address, "gateway listens for QUIC");
    Ok(Some(address))
}

fn server_config(certificate: &Arc<Certificate>) -> Result<quinn::ServerConfig, Error> {
    let tls = certificate.tls(&[&TLS13], &[QUIC_ALPN])?;
    let crypto = QuicServerConfig::try_from(tls)
        .map_err(|error| Error::internal(format!("TLS configuration: {error}")))?;
    let mut config = quinn::ServerConfig::with_crypto(Arc::new(crypto));
    config
        .migration(true)
        .max_incoming(HANDSHAKES_MAX)
        .incoming_buffer_size_total(INCOMING_BYTES_MAX)
        .transport_config(Arc::new(transport_config()));
    Ok(config)
}

fn transport_config() -> quinn::TransportConfig {
    let mut config = quinn::TransportConfig::default();
    config
        // Acks of streams are short: a packet for each, in turn, would be many packets.
        .send_fairness(false)
        .max_concurrent_bidi_streams(STREAMS_PER_CONNECTION_MAX.into())
        .max_concurrent_uni_streams(0_u32.into())
        .datagram_receive_buffer_size(None)
        .stream_receive_window(STREAM_WINDOW_BYTES.into())
        .receive_window(CONNECTION_WINDOW_BYTES.into())
        .send_window(SEND_WINDOW_BYTES)
        .max_idle_timeout(Some(IdleTimeout::from(VarInt::from_u32(IDLE_TIMEOUT_MS))))
        .keep_alive_interval(Some(KEEP_ALIVE_INTERVAL));
    config
}

async fn accept(endpoint: Endpoint, app: Arc<App>) {
    let handshakes = Arc::new(Semaphore::new(HANDSHAKES_MAX));
    loop {
        let incoming = tokio::select! {
            biased; // drain first: a storm of connections must not hold it up
            () = app.scope.draining() => break,
            incoming = endpoint.accept() => incoming,
        };
        let Some(incoming) = incoming else { return };
        let open = HANDSHAKES_MAX - handshakes.available_permits();
        if open >= HANDSHAKES_UNPROVEN_MAX && !incoming.remote_address_validated() && incoming.may_retry() {
            // It fails only where the address is proven.
            let _ = incoming.retry();
            continue;
        }
        let place = app.place(incoming.remote_address().ip()).inspect_err(|error| app.metrics.error(error));
        match (Arc::clone(&handshakes).try_acquire_owned(), place) {
            (Ok(handshake), Ok(place)) => {
                let connection = connection(incoming, handshake, place, Arc::clone(&app));
                app.scope.spawn("quic connection", connection);
            }
            _ => incoming.refuse(),
        }
    }
    endpoint.set_server_config(None);
    tokio::select! {
        biased; // cancel first: it waits for nobody
        () = app.scope.cancelled() => endpoint.close(code(ErrorKind::Unavailable), b"gateway_draining"),
        // Until the last close has left.
        () = endpoint.wait_idle() => {}
    }
}

fn code(kind: ErrorKind) -> VarInt {
    VarInt::from_u32(kind.quic_code())
}

/// A connection from its handshake on: each of its streams runs for itself.
async fn connection(incoming: Incoming, handshake: OwnedSemaphorePermit, place: Connection, app: Arc<App>) {
    let Ok(connecting) = incoming.accept() else { return };
    let connection = tokio::select! {
        biased; // drain first: the client may never say anything
        () = app.scope.draining() => return,
        connection = timeout(app.config.handshake_timeout(), connecting) => connection,
    };
    let connection = match connection {
        Ok(Ok(connection)) => connection,
        Ok(Err(error)) => {
            app.metrics.error(&Error::invalid("quic_handshake", error.to_string()));
            return tracing::debug!(%error, "QUIC handshake failed");
        }
        Err(_) => return tracing::debug!("a QUIC handshake that did not end"),
    };
    drop(handshake);
    let streams = TaskTracker::new();
    loop {
        let accepted = tokio::select! {
            biased; // drain first: a storm of streams must not hold it up
            () = app.scope.draining() => break,
            accepted = connection.accept_bi() => accepted,
        };
        let Ok((send, recv)) = accepted else { break };
        let edge = QuicEdge::new(send, recv, Pause::of(place.clone()), &app);
        let (token, place, app) = (streams.token(), place.clone(), Arc::clone(&app));
        app.scope.clone().spawn("quic stream", async move {
            serve(edge, app).await;
            drop((token, place));
        });
    }
    streams.close();
    tokio::select! {
        biased; // cancel first: it waits for nobody
        () = app.scope.cancelled() => {}
        () = streams.wait() => {}
    }
    connection.close(code(ErrorKind::Unavailable), b"gateway_draining");
}

/// Speaks to one producer until one side ends the stream.
async fn serve(mut edge: QuicEdge, app: Arc<App>) {
    let ended = match edge.terms(&app).await {
        Ok(terms) => Box::pin(session::run(&mut edge, &app, terms)).await,
        Err(ended) => ended,
    };
    edge.close(ended, &app).await;
}

type Stopped = Pin<Box<dyn Future<Output = &'static str> + Send>>;

struct QuicEdge {
    send: SendStream,
    recv: RecvStream,
    /// Resolves when the producer takes nothing more, or is gone; not polled again once `gone` is set.
    stopped: Stopped,
    frames: FrameReader,
    /// Known once `open` has come.
    encoding: Encoding,
    /// Told, and not yet taken by the transport.
    waiting: BytesMut,
    /// While the transport takes nothing: until when it must.
    stall: Option<Pin<Box<Sleep>>>,
    /// While a frame has begun.
    progress: Progress,
    pause: Pause,
    /// Rises with every byte, and by a whole step with every frame.
    moved: u64,
    write_timeout: Duration,
    /// The producer said `finish`.
    finished: bool,
    /// Its FIN was read.
    at_end: bool,
    /// All of it has come, read or not: it cannot be reset any more.
    is_whole: bool,
    gone: Option<&'static str>,
    /// Its end has been told, one way or the other.
    closed: bool,
}

impl QuicEdge {
    fn new(send: SendStream, recv: RecvStream, pause: Pause, app: &App) -> Self {
        let stopped = send.stopped();
        let stopped = async move {
            match stopped.await {
                Ok(_) => STOPPED,
                Err(_) => CONNECTION_LOST,
            }
        };
        Self {
            send,
            recv,
            stopped: Box::pin(stopped),
            frames: FrameReader::new(app.config.frame_bytes_max.as_usize() + RECORDS_HEADER_BYTES),
            encoding: Encoding::Json,
            waiting: BytesMut::new(),
            stall: None,
            progress: Progress::new(app.config.read_timeout(), FRAME_STEP_BYTES),
            pause,
            moved: 0,
            write_timeout: app.config.write_timeout(),
            finished: false,
            at_end: false,
            is_whole: false,
            gone: None,
            closed: false,
        }
    }

    /// What the stream is to be opened with: the first frame says it.
    async fn terms(&mut self, app: &App) -> Result<OpenTerms, Ended> {
        let first = tokio::select! {
            biased; // drain first: the producer may never say anything
            () = app.scope.draining() => return Err(Ended::Failed(session::going_away())),
            first = timeout(app.config.handshake_timeout(), self.first_frame()) => first,
        };
        let Ok(first) = first else {
            let after = app.config.handshake_timeout();
            return Err(Ended::Failed(framed::expected_open(&format!("nothing within {after:?}"))));
        };
        let mut open = framed::open(first?).map_err(Ended::Failed)?;
        self.encoding = open.encoding;
        let table = open.table.take().ok_or_else(|| {
            let message = "`open` names no table: over QUIC there is no URL that does";
            Ended::Failed(Error::invalid("missing_table", message))
        })?;
        framed::terms(open, table).map_err(Ended::Failed)
    }

    async fn first_frame(&mut self) -> Result<Bytes, Ended> {
        let taken = std::future::poll_fn(|cx| self.poll_frame(cx)).await;
        match taken {
            Ok(Some(frame)) => Ok(frame),
            Ok(None) => Err(Ended::Failed(framed::expected_open("the end of the stream"))),
            Err(Input::Refused(error)) => Err(Ended::Failed(error)),
            Err(_) => Err(Ended::Gone),
        }
    }

    fn poll(&mut self, cx: &mut Context<'_>, read: bool) -> Poll<Input> {
        if let Some(why) = self.gone {
            return Poll::Ready(Input::Gone(why));
        }
        // Writing first: acks let the producer go on.
        if let Poll::Ready(input) = self.poll_write(cx) {
            return Poll::Ready(input);
        }
        self.pause.set(!read);
        let input = if read {
            self.poll_read(cx)
        } else {
            self.progress.rest();
            self.poll_reset(cx)
        };
        if input.is_ready() {
            return input;
        }
        // Last, since it takes a lock; what is lost is seen whenever there is nothing to read.
        let why = ready!(self.stopped.as_mut().poll(cx));
        Poll::Ready(self.is_gone(why))
    }

    fn is_gone(&mut self, why: &'static str) -> Input {
        self.gone = Some(why);
        Input::Gone(why)
    }

    fn poll_write(&mut self, cx: &mut Context<'_>) -> Poll<Input> {
        if self.waiting.is_empty() {
            return Poll::Pending;
        }
        while !self.waiting.is_empty() {
            let written = match Pin::new(&mut self.send).poll_write(cx, &self.waiting) {
                Poll::Ready(Ok(written)) => written,
                Poll::Ready(Err(WriteError::Stopped(_))) => return Poll::Ready(self.is_gone(STOPPED)),
                Poll::Ready(Err(_)) => return Poll::Ready(self.is_gone(CONNECTION_LOST)),
                Poll::Pending => return self.poll_stall(cx),
            };
            self.waiting.advance(written);
            self.stall = None;
        }
        Poll::Ready(Input::Cleared)
    }

    fn poll_stall(&mut self, cx: &mut Context<'_>) -> Poll<Input> {
        let deadline = self.stall.get_or_insert_with(|| Box::pin(sleep(self.write_timeout)));
        ready!(deadline.as_mut().poll(cx));
        Poll::Ready(self.is_gone(SLOW_CONSUMER))
    }

    fn poll_read(&mut self, cx: &mut Context<'_>) -> Poll<Input> {
        if self.at_end {
            return Poll::Pending;
        }
        match ready!(self.poll_frame(cx)) {
            Ok(Some(frame)) => {
                let input = framed::input(frame, self.encoding);
                self.finished |= matches!(input, Input::Finish(_));
                Poll::Ready(input)
            }
            // Who has said so before adds nothing by it.
            Ok(None) if self.finished => Poll::Pending,
            Ok(None) => {
                self.finished = true;
                Poll::Ready(Input::Finish(FinishWhen::Durable))
            }
            Err(input) => Poll::Ready(input),
        }
    }

    /// The next frame, or None at the end of the stream.
    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Bytes>, Input>> {
        loop {
            match self.frames.next_frame() {
                Ok(None) => {}
                Ok(Some(frame)) => {
                    self.moved += FRAME_STEP_BYTES;
                    return Poll::Ready(Ok(Some(frame)));
                }
                Err(error) => return Poll::Ready(Err(Input::Refused(error))),
            }
            let mut chunks = [const { Bytes::new() }; CHUNKS_PER_READ];
            let Poll::Ready(read) = pin!(self.recv.read_chunks(&mut chunks)).poll(cx) else {
                return self.poll_progress(cx).map(Err);
            };
            match read {
                Ok(Some(count)) => {
                    for chunk in &chunks[..count] {
                        self.moved += chunk.len() as u64;
                        self.frames.push(chunk);
                    }
                }
                Ok(None) => {
                    (self.at_end, self.is_whole) = (true, true);
                    return Poll::Ready(if self.frames.is_empty() { Ok(None) } else { Err(cut_short()) });
                }
                Err(ReadError::Reset(_)) => return Poll::Ready(Err(self.is_gone(RESET))),
                Err(_) => return Poll::Ready(Err(self.is_gone(CONNECTION_LOST))),
            }
        }
    }

    /// A frame that has begun must go on; between frames a stream may be silent for ever.
    fn poll_progress(&mut self, cx: &mut Context<'_>) -> Poll<Input> {
        if self.frames.is_empty() {
            return Poll::Pending;
        }
        // What the connection's other streams do not read keeps this one's bytes away.
        ready!(self.progress.poll(cx, self.moved, self.pause.excuses()));
        Poll::Ready(Input::Refused(framed::frame_timeout()))
    }

    /// Sees a reset without reading.
    fn poll_reset(&mut self, cx: &mut Context<'_>) -> Poll<Input> {
        if self.is_whole {
            return Poll::Pending;
        }
        let reset = ready!(pin!(self.recv.received_reset()).poll(cx));
        match reset {
            Ok(None) => {
                self.is_whole = true;
                Poll::Pending
            }
            Ok(Some(_)) => Poll::Ready(self.is_gone(RESET)),
            Err(_) => Poll::Ready(self.is_gone(CONNECTION_LOST)),
        }
    }

    /// Ends the stream as the session did.
    async fn close(mut self, ended: Ended, app: &App) {
        if self.gone == Some(SLOW_CONSUMER) {
            let message = format!("took no bytes for {:?}", self.write_timeout);
            let error = Error::busy(SLOW_CONSUMER, message, Duration::ZERO);
            tracing::info!(code = error.code, %error, "stream refused");
            app.metrics.error(&error);
            return self.reset(ErrorKind::Busy);
        }
        let asked_to_stop = match ended {
            Ended::Finished => VarInt::from_u32(QUIC_OK),
            // A producer that is gone, and a close without an answer.
            Ended::Gone | Ended::Closed => return self.reset(ErrorKind::Unavailable),
            Ended::Failed(error) => {
                tracing::info!(code = error.code, %error, "stream refused");
                app.metrics.error(&error);
                self.tell(&GatewayFrame::Error(error.clone()));
                code(error.kind)
            }
        };
        tokio::select! {
            biased; // cancel first: it waits for nobody
            () = app.scope.cancelled() => {}
            _ = timeout(self.write_timeout, self.tell_end(asked_to_stop)) => {}
        }
    }

    /// Writes what waits and the FIN, and waits until the producer has them.
    async fn tell_end(&mut self, asked_to_stop: VarInt) {
        while !self.waiting.is_empty() {
            match self.send.write(&self.waiting).await {
                Ok(written) => self.waiting.advance(written),
                Err(_) => return,
            }
        }
        // Where the streams are closed already there is nothing left to say.
        let _ = self.send.finish();
        let _ = self.recv.stop(asked_to_stop);
        self.closed = true;
        let _ = self.send.stopped().await;
    }

    fn reset(&mut self, kind: ErrorKind) {
        // Where the streams are closed already there is nothing left to say.
        let _ = self.send.reset(code(kind));
        let _ = self.recv.stop(code(kind));
        self.closed = true;
    }
}

impl Drop for QuicEdge {
    /// A stream that is dropped, be it by a panic, would end with a FIN, as if all were well.
    fn drop(&mut self) {
        if !self.closed {
            self.reset(ErrorKind::Internal);
        }
    }
}

impl Edge for QuicEdge {
    async fn next(&mut self, read: bool) -> Input {
        std::future::poll_fn(|cx| self.poll(cx, read)).await
    }

    fn has_room(&self) -> bool {
        self.waiting.len() < TELL_BYTES
    }

    fn is_clear(&self) -> bool {
        self.waiting.is_empty()
    }

    fn tell(&mut self, frame: &GatewayFrame) {
        let frame = frame.encode();
        self.waiting.extend_from_slice(&prefix(&frame));
        self.waiting.extend_from_slice(&frame);
    }
}

fn cut_short() -> Input {
    let message = "the stream ended within a frame: its length promised more";
    Input::Refused(Error::invalid("truncated_frame", message))
}
