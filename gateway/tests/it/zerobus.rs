//! The Zerobus service as its clients use it, with a scripted pod behind it.

use std::time::Duration;

use bytes::Bytes;
use sluice_gateway::Gateway;
use sluice_shared::error::Error;
use sluice_shared::proto::zerobus::ephemeral_stream_request::Payload as Ask;
use sluice_shared::proto::zerobus::ephemeral_stream_response::Payload as Answer;
use sluice_shared::proto::zerobus::ingest_record_batch_request::Batch;
use sluice_shared::proto::zerobus::ingest_record_request::Record;
use sluice_shared::proto::zerobus::zerobus_client::ZerobusClient;
use sluice_shared::proto::zerobus::{self, EphemeralStreamRequest, EphemeralStreamResponse, RecordType};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Request, Status, Streaming};

use crate::harness::{FakePod, gateway, gateway_with, soon};

struct Call {
    requests: mpsc::Sender<EphemeralStreamRequest>,
    answers: Streaming<EphemeralStreamResponse>,
}

fn create() -> zerobus::CreateIngestStreamRequest {
    zerobus::CreateIngestStreamRequest {
        table_name: Some("main.default.flights".to_owned()),
        record_type: Some(RecordType::Json.into()),
        ..Default::default()
    }
}

impl Call {
    /// The headers of the response come before anything was sent: clients wait for them.
    async fn begin(gateway: &Gateway, table_header: Option<&str>) -> Result<Self, Status> {
        let url = format!("http://{}", gateway.address());
        let mut client = ZerobusClient::connect(url).await.expect("connects");
        let (requests, receiver) = mpsc::channel(64);
        let mut request = Request::new(ReceiverStream::new(receiver));
        if let Some(table) = table_header {
            let table = table.parse().expect("printable");
            request.metadata_mut().insert("x-databricks-zerobus-table-name", table);
        }
        let answers = soon("headers", client.ephemeral_stream(request)).await?.into_inner();
        Ok(Self { requests, answers })
    }

    async fn open(gateway: &Gateway) -> Self {
        let mut call = Self::begin(gateway, None).await.expect("headers");
        call.send(Ask::CreateStream(create())).await;
        let opened = call.answer().await.expect("opened");
        let Answer::CreateStreamResponse(opened) = opened else { panic!("{opened:?}") };
        assert!(opened.stream_id.is_some_and(|id| !id.is_empty()));
        call
    }

    async fn send(&self, ask: Ask) {
        soon("sending", self.requests.send(EphemeralStreamRequest { payload: Some(ask) }))
            .await
            .expect("sent");
    }

    async fn record(&self, offset: i64, text: &'static str) {
        let record = Some(Record::JsonRecord(Bytes::from_static(text.as_bytes())));
        self.send(Ask::IngestRecord(zerobus::IngestRecordRequest { offset_id: Some(offset), record })).await;
    }

