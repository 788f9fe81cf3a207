//! A pool of real processes that find each other by gossip: pods and gateways that come, go, hang and come back.
//!
//! *Owns*: who is in the pool, their ports and logs, the ways to their faults, and a client of the admin API.
//! *Does not own*: a single process (`cluster`), what is done to whom and when (`elastic`).

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::client::conn::http1;
use hyper::header::HOST;
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use sluice_client::Client;
use sluice_shared::lifecycle::{OnPanic, TaskScope};
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep, timeout};

use crate::cluster::{Process, free_port, free_udp_port};
use crate::cut::Cutter;
use crate::fault_dir::FaultDir;
use crate::workload::Shape;

/// How long the admin API may take to answer.
const ADMIN_TIMEOUT: Duration = Duration::from_secs(10);
/// Of an answer; ten thousand streams are some MB.
const ANSWER_BYTES_MAX: usize = 64 << 20;
/// For news to reach all members.
const SEEN_TIMEOUT: Duration = Duration::from_secs(30);
/// Between two looks at what is waited for.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);
/// A log's seal has no more (`pod/src/wal/object/form.rs`), a group has more.
const SEAL_BYTES: u64 = 4096;

/// What a pool is to be.
pub struct Options<'a> {
    /// The program.
    pub sluice: &'a Path,
    /// Data and logs go below it.
    pub dir: &'a Path,
    /// Variables that are set for all processes.
    pub env: &'a [(&'a str, &'a str)],
    /// Pods at first: `pod-1`, `pod-2`, …
    pub pods: usize,
    /// Gateways.
    pub gateways: usize,
    /// Whether each process has a directory of faults (`shared::fault`): `Pool::faults`.
    pub faults: bool,
    /// Whether connections can be cut: those of producers, and those between the members.
    pub cuts: bool,
}

impl<'a> Options<'a> {
    /// Neither faults nor cuts.
    pub fn new(sluice: &'a Path, dir: &'a Path, pods: usize, gateways: usize) -> Self {
        Self { sluice, dir, env: &[], pods, gateways, faults: false, cuts: false }
    }

    /// The faults of a member that is to be, so that they are there when it starts.
    pub fn faults_of(&self, member: &Member) -> FaultDir {
        FaultDir::new(self.dir.join("faults").join(member.to_string()))
    }
}

/// Who is in the pool.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Member {
    /// A pod, by its name.
    Pod(String),
    /// A gateway, by its number.
    Gateway(usize),
}

impl fmt::Display for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pod(id) => f.write_str(id),
            Self::Gateway(number) => write!(f, "gateway-{}", number + 1),
        }
    }
}

/// Pods and gateways. All of them end when it is dropped.
pub struct Pool {
    sluice: PathBuf,
    dir: PathBuf,
    env: Vec<(String, String)>,
    /// Of all that the pool began with: some of them are always there.
    seeds: Vec<String>,
    gateways: Vec<Gateway>,
    pods: BTreeMap<String, Pod>,
    faults: bool,
    cuts: bool,
    scope: TaskScope,
}

struct Gateway {
    name: String,
    port: u16,
    gossip: String,
    running: Option<(Process, Admin)>,
    cutter: Option<Cutter>,
}

struct Pod {
    port: u16,
    gossip: String,
    process: Option<Process>,
    cutter: Option<Cutter>,
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.scope.cancel();
    }
}

/// The name of a table under load: the first one is the hot one.
pub(crate) fn table_name(table: usize) -> String {
    if table == 0 { "hot".to_owned() } else { format!("table_{table}") }
}

/// Makes tables. They are there before the first JSON record, so that their types are not inferred.
///
/// # Errors
/// Where their streams are not taken.
pub(crate) async fn make_tables(client: &Client, names: impl Iterator<Item = String>) -> anyhow::Result<()> {
    for name in names {
        let stream = client.stream(name).schema(Shape::ServiceEvent.schema());
        stream.open().await?.finish_durable().await?;
    }
    Ok(())
}

