//! Tables through their public API, on real Delta tables. What is read back is read by a reader of the test's
//! own: the log's JSON, version by version, and the Parquet files that it names.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use arrow::array::{
    Array, ArrayRef, AsArray, BinaryArray, BooleanArray, Date32Array, Decimal128Array, Float64Array,
    Int8Array, Int64Array, ListArray, MapBuilder, RecordBatch, StringArray, StringBuilder, StructArray,
    TimestampMicrosecondArray, new_null_array,
};
use arrow::compute::concat_batches;
use arrow::datatypes::{DataType, Field, FieldRef, Int32Type, Int64Type, Schema, SchemaRef, TimeUnit};
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use sluice_pod::pool::Pool;
use sluice_pod::stream::progress::StreamProgress;
use sluice_pod::table::batch::{Batch, Reason, Refusal, Run};
use sluice_pod::table::{Clock, Storage, Stores, Table, Tables, TablesConfig};
use sluice_pod::wal::{Replay, Wal, WalConfig};
use sluice_shared::error::ErrorKind;
use sluice_shared::ids::{OffsetRange, SessionId, StreamId, TableName};
use sluice_shared::lifecycle::{OnPanic, TaskScope};
use sluice_shared::table::TableSpec;
use tempfile::TempDir;

mod create;
mod adopt;
mod forget;
mod held;
mod homes;
mod quarantine;
mod release;

/// How long a test waits for what must happen.
const DEADLINE: Duration = Duration::from_secs(60);

/// Where tables below a directory are kept.
fn kept(root: &Path) -> Storage {
    Storage::at(&Stores::disk(), &root.to_owned().into()).expect("a directory")
}

struct Pod {
    tables: Tables,
    wal: Wal,
    scope: TaskScope,
    root: PathBuf,
    /// Where the pod's log is its own.
    _log: Option<TempDir>,
}

impl Pod {
    fn new(root: &Path) -> Self {
        Self::with(root, |_| {})
    }

    fn with(root: &Path, change: impl FnOnce(&mut TablesConfig)) -> Self {
        let log = TempDir::new().expect("a directory");
        let (mut pod, _) = Self::on_log(root, log.path(), 1 << 20, change);
        pod._log = Some(log);
        pod
    }

    fn on_log(
        root: &Path,
        log: &Path,
        segment_bytes: u64,
        change: impl FnOnce(&mut TablesConfig),
    ) -> (Self, Replay) {
        let wal = WalConfig {
            dir: log.to_owned(),
            owner: "pod-1".parse().expect("valid"),
            segment_bytes,
            bytes_max: 64 << 20,
            group_bytes_max: segment_bytes,
            direct_io: false,
            accept_loss: false,
        };
        let (wal, replay) = Wal::open(wal, Box::new(|_| {})).expect("a whole log");
        (Self::on_wal(root, wal, change), replay)
    }

    fn on_wal(root: &Path, wal: Wal, change: impl FnOnce(&mut TablesConfig)) -> Self {
        let scope = TaskScope::new(OnPanic::EndProcess);
        let mut config = TablesConfig {
            root: root.to_owned().into(),
            pod: "pod-1".parse().expect("valid"),
            pool: Pool::alone("pod-1".parse().expect("valid")),
            flush_interval: Duration::from_millis(2),
            target_file_bytes: 8 << 20,
            memory_bytes: 64 << 20,
            checkpoint_interval: 100,
            ended_kept: Duration::from_secs(3_600),
            clock: Clock::system(),
        };
        change(&mut config);
        let tables = Tables::new(config, wal.clone(), scope.clone()).expect("a new root");
        Self { tables, wal, scope, root: root.to_owned(), _log: None }
    }

    async fn create(&self, columns: Vec<Field>, partition_columns: &[&str]) -> Table {
        let created = self.tables.create(&name(), spec(columns, partition_columns)).await;
        created.expect("created")
    }

    async fn offer(&self, table: &Table, batch: Batch) {
        let payload = batch.encode().expect("encodes");
        let (table, batch) = (table.clone(), Arc::new(batch));
        let (offered, done) = tokio::sync::oneshot::channel();
        let then = Box::new(move |durable| {
            table.offer(durable, batch);
            let _ = offered.send(());
        });
        self.wal.append(self.wal.slot().await, payload, then).expect("small");
        done.await.expect("durable");
    }

    async fn replay(&self, batch: Batch) {
        let (answer, durable) = tokio::sync::oneshot::channel();
        let then = Box::new(move |durable| drop(answer.send(durable)));
        self.wal.append(self.wal.slot().await, batch.encode().expect("encodes"), then).expect("small");
        self.tables.replay(durable.await.expect("durable"), batch).await;
    }

    async fn drain(&self) {
        tokio::time::timeout(DEADLINE, self.tables.drain()).await.expect("drains");
    }

    async fn stop(self) {
        self.scope.cancel();
        self.scope.join(DEADLINE).await.expect("ends");
    }

    fn reader(&self) -> Reader {
        Reader(self.root.join("main/default/t"))
    }
}

fn name() -> TableName {
    "t".parse().expect("valid")
}

