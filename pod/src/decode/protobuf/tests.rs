//! Messages of the wire against the rows that they become.
//!
//! *Owns*: the cases of `protobuf`, its equivalence with JSON, bytes that are no messages.
//! *Does not own*: the wire's own cases (`sluice_shared::protobuf`). Messages are written by hand or by `prost-reflect`,
//! descriptors compiled by `protox`: neither shares code with the decoder.

use arrow::array::RecordBatch;
use arrow::datatypes::{Field, Schema};
use arrow::util::display::{ArrayFormatter, FormatOptions};
use proptest::prelude::*;
use prost::Message as _;
use prost_reflect::{DescriptorPool, DynamicMessage, MapKey, MessageDescriptor, Value};
use prost_types::{DescriptorProto, FieldDescriptorProto};
use protox::file::{File, FileResolver};
use serde_json::json;
use sluice_shared::frame::count_messages;
use sluice_shared::table::types;

use super::super::json::JsonDecoder;
use super::super::rows::BYTES_MAX;
use super::*;

struct Source(String);

impl FileResolver for Source {
    fn open_file(&self, name: &str) -> Result<File, protox::Error> {
        File::from_source(name, &self.0)
    }
}

/// The first message of a file of package `shop`. Its syntax is proto2 unless the source says otherwise.
fn compiled(source: &str) -> MessageDescriptor {
    let syntax = if source.contains("syntax") { "" } else { "syntax = \"proto2\"; " };
    let source = source.replace("syntax = \"proto3\";", "syntax = \"proto3\"; package shop;");
    let package = if syntax.is_empty() { "" } else { "package shop; " };
    let mut compiler = protox::Compiler::with_file_resolver(Source(format!("{syntax}{package}{source}")));
    compiler.open_file("test.proto").unwrap_or_else(|error| panic!("{source}: {error:?}"));
    let pool = DescriptorPool::from_file_descriptor_set(compiler.file_descriptor_set()).expect("compiled");
    pool.files().next().expect("one file").messages().next().expect("a message")
}

fn descriptor(source: &str) -> Vec<u8> {
    compiled(source).descriptor_proto().encode_to_vec()
}

fn table(columns: &[(&str, &str, bool)]) -> SchemaRef {
    let field = |(name, text, nullable): &(&str, &str, bool)| {
        Field::new(*name, types::parse(text).expect("a type"), *nullable)
    };
    SchemaRef::new(Schema::new(columns.iter().map(field).collect::<Vec<_>>()))
}

fn delimited<'a>(records: impl IntoIterator<Item = &'a [u8]>) -> Vec<u8> {
    let mut payload = Vec::new();
    for record in records {
        prost::encoding::encode_varint(record.len() as u64, &mut payload);
        payload.extend_from_slice(record);
    }
    payload
}

/// A field whose value has a length: `number` below 16.
fn field(number: u8, value: &[u8]) -> Vec<u8> {
    [&[number << 3 | 2, u8::try_from(value.len()).expect("short")][..], value].concat()
}

type Refused = Vec<(usize, Reason)>;

fn decode(decoder: &ProtobufDecoder, schema: &SchemaRef, payload: &[u8]) -> (RecordBatch, Refused) {
    let mut rows = Rows::new(schema.clone(), 1 << 16).expect("a table's schema").with_rows_up_to(1 << 20);
    let mut refused = Vec::new();
    let decoded = decoder
        .append_within(&mut rows, payload, BYTES_MAX, &mut |place, reason| refused.push((place, reason)));
    let (accepted, count) = (rows.count(), count_messages(payload).expect("framed"));
    assert_eq!(decoded, Decoded { accepted, refused: refused.len(), payload_bytes: payload.len() });
    assert_eq!(accepted + refused.len(), count);
    (rows.finish(), refused)
}

fn shown(batch: &RecordBatch, column: usize, row: usize) -> String {
    let options = FormatOptions::default().with_null("null");
    ArrayFormatter::try_new(batch.column(column), &options).expect("can be shown").value(row).to_string()
}

/// A message of `source` into columns: how the first is shown, or code and column of the refusal. Records that fit stand
/// around it and have to be there afterwards.
fn check_row(
    source: &str,
    columns: &[(&str, &str, bool)],
    record: &[u8],
    expected: Result<&str, (&str, &str)>,
) {
    let schema = table(columns);
    let decoder = ProtobufDecoder::new(&schema, &descriptor(source), UnknownFields::Ignore);
    let decoder = decoder.unwrap_or_else(|error| panic!("{source}: {error}"));
    let (batch, refused) = decode(&decoder, &schema, &delimited([record]));
    let got = match &refused[..] {
        [] => Ok(shown(&batch, 0, 0)),
        [(0, reason)] => {
            assert!(reason.message.chars().count() <= 200, "{}", reason.message);
            Err((reason.code, reason.column.clone().unwrap_or_default()))
        }
        more => panic!("{more:?}"),
    };
    let expected = expected.map(str::to_owned).map_err(|(code, column)| (code, column.to_owned()));
    assert_eq!(got, expected, "{source}: {record:02x?}: {refused:?}");
    let (again, refused_again) = decode(&decoder, &schema, &delimited([record, record]));
    assert_eq!((again.num_rows(), refused_again.len()), (2 * batch.num_rows(), 2 * refused.len()));
    assert!((0..again.num_rows()).all(|row| Ok(shown(&again, 0, row)) == got));
}

