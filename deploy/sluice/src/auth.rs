//! Who a command is, and `sluice secret`.
//!
//! *Owns*: the flags and variables for it, printing a new secret.
//! *Does not own*: fetching tokens (`sluice_client`), judging them (`sluice_gateway`).

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use sluice_client::Client;
use sluice_gateway::{SecretHash, make_secret};

use crate::print;

/// What a command presents to a gateway that asks for it.
#[derive(clap::Args)]
pub(crate) struct AuthArgs {
    /// The client's id: a token is fetched for it.
    #[arg(long, value_name = "ID", env = "SLUICE_CLIENT_ID", requires = "client_secret")]
    client_id: Option<String>,
    /// The client's secret. Rather in the variable: other users of the machine see command lines.
    #[arg(
        long,
        value_name = "SECRET",
        env = "SLUICE_CLIENT_SECRET",
        hide_env_values = true,
        requires = "client_id"
    )]
    client_secret: Option<String>,
    /// A token, in place of id and secret.
    #[arg(long, env = "SLUICE_TOKEN", hide_env_values = true)]
    token: Option<String>,
}

impl AuthArgs {
    /// The client presents it. A token goes before id and secret.
    pub(crate) fn give(&self, client: Client) -> Client {
        match (&self.token, &self.client_id, &self.client_secret) {
            (Some(token), ..) => client.token(token),
            (None, Some(id), Some(secret)) => client.credentials(id, secret),
            _ => client,
        }
    }
}

/// Whom a command trusts over TLS and QUIC, and the certificate that it presents.
#[derive(clap::Args)]
pub(crate) struct TlsArgs {
    /// Certificates (PEM) to trust with `wss://` and `quic://` in place of the system's: `gateway/quic.crt` below the
    /// data directory of a `sluice up`.
    #[arg(long, value_name = "FILE")]
    ca: Option<PathBuf>,
    /// A certificate (PEM), with its chain, for gateways that ask for one.
    #[arg(long, value_name = "FILE", requires = "key")]
    cert: Option<PathBuf>,
    /// Its private key (PEM).
    #[arg(long, value_name = "FILE", requires = "cert")]
    key: Option<PathBuf>,
}

impl TlsArgs {
    /// The client trusts and presents these.
    pub(crate) fn give(&self, mut client: Client) -> Result<Client> {
        if let Some(ca) = &self.ca {
            client = client.ca_certificate(ca)?;
        }
        if let (Some(cert), Some(key)) = (&self.cert, &self.key) {
            client = client.client_certificate(cert, key)?;
        }
        Ok(client)
    }
}

/// Prints a new secret, which is kept nowhere.
pub(crate) fn secret() -> Result<ExitCode> {
    let secret = make_secret()?;
    print::answer(format_args!("secret         {secret}"))?;
    print::answer(format_args!("secret_sha256  {}", SecretHash::of(&secret)))?;
    print::note(
        "the secret is shown this once: give it to the client, and secret_sha256 to [[gateway.clients]]",
    );
    Ok(ExitCode::SUCCESS)
}
