//! The commands of the rig: run a scenario or replay a trace, list scenarios, compare reports, measure the machine.
//!
//! *Owns*: their flags, where reports go.
//! *Does not own*: what they do (`sluice_loadtest::load`).

use std::fmt;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, ensure};
use clap::Args;
use sluice_loadtest::bench::default_dir;
use sluice_loadtest::cluster::find_sluice;
use sluice_loadtest::load::events::need_faults;
use sluice_loadtest::load::replay::{Replay, Speed};
use sluice_loadtest::load::report::Report;
use sluice_loadtest::load::scenario::{self, Scenario};
use sluice_loadtest::load::site::Existing;
use sluice_loadtest::load::{self, Options, compare, html, machine};
use sluice_shared::lifecycle::Terminations;
use tokio::signal::unix::{SignalKind, signal};

/// Flags of what sends load.
#[derive(Args)]
pub(crate) struct SendArgs {
    /// Send to a pool that is there already: its gateways, as host:port or URLs, joined by commas.
    #[arg(long, value_name = "URL,…", value_delimiter = ',')]
    gateway: Vec<String>,
    /// With --gateway: an admin API, for what pods say of themselves.
    #[arg(long, value_name = "URL", requires = "gateway")]
    admin: Option<String>,
    /// With --gateway: the gateways' certificate, for QUIC.
    #[arg(long, value_name = "FILE", requires = "gateway")]
    ca: Option<PathBuf>,
    /// Runs, one after the other, each on a fresh service: several of them can be compared.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    runs: u64,
    /// Do not measure what the machine can do.
    #[arg(long)]
    no_limits: bool,
    /// Write the report as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write the report as a page of its own.
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Data and logs go below this directory, on the disk to measure, and stay there [default: beside the program, for as
    /// long as it runs].
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
}

impl SendArgs {
    /// For what is said of one of several runs.
    fn nth(&self, number: u64) -> String {
        if self.runs == 1 { String::new() } else { format!(" {number} of {}", self.runs) }
    }

