//! The end of a log's newest life, torn or damaged.
//!
//! *Owns*: what of it a start refuses, what it only warns of, and that no crash is taken for damage.
//! *Does not own*: the other faults (`tests.rs`).

use std::collections::BTreeSet;

use super::*;

/// What happens to a log's files.
type Damage<'a> = &'a dyn Fn(&Path);

fn refused(dir: &Path) -> (PathBuf, WalPosition, String) {
    let before = files(dir);
    let error = open(config(dir)).map(|_| ()).expect_err("damaged");
    assert_eq!(files(dir), before, "a refused start changes nothing");
    match error {
        WalError::Corrupt { segment, position, reason } => (segment, position, reason),
        error => panic!("{error}"),
    }
}

/// It is refused, and with the loss accepted this much is left, which the next start finds again.
async fn check_refused(written: &Path, damage: Damage<'_>, left: &[Bytes], named: &str) {
    for is_killed in [false, true] {
        let damaged = copy(written);
        if is_killed {
            unmark(damaged.path(), 0);
        }
        damage(damaged.path());
        let (segment, position, reason) = refused(damaged.path());
        let said = format!("{} at {position}: {reason}", segment.display());
        assert!(said.contains(named), "{named}, killed {is_killed}: {said}");
        let accepting = WalConfig { accept_loss: true, ..config(damaged.path()) };
        let (wal, found) = open(accepting).expect("accepted");
        assert!(found == left, "{named}: {} of {} left: {said}", found.len(), left.len());
        wal.close().await;
        let (wal, again) = open(config(damaged.path())).expect("the loss is settled");
        assert!(again == left);
        wal.close().await;
    }
}

fn before(segment: u64, entries: &[Bytes], positions: &[WalPosition]) -> Vec<Bytes> {
    let kept = positions.iter().filter(|position| position.segment < segment).count();
    entries[..kept].to_vec()
}

#[tokio::test]
async fn a_torn_tail_is_cut_at_the_last_whole_group() {
    let dir = TempDir::new().expect("temporary directory");
    let (entries, positions) = written(&config(dir.path()), 5, 5_000).await;
    unmark(dir.path(), 2);
    let start = group_of(positions[3]).offset;
    let end = group_of(positions[4]).offset + 2 * BLOCK as u64;
    for cut in (start..end).step_by(512).map(|cut| usize::try_from(cut).expect("small")) {
        for is_zeroed in [true, false] {
            let torn = copy(dir.path());
            change(&segment_path(torn.path(), 0), |bytes| match is_zeroed {
                true => bytes[cut..].fill(0),
                false => bytes[cut..].iter_mut().enumerate().for_each(|(at, byte)| *byte = (at * 7) as u8),
            });
            let filled = |position: &WalPosition| position.offset as usize + 8 + 5_000;
            let whole = positions.iter().filter(|position| filled(position) <= cut).count();
            // A group of which nothing is there was never begun, as far as one can see.
            let is_begun = whole < 5 && group_of(positions[whole]).offset < cut as u64;
            let warned = cut_of(torn.path()).expect("a torn tail is no error");
            let at = warned.map(|warned| warned.position);
            assert_eq!(at, is_begun.then(|| group_of(positions[whole])), "cut at {cut}");
            let (wal, mut found) = open(config(torn.path())).expect("a torn tail is no error");
            assert!(found == entries[..whole], "cut at {cut}: {} of {whole}", found.len());
            let more = payload(77, 50);
            drop(put(&wal, more.clone()).await);
            wal.close().await;
            found.push(more);
            let (wal, again) = open(config(torn.path())).expect("goes on");
            assert_eq!(again, found);
            wal.close().await;
        }
    }
}

#[tokio::test]
async fn a_flipped_bit_is_an_error_by_name_but_in_the_last_group_after_a_kill() {
    let dir = TempDir::new().expect("temporary directory");
    let (entries, positions) = written(&config(dir.path()), 30, 5_000).await;
    let last = positions.len() - 1;
    assert!(positions[last].segment > 1);
    let cases = positions.iter().enumerate().chain([(last + 1, &positions[last])]);
    for (index, position) in cases {
        let damaged = copy(dir.path());
        if index == last {
            unmark(damaged.path(), last as u64);
        }
        flip(damaged.path(), WalPosition { offset: position.offset + 100, ..*position });
        let before = files(damaged.path());
        let opened = open(config(damaged.path()));
        if index == last {
            let (wal, found) = opened.expect("a torn tail is no error");
            assert_eq!(found, entries[..last]);
            wal.close().await;
            continue;
        }
        let error = opened.map(|_| ()).expect_err("durable entries are damaged");
        let WalError::Corrupt { segment, position: at, .. } = &error else { panic!("{error}") };
        assert_eq!(*segment, segment_path(damaged.path(), position.segment), "{error}");
        assert_eq!(*at, group_of(*position), "{error}");
        assert!(error.to_string().contains(&format!("byte {}", at.offset)), "{error}");
        assert_eq!(files(damaged.path()), before, "a refused start changes nothing");
    }
}

