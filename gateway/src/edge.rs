//! The protocols that producers speak.
//!
//! *Owns*: which protocols there are.
//! *Does not own*: what a stream means (`session`): an edge turns protocol bytes into frames of records, and
//! frames for the producer into protocol bytes, and does nothing else.

mod catalog;
mod framed;
mod gate;
mod grpc;
mod heads;
pub(crate) mod http;
mod json_text;
mod oidc;
pub(crate) mod otlp;
mod post;
pub(crate) mod quic;
pub(crate) mod tcp;
pub(crate) mod websocket;
pub(crate) mod zerobus;

/// For fuzzers: what the edges make of bytes. In builds with assertions alone.
#[cfg(debug_assertions)]
pub mod fuzzing {
    pub use super::otlp::fuzzing::Telemetry;
    pub use super::post::fuzzing::{Body, split_body};
    pub use super::websocket::fuzzing::follow_frames;
}

/// What the names of streams begin with that an edge makes itself.
const POSTED: &str = "post/";
const PERSISTENT: &str = "zerobus/";
