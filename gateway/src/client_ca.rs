//! Whose certificates producers have to present: the authorities of a PEM file, read again when it changes.
//!
//! *Owns*: the file, and judging certificates by what it holds now.
//! *Does not own*: the handshakes, and what a producer may do (`auth`): a certificate lets in, and names nobody.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::SystemTime;

use rustls::client::danger::HandshakeSignatureValid;
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{DigitallySignedStruct, DistinguishedName, RootCertStore, SignatureScheme};
use sluice_shared::error::Error;

/// The judge of producers' certificates.
pub(crate) struct ClientCa {
    file: PathBuf,
    /// A lock, since TLS asks for it wherever a handshake runs; it is held for a clone.
    loaded: RwLock<Loaded>,
}

#[derive(Clone)]
struct Loaded {
    judge: Arc<dyn ClientCertVerifier>,
    /// When the file had last changed, as far as that can be told.
    changed: Option<SystemTime>,
}

impl ClientCa {
    /// # Errors
    /// `Invalid`, naming the file and what is wrong with it.
    pub(crate) fn read(file: &Path) -> Result<Self, Error> {
        Ok(Self { file: file.to_owned(), loaded: RwLock::new(load(file)?) })
    }

    /// Reads the file again if it has changed. What cannot be read is told once for each change, and the authorities stay.
    pub(crate) fn look(&self) {
        let changed = changed(&self.file);
        if self.loaded.read().unwrap_or_else(PoisonError::into_inner).changed == changed {
            return;
        }
        let loaded = load(&self.file);
        let mut current = self.loaded.write().unwrap_or_else(PoisonError::into_inner);
        match loaded {
            Ok(loaded) => {
                tracing::info!(file = %self.file.display(), "authorities of clients read again");
                *current = loaded;
            }
            Err(error) => {
                tracing::error!(%error, "the authorities of clients have changed, and the old ones stay in use");
                current.changed = changed;
            }
        }
    }

    fn judge(&self) -> Arc<dyn ClientCertVerifier> {
        Arc::clone(&self.loaded.read().unwrap_or_else(PoisonError::into_inner).judge)
    }
}

fn changed(file: &Path) -> Option<SystemTime> {
    fs::metadata(file).and_then(|metadata| metadata.modified()).ok()
}

fn load(file: &Path) -> Result<Loaded, Error> {
    // Before the file is read, so that a change in between is seen the next time.
    let changed = changed(file);
    let invalid = |why: &dyn fmt::Display| {
        Error::invalid("invalid_certificate", format!("gateway.tls_client_ca, {}: {why}", file.display()))
    };
    let certificates = CertificateDer::pem_file_iter(file).map_err(|error| invalid(&error))?;
    let mut roots = RootCertStore::empty();
    for certificate in certificates {
        roots.add(certificate.map_err(|error| invalid(&error))?).map_err(|error| invalid(&error))?;
    }
    if roots.is_empty() {
        return Err(invalid(&"no certificate in PEM"));
    }
    let provider = Arc::new(ring::default_provider());
    let judge = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider).build();
    Ok(Loaded { judge: judge.map_err(|error| invalid(&error))?, changed })
}

impl fmt::Debug for ClientCa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "authorities of {}", self.file.display())
    }
}

impl ClientCertVerifier for ClientCa {
    /// None: they would have to be the same for ever. Clients present what they have.
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        self.judge().verify_client_cert(certificate, intermediates, now)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.judge().verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.judge().verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.judge().supported_verify_schemes()
    }
}
