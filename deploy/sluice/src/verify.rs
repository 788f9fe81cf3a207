//! `sluice verify`: counts what a table has of each stream, and says what must not be.
//!
//! *Owns*: asking for versions, printing.
//! *Does not own*: what is a fault (`sluice_pod::table::verify`).

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use serde_json::json;
use sluice_pod::table::TablesPlace;
use sluice_pod::table::verify::{Report, StreamCount, Verifier};
use sluice_shared::ids::{OffsetRange, TableName, TableVersion};

use crate::config::Config;
use crate::print;

/// Ranges of one stream that are printed.
const RANGES_SHOWN: usize = 3;

/// Checks a table: of each stream, which records are there, absent, or there twice. Ends with status 1 where a promise
/// is broken, and with 2 where the table cannot be read.
#[derive(clap::Args)]
pub(crate) struct VerifyArgs {
    /// The table.
    table: TableName,
    /// Where Sluice keeps its data; its tables are in `tables` below it [default: as configured, else `data`].
    #[arg(long, value_name = "DIR")]
    data: Option<PathBuf>,
    /// Where the tables are, if not there: a directory, or s3://BUCKET/PREFIX.
    #[arg(long, value_name = "PLACE", conflicts_with = "data")]
    tables: Option<TablesPlace>,
    /// The version to check [default: the newest].
    #[arg(long, value_name = "VERSION", conflicts_with = "every_version")]
    version: Option<TableVersion>,
    /// Check every version that can still be read, and that none lacks what one before it had.
    #[arg(long)]
    every_version: bool,
    /// One JSON object a version.
    #[arg(long)]
    json: bool,
}

pub(crate) async fn run(config: Option<&std::path::Path>, args: VerifyArgs) -> Result<ExitCode> {
    let tables = match (&args.tables, &args.data) {
        (Some(place), _) => place.clone(),
        (None, Some(data)) => data.join("tables").into(),
        (None, None) => Config::load(config)?.config.pod.tables_dir,
    };
    let mut verifier = Verifier::new(&tables, &args.table).with_context(|| {
        format!("no tables in {tables}: name the directory with --data, as for `sluice up`, or the place with --tables")
    })?;
    let newest = verifier.newest().await.with_context(|| format!("table {}", args.table))?;
    if let Some(version) = args.version.filter(|version| *version > newest) {
        bail!("table {} has no version {version}: its newest is {newest}", args.table);
    }
    let first = if args.every_version { verifier.oldest().await? } else { args.version.unwrap_or(newest) };
    let mut faults = 0;
    for version in first..=if args.every_version { newest } else { first } {
        let report = verifier.version(version).await.with_context(|| format!("table {}", args.table))?;
        faults += report.faults.len();
        if args.json {
            print::answer(as_json(&args.table, &report))?;
        } else if version == newest || !args.every_version {
            print_streams(&report)?;
        }
        if !args.json {
            report.faults.iter().try_for_each(|fault| print::answer(format_args!("FAULT {fault}")))?;
            print::answer(summary(&args.table, &report))?;
        }
    }
    Ok(if faults == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn print_streams(report: &Report) -> Result<()> {
    let width = report.streams.keys().map(String::len).max().unwrap_or(0).max("stream".len());
    let number = |number: Option<u64>| number.map_or("-".to_owned(), |number| number.to_string());
    print::answer(format_args!(
        "{:width$} {:>12} {:>12} {:>12} {:>9} {:>8} {:>8} {:>12}",
        "stream", "first", "last", "records", "rejected", "absent", "twice", "watermark"
    ))?;
    for (stream, count) in &report.streams {
        let twice = count.doubled.map_or(0, |(count, _)| count);
        print::answer(format_args!(
            "{stream:width$} {:>12} {:>12} {:>12} {:>9} {:>8} {twice:>8} {:>12}{}",
            number(count.first()),
            number(count.last()),
            count.rows,
            count.rejected,
            count.absent_count(),
            number(count.watermark),
            ranges(&count.absent),
        ))?;
    }
    Ok(())
}

/// The first of the ranges that are absent.
fn ranges(absent: &[OffsetRange]) -> String {
    let shown = absent.iter().take(RANGES_SHOWN).map(|range| match range.count() {
        1 => range.start.to_string(),
        _ => format!("{}-{}", range.start, range.end - 1),
    });
    match absent.len() {
        0 => String::new(),
        len => {
            let more = if len > RANGES_SHOWN { ", …" } else { "" };
            format!("  absent: {}{more}", shown.collect::<Vec<_>>().join(", "))
        }
    }
}

fn summary(table: &TableName, report: &Report) -> String {
    let sum = |of: fn(&StreamCount) -> u64| report.streams.values().map(of).sum::<u64>();
    let (records, absent) = (sum(|count| count.rows), sum(StreamCount::absent_count));
    let streams = report.streams.len();
    let absent = match absent {
        0 => String::new(),
        absent => format!("; absent: {absent}, refused by name or lost (only their producers know)"),
    };
    let rejected = match sum(|count| count.rejected) {
        0 => String::new(),
        rejected => format!("; rejected, kept in {table}{}: {rejected}", sluice_pod::table::rejected::SUFFIX),
    };
    let foreign = match report.foreign_rows {
        0 => String::new(),
        rows => format!("; rows of other writers: {rows}"),
    };
    let faults = match report.faults.len() {
        0 => "no fault".to_owned(),
        faults => format!("FAULTS: {faults}"),
    };
    format!(
        "{table}, version {}: {records} records of {streams} streams{foreign}{rejected}{absent}; {faults}",
        report.version
    )
}

fn as_json(table: &TableName, report: &Report) -> serde_json::Value {
    let pairs =
        |ranges: &[OffsetRange]| ranges.iter().map(|range| [range.start, range.end]).collect::<Vec<_>>();
    let streams = report.streams.iter().map(|(stream, count)| {
        let (twice, first_twice) = count.doubled.unzip();
        json!({
            "stream": stream, "first": count.first(), "last": count.last(), "records": count.rows,
            "rejected": count.rejected, "absent": count.absent_count(), "absent_ranges": pairs(&count.absent),
            "twice": twice.unwrap_or(0), "first_twice": first_twice, "watermark": count.watermark,
        })
    });
    json!({
        "table": table, "version": report.version, "streams": streams.collect::<Vec<_>>(),
        "foreign_rows": report.foreign_rows,
        "faults": report.faults.iter().map(ToString::to_string).collect::<Vec<_>>(),
    })
}
