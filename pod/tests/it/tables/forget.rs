//! Ephemeral streams come and go: the watermark map forgets them, and no replay doubles a record.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use sluice_pod::stream::{Hold, Opening, Streams};
use sluice_shared::frame::{Encoding, UnknownFields};

use super::*;

/// Three groups fill one.
const SEGMENT_BYTES: u64 = 16 << 10;
/// Streams that the log's last segments keep in the map, and then some.
const REMAINDER: u64 = 40;
const RECORDS: u64 = 3;
const KEPT: Duration = Duration::from_secs(3_600);

/// A table's directory, a pod's log, and the time.
struct World {
    root: TempDir,
    log: TempDir,
    since: Instant,
    passed_s: Arc<AtomicU64>,
}

impl World {
    fn new() -> Self {
        let (root, log) = (TempDir::new().expect("a directory"), TempDir::new().expect("a directory"));
        Self { root, log, since: Instant::now(), passed_s: Arc::default() }
    }

    /// Ended streams are not sent again any more.
    fn pass_time(&self) {
        self.passed_s.fetch_add(KEPT.as_secs(), Ordering::SeqCst);
    }

    /// A pod on the log, which replays what the one before has left there.
    async fn begin_life(&self) -> Life {
        self.begin_life_with(Duration::from_millis(2)).await
    }

    async fn begin_life_with(&self, flush_interval: Duration) -> Life {
        let (since, passed_s) = (self.since, Arc::clone(&self.passed_s));
        let clock = Clock::new(move || since + Duration::from_secs(passed_s.load(Ordering::SeqCst)));
        let change = |config: &mut TablesConfig| {
            (config.ended_kept, config.clock, config.flush_interval) = (KEPT, clock, flush_interval);
        };
        let (pod, replay) = Pod::on_log(self.root.path(), self.log.path(), SEGMENT_BYTES, change);
        let table = pod.create(numbers(), &[]).await;
        for entry in replay {
            let (durable, bytes) = entry.expect("whole");
            pod.tables.replay(durable, Batch::decode(bytes).expect("a batch")).await;
        }
        Life { pod, table, registry: Streams::default() }
    }
}

struct Life {
    pod: Pod,
    table: Table,
    registry: Streams,
}

impl Life {
    /// What is durable and not committed is left to the next life.
    async fn kill(self) {
        let wal = self.pod.wal.clone();
        self.pod.stop().await;
        wal.close().await;
    }

    async fn send(&self, stream: &StreamId, start: u64, end: u64) {
        self.pod.offer(&self.table, batch(&self.table, vec![run(stream, 0, start, end)])).await;
    }

    /// A call that opens a stream. It counts what comes until its end as sent.
    fn open(&self, stream: &StreamId) -> Hold {
        let opening = Opening {
            id: stream.clone(),
            session: SessionId(0),
            table: self.table.clone(),
            encoding: Encoding::Json,
            unknown: UnknownFields::Refuse,
            whole_requests: false,
            described: None,
            has_moved: false,
            released: Vec::new(),
        };
        self.registry.open(opening, RECORDS, RECORDS, 1 << 20).expect("opened")
    }

    /// Sends a stream's records from `start` and ends it.
    async fn finish(&self, stream: &StreamId, start: u64) {
        let hold = self.open(stream);
        self.send(stream, start, RECORDS).await;
        self.registry.end(&hold);
    }

    /// A whole life of a stream.
    async fn pass(&self) -> StreamId {
        let stream = StreamId::ephemeral();
        self.finish(&stream, 0).await;
        stream
    }

    /// Streams in the map.
    async fn streams(&self) -> u64 {
        let described = self.pod.tables.describe(&name()).await.expect("described");
        described["streams"].as_u64().expect("a number")
    }