/// A field `c` into a column `c` of this type, which may not be null.
fn check(field: &str, column_type: &str, record: &[u8], expected: Result<&str, (&str, &str)>) {
    check_row(&format!("message M {{ {field} }}"), &[("c", column_type, false)], record, expected);
}

const WRONG: Result<&str, (&str, &str)> = Err(("wrong_type", "c"));
const RANGE: Result<&str, (&str, &str)> = Err(("out_of_range", "c"));
const MISSING: Result<&str, (&str, &str)> = Err(("missing_value", "c"));
const MINUS_ONE: [u8; 10] = [0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01];

fn varint_field(value: &[u8]) -> Vec<u8> {
    [&[0x08], value].concat()
}

#[test]
fn integers_take_integers_in_range() {
    for proto in ["int32", "int64"] {
        let field = format!("optional {proto} c = 1;");
        check(&field, "int64", &[0x08, 0x96, 0x01], Ok("150"));
        check(&field, "int8", &[0x08, 0x96, 0x01], RANGE);
        check(&field, "int16", &varint_field(&MINUS_ONE), Ok("-1"));
        check(&field, "int32", &[0x08, 0xff, 0xff, 0xff, 0xff, 0x0f], RANGE);
        check(&field, "decimal(5,2)", &[0x08, 0x07], Ok("7.00"));
        check(&field, "decimal(4,2)", &[0x08, 0x96, 0x01], RANGE);
    }
    check("optional int32 c = 1;", "int64", &[0x08, 0xff, 0xff, 0xff, 0xff, 0x0f], RANGE);
    check("optional uint32 c = 1;", "int64", &[0x08, 0xff, 0xff, 0xff, 0xff, 0x0f], Ok("4294967295"));
    check("optional uint32 c = 1;", "int64", &varint_field(&MINUS_ONE), RANGE);
    check("optional uint64 c = 1;", "int64", &varint_field(&MINUS_ONE), RANGE);
    check("optional uint64 c = 1;", "decimal(20,0)", &varint_field(&MINUS_ONE), Ok("18446744073709551615"));
    check("optional sint32 c = 1;", "int32", &[0x08, 0x03], Ok("-2"));
    check("optional sint64 c = 1;", "int64", &varint_field(&MINUS_ONE), Ok("-9223372036854775808"));
    check("optional fixed32 c = 1;", "int64", &[0x0d, 0xff, 0xff, 0xff, 0xff], Ok("4294967295"));
    check("optional sfixed32 c = 1;", "int32", &[0x0d, 0xff, 0xff, 0xff, 0xff], Ok("-1"));
    check("optional fixed64 c = 1;", "int64", &[0x09, 1, 0, 0, 0, 0, 0, 0, 0], Ok("1"));
    check("optional sfixed64 c = 1;", "int16", &[0x09, 1, 0, 0, 0, 0, 0, 0, 0x80], RANGE);
    check("optional int64 c = 1;", "int64", &[0x0d, 1, 0, 0, 0], WRONG);
    check("optional int64 c = 1;", "int64", &field(1, &[1]), WRONG);
    check("optional int64 c = 1;", "int64", &[0x0b, 0x0c], WRONG);
}

#[test]
fn plain_values() {
    check("optional bool c = 1;", "bool", &[0x08, 0x01], Ok("true"));
    check("optional bool c = 1;", "bool", &[0x08, 0x00], Ok("false"));
    check("optional float c = 1;", "float32", &[0x0d, 0, 0, 0x80, 0x3f], Ok("1.0"));
    check("optional float c = 1;", "float64", &[0x0d, 0, 0, 0x80, 0x3f], Ok("1.0"));
    check("optional double c = 1;", "float64", &[0x09, 0, 0, 0, 0, 0, 0, 0xf8, 0x7f], Ok("NaN"));
    check("optional string c = 1;", "string", &field(1, "é😀".as_bytes()), Ok("é😀"));
    check("optional string c = 1;", "string", &field(1, b""), Ok(""));
    check("optional string c = 1;", "string", &field(1, b"a\xff"), WRONG);
    check("optional bytes c = 1;", "binary", &field(1, b"a\xff"), Ok("61ff"));
    check("optional string c = 1;", "decimal(10,3)", &field(1, b"-1.5"), Ok("-1.500"));
    check("optional string c = 1;", "decimal(10,3)", &field(1, b"0.0001"), RANGE);
    check("optional string c = 1;", "decimal(10,3)", &field(1, b"x"), WRONG);
    check("optional int32 c = 1;", "date", &[0x08, 0x01], Ok("1970-01-02"));
    check("optional int32 c = 1;", "date", &[0x08, 0xff, 0xff, 0xff, 0xff, 0x07], RANGE);
    check("optional string c = 1;", "date", &field(1, b"2013-01-31"), Ok("2013-01-31"));
    check("optional string c = 1;", "date", &field(1, b"2013-02-31"), RANGE);
    check("optional int64 c = 1;", "timestamp", &[0x08, 0xc0, 0x84, 0x3d], Ok("1970-01-01T00:00:01Z"));
    check("optional int64 c = 1;", "timestamp_ntz", &[0x08, 0xc0, 0x84, 0x3d], Ok("1970-01-01T00:00:01"));
    check("optional sint64 c = 1;", "timestamp", &varint_field(&MINUS_ONE), RANGE);
    check(
        "optional string c = 1;",
        "timestamp",
        &field(1, b"2013-01-31T00:00:00Z"),
        Ok("2013-01-31T00:00:00Z"),
    );
    check("optional string c = 1;", "timestamp_ntz", &field(1, b"2013-01-31T00:00:00Z"), WRONG);
}

