//! Integration tests of the pod, through its public API.

mod tables;
mod wal;
