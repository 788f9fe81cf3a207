//! Plain JSON texts and bodies, split into records: one a line, as pods take them.
//!
//! Splitting looks at structure only (brackets, strings, line ends). Whether a record is valid JSON, and fits
//! its table, is the pod's verdict: what is no JSON at all is still a record, with an offset and a refusal.
//!
//! *Owns*: where a record begins and ends; counting lines.
//! *Does not own*: what is in a record.
//! Keeps P8: no part of a text disappears; each becomes a record or is blank.

use bytes::{BufMut, Bytes, BytesMut};
use sluice_shared::frame::count_lines;

/// Records as lines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Lines {
    /// How many lines are not blank. None: more than a frame can count.
    pub(crate) count: Option<u32>,
    /// The lines.
    pub(crate) payload: Bytes,
}

impl Lines {
    fn of(payload: Bytes) -> Self {
        Self { count: u32::try_from(count_lines(&payload)).ok(), payload }
    }
}

/// Splits a text: one object (over any number of lines), an array of records, or one record a line. A text of
/// white space alone, and an empty array, hold no record.
pub(crate) fn split(text: Bytes) -> Lines {
    let start = text.iter().position(|byte| !is_space(*byte)).unwrap_or(text.len());
    let end = text.iter().rposition(|byte| !is_space(*byte)).map_or(start, |last| last + 1);
    let text = text.slice(start..end);
    match text.first() {
        Some(b'[') => split_array(text),
        Some(_) if memchr::memchr(b'\n', &text).is_none() => Lines { count: Some(1), payload: text },
        Some(b'{') if first_value_end(&text) == Some(text.len()) => one_line(&text),
        _ => Lines::of(text),
    }
}

/// One record, whatever it looks like, as one line that is not blank.
pub(crate) fn record(text: Bytes) -> Bytes {
    /// No record either, but not blank: the pod refuses it.
    const NOTHING: Bytes = Bytes::from_static(b"\"\"");
    if memchr::memchr(b'\n', &text).is_none() && !is_blank(&text) {
        return text;
    }
    let mut line = BytesMut::with_capacity(text.len() + 1);
    if put_line(&mut line, &text).is_none() {
        return NOTHING;
    }
    line.truncate(line.len() - 1);
    line.freeze()
}

/// An array's elements, one a line. What begins like an array and is none: lines where its first line is whole
/// (then it is lines of arrays), else one record for the pod to refuse.
fn split_array(text: Bytes) -> Lines {
    if first_value_end(&text) == Some(text.len()) {
        return elements(&text).unwrap_or_else(|| one_line(&text));
    }
    let first_line = &text[..memchr::memchr(b'\n', &text).unwrap_or(text.len())];
    let whole = first_value_end(first_line).is_some_and(|end| is_blank(&first_line[end..]));
    if whole { Lines::of(text) } else { one_line(&text) }
}

/// None where an element is missing between commas: then the array is none.
fn elements(array: &[u8]) -> Option<Lines> {
    let body = &array[1..array.len() - 1];
    let mut payload = BytesMut::with_capacity(body.len() + 1);
    let mut count: u32 = 0;
    if is_blank(body) {
        return Some(Lines { count: Some(0), payload: Bytes::new() });
    }
    let (mut scan, mut start) = (Scan::default(), 0);
    for (at, byte) in body.iter().enumerate() {
        if scan.step(*byte) && *byte == b',' && scan.depth == 0 {
            put_line(&mut payload, &body[start..at])?;
            count = count.checked_add(1)?;
            start = at + 1;
        }
    }
    put_line(&mut payload, &body[start..])?;
    Some(Lines { count: count.checked_add(1), payload: payload.freeze() })
}

fn one_line(value: &[u8]) -> Lines {
    let mut payload = BytesMut::with_capacity(value.len() + 1);
    put_line(&mut payload, value);
    Lines { count: Some(1), payload: payload.freeze() }
}

