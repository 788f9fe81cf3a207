//! One producer for each transport: full pace within a bounded number of unacked bytes, messages encoded beforehand.
//!
//! *Owns*: the pace, the time until the last ack, the receiver's CPU time meanwhile.
//! *Does not own*: what the protocols say (`load::target`, and `http` for one long body).

mod http;

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{anyhow, bail};
use tokio::sync::Notify;

use super::{Edge, TABLE, Transport};
use crate::cluster::cpu_of;
use crate::load::messages::Load;
use crate::load::target::framed::{Quic, Speech, WebSocket};
use crate::load::target::grpc::{Flight, Zerobus};
use crate::load::target::{Answers, Ask, Outbound, Target};

/// Sent and not acked, in bytes of payload: below a gateway's own window, so that no receiver is the one to hold up.
const WINDOW_BYTES: usize = 4 << 20;

/// Whom to send to, and whose CPU time counts.
pub(super) struct Receiver {
    pub(super) address: SocketAddr,
    /// Trusted, where the transport is encrypted.
    pub(super) certificate: PathBuf,
    pub(super) pid: u32,
}

/// What a producer did.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sent {
    /// Records, all of them acked.
    pub(super) records: u64,
    /// Their payload.
    pub(super) bytes: u64,
    /// From the first send until the last ack.
    pub(super) took: Duration,
    /// Of the receiver, in that time.
    pub(super) cpu: Duration,
}

/// Opens a stream over the edge's transport and sends for as long as `run`.
///
/// # Errors
/// No connection, a refusal, a lost connection.
pub(super) async fn produce(
    edge: &Edge,
    receiver: &Receiver,
    load: &Load,
    run: Duration,
) -> anyhow::Result<Sent> {
    match edge.transport {
        Transport::WebSocketFrames => stream(&WebSocket(Speech::Frames), receiver, load, run).await,
        Transport::WebSocketTexts => stream(&WebSocket(Speech::Texts), receiver, load, run).await,
        Transport::Quic => stream(&Quic::new(1)?, receiver, load, run).await,
        Transport::Zerobus => stream(&Zerobus, receiver, load, run).await,
        Transport::Flight => stream(&Flight, receiver, load, run).await,
        Transport::Http => {
            let (out, answers) = http::open(receiver, load).await?;
            // A post has one ack: the receiver's own window is the bound.
            measured((out, answers), receiver, (load, usize::MAX), run).await
        }
    }
}

async fn stream(
    target: &impl Target,
    receiver: &Receiver,
    load: &Load,
    run: Duration,
) -> anyhow::Result<Sent> {
    let ask = Ask {
        address: &receiver.address.to_string(),
        certificate: Some(&receiver.certificate),
        table: TABLE,
        name: None,
        resume_at: None,
        encoding: load.encoding,
        schema: &load.schema,
        rows: load.rows,
        until_committed: false,
    };
    let opened = target.open(&ask).await?;
    measured((opened.out, opened.answers), receiver, (load, WINDOW_BYTES), run).await
}

async fn measured(
    (mut out, mut answers): (impl Outbound, impl Answers),
    receiver: &Receiver,
    load: (&Load, usize),
    run: Duration,
) -> anyhow::Result<Sent> {
    let pid = receiver.pid.to_string();
    let (cpu, began) = (cpu_of(&pid)?, Instant::now());
    let progress = Progress::default();
    let (records, bytes) = tokio::select! {
        biased; // answers first: they make room
        failed = hear(&mut answers, &progress) => return Err(failed),
        sent = send_all(&mut out, &progress, load, began + run) => sent?,
    };
    Ok(Sent { records, bytes, took: began.elapsed(), cpu: cpu_of(&pid)?.saturating_sub(cpu) })
}

/// What both ways of a stream share.
#[derive(Default)]
struct Progress {
    /// All before it is acked.
    durable_next: AtomicU64,
    moved: Notify,
}

