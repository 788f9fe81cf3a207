//! Limits of one address and of all memory.

use std::net::SocketAddr;

use futures_util::SinkExt;
use sluice_shared::config::ByteSize;
use sluice_shared::proto::{self, stream_response::Kind as Answer};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio_tungstenite::tungstenite::Message;

use crate::harness::{FakePod, Producer, gateway_with, metric, soon, split};

const TOO_MANY: &str = "sluice_gateway_errors_total{code=\"too_many_connections\"}";

async fn connect_from(from: &str, to: SocketAddr) -> TcpStream {
    let socket = TcpSocket::new_v4().expect("a socket");
    socket.bind(SocketAddr::new(from.parse().expect("an address"), 0)).expect("binds");
    soon("the connection", socket.connect(to)).await.expect("connects")
}

/// Status and body of `GET path`.
async fn get_from(from: &str, to: SocketAddr, path: &str) -> (u16, String) {
    let mut socket = connect_from(from, to).await;
    let request = format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
    socket.write_all(request.as_bytes()).await.expect("sends");
    let mut answer = Vec::new();
    // One that is refused before its request was read may end by a reset, behind the answer.
    let _ = soon("the answer", socket.read_to_end(&mut answer)).await;
    split(&String::from_utf8_lossy(&answer))
}

/// The value of a metric, asked for from another address.
async fn metric_elsewhere(to: SocketAddr, name: &str) -> u64 {
    let (_, text) = get_from("127.0.0.9", to, "/metrics").await;
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.and_then(|value| value.parse().ok()).unwrap_or(0)
}

#[tokio::test]
async fn one_address_has_so_many_connections_and_others_have_theirs() {
    let pod = FakePod::start("pod-1");
    let gateway = gateway_with(&[&pod], |config| config.connections_per_peer_max = 2).await;
    let (first, second) = (Producer::plain(&gateway).await, Producer::plain(&gateway).await);
    let (status, body) = get_from("127.0.0.1", gateway.address(), "/healthz").await;
    assert_eq!(status, 503);
    assert!(body.contains("too_many_connections"), "{body}");
    assert!(body.contains("gateway.connections_per_peer_max"), "{body}");
    assert_eq!(get_from("127.0.0.2", gateway.address(), "/healthz").await.0, 200);
    assert_eq!(metric_elsewhere(gateway.address(), TOO_MANY).await, 1);
    drop((first, second));
    let free = async {
        while get_from("127.0.0.1", gateway.address(), "/healthz").await.0 != 200 {
            tokio::task::yield_now().await;
        }
    };
    soon("a place that is given back", free).await;
}

#[tokio::test]
async fn one_address_makes_so_many_connections_a_second() {
    let gateway = gateway_with(&[], |config| config.connects_per_peer_per_s = 1).await;
    let mut answers = Vec::new();
    for _ in 0..10 {
        answers.push(get_from("127.0.0.1", gateway.address(), "/healthz").await);
    }
    let refused: Vec<_> = answers.iter().filter(|(status, _)| *status == 503).collect();
    assert!(refused.len() >= 6, "two at once and one a second, not {} of 10", 10 - refused.len());
    assert!(refused.iter().all(|(_, body)| body.contains("connects_per_peer_per_s")), "{refused:?}");
    assert_eq!(get_from("127.0.0.2", gateway.address(), "/healthz").await.0, 200);
    assert_eq!(metric_elsewhere(gateway.address(), TOO_MANY).await as usize, refused.len());
}

#[tokio::test]
async fn all_windows_together_are_bounded_and_all_streams_end_well() {
    const STREAMS: usize = 64;
    const RECORD: usize = 64 << 10;
    const RECORDS: u64 = 24;
    const MEMORY: u64 = 8 << 20;
    let pod = FakePod::start("pod-1");
    pod.tell(|memory| memory.acks = false);
    let limit = |config: &mut sluice_gateway::GatewayConfig| {
        (config.memory_bytes, config.window_bytes) = (ByteSize(MEMORY), ByteSize::mib(1));
    };
    let gateway = gateway_with(&[&pod], limit).await;
    let mut producers = Vec::new();
    for _ in 0..STREAMS {
        producers.push(Producer::plain(&gateway).await);
    }
    let record = format!("\"{}\"", "x".repeat(RECORD - 2));
    // One after the other, each as much as its window would take: 64 MiB together.
    let sending = producers.into_iter().map(|mut producer| {
        let record = record.clone();
        async move {
            for _ in 0..RECORDS {
                producer.socket.send(Message::text(record.clone())).await.expect("sends");
            }
            producer.until_durable(RECORDS - 1).await;
        }
    });
    let all = futures_util::future::join_all(sending);
    let bounded = async {
        // Until each stream holds its one frame and nothing more goes in.
        let mut last = 0;
        loop {
            let held = metric(gateway.address(), "sluice_gateway_window_bytes").await;
            // A frame of each stream is its right, whatever the others hold.
            assert!(held <= MEMORY + (STREAMS * (RECORD + 64)) as u64, "{held}");
            let streams = pod.see(|memory| memory.frames.iter().filter(|frames| !frames.is_empty()).count());
            if streams == STREAMS && held == last {
                return held;
            }
            last = held;
            tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        }
    };
    let mut all = std::pin::pin!(all);
    let held = tokio::select! {
        biased; // the order is of no consequence
        _ = all.as_mut() => panic!("nothing was acked"),
        held = soon("a standstill", bounded) => held,
    };
    assert!(held > MEMORY / 2, "{held}");
    // Everything that came is acked, and what comes from now on.
    pod.tell(|memory| memory.acks = true);
    let taken: Vec<u64> = pod.see(|memory| {
        memory.frames.iter().map(|frames| frames.iter().map(|frame| u64::from(frame.count)).sum()).collect()
    });
    for (call, durable_next) in taken.into_iter().enumerate() {
        let ack = proto::Ack { durable_next, committed_next: 0, version: 0 };
        pod.answer_on(call, Answer::Ack(ack)).await;
    }
    soon("all records", all).await;
    assert_eq!(pod.see(|memory| memory.records()), STREAMS as u64 * RECORDS);
}
