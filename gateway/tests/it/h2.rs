//! HTTP/2 frame by frame: what well-behaved clients never send.
//!
//! *Owns*: frames made by hand, how a connection ends, that others are served meanwhile.
//! *Does not own*: calls as clients make them (`zerobus`).

use std::net::SocketAddr;
use std::time::Duration;

use sluice_gateway::GatewayConfig;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::harness::{FakePod, gateway_with, get, metric, soon};

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const GOAWAY: u8 = 7;
const WINDOW_UPDATE: u8 = 8;
const CONTINUATION: u8 = 9;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;
const ENHANCE_YOUR_CALM: u32 = 11;
/// `:status: 431` in the coding of HPACK.
const STATUS_431: &[u8] = &[0x48, 0x83, 0x69, 0x90, 0xff];

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).expect("small").to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// A header field without indexing, its name spelled out.
fn field(name: &str, value: &str) -> Vec<u8> {
    [&[0][..], &text(name), &text(value)].concat()
}

fn text(text: &str) -> Vec<u8> {
    let mut length = Vec::new();
    if text.len() < 127 {
        length.push(text.len() as u8);
    } else {
        length.push(127);
        let mut rest = text.len() - 127;
        while rest >= 128 {
            length.push(rest as u8 | 0x80);
            rest >>= 7;
        }
        length.push(rest as u8);
    }
    [&length, text.as_bytes()].concat()
}

/// The head of a request: `:method`, `:scheme`, `:path`, `:authority`.
fn head(method: &str, path: &str) -> Vec<u8> {
    let method = if method == "GET" { vec![0x82] } else { vec![0x83] };
    [method, vec![0x86], [&[0x04][..], &text(path)].concat(), [&[0x01][..], &text("x")].concat()].concat()
}

fn call() -> Vec<u8> {
    let head = head("POST", "/databricks.zerobus.Zerobus/EphemeralStream");
    [head, field("content-type", "application/grpc"), field("te", "trailers")].concat()
}

/// A gRPC message: its length and itself.
fn message(protobuf: &[u8]) -> Vec<u8> {
    [&[0][..], &u32::try_from(protobuf.len()).expect("small").to_be_bytes(), protobuf].concat()
}

/// `create_stream` into `main.default.flights`, JSON.
fn create_stream() -> Vec<u8> {
    use prost::Message;
    use sluice_shared::proto::zerobus::{self, ephemeral_stream_request::Payload};
    let create = zerobus::CreateIngestStreamRequest {
        table_name: Some("main.default.flights".to_owned()),
        record_type: Some(zerobus::RecordType::Json.into()),
        ..Default::default()
    };
    let request = zerobus::EphemeralStreamRequest { payload: Some(Payload::CreateStream(create)) };
    message(&request.encode_to_vec())
}

fn record(offset: i64) -> Vec<u8> {
    use prost::Message;
    use sluice_shared::proto::zerobus::{
        self, ephemeral_stream_request::Payload, ingest_record_request::Record,
    };
    let record = Some(Record::JsonRecord(bytes::Bytes::from_static(b"{}")));
    let ingest = zerobus::IngestRecordRequest { offset_id: Some(offset), record };
    let request = zerobus::EphemeralStreamRequest { payload: Some(Payload::IngestRecord(ingest)) };
    message(&request.encode_to_vec())
}

struct Raw {
    socket: TcpStream,
    read: Vec<u8>,
}

/// A frame from the gateway.
#[derive(Debug)]
struct Told {
    kind: u8,
    stream: u32,
    payload: Vec<u8>,
}

