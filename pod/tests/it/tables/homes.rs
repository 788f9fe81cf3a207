//! Several pods, one table, and its home: pods of this process over TCP, with what can go wrong between them.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use sluice_pod::adopt::Adoptions;
use sluice_pod::release::Releaser;
use sluice_pod::stream::record::LogEntry;
use sluice_pod::table::watermark::WatermarkMap;
use sluice_shared::ids::PodId;
use sluice_shared::lifecycle::Phase;
use sluice_shared::link::{self, PodAddress};
use sluice_shared::pool::{PodView, PoolView};
use sluice_shared::proto::{self, MESSAGE_BYTES_MAX};
use tokio::net::TcpListener;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status};

use super::*;

/// A few groups fill one: trimming goes by whole segments.
const SEGMENT_BYTES: u64 = 64 << 10;

/// What goes wrong with one answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    /// The commit is made, and nobody is told.
    LostSilently,
    /// The commit is made, and the link breaks.
    LostLoudly,
    /// Nothing is done.
    Refused,
    /// Nothing is done, for by this pod's clock the files are old.
    Old,
}

/// A pod's service as far as other pods' homes need it.
#[derive(Clone)]
pub(super) struct Served {
    tables: Tables,
    pub(super) releaser: Releaser,
    faults: Arc<Mutex<Vec<Fault>>>,
    /// Answers nothing any more, not even that it lives.
    hangs: Arc<AtomicBool>,
    /// Requests that were answered.
    commits: Arc<AtomicU64>,
    /// Those of them that went into the table.
    committed: Arc<AtomicU64>,
}

fn not_asked<T>() -> Result<Response<T>, Status> {
    Err(Status::unimplemented("not asked here"))
}

#[tonic::async_trait]
impl proto::pod_server::Pod for Served {
    type StreamStream = tokio_stream::Empty<Result<proto::StreamResponse, Status>>;

    async fn stream(
        &self,
        _: Request<tonic::Streaming<proto::StreamRequest>>,
    ) -> Result<Response<Self::StreamStream>, Status> {
        not_asked()
    }

    async fn fence(&self, _: Request<proto::FenceRequest>) -> Result<Response<proto::FenceResponse>, Status> {
        not_asked()
    }

    async fn retire(
        &self,
        _: Request<proto::RetireRequest>,
    ) -> Result<Response<proto::RetireResponse>, Status> {
        not_asked()
    }

    async fn create_table(
        &self,
        _: Request<proto::CreateTableRequest>,
    ) -> Result<Response<proto::TableDescription>, Status> {
        not_asked()
    }

    async fn describe_table(
        &self,
        _: Request<proto::DescribeTableRequest>,
    ) -> Result<Response<proto::TableDescription>, Status> {
        not_asked()
    }

    async fn drain(&self, _: Request<proto::DrainRequest>) -> Result<Response<proto::PodStatus>, Status> {
        Err(Status::unimplemented("not asked by pods"))
    }

    async fn join(&self, _: Request<proto::JoinRequest>) -> Result<Response<proto::PodStatus>, Status> {
        Err(Status::unimplemented("not asked by pods"))
    }

    async fn status(&self, _: Request<proto::StatusRequest>) -> Result<Response<proto::PodStatus>, Status> {
        Err(Status::unimplemented("not asked by pods"))
    }

    async fn list_tables(
        &self,
        _: Request<proto::ListTablesRequest>,
    ) -> Result<Response<proto::ListTablesResponse>, Status> {
        not_asked()
    }

