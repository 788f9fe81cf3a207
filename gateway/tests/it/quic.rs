//! `sluice.v1` over QUIC.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use quinn::crypto::rustls::QuicClientConfig;
use quinn::{
    ClientConfig, Connection, ConnectionError, Endpoint, MtuDiscoveryConfig, RecvStream, SendStream,
    TransportConfig, VarInt,
};
use rustls::RootCertStore;
use rustls::crypto::ring;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use sluice_gateway::{Gateway, GatewayConfig, make_self_signed};
use sluice_shared::config::ByteSize;
use sluice_shared::error::{Error, ErrorKind};
use sluice_shared::frame::{
    Ack, Finish, FinishWhen, GatewayFrame, ProducerFrame, QUIC_ALPN, QUIC_DATAGRAM_BYTES_MAX,
};
use sluice_shared::prefixed::{FrameReader, prefix};
use tempfile::TempDir;

use crate::auth;
use crate::harness::{FakePod, gateway_with, metric, soon};

/// A gateway with a certificate of its own.
struct Quic {
    gateway: Gateway,
    dir: TempDir,
}

impl Quic {
    async fn start(pods: &[&FakePod]) -> Self {
        Self::with(pods, |_| {}).await
    }

    async fn with(pods: &[&FakePod], change: impl FnOnce(&mut GatewayConfig)) -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let (cert, key) = make_self_signed(dir.path(), "").expect("made");
        let gateway = gateway_with(pods, |config| {
            (config.tls_cert, config.tls_key) = (Some(cert), Some(key));
            change(config);
        });
        Self { gateway: gateway.await, dir }
    }

    fn endpoint(&self, transport: TransportConfig) -> Endpoint {
        endpoint(&self.dir.path().join("quic.crt"), transport, QUIC_ALPN)
    }

    async fn connect(&self) -> Connection {
        self.connect_from(&self.endpoint(TransportConfig::default())).await.expect("connects")
    }

    async fn connect_from(&self, endpoint: &Endpoint) -> Result<Connection, ConnectionError> {
        let address = self.gateway.quic_address().expect("QUIC is on");
        soon("the handshake", endpoint.connect(address, "localhost").expect("a valid name")).await
    }

    async fn metric(&self, name: &str) -> u64 {
        metric(self.gateway.address(), name).await
    }

    async fn until_no_stream(&self) {
        self.until("sluice_gateway_streams", 0).await;
    }

    async fn until(&self, name: &str, expected: u64) {
        let reached = async {
            while self.metric(name).await != expected {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        soon(name, reached).await;
    }
}

fn endpoint(trusted: &Path, transport: TransportConfig, alpn: &[u8]) -> Endpoint {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(trusted).expect("a certificate")).expect("trusted");
    let tls = rustls::ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
    let tls = tls.with_protocol_versions(&[&rustls::version::TLS13]).expect("TLS 1.3");
    let mut tls = tls.with_root_certificates(roots).with_no_client_auth();
    tls.alpn_protocols = vec![alpn.to_vec()];
    let mut config = ClientConfig::new(Arc::new(QuicClientConfig::try_from(tls).expect("for QUIC")));
    config.transport_config(Arc::new(transport));
    let mut endpoint = Endpoint::client("127.0.0.1:0".parse().expect("an address")).expect("binds");
    endpoint.set_default_client_config(config);
    endpoint
}

/// One stream of a producer.
struct Stream {
    send: SendStream,
    recv: RecvStream,
    frames: FrameReader,
}

impl Stream {
    /// A stream of which nothing was sent yet.
    async fn silent(connection: &Connection) -> Self {
        let (send, recv) = soon("a stream", connection.open_bi()).await.expect("a stream");
        Self { send, recv, frames: FrameReader::new(1 << 20) }
    }

    async fn open(connection: &Connection) -> Self {
        Self::open_into(connection, "flights").await
    }

