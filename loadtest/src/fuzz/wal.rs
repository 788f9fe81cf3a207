//! The log as a start reads it, from a disk and from a store.
//!
//! An input is a script: what is written, by the log's own encoder, and what happens to those bytes. Damage leaves the
//! checksums as they were, so that the reader has to see it; a forgery puts them right, so that the reader gets past them.
//!
//! *Owns*: these scripts, what must hold of what is read.
//! *Does not own*: encoder and reader (`sluice_pod::wal`).

use std::collections::BTreeMap;

use bytes::Bytes;
use sluice_pod::wal::fuzzing::{GroupMade, GroupPlan, MadeUpLog, MadeUpObject, identity_text, read_identity};
use sluice_shared::ids::{PodId, WalPosition};

use super::draw::Draw;

const BLOCK: usize = 4096;
const SEGMENT_HEADER: usize = 160;
const GROUP_HEADER: usize = 88;
const ENTRY_HEADER: usize = 8;
const FIRST_SEGMENT: u64 = 3;
const LIVES_MAX: usize = 3;
const GROUPS_MAX: usize = 3;
const ENTRIES_MAX: usize = 4;
const CHANGES_MAX: usize = 6;
/// Where the fields of a segment's header begin, and of an object's tail.
const HEADER_FIELDS: [usize; 14] = [8, 16, 24, 32, 40, 48, 56, 64, 68, 160, 168, 176, 184, 192];
/// Those of a group's header.
const GROUP_FIELDS: [usize; 10] = [16, 24, 32, 40, 48, 56, 64, 72, 76, 80];

/// What a script does to the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Harm {
    None,
    Damaged,
    Forged,
}

fn pod(name: &str) -> PodId {
    name.parse().expect("a valid id")
}

/// Segments of up to three lives. Without harm all comes back. With damage alone what comes back is a prefix of what was
/// written, at its places; and where no loss is accepted nothing is missing of a life that has ended, nor what is known to be
/// durable (`durable_through`). What is forged may come back in any form, at rising places.
pub(super) fn segments(input: &[u8]) {
    let mut draw = Draw::new(input);
    let (known, accept_loss) = (draw.byte(), draw.flag());
    let mut log = write_log(&mut draw);
    let groups = std::mem::take(&mut log.groups);
    let marked = marked(known, &groups);
    let written_segments = log.segments.clone();
    let mut harm = Harm::None;
    for _ in 0..CHANGES_MAX {
        if draw.is_done() {
            break;
        }
        harm = harm.max(change(&mut log, &groups, &mut draw));
    }
    let (life, segments) = (log.life(), log.segments.clone());
    let read = log.replay(marked, accept_loss);
    let Ok(read) = read else {
        assert!(harm != Harm::None, "nothing happened to it: {read:?}");
        return;
    };
    if harm == Harm::Forged {
        assert!(read.is_sorted_by(|one, next| one.0 < next.0), "places that do not rise");
        return;
    }
    let written: Vec<(WalPosition, Bytes)> = groups.iter().flat_map(entries_of).collect();
    let start = read.first().and_then(|first| written.iter().position(|entry| entry == first));
    let start = if marked.is_some() { 0 } else { start.unwrap_or(0) };
    assert!(written[start..].starts_with(&read), "{} entries that were not written so", read.len());
    if let Some(marked) = marked.filter(|_| !accept_loss) {
        let durable = durable_through(&groups, life, [&written_segments, &segments]).max(marked);
        let must_be = groups.iter().filter(|group| group.life < life || group.number <= durable);
        let least: usize = must_be.map(|group| group.payloads.len()).sum();
        assert!(read.len() >= least, "{} entries of {least}: some are lost", read.len());
    }
    assert!(harm != Harm::None || read.len() == written.len(), "{} entries", read.len());
}

/// Through which group the log was durable by the file beside it; None where there is none, as an older program left it. After
/// a clean stop that is the last group, after others some groups before.
fn marked(known: u8, groups: &[GroupMade]) -> Option<u64> {
    let last = groups.last().map_or(0, |group| group.number);
    let behind = u64::from(known >> 3);
    let durable = match known >> 1 & 3 {
        0 => 0,
        1 | 2 => last.saturating_sub(behind),
        _ => last,
    };
    (known & 1 == 0).then_some(durable)
}

