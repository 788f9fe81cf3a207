//! Producers that begin something and do not go on, and producers that do not listen.

use std::time::Duration;

use sluice_gateway::GatewayConfig;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep};

use crate::harness::{FakePod, Producer, gateway_with, metric, soon};
use crate::websocket::RawSocket;

const TIMEOUT_MS: u64 = 300;

fn short(config: &mut GatewayConfig) {
    config.read_timeout_ms = TIMEOUT_MS;
    config.handshake_timeout_ms = TIMEOUT_MS;
    config.write_timeout_ms = TIMEOUT_MS;
}

fn errors(code: &str) -> String {
    format!("sluice_gateway_errors_total{{code=\"{code}\"}}")
}

#[tokio::test]
async fn what_is_begun_before_a_request_is_there_is_not_waited_for() {
    let gateway = gateway_with(&[], short).await;
    for begun in [&b""[..], b"P", b"PRI * HTTP/2.0\r\n", b"GET", b"GET / HTTP/1.1\r\nhost: x\r\nx-y: "] {
        let mut socket = TcpStream::connect(gateway.address()).await.expect("connects");
        socket.write_all(begun).await.expect("sends");
        let (began, mut more) = (Instant::now(), 0);
        // One byte now and then keeps nothing open.
        let mut answer = Vec::new();
        let closed = async {
            loop {
                tokio::select! {
                    biased; // the end first
                    read = socket.read_buf(&mut answer) => if matches!(read, Ok(0) | Err(_)) { return },
                    () = sleep(Duration::from_millis(TIMEOUT_MS / 4)) => {
                        more += 1;
                        let _ = socket.write_all(b"I").await;
                    }
                }
            }
        };
        soon("the end", closed).await;
        let took = began.elapsed();
        assert!(took < Duration::from_millis(10 * TIMEOUT_MS), "{begun:?}: {took:?}, {more} bytes more");
    }
}

#[tokio::test]
async fn a_websocket_message_that_does_not_go_on_is_refused_and_silence_between_them_is_not() {
    let pod = FakePod::start("pod-1");
    let gateway = gateway_with(&[&pod], short).await;
    let mut silent = Producer::plain(&gateway).await;
    for (name, begun) in [
        ("a header", &[0x81_u8][..]),
        ("half a length", &[0x82, 0xfe, 0xff]),
        ("a payload", &[0x81, 0x85, 1, 2, 3, 4, 5]),
        ("a fragment", &[0x01, 0x80, 0, 0, 0, 0]),
    ] {
        let mut socket = RawSocket::open(gateway.address(), "").await;
        socket.send(begun).await;
        // A ping is no progress of a message.
        if name == "a fragment" {
            sleep(Duration::from_millis(TIMEOUT_MS / 2)).await;
            socket.send(&[0x89, 0x80, 0, 0, 0, 0]).await;
        }
        let (text, close) = socket.end().await;
        assert_eq!(close, Some(1012), "{name}: {text}");
        assert!(text.contains("frame_timeout"), "{name}: {text}");
    }
    assert_eq!(metric(gateway.address(), &errors("frame_timeout")).await, 4);
    silent.text("{\"a\":1}").await;
    silent.until_durable(0).await;
}

#[tokio::test]
async fn a_slow_message_that_goes_on_is_taken() {
    let pod = FakePod::start("pod-1");
    let gateway = gateway_with(&[&pod], short).await;
    let mut socket = RawSocket::open(gateway.address(), "").await;
    const PIECES: usize = 8;
    const PIECE: usize = 20 << 10;
    let length = (PIECES * PIECE + 2) as u64;
    socket.send(&[&[0x81, 0xff][..], &length.to_be_bytes(), &[0; 4], b"\""].concat()).await;
    for _ in 0..PIECES {
        sleep(Duration::from_millis(TIMEOUT_MS / 2)).await;
        socket.send(&[b'x'; PIECE]).await;
    }
    socket.send(b"\"").await;
    pod.until("the record", |memory| memory.records() == 1).await;
}

#[tokio::test]
async fn a_posts_record_that_does_not_go_on_is_refused_and_one_that_ends_is_taken() {
    let pod = FakePod::start("pod-1");
    let gateway = gateway_with(&[&pod], short).await;
    for (piece, status) in [(&b"x"[..], "408"), (b"{}\n", "200")] {
        let mut socket = TcpStream::connect(gateway.address()).await.expect("connects");
        let head = "POST /v1/tables/t/records HTTP/1.1\r\nhost: x\r\ncontent-type: application/x-ndjson\r\n\
                    transfer-encoding: chunked\r\nconnection: close\r\n\r\n";
        socket.write_all(head.as_bytes()).await.expect("sends");
        let chunk = [format!("{:x}\r\n", piece.len()).as_bytes(), piece, b"\r\n"].concat();
        for _ in 0..10 {
            // Where it was refused already the answer is there.
            let _ = socket.write_all(&chunk).await;
            sleep(Duration::from_millis(TIMEOUT_MS / 3)).await;
        }
        let _ = socket.write_all(b"0\r\n\r\n").await;
        let mut answer = Vec::new();
        let _ = soon("the answer", socket.read_to_end(&mut answer)).await;
        let answer = String::from_utf8_lossy(&answer);
        assert_eq!(answer.split(' ').nth(1), Some(status), "{answer}");
    }
    assert_eq!(metric(gateway.address(), &errors("body_timeout")).await, 1);
}

#[tokio::test]
async fn who_reads_no_answers_of_http1_is_closed() {
    let pod = FakePod::start("pod-1");
    // A description that no kernel buffer takes whole.
    let description = format!("{{\"x\":\"{}\"}}", "x".repeat(900 << 10));
    pod.tell(|memory| memory.specs.push(description.into()));
    let gateway = gateway_with(&[&pod], short).await;
    let mut socket = TcpStream::connect(gateway.address()).await.expect("connects");
    let asked = "GET /v1/tables/flights HTTP/1.1\r\nhost: x\r\n\r\n".repeat(50);
    socket.write_all(asked.as_bytes()).await.expect("sends");
    let closed = async {
        while metric(gateway.address(), &errors("slow_consumer")).await != 1 {
            sleep(Duration::from_millis(50)).await;
        }
    };
    soon("the close", closed).await;
    drop(socket);
}
