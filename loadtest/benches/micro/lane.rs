//! The lane's work: frames into a sealed batch, and that into a log entry's bytes.
//!
//! *Owns*: frames of one stream, JSON and Arrow, of many records and of one.
//! *Does not own*: how frames come to a lane, when it seals, the log (`log`).

use std::sync::Arc;

use bytes::Bytes;
use divan::counter::{BytesCount, ItemsCount};
use divan::{Bencher, black_box};
use sluice_loadtest::workload::{self, Shape};
use sluice_pod::admission::Admission;
use sluice_pod::decode::json::JsonDecoder;
use sluice_pod::lane::{LaneFrame, Limits, OpenBatch, Sealed};
use sluice_pod::stream::{FrameParts, Opening, Stream};
use sluice_pod::table::Table;
use sluice_shared::frame::{Encoding, UnknownFields};
use sluice_shared::ids::{OffsetRange, SessionId, StreamId};

use crate::pod::Pod;

/// A batch's records: less than makes a lane seal.
const RECORDS: usize = 2_000;
/// Of all frames that are under way: more than those of one batch.
const INGRESS_BYTES: usize = 1 << 30;
const LIMITS: Limits =
    Limits { record_bytes_max: crate::RECORD_BYTES_MAX, row_bytes_max: crate::RECORD_BYTES_MAX };

/// A stream's frames, which can be had again and again.
struct Feed {
    pod: Pod,
    admission: Admission,
    stream: Arc<Stream>,
    payloads: Vec<(OffsetRange, Bytes)>,
}

impl Feed {
    fn new(shape: Shape, encoding: Encoding, frame_records: usize) -> Self {
        let pod = Pod::start(shape);
        let opening = Opening {
            id: StreamId::ephemeral(),
            session: SessionId(1),
            table: pod.table.clone(),
            encoding,
            unknown: UnknownFields::Refuse,
            whole_requests: false,
            described: None,
            has_moved: false,
            released: Vec::new(),
        };
        let stream = Arc::new(Stream::new(opening, 0, INGRESS_BYTES));
        let firsts = (0..).step_by(frame_records);
        let payloads = firsts.zip(crate::batches(shape, RECORDS, frame_records)).map(|(first, rows)| {
            let payload = match encoding {
                Encoding::Arrow => workload::ipc_stream(&rows),
                _ => workload::json_lines(&rows),
            };
            let offsets = OffsetRange::from_count(first, rows.num_rows() as u64).expect("small");
            (offsets, payload.expect("the workload has both forms"))
        });
        let payloads = payloads.collect();
        let admission = Admission::new(crate::pod::id(), pod.wal.clone(), INGRESS_BYTES, None);
        Self { pod, admission, stream, payloads }
    }

    fn bytes(&self) -> usize {
        self.payloads.iter().map(|(_, payload)| payload.len()).sum()
    }

    fn frames(&self) -> Vec<LaneFrame> {
        let frame = |(offsets, payload): &(OffsetRange, Bytes)| {
            let records = u32::try_from(offsets.count()).expect("small");
            let permit = self.pod.runtime.block_on(self.admission.admit(payload.len(), records));
            let parts = FrameParts { payload: payload.clone(), requests: None, permit };
            LaneFrame { stream: Arc::clone(&self.stream), offsets: *offsets, here: 0, parts }
        };
        self.payloads.iter().map(frame).collect()
    }
}

fn gather(table: &Table, frames: Vec<LaneFrame>, json: Option<JsonDecoder>) -> (Sealed, Option<JsonDecoder>) {
    let mut open = OpenBatch::new(table.clone(), json);
    for frame in frames {
        let rest = open.append(frame, LIMITS).expect("its own bytes");
        assert!(rest.is_none(), "the batch was full before its last frame");
    }
    open.seal()
}

fn seal(bencher: Bencher<'_, '_>, shape: Shape, encoding: Encoding, frame_records: usize) {
    let feed = Feed::new(shape, encoding, frame_records);
    let (first, mut json) = gather(&feed.pod.table, feed.frames(), None);
    assert_eq!(first.batch.rows(), RECORDS, "records of the workload were refused");
    drop(first);
    bencher
        .counter(BytesCount::new(feed.bytes()))
        .counter(ItemsCount::new(RECORDS))
        .with_inputs(|| feed.frames())
        .bench_local_values(|frames| {
            let (sealed, decoder) = gather(&feed.pod.table, frames, json.take());
            json = decoder;
            sealed
        });
    feed.pod.end();
}

/// 237 B records, so many a frame.
#[divan::bench(args = [1, 100, 1_000], sample_size = 1)]
fn seal_json(bencher: Bencher<'_, '_>, frame_records: usize) {
    seal(bencher, Shape::ServiceEvent, Encoding::Json, frame_records);
}

/// 1 KB records, so many a frame.
#[divan::bench(args = [1, 100, 1_000], sample_size = 1)]
fn seal_arrow(bencher: Bencher<'_, '_>, frame_records: usize) {
    seal(bencher, Shape::Blob, Encoding::Arrow, frame_records);
}

fn encode(bencher: Bencher<'_, '_>, shape: Shape, encoding: Encoding) {
    let feed = Feed::new(shape, encoding, RECORDS);
    let (sealed, _) = gather(&feed.pod.table, feed.frames(), None);
    let entry = || black_box(&sealed.batch).encode().expect("a batch has its bytes");
    let bytes: usize = entry().iter().map(Bytes::len).sum();
    bencher.counter(BytesCount::new(bytes)).counter(ItemsCount::new(RECORDS)).bench_local(entry);
    drop(sealed);
    feed.pod.end();
}

/// A sealed batch of 237 B records, to the bytes of its log entry.
#[divan::bench]
fn encode_service_events(bencher: Bencher<'_, '_>) {
    encode(bencher, Shape::ServiceEvent, Encoding::Json);
}

/// The same of 1 KB records.
#[divan::bench]
fn encode_payloads(bencher: Bencher<'_, '_>) {
    encode(bencher, Shape::Blob, Encoding::Arrow);
}
