//! The streams that exports go into: one a table and credential, open from export to export.
//!
//! An export is some frames and a wait for their ack. Were each a stream of its own, it would cost an open and an end
//! beside, and an entry in its table's watermark map; so a stream stays open until nothing has come for a while.
//!
//! *Owns*: which streams are open, which export an ack or a refusal belongs to.
//! *Does not own*: what a stream means (`session`), requests and answers (`otlp`).
//! Keeps P7: exports wait in a bounded queue while the stream's window is full.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use sluice_shared::error::{Error, ErrorKind};
use sluice_shared::frame::{Encoding, FinishWhen, GatewayFrame, Rejected};
use sluice_shared::ids::TableName;
use sluice_shared::table::TableSpec;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, sleep_until, timeout};

use super::Signal;
use super::flat::{Frame, schema, schema_message};
use crate::app::App;
use crate::session::{self, Edge, Ended, Input, Records, going_away};
use crate::upstream::OpenTerms;

/// Exports that may wait for a stream's window.
const EXPORTS_WAITING_MAX: usize = 64;
/// Longer than most exporters' intervals, so that a stream outlives the pause between two exports.
const IDLE: Duration = Duration::from_secs(90);
/// How long an export may wait for its place in the queue. Exporters give up after 10 s: before that they are told.
const QUEUE_TIMEOUT: Duration = Duration::from_secs(5);
/// How long the ack may take. Beyond what exporters wait nobody hears it.
const ACK_TIMEOUT: Duration = Duration::from_secs(30);
const BUSY_RETRY_AFTER: Duration = Duration::from_secs(1);
/// Streams of a gateway. Whoever may write can name tables, and makes each a stream that stays for a while.
const STREAMS_MAX: usize = 1000;
/// Streams that one export tries: each may end just then.
const TRIES: usize = 3;

/// What makes two exports go into one stream. A credential opens its own: one that is not good must not ride on another.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub(super) signal: Signal,
    pub(super) table: TableName,
    pub(super) credential: Option<Bytes>,
}

/// Records of an export that its pod refused: how many, and the first of them by its row.
#[derive(Debug, Default)]
pub(super) struct PodRefused {
    pub(super) count: u64,
    pub(super) first: Option<(u64, Rejected)>,
}

type Answer = Result<PodRefused, Error>;

/// The streams.
pub(super) struct Streams {
    app: Arc<App>,
    /// Held only to look and to put, never across a wait.
    open: Mutex<HashMap<Key, mpsc::Sender<Export>>>,
}

struct Export {
    frames: VecDeque<Frame>,
    answer: oneshot::Sender<Answer>,
}

impl Streams {
    pub(super) fn new(app: Arc<App>) -> Self {
        Self { app, open: Mutex::default() }
    }

    /// Sends frames, and waits until all of them are durable.
    ///
    /// # Errors
    /// What ended the stream; `Busy` where the queue stays full; `Unavailable` where no ack comes in time.
    pub(super) async fn export(self: &Arc<Self>, key: &Key, frames: Vec<Frame>) -> Answer {
        let (answer, answered) = oneshot::channel();
        let export = Export { frames: frames.into(), answer };
        for _ in 0..TRIES {
            let stream = self.stream(key)?;
            match timeout(QUEUE_TIMEOUT, stream.reserve()).await {
                Ok(Ok(place)) => {
                    place.send(export);
                    return wait(key, answered).await;
                }
                // It has just ended: a new one is opened.
                Ok(Err(_)) => {}
                Err(_) => return Err(queue_full(key)),
            }
        }
        Err(ended_without_answer(key))
    }

    fn stream(self: &Arc<Self>, key: &Key) -> Result<mpsc::Sender<Export>, Error> {
        let mut open = self.open();
        if let Some(stream) = open.get(key).filter(|stream| !stream.is_closed()) {
            return Ok(stream.clone());
        }
        if open.len() >= STREAMS_MAX {
            let message =
                format!("OTLP has {STREAMS_MAX} streams open at this gateway: try again, or another gateway");
            return Err(Error::busy("too_many_streams", message, BUSY_RETRY_AFTER));
        }
        let (stream, exports) = mpsc::channel(EXPORTS_WAITING_MAX);
        open.insert(key.clone(), stream.clone());
        drop(open);
        let streams = Arc::clone(self);
        let key = key.clone();
        self.app.scope.spawn("otlp stream", async move { streams.serve(key, exports).await });
        Ok(stream)
    }

