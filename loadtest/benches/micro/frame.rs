//! The frames of `sluice.v1`.
//!
//! *Owns*: frames of records, the count of their lines, and acks, each written and read.
//! *Does not own*: the records in them (`json`).

use bytes::Bytes;
use divan::counter::{BytesCount, ItemsCount};
use divan::{Bencher, black_box};
use sluice_loadtest::workload::{self, Shape};
use sluice_shared::frame::{Ack, GatewayFrame, ProducerFrame, count_lines};

/// Records of a frame.
const COUNTS: [usize; 3] = [1, 100, 1_000];
const FIRST_OFFSET: u64 = 1 << 33;

fn payload(records: usize) -> Bytes {
    let rows = crate::batches(Shape::ServiceEvent, records, records).remove(0);
    workload::json_lines(&rows).expect("the workload has a JSON form")
}

fn records(count: usize) -> ProducerFrame {
    let payload = payload(count);
    ProducerFrame::Records {
        first_offset: FIRST_OFFSET,
        count: u32::try_from(count).expect("small"),
        payload,
    }
}

fn ack() -> GatewayFrame {
    let (durable, committed) = (Some(FIRST_OFFSET + 999), Some(FIRST_OFFSET));
    GatewayFrame::Ack(Ack { durable, committed, version: Some(40_000) })
}

/// Copies the payload behind its header.
#[divan::bench(args = COUNTS)]
fn encode_records(bencher: Bencher<'_, '_>, count: usize) {
    let frame = records(count);
    let bytes = BytesCount::new(frame.encode().len());
    bencher.counter(bytes).counter(ItemsCount::new(count)).bench_local(|| black_box(&frame).encode());
}

/// Shares the payload: as long for any frame. An item is a frame.
#[divan::bench(args = COUNTS)]
fn decode_records(bencher: Bencher<'_, '_>, count: usize) {
    let frame = records(count);
    let bytes = frame.encode();
    assert_eq!(ProducerFrame::decode(bytes.clone()).expect("its own bytes"), frame);
    bencher
        .counter(ItemsCount::new(1_u32))
        .bench_local(|| ProducerFrame::decode(black_box(&bytes).clone()).expect("its own bytes"));
}

/// What the lane does with every JSON payload before it is parsed.
#[divan::bench(args = COUNTS)]
fn count_json_lines(bencher: Bencher<'_, '_>, count: usize) {
    let payload = payload(count);
    assert_eq!(count_lines(&payload), count);
    bencher
        .counter(BytesCount::new(payload.len()))
        .counter(ItemsCount::new(count))
        .bench_local(|| count_lines(black_box(&payload)));
}

/// An item is an ack.
#[divan::bench]
fn encode_ack(bencher: Bencher<'_, '_>) {
    let ack = ack();
    bencher.counter(ItemsCount::new(1_u32)).bench_local(|| black_box(&ack).encode());
}

/// An item is an ack.
#[divan::bench]
fn decode_ack(bencher: Bencher<'_, '_>) {
    let (ack, bytes) = (ack(), ack().encode());
    assert_eq!(GatewayFrame::decode(&bytes).expect("its own bytes"), ack);
    bencher
        .counter(ItemsCount::new(1_u32))
        .bench_local(|| GatewayFrame::decode(black_box(&bytes)).expect("its own bytes"));
}
