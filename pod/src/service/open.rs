//! Opening a stream: its table, its record, the fences of older sessions, its place in this pod.
//!
//! *Owns*: the steps of an open, and making a table from the first records where that is allowed.
//! *Does not own*: serving the stream afterwards (`service`).

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use sluice_shared::error::{Error, ErrorKind};
use sluice_shared::frame::{Encoding, UnknownFields};
use sluice_shared::ids::{OffsetRange, PodId, SchemaId, SessionId, StreamId, StreamName, TableName};
use sluice_shared::proto;
use sluice_shared::proto::stream_request::Kind as Ask;
use sluice_shared::proto::stream_response::Kind as Answer;
use sluice_shared::requests::Boundary;
use sluice_shared::table::TableSpec;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tonic::Streaming;
use uuid::Uuid;

use super::{End, PodService, StreamAnswer, table_name, tell};
use crate::decode::described::{self, DescribedDecoder};
use crate::decode::{arrow, infer};
use crate::pool::Pool;
use crate::stream::record::{FIRST_SESSION, LogEntry, Records, SessionTerms, StreamRecord};
use crate::stream::{Hold, Opening, Reach};
use crate::table::{Table, rejected};

/// How long the first records of a table are gathered before its schema is inferred from them.
const INFER_WAIT: Duration = Duration::from_millis(200);
/// Bytes of first records that are enough to infer from.
const INFER_BYTES: usize = 1 << 20;
/// How long another pod may take to fence a stream.
const FENCE_TIMEOUT: Duration = Duration::from_secs(35);
/// While it does not answer, its log's note is looked for so often.
const NOTE_INTERVAL: Duration = Duration::from_secs(1);

/// How long the tables' store may take for one step of an open: less than a gateway waits for all of it, so that the
/// producer hears what is wrong, and not that its pod said nothing.
const STORE_TIMEOUT: Duration = Duration::from_secs(6);
/// When a producer is to come again that the store has kept waiting.
const STORE_RETRY_AFTER: Duration = Duration::from_secs(2);

/// What the tables' store answers to a step of an open.
async fn in_time<T>(
    pod: &PodId,
    step: &str,
    asked: impl Future<Output = Result<T, Error>>,
) -> Result<T, Error> {
    let answer = tokio::time::timeout(STORE_TIMEOUT, asked).await;
    answer.unwrap_or_else(|_| Err(store_silent(pod, step)))
}

fn store_silent(pod: &PodId, step: &str) -> Error {
    let message = format!(
        "pod {pod}: the tables' store has not answered within {} s to {step}: streams open again once it does",
        STORE_TIMEOUT.as_secs()
    );
    Error::busy("store_silent", message, STORE_RETRY_AFTER)
}

/// Fences a stream in another pod's log, and answers how far that has it.
async fn fence(
    pool: &Pool,
    table: &Table,
    stream: &StreamId,
    session: SessionId,
    log: &LogEntry,
) -> Result<Reach, Error> {
    let cannot_ask = |why: String| {
        let message = format!(
            "stream {stream}: the log of pod {} may hold records of it, and the pod cannot be asked ({why}); start it \
             again, or wait until its log is taken over where that is in the tables' store; where it is lost for good, give its \
             records up: sluice release --log {}",
            log.pod, log.log.0
        );
        Error::unavailable("log_unreachable", message)
    };
    let mut client = pool.client(&log.pod).ok_or_else(|| cannot_ask("unknown to this pod".to_owned()))?;
    let mut request = tonic::Request::new(proto::FenceRequest {
        table: table.name().as_str().to_owned(),
        stream: stream.as_str().to_owned(),
        session: session.0,
        log: log.log.0.to_string(),
    });
    request.set_timeout(FENCE_TIMEOUT);
    let answer = client.fence(request).await.map_err(|status| cannot_ask(status.to_string()))?.into_inner();
    Ok(Reach { next: answer.durable_next, boundary: answer.requests.map(Boundary::from) })
}

/// An open stream.
pub(super) struct Opened {
    pub(super) hold: Hold,
    /// What came before the stream could take it.
    pub(super) early: Early,
    /// The offset that the gateway was told to send from.
    pub(super) resume_at: u64,
}

/// What a producer sent before its stream could take it.
#[derive(Default)]
pub(super) struct Early {
    pub(super) frames: Vec<proto::Frame>,
    pub(super) finish: Option<proto::Finish>,
}

