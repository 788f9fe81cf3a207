//! The pods that a gateway can see: who they are, their phase, how loaded they say they are, and each table's
//! ring order over them.
//!
//! *Owns*: the pool view and the ring. A view is soft state: rebuilt from what is known, never stored.
//! *Does not own*: the choice of a pod (`gateway/src/placement.rs`), how the view is learned.

use std::collections::{BTreeSet, HashMap};
use std::hash::{BuildHasher, Hasher};
use std::sync::Arc;
use std::time::Duration;

use consistent_hash_ring::{Ring, RingBuilder};
use serde::{Deserialize, Serialize};

use crate::ids::{PodId, TableName};
use crate::lifecycle::Phase;
use crate::link::PodAddress;

/// Points of each pod on the ring. The crate's default of 10 spreads tables badly; beyond some hundreds only
/// the cost of building grows.
const VIRTUAL_NODES: usize = 256;
/// Tables that a load report names.
pub const TABLES_REPORTED_MAX: usize = 64;
/// What a pod is taken to carry until it says so itself.
pub const CAPACITY_BYTES_PER_S: f64 = 200e6;

/// What a pod says about its load: four budget fractions, 0 idle and 1 full, and what they come from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LoadReport {
    /// Rises with each report of one life of the pod.
    pub sequence: u64,
    /// Of the bytes that are accepted and not yet durable, or of what the pod can take in a second, whichever is more.
    pub ingress: f64,
    /// Of its processor time.
    pub cpu: f64,
    /// Of the time in which its log is busy with a flush.
    pub log: f64,
    /// Of the memory for durable batches, or of its log's space, whichever is more.
    pub memory: f64,
    /// What the pod can carry, as it has measured itself.
    pub capacity_bytes_per_s: f64,
    /// What it takes now.
    pub bytes_per_s: f64,
    /// Streams that are open.
    pub streams: u32,
    /// Age of the oldest durable record that is not committed.
    pub lag_ms: u64,
    /// Opens that it has refused, since its start.
    pub refused: u64,
    /// Its busiest tables, at most `TABLES_REPORTED_MAX`.
    pub tables: Vec<TableLoad>,
    /// Since the report was made. The receiver's: it is not sent.
    #[serde(skip)]
    pub age: Duration,
}

/// One table's traffic on one pod.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TableLoad {
    /// The table.
    pub table: TableName,
    /// Bytes that its streams send.
    pub bytes_per_s: f64,
    /// How many those are.
    pub streams: u32,
}

impl LoadReport {
    /// The load of the pod: the largest of its fractions.
    pub fn fraction(&self) -> f64 {
        self.ingress.max(self.cpu).max(self.log).max(self.memory)
    }
}

impl Default for LoadReport {
    fn default() -> Self {
        Self {
            sequence: 0,
            ingress: 0.0,
            cpu: 0.0,
            log: 0.0,
            memory: 0.0,
            capacity_bytes_per_s: CAPACITY_BYTES_PER_S,
            bytes_per_s: 0.0,
            streams: 0,
            lag_ms: 0,
            refused: 0,
            tables: Vec::new(),
            age: Duration::ZERO,
        }
    }
}

/// One pod as a gateway, or another pod, sees it.
#[derive(Debug, Clone)]
pub struct PodView {
    /// Its name.
    pub id: PodId,
    /// Where it listens.
    pub address: PodAddress,
    /// Where it is in its life: only active pods take streams.
    pub phase: Phase,
    /// Where it stands, such as an availability zone; None where that is not said.
    pub zone: Option<String>,
    /// For how long it has been active.
    pub active_for: Duration,
    /// What it last said about its load.
    pub load: LoadReport,
    /// What this gateway has placed on it since that report, as a fraction of its capacity.
    pub placed: f64,
    /// Set aside for a moment, since a call to it has just failed: placed on only where nothing else is left.
    pub aside: bool,
}

