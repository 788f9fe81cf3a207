//! Who is in the pool: gateways and pods find each other by gossip, and each says of itself what the others should know.
//!
//! A pod's phase, addresses and load report are its own state: nobody else writes them, and there is no coordinator.
//! What a process sees of the others is soft: it can be a fraction of a second old, and is rebuilt after a restart.
//!
//! *Owns*: the members as they say they are, when they were last heard of, who is lost.
//! *Does not own*: what follows from that (`pool`, placement), the protocol (Scuttlebutt, the crate `chitchat`). Its
//! datagrams carry no seal: whoever reaches the port can say anything, so only members may.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use chitchat::transport::{Transport, UdpTransport};
use chitchat::{
    ChitchatConfig, ChitchatHandle, ChitchatId, FailureDetectorConfig, NodeState, ProtocolVersion,
    spawn_chitchat,
};
use serde::{Deserialize, Serialize};
use tokio::net::UdpSocket;
use tokio::sync::watch;
use tokio::time::Instant;
use uuid::Uuid;

use crate::config::ConfigError;
use crate::error::Error;
use crate::ids::PodId;
use crate::lifecycle::{Phase, TaskScope, now_us};
use crate::link::PodAddress;
use crate::pool::{LoadReport, PodView, PoolView};

/// A member talks to some others so often.
const GOSSIP_INTERVAL: Duration = Duration::from_millis(200);
/// After so many rounds what a member says has reached some others, who tell the rest.
const ROUNDS_TOLD: u32 = 3;
/// And after so many whoever was there when they began has been heard of: one that is new is taken to be there once it was
/// heard of twice, and by way of a seed.
const ROUNDS_HEARD: u32 = 5;
/// A member that was not heard of for this many of its usual intervals is lost.
const PHI_LOST: f64 = 8.0;
/// What the interval is taken to be before it was seen.
const FIRST_INTERVAL: Duration = Duration::from_millis(400);
/// Longer silences say nothing about how often a member is heard of.
const INTERVAL_MAX: Duration = Duration::from_secs(3);
/// A lost member is remembered by the protocol so long: it would take it for a new one after that.
const LOST_FORGOTTEN: Duration = Duration::from_secs(600);
/// Who has seeds and hears of nobody says so, first after this, then each so often.
const ALONE_FIRST: Duration = Duration::from_secs(5);
const ALONE_AGAIN: Duration = Duration::from_secs(60);
/// A lost pod stays in the view so long, for people.
const LOST_SHOWN: Duration = Duration::from_secs(60);

/// The `[cluster]` section: how gateways and pods find each other.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ClusterConfig {
    /// Members of another name are not listened to.
    pub name: String,
    /// Where this process gossips, `host:port` (UDP); nothing for no gossip: then pods are named by hand.
    pub gossip_listen: Option<String>,
    /// The address by which the others reach that, where it is another.
    pub gossip_advertise: Option<String>,
    /// Some other members, `host:port`. A host name may stand for many addresses, and is asked again each minute.
    pub seeds: Vec<String>,
    /// Where this process stands, such as an availability zone: gateways prefer pods of their own.
    pub zone: Option<String>,
}

impl Default for ClusterConfig {
    fn default() -> Self {
        Self {
            name: "sluice".to_owned(),
            gossip_listen: None,
            gossip_advertise: None,
            seeds: Vec::new(),
            zone: None,
        }
    }
}

