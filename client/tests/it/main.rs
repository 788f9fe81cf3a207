//! The client against a gateway that does as it is told.
//!
//! *Owns*: the scenarios of lost connections, refusals and windows.
//! *Does not own*: a real gateway (`loadtest`).

#![allow(
    clippy::panic,
    clippy::large_futures,
    reason = "scenarios: they fail by panicking, and hold both sides"
)]

mod fake;
mod failures;
mod flow;
mod resume;
mod credentials;
