//! A simulated process: a runtime of one thread whose time stands still between steps, and all that runs on it.
//!
//! Killing it drops every task where it waits, at whichever await that is. A host that is not stepped is one that was
//! stopped: when it goes on, its clock jumps.
//!
//! *Owns*: runtimes, their time, their end.
//! *Does not own*: what runs (`world`), when it is stepped or killed (`world`).

use std::time::{Duration, Instant};

use anyhow::Context;
use sluice_shared::lifecycle::{OnPanic, TaskScope};
use tokio::runtime::{Builder, Runtime};

use super::seeded;

/// When a simulation begins, by the monotonic clock of its thread.
#[derive(Debug, Clone, Copy)]
pub struct Start(Instant);

impl Start {
    /// Now.
    pub fn now() -> Self {
        Self(Instant::now())
    }

    fn since(self, at: Instant) -> Duration {
        at.saturating_duration_since(self.0)
    }
}

/// A process.
pub struct Host {
    runtime: Runtime,
    scope: TaskScope,
    start: Start,
    /// Its own time, since the start.
    now: Duration,
}

impl Host {
    /// One that begins at this time.
    ///
    /// # Errors
    /// Where there is no runtime.
    pub fn begin(start: Start, now: Duration) -> anyhow::Result<Self> {
        seeded::set_now(now);
        let mut builder = Builder::new_current_thread();
        builder.enable_time().start_paused(true);
        builder.on_thread_unpark(move || {
            seeded::set_now(start.since(tokio::time::Instant::now().into_std()));
        });
        let runtime = builder.build().context("a simulated runtime")?;
        Ok(Self { runtime, scope: TaskScope::new(OnPanic::EndProcess), start, now })
    }

    /// Starts a task.
    pub fn spawn(&self, name: &'static str, task: impl Future<Output = ()> + Send + 'static) {
        seeded::set_now(self.now);
        let _here = self.runtime.enter();
        self.scope.spawn(name, task);
    }

    /// A way to start tasks from other hosts.
    pub fn spawner(&self) -> Spawner {
        Spawner { runtime: self.runtime.handle().clone(), scope: self.scope.clone() }
    }

    /// Lets it run until that time.
    pub fn step(&mut self, until: Duration) {
        seeded::set_now(self.now);
        let start = self.start;
        self.runtime.block_on(async move {
            let here = start.since(tokio::time::Instant::now().into_std());
            tokio::time::sleep(until.saturating_sub(here)).await;
        });
        self.now = until;
    }

    /// Its clock jumps to that time: it was stopped meanwhile.
    pub fn jump(&mut self, to: Duration) {
        seeded::set_now(self.now);
        let gap = to.saturating_sub(self.now);
        self.runtime.block_on(tokio::time::advance(gap));
        self.now = to;
    }

    /// Drops all that runs on it.
    pub fn kill(self) {
        seeded::set_now(self.now);
        drop(self.runtime);
    }
}

/// Starts tasks on a host.
#[derive(Clone)]
pub struct Spawner {
    runtime: tokio::runtime::Handle,
    scope: TaskScope,
}

impl Spawner {
    /// Starts a task there.
    pub fn spawn(&self, name: &'static str, task: impl Future<Output = ()> + Send + 'static) {
        let _there = self.runtime.enter();
        self.scope.spawn(name, task);
    }
}
