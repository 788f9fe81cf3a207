//! The bench works; its figures are of no interest here.

use std::time::Duration;

use sluice_loadtest::bench::{self, Options, ROWS};
use sluice_loadtest::cluster::find_sluice;
use sluice_loadtest::report::Report;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_row_of_the_bench_arrives_in_its_table() {
    let sluice = find_sluice().expect("the program under test");
    let dir = tempfile::tempdir().expect("a directory");
    let options = Options {
        sluice,
        dir: dir.path().to_owned(),
        run: Duration::from_secs(2),
        runs: 1,
        with_limits: false,
        only: Vec::new(),
        loadtest: None,
    };
    // The bench itself compares the records that were committed with the table's rows.
    let ran = Box::pin(bench::run(&options, &|what| println!("{what}"))).await;
    let report = Report::new(ran.unwrap_or_else(|error| panic!("{error:#}")));
    println!("{report}");
    assert_eq!(report.figures.rows.len(), ROWS.len());
    for row in &report.figures.rows {
        assert!(row.median.records > 0, "({}) sent nothing", row.row.key);
        assert!(row.median.ack.p50_ms <= row.median.committed.p50_ms, "({}) {:?}", row.row.key, row.median);
    }
}
