//! One stream under load, whatever the service does to it: it sends when its source says so, or as soon after as there is
//! room, and comes back when it has lost its connection.
//!
//! *Owns*: the stream's life: opening, sending, hearing, resuming, the end.
//! *Does not own*: what is under way (`flight`), what is due (`source`), the protocols (`target`).

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use bytes::Bytes;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use sluice_shared::frame::Encoding;
use sluice_shared::lifecycle::TaskScope;
use tokio::sync::{Notify, Semaphore, mpsc, watch};
use tokio::time::{sleep, sleep_until, timeout};

use super::GRACE;
use super::flight::Flight;
use super::record::{Recorder, Sent};
use super::source::{Due, Source};
use super::target::{Answers, Ask, Opened, Outbound, Refused, Target};
use super::timer::Timer;
use crate::history::StreamHistory;

/// For a connection, and the answer to its opening.
const OPEN_TIMEOUT: Duration = Duration::from_secs(30);
/// Between two tries, at first and at most.
const RETRY_FIRST: Duration = Duration::from_millis(50);
const RETRY_MAX: Duration = Duration::from_secs(2);
/// A send that takes longer waits for its receiver.
const BLOCKED_AFTER: Duration = Duration::from_millis(1);

/// What the streams of one load have in common.
#[derive(Debug)]
pub(crate) struct Plan {
    /// Of the load, at the recorder.
    pub(crate) number: usize,
    /// Gateways, as `host:port`.
    pub(crate) addresses: Vec<String>,
    pub(crate) certificate: Option<PathBuf>,
    pub(crate) encoding: Encoding,
    pub(crate) schema: Bytes,
    /// Records of each message.
    pub(crate) rows: u32,
    /// Before the names of streams; None: streams have none, and are not resumed.
    pub(crate) names: Option<String>,
    /// Whether the protocol tells what is in the table.
    pub(crate) tells_commits: bool,
    /// A stream ends after about so long, and another takes its place.
    pub(crate) lasts: Option<Duration>,
    /// Of each message, its records' hashes, where an auditor is to judge.
    pub(crate) hashes: Option<Arc<[Vec<u64>]>>,
    /// Milliseconds to wait before each look at the answers.
    pub(crate) answer_delay_ms: AtomicU64,
}

/// A word to many streams at once: drop your connections and come back.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Kick {
    /// How many there have been.
    pub(crate) number: u64,
    /// Of the streams.
    pub(crate) share: f64,
    /// None: of all loads.
    pub(crate) load: Option<usize>,
}

/// What all streams of a run have in common.
pub(crate) struct Shared {
    pub(crate) recorder: Recorder,
    pub(crate) timer: Timer,
    /// Connections that may be made at the same time.
    pub(crate) connecting: Semaphore,
    /// When it begins, once that is known.
    pub(crate) began: watch::Receiver<Option<Instant>>,
    pub(crate) kicks: watch::Receiver<Kick>,
    /// How long records are due.
    pub(crate) lasts: Duration,
    /// All of them are due at once: it takes as long as it takes.
    pub(crate) is_backlog: bool,
    /// For streams that end while others take their place.
    pub(crate) scope: TaskScope,
    /// Notes of streams that have ended, by their tables.
    pub(crate) notes: Mutex<Vec<(String, StreamHistory)>>,
}

impl Shared {
    /// Since the beginning: whoever is not done by then gives up. As long as there are answers a backlog is waited for.
    fn gives_up_at(&self) -> Duration {
        let told_at = if self.is_backlog { self.recorder.told_at() } else { Duration::ZERO };
        self.lasts.max(told_at) + GRACE
    }

    /// Resolves then.
    async fn too_late(&self, began: Instant) {
        while began.elapsed() < self.gives_up_at() {
            sleep_until((began + self.gives_up_at()).into()).await;
        }
    }
}