    fn open(&self) -> MutexGuard<'_, HashMap<Key, mpsc::Sender<Export>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn serve(&self, key: Key, exports: mpsc::Receiver<Export>) {
        let mut edge = ExportEdge::new(exports, IDLE);
        let ended = match open_terms(&key) {
            Ok(terms) => match self.make_table(&key).await {
                Ok(()) => Box::pin(session::run(&mut edge, &self.app, terms)).await,
                Err(error) => Ended::Failed(error),
            },
            Err(error) => Ended::Failed(error),
        };
        edge.exports.close();
        let error = match ended {
            Ended::Failed(error) => error,
            Ended::Finished | Ended::Closed | Ended::Gone => going_away(),
        };
        edge.fail_all(&error);
        // Only closed ones: another may be open under this key by now.
        self.open().retain(|_, stream| !stream.is_closed());
    }

    /// Makes the table where there is none, as `PUT` does: its columns are known before the first record.
    async fn make_table(&self, key: &Key) -> Result<(), Error> {
        match self.app.upstream.describe_table(&key.table).await {
            Ok(_) => return Ok(()),
            Err(error) if error.kind == ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        let spec = TableSpec::new(schema(key.signal), Vec::new(), Default::default())?;
        self.app.upstream.create_table(&key.table, spec.to_json().to_string().into()).await?;
        tracing::info!(table = %key.table, signal = ?key.signal, "made a table for OTLP");
        Ok(())
    }
}

async fn wait(key: &Key, answered: oneshot::Receiver<Answer>) -> Answer {
    match timeout(ACK_TIMEOUT, answered).await {
        Ok(Ok(answer)) => answer,
        Ok(Err(_)) => Err(ended_without_answer(key)),
        Err(_) => {
            let message = format!("not durable in {} within {ACK_TIMEOUT:?}: send it again", key.table);
            Err(Error::unavailable("ack_timeout", message))
        }
    }
}

/// The stream ended just then, or its task was cancelled.
fn ended_without_answer(key: &Key) -> Error {
    let message = format!("the stream to table {} ended before it took the export: send it again", key.table);
    Error::unavailable("stream_ended", message)
}

fn queue_full(key: &Key) -> Error {
    let message = format!(
        "{EXPORTS_WAITING_MAX} exports wait for table {} at this gateway, and none has moved for {QUEUE_TIMEOUT:?}",
        key.table
    );
    Error::busy("exports_waiting", message, BUSY_RETRY_AFTER)
}

/// What a stream of exports is opened with. The one place where it is said.
fn open_terms(key: &Key) -> Result<OpenTerms, Error> {
    let terms = OpenTerms::ephemeral(key.table.clone(), Encoding::Arrow);
    Ok(OpenTerms { schema: schema_message(key.signal)?, ..terms })
}

/// An export whose records are not all durable.
struct Waiting {
    /// Offset of its first record, and one more than that of its last.
    start: u64,
    end: u64,
    refused: PodRefused,
    answer: oneshot::Sender<Answer>,
}

/// Exports as the session takes them.
struct ExportEdge {
    exports: mpsc::Receiver<Export>,
    /// Of the last export, what has not been read.
    frames: VecDeque<Frame>,
    waiting: VecDeque<Waiting>,
    /// Offset of the next export's first record.
    next_offset: u64,
    /// How long it stays open without an export.
    idle: Duration,
    idle_at: Instant,
    finished: bool,
}

impl ExportEdge {
    fn new(exports: mpsc::Receiver<Export>, idle: Duration) -> Self {
        let idle_at = Instant::now() + idle;
        let (frames, waiting) = (VecDeque::new(), VecDeque::new());
        Self { exports, frames, waiting, next_offset: 0, idle, idle_at, finished: false }
    }

    fn take(&mut self, export: Export) {
        let rows: u64 = export.frames.iter().map(|frame| u64::from(frame.rows)).sum();
        let (start, end) = (self.next_offset, self.next_offset + rows);
        let refused = PodRefused::default();
        self.waiting.push_back(Waiting { start, end, refused, answer: export.answer });
        (self.next_offset, self.frames) = (end, export.frames);
    }