impl ClusterConfig {
    /// Checks the values against each other.
    ///
    /// # Errors
    /// `Relation`, naming the key, its value and what it must be.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let refuse = |text: String| Err(ConfigError::Relation(text));
        let addresses =
            [("gossip_listen", &self.gossip_listen), ("gossip_advertise", &self.gossip_advertise)];
        for (key, address) in addresses {
            if let Some(address) = address
                && address.parse::<SocketAddr>().is_err()
            {
                return refuse(format!(
                    "cluster.{key} is {address:?}: expected an IP address and port, such as 10.0.0.7:7172"
                ));
            }
        }
        if let Some(seed) = self.seeds.iter().find(|seed| !is_reachable(seed)) {
            return refuse(format!(
                "cluster.seeds has {seed:?}: expected host:port, with a port from 1 to 65535 and each seed by itself"
            ));
        }
        if self.gossip_listen.is_none() && !self.seeds.is_empty() {
            return refuse("cluster.seeds needs cluster.gossip_listen (--gossip-listen)".to_owned());
        }
        let any = |address: &String| {
            address.parse::<SocketAddr>().is_ok_and(|address| address.ip().is_unspecified())
        };
        if self.gossip_listen.as_ref().is_some_and(any) && self.gossip_advertise.as_ref().is_none_or(any) {
            return refuse(
                "cluster.gossip_listen listens on all addresses: say in cluster.gossip_advertise by which one the others \
                 reach it"
                    .to_owned(),
            );
        }
        Ok(())
    }
}

/// Whether the text can be where another process listens.
fn is_reachable(seed: &str) -> bool {
    let is_address = seed.parse::<PodAddress>().is_ok();
    is_address && !seed.contains([',', ' ', ';']) && seed.rsplit(':').next().is_some_and(|port| port != "0")
}

/// What a pod says of itself.
#[derive(Debug, Clone, PartialEq)]
pub struct PodState {
    /// Where it listens.
    pub address: PodAddress,
    /// Where it is in its life.
    pub phase: Phase,
    /// Where it stands.
    pub zone: Option<String>,
    /// Which tables it writes: the identity of their directory. None where it does not say.
    pub tables: Option<Uuid>,
    /// Its load.
    pub load: LoadReport,
}

/// A pod as this process knows it.
#[derive(Debug, Clone)]
pub struct PodMember {
    /// What it said last.
    pub state: PodState,
    /// When it said so, as far as it was heard here.
    pub heard: Instant,
    /// Since when it has been active, as far as it was seen here; None where it was so when it was first seen.
    pub active_since: Option<Instant>,
    /// Since when nothing has been heard of it.
    pub lost: Option<Instant>,
    /// Rises with each life of the pod.
    pub life: u64,
    /// Whether it has said so itself: one that was named by hand is only taken to be there.
    pub is_heard: bool,
}

impl PodMember {
    /// Whether the pod is there and in this phase.
    pub fn is(&self, phase: Phase) -> bool {
        self.lost.is_none() && self.state.phase == phase
    }
}

/// A gateway as this process knows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GatewayMember {
    /// Where its admin API listens; None where it has none.
    pub admin: Option<String>,
}

/// All that this process knows of the pool.
#[derive(Debug, Clone, Default)]
pub struct Members {
    /// The pods, by name.
    pub pods: BTreeMap<PodId, PodMember>,
    /// The gateways, by what tells them apart.
    pub gateways: BTreeMap<String, GatewayMember>,
    /// Where this process stands.
    pub zone: Option<String>,
    /// Another process that says it is the pod that this one is: its address, and its life.
    pub namesake: Option<(PodAddress, u64)>,
}

impl Members {
    /// Brings a view of the pool up to date. Pods that are lost are not in it.
    pub fn teach(&self, view: &mut PoolView, now: Instant) {
        let there = || self.pods.iter().filter(|(_, pod)| pod.lost.is_none());
        let pods = there().map(|(id, pod)| {
            let active_for = pod.active_since.map_or(Duration::MAX, |since| now.duration_since(since));
            let (phase, zone) = (pod.state.phase, pod.state.zone.clone());
            PodView { phase, zone, active_for, ..PodView::active(id.clone(), pod.state.address.clone()) }
        });
        view.set_members(pods, now.into_std());
        view.gateways = u32::try_from(self.gateways.len()).unwrap_or(u32::MAX).max(1);
        view.zone.clone_from(&self.zone);
        for (id, pod) in there() {
            let load = LoadReport { age: now.duration_since(pod.heard), ..pod.state.load.clone() };
            view.report(id, load, now.into_std());
        }
    }

