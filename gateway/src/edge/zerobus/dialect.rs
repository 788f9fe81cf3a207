//! The two streaming calls of the service, which say the same in different messages.
//!
//! *Owns*: the messages of `EphemeralStream` and `PersistentStream`.
//! *Does not own*: what they mean (`zerobus`).

use sluice_shared::proto::zerobus::{
    self, CloseStreamSignal, CreateIngestStreamRequest, CreateIngestStreamResponse, EphemeralStreamRequest,
    EphemeralStreamResponse, IngestRecordBatchRequest, IngestRecordRequest, IngestRecordResponse,
    PersistentStreamRequest, PersistentStreamResponse, ResumeIngestStreamRequest, ResumeIngestStreamResponse,
    ephemeral_stream_request, ephemeral_stream_response, persistent_stream_request,
    persistent_stream_response,
};

/// What a client asks.
pub(super) enum Ask {
    Create(CreateIngestStreamRequest),
    Resume(ResumeIngestStreamRequest),
    Record(IngestRecordRequest),
    Batch(IngestRecordBatchRequest),
}

/// What it is answered.
pub(super) enum Answer {
    Created(CreateIngestStreamResponse),
    Resumed(ResumeIngestStreamResponse),
    Ack(IngestRecordResponse),
    Close(CloseStreamSignal),
}

/// The messages of one call.
pub(super) trait Dialect: Send + 'static {
    type Request: Send + 'static;
    type Response: Send + 'static;
    /// Whether its streams outlive their calls.
    const IS_PERSISTENT: bool;

    /// None for a kind that is not known.
    fn read(request: Self::Request) -> Option<Ask>;

    fn write(answer: Answer) -> Self::Response;
}

/// At least once: a stream ends with its call.
pub(super) struct Ephemeral;

impl Dialect for Ephemeral {
    type Request = EphemeralStreamRequest;
    type Response = EphemeralStreamResponse;
    const IS_PERSISTENT: bool = false;

    fn read(request: EphemeralStreamRequest) -> Option<Ask> {
        use ephemeral_stream_request::Payload;
        Some(match request.payload? {
            Payload::CreateStream(create) => Ask::Create(create),
            Payload::IngestRecord(record) => Ask::Record(record),
            Payload::IngestRecordBatch(batch) => Ask::Batch(batch),
        })
    }

    fn write(answer: Answer) -> EphemeralStreamResponse {
        use ephemeral_stream_response::Payload;
        let payload = match answer {
            Answer::Created(created) => Some(Payload::CreateStreamResponse(created)),
            Answer::Ack(ack) => Some(Payload::IngestRecordResponse(ack)),
            Answer::Close(close) => Some(Payload::CloseStreamSignal(close)),
            Answer::Resumed(_) => None, // nobody can have asked for it
        };
        EphemeralStreamResponse { payload }
    }
}

/// Exactly once: a stream is resumed by its id.
pub(super) struct Persistent;

impl Dialect for Persistent {
    type Request = PersistentStreamRequest;
    type Response = PersistentStreamResponse;
    const IS_PERSISTENT: bool = true;

    fn read(request: PersistentStreamRequest) -> Option<Ask> {
        use persistent_stream_request::Payload;
        Some(match request.payload? {
            Payload::CreateStream(create) => Ask::Create(create.create_stream.unwrap_or_default()),
            Payload::ResumeStream(resume) => Ask::Resume(resume),
            Payload::IngestRecord(record) => Ask::Record(record),
            Payload::IngestRecordBatch(batch) => Ask::Batch(batch),
        })
    }

    fn write(answer: Answer) -> PersistentStreamResponse {
        use persistent_stream_response::Payload;
        PersistentStreamResponse {
            payload: Some(match answer {
                Answer::Created(created) => Payload::CreateStreamResponse(created),
                Answer::Resumed(resumed) => Payload::ResumeStreamResponse(resumed),
                Answer::Ack(ack) => Payload::IngestRecordResponse(ack),
                Answer::Close(close) => Payload::CloseStreamSignal(close),
            }),
        }
    }
}

/// An answer to a stream that was opened.
pub(super) fn created(stream_id: String) -> Answer {
    Answer::Created(CreateIngestStreamResponse { stream_id: Some(stream_id) })
}

/// An answer to a stream of which that many requests are durable.
pub(super) fn resumed(requests: u64) -> Answer {
    let last_committed_offset = requests.checked_sub(1).and_then(|last| i64::try_from(last).ok());
    Answer::Resumed(ResumeIngestStreamResponse { last_committed_offset })
}

/// All requests up to this one are durable.
pub(super) fn ack(offset: i64) -> Answer {
    Answer::Ack(IngestRecordResponse { durability_ack_up_to_offset: Some(offset) })
}

/// The gateway goes away after so long.
pub(super) fn close(after_ms: u64) -> Answer {
    let seconds = Some(i64::try_from(after_ms / 1000).unwrap_or(i64::MAX));
    let nanos = Some((after_ms % 1000) as i32 * 1_000_000);
    Answer::Close(CloseStreamSignal { duration: Some(zerobus::Duration { seconds, nanos }) })
}
