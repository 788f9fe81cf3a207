//! What a stream presents when it opens: nothing, a token, or one that is fetched for a client's id and secret.
//!
//! *Owns*: fetching tokens, keeping them until they are to be renewed; no secret is in any text made here.
//! *Does not own*: when a stream opens (`task`), what a token allows (the gateway).

use std::fmt;
use std::net::IpAddr;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http::header::{AUTHORIZATION, CONTENT_TYPE, HOST};
use http::{Method, Request, StatusCode};
use http_body_util::{BodyExt, Full, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use serde::Deserialize;
use sluice_shared::error::{Error as GatewayError, ErrorKind};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::sync::Mutex;
use tokio::time::{Instant, timeout};
use tokio_rustls::TlsConnector;

use crate::error::Error;
use crate::transport::trust::{self, Trust};
use crate::transport::{GatewayUrl, broke_protocol, lost, timed_out};

const FETCH_TIMEOUT: Duration = Duration::from_secs(10);
const ANSWER_BYTES_MAX: usize = 64 << 10;
/// A token is renewed when this part of its life is over.
const RENEW_AFTER: f64 = 0.8;
const GRANT: &[u8] = b"grant_type=client_credentials";

/// See the module.
pub(crate) enum Credential {
    None,
    Token(String),
    Client(ClientSecret),
}

/// A client's id and secret, and the token that they got last.
pub(crate) struct ClientSecret {
    id: String,
    secret: String,
    /// Locked while one is fetched, so that a thousand streams that open at once fetch one.
    held: Mutex<Option<Held>>,
}

struct Held {
    token: String,
    renew_at: Instant,
}

impl Credential {
    pub(crate) fn client(id: String, secret: String) -> Self {
        Self::Client(ClientSecret { id, secret, held: Mutex::default() })
    }

    /// What to present to the gateway at `url`.
    ///
    /// # Errors
    /// What the gateway says of id and secret, and a gateway that cannot be reached.
    pub(crate) async fn token(&self, url: &GatewayUrl, trust: &Trust) -> Result<Option<String>, Error> {
        let client = match self {
            Self::None => return Ok(None),
            Self::Token(token) => return Ok(Some(token.clone())),
            Self::Client(client) => client,
        };
        let mut held = client.held.lock().await;
        if let Some(held) = held.as_ref().filter(|held| Instant::now() < held.renew_at) {
            return Ok(Some(held.token.clone()));
        }
        let fetched = client.fetch(url, trust).await?;
        let token = fetched.token.clone();
        *held = Some(fetched);
        Ok(Some(token))
    }

    /// A gateway did not take this token. Whether another one may help.
    pub(crate) async fn renews(&self, token: Option<&str>) -> bool {
        let (Self::Client(client), Some(token)) = (self, token) else { return false };
        client.held.lock().await.take_if(|held| held.token == token);
        true
    }
}

impl fmt::Debug for Credential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("none"),
            Self::Token(_) => f.write_str("a token"),
            Self::Client(client) => write!(f, "client {:?}", client.id),
        }
    }
}

/// The gateway's answers (RFC 6749 section 5).
#[derive(Deserialize)]
struct Answer {
    access_token: String,
    #[serde(default)]
    expires_in: u64,
}

#[derive(Deserialize)]
struct Refusal {
    error: String,
    #[serde(default)]
    error_description: String,
}

impl ClientSecret {
    async fn fetch(&self, url: &GatewayUrl, trust: &Trust) -> Result<Held, Error> {
        if url.is_quic() && !is_this_machine(url.host()) {
            let what = "over quic:// tokens are fetched by plain HTTP, which would show the client's secret: use wss://, or \
                        fetch one elsewhere and present it as a token";
            return Err(Error::Insecure { url: url.to_string(), what: what.to_owned() });
        }
        let asked_at = Instant::now();
        let asked = timeout(FETCH_TIMEOUT, self.ask(url, trust)).await;
        let (status, body) = asked.map_err(|_| timed_out(url, "waiting for a token", FETCH_TIMEOUT))??;
        if status != StatusCode::OK {
            return Err(refused(url, status, &body));
        }
        let answer: Answer = serde_json::from_slice(&body)
            .map_err(|_| broke_protocol(url, "its answer to a request for a token has none"))?;
        let renew_at = asked_at + Duration::from_secs(answer.expires_in).mul_f64(RENEW_AFTER);
        Ok(Held { token: answer.access_token, renew_at })
    }

    async fn ask(&self, url: &GatewayUrl, trust: &Trust) -> Result<(StatusCode, Bytes), Error> {
        let failed = |what: &dyn fmt::Display| lost(url, &format!("cannot fetch a token: {what}"));
        let basic = STANDARD.encode(format!("{}:{}", self.id, self.secret));
        let request = Request::builder()
            .method(Method::POST)
            .uri("/oidc/v1/token")
            .header(HOST, url.authority())
            .header(AUTHORIZATION, format!("Basic {basic}"))
            .header(CONTENT_TYPE, "application/x-www-form-urlencoded")
            .body(Full::new(Bytes::from_static(GRANT)))
            .map_err(|error| failed(&error))?;
        let socket = TcpStream::connect(url.authority()).await.map_err(|error| failed(&error))?;
        if !url.is_tls() {
            return exchange(socket, request).await.map_err(|error| failed(&error));
        }
        let name = ServerName::try_from(url.host().trim_matches(['[', ']']).to_owned());
        let name = name.map_err(|error| failed(&error))?;
        let secured = Box::pin(TlsConnector::from(trust.http1()?).connect(name, socket)).await;
        let socket = secured.map_err(|error| match trust::refusal(&error) {
            Some(what) => Error::Insecure { url: url.to_string(), what },
            None => failed(&error),
        })?;
        exchange(socket, request).await.map_err(|error| failed(&error))
    }
}

type AnyError = Box<dyn std::error::Error + Send + Sync>;

/// One request on a connection of its own.
async fn exchange(
    socket: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    request: Request<Full<Bytes>>,
) -> Result<(StatusCode, Bytes), AnyError> {
    let (mut sender, connection) = http1::handshake(TokioIo::new(socket)).await?;
    // Owns the sender, whose end is the connection's.
    let asking = async move {
        let response = sender.send_request(request).await?;
        let status = response.status();
        let body = Limited::new(response.into_body(), ANSWER_BYTES_MAX).collect().await?;
        Ok((status, body.to_bytes()))
    };
    // How the connection ends is of no interest where the answer is there, and its error where it is not.
    let (answer, _) = tokio::join!(asking, connection);
    answer
}

fn refused(url: &GatewayUrl, status: StatusCode, body: &[u8]) -> Error {
    let kind = match status.as_u16() {
        401 => ErrorKind::Unauthorized,
        403 => ErrorKind::Forbidden,
        404 => ErrorKind::NotFound,
        408 | 429 => ErrorKind::Busy,
        500.. => ErrorKind::Unavailable,
        _ => ErrorKind::Invalid,
    };
    let (code, why) = match serde_json::from_slice::<Refusal>(body) {
        Ok(Refusal { error, error_description }) => (error, error_description),
        Err(_) => ("no_token".to_owned(), format!("status {status}")),
    };
    GatewayError::new(kind, &code, format!("gateway {url} gives no token: {why}")).into()
}

fn is_this_machine(host: &str) -> bool {
    let host = host.trim_matches(['[', ']']);
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}
