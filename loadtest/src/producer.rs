//! Bare producers for the bench: `sluice.v1` over a raw WebSocket, with frames that were encoded beforehand, so that
//! the figures are the service's and not those of a client.
//!
//! *Owns*: sending at a pace within a window, the time from a frame's sending to each of its answers.
//! *Does not own*: resuming: a lost connection ends the run with an error.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use bytes::Bytes;
use futures_util::stream::{SplitSink, SplitStream};
use futures_util::{SinkExt, StreamExt};
use hdrhistogram::Histogram;
use sluice_shared::frame::{
    Ack, Encoding, Finish, FinishWhen, GatewayFrame, Open, Opened, ProducerFrame, SUBPROTOCOL,
};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio::time::MissedTickBehavior;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;
use tokio_tungstenite::tungstenite::http::HeaderValue;
use tokio_tungstenite::tungstenite::protocol::WebSocketConfig;
use tokio_tungstenite::{MaybeTlsStream, WebSocketStream, connect_async_with_config};

/// A thousand connections with the default of 128 KiB each would measure the machine's memory.
const READ_BUFFER_BYTES: usize = 8 << 10;
/// Latencies above are counted as this.
const LATENCY_US_MAX: u64 = 120_000_000;
/// The window is counted in units of so many bytes.
const WINDOW_UNIT_BYTES: usize = 1 << 10;

type Socket = WebSocketStream<MaybeTlsStream<TcpStream>>;

/// Records that go out together, encoded.
#[derive(Debug, Clone)]
pub struct Frame {
    /// How many.
    pub rows: u32,
    /// Their bytes.
    pub payload: Bytes,
}

/// When the next frame goes out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pace {
    /// As soon as the window has room.
    Full,
    /// At this interval.
    Each(Duration),
    /// As soon as fewer frames than this are not durable yet: with one, each waits for the one before.
    UnderWay(u16),
}

/// Times from sending to an answer, in µs, of all streams of a run.
#[derive(Debug, Clone)]
pub struct Latencies {
    /// To durable.
    pub ack: Histogram<u64>,
    /// To committed.
    pub committed: Histogram<u64>,
}

impl Latencies {
    /// None yet.
    ///
    /// # Errors
    /// Never: the bounds are constants.
    pub fn new() -> anyhow::Result<Self> {
        let histogram = Histogram::new_with_bounds(1, LATENCY_US_MAX, 3)?;
        Ok(Self { ack: histogram.clone(), committed: histogram })
    }
}

/// What a stream did.
#[derive(Debug, Clone, Copy)]
pub struct Sent {
    /// Records, all of them committed.
    pub records: u64,
    /// Their payload.
    pub bytes: u64,
    /// When the last of them was known to be durable.
    pub durable_at: Instant,
}

/// An open stream on a connection of its own.
pub struct Producer {
    socket: Socket,
    opened: Opened,
}

/// A stream that has nothing more to say and stays open.
pub struct Idle {
    _socket: Socket,
}

/// A frame under way.
struct UnderWay {
    last_offset: u64,
    units: usize,
    sent_at: Instant,
}

/// What writer and reader of one stream share. They are one task: the lock is never contended.
struct Flight {
    room: Semaphore,
    queues: Mutex<Queues>,
}

#[derive(Default)]
struct Queues {
    undurable: VecDeque<UnderWay>,
    uncommitted: VecDeque<(u64, Instant)>,
    durable_at: Option<Instant>,
    finished: bool,
}

impl Producer {
    /// Connects and opens an ephemeral stream.
    ///
    /// # Errors
    /// No connection; the gateway refuses.
    pub async fn open(url: &str, table: &str, encoding: Encoding) -> anyhow::Result<Self> {
        let mut request = format!("{url}/v1/tables/{table}/stream").into_client_request()?;
        request.headers_mut().insert("sec-websocket-protocol", HeaderValue::from_static(SUBPROTOCOL));
        let config = WebSocketConfig::default().read_buffer_size(READ_BUFFER_BYTES);
        let connecting = Box::pin(connect_async_with_config(request, Some(config), true));
        let (mut socket, _) = connecting.await.with_context(|| format!("cannot connect to {url}"))?;
        let open = Open {
            table: None,
            name: None,
            resume_at: None,
            encoding,
            unknown: sluice_shared::frame::UnknownFields::Refuse,
            schema: None,
            token: None,
            rate_bytes_per_s: None,
        };
        socket.send(Message::Binary(ProducerFrame::Open(open).encode())).await?;
        match next_frame(&mut socket).await?.context("closed before it was opened")? {
            GatewayFrame::Opened(opened) => Ok(Self { socket, opened }),
            other => bail!("the answer to open is {other:?}"),
        }
    }

