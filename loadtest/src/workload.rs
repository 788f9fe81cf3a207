//! What producers send: records that look like real ones, the same for the same seed.
//!
//! *Owns*: the shapes of records, their encodings, the hash by which a record is known again.
//! *Does not own*: when records are sent. A core: randomness comes from the caller.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use anyhow::Context;
use arrow::array::{
    Array, ArrayRef, AsArray, Float64Array, Int64Array, ListArray, RecordBatch, StringArray, StructArray,
    TimestampMicrosecondArray,
};
use arrow::buffer::OffsetBuffer;
use arrow::compute::cast;
use arrow::datatypes::{
    DataType, Field, Fields, Float64Type, Int64Type, Schema, SchemaRef, TimeUnit, TimestampMicrosecondType,
};
use arrow::ipc::writer::StreamWriter;
use arrow::util::display::{ArrayFormatter, FormatOptions};
use bytes::Bytes;
use prost::{Message as _, encoding};
use prost_types::field_descriptor_proto::{Label, Type};
use prost_types::{DescriptorProto, FieldDescriptorProto};
use rand::rngs::StdRng;
use rand::{Rng, RngExt};
use serde::Deserialize;

/// 2026-01-01T00:00:00Z, from which the records' own time counts.
const EPOCH_US: i64 = 1_767_225_600_000_000;
/// Text of a blob.
const BLOB_BYTES: usize = 1024;

const SERVICES: [&str; 8] =
    ["checkout", "search", "catalog", "identity", "payments", "shipping", "recommend", "gateway"];
const ENDPOINTS: [&str; 6] =
    ["/v1/orders", "/v1/orders/items", "/v1/users/profile", "/v2/search", "/v1/cart/checkout", "/health"];
const REGIONS: [&str; 5] = ["eu-central-1", "us-east-1", "us-west-2", "ap-south-1", "sa-east-1"];
const WORDS: [&str; 12] = [
    "request",
    "accepted",
    "retry",
    "upstream",
    "timeout",
    "latency",
    "cache",
    "miss",
    "token",
    "refreshed",
    "queue",
    "drained",
];

const METRICS: [&str; 4] = ["temperature", "humidity", "pressure", "vibration"];
const WIDE_COLUMNS: usize = 500;

/// What a record looks like.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Shape {
    /// Nine columns, about 250 bytes as JSON.
    ServiceEvent,
    /// Four columns, about 1 KB of it text that compresses by half.
    #[serde(rename = "payload")]
    Blob,
    /// Four columns, about 100 bytes as JSON.
    Sensor,
    /// 500 columns, about 10 KB as JSON.
    Wide,
    /// Structs, a list of structs and a list of texts, about 400 bytes as JSON.
    Nested,
}

impl Shape {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::ServiceEvent, Self::Blob, Self::Sensor, Self::Wide, Self::Nested];

    /// A record's length as JSON, roughly.
    pub(crate) fn about_bytes(self) -> usize {
        match self {
            Self::ServiceEvent => 240,
            Self::Blob => 1_100,
            Self::Sensor => 100,
            Self::Wide => 10_000,
            Self::Nested => 400,
        }
    }

    /// The columns.
    pub fn schema(self) -> SchemaRef {
        let utc = DataType::Timestamp(TimeUnit::Microsecond, Some("UTC".into()));
        let columns: &[(&str, DataType)] = match self {
            Self::ServiceEvent => &[
                ("timestamp", utc),
                ("customer_id", DataType::Int64),
                ("user_id", DataType::Utf8),
                ("service", DataType::Utf8),
                ("endpoint", DataType::Utf8),
                ("region", DataType::Utf8),
                ("latency_ms", DataType::Float64),
                ("status_code", DataType::Int64),
                ("bytes", DataType::Int64),
            ],
            Self::Blob => &[
                ("ts", utc),
                ("device", DataType::Utf8),
                ("reading", DataType::Int64),
                ("payload", DataType::Utf8),
            ],
            Self::Sensor => &[
                ("ts", utc),
                ("device", DataType::Utf8),
                ("metric", DataType::Utf8),
                ("value", DataType::Float64),
            ],
            Self::Nested => &[
                ("ts", utc),
                ("order_id", DataType::Int64),
                ("customer", DataType::Struct(customer_fields())),
                (
                    "items",
                    DataType::List(Arc::new(Field::new("item", DataType::Struct(item_fields()), true))),
                ),
                ("tags", DataType::List(Arc::new(Field::new("item", DataType::Utf8, true)))),
            ],
            Self::Wide => return wide_schema(),
        };
        let fields = columns.iter().map(|(name, kind)| Field::new(*name, kind.clone(), true));
        Arc::new(Schema::new(fields.collect::<Vec<_>>()))
    }

    /// The records from the `first`-th on.
    pub fn batch(self, first: u64, rows: usize, random: &mut StdRng) -> RecordBatch {
        let columns = match self {
            Self::ServiceEvent => service_events(first, rows, random),
            Self::Blob => blobs(first, rows, random),
            Self::Sensor => readings(first, rows, random),
            Self::Wide => wide(first, rows, random),
            Self::Nested => orders(first, rows, random),
        };
        RecordBatch::try_new(self.schema(), columns).expect("the columns are those of the schema")
    }
}

