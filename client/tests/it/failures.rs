//! Refusals: which end a stream, and which are waited out.

use std::time::Duration;

use serde_json::json;
use sluice_client::{Client, Encoding, Error};
use sluice_shared::error::{Error as GatewayError, ErrorKind};

use crate::fake::{FakeGateway, hasty, within};

const STREAM: &str = "~018f0000000070008000000000000000";

#[tokio::test]
async fn what_another_try_cannot_mend_ends_the_stream_for_good() {
    for kind in [
        ErrorKind::Fenced,
        ErrorKind::Invalid,
        ErrorKind::NotFound,
        ErrorKind::Unauthorized,
        ErrorKind::Forbidden,
        ErrorKind::Internal,
    ] {
        let gateway = FakeGateway::start().await;
        let client = gateway.client().await;
        let producer = async {
            let mut stream = client.stream("t").name("n").retry(hasty()).open().await.expect("opens");
            stream.send_json(&json!({})).await.expect("sent");
            for error in [
                stream.durable().await.expect_err("ended"),
                stream.send_json(&json!({})).await.expect_err("ended"),
                stream.committed().await.expect_err("ended"),
                stream.finish().await.expect_err("ended"),
            ] {
                assert!(matches!(&error, Error::Gateway(error) if error.kind == kind), "{error:?}");
                assert_eq!(error.kind(), kind);
            }
        };
        let server = async {
            let (mut connection, _) = gateway.open_at("n#1", 0).await;
            connection.records().await;
            connection.error(GatewayError::new(kind, "some_code", "so it is")).await;
            connection.read().await
        };
        within(async { tokio::join!(producer, server) }).await;
    }
}

#[tokio::test]
async fn what_passes_is_waited_out() {
    let gateway = FakeGateway::start().await;
    let client = gateway.client().await;
    let producer = async {
        let mut stream = client.stream("t").name("n").retry(hasty()).open().await.expect("opens");
        stream.send_json(&json!({})).await.expect("sent");
        stream.durable().await.expect("durable")
    };
    let server = async {
        gateway.accept_and_drop().await;
        let mut connection = gateway.accept().await;
        connection.open().await;
        connection.error(GatewayError::busy("no_place", "come back", Duration::from_millis(20))).await;
        drop(connection);
        let unavailable = GatewayError::unavailable("no_pods", "no pod is reachable");
        let body = format!("{{\"error\":{}}}", serde_json::to_string(&unavailable).expect("JSON"));
        let response =
            format!("HTTP/1.1 503 Service Unavailable\r\ncontent-length: {}\r\n\r\n{body}", body.len());
        gateway.accept_with_http(&response).await;
        let (mut connection, _) = gateway.open_at("n#1", 0).await;
        connection.records().await;
        connection.error(unavailable).await;
        connection.close(1012).await;
        let (mut connection, _) = gateway.open_at("n#1", 0).await;
        connection.records().await;
        connection.durable(0).await;
    };
    let (durable, ()) = within(async { tokio::join!(producer, server) }).await;
    assert_eq!(durable, Some(0));
}

#[tokio::test]
async fn a_lost_connection_shows_until_it_is_made_again() {
    let gateway = FakeGateway::start().await;
    let client = gateway.client().await;
    let mut stream = client.stream("t").name("n").retry(hasty());
    stream = stream.encoding(Encoding::Json);
    let (opened, (connection, _)) =
        within(async { tokio::join!(stream.open(), gateway.open_at("n#1", 0)) }).await;
    let mut stream = opened.expect("opens");
    let progress = stream.progress();
    assert!(progress.reconnecting().is_none());
    drop(connection);
    let outage = within(async {
        loop {
            match progress.reconnecting() {
                Some(outage) => return outage,
                None => tokio::task::yield_now().await,
            }
        }
    })
    .await;
    assert!(matches!(&outage.last, Error::Connection { url, .. } if *url == gateway.url()), "{outage:?}");
    assert!(outage.gives_up_in <= hasty().give_up_after, "{outage:?}");
    let server = async {
        let (mut connection, _) = gateway.open_at("n#1", 0).await;
        connection.records().await;
        connection.durable(0).await;
        connection
    };
    let sent = async {
        stream.send_json(&json!({})).await.expect("sent");
        stream.durable().await.expect("durable")
    };
    let (_, _connection) = within(async { tokio::join!(sent, server) }).await;
    assert!(progress.reconnecting().is_none());
}

