//! An object store in memory that is as slow and as unreliable as the seed has it.
//!
//! *Owns*: delays, errors before an operation, lost replies after one.
//! *Does not own*: when it is how bad (`world`), what is stored (`object_store::memory`).

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::StreamExt;
use futures_util::stream::BoxStream;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

/// How bad it is.
#[derive(Debug, Clone, Copy)]
pub struct Weather {
    /// Longest wait before and after an operation.
    pub delay_max: Duration,
    /// Of operations that fail and do nothing.
    pub failing: f64,
    /// Of writes that are done and answered with an error.
    pub lost_replies: f64,
}

impl Weather {
    /// Nothing goes wrong.
    pub const FAIR: Self = Self { delay_max: Duration::from_millis(6), failing: 0.0, lost_replies: 0.0 };
}

struct Sky {
    weather: Weather,
    random: StdRng,
    faults: u64,
}

/// The store. Clones share it.
#[derive(Clone)]
pub struct Store {
    objects: Arc<InMemory>,
    sky: Arc<Mutex<Sky>>,
    /// Whether whoever asks can wait.
    waits: bool,
}

impl Store {
    /// An empty one.
    pub fn new(seed: u64) -> Self {
        let sky = Sky { weather: Weather::FAIR, random: StdRng::seed_from_u64(seed), faults: 0 };
        Self { objects: Arc::default(), sky: Arc::new(Mutex::new(sky)), waits: true }
    }

    /// The same for those who cannot wait: it answers at once, and is no more reliable.
    pub fn at_once(&self) -> Self {
        Self { waits: false, ..self.clone() }
    }

    /// From now on it is so bad.
    pub fn set(&self, weather: Weather) {
        self.sky().weather = weather;
    }

    /// Operations that have gone wrong.
    pub fn faults(&self) -> u64 {
        self.sky().faults
    }

    /// What is stored, without delays and faults.
    pub fn objects(&self) -> Arc<InMemory> {
        Arc::clone(&self.objects)
    }

    fn sky(&self) -> std::sync::MutexGuard<'_, Sky> {
        self.sky.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn wait(&self) {
        if self.waits {
            let wait = {
                let mut sky = self.sky();
                let most = sky.weather.delay_max;
                most.mul_f64(sky.random.random::<f64>())
            };
            tokio::time::sleep(wait).await;
        }
    }

    /// Before an operation.
    async fn begin(&self, what: &'static str) -> Result<()> {
        self.wait().await;
        self.fault(what, |weather| weather.failing)
    }

    /// After a write that has come through.
    async fn end<T>(&self, what: &'static str, done: T) -> Result<T> {
        self.wait().await;
        self.fault(what, |weather| weather.lost_replies)?;
        Ok(done)
    }

    fn fault(&self, what: &'static str, rate: impl Fn(&Weather) -> f64) -> Result<()> {
        let mut sky = self.sky();
        let rate = rate(&sky.weather);
        if rate == 0.0 || !sky.random.random_bool(rate) {
            return Ok(());
        }
        sky.faults += 1;
        let source = std::io::Error::other(format!("the simulated store failed to {what}"));
        Err(Error::Generic { store: "simulated", source: source.into() })
    }
}

impl fmt::Display for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("simulated")
    }
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[async_trait]
impl ObjectStore for Store {
    async fn put_opts(&self, path: &Path, payload: PutPayload, options: PutOptions) -> Result<PutResult> {
        self.begin("put").await?;
        let put = self.objects.put_opts(path, payload, options).await?;
        self.end("hear of a put", put).await
    }

    async fn put_multipart_opts(
        &self,
        path: &Path,
        options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.begin("begin an upload").await?;
        self.objects.put_multipart_opts(path, options).await
    }

    async fn get_opts(&self, path: &Path, options: GetOptions) -> Result<GetResult> {
        self.begin("get").await?;
        self.objects.get_opts(path, options).await
    }

    async fn get_ranges(&self, path: &Path, ranges: &[Range<u64>]) -> Result<Vec<bytes::Bytes>> {
        self.begin("get").await?;
        self.objects.get_ranges(path, ranges).await
    }

    fn delete_stream(&self, paths: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        self.objects.delete_stream(paths)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        let (store, prefix) = (self.clone(), prefix.cloned());
        let listed = async move {
            match store.begin("list").await {
                Ok(()) => store.objects.list(prefix.as_ref()),
                Err(error) => futures_util::stream::once(std::future::ready(Err(error))).boxed(),
            }
        };
        futures_util::stream::once(listed).flatten().boxed()
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.begin("list").await?;
        self.objects.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.begin("copy").await?;
        self.objects.copy_opts(from, to, options).await?;
        self.end("hear of a copy", ()).await
    }
}
