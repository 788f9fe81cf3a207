//! What an operator gives up: pods of this process over TCP, one of which never comes back with its log.

use serde_json::Value;
use sluice_pod::adopt::Adoptions;
use sluice_pod::release::Releaser;
use sluice_pod::stream::record::LogEntry;
use sluice_pod::table::held::HeldRange;
use sluice_pod::table::verify::Verifier;
use sluice_pod::table::watermark::RunKey;
use sluice_shared::error::Error;
use sluice_shared::ids::LogId;
use sluice_shared::lifecycle::Phase;
use sluice_shared::pool::{PodView, PoolView};
use sluice_shared::proto::ReleaseRequest;

use super::adopt::{adopts, begin, holds_nothing, left, write};
use super::homes::{Peer, committed, peers, see, stop};
use super::*;

/// Pods that see each other, and a table that the first one has made.
async fn pool(root: &Path, count: usize) -> Vec<Peer> {
    Tables::identity(&kept(root)).await.expect("made");
    let peers = peers(root, count, FLUSH).await;
    see(&peers, |_| true);
    peers
}

const FLUSH: Duration = Duration::from_millis(2);

/// A pod whose log is registered with the table, and is lost with it: nothing of it is ever committed.
async fn lose(peers: &mut Vec<Peer>, nth: usize) -> LogId {
    peers[nth].table().await;
    let log = peers[nth].pod.wal.log_id();
    let (tables, id) = (&peers[nth].pod.tables, &peers[nth].id);
    tables.owners().note(log, id).await.expect("noted");
    peers.remove(nth).kill().await;
    see(peers, |_| true);
    log
}

fn of_log(log: LogId, dry_run: bool) -> ReleaseRequest {
    ReleaseRequest { log: log.0.to_string(), dry_run, ..ReleaseRequest::default() }
}

fn of_table(dry_run: bool) -> ReleaseRequest {
    ReleaseRequest { table: "t".to_owned(), dry_run, ..ReleaseRequest::default() }
}

async fn release(releaser: &Releaser, request: ReleaseRequest) -> Result<Value, Error> {
    let report = tokio::time::timeout(DEADLINE, releaser.release(request)).await.expect("in time")?;
    Ok(serde_json::from_slice(&report).expect("JSON"))
}

/// Stream, session, first offset, one more than the last.
fn ranges(report: &Value, key: &str) -> Vec<(String, u64, u64, Option<u64>)> {
    let lines = report[key].as_array().expect("a list").iter();
    let number = |line: &Value, key: &str| line[key].as_u64().expect("a number");
    let range = |line: &Value| {
        let stream = line["stream"].as_str().expect("a stream").to_owned();
        (stream, number(line, "session"), number(line, "start"), line["end"].as_u64())
    };
    lines.map(range).collect()
}

fn range(name: &str, session: u64, start: u64, end: u64) -> (String, u64, u64, Option<u64>) {
    (stream(name).as_str().to_owned(), session, start, Some(end))
}

