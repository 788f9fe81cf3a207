//! `loadtest`: scenarios, traces, comparison of reports; the bench, edges alone, simulations, chaos, the elastic test, a
//! burst, idle streams, a look at a table.
//!
//! *Owns*: the command line.
//! *Does not own*: what the commands do.

mod libc_calls;
mod rig;

use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::{Parser, Subcommand};
use sluice_loadtest::bench::Figures;
use sluice_loadtest::chaos::bugs;
use sluice_loadtest::chaos::schedule::Kinds;
use sluice_loadtest::cluster::find_sluice;
use sluice_loadtest::edges::{bare, zerobus};
use sluice_loadtest::fault_dir;
use sluice_loadtest::history::History;
use sluice_loadtest::judge::{self, OtherReader};
use sluice_loadtest::report::Report;
use sluice_loadtest::sim::{cluster as simulated, placement, scaling};
use sluice_loadtest::volume::Volume;
use sluice_loadtest::{bench, burst, chaos, edges, elastic, idle, recovery, table};
use sluice_pod::config::LogKind;
use sluice_shared::fault::Bug;

/// A seed takes a second or few. A task that never waits would take for ever, since no time passes meanwhile.
const SEED_MAX: Duration = Duration::from_secs(180);

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
    /// Runs a scenario: load by the clock, whatever the service does, and a report. Ends with status 1 where a limit of the
    /// scenario is missed.
    Run(rig::RunArgs),
    /// Lists the scenarios that come with the program, or prints one: a beginning for one of your own.
    Scenarios {
        /// One of them.
        name: Option<String>,
    },
    /// Sends a file of records again, with the gaps and bursts that it had.
    Replay(rig::ReplayArgs),
    /// Tells what two reports (`--json`) say of each other. Ends with status 1 where the second is shown to be worse in a figure
    /// that has a limit, or in the rate of durable records or the p99 of acks or commits.
    Compare(rig::CompareArgs),
    /// Measures what this machine can do: what figures are read beside.
    Machine(rig::MachineArgs),
    /// Measures the service beside the machine's limits. Ends with status 1 where an aim is missed.
    Bench(BenchArgs),
    /// Measures each edge of the gateway before a pod that acks all at once, beside a receiver that does nothing but
    /// forward. Ends with status 1 where an aim is missed.
    Edges(EdgesArgs),
    /// Receives what `edges` sends and hands it to its pod.
    #[command(hide = true)]
    Bare(bare::Options),
    /// A Zerobus server that acks everything, for its clients to be measured against.
    #[command(hide = true)]
    NullZerobus {
        /// Where it listens.
        #[arg(long, default_value = "127.0.0.1:0")]
        listen: SocketAddr,
    },
    /// Does everything to a pool that can happen to one, under load, by a schedule that the seed decides; then judges every
    /// version of every table. Needs a build with fault points. Ends with status 1 where a promise is broken.
    Chaos(ChaosArgs),
    /// The proof that the rig finds what it looks for: brings each of the bugs that are in builds with fault points to light, and
    /// tells what the auditor says. Ends with status 1 where a bug is not found.
    Bugs {
        /// One of them [default: all].
        #[arg(value_parser = bugs::parse)]
        bug: Option<Bug>,
    },
    /// Simulates what this machine cannot hold, with the service's own rules. Ends with status 1 where an aim is missed.
    Sim {
        #[command(subcommand)]
        what: Simulated,
    },
    /// A pool under steady load while its pods drain, join, die and hang, and a gateway dies: tells how long producers
    /// waited, and judges every version of every table. Ends with status 1 where a promise is broken or an aim missed.
    Elastic(ElasticArgs),
    /// A pool that scales itself, under steady load, five times that, and the steady load again. Ends with status 1 where a
    /// promise is broken or an aim missed.
    Burst(BurstArgs),
    /// The memory that idle streams take of a gateway and a pod. Ends with status 1 where that is too much.
    Idle {
        /// How many.
        #[arg(long, default_value_t = 10_000)]
        streams: usize,
        /// Keep data and logs below this directory.
        #[arg(long, value_name = "DIR")]
        dir: Option<PathBuf>,
    },
    /// How long a pod takes to take streams again whose log is full of what is in no table. Ends with status 1 where the aim
    /// is missed.
    Recovery {
        /// How much log.
        #[arg(long, default_value_t = 1.0)]
        gib: f64,
        /// Keep data and logs below this directory.
        #[arg(long, value_name = "DIR")]
        dir: Option<PathBuf>,
    },
    /// Reads every version of a Delta table, with a reader that is not ours too, and shows what each holds. With the notes
    /// of those who sent it, judges it: ends with status 1 where a promise is broken.
    Verify {
        /// The table's directory.
        table: PathBuf,
        /// The notes of its producers: what `chaos --dir DIR` has left in DIR/history/TABLE.
        #[arg(long, value_name = "DIR")]
        history: Option<PathBuf>,
    },
}