    async fn open_into(connection: &Connection, table: &str) -> Self {
        let mut stream = Self::silent(connection).await;
        stream.frame(format!("\x01{{\"table\":\"{table}\"}}").as_bytes()).await;
        let opened = stream.read().await;
        assert!(matches!(opened, Some(GatewayFrame::Opened(_))), "{opened:?}");
        stream
    }

    async fn bytes(&mut self, bytes: &[u8]) {
        soon("sending", self.send.write_all(bytes)).await.expect("sends");
    }

    async fn frame(&mut self, frame: &[u8]) {
        self.bytes(&[&prefix(frame)[..], frame].concat()).await;
    }

    async fn records(&mut self, first_offset: u64, count: u32, payload: &str) {
        let payload = Bytes::copy_from_slice(payload.as_bytes());
        self.frame(&ProducerFrame::Records { first_offset, count, payload }.encode()).await;
    }

    async fn finish(&mut self, when: FinishWhen) {
        self.frame(&ProducerFrame::Finish(Finish { when }).encode()).await;
    }

    /// The next frame; None at the end.
    async fn read(&mut self) -> Option<GatewayFrame> {
        loop {
            if let Some(frame) = self.frames.next_frame().expect("small") {
                return Some(GatewayFrame::decode(&frame).expect("a frame"));
            }
            let chunk = soon("a frame", self.recv.read_chunk(usize::MAX, true)).await.expect("no failure")?;
            self.frames.push(&chunk.bytes);
        }
    }

    async fn until_durable(&mut self, offset: u64) {
        loop {
            match self.read().await.expect("not the end") {
                GatewayFrame::Ack(Ack { durable, .. }) if durable == Some(offset) => return,
                _ => {}
            }
        }
    }

    /// Reads on to the error; it is the last frame, and the stream is stopped with the code that this answers.
    async fn refusal(&mut self) -> (Error, u64) {
        loop {
            if let GatewayFrame::Error(error) = self.read().await.expect("an error before the end") {
                assert_eq!(self.read().await, None);
                let stopped = soon("the code", self.send.stopped()).await.expect("the connection lives");
                return (error, stopped.expect("stopped").into_inner());
            }
        }
    }
}

#[tokio::test]
async fn records_are_acked_and_a_finish_ends_the_stream() {
    let pod = FakePod::start("pod-1");
    let quic = Quic::start(&[&pod]).await;
    let connection = quic.connect().await;
    let mut stream = Stream::open(&connection).await;
    stream.records(0, 2, "{\"a\":1}\n{\"a\":2}\n").await;
    let ack = Ack { durable: Some(1), committed: Some(1), version: Some(20) };
    assert_eq!(stream.read().await, Some(GatewayFrame::Ack(ack)));
    stream.finish(FinishWhen::Committed).await;
    assert_eq!(stream.read().await, None);
    assert!(pod.see(|memory| memory.finishes[0].committed));
    assert_eq!(pod.see(|memory| memory.opens[0].table.clone()), "main.default.flights");
}

#[tokio::test]
async fn datagrams_are_as_large_as_the_way_carries() {
    let pod = FakePod::start("pod-1");
    let quic = Quic::start(&[&pod]).await;
    let (mut discovery, mut transport) = (MtuDiscoveryConfig::default(), TransportConfig::default());
    discovery.upper_bound(u16::MAX);
    transport.mtu_discovery_config(Some(discovery));
    let connection = quic.connect_from(&quic.endpoint(transport)).await.expect("connects");
    let mut stream = Stream::open(&connection).await;
    let mut offset = 0;
    // Probes go out with what is sent.
    while connection.stats().path.current_mtu < QUIC_DATAGRAM_BYTES_MAX - 100 {
        stream.records(offset, 1, "{\"n\":1}").await;
        stream.until_durable(offset).await;
        offset += 1;
    }
    assert!(connection.stats().path.current_mtu <= QUIC_DATAGRAM_BYTES_MAX);
}

