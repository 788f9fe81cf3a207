//! The log as its users see it.

use std::path::Path;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use sluice_pod::wal::{Wal, WalConfig, WalError};
use sluice_shared::ids::{Epoch, WalPosition};
use tempfile::TempDir;

fn config(dir: &Path) -> WalConfig {
    WalConfig {
        segment_bytes: 256 << 10,
        bytes_max: 64 << 20,
        group_bytes_max: 64 << 10,
        ..WalConfig::new(dir.to_owned(), "pod-1".parse().expect("valid"))
    }
}

fn open(config: WalConfig) -> (Wal, Vec<Bytes>) {
    // The log must not fail here: an abort is the only way that a thread of its own can fail the test.
    let on_failure = |error: &WalError| {
        eprintln!("the log failed: {error}");
        std::process::abort();
    };
    let (wal, replay) = Wal::open(config, Box::new(on_failure)).expect("opens");
    let entries = replay.map(|entry| entry.expect("whole").1).collect();
    (wal, entries)
}

/// A log that version 1 wrote: `tests/golden/wal-v1`, also checked byte by byte in `wal/segment.rs`.
#[tokio::test]
async fn a_log_of_version_1_is_read() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/wal-v1");
    let dir = TempDir::new().expect("temporary directory");
    for name in ["identity", "00000000000000000003.wal"] {
        std::fs::copy(golden.join(name), dir.path().join(name)).expect("copied");
    }
    let (wal, entries) = open(config(dir.path()));
    let expected: [&[u8]; 5] =
        [b"first entry", b"", &(0..=255).collect::<Vec<u8>>(), &[7; 5_000], b"last entry"];
    assert_eq!(entries, expected);
    assert_eq!(wal.epoch(), Epoch(3));
    assert_eq!(wal.trimmed(), WalPosition { segment: 3, offset: 0 });
    wal.close().await;
}

const APPENDERS: usize = 64;
const ENTRIES: usize = 60;

/// An entry that names its appender and its place among the appender's entries.
fn entry(appender: usize, n: usize) -> Bytes {
    let mut entry = Vec::from([appender as u8, n as u8]);
    entry.resize(2 + (appender * 131 + n * 977) % 6_000, 0xa5);
    entry.into()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_appenders_see_each_entry_once_in_log_order() {
    for direct_io in [true, false] {
        let dir = TempDir::new().expect("temporary directory");
        let config = WalConfig { direct_io, ..config(dir.path()) };
        let (wal, _) = open(config.clone());
        let told: Arc<Mutex<Vec<(WalPosition, Bytes)>>> = Arc::default();
        let appenders = (0..APPENDERS).map(|appender| {
            let (wal, told) = (wal.clone(), Arc::clone(&told));
            async move {
                for n in 0..ENTRIES {
                    let slot = wal.slot().await;
                    let (told, payload) = (Arc::clone(&told), entry(appender, n));
                    let noted = payload.clone();
                    let then = move |durable: sluice_pod::wal::Durable| {
                        told.lock().expect("sound").push((durable.position(), noted));
                    };
                    wal.append(slot, vec![payload.slice(..2), payload.slice(2..)], Box::new(then))
                        .expect("fits");
                    tokio::task::yield_now().await;
                }
            }
        });
        let scope = sluice_shared::lifecycle::TaskScope::new(sluice_shared::lifecycle::OnPanic::EndTask);
        appenders.for_each(|appender| scope.spawn("appender", appender));
        scope.join(std::time::Duration::from_secs(60)).await.expect("all appended");
        wal.close().await;
        let told = told.lock().expect("sound").clone();
        assert_eq!(told.len(), APPENDERS * ENTRIES, "each then runs once");
        assert!(told.windows(2).all(|pair| pair[0].0 < pair[1].0), "in log order");
        let mut next = [0; APPENDERS];
        for (_, payload) in &told {
            let appender = usize::from(payload[0]);
            assert_eq!(*payload, entry(appender, next[appender]), "an appender's entries keep their order");
            next[appender] += 1;
        }
        let (wal, replayed) = open(config);
        assert!(replayed.iter().eq(told.iter().map(|(_, payload)| payload)), "replay is what was told");
        wal.close().await;
    }
}

#[tokio::test]
async fn dropping_the_last_handle_writes_what_was_appended_and_frees_the_directory() {
    let dir = TempDir::new().expect("temporary directory");
    let (wal, _) = open(config(dir.path()));
    let slot = wal.slot().await;
    let (told, durable) = tokio::sync::oneshot::channel();
    wal.append(
        slot,
        vec![Bytes::from_static(b"last words")],
        Box::new(move |durable| drop(told.send(durable))),
    )
    .expect("fits");
    drop(wal);
    // Not released: a log whose entries all are holds nothing once it is closed.
    drop(durable.await.expect("becomes durable"));
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(30);
    loop {
        let opened = Wal::open(config(dir.path()), Box::new(|error| panic!("the log failed: {error}")));
        match opened {
            Ok((wal, replay)) => {
                let entries: Vec<Bytes> = replay.map(|entry| entry.expect("whole").1).collect();
                assert_eq!(entries, ["last words"]);
                wal.close().await;
                return;
            }
            Err(WalError::Locked { .. }) => assert!(std::time::Instant::now() < deadline, "never freed"),
            Err(error) => panic!("{error}"),
        }
        std::thread::yield_now();
    }
}
