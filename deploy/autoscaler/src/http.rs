//! One request, one connection, over TCP or TLS: as much of an HTTP client as an autoscaler needs.
//!
//! *Owns*: addresses, time-outs, bounds of an answer. *Does not own*: what is asked and answered (`admin`, `driver`).

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, Method, Request, header};
use http_body_util::{BodyExt, Full, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

/// A whole exchange that only reads; a decision each second has to go on when one gateway hangs.
const READ_TIMEOUT: Duration = Duration::from_secs(3);
/// One that asks for something: a gateway waits 5 s for a pod.
const WISH_TIMEOUT: Duration = Duration::from_secs(8);
/// Largest answer: a pool of a thousand pods, each with its busiest tables.
const ANSWER_BYTES_MAX: usize = 32 << 20;

/// Why there was no answer.
#[derive(Debug, thiserror::Error)]
pub enum HttpError {
    /// Not an address.
    #[error("{0:?} is no address: expected http://HOST:PORT or https://HOST:PORT")]
    Address(String),
    /// Nobody took the connection.
    #[error("cannot reach {url}: {source}")]
    Connect {
        /// Who was asked.
        url: String,
        /// Why.
        source: std::io::Error,
    },
    /// It was lost, or is not HTTP.
    #[error("{url} did not answer: {source}")]
    Exchange {
        /// Who was asked.
        url: String,
        /// Why.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// It takes too long.
    #[error("{url} did not answer within {} s", .after.as_secs())]
    Late {
        /// Who was asked.
        url: String,
        /// How long was waited.
        after: Duration,
    },
}

/// An answer, whatever its status.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) body: Bytes,
}

impl Answer {
    pub(crate) fn is_good(&self) -> bool {
        (200..300).contains(&self.status)
    }
}

/// What is asked.
#[derive(Debug, Clone)]
pub(crate) struct Ask<'a> {
    pub(crate) method: Method,
    pub(crate) path: &'a str,
    pub(crate) content_type: &'static str,
    pub(crate) body: String,
    pub(crate) bearer: Option<String>,
}

impl<'a> Ask<'a> {
    pub(crate) fn new(method: Method, path: &'a str) -> Self {
        Self { method, path, content_type: "application/json", body: String::new(), bearer: None }
    }
}

/// Somebody to ask.
#[derive(Clone)]
pub(crate) struct Server {
    url: String,
    authority: String,
    tls: Option<(Arc<ClientConfig>, ServerName<'static>)>,
}

impl Server {
    /// `roots` are trusted where the address is an `https://` one.
    pub(crate) fn new(url: &str, roots: RootCertStore) -> Result<Self, HttpError> {
        let wrong = || HttpError::Address(url.to_owned());
        let (rest, is_tls) = match (url.strip_prefix("http://"), url.strip_prefix("https://")) {
            (Some(rest), _) => (rest, false),
            (_, Some(rest)) => (rest, true),
            _ => return Err(wrong()),
        };
        let authority = rest.trim_end_matches('/');
        let parsed: http::uri::Authority = authority.parse().map_err(|_| wrong())?;
        let host = parsed.host();
        let port = match authority.strip_prefix(host) {
            Some("") if is_tls => 443,
            Some("") => 80,
            _ => parsed.port_u16().ok_or_else(wrong)?,
        };
        let tls = if is_tls {
            let provider = Arc::new(rustls::crypto::ring::default_provider());
            let config = ClientConfig::builder_with_provider(provider)
                .with_safe_default_protocol_versions()
                .map_err(|_| wrong())?
                .with_root_certificates(roots)
                .with_no_client_auth();
            let name = ServerName::try_from(host.trim_matches(['[', ']']).to_owned()).map_err(|_| wrong())?;
            Some((Arc::new(config), name))
        } else {
            None
        };
        Ok(Self { url: url.trim_end_matches('/').to_owned(), authority: format!("{host}:{port}"), tls })
    }

    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    /// Asks, and waits for the whole answer.
    pub(crate) async fn ask(&self, ask: Ask<'_>) -> Result<Answer, HttpError> {
        let after = if ask.method == Method::GET { READ_TIMEOUT } else { WISH_TIMEOUT };
        let late = |_| HttpError::Late { url: self.url.clone(), after };
        tokio::time::timeout(after, self.exchange(ask)).await.map_err(late)?
    }

    async fn exchange(&self, ask: Ask<'_>) -> Result<Answer, HttpError> {
        let unreached = |source| HttpError::Connect { url: self.url.clone(), source };
        let tcp = TcpStream::connect(&self.authority).await.map_err(unreached)?;
        match &self.tls {
            None => self.over(tcp, ask).await,
            Some((config, name)) => {
                let connector = TlsConnector::from(Arc::clone(config));
                let tls = Box::pin(connector.connect(name.clone(), tcp)).await.map_err(unreached)?;
                self.over(tls, ask).await
            }
        }
    }

    async fn over(&self, io: impl AsyncRead + AsyncWrite + Unpin, ask: Ask<'_>) -> Result<Answer, HttpError> {
        let request = self.request(ask)?;
        let (mut sender, connection) =
            http1::handshake(TokioIo::new(io)).await.map_err(|error| self.failed(error))?;
        let answer = async {
            let response = sender.send_request(request).await.map_err(|error| self.failed(error))?;
            let status = response.status().as_u16();
            let body = Limited::new(response.into_body(), ANSWER_BYTES_MAX).collect().await;
            let body = body.map_err(|source| HttpError::Exchange { url: self.url.clone(), source })?;
            Ok(Answer { status, body: body.to_bytes() })
        };
        tokio::pin!(answer);
        tokio::select! {
            biased; // an answer that is whole is an answer, however the connection ends
            answer = &mut answer => answer,
            ended = connection => match ended {
                // It has nothing left to read: what it read is on its way.
                Ok(()) => answer.await,
                Err(error) => Err(self.failed(error)),
            },
        }
    }

    fn request(&self, ask: Ask<'_>) -> Result<Request<Full<Bytes>>, HttpError> {
        let mut request = Request::builder()
            .method(ask.method)
            .uri(ask.path)
            .header(header::HOST, &self.authority)
            .header(header::ACCEPT, "application/json")
            .header(header::CONNECTION, "close");
        if !ask.body.is_empty() {
            request = request.header(header::CONTENT_TYPE, ask.content_type);
        }
        if let Some(token) = ask.bearer {
            let mut bearer = HeaderValue::try_from(format!("Bearer {token}"))
                .map_err(|source| HttpError::Exchange { url: self.url.clone(), source: source.into() })?;
            bearer.set_sensitive(true);
            request = request.header(header::AUTHORIZATION, bearer);
        }
        request
            .body(Full::new(Bytes::from(ask.body)))
            .map_err(|source| HttpError::Exchange { url: self.url.clone(), source: source.into() })
    }

    fn failed(&self, source: hyper::Error) -> HttpError {
        HttpError::Exchange { url: self.url.clone(), source: source.into() }
    }
}
