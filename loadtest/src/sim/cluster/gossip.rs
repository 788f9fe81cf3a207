//! What carries gossip between simulated processes: datagrams that arrive at once, or not at all.
//!
//! *Owns*: who has which address, lost datagrams.
//! *Does not own*: between whom nothing moves (`net`).

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::Context;
use async_trait::async_trait;
use chitchat::ChitchatEnvelope;
use chitchat::transport::{RecvOutcome, SendOutcome, Socket, Transport};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tokio::sync::mpsc;

/// Datagrams that wait for a process, as in a socket's buffer; what comes then is lost.
const WAITING_MAX: usize = 100;
/// Of all datagrams.
const LOST: f64 = 0.01;
/// Nobody asks how large a datagram is.
const BYTES: usize = 1;

/// Whether anything gets from one address to another.
pub type Passes = Arc<dyn Fn(SocketAddr, SocketAddr) -> bool + Send + Sync>;

/// The transport. Clones share it.
#[derive(Clone)]
pub struct Gossip {
    state: Arc<Mutex<State>>,
    passes: Passes,
}

struct State {
    sockets: BTreeMap<SocketAddr, mpsc::Sender<RecvOutcome>>,
    random: StdRng,
}

impl Gossip {
    /// One without sockets.
    pub fn new(seed: u64, passes: Passes) -> Self {
        let state = State { sockets: BTreeMap::new(), random: StdRng::seed_from_u64(seed) };
        Self { state: Arc::new(Mutex::new(state)), passes }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[async_trait]
impl Transport for Gossip {
    async fn open(&self, address: SocketAddr) -> anyhow::Result<Box<dyn Socket>> {
        let (sender, arriving) = mpsc::channel(WAITING_MAX);
        // The socket of a former life is gone with it.
        self.state().sockets.insert(address, sender);
        Ok(Box::new(Datagrams { address, gossip: self.clone(), arriving }))
    }
}

struct Datagrams {
    address: SocketAddr,
    gossip: Gossip,
    arriving: mpsc::Receiver<RecvOutcome>,
}

#[async_trait]
impl Socket for Datagrams {
    fn local_addr(&self) -> anyhow::Result<SocketAddr> {
        Ok(self.address)
    }

    async fn send(&mut self, to: SocketAddr, envelope: ChitchatEnvelope) -> anyhow::Result<SendOutcome> {
        let mut state = self.gossip.state();
        let is_lost = state.random.random_bool(LOST) || !(self.gossip.passes)(self.address, to);
        if let Some(socket) = state.sockets.get(&to).filter(|_| !is_lost) {
            // A datagram for which there is no room is lost, and one to the dead.
            let _ =
                socket.try_send(RecvOutcome { from_addr: self.address, envelope, num_bytes_received: BYTES });
        }
        Ok(SendOutcome { num_bytes_sent: BYTES })
    }

    async fn recv(&mut self) -> anyhow::Result<RecvOutcome> {
        self.arriving.recv().await.context("the socket was taken over by a later life")
    }
}
