//! The stream's task: owns the connection and the window; reconnects, resumes, resends.
//!
//! *Owns*: which frames are on the wire, what the gateway has said, when to connect anew.
//! *Does not own*: how bytes travel (`transport`), what is worth another try (`error`, `retry`).
//! Keeps the client's half of P6.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use sluice_shared::error::{Error as GatewayError, ErrorKind};
use sluice_shared::frame::{
    Ack, Encoding, Finish, FinishWhen, GatewayFrame, Move, Open, Opened, ProducerFrame, Rejected,
};
use sluice_shared::ids::{StreamId, TableVersion};
use sluice_shared::lifecycle::TaskScope;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use crate::config::{OnRejected, Settings};
use crate::encode;
use crate::error::Error;
use crate::outbox::{Outbox, Take};
use crate::retry::{Backoff, Next};
use crate::transport::{Connection, Event};
use crate::window::{Acked, Resumed, Window};

/// Small records gather while so many frames are unacknowledged: they travel with the next ack, or when a frame is
/// full. Fewer frames under load, no wait without it.
const GATHER_ABOVE_FRAMES: usize = 4;
/// Gateways ping each 30 s: one that is silent for so long is gone.
const SILENCE_MAX: Duration = Duration::from_secs(90);
/// A connection that lasted so long with nothing to acknowledge was a good one.
const GOOD_CONNECTION: Duration = Duration::from_secs(10);

/// Where a stream is in its life.
#[derive(Debug, Clone, Default)]
pub(crate) enum Phase {
    #[default]
    Opening,
    Open,
    Finished,
    Failed(Error),
}

/// What the task shows to the handles.
#[derive(Debug, Clone, Default)]
pub(crate) struct Shown {
    pub(crate) phase: Phase,
    pub(crate) stream: Option<StreamId>,
    /// Offset of the handle's first record.
    pub(crate) first: u64,
    pub(crate) durable_next: u64,
    pub(crate) committed_next: u64,
    pub(crate) version: Option<TableVersion>,
    pub(crate) unconfirmed: u64,
    pub(crate) rejected: u64,
    pub(crate) reconnects: u64,
    /// Set while there is no connection.
    pub(crate) outage: Option<Outage>,
    pub(crate) released_bytes: u64,
    pub(crate) window_bytes: u64,
    pub(crate) frame_bytes_max: usize,
}

/// A lost connection that is being made again.
#[derive(Debug, Clone)]
pub(crate) struct Outage {
    pub(crate) since: Instant,
    /// When the stream gives up, unless something moves before.
    pub(crate) until: Instant,
    pub(crate) last: Error,
}

/// What a stream begins with.
pub(crate) struct Begin {
    pub(crate) settings: Settings,
    pub(crate) encoding: Encoding,
    /// As the `open` frame carries it.
    pub(crate) schema: Option<String>,
    pub(crate) on_rejected: Option<OnRejected>,
    pub(crate) rejected: mpsc::Sender<Rejected>,
    pub(crate) shown: watch::Sender<Shown>,
}

pub(crate) struct StreamTask {
    begin: Begin,
    outbox: Arc<Outbox>,
    scope: TaskScope,
    window: Window,
    /// The sender's offset of the wire's offset 0: greater than 0 once an ephemeral stream has begun anew.
    base: u64,
    /// Rejected offsets beyond the durable frontier, so that a resent frame's are not told twice.
    refused: BTreeSet<u64>,
    backoff: Backoff,
    started: Instant,
    opened: bool,
    /// How often a gateway was changed.
    hops: usize,
}

/// What holds for one connection.
#[derive(Default)]
struct Carriage {
    finish_sent: Option<FinishWhen>,
    /// The gateway is going away: nothing new is sent, and at this time the connection is left.
    leave_at: Option<Instant>,
}

impl StreamTask {
    pub(crate) fn new(begin: Begin, outbox: Arc<Outbox>, scope: TaskScope) -> Self {
        let backoff = Backoff::new(begin.settings.retry);
        Self {
            begin,
            outbox,
            scope,
            window: Window::starting_at(0),
            base: 0,
            refused: BTreeSet::new(),
            backoff,
            started: Instant::now(),
            opened: false,
            hops: 0,
        }
    }

