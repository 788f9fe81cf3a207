//! Which streams a hot pod gives to others. Placement cannot help a pod whose streams have grown, nor fill one that has
//! just joined: some have to move.
//!
//! Few move, and slowly: a move is a pause for its producer and a smaller file for its table. And none moves for nothing:
//! a stream that would only make another pod hot stays where it is.
//!
//! *Owns*: when, how many, which.
//! *Does not own*: where they go: that is placement, as for any other stream; the handoff itself.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use sluice_shared::ids::{PodId, TableName};
use sluice_shared::pool::{PoolView, Trust};

/// A pod is hot when it stands so much above the mean. That is less than placement fills it to: a wide bound there makes
/// large files, and what grows beyond it is moved away while the pod is still well.
const HOT_OVER_MEAN: f64 = 1.15;
/// It sheds until it stands so much above the mean.
const COOL_OVER_MEAN: f64 = 1.05;
/// Below this no pod is hot, whatever the mean.
const HOT_MIN: f64 = 0.25;
/// So many reports in a row must say so.
const HOT_REPORTS: u32 = 3;
/// A report of a pod that stands so much above the mean counts double.
const FAR_OVER_MEAN: f64 = 1.20;
const FAR_COUNTS: u32 = 2;
/// One report of a pod that is so full is enough: it has no time.
const URGENT: f64 = 0.95;
/// At most this share of its streams, but one at least, in `WINDOW`.
const SHARE_MAX: f64 = 0.05;
const WINDOW: Duration = Duration::from_secs(10);
/// A stream that is younger has not shown what it sends.
const SETTLED: Duration = Duration::from_secs(60);
/// A stream that was elsewhere before stays so long: whether it was moved there is known to nobody any more.
const RESUMED_PAUSE: Duration = Duration::from_secs(300);
/// A stream outside the first pods of its table is moved rather than one inside that is so many times as heavy. Not rather
/// than any: the budget would be gone on many that weigh nothing.
const OUTSIDE_WORTH: f64 = 4.0;
/// A report falls so slowly behind a load that fell: what was moved away still shows in it, less and less.
const REPORT_DECAY: Duration = Duration::from_secs(10);
/// After so many of these nothing shows any more.
const DECAYS_MAX: u32 = 5;

/// One of the pod's streams.
#[derive(Debug, Clone, Copy)]
pub struct StreamLoad<'a, S> {
    /// Whatever names it.
    pub stream: S,
    /// Its table.
    pub table: &'a TableName,
    /// What it sends, measured.
    pub bytes_per_s: f64,
    /// For how long this pod has it.
    pub open_for: Duration,
    /// It was on a pod before it came here: handed off, placed again after a loss, or opened again by its producer.
    pub is_resumed: bool,
}

/// What is kept of the past, on one pod.
#[derive(Debug, Clone, Default)]
pub struct Shedder {
    hot_reports: u32,
    sequence: Option<u64>,
    moves: VecDeque<Move>,
}

#[derive(Debug, Clone, Copy)]
struct Move {
    at: Instant,
    load: f64,
}

/// The pod is hot: so much should go.
#[derive(Debug, Clone, Copy, PartialEq)]
#[must_use]
pub struct Excess {
    /// Its load, as a fraction of its capacity.
    load: f64,
    /// How much of that is to go.
    over: f64,
    /// The coolest of the others.
    coolest: f64,
    /// Where a pod would be hot.
    bound: f64,
}

impl Shedder {
    /// To be called with each of the pod's own reports, once that stands in its view of the pool. None: nothing to do.
    pub fn observe(&mut self, me: &PodId, view: &PoolView, now: Instant) -> Option<Excess> {
        let own = view.pod(me).filter(|own| Trust::Well.takes(own))?;
        if self.sequence.replace(own.load.sequence) == Some(own.load.sequence) {
            return None;
        }
        let sums = view.sums(Trust::Well);
        let load = own.load.fraction() - self.echo(now);
        let bound = (HOT_OVER_MEAN * sums.load()).max(HOT_MIN);
        let is_far = load > (FAR_OVER_MEAN * sums.load()).max(HOT_MIN);
        let counts = if load > URGENT {
            HOT_REPORTS
        } else if is_far {
            FAR_COUNTS
        } else {
            1
        };
        self.hot_reports = if load > bound { self.hot_reports + counts } else { 0 };
        if self.hot_reports < HOT_REPORTS {
            return None;
        }
        let others = view.pods().iter().filter(|pod| pod.id != *me && Trust::Well.takes(pod));
        let coolest = others.map(|pod| pod.load.fraction()).fold(f64::INFINITY, f64::min);
        let over = load - COOL_OVER_MEAN * sums.load();
        (coolest < sums.load()).then_some(Excess { load, over, coolest, bound })
    }

