//! Where the gateways are, and how a stream is to be opened.
//!
//! *Owns*: `Client`, `StreamBuilder`, the defaults.
//! *Does not own*: the stream itself (`stream`).

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use arrow::datatypes::SchemaRef;
use sluice_shared::frame::{Encoding, Rejected, UnknownFields};
use sluice_shared::ids::{StreamName, TableName};
use sluice_shared::link::PipeDialer;

use crate::credential::Credential;
use crate::error::Error;
use crate::retry::RetryPolicy;
use crate::stream::Stream;
use crate::transport::trust::Trust;
use crate::transport::{GatewayUrl, Way};

/// Unacknowledged bytes that a stream holds, unless told otherwise; the gateway may grant less.
const WINDOW_BYTES: u64 = 8 << 20;

/// Knows the gateways. Cheap to clone; holds no connection: each stream has its own.
#[derive(Debug, Clone)]
pub struct Client {
    gateways: Arc<[GatewayUrl]>,
    way: Way,
    trust: Arc<Trust>,
    credential: Arc<Credential>,
}

impl Client {
    /// Takes the URL of a gateway (`ws://host:port`, `wss://…`, `http://…`, `https://…` or `quic://…`), or several, joined
    /// by commas: a stream that loses its gateway goes on with the next. Nothing is connected yet: `open` does that.
    ///
    /// # Errors
    /// `Url` where one is none.
    pub async fn connect(urls: &str) -> Result<Self, Error> {
        let gateways = urls.split(',').map(|url| url.trim().parse()).collect::<Result<_, _>>()?;
        let (way, trust, credential) = (Way::Network, Arc::default(), Arc::new(Credential::None));
        Ok(Self { gateways, way, trust, credential })
    }

    /// Reaches gateways of `ws://` within this process, by the pipe that this gives for `host:port`: for simulations.
    #[doc(hidden)]
    #[must_use]
    pub fn over_pipes(mut self, dialer: impl Fn(&str) -> PipeDialer + Send + Sync + 'static) -> Self {
        self.way = Way::Pipes(Arc::new(dialer));
        self
    }

    /// Trusts the certificates of this PEM file, in place of the system's: an authority that signed those of the
    /// gateways, or a gateway's own. For `wss://` and `quic://`.
    ///
    /// # Errors
    /// `Certificate` where the file has none.
    pub fn ca_certificate(mut self, path: impl AsRef<Path>) -> Result<Self, Error> {
        self.trust = Arc::new(self.trust.only(path.as_ref())?);
        Ok(self)
    }

    /// Presents the certificate of one PEM file, with the chain that is in it, and the key of the other, to gateways that
    /// ask for one. For `wss://` and `quic://`.
    ///
    /// # Errors
    /// `Certificate` where they cannot be read, or do not belong together.
    pub fn client_certificate(
        mut self,
        cert: impl AsRef<Path>,
        key: impl AsRef<Path>,
    ) -> Result<Self, Error> {
        self.trust = Arc::new(self.trust.presenting(cert.as_ref(), key.as_ref())?);
        Ok(self)
    }

    /// The TLS of its connections, for other requests to the same gateways by HTTP/1.1.
    ///
    /// # Errors
    /// `Certificate` where the system trusts nobody.
    pub fn tls(&self) -> Result<Arc<rustls::ClientConfig>, Error> {
        self.trust.http1()
    }

    /// Presents this bearer token at each open.
    #[must_use]
    pub fn token(mut self, token: impl Into<String>) -> Self {
        self.credential = Arc::new(Credential::Token(token.into()));
        self
    }

    /// Presents a token that is fetched from the gateway for this client's id and secret, and again before it expires
    /// or when it is not taken. All clones of this client, and their streams, share it.
    #[must_use]
    pub fn credentials(mut self, id: impl Into<String>, secret: impl Into<String>) -> Self {
        self.credential = Arc::new(Credential::client(id.into(), secret.into()));
        self
    }

    /// The token that would be presented, for requests of one's own; None without a token and credentials.
    ///
    /// # Errors
    /// What the gateway says of id and secret; no gateway reached.
    pub async fn bearer_token(&self) -> Result<Option<String>, Error> {
        let mut failure = None;
        for gateway in &*self.gateways {
            match self.credential.token(gateway, &self.trust).await {
                Err(error) if error.retry_after().is_some() => failure = Some(error),
                other => return other,
            }
        }
        failure.map_or(Ok(None), Err)
    }

