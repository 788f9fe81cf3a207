//! Requests of OpenTelemetry's own message types against the rows that they become.
//!
//! *Owns*: one request of each signal with all that it can hold, in both forms; what is refused.
//! *Does not own*: calls, posts and acks (`gateway/tests/it/otlp.rs`).

use std::io::Cursor;

use arrow::array::{Array, RecordBatch};
use arrow::ipc::reader::StreamReader;
use arrow::util::display::{ArrayFormatter, FormatOptions};
use opentelemetry_proto::tonic::collector::logs::v1::ExportLogsServiceRequest;
use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceRequest;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{
    AnyValue, ArrayValue, InstrumentationScope, KeyValue, KeyValueList,
};
use opentelemetry_proto::tonic::logs::v1::{LogRecord, ResourceLogs, ScopeLogs};
use opentelemetry_proto::tonic::metrics::v1::exponential_histogram_data_point::Buckets;
use opentelemetry_proto::tonic::metrics::v1::metric::Data;
use opentelemetry_proto::tonic::metrics::v1::summary_data_point::ValueAtQuantile;
use opentelemetry_proto::tonic::metrics::v1::{
    Exemplar, ExponentialHistogram, ExponentialHistogramDataPoint, Gauge, Histogram, HistogramDataPoint,
    Metric, NumberDataPoint, ResourceMetrics, ScopeMetrics, Sum, Summary, SummaryDataPoint, exemplar,
    number_data_point,
};
use opentelemetry_proto::tonic::resource::v1::Resource;
use opentelemetry_proto::tonic::trace::v1::span::{Event, Link};
use opentelemetry_proto::tonic::trace::v1::{ResourceSpans, ScopeSpans, Span, Status};
use proptest::prelude::*;
use prost::Message;
use serde::Serialize;
use sluice_shared::error::Error;
use sluice_shared::table::types;

use super::flat::{Flat, Refused, flatten, schema};
use super::{Budget, Room, Signal, json};

const FRAME_BYTES_MAX: usize = 10 << 20;
const TIME: u64 = 1_700_000_000_123_456_789;

fn any_value(value: Value) -> Option<AnyValue> {
    Some(AnyValue { value: Some(value) })
}

fn text(text: &str) -> Option<AnyValue> {
    any_value(Value::StringValue(text.to_owned()))
}

fn pair(key: &str, value: Option<AnyValue>) -> KeyValue {
    KeyValue { key: key.to_owned(), value, ..Default::default() }
}

fn resource() -> Option<Resource> {
    let attributes = vec![pair("service.name", text("shop")), pair("pid", any_value(Value::IntValue(7)))];
    Some(Resource { attributes, dropped_attributes_count: 1, ..Default::default() })
}

fn scope() -> Option<InstrumentationScope> {
    Some(InstrumentationScope {
        name: "lib".to_owned(),
        version: "1.2".to_owned(),
        attributes: vec![pair("a", text("b"))],
        dropped_attributes_count: 0,
    })
}

fn logs(records: Vec<LogRecord>) -> ExportLogsServiceRequest {
    let scope_logs = vec![ScopeLogs { scope: scope(), log_records: records, schema_url: "s".to_owned() }];
    let resource_logs = vec![ResourceLogs { resource: resource(), scope_logs, schema_url: "r".to_owned() }];
    ExportLogsServiceRequest { resource_logs }
}

fn log() -> LogRecord {
    LogRecord {
        time_unix_nano: TIME,
        observed_time_unix_nano: TIME + 1,
        severity_number: 9,
        severity_text: "INFO".to_owned(),
        body: text("it \"works\""),
        attributes: vec![pair("k", text("v"))],
        dropped_attributes_count: 2,
        flags: 1,
        trace_id: vec![0xab; 16],
        span_id: vec![0x0c; 8],
        event_name: "started".to_owned(),
    }
}

fn spans(spans: Vec<Span>) -> ExportTraceServiceRequest {
    let scope_spans = vec![ScopeSpans { scope: scope(), spans, schema_url: String::new() }];
    let resource_spans = vec![ResourceSpans { resource: resource(), scope_spans, schema_url: String::new() }];
    ExportTraceServiceRequest { resource_spans }
}

