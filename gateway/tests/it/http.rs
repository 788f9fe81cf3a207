//! Paths, headers and statuses.

use serde_json::Value;

use crate::harness::{FakePod, Producer, gateway, gateway_with, get, metric, raw, split};

async fn check_error(answer: (u16, String), status: u16, code: &str) {
    let body: Value = serde_json::from_str(&answer.1).unwrap_or_else(|_| panic!("JSON: {answer:?}"));
    assert_eq!((answer.0, body["error"]["code"].as_str()), (status, Some(code)), "{body}");
    assert!(body["error"]["message"].as_str().is_some_and(|message| message.len() > 20), "{body}");
}

#[tokio::test]
async fn bad_table_names_are_refused_before_the_upgrade() {
    let pod = FakePod::start("pod-1");
    let gateway = gateway(&[&pod]).await;
    let long = "a".repeat(300);
    for name in ["..", "%2e%2e", "a%2Fb", "a/b", "", "%00", "a..b", "na%C3%AFve", "%ff", "a%20b", &long] {
        for path in [format!("/v1/tables/{name}/stream"), format!("/v1/tables/{name}")] {
            check_error(get(gateway.address(), "GET", &path).await, 400, "invalid_table_name").await;
        }
    }
    assert!(pod.see(|memory| memory.opens.is_empty()));
}

#[tokio::test]
async fn unknown_paths_and_methods_are_json_errors() {
    let gateway = gateway(&[]).await;
    let address = gateway.address();
    check_error(get(address, "GET", "/nowhere").await, 404, "unknown_path").await;
    check_error(get(address, "DELETE", "/v1/tables/flights").await, 405, "method_not_allowed").await;
    check_error(get(address, "POST", "/v1/tables/flights/stream").await, 405, "method_not_allowed").await;
}

#[tokio::test]
async fn the_query_is_checked() {
    let gateway = gateway(&[]).await;
    let path = |query: &str| format!("/v1/tables/flights/stream?{query}");
    for (query, code) in [
        ("nam=x", "invalid_query"),
        ("unknown=maybe", "invalid_query"),
        ("resume_at=-1", "invalid_query"),
        ("name=", "invalid_stream_name"),
        ("name=a%20b", "invalid_stream_name"),
    ] {
        check_error(get(gateway.address(), "GET", &path(query)).await, 400, code).await;
    }
}

#[tokio::test]
async fn an_upgrade_is_checked_header_by_header() {
    let gateway = gateway(&[]).await;
    let upgrade = "connection: keep-alive, Upgrade\r\nupgrade: websocket\r\n";
    let version = "sec-websocket-version: 13\r\n";
    for (headers, status, code) in [
        (String::new(), 426, "upgrade_required"),
        ("upgrade: websocket\r\nconnection: close\r\n".to_owned(), 426, "upgrade_required"),
        (format!("{upgrade}sec-websocket-version: 8\r\n"), 426, "websocket_version"),
        (format!("{upgrade}{version}"), 400, "websocket_key"),
        (format!("{upgrade}{version}sec-websocket-key: short\r\n"), 400, "websocket_key"),
    ] {
        let close = if headers.contains("connection") { "" } else { "connection: close\r\n" };
        let request = format!("GET /v1/tables/t/stream HTTP/1.1\r\nhost: x\r\n{headers}{close}\r\n");
        let mut socket = tokio::net::TcpStream::connect(gateway.address()).await.expect("connects");
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        socket.write_all(request.as_bytes()).await.expect("sends");
        socket.shutdown().await.expect("shuts down");
        let mut answer = String::new();
        socket.read_to_string(&mut answer).await.expect("reads");
        check_error(split(&answer), status, code).await;
    }
}

#[tokio::test]
async fn tables_are_passed_on_to_their_home() {
    let pod = FakePod::start("pod-1");
    let gateway = gateway(&[&pod]).await;
    let address = gateway.address();
    let body = "{\"columns\":[]}";
    let request = format!(
        "PUT /v1/tables/flights HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    assert_eq!(split(&raw(address, request.as_bytes()).await), (201, body.to_owned()));
    assert_eq!(pod.see(|memory| memory.specs.clone()), [body]);
    assert_eq!(split(&raw(address, request.as_bytes()).await).0, 200, "it was there before");
    let (status, tables) = get(address, "GET", "/v1/tables").await;
    assert_eq!((status, tables.as_str()), (200, "{\"tables\":[\"main.default.flights\"]}"));
    check_error(get(address, "GET", "/v1/tables/nothing").await, 404, "table_not_found").await;
}

#[tokio::test]
async fn a_spec_over_the_limit_is_refused() {
    let pod = FakePod::start("pod-1");
    let gateway = gateway(&[&pod]).await;
    let request =
        "PUT /v1/tables/flights HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 2000000\r\n\r\n";
    check_error(split(&raw(gateway.address(), request.as_bytes()).await), 413, "spec_too_large").await;
}

#[tokio::test]
async fn ready_means_that_a_pod_answers() {
    let (dead, pod) = (FakePod::start("pod-1"), FakePod::start("pod-2"));
    let first = gateway(&[&dead, &pod]).await;
    dead.kill();
    assert_eq!(get(first.address(), "GET", "/readyz").await.0, 200);
    let second = gateway(&[&dead]).await;
    check_error(get(second.address(), "GET", "/readyz").await, 503, "no_pod_answers").await;
    assert_eq!(get(second.address(), "GET", "/healthz").await.0, 200);
    assert!(get(second.address(), "GET", "/").await.1.contains("ws://"));
}

#[tokio::test]
async fn connections_are_bounded_and_errors_counted() {
    let pod = FakePod::start("pod-1");
    let gateway = gateway_with(&[&pod], |config| config.connections_max = 2).await;
    let producer = Producer::plain(&gateway).await;
    check_error(get(gateway.address(), "GET", "/nowhere").await, 404, "unknown_path").await;
    let name = "sluice_gateway_errors_total{code=\"unknown_path\"}";
    assert_eq!(metric(gateway.address(), name).await, 1);
    let second = Producer::plain(&gateway).await;
    let (status, body) = split(&raw(gateway.address(), b"").await);
    assert_eq!(status, 503);
    assert!(body.contains("too_many_connections"), "{body}");
    drop((producer, second));
}

#[tokio::test]
async fn what_is_not_http_is_closed() {
    let gateway = gateway(&[]).await;
    let answer = raw(gateway.address(), b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03garbage\r\n\r\n").await;
    assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 400"), "{answer:?}");
}
