//! Newline-delimited JSON to rows: one decoder gathers the records of many frames of many streams.
//!
//! *Owns*: the parser's memory, and the rows that it and other decoders fill.
//! *Does not own*: values (`column`), parsing (`tape`), the bounds of records and rows (`rows`), when the rows are taken
//! out (`lane`).
//! Keeps P8: a record is appended whole, or refused by name and cut away again.

use arrow::array::RecordBatch;
use arrow::datatypes::SchemaRef;
use sluice_shared::error::Error;
use sluice_shared::frame::{UnknownFields, lines};

use super::Decoded;
use super::rows::{BYTES_MAX, Payload, Rows};
use super::tape::TapeParser;
use crate::table::batch::Reason;

/// Rows of one table, gathered from the records of many frames.
pub struct JsonDecoder {
    parser: TapeParser,
    rows: Rows,
}

impl JsonDecoder {
    /// An empty decoder. Records of more than `record_bytes_max` bytes are refused.
    ///
    /// # Errors
    /// `Invalid` (`unsupported_type`) where the schema has a type that no table takes.
    pub fn new(schema: SchemaRef, record_bytes_max: usize) -> Result<Self, Error> {
        Ok(Self { parser: TapeParser::new(), rows: Rows::new(schema, record_bytes_max)? })
    }

    /// Refuses records that become rows of more than `bytes`.
    #[must_use]
    pub fn with_rows_up_to(self, bytes: usize) -> Self {
        Self { rows: self.rows.with_rows_up_to(bytes), ..self }
    }

    /// Appends the records of a payload: its lines that are not blank. For each refused record calls `refuse` with its
    /// place in the payload, counted from 0.
    pub fn append(
        &mut self,
        payload: &[u8],
        unknown: UnknownFields,
        refuse: &mut dyn FnMut(usize, Reason),
    ) -> Decoded {
        self.append_within(payload, unknown, BYTES_MAX, refuse)
    }

    /// As `append`, but stops before a record as soon as the rows held and what was refused have `bytes_max` bytes. A
    /// record of three bytes can become a row of thousands in a wide table, so that a payload's size bounds nothing by
    /// itself.
    pub fn append_within(
        &mut self,
        payload: &[u8],
        unknown: UnknownFields,
        bytes_max: usize,
        refuse: &mut dyn FnMut(usize, Reason),
    ) -> Decoded {
        let Self { parser, rows } = self;
        rows.append(Payload { bytes: payload, bytes_max, refuse }, lines(payload), |columns, text| {
            parser.parse(text, |record| columns.append(record, 0, unknown)).map(|()| text.len())
        })
    }

    /// The rows, for decoders of other encodings: all of a table's records come into the same columns.
    pub fn gathered(&mut self) -> &mut Rows {
        &mut self.rows
    }

    /// Rows held.
    pub fn rows(&self) -> usize {
        self.rows.count()
    }

    /// Bytes that the rows held have as arrays. Walks all columns.
    pub fn bytes(&self) -> usize {
        self.rows.bytes()
    }

    /// Takes the rows out, in the order of their records.
    pub fn finish(&mut self) -> RecordBatch {
        self.rows.finish()
    }
}

#[cfg(test)]
mod tests {
    use arrow::array::{Array, AsArray};
    use arrow::datatypes::{
        DataType, Date32Type, Decimal128Type, Field, Float32Type, Float64Type, Int64Type, Schema,
        TimestampMicrosecondType,
    };
    use arrow::util::display::{ArrayFormatter, FormatOptions};
    use proptest::prelude::*;
    use serde_json::{Value, json};
    use sluice_shared::table::types;

    use super::*;

    fn schema(columns: &[(&str, &str, bool)]) -> SchemaRef {
        let field = |(name, text, nullable): &(&str, &str, bool)| {
            Field::new(*name, types::parse(text).expect("a type"), *nullable)
        };
        SchemaRef::new(Schema::new(columns.iter().map(field).collect::<Vec<_>>()))
    }