fn span() -> Span {
    Span {
        trace_id: vec![0xab; 16],
        span_id: vec![0x0c; 8],
        trace_state: "x=y".to_owned(),
        parent_span_id: Vec::new(),
        flags: 257,
        name: "GET /".to_owned(),
        kind: 2,
        start_time_unix_nano: TIME,
        end_time_unix_nano: TIME + 1000,
        attributes: vec![pair("http.status", any_value(Value::IntValue(200)))],
        dropped_attributes_count: 1,
        events: vec![
            Event { time_unix_nano: TIME + 5, name: "e".to_owned(), ..Default::default() },
            Event { attributes: vec![pair("x", any_value(Value::BoolValue(true)))], ..Default::default() },
        ],
        dropped_events_count: 2,
        links: vec![Link {
            trace_id: vec![1; 16],
            span_id: vec![2; 8],
            trace_state: String::new(),
            attributes: vec![pair("l", text("m"))],
            dropped_attributes_count: 0,
            flags: 1,
        }],
        dropped_links_count: 3,
        status: Some(Status { message: "no".to_owned(), code: 2 }),
    }
}

fn metrics(metrics: Vec<Metric>) -> ExportMetricsServiceRequest {
    let scope_metrics = vec![ScopeMetrics { scope: None, metrics, schema_url: String::new() }];
    let resource_metrics =
        vec![ResourceMetrics { resource: resource(), scope_metrics, schema_url: String::new() }];
    ExportMetricsServiceRequest { resource_metrics }
}

fn metric(name: &str, data: Data) -> Metric {
    Metric { name: name.to_owned(), unit: "s".to_owned(), data: Some(data), ..Default::default() }
}

fn number(value: number_data_point::Value) -> NumberDataPoint {
    NumberDataPoint { time_unix_nano: TIME, value: Some(value), ..Default::default() }
}

fn exemplars() -> Vec<Exemplar> {
    let value = Some(exemplar::Value::AsInt(3));
    vec![Exemplar { value, time_unix_nano: TIME, trace_id: vec![1; 16], ..Default::default() }]
}

/// One of each kind.
fn all_metrics() -> Vec<Metric> {
    let attributes = vec![pair("k", text("v"))];
    let int = number(number_data_point::Value::AsInt(i64::MAX));
    let gauge = Gauge { data_points: vec![number(number_data_point::Value::AsDouble(1.5)), int.clone()] };
    let sum = NumberDataPoint {
        attributes: attributes.clone(),
        start_time_unix_nano: TIME - 1,
        exemplars: exemplars(),
        ..int
    };
    let histogram = HistogramDataPoint {
        attributes: attributes.clone(),
        time_unix_nano: TIME,
        count: 6,
        sum: Some(0.0),
        bucket_counts: vec![1, 2, 3],
        explicit_bounds: vec![0.5, 1.0],
        exemplars: exemplars(),
        min: Some(-1.0),
        ..Default::default()
    };
    let exponential = ExponentialHistogramDataPoint {
        attributes,
        time_unix_nano: TIME,
        count: 300,
        scale: -3,
        zero_count: 4,
        positive: Some(Buckets { offset: -2, bucket_counts: vec![1, 300, 0] }),
        zero_threshold: 0.25,
        max: Some(9.0),
        ..Default::default()
    };
    let quantile_values =
        vec![ValueAtQuantile { quantile: 0.5, value: 2.0 }, ValueAtQuantile { quantile: 0.0, value: 0.0 }];
    let summary =
        SummaryDataPoint { time_unix_nano: TIME, count: 2, sum: 4.0, quantile_values, ..Default::default() };
    let sum = Sum { data_points: vec![sum], aggregation_temporality: 2, is_monotonic: true };
    let histogram = Histogram { data_points: vec![histogram], aggregation_temporality: 1 };
    let exponential = ExponentialHistogram { data_points: vec![exponential], aggregation_temporality: 1 };
    vec![
        metric("gauge", Data::Gauge(gauge)),
        metric("sum", Data::Sum(sum)),
        metric("histogram", Data::Histogram(histogram)),
        metric("exponential", Data::ExponentialHistogram(exponential)),
        metric("summary", Data::Summary(Summary { data_points: vec![summary] })),
    ]
}

