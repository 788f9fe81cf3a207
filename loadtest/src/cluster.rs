//! The service as real processes: started, killed, drained, and gone when their owner is.
//!
//! *Owns*: the children, where their logs are, what CPU time they took.
//! *Does not own*: what is sent to them.

use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Write};
use std::net::{Ipv4Addr, TcpListener, UdpSocket};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use sluice_gateway::make_self_signed;

/// Replaying a log of some GB comes before a pod listens.
const START_TIMEOUT: Duration = Duration::from_secs(60);
/// A drain commits everything that was accepted.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(60);
/// Between two looks at a process that is to be ready, or that was asked to end.
const POLL: Duration = Duration::from_millis(5);
/// Of a log, what is shown when its process failed.
const LOG_TAIL_BYTES: usize = 4000;
/// `USER_HZ`: the same on every Linux.
const CLOCK_TICKS_PER_S: u64 = 100;

/// Finds the `sluice` program of the same build profile as the running one.
///
/// # Errors
/// It is not there.
pub fn find_sluice() -> anyhow::Result<PathBuf> {
    let own = std::env::current_exe().context("cannot find the running program")?;
    // A test runs from `target/PROFILE/deps`, the program itself from `target/PROFILE`.
    let found = own.ancestors().skip(1).take(2).map(|dir| dir.join("sluice")).find(|path| path.is_file());
    let beside = own.parent().unwrap_or(Path::new("."));
    found.with_context(|| {
        format!(
            "no `sluice` beside {}: run `cargo build -p sluice` with this profile first",
            beside.display()
        )
    })
}

/// A child that ends, at the latest, with its owner.
pub struct Process {
    name: String,
    child: Child,
    log: PathBuf,
    /// The line that it prints once it is ready.
    ready: Arc<OnceLock<String>>,
    /// Ends when no more lines can come.
    reader: JoinHandle<()>,
}

impl Process {
    /// Launches it and waits until it is ready: answers the line that said so.
    ///
    /// # Errors
    /// As `launch` and `until_ready`.
    pub fn start(
        name: &str,
        command: Command,
        ready: &'static str,
        log_dir: &Path,
    ) -> anyhow::Result<(Self, String)> {
        let process = Self::launch(name, command, ready, log_dir)?;
        let line = process.until_ready()?;
        Ok((process, line))
    }

