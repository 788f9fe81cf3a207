//! What the streaming calls of Zerobus have in common.
//!
//! *Owns*: the order of requests and answers, the map from requests to records, the form and the pace of failures.
//! *Does not own*: the messages of either call (`zerobus`, `flight`).

use std::collections::VecDeque;
use std::time::Duration;

use sluice_shared::error::{Error, ErrorKind};
use sluice_shared::frame::FinishWhen;
use sluice_shared::ids::{OffsetRange, TableName};
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout, timeout_at};
use tonic::metadata::MetadataMap;
use tonic::{Code, Extensions, Status, Streaming};

use super::details::details;
use crate::app::{App, Connection, Pause};
use crate::auth::{Credential, Privilege};
use crate::edge::framed;
use crate::edge::grpc::CallEnd;
use crate::session::{self, Ended, Input};

/// Names the table in each call's headers; clients with headers of their own may leave it out.
const TABLE_HEADER: &str = "x-databricks-zerobus-table-name";
/// After a failure that may pass clients reconnect at once, some 800 times a second: they are told this much later.
const TARPIT: Duration = Duration::from_secs(1);

/// Code of a request that leaves some out.
const OFFSET_BEYOND_END: &str = "offset_beyond_end";

fn table_header(headers: &MetadataMap) -> Result<Option<TableName>, Error> {
    let Some(value) = headers.get(TABLE_HEADER) else { return Ok(None) };
    let text = value.to_str().map_err(|_| {
        Error::invalid("invalid_table_name", format!("header {TABLE_HEADER} is not printable ASCII"))
    })?;
    Ok(Some(text.parse()?))
}

/// Who calls, and for which table where the headers name it: whoever may not is told so before a stream begins. The stream
/// itself is judged where all are.
pub(super) fn admit(headers: &MetadataMap, app: &App) -> Result<(Option<TableName>, Credential), Status> {
    let credential = Credential::of(headers.as_ref());
    let admitted = app.auth.access(&credential).and_then(|access| {
        let table = table_header(headers)?;
        table.iter().try_for_each(|table| access.check(table, Privilege::Write).map(drop))?;
        Ok(table)
    });
    match admitted {
        Ok(table) => Ok((table, credential)),
        Err(error) => {
            app.metrics.error(&error);
            Err(status(&error))
        }
    }
}

pub(super) fn status(error: &Error) -> Status {
    let code = match error.kind {
        // Clients open a stream again after any other code: two of them would fence each other for ever.
        ErrorKind::Fenced => Code::InvalidArgument,
        _ if error.code == OFFSET_BEYOND_END => Code::OutOfRange,
        _ => Status::from(error.clone()).code(),
    };
    let mut message = error.message.clone();
    if let Some(column) = &error.column {
        message = format!("column {column}: {message}");
    }
    let message = format!("{message} [{}]", error.code);
    let details = details(code, &message, error);
    Status::with_details(code, message, details)
}

/// A streaming call: its requests in, its answers out, and what of it is durable.
pub(super) struct Call<Q, A> {
    requests: Streaming<Q>,
    pub(super) answers: Answers<A>,
    pub(super) sent: Requests,
    /// The client has been told that its stream is open.
    pub(super) opened: bool,
    /// The client has half-closed.
    finished: bool,
    /// What a client is to do about a message that is too large.
    advice: &'static str,
    /// Of the connection that carries the call.
    pause: Option<Pause>,
    end: CallEnd,
}

const SLOW_CONSUMER: &str = "slow_consumer";
/// Until `carried` says what is configured.
const WRITE_TIMEOUT: Duration = Duration::from_secs(30);

