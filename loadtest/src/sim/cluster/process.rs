//! What runs on a host: a pod or a gateway as production has them, on a simulated machine and network.
//!
//! *Owns*: their configuration, their start and their drain.
//! *Does not own*: hosts and their ends (`world`).

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use sluice_gateway::{Gateway, GatewayConfig};
use sluice_pod::app::{Listen, Pod};
use sluice_pod::config::PodConfig;
use sluice_pod::machine::Machine;
use sluice_pod::table::Stores;
use sluice_pod::wal::stepped::{Pace, Passage};
use sluice_shared::config::ByteSize;
use sluice_shared::error::Error;
use sluice_shared::lifecycle::{OnPanic, TaskScope};
use sluice_shared::link::{self, PodAddress};
use sluice_shared::membership::{ClusterConfig, Membership, Net as GossipNet};
use tokio::sync::Notify;

use super::net::Net;
use super::store::Store;

/// Where pods listen, by name: nobody looks at the port.
const PORT: u16 = 7171;
const GOSSIP_PORT: u16 = 7172;
/// Of all groups, those whose flush fails.
const FAILING: f64 = 0.001;

/// What is wrong with the disks under the logs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Planted {
    /// Nothing.
    #[default]
    Nothing,
    /// They say that a group is flushed before it is written: a rig that works finds the loss.
    AckBeforeFlush,
}

/// Where a process is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum State {
    /// Not ready.
    Starting,
    /// Ready.
    Up,
    /// It has come to its end by itself, in good order.
    Ended,
    /// It could not start.
    Failed,
}

/// What a process shares with the world.
#[derive(Clone)]
pub struct Shown {
    state: Arc<AtomicU8>,
    /// Why it has failed.
    pub failure: Arc<Mutex<String>>,
    /// Its log has failed: its process is to end at once.
    pub is_doomed: Arc<AtomicBool>,
    /// It is to drain.
    pub drain: Arc<Notify>,
}

impl Shown {
    /// Of a process that starts.
    pub fn new() -> Self {
        Self {
            state: Arc::default(),
            failure: Arc::default(),
            is_doomed: Arc::default(),
            drain: Arc::default(),
        }
    }

    /// Where it is.
    pub fn state(&self) -> State {
        match self.state.load(Ordering::Relaxed) {
            0 => State::Starting,
            1 => State::Up,
            2 => State::Ended,
            _ => State::Failed,
        }
    }

    fn set(&self, state: State) {
        self.state.store(state as u8, Ordering::Relaxed);
    }

    fn failed(&self, error: &dyn std::fmt::Display) {
        *self.failure.lock().unwrap_or_else(PoisonError::into_inner) = error.to_string();
        self.set(State::Failed);
    }
}

impl Default for Shown {
    fn default() -> Self {
        Self::new()
    }
}

/// The surroundings of all processes.
#[derive(Clone)]
pub struct Surroundings {
    /// The network.
    pub net: Net,
    /// The object store.
    pub store: Store,
    /// Below it logs are.
    pub dir: PathBuf,
    /// Where gossip goes, by process.
    pub members: Vec<(String, SocketAddr)>,
    /// What is wrong on purpose.
    pub planted: Planted,
}

/// The gossip address of the process of this number.
pub fn gossip_address(number: u8) -> SocketAddr {
    SocketAddr::from((Ipv4Addr::new(10, 0, 0, number + 1), GOSSIP_PORT))
}

impl Surroundings {
    /// The gossip address of a process.
    pub fn gossip_of(&self, name: &str) -> Option<SocketAddr> {
        self.members.iter().find(|(member, _)| member == name).map(|(_, address)| *address)
    }

    async fn membership(&self, name: &str, scope: &TaskScope) -> Result<Membership, Error> {
        let listen = self.gossip_of(name).map(|address| address.to_string());
        let seeds = self.members.iter().map(|(_, address)| address.to_string()).collect();
        let config = ClusterConfig { gossip_listen: listen, seeds, ..ClusterConfig::default() };
        let (net, me) = (self.net.clone(), name.to_owned());
        let reach = move |address: &str| {
            let (pod, _) = address.rsplit_once(':')?;
            Some(PodAddress::InProcess(net.way(&me, pod)))
        };
        let over = GossipNet { transport: self.net.gossip(), reach: Arc::new(reach) };
        Membership::gossip_over(over, &config, name, scope).await
    }

