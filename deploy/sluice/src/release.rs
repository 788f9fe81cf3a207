//! `sluice release`: gives up records of a lost log, naming each of them.
//!
//! *Owns*: asking, the confirmation, printing.
//! *Does not own*: what is given up, and when that is refused (`sluice_pod::release`).

use std::io::{BufRead, IsTerminal, Write};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::{ArgGroup, Args};
use serde_json::Value;
use sluice_shared::ids::{PodId, StreamId, TableName};
use uuid::Uuid;

use crate::pool::{AdminArgs, aligned, encoded, list};
use crate::print;

/// A release asks all pods, and may have much to name.
const PATIENCE: Duration = Duration::from_secs(330);

/// What `sluice release` can be told.
#[derive(Args)]
#[command(group(ArgGroup::new("lost").required(true).args(["log", "pod", "table"])))]
pub(crate) struct ReleaseArgs {
    /// A log that is lost, with all that it holds, by its id: `sluice tables TABLE` says which ones a table waits for.
    #[arg(long, value_parser = log_id)]
    log: Option<Uuid>,
    /// The lost logs of this pod.
    #[arg(long)]
    pod: Option<PodId>,
    /// What this table waits for, once no log is left that may have it; and what logs have of a dropped table of this name.
    #[arg(long)]
    table: Option<TableName>,
    /// With --table: this stream alone.
    #[arg(long, requires = "table")]
    stream: Option<StreamId>,
    /// Also a log in the tables' store that is whole: the pool would take it over by itself, and lose nothing.
    #[arg(long, conflicts_with = "table")]
    whole: bool,
    /// Only say what would be given up.
    #[arg(long)]
    dry_run: bool,
    /// Do not ask whether it is meant.
    #[arg(long)]
    yes: bool,
    /// Print the API's answer as it is.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    admin: AdminArgs,
}

fn log_id(text: &str) -> Result<Uuid, String> {
    text.parse().map_err(|_| {
        "expected a log's id, such as ee2a5431-2365-48d0-9e6f-10cf737c8250: `sluice tables TABLE` says which logs a table \
         waits for (waits_for_logs); --pod names all logs of a pod"
            .to_owned()
    })
}

