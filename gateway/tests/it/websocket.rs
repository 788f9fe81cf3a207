//! What is no WebSocket, byte by byte.

use std::net::SocketAddr;
use std::time::Duration;

use sluice_gateway::GatewayConfig;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::harness::{FakePod, gateway_with, get, metric, soon, split};

/// An upgraded connection whose frames the test makes itself.
pub(crate) struct RawSocket {
    socket: TcpStream,
    pub(crate) head: String,
    rest: Vec<u8>,
}

impl RawSocket {
    /// A plain stream to `flights`. `headers`: more of them.
    pub(crate) async fn open(address: SocketAddr, headers: &str) -> Self {
        let mut socket = TcpStream::connect(address).await.expect("connects");
        socket.write_all(upgrade(headers).as_bytes()).await.expect("sends");
        let mut answer = Vec::new();
        let end = loop {
            let read = soon("the upgrade", socket.read_buf(&mut answer)).await.expect("reads");
            let end = answer.windows(4).position(|window| window == b"\r\n\r\n");
            match end {
                Some(end) => break end + 4,
                None => assert!(read > 0, "closed: {}", String::from_utf8_lossy(&answer)),
            }
        };
        let head = String::from_utf8_lossy(&answer[..end]).into_owned();
        assert!(head.starts_with("HTTP/1.1 101"), "{head}");
        Self { socket, head, rest: answer.split_off(end) }
    }

    pub(crate) async fn send(&mut self, bytes: &[u8]) {
        self.socket.write_all(bytes).await.expect("sends");
    }

    /// All texts up to the end, and the code of the close.
    pub(crate) async fn end(mut self) -> (String, Option<u16>) {
        // A reset ends it too.
        let _ = soon("the end", self.socket.read_to_end(&mut self.rest)).await;
        let (mut bytes, mut texts, mut close) = (self.rest.as_slice(), String::new(), None);
        while let [first, second, rest @ ..] = bytes {
            let (length, rest) = match second {
                126 => (usize::from(u16::from_be_bytes([rest[0], rest[1]])), &rest[2..]),
                short => (usize::from(*short), rest),
            };
            let (payload, after) = rest.split_at(length);
            match first & 0x0f {
                8 => close = payload.first_chunk().map(|code| u16::from_be_bytes(*code)),
                1 => texts.push_str(&String::from_utf8_lossy(payload)),
                _ => {}
            }
            bytes = after;
        }
        (texts, close)
    }
}

fn upgrade(headers: &str) -> String {
    format!(
        "GET /v1/tables/flights/stream HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: upgrade\r\n\
         upgrade: websocket\r\nsec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\
         {headers}\r\n"
    )
}

/// A masked frame (the mask is zero) with this first byte.
fn frame(first: u8, payload: &[u8]) -> Vec<u8> {
    assert!(payload.len() < 65_536, "a short length");
    let length = match payload.len() {
        short @ 0..126 => vec![0x80 | short as u8],
        long => [&[0x80 | 126][..], &(long as u16).to_be_bytes()].concat(),
    };
    [&[first][..], &length, &[0; 4], payload].concat()
}

#[tokio::test]
async fn what_breaks_the_protocol_is_closed_with_its_code() {
    let pod = FakePod::start("pod-1");
    let gateway = gateway_with(&[&pod], |_| {}).await;
    let huge = [&[0x81, 0xff][..], &(1_u64 << 63).to_be_bytes(), &[0; 4]].concat();
    let large = [&[0x82, 0xff][..], &u64::from(u32::MAX).to_be_bytes(), &[0; 4]].concat();
    for (case, bytes, code, close) in [
        ("not masked", vec![0x81, 2, b'{', b'}'], "websocket_protocol", 1002),
        ("a reserved bit", frame(0xc1, b"{}"), "websocket_protocol", 1002),
        ("an unknown opcode", frame(0x83, b"{}"), "websocket_protocol", 1002),
        ("an unknown control opcode", frame(0x8b, b""), "websocket_protocol", 1002),
        ("a control frame in fragments", frame(0x09, b""), "websocket_protocol", 1002),
        ("a ping of 126 bytes", frame(0x89, &[0; 126]), "websocket_protocol", 1002),
        ("a fragment of nothing", frame(0x80, b"{}"), "websocket_protocol", 1002),
        (
            "a message within another",
            [frame(0x01, b"{"), frame(0x81, b"{}")].concat(),
            "websocket_protocol",
            1002,
        ),
        ("a text that is not UTF-8", frame(0x81, &[b'"', 0xff, b'"']), "invalid_utf8", 1007),
        ("2^63 bytes", huge, "record_too_large", 1009),
        ("2^32 - 1 bytes", large, "record_too_large", 1009),
    ] {
        let mut socket = RawSocket::open(gateway.address(), "").await;
        socket.send(&bytes).await;
        let (texts, closed) = socket.end().await;
        assert!(texts.contains(code), "{case}: {texts}");
        assert_eq!(closed, Some(close), "{case}: {texts}");
    }
    for close in [999_u16, 1005, 1006, 1015, 2999] {
        let mut socket = RawSocket::open(gateway.address(), "").await;
        socket.send(&frame(0x88, &close.to_be_bytes())).await;
        let (_, closed) = socket.end().await;
        assert_eq!(closed, Some(1002), "a close with {close}");
    }
    assert_eq!(pod.see(|memory| memory.records()), 0);
}

