//! Every edge works before a pod that acks all at once, and so does what it is measured beside; figures are of no interest
//! here.

use std::path::{Path, PathBuf};
use std::time::Duration;

use sluice_loadtest::bench::{Figures, median};
use sluice_loadtest::cluster::{Process, find_sluice};
use sluice_loadtest::edges::{self, EDGES, Options};
use sluice_loadtest::report::Report;
use sluice_shared::proto::zerobus::ephemeral_stream_request::Payload as Ask;
use sluice_shared::proto::zerobus::ephemeral_stream_response::Payload as Answer;
use sluice_shared::proto::zerobus::ingest_record_request::Record;
use sluice_shared::proto::zerobus::zerobus_client::ZerobusClient;
use sluice_shared::proto::zerobus::{self, EphemeralStreamRequest};

/// The program whose crate this is, as cargo built it beside the test.
fn loadtest() -> PathBuf {
    Path::new(env!("CARGO_BIN_EXE_loadtest")).to_owned()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_edge_hands_on_all_that_it_acks() {
    let dir = tempfile::tempdir().expect("a directory");
    let options = Options {
        sluice: find_sluice().expect("the program under test"),
        loadtest: loadtest(),
        dir: dir.path().to_owned(),
        run: Duration::from_millis(200),
        runs: 1,
        feed_bytes: 2 << 20,
        only: Vec::new(),
    };
    // The bench itself compares what was acked with what came to the pod.
    let ran = Box::pin(edges::run(&options, &|what| println!("{what}"))).await;
    let edges = ran.unwrap_or_else(|error| panic!("{error:#}"));
    assert_eq!(edges.len(), 2 * EDGES.len(), "each with small and with larger records");
    for edge in &edges {
        let rate = |run: &edges::Run| run.records_per_s;
        assert!(median(&edge.gateway, rate) > 0.0 && median(&edge.bare, rate) > 0.0, "{edge:?}");
    }
    let report = Report::new(Figures { edges, ..Figures::default() });
    println!("{report}");
    assert!(report.is_met(), "nothing was aimed at");
}

#[tokio::test]
async fn the_null_zerobus_server_acks_everything_it_is_sent() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut command = std::process::Command::new(loadtest());
    command.arg("null-zerobus");
    let (server, line) =
        Process::start("null-zerobus", command, "listens on ", dir.path()).expect("it starts");
    let address = line.strip_prefix("listens on ").expect("an address");
    let mut client = ZerobusClient::connect(format!("http://{address}")).await.expect("connects");
    let (requests, receiver) = tokio::sync::mpsc::channel(8);
    let send = async |payload| {
        requests.send(EphemeralStreamRequest { payload: Some(payload) }).await.expect("the call is open");
    };
    let call = tokio_stream::wrappers::ReceiverStream::new(receiver);
    let mut answers = client.ephemeral_stream(call).await.expect("headers at once").into_inner();
    send(Ask::CreateStream(zerobus::CreateIngestStreamRequest::default())).await;
    let created = answers.message().await.expect("an answer").and_then(|answer| answer.payload);
    let Some(Answer::CreateStreamResponse(created)) = created else { panic!("{created:?}") };
    assert!(created.stream_id.is_some(), "clients need one");
    for offset in 0..5 {
        let record = Some(Record::JsonRecord("{}".into()));
        send(Ask::IngestRecord(zerobus::IngestRecordRequest { offset_id: Some(offset), record })).await;
    }
    let mut acked = -1;
    while acked < 4 {
        let answer = answers.message().await.expect("an answer").and_then(|answer| answer.payload);
        let Some(Answer::IngestRecordResponse(ack)) = answer else { panic!("{answer:?}") };
        let offset = ack.durability_ack_up_to_offset.expect("an offset");
        assert!((acked + 1..5).contains(&offset), "{offset} after {acked}");
        acked = offset;
    }
    drop(requests);
    assert_eq!(answers.message().await.expect("no failure"), None);
    server.kill().expect("it ran until now");
}
