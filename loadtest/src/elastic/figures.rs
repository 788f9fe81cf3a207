//! From what producers waited for to a table of pauses and aims.
//!
//! *Owns*: what a pause is, its quantiles, the aims. A core.
//! *Does not own*: how the waits came about (`elastic`).

use std::collections::HashSet;
use std::fmt;
use std::time::Duration;

/// One record's wait; times since the beginning of the run.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wait {
    /// It was to be sent then.
    pub(crate) due: Duration,
    /// Its producer heard then that it is durable.
    pub(crate) durable: Duration,
}

/// A part of the run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Span {
    /// What was done in it.
    pub name: String,
    /// When it began,
    pub from: Duration,
    /// and ended.
    pub to: Duration,
    /// Streams, by their numbers, that were at another pod or gateway after it.
    pub moved: HashSet<usize>,
    /// Connections that producers had to make anew.
    pub lost: u64,
    /// Whether it is no gateway's end that it is about: then no connection may be lost.
    pub is_quiet: bool,
    /// Of the 99th percentile of the pauses of what moved.
    pub aim: Option<Duration>,
}

/// Pauses of some streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Pauses {
    /// The median stream's,
    pub p50: Duration,
    /// that of all but one in a hundred,
    pub p99: Duration,
    /// and the longest.
    pub max: Duration,
}

/// A span and its pauses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Row {
    /// The span.
    pub span: Span,
    /// Of the streams that moved; None where none did.
    pub moved: Option<Pauses>,
    /// Of the others.
    pub others: Option<Pauses>,
}

impl Pauses {
    fn of(mut pauses: Vec<Duration>) -> Option<Self> {
        pauses.sort_unstable();
        let max = *pauses.last()?;
        // By nearest rank: of fewer than a hundred streams the 99th percentile is the longest.
        let at = |percent: usize| pauses[(pauses.len() * percent).div_ceil(100).max(1) - 1];
        Some(Self { p50: at(50), p99: at(99), max })
    }
}

/// The longest wait of a stream among those that lie in a span, or partly so. None where it sent nothing then.
fn pause(waits: &[Wait], span: &Span) -> Option<Duration> {
    let within = waits.iter().filter(|wait| wait.due < span.to && wait.durable >= span.from);
    within.map(|wait| wait.durable.saturating_sub(wait.due)).max()
}

/// A row for each span; `waits` are by the streams' numbers.
pub(super) fn rows(spans: Vec<Span>, waits: &[Vec<Wait>]) -> Vec<Row> {
    let row = |span: Span| {
        let (mut moved, mut others) = (Vec::new(), Vec::new());
        for (number, waits) in waits.iter().enumerate() {
            let pauses = if span.moved.contains(&number) { &mut moved } else { &mut others };
            pauses.extend(pause(waits, &span));
        }
        Row { span, moved: Pauses::of(moved), others: Pauses::of(others) }
    };
    spans.into_iter().map(row).collect()
}

impl Row {
    /// Whether no connection was lost that should not be.
    pub fn is_quiet(&self) -> bool {
        !self.span.is_quiet || self.span.lost == 0
    }

    /// Whether the pauses are as short as they should be. A phase that was to move streams and moved none says nothing.
    pub fn is_in_time(&self) -> bool {
        self.span.aim.is_none_or(|aim| self.moved.is_some_and(|pauses| pauses.p99 <= aim))
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Span { name, moved, lost, aim, .. } = &self.span;
        let pauses = |pauses: Option<Pauses>| {
            let text = |Pauses { p50, p99, max }| {
                format!("{} / {} / {}", p50.as_millis(), p99.as_millis(), max.as_millis())
            };
            pauses.map_or("–".to_owned(), text)
        };
        let aim = match aim {
            Some(aim) => {
                format!("{:>5} ms {}", aim.as_millis(), if self.is_in_time() { "met" } else { "MISSED" })
            }
            None => "–".to_owned(),
        };
        let (moving, others) = (pauses(self.moved), pauses(self.others));
        let noise = if self.is_quiet() { "" } else { " CONNECTIONS LOST" };
        write!(f, "{name:<24} {:>5} {lost:>5}  {moving:>24}  {others:>24}  {aim}{noise}", moved.len())
    }
}

/// What the columns of a row are.
pub(super) fn head() -> String {
    let (moved, stayed) = ("moved: p50/p99/max, ms", "stayed: p50/p99/max, ms");
    format!("{:<24} {:>5} {:>5}  {moved:>24}  {stayed:>24}  p99 of what moved", "phase", "moved", "lost")
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn span(from: u64, to: u64, moved: &[usize]) -> Span {
        let (name, moved) = ("x".to_owned(), moved.iter().copied().collect());
        Span { name, from: ms(from), to: ms(to), moved, lost: 0, is_quiet: true, aim: Some(ms(100)) }
    }

    fn wait(due: u64, durable: u64) -> Wait {
        Wait { due: ms(due), durable: ms(durable) }
    }

    #[test]
    fn a_pause_counts_from_when_a_record_was_due_in_every_span_that_it_touches() {
        let waits = [wait(0, 5), wait(90, 250), wait(300, 301)];
        for (from, to, expected) in [
            (0, 50, Some(5)),
            (50, 100, Some(160)),
            (200, 220, Some(160)),
            (240, 400, Some(160)),
            (260, 400, Some(1)),
            (310, 400, None),
        ] {
            assert_eq!(pause(&waits, &span(from, to, &[])), expected.map(ms), "{from} to {to}");
        }
    }

    #[test]
    fn pauses_are_by_nearest_rank() {
        let of = |count: u64| Pauses::of((1..=count).rev().map(ms).collect());
        assert_eq!(of(0), None);
        assert_eq!(of(1), Some(Pauses { p50: ms(1), p99: ms(1), max: ms(1) }));
        assert_eq!(of(200), Some(Pauses { p50: ms(100), p99: ms(198), max: ms(200) }));
    }

    #[test]
    fn an_aim_is_about_the_streams_that_moved() {
        let waits = [vec![wait(0, 100)], vec![wait(0, 101)]];
        let row = |moved: &[usize]| rows(vec![span(0, 50, moved)], &waits).remove(0);
        assert!(row(&[0]).is_in_time());
        assert!(!row(&[1]).is_in_time() && !row(&[0, 1]).is_in_time());
        assert!(!row(&[]).is_in_time(), "no stream moved: nothing was tried");
        assert!(row(&[0]).is_quiet());
        let mut noisy = row(&[0]);
        noisy.span.lost = 1;
        assert!(!noisy.is_quiet());
    }
}
