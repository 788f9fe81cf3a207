//! A pool of real processes that find each other by gossip, and the commands that show and change it.
//!
//! *Owns*: what an operator sees and producers do not, while pods come, drain, die and come back.
//! *Does not own*: the admin API's errors (`gateway/tests/it/admin.rs`), many pods and faults at random (`loadtest`).

use std::fs;
use std::net::UdpSocket;
use std::process::{Command, Output};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::future::join;
use futures_util::{SinkExt, StreamExt};
use serde_json::Value;
use sluice_loadtest::cluster::Process;
use sluice_loadtest::table::read_versions;
use tempfile::TempDir;
use tokio::net::TcpStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::{MaybeTlsStream, WebSocketStream};

use crate::server::{soon, until};

/// A pod that has drained commits, says so to the pool, and ends.
const ENDED: Duration = Duration::from_secs(20);
/// Records that a producer sends before it waits for them.
const AT_ONCE: u64 = 20;

/// Two pods and a gateway. All are killed when this is dropped.
pub(crate) struct Pool {
    pub(crate) pods: [Option<Process>; 2],
    gateway: Option<Process>,
    /// Where producers connect: `ws://…`.
    pub(crate) url: String,
    /// `http://…`.
    admin: String,
    /// The first pod's address, by which the others find the pool: a host name and a port.
    pub(crate) seed: String,
    pub(crate) dir: TempDir,
}