#[derive(Subcommand)]
enum Simulated {
    /// Where streams go, and which are moved, under old reports, reconnects, a death and pods that join.
    Placement {
        /// How many worlds to try.
        #[arg(long, default_value_t = 10)]
        seeds: u64,
        /// Also a pool of 2,000 pods with a million streams, which takes minutes.
        #[arg(long)]
        large: bool,
        /// Write plots into this directory.
        #[arg(long, value_name = "DIR")]
        plots: Option<PathBuf>,
    },
    /// The whole service in one thread, with virtual time and faults of all kinds; the auditor judges every version of its
    /// table. Ends with status 1 where a promise is broken.
    Cluster(ClusterArgs),
    /// Days of a pool that scales itself: by what it sees, with forecasts, and by an oracle.
    Policy {
        /// The same seed gives the same days.
        #[arg(long, default_value_t = 1)]
        seed: u64,
        /// Days that the autoscaler has seen before.
        #[arg(long, default_value_t = 1)]
        days_before: u64,
        /// Draw each day into this directory, as policy-….svg.
        #[arg(long, value_name = "DIR")]
        plots: Option<PathBuf>,
    },
}

#[derive(clap::Args)]
struct ClusterArgs {
    /// One seed: tells what happened and the hash of its history, which is the same each time.
    #[arg(long, conflicts_with = "seeds")]
    seed: Option<u64>,
    /// Many seeds, each in a process of its own: so many from 1 on, or from the first to the last, such as 201..300.
    #[arg(long, default_value = "100", value_name = "COUNT|FIRST..LAST", value_parser = simulated::many::parse)]
    seeds: RangeInclusive<u64>,
    /// So many seeds at a time [default: one a core].
    #[arg(long)]
    jobs: Option<usize>,
    /// Make the logs' disks say too early that they have written: the loss has to be found.
    #[arg(long)]
    plant_early_acks: bool,
    /// Of one seed: keep its files below this directory.
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Of one seed: the service's log, such as `info` or `sluice_pod=debug`.
    #[arg(long, value_name = "FILTER")]
    log: Option<String>,
}

