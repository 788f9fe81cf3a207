//! The autoscaler: keeps the pool as large as its load asks for.
//!
//! It asks a gateway what the pods carry, decides (`policy`), and has a driver start pods or drain them. Everything it
//! knows is soft: one that restarts takes no pod out before it has seen a quiet period itself.
//!
//! *Owns*: the policy, its loop, the drivers, the scaler for KEDA.
//! *Does not own*: drains and joins (the pods do them, asked through a gateway's admin API), placement.

pub mod policy;
pub mod config;
mod http;
pub mod admin;
pub mod driver;
mod metrics;
pub mod keda;
pub mod app;

pub use app::{Autoscaler, StartError};
pub use config::{AutoscalerConfig, DriverKind};
pub use http::HttpError;
