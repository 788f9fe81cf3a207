//! What stands in the log's entries and beside the tables: batches, watermark maps, stream records.
//!
//! *Owns*: what must hold of what is read there.
//! *Does not own*: the forms themselves (`sluice_pod`).

use std::sync::Arc;

use arrow::array::{ArrayRef, RecordBatch, StringArray, UInt64Array};
use arrow::datatypes::{DataType, Field, Metadata, Schema};
use arrow::ipc::writer::StreamWriter;
use bytes::Bytes;
use sluice_pod::stream::record::StreamRecord;
use sluice_pod::table::batch::{Batch, Reason, ReasonCode, Refusal, Run};
use sluice_pod::table::watermark::{Mark, WatermarkMap};
use sluice_shared::ids::{LogId, OffsetRange, SchemaId, SessionId, StreamId, StreamName, TableId};
use sluice_shared::requests::{Boundary, RequestSpan};
use uuid::Uuid;

use super::draw::Draw;
use super::records::{TABLES, rows_of};

/// A batch, as an entry of the log has it: its header behind a length, then its rows. What is read is written as it was,
/// and cut in halves that hold the same records.
pub(super) fn batch(input: &[u8]) {
    let mut draw = Draw::new(input);
    let header = draw.sized();
    let length = u32::try_from(header.len()).expect("two bytes of length");
    let bytes = [&length.to_le_bytes()[..], header, draw.rest()].concat();
    let Ok(batch) = Batch::decode(bytes.into()) else { return };
    let parts = batch.encode().expect("what was read can be written");
    let again = Batch::decode(parts.concat().into()).expect("own bytes");
    // Arrow has two forms of a timestamp without a zone, and writes one: what was written is the same from then on.
    let parts = again.encode().expect("what was read can be written");
    assert_eq!(
        Batch::decode(parts.concat().into()).expect("own bytes"),
        again,
        "it is written as it was read"
    );
    assert_eq!((&again.runs, again.rows()), (&batch.runs, batch.rows()));
    let (rows, bytes) = (batch.rows(), batch.memory_bytes());
    assert!(bytes >= batch.runs.len(), "{bytes} bytes of {rows} rows");
    let records = |batch: &Batch| batch.runs.iter().map(|run| u128::from(run.offsets.count())).sum::<u128>();
    let all = records(&batch);
    match batch.split() {
        Ok((first, rest)) => {
            assert_eq!((first.rows() + rest.rows(), records(&first) + records(&rest)), (rows, all));
            for half in [first, rest] {
                assert_eq!(half.rows(), half.runs.iter().map(Run::rows).sum::<usize>());
            }
        }
        Err(whole) => assert!(records(&whole) < 2, "{all} records cannot be cut"),
    }
}

/// Batches of each table, with what a run can have besides.
pub(super) fn batch_seeds() -> Vec<Vec<u8>> {
    let of_table = |table: usize| {
        let rows = rows_of(table);
        let batch = made_batch(rows, table);
        let parts = batch.encode().expect("a batch of sound rows");
        let header = &parts[0][4..];
        let length = u16::try_from(header.len()).expect("a short header");
        [&length.to_le_bytes()[..], header, &parts[1]].concat()
    };
    (0..TABLES.len()).map(of_table).collect()
}

fn made_batch(rows: RecordBatch, table: usize) -> Batch {
    let count = rows.num_rows() as u64;
    let reason =
        Reason { code: ReasonCode::WrongType.as_str(), column: Some("n".into()), message: "no".into() };
    let refused =
        vec![Refusal { offset: 10, reason, raw: table.is_multiple_of(2).then(|| b"raw"[..].into()) }];
    let requests = RequestSpan::new(Boundary { offset: 9, requests: 4 }, vec![1, 1]).expect("fits");
    let name: StreamName = "seed".parse().expect("a valid name");
    let run = Run {
        stream: StreamId::named(&name, 0),
        session: SessionId(1),
        offsets: OffsetRange { start: 10, end: 11 + count },
        refused,
        requests: table.is_multiple_of(3).then(|| Box::new(requests)),
    };
    let empty = OffsetRange { start: 3, end: 3 };
    let other =
        Run { session: SessionId(2), offsets: empty, refused: Vec::new(), requests: None, ..run.clone() };
    Batch {
        table: "t".parse().expect("a valid name"),
        table_id: TableId("some-id".into()),
        schema_id: SchemaId(3),
        ingested_at_us: 1_700_000_000_000_000,
        runs: vec![run, other],
        schema: rows.schema(),
        chunks: vec![rows],
    }
}

/// A watermark map as bytes, as rows, or as it is made by commits; a stream's record. What is read is written as it was.
pub(super) fn watermarks(input: &[u8]) {
    let mut draw = Draw::new(input);
    match draw.below(4) {
        0 => check_map(&Bytes::copy_from_slice(draw.rest())),
        1 => check_map(&map_rows(&mut draw)),
        2 => {
            let map = made_map(&mut draw);
            let bytes = map.encode().expect("a map can be written");
            assert_eq!(WatermarkMap::decode(&bytes).expect("own bytes"), map);
        }
        _ => {
            let Ok(record) = serde_json::from_slice::<StreamRecord>(draw.rest()) else { return };
            let bytes = serde_json::to_vec(&record).expect("a record is plain JSON");
            assert_eq!(serde_json::from_slice::<StreamRecord>(&bytes).expect("own bytes"), record);
        }
    }
}

