//! Delta on a store that fails.

use std::sync::atomic::{AtomicBool, Ordering};

use arrow::datatypes::Field;
use async_trait::async_trait;
use futures_util::stream::BoxStream;
use object_store::local::LocalFileSystem;
use object_store::{
    CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, PutMultipartOptions,
    PutOptions, PutPayload, PutResult, Result,
};
use tempfile::TempDir;
use tokio::runtime::Builder;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::*;

/// A store that answers with an error for a while.
#[derive(Debug, Default)]
struct Silent {
    store: InMemory,
    is_silent: AtomicBool,
}

impl fmt::Display for Silent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("silent")
    }
}

impl Silent {
    fn check(&self) -> Result<()> {
        if self.is_silent.load(Ordering::Relaxed) {
            return Err(object_store::Error::Generic { store: "silent", source: "503".into() });
        }
        Ok(())
    }
}

#[async_trait]
impl ObjectStore for Silent {
    async fn put_opts(&self, path: &Path, payload: PutPayload, options: PutOptions) -> Result<PutResult> {
        self.check()?;
        self.store.put_opts(path, payload, options).await
    }

    async fn put_multipart_opts(
        &self,
        path: &Path,
        options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.store.put_multipart_opts(path, options).await
    }

    async fn get_opts(&self, path: &Path, options: GetOptions) -> Result<GetResult> {
        self.check()?;
        self.store.get_opts(path, options).await
    }

    fn delete_stream(&self, paths: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        self.store.delete_stream(paths)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.store.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.store.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.store.copy_opts(from, to, options).await
    }
}

fn spec() -> TableSpec {
    let schema = Arc::new(Schema::new(vec![Field::new("n", DataType::Int64, true)]));
    TableSpec { schema, partition_columns: Vec::new(), properties: BTreeMap::new() }
}

#[tokio::test]
async fn a_table_that_storage_has_no_answer_for_is_not_invalid() {
    let dir = TempDir::new().expect("temporary directory");
    let directory = Path::from_absolute_path(dir.path()).expect("absolute");
    let silent = Arc::new(Silent { is_silent: true.into(), ..Silent::default() });
    let store: Arc<dyn ObjectStore> = Arc::<Silent>::clone(&silent);
    let delta = Delta::new(store);
    let made = delta.create(&directory, &spec().schema, &spec()).await;
    assert!(matches!(made, Err(DeltaError::NotMade(_))), "{made:?}");
    silent.is_silent.store(false, Ordering::Relaxed);
    delta.create(&directory, &spec().schema, &spec()).await.expect("created");
}

#[tokio::test]
async fn a_store_that_fails_does_not_make_a_table_vanish() {
    let dir = TempDir::new().expect("temporary directory");
    let directory = Path::from_absolute_path(dir.path()).expect("absolute");
    let silent = Arc::new(Silent::default());
    let store: Arc<dyn ObjectStore> = Arc::<Silent>::clone(&silent);
    // The kernel's own reads answer as ever: it is about ours.
    let delta = Delta::with_kernel_on(Arc::new(silent.store.clone()), store);
    delta.create(&directory, &spec().schema, &spec()).await.expect("created");
    let version = delta.load(&directory).await.expect("there");

    silent.is_silent.store(true, Ordering::Relaxed);
    assert!(matches!(delta.load(&directory).await, Err(DeltaError::Store(_))));
    assert!(matches!(delta.refresh(&version).await, Err(DeltaError::Store(_))));
    assert!(matches!(
        delta.commit(&version, Vec::new(), Vec::new()).await,
        Put::Unknown(DeltaError::Store(_))
    ));

    silent.is_silent.store(false, Ordering::Relaxed);
    assert_eq!(delta.refresh(&version).await.expect("there").number(), version.number());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_that_fails_is_no_table_that_is_gone() {
    let dir = TempDir::new().expect("temporary directory");
    let root = Path::from_absolute_path(dir.path().canonicalize().expect("there")).expect("a path");
    let delta = Delta::new(Arc::new(LocalFileSystem::new()));
    delta.create(&root, &spec().schema, &spec()).await.expect("made");
    let version = delta.load(&root).await.expect("there");
    // The name leads back to itself: the store can neither find it nor say that it is not there.
    let log = dir.path().join("_delta_log/00000000000000000000.json");
    std::fs::rename(&log, dir.path().join("aside")).expect("moved");
    std::os::unix::fs::symlink(&log, &log).expect("made");
    assert!(matches!(delta.refresh(&version).await, Err(DeltaError::Store(_))));
    assert!(matches!(delta.commit(&version, Vec::new(), Vec::new()).await, Put::Unknown(_)));
    std::fs::remove_file(&log).expect("removed");
    assert!(matches!(delta.commit(&version, Vec::new(), Vec::new()).await, Put::Conflict));
}

/// The kernel holds a thread while it waits for the store, which needs one too.
#[test]
fn more_tables_than_there_are_threads_commit_at_once() {
    let threads = KERNEL_CALLS_MAX + 1;
    let runtime =
        Builder::new_multi_thread().worker_threads(2).max_blocking_threads(threads).enable_all().build();
    runtime.expect("a runtime").block_on(async move {
        let dir = TempDir::new().expect("temporary directory");
        let root = Path::from_absolute_path(dir.path().canonicalize().expect("there")).expect("a path");
        let delta = Arc::new(Delta::new(Arc::new(LocalFileSystem::new())));
        let commit = |number: usize| {
            let (delta, directory) = (Arc::clone(&delta), root.clone().join(format!("t{number}")));
            async move {
                delta.create(&directory, &spec().schema, &spec()).await.expect("made");
                let version = delta.load(&directory).await.expect("there");
                delta.commit(&version, Vec::new(), vec![("a".to_owned(), 1)]).await
            }
        };
        let commits: JoinSet<Put> = (0..2 * threads).map(commit).collect();
        let done = timeout(Duration::from_secs(60), commits.join_all()).await.expect("none waits for ever");
        assert!(done.iter().all(|put| matches!(put, Put::Committed(_))), "{done:?}");
    });
}