/// What an open asks for, in the domain's words.
#[derive(Clone)]
struct Wish {
    table: TableName,
    name: Option<StreamName>,
    stream: Option<StreamId>,
    session: SessionId,
    resume_at: Option<u64>,
    stream_end: u64,
    encoding: Encoding,
    unknown: UnknownFields,
    schema: Bytes,
    /// The producer may make the table.
    may_create: bool,
    whole_requests: bool,
    existence: proto::Existence,
    client: Option<String>,
    claim: Uuid,
    moves: bool,
}

impl Wish {
    /// The stream goes on in its session: its gateway knows where.
    fn go_on(&self, id: StreamId, session: SessionId) -> Place {
        let resume_at = self.resume_at.unwrap_or(0);
        let next_offset = resume_at.max(self.stream_end);
        Place { id, session, next_offset, resume_at, requests: 0, released: Vec::new() }
    }

    /// Whether the producer counts its requests, which has to be as durable as its records.
    fn counts_requests(&self) -> bool {
        self.whole_requests && self.name.is_some()
    }

    fn session_terms(&self) -> SessionTerms {
        SessionTerms {
            old: self.existence == proto::Existence::Old,
            encoding: self.counts_requests().then_some(self.encoding),
            client: self.client.clone(),
            claim: self.claim,
        }
    }
}

impl TryFrom<proto::Open> for Wish {
    type Error = Error;

    fn try_from(open: proto::Open) -> Result<Self, Error> {
        let encoding = match open.encoding() {
            proto::Encoding::Json => Encoding::Json,
            proto::Encoding::Arrow => Encoding::Arrow,
            proto::Encoding::Protobuf => Encoding::Protobuf,
            proto::Encoding::Avro => Encoding::Avro,
            proto::Encoding::Unspecified => {
                return Err(Error::invalid("invalid_open", "open: its encoding is not stated"));
            }
        };
        if open.schema.is_empty() && matches!(encoding, Encoding::Protobuf | Encoding::Avro) {
            let message = "open of a protobuf or Avro stream without its schema: give the serialized DescriptorProto, \
                 or the Avro schema's JSON";
            return Err(Error::invalid("missing_schema", message));
        }
        let existence = open.existence();
        let name = Some(open.name).filter(|name| !name.is_empty()).map(|name| name.parse()).transpose()?;
        let stream = Some(open.stream).filter(|id| !id.is_empty()).map(|id| id.parse()).transpose()?;
        if name.is_none() && stream.is_none() {
            return Err(Error::invalid("invalid_open", "open: it names neither a stream nor a stream id"));
        }
        Ok(Self {
            table: table_name(&open.table)?,
            name,
            stream,
            session: SessionId(open.session),
            resume_at: open.resume_at,
            stream_end: open.stream_end,
            encoding,
            unknown: if open.ignore_unknown { UnknownFields::Ignore } else { UnknownFields::Refuse },
            schema: open.schema,
            may_create: !open.may_not_create,
            whole_requests: open.whole_requests,
            existence,
            moves: open.moves,
            claim: Uuid::from_slice(&open.claim).unwrap_or_default(),
            client: Some(open.client).filter(|client| !client.is_empty()),
        })
    }
}

/// A stream's identity and where it goes on.
#[derive(Clone)]
struct Place {
    id: StreamId,
    session: SessionId,
    /// First offset that no log and no table has, as far as the pod must ask.
    next_offset: u64,
    /// First offset that the call sends.
    resume_at: u64,
    /// Of a stream that counts its requests: how many end there or before.
    requests: u64,
    /// What an operator has given up of it.
    released: Vec<OffsetRange>,
}

/// The parts of a call that an open needs.
pub(super) struct Opener<'a> {
    pub(super) service: &'a PodService,
    pub(super) requests: &'a mut Streaming<proto::StreamRequest>,
    pub(super) answers: &'a mpsc::Sender<StreamAnswer>,
}

