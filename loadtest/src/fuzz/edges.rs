//! Bodies of posts and requests of OTLP, as the gateway takes them.
//!
//! *Owns*: what must hold of the frames that they become.
//! *Does not own*: cutting and translating (`sluice_gateway`).

use arrow::array::RecordBatch;
use bytes::Bytes;
use sluice_gateway::fuzzing::{Body, Telemetry, split_body};
use sluice_pod::decode::arrow::ArrowDecoder;
use sluice_shared::frame::{UnknownFields, count_lines, lines};
use sluice_shared::table::described_columns;

use super::draw::Draw;
use super::records::arrow_seeds;

/// No record is too large.
const RECORD_BYTES_LARGE: usize = 1 << 20;
const RECORD_BYTES_SMALL: usize = 60;
const DECODED_BYTES_MAX: usize = 8 << 20;

fn csv_table() -> Body {
    let description =
        br#"{"spec":{"schema":{"fields":[{"name":"n","type":"int64"},{"name":"s","type":"string"},
        {"name":"x","type":"float64"},{"name":"b","type":"bool"},{"name":"at","type":"timestamp"}]}}}"#;
    Body::Csv(described_columns(description))
}

/// A body of one kind, in pieces. Its frames hold as many records as they say, and pieces do not show; where records may be
/// large, and where not, no frame is larger than it may be.
pub(super) fn posts(input: &[u8]) {
    let mut draw = Draw::new(input);
    let body = match draw.below(6) {
        0 => Body::Lines,
        1 => Body::Values,
        2 => Body::Array,
        3 => Body::Csv(None),
        4 => csv_table(),
        _ => Body::Arrow,
    };
    let is_small = draw.flag();
    let pieces = draw.pieces();
    let record_bytes_max = if is_small { RECORD_BYTES_SMALL } else { RECORD_BYTES_LARGE };
    let (frames, code) = split_body(&body, &pieces, record_bytes_max);
    for (count, payload) in &frames {
        assert!(*count > 0, "a frame without records");
        if !matches!(body, Body::Arrow) {
            assert_eq!(count_lines(payload), *count as usize);
            assert!(payload.len() <= record_bytes_max + 1, "{} bytes", payload.len());
        }
    }
    if is_small || matches!(body, Body::Arrow) {
        return;
    }
    let (whole, whole_code) = split_body(&body, &[&pieces.concat()], record_bytes_max);
    let records = |frames: &[(u32, Bytes)]| -> Vec<Vec<u8>> {
        frames.iter().flat_map(|(_, payload)| lines(payload).map(<[u8]>::to_vec)).collect()
    };
    assert_eq!((records(&frames), code), (records(&whole), whole_code), "pieces show");
}

/// A body of each kind.
pub(super) fn post_seeds() -> Vec<Vec<u8>> {
    let text: [(u8, &str); 5] = [
        (0, "{\"n\":1}\n\n{\"n\":2}\r\nnot json"),
        (1, "{\"a\":\n1}{\"b\":[\"]\"]}\n[1,{\"c\":\"\\\"}\"}] "),
        (2, " [ {\"a\":\"x,]\"},\n{\"b\":[1,2]}, \"two\" ]\n"),
        (3, "\u{feff}any,thing\r\n1,\"two\nlines\"\n\n\"a \"\"quote\"\"\",x\n"),
        (4, "s,n,x,b,at\n12,07,1.5e3,true,2013-01-31T05:00:00Z\nNA,,,FALSE,\n\"open"),
    ];
    let mut seeds = Vec::new();
    for (kind, text) in text {
        seeds.push([&[kind, 0, 2, 3, 9][..], text.as_bytes()].concat());
        seeds.push([&[kind, 1, 0][..], text.as_bytes()].concat());
    }
    // Those of the pod's decoder have three bytes before the stream.
    seeds.extend(arrow_seeds().iter().step_by(4).map(|seed| [&[5, 0, 1, 90][..], &seed[3..]].concat()));
    seeds
}

