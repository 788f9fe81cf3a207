//! Arrow IPC that does not fit its table, is cut, or damaged: taken as valid, or refused by name; never the end.

use std::sync::Arc;

use ::arrow::array::{
    Array, ArrayRef, DictionaryArray, Int64Array, RecordBatch, StringArray, Time64MicrosecondArray,
};
use ::arrow::datatypes::{DataType, Field, Int32Type, Schema, TimeUnit};
use ::arrow::ipc::CompressionType;
use ::arrow::ipc::writer::{IpcWriteOptions, StreamWriter};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use crate::ledger::Ledger;
use crate::server::Server;
use crate::wire::Producer;

const COLUMNS: [(&str, &str); 4] = [("n", "int32"), ("s", "string"), ("w", "string"), ("l", "list<int64>")];

fn batch(columns: Vec<(&str, ArrayRef)>) -> RecordBatch {
    let fields = columns.iter().map(|(name, array)| Field::new(*name, array.data_type().clone(), true));
    let schema = Schema::new(fields.collect::<Vec<_>>());
    RecordBatch::try_new(Arc::new(schema), columns.into_iter().map(|(_, array)| array).collect())
        .expect("fits")
}

pub(crate) fn ipc(batch: &RecordBatch, compression: Option<CompressionType>) -> Vec<u8> {
    let options = IpcWriteOptions::default().try_with_compression(compression).expect("a known codec");
    let mut writer =
        StreamWriter::try_new_with_options(Vec::new(), &batch.schema(), options).expect("a schema");
    writer.write(batch).expect("fits");
    writer.into_inner().expect("written")
}

/// A stream of one column without rows.
pub(crate) fn schema_of(name: &str, kind: &str) -> Vec<u8> {
    let data_type = match kind {
        "time64" => DataType::Time64(TimeUnit::Microsecond),
        _ => DataType::Int64,
    };
    let schema = Arc::new(Schema::new(vec![Field::new(name, data_type, true)]));
    ipc(&RecordBatch::new_empty(schema), None)
}

pub(crate) fn ids(ids: &[i64]) -> RecordBatch {
    batch(vec![("id", Arc::new(Int64Array::from(ids.to_vec())))])
}

/// Rows with all kinds of buffers in them.
fn sample(ids: &[i64]) -> RecordBatch {
    let texts: StringArray = ids.iter().map(|id| (id % 3 > 0).then(|| id.to_string())).collect();
    let words: DictionaryArray<Int32Type> =
        ids.iter().map(|id| Some(if id % 2 > 0 { "odd" } else { "even" })).collect();
    let numbers: Int64Array = ids.iter().map(|id| (id % 5 > 0).then_some(id % 100)).collect();
    let lists = ids.iter().map(|id| (id % 4 > 0).then(|| vec![Some(*id), None]));
    let lists = ::arrow::array::ListArray::from_iter_primitive::<::arrow::datatypes::Int64Type, _, _>(lists);
    batch(vec![
        ("id", Arc::new(Int64Array::from(ids.to_vec()))),
        ("n", Arc::new(numbers)),
        ("s", Arc::new(texts)),
        ("w", Arc::new(words)),
        ("l", Arc::new(lists)),
    ])
}

/// A frame that cannot be taken, after one that was: by this code and column, at its offset.
async fn check(
    server: &Server,
    ledger: &mut Ledger<'_>,
    payload: &[u8],
    count: u32,
    expected: (&str, Option<&str>),
) {
    let mut producer = Producer::arrow(server, &ledger.table).await;
    let id = ledger.id();
    assert!(producer.records(0, 1, &ipc(&ids(&[id]), None)).await);
    assert_eq!(producer.until_durable(0).await, []);
    ledger.owe(&producer.stream, 0, id);
    producer.records(1, count, payload).await;
    let (error, close) = producer.refusal().await;
    assert_eq!((error.code.as_str(), error.column.as_deref()), expected, "{error:.300}");
    assert_eq!((close, error.offset), (1008, Some(1)), "{error:.300}");
    ledger.good().await;
}

#[tokio::test]
async fn arrow_that_does_not_fit_its_table_is_refused_by_column() {
    let server = Server::start(&[]);
    let mut ledger = Ledger::create(&server, "t", &COLUMNS).await;
    let numbers = || Arc::new(Int64Array::from(vec![999, 999])) as ArrayRef;
    let texts = || Arc::new(StringArray::from(vec!["x", "y"])) as ArrayRef;
    let times = || Arc::new(Time64MicrosecondArray::from(vec![1, 2])) as ArrayRef;
    let (long, faces) = ("n".repeat(1 << 20), "😀".repeat(2000));
    let frame = |columns| ipc(&batch(columns), None);
    for (payload, count, code, column) in [
        (frame(vec![("id", texts())]), 2, "schema_mismatch", Some("id")),
        (frame(vec![("n", numbers())]), 2, "missing_column", Some("id")),
        (frame(vec![("id", numbers()), ("id", numbers())]), 2, "schema_mismatch", Some("id")),
        (frame(vec![("id", numbers()), ("s", numbers())]), 2, "schema_mismatch", Some("s")),
        (frame(vec![("id", numbers()), ("x", numbers())]), 2, "unknown_field", Some("x")),
        (frame(vec![("id", numbers()), ("_offset", numbers())]), 2, "unknown_field", Some("_offset")),
        (frame(vec![("id", numbers()), ("x", times())]), 2, "unsupported_type", Some("x")),
        (frame(vec![("id", numbers())]), 3, "count_mismatch", None),
        (frame(vec![("id", numbers())]), 1, "count_mismatch", None),
        (frame(vec![("id", numbers())]), u32::MAX, "count_mismatch", None),
        (vec![], 1, "invalid_arrow", None),
        (b"{\"id\":999}".to_vec(), 1, "invalid_arrow", None),
        (b"ARROW1\0\0".to_vec(), 1, "invalid_arrow", None),
        (vec![0xff; 64], 1, "invalid_arrow", None),
        (vec![0; 64], 1, "invalid_arrow", None),
    ] {
        check(&server, &mut ledger, &payload, count, (code, column)).await;
    }
    for name in [&long, &faces] {
        let shown: String = name.chars().take(3).collect();
        for (column, code) in [(numbers(), "unknown_field"), (times(), "unsupported_type")] {
            let mut producer = Producer::arrow(&server, "t").await;
            producer.records(0, 2, &frame(vec![("id", numbers()), (name, column)])).await;
            let (error, close) = producer.refusal().await;
            assert_eq!((error.code.as_str(), close), (code, 1008), "{error:.300}");
            assert!(error.column.is_some_and(|column| column.starts_with(&shown) && column.len() < 2000));
            ledger.good().await;
        }
    }
    ledger.check().await;
    server.end();
}

