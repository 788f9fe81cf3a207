//! What any request has to fulfil before its path is looked at.
//!
//! *Owns*: hosts, targets and methods that are none, requests that a browser makes for a page of somebody else.
//! *Does not own*: the bytes of heads (`heads`), paths (`http`).

use http::header::{CONNECTION, HOST, HeaderMap, ORIGIN, TRANSFER_ENCODING, UPGRADE};
use http::uri::Authority;
use http::{HeaderValue, Method, Request, Response, StatusCode, Uri, Version};
use sluice_shared::error::Error;

use crate::edge::http::Refusal;

/// Longest piece of a request that a message repeats, in characters.
const SHOWN_CHARS: usize = 100;

/// What has to be known of a request when it is answered.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Gate {
    is_http1: bool,
    /// The connection must carry no other request: where this one ends others may see differently.
    closes: bool,
}

impl Gate {
    pub(crate) fn of<B>(request: &Request<B>) -> Self {
        let is_http1 = request.version() < Version::HTTP_2;
        let headers = request.headers();
        let closes = is_http1 && (headers.contains_key(TRANSFER_ENCODING) || headers.contains_key(UPGRADE));
        Self { is_http1, closes }
    }

    /// Whether the request may pass on.
    ///
    /// # Errors
    /// What is wrong with it.
    pub(crate) fn check<B>(self, request: &Request<B>, origins: &[String]) -> Result<(), Refusal> {
        if self.is_http1 {
            check_host(request.version(), request.headers())?;
            check_target(request.method(), request.uri())?;
        }
        if matches!(*request.method(), Method::CONNECT | Method::TRACE) {
            return Err(method_not_allowed(request.method()));
        }
        check_origin(request, origins)
    }

    /// Behind a refusal a body may follow that nobody reads.
    pub(crate) fn finish<B>(self, mut response: Response<B>, is_refused: bool) -> Response<B> {
        let closes = self.is_http1 && (self.closes || is_refused);
        if closes && response.status() != StatusCode::SWITCHING_PROTOCOLS {
            response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
        }
        response
    }
}

fn check_host(version: Version, headers: &HeaderMap) -> Result<(), Error> {
    let mut hosts = headers.get_all(HOST).iter();
    let message = match (hosts.next(), hosts.next()) {
        (None, _) if version < Version::HTTP_11 => return Ok(()),
        (None, _) => "a request without `Host`: send it once".to_owned(),
        (Some(_), Some(_)) => "a request with more than one `Host`: send it once".to_owned(),
        (Some(host), None) => match host.to_str().map(str::parse::<Authority>) {
            Ok(Ok(authority)) if !authority.as_str().contains('@') => return Ok(()),
            _ => format!("`Host` {:?} is no host, or host and port", shown(host)),
        },
    };
    Err(Error::invalid("invalid_host", message))
}

fn check_target(method: &Method, uri: &Uri) -> Result<(), Refusal> {
    if uri.path() == "*" && method == Method::OPTIONS {
        return Err(method_not_allowed(method));
    }
    if method != Method::CONNECT && (uri.authority().is_some() || !uri.path().starts_with('/')) {
        let message = "the request's target has to be a path, such as /v1/tables: this is no proxy";
        return Err(Error::invalid("invalid_target", message).into());
    }
    Ok(())
}

fn method_not_allowed(method: &Method) -> Refusal {
    let message = format!("{method} is taken nowhere here; GET / lists what there is");
    Refusal::with("method_not_allowed", message, StatusCode::METHOD_NOT_ALLOWED)
}

/// Browsers say for which page they send a request. They send some for any page whatever, upgrades to WebSocket among
/// them: such a page would write with the rights of who looks at it.
fn check_origin<B>(request: &Request<B>, allowed: &[String]) -> Result<(), Refusal> {
    let headers = request.headers();
    let Some(origin) = headers.get(ORIGIN) else { return Ok(()) };
    let reads = matches!(*request.method(), Method::GET | Method::HEAD) && !headers.contains_key(UPGRADE);
    if reads || is_allowed(origin, headers, allowed) {
        return Ok(());
    }
    let message = format!(
        "pages of {:?} may not write here: gateway.allowed_origins lists those that may, as scheme://host:port",
        shown(origin)
    );
    Err(Refusal::with("origin_not_allowed", message, StatusCode::FORBIDDEN))
}

fn is_allowed(origin: &HeaderValue, headers: &HeaderMap, allowed: &[String]) -> bool {
    let Ok(origin) = origin.to_str() else { return false };
    if allowed.iter().any(|allowed| allowed == "*" || allowed.eq_ignore_ascii_case(origin)) {
        return true;
    }
    // The gateway's own pages, where its name can mean nothing else: another name may have been made to point here by
    // the page that it belongs to.
    let host = headers.get(HOST).and_then(|host| host.to_str().ok());
    let same = origin.split_once("://").map(|(_, host)| host).filter(|of| Some(*of) == host);
    let name = same.and_then(|host| host.parse::<Authority>().ok());
    name.is_some_and(|name| {
        let name = name.host().trim_matches(['[', ']']);
        name == "localhost" || name.parse::<std::net::IpAddr>().is_ok()
    })
}

fn shown(value: &HeaderValue) -> String {
    String::from_utf8_lossy(value.as_bytes()).chars().take(SHOWN_CHARS).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(request: http::request::Builder, allowed: &[&str]) -> Result<(), (u16, String)> {
        let request = request.body(()).expect("a request");
        let allowed: Vec<String> = allowed.iter().map(|origin| (*origin).to_owned()).collect();
        let refused = Gate::of(&request).check(&request, &allowed);
        refused.map_err(|refusal| (refusal.status.as_u16(), refusal.error.code))
    }

    fn from(origin: &str, host: &str) -> http::request::Builder {
        Request::get("/v1/tables/t/stream").header("host", host).header("origin", origin)
    }

    #[test]
    fn pages_of_others_may_not_write() {
        let refused = Err((403, "origin_not_allowed".to_owned()));
        let upgrade = |origin: &str, host: &str| from(origin, host).header("upgrade", "websocket");
        for (origin, host, allowed, expected) in [
            ("https://app.example", "127.0.0.1:7070", &[][..], refused.clone()),
            ("https://app.example", "127.0.0.1:7070", &["https://App.example"][..], Ok(())),
            ("https://app.example:444", "127.0.0.1:7070", &["https://app.example"][..], refused.clone()),
            ("null", "127.0.0.1:7070", &[][..], refused.clone()),
            ("null", "127.0.0.1:7070", &["*"][..], Ok(())),
            ("http://127.0.0.1:7070", "127.0.0.1:7070", &[][..], Ok(())),
            ("http://[::1]:7070", "[::1]:7070", &[][..], Ok(())),
            ("http://localhost:7070", "localhost:7070", &[][..], Ok(())),
            ("http://localhost:8080", "localhost:7070", &[][..], refused.clone()),
            ("http://rebound.example:7070", "rebound.example:7070", &[][..], refused.clone()),
        ] {
            assert_eq!(check(upgrade(origin, host), allowed), expected, "{origin} {host} {allowed:?}");
        }
        assert_eq!(
            check(from("https://app.example", "x"), &[]),
            Ok(()),
            "its answer is not shown to the page"
        );
        let post = from("https://app.example", "x").method("POST");
        assert_eq!(check(post, &[]), refused);
    }
}
