//! Whose certificates a client trusts, and which one it presents.
//!
//! *Owns*: the authorities, its own certificate, TLS configurations made of them, what a failed handshake means.
//! *Does not own*: handshakes (`quic`, `websocket`).

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::sign::CertifiedKey;
use rustls::version::{TLS12, TLS13};
use rustls::{RootCertStore, SupportedProtocolVersion};
use sluice_shared::error::Error as GatewayError;

use crate::error::Error;

/// What WebSocket needs of a gateway that also speaks HTTP/2.
const HTTP1_ALPN: &[u8] = b"http/1.1";

/// Whose certificates are trusted. Its configurations are made once for all connections of a client.
#[derive(Default)]
pub(crate) struct Trust {
    /// None: the system's.
    roots: Option<RootCertStore>,
    /// What gateways that ask for a certificate get.
    identity: Option<Identity>,
    quic: OnceLock<quinn::ClientConfig>,
    http1: OnceLock<Arc<rustls::ClientConfig>>,
}

/// A certificate, with its chain, and its key.
struct Identity {
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
}

impl Clone for Identity {
    fn clone(&self) -> Self {
        Self { chain: self.chain.clone(), key: self.key.clone_key() }
    }
}

impl Trust {
    /// Trusts the certificates of a PEM file alone.
    pub(crate) fn only(&self, path: &Path) -> Result<Self, Error> {
        let mut roots = RootCertStore::empty();
        for certificate in certificates(path)? {
            roots.add(certificate).map_err(|error| invalid(path, &error))?;
        }
        Ok(Self { roots: Some(roots), identity: self.identity.clone(), ..Self::default() })
    }

    /// Presents the certificate of a PEM file, with its key from another or the same.
    pub(crate) fn presenting(&self, cert: &Path, key: &Path) -> Result<Self, Error> {
        let chain = certificates(cert)?;
        let private = PrivateKeyDer::from_pem_file(key).map_err(|error| invalid(key, &error))?;
        // Whether they belong together.
        CertifiedKey::from_der(chain.clone(), private.clone_key(), &ring::default_provider())
            .map_err(|error| invalid(key, &format!("with its certificate: {error}")))?;
        let identity = Some(Identity { chain, key: private });
        Ok(Self { roots: self.roots.clone(), identity, ..Self::default() })
    }

    /// For QUIC, made by `make` the first time.
    pub(crate) fn quic(
        &self,
        make: impl FnOnce(&Self) -> Result<quinn::ClientConfig, Error>,
    ) -> Result<quinn::ClientConfig, Error> {
        if let Some(config) = self.quic.get() {
            return Ok(config.clone());
        }
        let config = make(self)?;
        Ok(self.quic.get_or_init(|| config).clone())
    }

    /// For HTTP/1.1, and so WebSocket.
    pub(crate) fn http1(&self) -> Result<Arc<rustls::ClientConfig>, Error> {
        if let Some(config) = self.http1.get() {
            return Ok(Arc::clone(config));
        }
        let config = Arc::new(self.tls(&[&TLS13, &TLS12], &[HTTP1_ALPN])?);
        Ok(Arc::clone(self.http1.get_or_init(|| config)))
    }

    /// For these versions and protocols.
    pub(crate) fn tls(
        &self,
        versions: &[&'static SupportedProtocolVersion],
        alpn: &[&[u8]],
    ) -> Result<rustls::ClientConfig, Error> {
        let roots = self.roots.clone().map_or_else(system_roots, Ok)?;
        let tls = rustls::ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_protocol_versions(versions)
            .map_err(|error| GatewayError::internal(format!("TLS configuration: {error}")))?;
        let tls = tls.with_root_certificates(roots);
        let mut tls = match self.identity.clone() {
            None => tls.with_no_client_auth(),
            Some(Identity { chain, key }) => tls
                .with_client_auth_cert(chain, key)
                .map_err(|error| GatewayError::internal(format!("client certificate: {error}")))?,
        };
        tls.alpn_protocols = alpn.iter().map(|protocol| protocol.to_vec()).collect();
        Ok(tls)
    }
}

impl fmt::Debug for Trust {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.roots.is_some() { "given certificates" } else { "the system's certificates" })
    }
}

fn invalid(path: &Path, why: &dyn fmt::Display) -> Error {
    Error::Certificate { path: path.to_owned(), why: why.to_string() }
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, Error> {
    let read = CertificateDer::pem_file_iter(path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    let read = read.map_err(|error| invalid(path, &error))?;
    if read.is_empty() {
        return Err(invalid(path, &"no certificate in PEM"));
    }
    Ok(read)
}

/// Why one side of TLS does not want to talk to the other, and what to do, where that is what a failure means: trying again
/// cannot help.
pub fn refusal(error: &(dyn std::error::Error + 'static)) -> Option<String> {
    let mut errors = std::iter::successors(Some(error), |error| error.source());
    let tls = errors.find_map(|error| {
        let inside = error.downcast_ref::<std::io::Error>().and_then(std::io::Error::get_ref);
        error.downcast_ref::<rustls::Error>().or_else(|| inside?.downcast_ref())
    })?;
    match tls {
        rustls::Error::AlertReceived(alert) => {
            refusal_by_alert((*alert).into()).map(|why| format!("{tls}: {why}"))
        }
        rustls::Error::InvalidCertificate(_) => Some(format!("{tls}: {UNTRUSTED}")),
        _ => None,
    }
}

/// What the alert of a gateway (RFC 8446 section 6) says of its client's certificate.
pub(crate) fn refusal_by_alert(alert: u8) -> Option<&'static str> {
    Some(match alert {
        116 => "it asks for a client certificate: `client_certificate`, or --cert and --key",
        42..=46 | 48 | 51 => "it does not take our client certificate",
        _ => return None,
    })
}

const UNTRUSTED: &str = "name the authority of its certificate with `ca_certificate`, or --ca";

fn system_roots() -> Result<RootCertStore, Error> {
    let found = rustls_native_certs::load_native_certs();
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(found.certs);
    if roots.is_empty() {
        let why = found.errors.first().map_or_else(|| "there are none".to_owned(), ToString::to_string);
        return Err(Error::Certificate { path: PathBuf::from("of the system"), why });
    }
    Ok(roots)
}