fn service_events(first: u64, rows: usize, random: &mut StdRng) -> Vec<ArrayRef> {
    vec![
        times(first, rows),
        integers(rows, || random.random_range(1..2_000_000)),
        texts(rows, || uuid::Builder::from_random_bytes(random.random()).into_uuid().to_string()),
        texts(rows, || pick(&SERVICES, random)),
        texts(rows, || pick(&ENDPOINTS, random)),
        texts(rows, || pick(&REGIONS, random)),
        numbers(rows, || f64::from(random.random_range(100..900_000)) / 1000.0),
        integers(rows, || [200, 200, 200, 201, 304, 404, 500][random.random_range(0..7)]),
        integers(rows, || random.random_range(100..200_000)),
    ]
}

fn blobs(first: u64, rows: usize, random: &mut StdRng) -> Vec<ArrayRef> {
    let device = format!("device-{:05}", random.random_range(0..10_000));
    vec![
        times(first, rows),
        texts(rows, || device.clone()),
        integers(rows, || random.random()),
        texts(rows, || blob(random)),
    ]
}

fn readings(first: u64, rows: usize, random: &mut StdRng) -> Vec<ArrayRef> {
    vec![
        times(first, rows),
        texts(rows, || format!("sensor-{:05}", random.random_range(0..20_000))),
        texts(rows, || pick(&METRICS, random)),
        numbers(rows, || f64::from(random.random_range(-2_000..12_000)) / 100.0),
    ]
}

/// A time, a name, and columns of whole numbers, fractions and words in turn.
fn wide_schema() -> SchemaRef {
    let kinds = [DataType::Int64, DataType::Float64, DataType::Utf8];
    let utc = DataType::Timestamp(TimeUnit::Microsecond, Some("UTC".into()));
    let first = [Field::new("ts", utc, true), Field::new("id", DataType::Utf8, true)];
    let others = (0..WIDE_COLUMNS - first.len()).zip(kinds.iter().cycle());
    let others = others.map(|(number, kind)| Field::new(format!("column_{number:03}"), kind.clone(), true));
    Arc::new(Schema::new(first.into_iter().chain(others).collect::<Vec<_>>()))
}

fn wide(first: u64, rows: usize, random: &mut StdRng) -> Vec<ArrayRef> {
    let mut columns = vec![times(first, rows), texts(rows, || format!("{:08x}", random.next_u32()))];
    for number in 0..WIDE_COLUMNS - columns.len() {
        columns.push(match number % 3 {
            0 => integers(rows, || random.random_range(0..10_000)),
            1 => numbers(rows, || f64::from(random.random_range(0..100_000)) / 100.0),
            _ => texts(rows, || pick(&WORDS, random)),
        });
    }
    columns
}

fn customer_fields() -> Fields {
    let address = [("city", DataType::Utf8), ("zip", DataType::Utf8)];
    let address = address.map(|(name, kind)| Field::new(name, kind, true));
    Fields::from(vec![
        Field::new("id", DataType::Int64, true),
        Field::new("name", DataType::Utf8, true),
        Field::new("address", DataType::Struct(address.to_vec().into()), true),
    ])
}

fn item_fields() -> Fields {
    let fields = [("sku", DataType::Utf8), ("quantity", DataType::Int64), ("price", DataType::Float64)];
    fields.map(|(name, kind)| Field::new(name, kind, true)).to_vec().into()
}

