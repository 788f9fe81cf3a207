//! Posts of Parquet: read through a file, and sent on as Arrow.

use std::sync::Arc;

use ::arrow::array::{ArrayRef, AsArray, Int64Array, RecordBatch, StringArray};
use ::arrow::datatypes::Int64Type;
use ::arrow::ipc::reader::StreamReader;
use ::parquet::arrow::ArrowWriter;
use ::parquet::file::properties::WriterProperties;
use bytes::Buf;
use sluice_gateway::{Gateway, GatewayConfig};
use sluice_shared::config::ByteSize;
use sluice_shared::proto::Encoding;

use crate::harness::{FakePod, gateway, gateway_with};
use crate::post::{check_error, post};

const PARQUET: &str = "content-type: application/vnd.apache.parquet\r\n";

/// Rows 0, 1, 2, … and a text of `bytes` bytes each, in row groups of 1,000.
fn file(rows: i64, bytes: usize) -> Vec<u8> {
    let ids: ArrayRef = Arc::new(Int64Array::from_iter_values(0..rows));
    let texts: ArrayRef = Arc::new(StringArray::from_iter_values((0..rows).map(|id| pad(id, bytes))));
    let batch = RecordBatch::try_from_iter([("id", ids), ("text", texts)]).expect("fits");
    let properties = WriterProperties::builder().set_max_row_group_row_count(Some(1000)).build();
    let mut bytes = Vec::new();
    let mut writer = ArrowWriter::try_new(&mut bytes, batch.schema(), Some(properties)).expect("a schema");
    writer.write(&batch).expect("writes");
    writer.close().expect("closes");
    bytes
}

fn pad(id: i64, bytes: usize) -> String {
    format!("{id}{}", "x".repeat(bytes))
}

/// The ids of all frames, and the largest payload.
fn taken(pod: &FakePod) -> (Vec<i64>, usize) {
    pod.see(|memory| {
        let (mut ids, mut largest) = (Vec::new(), 0);
        for frame in memory.frames.iter().flatten() {
            largest = largest.max(frame.payload.len());
            let before = ids.len();
            for rows in StreamReader::try_new(frame.payload.clone().reader(), None).expect("a whole stream") {
                ids.extend(rows.expect("rows")["id"].as_primitive::<Int64Type>().values().iter().copied());
            }
            assert_eq!(ids.len() - before, frame.count as usize);
        }
        (ids, largest)
    })
}

async fn small_frames(pod: &FakePod) -> Gateway {
    let change = |config: &mut GatewayConfig| {
        config.frame_bytes_max = ByteSize(64 << 10);
        config.parquet_bytes_max = ByteSize(1 << 20);
    };
    gateway_with(&[pod], change).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_parquet_file_is_its_rows_in_frames_of_a_bounded_size() {
    let pod = FakePod::start("pod-1");
    let gateway = small_frames(&pod).await;
    let (status, answer) = post(&gateway, PARQUET, &file(2500, 200)).await;
    assert_eq!(
        (status, &answer["records"], &answer["durable"]),
        (200, &2500.into(), &2499.into()),
        "{answer}"
    );
    let (ids, largest) = taken(&pod);
    assert_eq!(ids, (0..2500).collect::<Vec<_>>());
    assert!(largest <= 64 << 10, "{largest}");
    pod.see(|memory| assert_eq!(memory.opens[0].encoding(), Encoding::Arrow));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_parquet_file_without_rows_is_no_record() {
    let pod = FakePod::start("pod-1");
    let gateway = gateway(&[&pod]).await;
    let (status, answer) = post(&gateway, PARQUET, &file(0, 1)).await;
    assert_eq!((status, &answer["records"]), (200, &0.into()), "{answer}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_no_parquet_file_is_refused_by_name() {
    let pod = FakePod::start("pod-1");
    let gateway = small_frames(&pod).await;
    let whole = file(100, 10);
    check_error(post(&gateway, PARQUET, b"").await, (400, "invalid_parquet"));
    check_error(post(&gateway, PARQUET, b"{\"id\":1}").await, (400, "invalid_parquet"));
    check_error(post(&gateway, PARQUET, &whole[..whole.len() - 9]).await, (400, "invalid_parquet"));
    // The lengths at its end say more than there is.
    let mut lying = whole.clone();
    let end = lying.len();
    lying[end - 8..end - 4].copy_from_slice(&u32::MAX.to_le_bytes());
    check_error(post(&gateway, PARQUET, &lying).await, (400, "invalid_parquet"));
    check_error(post(&gateway, PARQUET, &file(1, 100 << 10)).await, (400, "record_too_large"));
    check_error(post(&gateway, PARQUET, &vec![0; (1 << 20) + 1]).await, (413, "body_too_large"));
    assert_eq!(taken(&pod).0, Vec::<i64>::new());
    // The rows before a damaged page are in; the answer says which.
    let mut damaged = file(2500, 200);
    let middle = damaged.len() / 2;
    damaged[middle..middle + 64].fill(0xff);
    let (status, answer) = post(&gateway, PARQUET, &damaged).await;
    assert_eq!((status, &answer["error"]["code"]), (400, &"invalid_parquet".into()), "{answer}");
    let (ids, _) = taken(&pod);
    assert_eq!(ids, (0..ids.len() as i64).collect::<Vec<_>>());
    assert_eq!(answer["error"]["offset"], ids.len());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_directory_that_is_not_there_is_named() {
    let pod = FakePod::start("pod-1");
    let gateway = gateway_with(&[&pod], |config| config.scratch_dir = Some("/no/such/place".into())).await;
    check_error(post(&gateway, PARQUET, &file(1, 1)).await, (503, "scratch"));
}
