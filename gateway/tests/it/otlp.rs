//! OTLP as its exporters speak it, with a scripted pod behind it.

use std::io::Write;
use std::time::Duration;

use flate2::Compression;
use flate2::write::GzEncoder;
use opentelemetry_proto::tonic::collector::logs::v1::logs_service_client::LogsServiceClient;
use opentelemetry_proto::tonic::collector::logs::v1::{ExportLogsServiceRequest, ExportLogsServiceResponse};
use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceRequest;
use opentelemetry_proto::tonic::collector::metrics::v1::metrics_service_client::MetricsServiceClient;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_client::TraceServiceClient;
use opentelemetry_proto::tonic::logs::v1::{LogRecord, ResourceLogs, ScopeLogs};
use prost::Message;
use sluice_gateway::Gateway;
use sluice_shared::error::Error;
use sluice_shared::proto::stream_response::Kind as Answer;
use sluice_shared::proto::{self, Encoding};
use tonic::transport::Channel;
use tonic::{Code, Request, Status};

use crate::harness::{FakePod, gateway, gateway_with, metric, raw, soon, split};

const TABLE_HEADER: &str = "x-databricks-zerobus-table-name";
const LOGS: &str = "main.default.otel_logs";
const PROTOBUF: &str = "application/x-protobuf";

fn logs(records: usize) -> ExportLogsServiceRequest {
    let log_records = vec![LogRecord { severity_text: "INFO".to_owned(), ..Default::default() }; records];
    let scope_logs = vec![ScopeLogs { log_records, ..Default::default() }];
    ExportLogsServiceRequest { resource_logs: vec![ResourceLogs { scope_logs, ..Default::default() }] }
}

async fn client(gateway: &Gateway) -> LogsServiceClient<Channel> {
    let url = format!("http://{}", gateway.address());
    soon("connecting", LogsServiceClient::connect(url)).await.expect("connects")
}

fn to_table<T>(message: T, table: &str) -> Request<T> {
    let mut request = Request::new(message);
    request.metadata_mut().insert(TABLE_HEADER, table.parse().expect("printable"));
    request
}

async fn export(
    client: &mut LogsServiceClient<Channel>,
    records: usize,
) -> Result<ExportLogsServiceResponse, Status> {
    let exporting = client.export(to_table(logs(records), LOGS));
    soon("an export", exporting).await.map(tonic::Response::into_inner)
}

/// Head and body of the answer to a post.
async fn post(gateway: &Gateway, path: &str, headers: &str, body: &[u8]) -> String {
    let length = body.len();
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {length}\r\n{headers}\r\n"
    );
    raw(gateway.address(), &[head.as_bytes(), body].concat()).await
}

async fn post_logs(gateway: &Gateway, kind: &str, more: &str, body: &[u8]) -> String {
    let headers = format!("content-type: {kind}\r\n{TABLE_HEADER}: {LOGS}\r\n{more}");
    post(gateway, "/v1/logs", &headers, body).await
}

fn gzip(text: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(text).expect("written");
    encoder.finish().expect("written")
}

fn rejection(offset: u64) -> proto::Rejection {
    let (code, column) = ("out_of_range".to_owned(), "flags".to_owned());
    proto::Rejection {
        offset,
        code,
        column,
        message: "5 is out of the range of int8".to_owned(),
        quarantined: true,
    }
}

