//! Certificates of producers: whom a gateway with `tls_client_ca` talks to, over TLS and QUIC.

use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::sync::Arc;

use quinn::crypto::rustls::QuicClientConfig;
use quinn::{ConnectionError, Endpoint, TransportErrorCode};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::version::{TLS12, TLS13};
use rustls::{HandshakeKind, RootCertStore, SupportedProtocolVersion};
use sluice_gateway::{Gateway, make_self_signed};
use sluice_shared::frame::QUIC_ALPN;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use crate::harness::{gateway_with, metric, soon, split};

type Authority = CertifiedIssuer<'static, KeyPair>;

/// TLS's alerts (RFC 8446 section 6).
const CERTIFICATE_REQUIRED: u8 = 116;
const UNKNOWN_CA: u8 = 48;
const CERTIFICATE_EXPIRED: u8 = 45;

fn authority(name: &str) -> Authority {
    let mut params = CertificateParams::new(Vec::new()).expect("valid");
    params.distinguished_name.push(DnType::CommonName, name);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    Authority::self_signed(params, KeyPair::generate().expect("a key")).expect("signed")
}

/// A certificate and its key, in memory.
struct Identity {
    cert: CertificateDer<'static>,
    key: KeyPair,
}

impl Identity {
    /// Signed by this authority; by itself where that is None.
    fn of(authority: Option<&Authority>, change: impl FnOnce(&mut CertificateParams)) -> Self {
        let key = KeyPair::generate().expect("a key");
        let mut params = CertificateParams::new(vec!["plant-7".to_owned()]).expect("valid");
        change(&mut params);
        let signed = match authority {
            Some(authority) => params.signed_by(&key, authority),
            None => params.self_signed(&key),
        };
        Self { cert: signed.expect("signed").der().clone(), key }
    }
}

/// A gateway that asks for certificates of `authority`.
struct Guarded {
    gateway: Gateway,
    authority: Authority,
    dir: TempDir,
}

impl Guarded {
    async fn start() -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let (cert, key) = make_self_signed(dir.path(), "").expect("made");
        let authority = authority("ours");
        let ca_file = dir.path().join("clients.crt");
        std::fs::write(&ca_file, authority.pem()).expect("written");
        let gateway = gateway_with(&[], |config| {
            (config.tls_cert, config.tls_key) = (Some(cert), Some(key));
            config.tls_listen = Some("127.0.0.1:0".to_owned());
            config.tls_client_ca = Some(ca_file);
        });
        Self { gateway: gateway.await, authority, dir }
    }

    fn certificate(&self) -> PathBuf {
        self.dir.path().join("quic.crt")
    }

    /// What can be presented, and the alert that it gets, if any.
    fn identities(&self) -> Vec<(&'static str, Option<Identity>, Option<u8>)> {
        let ours = Some(&self.authority);
        let other = authority("other");
        let expired = |params: &mut CertificateParams| params.not_after = rcgen::date_time_ymd(2020, 1, 1);
        vec![
            ("good", Some(Identity::of(ours, |_| ())), None),
            ("none", None, Some(CERTIFICATE_REQUIRED)),
            ("expired", Some(Identity::of(ours, expired)), Some(CERTIFICATE_EXPIRED)),
            ("of another authority", Some(Identity::of(Some(&other), |_| ())), Some(UNKNOWN_CA)),
            ("self-signed", Some(Identity::of(None, |_| ())), Some(UNKNOWN_CA)),
        ]
    }

    fn client(
        &self,
        version: &'static SupportedProtocolVersion,
        identity: Option<&Identity>,
    ) -> rustls::ClientConfig {
        let mut roots = RootCertStore::empty();
        let trusted = CertificateDer::from_pem_file(self.certificate()).expect("a certificate");
        roots.add(trusted).expect("trusted");
        let tls = rustls::ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
        let tls = tls.with_protocol_versions(&[version]).expect("a version").with_root_certificates(roots);
        let Some(Identity { cert, key }) = identity else { return tls.with_no_client_auth() };
        let key = PrivateKeyDer::from_pem_slice(key.serialize_pem().as_bytes()).expect("a key");
        tls.with_client_auth_cert(vec![cert.clone()], key).expect("they belong together")
    }

    async fn errors(&self, code: &str) -> u64 {
        let name = format!("sluice_gateway_errors_total{{code=\"{code}\"}}");
        metric(self.gateway.address(), &name).await
    }

    /// Asks for `/healthz` over TLS; answers how the handshake went, too.
    async fn healthz(&self, client: &Arc<rustls::ClientConfig>) -> std::io::Result<(String, HandshakeKind)> {
        let tcp = TcpStream::connect(self.gateway.tls_address().expect("TLS is on")).await?;
        let name = ServerName::try_from("localhost").expect("a name");
        let connecting = TlsConnector::from(Arc::clone(client)).connect(name, tcp);
        let mut socket = soon("the handshake", connecting).await?;
        socket.write_all(b"GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await?;
        let mut answer = String::new();
        soon("the answer", socket.read_to_string(&mut answer)).await?;
        Ok((answer, socket.get_ref().1.handshake_kind().expect("it is over")))
    }
}

