//! The crash test: streams of all kinds send while their pod is killed again and again; then the auditor judges
//! every version of the table.
//!
//! *Owns*: the scenario, from one seed.
//! *Does not own*: the processes (`cluster`), the verdict (`auditor`).
//! Tests P1 to P5 and P8 on real processes.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, anyhow, bail, ensure};
use bytes::{Bytes, BytesMut};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use sluice_client::{Client, Encoding, Progress, Stream};
use sluice_shared::lifecycle::{OnPanic, TaskScope};
use tokio::sync::mpsc;

use crate::auditor::{Auditor, Verdict};
use crate::cluster::Cluster;
use crate::history::{History, StreamHistory};
use crate::table;
use crate::workload::{self, Shape};

const TABLE: &str = "crash";
/// Records of one send, at most.
const SEND_ROWS_MAX: usize = 60;
/// Longer than any restart, shorter than anybody's patience.
const GIVE_UP_AFTER: Duration = Duration::from_secs(60);
/// For all streams to finish after the last restart.
const FINISH_TIMEOUT: Duration = Duration::from_secs(60);
/// A record that fits no table with a numeric `customer_id`.
const BAD_RECORD: &[u8] = b"{\"customer_id\":\"none\"}\n";
/// Stands for its hash, which no table has.
const BAD_HASH: u64 = 0;

/// How hard it is.
#[derive(Debug, Clone, Copy)]
pub struct Scenario {
    /// Everything that is random comes from it, but for the operating system's share.
    pub seed: u64,
    /// How often the pod ends.
    pub ends: u32,
    /// Each so many ends are a drain (SIGTERM); the others are `kill -9`.
    pub drain_each: u32,
    /// Named streams that send Arrow; as many send JSON, and half as many of each are ephemeral.
    pub named: usize,
    /// The pod's log is in the tables' store: each start takes the log of the life before over.
    pub object_log: bool,
}

impl Scenario {
    /// Twenty-four ends, of which twenty kill.
    pub fn seeded(seed: u64) -> Self {
        Self { seed, ends: 24, drain_each: 6, named: 4, object_log: false }
    }
}

/// What came out.
#[derive(Debug)]
pub struct Outcome {
    /// The auditor's word.
    pub verdict: Verdict,
    /// Records sent.
    pub sent: u64,
    /// Records among them that fit no table.
    pub bad: u64,
    /// Records that were refused by name.
    pub rejected: u64,
    /// Connections that producers lost although only the pod ended.
    pub reconnects: u64,
}

/// How a stream sends.
#[derive(Clone, Copy)]
struct Kind {
    number: usize,
    named: bool,
    encoding: Encoding,
}

/// Runs the scenario with data below `dir`. The thread that calls must outlive it.
///
/// # Errors
/// A process that does not start, drain or stay alive, a stream that fails, a table that cannot be read. Broken
/// promises are not errors here: they are in the verdict.
pub async fn run(sluice: &Path, dir: &Path, scenario: Scenario) -> anyhow::Result<Outcome> {
    // Small segments are recycled and trimmed many times within the test.
    let log = if scenario.object_log { "object" } else { "disk" };
    let env = [
        ("SLUICE_POD__LOG", log),
        ("SLUICE_POD__SEGMENT_BYTES", "4MiB"),
        ("SLUICE_POD__RECORD_BYTES_MAX", "1MiB"),
        ("SLUICE_POD__FLUSH_INTERVAL_MS", "300"),
    ];
    let mut cluster = Cluster::start(sluice, dir, &env)?;
    let ran = ends_and_streams(&mut cluster, scenario).await;
    let (history, reconnects) = ran.map_err(|error| anyhow!("{error:#}\n{}", cluster.log_tails()))?;
    let table_dir = cluster.table_dir(TABLE);
    cluster.drain()?;
    let verdict = judge(&table_dir, &history)?;
    let all_sent = history.streams.iter().flat_map(|stream| &stream.sent);
    let bad = all_sent.filter(|hash| **hash == BAD_HASH).count() as u64;
    Ok(Outcome { verdict, sent: history.sent(), bad, rejected: history.rejected(), reconnects })
}

/// Judges every version of a table.
///
/// # Errors
/// It cannot be read.
pub fn judge(table_dir: &Path, history: &History) -> anyhow::Result<Verdict> {
    let mut auditor = Auditor::new(history);
    for version in table::read_versions(table_dir)? {
        auditor.version(version.version, version.files.iter().map(Arc::as_ref), version.marks.as_deref());
    }
    Ok(auditor.finish())
}

async fn ends_and_streams(cluster: &mut Cluster, scenario: Scenario) -> anyhow::Result<(History, u64)> {
    let mut random = StdRng::seed_from_u64(scenario.seed);
    let client = Client::connect(cluster.url()).await?;
    let schema = Shape::ServiceEvent.schema();
    // The table is there before the first JSON record, so that its types are not inferred.
    client.stream(TABLE).schema(schema).open().await?.finish().await?;

    let kinds = kinds(scenario.named);
    let scope = TaskScope::new(OnPanic::EndTask);
    let stop = Arc::new(AtomicBool::new(false));
    let (done, mut ended) = mpsc::channel(kinds.len());
    for kind in &kinds {
        let producer = Producer {
            kind: *kind,
            client: client.clone(),
            random: StdRng::seed_from_u64(random.random()),
            stop: Arc::clone(&stop),
        };
        let done = done.clone();
        scope.spawn("producer", async move {
            // Whoever waits has gone only when the test has failed already.
            let _ = done.send(producer.run().await).await;
        });
    }
    drop(done);
    end_and_restart(cluster, scenario, &mut random, &mut ended).await?;
    stop.store(true, Ordering::Relaxed);

    let (mut history, mut reconnects) = (History::default(), 0);
    for _ in 0..kinds.len() {
        let next = tokio::time::timeout(FINISH_TIMEOUT, ended.recv()).await;
        let next = next.context("streams have not finished in time")?.context("a producer panicked")?;
        let (notes, lost) = next?;
        history.streams.push(notes);
        reconnects += lost;
    }
    Ok((history, reconnects))
}

