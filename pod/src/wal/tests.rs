//! The log under faults: what its own files and threads must not get wrong.

use std::collections::BTreeMap;
use std::io::{Error, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use proptest::prelude::*;
use proptest::sample::Index;
use sluice_shared::fault::{Faults, Point};
use tempfile::TempDir;
use tokio::sync::oneshot;

use super::bounds::Bounds;
use super::disk::Disk;
use super::replay::{Cut, Scan};
use super::segment::BLOCK;
use super::*;

mod tail;

const SEGMENT_BYTES: u64 = 64 << 10;

fn config(dir: &Path) -> WalConfig {
    WalConfig {
        segment_bytes: SEGMENT_BYTES,
        bytes_max: 64 * SEGMENT_BYTES,
        group_bytes_max: 16 << 10,
        ..WalConfig::new(dir.to_owned(), "pod-1".parse().expect("valid"))
    }
}

fn no_failure() -> Box<dyn Fn(&WalError) + Send + Sync> {
    Box::new(|error| panic!("the log failed: {error}"))
}

fn open(config: WalConfig) -> Result<(Wal, Vec<Bytes>), WalError> {
    let (wal, replay) = Wal::open(config, no_failure())?;
    let entries = replay.map(|entry| entry.map(|(_, payload)| payload)).collect::<Result<_, _>>()?;
    Ok((wal, entries))
}

fn open_with_faults(
    config: WalConfig,
    faults: impl Fn(Point, WalPosition) -> std::io::Result<()> + Send + Sync + 'static,
    on_failure: Box<dyn Fn(&WalError) + Send + Sync>,
) -> Wal {
    let mut disk = Disk::open(&config.dir, config.direct_io).expect("opens");
    disk.faults = Faults::planned(faults);
    Wal::open_on(disk, config, on_failure).expect("opens").0
}

/// Appends without waiting for anything but the slot.
async fn append(wal: &Wal, payload: Bytes) -> oneshot::Receiver<Durable> {
    let (told, durable) = oneshot::channel();
    let slot = wal.slot().await;
    let then = Box::new(move |durable| drop(told.send(durable)));
    wal.append(slot, vec![payload], then).expect("fits");
    durable
}

async fn put(wal: &Wal, payload: Bytes) -> Durable {
    append(wal, payload).await.await.expect("becomes durable")
}

fn read(durable: &Durable) -> Result<Bytes, WalError> {
    let Kept::OnDisk(shared) = &durable.kept else { panic!("it is on a disk") };
    Wal::read_of(shared, durable)
}

fn payload(n: usize, bytes: usize) -> Bytes {
    let mut payload = format!("entry {n} ").into_bytes();
    payload.resize(bytes.max(payload.len()), u8::try_from(n % 251).expect("small"));
    payload.into()
}

/// A log of one entry per group, closed. Returns the entries and where each stands.
async fn written(config: &WalConfig, count: usize, bytes: usize) -> (Vec<Bytes>, Vec<WalPosition>) {
    let (wal, _) = open(config.clone()).expect("opens");
    let (mut entries, mut positions) = (Vec::new(), Vec::new());
    for n in 0..count {
        let entry = payload(n, bytes);
        positions.push(put(&wal, entry.clone()).await.position());
        entries.push(entry);
    }
    wal.close().await;
    (entries, positions)
}

/// As after a `kill -9`, before which it was said of these groups alone that they are durable.
fn unmark(dir: &Path, durable: u64) {
    let disk = Disk::open(dir, false).expect("opens");
    disk.read_bounds().expect("readable").expect("whole");
    let unmark = |bounds: &mut Bounds| bounds.reached.as_mut().expect("a segment").durable = durable;
    disk.change_bounds(unmark).expect("writable");
}

/// What a start would warn of; None where it would be refused.
fn cut_of(dir: &Path) -> Option<Option<Cut>> {
    let disk = Disk::open(dir, false).expect("opens");
    let mut listing = disk.list().expect("readable");
    let identity = disk.read_identity().expect("readable").expect("there");
    let bounds = disk.read_bounds().expect("readable").expect("whole");
    listing.segments = listing.segments.split_off(&bounds.oldest.unwrap_or(0));
    let settled = Scan::new(&disk, &identity, &listing, bounds).settle(false);
    settled.ok().map(|settled| settled.cut)
}

fn segment_path(dir: &Path, number: u64) -> PathBuf {
    dir.join(format!("{number:020}.wal"))
}

fn change(path: &Path, change: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = std::fs::read(path).expect("readable");
    change(&mut bytes);
    std::fs::write(path, bytes).expect("writable");
}

fn flip(dir: &Path, position: WalPosition) {
    let at = usize::try_from(position.offset).expect("small");
    change(&segment_path(dir, position.segment), |bytes| bytes[at] ^= 0x10);
}

fn copy(from: &Path) -> TempDir {
    let to = TempDir::new().expect("temporary directory");
    for entry in std::fs::read_dir(from).expect("readable") {
        let entry = entry.expect("readable");
        std::fs::copy(entry.path(), to.path().join(entry.file_name())).expect("copied");
    }
    to
}

fn files(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let read = |entry: std::fs::DirEntry| {
        let name = entry.file_name().into_string().expect("text");
        (name, std::fs::read(entry.path()).expect("readable"))
    };
    let entries = std::fs::read_dir(dir).expect("readable").map(|entry| read(entry.expect("readable")));
    entries.filter(|(name, _)| name != "lock").collect()
}

/// Waits for what a thread of the log does in its own time.
fn eventually(what: &str, happened: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !happened() {
        assert!(Instant::now() < deadline, "{what} did not happen");
        std::thread::yield_now();
    }
}

/// The group's start, given that of its only entry.
fn group_of(position: WalPosition) -> WalPosition {
    WalPosition { offset: position.offset / BLOCK as u64 * BLOCK as u64, ..position }
}

#[tokio::test]
async fn entries_come_back_in_order_over_many_segments() {
    for direct_io in [true, false] {
        let dir = TempDir::new().expect("temporary directory");
        let config = WalConfig { direct_io, ..config(dir.path()) };
        let (wal, _) = open(config.clone()).expect("opens");
        let (log, mut entries) = (wal.log_id(), Vec::new());
        for n in 0..60 {
            let entry = payload(n, n * 331 % 9_000);
            let durable = put(&wal, entry.clone()).await;
            assert_eq!(read(&durable).expect("readable"), entry);
            assert_eq!(durable.payload_bytes(), entry.len() as u64);
            entries.push(entry);
        }
        assert!(wal.tail().segment > 3, "{wal:?}");
        wal.close().await;
        for epoch in 2..4 {
            let (wal, found) = open(config.clone()).expect("opens");
            assert_eq!((found, wal.epoch(), wal.log_id()), (entries.clone(), Epoch(epoch), log));
            assert_eq!(wal.status().outstanding, entries.len() as u64);
            let more = payload(1_000, 100);
            drop(put(&wal, more.clone()).await);
            entries.push(more);
            wal.close().await;
        }
    }
}

#[tokio::test]
async fn an_accepted_loss_is_accepted_once() {
    let dir = TempDir::new().expect("temporary directory");
    let (entries, positions) = written(&config(dir.path()), 30, 5_000).await;
    for damaged in [positions[4], positions[17]] {
        let copy = copy(dir.path());
        flip(copy.path(), damaged);
        assert!(open(config(copy.path())).is_err());
        let accept_loss = WalConfig { accept_loss: true, ..config(copy.path()) };
        let (wal, mut found) = open(accept_loss).expect("accepted");
        let kept = positions.iter().filter(|position| **position < damaged).count();
        assert_eq!(found, entries[..kept]);
        drop(put(&wal, payload(99, 10)).await);
        wal.close().await;
        found.push(payload(99, 10));
        let (wal, again) = open(config(copy.path())).expect("the loss is settled");
        assert_eq!(again, found);
        wal.close().await;
    }
}

#[tokio::test]
async fn a_crash_right_after_the_new_identity_brings_nothing_back() {
    let dir = TempDir::new().expect("temporary directory");
    let (entries, positions) = written(&config(dir.path()), 30, 5_000).await;
    flip(dir.path(), positions[4]);
    let crashed = copy(dir.path());
    let (wal, _) = open(WalConfig { accept_loss: true, ..config(dir.path()) }).expect("accepted");
    wal.close().await;
    // The identity is new, the segments behind the cut still stand there, whole.
    std::fs::copy(dir.path().join("identity"), crashed.path().join("identity")).expect("copied");
    assert!(segment_path(crashed.path(), positions[29].segment).exists());
    let (wal, found) = open(config(crashed.path())).expect("the end is settled");
    assert_eq!(found.len(), 4);
    assert!(found == entries[..4]);
    wal.close().await;
}

#[tokio::test]
async fn an_older_life_has_no_torn_tail() {
    let dir = TempDir::new().expect("temporary directory");
    let (_, positions) = written(&config(dir.path()), 4, 100).await;
    let (wal, _) = open(config(dir.path())).expect("opens");
    wal.close().await;
    flip(dir.path(), positions[3]);
    let error = open(config(dir.path())).map(|_| ()).expect_err("the end is settled");
    let WalError::Corrupt { position, .. } = error else { panic!("{error}") };
    assert_eq!(position, group_of(positions[3]));
    // Nor does it end with a segment that looks as if it had never been used.
    change(&segment_path(dir.path(), positions[3].segment), |bytes| bytes.fill(0));
    let error = open(config(dir.path())).map(|_| ()).expect_err("the end is settled");
    assert!(matches!(error, WalError::Corrupt { .. }), "{error}");
}

#[tokio::test]
async fn a_missing_segment_is_named() {
    let dir = TempDir::new().expect("temporary directory");
    let (_, positions) = written(&config(dir.path()), 40, 5_000).await;
    let last = positions[39].segment;
    for missing in 0..last {
        let holed = copy(dir.path());
        std::fs::remove_file(segment_path(holed.path(), missing)).expect("removed");
        let error = open(config(holed.path())).map(|_| ()).expect_err("a segment is missing");
        let WalError::Corrupt { segment, reason, .. } = &error else { panic!("{error}") };
        assert_eq!(*segment, segment_path(holed.path(), missing));
        assert!(reason.contains("missing"), "{error}");
    }
}

#[tokio::test]
async fn an_older_life_without_any_of_its_segments_is_missed() {
    let dir = TempDir::new().expect("temporary directory");
    written(&config(dir.path()), 2, 100).await;
    let (_, positions) = written(&config(dir.path()), 2, 100).await;
    let (wal, found) = open(config(dir.path())).expect("opens");
    assert_eq!(found.len(), 4);
    wal.close().await;
    let lost = segment_path(dir.path(), positions[0].segment);
    std::fs::remove_file(&lost).expect("removed");
    let error = open(config(dir.path())).map(|_| ()).expect_err("its end is known");
    let WalError::Corrupt { segment, reason, .. } = &error else { panic!("{error}") };
    assert!(*segment == lost && reason.contains("missing"), "{error}");
}

#[tokio::test]
async fn the_first_segment_may_only_be_missing_where_it_was_trimmed() {
    let dir = TempDir::new().expect("temporary directory");
    let (entries, positions) = written(&config(dir.path()), 40, 5_000).await;
    for released in [0, 1, 15, 39] {
        let trimmed = copy(dir.path());
        let (wal, replay) = Wal::open(config(trimmed.path()), no_failure()).expect("opens");
        let durables = replay.map(|entry| entry.expect("whole").0);
        let kept: Vec<Durable> = durables
            .enumerate()
            .filter_map(|(n, durable)| {
                if n < released {
                    durable.release();
                    None
                } else {
                    Some(durable)
                }
            })
            .collect();
        let oldest = positions[released].segment;
        eventually("the trim", || wal.trimmed().segment == oldest);
        drop(kept);
        wal.close().await;
        let holed = copy(trimmed.path());
        std::fs::remove_file(segment_path(holed.path(), oldest)).expect("removed");
        let error = open(config(holed.path())).map(|_| ()).expect_err("the first segment is missing");
        let WalError::Corrupt { segment, .. } = &error else { panic!("{error}") };
        assert_eq!(*segment, segment_path(holed.path(), oldest), "{error}");
        // The last step of a trim was not done: what it was to take away is not read again.
        if oldest > 0 {
            let gone = segment_path(dir.path(), oldest - 1);
            std::fs::copy(gone, segment_path(trimmed.path(), oldest - 1)).expect("copied");
        }
        let (wal, found) = open(config(trimmed.path())).expect("opens");
        assert_eq!(
            found,
            entries
                .iter()
                .zip(&positions)
                .filter(|(_, at)| at.segment >= oldest)
                .map(|(entry, _)| entry.clone())
                .collect::<Vec<_>>()
        );
        wal.close().await;
    }
}

#[tokio::test]
async fn logs_of_others_and_of_newer_programs_are_refused_untouched() {
    let dir = TempDir::new().expect("temporary directory");
    written(&config(dir.path()), 3, 100).await;
    let other = TempDir::new().expect("temporary directory");
    written(&config(other.path()), 3, 100).await;
    let check = |damage: &dyn Fn(&Path), owner: &str, expected: &str| {
        let copy = copy(dir.path());
        damage(copy.path());
        let before = files(copy.path());
        let owner = owner.parse().expect("valid");
        let error = open(WalConfig { owner, ..config(copy.path()) }).map(|_| ()).expect_err(expected);
        assert!(error.to_string().contains(expected), "{error}");
        assert_eq!(files(copy.path()), before, "{expected}");
    };
    check(&|_| (), "pod-2", "belongs to pod pod-1, not to pod pod-2");
    let foreign = |dir: &Path| {
        std::fs::copy(segment_path(other.path(), 0), segment_path(dir, 0)).expect("copied");
    };
    check(&foreign, "pod-1", "belongs to log");
    let newer = |dir: &Path| {
        change(&segment_path(dir, 0), |bytes| bytes[8..16].copy_from_slice(&[2, 0, 0, 0, 1, 2, 3, 4]))
    };
    check(&newer, "pod-1", "format version 2");
    let newer_identity = |dir: &Path| {
        let json = r#"{"format":9,"shape":"unknown"}"#;
        let text = format!("{json}\n{:08x}\n", crc32c::crc32c(json.as_bytes()));
        std::fs::write(dir.join("identity"), text).expect("written");
    };
    check(&newer_identity, "pod-1", "format version 9");
    check(
        &|dir| change(&dir.join("identity"), |bytes| bytes[20] ^= 1),
        "pod-1",
        "does not match its checksum",
    );
    check(&|dir| std::fs::remove_file(dir.join("identity")).expect("removed"), "pod-1", "it is missing");
}

#[tokio::test]
async fn a_second_opener_is_refused_by_name() {
    let dir = TempDir::new().expect("temporary directory");
    let (wal, _) = open(config(dir.path())).expect("opens");
    let error = open(config(dir.path())).map(|_| ()).expect_err("in use").to_string();
    assert!(error.contains(&format!("in use by process {}", std::process::id())), "{error}");
    wal.close().await;
    open(config(dir.path())).expect("free again").0.close().await;
}

#[tokio::test]
async fn at_the_limit_slots_wait_until_entries_are_released() {
    let dir = TempDir::new().expect("temporary directory");
    let (wal, _) = open(WalConfig { bytes_max: 3 * SEGMENT_BYTES, ..config(dir.path()) }).expect("opens");
    let (mut waiting, mut gate) = (Vec::new(), wal.entrance().0.subscribe());
    loop {
        tokio::select! {
            biased; // A full log gives no slot, so the gate must be seen first.
            _ = gate.wait_for(|gate| *gate == Gate::Full) => break,
            durable = append(&wal, payload(waiting.len(), 8_000)) => waiting.push(durable),
        }
    }
    assert!(wal.status().full);
    assert!(wal.status().bytes_used <= 3 * SEGMENT_BYTES);
    assert!(wal.slot().now_or_never().is_none());
    let count = waiting.len();
    for (n, durable) in waiting.into_iter().enumerate() {
        let durable = durable.await.expect("becomes durable in the end");
        assert_eq!(read(&durable).expect("readable"), payload(n, 8_000));
        durable.release();
    }
    put(&wal, payload(count, 10)).await.release();
    assert!(!wal.status().full);
    wal.close().await;
}

#[tokio::test]
async fn a_full_disk_makes_slots_wait_and_is_left_when_there_is_room() {
    let dir = TempDir::new().expect("temporary directory");
    let full = Arc::new(AtomicBool::new(true));
    let seen = Arc::clone(&full);
    let faults = move |point, _| match point {
        Point::WalCreate if seen.load(Ordering::SeqCst) => Err(Error::from(ErrorKind::StorageFull)),
        _ => Ok(()),
    };
    let wal = open_with_faults(config(dir.path()), faults, no_failure());
    let durable = append(&wal, payload(1, 100)).await;
    let mut gate = wal.entrance().0.subscribe();
    gate.wait_for(|gate| *gate == Gate::Full).await.expect("open");
    assert!(wal.status().full);
    assert!(wal.slot().now_or_never().is_none());
    full.store(false, Ordering::SeqCst);
    durable.await.expect("becomes durable").release();
    put(&wal, payload(2, 100)).await.release();
    assert!(!wal.status().full);
    wal.close().await;
}

#[tokio::test]
async fn a_failed_write_or_flush_is_the_end() {
    for (direct_io, fail_flush) in [(true, false), (false, false), (false, true)] {
        let dir = TempDir::new().expect("temporary directory");
        let config = WalConfig { direct_io, ..config(dir.path()) };
        let count = AtomicUsize::new(0);
        let at = if fail_flush { Point::WalFlushBefore } else { Point::WalWriteBefore };
        let faults = move |point, _| {
            let counts = point == at;
            // Only the fourth fails: a retry would succeed.
            let fails = counts && count.fetch_add(1, Ordering::SeqCst) == 3;
            if fails { Err(Error::from_raw_os_error(libc::EIO)) } else { Ok(()) }
        };
        let failures = Arc::new(Mutex::new(Vec::new()));
        let noted = Arc::clone(&failures);
        let on_failure = move |error: &WalError| noted.lock().expect("sound").push(error.to_string());
        let wal = open_with_faults(config.clone(), faults, Box::new(on_failure));
        for n in 0..3 {
            drop(put(&wal, payload(n, 100)).await);
        }
        let slot = wal.slot().await;
        assert!(append(&wal, payload(3, 100)).await.await.is_err(), "never told of");
        let (told, durable) = oneshot::channel();
        wal.append(slot, vec![payload(4, 100)], Box::new(move |durable| drop(told.send(durable))))
            .expect("dropped");
        assert!(durable.await.is_err(), "never told of");
        assert!(wal.slot().now_or_never().is_none());
        wal.close().await;
        let failures = failures.lock().expect("sound").clone();
        assert_eq!(failures.len(), 1, "{failures:?}");
        assert!(failures[0].contains("cannot write and flush"), "{failures:?}");
        let (wal, found) = open(config).expect("recovers");
        // The bytes of a failed flush may be there all the same.
        assert_eq!(found[..3], [payload(0, 100), payload(1, 100), payload(2, 100)]);
        assert!(found.len() <= 4);
        wal.close().await;
    }
}

#[tokio::test]
async fn what_a_start_finds_is_flushed_before_it_counts() {
    for direct_io in [true, false] {
        let dir = TempDir::new().expect("temporary directory");
        let config = WalConfig { direct_io, ..config(dir.path()) };
        let (entries, positions) = written(&config, 3, 100).await;
        let identity = std::fs::read(dir.path().join("identity")).expect("there");
        let reopened = |fails: bool| {
            let mut disk = Disk::open(&config.dir, config.direct_io).expect("opens");
            let flushed = Arc::new(Mutex::new(Vec::new()));
            let noted = Arc::clone(&flushed);
            let file = config.dir.join("identity");
            let before = identity.clone();
            disk.faults = Faults::planned(move |point, at| {
                if point != Point::WalFlushBefore || at.offset > 0 {
                    return Ok(());
                }
                assert_eq!(std::fs::read(&file).expect("there"), before, "the new life has begun already");
                noted.lock().expect("sound").push(at.segment);
                if fails { Err(Error::from_raw_os_error(libc::EIO)) } else { Ok(()) }
            });
            let opened = Wal::open_on(disk, config.clone(), no_failure());
            (opened, flushed.lock().expect("sound").clone())
        };
        let (failed, flushed) = reopened(true);
        assert!(failed.is_err() && flushed == [positions[0].segment], "{flushed:?}");
        let (opened, flushed) = reopened(false);
        assert_eq!(flushed, [positions[0].segment]);
        let (wal, replay) = opened.expect("opens");
        let found: Vec<Bytes> = replay.map(|entry| entry.expect("whole").1).collect();
        assert_eq!(found, entries);
        wal.close().await;
    }
}

#[tokio::test]
async fn a_panic_in_a_then_is_the_end_too() {
    let dir = TempDir::new().expect("temporary directory");
    let failures = Arc::new(AtomicUsize::new(0));
    let noted = Arc::clone(&failures);
    let on_failure = move |error: &WalError| {
        assert!(matches!(error, WalError::Panicked), "{error}");
        noted.fetch_add(1, Ordering::SeqCst);
    };
    let (wal, _) = Wal::open(config(dir.path()), Box::new(on_failure)).expect("opens");
    let slot = wal.slot().await;
    wal.append(slot, vec![payload(1, 10)], Box::new(|_| panic!("wanted by this test"))).expect("fits");
    let mut gate = wal.entrance().0.subscribe();
    gate.wait_for(|gate| *gate == Gate::Shut).await.expect("open");
    wal.close().await;
    assert_eq!(failures.load(Ordering::SeqCst), 1);
}

/// Holds back the writes of chosen groups.
#[derive(Default)]
struct Hold {
    held: Mutex<Vec<u64>>,
    changed: Condvar,
    written: Mutex<Vec<u64>>,
}

impl Hold {
    fn pass(&self, point: Point, position: WalPosition) -> std::io::Result<()> {
        if point == Point::WalWriteBefore {
            self.written.lock().expect("sound").push(position.offset);
            let held = self.held.lock().expect("sound");
            drop(self.changed.wait_while(held, |held| held.contains(&position.offset)).expect("sound"));
        }
        Ok(())
    }

    fn release(&self) {
        self.held.lock().expect("sound").clear();
        self.changed.notify_all();
    }
}

#[tokio::test]
async fn two_groups_are_on_their_way_and_told_of_in_order() {
    let dir = TempDir::new().expect("temporary directory");
    let hold = Arc::new(Hold::default());
    let passing = Arc::clone(&hold);
    let wal = open_with_faults(config(dir.path()), move |point, at| passing.pass(point, at), no_failure());
    drop(put(&wal, payload(0, 10)).await);
    hold.held.lock().expect("sound").push(2 * BLOCK as u64);
    let mut first = append(&wal, payload(1, 10)).await;
    eventually("the first write", || hold.written.lock().expect("sound").len() == 2);
    let mut second = append(&wal, payload(2, 10)).await;
    let landed = segment_path(dir.path(), 0);
    let is_there = || std::fs::read(&landed).expect("readable")[3 * BLOCK] == b'S';
    eventually("the second group", is_there);
    assert!(first.try_recv().is_err() && second.try_recv().is_err(), "a hole is before the second group");
    eventually("the segment made ahead", || segment_path(dir.path(), 1).exists());
    // A crash now: what was never told of is cut, though its own bytes are whole.
    let (crashed, found) = open(config(copy(dir.path()).path())).expect("a torn tail is no error");
    assert_eq!(found, [payload(0, 10)]);
    crashed.close().await;
    hold.release();
    let (first, second) = (first.await.expect("durable"), second.await.expect("durable"));
    assert!(first.position() < second.position());
    wal.close().await;
}

#[tokio::test]
async fn what_waits_is_written_as_one_group_up_to_the_limit() {
    let dir = TempDir::new().expect("temporary directory");
    let hold = Arc::new(Hold::default());
    let passing = Arc::clone(&hold);
    hold.held.lock().expect("sound").extend([0, 2 * BLOCK as u64]);
    let wal = open_with_faults(config(dir.path()), move |point, at| passing.pass(point, at), no_failure());
    let mut waiting = Vec::new();
    for n in 0..2 {
        waiting.push(append(&wal, payload(n, 10)).await);
        eventually("a group on its way", || hold.written.lock().expect("sound").len() == n + 1);
    }
    for n in 2..10 {
        waiting.push(append(&wal, payload(n, 3_000)).await);
    }
    assert!(wal.slot().now_or_never().is_none(), "all slots are waiting entries");
    hold.release();
    let mut groups = BTreeMap::new();
    for durable in waiting.drain(..) {
        let durable = durable.await.expect("durable");
        let header = 88;
        let starts_group = durable.position().offset % BLOCK as u64 == header;
        let group = groups.len() as u64 - u64::from(!starts_group);
        *groups.entry(group).or_insert(0) += 1;
        durable.release();
    }
    // 16 KiB of group take five entries of 3,008 bytes.
    assert_eq!(groups.into_values().collect::<Vec<_>>(), [1, 1, 5, 3]);
    wal.close().await;
}

#[tokio::test]
async fn segments_are_recycled_in_order_once_released() {
    let dir = TempDir::new().expect("temporary directory");
    let made = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&made);
    let faults = move |point, _| {
        counted.fetch_add(usize::from(point == Point::WalCreate), Ordering::SeqCst);
        Ok(())
    };
    let wal = open_with_faults(config(dir.path()), faults, no_failure());
    assert_eq!(wal.untouched(), WalPosition { segment: 0, offset: 0 });
    let oldest = put(&wal, payload(0, 100)).await;
    assert_eq!(wal.untouched(), WalPosition { segment: 1, offset: 0 });
    let mut held = Vec::new();
    while wal.tail().segment < 4 {
        held.push(put(&wal, payload(1, 8_000)).await);
    }
    held.into_iter().for_each(Durable::release);
    assert_eq!(wal.trimmed(), WalPosition { segment: 0, offset: 0 }, "the oldest entry is still needed");
    assert_eq!(read(&oldest).expect("kept"), payload(0, 100));
    oldest.release();
    eventually("trimming", || wal.trimmed().segment == wal.tail().segment);
    while wal.tail().segment < 60 {
        put(&wal, payload(2, 8_000)).await.release();
    }
    // A new file is made only while none is spare: some more than were in use at once.
    let made = made.load(Ordering::SeqCst);
    assert!(made <= 16, "{made} files made for 60 segments");
    eventually("trimming", || wal.trimmed().segment == wal.tail().segment);
    assert_eq!(wal.status().outstanding, 0);
    wal.close().await;
    let (wal, found) = open(config(dir.path())).expect("opens");
    assert!(found.len() < 9, "only the last segment is left: {}", found.len());
    wal.close().await;
}

