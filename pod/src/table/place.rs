//! Where tables are kept: below a directory, or in a bucket of S3 or of what speaks its protocol.
//!
//! Credentials, region and endpoint of a bucket come from the environment, by the names that all tools of S3 know.
//!
//! *Owns*: how such a place is written, the store that it is in.
//! *Does not own*: what is kept there, and how.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use object_store::aws::{AmazonS3, AmazonS3Builder, AmazonS3ConfigKey, S3ConditionalPut};
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{ClientOptions, ObjectStore, RetryConfig};
use serde::Deserialize;
use sluice_shared::error::Error;
use sluice_shared::fault;

use super::bucket::Asked;
use super::faulty::FaultyStore;

const S3: &str = "s3";
/// A request that takes longer is sent again.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);
/// For so long the store itself tries again, with growing waits; then whoever asked does, and says so in the log.
const RETRY_TIMEOUT: Duration = Duration::from_secs(20);

/// Where tables are kept.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub enum TablesPlace {
    /// Below this directory, which all pods of a pool reach.
    Directory(PathBuf),
    /// `s3://bucket/prefix`.
    S3 {
        /// The bucket.
        bucket: String,
        /// All keys begin with it.
        prefix: Path,
    },
}

/// What is no place for tables.
#[derive(Debug, thiserror::Error)]
#[error("{text:?} is no place for tables: {why}; expected a directory or s3://bucket/prefix")]
pub struct InvalidPlace {
    text: String,
    why: String,
}

/// Where tables are stored.
#[derive(Debug, Clone)]
pub struct Stores {
    /// What the pod reads and writes itself.
    pub tables: Arc<dyn ObjectStore>,
    /// The same for delta_kernel, which cannot wait where all tasks share one thread.
    pub kernels: Arc<dyn ObjectStore>,
}

impl Stores {
    /// This machine's disk, each write flushed.
    pub fn disk() -> Self {
        Self::of(Arc::new(LocalFileSystem::new().with_fsync(true)))
    }

    fn of(store: Arc<dyn ObjectStore>) -> Self {
        let tables = if fault::COMPILED_IN { Arc::new(FaultyStore::new(store)) } else { store };
        Self { kernels: Arc::clone(&tables), tables }
    }

    /// A bucket of S3, as the environment says. Nothing is asked of it.
    ///
    /// # Errors
    /// What the environment says cannot be.
    pub(super) fn bucket(bucket: &str) -> object_store::Result<Self> {
        let retry = RetryConfig { retry_timeout: RETRY_TIMEOUT, ..RetryConfig::default() };
        Ok(Self::of(Arc::new(Self::s3(bucket, retry)?)))
    }

    fn s3(bucket: &str, retry: RetryConfig) -> object_store::Result<AmazonS3> {
        let builder = AmazonS3Builder::from_env();
        // In the clear only where somebody has written such an endpoint.
        let endpoint = builder.get_config_value(&AmazonS3ConfigKey::Endpoint);
        if let Some(endpoint) = endpoint.as_ref().filter(|url| !is_endpoint(url)) {
            let source =
                format!("AWS_ENDPOINT is {endpoint:?}: expected http://host:port or https://host").into();
            return Err(object_store::Error::Generic { store: S3, source });
        }
        let is_plain = endpoint.is_some_and(|url| url.starts_with("http://"));
        let client = ClientOptions::new().with_timeout(REQUEST_TIMEOUT).with_allow_http(is_plain);
        builder
            .with_bucket_name(bucket)
            .with_client_options(client)
            .with_retry(retry)
            .with_conditional_put(S3ConditionalPut::ETagMatch)
            .build()
    }
}

/// Where a bucket is asked, as the environment says.
pub(super) fn asked(bucket: &str) -> Asked {
    let builder = AmazonS3Builder::from_env();
    let value = |key| builder.get_config_value(&key);
    let credentials = [
        AmazonS3ConfigKey::AccessKeyId,
        AmazonS3ConfigKey::WebIdentityTokenFile,
        AmazonS3ConfigKey::ContainerCredentialsRelativeUri,
        AmazonS3ConfigKey::ContainerCredentialsFullUri,
    ];
    Asked {
        bucket: bucket.to_owned(),
        endpoint: value(AmazonS3ConfigKey::Endpoint),
        region: value(AmazonS3ConfigKey::Region),
        has_credentials: credentials.into_iter().any(|key| value(key).is_some()),
    }
}

impl TablesPlace {
    /// Asks a bucket for the beginning of its list, once. Of a directory nothing is asked.
    ///
    /// # Errors
    /// It does not answer in time, or refuses: why, and how to mend it.
    pub async fn reach(&self, within: Duration) -> Result<(), String> {
        let Self::S3 { bucket, prefix } = self else { return Ok(()) };
        let asked = asked(bucket);
        let once = RetryConfig { max_retries: 0, retry_timeout: within, ..RetryConfig::default() };
        let failed = |error: object_store::Error| format!("{self}: {}", asked.explain(&error).text);
        let store = Stores::s3(bucket, once).map_err(failed)?;
        let mut listed = store.list(Some(prefix));
        match tokio::time::timeout(within, listed.next()).await {
            Ok(Some(Err(error))) => Err(failed(error)),
            Ok(_) => Ok(()),
            Err(_) => Err(format!("{self}: within {} s {}", within.as_secs(), asked.silent())),
        }
    }

