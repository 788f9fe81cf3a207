//! What a stream sends and when it is due, whether or not the stream can send it then.
//!
//! *Owns*: the schedule of made load, by its seed, and that of a trace.
//! *Does not own*: what messages are like (`messages`), sending them (`stream`). A core: no clock of its own.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::curve::Curve;
use super::messages::{Body, Load, Message};

/// When the next message is due, since the beginning.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Due {
    At(Duration),
    /// Whenever there is room.
    Now,
    /// No more comes.
    Never,
}

/// How messages of made load follow each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Spacing {
    /// As if many who know nothing of each other sent them: exponential gaps.
    #[default]
    Poisson,
    /// At equal distances.
    Even,
}

/// One stream's messages.
#[derive(Debug)]
pub(crate) enum Source {
    Made(Box<Made>),
    Traced(Traced),
}

/// How often made messages come.
#[derive(Debug, Clone)]
pub(crate) struct Pace {
    /// Messages of one stream in a second, before the curve; None: as fast as there is room.
    pub(crate) messages_per_s: Option<f64>,
    pub(crate) spacing: Spacing,
    pub(crate) curve: Arc<Curve>,
    /// Seconds since the beginning.
    pub(crate) from: f64,
    pub(crate) until: f64,
}

/// Messages by a rate.
#[derive(Debug)]
pub(crate) struct Made {
    load: Arc<Load>,
    place: usize,
    pace: Pace,
    random: StdRng,
    /// Seconds since the beginning.
    next: Option<f64>,
}

/// A message, and where it stands among those of its load.
pub(crate) struct Taken {
    pub(crate) message: Message,
    pub(crate) place: usize,
}

impl Made {
    pub(crate) fn new(load: Arc<Load>, pace: Pace, seed: u64) -> Self {
        let mut random = StdRng::seed_from_u64(seed);
        let place = random.random_range(0..load.messages.len().max(1));
        let mut made = Self { load, place, next: Some(pace.from), pace, random };
        // Streams of even spacing do not all begin at one moment.
        let first = match made.pace.spacing {
            Spacing::Poisson => made.gap(),
            Spacing::Even => made.random.random::<f64>(),
        };
        made.step(first);
        made
    }

    /// Messages until the next one, on average 1.
    fn gap(&mut self) -> f64 {
        match self.pace.spacing {
            Spacing::Even => 1.0,
            Spacing::Poisson => -(1.0 - self.random.random::<f64>()).ln(),
        }
    }

    fn step(&mut self, gap: f64) {
        let Some(rate) = self.pace.messages_per_s else { return };
        let next = self.next.filter(|_| rate > 0.0).and_then(|next| self.pace.curve.after(next, gap / rate));
        self.next = next.filter(|next| *next < self.pace.until);
    }

    fn due(&self, now: Duration) -> Due {
        if self.pace.messages_per_s.is_none() {
            return if now.as_secs_f64() < self.pace.until { Due::Now } else { Due::Never };
        }
        self.next.and_then(|next| Duration::try_from_secs_f64(next).ok()).map_or(Due::Never, Due::At)
    }

    fn take(&mut self) -> Taken {
        let place = self.place;
        self.place = (place + 1) % self.load.messages.len();
        let gap = self.gap();
        self.step(gap);
        Taken { message: self.load.messages[place].clone(), place }
    }
}

/// Messages of a trace: records that are due together go out together.
#[derive(Debug)]
pub(crate) struct Traced {
    /// JSON, one record a line, in the order of their times.
    pub(crate) text: Bytes,
    /// When each is due, µs since the beginning, and where it ends in the text.
    pub(crate) records: Vec<(u64, usize)>,
    /// How many of them have gone.
    pub(crate) taken: usize,
    /// In one message.
    pub(crate) records_max: usize,
    /// Whether their times count.
    pub(crate) full: bool,
}

/// Of a trace, in one message at most.
const MESSAGE_BYTES_MAX: usize = 1 << 20;

impl Traced {
    fn due(&self) -> Due {
        match self.records.get(self.taken) {
            None => Due::Never,
            Some(_) if self.full => Due::Now,
            Some((us, _)) => Due::At(Duration::from_micros(*us)),
        }
    }

    fn take(&mut self, now: Duration) -> Taken {
        let begin = self.taken.checked_sub(1).map_or(0, |last| self.records[last].1);
        let now_us = u64::try_from(now.as_micros()).unwrap_or(u64::MAX);
        let first = self.taken;
        let is_due =
            |(us, end): &&(u64, usize)| (self.full || *us <= now_us) && end - begin <= MESSAGE_BYTES_MAX;
        let count = self.records[first..].iter().take(self.records_max).take_while(is_due).count().max(1);
        self.taken += count;
        let payload = self.text.slice(begin..self.records[self.taken - 1].1);
        let rows = u32::try_from(count).unwrap_or(u32::MAX);
        Taken { message: Message { rows, bytes: payload.len(), body: Body::Payload(payload) }, place: first }
    }
}

