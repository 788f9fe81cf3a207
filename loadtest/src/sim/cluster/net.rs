//! The network between simulated processes: pipes with delays, which can be cut and held up.
//!
//! *Owns*: who listens, the relays between two ends, what is cut and held.
//! *Does not own*: when that happens (`world`).

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use sluice_shared::link::{self, PipeDialer};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, ReadHalf, WriteHalf};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::gossip::Gossip;
use super::host::Spawner;

/// Bytes that are under way in one piece.
const PIECE_BYTES: usize = 64 << 10;
/// A piece is under way for up to so long.
const DELAY_MAX: Duration = Duration::from_millis(3);

/// Two processes, by name, the lesser first.
pub type Pair = (String, String);

/// The pair of two processes.
pub fn pair(one: &str, other: &str) -> Pair {
    let (one, other) = (one.to_owned(), other.to_owned());
    if one <= other { (one, other) } else { (other, one) }
}

/// The network. Clones share it.
#[derive(Clone)]
pub struct Net {
    shared: Arc<Shared>,
}

struct Shared {
    state: Mutex<State>,
    /// Between these nothing moves.
    held: Arc<watch::Sender<BTreeSet<Pair>>>,
    gossip: Gossip,
    relays: Spawner,
}

struct State {
    listening: BTreeMap<String, PipeDialer>,
    /// From whom to whom.
    ways: BTreeMap<(String, String), PipeDialer>,
    connections: BTreeMap<Pair, CancellationToken>,
    random: StdRng,
}

impl Net {
    /// One whose relays run there, of processes with these addresses for gossip.
    pub fn new(seed: u64, relays: Spawner, members: &[(String, SocketAddr)]) -> Self {
        let held = Arc::new(watch::Sender::new(BTreeSet::new()));
        let (nothing_moves, members) = (Arc::clone(&held), members.to_vec());
        let passes = move |from: SocketAddr, to: SocketAddr| {
            let name = |wanted: SocketAddr| members.iter().find(|(_, address)| *address == wanted);
            let (Some((from, _)), Some((to, _))) = (name(from), name(to)) else { return false };
            !nothing_moves.borrow().contains(&pair(from, to))
        };
        let gossip = Gossip::new(seed, Arc::new(passes));
        let state = State {
            listening: BTreeMap::new(),
            ways: BTreeMap::new(),
            connections: BTreeMap::new(),
            random: StdRng::seed_from_u64(seed),
        };
        Self { shared: Arc::new(Shared { state: Mutex::new(state), held, gossip, relays }) }
    }

    /// What carries gossip.
    pub fn gossip(&self) -> &Gossip {
        &self.shared.gossip
    }

    /// `name` takes connections here from now on; its former life does not any more.
    pub fn listen(&self, name: &str, dialer: PipeDialer) {
        self.state().listening.insert(name.to_owned(), dialer);
    }

    /// How `from` reaches `to`, in all its lives.
    pub fn way(&self, from: &str, to: &str) -> PipeDialer {
        let mut state = self.state();
        let way = (from.to_owned(), to.to_owned());
        if let Some(dialer) = state.ways.get(&way) {
            return dialer.clone();
        }
        let (dialer, mut listener) = link::pipe();
        state.ways.insert(way, dialer.clone());
        drop(state);
        let (net, from, to) = (self.clone(), from.to_owned(), to.to_owned());
        self.shared.relays.spawn("way", async move {
            while let Some(near) = listener.accept().await {
                let relay = net.clone().relay(from.clone(), to.clone(), near);
                net.shared.relays.spawn("connection", relay);
            }
        });
        dialer
    }

    /// Ends all connections between the two.
    pub fn cut(&self, pair: &Pair) {
        if let Some(connections) = self.state().connections.remove(pair) {
            connections.cancel();
        }
    }

    /// Whether anything moves between the two.
    pub fn hold(&self, pair: &Pair, is_held: bool) {
        self.shared.held.send_modify(|held| {
            if is_held {
                held.insert(pair.clone());
            } else {
                held.remove(pair);
            }
        });
    }

    /// Everything moves.
    pub fn heal(&self) {
        self.shared.held.send_modify(BTreeSet::clear);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn relay(self, from: String, to: String, near: DuplexStream) {
        let pair = pair(&from, &to);
        self.pass(&pair).await;
        let listening = self.state().listening.get(&to).cloned();
        let Some(listening) = listening else { return };
        // Whoever listened there may be dead.
        let Ok(far) = listening.dial().await else { return };
        let cut = self.state().connections.entry(pair.clone()).or_default().clone();
        let ((near_read, near_write), (far_read, far_write)) =
            (tokio::io::split(near), tokio::io::split(far));
        let there = self.carry(&pair, near_read, far_write);
        let back = self.carry(&pair, far_read, near_write);
        tokio::select! {
            biased; // a cut ends it, whatever is under way
            () = cut.cancelled() => {}
            _ = async { tokio::join!(there, back) } => {}
        }
    }

    /// Carries one direction to its end.
    async fn carry(&self, pair: &Pair, mut from: ReadHalf<DuplexStream>, mut to: WriteHalf<DuplexStream>) {
        let mut piece = vec![0; PIECE_BYTES];
        loop {
            let read = from.read(&mut piece).await.unwrap_or(0);
            self.pass(pair).await;
            if read == 0 {
                // The other end may have gone before.
                let _ = to.shutdown().await;
                return;
            }
            if to.write_all(&piece[..read]).await.is_err() {
                return;
            }
        }
    }

    /// Waits as long as a piece takes.
    async fn pass(&self, pair: &Pair) {
        let delay = DELAY_MAX.mul_f64(self.state().random.random::<f64>());
        tokio::time::sleep(delay).await;
        let mut held = self.shared.held.subscribe();
        // The sender lives in `shared`: waiting for it cannot fail.
        let _ = held.wait_for(|held| !held.contains(pair)).await;
    }
}