#[derive(clap::Args)]
struct BenchArgs {
    /// Length of a run; twice that where streams or tables become more, of edges at most 3.
    #[arg(long, default_value_t = 6, value_parser = clap::value_parser!(u64).range(1..))]
    seconds: u64,
    /// Runs of each row; of each figure the median counts.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..))]
    runs: u64,
    /// Rows to run, such as `ab`: `a`, `b`, `c`, `q`, `d`; `s`, `t`, `v` for streams, tables and versions that become more, `m`
    /// for memory, `e` for the edges [default: all].
    #[arg(long, default_value = "", hide_default_value = true, value_parser = bench::parse_rows)]
    rows: String,
    /// Streams of one table, at most.
    #[arg(long, default_value_t = 10_000)]
    streams: usize,
    /// Tables of 1,000 streams, at most.
    #[arg(long, default_value_t = 1_000)]
    tables: usize,
    /// Versions of a table.
    #[arg(long, default_value_t = 10_000)]
    versions: usize,
    /// How long a pod's memory is looked at.
    #[arg(long, default_value_t = 600)]
    memory_seconds: u64,
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

#[derive(clap::Args)]
struct EdgesArgs {
    /// Length of a run.
    #[arg(long, default_value_t = 3.0)]
    seconds: f64,
    /// Runs of each edge and of its bare receiver, in turn; the one with the median CPU time counts.
    #[arg(long, default_value_t = 3)]
    runs: usize,
    /// Edges to run, by the beginnings of their names, such as `quic,zerobus-json` [default: all].
    #[arg(long, value_delimiter = ',', value_name = "NAMES")]
    edges: Vec<String>,
    /// No aims: only whether it works, and how fast.
    #[arg(long)]
    no_aims: bool,
    /// Logs go below this directory [default: beside the program].
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Write all figures to this file too.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

#[derive(clap::Args)]
struct ChaosArgs {
    /// How long things happen.
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..))]
    seconds: u64,
    /// The seed of a run that is to be repeated [default: a random one].
    #[arg(long)]
    seed: Option<u64>,
    /// So many runs, each with the next seed.
    #[arg(long, default_value_t = 1)]
    runs: u64,
    /// Only kill and drain, and one pod alone: no producer may lose its connection.
    #[arg(long)]
    ends: bool,
    /// Where pods keep their logs: on a disk, or as objects beside the tables. Their faults are others.
    #[arg(long, value_name = "disk|object", default_value = "disk")]
    log: LogKind,
    /// Streams at one time.
    #[arg(long)]
    streams: Option<usize>,
    /// Records of one send, at most; some 28 sends a second of each stream.
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..))]
    rows: Option<u16>,
    /// Keep data and logs below this directory; of several runs, those in which a promise was broken.
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
}

#[derive(clap::Args)]
struct ElasticArgs {
    /// The seed of a run that is to be repeated [default: a random one].
    #[arg(long)]
    seed: Option<u64>,
    /// Streams, half of them into one table.
    #[arg(long, default_value_t = 200)]
    streams: usize,
    /// Records of 250 bytes of each stream in a second.
    #[arg(long, default_value_t = 10.0)]
    rate: f64,
    /// How long the load goes on after each event, in seconds.
    #[arg(long, default_value_t = 6.0)]
    settle: f64,
    /// Promises count, times do not.
    #[arg(long)]
    no_aims: bool,
    /// Keep data and logs below this directory.
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
}

#[derive(clap::Args)]
struct BurstArgs {
    /// The seed of a run that is to be repeated [default: a random one].
    #[arg(long)]
    seed: Option<u64>,
    /// Streams before and after the burst; five times as many in it.
    #[arg(long, default_value_t = 20)]
    streams: usize,
    /// How long the burst is, in seconds.
    #[arg(long, default_value_t = 110)]
    seconds: u64,
    /// Promises count, times do not.
    #[arg(long)]
    no_aims: bool,
    /// Draw load, pods, streams and acks over time into this file.
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
    /// Keep data and logs below this directory.
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let ran = match cli.command {
        // Other threads would draw from what the crates of a process share: the same seed would not be the same history.
        Command::Sim { what: Simulated::Cluster(args) } => sim_cluster(args),
        _ => tokio::runtime::Builder::new_multi_thread()
            .enable_all()
            // As the service's own: the rig is not to be what answers wait for.
            .on_thread_start(sluice_pod::threads::hand_on)
            .build()
            .context("cannot start threads")
            .and_then(|runtime| runtime.block_on(run(cli))),
    };
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
        Command::Run(args) => rig::or_interrupted(rig::run(cli.sluice, args)).await,
        Command::Scenarios { name } => rig::scenarios(name.as_deref()),
        Command::Replay(args) => rig::or_interrupted(rig::replay(cli.sluice, args)).await,
        Command::Compare(args) => rig::compare(&args),
        Command::Machine(args) => rig::machine(args),
        Command::Bench(args) => run_bench(sluice()?, args).await,
        Command::Edges(args) => run_edges(sluice()?, args).await,
        Command::Bare(options) => bare::run(options).await.map(|()| ExitCode::SUCCESS),
        Command::NullZerobus { listen } => zerobus::serve(listen).await.map(|()| ExitCode::SUCCESS),
        Command::Chaos(args) => run_chaos(sluice()?, args).await,
        Command::Bugs { bug } => run_bugs(&sluice()?, bug).await,
        Command::Sim { what: Simulated::Placement { seeds, large, plots } } => {
            sim_placement(&placement::Options { seeds: seeds.max(1), at_size: large }, plots.as_deref())
        }
        Command::Sim { what: Simulated::Cluster(args) } => sim_cluster(args),
        Command::Sim { what: Simulated::Policy { seed, days_before, plots } } => {
            sim_policy(seed, days_before, plots.as_deref())
        }
        Command::Elastic(args) => run_elastic(sluice()?, args).await,
        Command::Burst(args) => run_burst(sluice()?, args).await,
        Command::Idle { streams, dir } => run_idle(sluice()?, streams, dir).await,
        Command::Recovery { gib, dir } => run_recovery(sluice()?, gib, dir).await,
        Command::Verify { table, history } => verify(&table, history.as_deref()),
    }
}

