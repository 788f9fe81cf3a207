//! Every edge of the gateway before a pod that acks all at once; and, beside each, a receiver that does nothing but hand
//! the same bytes to the same pod: the least that any gateway would have to do.
//!
//! *Owns*: the list of edges, how each is run, what is measured.
//! *Does not own*: the messages (`load::messages`), sending (`producers`), either receiver (`bare`, and the gateway itself), aims
//! and how figures look (`report`).

pub mod zerobus;
pub mod bare;
mod pod;
mod producers;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, anyhow, ensure};
use serde::{Deserialize, Serialize};
use sluice_gateway::make_self_signed;
use sluice_shared::frame::Encoding;
use sluice_shared::lifecycle::{OnPanic, TaskScope};
use tokio::sync::oneshot;

use crate::cluster::Process;
use crate::load::messages::Load;
use crate::workload::Shape;
use pod::NullPod;

/// The table that everything goes to.
const TABLE: &str = "bench";
/// HTTP/2 windows as gateways have them, a call's and a connection's: the bare receivers have the same.
const CALL_WINDOW_BYTES: u32 = 4 << 20;
const CONNECTION_WINDOW_BYTES: u32 = 16 << 20;
/// Largest message of a gRPC call.
const MESSAGE_BYTES_MAX: usize = 16 << 20;
/// Payload may come out of a receiver so much smaller or larger: separators, and a schema before each batch.
const BYTES_TOLERANCE: f64 = 0.02;

/// How long and how often, and what.
#[derive(Debug, Clone)]
pub struct Options {
    /// The program whose gateway is measured.
    pub sluice: PathBuf,
    /// The program that has the bare receivers: this one.
    pub loadtest: PathBuf,
    /// Logs and a certificate go below it.
    pub dir: PathBuf,
    /// Length of a run.
    pub run: Duration,
    /// Runs of each edge, gateway and bare in turn; the median counts.
    pub runs: usize,
    /// Payload that is made beforehand and sent over and over.
    pub feed_bytes: usize,
    /// Beginnings of the names of the edges to run; empty for all.
    pub only: Vec<String>,
}

/// How messages travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Transport {
    /// Binary frames of `sluice.v1`.
    #[serde(rename = "websocket")]
    WebSocketFrames,
    /// Plain JSON texts.
    #[serde(rename = "websocket-text")]
    WebSocketTexts,
    /// The same frames over QUIC.
    Quic,
    /// One long body.
    Http,
    /// `EphemeralStream`.
    Zerobus,
    /// `DoPut`.
    Flight,
}

impl Transport {
    /// As a scenario has it.
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::WebSocketFrames => "websocket",
            Self::WebSocketTexts => "websocket-text",
            Self::Quic => "quic",
            Self::Http => "http",
            Self::Zerobus => "zerobus",
            Self::Flight => "flight",
        }
    }
}

/// One edge with one kind of messages.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Edge {
    /// As it is asked for.
    pub name: &'static str,
    /// How messages travel.
    pub transport: Transport,
    /// How records are encoded.
    pub encoding: Encoding,
    /// Records of a message.
    pub rows: usize,
}

const fn edge(name: &'static str, transport: Transport, encoding: Encoding, rows: usize) -> Edge {
    Edge { name, transport, encoding, rows }
}

/// The edges.
pub const EDGES: [Edge; 11] = [
    edge("websocket-json", Transport::WebSocketFrames, Encoding::Json, 1000),
    edge("websocket-arrow", Transport::WebSocketFrames, Encoding::Arrow, 1000),
    edge("websocket-text", Transport::WebSocketTexts, Encoding::Json, 1),
    edge("quic-json", Transport::Quic, Encoding::Json, 1000),
    edge("quic-arrow", Transport::Quic, Encoding::Arrow, 1000),
    edge("http-json", Transport::Http, Encoding::Json, 1000),
    edge("http-arrow", Transport::Http, Encoding::Arrow, 1000),
    edge("zerobus-json", Transport::Zerobus, Encoding::Json, 1),
    edge("zerobus-json-batch", Transport::Zerobus, Encoding::Json, 1000),
    edge("zerobus-protobuf-batch", Transport::Zerobus, Encoding::Protobuf, 1000),
    edge("flight", Transport::Flight, Encoding::Arrow, 1000),
];

