//! The whole service in one thread: gateways, pods, homes and producers as production has them, with virtual time, a
//! network and a store made up, and faults of all kinds by a seed. The auditor judges every version of the table.
//!
//! The same seed gives the same history, to the byte: that needs a process of its own for each seed, since crates keep
//! statics, and the program's `getrandom` and `clock_gettime` (`seeded`).
//!
//! *Owns*: one seed's run and its outcome, many seeds' figures.
//! *Does not own*: what happens in the world (`world`), the verdict (`auditor`).
//! Tests P1 to P4, P6 and P8.

pub mod seeded;
pub mod host;
pub mod gossip;
pub mod net;
pub mod store;
pub mod process;
pub mod producer;
pub mod world;
pub mod many;

use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::Path;

use anyhow::{Context, anyhow};
use futures_util::{FutureExt, TryStreamExt};
use object_store::{ObjectStore, ObjectStoreExt};

pub use process::Planted;
pub use world::{Counts, Plan};

use crate::auditor::Verdict;
use crate::history::{History, StreamHistory};
use crate::judge::judge_dir;
use world::World;

/// Real memory for a simulated thread.
const STACK_BYTES: usize = 16 << 20;

/// What came out of a seed.
#[derive(Debug)]
pub struct Outcome {
    /// The seed.
    pub seed: u64,
    /// Of everything that was stored, sent and answered.
    pub hash: u64,
    /// The auditor's word on each table.
    pub verdicts: Vec<Verdict>,
    /// What has happened.
    pub counts: Counts,
    /// Store operations that went wrong.
    pub store_faults: u64,
    /// Records sent.
    pub records: u64,
    /// What was wrong by what producers were told, streams that did not end.
    pub faults: Vec<String>,
}

impl Outcome {
    /// Whether all promises were kept.
    pub fn is_clean(&self) -> bool {
        self.verdicts.iter().all(Verdict::is_clean) && self.faults.is_empty()
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Counts {
            pods_killed,
            gateways_killed,
            pods_drained,
            paused,
            cuts,
            producers_killed,
            rivals,
            virtual_ms,
        } = self.counts;
        writeln!(
            f,
            "{pods_killed} pods and {gateways_killed} gateways killed, {pods_drained} pods drained, {paused} stood still, \
             {cuts} cuts, {} store faults, {producers_killed} producers vanished, {rivals} rivals, in {virtual_ms} ms",
            self.store_faults
        )?;
        self.verdicts.iter().try_for_each(|verdict| writeln!(f, "{verdict}"))?;
        self.faults.iter().try_for_each(|fault| writeln!(f, "  {fault}"))?;
        let word = if self.is_clean() { "kept" } else { "BROKEN" };
        write!(f, "seed {}: {} records, history {:016x}, {word}", self.seed, self.records, self.hash)
    }
}

/// Runs a seed with files below `dir`, on a thread of its own. Where this process has simulated before, or its `getrandom`
/// and clock are the system's, the outcome is as valid, but another run may differ.
///
/// # Errors
/// A table that cannot be read. Broken promises are not errors here: they are in the outcome.
pub fn run(seed: u64, plan: Plan, dir: &Path) -> anyhow::Result<Outcome> {
    let dir = dir.to_owned();
    let thread = std::thread::Builder::new().name(format!("seed-{seed}")).stack_size(STACK_BYTES);
    let simulated = thread.spawn(move || {
        seeded::begin(seed);
        run_here(seed, plan, &dir)
    })?;
    simulated.join().map_err(|_| anyhow!("seed {seed}: the simulation panicked"))?
}

fn run_here(seed: u64, plan: Plan, dir: &Path) -> anyhow::Result<Outcome> {
    let mut world = World::new(seed, plan, dir)?;
    let ended = world.run();
    let mut faults = std::mem::take(&mut world.faults);
    faults.extend(ended.err().map(|error| format!("{error:#}")));
    let mut hasher = DefaultHasher::new();
    let out = dir.join("judged");
    write_out(&world, &out, &mut hasher)?;
    let tables = std::fs::canonicalize(dir.join("tables")).context("the tables' directory")?;
    let below = tables.strip_prefix("/").unwrap_or(&tables);
    let (mut verdicts, mut records) = (Vec::new(), 0);
    for table in producer::TABLES {
        let mut history = History::default();
        for stream in world.streams().iter().filter(|stream| stream.table() == table) {
            let notes = stream.notes();
            faults.extend(notes.faults.iter().map(|fault| format!("stream {}: {fault}", stream.number)));
            hash_notes(&notes.history, &mut hasher);
            history.streams.push(notes.history.clone());
        }
        if history.sent() > 0 {
            verdicts.push(judge_dir(&out.join(below).join(table.replace('.', "/")), &history, None)?);
        }
        records += history.sent();
    }
    faults.hash(&mut hasher);
    Ok(Outcome {
        seed,
        hash: hasher.finish(),
        verdicts,
        counts: world.counts,
        store_faults: world.store().faults(),
        records,
        faults,
    })
}

fn hash_notes(notes: &StreamHistory, hasher: &mut impl Hasher) {
    let promises: Vec<_> = notes.committed.iter().map(|promise| (promise.next, promise.version)).collect();
    (&notes.stream, &notes.sent, notes.durable_next, &notes.rejected, promises).hash(hasher);
}

/// Writes all objects into files, for a reader that knows nothing of the simulation, and hashes them.
fn write_out(world: &World, out: &Path, hasher: &mut impl Hasher) -> anyhow::Result<()> {
    let objects = world.store().objects();
    let listed =
        objects.list(None).try_collect::<Vec<_>>().now_or_never().context("memory answers at once")??;
    for object in listed {
        let read = async { objects.get(&object.location).await?.bytes().await };
        let bytes = read.now_or_never().context("memory answers at once")??;
        let path = out.join(object.location.as_ref());
        (object.location.filename(), &bytes).hash(hasher);
        std::fs::create_dir_all(path.parent().context("an object in a directory")?)?;
        std::fs::write(&path, &bytes).with_context(|| path.display().to_string())?;
    }
    Ok(())
}