async fn run_bench(sluice: PathBuf, args: BenchArgs) -> anyhow::Result<ExitCode> {
    say_if_debug(args.no_aims);
    let options = bench::Options {
        dir: args.dir.unwrap_or_else(|| bench::default_dir(&sluice)),
        sluice,
        run: Duration::from_secs(args.seconds),
        runs: usize::try_from(args.runs)?,
        with_limits: !args.no_aims,
        only: args.rows.chars().collect(),
        loadtest: Some(edges::find_loadtest()?),
        growth: bench::GrowthMax { streams: args.streams, tables: args.tables, versions: args.versions },
        memory: Duration::from_secs(args.memory_seconds),
    };
    let report = Report::new(bench::run(&options, &|what| eprintln!("bench: {what}")).await?);
    tell(&report, args.json.as_deref())
}

async fn run_edges(sluice: PathBuf, args: EdgesArgs) -> anyhow::Result<ExitCode> {
    say_if_debug(args.no_aims);
    let options = edges::Options {
        loadtest: edges::find_loadtest()?,
        dir: args.dir.unwrap_or_else(|| bench::default_dir(&sluice)),
        sluice,
        run: Duration::try_from_secs_f64(args.seconds).context("--seconds")?,
        runs: args.runs,
        feed_bytes: bench::FEED_BYTES,
        only: args.edges,
    };
    let edges = edges::run(&options, &|what| eprintln!("edges: {what}")).await?;
    let figures = Figures { edges, with_aims: !args.no_aims, ..Figures::default() };
    tell(&Report::new(figures), args.json.as_deref())
}

fn say_if_debug(no_aims: bool) {
    if cfg!(debug_assertions) && !no_aims {
        eprintln!("this is a debug build: its figures say nothing (cargo build --release)");
    }
}

