//! The log in a store that fails, loses replies and has rivals; time is the tests' own.

use std::collections::BTreeSet;
use std::fmt;
use std::ops::Range;

use futures_util::stream::BoxStream;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, Result as StoreResult,
};
use tokio::sync::oneshot;

use super::super::Wal;
use super::*;

/// What is about to happen in the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Call {
    Put,
    Get,
    Delete,
    /// With a fault nothing is listed: it is behind.
    List,
}

/// What goes wrong with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    /// Nothing is done.
    Refused,
    /// It is done, and nobody is told.
    Lost,
}

type Plan = Box<dyn Fn(Call, &Path) -> Option<Fault> + Send + Sync>;

/// A store in memory in which calls fail as the test plans it.
#[derive(Default)]
struct Faulty {
    store: InMemory,
    plan: Mutex<Option<Plan>>,
    /// Puts wait here until the test lets them go on.
    puts: Option<Arc<Semaphore>>,
}

impl Faulty {
    fn plan(&self, plan: impl Fn(Call, &Path) -> Option<Fault> + Send + Sync + 'static) {
        *self.plan.lock().expect("no panic") = Some(Box::new(plan));
    }

    fn fault(&self, call: Call, path: &Path) -> Option<Fault> {
        self.plan.lock().expect("no panic").as_ref().and_then(|plan| plan(call, path))
    }
}

fn on_purpose() -> object_store::Error {
    object_store::Error::Generic { store: "test", source: "on purpose".into() }
}

impl fmt::Debug for Faulty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Faulty")
    }
}

impl fmt::Display for Faulty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Faulty")
    }
}

#[tonic::async_trait]
impl ObjectStore for Faulty {
    async fn put_opts(
        &self,
        path: &Path,
        payload: PutPayload,
        options: PutOptions,
    ) -> StoreResult<PutResult> {
        if let Some(puts) = &self.puts {
            puts.acquire().await.expect("never closed").forget();
        }
        let fault = self.fault(Call::Put, path);
        if fault == Some(Fault::Refused) {
            return Err(on_purpose());
        }
        let put = self.store.put_opts(path, payload, options).await;
        if fault == Some(Fault::Lost) { Err(on_purpose()) } else { put }
    }

    async fn put_multipart_opts(
        &self,
        path: &Path,
        options: PutMultipartOptions,
    ) -> StoreResult<Box<dyn MultipartUpload>> {
        self.store.put_multipart_opts(path, options).await
    }

    async fn get_opts(&self, path: &Path, options: GetOptions) -> StoreResult<GetResult> {
        match self.fault(Call::Get, path) {
            Some(_) => Err(on_purpose()),
            None => self.store.get_opts(path, options).await,
        }
    }

