//! The services that are generated: the pod's (gateway to pod, pod to pod) from `proto/pod.proto`, and Zerobus's.
//!
//! *Owns*: every conversion between wire and domain on this link.
//! *Does not own*: who calls whom, and when.

#![allow(missing_docs, reason = "generated; the .proto file is the documentation")]

use crate::error::Error;
use crate::requests;

tonic::include_proto!("sluice.pod.v1");

/// Largest message on the link: a frame of the largest size and its envelope.
pub const MESSAGE_BYTES_MAX: usize = 32 << 20;

/// Zerobus's ingest service, as its clients speak it: `proto/zerobus.proto`.
pub mod zerobus {
    tonic::include_proto!("databricks.zerobus");
}

/// The one call of Arrow Flight that Zerobus's Arrow mode is: `proto/flight.proto`.
pub mod flight {
    tonic::include_proto!("arrow.flight.protocol");
}

impl From<requests::Boundary> for Boundary {
    fn from(boundary: requests::Boundary) -> Self {
        Self { offset: boundary.offset, requests: boundary.requests }
    }
}

impl From<Boundary> for requests::Boundary {
    fn from(boundary: Boundary) -> Self {
        Self { offset: boundary.offset, requests: boundary.requests }
    }
}

impl From<requests::RequestSpan> for RequestSpan {
    fn from(span: requests::RequestSpan) -> Self {
        let requests::Boundary { offset, requests } = span.start;
        Self { start_offset: offset, start_requests: requests, counts: span.counts }
    }
}

impl TryFrom<RequestSpan> for requests::RequestSpan {
    type Error = Error;

    fn try_from(span: RequestSpan) -> Result<Self, Error> {
        let start = requests::Boundary { offset: span.start_offset, requests: span.start_requests };
        Self::new(start, span.counts).ok_or_else(|| {
            Error::invalid("invalid_requests", "requests without records, or more than can be counted")
        })
    }
}
