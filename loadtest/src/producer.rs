//! Bare producers for the bench: messages that were encoded beforehand, over a bare connection, so that the figures are the
//! service's and not those of a client.
//!
//! *Owns*: sending at a pace within a window, the time from a frame's sending to each of its answers.
//! *Does not own*: what is said to whom (`load::target`); resuming: a lost connection ends the run with an error.

pub(crate) mod together;

use std::collections::VecDeque;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use bytes::Bytes;
use hdrhistogram::Histogram;
use sluice_shared::frame::Encoding;
use tokio::sync::Semaphore;
use tokio::time::MissedTickBehavior;

use crate::load::messages::{Body, Message};
use crate::load::target::{Answers, Ask, Opened, Outbound, Target, Told};

/// Latencies above are counted as this.
const LATENCY_US_MAX: u64 = 120_000_000;
/// The window is counted in units of so many bytes.
const WINDOW_UNIT_BYTES: usize = 1 << 10;

/// Records that go out together, encoded.
#[derive(Debug, Clone)]
pub struct Frame {
    /// How many.
    pub rows: u32,
    /// Their bytes.
    pub payload: Bytes,
}

impl Frame {
    pub(crate) fn message(&self) -> Message {
        let body = Body::Payload(self.payload.clone());
        Message { rows: self.rows, bytes: self.payload.len(), body }
    }
}

/// When the next frame goes out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pace {
    /// As soon as the window has room.
    Full,
    /// At this interval.
    Each(Duration),
    /// As soon as fewer frames than this are not durable yet: with one, each waits for the one before.
    UnderWay(u16),
}

/// Times from sending to an answer, in µs, of all streams of a run.
#[derive(Debug, Clone)]
pub(crate) struct Latencies {
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
    pub(crate) fn new() -> anyhow::Result<Self> {
        let histogram = Histogram::new_with_bounds(1, LATENCY_US_MAX, 3)?;
        Ok(Self { ack: histogram.clone(), committed: histogram })
    }
}

/// What a stream did.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sent {
    /// Records, all of them committed.
    pub records: u64,
    /// Their payload.
    pub bytes: u64,
    /// When the last of them was known to be durable.
    pub durable_at: Instant,
}

/// An open stream.
pub(crate) struct Producer<T: Target> {
    opened: Opened<T>,
}

/// A stream that has nothing more to say and stays open.
pub(crate) struct Idle<T: Target> {
    _opened: Opened<T>,
}

/// A frame under way.
struct UnderWay {
    /// One more than its last offset.
    end: u64,
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

impl<T: Target> Producer<T> {
    /// Connects to `host:port` and opens an ephemeral stream.
    ///
    /// # Errors
    /// No connection; the gateway refuses.
    pub(crate) async fn open(
        target: &T,
        (address, certificate): (&str, Option<&Path>),
        table: &str,
        (encoding, rows): (Encoding, u32),
    ) -> anyhow::Result<Self> {
        let schema = &Bytes::new();
        let until_committed = true;
        let (name, resume_at) = (None, None);
        let ask =
            Ask { address, certificate, table, name, resume_at, encoding, schema, rows, until_committed };
        let opened = target.open(&ask).await.with_context(|| address.to_owned())?;
        Ok(Self { opened })
    }

    /// Sends one record, waits until it is durable, and sends no more.
    ///
    /// # Errors
    /// As `run`.
    pub(crate) async fn send_one(mut self, record: Bytes) -> anyhow::Result<Idle<T>> {
        let Opened { out, answers, next_offset, .. } = &mut self.opened;
        out.send(*next_offset, &Frame { rows: 1, payload: record }.message()).await?;
        out.flush().await?;
        let told = answers.next().await?.context("closed before the record was durable")?;
        ensure!(told.durable_next == Some(*next_offset + 1), "the answer to a record is {told:?}");
        Ok(Idle { _opened: self.opened })
    }

    /// Sends the messages, over and over, from the one with this number on, until `deadline`; then waits until all is committed.
    ///
    /// # Errors
    /// A lost connection, a rejected record, an answer that makes no sense.
    pub(crate) async fn run(
        self,
        (messages, first): (&[Message], usize),
        pace: Pace,
        deadline: Instant,
        latencies: &Mutex<Latencies>,
    ) -> anyhow::Result<Sent> {
        let Opened { mut out, mut answers, next_offset, room, .. } = self.opened;
        let window = match pace {
            Pace::UnderWay(frames) => usize::from(frames),
            Pace::Full | Pace::Each(_) => (room.bytes / WINDOW_UNIT_BYTES).clamp(1, Semaphore::MAX_PERMITS),
        };
        let flight = Flight { room: Semaphore::new(window), queues: Mutex::default() };
        let schedule = Schedule { messages, first, pace, deadline, window };
        let write = write(&mut out, &flight, &schedule, next_offset);
        let read = read(&mut answers, &flight, latencies);
        let ((records, bytes), ()) = tokio::try_join!(write, read)?;
        let durable_at = flight.queues().durable_at.unwrap_or(deadline);
        Ok(Sent { records, bytes, durable_at })
    }
}

struct Schedule<'a> {
    messages: &'a [Message],
    first: usize,
    pace: Pace,
    deadline: Instant,
    window: usize,
}