#[tokio::test]
async fn arrow_rows_that_do_not_fit_are_refused_one_by_one() {
    let server = Server::start(&[]);
    let mut ledger = Ledger::create(&server, "t", &COLUMNS).await;
    let mut producer = Producer::arrow(&server, "t").await;
    let first = ledger.id();
    let ids = Int64Array::from(vec![Some(first), None, Some(999), None]);
    let numbers = Int64Array::from(vec![Some(1), Some(2), Some(1 << 40), Some(1 << 40)]);
    let payload = ipc(&batch(vec![("id", Arc::new(ids)), ("n", Arc::new(numbers))]), None);
    assert!(producer.records(0, 4, &payload).await);
    let refused = producer.until_durable(3).await;
    let named: Vec<_> = refused.iter().map(|r| (r.offset, r.code.as_str(), r.column.as_deref())).collect();
    let expected =
        [(1, "missing_value", Some("id")), (2, "out_of_range", Some("n")), (3, "missing_value", Some("id"))];
    assert_eq!(named, expected);
    ledger.owe(&producer.stream, 0, first);
    drop(producer);
    ledger.good().await;
    ledger.check().await;
    server.end();
}

/// Sends a frame of damaged Arrow: its rows are owed where it was taken, all or less those refused by name.
async fn taken_or_refused(server: &Server, ledger: &mut Ledger<'_>, payload: &[u8], count: u32) -> bool {
    let mut producer = Producer::arrow(server, &ledger.table).await;
    producer.records(0, count, payload).await;
    match producer.outcome(u64::from(count) - 1).await {
        Ok(refused) => {
            let refused: Vec<u64> = refused.iter().map(|refused| refused.offset).collect();
            for offset in (0..u64::from(count)).filter(|offset| !refused.contains(offset)) {
                ledger.owe(&producer.stream, offset, None);
            }
            true
        }
        Err((error, close)) => {
            let codes = [
                "invalid_arrow",
                "count_mismatch",
                "schema_mismatch",
                "missing_column",
                "unknown_field",
                "unsupported_type",
                "decoded_too_large",
            ];
            assert!(codes.contains(&error.code.as_str()), "{error:?}");
            assert_eq!((close, error.offset), (1008, Some(0)), "{error:?}");
            false
        }
    }
}

#[tokio::test]
async fn arrow_that_is_cut_anywhere_is_refused() {
    const ROWS: u32 = 20;
    let server = Server::start(&[]);
    let mut ledger = Ledger::create(&server, "t", &COLUMNS).await;
    for codec in [None, Some(CompressionType::LZ4_FRAME), Some(CompressionType::ZSTD)] {
        let numbers: Vec<i64> = (0..ROWS).map(|_| ledger.id()).collect();
        let whole = ipc(&sample(&numbers), codec);
        // The last eight bytes are the end mark, which may be missing.
        for cut in (0..whole.len() - 8).step_by(31) {
            let taken = taken_or_refused(&server, &mut ledger, &whole[..cut], ROWS).await;
            assert!(!taken, "taken though cut at {cut} of {}", whole.len());
        }
        assert!(taken_or_refused(&server, &mut ledger, &whole[..whole.len() - 8], ROWS).await);
        ledger.good().await;
    }
    ledger.check().await;
    server.expect_no_stream().await;
    server.end();
}

#[tokio::test]
async fn arrow_with_flipped_bits_is_taken_or_refused_and_never_the_end() {
    const ROWS: u32 = 20;
    const FLIPS: usize = 400;
    const SEED: u64 = 20_261_129;
    println!("seed {SEED}");
    let server = Server::start(&[]);
    let mut ledger = Ledger::create(&server, "t", &COLUMNS).await;
    let mut random = StdRng::seed_from_u64(SEED);
    let (mut taken, mut refused) = (0, 0);
    for number in 0..FLIPS {
        let codec = [None, Some(CompressionType::LZ4_FRAME), Some(CompressionType::ZSTD)][number % 3];
        let numbers: Vec<i64> = (0..ROWS).map(|_| ledger.id()).collect();
        let mut payload = ipc(&sample(&numbers), codec);
        for _ in 0..random.random_range(1..4) {
            let place = random.random_range(0..payload.len());
            payload[place] ^= 1 << random.random_range(0..8);
        }
        match taken_or_refused(&server, &mut ledger, &payload, ROWS).await {
            true => taken += 1,
            false => refused += 1,
        }
        if number % 40 == 0 {
            ledger.good().await;
        }
    }
    println!("{taken} taken, {refused} refused");
    assert!(taken > 20 && refused > 20, "flips in all places: {taken} taken, {refused} refused");
    ledger.good().await;
    ledger.check().await;
    server.expect_no_stream().await;
    server.end();
}
