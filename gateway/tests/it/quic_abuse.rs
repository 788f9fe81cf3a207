//! QUIC as well-behaved clients do not use it: spoofed addresses, 0-RTT, streams without end.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use quinn::crypto::rustls::QuicClientConfig;
use quinn::{ClientConfig, Endpoint};
use rustls::RootCertStore;
use rustls::crypto::ring;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use sluice_gateway::{Gateway, GatewayConfig, make_self_signed};
use sluice_shared::frame::QUIC_ALPN;
use tempfile::TempDir;
use tokio::net::UdpSocket;
use tokio::time::{Instant, timeout, timeout_at};

use crate::harness::{FakePod, gateway_with, metric, soon};

async fn start(pods: &[&FakePod], change: impl FnOnce(&mut GatewayConfig)) -> (Gateway, TempDir) {
    let dir = tempfile::tempdir().expect("a directory");
    let (cert, key) = make_self_signed(dir.path(), "").expect("made");
    let gateway = gateway_with(pods, |config| {
        (config.tls_cert, config.tls_key) = (Some(cert), Some(key));
        change(config);
    });
    (gateway.await, dir)
}

/// A client that asks for 0-RTT where the gateway offers it.
fn endpoint(dir: &TempDir) -> Endpoint {
    let mut roots = RootCertStore::empty();
    let trusted = CertificateDer::from_pem_file(dir.path().join("quic.crt")).expect("a certificate");
    roots.add(trusted).expect("trusted");
    let tls = rustls::ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
    let tls = tls.with_protocol_versions(&[&rustls::version::TLS13]).expect("TLS 1.3");
    let mut tls = tls.with_root_certificates(roots).with_no_client_auth();
    tls.alpn_protocols = vec![QUIC_ALPN.to_vec()];
    tls.enable_early_data = true;
    let config = ClientConfig::new(Arc::new(QuicClientConfig::try_from(tls).expect("for QUIC")));
    let mut endpoint = Endpoint::client("127.0.0.1:0".parse().expect("an address")).expect("binds");
    endpoint.set_default_client_config(config);
    endpoint
}

/// The first packets of so many clients, each with a connection id of its own.
async fn initial_packets(dir: &TempDir, count: usize) -> Vec<Vec<u8>> {
    let nobody = UdpSocket::bind("127.0.0.1:0").await.expect("binds");
    let (endpoint, address) = (endpoint(dir), nobody.local_addr().expect("bound"));
    let (mut packets, mut attempts) = (BTreeMap::new(), Vec::new());
    while packets.len() < count {
        // Kept, since one that is dropped says so in a packet of its own.
        attempts.push(endpoint.connect(address, "localhost").expect("a name"));
        let mut packet = vec![0; 2000];
        let length = soon("a packet", nobody.recv(&mut packet)).await.expect("received");
        packet.truncate(length);
        // The connection id stands behind its length (RFC 9000 section 17.2).
        let id = packet[6..6 + usize::from(packet[5])].to_vec();
        packets.insert(id, packet);
    }
    packets.into_values().collect()
}

#[tokio::test]
async fn addresses_that_answer_nothing_get_three_times_what_they_sent_and_a_packet_at_most() {
    /// The library begins a packet while a byte is left of the three times that RFC 9000 allows.
    const PACKET_BYTES: usize = 1200;
    const CLIENTS: usize = 200;
    let (gateway, dir) = start(&[], |_| {}).await;
    let address = gateway.quic_address().expect("QUIC is on");
    let packets = initial_packets(&dir, CLIENTS).await;
    let mut clients = Vec::new();
    for packet in &packets {
        let client = UdpSocket::bind("127.0.0.1:0").await.expect("binds");
        client.send_to(packet, address).await.expect("sent");
        clients.push(client);
    }
    // What is lost is sent again for a while: that counts as well.
    let until = Instant::now() + Duration::from_secs(2);
    let (mut answered, mut buffer) = (0, vec![0; 65_536]);
    for (client, packet) in clients.iter().zip(&packets) {
        let mut bytes = 0;
        while let Ok(Ok(length)) = timeout_at(until, client.recv(&mut buffer)).await {
            bytes += length;
        }
        assert!(bytes < 3 * packet.len() + PACKET_BYTES, "{bytes} bytes for {}", packet.len());
        answered += usize::from(bytes > 0);
    }
    assert!(answered > 0, "the packet was none");
    // Those above a few had to prove their address first, and hold nothing.
    assert!(metric(gateway.address(), "sluice_gateway_connections").await <= 65);
    let connecting = endpoint(&dir).connect(address, "localhost").expect("a name");
    soon("another client", connecting).await.expect("connects");
}

#[tokio::test]
async fn nothing_is_taken_before_the_handshake_ends() {
    let pod = FakePod::start("pod-1");
    let (gateway, dir) = start(&[&pod], |_| {}).await;
    let (address, endpoint) = (gateway.quic_address().expect("QUIC is on"), endpoint(&dir));
    for _ in 0..3 {
        let connecting = endpoint.connect(address, "localhost").expect("a name");
        // With a ticket for 0-RTT this would be a connection at once.
        let connecting = connecting.into_0rtt().err().expect("no 0-RTT is offered");
        let connection = soon("the handshake", connecting).await.expect("connects");
        // A stream that is answered: the ticket of this connection has come before.
        let (mut send, mut recv) = soon("a stream", connection.open_bi()).await.expect("a stream");
        send.write_all(&[0, 0, 0, 1, 2]).await.expect("sent");
        soon("an answer", recv.read_chunk(1000, true)).await.expect("read");
    }
}

#[tokio::test]
async fn streams_of_a_connection_are_bounded() {
    let (gateway, dir) = start(&[], |_| {}).await;
    let address = gateway.quic_address().expect("QUIC is on");
    let connecting = endpoint(&dir).connect(address, "localhost").expect("a name");
    let connection = soon("the handshake", connecting).await.expect("connects");
    let mut streams = Vec::new();
    let opening = async {
        loop {
            streams.push(connection.open_bi().await.expect("the connection lives"));
        }
    };
    let opened: Result<(), _> = timeout(Duration::from_secs(1), opening).await;
    assert!(opened.is_err());
    assert_eq!(streams.len(), 1000);
}

#[tokio::test]
async fn one_address_has_so_many_connections_over_quic_too() {
    let (gateway, dir) = start(&[], |config| config.connections_per_peer_max = 2).await;
    let address = gateway.quic_address().expect("QUIC is on");
    let endpoint = endpoint(&dir);
    let connect = || endpoint.connect(address, "localhost").expect("a name");
    let first = soon("the handshake", connect()).await.expect("connects");
    let second = soon("the handshake", connect()).await.expect("connects");
    let refused = soon("the refusal", connect()).await.expect_err("refused");
    assert!(refused.to_string().contains("refused"), "{refused}");
    drop((first, second));
}