#[tokio::test]
async fn a_fin_finishes_too() {
    let pod = FakePod::start("pod-1");
    let quic = Quic::start(&[&pod]).await;
    let connection = quic.connect().await;
    for frame in [false, true] {
        let mut stream = Stream::open(&connection).await;
        stream.records(0, 1, "{}").await;
        if frame {
            stream.finish(FinishWhen::Durable).await;
        }
        stream.send.finish().expect("open");
        stream.until_durable(0).await;
        assert_eq!(stream.read().await, None);
    }
    assert!(pod.see(|memory| memory.finishes.iter().all(|finish| !finish.committed)));
}

#[tokio::test]
async fn open_says_what_the_pod_is_told() {
    let pod = FakePod::start("pod-1");
    pod.tell(|memory| memory.next_offset = 40);
    let quic = Quic::start(&[&pod]).await;
    let mut stream = Stream::silent(&quic.connect().await).await;
    let open =
        r#"{"table":"t","name":"a-1","resume_at":38,"encoding":"arrow","schema":"AAEC","unknown":"ignore"}"#;
    stream.frame(format!("\x01{open}").as_bytes()).await;
    let Some(GatewayFrame::Opened(opened)) = stream.read().await else { panic!("expected opened") };
    assert_eq!((opened.stream.as_str(), opened.next_offset, opened.stream_end), ("a-1#1", 38, 40));
    let open = pod.see(|memory| memory.opens[0].clone());
    assert_eq!(
        (open.table.as_str(), open.name.as_str(), open.ignore_unknown),
        ("main.default.t", "a-1", true)
    );
    assert_eq!((open.resume_at, open.encoding, &open.schema[..]), (Some(38), 2, &[0, 1, 2][..]));
    stream.records(38, 7, "any bytes\n\n").await;
    stream.until_durable(44).await;
}

#[tokio::test]
async fn rejected_records_are_named_and_the_others_go_on() {
    let pod = FakePod::start("pod-1");
    pod.tell(|memory| memory.refuses = Some("bad"));
    let quic = Quic::start(&[&pod]).await;
    let mut stream = Stream::open(&quic.connect().await).await;
    stream.records(0, 3, "{}\nbad\n{}\n").await;
    let rejected = stream.read().await;
    assert!(
        matches!(rejected, Some(GatewayFrame::Rejected(ref rejected)) if rejected.offset == 1),
        "{rejected:?}"
    );
    stream.until_durable(2).await;
}

#[tokio::test]
async fn the_first_frame_must_open_the_stream() {
    let pod = FakePod::start("pod-1");
    let quic = Quic::with(&[&pod], |config| config.handshake_timeout_ms = 300).await;
    let connection = quic.connect().await;
    let cases: [(&[u8], &str); 7] = [
        (b"\0\0\0\x0f\x02\0\0\0\0\0\0\0\0\0\0\0\x01{}", "expected_open"),
        (b"\0\0\0\x01\x03", "expected_open"),
        (b"\0\0", "expected_open"),
        (b"\0\0\0\x03\x01{}", "missing_table"),
        (b"\0\0\0\x1d\x01{\"table\":\"t\",\"schema\":\"*\"}  ", "invalid_schema"),
        (b"\0\0\0\x08\x7fgarbage", "unknown_frame_kind"),
        (b"GET / HTTP/1.1\r\n\r\n", "record_too_large"),
    ];
    for (bytes, code) in cases {
        let mut stream = Stream::silent(&connection).await;
        stream.bytes(bytes).await;
        let (error, stopped) = stream.refusal().await;
        assert_eq!((error.code.as_str(), stopped), (code, 400), "{error}");
    }
    assert!(pod.see(|memory| memory.opens.is_empty()));
}

