//! Tables.

pub mod batch;
