//! What is seen of a pool while load runs, once a second: its processes' CPU and memory, and its pods as a gateway sees them.
//!
//! *Owns*: looking.
//! *Does not own*: whom to look at (`site`), how it is shown (`html`).

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tokio::time::MissedTickBehavior;

use super::site::{Site, Watched, members_of};
use crate::cluster::cpu_of;
use crate::pool::{Admin, Pool};

/// From look to look.
const INTERVAL: Duration = Duration::from_secs(1);

/// One look.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Sample {
    /// Seconds since the beginning.
    pub at_s: f64,
    /// By name; `loadtest` is the rig itself.
    pub processes: BTreeMap<String, Usage>,
    /// By name.
    pub pods: BTreeMap<String, PodSeen>,
}

/// What a process takes.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Usage {
    /// Processors, on average since the look before.
    pub cpus: f64,
    /// Memory, MB.
    pub rss_mb: f64,
}

/// What a gateway knows of a pod.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct PodSeen {
    /// Where it is in its life.
    pub phase: String,
    /// Streams that are open at it.
    pub streams: u64,
    /// Of what it can take.
    pub load: f64,
    /// Of its oldest record that is in no table.
    pub lag_ms: Option<f64>,
}

/// Whom to look at now.
#[derive(Default)]
pub(crate) struct Watch {
    now: Mutex<(Vec<Watched>, Option<Admin>)>,
}

impl Watch {
    /// Takes in who is there.
    pub(crate) fn look(&self, site: &mut Site) {
        let (watched, admin) = (site.watched(), site.admins().into_iter().next());
        *self.now.lock().unwrap_or_else(PoisonError::into_inner) = (watched, admin);
    }

    /// The same of a pool of single processes.
    pub(crate) fn look_at(&self, pool: &mut Pool) {
        let watched = members_of(pool);
        let admin = pool.admins().next().map(|(_, admin)| admin.clone());
        *self.now.lock().unwrap_or_else(PoisonError::into_inner) = (watched, admin);
    }
}

/// Looks until it is dropped; each look goes to `seen`.
pub(crate) async fn look(began: Instant, watch: &Watch, seen: &Mutex<Vec<Sample>>) {
    let mut ticks = tokio::time::interval_at((began + INTERVAL).into(), INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
    let mut before: BTreeMap<u32, (Instant, Duration)> = BTreeMap::new();
    let who = |watch: &Watch| watch.now.lock().unwrap_or_else(PoisonError::into_inner).clone();
    usages(&who(watch).0, &mut before);
    loop {
        ticks.tick().await;
        let (watched, admin) = who(watch);
        let mut sample = Sample { at_s: began.elapsed().as_secs_f64(), ..Sample::default() };
        sample.processes = usages(&watched, &mut before);
        // One that does not answer now may be one that was just killed.
        let pods = match &admin {
            Some(admin) => admin.pods().await.unwrap_or_default(),
            None => Vec::new(),
        };
        for pod in pods {
            let seen = PodSeen { phase: pod.phase, streams: pod.streams, load: pod.load, lag_ms: pod.lag_ms };
            sample.pods.insert(pod.id, seen);
        }
        seen.lock().unwrap_or_else(PoisonError::into_inner).push(sample);
    }
}

fn usages(watched: &[Watched], before: &mut BTreeMap<u32, (Instant, Duration)>) -> BTreeMap<String, Usage> {
    let own = Watched { name: "loadtest".to_owned(), pid: std::process::id(), with_children: false };
    let mut all: Vec<Watched> = vec![own];
    for one in watched {
        if one.with_children {
            all.extend(children(one.pid));
        }
        all.push(one.clone());
    }
    all.iter().filter_map(|one| Some((one.name.clone(), usage(one.pid, before)?))).collect()
}

/// None where it is gone.
fn usage(pid: u32, before: &mut BTreeMap<u32, (Instant, Duration)>) -> Option<Usage> {
    let (cpu, now) = (cpu_of(&pid.to_string()).ok()?, Instant::now());
    let cpus = match before.insert(pid, (now, cpu)) {
        Some((then, cpu_then)) => {
            cpu.saturating_sub(cpu_then).as_secs_f64() / now.duration_since(then).as_secs_f64().max(1e-3)
        }
        None => 0.0,
    };
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kib: f64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(Usage { cpus, rss_mb: kib * 1024.0 / 1e6 })
}

/// Processes that this one has started, by the names that they were given with `--id`.
fn children(of: u32) -> Vec<Watched> {
    // Each is listed by the thread that started it.
    let tasks = std::fs::read_dir(format!("/proc/{of}/task")).into_iter().flatten().flatten();
    let listed: Vec<String> =
        tasks.map(|task| std::fs::read_to_string(task.path().join("children")).unwrap_or_default()).collect();
    let pids =
        listed.iter().flat_map(|pids| pids.split_whitespace()).filter_map(|pid| pid.parse::<u32>().ok());
    let named = |pid: u32| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).ok()?;
        let words: Vec<String> =
            line.split(|byte| *byte == 0).map(|word| String::from_utf8_lossy(word).into_owned()).collect();
        let name = words.windows(2).find(|pair| pair[0] == "--id").map(|pair| pair[1].clone());
        Some(Watched { name: name.unwrap_or_else(|| format!("child-{pid}")), pid, with_children: false })
    };
    pids.filter_map(named).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_is_seen() {
        let mut before = BTreeMap::new();
        usages(&[], &mut before);
        let began = Instant::now();
        while began.elapsed() < Duration::from_millis(200) {
            std::hint::spin_loop();
        }
        let seen = usages(&[], &mut before)["loadtest"];
        assert!(seen.cpus > 0.05 && seen.rss_mb > 1.0, "{seen:?}");
        let gone = Watched { name: "gone".to_owned(), pid: u32::MAX, with_children: true };
        assert_eq!(usages(&[gone], &mut before).len(), 1);
    }
}