fn structs(fields: Fields, columns: Vec<ArrayRef>) -> ArrayRef {
    Arc::new(StructArray::new(fields, columns, None))
}

/// Lists of one to four.
fn lists(rows: usize, random: &mut StdRng, values: impl FnOnce(usize, &mut StdRng) -> ArrayRef) -> ArrayRef {
    let lengths: Vec<usize> = (0..rows).map(|_| random.random_range(1..=4)).collect();
    let values = values(lengths.iter().sum(), random);
    let element = Arc::new(Field::new("item", values.data_type().clone(), true));
    Arc::new(ListArray::new(element, OffsetBuffer::from_lengths(lengths), values, None))
}

fn orders(first: u64, rows: usize, random: &mut StdRng) -> Vec<ArrayRef> {
    let city = texts(rows, || pick(&REGIONS, random));
    let zip = texts(rows, || format!("{:05}", random.random_range(1_000..99_999)));
    let DataType::Struct(address) = customer_fields()[2].data_type().clone() else { return Vec::new() };
    let customer = vec![
        integers(rows, || random.random_range(1..2_000_000)),
        texts(rows, || format!("{} {}", pick(&WORDS, random), pick(&WORDS, random))),
        structs(address, vec![city, zip]),
    ];
    let items = lists(rows, random, |count, random| {
        let sku = texts(count, || format!("sku-{:06}", random.random_range(0..500_000)));
        let quantity = integers(count, || random.random_range(1..10));
        let price = numbers(count, || f64::from(random.random_range(99..99_999)) / 100.0);
        structs(item_fields(), vec![sku, quantity, price])
    });
    vec![
        times(first, rows),
        integers(rows, || random.random_range(0..1 << 40)),
        structs(customer_fields(), customer),
        items,
        lists(rows, random, |count, random| texts(count, || pick(&SERVICES, random))),
    ]
}

/// Words and hexadecimal digits, half and half.
fn blob(random: &mut StdRng) -> String {
    let mut text = String::with_capacity(BLOB_BYTES + 32);
    while text.len() < BLOB_BYTES {
        text.push_str(&pick(&WORDS, random));
        text.push_str(&format!("={:08x} ", random.next_u32()));
    }
    text.truncate(BLOB_BYTES);
    text
}

fn times(first: u64, rows: usize) -> ArrayRef {
    let first = i64::try_from(first).unwrap_or(0);
    let values = (0..).take(rows).map(|n: i64| EPOCH_US + (first + n) * 1_013);
    Arc::new(TimestampMicrosecondArray::from_iter_values(values).with_timezone("UTC"))
}

fn integers(rows: usize, mut value: impl FnMut() -> i64) -> ArrayRef {
    Arc::new(Int64Array::from_iter_values((0..rows).map(|_| value())))
}

fn numbers(rows: usize, mut value: impl FnMut() -> f64) -> ArrayRef {
    Arc::new(Float64Array::from_iter_values((0..rows).map(|_| value())))
}

fn texts(rows: usize, mut value: impl FnMut() -> String) -> ArrayRef {
    Arc::new(StringArray::from_iter_values((0..rows).map(|_| value())))
}

fn pick(from: &[&str], random: &mut StdRng) -> String {
    from[random.random_range(0..from.len())].to_owned()
}

/// The rows as one Arrow IPC stream.
///
/// # Errors
/// A type that IPC does not take.
pub fn ipc_stream(batch: &RecordBatch) -> anyhow::Result<Bytes> {
    let mut bytes = Vec::with_capacity(batch.get_array_memory_size() + 1024);
    let mut writer = StreamWriter::try_new(&mut bytes, batch.schema_ref())?;
    writer.write(batch)?;
    writer.finish()?;
    drop(writer);
    Ok(bytes.into())
}