#[test]
fn enums_are_numbers_or_names() {
    let nested = "enum Color { RED = 0; BLUE = 5; } optional Color c = 1;";
    check(nested, "int32", &[0x08, 0x05], Ok("5"));
    check(nested, "int8", &varint_field(&MINUS_ONE), Ok("-1"));
    check(nested, "string", &[0x08, 0x05], Ok("BLUE"));
    check(nested, "string", &[0x08, 0x04], RANGE);
    let outside = "message M { optional Color c = 1; } enum Color { RED = 0; }";
    check_row(outside, &[("c", "int64", true)], &[0x08, 0x09], Ok("9"));
    check_open(outside, &[("c", "string", true)], Err(("schema_mismatch", "c")));
}

#[test]
fn the_last_value_counts() {
    check("optional int64 c = 1;", "int64", &[0x08, 1, 0x08, 2], Ok("2"));
    check("optional string c = 1;", "string", &[field(1, b"long"), field(1, b"x")].concat(), Ok("x"));
    let source = "message M { oneof which { string c = 1; int64 d = 2; S s = 3; int64 x = 4; }
        message S { optional int64 a = 1; } }";
    let columns = [("c", "string", true), ("d", "int64", true), ("s", "struct<a: int64>", true)];
    let c = field(1, b"x");
    check_row(source, &columns, &c, Ok("x"));
    check_row(source, &columns, &[&c[..], &[0x10, 7]].concat(), Ok("null"));
    check_row(source, &columns, &[&[0x10, 7], &c[..]].concat(), Ok("x"));
    check_row(source, &columns, &[&field(3, &[0x08, 1])[..], &c].concat(), Ok("x"));
    check_row(source, &columns, &[&c[..], &[0x20, 1]].concat(), Ok("null"));
    let reversed = [columns[2], columns[1], columns[0]];
    check_row(source, &reversed, &[field(3, &[0x08, 1]), field(3, &[])].concat(), Ok("{a: 1}"));
    check_row(
        source,
        &reversed,
        &[&field(3, &[0x08, 1])[..], &[0x10, 7], &field(3, &[])].concat(),
        Ok("{a: null}"),
    );
    // An optional field of proto3 has a oneof to itself.
    let proto3 = "syntax = \"proto3\"; message M { optional int64 c = 1; optional int64 d = 2; }";
    check_row(proto3, &[("c", "int64", true), ("d", "int64", true)], &[0x08, 1, 0x10, 2], Ok("1"));
}

#[test]
fn repeated_fields_are_lists() {
    let ints = "repeated int64 c = 1;";
    check(ints, "list<int64>", &[0x08, 1, 0x08, 2], Ok("[1, 2]"));
    check(ints, "list<int64>", &field(1, &[1, 2, 0x96, 0x01]), Ok("[1, 2, 150]"));
    check(
        ints,
        "list<int64>",
        &[&[0x08, 9], &field(1, &[1, 2])[..], &[0x08, 3]].concat(),
        Ok("[9, 1, 2, 3]"),
    );
    check(ints, "list<int64>", &field(1, &[]), Ok("[]"));
    check(ints, "list<int64>", &[], Ok("[]"));
    check_row("message M { repeated int64 c = 1; }", &[("c", "list<int64>", true)], &[], Ok("null"));
    check(ints, "list<int8 not null>", &field(1, &[1, 0x96, 0x01]), Err(("out_of_range", "c[1]")));
    check(ints, "list<int64>", &field(1, &[1, 0x96]), Err(("not_protobuf", "c[1]")));
    check("repeated double c = 1;", "list<float64>", &field(1, &[0; 9]), Err(("not_protobuf", "c[1]")));
    check("repeated bool c = 1;", "list<bool>", &field(1, &[1, 0]), Ok("[true, false]"));
    check("repeated string c = 1;", "list<string>", &[field(1, b"a"), field(1, b"")].concat(), Ok("[a, ]"));
    check("repeated string c = 1;", "list<string>", &[0x08, 1], WRONG);
    let source = "message M { repeated int64 c = 1; repeated string d = 2; }";
    let columns = [("c", "list<int64>", true), ("d", "list<string>", true)];
    check_row(source, &columns, &[&[0x08, 1], &field(2, b"x")[..], &[0x08, 2]].concat(), Ok("[1, 2]"));
    let structs = "message S { optional int64 a = 1; required string b = 2; } repeated S c = 1;";
    let (one, two) = (field(1, &field(2, b"x")), field(1, &[&field(2, b"y")[..], &[0x08, 7]].concat()));
    check(structs, "list<struct<a: int64, b: string>>", &[&one[..], &two].concat(), {
        Ok("[{a: null, b: x}, {a: 7, b: y}]")
    });
    check(structs, "list<struct<a: int64, b: string>>", &[&one[..], &field(1, &[0x08, 1])].concat(), {
        Err(("missing_value", "c[1].b"))
    });
}

