//! The gateway's certificate: read from PEM files, read again when they change, or made for local use.
//!
//! *Owns*: the files and what they hold, the TLS configuration made of them.
//! *Does not own*: handshakes (`edge`), whose certificates producers have to present (`client_ca`).

use std::fs::{self, OpenOptions};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, SystemTime};

use rustls::SupportedProtocolVersion;
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{ClientHello, NoServerSessionStorage, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use sluice_shared::error::Error;
use sluice_shared::lifecycle::{Hangups, TaskScope};

use crate::client_ca::ClientCa;
use crate::config::GatewayConfig;
use crate::files::check_secret;

/// Between two looks at the files.
const LOOK_INTERVAL: Duration = Duration::from_secs(30);
/// What a certificate for local use is made out to, beside the host that the gateway listens on.
const LOCAL_NAMES: [&str; 3] = ["localhost", "127.0.0.1", "::1"];

/// The certificate as each handshake gets it.
#[derive(Debug)]
pub(crate) struct Certificate {
    cert_file: PathBuf,
    key_file: PathBuf,
    /// None: whoever comes is talked to.
    client_ca: Option<Arc<ClientCa>>,
    /// A lock, since TLS asks for it wherever a handshake runs; it is held for a clone.
    loaded: RwLock<Loaded>,
}

#[derive(Debug, Clone)]
struct Loaded {
    key: Arc<CertifiedKey>,
    /// When the files had last changed, as far as that can be told.
    changed: Changed,
}

type Changed = [Option<SystemTime>; 2];

impl Certificate {
    /// That of a configuration; None where it has none.
    ///
    /// # Errors
    /// `Invalid`, naming the file and what is wrong with it.
    pub(crate) fn of(config: &GatewayConfig) -> Result<Option<Self>, Error> {
        let Some((cert, key)) = config.tls_files() else { return Ok(None) };
        let certificate = Self::read(cert, key)?;
        match &config.tls_client_ca {
            Some(ca_file) => certificate.for_clients_of(ca_file).map(Some),
            None => Ok(Some(certificate)),
        }
    }

    /// Reads both files.
    ///
    /// # Errors
    /// `Invalid`, naming the file and what is wrong with it.
    pub(crate) fn read(cert_file: &Path, key_file: &Path) -> Result<Self, Error> {
        let loaded = RwLock::new(load(cert_file, key_file)?);
        let (cert_file, key_file) = (cert_file.to_owned(), key_file.to_owned());
        Ok(Self { cert_file, key_file, client_ca: None, loaded })
    }

    /// Clients have to present a certificate of an authority in this file.
    ///
    /// # Errors
    /// `Invalid`, naming the file and what is wrong with it.
    pub(crate) fn for_clients_of(self, ca_file: &Path) -> Result<Self, Error> {
        Ok(Self { client_ca: Some(Arc::new(ClientCa::read(ca_file)?)), ..self })
    }

    /// The TLS of a listener: these versions, these protocols.
    ///
    /// # Errors
    /// `Internal`: what is configured was checked when it was read.
    pub(crate) fn tls(
        self: &Arc<Self>,
        versions: &[&'static SupportedProtocolVersion],
        alpn: &[&[u8]],
    ) -> Result<rustls::ServerConfig, Error> {
        let tls = rustls::ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_protocol_versions(versions)
            .map_err(|error| Error::internal(format!("TLS configuration: {error}")))?;
        let tls = match &self.client_ca {
            None => tls.with_no_client_auth(),
            Some(client_ca) => tls.with_client_cert_verifier(Arc::clone(client_ca) as _),
        };
        let mut tls = tls.with_cert_resolver(Arc::clone(self) as _);
        if self.client_ca.is_some() {
            // A session that is resumed would not be asked for its certificate again, which may have expired since, or its
            // authority been taken out.
            tls.session_storage = Arc::new(NoServerSessionStorage {});
            tls.send_tls13_tickets = 0;
        }
        tls.alpn_protocols = alpn.iter().map(|protocol| protocol.to_vec()).collect();
        // No 0-RTT: who records it can send it again.
        tls.max_early_data_size = 0;
        Ok(tls)
    }

    /// Reads the files again if they have changed. What cannot be read, or does not belong together, is told once for
    /// each change, and the certificate stays as it is.
    pub(crate) fn look(&self) {
        if let Some(client_ca) = &self.client_ca {
            client_ca.look();
        }
        let changed = changed(&self.cert_file, &self.key_file);
        if self.loaded.read().unwrap_or_else(PoisonError::into_inner).changed == changed {
            return;
        }
        let loaded = load(&self.cert_file, &self.key_file);
        let mut current = self.loaded.write().unwrap_or_else(PoisonError::into_inner);
        match loaded {
            Ok(loaded) => {
                tracing::info!(file = %self.cert_file.display(), "certificate read again");
                *current = loaded;
            }
            Err(error) => {
                tracing::error!(%error, "the certificate has changed, and the old one stays in use");
                current.changed = changed;
            }
        }
    }

    fn current(&self) -> Arc<CertifiedKey> {
        Arc::clone(&self.loaded.read().unwrap_or_else(PoisonError::into_inner).key)
    }
}

impl ResolvesServerCert for Certificate {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.current())
    }
}

