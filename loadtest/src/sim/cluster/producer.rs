//! A simulated producer: the client, a named stream, and notes of what was sent and answered.
//!
//! A record's content follows from its stream and its offset, so that whoever goes on with the stream sends the same.
//!
//! *Owns*: the records, the notes of each stream.
//! *Does not own*: when producers die, and who follows them (`world`), the verdict (`auditor`).

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, ensure};
use arrow::array::{ArrayRef, Int64Array, RecordBatch, StringArray};
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use sluice_client::{Client, Encoding, Progress, RetryPolicy, Stream};

use crate::history::StreamHistory;
use crate::workload::row_hashes;

/// The tables that are sent to: two streams to the first, two to the second, and so on.
pub const TABLES: [&str; 2] = ["main.sim.one", "main.sim.two"];
/// Records of one send, at most.
const SEND_ROWS_MAX: usize = 30;
/// A producer sends so many, whatever it is told: a world in which none could send before all was healed has to show
/// something too.
const RECORDS_MIN: u64 = 60;
/// One of so many JSON records fits no table.
const BAD_EACH: u64 = 41;
/// Stands for the hash of such a record, which no table has.
const BAD_HASH: u64 = 0;
/// Longer than any simulation.
const GIVE_UP_AFTER: Duration = Duration::from_secs(3_600);

/// A named stream, and what all its producers have seen of it.
#[derive(Clone)]
pub struct NamedStream {
    /// Tells it from others.
    pub number: u64,
    notes: Arc<Mutex<Notes>>,
}

/// What was seen.
#[derive(Default)]
pub struct Notes {
    /// For the auditor.
    pub history: StreamHistory,
    /// Its last producer has finished it.
    pub is_finished: bool,
    /// What was wrong by what a producer was told.
    pub faults: Vec<String>,
    /// What the producers that hold it at the moment are told.
    watched: Vec<Progress>,
}

impl NamedStream {
    /// One that nobody has opened yet.
    pub fn new(number: u64) -> Self {
        Self { number, notes: Arc::default() }
    }

    /// The notes.
    pub fn notes(&self) -> MutexGuard<'_, Notes> {
        self.notes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where it goes.
    pub fn table(&self) -> &'static str {
        TABLES[(self.number.div_ceil(2) % 2) as usize]
    }

    /// Whether a table can be made from what it opens with.
    pub fn states_schema(&self) -> bool {
        self.number.is_multiple_of(2)
    }

    fn encoding(&self) -> Encoding {
        if self.states_schema() { Encoding::Arrow } else { Encoding::Json }
    }

    fn is_bad(&self, offset: u64) -> bool {
        self.encoding() == Encoding::Json && self.value(offset).unsigned_abs().is_multiple_of(BAD_EACH)
    }

    /// The content of a record.
    fn value(&self, offset: u64) -> i64 {
        let mixed = (self.number << 40 | offset).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (mixed >> 20).cast_signed()
    }

    fn batch(&self, first: u64, rows: usize) -> anyhow::Result<RecordBatch> {
        let offsets = first..first + rows as u64;
        let values = Int64Array::from_iter_values(offsets.map(|offset| self.value(offset)));
        let who = StringArray::from(vec![format!("producer {}", self.number); rows]);
        let columns: Vec<ArrayRef> = vec![Arc::new(values), Arc::new(who)];
        Ok(RecordBatch::try_new(schema(), columns)?)
    }

    fn lines(&self, first: u64, rows: usize) -> String {
        let line = |offset: u64| match self.is_bad(offset) {
            true => "{\"n\":\"none\"}\n".to_owned(),
            false => format!("{{\"n\":{},\"who\":\"producer {}\"}}\n", self.value(offset), self.number),
        };
        (first..first + rows as u64).map(line).collect()
    }

    /// Notes records that are about to be sent, as far as nobody has sent them before.
    fn sending(&self, first: u64, rows: usize) -> anyhow::Result<()> {
        let hashes = row_hashes(&self.batch(first, rows)?)?;
        let mut notes = self.notes();
        for (offset, hash) in (first..).zip(hashes) {
            if offset < notes.history.sent.len() as u64 {
                continue;
            }
            let is_bad = self.is_bad(offset);
            notes.history.sent.push(if is_bad { BAD_HASH } else { hash });
            // Its producer may be dead when that is told: what counts is that it is in no table.
            notes.history.rejected.extend(is_bad.then_some(offset));
        }
        Ok(())
    }

    /// Notes what its producers have been told by now.
    pub fn look(&self) {
        let mut notes = self.notes();
        let Notes { history, watched, .. } = &mut *notes;
        for progress in watched {
            history.durable(progress.durable().map_or(0, |offset| offset + 1));
            if let Some(committed) = progress.committed() {
                history.committed(committed.offset + 1, committed.version.unwrap_or(0));
            }
        }
    }
}