/// A stream, and those that take its place.
pub(crate) struct StreamTask<T: Target> {
    pub(crate) target: Arc<T>,
    pub(crate) plan: Arc<Plan>,
    pub(crate) shared: Arc<Shared>,
    pub(crate) number: usize,
    /// In place of one that is made.
    pub(crate) name: Option<String>,
    pub(crate) table: String,
    pub(crate) source: Source,
    /// Since the beginning: when it opens; zero: before.
    pub(crate) opens: Duration,
    pub(crate) seed: u64,
    /// Ends with the last part of the run that this stream has.
    pub(crate) alive: mpsc::Sender<()>,
}

/// Why a session is over without an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Why {
    /// All is sent, and told.
    Over,
    /// It is another stream's turn.
    Rotate,
    /// The gateway wants to be left, and all is durable.
    Moved,
    /// The scenario wants it.
    Kicked,
    /// Nothing more is waited for.
    Late,
}

/// A stream's life, through all its connections.
struct Life {
    flight: Mutex<Flight>,
    /// Answers have come.
    heard: Notify,
    name: Option<String>,
    id: Option<String>,
    connections: u64,
    ends_at: Option<Duration>,
}

impl Life {
    fn flight(&self) -> MutexGuard<'_, Flight> {
        self.flight.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: Target> StreamTask<T> {
    /// Opens, tells `opened`, and does its part once it has begun.
    pub(crate) async fn run(mut self, opened: mpsc::Sender<anyhow::Result<()>>) {
        let mut random = StdRng::seed_from_u64(self.seed);
        let mut life = self.new_life(0, &mut random);
        let mut open = None;
        if self.opens.is_zero() {
            let first = self.open(&mut life).await;
            let told = match first {
                Ok(first) => {
                    open = Some(first);
                    Ok(())
                }
                Err(error) => Err(error),
            };
            // Whoever waits has gone only when the run was given up.
            let _ = opened.send(told).await;
        }
        drop(opened);
        let mut began = self.shared.began.clone();
        let Ok(began) = began.wait_for(Option::is_some).await.map(|began| *began) else { return };
        let Some(began) = began else { return };
        self.shared.timer.sleep_until(began + self.opens).await;
        self.live(began, life, open, &mut random).await;
    }

    fn new_life(&self, generation: u64, random: &mut StdRng) -> Life {
        let made = self.plan.names.as_ref().map(|prefix| format!("{prefix}-{}-{generation}", self.number));
        let name = self.name.clone().or(made);
        Life {
            flight: Mutex::new(Flight::new(self.plan.tells_commits, self.plan.hashes.is_some())),
            heard: Notify::new(),
            name,
            id: None,
            connections: 0,
            ends_at: self.plan.lasts.map(|lasts| lasts.mul_f64(random.random_range(0.5..1.5))),
        }
    }

    async fn live(
        &mut self,
        began: Instant,
        mut life: Life,
        mut open: Option<Opened<T>>,
        random: &mut StdRng,
    ) {
        let (mut generation, mut pause) = (0, RETRY_FIRST);
        life.ends_at = life.ends_at.map(|lasts| self.opens + lasts);
        loop {
            let mut connection = match open.take() {
                Some(open) => open,
                None => match self.reopen(began, &mut life, random).await {
                    Some(open) => open,
                    None => break,
                },
            };
            let durable_before = life.flight().durable_next;
            match Box::pin(self.session(began, &mut connection, &life)).await {
                Ok(Why::Over | Why::Late) => break,
                Ok(Why::Rotate) => {
                    generation += 1;
                    let mut next = self.new_life(generation, random);
                    next.ends_at = next.ends_at.map(|lasts| began.elapsed() + lasts);
                    self.leave(began, connection, std::mem::replace(&mut life, next));
                }
                Ok(Why::Moved) => self.lost(&mut life, None),
                Ok(Why::Kicked) => {
                    drop(connection);
                    self.lost(&mut life, None);
                }
                Err(error) => {
                    drop(connection);
                    let has_moved = life.flight().durable_next > durable_before;
                    self.lost(&mut life, Some(error));
                    // One that opens and comes to nothing is no better than one that does not open.
                    if has_moved {
                        pause = RETRY_FIRST;
                    } else {
                        sleep(pause.mul_f64(random.random_range(0.5..1.0))).await;
                        pause = (pause * 2).min(RETRY_MAX);
                    }
                }
            }
        }
        end(&self.shared, &self.plan, &self.table, &life);
        let (at, recorder, plan) = (began.elapsed(), &self.shared.recorder, &self.plan);
        self.source.rest(at, |unsent| recorder.unsent(plan.number, at, unsent, plan.tells_commits));
    }

    /// A connection is gone.
    fn lost(&self, life: &mut Life, error: Option<anyhow::Error>) {
        let recorder = &self.shared.recorder;
        // Anything else is a connection that is lost, which is counted when there is a new one.
        if let Some(error) = error.filter(|error| error.is::<Refused>()) {
            recorder.error(self.plan.number, format!("{error:#}"));
        }
        if life.name.is_some() {
            return;
        }
        let (lost, notes) = life.flight().begin_anew();
        let mut record = recorder.load(self.plan.number);
        record.counts.doubtful += lost.doubtful;
        record.counts.untold += lost.untold;
        drop(record);
        keep_notes(&self.shared, &self.table, notes, life.id.take());
    }

    /// Tries until it is open; None: it is too late.
    async fn reopen(&self, began: Instant, life: &mut Life, random: &mut StdRng) -> Option<Opened<T>> {
        let mut pause = RETRY_FIRST;
        while began.elapsed() < self.shared.gives_up_at() {
            match self.open(life).await {
                Ok(open) => {
                    if life.connections > 1 {
                        self.shared.recorder.load(self.plan.number).counts.reconnects += 1;
                    }
                    return Some(open);
                }
                Err(error) => self.shared.recorder.error(self.plan.number, format!("{error:#}")),
            }
            sleep(pause.mul_f64(random.random_range(0.5..1.0))).await;
            pause = (pause * 2).min(RETRY_MAX);
        }
        None
    }

    async fn open(&self, life: &mut Life) -> anyhow::Result<Opened<T>> {
        let Plan { addresses, certificate, encoding, schema, rows, tells_commits, .. } = &*self.plan;
        let _permit = self.shared.connecting.acquire().await?;
        let tried = usize::try_from(life.connections).unwrap_or(0);
        life.connections += 1;
        let address = addresses.get((self.number + tried) % addresses.len().max(1)).context("no gateway")?;
        let resume_at = life.id.is_some().then(|| life.flight().durable_next);
        let ask = Ask {
            address,
            certificate: certificate.as_deref(),
            table: &self.table,
            name: life.name.as_deref(),
            resume_at: resume_at.filter(|_| life.name.is_some()),
            encoding: *encoding,
            schema,
            rows: *rows,
            until_committed: *tells_commits,
        };
        let opening = Box::pin(timeout(OPEN_TIMEOUT, self.target.open(&ask)));
        let opened =
            opening.await.with_context(|| format!("opening at {address}: no answer in {OPEN_TIMEOUT:?}"))?;
        let opened = opened.with_context(|| format!("opening at {address}"))?;
        let mut covered = Vec::new();
        let began = *self.shared.began.borrow();
        life.flight().opened(opened.next_offset, opened.room, &mut covered)?;
        let at = began.map(|began| began.elapsed()).unwrap_or_default();
        self.shared.recorder.told(self.plan.number, at, covered.drain(..));
        self.shared.recorder.load(self.plan.number).counts.opened += 1;
        life.id = opened.stream.clone().or(life.id.take());
        Ok(opened)
    }

    /// Sends and hears until something ends it.
    async fn session(&mut self, began: Instant, open: &mut Opened<T>, life: &Life) -> anyhow::Result<Why> {
        let Opened { out, answers, .. } = open;
        let (shared, plan, number) = (Arc::clone(&self.shared), Arc::clone(&self.plan), self.number);
        tokio::select! {
            biased; // the scenario's word before all, and answers before sending: they make room
            () = kicked(shared.kicks.clone(), plan.number, number) => Ok(Why::Kicked),
            error = hear(&shared, &plan, began, answers, life) => Err(error),
            why = self.send(began, out, life) => why,
            () = shared.too_late(began) => Ok(Why::Late),
        }
    }

    async fn send(&mut self, began: Instant, out: &mut T::Out, life: &Life) -> anyhow::Result<Why> {
        send_again(out, life).await?;
        let mut blocked_until = began;
        loop {
            let now = began.elapsed();
            let due = match self.source.due(now) {
                Due::Never => {
                    finish(out, life).await?;
                    return Ok(Why::Over);
                }
                Due::Now => now,
                Due::At(due) => due,
            };
            if life.flight().moves {
                return self.moved(out, life).await;
            }
            let ends_at = life.ends_at.unwrap_or(Duration::MAX);
            if now >= ends_at {
                return Ok(Why::Rotate);
            }
            if due > now {
                out.flush().await?;
                tokio::select! {
                    biased; // what was heard may be that the stream is to move
                    () = life.heard.notified() => {}
                    () = self.shared.timer.sleep_until(began + due.min(ends_at)) => {}
                }
                continue;
            }
            if !life.flight().has_room(self.source.next_bytes()) {
                out.flush().await?;
                life.heard.notified().await;
                ensure!(!life.flight().has_ended, "closed before all was acked");
                let room_at = life.flight().room_at.unwrap_or(blocked_until);
                blocked_until = blocked_until.max(room_at);
                continue;
            }
            self.send_one(began, due, out, (life, &mut blocked_until)).await?;
        }
    }

    async fn send_one(
        &mut self,
        began: Instant,
        due: Duration,
        out: &mut T::Out,
        (life, blocked_until): (&Life, &mut Instant),
    ) -> anyhow::Result<()> {
        let taken = self.source.take(began.elapsed());
        let hashes = self.plan.hashes.as_ref().and_then(|all| all.get(taken.place)).map(Vec::as_slice);
        let message = taken.message;
        let before = Instant::now();
        let at = before.duration_since(began);
        let could = due.max(blocked_until.duration_since(began)).min(at);
        let sent = Sent { at, due, could, rows: u64::from(message.rows), bytes: message.bytes as u64 };
        let first = life.flight().push(due, &message, hashes);
        self.shared.recorder.sent(self.plan.number, sent);
        out.send(first, &message).await?;
        if before.elapsed() > BLOCKED_AFTER {
            *blocked_until = Instant::now();
        }
        Ok(())
    }

    /// The gateway wants to be left: once all is durable, and without a word more.
    async fn moved(&self, out: &mut T::Out, life: &Life) -> anyhow::Result<Why> {
        out.flush().await?;
        loop {
            if life.flight().undurable.is_empty() {
                return Ok(if life.name.is_some() { Why::Moved } else { Why::Rotate });
            }
            ensure!(!life.flight().has_ended, "closed before all was acked");
            life.heard.notified().await;
        }
    }

    /// Another stream takes the place of this one, which ends in its own time.
    fn leave(&self, began: Instant, mut open: Opened<T>, life: Life) {
        let (shared, plan, table) = (Arc::clone(&self.shared), Arc::clone(&self.plan), self.table.clone());
        let alive = self.alive.clone();
        self.shared.scope.spawn("stream's end", async move {
            let Opened { out, answers, .. } = &mut open;
            let ended = tokio::select! {
                biased; // answers are what the end waits for
                error = hear(&shared, &plan, began, answers, &life) => Err(error),
                ended = finish(out, &life) => ended,
                () = shared.too_late(began) => Ok(()),
            };
            if let Err(error) = ended {
                shared.recorder.error(plan.number, format!("ending: {error:#}"));
            }
            end(&shared, &plan, &table, &life);
            drop(alive);
        });
    }
}

/// What is left of a stream that is over.
fn end(shared: &Shared, plan: &Plan, table: &str, life: &Life) {
    let mut flight = life.flight();
    let at = shared.began.borrow().map(|began| began.elapsed()).unwrap_or_default();
    shared.recorder.untold(plan.number, at, flight.uncommitted());
    let dues = flight.undurable.iter().map(|one| one.due);
    shared.recorder.unacked(plan.number, at, dues, plan.tells_commits);
    let notes = flight.notes.take();
    drop(flight);
    keep_notes(shared, table, notes, life.id.clone());
}

fn keep_notes(shared: &Shared, table: &str, notes: Option<StreamHistory>, id: Option<String>) {
    if let (Some(mut notes), Some(id)) = (notes, id) {
        notes.stream = id;
        shared.notes.lock().unwrap_or_else(PoisonError::into_inner).push((table.to_owned(), notes));
    }
}

/// What was sent before, and is not durable.
async fn send_again(out: &mut impl Outbound, life: &Life) -> anyhow::Result<()> {
    let again: Vec<_> = life.flight().undurable.iter().cloned().collect();
    for one in again {
        out.send(one.end - u64::from(one.message.rows), &one.message).await?;
    }
    Ok(())
}

/// Says that there is no more, and waits until all is told.
async fn finish(out: &mut impl Outbound, life: &Life) -> anyhow::Result<()> {
    out.flush().await?;
    out.finish().await?;
    loop {
        let (is_over, has_ended, undurable) = {
            let flight = life.flight();
            (flight.is_over(), flight.has_ended, flight.undurable.len())
        };
        if is_over {
            return Ok(());
        }
        if has_ended {
            ensure!(undurable == 0, "closed before all was acked");
            return Ok(());
        }
        life.heard.notified().await;
    }
}

/// Takes answers in for as long as there are some; answers why there are no more.
async fn hear(
    shared: &Shared,
    plan: &Plan,
    began: Instant,
    answers: &mut impl Answers,
    life: &Life,
) -> anyhow::Error {
    let mut covered = Vec::new();
    loop {
        let delay_ms = plan.answer_delay_ms.load(Ordering::Relaxed);
        if delay_ms > 0 {
            sleep(Duration::from_millis(delay_ms)).await;
        }
        match answers.next().await {
            Ok(Some(told)) => {
                let heard_at = Instant::now();
                let news = {
                    let mut flight = life.flight();
                    let news = flight.answered(&told, &mut covered);
                    flight.room_at = Some(heard_at);
                    news
                };
                shared.recorder.told(plan.number, heard_at.duration_since(began), covered.drain(..));
                if news.rejected > 0 {
                    shared.recorder.load(plan.number).counts.rejected += news.rejected;
                }
                life.heard.notify_one();
            }
            // Whether that is too early is for the one to say who knows what was sent.
            Ok(None) => {
                life.flight().has_ended = true;
                life.heard.notify_one();
                std::future::pending::<()>().await;
            }
            Err(error) => return error,
        }
    }
}

/// Waits until the scenario wants this stream's connection dropped.
async fn kicked(mut kicks: watch::Receiver<Kick>, load: usize, stream: usize) {
    kicks.mark_unchanged();
    while kicks.changed().await.is_ok() {
        let kick = *kicks.borrow_and_update();
        let is_meant = kick.load.is_none_or(|meant| meant == load);
        // Another set of streams each time, the same for the same scenario.
        let mut random = StdRng::seed_from_u64(kick.number << 32 | stream as u64);
        if is_meant && random.random::<f64>() < kick.share {
            return;
        }
    }
    std::future::pending::<()>().await;
}
