//! Records in each encoding into the rows of a table.
//!
//! *Owns*: the tables and schemas that inputs choose from, what must hold of rows and refusals.
//! *Does not own*: the decoders (`sluice_pod::decode`).

use std::sync::{Arc, OnceLock};

use arrow::array::{ArrayRef, RecordBatch};
use arrow::compute::cast;
use arrow::datatypes::{DataType, Field, Schema, SchemaRef, TimeUnit};
use arrow::ipc::writer::{IpcWriteOptions, StreamWriter};
use arrow::ipc::{CompressionType, MessageHeader, root_as_message};
use bytes::Bytes;
use prost::Message as _;
use prost_types::field_descriptor_proto::{Label, Type};
use prost_types::{DescriptorProto, FieldDescriptorProto, MessageOptions, OneofDescriptorProto};
use sluice_pod::decode::arrow::{ArrowDecoder, decode_schema, rows_as_json};
use sluice_pod::decode::described::{DescribedDecoder, table_schema};
use sluice_pod::decode::json::JsonDecoder;
use sluice_pod::decode::rows::Rows;
use sluice_pod::table::batch::{Reason, ReasonCode};
use sluice_shared::frame::{Encoding, UnknownFields, count_lines, count_messages};
use sluice_shared::table::{TableSpec, types};

use super::draw::Draw;

/// A column: name, type, whether it may be null.
type Column = (&'static str, &'static str, bool);

/// Columns of each table, and records that fit.
pub(super) const TABLES: [(&[Column], &str); 6] = [
    (
        &[
            ("id", "int64", false),
            ("small", "int8", true),
            ("x", "float64", true),
            ("y", "float32", true),
            ("b", "bool", true),
        ],
        "{\"id\":1,\"small\":-128,\"x\":0.1,\"y\":1e30,\"b\":true}\n\n{\"id\":9007199254740993}\n",
    ),
    (
        &[("n", "int32", true), ("s", "string", true), ("raw", "binary", true)],
        "{\"n\":12,\"s\":\"a\\n\\u00e9\\ud83d\\ude00\",\"raw\":\"aGk=\"}\r\n {\"s\":\"\"}",
    ),
    (
        &[("d", "decimal(10,3)", true), ("wide", "decimal(38,9)", true), ("day", "date", true)],
        "{\"d\":\"0.1\",\"wide\":-1.5e2,\"day\":\"2013-01-31\"}\n{\"d\":1234567.001,\"day\":-1}\n",
    ),
    (
        &[("at", "timestamp", true), ("local", "timestamp_ntz", true)],
        "{\"at\":\"2013-01-31T05:00:00.25+01:00\",\"local\":\"2013-01-31 05:00:00\"}\n{\"at\":1359608400000000}\n",
    ),
    (
        &[
            ("l", "list<int64 not null>", true),
            ("ll", "list<list<string>>", true),
            ("m", "map<string, int32>", true),
            ("mm", "map<string, map<string, list<bool>>>", true),
        ],
        "{\"l\":[1,2],\"ll\":[[\"a\",null],[]],\"m\":{\"k\":1,\"l\":null},\"mm\":{\"k\":{\"l\":[true]}}}\n{}\n",
    ),
    (
        &[(
            "s",
            "struct<a: int64, b: struct<c: string not null, d: list<struct<e: decimal(5,2)>>> not null>",
            false,
        )],
        "{\"s\":{\"a\":1,\"b\":{\"c\":\"x\",\"d\":[{\"e\":1.25},{}]}}}\n{\"s\":{\"b\":{\"c\":\"\"}}}\n",
    ),
];
const RECORD_BYTES_MAX: usize = 1 << 16;
const ROW_BYTES_MAX: usize = 1 << 16;
const DECODED_BYTES_MAX: usize = 1 << 20;
/// A reason is for people: its message is a line.
const MESSAGE_CHARS_MAX: usize = 1_000;

/// The schemas of `TABLES`.
fn schemas() -> &'static [SchemaRef] {
    static SCHEMAS: OnceLock<Vec<SchemaRef>> = OnceLock::new();
    SCHEMAS.get_or_init(|| TABLES.iter().map(|(columns, _)| schema_of(columns)).collect())
}