impl Pool {
    /// `env` is for both pods, `second` for the second one alone.
    pub(crate) async fn start(env: &[(&str, &str)], second: &[(&str, &str)]) -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        // Nobody else takes it in between, unless all ports are taken in turn.
        let free = UdpSocket::bind("127.0.0.1:0").and_then(|socket| socket.local_addr()).expect("a port");
        let (url, admin) = (String::new(), String::new());
        let seed = format!("localhost:{}", free.port());
        let mut pool = Self { pods: [None, None], gateway: None, url, admin, seed, dir };
        pool.start_pod(0, env);
        pool.start_pod(1, &[env, second].concat());
        pool.start_gateway();
        pool.until_phases(["active", if second.is_empty() { "active" } else { "joining" }]).await;
        pool
    }

    pub(crate) fn start_pod(&mut self, nth: usize, env: &[(&str, &str)]) {
        let (name, gossip) = (format!("pod-{}", nth + 1), self.seed.replace("localhost", "127.0.0.1"));
        let mut command = Command::new(env!("CARGO_BIN_EXE_sluice"));
        command.args(["pod", "--id", &name, "--listen", "127.0.0.1:0", "--auto-create", "--data"]);
        command.arg(self.dir.path().join("data")).env("SLUICE_POD__FLUSH_INTERVAL_MS", "50");
        command.envs(env.iter().copied());
        match nth {
            0 => command.args(["--gossip-listen", &gossip]),
            _ => command.args(["--gossip-listen", "127.0.0.1:0", "--seed", &self.seed]),
        };
        let (process, _) = Process::start(&name, command, "listens on", self.dir.path()).expect("starts");
        self.pods[nth] = Some(process);
    }

    fn start_gateway(&mut self) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_sluice"));
        command.args(["gateway", "--listen", "127.0.0.1:0", "--gossip-listen", "127.0.0.1:0"]);
        command.args(["--seed", &self.seed]);
        let (process, line) =
            Process::start("gateway", command, "admin API ", self.dir.path()).expect("starts");
        let log = fs::read_to_string(self.dir.path().join("gateway.log")).expect("a log");
        let word = |text: &str, scheme: &str| {
            text.split_whitespace().rfind(|word| word.starts_with(scheme)).expect("an address").to_owned()
        };
        self.url = word(&log, "ws://");
        self.admin = word(&line, "http://").trim_end_matches("/v1/pods").to_owned();
        self.gateway = Some(process);
    }

    /// Status of `sluice` with these arguments, and what it prints, on standard output and standard error.
    pub(crate) fn run(&self, args: &[&str]) -> (i32, String, String) {
        run(&self.admin, args)
    }

    /// What `sluice` with these arguments prints when all is well.
    pub(crate) fn say(&self, args: &[&str]) -> String {
        let (status, said, complained) = self.run(args);
        assert_eq!((status, complained.as_str()), (0, ""), "{args:?}: {said}");
        said
    }

    pub(crate) fn refuse(&self, args: &[&str], words: &[&str]) {
        let (status, said, complained) = self.run(args);
        assert_eq!((status, said.as_str()), (2, ""), "{args:?}: {complained}");
        words.iter().for_each(|word| assert!(complained.contains(word), "{args:?}: {complained}"));
    }

    /// As `refuse`, of a command that says something before.
    pub(crate) fn refuse_after(&self, args: &[&str], words: &[&str]) {
        let (status, _, complained) = self.run(args);
        assert_eq!(status, 2, "{args:?}: {complained}");
        words.iter().for_each(|word| assert!(complained.contains(word), "{args:?}: {complained}"));
    }

    fn shown(&self) -> Vec<Value> {
        let shown: Value = serde_json::from_str(&self.say(&["pods", "--json"])).expect("JSON");
        shown["pods"].as_array().expect("a list").clone()
    }

    pub(crate) async fn until_phases(&self, phases: [&str; 2]) {
        let seen = async || {
            let shown = self.shown();
            let seen: Vec<&str> = shown.iter().filter_map(|pod| pod["phase"].as_str()).collect();
            (seen == phases).then_some(())
        };
        until(&format!("{phases:?}"), seen).await;
    }

    /// Which pod has all of so many streams; the other one has none.
    pub(crate) async fn holder(&self, streams: u64) -> usize {
        let holder = async || self.shown().iter().position(|pod| pod["streams"] == streams);
        until("the streams", holder).await
    }

    pub(crate) fn take(&mut self, nth: usize) -> Process {
        self.pods[nth].take().expect("runs")
    }

    /// `t` holds what these producers sent, each record once, in order.
    pub(crate) async fn check(&self, producers: &[Producer]) {
        let owed: u64 = producers.iter().map(|producer| producer.sent).sum();
        let committed = async || {
            let output = command(&["tables", "t", "--url", &self.url]).output().expect("runs");
            let described: Value = serde_json::from_slice(&output.stdout).ok()?;
            (described["rows"].as_u64() >= Some(owed)).then_some(())
        };
        until("the commit of all that was sent", committed).await;
        let root = self.dir.path().join("data/tables/main/default/t");
        let versions = read_versions(&root).expect("a sound table");
        let runs = versions.last().expect("one").files.iter().flat_map(|file| &file.runs);
        let mut found: Vec<(&str, u64)> =
            runs.flat_map(|run| run.rows.iter().map(|row| (run.stream.as_str(), row.offset))).collect();
        found.sort_unstable();
        let mut wanted: Vec<(&str, u64)> = producers
            .iter()
            .flat_map(|producer| (0..producer.sent).map(|offset| (producer.stream.as_str(), offset)))
            .collect();
        wanted.sort_unstable();
        assert!(found == wanted, "{} rows, {owed} sent", found.len());
    }

    pub(crate) fn end(mut self) {
        self.gateway.take().expect("runs").terminate().expect("drains");
        for pod in self.pods.into_iter().flatten() {
            pod.terminate().expect("drains");
        }
    }
}

pub(crate) fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sluice"));
    command.args(args);
    command
}

fn run(admin: &str, args: &[&str]) -> (i32, String, String) {
    let Output { status, stdout, stderr } = command(args).args(["--admin", admin]).output().expect("runs");
    let text = |bytes| String::from_utf8(bytes).expect("UTF-8");
    (status.code().expect("ends by itself"), text(stdout), text(stderr))
}

/// One connection, whatever happens to pods.
pub(crate) struct Producer {
    socket: WebSocketStream<MaybeTlsStream<TcpStream>>,
    pub(crate) stream: String,
    pub(crate) sent: u64,
}

impl Producer {
    pub(crate) async fn connect(pool: &Pool) -> Self {
        let url = format!("{}/v1/tables/t/stream", pool.url);
        let connecting = Box::pin(tokio_tungstenite::connect_async(url));
        let (socket, _) = soon("a connection", connecting).await.expect("connects");
        let mut producer = Self { socket, stream: String::new(), sent: 0 };
        let opened = producer.heard().await;
        opened["stream"].as_str().expect("a stream").clone_into(&mut producer.stream);
        producer
    }

    /// One that is connected, and has sent so much.
    pub(crate) fn of(socket: WebSocketStream<MaybeTlsStream<TcpStream>>, stream: String, sent: u64) -> Self {
        Self { socket, stream, sent }
    }