fn flat(signal: Signal, request: &impl Message) -> Flat {
    flatten(signal, &request.encode_to_vec(), FRAME_BYTES_MAX).expect("sound")
}

fn batches(flat: &Flat) -> Vec<RecordBatch> {
    let batches = flat.frames.iter().flat_map(|frame| {
        let reader = StreamReader::try_new(Cursor::new(frame.payload.clone()), None).expect("a stream");
        let batches: Vec<RecordBatch> = reader.map(|batch| batch.expect("a batch")).collect();
        assert_eq!(batches.iter().map(RecordBatch::num_rows).sum::<usize>(), frame.rows as usize);
        batches
    });
    batches.collect()
}

/// Rows as text: `column=value` of what is not null.
fn rows(flat: &Flat) -> Vec<String> {
    let options = FormatOptions::default().with_null("null");
    let mut rows = Vec::new();
    for batch in batches(flat) {
        let schema = batch.schema();
        for row in 0..batch.num_rows() {
            let columns =
                schema.fields().iter().zip(batch.columns()).filter(|(_, column)| column.is_valid(row));
            let shown = columns.map(|(field, column)| {
                let formatter = ArrayFormatter::try_new(column, &options).expect("any type");
                format!("{}={}", field.name(), formatter.value(row))
            });
            rows.push(shown.collect::<Vec<_>>().join("\n"));
        }
    }
    rows
}

fn check_row(flat: &Flat, row: usize, expected: &[&str]) {
    let rows = rows(flat);
    let lines: Vec<&str> = rows[row].lines().collect();
    for line in expected {
        assert!(lines.contains(line), "{line} is not in\n{}", rows[row]);
    }
}

const ORIGIN: [&str; 2] =
    ["service_name=shop", "resource={attributes: {service.name: shop, pid: 7}, dropped_attributes_count: 1}"];

#[test]
fn a_log_record_is_a_row() {
    let flat = flat(Signal::Logs, &logs(vec![log()]));
    check_row(&flat, 0, &ORIGIN);
    let trace_id = format!("trace_id={}", "ab".repeat(16));
    check_row(
        &flat,
        0,
        &[
            "time=2023-11-14T22:13:20.123456Z",
            "time_unix_nano=1700000000123456789",
            "observed_time_unix_nano=1700000000123456790",
            "severity_number=9",
            "severity_text=INFO",
            "event_name=started",
            "body=it \"works\"",
            &trace_id,
            "span_id=0c0c0c0c0c0c0c0c",
            "flags=1",
            "attributes={k: v}",
            "dropped_attributes_count=2",
            "resource_schema_url=r",
            "instrumentation_scope={name: lib, version: 1.2, attributes: {a: b}, dropped_attributes_count: 0}",
            "log_schema_url=s",
        ],
    );
    assert_eq!(
        rows(&flat)[0].lines().count(),
        schema(Signal::Logs).fields().len(),
        "all columns are checked"
    );
}

#[test]
fn values_of_other_types_are_json_text() {
    let list = |values: Vec<Option<AnyValue>>| {
        any_value(Value::ArrayValue(ArrayValue {
            values: values.into_iter().map(Option::unwrap_or_default).collect(),
        }))
    };
    for (value, expected) in [
        (any_value(Value::BoolValue(false)), "false"),
        (any_value(Value::IntValue(i64::MIN)), "-9223372036854775808"),
        (any_value(Value::DoubleValue(1.0)), "1.0"),
        (any_value(Value::DoubleValue(f64::NAN)), "NaN"),
        (any_value(Value::BytesValue(b"hi!".to_vec())), "aGkh"),
        (list(vec![]), "[]"),
        (
            list(vec![
                text("a\"\n"),
                any_value(Value::BytesValue(b"hi!".to_vec())),
                None,
                list(vec![text("b")]),
            ]),
            r#"["a\"\n","aGkh",null,["b"]]"#,
        ),
        (
            list(vec![any_value(Value::DoubleValue(f64::NEG_INFINITY)), any_value(Value::IntValue(2))]),
            r#"["-Infinity",2]"#,
        ),
        (
            any_value(Value::KvlistValue(KeyValueList {
                values: vec![pair("a", any_value(Value::BoolValue(true))), pair("b", None)],
            })),
            r#"{"a":true,"b":null}"#,
        ),
    ] {
        let record = LogRecord { body: value.clone(), attributes: vec![pair("k", value)], ..log() };
        let flat = flat(Signal::Logs, &logs(vec![record]));
        check_row(&flat, 0, &[&format!("body={expected}"), &format!("attributes={{k: {expected}}}")]);
    }
}

