//! `sluice send`: streams a file or standard input into a table.
//!
//! *Owns*: which records go to which stream, resuming an interrupted file, the summary, the exit code.
//! *Does not own*: reading (`input`), taking apart by value (`split`), showing (`display`), sending (`sluice_client`).

mod input;
mod json;
mod csv;
mod piece;
mod split;
mod display;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use arrow::array::RecordBatch;
use arrow::compute::concat_batches;
use arrow::datatypes::SchemaRef;
use futures_util::future::try_join_all;
use serde_json::Value;
use sluice_client::{Client, Encoding, Progress, Stream, Summary, UnknownFields};
use sluice_shared::ids::TableName;
use sluice_shared::table::described_columns;
use tokio::runtime::Handle;
use tokio::sync::mpsc;

use crate::auth::{AuthArgs, TlsArgs};
use crate::{http, print};
use display::{Counts, Refusal};
use input::{Format, Input, Wanted};
use piece::{Payload, Piece, Places};

/// Pieces that are read ahead.
const PIECES_AHEAD: usize = 4;
/// Streams that one run may open: each has a connection.
const STREAMS_MAX: usize = 1000;

/// Streams a file or standard input into a table.
///
/// A named stream makes loading a file resumable: what the stream already holds is skipped, so the same command
/// can be repeated after any failure, and no record is in the table twice. Standard input is appended.
///
/// The exit status is 0 where all records are in, 1 where some were rejected (the others are in), 2 after an error.
#[derive(clap::Args)]
pub(crate) struct SendArgs {
    /// The table: `catalog.schema.table`; missing parts come from `main.default`.
    table: String,
    /// What to send; `-` or nothing is standard input.
    file: Option<PathBuf>,
    /// The gateway, as `ws://HOST:PORT`, `wss://HOST:PORT` or `quic://HOST:PORT`; several, joined by commas, are tried in turn.
    #[arg(long, default_value = "ws://127.0.0.1:7070")]
    url: String,
    #[command(flatten)]
    tls: TlsArgs,
    #[command(flatten)]
    auth: AuthArgs,
    /// How the input is written; by its content or extension unless given.
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

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
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
    progress: Progress,
    label: String,
    /// Where the records that are not durable yet stand in the input.
    places: Arc<Mutex<Places>>,
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
    encoding: Encoding,
    /// The input and what is counted in it, for messages: `trips.csv line`.
    source: String,
    counts: Arc<Counts>,
    lanes: HashMap<String, Lane>,
    skipped: u64,
}

/// Sends everything, prints the summary; the exit code tells whether a record was rejected.
pub(crate) async fn run(mut args: SendArgs) -> Result<ExitCode> {
    args.file = args.file.take().filter(|file| file.as_path() != Path::new("-"));
    let table: TableName = args.table.parse()?;
    let client = args.tls.give(args.auth.give(Client::connect(&args.url).await?))?;
    let (input, pieces) = read_ahead(&args, &table, &client).await?;
    // Whether any of the gateways answers, before a stream waits for one with patience. Where QUIC is open HTTP need
    // not be.
    let is_quic = http::are_all_quic(&args.url);
    if !is_quic {
        http::get_from_any(&args.url, "/healthz", &client).await?;
    }
    let counts = Arc::new(Counts::default());
    let (is_quiet, wait, urls, asking) = (args.quiet, args.wait, args.url.clone(), client.clone());
    let Input { schema, encoding, unit, .. } = input;
    let source =
        args.file.as_ref().map_or_else(|| "standard input".to_owned(), |file| file.display().to_string());
    let source = format!("{source}, {unit}");
    let lanes = HashMap::new();
    let sender =
        Sender { args, client, schema, encoding, source, counts: Arc::clone(&counts), lanes, skipped: 0 };
    let shown = display::show(Arc::clone(&counts));
    let (summaries, skipped) = tokio::select! {
        biased; // what is done is done, whatever there is to show
        outcome = Box::pin(sender.send_all(pieces)) => outcome.with_context(|| format!("sending to {table}"))?,
        () = shown, if !is_quiet => unreachable!("it shows until it is dropped"),
    };
    if counts.records() + skipped == 0 && is_quic {
        print::answer("no records")?;
        return Ok(ExitCode::SUCCESS);
    }
    if counts.records() + skipped == 0 {
        let made = columns_of(&urls, &table, &asking).await?.is_some();
        let what = if made { "is as it was" } else { "does not exist and was not made" };
        print::answer(format_args!("no records: table {table} {what}"))?;
        return Ok(ExitCode::SUCCESS);
    }
    report(&counts, &summaries, skipped, wait)
}

type Pieces = mpsc::Receiver<Result<Piece>>;

/// Opens the input and reads it on a thread of its own, a few pieces ahead. The pieces are taken out of the input.
async fn read_ahead(args: &SendArgs, table: &TableName, client: &Client) -> Result<(Input, Pieces)> {
    let (urls, table, runtime) = (args.url.clone(), table.clone(), Handle::current());
    let client = client.clone();
    let ignore_unknown = args.unknown == Unknown::Ignore;
    let table = move || {
        let schema = runtime.block_on(columns_of(&urls, &table, &client))?;
        Ok(csv::Table { schema, ignore_unknown })
    };
    let wanted = Wanted { format: args.format, batch_rows: args.batch_rows as usize, table: Box::new(table) };
    let file = args.file.clone();
    let opened = tokio::task::spawn_blocking(move || input::open(file, wanted)).await;
    let mut input = opened.context("the reading thread")??;
    let pieces = std::mem::replace(&mut input.pieces, Box::new(std::iter::empty()));
    let (sender, receiver) = mpsc::channel(PIECES_AHEAD);
    tokio::task::spawn_blocking(move || {
        for piece in pieces {
            let is_last = piece.is_err();
            if sender.blocking_send(piece).is_err() || is_last {
                return;
            }
        }
    });
    Ok((input, receiver))
}

