//! Where a gateway is, and the connections that reach it.
//!
//! *Owns*: gateway URLs.
//! *Does not own*: what is said over a connection (`task`).

pub(crate) mod websocket;

use std::fmt;
use std::str::FromStr;

use http::Uri;

use crate::error::Error;

/// Port of a gateway whose URL names none.
const PORT: u16 = 7070;

/// A gateway's address.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct GatewayUrl {
    authority: String,
}

impl GatewayUrl {
    /// Where streams into `table` are opened.
    pub(crate) fn stream(&self, table: &str) -> String {
        format!("ws://{}/v1/tables/{table}/stream", self.authority)
    }
}

impl FromStr for GatewayUrl {
    type Err = Error;

    fn from_str(url: &str) -> Result<Self, Error> {
        let invalid = |why: &str| Error::Url { url: url.to_owned(), why: why.to_owned() };
        let uri: Uri = url.parse().map_err(|error| invalid(&format!("{error}; expected ws://host:port")))?;
        match uri.scheme_str() {
            Some("ws" | "http") => {}
            Some("wss" | "https") => return Err(invalid("TLS is not there yet: use ws:// or http://")),
            _ => return Err(invalid("expected ws://host:port or http://host:port")),
        }
        if !matches!(uri.path(), "" | "/") || uri.query().is_some() {
            return Err(invalid("expected no path behind host:port"));
        }
        let authority = uri.authority().ok_or_else(|| invalid("it names no host"))?;
        if authority.host().is_empty() || authority.as_str().contains('@') {
            return Err(invalid("expected host:port without a user"));
        }
        let port = authority.port_u16().unwrap_or(PORT);
        Ok(Self { authority: format!("{}:{port}", authority.host()) })
    }
}

impl fmt::Display for GatewayUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ws://{}", self.authority)
    }
}

impl fmt::Debug for GatewayUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_of_gateways() {
        for (url, shown) in [
            ("ws://127.0.0.1:7070", "ws://127.0.0.1:7070"),
            ("http://localhost:80/", "ws://localhost:80"),
            ("ws://[::1]:7070", "ws://[::1]:7070"),
            ("ws://gateway", "ws://gateway:7070"),
        ] {
            assert_eq!(url.parse::<GatewayUrl>().expect(url).to_string(), shown);
        }
        for url in ["", "localhost:7070", "wss://a:1", "ftp://a:1", "ws://a:1/v1", "ws://u@a:1", "ws://:1"] {
            let error = url.parse::<GatewayUrl>().expect_err(url).to_string();
            assert!(error.contains("invalid gateway URL"), "{error}");
        }
    }
}