    async fn commit(
        &self,
        request: Request<proto::CommitRequest>,
    ) -> Result<Response<proto::CommitResponse>, Status> {
        self.hang_if_so().await;
        let fault = self.faults.lock().expect("no panic").pop();
        if fault == Some(Fault::Refused) {
            return Err(Status::unavailable("on purpose"));
        }
        if fault == Some(Fault::Old) {
            let (version, outcome) = (request.get_ref().version, proto::CommitOutcome::Rewrite.into());
            return Ok(Response::new(proto::CommitResponse { version, outcome, ..Default::default() }));
        }
        let answer = self.tables.commit_for(request.into_inner()).await?;
        self.commits.fetch_add(1, Ordering::SeqCst);
        if answer.outcome() == proto::CommitOutcome::Committed {
            self.committed.fetch_add(1, Ordering::SeqCst);
        }
        match fault {
            Some(Fault::LostSilently) => {
                self.hangs.store(true, Ordering::SeqCst);
                std::future::pending().await
            }
            Some(_) => Err(Status::unavailable("on purpose, too late")),
            None => Ok(Response::new(answer)),
        }
    }

    async fn watermarks(
        &self,
        request: Request<proto::WatermarksRequest>,
    ) -> Result<Response<proto::WatermarksResponse>, Status> {
        self.hang_if_so().await;
        Ok(Response::new(self.tables.watermarks_for(request.into_inner()).await?))
    }

    async fn release(
        &self,
        _: Request<proto::ReleaseRequest>,
    ) -> Result<Response<proto::ReleaseResponse>, Status> {
        not_asked()
    }

    async fn holdings(
        &self,
        request: Request<proto::HoldingsRequest>,
    ) -> Result<Response<proto::HoldingsResponse>, Status> {
        self.hang_if_so().await;
        Ok(Response::new(self.releaser.holdings(request.into_inner()).await?))
    }

    async fn drop_stranded(
        &self,
        request: Request<proto::DropStrandedRequest>,
    ) -> Result<Response<proto::DropStrandedResponse>, Status> {
        self.hang_if_so().await;
        Ok(Response::new(self.releaser.drop_own_stranded(request.into_inner()).await?))
    }
}

impl Served {
    async fn hang_if_so(&self) {
        if self.hangs.load(Ordering::SeqCst) {
            std::future::pending::<()>().await;
        }
    }
}

/// A pod that others can reach.
pub(super) struct Peer {
    pub(super) id: PodId,
    address: PodAddress,
    pub(super) pool: Pool,
    pub(super) pod: Pod,
    pub(super) served: Served,
    log: TempDir,
}

pub(super) fn pod_id(number: usize) -> PodId {
    format!("pod-{number}").parse().expect("valid")
}

impl Peer {
    /// A pod on a log, whose runs it replays. Nobody knows it yet, and it knows nobody.
    async fn start(root: &Path, id: PodId, log: TempDir, flush_interval: Duration) -> Self {
        let pool = Pool::alone(id.clone());
        let change = |config: &mut TablesConfig| {
            (config.pod, config.pool, config.flush_interval) = (id.clone(), pool.clone(), flush_interval);
            config.ended_kept = Duration::ZERO;
        };
        let (pod, replay) = Pod::on_log(root, log.path(), SEGMENT_BYTES, change);
        for entry in replay {
            let (durable, bytes) = entry.expect("whole");
            pod.tables.replay(durable, Batch::decode(bytes).expect("a batch")).await;
        }
        let releaser = Releaser {
            tables: pod.tables.clone(),
            pool: pool.clone(),
            log: LogEntry { log: pod.wal.log_id(), pod: id.clone() },
            logs: kept(root).logs(),
            adoptions: Adoptions::default(),
            hears: Arc::new(|| Box::pin(std::future::ready(()))),
            taken_over_within: Duration::ZERO,
        };
        let served = Served {
            tables: pod.tables.clone(),
            releaser,
            faults: Arc::default(),
            hangs: Arc::default(),
            commits: Arc::default(),
            committed: Arc::default(),
        };
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = PodAddress::Tcp(listener.local_addr().expect("bound").to_string());
        let server = proto::pod_server::PodServer::new(served.clone())
            .max_decoding_message_size(MESSAGE_BYTES_MAX)
            .max_encoding_message_size(MESSAGE_BYTES_MAX);
        let (scope, stop) = (pod.scope.clone(), pod.scope.clone());
        scope.spawn("server", async move {
            let serving = link::server()
                .add_service(server)
                .serve_with_incoming(TcpIncoming::from(listener).with_nodelay(Some(true)));
            tokio::select! {
                biased; // a pod that dies says nothing more
                () = stop.cancelled() => {}
                served = serving => served.expect("serves"),
            }
        });
        Self { id, address, pool, pod, served, log }
    }

