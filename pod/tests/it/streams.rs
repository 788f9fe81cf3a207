//! Streams through the pod's service, as a gateway sees it: a real pod, its log and its tables, reached over TCP.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use prost::Message as _;
use prost_types::field_descriptor_proto::{Label, Type};
use prost_types::{DescriptorProto, FieldDescriptorProto};
use sluice_pod::app::{Listen, Pod};
use sluice_pod::config::PodConfig;
use sluice_shared::membership::Membership;
use sluice_shared::proto::pod_client::PodClient;
use sluice_shared::proto::stream_request::Kind as Ask;
use sluice_shared::proto::stream_response::Kind as Answer;
use sluice_shared::proto::{self, Encoding, StreamRequest, StreamResponse};
use tempfile::TempDir;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;
use tonic::{Code, Status, Streaming};

/// How long a test waits for what must happen.
const DEADLINE: Duration = Duration::from_secs(60);
const STREAM: &str = "~018f0000000070008000000000000001";

pub(crate) async fn start(data: &Path) -> (Pod, PodClient<Channel>) {
    let config = PodConfig {
        listen: "127.0.0.1:0".to_owned(),
        wal_dir: data.join("wal"),
        tables_dir: data.join("tables").into(),
        auto_create: true,
        flush_interval_ms: 20,
        ..PodConfig::default()
    };
    let pod = Pod::start(config, Listen::Tcp, Membership::fixed(Vec::new())).await.expect("starts");
    let address = pod.address().expect("over TCP");
    let client = PodClient::connect(format!("http://{address}")).await.expect("listens");
    (pod, client)
}

pub(crate) async fn with_table(data: &Path) -> (Pod, PodClient<Channel>) {
    let (pod, mut client) = start(data).await;
    create_table(&mut client).await;
    (pod, client)
}

pub(crate) async fn create_table(client: &mut PodClient<Channel>) {
    let spec = br#"{"schema":{"fields":[{"name":"n","type":"int64","nullable":false}]}}"#;
    let request = proto::CreateTableRequest { table: "t".to_owned(), spec: Bytes::from_static(spec) };
    client.create_table(request).await.expect("created");
}

pub(crate) fn ephemeral(resume_at: u64) -> proto::Open {
    proto::Open {
        table: "t".to_owned(),
        stream: STREAM.to_owned(),
        session: 1,
        resume_at: Some(resume_at),
        encoding: Encoding::Json.into(),
        ..proto::Open::default()
    }
}

fn named(session: u64, resume_at: Option<u64>) -> proto::Open {
    proto::Open { stream: String::new(), name: "loader".to_owned(), session, resume_at, ..ephemeral(0) }
}

/// One call. Dropped, it is what a lost link leaves behind.
pub(crate) struct Call {
    pub(crate) requests: mpsc::Sender<StreamRequest>,
    answers: Streaming<StreamResponse>,
    pub(crate) opened: proto::Opened,
}

/// What a call was told until something.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Told {
    pub(crate) refused: Vec<u64>,
    pub(crate) durable_next: u64,
    pub(crate) committed_next: u64,
}

impl Call {
    pub(crate) async fn open(client: &PodClient<Channel>, open: proto::Open) -> Result<Self, Status> {
        let (requests, receiver) = mpsc::channel(16);
        requests.send(StreamRequest { kind: Some(Ask::Open(Box::new(open))) }).await.expect("has room");
        let mut answers = client.clone().stream(ReceiverStream::new(receiver)).await?.into_inner();
        match answers.message().await?.and_then(|answer| answer.kind) {
            Some(Answer::Opened(opened)) => Ok(Self { requests, answers, opened }),
            other => panic!("{other:?} in place of opened"),
        }
    }

    /// Sends records `{"n": offset}`; those at `bad` offsets do not fit the table.
    pub(crate) async fn send(&self, offsets: std::ops::Range<u64>, bad: &[u64]) {
        self.send_requests(offsets, bad, None).await;
    }

    pub(crate) async fn send_requests(
        &self,
        offsets: std::ops::Range<u64>,
        bad: &[u64],
        requests: Option<proto::RequestSpan>,
    ) {
        let line =
            |n: u64| if bad.contains(&n) { "{\"n\":\"x\"}\n".to_owned() } else { format!("{{\"n\":{n}}}\n") };
        let payload: String = offsets.clone().map(line).collect();
        let count = u32::try_from(offsets.end - offsets.start).expect("few");
        let frame = proto::Frame { first_offset: offsets.start, count, payload: payload.into(), requests };
        let frames = proto::Frames { frames: vec![frame] };
        self.requests.send(StreamRequest { kind: Some(Ask::Frames(frames)) }).await.expect("has room");
    }

