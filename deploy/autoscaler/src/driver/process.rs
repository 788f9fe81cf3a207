//! Pods as child processes of this one, on one machine.
//!
//! A child's id, ports and directory follow from its number. A child that ends by itself is started again with the same
//! id on the same log, whose records may be in no table yet; so are, at the start, all that have a log which was not
//! drained. Children get signals of their own alone: Ctrl-C on a terminal must not end pods before their gateway.
//!
//! *Owns*: the children. *Does not own*: when there are more or fewer.

use std::collections::BTreeMap;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use tokio::time::Instant;

use super::{Action, Driver, DriverError};
use crate::admin::{Admin, Pool};

/// A child that fails is started again at once, then after ever longer.
const RESTART_FIRST: Duration = Duration::from_secs(1);
const RESTART_MOST: Duration = Duration::from_secs(30);
/// One that ran for as long has not failed at its start.
const RESTART_FORGOTTEN: Duration = Duration::from_secs(60);
/// How often an ending process looks whether its children have ended.
const LOOK: Duration = Duration::from_millis(20);
/// Beside a pod's log: it holds nothing, and need not be started again for it.
pub const DRAINED_MARK: &str = "drained";

/// What a child is started with. `{n}`, `{id}`, `{port}` and `{gossip_port}` stand for what follows from its number.
#[derive(Debug, Clone)]
pub struct Template {
    /// Program and arguments.
    pub command: Vec<String>,
    /// Variables beside those of this process.
    pub environment: Vec<(String, String)>,
    /// The directory of pod 3 is `pod-3` below it.
    pub pods_dir: PathBuf,
    /// Pod 3 listens on this port and 3 more.
    pub port_base: u16,
    /// And gossips on this one and 3 more.
    pub gossip_port_base: u16,
    /// How long a drain may take before it is hurried, and the same again before a child is killed at the end.
    pub drain_deadline: Duration,
}

impl Template {
    /// The name of a pod.
    pub fn id(n: u32) -> String {
        format!("pod-{n}")
    }

    fn dir(&self, n: u32) -> PathBuf {
        self.pods_dir.join(Self::id(n))
    }

    fn filled(&self, n: u32) -> Vec<String> {
        let port = |base: u16| u32::from(base) + n;
        let fill = |text: &String| {
            text.replace("{n}", &n.to_string())
                .replace("{id}", &Self::id(n))
                .replace("{port}", &port(self.port_base).to_string())
                .replace("{gossip_port}", &port(self.gossip_port_base).to_string())
        };
        self.command.iter().map(fill).collect()
    }
}

/// Numbers of the pods whose logs, below this directory, were not drained.
///
/// # Errors
/// It is there and cannot be read.
pub fn undrained(pods_dir: &Path) -> std::io::Result<Vec<u32>> {
    let entries = match std::fs::read_dir(pods_dir) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut numbers = Vec::new();
    for entry in entries {
        let entry = entry?;
        let name = entry.file_name();
        let number = name.to_str().and_then(|name| name.strip_prefix("pod-")?.parse().ok());
        if let Some(number) = number.filter(|_| !entry.path().join(DRAINED_MARK).exists()) {
            numbers.push(number);
        }
    }
    numbers.sort_unstable();
    Ok(numbers)
}

struct Slot {
    child: Option<Child>,
    since: Instant,
    /// Asked to drain, and when: its end is wanted.
    leaving: Option<Instant>,
    hurried: bool,
    failures: u32,
}

/// The children.
pub struct ProcessPods {
    template: Template,
    slots: BTreeMap<u32, Slot>,
}

impl ProcessPods {
    /// No children yet, but those that have a log are wanted at once.
    ///
    /// # Errors
    /// The directory of the pods cannot be read.
    pub fn new(template: Template) -> Result<Self, DriverError> {
        let numbers = undrained(&template.pods_dir).map_err(|source| DriverError::File {
            what: "read the pods' directory",
            path: template.pods_dir.display().to_string(),
            source,
        })?;
        let slots = numbers.into_iter().map(|n| (n, Slot::new())).collect();
        Ok(Self { template, slots })
    }

    /// Process ids by pod, for tests and for people.
    pub fn process_ids(&self) -> BTreeMap<String, u32> {
        let running =
            self.slots.iter().filter_map(|(n, slot)| Some((Template::id(*n), slot.child.as_ref()?.id())));
        running.collect()
    }

    fn staying(&self) -> u32 {
        self.slots.values().filter(|slot| slot.leaving.is_none()).count() as u32
    }

