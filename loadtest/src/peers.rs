//! Sluice beside services that are none of ours: the same records, batches, windows, clocks and histograms, in turns.
//!
//! What a service promises with an ack is half of the figure: each contender names whether its disk has flushed by then, and
//! aims compare only those that have.
//!
//! *Owns*: the works, the order of runs, what a contender is; Sluice and NATS's server as contenders.
//! *Does not own*: the clients of other services (`loadtest/peers`, a workspace of its own), sending at a pace (`producer`),
//! aims and how figures look (`report`).

pub mod calls;
pub mod measure;
pub mod nats_server;
pub mod report;
pub mod sluice;

use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::time::Duration;

use anyhow::{Context, ensure};
use serde::Serialize;

use crate::bench::run::Quantiles;
use crate::machine::{self, Steps};

/// A step of more than this is measured as one of this: what the machine's own measure holds.
const STEP_BYTES_MAX: usize = 1 << 20;
/// About, of a record.
pub const RECORD_BYTES: usize = 1_000;

/// What is sent, and how much of it before an ack.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Work {
    /// As it is asked for.
    pub name: &'static str,
    /// For people.
    pub title: &'static str,
    /// Each has a stream of its own, and where the service has such, a connection.
    pub producers: usize,
    /// Records that are sent together and acked together.
    pub rows: usize,
    /// Batches that a producer has under way.
    pub window: u16,
}

/// All of them, of records of about 1 KB.
pub const WORKS: [Work; 5] = [
    Work {
        name: "batch-100",
        title: "4 producers × 100 records, one batch under way each",
        producers: 4,
        rows: 100,
        window: 1,
    },
    Work {
        name: "batch-1000",
        title: "4 producers × 1,000 records, one batch under way each",
        producers: 4,
        rows: 1_000,
        window: 1,
    },
    Work {
        name: "single-1",
        title: "4 producers, one record an ack, one under way each",
        producers: 4,
        rows: 1,
        window: 1,
    },
    Work {
        name: "single-256",
        title: "4 producers, one record an ack, 256 under way each",
        producers: 4,
        rows: 1,
        window: 256,
    },
    Work {
        name: "single-streams",
        title: "256 producers, one record an ack, one under way each",
        producers: 256,
        rows: 1,
        window: 1,
    },
];

/// What an ack promises.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Durability {
    /// Whether the disk has flushed the records before their ack.
    pub flushed: bool,
    /// By which setting.
    pub how: String,
}

/// Where and how long a run is.
#[derive(Debug, Clone, Copy)]
pub struct Ground<'a> {
    /// Empty, on the disk that is measured; it goes with the run.
    pub dir: &'a Path,
    /// What is sent.
    pub work: &'a Work,
    /// How long.
    pub run: Duration,
}

/// A run that is under way. It stays on the thread that began it, for children end with the thread that started them.
pub type Running<'a> = Pin<Box<dyn Future<Output = anyhow::Result<Run>> + 'a>>;

/// A service, its client, and what it is told of durability.
pub trait Contender {
    /// As it is asked for.
    fn name(&self) -> &'static str;
    /// What its acks promise.
    fn durability(&self) -> Durability;
    /// Whether this work means something to it.
    fn takes(&self, _work: &Work) -> bool {
        true
    }
    /// Runs the work once, on a service in which nothing is left of the run before.
    fn run<'a>(&'a self, ground: Ground<'a>) -> Running<'a>;
}

/// Figures of one run.
#[derive(Debug, Clone, Serialize)]
pub struct Run {
    /// All of them acked, and found again by their number.
    pub records: u64,
    /// From the first send until the last ack.
    pub seconds: f64,
    /// Records by that time.
    pub records_per_s: f64,
    /// Their bytes as this contender sends them, by that time.
    pub mb_per_s: f64,
    /// From the sending of a batch to its ack.
    pub ack: Quantiles,
    /// CPU time of the service's processes per GB of records; Sluice's until all is in the table, where the transport tells
    /// when that is. None: not known.
    pub server_s_per_gb: Option<f64>,
    /// Of this process.
    pub client_s_per_gb: f64,
}

