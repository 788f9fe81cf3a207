//! Tokens that are fetched: once for all streams, again before they expire, and again when they are not taken.

use serde_json::{Value, json};
use sluice_client::Error;
use sluice_shared::error::{Error as GatewayError, ErrorKind};

use crate::fake::{FakeGateway, hasty, within};

const STREAM: &str = "~018f0000000070008000000000000000";

fn answer(token: &str, expires_in: u64) -> Value {
    json!({ "access_token": token, "token_type": "Bearer", "expires_in": expires_in })
}

#[tokio::test]
async fn a_token_is_fetched_once_for_all_streams_of_a_client() {
    let gateway = FakeGateway::start().await;
    let client = gateway.client().await.credentials("plant", "s3cret");
    let producer = async {
        for _ in 0..2 {
            let stream =
                client.stream("t").encoding(sluice_client::Encoding::Json).open().await.expect("opens");
            drop(stream);
        }
    };
    let server = async {
        let request = gateway.answer_http(200, &answer("one", 3600)).await;
        assert!(request.starts_with("POST /oidc/v1/token HTTP/1.1\r\n"), "{request}");
        // base64 of plant:s3cret
        assert!(request.contains("authorization: Basic cGxhbnQ6czNjcmV0\r\n"), "{request}");
        for _ in 0..2 {
            let (_, open) = gateway.open_at(STREAM, 0).await;
            assert_eq!(open.token.as_deref(), Some("one"));
        }
    };
    within(async { tokio::join!(producer, server) }).await;
}

#[tokio::test]
async fn a_token_that_is_over_or_not_taken_is_fetched_anew() {
    let gateway = FakeGateway::start().await;
    let client = gateway.client().await.credentials("plant", "s3cret");
    let producer = async {
        let mut stream = client.stream("t").name("n").retry(hasty()).open().await.expect("opens");
        stream.send_json(&json!({})).await.expect("sent");
        stream.durable().await.expect("durable");
        stream.send_json(&json!({})).await.expect("sent");
        stream.durable().await.expect("durable")
    };
    let server = async {
        gateway.answer_http(200, &answer("one", 3600)).await;
        let mut refused = gateway.accept().await;
        assert_eq!(refused.open().await.token.as_deref(), Some("one"));
        refused.error(GatewayError::unauthorized("token_invalid", "another key")).await;
        // Its life is over as it comes.
        gateway.answer_http(200, &answer("two", 0)).await;
        let (mut connection, open) = gateway.open_at("n#1", 0).await;
        assert_eq!(open.token.as_deref(), Some("two"));
        connection.records().await;
        connection.durable(0).await;
        connection.records().await;
        let error = GatewayError::unauthorized("auth_expired", "expired");
        connection.error(GatewayError { retryable: true, ..error }).await;
        gateway.answer_http(200, &answer("three", 3600)).await;
        let (mut connection, open) = gateway.open_at("n#1", 1).await;
        assert_eq!((open.token.as_deref(), open.resume_at), (Some("three"), Some(1)));
        connection.records().await;
        connection.durable(1).await;
        connection
    };
    within(async { tokio::join!(producer, server) }).await;
}

#[tokio::test]
async fn a_wrong_secret_ends_the_stream_and_is_in_no_message() {
    let gateway = FakeGateway::start().await;
    let client = gateway.client().await.credentials("plant", "s3cret");
    assert!(!format!("{client:?}").contains("s3cret"));
    let producer = async {
        let opened = client.stream("t").name("n").encoding(sluice_client::Encoding::Json).open().await;
        let error = opened.err().expect("refused");
        assert_eq!(error.kind(), ErrorKind::Unauthorized);
        assert!(matches!(&error, Error::Gateway(error) if error.code == "invalid_client"), "{error:?}");
        assert!(
            error.to_string().contains("no such client") && !format!("{error:?}").contains("s3cret"),
            "{error:?}"
        );
    };
    let refusal = json!({ "error": "invalid_client", "error_description": "no such client" });
    let server = gateway.answer_http(401, &refusal);
    within(async { tokio::join!(producer, server) }).await;
}

#[tokio::test]
async fn a_token_of_ones_own_that_is_not_taken_ends_the_stream() {
    let gateway = FakeGateway::start().await;
    let client = gateway.client().await.token("mine");
    assert!(!format!("{client:?}").contains("mine"));
    let producer = async {
        let opened = client.stream("t").encoding(sluice_client::Encoding::Json).open().await;
        assert_eq!(opened.err().expect("refused").kind(), ErrorKind::Unauthorized);
    };
    let server = async {
        let mut refused = gateway.accept().await;
        assert_eq!(refused.open().await.token.as_deref(), Some("mine"));
        refused.error(GatewayError::unauthorized("token_expired", "expired")).await;
        refused
    };
    within(async { tokio::join!(producer, server) }).await;
}

#[tokio::test]
async fn a_secret_does_not_travel_in_the_clear_beside_quic() {
    let client = sluice_client::Client::connect("quic://gateway.example:7070").await.expect("valid");
    let client = client.credentials("plant", "s3cret");
    let error = client.bearer_token().await.expect_err("refused");
    assert!(matches!(error, Error::Insecure { .. }), "{error:?}");
}
