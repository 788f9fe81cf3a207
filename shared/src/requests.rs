//! ◆ Requests: what a producer sends at once, where it counts those and not its records.
//!
//! Zerobus's persistent streams do. A request is taken whole or not at all, and a producer that comes back is told how
//! many of its requests are durable: so where each of them ends is as durable as its records.
//!
//! *Owns*: the arithmetic of requests and offsets.
//! *Does not own*: where it is kept (the log's runs, a table's marks).

use crate::ids::OffsetRange;

/// A place in a stream at which a request ends: the records before `offset` are those of the first `requests`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Boundary {
    /// An offset of the stream.
    pub offset: u64,
    /// How many requests end there or before.
    pub requests: u64,
}

/// Consecutive requests: where the first begins, and how many records each has. It may begin before the records that it
/// comes with, and end before their end: of a request that is cut apart only the last part has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RequestSpan {
    /// Where the first one begins.
    pub start: Boundary,
    /// Records of each, at least one.
    pub counts: Vec<u32>,
}

impl RequestSpan {
    /// The first requests of `counts` records each that begin at `start`. None where one is empty or their offsets would
    /// not fit in 64 bits.
    pub fn new(start: Boundary, counts: Vec<u32>) -> Option<Self> {
        let records: u64 = counts.iter().map(|count| u64::from(*count)).sum();
        let fits = start.offset.checked_add(records).is_some()
            && start.requests.checked_add(counts.len() as u64).is_some();
        (fits && counts.iter().all(|count| *count > 0)).then_some(Self { start, counts })
    }

    /// Bytes that it holds in memory.
    pub fn memory_bytes(&self) -> usize {
        size_of::<Self>() + self.counts.capacity() * size_of::<u32>()
    }

    /// Whether it begins and ends where the offsets do.
    pub fn covers(&self, offsets: OffsetRange) -> bool {
        self.start.offset == offsets.start && self.end().offset == offsets.end
    }

    /// Where the last one ends.
    pub fn end(&self) -> Boundary {
        self.last_before(u64::MAX)
    }

    /// The last place at which a request ends, at `offset` or before it; `start` where there is none.
    pub fn last_before(&self, offset: u64) -> Boundary {
        self.place(offset).0
    }

    /// That place, and how many of the requests end there or before.
    fn place(&self, offset: u64) -> (Boundary, usize) {
        let mut at = self.start;
        for (index, count) in self.counts.iter().enumerate() {
            let end = at.offset + u64::from(*count);
            if end > offset {
                return (at, index);
            }
            at = Boundary { offset: end, requests: at.requests + 1 };
        }
        (at, self.counts.len())
    }

    /// Keeps the requests that end at `offset` or before it, and answers the others.
    pub fn split_off(&mut self, offset: u64) -> Self {
        let (start, index) = self.place(offset);
        Self { start, counts: self.counts.split_off(index) }
    }

    /// Adds the requests that follow. What does not follow replaces what is there: its start counts those before.
    pub fn extend(&mut self, next: Self) {
        if self.end() == next.start {
            self.counts.extend(next.counts);
        } else {
            *self = next;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn at(offset: u64, requests: u64) -> Boundary {
        Boundary { offset, requests }
    }

    fn span(start: Boundary, counts: &[u32]) -> RequestSpan {
        RequestSpan::new(start, counts.to_vec()).expect("fits")
    }

    #[test]
    fn a_request_ends_where_all_its_records_are_there() {
        let span = span(at(10, 4), &[1, 3, 2]);
        let ends: Vec<_> = (9..=17).map(|offset| span.last_before(offset)).collect();
        let expected = [(10, 4), (10, 4), (11, 5), (11, 5), (11, 5), (14, 6), (14, 6), (16, 7), (16, 7)];
        assert_eq!(ends, expected.map(|(offset, requests)| at(offset, requests)));
        assert_eq!(span.end(), at(16, 7));
    }

    #[test]
    fn what_cannot_be_counted_is_refused() {
        assert_eq!(RequestSpan::new(at(0, 0), vec![1, 0]), None);
        assert_eq!(RequestSpan::new(at(u64::MAX, 0), vec![1]), None);
        assert_eq!(RequestSpan::new(at(0, u64::MAX), vec![1]), None);
    }

    #[test]
    fn what_does_not_follow_replaces() {
        let mut first = span(at(0, 0), &[2]);
        first.extend(span(at(5, 2), &[1]));
        assert_eq!(first, span(at(5, 2), &[1]));
    }

    proptest! {
        #[test]
        fn cut_anywhere_and_put_together_it_is_the_same(
            counts in prop::collection::vec(1_u32..5, 0..20),
            cuts in prop::collection::vec(0_u64..120, 0..6),
        ) {
            let whole = span(at(7, 3), &counts);
            let mut cuts = cuts;
            cuts.sort_unstable();
            let (mut parts, mut rest) = (Vec::new(), whole.clone());
            for cut in cuts {
                let behind = rest.split_off(cut);
                prop_assert_eq!(rest.end(), whole.last_before(cut.max(rest.start.offset)));
                parts.push(std::mem::replace(&mut rest, behind));
            }
            parts.push(rest);
            let mut joined = parts.remove(0);
            parts.into_iter().for_each(|part| joined.extend(part));
            prop_assert_eq!(joined, whole);
        }
    }
}
