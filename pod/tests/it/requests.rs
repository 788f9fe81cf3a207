//! Streams of whole requests: nothing of a request that has a bad record is taken, and of a named stream the requests
//! are counted through crashes of everything.

use sluice_shared::proto::{self, Encoding, Existence, RetireRequest};
use tempfile::TempDir;
use tonic::{Code, Status};

use crate::streams::{Call, ephemeral, rows, start, with_table};

fn whole() -> proto::Open {
    proto::Open { whole_requests: true, ..ephemeral(0) }
}

fn counted(existence: Existence) -> proto::Open {
    let name = "zerobus/one".to_owned();
    proto::Open {
        stream: String::new(),
        name,
        session: 0,
        resume_at: None,
        existence: existence.into(),
        ..whole()
    }
}

fn span(start_offset: u64, start_requests: u64, counts: &[u32]) -> Option<proto::RequestSpan> {
    Some(proto::RequestSpan { start_offset, start_requests, counts: counts.to_vec() })
}

async fn refused(call: &mut Call) -> Status {
    let status = call.failure().await;
    assert_eq!(status.code(), Code::InvalidArgument, "{status:?}");
    status
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bad_record_ends_the_stream_before_its_request() {
    let data = TempDir::new().expect("a directory");
    let (pod, client) = with_table(data.path()).await;
    // A stream whose records share the batch loses none.
    let mut other =
        Call::open(&client, proto::Open { stream: other_stream(), ..ephemeral(0) }).await.expect("opens");
    let mut call = Call::open(&client, whole()).await.expect("opens");
    other.send_requests(0..5, &[], None).await;
    call.send_requests(0..9, &[5, 7], span(0, 0, &[2, 2, 3, 2])).await;
    call.send_requests(9..10, &[], span(9, 4, &[1])).await;
    other.send_requests(5..10, &[], None).await;
    let status = refused(&mut call).await;
    assert!(status.message().contains("expected an integer"), "{status:?}");
    assert_eq!(sluice_shared::error::Error::from(status).offset, Some(5));
    other.committed(10).await;
    // It goes on where the good requests end, with what is right now.
    let mut again = Call::open(&client, proto::Open { resume_at: Some(4), ..whole() }).await.expect("opens");
    again.send_requests(4..9, &[], span(4, 2, &[3, 2])).await;
    again.committed(9).await;
    assert_eq!(rows(&client).await, 10 + 9);
    pod.drain().await;
}

fn other_stream() -> String {
    "~018f0000000070008000000000000002".to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn how_many_requests_are_durable_is_known_to_log_and_table() {
    let data = TempDir::new().expect("a directory");
    let (pod, client) = with_table(data.path()).await;
    let mut first = Call::open(&client, counted(Existence::New)).await.expect("opens");
    assert_eq!((first.opened.requests, first.opened.next_offset), (0, 0));
    first.send_requests(0..6, &[], span(0, 0, &[1, 3, 2])).await;
    first.send_requests(6..7, &[], span(6, 3, &[1])).await;
    first.durable(7).await;
    // From the stream as it is open.
    let mut second = Call::open(&client, counted(Existence::Old)).await.expect("opens");
    assert_eq!((second.opened.requests, second.opened.next_offset), (4, 7));
    assert_eq!(first.failure().await.code(), Code::Aborted);
    second.send_requests(7..9, &[], span(7, 4, &[2])).await;
    second.committed(9).await;
    pod.drain().await;
    // From the table, the log being trimmed or not.
    let (pod, client) = start(data.path()).await;
    let third = Call::open(&client, counted(Existence::Old)).await.expect("opens");
    assert_eq!((third.opened.requests, third.opened.next_offset), (5, 9));
    assert_eq!(rows(&client).await, 9);
    pod.drain().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_is_durable_in_part_is_sent_again_and_not_written_twice() {
    let data = TempDir::new().expect("a directory");
    let (pod, client) = with_table(data.path()).await;
    let mut first = Call::open(&client, counted(Existence::New)).await.expect("opens");
    first.send_requests(0..2, &[], span(0, 0, &[2])).await;
    // As the beginning of a request is in the log when a lane had to cut it: its end is not known.
    first.send_requests(2..4, &[], None).await;
    first.durable(4).await;
    let mut second = Call::open(&client, counted(Existence::Old)).await.expect("opens");
    let opened = &second.opened;
    assert_eq!((opened.requests, opened.next_offset, opened.stream_end), (1, 2, 4));
    second.send_requests(2..5, &[], span(2, 1, &[3])).await;
    second.committed(5).await;
    assert_eq!(rows(&client).await, 5);
    let third = Call::open(&client, counted(Existence::Old)).await.expect("opens");
    assert_eq!((third.opened.requests, third.opened.next_offset), (2, 5));
    pod.drain().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_request_is_not_counted_and_may_be_mended() {
    let data = TempDir::new().expect("a directory");
    let (pod, client) = with_table(data.path()).await;
    let mut first = Call::open(&client, counted(Existence::New)).await.expect("opens");
    first.send_requests(0..5, &[3], span(0, 0, &[1, 1, 3])).await;
    refused(&mut first).await;
    let mut second = Call::open(&client, counted(Existence::Old)).await.expect("opens");
    assert_eq!((second.opened.requests, second.opened.next_offset), (2, 2));
    second.send_requests(2..3, &[], span(2, 2, &[1])).await;
    second.committed(3).await;
    assert_eq!(rows(&client).await, 3);
    pod.drain().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_is_to_be_there_is_not_begun() {
    let data = TempDir::new().expect("a directory");
    let (pod, client) = start(data.path()).await;
    let code = |opened: Result<Call, Status>| opened.err().expect("refused").code();
    // JSON could make the table, but then nothing would tell of the stream if its gateway were lost.
    assert_eq!(code(Call::open(&client, counted(Existence::New)).await), Code::NotFound);
    pod.drain().await;
    let (pod, client) = with_table(data.path()).await;
    assert_eq!(code(Call::open(&client, counted(Existence::Old)).await), Code::NotFound);
    Call::open(&client, counted(Existence::New)).await.expect("opens");
    let arrow = proto::Open { encoding: Encoding::Arrow.into(), ..counted(Existence::Old) };
    let status = Call::open(&client, arrow).await.err().expect("refused");
    assert_eq!(status.code(), Code::InvalidArgument);
    assert!(status.message().contains("its records are JSON, not Arrow"), "{status:?}");
    pod.drain().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_retired_stream_takes_nothing_any_more() {
    let data = TempDir::new().expect("a directory");
    let (pod, mut client) = with_table(data.path()).await;
    let mut call = Call::open(&client, counted(Existence::New)).await.expect("opens");
    call.send_requests(0..3, &[], span(0, 0, &[3])).await;
    call.durable(3).await;
    let retire =
        || RetireRequest { table: "t".to_owned(), name: "zerobus/one".to_owned(), client: String::new() };
    client.retire(retire()).await.expect("retired");
    client.retire(retire()).await.expect("retired before");
    assert_eq!(call.failure().await.code(), Code::Aborted);
    let status = Call::open(&client, counted(Existence::Old)).await.err().expect("refused");
    assert_eq!(status.code(), Code::NotFound);
    let unknown = RetireRequest { name: "zerobus/two".to_owned(), ..retire() };
    assert_eq!(client.retire(unknown).await.expect_err("unknown").code(), Code::NotFound);
    pod.drain().await;
    let (pod, client) = start(data.path()).await;
    assert_eq!(rows(&client).await, 3, "what was acked is in the table");
    pod.drain().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_named_stream_is_its_first_clients() {
    let data = TempDir::new().expect("a directory");
    let (pod, mut client) = with_table(data.path()).await;
    let by = |who: &str| proto::Open { client: who.to_owned(), ..counted(Existence::Any) };
    let mut first = Call::open(&client, by("plant")).await.expect("opens");
    first.send_requests(0..3, &[], span(0, 0, &[3])).await;
    first.durable(3).await;
    let status = Call::open(&client, by("guest")).await.err().expect("refused");
    assert_eq!(status.code(), Code::PermissionDenied);
    assert!(!status.message().contains('3') && !status.message().contains("plant"), "{status:?}");
    let retire = |who: &str| RetireRequest {
        table: "t".to_owned(),
        name: "zerobus/one".to_owned(),
        client: who.to_owned(),
    };
    assert_eq!(client.retire(retire("guest")).await.expect_err("refused").code(), Code::PermissionDenied);
    // Neither has fenced it.
    first.send_requests(3..4, &[], span(3, 1, &[1])).await;
    first.durable(4).await;
    assert_eq!(Call::open(&client, by("plant")).await.expect("opens").opened.requests, 2);
    client.retire(retire("plant")).await.expect("retired");
    pod.drain().await;
}

/// So wide that some thousand records fill a batch.
const WIDE: usize = 500;

async fn wide(client: &mut sluice_shared::proto::pod_client::PodClient<tonic::transport::Channel>) {
    let column = |n: usize| format!("{{\"name\":\"c{n}\",\"type\":\"float64\"}}");
    let columns: Vec<String> = (0..WIDE).map(column).collect();
    let spec = format!(
        "{{\"schema\":{{\"fields\":[{{\"name\":\"n\",\"type\":\"int64\",\"nullable\":false}},{}]}}}}",
        columns.join(",")
    );
    let request = proto::CreateTableRequest { table: "t".to_owned(), spec: spec.into() };
    client.create_table(request).await.expect("created");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_fills_more_than_a_batch_is_refused_and_no_part_of_it_is_taken() {
    let data = TempDir::new().expect("a directory");
    let (pod, mut client) = start(data.path()).await;
    wide(&mut client).await;
    let mut first = Call::open(&client, counted(Existence::New)).await.expect("opens");
    first.send_requests(0..2, &[], span(0, 0, &[2])).await;
    first.durable(2).await;
    first.send_requests(2..6_002, &[6_001], span(2, 1, &[6_000])).await;
    let status = refused(&mut first).await;
    assert!(status.message().contains("more than 16 MiB of rows"), "{status:?}");
    let mut second = Call::open(&client, counted(Existence::Old)).await.expect("opens");
    let opened = &second.opened;
    assert_eq!((opened.requests, opened.next_offset, opened.stream_end), (1, 2, 2));
    second.send_requests(2..102, &[], span(2, 1, &[1; 100])).await;
    second.committed(102).await;
    assert_eq!(rows(&client).await, 102);
    pod.drain().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_frame_of_many_requests_is_cut_between_them() {
    let data = TempDir::new().expect("a directory");
    let (pod, mut client) = start(data.path()).await;
    wide(&mut client).await;
    let mut first = Call::open(&client, counted(Existence::New)).await.expect("opens");
    // The last one is bad: all before it are taken, none in part.
    first.send_requests(0..7_000, &[6_999], span(0, 0, &[1_000; 7])).await;
    refused(&mut first).await;
    let mut second = Call::open(&client, counted(Existence::Old)).await.expect("opens");
    let opened = &second.opened;
    assert_eq!((opened.requests, opened.next_offset, opened.stream_end), (6, 6_000, 6_000));
    second.send_requests(6_000..6_001, &[], span(6_000, 6, &[1])).await;
    second.committed(6_001).await;
    assert_eq!(rows(&client).await, 6_001);
    pod.drain().await;
}