#[tokio::test]
async fn the_newest_lifes_segments_are_missed_whichever_are_gone() {
    let dir = TempDir::new().expect("temporary directory");
    let (entries, positions) = written(&config(dir.path()), 60, 5_000).await;
    let last = positions[59].segment;
    let ahead = last + 1;
    assert!(last > 2 && segment_path(dir.path(), ahead).exists());
    for first in 1..=ahead {
        let gone = |dir: &Path| {
            (first..=ahead).for_each(|n| std::fs::remove_file(segment_path(dir, n)).expect("removed"))
        };
        let named = format!("{first:020}.wal at {first}:0: the file is missing");
        check_refused(dir.path(), &gone, &before(first, &entries, &positions), &named).await;
    }
    let all_but_first =
        |dir: &Path| (1..=ahead).for_each(|n| std::fs::remove_file(segment_path(dir, n)).expect("removed"));
    let named = format!("and so are those behind it through segment {ahead}");
    check_refused(dir.path(), &all_but_first, &before(1, &entries, &positions), &named).await;
}

#[tokio::test]
async fn a_segment_that_lost_its_header_or_its_length_is_damaged_and_not_torn() {
    let dir = TempDir::new().expect("temporary directory");
    let (entries, positions) = written(&config(dir.path()), 60, 5_000).await;
    let last = positions[59].segment;
    for number in 0..=last {
        let changed = |bytes: fn(&mut Vec<u8>)| move |dir: &Path| change(&segment_path(dir, number), bytes);
        let damages: [(Damage<'_>, &str); 3] = [
            (&changed(|bytes| bytes.clear()), "the header is cut short"),
            (&changed(|bytes| bytes.fill(0)), "the header does not start with SLUICEWS"),
            (&changed(|bytes| bytes[40] ^= 1), "the header does not match its checksum"),
        ];
        for (damage, named) in damages {
            check_refused(dir.path(), damage, &before(number, &entries, &positions), named).await;
        }
        let half = SEGMENT_BYTES / 2;
        let whole = |at: &&WalPosition| {
            at.segment < number || (at.segment == number && group_of(**at).offset + 2 * BLOCK as u64 <= half)
        };
        let kept = positions.iter().filter(whole).count();
        let half_gone = changed(|bytes| bytes.truncate(bytes.len() / 2));
        let named = if number < last { "" } else { "the file has 32768 of its 65536 bytes" };
        check_refused(dir.path(), &half_gone, &entries[..kept], named).await;
    }
    // Nothing is lost with a part of one that was not begun.
    let ahead = copy(dir.path());
    change(&segment_path(ahead.path(), last + 1), |bytes| bytes.truncate(2 * BLOCK));
    assert!(open(config(ahead.path())).expect("all is there").1 == entries);
}

/// Parts of an older copy of the log put in the place of the newer ones.
#[tokio::test]
async fn old_copies_of_segments_or_of_the_identity_are_refused() {
    let dir = TempDir::new().expect("temporary directory");
    let (mut entries, _) = written(&config(dir.path()), 5, 5_000).await;
    let old = copy(dir.path());
    let (wal, found) = open(config(dir.path())).expect("opens");
    assert!(found == entries);
    let mut positions = Vec::new();
    for n in 0..40 {
        let entry = payload(100 + n, 5_000);
        positions.push(put(&wal, entry.clone()).await.position());
        entries.push(entry);
    }
    wal.close().await;
    let both = |number: &u64| segment_path(old.path(), *number).exists();
    let reverted: Vec<u64> = positions
        .iter()
        .map(|position| position.segment)
        .filter(both)
        .collect::<BTreeSet<_>>()
        .into_iter()
        .collect();
    assert!(!reverted.is_empty(), "the first life made a segment ahead whose number the second one took");
    for number in reverted {
        let from = segment_path(old.path(), number);
        let whole = |dir: &Path| std::fs::copy(&from, segment_path(dir, number)).map(|_| ()).expect("copied");
        let header = |dir: &Path| {
            let block = std::fs::read(&from).expect("there");
            change(&segment_path(dir, number), |bytes| bytes[..BLOCK].copy_from_slice(&block[..BLOCK]));
        };
        let kept = 5 + positions.iter().filter(|position| position.segment < number).count();
        for damage in [&whole as Damage<'_>, &header] {
            check_refused(dir.path(), damage, &entries[..kept], "it is an old copy").await;
        }
    }
    let damaged = copy(dir.path());
    std::fs::copy(old.path().join("identity"), damaged.path().join("identity")).expect("copied");
    let error = open(config(damaged.path())).map(|_| ()).expect_err("an old copy");
    assert!(error.to_string().contains("it is an old copy"), "{error}");
    // Only what the newer life has told is newer.
    let damaged = copy(old.path());
    std::fs::copy(dir.path().join("oldest"), damaged.path().join("oldest")).expect("copied");
    let error = open(config(damaged.path())).map(|_| ()).expect_err("an old copy");
    assert!(error.to_string().contains("oldest is of epoch 2: it is an old copy"), "{error}");
}

/// Also where the process ends right behind the first thing that it has said.
#[tokio::test]
async fn a_file_that_was_cut_is_whole_once_it_is_written() {
    let dir = TempDir::new().expect("temporary directory");
    written(&config(dir.path()), 5, 5_000).await;
    for length in (0..1024).step_by(64) {
        let damaged = copy(dir.path());
        let oldest = damaged.path().join("oldest");
        change(&oldest, |bytes| bytes.truncate(length));
        let disk = Disk::open(damaged.path(), false).expect("opens");
        // Whatever it says: the loss is accepted.
        let _ = disk.read_bounds().expect("readable");
        disk.change_bounds(|bounds| bounds.oldest = Some(0)).expect("writable");
        let (newest, is_damaged) =
            super::super::bounds::Slot::newest(&std::fs::read(&oldest).expect("there"));
        assert_eq!((newest.expect("a slot").bounds.oldest, is_damaged), (Some(0), false), "cut to {length}");
    }
}

#[tokio::test]
async fn what_was_said_to_be_durable_is_missed_though_nothing_of_it_is_left() {
    let dir = TempDir::new().expect("temporary directory");
    let (entries, positions) = written(&config(dir.path()), 5, 5_000).await;
    let from = usize::try_from(group_of(positions[2]).offset).expect("small");
    let zeroed = |dir: &Path| change(&segment_path(dir, 0), |bytes| bytes[from..].fill(0));
    for durable in 0..=5 {
        let damaged = copy(dir.path());
        unmark(damaged.path(), durable);
        zeroed(damaged.path());
        if durable > 2 {
            let (_, position, reason) = refused(damaged.path());
            assert_eq!(position, group_of(positions[2]));
            assert!(reason.contains(&format!("oldest says that all through group {durable}")), "{reason}");
        } else {
            // Nobody knows of them.
            assert_eq!(cut_of(damaged.path()), Some(None));
            assert_eq!(open(config(damaged.path())).expect("opens").1, entries[..2]);
        }
    }
    let (_, _, reason) = {
        zeroed(dir.path());
        refused(dir.path())
    };
    assert!(reason.contains("all through group 5 were durable"), "after a clean stop: {reason}");
}

#[tokio::test]
async fn how_far_a_log_is_durable_is_said_while_it_runs() {
    let dir = TempDir::new().expect("temporary directory");
    let (wal, _) = open(config(dir.path())).expect("opens");
    for n in 0..3 {
        drop(put(&wal, payload(n, 100)).await);
    }
    eventually("a mark of all groups", || {
        let file = std::fs::read(dir.path().join("oldest")).expect("there");
        let bounds = super::super::bounds::Slot::newest(&file).0.expect("whole").bounds;
        bounds.reached.is_some_and(|reached| reached.durable == 3)
    });
    wal.close().await;
}

#[tokio::test]
async fn without_the_file_that_says_which_segments_have_to_be_there_nothing_starts() {
    let dir = TempDir::new().expect("temporary directory");
    let (entries, positions) = written(&config(dir.path()), 30, 5_000).await;
    let file = |dir: &Path| dir.join("oldest");
    let gone = |dir: &Path| std::fs::remove_file(file(dir)).expect("removed");
    let emptied = |dir: &Path| change(&file(dir), |bytes| bytes.fill(0));
    let flipped = |dir: &Path| change(&file(dir), |bytes| bytes[3] ^= 1);
    for (damage, named) in
        [(&gone as Damage<'_>, "it is missing"), (&emptied, "it is empty"), (&flipped, "its checksum")]
    {
        check_refused(dir.path(), damage, &entries, named).await;
    }
    let first_too = |dir: &Path| {
        gone(dir);
        std::fs::remove_file(segment_path(dir, 0)).expect("removed");
    };
    let kept = positions.iter().filter(|position| position.segment == 0).count();
    check_refused(dir.path(), &first_too, &entries[kept..], "it is missing").await;
}

#[tokio::test]
async fn a_log_of_an_older_program_opens_and_is_watched_from_then_on() {
    let dir = TempDir::new().expect("temporary directory");
    let (entries, _) = written(&config(dir.path()), 30, 5_000).await;
    let older = |dir: &Path| {
        let text = std::fs::read_to_string(dir.join("identity")).expect("text");
        let json = text.lines().next().expect("a line").replace(r#","bounded":true"#, "");
        let text = format!("{json}\n{:08x}\n", crc32c::crc32c(json.as_bytes()));
        std::fs::write(dir.join("identity"), text).expect("written");
    };
    let short_slots = |dir: &Path| {
        change(&dir.join("oldest"), |bytes| bytes.chunks_mut(512).for_each(|slot| slot[20..].fill(0)))
    };
    let gone = |dir: &Path| std::fs::remove_file(dir.join("oldest")).expect("removed");
    let flipped = |dir: &Path| change(&dir.join("oldest"), |bytes| bytes[3] ^= 1);
    for left in [&short_slots as Damage<'_>, &gone, &flipped] {
        let log = copy(dir.path());
        older(log.path());
        left(log.path());
        let (wal, found) = open(config(log.path())).expect("opens");
        assert!(found == entries);
        wal.close().await;
        gone(log.path());
        refused(log.path());
    }
}

/// Copies a log's directory before each of its marks: names change on the same thread alone, and groups wait meanwhile.
#[derive(Default)]
struct Crashes {
    writing: Mutex<usize>,
    written: Condvar,
    /// What was durable and is still needed.
    kept: Mutex<Vec<Bytes>>,
    /// That, and the directory.
    copies: Mutex<Vec<(Vec<Bytes>, TempDir)>>,
}

impl Crashes {
    fn pass(&self, point: Point, dir: &Path) {
        let mut writing = self.writing.lock().expect("sound");
        match point {
            Point::WalWriteBefore => *writing += 1,
            Point::WalFlushAfter => {
                *writing -= 1;
                self.written.notify_all();
            }
            Point::WalMark => {
                let still = self.written.wait_while(writing, |writing| *writing > 0).expect("sound");
                let kept = self.kept.lock().expect("sound").clone();
                self.copies.lock().expect("sound").push((kept, copy(dir)));
                drop(still);
            }
            _ => {}
        }
    }
}

#[tokio::test]
async fn no_crash_is_taken_for_damage_and_none_that_left_nothing_torn_is_warned_of() {
    let dir = TempDir::new().expect("temporary directory");
    let crashes = Arc::new(Crashes::default());
    for life in 0..3 {
        let (passing, path) = (Arc::clone(&crashes), dir.path().to_owned());
        let faults = move |point, _| {
            passing.pass(point, &path);
            Ok(())
        };
        let mut disk = Disk::open(dir.path(), true).expect("opens");
        disk.faults = Faults::planned(faults);
        let (wal, replay) = Wal::open_on(disk, config(dir.path()), no_failure()).expect("opens");
        let mut held: Vec<(Durable, Bytes)> = replay.map(|entry| entry.expect("whole")).collect();
        for n in 0..40 {
            let entry = payload(life * 100 + n, 9_000);
            let durable = put(&wal, entry.clone()).await;
            crashes.kept.lock().expect("sound").push(entry.clone());
            held.push((durable, entry));
            if n % 3 > 0 {
                crashes.kept.lock().expect("sound").remove(0);
                held.remove(0).0.release();
            }
        }
        wal.close().await;
    }
    let crashes = std::mem::take(&mut *crashes.copies.lock().expect("sound"));
    assert!(crashes.len() > 40, "{} crashes", crashes.len());
    for (number, (kept, crashed)) in crashes.iter().enumerate() {
        if crashed.path().join("identity").exists() {
            assert_eq!(cut_of(crashed.path()), Some(None), "crash {number}");
        }
        let (wal, found) = open(config(crashed.path())).expect("no damage");
        let start = found.iter().position(|entry| Some(entry) == kept.first()).unwrap_or(0);
        assert!(
            found[start..].starts_with(kept),
            "crash {number}: {} found, {} kept",
            found.len(),
            kept.len()
        );
        drop(put(&wal, payload(7, 10)).await);
        wal.close().await;
        assert_eq!(open(config(crashed.path())).expect("goes on").1.len(), found.len() + 1);
    }
}
