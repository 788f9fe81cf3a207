//! A TCP proxy that cuts connections at any byte.
//!
//! *Owns*: where a connection is cut.
//! *Does not own*: when (`chaos`).

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

use anyhow::Context;
use sluice_shared::lifecycle::TaskScope;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio_stream::StreamExt;
use tokio_stream::wrappers::TcpListenerStream;

/// So many bytes pass before a cut where none is wanted.
const NEVER: i64 = i64::MAX / 2;
/// Of one read.
const CHUNK_BYTES: usize = 16 << 10;

/// The way to one listener.
pub struct Cutter {
    port: u16,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    /// Bytes of all connections, both ways, until one is cut.
    left: AtomicI64,
    cuts: AtomicU64,
}

impl Cutter {
    /// Listens on a port of its own, and passes on what comes to `target`, whether it listens yet or not.
    ///
    /// # Errors
    /// No port can be had.
    pub async fn start(scope: &TaskScope, target: u16) -> anyhow::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await.context("no free port")?;
        let port = listener.local_addr()?.port();
        let shared = Arc::new(Shared { left: AtomicI64::new(NEVER), cuts: AtomicU64::new(0) });
        let (accepting, passing) = (scope.clone(), Arc::clone(&shared));
        scope.spawn("cutter", async move {
            let mut incoming = TcpListenerStream::new(listener);
            loop {
                let next = tokio::select! {
                    biased; // the end first
                    () = accepting.cancelled() => return,
                    next = incoming.next() => next,
                };
                let Some(Ok(incoming)) = next else { continue };
                let (shared, scope) = (Arc::clone(&passing), accepting.clone());
                accepting.spawn("cut connection", async move {
                    tokio::select! {
                        biased; // the end first
                        () = scope.cancelled() => {}
                        () = pass(incoming, target, &shared) => {}
                    }
                });
            }
        });
        Ok(Self { port, shared })
    }

    /// Where to connect, on 127.0.0.1.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Cuts the connection that passes on the `bytes`-th byte from now on, behind that byte.
    pub fn cut_after(&self, bytes: u32) {
        self.shared.left.store(i64::from(bytes.max(1)), Ordering::Relaxed);
    }

    /// Cuts no more.
    pub fn leave_alone(&self) {
        self.shared.left.store(NEVER, Ordering::Relaxed);
    }

    /// How many connections were cut.
    pub fn cuts(&self) -> u64 {
        self.shared.cuts.load(Ordering::Relaxed)
    }
}

impl Shared {
    /// How many of so many bytes may pass; fewer than all where the connection is cut behind them.
    fn take(&self, bytes: usize) -> usize {
        let wanted = i64::try_from(bytes).unwrap_or(i64::MAX);
        let before = self.left.fetch_sub(wanted, Ordering::Relaxed);
        if before > wanted || before <= 0 {
            return bytes; // it is another connection that is cut
        }
        self.left.store(NEVER, Ordering::Relaxed);
        self.cuts.fetch_add(1, Ordering::Relaxed);
        usize::try_from(before).unwrap_or(bytes)
    }
}

async fn pass(incoming: TcpStream, target: u16, shared: &Shared) {
    let Ok(outgoing) = TcpStream::connect(("127.0.0.1", target)).await else { return };
    // Acks must not wait for more of them.
    let _ = (incoming.set_nodelay(true), outgoing.set_nodelay(true));
    let ((from_producer, to_producer), (from_service, to_service)) =
        (incoming.into_split(), outgoing.into_split());
    let (up, down) = (copy(from_producer, to_service, shared), copy(from_service, to_producer, shared));
    // A way that ends well leaves the other one open; a cut ends both.
    let (mut up, mut down) = (std::pin::pin!(up), std::pin::pin!(down));
    tokio::select! {
        biased; // the order is of no consequence
        is_cut = &mut up => if !is_cut { down.await; },
        is_cut = &mut down => if !is_cut { up.await; },
    }
}

/// Whether it was cut, or has failed.
async fn copy(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, shared: &Shared) -> bool {
    let mut chunk = vec![0; CHUNK_BYTES];
    loop {
        let Ok(read) = from.read(&mut chunk).await else { return true };
        if read == 0 {
            return to.shutdown().await.is_err();
        }
        let passed = shared.take(read);
        if to.write_all(&chunk[..passed]).await.is_err() || passed < read {
            return true;
        }
    }
}

#[cfg(test)]
mod tests {
    use sluice_shared::lifecycle::OnPanic;

    use super::*;

    #[tokio::test]
    async fn a_connection_is_cut_at_the_byte_and_the_next_one_is_not() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let scope = TaskScope::new(OnPanic::EndTask);
        let cutter =
            Cutter::start(&scope, listener.local_addr().expect("bound").port()).await.expect("starts");
        for (cut, arrives) in [(Some(5), 5), (None, 20)] {
            cut.into_iter().for_each(|bytes| cutter.cut_after(bytes));
            let mut sender = TcpStream::connect(("127.0.0.1", cutter.port())).await.expect("connects");
            let (mut receiver, _) = listener.accept().await.expect("passed on");
            sender.write_all(&[7; 20]).await.expect("taken");
            sender.shutdown().await.expect("taken");
            let mut arrived = Vec::new();
            // How a cut connection ends is of no interest.
            let _ = receiver.read_to_end(&mut arrived).await;
            assert_eq!(arrived.len(), arrives);
        }
        assert_eq!(cutter.cuts(), 1);
        scope.cancel();
    }
}