    /// Takes note of children that have ended.
    fn reap(&mut self, actions: &mut Vec<Action>) -> Result<(), DriverError> {
        let mut gone = Vec::new();
        for (n, slot) in &mut self.slots {
            let Some(status) = slot.ended() else { continue };
            // Status 0 is a drain's end, whoever asked for it: nothing is left in the log. All others leave it to the next
            // process of this name, also that of a drain whose deadline came first.
            if status.success() {
                gone.push(*n);
            } else {
                let id = Template::id(*n);
                tracing::warn!(pod = id, %status, failures = slot.failures, "a pod ended by itself");
                slot.leaving = None;
                slot.hurried = false;
            }
        }
        for n in gone {
            self.slots.remove(&n);
            let mark = self.template.dir(n).join(DRAINED_MARK);
            let marked =
                std::fs::create_dir_all(self.template.dir(n)).and_then(|()| std::fs::write(&mark, ""));
            marked.map_err(|source| file("write", &mark, source))?;
            actions.push(Action::Ended(Template::id(n)));
        }
        Ok(())
    }

    /// Starts what has no process, when it is time.
    fn start(&mut self, actions: &mut Vec<Action>) -> Result<(), DriverError> {
        for (n, slot) in &mut self.slots {
            if slot.child.is_some() || slot.since.elapsed() < slot.pause() {
                continue;
            }
            let is_first = slot.failures == 0;
            slot.since = Instant::now();
            slot.failures += 1; // an end soon after counts as one; a long life makes it forgotten
            slot.child = Some(spawn(&self.template, *n)?);
            let id = Template::id(*n);
            actions.push(if is_first { Action::Started(id) } else { Action::Restarted(id) });
        }
        Ok(())
    }

    async fn add(&mut self, missing: u32, admin: &mut Admin, actions: &mut Vec<Action>) {
        for _ in 0..missing {
            // One that still drains has its log and its streams: better than a new one, if it is not too late.
            let leaving =
                self.slots.iter().find(|(_, slot)| slot.leaving.is_some() && !slot.hurried).map(|(n, _)| *n);
            if let Some(n) = leaving
                && admin.join(&Template::id(n)).await.is_ok()
                && let Some(slot) = self.slots.get_mut(&n)
            {
                slot.leaving = None;
                actions.push(Action::Rejoined(Template::id(n)));
                continue;
            }
            let free = (1..).find(|n| !self.slots.contains_key(n));
            free.map(|n| self.slots.insert(n, Slot::new()));
        }
    }

    /// Drains the last one, unless another one still drains.
    async fn take_out(&mut self, admin: &mut Admin, actions: &mut Vec<Action>) -> Result<(), DriverError> {
        let deadline = self.template.drain_deadline;
        if self.slots.values().any(|slot| slot.leaving.is_some()) {
            return Ok(());
        }
        // One without a process waits to be started again: its log may hold something.
        let last = self.slots.iter_mut().rev().find(|(_, slot)| slot.child.is_some());
        let Some((n, slot)) = last else { return Ok(()) };
        let id = Template::id(*n);
        admin.drain(&id, deadline).await?;
        slot.leaving = Some(Instant::now());
        actions.push(Action::Draining(id));
        Ok(())
    }

    /// A drain that takes longer than it may is asked to pace itself no more. A pod is never killed for it.
    fn hurry(&mut self) {
        for (n, slot) in &mut self.slots {
            let is_late =
                slot.leaving.is_some_and(|since| since.elapsed() > self.template.drain_deadline * 2);
            if is_late && !slot.hurried {
                tracing::warn!(
                    pod = Template::id(*n),
                    "the drain takes longer than it may: hurried by SIGTERM"
                );
                slot.hurried = true;
                slot.signal();
            }
        }
    }
}

impl Driver for ProcessPods {
    async fn replicas(&mut self, _: &Pool) -> Result<u32, DriverError> {
        Ok(self.staying())
    }

    async fn step(&mut self, pods: u32, _: &Pool, admin: &mut Admin) -> Result<Vec<Action>, DriverError> {
        let mut actions = Vec::new();
        self.reap(&mut actions)?;
        let staying = self.staying();
        if pods > staying {
            self.add(pods - staying, admin, &mut actions).await;
        }
        self.start(&mut actions)?;
        self.hurry();
        if pods < staying {
            self.take_out(admin, &mut actions).await?;
        }
        Ok(actions)
    }

    async fn end(&mut self) {
        self.slots.values().for_each(Slot::signal);
        let begin = Instant::now();
        let mut hurried = false;
        while self.reap(&mut Vec::new()).is_ok() && self.slots.values().any(|slot| slot.child.is_some()) {
            let late = begin.elapsed();
            if late > self.template.drain_deadline * 2 {
                break;
            }
            if late > self.template.drain_deadline && !hurried {
                hurried = true;
                self.slots.values().for_each(Slot::signal);
            }
            tokio::time::sleep(LOOK).await;
        }
        for (n, slot) in &mut self.slots {
            if let Some(mut child) = slot.child.take() {
                // What it holds is on its disk, and is committed when it is started again.
                tracing::error!(pod = Template::id(*n), "the pod did not end in time, and is killed");
                let _ = child.kill().and_then(|()| child.wait());
            }
        }
    }
}

