//! Producers of all kinds, which go on whatever happens: named ones, some of which vanish and come back by their name, and
//! ephemeral ones, whose streams end with their connections.
//!
//! *Owns*: what is sent, the notes of what was sent and told.
//! *Does not own*: what happens to the service meanwhile (`chaos`), what is made of the notes (`auditor`).

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use bytes::{Bytes, BytesMut};
use futures_util::{SinkExt, StreamExt};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde_json::Value;
use sluice_client::{Client, Encoding, Progress, RetryPolicy, Stream};
use sluice_shared::error::ErrorKind;
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep, timeout};
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::{MaybeTlsStream, WebSocketStream, connect_async};

use crate::history::Notebook;
use crate::workload::{self, Shape};

/// Between two sends, at most.
const PAUSE_MS_MAX: u64 = 70;
/// A producer that vanishes does so within this.
const LIFE_MS_MAX: u64 = 6_000;
/// Longer than anything that is done to the pool, shorter than anybody's patience.
const GIVE_UP_AFTER: Duration = Duration::from_secs(120);
/// Between two tries, so that streams do not rest for longer than what is done to them.
const WAIT_MAX: Duration = Duration::from_secs(1);
/// How long a connection may take to be one, and to answer.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Between two tries to connect.
const CONNECT_PAUSE: Duration = Duration::from_millis(150);
/// A record that fits no table with a numeric `customer_id`.
const BAD_RECORD: &[u8] = b"{\"customer_id\":\"none\"}\n";
/// Stands for its hash, which no table has.
const BAD_HASH: u64 = 0;

/// How a producer sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A named stream, to the end.
    Named(Encoding),
    /// One that goes away now and then, without a word, and asks for its stream again.
    Vanishing(Encoding),
    /// One stream a connection, of JSON texts, some of which end without a word.
    Ephemeral,
}

/// One producer.
pub(crate) struct Producer {
    pub(crate) number: usize,
    pub(crate) table: String,
    pub(crate) kind: Kind,
    /// Gateways, joined by commas.
    pub(crate) urls: String,
    /// Records of one send, at most.
    pub(crate) rows_max: usize,
    /// Its notes go into files in this directory.
    pub(crate) history: PathBuf,
    pub(crate) seed: u64,
    pub(crate) stop: Arc<AtomicBool>,
}

/// What became of it.
#[derive(Debug, Default)]
pub(crate) struct Told {
    /// Of each of its streams.
    pub(crate) notes: Vec<Notebook>,
    /// Connections that were lost.
    pub(crate) lost: u64,
    /// How often it went away without a word.
    pub(crate) vanished: u64,
    /// How often it was fenced, though nobody else had its name: by a try of its own to connect that came late.
    pub(crate) fenced: u64,
    /// Records that fit no table.
    pub(crate) bad: u64,
    /// Why it ended before it was told to.
    pub(crate) failure: Option<String>,
}

type Socket = WebSocketStream<MaybeTlsStream<TcpStream>>;

/// A producer at work.
struct Work {
    producer: Producer,
    random: StdRng,
    told: Told,
}

impl Producer {
    /// Sends until it is told to stop, and waits until all of it is in the table, or for `patience`.
    pub(crate) async fn run(self, patience: Duration) -> Told {
        let label = format!("stream {} ({:?}) into {}", self.number, self.kind, self.table);
        let random = StdRng::seed_from_u64(self.seed);
        let mut work = Work { random, told: Told::default(), producer: self };
        let ran = match work.producer.kind {
            Kind::Named(encoding) => work.named(encoding, false, patience).await,
            Kind::Vanishing(encoding) => work.named(encoding, true, patience).await,
            Kind::Ephemeral => work.ephemeral(patience).await,
        };
        if let Err(error) = ran {
            work.told.failure = Some(format!("{label}: {error:#}"));
        }
        work.told
    }
}

impl Work {
    fn is_over(&self) -> bool {
        self.producer.stop.load(Ordering::Relaxed)
    }

    fn pause(&mut self) -> Duration {
        Duration::from_millis(self.random.random_range(0..PAUSE_MS_MAX))
    }

    /// Begins the notes of one more stream.
    fn begin_notes(&mut self) -> anyhow::Result<&mut Notebook> {
        let name = format!("{}-{}.notes", self.producer.number, self.told.notes.len());
        self.told.notes.push(Notebook::begin(&self.producer.history.join(name))?);
        self.told.notes.last_mut().context("just begun")
    }