#[test]
fn messages_are_structs_and_merge() {
    let nested =
        "message S { optional int64 a = 1; repeated int64 l = 2; optional S s = 3; } optional S c = 1;";
    let to = "struct<a: int64, l: list<int64>, s: struct<a: int64>>";
    check(nested, to, &field(1, &[]), Ok("{a: null, l: null, s: null}"));
    let first = [&[0x08, 1, 0x10, 1][..], &field(3, &[0x08, 5])].concat();
    let second = [&[0x10, 2, 0x08, 2][..], &field(3, &[])].concat();
    check(nested, to, &[field(1, &first), field(1, &second)].concat(), Ok("{a: 2, l: [1, 2], s: {a: 5}}"));
    check(nested, to, &[], MISSING);
    check(nested, to, &field(1, &[0x0a, 1, 1]), Err(("wrong_type", "c.a")));
    check(nested, to, &field(1, &field(3, &field(1, b"x"))), Err(("wrong_type", "c.s.a")));
    check(nested, "struct<a: int64 not null>", &field(1, &[]), Err(("missing_value", "c.a")));
    check(nested, "struct<a: int64 not null>", &[field(1, &[]), field(1, &[0x08, 3])].concat(), Ok("{a: 3}"));
}

#[test]
fn map_entries_have_defaults() {
    let map = "map<string, int64> c = 1;";
    let entry = |key: &[u8], value: u8| field(1, &[&field(1, key)[..], &[0x10, value]].concat());
    check(map, "map<string, int64>", &[entry(b"x", 1), entry(b"y", 2)].concat(), Ok("{x: 1, y: 2}"));
    check(map, "map<string, int64>", &field(1, &[]), Ok("{: 0}"));
    check(
        map,
        "map<string, int64>",
        &field(1, &[&[0x10, 7, 0x10, 8], &field(1, b"k")[..]].concat()),
        Ok("{k: 8}"),
    );
    check(
        map,
        "map<string, int64>",
        &[entry(b"x", 1), entry(b"x", 2)].concat(),
        Err(("duplicate_field", "c.x")),
    );
    let many: Vec<Vec<u8>> = (0..20).chain([3]).map(|n| entry(&[b'a' + n], n)).collect();
    check(map, "map<string, int64>", &many.concat(), Err(("duplicate_field", "c.d")));
    check(map, "map<string, int64>", &[], Ok("{}"));
    check(
        "map<int32, string> c = 1;",
        "map<string, string>",
        &field(1, &[&[0x08, 7], &field(2, b"x")[..]].concat()),
        Ok("{7: x}"),
    );
    check("map<bool, string> c = 1;", "map<string, string>", &field(1, &[0x08, 1]), Ok("{true: }"));
    check("map<fixed64, bool> c = 1;", "map<string, bool>", &field(1, &[]), Ok("{0: false}"));
    check("map<string, string> c = 1;", "map<string, decimal(5,1)>", &field(1, &[]), WRONG);
    check("enum E { A = 0; } map<string, E> c = 1;", "map<string, string>", &field(1, &[]), Ok("{: A}"));
    check(
        map,
        "map<string, int8>",
        &[entry(b"x", 1), entry(b"y", 200)].concat(),
        Err(("not_protobuf", "c.y")),
    );
    let structs = "message S { optional int64 a = 1; } map<string, S> c = 1;";
    let merged = [field(2, &[0x08, 1]), field(1, b"k"), field(2, &[])].concat();
    check(structs, "map<string, struct<a: int64>>", &field(1, &merged), Ok("{k: {a: 1}}"));
    check(structs, "map<string, struct<a: int64>>", &field(1, &field(1, b"k")), Ok("{k: {a: null}}"));
    check(structs, "map<string, struct<a: int64 not null>>", &field(1, &field(1, b"k")), {
        Err(("missing_value", "c.k.a"))
    });
}

#[test]
fn what_is_absent_is_null_or_refused() {
    check("optional int64 c = 1;", "int64", &[], MISSING);
    check("optional int64 c = 1 [default = 5];", "int64", &[], MISSING);
    check_row("message M { required int64 c = 1; }", &[("c", "int64", true)], &[], MISSING);
    check_row("message M { optional int64 c = 1; }", &[("c", "int64", true)], &[], Ok("null"));
    check_row(
        "message M { optional int64 d = 1; }",
        &[("c", "int64", true), ("d", "int64", true)],
        &[],
        Ok("null"),
    );
    check_row("syntax = \"proto3\"; message M { int64 c = 1; }", &[("c", "int64", true)], &[], Ok("null"));
}

