//! The targets, compiled without the rest of the rig.
//!
//! *Owns*: nothing.
//! *Does not own*: the targets (`loadtest/src/fuzz.rs`).

// Read as the rig reads it: its modules are below its own name.
#[path = "../../src"]
mod rig {
    pub mod fuzz;
}
pub use rig::fuzz;