    async fn named(&mut self, encoding: Encoding, vanishes: bool, patience: Duration) -> anyhow::Result<()> {
        self.begin_notes()?;
        let client = Client::connect(&self.producer.urls).await?;
        loop {
            let mut stream = match self.open(&client, encoding).await.context("open") {
                Err(error) if is_fenced(&error) => {
                    self.told.fenced += 1;
                    continue;
                }
                opened => opened?,
            };
            let progress = stream.progress();
            self.resume(&progress, stream.next_offset())?;
            let life = Duration::from_millis(self.random.random_range(300..LIFE_MS_MAX));
            let until = Instant::now() + life;
            let mut sent = Ok(());
            while sent.is_ok() && !(self.is_over() || vanishes && Instant::now() > until) {
                sent = self.send(&mut stream, encoding).await;
                note(&progress, &mut stream, &mut self.told.notes[0])?;
                sleep(self.pause()).await;
            }
            let is_over = sent.is_ok() && self.is_over();
            if is_over {
                let finished = timeout(patience, self.finish(&mut stream, &progress)).await;
                sent = finished.context("its records have not come into the table in time")?;
            }
            note(&progress, &mut stream, &mut self.told.notes[0])?;
            self.told.lost += progress.reconnects();
            match sent {
                Ok(()) if is_over => return Ok(()),
                Ok(()) => self.told.vanished += 1,
                Err(error) if is_fenced(&error) => self.told.fenced += 1,
                Err(error) => return Err(error),
            }
            drop(stream);
            sleep(self.pause() * 10).await;
        }
    }

    async fn open(&self, client: &Client, encoding: Encoding) -> anyhow::Result<Stream> {
        let patience = RetryPolicy {
            give_up_after: GIVE_UP_AFTER,
            give_up_opening_after: GIVE_UP_AFTER,
            wait_max: WAIT_MAX,
            ..RetryPolicy::default()
        };
        let builder = client.stream(&self.producer.table).retry(patience);
        let builder = builder.name(format!("chaos-{}", self.producer.number));
        let builder = match encoding {
            Encoding::Arrow => builder.schema(Shape::ServiceEvent.schema()),
            encoding => builder.encoding(encoding),
        };
        Ok(builder.open().await?)
    }

    /// What the stream has, it keeps; what it has not, was never sent.
    fn resume(&mut self, progress: &Progress, next: u64) -> anyhow::Result<()> {
        let notes = &mut self.told.notes[0];
        let id = progress.stream_id().context("an open stream has an id")?;
        ensure!(notes.stream.is_empty() || notes.stream == id, "{} has become {id}", notes.stream);
        notes.stream(&id)?;
        let (durable, sent) = (notes.durable_next, notes.sent.len() as u64);
        ensure!(durable <= next && next <= sent, "resumed at {next}: {durable} are durable, {sent} sent");
        unheard(notes)?;
        notes.resumed(next)
    }

    async fn send(&mut self, stream: &mut Stream, encoding: Encoding) -> anyhow::Result<()> {
        let first = self.told.notes[0].sent.len() as u64;
        let offsets = if encoding == Encoding::Arrow {
            let rows = self.random.random_range(1..=self.producer.rows_max);
            let batch = Shape::ServiceEvent.batch(first, rows, &mut self.random);
            self.told.notes[0].sent(&workload::row_hashes(&batch)?)?;
            stream.send_batch(batch).await?
        } else {
            let text = self.lines(0)?;
            stream.send_ndjson(text).await?
        };
        let expected = (first, self.told.notes[0].sent.len() as u64);
        ensure!((offsets.start, offsets.end) == expected, "offsets {offsets:?}, expected {expected:?}");
        Ok(())
    }

    /// Records, noted in the `of`-th notes, some with one among them that is refused.
    fn lines(&mut self, of: usize) -> anyhow::Result<Bytes> {
        let rows = self.random.random_range(1..=self.producer.rows_max);
        let notes = &mut self.told.notes[of];
        let batch = Shape::ServiceEvent.batch(notes.sent.len() as u64, rows, &mut self.random);
        notes.sent(&workload::row_hashes(&batch)?)?;
        let text = workload::json_lines(&batch)?;
        if !self.random.random_bool(0.1) {
            return Ok(text);
        }
        notes.sent(&[BAD_HASH])?;
        self.told.bad += 1;
        let mut longer = BytesMut::from(&text[..]);
        longer.extend_from_slice(BAD_RECORD);
        Ok(longer.freeze())
    }

    async fn finish(&mut self, stream: &mut Stream, progress: &Progress) -> anyhow::Result<()> {
        stream.durable().await?;
        note(progress, stream, &mut self.told.notes[0])?;
        stream.committed().await?;
        note(progress, stream, &mut self.told.notes[0])
    }

    async fn ephemeral(&mut self, patience: Duration) -> anyhow::Result<()> {
        while !self.is_over() {
            let urls: Vec<String> = self.producer.urls.split(',').map(str::to_owned).collect();
            let url = &urls[self.random.random_range(0..urls.len())];
            let path = format!("{url}/v1/tables/{}/stream", self.producer.table);
            match timeout(CONNECT_TIMEOUT, connect(&path)).await {
                Ok(Ok((socket, stream))) => {
                    self.begin_notes()?.stream(&stream)?;
                    self.life(socket, patience).await?;
                }
                _ => sleep(CONNECT_PAUSE).await,
            }
        }
        Ok(())
    }

