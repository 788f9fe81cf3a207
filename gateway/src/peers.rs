//! How many connections one address has, and how fast it makes them.
//!
//! An address is one of IPv4, or the first half of one of IPv6, which is what one customer gets. The table is bounded:
//! an address stands in it while it has a connection, or has made some a moment ago; where too many have, those that are
//! new share one entry.
//!
//! *Owns*: the table and the two limits.
//! *Does not own*: the limit of all connections together, the answers (`app`, `edge`).
//! Keeps P7 and P9: one address cannot take all places.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// Addresses that are kept apart.
const PEERS_MAX: usize = 64 << 10;
/// A full table is cleared of those that are quiet at most so often.
const SWEEP_PAUSE: Duration = Duration::from_millis(100);
/// How many seconds' worth of connections an address may make at once.
const BURST_SECONDS: f64 = 2.0;

/// What one address may do.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PeerLimits {
    /// Connections at one time.
    pub(crate) connections_max: usize,
    /// New connections a second, on average.
    pub(crate) connects_per_s: u32,
}

/// Why an address gets no connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refused {
    /// It has as many as it may.
    TooMany,
    /// It makes them too fast.
    TooFast,
}

/// All addresses.
#[derive(Debug)]
pub(crate) struct Peers {
    limits: PeerLimits,
    /// A lock, held for a look-up at the birth and the death of a connection.
    table: Mutex<Table>,
}

#[derive(Debug)]
struct Table {
    /// None: those for which there was no entry of their own.
    peers: HashMap<Option<IpAddr>, Peer>,
    peers_max: usize,
    swept_at: Option<Instant>,
}

#[derive(Debug, Clone, Copy)]
struct Peer {
    open: usize,
    /// Connections that it may make now.
    tokens: f64,
    at: Instant,
}

/// A connection among those of its address; given back when it is dropped.
#[derive(Debug)]
pub(crate) struct PeerPlace {
    peers: Arc<Peers>,
    key: Option<IpAddr>,
}

impl Peers {
    /// None is known yet.
    pub(crate) fn new(limits: PeerLimits) -> Arc<Self> {
        Self::with_room(limits, PEERS_MAX)
    }

    fn with_room(limits: PeerLimits, peers_max: usize) -> Arc<Self> {
        let table = Mutex::new(Table { peers: HashMap::new(), peers_max, swept_at: None });
        Arc::new(Self { limits, table })
    }

    /// A place for one more connection of an address.
    ///
    /// # Errors
    /// Which limit it has reached.
    pub(crate) fn place(self: &Arc<Self>, address: IpAddr, now: Instant) -> Result<PeerPlace, Refused> {
        let (limits, mut table) = (self.limits, self.table.lock().unwrap_or_else(PoisonError::into_inner));
        let key = table.key(address, limits, now);
        let new = Peer { open: 0, tokens: limits.burst(), at: now };
        let peer = table.peers.entry(key).or_insert(new);
        peer.refill(limits, now);
        if peer.open >= limits.connections_max {
            return Err(Refused::TooMany);
        }
        if peer.tokens < 1.0 {
            return Err(Refused::TooFast);
        }
        peer.tokens -= 1.0;
        peer.open += 1;
        drop(table);
        Ok(PeerPlace { peers: Arc::clone(self), key })
    }
}

impl PeerLimits {
    fn burst(self) -> f64 {
        (f64::from(self.connects_per_s) * BURST_SECONDS).max(1.0)
    }
}

impl Peer {
    fn refill(&mut self, limits: PeerLimits, now: Instant) {
        let seconds = now.saturating_duration_since(self.at).as_secs_f64();
        self.tokens = (self.tokens + seconds * f64::from(limits.connects_per_s)).min(limits.burst());
        self.at = now;
    }

    /// Whether forgetting it changes nothing.
    fn is_quiet(mut self, limits: PeerLimits, now: Instant) -> bool {
        self.refill(limits, now);
        self.open == 0 && self.tokens >= limits.burst()
    }
}