#[tokio::test]
async fn a_message_in_too_many_fragments_is_refused() {
    let pod = FakePod::start("pod-1");
    let gateway = gateway_with(&[&pod], |_| {}).await;
    for piece in [&b""[..], b" "] {
        let mut socket = RawSocket::open(gateway.address(), "").await;
        socket.send(&frame(0x01, b"{")).await;
        let fragments = frame(0x00, piece).repeat(10_000);
        for _ in 0..100 {
            // Once it is refused the rest is thrown away, and then the connection is closed.
            if socket.socket.write_all(&fragments).await.is_err() {
                break;
            }
        }
        let (texts, close) = socket.end().await;
        assert!(texts.contains("too_many_fragments"), "{texts}");
        assert_eq!(close, Some(1009));
    }
}

#[tokio::test]
async fn no_extension_is_agreed_on_and_headers_of_proxies_mean_nothing() {
    let pod = FakePod::start("pod-1");
    let gateway = gateway_with(&[&pod], |_| {}).await;
    let headers = "sec-websocket-extensions: permessage-deflate; client_max_window_bits\r\n\
                   x-sluice-tenant: somebody\r\nx-forwarded-for: 10.1.2.3\r\nforwarded: for=10.1.2.3\r\n\
                   cookie: session=somebody\r\n";
    let socket = RawSocket::open(gateway.address(), headers).await;
    assert!(!socket.head.to_ascii_lowercase().contains("extensions"), "{}", socket.head);
    let open = pod.see(|memory| format!("{:?}", memory.opens));
    for planted in ["somebody", "10.1.2.3"] {
        assert!(!open.contains(planted) && !socket.head.contains(planted), "{open}");
    }
    // A compressed message: nobody agreed on that.
    let mut socket = socket;
    socket.send(&frame(0xc1, &[0xaa, 0x56, 0x2a])).await;
    let (texts, close) = socket.end().await;
    assert_eq!(close, Some(1002), "{texts}");
}

#[tokio::test]
async fn pages_of_others_get_no_websocket() {
    let pod = FakePod::start("pod-1");
    let listed = |config: &mut GatewayConfig| config.allowed_origins = vec!["https://app.example".to_owned()];
    let gateway = gateway_with(&[&pod], listed).await;
    for origin in ["https://evil.example", "null", "http://127.0.0.1:81"] {
        let request = upgrade(&format!("origin: {origin}\r\n"));
        let (status, body) = split(&crate::harness::raw(gateway.address(), request.as_bytes()).await);
        assert_eq!(status, 403, "{origin}: {body}");
        assert!(body.contains("origin_not_allowed"), "{body}");
    }
    assert!(pod.see(|memory| memory.opens.is_empty()));
    for origin in ["https://app.example", "http://127.0.0.1"] {
        RawSocket::open(gateway.address(), &format!("origin: {origin}\r\n")).await;
    }
}

#[tokio::test]
async fn made_up_names_make_no_metrics() {
    let pod = FakePod::start("pod-1");
    let gateway = gateway_with(&[&pod], |_| {}).await;
    assert_eq!(get(gateway.address(), "GET", "/v1/tables/nothing").await.0, 404);
    let lines = || async { get(gateway.address(), "GET", "/metrics").await.1.lines().count() };
    let before = lines().await;
    for n in 0..200 {
        assert_eq!(get(gateway.address(), "GET", &format!("/v1/tables/made_up_{n}")).await.0, 404);
    }
    assert_eq!(lines().await, before);
    let name = "sluice_gateway_errors_total{code=\"table_not_found\"}";
    assert_eq!(metric(gateway.address(), name).await, 201);
}

#[tokio::test]
async fn an_empty_message_is_no_record_and_holds_nothing_up() {
    let pod = FakePod::start("pod-1");
    let gateway = gateway_with(&[&pod], |_| {}).await;
    let mut socket = RawSocket::open(gateway.address(), "").await;
    socket.send(&frame(0x81, b"").repeat(10_000)).await;
    socket.send(&frame(0x81, b"\n \n\n").repeat(1000)).await;
    socket.send(&frame(0x81, b"{}")).await;
    pod.until("the record", |memory| memory.records() == 1).await;
    tokio::time::timeout(Duration::from_secs(5), socket.send(&frame(0x88, &1000_u16.to_be_bytes())))
        .await
        .expect("sends");
    assert_eq!(socket.end().await.1, Some(1000));
}