impl Source {
    /// When the next message is due.
    pub(crate) fn due(&self, now: Duration) -> Due {
        match self {
            Self::Made(made) => made.due(now),
            Self::Traced(traced) => traced.due(),
        }
    }

    /// The next message. Only where there is one.
    pub(crate) fn take(&mut self, now: Duration) -> Taken {
        match self {
            Self::Made(made) => made.take(),
            Self::Traced(traced) => traced.take(now),
        }
    }

    /// Whether it is a trace all of which is due at once.
    pub(crate) fn is_backlog(&self) -> bool {
        matches!(self, Self::Traced(traced) if traced.full)
    }

    /// Of the message that comes next, as far as that is known.
    pub(crate) fn next_bytes(&self) -> usize {
        match self {
            Self::Made(made) => made.load.messages.get(made.place).map_or(0, |message| message.bytes),
            Self::Traced(_) => 0,
        }
    }

    /// All that is left of what was due by a time, message by message: when, and how many records.
    pub(crate) fn rest(&mut self, by: Duration, mut each: impl FnMut((Duration, u64))) {
        loop {
            let due = match (self.due(by), &*self) {
                (Due::At(due), _) if due <= by => due,
                // All of it was due from the beginning, and it has an end.
                (Due::Now, Self::Traced(_)) => Duration::ZERO,
                _ => return,
            };
            each((due, u64::from(self.take(due).message.rows)));
        }
    }
}

#[cfg(test)]
mod tests {
    use sluice_shared::frame::Encoding;

    use super::*;

    fn load() -> Arc<Load> {
        let message = |n: u8| Message { rows: 2, bytes: 1, body: Body::Payload(vec![n].into()) };
        let messages: Vec<Message> = (0..5).map(message).collect();
        Arc::new(Load { encoding: Encoding::Json, schema: Bytes::new(), rows: 2, messages: messages.into() })
    }

    fn dues(spacing: Spacing, curve: Curve, seed: u64) -> Vec<f64> {
        let pace =
            Pace { messages_per_s: Some(100.0), spacing, curve: Arc::new(curve), from: 10.0, until: 30.0 };
        let mut source = Source::Made(Box::new(Made::new(load(), pace, seed)));
        let mut rest = Vec::new();
        source.rest(Duration::from_secs(1000), |one| rest.push(one));
        rest.into_iter().map(|(due, _)| due.as_secs_f64()).collect()
    }

    #[test]
    fn the_rate_is_kept_and_the_same_seed_gives_the_same_times() {
        for spacing in [Spacing::Poisson, Spacing::Even] {
            let all = dues(spacing, Curve::level(), 1);
            assert_eq!(all, dues(spacing, Curve::level(), 1));
            assert_ne!(all, dues(spacing, Curve::level(), 2));
            assert!(all.is_sorted() && all[0] >= 10.0 && *all.last().expect("some") < 30.0);
            let expected = if spacing == Spacing::Even { 2000..=2000 } else { 1800..=2200 };
            assert!(expected.contains(&all.len()), "{spacing:?}: {}", all.len());
        }
    }

    #[test]
    fn a_surge_multiplies_the_rate_while_it_lasts() {
        let mut curve = Curve::level();
        curve.go(15.0, 0.0, 10.0);
        curve.go(20.0, 0.0, 0.0);
        let all = dues(Spacing::Even, curve, 1);
        let within = |from: f64, to: f64| all.iter().filter(|due| (from..to).contains(*due)).count();
        assert!((499..=501).contains(&within(10.0, 15.0)), "{}", within(10.0, 15.0));
        assert!((4999..=5001).contains(&within(15.0, 20.0)), "{}", within(15.0, 20.0));
        assert_eq!(within(20.01, 30.0), 0);
    }

    #[test]
    fn records_of_a_trace_that_are_due_together_go_together() {
        let text = Bytes::from_static(b"a\nb\nc\nd\n");
        let records = vec![(0, 2), (5, 4), (10, 6), (900, 8)];
        let mut traced = Traced { text, records, taken: 0, records_max: 2, full: false };
        let mut take = |us| {
            let Taken { message, place } = traced.take(Duration::from_micros(us));
            let Body::Payload(payload) = message.body else { panic!("a payload") };
            (place, message.rows, payload)
        };
        assert_eq!(take(20), (0, 2, Bytes::from_static(b"a\nb\n")));
        assert_eq!(take(20), (2, 1, Bytes::from_static(b"c\n")));
        assert_eq!(take(900), (3, 1, Bytes::from_static(b"d\n")));
        assert_eq!(traced.due(), Due::Never);
    }
}
