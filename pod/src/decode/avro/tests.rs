//! Avro data against the rows that they become.
//!
//! *Owns*: the cases of `avro`, its equivalence with JSON, bytes that are no data. Data is written by hand.
//! *Does not own*: what columns do with integers and texts beyond one case each (`protobuf/tests`).

use arrow::array::RecordBatch;
use arrow::datatypes::{Field, Schema};
use arrow::util::display::{ArrayFormatter, FormatOptions};
use proptest::prelude::*;
use serde_json::json;
use sluice_shared::frame::count_messages;

use super::super::json::JsonDecoder;
use super::super::rows::BYTES_MAX;
use super::*;

fn table(columns: &[(&str, &str, bool)]) -> SchemaRef {
    let field = |(name, text, nullable): &(&str, &str, bool)| {
        Field::new(*name, types::parse(text).expect("a type"), *nullable)
    };
    SchemaRef::new(Schema::new(columns.iter().map(field).collect::<Vec<_>>()))
}

/// A record's schema; each field is a name and the JSON of its type.
fn record(fields: &[(&str, &str)]) -> Vec<u8> {
    let field = |(name, of): &(&str, &str)| format!(r#"{{"name":"{name}","type":{of}}}"#);
    let fields: Vec<String> = fields.iter().map(field).collect();
    format!(r#"{{"type":"record","name":"R","namespace":"shop","fields":[{}]}}"#, fields.join(","))
        .into_bytes()
}

fn long(value: i64) -> Vec<u8> {
    let mut bytes = Vec::new();
    prost::encoding::encode_varint(((value << 1) ^ (value >> 63)).cast_unsigned(), &mut bytes);
    bytes
}

fn text(value: &str) -> Vec<u8> {
    [long(value.len() as i64), value.as_bytes().to_vec()].concat()
}

/// Elements as one block, then the end.
fn block(elements: &[Vec<u8>]) -> Vec<u8> {
    match elements {
        [] => vec![0],
        some => [long(some.len() as i64), some.concat(), vec![0]].concat(),
    }
}

fn delimited<'a>(records: impl IntoIterator<Item = &'a [u8]>) -> Vec<u8> {
    let mut payload = Vec::new();
    for record in records {
        prost::encoding::encode_varint(record.len() as u64, &mut payload);
        payload.extend_from_slice(record);
    }
    payload
}

fn decode(decoder: &AvroDecoder, schema: &SchemaRef, payload: &[u8]) -> (RecordBatch, Vec<(usize, Reason)>) {
    let mut rows = Rows::new(schema.clone(), 1 << 16).expect("a table's schema").with_rows_up_to(1 << 20);
    let mut refused = Vec::new();
    let refuse = &mut |place, reason| refused.push((place, reason));
    let decoded = decoder.append_within(&mut rows, payload, BYTES_MAX, refuse);
    let (accepted, count) = (rows.count(), count_messages(payload).expect("framed"));
    assert_eq!(decoded, Decoded { accepted, refused: refused.len(), payload_bytes: payload.len() });
    assert_eq!(accepted + refused.len(), count);
    (rows.finish(), refused)
}

/// A datum into a column `c` of this type, which may not be null: how it is shown, or code and column of the refusal.
/// Fields around it are in no column.
fn check(of: &str, column_type: &str, datum: &[u8], expected: Result<&str, (&str, &str)>) {
    let schema = table(&[("c", column_type, false)]);
    let around = r#"{"type":"record","name":"Skipped","fields":[{"name":"a","type":["null",{"type":"array","items":
        {"type":"map","values":"Skipped"}}]},{"name":"b","type":"string"}]}"#;
    let avro = record(&[("before", around), ("c", of), ("after", "\"shop.Skipped\"")]);
    let decoder = AvroDecoder::new(&schema, &avro, UnknownFields::Ignore);
    let decoder = decoder.unwrap_or_else(|error| panic!("{of}: {error}"));
    let inner = [&[0][..], &text("y")].concat();
    let before = [long(1), block(&[block(&[[text("k"), inner.clone()].concat()])]), text("x")].concat();
    let whole = [&before[..], datum, &inner].concat();
    let (batch, refused) = decode(&decoder, &schema, &delimited([&whole[..], &whole]));
    let options = FormatOptions::default().with_null("null");
    let got = match &refused[..] {
        [] => {
            let formatter = ArrayFormatter::try_new(batch.column(0), &options).expect("can be shown");
            assert_eq!(formatter.value(0).to_string(), formatter.value(1).to_string());
            Ok(formatter.value(0).to_string())
        }
        [(0, reason), (1, _)] => {
            assert!(reason.message.chars().count() <= 200, "{}", reason.message);
            Err((reason.code, reason.column.clone().unwrap_or_default()))
        }
        more => panic!("{more:?}"),
    };
    let expected = expected.map(str::to_owned).map_err(|(code, column)| (code, column.to_owned()));
    assert_eq!(got, expected, "{of} into {column_type}: {refused:?}");
}