    /// The streams to hand off now: the fewest that bring the pod down, as far as the budget goes, and rather those
    /// outside the first pods of their table. They count as moved from now on.
    pub fn choose<S: Copy>(
        &mut self,
        excess: Excess,
        (me, view): (&PodId, &PoolView),
        streams: &[StreamLoad<'_, S>],
        now: Instant,
    ) -> Vec<S> {
        let budget = ((SHARE_MAX * streams.len() as f64) as usize).max(1);
        let mut left =
            budget.saturating_sub(self.moves.iter().filter(|moved| moved.at + WINDOW > now).count());
        let total: f64 = streams.iter().map(|stream| stream.bytes_per_s).sum();
        if left == 0 || total <= 0.0 {
            return Vec::new();
        }
        let mut outside = Outside { me, view, known: HashMap::new() };
        let mut open: Vec<Movable<S>> = streams
            .iter()
            .filter(|stream| stream.may_move())
            .map(|stream| Movable {
                stream: stream.stream,
                load: excess.load * stream.bytes_per_s / total,
                is_outside: outside.is(stream.table),
            })
            .filter(|stream| stream.load > 0.0 && excess.coolest + stream.load <= excess.bound)
            .collect();
        open.sort_by(|a, b| b.worth().total_cmp(&a.worth()));
        let (mut over, mut chosen) = (excess.over, Vec::new());
        open.retain(|stream| {
            let goes = left > 0 && stream.load <= over;
            if goes {
                (left, over) = (left - 1, over - stream.load);
                chosen.push(*stream);
            }
            !goes
        });
        // What is left over is less than any stream that is left: one more, the smallest, where the pod is hot still.
        let is_hot_still = excess.load - (excess.over - over) > excess.bound;
        let least = open.iter().min_by(|a, b| a.load.total_cmp(&b.load));
        if let Some(last) = least.filter(|_| left > 0 && is_hot_still) {
            chosen.push(*last);
        }
        self.moves.extend(chosen.iter().map(|stream| Move { at: now, load: stream.load }));
        chosen.into_iter().map(|stream| stream.stream).collect()
    }

    /// Load that was moved away and may still show in the report.
    fn echo(&mut self, now: Instant) -> f64 {
        self.moves.retain(|moved| moved.at + DECAYS_MAX * REPORT_DECAY > now);
        let left = |moved: &Move| {
            let age = now.saturating_duration_since(moved.at).as_secs_f64();
            moved.load * (-age / REPORT_DECAY.as_secs_f64()).exp()
        };
        self.moves.iter().map(left).sum()
    }
}

#[derive(Debug, Clone, Copy)]
struct Movable<S> {
    stream: S,
    load: f64,
    is_outside: bool,
}

impl<S> Movable<S> {
    /// The more a stream takes away, the fewer have to move; and where its table has no business here, files get larger.
    fn worth(&self) -> f64 {
        self.load * if self.is_outside { OUTSIDE_WORTH } else { 1.0 }
    }
}

impl<S> StreamLoad<'_, S> {
    fn may_move(&self) -> bool {
        self.open_for >= if self.is_resumed { RESUMED_PAUSE } else { SETTLED }
    }
}

/// Whether a pod is outside the first pods of a table's order.
struct Outside<'a> {
    me: &'a PodId,
    view: &'a PoolView,
    known: HashMap<&'a TableName, bool>,
}

impl<'a> Outside<'a> {
    fn is(&mut self, table: &'a TableName) -> bool {
        let (me, view) = (self.me, self.view);
        let look = || !view.order(table).take(view.spread(table)).any(|pod| pod.id == *me);
        *self.known.entry(table).or_insert_with(look)
    }
}

#[cfg(test)]
mod tests;
