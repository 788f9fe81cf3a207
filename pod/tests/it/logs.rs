//! Where a pod keeps its log, from its configuration on: a real pod that goes from one place to the other.

use std::path::Path;

use sluice_pod::app::{Listen, Pod};
use sluice_pod::config::{LogKind, PodConfig};
use sluice_shared::error::Error;
use sluice_shared::lifecycle::Hurry;
use sluice_shared::membership::Membership;
use sluice_shared::proto::pod_client::PodClient;
use tempfile::TempDir;
use tonic::transport::Channel;

use crate::streams::{Call, create_table, ephemeral};

/// Longer than any test: what is durable stays uncommitted.
const NEVER_MS: u64 = 3_600_000;

async fn start(data: &Path, log: LogKind, flush_interval_ms: u64) -> Result<Pod, Error> {
    let config = PodConfig {
        listen: "127.0.0.1:0".to_owned(),
        log,
        wal_dir: data.join("wal"),
        tables_dir: data.join("tables").into(),
        flush_interval_ms,
        ..PodConfig::default()
    };
    Pod::start(config, Listen::Tcp, Membership::fixed(Vec::new())).await
}

async fn client(pod: &Pod) -> PodClient<Channel> {
    let address = pod.address().expect("over TCP");
    PodClient::connect(format!("http://{address}")).await.expect("listens")
}

/// Of logs in the tables' store.
fn objects(data: &Path) -> usize {
    let Ok(logs) = std::fs::read_dir(data.join("tables/_sluice/wal")) else { return 0 };
    let count = |log: std::fs::DirEntry| std::fs::read_dir(log.path()).expect("a folder").count();
    logs.map(|log| count(log.expect("readable"))).sum()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_log_on_a_disk_is_not_left_behind_for_one_in_the_store() {
    let data = TempDir::new().expect("a directory");
    let pod = start(data.path(), LogKind::Disk, NEVER_MS).await.expect("starts");
    let mut asked = client(&pod).await;
    create_table(&mut asked).await;
    let mut call = Call::open(&asked, ephemeral(0)).await.expect("opened");
    call.send(0..10, &[]).await;
    call.durable(10).await;
    let hurry = Hurry::default();
    hurry.hurry();
    pod.drain_or_hurry(&hurry).await;

    let refused = start(data.path(), LogKind::Object, 20).await.err().expect("refused").to_string();
    assert!(refused.contains("pod.log = \"disk\" once more, and drain it"), "{refused}");
    assert_eq!(objects(data.path()), 0, "nothing was begun");

    start(data.path(), LogKind::Disk, 20).await.expect("starts").drain().await;
    let pod = start(data.path(), LogKind::Object, 20).await.expect("starts");
    assert!(objects(data.path()) > 0);
    let asked = client(&pod).await;
    let mut call = Call::open(&asked, ephemeral(10)).await.expect("opened");
    call.send(10..20, &[]).await;
    call.committed(20).await;
    pod.drain().await;
    assert_eq!(objects(data.path()), 0, "all of a drained log is deleted");
    // And back: there is nothing that could be left behind.
    let pod = start(data.path(), LogKind::Disk, 20).await.expect("starts");
    let asked = client(&pod).await;
    let mut call = Call::open(&asked, ephemeral(20)).await.expect("opened");
    call.send(20..30, &[]).await;
    call.committed(30).await;
    pod.drain().await;
}
