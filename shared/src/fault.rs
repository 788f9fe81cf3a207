//! Faults on purpose: named points at which a process can be told to die, fail, wait or lie; and planted bugs.
//!
//! Compiled into debug builds, which the tests use, and into those with the feature `faults`. Elsewhere `off` stands in
//! its place, whose functions are constant: nothing of it is in a release. A process is told what to do by files in the
//! directory that `SLUICE_FAULTS` names, so that it can be told so while it runs, and what it has done is there after a
//! `kill -9`:
//!
//! | file | |
//! |---|---|
//! | `POINT` | what happens there, by `Action::parse`; taken away before its last time |
//! | `hits` | of each point how often it was passed, and how often something happened there |
//! | `killed` | the point at which the process ended itself |
//! | `bug.NAME` | the bug is there from the start |
//! | `clock` | by how many milliseconds the wall clock is wrong |
//!
//! *Owns*: the points, the bugs, the files' form.
//! *Does not own*: when something is to happen (`loadtest chaos`), what an error means to the code that meets it.

#[cfg(not(any(debug_assertions, feature = "faults")))]
mod off;
#[cfg(any(debug_assertions, feature = "faults"))]
mod on;

use std::io;
use std::path::Path;
use std::time::Duration;

#[cfg(not(any(debug_assertions, feature = "faults")))]
pub use off::{Faults, clock_ms, has, hit, take};
#[cfg(any(debug_assertions, feature = "faults"))]
pub use on::{Faults, clock_ms, has, hit, take};

/// Whether this program has fault points.
pub const COMPILED_IN: bool = cfg!(any(debug_assertions, feature = "faults"));

/// A pass at a point at which nothing can fail: of what is planned only waits and deaths count.
pub fn pass(point: Point) {
    let _ = hit(point);
}

/// Declares an enum whose variants have names.
macro_rules! named {
    ($(#[$doc:meta])* $name:ident { $($(#[$of:meta])* $variant:ident = $text:literal,)* }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum $name { $($(#[$of])* $variant,)* }

        impl $name {
            /// All of them, in a fixed order.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// How it is called in files and reports.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $text,)* }
            }

            /// The one of this name.
            pub fn named(name: &str) -> Option<Self> {
                Self::ALL.iter().copied().find(|one| one.name() == name)
            }
        }
    };
}

named! {
    /// A place in the code path.
    Point {
        /// The log finds out how its files can be written. `EINVAL` makes it write through the page cache.
        WalProbe = "wal.probe",
        /// A spare file of the log is about to be made.
        WalCreate = "wal.create",
        /// The log is about to say which segments have to be there, and how far they are durable.
        WalMark = "wal.mark",
        /// A group is about to be written.
        WalWriteBefore = "wal.write.before",
        /// A group is written; with direct I/O that has flushed it too.
        WalWriteAfter = "wal.write.after",
        /// A written group is about to be flushed; not with direct I/O.
        WalFlushBefore = "wal.flush.before",
        /// A group is on stable storage, and nobody knows yet.
        WalFlushAfter = "wal.flush.after",
        /// An entry of an older life is about to be replayed.
        WalReplay = "wal.replay",
        /// A segment, or a group in the tables' store, is about to be taken away.
        TrimBefore = "trim.before",
        /// It has been taken away.
        TrimAfter = "trim.after",
        /// A frame has come, and is about to be judged. It can be dropped here, as no network would.
        Frame = "frame",
        /// An ack is about to be told to the gateway.
        AckBefore = "ack.before",
        /// An ack was told to the gateway.
        AckAfter = "ack.after",
        /// A Parquet file is whole in memory.
        ParquetClosed = "parquet.closed",
        /// A Parquet file is stored.
        ParquetStored = "parquet.stored",
        /// A watermark map is stored, and no version names it yet.
        MapStored = "map.stored",
        /// A version is about to be put.
        CommitBefore = "commit.before",
        /// A version is put.
        CommitAfter = "commit.after",
        /// A home is about to answer those who asked for a commit.
        AnswerBefore = "answer.before",
        /// A gateway is asked to take a stream elsewhere, and sends no more here.
        HandoffStop = "handoff.stop",
        /// Another pod has opened the stream.
        HandoffOpened = "handoff.opened",
        /// The old pod hears that the stream has left.
        HandoffLeave = "handoff.leave",
        /// A group of a log in the tables' store is about to be put.
        LogPutBefore = "log.put.before",
        /// A group of a log in the tables' store is put, and nobody knows yet.
        LogPutAfter = "log.put.after",
        /// Of a log in the tables' store of which nothing is needed any more its header alone is left.
        LogDelete = "log.delete",
        /// A log without its pod is about to be taken over.
        AdoptBefore = "adopt.before",
        /// A log without its pod is sealed, and nothing of it was read.
        AdoptSealed = "adopt.sealed",
        /// A log without its pod has been taken over: all of it is committed.
        AdoptAfter = "adopt.after",
        /// It is noted so, and nothing of it is deleted.
        AdoptNoted = "adopt.noted",
        /// The tables' store is about to put an object.
        StorePut = "store.put",
        /// The tables' store is about to put a group of a log, or its seal.
        StoreLog = "store.log",
        /// The tables' store is about to put a map, or another object that may be there once.
        StoreCreate = "store.create",
        /// The tables' store is about to put a version.
        StoreVersion = "store.version",
        /// The tables' store is about to read an object.
        StoreGet = "store.get",
        /// The tables' store is about to list objects.
        StoreList = "store.list",
        /// The tables' store is about to delete an object.
        StoreDelete = "store.delete",
    }
}