    /// Sends one record, waits until it is durable, and sends no more.
    ///
    /// # Errors
    /// As `run`.
    pub async fn send_one(mut self, record: Bytes) -> anyhow::Result<Idle> {
        let first_offset = self.opened.next_offset;
        let records = ProducerFrame::Records { first_offset, count: 1, payload: record };
        self.socket.send(Message::Binary(records.encode())).await?;
        match next_frame(&mut self.socket).await?.context("closed before the record was durable")? {
            GatewayFrame::Ack(ack) if ack.durable == Some(first_offset) => Ok(Idle { _socket: self.socket }),
            other => bail!("the answer to a record is {other:?}"),
        }
    }

    /// Sends the frames, over and over, until `deadline`; then waits until all is committed.
    ///
    /// # Errors
    /// A lost connection, a rejected record, an answer that makes no sense.
    pub async fn run(
        self,
        frames: &[Frame],
        pace: Pace,
        deadline: Instant,
        latencies: &Mutex<Latencies>,
    ) -> anyhow::Result<Sent> {
        let window_bytes = usize::try_from(self.opened.window_bytes).unwrap_or(usize::MAX);
        let window = match pace {
            Pace::UnderWay(frames) => usize::from(frames),
            Pace::Full | Pace::Each(_) => (window_bytes / WINDOW_UNIT_BYTES).clamp(1, Semaphore::MAX_PERMITS),
        };
        let flight = Flight { room: Semaphore::new(window), queues: Mutex::default() };
        let (mut sink, mut stream) = self.socket.split();
        let schedule = Schedule { frames, pace, deadline, window };
        let next = self.opened.next_offset;
        let write = write(&mut sink, &flight, &schedule, next);
        let read = read(&mut stream, &flight, latencies);
        let ((records, bytes), ()) = tokio::try_join!(write, read)?;
        let durable_at = flight.queues().durable_at.unwrap_or(deadline);
        Ok(Sent { records, bytes, durable_at })
    }
}

struct Schedule<'a> {
    frames: &'a [Frame],
    pace: Pace,
    deadline: Instant,
    window: usize,
}

impl Schedule<'_> {
    fn units(&self, frame: &Frame) -> usize {
        match self.pace {
            Pace::UnderWay(_) => 1,
            // A frame larger than the window goes alone.
            Pace::Full | Pace::Each(_) => frame.payload.len().div_ceil(WINDOW_UNIT_BYTES).min(self.window),
        }
    }
}

async fn write(
    sink: &mut SplitSink<Socket, Message>,
    flight: &Flight,
    schedule: &Schedule<'_>,
    mut next: u64,
) -> anyhow::Result<(u64, u64)> {
    let (mut sent_records, mut sent_bytes) = (0, 0);
    let mut ticks = match schedule.pace {
        Pace::Each(interval) => Some(tokio::time::interval(interval)),
        Pace::Full | Pace::UnderWay(_) => None,
    };
    if let Some(ticks) = &mut ticks {
        ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
    }
    for frame in schedule.frames.iter().cycle() {
        if let Some(ticks) = &mut ticks {
            ticks.tick().await;
        }
        let units = u32::try_from(schedule.units(frame))?;
        match flight.room.try_acquire_many(units) {
            Ok(room) => room.forget(),
            Err(_) => {
                // What is written goes out together, before a wait.
                sink.flush().await?;
                flight.room.acquire_many(units).await?.forget();
            }
        }
        let sent_at = Instant::now();
        if sent_at >= schedule.deadline {
            break;
        }
        let records =
            ProducerFrame::Records { first_offset: next, count: frame.rows, payload: frame.payload.clone() };
        next += u64::from(frame.rows);
        flight.queues().push(UnderWay { last_offset: next - 1, units: units as usize, sent_at });
        sink.feed(Message::Binary(records.encode())).await?;
        if ticks.is_some() {
            sink.flush().await?;
        }
        sent_records += u64::from(frame.rows);
        sent_bytes += frame.payload.len() as u64;
    }
    flight.queues().finished = true;
    let finish = ProducerFrame::Finish(Finish { when: FinishWhen::Committed });
    sink.send(Message::Binary(finish.encode())).await?;
    Ok((sent_records, sent_bytes))
}