    /// A view of the pool as it is now.
    pub fn view(&self, now: Instant) -> PoolView {
        let mut view = PoolView::new([]);
        self.teach(&mut view, now);
        view
    }

    fn announce(&mut self, id: PodId, state: PodState, life: u64, now: Instant) {
        let known = self.pods.get(&id).filter(|known| known.life == life && known.lost.is_none());
        let active = state.phase == Phase::Active;
        let active_since = match known {
            Some(known) if active && known.state.phase == Phase::Active => known.active_since,
            Some(_) if active => Some(now),
            // It may have been so for long: only who was seen before is known to be new.
            None if active && self.pods.contains_key(&id) => Some(now),
            _ => None,
        };
        let heard = match known {
            Some(known) if known.state.load.sequence == state.load.sequence => known.heard,
            _ => now,
        };
        self.pods.insert(id, PodMember { state, heard, active_since, lost: None, life, is_heard: true });
    }
}

/// Keys of a member's gossiped state.
const ROLE: &str = "role";
const ADDRESS: &str = "address";
const PHASE: &str = "phase";
const ZONE: &str = "zone";
const TABLES: &str = "tables";
const LOAD: &str = "load";
const ADMIN: &str = "admin";
const POD: &str = "pod";
const GATEWAY: &str = "gateway";

/// This process's place in the pool. Clones share it.
#[derive(Clone)]
pub struct Membership {
    /// What tells this process from the others.
    name: Arc<str>,
    members: watch::Sender<Arc<Members>>,
    gossip: Option<Arc<Gossip>>,
}

/// Another net than UDP and TCP, for simulations.
pub struct Net<'t> {
    /// What carries the gossip.
    pub transport: &'t dyn Transport,
    /// The way from this process to a pod that says it is there.
    pub reach: Reach,
}

/// Turns the address that a pod says into the way to it.
pub type Reach = Arc<dyn Fn(&str) -> Option<PodAddress> + Send + Sync>;

struct Gossip {
    handle: ChitchatHandle,
    /// As the net has it; None for TCP.
    reach: Option<Reach>,
    address: SocketAddr,
    /// When this process joined, in microseconds: rises with each life of a member.
    life: u64,
    /// What this process says of itself and has not said yet.
    wish: watch::Sender<Vec<(&'static str, String)>>,
    /// The pod that this process is.
    pod: Mutex<Option<PodId>>,
}

impl Membership {
    /// Without gossip: these pods, and what those of this process say. Pods elsewhere are taken to be active.
    pub fn fixed(pods: Vec<(PodId, PodAddress)>) -> Self {
        let mut members = Members::default();
        for (id, address) in pods {
            let load = LoadReport::default();
            let state = PodState { address, phase: Phase::Active, zone: None, tables: None, load };
            members.announce(id, state, 0, Instant::now());
        }
        members.pods.values_mut().for_each(|pod| pod.is_heard = false);
        Self { name: "this".into(), members: watch::Sender::new(Arc::new(members)), gossip: None }
    }

    /// Joins the pool as `name`, unique among all members; what it is is said by `announce_pod` or `announce_gateway`.
    ///
    /// # Errors
    /// `Invalid` for a configuration that cannot be; `Unavailable` where the address cannot be had.
    pub async fn gossip(config: &ClusterConfig, name: &str, scope: &TaskScope) -> Result<Self, Error> {
        Self::join(config, name, scope, None).await
    }

    /// As `gossip`, over another net.
    ///
    /// # Errors
    /// As `gossip`.
    pub async fn gossip_over(
        net: Net<'_>,
        config: &ClusterConfig,
        name: &str,
        scope: &TaskScope,
    ) -> Result<Self, Error> {
        Self::join(config, name, scope, Some(net)).await
    }