    fn decoder(columns: &[(&str, &str, bool)]) -> JsonDecoder {
        JsonDecoder::new(schema(columns), 1000).expect("a table's schema")
    }

    /// Appends the payload; what was refused.
    fn append(decoder: &mut JsonDecoder, payload: &[u8], unknown: UnknownFields) -> Vec<(usize, Reason)> {
        let mut refused = Vec::new();
        let rows = decoder.rows();
        let decoded = decoder.append(payload, unknown, &mut |place, reason| refused.push((place, reason)));
        let accepted = decoder.rows() - rows;
        assert_eq!(decoded, Decoded { accepted, refused: refused.len(), payload_bytes: payload.len() });
        refused
    }

    /// One value in a column `c` of this type: how it is shown, or code and column of its refusal.
    fn check(column_type: &str, value: &str, expected: Result<&str, (&str, &str)>) {
        let mut decoder = decoder(&[("c", column_type, false)]);
        let refused = append(&mut decoder, format!("{{\"c\":{value}}}").as_bytes(), UnknownFields::Refuse);
        let batch = decoder.finish();
        let got = match &refused[..] {
            [] => Ok(shown(&batch, 0)),
            [(0, reason)] => {
                assert_eq!(batch.num_rows(), 0, "a refused record leaves nothing");
                assert!(reason.message.chars().count() <= 200, "{}", reason.message);
                Err((reason.code, reason.column.clone().unwrap_or_default()))
            }
            more => panic!("{more:?}"),
        };
        let expected = expected.map(str::to_owned).map_err(|(code, column)| (code, column.to_owned()));
        assert_eq!(got, expected, "{value} into {column_type}: {refused:?}");
    }

    fn shown(batch: &RecordBatch, row: usize) -> String {
        let options = FormatOptions::default().with_null("null");
        ArrayFormatter::try_new(batch.column(0), &options).expect("can be shown").value(row).to_string()
    }

    const WRONG: Result<&str, (&str, &str)> = Err(("wrong_type", "c"));
    const RANGE: Result<&str, (&str, &str)> = Err(("out_of_range", "c"));
    const MISSING: Result<&str, (&str, &str)> = Err(("missing_value", "c"));

