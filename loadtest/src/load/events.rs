//! What happens to a pool, and to its producers, while load runs.
//!
//! *Owns*: when what is done to whom.
//! *Does not own*: the pool (`site`), producers (`stream`).

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use sluice_shared::fault::{Action, Point};
use tokio::sync::watch;
use tokio::time::sleep_until;

use super::report::Happened;
use super::sample::Watch;
use super::scenario::{Event, Scenario, What};
use super::site::Site;
use super::stream::{Kick, Plan};
use crate::pool::{Member, Pool};

/// What a slow store is slow at: all that a commit puts.
const SLOW_POINTS: [Point; 3] = [Point::StorePut, Point::StoreCreate, Point::StoreVersion];

/// Whether something happens that only fault points can bring about.
pub fn need_faults(scenario: &Scenario) -> bool {
    scenario.events.iter().any(|event| event.what == What::SlowStore)
}

/// Whether what is to happen can happen here.
///
/// # Errors
/// It cannot: why, and what to do.
pub(crate) fn check(scenario: &Scenario, sluice: &Path, is_ours: bool) -> anyhow::Result<()> {
    for event in &scenario.events {
        let is_to_producers = matches!(event.what, What::Reconnect | What::SlowAcks);
        ensure!(
            is_ours || is_to_producers,
            "{} at {:.1} s needs a pool that is started for it: leave --gateway out",
            event.what.word(),
            event.at
        );
    }
    if need_faults(scenario) && !has_points(sluice)? {
        bail!(
            "slow-store needs fault points, which {} does not have: they are in debug builds (cargo build) and in those \
             with --features sluice/faults; give one by --sluice FILE",
            sluice.display()
        );
    }
    Ok(())
}

fn has_points(sluice: &Path) -> anyhow::Result<bool> {
    let program = std::fs::read(sluice).with_context(|| sluice.display().to_string())?;
    let name = SLOW_POINTS[0].name().as_bytes();
    Ok(program.windows(name.len()).any(|bytes| bytes == name))
}

/// Makes things happen.
pub(crate) struct Events<'a> {
    pub(crate) site: &'a mut Site,
    pub(crate) watch: &'a Watch,
    pub(crate) plans: &'a [Arc<Plan>],
    /// Of the plans' loads.
    pub(crate) names: Vec<String>,
    pub(crate) kick: watch::Sender<Kick>,
    pub(crate) began: Instant,
    pub(crate) say: &'a (dyn Fn(&str) + Sync),
}

/// Half of an event that lasts, or all of one that does not.
#[derive(Clone, Copy)]
struct Step<'e> {
    at: f64,
    event: &'e Event,
    is_end: bool,
}

impl Events<'_> {
    /// Does all of them when it is time, and answers what was done.
    ///
    /// # Errors
    /// Something cannot be done.
    pub(crate) async fn run(&mut self, events: &[Event]) -> anyhow::Result<Vec<Happened>> {
        let begins = events.iter().map(|event| Step { at: event.at, event, is_end: false });
        let ends = events
            .iter()
            .filter_map(|event| event.lasts.map(|lasts| Step { at: event.at + lasts, event, is_end: true }));
        let mut steps: Vec<Step<'_>> = begins.chain(ends).collect();
        steps.sort_by(|a, b| a.at.total_cmp(&b.at));
        let mut happened = Vec::new();
        for step in steps {
            sleep_until((self.began + Duration::from_secs_f64(step.at)).into()).await;
            let from = self.began.elapsed().as_secs_f64();
            let name = name_of(&step);
            (self.say)(&format!("{from:.1} s: {name}"));
            Box::pin(self.act(&step)).await.with_context(|| format!("{name} (at {} s)", step.at))?;
            self.watch.look(self.site);
            happened.push(Happened { from_s: from, to_s: self.began.elapsed().as_secs_f64(), name });
        }
        Ok(happened)
    }

    async fn act(&mut self, step: &Step<'_>) -> anyhow::Result<()> {
        let event = step.event;
        match event.what {
            What::Reconnect => {
                let load =
                    event.load.as_ref().and_then(|load| self.names.iter().position(|name| name == load));
                let share = event.share.unwrap_or(1.0);
                self.kick.send_modify(|kick| *kick = Kick { number: kick.number + 1, share, load });
                Ok(())
            }
            What::SlowAcks => {
                let delay_ms = if step.is_end { 0 } else { event.delay_ms.unwrap_or(0) };
                let is_meant = |name: &String| event.load.as_ref().is_none_or(|load| load == name);
                let meant = self.plans.iter().zip(&self.names).filter(|(_, name)| is_meant(name));
                meant.for_each(|(plan, _)| plan.answer_delay_ms.store(delay_ms, Ordering::Relaxed));
                Ok(())
            }
            _ => {
                let Site::Pool(pool) = &mut *self.site else { bail!("the pool is not of single processes") };
                // What is to be looked at changes with each pod, not only at the end.
                if event.what == What::RollingRestart {
                    for id in pool.running_pods() {
                        pool.drain_pod(&id).await?;
                        pool.restart_pod(&id).await?;
                        self.watch.look_at(pool);
                    }
                    return Ok(());
                }
                act_on(pool, step).await
            }
        }
    }
}

