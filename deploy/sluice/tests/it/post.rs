//! Posts of records, once and again: what is answered is in the table, each record once.

use std::io::Write;

use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

use crate::ledger::Ledger;
use crate::server::{Server, check_refusal, until};

const NDJSON: &str = "content-type: application/x-ndjson\r\n";

fn head(path: &str, headers: &str, length: usize) -> String {
    format!(
        "POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{headers}content-length: {length}\r\n\r\n"
    )
}

async fn post(server: &Server, path: &str, headers: &str, body: &[u8]) -> (u16, String) {
    server.raw(&[head(path, headers, body.len()).as_bytes(), body].concat()).await
}

fn answer((status, body): (u16, String)) -> Value {
    assert_eq!(status, 200, "{body}");
    serde_json::from_str(&body).expect("JSON")
}

#[tokio::test]
async fn a_post_is_answered_when_its_records_are_in_the_table() {
    let server = Server::start(&[]);
    let mut ledger = Ledger::create(&server, "t", &[]).await;
    let ids: Vec<i64> = (0..3).map(|_| ledger.id()).collect();
    let body =
        format!("{{\"id\":{}}}\n{{\"id\":\"x\"}}\n{{\"id\":{}}}\n{{\"id\":{}}}", ids[0], ids[1], ids[2]);
    let path = "/v1/tables/t/records?wait=committed";
    let got = answer(post(&server, path, NDJSON, body.as_bytes()).await);
    assert_eq!(
        (&got["records"], &got["committed"], &got["rejected_total"]),
        (&json!(4), &json!(3), &json!(1)),
        "{got}"
    );
    assert_eq!(
        (&got["rejected"][0]["offset"], &got["rejected"][0]["column"]),
        (&json!(1), &json!("id")),
        "{got}"
    );
    let description = server.describe("t").await.expect("a table");
    assert_eq!((&description["rows"], &description["version"]), (&json!(3), &got["version"]));
    let stream = got["stream"].as_str().expect("a stream");
    for (offset, id) in [(0, ids[0]), (2, ids[1]), (3, ids[2])] {
        ledger.owe(stream, offset, id);
    }
    ledger.check().await;
    server.expect_no_stream().await;
    server.end();
}

#[tokio::test]
async fn csv_and_compressed_posts_are_records_like_others() {
    let server = Server::with_auto_create(true, &[]);
    let mut ledger = Ledger::new(&server, "t");
    let mut csv = "id,name\n".to_owned();
    (0..500).for_each(|n| csv.push_str(&format!("{},\"name, {n}\"\n", ledger.id())));
    let mut gzip = GzEncoder::new(Vec::new(), Compression::fast());
    gzip.write_all(csv.as_bytes()).expect("written");
    let body = gzip.finish().expect("written");
    let headers = "content-type: text/csv\r\ncontent-encoding: gzip\r\n";
    let got = answer(post(&server, "/v1/tables/t/records", headers, &body).await);
    assert_eq!((&got["records"], &got["rejected_total"]), (&json!(500), &json!(0)), "{got}");
    (0..500)
        .for_each(|offset| ledger.owe(got["stream"].as_str().expect("a stream"), offset, offset as i64 + 1));
    ledger.check().await;
    server.end();
}