    async fn heard(&mut self) -> Value {
        loop {
            let message = soon("a message", self.socket.next()).await.expect("open").expect("no failure");
            match message {
                Message::Text(text) => return serde_json::from_str(&text).expect("JSON"),
                Message::Ping(_) => {}
                other => panic!("{} sent: {other:?}", self.sent),
            }
        }
    }

    /// Sends some records, and waits until they are durable.
    pub(crate) async fn send(&mut self) {
        for id in self.sent..self.sent + AT_ONCE {
            self.socket.send(Message::text(format!("{{\"id\":{id}}}"))).await.expect("sends");
        }
        self.sent += AT_ONCE;
        loop {
            let heard = self.heard().await;
            assert!(heard.get("error").is_none(), "{heard}");
            if heard["durable"].as_u64() == Some(self.sent - 1) {
                return;
            }
        }
    }

    /// Sends while `work` goes on, which blocks its thread.
    pub(crate) async fn send_during<T: Send + 'static>(
        &mut self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> T {
        let is_done = Arc::new(AtomicBool::new(false));
        let done = Arc::clone(&is_done);
        let working = tokio::task::spawn_blocking(move || {
            let worked = work();
            done.store(true, Ordering::Release);
            worked
        });
        let sending = async {
            while !is_done.load(Ordering::Acquire) {
                self.send().await;
            }
        };
        let (worked, ()) = join(working, sending).await;
        // After all of it, too.
        self.send().await;
        worked.expect("no panic")
    }
}

#[tokio::test]
async fn a_pod_is_drained_and_its_producer_sees_nothing_of_it() {
    let mut pool = Pool::start(&[], &[]).await;
    let said = pool.say(&["explain", "t"]);
    let mut producer = Producer::connect(&pool).await;
    producer.send().await;
    let holder = pool.holder(1).await;
    let (drained, other) = (format!("pod-{}", holder + 1), format!("pod-{}", 2 - holder));
    assert!(said.contains(&format!("goes to {drained}, by rule two_choices")), "{said}");
    let top = pool.say(&["top", "--once"]);
    assert!(top.contains("2 pods · 1 gateway · 1 stream · "), "{top}");
    for words in ["POD", "TABLE", "main.default.t", &drained, &other] {
        assert!(top.contains(words), "no {words} in {top}");
    }
    let (admin, pod) = (pool.admin.clone(), drained.clone());
    let drain = move || run(&admin, &["drain", &pod, "--wait"]);
    let (status, said, complained) = producer.send_during(drain).await;
    assert_eq!(status, 0, "{said}{complained}");
    assert!(said.starts_with(&format!("{drained} is draining")), "{said}");
    assert!(said.ends_with(&format!("{drained} is drained\n")), "{said}");
    let ended = pool.take(holder).ends(ENDED).expect("ends");
    assert_eq!(ended.code(), Some(0));
    pool.check(&[producer]).await;
    // It stays drained for people who look later, and for those who ask once more.
    let seen = async || pool.say(&["pods", &drained]).contains("drained").then_some(());
    until("the end of the pod, as the gateway sees it", seen).await;
    assert_eq!(pool.say(&["drain", &drained, "--wait"]), format!("{drained} is drained\n"));
    pool.refuse(&["join", &drained], &["has drained", "start it again"]);
    pool.refuse(&["drain", &other], &[&other, "the last one that takes streams", "force=true"]);
    pool.refuse(&["drain", "pod-7"], &["no pod \"pod-7\"", "pod-1, pod-2"]);
    assert!(pool.say(&["drain", &other, "--force", "--wait"]).ends_with("is drained\n"));
    assert_eq!(pool.take(1 - holder).ends(ENDED).expect("ends").code(), Some(0));
    pool.end();
}