/// A request of OTLP, in protobuf or JSON. It is refused, or becomes rows that fit its signal's table, all of them.
pub(super) fn otlp(input: &[u8]) {
    let mut draw = Draw::new(input);
    let signal = [Telemetry::Logs, Telemetry::Traces, Telemetry::Metrics][draw.below(3)];
    let is_json = draw.flag();
    let frame_bytes_max = [10 << 20, 6_000][draw.below(2)];
    let Ok((frames, _)) = signal.flatten(is_json, draw.rest(), frame_bytes_max) else { return };
    let mut decoder = ArrowDecoder::new(signal.schema(), DECODED_BYTES_MAX);
    for (rows, payload) in frames {
        assert!(payload.len() <= frame_bytes_max, "{} bytes", payload.len());
        let refuse = &mut |row, reason| unreachable!("row {row}: {reason:?}");
        let decoded = decoder.decode(&payload, rows as usize, UnknownFields::Refuse, refuse);
        let batches = decoded.expect("rows of its table");
        assert_eq!(batches.iter().map(RecordBatch::num_rows).sum::<usize>(), rows as usize);
    }
}

/// A request of each signal in JSON, and one of logs in protobuf.
pub(super) fn otlp_seeds() -> Vec<Vec<u8>> {
    let origin = r#""resource":{"attributes":[{"key":"service.name","value":{"stringValue":"shop"}},
        {"key":"l","value":{"arrayValue":{"values":[{"intValue":"7"},{"boolValue":true},{"bytesValue":"aGk="}]}}}]}"#;
    let scope =
        r#""scope":{"name":"lib","version":"1","attributes":[{"key":"a","value":{"doubleValue":1.5}}]}"#;
    let attributes =
        r#""attributes":[{"key":"k","value":{"kvlistValue":{"values":[{"key":"x","value":{}}]}}}]"#;
    let ids = r#""traceId":"0af7651916cd43dd8448eb211c80319c","spanId":"b7ad6b7169203331""#;
    let logs = format!(
        r#"{{"resourceLogs":[{{{origin},"scopeLogs":[{{{scope},"logRecords":[{{"timeUnixNano":"1700000000123456789",
        "severityNumber":9,"severityText":"INFO","body":{{"stringValue":"it works"}},{ids},"flags":1,{attributes}}}],
        "schemaUrl":"s"}}]}}]}}"#
    );
    let spans = format!(
        r#"{{"resourceSpans":[{{{origin},"scopeSpans":[{{{scope},"spans":[{{{ids},"parentSpanId":"","name":"get",
        "kind":2,"startTimeUnixNano":1700000000123456789,"endTimeUnixNano":"1700000000123456999",
        "events":[{{"timeUnixNano":"1","name":"e",{attributes}}}],"links":[{{{ids}}}],"status":{{"code":1}}}}]}}]}}]}}"#
    );
    let points = r#"{"timeUnixNano":"17","asDouble":1.5,"exemplars":[{"asInt":"3","traceId":"00"}]}"#;
    let metrics = format!(
        r#"{{"resourceMetrics":[{{{origin},"scopeMetrics":[{{{scope},"metrics":[
        {{"name":"g","unit":"s","gauge":{{"dataPoints":[{points}]}}}},
        {{"name":"s","sum":{{"aggregationTemporality":2,"isMonotonic":true,"dataPoints":[{points}]}}}},
        {{"name":"h","histogram":{{"dataPoints":[{{"count":"3","sum":1,"bucketCounts":["1","2"],"explicitBounds":[1]}}]}}}},
        {{"name":"e","exponentialHistogram":{{"dataPoints":[{{"scale":-1,"positive":{{"offset":1,"bucketCounts":["1"]}}}}]}}}},
        {{"name":"q","summary":{{"dataPoints":[{{"quantileValues":[{{"quantile":0.5,"value":1}}]}}]}}}}]}}]}}]}}"#
    );
    let json = [logs, spans, metrics].into_iter().zip(0_u8..);
    let mut seeds: Vec<Vec<u8>> =
        json.map(|(text, signal)| [&[signal, 1, 0][..], text.as_bytes()].concat()).collect();
    seeds.push([&[0, 0, 1][..], &binary_logs()].concat());
    seeds
}

/// A log record with time, severity and body, of a resource and a scope.
fn binary_logs() -> Vec<u8> {
    let field = |number: u8, value: &[u8]| {
        [&[number << 3 | 2, u8::try_from(value.len()).expect("short")][..], value].concat()
    };
    let time = b"\x09\x01\x02\x03\x04\x05\x06\x07\x08\x10\x09";
    let record = [&time[..], &field(5, &field(1, b"text")), &field(9, &[0xab; 16])].concat();
    let scope = [field(1, &field(1, b"lib")), field(2, &record)].concat();
    let attribute = [field(1, b"k"), field(2, &field(1, b"v"))].concat();
    let resource = [field(1, &field(1, &attribute)), field(2, &scope), field(3, b"s")].concat();
    field(1, &resource)
}
