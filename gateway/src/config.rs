//! The gateway's configuration.
//!
//! *Owns*: its keys, their defaults, the relations between them.
//! *Does not own*: where they come from (`sluice_shared::config::load`).

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};
pub(crate) use sluice_shared::config::ConfigError;
use sluice_shared::config::{self, ByteSize};
use sluice_shared::error::Error;
use sluice_shared::ids::{PodId, TableName};
use sluice_shared::link::PodAddress;
use sluice_shared::proto::MESSAGE_BYTES_MAX;

use crate::auth::{Grant, SecretHash};

/// Largest `frame_bytes_max`: a frame must fit in one message to a pod, envelope included.
const FRAME_BYTES_LIMIT: u64 = MESSAGE_BYTES_MAX as u64 - (1 << 20);
/// Smallest window and frame limit that make sense.
const BYTES_MIN: u64 = 1 << 10;
/// 20 minutes.
const UNAVAILABLE_TIMEOUT_MS_MAX: u64 = 1_200_000;

/// How far the admin API's port is above the producers' one.
const ADMIN_PORT_ABOVE: u16 = 3;
/// Longest life of a token: 30 days.
const TOKEN_TTL_S_MAX: u64 = 2_592_000;
/// Longest id of a client, in characters.
const CLIENT_ID_CHARS_MAX: usize = 200;

/// Configuration of a gateway.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GatewayConfig {
    /// Where producers connect without TLS, as `host:port`, or `off`. Port 0 takes a free one.
    pub listen: String,
    /// Where producers connect over TLS (TCP): nowhere unless given, or `off`. Needs a certificate.
    pub tls_listen: Option<String>,
    /// Where producers connect over QUIC (UDP): as `listen` unless given (or as `tls_listen`, where that is off), `off`
    /// or nothing for nowhere. Needs a certificate.
    pub quic_listen: Option<String>,
    /// Where the admin API listens, `host:port`, or `off`. Unset: on loopback, three ports above `listen` (or
    /// `tls_listen`), so that several gateways of one machine do not meet. Producers have no business there.
    pub admin_listen: Option<String>,
    /// SHA-256 of the admin API's secret, in hex: `sluice secret` makes both. Elsewhere than on loopback it is needed.
    pub admin_secret_sha256: Option<SecretHash>,
    /// The certificate of TLS and QUIC, PEM, with its chain. Read again when the files change.
    pub tls_cert: Option<PathBuf>,
    /// Its private key, PEM.
    pub tls_key: Option<PathBuf>,
    /// The authorities (PEM) that have to have signed the certificates of producers, over TLS and QUIC. Unset: producers
    /// need none.
    pub tls_client_ca: Option<PathBuf>,
    /// Whether producers have to present a token. Unset: where clients are configured; without any the gateway is open on
    /// loopback, and does not start elsewhere.
    pub auth: Option<AuthMode>,
    /// Who gets tokens from this gateway.
    pub clients: Vec<ClientEntry>,
    /// The file of the key that signs tokens, the same for all gateways of a service: 32 bytes, hex or base64.
    pub token_key: Option<PathBuf>,
    /// How long a token holds.
    pub token_ttl_s: u64,
    /// Bytes of one stream that are kept until they are durable. At the limit the producer is slowed.
    pub window_bytes: ByteSize,
    /// The same for all streams together: beyond half of it, streams that hold more than a fair part are slowed, and at
    /// it all but those that hold nothing.
    pub memory_bytes: ByteSize,
    /// Largest message, frame and record.
    pub frame_bytes_max: ByteSize,
    /// Where OTLP's log records go that name no table.
    pub otlp_logs_table: Option<TableName>,
    /// Where its spans go.
    pub otlp_traces_table: Option<TableName>,
    /// Where its data points go.
    pub otlp_metrics_table: Option<TableName>,
    /// Where Parquet bodies are kept while they are read; the system's directory for such files unless given.
    pub scratch_dir: Option<PathBuf>,
    /// Largest Parquet body.
    pub parquet_bytes_max: ByteSize,
    /// The pods. The all-in-one program fills them in itself.
    pub pods: Vec<PodEntry>,
    /// Producer connections at one time.
    pub connections_max: usize,
    /// The same of one address (of one /64 of IPv6).
    pub connections_per_peer_max: usize,
    /// New connections that one address may make in a second; twice as many at once.
    pub connects_per_peer_per_s: u32,
    /// Pages that may write with their browser's WebSocket, as `scheme://host:port`; `*` for all.
    pub allowed_origins: Vec<String>,
    /// How long a producer may take for its TLS handshake, to send a request's header, and to finish its WebSocket
    /// upgrade.
    pub handshake_timeout_ms: u64,
    /// How long a frame, a message or a post's record that has begun may take to bring 16 KiB more, or its end. Between
    /// frames a stream may be silent for ever.
    pub read_timeout_ms: u64,
    /// How long a socket may take no bytes at all while there is something to tell its producer.
    pub write_timeout_ms: u64,
    /// How long a pod may take to answer one `open`.
    pub open_timeout_ms: u64,
    /// How long a stream waits for a pod to take it again, before its producer is told `Unavailable`.
    pub unavailable_timeout_ms: u64,
    /// How long the close of a connection waits until all that was received is durable.
    pub close_timeout_ms: u64,
}

