//! The window: frames that the gateway has not yet said to be durable, in offset order.
//!
//! *Owns*: offsets of frames, what is on the wire and what is not, what a resumed stream still needs. A core.
//! *Does not own*: how a frame is cut (`encode`), who waits for room (`stream`).
//! Keeps the client's half of P6: exactly what is not covered is sent again.

use std::collections::VecDeque;

use bytes::Bytes;
use sluice_shared::ids::OffsetRange;

/// Consecutive records that become one frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Chunk {
    pub(crate) records: u32,
    pub(crate) payload: Bytes,
}

/// A chunk with its place in the stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Frame {
    pub(crate) offsets: OffsetRange,
    pub(crate) payload: Bytes,
    /// What it weighs in the sender's budget; stays when the frame is cut.
    budget_bytes: u64,
}

/// Frames by rising offset, without a gap. Those before `on_wire` have been handed to the connection.
#[derive(Debug)]
pub(crate) struct Window {
    frames: VecDeque<Frame>,
    on_wire: usize,
    durable_next: u64,
    next: u64,
    released_bytes: u64,
}

/// What an ack did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Acked {
    /// The frontier moved.
    Advanced,
    /// Known before.
    Old,
    /// It covers records that are not on the wire.
    Beyond,
}

/// What a gateway's next offset means for the window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Resumed {
    /// All frames from that offset on are to be sent (again).
    Ready,
    /// The first frame begins before it: drop its first `records`.
    Cut {
        /// How many records are covered.
        records: usize,
    },
    /// Records before this offset were durable, and the gateway asks for them again.
    Behind {
        /// The durable frontier.
        durable_next: u64,
    },
    /// The gateway has records that this window never had.
    Ahead {
        /// One more than the last offset here.
        next: u64,
    },
}

impl Window {
    /// An empty window whose first record has this offset; all before it is durable.
    pub(crate) fn starting_at(offset: u64) -> Self {
        Self { frames: VecDeque::new(), on_wire: 0, durable_next: offset, next: offset, released_bytes: 0 }
    }

    /// Adds records after all others.
    pub(crate) fn push(&mut self, chunk: Chunk) {
        let offsets = OffsetRange::from_count(self.next, u64::from(chunk.records));
        let offsets = offsets.expect("2^64 records do not happen");
        self.next = offsets.end;
        let budget_bytes = chunk.payload.len() as u64;
        self.frames.push_back(Frame { offsets, payload: chunk.payload, budget_bytes });
    }

    /// The first frame that is not on the wire, which it is from now on.
    pub(crate) fn next_unsent(&mut self) -> Option<&Frame> {
        let frame = self.frames.get(self.on_wire)?;
        self.on_wire += 1;
        Some(frame)
    }

    /// Whether `next_unsent` has something.
    pub(crate) fn has_unsent(&self) -> bool {
        self.on_wire < self.frames.len()
    }

    /// Frames on the wire that are not durable.
    pub(crate) fn in_flight(&self) -> usize {
        self.on_wire
    }

    /// Everything before `next` is durable: frames that lie wholly before it leave.
    pub(crate) fn durable(&mut self, next: u64) -> Acked {
        if next <= self.durable_next {
            return Acked::Old;
        }
        let sent_next = match self.on_wire.checked_sub(1) {
            Some(last) => self.frames[last].offsets.end,
            None => self.durable_next,
        };
        if next > sent_next {
            return Acked::Beyond;
        }
        self.drop_before(next);
        Acked::Advanced
    }

    /// The connection is a new one, on which the gateway expects `next`: nothing is on the wire any more, and
    /// what lies before `next` leaves. `end` is where the stream ends there.
    pub(crate) fn resume(&mut self, next: u64, end: u64) -> Resumed {
        if next < self.durable_next {
            return Resumed::Behind { durable_next: self.durable_next };
        }
        if next.max(end) > self.next {
            return Resumed::Ahead { next: self.next };
        }
        self.drop_before(next);
        self.on_wire = 0;
        match self.frames.front() {
            Some(frame) if frame.offsets.start < next => {
                let records = next - frame.offsets.start;
                Resumed::Cut { records: usize::try_from(records).expect("a frame has under 2^32 records") }
            }
            _ => Resumed::Ready,
        }
    }

    /// The first frame, after `resume` answered `Cut`.
    pub(crate) fn first_payload(&self) -> Option<&Bytes> {
        self.frames.front().map(|frame| &frame.payload)
    }

    /// Puts the rest of the first frame in its place.
    pub(crate) fn replace_first(&mut self, rest: Bytes) {
        if let Some(frame) = self.frames.front_mut() {
            frame.offsets.start = self.durable_next;
            frame.payload = rest;
        }
    }

    /// One more than the last durable offset.
    pub(crate) fn durable_next(&self) -> u64 {
        self.durable_next
    }

