//! Rows to Parquet files, as a flush of a table makes them: rows are cut out of their batches, get the system columns, and are
//! encoded with statistics; not stored.
//!
//! *Owns*: what a flush holds.
//! *Does not own*: the store, the commit.

use std::sync::Arc;
use std::sync::mpsc::sync_channel;

use divan::Bencher;
use divan::counter::{BytesCount, ItemsCount};
use sluice_loadtest::workload;
use sluice_pod::table::Table;
use sluice_pod::table::batch::{Batch, Run};
use sluice_pod::table::delta::{Delta, Shape};
use sluice_pod::table::parquet::{Piece, Source, encode};
use sluice_shared::ids::{OffsetRange, SessionId, StreamId};

use crate::pod::Pod;

/// Rows of one batch.
const BATCH_ROWS: usize = 1_000;

/// Of one stream, all rows of each batch.
fn sources(table: &Table, shape: workload::Shape, rows: usize) -> Vec<Source> {
    let stream = StreamId::ephemeral();
    let firsts = (0..).step_by(BATCH_ROWS);
    let source = |(from, chunk): (u64, arrow::array::RecordBatch)| {
        let offsets = OffsetRange::from_count(from, chunk.num_rows() as u64).expect("small");
        let (stream, session) = (stream.clone(), SessionId(1));
        let batch = Batch {
            table: table.name().clone(),
            table_id: table.id().clone(),
            schema_id: table.schema_id(),
            ingested_at_us: 1_767_225_600_000_000,
            runs: vec![Run { stream, session, offsets, refused: Vec::new(), requests: None }],
            chunks: vec![chunk],
            schema: table.schema().clone(),
        };
        Source { batch: Arc::new(batch), pieces: vec![Piece { run: 0, from }] }
    };
    firsts.zip(crate::batches(shape, rows, BATCH_ROWS)).map(source).collect()
}

fn shape_of(pod: &Pod) -> Arc<Shape> {
    let (store, directory) = pod.table.store();
    let version = pod.runtime.block_on(async { Delta::new(store).load(&directory).await });
    version.expect("just made").shape
}

/// Bytes are those of the rows in memory.
fn flush(bencher: Bencher<'_, '_>, shape: workload::Shape, rows: usize) {
    let pod = Pod::start(shape);
    let (sources, shape) = (sources(&pod.table, shape, rows), shape_of(&pod));
    let bytes: usize = sources.iter().map(|source| source.batch.memory_bytes()).sum();
    let (ask, asked) = sync_channel(0);
    let (answer, answered) = sync_channel(0);
    std::thread::scope(|scope| {
        // A thread that encodes gives way to all others from then on: what is measured next must not.
        scope.spawn(move || {
            while asked.recv().is_ok()
                && answer.send(encode(&shape, &sources).expect("rows of this table")).is_ok()
            {}
        });
        bencher.counter(BytesCount::new(bytes)).counter(ItemsCount::new(rows)).bench_local(|| {
            ask.send(()).expect("it waits");
            answered.recv().expect("it answers")
        });
        drop(ask);
    });
    pod.end();
}

/// Of nine columns.
#[divan::bench(args = [1_000, 10_000, 100_000], sample_size = 1, sample_count = 20)]
fn service_events(bencher: Bencher<'_, '_>, rows: usize) {
    flush(bencher, workload::Shape::ServiceEvent, rows);
}

/// Of 1 KB.
#[divan::bench(args = [10_000], sample_size = 1, sample_count = 20)]
fn payloads(bencher: Bencher<'_, '_>, rows: usize) {
    flush(bencher, workload::Shape::Blob, rows);
}