    #[test]
    fn booleans_and_texts_take_only_their_own() {
        check("bool", "true", Ok("true"));
        for value in ["1", "\"true\"", "[]"] {
            check("bool", value, WRONG);
        }
        check("bool", "null", MISSING);
        check("string", r#""a\n\u00e9\ud83d\ude00""#, Ok("a\né😀"));
        for value in ["1", "true", "{}", "[\"a\"]"] {
            check("string", value, WRONG);
        }
        check("binary", "\"aGk=\"", Ok("6869"));
        check("binary", "\"aGk\"", Ok("6869"));
        check("binary", "\"\"", Ok(""));
        check("binary", "\"a_k=\"", WRONG);
        check("binary", "\"a\"", WRONG);
    }

    #[test]
    fn integers_take_integers_in_range() {
        for (column_type, min, max) in [
            ("int8", i64::from(i8::MIN), i64::from(i8::MAX)),
            ("int16", i64::from(i16::MIN), i64::from(i16::MAX)),
            ("int32", i64::from(i32::MIN), i64::from(i32::MAX)),
            ("int64", i64::MIN, i64::MAX),
        ] {
            for value in [min, -1, 0, max] {
                check(column_type, &value.to_string(), Ok(&value.to_string()));
            }
            for value in [i128::from(min) - 1, i128::from(max) + 1, i128::MAX, i128::MIN] {
                check(column_type, &value.to_string(), RANGE);
            }
            for value in ["1.5", "1.0", "1e3", "\"12\"", "true", "{}"] {
                check(column_type, value, WRONG);
            }
        }
    }

    #[test]
    fn floats_take_numbers_and_round_them() {
        check("float64", "0.1", Ok("0.1"));
        check("float64", "3", Ok("3.0"));
        check("float64", "-0.0", Ok("-0.0"));
        check("float64", "9007199254740993", Ok("9007199254740992.0"));
        check("float64", "123456789012345678901234567890", Ok("1.2345678901234568e29"));
        check("float64", "1e-400", Ok("0.0"));
        check("float64", "1e999", RANGE);
        check("float64", "-1e999", RANGE);
        check("float64", "\"1\"", WRONG);
        check("float32", "0.1", Ok("0.1"));
        check("float32", "1e39", RANGE);
        check("float32", "null", MISSING);
    }

    #[test]
    fn decimals_are_exact() {
        for (value, expected) in [
            ("0.1", Ok("0.100")),
            ("\"0.1\"", Ok("0.100")),
            ("-12", Ok("-12.000")),
            ("1.5e2", Ok("150.000")),
            ("0.1000000000000000055", RANGE),
            ("0.1000000000000000000", Ok("0.100")),
            ("1234567.001", Ok("1234567.001")),
            ("12345678", RANGE),
            ("0.0001", RANGE),
            ("\"x\"", WRONG),
            ("true", WRONG),
        ] {
            check("decimal(10,3)", value, expected);
        }
        let digits = "12345678901234567890123456789012345678";
        check("decimal(38,0)", digits, Ok(digits));
        check("decimal(38,0)", &format!("-{digits}.0"), Ok(&format!("-{digits}")));
        check("decimal(38,0)", &format!("{digits}9"), RANGE);
        check("list<decimal(20,2)>", "[1.25, 7, \"3\", 12345678901234567.25]", {
            Ok("[1.25, 7.00, 3.00, 12345678901234567.25]")
        });
    }

    #[test]
    fn dates_and_timestamps() {
        check("date", "\"2013-01-31\"", Ok("2013-01-31"));
        check("date", "-1", Ok("1969-12-31"));
        check("date", "\"2013-02-30\"", RANGE);
        check("date", "2932897", RANGE);
        check("date", "99999999999999999999", WRONG);
        check("date", "\"2013-1-1\"", WRONG);
        check("timestamp", "\"2013-01-31T05:00:00.25+01:00\"", Ok("2013-01-31T04:00:00.250Z"));
        check("timestamp", "1359608400000000", Ok("2013-01-31T05:00:00Z"));
        check("timestamp", "\"2013-01-31T05:00:00\"", WRONG);
        check("timestamp", "\"2013-01-31T05:00:00.1234567Z\"", RANGE);
        check("timestamp", "1359608400000000000", RANGE);
        check("timestamp", "1.5", WRONG);
        check("timestamp_ntz", "\"2013-01-31 05:00:00\"", Ok("2013-01-31T05:00:00"));
        check("timestamp_ntz", "\"2013-01-31T05:00:00Z\"", WRONG);
        check("timestamp_ntz", "null", MISSING);
    }

    #[test]
    fn nested_values_and_the_paths_of_their_faults() {
        check("list<int64>", "[1,null,3]", Ok("[1, null, 3]"));
        check("list<int64>", "[]", Ok("[]"));
        check("list<int64>", "{}", WRONG);
        check("list<int64 not null>", "[1,null]", Err(("missing_value", "c[1]")));
        check("list<list<int8>>", "[[1],[2,300]]", Err(("out_of_range", "c[1][1]")));
        check("struct<a: int64, b: string not null>", r#"{"b":"x"}"#, Ok("{a: null, b: x}"));
        check("struct<a: int64, b: string not null>", r#"{"a":1}"#, Err(("missing_value", "c.b")));
        check("struct<a: int64>", r#"{"a":1,"d":2}"#, Err(("unknown_field", "c.d")));
        check("struct<a: int64>", r#"{"a":1,"a":2}"#, Err(("duplicate_field", "c.a")));
        check("struct<a: int64>", "[1]", WRONG);
        check("struct<b: list<struct<d: bool>>>", r#"{"b":[{"d":true},{"d":1}]}"#, {
            Err(("wrong_type", "c.b[1].d"))
        });
        check("map<string, int64>", r#"{"x":1,"y":null}"#, Ok("{x: 1, y: null}"));
        check("map<string, int64>", r#"{"x":1,"x":2}"#, Err(("duplicate_field", "c.x")));
        check("map<string, list<int64>>", r#"{"x":[1,"2"]}"#, Err(("wrong_type", "c.x[1]")));
        check("map<string, int64>", "[]", WRONG);
    }

    #[test]
    fn what_is_no_json_is_told_in_words() {
        for (record, expected) in [
            (&b"{\"id\":x}"[..], "expected value at byte 6"),
            (b"{\"id\":nul}", "expected true, false or null at byte 9"),
            (b"{id:1}", "key must be a string at byte 1"),
            (b"{\"id\":1,}", "key must be a string at byte 8"),
            (b"{\"id\" 1}", "expected `:` at byte 6"),
            (b"{\"id\":1", "it ends within an object"),
            (b"{\"id\":1} {}", "trailing characters at byte 9"),
            (b"{\"id\":01}", "invalid number at byte 7"),
            (b"{\"id\":\"\xff\"}", "text that is not UTF-8 at byte 7"),
            (b"", "it ends within a value"),
        ] {
            let refused = TapeParser::new().parse(record, |_| Ok(()));
            let message = refused.expect_err("no JSON").into_reason().message;
            assert!(message.starts_with(&format!("not a JSON object: {expected}, in ")), "{message}");
        }
    }

    /// One whole record for a table of `id` (not null) and `text`: code and column of its refusal.
    fn check_record(record: &[u8], expected: Option<(&str, Option<&str>)>) {
        let mut decoder = decoder(&[("id", "int64", false), ("text", "string", true)]);
        let refused = append(&mut decoder, record, UnknownFields::Refuse);
        let got = refused.first().map(|(_, reason)| (reason.code, reason.column.as_deref()));
        assert_eq!(got, expected, "{}: {refused:?}", String::from_utf8_lossy(record));
    }

    #[test]
    fn what_is_no_fitting_object_is_refused_by_name() {
        let not_json = Some(("not_json", None));
        for record in [
            &b"{"[..],
            b"x",
            b"{\"id\":1}}",
            b"{\"id\":1} {}",
            b"{\"id\":1,}",
            b"{\"id\":01}",
            b"{\"id\":+1}",
            b"{\"id\":.5}",
            b"{\"id\":1.}",
            b"{\"id\":-}",
            b"{\"id\":NaN}",
            b"{id:1}",
            b"{\"id\":1,\"text\":\"\\ud800\"}",
            b"{\"id\":1,\"text\":\"\\udc00x\"}",
            b"{\"id\":1,\"text\":\"\xff\"}",
            b"{\"id\":1,\"text\":\"\x01\"}",
            b"{\"id\":1,\"text\":\"",
            b"\x00",
        ] {
            check_record(record, not_json);
        }
        for record in [&b"1"[..], b"[]", b"null", b"\"x\"", b"[{\"id\":1}]"] {
            check_record(record, Some(("wrong_type", None)));
        }
        check_record(b"{}", Some(("missing_value", Some("id"))));
        check_record(b"{\"id\":null}", Some(("missing_value", Some("id"))));
        check_record(b"{\"id\":1,\"id\":1}", Some(("duplicate_field", Some("id"))));
        check_record(b"{\"id\":1,\"txt\":1}", Some(("unknown_field", Some("txt"))));
        check_record(b" \t{ \"text\" : null , \"id\" : 7 } \r", None);
        check_record("{\"id\":1,\"text\":\"ü\"}".as_bytes(), None);
    }

    #[test]
    fn a_depth_bomb_is_refused_and_does_no_harm() {
        let depth = 100_000;
        let bomb = format!("{{\"x\":{}{}}}", "[".repeat(depth), "]".repeat(depth));
        let mut decoder = JsonDecoder::new(schema(&[("id", "int64", true)]), 1 << 20).expect("a schema");
        let refused = append(&mut decoder, bomb.as_bytes(), UnknownFields::Ignore);
        assert_eq!(refused.len(), 1);
        assert_eq!(refused[0].1.code, "not_json");
    }

    #[test]
    fn a_record_over_the_limit_is_refused_unread() {
        let long = format!("{{\"id\":1,\"text\":\"{}\"}}", "x".repeat(1000));
        check_record(long.as_bytes(), Some(("record_too_large", None)));
    }

    #[test]
    fn an_unknown_field_gets_advice_and_can_be_ignored() {
        let mut decoder = decoder(&[("latency_ms", "int64", true), ("region", "string", true)]);
        let payload = br#"{"latencyms":1,"region":"eu"}"#;
        let refused = append(&mut decoder, payload, UnknownFields::Refuse);
        assert!(refused[0].1.message.contains("did you mean \"latency_ms\"?"), "{refused:?}");
        let payload = br#"{"x":{"y":[1,{"z":null}]},"region":"eu","x":2}"#;
        assert_eq!(append(&mut decoder, payload, UnknownFields::Ignore), []);
        assert_eq!(decoder.finish().column(1).as_string::<i32>().value(0), "eu");
    }

    #[test]
    fn refused_places_count_no_blank_lines() {
        let mut decoder = decoder(&[("n", "int64", false)]);
        let payload = b"\n{\"n\":0}\r\n\r\n{\"n\":\"x\"}\n{\"n\":2}\n  \nx\n{\"n\":4}";
        let mut places = Vec::new();
        let decoded = decoder.append(payload, UnknownFields::Refuse, &mut |place, _| places.push(place));
        assert_eq!(decoded, Decoded { accepted: 3, refused: 2, payload_bytes: payload.len() });
        assert_eq!(places, [1, 3]);
        assert_eq!(decoder.finish().column(0).as_primitive::<Int64Type>().values(), &[0, 2, 4]);
    }

    #[test]
    fn a_decoder_is_used_again_after_its_rows_are_taken() {
        let mut decoder = decoder(&[
            ("l", "list<string>", true),
            ("s", "struct<a: int64>", true),
            ("m", "map<string,bool>", true),
        ]);
        let payload = br#"{"l":["x",null],"s":{"a":1},"m":{"k":true}}"#;
        append(&mut decoder, payload, UnknownFields::Refuse);
        assert!(decoder.bytes() > 0);
        let first = decoder.finish();
        assert_eq!((decoder.rows(), decoder.finish().num_rows()), (0, 0));
        append(&mut decoder, payload, UnknownFields::Refuse);
        assert_eq!(decoder.finish(), first);
    }

    #[test]
    fn a_bound_on_bytes_stops_between_records() {
        let mut decoder = decoder(&[("a", "int64", true), ("b", "int64", true)]);
        let payload = b"{}\n".repeat(1000);
        let decoded = decoder.append_within(&payload, UnknownFields::Refuse, 2000, &mut |_, _| {});
        assert!(decoder.bytes() >= 2000 && decoder.bytes() < 2000 + 64 * 20, "{decoded:?}");
        let rest = &payload[decoded.payload_bytes..];
        assert_eq!((decoded.accepted, decoded.refused), (decoder.rows(), 0));
        assert_eq!(lines(rest).count(), 1000 - decoded.accepted);
        assert_eq!(decoder.finish().num_rows(), decoded.accepted);
    }

    const MODEL: [(&str, &str, bool); 7] = [
        ("i", "int64", false),
        ("f", "float64", true),
        ("s", "string", true),
        ("l", "list<int64>", true),
        ("o", "struct<a: int64 not null, b: list<string>>", true),
        ("m", "map<string, int64>", true),
        ("d", "decimal(12,2)", true),
    ];

    /// What the record is as a row, told by another parser, value by value; `None` where it does not fit.
    fn modelled(record: &str) -> Option<Value> {
        let Ok(Value::Object(object)) = serde_json::from_str(record) else { return None };
        if object.keys().any(|key| MODEL.iter().all(|(name, ..)| name != key)) {
            return None;
        }
        let integer = |value: &Value| value.is_null() || value.is_i64();
        let of = |name: &str| object.get(name).cloned().unwrap_or(Value::Null);
        let list_of = |value: &Value, fits: &dyn Fn(&Value) -> bool| match value {
            Value::Null => true,
            Value::Array(elements) => elements.iter().all(fits),
            _ => false,
        };
        let mut o = of("o");
        let o_fits = match &mut o {
            Value::Null => true,
            Value::Object(fields) => {
                let b = fields.entry("b").or_insert(Value::Null).clone();
                fields.keys().all(|key| key == "a" || key == "b")
                    && fields.get("a").is_some_and(Value::is_i64)
                    && list_of(&b, &|text| text.is_null() || text.is_string())
            }
            _ => false,
        };
        let m_fits = match of("m") {
            Value::Null => true,
            Value::Object(entries) => entries.values().all(integer),
            _ => false,
        };
        let s_fits = of("s").is_null() || of("s").is_string();
        let f_fits = of("f").is_null() || of("f").is_number();
        // In hundredths; all doubles of the model are quarters, and small.
        let d = match of("d") {
            Value::Null => Some(Value::Null),
            Value::Number(n) if n.is_f64() => n.as_f64().map(|n| json!((n * 100.0) as i64)),
            other => other.as_i64().filter(|n| n.unsigned_abs() < 10_000_000_000).map(|n| json!(n * 100)),
        };
        let fits = of("i").is_i64() && f_fits && s_fits && list_of(&of("l"), &integer) && o_fits && m_fits;
        let f = of("f").as_f64();
        let row = json!([of("i"), f, of("s"), of("l"), o, of("m"), d?]);
        fits.then_some(row)
    }

    /// A row as the model has it.
    fn row(batch: &RecordBatch, row: usize) -> Value {
        json!(batch.columns().iter().map(|column| value(column, row)).collect::<Vec<_>>())
    }

    fn value(array: &dyn Array, row: usize) -> Value {
        if array.is_null(row) {
            return Value::Null;
        }
        match array.data_type() {
            DataType::Int64 => json!(array.as_primitive::<Int64Type>().value(row)),
            DataType::Float64 => json!(array.as_primitive::<Float64Type>().value(row)),
            DataType::Utf8 => json!(array.as_string::<i32>().value(row)),
            DataType::Decimal128(..) => {
                let hundredths = array.as_primitive::<Decimal128Type>().value(row);
                json!(i64::try_from(hundredths).expect("small"))
            }
            DataType::List(_) => {
                let elements = array.as_list::<i32>().value(row);
                json!((0..elements.len()).map(|row| value(&elements, row)).collect::<Vec<_>>())
            }
            DataType::Struct(fields) => {
                let columns = array.as_struct().columns().iter();
                let pairs = fields
                    .iter()
                    .zip(columns)
                    .map(|(field, column)| (field.name().clone(), value(column, row)));
                Value::Object(pairs.collect())
            }
            DataType::Map(..) => {
                let entries = array.as_map().value(row);
                let key = |row| entries.column(0).as_string::<i32>().value(row).to_owned();
                Value::Object(
                    (0..entries.len()).map(|row| (key(row), value(entries.column(1), row))).collect(),
                )
            }
            other => panic!("{other}"),
        }
    }

    /// The model's parser does not round all numbers to the nearest double; these need no rounding.
    fn quarters(n: i32) -> f64 {
        f64::from(n) / 4.0
    }

    fn any_value() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            3 => any::<i64>().prop_map(|n| json!(n)),
            2 => (-1_000_000_000_i64..1_000_000_000).prop_map(|n| json!(n)),
            1 => any::<u64>().prop_map(|n| json!(n)),
            1 => any::<i32>().prop_map(|n| json!(quarters(n))),
            2 => "[a-c\\\\\"\n\u{e9}\u{1f600}]{0,6}".prop_map(|text| json!(text)),
            1 => Just(Value::Null),
            1 => any::<bool>().prop_map(|b| json!(b)),
        ];
        leaf.prop_recursive(3, 12, 3, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..3).prop_map(Value::Array),
                prop::collection::btree_map("[ab]", inner, 0..3)
                    .prop_map(|map| Value::Object(map.into_iter().collect())),
            ]
        })
    }

    /// A record that often fits the model's table: of each column a value that fits, now and then any value.
    fn any_record() -> impl Strategy<Value = String> {
        let number = || any::<i64>().prop_map(|n| json!(n));
        let strings = prop::collection::vec("[a-z]{0,3}", 0..3);
        let fitting = (
            number(),
            prop::option::of(any::<i32>().prop_map(quarters)),
            prop::option::of("\\PC{0,8}"),
            prop::option::of(prop::collection::vec(prop::option::of(any::<i64>()), 0..3)),
            prop::option::of((number(), strings).prop_map(|(a, b)| json!({"a": a, "b": b}))),
            prop::option::of(prop::collection::btree_map("[a-z]{1,2}", any::<i64>(), 0..3)),
            prop::option::of(-9_999_999_999_i64..=9_999_999_999),
        );
        let fitting = fitting.prop_map(
            |(i, f, s, l, o, m, d)| json!({"i": i, "f": f, "s": s, "l": l, "o": o, "m": m, "d": d}),
        );
        let replaced = prop::option::weighted(0.4, ("[ifslomdx]", any_value()));
        let removed = prop::option::weighted(0.3, "[ifslomd]");
        (fitting, replaced, removed).prop_map(|(mut record, replaced, removed)| {
            let fields = record.as_object_mut().expect("an object");
            if let Some((name, value)) = replaced {
                fields.insert(name, value);
            }
            if let Some(name) = removed {
                fields.remove(&name);
            }
            record.to_string()
        })
    }

    proptest! {
        #[test]
        fn rows_are_those_of_a_naive_decoder(
            records in prop::collection::vec(prop_oneof![9 => any_record(), 1 => "[ -~]{1,20}[^ ]"], 0..20),
        ) {
            let records: Vec<String> = records.into_iter().filter(|text| !text.trim().is_empty()).collect();
            let mut decoder = decoder(&MODEL);
            let payload = records.join("\n");
            let refused = append(&mut decoder, payload.as_bytes(), UnknownFields::Refuse);
            let places: Vec<usize> = refused.iter().map(|(place, _)| *place).collect();
            let batch = decoder.finish();
            let modelled: Vec<Option<Value>> = records.iter().map(|record| modelled(record)).collect();
            let expected_places: Vec<usize> = (0..modelled.len()).filter(|place| modelled[*place].is_none()).collect();
            prop_assert_eq!(places, expected_places, "{:?} {:?}", records, refused);
            let expected: Vec<Value> = modelled.into_iter().flatten().collect();
            let rows: Vec<Value> = (0..batch.num_rows()).map(|place| row(&batch, place)).collect();
            prop_assert_eq!(rows, expected);
        }

        #[test]
        fn any_bytes_are_decoded_or_refused(payload: Vec<u8>) {
            append(&mut decoder(&MODEL), &payload, UnknownFields::Ignore);
        }

        #[test]
        fn a_record_with_flipped_bytes_is_decoded_or_refused(
            record in any_record(),
            flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
        ) {
            let mut bytes = record.into_bytes();
            for (place, byte) in flips {
                let place = place.index(bytes.len());
                bytes[place] = byte;
            }
            append(&mut decoder(&MODEL), &bytes, UnknownFields::Ignore);
        }
    }

    #[test]
    fn arrays_have_the_types_of_the_schema() {
        let columns = [
            ("a", "decimal(9,3)", true),
            ("b", "timestamp", true),
            ("c", "date", true),
            ("d", "float32", true),
        ];
        let mut decoder = decoder(&columns);
        append(&mut decoder, br#"{"a":1,"b":1,"c":1,"d":1}"#, UnknownFields::Refuse);
        let batch = decoder.finish();
        assert_eq!(batch.schema(), schema(&columns));
        assert_eq!(batch.column(1).as_primitive::<TimestampMicrosecondType>().value(0), 1);
        assert_eq!(batch.column(2).as_primitive::<Date32Type>().value(0), 1);
        assert!((batch.column(3).as_primitive::<Float32Type>().value(0) - 1.0).abs() < f32::EPSILON);
    }
}
