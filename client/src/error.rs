//! Why a call of the client failed.
//!
//! *Owns*: `Error`, and which failures are worth another connection.
//! *Does not own*: how long to go on trying (`retry`).

use std::path::PathBuf;
use std::time::Duration;

use sluice_shared::error::{Error as GatewayError, ErrorKind};
use sluice_shared::frame::Encoding;

/// Why a call failed. A stream that has failed answers every later call with the same error.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Error {
    /// The gateway said so; its kind says what to do.
    #[error("{0}")]
    Gateway(Box<GatewayError>),
    /// Not the URL of a gateway.
    #[error("invalid gateway URL {url:?}: {why}")]
    Url {
        /// What was given.
        url: String,
        /// What is wrong with it.
        why: String,
    },
    /// Certificates that are to be trusted or presented, or a key, cannot be read.
    #[error("certificates {}: {why}", path.display())]
    Certificate {
        /// Which file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// The gateway cannot be trusted, or does not speak our protocol: trying again cannot help.
    #[error("gateway {url}: no secure connection: {what}")]
    Insecure {
        /// Which gateway.
        url: String,
        /// What is wrong.
        what: String,
    },
    /// The connection could not be made, or was lost.
    #[error("gateway {url}: {what}")]
    Connection {
        /// Which gateway.
        url: String,
        /// What happened.
        what: String,
    },
    /// Nothing was acknowledged for too long, in spite of new connections.
    #[error("gave up after {} s without progress; the last failure: {last}", stalled.as_secs())]
    GaveUp {
        /// How long nothing moved.
        stalled: Duration,
        /// The last failure.
        last: Box<Error>,
    },
    /// A record cannot be encoded, or what is called a record is none.
    #[error("record cannot be encoded: {0}")]
    Encoding(String),
    /// A record is larger than a frame may be. Nothing of the call was sent.
    #[error(
        "record at offset {offset} has {bytes} bytes encoded, the gateway takes at most {limit}: split or shorten it"
    )]
    RecordTooLarge {
        /// The offset that it would have had.
        offset: u64,
        /// Its size.
        bytes: usize,
        /// The largest size.
        limit: usize,
    },
    /// A stream carries either JSON or Arrow.
    #[error("this stream carries {stream:?} records, not {record:?}: open another stream for those")]
    MixedEncodings {
        /// What the stream carries.
        stream: Encoding,
        /// What was to be sent.
        record: Encoding,
    },
    /// The gateway answered what it must not.
    #[error("gateway {url} broke the protocol: {what}")]
    Protocol {
        /// Which gateway.
        url: String,
        /// What it did.
        what: String,
    },
    /// The stream's task has ended.
    #[error("the stream is closed: its runtime was shut down or its task has panicked")]
    Closed,
}

impl Error {
    /// How long to wait at least before the next connection; None where another one cannot help.
    pub(crate) fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Gateway(error) if error.retryable || error.kind.is_retryable() => {
                Some(Duration::from_millis(error.retry_after_ms.unwrap_or(0)))
            }
            Self::Connection { .. } => Some(Duration::ZERO),
            _ => None,
        }
    }

    /// What the caller should do about it.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Gateway(error) => error.kind,
            Self::Connection { .. } => ErrorKind::Unavailable,
            Self::GaveUp { last, .. } => last.kind(),
            Self::Insecure { .. } => ErrorKind::Unauthorized,
            Self::Protocol { .. } | Self::Closed => ErrorKind::Internal,
            Self::Url { .. }
            | Self::Certificate { .. }
            | Self::Encoding(_)
            | Self::RecordTooLarge { .. }
            | Self::MixedEncodings { .. } => ErrorKind::Invalid,
        }
    }
}

impl From<GatewayError> for Error {
    fn from(error: GatewayError) -> Self {
        Self::Gateway(Box::new(error))
    }
}

impl From<sluice_shared::ids::InvalidName> for Error {
    fn from(error: sluice_shared::ids::InvalidName) -> Self {
        GatewayError::from(error).into()
    }
}

impl From<arrow::error::ArrowError> for Error {
    fn from(error: arrow::error::ArrowError) -> Self {
        Self::Encoding(error.to_string())
    }
}
