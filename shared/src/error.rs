//! What a caller should do about a failure: one kind, named for the remedy, with its form on every wire.
//!
//! *Owns*: `ErrorKind`, `Error`, and their maps to gRPC, HTTP, WebSocket and QUIC codes.
//! *Does not own*: the causes; each module has its own error type and converts at the boundary.
//! Keeps P8's half of "named": an error says what, where and how to mend it.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Longest message that goes to a producer, in characters; longer ones are cut.
pub const MESSAGE_CHARS_MAX: usize = 1024;
/// Longest column, in characters: producers choose the names of columns that there are not.
pub const COLUMN_CHARS_MAX: usize = 255;
/// Of a message, what the pod link carries beside the details. Both go in one block of headers, and HTTP/2 clients
/// take no more than 16 KiB of them: past that the caller would see a broken link in place of the error.
const LINK_MESSAGE_CHARS_MAX: usize = 100;

/// QUIC application code of an end in good order; all others are those of `ErrorKind::quic_code`.
pub const QUIC_OK: u32 = 0;

/// Named for what the caller should do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ErrorKind {
    /// Fix the request: sending it again cannot help.
    Invalid,
    /// Present a valid credential: who is there is not known.
    Unauthorized,
    /// Ask for the right to it: who is there is known, and may not do this.
    Forbidden,
    /// Create it, or mend the name.
    NotFound,
    /// Slow down; `retry_after` says for how long.
    Busy,
    /// Try again: nothing is wrong with the request.
    Unavailable,
    /// Stop: a newer session owns this stream.
    Fenced,
    /// Report it: a bug or a broken invariant.
    Internal,
}

impl ErrorKind {
    /// Whether the same request may succeed later.
    pub fn is_retryable(self) -> bool {
        matches!(self, Self::Busy | Self::Unavailable)
    }

    /// HTTP status.
    pub fn http_status(self) -> u16 {
        match self {
            Self::Invalid => 400,
            Self::Unauthorized => 401,
            Self::Forbidden => 403,
            Self::NotFound => 404,
            Self::Busy => 429,
            Self::Unavailable => 503,
            Self::Fenced => 409,
            Self::Internal => 500,
        }
    }

    /// WebSocket close code (RFC 6455 section 7.4; 4000 and up are ours).
    pub fn websocket_close_code(self) -> u16 {
        match self {
            Self::Invalid => 1008,
            Self::Unauthorized => 4401,
            Self::Forbidden => 4403,
            Self::NotFound => 4404,
            Self::Busy => 1013,
            Self::Unavailable => 1012,
            Self::Fenced => 4409,
            Self::Internal => 1011,
        }
    }

    /// QUIC application code, of streams and connections: the HTTP status.
    pub fn quic_code(self) -> u32 {
        u32::from(self.http_status())
    }

    /// What a QUIC application code means; None where all is well. Codes that nobody here sends are worth another try.
    pub fn from_quic_code(code: u64) -> Option<Self> {
        let kinds = [
            Self::Invalid,
            Self::Unauthorized,
            Self::Forbidden,
            Self::NotFound,
            Self::Busy,
            Self::Unavailable,
            Self::Fenced,
            Self::Internal,
        ];
        let known = || kinds.into_iter().find(|kind| u64::from(kind.quic_code()) == code);
        (code != u64::from(QUIC_OK)).then(|| known().unwrap_or(Self::Unavailable))
    }

    fn grpc_code(self) -> tonic::Code {
        match self {
            Self::Invalid => tonic::Code::InvalidArgument,
            Self::Unauthorized => tonic::Code::Unauthenticated,
            Self::Forbidden => tonic::Code::PermissionDenied,
            Self::NotFound => tonic::Code::NotFound,
            Self::Busy => tonic::Code::ResourceExhausted,
            Self::Unavailable => tonic::Code::Unavailable,
            Self::Fenced => tonic::Code::Aborted,
            Self::Internal => tonic::Code::Internal,
        }
    }

    fn from_grpc_code(code: tonic::Code) -> Self {
        match code {
            tonic::Code::InvalidArgument | tonic::Code::OutOfRange => Self::Invalid,
            tonic::Code::Unauthenticated => Self::Unauthorized,
            tonic::Code::PermissionDenied => Self::Forbidden,
            tonic::Code::NotFound => Self::NotFound,
            tonic::Code::ResourceExhausted => Self::Busy,
            tonic::Code::Aborted => Self::Fenced,
            // What the transport itself reports (reset, refused, cancelled, unknown) is worth another try elsewhere.
            tonic::Code::Unavailable
            | tonic::Code::Cancelled
            | tonic::Code::Unknown
            | tonic::Code::DeadlineExceeded => Self::Unavailable,
            _ => Self::Internal,
        }
    }
}

/// A failure as it is told to a caller, the same on every wire.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct Error {
    /// What the caller should do.
    pub kind: ErrorKind,
    /// Stable, machine-readable cause in `snake_case`, such as `table_not_found`.
    pub code: String,
    /// What was attempted on what, why it failed, and how to mend it.
    pub message: String,
    /// Whether the same request may succeed later.
    pub retryable: bool,
    /// How long to wait before the next try.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry_after_ms: Option<u64>,
    /// The offset to blame, where there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub offset: Option<u64>,
    /// The column to blame, where there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub column: Option<String>,
}

