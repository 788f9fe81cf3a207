//! Values that a partition column cannot put into a path as they are.

use serde_json::json;

use crate::ledger::Ledger;
use crate::server::Server;
use crate::wire::Producer;

#[tokio::test]
async fn odd_partition_values_are_stored_and_hold_up_nobody() {
    let server = Server::start(&[]);
    for (number, value) in
        ["..", ".", "a/b", "../../../x", "a=b", "%2e%2e", " ", "a\0b", "a\nb", "😀", "\\", "a:b*?\"<>|"]
            .into_iter()
            .enumerate()
    {
        let table = format!("t{number}");
        let mut ledger = Ledger::create_with(&server, &table, &[("p", "string")], "[\"p\"]").await;
        let mut producer = Producer::plain(&server, &table).await;
        let id = ledger.id();
        assert!(producer.text(&json!({ "id": id, "p": value }).to_string()).await);
        assert_eq!(producer.until_durable(0).await, [], "{value:?}");
        ledger.owe(&producer.stream, 0, id);
        ledger.good().await;
        ledger.check().await;
    }
    server.end();
}

#[tokio::test]
async fn partition_values_and_names_longer_than_a_file_name_are_stored_and_hold_up_nobody() {
    let server = Server::start(&[]);
    let (long, name) = ("x".repeat(300), "n".repeat(250));
    let cases = [
        ("p", long.as_str()),
        ("p", &"x".repeat(5000)),
        ("p", &"😀".repeat(100)),
        ("p", &"/".repeat(100)),
        (&name, "short"),
        (&name, &long),
    ];
    for (number, (column, value)) in cases.into_iter().enumerate() {
        let table = format!("t{number}");
        let partition = format!("[\"{column}\"]");
        let mut ledger = Ledger::create_with(&server, &table, &[(column, "string")], &partition).await;
        let mut producer = Producer::plain(&server, &table).await;
        let id = ledger.id();
        assert!(producer.text(&json!({ "id": id, column: value }).to_string()).await);
        assert_eq!(producer.until_durable(0).await, [], "{value:.20}");
        ledger.owe(&producer.stream, 0, id);
        ledger.good().await;
        ledger.check().await;
    }
    server.end();
}