impl Opener<'_> {
    pub(super) async fn open(mut self, open: proto::Open) -> Result<Opened, End> {
        let wish = Wish::try_from(open).map_err(End::Failed)?;
        if wish.table.as_str().ends_with(rejected::SUFFIX) {
            let message =
                format!("table {} takes no records from producers: it is for rejected ones", wish.table);
            return Err(End::Failed(Error::invalid("reserved_table", message)));
        }
        self.service.duty.check_open().map_err(End::Failed)?;
        self.service.admission.check_open().map_err(End::Failed)?;
        match self.table(&wish).await.map_err(End::Failed)? {
            Some(table) => {
                // Before a session is begun: what does not fit must not fence a producer that does.
                let described =
                    DescribedDecoder::new(wish.encoding, table.schema(), &wish.schema, wish.unknown);
                let described = described.map_err(End::Failed)?;
                let place = self.place(&wish, &table).await.map_err(End::Failed)?;
                let schema = table.schema_id();
                let opened = self.hold(&wish, table, &place, described).map_err(End::Failed)?;
                self.tell_opened(&place, opened.hold.stream.next_offset(), Some(schema)).await?;
                Ok(opened)
            }
            None => self.open_with_inferred_table(&wish).await,
        }
    }

    /// The table, made from the stated schema where it does not exist; None where it is to be inferred.
    async fn table(&self, wish: &Wish) -> Result<Option<Table>, Error> {
        match in_time(&self.service.log.pod, "open a table", self.service.tables.open(&wish.table)).await {
            Ok(table) => {
                if !wish.schema.is_empty() && matches!(wish.encoding, Encoding::Json | Encoding::Arrow) {
                    let mut decoder = arrow::ArrowDecoder::new(table.schema().clone(), 0);
                    decoder.check_schema(&wish.schema, wish.unknown)?;
                }
                Ok(Some(table))
            }
            Err(error) if error.kind != ErrorKind::NotFound => Err(error),
            // Where nobody makes tables by sending, that is the reason.
            Err(_) if !wish.may_create && (self.service.auto_create || !wish.schema.is_empty()) => {
                Err(may_not_create(&wish.table))
            }
            Err(_) if !wish.schema.is_empty() => {
                let schema = match described::table_schema(wish.encoding, &wish.schema)? {
                    Some(schema) => schema,
                    None => TableSpec::normalise(&*arrow::decode_schema(&wish.schema)?)?,
                };
                self.create_or_open(wish, TableSpec::new(schema, Vec::new(), BTreeMap::new())?)
                    .await
                    .map(Some)
            }
            // A stream that is to outlive its gateway needs a table to outlive it in.
            Err(_) if self.service.auto_create && wish.existence == proto::Existence::Any => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Another stream may be faster; then its table counts.
    async fn create_or_open(&self, wish: &Wish, spec: TableSpec) -> Result<Table, Error> {
        match self.service.tables.create(&wish.table, spec).await {
            Err(error) if error.code == "table_exists" => self.service.tables.open(&wish.table).await,
            other => other,
        }
    }

    async fn place(&self, wish: &Wish, table: &Table) -> Result<Place, Error> {
        match (&wish.name, &wish.stream) {
            (None, Some(id)) => Ok(wish.go_on(id.clone(), wish.session)),
            (Some(name), _) => self.named(table, name, wish).await,
            (None, None) => Err(Error::internal("an open without a stream was let through")),
        }
    }

    fn hold(
        &self,
        wish: &Wish,
        table: Table,
        place: &Place,
        described: Option<DescribedDecoder>,
    ) -> Result<Opened, Error> {
        let Place { id, session, next_offset, resume_at, released, .. } = place.clone();
        let Wish { encoding, unknown, whole_requests, .. } = *wish;
        let opening = Opening {
            id,
            session,
            table,
            encoding,
            unknown,
            whole_requests,
            described,
            has_moved: wish.moves,
            released,
        };
        let decoded_bytes_max = self.service.decoded_bytes_max;
        let hold = self.service.streams.open(opening, next_offset, resume_at, decoded_bytes_max)?;
        Ok(Opened { hold, early: Early::default(), resume_at })
    }

    /// Begins a new session of a named stream, or goes on in the one that the gateway names.
    async fn named(&self, table: &Table, name: &StreamName, wish: &Wish) -> Result<Place, Error> {
        let (records, ours) = (Records::new(table.store(), name.clone()), &self.service.log);
        if wish.session.0 > 0 {
            let terms = wish.session_terms();
            let joined = records.join_session(wish.session, ours, &terms);
            let record = in_time(&self.service.log.pod, "go on with a named stream", joined).await?;
            let released = given_up(&record);
            return Ok(Place { released, ..wish.go_on(record.stream(), wish.session) });
        }
        let terms = wish.session_terms();
        let begun = records.begin_session(ours, &terms);
        let record = in_time(&self.service.log.pod, "open a named stream", begun).await?;
        let (id, session, released) = (record.stream(), record.session, given_up(&record));
        let (in_log, in_other_logs) = self.service.fence_all(table, &record).await?;
        let in_table =
            in_time(&self.service.log.pod, "say how far a stream is in its table", table.watermark(&id))
                .await?;
        if record.logs.len() > 1 && in_other_logs.next <= in_table.next {
            records.keep_only(&record, ours).await?;
        }
        let Reach { next: next_offset, boundary } = in_table.max(in_log).max(in_other_logs);
        if wish.counts_requests() {
            let Boundary { offset, requests } = boundary.unwrap_or_default();
            return Ok(Place { id, session, next_offset, resume_at: offset, requests, released });
        }
        let resume_at = wish.resume_at.map_or(next_offset, |resume_at| resume_at.min(next_offset));
        Ok(Place { id, session, next_offset, resume_at, requests: 0, released })
    }

    /// Opens first, so that the producer sends; then makes the table from what it sent.
    async fn open_with_inferred_table(&mut self, wish: &Wish) -> Result<Opened, End> {
        // There is no table, so there can be no record of an older session either.
        let id = match (&wish.stream, &wish.name) {
            (Some(id), _) => id.clone(),
            (None, Some(name)) => StreamId::named(name, 0),
            (None, None) => {
                return Err(End::Failed(Error::internal("an open without a stream was let through")));
            }
        };
        let is_new = wish.session.0 == 0;
        let wish = Wish {
            session: FIRST_SESSION,
            resume_at: wish.resume_at.filter(|_| !is_new),
            schema: Bytes::new(),
            ..wish.clone()
        };
        let place = wish.go_on(id, FIRST_SESSION);
        self.tell_opened(&place, place.next_offset, None).await?;
        let early = self.first_frames().await?;
        let Some(first) = early.frames.first() else {
            // Finished without a record: nothing to make a table from, and nothing to wait for.
            let told = tell(self.answers, Answer::Finished(proto::Finished {})).await;
            return Err(if told { End::Finished } else { End::Detached });
        };
        let spec = inferred(wish.encoding, &early.frames);
        let spec = spec.map_err(|error| End::Failed(error.at_offset(first.first_offset)))?;
        let table = self.create_or_open(&wish, spec).await.map_err(End::Failed)?;
        if let Some(name) = &wish.name {
            // It was opened as a new stream before there was a table: another producer may have been faster.
            let records = Records::new(table.store(), name.clone());
            let joined = records.join_session(FIRST_SESSION, &self.service.log, &wish.session_terms()).await;
            joined.map_err(End::Failed)?;
        }
        let opened = self.hold(&wish, table, &place, None).map_err(End::Failed)?;
        Ok(Opened { early, ..opened })
    }

    /// The frames of the first moments: at least one, unless the producer finishes without.
    async fn first_frames(&mut self) -> Result<Early, End> {
        let mut early = Early::default();
        let mut bytes = 0;
        let mut enough_at = None;
        while bytes < INFER_BYTES {
            let enough = async {
                match enough_at {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            let request = tokio::select! {
                biased; // what has come is taken before the waiting ends
                request = self.requests.message() => request,
                () = enough => break,
            };
            let Ok(Some(request)) = request else { return Err(End::Detached) };
            match request.kind {
                Some(Ask::Frames(more)) => {
                    bytes += more.frames.iter().map(|frame| frame.payload.len()).sum::<usize>();
                    early.frames.extend(more.frames);
                    enough_at.get_or_insert(Instant::now() + INFER_WAIT);
                }
                Some(Ask::Finish(finish)) => {
                    early.finish = Some(finish);
                    break;
                }
                Some(Ask::Open(_) | Ask::Leave(_)) | None => {
                    return Err(End::Failed(super::unexpected_message()));
                }
            }
        }
        Ok(early)
    }

    async fn tell_opened(&self, place: &Place, stream_end: u64, schema: Option<SchemaId>) -> Result<(), End> {
        let opened = proto::Opened {
            stream: place.id.as_str().to_owned(),
            session: place.session.0,
            next_offset: place.resume_at,
            stream_end,
            schema_id: schema.map_or(0, |schema| schema.0),
            schema_pinned: schema.is_some(),
            requests: place.requests,
        };
        if tell(self.answers, Answer::Opened(opened)).await { Ok(()) } else { Err(End::Detached) }
    }
}

fn given_up(record: &StreamRecord) -> Vec<OffsetRange> {
    record.released.iter().map(|(start, end)| OffsetRange { start: *start, end: *end }).collect()
}

fn may_not_create(table: &TableName) -> Error {
    let message = format!(
        "there is no table {table}, and the producer's token lacks the privilege `create` to make it: grant it in \
         gateway.clients, or make the table first"
    );
    Error::forbidden("missing_privilege", message)
}

impl PodService {
    /// Fences all sessions of a stream before the record's, in every log that may hold some of it. Answers what this
    /// pod's log holds, and what the others do.
    async fn fence_all(&self, table: &Table, record: &StreamRecord) -> Result<(Reach, Reach), Error> {
        let (id, session) = (record.stream(), record.session);
        let (mut in_log, mut in_others) = (Reach::default(), Reach::default());
        for log in &record.logs {
            if *log == self.log {
                in_log = in_log.max(self.streams.fence(table.id(), &id, session).await?);
                continue;
            }
            tokio::select! {
                biased; // what the pod itself answers is the newest
                answer = fence(&self.pool, table, &id, session, log) => match answer {
                    Ok(reach) => in_others = in_others.max(reach),
                    // Its pod may have drained and gone for good. The session is recorded already: see `drained`.
                    Err(error) => {
                        if !self.tables.drained_logs().holds_nothing(log.log).await? {
                            return Err(error);
                        }
                    }
                },
                // Its pod hangs, and another one takes its log over meanwhile.
                () = self.done_with(log) => {}
            }
        }
        Ok((in_log, in_others))
    }

    /// Resolves when a log is noted to hold nothing, later than a pod that is well takes to answer.
    async fn done_with(&self, log: &LogEntry) {
        loop {
            tokio::time::sleep(NOTE_INTERVAL).await;
            // An error is told by whoever asks the pod.
            if self.tables.drained_logs().holds_nothing(log.log).await.unwrap_or(false) {
                return;
            }
        }
    }

    /// Ends a named stream for good. What it has in logs still goes into the table.
    pub(super) async fn retire_stream(
        &self,
        table: &TableName,
        name: StreamName,
        client: &str,
    ) -> Result<(), Error> {
        let table = self.tables.open(table).await?;
        let client = Some(client).filter(|client| !client.is_empty());
        let record = Records::new(table.store(), name).retire(client).await?;
        self.fence_all(&table, &record).await.map(|_| ())
    }
}

/// What a table has to look like for these records to fit.
fn inferred(encoding: Encoding, frames: &[proto::Frame]) -> Result<TableSpec, Error> {
    let schema = match encoding {
        Encoding::Json => {
            let payloads: Vec<&[u8]> = frames.iter().map(|frame| frame.payload.as_ref()).collect();
            infer::infer(&payloads.join(&b'\n'))?
        }
        Encoding::Arrow => TableSpec::normalise(&*arrow::decode_schema(&frames[0].payload)?)?,
        Encoding::Protobuf | Encoding::Avro => {
            return Err(Error::internal("a table for records that need a schema is not inferred"));
        }
    };
    TableSpec::new(schema, Vec::new(), BTreeMap::new())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_store_that_does_not_answer_is_told_as_busy_before_a_gateway_gives_up() {
        const GATEWAY_WAITS: Duration = Duration::from_secs(10);
        let pod: PodId = "pod-1".parse().expect("valid");
        let asked = in_time(&pod, "open a named stream", std::future::pending::<Result<(), Error>>());
        let error = tokio::time::timeout(GATEWAY_WAITS, asked).await.expect("in time").expect_err("silent");
        assert_eq!((error.kind, error.code.as_str()), (ErrorKind::Busy, "store_silent"), "{error}");
        for part in ["pod pod-1", "the tables' store has not answered", "open a named stream"] {
            assert!(error.message.contains(part), "{part:?} is not in {error}");
        }
        let answered = in_time(&pod, "open a table", async { Ok(7) }).await;
        assert_eq!(answered.expect("it answers"), 7);
    }
}