    async fn batch(&self, offset: i64, records: &[&'static str]) {
        let records = records.iter().map(|text| Bytes::from_static(text.as_bytes())).collect();
        let batch = Some(Batch::JsonBatch(zerobus::JsonRecordBatch { records }));
        let batch = zerobus::IngestRecordBatchRequest { offset_id: Some(offset), batch };
        self.send(Ask::IngestRecordBatch(batch)).await;
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

    async fn failure(&mut self) -> Status {
        loop {
            if let Err(status) = self.answer().await {
                return status;
            }
        }
    }
}

#[tokio::test]
async fn requests_are_acked_by_their_own_offsets_and_the_stream_ends_well() {
    let pod = FakePod::start("pod-1");
    let gateway = gateway(&[&pod]).await;
    let mut call = Call::open(&gateway).await;
    call.record(0, "{\"a\":1}").await;
    assert_eq!(call.acked().await, 0);
    call.batch(1, &["{\"a\":2}", "{\n\"a\":3\n}", "{\"a\":4}"]).await;
    assert_eq!(call.acked().await, 1);
    call.batch(2, &[]).await;
    assert_eq!(call.acked().await, 2);
    pod.until("four records", |memory| memory.records() == 4).await;
    drop(call.requests);
    let end = soon("the end", call.answers.message()).await.expect("no failure");
    assert_eq!(end, None);
}

#[tokio::test]
async fn acks_come_when_all_records_of_a_request_are_durable_and_never_go_back() {
    let pod = FakePod::start("pod-1");
    pod.tell(|memory| memory.acks = false);
    let gateway = gateway(&[&pod]).await;
    let mut call = Call::open(&gateway).await;
    call.batch(0, &["{}", "{}"]).await;
    call.batch(1, &["{}", "{}"]).await;
    pod.until("four records", |memory| memory.records() == 4).await;
    pod.ack(3).await;
    assert_eq!(call.acked().await, 0);
    // The pod is lost; what comes again is not acked again.
    pod.break_call().await;
    pod.until("a second call", |memory| memory.opens.len() == 2 && memory.frames[1].len() == 1).await;
    pod.ack(4).await;
    assert_eq!(call.acked().await, 1);
}

#[tokio::test]
async fn a_bad_record_ends_the_stream_by_request_and_record_and_is_never_acked() {
    let pod = FakePod::start("pod-1");
    pod.tell(|memory| memory.acks = false);
    let gateway = gateway(&[&pod]).await;
    let mut call = Call::open(&gateway).await;
    call.record(0, "{\"a\":1}").await;
    call.batch(1, &["{\"a\":2}", "bad", "{\"a\":3}"]).await;
    pod.until("all records", |memory| memory.records() == 4).await;
    let counted = pod.see(|memory| {
        assert!(memory.opens[0].whole_requests);
        let requests =
            memory.frames[0].iter().flat_map(|frame| frame.requests.clone().expect("counted").counts);
        requests.collect::<Vec<_>>()
    });
    assert_eq!(counted, [1, 3]);
    pod.ack(1).await;
    assert_eq!(call.acked().await, 0);
    pod.answer(Err(Error::invalid("not_json", "no JSON: bad").at_offset(2).into())).await;
    let status = call.answer().await.expect_err("no ack");
    assert_eq!(status.code(), Code::InvalidArgument);
    assert!(status.message().contains("request 1, record 1: no JSON: bad"), "{status:?}");
}

#[tokio::test]
async fn offsets_that_are_not_the_next_and_other_nonsense_are_refused_for_good() {
    let pod = FakePod::start("pod-1");
    let gateway = gateway(&[&pod]).await;
    let mut call = Call::open(&gateway).await;
    call.record(1, "{}").await;
    let status = call.failure().await;
    assert_eq!(status.code(), Code::InvalidArgument);
    assert!(status.message().contains("Non-incremental offset: expected 0, actual 1"), "{status:?}");
    let mut call = Call::open(&gateway).await;
    let record = Some(Record::ProtoEncodedRecord(Bytes::from_static(b"\x08\x01")));
    call.send(Ask::IngestRecord(zerobus::IngestRecordRequest { offset_id: Some(0), record })).await;
    assert_eq!(call.failure().await.code(), Code::InvalidArgument);
    let mut call = Call::open(&gateway).await;
    call.send(Ask::CreateStream(create())).await;
    assert_eq!(call.failure().await.code(), Code::InvalidArgument);
    let mut call = Call::begin(&gateway, None).await.expect("headers");
    call.record(0, "{}").await;
    assert_eq!(call.failure().await.code(), Code::InvalidArgument);
    let bad = Call::begin(&gateway, Some("a/b")).await.err().expect("refused");
    assert_eq!(bad.code(), Code::InvalidArgument);
    let mut call = Call::begin(&gateway, Some("main.default.other")).await.expect("headers");
    call.send(Ask::CreateStream(create())).await;
    assert!(call.failure().await.message().contains("they must agree"));
}

#[tokio::test]
async fn a_failed_open_is_told_at_once_and_a_passing_failure_later_is_told_late() {
    let pod = FakePod::start("pod-1");
    let missing = Error::not_found("table_not_found", "no such table");
    pod.tell(|memory| memory.open_failures.push_back(missing));
    let gateway = gateway_with(&[&pod], |config| config.unavailable_timeout_ms = 1).await;
    let mut call = Call::begin(&gateway, None).await.expect("headers");
    call.send(Ask::CreateStream(create())).await;
    assert_eq!(call.failure().await.code(), Code::NotFound);
    let mut call = Call::open(&gateway).await;
    call.record(0, "{}").await;
    assert_eq!(call.acked().await, 0);
    let starting = || Error::unavailable("starting", "replaying the log");
    pod.tell(|memory| memory.open_failures = (0..1000).map(|_| starting()).collect());
    pod.break_call().await;
    let lost_at = tokio::time::Instant::now();
    assert_eq!(call.failure().await.code(), Code::Unavailable);
    assert!(lost_at.elapsed() >= Duration::from_secs(1), "clients would come back at once, for ever");
}

#[tokio::test]
async fn a_gateway_that_goes_away_says_so_and_acks_what_it_took() {
    let pod = FakePod::start("pod-1");
    pod.tell(|memory| memory.acks = false);
    let gateway = gateway(&[&pod]).await;
    let mut call = Call::open(&gateway).await;
    call.record(0, "{}").await;
    pod.until("a record", |memory| memory.records() == 1).await;
    let client = async {
        let signal = call.answer().await.expect("a signal");
        assert!(matches!(signal, Answer::CloseStreamSignal(_)), "{signal:?}");
        // One more may be on its way when a client is told.
        call.record(1, "{}").await;
        pod.until("two records", |memory| memory.records() == 2).await;
        pod.tell(|memory| memory.acks = true);
        pod.ack(2).await;
        assert_eq!(call.acked().await, 1);
        drop(call.requests);
        assert_eq!(soon("the end", call.answers.message()).await.expect("no failure"), None);
    };
    tokio::join!(client, gateway.drain(Duration::from_secs(20)));
}