impl<Q: Send + 'static, A: Send> Call<Q, A> {
    pub(super) fn new(
        requests: Streaming<Q>,
        answers: mpsc::Sender<Result<A, Status>>,
        advice: &'static str,
    ) -> Self {
        let answers = Answers {
            sender: answers,
            waiting: VecDeque::new(),
            stalled_since: None,
            write_timeout: WRITE_TIMEOUT,
        };
        let (sent, end) = (Requests::default(), CallEnd::default());
        Self { requests, answers, sent, opened: false, finished: false, advice, pause: None, end }
    }

    /// `of_request`: the extensions of the call's request, which say how it is carried.
    pub(super) fn carried(mut self, of_request: &Extensions, app: &App) -> Self {
        self.answers.write_timeout = app.config.write_timeout();
        self.pause = of_request.get::<Connection>().cloned().map(Pause::of);
        self.end = of_request.get::<CallEnd>().cloned().unwrap_or_default();
        self
    }

    /// The first request. None where it does not come in time.
    pub(super) async fn first(&mut self, app: &App) -> Result<Option<Q>, Ended> {
        let first = tokio::select! {
            biased; // drain first: the client may never say anything
            () = app.scope.draining() => return Err(Ended::Failed(session::going_away())),
            first = tokio::time::timeout(app.config.handshake_timeout(), self.requests.message()) => first,
        };
        match first {
            Ok(Ok(Some(first))) => Ok(Some(first)),
            Ok(Ok(None) | Err(_)) => Err(Ended::Gone),
            Err(_) => Ok(None),
        }
    }

    /// The next request, or what the session is to know instead. May be dropped at any time.
    pub(super) async fn next(&mut self, read: bool) -> Result<Q, Input> {
        if let Some(pause) = &mut self.pause {
            pause.set(!read);
        }
        let reading = read && !self.finished;
        let request = if reading && self.answers.has_room() {
            tokio::select! {
                biased; // requests first: whether the call has ended takes locks to see, and is seen when none comes
                request = self.requests.message() => request,
                left = self.answers.progress() => return Err(left),
            }
        } else {
            tokio::select! {
                biased; // what was told leaves first: acks let the client go on
                left = self.answers.progress() => return Err(left),
                request = self.requests.message(), if reading => request,
            }
        };
        match request {
            Ok(Some(request)) => Ok(request),
            Ok(None) => {
                self.finished = true;
                Err(Input::Finish(FinishWhen::Durable))
            }
            Err(error) if error.code() == Code::OutOfRange => {
                let message = format!("{}: {}", error.message(), self.advice);
                Err(Input::Refused(Error::invalid("record_too_large", message)))
            }
            Err(error) if error.code() == Code::DeadlineExceeded => {
                Err(Input::Refused(framed::frame_timeout()))
            }
            Err(_) => Err(Input::Gone("connection lost")),
        }
    }

    /// Ends the call as the session did.
    pub(super) async fn close(self, ended: Ended, app: &App) {
        if self.answers.is_stalled() {
            let message = format!("took no answers for {:?}", self.answers.write_timeout);
            app.metrics.error(&Error::busy(SLOW_CONSUMER, message, Duration::ZERO));
            return self.end.cut_off();
        }
        let Ended::Failed(error) = ended else { return };
        let error = self.sent.placed(error);
        tracing::info!(code = error.code, %error, "zerobus stream refused");
        app.metrics.error(&error);
        if self.opened && error.retryable {
            tokio::select! {
                biased; // the gateway's end does not wait for it
                () = app.scope.cancelled() => {}
                () = tokio::time::sleep(TARPIT) => {}
            }
        }
        let told = timeout(self.answers.write_timeout, self.answers.sender.send(Err(status(&error)))).await;
        // A client that is gone needs no answer.
        if told.is_err() {
            self.end.cut_off();
        }
    }
}

/// Answers on their way to a call.
pub(super) struct Answers<T> {
    sender: mpsc::Sender<Result<T, Status>>,
    /// Told, and not yet taken by the call.
    waiting: VecDeque<T>,
    /// While the call takes none.
    stalled_since: Option<Instant>,
    write_timeout: Duration,
}

impl<T: Send> Answers<T> {
    /// Hands over what the call takes without waiting.
    pub(super) fn tell(&mut self, answer: T) {
        self.waiting.push_back(answer);
        while let Ok(room) = self.sender.try_reserve() {
            let Some(answer) = self.waiting.pop_front() else { return };
            room.send(Ok(answer));
        }
    }

    pub(super) fn has_room(&self) -> bool {
        self.waiting.is_empty() && self.sender.capacity() > 0
    }

    pub(super) fn is_clear(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Resolves when there is room again, or the call has ended, or should. May be dropped at any time.
    async fn progress(&mut self) -> Input {
        if self.has_room() {
            self.stalled_since = None;
            self.sender.closed().await;
            return Input::Gone("call ended");
        }
        let since = *self.stalled_since.get_or_insert_with(Instant::now);
        match timeout_at(since + self.write_timeout, self.sender.reserve()).await {
            Err(_) => Input::Gone(SLOW_CONSUMER),
            Ok(Err(_)) => Input::Gone("call ended"),
            Ok(Ok(room)) => {
                self.stalled_since = None;
                if let Some(answer) = self.waiting.pop_front() {
                    room.send(Ok(answer));
                }
                Input::Cleared
            }
        }
    }

    fn is_stalled(&self) -> bool {
        let since = self.stalled_since.filter(|_| !self.sender.is_closed());
        since.is_some_and(|since| since.elapsed() >= self.write_timeout)
    }
}

/// Requests whose records are not all durable.
#[derive(Debug, Default)]
pub(super) struct Requests {
    /// By rising offset.
    open: VecDeque<Sent>,
    /// Offset of the next request.
    next: i64,
    /// One more than the offset of the last record.
    records_end: u64,
    /// How many records are durable.
    pub(super) durable_next: u64,
}

/// Where a request stands in its stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    Next,
    /// It was sent before.
    Duplicate,
}