/// Who is let in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AuthMode {
    /// Whoever reaches the gateway may do everything.
    Open,
    /// Whoever has a token may do what it says.
    Tokens,
}

/// A client: a program, or a fleet of them, that asks for tokens.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClientEntry {
    /// Its name.
    pub id: String,
    /// SHA-256 of its secret: `sluice secret` makes both.
    pub secret_sha256: SecretHash,
    /// What it may do.
    #[serde(default)]
    pub grants: Vec<Grant>,
}

/// A pod by name and place.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PodEntry {
    /// Its name, which it keeps across restarts.
    pub id: PodId,
    /// `host:port`.
    pub address: String,
}

impl Default for GatewayConfig {
    fn default() -> Self {
        Self {
            listen: "127.0.0.1:7070".to_owned(),
            tls_listen: None,
            quic_listen: None,
            admin_listen: None,
            admin_secret_sha256: None,
            tls_cert: None,
            tls_key: None,
            tls_client_ca: None,
            auth: None,
            clients: Vec::new(),
            token_key: None,
            token_ttl_s: 3600,
            window_bytes: ByteSize::mib(8),
            memory_bytes: ByteSize::mib(1 << 10),
            frame_bytes_max: ByteSize::mib(10),
            otlp_logs_table: None,
            otlp_traces_table: None,
            otlp_metrics_table: None,
            scratch_dir: None,
            parquet_bytes_max: ByteSize::mib(8 << 10),
            pods: Vec::new(),
            connections_max: 16_000,
            connections_per_peer_max: 4000,
            connects_per_peer_per_s: 1000,
            allowed_origins: Vec::new(),
            handshake_timeout_ms: 10_000,
            read_timeout_ms: 30_000,
            write_timeout_ms: 30_000,
            open_timeout_ms: 10_000,
            unavailable_timeout_ms: 600_000,
            close_timeout_ms: 10_000,
        }
    }
}

impl GatewayConfig {
    /// Checks the values, alone and against each other.
    ///
    /// # Errors
    /// `Relation`, naming the key, its value and what it must be: the first of `faults`.
    pub fn validate(&self) -> Result<(), ConfigError> {
        self.faults().into_iter().next().map_or(Ok(()), Err)
    }