    fn durable(&mut self, next: u64) {
        while self.waiting.front().is_some_and(|waiting| waiting.end <= next) {
            let Some(waiting) = self.waiting.pop_front() else { return };
            // An exporter that is gone needs no answer.
            let _ = waiting.answer.send(Ok(waiting.refused));
            self.idle_at = Instant::now() + self.idle;
        }
    }

    fn refuse(&mut self, rejected: &Rejected) {
        let at = self.waiting.partition_point(|waiting| waiting.end <= rejected.offset);
        let Some(waiting) = self.waiting.get_mut(at) else { return };
        waiting.refused.count += 1;
        let row = rejected.offset - waiting.start;
        waiting.refused.first.get_or_insert_with(|| (row, rejected.clone()));
    }

    fn fail_all(&mut self, error: &Error) {
        for waiting in self.waiting.drain(..) {
            let _ = waiting.answer.send(Err(error.clone()));
        }
        while let Ok(export) = self.exports.try_recv() {
            let _ = export.answer.send(Err(error.clone()));
        }
    }
}

impl Edge for ExportEdge {
    async fn next(&mut self, read: bool) -> Input {
        if !read {
            return std::future::pending().await;
        }
        loop {
            if let Some(frame) = self.frames.pop_front() {
                return Input::Records(Records {
                    first_offset: None,
                    count: frame.rows,
                    payload: frame.payload,
                });
            }
            if self.finished {
                return std::future::pending().await;
            }
            let export = tokio::select! {
                biased; // an export that has come is taken, however late
                export = self.exports.recv() => export,
                () = sleep_until(self.idle_at), if self.waiting.is_empty() => {
                    // Those that hold a place already may still use it.
                    self.exports.close();
                    self.idle_at = Instant::now() + self.idle;
                    continue;
                }
            };
            match export {
                Some(export) => self.take(export),
                None => {
                    self.finished = true;
                    return Input::Finish(FinishWhen::Durable);
                }
            }
        }
    }

    fn has_room(&self) -> bool {
        true
    }

    fn is_clear(&self) -> bool {
        true
    }

    fn tell(&mut self, frame: &GatewayFrame) {
        match frame {
            GatewayFrame::Opened(opened) => self.next_offset = opened.next_offset,
            GatewayFrame::Ack(ack) => {
                if let Some(durable) = ack.durable {
                    self.durable(durable + 1);
                }
            }
            GatewayFrame::Rejected(rejected) => self.refuse(rejected),
            // What waits goes on; what comes next finds no stream, and the gateway's end.
            GatewayFrame::Move(_) => self.exports.close(),
            // How the session ended is told by `serve`.
            GatewayFrame::Error(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_stream_that_is_idle_ends_and_takes_what_came_at_the_last_moment() {
        let (sender, exports) = mpsc::channel(4);
        let idle = Duration::from_millis(2);
        let mut edge = ExportEdge::new(exports, idle);
        let export = |rows| {
            let (answer, answered) = oneshot::channel();
            let frames = [Frame { rows, payload: Bytes::from_static(b"x") }].into();
            (Export { frames, answer }, answered)
        };
        let (first, first_answered) = export(2);
        sender.try_send(first).expect("room");
        assert!(matches!(edge.next(true).await, Input::Records(Records { count: 2, .. })));
        // While an ack is waited for a stream is not idle.
        timeout(idle * 10, edge.next(true)).await.expect_err("it waits");
        assert!(!sender.is_closed());
        edge.durable(2);
        assert_eq!(first_answered.await.expect("answered").expect("durable").count, 0);
        let place = sender.reserve().await.expect("open");
        tokio::select! {
            biased; // what the edge does closes the queue
            _ = edge.next(true) => unreachable!("a place is held"),
            () = sender.closed() => {}
        }
        place.send(export(1).0);
        assert!(matches!(edge.next(true).await, Input::Records(Records { count: 1, .. })));
        edge.durable(3);
        assert!(matches!(edge.next(true).await, Input::Finish(FinishWhen::Durable)));
        timeout(idle * 10, edge.next(true)).await.expect_err("once");
    }
}