/// What the records are like, with a name for people.
const SHAPES: [(&str, Shape); 2] = [("1 KB", Shape::Blob), ("250 B", Shape::ServiceEvent)];

/// Figures of one run.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Run {
    /// Records, all acked.
    pub records: u64,
    /// Their payload, MB/s from the first send until the last ack.
    pub mb_per_s: f64,
    /// Records by the same time.
    pub records_per_s: f64,
    /// CPU time of the receiver's process per GB of payload.
    pub cpu_s_per_gb: f64,
}

/// Figures of one edge with one shape of records.
#[derive(Debug, Clone, Serialize)]
pub struct EdgeFigures {
    /// Which.
    pub edge: Edge,
    /// What the records are like.
    pub shape: &'static str,
    /// Bytes of a message's payload, on average.
    pub message_bytes: f64,
    /// Each run of the gateway, in order,
    pub gateway: Vec<Run>,
    /// and of a receiver that does nothing but forward.
    pub bare: Vec<Run>,
}

/// Who receives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Receiver {
    Gateway,
    Bare,
}

/// The edges whose names begin so.
///
/// # Errors
/// A beginning that no edge has.
pub fn chosen(only: &[String]) -> anyhow::Result<Vec<Edge>> {
    let begins = |edge: &Edge, begin: &String| edge.name.starts_with(begin.as_str());
    for begin in only {
        let known = EDGES.map(|edge| edge.name).join(", ");
        ensure!(
            EDGES.iter().any(|edge| begins(edge, begin)),
            "no edge begins with {begin:?}: there are {known}"
        );
    }
    let is_chosen = |edge: &Edge| only.is_empty() || only.iter().any(|begin| begins(edge, begin));
    Ok(EDGES.into_iter().filter(is_chosen).collect())
}

/// Runs the edges. The thread that calls must outlive it; `tell` hears how it goes.
///
/// # Errors
/// Anything that fails, and a receiver that did not hand on all that was sent.
pub async fn run(options: &Options, tell: &dyn Fn(&str)) -> anyhow::Result<Vec<EdgeFigures>> {
    let edges = chosen(&options.only)?;
    std::fs::create_dir_all(&options.dir).with_context(|| options.dir.display().to_string())?;
    let mut figures = Vec::new();
    for edge in &edges {
        for (name, shape) in SHAPES {
            let ran = Box::pin(run_edge(options, edge, (name, shape), tell)).await;
            figures.push(ran.with_context(|| format!("edge {}, {name} records", edge.name))?);
        }
    }
    Ok(figures)
}