type Ended = anyhow::Result<(StreamHistory, u64)>;

async fn end_and_restart(
    cluster: &mut Cluster,
    scenario: Scenario,
    random: &mut StdRng,
    ended: &mut mpsc::Receiver<Ended>,
) -> anyhow::Result<()> {
    for end in 1..=scenario.ends {
        // Often short: the pod is then killed while it replays, or while streams resume.
        let longest = if random.random_bool(0.4) { 150 } else { 1500 };
        let wait = Duration::from_millis(random.random_range(5..longest));
        tokio::select! {
            biased; // a producer that fails ends the test at once
            failed = ended.recv() => match failed {
                Some(Err(error)) => return Err(error.context(format!("before end {end}"))),
                _ => bail!("a producer stopped before it was told to"),
            },
            () = tokio::time::sleep(wait) => {}
        }
        if end % scenario.drain_each == 0 {
            cluster.drain_pod().with_context(|| format!("drain, end {end}"))?;
        } else {
            cluster.kill_pod().with_context(|| format!("kill, end {end}"))?;
        }
        cluster.start_pod().with_context(|| format!("restart after end {end}"))?;
    }
    Ok(())
}

fn kinds(named: usize) -> Vec<Kind> {
    let encodings = [Encoding::Arrow, Encoding::Json];
    let all = encodings
        .into_iter()
        .flat_map(|encoding| (0..named + named.div_ceil(2)).map(move |place| (place < named, encoding)));
    all.enumerate().map(|(number, (named, encoding))| Kind { number, named, encoding }).collect()
}

struct Producer {
    kind: Kind,
    client: Client,
    random: StdRng,
    stop: Arc<AtomicBool>,
}

impl Producer {
    async fn run(mut self) -> Ended {
        let label = format!("stream {} ({:?})", self.kind.number, self.kind.encoding);
        self.send_all().await.with_context(|| label)
    }

    async fn send_all(&mut self) -> Ended {
        let mut stream = self.open().await?;
        let progress = stream.progress();
        let stream_id = progress.stream_id().context("an open stream has an id")?;
        let mut notes = StreamHistory { stream: stream_id, ..StreamHistory::default() };
        ensure!(stream.next_offset() == 0, "a new stream begins at {}", stream.next_offset());
        while !self.stop.load(Ordering::Relaxed) {
            self.send(&mut stream, &mut notes).await?;
            note(&progress, &mut stream, &mut notes);
            let pause = Duration::from_millis(self.random.random_range(0..25));
            tokio::time::sleep(pause).await;
        }
        stream.durable().await?;
        note(&progress, &mut stream, &mut notes);
        stream.committed().await?;
        note(&progress, &mut stream, &mut notes);
        let reconnects = progress.reconnects();
        let summary = stream.finish().await?;
        let sent = notes.sent.len() as u64;
        ensure!(summary.records == sent, "{sent} records sent, the summary says {}", summary.records);
        ensure!(summary.unconfirmed == 0, "{} records unconfirmed", summary.unconfirmed);
        ensure!(progress.stream_id().is_none_or(|id| id == notes.stream), "the stream's id changed");
        Ok((notes, reconnects))
    }

    async fn open(&self) -> anyhow::Result<Stream> {
        let stream = self.client.stream(TABLE).give_up_after(GIVE_UP_AFTER);
        let stream = match self.kind.encoding {
            Encoding::Arrow => stream.schema(Shape::ServiceEvent.schema()),
            encoding => stream.encoding(encoding),
        };
        let stream =
            if self.kind.named { stream.name(format!("crash-{}", self.kind.number)) } else { stream };
        Ok(stream.open().await?)
    }

    async fn send(&mut self, stream: &mut Stream, notes: &mut StreamHistory) -> anyhow::Result<()> {
        let rows = self.random.random_range(1..=SEND_ROWS_MAX);
        let first = notes.sent.len() as u64;
        let batch = Shape::ServiceEvent.batch(first, rows, &mut self.random);
        notes.sent(&workload::row_hashes(&batch)?);
        let offsets = match self.kind.encoding {
            Encoding::Arrow => stream.send_batch(batch).await?,
            Encoding::Json => {
                let mut text = workload::json_lines(&batch)?;
                if self.random.random_bool(0.1) {
                    text = with_bad_record(&text);
                    notes.sent(&[BAD_HASH]);
                }
                stream.send_ndjson(text).await?
            }
            other => anyhow::bail!("the client sends no {other:?}"),
        };
        let expected = (first, notes.sent.len() as u64);
        ensure!((offsets.start, offsets.end) == expected, "offsets {offsets:?}, expected {expected:?}");
        Ok(())
    }
}

/// One that is refused, after the others.
fn with_bad_record(text: &Bytes) -> Bytes {
    let mut longer = BytesMut::with_capacity(text.len() + BAD_RECORD.len());
    longer.extend_from_slice(text);
    longer.extend_from_slice(BAD_RECORD);
    longer.freeze()
}

/// Notes what the service has said so far.
fn note(progress: &Progress, stream: &mut Stream, notes: &mut StreamHistory) {
    notes.durable(progress.durable().map_or(0, |offset| offset + 1));
    if let Some(committed) = progress.committed() {
        notes.committed(committed.offset + 1, committed.version.unwrap_or(0));
    }
    notes.rejected.extend(stream.rejected().into_iter().map(|rejected| rejected.offset));
}
