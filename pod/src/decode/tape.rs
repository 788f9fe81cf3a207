//! One JSON record as a flat list of nodes, and the numbers in it as they were written.
//!
//! *Owns*: the parser's scratch memory, walking over values, the text of a number.
//! *Does not own*: what a value means to a column.
//!
//! The parser turns numbers with a point, an exponent or more than 64 bits into doubles. Where that could alter a value
//! (decimals) or a message, the number is looked up in the record: the n-th number of the nodes is the n-th of the text.

use serde::de::IgnoredAny;
use simd_json::{Buffers, ErrorType, INPUT_PADDING, Node, StaticNode, Tape};

use super::fault::{Fault, cut};
use crate::table::batch::ReasonCode;

/// Parses records one after the other in the same memory.
pub(super) struct TapeParser {
    scratch: Vec<u8>,
    buffers: Buffers,
    nodes: Tape<'static>,
    numbers: Numbers,
}

/// A parsed record.
pub(super) struct Record<'a> {
    /// The record's values, depth first: an object is its node, then key and value in turn; an array is its node,
    /// then its values.
    nodes: &'a [Node<'a>],
    text: &'a [u8],
    numbers: &'a mut Numbers,
}

/// Where the numbers of a record stand in its text; found out when first asked.
#[derive(Default)]
struct Numbers {
    spans: Vec<(usize, usize)>,
    known: bool,
    /// How many numbers are among the nodes before this one: columns ask in rising order.
    node: usize,
    before: usize,
}

impl TapeParser {
    pub(super) fn new() -> Self {
        Self {
            scratch: Vec::new(),
            buffers: Buffers::default(),
            nodes: Tape(Vec::new()),
            numbers: Numbers::default(),
        }
    }

    /// Parses a record and hands it to `read`.
    pub(super) fn parse<T>(
        &mut self,
        text: &[u8],
        read: impl FnOnce(&mut Record<'_>) -> Result<T, Fault>,
    ) -> Result<T, Fault> {
        // The parser unescapes strings in place and reads past the end.
        self.scratch.clear();
        self.scratch.extend_from_slice(text);
        self.scratch.resize(text.len() + INPUT_PADDING, b' ');
        self.numbers.forget();
        let mut nodes = std::mem::replace(&mut self.nodes, Tape(Vec::new())).reset();
        let parsed =
            simd_json::fill_tape_padded(&mut self.scratch, text.len(), &mut self.buffers, &mut nodes);
        let outcome = match parsed {
            Ok(()) => read(&mut Record { nodes: &nodes.0, text, numbers: &mut self.numbers }),
            Err(error) => Err(not_json(&error, text)),
        };
        self.nodes = nodes.reset();
        outcome
    }
}

impl<'a> Record<'a> {
    pub(super) fn node(&self, at: usize) -> Node<'a> {
        self.nodes[at]
    }

    /// The key that stands at `at`.
    pub(super) fn key(&self, at: usize) -> &'a str {
        match self.nodes[at] {
            Node::String(key) => key,
            _ => unreachable!("the parser lets only strings be keys"),
        }
    }

    /// Where the value after the one at `at` stands.
    pub(super) fn after(&self, at: usize) -> usize {
        match self.nodes[at] {
            Node::Object { count, .. } | Node::Array { count, .. } => at + 1 + count,
            Node::String(_) | Node::Static(_) => at + 1,
        }
    }

    /// The number at `at` as the producer wrote it.
    pub(super) fn number_text(&mut self, at: usize) -> &'a str {
        let numbers = &mut *self.numbers;
        if !numbers.known {
            numbers.known = true;
            find_numbers(self.text, |start, end, _| numbers.spans.push((start, end)));
        }
        if numbers.node > at {
            (numbers.node, numbers.before) = (0, 0);
        }
        numbers.before += self.nodes[numbers.node..at].iter().filter(|node| is_number(node)).count();
        numbers.node = at;
        let (start, end) = numbers.spans[numbers.before];
        std::str::from_utf8(&self.text[start..end]).expect("a number is ASCII")
    }

    /// The value at `at` for a message.
    pub(super) fn shown(&mut self, at: usize) -> String {
        match self.nodes[at] {
            Node::String(text) => format!("{:?}", cut(text)),
            Node::Object { .. } => "an object".to_owned(),
            Node::Array { .. } => "an array".to_owned(),
            Node::Static(StaticNode::Null) => "null".to_owned(),
            Node::Static(StaticNode::Bool(value)) => value.to_string(),
            Node::Static(_) => cut(self.number_text(at)),
        }
    }
}

