//! `sluice`: the all-in-one program, its parts one by one, and what a person needs beside them.
//!
//! *Owns*: the command line.
//! *Does not own*: what the commands do.

#![warn(clippy::print_stdout, clippy::print_stderr, reason = "they panic when nobody reads: use `print`")]

mod auth;
mod check;
mod cluster;
mod config;
mod http;
mod memory;
mod pool;
mod print;
mod release;
mod scale;
mod send;
mod tables;
mod up;
mod verify;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use sluice_pod::threads::hand_on;

/// Streams of records into Delta Lake tables: durable in milliseconds, in the table a second later, exactly once.
#[derive(Parser)]
#[command(version, arg_required_else_help = true)]
struct Cli {
    /// Configuration file (TOML). `SLUICE_POD__WAL_DIR` and the like override it, flags override both.
    #[arg(long, global = true, value_name = "FILE")]
    config: Option<PathBuf>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Runs a gateway and pods in one process, on embedded defaults.
    Up(up::UpArgs),
    /// Runs a gateway alone.
    Gateway(up::GatewayArgs),
    /// Runs a pod alone.
    Pod(up::PodArgs),
    /// Keeps a pool as large as its load asks for.
    Autoscaler(scale::AutoscalerArgs),
    /// Streams a file or standard input into a table.
    Send(send::SendArgs),
    /// Lists the tables, or describes one.
    Tables(tables::TablesArgs),
    /// Checks a table: of each stream, which records are there, absent, or there twice.
    Verify(verify::VerifyArgs),
    /// Shows the pods of the pool.
    Pods(pool::PodsArgs),
    /// Asks a pod to hand over its streams, commit what it has, and end.
    Drain(pool::DrainArgs),
    /// Lets a pod in that waits for it, or takes a drain back.
    Join(pool::JoinArgs),
    /// Gives up records of a lost log, naming each: those that wait for them go on.
    Release(release::ReleaseArgs),
    /// Shows where a stream to a table would go now, and why.
    Explain(pool::ExplainArgs),
    /// Shows the pool as it changes: pods, their load, streams, MB/s, lag.
    Top(pool::TopArgs),
    /// Makes a secret for a client, and the hash that the gateway's configuration knows it by.
    Secret,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().on_thread_start(hand_on).build();
    let runtime = match runtime {
        Ok(runtime) => runtime,
        Err(error) => {
            print::note(format_args!("error: cannot start threads: {error}"));
            return ExitCode::FAILURE;
        }
    };
    let config = cli.config.as_deref();
    let outcome = runtime.block_on(async {
        match cli.command {
            Command::Up(args) => up::up(config, args).await,
            Command::Gateway(args) => up::gateway(config, args).await,
            Command::Pod(args) => up::pod(config, args).await,
            Command::Autoscaler(args) => scale::autoscaler(config, args).await,
            Command::Send(args) => {
                config::Config::check_environment()?;
                send::run(args).await
            }
            Command::Tables(args) => {
                config::Config::check_environment()?;
                tables::run(args).await
            }
            Command::Verify(args) => verify::run(config, args).await,
            Command::Pods(args) => pool::pods(args).await,
            Command::Drain(args) => pool::drain(args).await,
            Command::Join(args) => pool::join(args).await,
            Command::Release(args) => release::run(args).await,
            Command::Explain(args) => pool::explain(args).await,
            Command::Top(args) => pool::top(args).await,
            Command::Secret => auth::secret(),
        }
    });
    // A thread that waits for standard input must not hold up the exit.
    runtime.shutdown_background();
    match outcome {
        Ok(code) => code,
        Err(error) => {
            print::note(format_args!("error: {error:#}"));
            up::exit_failed(&error)
        }
    }
}
