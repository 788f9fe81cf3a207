//! The write-ahead log on the disk that has the build: entries in, up to the flush that makes them durable.
//!
//! *Owns*: one entry for each flush, and as many as the log takes into its groups.
//! *Does not own*: what is in an entry (`lane`).

use bytes::Bytes;
use divan::Bencher;
use divan::counter::{BytesCount, ItemsCount};
use sluice_loadtest::workload::{self, Shape};
use sluice_pod::wal::{Durable, Wal};
use tokio::runtime;

/// Bytes of an entry.
const SIZES: [usize; 3] = [4 << 10, 64 << 10, 1 << 20];
/// Rows that have more bytes than the largest entry.
const ROWS: usize = 1_100;

fn append(bencher: Bencher<'_, '_>, entry_bytes: usize, entries: usize) {
    let directory = crate::directory();
    // As the lanes have it.
    let runtime = runtime::Builder::new_current_thread().build().expect("it needs no thread");
    let wal = crate::pod::open_log(&directory);
    let rows = crate::batches(Shape::Blob, ROWS, ROWS).remove(0);
    let payload = workload::ipc_stream(&rows).expect("the workload has an Arrow form").slice(..entry_bytes);
    bencher
        .counter(BytesCount::new(entries * entry_bytes))
        .counter(ItemsCount::new(entries))
        .bench_local(|| runtime.block_on(append_all(&wal, &payload, entries)));
    runtime.block_on(wal.close());
}

/// Released as soon as they are durable: the log is trimmed as it goes on.
async fn append_all(wal: &Wal, payload: &Bytes, entries: usize) {
    for _ in 0..entries {
        let slot = wal.slot().await;
        wal.append(slot, vec![payload.clone()], Box::new(Durable::release)).expect("smaller than a segment");
    }
    wal.settled().await;
}

/// Each entry waits for its own flush. An item is an entry.
#[divan::bench(args = SIZES, sample_size = 1)]
fn one_by_one(bencher: Bencher<'_, '_>, entry_bytes: usize) {
    append(bencher, entry_bytes, 1);
}

/// 64 entries as fast as the log has slots for them: what waits is flushed as one group. An item is an entry.
#[divan::bench(args = SIZES, sample_size = 1, sample_count = 20)]
fn in_groups(bencher: Bencher<'_, '_>, entry_bytes: usize) {
    append(bencher, entry_bytes, 64);
}
