//! Each table's order of the active pods, on a consistent hash ring.
//!
//! *Owns*: the points of the ring, the order.
//! *Does not own*: which pods are active.

use std::collections::BTreeSet;
use std::hash::{BuildHasher, Hash, Hasher};

use consistent_hash_ring::{Ring, RingBuilder};

use crate::ids::{PodId, TableName};

/// Points of each pod on the ring. The crate's default of 10 spreads tables badly; beyond some hundreds only
/// the cost of building grows.
const VIRTUAL_NODES: usize = 256;
/// Look-ups per pod before the rest of an order is sorted: by then some 13 % of the pods are left.
const LOOKUPS_PER_POD: usize = 2;

/// Each table's order of the active pods. Equal in every process that sees the same pods.
pub struct TableRing {
    pods: Vec<PodId>,
    /// Every point is a node of its own, put in from the lowest to the highest, so that building costs a sort. Where a
    /// pod is a node of many points, each is inserted into the middle of all: with 2,000 pods that takes a minute.
    ring: Ring<Point, AsSaid>,
}

/// One of a pod's points, which says itself where it stands.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Point {
    at: u64,
    pod: u32,
}

/// A key that is looked up at this very place.
struct At(u64);

impl Hash for Point {
    fn hash<H: Hasher>(&self, state: &mut H) {
        At(self.at).hash(state);
    }
}

impl Hash for At {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u128(self.0.into());
    }
}

impl TableRing {
    /// The ring of these pods.
    ///
    /// A pod that leaves is left out of the next ring. It never stays in with a weight of 0: the crate's walk
    /// over all pods would then not end.
    pub fn new(active: impl IntoIterator<Item = PodId>) -> Self {
        let pods: Vec<PodId> = active.into_iter().collect::<BTreeSet<_>>().into_iter().collect();
        let mut points = Vec::with_capacity(pods.len() * VIRTUAL_NODES);
        for (pod, id) in (0_u32..).zip(&pods) {
            let mut at = Mixed.hash_one(id.as_str());
            for _ in 0..VIRTUAL_NODES {
                points.push(Point { at, pod });
                at = Mixed.hash_one(at);
            }
        }
        points.sort_unstable_by_key(|point| (point.at, point.pod));
        Self { pods, ring: RingBuilder::new(AsSaid).vnodes(1).nodes_iter(points).build() }
    }

    /// All pods of the ring, each once, in the table's order.
    pub fn order<'a>(&'a self, table: &TableName) -> impl Iterator<Item = &'a PodId> {
        self.places(table).map(|place| &self.pods[place])
    }

    /// The order as places among the ring's pods, which are sorted by id. Found as it is asked for: who wants the
    /// first few pays for no more.
    pub(super) fn places(&self, table: &TableName) -> Places<'_> {
        let table = Mixed.hash_one(table.as_str());
        Places { ring: self, table, at: table, seen: vec![false; self.pods.len()], lookups: 0, rest: None }
    }

    /// The pods, by id.
    pub(super) fn pods(&self) -> &[PodId] {
        &self.pods
    }
}

/// See `TableRing::places`.
pub(super) struct Places<'a> {
    ring: &'a TableRing,
    table: u64,
    /// Where the next look-up is.
    at: u64,
    seen: Vec<bool>,
    lookups: usize,
    /// What is left once enough was looked up, last first.
    rest: Option<Vec<usize>>,
}

impl Places<'_> {
    /// By what table and pod give together, so that the order does not change with pods that come and go.
    fn sort_rest(&self) -> Vec<usize> {
        let left = self.seen.iter().enumerate().filter(|(_, seen)| !**seen);
        let key = |place: usize| Mixed.hash_one((self.table, self.ring.pods[place].as_str()));
        let mut rest: Vec<(u64, usize)> = left.map(|(place, _)| (key(place), place)).collect();
        rest.sort_unstable_by(|a, b| b.cmp(a));
        rest.into_iter().map(|(_, place)| place).collect()
    }
}

impl Iterator for Places<'_> {
    type Item = usize;

    fn next(&mut self) -> Option<usize> {
        while self.lookups < LOOKUPS_PER_POD * self.seen.len() {
            self.lookups += 1;
            let place = self.ring.ring.try_get(At(self.at))?.pod as usize;
            self.at = Mixed.hash_one(self.at);
            if !std::mem::replace(&mut self.seen[place], true) {
                return Some(place);
            }
        }
        if self.rest.is_none() {
            self.rest = Some(self.sort_rest());
        }
        self.rest.as_mut()?.pop()
    }
}

impl std::fmt::Debug for TableRing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "TableRing({} pods)", self.pods.len())
    }
}

/// The ring's own hasher: places are found beforehand. The crate also hashes a node's place, to take out further points
/// that an earlier node of that name may have; what comes of that must not be a place of another point.
#[derive(Clone, Copy)]
struct AsSaid;

struct AsSaidHasher(u64);

impl BuildHasher for AsSaid {
    type Hasher = AsSaidHasher;

    fn build_hasher(&self) -> AsSaidHasher {
        AsSaidHasher(0)
    }
}

impl Hasher for AsSaidHasher {
    fn write(&mut self, bytes: &[u8]) {
        self.0 = Mixed.hash_one((self.0, bytes, "not a place"));
    }

    fn write_u128(&mut self, place: u128) {
        self.0 = place as u64;
    }

    fn finish(&self) -> u64 {
        self.0
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

    fn table(number: u32) -> TableName {
        format!("t{number}").parse().expect("valid")
    }

    fn pods(numbers: impl IntoIterator<Item = u32>) -> BTreeSet<PodId> {
        numbers.into_iter().map(|n| format!("pod-{n}").parse().expect("valid")).collect()
    }

    fn order(ring: &TableRing, number: u32) -> Vec<PodId> {
        ring.order(&table(number)).cloned().collect()
    }

    #[test]
    fn a_ring_of_two_thousand_pods_is_built_while_one_waits() {
        let ring = TableRing::new(pods(0..2_000));
        assert_eq!(ring.ring.len(), 2_000 * VIRTUAL_NODES, "no point is lost");
        assert_eq!(order(&ring, 7).into_iter().collect::<BTreeSet<_>>(), pods(0..2_000));
    }

    // Each case builds rings: few are enough, and many take seconds.
    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        #[test]
        fn the_order_begins_as_the_crate_has_it(numbers in prop::collection::btree_set(0..100_u32, 1..12), n: u32) {
            let theirs = RingBuilder::new(Mixed).vnodes(VIRTUAL_NODES).nodes_iter(pods(numbers.clone())).build();
            let theirs: Vec<PodId> = theirs.replicas(table(n).as_str()).take(1).cloned().collect();
            prop_assert_eq!(&order(&TableRing::new(pods(numbers)), n)[..1], theirs);
        }

        #[test]
        fn the_order_names_each_pod_once_and_keeps_those_that_stay(
            numbers in prop::collection::btree_set(0..100_u32, 2..40),
            n: u32,
        ) {
            let all = order(&TableRing::new(pods(numbers.clone())), n);
            prop_assert_eq!(all.iter().cloned().collect::<BTreeSet<_>>(), pods(numbers.clone()));
            prop_assert_eq!(all.len(), numbers.len());
            // Whoever leaves, the first of the others is first still.
            let left = all.iter().skip(1).cloned().collect::<BTreeSet<_>>();
            let leaver = all[all.len() - 1].clone();
            let without = order(&TableRing::new(all.iter().filter(|pod| **pod != leaver).cloned()), n);
            prop_assert_eq!(&without[0], &all[0]);
            prop_assert!(left.contains(&leaver));
        }
    }
}
