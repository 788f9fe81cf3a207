//! `sluice up --pods MIN..MAX`: gateway and autoscaler in one process, and pods that are its children.
//!
//! *Owns*: starting it, the ways to it.
//! *Does not own*: what is sent to it.

use std::ops::RangeInclusive;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, ensure};
use tokio::time::Instant;

use crate::cluster::{Process, free_port};
use crate::pool::Admin;

/// The first pods take streams after it at the latest.
const START_TIMEOUT: Duration = Duration::from_secs(60);
/// Between two looks at the pool.
const LOOK_INTERVAL: Duration = Duration::from_millis(500);

/// A pool that scales itself.
pub(crate) struct Up {
    pub(crate) process: Process,
    pub(crate) admin: Admin,
    /// Where producers connect: `ws://host:port`.
    pub(crate) url: String,
}

impl Up {
    /// Starts it with data and logs below `dir`, and waits until the first pods take streams. `env` is set for all.
    pub(crate) async fn start(
        sluice: &Path,
        dir: &Path,
        pods: RangeInclusive<usize>,
        env: &[(&str, &str)],
    ) -> anyhow::Result<Self> {
        std::fs::create_dir_all(dir).with_context(|| dir.display().to_string())?;
        let (listen, admin) = (free_port()?, format!("127.0.0.1:{}", free_port()?));
        let mut command = Command::new(sluice);
        command.args(["up", "--pods", &format!("{}..{}", pods.start(), pods.end())]);
        command.arg("--data").arg(dir.join("data"));
        command.envs([
            ("SLUICE_GATEWAY__LISTEN", format!("127.0.0.1:{listen}").as_str()),
            ("SLUICE_GATEWAY__QUIC_LISTEN", "off"),
            ("SLUICE_GATEWAY__ADMIN_LISTEN", &admin),
            ("SLUICE_AUTOSCALER__LISTEN", "127.0.0.1:0"),
        ]);
        command.envs(env.iter().copied());
        let (process, _) = Process::start("up", command, "autoscaler keeps", dir)?;
        let up = Self { process, admin: Admin::new(admin), url: format!("ws://127.0.0.1:{listen}") };
        let asked = Instant::now();
        while up.admin.pods().await?.iter().filter(|pod| pod.phase == "active").count() < *pods.start() {
            ensure!(asked.elapsed() < START_TIMEOUT, "no pods in {START_TIMEOUT:?}");
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
        Ok(up)
    }
}
