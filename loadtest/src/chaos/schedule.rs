//! ◆ What is done to a pool, and when: everything once, in an order that a seed decides, and then at random.
//!
//! *Owns*: the acts and the schedule; the same seed gives the same schedule.
//! *Does not own*: doing it (`chaos`): whom an act meets, and how long a process takes, are the machine's share.

use std::fmt;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::seq::{IndexedRandom, SliceRandom};
use rand::{RngExt, SeedableRng};
use sluice_shared::fault::{Action, Point, Then};

use crate::pool::Member;

/// Nothing happens before this, so that streams are there,
const QUIET_BEFORE: Duration = Duration::from_secs(2);
/// and acts come no closer than this on average, so that pods have the time to start again.
const STEP_MIN: Duration = Duration::from_millis(1_000);
/// `errno`s of a disk that fails, of one that is full, and of a store that is asked too much.
const EIO: i32 = 5;
const ENOSPC: i32 = 28;
const EBUSY: i32 = 16;

/// Points at which pods die, where their logs are on disks. What is not met in time is met in another pod.
const DEATHS_OF_DISK_LOGS: [Point; 7] = [
    Point::WalCreate,
    Point::WalMark,
    Point::WalWriteBefore,
    Point::WalWriteAfter,
    Point::WalFlushBefore,
    Point::WalFlushAfter,
    Point::WalReplay,
];
/// The same where logs are objects beside the tables,
const DEATHS_OF_OBJECT_LOGS: [Point; 7] = [
    Point::LogPutBefore,
    Point::LogPutAfter,
    Point::LogDelete,
    Point::AdoptBefore,
    Point::AdoptSealed,
    Point::AdoptAfter,
    Point::AdoptNoted,
];
/// and wherever they are.
const DEATHS_ANYWHERE: [Point; 11] = [
    Point::TrimBefore,
    Point::TrimAfter,
    Point::Frame,
    Point::AckBefore,
    Point::AckAfter,
    Point::ParquetClosed,
    Point::ParquetStored,
    Point::MapStored,
    Point::CommitBefore,
    Point::CommitAfter,
    Point::AnswerBefore,
];
/// Points at which gateways die, while a pod drains.
pub const DEATHS_OF_GATEWAYS: [Point; 3] = [Point::HandoffStop, Point::HandoffOpened, Point::HandoffLeave];

/// What is done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Act {
    /// `kill -9`.
    Kill(Member),
    /// `kill -9`, and it is not started before this has passed.
    Away(Member, Duration),
    /// So many `kill -9`, each as soon as it runs again.
    Storm(Member, u32),
    /// SIGSTOP, and SIGCONT after this.
    Stop(Member, Duration),
    /// SIGTERM.
    Drain(Member),
    /// A pod drains while another one has just died.
    DrainInCrash {
        /// It drains.
        drains: Member,
        /// It dies.
        dies: Member,
    },
    /// It dies at this point.
    Die(Member, Point),
    /// A pod drains, and a gateway dies at this point of a handoff.
    DieInHandoff(Member, Point),
    /// Something goes wrong at this point.
    Fault(Member, Point, Action),
    /// A connection to it is cut behind so many bytes.
    Cut(Member, u32),
    /// Its wall clock is wrong by so many milliseconds.
    Clock(Member, i64),
    /// Logs and tables have no room for so long.
    FullDisk(Duration),
    /// All pods die, and their logs and tables lose what is not flushed.
    PowerLoss,
}

/// An act and its time, from the beginning.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// When.
    pub at: Duration,
    /// What.
    pub act: Act,
}

/// Which acts there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kinds {
    /// All.
    All,
    /// Pods die and drain, and nothing else: no producer may notice.
    Ends,
}

/// Who is there.
#[derive(Debug, Clone, Copy)]
pub struct World {
    /// `pod-1`, `pod-2`, …
    pub pods: usize,
    /// Gateways.
    pub gateways: usize,
    /// What may happen.
    pub kinds: Kinds,
    /// Logs are objects beside the tables.
    pub object_log: bool,
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:6.2} s  ", self.at.as_secs_f64())?;
        match &self.act {
            Act::Kill(member) => write!(f, "kill -9 {member}"),
            Act::Away(member, lasts) => write!(f, "kill -9 {member}, away for {} ms", lasts.as_millis()),
            Act::Storm(member, times) => write!(f, "kill -9 {member}, {times} times"),
            Act::Stop(member, lasts) => write!(f, "stop {member} for {} ms", lasts.as_millis()),
            Act::Drain(member) => write!(f, "drain {member}"),
            Act::DrainInCrash { drains, dies } => write!(f, "kill -9 {dies} and drain {drains}"),
            Act::Die(member, point) => write!(f, "{member} dies at {}", point.name()),
            Act::DieInHandoff(member, point) => write!(f, "{member} dies at {}", point.name()),
            Act::Fault(member, point, action) => write!(f, "{member} at {}: {action}", point.name()),
            Act::Cut(member, bytes) => write!(f, "cut a connection to {member} behind {bytes} bytes"),
            Act::Clock(member, ms) => write!(f, "{member}'s clock is wrong by {ms} ms"),
            Act::FullDisk(lasts) => write!(f, "no room for logs and tables, for {} ms", lasts.as_millis()),
            Act::PowerLoss => f.write_str("all pods lose their power"),
        }
    }
}