fn tell(report: &Report, json: Option<&Path>) -> anyhow::Result<ExitCode> {
    println!("{report}");
    if let Some(path) = json {
        let text = serde_json::to_string_pretty(report)?;
        std::fs::write(path, text).with_context(|| path.display().to_string())?;
    }
    Ok(if report.is_met() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

async fn run_chaos(sluice: PathBuf, args: ChaosArgs) -> anyhow::Result<ExitCode> {
    fault_dir::check(&sluice)?;
    let seed = args.seed.unwrap_or_else(rand::random);
    let lasts = Duration::from_secs(args.seconds);
    let (mut broken, mut kills, mut gateway_kills, mut records) = (Vec::new(), 0, 0, 0);
    for seed in (0..args.runs).map(|run| seed.wrapping_add(run)) {
        let kept = tempfile::tempdir()?;
        let dir = args.dir.as_ref().map_or_else(|| kept.path().to_owned(), |dir| dir.join(seed.to_string()));
        let mut scenario = chaos::Scenario::seeded(seed, lasts);
        if args.ends {
            (scenario.kinds, scenario.pods, scenario.gateways) = (Kinds::Ends, 1, 1);
        }
        scenario.streams = args.streams.unwrap_or(scenario.streams);
        scenario.object_log = args.log == LogKind::Object;
        scenario.rows_max = args.rows.map_or(scenario.rows_max, usize::from);
        let say = |what: &str| eprintln!("chaos: {what}");
        say(&format!("seed {seed}"));
        let is_good = match Box::pin(chaos::run(&sluice, &dir, &scenario, &say)).await {
            Ok(outcome) => {
                println!("{outcome}");
                kills += outcome.figures.pod_kills;
                gateway_kills += outcome.figures.gateway_kills;
                records += outcome.figures.records;
                outcome.is_kept() && !(args.ends && outcome.figures.lost > 0)
            }
            Err(error) if args.runs == 1 => return Err(error.context(format!("seed {seed}"))),
            // The others tell whether it is always so.
            Err(error) => {
                println!("chaos: seed {seed}: {error:#}");
                false
            }
        };
        if !is_good {
            broken.push(seed);
        } else if args.runs > 1 && args.dir.is_some() {
            std::fs::remove_dir_all(&dir).with_context(|| dir.display().to_string())?;
        }
    }
    if args.runs > 1 {
        let runs = args.runs;
        let verdict = match &broken[..] {
            [] => "all promises kept".to_owned(),
            seeds => format!("PROMISES BROKEN with seeds {seeds:?}"),
        };
        println!(
            "{runs} runs: {kills} pod kills, {gateway_kills} gateway kills, {records} records: {verdict}"
        );
    }
    Ok(if broken.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

async fn run_bugs(sluice: &Path, only: Option<Bug>) -> anyhow::Result<ExitCode> {
    fault_dir::check(sluice)?;
    let mut missed = Vec::new();
    for bug in Bug::ALL.iter().copied().filter(|bug| only.is_none_or(|only| only == *bug)) {
        let (dir, name) = (tempfile::tempdir()?, bug.name());
        if bugs::needs_volume(bug)
            && let Err(why) = Volume::mount(&dir.path().join("image"), &dir.path().join("volume"))
        {
            println!("{name}: left out, for no volume can be mounted, and so no power be lost: {why:#}");
            continue;
        }
        let found = Box::pin(bugs::run(sluice, dir.path(), bug, true)).await.context(name)?;
        let (is_found, verdict) = (found.is(bug), found.verdict);
        println!("{name}: {}: {verdict}", if is_found { "found" } else { "NOT FOUND" });
        missed.extend((!is_found).then_some(name));
    }
    Ok(if missed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn sim_placement(options: &placement::Options, plots: Option<&Path>) -> anyhow::Result<ExitCode> {
    let outcome = placement::run(options, &|what| eprintln!("sim: {what}"))?;
    print!("{}", outcome.to_text());
    if let Some(dir) = plots {
        outcome.write_plots(dir)?;
    }
    Ok(if outcome.is_met() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn sim_cluster(args: ClusterArgs) -> anyhow::Result<ExitCode> {
    let Some(seed) = args.seed else {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let more = args.plant_early_acks.then(|| "--plant-early-acks".to_owned());
        let figures = simulated::many::run(args.seeds, args.jobs.unwrap_or(cores), more.as_slice())?;
        println!("{figures}");
        return Ok(if figures.is_clean() { ExitCode::SUCCESS } else { ExitCode::FAILURE });
    };
    if let Some(filter) = &args.log {
        sluice_shared::telemetry::init_logs(filter, sluice_shared::telemetry::LogFormat::Text)?;
    }
    std::thread::spawn(move || {
        std::thread::sleep(SEED_MAX);
        eprintln!(
            "seed {seed}: a task goes round without any time passing: look where it is with a debugger"
        );
        std::process::exit(3);
    });
    // In memory where that is a file system: a log flushes each group.
    let memory = Path::new("/dev/shm");
    let kept = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() }?;
    let dir = args.dir.unwrap_or_else(|| kept.path().to_owned());
    let planted =
        if args.plant_early_acks { simulated::Planted::AckBeforeFlush } else { simulated::Planted::Nothing };
    let outcome = simulated::run(seed, simulated::Plan { planted, ..simulated::Plan::default() }, &dir)?;
    println!("{outcome}");
    Ok(if outcome.is_clean() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn sim_policy(seed: u64, days_before: u64, plots: Option<&Path>) -> anyhow::Result<ExitCode> {
    let options = scaling::Options { seed, days_before, ..scaling::Options::default() };
    let report = scaling::run(&options, &|what| eprintln!("sim: {what}"));
    println!("{report}");
    if let Some(dir) = plots {
        std::fs::create_dir_all(dir).with_context(|| dir.display().to_string())?;
        for day in &report.days {
            let path = dir.join(format!("policy-{}.svg", day.event.name()));
            std::fs::write(&path, day.to_svg()?).with_context(|| path.display().to_string())?;
        }
    }
    Ok(if report.is_met() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

async fn run_elastic(sluice: PathBuf, args: ElasticArgs) -> anyhow::Result<ExitCode> {
    say_if_debug(args.no_aims);
    let seed = args.seed.unwrap_or_else(rand::random);
    println!("seed {seed}");
    let kept = tempfile::tempdir()?;
    let dir = args.dir.unwrap_or_else(|| kept.path().to_owned());
    let scenario = elastic::Scenario {
        streams: args.streams,
        records_per_s: args.rate,
        settle: Duration::try_from_secs_f64(args.settle).context("--settle")?,
        ..elastic::Scenario::seeded(seed)
    };
    let say = |what: &str| eprintln!("elastic: {what}");
    let outcome = Box::pin(elastic::run(&sluice, &dir, &scenario, &say)).await?;
    println!("{outcome}");
    let is_good = outcome.is_kept() && (args.no_aims || outcome.is_in_time());
    Ok(if is_good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

async fn run_burst(sluice: PathBuf, args: BurstArgs) -> anyhow::Result<ExitCode> {
    say_if_debug(args.no_aims);
    let seed = args.seed.unwrap_or_else(rand::random);
    println!("seed {seed}");
    let kept = tempfile::tempdir()?;
    let dir = args.dir.unwrap_or_else(|| kept.path().to_owned());
    let scenario = burst::Scenario {
        streams: args.streams.max(1),
        burst: Duration::from_secs(args.seconds),
        ..burst::Scenario::seeded(seed)
    };
    let outcome = Box::pin(burst::run(&sluice, &dir, &scenario, &|what| eprintln!("burst: {what}"))).await?;
    print!("{outcome}");
    if let Some(path) = &args.plot {
        path.parent().map_or(Ok(()), std::fs::create_dir_all).with_context(|| path.display().to_string())?;
        std::fs::write(path, outcome.to_svg()?).with_context(|| path.display().to_string())?;
    }
    let is_good = if args.no_aims { outcome.is_kept() } else { outcome.is_met() };
    Ok(if is_good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

async fn run_idle(sluice: PathBuf, streams: usize, dir: Option<PathBuf>) -> anyhow::Result<ExitCode> {
    say_if_debug(false);
    let kept = tempfile::tempdir()?;
    let dir = dir.unwrap_or_else(|| kept.path().to_owned());
    let options = idle::Options { sluice, dir, streams };
    let outcome = Box::pin(idle::run(&options, &|what| eprintln!("idle: {what}"))).await?;
    print!("{outcome}");
    Ok(if outcome.is_met() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

async fn run_recovery(sluice: PathBuf, gib: f64, dir: Option<PathBuf>) -> anyhow::Result<ExitCode> {
    say_if_debug(false);
    let kept = tempfile::tempdir_in(bench::default_dir(&sluice).parent().unwrap_or(Path::new(".")))?;
    let dir = dir.unwrap_or_else(|| kept.path().to_owned());
    let bytes = (gib.clamp(0.01, 64.0) * f64::from(1 << 30)) as u64;
    let outcome = recovery::run(&recovery::Options { sluice, dir, bytes }).await?;
    println!("{outcome}");
    Ok(if outcome.is_met() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn verify(root: &Path, history: Option<&Path>) -> anyhow::Result<ExitCode> {
    let versions = table::read_versions(root)?;
    for version in &versions {
        let rows: u64 = version.files.iter().map(|file| file.rows()).sum();
        println!("version {}: {} files, {rows} rows", version.version, version.files.len());
    }
    match OtherReader::new(judge::find_python().as_deref()) {
        Some(other) => {
            other.agrees(root, &versions)?;
            println!("delta-rs and Arrow's C++ read the same");
        }
        None => println!("not read by others: there is no Python with deltalake (`make` makes one)"),
    }
    let Some(history) = history else { return Ok(ExitCode::SUCCESS) };
    let verdict = judge::judge(&versions, &History::read(history)?);
    println!("{verdict}");
    Ok(if verdict.is_clean() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
