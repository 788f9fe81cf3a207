//! One HTTP request to a gateway, or to its admin API.
//!
//! *Owns*: as much of HTTP/1.1 as that takes: one request, one connection, a body up to its end.
//! *Does not own*: what the answers mean.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use sluice_client::{Client, tls_refusal};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::ServerName;

/// How long an answer may take.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(30);
/// Largest answer, in bytes: a list of many tables.
const ANSWER_BYTES_MAX: u64 = 64 << 20;

const QUIC: &str = "quic://";
const TLS: [&str; 2] = ["wss://", "https://"];

/// Whether all of these gateways, joined by commas, are named by where they speak QUIC.
pub(crate) fn are_all_quic(urls: &str) -> bool {
    urls.split(',').all(|url| url.trim().starts_with(QUIC))
}

/// An answer.
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) body: Vec<u8>,
}

/// Asks the first of these gateways, joined by commas, that answers.
pub(crate) async fn get_from_any(urls: &str, path: &str, client: &Client) -> Result<Answer> {
    let mut failure = None;
    for url in urls.split(',') {
        match get(url.trim(), path, client).await {
            Ok(answer) => return Ok(answer),
            Err(error) => failure = Some(error),
        }
    }
    Err(failure.context("no gateway is named")?)
}

/// Asks the gateway at `url` (`ws://host:port`, `wss://…`, `http://…` or `https://…`) for `path`, over TLS and with a token
/// as `client` has them. One at `quic://host:port` is asked where its TCP listens unless told otherwise: at the same port.
async fn get(url: &str, path: &str, client: &Client) -> Result<Answer> {
    let rest = ["ws://", "http://", QUIC].iter().chain(&TLS).find_map(|scheme| url.strip_prefix(scheme));
    let Some(authority) = rest.map(|rest| rest.trim_end_matches('/')).filter(|rest| !rest.is_empty()) else {
        bail!(
            "invalid gateway URL {url:?}: expected ws://, wss://, http://, https:// or quic://, then host:port"
        );
    };
    let address = if authority.rsplit(':').next().is_some_and(|port| port.parse::<u16>().is_ok())
        && authority.contains(':')
    {
        authority.to_owned()
    } else {
        format!("{authority}:7070")
    };
    let exchange = async {
        let tcp = TcpStream::connect(&address).await;
        let tcp = tcp.with_context(|| {
            format!("cannot reach a gateway at {url}: is Sluice running there? `sluice up` starts it here")
        })?;
        let token = client.bearer_token().await?;
        let bearer = token.map(|token| format!("Authorization: Bearer {token}\r\n")).unwrap_or_default();
        let request = format!(
            "GET {path} HTTP/1.1\r\nHost: {authority}\r\nAccept: application/json\r\nConnection: close\r\n{bearer}\r\n"
        );
        let lost = || format!("{url} closed the connection before it answered GET {path}: is it a gateway?");
        let bytes = if TLS.iter().any(|scheme| url.starts_with(scheme)) {
            let host = address.rsplit_once(':').map_or("", |(host, _)| host).trim_matches(['[', ']']);
            let name = ServerName::try_from(host.to_owned()).with_context(|| format!("{url}: a host"))?;
            let connector = TlsConnector::from(client.tls()?);
            let asked = match Box::pin(connector.connect(name, tcp)).await {
                Ok(tls) => ask(tls, &request).await,
                Err(error) => Err(error),
            };
            if let Some(why) = asked.as_ref().err().and_then(|error| tls_refusal(error)) {
                bail!("no secure connection with {url}: {why}");
            }
            asked.with_context(lost)?
        } else {
            ask(tcp, &request).await.with_context(lost)?
        };
        parse(&bytes).with_context(|| format!("{url} does not answer like a gateway"))
    };
    tokio::time::timeout(TIMEOUT, exchange)
        .await
        .with_context(|| format!("{url} did not answer GET {path} within {} s", TIMEOUT.as_secs()))?
}

/// Asks the admin API at `url`, `http://host:port`.
pub(crate) async fn ask_admin(
    url: &str,
    method: &str,
    path: &str,
    secret: Option<&str>,
    patience: Duration,
) -> Result<Answer> {
    let authority = url.strip_prefix("http://").unwrap_or(url).trim_end_matches('/');
    let exchange = async {
        let tcp = TcpStream::connect(authority).await.with_context(|| {
            format!("cannot reach an admin API at {url}: `sluice gateway` and `sluice up` print where theirs is (--admin)")
        })?;
        let bearer = secret.map(|secret| format!("Authorization: Bearer {secret}\r\n")).unwrap_or_default();
        let request = format!(
            "{method} {path} HTTP/1.1\r\nHost: {authority}\r\nConnection: close\r\nContent-Length: 0\r\n{bearer}\r\n"
        );
        let lost = || format!("{url} closed the connection before it answered {method} {path}");
        let bytes = ask(tcp, &request).await.with_context(lost)?;
        parse(&bytes).with_context(|| format!("{url} does not answer like an admin API"))
    };
    tokio::time::timeout(patience, exchange)
        .await
        .with_context(|| format!("{url} did not answer {method} {path} within {} s", patience.as_secs()))?
}

async fn ask(mut io: impl AsyncRead + AsyncWrite + Unpin, request: &str) -> std::io::Result<Vec<u8>> {
    io.write_all(request.as_bytes()).await?;
    let mut bytes = Vec::new();
    io.take(ANSWER_BYTES_MAX).read_to_end(&mut bytes).await?;
    Ok(bytes)
}

fn parse(bytes: &[u8]) -> Result<Answer> {
    let end = bytes.windows(4).position(|window| window == b"\r\n\r\n").context("no end of its headers")?;
    let head = std::str::from_utf8(&bytes[..end]).context("headers that are not text")?;
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).context("no status")?;
    let chunked = head.lines().any(|line| {
        line.to_ascii_lowercase().starts_with("transfer-encoding:")
            && line.to_ascii_lowercase().contains("chunked")
    });
    let body = &bytes[end + 4..];
    Ok(Answer { status, body: if chunked { joined(body)? } else { body.to_vec() } })
}

/// Takes the chunk sizes out of a chunked body.
fn joined(mut body: &[u8]) -> Result<Vec<u8>> {
    let mut whole = Vec::new();
    loop {
        let line = body.windows(2).position(|window| window == b"\r\n").context("a broken chunk")?;
        let size = std::str::from_utf8(&body[..line]).ok().and_then(|size| size.split(';').next());
        let size =
            size.and_then(|size| usize::from_str_radix(size.trim(), 16).ok()).context("a broken chunk")?;
        if size == 0 {
            return Ok(whole);
        }
        let chunk = body.get(line + 2..).and_then(|rest| rest.get(..size)).context("a chunk cut short")?;
        whole.extend_from_slice(chunk);
        body = body.get(line + 2 + size + 2..).context("a chunk cut short")?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_read_whole_and_chunked() {
        for (bytes, body) in [
            ("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]", "[]"),
            (
                "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\n[1,\r\n2\r\n2]\r\n0\r\n\r\n",
                "[1,2]",
            ),
        ] {
            let answer = parse(bytes.as_bytes()).expect("an answer");
            assert_eq!((answer.status, answer.body.as_slice()), (200, body.as_bytes()));
        }
        for bytes in
            ["", "HTTP/1.1 200 OK\r\n", "HTTP/1.1 200\r\nTransfer-Encoding: chunked\r\n\r\n9\r\n[\r\n"]
        {
            assert!(parse(bytes.as_bytes()).is_err(), "{bytes:?}");
        }
    }
}
