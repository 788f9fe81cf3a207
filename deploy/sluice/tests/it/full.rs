//! A log that is full while its tables cannot commit: new streams are told `Busy`, open ones wait; then all goes on.

use std::cell::Cell;
use std::path::PathBuf;
use std::time::Duration;

use futures_util::SinkExt;
use serde_json::json;
use sluice_shared::error::ErrorKind;
use sluice_shared::frame::GatewayFrame;
use tokio_tungstenite::tungstenite::Message;

use crate::ledger::Ledger;
use crate::server::{Server, until};
use crate::wire::{Heard, Producer};

/// A log of four segments of 2 MiB.
const SMALL: [(&str, &str); 4] = [
    ("SLUICE_POD__RECORD_BYTES_MAX", "256KiB"),
    ("SLUICE_POD__SEGMENT_BYTES", "2MiB"),
    ("SLUICE_POD__WAL_BYTES_MAX", "8MiB"),
    ("SLUICE_GATEWAY__WINDOW_BYTES", "1MiB"),
];
const RECORD_BYTES: usize = 32 << 10;
/// More than log, lanes, windows and the kernel's buffers take together.
const RECORDS: u64 = 1000;

/// Keeps a table from committing: where its watermark maps go there is a file.
struct Jam {
    maps: PathBuf,
    aside: PathBuf,
}

impl Jam {
    fn new(server: &Server, table: &str) -> Self {
        let maps = server.table_dir(table).join("_sluice/watermarks");
        let aside = maps.with_extension("aside");
        std::fs::rename(&maps, &aside).expect("moves");
        std::fs::write(&maps, b"").expect("writes");
        Self { maps, aside }
    }

    fn undo(self) {
        std::fs::remove_file(&self.maps).expect("removes");
        std::fs::rename(&self.aside, &self.maps).expect("moves back");
    }
}

/// Opens a stream; None where the log is full, which it says by name.
async fn open(server: &Server, table: &str) -> Option<Producer> {
    let mut producer = Producer::connect(server, &format!("{table}/stream"), true).await;
    producer.frame(0x01, b"{}").await;
    match producer.hear().await {
        Heard::Frame(GatewayFrame::Opened(opened)) => {
            producer.stream = opened.stream.as_str().to_owned();
            Some(producer)
        }
        Heard::Frame(GatewayFrame::Error(error)) => {
            assert_eq!((error.kind, error.code.as_str()), (ErrorKind::Busy, "wal_full"), "{error}");
            assert!(error.retryable && error.retry_after_ms >= Some(1000), "{error:?}");
            assert!(matches!(producer.hear().await, Heard::Close(1013)));
            None
        }
        other => panic!("expected opened or busy, heard {other:?}"),
    }
}

fn record(id: i64) -> String {
    format!("{{\"id\":{id},\"s\":\"{}\"}}", "x".repeat(RECORD_BYTES))
}

#[tokio::test]
async fn a_full_log_refuses_new_streams_slows_open_ones_and_recovers() {
    let server = Server::start(&SMALL);
    let mut ledger = Ledger::create(&server, "t", &[("s", "string")]).await;
    let mut other = Ledger::create(&server, "other", &[]).await;
    ledger.good().await;
    other.good().await;
    let jam = Jam::new(&server, "t");
    let mut producer = Producer::framed(&server, "t", json!({})).await;
    let ids: Vec<i64> = (0..RECORDS).map(|_| ledger.id()).collect();
    let sent = Cell::new(0);
    let send = async {
        // The gateway stops reading while the log is full, so this takes until there is room again.
        for (offset, id) in (0..).zip(&ids) {
            let mut payload = vec![0x02];
            payload.extend(u64::to_be_bytes(offset));
            payload.extend(1_u32.to_be_bytes());
            payload.extend(record(*id).as_bytes());
            producer.socket.send(Message::binary(payload)).await.expect("no error while it is slowed");
            sent.set(offset + 1);
        }
    };
    let watch = async {
        until("a full log", async || open(&server, "other").await.is_none().then_some(())).await;
        // Of all tables, since the log is the pod's; and told again to whoever tries again.
        assert!(open(&server, "t").await.is_none());
        let described = server.describe("other").await.expect("tables can still be read");
        assert_eq!(described["rows"], 3);
        assert!(sent.get() < RECORDS, "the open stream was not slowed");
        jam.undo();
        until("room in the log", async || open(&server, "other").await.map(|_| ())).await;
    };
    tokio::join!(send, watch);
    assert_eq!(producer.until_committed(RECORDS - 1).await, []);
    for (offset, id) in (0..).zip(ids) {
        ledger.owe(&producer.stream, offset, id);
    }
    assert!(producer.hear_within(Duration::ZERO).await.is_none(), "nothing more is said");
    producer.frame(0x03, b"{\"when\":\"committed\"}").await;
    assert!(matches!(producer.hear().await, Heard::Close(1000)));
    drop(producer);
    ledger.good().await;
    other.good().await;
    ledger.check().await;
    other.check().await;
    server.expect_no_stream().await;
    server.end();
}