named! {
    /// A mistake that the rig has to find.
    Bug {
        /// Records are acked before they are flushed.
        AckBeforeFlush = "ack-before-flush",
        /// Groups that go through the page cache are not flushed.
        FlushSkipped = "flush-skipped",
        /// The watermarks are committed in a version before that of their records.
        WatermarkApart = "watermark-apart",
        /// After a commit whose answer was lost the records are written again, whoever wrote them.
        BlindRetry = "blind-retry",
        /// Replay leaves the last group out.
        ReplaySkipsLast = "replay-skips-last",
        /// A frame may pass although records before it are missing.
        GateWithGap = "gate-with-gap",
        /// Runs are committed whose predecessors are not there.
        HeldIgnored = "held-ignored",
    }
}

/// The file of counts: for each point two numbers of eight bytes, little-endian, passes and actions.
const HITS: &str = "hits";
const PAIR_BYTES: usize = 16;

/// Of each point, how often it was passed, and how often something happened there.
pub type Counts = Vec<(Point, u64, u64)>;

/// What a process's directory of faults says of its passes, also after its death.
///
/// # Errors
/// It cannot be read.
pub fn read_counts(dir: &Path) -> io::Result<Counts> {
    let bytes = match std::fs::read(dir.join(HITS)) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
        Err(error) => return Err(error),
    };
    let counts = numbers(&bytes);
    Ok(Point::ALL.iter().zip(counts).map(|(point, [passes, actions])| (*point, passes, actions)).collect())
}

fn numbers(bytes: &[u8]) -> Vec<[u64; 2]> {
    let number = |at: usize| {
        let bytes = bytes.get(at..at + PAIR_BYTES / 2).and_then(|bytes| bytes.try_into().ok());
        bytes.map_or(0, u64::from_le_bytes)
    };
    (0..Point::ALL.len())
        .map(|index| [number(index * PAIR_BYTES), number(index * PAIR_BYTES + PAIR_BYTES / 2)])
        .collect()
}

/// What happens at a point.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Action {
    /// So many passes are let through before.
    pub skip: u32,
    /// So often it happens; 0 until the file is taken away.
    pub times: u32,
    /// It begins with a wait,
    pub delay: Duration,
    /// and goes on like this.
    pub then: Then,
}

