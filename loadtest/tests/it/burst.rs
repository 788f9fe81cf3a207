//! A small pool that scales itself, under a small load that becomes five times as much: its promises, not its times.

use std::time::Duration;

use sluice_loadtest::burst::{self, Scenario};
use sluice_loadtest::cluster::find_sluice;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pool_grows_under_a_burst_and_shrinks_again_and_no_producer_notices() {
    let seed = rand::random();
    println!("seed {seed}");
    let scenario = Scenario {
        max: 4,
        pod_bytes_per_s: 40 << 10,
        tables: 2,
        streams: 4,
        records: 4,
        lasts: Duration::from_secs(15),
        before: Duration::from_secs(4),
        burst: Duration::from_secs(50),
        after_max: Duration::from_secs(90),
        quiet_s: 5,
        ..Scenario::seeded(seed)
    };
    let sluice = find_sluice().expect("the program under test");
    let dir = tempfile::tempdir().expect("a directory");
    let ran = Box::pin(burst::run(&sluice, dir.path(), &scenario, &|what| println!("{what}"))).await;
    let outcome = ran.unwrap_or_else(|error| panic!("{error:#}"));
    println!("{outcome}");
    assert!(outcome.is_kept(), "{outcome}");
    assert!(outcome.sent() > 1000, "only {} records were sent: a test of nothing", outcome.sent());
}