fn schema_of(columns: &[Column]) -> SchemaRef {
    let field =
        |(name, text, nullable): &Column| Field::new(*name, types::parse(text).expect("a type"), *nullable);
    Arc::new(Schema::new(columns.iter().map(field).collect::<Vec<_>>()))
}

/// Rows of a table.
pub(super) fn rows_of(table: usize) -> RecordBatch {
    let mut decoder = JsonDecoder::new(schemas()[table].clone(), RECORD_BYTES_MAX).expect("a table's schema");
    let refuse = &mut |place, reason| unreachable!("record {place}: {reason:?}");
    decoder.append(TABLES[table].1.as_bytes(), UnknownFields::Refuse, refuse);
    decoder.finish()
}

/// What was refused, by place.
type Refused = Vec<(usize, Reason)>;

/// Arrays that keep all that Arrow asks of them, in the table's schema.
fn check_rows(batch: &RecordBatch, schema: &SchemaRef) {
    assert_eq!(&batch.schema(), schema);
    for (column, field) in batch.columns().iter().zip(schema.fields()) {
        column.to_data().validate_full().expect("sound arrays");
        assert!(field.is_nullable() || column.null_count() == 0, "nulls in {}", field.name());
    }
}

fn check_refused(refused: &[(usize, Reason)], count: usize) {
    assert!(refused.is_sorted_by(|one, next| one.0 < next.0), "{refused:?}");
    for (place, reason) in refused {
        assert!(*place < count, "place {place} of {count}");
        assert!(reason.message.chars().count() <= MESSAGE_CHARS_MAX, "{reason:?}");
        assert!(ReasonCode::ALL.iter().any(|code| code.as_str() == reason.code), "{reason:?}");
    }
}

fn unknown_fields(draw: &mut Draw<'_>) -> UnknownFields {
    if draw.flag() { UnknownFields::Ignore } else { UnknownFields::Refuse }
}

/// Decodes a payload of `count` records in as many steps as the bound takes. `append` decodes from a byte on.
fn in_steps(
    payload: &[u8],
    count: usize,
    mut append: impl FnMut(&[u8], &mut dyn FnMut(usize, Reason)) -> sluice_pod::decode::Decoded,
) -> (usize, Refused) {
    let (mut at, mut accepted, mut refused) = (0, 0, Refused::new());
    loop {
        let first = accepted + refused.len();
        let decoded = append(&payload[at..], &mut |place, reason| refused.push((first + place, reason)));
        accepted += decoded.accepted;
        assert_eq!(accepted + refused.len(), first + decoded.accepted + decoded.refused);
        at += decoded.payload_bytes;
        assert!(at <= payload.len(), "byte {at} of {}", payload.len());
        if at == payload.len() {
            break;
        }
        assert!(decoded.accepted + decoded.refused > 0, "no step without a record");
    }
    assert_eq!(accepted + refused.len(), count, "each record is a row or refused");
    check_refused(&refused, count);
    (accepted, refused)
}

/// Newline-delimited JSON into one of the tables, all at once or in steps. Each record is a row or refused by its place; the
/// rows are sound; and the same records once more are the same rows and refusals, so that none has left a trace.
pub(super) fn json(input: &[u8]) {
    let mut draw = Draw::new(input);
    let schema = &schemas()[draw.below(TABLES.len())];
    let unknown = unknown_fields(&mut draw);
    let record_bytes_max = [RECORD_BYTES_MAX, 40][draw.below(2)];
    let step_bytes = [usize::MAX / 2, 1_000][draw.below(2)];
    let payload = draw.rest();
    let decoder = JsonDecoder::new(schema.clone(), record_bytes_max).expect("a table's schema");
    let mut decoder = decoder.with_rows_up_to(ROW_BYTES_MAX);
    let count = count_lines(payload);
    let mut outcomes = Vec::new();
    for _ in 0..2 {
        outcomes.push(in_steps(payload, count, |rest, refuse| {
            let bytes_max = decoder.bytes() + step_bytes;
            decoder.append_within(rest, unknown, bytes_max, refuse)
        }));
    }
    let (accepted, _) = outcomes[0];
    assert_eq!(outcomes[0], outcomes[1]);
    assert_eq!(decoder.rows(), 2 * accepted);
    let batch = decoder.finish();
    check_rows(&batch, schema);
    assert_eq!(batch.slice(0, accepted), batch.slice(accepted, accepted), "a record has left a trace");
    assert_eq!(decoder.rows(), 0);
}

