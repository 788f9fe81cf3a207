//! Logs in the tables' store, whose pods are gone: pods of this process over one root take them over.

use bytes::Bytes;
use sluice_pod::adopt::{Adopter, Adoptions};
use sluice_pod::wal::{LogStore, ObjectLogConfig, SealedLog};
use sluice_shared::ids::{LogId, PodId};
use sluice_shared::membership::Membership;
use sluice_shared::pool::{PodView, PoolView};

use super::*;

fn id(name: &str) -> PodId {
    name.parse().expect("valid")
}

fn logs(root: &Path) -> LogStore {
    kept(root).logs()
}

/// The log of a pod that dies: what is written to it never gets to a table.
pub(super) async fn begin(root: &Path, owner: &str) -> Wal {
    let config = ObjectLogConfig {
        owner: id(owner),
        interval: Duration::from_millis(1),
        group_bytes_max: 1 << 20,
        payload_bytes_max: 1 << 20,
        bytes_max: 64 << 20,
    };
    Wal::begin(&logs(root), config, Box::new(|_| {})).await.expect("begun")
}

pub(super) async fn write(wal: &Wal, batch: Batch) {
    let (answer, durable) = tokio::sync::oneshot::channel();
    let then = Box::new(move |durable| drop(answer.send(durable)));
    wal.append(wal.slot().await, batch.encode().expect("encodes"), then).expect("small");
    drop(durable.await.expect("durable"));
}

/// A pod that sees nobody else, and looks for logs.
pub(super) fn adopts(pod: &Pod, name: &str, after: Duration) -> Adoptions {
    let adoptions = Adoptions::default();
    let adopter = Adopter {
        logs: logs(&pod.root),
        pod: id(name),
        own: pod.wal.log_id(),
        membership: Membership::fixed(Vec::new()),
        pool: Pool::new(
            id(name),
            PoolView::new([PodView::active(id(name), "127.0.0.1:1".parse().expect("valid"))]),
        ),
        tables: pod.tables.clone(),
        scope: pod.scope.clone(),
        after,
        adoptions: adoptions.clone(),
    };
    pod.scope.spawn("adopter", adopter.run());
    adoptions
}