/// The columns of the table; None where it does not exist.
async fn columns_of(urls: &str, table: &TableName, client: &Client) -> Result<Option<SchemaRef>> {
    let path = format!("/v1/tables/{table}");
    let answer = http::get_from_any(urls, &path, client).await?;
    match answer.status {
        200 => described_columns(&answer.body).context("the table's description has no columns").map(Some),
        404 => Ok(None),
        status => {
            let body: Value = serde_json::from_slice(&answer.body).unwrap_or_default();
            let why = body["error"]["message"].as_str().unwrap_or("no reason given");
            bail!("GET {path} was answered with status {status}: {why}");
        }
    }
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
        let Some(column) = self.args.stream_by.clone() else {
            return self.send_to(String::new(), piece).await;
        };
        for (value, piece) in split::split(piece, &column)? {
            self.send_to(value, piece).await?;
        }
        Ok(())
    }

    async fn send_to(&mut self, value: String, piece: Piece) -> Result<()> {
        self.open(&value).await?;
        let batch_rows = self.args.batch_rows as usize;
        let lane = self.lanes.get_mut(&value).context("the lane just opened")?;
        let skipped = lane.skip.min(piece.places.len() as u64);
        lane.skip -= skipped;
        self.skipped += skipped;
        let piece = piece.without_first(skipped);
        lane.note_places(&piece.places);
        match piece.payload {
            Payload::Json(text) => {
                let bytes = text.len() as u64;
                let range = lane.stream.send_ndjson(text).await.with_context(|| lane.label.clone())?;
                self.counts.add(range.count(), bytes);
                Ok(())
            }
            Payload::Batch(rows) => {
                lane.waiting_rows += rows.num_rows();
                lane.waiting.push(rows);
                if lane.waiting_rows >= batch_rows { lane.flush(&self.counts).await } else { Ok(()) }
            }
        }
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
        let places: Arc<Mutex<Places>> = Arc::default();
        let (counts, of, source) = (Arc::clone(&self.counts), label.clone(), self.source.clone());
        let known = Arc::clone(&places);
        let mut builder = self.client.stream(&self.args.table).unknown_fields(unknown);
        builder = builder.give_up_after(Duration::from_secs(self.args.give_up_after));
        builder = builder.on_rejected(move |rejected| {
            let place = known.lock().unwrap_or_else(PoisonError::into_inner).of(rejected.offset);
            let place = match place {
                Some(place) => format!("{source} {place}"),
                None => format!("{of}, offset {}", rejected.offset),
            };
            counts.reject(Refusal { place, rejected });
        });
        if let Some(schema) = &self.schema {
            builder = builder.schema(Arc::clone(schema));
        }
        builder = builder.encoding(self.encoding);
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
        let progress = stream.progress();
        self.counts.add_stream(stream.next_offset(), progress.clone());
        Ok(Lane { stream, progress, label, places, skip, waiting: Vec::new(), waiting_rows: 0 })
    }
}

impl Lane {
    /// Notes where the records stand that are about to be sent. Records that are durable will not be rejected.
    fn note_places(&self, of_records: &[u64]) {
        let mut places = self.places.lock().unwrap_or_else(PoisonError::into_inner);
        let next = self.stream.next_offset() + self.waiting_rows as u64;
        (next..).zip(of_records).for_each(|(offset, place)| places.add(offset, *place));
        places.forget_before(self.progress.durable().map_or(0, |offset| offset + 1));
    }

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
    rejects.first.iter().for_each(print::note);
    let more = rejects.count - rejects.first.len() as u64;
    if more > 0 {
        print::note(format_args!("rejected: and {more} more"));
    }
    print::answer(summary_line(counts.records(), rejects.count, skipped, summaries, wait))?;
    Ok(if rejects.count > 0 { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn summary_line(sent: u64, rejected: u64, skipped: u64, summaries: &[Summary], wait: Wait) -> String {
    let accepted = sent - rejected.min(sent);
    let version = summaries.iter().filter_map(|summary| summary.version).max();
    let mut line = match (wait, version) {
        (Wait::Durable, _) => format!("sent {sent} records: {accepted} durable"),
        (Wait::Committed, Some(version)) => {
            format!("sent {sent} records: {accepted} in the table (version {version})")
        }
        (Wait::Committed, None) => format!("sent {sent} records: {accepted} in the table"),
    };
    line.push_str(&format!(", {rejected} rejected"));
    let unconfirmed: u64 = summaries.iter().map(|summary| summary.unconfirmed).sum();
    if skipped > 0 {
        line.push_str(&format!(", {skipped} were there before"));
    }
    if unconfirmed > 0 {
        line.push_str(&format!(", commit of {unconfirmed} not confirmed since a gateway was lost"));
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
            "sent 336776 records: 336764 in the table (version 17), 12 rejected"
        );
        assert_eq!(
            summary_line(5, 0, 3, &[of(None, 2)], Wait::Durable),
            "sent 5 records: 5 durable, 0 rejected, 3 were there before, commit of 2 not confirmed since a gateway was lost"
        );
    }
}
