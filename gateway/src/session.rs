//! A stream's session: offsets, the window of frames that are not durable yet, and the pod that takes them.
//!
//! One task per stream. Its producer is reached through an `Edge`; its pod through a `Call`. When the pod is lost
//! the session opens the stream on another one and sends again what is not durable; the producer sees a pause.
//!
//! *Owns*: the session's state machine, from `open` to its end.
//! *Does not own*: protocols (`edge`), choosing and opening (`upstream`), closing the socket (`edge`).
//! Keeps P5, P6 and P7.

mod outbox;
mod window;

use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use sluice_shared::error::Error;
use sluice_shared::fault::{self, Point};
use sluice_shared::frame::{Encoding, FinishWhen, GatewayFrame, Move, Opened, Rejected};
use sluice_shared::lifecycle::TaskScope;
use sluice_shared::proto::{self, StreamRequest, StreamResponse, stream_request, stream_response};
use tokio::time::Instant;

use crate::app::App;
use crate::auth::{Privilege, Right};
use crate::streams::Shown;
use crate::upstream::{self, Call, OpenTerms, is_loss};
use outbox::Outbox;
pub(crate) use window::Window;
use window::{AckBeyondSent, Merge};

/// Payload bytes of one request to a pod, unless a single frame is larger.
const REQUEST_BYTES: usize = 1 << 20;
/// Inputs taken in a row before waiting frames are sent: enough to gather small messages, and no more.
const INPUTS_IN_A_ROW_MAX: usize = 256;
/// How long a producer that was told to `move` may go on sending.
const MOVE_GRACE: Duration = Duration::from_secs(1);
/// How long a pod may take to end the call of a stream that has left it.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(10);
/// Code of the end of a stream that outlived its token: the same request succeeds with a new one.
const AUTH_EXPIRED: &str = "auth_expired";

/// The way to one producer. One per protocol.
pub(crate) trait Edge: Send {
    /// What the producer does next; with `read` false only whether it is still there and takes what it is told.
    /// Safe to drop and call again.
    fn next(&mut self, read: bool) -> impl Future<Output = Input> + Send;
    /// Whether there is room to tell the producer something.
    fn has_room(&self) -> bool;
    /// Whether all that was told has left.
    fn is_clear(&self) -> bool;
    /// Tells the producer something. It leaves during `next`.
    fn tell(&mut self, frame: &GatewayFrame);
    /// Whether a stream whose token has expired is told to `move`: producers that know no other way to say so.
    fn moves_when_expired(&self) -> bool {
        false
    }
}

