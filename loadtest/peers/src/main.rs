//! `bench-peers`: Sluice beside NATS JetStream and Apache Iggy, in turns, by the rig's own loop, clocks and histograms.
//!
//! *Owns*: the command line; who is there, and one line for each who is not.
//! *Does not own*: the works, the runs, the aims (`sluice_loadtest::peers`); the clients (`nats`, `iggy`).

mod iggy;
mod nats;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::Parser;
use sluice_loadtest::peers::report::Report;
use sluice_loadtest::peers::sluice::Sluice;
use sluice_loadtest::peers::{self, Contender, Figures, Options};

/// A run that only shows that everything works.
const SHORT_RUN: Duration = Duration::from_millis(500);
/// What the short form runs: of each kind one.
const SHORT_WORKS: [&str; 2] = ["batch-100", "single-256"];

/// The same records, batches and windows against Sluice, NATS JetStream and Apache Iggy; each with what its acks promise.
/// Ends with status 1 where an aim is missed without a reason.
#[derive(Parser)]
#[command(version)]
struct Cli {
    /// The program of Sluice to measure.
    #[arg(long, value_name = "FILE", default_value = "target/release/sluice")]
    sluice: PathBuf,
    /// NATS's server, which is started for each run.
    #[arg(long, value_name = "FILE", default_value = "target/peers/venv/bin/nats-server")]
    nats_server: PathBuf,
    /// A server of Iggy that runs already, on this machine, by TCP.
    #[arg(long, value_name = "HOST:PORT")]
    iggy: Option<String>,
    /// The same, by QUIC.
    #[arg(long, value_name = "HOST:PORT")]
    iggy_quic: Option<String>,
    /// Its process, for CPU time.
    #[arg(long, value_name = "PID")]
    iggy_pid: Option<u32>,
    /// Who may create streams there.
    #[arg(long, default_value = "iggy")]
    iggy_user: String,
    /// The password.
    #[arg(long, default_value = "iggy")]
    iggy_password: String,
    /// Length of a run.
    #[arg(long, default_value_t = 4.0)]
    seconds: f64,
    /// Rounds, in each of which every contender runs once: medians count.
    #[arg(long, default_value_t = 5)]
    runs: usize,
    /// Works to run, joined by commas [default: all].
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Beginnings of the names of contenders, joined by commas [default: all].
    #[arg(long, value_delimiter = ',')]
    contenders: Vec<String>,
    /// One short run of two works: shows that everything works, and judges nothing. Fails where one contender fails.
    #[arg(long)]
    short: bool,
    /// Data and logs go below this directory, on the disk to measure.
    #[arg(long, value_name = "DIR", default_value = "target/peers/data")]
    dir: PathBuf,
    /// Write the figures as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

// Children end with the thread that started them: this one.
#[tokio::main]
async fn main() -> anyhow::Result<ExitCode> {
    let cli = Cli::parse();
    let (mut contenders, left_out) = Box::pin(contenders(&cli)).await?;
    if !cli.contenders.is_empty() {
        contenders.retain(|one| cli.contenders.iter().any(|begin| one.name().starts_with(begin.as_str())));
    }
    left_out.iter().for_each(|why| eprintln!("left out: {why}"));
    let is_short = cli.short && cli.only.is_empty();
    let options = Options {
        dir: cli.dir.clone(),
        run: if cli.short { SHORT_RUN } else { Duration::try_from_secs_f64(cli.seconds)? },
        runs: if cli.short { 1 } else { cli.runs },
        only: if is_short { SHORT_WORKS.map(str::to_owned).to_vec() } else { cli.only.clone() },
    };
    let works = Box::pin(peers::run(&options, &contenders, &|what| eprintln!("{what}"))).await?;
    let report = Report::new(Figures { works, left_out }, !cli.short);
    print!("{report}");
    if let Some(path) = &cli.json {
        std::fs::write(path, report.json()?).with_context(|| path.display().to_string())?;
    }
    let is_good = if cli.short { report.is_whole() } else { report.is_met() };
    Ok(if is_good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Who takes part, in the order of a round; and who does not, with the reason.
async fn contenders(cli: &Cli) -> anyhow::Result<(Vec<Box<dyn Contender>>, Vec<String>)> {
    let (mut contenders, mut left_out): (Vec<Box<dyn Contender>>, _) = (Vec::new(), Vec::new());
    let sluice = std::path::absolute(&cli.sluice)?;
    anyhow::ensure!(sluice.is_file(), "no program {}: build it, or name it with --sluice", sluice.display());
    for contender in Sluice::all(&sluice) {
        contenders.push(Box::new(contender));
    }
    let server = std::path::absolute(&cli.nats_server)?;
    if server.is_file() {
        for contender in nats::Nats::all(&server) {
            contenders.push(Box::new(contender));
        }
    } else {
        left_out.push(format!(
            "NATS: no server {}: `make bench-peers` installs it, or name it",
            server.display()
        ));
    }
    for (address, over) in [(&cli.iggy, iggy::Over::Tcp), (&cli.iggy_quic, iggy::Over::Quic)] {
        let Some(address) = address else {
            left_out.push(format!(
                "Iggy over {over}: no address: start a server, and name it with {}",
                over.flag()
            ));
            continue;
        };
        let login = iggy::Login {
            address: address.clone(),
            user: cli.iggy_user.clone(),
            password: cli.iggy_password.clone(),
            pid: cli.iggy_pid,
        };
        match login.connect(over).await {
            Ok(_) => {
                for contender in iggy::Iggy::all(&login, over) {
                    contenders.push(Box::new(contender));
                }
            }
            Err(error) => left_out.push(format!("Iggy over {over} at {address}: {error:#}")),
        }
    }
    Ok((contenders, left_out))
}