#[tokio::test]
async fn a_log_that_holds_nothing_when_it_is_closed_brings_nothing_back() {
    let dir = TempDir::new().expect("temporary directory");
    let config = config(dir.path());
    for kept in [false, true, false] {
        let (wal, entries) = open(config.clone()).expect("opens");
        assert_eq!(entries.len(), 0, "of the life before");
        for n in 0..20 {
            put(&wal, payload(n, 10_000)).await.release();
        }
        let last = put(&wal, payload(20, 100)).await;
        if kept {
            drop(last);
            wal.close().await;
            let (wal, entries) = open(config.clone()).expect("opens");
            assert_eq!(entries.last(), Some(&payload(20, 100)), "what is not released is kept");
            drop(wal);
            break;
        }
        last.release();
        wal.close().await;
    }
}

#[tokio::test]
async fn replayed_entries_are_kept_until_released() {
    let dir = TempDir::new().expect("temporary directory");
    let (entries, _) = written(&config(dir.path()), 30, 5_000).await;
    let (wal, replay) = Wal::open(config(dir.path()), no_failure()).expect("opens");
    assert_eq!(wal.status().outstanding, 30, "what replay has not given is outstanding");
    let durables: Vec<Durable> = replay.map(|entry| entry.expect("whole").0).collect();
    let WalStatus { outstanding, entry_bytes, .. } = wal.status();
    assert_eq!((outstanding, entry_bytes), (30, 30 * 5_000), "no segment's size, nor what lies between them");
    drop(durables);
    wal.close().await;
    let (wal, replay) = Wal::open(config(dir.path()), no_failure()).expect("opens");
    for (entry, expected) in replay.zip(&entries) {
        let (durable, payload) = entry.expect("whole");
        assert_eq!((&payload, &read(&durable).expect("readable")), (expected, expected));
        durable.release();
    }
    eventually("trimming", || wal.trimmed().segment == wal.tail().segment);
    assert_eq!(wal.trimmed(), wal.untouched(), "all that the log had is gone");
    assert_eq!(wal.status().entry_bytes, 0);
    wal.close().await;
    let (wal, found) = open(config(dir.path())).expect("opens");
    assert!(found.is_empty());
    wal.close().await;
}

