//! Where load goes: a pool that is started for it, one that scales itself, or one that is there already.
//!
//! *Owns*: starting and ending it, its addresses, whom to look at.
//! *Does not own*: single processes (`pool`, `up`), what happens to them when (`events`).

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use sluice_gateway::make_self_signed;

use super::scenario::Scenario;
use crate::edges::Transport;
use crate::pool::{Admin, Options, Pool};
use crate::table::count_rows;
use crate::up::Up;

/// Producers all come from one address, as those behind a load balancer do.
const DEFAULTS: [(&str, &str); 2] = [
    ("SLUICE_GATEWAY__CONNECTIONS_PER_PEER_MAX", "60000"),
    ("SLUICE_GATEWAY__CONNECTS_PER_PEER_PER_S", "100000"),
];
/// Ports are taken by chance.
const STARTS_MAX: usize = 3;
/// For all that was acked to be in the tables of a pool that goes on.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(60);
const SETTLE_INTERVAL: Duration = Duration::from_millis(500);

/// A pool that is there already.
#[derive(Debug, Clone, Default)]
pub struct Existing {
    /// `host:port` of each gateway.
    pub gateways: Vec<String>,
    /// `host:port` of an admin API, where pods are to be looked at.
    pub admin: Option<String>,
    /// The gateways' certificate, for QUIC.
    pub certificate: Option<PathBuf>,
}

/// Where load goes.
pub(crate) enum Site {
    Pool(Box<Pool>),
    Up(Box<Up>),
    Existing(Existing),
}

/// A process to look at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Watched {
    pub(crate) name: String,
    pub(crate) pid: u32,
    /// Whether its children count, too, under names of their own.
    pub(crate) with_children: bool,
}

impl Site {
    /// Starts what the scenario wants, with data and logs below `dir`. A port that was free a moment ago can be somebody
    /// else's now: then with others.
    pub(crate) async fn start(sluice: &Path, dir: &Path, scenario: &Scenario) -> anyhow::Result<Self> {
        for _ in 1..STARTS_MAX {
            match Self::try_start(sluice, dir, scenario).await {
                Err(error) if format!("{error:#}").contains("Address already in use") => {}
                other => return other,
            }
        }
        Self::try_start(sluice, dir, scenario).await
    }

    /// One that is there already.
    ///
    /// # Errors
    /// Its admin API does not answer.
    pub(crate) async fn existing(existing: Existing) -> anyhow::Result<Self> {
        if let Some(admin) = &existing.admin {
            let asked = Admin::new(admin.clone()).pods().await;
            asked.with_context(|| format!("--admin {admin}"))?;
        }
        Ok(Self::Existing(existing))
    }

    async fn try_start(sluice: &Path, dir: &Path, scenario: &Scenario) -> anyhow::Result<Self> {
        std::fs::create_dir_all(dir).with_context(|| dir.display().to_string())?;
        let mut env: BTreeMap<String, String> =
            DEFAULTS.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        if scenario.loads.iter().any(|load| load.transport == Transport::Quic) {
            let (cert, key) = make_self_signed(dir, "127.0.0.1")?;
            env.insert("SLUICE_GATEWAY__TLS_CERT".to_owned(), cert.display().to_string());
            env.insert("SLUICE_GATEWAY__TLS_KEY".to_owned(), key.display().to_string());
        }
        let pool = &scenario.pool;
        env.extend(pool.env.clone());
        let env: Vec<(&str, &str)> = env.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
        if let Some(max) = pool.pods_max {
            return Ok(Self::Up(Box::new(Up::start(sluice, dir, pool.pods..=max, &env).await?)));
        }
        let faults = super::events::need_faults(scenario);
        let options = Options { env: &env, faults, ..Options::new(sluice, dir, pool.pods, pool.gateways) };
        Ok(Self::Pool(Box::new(Pool::start(&options).await?)))
    }

    /// Where producers connect: `host:port` of each gateway.
    pub(crate) fn addresses(&self) -> Vec<String> {
        let bare = |url: &str| url.trim_start_matches("ws://").to_owned();
        match self {
            Self::Pool(pool) => pool.urls(0).split(',').map(bare).collect(),
            Self::Up(up) => vec![bare(&up.url)],
            Self::Existing(existing) => existing.gateways.clone(),
        }
    }

    /// The certificate to trust.
    pub(crate) fn certificate(&self, dir: &Path) -> Option<PathBuf> {
        match self {
            Self::Existing(existing) => existing.certificate.clone(),
            Self::Pool(_) | Self::Up(_) => Some(dir.join("quic.crt")).filter(|path| path.is_file()),
        }
    }