impl Pool {
    /// Makes the tables under load, so many.
    ///
    /// # Errors
    /// As `make_tables`.
    pub(crate) async fn make_tables(&self, tables: usize) -> anyhow::Result<()> {
        make_tables(&Client::connect(&self.urls(0)).await?, (0..tables).map(table_name)).await
    }

    /// Starts all, and waits until each gateway sees each pod take streams.
    ///
    /// # Errors
    /// One of them does not start, or is not seen in time.
    pub async fn start(options: &Options<'_>) -> anyhow::Result<Self> {
        let Options { sluice, dir, env, pods, gateways, faults, cuts } = *options;
        std::fs::create_dir_all(dir).with_context(|| dir.display().to_string())?;
        let mut pool = Self {
            sluice: sluice.to_owned(),
            dir: dir.to_owned(),
            env: env.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect(),
            seeds: Vec::new(),
            gateways: Vec::new(),
            pods: BTreeMap::new(),
            faults,
            cuts,
            scope: TaskScope::new(OnPanic::EndTask),
        };
        for number in 1..=gateways {
            let (port, gossip) = (free_port()?, free_gossip()?);
            let (name, cutter) = (format!("gateway-{number}"), pool.cutter(port).await?);
            pool.gateways.push(Gateway { name, port, gossip, running: None, cutter });
        }
        let mut ids = Vec::new();
        for _ in 0..pods {
            ids.push(pool.add_seat().await?);
        }
        let gossips = pool.gateways.iter().map(|gateway| &gateway.gossip);
        pool.seeds = gossips.chain(pool.pods.values().map(|pod| &pod.gossip)).cloned().collect();
        for id in &ids {
            pool.start_pod(id)?;
        }
        for number in 0..gateways {
            pool.start_gateway(number)?;
        }
        for id in &ids {
            pool.until_seen(id, "active").await?;
        }
        Ok(pool)
    }

    /// Where producers connect: all gateways, joined by commas, `first` first.
    pub fn urls(&self, first: usize) -> String {
        let (before, after) = self.gateways.split_at(first % self.gateways.len().max(1));
        let port = |gateway: &Gateway| gateway.cutter.as_ref().map_or(gateway.port, Cutter::port);
        let urls = after.iter().chain(before).map(|gateway| format!("ws://127.0.0.1:{}", port(gateway)));
        urls.collect::<Vec<_>>().join(",")
    }

    /// Where a table of the default catalog and schema is kept.
    pub fn table_dir(&self, table: &str) -> PathBuf {
        self.dir.join("data/tables/main/default").join(table)
    }

    /// The logs in the tables' store that are not done with, by their ids: that have a header, or records before their seals.
    ///
    /// # Errors
    /// Their folder cannot be read.
    pub fn object_logs(&self) -> anyhow::Result<Vec<String>> {
        let folder = self.dir.join("data/tables/_sluice/wal");
        let mut logs = Vec::new();
        for log in std::fs::read_dir(&folder).with_context(|| folder.display().to_string())? {
            let log = log?;
            let (mut seal, mut group) = (u64::MAX, u64::MAX);
            for object in std::fs::read_dir(log.path())? {
                let object = object?;
                let name = object.file_name();
                let number = name.to_str().and_then(|name| name.parse::<u64>().ok());
                // One that is gone by now is just being deleted.
                let (Some(number), Ok(meta)) = (number, object.metadata()) else { continue };
                let least = if meta.len() <= SEAL_BYTES { &mut seal } else { &mut group };
                *least = number.min(*least);
            }
            if log.path().join("header.json").exists() || group < seal {
                logs.push(log.file_name().to_string_lossy().into_owned());
            }
        }
        Ok(logs)
    }

    /// Where the producers of a table keep their notes (`history`).
    pub fn history_dir(&self, table: &str) -> PathBuf {
        self.dir.join("history").join(table)
    }

