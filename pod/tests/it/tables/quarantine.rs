//! Refused records of a table that keeps them: each is beside the table once, and the streams go on.

use arrow::array::Array;
use bytes::Bytes;
use sluice_pod::table::batch::Reason;
use sluice_shared::proto::{self, Encoding};

use super::*;
use crate::streams::{Call, ephemeral, rows, start};

const SPEC: &[u8] = br#"{"schema":{"fields":[{"name":"n","type":"int64","nullable":false}]},
    "properties":{"sluice.on_invalid":"quarantine"}}"#;

/// Text columns of the rejected table, row by row.
fn rejected(directory: &Path) -> Vec<(i64, String, Option<String>, Vec<u8>)> {
    let of = |rows: &RecordBatch| {
        let (offsets, raws) = (rows["_offset"].as_primitive::<Int64Type>(), rows["raw"].as_binary::<i32>());
        let (reasons, records) = (rows["reason"].as_string::<i32>(), rows["record"].as_string::<i32>());
        (0..rows.num_rows())
            .map(|row| {
                let record = records.is_valid(row).then(|| records.value(row).to_owned());
                (offsets.value(row), reasons.value(row).to_owned(), record, raws.value(row).to_vec())
            })
            .collect::<Vec<_>>()
    };
    let mut all: Vec<_> = Reader(directory.to_owned()).all().iter().flat_map(of).collect();
    all.sort();
    all
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_record_is_kept_once_whoever_commits_its_run() {
    let root = TempDir::new().expect("a directory");
    let pods = [Pod::new(root.path()), Pod::new(root.path())];
    let tables = [pods[0].create(numbers(), &[]).await, pods[1].create(numbers(), &[]).await];
    let s = stream("s");
    let with_refused = |start: u64, end: u64| {
        let reason = Reason { code: "wrong_type", column: Some("n".to_owned()), message: "no".to_owned() };
        let raw = Some(Bytes::from(format!("{{\"n\":\"{start}\"}}")));
        let refused = vec![Refusal { offset: start, reason, raw }];
        Run { refused, ..run(&s, 1, start, end) }
    };
    // Both logs have the same records: one's gateway has sent them again to the other.
    for (start, end) in [(0, 5), (5, 9), (9, 12)] {
        for (pod, table) in pods.iter().zip(&tables) {
            pod.offer(table, batch(table, vec![with_refused(start, end)])).await;
        }
    }
    for pod in &pods {
        pod.drain().await;
    }
    let directory = root.path().join("main/default/t__rejected");
    let kept: Vec<_> =
        rejected(&directory).into_iter().map(|(offset, _, record, _)| (offset, record)).collect();
    let expected = [0, 5, 9].map(|offset| (offset, Some(format!("{{\"n\":\"{offset}\"}}"))));
    assert_eq!(kept, expected);
    assert_eq!(tables[0].watermark(&s).await.expect("read").next, 12);
    for pod in pods {
        pod.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_of_every_kind_go_on_and_lose_nothing() {
    let data = TempDir::new().expect("a directory");
    let (pod, mut client) = start(data.path()).await;
    let request = proto::CreateTableRequest { table: "t".to_owned(), spec: Bytes::from_static(SPEC) };
    client.create_table(request).await.expect("created");
    // A request that would have to be taken whole is taken in part, since the rest is kept.
    let mut json =
        Call::open(&client, proto::Open { whole_requests: true, ..ephemeral(0) }).await.expect("opens");
    json.send_requests(0..6, &[1, 4], None).await;
    assert_eq!(json.committed(6).await.refused, [1, 4]);
    let avro = proto::Open {
        stream: "~018f0000000070008000000000000003".to_owned(),
        encoding: Encoding::Avro.into(),
        schema: Bytes::from_static(
            br#"{"type":"record","name":"R","fields":[{"name":"n","type":["null","long"]}]}"#,
        ),
        ..ephemeral(0)
    };
    let mut avro = Call::open(&client, avro).await.expect("opens");
    avro.send_payload(0, 3, vec![2, 2, 2, 1, 0, 2, 2, 4]).await;
    assert_eq!(avro.committed(3).await.refused, [1]);
    let arrow = proto::Open {
        stream: "~018f0000000070008000000000000004".to_owned(),
        encoding: Encoding::Arrow.into(),
        ..ephemeral(0)
    };
    let mut arrow = Call::open(&client, arrow).await.expect("opens");
    arrow.send_payload(0, 3, arrow_frame(&[Some(1), None, Some(3)])).await;
    assert_eq!(arrow.committed(3).await.refused, [1]);
    assert_eq!(rows(&client).await, 4 + 2 + 2);
    pod.drain().await;
    let (pod, _) = start(data.path()).await;
    pod.drain().await;
    let kept = rejected(&data.path().join("tables/main/default/t__rejected"));
    let kept_as = |offset, reason: &str, text: Option<&str>, raw: &[u8]| {
        (offset, reason.to_owned(), text.map(str::to_owned), raw.to_vec())
    };
    let bad = "{\"n\":\"x\"}";
    let expected = [
        kept_as(1, "missing_value", None, &[0]),
        kept_as(1, "missing_value", Some("{}"), b"{}"),
        kept_as(1, "wrong_type", Some(bad), bad.as_bytes()),
        kept_as(4, "wrong_type", Some(bad), bad.as_bytes()),
    ];
    assert_eq!(kept, expected);
}

fn arrow_frame(values: &[Option<i64>]) -> Vec<u8> {
    let schema = Arc::new(Schema::new(vec![Field::new("n", DataType::Int64, true)]));
    let column: ArrayRef = Arc::new(Int64Array::from(values.to_vec()));
    let rows = RecordBatch::try_new(schema.clone(), vec![column]).expect("fits");
    let mut bytes = Vec::new();
    let mut writer = arrow::ipc::writer::StreamWriter::try_new(&mut bytes, &schema).expect("a schema");
    writer.write(&rows).and_then(|()| writer.finish()).expect("writes");
    drop(writer);
    bytes
}