/// Appends a value and a line end. Line ends inside it become spaces, or where they stand in a string (which
/// JSON forbids) carriage returns, which JSON forbids there as well: the verdict stays the same.
fn put_line(to: &mut BytesMut, value: &[u8]) -> Option<()> {
    if is_blank(value) {
        return None;
    }
    if memchr::memchr(b'\n', value).is_none() {
        to.put_slice(value);
    } else {
        let mut scan = Scan::default();
        for byte in value {
            let structural = scan.step(*byte);
            to.put_u8(match (*byte, structural) {
                (b'\n', true) => b' ',
                (b'\n', false) => b'\r',
                (other, _) => other,
            });
        }
    }
    to.put_u8(b'\n');
    Some(())
}

/// Where the bracketed value at the start of `text` ends. None where it does not.
fn first_value_end(text: &[u8]) -> Option<usize> {
    let mut scan = Scan::default();
    for (at, byte) in text.iter().enumerate() {
        if scan.step(*byte) && scan.depth == 0 {
            return Some(at + 1);
        }
    }
    None
}

/// Depth and strings, the only structure that splitting needs.
#[derive(Default)]
struct Scan {
    depth: u32,
    in_string: bool,
    escaped: bool,
}

impl Scan {
    /// Takes a byte; whether it stands outside strings.
    fn step(&mut self, byte: u8) -> bool {
        if self.in_string {
            match byte {
                _ if self.escaped => self.escaped = false,
                b'\\' => self.escaped = true,
                b'"' => self.in_string = false,
                _ => {}
            }
            return false;
        }
        match byte {
            b'"' => self.in_string = true,
            b'{' | b'[' => self.depth = self.depth.saturating_add(1),
            b'}' | b']' => self.depth = self.depth.saturating_sub(1),
            _ => {}
        }
        byte != b'"'
    }
}

fn is_space(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t' | b'\r' | b'\n')
}