    /// Whether tables can be there by its name, and a bucket's store can be made of what the environment says.
    ///
    /// # Errors
    /// It cannot; why.
    pub fn check(&self) -> Result<(), String> {
        self.check_name().map_err(|error| error.message)?;
        let Self::S3 { bucket, .. } = self else { return Ok(()) };
        Stores::bucket(bucket).map(drop).map_err(|error| format!("{self}: {error}"))
    }

    /// The Delta kernel takes paths for URLs, and would look elsewhere.
    pub(super) fn check_name(&self) -> Result<(), Error> {
        let name = match self {
            // As it is found, so that a relative one counts with what it is below.
            Self::Directory(directory) => {
                std::path::absolute(directory).unwrap_or_else(|_| directory.clone())
            }
            Self::S3 { prefix, .. } => PathBuf::from(prefix.as_ref()),
        };
        match name.to_string_lossy().contains(['%', '?', '#']) {
            false => Ok(()),
            true => {
                let message = format!(
                    "tables cannot be in {}: a path with %, ? or # is read in two ways; \
                    choose one without",
                    name.display()
                );
                Err(Error::invalid("tables_place", message))
            }
        }
    }
}

fn is_endpoint(url: &str) -> bool {
    let host = url.strip_prefix("http://").or_else(|| url.strip_prefix("https://"));
    host.is_some_and(|host| {
        !host.is_empty() && !host.starts_with(['/', ':', '?', '#']) && !host.contains(' ')
    })
}

impl TryFrom<String> for TablesPlace {
    type Error = InvalidPlace;

    fn try_from(text: String) -> Result<Self, InvalidPlace> {
        let Some((scheme, rest)) = text.split_once("://") else {
            return Ok(Self::Directory(text.into()));
        };
        let refuse = |why: &str| Err(InvalidPlace { text: text.clone(), why: why.to_owned() });
        if scheme != S3 {
            return refuse("there are buckets of S3 alone");
        }
        let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        if bucket.is_empty() || bucket.contains(['?', '#', '@', ':']) {
            return refuse("the bucket has no name that can be one");
        }
        match Path::parse(prefix.trim_end_matches('/')) {
            Ok(prefix) => Ok(Self::S3 { bucket: bucket.to_owned(), prefix }),
            Err(error) => refuse(&error.to_string()),
        }
    }
}

impl std::str::FromStr for TablesPlace {
    type Err = InvalidPlace;

    fn from_str(text: &str) -> Result<Self, InvalidPlace> {
        text.to_owned().try_into()
    }
}

impl From<PathBuf> for TablesPlace {
    fn from(directory: PathBuf) -> Self {
        Self::Directory(directory)
    }
}

impl fmt::Display for TablesPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Directory(directory) => directory.display().fmt(f),
            Self::S3 { bucket, prefix } => write!(f, "{S3}://{bucket}/{prefix}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_read_in_two_ways_is_no_place() {
        for bad in ["/a%20b", "a/b?c", "s3://lake/x#y", "s3://lake/100%"] {
            let error = bad.parse::<TablesPlace>().expect("a place").check_name().expect_err(bad);
            assert!(error.message.contains("choose one without"), "{error}");
        }
        "/a b/ü+é".parse::<TablesPlace>().expect("a place").check_name().expect("good");
    }

    #[test]
    fn an_endpoint_has_a_scheme_and_a_host() {
        for good in ["http://127.0.0.1:9000", "https://s3.example.org", "https://host/path"] {
            assert!(is_endpoint(good), "{good}");
        }
        for bad in ["", "localhost:9000", "http://", "nonsense", "https://:1", "http:///x", "ftp://host"] {
            assert!(!is_endpoint(bad), "{bad}");
        }
    }

    #[test]
    fn a_place_is_a_directory_or_a_bucket() {
        let place = |text: &str| text.parse::<TablesPlace>();
        assert_eq!(place("data/tables").expect("a place"), TablesPlace::Directory("data/tables".into()));
        let bucket = place("s3://lake/raw/events/").expect("a place");
        assert_eq!(bucket, TablesPlace::S3 { bucket: "lake".into(), prefix: Path::from("raw/events") });
        assert_eq!(bucket.to_string(), "s3://lake/raw/events");
        assert_eq!(place("s3://lake").expect("a place").to_string(), "s3://lake/");
        for (text, why) in [
            ("gs://lake/x", "buckets of s3 alone"),
            ("s3:///x", "the bucket has no name"),
            ("s3://key@lake/x", "the bucket has no name"),
            ("s3://lake/a//b", "empty"),
        ] {
            let error = place(text).expect_err(text).to_string();
            assert!(error.to_lowercase().contains(why), "{error}");
            assert!(error.contains("expected a directory or s3://bucket/prefix"), "{error}");
        }
    }
}