/// The rows as JSON objects, one a line, without the nulls.
///
/// # Errors
/// A type that no workload has.
pub fn json_lines(batch: &RecordBatch) -> anyhow::Result<Bytes> {
    let columns: Vec<(&str, ArrayRef)> = batch
        .schema_ref()
        .fields()
        .iter()
        .zip(batch.columns())
        .map(|(field, column)| Ok((field.name().as_str(), without_zone(column)?)))
        .collect::<anyhow::Result<_>>()?;
    let mut bytes = Vec::with_capacity(batch.num_rows() * 300);
    for row in 0..batch.num_rows() {
        let mut object = serde_json::Map::new();
        for (name, column) in columns.iter().filter(|(_, column)| column.is_valid(row)) {
            object.insert((*name).to_owned(), json_value(column, row)?);
        }
        serde_json::to_writer(&mut bytes, &object)?;
        bytes.push(b'\n');
    }
    Ok(bytes.into())
}

/// The descriptor of the messages that `messages` makes, serialized: a field for each column, numbered from 1; types of
/// structs are nested in it and called as their columns.
///
/// # Errors
/// A type that no workload has.
pub fn descriptor(schema: &Schema) -> anyhow::Result<Vec<u8>> {
    Ok(descriptor_of("Record", schema.fields())?.encode_to_vec())
}

fn descriptor_of(name: &str, fields: &Fields) -> anyhow::Result<DescriptorProto> {
    let mut message = DescriptorProto { name: Some(name.to_owned()), ..DescriptorProto::default() };
    for (number, field) in (1..).zip(fields) {
        let (held, label) = match field.data_type() {
            DataType::List(element) => (element.data_type(), Some(Label::Repeated)),
            held => (held, None),
        };
        let kind = match held {
            DataType::Int64 | DataType::Timestamp(..) => Type::Int64,
            DataType::Float64 => Type::Double,
            DataType::Utf8 => Type::String,
            DataType::Struct(fields) => {
                message.nested_type.push(descriptor_of(field.name(), fields)?);
                Type::Message
            }
            other => anyhow::bail!("no workload has a column of type {other}"),
        };
        message.field.push(FieldDescriptorProto {
            name: Some(field.name().clone()),
            number: Some(number),
            label: label.map(Into::into),
            r#type: Some(kind.into()),
            type_name: (kind == Type::Message).then(|| field.name().clone()),
            ..FieldDescriptorProto::default()
        });
    }
    Ok(message)
}

/// The rows as protobuf messages, before each its length, without the nulls.
///
/// # Errors
/// A type that no workload has.
pub fn messages(batch: &RecordBatch) -> anyhow::Result<Bytes> {
    let (mut bytes, mut message) = (Vec::with_capacity(batch.num_rows() * 300), Vec::new());
    for row in 0..batch.num_rows() {
        message.clear();
        encode_fields(batch.columns(), row, &mut message)?;
        encoding::encode_varint(message.len() as u64, &mut bytes);
        bytes.extend_from_slice(&message);
    }
    Ok(bytes.into())
}

fn encode_fields(columns: &[ArrayRef], row: usize, message: &mut Vec<u8>) -> anyhow::Result<()> {
    for (number, column) in (1..).zip(columns).filter(|(_, column)| column.is_valid(row)) {
        encode_field(number, column, row, message)?;
    }
    Ok(())
}

fn encode_field(number: u32, column: &ArrayRef, row: usize, message: &mut Vec<u8>) -> anyhow::Result<()> {
    match column.data_type() {
        DataType::Int64 => {
            encoding::int64::encode(number, &column.as_primitive::<Int64Type>().value(row), message);
        }
        DataType::Timestamp(TimeUnit::Microsecond, _) => {
            let us = column.as_primitive::<TimestampMicrosecondType>().value(row);
            encoding::int64::encode(number, &us, message);
        }
        DataType::Float64 => {
            encoding::double::encode(number, &column.as_primitive::<Float64Type>().value(row), message);
        }
        DataType::Utf8 => {
            encoding::string::encode(number, &column.as_string::<i32>().value(row).to_owned(), message);
        }
        DataType::Struct(_) => {
            let mut nested = Vec::new();
            encode_fields(column.as_struct().columns(), row, &mut nested)?;
            encoding::bytes::encode(number, &nested, message);
        }
        DataType::List(_) => {
            let elements = column.as_list::<i32>().value(row);
            for element in 0..elements.len() {
                encode_field(number, &elements, element, message)?;
            }
        }
        other => anyhow::bail!("no workload has a column of type {other}"),
    }
    Ok(())
}

