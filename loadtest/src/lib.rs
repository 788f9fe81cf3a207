//! The load test: one workload, one auditor, real processes.
//!
//! What is sent is noted as it is sent (`history`), what a table holds is read back by a reader that shares no code
//! with its writer (`table`), and one judge (`auditor`) compares the two, version by version.
//!
//! *Owns*: workloads, the judge, running the service's processes and killing them, figures beside limits, plots.
//! *Does not own*: anything of the service.

pub mod workload;
pub mod history;
pub mod auditor;
pub mod table;
pub mod judge;
pub mod cluster;
pub mod cut;
pub mod fault_dir;
pub mod volume;
pub mod pool;
mod up;
pub mod chaos;
pub mod elastic;
pub mod burst;
pub mod idle;
pub mod recovery;
pub mod machine;
pub(crate) mod producer;
pub mod load;
pub mod edges;
pub mod bench;
pub mod peers;
pub mod report;
pub mod plot;
pub mod sim;
#[cfg(debug_assertions)]
pub mod fuzz;