/// Records for each table; what is refused.
pub(super) fn json_seeds() -> Vec<Vec<u8>> {
    let mut seeds = Vec::new();
    for (table, (_, records)) in (0_u8..).zip(TABLES) {
        for head in [[table, 0, 0, 0], [table, 1, 1, 1]] {
            seeds.push([&head[..], records.as_bytes()].concat());
        }
    }
    let refused = "{\"id\":01}\n[]\n{\"id\":1,\"id\":1}\n{\"no\":1}\n{\"id\":1e999}\n{\"id\":\"\\ud800\"}\n{\"id\":{\"a\":[]}}";
    seeds.push([&[0, 0, 0, 0][..], refused.as_bytes()].concat());
    seeds.push(
        [&[4, 0, 0, 0][..], b"{\"m\":{\"a\":1,\"a\":2}}\n{\"ll\":[[1]]}\n", &b"[".repeat(200)[..]].concat(),
    );
    seeds
}

/// An Arrow IPC stream into one of the tables, or into the table that its own schema makes. The frame is refused as a whole,
/// or each of its rows is one of the table's or refused by its place, and the rows are sound. What decoding may allocate is
/// bounded by what it may make.
pub(super) fn arrow(input: &[u8]) {
    let mut draw = Draw::new(input);
    let (table, unknown, counts) = (draw.below(TABLES.len() + 1), unknown_fields(&mut draw), draw.flag());
    let payload = Bytes::copy_from_slice(draw.rest());
    let own = || decode_schema(&payload).and_then(|schema| TableSpec::normalise(&schema));
    let Some(schema) = schemas().get(table).cloned().or_else(|| own().ok()) else { return };
    let count = if counts { rows_in(&payload) } else { 2 };
    let mut decoder = ArrowDecoder::new(schema.clone(), DECODED_BYTES_MAX);
    let mut refused = Refused::new();
    let decoded =
        decoder.decode(&payload, count, unknown, &mut |place, reason| refused.push((place, reason)));
    let Ok(batches) = decoded else {
        assert!(refused.is_empty(), "refused as a whole");
        return;
    };
    check_refused(&refused, count);
    batches.iter().for_each(|batch| check_rows(batch, &schema));
    assert_eq!(batches.iter().map(RecordBatch::num_rows).sum::<usize>() + refused.len(), count);
    let places: Vec<usize> = refused.iter().map(|(place, _)| *place).collect();
    if !places.is_empty() {
        assert_eq!(rows_as_json(&payload, &places).len(), places.len());
    }
}

/// What the batches of a stream say of their rows, so that inputs do not end at the count.
fn rows_in(stream: &[u8]) -> usize {
    let word = |at: usize| stream.get(at..at + 4).and_then(|word| <[u8; 4]>::try_from(word).ok());
    let (mut at, mut rows) = (0_usize, 0_usize);
    while let Some(first) = word(at) {
        at += if first == [0xff; 4] { 4 } else { 0 };
        let length = word(at).and_then(|length| usize::try_from(i32::from_le_bytes(length)).ok());
        at += 4;
        let header = length.and_then(|length| stream.get(at..at.checked_add(length)?));
        let Some(message) = header.and_then(|header| root_as_message(header).ok()) else { break };
        if message.header_type() == MessageHeader::RecordBatch {
            let batch = message.header_as_record_batch();
            let length = batch.and_then(|batch| usize::try_from(batch.length()).ok());
            rows = rows.saturating_add(length.unwrap_or(0));
        }
        let body = usize::try_from(message.bodyLength()).unwrap_or(0);
        at = at.saturating_add(length.unwrap_or(0)).saturating_add(body);
        if at > stream.len() {
            break;
        }
    }
    rows
}

