//! Children: started, started again after a kill, drained, ended.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use sluice_autoscaler::admin::{Admin, Pool};
use sluice_autoscaler::driver::process::{DRAINED_MARK, ProcessPods, Template};
use sluice_autoscaler::driver::{Action, Driver, DriverError};

use crate::fake::{DEADLINE, Fake};

/// A pod that says where it is, drains when `go` stands in its directory or on SIGTERM, and notes that it did so. It ends
/// with the status in `code`, once.
const POD: &str = r#"d="$0/$1"; mkdir -p "$d"; echo x >> "$d/starts"
trap 'echo term >> "$d/ends"; exit 0' TERM
echo $$ > "$d/pid.new"; mv "$d/pid.new" "$d/pid"
while [ ! -e "$d/go" ]; do sleep 0.02; done
rm "$d/go"; echo drained >> "$d/ends"; [ ! -e "$d/code" ] || { code=$(cat "$d/code"); rm "$d/code"; }; exit ${code:-0}"#;

pub(crate) fn template(dir: &Path) -> Template {
    let words = ["sh", "-c", POD, &dir.display().to_string(), "{id}"];
    Template {
        command: words.map(str::to_owned).to_vec(),
        environment: Vec::new(),
        pods_dir: dir.to_owned(),
        port_base: 7170,
        gossip_port_base: 7270,
        drain_deadline: Duration::from_secs(20),
    }
}

struct Bed {
    dir: tempfile::TempDir,
    fake: Fake,
    admin: Admin,
    driver: ProcessPods,
    actions: Vec<Action>,
}

impl Bed {
    async fn new() -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let fake = Fake::start().await;
        fake.pool.lock().expect("lock").children = Some((dir.path().to_owned(), 0.5));
        let admin = Admin::new(&[fake.url()], None).expect("an address");
        let driver = ProcessPods::new(template(dir.path())).expect("a driver");
        Self { dir, fake, admin, driver, actions: Vec::new() }
    }

    async fn step(&mut self, pods: u32) -> Result<(), DriverError> {
        let actions = self.driver.step(pods, &Pool::default(), &mut self.admin).await?;
        self.actions.extend(actions);
        Ok(())
    }

    /// Steps until it is so.
    async fn until(&mut self, pods: u32, is_so: impl Fn(&Self) -> bool) {
        let mut ticks = tokio::time::interval(Duration::from_millis(10));
        let stepped = tokio::time::timeout(DEADLINE, async {
            while !is_so(self) {
                ticks.tick().await;
                self.step(pods).await.expect("a step");
            }
        });
        assert!(stepped.await.is_ok(), "not so in time; done so far: {:?}", self.actions);
    }

    fn lines(&self, id: &str, name: &str) -> usize {
        std::fs::read_to_string(self.dir.path().join(id).join(name)).map_or(0, |text| text.lines().count())
    }

    fn is_up(&self, id: &str) -> bool {
        self.dir.path().join(id).join("pid").exists()
    }

    fn has(&self, action: &Action) -> bool {
        self.actions.contains(action)
    }
}

fn is_alive(pid: u32) -> bool {
    Path::new(&format!("/proc/{pid}")).exists()
}

fn kill(pid: u32) {
    assert!(Command::new("kill").args(["-9", &pid.to_string()]).status().expect("runs").success());
}

#[tokio::test]
async fn scale_out_starts_children_and_scale_in_drains_the_last_one_first() {
    let mut bed = Bed::new().await;
    bed.until(3, |bed| ["pod-1", "pod-2", "pod-3"].iter().all(|id| bed.is_up(id))).await;
    assert_eq!(bed.driver.replicas(&Pool::default()).await.expect("known"), 3);
    let pids = bed.driver.process_ids();
    bed.until(1, |bed| bed.has(&Action::Ended("pod-2".to_owned()))).await;
    assert_eq!(bed.fake.asked(), ["drain pod-3?deadline=20s", "drain pod-2?deadline=20s"]);
    let order: Vec<&Action> =
        bed.actions.iter().filter(|action| !matches!(action, Action::Started(_))).collect();
    let named = |of: fn(String) -> Action, id: &str| of(id.to_owned());
    let expected = [
        named(Action::Draining, "pod-3"),
        named(Action::Ended, "pod-3"),
        named(Action::Draining, "pod-2"),
        named(Action::Ended, "pod-2"),
    ];
    assert_eq!(order, expected.iter().collect::<Vec<_>>());
    assert!(!is_alive(pids["pod-3"]) && is_alive(pids["pod-1"]));
    assert!(bed.dir.path().join("pod-3").join(DRAINED_MARK).exists());
    bed.driver.end().await;
}

