//! Zerobus's persistent streams as their clients use them, with a scripted pod behind the gateway.

use bytes::Bytes;
use sluice_gateway::Gateway;
use sluice_shared::error::Error;
use sluice_shared::proto::Existence;
use sluice_shared::proto::zerobus::ingest_record_request::Record;
use sluice_shared::proto::zerobus::persistent_stream_request::Payload as Ask;
use sluice_shared::proto::zerobus::persistent_stream_response::Payload as Answer;
use sluice_shared::proto::zerobus::zerobus_client::ZerobusClient;
use sluice_shared::proto::zerobus::{
    self, CreatePersistentStreamRequest, PersistentStreamRequest, PersistentStreamResponse, RecordType,
    ResumeIngestStreamRequest, RetireStreamRequest, resume_ingest_stream_request, retire_stream_request,
};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status, Streaming};

use crate::harness::{FakePod, gateway, soon};

struct Call {
    requests: mpsc::Sender<PersistentStreamRequest>,
    answers: Streaming<PersistentStreamResponse>,
}

fn create(record_type: RecordType) -> Ask {
    let create = zerobus::CreateIngestStreamRequest {
        table_name: Some("flights".to_owned()),
        record_type: Some(record_type.into()),
        avro_schema_json: Some("{}".to_owned()),
        ..Default::default()
    };
    Ask::CreateStream(CreatePersistentStreamRequest { create_stream: Some(create) })
}

fn resume(id: &str) -> Ask {
    let identifier = Some(resume_ingest_stream_request::Identifier::StreamId(id.to_owned()));
    let record_type = Some(RecordType::Json.into());
    Ask::ResumeStream(ResumeIngestStreamRequest { identifier, record_type, descriptor_proto: None })
}

impl Call {
    async fn begin(gateway: &Gateway, first: Ask) -> Self {
        let mut client = client(gateway).await;
        let (requests, receiver) = mpsc::channel(64);
        let answers = soon("headers", client.persistent_stream(ReceiverStream::new(receiver))).await;
        let call = Self { requests, answers: answers.expect("headers").into_inner() };
        call.send(first).await;
        call
    }

    async fn created(gateway: &Gateway) -> (Self, String) {
        let mut call = Self::begin(gateway, create(RecordType::Json)).await;
        match call.answer().await.expect("created") {
            Answer::CreateStreamResponse(created) => (call, created.stream_id.expect("an id")),
            other => panic!("{other:?}"),
        }
    }

    async fn resumed(gateway: &Gateway, id: &str) -> (Self, Option<i64>) {
        let mut call = Self::begin(gateway, resume(id)).await;
        match call.answer().await.expect("resumed") {
            Answer::ResumeStreamResponse(resumed) => (call, resumed.last_committed_offset),
            other => panic!("{other:?}"),
        }
    }

    async fn send(&self, ask: Ask) {
        soon("sending", self.requests.send(PersistentStreamRequest { payload: Some(ask) }))
            .await
            .expect("sent");
    }

    async fn record(&self, offset: i64) {
        let record = Some(Record::JsonRecord(Bytes::from_static(b"{}")));
        self.send(Ask::IngestRecord(zerobus::IngestRecordRequest { offset_id: Some(offset), record })).await;
    }

    async fn answer(&mut self) -> Result<Answer, Status> {
        let answer = soon("an answer", self.answers.message()).await?;
        Ok(answer.expect("not the end").payload.expect("a payload"))
    }

    async fn acked(&mut self) -> i64 {
        match self.answer().await.expect("an ack") {
            Answer::IngestRecordResponse(ack) => ack.durability_ack_up_to_offset.expect("an offset"),
            other => panic!("{other:?}"),
        }
    }

    async fn code(&mut self) -> Code {
        loop {
            if let Err(status) = self.answer().await {
                return status.code();
            }
        }
    }
}

async fn client(gateway: &Gateway) -> ZerobusClient<tonic::transport::Channel> {
    ZerobusClient::connect(format!("http://{}", gateway.address())).await.expect("connects")
}