    /// All that `validate` refuses.
    pub fn faults(&self) -> Vec<ConfigError> {
        let mut faults = self.size_faults();
        for (key, value) in [
            ("connections_max", self.connections_max),
            ("connections_per_peer_max", self.connections_per_peer_max),
            ("connects_per_peer_per_s", self.connects_per_peer_per_s as usize),
        ] {
            if value == 0 {
                faults.push(relation(format!("gateway.{key} is 0: no producer could connect")));
            }
        }
        for (key, value) in self.timeouts() {
            if value == 0 {
                faults.push(relation(format!("gateway.{key} is 0: it must be at least 1")));
            }
        }
        // Pods forget an ended stream after half an hour: one that could still be resent must not be forgotten.
        if self.unavailable_timeout_ms > UNAVAILABLE_TIMEOUT_MS_MAX {
            let (value, most) = (self.unavailable_timeout_ms, UNAVAILABLE_TIMEOUT_MS_MAX);
            faults.push(relation(format!(
                "gateway.unavailable_timeout_ms is {value}: it must be at most {most}"
            )));
        }
        faults.extend(self.address_faults());
        let relations = [
            self.validate_origins(),
            self.validate_listeners(),
            self.validate_auth(),
            self.validate_admin(),
            self.validate_pods(),
        ];
        faults.extend(relations.into_iter().filter_map(Result::err));
        faults
    }

    fn size_faults(&self) -> Vec<ConfigError> {
        let mut faults = Vec::new();
        for (key, size) in [
            ("window_bytes", self.window_bytes),
            ("frame_bytes_max", self.frame_bytes_max),
            ("parquet_bytes_max", self.parquet_bytes_max),
        ] {
            if size.0 < BYTES_MIN {
                let least = ByteSize(BYTES_MIN);
                faults.push(relation(format!("gateway.{key} is {size}: it must be at least {least}")));
            }
        }
        if self.frame_bytes_max.0 > FRAME_BYTES_LIMIT {
            let (size, limit) = (self.frame_bytes_max, ByteSize(FRAME_BYTES_LIMIT));
            faults.push(relation(format!(
                "gateway.frame_bytes_max is {size}: a message to a pod holds at most {limit}"
            )));
        }
        if self.memory_bytes < self.window_bytes {
            let (all, one) = (self.memory_bytes, self.window_bytes);
            faults.push(relation(format!(
                "gateway.memory_bytes is {all}: one stream alone may hold gateway.window_bytes, {one}"
            )));
        }
        faults
    }

    fn address_faults(&self) -> Vec<ConfigError> {
        let quic = self.quic_listen.as_deref().filter(|listen| !is_off(listen));
        let admin = self.admin_listen.clone().filter(|listen| !is_off(listen));
        let listeners = [
            ("gateway.listen", self.plain_address()),
            ("gateway.tls_listen", self.tls_address()),
            ("gateway.quic_listen", quic),
            ("gateway.admin_listen", admin.as_deref()),
        ];
        let check = |(key, listen): (&str, Option<&str>)| config::check_listen(key, listen?).err();
        let mut faults: Vec<_> = listeners.into_iter().filter_map(check).collect();
        if let (Some(plain), Some(tls)) = (self.plain_address(), self.tls_address())
            && config::is_clash(plain, tls)
        {
            faults.push(relation(format!(
                "gateway.tls_listen is {tls}, and gateway.listen {plain}: one port cannot be both"
            )));
        }
        faults
    }

    fn validate_origins(&self) -> Result<(), ConfigError> {
        let is_origin = |origin: &str| {
            let host = origin.split_once("://").map(|(_, host)| host);
            matches!(origin, "*" | "null") || host.is_some_and(|host| !host.is_empty() && !host.contains('/'))
        };
        let Some(origin) = self.allowed_origins.iter().find(|origin| !is_origin(origin)) else {
            return Ok(());
        };
        let expected = "expected scheme://host or scheme://host:port without a path, or *";
        Err(ConfigError::Relation(format!("gateway.allowed_origins has {origin:?}: {expected}")))
    }