impl Schedule<'_> {
    fn units(&self, message: &Message) -> usize {
        match self.pace {
            Pace::UnderWay(_) => 1,
            // One larger than the window goes alone.
            Pace::Full | Pace::Each(_) => message.bytes.div_ceil(WINDOW_UNIT_BYTES).min(self.window),
        }
    }
}

/// Answers how many records were sent, and the bytes of their payload.
async fn write(
    out: &mut impl Outbound,
    flight: &Flight,
    schedule: &Schedule<'_>,
    mut next: u64,
) -> anyhow::Result<(u64, u64)> {
    let (mut records, mut bytes) = (0, 0);
    let mut ticks = match schedule.pace {
        Pace::Each(interval) => Some(tokio::time::interval(interval)),
        Pace::Full | Pace::UnderWay(_) => None,
    };
    if let Some(ticks) = &mut ticks {
        ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
    }
    let begin = schedule.first % schedule.messages.len().max(1);
    for message in schedule.messages.iter().cycle().skip(begin) {
        if let Some(ticks) = &mut ticks {
            ticks.tick().await;
        }
        let units = u32::try_from(schedule.units(message))?;
        match flight.room.try_acquire_many(units) {
            Ok(room) => room.forget(),
            Err(_) => {
                // What is written goes out together, before a wait.
                out.flush().await?;
                flight.room.acquire_many(units).await?.forget();
            }
        }
        let sent_at = Instant::now();
        if sent_at >= schedule.deadline {
            break;
        }
        let first = next;
        next += u64::from(message.rows);
        flight.queues().push(UnderWay { end: next, units: units as usize, sent_at });
        out.send(first, message).await?;
        if ticks.is_some() {
            out.flush().await?;
        }
        records += u64::from(message.rows);
        bytes += message.bytes as u64;
    }
    flight.queues().finished = true;
    out.finish().await?;
    Ok((records, bytes))
}

async fn read(
    answers: &mut impl Answers,
    flight: &Flight,
    latencies: &Mutex<Latencies>,
) -> anyhow::Result<()> {
    loop {
        let Some(told) = answers.next().await? else {
            ensure!(flight.queues().is_over(), "the gateway closed before all was committed");
            return Ok(());
        };
        match told {
            Told { rejected: Some(offset), .. } => bail!("the good record at offset {offset} was rejected"),
            Told { moves: true, .. } => bail!("the stream is to go elsewhere"),
            told => {
                let heard_at = Instant::now();
                let mut queues = flight.queues();
                let mut latencies = latencies.lock().unwrap_or_else(PoisonError::into_inner);
                flight.room.add_permits(queues.answered(told, heard_at, &mut latencies));
                if queues.is_over() {
                    return Ok(());
                }
            }
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
        self.uncommitted.push_back((frame.end, frame.sent_at));
        self.undurable.push_back(frame);
    }

    /// Takes what is covered; answers the room that it made.
    fn answered(&mut self, told: Told, heard_at: Instant, latencies: &mut Latencies) -> usize {
        let mut units = 0;
        let Told { durable_next, committed_next, .. } = told;
        while self.undurable.front().is_some_and(|frame| Some(frame.end) <= durable_next) {
            let Some(frame) = self.undurable.pop_front() else { break };
            latencies.ack.saturating_record(micros(heard_at - frame.sent_at));
            units += frame.units;
            self.durable_at = Some(heard_at);
        }
        while self.uncommitted.front().is_some_and(|(end, _)| Some(*end) <= committed_next) {
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

/// Latencies that many streams add to.
pub(crate) type SharedLatencies = Arc<Mutex<Latencies>>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ack_takes_the_frames_that_it_covers() {
        let (mut queues, mut latencies) = (Queues::default(), Latencies::new().expect("constants"));
        let sent_at = Instant::now();
        for end in [10, 20, 30] {
            queues.push(UnderWay { end, units: 2, sent_at });
        }
        let heard_at = sent_at + Duration::from_millis(3);
        let told = |durable_next| Told { durable_next: Some(durable_next), ..Told::default() };
        assert_eq!(queues.answered(told(26), heard_at, &mut latencies), 4);
        assert_eq!((latencies.ack.len(), latencies.committed.len()), (2, 0));
        let told = Told { committed_next: Some(30), ..told(30) };
        assert_eq!(queues.answered(told, heard_at, &mut latencies), 2);
        assert_eq!((latencies.ack.len(), latencies.committed.len()), (3, 3));
        assert!((2990..3010).contains(&latencies.ack.value_at_quantile(0.5)));
        assert!(!queues.is_over());
        queues.finished = true;
        assert!(queues.is_over());
    }
}