fn check_map(bytes: &Bytes) {
    let Ok(map) = WatermarkMap::decode(bytes) else { return };
    let again = map.encode().expect("what was read can be written");
    assert_eq!(WatermarkMap::decode(&again).expect("own bytes"), map, "a map is written as it was read");
}

fn stream(draw: &mut Draw<'_>) -> StreamId {
    let name: StreamName = ["a", "b", "c"][draw.below(3)].parse().expect("a valid name");
    StreamId::named(&name, 0)
}

/// A map's bytes with any rows.
fn map_rows(draw: &mut Draw<'_>) -> Bytes {
    let has_boundaries = draw.flag();
    let metadata = [
        ("format", if has_boundaries { "2" } else { "1" }),
        ("table_id", "some-id"),
        ("number", "7"),
        ("predecessor", "6"),
        ("nonce", "00000000-0000-0000-0000-000000000009"),
        ("logs", "00000000-0000-0000-0000-000000000007"),
    ];
    let metadata: Metadata =
        metadata.map(|(key, value)| (key.to_owned(), value.to_owned())).into_iter().collect();
    let (mut streams, mut numbers, mut boundaries) =
        (Vec::new(), [Vec::new(), Vec::new(), Vec::new()], Vec::new());
    for _ in 0..draw.below(8) {
        streams.push(stream(draw).as_str().to_owned());
        numbers.iter_mut().for_each(|column| column.push(draw.number()));
        boundaries.push(draw.flag().then(|| (draw.number(), draw.number())));
    }
    let mut columns: Vec<ArrayRef> = vec![Arc::new(StringArray::from(streams))];
    let names = ["stream", "session", "start", "end", "boundary_offset", "boundary_requests"];
    columns.extend(numbers.map(|column| Arc::new(UInt64Array::from(column)) as ArrayRef));
    if has_boundaries {
        let offsets = boundaries.iter().map(|at| at.map(|at| at.0)).collect::<UInt64Array>();
        let requests = boundaries.iter().map(|at| at.map(|at| at.1)).collect::<UInt64Array>();
        columns.extend([Arc::new(offsets) as ArrayRef, Arc::new(requests)]);
    }
    let field = |(place, column): (usize, &ArrayRef)| {
        let data_type = if place == 0 { DataType::Utf8 } else { column.data_type().clone() };
        Field::new(names[place], data_type, place > 3)
    };
    let fields: Vec<Field> = columns.iter().enumerate().map(field).collect();
    let schema = Arc::new(Schema::new_with_metadata(fields, metadata));
    let batch = RecordBatch::try_new(Arc::clone(&schema), columns).expect("columns of one length");
    let mut bytes = Vec::new();
    let mut writer = StreamWriter::try_new(&mut bytes, &schema).expect("a plain schema");
    writer.write(&batch).and_then(|()| writer.finish()).expect("plain columns");
    drop(writer);
    bytes.into()
}

/// A map as commits make one.
fn made_map(draw: &mut Draw<'_>) -> WatermarkMap {
    let mut map = WatermarkMap::empty(TableId("some-id".into()));
    map.logs.extend((0..draw.below(3)).map(|log| LogId(Uuid::from_u128(log as u128))));
    for _ in 0..draw.below(4) {
        let stream = stream(draw);
        let mut mark = Mark::new(SessionId(draw.number() >> 8));
        mark.next = draw.number() >> 8;
        for _ in 0..draw.below(3) {
            let before = OffsetRange { start: mark.start, end: mark.next };
            mark.before.push((mark.session, before));
            (mark.session.0, mark.start) = (mark.session.0 + 1 + draw.below(9) as u64, mark.next);
            mark.next += draw.below(300) as u64;
        }
        mark.boundary = draw.flag().then(|| Boundary { offset: draw.number(), requests: draw.number() });
        map.learn(stream, Some(mark));
    }
    map
}

/// Each form of a map; a record.
pub(super) fn watermark_seeds() -> Vec<Vec<u8>> {
    let map = made_map(&mut Draw::new(&[2, 3, 0, 30, 30, 2, 5, 100, 5, 200, 1, 30, 30, 1, 30, 30, 0, 0]));
    let map = map.encode().expect("a map can be written");
    let record = serde_json::json!({
        "name": "seed", "incarnation": 1, "session": 3, "claim": "00000000-0000-0000-0000-000000000005",
        "past_claims": ["00000000-0000-0000-0000-000000000004"], "encoding": "json", "client": "me",
        "logs": [{"log": "00000000-0000-0000-0000-000000000007", "pod": "pod-1"}], "retired": true,
        "nonce": "00000000-0000-0000-0000-000000000009",
    });
    let rows = [1, 1, 2, 0, 16, 1, 16, 1, 16, 3, 1, 16, 2, 16, 1, 0, 16, 2, 16, 3, 16, 5, 0];
    let bytes = map_rows(&mut Draw::new(&rows[1..]));
    vec![
        [&[0][..], &map].concat(),
        [&[0][..], &bytes].concat(),
        rows.to_vec(),
        vec![2, 2, 3, 0, 16, 30, 16, 30, 2, 5, 100, 5, 200, 1],
        [&[3][..], record.to_string().as_bytes()].concat(),
    ]
}
