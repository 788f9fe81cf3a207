//! `sluice send`: streams a file or standard input into a table.
//!
//! *Owns*: which records go to which stream, resuming an interrupted file, the summary, the exit code.
//! *Does not own*: reading (`input`), taking apart by value (`split`), showing (`display`), sending (`sluice_client`).

mod input;
mod split;
mod display;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use arrow::array::RecordBatch;
use arrow::compute::concat_batches;
use arrow::datatypes::SchemaRef;
use bytes::Bytes;
use futures_util::future::try_join_all;
use sluice_client::{Client, Encoding, Stream, Summary, UnknownFields};
use sluice_shared::ids::TableName;
use tokio::sync::mpsc;

use crate::{http, print};
use display::Counts;
use input::{Format, Input, Piece};

/// Pieces that are read ahead.
const PIECES_AHEAD: usize = 4;
/// Streams that one run may open: each has a connection.
const STREAMS_MAX: usize = 1000;

/// Streams a file or standard input into a table.
///
/// A named stream makes loading a file resumable: what the stream already holds is skipped, so the same command
/// can be repeated after any failure, and no record is in the table twice. Standard input is appended.
#[derive(clap::Args)]
pub(crate) struct SendArgs {
    /// The table: `catalog.schema.table`; missing parts come from `main.default`.
    table: String,
    /// What to send; `-` or nothing is standard input.
    file: Option<PathBuf>,
    /// The gateway; several, joined by commas, are tried in turn.
    #[arg(long, default_value = "ws://127.0.0.1:7070")]
    url: String,
    /// How the input is written; by its extension or content unless given.
    #[arg(long)]
    format: Option<Format>,
    /// Name of the stream, which makes it resumable.
    #[arg(long)]
    name: Option<String>,
    /// One stream for each value of this column, named `NAME-VALUE` (NAME is the table's unless given).
    #[arg(long, value_name = "COLUMN")]
    stream_by: Option<String>,
    /// Rows in an Arrow frame.
    #[arg(long, default_value_t = 8192, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    batch_rows: u32,
    /// Fields that the table does not have.
    #[arg(long, value_enum, default_value_t = Unknown::Refuse)]
    unknown: Unknown,
    /// What to wait for at the end.
    #[arg(long, value_enum, default_value_t = Wait::Committed)]
    wait: Wait,
    /// Seconds to go on trying to reach a gateway after a lost connection, as long as nothing moves.
    #[arg(long, value_name = "SECONDS", default_value_t = 300)]
    give_up_after: u64,
    /// Show no progress.
    #[arg(long)]
    quiet: bool,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum Unknown {
    /// Reject the record.
    Refuse,
    /// Drop the field.
    Ignore,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Wait {
    /// All is on stable storage.
    Durable,
    /// All can be read in the table.
    Committed,
}

/// One stream of the run.
struct Lane {
    stream: Stream,
    label: String,
    /// Records at the beginning of the input that the stream already holds.
    skip: u64,
    /// Rows that wait for a full frame.
    waiting: Vec<RecordBatch>,
    waiting_rows: usize,
}

struct Sender {
    args: SendArgs,
    client: Client,
    schema: Option<SchemaRef>,
    counts: Arc<Counts>,
    lanes: HashMap<String, Lane>,
    skipped: u64,
}

/// Sends everything, prints the summary; the exit code tells whether a record was rejected.
pub(crate) async fn run(mut args: SendArgs) -> Result<ExitCode> {
    args.file = args.file.take().filter(|file| file.as_path() != Path::new("-"));
    let table: TableName = args.table.parse()?;
    let client = Client::connect(&args.url).await?;
    let input = read_ahead(&args).await?;
    reach(&args.url).await?;
    let counts = Arc::new(Counts::default());
    let (is_quiet, wait) = (args.quiet, args.wait);
    let (schema, pieces) = input;
    let lanes = HashMap::new();
    let sender = Sender { args, client, schema, counts: Arc::clone(&counts), lanes, skipped: 0 };
    let shown = display::show(Arc::clone(&counts));
    let (summaries, skipped) = tokio::select! {
        biased; // what is done is done, whatever there is to show
        outcome = Box::pin(sender.send_all(pieces)) => outcome.with_context(|| format!("sending to {table}"))?,
        () = shown, if !is_quiet => unreachable!("it shows until it is dropped"),
    };
    report(&counts, &summaries, skipped, wait)
}

type Pieces = mpsc::Receiver<Result<Piece>>;

/// Opens the input and reads it on a thread of its own, a few pieces ahead.
async fn read_ahead(args: &SendArgs) -> Result<(Option<SchemaRef>, Pieces)> {
    let (file, format, rows) = (args.file.clone(), args.format, args.batch_rows as usize);
    let opened = tokio::task::spawn_blocking(move || input::open(file, format, rows)).await;
    let Input { schema, pieces } = opened.context("the reading thread")??;
    let (sender, receiver) = mpsc::channel(PIECES_AHEAD);
    tokio::task::spawn_blocking(move || {
        for piece in pieces {
            let is_last = piece.is_err();
            if sender.blocking_send(piece).is_err() || is_last {
                return;
            }
        }
    });
    Ok((schema, receiver))
}

/// Whether any of the gateways answers, before a stream waits for one with patience.
async fn reach(urls: &str) -> Result<()> {
    let mut failure = None;
    for url in urls.split(',') {
        match http::get(url.trim(), "/healthz").await {
            Ok(_) => return Ok(()),
            Err(error) => failure = Some(error),
        }
    }
    failure.map_or(Ok(()), Err)
}

impl Sender {
    async fn send_all(mut self, mut pieces: Pieces) -> Result<(Vec<Summary>, u64)> {
        while let Some(piece) = pieces.recv().await {
            self.send(piece?).await?;
        }
        let is_durable_enough = self.args.wait == Wait::Durable;
        let mut ends = Vec::new();
        for (_, mut lane) in self.lanes.drain() {
            lane.flush(&self.counts).await?;
            ends.push(async move {
                let Lane { stream, label, .. } = lane;
                let summary =
                    if is_durable_enough { stream.finish_durable().await } else { stream.finish().await };
                summary.with_context(|| label)
            });
        }
        Ok((try_join_all(ends).await?, self.skipped))
    }

    async fn send(&mut self, piece: Piece) -> Result<()> {
        match (self.args.stream_by.clone(), piece) {
            (None, Piece::Json(lines)) => self.send_lines(String::new(), lines).await,
            (None, Piece::Batch(rows)) => self.send_rows(String::new(), rows).await,
            (Some(column), Piece::Json(lines)) => {
                for (value, lines) in split::split_lines(&lines, &column) {
                    self.send_lines(value, lines).await?;
                }
                Ok(())
            }
            (Some(column), Piece::Batch(rows)) => {
                for (value, rows) in split::split_batch(&rows, &column)? {
                    self.send_rows(value, rows).await?;
                }
                Ok(())
            }
        }
    }

    async fn send_lines(&mut self, value: String, lines: Bytes) -> Result<()> {
        self.open(&value).await?;
        let lane = self.lanes.get_mut(&value).context("the lane just opened")?;
        let (lines, skipped) = split::skip_lines(&lines, lane.skip);
        lane.skip -= skipped;
        self.skipped += skipped;
        let bytes = lines.len() as u64;
        let range = lane.stream.send_ndjson(lines).await.with_context(|| lane.label.clone())?;
        self.counts.add(range.count(), bytes);
        Ok(())
    }

    async fn send_rows(&mut self, value: String, rows: RecordBatch) -> Result<()> {
        self.open(&value).await?;
        let batch_rows = self.args.batch_rows as usize;
        let lane = self.lanes.get_mut(&value).context("the lane just opened")?;
        let skipped = usize::try_from(lane.skip).unwrap_or(usize::MAX).min(rows.num_rows());
        lane.skip -= skipped as u64;
        self.skipped += skipped as u64;
        let rows = rows.slice(skipped, rows.num_rows() - skipped);
        lane.waiting_rows += rows.num_rows();
        lane.waiting.push(rows);
        if lane.waiting_rows >= batch_rows { lane.flush(&self.counts).await } else { Ok(()) }
    }

    async fn open(&mut self, value: &str) -> Result<()> {
        if self.lanes.contains_key(value) {
            return Ok(());
        }
        if self.lanes.len() == STREAMS_MAX {
            bail!("--stream-by: more than {STREAMS_MAX} values; choose a column with fewer");
        }
        let prefix = || {
            let table = self.args.table.rsplit('.').next().unwrap_or_default();
            self.args.name.clone().unwrap_or_else(|| table.to_owned())
        };
        let name = match self.args.stream_by {
            Some(_) => Some(split::stream_name(&prefix(), value)),
            None => self.args.name.clone(),
        };
        let lane = self.open_lane(name).await?;
        self.lanes.insert(value.to_owned(), lane);
        Ok(())
    }

    async fn open_lane(&mut self, name: Option<String>) -> Result<Lane> {
        let label = name.as_ref().map_or_else(|| "the stream".to_owned(), |name| format!("stream {name}"));
        let unknown = match self.args.unknown {
            Unknown::Refuse => UnknownFields::Refuse,
            Unknown::Ignore => UnknownFields::Ignore,
        };
        let (counts, of) = (Arc::clone(&self.counts), label.clone());
        let mut builder = self.client.stream(&self.args.table).unknown_fields(unknown);
        builder = builder.give_up_after(Duration::from_secs(self.args.give_up_after));
        builder = builder.on_rejected(move |rejected| counts.reject(&of, rejected));
        builder = match &self.schema {
            Some(schema) => builder.schema(Arc::clone(schema)),
            None => builder.encoding(Encoding::Json),
        };
        if let Some(name) = &name {
            builder = builder.name(name);
        }
        let stream = Box::pin(builder.open()).await.with_context(|| label.clone())?;
        let skip = if self.args.file.is_some() { stream.next_offset() } else { 0 };
        if skip > 0 && !self.args.quiet {
            print::note(format_args!(
                "{label} already holds {skip} records: as many are skipped at the start of its input \
                 (to send them again, use another --name)"
            ));
        }
        self.counts.add_stream(stream.next_offset(), stream.progress());
        Ok(Lane { stream, label, skip, waiting: Vec::new(), waiting_rows: 0 })
    }
}

impl Lane {
    async fn flush(&mut self, counts: &Counts) -> Result<()> {
        let waiting = std::mem::take(&mut self.waiting);
        self.waiting_rows = 0;
        let Some(first) = waiting.first() else { return Ok(()) };
        let rows = concat_batches(&first.schema(), &waiting)?;
        let bytes = rows.get_array_memory_size() as u64;
        let range = self.stream.send_batch(rows).await.with_context(|| self.label.clone())?;
        counts.add(range.count(), bytes);
        Ok(())
    }
}

/// Prints what became of the records.
fn report(counts: &Counts, summaries: &[Summary], skipped: u64, wait: Wait) -> Result<ExitCode> {
    let rejects = counts.rejects();
    for (stream, rejected) in &rejects.first {
        let column = rejected.column.as_ref().map_or_else(String::new, |column| format!(", column {column}"));
        print::note(format_args!(
            "rejected: {stream}, offset {}{column}: {}",
            rejected.offset, rejected.message
        ));
    }
    let more = rejects.count - rejects.first.len() as u64;
    if more > 0 {
        print::note(format_args!("rejected: and {more} more"));
    }
    print::answer(summary_line(counts.records(), rejects.count, skipped, summaries, wait))?;
    Ok(if rejects.count > 0 { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn summary_line(sent: u64, rejected: u64, skipped: u64, summaries: &[Summary], wait: Wait) -> String {
    let mut line = format!("sent {sent} records, {rejected} rejected, {sent} durable");
    let unconfirmed: u64 = summaries.iter().map(|summary| summary.unconfirmed).sum();
    if skipped > 0 {
        line.push_str(&format!(", {skipped} were there before"));
    }
    if unconfirmed > 0 {
        line.push_str(&format!(", commit of {unconfirmed} not confirmed since a gateway was lost"));
    }
    let version = summaries.iter().filter_map(|summary| summary.version).max();
    match version.filter(|_| wait == Wait::Committed) {
        Some(version) => line.push_str(&format!(", committed in version {version}")),
        None if wait == Wait::Committed => line.push_str(", committed"),
        None => {}
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_summary_says_what_became_of_all() {
        let of = |version, unconfirmed| Summary { version, unconfirmed, ..Summary::default() };
        assert_eq!(
            summary_line(336_776, 12, 0, &[of(Some(16), 0), of(Some(17), 0)], Wait::Committed),
            "sent 336776 records, 12 rejected, 336776 durable, committed in version 17"
        );
        assert_eq!(
            summary_line(5, 0, 3, &[of(None, 2)], Wait::Durable),
            "sent 5 records, 0 rejected, 5 durable, 3 were there before, commit of 2 not confirmed since a gateway \
             was lost"
        );
    }
}