#[test]
fn unknown_numbers_are_skipped() {
    let unknown = [
        &[0x20, 1, 0x2d, 1, 2, 3, 4, 0x31, 1, 2, 3, 4, 5, 6, 7, 8][..],
        &field(9, b"x"),
        &[0x53, 0x08, 1, 0x54],
    ];
    let record = [&unknown.concat()[..], &[0x08, 7], &[0xc0, 0x80, 0x80, 0x01, 5]].concat();
    check("optional int64 c = 1;", "int64", &record, Ok("7"));
    check("optional int64 d = 4; optional int64 c = 1;", "int64", &record, Ok("7"));
    check("optional int64 c = 536870911;", "int64", &[0xf8, 0xff, 0xff, 0xff, 0x0f, 3], Ok("3"));
}

#[test]
fn what_is_no_message_is_refused_by_name() {
    let none = Err(("not_protobuf", ""));
    for record in [
        &[0x08, 1, 0x80][..],
        &[0x00, 0x01],
        &[0x08, 1, 0x0e],
        &[0x08, 1, 0x13],
        &[0x08, 1, 0x14],
        &[0x12, 5, 1],
        &MINUS_ONE,
        b"{\"c\":1}",
    ] {
        check("optional int64 c = 1;", "int64", record, none);
    }
    let named = Err(("not_protobuf", "c"));
    check("optional int64 c = 1;", "int64", &[0x08, 0x80], named);
    check("optional string c = 1;", "string", &[0x0a, 5, b'x'], named);
    check("optional string c = 1;", "string", &[&[0x0a], &MINUS_ONE[..]].concat(), named);
    check("optional double c = 1;", "float64", &[0x09, 1], named);
}

/// What opening a stream answers, with fields that the table does not have refused.
fn check_open(source: &str, columns: &[(&str, &str, bool)], expected: Result<(), (&str, &str)>) {
    let opened = ProtobufDecoder::new(&table(columns), &descriptor(source), UnknownFields::Refuse);
    let got =
        opened.map(drop).map_err(|error| (error.code.clone(), error.column.clone().unwrap_or_default()));
    assert_eq!(got, expected.map_err(|(code, column)| (code.to_owned(), column.to_owned())), "{source}");
}

#[test]
fn what_does_not_fit_is_refused_at_open() {
    let check = |fields: &str, column_type: &str, expected| {
        check_open(&format!("message M {{ {fields} }}"), &[("c", column_type, true)], expected);
    };
    let mismatch = Err(("schema_mismatch", "c"));
    for (fields, column_type) in [
        ("optional string c = 1;", "int64"),
        ("optional int64 c = 1;", "string"),
        ("optional int64 c = 1;", "float64"),
        ("optional double c = 1;", "float32"),
        ("optional bytes c = 1;", "string"),
        ("optional bool c = 1;", "int8"),
        ("optional int64 c = 1;", "date"),
        ("optional int32 c = 1;", "timestamp"),
        ("repeated int64 c = 1;", "int64"),
        ("optional int64 c = 1;", "list<int64>"),
        ("repeated int64 c = 1;", "list<list<int64>>"),
        ("repeated group C = 1 { optional int64 a = 1; }", "list<struct<a: int64>>"),
        ("map<string, int64> c = 1;", "list<struct<key: string, value: int64>>"),
        ("map<string, int64> c = 1;", "map<string, string>"),
        ("message S { optional int64 a = 1; } optional S c = 1;", "int64"),
        ("message S { optional int64 a = 1; } optional S c = 1;", "map<string, int64>"),
    ] {
        check(fields, column_type, mismatch);
    }
    check("optional int64 c = 1;", "int64", Ok(()));
    check("optional int64 c = 1; optional int64 d = 2;", "int64", Err(("unknown_field", "d")));
    let nested = "message S { optional int64 a = 1; optional int64 z = 2; } optional S c = 1;";
    check(nested, "struct<a: int64>", Err(("unknown_field", "c.z")));
    check(nested, "struct<a: string, z: int64>", Err(("schema_mismatch", "c.a")));
    check(nested, "struct<a: int64, z: int64, y: int64 not null>", Err(("schema_mismatch", "c.y")));
    check_open("message M { optional int64 c = 1; }", &[("c", "int64", true), ("d", "int64", false)], {
        Err(("schema_mismatch", "d"))
    });
    let outside = "message M { optional T c = 1; } message T { optional int64 a = 1; }";
    check_open(outside, &[("c", "struct<a: int64>", true)], mismatch);
}

