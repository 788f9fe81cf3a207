//! The targets, compiled without the rest of the rig.
//!
//! *Owns*: nothing.
//! *Does not own*: the targets (`loadtest/src/fuzz.rs`).

#[path = "../../src/fuzz.rs"]
pub mod fuzz;