#[test]
fn what_was_not_sent_is_null() {
    let request = ExportLogsServiceRequest {
        resource_logs: vec![ResourceLogs {
            scope_logs: vec![ScopeLogs { log_records: vec![LogRecord::default()], ..Default::default() }],
            ..Default::default()
        }],
    };
    let expected = "flags=0\nattributes={}\ndropped_attributes_count=0\n\
                    resource={attributes: {}, dropped_attributes_count: 0}\n\
                    instrumentation_scope={name: null, version: null, attributes: {}, dropped_attributes_count: 0}";
    assert_eq!(rows(&flat(Signal::Logs, &request)), [expected]);
    let late = LogRecord { observed_time_unix_nano: 5000, ..LogRecord::default() };
    check_row(&flat(Signal::Logs, &logs(vec![late])), 0, &["time=1970-01-01T00:00:00.000005Z"]);
}

#[test]
fn of_a_key_twice_the_last_counts() {
    let few = vec![pair("a", text("1")), pair("b", text("2")), pair("a", text("3"))];
    let many = (0..50).map(|n| pair(&format!("k{}", n % 25), any_value(Value::IntValue(n)))).collect();
    let of = |attributes| flat(Signal::Logs, &logs(vec![LogRecord { attributes, ..log() }]));
    check_row(&of(few), 0, &["attributes={a: 3, b: 2}"]);
    let expected: Vec<String> = (0..25).map(|n| format!("k{n}: {}", n + 25)).collect();
    check_row(&of(many), 0, &[&format!("attributes={{{}}}", expected.join(", "))]);
}

#[test]
fn a_span_is_a_row_with_its_events_and_links() {
    let flat = flat(Signal::Traces, &spans(vec![span(), Span::default()]));
    check_row(&flat, 0, &ORIGIN);
    let link = format!(
        "links=[{{trace_id: {}, span_id: {}, trace_state: null, attributes: {{l: m}}, \
         dropped_attributes_count: 0, flags: 1}}]",
        "01".repeat(16),
        "02".repeat(8)
    );
    check_row(
        &flat,
        0,
        &[
            "time=2023-11-14T22:13:20.123456Z",
            "start_time_unix_nano=1700000000123456789",
            "end_time_unix_nano=1700000000123457789",
            "trace_state=x=y",
            "name=GET /",
            "kind=SPAN_KIND_SERVER",
            "flags=257",
            "status={code: STATUS_CODE_ERROR, message: no}",
            "attributes={http.status: 200}",
            "dropped_attributes_count=1",
            "events=[{time_unix_nano: 1700000000123456794, name: e, attributes: {}, dropped_attributes_count: 0}, \
             {time_unix_nano: null, name: null, attributes: {x: true}, dropped_attributes_count: 0}]",
            "dropped_events_count=2",
            &link,
            "dropped_links_count=3",
        ],
    );
    assert!(!rows(&flat)[0].contains("parent_span_id"));
    check_row(&flat, 1, &["events=[]", "links=[]", "kind=SPAN_KIND_UNSPECIFIED"]);
    let unknown = Span { kind: 77, ..span() };
    check_row(&super::tests::flat(Signal::Traces, &spans(vec![unknown])), 0, &["kind=77"]);
}