/// A contender's runs of a work.
#[derive(Debug, Clone, Serialize)]
pub struct Side {
    /// Whose.
    pub name: &'static str,
    /// What its acks promised.
    pub durability: Durability,
    /// In order.
    pub runs: Vec<Run>,
    /// The one with the median rate.
    pub median: Option<Run>,
    /// Why there are no more of them.
    pub failed: Option<String>,
}

impl Side {
    fn new(contender: &dyn Contender) -> Self {
        let (name, durability) = (contender.name(), contender.durability());
        Self { name, durability, runs: Vec::new(), median: None, failed: None }
    }

    fn take(&mut self, outcome: anyhow::Result<Run>) {
        match outcome {
            Ok(run) => self.runs.push(run),
            Err(error) => self.failed = Some(format!("{error:#}")),
        }
        let mut by_rate = self.runs.clone();
        by_rate.sort_by(|one, other| one.records_per_s.total_cmp(&other.records_per_s));
        self.median = by_rate.get(by_rate.len() / 2).cloned();
    }
}

/// Figures of one work.
#[derive(Debug, Clone, Serialize)]
pub struct WorkFigures {
    /// Which.
    pub work: Work,
    /// Write and flush of a batch into a file that is there, on the bare machine, before each round; medians, in ms.
    pub flush_ms: Vec<f64>,
    /// A batch there and a few bytes back over loopback, likewise.
    pub round_trip_ms: Vec<f64>,
    /// The contenders, in the order in which they ran.
    pub sides: Vec<Side>,
}

/// Everything that was measured.
#[derive(Debug, Clone, Serialize)]
pub struct Figures {
    /// By work.
    pub works: Vec<WorkFigures>,
    /// Who is not there, and why.
    pub left_out: Vec<String>,
}

/// How long, how often, and what.
#[derive(Debug, Clone)]
pub struct Options {
    /// Data goes below it; it is to be on the disk that is measured.
    pub dir: PathBuf,
    /// Length of a run.
    pub run: Duration,
    /// Rounds: in each one every contender runs once.
    pub runs: usize,
    /// Names of the works to run; empty for all.
    pub only: Vec<String>,
}

/// Runs every work with every contender, in turns: what the machine does meanwhile meets all of them. The thread that calls
/// must outlive it; `tell` hears how it goes.
///
/// # Errors
/// A work that is none; a directory or a disk that cannot be used. A contender that fails is told in its figures.
pub async fn run(
    options: &Options,
    contenders: &[Box<dyn Contender>],
    tell: &dyn Fn(&str),
) -> anyhow::Result<Vec<WorkFigures>> {
    std::fs::create_dir_all(&options.dir).with_context(|| options.dir.display().to_string())?;
    let steps = |bytes: usize| machine::steps(&options.dir, bytes.min(STEP_BYTES_MAX), Duration::ZERO);
    run_beside(&steps, options, contenders, tell).await
}

/// `steps` measures the bare machine with so many bytes.
async fn run_beside(
    steps: &dyn Fn(usize) -> anyhow::Result<Steps>,
    options: &Options,
    contenders: &[Box<dyn Contender>],
    tell: &dyn Fn(&str),
) -> anyhow::Result<Vec<WorkFigures>> {
    for name in &options.only {
        let names = WORKS.map(|work| work.name).join(", ");
        ensure!(WORKS.iter().any(|work| work.name == name), "no work is called {name}; there are {names}");
    }
    let mut works = Vec::new();
    for work in WORKS
        .iter()
        .filter(|work| options.only.is_empty() || options.only.iter().any(|name| name == work.name))
    {
        let takers: Vec<_> = contenders.iter().filter(|contender| contender.takes(work)).collect();
        let sides = takers.iter().map(|contender| Side::new(&***contender)).collect();
        let mut figures = WorkFigures { work: *work, flush_ms: Vec::new(), round_trip_ms: Vec::new(), sides };
        for round in 1..=options.runs.max(1) {
            let Steps { flush, round_trip } = steps(work.rows * RECORD_BYTES)?;
            figures.flush_ms.push(flush.p50_ms);
            figures.round_trip_ms.push(round_trip.p50_ms);
            for (contender, side) in takers.iter().zip(&mut figures.sides) {
                tell(&format!("{}: {}, round {round} of {}", work.name, side.name, options.runs.max(1)));
                run_side(options, work, (&***contender, side), tell).await?;
            }
        }
        works.push(figures);
    }
    Ok(works)
}