    /// Lives until the stream is finished, has failed, or is dropped.
    pub(crate) async fn run(mut self) {
        let scope = self.scope.clone();
        let outcome = tokio::select! {
            biased; // a dropped stream is of no interest to anyone
            () = scope.cancelled() => return,
            outcome = self.live() => outcome,
        };
        if let Err(error) = &outcome {
            tracing::debug!(table = %self.begin.settings.table, error = %error, "stream failed");
        }
        let phase = outcome.map_or_else(Phase::Failed, |()| Phase::Finished);
        self.begin.shown.send_modify(|shown| shown.phase = phase);
    }

    async fn live(&mut self) -> Result<(), Error> {
        loop {
            let mut was_good = false;
            let failure = match self.connect().await {
                Ok(connection) => {
                    let connected_at = Instant::now();
                    match self.carry(connection).await {
                        Ok(()) => return Ok(()),
                        Err(failure) => {
                            was_good = connected_at.elapsed() > GOOD_CONNECTION;
                            failure
                        }
                    }
                }
                Err(failure) => failure,
            };
            let Some(at_least) = failure.retry_after() else { return Err(failure) };
            if self.is_over_without_gateway() {
                return Ok(());
            }
            if self.window.is_empty() && was_good {
                self.backoff.progress();
            }
            self.hops += 1;
            match self.backoff.failed(self.started.elapsed(), rand::random(), at_least) {
                Next::GiveUp(_) if !self.opened => return Err(failure),
                Next::GiveUp(stalled) => return Err(Error::GaveUp { stalled, last: Box::new(failure) }),
                Next::Wait(wait) => {
                    tracing::debug!(table = %self.begin.settings.table, error = %failure, ?wait, "reconnecting");
                    self.show_outage(failure);
                    tokio::time::sleep(wait).await;
                }
            }
        }
    }

    fn show_outage(&self, last: Error) {
        let now = Instant::now();
        let Some(stall) = self.backoff.stall(now - self.started) else { return };
        let outage = Outage { since: now - stall.lasts, until: now + stall.gives_up_in, last };
        self.begin.shown.send_modify(|shown| shown.outage = Some(outage));
    }

    /// An ephemeral stream whose records are all durable has nothing more to ask: its commits are the pods' work,
    /// and a new stream would not hear of them.
    fn is_over_without_gateway(&mut self) -> bool {
        let over = self.opened
            && self.begin.settings.name.is_none()
            && self.window.is_empty()
            && self.outbox.finished().is_some();
        if over {
            let durable_next = self.window.durable_next();
            self.begin.shown.send_modify(|shown| shown.give_up_confirmation(durable_next));
        }
        over
    }

    /// Connects; where a fetched token is not taken, once more with a new one.
    async fn connect(&mut self) -> Result<Connection, Error> {
        let settings = &self.begin.settings;
        let (credential, at) = (Arc::clone(&settings.credential), self.hops % settings.gateways.len());
        let token = credential.token(&settings.gateways[at], &settings.trust).await?;
        match self.open(at, token.clone()).await {
            Err(Error::Gateway(error))
                if error.kind == ErrorKind::Unauthorized && credential.renews(token.as_deref()).await =>
            {
                tracing::debug!(table = %self.begin.settings.table, %error, "a token was not taken");
                let settings = &self.begin.settings;
                let token = credential.token(&settings.gateways[at], &settings.trust).await?;
                self.open(at, token).await
            }
            other => other,
        }
    }

    async fn open(&mut self, gateway: usize, token: Option<String>) -> Result<Connection, Error> {
        let settings = &self.begin.settings;
        let url = &settings.gateways[gateway];
        let mut connection =
            Connection::connect(url, settings.table.as_str(), &settings.way, &settings.trust).await?;
        let open = Open {
            table: Some(settings.table.clone()),
            name: settings.name.clone(),
            // What is not acknowledged is sent again, so that its rejections are heard.
            resume_at: settings.name.as_ref().filter(|_| self.opened).map(|_| self.window.durable_next()),
            encoding: self.begin.encoding,
            unknown: settings.unknown,
            schema: self.begin.schema.clone(),
            token,
            rate_bytes_per_s: settings.rate_bytes_per_s,
        };
        let opened = connection.open(open).await?;
        self.resume(&connection, opened)?;
        Ok(connection)
    }