/// Through which group of the newest life the files tell that it was durable: by a header that still stands, and by what no
/// torn tail does to a segment that had groups.
fn durable_through(groups: &[GroupMade], life: u64, [before, after]: [&BTreeMap<u64, Vec<u8>>; 2]) -> u64 {
    let of_life = || groups.iter().filter(|group| group.life == life);
    let standing = of_life().filter(|group| group.header_stands_in(after)).map(|group| group.durable);
    let header = |bytes: &Vec<u8>| bytes.get(..SEGMENT_HEADER).map(<[u8]>::to_vec);
    let is_harmed = |group: &&GroupMade| {
        let (written, found) = (&before[&group.segment], after.get(&group.segment));
        found.is_none_or(|found| found.len() < written.len() || header(found) != header(written))
    };
    standing.chain(of_life().filter(is_harmed).map(|group| group.number)).max().unwrap_or(0)
}

fn entries_of(group: &GroupMade) -> Vec<(WalPosition, Bytes)> {
    let mut at = (group.offset + GROUP_HEADER) as u64;
    let place = |payload: &Bytes| {
        let position = WalPosition { segment: group.segment, offset: at };
        at += (ENTRY_HEADER + payload.len()) as u64;
        (position, payload.clone())
    };
    group.payloads.iter().map(place).collect()
}

fn write_log(draw: &mut Draw<'_>) -> MadeUpLog {
    let mut log = MadeUpLog::new(pod("pod-1"), FIRST_SEGMENT);
    let mut count = 0;
    for segment in 0..=draw.below(LIVES_MAX) {
        if segment > 0 && draw.flag() {
            log.begin_life();
        }
        let groups = (0..=draw.below(GROUPS_MAX))
            .map(|_| GroupPlan { lag: draw.below(4) as u64, payloads: payloads(draw, &mut count) });
        let groups = groups.collect();
        log.add_segment(groups);
    }
    if draw.flag() {
        log.begin_life();
    }
    if draw.flag() {
        log.add_segment(Vec::new());
    }
    log
}

/// Entries of different bytes.
fn payloads(draw: &mut Draw<'_>, count: &mut u8) -> Vec<Bytes> {
    let entries = draw.below(ENTRIES_MAX + 1);
    let payload = |_| {
        *count = count.wrapping_add(1);
        let bytes = match draw.byte() {
            short @ 0..=223 => usize::from(short),
            long => usize::from(long - 223) * 128,
        };
        Bytes::from(vec![*count; bytes])
    };
    (0..entries).map(payload).collect()
}

/// Does one thing to the log.
fn change(log: &mut MadeUpLog, groups: &[GroupMade], draw: &mut Draw<'_>) -> Harm {
    let kind = draw.below(10);
    let numbers: Vec<u64> = log.segments.keys().copied().collect();
    let Some(number) = numbers.get(draw.below(LIVES_MAX)).copied() else { return Harm::None };
    match kind {
        0 => drop(log.segments.remove(&number)),
        1 => {
            let from = numbers[draw.below(numbers.len())];
            let (from, at) = (log.segments[&from].clone(), draw.below(32) * BLOCK);
            let block = from.chunks(BLOCK).nth(draw.below(32)).unwrap_or_default();
            if let Some(to) =
                log.segments.get_mut(&number).and_then(|bytes| bytes.get_mut(at..at + block.len()))
            {
                to.copy_from_slice(block);
            }
        }
        2..=5 => drop(log.segments.get_mut(&number).map(|bytes| damage(bytes, kind, draw))),
        6 => {
            if let Some(bytes) = log.segments.get_mut(&number) {
                forge(bytes, HEADER_FIELDS[draw.below(9)], draw);
            }
            log.mend_header(number);
            return Harm::Forged;
        }
        _ => {
            let Some(group) = groups.get(draw.below(LIVES_MAX * GROUPS_MAX)) else { return Harm::None };
            let at = match kind {
                7 | 8 => GROUP_FIELDS[draw.below(GROUP_FIELDS.len())],
                _ => GROUP_HEADER,
            };
            if let Some(bytes) = log.segments.get_mut(&group.segment) {
                forge(bytes, group.offset + at, draw);
            }
            log.mend_group(group.segment, group.offset);
            return Harm::Forged;
        }
    }
    Harm::Damaged
}