/// What a producer does.
#[derive(Debug)]
pub(crate) enum Input {
    /// It sends records.
    Records(Records),
    /// It has no more records.
    Finish(FinishWhen),
    /// It closes in good order, and waits for the answer.
    Closed,
    /// It is gone, or as good as gone; why.
    Gone(&'static str),
    /// It sent what cannot be taken.
    Refused(Error),
    /// All that it was told has left.
    Cleared,
}

/// Consecutive records from a producer.
#[derive(Debug)]
pub(crate) struct Records {
    /// As the producer counts. None: as the gateway counts.
    pub(crate) first_offset: Option<u64>,
    /// How many; at least one.
    pub(crate) count: u32,
    /// As encoded.
    pub(crate) payload: Bytes,
}

/// How a session ended, and so what its edge has to do.
#[derive(Debug)]
pub(crate) enum Ended {
    /// All is durable, or committed, as the producer asked.
    Finished,
    /// All is durable, and the producer waits for the answer to its close.
    Closed,
    /// There is nobody to tell anything.
    Gone,
    /// The producer is to be told this.
    Failed(Error),
}

/// What happens to a session.
enum Event {
    Input(Input),
    Response(Result<Option<StreamResponse>, tonic::Status>),
    Reopened(Result<Box<Call>, Error>),
    /// Another pod has taken a stream that this one hands over, or none would.
    Moved(Result<Box<Call>, Error>),
    /// The pod takes another request.
    CanSend,
    Deadline,
    Drain,
    Cancelled,
}

type Opening = Pin<Box<dyn Future<Output = Result<Box<Call>, Error>> + Send>>;

enum Link {
    Open(Box<Call>),
    Opening(Opening),
    /// Another pod opens the stream; the present one, to which nothing is sent meanwhile, keeps it until then.
    Moving(Box<Call>, Opening),
}

impl Link {
    /// Takes it, to be put back in another state at once.
    fn take(&mut self) -> Self {
        std::mem::replace(self, Self::Opening(Box::pin(std::future::pending())))
    }
}

/// Why no more input is taken, and until when what was taken may become durable.
struct Ending {
    how: Ended,
    deadline: Instant,
    /// The producer asked for the stream's end before: it is told so if that comes in time.
    may_finish: bool,
}

/// Judges who wants it, opens the stream, and carries it to its end.
pub(crate) async fn run(edge: &mut impl Edge, app: &App, mut terms: OpenTerms) -> Ended {
    if let Right::Claimed(credential) = &terms.right {
        match app.auth.check(credential, &terms.table, Privilege::Write) {
            Ok(permit) => terms.right = Right::Granted(permit),
            Err(error) => return Ended::Failed(error),
        }
    }
    // Boxed, so that its room is given back: the stream's task lasts much longer.
    let call = match Box::pin(app.upstream.open(&terms)).await {
        Ok(call) => call,
        Err(error) => return Ended::Failed(error),
    };
    let opened = call.opened.clone();
    let stream = opened.stream.clone();
    tracing::info!(%stream, table = %terms.table, pod = %call.placed.pod, "stream opened");
    let mut session = Session::new(edge, app, terms, call);
    session.tell_opened(opened);
    let mut ended = session.run().await;
    if let Err(why) = session.settle().await {
        tracing::info!(%stream, why, "producer is gone");
        ended = Ended::Gone;
    }
    tracing::info!(%stream, ended = ?ended, "stream ended");
    ended
}

struct Session<'a, E> {
    edge: &'a mut E,
    app: &'a App,
    /// As the stream is opened again.
    terms: OpenTerms,
    link: Link,
    window: Window,
    outbox: Outbox,
    /// Records that were read and found no room. None are read while there are some.
    held: Option<Records>,
    /// The producer, or the end of its connection, asked for the stream's end.
    finish: Option<FinishWhen>,
    /// The present pod knows of `finish`.
    finish_sent: bool,
    ending: Option<Ending>,
    /// The pod hands the stream over, since then: nothing more is sent to it.
    handoff: Option<Instant>,
    /// Nobody is there to be told anything.
    gone: bool,
    /// The gateway goes away, or the producer was told to `move`: until then it may go on; and why.
    leaving: Option<(Instant, Error)>,
    /// The producer's token holds until then.
    expires_at: Option<Instant>,
    gauges: Gauges<'a>,
    /// What people are shown of it.
    shown: Shown,
}

impl<'a, E: Edge> Session<'a, E> {
    fn new(edge: &'a mut E, app: &'a App, terms: OpenTerms, call: Box<Call>) -> Self {
        let opened = &call.opened;
        let merge = match terms.encoding {
            Encoding::Json => Merge::Lines,
            Encoding::Protobuf | Encoding::Avro => Merge::Messages,
            Encoding::Arrow => Merge::Never,
        };
        let expires_at = match &terms.right {
            Right::Granted(permit) => permit.left.and_then(|left| Instant::now().checked_add(left)),
            Right::Claimed(_) => None,
        };
        let bytes_max = app.config.window_bytes.as_usize();
        let counted = terms.whole_requests.then_some(opened.requests);
        let window = Window::new(opened.next_offset, bytes_max, merge, app.budget.share()).counting(counted);
        let shown = app.streams.show(&terms, &opened.stream, &call.placed.pod);
        let terms = OpenTerms {
            stream: Some(opened.stream.clone()),
            session: Some(opened.session),
            stream_end: opened.stream_end,
            schema_id: opened.schema_id,
            ..terms
        };
        Self {
            edge,
            app,
            terms,
            outbox: Outbox::new(opened.next_offset),
            window,
            link: Link::Open(call),
            held: None,
            finish: None,
            finish_sent: false,
            ending: None,
            handoff: None,
            gone: false,
            leaving: None,
            expires_at,
            gauges: Gauges::new(app),
            shown,
        }
    }