    fn validate_listeners(&self) -> Result<(), ConfigError> {
        let text = match (&self.tls_cert, &self.tls_key) {
            (Some(_), None) => {
                "gateway.tls_cert without gateway.tls_key: a certificate needs its private key"
            }
            (None, Some(_)) => {
                "gateway.tls_key without gateway.tls_cert: a private key needs its certificate"
            }
            (None, None) if self.quic_listen.as_deref().is_some_and(|listen| !is_off(listen)) => {
                "gateway.quic_listen without gateway.tls_cert and gateway.tls_key: QUIC needs a certificate"
            }
            (None, None) if self.tls_address().is_some() => {
                "gateway.tls_listen without gateway.tls_cert and gateway.tls_key: TLS needs a certificate"
            }
            (None, None) if self.tls_client_ca.is_some() => {
                "gateway.tls_client_ca without gateway.tls_cert and gateway.tls_key: clients present certificates over TLS \
                 and QUIC alone"
            }
            _ if self.plain_address().is_none() && self.tls_address().is_none() => {
                "gateway.listen is off and gateway.tls_listen is not set: no producer could connect"
            }
            _ => return Ok(()),
        };
        Err(ConfigError::Relation(text.to_owned()))
    }

    fn validate_admin(&self) -> Result<(), ConfigError> {
        if self.admin_secret_sha256.is_some_and(|hash| !hash.is_valid()) {
            let rule = "it has to be 64 hex digits, the SHA-256 of a secret, as `sluice secret` prints it";
            return Err(ConfigError::Relation(format!("gateway.admin_secret_sha256: {rule}")));
        }
        if self.admin_listen.is_none()
            && self.admin_address().is_none()
            && let Some(listen) = self.plain_address().or_else(|| self.tls_address())
            && listen.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok())
        {
            return Err(ConfigError::Relation(format!(
                "the gateway listens on {listen}, and no port is {ADMIN_PORT_ABOVE} above that, where the admin API would be: \
                 set gateway.admin_listen, to host:port or `off`"
            )));
        }
        let listen = self.admin_address().filter(|listen| is_beyond_loopback(listen));
        let Some(listen) = listen.filter(|_| self.admin_secret_sha256.is_none()) else { return Ok(()) };
        Err(ConfigError::Relation(format!(
            "gateway.admin_listen is {listen:?}, where others reach it, and there is no secret: whoever does could drain the \
             pool; set gateway.admin_secret_sha256 (`sluice secret`), or listen on 127.0.0.1"
        )))
    }

    fn validate_auth(&self) -> Result<(), ConfigError> {
        let refuse = |text: String| Err(ConfigError::Relation(text));
        if !(1..=TOKEN_TTL_S_MAX).contains(&self.token_ttl_s) {
            let value = self.token_ttl_s;
            return refuse(format!("gateway.token_ttl_s is {value}: it must be 1 to {TOKEN_TTL_S_MAX}"));
        }
        for (at, ClientEntry { id, secret_sha256, .. }) in self.clients.iter().enumerate() {
            // Characters that no encoding of a form or header changes, whatever a client makes of its id on the way.
            let is_good = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
            if !(1..=CLIENT_ID_CHARS_MAX).contains(&id.len()) || !id.chars().all(is_good) {
                let rule = format!("use 1 to {CLIENT_ID_CHARS_MAX} of the characters A-Z a-z 0-9 . _ -");
                return refuse(format!("gateway.clients: {id:?} cannot be an id: {rule}"));
            }
            if !secret_sha256.is_valid() {
                let rule =
                    "it has to be 64 hex digits, the SHA-256 of a secret, as `sluice secret` prints it";
                return refuse(format!("gateway.clients, client {id}: secret_sha256: {rule}"));
            }
            if self.clients[..at].iter().any(|other| other.id == *id) {
                return refuse(format!("gateway.clients names client {id} twice"));
            }
        }
        if self.auth_mode()? == AuthMode::Tokens && self.token_key.is_none() {
            return refuse(
                "gateway.token_key is not set: tokens need a file with a key, the same for all gateways; `openssl rand \
                 -hex 32` makes one (and `sluice up` its own)"
                    .to_owned(),
            );
        }
        Ok(())
    }

    /// Who is let in.
    ///
    /// # Errors
    /// `Relation` where the gateway can be reached from elsewhere and nothing says who is let in.
    pub fn auth_mode(&self) -> Result<AuthMode, ConfigError> {
        match (self.auth, self.beyond_loopback()) {
            (Some(mode), _) => Ok(mode),
            (None, _) if !self.clients.is_empty() => Ok(AuthMode::Tokens),
            (None, None) => Ok(AuthMode::Open),
            (None, Some(listen)) => Err(ConfigError::Relation(format!(
                "the gateway would listen on {listen}, where others can reach it, and nothing says who may write: \
                 configure gateway.clients (`sluice secret` makes a secret), or set gateway.auth to \"open\" to let \
                 everybody in"
            ))),
        }
    }

    /// The first address that is not this machine's own.
    pub(crate) fn beyond_loopback(&self) -> Option<&str> {
        let quic = self.tls_files().and_then(|_| self.quic_address());
        let listeners = [self.plain_address(), self.tls_address(), quic];
        listeners.into_iter().flatten().find(|listen| is_beyond_loopback(listen))
    }

    /// Where to listen without TLS; None for nowhere.
    pub fn plain_address(&self) -> Option<&str> {
        (!is_off(&self.listen)).then_some(&*self.listen)
    }

    /// Where to listen for TLS; None for nowhere.
    pub fn tls_address(&self) -> Option<&str> {
        self.tls_listen.as_deref().filter(|listen| !is_off(listen))
    }

    /// Where to listen for QUIC; None for nowhere.
    pub fn quic_address(&self) -> Option<&str> {
        match &self.quic_listen {
            Some(listen) => (!is_off(listen)).then_some(listen),
            None => self.plain_address().or_else(|| self.tls_address()),
        }
    }

    /// Where the admin API listens; None for nowhere.
    pub fn admin_address(&self) -> Option<String> {
        match &self.admin_listen {
            Some(listen) => (!is_off(listen)).then(|| listen.clone()),
            None => {
                let listen = self.plain_address().or_else(|| self.tls_address())?;
                let port: u16 = listen.rsplit_once(':')?.1.parse().ok()?;
                let port = if port == 0 { 0 } else { port.checked_add(ADMIN_PORT_ABOVE)? };
                Some(format!("127.0.0.1:{port}"))
            }
        }
    }

    /// Where bodies are kept that cannot be read as they come.
    pub(crate) fn scratch_dir(&self) -> PathBuf {
        self.scratch_dir.clone().unwrap_or_else(std::env::temp_dir)
    }

    /// The files of certificate and key.
    pub(crate) fn tls_files(&self) -> Option<(&Path, &Path)> {
        Some((self.tls_cert.as_deref()?, self.tls_key.as_deref()?))
    }

    fn validate_pods(&self) -> Result<(), ConfigError> {
        for (at, pod) in self.pods.iter().enumerate() {
            if self.pods[..at].iter().any(|other| other.id == pod.id) {
                return Err(relation(format!("gateway.pods names pod {} twice", pod.id)));
            }
            if let Some(other) = self.pods[..at].iter().find(|other| other.address == pod.address) {
                let (id, other, address) = (&pod.id, &other.id, &pod.address);
                return Err(relation(format!(
                    "gateway.pods, pods {other} and {id}: one address cannot be both, {address}"
                )));
            }
            let parsed = pod.address.parse::<PodAddress>();
            parsed
                .map_err(|error| ConfigError::Relation(format!("gateway.pods, pod {}: {error}", pod.id)))?;
        }
        Ok(())
    }

    fn timeouts(&self) -> [(&'static str, u64); 6] {
        [
            ("handshake_timeout_ms", self.handshake_timeout_ms),
            ("read_timeout_ms", self.read_timeout_ms),
            ("write_timeout_ms", self.write_timeout_ms),
            ("open_timeout_ms", self.open_timeout_ms),
            ("unavailable_timeout_ms", self.unavailable_timeout_ms),
            ("close_timeout_ms", self.close_timeout_ms),
        ]
    }

    /// The configured pods, as `Gateway::start` takes them.
    ///
    /// # Errors
    /// `Invalid` for an address that is no `host:port`.
    pub fn pod_addresses(&self) -> Result<Vec<(PodId, PodAddress)>, Error> {
        self.pods.iter().map(|pod| Ok((pod.id.clone(), pod.address.parse()?))).collect()
    }

    pub(crate) fn handshake_timeout(&self) -> Duration {
        Duration::from_millis(self.handshake_timeout_ms)
    }

    pub(crate) fn read_timeout(&self) -> Duration {
        Duration::from_millis(self.read_timeout_ms)
    }

    pub(crate) fn write_timeout(&self) -> Duration {
        Duration::from_millis(self.write_timeout_ms)
    }

    pub(crate) fn open_timeout(&self) -> Duration {
        Duration::from_millis(self.open_timeout_ms)
    }

    pub(crate) fn unavailable_timeout(&self) -> Duration {
        Duration::from_millis(self.unavailable_timeout_ms)
    }

    pub(crate) fn close_timeout(&self) -> Duration {
        Duration::from_millis(self.close_timeout_ms)
    }
}

