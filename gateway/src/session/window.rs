//! The frames of one stream between their arrival and their durability.
//!
//! A frame that has been sent keeps its boundaries and bytes for as long as it is held, so that a replay is the
//! same bytes in the same frames. Small neighbours that have not been sent are merged: a producer of single
//! records costs few frames.
//!
//! *Owns*: the frames, their bytes, what has been sent and what not, the next offset.
//! *Does not own*: waiting: the session stops reading when there is no room.
//! Keeps P5 and P6 (nothing is let go before it is durable) and P7 (the byte budget).

use std::collections::VecDeque;

use bytes::{Bytes, BytesMut};
use sluice_shared::ids::OffsetRange;
use sluice_shared::requests::{Boundary, RequestSpan};

use crate::budget::Share;

/// Payloads up to this size are copied into a merged frame; larger ones gain nothing from it.
const SMALL_BYTES: usize = 4 << 10;
/// A merged frame is not made larger than this.
const MERGED_BYTES_MAX: usize = 64 << 10;
/// What a frame costs beside its payload. Counted, so that the budget also bounds many tiny frames.
const FRAME_OVERHEAD_BYTES: usize = 64;
/// What a request's count costs.
const REQUEST_BYTES: usize = size_of::<u32>();

/// Consecutive records as they go to a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Frame {
    /// Offset of the first record.
    pub(crate) first_offset: u64,
    /// How many.
    pub(crate) count: u32,
    /// As encoded.
    pub(crate) payload: Bytes,
    /// Where the stream counts them: the requests that these are.
    pub(crate) requests: Option<RequestSpan>,
}

impl Frame {
    /// One more than the offset of the last record.
    fn end(&self) -> u64 {
        self.first_offset + u64::from(self.count)
    }

    fn bytes(&self) -> usize {
        let requests = self.requests.as_ref().map_or(0, |requests| requests.counts.len() * REQUEST_BYTES);
        self.payload.len() + FRAME_OVERHEAD_BYTES + requests
    }
}

/// Whether neighbours may be merged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Merge {
    /// Payloads are lines.
    Lines,
    /// Payloads are messages that say their length: nothing comes between them.
    Messages,
    /// Each payload is a whole of its own.
    Never,
}

/// Why an ack was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AckBeyondSent;

/// The frames of one stream that are not durable yet, in offset order.
#[derive(Debug)]
pub(crate) struct Window {
    /// Sent frames, then unsent ones.
    frames: VecDeque<Frame>,
    /// How many of `frames` have been sent to the present pod.
    sent: usize,
    /// Small frames being merged; after all `frames`.
    merging: Option<Merging>,
    /// Payload of the last merged frame: room for as much is made at once for the next one, for growing copies.
    merged_bytes: usize,
    merge: Merge,
    /// Of all held frames.
    bytes: usize,
    budget: usize,
    /// The same bytes, and those of `hold`, among all streams'.
    share: Share,
    next_offset: u64,
    /// Where the stream counts its requests: the number of the next one.
    next_request: Option<u64>,
    /// One more than the last offset that any pod was ever sent.
    sent_next: u64,
}

#[derive(Debug)]
struct Merging {
    first_offset: u64,
    count: u32,
    payload: BytesMut,
    requests: Option<RequestSpan>,
}

impl Window {
    /// An empty window of `budget` bytes whose first record gets `next_offset`.
    pub(crate) fn new(next_offset: u64, budget: usize, merge: Merge, share: Share) -> Self {
        Self {
            frames: VecDeque::new(),
            sent: 0,
            merging: None,
            merged_bytes: 0,
            merge,
            bytes: 0,
            budget,
            share,
            next_offset,
            next_request: None,
            sent_next: next_offset,
        }
    }

    /// What is pushed at once is a request, and counted from `next_request` on.
    pub(crate) fn counting(self, next_request: Option<u64>) -> Self {
        Self { next_request, ..self }
    }

    /// Offset of the next record.
    pub(crate) fn next_offset(&self) -> u64 {
        self.next_offset
    }

    /// First offset that is held; the next one where none is.
    pub(crate) fn first_held(&self) -> u64 {
        let merging = self.merging.as_ref().map(|merging| merging.first_offset);
        self.frames.front().map(|frame| frame.first_offset).or(merging).unwrap_or(self.next_offset)
    }

    /// One more than the last offset that any pod was ever sent.
    pub(crate) fn sent_next(&self) -> u64 {
        self.sent_next
    }

    /// Bytes that are held.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Whether all is durable.
    pub(crate) fn is_empty(&self) -> bool {
        self.frames.is_empty() && self.merging.is_none()
    }