    async fn join(
        config: &ClusterConfig,
        name: &str,
        scope: &TaskScope,
        net: Option<Net<'_>>,
    ) -> Result<Self, Error> {
        config.validate().map_err(|error| Error::invalid("invalid_configuration", error.to_string()))?;
        let listen = config.gossip_listen.as_deref().unwrap_or_default();
        let cannot = |error: &dyn std::fmt::Display| {
            let message = format!("cannot gossip on {listen:?} (cluster.gossip_listen, UDP): {error}");
            Error::unavailable("cannot_listen", message)
        };
        let address = match net {
            None => free_address(listen).await.map_err(|error| cannot(&error))?,
            Some(_) => listen.parse().map_err(|error| cannot(&error))?,
        };
        let advertise = match config.gossip_advertise.as_deref().map(str::parse::<SocketAddr>) {
            Some(Ok(advertise)) if advertise.port() == 0 => SocketAddr::new(advertise.ip(), address.port()),
            Some(Ok(advertise)) => advertise,
            _ => address,
        };
        let life = u64::try_from(now_us()).unwrap_or_default();
        let chitchat = ChitchatConfig {
            chitchat_id: ChitchatId::new(name, life, advertise),
            cluster_id: config.name.clone(),
            gossip_interval: GOSSIP_INTERVAL,
            listen_addr: address,
            seed_nodes: config.seeds.clone(),
            failure_detector_config: FailureDetectorConfig {
                phi_threshold: PHI_LOST,
                max_interval: INTERVAL_MAX,
                initial_interval: FIRST_INTERVAL,
                dead_node_grace_period: LOST_FORGOTTEN,
                ..FailureDetectorConfig::default()
            },
            marked_for_deletion_grace_period: LOST_FORGOTTEN,
            catchup_callback: None,
            extra_liveness_predicate: None,
            protocol_version: ProtocolVersion::V1,
        };
        let transport = net.as_ref().map_or(&UdpTransport as &dyn Transport, |net| net.transport);
        let handle = spawn_chitchat(chitchat, Vec::new(), transport).await.map_err(|error| cannot(&error))?;
        let reach = net.map(|net| net.reach);
        let (wish, pod) = (watch::Sender::new(Vec::new()), Mutex::new(None));
        let gossip = Arc::new(Gossip { handle, reach, address, life, wish, pod });
        let members = Members { zone: config.zone.clone(), ..Members::default() };
        let members = watch::Sender::new(Arc::new(members));
        let membership = Self { name: name.into(), members, gossip: Some(Arc::clone(&gossip)) };
        scope.spawn("gossip says", say(Arc::clone(&gossip), scope.clone()));
        if !config.seeds.is_empty() {
            scope.spawn("alone", complain_alone(membership.clone(), config.seeds.clone(), scope.clone()));
        }
        scope.spawn("gossip hears", hear(gossip, membership.members.clone(), scope.clone()));
        Ok(membership)
    }

    /// Where this process gossips.
    pub fn gossip_address(&self) -> Option<SocketAddr> {
        self.gossip.as_ref().map(|gossip| gossip.address)
    }

    /// When this process joined, in microseconds since 1970: of two members the younger one has the larger. None without
    /// gossip.
    pub fn life(&self) -> Option<u64> {
        self.gossip.as_ref().map(|gossip| gossip.life)
    }

    /// Waits until another member was heard of, at most so long; not at all without gossip.
    pub async fn met(&self, patience: Duration) {
        if self.gossip.is_none() {
            return;
        }
        let mut members = self.members.subscribe();
        // The sender lives in this membership: only the time can end it.
        let _ = tokio::time::timeout(patience, members.wait_for(|members| self.has_others(members))).await;
    }

    /// Whether another member than this one is among them.
    fn has_others(&self, members: &Members) -> bool {
        let is_gateway = members.gateways.keys().any(|name| **name != *self.name);
        is_gateway || members.pods.keys().any(|id| *id.as_str() != *self.name)
    }

    /// What this process knows of the pool, as it changes.
    pub fn watch(&self) -> watch::Receiver<Arc<Members>> {
        self.members.subscribe()
    }

