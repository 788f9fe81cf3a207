//! The stateless edge: speaks the producers' protocols, chooses a pod for each stream, carries its frames, and
//! keeps each frame until it is durable.
//!
//! *Owns*: producer connections, sessions and their windows, placement.
//! *Does not own*: order, durability, tables (`pod`).

mod config;
mod auth;
mod app;
mod certificate;
mod client_ca;
mod files;
mod socket;
mod progress;
mod peers;
mod budget;
mod edge;
mod session;
mod streams;
mod admin;
pub mod placement;
mod upstream;
mod metrics;

pub use app::Gateway;
pub use auth::{Grant, Privilege, SECRET_PREFIX, SecretHash, TablePattern, make_secret, make_token_key};
pub use certificate::{certificate_files, make_self_signed};
pub use config::{AuthMode, ClientEntry, GatewayConfig, PodEntry};
#[cfg(debug_assertions)]
pub use edge::fuzzing;
pub use files::file_faults;
