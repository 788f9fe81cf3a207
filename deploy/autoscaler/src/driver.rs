//! How pods are started and ended: the one seam of the autoscaler.
//!
//! A driver is asked again and again to come one step nearer to a number of pods, and remembers as little as it can: what
//! the pool and the orchestrator say now counts. Nothing that takes long is waited for.
//!
//! *Owns*: what all drivers have in common. *Does not own*: the number (`policy`).

pub mod kubernetes;
pub mod process;

use std::fmt;
use std::future::Future;

use crate::admin::{Admin, AdminError, Pool};
use crate::http::HttpError;

/// Why a step was not taken. The next one tries again.
#[derive(Debug, thiserror::Error)]
pub enum DriverError {
    /// The pod was not asked to drain or to join.
    #[error(transparent)]
    Admin(#[from] AdminError),
    /// A pod's process was not started.
    #[error("cannot start {id} as {command}: {source}")]
    Start {
        /// Which pod.
        id: String,
        /// The command.
        command: String,
        /// Why.
        source: std::io::Error,
    },
    /// A file or directory of a pod.
    #[error("cannot {what} {path}: {source}")]
    File {
        /// What was tried.
        what: &'static str,
        /// With which file.
        path: String,
        /// Why.
        source: std::io::Error,
    },
    /// The orchestrator did not answer.
    #[error("the Kubernetes API: {0}")]
    Unreached(#[from] HttpError),
    /// The orchestrator refused.
    #[error("the Kubernetes API answered {verb} {path} with {status} ({message}): {advice}")]
    Refused {
        /// `GET` or `PATCH`.
        verb: &'static str,
        /// Of what.
        path: String,
        /// The status.
        status: u16,
        /// What it says.
        message: String,
        /// How to mend it.
        advice: &'static str,
    },
    /// The orchestrator's answer is none.
    #[error("the Kubernetes API's answer to {verb} {path} cannot be read: {source}")]
    Unread {
        /// `GET` or `PATCH`.
        verb: &'static str,
        /// Of what.
        path: String,
        /// What is wrong.
        source: serde_json::Error,
    },
    /// Something that the driver needs is not there.
    #[error("{0}")]
    Setup(String),
}

/// What a step did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// A pod was started for the first time.
    Started(String),
    /// A pod that ended by itself was started again, on its log.
    Restarted(String),
    /// A pod was asked to drain.
    Draining(String),
    /// A pod's drain was ended.
    Rejoined(String),
    /// A pod has drained and ended.
    Ended(String),
    /// The orchestrator was told another number.
    Scaled {
        /// So many before.
        from: u32,
        /// So many from now on.
        to: u32,
    },
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Started(id) => write!(f, "started {id}"),
            Self::Restarted(id) => write!(f, "{id} ended by itself: started it again on its log"),
            Self::Draining(id) => write!(f, "asked {id} to drain"),
            Self::Rejoined(id) => write!(f, "asked {id} to stay"),
            Self::Ended(id) => write!(f, "{id} has drained and ended"),
            Self::Scaled { from, to } => write!(f, "scaled from {from} to {to} replicas"),
        }
    }
}

/// Starts pods, and ends them by drains alone: a pod that has not drained may hold records that are in no table.
pub trait Driver: Send {
    /// How many pods it runs, those that are on their way out not counted.
    fn replicas(&mut self, pool: &Pool) -> impl Future<Output = Result<u32, DriverError>> + Send;

    /// Comes nearer to `pods`: starts what is missing, drains one that is too many, starts again what ended by itself.
    fn step(
        &mut self,
        pods: u32,
        pool: &Pool,
        admin: &mut Admin,
    ) -> impl Future<Output = Result<Vec<Action>, DriverError>> + Send;

    /// The autoscaler ends: what ends with it is drained.
    fn end(&mut self) -> impl Future<Output = ()> + Send;
}

/// For an autoscaler that only says how many: something else (KEDA and HPA) starts and ends them.
pub struct Advisor;

impl Driver for Advisor {
    async fn replicas(&mut self, pool: &Pool) -> Result<u32, DriverError> {
        use crate::policy::PodPhase::{Active, Joining};
        let counts = pool.pods.iter().filter(|pod| matches!(pod.phase, Active | Joining)).count();
        Ok(u32::try_from(counts).unwrap_or(u32::MAX))
    }

    async fn step(&mut self, _: u32, _: &Pool, _: &mut Admin) -> Result<Vec<Action>, DriverError> {
        Ok(Vec::new())
    }

    async fn end(&mut self) {}
}