impl Drop for ProcessPods {
    /// After a panic, or where nobody called `end`: pods that nobody watches would hold their logs and ports. They drain.
    fn drop(&mut self) {
        self.slots.values().for_each(Slot::signal);
    }
}

impl Slot {
    fn new() -> Self {
        Self { child: None, since: Instant::now(), leaving: None, hurried: false, failures: 0 }
    }

    /// How its process ended, if it did; told once.
    fn ended(&mut self) -> Option<ExitStatus> {
        let status = self.child.as_mut()?.try_wait().ok()??;
        self.child = None;
        if self.since.elapsed() > RESTART_FORGOTTEN {
            self.failures = 1;
        }
        self.since = Instant::now();
        Some(status)
    }

    fn pause(&self) -> Duration {
        match self.failures {
            0 | 1 => Duration::ZERO,
            failures => RESTART_FIRST.saturating_mul(1 << (failures - 2).min(8)).min(RESTART_MOST),
        }
    }

    /// SIGTERM, which is a drain; a second one ends its pacing.
    fn signal(&self) {
        // A child that was not waited for yet keeps its number, so that nobody else is hit.
        if let Some(pid) = self.child.as_ref().and_then(|child| i32::try_from(child.id()).ok()) {
            terminate(pid);
        }
    }
}

#[allow(unsafe_code, reason = "the standard library can only kill")]
fn terminate(pid: i32) {
    // SAFETY: a system call without memory.
    unsafe { libc::kill(pid, libc::SIGTERM) };
}

fn spawn(template: &Template, n: u32) -> Result<Child, DriverError> {
    let id = Template::id(n);
    let mark = template.dir(n).join(DRAINED_MARK);
    match std::fs::remove_file(&mark) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            return Err(file("remove", &mark, error));
        }
        _ => {}
    }
    let words = template.filled(n);
    let Some((program, arguments)) = words.split_first() else {
        return Err(DriverError::Setup("the command of a pod is empty".to_owned()));
    };
    let mut command = Command::new(program);
    command.args(arguments).envs(template.environment.iter().cloned());
    command.stdin(Stdio::null()).stdout(Stdio::null()).process_group(0);
    drains_with_owner(&mut command);
    command.spawn().map_err(|source| DriverError::Start { id, command: words.join(" "), source })
}

/// A pod that nobody watches any more would keep its log and ports from the one that is started in its place.
#[allow(unsafe_code, reason = "the standard library has no hook between fork and exec that is safe")]
fn drains_with_owner(command: &mut Command) {
    // SAFETY: between fork and exec only `prctl` is called, which is async-signal-safe and allocates nothing.
    unsafe {
        command.pre_exec(|| match libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM) {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        });
    }
}

fn file(what: &'static str, path: &Path, source: std::io::Error) -> DriverError {
    DriverError::File { what, path: path.display().to_string(), source }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn template() -> Template {
        Template {
            command: [
                "sluice",
                "pod",
                "--id",
                "{id}",
                "--listen",
                "127.0.0.1:{port}",
                "{gossip_port}",
                "{n}",
            ]
            .map(str::to_owned)
            .to_vec(),
            environment: Vec::new(),
            pods_dir: "pods".into(),
            port_base: 7170,
            gossip_port_base: 7270,
            drain_deadline: Duration::from_secs(60),
        }
    }

    #[test]
    fn a_child_s_words_follow_from_its_number() {
        let expected = ["sluice", "pod", "--id", "pod-3", "--listen", "127.0.0.1:7173", "7273", "3"];
        assert_eq!(template().filled(3), expected);
    }

    #[test]
    fn logs_that_were_not_drained_are_found() {
        let dir = tempfile::tempdir().expect("a directory");
        for name in ["pod-2", "pod-10", "pod-4", "other"] {
            std::fs::create_dir(dir.path().join(name)).expect("made");
        }
        std::fs::write(dir.path().join("pod-4").join(DRAINED_MARK), "").expect("written");
        assert_eq!(undrained(dir.path()).expect("read"), [2, 10]);
        assert_eq!(undrained(&dir.path().join("none")).expect("none"), [] as [u32; 0]);
    }

    #[test]
    fn a_child_that_fails_again_and_again_waits_ever_longer() {
        let pause = |failures| Slot { failures, ..Slot::new() }.pause().as_secs();
        assert_eq!([0, 1, 2, 3, 4, 60].map(pause), [0, 0, 1, 2, 4, 30]);
    }
}
