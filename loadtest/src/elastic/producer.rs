//! A stream under steady load, whatever the service does: each record has the moment at which it was due, and from then
//! on its producer waits for it to be durable.
//!
//! *Owns*: the schedule, the records, the notes of what was sent and told.
//! *Does not own*: what happens to the service meanwhile (`elastic`), what is made of the notes (`auditor`, `figures`).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, ensure};
use bytes::Bytes;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use sluice_client::{Client, Encoding, Progress, Stream};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};

use super::figures::Wait;
use crate::history::StreamHistory;
use crate::workload::{self, Shape};

/// Records that are made in one go.
const MADE_AT_ONCE: usize = 64;
/// Records whose durability is waited for; more are only sent, and the test has failed anyway.
const WAITS_MAX: usize = 1 << 16;
/// Longer than any pause that there may be, shorter than anybody's patience.
const GIVE_UP_AFTER: Duration = Duration::from_secs(60);

/// One stream of the load.
pub(crate) struct Producer {
    pub(crate) number: usize,
    pub(crate) table: String,
    pub(crate) client: Client,
    pub(crate) seed: u64,
    /// Records that are sent, and waited for, together.
    pub(crate) records: usize,
    /// From one such frame to the next.
    pub(crate) interval: Duration,
    /// What it says that it will send, so that a table of many such streams spreads at once.
    pub(crate) rate_hint: Option<u64>,
    /// Times count from here.
    pub(crate) began: Instant,
    pub(crate) stop: Arc<AtomicBool>,
}

/// A stream that has opened.
pub(crate) struct Opened {
    pub(crate) number: usize,
    pub(crate) stream: String,
    pub(crate) progress: Progress,
}

/// What became of a stream.
pub(crate) struct Told {
    pub(crate) number: usize,
    pub(crate) notes: StreamHistory,
    pub(crate) waits: Vec<Wait>,
}

impl Producer {
    /// Opens the stream, tells `opened`, and sends until it is told to stop.
    pub(crate) async fn run(self, opened: mpsc::Sender<Opened>) -> anyhow::Result<Told> {
        let label = format!("stream {} into {}", self.number, self.table);
        self.send_all(opened).await.with_context(|| label)
    }

    async fn send_all(self, opened: mpsc::Sender<Opened>) -> anyhow::Result<Told> {
        let builder = self.client.stream(&self.table).name(format!("elastic-{}", self.number));
        let builder = match self.rate_hint {
            Some(rate) => builder.rate_bytes_per_s(rate),
            None => builder,
        };
        let mut stream = builder.encoding(Encoding::Json).give_up_after(GIVE_UP_AFTER).open().await?;
        ensure!(stream.next_offset() == 0, "a new stream begins at {}", stream.next_offset());
        let progress = stream.progress();
        let id = progress.stream_id().context("an open stream has an id")?;
        let news = Opened { number: self.number, stream: id.clone(), progress: progress.clone() };
        // Whoever waits has gone only when the test has failed already.
        let _ = opened.send(news).await;
        drop(opened);

        let mut notes = StreamHistory { stream: id, ..StreamHistory::default() };
        let (due, dues) = mpsc::channel(WAITS_MAX);
        let (sent, waits) =
            tokio::join!(self.send(&mut stream, &mut notes, due), wait(progress.clone(), dues, self.began));
        sent?;
        let waits = waits?;
        stream.committed().await?;
        note(&progress, &mut notes);
        let (records, reconnected) = (notes.sent.len() as u64, progress.stream_id());
        ensure!(reconnected.is_none_or(|id| id == notes.stream), "the stream's id changed");
        let summary = stream.finish().await?;
        ensure!(summary.records == records, "{records} records sent, the summary says {}", summary.records);
        ensure!(summary.rejected == 0, "{} good records were rejected", summary.rejected);
        Ok(Told { number: self.number, notes, waits })
    }

    /// Sends each record when it is due, or as soon after as there is room.
    async fn send(
        &self,
        stream: &mut Stream,
        notes: &mut StreamHistory,
        due: mpsc::Sender<(u64, Instant)>,
    ) -> anyhow::Result<()> {
        let mut random = StdRng::seed_from_u64(self.seed);
        let progress = stream.progress();
        // Not all at one time.
        let mut at = Instant::now() + self.interval.mul_f64(random.random());
        let mut made = Vec::new().into_iter();
        while !self.stop.load(Ordering::Relaxed) {
            let Some((frame, hashes)) = made.next() else {
                made = make(notes.sent.len() as u64, self.records, &mut random)?.into_iter();
                continue;
            };
            sleep_until(at).await;
            notes.sent(&hashes);
            let offsets = stream.send_ndjson(frame).await?;
            let next = notes.sent.len() as u64;
            ensure!(offsets.end == next, "offsets {offsets:?}, expected up to {next}");
            due.send((next - 1, at)).await.context("nobody waits for what was sent")?;
            note(&progress, notes);
            at += self.interval;
        }
        stream.durable().await?;
        Ok(())
    }
}

/// Frames of so many records, with the records' hashes.
fn make(first: u64, records: usize, random: &mut StdRng) -> anyhow::Result<Vec<(Bytes, Vec<u64>)>> {
    let batch = Shape::ServiceEvent.batch(first, MADE_AT_ONCE.next_multiple_of(records), random);
    let (text, hashes) = (workload::json_lines(&batch)?, workload::row_hashes(&batch)?);
    let lengths: Vec<usize> = text.split_inclusive(|byte| *byte == b'\n').map(<[u8]>::len).collect();
    let mut rest = text;
    let frames = lengths.chunks(records).map(|lengths| rest.split_to(lengths.iter().sum()));
    let frames: Vec<Bytes> = frames.collect();
    Ok(frames.into_iter().zip(hashes.chunks(records).map(<[u64]>::to_vec)).collect())
}

/// Notes how long each record waited, until there are no more.
async fn wait(
    mut progress: Progress,
    mut dues: mpsc::Receiver<(u64, Instant)>,
    began: Instant,
) -> anyhow::Result<Vec<Wait>> {
    let mut waits = Vec::new();
    while let Some((offset, due)) = dues.recv().await {
        progress.durable_at(offset).await?;
        waits.push(Wait { due: due - began, durable: began.elapsed() });
    }
    Ok(waits)
}

/// Notes what the service has said so far.
fn note(progress: &Progress, notes: &mut StreamHistory) {
    notes.durable(progress.durable().map_or(0, |offset| offset + 1));
    if let Some(committed) = progress.committed() {
        notes.committed(committed.offset + 1, committed.version.unwrap_or(0));
    }
}