    /// Starts it; it is ready when it prints a line with `ready` in it. What it prints goes to `NAME.log` in `log_dir`.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn launch(
        name: &str,
        mut command: Command,
        ready: &'static str,
        log_dir: &Path,
    ) -> anyhow::Result<Self> {
        let log = log_dir.join(format!("{name}.log"));
        let open = || {
            let file = OpenOptions::new().create(true).append(true).open(&log);
            file.with_context(|| format!("log {}", log.display()))
        };
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(open()?);
        ends_with_owner(&mut command);
        let mut child = command.spawn().with_context(|| {
            let program = Path::new(command.get_program());
            format!("cannot start {name}: {}", program.display())
        })?;
        let stdout = child.stdout.take().context("no standard output")?;
        let (line, mut copy) = (Arc::new(OnceLock::new()), open()?);
        let said = Arc::clone(&line);
        // Reads on after the line, so that the child never waits for room in the pipe.
        let reader = std::thread::spawn(move || watch(BufReader::new(stdout), &mut copy, ready, &said));
        Ok(Self { name: name.to_owned(), child, log, ready: line, reader })
    }

    /// Whether it has said that it is ready.
    pub fn is_ready(&self) -> bool {
        self.ready.get().is_some()
    }

    /// Waits for the line that says that it is ready.
    ///
    /// # Errors
    /// It ends before, or is not ready in time: with the end of its log.
    pub fn until_ready(&self) -> anyhow::Result<String> {
        let asked = Instant::now();
        loop {
            // Before the line is looked for: afterwards none can come.
            let has_ended = self.reader.is_finished();
            if let Some(line) = self.ready.get() {
                return Ok(line.clone());
            }
            ensure!(!has_ended, "{} ended before it was ready\n{}", self.name, self.log_tail());
            let late = asked.elapsed() > START_TIMEOUT;
            ensure!(!late, "{} was not ready within {START_TIMEOUT:?}\n{}", self.name, self.log_tail());
            std::thread::sleep(POLL);
        }
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// User and system time of all its threads so far, in steps of 10 ms.
    ///
    /// # Errors
    /// It is gone.
    pub fn cpu(&self) -> anyhow::Result<Duration> {
        cpu_of(&self.pid().to_string()).with_context(|| self.name.clone())
    }

    /// `kill -9`.
    ///
    /// # Errors
    /// It had ended by itself: that is a fault to look into.
    pub fn kill(mut self) -> anyhow::Result<()> {
        let ended = self.child.try_wait()?;
        ensure!(ended.is_none(), "{} had ended by itself ({ended:?})\n{}", self.name, self.log_tail());
        self.child.kill()?;
        let status = self.child.wait()?;
        ensure!(status.signal() == Some(libc::SIGKILL), "{} ended with {status}", self.name);
        Ok(())
    }

    /// `kill -9`, unless it has ended by itself; how it ended.
    ///
    /// # Errors
    /// It cannot be waited for.
    pub fn end(mut self) -> anyhow::Result<ExitStatus> {
        // It may have ended: then there is nothing to kill.
        let _ = self.child.kill();
        Ok(self.child.wait()?)
    }

    /// How it ended, where it has.
    ///
    /// # Errors
    /// It cannot be waited for.
    pub fn ended(&mut self) -> anyhow::Result<Option<ExitStatus>> {
        Ok(self.child.try_wait()?)
    }

    /// SIGTERM, then waits for a drain that ends with status 0.
    ///
    /// # Errors
    /// Another status, or none in time.
    pub fn terminate(mut self) -> anyhow::Result<()> {
        self.signal(libc::SIGTERM)?;
        let status = self.ends(DRAIN_TIMEOUT)?;
        ensure!(status.success(), "{} drained with {status}\n{}", self.name, self.log_tail());
        Ok(())
    }

    /// Waits for the end, with status 0, of a drain that it was asked for. Others go on meanwhile.
    ///
    /// # Errors
    /// Another status, or none in time.
    pub async fn drained(mut self) -> anyhow::Result<()> {
        let asked = Instant::now();
        while !self.has_ended_well()? {
            let late = asked.elapsed() > DRAIN_TIMEOUT;
            ensure!(!late, "{} has not drained in {DRAIN_TIMEOUT:?}\n{}", self.name, self.log_tail());
            tokio::time::sleep(POLL).await;
        }
        Ok(())
    }

    /// Waits until it ends.
    ///
    /// # Errors
    /// It does not in this time.
    pub fn ends(&mut self, within: Duration) -> anyhow::Result<ExitStatus> {
        let asked = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status);
            }
            let late = asked.elapsed() > within;
            ensure!(!late, "{} has not ended in {within:?}\n{}", self.name, self.log_tail());
            std::thread::sleep(POLL);
        }
    }

    /// Whether it has ended with status 0.
    ///
    /// # Errors
    /// It has ended with another.
    pub fn has_ended_well(&mut self) -> anyhow::Result<bool> {
        let Some(status) = self.child.try_wait()? else { return Ok(false) };
        ensure!(status.success(), "{} ended with {status}\n{}", self.name, self.log_tail());
        Ok(true)
    }

    /// Sends it a signal.
    ///
    /// # Errors
    /// It is gone.
    pub fn signal(&self, signal: i32) -> anyhow::Result<()> {
        send_signal(self.pid(), signal).with_context(|| format!("cannot signal {}", self.name))
    }

    /// Its memory that is not swapped out.
    ///
    /// # Errors
    /// It is gone.
    pub fn resident_bytes(&self) -> anyhow::Result<u64> {
        resident_bytes_of(self.pid())
    }

    /// The end of what it printed.
    pub fn log_tail(&self) -> String {
        let bytes = std::fs::read(&self.log).unwrap_or_default();
        let tail = &bytes[bytes.len().saturating_sub(LOG_TAIL_BYTES)..];
        format!("--- {} ---\n{}", self.log.display(), String::from_utf8_lossy(tail))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended: then there is nothing to kill, and waiting only takes its status.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn watch(stdout: BufReader<impl std::io::Read>, copy: &mut File, ready: &str, said: &OnceLock<String>) {
    for line in stdout.lines() {
        let Ok(line) = line else { return };
        // A log that cannot be written must not stop the reading.
        let _ = writeln!(copy, "{line}");
        if line.contains(ready) {
            // The first one counts.
            let _ = said.set(line);
        }
    }
}

/// The kernel kills the child when the thread that started it ends, however it ends. So start children only from
/// threads that live as long as the children are to.
#[allow(unsafe_code, reason = "the only way to have the kernel end a child with its parent")]
fn ends_with_owner(command: &mut Command) {
    // SAFETY: between fork and exec only `prctl` is called, which is async-signal-safe and allocates nothing.
    unsafe {
        command.pre_exec(|| match libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        });
    }
}