fn is_blank(text: &[u8]) -> bool {
    text.iter().all(|byte| is_space(*byte))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    fn check(text: &'static str, expected: &[&str]) {
        let lines = split(Bytes::from_static(text.as_bytes()));
        let found: Vec<&str> = std::str::from_utf8(&lines.payload)
            .expect("text in, text out")
            .split('\n')
            .filter(|line| !line.trim().is_empty())
            .collect();
        assert_eq!(found, expected, "{text:?}");
        assert_eq!(lines.count, Some(expected.len() as u32), "{text:?}");
    }

    #[test]
    fn a_single_record_is_one_line_whatever_it_is() {
        for (text, line) in [
            ("{\"a\":1}", "{\"a\":1}"),
            ("{\n \"a\": 1\n}\n", "{  \"a\": 1 } "),
            ("{\"a\":\"x\ny\"}", "{\"a\":\"x\ry\"}"),
            ("{}\n{}", "{} {}"),
            ("", "\"\""),
            (" \n", "\"\""),
        ] {
            assert_eq!(record(Bytes::from_static(text.as_bytes())), line, "{text:?}");
        }
    }

    #[test]
    fn an_object_is_a_record() {
        check("{\"a\":1}", &["{\"a\":1}"]);
        check("  {\"a\":1}\r\n", &["{\"a\":1}"]);
        check("{\n \"a\": 1\n}", &["{  \"a\": 1 }"]);
    }

    #[test]
    fn an_array_is_its_elements() {
        check("[{\"a\":\"x,]\"},{\"b\":[1,2]}]", &["{\"a\":\"x,]\"}", "{\"b\":[1,2]}"]);
        check("[\n{\"a\":1},\n{\"a\":2}\n]", &[" {\"a\":1}", " {\"a\":2} "]);
        check("[1, \"two\"]", &["1", " \"two\""]);
        check("[]", &[]);
        check("[ \n ]", &[]);
    }

    #[test]
    fn lines_are_records_and_blank_ones_are_not() {
        check("{\"a\":1}\n{\"a\":2}\n", &["{\"a\":1}", "{\"a\":2}"]);
        check("{\"a\":1}\n\n \t\r\n{\"a\":2}", &["{\"a\":1}", "{\"a\":2}"]);
        check("[1]\n[2]", &["[1]", "[2]"]);
        check("", &[]);
        check(" \n ", &[]);
    }

    #[test]
    fn a_broken_line_does_not_take_the_next_ones_with_it() {
        check("{\"a\":1\n{\"b\":2}\n{\"c\":3}", &["{\"a\":1", "{\"b\":2}", "{\"c\":3}"]);
        check("hello\n{\"b\":2}", &["hello", "{\"b\":2}"]);
        check("{\"a\":\"\n{\"b\":2}", &["{\"a\":\"", "{\"b\":2}"]);
    }

    #[test]
    fn what_is_no_array_is_one_record_to_refuse() {
        check("[{\"a\":1},\n{\"b\":2}", &["[{\"a\":1}, {\"b\":2}"]);
        check("[{\"a\":1},,{\"b\":2}]", &["[{\"a\":1},,{\"b\":2}]"]);
        check("[{\"a\":1},]", &["[{\"a\":1},]"]);
        check("[{\"a\":1}] x", &["[{\"a\":1}] x"]);
        check("not json", &["not json"]);
    }

    #[test]
    fn a_line_end_in_a_string_stays_forbidden() {
        check("[{\"a\":\"x\ny\"}]", &["{\"a\":\"x\ry\"}"]);
    }

    fn any_object() -> impl Strategy<Value = Value> {
        let leaf =
            prop_oneof![Just(json!(null)), any::<i32>().prop_map(|n| json!(n)), ".*".prop_map(|s| json!(s))];
        let value = leaf.prop_recursive(3, 16, 4, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                prop::collection::btree_map(".{0,3}", inner, 0..4)
                    .prop_map(|map| Value::Object(map.into_iter().collect())),
            ]
        });
        prop::collection::btree_map(".{0,3}", value, 0..4)
            .prop_map(|map| Value::Object(map.into_iter().collect()))
    }

    fn read(lines: &Lines) -> Vec<Value> {
        lines
            .payload
            .split(|byte| *byte == b'\n')
            .filter(|line| !is_blank(line))
            .map(|line| serde_json::from_slice(line).expect("valid JSON in, valid JSON out"))
            .collect()
    }

    proptest! {
        #[test]
        fn all_forms_of_the_same_records_agree(records in prop::collection::vec(any_object(), 1..6)) {
            let compact = serde_json::to_string(&records).expect("JSON");
            let pretty = serde_json::to_string_pretty(&records).expect("JSON");
            let lines: String = records.iter().map(|record| format!("{record}\n")).collect();
            for text in [compact, pretty, lines] {
                let split = split(text.into());
                prop_assert_eq!(split.count, Some(records.len() as u32));
                prop_assert_eq!(read(&split), records.clone());
            }
            let one = split(serde_json::to_string_pretty(&records[0]).expect("JSON").into());
            prop_assert_eq!(read(&one), vec![records[0].clone()]);
        }

        #[test]
        fn any_text_is_split_and_counted(text in "[\\[\\]{}\",:\\\\ \n\r1a]{0,60}") {
            let lines = split(text.clone().into());
            prop_assert_eq!(lines.count.map(|n| n as usize), Some(count_lines(&lines.payload)));
            prop_assert!(lines.payload.len() <= text.len() + 1);
            let inked = |text: &[u8]| text.iter().filter(|byte| !is_space(**byte)).count();
            let brackets_and_commas = 2 + lines.count.unwrap_or(0) as usize;
            prop_assert!(inked(&lines.payload) + brackets_and_commas >= inked(text.as_bytes()));
        }
    }
}