    /// Fits the window to what the gateway has.
    fn resume(&mut self, connection: &Connection, opened: Opened) -> Result<(), Error> {
        let is_named = self.begin.settings.name.is_some();
        let mut committed_unknown_to = None;
        if !self.opened {
            self.window = Window::starting_at(opened.next_offset);
        } else if is_named {
            let resumed = self.window.resume(opened.next_offset, opened.stream_end);
            self.fit(connection, &opened, resumed)?;
        } else {
            let next = self.window.durable_next();
            let base = next.checked_sub(opened.next_offset);
            self.base =
                base.ok_or_else(|| connection.broke_protocol("a new stream begins beyond offset 0"))?;
            let resumed = self.window.resume(next, next);
            self.fit(connection, &opened, resumed)?;
            committed_unknown_to = Some(next);
        }
        let is_first = !std::mem::replace(&mut self.opened, true);
        self.backoff.opened();
        let window = &self.window;
        let window_bytes = self.begin.settings.window_bytes.min(opened.window_bytes).max(1);
        self.begin.shown.send_modify(|shown| {
            if is_first {
                shown.first = opened.next_offset;
                shown.phase = Phase::Open;
            }
            shown.reconnects += u64::from(!is_first);
            shown.outage = None;
            shown.stream = Some(opened.stream);
            shown.durable_next = window.durable_next();
            shown.released_bytes = window.released_bytes();
            shown.window_bytes = window_bytes;
            shown.frame_bytes_max = usize::try_from(opened.frame_bytes_max).unwrap_or(usize::MAX);
            if let Some(next) = committed_unknown_to {
                shown.give_up_confirmation(next);
            }
        });
        Ok(())
    }

    fn fit(&mut self, connection: &Connection, opened: &Opened, resumed: Resumed) -> Result<(), Error> {
        match resumed {
            Resumed::Ready => {}
            Resumed::Cut { records } => {
                let payload = self.window.first_payload().expect("a frame that straddles is there").clone();
                self.window.replace_first(encode::cut(self.begin.encoding, &payload, records)?);
            }
            Resumed::Behind { durable_next } => {
                return Err(connection.broke_protocol(&format!(
                    "stream {} was durable up to offset {durable_next}, now the gateway asks for {} again: \
                     acknowledged records may be lost",
                    opened.stream, opened.next_offset
                )));
            }
            Resumed::Ahead { next } => {
                return Err(GatewayError::fenced(format!(
                    "stream {} has records up to offset {}, this process sent up to {next}: another one writes \
                     to the stream of this name",
                    opened.stream,
                    opened.stream_end.max(opened.next_offset)
                ))
                .into());
            }
        }
        Ok(())
    }

    /// Carries frames until all is finished (Ok), or the connection is of no more use.
    async fn carry(&mut self, mut connection: Connection) -> Result<(), Error> {
        let outbox = Arc::clone(&self.outbox);
        let mut carriage = Carriage::default();
        loop {
            if self.is_finished(&carriage) {
                connection.close().await;
                return Ok(());
            }
            if carriage.leave_at.is_some() && self.may_leave() {
                return Err(connection.lost("it is going away"));
            }
            let silent_at = connection.heard_at() + SILENCE_MAX;
            let wake_at = carriage.leave_at.map_or(silent_at, |at| at.min(silent_at));
            let event = tokio::select! {
                biased; // acks make room, so the connection comes first
                event = std::future::poll_fn(|cx| {
                    connection.poll_io(cx, &mut || self.next_frame(&mut carriage))
                }) => event?,
                () = outbox.added() => continue,
                () = tokio::time::sleep_until(wake_at) => {
                    let what = if wake_at < silent_at { "it is going away" } else { "it has gone silent" };
                    return Err(connection.lost(what));
                }
            };
            match event {
                Event::Frame(frame) => self.handle(&connection, &mut carriage, frame)?,
                Event::Finished if carriage.finish_sent.is_some() && self.window.is_empty() => {
                    self.trust_finish(&carriage);
                    return Ok(());
                }
                Event::Finished => {
                    return Err(connection.lost("it closed the stream before all was acknowledged"));
                }
                Event::Closed(error) => return Err(error),
            }
        }
    }

