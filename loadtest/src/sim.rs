//! Simulations of what cannot be run here, with the service's own code: large pools, long times, many gateways, and the
//! whole service under faults of which real machines have too few.
//!
//! *Owns*: what there is to simulate.
//! *Does not own*: the rules that are simulated (`sluice_gateway::placement`, `sluice_pod::shed`, `sluice_shared::pool`,
//! `sluice_autoscaler::policy`).

pub mod placement;
pub mod scaling;
pub mod world;
pub mod policy;
pub mod figures;
pub mod cluster;