/// The display of times with a zone would need a zone database.
fn without_zone(column: &ArrayRef) -> anyhow::Result<ArrayRef> {
    Ok(match column.data_type() {
        DataType::Timestamp(TimeUnit::Microsecond, Some(_)) => {
            let times = column.as_primitive::<TimestampMicrosecondType>();
            Arc::new(times.clone().with_timezone_opt(None::<Arc<str>>))
        }
        DataType::Timestamp(..) => anyhow::bail!("column of type {}: expected µs", column.data_type()),
        _ => Arc::clone(column),
    })
}

fn json_value(column: &ArrayRef, row: usize) -> anyhow::Result<serde_json::Value> {
    Ok(match column.data_type() {
        DataType::Int64 => column.as_primitive::<Int64Type>().value(row).into(),
        DataType::Float64 => column.as_primitive::<Float64Type>().value(row).into(),
        DataType::Utf8 => column.as_string::<i32>().value(row).into(),
        DataType::Struct(fields) => {
            let columns = fields.iter().zip(column.as_struct().columns());
            let columns = columns.filter(|(_, column)| column.is_valid(row));
            let object = columns.map(|(field, column)| Ok((field.name().clone(), json_value(column, row)?)));
            object.collect::<anyhow::Result<serde_json::Map<_, _>>>()?.into()
        }
        DataType::List(_) => {
            let elements = column.as_list::<i32>().value(row);
            let elements = (0..elements.len()).map(|element| json_value(&elements, element));
            elements.collect::<anyhow::Result<Vec<_>>>()?.into()
        }
        DataType::Timestamp(..) => {
            let format = FormatOptions::default();
            format!("{}Z", ArrayFormatter::try_new(column, &format)?.value(row)).into()
        }
        other => anyhow::bail!("no workload has a column of type {other}"),
    })
}

/// One number for each row, from the names and values of its columns, whatever their order and width: equal rows
/// have equal numbers, on both sides of the service. Columns whose names begin with an underscore are the service's
/// own and do not count.
///
/// # Errors
/// A column that can neither be widened nor displayed.
pub fn row_hashes(batch: &RecordBatch) -> anyhow::Result<Vec<u64>> {
    let mut columns: Vec<(&str, ArrayRef)> = batch
        .schema_ref()
        .fields()
        .iter()
        .zip(batch.columns())
        .filter(|(field, _)| !field.name().starts_with('_'))
        .map(|(field, column)| {
            let widest = widest(column).with_context(|| format!("column {:?}", field.name()))?;
            Ok((field.name().as_str(), widest))
        })
        .collect::<anyhow::Result<_>>()?;
    columns.sort_by_key(|(name, _)| *name);
    let mut hashers = vec![DefaultHasher::new(); batch.num_rows()];
    for (name, column) in columns {
        hash_column(name, &column, &mut hashers)?;
    }
    Ok(hashers.into_iter().map(|hasher| hasher.finish()).collect())
}

fn widest(column: &ArrayRef) -> anyhow::Result<ArrayRef> {
    use DataType::{
        Boolean, Date32, Float16, Float32, Float64, Int8, Int16, Int32, Int64, LargeUtf8, Timestamp, UInt8,
        UInt16, UInt32, Utf8, Utf8View,
    };
    let target = match column.data_type() {
        Int8 | Int16 | Int32 | Int64 | UInt8 | UInt16 | UInt32 | Boolean | Date32 => Int64,
        Float16 | Float32 | Float64 => Float64,
        Utf8 | LargeUtf8 | Utf8View => Utf8,
        Timestamp(_, zone) => {
            let micros = cast(column, &Timestamp(TimeUnit::Microsecond, zone.clone()))?;
            return Ok(cast(&micros, &Int64)?);
        }
        _ => return Ok(Arc::clone(column)),
    };
    if *column.data_type() == Date32 {
        return Ok(cast(&cast(column, &Int32)?, &Int64)?);
    }
    Ok(cast(column, &target)?)
}