#[tokio::test]
async fn entries_larger_than_a_group_fit_and_larger_than_a_segment_are_refused_by_name() {
    let dir = TempDir::new().expect("temporary directory");
    let (wal, _) = open(config(dir.path())).expect("opens");
    let largest = usize::try_from(wal.payload_bytes_max()).expect("small");
    for n in 0..3 {
        let durable = put(&wal, payload(n, largest)).await;
        assert_eq!(read(&durable).expect("readable"), payload(n, largest));
        durable.release();
    }
    let slot = wal.slot().await;
    let refused = wal.append(slot, vec![payload(4, largest + 1)], Box::new(|_| panic!("never durable")));
    let error = refused.expect_err("too large").to_string();
    assert!(error.contains(&format!("an entry of {} bytes", largest + 1)), "{error}");
    wal.close().await;
}

#[tokio::test]
async fn a_damaged_entry_is_named_when_read_back() {
    let dir = TempDir::new().expect("temporary directory");
    let (wal, _) = open(WalConfig { direct_io: false, ..config(dir.path()) }).expect("opens");
    let durable = put(&wal, payload(1, 100)).await;
    let position = durable.position();
    flip(dir.path(), WalPosition { offset: position.offset + 20, ..position });
    let error = read(&durable).expect_err("damaged");
    assert!(matches!(error, WalError::Corrupt { position: at, .. } if at == position), "{error}");
    wal.close().await;
}