    /// Whether a payload of this size fits. An empty window takes any: else one larger than the budget would
    /// wait for ever.
    pub(crate) fn has_room(&self, payload_bytes: usize) -> bool {
        let payload_bytes = payload_bytes + FRAME_OVERHEAD_BYTES;
        self.is_empty() || (self.bytes + payload_bytes <= self.budget && self.share.has_room(payload_bytes))
    }

    /// Counts a payload that was read and has no room here yet among all streams' bytes.
    pub(crate) fn hold(&mut self, payload_bytes: usize) {
        self.share.take(payload_bytes);
    }

    /// Its end.
    pub(crate) fn let_go(&mut self, payload_bytes: usize) {
        self.share.give_back(payload_bytes);
    }

    fn grow(&mut self, bytes: usize) {
        self.bytes += bytes;
        self.share.take(bytes);
    }

    /// Whether something waits to be sent.
    pub(crate) fn has_unsent(&self) -> bool {
        self.sent < self.frames.len() || self.merging.is_some()
    }

    /// Whether something was sent to the present pod and is not durable yet.
    pub(crate) fn is_in_flight(&self) -> bool {
        self.sent > 0
    }

    /// Takes the next `count` records. None, and nothing is changed, where their offsets would not fit in 64 bits.
    pub(crate) fn push(&mut self, count: u32, payload: Bytes) -> Option<OffsetRange> {
        let range = OffsetRange::from_count(self.next_offset, u64::from(count))?;
        let first_request = self.next_request;
        let requests = || {
            let start = Boundary { offset: range.start, requests: first_request? };
            RequestSpan::new(start, vec![count])
        };
        let small = self.merge != Merge::Never && payload.len() <= SMALL_BYTES;
        if !small {
            self.seal();
            let frame = Frame { first_offset: range.start, count, payload, requests: requests() };
            self.grow(frame.bytes());
            self.frames.push_back(frame);
        } else if !self.merged(count, &payload) {
            self.seal();
            let requests = requests();
            let request_bytes = requests.as_ref().map_or(0, |_| REQUEST_BYTES);
            self.grow(payload.len() + FRAME_OVERHEAD_BYTES + request_bytes);
            let mut merged = BytesMut::with_capacity(payload.len().max(self.merged_bytes));
            merged.extend_from_slice(&payload);
            self.merging = Some(Merging { first_offset: range.start, count, payload: merged, requests });
        }
        self.next_offset = range.end;
        self.next_request = first_request.map(|requests| requests + 1);
        Some(range)
    }

    /// Adds to the frame that is being merged, if it has room.
    fn merged(&mut self, count: u32, payload: &[u8]) -> bool {
        let Some(merging) = &mut self.merging else { return false };
        let Some(sum) = merging.count.checked_add(count) else { return false };
        if merging.payload.len() + 1 + payload.len() > MERGED_BYTES_MAX {
            return false;
        }
        let before = merging.payload.len();
        if self.merge == Merge::Lines && merging.payload.last() != Some(&b'\n') {
            merging.payload.extend_from_slice(b"\n");
        }
        merging.payload.extend_from_slice(payload);
        merging.count = sum;
        let mut grown = merging.payload.len() - before;
        if let Some(requests) = &mut merging.requests {
            requests.counts.push(count);
            grown += REQUEST_BYTES;
        }
        self.grow(grown);
        true
    }

    fn seal(&mut self) {
        if let Some(Merging { first_offset, count, payload, requests }) = self.merging.take() {
            self.merged_bytes = payload.len();
            // Room that was not used is not counted, and so not kept.
            let is_roomy = payload.capacity() > 2 * payload.len();
            let payload = if is_roomy { Bytes::copy_from_slice(&payload) } else { payload.freeze() };
            self.frames.push_back(Frame { first_offset, count, payload, requests });
        }
    }

    /// The next frames to send, up to `bytes_max` of payload but at least one. They count as sent.
    pub(crate) fn next_unsent(&mut self, bytes_max: usize) -> Vec<Frame> {
        self.seal();
        let mut bytes = 0;
        let fits = |frame: &&Frame| {
            bytes += frame.payload.len();
            bytes <= bytes_max || bytes == frame.payload.len()
        };
        let frames: Vec<Frame> = self.frames.range(self.sent..).take_while(fits).cloned().collect();
        self.sent += frames.len();
        self.sent_next = frames.last().map_or(self.sent_next, Frame::end).max(self.sent_next);
        frames
    }