    /// Not only after all of it is seen that a report cannot be written.
    fn check_reports(&self) -> anyhow::Result<()> {
        for path in [&self.json, &self.html].into_iter().flatten() {
            let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
            let can_write = || {
                ensure!(!path.is_dir(), "it is a directory");
                tempfile::NamedTempFile::new_in(dir)?;
                anyhow::Ok(())
            };
            can_write().with_context(|| format!("{}: the report could not be written", path.display()))?;
        }
        Ok(())
    }
}

/// Flags of `run`.
#[derive(Args)]
pub(crate) struct RunArgs {
    /// A file, or one of `loadtest scenarios`.
    scenario: String,
    /// Another length: all moments of the scenario move in proportion.
    #[arg(long)]
    seconds: Option<f64>,
    /// Another seed.
    #[arg(long)]
    seed: Option<u64>,
    /// So many times its rates.
    #[arg(long, default_value_t = 1.0, value_name = "TIMES")]
    rate: f64,
    /// So many times its streams.
    #[arg(long, default_value_t = 1.0, value_name = "TIMES")]
    streams: f64,
    /// Judge every version of each table at the end: nothing lost, doubled, changed or out of order.
    #[arg(long, conflicts_with = "gateway")]
    audit: bool,
    #[command(flatten)]
    send: SendArgs,
}

/// Flags of `replay`.
#[derive(Args)]
pub(crate) struct ReplayArgs {
    /// Parquet, CSV (with a header line) or NDJSON, by its extension; the latter two also packed (.gz, .zst).
    file: PathBuf,
    /// The column of times: timestamps, RFC 3339, or numbers since 1970.
    #[arg(long, value_name = "COLUMN")]
    time: String,
    /// The column whose values are streams: records of one value stay in the order of their times.
    #[arg(long, value_name = "COLUMN")]
    stream: String,
    /// So many times as fast as it was, or `max`: as fast as there is room.
    #[arg(long, default_value = "1", value_name = "TIMES|max")]
    speed: Speed,
    /// The table.
    #[arg(long, default_value = "replay")]
    table: String,
    /// Streams are called by their values, and resumed when a connection is lost.
    #[arg(long)]
    named: bool,
    /// Records that are due at one time go out together, up to so many.
    #[arg(long, default_value_t = 1_000, value_name = "COUNT")]
    frame_records: usize,
    /// Pods that are started.
    #[arg(long, default_value_t = 1)]
    pods: usize,
    #[command(flatten)]
    send: SendArgs,
}

/// Flags of `compare`.
#[derive(Args)]
pub(crate) struct CompareArgs {
    /// A report, as `--json` writes it.
    before: PathBuf,
    /// Another one of the same scenario.
    after: PathBuf,
    /// Compare them although they are of different scenarios.
    #[arg(long)]
    force: bool,
    /// Write the comparison as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Flags of `machine`.
#[derive(Args)]
pub(crate) struct MachineArgs {
    /// On the disk to measure [default: beside the program].
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Write the figures as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// What a shell makes of SIGINT.
const INTERRUPTED: u8 = 130;

/// SIGINT, SIGTERM or SIGHUP ends a run by dropping it: its processes end, and its data goes.
pub(crate) async fn or_interrupted(
    work: impl Future<Output = anyhow::Result<ExitCode>>,
) -> anyhow::Result<ExitCode> {
    let (mut terminations, mut hangups) = (Terminations::new()?, signal(SignalKind::hangup())?);
    tokio::select! {
        biased; // what is done is told
        done = Box::pin(work) => return done,
        () = terminations.next() => {}
        _ = hangups.recv() => {}
    }
    // Of a terminal that is gone nobody hears.
    let _ = writeln!(std::io::stderr(), "interrupted: there is no report");
    Ok(ExitCode::from(INTERRUPTED))
}

/// Runs a scenario.
pub(crate) async fn run(sluice: Option<PathBuf>, args: RunArgs) -> anyhow::Result<ExitCode> {
    let (name, text) = scenario::find(&args.scenario)?;
    let mut scenario = Scenario::parse(&name, &text)?;
    let mut changes = Vec::new();
    if let Some(seed) = args.seed {
        scenario.seed = seed;
        changes.push(format!("seed {seed}"));
    }
    for (times, what) in [(args.rate, "rates"), (args.streams, "streams")] {
        ensure!(times.is_finite() && times > 0.0, "{times} times the {what}");
        changes.extend((times != 1.0).then(|| format!("{times} × {what}")));
    }
    if let Some(seconds) = args.seconds {
        changes.push(format!("{seconds} s"));
    }
    args.send.check_reports()?;
    let scenario = scenario.scaled(args.seconds, args.rate, args.streams);
    let scenario = scenario.context("with --seconds, --rate and --streams as they are given")?;
    let mut report = Report::new(name.clone(), text, changes.join(", "), command());
    for number in 1..=args.send.runs {
        let place = Place::new(sluice.as_deref(), &args.send, number)?;
        let run = args.send.nth(number);
        let say = |what: &str| eprintln!("{name}{run}: {what}");
        let options = place.options(&args.send, args.audit, (&name, &say));
        report.runs.push(Box::pin(load::run(&options, &scenario)).await?);
        place.measure(&args.send, &mut report, &say)?;
    }
    tell(report, &args.send)
}

/// Replays a trace.
pub(crate) async fn replay(sluice: Option<PathBuf>, args: ReplayArgs) -> anyhow::Result<ExitCode> {
    let replay = Replay {
        file: args.file,
        time: args.time,
        stream: args.stream,
        speed: args.speed,
        table: args.table,
        named: args.named,
        frame_records: args.frame_records,
        pods: args.pods,
    };
    let name = replay.name();
    args.send.check_reports()?;
    let mut report = Report::new(name.clone(), String::new(), String::new(), command());
    for number in 1..=args.send.runs {
        let place = Place::new(sluice.as_deref(), &args.send, number)?;
        let run = args.send.nth(number);
        let say = |what: &str| eprintln!("{name}{run}: {what}");
        let options = place.options(&args.send, false, ("replay", &say));
        let (text, run) = Box::pin(replay.run(&options)).await?;
        report.text = text;
        report.runs.push(run);
        place.measure(&args.send, &mut report, &say)?;
    }
    tell(report, &args.send)
}

/// Compares two reports.
pub(crate) fn compare(args: &CompareArgs) -> anyhow::Result<ExitCode> {
    let comparison = compare::compare(&Report::read(&args.before)?, &Report::read(&args.after)?, args.force)?;
    if let Some(path) = &args.json {
        write(path, serde_json::to_string_pretty(&comparison)?)?;
    }
    show(&comparison)?;
    Ok(if comparison.is_worse() { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Measures the machine.
pub(crate) fn machine(args: MachineArgs) -> anyhow::Result<ExitCode> {
    let beside = args.dir.map_or_else(|| std::env::current_exe().map(|own| default_dir(&own)), Ok)?;
    std::fs::create_dir_all(&beside).with_context(|| beside.display().to_string())?;
    let dir = tempfile::tempdir_in(&beside)?;
    let limits = machine::measure(dir.path(), machine::LONG)?;
    if let Some(path) = &args.json {
        write(path, serde_json::to_string_pretty(&limits)?)?;
    }
    show(&limits)?;
    Ok(ExitCode::SUCCESS)
}

/// Lists scenarios, or prints one.
pub(crate) fn scenarios(name: Option<&str>) -> anyhow::Result<ExitCode> {
    if let Some(name) = name {
        show(&scenario::find(name)?.1)?;
        return Ok(ExitCode::SUCCESS);
    }
    let line = |(name, scenario): (&str, Scenario)| {
        let needs = if need_faults(&scenario) { " (needs a build with fault points)" } else { "" };
        format!("{name:<18} {:>4} s  {}{needs}\n", scenario.seconds, scenario.about)
    };
    show(&scenario::built_in()?.into_iter().map(line).collect::<String>())?;
    Ok(ExitCode::SUCCESS)
}

/// Where one run has its program and data.
struct Place {
    sluice: PathBuf,
    dir: PathBuf,
    /// Goes with the run.
    _kept: Option<tempfile::TempDir>,
}

impl Place {
    fn new(sluice: Option<&Path>, args: &SendArgs, run: u64) -> anyhow::Result<Self> {
        let sluice = match sluice {
            Some(sluice) => sluice.to_owned(),
            None if args.gateway.is_empty() => find_sluice()?,
            None => PathBuf::new(),
        };
        ensure!(
            !args.gateway.is_empty() || sluice.is_file(),
            "{}: there is no such program (--sluice)",
            sluice.display()
        );
        if let Some(dir) = &args.dir {
            let dir = dir.join(format!("run-{run}"));
            ensure!(
                !dir.exists(),
                "{}: there is data of an earlier run: move it away, or give another --dir",
                dir.display()
            );
            return Ok(Self { sluice, dir, _kept: None });
        }
        let beside = if args.gateway.is_empty() { default_dir(&sluice) } else { std::env::temp_dir() };
        std::fs::create_dir_all(&beside).with_context(|| beside.display().to_string())?;
        let kept = tempfile::tempdir_in(&beside)?;
        Ok(Self { sluice, dir: kept.path().to_owned(), _kept: Some(kept) })
    }

    /// Of a service that is elsewhere this machine's limits say little.
    fn measure(&self, args: &SendArgs, report: &mut Report, say: &dyn Fn(&str)) -> anyhow::Result<()> {
        if args.no_limits || !args.gateway.is_empty() || report.limits.is_some() {
            return Ok(());
        }
        say("measures what the machine can do");
        report.limits = Some(machine::measure(&self.dir.join("limits"), machine::SHORT)?);
        Ok(())
    }

    fn options<'a>(
        &'a self,
        args: &SendArgs,
        audit: bool,
        (name, say): (&'a str, &'a (dyn Fn(&str) + Sync)),
    ) -> Options<'a> {
        let bare = |url: &String| {
            let rest = url.split_once("://").map_or(url.as_str(), |(_, rest)| rest);
            rest.trim_end_matches('/').to_owned()
        };
        let existing = (!args.gateway.is_empty()).then(|| Existing {
            gateways: args.gateway.iter().map(bare).collect(),
            admin: args.admin.as_ref().map(bare),
            certificate: args.ca.clone(),
        });
        Options { sluice: self.sluice.clone(), dir: &self.dir, existing, audit, name, say }
    }
}

/// As it was called.
fn command() -> String {
    let mut words: Vec<String> = std::env::args().collect();
    if let Some(program) = words.first_mut() {
        *program = "loadtest".to_owned();
    }
    words.join(" ")
}

fn tell(report: Report, args: &SendArgs) -> anyhow::Result<ExitCode> {
    if let Some(path) = &args.json {
        write(path, serde_json::to_string_pretty(&report)?)?;
    }
    if let Some(path) = &args.html {
        write(path, html::page(&report)?)?;
    }
    show(&report)?;
    Ok(if report.is_met() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn write(path: &Path, text: String) -> anyhow::Result<()> {
    std::fs::write(path, text).with_context(|| path.display().to_string())
}

/// To the standard output. Whoever reads it need not read all.
fn show(what: &dyn fmt::Display) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    match write!(out, "{what}").and_then(|()| out.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(error).context("standard output"),
        _ => Ok(()),
    }
}