    pub(super) fn view(&self, phase: Phase) -> PodView {
        PodView { phase, ..PodView::active(self.id.clone(), self.address.clone()) }
    }

    /// The table, for one who has runs for it.
    pub(super) async fn table(&self) -> Table {
        self.pod.tables.open(&name()).await.expect("opened")
    }

    pub(super) async fn send(&self, runs: Vec<Run>) {
        let table = self.table().await;
        self.pod.offer(&table, batch(&table, runs)).await;
    }

    /// What is durable and not committed is left to the next life.
    pub(super) async fn kill(self) -> (PodId, TempDir) {
        let wal = self.pod.wal.clone();
        self.pod.stop().await;
        wal.close().await;
        (self.id, self.log)
    }

    pub(super) async fn held(&self) -> u64 {
        let described = self.pod.tables.describe(&name()).await.expect("described");
        described["held_runs"].as_u64().expect("a number")
    }
}

/// Pods that do not know each other yet, and a table that the first one has made.
pub(super) async fn peers(root: &Path, count: usize, flush_interval: Duration) -> Vec<Peer> {
    let mut peers = Vec::new();
    for number in 0..count {
        let log = TempDir::new().expect("a directory");
        peers.push(Peer::start(root, pod_id(number), log, flush_interval).await);
    }
    peers[0].pod.create(numbers(), &[]).await;
    peers
}

/// All pods see the same ones active, the others draining.
pub(super) fn see(peers: &[Peer], active: impl Fn(usize) -> bool) {
    let phase = |number| if active(number) { Phase::Active } else { Phase::Draining };
    for peer in peers {
        peer.pool.update(PoolView::new(peers.iter().enumerate().map(|(n, peer)| peer.view(phase(n)))));
    }
}

pub(super) async fn stop(peers: Vec<Peer>) {
    for peer in peers {
        peer.pod.stop().await;
    }
}