    /// One stream, until it or its connection ends.
    async fn life(&mut self, mut socket: Socket, patience: Duration) -> anyhow::Result<()> {
        let of = self.told.notes.len() - 1;
        let vanishes = self.random.random_bool(0.5);
        let until = Instant::now() + Duration::from_millis(self.random.random_range(200..LIFE_MS_MAX));
        let mut next_send = Instant::now();
        loop {
            let is_last = self.is_over() || Instant::now() > until;
            if is_last {
                break;
            }
            let heard = tokio::select! {
                biased; // answers first: they are what is noted
                heard = socket.next() => Some(heard),
                () = tokio::time::sleep_until(next_send) => None,
            };
            let is_alive = match heard {
                Some(heard) => hear(heard, &mut self.told.notes[of])?,
                None => {
                    next_send = Instant::now() + self.pause();
                    let text = self.lines(of)?;
                    socket.send(Message::text(String::from_utf8_lossy(&text).into_owned())).await.is_ok()
                }
            };
            if !is_alive {
                self.told.lost += 1;
                return unheard(&mut self.told.notes[of]);
            }
        }
        if vanishes && !self.is_over() {
            self.told.vanished += 1;
        } else {
            let settled = timeout(patience, settle(&mut socket, &mut self.told.notes[of])).await;
            let is_durable = settled.context("an ephemeral stream's records were not acked in time")??;
            self.told.lost += u64::from(!is_durable);
        }
        unheard(&mut self.told.notes[of])
    }
}

fn is_fenced(error: &anyhow::Error) -> bool {
    let error = error.downcast_ref::<sluice_client::Error>();
    error.is_some_and(|error| error.kind() == ErrorKind::Fenced)
}

async fn connect(path: &str) -> anyhow::Result<(Socket, String)> {
    let (mut socket, _) = connect_async(path).await?;
    let opened = socket.next().await.context("closed")??;
    let opened: Value = serde_json::from_str(opened.to_text()?)?;
    let stream = opened["stream"].as_str().with_context(|| format!("no stream in {opened}"))?.to_owned();
    Ok((socket, stream))
}

/// Notes an answer. Whether the stream goes on.
fn hear(
    heard: Option<Result<Message, tokio_tungstenite::tungstenite::Error>>,
    notes: &mut Notebook,
) -> anyhow::Result<bool> {
    let Some(Ok(message)) = heard else { return Ok(false) };
    let Message::Text(text) = message else { return Ok(!message.is_close()) };
    let answer: Value = serde_json::from_str(&text)?;
    let next = |key: &str| answer[key].as_u64().map(|offset| offset + 1);
    if let Some(next) = next("durable") {
        let sent = notes.sent.len() as u64;
        ensure!(next <= sent, "stream {}: acked up to {next}, of {sent} that were sent", notes.stream);
        notes.durable(next)?;
    }
    if let Some(next) = next("committed") {
        notes.committed(next, answer["version"].as_u64().unwrap_or(0))?;
    }
    if let Some(offset) = answer["rejected"]["offset"].as_u64() {
        notes.rejected(offset)?;
    }
    let Some(error) = answer.get("error") else { return Ok(true) };
    if error["retryable"] == false {
        bail!("stream {}: {error}", notes.stream);
    }
    Ok(false)
}

/// Waits until all is durable. Whether it is: the connection may be lost before.
async fn settle(socket: &mut Socket, notes: &mut Notebook) -> anyhow::Result<bool> {
    while notes.durable_next < notes.sent.len() as u64 {
        if !hear(socket.next().await, notes)? {
            return Ok(false);
        }
    }
    let _ = socket.close(None).await; // whether that is heard is of no interest
    Ok(true)
}

/// Whoever has gone was not told of refusals that were not acked yet.
fn unheard(notes: &mut Notebook) -> anyhow::Result<()> {
    let bad = |offset: &u64| notes.sent.get(*offset as usize) == Some(&BAD_HASH);
    let unheard: Vec<u64> = (notes.durable_next..notes.sent.len() as u64).filter(bad).collect();
    unheard.into_iter().try_for_each(|offset| notes.rejected(offset))
}

/// Notes what the service has said so far.
fn note(progress: &Progress, stream: &mut Stream, notes: &mut Notebook) -> anyhow::Result<()> {
    notes.durable(progress.durable().map_or(0, |offset| offset + 1))?;
    if let Some(committed) = progress.committed() {
        notes.committed(committed.offset + 1, committed.version.unwrap_or(0))?;
    }
    stream.rejected().into_iter().try_for_each(|rejected| notes.rejected(rejected.offset))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_that_is_resumed_keeps_what_it_has() {
        let dir = tempfile::tempdir().expect("a directory");
        let mut notes = Notebook::begin(&dir.path().join("1.notes")).expect("begun");
        notes.sent(&[1, 2, BAD_HASH, 4, BAD_HASH]).expect("noted");
        notes.durable(2).expect("noted");
        unheard(&mut notes).expect("noted");
        notes.resumed(4).expect("noted");
        assert_eq!(notes.sent, [1, 2, BAD_HASH, 4]);
        assert_eq!(notes.rejected.iter().copied().collect::<Vec<_>>(), [2], "nobody was there to be told");
    }
}
