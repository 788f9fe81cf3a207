//! The pool as this pod sees it: which pod is a table's home, and the links to the others.
//!
//! *Owns*: the newest view of the pool, a link to each pod that has been asked, which of them are set aside for a while
//! since they did not answer.
//! *Does not own*: how the view is learned (whoever calls `update`), what is said over a link.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use sluice_shared::error::Error;
use sluice_shared::ids::{PodId, TableName};
use sluice_shared::lifecycle::Phase;
use sluice_shared::link::{self, PodAddress};
use sluice_shared::pool::{PodView, PoolView};
use sluice_shared::proto::MESSAGE_BYTES_MAX;
use sluice_shared::proto::pod_client::PodClient;
use tokio::sync::watch;
use tokio::time::Instant;
use tonic::transport::Channel;

/// A home that did not answer is not asked for this long, doubled with each failure in a row up to `ASIDE_MAX`: a
/// table whose home hangs is to lose a second now and then, not in each round.
const ASIDE_MIN: Duration = Duration::from_secs(1);
const ASIDE_MAX: Duration = Duration::from_secs(30);

/// Who commits to a table.
pub enum Home {
    /// This pod, by the ring or since the home does not answer.
    Me,
    /// Another one.
    Peer(PodClient<Channel>, PodId),
}

/// The pool. Clones share it.
#[derive(Clone)]
pub struct Pool {
    shared: Arc<Shared>,
}

struct Shared {
    me: PodId,
    view: watch::Sender<Arc<PoolView>>,
    /// Counts changes by which a table's home can have moved: the view itself changes with each load report.
    moves: watch::Sender<u64>,
    links: Mutex<HashMap<PodId, Link>>,
    /// How often a home did not answer.
    passed_over: AtomicU64,
}

struct Link {
    address: String,
    client: PodClient<Channel>,
    failures: u32,
    aside_until: Option<Instant>,
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Pool({} of {} pods)", self.shared.me, self.shared.view.borrow().pods().len())
    }
}

impl Pool {
    /// A pool that `me` sees like this.
    pub fn new(me: PodId, view: PoolView) -> Self {
        let (view, moves) = (watch::Sender::new(Arc::new(view)), watch::Sender::new(0));
        let (links, passed_over) = (Mutex::default(), AtomicU64::new(0));
        Self { shared: Arc::new(Shared { me, view, moves, links, passed_over }) }
    }

    /// A pool that is this pod alone: it is every table's home.
    pub fn alone(me: PodId) -> Self {
        Self::new(me, PoolView::new([]))
    }

    /// A pool of this pod and `peers` that never changes. All of them have to be given the same pods.
    ///
    /// # Errors
    /// `Invalid` for an address that is none.
    pub fn fixed(me: PodId, address: PodAddress, peers: &[(PodId, PodAddress)]) -> Result<Self, Error> {
        for (_, address) in peers {
            link::channel(address)?;
        }
        let peers = peers.iter().map(|(id, address)| PodView::active(id.clone(), address.clone()));
        let view = PoolView::new([PodView::active(me.clone(), address)].into_iter().chain(peers));
        Ok(Self::new(me, view))
    }

    /// This pod.
    pub fn me(&self) -> &PodId {
        &self.shared.me
    }

    /// Whether no other pod is known.
    pub fn is_alone(&self) -> bool {
        self.shared.view.borrow().pods().iter().all(|pod| pod.id == self.shared.me)
    }

    /// The newest view.
    pub fn view(&self) -> Arc<PoolView> {
        Arc::clone(&self.shared.view.borrow())
    }

    /// The pool is seen like this from now on.
    pub fn update(&self, view: PoolView) {
        let pods = |view: &PoolView| -> Vec<(PodId, Phase, String)> {
            view.pods().iter().map(|pod| (pod.id.clone(), pod.phase, pod.address.to_string())).collect()
        };
        let is_move = pods(&self.view()) != pods(&view);
        self.links().retain(|id, _| view.pod(id).is_some());
        self.shared.view.send_replace(Arc::new(view));
        if is_move {
            self.shared.moves.send_modify(|moves| *moves += 1);
        }
    }

    /// Told when tables' homes may have moved.
    pub fn changed(&self) -> watch::Receiver<u64> {
        self.shared.moves.subscribe()
    }

    /// Who commits to the table: where no pod is active, or the home has lately not answered, this one does.
    pub fn home(&self, table: &TableName) -> Home {
        self.home_at(table, Instant::now())
    }

    fn home_at(&self, table: &TableName, now: Instant) -> Home {
        let view = self.view();
        let Some(home) = view.home(table).filter(|home| home.id != self.shared.me) else { return Home::Me };
        let mut links = self.links();
        match Self::link(&mut links, home) {
            Some(link) if link.aside_until.is_none_or(|until| until <= now) => {
                Home::Peer(link.client.clone(), home.id.clone())
            }
            _ => Home::Me,
        }
    }

