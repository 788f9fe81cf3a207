//! Integration tests of the pod, through its public API.

#![allow(clippy::panic, reason = "a helper that panics fails its test")]

mod requests;
mod streams;
mod logs;
mod tables;
mod wal;
