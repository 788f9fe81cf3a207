//! TLS on TCP: all that the plain port speaks, and what is no TLS.

use std::sync::Arc;
use std::time::Duration;

use futures_util::{SinkExt, StreamExt};
use hyper_util::rt::TokioIo;
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::version::{TLS12, TLS13};
use rustls::{RootCertStore, SupportedProtocolVersion};
use sluice_gateway::{Gateway, GatewayConfig, make_self_signed};
use sluice_shared::membership::Membership;
use sluice_shared::proto::zerobus::ephemeral_stream_request::Payload as Ask;
use sluice_shared::proto::zerobus::zerobus_client::ZerobusClient;
use sluice_shared::proto::zerobus::{CreateIngestStreamRequest, EphemeralStreamRequest, RecordType};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::Instant;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_tungstenite::tungstenite::Message;
use tonic::transport::Endpoint;

use crate::harness::{FakePod, gateway_with, metric, raw, soon, split};

/// A gateway that speaks TLS too.
struct Tls {
    gateway: Gateway,
    dir: TempDir,
}

impl Tls {
    async fn start(pods: &[&FakePod]) -> Self {
        Self::with(pods, |_| {}).await
    }

    async fn with(pods: &[&FakePod], change: impl FnOnce(&mut GatewayConfig)) -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let (cert, key) = make_self_signed(dir.path(), "").expect("made");
        let gateway = gateway_with(pods, |config| {
            (config.tls_cert, config.tls_key) = (Some(cert), Some(key));
            config.tls_listen = Some("127.0.0.1:0".to_owned());
            change(config);
        });
        Self { gateway: gateway.await, dir }
    }

    async fn tcp(&self) -> TcpStream {
        TcpStream::connect(self.gateway.tls_address().expect("TLS is on")).await.expect("connects")
    }

    async fn connect(&self, version: &'static SupportedProtocolVersion, alpn: &[u8]) -> TlsStream<TcpStream> {
        let connector = self.connector(version, alpn);
        let name = ServerName::try_from("localhost").expect("a name");
        soon("the handshake", connector.connect(name, self.tcp().await)).await.expect("connects")
    }

    fn connector(&self, version: &'static SupportedProtocolVersion, alpn: &[u8]) -> TlsConnector {
        let mut roots = RootCertStore::empty();
        let trusted = CertificateDer::from_pem_file(self.dir.path().join("quic.crt"));
        roots.add(trusted.expect("a certificate")).expect("trusted");
        let tls = rustls::ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
        let tls = tls.with_protocol_versions(&[version]).expect("a version");
        let mut tls = tls.with_root_certificates(roots).with_no_client_auth();
        tls.alpn_protocols = if alpn.is_empty() { Vec::new() } else { vec![alpn.to_vec()] };
        TlsConnector::from(Arc::new(tls))
    }

    async fn errors(&self, code: &str) -> u64 {
        let name = format!("sluice_gateway_errors_total{{code=\"{code}\"}}");
        metric(self.gateway.address(), &name).await
    }
}

#[tokio::test]
async fn requests_are_answered_over_both_versions_with_and_without_alpn() {
    let tls = Tls::start(&[]).await;
    for version in [&TLS12, &TLS13] {
        for alpn in [&b"http/1.1"[..], b""] {
            let mut socket = tls.connect(version, alpn).await;
            let request = b"GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";
            socket.write_all(request).await.expect("sends");
            let mut answer = String::new();
            soon("the answer", socket.read_to_string(&mut answer)).await.expect("reads to a good end");
            assert_eq!(split(&answer), (200, "ok\n".to_owned()));
        }
    }
}

#[tokio::test]
async fn a_websocket_carries_a_stream_over_tls() {
    let pod = FakePod::start("pod-1");
    let tls = Tls::start(&[&pod]).await;
    let socket = tls.connect(&TLS13, b"http/1.1").await;
    let url = "wss://localhost/v1/tables/flights/stream";
    let upgrading = Box::pin(tokio_tungstenite::client_async(url, socket));
    let (mut socket, _) = soon("the upgrade", upgrading).await.expect("upgrades");
    let opened = soon("opened", socket.next()).await.expect("open").expect("no failure");
    assert!(opened.to_text().expect("text").contains("next_offset"), "{opened:?}");
    let large = format!("\"{}\"", "x".repeat(1 << 20));
    for offset in 0..20 {
        socket.send(Message::text(large.clone())).await.expect("sends");
        let acked = format!("{{\"durable\":{offset}}}");
        loop {
            let told = soon("an ack", socket.next()).await.expect("open").expect("no failure");
            if told.to_text().expect("text") == acked {
                break;
            }
        }
    }
    assert_eq!(pod.see(|memory| memory.records()), 20);
    socket.close(None).await.expect("closes");
    while let Some(told) = soon("the close", socket.next()).await {
        told.expect("a good end");
    }
}

#[tokio::test]
async fn grpc_is_spoken_over_tls() {
    let pod = FakePod::start("pod-1");
    let tls = Tls::start(&[&pod]).await;
    let socket = tls.connect(&TLS12, b"h2").await;
    let mut socket = Some(socket);
    let connector = tower::service_fn(move |_| {
        let socket = socket.take().map(TokioIo::new);
        std::future::ready(socket.ok_or(std::io::Error::other("one connection")))
    });
    let endpoint = Endpoint::from_static("http://localhost");
    let channel = soon("HTTP/2", endpoint.connect_with_connector(connector)).await.expect("connects");
    let create = CreateIngestStreamRequest {
        table_name: Some("main.default.flights".to_owned()),
        record_type: Some(RecordType::Json.into()),
        ..Default::default()
    };
    let create = EphemeralStreamRequest { payload: Some(Ask::CreateStream(create)) };
    let asked = tokio_stream::iter([create]);
    let answers = soon("headers", ZerobusClient::new(channel).ephemeral_stream(asked)).await;
    let mut answers = answers.expect("taken").into_inner();
    assert!(soon("opened", answers.message()).await.expect("no failure").is_some());
    assert!(soon("the end", answers.message()).await.expect("a good end").is_none());
}

