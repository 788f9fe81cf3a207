//! `loadtest`: the bench, the crash test with a chosen seed, and a look at a table.
//!
//! *Owns*: the command line.
//! *Does not own*: what the commands do.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::{Parser, Subcommand};
use sluice_loadtest::cluster::find_sluice;
use sluice_loadtest::report::Report;
use sluice_loadtest::{bench, crash, table};

/// Load, faults and figures for Sluice, on real processes.
#[derive(Parser)]
#[command(version, arg_required_else_help = true)]
struct Cli {
    /// The program to test [default: the `sluice` beside this one].
    #[arg(long, global = true, value_name = "FILE")]
    sluice: Option<PathBuf>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Measures the service beside the machine's limits. Ends with status 1 where an aim is missed.
    Bench(BenchArgs),
    /// Kills the pod again and again under load, then judges every version of the table.
    Crash {
        /// The seed of a run that is to be repeated [default: a random one].
        #[arg(long)]
        seed: Option<u64>,
        /// Keep data and logs below this directory.
        #[arg(long, value_name = "DIR")]
        dir: Option<PathBuf>,
    },
    /// Reads every version of a Delta table and shows what each holds.
    Verify {
        /// The table's directory.
        table: PathBuf,
    },
}

#[derive(clap::Args)]
struct BenchArgs {
    /// Length of a run.
    #[arg(long, default_value_t = 10)]
    seconds: u64,
    /// Runs of each row; the one with the median rate counts.
    #[arg(long, default_value_t = 3)]
    runs: usize,
    /// Rows to run, such as `ab` [default: all].
    #[arg(long, default_value = "")]
    rows: String,
    /// Neither limits nor aims: only whether it works, and how fast.
    #[arg(long)]
    no_aims: bool,
    /// Data goes below this directory, on the disk to measure [default: beside the program].
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Write all figures to this file too.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let ran = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .context("cannot start threads")
        .and_then(|runtime| runtime.block_on(run(cli)));
    match ran {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::from(2)
        }
    }
}

async fn run(cli: Cli) -> anyhow::Result<ExitCode> {
    let sluice = || cli.sluice.clone().map_or_else(find_sluice, Ok);
    match cli.command {
        Command::Bench(args) => run_bench(sluice()?, args).await,
        Command::Crash { seed, dir } => run_crash(sluice()?, seed, dir).await,
        Command::Verify { table } => verify(&table),
    }
}

async fn run_bench(sluice: PathBuf, args: BenchArgs) -> anyhow::Result<ExitCode> {
    if cfg!(debug_assertions) && !args.no_aims {
        eprintln!("this is a debug build: its figures say nothing (cargo build --release)");
    }
    let options = bench::Options {
        dir: args.dir.unwrap_or_else(|| bench::default_dir(&sluice)),
        sluice,
        run: Duration::from_secs(args.seconds.max(1)),
        runs: args.runs,
        with_limits: !args.no_aims,
        only: args.rows.chars().collect(),
    };
    let report = Report::new(bench::run(&options, &|what| eprintln!("bench: {what}")).await?);
    println!("{report}");
    if let Some(path) = &args.json {
        let text = serde_json::to_string_pretty(&report)?;
        std::fs::write(path, text).with_context(|| path.display().to_string())?;
    }
    Ok(if report.is_met() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

async fn run_crash(sluice: PathBuf, seed: Option<u64>, dir: Option<PathBuf>) -> anyhow::Result<ExitCode> {
    let seed = seed.unwrap_or_else(rand::random);
    println!("seed {seed}");
    let kept = tempfile::tempdir()?;
    let dir = dir.unwrap_or_else(|| kept.path().to_owned());
    let outcome = crash::run(&sluice, &dir, crash::Scenario::seeded(seed)).await?;
    let crash::Outcome { verdict, sent, bad, rejected, reconnects } = &outcome;
    println!(
        "{sent} records sent, {rejected} of {bad} bad ones rejected by name, {reconnects} connections lost"
    );
    println!("{verdict}");
    let is_good = verdict.is_clean() && rejected == bad && *reconnects == 0;
    Ok(if is_good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn verify(root: &std::path::Path) -> anyhow::Result<ExitCode> {
    for version in table::read_versions(root)? {
        let rows: u64 = version.files.iter().map(|file| file.rows()).sum();
        println!("version {}: {} files, {rows} rows", version.version, version.files.len());
    }
    Ok(ExitCode::SUCCESS)
}