#[tokio::test]
async fn exports_of_one_table_share_a_stream_whose_table_is_made_first() {
    let pod = FakePod::start("pod-1");
    let gateway = gateway(&[&pod]).await;
    let mut client = client(&gateway).await;
    for records in [3, 1, 2] {
        let response = export(&mut client, records).await.expect("durable");
        assert_eq!(response.partial_success, None);
    }
    let again = post_logs(&gateway, PROTOBUF, "", &logs(4).encode_to_vec()).await;
    assert_eq!(split(&again), (200, String::new()));
    pod.see(|memory| {
        assert_eq!(memory.opens.len(), 1, "one stream: {:?}", memory.opens);
        let open = &memory.opens[0];
        assert_eq!((open.table.as_str(), open.encoding()), (LOGS, Encoding::Arrow));
        assert!(!open.schema.is_empty() && open.stream.starts_with('~') && !open.ignore_unknown);
        // What an export costs: a frame there and an ack back, and nothing else.
        let counts: Vec<(u64, u32)> =
            memory.frames[0].iter().map(|frame| (frame.first_offset, frame.count)).collect();
        assert_eq!(counts, [(0, 3), (3, 1), (4, 2), (6, 4)]);
        assert!(memory.finishes.is_empty());
        assert_eq!(memory.specs.len(), 1);
        let spec = String::from_utf8_lossy(&memory.specs[0]);
        assert!(spec.contains("observed_time_unix_nano") && spec.contains("map<string, string>"), "{spec}");
    });
    assert_eq!(metric(gateway.address(), "sluice_gateway_records_total").await, 10);
}