async fn read(
    stream: &mut SplitStream<Socket>,
    flight: &Flight,
    latencies: &Mutex<Latencies>,
) -> anyhow::Result<()> {
    loop {
        let Some(frame) = next_frame(stream).await? else {
            ensure!(flight.queues().is_over(), "the gateway closed before all was committed");
            return Ok(());
        };
        match frame {
            GatewayFrame::Ack(ack) => {
                let heard_at = Instant::now();
                let mut queues = flight.queues();
                let mut latencies = latencies.lock().unwrap_or_else(PoisonError::into_inner);
                flight.room.add_permits(queues.answered(ack, heard_at, &mut latencies));
                if queues.is_over() {
                    return Ok(());
                }
            }
            GatewayFrame::Rejected(rejected) => bail!("a good record was rejected: {rejected:?}"),
            GatewayFrame::Error(error) => bail!("the stream failed: {error:?}"),
            other => bail!("unexpected frame {other:?}"),
        }
    }
}

impl Flight {
    fn queues(&self) -> std::sync::MutexGuard<'_, Queues> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Queues {
    fn push(&mut self, frame: UnderWay) {
        self.uncommitted.push_back((frame.last_offset, frame.sent_at));
        self.undurable.push_back(frame);
    }

    /// Takes what is covered; answers the room that it made.
    fn answered(&mut self, ack: Ack, heard_at: Instant, latencies: &mut Latencies) -> usize {
        let mut units = 0;
        let durable = ack.durable.max(ack.committed);
        while self.undurable.front().is_some_and(|frame| Some(frame.last_offset) <= durable) {
            let Some(frame) = self.undurable.pop_front() else { break };
            latencies.ack.saturating_record(micros(heard_at - frame.sent_at));
            units += frame.units;
            self.durable_at = Some(heard_at);
        }
        while self.uncommitted.front().is_some_and(|(last, _)| Some(*last) <= ack.committed) {
            let Some((_, sent_at)) = self.uncommitted.pop_front() else { break };
            latencies.committed.saturating_record(micros(heard_at - sent_at));
        }
        units
    }

    fn is_over(&self) -> bool {
        self.finished && self.uncommitted.is_empty() && self.undurable.is_empty()
    }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX).max(1)
}

/// None where the gateway has closed.
async fn next_frame(
    stream: &mut (impl StreamExt<Item = Result<Message, tokio_tungstenite::tungstenite::Error>> + Unpin),
) -> anyhow::Result<Option<GatewayFrame>> {
    loop {
        match stream.next().await {
            None => return Ok(None),
            Some(Ok(Message::Close(_))) => return Ok(None),
            Some(Ok(Message::Binary(bytes))) => {
                let frame = GatewayFrame::decode(&bytes);
                return frame.map(Some).map_err(|error| anyhow::anyhow!("a garbled frame: {error:?}"));
            }
            Some(Ok(Message::Ping(_) | Message::Pong(_) | Message::Frame(_))) => {}
            Some(Ok(Message::Text(text))) => bail!("a text message: {text}"),
            Some(Err(error)) => return Err(error).context("the connection is lost"),
        }
    }
}

/// Latencies that many streams add to.
pub type SharedLatencies = Arc<Mutex<Latencies>>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ack_takes_the_frames_that_it_covers() {
        let (mut queues, mut latencies) = (Queues::default(), Latencies::new().expect("constants"));
        let sent_at = Instant::now();
        for last_offset in [9, 19, 29] {
            queues.push(UnderWay { last_offset, units: 2, sent_at });
        }
        let heard_at = sent_at + Duration::from_millis(3);
        let ack = |durable, committed| Ack { durable, committed, version: None };
        assert_eq!(queues.answered(ack(Some(25), None), heard_at, &mut latencies), 4);
        assert_eq!((latencies.ack.len(), latencies.committed.len()), (2, 0));
        assert_eq!(queues.answered(ack(None, Some(29)), heard_at, &mut latencies), 2);
        assert_eq!((latencies.ack.len(), latencies.committed.len()), (3, 3));
        assert!((2990..3010).contains(&latencies.ack.value_at_quantile(0.5)));
        assert!(!queues.is_over());
        queues.finished = true;
        assert!(queues.is_over());
    }
}