impl PodView {
    /// An active pod of which nothing else is known.
    pub fn active(id: PodId, address: PodAddress) -> Self {
        Self {
            id,
            address,
            phase: Phase::Active,
            zone: None,
            active_for: Duration::MAX,
            load: LoadReport::default(),
            placed: 0.0,
            aside: false,
        }
    }
}

/// What is known of a table's traffic over the whole pool.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct TableRate {
    /// Bytes per second, all streams together.
    pub bytes_per_s: f64,
    /// Streams that are open.
    pub streams: u32,
    /// On how many pods the table stood lately: its spread shrinks slowly.
    pub spread_min: usize,
}

/// The pool as a gateway sees it.
#[derive(Debug, Clone)]
pub struct PoolView {
    /// All pods, by id.
    pods: Vec<PodView>,
    /// The active ones.
    ring: Arc<TableRing>,
    /// Gateways that place on the same pods.
    pub gateways: u32,
    /// Where the viewer stands.
    pub zone: Option<String>,
    /// Traffic of the tables that are known to have any.
    pub tables: HashMap<TableName, TableRate>,
}

impl PoolView {
    /// A view of these pods. Of two with one id the later one counts.
    pub fn new(pods: impl IntoIterator<Item = PodView>) -> Self {
        let mut sorted: Vec<PodView> = Vec::new();
        for pod in pods {
            match sorted.binary_search_by(|known| known.id.cmp(&pod.id)) {
                Ok(at) => sorted[at] = pod,
                Err(at) => sorted.insert(at, pod),
            }
        }
        let active = sorted.iter().filter(|pod| pod.phase == Phase::Active).map(|pod| pod.id.clone());
        let ring = Arc::new(TableRing::new(active));
        Self { pods: sorted, ring, gateways: 1, zone: None, tables: HashMap::new() }
    }

    /// All pods, by id.
    pub fn pods(&self) -> &[PodView] {
        &self.pods
    }

    /// One pod.
    pub fn pod(&self, id: &PodId) -> Option<&PodView> {
        self.pods.binary_search_by(|pod| pod.id.cmp(id)).ok().map(|at| &self.pods[at])
    }

    /// Changes what is known of one pod, except its phase: that changes the ring, so it takes a new view.
    pub fn update(&mut self, id: &PodId, change: impl FnOnce(&mut PodView)) {
        if let Ok(at) = self.pods.binary_search_by(|pod| pod.id.cmp(id)) {
            let phase = self.pods[at].phase;
            change(&mut self.pods[at]);
            self.pods[at].phase = phase;
        }
    }

    /// The active pods in the table's order, its home first.
    pub fn order<'a>(&'a self, table: &TableName) -> impl Iterator<Item = &'a PodView> {
        self.ring.order(table).filter_map(|id| self.pod(id))
    }

    /// The pod that alone commits to the table: the first active one in its order.
    pub fn home(&self, table: &TableName) -> Option<&PodView> {
        self.order(table).next()
    }
}

/// Each table's order of the active pods. Equal in every process that sees the same pods.
pub struct TableRing {
    ring: Ring<PodId, Mixed>,
}

impl TableRing {
    /// The ring of these pods.
    ///
    /// A pod that leaves is left out of the next ring. It never stays in with a weight of 0: the crate's walk
    /// over all pods would then not end.
    pub fn new(active: impl IntoIterator<Item = PodId>) -> Self {
        let pods: BTreeSet<PodId> = active.into_iter().collect();
        Self { ring: RingBuilder::new(Mixed).vnodes(VIRTUAL_NODES).nodes_iter(pods).build() }
    }

    /// All pods of the ring, each once, in the table's order.
    pub fn order<'a>(&'a self, table: &TableName) -> impl Iterator<Item = &'a PodId> {
        self.ring.replicas(table.as_str())
    }
}

impl std::fmt::Debug for TableRing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "TableRing({} pods)", self.ring.len())
    }
}

/// FNV-1a with the finalizer of MurmurHash3 (A. Appleby, 2011): the same in every process. Bare FNV, the crate's
/// default, puts names that differ in their last characters side by side on the ring, so on one pod.
#[derive(Clone, Copy)]
struct Mixed;