const WRONG: Result<&str, (&str, &str)> = Err(("wrong_type", "c"));
const RANGE: Result<&str, (&str, &str)> = Err(("out_of_range", "c"));
const NOT_AVRO: Result<&str, (&str, &str)> = Err(("not_avro", "c"));

fn logical(of: &str, logical: &str) -> String {
    format!(r#"{{"type":"{of}","logicalType":"{logical}"}}"#)
}

#[test]
fn plain_values() {
    check("\"boolean\"", "bool", &[1], Ok("true"));
    check("\"boolean\"", "bool", &[2], NOT_AVRO);
    check("\"int\"", "int8", &long(-128), Ok("-128"));
    check("\"int\"", "int8", &long(128), RANGE);
    check("\"int\"", "int64", &long(1 << 40), NOT_AVRO);
    check("\"long\"", "int64", &long(i64::MIN), Ok("-9223372036854775808"));
    check("\"long\"", "decimal(5,2)", &long(7), Ok("7.00"));
    check("\"float\"", "float64", &1.5_f32.to_le_bytes(), Ok("1.5"));
    check("\"double\"", "float64", &0.1_f64.to_le_bytes(), Ok("0.1"));
    check("\"string\"", "string", &text("é😀"), Ok("é😀"));
    check("\"string\"", "string", &[2, 0xff], WRONG);
    check("\"string\"", "string", &long(-5), NOT_AVRO);
    check("\"string\"", "date", &text("2013-01-31"), Ok("2013-01-31"));
    check("\"bytes\"", "binary", &[4, 1, 0xff], Ok("01ff"));
    check(r#"{"type":"fixed","name":"F","size":2}"#, "binary", &[1, 2], Ok("0102"));
    check(r#"{"type":"enum","name":"E","symbols":["A","B"]}"#, "string", &long(1), Ok("B"));
    check(r#"{"type":"enum","name":"E","symbols":["A","B"]}"#, "string", &long(2), NOT_AVRO);
    check(r#"["null","long"]"#, "int64", &[2, 2], Ok("1"));
    check(r#"["null","long"]"#, "int64", &[0], Err(("missing_value", "c")));
    check(r#"["null","long","int"]"#, "int64", &[4, 4], Ok("2"));
    check(r#"["null","long"]"#, "int64", &[4, 4], NOT_AVRO);
}

#[test]
fn logical_types() {
    check(&logical("int", "date"), "date", &long(1), Ok("1970-01-02"));
    check("\"int\"", "date", &long(1), Ok("1970-01-02"));
    check(&logical("long", "timestamp-millis"), "timestamp", &long(1500), Ok("1970-01-01T00:00:01.500Z"));
    check(&logical("long", "timestamp-millis"), "timestamp", &long(i64::MAX), RANGE);
    check(&logical("long", "timestamp-micros"), "timestamp", &long(1500), Ok("1970-01-01T00:00:00.001500Z"));
    check(&logical("long", "timestamp-nanos"), "timestamp", &long(2000), Ok("1970-01-01T00:00:00.000002Z"));
    check(&logical("long", "timestamp-nanos"), "timestamp", &long(2001), RANGE);
    check(&logical("long", "local-timestamp-micros"), "timestamp_ntz", &long(0), Ok("1970-01-01T00:00:00"));
    check("\"long\"", "timestamp", &long(0), Ok("1970-01-01T00:00:00Z"));
    check(&logical("string", "uuid"), "string", &text("u"), Ok("u"));
    let decimal = r#"{"type":"bytes","logicalType":"decimal","precision":9,"scale":2}"#;
    check(decimal, "decimal(10,3)", &[4, 0x30, 0x39], Ok("123.450"));
    check(decimal, "decimal(10,2)", &[2, 0xff], Ok("-0.01"));
    check(decimal, "decimal(4,2)", &[6, 0, 0x30, 0x39], RANGE);
    check(decimal, "decimal(4,2)", &[0], Ok("0.00"));
    check(decimal, "decimal(38,2)", &[&[38][..], &[0xff; 18], &[0x9c]].concat(), Ok("-1.00"));
    check(decimal, "decimal(38,2)", &[&[38, 1][..], &[0; 18]].concat(), RANGE);
    let fixed = r#"{"type":"fixed","name":"D","size":2,"logicalType":"decimal","precision":4,"scale":1}"#;
    check(fixed, "decimal(4,1)", &[0, 15], Ok("1.5"));
}

#[test]
fn nested_values_and_the_paths_of_their_faults() {
    let longs = r#"{"type":"array","items":"long"}"#;
    check(longs, "list<int64>", &[0], Ok("[]"));
    check(longs, "list<int64>", &[4, 2, 4, 2, 6, 0], Ok("[1, 2, 3]"));
    check(longs, "list<int64>", &[3, 4, 2, 4, 0], Ok("[1, 2]"));
    check(longs, "list<int8>", &block(&[long(1), long(300)]), Err(("out_of_range", "c[1]")));
    check(r#"{"type":"array","items":["null","long"]}"#, "list<int64>", &block(&[vec![0], vec![2, 2]]), {
        Ok("[null, 1]")
    });
    let nested = r#"{"type":"record","name":"S","fields":[{"name":"a","type":"long"},{"name":"b","type":["null","S"]}]}"#;
    let to = "struct<a: int64, b: struct<a: int8, d: bool>>";
    check(nested, to, &[2, 0], Ok("{a: 1, b: null}"));
    check(nested, to, &[2, 2, 4, 0], Ok("{a: 1, b: {a: 2, d: null}}"));
    check(nested, to, &[&[2, 2][..], &long(300), &[0]].concat(), Err(("out_of_range", "c.b.a")));
    let map = r#"{"type":"map","values":"long"}"#;
    let entry = |key: &str, value: i64| [text(key), long(value)].concat();
    check(map, "map<string, int64>", &block(&[entry("x", 1), entry("y", 2)]), Ok("{x: 1, y: 2}"));
    check(
        map,
        "map<string, int64>",
        &block(&[entry("x", 1), entry("x", 2)]),
        Err(("duplicate_field", "c.x")),
    );
    check(map, "map<string, int8>", &block(&[entry("x", 300)]), Err(("out_of_range", "c.x")));
}

#[test]
fn a_count_without_values_costs_little() {
    let nulls = r#"{"type":"array","items":"null"}"#;
    check(nulls, "list<int64>", &[&long(i64::MAX)[..], &[0]].concat(), NOT_AVRO);
    check(r#"{"type":"array","items":"long"}"#, "list<int64>", &long(i64::MAX), Err(("not_avro", "c[3]")));
    let schema = table(&[("c", "int64", true)]);
    let decoder =
        AvroDecoder::new(&schema, &record(&[("x", nulls), ("c", "\"long\"")]), UnknownFields::Ignore);
    let (_, refused) = decode(&decoder.expect("fits"), &schema, &delimited([&long(i64::MIN)[..]]));
    assert_eq!(refused[0].1.code, "not_avro");
    let endless = r#"{"type":"record","name":"S","fields":[{"name":"s","type":"S"}]}"#;
    let decoder =
        AvroDecoder::new(&schema, &record(&[("x", endless), ("c", "\"long\"")]), UnknownFields::Ignore);
    let (_, refused) = decode(&decoder.expect("fits"), &schema, &delimited([&[0][..]]));
    assert!(refused[0].1.message.contains("nested deeper"), "{refused:?}");
    let wide: Vec<String> = (0..1000).map(|n| format!("f{n}: int64")).collect();
    let wide = format!("list<struct<{}>>", wide.join(", "));
    let schema = table(&[("c", &wide, true)]);
    let of =
        r#"{"type":"array","items":{"type":"record","name":"S","fields":[{"name":"f1","type":"long"}]}}"#;
    let decoder = AvroDecoder::new(&schema, &record(&[("c", of)]), UnknownFields::Refuse).expect("fits");
    let (_, refused) = decode(&decoder, &schema, &delimited([&block(&vec![vec![2]; 1000])[..]]));
    assert_eq!(refused[0].1.code, "record_too_large");
}

#[test]
fn a_datum_fills_its_record() {
    let schema = table(&[("c", "int64", true)]);
    let decoder =
        AvroDecoder::new(&schema, &record(&[("c", "\"long\"")]), UnknownFields::Refuse).expect("fits");
    let (batch, refused) = decode(&decoder, &schema, &delimited([&[2][..], &[2, 2], &[], &[0x80], &[4]]));
    let refused: Vec<_> = refused.into_iter().map(|(place, reason)| (place, reason.code)).collect();
    assert_eq!((batch.num_rows(), refused), (2, vec![(1, "not_avro"), (2, "not_avro"), (3, "not_avro")]));
}

/// What opening a stream answers.
fn check_open(of: &[u8], columns: &[(&str, &str, bool)], expected: Result<(), (&str, &str)>) {
    let opened = AvroDecoder::new(&table(columns), of, UnknownFields::Refuse);
    let got = opened.map(drop).map_err(|error| (error.code, error.column.unwrap_or_default()));
    let expected = expected.map_err(|(code, column)| (code.to_owned(), column.to_owned()));
    assert_eq!(got, expected, "{}", String::from_utf8_lossy(of));
}

#[test]
fn what_does_not_fit_is_refused_at_open() {
    for (of, column_type) in [
        ("\"string\"".to_owned(), "int64"),
        ("\"long\"".to_owned(), "date"),
        ("\"long\"".to_owned(), "float64"),
        ("\"double\"".to_owned(), "float32"),
        ("\"bytes\"".to_owned(), "string"),
        (logical("long", "timestamp-micros"), "int64"),
        (logical("long", "timestamp-micros"), "timestamp_ntz"),
        (logical("bytes", "decimal"), "binary"),
        (r#"{"type":"bytes","logicalType":"decimal","scale":3}"#.to_owned(), "decimal(10,2)"),
        (r#"["null","long","string"]"#.to_owned(), "int64"),
        (r#"{"type":"array","items":"long"}"#.to_owned(), "list<string>"),
        (r#"{"type":"map","values":"long"}"#.to_owned(), "list<int64>"),
    ] {
        check_open(&record(&[("c", &of)]), &[("c", column_type, true)], Err(("schema_mismatch", "c")));
    }
    let two = record(&[("c", "\"long\""), ("d", "\"long\"")]);
    check_open(&two, &[("c", "int64", true)], Err(("unknown_field", "d")));
    check_open(&two, &[("c", "int64", true), ("d", "int64", true), ("e", "int64", true)], Ok(()));
    let missing = [("c", "int64", true), ("d", "int64", true), ("e", "int64", false)];
    check_open(&two, &missing, Err(("missing_column", "e")));
    for of in [
        "",
        "\"long\"",
        "[]",
        r#"["null",{"type":"record","name":"R","fields":[]}]"#,
        r#"{"type":"record","fields":[]}"#,
        r#"{"type":"record","name":"R"}"#,
        r#"{"type":"record","name":"R","fields":[{"name":"c"}]}"#,
        r#"{"type":"record","name":"R","fields":[{"name":"c","type":"other"}]}"#,
        r#"{"type":"record","name":"R","fields":[{"name":"c","type":"long"},{"name":"c","type":"long"}]}"#,
        r#"{"type":"record","name":"R","fields":[{"name":"c","type":["null",["null"]]}]}"#,
        r#"{"type":"record","name":"R","fields":[{"name":"c","type":{"type":"enum","name":"R","symbols":[]}}]}"#,
    ] {
        check_open(of.as_bytes(), &[("c", "int64", true)], Err(("invalid_avro_schema", "")));
    }
}

#[test]
fn a_table_is_made_of_a_schema() {
    let of = record(&[
        ("a", "\"boolean\""),
        ("b", "[\"null\",\"int\"]"),
        ("c", &logical("int", "date")),
        ("d", &logical("long", "timestamp-millis")),
        ("e", &logical("long", "local-timestamp-micros")),
        ("f", r#"{"type":"bytes","logicalType":"decimal","precision":9,"scale":2}"#),
        ("g", r#"{"type":"array","items":{"type":"map","values":"float"}}"#),
        ("h", r#"{"type":"record","name":"S","fields":[{"name":"x","type":"string"}]}"#),
        ("i", r#"{"type":"enum","name":"E","symbols":["A"]}"#),
        ("j", "[\"S\",\"null\"]"),
        ("k", "\"shop.E\""),
    ]);
    let schema = table_schema(&of).expect("columns");
    let column =
        |field: &std::sync::Arc<Field>| format!("{} {}", field.name(), types::text(field.data_type()));
    assert_eq!(
        schema.fields().iter().map(column).collect::<Vec<_>>().join("; "),
        "a bool; b int32; c date; d timestamp; e timestamp_ntz; f decimal(38,2); g list<map<string, float32>>; \
         h struct<x: string>; i string; j struct<x: string>; k string"
    );
    assert!(AvroDecoder::new(&schema, &of, UnknownFields::Refuse).is_ok());
    for of in ["\"null\"", "[\"int\",\"string\"]", "[\"null\",\"R\"]"] {
        assert_eq!(table_schema(&record(&[("a", of)])).expect_err(of).code, "unsupported_type");
    }
}

const MODEL: [(&str, &str, bool); 5] = [
    ("i", "int64", false),
    ("s", "string", true),
    ("l", "list<struct<a: int64 not null, t: string>>", true),
    ("m", "map<string, int64>", true),
    ("b", "bool", true),
];

fn model() -> (SchemaRef, AvroDecoder) {
    let of = record(&[
        ("x", "[\"null\",\"double\"]"),
        ("i", "\"long\""),
        ("s", "[\"null\",\"string\"]"),
        (
            "l",
            r#"{"type":"array","items":{"type":"record","name":"E","fields":[{"name":"t","type":["string","null"]},
                {"name":"a","type":"int"}]}}"#,
        ),
        ("m", r#"{"type":"map","values":"long"}"#),
        ("b", "[\"boolean\",\"null\"]"),
    ]);
    let schema = table(&MODEL);
    let decoder = AvroDecoder::new(&schema, &of, UnknownFields::Ignore).expect("fits");
    (schema, decoder)
}

type Model = (i64, Option<String>, Vec<(i32, Option<String>)>, Vec<(String, i64)>, Option<bool>);

fn any_model() -> impl Strategy<Value = Model> {
    (
        any::<i64>(),
        prop::option::of("\\PC{0,9}"),
        prop::collection::vec((any::<i32>(), prop::option::of("[a-z]{0,3}")), 0..4),
        prop::collection::btree_map("[a-z]{0,2}", any::<i64>(), 0..12)
            .prop_map(|map| map.into_iter().collect()),
        any::<Option<bool>>(),
    )
}

fn as_json((i, s, l, m, b): &Model) -> String {
    let l: Vec<_> = l.iter().map(|(a, t)| json!({"a": a, "t": t})).collect();
    let m: serde_json::Map<_, _> = m.iter().map(|(key, value)| (key.clone(), json!(value))).collect();
    json!({"i": i, "s": s, "l": l, "m": m, "b": b}).to_string()
}

fn as_avro((i, s, l, m, b): &Model) -> Vec<u8> {
    let union = |some: i64, value: Option<Vec<u8>>| match value {
        Some(value) => [long(some), value].concat(),
        None => long(1 - some),
    };
    let element =
        |(a, t): &(i32, Option<String>)| [union(0, t.as_deref().map(text)), long((*a).into())].concat();
    let entry = |(key, value): &(String, i64)| [text(key), long(*value)].concat();
    [
        union(1, Some(1.5_f64.to_le_bytes().to_vec())),
        long(*i),
        union(1, s.as_deref().map(text)),
        block(&l.iter().map(element).collect::<Vec<_>>()),
        block(&m.iter().map(entry).collect::<Vec<_>>()),
        union(0, b.map(|b| vec![u8::from(b)])),
    ]
    .concat()
}

proptest! {
    #[test]
    fn the_same_values_as_json_and_as_avro_are_the_same_rows(records in prop::collection::vec(any_model(), 0..12)) {
        let (schema, decoder) = model();
        let mut json = JsonDecoder::new(schema.clone(), 1 << 20).expect("a schema");
        let lines: Vec<String> = records.iter().map(as_json).collect();
        let refuse = &mut |place: usize, reason| panic!("{}: {reason:?}", lines[place]);
        json.append(lines.join("\n").as_bytes(), UnknownFields::Refuse, refuse);
        let data: Vec<Vec<u8>> = records.iter().map(as_avro).collect();
        let (batch, refused) = decode(&decoder, &schema, &delimited(data.iter().map(Vec::as_slice)));
        prop_assert_eq!(refused, Vec::new());
        prop_assert_eq!(batch, json.finish());
    }

    #[test]
    fn any_bytes_are_decoded_or_refused(records in prop::collection::vec(any::<Vec<u8>>(), 0..8)) {
        let (schema, decoder) = model();
        decode(&decoder, &schema, &delimited(records.iter().map(Vec::as_slice)));
    }

    #[test]
    fn damaged_data_leave_those_around_them(
        (before, damaged, after) in (any_model(), any_model(), any_model()),
        flips in prop::collection::vec((any::<prop::sample::Index>(), 0..8_u32), 0..4),
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let (schema, decoder) = model();
        let [before, mut damaged, after] = [before, damaged, after].map(|model| as_avro(&model));
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
}