#[allow(unsafe_code, reason = "the standard library sends SIGKILL alone")]
fn send_signal(pid: u32, signal: i32) -> anyhow::Result<()> {
    let pid = libc::pid_t::try_from(pid)?;
    // SAFETY: a plain system call without memory of ours; the child has not been waited for, so the pid is its own.
    match unsafe { libc::kill(pid, signal) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error().into()),
    }
}

/// Memory of a process that is not swapped out.
///
/// # Errors
/// There is none.
pub(crate) fn resident_bytes_of(pid: u32) -> anyhow::Result<u64> {
    let path = format!("/proc/{pid}/status");
    let status = std::fs::read_to_string(&path).with_context(|| path.clone())?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.trim().strip_suffix("kB")).with_context(|| path.clone())?;
    Ok(kib.trim().parse::<u64>()? << 10)
}

/// CPU time of a process (a pid, or `self`).
///
/// # Errors
/// There is none.
pub fn cpu_of(process: &str) -> anyhow::Result<Duration> {
    let path = format!("/proc/{process}/stat");
    let stat = std::fs::read_to_string(&path).with_context(|| path.clone())?;
    // The second field is the name in parentheses and may hold anything; fields 14 and 15 are the times.
    let (_, rest) = stat.rsplit_once(") ").with_context(|| path.clone())?;
    let fields: Vec<&str> = rest.split(' ').collect();
    let ticks = |field: usize| -> anyhow::Result<u64> {
        Ok(fields.get(field - 3).with_context(|| path.clone())?.parse()?)
    };
    Ok(Duration::from_millis((ticks(14)? + ticks(15)?) * 1000 / CLOCK_TICKS_PER_S))
}

/// One gateway and one pod.
pub struct Cluster {
    sluice: PathBuf,
    dir: PathBuf,
    env: Vec<(String, String)>,
    pod_port: u16,
    gateway_url: String,
    quic_url: Option<String>,
    gateway: Option<Process>,
    pod: Option<Process>,
}

impl Cluster {
    /// Starts both, with data and logs below `dir`. `env` is set for both.
    ///
    /// # Errors
    /// One of them does not start.
    pub fn start(sluice: &Path, dir: &Path, env: &[(&str, &str)]) -> anyhow::Result<Self> {
        std::fs::create_dir_all(dir).with_context(|| dir.display().to_string())?;
        let env = env.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        let mut cluster = Self {
            sluice: sluice.to_owned(),
            dir: dir.to_owned(),
            env,
            pod_port: free_port()?,
            gateway_url: String::new(),
            quic_url: None,
            gateway: None,
            pod: None,
        };
        cluster.start_pod()?;
        cluster.start_gateway()?;
        Ok(cluster)
    }

