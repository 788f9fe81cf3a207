//! The files that a gateway's configuration names: whether they are there, can be read, and are nobody else's.
//!
//! *Owns*: what a key's file may let others do; the check of all files before a start.
//! *Does not own*: what is in them (`certificate`, `auth`).

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use sluice_shared::error::Error;

use crate::auth::check_token_key;
use crate::certificate::Certificate;
use crate::client_ca::ClientCa;
use crate::config::{AuthMode, GatewayConfig};

/// Bits of a secret file's mode that let others use it, or the group write it. The group may read: so it is where
/// Kubernetes mounts a secret.
const MODE_TOO_OPEN: u32 = 0o027;

/// Refuses a file with a secret in it that others can read.
///
/// # Errors
/// Why, for a message that names key and file.
pub(crate) fn check_secret(file: &Path) -> Result<(), String> {
    let mode = fs::metadata(file).map_err(|error| error.to_string())?.mode();
    if mode & MODE_TOO_OPEN != 0 {
        return Err(format!("its mode {:o} lets others read or change it: chmod 600 it", mode & 0o777));
    }
    Ok(())
}

/// What is wrong with the files that a configuration names: all that a start would find.
pub fn file_faults(config: &GatewayConfig) -> Vec<Error> {
    let certificate = config.tls_files().map(|(cert, key)| Certificate::read(cert, key).map(|_| ()));
    let client_ca = config.tls_client_ca.as_deref().map(|file| ClientCa::read(file).map(|_| ()));
    let token_key = match config.auth_mode() {
        Ok(AuthMode::Tokens) => config.token_key.as_deref().map(check_token_key),
        _ => None,
    };
    let scratch = config.scratch_dir.as_deref().map(check_scratch_dir);
    [certificate, client_ca, token_key, scratch].into_iter().flatten().filter_map(Result::err).collect()
}

/// By a file without a name, which is gone when it is closed.
fn check_scratch_dir(dir: &Path) -> Result<(), Error> {
    tempfile::tempfile_in(dir).map(|_| ()).map_err(|error| {
        let message = format!("gateway.scratch_dir, {}: cannot keep files there: {error}", dir.display());
        Error::invalid("invalid_scratch_dir", message)
    })
}