pub(super) async fn holds_nothing(pod: &Pod, log: LogId) {
    let noted = async {
        while !pod.tables.drained_logs().holds_nothing(log).await.expect("read") {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(DEADLINE, noted).await.expect("a note in the end");
}

/// What is left of a log, once its note is there and it is deleted. Another pod that has read it too may look as if it
/// began its deletion anew for a moment: it says again up to where, and takes that back.
pub(super) async fn left(root: &Path, log: LogId) -> Vec<String> {
    let folder = root.join("_sluice/wal").join(log.0.to_string());
    let names = || {
        let entries = std::fs::read_dir(&folder).expect("a folder");
        entries
            .map(|entry| entry.expect("readable").file_name().into_string().expect("text"))
            .collect::<Vec<_>>()
    };
    let deleted = async {
        loop {
            let names = names();
            if names.len() <= 1 {
                return names;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(DEADLINE, deleted).await.expect("deleted in the end")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_dead_pods_log_is_committed_and_releases_what_waits_for_it() {
    let root = TempDir::new().expect("a directory");
    let pod = Pod::with(root.path(), |config| config.pod = id("pod-2"));
    let table = pod.create(numbers(), &[]).await;
    let (dead, s) = (begin(root.path(), "pod-1").await, stream("s"));
    for start in 0..5 {
        write(&dead, batch(&table, vec![run(&s, 1, start * 10, start * 10 + 10)])).await;
    }
    pod.offer(&table, batch(&table, vec![run(&s, 1, 50, 60)])).await;
    pod.drain().await;
    let described = pod.tables.describe(&name()).await.expect("described");
    assert_eq!(described["held_runs"], 1);
    assert!(described["lag_ms"].as_u64() > Some(0), "{described}");
    adopts(&pod, "pod-2", Duration::ZERO);
    holds_nothing(&pod, dead.log_id()).await;
    pod.drain().await;
    assert_eq!(table.watermark(&s).await.expect("read").next, 60);
    assert_eq!(pod.reader().check_prefixes().into_values().collect::<Vec<_>>(), [60]);
    assert_eq!(pod.tables.describe(&name()).await.expect("described")["held_runs"], 0);
    let seal = left(root.path(), dead.log_id()).await;
    assert_eq!(seal.len(), 1, "{seal:?}");
    assert_eq!(pod.tables.list().await.expect("listed"), [name()], "logs are no tables");
    pod.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn two_adopters_at_one_time_double_nothing() {
    for seed in 0..4u64 {
        println!("seed {seed}");
        let mut random = StdRng::seed_from_u64(seed);
        let root = TempDir::new().expect("a directory");
        // One of them has no memory for rows: it reads them back from a log that the other one deletes.
        let small = |config: &mut TablesConfig| {
            (config.pod, config.memory_bytes) = (id("pod-3"), 1);
        };
        let pods = [Pod::with(root.path(), |config| config.pod = id("pod-2")), Pod::with(root.path(), small)];
        let table = pods[0].create(numbers(), &[]).await;
        let mut logs = Vec::new();
        let streams = ["a", "b", "c"].map(stream);
        // The streams have gone from one dead pod to the other and back.
        for _ in 0..2 {
            logs.push(begin(root.path(), "pod-1").await);
        }
        for stream in &streams {
            for start in 0..30 {
                let log = &logs[random.random_range(0..2)];
                write(log, batch(&table, vec![run(stream, 1, start * 10, start * 10 + 10)])).await;
            }
        }
        adopts(&pods[0], "pod-2", Duration::ZERO);
        adopts(&pods[1], "pod-3", Duration::ZERO);
        for log in &logs {
            holds_nothing(&pods[0], log.log_id()).await;
            assert_eq!(left(root.path(), log.log_id()).await.len(), 1);
        }
        for pod in &pods {
            pod.drain().await;
        }
        let prefixes = pods[0].reader().check_prefixes();
        assert!(prefixes.len() == 3 && prefixes.values().all(|length| *length == 300), "{prefixes:?}");
        for pod in pods {
            assert_eq!(pod.tables.describe(&name()).await.expect("described")["held_runs"], 0);
            pod.stop().await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_log_without_its_header_is_missed_while_it_has_records() {
    let root = TempDir::new().expect("a directory");
    let pod = Pod::with(root.path(), |config| config.pod = id("pod-2"));
    let table = pod.create(numbers(), &[]).await;
    let dead = begin(root.path(), "pod-1").await;
    let logs = logs(root.path());
    let folder = root.path().join("_sluice/wal").join(dead.log_id().0.to_string());
    write(&dead, batch(&table, vec![run(&stream("s"), 1, 0, 10)])).await;
    let (header, kept) = (folder.join("header.json"), folder.join("kept"));
    std::fs::rename(&header, &kept).expect("there");
    let missed = logs.header(dead.log_id()).await.expect_err("records without a header").to_string();
    assert!(missed.contains("header.json") && missed.contains("restore it"), "{missed}");
    std::fs::rename(&kept, &header).expect("there");
    adopts(&pod, "pod-2", Duration::ZERO);
    holds_nothing(&pod, dead.log_id()).await;
    left(root.path(), dead.log_id()).await;
    assert!(logs.header(dead.log_id()).await.expect("read").is_none(), "a log that is done with");
    pod.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn an_adopter_that_dies_leaves_the_log_to_the_next() {
    let root = TempDir::new().expect("a directory");
    let first = Pod::with(root.path(), |config| config.pod = id("pod-2"));
    let table = first.create(numbers(), &[]).await;
    let (dead, s) = (begin(root.path(), "pod-1").await, stream("s"));
    // The beginning is missing: whoever takes the log over waits for it.
    write(&dead, batch(&table, vec![run(&s, 1, 10, 20)])).await;
    adopts(&first, "pod-2", Duration::ZERO);
    let held = async {
        while first.tables.describe(&name()).await.expect("described")["held_runs"] != 1 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(DEADLINE, held).await.expect("taken over");
    first.stop().await;
    let second = Pod::with(root.path(), |config| config.pod = id("pod-3"));
    let table = second.tables.open(&name()).await.expect("opened");
    second.offer(&table, batch(&table, vec![run(&s, 1, 0, 10)])).await;
    adopts(&second, "pod-3", Duration::ZERO);
    holds_nothing(&second, dead.log_id()).await;
    assert_eq!(second.reader().check_prefixes().into_values().collect::<Vec<_>>(), [20]);
    second.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn only_former_lives_are_taken_over_at_once() {
    let root = TempDir::new().expect("a directory");
    let pod = Pod::with(root.path(), |config| config.pod = id("pod-2"));
    let table = pod.create(numbers(), &[]).await;
    let (own, other) = (begin(root.path(), "pod-2").await, begin(root.path(), "pod-1").await);
    write(&own, batch(&table, vec![run(&stream("own"), 1, 0, 10)])).await;
    write(&other, batch(&table, vec![run(&stream("other"), 1, 0, 10)])).await;
    adopts(&pod, "pod-2", Duration::from_secs(3_600));
    holds_nothing(&pod, own.log_id()).await;
    assert!(!pod.tables.drained_logs().holds_nothing(other.log_id()).await.expect("read"));
    // The other one still writes.
    write(&other, batch(&table, vec![run(&stream("other"), 1, 10, 20)])).await;
    let mut sealed = SealedLog::seal(&logs(root.path()), other.log_id(), &id("pod-2"))
        .await
        .expect("there")
        .expect("there");
    let mut entries: Vec<Bytes> = Vec::new();
    while let Some(group) = sealed.next_group().await.expect("whole") {
        entries.extend(group.into_iter().map(|(_, entry)| entry));
    }
    assert_eq!(entries.len(), 2);
    pod.stop().await;
}
