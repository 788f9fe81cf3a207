//! The tables' store as a faulty network would show it: slow, refusing, with answers lost, with lists behind the times.
//!
//! *Owns*: what a fault at a point means to the store's callers.
//! *Does not own*: when there is one (`shared::fault`); in builds without fault points this is not used.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::stream::BoxStream;
use futures_util::{FutureExt, StreamExt, TryStreamExt};
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore, PutMode,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, RenameOptions, Result,
};
use sluice_shared::fault::{self, Point, Then};

const NAME: &str = "faults";
/// The folder of a table's versions.
const VERSIONS: &str = "_delta_log";
/// The folder of logs, below that of what is Sluice's own.
const LOGS: [&str; 2] = ["_sluice", "wal"];

/// A store that does what it is told at the points of stores.
#[derive(Debug)]
pub(super) struct FaultyStore {
    store: Arc<dyn ObjectStore>,
}

/// What a store's operation has to do besides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Lie {
    None,
    LoseReply,
    Stale,
}

impl FaultyStore {
    /// As `store`, until there are faults.
    pub(super) fn new(store: Arc<dyn ObjectStore>) -> Self {
        Self { store }
    }
}

/// Waits as long as it is to, then refuses, or lets the operation go on.
async fn pass(point: Point) -> Result<Lie> {
    let Some(action) = fault::take(point) else { return Ok(Lie::None) };
    tokio::time::sleep(action.delay).await;
    match action.then {
        Then::Fail(errno) => Err(refused(point, &std::io::Error::from_raw_os_error(errno).to_string())),
        Then::LoseReply => Ok(Lie::LoseReply),
        Then::Stale => Ok(Lie::Stale),
        Then::GoOn | Then::Kill | Then::Drop => Ok(Lie::None),
    }
}

fn refused(point: Point, why: &str) -> Error {
    Error::Generic { store: NAME, source: format!("{}: {why}", point.name()).into() }
}

fn answered<T>(point: Point, lie: Lie, done: Result<T>) -> Result<T> {
    match lie {
        Lie::LoseReply => done.and_then(|_| Err(refused(point, "the answer was lost"))),
        Lie::None | Lie::Stale => done,
    }
}

/// A list without what came last to it.
async fn behind(listed: BoxStream<'static, Result<ObjectMeta>>) -> Result<Vec<ObjectMeta>> {
    let mut listed: Vec<ObjectMeta> = listed.try_collect().await?;
    if let Some(newest) = listed.iter().map(|meta| meta.last_modified).max() {
        listed.retain(|meta| meta.last_modified < newest);
    }
    Ok(listed)
}

fn listed(list: BoxStream<'static, Result<ObjectMeta>>) -> BoxStream<'static, Result<ObjectMeta>> {
    let looked = async {
        match pass(Point::StoreList).await {
            Ok(Lie::Stale) => match behind(list).await {
                Ok(listed) => futures_util::stream::iter(listed.into_iter().map(Ok)).boxed(),
                Err(error) => one(error),
            },
            Ok(Lie::None | Lie::LoseReply) => list,
            Err(error) => one(error),
        }
    };
    looked.into_stream().flatten().boxed()
}

fn one<T: Send + 'static>(error: Error) -> BoxStream<'static, Result<T>> {
    futures_util::stream::once(std::future::ready(Err(error))).boxed()
}

impl fmt::Display for FaultyStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, with faults on purpose", self.store)
    }
}

#[tonic::async_trait]
impl ObjectStore for FaultyStore {
    async fn put_opts(&self, location: &Path, payload: PutPayload, opts: PutOptions) -> Result<PutResult> {
        let parts: Vec<_> = location.parts().collect();
        let is_log = parts.windows(2).any(|pair| [pair[0].as_ref(), pair[1].as_ref()] == LOGS);
        let point = match opts.mode {
            PutMode::Create if is_log => Point::StoreLog,
            PutMode::Create if parts.iter().any(|part| part.as_ref() == VERSIONS) => Point::StoreVersion,
            PutMode::Create => Point::StoreCreate,
            PutMode::Overwrite | PutMode::Update(_) => Point::StorePut,
        };
        let lie = pass(point).await?;
        answered(point, lie, self.store.put_opts(location, payload, opts).await)
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        opts: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        let lie = pass(Point::StorePut).await?;
        answered(Point::StorePut, lie, self.store.put_multipart_opts(location, opts).await)
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        let lie = pass(Point::StoreGet).await?;
        answered(Point::StoreGet, lie, self.store.get_opts(location, options).await)
    }

    async fn get_ranges(&self, location: &Path, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        let lie = pass(Point::StoreGet).await?;
        answered(Point::StoreGet, lie, self.store.get_ranges(location, ranges).await)
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        let deleted = self.store.delete_stream(locations);
        let passed = async {
            match pass(Point::StoreDelete).await {
                Ok(_) => deleted,
                Err(error) => one(error),
            }
        };
        passed.into_stream().flatten().boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        listed(self.store.list(prefix))
    }

    fn list_with_offset(
        &self,
        prefix: Option<&Path>,
        offset: &Path,
    ) -> BoxStream<'static, Result<ObjectMeta>> {
        listed(self.store.list_with_offset(prefix, offset))
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        let lie = pass(Point::StoreList).await?;
        answered(Point::StoreList, lie, self.store.list_with_delimiter(prefix).await)
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        let lie = pass(Point::StorePut).await?;
        answered(Point::StorePut, lie, self.store.copy_opts(from, to, options).await)
    }

    async fn rename_opts(&self, from: &Path, to: &Path, options: RenameOptions) -> Result<()> {
        let lie = pass(Point::StorePut).await?;
        answered(Point::StorePut, lie, self.store.rename_opts(from, to, options).await)
    }
}