fn hash_column(name: &str, column: &ArrayRef, hashers: &mut [DefaultHasher]) -> anyhow::Result<()> {
    let format = FormatOptions::default();
    let displayed = ArrayFormatter::try_new(column, &format);
    for (row, hasher) in hashers.iter_mut().enumerate().filter(|(row, _)| column.is_valid(*row)) {
        name.hash(hasher);
        match column.data_type() {
            DataType::Int64 => column.as_primitive::<Int64Type>().value(row).hash(hasher),
            DataType::Float64 => column.as_primitive::<Float64Type>().value(row).to_bits().hash(hasher),
            DataType::Utf8 => column.as_string::<i32>().value(row).hash(hasher),
            _ => match &displayed {
                Ok(displayed) => displayed.value(row).to_string().hash(hasher),
                Err(error) => anyhow::bail!("column {name:?}: {error}"),
            },
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;
    use sluice_pod::decode::json::JsonDecoder;
    use sluice_pod::decode::protobuf::ProtobufDecoder;
    use sluice_pod::decode::rows::Rows;
    use sluice_shared::frame::UnknownFields;

    use super::*;

    #[test]
    fn the_same_seed_gives_the_same_records() {
        for shape in Shape::ALL {
            let batch = |seed| shape.batch(5, 20, &mut StdRng::seed_from_u64(seed));
            assert_eq!(batch(7), batch(7));
            assert_ne!(batch(7), batch(8));
        }
    }

    #[test]
    fn records_have_the_sizes_that_the_figures_are_about() {
        let mut random = StdRng::seed_from_u64(1);
        let events = json_lines(&Shape::ServiceEvent.batch(0, 1000, &mut random)).expect("JSON");
        assert!((220_000..280_000).contains(&events.len()), "{} bytes", events.len());
        let blobs = ipc_stream(&Shape::Blob.batch(0, 1000, &mut random)).expect("IPC");
        assert!((1_000_000..1_200_000).contains(&blobs.len()), "{} bytes", blobs.len());
        for shape in Shape::ALL {
            let lines = json_lines(&shape.batch(0, 100, &mut random)).expect("JSON");
            let ratio = lines.len() as f64 / 100.0 / shape.about_bytes() as f64;
            assert!((0.8..1.2).contains(&ratio), "{shape:?}: {} bytes", lines.len() / 100);
        }
    }

    #[test]
    fn a_record_keeps_its_hash_through_json() {
        for shape in Shape::ALL {
            let batch = shape.batch(0, 100, &mut StdRng::seed_from_u64(3));
            let mut decoder = JsonDecoder::new(shape.schema(), 1 << 20).expect("a schema");
            let text = json_lines(&batch).expect("JSON");
            decoder.append(&text, UnknownFields::Refuse, &mut |place, why| panic!("{place}: {why:?}"));
            let back = row_hashes(&decoder.finish()).expect("hashes");
            assert_eq!(back, row_hashes(&batch).expect("hashes"));
        }
    }

    #[test]
    fn a_record_keeps_its_values_through_protobuf() {
        for shape in Shape::ALL {
            let batch = shape.batch(0, 100, &mut StdRng::seed_from_u64(3));
            let descriptor = descriptor(&shape.schema()).expect("a descriptor");
            let decoder = ProtobufDecoder::new(&shape.schema(), &descriptor, UnknownFields::Refuse);
            let mut rows = Rows::new(shape.schema(), 1 << 20).expect("a schema");
            let payload = messages(&batch).expect("messages");
            let refuse = &mut |place, why| panic!("{place}: {why:?}");
            decoder.expect("fits").append_within(&mut rows, &payload, usize::MAX, refuse);
            assert_eq!(rows.finish(), batch);
        }
    }

    #[test]
    fn width_and_order_of_columns_do_not_count_but_values_do() {
        let batch = |columns: Vec<(&str, ArrayRef)>| {
            row_hashes(&RecordBatch::try_from_iter(columns).expect("a batch")).expect("hashes")
        };
        let number = |n| Arc::new(Int64Array::from(vec![n])) as ArrayRef;
        let narrow = Arc::new(arrow::array::Int32Array::from(vec![4])) as ArrayRef;
        let text = Arc::new(StringArray::from(vec!["x"])) as ArrayRef;
        let one = batch(vec![("n", number(4)), ("t", text.clone()), ("_offset", number(0))]);
        assert_eq!(one, batch(vec![("t", text.clone()), ("n", narrow)]));
        assert_ne!(one, batch(vec![("t", text.clone()), ("n", number(5))]));
        assert_ne!(one, batch(vec![("t", text), ("m", number(4))]));
    }
}