    /// The next frame to write, if there is one.
    fn next_frame(&mut self, carriage: &mut Carriage) -> Option<Bytes> {
        if carriage.leave_at.is_some() {
            return None;
        }
        if !self.window.has_unsent() {
            let gather = self.window.in_flight() >= GATHER_ABOVE_FRAMES;
            let chunk = self.outbox.take(if gather { Take::Sealed } else { Take::All });
            if let Some(chunk) = chunk {
                self.window.push(chunk);
            }
        }
        if let Some(frame) = self.window.next_unsent() {
            let count = u32::try_from(frame.offsets.count()).expect("a frame has under 2^32 records");
            let first_offset = frame.offsets.start - self.base;
            let payload = frame.payload.clone();
            return Some(ProducerFrame::Records { first_offset, count, payload }.encode());
        }
        if carriage.finish_sent.is_none() {
            carriage.finish_sent = self.outbox.finished();
            return carriage.finish_sent.map(|when| ProducerFrame::Finish(Finish { when }).encode());
        }
        None
    }

    fn handle(
        &mut self,
        connection: &Connection,
        carriage: &mut Carriage,
        frame: GatewayFrame,
    ) -> Result<(), Error> {
        match frame {
            GatewayFrame::Ack(ack) => self.acked(connection, ack),
            GatewayFrame::Rejected(rejected) => {
                self.rejected(rejected);
                Ok(())
            }
            GatewayFrame::Move(Move { after_ms }) => {
                // A little before the gateway ends, so that the last acks still come.
                let patience = Duration::from_millis(after_ms.min(3_600_000)) * 3 / 4;
                carriage.leave_at = Some(Instant::now() + patience);
                Ok(())
            }
            GatewayFrame::Error(mut error) => {
                error.offset = error.offset.map(|offset| offset.saturating_add(self.base));
                Err(error.into())
            }
            GatewayFrame::Opened(_) => Err(connection.broke_protocol("it answered `open` twice")),
        }
    }

    fn acked(&mut self, connection: &Connection, ack: Ack) -> Result<(), Error> {
        let next = |offset: Option<u64>| {
            offset.map_or(0, |offset| offset.saturating_add(1).saturating_add(self.base))
        };
        let committed_next = next(ack.committed);
        // What is committed is durable.
        let durable_next = next(ack.durable).max(committed_next);
        match self.window.durable(durable_next) {
            Acked::Beyond => {
                return Err(connection.broke_protocol(&format!(
                    "it acknowledged up to offset {durable_next}, beyond what it was sent"
                )));
            }
            Acked::Advanced => {
                self.backoff.progress();
                self.refused = self.refused.split_off(&durable_next);
            }
            Acked::Old => {}
        }
        let window = &self.window;
        self.begin.shown.send_modify(|shown| {
            shown.durable_next = window.durable_next();
            shown.released_bytes = window.released_bytes();
            shown.committed_next = shown.committed_next.max(committed_next);
            shown.version = shown.version.max(ack.version);
        });
        Ok(())
    }

    fn rejected(&mut self, mut rejected: Rejected) {
        rejected.offset = rejected.offset.saturating_add(self.base);
        if rejected.offset < self.window.durable_next() || !self.refused.insert(rejected.offset) {
            return;
        }
        self.begin.shown.send_modify(|shown| shown.rejected += 1);
        match &mut self.begin.on_rejected {
            Some(callback) => callback(rejected),
            // Nobody takes them: those that find no room are counted above.
            None => drop(self.begin.rejected.try_send(rejected)),
        }
    }

    fn is_finished(&self, carriage: &Carriage) -> bool {
        let covered = |when| match when {
            FinishWhen::Durable => true,
            FinishWhen::Committed => self.begin.shown.borrow().committed_next >= self.window.next(),
        };
        carriage.finish_sent.is_some_and(|when| self.window.is_empty() && covered(when))
    }

    /// The gateway closed in an orderly way after `finish`: that is its answer, even where no ack was due.
    fn trust_finish(&self, carriage: &Carriage) {
        if carriage.finish_sent == Some(FinishWhen::Committed) {
            let next = self.window.next();
            self.begin.shown.send_modify(|shown| shown.committed_next = shown.committed_next.max(next));
        }
    }

    /// Whether nothing would be lost, or sent twice, by leaving now.
    fn may_leave(&self) -> bool {
        let shown = self.begin.shown.borrow();
        let is_named = self.begin.settings.name.is_some();
        self.window.in_flight() == 0 && (is_named || shown.committed_next >= shown.durable_next)
    }
}

impl Shown {
    /// Records before `next` are durable, but their commit can no longer be heard of.
    fn give_up_confirmation(&mut self, next: u64) {
        self.unconfirmed += next.saturating_sub(self.committed_next);
        self.committed_next = self.committed_next.max(next);
    }
}