    /// The way to another pod. None where nobody has heard of it.
    pub fn client(&self, pod: &PodId) -> Option<PodClient<Channel>> {
        let view = self.view();
        Self::link(&mut self.links(), view.pod(pod)?).map(|link| link.client.clone())
    }

    /// How often a home has been passed over since it did not answer.
    pub fn passed_over(&self) -> u64 {
        self.shared.passed_over.load(Ordering::Relaxed)
    }

    /// A pod did not answer as a home. Answers whether it did so before.
    pub fn set_aside(&self, pod: &PodId) -> bool {
        self.set_aside_at(pod, Instant::now())
    }

    fn set_aside_at(&self, pod: &PodId, now: Instant) -> bool {
        self.shared.passed_over.fetch_add(1, Ordering::Relaxed);
        let mut links = self.links();
        let Some(link) = links.get_mut(pod) else { return false };
        let pause = ASIDE_MIN.saturating_mul(1 << link.failures.min(16)).min(ASIDE_MAX);
        link.failures += 1;
        link.aside_until = Some(now + pause);
        link.failures > 1
    }

    /// A pod has answered as a home.
    pub fn answered(&self, pod: &PodId) {
        if let Some(link) = self.links().get_mut(pod) {
            (link.failures, link.aside_until) = (0, None);
        }
    }

    /// The link to a pod, anew where it has moved.
    fn link<'a>(links: &'a mut HashMap<PodId, Link>, pod: &PodView) -> Option<&'a mut Link> {
        let address = pod.address.to_string();
        if links.get(&pod.id).is_none_or(|link| link.address != address) {
            let client = PodClient::new(link::channel(&pod.address).ok()?)
                .max_decoding_message_size(MESSAGE_BYTES_MAX)
                .max_encoding_message_size(MESSAGE_BYTES_MAX);
            links.insert(pod.id.clone(), Link { address, client, failures: 0, aside_until: None });
        }
        links.get_mut(&pod.id)
    }

    fn links(&self) -> MutexGuard<'_, HashMap<PodId, Link>> {
        self.shared.links.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(id: &str, phase: Phase) -> PodView {
        let address = "127.0.0.1:1".parse().expect("valid");
        PodView { phase, ..PodView::active(id.parse().expect("valid"), address) }
    }

    fn homes(pool: &Pool, now: Instant) -> Vec<String> {
        let home = |n: u32| match pool.home_at(&format!("t{n}").parse().expect("valid"), now) {
            Home::Me => "me".to_owned(),
            Home::Peer(_, id) => id.to_string(),
        };
        (0..40).map(home).collect()
    }

    #[tokio::test]
    async fn only_active_pods_are_homes_and_a_move_is_told() {
        let (pool, now) = (Pool::alone("pod-1".parse().expect("valid")), Instant::now());
        let mut moves = pool.changed();
        assert!(pool.is_alone() && homes(&pool, now).iter().all(|home| home == "me"));
        pool.update(PoolView::new([pod("pod-1", Phase::Active), pod("pod-2", Phase::Active)]));
        assert!(!pool.is_alone() && moves.has_changed().expect("there"));
        moves.mark_unchanged();
        let both = homes(&pool, now);
        assert!(both.iter().any(|home| home == "me") && both.iter().any(|home| home == "pod-2"));
        pool.update(PoolView::new([pod("pod-1", Phase::Active), pod("pod-2", Phase::Active)]));
        assert!(!moves.has_changed().expect("there"), "nothing has moved");
        pool.update(PoolView::new([pod("pod-1", Phase::Draining), pod("pod-2", Phase::Active)]));
        assert!(moves.has_changed().expect("there"));
        assert!(homes(&pool, now).iter().all(|home| home == "pod-2"));
    }

    #[tokio::test]
    async fn a_home_that_does_not_answer_is_asked_again_later_and_later() {
        let (pool, now) = (Pool::alone("pod-1".parse().expect("valid")), Instant::now());
        pool.update(PoolView::new([pod("pod-2", Phase::Active)]));
        let other: PodId = "pod-2".parse().expect("valid");
        let is_asked = |now| homes(&pool, now).iter().all(|home| home == "pod-2");
        assert!(is_asked(now) && !pool.set_aside_at(&other, now) && !is_asked(now));
        let later = now + ASIDE_MIN;
        assert!(is_asked(later) && pool.set_aside_at(&other, later));
        assert!(!is_asked(later + ASIDE_MIN), "twice as long after the second time");
        assert!(is_asked(later + 2 * ASIDE_MIN));
        pool.set_aside_at(&other, later);
        pool.answered(&other);
        assert!(is_asked(later));
    }
}
