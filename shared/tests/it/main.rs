//! Tests of what spans crates.

mod tidy;