    fn delete_stream(
        &self,
        paths: BoxStream<'static, StoreResult<Path>>,
    ) -> BoxStream<'static, StoreResult<Path>> {
        let refused: BTreeSet<String> = ["header.json", "first.json"].map(str::to_owned).into();
        let is_refused = self.fault(Call::Delete, &Path::default()).is_some();
        let paths = paths.map(move |path| match path {
            Ok(path) if is_refused && !path.filename().is_some_and(|name| refused.contains(name)) => {
                Err(on_purpose())
            }
            path => path,
        });
        self.store.delete_stream(paths.boxed())
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, StoreResult<ObjectMeta>> {
        match self.fault(Call::List, &Path::default()) {
            Some(_) => futures_util::stream::empty().boxed(),
            None => self.store.list(prefix),
        }
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> StoreResult<ListResult> {
        self.store.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> StoreResult<()> {
        self.store.copy_opts(from, to, options).await
    }
}

/// A store, the logs in it, and what ended them.
struct Rig {
    store: Arc<Faulty>,
    logs: LogStore,
    failures: Arc<Mutex<Vec<String>>>,
}

impl Rig {
    fn new(store: Faulty) -> Self {
        Self::of(store, None)
    }

    /// `directory`: puts are to be taken for flushes of a file system.
    fn of(store: Faulty, directory: Option<&str>) -> Self {
        let store = Arc::new(store);
        let shared: Arc<dyn ObjectStore> = Arc::clone(&store) as _;
        let logs = LogStore::new(shared, &Path::from("tables"), directory.map(Into::into));
        Self { store, logs, failures: Arc::default() }
    }

    async fn begin(&self) -> Wal {
        self.begin_with(|_| {}).await
    }

    async fn begin_with(&self, change: impl FnOnce(&mut ObjectLogConfig)) -> Wal {
        let mut config = ObjectLogConfig {
            owner: pod("pod-1"),
            interval: Duration::from_millis(50),
            group_bytes_max: 64 << 10,
            payload_bytes_max: 1 << 20,
            bytes_max: 64 << 20,
        };
        change(&mut config);
        let failures = Arc::clone(&self.failures);
        let on_failure = move |error: &WalError| failures.lock().expect("no panic").push(error.to_string());
        Wal::begin(&self.logs, config, Box::new(on_failure)).await.expect("begun")
    }

    fn failures(&self) -> Vec<String> {
        self.failures.lock().expect("no panic").clone()
    }

    async fn seal(&self, wal: &Wal) -> Option<SealedLog> {
        SealedLog::seal(&self.logs, wal.log_id(), &pod("pod-2")).await.expect("sealed")
    }

    /// Names of the log's objects.
    async fn names(&self, wal: &Wal) -> Vec<String> {
        let folder = Path::from(format!("tables/_sluice/wal/{}", wal.log_id().0));
        let listed: Vec<_> = self.store.store.list(Some(&folder)).collect().await;
        let name = |meta: ObjectMeta| meta.location.filename().expect("a name").to_owned();
        listed.into_iter().map(|meta| name(meta.expect("listed"))).collect()
    }

    /// Takes objects away, as nobody should.
    async fn delete(&self, wal: &Wal, numbers: Range<u64>) {
        let paths = numbers.map(|number| Ok(self.path(wal, number))).collect::<Vec<_>>();
        self.store
            .store
            .delete_stream(futures_util::stream::iter(paths).boxed())
            .for_each(async |_| {})
            .await;
    }

    fn path(&self, wal: &Wal, number: u64) -> Path {
        Path::from(format!("tables/_sluice/wal/{}/{number:020}", wal.log_id().0))
    }
}

fn pod(name: &str) -> PodId {
    name.parse().expect("valid")
}

fn payload(n: u64) -> Bytes {
    format!("entry {n}").into()
}

async fn append(wal: &Wal, payload: Bytes) -> oneshot::Receiver<Durable> {
    let (told, durable) = oneshot::channel();
    let slot = wal.slot().await;
    wal.append(slot, vec![payload], Box::new(move |durable| drop(told.send(durable)))).expect("fits");
    durable
}

/// One group an entry.
async fn put(wal: &Wal, numbers: Range<u64>) -> Vec<Durable> {
    let mut durables = Vec::new();
    for n in numbers {
        durables.push(append(wal, payload(n)).await.await.expect("becomes durable"));
    }
    durables
}

/// All entries of a sealed log, and what they are kept by.
async fn read(sealed: &mut SealedLog) -> (Vec<Bytes>, Vec<Durable>) {
    let (mut entries, mut durables) = (Vec::new(), Vec::new());
    while let Some(group) = sealed.next_group().await.expect("whole") {
        for (durable, entry) in group {
            entries.push(entry);
            durables.push(durable);
        }
    }
    (entries, durables)
}

fn payloads(numbers: Range<u64>) -> Vec<Bytes> {
    numbers.map(payload).collect()
}

/// Until a task of the log has come to do something; the test's time stands still meanwhile.
async fn until(what: &str, happened: impl AsyncFn() -> bool) {
    for _ in 0..10_000 {
        if happened().await {
            return;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    panic!("{what} did not happen");
}

#[tokio::test(start_paused = true)]
async fn entries_go_out_as_one_object_when_they_have_waited_or_are_enough() {
    let rig = Rig::new(Faulty::default());
    let wal = rig.begin().await;
    let begun = Instant::now();
    let waiting: Vec<_> = [append(&wal, payload(0)).await, append(&wal, payload(1)).await].into();
    let mut durables = Vec::new();
    for durable in waiting {
        durables.push(durable.await.expect("durable"));
    }
    assert_eq!(begun.elapsed().as_millis(), 50, "they have waited for others");
    assert_eq!(durables.iter().map(|durable| durable.position().segment).collect::<Vec<_>>(), [1, 1]);
    assert_eq!(wal.read_back(&durables[1]).await.expect("readable"), payload(1));
    let begun = Instant::now();
    let large: Vec<_> =
        [append(&wal, vec![1; 40 << 10].into()).await, append(&wal, vec![2; 40 << 10].into()).await].into();
    for durable in large {
        durables.push(durable.await.expect("durable"));
    }
    assert!(begun.elapsed().as_millis() <= 51, "the first goes out at once, the other when it has waited");
    assert_eq!(durables[3].position().segment, 3, "a group takes no more than its size");
    let begun = Instant::now();
    let last = append(&wal, payload(2)).await;
    wal.settled().await;
    assert_eq!(begun.elapsed().as_millis(), 0, "somebody waits for it");
    last.await.expect("durable").release();
    let (status, names) = (wal.status(), rig.names(&wal).await);
    assert!(
        names.contains(&format!("{:020}", 4)) && status.outstanding == 4 && !status.full,
        "{names:?} {status:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn what_is_told_is_read_in_order_by_whoever_takes_the_log_over() {
    let rig = Rig::new(Faulty::default());
    let wal = rig.begin().await;
    let durables = put(&wal, 0..7).await;
    let mut sealed = rig.seal(&wal).await.expect("there");
    assert_eq!(sealed.header.owner, pod("pod-1"));
    let (entries, kept) = read(&mut sealed).await;
    assert_eq!(entries, payloads(0..7));
    assert_eq!(wal.read_back(&kept[3]).await.expect("readable"), payload(3));
    // The writer finds out at its next put, and nothing of that is told.
    let untold = append(&wal, payload(7)).await;
    untold.await.expect_err("never durable");
    let failures = rig.failures();
    assert!(matches!(&failures[..], [only] if only.contains("was taken over by pod pod-2")), "{failures:?}");
    kept.into_iter().for_each(Durable::release);
    sealed.released().await;
    sealed.delete().await.expect("deleted");
    assert_eq!(rig.names(&wal).await, [format!("{:020}", 8)], "the seal stays");
    assert!(rig.seal(&wal).await.is_none(), "it is done with");
    drop(durables);
}

#[tokio::test(start_paused = true)]
async fn a_stopped_writer_finds_the_seal_however_late_and_tells_nothing() {
    let rig = Rig::new(Faulty { puts: Some(Arc::new(Semaphore::new(3))), ..Faulty::default() });
    let puts = rig.store.puts.clone().expect("there");
    let wal = rig.begin().await; // takes one
    put(&wal, 0..2).await;
    // Three groups are on their way and do not come through: the process is stopped there.
    let mut untold = Vec::new();
    for n in 2..5 {
        untold.push(append(&wal, payload(n)).await);
        tokio::time::sleep(Duration::from_millis(60)).await;
    }
    puts.add_permits(4);
    // Of those that wait for a permit the first ones come first: the adopter's seal is behind the three.
    let mut sealed = rig.seal(&wal).await.expect("there");
    let (entries, kept) = read(&mut sealed).await;
    assert!(entries.len() >= 2 && payloads(0..5).starts_with(&entries), "{entries:?}");
    kept.into_iter().for_each(Durable::release);
    puts.add_permits(1000);
    sealed.delete().await.expect("deleted");
    let late = append(&wal, payload(9)).await;
    late.await.expect_err("never durable");
    assert_eq!(rig.failures().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_log_that_says_nothing_finds_out_too() {
    let rig = Rig::new(Faulty::default());
    let wal = rig.begin().await;
    rig.seal(&wal).await.expect("there").delete().await.expect("deleted");
    tokio::time::sleep(LOOK_INTERVAL * 2).await;
    assert!(rig.failures().concat().contains("was taken over by pod pod-2"), "{:?}", rig.failures());
}

#[tokio::test(start_paused = true)]
async fn lost_replies_and_errors_cost_time_and_nothing_else() {
    for fault in [Fault::Lost, Fault::Refused] {
        let rig = Rig::new(Faulty::default());
        let wal = rig.begin().await;
        let turn = Mutex::new(0);
        rig.store.plan(move |call, path| {
            let is_group = call == Call::Put && path.filename().is_some_and(|name| name.len() == 20);
            let mut turn = turn.lock().expect("no panic");
            *turn += 1;
            (is_group && *turn % 2 == 0).then_some(fault)
        });
        let waiting = futures_util::future::join_all((0..20).map(|n| append(&wal, payload(n)))).await;
        futures_util::future::join_all(waiting)
            .await
            .into_iter()
            .for_each(|told| drop(told.expect("durable")));
        put(&wal, 20..40).await;
        rig.store.plan(|_, _| None);
        let (entries, _) = read(&mut rig.seal(&wal).await.expect("there")).await;
        assert_eq!(entries, payloads(0..40), "{fault:?}");
        assert_eq!(rig.failures(), [""; 0], "{fault:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn in_a_directory_a_put_that_failed_and_is_there_was_not_flushed() {
    let rig = Rig::of(Faulty::default(), Some("/nowhere"));
    let wal = rig.begin().await;
    let turn = AtomicOnce::default();
    rig.store.plan(move |call, path| {
        let is_group = call == Call::Put && path.filename().is_some_and(|name| name.len() == 20);
        (is_group && turn.first()).then_some(Fault::Lost)
    });
    append(&wal, payload(0)).await.await.expect_err("never durable");
    let failures = rig.failures();
    assert!(matches!(&failures[..], [only] if only.starts_with("cannot write")), "{failures:?}");
    // One that is not there is simply written again.
    let rig = Rig::of(Faulty::default(), Some("/nowhere"));
    let wal = rig.begin().await;
    let turn = AtomicOnce::default();
    rig.store.plan(move |call, path| {
        let is_group = call == Call::Put && path.filename().is_some_and(|name| name.len() == 20);
        (is_group && turn.first()).then_some(Fault::Refused)
    });
    put(&wal, 0..1).await;
    assert_eq!(rig.failures(), [""; 0]);
}

#[derive(Default)]
struct AtomicOnce(std::sync::atomic::AtomicBool);

impl AtomicOnce {
    fn first(&self) -> bool {
        !self.0.swap(true, std::sync::atomic::Ordering::SeqCst)
    }
}

#[tokio::test(start_paused = true)]
async fn a_store_that_is_away_makes_slots_wait_and_is_left_when_it_is_back() {
    let rig = Rig::new(Faulty::default());
    let wal = rig.begin().await;
    rig.store.plan(|call, _| (call == Call::Put).then_some(Fault::Refused));
    let waiting = append(&wal, payload(0)).await;
    until("the log is told to be full", async || wal.status().full).await;
    assert!(tokio::time::timeout(Duration::from_secs(60), wal.slot()).await.is_err(), "no room");
    rig.store.plan(|_, _| None);
    waiting.await.expect("durable").release();
    assert!(!wal.status().full);
    drop(wal.slot().await);
}

#[tokio::test(start_paused = true)]
async fn released_groups_are_deleted_in_order_and_make_room() {
    let rig = Rig::new(Faulty::default());
    let wal =
        rig.begin_with(|config| (config.bytes_max, config.payload_bytes_max) = (5 * 8_192, 8_192)).await;
    let mut durables = put(&wal, 0..5).await;
    assert!(wal.status().full && tokio::time::timeout(Duration::from_secs(9), wal.slot()).await.is_err());
    // The first one is still needed: nothing can go.
    durables.drain(1..).for_each(Durable::release);
    tokio::time::sleep(TRIM_PAUSE * 3).await;
    assert_eq!((rig.names(&wal).await.len(), wal.trimmed().segment), (6, 1));
    durables.drain(..).for_each(Durable::release);
    until("all is trimmed", async || wal.trimmed().segment == 6).await;
    assert_eq!(rig.names(&wal).await, ["first.json", "header.json"]);
    // What is trimmed is no end: the adopter goes on behind it.
    let kept = put(&wal, 5..7).await;
    let (entries, _) = read(&mut rig.seal(&wal).await.expect("there")).await;
    assert_eq!(entries, payloads(5..7));
    drop(kept);
}

#[tokio::test(start_paused = true)]
async fn all_of_a_drained_log_is_deleted() {
    let rig = Rig::new(Faulty::default());
    let wal = rig.begin().await;
    put(&wal, 0..3).await.into_iter().for_each(Durable::release);
    wal.close_for_good().await.expect("deleted");
    assert_eq!(rig.names(&wal).await, [""; 0]);
    assert!(rig.seal(&wal).await.is_none());
    assert_eq!(rig.logs.list().await.expect("listed"), []);
}

#[tokio::test(start_paused = true)]
async fn a_list_that_is_behind_leaves_no_records_without_a_header() {
    let rig = Rig::new(Faulty::default());
    let (drained, adopted) = (rig.begin().await, rig.begin().await);
    let kept = [put(&drained, 0..3).await, put(&adopted, 0..3).await];
    let mut sealed = rig.seal(&adopted).await.expect("there");
    read(&mut sealed).await;
    rig.store.plan(|call, _| (call == Call::List).then_some(Fault::Refused));
    drained.close_for_good().await.expect("deleted");
    sealed.delete().await.expect("deleted");
    assert_eq!(rig.names(&drained).await, [""; 0]);
    assert_eq!(rig.names(&adopted).await, [format!("{:020}", 4)]);
    drop(kept);
}

#[tokio::test(start_paused = true)]
async fn what_a_stopped_writer_puts_behind_the_seal_when_all_is_done_is_no_damage() {
    let rig = Rig::new(Faulty::default());
    let wal = rig.begin().await;
    drop(put(&wal, 0..3).await);
    let late = rig.store.store.get_opts(&rig.path(&wal, 3), GetOptions::default()).await.expect("there");
    let late = late.bytes().await.expect("read");
    let mut sealed = rig.seal(&wal).await.expect("there");
    read(&mut sealed).await;
    sealed.delete().await.expect("deleted");
    rig.logs.folder(wal.log_id()).put_new(6, late.clone()).await.expect("put");
    assert_eq!(rig.logs.header(wal.log_id()).await.expect("done with"), None);
    // One before the seal was told of, and must not be without a header.
    rig.logs.folder(wal.log_id()).put_new(3, late).await.expect("put");
    let missed = rig.logs.header(wal.log_id()).await.expect_err("records without a header").to_string();
    assert!(missed.contains("header.json"), "{missed}");
}

#[tokio::test(start_paused = true)]
async fn two_adopters_read_the_same_and_one_deletes_it_under_the_other() {
    let rig = Rig::new(Faulty::default());
    let wal = rig.begin().await;
    put(&wal, 0..6).await;
    let (mut one, mut two) = (rig.seal(&wal).await.expect("there"), rig.seal(&wal).await.expect("there"));
    let group = two.next_group().await.expect("whole").expect("one");
    let (entries, kept) = read(&mut one).await;
    assert_eq!((entries, &group[0].1), (payloads(0..6), &payload(0)));
    kept.into_iter().for_each(Durable::release);
    one.delete().await.expect("deleted");
    let error = two.next_group().await.err().map(|error| error.to_string());
    assert!(error.as_ref().is_some_and(|error| error.contains("is done with")), "{error:?}");
    let error = wal.read_back(&group[0].0).await.expect_err("deleted").to_string();
    assert!(error.contains("is done with"), "{error}");
}

#[tokio::test(start_paused = true)]
async fn an_adopter_that_ends_midway_leaves_all_to_the_next() {
    let rig = Rig::new(Faulty::default());
    let wal = rig.begin().await;
    put(&wal, 0..6).await;
    let mut first = rig.seal(&wal).await.expect("there");
    first.next_group().await.expect("whole").expect("one");
    drop(first);
    let mut second = rig.seal(&wal).await.expect("there");
    let (entries, kept) = read(&mut second).await;
    assert_eq!(entries, payloads(0..6));
    kept.into_iter().for_each(Durable::release);
    // It gets as far as some deletes: the next one finds nothing to read, and ends it.
    rig.store.plan(|call, _| (call == Call::Delete).then_some(Fault::Refused));
    second.delete().await.expect_err("refused");
    rig.store.plan(|_, _| None);
    let mut third = rig.seal(&wal).await.expect("there");
    assert_eq!(read(&mut third).await.0, payloads(0..0), "all was committed before");
    third.delete().await.expect("deleted");
    assert_eq!(rig.names(&wal).await, [format!("{:020}", 7)]);
}

#[tokio::test(start_paused = true)]
async fn a_seal_at_a_number_that_was_trimmed_is_void() {
    let rig = Rig::new(Faulty::default());
    let wal = rig.begin().await;
    put(&wal, 0..4).await.into_iter().for_each(Durable::release);
    until("all is trimmed", async || wal.trimmed().segment == 5).await;
    // An adopter that looked before that, and was stopped until now.
    let folder = rig.logs.folder(wal.log_id());
    let seal = form::encode_seal(wal.log_id(), &pod("pod-1"), &pod("pod-3"), 2);
    folder.put_new(2, seal).await.expect("put");
    let kept = put(&wal, 4..6).await;
    let (entries, _) = read(&mut rig.seal(&wal).await.expect("there")).await;
    assert_eq!(entries, payloads(4..6));
    drop(kept);
}

#[tokio::test(start_paused = true)]
async fn what_is_damaged_or_missing_is_named_and_never_passed_over() {
    let check = async |what: &str, number: u64, change: fn(&mut Vec<u8>) -> bool| {
        let rig = Rig::new(Faulty::default());
        let wal = rig.begin().await;
        put(&wal, 0..9).await;
        let path = rig.path(&wal, number);
        let object = rig.store.store.get_opts(&path, GetOptions::default()).await.expect("there");
        let mut bytes = object.bytes().await.expect("read").to_vec();
        let kept = bytes.clone();
        match change(&mut bytes) {
            true => {
                drop(rig.store.store.put_opts(&path, bytes.into(), PutOptions::default()).await.expect("put"))
            }
            false => rig.delete(&wal, number..number + 1).await,
        }
        let mut whole = 0;
        let error = match SealedLog::seal(&rig.logs, wal.log_id(), &pod("pod-2")).await {
            Ok(sealed) => {
                let mut sealed = sealed.expect("there");
                loop {
                    match sealed.next_group().await {
                        Ok(Some(_)) => whole += 1,
                        Ok(None) => panic!("{what} of group {number}: not noticed"),
                        Err(error) => break error,
                    }
                }
            }
            Err(error) => error,
        };
        let (error, name) = (error.to_string(), format!("{number:020}"));
        assert!(error.contains(&name) && error.contains("corrupt"), "{what} of group {number}: {error}");
        // What is before it is read all the same.
        assert_eq!(whole, number - 1, "{what} of group {number}");
        // The log is not ended, nor deleted: with the object restored all is there.
        assert!(rig.logs.header(wal.log_id()).await.expect("read").is_some());
        drop(rig.store.store.put_opts(&rig.path(&wal, number), kept.into(), PutOptions::default()).await);
        let (entries, _) = read(&mut rig.seal(&wal).await.expect("there")).await;
        assert_eq!(entries, payloads(0..9), "{what} of group {number}, restored");
        append(&wal, payload(9)).await.await.expect_err("its writer is fenced");
    };
    for number in [1, 2, 5, 8, 9] {
        check("a bit of the header", number, |bytes| {
            bytes[40] ^= 1;
            true
        })
        .await;
        check("a bit of an entry", number, |bytes| {
            bytes[BLOCK + 100] ^= 1;
            true
        })
        .await;
        check("a cut", number, |bytes| {
            bytes.truncate(BLOCK);
            true
        })
        .await;
        check("all bytes", number, |bytes| {
            bytes.clear();
            true
        })
        .await;
        // That the last one is missing nothing can show.
        if number < 9 {
            check("the object", number, |_| false).await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_gap_hides_nothing_before_it_whatever_is_behind_it() {
    let rig = Rig::new(Faulty::default());
    let wal = rig.begin().await;
    put(&wal, 0..30).await;
    let opened = async || {
        let mut sealed = rig.seal(&wal).await.expect("there");
        let mut whole = 0;
        loop {
            match sealed.next_group().await {
                Ok(group) => whole += u64::from(group.is_some()),
                Err(error) => return (whole, error.to_string()),
            }
        }
    };
    rig.delete(&wal, 12..13).await;
    // Another one behind it, whose object says nothing any more; and a long one.
    let cut = rig.path(&wal, 13);
    rig.store.store.put_opts(&cut, vec![7].into(), PutOptions::default()).await.expect("put");
    for numbers in [14..15, 20..30, 14..31] {
        rig.delete(&wal, numbers.clone()).await;
        let (whole, error) = opened().await;
        assert!(whole == 11 && error.contains(&format!("{:020}", 12)), "{numbers:?}: {whole} {error}");
    }
    // The first ones are gone, with what says that they had not to be there.
    rig.delete(&wal, 1..12).await;
    let (whole, error) = opened().await;
    assert!(whole == 0 && error.contains(&format!("{:020}", 1)), "{whole} {error}");
}

#[tokio::test(start_paused = true)]
async fn an_object_of_a_newer_program_is_refused_by_name() {
    let rig = Rig::new(Faulty::default());
    let wal = rig.begin().await;
    let header =
        format!("{{\"format\":2,\"log\":\"{}\",\"owner\":\"pod-1\",\"begun_us\":0}}", wal.log_id().0);
    let path = Path::from(format!("tables/_sluice/wal/{}/header.json", wal.log_id().0));
    rig.store.put_opts(&path, header.into_bytes().into(), PutOptions::default()).await.expect("put");
    let error =
        SealedLog::seal(&rig.logs, wal.log_id(), &pod("pod-2")).await.err().expect("newer").to_string();
    assert!(error.contains("format version 2") && error.contains("header.json"), "{error}");
}