    /// What this process knows of the pool now.
    pub fn now(&self) -> Arc<Members> {
        Arc::clone(&self.members.borrow())
    }

    /// Says what a pod of this process is from now on.
    pub fn announce_pod(&self, id: &PodId, state: PodState) {
        if let Some(gossip) = &self.gossip {
            *gossip.pod.lock().unwrap_or_else(PoisonError::into_inner) = Some(id.clone());
            let mut says = vec![
                (ROLE, POD.to_owned()),
                (ADDRESS, state.address.to_string()),
                (PHASE, state.phase.to_string()),
                (LOAD, serde_json::to_string(&state.load).unwrap_or_default()),
            ];
            says.extend(state.zone.clone().map(|zone| (ZONE, zone)));
            says.extend(state.tables.map(|tables| (TABLES, tables.to_string())));
            gossip.wish.send_replace(says);
        }
        self.members.send_modify(|members| {
            let members = Arc::make_mut(members);
            let life = members.pods.get(id).map_or(0, |known| known.life);
            members.announce(id.clone(), state, life, Instant::now());
        });
    }

    /// Waits until what was announced last has reached some others: a process that ends before that is taken for lost.
    pub async fn told(&self) {
        if self.gossip.is_some() {
            tokio::time::sleep(GOSSIP_INTERVAL * ROUNDS_TOLD).await;
        }
    }

    /// Waits until whoever is there now has been heard of, or as good as: at once without gossip.
    pub async fn heard(&self) {
        if self.gossip.is_some() {
            tokio::time::sleep(GOSSIP_INTERVAL * ROUNDS_HEARD).await;
        }
    }

    /// Says what the gateway of this process is.
    pub fn announce_gateway(&self, gateway: GatewayMember) {
        if let Some(gossip) = &self.gossip {
            let mut says = vec![(ROLE, GATEWAY.to_owned())];
            says.extend(gateway.admin.clone().map(|admin| (ADMIN, admin)));
            gossip.wish.send_replace(says);
        }
        self.members.send_modify(|members| {
            Arc::make_mut(members).gateways.insert(self.name.to_string(), gateway);
        });
    }
}

/// The address with a port: members are told it before chitchat binds it.
async fn free_address(listen: &str) -> std::io::Result<SocketAddr> {
    UdpSocket::bind(listen).await?.local_addr()
}

/// Says so while none of the seeds has answered: nothing else tells a wrong seed from a pool that is still to come.
async fn complain_alone(membership: Membership, seeds: Vec<String>, scope: TaskScope) {
    let mut pause = ALONE_FIRST;
    loop {
        tokio::select! {
            biased; // the end first
            () = scope.cancelled() => return,
            () = membership.met(pause) => {}
        }
        // As `met` has it: by another measure this would go round without a pause.
        if membership.has_others(&membership.now()) {
            return;
        }
        tracing::warn!(seeds = %seeds.join(", "), "no other member of the pool has answered yet: are these the others' gossip \
             addresses (cluster.gossip_listen, UDP), and is cluster.name theirs?");
        pause = ALONE_AGAIN;
    }
}

/// Tells the others what this process says of itself.
async fn say(gossip: Arc<Gossip>, scope: TaskScope) {
    let mut wishes = gossip.wish.subscribe();
    loop {
        let says = wishes.borrow_and_update().clone();
        let chitchat = gossip.handle.chitchat();
        let mut chitchat = chitchat.lock().await;
        let state = chitchat.self_node_state();
        says.into_iter().for_each(|(key, value)| state.set(key, value));
        drop(chitchat);
        tokio::select! {
            biased; // the end first
            () = scope.cancelled() => break,
            changed = wishes.changed() => if changed.is_err() { break },
        }
    }
    if let Err(error) = gossip.handle.initiate_shutdown() {
        tracing::debug!(%error, "gossip had ended");
    }
}

/// Follows what the others say, and who is lost.
async fn hear(gossip: Arc<Gossip>, members: watch::Sender<Arc<Members>>, scope: TaskScope) {
    let mut live = gossip.handle.with_chitchat(|chitchat| chitchat.live_nodes_watcher()).await;
    let mut tick = tokio::time::interval(LOST_SHOWN / 4);
    loop {
        let reach = gossip.reach.as_ref();
        let heard: Vec<_> =
            live.borrow_and_update().iter().map(|(id, state)| Heard::read(id, state, reach)).collect();
        members.send_modify(|members| {
            let me = gossip.pod.lock().unwrap_or_else(PoisonError::into_inner).clone();
            apply(Arc::make_mut(members), heard, me.as_ref().map(|me| (me, gossip.life)), Instant::now());
        });
        tokio::select! {
            biased; // the end first
            () = scope.cancelled() => return,
            changed = live.changed() => if changed.is_err() { return },
            _ = tick.tick() => {}
        }
    }
}

/// What one member says of itself.
struct Heard {
    name: String,
    life: u64,
    says: Option<Says>,
}

enum Says {
    Pod(PodId, Box<PodState>),
    Gateway(GatewayMember),
}

impl Heard {
    fn read(id: &ChitchatId, state: &NodeState, reach: Option<&Reach>) -> Self {
        let says = match state.get(ROLE) {
            Some(POD) => Self::pod(id, state, reach),
            Some(GATEWAY) => {
                Some(Says::Gateway(GatewayMember { admin: state.get(ADMIN).map(str::to_owned) }))
            }
            _ => None,
        };
        Self { name: id.node_id.to_string(), life: id.generation_id, says }
    }

