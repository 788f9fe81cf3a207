//! Who decides where a stream goes: the service's own rules, and what they are compared with.
//!
//! *Owns*: the comparisons, which are too simple to go wrong.
//! *Does not own*: the rules of the service.

use std::time::Instant;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use sluice_gateway::placement::{StreamHints, place};
use sluice_shared::ids::{PodId, TableName};
use sluice_shared::pool::{PodLoad, PoolView, Trust};

/// Draws for a pod that is not set aside.
const DRAWS_MAX: usize = 64;

/// Who decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    /// The service: it places, and hot pods shed.
    Sluice,
    /// The service without shedding.
    PlaceOnly,
    /// Any pod.
    Random,
    /// The pod that reports least.
    LeastLoaded,
    /// Of two the one that reports less.
    TwoChoices,
    /// The table's home.
    Hash,
}

/// One gateway.
pub(super) struct Gateway {
    /// What it knows.
    pub(super) view: PoolView,
    rng: StdRng,
}

/// What a stream asks for.
pub(super) struct Asked<'a> {
    pub(super) table: &'a TableName,
    pub(super) last_pod: Option<&'a PodId>,
    pub(super) tried: &'a [PodId],
    pub(super) rate_bytes_per_s: Option<u64>,
}

impl Gateway {
    pub(super) fn new(view: PoolView, seed: u64) -> Self {
        Self { view, rng: StdRng::seed_from_u64(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15)) }
    }
}

impl Policy {
    /// As it is shown.
    pub fn name(self) -> &'static str {
        match self {
            Self::Sluice => "sluice",
            Self::PlaceOnly => "sluice, no shedding",
            Self::Random => "random",
            Self::LeastLoaded => "least loaded",
            Self::TwoChoices => "two choices",
            Self::Hash => "hash of the table",
        }
    }

    pub(super) fn sheds(self) -> bool {
        self == Self::Sluice
    }

    /// The comparisons know only what pods report, which all gateways hear alike.
    pub(super) fn has_own_views(self) -> bool {
        matches!(self, Self::Sluice | Self::PlaceOnly)
    }

    pub(super) fn choose(self, gateway: &mut Gateway, asked: &Asked<'_>, now: Instant) -> Option<PodId> {
        let Gateway { view, rng } = gateway;
        view.advance(now);
        if self.has_own_views() {
            let (last_pod, rate_bytes_per_s, tried) = (asked.last_pod, asked.rate_bytes_per_s, asked.tried);
            let hints = StreamHints { last_pod, rate_bytes_per_s, tried };
            let placement = place(view, asked.table, &hints, rng).ok()?;
            // Pods of this world take whatever comes, so nothing is given back.
            let _taken = view.placed(&placement.pod, placement.adds, now);
            return Some(placement.pod);
        }
        self.compare(view, rng, asked)
    }

    fn compare(self, view: &PoolView, rng: &mut StdRng, asked: &Asked<'_>) -> Option<PodId> {
        let (pods, pod) = view.active();
        let is_open =
            |pod: &PodLoad<'_>| Trust::NotAside.takes(pod.pod) && !asked.tried.contains(&pod.pod.id);
        let reported = |pod: &PodLoad<'_>| pod.pod.load.fraction();
        let mut drawn = || (0..DRAWS_MAX).map(|_| pod(rng.random_range(0..pods))).find(is_open);
        let chosen = match self {
            Self::Random => drawn(),
            Self::LeastLoaded => {
                (0..pods).map(&pod).filter(is_open).min_by(|a, b| reported(a).total_cmp(&reported(b)))
            }
            Self::TwoChoices => {
                let (first, second) = (drawn()?, drawn()?);
                Some(if reported(&second) < reported(&first) { second } else { first })
            }
            Self::Hash | Self::Sluice | Self::PlaceOnly => view.loads(asked.table).find(is_open),
        };
        chosen.map(|pod| pod.pod.id.clone())
    }
}