#[test]
fn what_is_no_descriptor_is_refused_at_open() {
    let schema = table(&[("c", "int64", true)]);
    let whole = |change: &dyn Fn(&mut DescriptorProto)| {
        let mut root =
            compiled("message M { optional int64 c = 1; optional int64 d = 2; }").descriptor_proto().clone();
        change(&mut root);
        ProtobufDecoder::new(&schema, &root.encode_to_vec(), UnknownFields::Ignore)
            .err()
            .map(|error| error.code)
    };
    assert_eq!(whole(&|_| {}), None);
    let invalid = Some("invalid_descriptor".to_owned());
    assert_eq!(whole(&|root| root.name = None), invalid);
    assert_eq!(whole(&|root| root.field[0].number = Some(0)), invalid);
    assert_eq!(whole(&|root| root.field[0].number = Some(-1)), invalid);
    assert_eq!(whole(&|root| root.field[0].number = Some(2)), invalid);
    assert_eq!(whole(&|root| root.field[0].name = Some("d".into())), invalid);
    assert_eq!(whole(&|root| root.field[0].r#type = None), Some("schema_mismatch".to_owned()));
    assert_eq!(whole(&|root| root.field[0].oneof_index = Some(9)), None);
    for bytes in [&b""[..], b"{}", b"\xff", &[0x0a, 9]] {
        assert!(ProtobufDecoder::new(&schema, bytes, UnknownFields::Ignore).is_err(), "{bytes:?}");
    }
}

#[test]
fn a_large_message_in_many_fields_is_refused() {
    let mut root =
        compiled("message M { message S { optional int64 a = 1; } optional S c = 1; optional S d = 2; }")
            .descriptor_proto()
            .clone();
    let schema = table(&[("c", "struct<a: int64>", true), ("d", "struct<a: int64>", true)]);
    let field = root.nested_type[0].field[0].clone();
    let wide =
        |n: i32| FieldDescriptorProto { name: Some(format!("f{n}")), number: Some(n), ..field.clone() };
    root.nested_type[0].field.extend((2..60_000).map(wide));
    let error =
        ProtobufDecoder::new(&schema, &root.encode_to_vec(), UnknownFields::Ignore).err().expect("too much");
    assert_eq!(error.code, "invalid_descriptor", "{error}");
    root.field.truncate(1);
    assert!(ProtobufDecoder::new(&schema, &root.encode_to_vec(), UnknownFields::Ignore).is_ok());
}

#[test]
fn a_table_is_made_of_a_descriptor() {
    let source = "message M {
        required double a = 1; optional float b = 2; optional int32 c = 3; optional sfixed64 d = 4;
        optional uint32 e = 5; optional uint64 f = 6; optional bool g = 7; optional string h = 8;
        optional bytes i = 9; optional E j = 10; repeated S k = 11; map<int32, S> l = 12;
        enum E { ZERO = 0; } message S { repeated string x = 1; optional .shop.M.E y = 2; } }";
    let schema = table_schema(&descriptor(source)).expect("columns");
    let column =
        |field: &std::sync::Arc<Field>| format!("{} {}", field.name(), types::text(field.data_type()));
    assert!(schema.fields().iter().all(|field| field.is_nullable()));
    assert_eq!(
        schema.fields().iter().map(column).collect::<Vec<_>>().join("; "),
        "a float64; b float32; c int32; d int64; e int64; f decimal(20,0); g bool; h string; i binary; j int32; \
         k list<struct<x: list<string>, y: int32>>; l map<string, struct<x: list<string>, y: int32>>"
    );
    assert!(ProtobufDecoder::new(&schema, &descriptor(source), UnknownFields::Refuse).is_ok());
    let endless = "message M { optional int64 a = 1; optional M m = 2; }";
    assert_eq!(table_schema(&descriptor(endless)).expect_err("endless").code, "unsupported_type");
    check_row(endless, &[("m", "struct<m: struct<a: int64>>", true)], &field(2, &field(2, &[0x08, 3])), {
        Ok("{m: {a: 3}}")
    });
    let outside = "message M { optional T t = 1; } message T { optional int64 a = 1; }";
    let error = table_schema(&descriptor(outside)).expect_err("not nested");
    assert_eq!((error.code.as_str(), error.column.as_deref()), ("unsupported_type", Some("t")));
}

#[test]
fn a_small_record_that_becomes_a_large_row_is_refused() {
    let fields: Vec<String> = (1..=1000).map(|n| format!("f{n}: int64")).collect();
    let source = "message M { repeated S c = 1; oneof o { S a = 2; bool b = 3; } message S { optional int64 f1 = 1; } }";
    let wide = format!("struct<{}>", fields.join(", "));
    let columns = [("c", &*format!("list<{wide}>"), true), ("a", &*wide, true), ("b", "bool", true)];
    let large = Err(("record_too_large", ""));
    check_row(source, &columns, &field(1, &[]).repeat(1000), Err(("record_too_large", "c")));
    check_row(source, &columns, &[&field(2, &[])[..], &[0x18, 1]].concat().repeat(1000), large);
    check_row(
        source,
        &columns,
        &field(1, &[]),
        Ok(&format!("[{{{}}}]", fields.join(", ").replace("int64", "null"))),
    );
}

#[test]
fn a_record_over_the_limit_is_refused_unread() {
    let long = [&[0x0a, 0x80, 0x80, 0x08][..], &[b'x'; 1 << 17]].concat();
    check("optional string c = 1;", "string", &long, Err(("record_too_large", "")));
}

#[test]
fn a_bound_on_bytes_stops_between_records() {
    let schema = table(&[("a", "int64", true), ("b", "int64", true)]);
    let source = "message M { optional int64 a = 1; optional int64 b = 2; }";
    let decoder = ProtobufDecoder::new(&schema, &descriptor(source), UnknownFields::Refuse).expect("fits");
    let mut rows = Rows::new(schema, 1000).expect("a schema");
    let payload = vec![0; 1000];
    let decoded = decoder.append_within(&mut rows, &payload, 2000, &mut |_, _| {});
    assert!(rows.bytes() >= 2000 && rows.bytes() < 2000 + 64 * 20, "{decoded:?}");
    assert_eq!((decoded.accepted, decoded.payload_bytes), (rows.count(), rows.count()));
}

const MODEL: &str = "message M {
    optional int64 i = 1; optional double f = 2; optional string s = 3; repeated int64 l = 4 [packed = true];
    optional O o = 5; map<string, int64> m = 6; optional string d = 7; repeated O os = 20; optional sint32 z = 2000;
    repeated sfixed32 u = 9; optional bool b = 10; optional int64 t = 11; optional int32 day = 12;
    message O { required int64 a = 1; repeated string b = 2; optional O o = 3; }
}";
const MODEL_COLUMNS: [(&str, &str, bool); 13] = [
    ("i", "int64", false),
    ("f", "float64", true),
    ("s", "string", true),
    ("l", "list<int64>", true),
    ("o", "struct<a: int64 not null, b: list<string>, o: struct<a: int64 not null>>", true),
    ("m", "map<string, int64>", true),
    ("d", "decimal(12,2)", true),
    ("os", "list<struct<a: int64 not null, b: list<string>>>", true),
    ("z", "int16", true),
    ("u", "list<int32 not null>", false),
    ("b", "bool", true),
    ("t", "timestamp", true),
    ("day", "date", true),
];