/// One run, unless one has failed: there are no figures of a service that does not work.
async fn run_side(
    options: &Options,
    work: &Work,
    (contender, side): (&dyn Contender, &mut Side),
    tell: &dyn Fn(&str),
) -> anyhow::Result<()> {
    if side.failed.is_some() {
        return Ok(());
    }
    let dir = tempfile::tempdir_in(&options.dir)?;
    side.take(contender.run(Ground { dir: dir.path(), work, run: options.run }).await);
    if let Some(failed) = &side.failed {
        tell(&format!("{}: {} failed: {failed}", work.name, side.name));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::rc::Rc;

    use anyhow::bail;

    use super::*;

    /// Has one rate after the other, and fails when they are used up.
    struct Fake {
        name: &'static str,
        rates: RefCell<Vec<f64>>,
        order: Rc<RefCell<Vec<&'static str>>>,
    }

    fn run_at(records_per_s: f64) -> Run {
        Run {
            records: 1,
            seconds: 1.0,
            records_per_s,
            mb_per_s: records_per_s / 1e3,
            ack: Quantiles { p50_ms: 1.0, p99_ms: 2.0 },
            server_s_per_gb: Some(1.0),
            client_s_per_gb: 1.0,
        }
    }

    impl Contender for Fake {
        fn name(&self) -> &'static str {
            self.name
        }

        fn durability(&self) -> Durability {
            Durability { flushed: true, how: String::new() }
        }

        fn takes(&self, work: &Work) -> bool {
            work.rows > 1
        }

        fn run<'a>(&'a self, _ground: Ground<'a>) -> Running<'a> {
            self.order.borrow_mut().push(self.name);
            let rate = self.rates.borrow_mut().pop();
            Box::pin(async move {
                match rate {
                    Some(rate) => Ok(run_at(rate)),
                    None => bail!("no more"),
                }
            })
        }
    }

    #[tokio::test]
    async fn contenders_take_turns_and_one_that_fails_is_told_and_left_out() {
        let order = Rc::new(RefCell::new(Vec::new()));
        let fake = |name, rates: &[f64]| -> Box<dyn Contender> {
            Box::new(Fake { name, rates: RefCell::new(rates.to_vec()), order: Rc::clone(&order) })
        };
        let contenders = [fake("a", &[30.0, 10.0, 20.0]), fake("b", &[1.0])];
        let dir = tempfile::tempdir().expect("a directory");
        let options = Options {
            dir: dir.path().to_owned(),
            run: Duration::ZERO,
            runs: 3,
            only: vec!["batch-100".to_owned(), "single-1".to_owned()],
        };
        let told = RefCell::new(Vec::new());
        let tell = |what: &str| told.borrow_mut().push(what.to_owned());
        let step = |us: f64| Quantiles { p50_ms: us / 1e3, p99_ms: us / 500.0 };
        let steps = |bytes| Ok(Steps { flush: step(bytes as f64), round_trip: step(50.0) });
        let figures = run_beside(&steps, &options, &contenders, &tell).await.expect("runs");
        assert_eq!(
            *order.borrow(),
            ["a", "b", "a", "b", "a"],
            "nobody takes single records, b fails in round 2"
        );
        let [batches, singles] = &figures[..] else { panic!("{} works", figures.len()) };
        assert!(singles.sides.is_empty());
        assert_eq!((&*batches.flush_ms, &*batches.round_trip_ms), (&[100.0; 3][..], &[0.05; 3][..]));
        let [a, b] = &batches.sides[..] else { panic!("{} sides", batches.sides.len()) };
        assert_eq!(a.median.as_ref().map(|run| run.records_per_s), Some(20.0));
        assert_eq!((b.runs.len(), b.failed.as_deref()), (1, Some("no more")));
        assert!(told.borrow().iter().any(|what| what.contains("b failed: no more")), "{told:?}");
        let options = Options { only: vec!["batch".to_owned()], ..options };
        let refused = run_beside(&steps, &options, &contenders, &tell).await;
        assert!(refused.is_err(), "no work is called so");
    }
}