#[tokio::test]
async fn bad_frames_are_refused_by_name_and_hurt_no_other_stream() {
    let pod = FakePod::start("pod-1");
    let quic = Quic::start(&[&pod]).await;
    let connection = quic.connect().await;
    let mut good = Stream::open(&connection).await;
    let oversize = (10_u32 << 20) + 14;
    let cases: [(&[u8], &str); 8] = [
        (b"\0\0\0\x0f\x02\0\0\0\0\0\0\0\x03\0\0\0\x01{}", "offset_gap"),
        (b"\0\0\0\x0f\x02\0\0\0\0\0\0\0\0\0\0\0\x01{}", "offset_goes_back"),
        (b"\0\0\0\x0f\x02\0\0\0\0\0\0\0\x01\0\0\0\x02{}", "count_mismatch"),
        (&oversize.to_be_bytes(), "record_too_large"),
        (b"\0\0\0\0", "empty_frame"),
        (b"\0\0\0\x02\x02\0", "truncated_frame"),
        (b"\0\0\0\x03\x01{}", "already_open"),
        (b"\0\0\0\x02\x7f{", "unknown_frame_kind"),
    ];
    for (number, (bytes, code)) in cases.into_iter().enumerate() {
        let mut stream = Stream::open(&connection).await;
        stream.records(0, 1, "{}").await;
        stream.bytes(bytes).await;
        let (error, stopped) = stream.refusal().await;
        assert_eq!((error.code.as_str(), stopped, error.kind), (code, 400, ErrorKind::Invalid), "{error}");
        good.records(number as u64, 1, "{}").await;
        good.until_durable(number as u64).await;
    }
}

#[tokio::test]
async fn a_stream_that_ends_within_a_frame_is_refused() {
    let pod = FakePod::start("pod-1");
    let quic = Quic::start(&[&pod]).await;
    let mut stream = Stream::open(&quic.connect().await).await;
    stream.bytes(b"\0\0\0\x0f\x02\0\0").await;
    stream.send.finish().expect("open");
    let error = loop {
        if let Some(GatewayFrame::Error(error)) = stream.read().await {
            break error;
        }
    };
    assert_eq!(error.code, "truncated_frame");
}

#[tokio::test]
async fn refusals_of_a_pod_reach_the_producer_with_their_codes() {
    let pod = FakePod::start("pod-1");
    let quic = Quic::start(&[&pod]).await;
    let connection = quic.connect().await;
    for (error, code) in [
        (Error::not_found("table_not_found", "no such table"), 404),
        (Error::busy("wal_full", "the log is full", Duration::from_millis(700)), 429),
        (Error::fenced("a newer session"), 409),
    ] {
        pod.tell(|memory| memory.open_failures.push_back(error.clone()));
        let mut stream = Stream::silent(&connection).await;
        stream.frame(b"\x01{\"table\":\"flights\"}").await;
        let (told, stopped) = stream.refusal().await;
        assert_eq!((told.code, stopped), (error.code, code));
    }
}

#[tokio::test]
async fn a_reset_stream_is_gone_and_the_others_go_on() {
    let pod = FakePod::start("pod-1");
    let quic = Quic::start(&[&pod]).await;
    let connection = quic.connect().await;
    let mut kept = Stream::open(&connection).await;
    let mut reset = Stream::open(&connection).await;
    reset.records(0, 1, "{}").await;
    reset.until_durable(0).await;
    reset.send.reset(VarInt::from_u32(9)).expect("open");
    let end = soon("the end", reset.recv.read_chunk(usize::MAX, true)).await;
    assert!(matches!(end, Err(quinn::ReadError::Reset(code)) if code == VarInt::from_u32(503)), "{end:?}");
    kept.records(0, 1, "{}").await;
    kept.until_durable(0).await;
    assert_eq!(quic.metric("sluice_gateway_streams").await, 1);
    // A producer that wants no answers is gone as well.
    kept.recv.stop(VarInt::from_u32(9)).expect("open");
    quic.until_no_stream().await;
}

#[tokio::test]
async fn a_reset_is_seen_while_the_window_is_full() {
    let pod = FakePod::start("pod-1");
    pod.tell(|memory| memory.acks = false);
    let small = |config: &mut GatewayConfig| {
        (config.window_bytes, config.close_timeout_ms) = (ByteSize(2048), 100);
    };
    let quic = Quic::with(&[&pod], small).await;
    let connection = quic.connect().await;
    let mut stream = Stream::open(&connection).await;
    for offset in 0..20 {
        stream.records(offset, 1, &format!("\"{}\"", "x".repeat(1000))).await;
    }
    pod.until("a full window", |memory| memory.records() > 0).await;
    stream.send.reset(VarInt::from_u32(0)).expect("open");
    quic.until_no_stream().await;
}