    /// Reads answers until all before `next` is durable.
    pub(crate) async fn durable(&mut self, next: u64) -> Told {
        self.until(|told| told.durable_next >= next).await
    }

    pub(crate) async fn committed(&mut self, next: u64) -> Told {
        self.until(|told| told.committed_next >= next).await
    }

    async fn until(&mut self, reached: impl Fn(&Told) -> bool) -> Told {
        let mut told = Told::default();
        while !reached(&told) {
            let answer = tokio::time::timeout(DEADLINE, self.answers.message()).await.expect("in time");
            match answer.expect("no error").and_then(|answer| answer.kind) {
                Some(Answer::Rejections(more)) => {
                    for refusal in more.rejections {
                        assert!(
                            refusal.offset >= told.durable_next,
                            "acked before it was refused: {refusal:?}"
                        );
                        told.refused.push(refusal.offset);
                    }
                }
                Some(Answer::Ack(ack)) => {
                    told.durable_next = ack.durable_next;
                    told.committed_next = ack.committed_next;
                }
                other => panic!("{other:?}"),
            }
        }
        told
    }

    pub(crate) async fn failure(&mut self) -> Status {
        loop {
            match tokio::time::timeout(DEADLINE, self.answers.message()).await.expect("in time") {
                Ok(Some(_)) => {}
                Ok(None) => panic!("ended without an error"),
                Err(status) => return status,
            }
        }
    }
}

/// How many rows the table has, by the pod's own count.
pub(crate) async fn rows(client: &PodClient<Channel>) -> u64 {
    let request = proto::DescribeTableRequest { table: "t".to_owned(), whole_pool: false };
    let description = client.clone().describe_table(request).await.expect("there").into_inner().description;
    let description: BTreeMap<String, serde_json::Value> =
        serde_json::from_slice(&description).expect("JSON");
    description["rows"].as_u64().expect("a number")
}