    /// All before `next` is durable: lets go of the frames that are wholly covered.
    ///
    /// # Errors
    /// Where `next` is beyond what was ever sent: the pod counts wrongly.
    pub(crate) fn durable(&mut self, next: u64) -> Result<(), AckBeyondSent> {
        if next > self.sent_next {
            return Err(AckBeyondSent);
        }
        self.seal_if_covered(next);
        while self.frames.front().is_some_and(|frame| frame.end() <= next) {
            let Some(frame) = self.frames.pop_front() else { break };
            self.bytes -= frame.bytes();
            self.share.give_back(frame.bytes());
            // After a rewind an ack of the lost pod's work may cover frames that are not sent again yet.
            self.sent = self.sent.saturating_sub(1);
        }
        Ok(())
    }

    /// A merging frame holds only unsent records, so no ack covers it; the check keeps `frames` first in order.
    fn seal_if_covered(&mut self, next: u64) {
        if self.merging.as_ref().is_some_and(|merging| merging.first_offset < next) {
            self.seal();
        }
    }

    /// The stream goes to a pod that has all before `next`: what is held from there on is to be sent again.
    /// Answers how many frames that are.
    pub(crate) fn rewind(&mut self, next: u64) -> usize {
        let before = self.sent;
        self.sent = self.frames.iter().take(before).take_while(|frame| frame.end() <= next).count();
        before - self.sent
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::budget::Budget;

    fn window(merge: Merge) -> Window {
        Window::new(0, 1000, merge, Budget::new(1 << 30).share())
    }

    fn line(text: &'static str) -> Bytes {
        Bytes::from_static(text.as_bytes())
    }

    fn frame(first_offset: u64, count: u32, text: &'static str) -> Frame {
        Frame { first_offset, count, payload: line(text), requests: None }
    }

    #[test]
    fn small_neighbours_become_one_frame() {
        let mut window = window(Merge::Lines);
        window.push(1, line("a"));
        window.push(2, line("b\nc\n"));
        window.push(1, line("d"));
        assert_eq!(window.next_unsent(100), [frame(0, 4, "a\nb\nc\nd")]);
        window.push(1, line("e"));
        assert_eq!(window.next_unsent(100), [frame(4, 1, "e")]);
    }

    #[test]
    fn a_frame_knows_which_requests_it_is_made_of() {
        let mut window = Window::new(10, 1000, Merge::Lines, Budget::new(1000).share()).counting(Some(4));
        window.push(1, line("a"));
        window.push(2, line("b\nc"));
        let span = |offset, requests, counts: &[u32]| {
            RequestSpan::new(Boundary { offset, requests }, counts.to_vec())
        };
        let first = Frame { requests: span(10, 4, &[1, 2]), ..frame(10, 3, "a\nb\nc") };
        assert_eq!(window.next_unsent(100), std::slice::from_ref(&first));
        window.push(1, line("d"));
        window.rewind(10);
        let second = Frame { requests: span(13, 6, &[1]), ..frame(13, 1, "d") };
        assert_eq!(window.next_unsent(100), [first, second]);
        window.durable(14).expect("sent");
        assert_eq!(window.bytes(), 0);
    }

    #[test]
    fn messages_are_merged_without_a_separator() {
        let mut window = window(Merge::Messages);
        window.push(1, line("\u{1}a"));
        window.push(2, line("\u{0}\u{1}b"));
        assert_eq!(window.next_unsent(100), [frame(0, 3, "\u{1}a\u{0}\u{1}b")]);
    }

    #[test]
    fn arrow_frames_are_never_merged() {
        let mut window = window(Merge::Never);
        window.push(5, line("a"));
        window.push(6, line("b"));
        assert_eq!(window.next_unsent(100), [frame(0, 5, "a"), frame(5, 6, "b")]);
    }

    #[test]
    fn a_replay_is_the_same_frames() {
        let mut window = window(Merge::Lines);
        window.push(1, line("a"));
        let first = window.next_unsent(100);
        window.push(1, line("b"));
        let second = window.next_unsent(100);
        assert_eq!(window.rewind(0), 2);
        window.push(1, line("c"));
        let again = window.next_unsent(100);
        assert_eq!(again[..2], [first, second].concat());
        assert_eq!(again[2], frame(2, 1, "c"));
    }

    #[test]
    fn what_the_new_pod_has_is_not_sent_again() {
        let mut window = window(Merge::Never);
        window.push(2, line("a"));
        window.push(2, line("b"));
        window.next_unsent(100);
        assert_eq!(window.rewind(2), 1);
        assert_eq!(window.next_unsent(100), [frame(2, 2, "b")]);
        assert_eq!(window.first_held(), 0, "sent is not durable");
    }

    #[test]
    fn an_empty_window_takes_what_is_over_its_budget() {
        let mut window = window(Merge::Never);
        assert!(window.has_room(5000));
        window.push(1, vec![b'x'; 5000].into());
        assert!(!window.has_room(1));
        window.next_unsent(100);
        window.durable(1).expect("sent");
        assert!(window.has_room(5000));
        assert_eq!(window.bytes(), 0);
    }

    #[test]
    fn an_ack_beyond_what_was_sent_is_refused() {
        let mut window = window(Merge::Lines);
        window.push(2, line("a\nb"));
        assert_eq!(window.durable(2), Err(AckBeyondSent));
    }

    #[test]
    fn offsets_do_not_wrap() {
        let mut window = Window::new(u64::MAX - 1, 1000, Merge::Lines, Budget::new(1000).share());
        assert!(window.push(2, line("a\nb")).is_none());
        assert!(window.push(1, line("a")).is_some());
    }

    #[derive(Debug, Clone)]
    enum Step {
        Push(u32, usize),
        Send(usize),
        Durable(u64),
        Rewind,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            4 => (1_u32..4, prop_oneof![1_usize..40, 3000_usize..9000]).prop_map(|(c, b)| Step::Push(c, b)),
            2 => (1_usize..20_000).prop_map(Step::Send),
            2 => (0_u64..6).prop_map(Step::Durable),
            1 => Just(Step::Rewind),
        ]
    }

