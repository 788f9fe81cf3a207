//! The pod service (gateway to pod, pod to pod), generated from `proto/pod.proto`, and its conversions.
//!
//! *Owns*: every conversion between wire and domain on this link.
//! *Does not own*: who calls whom, and when.

#![allow(missing_docs, reason = "generated; the .proto file is the documentation")]

tonic::include_proto!("sluice.pod.v1");

/// Largest message on the link: a frame of the largest size and its envelope.
pub const MESSAGE_BYTES_MAX: usize = 32 << 20;
