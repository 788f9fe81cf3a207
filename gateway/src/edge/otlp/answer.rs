//! What an exporter is answered: success, success in part, or why not. In protobuf or in JSON.
//!
//! *Owns*: the messages of answers, which failures are worth another try. A core.
//! *Does not own*: how they travel (`grpc`, `http`).

use std::time::Duration;

use serde_json::json;
use sluice_shared::error::Error;
use tonic::{Code, Status};

use super::wire::{put_bytes, put_number};
use super::{Form, Signal};

/// What exporters wait for that are not told: those that obey would come back at once, all together.
const RETRY_AFTER: Duration = Duration::from_secs(1);
const RETRY_INFO: &str = "type.googleapis.com/google.rpc.RetryInfo";

/// What has become of a request's records.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Partial {
    pub(super) rejected: u64,
    /// Names the first one. Empty where none was.
    pub(super) message: String,
}

/// An export's response.
pub(super) fn response(signal: Signal, partial: &Partial, form: Form) -> Vec<u8> {
    let is_whole = partial.rejected == 0;
    match form {
        Form::Protobuf if is_whole => Vec::new(),
        Form::Protobuf => {
            let (mut message, mut response) = (Vec::new(), Vec::new());
            put_number(&mut message, 1, partial.rejected);
            put_bytes(&mut message, 2, partial.message.as_bytes());
            put_bytes(&mut response, 1, &message);
            response
        }
        Form::Json if is_whole => b"{}".to_vec(),
        Form::Json => {
            let partial = json!({
                signal.rejected(): partial.rejected.to_string(),
                "errorMessage": partial.message,
            });
            json!({ "partialSuccess": partial }).to_string().into()
        }
    }
}

/// The error as OTLP's exporters need it: what may pass says when to come back. Without that `RESOURCE_EXHAUSTED` is
/// final to them.
pub(super) fn with_retry(mut error: Error) -> Error {
    if error.retryable {
        let default = u64::try_from(RETRY_AFTER.as_millis()).unwrap_or(u64::MAX);
        error.retry_after_ms.get_or_insert(default);
    }
    error
}

/// The code and the text of an error's status.
fn code_and_text(error: &Error) -> (Code, String) {
    let code = Status::from(error.clone()).code();
    // Some messages name their column themselves.
    let column = error.column.as_ref().filter(|_| !error.message.starts_with("column "));
    let column = column.map(|column| format!("column {column}: ")).unwrap_or_default();
    (code, format!("{column}{} [{}]", error.message, error.code))
}

/// A `google.rpc.Status`.
pub(super) fn status_message(error: &Error, form: Form) -> Vec<u8> {
    let (code, text) = code_and_text(error);
    if form == Form::Json {
        return json!({ "code": i32::from(code), "message": text }).to_string().into();
    }
    encode_status(code, &text, error.retry_after_ms)
}

fn encode_status(code: Code, text: &str, retry_after_ms: Option<u64>) -> Vec<u8> {
    let mut status = Vec::new();
    put_number(&mut status, 1, u64::from(i32::from(code).cast_unsigned()));
    put_bytes(&mut status, 2, text.as_bytes());
    if let Some(ms) = retry_after_ms {
        let (mut delay, mut info, mut any) = (Vec::new(), Vec::new(), Vec::new());
        put_number(&mut delay, 1, ms / 1000);
        put_number(&mut delay, 2, ms % 1000 * 1_000_000);
        put_bytes(&mut info, 1, &delay);
        put_bytes(&mut any, 1, RETRY_INFO.as_bytes());
        put_bytes(&mut any, 2, &info);
        put_bytes(&mut status, 3, &any);
    }
    status
}

/// The error as gRPC has it, short enough for the headers that clients take.
pub(super) fn grpc_status(error: &Error) -> Status {
    const CHARS_MAX: usize = 300;
    let (code, text) = code_and_text(error);
    let text: String = text.chars().take(CHARS_MAX).collect();
    match error.retry_after_ms {
        Some(ms) => {
            let details = encode_status(code, &text, Some(ms));
            Status::with_details(code, text, details.into())
        }
        None => Status::new(code, text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_may_pass_says_when_to_come_back() {
        let busy = with_retry(Error::busy("x", "full", Duration::from_millis(2500)));
        let status = grpc_status(&busy);
        assert_eq!(status.code(), Code::ResourceExhausted);
        let details = status.details();
        let delay = [0x08, 0x02, 0x10, 0x80, 0xca, 0xb5, 0xee, 0x01];
        assert!(details.windows(delay.len()).any(|window| window == delay), "{details:?}");
        assert_eq!(with_retry(Error::unavailable("x", "gone")).retry_after_ms, Some(1000));
        assert_eq!(grpc_status(&with_retry(Error::invalid("x", "bad"))).details(), b"");
    }

    #[test]
    fn json_has_codes_as_numbers_and_counts_as_text() {
        let error = Error::invalid("bad", "no such thing").at_column("a");
        let status = status_message(&error, Form::Json);
        assert_eq!(status, br#"{"code":3,"message":"column a: no such thing [bad]"}"#);
        let partial = Partial { rejected: 2, message: "why".to_owned() };
        let response = response(Signal::Traces, &partial, Form::Json);
        assert_eq!(response, br#"{"partialSuccess":{"errorMessage":"why","rejectedSpans":"2"}}"#);
    }
}