impl Numbers {
    fn forget(&mut self) {
        self.spans.clear();
        (self.known, self.node, self.before) = (false, 0, 0);
    }
}

fn is_number(node: &Node<'_>) -> bool {
    matches!(node, Node::Static(StaticNode::I64(_) | StaticNode::U64(_) | StaticNode::F64(_)))
}

/// Calls `found` with start and end of each number, and the top-level key it stands below.
fn find_numbers<'a>(text: &'a [u8], mut found: impl FnMut(usize, usize, &'a [u8])) {
    let (mut at, mut depth) = (0, 0_usize);
    let (mut string, mut key): (&[u8], &[u8]) = (&[], &[]);
    while at < text.len() {
        let start = at;
        at += 1;
        match text[start] {
            b'"' => {
                at = string_end(text, at);
                string = &text[start + 1..at.max(start + 2) - 1];
            }
            b'{' | b'[' => depth += 1,
            b'}' | b']' => depth = depth.saturating_sub(1),
            b':' if depth == 1 => key = string,
            b'-' | b'0'..=b'9' => {
                let in_number = |b: &&u8| matches!(b, b'0'..=b'9' | b'+' | b'-' | b'.' | b'e' | b'E');
                at += text[at..].iter().take_while(in_number).count();
                found(start, at, key);
            }
            _ => {}
        }
    }
}

/// Where the string whose first character is at `at` has ended: one past its closing quote.
fn string_end(text: &[u8], mut at: usize) -> usize {
    while let Some(length) = memchr::memchr2(b'"', b'\\', &text[at..]) {
        at += length + 1;
        if text[at - 1] == b'"' {
            return at;
        }
        at = (at + 1).min(text.len());
    }
    text.len()
}

fn not_json(error: &simd_json::Error, text: &[u8]) -> Fault {
    if let Some(fault) = number_out_of_range(text) {
        return fault;
    }
    let what = match error.error() {
        ErrorType::DepthLimitExceeded => "arrays or objects that are nested too deeply".to_owned(),
        _ => what_is_wrong(text).unwrap_or_else(|| match error.index() {
            0 => "the text is no JSON".to_owned(),
            index => format!("something is wrong at byte {}", index.min(text.len())),
        }),
    };
    let shown = cut(&String::from_utf8_lossy(&text[..text.len().min(200)]));
    Fault::new(ReasonCode::NotJson, format!("not a JSON object: {what}, in {shown:?}"))
}

/// The fast parser names what it tried last; a slow one is asked what it expected, and where.
fn what_is_wrong(text: &[u8]) -> Option<String> {
    if let Err(error) = std::str::from_utf8(text) {
        return Some(format!("text that is not UTF-8 at byte {}", error.valid_up_to()));
    }
    let error = serde_json::from_slice::<IgnoredAny>(text).err()?;
    let (message, at) = (error.to_string(), error.column());
    let what = message.split(" at line ").next().unwrap_or_default();
    // Its columns count bytes from 1, and what is missing at the end is missing after the last one.
    let what = if what == "expected ident" { "expected true, false or null" } else { what };
    Some(match what.strip_prefix("EOF while parsing ") {
        Some(within) => format!("it ends within {within}"),
        None => format!("{what} at byte {}", at.saturating_sub(1)),
    })
}

/// A number that JSON allows but no double holds is what stops the parser, though the record is JSON.
fn number_out_of_range(text: &[u8]) -> Option<Fault> {
    let mut first = None;
    find_numbers(text, |start, end, key| {
        let number = std::str::from_utf8(&text[start..end]).unwrap_or_default();
        if first.is_none() && number.parse::<f64>().is_ok_and(f64::is_infinite) {
            let fault =
                Fault::new(ReasonCode::OutOfRange, format!("{} is beyond every number type", cut(number)));
            first = Some(fault.within(&String::from_utf8_lossy(key)));
        }
    });
    first
}