/// How a pass goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Then {
    /// As if nothing were.
    #[default]
    GoOn,
    /// The process ends at once, as by `kill -9`.
    Kill,
    /// With this error of the operating system, or of the store.
    Fail(i32),
    /// The store does what it is asked for, and answers with an error.
    LoseReply,
    /// The store lists what was there a moment ago.
    Stale,
    /// The frame is dropped.
    Drop,
}

/// Names of errors, by `errno`.
const ERRORS: [(&str, i32); 4] = [("EIO", 5), ("ENOSPC", 28), ("EINVAL", 22), ("EBUSY", 16)];

impl Action {
    /// Once, at the next pass.
    pub fn once(then: Then) -> Self {
        Self { times: 1, then, ..Self::default() }
    }

    /// Reads words such as `skip:3 times:2 delay:50 error:EIO`; `kill`, `lost`, `stale` and `drop` stand for themselves,
    /// delays are milliseconds. None where a word is not known.
    pub fn parse(text: &str) -> Option<Self> {
        let mut action = Self { times: 1, ..Self::default() };
        for word in text.split_whitespace() {
            match word.split_once(':') {
                Some(("skip", count)) => action.skip = count.parse().ok()?,
                Some(("times", count)) => action.times = count.parse().ok()?,
                Some(("delay", ms)) => action.delay = Duration::from_millis(ms.parse().ok()?),
                Some(("error", name)) => {
                    action.then = Then::Fail(ERRORS.iter().find(|(known, _)| *known == name)?.1);
                }
                None if word == "kill" => action.then = Then::Kill,
                None if word == "lost" => action.then = Then::LoseReply,
                None if word == "stale" => action.then = Then::Stale,
                None if word == "drop" => action.then = Then::Drop,
                _ => return None,
            }
        }
        Some(action)
    }

    /// What is left of it after this pass, and whether something happens now.
    #[cfg(any(debug_assertions, feature = "faults"))]
    fn pass(mut self) -> (Option<Self>, bool) {
        if self.skip > 0 {
            self.skip -= 1;
            return (Some(self), false);
        }
        match self.times {
            0 => (Some(self), true),
            1 => (None, true),
            _ => {
                self.times -= 1;
                (Some(self), true)
            }
        }
    }
}

impl std::fmt::Display for Action {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { skip, times, delay, then } = self;
        write!(f, "skip:{skip} times:{times} delay:{}", delay.as_millis())?;
        match then {
            Then::GoOn => Ok(()),
            Then::Kill => f.write_str(" kill"),
            Then::Fail(errno) => {
                let name = ERRORS.iter().find(|(_, known)| known == errno).map_or("EIO", |(name, _)| name);
                write!(f, " error:{name}")
            }
            Then::LoseReply => f.write_str(" lost"),
            Then::Stale => f.write_str(" stale"),
            Then::Drop => f.write_str(" drop"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_found() {
        for point in Point::ALL {
            assert_eq!(Point::named(point.name()), Some(*point));
        }
        for bug in Bug::ALL {
            assert_eq!(Bug::named(bug.name()), Some(*bug));
        }
        assert_eq!(Point::named("nowhere"), None);
    }

    #[test]
    fn actions_are_read_as_they_are_written() {
        for then in [Then::GoOn, Then::Kill, Then::Fail(5), Then::LoseReply, Then::Stale, Then::Drop] {
            let action = Action { skip: 2, times: 3, delay: Duration::from_millis(40), then };
            assert_eq!(Action::parse(&action.to_string()), Some(action));
        }
        assert_eq!(Action::parse("kill"), Some(Action::once(Then::Kill)));
        assert_eq!(Action::parse("error:ENONE"), None);
        assert_eq!(Action::parse("kil"), None);
    }

    #[cfg(any(debug_assertions, feature = "faults"))]
    #[test]
    fn an_action_skips_happens_and_is_used_up() {
        let (action, now) = Action { skip: 1, times: 2, ..Action::default() }.pass();
        assert!(!now);
        let (action, now) = action.expect("skipped one").pass();
        assert!(now);
        assert_eq!(action.expect("one is left").pass(), (None, true));
        assert_eq!(Action::default().pass(), (Some(Action::default()), true), "without end");
    }
}