    /// As `start`, with a certificate of its own, which is answered: TLS and QUIC need one.
    ///
    /// # Errors
    /// As `start`; the certificate cannot be written.
    pub fn start_with_tls(
        sluice: &Path,
        dir: &Path,
        env: &[(&str, &str)],
    ) -> anyhow::Result<(Self, PathBuf)> {
        let (cert, key) = make_self_signed(dir, "127.0.0.1")?;
        let path = |file: &Path| file.display().to_string();
        let tls = [("SLUICE_GATEWAY__TLS_CERT", &*path(&cert)), ("SLUICE_GATEWAY__TLS_KEY", &*path(&key))];
        Ok((Self::start(sluice, dir, &[&tls[..], env].concat())?, cert))
    }

    /// Where producers connect: `ws://host:port`.
    pub fn url(&self) -> &str {
        &self.gateway_url
    }

    /// Where producers connect over QUIC, `host:port`, where it has a certificate.
    ///
    /// # Errors
    /// It has none.
    pub fn quic_address(&self) -> anyhow::Result<&str> {
        let url = self.quic_url.as_deref().and_then(|url| url.strip_prefix("quic://"));
        url.context("the gateway does not listen for QUIC: it needs a certificate")
    }

    /// Where a table of the default catalog and schema is kept.
    pub fn table_dir(&self, table: &str) -> PathBuf {
        self.dir.join("data/tables/main/default").join(table)
    }

    /// The running pod.
    ///
    /// # Errors
    /// There is none.
    pub fn pod(&self) -> anyhow::Result<&Process> {
        self.pod.as_ref().context("the pod is not running")
    }

    /// The running gateway.
    ///
    /// # Errors
    /// There is none.
    pub fn gateway(&self) -> anyhow::Result<&Process> {
        self.gateway.as_ref().context("the gateway is not running")
    }

    /// The running gateway, for a caller that ends it in its own way.
    ///
    /// # Errors
    /// There is none.
    pub fn take_gateway(&mut self) -> anyhow::Result<Process> {
        self.gateway.take().context("the gateway is not running")
    }

    /// Sets a variable for the processes that are started from now on.
    pub fn set_env(&mut self, key: &str, value: &str) {
        self.env.retain(|(old, _)| old != key);
        self.env.push((key.to_owned(), value.to_owned()));
    }

    /// Starts the pod, on the same port and data as before.
    ///
    /// # Errors
    /// It does not start.
    pub fn start_pod(&mut self) -> anyhow::Result<()> {
        ensure!(self.pod.is_none(), "the pod is running");
        let mut command = self.command("pod");
        command.args(["--id", "pod-1", "--auto-create", "--listen", &format!("127.0.0.1:{}", self.pod_port)]);
        command.arg("--data").arg(self.dir.join("data"));
        self.pod = Some(Process::start("pod-1", command, "listens on", &self.dir)?.0);
        Ok(())
    }

    /// `kill -9` of the pod.
    ///
    /// # Errors
    /// It had ended by itself.
    pub fn kill_pod(&mut self) -> anyhow::Result<()> {
        self.pod.take().context("the pod is not running")?.kill()
    }

    /// SIGTERM to the pod; waits until it has drained.
    ///
    /// # Errors
    /// It does not end in time and with status 0.
    pub fn drain_pod(&mut self) -> anyhow::Result<()> {
        self.pod.take().context("the pod is not running")?.terminate()
    }

    /// Drains the gateway, then the pod.
    ///
    /// # Errors
    /// One of them does not end in time and with status 0.
    pub fn drain(mut self) -> anyhow::Result<()> {
        self.gateway.take().context("the gateway is not running")?.terminate()?;
        self.drain_pod()
    }