#[tokio::test]
async fn a_refused_upgrade_says_why() {
    let gateway = FakeGateway::start().await;
    let client = gateway.client().await;
    let not_found =
        GatewayError::not_found("table_not_found", "table main.default.t does not exist: create it");
    let body = format!("{{\"error\":{}}}", serde_json::to_string(&not_found).expect("JSON"));
    let response = format!("HTTP/1.1 404 Not Found\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    let opening = client.stream("t").encoding(Encoding::Json).open();
    let (opened, ()) = within(async { tokio::join!(opening, gateway.accept_with_http(&response)) }).await;
    let error = opened.err().expect("refused");
    assert!(matches!(&error, Error::Gateway(error) if error.code == "table_not_found"), "{error:?}");
}

#[tokio::test]
async fn nobody_there_is_given_up() {
    let gateway = FakeGateway::start().await;
    let url = gateway.url();
    drop(gateway);
    let client = Client::connect(&url).await.expect("valid URL");
    let mut policy = hasty();
    policy.give_up_opening_after = Duration::from_millis(20);
    let opening = client.stream("t").retry(policy).encoding(Encoding::Json).open();
    let error = within(opening).await.err().expect("nobody there");
    assert!(matches!(&error, Error::Connection { url: at, .. } if *at == url), "{error:?}");
}

#[tokio::test]
async fn a_stalled_stream_is_given_up_with_the_last_failure() {
    let gateway = FakeGateway::start().await;
    let client = gateway.client().await;
    let producer = async {
        let mut policy = hasty();
        policy.give_up_after = Duration::from_millis(100);
        let mut stream = client.stream("t").name("n").retry(policy).open().await.expect("opens");
        stream.send_json(&json!({})).await.expect("sent");
        stream.durable().await.expect_err("stalled")
    };
    let server = async {
        loop {
            let (mut connection, _) = gateway.open_at("n#1", 0).await;
            connection.records().await;
            connection.error(GatewayError::unavailable("no_pods", "no pod is reachable")).await;
        }
    };
    let error = within(async {
        tokio::select! {
            biased; // the server never ends
            error = producer => error,
            () = server => unreachable!("loops"),
        }
    })
    .await;
    let Error::GaveUp { last, stalled } = &error else { panic!("{error:?}") };
    assert!(*stalled >= Duration::from_millis(100));
    assert_eq!(last.to_string(), "no pod is reachable");
}

#[tokio::test]
async fn names_are_checked_before_anything_is_sent() {
    let client = Client::connect("ws://127.0.0.1:1").await.expect("valid URL");
    for (table, name) in [("../etc", "n"), ("t", "a name"), ("", "n")] {
        let error = client.stream(table).name(name).open().await.err().expect("refused");
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    }
}

#[tokio::test]
async fn acks_beyond_what_was_sent_break_the_protocol() {
    let gateway = FakeGateway::start().await;
    let client = gateway.client().await;
    let producer = async {
        let mut stream = client.stream("t").open().await.expect("opens");
        stream.send_json(&json!({})).await.expect("sent");
        stream.durable().await.expect_err("broken")
    };
    let server = async {
        let (mut connection, _) = gateway.open_at(STREAM, 0).await;
        connection.records().await;
        connection.durable(1).await;
        connection.read().await
    };
    let (error, _) = within(async { tokio::join!(producer, server) }).await;
    assert!(matches!(&error, Error::Protocol { .. }), "{error:?}");
}

/// Takes as long as two attempts to connect, which have no other bound than the client's own.
#[tokio::test]
async fn a_gateway_that_takes_connections_and_says_nothing_is_given_up() {
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("binds");
    let url = format!("ws://{}", silent.local_addr().expect("bound"));
    let client = Client::connect(&url).await.expect("a URL");
    let opening = client.stream("t").encoding(Encoding::Json).retry(hasty()).open();
    let opened = tokio::time::timeout(Duration::from_secs(60), opening).await.expect("gives up");
    let error = opened.err().expect("nobody answers");
    assert!(error.to_string().contains("timed out"), "{error}");
}
