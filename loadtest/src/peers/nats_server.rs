//! NATS's server: started on loopback with a configuration of our own, gone with its owner.
//!
//! *Owns*: its configuration.
//! *Does not own*: its client (`loadtest/peers`), installing it (`make bench-peers`).

use std::path::Path;
use std::process::Command;

use anyhow::Context;

use super::Durability;
use crate::cluster::{Process, free_port};

/// What it prints when it takes connections.
const READY: &str = "Server is ready";

/// When a stream's file is flushed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sync {
    /// With each message, before its ack.
    Always,
    /// As the server does where nothing is said of it: each two minutes.
    Default,
}

impl Sync {
    /// What an ack promises with it.
    pub fn durability(self) -> Durability {
        match self {
            Self::Always => Durability { flushed: true, how: "sync_interval: always".to_owned() },
            Self::Default => Durability {
                flushed: false,
                how: "default: sync_interval 2m, acks from the page cache".to_owned(),
            },
        }
    }
}

/// A server that runs.
pub struct NatsServer {
    process: Process,
    address: String,
}

impl NatsServer {
    /// Starts the program, with data, configuration and log below `dir`.
    ///
    /// # Errors
    /// It does not start.
    pub fn start(program: &Path, dir: &Path, sync: Sync) -> anyhow::Result<Self> {
        let port = free_port()?;
        let file = dir.join("nats.conf");
        std::fs::write(&file, config(port, &dir.join("jetstream"), sync))
            .with_context(|| file.display().to_string())?;
        // It says everything on standard error, where nobody listens for its being ready.
        let mut command = Command::new("sh");
        command.args(["-c", "exec \"$0\" --config \"$1\" 2>&1"]).arg(program).arg(&file);
        let (process, _) = Process::start("nats-server", command, READY, dir)?;
        Ok(Self { process, address: format!("127.0.0.1:{port}") })
    }

    /// Where it listens, `host:port`.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// The end of its log, for whoever reports a failure.
    pub fn log_tail(&self) -> String {
        self.process.log_tail()
    }

    /// Ends it.
    ///
    /// # Errors
    /// It had ended by itself.
    pub fn stop(self) -> anyhow::Result<()> {
        self.process.kill()
    }
}

/// One server, alone, that only this machine can reach. Limits are those of the disk.
fn config(port: u16, store: &Path, sync: Sync) -> String {
    let sync = match sync {
        Sync::Always => "  sync_interval: always\n",
        Sync::Default => "",
    };
    // Quoted as the configuration's language wants it: a path may hold what else would be syntax.
    let store = store.display().to_string().replace('\\', "\\\\").replace('"', "\\\"");
    format!(
        "listen: \"127.0.0.1:{port}\"\njetstream {{\n  store_dir: \"{store}\"\n  max_file_store: 1TB\n{sync}}}\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_loopback_is_listened_on_and_flushing_is_as_it_is_asked_for() {
        let text = config(4222, Path::new("/data/\"js\""), Sync::Always);
        let expected = "listen: \"127.0.0.1:4222\"\njetstream {\n  store_dir: \"/data/\\\"js\\\"\"\n  \
                        max_file_store: 1TB\n  sync_interval: always\n}\n";
        assert_eq!(text, expected);
        assert!(!config(4222, Path::new("/data"), Sync::Default).contains("sync_interval"));
        assert!(Sync::Always.durability().flushed && !Sync::Default.durability().flushed);
    }

    #[test]
    fn a_program_that_is_no_server_is_told_with_what_it_said() {
        let dir = tempfile::tempdir().expect("a directory");
        let error =
            NatsServer::start(Path::new("/bin/false"), dir.path(), Sync::Default).err().expect("no server");
        assert!(error.to_string().contains("nats-server ended before it was ready"), "{error:#}");
    }
}