    /// Admin APIs that answer now.
    pub(crate) fn admins(&self) -> Vec<Admin> {
        match self {
            Self::Pool(pool) => pool.admins().map(|(_, admin)| admin.clone()).collect(),
            Self::Up(up) => vec![up.admin.clone()],
            Self::Existing(existing) => existing.admin.iter().cloned().map(Admin::new).collect(),
        }
    }

    /// Its processes, where they are ours.
    pub(crate) fn watched(&mut self) -> Vec<Watched> {
        match self {
            Self::Pool(pool) => members_of(pool),
            Self::Up(up) => {
                vec![Watched { name: "up".to_owned(), pid: up.process.pid(), with_children: true }]
            }
            Self::Existing(_) => Vec::new(),
        }
    }

    /// The ends of its logs.
    pub(crate) fn log_tails(&self) -> String {
        match self {
            Self::Pool(pool) => pool.log_tails(),
            Self::Up(up) => up.process.log_tail(),
            Self::Existing(_) => String::new(),
        }
    }

    /// Processes of ours that have ended though nobody made them, and how. From then on they do not run.
    pub(crate) fn died(&mut self) -> anyhow::Result<Vec<(String, ExitStatus)>> {
        match self {
            Self::Pool(pool) => {
                let mut died = Vec::new();
                for member in pool.members() {
                    let Some(process) = pool.process(&member) else { continue };
                    if let Some(status) = process.ended()? {
                        pool.take(&member);
                        died.push((member.to_string(), status));
                    }
                }
                Ok(died)
            }
            Self::Up(up) => {
                Ok(up.process.ended()?.map(|status| ("up".to_owned(), status)).into_iter().collect())
            }
            Self::Existing(_) => Ok(Vec::new()),
        }
    }

    /// Rows that tables have before.
    pub(crate) async fn rows_before(&self, tables: &[String]) -> anyhow::Result<BTreeMap<String, u64>> {
        match self {
            Self::Existing(existing) => shown_rows(existing, tables).await,
            Self::Pool(_) | Self::Up(_) => Ok(tables.iter().map(|table| (table.clone(), 0)).collect()),
        }
    }

    /// Ends it once all that was accepted is in the tables, and counts their rows. Of a pool that goes on they are asked
    /// for until there are as many as `expected` in all.
    pub(crate) async fn finish(
        self,
        dir: &Path,
        tables: &[String],
        expected: u64,
    ) -> anyhow::Result<BTreeMap<String, u64>> {
        match self {
            Self::Existing(existing) => {
                let asked = Instant::now();
                loop {
                    let rows = shown_rows(&existing, tables).await?;
                    if rows.values().sum::<u64>() >= expected || asked.elapsed() > SETTLE_TIMEOUT {
                        return Ok(rows);
                    }
                    tokio::time::sleep(SETTLE_INTERVAL).await;
                }
            }
            Self::Pool(mut pool) => {
                // The log of a pod that is dead is in no table.
                for member in pool.members() {
                    if pool.process(&member).is_none() {
                        pool.start_member(&member)?;
                    }
                }
                for id in pool.running_pods() {
                    pool.until_seen(&id, "active").await?;
                }
                pool.drain().await?;
                tables.iter().map(|table| Ok((table.clone(), count_rows(&table_dir(dir, table))?))).collect()
            }
            Self::Up(up) => {
                let Up { process, .. } = *up;
                process.signal(libc::SIGTERM)?;
                process.drained().await?;
                tables.iter().map(|table| Ok((table.clone(), count_rows(&table_dir(dir, table))?))).collect()
            }
        }
    }
}

/// The processes of a pool that run.
pub(crate) fn members_of(pool: &mut Pool) -> Vec<Watched> {
    let mut watched = Vec::new();
    for member in pool.members() {
        let pid = pool.process(&member).map(|process| process.pid());
        watched.extend(pid.map(|pid| Watched { name: member.to_string(), pid, with_children: false }));
    }
    watched
}

/// Where a table of the default catalog and schema is kept.
pub(crate) fn table_dir(dir: &Path, table: &str) -> PathBuf {
    dir.join("data/tables/main/default").join(table)
}

async fn shown_rows(existing: &Existing, tables: &[String]) -> anyhow::Result<BTreeMap<String, u64>> {
    let gateway = existing.gateways.first().context("no gateway")?;
    let gateway = Admin::new(gateway.clone());
    let mut rows = BTreeMap::new();
    for table in tables {
        let shown = gateway.get(&format!("/v1/tables/{table}")).await?;
        let count = shown["rows"].as_u64();
        ensure!(count.is_some(), "table {table}: the gateway tells no rows: {shown}");
        rows.insert(table.clone(), count.unwrap_or(0));
    }
    Ok(rows)
}
