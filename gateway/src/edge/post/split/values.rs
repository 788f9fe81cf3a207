//! One JSON object, or an array of records; several values one after the other are taken too.
//!
//! *Owns*: where a value begins and ends. A core.
//! *Does not own*: whether it is JSON: that is for the pod to refuse, by record; frames (`split`).

use bytes::BytesMut;
use sluice_shared::error::Error;

use super::Ready;
use crate::edge::json_text::{Scan, is_blank, is_space, put_value};

/// Cuts values by their brackets and, in an array, by its commas.
#[derive(Debug)]
pub(crate) struct Values {
    array_only: bool,
    at: At,
    scan: Scan,
    /// What has come of the value that has begun.
    rest: BytesMut,
    /// Records of the array so far.
    elements: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum At {
    Start,
    /// Values without an array around them.
    Alone,
    Within,
    After,
}

/// What a byte does to the value before it.
enum Step {
    GoesOn,
    /// The array opens with this byte.
    Opens,
    /// The value ends before this byte.
    EndsBefore,
    /// The value ends with this byte.
    EndsWith,
}

impl Values {
    pub(super) fn new(array_only: bool) -> Self {
        Self { array_only, at: At::Start, scan: Scan::default(), rest: BytesMut::new(), elements: 0 }
    }

    pub(super) fn push(&mut self, piece: &[u8], ready: &mut Ready) -> Result<(), Error> {
        let mut start = 0;
        for (at, byte) in piece.iter().enumerate() {
            if at == start && self.rest.is_empty() && is_space(*byte) {
                start += 1;
                continue;
            }
            match self.step(*byte)? {
                Step::GoesOn => continue,
                Step::Opens => {}
                Step::EndsBefore => self.end_value(&piece[start..at], ready)?,
                Step::EndsWith => self.end_value(&piece[start..=at], ready)?,
            }
            start = at + 1;
        }
        ready.check_record(self.rest.len() + piece.len() - start)?;
        self.rest.extend_from_slice(&piece[start..]);
        Ok(())
    }

    fn step(&mut self, byte: u8) -> Result<Step, Error> {
        match self.at {
            At::Start if byte == b'[' => {
                self.at = At::Within;
                return Ok(Step::Opens);
            }
            At::Start if self.array_only => {
                return Err(Error::invalid("invalid_json", "the body is no JSON array: send `[{…},…]`"));
            }
            At::Start => self.at = At::Alone,
            At::After => {
                return Err(Error::invalid("invalid_json", "the body goes on after its array's end"));
            }
            At::Alone | At::Within => {}
        }
        let depth = self.scan.depth;
        let is_structure = self.scan.step(byte);
        Ok(match (self.at, byte) {
            _ if !is_structure => Step::GoesOn,
            (At::Within, b',') if depth == 0 => Step::EndsBefore,
            (At::Within, b']') if depth == 0 => {
                self.at = At::After;
                Step::EndsBefore
            }
            (At::Alone, b'}' | b']') if depth == 1 => Step::EndsWith,
            (At::Alone, b'\n') if depth == 0 => Step::EndsBefore,
            _ => Step::GoesOn,
        })
    }

    fn end_value(&mut self, last: &[u8], ready: &mut Ready) -> Result<(), Error> {
        let rest = self.rest.split();
        if is_blank(&rest) && is_blank(last) {
            return self.check_nothing();
        }
        self.elements += 1;
        if rest.is_empty() {
            return ready.add_line(|line| put_value(line, last));
        }
        let value = [&rest, last].concat();
        ready.add_line(|line| put_value(line, &value))
    }

    /// There is no value where one has ended: only in an empty array, and between lines.
    fn check_nothing(&self) -> Result<(), Error> {
        let is_missing = self.at == At::Within || (self.at == At::After && self.elements > 0);
        if !is_missing {
            return Ok(());
        }
        let message = format!("a value is missing in the array, behind its first {}", self.elements);
        Err(Error::invalid("invalid_json", message))
    }

    pub(super) fn finish(&mut self, ready: &mut Ready) -> Result<(), Error> {
        match self.at {
            At::Start if self.array_only => Err(Error::invalid("invalid_json", "the body is empty")),
            At::Within => {
                let message = "the array is not closed: the end of the body is missing";
                Err(Error::invalid("invalid_json", message))
            }
            At::Alone => self.end_value(&[], ready),
            At::Start | At::After => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::Splitter;
    use super::super::tests::{check_cuts, records};

    fn check(body: &str, expected: &[&str], code: Option<&str>) {
        let expected: Vec<String> = expected.iter().map(|line| (*line).to_owned()).collect();
        let got = records(Splitter::values(false), &[body.as_bytes()]);
        assert_eq!(got, (expected, code.map(str::to_owned)), "{body}");
    }

    #[test]
    fn an_array_is_its_elements() {
        check("[]", &[], None);
        check(" [ \n ] \n", &[], None);
        check("[{\"a\":\"x,]\"},{\"b\":[1,2]}]", &["{\"a\":\"x,]\"}", "{\"b\":[1,2]}"], None);
        check("[\n{\"a\":\n1},\n{\"a\":\"\\\"\n\"}\n]", &["{\"a\": 1}", "{\"a\":\"\\\"\r\"} "], None);
        check("[1, \"two\", {\"a\":1], {}]", &["1", "\"two\"", "{\"a\":1]", "{}"], None);
    }

    #[test]
    fn values_without_an_array_are_records() {
        check("", &[], None);
        check("{\n \"a\": 1\n}\n", &["{  \"a\": 1 }"], None);
        check("{\"a\":1}\n{\"a\":2}{}", &["{\"a\":1}", "{\"a\":2}", "{}"], None);
        check("not json\n{\"a\"", &["not json", "{\"a\""], None);
    }

    #[test]
    fn what_comes_before_the_fault_is_taken() {
        check("[{\"a\":1},{\"b\"", &["{\"a\":1}"], Some("invalid_json"));
        check("[{\"a\":1}", &[], Some("invalid_json"));
        check("[{\"a\":1},,{}]", &["{\"a\":1}"], Some("invalid_json"));
        check("[{\"a\":1},]", &["{\"a\":1}"], Some("invalid_json"));
        check("[,]", &[], Some("invalid_json"));
        check("[{\"a\":1}] x", &["{\"a\":1}"], Some("invalid_json"));
        for body in ["", "{}", "hello"] {
            let (got, code) = records(Splitter::values(true), &[body.as_bytes()]);
            assert_eq!((got.len(), code.as_deref()), (0, Some("invalid_json")), "{body}");
        }
    }

    proptest! {
        #[test]
        fn pieces_do_not_show(
            body in "[\\[\\]{}\",:\\\\ \n\r1a]{0,60}",
            places in prop::collection::vec(any::<usize>(), 0..9),
        ) {
            check_cuts(|| Splitter::values(false), body.as_bytes(), &places);
            check_cuts(|| Splitter::values(false), format!("[{{}},{body}]").as_bytes(), &places);
        }
    }
}
