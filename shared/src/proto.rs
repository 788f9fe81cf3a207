//! The services that are generated: the pod's (gateway to pod, pod to pod) from `proto/pod.proto`, and Zerobus's.
//!
//! *Owns*: every conversion between wire and domain on this link.
//! *Does not own*: who calls whom, and when.

#![allow(missing_docs, reason = "generated; the .proto file is the documentation")]

tonic::include_proto!("sluice.pod.v1");

/// Largest message on the link: a frame of the largest size and its envelope.
pub const MESSAGE_BYTES_MAX: usize = 32 << 20;

/// Zerobus's ingest service, as its clients speak it: `proto/zerobus.proto`.
pub mod zerobus {
    tonic::include_proto!("databricks.zerobus");
}
