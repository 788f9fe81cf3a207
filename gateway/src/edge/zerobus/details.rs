//! What is wrong with a schema, for programs: `google.rpc.ErrorInfo` in `grpc-status-details-bin`. Newer clients of
//! Zerobus make an error of its own of it, with the causes.
//!
//! *Owns*: the messages (`google/rpc/status.proto`, `google/rpc/error_details.proto`), which errors are about schemas.
//! *Does not own*: status codes and texts (`calls`).

use std::collections::HashMap;

use bytes::Bytes;
use prost::Message;
use sluice_shared::error::Error;

const REASON: &str = "SCHEMA_VALIDATION_FAILED";
const DOMAIN: &str = "zerobus.databricks.com";
/// Their number for a schema that does not fit.
const ERROR_CODE: &str = "8001";
/// Of the text, which stands beside in whole: both go in one block of headers, of which clients take 16 KiB.
const MESSAGE_CHARS_MAX: usize = 100;
const TYPE_URL: &str = "type.googleapis.com/google.rpc.ErrorInfo";

#[derive(Clone, PartialEq, Message)]
struct RpcStatus {
    #[prost(int32, tag = "1")]
    code: i32,
    #[prost(string, tag = "2")]
    message: String,
    #[prost(message, repeated, tag = "3")]
    details: Vec<Any>,
}

#[derive(Clone, PartialEq, Message)]
struct Any {
    #[prost(string, tag = "1")]
    type_url: String,
    #[prost(bytes = "vec", tag = "2")]
    value: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
struct ErrorInfo {
    #[prost(string, tag = "1")]
    reason: String,
    #[prost(string, tag = "2")]
    domain: String,
    #[prost(map = "string, string", tag = "3")]
    metadata: HashMap<String, String>,
}

/// Why a schema, or a record, does not fit its table, in their words.
fn cause(code: &str) -> Option<&'static str> {
    match code {
        "unknown_field" => Some("FIELD_NOT_IN_TABLE"),
        "missing_column" | "missing_value" => Some("MISSING_REQUIRED_COLUMN"),
        "schema_mismatch" | "wrong_type" => Some("TYPE_INCOMPATIBLE"),
        _ => None,
    }
}

/// The details of a status; empty where the error is not about a schema.
pub(super) fn details(code: tonic::Code, message: &str, error: &Error) -> Bytes {
    let Some(cause) = cause(&error.code) else { return Bytes::new() };
    let mut metadata = HashMap::from([
        ("causes".to_owned(), cause.to_owned()),
        ("error_code".to_owned(), ERROR_CODE.to_owned()),
    ]);
    metadata.extend(error.column.clone().map(|column| ("column".to_owned(), column)));
    let info = ErrorInfo { reason: REASON.to_owned(), domain: DOMAIN.to_owned(), metadata };
    let any = Any { type_url: TYPE_URL.to_owned(), value: info.encode_to_vec() };
    let message = message.chars().take(MESSAGE_CHARS_MAX).collect();
    RpcStatus { code: code.into(), message, details: vec![any] }.encode_to_vec().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_causes_of_a_schema_that_does_not_fit_are_told() {
        let error = Error::invalid("schema_mismatch", "the frame has it as string").at_column("id");
        let bytes = details(tonic::Code::InvalidArgument, "does not fit", &error);
        let status = RpcStatus::decode(bytes).expect("a status");
        assert_eq!((status.code, status.message.as_str()), (3, "does not fit"));
        let info = ErrorInfo::decode(status.details[0].value.as_slice()).expect("an info");
        assert_eq!((info.reason.as_str(), info.domain.as_str()), (REASON, DOMAIN));
        assert_eq!(info.metadata["causes"], "TYPE_INCOMPATIBLE");
        assert_eq!(info.metadata["column"], "id");
    }

    #[test]
    fn other_errors_have_no_details() {
        let error = Error::invalid("offset_gap", "a gap");
        assert!(details(tonic::Code::InvalidArgument, "a gap", &error).is_empty());
    }

    #[test]
    fn the_longest_column_fits_into_the_headers() {
        let error = Error::invalid("unknown_field", "x").at_column("😀".repeat(5000));
        let bytes = details(tonic::Code::InvalidArgument, &"x".repeat(1024), &error);
        // Base64 makes four bytes of three; beside them stands a text of up to 12 KiB, percent-encoded.
        assert!(bytes.len() < 2 << 10, "{}", bytes.len());
    }
}
