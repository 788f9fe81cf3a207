//! Tables as they are described, and as they are guessed.
//!
//! *Owns*: what must hold of a description that is taken.
//! *Does not own*: its form (`sluice_shared::table`), guessing (`sluice_pod::decode::infer`).

use sluice_pod::decode::infer::infer;
use sluice_pod::decode::json::JsonDecoder;
use sluice_shared::frame::UnknownFields;
use sluice_shared::table::{TableSpec, described_columns, types};

use super::draw::Draw;
use super::records::TABLES;

/// By its first byte an input is a table's spec, a column's type, records to guess a schema from, or a pod's description. What
/// is taken is written so that it is taken as the same again; records fit the columns that were guessed from them.
pub(super) fn tables(input: &[u8]) {
    let mut draw = Draw::new(input);
    let kind = draw.below(4);
    let text = draw.rest();
    match kind {
        0 => {
            let Ok(spec) = TableSpec::from_json(text) else { return };
            let again = spec.to_json().to_string();
            assert_eq!(TableSpec::from_json(again.as_bytes()).expect("own text"), spec);
        }
        1 => {
            let Ok(text) = std::str::from_utf8(text) else { return };
            let Ok(data_type) = types::parse(text) else { return };
            assert_eq!(types::parse(&types::text(&data_type)).expect("own text"), data_type);
        }
        2 => {
            let Ok(schema) = infer(text) else { return };
            let mut decoder = JsonDecoder::new(schema, 1 << 16).expect("types of a table");
            decoder.append(text, UnknownFields::Refuse, &mut |place, reason| {
                let is_of_schema = ["unknown_field", "missing_value"].contains(&reason.code);
                assert!(!is_of_schema, "record {place} made the schema: {reason:?}");
            });
        }
        _ => drop(described_columns(text)),
    }
}

/// Specs, each type, records.
pub(super) fn table_seeds() -> Vec<Vec<u8>> {
    let mut seeds = Vec::new();
    let types = TABLES.iter().flat_map(|(columns, _)| columns.iter());
    let fields: Vec<serde_json::Value> = types
        .clone()
        .enumerate()
        .map(|(place, (_, text, nullable))| {
            serde_json::json!({"name": format!("c{place}"), "type": text, "nullable": nullable})
        })
        .collect();
    let spec = serde_json::json!({
        "schema": {"fields": fields}, "partition_columns": ["c0"], "properties": {"sluice.system_columns": "false"},
    });
    let object = serde_json::json!({"schema": {"fields": [
        {"name": "a", "type": {"name": "timestamp", "unit": "MICROSECOND", "timezone": "UTC"}},
        {"name": "l", "type": {"name": "list"}, "children": [{"name": "item", "type": {"name": "int", "bitWidth": 32,
            "isSigned": true}, "nullable": true}]},
    ]}});
    seeds.extend([&spec, &object].map(|spec| [&[0][..], spec.to_string().as_bytes()].concat()));
    seeds.push([&[3][..], serde_json::json!({"spec": spec}).to_string().as_bytes()].concat());
    seeds.extend(types.map(|(_, text, _)| [&[1][..], text.as_bytes()].concat()));
    seeds.push(b"\x01struct<`a b``c`: int8 not null, d: map<string, bool>>".to_vec());
    seeds.extend(TABLES.map(|(_, records)| [&[2][..], records.as_bytes()].concat()));
    seeds
}
