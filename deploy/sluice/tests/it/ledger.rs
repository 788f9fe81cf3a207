//! What a table must hold: noted as it is acked, compared with the Parquet files that the table's log names.
//!
//! *Owns*: the rows that are owed, good producers, the comparison.
//! *Does not own*: reading a Delta log (`sluice_loadtest::table`).

use std::collections::BTreeMap;
use std::fs::File;

use ::arrow::array::AsArray;
use ::arrow::compute::cast;
use ::arrow::datatypes::{DataType, Int64Type};
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use sluice_loadtest::table::read_versions;

use crate::server::{Server, until};
use crate::wire::Producer;

/// Records of one good producer.
const GOOD_RECORDS: u64 = 3;

/// Stream and offset, and the value of `id`; None where damage may have changed it.
type Rows = BTreeMap<(String, u64), Option<i64>>;

/// A table and the rows that it owes.
pub(crate) struct Ledger<'a> {
    server: &'a Server,
    pub(crate) table: String,
    next_id: i64,
    rows: Rows,
}

impl<'a> Ledger<'a> {
    /// Of a table that is there, or will be made from its first records.
    pub(crate) fn new(server: &'a Server, table: &str) -> Self {
        Self { server, table: table.to_owned(), next_id: 1, rows: Rows::new() }
    }

    /// Of a table with a column `id` that may not be null, and these ones.
    pub(crate) async fn create(server: &'a Server, table: &str, columns: &[(&str, &str)]) -> Self {
        Self::create_with(server, table, columns, "[]").await
    }

    pub(crate) async fn create_with(
        server: &'a Server,
        table: &str,
        columns: &[(&str, &str)],
        partition_columns: &str,
    ) -> Self {
        let id = r#"{"name":"id","type":"int64","nullable":false}"#.to_owned();
        let others = columns.iter().map(|(name, kind)| format!(r#"{{"name":"{name}","type":"{kind}"}}"#));
        let fields: Vec<String> = std::iter::once(id).chain(others).collect();
        let (fields, partition) = (fields.join(","), partition_columns);
        let spec = format!(r#"{{"schema":{{"fields":[{fields}]}},"partition_columns":{partition}}}"#);
        let (status, body) = server.put(table, &spec).await;
        assert_eq!(status, 201, "{body}");
        Self::new(server, table)
    }

    /// An `id` that no other record has.
    pub(crate) fn id(&mut self) -> i64 {
        self.next_id += 1;
        self.next_id - 1
    }

    /// This record was acked.
    pub(crate) fn owe(&mut self, stream: &str, offset: u64, id: impl Into<Option<i64>>) {
        let before = self.rows.insert((stream.to_owned(), offset), id.into());
        assert_eq!(before, None, "{stream} {offset} was acked before");
    }

    /// Sends a record and waits until it is durable.
    pub(crate) async fn send(&mut self, producer: &mut Producer) {
        let (id, offset) = (self.id(), producer.next_offset);
        assert!(producer.text(&format!("{{\"id\":{id}}}")).await);
        assert_eq!(producer.until_durable(offset).await, []);
        self.owe(&producer.stream, offset, id);
        producer.next_offset += 1;
    }

    /// Sends a record in `sluice.v1` and waits until it is durable.
    pub(crate) async fn send_framed(&mut self, producer: &mut Producer) {
        let (id, offset) = (self.id(), producer.next_offset);
        assert!(producer.records(offset, 1, format!("{{\"id\":{id}}}").as_bytes()).await);
        assert_eq!(producer.until_durable(offset).await, []);
        self.owe(&producer.stream, offset, id);
        producer.next_offset += 1;
    }

    /// A producer that does nothing wrong is served as ever: all in the table, and its close answered.
    pub(crate) async fn good(&mut self) {
        let mut producer = Producer::plain(self.server, &self.table).await;
        for offset in 0..GOOD_RECORDS {
            let id = self.id();
            assert!(producer.text(&format!("{{\"id\":{id}}}")).await);
            self.owe(&producer.stream, offset, id);
        }
        assert_eq!(producer.until_committed(GOOD_RECORDS - 1).await, []);
        producer.socket.close(None).await.expect("closes");
    }

    /// The table has these rows, each once, and no others; in every version each stream is a prefix of itself.
    pub(crate) async fn check(&self) {
        let table = &self.table;
        let owed = self.rows.len() as u64;
        // What is durable is committed soon; lag says that nothing more is on its way.
        let settled = until("the commit of all that is owed", async || {
            let description = self.server.describe(table).await.expect("the table is there");
            (description["rows"].as_u64() >= Some(owed) && description["lag_ms"] == 0).then_some(description)
        });
        let description = settled.await;
        assert_eq!(description["rows"], owed, "{table}: {description}");
        for key in ["held_runs", "set_aside_records", "stranded_entries"] {
            assert_eq!(description[key], 0, "{table}: {description}");
        }
        let root = self.server.table_dir(table);
        let versions = read_versions(&root).expect("a sound table");
        let last = versions.last().expect("at least one version");
        let mut found = Vec::new();
        for file in &last.files {
            let path = percent_decoded(&file.path);
            let file = File::open(root.join(&path)).unwrap_or_else(|error| panic!("{path}: {error}"));
            let reader = ParquetRecordBatchReaderBuilder::try_new(file).and_then(|builder| builder.build());
            for batch in reader.expect("a Parquet file") {
                let batch = batch.expect("rows");
                let column = |name: &str| batch.column_by_name(name).expect("the column");
                let streams = cast(column("_stream"), &DataType::Utf8).expect("text");
                let numbers = |name: &str| column(name).as_primitive::<Int64Type>().values().to_vec();
                let rows = numbers("_offset").into_iter().zip(numbers("id"));
                found.extend(streams.as_string::<i32>().iter().zip(rows).map(|(stream, (offset, id))| {
                    ((stream.expect("a stream").to_owned(), u64::try_from(offset).expect("positive")), id)
                }));
            }
        }
        found.sort();
        let wanted =
            self.rows.iter().zip(&found).map(|((key, id), (_, found))| (key.clone(), id.unwrap_or(*found)));
        let wanted: Vec<_> = wanted.collect();
        assert_eq!(found.len(), self.rows.len(), "{table}: {found:?}, expected {:?}", self.rows);
        assert_eq!(found, wanted, "{table}");
    }
}

fn percent_decoded(path: &str) -> String {
    let mut parts = path.split('%');
    let mut bytes = parts.next().unwrap_or_default().as_bytes().to_vec();
    for part in parts {
        bytes.push(u8::from_str_radix(&part[..2], 16).expect("two digits"));
        bytes.extend_from_slice(&part.as_bytes()[2..]);
    }
    String::from_utf8(bytes).expect("a path of text")
}