fn ipc(batch: &RecordBatch, compression: Option<CompressionType>) -> Vec<u8> {
    let options = IpcWriteOptions::default().try_with_compression(compression).expect("supported");
    let mut bytes = Vec::new();
    let mut writer =
        StreamWriter::try_new_with_options(&mut bytes, &batch.schema(), options).expect("a schema");
    writer.write(batch).and_then(|()| writer.finish()).expect("rows");
    drop(writer);
    bytes
}

/// Types that tables take for their own, where a column can be cast to one.
fn kin(data_type: &DataType) -> Vec<DataType> {
    let dictionary = |value| DataType::Dictionary(Box::new(DataType::Int8), Box::new(value));
    match data_type {
        DataType::Utf8 => vec![DataType::LargeUtf8, DataType::Utf8View, dictionary(DataType::Utf8)],
        DataType::Binary => vec![DataType::LargeBinary, DataType::BinaryView],
        DataType::Int64 => vec![DataType::UInt32, dictionary(DataType::Int64)],
        DataType::Int32 => vec![DataType::UInt16],
        DataType::Float32 => vec![DataType::Float16],
        DataType::Date32 => vec![DataType::Date64],
        DataType::Timestamp(_, zone) => vec![DataType::Timestamp(TimeUnit::Nanosecond, zone.clone())],
        DataType::List(element) => vec![DataType::LargeList(Arc::clone(element))],
        _ => Vec::new(),
    }
}

/// Rows of each table, compressed, and with other types that fit.
pub(super) fn arrow_seeds() -> Vec<Vec<u8>> {
    let mut seeds = Vec::new();
    let own = u8::try_from(TABLES.len()).expect("few tables");
    for table in 0..own {
        let rows = rows_of(usize::from(table));
        let of_table = rows.schema();
        for compression in [None, Some(CompressionType::LZ4_FRAME), Some(CompressionType::ZSTD)] {
            seeds.push([&[table, 0, 1][..], &ipc(&rows, compression)].concat());
        }
        for (place, column) in rows.columns().iter().enumerate() {
            for other in kin(column.data_type()) {
                let Ok(cast) = cast(column, &other) else { continue };
                let mut columns: Vec<ArrayRef> = rows.columns().to_vec();
                columns[place] = cast;
                let fields = of_table.fields().iter().zip(&columns).map(|(field, column)| {
                    Field::new(field.name(), column.data_type().clone(), field.is_nullable())
                });
                let schema = Arc::new(Schema::new(fields.collect::<Vec<_>>()));
                let Ok(batch) = RecordBatch::try_new(schema, columns) else { continue };
                seeds.push([&[table, 0, 1][..], &ipc(&batch, None)].concat());
                seeds.push([&[own, 1, 1][..], &ipc(&batch, None)].concat());
            }
        }
    }
    seeds
}

/// Protobuf messages into a table, by one of the descriptors here or by the input's own.
pub(super) fn protobuf(input: &[u8]) {
    static KNOWN: OnceLock<Vec<(SchemaRef, DescribedDecoder)>> = OnceLock::new();
    let known = KNOWN.get_or_init(|| known(Encoding::Protobuf, &[shop().encode_to_vec()]));
    described(Encoding::Protobuf, known, input);
}

/// Avro data into a table, by one of the schemas here or by the input's own.
pub(super) fn avro(input: &[u8]) {
    static KNOWN: OnceLock<Vec<(SchemaRef, DescribedDecoder)>> = OnceLock::new();
    let known = KNOWN.get_or_init(|| known(Encoding::Avro, &[AVRO.as_bytes().to_vec()]));
    described(Encoding::Avro, known, input);
}

fn known(encoding: Encoding, schemas: &[Vec<u8>]) -> Vec<(SchemaRef, DescribedDecoder)> {
    let known = schemas.iter().map(|schema| decoder_of(encoding, schema, UnknownFields::Refuse));
    known.collect::<Option<_>>().expect("sound schemas")
}

/// The table that a schema makes, and its decoder.
fn decoder_of(
    encoding: Encoding,
    schema: &[u8],
    unknown: UnknownFields,
) -> Option<(SchemaRef, DescribedDecoder)> {
    let table = table_schema(encoding, schema).ok().flatten()?;
    let decoder = DescribedDecoder::new(encoding, &table, schema, unknown).expect("its own table");
    Some((table, decoder.expect("an encoding with a schema")))
}