#[test]
fn a_producer_that_vanishes_is_gone() {
    let here = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let there = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let there = there.expect("a runtime");
    let (quic, pod) = here.block_on(async {
        let pod = FakePod::start("pod-1");
        (Quic::start(&[&pod]).await, pod)
    });
    let address = quic.gateway.quic_address().expect("QUIC is on");
    let trusted = quic.dir.path().join("quic.crt");
    // The shorter idle timeout of both sides counts.
    let mut transport = TransportConfig::default();
    transport.max_idle_timeout(Some(Duration::from_millis(400).try_into().expect("short")));
    let (held, holds) = std::sync::mpsc::sync_channel(1);
    there.spawn(async move {
        let endpoint = endpoint(&trusted, transport, QUIC_ALPN);
        let connection = endpoint.connect(address, "localhost").expect("a name").await.expect("connects");
        let mut stream = Stream::open(&connection).await;
        stream.records(0, 1, "{}").await;
        held.send((endpoint, connection, stream)).expect("is awaited");
    });
    here.block_on(pod.until("the record", |memory| memory.records() == 1));
    let held = here.block_on(async {
        tokio::task::spawn_blocking(move || holds.recv().expect("connected")).await.expect("ends")
    });
    // Without its tasks nothing leaves any more, not even a close.
    there.shutdown_background();
    here.block_on(quic.until_no_stream());
    // The question itself is one.
    here.block_on(quic.until("sluice_gateway_connections", 1));
    drop(held);
}

#[tokio::test]
async fn a_producer_that_takes_no_bytes_is_closed() {
    let pod = FakePod::start("pod-1");
    pod.tell(|memory| memory.refuses = Some("bad"));
    let small = |config: &mut GatewayConfig| {
        (config.write_timeout_ms, config.window_bytes) = (300, ByteSize(128 << 10));
    };
    let quic = Quic::with(&[&pod], small).await;
    let mut transport = TransportConfig::default();
    transport.stream_receive_window(VarInt::from_u32(4096));
    let connection = quic.connect_from(&quic.endpoint(transport)).await.expect("connects");
    let mut slow = Stream::open(&connection).await;
    let mut other = Stream::open(&connection).await;
    // Each line is answered by far more bytes than it has; the producer never reads them.
    let many = "bad\n".repeat(10_000);
    let flood = async {
        for n in 0.. {
            let payload = Bytes::copy_from_slice(many.as_bytes());
            let frame = ProducerFrame::Records { first_offset: n * 10_000, count: 10_000, payload }.encode();
            if slow.send.write_all(&[&prefix(&frame)[..], &frame].concat()).await.is_err() {
                return;
            }
        }
    };
    soon("the close", flood).await;
    assert_eq!(soon("the code", slow.send.stopped()).await.expect("stopped"), Some(VarInt::from_u32(429)));
    assert_eq!(quic.metric("sluice_gateway_errors_total{code=\"slow_consumer\"}").await, 1);
    other.records(0, 1, "{}").await;
    other.until_durable(0).await;
}

#[tokio::test]
async fn without_acks_the_gateway_stops_reading_at_its_window() {
    const WINDOW: usize = 1 << 20;
    const RECORD: usize = 64 << 10;
    let pod = FakePod::start("pod-1");
    pod.tell(|memory| memory.acks = false);
    let quic = Quic::with(&[&pod], |config| config.window_bytes = ByteSize(WINDOW as u64)).await;
    let mut stream = Stream::open(&quic.connect().await).await;
    let record = format!("\"{}\"", "x".repeat(RECORD - 2));
    let mut sent = 0_u64;
    let blocked = async {
        while sent < 1000 {
            stream.records(sent, 1, &record).await;
            sent += 1;
        }
    };
    assert!(tokio::time::timeout(Duration::from_secs(2), blocked).await.is_err(), "64 MB went in");
    // The client's own send window, the gateway's receive window, and what the pod was sent.
    assert!(sent * RECORD as u64 <= (10 << 20) + (2 << 20) + 2 * WINDOW as u64, "{sent}");
    let bytes = pod.see(|memory| memory.payload().len());
    assert!(bytes <= WINDOW && bytes > WINDOW - 2 * RECORD - 4096, "{bytes}");
}