    /// One more than the last offset.
    pub(crate) fn next(&self) -> u64 {
        self.next
    }

    /// Bytes of all frames that have left: what the sender may take again.
    pub(crate) fn released_bytes(&self) -> u64 {
        self.released_bytes
    }

    /// Whether everything is durable.
    pub(crate) fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    fn drop_before(&mut self, next: u64) {
        self.durable_next = next;
        while self.frames.front().is_some_and(|frame| frame.offsets.end <= next) {
            let frame = self.frames.pop_front().expect("just seen");
            self.released_bytes += frame.budget_bytes;
            self.on_wire = self.on_wire.saturating_sub(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// One byte a record, its value the offset's lowest byte.
    fn chunk(first: u64, records: u32) -> Chunk {
        let payload: Vec<u8> = (first..first + u64::from(records)).map(|offset| offset as u8).collect();
        Chunk { records, payload: payload.into() }
    }

    #[test]
    fn an_ack_inside_a_frame_keeps_it() {
        let mut window = Window::starting_at(0);
        window.push(chunk(0, 10));
        window.next_unsent();
        assert_eq!(window.durable(4), Acked::Advanced);
        assert_eq!((window.released_bytes(), window.is_empty()), (0, false));
        assert_eq!(window.durable(10), Acked::Advanced);
        assert_eq!((window.released_bytes(), window.is_empty()), (10, true));
    }

    #[test]
    fn acks_for_what_was_not_sent_are_told() {
        let mut window = Window::starting_at(5);
        window.push(chunk(5, 3));
        assert_eq!(window.durable(6), Acked::Beyond);
        window.next_unsent();
        assert_eq!(window.durable(9), Acked::Beyond);
        assert_eq!(window.durable(5), Acked::Old);
    }

    #[test]
    fn a_gateway_that_forgot_or_knows_too_much_is_told() {
        let mut window = Window::starting_at(0);
        window.push(chunk(0, 3));
        window.next_unsent();
        window.durable(2);
        assert_eq!(window.resume(1, 3), Resumed::Behind { durable_next: 2 });
        assert_eq!(window.resume(4, 0), Resumed::Ahead { next: 3 });
        assert_eq!(window.resume(2, 4), Resumed::Ahead { next: 3 });
    }

    #[derive(Debug, Clone)]
    enum Step {
        Push(u32),
        Send,
        Ack(f64),
        Reconnect(f64),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            3 => (1..20u32).prop_map(Step::Push),
            4 => Just(Step::Send),
            2 => (0.0..1.0f64).prop_map(Step::Ack),
            1 => (0.0..1.0f64).prop_map(Step::Reconnect),
        ];
        proptest::collection::vec(step, 0..200)
    }

    /// Against a model gateway that keeps all records it was sent, refusing gaps and doubles.
    #[derive(Default)]
    struct Model {
        pushed: u64,
        received: u64,
        acked: u64,
        budget: u64,
    }

    impl Model {
        fn between(&self, fraction: f64) -> u64 {
            self.acked + ((self.received - self.acked) as f64 * fraction).round() as u64
        }

        fn step(&mut self, window: &mut Window, step: Step) {
            match step {
                Step::Push(records) => {
                    window.push(chunk(self.pushed, records));
                    self.pushed += u64::from(records);
                    self.budget += u64::from(records);
                }
                Step::Send => {
                    if let Some(frame) = window.next_unsent() {
                        assert_eq!(frame.offsets.start, self.received, "no gap, nothing twice");
                        let expected = chunk(frame.offsets.start, frame.offsets.count() as u32);
                        assert_eq!(frame.payload, expected.payload);
                        self.received = frame.offsets.end;
                    }
                }
                Step::Ack(fraction) => {
                    self.acked = self.between(fraction);
                    window.durable(self.acked);
                }
                Step::Reconnect(fraction) => {
                    self.received = self.between(fraction);
                    self.acked = self.received;
                    if let Resumed::Cut { records } = window.resume(self.received, self.received) {
                        let rest = window.first_payload().expect("cut").slice(records..);
                        window.replace_first(rest);
                    }
                }
            }
        }
    }

    proptest! {
        #[test]
        fn every_record_arrives_once_whatever_is_cut(steps in steps()) {
            let (mut window, mut model) = (Window::starting_at(0), Model::default());
            for step in steps {
                model.step(&mut window, step);
                prop_assert_eq!(window.durable_next(), model.acked);
                prop_assert_eq!(window.next(), model.pushed);
            }
            while window.has_unsent() {
                model.step(&mut window, Step::Send);
            }
            prop_assert_eq!(model.received, model.pushed);
            window.durable(model.pushed);
            prop_assert!(window.is_empty());
            prop_assert_eq!(window.released_bytes(), model.budget);
        }
    }
}