#[tokio::test]
async fn a_killed_child_is_started_again_under_its_own_name() {
    let mut bed = Bed::new().await;
    bed.until(2, |bed| bed.is_up("pod-1") && bed.is_up("pod-2")).await;
    let before = bed.driver.process_ids()["pod-1"];
    kill(before);
    bed.until(2, |bed| bed.has(&Action::Restarted("pod-1".to_owned())) && bed.lines("pod-1", "starts") == 2)
        .await;
    assert_ne!(bed.driver.process_ids()["pod-1"], before);
    assert_eq!(bed.driver.process_ids().len(), 2);
    bed.driver.end().await;
}

#[tokio::test]
async fn one_that_was_killed_comes_back_and_drains_before_it_goes() {
    let mut bed = Bed::new().await;
    bed.until(2, |bed| bed.is_up("pod-1") && bed.is_up("pod-2")).await;
    kill(bed.driver.process_ids()["pod-2"]);
    bed.until(1, |bed| bed.has(&Action::Ended("pod-2".to_owned()))).await;
    assert!(bed.has(&Action::Restarted("pod-2".to_owned())), "{:?}", bed.actions);
    assert_eq!(bed.lines("pod-2", "starts"), 2);
    bed.driver.end().await;
}

/// As `deploy/sluice/src/up.rs` has it.
const EXIT_UNDRAINED: &str = "69";

#[tokio::test]
async fn one_whose_drain_leaves_something_in_its_log_comes_back_and_drains_again() {
    let mut bed = Bed::new().await;
    bed.until(2, |bed| bed.is_up("pod-1") && bed.is_up("pod-2")).await;
    std::fs::write(bed.dir.path().join("pod-2/code"), EXIT_UNDRAINED).expect("written");
    bed.until(1, |bed| bed.has(&Action::Restarted("pod-2".to_owned()))).await;
    assert!(!bed.has(&Action::Ended("pod-2".to_owned())), "{:?}", bed.actions);
    assert!(!bed.dir.path().join("pod-2").join(DRAINED_MARK).exists());
    bed.until(1, |bed| bed.has(&Action::Ended("pod-2".to_owned()))).await;
    assert_eq!((bed.lines("pod-2", "starts"), bed.lines("pod-2", "ends")), (2, 2));
    assert!(bed.dir.path().join("pod-2").join(DRAINED_MARK).exists());
    bed.driver.end().await;
}

#[tokio::test]
async fn the_end_drains_all_children_and_waits_for_them() {
    let mut bed = Bed::new().await;
    bed.until(3, |bed| ["pod-1", "pod-2", "pod-3"].iter().all(|id| bed.is_up(id))).await;
    let pids = bed.driver.process_ids();
    bed.driver.end().await;
    assert!(pids.values().all(|pid| !is_alive(*pid)));
    for id in ["pod-1", "pod-2", "pod-3"] {
        assert_eq!(bed.lines(id, "ends"), 1, "{id}");
        assert!(bed.dir.path().join(id).join(DRAINED_MARK).exists());
    }
}

#[tokio::test]
async fn logs_that_were_not_drained_are_started_whatever_the_number() {
    let dir = tempfile::tempdir().expect("a directory");
    for id in ["pod-4", "pod-5"] {
        std::fs::create_dir(dir.path().join(id)).expect("made");
    }
    std::fs::write(dir.path().join("pod-5").join(DRAINED_MARK), "").expect("written");
    let mut driver = ProcessPods::new(template(dir.path())).expect("a driver");
    assert_eq!(driver.replicas(&Pool::default()).await.expect("known"), 1);
    let fake = Fake::start().await;
    let mut admin = Admin::new(&[fake.url()], None).expect("an address");
    let actions = driver.step(1, &Pool::default(), &mut admin).await.expect("a step");
    assert_eq!(actions, [Action::Started("pod-4".to_owned())]);
    driver.end().await;
}

#[tokio::test]
async fn a_command_that_is_not_there_is_named() {
    let mut bed = Bed::new().await;
    let command = vec!["/no/such/program".to_owned(), "--id".to_owned(), "{id}".to_owned()];
    bed.driver = ProcessPods::new(Template { command, ..template(bed.dir.path()) }).expect("a driver");
    let error = bed.step(1).await.expect_err("no program").to_string();
    assert!(error.contains("/no/such/program --id pod-1"), "{error}");
}
