//! Producers that vanish, and producers that do not listen: nothing acked is lost, nobody else is held up.

use std::sync::atomic::{AtomicU64, Ordering};

use futures_util::SinkExt;
use serde_json::json;
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpSocket, TcpStream};
use tokio_tungstenite::tungstenite::Message;

use crate::ledger::Ledger;
use crate::server::{Server, soon, until};
use crate::wire::Producer;

/// How a connection ends under its stream.
#[derive(Debug, Clone, Copy)]
enum End {
    Reset,
    Dropped,
    HalfClosed,
}

async fn end(mut producer: Producer, how: End) {
    match how {
        End::Reset => producer.reset(),
        End::Dropped => drop(producer),
        End::HalfClosed => {
            producer.socket.get_mut().shutdown().await.expect("shuts down");
            while !matches!(producer.hear().await, crate::wire::Heard::Lost) {}
        }
    }
}

#[tokio::test]
async fn a_producer_that_vanishes_within_a_frame_leaves_what_was_acked() {
    let server = Server::start(&[]);
    let mut ledger = Ledger::create(&server, "t", &[]).await;
    for how in [End::Reset, End::Dropped, End::HalfClosed] {
        for framed in [false, true] {
            let mut producer = match framed {
                true => Producer::framed(&server, "t", json!({})).await,
                false => Producer::plain(&server, "t").await,
            };
            for _ in 0..3 {
                match framed {
                    true => ledger.send_framed(&mut producer).await,
                    false => ledger.send(&mut producer).await,
                }
            }
            // The header of a message of 1 MiB, and some of it.
            let first = if framed { 0x82 } else { 0x81 };
            producer.bytes(&[first, 0xff, 0, 0, 0, 0, 0, 0x10, 0, 0, 0, 0, 0, 0]).await;
            producer.bytes(b"{\"id\":999,\"s\":\"").await;
            end(producer, how).await;
            ledger.good().await;
        }
    }
    server.expect_no_stream().await;
    ledger.check().await;
    server.end();
}

#[tokio::test]
async fn a_producer_that_vanishes_before_its_stream_is_open_leaves_nothing() {
    let server = Server::start(&[]);
    let mut ledger = Ledger::create(&server, "t", &[]).await;
    for request in
        ["", "GET /v1/tab", "PUT /v1/tables/u HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{\"schema\":"]
    {
        let mut socket = TcpStream::connect(server.address).await.expect("connects");
        socket.write_all(request.as_bytes()).await.expect("sends");
        socket.set_zero_linger().expect("sets an option");
    }
    for how in [End::Reset, End::Dropped, End::HalfClosed] {
        end(Producer::connect(&server, "t/stream", true).await, how).await;
        let mut producer = Producer::connect(&server, "t/stream", true).await;
        producer.bytes(&[0x82, 0x8f, 0, 0, 0, 0, 0x01, b'{']).await;
        end(producer, how).await;
        ledger.good().await;
    }
    server.expect_no_stream().await;
    // Only the connection that asks is left.
    let look = async || (server.metric("sluice_gateway_connections").await == 1).then_some(());
    until("the end of all connections", look).await;
    server.expect_no_table("u").await;
    ledger.check().await;
    server.end();
}

#[tokio::test]
async fn a_producer_that_vanishes_with_records_on_their_way_leaves_a_prefix() {
    const RECORDS: u64 = 500;
    let server = Server::start(&[]);
    let mut ledger = Ledger::create(&server, "t", &[]).await;
    for (number, how) in [End::Reset, End::Dropped, End::Reset, End::Dropped].into_iter().enumerate() {
        let open = json!({ "name": format!("n{number}") });
        let mut producer = Producer::framed(&server, "t", open.clone()).await;
        let first_id = ledger.id();
        for offset in 0..RECORDS {
            let id = if offset == 0 { first_id } else { ledger.id() };
            producer.records(offset, 1, format!("{{\"id\":{id}}}").as_bytes()).await;
        }
        end(producer, how).await;
        let mut again = Producer::framed(&server, "t", open).await;
        assert!(again.next_offset <= RECORDS, "{}", again.next_offset);
        for offset in 0..again.next_offset {
            ledger.owe(&again.stream, offset, first_id + offset as i64);
        }
        ledger.send_framed(&mut again).await;
        ledger.good().await;
    }
    server.expect_no_stream().await;
    ledger.check().await;
    server.end();
}

/// Sends as fast as the gateway takes it, reads nothing, until it is closed. `sent` counts the messages of all.
async fn flood(server: &Server, sent: &AtomicU64) {
    let socket = TcpSocket::new_v4().expect("a socket");
    socket.set_recv_buffer_size(4096).expect("sets an option");
    let socket = socket.connect(server.address).await.expect("connects");
    let mut producer = Producer::upgrade(server, socket, "t/stream", false).await;
    // Each line is answered by far more bytes than it has.
    let bad = "x\n".repeat(10_000);
    while producer.socket.send(Message::text(bad.clone())).await.is_ok() {
        sent.fetch_add(1, Ordering::Relaxed);
    }
}

async fn floods(server: &Server, sent: &AtomicU64) {
    tokio::join!(flood(server, sent), flood(server, sent), flood(server, sent));
}

/// What the answers to those who do not read may take.
const MEMORY_BYTES: u64 = 128 << 20;
const WINDOW: (&str, &str) = ("SLUICE_GATEWAY__WINDOW_BYTES", "128KiB");

/// As long as they are not closed others go on: so many rounds come before that, however long each takes.
#[tokio::test]
async fn a_producer_that_never_reads_holds_up_nobody() {
    const ROUNDS: usize = 10;
    let server = Server::start(&[("SLUICE_GATEWAY__WRITE_TIMEOUT_MS", "600000"), WINDOW]);
    let mut ledger = Ledger::create(&server, "t", &[]).await;
    ledger.good().await;
    let (before, sent) = (server.memory_bytes(), AtomicU64::new(0));
    let good = async {
        let floods = async || (sent.load(Ordering::Relaxed) >= 6).then_some(());
        until("messages whose answers nobody reads", floods).await;
        for _ in 0..ROUNDS {
            ledger.good().await;
            let grown = server.memory_bytes().saturating_sub(before);
            assert!(grown < MEMORY_BYTES, "{grown} bytes more than before");
        }
    };
    tokio::select! {
        biased; // the close first
        () = floods(&server, &sent) => panic!("closed before their time"),
        () = good => {}
    }
    server.end();
}

#[tokio::test]
async fn a_producer_that_never_reads_is_closed() {
    let server = Server::start(&[("SLUICE_GATEWAY__WRITE_TIMEOUT_MS", "1500"), WINDOW]);
    let mut ledger = Ledger::create(&server, "t", &[]).await;
    ledger.good().await;
    let sent = AtomicU64::new(0);
    soon("the close of those who do not read", Box::pin(floods(&server, &sent))).await;
    let name = "sluice_gateway_errors_total{code=\"slow_consumer\"}";
    assert_eq!(server.metric(name).await, 3);
    server.expect_no_stream().await;
    ledger.good().await;
    server.end();
}