    /// Begins a stream into `table` (`catalog.schema.table`; missing parts come from `main.default`).
    pub fn stream(&self, table: impl Into<String>) -> StreamBuilder {
        StreamBuilder {
            gateways: Arc::clone(&self.gateways),
            way: self.way.clone(),
            trust: Arc::clone(&self.trust),
            credential: Arc::clone(&self.credential),
            table: table.into(),
            name: None,
            encoding: None,
            schema: None,
            unknown: UnknownFields::default(),
            window_bytes: WINDOW_BYTES,
            rate_bytes_per_s: None,
            retry: RetryPolicy::default(),
            on_rejected: None,
        }
    }
}

/// What is called with each rejected record.
pub(crate) type OnRejected = Box<dyn FnMut(Rejected) + Send>;

/// How a stream is to be opened.
#[must_use = "a stream begins with `open`"]
pub struct StreamBuilder {
    gateways: Arc<[GatewayUrl]>,
    way: Way,
    trust: Arc<Trust>,
    credential: Arc<Credential>,
    table: String,
    name: Option<String>,
    encoding: Option<Encoding>,
    schema: Option<SchemaRef>,
    unknown: UnknownFields,
    window_bytes: u64,
    rate_bytes_per_s: Option<u64>,
    retry: RetryPolicy,
    on_rejected: Option<OnRejected>,
}

impl StreamBuilder {
    /// Makes it a named stream: whoever opens the name goes on where it ended, exactly once, and fences the
    /// process that held it before.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = Some(name.into());
        self
    }

    /// What the stream carries; else the first record decides.
    pub fn encoding(mut self, encoding: Encoding) -> Self {
        self.encoding = Some(encoding);
        self
    }

    /// The schema of the records to come (Arrow); the table is created from it where it does not exist.
    pub fn schema(mut self, schema: SchemaRef) -> Self {
        self.encoding = Some(Encoding::Arrow);
        self.schema = Some(schema);
        self
    }

    /// What becomes of fields that the table does not have; refused unless told otherwise.
    pub fn unknown_fields(mut self, unknown: UnknownFields) -> Self {
        self.unknown = unknown;
        self
    }

    /// How many bytes may be unacknowledged before a send waits (8 MiB unless told otherwise). The gateway's own
    /// window bounds it too. A single record or batch may be larger: it then goes alone.
    pub fn window_bytes(mut self, bytes: u64) -> Self {
        self.window_bytes = bytes;
        self
    }

    /// The rate to expect; helps to place the stream.
    pub fn rate_bytes_per_s(mut self, rate: u64) -> Self {
        self.rate_bytes_per_s = Some(rate);
        self
    }

    /// How to go on after failures.
    pub fn retry(mut self, retry: RetryPolicy) -> Self {
        self.retry = retry;
        self
    }

    /// How long a stream goes on without progress before it gives up (5 minutes unless told otherwise).
    pub fn give_up_after(mut self, stalled: Duration) -> Self {
        self.retry.give_up_after = stalled;
        self
    }

    /// Is called with each rejected record, in the stream's task: it must not block. Without it, take them with
    /// [`Stream::rejected`].
    pub fn on_rejected(mut self, callback: impl FnMut(Rejected) + Send + 'static) -> Self {
        self.on_rejected = Some(Box::new(callback));
        self
    }

    /// Opens the stream. Where neither encoding nor schema was given, only names are checked, and the first record
    /// opens it: it decides the encoding.
    ///
    /// # Errors
    /// An invalid name; no gateway reached within the policy's patience; what the gateway refuses.
    pub async fn open(self) -> Result<Stream, Error> {
        let table: TableName = self.table.parse()?;
        let name: Option<StreamName> = self.name.map(|name| name.parse()).transpose()?;
        let settings = Settings {
            gateways: self.gateways,
            way: self.way,
            trust: self.trust,
            credential: self.credential,
            table,
            name,
            unknown: self.unknown,
            window_bytes: self.window_bytes.max(1),
            rate_bytes_per_s: self.rate_bytes_per_s,
            retry: self.retry,
        };
        let mut stream = Stream::new(settings, self.on_rejected);
        if let Some(encoding) = self.encoding {
            stream.begin(encoding, self.schema.as_ref()).await?;
        }
        Ok(stream)
    }
}

/// What a stream keeps for its whole life.
pub(crate) struct Settings {
    pub(crate) gateways: Arc<[GatewayUrl]>,
    pub(crate) way: Way,
    pub(crate) trust: Arc<Trust>,
    pub(crate) credential: Arc<Credential>,
    pub(crate) table: TableName,
    pub(crate) name: Option<StreamName>,
    pub(crate) unknown: UnknownFields,
    pub(crate) window_bytes: u64,
    pub(crate) rate_bytes_per_s: Option<u64>,
    pub(crate) retry: RetryPolicy,
}