    /// The admin APIs of the gateways that run, with their numbers.
    pub fn admins(&self) -> impl Iterator<Item = (usize, &Admin)> {
        let running = |(number, gateway): (usize, &'_ Gateway)| gateway.running.is_some().then_some(number);
        let numbers: Vec<usize> = self.gateways.iter().enumerate().filter_map(running).collect();
        numbers.into_iter().filter_map(|number| Some((number, &self.gateways[number].running.as_ref()?.1)))
    }

    /// A running gateway.
    ///
    /// # Errors
    /// It does not run.
    pub fn gateway(&self, number: usize) -> anyhow::Result<&Process> {
        let running = self.gateways.get(number).and_then(|gateway| gateway.running.as_ref());
        running.map(|(process, _)| process).with_context(|| format!("gateway {number} does not run"))
    }

    /// A running pod.
    ///
    /// # Errors
    /// It does not run.
    pub fn pod(&self, id: &str) -> anyhow::Result<&Process> {
        let pod = self.pods.get(id).and_then(|pod| pod.process.as_ref());
        pod.with_context(|| format!("{id} does not run"))
    }

    /// The pods that run.
    pub fn running_pods(&self) -> Vec<String> {
        let running = self.pods.iter().filter(|(_, pod)| pod.process.is_some());
        running.map(|(id, _)| id.clone()).collect()
    }

    /// Adds a pod with a log of its own, and answers its name once all gateways see it take streams.
    ///
    /// # Errors
    /// It does not start, or is not seen in time.
    pub async fn add_pod(&mut self) -> anyhow::Result<String> {
        let id = self.add_seat().await?;
        self.restart_pod(&id).await?;
        Ok(id)
    }

    /// Starts a pod that has ended: the same name, ports and log. Waits until all gateways see it take streams.
    ///
    /// # Errors
    /// It does not start, or is not seen in time.
    pub async fn restart_pod(&mut self, id: &str) -> anyhow::Result<()> {
        self.start_pod(id)?;
        self.until_seen(id, "active").await
    }

    /// `kill -9` of a pod.
    ///
    /// # Errors
    /// It had ended by itself.
    pub fn kill_pod(&mut self, id: &str) -> anyhow::Result<()> {
        self.take_pod(id)?.kill()
    }

    /// Stops a pod as a debugger would (SIGSTOP), for as long as this takes.
    ///
    /// # Errors
    /// It does not run.
    pub async fn stop_pod(&self, id: &str, lasts: Duration) -> anyhow::Result<()> {
        let process = self.pod(id)?;
        process.signal(libc::SIGSTOP)?;
        sleep(lasts).await;
        process.signal(libc::SIGCONT)
    }

    /// Asks a gateway to have a pod drain, and waits until its process has ended with status 0.
    ///
    /// # Errors
    /// It is refused, or ends late or otherwise.
    pub async fn drain_pod(&mut self, id: &str) -> anyhow::Result<()> {
        let (_, admin) = self.admins().next().context("no gateway runs")?;
        admin.post(&format!("/v1/pods/{id}/drain")).await?;
        self.take_pod(id)?.drained().await
    }

    /// `kill -9` of a gateway.
    ///
    /// # Errors
    /// It had ended by itself.
    pub fn kill_gateway(&mut self, number: usize) -> anyhow::Result<()> {
        let gateway = self.gateways.get_mut(number).context("no such gateway")?;
        gateway.running.take().context("the gateway does not run")?.0.kill()
    }

    /// Starts a gateway that has ended, where it was; waits until it sees all pods that run.
    ///
    /// # Errors
    /// It does not start, or does not see them in time.
    pub async fn restart_gateway(&mut self, number: usize) -> anyhow::Result<()> {
        self.start_gateway(number)?;
        for id in self.running_pods() {
            self.until_seen(&id, "active").await?;
        }
        Ok(())
    }

    /// Drains the gateways, then all pods.
    ///
    /// # Errors
    /// One of them does not end in time and with status 0.
    pub async fn drain(mut self) -> anyhow::Result<()> {
        for gateway in &mut self.gateways {
            let Some((process, _)) = gateway.running.take() else { continue };
            process.signal(libc::SIGTERM)?;
            process.drained().await?;
        }
        // Together: the last pod that drains has nobody to hand its tables to, the others have.
        let pods = std::mem::take(&mut self.pods).into_values().filter_map(|pod| pod.process);
        let pods: Vec<Process> = pods.collect();
        pods.iter().try_for_each(|pod| pod.signal(libc::SIGTERM))?;
        for pod in pods {
            pod.drained().await?;
        }
        Ok(())
    }

    /// The faults of a member: those of all its lives.
    pub fn faults(&self, member: &Member) -> FaultDir {
        FaultDir::new(self.dir.join("faults").join(member.to_string()))
    }

    /// All members, whether they run or not: gateways first.
    pub fn members(&self) -> Vec<Member> {
        let gateways = (0..self.gateways.len()).map(Member::Gateway);
        gateways.chain(self.pods.keys().cloned().map(Member::Pod)).collect()
    }

    /// A member's process, where it has one.
    pub fn process(&mut self, member: &Member) -> Option<&mut Process> {
        match member {
            Member::Pod(id) => self.pods.get_mut(id)?.process.as_mut(),
            Member::Gateway(number) => {
                self.gateways.get_mut(*number)?.running.as_mut().map(|(process, _)| process)
            }
        }
    }

    /// Takes a member's process away, for a caller that ends it in its own way.
    pub fn take(&mut self, member: &Member) -> Option<Process> {
        match member {
            Member::Pod(id) => self.pods.get_mut(id)?.process.take(),
            Member::Gateway(number) => Some(self.gateways.get_mut(*number)?.running.take()?.0),
        }
    }

    /// Starts a member that does not run, where it was. Waits for nobody to see it.
    ///
    /// # Errors
    /// It does not start.
    pub fn start_member(&mut self, member: &Member) -> anyhow::Result<()> {
        self.launch_member(member)?;
        match member {
            Member::Pod(id) => self.pod(id)?.until_ready().map(|_| ()),
            Member::Gateway(_) => Ok(()),
        }
    }

    /// Starts a member that does not run, where it was, and does not wait for a pod: `Process::is_ready` says when it is.
    ///
    /// # Errors
    /// It cannot be started, or it is a gateway that does not start.
    pub fn launch_member(&mut self, member: &Member) -> anyhow::Result<()> {
        match member {
            Member::Pod(id) => self.launch_pod(id),
            // Where its admin API listens is in what it prints.
            Member::Gateway(number) => self.start_gateway(*number),
        }
    }

    /// Where the connections to a member can be cut.
    pub fn cutter_of(&self, member: &Member) -> Option<&Cutter> {
        match member {
            Member::Pod(id) => self.pods.get(id)?.cutter.as_ref(),
            Member::Gateway(number) => self.gateways.get(*number)?.cutter.as_ref(),
        }
    }

    /// The ends of all logs, for whoever reports a failure.
    pub fn log_tails(&self) -> String {
        let gateways = self.gateways.iter().filter_map(|gateway| gateway.running.as_ref());
        let pods = self.pods.values().filter_map(|pod| pod.process.as_ref());
        let all = gateways.map(|(process, _)| process).chain(pods);
        all.map(Process::log_tail).collect::<Vec<_>>().join("\n")
    }

    /// Waits until all gateways see this pod in this phase.
    ///
    /// # Errors
    /// They do not in time.
    pub async fn until_seen(&self, id: &str, phase: &str) -> anyhow::Result<()> {
        let asked = Instant::now();
        while let Some((number, seen)) = self.sees_otherwise(id, phase).await? {
            let late = asked.elapsed() > SEEN_TIMEOUT;
            ensure!(!late, "gateway {number} does not see {id} {phase}: {seen:?}\n{}", self.log_tails());
            sleep(LOOK_INTERVAL).await;
        }
        Ok(())
    }

    /// A gateway that does not see this pod in this phase, and what it sees of it.
    ///
    /// # Errors
    /// A gateway does not answer.
    pub async fn sees_otherwise(&self, id: &str, phase: &str) -> anyhow::Result<Option<(usize, Vec<Value>)>> {
        for (number, admin) in self.admins() {
            let pods = admin.get("/v1/pods").await?;
            let pods = pods["pods"].as_array().into_iter().flatten();
            let seen: Vec<Value> = pods.filter(|pod| pod["id"] == id).cloned().collect();
            if seen.iter().all(|pod| pod["phase"] != phase) {
                return Ok(Some((number, seen)));
            }
        }
        Ok(None)
    }

    fn take_pod(&mut self, id: &str) -> anyhow::Result<Process> {
        let pod = self.pods.get_mut(id).with_context(|| format!("there is no {id}"))?;
        pod.process.take().with_context(|| format!("{id} does not run"))
    }

    async fn cutter(&self, port: u16) -> anyhow::Result<Option<Cutter>> {
        if !self.cuts {
            return Ok(None);
        }
        Ok(Some(Cutter::start(&self.scope, port).await?))
    }

    async fn add_seat(&mut self) -> anyhow::Result<String> {
        let id = format!("pod-{}", self.pods.len() + 1);
        let port = free_port()?;
        let pod = Pod { port, gossip: free_gossip()?, process: None, cutter: self.cutter(port).await? };
        self.pods.insert(id.clone(), pod);
        Ok(id)
    }

    fn start_pod(&mut self, id: &str) -> anyhow::Result<()> {
        self.start_member(&Member::Pod(id.to_owned()))
    }

    fn launch_pod(&mut self, id: &str) -> anyhow::Result<()> {
        let mut command = self.command("pod", id);
        let pod = self.pods.get_mut(id).with_context(|| format!("there is no {id}"))?;
        ensure!(pod.process.is_none(), "{id} runs");
        command.args(["--id", id, "--listen", &format!("127.0.0.1:{}", pod.port)]);
        command.args(["--gossip-listen", &pod.gossip]);
        command.arg("--data").arg(self.dir.join("data"));
        if let Some(cutter) = &pod.cutter {
            command.env("SLUICE_POD__ADVERTISE", format!("127.0.0.1:{}", cutter.port()));
        }
        pod.process = Some(Process::launch(id, command, "listens on", &self.dir)?);
        Ok(())
    }

    fn start_gateway(&mut self, number: usize) -> anyhow::Result<()> {
        let mut command = self.command("gateway", &Member::Gateway(number).to_string());
        let gateway = &mut self.gateways[number];
        command.args(["--listen", &format!("127.0.0.1:{}", gateway.port)]);
        command.args(["--gossip-listen", &gateway.gossip]);
        command.env("SLUICE_GATEWAY__ADMIN_LISTEN", "127.0.0.1:0");
        let (process, line) = Process::start(&gateway.name, command, "admin API", &self.dir)?;
        let address = line.split_once("http://").and_then(|(_, rest)| rest.split('/').next());
        let address = address.with_context(|| format!("no address in {line:?}"))?.to_owned();
        gateway.running = Some((process, Admin { address }));
        Ok(())
    }

    fn command(&self, part: &str, name: &str) -> Command {
        let mut command = Command::new(&self.sluice);
        if self.faults {
            command.env("SLUICE_FAULTS", self.dir.join("faults").join(name));
        }
        command.arg(part).envs(self.env.iter().map(|(key, value)| (key, value)));
        command.args(self.seeds.iter().flat_map(|seed| ["--seed", seed]));
        command
    }
}

/// A pod as a gateway sees it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct SeenPod {
    pub(crate) id: String,
    pub(crate) phase: String,
    pub(crate) streams: u64,
    /// Of what it can take.
    pub(crate) load: f64,
    /// Of its oldest record that is in no table, where it says so.
    pub(crate) lag_ms: Option<f64>,
}