#[tokio::test]
async fn streams_of_one_connection_are_placed_apart() {
    const STREAMS: usize = 64;
    let pods = [FakePod::start("pod-1"), FakePod::start("pod-2")];
    let quic = Quic::start(&[&pods[0], &pods[1]]).await;
    let connection = quic.connect().await;
    let producers = (0..STREAMS).map(|number| {
        let connection = connection.clone();
        async move {
            // Slow streams of one table are kept together, those of many are not.
            let mut stream = Stream::open_into(&connection, &format!("t{number}")).await;
            for offset in 0..10 {
                stream.records(offset, 1, &format!("{{\"stream\":{number},\"offset\":{offset}}}")).await;
            }
            stream.until_durable(9).await;
            stream.finish(FinishWhen::Durable).await;
            while stream.read().await.is_some() {}
        }
    });
    futures_util::future::join_all(producers).await;
    let [first, second] = [0, 1].map(|at: usize| pods[at].see(|memory| memory.opens.len()));
    assert_eq!(first + second, STREAMS);
    assert!(first > STREAMS / 8 && second > STREAMS / 8, "{first} and {second}");
    let records: u64 = pods.iter().map(|pod| pod.see(|memory| memory.records())).sum();
    assert_eq!(records, 10 * STREAMS as u64);
    assert_eq!(quic.metric("sluice_gateway_connections").await, 2, "one, and the question itself");
}

#[tokio::test]
async fn a_drain_asks_each_stream_to_move_and_closes_with_a_code() {
    let pod = FakePod::start("pod-1");
    let quic = Quic::start(&[&pod]).await;
    let endpoint = quic.endpoint(TransportConfig::default());
    let connection = quic.connect_from(&endpoint).await.expect("connects");
    let mut leaves = Stream::open(&connection).await;
    let mut stays = Stream::open(&connection).await;
    let draining = quic.gateway.drain(Duration::from_secs(10));
    let producing = async {
        for stream in [&mut leaves, &mut stays] {
            assert!(
                matches!(stream.read().await, Some(GatewayFrame::Move(moving)) if moving.after_ms == 1000)
            );
        }
        leaves.records(0, 1, "{}").await;
        leaves.finish(FinishWhen::Durable).await;
        leaves.until_durable(0).await;
        assert_eq!(leaves.read().await, None);
        let (error, stopped) = stays.refusal().await;
        assert_eq!((error.code.as_str(), stopped), ("gateway_draining", 503));
        let closed = soon("the close", connection.closed()).await;
        let ConnectionError::ApplicationClosed(close) = closed else { panic!("{closed:?}") };
        assert_eq!((close.error_code, &close.reason[..]), (VarInt::from_u32(503), &b"gateway_draining"[..]));
    };
    soon("the drain", async { tokio::join!(draining, producing) }).await;
}

#[tokio::test]
async fn only_our_protocol_is_spoken() {
    let pod = FakePod::start("pod-1");
    let quic = Quic::start(&[&pod]).await;
    let other = endpoint(&quic.dir.path().join("quic.crt"), TransportConfig::default(), b"h3");
    let error = quic.connect_from(&other).await.expect_err("another protocol").to_string();
    assert!(error.contains("protocol"), "{error}");
}

#[tokio::test]
async fn connections_are_limited_together_with_the_others() {
    let pod = FakePod::start("pod-1");
    let quic = Quic::with(&[&pod], |config| config.connections_max = 1).await;
    let kept = quic.connect().await;
    let refused = quic.connect_from(&quic.endpoint(TransportConfig::default())).await;
    assert!(refused.is_err(), "{refused:?}");
    Stream::open(&kept).await;
}