#[test]
fn a_data_point_of_each_kind_is_a_row() {
    let flat = flat(Signal::Metrics, &metrics(all_metrics()));
    assert_eq!(rows(&flat).len(), 6);
    (0..6).for_each(|row| check_row(&flat, row, &ORIGIN));
    check_row(&flat, 0, &["name=gauge", "metric_type=gauge", "unit=s", "value=1.5", "exemplars=[]"]);
    check_row(&flat, 1, &["value=9.223372036854776e18", "value_int=9223372036854775807"]);
    let exemplar = format!(
        "exemplars=[{{time_unix_nano: {TIME}, value: 3.0, value_int: 3, trace_id: {}, span_id: null, \
         filtered_attributes: {{}}}}]",
        "01".repeat(16)
    );
    let temporality = "aggregation_temporality=AGGREGATION_TEMPORALITY_CUMULATIVE";
    let start = "start_time_unix_nano=1700000000123456788";
    check_row(
        &flat,
        2,
        &["metric_type=sum", "is_monotonic=true", temporality, start, "attributes={k: v}", &exemplar],
    );
    let temporality = "aggregation_temporality=AGGREGATION_TEMPORALITY_DELTA";
    let numbers = ["count=6", "sum=0.0", "min=-1.0", "bucket_counts=[1, 2, 3]", "explicit_bounds=[0.5, 1.0]"];
    check_row(&flat, 3, &numbers);
    check_row(&flat, 3, &["metric_type=histogram", temporality, "attributes={k: v}", &exemplar]);
    check_row(
        &flat,
        4,
        &[
            "metric_type=exponential_histogram",
            "count=300",
            "scale=-3",
            "zero_count=4",
            "zero_threshold=0.25",
            "max=9.0",
            "positive={offset: -2, bucket_counts: [1, 300, 0]}",
            "negative={offset: null, bucket_counts: null}",
            "attributes={k: v}",
        ],
    );
    let quantiles = "quantile_values=[{quantile: 0.5, value: 2.0}, {quantile: 0.0, value: 0.0}]";
    check_row(&flat, 5, &["metric_type=summary", "count=2", "sum=4.0", quantiles]);
    let rows = rows(&flat);
    for (row, absent) in [(0, "count="), (0, "is_monotonic"), (3, "max="), (4, "sum="), (5, "bucket_counts=")]
    {
        assert!(!rows[row].lines().any(|line| line.starts_with(absent)), "{absent} is in\n{}", rows[row]);
    }
}

fn check_json(signal: Signal, request: &(impl Message + Serialize)) {
    let json = serde_json::to_vec(request).expect("JSON");
    let translated = json::to_protobuf(signal, &json).expect("OTLP's JSON");
    let translated = flatten(signal, &translated, FRAME_BYTES_MAX).expect("sound");
    let expected = rows(&flat(signal, request));
    assert!(!expected.is_empty());
    assert_eq!(rows(&translated), expected, "{}", String::from_utf8_lossy(&json));
}

#[test]
fn json_is_the_same_rows() {
    check_json(Signal::Logs, &logs(vec![log(), LogRecord::default()]));
    check_json(Signal::Traces, &spans(vec![span(), Span::default()]));
    check_json(Signal::Metrics, &metrics(all_metrics()));
}