impl Table {
    /// The entry of an address: its own, or where there is no room the common one.
    fn key(&mut self, address: IpAddr, limits: PeerLimits, now: Instant) -> Option<IpAddr> {
        let key = Some(network(address));
        if self.peers.contains_key(&key) || self.peers.len() < self.peers_max {
            return key;
        }
        if self.swept_at.is_none_or(|at| now.saturating_duration_since(at) >= SWEEP_PAUSE) {
            self.swept_at = Some(now);
            self.peers.retain(|_, peer| !peer.is_quiet(limits, now));
        }
        key.filter(|_| self.peers.len() < self.peers_max)
    }
}

impl Drop for PeerPlace {
    fn drop(&mut self) {
        let mut table = self.peers.table.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(peer) = table.peers.get_mut(&self.key) {
            peer.open = peer.open.saturating_sub(1);
        }
    }
}

fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() & !u128::from(u64::MAX))),
        v4 => v4,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: PeerLimits = PeerLimits { connections_max: 3, connects_per_s: 10 };

    fn ip(text: &str) -> IpAddr {
        text.parse().expect("an address")
    }

    #[test]
    fn an_address_has_so_many_places_and_others_have_theirs() {
        let (peers, now) = (Peers::new(LIMITS), Instant::now());
        let places: Vec<_> = (0..3).map(|_| peers.place(ip("10.0.0.1"), now).expect("a place")).collect();
        assert_eq!(peers.place(ip("10.0.0.1"), now).map(|_| ()), Err(Refused::TooMany));
        assert_eq!(peers.place(ip("::ffff:10.0.0.1"), now).map(|_| ()), Err(Refused::TooMany), "the same");
        peers.place(ip("10.0.0.2"), now).expect("another address");
        drop(places);
        peers.place(ip("10.0.0.1"), now).expect("given back");
    }

    #[test]
    fn an_address_makes_so_many_a_second_and_some_at_once() {
        let (peers, start) = (Peers::new(LIMITS), Instant::now());
        let made = |now| (0..100).filter(|_| peers.place(ip("10.0.0.1"), now).is_ok()).count();
        assert_eq!(made(start), 20, "a burst");
        assert_eq!(made(start + Duration::from_millis(500)), 5);
        assert_eq!(made(start + Duration::from_secs(60)), 20, "no more than a burst, however long it waited");
        assert_eq!(peers.place(ip("10.0.0.1"), start).map(|_| ()), Err(Refused::TooFast));
    }

    #[test]
    fn half_an_address_of_ipv6_is_one_peer() {
        let (peers, now) = (Peers::new(LIMITS), Instant::now());
        let _places: Vec<_> =
            (0..3).map(|n| peers.place(ip(&format!("2001:db8::{n}")), now).expect("a place")).collect();
        assert_eq!(peers.place(ip("2001:db8::ffff:1:2:3"), now).map(|_| ()), Err(Refused::TooMany));
        peers.place(ip("2001:db8:0:1::1"), now).expect("another network");
    }

    #[test]
    fn the_table_is_bounded_whatever_comes() {
        let (peers, start) = (Peers::with_room(LIMITS, 100), Instant::now());
        let _kept: Vec<_> =
            (0..50_u8).map(|n| peers.place(IpAddr::from([10, 0, 0, n]), start).expect("a place")).collect();
        for n in 0..10_000_u32 {
            // Refused or not: it is the table that matters.
            let _ = peers.place(IpAddr::from((n + (20 << 24)).to_be_bytes()), start);
        }
        let known = || peers.table.lock().expect("not poisoned").peers.len();
        assert_eq!(known(), 101, "and the common one");
        let later = start + Duration::from_secs(60);
        peers.place(ip("10.9.9.9"), later).expect("an entry of its own again");
        assert_eq!(known(), 51, "those with a connection, and the new one");
    }
}