#[test]
fn sizes_that_make_no_log_are_refused_by_name() {
    let good = config(Path::new("/nowhere"));
    for (bad, expected) in [
        (WalConfig { segment_bytes: 5_000, ..good.clone() }, "segment_bytes is 5000"),
        (WalConfig { segment_bytes: 2 << 30, ..good.clone() }, "segment_bytes is 2147483648"),
        (WalConfig { bytes_max: SEGMENT_BYTES, ..good.clone() }, "set it to at least 131072"),
        (WalConfig { group_bytes_max: 10, ..good.clone() }, "group_bytes_max is 10"),
    ] {
        let error = open(bad).map(|_| ()).expect_err(expected).to_string();
        assert!(error.contains(expected), "{error}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// A flipped bit anywhere: the log is refused, or nothing is missing; after a kill but the unproven last group.
    #[test]
    fn no_flipped_bit_loses_an_entry_silently(
        sizes in prop::collection::vec(0_usize..20_000, 1..14), segment in any::<Index>(), at in any::<Index>(),
        bit in 0..8, is_killed in any::<bool>(),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
        runtime.block_on(async {
            let dir = TempDir::new().expect("temporary directory");
            let (wal, _) = open(config(dir.path())).expect("opens");
            let mut entries = Vec::new();
            for (n, bytes) in sizes.iter().enumerate() {
                entries.push(payload(n, *bytes));
                drop(put(&wal, payload(n, *bytes)).await);
            }
            let used = wal.tail();
            wal.close().await;
            if is_killed {
                unmark(dir.path(), 0);
            }
            let number = segment.index(usize::try_from(used.segment).expect("small") + 1) as u64;
            let end = if number == used.segment { used.offset } else { SEGMENT_BYTES };
            let at = at.index(usize::try_from(end).expect("small"));
            change(&segment_path(dir.path(), number), |bytes| bytes[at] ^= 1_u8 << bit);
            let cut = cut_of(dir.path());
            match open(config(dir.path())) {
                Err(WalError::Corrupt { position, .. }) => {
                    assert!(position <= WalPosition { segment: number, offset: at as u64 }, "{position}");
                }
                Err(error) => panic!("{error}"),
                Ok((wal, found)) => {
                    let missing = entries.len() - found.len();
                    assert!(missing <= usize::from(is_killed), "{} of {}", found.len(), entries.len());
                    assert_eq!(missing > 0, cut.is_some_and(|cut| cut.is_some()), "not a word");
                    assert_eq!(found, entries[..found.len()]);
                    wal.close().await;
                }
            }
        });
    }
}
