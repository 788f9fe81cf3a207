//! The pod is killed under load, again and again.

use sluice_loadtest::cluster::find_sluice;
use sluice_loadtest::crash::{self, Scenario};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_acknowledged_is_lost_doubled_or_reordered_by_kills() {
    check(false).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nor_with_a_log_in_the_tables_store() {
    check(true).await;
}

async fn check(object_log: bool) {
    let (seed, log) = (rand::random(), if object_log { "object" } else { "disk" });
    println!("seed {seed}: repeat it with `loadtest crash --log {log} --seed {seed}`");
    let sluice = find_sluice().expect("the program under test");
    let dir = tempfile::tempdir().expect("a directory");
    let scenario = Scenario { object_log, ..Scenario::seeded(seed) };
    let ran = Box::pin(crash::run(&sluice, dir.path(), scenario)).await;
    let outcome = ran.map_err(|error| format!("{error:#}")).expect("it ran to its end");
    println!("{} sent, {} rejected: {}", outcome.sent, outcome.rejected, outcome.verdict);
    assert!(outcome.verdict.is_clean(), "{}", outcome.verdict);
    assert_eq!(outcome.rejected, outcome.bad, "each record that fits no table is named");
    assert!(outcome.verdict.rows + outcome.rejected == outcome.sent, "all that was sent was acknowledged");
    assert!(outcome.sent > 1000, "only {} records were sent: a test of nothing", outcome.sent);
    assert_eq!(outcome.reconnects, 0, "a pod's end is no producer's business");
}
