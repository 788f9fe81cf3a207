//! HTTP/1 requests that proxies and servers read differently, and those that are none.

use serde_json::Value;

use crate::harness::{FakePod, gateway_with, metric, raw, split};

const HIDDEN: &str = "GET /hidden HTTP/1.1\r\nhost: x\r\n\r\n";

#[tokio::test]
async fn what_hides_a_request_is_refused_and_the_connection_closed() {
    let pod = FakePod::start("pod-1");
    let gateway = gateway_with(&[&pod], |_| {}).await;
    let chunked = "0\r\n\r\n";
    let cases = [
        ("length and coding", format!("content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n{chunked}")),
        ("coding and length", format!("transfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n{chunked}")),
        ("two lengths", "content-length: 5\r\ncontent-length: 0\r\n\r\n".to_owned()),
        ("one length twice", "content-length: 0\r\ncontent-length: 0\r\n\r\n".to_owned()),
        ("a list of lengths", "content-length: 0, 0\r\n\r\n".to_owned()),
        ("a signed length", "content-length: +0\r\n\r\n".to_owned()),
        ("a negative length", "content-length: -1\r\n\r\n".to_owned()),
        ("a huge length", "content-length: 18446744073709551616\r\n\r\n".to_owned()),
        ("an unknown coding", format!("transfer-encoding: xchunked\r\n\r\n{chunked}")),
        ("a coding after chunked", format!("transfer-encoding: chunked, identity\r\n\r\n{chunked}")),
        (
            "chunked twice",
            format!("transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n{chunked}"),
        ),
        ("a space before the colon", format!("transfer-encoding : chunked\r\n\r\n{chunked}")),
        ("a tab before the colon", format!("transfer-encoding\t: chunked\r\n\r\n{chunked}")),
        ("a line that goes on", format!("x: y\r\n transfer-encoding: chunked\r\n\r\n{chunked}")),
        ("a vertical tab", format!("transfer-encoding: \u{b}chunked\r\n\r\n{chunked}")),
        ("a bare LF in the head", "x: y\ncontent-length: 0\r\n\r\n".to_owned()),
        ("a bare LF at its end", "content-length: 0\n\n".to_owned()),
        ("a CR in a value", "x: a\rb\r\ncontent-length: 0\r\n\r\n".to_owned()),
        ("a NUL in a value", "x: a\0b\r\ncontent-length: 0\r\n\r\n".to_owned()),
    ];
    for (case, rest) in &cases {
        let request =
            format!("POST /zerobus/v1/tables/t/insert HTTP/1.1\r\nhost: x\r\n{rest}{HIDDEN}{HIDDEN}");
        // Read to the end: the connection is closed.
        let answer = raw(gateway.address(), request.as_bytes()).await;
        assert!(answer.starts_with("HTTP/1.1 400"), "{case}: {answer:?}");
        assert_eq!(answer.matches("HTTP/1.1").count(), 1, "{case}: {answer:?}");
    }
    let name = "sluice_gateway_errors_total{code=\"malformed_request\"}";
    assert_eq!(metric(gateway.address(), name).await, cases.len() as u64);
    assert!(pod.see(|memory| memory.opens.is_empty()));
}

#[tokio::test]
async fn behind_a_chunked_body_the_connection_carries_nothing_more() {
    let pod = FakePod::start("pod-1");
    let gateway = gateway_with(&[&pod], |_| {}).await;
    let request = format!(
        "POST /v1/tables/t/records HTTP/1.1\r\nhost: x\r\ncontent-type: application/x-ndjson\r\n\
         transfer-encoding: chunked\r\n\r\n3\r\n{{}}\n\r\n0\r\n\r\n{HIDDEN}"
    );
    let answer = raw(gateway.address(), request.as_bytes()).await;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer:?}");
    assert_eq!(answer.matches("HTTP/1.1").count(), 1, "{answer:?}");
}

#[tokio::test]
async fn behind_a_body_of_known_length_the_connection_goes_on() {
    let pod = FakePod::start("pod-1");
    let gateway = gateway_with(&[&pod], |_| {}).await;
    let post = "POST /v1/tables/t/records HTTP/1.1\r\nhost: x\r\ncontent-type: application/x-ndjson\r\n\
                content-length: 3\r\n\r\n{}\n";
    let last = "GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";
    let answer = raw(gateway.address(), format!("{post}{post}{last}").as_bytes()).await;
    assert_eq!(answer.matches("HTTP/1.1 200").count(), 3, "{answer:?}");
}

#[tokio::test]
async fn targets_hosts_and_methods_that_are_none_are_refused() {
    let gateway = gateway_with(&[], |_| {}).await;
    let host = "host: x\r\n";
    for (request, status, code) in [
        ("GET http://elsewhere.example/healthz HTTP/1.1\r\nhost: x\r\n", 400, "invalid_target"),
        ("GET http://x/healthz HTTP/1.1\r\nhost: x\r\n", 400, "invalid_target"),
        ("OPTIONS * HTTP/1.1\r\nhost: x\r\n", 405, "method_not_allowed"),
        ("OPTIONS /v1/tables HTTP/1.1\r\nhost: x\r\n", 405, "method_not_allowed"),
        ("CONNECT elsewhere.example:443 HTTP/1.1\r\nhost: x\r\n", 405, "method_not_allowed"),
        ("TRACE /healthz HTTP/1.1\r\nhost: x\r\n", 405, "method_not_allowed"),
        ("TRACE /nowhere HTTP/1.1\r\nhost: x\r\n", 405, "method_not_allowed"),
        ("GET /healthz HTTP/1.1\r\n", 400, "invalid_host"),
        ("GET /healthz HTTP/1.1\r\nhost: x\r\nhost: y\r\n", 400, "invalid_host"),
        ("GET /healthz HTTP/1.1\r\nhost: a b\r\n", 400, "invalid_host"),
        ("GET /healthz HTTP/1.1\r\nhost: u@x\r\n", 400, "invalid_host"),
        ("GET /healthz HTTP/1.1\r\nhost: x/y\r\n", 400, "invalid_host"),
    ] {
        // Another one behind it: the connection is closed before.
        let sent = format!("{request}\r\nGET / HTTP/1.1\r\n{host}connection: close\r\n\r\n");
        let is_option = request.starts_with("OPTIONS /");
        let answer = raw(gateway.address(), sent.as_bytes()).await;
        let first = answer.split("HTTP/1.1 ").nth(1).map(|first| format!("HTTP/1.1 {first}"));
        let (got, body) = split(&first.unwrap_or_else(|| panic!("{request:?}: {answer:?}")));
        let body: Value = serde_json::from_str(&body).unwrap_or_else(|_| panic!("{request:?}: {answer:?}"));
        assert_eq!((got, body["error"]["code"].as_str()), (status, Some(code)), "{request:?}: {answer}");
        let expected = if is_option { 2 } else { 1 };
        assert_eq!(answer.matches("HTTP/1.1 ").count(), expected, "{request:?}: {answer:?}");
    }
}