/// As `json`: each record is a row or refused, the rows are sound, no record leaves a trace. A schema that makes a table
/// also fits it; and it is refused, or its fields left out, by the tables it does not fit.
fn described(encoding: Encoding, known: &[(SchemaRef, DescribedDecoder)], input: &[u8]) {
    let mut draw = Draw::new(input);
    let is_one = draw.flag();
    let made;
    let (schema, decoder) = if draw.flag() {
        let (schema, unknown) = (draw.sized(), unknown_fields(&mut draw));
        let other = &schemas()[draw.below(TABLES.len())];
        // Whether it fits that one is not known here.
        let _ = DescribedDecoder::new(encoding, other, schema, unknown);
        let Some(own) = decoder_of(encoding, schema, unknown) else { return };
        made = own;
        &made
    } else {
        &known[0]
    };
    let rest = draw.rest();
    // One record needs no length that fits, so that an input can grow.
    let payload = if is_one { behind_length(rest) } else { rest.to_vec() };
    let Ok(count) = count_messages(&payload) else { return };
    let mut rows = Rows::new(schema.clone(), RECORD_BYTES_MAX).expect("a table's schema");
    rows = rows.with_rows_up_to(ROW_BYTES_MAX);
    let mut outcomes = Vec::new();
    for _ in 0..2 {
        outcomes.push(in_steps(&payload, count, |rest, refuse| {
            let bytes_max = rows.bytes() + DECODED_BYTES_MAX;
            decoder.append_within(&mut rows, rest, bytes_max, refuse)
        }));
    }
    let (accepted, _) = outcomes[0];
    assert_eq!(outcomes[0], outcomes[1]);
    let batch = rows.finish();
    check_rows(&batch, schema);
    assert_eq!(batch.slice(0, accepted), batch.slice(accepted, accepted), "a record has left a trace");
}

fn behind_length(record: &[u8]) -> Vec<u8> {
    let mut payload = Vec::with_capacity(record.len() + 2);
    prost::encoding::encode_varint(record.len() as u64, &mut payload);
    payload.extend_from_slice(record);
    payload
}

fn field(name: &str, number: i32, of: Type, label: Label, type_name: Option<&str>) -> FieldDescriptorProto {
    FieldDescriptorProto {
        name: Some(name.to_owned()),
        number: Some(number),
        r#type: Some(of.into()),
        label: Some(label.into()),
        type_name: type_name.map(str::to_owned),
        ..FieldDescriptorProto::default()
    }
}

/// A message with a field of each kind.
fn shop() -> DescriptorProto {
    let one = Label::Optional;
    let mut in_oneof =
        [field("cash", 9, Type::Sint64, one, None), field("card", 10, Type::String, one, None)];
    in_oneof.iter_mut().for_each(|field| field.oneof_index = Some(0));
    let nested = DescriptorProto {
        name: Some("Item".to_owned()),
        field: vec![
            field("name", 1, Type::String, one, None),
            field("price", 2, Type::Double, Label::Required, None),
            field("tags", 3, Type::String, Label::Repeated, None),
        ],
        ..DescriptorProto::default()
    };
    let entry = DescriptorProto {
        name: Some("CountsEntry".to_owned()),
        field: vec![field("key", 1, Type::String, one, None), field("value", 2, Type::Int32, one, None)],
        options: Some(MessageOptions { map_entry: Some(true), ..MessageOptions::default() }),
        ..DescriptorProto::default()
    };
    let mut fields = vec![
        field("id", 1, Type::Int64, Label::Required, None),
        field("name", 2, Type::String, one, None),
        field("raw", 3, Type::Bytes, one, None),
        field("at", 4, Type::Fixed64, one, None),
        field("rate", 5, Type::Float, one, None),
        field("numbers", 6, Type::Int32, Label::Repeated, None),
        field("items", 7, Type::Message, Label::Repeated, Some(".Shop.Item")),
        field("counts", 8, Type::Message, Label::Repeated, Some(".Shop.CountsEntry")),
        field("best", 11, Type::Message, one, Some(".Shop.Item")),
        field("open", 12, Type::Bool, one, None),
        field("short", 13, Type::Sfixed32, one, None),
    ];
    fields.extend(in_oneof);
    DescriptorProto {
        name: Some("Shop".to_owned()),
        field: fields,
        nested_type: vec![nested, entry],
        oneof_decl: vec![OneofDescriptorProto { name: Some("paid".to_owned()), options: None }],
        ..DescriptorProto::default()
    }
}