    /// The stream's id, for the log.
    fn shown_id(&self) -> Option<impl tracing::Value> {
        self.terms.stream.as_ref().map(tracing::field::display)
    }

    fn tell_opened(&mut self, opened: upstream::Opened) {
        self.edge.tell(&GatewayFrame::Opened(Opened {
            stream: opened.stream,
            next_offset: opened.next_offset,
            stream_end: opened.stream_end,
            requests: opened.requests,
            window_bytes: self.app.config.window_bytes.0,
            frame_bytes_max: self.app.config.frame_bytes_max.0,
        }));
    }

    async fn run(&mut self) -> Ended {
        loop {
            self.tell();
            self.shown.reached(&self.window, self.gauges.taken());
            self.gauges.window(self.window.bytes());
            let event = self.event().await;
            if let Err(ended) = self.apply(event) {
                return ended;
            }
        }
    }

    /// Hands waiting news to the edge while it has room.
    fn tell(&mut self) {
        while (self.gone || self.edge.has_room())
            && let Some(frame) = self.outbox.next()
        {
            if self.gone {
                continue;
            }
            if matches!(frame, GatewayFrame::Ack(_)) {
                self.app.metrics.acks.inc();
            }
            self.edge.tell(&frame);
        }
    }

    /// Tells what is left to tell, and waits until it has left.
    async fn settle(&mut self) -> Result<(), &'static str> {
        loop {
            self.tell();
            if self.gone || (self.outbox.is_empty() && self.edge.is_clear()) {
                return Ok(());
            }
            tokio::select! {
                biased; // cancel first: it must not wait for a slow producer
                () = self.app.scope.cancelled() => return Err("cancelled"),
                input = self.edge.next(false) => match input {
                    Input::Gone(why) => return Err(why),
                    _ => continue,
                }
            }
        }
    }

    fn is_reading(&self) -> bool {
        self.ending.is_none() && self.held.is_none() && self.window.has_room(0)
    }

    async fn event(&mut self) -> Event {
        let reading = self.is_reading();
        let responding = self.outbox.has_room();
        let sending = self.handoff.is_none() && (self.window.has_unsent() || self.owes_finish());
        let deadline = self.deadline();
        let (scope, leaving): (&TaskScope, bool) = (&self.app.scope, self.leaving.is_some());
        tokio::select! {
            // The pod first: its answers free the window, and what waits is sent before more is read, so that
            // frames grow while the link is busy and not otherwise. The signals come last since a look at them
            // takes a lock; they are reached whenever the link and the socket have nothing.
            biased;
            event = link_event(&mut self.link, responding, sending) => event,
            input = self.edge.next(reading), if !self.gone => Event::Input(input),
            () = sleep_until(deadline) => Event::Deadline,
            () = scope.cancelled() => Event::Cancelled,
            () = scope.draining(), if !leaving => Event::Drain,
        }
    }

    fn deadline(&self) -> Option<Instant> {
        let ending = self.ending.as_ref().map(|ending| ending.deadline);
        ending.or_else(|| self.leaving.as_ref().map(|(at, _)| *at)).or(self.expires_at)
    }

    fn apply(&mut self, event: Event) -> Result<(), Ended> {
        match event {
            Event::Input(input) => self.take_inputs(input),
            Event::Response(Ok(Some(response))) => self.respond(response)?,
            Event::Response(Ok(None)) => {
                self.lose(Error::unavailable("transport", "the pod ended the call"))?
            }
            Event::Response(Err(status)) => self.lose(status.into())?,
            Event::Reopened(call) => self.resume(call.map_err(Ended::Failed)?)?,
            Event::Moved(call) => self.moved(call)?,
            Event::CanSend => self.send(),
            Event::Deadline => return self.deadline_passed(),
            Event::Drain => self.leave(going_away()),
            Event::Cancelled => return Err(Ended::Failed(going_away())),
        }
        Ok(())
    }

    /// Tells the producer to go on elsewhere.
    fn leave(&mut self, why: Error) {
        self.leaving = Some((Instant::now() + MOVE_GRACE, why));
        let after_ms = u64::try_from(MOVE_GRACE.as_millis()).unwrap_or(u64::MAX);
        self.edge.tell(&GatewayFrame::Move(Move { after_ms }));
    }

    /// The producer's token has expired. What was taken still becomes durable and is acked; nothing more is taken.
    fn expire(&mut self) {
        let message = "the token has expired: open the stream again with a new one; what was acked stays";
        if self.edge.moves_when_expired() {
            return self.leave(Error::unavailable(AUTH_EXPIRED, message));
        }
        let error = Error { retryable: true, ..Error::unauthorized(AUTH_EXPIRED, message) };
        self.end_unless_finished(error);
    }

    /// Ends with this error, unless the producer has asked for the stream's end before and that comes in time.
    fn end_unless_finished(&mut self, error: Error) {
        let has_finished = self.finish.is_some();
        self.end(Ended::Failed(error));
        self.ending.iter_mut().for_each(|ending| ending.may_finish = has_finished);
    }

    /// Takes an input, and those that are there already.
    fn take_inputs(&mut self, first: Input) {
        self.take(first);
        for _ in 1..INPUTS_IN_A_ROW_MAX {
            if !self.is_reading() {
                return;
            }
            // In its place: `now_or_never` would move it, once a record.
            let next = pin!(self.edge.next(true)).poll(&mut Context::from_waker(Waker::noop()));
            let Poll::Ready(next) = next else { return };
            self.take(next);
        }
    }

    fn take(&mut self, input: Input) {
        match input {
            Input::Records(records) => self.take_records(records),
            Input::Finish(when) if self.finish.is_none() => self.finish = Some(when),
            Input::Finish(_) => self.end(Ended::Failed(after_finish())),
            Input::Closed => self.end(Ended::Closed),
            Input::Gone(why) => {
                tracing::info!(stream = self.shown_id(), why, "producer is gone");
                self.gone = true;
                self.end(Ended::Gone);
            }
            Input::Refused(error) => self.end(Ended::Failed(error)),
            Input::Cleared => {}
        }
    }

    fn take_records(&mut self, records: Records) {
        if self.finish.is_some() {
            return self.end(Ended::Failed(after_finish()));
        }
        if let Some(error) = misplaced(self.window.next_offset(), &records) {
            return self.end(Ended::Failed(error));
        }
        self.gauges.take(&records);
        if self.window.has_room(records.payload.len()) {
            self.push(records);
        } else {
            self.hold(records);
        }
    }

    fn hold(&mut self, records: Records) {
        self.window.hold(records.payload.len());
        self.held = Some(records);
    }

    fn push(&mut self, records: Records) {
        let Records { count, payload, .. } = records;
        if self.window.push(count, payload).is_none() {
            let message = "the stream's offsets are used up: open a new stream";
            self.end(Ended::Failed(Error::invalid("offsets_used_up", message)));
        }
    }

    /// Takes no more input. What was taken may still become durable, within the close timeout; then the session
    /// ends like this.
    fn end(&mut self, how: Ended) {
        if self.ending.is_none() {
            let deadline = Instant::now() + self.app.config.close_timeout();
            self.ending = Some(Ending { how, deadline, may_finish: false });
            self.finish.get_or_insert(FinishWhen::Durable);
        }
    }

    fn all_durable(&self) -> bool {
        self.window.is_empty() && self.held.is_none()
    }

    /// The pod is to be told of `finish`, which comes after all records.
    fn owes_finish(&self) -> bool {
        self.finish.is_some() && !self.finish_sent && self.held.is_none()
    }

    fn deadline_passed(&mut self) -> Result<(), Ended> {
        let Some(ending) = self.ending.take() else {
            match &self.leaving {
                Some((_, why)) => self.end_unless_finished(why.clone()),
                None => self.expire(),
            }
            return Ok(());
        };
        let all_durable = self.all_durable();
        if !all_durable {
            let bytes = self.window.bytes();
            tracing::warn!(
                stream = self.shown_id(),
                bytes,
                "closed before all that was received was durable"
            );
        }
        Err(match ending.how {
            // An answered close says that all is durable: where it is not, there is no answer.
            Ended::Closed if !all_durable => Ended::Gone,
            how => how,
        })
    }

    fn respond(&mut self, response: StreamResponse) -> Result<(), Ended> {
        match response.kind {
            Some(stream_response::Kind::Ack(ack)) => self.acked(ack),
            Some(stream_response::Kind::Rejections(rejections)) => {
                rejections.rejections.into_iter().for_each(|rejection| self.rejected(rejection));
                Ok(())
            }
            Some(stream_response::Kind::Finished(_)) => Err(self.finished()),
            Some(stream_response::Kind::Handoff(handoff)) => {
                self.begin_handoff(&handoff.reason);
                Ok(())
            }
            Some(stream_response::Kind::Opened(_)) => {
                Err(broken("the pod answered an open stream with `opened`"))
            }
            // A newer pod may say more than this gateway understands.
            None => Ok(()),
        }
    }

    fn acked(&mut self, ack: proto::Ack) -> Result<(), Ended> {
        let sent_next = self.window.sent_next();
        let beyond = |AckBeyondSent| {
            broken(&format!("the pod acked up to offset {}, of {sent_next} that were sent", ack.durable_next))
        };
        self.window.durable(ack.durable_next).map_err(beyond)?;
        self.outbox.ack(ack.durable_next, ack.committed_next, ack.version);
        self.hand_over();
        if let Some(held) = self.held.take() {
            self.window.let_go(held.payload.len());
            if self.window.has_room(held.payload.len()) {
                self.push(held);
            } else {
                self.hold(held);
            }
        }
        Ok(())
    }

    fn rejected(&mut self, rejection: proto::Rejection) {
        let proto::Rejection { offset, code, column, message, quarantined } = rejection;
        let column = (!column.is_empty()).then_some(column);
        if self.outbox.refuse(Rejected { offset, code, column, message, quarantined }) {
            self.app.metrics.rejected_records.inc();
        }
    }

    fn finished(&mut self) -> Ended {
        if !self.all_durable() {
            let held = self.window.first_held();
            return broken(&format!("the pod finished the stream, but offset {held} is not durable"));
        }
        match self.ending.take() {
            Some(ending) if !ending.may_finish => ending.how,
            _ => Ended::Finished,
        }
    }

    /// The call has ended before the stream did.
    fn lose(&mut self, error: Error) -> Result<(), Ended> {
        let Link::Open(call) = &self.link else { return Ok(()) };
        if !is_loss(&error) && !error.retryable {
            return Err(Ended::Failed(error));
        }
        if self.all_durable()
            && let Some(ending) = self.ending.take()
        {
            return Err(ending.how);
        }
        let pod = call.placed.pod.clone();
        tracing::warn!(stream = self.shown_id(), %pod, %error, "lost a stream's pod, placing it again");
        if is_loss(&error) {
            self.app.upstream.set_aside(&pod);
        }
        self.app.metrics.reopens.inc();
        self.handoff = None;
        self.terms.last_pod = Some(pod);
        self.finish_sent = false;
        let upstream = Arc::clone(&self.app.upstream);
        self.link = Link::Opening(Box::pin(upstream.reopen(self.terms_to_go_on())));
        Ok(())
    }

    /// How another pod is to take the stream, behind all that is durable.
    fn terms_to_go_on(&mut self) -> OpenTerms {
        self.terms.resume_at = Some(self.window.first_held());
        self.terms.rate_bytes_per_s = self.shown.rate().or(self.terms.rate_bytes_per_s);
        self.terms.clone()
    }

    /// The pod wants the stream to go on elsewhere. One that was told of the stream's end has little left to do.
    fn begin_handoff(&mut self, reason: &str) {
        if self.finish_sent || self.handoff.is_some() {
            return;
        }
        tracing::debug!(stream = self.shown_id(), reason, "the pod hands the stream over");
        // No step of a handoff can fail by itself: of what is planned only waits and deaths count, as below.
        fault::pass(Point::HandoffStop);
        self.handoff = Some(Instant::now());
        self.hand_over();
    }

    /// Opens the stream on another pod once the present one has made durable all that it was sent.
    fn hand_over(&mut self) {
        if self.handoff.is_none() || self.window.is_in_flight() || !matches!(self.link, Link::Open(_)) {
            return;
        }
        let (upstream, terms) = (Arc::clone(&self.app.upstream), self.terms_to_go_on());
        self.link = match self.link.take() {
            Link::Open(call) => {
                let from = call.placed.pod.clone();
                Link::Moving(call, Box::pin(upstream.hand_over(terms, from)))
            }
            other => other,
        };
    }

    /// The stream has another pod, or stays where it is: it will be asked again.
    fn moved(&mut self, new: Result<Box<Call>, Error>) -> Result<(), Ended> {
        let since = self.handoff.take();
        let Link::Moving(old, _) = self.link.take() else {
            return Err(broken("a stream that does not move has moved"));
        };
        match new {
            Ok(call) => {
                let pause = since.map(|since| since.elapsed()).unwrap_or_default();
                self.app.metrics.handoff(pause);
                self.terms.last_pod = Some(call.placed.pod.clone());
                fault::pass(Point::HandoffOpened);
                self.app.scope.spawn("leave", leave(old));
                self.resume(call)
            }
            Err(error) => {
                tracing::debug!(stream = self.shown_id(), %error, "no other pod takes the stream: it stays");
                self.link = Link::Open(old);
                Ok(())
            }
        }
    }

    /// Another pod, or the same one, has taken the stream again.
    fn resume(&mut self, call: Box<Call>) -> Result<(), Ended> {
        let (pod, next) = (&call.placed.pod, call.opened.next_offset);
        if self.terms.stream.as_ref() != Some(&call.opened.stream) {
            return Err(broken(&format!("pod {pod} resumed another stream, {}", call.opened.stream)));
        }
        let (held, sent) = (self.window.first_held(), self.window.sent_next());
        if next < held || next > sent {
            return Err(broken(&format!("pod {pod} resumes at offset {next}: {held} to {sent} can be")));
        }
        let frames = self.window.rewind(next);
        self.app.metrics.replayed_frames.inc_by(frames as u64);
        tracing::info!(stream = %call.opened.stream, %pod, next, frames, "stream resumed");
        self.terms.schema_id = self.terms.schema_id.or(call.opened.schema_id);
        self.shown.is_at(&call.placed.pod);
        self.link = Link::Open(call);
        Ok(())
    }

    fn send(&mut self) {
        let Link::Open(call) = &self.link else { return };
        let kind = if self.window.has_unsent() {
            let frames = self.window.next_unsent(REQUEST_BYTES).into_iter().map(to_wire).collect();
            stream_request::Kind::Frames(proto::Frames { frames })
        } else if self.owes_finish()
            && let Some(when) = self.finish
        {
            self.finish_sent = true;
            stream_request::Kind::Finish(proto::Finish { committed: when == FinishWhen::Committed })
        } else {
            return;
        };
        // Only this task fills the queue, and it has just seen room. Where the call has ended the frames are
        // sent again on the next one: its answers say so.
        let _ = call.requests.try_send(StreamRequest { kind: Some(kind) });
    }
}