#[test]
fn json_as_people_write_it() {
    let json = br#"{"resourceLogs":[{"futureField":{"a":[1,{}]},"scopeLogs":[{"logRecords":[
        {"timeUnixNano":"1700000000123456789","severityNumber":9,"flags":null,"traceId":"AB00000000000000000000000000000f",
         "body":{"kvlistValue":{"values":[{"key":"n","value":{"intValue":"5"}},{"key":"m","value":{"intValue":6}},
           {"key":"b","value":{"bytesValue":"aGkh"}},{"key":"d","value":{"doubleValue":"NaN"}}]}},"attributes":[]},
        {"timeUnixNano":1700000000123456789,"droppedAttributesCount":2.0,"body":{"stringValue":"\u00e9"}}]}]}]}"#;
    let request = json::to_protobuf(Signal::Logs, json).expect("sound");
    let flat = flatten(Signal::Logs, &request, FRAME_BYTES_MAX).expect("sound");
    check_row(&flat, 0, &[r#"body={"n":5,"m":6,"b":"aGkh","d":"NaN"}"#, "severity_number=9"]);
    check_row(&flat, 0, &["time_unix_nano=1700000000123456789", "trace_id=ab00000000000000000000000000000f"]);
    check_row(&flat, 1, &["time_unix_nano=1700000000123456789", "dropped_attributes_count=2", "body=é"]);
    for empty in ["{}", "{\"resourceLogs\":[]}", "{\"resourceLogs\":null}"] {
        assert_eq!(json::to_protobuf(Signal::Logs, empty.as_bytes()).expect("nothing"), b"");
    }
}

#[test]
fn json_that_is_none_is_refused_by_field_and_place() {
    let record =
        |record: &str| format!(r#"{{"resourceLogs":[{{"scopeLogs":[{{"logRecords":[{record}]}}]}}]}}"#);
    for (json, why) in [
        ("".to_owned(), "EOF"),
        ("[]".to_owned(), "expected an object"),
        (record(r#"{"traceId":"xyz"}"#), "field traceId: expected an id in hex, got \"xyz\""),
        (record(r#"{"traceId":"é"}"#), "field traceId"),
        (record(r#"{"timeUnixNano":-1e30}"#), "field timeUnixNano: expected an integer"),
        (record(r#"{"timeUnixNano":"99999999999999999999999"}"#), "out of the range of 64 bits"),
        (record(r#"{"flags":-1}"#), "out of the range of 32 bits"),
        (record(r#"{"severityNumber":"SEVERITY_NUMBER_INFO"}"#), "field severityNumber: expected an integer"),
        (record(r#"{"severityText":["a"]}"#), "field severityText: expected text, got an array"),
        (record(r#"{"attributes":{"key":"a"}}"#), "field attributes: expected an array, got an object"),
        (record(r#"{"attributes":[null]}"#), "field attributes"),
        (record(r#"{"body":"text"}"#), "field body: expected an object, got \"text\""),
        (record(r#"{"body":{"boolValue":1}}"#), "field boolValue: expected true or false"),
        ("{} {}".to_owned(), "trailing"),
    ] {
        let error = json::to_protobuf(Signal::Logs, json.as_bytes()).expect_err(why);
        assert_eq!(error.code, "malformed_json");
        assert!(error.message.contains(why) && error.message.contains("line 1"), "{why}: {}", error.message);
    }
    let misspelt = json::to_protobuf(Signal::Logs, br#"{"resource_logs":[]}"#).expect_err("nothing known");
    assert!(misspelt.message.contains("\"resource_logs\" and no \"resourceLogs\""), "{}", misspelt.message);
}

#[test]
fn a_record_that_does_not_fit_is_named_and_the_others_are_in() {
    let bad = LogRecord { time_unix_nano: u64::MAX, ..log() };
    let flat = flat(Signal::Logs, &logs(vec![bad.clone(), log(), bad.clone(), bad, log()]));
    let why = "column time_unix_nano: 18446744073709551615 is out of the range of int64".to_owned();
    let places: Vec<u64> = flat.refused.iter().map(|refused| refused.place).collect();
    assert_eq!(places, [0, 2, 3]);
    assert_eq!(flat.refused[0], Refused { place: 0, why });
    assert_eq!(rows(&flat).len(), 2);
    assert_eq!((flat.place_of(0), flat.place_of(1)), (1, 4));
    let without_data = Metric { name: "m".to_owned(), ..Default::default() };
    let all = super::tests::flat(Signal::Metrics, &metrics(vec![without_data]));
    assert!(all.frames.is_empty() && all.refused[0].why.contains("metric \"m\" has no data"), "{all:?}");
}

#[test]
fn nested_misfits_leave_the_columns_whole() {
    let event = Event { time_unix_nano: u64::MAX, ..Default::default() };
    let bad = Span { events: vec![event.clone(), event], ..span() };
    let flat = flat(Signal::Traces, &spans(vec![span(), bad, span()]));
    assert_eq!(rows(&flat).len(), 2);
    assert_eq!(flat.refused.len(), 1);
    assert!(flat.refused[0].why.starts_with("column events.time_unix_nano"), "{:?}", flat.refused);
}

#[test]
fn many_rows_are_many_frames_and_no_frame_is_too_large() {
    let body = |bytes: usize| LogRecord { body: text(&"x".repeat(bytes)), ..log() };
    let request = logs((0..2000).map(|n| body(n % 1500)).collect()).encode_to_vec();
    let flat = flatten(Signal::Logs, &request, FRAME_BYTES_MAX).expect("sound");
    assert!(flat.frames.len() > 2, "{}", flat.frames.len());
    assert_eq!(rows(&flat).len(), 2000);
    let small = flatten(Signal::Logs, &request, 16 << 10).expect("sound");
    assert!(small.frames.iter().all(|frame| frame.payload.len() <= 16 << 10));
    assert_eq!(rows(&small), rows(&flat));
    let error =
        flatten(Signal::Logs, &logs(vec![body(20 << 10)]).encode_to_vec(), 16 << 10).expect_err("too large");
    assert_eq!(error.code, "record_too_large");
}

#[test]
fn a_little_that_flattens_to_much_is_refused() {
    let mut request = logs(vec![LogRecord::default(); 2000]);
    let attributes = vec![pair("a", text(&"x".repeat(64 << 10)))];
    request.resource_logs[0].resource = Some(Resource { attributes, ..Default::default() });
    let error = flatten(Signal::Logs, &request.encode_to_vec(), FRAME_BYTES_MAX).expect_err("too large");
    assert_eq!(error.code, "request_too_large");
}

#[test]
fn values_nested_too_deep_are_refused() {
    let mut value = text("x");
    for _ in 0..40 {
        value = any_value(Value::ArrayValue(ArrayValue { values: value.into_iter().collect() }));
    }
    let request = logs(vec![LogRecord { body: value, ..log() }]).encode_to_vec();
    let error = flatten(Signal::Logs, &request, FRAME_BYTES_MAX).expect_err("too deep");
    assert_eq!(error.code, "nested_too_deep");
}

#[test]
fn tables_have_the_columns_that_the_documentation_names() {
    let columns = |signal| {
        let schema = schema(signal);
        let text = schema
            .fields()
            .iter()
            .map(|field| format!("{} {}", field.name(), types::text(field.data_type())));
        text.collect::<Vec<_>>()
    };
    let document = include_str!("columns.md");
    for (signal, title) in
        [(Signal::Logs, "## Logs"), (Signal::Traces, "## Spans"), (Signal::Metrics, "## Metrics")]
    {
        let section =
            document.split(title).nth(1).and_then(|rest| rest.split("\n## ").next()).expect("a section");
        let rows = section.lines().filter_map(|line| line.strip_prefix("| `"));
        let documented: Vec<String> = rows
            .map(|row| {
                let mut cells = row.split('`');
                format!("{} {}", cells.next().expect("a name"), cells.nth(1).expect("a type"))
            })
            .collect();
        assert_eq!(documented, columns(signal), "{title}");
    }
}

#[test]
fn the_budget_is_taken_and_given_back_as_a_whole() {
    let budget = Budget::new(100);
    let (mut first, mut second) = (Room(None), Room(None));
    budget.take(&mut first, 40).expect("room");
    budget.take(&mut first, 40).expect("room");
    let busy = budget.take(&mut second, 30).expect_err("used up");
    assert!(busy.retryable && busy.retry_after_ms.is_some(), "{busy:?}");
    drop(first);
    budget.take(&mut second, 100).expect("room again");
}

fn check_no_bug(result: Result<Flat, Error>) {
    if let Err(error) = result {
        assert_ne!(error.code, "internal", "{error}");
    }
}

proptest! {
    #[test]
    fn damaged_requests_are_refused_or_taken(at in any::<prop::sample::Index>(), byte: u8, cut: bool) {
        for (signal, request) in [
            (Signal::Logs, logs(vec![log()]).encode_to_vec()),
            (Signal::Traces, spans(vec![span()]).encode_to_vec()),
            (Signal::Metrics, metrics(all_metrics()).encode_to_vec()),
        ] {
            let mut damaged = request;
            let at = at.index(damaged.len());
            damaged[at] = byte;
            damaged.truncate(if cut { at } else { damaged.len() });
            check_no_bug(flatten(signal, &damaged, FRAME_BYTES_MAX));
        }
    }

    #[test]
    fn damaged_json_is_refused_or_taken(at in any::<prop::sample::Index>(), byte: u8) {
        let mut json = serde_json::to_vec(&metrics(all_metrics())).expect("JSON");
        let at = at.index(json.len());
        json[at] = byte;
        if let Ok(request) = json::to_protobuf(Signal::Metrics, &json) {
            check_no_bug(flatten(Signal::Metrics, &request, FRAME_BYTES_MAX));
        }
    }
}
