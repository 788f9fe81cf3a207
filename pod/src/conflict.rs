//! What no pool survives: two processes that say they are one pod, and pods that write different tables of one name.
//!
//! Nobody decides for the pool: of two members that cannot both be right the younger one goes, since the older one has the
//! producers. One that was killed and is back at once is not two: its older life is heard of for a moment still.
//!
//! *Owns*: who cannot be in a pool with whom.
//! *Does not own*: what members say (`membership`), what follows (`app`).

use std::time::Duration;

use sluice_shared::error::Error;
use sluice_shared::ids::PodId;
use sluice_shared::lifecycle::Phase;
use sluice_shared::membership::Members;
use tokio::time::Instant;
use uuid::Uuid;

/// A namesake that is heard of for longer is no older life of this pod.
const OLDER_LIFE_HEARD: Duration = Duration::from_secs(6);

/// What this pod has seen of others that it cannot be in a pool with.
#[derive(Debug)]
pub(crate) struct Conflicts {
    me: PodId,
    /// When this process joined; None without gossip, where nothing is known of the others.
    life: Option<u64>,
    tables: Uuid,
    namesake: Option<(u64, Instant)>,
}

impl Conflicts {
    /// Of the pod `me`, which writes these tables.
    pub(crate) fn new(me: PodId, life: Option<u64>, tables: Uuid) -> Self {
        Self { me, life, tables, namesake: None }
    }

    /// Looks at the pool as it is now.
    ///
    /// # Errors
    /// Where this pod cannot be in it: `Invalid`, with what to change.
    pub(crate) fn look(&mut self, members: &Members, now: Instant) -> Result<(), Error> {
        let Some(own_life) = self.life else { return Ok(()) };
        let me = &self.me;
        for (id, pod) in members.pods.iter().filter(|(id, pod)| *id != me && pod.lost.is_none()) {
            let differs = pod.state.tables.is_some_and(|tables| tables != self.tables);
            if differs && pod.state.phase != Phase::Drained && pod.life < own_life {
                let message = format!(
                    "pod {me} writes other tables than pod {id} at {}, which was there before: all pods of a pool share one \
                     directory of tables; give pod.tables_dir (--data) the one that {id} has, on storage that both reach",
                    pod.state.address
                );
                return Err(Error::invalid("other_tables", message));
            }
        }
        let Some((address, life)) = &members.namesake else {
            self.namesake = None;
            return Ok(());
        };
        let since = match self.namesake {
            Some((known, since)) if known == *life => since,
            _ => {
                if *life > own_life {
                    tracing::warn!(pod = %me, %address,
                        "another process says that it is this pod: give it a name of its own (pod.id)");
                }
                now
            }
        };
        self.namesake = Some((*life, since));
        if *life < own_life && now.duration_since(since) > OLDER_LIFE_HEARD {
            let message = format!(
                "there is a pod {me} in the pool already, at {address}: give this one a name of its own (pod.id, --id)"
            );
            return Err(Error::invalid("pod_id_taken", message));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use sluice_shared::membership::{PodMember, PodState};
    use sluice_shared::pool::LoadReport;

    use super::*;

    const OURS: Uuid = Uuid::from_u128(1);

    fn pod(life: u64, phase: Phase, tables: Option<Uuid>) -> PodMember {
        let address = "127.0.0.1:7171".parse().expect("valid");
        let state = PodState { address, phase, zone: None, tables, load: LoadReport::default() };
        PodMember { state, heard: Instant::now(), active_since: None, lost: None, life }
    }

    fn conflicts() -> Conflicts {
        Conflicts::new("pod-2".parse().expect("valid"), Some(100), OURS)
    }

    #[test]
    fn of_pods_with_different_tables_the_younger_one_goes() {
        let other = Some(Uuid::from_u128(2));
        for (life, phase, tables, goes) in [
            (50, Phase::Active, other, true),
            (50, Phase::Draining, other, true),
            (50, Phase::Active, Some(OURS), false),
            (50, Phase::Active, None, false),
            (50, Phase::Drained, other, false),
            (150, Phase::Active, other, false),
        ] {
            let mut members = Members::default();
            members.pods.insert("pod-1".parse().expect("valid"), pod(life, phase, tables));
            let looked = conflicts().look(&members, Instant::now());
            assert_eq!(looked.is_err(), goes, "{life} {phase} {tables:?}");
            if let Err(error) = looked {
                assert_eq!(error.code, "other_tables");
                assert!(error.message.contains("pod-1 at 127.0.0.1:7171"), "{error}");
            }
            members.pods.values_mut().for_each(|pod| pod.lost = Some(Instant::now()));
            conflicts().look(&members, Instant::now()).expect("it is gone");
        }
    }

    #[test]
    fn an_older_life_passes_and_a_namesake_does_not() {
        let namesake = |life| Members {
            namesake: Some(("127.0.0.1:7171".parse().expect("valid"), life)),
            ..Members::default()
        };
        let (mut conflicts, start) = (conflicts(), Instant::now());
        let after = |seconds| start + Duration::from_secs(seconds);
        conflicts.look(&namesake(50), start).expect("an older life, perhaps");
        conflicts.look(&namesake(50), after(5)).expect("still");
        conflicts.look(&Members::default(), after(6)).expect("it was one");
        conflicts.look(&namesake(60), after(7)).expect("an older life, perhaps");
        let error = conflicts.look(&namesake(60), after(14)).expect_err("it does not go");
        assert_eq!(error.code, "pod_id_taken");
        conflicts.look(&namesake(150), after(20)).expect("the younger one is to go");
        conflicts.look(&namesake(150), after(60)).expect("the younger one is to go");
    }
}
