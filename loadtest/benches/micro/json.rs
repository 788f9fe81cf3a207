//! JSON records to rows.
//!
//! *Owns*: one record and a thousand, up to the rows' arrays.
//! *Does not own*: frames and batches around it (`lane`).

use divan::counter::{BytesCount, ItemsCount};
use divan::{Bencher, black_box};
use sluice_loadtest::workload::{self, Shape};
use sluice_pod::decode::json::JsonDecoder;
use sluice_shared::frame::UnknownFields;

/// Records between two times that the rows are taken out.
const COUNTS: [usize; 2] = [1, 1_000];

fn decode(bencher: Bencher<'_, '_>, shape: Shape, records: usize) {
    let rows = crate::batches(shape, records, records).remove(0);
    let payload = workload::json_lines(&rows).expect("the workload has a JSON form");
    let mut decoder =
        JsonDecoder::new(shape.schema(), crate::RECORD_BYTES_MAX).expect("tables take its types");
    let mut refused = 0;
    bencher.counter(BytesCount::new(payload.len())).counter(ItemsCount::new(records)).bench_local(|| {
        decoder.append(black_box(&payload), UnknownFields::Refuse, &mut |_, _| refused += 1);
        decoder.finish()
    });
    assert_eq!(refused, 0, "records of the workload were refused");
}

/// Of 237 bytes and nine columns.
#[divan::bench(args = COUNTS)]
fn service_events(bencher: Bencher<'_, '_>, records: usize) {
    decode(bencher, Shape::ServiceEvent, records);
}

/// Of 1 KB and four columns.
#[divan::bench(args = COUNTS)]
fn payloads(bencher: Bencher<'_, '_>, records: usize) {
    decode(bencher, Shape::Blob, records);
}