fn name_of(step: &Step<'_>) -> String {
    let Event { what, pod, gateway, count, delay_ms, share, .. } = step.event;
    let who = pod.clone().or(gateway.map(|number| format!("gateway-{number}"))).unwrap_or_default();
    match (what, step.is_end) {
        (What::Drain, _) => format!("{who} drains"),
        (What::Kill, _) => format!("kill -9 {who}"),
        (What::Start, _) => format!("{who} starts"),
        (What::Add, _) => format!("+{count} pod{}", if *count == 1 { "" } else { "s" }),
        (What::Stop, false) => format!("{who} stands still"),
        (What::Stop, true) => format!("{who} goes on"),
        (What::RollingRestart, _) => "rolling restart".to_owned(),
        (What::Reconnect, _) => format!("{:.0} % reconnect", share.unwrap_or(1.0) * 100.0),
        (What::SlowAcks, false) => format!("acks read {} ms late", delay_ms.unwrap_or(0)),
        (What::SlowAcks, true) => "acks read at once".to_owned(),
        (What::SlowStore, false) => format!("store +{} ms", delay_ms.unwrap_or(0)),
        (What::SlowStore, true) => "store as before".to_owned(),
    }
}

async fn act_on(pool: &mut Pool, step: &Step<'_>) -> anyhow::Result<()> {
    let event = step.event;
    let member = match (&event.pod, event.gateway) {
        (Some(pod), _) => Some(Member::Pod(pod.clone())),
        (None, Some(number)) => Some(Member::Gateway(number.saturating_sub(1))),
        (None, None) => None,
    };
    let wanted = || member.clone().context("to whom?");
    match event.what {
        What::Drain => pool.drain_pod(event.pod.as_deref().unwrap_or_default()).await,
        What::Kill => pool.take(&wanted()?).with_context(|| format!("{} does not run", Who(&member)))?.kill(),
        What::Start => match wanted()? {
            Member::Pod(id) => pool.restart_pod(&id).await,
            Member::Gateway(number) => pool.restart_gateway(number).await,
        },
        What::Add => {
            for _ in 0..event.count {
                pool.add_pod().await?;
            }
            Ok(())
        }
        What::Stop => {
            let signal = if step.is_end { libc::SIGCONT } else { libc::SIGSTOP };
            let process = pool.process(&wanted()?);
            process.with_context(|| format!("{} does not run", Who(&member)))?.signal(signal)
        }
        What::SlowStore => {
            let pods = pool.members().into_iter().filter(|member| matches!(member, Member::Pod(_)));
            for pod in pods {
                let faults = pool.faults(&pod);
                for point in SLOW_POINTS {
                    let delay = Duration::from_millis(event.delay_ms.unwrap_or(0));
                    match step.is_end {
                        true => drop(faults.disarm(point)?),
                        false => faults.arm(point, &Action { times: 0, delay, ..Action::default() })?,
                    }
                }
            }
            Ok(())
        }
        What::RollingRestart | What::Reconnect | What::SlowAcks => Ok(()),
    }
}

/// For an error's text.
struct Who<'a>(&'a Option<Member>);

impl std::fmt::Display for Who<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            Some(member) => member.fmt(f),
            None => f.write_str("nobody"),
        }
    }
}