#[tokio::test]
async fn a_pod_that_writes_other_tables_or_takes_a_name_that_is_taken_does_not_stay() {
    let pool = Pool::start(&[], &[]).await;
    let mut producer = Producer::connect(&pool).await;
    producer.send().await;
    let start = |id: &str, data: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_sluice"));
        command.args(["pod", "--id", id, "--listen", "127.0.0.1:0", "--auto-create", "--seed", &pool.seed]);
        command.args(["--gossip-listen", "127.0.0.1:0", "--data"]).arg(pool.dir.path().join(data));
        let Output { status, stdout, stderr } = command.output().expect("runs");
        let text = [stdout, stderr].concat();
        (status.code(), String::from_utf8_lossy(&text).into_owned())
    };
    let (status, said) = start("pod-3", "elsewhere");
    assert!(matches!(status, Some(2 | 78)), "{status:?}: {said}");
    assert!(said.contains("pod pod-3 writes other tables than pod pod-"), "{said}");
    assert!(said.contains("pod.tables_dir (--data)"), "{said}");
    // The log of its own makes it no other pod.
    let (log, tables) = (pool.dir.path().join("log"), pool.dir.path().join("data/tables"));
    let config = format!("[pod]\nwal_dir = {log:?}\ntables_dir = {tables:?}\n");
    fs::write(pool.dir.path().join("twin.toml"), config).expect("written");
    let mut command = Command::new(env!("CARGO_BIN_EXE_sluice"));
    command.arg("--config").arg(pool.dir.path().join("twin.toml"));
    command.args(["pod", "--id", "pod-1", "--listen", "127.0.0.1:0", "--seed", &pool.seed]);
    command.args(["--gossip-listen", "127.0.0.1:0"]);
    let (mut twin, _) = Process::start("twin", command, "listens on", pool.dir.path()).expect("starts");
    let ended = twin.ends(ENDED).expect("ends");
    assert_eq!(ended.code(), Some(78));
    let said = fs::read_to_string(pool.dir.path().join("twin.log")).expect("a log");
    assert!(said.contains("there is a pod pod-1 in the pool already, at "), "{said}");
    let warned = fs::read_to_string(pool.dir.path().join("pod-1.log")).expect("a log");
    assert!(warned.contains("another process says that it is this pod"), "{warned}");
    producer.send().await;
    pool.until_phases(["active", "active"]).await;
    pool.check(&[producer]).await;
    pool.end();
}

#[tokio::test]
async fn of_two_last_pods_that_drain_at_once_one_stays() {
    let mut pool = Pool::start(&[], &[]).await;
    let mut producer = Producer::connect(&pool).await;
    producer.send().await;
    let drain = |pod: &'static str| {
        let admin = pool.admin.clone();
        std::thread::spawn(move || run(&admin, &["drain", pod, "--wait"]))
    };
    let drains = [drain("pod-1"), drain("pod-2")];
    let ended = drains.map(|drain| drain.join().expect("runs"));
    let drained: Vec<usize> = (0..2).filter(|nth| ended[*nth].0 == 0).collect();
    assert_eq!(drained.len(), 1, "{ended:?}");
    let (_, _, complaint) = &ended[1 - drained[0]];
    let is_named =
        complaint.contains("takes streams again") || complaint.contains("is the last one that takes streams");
    assert!(is_named, "{complaint}");
    producer.send().await;
    assert_eq!(pool.take(drained[0]).ends(ENDED).expect("ends").code(), Some(0));
    pool.check(&[producer]).await;
    pool.end();
}

#[tokio::test]
async fn a_pod_that_is_terminated_hands_its_streams_over() {
    let mut pool = Pool::start(&[], &[]).await;
    let mut producer = Producer::connect(&pool).await;
    producer.send().await;
    let holder = pool.holder(1).await;
    let pod = pool.take(holder);
    producer.send_during(move || pod.terminate()).await.expect("ends with status 0");
    let moved: Value = serde_json::from_str(&get(&pool.admin, "/v1/streams").await).expect("JSON");
    assert_eq!(moved["streams"][0]["moves"], 1, "{moved}");
    pool.check(&[producer]).await;
    pool.end();
}

#[tokio::test]
async fn a_drain_is_taken_back_while_streams_have_still_to_leave() {
    const STREAMS: u64 = 8;
    let pool = Pool::start(&[], &[]).await;
    let mut producers = Vec::new();
    for _ in 0..STREAMS {
        let mut producer = Producer::connect(&pool).await;
        // Before its table is there a pod counts no stream.
        producer.send().await;
        producers.push(producer);
    }
    // On a busy machine they may stand on both.
    let all = async || {
        let shown = pool.shown();
        let streams = |pod: &Value| pod["streams"].as_u64().unwrap_or_default();
        let most =
            shown.iter().max_by_key(|pod| streams(pod)).expect("a pod")["id"].as_str().map(str::to_owned);
        (shown.iter().map(streams).sum::<u64>() == STREAMS).then_some(most).flatten()
    };
    let pod = until("all streams", all).await;
    // One stream in a second: there is time to think again.
    let said = pool.say(&["drain", &pod, "--pace", "1", "--deadline", "60s"]);
    assert!(said.starts_with(&format!("{pod} is draining: ")), "{said}");
    let explained =
        async || pool.say(&["explain", "t"]).contains("draining: takes no new streams").then_some(());
    until("the drain, as the gateway hears of it", explained).await;
    assert_eq!(pool.say(&["join", &pod]), format!("{pod} is active\n"));
    pool.until_phases(["active", "active"]).await;
    for producer in &mut producers {
        producer.send().await;
    }
    let stays = pool.shown().iter().any(|shown| shown["id"] == *pod && shown["streams"] != 0);
    assert!(stays, "all streams have left: {:?}", pool.shown());
    pool.check(&producers).await;
    pool.end();
}

