//! Members that gossip on loopback, and configurations that cannot be.

use super::*;
use crate::lifecycle::OnPanic;

/// Longer than anything here takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(30);

fn id(pod: &str) -> PodId {
    pod.parse().expect("valid")
}

fn state(phase: Phase, sequence: u64) -> PodState {
    let load = LoadReport { sequence, ingress: 0.25, ..LoadReport::default() };
    let address = "127.0.0.1:7171".parse().expect("valid");
    PodState { address, phase, zone: Some("a".to_owned()), tables: None, load }
}

async fn member(name: &str, seeds: &[&Membership]) -> (Membership, TaskScope) {
    let seeds = seeds.iter().filter_map(|seed| seed.gossip_address()).map(|seed| seed.to_string()).collect();
    let gossip_listen = Some("127.0.0.1:0".to_owned());
    let config = ClusterConfig { gossip_listen, seeds, ..ClusterConfig::default() };
    let scope = TaskScope::new(OnPanic::EndTask);
    let membership = Membership::gossip(&config, name, &scope).await.expect("a free port");
    (membership, scope)
}

async fn until(membership: &Membership, what: &str, wanted: impl Fn(&Members) -> bool) -> Arc<Members> {
    let mut members = membership.watch();
    let found = tokio::time::timeout(PATIENCE, members.wait_for(|members| wanted(members))).await;
    let found = found.unwrap_or_else(|_| panic!("{what}: not in {PATIENCE:?}"));
    Arc::clone(&found.expect("the membership is there"))
}

fn phase(members: &Members, pod: &str) -> Option<Phase> {
    members.pods.get(&id(pod)).filter(|pod| pod.lost.is_none()).map(|pod| pod.state.phase)
}

#[tokio::test(flavor = "multi_thread")]
async fn members_find_each_other_and_hear_of_changes_and_losses() {
    let (gateway, _scope) = member("gateway-1", &[]).await;
    gateway.announce_gateway(GatewayMember { admin: Some("127.0.0.1:7073".to_owned()) });
    let (one, scope_of_one) = member("pod-1", &[&gateway]).await;
    one.announce_pod(&id("pod-1"), state(Phase::Active, 1));
    // It knows the gateway alone, and hears of the other pod all the same.
    let (two, _scope) = member("pod-2", &[&gateway]).await;
    two.announce_pod(&id("pod-2"), state(Phase::Joining, 1));
    for membership in [&gateway, &one, &two] {
        let members =
            until(membership, "all three", |members| members.pods.len() == 2 && !members.gateways.is_empty());
        let members = members.await;
        assert_eq!(phase(&members, "pod-2"), Some(Phase::Joining));
        assert_eq!(members.pods[&id("pod-1")].state, state(Phase::Active, 1));
    }
    two.announce_pod(&id("pod-2"), state(Phase::Active, 2));
    let members = until(&one, "pod-2 active", |members| phase(members, "pod-2") == Some(Phase::Active)).await;
    assert!(members.pods[&id("pod-2")].active_since.is_some(), "it was seen to become active");
    let view = members.view(Instant::now());
    assert_eq!((view.pods().len(), view.gateways), (2, 1));
    scope_of_one.cancel();
    let members = until(&gateway, "pod-1 lost", |members| phase(members, "pod-1").is_none()).await;
    assert!(members.pods.contains_key(&id("pod-1")), "shown as lost");
    assert!(members.view(Instant::now()).pod(&id("pod-1")).is_none(), "and not placed on");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_that_was_started_again_counts_as_it_is_now() {
    let (gateway, _scope) = member("gateway-1", &[]).await;
    let (old, scope_of_old) = member("pod-1", &[&gateway]).await;
    old.announce_pod(&id("pod-1"), state(Phase::Active, 40));
    until(&gateway, "the first life", |members| phase(members, "pod-1") == Some(Phase::Active)).await;
    scope_of_old.cancel();
    let (new, _scope) = member("pod-1", &[&gateway]).await;
    new.announce_pod(&id("pod-1"), state(Phase::Joining, 1));
    until(&gateway, "the second life", |members| phase(members, "pod-1") == Some(Phase::Joining)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_that_has_drained_is_heard_before_it_is_gone() {
    let (gateway, _scope) = member("gateway-1", &[]).await;
    let (pod, scope_of_pod) = member("pod-1", &[&gateway]).await;
    pod.announce_pod(&id("pod-1"), state(Phase::Active, 1));
    until(&gateway, "pod-1 active", |members| phase(members, "pod-1") == Some(Phase::Active)).await;
    pod.announce_pod(&id("pod-1"), state(Phase::Drained, 2));
    pod.told().await;
    scope_of_pod.cancel();
    let gone = |members: &Members| members.pods.get(&id("pod-1")).is_some_and(|pod| pod.lost.is_some());
    let members = until(&gateway, "pod-1 gone", gone).await;
    assert_eq!(members.pods[&id("pod-1")].state.phase, Phase::Drained);
}

#[test]
fn configurations_that_cannot_be_are_named() {
    let refused = |config: ClusterConfig| config.validate().expect_err("refused").to_string();
    let listen = |listen: &str| Some(listen.to_owned());
    let config = ClusterConfig { gossip_listen: listen("0.0.0.0:7172"), ..ClusterConfig::default() };
    assert!(refused(config).contains("cluster.gossip_advertise"));
    let config = ClusterConfig { gossip_listen: listen("here"), ..ClusterConfig::default() };
    assert!(refused(config).contains("cluster.gossip_listen is \"here\""));
    let config = ClusterConfig { seeds: vec!["pods:7172".to_owned()], ..ClusterConfig::default() };
    assert!(refused(config).contains("needs cluster.gossip_listen"));
    let gossip_listen = listen("127.0.0.1:0");
    let config = ClusterConfig { seeds: vec!["pods".to_owned()], gossip_listen, ..ClusterConfig::default() };
    assert!(refused(config).contains("cluster.seeds has \"pods\""));
}