    /// None where it has not said all of it yet, or says what this version does not understand.
    fn pod(id: &ChitchatId, state: &NodeState, reach: Option<&Reach>) -> Option<Says> {
        let address = state.get(ADDRESS)?;
        let pod = PodState {
            address: reach.map_or_else(|| address.parse().ok(), |reach| reach(address))?,
            phase: state.get(PHASE)?.parse().ok()?,
            zone: state.get(ZONE).map(str::to_owned),
            tables: state.get(TABLES).and_then(|tables| tables.parse().ok()),
            load: state.get(LOAD).and_then(|load| serde_json::from_str(load).ok())?,
        };
        Some(Says::Pod(id.node_id.parse().ok()?, Box::new(pod)))
    }
}

/// `me`: the pod that this process is, and its life.
fn apply(members: &mut Members, heard: Vec<Heard>, me: Option<(&PodId, u64)>, now: Instant) {
    let own_life = me.map(|(_, life)| life);
    let me = me.map(|(id, _)| id);
    members.namesake = None;
    let mut lives: BTreeMap<PodId, (u64, Box<PodState>)> = BTreeMap::new();
    members.gateways.clear();
    for Heard { name, life, says } in heard {
        match says {
            Some(Says::Gateway(gateway)) => drop(members.gateways.insert(name, gateway)),
            Some(Says::Pod(id, state)) if Some(&id) == me && Some(life) != own_life => {
                members.namesake = Some((state.address, life));
            }
            // After a quick restart both lives of a pod can be taken to be there: the newer one counts.
            Some(Says::Pod(id, state)) if lives.get(&id).is_none_or(|(known, _)| *known < life) => {
                lives.insert(id, (life, state));
            }
            _ => {}
        }
    }
    for (id, pod) in &mut members.pods {
        if !lives.contains_key(id) && Some(id) != me && pod.lost.is_none() {
            if pod.state.phase != Phase::Drained {
                tracing::warn!(pod = %id, "pod is lost: nothing is heard of it any more");
            }
            pod.lost = Some(now);
        }
    }
    members.pods.retain(|_, pod| pod.lost.is_none_or(|lost| now.duration_since(lost) < LOST_SHOWN));
    for (id, (life, state)) in lives {
        // What it says of itself is known here before it is heard.
        if Some(&id) != me {
            members.announce(id, *state, life, now);
        }
    }
}

#[cfg(test)]
mod tests;