    fn pod_config(&self, name: &str) -> Result<PodConfig, Error> {
        Ok(PodConfig {
            id: name.parse()?,
            wal_dir: self.dir.join("pods").join(name),
            tables_dir: self.dir.join("tables").into(),
            auto_create: true,
            lanes: 2,
            segment_bytes: ByteSize::mib(1),
            wal_bytes_max: ByteSize::mib(8),
            record_bytes_max: ByteSize(64 << 10),
            memory_bytes: ByteSize(256 << 10),
            flush_interval_ms: 250,
            checkpoint_interval: 10,
            advertise: Some(format!("{name}:{PORT}")),
            drain_timeout_ms: 3_000,
            ..PodConfig::default()
        })
    }

    fn machine(&self, seed: u64, shown: &Shown) -> Machine {
        let doomed = Arc::clone(&shown.is_doomed);
        Machine {
            stores: Stores { tables: Arc::new(self.store.clone()), kernels: Arc::new(self.store.at_once()) },
            processor_time: || Duration::ZERO,
            log_pace: Some(pace(seed, self.planted)),
            end: Arc::new(move |_| doomed.store(true, Ordering::Relaxed)),
        }
    }

    /// A pod, until it is told to drain and has done so.
    pub async fn pod(self, name: String, seed: u64, shown: Shown) {
        let scope = TaskScope::new(OnPanic::EndProcess);
        let started = async {
            let membership = self.membership(&name, &scope).await?;
            let (dialer, listener) = link::pipe();
            let config = self.pod_config(&name)?;
            let pipe = Listen::Pipe(listener, dialer.clone());
            let pod = Pod::start_on(self.machine(seed, &shown), config, pipe, membership).await?;
            self.net.listen(&name, dialer);
            Ok::<_, Error>(pod)
        };
        let pod = match Box::pin(started).await {
            Ok(pod) => pod,
            Err(error) => return shown.failed(&error),
        };
        shown.set(State::Up);
        shown.drain.notified().await;
        pod.drain().await;
        shown.set(State::Ended);
    }

    /// A gateway, until it is told to drain and has done so.
    pub async fn gateway(self, name: String, shown: Shown) {
        let scope = TaskScope::new(OnPanic::EndProcess);
        let config = GatewayConfig {
            listen: "off".to_owned(),
            admin_listen: Some("off".to_owned()),
            ..GatewayConfig::default()
        };
        let started = async {
            let membership = self.membership(&name, &scope).await?;
            let (dialer, listener) = link::pipe();
            let gateway = Gateway::start_on(config, membership, listener).await?;
            self.net.listen(&name, dialer);
            Ok::<_, Error>(gateway)
        };
        let gateway = match Box::pin(started).await {
            Ok(gateway) => gateway,
            Err(error) => return shown.failed(&error),
        };
        shown.set(State::Up);
        shown.drain.notified().await;
        gateway.drain(Duration::from_secs(2)).await;
        shown.set(State::Ended);
    }
}

/// A disk that is mostly quick, sometimes slow, and seldom fails: its pod ends then.
fn pace(seed: u64, planted: Planted) -> Pace {
    let random = Mutex::new(StdRng::seed_from_u64(seed));
    Arc::new(move |bytes| {
        let mut random = random.lock().unwrap_or_else(PoisonError::into_inner);
        let longest_us = if random.random_bool(0.1) { 40_000 } else { 2_000 };
        let mut wait = || Duration::from_micros(random.random_range(0..longest_us));
        let (begins_after, flushed_after, told_after) = (wait(), wait(), wait());
        Passage {
            begins_after,
            flushed_after,
            told_after,
            torn_blocks: random.random_range(0..bytes.div_ceil(4096).max(1)),
            fails: random.random_bool(FAILING),
            lies: planted == Planted::AckBeforeFlush,
        }
    })
}
