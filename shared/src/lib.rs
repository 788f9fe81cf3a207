//! The words and rules that both sides of Sluice must agree on.
//!
//! *Owns*: ids and their arithmetic, the producers' wire format, requests, CSV as records, protobuf's wire, the
//! gateway-to-pod service, table specs, membership and the pool view, error kinds, configuration, lifecycle,
//! faults on purpose, telemetry.
//! *Does not own*: anything that only one crate needs.

pub mod ids;
pub mod error;
pub mod frame;
pub mod requests;
pub mod csv;
pub mod prefixed;
pub mod protobuf;
pub mod codec;
pub mod proto;
pub mod table;
pub mod pool;
pub mod membership;
pub mod link;
pub mod config;
pub mod lifecycle;
pub mod fault;
pub mod telemetry;