impl Error {
    /// An error of `kind` with a stable `code`.
    pub fn new(kind: ErrorKind, code: &str, message: impl Into<String>) -> Self {
        let message = cut(message.into(), MESSAGE_CHARS_MAX);
        let (code, retryable) = (code.to_owned(), kind.is_retryable());
        Self { kind, code, message, retryable, retry_after_ms: None, offset: None, column: None }
    }

    /// The request is wrong.
    pub fn invalid(code: &str, message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Invalid, code, message)
    }

    /// There is no valid credential.
    pub fn unauthorized(code: &str, message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Unauthorized, code, message)
    }

    /// The credential is valid, and does not allow this.
    pub fn forbidden(code: &str, message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Forbidden, code, message)
    }

    /// The thing does not exist.
    pub fn not_found(code: &str, message: impl Into<String>) -> Self {
        Self::new(ErrorKind::NotFound, code, message)
    }

    /// Out of room for now.
    pub fn busy(code: &str, message: impl Into<String>, retry_after: Duration) -> Self {
        let retry_after_ms = Some(u64::try_from(retry_after.as_millis()).unwrap_or(u64::MAX));
        Self { retry_after_ms, ..Self::new(ErrorKind::Busy, code, message) }
    }

    /// Not reachable for now.
    pub fn unavailable(code: &str, message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Unavailable, code, message)
    }

    /// A newer session owns the stream.
    pub fn fenced(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Fenced, "fenced", message)
    }

    /// A bug or a broken invariant.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Internal, "internal", message)
    }

    /// Blames a record.
    #[must_use]
    pub fn at_offset(mut self, offset: u64) -> Self {
        self.offset = Some(offset);
        self
    }

    /// Blames a column.
    #[must_use]
    pub fn at_column(mut self, column: impl Into<String>) -> Self {
        self.column = Some(cut(column.into(), COLUMN_CHARS_MAX));
        self
    }
}

fn cut(mut text: String, chars_max: usize) -> String {
    if let Some((end, _)) = text.char_indices().nth(chars_max) {
        text.truncate(end);
        text.push('…');
    }
    text
}

impl From<crate::ids::InvalidName> for Error {
    fn from(error: crate::ids::InvalidName) -> Self {
        let code = match error.what {
            "table name" => "invalid_table_name",
            "stream name" => "invalid_stream_name",
            _ => "invalid_name",
        };
        Self::invalid(code, error.to_string())
    }
}

impl From<Error> for tonic::Status {
    fn from(error: Error) -> Self {
        let details = serde_json::to_vec(&error).expect("an error is plain text and numbers");
        Self::with_details(error.kind.grpc_code(), cut(error.message, LINK_MESSAGE_CHARS_MAX), details.into())
    }
}

impl From<tonic::Status> for Error {
    fn from(status: tonic::Status) -> Self {
        serde_json::from_slice(status.details()).unwrap_or_else(|_| {
            let kind = ErrorKind::from_grpc_code(status.code());
            // The code's own words ("the service is currently unavailable") say less than any message.
            let what = match status.message() {
                "" => status.code().description(),
                message => message,
            };
            Self::new(kind, "transport", format!("pod link: {what}"))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_survives_the_pod_link() {
        let sent =
            Error::busy("wal_full", "the log of pod-1 is full", Duration::from_millis(1500)).at_offset(7);
        assert_eq!(Error::from(tonic::Status::from(sent.clone())), sent);
    }

    #[test]
    fn a_broken_link_is_worth_another_try() {
        let error = Error::from(tonic::Status::unknown("h2 protocol error"));
        assert_eq!(error.kind, ErrorKind::Unavailable);
        assert!(error.retryable);
    }

    #[test]
    fn quic_codes_lead_back_to_their_kind() {
        for kind in [
            ErrorKind::Invalid,
            ErrorKind::Unauthorized,
            ErrorKind::Forbidden,
            ErrorKind::Fenced,
            ErrorKind::Internal,
        ] {
            assert_eq!(ErrorKind::from_quic_code(kind.quic_code().into()), Some(kind));
        }
        assert_eq!(ErrorKind::from_quic_code(QUIC_OK.into()), None);
        assert_eq!(ErrorKind::from_quic_code(77), Some(ErrorKind::Unavailable));
    }

    #[test]
    fn long_messages_and_columns_are_cut() {
        let error = Error::invalid("x", "é".repeat(5000)).at_column("é".repeat(5000));
        assert_eq!(error.message.chars().count(), MESSAGE_CHARS_MAX + 1);
        assert_eq!(error.column.expect("a column").chars().count(), COLUMN_CHARS_MAX + 1);
    }

    #[test]
    fn the_longest_error_fits_into_the_headers_of_the_pod_link() {
        // Four bytes of UTF-8, twelve when percent-encoded; one byte, six in JSON.
        for worst in ["😀", "\u{1}", "é", "\""] {
            let error = Error::busy(&"c".repeat(64), worst.repeat(5000), Duration::MAX);
            let sent = error.at_offset(u64::MAX).at_column(worst.repeat(5000));
            let status = tonic::Status::from(sent.clone());
            let mut headers = http::HeaderMap::new();
            status.add_header(&mut headers).expect("headers");
            let bytes: usize =
                headers.iter().map(|(name, value)| name.as_str().len() + value.len() + 32).sum();
            assert!(bytes < 14 << 10, "{worst:?}: {bytes} bytes");
            assert_eq!(Error::from(status), sent);
        }
    }
}