    /// The naive model: every record on its own, and every frame that was ever sent.
    #[derive(Default)]
    struct Model {
        lines: Vec<Vec<u8>>,
        /// By first offset: what it held when it was first sent.
        sent: std::collections::BTreeMap<u64, Frame>,
        expected_next: u64,
        durable: u64,
    }

    impl Model {
        fn check_sent(&mut self, frames: &[Frame]) {
            for frame in frames {
                assert_eq!(frame.first_offset, self.expected_next, "in order, without a gap");
                let lines: Vec<&[u8]> =
                    frame.payload.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()).collect();
                let range = frame.first_offset as usize..frame.end() as usize;
                assert_eq!(lines, self.lines[range].iter().map(Vec::as_slice).collect::<Vec<_>>());
                let first = self.sent.entry(frame.first_offset).or_insert_with(|| frame.clone());
                assert_eq!(first, frame, "a replay is the same frame");
                self.expected_next = frame.end();
            }
        }

        fn sent_next(&self) -> u64 {
            self.sent.values().map(Frame::end).max().unwrap_or(0)
        }
    }

    proptest! {
        #[test]
        fn it_agrees_with_a_naive_model(steps in prop::collection::vec(step(), 1..80)) {
            let mut window = window(Merge::Lines);
            let mut model = Model::default();
            for step in steps {
                match step {
                    Step::Push(count, bytes) => {
                        let lines: Vec<Vec<u8>> =
                            (0..count).map(|n| vec![b'a' + (n % 26) as u8; bytes]).collect();
                        let range = window.push(count, lines.join(&b'\n').into()).expect("fits");
                        prop_assert_eq!(range.start, model.lines.len() as u64);
                        model.lines.extend(lines);
                    }
                    Step::Send(bytes) => {
                        let frames = window.next_unsent(bytes);
                        let total: usize = frames.iter().map(|frame| frame.payload.len()).sum();
                        prop_assert!(total <= bytes || frames.len() == 1);
                        model.check_sent(&frames);
                    }
                    Step::Durable(more) => {
                        let next = (model.durable + more).min(model.sent_next());
                        window.durable(next).expect("not beyond what was sent");
                        model.durable = next;
                        model.expected_next = model.expected_next.max(window.first_held());
                    }
                    Step::Rewind => {
                        window.rewind(window.first_held());
                        model.expected_next = window.first_held();
                    }
                }
                prop_assert_eq!(window.next_offset(), model.lines.len() as u64);
                prop_assert!(window.first_held() <= model.durable.max(model.sent_next()));
                prop_assert_eq!(window.is_empty(), window.first_held() == window.next_offset());
                prop_assert_eq!(window.is_empty(), window.bytes() == 0);
            }
            // Whatever happened, what is not durable can still be sent.
            window.rewind(window.first_held());
            model.expected_next = window.first_held();
            model.check_sent(&window.next_unsent(usize::MAX));
            prop_assert_eq!(model.expected_next, model.lines.len() as u64);
        }
    }
}
