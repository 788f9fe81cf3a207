//! Simulations of what cannot be run here, with the service's own code.
//!
//! *Owns*: what there is to simulate.
//! *Does not own*: the rules that are simulated.

pub mod scaling;