/// Takes answers in, for as long as there are some; answers why there are no more.
async fn hear(answers: &mut impl Answers, progress: &Progress) -> anyhow::Error {
    loop {
        match answers.next().await {
            Ok(Some(told)) if told.rejected.is_some() => {
                return anyhow!("a good record was refused: {told:?}");
            }
            Ok(Some(told)) => {
                let Some(durable_next) = told.durable_next else { continue };
                progress.durable_next.store(durable_next, Ordering::Relaxed);
                progress.moved.notify_one();
            }
            // Whether that is too early is for the one to say who knows what was sent.
            Ok(None) => {
                progress.durable_next.fetch_or(ENDED, Ordering::Relaxed);
                progress.moved.notify_one();
                std::future::pending::<()>().await;
            }
            Err(error) => return error,
        }
    }
}

/// Beside the offset: no more answers come.
const ENDED: u64 = 1 << 63;

async fn send_all(
    out: &mut impl Outbound,
    progress: &Progress,
    (load, window): (&Load, usize),
    deadline: Instant,
) -> anyhow::Result<(u64, u64)> {
    let mut unacked = Unacked::new(window);
    let (mut next, mut sent_bytes) = (0, 0);
    for message in load.messages.iter().cycle() {
        if Instant::now() >= deadline {
            break;
        }
        while !unacked.has_room(message.bytes, progress)? {
            out.flush().await?;
            progress.moved.notified().await;
        }
        out.send(next, message).await?;
        next += u64::from(message.rows);
        sent_bytes += message.bytes as u64;
        unacked.push(next, message.bytes);
    }
    out.flush().await?;
    out.finish().await?;
    while !unacked.is_empty(progress)? {
        progress.moved.notified().await;
    }
    Ok((next, sent_bytes))
}

/// Messages that are not acked: where each ends, and its bytes.
struct Unacked {
    messages: VecDeque<(u64, usize)>,
    bytes: usize,
    window: usize,
}

impl Unacked {
    fn new(window: usize) -> Self {
        Self { messages: VecDeque::new(), bytes: 0, window }
    }

    fn push(&mut self, end: u64, bytes: usize) {
        self.messages.push_back((end, bytes));
        self.bytes += bytes;
    }

    fn has_room(&mut self, bytes: usize, progress: &Progress) -> anyhow::Result<bool> {
        Ok(self.is_empty(progress)? || self.bytes.saturating_add(bytes) <= self.window)
    }

    /// Lets go of what is acked.
    fn is_empty(&mut self, progress: &Progress) -> anyhow::Result<bool> {
        let progress = progress.durable_next.load(Ordering::Relaxed);
        let (durable_next, has_ended) = (progress & !ENDED, progress & ENDED != 0);
        while self.messages.front().is_some_and(|(end, _)| *end <= durable_next) {
            let Some((_, bytes)) = self.messages.pop_front() else { break };
            self.bytes -= bytes;
        }
        if has_ended && let Some((end, _)) = self.messages.front() {
            bail!("the stream ended at offset {durable_next}: records up to {end} and more are not acked");
        }
        Ok(self.messages.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_window_opens_with_acks() {
        let (mut unacked, progress) = (Unacked::new(WINDOW_BYTES), Progress::default());
        assert!(unacked.has_room(2 * WINDOW_BYTES, &progress).expect("a message that is larger goes alone"));
        unacked.push(10, WINDOW_BYTES - 1);
        assert!(unacked.has_room(1, &progress).expect("open"));
        assert!(!unacked.has_room(2, &progress).expect("open"));
        progress.durable_next.store(9, Ordering::Relaxed);
        assert!(!unacked.has_room(2, &progress).expect("open"));
        progress.durable_next.store(10, Ordering::Relaxed);
        assert!(unacked.has_room(2, &progress).expect("open"));
    }

    #[test]
    fn an_end_before_the_last_ack_is_a_failure() {
        let (mut unacked, progress) = (Unacked::new(WINDOW_BYTES), Progress::default());
        unacked.push(10, 5);
        progress.durable_next.store(10 | ENDED, Ordering::Relaxed);
        assert!(unacked.is_empty(&progress).expect("all is acked"));
        unacked.push(20, 5);
        unacked.is_empty(&progress).expect_err("some is not");
    }
}