#[tokio::test]
async fn old_versions_get_an_alert_and_are_counted() {
    const ALERT: u8 = 0x15;
    let tls = Tls::start(&[]).await;
    for version in [[3, 0], [3, 1], [3, 2]] {
        // No extensions, one cipher (AES-128-CBC-SHA), no compression.
        let body = [&version[..], &[7; 32], &[0], &[0, 2, 0, 0x2f], &[1, 0]].concat();
        let hello = [&[1, 0, 0, body.len() as u8][..], &body].concat();
        let record = [&[0x16, 3, 1, 0, hello.len() as u8][..], &hello].concat();
        let answer = raw_bytes(tls.tcp().await, &record).await;
        assert_eq!(answer.first(), Some(&ALERT), "{version:?}: {answer:?}");
    }
    assert_eq!(tls.errors("tls_handshake").await, 3);
}

async fn raw_bytes(mut socket: TcpStream, bytes: &[u8]) -> Vec<u8> {
    socket.write_all(bytes).await.expect("sends");
    let mut answer = Vec::new();
    // A reset ends it too.
    let _ = soon("the end", socket.read_to_end(&mut answer)).await;
    answer
}

#[tokio::test]
async fn the_wrong_port_is_hinted_at_within_a_second() {
    let tls = Tls::start(&[]).await;
    let began = Instant::now();
    let answer = raw_bytes(tls.tcp().await, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").await;
    let (status, body) = split(&String::from_utf8_lossy(&answer));
    assert_eq!(status, 400);
    assert!(body.contains("no_tls_on_tls_port") && body.contains("wss://"), "{body}");
    let hello = [&[0x16, 3, 1, 2, 0, 1, 0, 1, 0xfc, 3, 3][..], &[7; 505]].concat();
    let answer = raw(tls.gateway.address(), &hello).await;
    let (status, body) = split(&answer);
    assert_eq!(status, 400);
    assert!(body.contains("tls_on_plain_port") && body.contains("tls_listen"), "{body}");
    assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
    assert_eq!(tls.errors("no_tls_on_tls_port").await + tls.errors("tls_on_plain_port").await, 2);
}

#[tokio::test]
async fn a_handshake_that_does_not_end_is_closed_and_holds_up_nobody() {
    let tls = Tls::with(&[], |config| config.handshake_timeout_ms = 300).await;
    let began = Instant::now();
    let mut slow = Vec::new();
    for sent in [&b""[..], &[0x16], &[0x16, 3, 1, 2, 0, 1]] {
        let mut socket = tls.tcp().await;
        socket.write_all(sent).await.expect("sends");
        slow.push(socket);
    }
    tls.connect(&TLS13, b"h2").await;
    for mut socket in slow {
        let mut answer = Vec::new();
        // A reset ends it too.
        let _ = soon("the end", socket.read_to_end(&mut answer)).await;
    }
    let took = began.elapsed();
    assert!(took >= Duration::from_millis(300) && took < Duration::from_secs(3), "{took:?}");
    assert_eq!(tls.errors("handshake_timeout").await, 3);
}

#[tokio::test]
async fn the_plain_port_can_be_off() {
    let dir = tempfile::tempdir().expect("a directory");
    let (cert, key) = make_self_signed(dir.path(), "").expect("made");
    let config = GatewayConfig {
        listen: "off".to_owned(),
        tls_listen: Some("127.0.0.1:0".to_owned()),
        tls_cert: Some(cert),
        tls_key: Some(key),
        ..GatewayConfig::default()
    };
    let gateway = Gateway::start(config, Membership::fixed(Vec::new())).await.expect("starts");
    assert_eq!((gateway.plain_address(), gateway.tls_address()), (None, Some(gateway.address())));
    assert!(gateway.quic_address().is_some(), "over QUIC too, at the address of TLS");
    gateway.drain(Duration::from_secs(5)).await;
}

#[tokio::test]
async fn handshakes_under_way_are_bounded() {
    const HANDSHAKES_MAX: usize = 1024;
    let tls = Tls::start(&[]).await;
    let mut slow = Vec::new();
    for _ in 0..HANDSHAKES_MAX {
        slow.push(tls.tcp().await);
    }
    let under_way = async {
        while metric(tls.gateway.address(), "sluice_gateway_connections").await <= HANDSHAKES_MAX as u64 {
            tokio::task::yield_now().await;
        }
    };
    soon("as many handshakes", under_way).await;
    assert!(raw_bytes(tls.tcp().await, b"").await.is_empty(), "it is closed without a word");
    assert_eq!(tls.errors("too_many_handshakes").await, 1);
    // Those that end make room, and the plain port is not held up.
    drop(slow);
    let served = async {
        let name = ServerName::try_from("localhost").expect("a name");
        while tls.connector(&TLS13, b"h2").connect(name.clone(), tls.tcp().await).await.is_err() {
            tokio::task::yield_now().await;
        }
    };
    soon("a handshake", served).await;
}