fn spec(columns: Vec<Field>, partition_columns: &[&str]) -> TableSpec {
    TableSpec {
        schema: Arc::new(Schema::new(columns)),
        partition_columns: partition_columns.iter().map(|column| (*column).to_owned()).collect(),
        properties: BTreeMap::new(),
    }
}

fn numbers() -> Vec<Field> {
    vec![Field::new("n", DataType::Int64, false)]
}

fn stream(name: &str) -> StreamId {
    StreamId::named(&name.parse().expect("valid"), 1)
}

fn run(stream: &StreamId, session: u64, start: u64, end: u64) -> Run {
    let (stream, session) = (stream.clone(), SessionId(session));
    Run { stream, session, offsets: OffsetRange { start, end }, refused: Vec::new(), requests: None }
}

/// Rows `n` = offset, and nulls in columns that the table has come by.
fn batch(table: &Table, runs: Vec<Run>) -> Batch {
    let offsets = runs.iter().flat_map(|run| {
        let refused: BTreeSet<u64> = run.refused.iter().map(|refusal| refusal.offset).collect();
        (run.offsets.start..run.offsets.end).filter(move |offset| !refused.contains(offset))
    });
    let offsets: ArrayRef = Arc::new(offsets.map(|offset| Some(offset as i64)).collect::<Int64Array>());
    let column = |field: &FieldRef| match field.name().as_str() {
        "n" => Arc::clone(&offsets),
        _ => new_null_array(field.data_type(), offsets.len()),
    };
    let columns = table.schema().fields().iter().map(column).collect();
    batch_of(table, runs, columns)
}

fn batch_of(table: &Table, runs: Vec<Run>, columns: Vec<ArrayRef>) -> Batch {
    let rows = RecordBatch::try_new(table.schema().clone(), columns).expect("fits");
    Batch {
        table: table.name().clone(),
        table_id: table.id().clone(),
        schema_id: table.schema_id(),
        ingested_at_us: 1_700_000_000_000_000,
        runs,
        chunks: if rows.num_rows() == 0 { vec![] } else { vec![rows] },
        schema: table.schema().clone(),
    }
}

/// A path in the log is percent-encoded.
fn decoded(path: &str) -> String {
    let mut parts = path.split('%');
    let mut bytes = parts.next().expect("one").as_bytes().to_vec();
    for part in parts {
        bytes.push(u8::from_str_radix(&part[..2], 16).expect("two digits"));
        bytes.extend_from_slice(&part.as_bytes()[2..]);
    }
    String::from_utf8(bytes).expect("UTF-8")
}

/// Reads a Delta table from its log's JSON.
struct Reader(PathBuf);

impl Reader {
    fn log(&self, version: u64) -> PathBuf {
        self.0.join(format!("_delta_log/{version:020}.json"))
    }

    fn version(&self) -> u64 {
        (0..).take_while(|version| self.log(*version).exists()).last().expect("version 0")
    }

    fn actions(&self, version: u64) -> Vec<serde_json::Value> {
        let text = std::fs::read_to_string(self.log(version)).expect("a version");
        text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
    }

    fn adds(&self, version: u64) -> Vec<serde_json::Value> {
        let adds = self.actions(version).into_iter().filter_map(|mut action| {
            let add = action["add"].take();
            (!add.is_null()).then_some(add)
        });
        adds.collect()
    }

    fn rows(&self, add: &serde_json::Value) -> Vec<RecordBatch> {
        let path = add["path"].as_str().expect("a path");
        let file = File::open(self.0.join(decoded(path))).expect("a data file");
        assert_eq!(file.metadata().expect("size").len(), add["size"].as_u64().expect("size"));
        let rows = ParquetRecordBatchReaderBuilder::try_new(file).expect("Parquet").build().expect("Parquet");
        rows.map(|rows| rows.expect("rows")).collect()
    }

    /// All rows of one version.
    fn all(&self) -> Vec<RecordBatch> {
        (0..=self.version()).flat_map(|version| self.adds(version)).flat_map(|add| self.rows(&add)).collect()
    }