    /// The ends of both logs, for whoever reports a failure.
    pub fn log_tails(&self) -> String {
        let tails = [&self.gateway, &self.pod].map(|process| process.as_ref().map(Process::log_tail));
        tails.into_iter().flatten().collect::<Vec<_>>().join("\n")
    }

    fn start_gateway(&mut self) -> anyhow::Result<()> {
        let mut command = self.command("gateway");
        command.args(["--listen", "127.0.0.1:0", "--pod", &format!("pod-1=127.0.0.1:{}", self.pod_port)]);
        // The last line of those that say where it listens.
        let (gateway, _) = Process::start("gateway", command, "admin API", &self.dir)?;
        let said = gateway.log_tail();
        let url = |scheme| said.split_whitespace().rfind(|word| word.starts_with(scheme)).map(str::to_owned);
        self.gateway_url = url("ws://").with_context(|| format!("it says no address\n{said}"))?;
        self.quic_url = url("quic://");
        self.gateway = Some(gateway);
        Ok(())
    }

    fn command(&self, part: &str) -> Command {
        let mut command = Command::new(&self.sluice);
        command.arg(part).envs(self.env.iter().map(|(key, value)| (key, value)));
        command
    }
}

/// A port for TCP that nobody has; the pod needs the same one again after each restart.
pub(crate) fn free_port() -> anyhow::Result<u16> {
    free(|address| TcpListener::bind(address).map(drop))
}

/// A port for UDP that nobody has.
pub(crate) fn free_udp_port() -> anyhow::Result<u16> {
    free(|address| UdpSocket::bind(address).map(drop))
}

/// Not of those that the system gives to whoever asks for any port (from 32768 on, in Linux): until a process binds it, and
/// while it is down, one of these would sooner or later be somebody else's.
fn free(bind: impl Fn((Ipv4Addr, u16)) -> io::Result<()>) -> anyhow::Result<u16> {
    let ports = std::iter::repeat_with(|| rand::random_range(10_000..32_000_u16)).take(100);
    let mut ports = ports.filter(|port| bind((Ipv4Addr::LOCALHOST, *port)).is_ok());
    ports.next().context("no free port of 100 between 10000 and 31999")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn a_process_is_ready_when_it_says_so_and_gone_when_killed() {
        let dir = tempfile::tempdir().expect("a directory");
        let command = shell("echo one; echo it listens on x; sleep 100");
        let (process, line) = Process::start("p", command, "listens on", dir.path()).expect("started");
        assert_eq!(line, "it listens on x");
        let pid = process.pid();
        process.kill().expect("was running");
        assert!(!Path::new(&format!("/proc/{pid}")).exists());
    }

    #[test]
    fn a_process_that_fails_shows_its_log() {
        let dir = tempfile::tempdir().expect("a directory");
        let failed = Process::start("p", shell("echo no luck >&2; exit 3"), "ready", dir.path());
        let error = failed.err().expect("it ended");
        assert!(error.to_string().contains("no luck"), "{error}");
    }

    #[test]
    fn a_drain_must_end_with_status_0() {
        let dir = tempfile::tempdir().expect("a directory");
        for (status, is_good) in [(0, true), (3, false)] {
            // `wait` is interrupted by the trap at once, a foreground `sleep` would not be.
            let script = format!("trap 'kill $!; exit {status}' TERM; sleep 100 & echo ready; wait");
            let (process, _) = Process::start("p", shell(&script), "ready", dir.path()).expect("started");
            assert_eq!(process.terminate().is_ok(), is_good);
        }
    }

    #[test]
    fn cpu_time_is_counted() {
        let before = cpu_of("self").expect("this process");
        let started = Instant::now();
        while started.elapsed() < Duration::from_millis(300) {
            std::hint::spin_loop();
        }
        assert!(cpu_of("self").expect("this process") > before);
    }
}