type Plain = (i64, Option<i32>, Option<String>, Vec<i64>, Option<bool>, Option<i64>);
type Nested =
    (Option<(i64, Vec<String>)>, Vec<(i64, Vec<String>)>, Vec<(String, i64)>, Option<i16>, Vec<i32>);

fn plain() -> impl Strategy<Value = Plain> {
    let us = -62_135_596_800_000_000_i64..253_402_300_800_000_000;
    (
        any::<i64>(),
        any::<Option<i32>>(),
        prop::option::of("\\PC{0,9}"),
        prop::collection::vec(any::<i64>(), 0..4),
        any::<Option<bool>>(),
        prop::option::of(us),
    )
}

fn nested() -> impl Strategy<Value = Nested> {
    let o = || (any::<i64>(), prop::collection::vec("\\PC{0,3}", 0..3));
    (
        prop::option::of(o()),
        prop::collection::vec(o(), 0..3),
        prop::collection::btree_map("[a-z]{0,2}", any::<i64>(), 0..12)
            .prop_map(|map| map.into_iter().collect()),
        any::<Option<i16>>(),
        prop::collection::vec(any::<i32>(), 0..3),
    )
}

/// As JSON has it: what is empty is left out, since protobuf does not tell it from null.
fn as_json((i, f, s, l, b, t): &Plain, (o, os, m, z, u): &Nested) -> String {
    let object = |(a, b): &(i64, Vec<String>)| match b.is_empty() {
        true => json!({"a": a}),
        false => json!({"a": a, "b": b}),
    };
    let mut record = json!({"i": i, "f": f.map(|f| f64::from(f) / 4.0), "s": s, "b": b, "t": t, "z": z, "u": u,
        "d": f.map(|f| format!("{f}.25")), "day": z});
    if !l.is_empty() {
        record["l"] = json!(l);
    }
    if !os.is_empty() {
        record["os"] = os.iter().map(object).collect();
    }
    if let Some(o) = o {
        record["o"] = object(o);
    }
    if !m.is_empty() {
        record["m"] =
            serde_json::Value::Object(m.iter().map(|(key, value)| (key.clone(), json!(value))).collect());
    }
    record.to_string()
}

fn as_message(of: &MessageDescriptor, (i, f, s, l, b, t): &Plain, (o, os, m, z, u): &Nested) -> Vec<u8> {
    let mut message = DynamicMessage::new(of.clone());
    let inner = of.child_messages().find(|message| message.name() == "O").expect("nested");
    let object = |(a, b): &(i64, Vec<String>)| {
        let mut object = DynamicMessage::new(inner.clone());
        object.set_field_by_name("a", Value::I64(*a));
        object.set_field_by_name("b", Value::List(b.iter().cloned().map(Value::String).collect()));
        Value::Message(object)
    };
    let mut set = |name: &str, value: Option<Value>| {
        if let Some(value) = value {
            message.set_field_by_name(name, value);
        }
    };
    set("i", Some(Value::I64(*i)));
    set("f", f.map(|f| Value::F64(f64::from(f) / 4.0)));
    set("s", s.clone().map(Value::String));
    set("l", Some(Value::List(l.iter().copied().map(Value::I64).collect())));
    set("o", o.as_ref().map(object));
    let entry = |(key, value): &(String, i64)| (MapKey::String(key.clone()), Value::I64(*value));
    set("m", Some(Value::Map(m.iter().map(entry).collect())));
    set("d", f.map(|f| Value::String(format!("{f}.25"))));
    set("os", Some(Value::List(os.iter().map(object).collect())));
    set("z", z.map(|z| Value::I32(z.into())));
    set("u", Some(Value::List(u.iter().copied().map(Value::I32).collect())));
    set("b", b.map(Value::Bool));
    set("t", t.map(Value::I64));
    set("day", z.map(|z| Value::I32(z.into())));
    message.encode_to_vec()
}