async fn run_edge(
    options: &Options,
    edge: &Edge,
    (name, shape): (&'static str, Shape),
    tell: &dyn Fn(&str),
) -> anyhow::Result<EdgeFigures> {
    let load = Load::new(edge, shape, options.feed_bytes)?;
    let (mut gateway, mut bare) = (Vec::new(), Vec::new());
    let count = options.runs.max(1);
    for number in 1..=count {
        tell(&format!("{}, {name} records: run {number} of {count}", edge.name));
        // In turn, so that whatever else the machine does falls on both.
        for (receiver, runs) in [(Receiver::Gateway, &mut gateway), (Receiver::Bare, &mut bare)] {
            runs.push(
                run_once(options, edge, &load, receiver).await.with_context(|| format!("{receiver:?}"))?,
            );
        }
    }
    let bytes: usize = load.messages.iter().map(|message| message.bytes).sum();
    let message_bytes = bytes as f64 / load.messages.len() as f64;
    Ok(EdgeFigures { edge: *edge, shape: name, message_bytes, gateway, bare })
}

/// Fresh processes each time: nothing is carried over.
async fn run_once(options: &Options, edge: &Edge, load: &Load, receiver: Receiver) -> anyhow::Result<Run> {
    let dir = tempfile::tempdir_in(&options.dir)?;
    let pod = NullPod::start().await?;
    let (cert, key) = make_self_signed(dir.path(), "127.0.0.1")?;
    let (process, line) = match receiver {
        Receiver::Gateway => {
            let ready =
                if edge.transport == Transport::Quic { "listens on quic://" } else { "listens on ws://" };
            let mut command = Command::new(&options.sluice);
            command.args([
                "gateway",
                "--listen",
                "127.0.0.1:0",
                "--pod",
                &format!("pod-1={}", pod.address()),
            ]);
            command.env("SLUICE_GATEWAY__TLS_CERT", &cert).env("SLUICE_GATEWAY__TLS_KEY", &key);
            Process::start("gateway", command, ready, dir.path())?
        }
        Receiver::Bare => {
            let mut command = Command::new(&options.loadtest);
            command.args(["bare", bare::name(edge.transport), "--pod", &pod.address().to_string()]);
            command.args(["--rows", &load.rows.to_string()]).arg("--cert").arg(&cert).arg("--key").arg(&key);
            Process::start("bare", command, "listens on ", dir.path())?
        }
    };
    let target = producers::Receiver { address: address_in(&line)?, certificate: cert, pid: process.pid() };
    let sent = produce(*edge, target, load.clone(), options.run).await;
    let sent = sent.map_err(|error| anyhow!("{error:#}\n{}", process.log_tail()))?;
    check_arrived(receiver, &sent, &pod)?;
    process.kill()?;
    let per_s = |amount: f64| amount / sent.took.as_secs_f64();
    Ok(Run {
        records: sent.records,
        mb_per_s: per_s(sent.bytes as f64 / 1e6),
        records_per_s: per_s(sent.records as f64),
        cpu_s_per_gb: sent.cpu.as_secs_f64() / (sent.bytes.max(1) as f64 / 1e9),
    })
}

/// On a thread of the pool, where a producer of its own would run.
async fn produce(
    edge: Edge,
    target: producers::Receiver,
    load: Load,
    run: Duration,
) -> anyhow::Result<producers::Sent> {
    let (told, hear) = oneshot::channel();
    TaskScope::new(OnPanic::EndTask).spawn("edge producer", async move {
        // Whoever waits has gone only when the bench was given up.
        let _ = told.send(producers::produce(&edge, &target, &load, run).await);
    });
    hear.await.context("the producer panicked")?
}

/// What was acked has to have come to the pod. A bare receiver does not look into what it forwards, and so counts no
/// records.
fn check_arrived(receiver: Receiver, sent: &producers::Sent, pod: &NullPod) -> anyhow::Result<()> {
    let (records, bytes) = (pod.records(), pod.bytes());
    ensure!(sent.records > 0, "nothing was sent");
    let is_complete = receiver == Receiver::Bare || records == sent.records;
    ensure!(is_complete, "{} records were acked, {records} came to the pod", sent.records);
    let ratio = bytes as f64 / sent.bytes as f64;
    ensure!(
        (ratio - 1.0).abs() < BYTES_TOLERANCE,
        "{} bytes were acked, {bytes} came to the pod",
        sent.bytes
    );
    Ok(())
}

/// The address that a program said it listens on.
fn address_in(line: &str) -> anyhow::Result<SocketAddr> {
    let (_, said) = line.split_once("listens on ").with_context(|| format!("no address in {line:?}"))?;
    let address = said.rsplit("//").next().unwrap_or(said).trim();
    address.parse().with_context(|| format!("no address in {line:?}"))
}

/// Finds this very program, for the receivers in processes of their own.
///
/// # Errors
/// It cannot be found.
pub fn find_loadtest() -> anyhow::Result<PathBuf> {
    std::env::current_exe().context("cannot find the running program")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn edges_are_chosen_by_the_beginnings_of_their_names() {
        let names = |only: &[&str]| {
            let only: Vec<String> = only.iter().map(|&begin| begin.to_owned()).collect();
            chosen(&only).map(|edges| edges.iter().map(|edge| edge.name).collect::<Vec<_>>())
        };
        assert_eq!(names(&[]).expect("all").len(), EDGES.len());
        assert_eq!(names(&["quic", "flight"]).expect("known"), ["quic-json", "quic-arrow", "flight"]);
        let error = names(&["quick"]).expect_err("no such edge").to_string();
        assert!(error.contains("\"quick\"") && error.contains("zerobus-json-batch"), "{error}");
    }

    #[test]
    fn the_address_is_read_however_it_is_said() {
        for line in [
            "gateway listens on ws://127.0.0.1:7",
            "listens on 127.0.0.1:7",
            "gateway listens on quic://127.0.0.1:7\n",
        ] {
            assert_eq!(address_in(line).expect(line).port(), 7);
        }
        address_in("listens on nothing").expect_err("no address");
    }
}