impl Raw {
    /// Connected, with these settings sent.
    async fn connect(address: SocketAddr, settings: &[(u16, u32)]) -> Self {
        let mut socket = TcpStream::connect(address).await.expect("connects");
        let settings: Vec<u8> = settings
            .iter()
            .flat_map(|(id, value)| [&id.to_be_bytes()[..], &value.to_be_bytes()].concat())
            .collect();
        let start = [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", &frame(SETTINGS, 0, 0, &settings)[..]].concat();
        socket.write_all(&start).await.expect("sends");
        Self { socket, read: Vec::new() }
    }

    async fn send(&mut self, bytes: &[u8]) {
        self.socket.write_all(bytes).await.expect("sends");
    }

    /// The next frame; None at the end.
    async fn next(&mut self) -> Option<Told> {
        loop {
            if let Some((head, rest)) = self.read.split_at_checked(9) {
                let length = u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize;
                if rest.len() >= length {
                    let stream = u32::from_be_bytes([head[5], head[6], head[7], head[8]]);
                    let told = Told { kind: head[3], stream, payload: rest[..length].to_vec() };
                    self.read.drain(..9 + length);
                    return Some(told);
                }
            }
            match self.socket.read_buf(&mut self.read).await {
                Ok(0) | Err(_) => return None,
                Ok(_) => {}
            }
        }
    }

    /// Reads on to a frame of this kind.
    async fn until(&mut self, kind: u8) -> Told {
        let found = async {
            loop {
                let told = self.next().await.unwrap_or_else(|| panic!("ended before a frame of kind {kind}"));
                if told.kind == kind {
                    return told;
                }
            }
        };
        soon("a frame", found).await
    }

    /// Sends `flood` again and again, up to `bytes_max`, and reads what comes back; answers the code of the GOAWAY.
    /// None where there was none: the gateway took all of it.
    async fn flood(mut self, flood: &[u8], bytes_max: usize) -> Option<u32> {
        let (mut sent, mut code) = (0, None);
        while sent < bytes_max && code.is_none() {
            if !matches!(timeout(Duration::from_secs(5), self.socket.write_all(flood)).await, Ok(Ok(()))) {
                break;
            }
            sent += flood.len();
            code = self.goaway(Duration::ZERO).await;
        }
        match code {
            Some(code) => Some(code),
            None => self.goaway(Duration::from_millis(500)).await,
        }
    }

    /// The code of a GOAWAY that comes in time; a connection that was closed without one has code 0.
    async fn goaway(&mut self, wait: Duration) -> Option<u32> {
        let found = async {
            loop {
                match self.next().await {
                    Some(Told { kind: GOAWAY, payload, .. }) => {
                        return u32::from_be_bytes(*payload[4..].first_chunk().expect("a code"));
                    }
                    Some(_) => {}
                    None => return 0,
                }
            }
        };
        timeout(wait, found).await.ok()
    }
}

/// Others are served.
async fn check_served(address: SocketAddr) {
    assert_eq!(get(address, "GET", "/healthz").await.0, 200);
    let mut other = Raw::connect(address, &[]).await;
    other.send(&frame(HEADERS, END_HEADERS | END_STREAM, 1, &head("GET", "/healthz"))).await;
    let answer = other.until(DATA).await;
    assert_eq!((answer.stream, answer.payload.as_slice()), (1, &b"ok\n"[..]));
}

fn short(config: &mut GatewayConfig) {
    (config.read_timeout_ms, config.write_timeout_ms) = (300, 300);
}

#[tokio::test]
async fn floods_end_their_connection_or_are_borne_and_others_are_served() {
    let pod = FakePod::start("pod-1");
    let gateway = gateway_with(&[&pod], |_| {}).await;
    let address = gateway.address();
    let ends = true;
    let resets: Vec<u8> = (0..500_u32)
        .flat_map(|n| {
            let stream = 2 * n + 1;
            let opened = frame(HEADERS, END_HEADERS, stream, &call());
            [opened, frame(RST_STREAM, 0, stream, &8_u32.to_be_bytes())].concat()
        })
        .collect();
    let continued = [
        frame(HEADERS, 0, 1, &head("GET", "/healthz")),
        frame(CONTINUATION, 0, 1, &field("x", &"y".repeat(1000))).repeat(1000),
    ]
    .concat();
    let empty_continued =
        [frame(HEADERS, 0, 1, &head("GET", "/healthz")), frame(CONTINUATION, 0, 1, b"").repeat(20_000)]
            .concat();
    let empty_data =
        [frame(HEADERS, END_HEADERS, 1, &call()), frame(DATA, 0, 1, b"").repeat(20_000)].concat();
    let over_window = frame(WINDOW_UPDATE, 0, 0, &0x7fff_ffff_u32.to_be_bytes()).repeat(2);
    for (case, flood, bytes_max, must_end) in [
        ("calls that are reset at once", resets, 1, ends),
        ("a head that goes on", continued, 1, ends),
        ("a head that goes on with nothing", empty_continued, 1, ends),
        ("data without bytes", empty_data, 1, ends),
        ("a window beyond 2^31", over_window, 1, ends),
        ("pings", frame(PING, 0, 0, &[7; 8]).repeat(1000), 4 << 20, false),
        ("settings", frame(SETTINGS, 0, 0, &[0, 4, 0, 0, 0xff, 0xff]).repeat(1000), 4 << 20, false),
    ] {
        let raw = Raw::connect(address, &[]).await;
        let (code, ()) = tokio::join!(raw.flood(&flood, bytes_max), check_served(address));
        assert!(code.is_some() || !must_end, "{case}: the connection goes on");
        if case.starts_with("calls") || case.starts_with("data") {
            assert_eq!(code, Some(ENHANCE_YOUR_CALM), "{case}");
        }
        check_served(address).await;
    }
    let streams = "sluice_gateway_streams";
    assert_eq!(metric(address, streams).await, 0, "none of it became a stream");
}

/// The frames of one head, `END_STREAM` included.
fn head_frames(stream: u32, block: &[u8]) -> Vec<u8> {
    let pieces: Vec<&[u8]> = block.chunks(16_000).collect();
    let frames = pieces.iter().enumerate().map(|(at, piece)| {
        let last = if at + 1 == pieces.len() { END_HEADERS } else { 0 };
        if at == 0 {
            frame(HEADERS, last | END_STREAM, stream, piece)
        } else {
            frame(CONTINUATION, last, stream, piece)
        }
    });
    frames.collect::<Vec<_>>().concat()
}

#[tokio::test]
async fn a_head_over_the_limit_is_answered_and_the_others_go_on() {
    let gateway = gateway_with(&[], |_| {}).await;
    let fields = [field("x", &"y".repeat(15_000)), field("z", &"y".repeat(1200))].concat();
    let mut raw = Raw::connect(gateway.address(), &[]).await;
    raw.send(&head_frames(1, &[head("GET", "/healthz"), fields].concat())).await;
    raw.send(&head_frames(3, &head("GET", "/healthz"))).await;
    let refused = raw.until(HEADERS).await;
    assert_eq!((refused.stream, refused.payload.as_slice()), (1, STATUS_431));
    let answer = raw.until(DATA).await;
    assert_eq!((answer.stream, answer.payload.as_slice()), (3, &b"ok\n"[..]));
}

#[tokio::test]
async fn a_few_bytes_that_stand_for_many_end_their_connection() {
    let gateway = gateway_with(&[], |_| {}).await;
    // An entry of the table of 3,000 bytes, named 200 times.
    let entry = [&[0x40][..], &text("x"), &text(&"y".repeat(3000))].concat();
    let bomb = [head("GET", "/healthz"), entry, vec![0x80 | 62; 200]].concat();
    let mut raw = Raw::connect(gateway.address(), &[]).await;
    raw.send(&head_frames(1, &bomb)).await;
    let code = raw.goaway(Duration::from_secs(5)).await;
    assert!(code.is_some_and(|code| code > 0), "{code:?}");
    check_served(gateway.address()).await;
}

#[tokio::test]
async fn a_call_whose_answers_are_not_read_is_cut_off_by_name() {
    let pod = FakePod::start("pod-1");
    let gateway = gateway_with(&[&pod], short).await;
    // SETTINGS_INITIAL_WINDOW_SIZE of 0: not one byte of an answer may be sent.
    let mut raw = Raw::connect(gateway.address(), &[(4, 0)]).await;
    raw.send(&frame(HEADERS, END_HEADERS, 1, &call())).await;
    raw.until(HEADERS).await;
    raw.send(&frame(DATA, 0, 1, &create_stream())).await;
    for offset in 0..100 {
        raw.send(&frame(DATA, 0, 1, &record(offset))).await;
        pod.until("the record", |memory| memory.records() > offset as u64).await;
    }
    let reset = raw.until(RST_STREAM).await;
    assert_eq!(reset.stream, 1);
    let name = "sluice_gateway_errors_total{code=\"slow_consumer\"}";
    assert_eq!(metric(gateway.address(), name).await, 1);
    assert_eq!(metric(gateway.address(), "sluice_gateway_streams").await, 0);
    // The connection goes on.
    raw.send(&frame(WINDOW_UPDATE, 0, 0, &1000_u32.to_be_bytes())).await;
    raw.send(&frame(HEADERS, END_HEADERS | END_STREAM, 3, &head("GET", "/healthz"))).await;
    assert_eq!(raw.until(HEADERS).await.stream, 3);
}

#[tokio::test]
async fn a_message_that_does_not_go_on_ends_its_call_and_silence_between_them_does_not() {
    let pod = FakePod::start("pod-1");
    let gateway = gateway_with(&[&pod], short).await;
    let mut raw = Raw::connect(gateway.address(), &[]).await;
    for stream in [1, 3] {
        raw.send(&frame(HEADERS, END_HEADERS, stream, &call())).await;
        raw.send(&frame(DATA, 0, stream, &create_stream())).await;
    }
    pod.until("both streams", |memory| memory.opens.len() == 2).await;
    // On stream 1 a message begins; on stream 3 nothing does.
    raw.send(&frame(DATA, 0, 1, &record(0)[..7])).await;
    let name = "sluice_gateway_errors_total{code=\"frame_timeout\"}";
    let refused = async {
        while metric(gateway.address(), name).await != 1 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    soon("the refusal", refused).await;
    raw.send(&frame(DATA, 0, 3, &record(0))).await;
    pod.until("a record of the other", |memory| memory.records() == 1).await;
    assert_eq!(metric(gateway.address(), name).await, 1);
}

#[tokio::test]
async fn the_methods_of_proxies_are_refused() {
    let gateway = gateway_with(&[], |_| {}).await;
    let mut raw = Raw::connect(gateway.address(), &[]).await;
    let connect = [&[0x02][..], &text("CONNECT"), &[0x01], &text("elsewhere.example:443")].concat();
    raw.send(&frame(HEADERS, END_HEADERS | END_STREAM, 1, &connect)).await;
    let body = raw.until(DATA).await;
    let body = String::from_utf8_lossy(&body.payload).into_owned();
    assert!(body.contains("method_not_allowed"), "{body}");
    // A path that would be two lines of HTTP/1 is none.
    let split = [head("GET", "/healthz\r\nx: y")].concat();
    raw.send(&frame(HEADERS, END_HEADERS | END_STREAM, 3, &split)).await;
    let reset = raw.until(RST_STREAM).await;
    assert_eq!(reset.stream, 3);
}

/// Those older ones take memory without bound from a few frames (RUSTSEC-2026-0258, RUSTSEC-2026-0185).
#[test]
fn the_libraries_that_read_frames_are_no_older_than_their_fixes() {
    let lock = include_str!("../../../Cargo.lock");
    for (name, least) in [("h2", [0, 4, 16]), ("quinn-proto", [0, 11, 15])] {
        let entries =
            lock.split("[[package]]").filter(|entry| entry.contains(&format!("name = \"{name}\"\n")));
        let versions: Vec<Vec<u32>> = entries
            .filter_map(|entry| entry.split("version = \"").nth(1)?.split('"').next())
            .map(|version| version.split('.').filter_map(|part| part.parse().ok()).collect())
            .collect();
        assert!(!versions.is_empty(), "{name} is not locked");
        assert!(versions.iter().all(|version| version.as_slice() >= &least[..]), "{name}: {versions:?}");
    }
}