#[tokio::test]
async fn each_signal_has_its_call_and_its_path() {
    let pod = FakePod::start("pod-1");
    let gateway = gateway_with(&[&pod], |config| {
        config.otlp_logs_table = Some("l".parse().expect("valid"));
        config.otlp_traces_table = Some("t".parse().expect("valid"));
        config.otlp_metrics_table = Some("m".parse().expect("valid"));
    })
    .await;
    let url = format!("http://{}", gateway.address());
    let mut traces = TraceServiceClient::connect(url.clone()).await.expect("connects");
    let mut metrics = MetricsServiceClient::connect(url).await.expect("connects");
    // What holds nothing opens nothing.
    soon("spans", traces.export(ExportTraceServiceRequest::default())).await.expect("nothing");
    soon("points", metrics.export(ExportMetricsServiceRequest::default())).await.expect("nothing");
    assert_eq!(pod.see(|memory| memory.opens.len()), 0);
    for (path, body) in [
        ("/v1/logs", r#"{"resourceLogs":[{"scopeLogs":[{"logRecords":[{}]}]}]}"#),
        ("/v1/traces", r#"{"resourceSpans":[{"scopeSpans":[{"spans":[{}]}]}]}"#),
        (
            "/v1/metrics",
            r#"{"resourceMetrics":[{"scopeMetrics":[{"metrics":[{"gauge":{"dataPoints":[{}]}}]}]}]}"#,
        ),
    ] {
        let answer = post(&gateway, path, "content-type: application/json\r\n", body.as_bytes()).await;
        assert_eq!(split(&answer), (200, "{}".to_owned()), "{path}");
        assert!(answer.contains("content-type: application/json"), "{answer}");
    }
    let tables = pod.see(|memory| memory.opens.iter().map(|open| open.table.clone()).collect::<Vec<_>>());
    assert_eq!(tables, ["main.default.l", "main.default.t", "main.default.m"]);
    assert_eq!(pod.see(proto_records), 3);
}

fn proto_records(memory: &crate::harness::Memory) -> u64 {
    memory.records()
}

#[tokio::test]
async fn without_a_table_the_answer_says_how_to_name_one() {
    let pod = FakePod::start("pod-1");
    let gateway = gateway(&[&pod]).await;
    let status = client(&gateway).await.export(logs(1)).await.expect_err("no table");
    assert_eq!(status.code(), Code::InvalidArgument);
    for part in [TABLE_HEADER, "gateway.otlp_logs_table"] {
        assert!(status.message().contains(part), "{status:?}");
    }
    let headers = "content-type: application/json\r\n";
    let body = br#"{"resourceSpans":[]}"#;
    let (status, answer) = split(&post(&gateway, "/v1/traces", headers, body).await);
    assert_eq!(status, 400);
    assert!(answer.contains("\"code\":3") && answer.contains("gateway.otlp_traces_table"), "{answer}");
    let bad = to_table(logs(1), "a/b");
    let status = client(&gateway).await.export(bad).await.expect_err("no name");
    assert_eq!(status.code(), Code::InvalidArgument);
}

#[tokio::test]
async fn an_export_is_answered_when_its_own_records_are_durable() {
    let pod = FakePod::start("pod-1");
    pod.tell(|memory| memory.acks = false);
    let gateway = gateway(&[&pod]).await;
    let (mut first, mut second) = (client(&gateway).await, client(&gateway).await);
    let (tell, told) = tokio::sync::oneshot::channel();
    let second = async {
        pod.until("the first", |memory| memory.records() == 3).await;
        let mut second = Box::pin(export(&mut second, 2));
        tokio::select! {
            biased; // it has to be sent before it can be waited for
            answer = &mut second => panic!("answered before it is durable: {answer:?}"),
            () = pod.until("the second", |memory| memory.records() == 5) => {}
        }
        pod.ack(4).await;
        // The first is answered by now, or will be: nothing more is acked until it is.
        told.await.expect("the first was answered");
        let (answer, ()) = tokio::join!(second, pod.ack(5));
        answer.expect("records 3 and 4 are durable");
    };
    let first = async {
        export(&mut first, 3).await.expect("records 0 to 2 are durable");
        tell.send(()).expect("the other waits");
    };
    tokio::join!(first, second);
}

#[tokio::test]
async fn refused_records_are_partial_success_and_the_first_is_named() {
    let pod = FakePod::start("pod-1");
    let gateway = gateway(&[&pod]).await;
    let mut client = client(&gateway).await;
    export(&mut client, 4).await.expect("durable");
    pod.tell(|memory| memory.acks = false);
    // One is refused here, so that places in the request and offsets in the stream part.
    let mut request = logs(5);
    request.resource_logs[0].scope_logs[0].log_records[1].time_unix_nano = u64::MAX;
    let answering = |records: u64, durable: u64| {
        let pod = &pod;
        async move {
            pod.until("the records", |memory| memory.records() == records).await;
            let rejections = vec![rejection(durable - 2), rejection(durable - 1)];
            pod.answer(Ok(Answer::Rejections(proto::Rejections { rejections }))).await;
            pod.ack(durable).await;
        }
    };
    let (answer, ()) = tokio::join!(client.export(to_table(request.clone(), LOGS)), answering(8, 8));
    let partial = answer.expect("in part").into_inner().partial_success.expect("partial");
    assert_eq!(partial.rejected_log_records, 3);
    let expected = "log record 1 of the request (from 0): column time_unix_nano: 18446744073709551615 is out of the \
                    range of int64; 3 refused, the others are in";
    assert_eq!(partial.error_message, expected);
    request.resource_logs[0].scope_logs[0].log_records[1].time_unix_nano = 0;
    request.resource_logs[0].scope_logs[0].log_records[4].time_unix_nano = u64::MAX;
    let body = serde_json::to_vec(&request).expect("JSON");
    let (answer, ()) = tokio::join!(post_logs(&gateway, "application/json", "", &body), answering(12, 12));
    let (status, body) = split(&answer);
    assert_eq!(status, 200);
    assert!(body.contains("\"rejectedLogRecords\":\"3\""), "{body}");
    assert!(
        body.contains(
            "log record 2 of the request (from 0): column flags: 5 is out of the range of int8 (it is kept"
        ),
        "{body}"
    );
    assert_eq!(metric(gateway.address(), "sluice_gateway_rejected_records_total").await, 6);
}

#[tokio::test]
async fn failures_say_whether_and_when_to_come_back() {
    let pod = FakePod::start("pod-1");
    let gateway = gateway_with(&[&pod], |config| config.unavailable_timeout_ms = 1).await;
    let mut client = client(&gateway).await;
    let fail = |error: Error, times: usize| {
        pod.tell(|memory| memory.open_failures.extend((0..times).map(|_| error.clone())));
    };
    let busy = || Error::busy("wal_full", "the log is full", Duration::from_millis(1500));
    let body = logs(1).encode_to_vec();
    fail(busy(), 3);
    let status = export(&mut client, 1).await.expect_err("busy");
    assert_eq!(status.code(), Code::ResourceExhausted);
    let details = String::from_utf8_lossy(status.details()).into_owned();
    assert!(details.contains("google.rpc.RetryInfo"), "final to exporters without: {details:?}");
    pod.tell(|memory| memory.open_failures.clear());
    fail(busy(), 3);
    let answer = post_logs(&gateway, PROTOBUF, "", &body).await;
    assert_eq!(split(&answer).0, 429, "{answer}");
    assert!(answer.contains("retry-after: "), "{answer}");
    pod.tell(|memory| memory.open_failures.clear());
    fail(Error::unavailable("starting", "replaying the log"), 3);
    let answer = post_logs(&gateway, PROTOBUF, "", &body).await;
    assert_eq!(split(&answer).0, 503, "{answer}");
    assert!(
        answer.contains("retry-after: 1\r\n") && answer.contains("content-type: application/x-protobuf"),
        "{answer}"
    );
    pod.tell(|memory| memory.open_failures.clear());
    fail(Error::invalid("schema_mismatch", "the table has it as bool").at_column("flags"), 1);
    let status = export(&mut client, 1).await.expect_err("no fit");
    assert_eq!(status.code(), Code::InvalidArgument);
    assert!(
        status.message().contains("column flags: the table has it as bool [schema_mismatch]"),
        "{status:?}"
    );
    assert_eq!(status.details(), b"", "not to be tried again");
    export(&mut client, 1).await.expect("a new stream");
}

#[tokio::test]
async fn a_pod_that_is_lost_goes_unseen() {
    let pod = FakePod::start("pod-1");
    pod.tell(|memory| memory.acks = false);
    let gateway = gateway(&[&pod]).await;
    let mut client = client(&gateway).await;
    let losing = async {
        pod.until("a record", |memory| memory.records() == 2).await;
        pod.break_call().await;
        pod.until("them again", |memory| memory.frames.len() == 2 && memory.frames[1].len() == 1).await;
        pod.ack(2).await;
    };
    let (answer, ()) = tokio::join!(export(&mut client, 2), losing);
    answer.expect("durable in the end");
}

#[tokio::test]
async fn compressed_requests_are_taken_and_bounded() {
    let pod = FakePod::start("pod-1");
    let gateway =
        gateway_with(&[&pod], |config| config.frame_bytes_max = "64KiB".parse().expect("a size")).await;
    let body = logs(2).encode_to_vec();
    let zipped = zstd::encode_all(&body[..], 1).expect("encoded");
    for (coding, body) in [("gzip", gzip(&body)), ("zstd", zipped)] {
        let answer = post_logs(&gateway, PROTOBUF, &format!("content-encoding: {coding}\r\n"), &body).await;
        assert_eq!(split(&answer).0, 200, "{answer}");
    }
    let call = |coding: &'static str, message: Vec<u8>| {
        let length = u32::try_from(message.len()).expect("short").to_be_bytes();
        let body = [&[1][..], &length, &message].concat();
        let headers = format!(
            "content-type: application/grpc\r\ngrpc-encoding: {coding}\r\n{TABLE_HEADER}: {LOGS}\r\n"
        );
        let path = "/opentelemetry.proto.collector.logs.v1.LogsService/Export";
        let gateway = &gateway;
        async move { post(gateway, path, &headers, &body).await }
    };
    let answer = call("gzip", gzip(&body)).await;
    assert!(answer.starts_with("HTTP/1.1 200") && !answer.contains("grpc-message"), "{answer}");
    assert_eq!(pod.see(proto_records), 6);
    let bomb = gzip(&vec![0; 4 << 20]);
    assert!(bomb.len() < 64 << 10, "{}", bomb.len());
    let answer = call("gzip", bomb.clone()).await;
    assert!(answer.contains("grpc-status: 3") && answer.contains("gateway.frame_bytes_max"), "{answer}");
    let answer = post_logs(&gateway, PROTOBUF, "content-encoding: gzip\r\n", &bomb).await;
    assert_eq!(split(&answer).0, 413, "{answer}");
    let answer = call("snappy", body.clone()).await;
    assert!(answer.contains("grpc-status: 12") && answer.contains("grpc-accept-encoding: "), "{answer}");
    let answer = call("gzip", gzip(&body)[..10].to_vec()).await;
    assert!(answer.contains("grpc-status: 3"), "{answer}");
}

#[tokio::test]
async fn what_is_no_request_is_refused_for_good() {
    let pod = FakePod::start("pod-1");
    let gateway = gateway(&[&pod]).await;
    for (kind, body, status, part) in [
        (PROTOBUF, &b"\x0a\x7f"[..], 400, "not a protobuf message"),
        ("application/json", b"{", 400, "not an OTLP request in JSON"),
        ("text/plain", b"x", 415, "application/x-protobuf"),
    ] {
        let answer = post_logs(&gateway, kind, "", body).await;
        assert_eq!(split(&answer).0, status, "{answer}");
        assert!(answer.contains(part) && !answer.contains("retry-after"), "{answer}");
    }
    let path = "/opentelemetry.proto.collector.logs.v1.LogsService/Export";
    for body in [&b""[..], b"\0\0\0\0\x05a", b"\0\0\0\0\0more", b"\x07\0\0\0\0"] {
        let headers = format!("content-type: application/grpc\r\n{TABLE_HEADER}: {LOGS}\r\n");
        let answer = post(&gateway, path, &headers, body).await;
        assert!(answer.contains("grpc-status: 3"), "{body:?}: {answer}");
    }
    let answer = post(&gateway, path, "content-type: application/json\r\n", b"{}").await;
    assert_eq!(split(&answer).0, 415, "{answer}");
    assert_eq!(pod.see(|memory| memory.opens.len()), 0);
}

#[tokio::test]
async fn a_credential_opens_a_stream_of_its_own() {
    let pod = FakePod::start("pod-1");
    let gateway = gateway(&[&pod]).await;
    for token in ["a", "b", "a"] {
        let header = format!("authorization: Bearer {token}\r\n");
        let answer = post_logs(&gateway, PROTOBUF, &header, &logs(1).encode_to_vec()).await;
        assert_eq!(split(&answer).0, 200);
    }
    assert_eq!(pod.see(|memory| memory.opens.len()), 2);
}

#[tokio::test]
async fn a_gateway_that_goes_away_answers_what_it_took() {
    let pod = FakePod::start("pod-1");
    pod.tell(|memory| memory.acks = false);
    let gateway = gateway(&[&pod]).await;
    let mut client = client(&gateway).await;
    let draining = async {
        pod.until("a record", |memory| memory.records() == 1).await;
        let acking = async {
            pod.until("the end", |memory| memory.finishes.len() == 1).await;
            pod.ack(1).await;
            pod.answer(Ok(Answer::Finished(proto::Finished {}))).await;
        };
        // Within a moment: neither the grace for producers nor a deadline is waited for.
        let drained =
            tokio::time::timeout(Duration::from_millis(900), gateway.drain(Duration::from_secs(20)));
        let (drained, ()) = tokio::join!(drained, acking);
        drained.expect("at once");
    };
    let (answer, ()) = tokio::join!(export(&mut client, 1), draining);
    answer.expect("durable");
}

#[tokio::test]
async fn an_exporter_may_hang_up_while_it_waits() {
    let pod = FakePod::start("pod-1");
    pod.tell(|memory| memory.acks = false);
    let gateway = gateway(&[&pod]).await;
    let mut first = client(&gateway).await;
    tokio::select! {
        biased; // the export has to be sent before it is dropped
        answer = export(&mut first, 1) => panic!("answered: {answer:?}"),
        () = pod.until("a record", |memory| memory.records() == 1) => {}
    }
    drop(first);
    let mut second = client(&gateway).await;
    let acking = async {
        pod.until("another", |memory| memory.records() == 2).await;
        pod.ack(2).await;
    };
    let (answer, ()) = tokio::join!(export(&mut second, 1), acking);
    answer.expect("the stream goes on");
    assert_eq!(pod.see(|memory| memory.opens.len()), 1);
}
