//! Tests on real processes: the `sluice` program of the same profile must have been built (`make test` does).

mod crash;
mod sim_cluster;
mod elastic;
mod burst;
mod bench;
mod edges;