/// A request that was received.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sent {
    offset: i64,
    records: OffsetRange,
}

impl Requests {
    /// The stream has `requests` requests, whose records end before `next_offset`.
    pub(super) fn begin(&mut self, requests: u64, next_offset: u64) {
        self.next = i64::try_from(requests).unwrap_or(i64::MAX);
        (self.records_end, self.durable_next) = (next_offset, next_offset);
    }

    /// Takes a request of `records` records. With `again` one that was sent before is no error.
    ///
    /// # Errors
    /// An offset that is not the next one.
    pub(super) fn push(&mut self, offset: Option<i64>, records: u32, again: bool) -> Result<Place, Error> {
        let expected = self.next;
        let got = offset.ok_or_else(|| Error::invalid("missing_offset", "a request without `offset_id`"))?;
        if again && (0..expected).contains(&got) {
            return Ok(Place::Duplicate);
        }
        if got != expected {
            let message = format!("Non-incremental offset: expected {expected}, actual {got}");
            return Err(Error::invalid(if again { OFFSET_BEYOND_END } else { "offset_gap" }, message));
        }
        self.next += 1;
        let start = self.records_end;
        self.records_end += u64::from(records);
        self.open.push_back(Sent { offset: got, records: OffsetRange { start, end: self.records_end } });
        Ok(Place::Next)
    }

    /// The last request that is newly covered, when all records before `next` are durable.
    pub(super) fn durable(&mut self, next: u64) -> Option<i64> {
        self.durable_next = self.durable_next.max(next);
        let mut last = None;
        while self.open.front().is_some_and(|sent| sent.records.end <= self.durable_next) {
            last = self.open.pop_front().map(|sent| sent.offset);
        }
        last
    }

    /// An error of a record says where the client has it.
    fn placed(&self, mut error: Error) -> Error {
        if let Some(record) = error.offset {
            let (request, record) = match self.request_of(record) {
                Some((request, record)) => (format!("request {request}, "), record),
                None => (String::new(), record),
            };
            let column = error.column.take().map(|column| format!(", column {column}")).unwrap_or_default();
            error.message = format!("{request}record {record}{column}: {}", error.message);
        }
        error
    }

    /// The request that holds a record, and the record's place in it.
    fn request_of(&self, record: u64) -> Option<(i64, u64)> {
        let at = self.open.partition_point(|sent| sent.records.end <= record);
        let sent = self.open.get(at).filter(|sent| sent.records.contains(record))?;
        Some((sent.offset, record - sent.records.start))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn requests(records: &[u32]) -> Requests {
        let mut requests = Requests::default();
        for (offset, records) in records.iter().enumerate() {
            requests.push(Some(offset as i64), *records, false).expect("in order");
        }
        requests
    }

    #[test]
    fn a_request_is_acked_when_all_its_records_are_durable_and_only_once() {
        let mut requests = requests(&[1, 3, 0, 2]);
        assert_eq!(requests.durable(1), Some(0));
        assert_eq!(requests.durable(3), None);
        assert_eq!(requests.durable(4), Some(2));
        assert_eq!(requests.durable(4), None);
        assert_eq!(requests.durable(6), Some(3));
    }

    #[test]
    fn an_error_names_request_and_record() {
        let error = Error::invalid("wrong_type", "expected a number").at_offset(2).at_column("n".to_owned());
        let placed = requests(&[1, 3, 2]).placed(error);
        assert_eq!(placed.message, "request 1, record 1, column n: expected a number");
    }

    #[test]
    fn a_stream_that_goes_on_counts_from_where_it_was() {
        let mut requests = Requests::default();
        requests.begin(4, 100);
        assert_eq!(requests.push(Some(3), 9, true), Ok(Place::Duplicate));
        assert_eq!(requests.push(Some(4), 2, true), Ok(Place::Next));
        assert_eq!(requests.push(Some(4), 2, true), Ok(Place::Duplicate));
        assert_eq!(requests.push(Some(6), 1, true).expect_err("gap").code, OFFSET_BEYOND_END);
        assert_eq!(requests.durable(101), None);
        assert_eq!(requests.durable(102), Some(4));
    }

    #[test]
    fn offsets_are_every_number_once() {
        let mut requests = requests(&[1, 1]);
        assert_eq!(requests.push(Some(1), 1, false).expect_err("again").code, "offset_gap");
        assert_eq!(requests.push(Some(3), 1, false).expect_err("gap").code, "offset_gap");
        assert_eq!(requests.push(None, 1, false).expect_err("none").code, "missing_offset");
        requests.push(Some(2), 1, false).expect("the next one");
    }
}