#[tokio::test]
async fn over_tls_the_certificates_of_the_authority_alone_are_let_in() {
    let guarded = Guarded::start().await;
    let mut refused = 0;
    for version in [&TLS12, &TLS13] {
        for (what, identity, alert) in guarded.identities() {
            let client = Arc::new(guarded.client(version, identity.as_ref()));
            let answer = guarded.healthz(&client).await;
            let Some(alert) = alert else {
                assert_eq!(split(&answer.expect(what).0), (200, "ok\n".to_owned()));
                continue;
            };
            refused += 1;
            let error = answer.expect_err(what);
            let tls = error.get_ref().and_then(|error| error.downcast_ref::<rustls::Error>());
            let expected = rustls::Error::AlertReceived(alert.into());
            assert_eq!(tls, Some(&expected), "{what}, {version:?}: {error}");
        }
    }
    assert_eq!(guarded.errors("tls_handshake").await, refused);
}

#[tokio::test]
async fn over_quic_as_well() {
    let guarded = Guarded::start().await;
    let endpoint = Endpoint::client((Ipv4Addr::LOCALHOST, 0).into()).expect("binds");
    let address = guarded.gateway.quic_address().expect("QUIC is on");
    let mut refused = 0;
    for (what, identity, alert) in guarded.identities() {
        let mut tls = guarded.client(&TLS13, identity.as_ref());
        tls.alpn_protocols = vec![QUIC_ALPN.to_vec()];
        let config = quinn::ClientConfig::new(Arc::new(QuicClientConfig::try_from(tls).expect("TLS 1.3")));
        let connecting = endpoint.connect_with(config, address, "localhost").expect("valid");
        // The client has its handshake behind it before the gateway has seen its certificate.
        let connection = soon("the handshake", connecting).await;
        let Some(alert) = alert else {
            let (mut send, mut recv) = connection.expect(what).open_bi().await.expect("opens");
            send.finish().expect("open");
            // That there was no `open` is told by a gateway that listens.
            assert!(soon("an answer", recv.read_chunk(100, true)).await.expect("no loss").is_some());
            continue;
        };
        refused += 1;
        let error = match connection {
            Ok(connection) => soon("the close", connection.closed()).await,
            Err(error) => error,
        };
        let ConnectionError::ConnectionClosed(close) = error else { panic!("{what}: {error}") };
        assert_eq!(close.error_code, TransportErrorCode::crypto(alert), "{what}");
    }
    assert_eq!(guarded.errors("quic_handshake").await, refused);
}

#[tokio::test]
async fn no_session_is_resumed_without_the_certificate() {
    let guarded = Guarded::start().await;
    let good = Identity::of(Some(&guarded.authority), |_| ());
    for version in [&TLS12, &TLS13] {
        let client = Arc::new(guarded.client(version, Some(&good)));
        for _ in 0..3 {
            let (_, handshake) = guarded.healthz(&client).await.expect("is answered");
            assert_ne!(handshake, HandshakeKind::Resumed, "{version:?}");
        }
    }
}

#[tokio::test]
async fn authorities_are_read_again_when_their_file_changes() {
    let guarded = Guarded::start().await;
    let other = authority("other");
    let identities = [&guarded.authority, &other].map(|authority| Identity::of(Some(authority), |_| ()));
    let [ours, others] = identities.map(|identity| Arc::new(guarded.client(&TLS13, Some(&identity))));
    assert!(guarded.healthz(&ours).await.is_ok() && guarded.healthz(&others).await.is_err());
    let file = guarded.dir.path().join("clients.crt");
    std::fs::write(&file, "no authority").expect("written");
    guarded.gateway.reread_certificates();
    assert!(guarded.healthz(&ours).await.is_ok(), "a broken file changes nothing");
    std::fs::write(&file, other.pem()).expect("written");
    guarded.gateway.reread_certificates();
    assert!(guarded.healthz(&ours).await.is_err() && guarded.healthz(&others).await.is_ok());
}