/// What happens within `lasts`.
pub fn schedule(seed: u64, lasts: Duration, world: World) -> Vec<Step> {
    let mut random = StdRng::seed_from_u64(seed);
    let room = lasts.saturating_sub(QUIET_BEFORE).as_secs_f64();
    let most = (room / STEP_MIN.as_secs_f64()) as usize;
    let mut acts = world.each(&mut random);
    acts.shuffle(&mut random);
    while acts.len() < most {
        let mut more = world.each(&mut random);
        more.shuffle(&mut random);
        acts.extend(more);
    }
    acts.truncate(most);
    let step = room / acts.len().max(1) as f64;
    let at = |number: usize, random: &mut StdRng| (number as f64 + random.random_range(0.0..0.9)) * step;
    let steps = acts.into_iter().enumerate();
    steps
        .map(|(number, act)| Step {
            at: QUIET_BEFORE + Duration::from_secs_f64(at(number, &mut random)),
            act,
        })
        .collect()
}

impl World {
    /// Each kind of act once at least.
    fn each(self, random: &mut StdRng) -> Vec<Act> {
        if self.kinds == Kinds::Ends {
            let kills = (0..5).map(|_| Act::Kill(self.pod(random)));
            return kills.collect::<Vec<_>>().into_iter().chain([Act::Drain(self.pod(random))]).collect();
        }
        let deaths = self.deaths().into_iter().map(|point| Act::Die(self.pod(random), point));
        let mut acts: Vec<Act> = deaths.collect();
        let handoffs = DEATHS_OF_GATEWAYS.into_iter();
        acts.extend(handoffs.map(|point| Act::DieInHandoff(self.gateway(random), point)));
        acts.extend(self.ends(random));
        if self.object_log {
            acts.extend(self.absences(random));
        }
        acts.extend(self.faults(random));
        acts
    }

    /// Where pods die.
    pub fn deaths(self) -> Vec<Point> {
        let (of_logs, put) = match self.object_log {
            false => (DEATHS_OF_DISK_LOGS, Point::StoreCreate),
            true => (DEATHS_OF_OBJECT_LOGS, Point::StoreLog),
        };
        [&of_logs[..], &DEATHS_ANYWHERE, &[put, Point::StoreVersion, Point::StoreGet]].concat()
    }

    /// Pods that are gone for so long that another one takes their logs over; who was only stopped is fenced.
    fn absences(self, random: &mut StdRng) -> Vec<Act> {
        let mut ms = || Duration::from_millis(random.random_range(4_000..7_000));
        let lasts = [ms(), ms(), ms(), ms()];
        let mut pod = || self.pod(random);
        let [one, two, three, four] = [pod(), pod(), pod(), pod()];
        vec![
            Act::Stop(one, lasts[0]),
            Act::Stop(two, lasts[1]),
            Act::Away(three, lasts[2]),
            Act::Away(four, lasts[3]),
        ]
    }

    /// What processes suffer as a whole.
    fn ends(self, random: &mut StdRng) -> Vec<Act> {
        let (drains, dies) = self.two_pods(random);
        let mut ms = |from: u64, to: u64| Duration::from_millis(random.random_range(from..to));
        let (pod_stops, gateway_stops, full) = (ms(500, 4_000), ms(300, 2_000), ms(500, 2_500));
        let day_ms = 24 * 60 * 60 * 1_000;
        vec![
            Act::Kill(self.pod(random)),
            Act::Kill(self.pod(random)),
            Act::Kill(self.gateway(random)),
            Act::Kill(self.gateway(random)),
            Act::Storm(self.pod(random), random.random_range(2..5)),
            Act::Stop(self.pod(random), pod_stops),
            Act::Stop(self.gateway(random), gateway_stops),
            Act::Drain(self.pod(random)),
            Act::Drain(self.gateway(random)),
            Act::DrainInCrash { drains, dies },
            Act::Cut(self.gateway(random), random.random_range(1..40_000)),
            Act::Cut(self.gateway(random), random.random_range(1..2_000)),
            Act::Cut(self.pod(random), random.random_range(1..40_000)),
            Act::Cut(self.pod(random), random.random_range(1..2_000)),
            Act::Clock(self.pod(random), random.random_range(-2 * day_ms..2 * day_ms)),
            Act::Clock(self.pod(random), random.random_range(-60_000..60_000)),
            Act::FullDisk(full),
            Act::PowerLoss,
        ]
    }