#[tokio::test]
async fn a_pod_that_is_held_takes_streams_once_it_is_let_in() {
    let pool = Pool::start(&[], &[("SLUICE_POD__JOIN", "held")]).await;
    let explained = pool.say(&["explain", "t"]);
    assert!(
        explained.contains("goes to pod-1") && explained.contains("joining: takes no streams yet"),
        "{explained}"
    );
    pool.refuse(&["drain", "pod-1"], &["pod-1 is the last one that takes streams"]);
    let mut producer = Producer::connect(&pool).await;
    producer.send().await;
    assert_eq!(pool.say(&["join", "pod-2"]), "pod-2 is active\n");
    pool.until_phases(["active", "active"]).await;
    let (admin, drain) = (pool.admin.clone(), ["drain", "pod-1", "--wait"]);
    let (status, said, complained) = producer.send_during(move || run(&admin, &drain)).await;
    assert_eq!(status, 0, "{said}{complained}");
    pool.check(&[producer]).await;
}

#[tokio::test]
async fn a_pod_that_is_killed_is_shown_as_lost_and_its_streams_go_on() {
    let mut pool = Pool::start(&[], &[]).await;
    let mut producer = Producer::connect(&pool).await;
    producer.send().await;
    let holder = pool.holder(1).await;
    let killed = pool.take(holder);
    producer.send_during(move || killed.kill()).await.expect("ran until then");
    let mut phases = ["active"; 2];
    phases[holder] = "lost";
    pool.until_phases(phases).await;
    producer.send().await;
    let pod = format!("pod-{}", holder + 1);
    pool.refuse(&["drain", &pod], &[&pod, "cannot be reached"]);
    pool.start_pod(holder, &[]);
    pool.until_phases(["active"; 2]).await;
    producer.send().await;
    pool.check(&[producer]).await;
    pool.end();
}

#[tokio::test]
async fn the_commands_know_the_secret_by_a_variable() {
    let secret = "a secret of many letters";
    let hash = sluice_gateway::SecretHash::of(secret).to_string();
    let dir = tempfile::tempdir().expect("a directory");
    let mut gateway = command(&["gateway", "--listen", "127.0.0.1:0", "--pod", "pod-1=127.0.0.1:1"]);
    gateway.env("SLUICE_GATEWAY__ADMIN_SECRET_SHA256", hash);
    let (process, line) = Process::start("gateway", gateway, "admin API ", dir.path()).expect("starts");
    let admin = line.split_whitespace().last().expect("an address").trim_end_matches("/v1/pods").to_owned();
    let asked = |secret: &str| {
        command(&["pods", "--admin", &admin]).env("SLUICE_ADMIN_SECRET", secret).output().expect("runs")
    };
    let Output { status, stdout, stderr } = asked(secret);
    let (said, complained) = (String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
    assert!(status.success() && said.contains("pod-1"), "{said}{complained}");
    let Output { status, stderr, .. } = asked("another");
    assert_eq!(status.code(), Some(2));
    assert!(String::from_utf8_lossy(&stderr).contains("the admin API needs its secret"));
    process.terminate().expect("drains");
}

async fn get(admin: &str, path: &str) -> String {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let address = admin.trim_start_matches("http://");
    let mut socket = TcpStream::connect(address).await.expect("connects");
    let request = format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
    socket.write_all(request.as_bytes()).await.expect("sends");
    let mut answer = String::new();
    soon("the answer", socket.read_to_string(&mut answer)).await.expect("reads");
    answer.split_once("\r\n\r\n").expect("a body").1.to_owned()
}