    /// Segments are taken away by a thread of the log: lets streams pass until the map has shrunk.
    async fn shrink(&self, world: &World) {
        let shrunk = async {
            while self.streams().await > REMAINDER {
                self.pass().await;
                world.pass_time();
                self.pod.drain().await;
            }
        };
        tokio::time::timeout(DEADLINE, shrunk).await.expect("the map shrinks");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_that_come_and_go_leave_the_map_and_others_stay() {
    let world = World::new();
    let life = world.begin_life().await;
    let (named, open) = (stream("named"), StreamId::ephemeral());
    life.open(&open);
    life.finish(&named, 0).await;
    life.send(&open, 0, RECORDS).await;
    for _ in 0..40 {
        for _ in 0..5 {
            life.pass().await;
        }
        life.pod.drain().await;
    }
    assert!(life.streams().await > 200);
    life.shrink(&world).await;
    for stream in [&named, &open] {
        life.send(stream, RECORDS, 10).await;
    }
    life.pod.drain().await;
    let prefixes = life.pod.reader().check_prefixes();
    assert!(prefixes.len() > 200, "{}", prefixes.len());
    for (stream, length) in prefixes {
        let expected = if stream == named.as_str() || stream == open.as_str() { 10 } else { RECORDS };
        assert_eq!(length, expected, "{stream}");
    }
    life.kill().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_is_kept_while_it_may_be_sent_again_or_another_log_may_have_it() {
    for has_rival in [false, true] {
        let world = World::new();
        let life = world.begin_life().await;
        let mut streams = Vec::new();
        for _ in 0..10 {
            for _ in 0..5 {
                streams.push(life.pass().await);
            }
            life.pod.drain().await;
        }
        let rival = Pod::new(world.root.path());
        if has_rival {
            rival.tables.open(&name()).await.expect("opened: its log is registered");
            world.pass_time();
        }
        while life.pod.wal.trimmed().segment < 10 {
            tokio::task::yield_now().await;
        }
        life.send(&stream("last"), 0, 1).await;
        life.pod.drain().await;
        assert_eq!(life.streams().await, 51, "rival: {has_rival}");
        for stream in &streams {
            life.send(stream, 0, RECORDS).await;
        }
        life.pod.drain().await;
        life.pod.reader().check_prefixes();
        life.kill().await;
        rival.stop().await;
    }
}

/// Streams of one life. Answers those that are open when the pod is killed.
async fn live(world: &World, life: &Life, random: &mut StdRng) -> Vec<StreamId> {
    let (mut open, mut ended) = (Vec::new(), Vec::new());
    for _ in 0..random.random_range(20..60) {
        match random.random_range(0..12) {
            0..6 => ended.push(life.pass().await),
            6 => life.pod.drain().await,
            7 => {
                world.pass_time();
                ended.clear();
            }
            // The gateway has not seen the end.
            8 => {
                if let Some(stream) = ended.pop() {
                    life.finish(&stream, random.random_range(0..RECORDS)).await;
                }
            }
            _ => {
                let stream = StreamId::ephemeral();
                life.open(&stream);
                life.send(&stream, 0, RECORDS - 1).await;
                open.push(stream);
            }
        }
    }
    open
}

#[tokio::test(flavor = "multi_thread")]
async fn kills_between_end_commit_trim_and_forgetting_double_nothing_and_leave_nothing_for_ever() {
    for seed in 0..4 {
        println!("seed {seed}");
        let (mut random, world) = (StdRng::seed_from_u64(seed), World::new());
        let mut open: Vec<StreamId> = Vec::new();
        let named = stream("named");
        for number in 0..6 {
            let life = world.begin_life().await;
            // Some gateways come back and send again what they have not seen acked; the others never do. Some of
            // those streams end soon, the others go on much later.
            let mut long = Vec::new();
            for stream in open.into_iter().filter(|_| random.random_bool(0.7)).collect::<Vec<_>>() {
                if random.random_bool(0.5) {
                    life.finish(&stream, random.random_range(0..RECORDS)).await;
                } else {
                    long.push((life.open(&stream), stream));
                }
            }
            open = live(&world, &life, &mut random).await;
            for (hold, stream) in long {
                life.send(&stream, RECORDS - 1, RECORDS).await;
                life.registry.end(&hold);
            }
            life.send(&named, number, number + 1).await;
            life.kill().await;
        }
        let life = world.begin_life().await;
        life.pod.drain().await;
        life.shrink(&world).await;
        let mut prefixes = life.pod.reader().check_prefixes();
        assert_eq!(prefixes.remove(named.as_str()), Some(6));
        assert!(prefixes.values().all(|length| (RECORDS - 1..=RECORDS).contains(length)), "{prefixes:?}");
        let described = life.pod.tables.describe(&name()).await.expect("described");
        assert_eq!(described["held_runs"], 0);
        life.kill().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_that_only_a_replay_commits_are_forgotten_too() {
    let world = World::new();
    let life = world.begin_life_with(KEPT).await;
    for _ in 0..3 * REMAINDER {
        life.pass().await;
    }
    assert_eq!(life.streams().await, 0, "nothing is committed");
    life.kill().await;
    let life = world.begin_life().await;
    life.pod.drain().await;
    assert_eq!(life.streams().await, 3 * REMAINDER);
    life.shrink(&world).await;
    assert!(life.pod.reader().check_prefixes().values().all(|length| *length == RECORDS));
    life.kill().await;
}