fn model() -> (SchemaRef, ProtobufDecoder) {
    let schema = table(&MODEL_COLUMNS);
    let decoder = ProtobufDecoder::new(&schema, &descriptor(MODEL), UnknownFields::Ignore).expect("fits");
    (schema, decoder)
}

/// Maps of `prost-reflect` come in any order.
fn rows_of(batch: &RecordBatch) -> Vec<Vec<String>> {
    let sorted = |column: usize, row: usize| {
        let text = shown(batch, column, row);
        let mut entries: Vec<&str> = text.trim_matches(['{', '}']).split(", ").collect();
        entries.sort_unstable();
        if column == 5 { entries.join(", ") } else { text }
    };
    (0..batch.num_rows())
        .map(|row| (0..batch.num_columns()).map(|column| sorted(column, row)).collect())
        .collect()
}

proptest! {
    #[test]
    fn the_same_values_as_json_and_as_protobuf_are_the_same_rows(
        records in prop::collection::vec((plain(), nested()), 0..12),
    ) {
        let (schema, decoder) = model();
        let of = compiled(MODEL);
        let mut json = JsonDecoder::new(schema.clone(), 1 << 20).expect("a schema");
        let lines: Vec<String> = records.iter().map(|(plain, nested)| as_json(plain, nested)).collect();
        let refuse = &mut |place: usize, reason| panic!("{}: {reason:?}", lines[place]);
        json.append(lines.join("\n").as_bytes(), UnknownFields::Refuse, refuse);
        let from_json = json.finish();
        let messages: Vec<Vec<u8>> = records.iter().map(|(plain, nested)| as_message(&of, plain, nested)).collect();
        let (batch, refused) = decode(&decoder, &schema, &delimited(messages.iter().map(Vec::as_slice)));
        prop_assert_eq!(&refused, &Vec::new());
        let other_columns = |batch: &RecordBatch| {
            let columns: Vec<usize> = (0..batch.num_columns()).filter(|column| *column != 5).collect();
            batch.project(&columns).expect("columns")
        };
        prop_assert_eq!(other_columns(&batch), other_columns(&from_json));
        prop_assert_eq!(rows_of(&batch), rows_of(&from_json));
    }

    #[test]
    fn any_bytes_are_decoded_or_refused(records in prop::collection::vec(any::<Vec<u8>>(), 0..8)) {
        let (schema, decoder) = model();
        decode(&decoder, &schema, &delimited(records.iter().map(Vec::as_slice)));
    }

    #[test]
    fn damaged_messages_leave_those_around_them(
        (before, damaged, after) in ((plain(), nested()), (plain(), nested()), (plain(), nested())),
        flips in prop::collection::vec((any::<prop::sample::Index>(), 0..8_u32), 0..4),
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let (schema, decoder) = model();
        let of = compiled(MODEL);
        let [before, mut damaged, after] =
            [before, damaged, after].map(|(plain, nested)| as_message(&of, &plain, &nested));
        for (place, bit) in flips {
            let place = place.index(damaged.len());
            damaged[place] ^= 1 << bit;
        }
        if let Some(cut) = cut {
            damaged.truncate(cut.index(damaged.len()));
        }
        let (batch, refused) = decode(&decoder, &schema, &delimited([&before[..], &damaged, &after]));
        prop_assert!(refused.iter().all(|(place, _)| *place == 1), "{refused:?}");
        let (whole, _) = decode(&decoder, &schema, &delimited([&before[..], &after]));
        prop_assert_eq!(batch.slice(0, 1), whole.slice(0, 1));
        prop_assert_eq!(batch.slice(batch.num_rows() - 1, 1), whole.slice(1, 1));
    }

    #[test]
    fn damaged_descriptors_are_read_or_refused(
        flips in prop::collection::vec((any::<prop::sample::Index>(), 0..8_u32), 1..6),
        record: Vec<u8>,
    ) {
        let mut bytes = descriptor(MODEL);
        for (place, bit) in flips {
            let place = place.index(bytes.len());
            bytes[place] ^= 1 << bit;
        }
        let _ = table_schema(&bytes);
        let schema = table(&MODEL_COLUMNS);
        if let Ok(decoder) = ProtobufDecoder::new(&schema, &bytes, UnknownFields::Ignore) {
            decode(&decoder, &schema, &delimited([&record[..]]));
        }
    }
}