#[tokio::test]
async fn a_stream_is_resumed_by_its_id_behind_its_last_durable_request() {
    let pod = FakePod::start("pod-1");
    let gateway = gateway(&[&pod]).await;
    let (mut call, id) = Call::created(&gateway).await;
    call.record(0).await;
    assert_eq!(call.acked().await, 0);
    // Three requests of seven records are durable, whatever was acked.
    pod.tell(|memory| (memory.next_offset, memory.requests) = (7, 3));
    let (mut call, last) = Call::resumed(&gateway, &id).await;
    assert_eq!(last, Some(2));
    call.record(3).await;
    assert_eq!(call.acked().await, 3);
    pod.see(|memory| {
        let existence: Vec<_> = memory.opens.iter().map(|open| open.existence()).collect();
        assert_eq!(existence, [Existence::New, Existence::Old]);
        assert_eq!(memory.opens[0].name, memory.opens[1].name);
        assert_eq!(memory.opens[1].table, "main.default.flights");
        let frame = memory.frames[1].last().expect("a frame");
        let span = frame.requests.clone().expect("counted");
        assert_eq!((frame.first_offset, span.start_offset, span.start_requests), (7, 7, 3));
    });
}

#[tokio::test]
async fn of_a_new_stream_nothing_is_committed() {
    let pod = FakePod::start("pod-1");
    let gateway = gateway(&[&pod]).await;
    let (_, id) = Call::created(&gateway).await;
    assert_eq!(Call::resumed(&gateway, &id).await.1, None);
}

#[tokio::test]
async fn what_was_sent_before_is_acked_and_what_leaves_some_out_is_not_taken() {
    let pod = FakePod::start("pod-1");
    pod.tell(|memory| (memory.next_offset, memory.requests) = (7, 3));
    let gateway = gateway(&[&pod]).await;
    let (mut call, _) = Call::created(&gateway).await;
    for offset in [1, 2, 3] {
        call.record(offset).await;
    }
    assert_eq!(call.acked().await, 3);
    call.record(5).await;
    assert_eq!(call.code().await, Code::OutOfRange);
    assert_eq!(pod.see(|memory| memory.records()), 1);
}

#[tokio::test]
async fn who_is_fenced_is_not_to_come_back() {
    let pod = FakePod::start("pod-1");
    let gateway = gateway(&[&pod]).await;
    let (mut call, _) = Call::created(&gateway).await;
    pod.answer(Err(Error::fenced("a newer session").into())).await;
    assert_eq!(call.code().await, Code::InvalidArgument);
}

#[tokio::test]
async fn ids_and_kinds_that_cannot_be_are_refused_for_good() {
    let pod = FakePod::start("pod-1");
    let gateway = gateway(&[&pod]).await;
    assert_eq!(Call::begin(&gateway, resume("nobody")).await.code().await, Code::NotFound);
    assert_eq!(Call::begin(&gateway, create(RecordType::Avro)).await.code().await, Code::InvalidArgument);
    let (mut call, _) = Call::created(&gateway).await;
    let batch = zerobus::ingest_record_batch_request::Batch::JsonBatch(zerobus::JsonRecordBatch::default());
    let request = zerobus::IngestRecordBatchRequest { offset_id: Some(0), batch: Some(batch) };
    call.send(Ask::IngestRecordBatch(request)).await;
    assert_eq!(call.code().await, Code::InvalidArgument);
}

#[tokio::test]
async fn a_stream_is_retired_by_its_id() {
    let pod = FakePod::start("pod-1");
    let gateway = gateway(&[&pod]).await;
    let (_, id) = Call::created(&gateway).await;
    let retire = |table: &str| RetireStreamRequest {
        table_name: Some(table.to_owned()),
        identifier: Some(retire_stream_request::Identifier::StreamId(id.clone())),
    };
    let mut client = client(&gateway).await;
    let refused = client.retire_stream(retire("other")).await.expect_err("another table");
    assert_eq!(refused.code(), Code::InvalidArgument);
    client.retire_stream(retire("flights")).await.expect("retired");
    pod.see(|memory| assert_eq!(memory.retired[0].name, memory.opens[0].name));
}
