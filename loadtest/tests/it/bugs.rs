//! The rig finds planted bugs, and nothing where there are none.

use futures_util::StreamExt;
use sluice_loadtest::chaos::bugs;
use sluice_loadtest::cluster::find_sluice;
use sluice_loadtest::volume::Volume;
use sluice_shared::fault::Bug;

/// Pools at one time: they mostly wait.
const AT_ONCE: usize = 3;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_planted_bug_shows_as_what_it_is_and_only_where_it_is_planted() {
    let sluice = &find_sluice().expect("the program under test");
    let room = tempfile::tempdir().expect("a directory");
    let volume = Volume::mount(&room.path().join("image"), &room.path().join("volume"));
    if let Err(why) = &volume {
        println!(
            "left out, for no volume can be mounted: power loss with {}: {why:#}",
            Bug::FlushSkipped.name()
        );
    }
    let all: Vec<Bug> =
        Bug::ALL.iter().copied().filter(|bug| volume.is_ok() || !bugs::needs_volume(*bug)).collect();
    drop(volume);
    let runs = all.iter().flat_map(|bug| [(*bug, true), (*bug, false)]);
    let runs = futures_util::stream::iter(runs).map(|(bug, is_planted)| async move {
        let dir = tempfile::tempdir().expect("a directory");
        let found = bugs::run(sluice, dir.path(), bug, is_planted).await;
        (
            bug,
            is_planted,
            found.unwrap_or_else(|error| panic!("{}, planted: {is_planted}: {error:#}", bug.name())),
        )
    });
    let runs: Vec<_> = runs.buffer_unordered(AT_ONCE).collect().await;
    assert_eq!(runs.len(), 2 * all.len());
    for (bug, is_planted, found) in &runs {
        println!("{}, planted: {is_planted}: {} records, {}", bug.name(), found.records, found.verdict);
        found.failures.iter().for_each(|failure| println!("  {failure}"));
    }
    for (bug, is_planted, found) in runs {
        let (name, verdict) = (bug.name(), &found.verdict);
        assert!(found.records > 100, "{name}: only {} records were sent: a test of nothing", found.records);
        if is_planted {
            assert!(found.is(bug), "{name} was not found: {verdict}");
        } else {
            assert!(verdict.is_clean(), "{name} is not planted: {verdict}");
            // A gateway that loses a frame is refused: that is what the gate is for.
            assert!(found.failures.is_empty() || bug == Bug::GateWithGap, "{name}: {:?}", found.failures);
        }
    }
}
