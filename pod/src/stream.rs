//! Streams as this pod holds them.

pub mod progress;
