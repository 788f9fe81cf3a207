//! Fault points that work: what is armed is looked for at each pass, and each pass is counted in a file.
//!
//! A look is one failed `open`, a count one write of some bytes: both are in the page cache, where `kill -9` does not reach.
//!
//! *Owns*: the process's directory of faults, its counts, how it ends itself.
//! *Does not own*: points and actions (`fault`).

use std::collections::HashSet;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use super::{Action, Bug, HITS, PAIR_BYTES, Point, Then, numbers};
use crate::config;
use crate::ids::WalPosition;

/// What a test wants to go wrong, instead of what the files say: called at each pass, it may block.
type Plan = Arc<dyn Fn(Point, WalPosition) -> io::Result<()> + Send + Sync>;

/// The faults of one part of a program: the process's, or a test's own.
#[derive(Clone, Default)]
pub struct Faults {
    plan: Option<Plan>,
}

impl Faults {
    /// A test's own.
    pub fn planned(plan: impl Fn(Point, WalPosition) -> io::Result<()> + Send + Sync + 'static) -> Self {
        Self { plan: Some(Arc::new(plan)) }
    }

    /// A pass at a point, about this place in the log.
    ///
    /// # Errors
    /// What is to be taken for the operation's own error.
    pub fn hit(&self, point: Point, position: WalPosition) -> io::Result<()> {
        match &self.plan {
            Some(plan) => plan(point, position),
            None => hit(point),
        }
    }
}

struct Directory {
    dir: PathBuf,
    bugs: HashSet<&'static str>,
    hits: Mutex<Hits>,
}

struct Hits {
    file: File,
    counts: Vec<[u64; 2]>,
}

fn process() -> Option<&'static Directory> {
    static PROCESS: OnceLock<Option<Directory>> = OnceLock::new();
    // A directory that cannot be used is as good as none: the rig sees that nothing is counted.
    PROCESS.get_or_init(|| Directory::open(config::faults_dir()?).ok()).as_ref()
}

/// A pass at a point.
///
/// # Errors
/// What is to be taken for the operation's own error.
pub fn hit(point: Point) -> io::Result<()> {
    process().map_or(Ok(()), |process| process.hit(point))
}

/// A pass at a point whose caller waits by itself, and does by itself what is left: an error, or a lie.
pub fn take(point: Point) -> Option<Action> {
    let process = process()?;
    let action = process.pass(point)?;
    if action.then == Then::Kill {
        std::thread::sleep(action.delay);
        process.kill(point);
    }
    Some(action)
}

/// Whether a bug is there.
pub fn has(bug: Bug) -> bool {
    process().is_some_and(|process| process.bugs.contains(bug.name()))
}

/// By how many milliseconds the wall clock is wrong.
pub fn clock_ms() -> i64 {
    let wrong = process().and_then(|process| std::fs::read_to_string(process.dir.join("clock")).ok());
    wrong.and_then(|text| text.trim().parse().ok()).unwrap_or(0)
}

impl Directory {
    fn open(dir: PathBuf) -> io::Result<Self> {
        std::fs::create_dir_all(&dir)?;
        let path = dir.join(HITS);
        let file = File::options().read(true).write(true).create(true).truncate(false).open(&path)?;
        let counts = numbers(&std::fs::read(&path)?);
        let is_there = |bug: &&Bug| dir.join(format!("bug.{}", bug.name())).exists();
        let bugs = Bug::ALL.iter().filter(is_there).map(|bug| bug.name()).collect();
        Ok(Self { dir, bugs, hits: Mutex::new(Hits { file, counts }) })
    }

    fn hit(&self, point: Point) -> io::Result<()> {
        let Some(action) = self.pass(point) else { return Ok(()) };
        if action.delay > Duration::ZERO {
            std::thread::sleep(action.delay);
        }
        match action.then {
            Then::Kill => self.kill(point),
            Then::Fail(errno) => Err(io::Error::from_raw_os_error(errno)),
            Then::GoOn | Then::LoseReply | Then::Stale | Then::Drop => Ok(()),
        }
    }

    /// Counts a pass, and answers what happens at it.
    fn pass(&self, point: Point) -> Option<Action> {
        let path = self.dir.join(point.name());
        // Held while the file is looked at, so that what is to happen once does not happen twice.
        let mut hits = self.hits.lock().unwrap_or_else(PoisonError::into_inner);
        let armed = std::fs::read_to_string(&path).ok().and_then(|text| Action::parse(&text));
        let mut happens = None;
        if let Some(action) = armed {
            let (rest, now) = action.clone().pass();
            let kept = match rest {
                Some(rest) if rest == action => Ok(()),
                Some(rest) => std::fs::write(&path, rest.to_string()),
                None => std::fs::remove_file(&path),
            };
            // One that the rig has just taken back does not happen.
            happens = Some(action).filter(|_| now && kept.is_ok());
        }
        hits.count(point, happens.is_some());
        happens
    }

    fn kill(&self, point: Point) -> ! {
        // Without it the rig takes this death for a fault of the program's own.
        let _ = std::fs::write(self.dir.join("killed"), point.name());
        std::process::abort()
    }
}

impl Hits {
    fn count(&mut self, point: Point, happens: bool) {
        let index = Point::ALL.iter().position(|known| *known == point).unwrap_or(0);
        let [passes, actions] = &mut self.counts[index];
        *passes += 1;
        *actions += u64::from(happens);
        let mut pair = [0; PAIR_BYTES];
        pair[..PAIR_BYTES / 2].copy_from_slice(&passes.to_le_bytes());
        pair[PAIR_BYTES / 2..].copy_from_slice(&actions.to_le_bytes());
        // A count that is not written is one that the rig misses: it says so.
        let _ = self.file.write_all_at(&pair, (index * PAIR_BYTES) as u64);
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::read_counts;
    use super::*;

    fn arm(dir: &Path, point: Point, action: &str) {
        std::fs::write(dir.join(point.name()), action).expect("written");
    }

    #[test]
    fn what_is_armed_happens_and_every_pass_is_counted() {
        let dir = tempfile::tempdir().expect("a directory");
        let faults = Directory::open(dir.path().to_owned()).expect("opens");
        faults.hit(Point::TrimBefore).expect("nothing is armed");
        arm(dir.path(), Point::TrimBefore, "skip:1 times:2 error:ENOSPC");
        let ends: Vec<_> = (0..4).map(|_| faults.hit(Point::TrimBefore)).collect();
        let failed: Vec<bool> = ends.iter().map(Result::is_err).collect();
        assert_eq!(failed, [false, true, true, false]);
        let error = ends.into_iter().find_map(Result::err).expect("some failed");
        assert_eq!(error.kind(), io::ErrorKind::StorageFull);
        assert!(!dir.path().join(Point::TrimBefore.name()).exists(), "it is used up");
        // The next life counts on.
        drop(faults);
        Directory::open(dir.path().to_owned()).expect("opens").hit(Point::TrimBefore).expect("fine");
        let counts = read_counts(dir.path()).expect("readable");
        assert!(counts.contains(&(Point::TrimBefore, 6, 2)), "{counts:?}");
        assert!(counts.contains(&(Point::TrimAfter, 0, 0)), "{counts:?}");
    }

    #[test]
    fn bugs_are_there_from_the_start() {
        let dir = tempfile::tempdir().expect("a directory");
        std::fs::write(dir.path().join("bug.held-ignored"), "").expect("written");
        let faults = Directory::open(dir.path().to_owned()).expect("opens");
        assert!(faults.bugs.contains(Bug::HeldIgnored.name()) && faults.bugs.len() == 1);
    }
}