/// What a disk can do to a file. No more than a byte at a time is altered: what is not noise can have any checksum.
fn damage(bytes: &mut Vec<u8>, kind: usize, draw: &mut Draw<'_>) {
    let at = draw.below(1 << 16);
    match kind {
        2 => bytes.truncate(at),
        3 => bytes.resize(bytes.len() + draw.below(3) * BLOCK, 0),
        4 => {
            let (from, blocks) = (at % 32 * BLOCK, 1 + draw.below(4));
            let to = (from + blocks * BLOCK).min(bytes.len());
            bytes.get_mut(from..to).unwrap_or_default().fill(0);
        }
        _ => {
            let by = draw.byte().max(1);
            if let Some(byte) = at.checked_rem(bytes.len()).and_then(|at| bytes.get_mut(at)) {
                *byte ^= by;
            }
        }
    }
}

/// Writes some bytes of a number over a field.
fn forge(bytes: &mut [u8], at: usize, draw: &mut Draw<'_>) {
    let width = [1, 2, 4, 8][draw.below(4)];
    let value = draw.number().to_le_bytes();
    if let Some(field) = bytes.get_mut(at..at + width) {
        field.copy_from_slice(&value[..width]);
    }
}

/// Objects of a log in a store: damaged ones are refused, forged ones read or refused. And the identity of a log on a disk:
/// what is read as one is written as it was.
pub(super) fn objects(input: &[u8]) {
    let mut draw = Draw::new(input);
    let mut count = 0;
    let mut object = match draw.below(4) {
        0 | 1 => MadeUpObject::group(&pod("pod-1"), 5, &payloads(&mut draw, &mut count)),
        2 => MadeUpObject::seal(&pod("pod-1"), &pod("pod-2"), 5),
        _ => {
            let mends = draw.flag();
            // Most are none.
            let _ = read_identity(draw.rest(), mends);
            return;
        }
    };
    let written = object.read().expect("as it was written");
    let mut harm = Harm::None;
    for _ in 0..CHANGES_MAX {
        if draw.is_done() {
            break;
        }
        match draw.below(8) {
            kind @ 2..=5 => {
                damage(&mut object.bytes, kind, &mut draw);
                harm = harm.max(Harm::Damaged);
            }
            kind => {
                let at = match kind {
                    0 | 1 => HEADER_FIELDS[draw.below(HEADER_FIELDS.len())],
                    6 => BLOCK + GROUP_HEADER,
                    _ => BLOCK + GROUP_FIELDS[draw.below(GROUP_FIELDS.len())],
                };
                forge(&mut object.bytes, at, &mut draw);
                object.mend();
                harm = Harm::Forged;
            }
        }
    }
    match (object.read(), harm) {
        (Some(read), Harm::None | Harm::Damaged) => assert_eq!(read, written, "an object of other bytes"),
        (None, Harm::None) => unreachable!("it was just read"),
        (Some(_), Harm::Forged) | (None, Harm::Damaged | Harm::Forged) => {}
    }
}

/// One script of each kind of change.
pub(super) fn segment_seeds() -> Vec<Vec<u8>> {
    let written = |head: [u8; 2]| {
        let group = |lag: u8| [&[lag, 2][..], &[10, 230]].concat();
        let segment = |life: &[u8]| [life, &[1], &group(0)[..], &group(1)].concat();
        [&head[..], &[2], &segment(&[]), &segment(&[0]), &segment(&[1]), &[0, 1]].concat()
    };
    let mut seeds = vec![written([0, 0]), written([1, 1])];
    for kind in 0..10 {
        for segment in 0..3 {
            seeds.push([&written([0, 0])[..], &[kind, segment, 1, 40, 3, 1, 2]].concat());
        }
    }
    seeds
}

/// As `segment_seeds`; and an identity.
pub(super) fn object_seeds() -> Vec<Vec<u8>> {
    let mut seeds = vec![[&[3, 1][..], &identity_text()].concat()];
    for kind in 0..8 {
        seeds.push([&[0, 3, 10, 230, 0][..], &[kind, 1, 1, 40, 3]].concat());
        seeds.push(vec![2, kind, 1, 1, 40, 3]);
    }
    seeds
}