pub(super) async fn committed(table: &Table, streams: &[StreamId], next: u64) {
    for stream in streams {
        let committed = async {
            while table.watermark(stream).await.expect("read").next < next {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(DEADLINE, committed).await.expect("all is committed in the end");
    }
}

async fn told(progress: &StreamProgress, next: u64) {
    while progress.take().committed_next < next {
        tokio::time::timeout(DEADLINE, progress.changed()).await.expect("told");
    }
}

/// How many logs are registered with the table.
fn registered(reader: &Reader) -> usize {
    let map = std::fs::read(maps(reader).pop().expect("a map")).expect("readable");
    WatermarkMap::decode(&map.into()).expect("a map").logs.len()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn what_pods_send_within_a_round_is_one_version() {
    let root = TempDir::new().expect("a directory");
    let peers = peers(root.path(), 3, Duration::from_millis(300)).await;
    see(&peers, |number| number == 0);
    let (streams, reader) = (["a", "b", "c"].map(stream), peers[0].pod.reader());
    let table = peers[0].table().await;
    // The first round tells the home that several pods ask.
    for round in 0..5 {
        let before = reader.version();
        for (peer, stream) in peers.iter().zip(&streams) {
            peer.send(vec![run(stream, 1, round * 10, round * 10 + 10)]).await;
        }
        committed(&table, &streams, round * 10 + 10).await;
        let made = reader.version() - before;
        assert!(round == 0 || made <= 2, "{made} versions of what three pods wrote at one time");
    }
    assert!(peers[0].served.commits.load(Ordering::SeqCst) >= 10, "the home was asked");
    assert!(reader.check_prefixes().values().all(|length| *length == 50));
    stop(peers).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_home_without_runs_registers_no_log_and_what_it_commits_is_told() {
    let root = TempDir::new().expect("a directory");
    let peers = peers(root.path(), 2, Duration::from_millis(2)).await;
    see(&peers, |number| number == 1);
    let (s, progress) = (stream("s"), Arc::new(StreamProgress::default()));
    peers[0].table().await.follow(&s, progress.clone());
    peers[0].send(vec![run(&s, 1, 0, 10)]).await;
    told(&progress, 10).await;
    assert_eq!(progress.take().version, peers[0].pod.reader().version());
    assert_eq!(registered(&peers[0].pod.reader()), 1);
    assert_eq!(peers[1].served.commits.load(Ordering::SeqCst), 1);
    peers[1].send(vec![run(&stream("r"), 1, 0, 10)]).await;
    peers[1].pod.drain().await;
    assert_eq!(registered(&peers[0].pod.reader()), 2, "a log with runs is registered");
    stop(peers).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn an_answer_that_is_lost_doubles_nothing() {
    for fault in [Fault::LostLoudly, Fault::LostSilently, Fault::Refused] {
        let root = TempDir::new().expect("a directory");
        let peers = peers(root.path(), 2, Duration::from_millis(2)).await;
        see(&peers, |number| number == 1);
        let (s, progress) = (stream("s"), Arc::new(StreamProgress::default()));
        let table = peers[0].table().await;
        table.follow(&s, progress.clone());
        peers[1].served.faults.lock().expect("no panic").push(fault);
        let begun = Instant::now();
        peers[0].send(vec![run(&s, 1, 0, 10)]).await;
        told(&progress, 10).await;
        println!("{fault:?}: told after {:?}", begun.elapsed());
        peers[0].send(vec![run(&s, 1, 10, 20)]).await;
        told(&progress, 20).await;
        assert_eq!(peers[0].pod.reader().check_prefixes()[s.as_str()], 20, "{fault:?}");
        assert!(peers[1].served.faults.lock().expect("no panic").is_empty(), "{fault:?} has happened");
        stop(peers).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_home_whose_clock_is_days_ahead_stops_no_table() {
    let root = TempDir::new().expect("a directory");
    let peers = peers(root.path(), 2, Duration::from_millis(2)).await;
    see(&peers, |number| number == 1);
    let (s, progress) = (stream("s"), Arc::new(StreamProgress::default()));
    peers[0].table().await.follow(&s, progress.clone());
    peers[1].served.faults.lock().expect("no panic").extend([Fault::Old; 100]);
    peers[0].send(vec![run(&s, 1, 0, 10)]).await;
    told(&progress, 10).await;
    assert_eq!(peers[0].pod.reader().check_prefixes()[s.as_str()], 10);
    let left = std::mem::take(&mut *peers[1].served.faults.lock().expect("no panic")).len();
    assert!(left < 100, "the home was asked");
    stop(peers).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_home_that_hangs_stops_no_table() {
    let root = TempDir::new().expect("a directory");
    let peers = peers(root.path(), 2, Duration::from_millis(2)).await;
    see(&peers, |number| number == 1);
    let (s, progress) = (stream("s"), Arc::new(StreamProgress::default()));
    peers[0].table().await.follow(&s, progress.clone());
    peers[1].served.hangs.store(true, Ordering::SeqCst);
    for round in 0..20 {
        peers[0].send(vec![run(&s, 1, round * 10, round * 10 + 10)]).await;
        told(&progress, round * 10 + 10).await;
    }
    peers[1].served.hangs.store(false, Ordering::SeqCst);
    // It is asked again sooner or later.
    let mut next = 200;
    while peers[1].served.commits.load(Ordering::SeqCst) == 0 {
        peers[0].send(vec![run(&s, 1, next, next + 10)]).await;
        next += 10;
        told(&progress, next).await;
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(peers[0].pod.reader().check_prefixes()[s.as_str()], next);
    stop(peers).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_stream_that_moves_is_told_what_its_old_pod_has_committed() {
    let root = TempDir::new().expect("a directory");
    let peers = peers(root.path(), 3, Duration::from_millis(2)).await;
    see(&peers, |number| number == 2);
    let (moved, idle) = (stream("moved"), stream("idle"));
    let table = peers[1].table().await;
    // One has sent all to its old pod, the other goes on at the new one: that is held.
    let [of_moved, of_idle] = [20, 10].map(|durable| {
        let progress = Arc::new(StreamProgress::default());
        progress.durable(durable);
        progress
    });
    table.follow(&moved, of_moved.clone());
    table.follow(&idle, of_idle.clone());
    peers[1].send(vec![run(&moved, 1, 10, 20)]).await;
    peers[1].pod.drain().await;
    assert_eq!(peers[1].held().await, 1);
    peers[0].send(vec![run(&moved, 1, 0, 10), run(&idle, 1, 0, 10)]).await;
    told(&of_moved, 20).await;
    told(&of_idle, 10).await;
    assert_eq!(peers[0].pod.reader().check_prefixes()[moved.as_str()], 20);
    assert_eq!(peers[1].held().await, 0);
    stop(peers).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn what_an_answer_tells_beside_the_point_releases_held_runs() {
    let root = TempDir::new().expect("a directory");
    let peers = peers(root.path(), 3, Duration::from_millis(2)).await;
    see(&peers, |number| number == 2);
    let s = [stream("s")];
    let table = peers[0].table().await;
    peers[0].send(vec![run(&s[0], 1, 0, 5)]).await;
    committed(&table, &s, 5).await;
    peers[1].send(vec![run(&s[0], 1, 0, 10)]).await;
    committed(&peers[1].table().await, &s, 10).await;
    // To this pod the one is there already and the other has to wait; the answer to the one says that it need not.
    peers[0].send(vec![run(&s[0], 1, 0, 5), run(&s[0], 1, 10, 15)]).await;
    committed(&peers[1].table().await, &s, 15).await;
    assert_eq!(peers[0].pod.reader().check_prefixes()["s#1"], 15);
    stop(peers).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_home_that_comes_back_reads_what_it_has_missed() {
    let root = TempDir::new().expect("a directory");
    let peers = peers(root.path(), 3, Duration::from_millis(2)).await;
    let (s, progress) = (stream("s"), Arc::new(StreamProgress::default()));
    see(&peers, |number| number == 1);
    peers[0].table().await.follow(&s, progress.clone());
    for round in 0..6 {
        let home = 1 + usize::try_from(round % 2).expect("small");
        see(&peers, |number| number == home);
        let before = peers[home].served.committed.load(Ordering::SeqCst);
        peers[0].send(vec![run(&s, 1, round * 10, round * 10 + 10)]).await;
        told(&progress, round * 10 + 10).await;
        let by_home = peers[home].served.committed.load(Ordering::SeqCst) - before;
        // The first asker of a home that was not there yet registers too.
        assert!(by_home >= 1, "round {round}: not committed by its home");
    }
    assert_eq!(peers[0].pod.reader().check_prefixes()[s.as_str()], 60);
    stop(peers).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_home_elsewhere_forgets_what_the_only_log_is_past() {
    let root = TempDir::new().expect("a directory");
    let peers = peers(root.path(), 2, Duration::from_millis(2)).await;
    see(&peers, |number| number == 1);
    let table = peers[0].table().await;
    let pass = async || {
        let (stream, progress) = (StreamId::ephemeral(), Arc::new(StreamProgress::default()));
        table.follow(&stream, progress.clone());
        peers[0].send(vec![run(&stream, 0, 0, 3)]).await;
        told(&progress, 3).await;
        table.unfollow(&stream, Some(3));
    };
    let streams = async || {
        let described = peers[1].pod.tables.describe(&name()).await.expect("described");
        described["streams"].as_u64().expect("a number")
    };
    let mut most = 0;
    let shrinks = async {
        loop {
            pass().await;
            let now = streams().await;
            if now + 5 < most {
                return;
            }
            most = most.max(now);
        }
    };
    tokio::time::timeout(DEADLINE, shrinks).await.expect("streams are forgotten");
    // Another log may have runs of any stream.
    peers[1].send(vec![run(&stream("r"), 1, 0, 3)]).await;
    committed(&table, &[stream("r")], 3).await;
    let before = streams().await;
    for _ in 0..most {
        pass().await;
    }
    assert_eq!(streams().await, before + most);
    assert_eq!(peers[0].pod.reader().check_prefixes()["r#1"], 3);
    stop(peers).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn files_for_other_metadata_are_written_anew() {
    let root = TempDir::new().expect("a directory");
    let peers = peers(root.path(), 2, Duration::from_millis(2)).await;
    see(&peers, |number| number == 1);
    let (s, reader) = (stream("s"), peers[0].pod.reader());
    let table = peers[0].table().await;
    peers[0].send(vec![run(&s, 1, 0, 10)]).await;
    committed(&table, std::slice::from_ref(&s), 10).await;
    let metadata = reader.actions(0).into_iter().find(|action| !action["metaData"].is_null());
    let mut text = metadata.expect("metadata").to_string();
    // A pod may have heard of the column before it writes: then nothing is written anew, and another one is added.
    for round in 1..=20 {
        // A foreign writer adds a column.
        let column = format!("more_{round}");
        let field =
            format!(r#"{{\"name\":\"{column}\",\"type\":\"string\",\"nullable\":true,\"metadata\":{{}}}},"#);
        let wider = text.replace(r#"\"fields\":["#, &format!(r#"\"fields\":[{field}"#));
        assert!(wider.len() > text.len(), "{text}");
        std::fs::write(reader.log(reader.version() + 1), format!("{wider}\n")).expect("written");
        text = wider;
        let next = 10 * round;
        peers[0].send(vec![run(&s, 1, next, next + 10)]).await;
        committed(&table, std::slice::from_ref(&s), next + 10).await;
        assert_eq!(reader.check_prefixes()[s.as_str()], next + 10);
        let last = reader.adds(reader.version()).pop().expect("a file");
        assert!(reader.rows(&last)[0].column_by_name(&column).is_some(), "the file has the new column");
        if peers[1].served.commits.load(Ordering::SeqCst) > round + 1 {
            return stop(peers).await;
        }
    }
    panic!("no file was refused that was made for other metadata");
}

/// What happens to a pool between two runs of its streams.
struct Script {
    random: StdRng,
    root: TempDir,
    peers: Vec<Peer>,
    /// Each pod that hangs is waited for: that takes time.
    may_hang: bool,
}

impl Script {
    async fn step(&mut self) {
        let which = self.random.random_range(0..self.peers.len());
        match self.random.random_range(0..20) {
            // One pod alone learns of a change: two are home, or none.
            0..5 => {
                let active: Vec<bool> = self.peers.iter().map(|_| self.random.random_bool(0.6)).collect();
                let phase = |active| if active { Phase::Active } else { Phase::Draining };
                let view = self.peers.iter().zip(&active).map(|(peer, active)| peer.view(phase(*active)));
                self.peers[which].pool.update(PoolView::new(view));
            }
            5..7 => {
                let only = self.random.random_range(0..self.peers.len());
                see(&self.peers, |number| number == only);
            }
            7..9 => self.fault(which, Fault::LostLoudly),
            9 if self.may_hang => self.fault(which, Fault::LostSilently),
            10 => self.fault(which, Fault::Refused),
            11 if self.may_hang => self.peers[which].served.hangs.store(true, Ordering::SeqCst),
            11..14 => self.peers[which].served.hangs.store(false, Ordering::SeqCst),
            14 => self.restart(which).await,
            15 => self.peers[which].pod.drain().await,
            _ => tokio::task::yield_now().await,
        }
    }

    /// Waits until all is in the table; else says what each pod has.
    async fn is_committed(&self, streams: &[StreamId]) {
        let table = self.peers[0].table().await;
        let all = committed(&table, streams, RECORDS);
        if tokio::time::timeout(DEADLINE / 2, all).await.is_err() {
            for peer in &self.peers {
                println!("{}: {}", peer.id, peer.pod.tables.describe(&name()).await.expect("described"));
            }
            panic!("not committed: {:?}", self.peers[0].pod.reader().check_prefixes());
        }
    }

    fn fault(&self, which: usize, fault: Fault) {
        self.peers[which].served.faults.lock().expect("no panic").push(fault);
    }

    async fn restart(&mut self, which: usize) {
        let (id, log) = self.peers.remove(which).kill().await;
        let peer = Peer::start(self.root.path(), id, log, INTERVAL).await;
        self.peers.insert(which, peer);
        // Its address is another one.
        see(&self.peers, |_| true);
    }
}

const INTERVAL: Duration = Duration::from_millis(10);
const RECORDS: u64 = 80;

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn whoever_is_home_each_version_is_a_prefix_and_nothing_is_lost() {
    for seed in 0..4 {
        println!("seed {seed}");
        let begun = Instant::now();
        let mut random = StdRng::seed_from_u64(seed);
        let root = TempDir::new().expect("a directory");
        let peers = peers(root.path(), 3, INTERVAL).await;
        see(&peers, |_| true);
        let streams = ["a", "b", "c", "d"].map(stream);
        let runs = scattered(&mut random, &streams);
        let mut script = Script { random, root, peers, may_hang: seed % 2 == 0 };
        for chunk in runs.chunks(3) {
            script.step().await;
            let which = script.random.random_range(0..script.peers.len());
            script.peers[which].send(chunk.to_vec()).await;
        }
        see(&script.peers, |_| true);
        script.peers.iter().for_each(|peer| peer.served.hangs.store(false, Ordering::SeqCst));
        script.peers.iter().for_each(|peer| peer.served.faults.lock().expect("no panic").clear());
        script.is_committed(&streams).await;
        for peer in &script.peers {
            peer.pod.drain().await;
            assert_eq!(peer.held().await, 0);
        }
        let prefixes = script.peers[0].pod.reader().check_prefixes();
        assert_eq!(prefixes.len(), streams.len());
        assert!(prefixes.values().all(|length| *length == RECORDS), "{prefixes:?}");
        stop(script.peers).await;
        println!("after {:?}", begun.elapsed());
    }
}

/// Runs that cover the streams, overlap, and come in any order; some come twice.
fn scattered(random: &mut StdRng, streams: &[StreamId]) -> Vec<Run> {
    let mut runs = Vec::new();
    for stream in streams {
        let mut start: u64 = 0;
        while start < RECORDS {
            let end = (start + random.random_range(1..8)).min(RECORDS);
            runs.push(run(stream, 1, start.saturating_sub(random.random_range(0..4)), end));
            start = end;
        }
    }
    let again: Vec<Run> = runs.iter().filter(|_| random.random_bool(0.4)).cloned().collect();
    runs.extend(again);
    // Mostly in order, as streams come: a run moves a few places.
    for at in 0..runs.len() {
        let with = (at + random.random_range(0..12)).min(runs.len() - 1);
        runs.swap(at, with);
    }
    runs
}

/// Who is home while pods flush.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Homes {
    /// Each pod knows of itself alone.
    Own,
    /// The ring's.
    One,
}

/// Pods that each send a batch as soon as the last one is committed, for a while: versions made in a second, and how long
/// records waited, in order.
async fn flushing(count: usize, interval: Duration, homes: Homes) -> (f64, Vec<Duration>) {
    const LASTS: Duration = Duration::from_secs(3);
    let root = TempDir::new().expect("a directory");
    let peers = peers(root.path(), count, interval).await;
    if homes != Homes::Own {
        see(&peers, |_| true);
    }
    let mut sending = Vec::new();
    for (number, peer) in peers.iter().enumerate() {
        let (table, s) = (peer.table().await, stream(&format!("s{number}")));
        let progress = Arc::new(StreamProgress::default());
        table.follow(&s, progress.clone());
        sending.push(async move {
            let (mut waits, begun, mut next) = (Vec::new(), Instant::now(), 0);
            while begun.elapsed() < LASTS {
                peer.pod.offer(&table, batch(&table, vec![run(&s, 1, next, next + 10)])).await;
                next += 10;
                let sent = Instant::now();
                told(&progress, next).await;
                waits.push(sent.elapsed());
            }
            waits
        });
    }
    let (reader, begun) = (peers[0].pod.reader(), Instant::now());
    let before = reader.version();
    let mut waits = futures_util::future::join_all(sending).await.concat();
    let rate = (reader.version() - before) as f64 / begun.elapsed().as_secs_f64();
    waits.sort();
    reader.check_prefixes();
    stop(peers).await;
    (rate, waits)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn the_rate_of_commits_does_not_grow_with_the_pods() {
    let interval = Duration::from_millis(250);
    let most = 1.0 / interval.as_secs_f64();
    for (count, homes) in [(1, Homes::One), (2, Homes::One), (4, Homes::One), (4, Homes::Own)] {
        let (rate, waits) = flushing(count, interval, homes).await;
        say(count, homes, rate, &waits);
        // The first commit of a pod that nobody knew of yet comes at once.
        assert!(homes == Homes::Own || rate <= most + 2.0, "{count} pods: {rate} commits/s");
    }
}

fn say(count: usize, homes: Homes, rate: f64, waits: &[Duration]) {
    let at = |part: f64| waits[((waits.len() - 1) as f64 * part) as usize];
    let (p50, p99, most) = (at(0.5), at(0.99), at(1.0));
    println!(
        "{count} pods, {homes:?}: {rate:.1} commits/s, to committed p50 {p50:?} p99 {p99:?} max {most:?}"
    );
}

/// Each pod has to go on after each move, and none may take a home for lost, which would cost it a second.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_home_that_moves_holds_up_nobody() {
    const MOVES: usize = 12;
    let root = TempDir::new().expect("a directory");
    let peers = peers(root.path(), 3, Duration::from_millis(100)).await;
    see(&peers, |_| true);
    let rounds: Vec<AtomicU64> = peers.iter().map(|_| AtomicU64::new(0)).collect();
    let mut sending = Vec::new();
    for (number, (peer, rounds)) in peers.iter().zip(&rounds).enumerate() {
        let (table, s) = (peer.table().await, stream(&format!("s{number}")));
        let progress = Arc::new(StreamProgress::default());
        table.follow(&s, progress.clone());
        sending.push(async move {
            for round in 0.. {
                let next = round * 10;
                peer.pod.offer(&table, batch(&table, vec![run(&s, 1, next, next + 10)])).await;
                told(&progress, next + 10).await;
                rounds.fetch_add(1, Ordering::SeqCst);
            }
        });
    }
    let moving = async {
        for home in 0..MOVES {
            see(&peers, |number| number == home % peers.len());
            // The first one may have been on its way already.
            let until: Vec<u64> = rounds.iter().map(|rounds| rounds.load(Ordering::SeqCst) + 2).collect();
            while rounds.iter().zip(&until).any(|(rounds, until)| rounds.load(Ordering::SeqCst) < *until) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
    };
    let moved = async {
        tokio::select! {
            biased; // sending never ends
            () = moving => {}
            _ = futures_util::future::join_all(sending) => {}
        }
    };
    tokio::time::timeout(DEADLINE, moved).await.expect("all go on after each move");
    let passed_over: Vec<u64> = peers.iter().map(|peer| peer.pool.passed_over()).collect();
    assert_eq!(passed_over, [0, 0, 0], "homes that were taken for lost");
    peers[0].pod.reader().check_prefixes();
    stop(peers).await;
}