async fn sleep_until(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}

async fn link_event(link: &mut Link, responding: bool, sending: bool) -> Event {
    let call = match link {
        Link::Opening(opening) => return Event::Reopened(opening.await),
        Link::Moving(_, opening) => return Event::Moved(opening.await),
        Link::Open(call) => call,
    };
    tokio::select! {
        biased; // answers first: they free the window
        response = call.responses.message(), if responding => Event::Response(response),
        Ok(_) = call.requests.reserve(), if sending => Event::CanSend,
        // Nothing to wait for here; or the call takes no more, and its answers will say why.
        () = std::future::pending() => Event::Deadline,
    }
}

/// Tells a pod that its stream goes on elsewhere, and waits until it has heard.
async fn leave(call: Box<Call>) {
    fault::pass(Point::HandoffLeave);
    let Call { requests, mut responses, .. } = *call;
    let kind = stream_request::Kind::Leave(proto::Leave {});
    // A pod that is gone meanwhile need not hear it.
    let _ = requests.try_send(StreamRequest { kind: Some(kind) });
    drop(requests);
    let heard = async { while let Ok(Some(_)) = responses.message().await {} };
    if tokio::time::timeout(LEAVE_TIMEOUT, heard).await.is_err() {
        tracing::debug!("a pod did not answer to the end of a stream's call");
    }
}