    /// Checks that each version holds a prefix of each stream, each offset once; answers how long they are.
    fn check_prefixes(&self) -> HashMap<String, u64> {
        let mut seen: HashMap<String, BTreeSet<i64>> = HashMap::new();
        for version in 0..=self.version() {
            for add in self.adds(version) {
                for rows in self.rows(&add) {
                    let streams = rows.column_by_name("_stream").expect("_stream").as_string::<i32>();
                    let offsets =
                        rows.column_by_name("_offset").expect("_offset").as_primitive::<Int64Type>();
                    for row in 0..rows.num_rows() {
                        let (stream, offset) = (streams.value(row), offsets.value(row));
                        let is_new = seen.entry(stream.to_owned()).or_default().insert(offset);
                        assert!(is_new, "version {version}: {stream} {offset} twice");
                    }
                }
            }
            for (stream, offsets) in &seen {
                let last = *offsets.last().expect("not empty");
                assert_eq!(offsets.len() as i64, last + 1, "version {version}: {stream} has a gap");
            }
        }
        seen.into_iter().map(|(stream, offsets)| (stream, offsets.len() as u64)).collect()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_offered_can_be_read_and_is_told() {
    let root = TempDir::new().expect("a directory");
    let pod = Pod::new(root.path());
    let table = pod.create(numbers(), &[]).await;
    let (s, progress) = (stream("s"), Arc::new(StreamProgress::default()));
    table.follow(&s, progress.clone());
    let mut second = run(&s, 1, 10, 15);
    let reason = Reason { code: "wrong_type", column: None, message: String::new() };
    second.refused = vec![Refusal { offset: 12, reason, raw: None }];
    pod.offer(&table, batch(&table, vec![run(&s, 1, 0, 10)])).await;
    pod.offer(&table, batch(&table, vec![second])).await;
    while progress.take().committed_next < 15 {
        tokio::time::timeout(DEADLINE, progress.changed()).await.expect("committed");
    }
    let version = progress.take().version;
    assert_eq!(version, pod.reader().version());
    assert_eq!(table.watermark(&s).await.expect("read").next, 15);
    let rows = pod.reader().all();
    let rows = concat_batches(&rows[0].schema(), &rows).expect("one schema");
    let offsets: Vec<i64> = rows["_offset"].as_primitive::<Int64Type>().values().to_vec();
    assert_eq!(offsets, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 13, 14]);
    assert_eq!(rows["n"].as_primitive::<Int64Type>().values().to_vec(), offsets);
    pod.drain().await;
    let described = pod.tables.describe(&name()).await.expect("described");
    assert_eq!((described["rows"].as_u64(), described["held_runs"].as_u64()), (Some(14), Some(0)));
    assert_eq!(pod.tables.list().await.expect("listed"), [name()]);
    pod.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn two_pods_that_replay_the_same_streams_make_prefixes_of_them() {
    for seed in 0..4 {
        println!("seed {seed}");
        let mut random = StdRng::seed_from_u64(seed);
        let root = TempDir::new().expect("a directory");
        let pods = [Pod::new(root.path()), Pod::new(root.path())];
        let mut tables = Vec::new();
        for pod in &pods {
            tables.push(pod.create(numbers(), &[]).await);
        }
        let streams = ["a", "b", "c"].map(stream);
        let mut runs = Vec::new();
        for stream in &streams {
            let mut start: u64 = 0;
            while start < 60 {
                let end = (start + random.random_range(1..10)).min(60);
                runs.push(run(stream, 1, start.saturating_sub(random.random_range(0..4)), end));
                start = end;
            }
        }
        // Each run goes to one pod at least, some to both or twice, in any order.
        let again: Vec<Run> = runs.iter().filter(|_| random.random_bool(0.4)).cloned().collect();
        runs.extend(again);
        runs.shuffle(&mut random);
        for chunk in runs.chunks(3) {
            let which = random.random_range(0..2);
            pods[which].offer(&tables[which], batch(&tables[which], chunk.to_vec())).await;
            if random.random_bool(0.3) {
                tokio::task::yield_now().await;
                pods[which].drain().await;
            }
        }
        for stream in &streams {
            let committed = async {
                while tables[0].watermark(stream).await.expect("read").next < 60 {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
            };
            tokio::time::timeout(DEADLINE, committed).await.expect("all is committed in the end");
        }
        let prefixes = pods[0].reader().check_prefixes();
        assert_eq!(prefixes.len(), 3);
        assert!(prefixes.values().all(|length| *length == 60), "{prefixes:?}");
        for pod in pods {
            pod.drain().await;
            assert_eq!(pod.tables.describe(&name()).await.expect("described")["held_runs"], 0);
            pod.stop().await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_foreign_writer_is_an_ordinary_conflict() {
    let root = TempDir::new().expect("a directory");
    let pod = Pod::new(root.path());
    let table = pod.create(numbers(), &[]).await;
    let (reader, s) = (pod.reader(), stream("s"));
    for round in 0..5 {
        let foreign = "{\"commitInfo\":{\"timestamp\":1,\"operation\":\"WRITE\"}}\n\
                       {\"txn\":{\"appId\":\"spark\",\"version\":5}}\n";
        std::fs::write(reader.log(reader.version() + 1), foreign).expect("written");
        pod.offer(&table, batch(&table, vec![run(&s, 1, round * 10, round * 10 + 10)])).await;
        pod.drain().await;
    }
    assert_eq!(reader.check_prefixes()[s.as_str()], 50);
    assert_eq!(table.watermark(&s).await.expect("read").next, 50);
    pod.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restart_drops_what_is_in_the_table_already() {
    let root = TempDir::new().expect("a directory");
    let s = stream("s");
    let first = Pod::new(root.path());
    let table = first.create(numbers(), &[]).await;
    first.offer(&table, batch(&table, vec![run(&s, 1, 0, 10)])).await;
    first.drain().await;
    first.stop().await;
    let second = Pod::new(root.path());
    second.replay(batch(&table, vec![run(&s, 1, 0, 10)])).await;
    second.replay(batch(&table, vec![run(&s, 1, 5, 20)])).await;
    second.drain().await;
    assert_eq!(second.reader().check_prefixes()[s.as_str()], 20);
    second.stop().await;
}

fn every_type() -> (Vec<Field>, Vec<ArrayRef>) {
    let point = [Field::new("x", DataType::Float64, true), Field::new("tag", DataType::Utf8, true)];
    let points = StructArray::from(vec![
        (
            Arc::new(point[0].clone()),
            Arc::new(Float64Array::from(vec![Some(1.5), None, Some(-0.0)])) as ArrayRef,
        ),
        (Arc::new(point[1].clone()), Arc::new(StringArray::from(vec![None, Some(""), Some("é")]))),
    ]);
    let lists =
        ListArray::from_iter_primitive::<Int32Type, _, _>([Some(vec![Some(1), None]), None, Some(vec![])]);
    let mut maps = MapBuilder::new(None, StringBuilder::new(), StringBuilder::new());
    for row in 0..3 {
        if row > 0 {
            maps.keys().append_value("k");
            maps.values().append_option((row == 1).then_some("v"));
        }
        maps.append(true).expect("balanced");
    }
    let columns: Vec<(&str, ArrayRef)> = vec![
        ("bool", Arc::new(BooleanArray::from(vec![Some(true), None, Some(false)]))),
        ("byte", Arc::new(Int8Array::from(vec![Some(-128), None, Some(127)]))),
        (
            "decimal",
            Arc::new(
                Decimal128Array::from(vec![Some(-12345), None, Some(1)])
                    .with_precision_and_scale(20, 3)
                    .expect("valid"),
            ),
        ),
        ("text", Arc::new(StringArray::from(vec![Some("a"), None, Some("")]))),
        ("binary", Arc::new(BinaryArray::from(vec![Some(&b"\x00\xff"[..]), None, Some(b"")]))),
        ("date", Arc::new(Date32Array::from(vec![Some(0), None, Some(-1)]))),
        ("at", Arc::new(TimestampMicrosecondArray::from(vec![Some(1), None, Some(-1)]).with_timezone("UTC"))),
        ("at_ntz", Arc::new(TimestampMicrosecondArray::from(vec![Some(1), None, Some(-1)]))),
        ("point", Arc::new(points)),
        ("list", Arc::new(lists)),
        ("map", Arc::new(maps.finish())),
    ];
    let fields = columns.iter().map(|(name, column)| Field::new(*name, column.data_type().clone(), true));
    (fields.collect(), columns.into_iter().map(|(_, column)| column).collect())
}

#[tokio::test(flavor = "multi_thread")]
async fn every_type_comes_back_as_it_was() {
    let root = TempDir::new().expect("a directory");
    let pod = Pod::new(root.path());
    let (fields, columns) = every_type();
    let table = pod.create(fields, &[]).await;
    let cast = |(column, field): (&ArrayRef, &Arc<Field>)| arrow::compute::cast(column, field.data_type());
    let columns = columns.iter().zip(table.schema().fields()).map(cast).collect::<Result<Vec<_>, _>>();
    let columns = columns.expect("names of children alone differ");
    pod.offer(&table, batch_of(&table, vec![run(&stream("s"), 1, 0, 3)], columns.clone())).await;
    pod.drain().await;
    let rows = pod.reader().all();
    assert_eq!(rows.len(), 1);
    for (field, column) in table.schema().fields().iter().zip(&columns) {
        let read = rows[0].column_by_name(field.name()).expect("there");
        let read = arrow::compute::cast(read, field.data_type()).expect("same type");
        assert_eq!(read.to_data(), column.to_data(), "{}", field.name());
    }
    let at = rows[0].column_by_name("_ingested_at").expect("there").data_type();
    assert!(matches!(at, DataType::Timestamp(TimeUnit::Microsecond, Some(_))), "{at}");
    let add = &pod.reader().adds(pod.reader().version())[0];
    let stats: serde_json::Value = serde_json::from_str(add["stats"].as_str().expect("stats")).expect("JSON");
    assert_eq!((&stats["numRecords"], &stats["minValues"]["_offset"]), (&3.into(), &0.into()));
    assert_eq!(stats["nullCount"]["text"], 1);
    pod.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_partitioned_table_has_each_row_under_its_values() {
    let root = TempDir::new().expect("a directory");
    let pod = Pod::new(root.path());
    let fields = vec![
        Field::new("n", DataType::Int64, false),
        Field::new("day", DataType::Date32, true),
        Field::new("place", DataType::Utf8, true),
    ];
    let table = pod.create(fields, &["day", "place"]).await;
    let places = [Some("a b/ü=%"), None, Some("x"), Some("a b/ü=%"), Some("x"), None];
    let columns: Vec<ArrayRef> = vec![
        Arc::new(Int64Array::from_iter_values(0..6)),
        Arc::new(Date32Array::from(vec![Some(1), Some(1), None, Some(1), None, Some(2)])),
        Arc::new(StringArray::from(places.to_vec())),
    ];
    pod.offer(&table, batch_of(&table, vec![run(&stream("s"), 1, 0, 6)], columns)).await;
    pod.drain().await;
    let reader = pod.reader();
    let mut seen = BTreeMap::new();
    for add in reader.adds(reader.version()) {
        let values = &add["partitionValues"];
        let key = (values["day"].as_str().map(str::to_owned), values["place"].as_str().map(str::to_owned));
        for rows in reader.rows(&add) {
            assert!(rows.column_by_name("day").is_none(), "partition columns are not in files");
            let numbers = rows["n"].as_primitive::<Int64Type>().values().to_vec();
            seen.entry(key.clone()).or_insert_with(Vec::new).extend(numbers);
        }
    }
    let key = |day: Option<&str>, place: Option<&str>| (day.map(str::to_owned), place.map(str::to_owned));
    let expected = BTreeMap::from([
        (key(Some("1970-01-02"), Some("a b/ü=%")), vec![0, 3]),
        (key(Some("1970-01-02"), None), vec![1]),
        (key(None, Some("x")), vec![2, 4]),
        (key(Some("1970-01-03"), None), vec![5]),
    ]);
    assert_eq!(seen, expected);
    assert_eq!(pod.tables.describe(&name()).await.expect("described")["rows"], 6);
    pod.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_checkpoint_is_enough_to_load_a_table() {
    let root = TempDir::new().expect("a directory");
    let s = stream("s");
    let pod = Pod::with(root.path(), |config| config.checkpoint_interval = 5);
    let table = pod.create(numbers(), &[]).await;
    for round in 0..11 {
        pod.offer(&table, batch(&table, vec![run(&s, 1, round * 2, round * 2 + 2)])).await;
        pod.drain().await;
    }
    let reader = pod.reader();
    assert_eq!(reader.version(), 12);
    pod.stop().await;
    for version in [5, 10] {
        assert!(reader.log(version).with_extension("checkpoint.parquet").exists(), "{version}");
        assert!(reader.log(version).with_extension("crc").exists(), "{version}");
    }
    assert!(reader.log(0).with_extension("crc").exists());
    (0..10).for_each(|version| std::fs::remove_file(reader.log(version)).expect("removed"));
    let fresh = Pod::new(root.path());
    let table = fresh.tables.open(&name()).await.expect("opened");
    assert_eq!(table.watermark(&s).await.expect("read").next, 22);
    assert_eq!(fresh.tables.describe(&name()).await.expect("described")["rows"], 22);
    fresh.stop().await;
}

/// A table with a run in it, and no pod.
async fn filled(root: &Path) -> Reader {
    let pod = Pod::new(root);
    let table = pod.create(numbers(), &[]).await;
    pod.offer(&table, batch(&table, vec![run(&stream("s"), 1, 0, 10)])).await;
    pod.drain().await;
    let reader = pod.reader();
    pod.stop().await;
    reader
}

fn maps(reader: &Reader) -> Vec<PathBuf> {
    let directory = std::fs::read_dir(reader.0.join("_sluice/watermarks")).expect("maps");
    let directory = directory.map(|entry| entry.expect("entry").path()).next().expect("one table id");
    let mut maps: Vec<_> =
        std::fs::read_dir(directory).expect("maps").map(|entry| entry.expect("entry").path()).collect();
    maps.sort();
    maps
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_map_stops_the_table_by_name() {
    let root = TempDir::new().expect("a directory");
    let reader = filled(root.path()).await;
    let last = maps(&reader).pop().expect("a map");
    std::fs::remove_file(&last).expect("removed");
    let pod = Pod::new(root.path());
    let error = pod.tables.open(&name()).await.err().expect("stopped");
    assert_eq!(error.kind, ErrorKind::Internal);
    assert!(error.message.contains("00000000000000000002.arrow"), "{error}");
    std::fs::write(&last, b"garbled").expect("written");
    let error = pod.tables.open(&name()).await.err().expect("stopped");
    assert!(error.message.contains("00000000000000000002.arrow"), "{error}");
    pod.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_transaction_stops_the_table_but_an_orphan_of_the_first_does_not() {
    let root = TempDir::new().expect("a directory");
    let reader = filled(root.path()).await;
    let undo = |version| std::fs::remove_file(reader.log(version)).expect("removed");
    undo(2);
    undo(1);
    let pod = Pod::new(root.path());
    let error = pod.tables.open(&name()).await.err().expect("stopped");
    assert!(error.message.contains("lost its transaction"), "{error}");
    std::fs::remove_file(&maps(&reader)[1]).expect("removed");
    let table = pod.tables.open(&name()).await.expect("the first map holds no stream");
    assert_eq!(table.watermark(&stream("s")).await.expect("read").next, 0);
    assert_eq!(maps(&reader).len(), 2, "a number is never used twice");
    pod.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dropped_table_takes_nothing_and_its_runs_never_enter_a_new_one() {
    let root = TempDir::new().expect("a directory");
    let pod = Pod::new(root.path());
    let table = pod.create(numbers(), &[]).await;
    let (s, progress) = (stream("s"), Arc::new(StreamProgress::default()));
    table.follow(&s, progress.clone());
    std::fs::remove_dir_all(&pod.reader().0).expect("dropped");
    pod.offer(&table, batch(&table, vec![run(&s, 1, 0, 10)])).await;
    while progress.failure().is_none() {
        tokio::time::timeout(DEADLINE, progress.changed()).await.expect("told");
    }
    assert_eq!(progress.failure().expect("told").kind, ErrorKind::NotFound);
    assert!(!pod.reader().0.join("_delta_log").exists());
    pod.drain().await;
    let fresh = pod.create(numbers(), &[]).await;
    assert_ne!(fresh.id(), table.id());
    pod.replay(batch(&table, vec![run(&s, 1, 0, 10)])).await;
    pod.drain().await;
    assert_eq!(pod.tables.stranded(), 2, "what waited for the old one, and what was replayed");
    assert_eq!(fresh.watermark(&s).await.expect("read").next, 0);
    assert!(pod.reader().check_prefixes().is_empty());
    pod.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_table_made_anew_behind_the_pods_back_is_not_written_to() {
    let root = TempDir::new().expect("a directory");
    let (pod, other) = (Pod::new(root.path()), Pod::new(root.path()));
    let table = pod.create(numbers(), &[]).await;
    std::fs::remove_dir_all(&pod.reader().0).expect("dropped");
    let fresh = other.create(numbers(), &[]).await;
    pod.offer(&table, batch(&table, vec![run(&stream("s"), 1, 0, 10)])).await;
    pod.drain().await;
    assert!(pod.reader().check_prefixes().is_empty());
    let error = table.watermark(&stream("s")).await.expect_err("replaced");
    assert_eq!(error.code, "table_replaced");
    assert_eq!(pod.tables.open(&name()).await.expect("opened anew").id(), fresh.id());
    std::fs::remove_dir_all(&pod.reader().0).expect("dropped");
    assert_ne!(pod.create(numbers(), &[]).await.id(), fresh.id());
    pod.stop().await;
    other.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn beyond_the_memory_budget_batches_are_read_back_from_the_log() {
    let root = TempDir::new().expect("a directory");
    let pod = Pod::with(root.path(), |config| config.memory_bytes = 2_000);
    let table = pod.create(numbers(), &[]).await;
    let s = stream("s");
    for round in 0..40 {
        pod.offer(&table, batch(&table, vec![run(&s, 1, round * 100, round * 100 + 100)])).await;
    }
    pod.drain().await;
    assert_eq!(pod.reader().check_prefixes()[s.as_str()], 4_000);
    assert_eq!(pod.tables.memory_bytes(), 0);
    pod.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn records_of_a_fenced_session_are_set_aside() {
    let root = TempDir::new().expect("a directory");
    let pod = Pod::new(root.path());
    let table = pod.create(numbers(), &[]).await;
    let s = stream("s");
    for run in [run(&s, 1, 0, 10), run(&s, 2, 10, 15), run(&s, 1, 5, 13)] {
        pod.offer(&table, batch(&table, vec![run])).await;
        pod.drain().await;
    }
    assert_eq!(pod.reader().check_prefixes()[s.as_str()], 15);
    let rejected = Reader(root.path().join("main/default/t__rejected"));
    let rows = rejected.all();
    assert_eq!(rows.len(), 1);
    assert_eq!(rows[0]["_offset"].as_primitive::<Int64Type>().values().to_vec(), [10, 11, 12]);
    assert_eq!(rows[0]["_session"].as_primitive::<Int64Type>().values().to_vec(), [1, 1, 1]);
    assert_eq!(rows[0]["reason"].as_string::<i32>().value(0), "fenced");
    assert_eq!(rows[0]["record"].as_string::<i32>().value(2), "{\"n\":12}");
    assert_eq!(pod.tables.describe(&name()).await.expect("described")["set_aside_records"], 3);
    pod.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_of_an_older_schema_are_cast_or_set_aside() {
    let root = TempDir::new().expect("a directory");
    let pod = Pod::new(root.path());
    let fields = vec![Field::new("n", DataType::Int64, false), Field::new("new", DataType::Utf8, true)];
    let table = pod.create(fields, &[]).await;
    let s = stream("s");
    let with_schema = |field: Field, column: ArrayRef, run: Run| {
        let schema: SchemaRef = Arc::new(Schema::new(vec![field]));
        let chunk = RecordBatch::try_new(schema.clone(), vec![column]).expect("fits");
        Batch {
            chunks: vec![chunk],
            schema,
            runs: vec![run],
            ..batch_of(&table, vec![], empty_columns(&table))
        }
    };
    let narrow: ArrayRef = Arc::new(Int8Array::from(vec![7, 8]));
    let narrow = with_schema(Field::new("n", DataType::Int8, false), narrow, run(&s, 1, 0, 2));
    let gone: ArrayRef = Arc::new(StringArray::from(vec!["a", "b"]));
    let gone = with_schema(Field::new("gone", DataType::Utf8, false), gone, run(&s, 1, 2, 4));
    pod.offer(&table, narrow).await;
    pod.offer(&table, gone).await;
    pod.drain().await;
    let rows = pod.reader().all();
    assert_eq!(rows.iter().map(RecordBatch::num_rows).sum::<usize>(), 2);
    assert_eq!(rows[0]["n"].as_primitive::<Int64Type>().values().to_vec(), [7, 8]);
    assert_eq!(rows[0]["new"].null_count(), 2);
    assert_eq!(table.watermark(&s).await.expect("read").next, 4, "the mark passes");
    let rejected = Reader(root.path().join("main/default/t__rejected")).all();
    assert_eq!(rejected[0]["reason"].as_string::<i32>().value(1), "schema_changed");
    assert_eq!(rejected[0]["record"].as_string::<i32>().value(1), "{\"gone\":\"b\"}");
    pod.stop().await;
}

fn empty_columns(table: &Table) -> Vec<ArrayRef> {
    table.schema().fields().iter().map(|field| arrow::array::new_empty_array(field.data_type())).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_without_rows_advances_its_stream() {
    let root = TempDir::new().expect("a directory");
    let pod = Pod::new(root.path());
    let table = pod.create(numbers(), &[]).await;
    let mut refused = run(&stream("s"), 1, 0, 2);
    let reason = Reason { code: "not_json", column: None, message: String::new() };
    refused.refused = (0..2).map(|offset| Refusal { offset, reason: reason.clone(), raw: None }).collect();
    pod.offer(&table, batch(&table, vec![refused])).await;
    pod.drain().await;
    assert_eq!(table.watermark(&stream("s")).await.expect("read").next, 2);
    assert!(pod.reader().all().is_empty());
    pod.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_table_is_made_once_and_a_difference_is_named() {
    let root = TempDir::new().expect("a directory");
    let pod = Pod::new(root.path());
    let error = pod.tables.open(&name()).await.err().expect("missing");
    assert_eq!((error.kind, error.code.as_str()), (ErrorKind::NotFound, "table_not_found"));
    assert!(error.message.contains("PUT /v1/tables/main.default.t,"), "{error}");
    let table = pod.create(numbers(), &[]).await;
    assert_eq!(pod.create(numbers(), &[]).await.id(), table.id());
    let check = |columns: Vec<Field>, partitions: &[&str], difference: &str| {
        let (tables, spec) = (pod.tables.clone(), spec(columns, partitions));
        let difference = difference.to_owned();
        async move {
            let error = tables.create(&name(), spec).await.err().expect("another spec");
            assert_eq!((error.kind, error.code.as_str()), (ErrorKind::Invalid, "table_exists"));
            assert!(error.message.contains(&difference), "{error}");
        }
    };
    check(vec![Field::new("n", DataType::Utf8, false)], &[], "`n` is Int64 not null, not `n` is Utf8").await;
    let more = [numbers(), vec![Field::new("m", DataType::Utf8, true)]].concat();
    check(more.clone(), &[], "no column `m`").await;
    check(vec![Field::new("n", DataType::Int64, true)], &[], "`n`").await;
    let mut retention = spec(numbers(), &[]);
    let key = "delta.setTransactionRetentionDuration".to_owned();
    retention.properties.insert(key, "interval 1 day".to_owned());
    let error =
        pod.tables.create(&"forgetful".parse().expect("valid"), retention).await.err().expect("refused");
    assert!(error.message.contains("setTransactionRetentionDuration"), "{error}");
    pod.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_table_with_made_up_directories_names_its_files_where_they_are() {
    let root = TempDir::new().expect("a directory");
    let columns = || vec![Field::new("n", DataType::Int64, false), Field::new("p", DataType::Utf8, true)];
    let first = Pod::new(root.path());
    first.create(columns(), &["p"]).await;
    let reader = first.reader();
    first.stop().await;
    // Sluice makes no such table, but takes those of others.
    let text = std::fs::read_to_string(reader.log(0)).expect("a version");
    let text =
        text.replace(r#""configuration":{"#, r#""configuration":{"delta.randomizeFilePrefixes":"true""#);
    assert!(text.contains("randomizeFilePrefixes"), "{text}");
    std::fs::write(reader.log(0), text).expect("written");
    std::fs::remove_file(reader.0.join(format!("_delta_log/{:020}.crc", 0))).expect("removed");
    let pod = Pod::new(root.path());
    let table = pod.tables.open(&name()).await.expect("opened");
    let places: ArrayRef = Arc::new(StringArray::from(vec!["a", "b", "a"]));
    let columns: Vec<ArrayRef> = vec![Arc::new(Int64Array::from_iter_values(0..3)), places.clone()];
    pod.offer(&table, batch_of(&table, vec![run(&stream("s"), 1, 0, 3)], columns)).await;
    pod.drain().await;
    let rows = pod.reader().all();
    assert_eq!(rows.iter().map(RecordBatch::num_rows).sum::<usize>(), 3);
    // Nothing in the paths tells the values: readers that go by paths find them in the files.
    assert!(rows.iter().all(|rows| rows.column_by_name("p").is_some()));
    pod.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_that_no_partition_takes_are_set_aside_and_hold_up_nobody() {
    let root = TempDir::new().expect("a directory");
    let pod = Pod::new(root.path());
    let fields = vec![
        Field::new("n", DataType::Int64, false),
        Field::new("text", DataType::Utf8, false),
        Field::new("bytes", DataType::Binary, true),
    ];
    let table = pod.create(fields, &["text", "bytes"]).await;
    let bytes: Vec<Option<&[u8]>> =
        vec![Some(b"x"), Some(b"\xff"), Some(b""), None, Some(b"x"), Some(b"x"), Some(b"x")];
    let columns: Vec<ArrayRef> = vec![
        Arc::new(Int64Array::from(vec![0, 1, 2, 3, 4, 6, 7])),
        Arc::new(StringArray::from(vec!["a", "a", "b", "", "", "", "a"])),
        Arc::new(BinaryArray::from(bytes)),
    ];
    let mut with_refused = run(&stream("s"), 1, 0, 7);
    let reason = Reason { code: "not_json", column: None, message: String::new() };
    with_refused.refused = vec![Refusal { offset: 5, reason, raw: None }];
    let runs = vec![with_refused, run(&stream("r"), 1, 0, 1)];
    pod.offer(&table, batch_of(&table, runs, columns)).await;
    pod.drain().await;
    let numbers = |rows: &[RecordBatch]| {
        let offsets =
            rows.iter().flat_map(|rows| rows["_offset"].as_primitive::<Int64Type>().values().to_vec());
        offsets.collect::<BTreeSet<_>>()
    };
    assert_eq!(numbers(&pod.reader().all()), BTreeSet::from([0, 2]));
    assert_eq!(pod.tables.describe(&name()).await.expect("described")["rows"], 3, "`r` 0 too");
    assert_eq!(table.watermark(&stream("s")).await.expect("read").next, 7);
    let rejected = Reader(root.path().join("main/default/t__rejected")).all();
    assert_eq!(numbers(&rejected), BTreeSet::from([1, 3, 4, 6]));
    assert_eq!(rejected[0]["reason"].as_string::<i32>().value(3), "bad_partition_value");
    assert_eq!(rejected[0]["record"].as_string::<i32>().value(3), r#"{"n":6,"text":"","bytes":"78"}"#);
    pod.stop().await;
}

/// Data files in a table's directory, named by a version or not.
fn data_files(table: &Path) -> usize {
    let entries = std::fs::read_dir(table).expect("a directory").map(|entry| entry.expect("an entry").path());
    let count = |path: PathBuf| match path.is_dir() {
        true => data_files(&path),
        false => usize::from(path.extension().is_some_and(|extension| extension == "parquet")),
    };
    entries.map(count).sum()
}

/// Waits for some failed flushes of the table; each names another object.
async fn failed_flushes(pod: &Pod) {
    let mut seen = BTreeSet::new();
    let failing = async {
        while seen.len() < 4 {
            let described = pod.tables.describe(&name()).await.expect("described");
            seen.extend(described["failing"].as_str().map(str::to_owned));
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(DEADLINE, failing).await.expect("flushes fail");
}

#[tokio::test(flavor = "multi_thread")]
async fn while_commits_fail_the_files_stand_and_the_table_says_why() {
    let root = TempDir::new().expect("a directory");
    let pod = Pod::new(root.path());
    let table = pod.create(numbers(), &[]).await;
    let directory = root.path().join("main/default/t");
    let (maps, away) = (directory.join("_sluice"), root.path().join("away"));
    std::fs::rename(&maps, &away).expect("moved");
    std::fs::write(&maps, "in the way").expect("written");
    pod.offer(&table, batch(&table, vec![run(&stream("s"), 1, 0, 10)])).await;
    failed_flushes(&pod).await;
    assert_eq!(data_files(&directory), 1);
    std::fs::remove_file(&maps).expect("removed");
    std::fs::rename(&away, &maps).expect("moved back");
    pod.drain().await;
    assert_eq!(pod.reader().check_prefixes()["s#1"], 10);
    assert_eq!(data_files(&directory), 1);
    let described = pod.tables.describe(&name()).await.expect("described");
    assert!(described["failing"].is_null(), "{described}");
    pod.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn while_files_cannot_be_written_none_pile_up() {
    let root = TempDir::new().expect("a directory");
    let pod = Pod::new(root.path());
    let fields = vec![Field::new("n", DataType::Int64, false), Field::new("p", DataType::Utf8, true)];
    let table = pod.create(fields, &["p"]).await;
    let directory = root.path().join("main/default/t");
    std::fs::write(directory.join("p=b"), "in the way").expect("written");
    let columns: Vec<ArrayRef> = vec![
        Arc::new(Int64Array::from_iter_values(0..6)),
        Arc::new(StringArray::from(vec!["a", "b", "c", "d", "e", "f"])),
    ];
    pod.offer(&table, batch_of(&table, vec![run(&stream("s"), 1, 0, 6)], columns)).await;
    failed_flushes(&pod).await;
    std::fs::remove_file(directory.join("p=b")).expect("removed");
    pod.drain().await;
    assert_eq!(pod.reader().check_prefixes()["s#1"], 6);
    assert_eq!(data_files(&directory), 6);
    pod.stop().await;
}
