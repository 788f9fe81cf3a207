//! Services whose clients answer each batch by itself, as targets of the rig: a call for each batch, their acks in order.
//!
//! *Owns*: the seam for such clients; that an ack counts only when all before it have come.
//! *Does not own*: the clients (`loadtest/peers`), the window (`producer`).

use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context, bail};
use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::future::BoxFuture;
use futures_util::stream::FuturesOrdered;
use tokio::sync::mpsc;

use crate::load::messages::{Body, Message};
use crate::load::target::{Answers, Ask, Opened, Outbound, Room, Target, Told};

/// Batches between the one who sends and the one who waits for acks: more than any work has under way.
const WAITING_MAX: usize = 1024;

/// Ends with the ack of a batch.
pub type Acked = BoxFuture<'static, anyhow::Result<()>>;

/// A service that is none of ours, through its own client.
pub trait Peer: Send + Sync + 'static {
    /// A stream of it.
    type Stream: PeerStream;

    /// Connects to `host:port` and opens the stream of this number, which nobody else has.
    fn open(&self, address: &str, number: usize)
    -> impl Future<Output = anyhow::Result<Self::Stream>> + Send;
}

/// An open stream, with a connection of its own.
pub trait PeerStream: Send + 'static {
    /// Sends a batch; answers what ends with its ack.
    fn send(&mut self, records: &[Bytes]) -> impl Future<Output = anyhow::Result<Acked>> + Send;
}

/// A peer as the rig has targets.
pub(crate) struct Calls<P> {
    peer: P,
    opened: AtomicUsize,
}

impl<P> Calls<P> {
    pub(crate) fn new(peer: P) -> Self {
        Self { peer, opened: AtomicUsize::new(0) }
    }
}

impl<P: Peer> Target for Calls<P> {
    type Out = CallsOut<P::Stream>;
    type Answers = CallsAnswers;

    async fn open(&self, ask: &Ask<'_>) -> anyhow::Result<Opened<Self>> {
        let number = self.opened.fetch_add(1, Ordering::Relaxed);
        let stream = self.peer.open(ask.address, number).await?;
        let (calls, waiting) = mpsc::channel(WAITING_MAX);
        let out = CallsOut { stream, calls: Some(calls) };
        let answers = CallsAnswers { waiting, under_way: FuturesOrdered::new() };
        let room = Room { bytes: usize::MAX, messages: usize::MAX };
        Ok(Opened { out, answers, next_offset: 0, stream: None, room })
    }
}

/// An ack that is waited for: one more than the last offset that it covers.
type Call = BoxFuture<'static, anyhow::Result<u64>>;

pub(crate) struct CallsOut<S> {
    stream: S,
    /// None once all is said.
    calls: Option<mpsc::Sender<Call>>,
}

impl<S: PeerStream> Outbound for CallsOut<S> {
    async fn send(&mut self, first_offset: u64, message: &Message) -> anyhow::Result<()> {
        let Body::Records(records) = &message.body else { bail!("a batch has its records one by one") };
        let acked = self.stream.send(records).await?;
        let end = first_offset + u64::from(message.rows);
        let call: Call = Box::pin(async move { acked.await.map(|()| end) });
        let calls = self.calls.as_ref().context("all was said")?;
        calls.send(call).await.ok().context("nobody waits for acks")
    }

    async fn flush(&mut self) -> anyhow::Result<()> {
        Ok(())
    }

    async fn finish(&mut self) -> anyhow::Result<()> {
        self.calls = None;
        Ok(())
    }
}

pub(crate) struct CallsAnswers {
    waiting: mpsc::Receiver<Call>,
    under_way: FuturesOrdered<Call>,
}

impl Answers for CallsAnswers {
    /// What is acked is kept as well as this service keeps anything: there is no later answer.
    async fn next(&mut self) -> anyhow::Result<Option<Told>> {
        loop {
            tokio::select! {
                biased; // new calls first: they are only polled, and so only under way, once they are here
                Some(call) = self.waiting.recv() => self.under_way.push_back(call),
                Some(acked) = self.under_way.next() => {
                    let next = Some(acked?);
                    return Ok(Some(Told { durable_next: next, committed_next: next, ..Told::default() }));
                }
                else => return Ok(None),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::Mutex;

    use futures_util::FutureExt;
    use sluice_shared::frame::Encoding;
    use tokio::sync::oneshot;

    use super::*;

    type Acks = Arc<Mutex<Vec<oneshot::Sender<bool>>>>;

    struct Fake(Acks);
    struct FakeStream(Acks);

    impl Peer for Fake {
        type Stream = FakeStream;

        async fn open(&self, address: &str, number: usize) -> anyhow::Result<FakeStream> {
            assert_eq!((address, number), ("there", 0));
            Ok(FakeStream(Arc::clone(&self.0)))
        }
    }

    impl PeerStream for FakeStream {
        async fn send(&mut self, records: &[Bytes]) -> anyhow::Result<Acked> {
            assert_eq!(records.len(), 10);
            let (ack, acked) = oneshot::channel();
            self.0.lock().expect("not poisoned").push(ack);
            Ok(Box::pin(async move {
                match acked.await {
                    Ok(true) => Ok(()),
                    _ => bail!("refused"),
                }
            }))
        }
    }

    async fn opened(acks: &Acks) -> Opened<Calls<Fake>> {
        let ask = Ask {
            address: "there",
            certificate: None,
            table: "t",
            name: None,
            resume_at: None,
            encoding: Encoding::Json,
            schema: &Bytes::new(),
            rows: 10,
            until_committed: true,
        };
        Calls::new(Fake(Arc::clone(acks))).open(&ask).await.expect("opens")
    }

    fn batch() -> Message {
        let records = vec![Bytes::from_static(b"{}"); 10];
        Message { rows: 10, bytes: 20, body: Body::Records(records.into()) }
    }

    #[tokio::test]
    async fn an_ack_counts_when_all_before_it_have_come() {
        let acks = Acks::default();
        let Opened { mut out, mut answers, .. } = opened(&acks).await;
        for first in [0, 10, 20] {
            out.send(first, &batch()).await.expect("sent");
        }
        let mut senders: Vec<_> = acks.lock().expect("not poisoned").drain(..).map(Some).collect();
        let mut ack = |number: usize, is_good| {
            senders[number].take().expect("once").send(is_good).expect("it is waited for");
        };
        ack(1, true);
        assert!(answers.next().now_or_never().is_none(), "the first is under way");
        ack(0, true);
        let told = answers.next().await.expect("acked").expect("more to come");
        assert_eq!((told.durable_next, told.committed_next), (Some(10), Some(10)));
        let told = answers.next().await.expect("acked").expect("more to come");
        assert_eq!(told.durable_next, Some(20));
        ack(2, false);
        assert!(answers.next().await.is_err(), "a batch that is refused is no ack");
        out.finish().await.expect("all is said");
        assert_eq!(answers.next().await.expect("the end"), None);
    }
}