fn relation(text: String) -> ConfigError {
    ConfigError::Relation(text)
}

/// A name other than `localhost` may lead anywhere. What is no `HOST:PORT` leads nowhere: it is refused when it is bound.
fn is_beyond_loopback(listen: &str) -> bool {
    let Some((host, _)) = listen.rsplit_once(':') else { return false };
    let host = host.trim_matches(['[', ']']);
    host != "localhost" && !host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

fn is_off(listen: &str) -> bool {
    matches!(listen, "" | "off")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(change: impl FnOnce(&mut GatewayConfig)) -> String {
        let mut config = GatewayConfig::default();
        change(&mut config);
        config.validate().expect_err("must be refused").to_string()
    }

    #[test]
    fn the_defaults_are_valid() {
        GatewayConfig::default().validate().expect("valid");
    }

    #[test]
    fn quic_listens_where_the_rest_does_unless_told_otherwise() {
        for (quic_listen, expected) in [
            (None, Some("127.0.0.1:7070")),
            (Some("[::]:1"), Some("[::]:1")),
            (Some("off"), None),
            (Some(""), None),
        ] {
            let quic_listen = quic_listen.map(str::to_owned);
            let config = GatewayConfig { quic_listen, ..GatewayConfig::default() };
            assert_eq!(config.quic_address(), expected);
        }
    }

    fn client(id: &str) -> ClientEntry {
        ClientEntry { id: id.to_owned(), secret_sha256: SecretHash::of("x"), grants: Vec::new() }
    }

    #[test]
    fn who_is_let_in_is_said_or_goes_without_saying() {
        let mode = |auth, clients: &[&str], listen: &str| {
            let clients = clients.iter().map(|id| client(id)).collect();
            GatewayConfig { auth, clients, listen: listen.to_owned(), ..GatewayConfig::default() }
                .auth_mode()
                .ok()
        };
        let (open, tokens) = (Some(AuthMode::Open), Some(AuthMode::Tokens));
        for listen in ["127.0.0.1:7070", "127.8.0.1:0", "localhost:1", "[::1]:7070"] {
            assert_eq!(mode(None, &[], listen), open, "{listen}");
            assert_eq!(mode(None, &["a"], listen), tokens, "{listen}");
            assert_eq!(mode(open, &["a"], listen), open, "{listen}");
        }
        for listen in ["0.0.0.0:7070", "[::]:7070", "10.0.0.1:1", "gateway:7070", ":7070"] {
            assert_eq!(mode(None, &[], listen), None, "{listen}");
            assert_eq!(mode(None, &["a"], listen), tokens, "{listen}");
            assert_eq!(mode(open, &[], listen), open, "{listen}");
            assert_eq!(mode(tokens, &[], listen), tokens, "{listen}");
        }
        let error = refusal(|config| {
            (config.tls_cert, config.tls_key) = (Some("a".into()), Some("b".into()));
            config.quic_listen = Some("0.0.0.0:1".to_owned());
        });
        assert!(error.contains("listen on 0.0.0.0:1") && error.contains("gateway.auth"), "{error}");
    }

    #[test]
    fn clients_have_names_of_their_own_and_a_key() {
        assert!(refusal(|config| config.clients = vec![client("a")]).contains("gateway.token_key"));
        assert!(refusal(|config| config.clients = vec![client("a:b")]).contains("cannot be an id"));
        assert!(refusal(|config| config.clients = vec![client("a"), client("a")]).contains("a twice"));
        assert!(refusal(|config| config.token_ttl_s = 0).contains("gateway.token_ttl_s is 0"));
    }

    #[test]
    fn what_does_not_fit_together_is_refused_by_key() {
        assert!(refusal(|config| config.window_bytes = ByteSize(1)).contains("window_bytes is 1B"));
        assert!(
            refusal(|config| config.frame_bytes_max = ByteSize::mib(32)).contains("frame_bytes_max is 32MiB")
        );
        let high = refusal(|config| config.listen = "127.0.0.1:65533".to_owned());
        assert!(high.contains("127.0.0.1:65533") && high.contains("gateway.admin_listen"), "{high}");
        let without = GatewayConfig {
            listen: "127.0.0.1:65533".to_owned(),
            admin_listen: Some("off".to_owned()),
            ..GatewayConfig::default()
        };
        without.validate().expect("an admin API is not needed");
        assert!(refusal(|config| config.write_timeout_ms = 0).contains("write_timeout_ms is 0"));
        assert!(refusal(|config| config.connections_max = 0).contains("connections_max"));
        assert!(refusal(|config| config.tls_cert = Some("a".into())).contains("without gateway.tls_key"));
        assert!(refusal(|config| config.tls_key = Some("a".into())).contains("without gateway.tls_cert"));
        for change in [
            |config: &mut GatewayConfig, listen| config.quic_listen = listen,
            |config: &mut GatewayConfig, listen| config.tls_listen = listen,
        ] {
            assert!(refusal(|config| change(config, Some("[::]:1".to_owned()))).contains("a certificate"));
        }
        assert!(refusal(|config| config.listen = "off".to_owned()).contains("tls_listen is not set"));
        assert!(refusal(|config| config.memory_bytes = ByteSize::mib(1)).contains("memory_bytes is 1MiB"));
        assert!(refusal(|config| config.read_timeout_ms = 0).contains("read_timeout_ms is 0"));
        assert!(refusal(|config| config.connects_per_peer_per_s = 0).contains("connects_per_peer_per_s"));
        for origin in ["app.example", "https://", "https://app.example/", ""] {
            let text = refusal(|config| config.allowed_origins = vec![origin.to_owned()]);
            assert!(text.contains("allowed_origins"), "{text}");
        }
        let pod = |address: &str| PodEntry { id: "a".parse().expect("valid"), address: address.to_owned() };
        assert!(refusal(|config| config.pods = vec![pod("x:1"), pod("y:1")]).contains("pod a twice"));
        assert!(refusal(|config| config.pods = vec![pod("nowhere")]).contains("expected host:port"));
    }
}
