//! The bench works; its figures are of no interest here.

use std::time::Duration;

use sluice_loadtest::bench::growth::Growth;
use sluice_loadtest::bench::{self, GrowthMax, Options, ROWS, median};
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
        growth: GrowthMax { streams: 100, tables: 10, versions: 100 },
        memory: Duration::from_secs(3),
    };
    // The bench itself compares the records that were committed with the table's rows.
    let ran = Box::pin(bench::run(&options, &|what| println!("{what}"))).await;
    let report = Report::new(ran.unwrap_or_else(|error| panic!("{error:#}")));
    println!("{report}");
    assert_eq!(report.figures.rows.len(), ROWS.len());
    let growth = report.figures.growth.iter().flat_map(|growth| &growth.points).map(|point| &point.runs);
    for runs in report.figures.rows.iter().map(|row| &row.runs).chain(growth) {
        assert!(median(runs, |run| run.records_per_s) > 0.0, "{runs:?}");
        let ms = median(runs, |run| run.committed.p50_ms - run.ack.p50_ms);
        assert!(ms >= 0.0, "committed before it was acked: {runs:?}");
    }
    let counts = |growth: &Growth| growth.points.iter().map(|point| point.count).collect::<Vec<_>>();
    assert_eq!(report.figures.growth.iter().map(counts).collect::<Vec<_>>(), [vec![1, 10, 100], vec![1, 10]]);
    let long = report.figures.long.expect("it ran");
    assert!(long.pod_memory.iter().all(|bytes| *bytes > 1 << 20) && !long.pod_memory.is_empty(), "{long:?}");
    assert!(report.figures.versions.is_some_and(|versions| versions.points.len() == 1));
}