    /// What their log and their store do to them.
    fn faults(self, random: &mut StdRng) -> Vec<Act> {
        let on_disk = [
            (Point::WalWriteBefore, 1, 0, Then::Fail(EIO)),
            (Point::WalFlushBefore, 1, 0, Then::Fail(EIO)),
            (Point::WalCreate, 3, 0, Then::Fail(ENOSPC)),
            (Point::WalWriteBefore, 40, 25, Then::GoOn),
            (Point::WalFlushAfter, 4, 400, Then::GoOn),
        ];
        let in_objects = [
            (Point::StoreLog, 1, 0, Then::Fail(EIO)),
            (Point::StoreLog, 1, 0, Then::LoseReply),
            (Point::StoreLog, 12, 0, Then::Fail(ENOSPC)),
            (Point::StoreLog, 8, 150, Then::Fail(EBUSY)),
            (Point::StoreLog, 6, 400, Then::GoOn),
        ];
        let in_store = [
            (Point::StorePut, 8, 250, Then::GoOn),
            (Point::StorePut, 5, 0, Then::Fail(EIO)),
            (Point::StorePut, 5, 150, Then::Fail(EBUSY)),
            (Point::StorePut, 2, 0, Then::LoseReply),
            (Point::StoreCreate, 6, 200, Then::Fail(EBUSY)),
            (Point::StoreCreate, 1, 0, Then::LoseReply),
            (Point::StoreVersion, 4, 0, Then::Fail(EIO)),
            (Point::StoreVersion, 3, 0, Then::LoseReply),
            (Point::StoreVersion, 1, 0, Then::LoseReply),
            (Point::StoreGet, 6, 100, Then::Fail(EIO)),
            (Point::StoreList, 4, 0, Then::Fail(EIO)),
            (Point::StoreList, 6, 0, Then::Stale),
            (Point::StoreDelete, 2, 0, Then::Fail(EIO)),
        ];
        let act = |(point, times, delay_ms, then): (Point, u32, u64, Then)| {
            let skip = random.random_range(0..5);
            let action = Action { skip, times, delay: Duration::from_millis(delay_ms), then };
            Act::Fault(self.pod(random), point, action)
        };
        let of_logs = if self.object_log { in_objects } else { on_disk };
        of_logs.into_iter().chain(in_store).map(act).collect()
    }

    fn pod(self, random: &mut StdRng) -> Member {
        Member::Pod(format!("pod-{}", random.random_range(1..=self.pods)))
    }

    fn two_pods(self, random: &mut StdRng) -> (Member, Member) {
        let all: Vec<usize> = (1..=self.pods).collect();
        let some: Vec<usize> = all.sample(random, 2).copied().collect();
        let pod = |place: usize| Member::Pod(format!("pod-{}", some.get(place).copied().unwrap_or(1)));
        (pod(0), pod(1))
    }

    fn gateway(self, random: &mut StdRng) -> Member {
        Member::Gateway(random.random_range(0..self.gateways))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORLD: World = World { pods: 3, gateways: 2, kinds: Kinds::All, object_log: false };
    const OBJECTS: World = World { object_log: true, ..WORLD };

    #[test]
    fn the_same_seed_gives_the_same_schedule() {
        let minute = |seed| schedule(seed, Duration::from_secs(60), WORLD);
        assert_eq!(minute(5), minute(5));
        assert_ne!(minute(5), minute(6));
        let long = Duration::from_secs(600);
        assert_eq!(schedule(5, long, WORLD), schedule(5, long, WORLD));
    }

    #[test]
    fn a_schedule_rises_and_fits_and_has_everything_once_where_there_is_time() {
        has_everything(WORLD);
        has_everything(OBJECTS);
    }

    fn has_everything(world: World) {
        let lasts = Duration::from_secs(75);
        let steps = schedule(9, lasts, world);
        assert!(steps.windows(2).all(|pair| pair[0].at <= pair[1].at));
        assert!(steps.iter().all(|step| step.at >= QUIET_BEFORE && step.at <= lasts));
        for point in world.deaths() {
            assert!(
                steps.iter().any(|step| matches!(&step.act, Act::Die(_, at) if *at == point)),
                "{point:?}"
            );
        }
        for point in DEATHS_OF_GATEWAYS {
            let dies = |step: &Step| matches!(&step.act, Act::DieInHandoff(_, at) if *at == point);
            assert!(steps.iter().any(dies), "{point:?}");
        }
        assert!(steps.iter().any(|step| step.act == Act::PowerLoss));
        let met = |of: fn(&Point) -> bool| {
            steps.iter().any(|step| matches!(&step.act, Act::Fault(_, point, _) if of(point)))
        };
        assert_eq!(met(|point| *point == Point::StoreLog), world.object_log);
        assert_eq!(met(|point| *point == Point::WalFlushAfter), !world.object_log);
    }
}