#[tokio::test]
async fn a_rush_of_handshakes_comes_through() {
    // More than may be open before clients have to prove their address.
    const CONNECTIONS: usize = 200;
    let pod = FakePod::start("pod-1");
    let quic = Quic::start(&[&pod]).await;
    let endpoint = quic.endpoint(TransportConfig::default());
    let connecting = (0..CONNECTIONS).map(|_| quic.connect_from(&endpoint));
    let connections = futures_util::future::try_join_all(connecting).await.expect("all of them");
    for connection in &connections {
        Stream::open(connection).await;
    }
}

#[tokio::test]
async fn without_a_certificate_there_is_no_quic() {
    let pod = FakePod::start("pod-1");
    assert_eq!(gateway_with(&[&pod], |_| {}).await.quic_address(), None);
    let off = Quic::with(&[&pod], |config| config.quic_listen = Some("off".to_owned())).await;
    assert_eq!(off.gateway.quic_address(), None);
}

#[tokio::test]
async fn the_open_frame_has_to_carry_a_token_where_tokens_are_asked_for() {
    let (pod, keys) = (FakePod::start("pod-1"), tempfile::tempdir().expect("a directory"));
    let quic = Quic::with(&[&pod], |config| auth::guard(config, keys.path())).await;
    let connection = quic.connect().await;
    let other = auth::token_for("main.default.others");
    for (token, code, status) in [
        (None, "missing_token", 401),
        (Some("not.a.token"), "token_invalid", 401),
        (Some(other.as_str()), "missing_privilege", 403),
    ] {
        let mut stream = Stream::silent(&connection).await;
        let open = serde_json::json!({ "table": "flights", "token": token });
        stream.frame(format!("\x01{open}").as_bytes()).await;
        let (error, stopped) = stream.refusal().await;
        assert_eq!((error.code.as_str(), stopped), (code, status), "{error}");
    }
    assert!(pod.see(|memory| memory.opens.is_empty()));
    let mut stream = Stream::silent(&connection).await;
    let open = serde_json::json!({ "table": "flights", "token": auth::token_for("main.default.flights") });
    stream.frame(format!("\x01{open}").as_bytes()).await;
    assert!(matches!(stream.read().await, Some(GatewayFrame::Opened(_))));
}

#[tokio::test]
async fn a_frame_that_does_not_go_on_is_refused_and_silence_between_them_is_not() {
    let pod = FakePod::start("pod-1");
    let quic = Quic::with(&[&pod], |config| config.read_timeout_ms = 300).await;
    let connection = quic.connect().await;
    let (mut silent, mut other) = (Stream::open(&connection).await, Stream::open(&connection).await);
    for begun in [&[0_u8, 0][..], &[0, 0, 0, 20, 2]] {
        let mut stream = Stream::open(&connection).await;
        stream.bytes(begun).await;
        let (error, code) = stream.refusal().await;
        assert_eq!((error.code.as_str(), code), ("frame_timeout", 503));
    }
    other.records(0, 1, "{}").await;
    silent.records(0, 1, "{}").await;
    silent.until_durable(0).await;
    other.until_durable(0).await;
}

#[tokio::test]
async fn what_our_protocol_has_not_is_bounded_or_ends_the_connection() {
    let pod = FakePod::start("pod-1");
    let quic = Quic::start(&[&pod]).await;
    let connection = quic.connect().await;
    let uni = tokio::time::timeout(Duration::from_millis(200), connection.open_uni()).await;
    assert!(uni.is_err(), "the gateway gives no credit for streams in one direction");
    let datagram = connection.send_datagram(Bytes::from_static(b"x"));
    assert!(datagram.is_err(), "the gateway takes no datagrams");
    assert_eq!(connection.max_datagram_size(), None);
    let mut stream = Stream::open(&connection).await;
    stream.records(0, 1, "{}").await;
    stream.until_durable(0).await;
}