struct MixedHasher(u64);

impl BuildHasher for Mixed {
    type Hasher = MixedHasher;

    fn build_hasher(&self) -> MixedHasher {
        MixedHasher(0xcbf2_9ce4_8422_2325)
    }
}

impl Hasher for MixedHasher {
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }

    fn finish(&self) -> u64 {
        let mut hash = self.0;
        hash = (hash ^ (hash >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
        hash = (hash ^ (hash >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
        hash ^ (hash >> 33)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn pod(number: usize, phase: Phase) -> PodView {
        let id = format!("pod-{number}").parse().expect("valid");
        let address = "127.0.0.1:1".parse().expect("valid");
        PodView { phase, ..PodView::active(id, address) }
    }

    fn view(phases: &[Phase]) -> PoolView {
        PoolView::new(phases.iter().enumerate().map(|(number, phase)| pod(number, *phase)))
    }

    fn table(number: u32) -> TableName {
        format!("t{number}").parse().expect("valid")
    }

    #[test]
    fn an_empty_pool_has_no_home() {
        assert!(PoolView::new([]).home(&table(0)).is_none());
        assert!(view(&[Phase::Draining]).home(&table(0)).is_none());
    }

    #[test]
    fn the_order_does_not_change_between_releases() {
        // Homes are agreed on without talking: another hash in a later release would split the pool in two.
        let view = view(&[Phase::Active; 5]);
        let homes: Vec<&str> =
            (0..6).map(|n| view.home(&table(n)).expect("there are pods").id.as_str()).collect();
        assert_eq!(homes, HOMES_OF_FIVE);
    }

    const HOMES_OF_FIVE: [&str; 6] = ["pod-0", "pod-4", "pod-2", "pod-3", "pod-4", "pod-4"];

    #[test]
    fn tables_with_similar_names_spread() {
        let view = view(&[Phase::Active; 5]);
        let homes: BTreeSet<&PodId> =
            (0..40).map(|n| &view.home(&table(n)).expect("there are pods").id).collect();
        assert_eq!(homes.len(), 5);
    }

    #[test]
    fn tables_spread_evenly() {
        let view = view(&[Phase::Active; 8]);
        let mut tables_of: HashMap<&PodId, u32> = HashMap::new();
        for n in 0..8_000 {
            *tables_of.entry(&view.home(&table(n)).expect("there are pods").id).or_default() += 1;
        }
        assert!(tables_of.values().all(|tables| (700..=1350).contains(tables)), "{tables_of:?}");
    }

    fn phases() -> impl Strategy<Value = Vec<Phase>> {
        let phase = prop_oneof![Just(Phase::Active), Just(Phase::Joining), Just(Phase::Draining)];
        prop::collection::vec(phase, 0..12)
    }

    proptest! {
        #[test]
        fn the_order_ends_and_names_each_active_pod_once(phases in phases(), n: u32) {
            let view = view(&phases);
            let order: Vec<&PodId> = view.order(&table(n)).map(|pod| &pod.id).collect();
            let once: BTreeSet<&PodId> = order.iter().copied().collect();
            let active = phases.iter().filter(|phase| **phase == Phase::Active).count();
            prop_assert_eq!(order.len(), active);
            prop_assert_eq!(once.len(), active);
            prop_assert!(view.order(&table(n)).all(|pod| pod.phase == Phase::Active));
        }

        #[test]
        fn a_pod_that_leaves_moves_only_its_own_tables(n: u32, leaver in 0_usize..6) {
            let before = view(&[Phase::Active; 6]);
            let mut phases = [Phase::Active; 6];
            phases[leaver] = Phase::Draining;
            let after = view(&phases);
            let home = |view: &PoolView| view.home(&table(n)).map(|pod| pod.id.clone()).expect("there are pods");
            let left = format!("pod-{leaver}");
            prop_assert!(home(&before).as_str() == left || home(&before) == home(&after));
        }
    }
}
