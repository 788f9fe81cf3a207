//! A small pool whose pods drain, join, die, hang and roll, and whose gateway dies, under a small load.

use std::time::Duration;

use sluice_loadtest::cluster::find_sluice;
use sluice_loadtest::elastic::{self, Phase, Scenario};
use sluice_loadtest::pool::{Options, Pool};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pool_that_changes_keeps_its_promises_and_its_producers() {
    let seed = rand::random();
    println!("seed {seed}");
    let scenario = Scenario {
        pods: 3,
        streams: 24,
        tables: 4,
        settle: Duration::from_millis(1500),
        phases: vec![
            Phase::Steady,
            Phase::Drain,
            Phase::Add(1),
            Phase::Kill,
            Phase::Restart,
            Phase::Hang(Duration::from_secs(4)),
            Phase::KillGateway,
            Phase::Roll,
        ],
        ..Scenario::seeded(seed)
    };
    let sluice = find_sluice().expect("the program under test");
    let dir = tempfile::tempdir().expect("a directory");
    let ran = Box::pin(elastic::run(&sluice, dir.path(), &scenario, &|what| println!("{what}"))).await;
    let outcome = ran.unwrap_or_else(|error| panic!("{error:#}"));
    println!("{outcome}");
    assert!(outcome.is_kept(), "{outcome}");
    assert!(outcome.sent > 1000, "only {} records were sent: a test of nothing", outcome.sent);
    // What was to move streams has moved some, and a gateway's end is noticed by its producers alone.
    for (phase, row) in scenario.phases.iter().zip(&outcome.rows) {
        let moves =
            matches!(phase, Phase::Drain | Phase::Kill | Phase::Hang(_) | Phase::Roll | Phase::KillGateway);
        assert!(!moves || row.moved.is_some(), "{phase:?} moved no stream: {outcome}");
        assert_eq!(row.span.lost > 0, *phase == Phase::KillGateway, "{phase:?}: {outcome}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_that_is_to_wait_after_its_drain_ends_at_its_signal_alone() {
    let sluice = find_sluice().expect("the program under test");
    let dir = tempfile::tempdir().expect("a directory");
    let env = [("SLUICE_POD__AFTER_DRAIN", "wait")];
    let options = Options { env: &env, ..Options::new(&sluice, dir.path(), 2, 1) };
    let pool = Pool::start(&options).await.expect("starts");
    let (_, admin) = pool.admins().next().expect("a gateway");
    admin.post("/v1/pods/pod-2/drain").await.expect("taken");
    pool.until_seen("pod-2", "drained").await.expect("it drains");
    let again = admin.post("/v1/pods/pod-2/drain").await.expect("it is there to be asked again");
    assert_eq!(again["phase"], "drained");
    pool.drain().await.expect("all end with status 0");
}