/// Until a pod holds so many runs.
async fn held(peer: &Peer, runs: u64) {
    let held = async {
        while peer.held().await != runs {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(DEADLINE, held).await.expect("held");
}

/// What the rejected table has of each stream, and that no version of the table is at fault.
async fn verified(root: &Path, name: &str) -> (u64, u64) {
    let mut verifier = Verifier::new(&root.to_owned().into(), &super::name()).expect("a directory");
    let newest = verifier.newest().await.expect("a table");
    let mut last = None;
    for version in 0..=newest {
        let report = verifier.version(version).await.expect("readable");
        assert_eq!(report.faults, [], "version {version}");
        last = Some(report);
    }
    let streams = last.expect("one").streams;
    let count = &streams[stream(name).as_str()];
    (count.rejected, count.absent_count())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn what_a_lost_log_had_is_given_up_by_name_and_the_rest_is_committed() {
    let root = TempDir::new().expect("a directory");
    let mut peers = pool(root.path(), 3).await;
    let (s, table) = (stream("s"), peers[0].table().await);
    peers[0].send(vec![run(&s, 1, 0, 10)]).await;
    committed(&table, std::slice::from_ref(&s), 10).await;
    let log = lose(&mut peers, 1).await;
    peers[1].send(vec![run(&s, 1, 20, 30)]).await;
    peers[1].send(vec![run(&s, 1, 30, 40), run(&stream("r"), 1, 0, 5)]).await;
    held(&peers[1], 2).await;
    let releaser = &peers[0].served.releaser;
    let mut described = peers[0].pod.tables.describe(&name()).await.expect("described");
    releaser.describe_waiting(&name(), &mut described).await.expect("described");
    assert_eq!(described["held_runs"], 2, "{described}");
    let gap = &described["held"][0];
    assert_eq!(gap["missing"], serde_json::json!([10, 20]), "{described}");
    assert_eq!((gap["runs"].as_u64(), gap["records"].as_u64()), (Some(2), Some(20)), "{described}");
    assert_eq!(gap["pods"], serde_json::json!(["pod-2"]), "{described}");
    assert_eq!(described["waits_for_logs"], serde_json::json!([{"log": log, "pod": "pod-1"}]));
    // Nobody has said that the log is lost.
    let report = release(releaser, of_table(false)).await.expect("asked");
    assert_eq!((ranges(&report, "given_up"), ranges(&report, "left")), (vec![], vec![range("s", 1, 10, 20)]));
    let why = report["left"][0]["why"].as_str().expect("why");
    assert!(why.contains(&log.0.to_string()) && why.contains("of pod-1"), "{why}");
    let would = release(releaser, of_log(log, true)).await.expect("asked");
    assert_eq!(ranges(&would, "given_up"), [range("s", 1, 10, 20)]);
    assert_eq!(peers[0].pod.tables.drained_logs().released(log).await.expect("read"), None);
    let report = release(releaser, of_log(log, false)).await.expect("given up");
    assert_eq!((ranges(&report, "given_up"), ranges(&report, "left")), (ranges(&would, "given_up"), vec![]));
    assert_eq!(report["given_up"][0]["where"], format!("log {} of pod-1", log.0));
    committed(&table, &[s, stream("r")], 5).await;
    committed(&table, &[stream("s")], 40).await;
    held(&peers[1], 0).await;
    assert_eq!(verified(root.path(), "s").await, (10, 0));
    // Its pod may not come back with it, and nobody waits for it.
    let notes = peers[0].pod.tables.drained_logs();
    assert_eq!(notes.withdraw(log).await.expect_err("released").code, "log_released");
    assert!(notes.holds_nothing(log).await.expect("read"));
    assert_eq!(report["logs"][0]["released_before"], Value::Null, "{report}");
    let again = release(releaser, of_log(log, false)).await.expect("once more");
    assert_eq!((ranges(&again, "given_up"), ranges(&again, "left")), (vec![], vec![]));
    assert!(again["logs"][0]["released_before"].is_string(), "{again}");
    stop(peers).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn nothing_is_given_up_that_a_pod_or_another_log_may_have() {
    let root = TempDir::new().expect("a directory");
    let mut peers = pool(root.path(), 5).await;
    let (s, table) = (stream("s"), peers[0].table().await);
    // One pod has what another one waits for: only what neither has is missing.
    peers[1].send(vec![run(&s, 1, 30, 40)]).await;
    peers[2].send(vec![run(&s, 1, 10, 20)]).await;
    held(&peers[1], 1).await;
    held(&peers[2], 1).await;
    let alive = peers[2].pod.wal.log_id();
    let error = release(&peers[0].served.releaser, of_log(alive, false)).await.expect_err("alive");
    assert!(error.code == "log_in_use" && error.message.contains("pod-2 is there"), "{error}");
    let unknown = LogId(uuid::Uuid::from_u128(7));
    let error = release(&peers[0].served.releaser, of_log(unknown, true)).await.expect_err("unknown");
    assert_eq!(error.code, "log_not_found");
    let (first, second) = (lose(&mut peers, 4).await, lose(&mut peers, 3).await);
    let releaser = &peers[0].served.releaser;
    let report = release(releaser, of_log(first, false)).await.expect("asked");
    let all = [range("s", 1, 0, 10), range("s", 1, 20, 30)];
    assert_eq!((ranges(&report, "given_up"), ranges(&report, "left")), (vec![], all.to_vec()));
    let why = report["left"][0]["why"].as_str().expect("why");
    assert!(why.contains(&second.0.to_string()) && !why.contains(&first.0.to_string()), "{why}");
    assert_eq!(table.watermark(&s).await.expect("read").next, 0);
    let report = release(releaser, of_log(second, false)).await.expect("given up");
    assert_eq!((ranges(&report, "given_up"), ranges(&report, "left")), (all.to_vec(), vec![]));
    committed(&table, &[s], 40).await;
    assert_eq!(verified(root.path(), "s").await, (20, 0));
    stop(peers).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_pod_that_does_not_answer_may_have_it() {
    let root = TempDir::new().expect("a directory");
    let mut peers = pool(root.path(), 3).await;
    let log = {
        peers[2].table().await;
        peers[2].pod.wal.log_id()
    };
    peers[1].send(vec![run(&stream("s"), 1, 10, 20)]).await;
    held(&peers[1], 1).await;
    // It dies, and the others have not lost it yet.
    let dead = peers.remove(2);
    let (tables, id) = (peers[0].pod.tables.clone(), dead.id.clone());
    dead.kill().await;
    let releaser = &peers[0].served.releaser;
    let error = release(releaser, of_log(log, false)).await.expect_err("nobody knows whose it is");
    assert!(error.code == "pod_unreachable" && error.message.contains("pod-2"), "{error}");
    assert_eq!(tables.drained_logs().released(log).await.expect("read"), None);
    tables.owners().note(log, &id).await.expect("noted");
    let by_pod = ReleaseRequest { pod: "pod-2".to_owned(), ..ReleaseRequest::default() };
    let report = release(releaser, by_pod).await.expect("it is the lost one");
    assert_eq!(ranges(&report, "given_up"), [range("s", 1, 0, 10)]);
    see(&peers, |_| true);
    committed(&peers[0].table().await, &[stream("s")], 20).await;
    stop(peers).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_pod_that_is_back_and_was_not_heard_of_yet_is_not_given_up() {
    let root = TempDir::new().expect("a directory");
    let peers = pool(root.path(), 3).await;
    peers[2].table().await;
    let (log, id) = (peers[2].pod.wal.log_id(), peers[2].id.clone());
    peers[2].pod.tables.owners().note(log, &id).await.expect("noted");
    peers[1].send(vec![run(&stream("s"), 1, 10, 20)]).await;
    held(&peers[1], 1).await;
    let others = || PoolView::new(peers[..2].iter().map(|peer| peer.view(Phase::Active)));
    let (asked, all) = (peers[0].pool.clone(), peers.iter().map(|peer| peer.view(Phase::Active)));
    let all = PoolView::new(all);
    let hears = move || {
        asked.update(all.clone());
        Box::pin(std::future::ready(())) as _
    };
    let releaser = Releaser { hears: Arc::new(hears), ..peers[0].served.releaser.clone() };
    let by_pod = ReleaseRequest { pod: id.as_str().to_owned(), ..ReleaseRequest::default() };
    for request in [of_log(log, false), by_pod] {
        peers[0].pool.update(others());
        let error = release(&releaser, request).await.expect_err("it is there");
        assert!(error.code == "log_in_use" && error.message.contains("is there, and writes it"), "{error}");
        assert_eq!(peers[0].pod.tables.drained_logs().released(log).await.expect("read"), None);
    }
    // One that stays away is.
    peers[0].pool.update(others());
    let report = release(&peers[0].served.releaser, of_log(log, false)).await.expect("given up");
    assert_eq!(ranges(&report, "given_up"), [range("s", 1, 0, 10)]);
    stop(peers).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_run_that_comes_after_all_is_there_once_or_given_up() {
    for seed in 0..12 {
        println!("seed {seed}");
        let mut random = StdRng::seed_from_u64(seed);
        let root = TempDir::new().expect("a directory");
        let peers = pool(root.path(), 2).await;
        let (s, table) = (stream("s"), peers[0].table().await);
        peers[1].send(vec![run(&s, 1, 20, 30)]).await;
        held(&peers[1], 1).await;
        let gap = RunKey { stream: s.clone(), session: SessionId(1), start: 0, end: 20, boundary: None };
        let (late, pause) = (random.random_range(1..=20), random.random_range(0..30));
        let arrives = async {
            tokio::time::sleep(Duration::from_millis(pause)).await;
            peers[1].send(vec![run(&s, 1, 0, late)]).await;
        };
        let rival = peers[1].pod.tables.clone();
        let (name, id) = (name(), table.id().clone());
        // Two operators at one time, at two pods.
        let (one, two, ()) = futures_util::join!(
            peers[0].pod.tables.give_up(&name, &id, std::slice::from_ref(&gap), "lost"),
            rival.give_up(&name, &id, std::slice::from_ref(&gap), "lost"),
            arrives
        );
        let next = table.watermark(&s).await.expect("read").next;
        let one_of = |mut outcomes: Vec<(u64, Option<Error>)>| outcomes.pop().expect("one");
        match (one_of(one), one_of(two)) {
            // Either it was given up as a whole, and what came is a replay; or what came was first.
            ((20, _), _) | (_, (20, _)) => committed(&table, std::slice::from_ref(&s), 30).await,
            ((0, Some(error)), (0, Some(other))) => {
                assert_eq!(
                    (error.code.as_str(), other.code.as_str()),
                    ("stream_has_moved", "stream_has_moved")
                );
                let rest = RunKey { start: late, ..gap };
                assert!(next == late || next == 30, "{next}");
                if late < 20 {
                    assert_eq!(rival.give_up(&name, &id, &[rest], "lost").await, [(20, None)]);
                }
                committed(&table, std::slice::from_ref(&s), 30).await;
            }
            other => panic!("{other:?}"),
        }
        let (rejected, absent) = verified(root.path(), "s").await;
        assert!(absent == 0 && (rejected == 20 || rejected == 20 - late), "{rejected} {absent}");
        stop(peers).await;
    }
}

fn alone(pod: &Pod) -> Releaser {
    Releaser {
        tables: pod.tables.clone(),
        pool: Pool::alone("pod-1".parse().expect("valid")),
        log: LogEntry { log: pod.wal.log_id(), pod: "pod-1".parse().expect("valid") },
        logs: kept(&pod.root).logs(),
        adoptions: Adoptions::default(),
        hears: Arc::new(|| Box::pin(std::future::ready(()))),
        taken_over_within: DEADLINE,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn records_of_a_dropped_table_are_given_up_and_their_log_lets_go_of_them() {
    let root = TempDir::new().expect("a directory");
    let pod = Pod::new(root.path());
    Tables::identity(&kept(root.path())).await.expect("made");
    let table = pod.create(numbers(), &[]).await;
    std::fs::remove_dir_all(&pod.reader().0).expect("dropped");
    pod.offer(&table, batch(&table, vec![run(&stream("s"), 1, 0, 10), run(&stream("r"), 2, 5, 6)])).await;
    pod.offer(&table, batch(&table, vec![run(&stream("s"), 1, 10, 15)])).await;
    pod.drain().await;
    assert_eq!((pod.tables.stranded(), pod.wal.status().outstanding), (2, 2));
    let releaser = alone(&pod);
    let all = [range("r", 2, 5, 6), range("s", 1, 0, 15)];
    let would = release(&releaser, of_table(true)).await.expect("asked");
    assert_eq!(ranges(&would, "given_up"), all);
    assert_eq!(pod.wal.status().outstanding, 2);
    // What waits for the table that is there now is not concerned.
    let fresh = pod.create(numbers(), &[]).await;
    pod.offer(&fresh, batch(&fresh, vec![run(&stream("s"), 1, 3, 10)])).await;
    pod.drain().await;
    let report = release(&releaser, of_table(false)).await.expect("given up");
    assert_eq!(ranges(&report, "given_up")[..1], [range("s", 1, 0, 3)], "no other log may have it: {report}");
    assert_eq!(ranges(&report, "given_up")[1..], all);
    committed(&fresh, &[stream("s")], 10).await;
    pod.drain().await;
    assert_eq!((pod.tables.stranded(), pod.wal.status().outstanding), (0, 0));
    let again = release(&releaser, of_table(false)).await.expect("nothing more");
    assert_eq!(ranges(&again, "given_up"), []);
    pod.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn what_pods_have_of_a_dropped_table_is_given_up_at_all_of_them_or_at_none() {
    let root = TempDir::new().expect("a directory");
    let peers = pool(root.path(), 2).await;
    let tables = [peers[0].table().await, peers[1].table().await];
    std::fs::remove_dir_all(&peers[0].pod.reader().0).expect("dropped");
    for (nth, name) in ["a", "b"].into_iter().enumerate() {
        peers[nth].pod.offer(&tables[nth], batch(&tables[nth], vec![run(&stream(name), 1, 0, 10)])).await;
        peers[nth].pod.drain().await;
    }
    // There is a third one, as far as the first one has heard.
    let silent = PodView::active("pod-9".parse().expect("valid"), "127.0.0.1:1".parse().expect("valid"));
    let all = peers.iter().map(|peer| peer.view(Phase::Active)).chain([silent]);
    peers[0].pool.update(PoolView::new(all));
    let releaser = &peers[0].served.releaser;
    let error = release(releaser, of_table(false)).await.expect_err("one pod does not answer");
    assert_eq!(error.code, "pod_unreachable", "{error}");
    let outstanding = || peers.iter().map(|peer| peer.pod.wal.status().outstanding).collect::<Vec<_>>();
    assert_eq!(outstanding(), [1, 1]);
    see(&peers, |_| true);
    let report = release(releaser, of_table(false)).await.expect("given up");
    assert_eq!(ranges(&report, "given_up"), [range("a", 1, 0, 10), range("b", 1, 0, 10)]);
    let place = report["given_up"][1]["where"].as_str().expect("a place");
    assert!(place.starts_with("a log at pod-1, for table id "), "{place}");
    assert_eq!(outstanding(), [0, 0]);
    stop(peers).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_log_in_the_store_is_done_with_once_what_it_has_of_a_dropped_table_is_given_up() {
    let root = TempDir::new().expect("a directory");
    let pod = Pod::with(root.path(), |config| config.pod = "pod-2".parse().expect("valid"));
    Tables::identity(&kept(root.path())).await.expect("made");
    let table = pod.create(numbers(), &[]).await;
    let dead = begin(root.path(), "pod-1").await;
    write(&dead, batch(&table, vec![run(&stream("s"), 1, 0, 10)])).await;
    std::fs::remove_dir_all(&pod.reader().0).expect("dropped");
    let releaser = Releaser { adoptions: adopts(&pod, "pod-2", Duration::ZERO), ..alone(&pod) };
    let stranded = async {
        while pod.tables.stranded() == 0 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(DEADLINE, stranded).await.expect("taken over");
    let error = release(&releaser, of_log(dead.log_id(), false)).await.expect_err("it is being taken over");
    assert!(error.code == "log_in_use" && error.message.contains("taking it over"), "{error}");
    let report = release(&releaser, of_table(false)).await.expect("given up");
    assert_eq!(ranges(&report, "given_up"), [range("s", 1, 0, 10)]);
    holds_nothing(&pod, dead.log_id()).await;
    assert_eq!(left(root.path(), dead.log_id()).await.len(), 1, "the seal");
    pod.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_damaged_log_in_the_store_is_given_up_from_its_damage_on_and_stays_as_it_is() {
    let root = TempDir::new().expect("a directory");
    let pod = Pod::with(root.path(), |config| config.pod = "pod-2".parse().expect("valid"));
    Tables::identity(&kept(root.path())).await.expect("made");
    let (table, s) = (pod.create(numbers(), &[]).await, stream("s"));
    let dead = begin(root.path(), "pod-1").await;
    for start in [0, 10, 20] {
        write(&dead, batch(&table, vec![run(&s, 1, start, start + 10)])).await;
    }
    let log = dead.log_id();
    let writer = Pod::on_wal(root.path(), dead, |_| {});
    writer.tables.open(&name()).await.expect("registered before it wrote");
    writer.stop().await;
    let folder = root.path().join("_sluice/wal").join(log.0.to_string());
    let object = folder.join(format!("{:020}", 2));
    let mut bytes = std::fs::read(&object).expect("an object");
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&object, bytes).expect("damaged");
    pod.offer(&table, batch(&table, vec![run(&s, 1, 30, 40)])).await;
    // Nobody knows of the damage, and what is before it is in no table.
    let none = Releaser { taken_over_within: Duration::ZERO, ..alone(&pod) };
    for dry_run in [true, false] {
        let error = release(&none, of_log(log, dry_run)).await.expect_err("what is before it is not lost");
        assert_eq!(error.code, "log_not_read", "{error}");
        for part in [&log.0.to_string(), &format!("{:020}", 2), "pod.adopt_after_ms", "--whole"] {
            assert!(error.message.contains(part), "{part:?} is not in {error}");
        }
    }
    assert_eq!(pod.tables.drained_logs().released(log).await.expect("read"), None);
    // As after a restart: a pod comes to it while the release waits.
    let releaser = Releaser { adoptions: adopts(&pod, "pod-2", Duration::ZERO), ..alone(&pod) };
    let report = release(&releaser, of_log(log, false)).await.expect("given up");
    assert_eq!(ranges(&report, "given_up"), [range("s", 1, 10, 30)]);
    committed(&table, &[s], 40).await;
    assert_eq!(verified(root.path(), "s").await, (20, 0));
    let objects = || std::fs::read_dir(&folder).expect("a folder").count();
    let before = objects();
    let another = adopts(&pod, "pod-3", Duration::ZERO);
    let seen = async {
        while !another.is_done(log) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(DEADLINE, seen).await.expect("looked at");
    assert_eq!((objects(), object.exists()), (before, true));
    pod.stop().await;
}

/// A log in the store, whose pod is gone: its records, which no table has.
async fn leave(pod: &Pod, owner: &str, records: std::ops::Range<u64>) -> LogId {
    let table = pod.tables.open(&name()).await.expect("there");
    let dead = begin(&pod.root, owner).await;
    write(&dead, batch(&table, vec![run(&stream("s"), 1, records.start, records.end)])).await;
    let log = dead.log_id();
    let writer = Pod::on_wal(&pod.root, dead, |_| {});
    writer.tables.open(&name()).await.expect("registered before it wrote");
    writer.stop().await;
    log
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_log_that_would_be_taken_over_by_itself_is_given_up_only_where_that_is_said() {
    let root = TempDir::new().expect("a directory");
    let pod = Pod::with(root.path(), |config| config.pod = "pod-2".parse().expect("valid"));
    Tables::identity(&kept(root.path())).await.expect("made");
    let (table, s) = (pod.create(numbers(), &[]).await, stream("s"));
    let log = leave(&pod, "pod-1", 0..10).await;
    pod.offer(&table, batch(&table, vec![run(&s, 1, 10, 20)])).await;
    pod.drain().await;
    let releaser = alone(&pod);
    let by_pod = ReleaseRequest { pod: "pod-1".to_owned(), ..ReleaseRequest::default() };
    for asked in [of_log(log, true), of_log(log, false), by_pod] {
        let error = release(&releaser, asked).await.expect_err("it is whole");
        assert_eq!(error.code, "log_is_whole", "{error}");
        for part in [&log.0.to_string(), "pod.adopt_after_ms", "--whole"] {
            assert!(error.message.contains(part), "{part:?} is not in {error}");
        }
    }
    assert_eq!(pod.tables.drained_logs().released(log).await.expect("read"), None);
    assert_eq!(table.watermark(&s).await.expect("read").next, 0, "nothing was given up");
    let report =
        release(&releaser, ReleaseRequest { whole: true, ..of_log(log, false) }).await.expect("given up");
    assert_eq!(ranges(&report, "given_up"), [range("s", 1, 0, 10)]);
    committed(&table, &[s], 20).await;
    // A newer program's is whole as well, whatever it looks like here.
    let newer = leave(&pod, "pod-1", 40..50).await;
    let header = root.path().join("_sluice/wal").join(newer.0.to_string()).join("header.json");
    std::fs::write(&header, r#"{"format":2}"#).expect("written");
    let error = release(&releaser, of_log(newer, false)).await.expect_err("it is whole");
    assert!(
        error.code == "log_is_whole" && error.message.contains("start the pods with that version"),
        "{error}"
    );
    // Once it is released there is nothing to wait for.
    release(&releaser, of_log(log, false)).await.expect("once more");
    pod.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn an_emptied_last_object_costs_its_own_records_alone_and_is_released_without_ado() {
    let root = TempDir::new().expect("a directory");
    let pod = Pod::with(root.path(), |config| config.pod = "pod-2".parse().expect("valid"));
    Tables::identity(&kept(root.path())).await.expect("made");
    let (table, s) = (pod.create(numbers(), &[]).await, stream("s"));
    let dead = begin(root.path(), "pod-1").await;
    for start in [0, 10] {
        write(&dead, batch(&table, vec![run(&s, 1, start, start + 10)])).await;
    }
    let log = dead.log_id();
    let writer = Pod::on_wal(root.path(), dead, |_| {});
    writer.tables.open(&name()).await.expect("registered before it wrote");
    writer.stop().await;
    let object = root.path().join("_sluice/wal").join(log.0.to_string()).join(format!("{:020}", 2));
    std::fs::write(&object, "").expect("emptied");
    pod.offer(&table, batch(&table, vec![run(&s, 1, 20, 30)])).await;
    let adoptions = adopts(&pod, "pod-2", Duration::ZERO);
    committed(&table, std::slice::from_ref(&s), 10).await;
    let damaged = async {
        while adoptions.damaged().is_empty() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(DEADLINE, damaged).await.expect("found");
    assert!(adoptions.damaged()[&log].contains(&format!("{:020}", 2)), "{:?}", adoptions.damaged());
    let releaser = Releaser { adoptions, ..alone(&pod) };
    let report = release(&releaser, of_log(log, false)).await.expect("given up");
    assert_eq!(ranges(&report, "given_up"), [range("s", 1, 10, 20)]);
    committed(&table, &[s], 30).await;
    pod.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_there_is_not_is_no_release() {
    let root = TempDir::new().expect("a directory");
    let pod = Pod::new(root.path());
    Tables::identity(&kept(root.path())).await.expect("made");
    let table = pod.create(numbers(), &[]).await;
    pod.offer(&table, batch(&table, vec![run(&stream("r"), 2, 5, 6)])).await;
    pod.drain().await;
    let asked = |table: &str, stream: &str, log: &str| ReleaseRequest {
        table: table.to_owned(),
        stream: stream.to_owned(),
        log: log.to_owned(),
        ..ReleaseRequest::default()
    };
    let (releaser, known) = (alone(&pod), stream("r"));
    for (request, code, words) in [
        (asked("nope", "", ""), "table_not_found", vec!["main.default.nope", "sluice tables"]),
        (asked("t", "nope#0", ""), "stream_not_found", vec!["nope#0", "main.default.t", known.as_str()]),
        (asked("", "", "nope"), "invalid_log", vec!["nope", "waits_for_logs", "UUID, such as"]),
    ] {
        let error = release(&releaser, request).await.expect_err("there is no such thing");
        assert_eq!(error.code, code, "{error}");
        words.iter().for_each(|word| assert!(error.message.contains(word), "{word:?} is not in {error}"));
    }
    let report = release(&releaser, asked("t", known.as_str(), "")).await.expect("it waits");
    assert_eq!(ranges(&report, "given_up"), [range("r", 2, 0, 5)]);
    pod.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_is_away_is_not_taken_for_dropped_tables() {
    let root = TempDir::new().expect("a directory");
    let pod = Pod::new(root.path());
    pod.create(numbers(), &[]).await;
    let error = release(&alone(&pod), of_table(false)).await.expect_err("no identity");
    assert_eq!(error.kind, ErrorKind::Unavailable, "{error}");
    pod.stop().await;
}

/// What a pod holds, as others are told.
#[tokio::test(flavor = "multi_thread")]
async fn holdings_are_what_is_left_once_all_that_can_be_committed_is() {
    let root = TempDir::new().expect("a directory");
    let pod = Pod::with(root.path(), |config| config.flush_interval = Duration::from_secs(3_600));
    let table = pod.create(numbers(), &[]).await;
    pod.offer(&table, batch(&table, vec![run(&stream("s"), 1, 0, 10), run(&stream("r"), 3, 5, 9)])).await;
    let shown = pod.tables.holdings(None, false).await;
    assert!(shown[0].held.is_empty(), "not looked at yet: {shown:?}");
    let settled = pod.tables.holdings(Some(&name()), true).await;
    let HeldRange { stream: of, session, offsets, runs, .. } = settled[0].held[0].clone();
    assert_eq!(
        (of, session, offsets, runs),
        (stream("r"), SessionId(3), OffsetRange { start: 5, end: 9 }, 1)
    );
    assert_eq!((settled.len(), settled[0].held.len(), settled[0].id == *table.id()), (1, 1, true));
    assert_eq!(table.watermark(&stream("s")).await.expect("read").next, 10);
    pod.stop().await;
}