/// The columns.
fn schema() -> SchemaRef {
    let fields = [Field::new("n", DataType::Int64, true), Field::new("who", DataType::Utf8, true)];
    Arc::new(Schema::new(fields.to_vec()))
}

/// A producer.
pub struct Producer {
    /// Knows the way to the gateways.
    pub client: Client,
    /// What it sends to.
    pub stream: NamedStream,
    /// For its pace.
    pub seed: u64,
    /// Tells it to finish.
    pub stop: Arc<AtomicBool>,
}

impl Producer {
    /// Sends until it is told to finish, but some records at least, and finishes.
    ///
    /// # Errors
    /// The stream's own; what cannot be by what was told before.
    pub async fn run(self) -> anyhow::Result<()> {
        let mut random = StdRng::seed_from_u64(self.seed);
        let mut stream = self.open().await?;
        let first = stream.next_offset();
        while !self.stop.load(Ordering::Relaxed) || stream.next_offset() < first + RECORDS_MIN {
            self.send(&mut stream, random.random_range(1..=SEND_ROWS_MAX)).await?;
            let longest = if random.random_bool(0.2) { 600 } else { 100 };
            tokio::time::sleep(Duration::from_millis(random.random_range(0..longest))).await;
        }
        let sent = stream.next_offset();
        let summary = stream.finish().await?;
        self.stream.look();
        let mut notes = self.stream.notes();
        if summary.committed.map_or(0, |offset| offset + 1) < sent {
            notes.faults.push(format!("finished at {:?} with {sent} records sent", summary.committed));
        }
        notes.is_finished = true;
        Ok(())
    }

    async fn open(&self) -> anyhow::Result<Stream> {
        let name = format!("sim-{}", self.stream.number);
        let patience = RetryPolicy {
            give_up_after: GIVE_UP_AFTER,
            give_up_opening_after: GIVE_UP_AFTER,
            ..RetryPolicy::default()
        };
        let builder = self.client.stream(self.stream.table()).name(name).retry(patience);
        let builder = match self.stream.encoding() {
            Encoding::Arrow => builder.schema(schema()),
            encoding => builder.encoding(encoding),
        };
        let stream = builder.open().await?;
        let progress = stream.progress();
        let id = progress.stream_id().context("an open stream has an id")?;
        let mut notes = self.stream.notes();
        let (next, sent) = (stream.next_offset(), notes.history.sent.len() as u64);
        if next < notes.history.durable_next {
            let durable = notes.history.durable_next;
            notes.faults.push(format!("goes on at {next}, and {durable} records were said to be durable"));
        }
        ensure!(next <= sent, "goes on at {next}, and {sent} records were sent");
        if notes.history.stream.is_empty() {
            notes.history.stream = id;
        } else if notes.history.stream != id {
            let before = notes.history.stream.clone();
            notes.faults.push(format!("is {id} now, and was {before}"));
        }
        notes.watched.push(progress);
        drop(notes);
        Ok(stream)
    }

    async fn send(&self, stream: &mut Stream, rows: usize) -> anyhow::Result<()> {
        let first = stream.next_offset();
        self.stream.sending(first, rows)?;
        let offsets = match self.stream.encoding() {
            Encoding::Arrow => stream.send_batch(self.stream.batch(first, rows)?).await?,
            _ => stream.send_ndjson(self.stream.lines(first, rows)).await?,
        };
        ensure!((offsets.start, offsets.end) == (first, first + rows as u64), "offsets {offsets:?}");
        Ok(())
    }
}
