//! Tests on real processes: the `sluice` program of the same profile must have been built (`make test` does).

mod crash;
mod bench;
mod edges;