/// Names what would be given up, asks whether that is meant, and gives it up.
pub(crate) async fn run(args: ReleaseArgs) -> Result<ExitCode> {
    if !args.dry_run && !args.yes {
        if !std::io::stdin().is_terminal() {
            bail!("what is given up is gone for good: look with --dry-run, then say --yes");
        }
        show(&args, &ask(&args, true).await?)?;
        print::note(
            "What is given up is gone for good, and a pod that comes back with it does not start. Type `yes`:",
        );
        let _ = std::io::stderr().flush();
        let mut said = String::new();
        std::io::stdin().lock().read_line(&mut said).context("cannot read an answer")?;
        if said.trim() != "yes" {
            print::note("nothing was given up");
            return Ok(ExitCode::FAILURE);
        }
    }
    let report = ask(&args, args.dry_run).await?;
    show(&args, &report)?;
    let is_whole = list(&report["left"]).is_empty();
    Ok(if is_whole { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

async fn ask(args: &ReleaseArgs, dry_run: bool) -> Result<Value> {
    let mut query = vec![format!("dry_run={dry_run}"), format!("whole={}", args.whole)];
    query.extend(args.log.map(|log| format!("log={log}")));
    query.extend(args.pod.as_ref().map(|pod| format!("pod={}", encoded(pod.as_str()))));
    query.extend(args.table.as_ref().map(|table| format!("table={table}")));
    query.extend(args.stream.as_ref().map(|stream| format!("stream={}", encoded(stream.as_str()))));
    args.admin.ask_within(PATIENCE, "POST", &format!("/v1/release?{}", query.join("&"))).await
}

fn show(args: &ReleaseArgs, report: &Value) -> Result<()> {
    if args.json {
        return print::answer(format_args!("{report:#}"));
    }
    text(report).lines().try_for_each(print::answer)
}

/// A report for people: inclusive offsets, as `sluice verify` has them.
fn text(report: &Value) -> String {
    let mut lines = Vec::new();
    let is_dry = report["dry_run"] == true;
    let header = ["TABLE", "STREAM", "SESSION", "OFFSETS", "COUNT", "WHERE"].map(str::to_owned);
    let rows = |key: &str| {
        let mut rows = vec![header.clone()];
        rows.extend(list(&report[key]).into_iter().map(row));
        rows
    };
    let (given_up, left, mut ends) = (rows("given_up"), rows("left"), rows("ends"));
    ends[1..].sort();
    let sum: u64 = list(&report["given_up"]).iter().filter_map(|line| line["count"].as_u64()).sum();
    let gone = if is_dry { "would be given up" } else { "given up" };
    if given_up.len() > 1 {
        lines.push(aligned(&given_up));
    }
    lines.push(format!("{gone}: {sum} offsets in {} range(s)\n", given_up.len() - 1));
    if ends.len() > 1 {
        let cut = if report["ends_cut"] == true { ", and perhaps others" } else { "" };
        lines.push(format!(
            "\nnamed streams that were there{cut}: from here on, as many as their producers were acked:\n"
        ));
        lines.push(aligned(&ends));
    }
    if left.len() > 1 {
        lines.push(format!("\nmissing as well, and not {gone}:\n"));
        let why =
            list(&report["left"]).into_iter().map(|line| line["why"].as_str().unwrap_or("?").to_owned());
        let rows: Vec<[String; 7]> = left
            .into_iter()
            .zip(std::iter::once("WHY".to_owned()).chain(why))
            .map(|([table, stream, session, offsets, count, place], why)| {
                [table, stream, session, offsets, count, place, why]
            })
            .collect();
        lines.push(aligned(&rows));
    }
    for log in list(&report["logs"]) {
        let pod = log["pod"].as_str().map(|pod| format!(" of {pod}")).unwrap_or_default();
        let becomes = match (log["released_before"].as_str(), is_dry) {
            (Some(at), _) => format!("was released before, at {at}: what was in it was named then"),
            (None, true) => "would not be waited for any more".to_owned(),
            (None, false) => "is not waited for any more".to_owned(),
        };
        lines.push(format!("log {}{pod} {becomes}\n", log["log"].as_str().unwrap_or("?")));
    }
    lines.concat()
}

fn row(line: &Value) -> [String; 6] {
    let text = |key: &str| line[key].as_str().unwrap_or("?").to_owned();
    let start = line["start"].as_u64().unwrap_or_default();
    let offsets = match line["end"].as_u64() {
        Some(end) if end == start + 1 => start.to_string(),
        Some(end) => format!("{start}-{}", end.saturating_sub(1)),
        None => format!("{start}-"),
    };
    let count = line["count"].as_u64().map_or_else(|| "?".to_owned(), |count| count.to_string());
    [text("table"), text("stream"), line["session"].to_string(), offsets, count, text("where")]
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn each_range_is_named_and_what_nobody_knows_is_said() {
        let line = |start: u64, end: Option<u64>, why: Option<&str>| {
            json!({ "table": "main.default.t", "stream": "s#0", "session": 2, "start": start, "end": end,
                "count": end.map(|end| end - start), "where": "log l of pod-1", "why": why })
        };
        let report = json!({ "dry_run": true, "logs": [{ "log": "l", "pod": "pod-1" }], "ends_cut": false,
            "given_up": [line(10, Some(20), None), line(30, Some(31), None)], "left": [line(40, Some(50), Some("log m"))],
            "ends": [line(60, None, None)] });
        let shown = text(&report);
        let words: Vec<Vec<&str>> = shown.lines().map(|line| line.split_whitespace().collect()).collect();
        let told = |start: &[&str]| words.iter().any(|line| line.starts_with(start));
        assert!(told(&["main.default.t", "s#0", "2", "10-19", "10", "log", "l", "of", "pod-1"]), "{shown}");
        assert!(told(&["main.default.t", "s#0", "2", "30", "1"]), "{shown}");
        assert!(told(&["main.default.t", "s#0", "2", "60-", "?"]), "{shown}");
        assert!(told(&["would", "be", "given", "up:", "11", "offsets", "in", "2"]), "{shown}");
        assert!(
            shown.contains("log m\n") && shown.contains("log l of pod-1 would not be waited for"),
            "{shown}"
        );
        let none = json!({ "dry_run": false, "logs": [], "given_up": [], "left": [], "ends": [], "ends_cut": false });
        assert_eq!(text(&none), "given up: 0 offsets in 0 range(s)\n");
    }
}
