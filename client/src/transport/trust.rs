//! Whose certificates a client trusts.
//!
//! *Owns*: the authorities, TLS configurations made of them.
//! *Does not own*: handshakes (`quic`, `websocket`).

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use rustls::crypto::ring;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
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
    quic: OnceLock<quinn::ClientConfig>,
    http1: OnceLock<Arc<rustls::ClientConfig>>,
}

impl Trust {
    /// Trusts the certificates of a PEM file alone.
    pub(crate) fn only(path: &Path) -> Result<Self, Error> {
        let invalid =
            |why: &dyn fmt::Display| Error::Certificate { path: path.to_owned(), why: why.to_string() };
        let certificates = CertificateDer::pem_file_iter(path).map_err(|error| invalid(&error))?;
        let mut roots = RootCertStore::empty();
        for certificate in certificates {
            let certificate = certificate.map_err(|error| invalid(&error))?;
            roots.add(certificate).map_err(|error| invalid(&error))?;
        }
        if roots.is_empty() {
            return Err(invalid(&"no certificate in PEM"));
        }
        Ok(Self { roots: Some(roots), ..Self::default() })
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
        let mut tls = tls.with_root_certificates(roots).with_no_client_auth();
        tls.alpn_protocols = alpn.iter().map(|protocol| protocol.to_vec()).collect();
        Ok(tls)
    }
}

impl fmt::Debug for Trust {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.roots.is_some() { "given certificates" } else { "the system's certificates" })
    }
}

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
