//! What is wrong with a configuration: all of it at once, each behind the place where it was set.
//!
//! *Owns*: gathering what the parts find in their values and files; addresses and directories of this machine.
//! *Does not own*: what values may be (`GatewayConfig`, `PodConfig`), reading the configuration (`config`).

use std::fmt::Display;
use std::io::ErrorKind;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use sluice_gateway::{GatewayConfig, file_faults};
use sluice_pod::config::{LogKind, PodConfig};
use sluice_pod::table::TablesPlace;
use sluice_shared::config::Places;
use tokio::net::{TcpListener, UdpSocket};

use crate::print;

/// How long a check waits for a bucket's answer.
const BUCKET_TIMEOUT: Duration = Duration::from_secs(5);

/// What the faults are looked for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Aim {
    /// A start, which needs its ports at once.
    Start,
    /// `--check-config`: the ports may be those of a process that runs, and is to be started anew.
    Check,
}

/// Found so far.
pub(crate) struct Faults<'a> {
    places: &'a Places,
    aim: Aim,
    found: Vec<String>,
}

impl<'a> Faults<'a> {
    pub(crate) fn new(places: &'a Places, aim: Aim) -> Self {
        Self { places, aim, found: Vec::new() }
    }

    pub(crate) fn add(&mut self, complaint: impl Display) {
        self.found.push(self.places.name(&complaint.to_string()));
    }

    pub(crate) fn check<T>(&mut self, checked: anyhow::Result<T>) -> Option<T> {
        checked.map_err(|error| self.add(format_args!("{error:#}"))).ok()
    }

    pub(crate) fn extend(&mut self, complaints: impl IntoIterator<Item: Display>) {
        complaints.into_iter().for_each(|complaint| self.add(complaint));
    }

    /// A gateway's values, files and addresses. `files` is the same configuration without what has yet to be made.
    pub(crate) async fn gateway(&mut self, config: &GatewayConfig, files: &GatewayConfig) {
        self.extend(config.faults());
        self.extend(file_faults(files));
        self.listener("gateway.listen", config.plain_address()).await;
        self.listener("gateway.tls_listen", config.tls_address()).await;
        let quic = config.quic_address().filter(|_| config.tls_cert.is_some());
        if let Some(listen) = quic.and_then(|listen| self.to_bind(listen))
            && let Err(error) = UdpSocket::bind(&listen).await
        {
            self.cannot_listen(&listen, "gateway.quic_listen, UDP; `off` switches QUIC off", &error);
        }
    }

    /// A pod's values and directories.
    pub(crate) async fn pod(&mut self, config: &PodConfig) {
        self.extend(config.faults());
        if config.log == LogKind::Disk {
            self.directory("pod.wal_dir", &config.wal_dir);
        }
        self.tables("pod.tables_dir", &config.tables_dir).await;
    }

    /// A place for tables. For a check a bucket is asked for its list; a start asks it soon enough.
    pub(crate) async fn tables(&mut self, key: &str, place: &TablesPlace) {
        if let TablesPlace::Directory(dir) = place {
            self.directory(key, dir);
        }
        let answer = match (place.check(), self.aim) {
            (Ok(()), Aim::Check) => place.reach(BUCKET_TIMEOUT).await,
            (checked, _) => checked,
        };
        self.extend(answer.err().map(|why| format!("{key}, {why}")));
    }

    /// A directory that is there, or can be made, and written.
    pub(crate) fn directory(&mut self, key: &str, dir: &Path) {
        // Behind the last directory of a relative path comes the current one, as an empty path.
        let there = dir.ancestors().find(|dir| dir.symlink_metadata().is_ok()).unwrap_or(Path::new("."));
        // A file without a name, which is gone when it is closed. A full disk is dealt with by waiting for room.
        if let Err(error) = tempfile::tempfile_in(there)
            && error.kind() != ErrorKind::StorageFull
        {
            let advice = "name a directory that can be written";
            self.add(format_args!(
                "{key}, {}: cannot write to {}: {error}: {advice}",
                dir.display(),
                there.display()
            ));
        }
    }

    /// Whether the address can be had, before anything is made on disk. It is bound for good later: what takes it in
    /// between is told then.
    pub(crate) async fn listener(&mut self, key: &str, listen: Option<&str>) {
        if let Some(listen) = listen.and_then(|listen| self.to_bind(listen))
            && let Err(error) = TcpListener::bind(&listen).await
        {
            self.cannot_listen(&listen, key, &error);
        }
    }

    /// What to bind to find out: for a check a free port of the host. None for what is no address, which was told.
    fn to_bind(&self, listen: &str) -> Option<String> {
        sluice_shared::config::check_listen("", listen).ok()?;
        match self.aim {
            Aim::Start => Some(listen.to_owned()),
            Aim::Check => listen.rsplit_once(':').map(|(host, _)| format!("{host}:0")),
        }
    }

    fn cannot_listen(&mut self, listen: &str, key: &str, error: &std::io::Error) {
        let advice = match error.kind() {
            ErrorKind::AddrInUse => {
                "another process listens there; give another address with --listen HOST:PORT"
            }
            ErrorKind::AddrNotAvailable => "this machine has no such address",
            ErrorKind::PermissionDenied => "ports below 1024 need a right to them; choose a higher one",
            _ => "expected HOST:PORT of this machine",
        };
        self.add(format_args!("cannot listen on {listen:?} ({key}): {error}: {advice}"));
    }

    /// Goes on with a start, or not.
    ///
    /// # Errors
    /// All that was found.
    pub(crate) fn none(self) -> anyhow::Result<()> {
        anyhow::ensure!(self.found.is_empty(), "{}", self.found.join("\nerror: "));
        Ok(())
    }

    /// Ends a check.
    ///
    /// # Errors
    /// Where standard output cannot be written.
    pub(crate) fn told(self, file: Option<&Path>) -> anyhow::Result<ExitCode> {
        self.none()?;
        let of = file.map_or("defaults and environment".into(), |file| file.display().to_string());
        print::answer(format_args!("configuration is good: {of}"))?;
        Ok(ExitCode::SUCCESS)
    }
}