fn to_wire(frame: window::Frame) -> proto::Frame {
    let requests = frame.requests.map(proto::RequestSpan::from);
    proto::Frame { first_offset: frame.first_offset, count: frame.count, payload: frame.payload, requests }
}

fn misplaced(expected: u64, records: &Records) -> Option<Error> {
    let got = records.first_offset.filter(|got| *got != expected)?;
    let (code, how) = if got > expected {
        ("offset_gap", "records are missing between them: send without gaps")
    } else {
        ("offset_goes_back", "those were received already: send each record once")
    };
    let message = format!("records frame at offset {got}, expected {expected}: {how}");
    Some(Error::invalid(code, message).at_offset(got))
}

fn after_finish() -> Error {
    Error::invalid("after_finish", "frame after `finish`: open a new stream to send more")
}

pub(crate) fn going_away() -> Error {
    Error::unavailable("gateway_draining", "this gateway is going away: connect again, to any gateway")
}

fn broken(what: &str) -> Ended {
    Ended::Failed(Error::internal(what))
}

/// This session's share of the gateway's gauges; given back when it is dropped. What is taken is counted here, and told
/// once for all that was read in a row: the gateway's counters are every session's.
struct Gauges<'a> {
    app: &'a App,
    window_bytes: i64,
    records: u64,
    payload_bytes: u64,
}

impl<'a> Gauges<'a> {
    fn new(app: &'a App) -> Self {
        app.metrics.streams.inc();
        Self { app, window_bytes: 0, records: 0, payload_bytes: 0 }
    }

    fn take(&mut self, records: &Records) {
        self.records += u64::from(records.count);
        self.payload_bytes += records.payload.len() as u64;
    }

    /// Tells of what was taken, in bytes of payload, since the last time.
    fn taken(&mut self) -> u64 {
        if self.records > 0 {
            self.app.metrics.records.inc_by(std::mem::take(&mut self.records));
            self.app.metrics.bytes.inc_by(self.payload_bytes);
        }
        std::mem::take(&mut self.payload_bytes)
    }

    fn window(&mut self, bytes: usize) {
        let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
        if bytes != self.window_bytes {
            self.app.metrics.window_bytes.inc_by(bytes - self.window_bytes);
            self.window_bytes = bytes;
        }
    }
}

impl Drop for Gauges<'_> {
    fn drop(&mut self) {
        self.taken();
        self.window(0);
        self.app.metrics.streams.dec();
    }
}