#[tokio::test(flavor = "multi_thread")]
async fn refusals_that_a_lost_link_took_along_are_told_again() {
    let data = TempDir::new().expect("a directory");
    let (pod, client) = with_table(data.path()).await;
    let mut first = Call::open(&client, ephemeral(0)).await.expect("opens");
    first.send(0..10, &[3, 7]).await;
    assert_eq!(first.durable(10).await.refused, [3, 7]);
    drop(first);
    // The gateway has heard nothing after offset 4, and cuts its frames as it likes.
    let mut second = Call::open(&client, ephemeral(5)).await.expect("opens");
    second.send(5..7, &[7]).await;
    assert_eq!(second.durable(7).await, Told { refused: vec![], durable_next: 7, committed_next: 0 });
    second.send(7..14, &[7, 11]).await;
    let told = second.committed(14).await;
    assert_eq!((told.refused, told.durable_next), (vec![7, 11], 14));
    assert_eq!(rows(&client).await, 11);
    pod.drain().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_producer_that_resumes_a_named_stream_hears_what_it_missed() {
    let data = TempDir::new().expect("a directory");
    let (pod, client) = with_table(data.path()).await;
    let mut first = Call::open(&client, named(0, None)).await.expect("opens");
    first.send(0..10, &[3, 7]).await;
    first.committed(10).await;
    pod.drain().await;
    let (pod, client) = start(data.path()).await;
    let mut second = Call::open(&client, named(0, Some(2))).await.expect("opens");
    assert_eq!((second.opened.session, second.opened.next_offset, second.opened.stream_end), (2, 2, 10));
    second.send(2..12, &[3, 7, 11]).await;
    let told = second.committed(12).await;
    assert_eq!((told.refused, told.durable_next), (vec![3, 7, 11], 12));
    // One that says nothing goes on where the stream ends; one that says too much is told so.
    assert_eq!(Call::open(&client, named(0, None)).await.expect("opens").opened.next_offset, 12);
    assert_eq!(Call::open(&client, named(0, Some(99))).await.expect("opens").opened.next_offset, 12);
    assert_eq!(rows(&client).await, 9);
    pod.drain().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_producer_that_sends_less_again_than_the_stream_has_may_finish() {
    let data = TempDir::new().expect("a directory");
    let (pod, client) = with_table(data.path()).await;
    let mut first = Call::open(&client, named(0, None)).await.expect("opens");
    first.send(0..10, &[3]).await;
    first.committed(10).await;
    for (end, refused) in [(5, vec![3]), (0, vec![])] {
        let mut again = Call::open(&client, named(0, Some(0))).await.expect("opens");
        if end > 0 {
            again.send(0..end, &[3]).await;
            assert_eq!(again.durable(end).await.refused, refused);
        }
        let finish = Ask::Finish(proto::Finish { committed: true });
        again.requests.send(StreamRequest { kind: Some(finish) }).await.expect("has room");
        loop {
            let answer = tokio::time::timeout(DEADLINE, again.answers.message()).await.expect("in time");
            match answer.expect("no error").and_then(|answer| answer.kind) {
                Some(Answer::Finished(_)) => break,
                Some(Answer::Ack(ack)) => assert!(ack.durable_next <= end, "{ack:?}"),
                other => panic!("{other:?}"),
            }
        }
    }
    assert_eq!(rows(&client).await, 9);
    pod.drain().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_place_of_rejected_records_is_nobody_elses() {
    let data = TempDir::new().expect("a directory");
    let (pod, mut client) = with_table(data.path()).await;
    let open = proto::Open { table: "t__rejected".to_owned(), ..ephemeral(0) };
    let status = Call::open(&client, open).await.err().expect("refused");
    assert!(status.message().contains("takes no records from producers"), "{status:?}");
    let spec = Bytes::from_static(br#"{"schema":{"fields":[{"name":"n","type":"int64"}]}}"#);
    let request = proto::CreateTableRequest { table: "t__rejected".to_owned(), spec };
    assert_eq!(client.create_table(request).await.expect_err("refused").code(), Code::InvalidArgument);
    pod.drain().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_an_older_session_wrote_is_not_written_again_when_a_pod_is_lost() {
    let data = TempDir::new().expect("a directory");
    let (pod, client) = with_table(data.path()).await;
    let mut first = Call::open(&client, named(0, None)).await.expect("opens");
    first.send(0..10, &[3]).await;
    first.durable(10).await;
    let second = Call::open(&client, named(0, Some(2))).await.expect("opens");
    let (session, stream_end) = (second.opened.session, second.opened.stream_end);
    assert_eq!((session, stream_end), (2, 10));
    drop((first, second));
    pod.drain().await;
    // The gateway opens the stream again, with what its producer has had no answer for.
    let (pod, client) = start(data.path()).await;
    let reopened = proto::Open { stream_end, ..named(session, Some(2)) };
    let mut reopened = Call::open(&client, reopened).await.expect("opens");
    reopened.send(2..12, &[3, 11]).await;
    let told = reopened.committed(12).await;
    assert_eq!((told.refused, told.durable_next), (vec![3, 11], 12));
    assert_eq!(rows(&client).await, 10);
    assert!(!data.path().join("tables/main/default/t__rejected").exists(), "nothing was set aside");
    pod.drain().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_to_be_sent_again_may_not_be_left_out() {
    let data = TempDir::new().expect("a directory");
    let (pod, client) = with_table(data.path()).await;
    let mut first = Call::open(&client, ephemeral(0)).await.expect("opens");
    first.send(0..10, &[]).await;
    first.durable(10).await;
    let mut second = Call::open(&client, ephemeral(5)).await.expect("opens");
    second.send(10..12, &[]).await;
    let status = second.failure().await;
    assert_eq!(status.code(), Code::InvalidArgument);
    assert!(status.message().contains("expected 5"), "{status:?}");
    pod.drain().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_was_elsewhere_meanwhile_is_taken_back() {
    let data = TempDir::new().expect("a directory");
    let (pod, client) = with_table(data.path()).await;
    let mut first = Call::open(&client, ephemeral(0)).await.expect("opens");
    first.send(0..10, &[]).await;
    first.committed(10).await;
    drop(first);
    let mut back = Call::open(&client, ephemeral(25)).await.expect("opens");
    back.send(25..30, &[26]).await;
    assert_eq!(back.durable(30).await.refused, [26]);
    // Offsets 10 to 24 are in another pod's log: until they come the run is held.
    assert_eq!(rows(&client).await, 10);
    pod.drain().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn of_two_producers_that_begin_a_named_stream_before_its_table_one_comes_through() {
    let data = TempDir::new().expect("a directory");
    let (pod, client) = start(data.path()).await;
    let of = |claim: u8, open: proto::Open| proto::Open { claim: vec![claim; 16].into(), ..open };
    let mut first = Call::open(&client, of(1, named(0, None))).await.expect("opens");
    let mut second = Call::open(&client, of(2, named(0, None))).await.expect("opens");
    first.send(0..3, &[]).await;
    assert_eq!(first.committed(3).await.durable_next, 3);
    second.send(0..5, &[]).await;
    let status = second.failure().await;
    assert_eq!(status.code(), Code::Aborted, "it is fenced: {status:?}");
    // Its gateway may say which session that was: the session is the other's.
    let status = Call::open(&client, of(2, named(1, Some(0)))).await.err().expect("not its session");
    assert_eq!(status.code(), Code::Aborted, "{status:?}");
    let moved = Call::open(&client, of(1, named(1, Some(3)))).await.expect("its own");
    assert_eq!(moved.opened.next_offset, 3);
    let again = Call::open(&client, named(0, None)).await.expect("opens");
    assert_eq!((again.opened.session, again.opened.next_offset), (2, 3));
    assert_eq!(rows(&client).await, 3);
    pod.drain().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_that_make_their_table_at_one_time_all_hear_what_is_committed() {
    let data = TempDir::new().expect("a directory");
    let (pod, client) = start(data.path()).await;
    let streams = (0..64_u64).map(|number| {
        let stream = format!("~018f000000007000800000000000{number:04x}");
        let client = client.clone();
        async move {
            let open = proto::Open { stream, ..ephemeral(0) };
            let mut call = Call::open(&client, open).await.expect("opens");
            call.send(0..3, &[]).await;
            call.committed(3).await;
        }
    });
    futures_util::future::join_all(streams).await;
    assert_eq!(rows(&client).await, 64 * 3);
    pod.drain().await;
}

/// `message Reading { optional int64 n = 1; repeated string tags = 2; }`, or with a string for `n`.
#[tokio::test(flavor = "multi_thread")]
async fn a_table_is_made_by_whom_may_alone() {
    let data = tempfile::tempdir().expect("a directory");
    let (pod, client) = start(data.path()).await;
    let may_not = |open: proto::Open| proto::Open { may_not_create: true, ..open };
    for open in [may_not(ephemeral(0)), may_not(protobuf(ephemeral(0)))] {
        let refused = Call::open(&client, open).await.err().expect("refused");
        assert_eq!(refused.code(), Code::PermissionDenied, "{refused:?}");
        let error = sluice_shared::error::Error::from(refused);
        assert_eq!(error.code, "missing_privilege");
        assert!(error.message.contains("`create`"), "{error}");
    }
    assert!(!data.path().join("tables/main").exists(), "nothing was made");
    let mut call = Call::open(&client, ephemeral(0)).await.expect("opens");
    call.send(0..1, &[]).await;
    call.committed(1).await;
    let mut second =
        Call::open(&client, may_not(proto::Open { stream: other_stream(), ..ephemeral(0) })).await;
    let call = second.as_mut().expect("there is a table now");
    call.send(0..1, &[]).await;
    call.durable(1).await;
    pod.drain().await;
}

fn other_stream() -> String {
    STREAM.replace('1', "2")
}

fn descriptor(n: Type) -> Bytes {
    let field = |name: &str, number: i32, label: Label, kind: Type| FieldDescriptorProto {
        name: Some(name.to_owned()),
        number: Some(number),
        label: Some(label.into()),
        r#type: Some(kind.into()),
        ..FieldDescriptorProto::default()
    };
    let field = vec![field("n", 1, Label::Optional, n), field("tags", 2, Label::Repeated, Type::String)];
    DescriptorProto { name: Some("Reading".to_owned()), field, ..DescriptorProto::default() }
        .encode_to_vec()
        .into()
}

fn protobuf(open: proto::Open) -> proto::Open {
    proto::Open { encoding: Encoding::Protobuf.into(), schema: descriptor(Type::Int64), ..open }
}

impl Call {
    /// Sends messages `{n: offset, tags: ["x"]}`; those at `bad` offsets are none.
    async fn send_messages(&self, offsets: std::ops::Range<u64>, bad: &[u64]) {
        let message = |n: u64| match u8::try_from(n).expect("small") {
            n if bad.contains(&u64::from(n)) => vec![2, 0x08, 0x80],
            n => vec![5, 0x08, n, 0x12, 1, b'x'],
        };
        let payload: Vec<u8> = offsets.clone().flat_map(message).collect();
        let count = u32::try_from(offsets.end - offsets.start).expect("few");
        self.send_payload(offsets.start, count, payload).await;
    }

    pub(crate) async fn send_payload(&self, first_offset: u64, count: u32, payload: Vec<u8>) {
        let frame = proto::Frame { first_offset, count, payload: payload.into(), requests: None };
        let frames = proto::Frames { frames: vec![frame] };
        self.requests.send(StreamRequest { kind: Some(Ask::Frames(frames)) }).await.expect("has room");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn protobuf_records_make_their_table_and_are_refused_one_by_one() {
    let data = TempDir::new().expect("a directory");
    let (pod, client) = start(data.path()).await;
    let mut first = Call::open(&client, protobuf(named(0, None))).await.expect("opens");
    first.send_messages(0..10, &[3, 7]).await;
    assert_eq!(first.durable(10).await.refused, [3, 7]);
    drop(first);
    // A stream of JSON into the same table, and so into the same batches.
    let mut json = Call::open(&client, ephemeral(0)).await.expect("opens");
    json.send(0..5, &[1]).await;
    assert_eq!(json.committed(5).await.refused, [1]);
    pod.drain().await;
    let (pod, client) = start(data.path()).await;
    let mut second = Call::open(&client, protobuf(named(0, Some(2)))).await.expect("opens");
    second.send_messages(2..12, &[3, 7, 11]).await;
    let told = second.committed(12).await;
    assert_eq!((told.refused, told.durable_next), (vec![3, 7, 11], 12));
    assert_eq!(rows(&client).await, 9 + 4);
    pod.drain().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_protobuf_stream_that_does_not_fit_is_refused_before_it_fences_another() {
    let data = TempDir::new().expect("a directory");
    let (pod, client) = with_table(data.path()).await;
    let mut first = Call::open(&client, named(0, None)).await.expect("opens");
    let wrong = |schema| proto::Open { schema, ..protobuf(named(0, None)) };
    for (open, code, word) in [
        (wrong(descriptor(Type::String)), Code::InvalidArgument, "\"n\": the descriptor has it as"),
        (wrong(descriptor(Type::Int64)), Code::InvalidArgument, "\"tags\", the table has no such column"),
        (wrong(Bytes::from_static(b"\xff")), Code::InvalidArgument, "descriptor: "),
        (wrong(Bytes::new()), Code::InvalidArgument, "without its schema"),
    ] {
        let status = Call::open(&client, open).await.err().expect("refused");
        assert_eq!(status.code(), code, "{status:?}");
        assert!(status.message().contains(word), "{status:?}");
    }
    first.send(0..3, &[]).await;
    assert_eq!(first.committed(3).await.durable_next, 3);
    let ignoring = proto::Open { ignore_unknown: true, ..protobuf(ephemeral(0)) };
    let mut second = Call::open(&client, ignoring).await.expect("opens");
    second.send_messages(0..3, &[]).await;
    assert_eq!(second.committed(3).await.durable_next, 3);
    // Lengths that do not add up cost the stream, at the frame that has them.
    second.send_payload(3, 2, vec![2, 0x08, 3, 9, 0x08]).await;
    let status = second.failure().await;
    assert_eq!(status.code(), Code::InvalidArgument, "{status:?}");
    assert!(status.message().contains("message 1, at byte 3"), "{status:?}");
    assert_eq!(rows(&client).await, 6);
    pod.drain().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn avro_records_make_their_table_and_are_refused_one_by_one() {
    let data = TempDir::new().expect("a directory");
    let (pod, client) = start(data.path()).await;
    let schema = br#"{"type":"record","name":"Reading","fields":[{"name":"n","type":["null","long"]}]}"#;
    let open = |schema: &'static [u8]| proto::Open {
        encoding: Encoding::Avro.into(),
        schema: Bytes::from_static(schema),
        ..ephemeral(0)
    };
    let status = Call::open(&client, open(b"{}")).await.err().expect("refused");
    assert_eq!(status.code(), Code::InvalidArgument, "{status:?}");
    let mut call = Call::open(&client, open(schema)).await.expect("opens");
    call.send_payload(0, 4, vec![2, 2, 2, 1, 0, 2, 4, 0, 2, 2, 4]).await;
    assert_eq!(call.committed(4).await.refused, [2]);
    assert_eq!(rows(&client).await, 3);
    pod.drain().await;
}
