//! A pool under everything that can happen to one; and one pod that ends again and again.

use std::time::Duration;

use sluice_loadtest::chaos::schedule::Kinds;
use sluice_loadtest::chaos::{self, Scenario};
use sluice_loadtest::cluster::find_sluice;

async fn run(scenario: &Scenario) -> chaos::Outcome {
    let sluice = find_sluice().expect("the program under test");
    let dir = tempfile::tempdir().expect("a directory");
    let ran = Box::pin(chaos::run(&sluice, dir.path(), scenario, &|what| println!("{what}"))).await;
    let outcome = ran.expect("no process ends for no reason, and all tables can be read");
    println!("{outcome}");
    assert!(outcome.is_kept(), "{outcome}");
    assert!(
        outcome.figures.records > 1000,
        "only {} records were sent: a test of nothing",
        outcome.figures.records
    );
    outcome
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_promise_is_broken_whatever_happens_to_the_pool() {
    let seed = rand::random();
    println!("seed {seed}: repeat it with `loadtest chaos --seconds 60 --seed {seed}`");
    let outcome = run(&Scenario::seeded(seed, Duration::from_secs(60))).await;
    assert_eq!(outcome.figures.never_passed(), Vec::<&str>::new(), "{outcome}");
    assert!(outcome.figures.pod_kills >= 10 && outcome.figures.gateway_kills >= 2, "{outcome}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nor_is_one_with_logs_in_the_tables_store() {
    let seed = rand::random();
    println!("seed {seed}: repeat it with `loadtest chaos --log object --seconds 20 --seed {seed}`");
    let scenario = Scenario { object_log: true, ..Scenario::seeded(seed, Duration::from_secs(20)) };
    let outcome = run(&scenario).await;
    assert_eq!(outcome.figures.never_passed(), Vec::<&str>::new(), "{outcome}");
    assert!(outcome.figures.pod_kills >= 3, "{outcome}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pods_end_is_no_producers_business() {
    ends(false).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nor_is_it_with_a_log_in_the_tables_store() {
    ends(true).await;
}

async fn ends(object_log: bool) {
    let (seed, log) = (rand::random(), if object_log { "object" } else { "disk" });
    println!("seed {seed}: repeat it with `loadtest chaos --ends --log {log} --seconds 20 --seed {seed}`");
    let lasts = Duration::from_secs(20);
    let scenario = Scenario { kinds: Kinds::Ends, pods: 1, gateways: 1, ..Scenario::seeded(seed, lasts) };
    let scenario = Scenario { object_log, ..scenario };
    let outcome = run(&scenario).await;
    assert_eq!(outcome.figures.lost, 0, "{outcome}");
    assert!(outcome.figures.pod_kills >= 5 && outcome.figures.drains >= 1, "{outcome}");
}
