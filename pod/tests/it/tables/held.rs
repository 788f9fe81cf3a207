//! Runs that wait for what comes before them.

use std::sync::Arc;

use sluice_pod::stream::progress::StreamProgress;
use tempfile::TempDir;

use super::{DEADLINE, Pod, batch, name, numbers, run, stream};

#[tokio::test(flavor = "multi_thread")]
async fn a_held_run_waits_for_another_pod() {
    let root = TempDir::new().expect("a directory");
    let pods = [Pod::new(root.path()), Pod::new(root.path())];
    let (early, late) = (pods[0].create(numbers(), &[]).await, pods[1].create(numbers(), &[]).await);
    let (s, progress) = (stream("s"), Arc::new(StreamProgress::default()));
    late.follow(&s, progress.clone());
    pods[1].offer(&late, batch(&late, vec![run(&s, 1, 10, 20), run(&stream("other"), 1, 0, 3)])).await;
    pods[1].drain().await;
    assert_eq!(pods[1].tables.describe(&name()).await.expect("described")["held_runs"], 1);
    assert_eq!(late.watermark(&stream("other")).await.expect("read").next, 3, "a held run holds no other");
    pods[0].offer(&early, batch(&early, vec![run(&s, 1, 0, 10)])).await;
    while progress.take().committed_next < 20 {
        tokio::time::timeout(DEADLINE, progress.changed()).await.expect("committed");
    }
    assert_eq!(pods[0].reader().check_prefixes()[s.as_str()], 20);
    for pod in pods {
        pod.stop().await;
    }
}

/// After a handoff all that waited is eligible at once: it may be all that the log holds.
#[tokio::test(flavor = "multi_thread")]
async fn what_becomes_eligible_at_once_is_not_taken_into_memory_at_once() {
    const FILE_BYTES: u64 = 2_000;
    let root = TempDir::new().expect("a directory");
    let pods = [
        Pod::new(root.path()),
        Pod::with(root.path(), |config| (config.target_file_bytes, config.memory_bytes) = (FILE_BYTES, 0)),
    ];
    let (early, late) = (pods[0].create(numbers(), &[]).await, pods[1].create(numbers(), &[]).await);
    let (s, progress) = (stream("s"), Arc::new(StreamProgress::default()));
    late.follow(&s, progress.clone());
    for round in 0..100 {
        let start = 10 + round * 100;
        pods[1].offer(&late, batch(&late, vec![run(&s, 1, start, start + 100)])).await;
    }
    pods[1].drain().await;
    assert_eq!(pods[1].tables.describe(&name()).await.expect("described")["held_runs"], 100);
    pods[0].offer(&early, batch(&early, vec![run(&s, 1, 0, 10)])).await;
    while progress.take().committed_next < 10_010 {
        tokio::time::timeout(DEADLINE, progress.changed()).await.expect("committed");
    }
    let reader = pods[0].reader();
    assert_eq!(reader.check_prefixes()[s.as_str()], 10_010);
    // A hundred rows are 800 bytes and more, and so many files are encoded at one time.
    let files = std::thread::available_parallelism().map_or(1, usize::from).min(8);
    let most = files * (FILE_BYTES as usize / 800 + 1) * 100;
    for version in 0..=reader.version() {
        let rows: usize =
            reader.adds(version).iter().flat_map(|add| reader.rows(add)).map(|rows| rows.num_rows()).sum();
        assert!(rows <= most, "version {version} took {rows} rows at once, of {most} at most");
    }
    for pod in pods {
        pod.stop().await;
    }
}