/// A gateway's admin API.
#[derive(Debug, Clone)]
pub struct Admin {
    address: String,
}

impl Admin {
    /// The one that listens on `address`, as `host:port`.
    pub fn new(address: String) -> Self {
        Self { address }
    }

    /// What it answers to this.
    ///
    /// # Errors
    /// It cannot be reached or says no.
    pub async fn get(&self, path: &str) -> anyhow::Result<Value> {
        self.ask(Method::GET, path).await
    }

    /// The pods, by name.
    pub(crate) async fn pods(&self) -> anyhow::Result<Vec<SeenPod>> {
        let shown = self.get("/v1/pods").await?;
        let pods = shown["pods"].as_array().context("no list of pods")?.iter().map(|pod| {
            Ok(SeenPod {
                id: pod["id"].as_str().context("a pod without an id")?.to_owned(),
                phase: pod["phase"].as_str().context("a pod without a phase")?.to_owned(),
                streams: pod["streams"].as_u64().unwrap_or(0),
                load: pod["load"].as_f64().unwrap_or(0.0),
                lag_ms: pod["lag_ms"].as_f64(),
            })
        });
        let mut pods = pods.collect::<anyhow::Result<Vec<_>>>()?;
        pods.sort_by(|a, b| a.id.cmp(&b.id));
        Ok(pods)
    }

