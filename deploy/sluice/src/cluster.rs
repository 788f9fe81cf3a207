//! This process's place in the pool, as flags and the `[cluster]` section say.
//!
//! *Owns*: the flags, the choice between gossip and pods that are named by hand.
//! *Does not own*: gossip (`sluice_shared::membership`).

use clap::Args;
use sluice_shared::error::Error;
use sluice_shared::ids::PodId;
use sluice_shared::lifecycle::TaskScope;
use sluice_shared::link::PodAddress;
use sluice_shared::membership::{ClusterConfig, Membership};
use uuid::Uuid;

/// How a gateway or a pod finds the others.
#[derive(Args, Default)]
pub(crate) struct ClusterArgs {
    /// Where this process gossips with gateways and pods (UDP), as IP:PORT; nothing for pods that are named by hand.
    #[arg(long, value_name = "IP:PORT")]
    gossip_listen: Option<String>,
    /// Another member's --gossip-listen, or a host name that stands for many. May be given more than once.
    #[arg(long = "seed", value_name = "HOST:PORT")]
    seeds: Vec<String>,
    /// Where this process stands, such as an availability zone: gateways prefer pods of their own.
    #[arg(long)]
    zone: Option<String>,
}

impl ClusterArgs {
    /// The section with the flags over it.
    pub(crate) fn over(self, config: ClusterConfig) -> ClusterConfig {
        let seeds = if self.seeds.is_empty() { config.seeds } else { self.seeds };
        let gossip_listen = self.gossip_listen.or(config.gossip_listen);
        ClusterConfig { gossip_listen, seeds, zone: self.zone.or(config.zone), ..config }
    }
}

/// Joins the pool by gossip, or takes the pods that were named.
pub(crate) async fn join(
    config: &ClusterConfig,
    name: &str,
    named: Vec<(PodId, PodAddress)>,
    scope: &TaskScope,
) -> Result<Membership, Error> {
    if config.gossip_listen.is_some() {
        return Membership::gossip(config, name, scope).await;
    }
    Ok(Membership::fixed(named))
}

/// No two gateways have the same one: they hold no state that would need a lasting name.
pub(crate) fn gateway_name() -> String {
    format!("gateway-{}", Uuid::new_v4().simple())
}