/// Messages with and without their fields, by a known and by an own descriptor.
pub(super) fn protobuf_seeds() -> Vec<Vec<u8>> {
    let item: &[u8] = b"\x0a\x01x\x11\x00\x00\x00\x00\x00\x00\xf0?\x1a\x01a\x1a\x00";
    let whole = [
        &b"\x08\x01\x12\x02ab\x1a\x01\xff\x21\x01\x02\x03\x04\x05\x06\x07\x08\x2d\x00\x00\x80?"[..],
        &b"\x32\x03\x01\x02\x03\x30\x04\x3a"[..],
        &[u8::try_from(item.len()).expect("short")],
        item,
        b"\x42\x05\x0a\x01k\x10\x05\x42\x03\x0a\x01l\x48\x03\x52\x01c\x5a\x09\x11\x00\x00\x00\x00\x00\x00\xf0?",
        b"\x60\x01\x6d\x01\x00\x00\x00\x9a\x06\x01x",
    ]
    .concat();
    let framed = [&behind_length(&whole)[..], &[2, 8, 1, 0]].concat();
    let descriptor = shop().encode_to_vec();
    let length = u16::try_from(descriptor.len()).expect("short").to_le_bytes();
    let own = [&[0, 1][..], &length, &descriptor, &[1, 2], &framed].concat();
    vec![[&[1, 0][..], &whole].concat(), [&[0, 0][..], &framed].concat(), own]
}

/// A record with a field of each kind.
const AVRO: &str = r#"{"type":"record","name":"R","namespace":"shop","fields":[
    {"name":"id","type":"long"},{"name":"b","type":"boolean"},{"name":"i","type":"int"},{"name":"f","type":"float"},
    {"name":"d","type":["null","double"]},{"name":"s","type":"string"},{"name":"raw","type":"bytes"},
    {"name":"e","type":{"type":"enum","name":"E","symbols":["A","B"]}},
    {"name":"x","type":{"type":"fixed","name":"F","size":2}},
    {"name":"day","type":{"type":"int","logicalType":"date"}},
    {"name":"at","type":{"type":"long","logicalType":"timestamp-micros"}},
    {"name":"ms","type":{"type":"long","logicalType":"local-timestamp-millis"}},
    {"name":"dec","type":{"type":"bytes","logicalType":"decimal","precision":10,"scale":2}},
    {"name":"l","type":{"type":"array","items":["long","null"]}},
    {"name":"m","type":{"type":"map","values":"string"}},
    {"name":"r","type":["null",{"type":"record","name":"N","fields":[{"name":"a","type":"F"}]}]}]}"#;

/// A datum, by a known and by an own schema.
pub(super) fn avro_seeds() -> Vec<Vec<u8>> {
    let datum = [
        &b"\x02\x01\x04\x00\x00\x80?\x02\x00\x00\x00\x00\x00\x00\xf0?\x04ab\x02\xff\x02xy"[..],
        b"\x80\x01\x80\xc0\xda\xfb\xc3\xe5\xd7\x04\x80\x80\xda\xfb\xc3\x0b\x04\x01\x00",
        b"\x04\x00\x02\x02\x00\x03\x02\x02\x00\x00\x02\x02k\x02v\x00\x02xy",
    ]
    .concat();
    let framed = [&behind_length(&datum)[..], &[0]].concat();
    let length = u16::try_from(AVRO.len()).expect("short").to_le_bytes();
    let own = [&[0, 1][..], &length, AVRO.as_bytes(), &[1, 2], &framed].concat();
    vec![[&[1, 0][..], &datum].concat(), [&[0, 0][..], &framed].concat(), own]
}