    /// Where each stream is, by their ids.
    pub(crate) async fn places(&self) -> anyhow::Result<BTreeMap<String, String>> {
        let shown = self.get("/v1/streams").await?;
        let streams = shown["streams"].as_array().context("no list of streams")?.iter();
        let text = |one: &Value, key: &str| one[key].as_str().map(str::to_owned);
        // One that is being opened is nowhere yet.
        Ok(streams.filter_map(|one| Some((text(one, "stream")?, text(one, "pod")?))).collect())
    }

    /// Makes it do something.
    ///
    /// # Errors
    /// It cannot be reached or says no.
    pub async fn post(&self, path: &str) -> anyhow::Result<Value> {
        self.ask(Method::POST, path).await
    }

    async fn ask(&self, method: Method, path: &str) -> anyhow::Result<Value> {
        let what = format!("{method} http://{}{path}", self.address);
        let request = Request::builder().method(method).uri(path).header(HOST, &self.address);
        let asked = timeout(ADMIN_TIMEOUT, self.exchange(request.body(Full::default())?)).await;
        let (status, body) = asked.with_context(|| format!("{what}: no answer in {ADMIN_TIMEOUT:?}"))??;
        if !status.is_success() {
            bail!("{what}: {status}: {}", String::from_utf8_lossy(&body));
        }
        serde_json::from_slice(&body).with_context(|| what)
    }

    /// One request on a connection of its own.
    async fn exchange(&self, request: Request<Full<Bytes>>) -> anyhow::Result<(StatusCode, Bytes)> {
        let socket = TcpStream::connect(&self.address).await.context("the admin API")?;
        let (mut sender, connection) = http1::handshake(TokioIo::new(socket)).await?;
        // Owns the sender, whose end is the connection's.
        let asking = async move {
            let response = sender.send_request(request).await?;
            let status = response.status();
            let body = Limited::new(response.into_body(), ANSWER_BYTES_MAX).collect().await;
            let body = body.map_err(|error| anyhow::anyhow!("the admin API's answer: {error}"))?;
            Ok((status, body.to_bytes()))
        };
        // How the connection ends is of no interest where the answer is there, and its error where it is not.
        let (answer, _) = tokio::join!(asking, connection);
        answer
    }
}

/// An address for gossip that was free a moment ago; whoever comes back needs the same one.
fn free_gossip() -> anyhow::Result<String> {
    Ok(format!("127.0.0.1:{}", free_udp_port()?))
}
