//! Tests on real processes: the `sluice` program of the same profile must have been built (`make test` does).

mod sim_cluster;
mod chaos;
mod bugs;
mod elastic;
mod burst;
mod bench;
mod edges;
#[cfg(debug_assertions)]
mod fuzz;
mod rig;