/// Reads the certificate's files again when they change, at a SIGHUP at once.
pub(crate) async fn watch(certificate: Arc<Certificate>, scope: TaskScope) {
    let mut hangups = Hangups::new();
    loop {
        let hangup = async {
            match &mut hangups {
                Some(hangups) => hangups.next().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased; // drain first: the certificate is of no more use
            () = scope.draining() => return,
            () = hangup => certificate.look(),
            () = tokio::time::sleep(LOOK_INTERVAL) => certificate.look(),
        }
    }
}

fn changed(cert_file: &Path, key_file: &Path) -> Changed {
    [cert_file, key_file].map(|file| fs::metadata(file).and_then(|metadata| metadata.modified()).ok())
}

fn load(cert_file: &Path, key_file: &Path) -> Result<Loaded, Error> {
    // Before the files are read, so that a change in between is seen the next time.
    let changed = changed(cert_file, key_file);
    let invalid = |key: &str, file: &Path, why: &dyn std::fmt::Display| {
        Error::invalid("invalid_certificate", format!("gateway.{key}, {}: {why}", file.display()))
    };
    let chain = CertificateDer::pem_file_iter(cert_file).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    let chain = chain.map_err(|error| invalid("tls_cert", cert_file, &error))?;
    if chain.is_empty() {
        return Err(invalid("tls_cert", cert_file, &"no certificate in PEM"));
    }
    check_secret(key_file).map_err(|why| invalid("tls_key", key_file, &why))?;
    let key = PrivateKeyDer::from_pem_file(key_file).map_err(|error| invalid("tls_key", key_file, &error))?;
    let key = CertifiedKey::from_der(chain, key, &ring::default_provider());
    let key = key.map_err(|error| invalid("tls_key", key_file, &format!("with its certificate: {error}")))?;
    Ok(Loaded { key: Arc::new(key), changed })
}

/// Where `make_self_signed` keeps certificate and key.
pub fn certificate_files(dir: &Path) -> (PathBuf, PathBuf) {
    (dir.join("quic.crt"), dir.join("quic.key"))
}

/// A self-signed certificate and its key for local use, `quic.crt` and `quic.key` below `dir`: those that are there,
/// or new ones for this machine's own names and `host`. A producer trusts it by being given the first file.
///
/// # Errors
/// `Invalid` where they cannot be written.
pub fn make_self_signed(dir: &Path, host: &str) -> Result<(PathBuf, PathBuf), Error> {
    let (cert_file, key_file) = certificate_files(dir);
    if cert_file.exists() && key_file.exists() {
        return Ok((cert_file, key_file));
    }
    let failed = |error: &dyn std::fmt::Display| {
        let message = format!("cannot make a certificate below {}: {error}", dir.display());
        Error::invalid("invalid_certificate", message)
    };
    let mut names: Vec<String> = LOCAL_NAMES.map(str::to_owned).to_vec();
    let host = host.trim_matches(['[', ']']);
    if !host.is_empty() && !names.iter().any(|name| name == host) {
        names.push(host.to_owned());
    }
    let made = rcgen::generate_simple_self_signed(names).map_err(|error| failed(&error))?;
    fs::create_dir_all(dir).map_err(|error| failed(&error))?;
    // The certificate last: where it is, its key is.
    write(&key_file, 0o600, &made.signing_key.serialize_pem()).map_err(|error| failed(&error))?;
    write(&cert_file, 0o644, &made.cert.pem()).map_err(|error| failed(&error))?;
    tracing::info!(file = %cert_file.display(), "made a self-signed certificate");
    Ok((cert_file, key_file))
}

/// Writes a file anew, with its rights from the start.
fn write(file: &Path, mode: u32, text: &str) -> std::io::Result<()> {
    match fs::remove_file(file) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut opened = OpenOptions::new().write(true).create_new(true).mode(mode).open(file)?;
    opened.write_all(text.as_bytes())?;
    opened.sync_all()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn der(certificate: &Certificate) -> Vec<u8> {
        certificate.current().cert[0].to_vec()
    }

    #[test]
    fn a_certificate_is_made_once_and_its_key_is_private() {
        let dir = tempfile::tempdir().expect("a directory");
        let (cert, key) = make_self_signed(&dir.path().join("gateway"), "[::1]").expect("made");
        let first = Certificate::read(&cert, &key).expect("reads");
        let again = make_self_signed(&dir.path().join("gateway"), "elsewhere").expect("there");
        assert_eq!(der(&Certificate::read(&again.0, &again.1).expect("reads")), der(&first));
        assert_eq!(fs::metadata(&key).expect("there").permissions().mode() & 0o777, 0o600);
    }

    #[test]
    fn changed_files_are_read_again_and_broken_ones_are_not_taken() {
        let dir = tempfile::tempdir().expect("a directory");
        let (cert, key) = make_self_signed(&dir.path().join("a"), "").expect("made");
        let (other_cert, other_key) = make_self_signed(&dir.path().join("b"), "").expect("made");
        let certificate = Certificate::read(&cert, &key).expect("reads");
        let first = der(&certificate);
        let replace = |of: &Path, by: &Path, seconds: u64| {
            fs::write(of, fs::read(by).expect("reads")).expect("writes");
            let time = SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
            fs::File::options().write(true).open(of).and_then(|file| file.set_modified(time)).expect("set");
        };
        replace(&cert, &other_cert, 1000);
        certificate.look();
        assert_eq!(der(&certificate), first, "a key of another certificate");
        replace(&key, &other_key, 1000);
        certificate.look();
        let second = der(&certificate);
        assert_ne!(second, first);
        fs::remove_file(&cert).expect("removed");
        certificate.look();
        assert_eq!(der(&certificate), second);
    }

    #[test]
    fn files_that_are_none_are_named() {
        let dir = tempfile::tempdir().expect("a directory");
        let (cert, key) = make_self_signed(dir.path(), "").expect("made");
        for (cert, key, name) in [
            (Path::new("/nowhere.crt"), key.as_path(), "tls_cert, /nowhere.crt"),
            (cert.as_path(), Path::new("/nowhere.key"), "tls_key, /nowhere.key"),
            (key.as_path(), key.as_path(), "no certificate in PEM"),
        ] {
            let error = Certificate::read(cert, key).expect_err("refused").to_string();
            assert!(error.contains(name), "{error}");
        }
    }
}