#[tokio::test]
async fn a_post_with_a_key_can_be_sent_again_after_anything() {
    let server = Server::start(&[]);
    let mut ledger = Ledger::create(&server, "t", &[]).await;
    let ids: Vec<i64> = (0..1000).map(|_| ledger.id()).collect();
    let line = |(at, id): (usize, &i64)| match at % 100 {
        7 => "{\"id\":\"bad\"}\n".to_owned(),
        _ => format!("{{\"id\":{id}}}\n"),
    };
    let body: String = ids.iter().enumerate().map(line).collect();
    let path = "/v1/tables/t/records?wait=committed";
    for (key, cut_first) in [("a", false), ("b", true)] {
        let headers = format!("{NDJSON}idempotency-key: {key}\r\n");
        if cut_first {
            let sent = server.metric("sluice_gateway_records_total").await;
            let mut socket = TcpStream::connect(server.address).await.expect("connects");
            socket.write_all(head(path, &headers, body.len()).as_bytes()).await.expect("sends");
            socket.write_all(&body.as_bytes()[..body.len() / 2]).await.expect("sends");
            let look =
                async || (server.metric("sluice_gateway_records_total").await > sent + 400).then_some(());
            until("the first half", look).await;
            socket.set_zero_linger().expect("sets an option");
            drop(socket);
        }
        let first = answer(post(&server, path, &headers, body.as_bytes()).await);
        assert_eq!((&first["rejected_total"], &first["committed"]), (&json!(10), &json!(999)), "{first}");
        let mut again = answer(post(&server, path, &headers, body.as_bytes()).await);
        assert!(again["version"].as_u64() >= first["version"].as_u64(), "{again}");
        again["version"] = first["version"].clone();
        assert_eq!(again, first);
        let stream = first["stream"].as_str().expect("a stream");
        let good = ids.iter().enumerate().filter(|(at, _)| at % 100 != 7);
        good.for_each(|(at, id)| ledger.owe(stream, at as u64, *id));
        ledger.check().await;
    }
    // What goes beyond the end of a key's stream is added to it.
    let id = ledger.id();
    let longer = format!("{body}{{\"id\":{id}}}\n");
    let headers = format!("{NDJSON}idempotency-key: b\r\n");
    let got = answer(post(&server, path, &headers, longer.as_bytes()).await);
    assert_eq!((&got["records"], &got["committed"]), (&json!(1001), &json!(1000)), "{got}");
    ledger.owe(got["stream"].as_str().expect("a stream"), 1000, id);
    ledger.check().await;
    server.expect_no_stream().await;
    server.end();
}

#[tokio::test]
async fn of_two_posts_with_one_key_the_newer_wins() {
    let server = Server::start(&[]);
    let mut ledger = Ledger::create(&server, "t", &[]).await;
    let headers = format!("{NDJSON}idempotency-key: k\r\n");
    let path = "/v1/tables/t/records";
    let (first, second) = (ledger.id(), ledger.id());
    let body = format!("{{\"id\":{first}}}\n{{\"id\":{second}}}\n");
    let (begun, rest) = body.split_at(body.len() - 3);
    let mut older = TcpStream::connect(server.address).await.expect("connects");
    older.write_all(format!("{}{begun}", head(path, &headers, body.len())).as_bytes()).await.expect("sends");
    let look = async || (server.metric("sluice_gateway_records_total").await == 1).then_some(());
    until("its first record", look).await;
    let got = answer(post(&server, path, &headers, body.as_bytes()).await);
    older.write_all(rest.as_bytes()).await.expect("sends");
    let mut text = String::new();
    tokio::io::AsyncReadExt::read_to_string(&mut older, &mut text).await.expect("an answer");
    assert!(text.starts_with("HTTP/1.1 409 ") && text.contains("\"code\":\"fenced\""), "{text}");
    let stream = got["stream"].as_str().expect("a stream");
    ledger.owe(stream, 0, first);
    ledger.owe(stream, 1, second);
    ledger.check().await;
    server.end();
}

#[tokio::test]
async fn an_insert_speaks_as_zerobus_does() {
    let server = Server::start(&[]);
    let mut ledger = Ledger::create(&server, "t", &[]).await;
    let ids = [ledger.id(), ledger.id()];
    let path = "/zerobus/v1/tables/main.default.t/insert";
    let headers = "content-type: application/json\r\nauthorization: Bearer x\r\n";
    let body = format!("[{{\"id\":{}}}, {{\"id\":{}}}]", ids[0], ids[1]);
    assert_eq!(post(&server, path, headers, body.as_bytes()).await, (200, "{}".to_owned()));
    let (status, refusal) = post(&server, path, headers, b"[{\"id\":\"x\"}]").await;
    let refusal: Value = serde_json::from_str(&refusal).expect("JSON");
    assert_eq!((status, &refusal["error_code"]), (400, &json!("INVALID_PARAMETER_VALUE")));
    assert!(
        refusal["message"].as_str().is_some_and(|message| message.starts_with("record 0, column id: ")),
        "{refusal}"
    );
    let (status, refusal) = post(&server, "/zerobus/v1/tables/none/insert", headers, body.as_bytes()).await;
    assert!(status == 404 && refusal.contains("\"NOT_FOUND\""), "{refusal}");
    check_refusal("a form", post(&server, "/v1/tables/t/records", "", b"").await, (415, "unsupported_type"));
    let description =
        async || server.describe("t").await.filter(|table| table["rows"] == 2 && table["lag_ms"] == 0);
    until("two rows", description).await;
    server.end();
}
