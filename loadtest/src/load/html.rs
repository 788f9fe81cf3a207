//! A report as one page that needs nothing else: no network, no script.
//!
//! *Owns*: the page.
//! *Does not own*: the figures (`report`), how a plot looks (`plot`).

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use super::report::{Figure, Machine, Report, Run, Second, number};
use super::sample::Sample;
use crate::plot::{Level, Line, Mark, TimePlot};

/// Lines in a plot of processes; more are left out, those that matter least.
const LINES_MAX: usize = 7;

/// Seconds.
const LONG_S: f64 = 2.5;

const STYLE: &str = "\
:root{--ink:#1c2430;--soft:#5b6675;--line:#d9dee5;--good:#00694d;--bad:#b03a00;--paper:#fff;--ground:#f5f6f8}\
*{box-sizing:border-box}body{margin:0;background:var(--ground);color:var(--ink);\
font:15px/1.45 system-ui,-apple-system,'Segoe UI',sans-serif}\
main{max-width:1640px;margin:0 auto;padding:28px 20px 60px}h1{font-size:26px;margin:0 0 4px}\
h2{font-size:18px;margin:32px 0 10px}p{margin:4px 0}.soft{color:var(--soft)}\
.verdict{display:inline-block;padding:3px 12px;border-radius:14px;font-weight:600;color:#fff}\
.met{background:var(--good)}.missed{background:var(--bad)}\
table{border-collapse:collapse;background:var(--paper);border:1px solid var(--line);width:100%}\
th,td{padding:4px 12px;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap}\
th:first-child,td:first-child{text-align:left}th{font-weight:600;color:var(--soft);background:#fafbfc;white-space:normal}\
td.word{text-align:left;font-weight:600}td.good{color:var(--good)}td.bad{color:var(--bad)}\
.columns{display:grid;grid-template-columns:repeat(auto-fit,minmax(340px,1fr));gap:14px;align-items:start}\
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(640px,100%),1fr));gap:14px}\
.plots>div{background:var(--paper);border:1px solid var(--line);padding:4px}.plots svg{width:100%;height:auto;display:block}\
pre{background:var(--paper);border:1px solid var(--line);padding:12px;overflow:auto;font-size:13px;margin:0;white-space:pre-wrap}\
code{font-size:13px;overflow-wrap:anywhere}summary{cursor:pointer;font-size:18px;font-weight:600;margin:28px 0 10px}";

/// The page.
///
/// # Errors
/// A plot that cannot be drawn.
pub fn page(report: &Report) -> anyhow::Result<String> {
    let mut page = String::with_capacity(1 << 18);
    let title = escaped(&report.scenario);
    write!(
        page,
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width\"><title>{title} · loadtest</title>\
         <style>{STYLE}</style></head><body><main>\n"
    )?;
    head(&mut page, report, &title)?;
    checks(&mut page, report)?;
    figures(&mut page, report)?;
    for (number, run) in report.runs.iter().enumerate() {
        let (open, name) = match report.runs.len() {
            1 => (" open", "Over time".to_owned()),
            count => {
                (if number == 0 { " open" } else { "" }, format!("Over time, run {} of {count}", number + 1))
            }
        };
        write!(page, "<details{open}><summary>{name}</summary>\n<div class=\"plots\">\n")?;
        for plot in plots(run) {
            writeln!(page, "<div>{}</div>", plot.to_svg()?)?;
        }
        page += "</div></details>\n";
    }
    if let Some(limits) = &report.limits {
        write!(page, "<h2>The machine</h2>\n<pre>{}</pre>\n", escaped(&limits.to_string()))?;
        if let Some(run) = report.runs.first() {
            let beside = limits.beside(run);
            writeln!(page, "<pre>{}</pre>", escaped(&beside))?;
        }
    }
    if !report.text.is_empty() {
        write!(page, "<h2>The scenario</h2>\n<pre>{}</pre>\n", escaped(report.text.trim_end()))?;
    }
    page += "</main></body></html>\n";
    Ok(page)
}

fn head(page: &mut String, report: &Report, title: &str) -> std::fmt::Result {
    let Machine { cores, processor, memory_gb, kernel, is_debug } = &report.machine;
    let (class, word) = if report.is_met() { ("met", "limits met") } else { ("missed", "limits missed") };
    let about = report.text.lines().find_map(|line| line.strip_prefix("about = ")).unwrap_or_default();
    let changes = match report.changes.as_str() {
        "" => String::new(),
        changes => format!(" (changed: {changes})"),
    };
    let runs = match report.runs.len() {
        1 => String::new(),
        runs => format!(" · {runs} runs"),
    };
    write!(
        page,
        "<h1>{title} <span class=\"verdict {class}\">{word}</span></h1>\n<p>{}{}</p>\n\
         <p class=\"soft\">{}{runs} · {cores} × {}, {memory_gb:.0} GB, Linux {}</p>\n<p class=\"soft\"><code>{}</code></p>\n",
        escaped(about.trim_matches('"')),
        escaped(&changes),
        escaped(&report.date),
        escaped(processor),
        escaped(kernel),
        escaped(&report.command),
    )?;
    if *is_debug {
        page.write_str(
            "<p class=\"soft\">A debug build of the rig: its figures say nothing of an optimised one.</p>\n",
        )?;
    }
    Ok(())
}

fn checks(page: &mut String, report: &Report) -> std::fmt::Result {
    page.write_str("<h2>Limits</h2>\n<table><tr><th>of</th><th>limit</th>")?;
    run_heads(page, report)?;
    page.write_str("<th></th></tr>\n")?;
    let Some(first) = report.runs.first() else { return page.write_str("</table>\n") };
    for (at, check) in first.checks.iter().enumerate() {
        let sign = if check.at_least { "≥" } else { "≤" };
        write!(page, "<tr><td>{}</td><td>{sign} {}</td>", escaped(&check.name), number(check.limit))?;
        let all = || report.runs.iter().filter_map(|run| run.checks.get(at));
        for check in all() {
            let figure = check.figure.map_or("not measured".to_owned(), number);
            let class = if check.is_met() { "" } else { " class=\"bad\"" };
            write!(page, "<td{class}>{figure}</td>")?;
        }
        let is_met = all().all(super::report::Check::is_met);
        let (class, word) = if is_met { ("good", "✓ met") } else { ("bad", "✗ missed") };
        writeln!(page, "<td class=\"word {class}\">{word}</td></tr>")?;
    }
    page.write_str("</table>\n")?;
    for run in &report.runs {
        for (error, count) in &run.errors {
            writeln!(page, "<p class=\"soft\">error, {count} times: {}</p>", escaped(error))?;
        }
        if let Some(audit) = &run.audit {
            writeln!(page, "<p class=\"soft\">audit: {}</p>", escaped(audit))?;
        }
    }
    Ok(())
}

fn run_heads(page: &mut String, report: &Report) -> std::fmt::Result {
    match report.runs.len() {
        1 => page.write_str("<th>figure</th>"),
        runs => (1..=runs).try_for_each(|run| write!(page, "<th>run {run}</th>")),
    }
}

fn figures(page: &mut String, report: &Report) -> std::fmt::Result {
    page.write_str("<h2>Figures</h2>\n<div class=\"columns\">\n")?;
    let runs: Vec<&[Figure]> = report.runs.iter().map(|run| run.figures.as_slice()).collect();
    let Some(first) = runs.first() else { return page.write_str("</div>\n") };
    let is_time = |figure: &&Figure| figure.unit == "ms";
    let is_rate = |figure: &&Figure| matches!(figure.unit.as_str(), "/s" | "MB/s" | "cores" | "MB");
    let names = |keep: &dyn Fn(&&Figure) -> bool| -> Vec<String> {
        first.iter().filter(keep).map(|figure| figure.name.clone()).collect()
    };
    let groups = [names(&is_time), names(&is_rate), names(&|figure| !is_time(figure) && !is_rate(figure))];
    for names in groups {
        page.write_str("<table><tr><th>all loads</th>")?;
        run_heads(page, report)?;
        page.write_str("<th></th></tr>\n")?;
        for name in names {
            row(page, &name, &runs)?;
        }
        page.write_str("</table>\n")?;
    }
    page.write_str("</div>\n")?;
    let loads = report.runs.first().map_or(0, |run| run.loads.len());
    if loads > 1 {
        by_load(page, report)?;
    }
    Ok(())
}

fn row(page: &mut String, name: &str, runs: &[&[Figure]]) -> std::fmt::Result {
    write!(page, "<tr><td>{}</td>", escaped(name))?;
    let mut unit = "";
    for figures in runs {
        let found = figures.iter().find(|figure| figure.name == name);
        unit = found.map_or(unit, |figure| &figure.unit);
        write!(page, "<td>{}</td>", found.map_or("–".to_owned(), |figure| number(figure.value)))?;
    }
    writeln!(page, "<td class=\"soft\" style=\"text-align:left\">{unit}</td></tr>")
}

/// The first run's.
fn by_load(page: &mut String, report: &Report) -> std::fmt::Result {
    let Some(run) = report.runs.first() else { return Ok(()) };
    page.write_str("<h2>By load</h2>\n<table><tr><th>load</th>")?;
    let columns = [
        "records due",
        "records durable",
        "ack p50",
        "ack p99",
        "ack p99.9",
        "committed p50",
        "committed p99",
    ];
    for column in columns {
        let unit = if column.starts_with("records") { "/s" } else { "ms" };
        write!(page, "<th>{column}, {unit}</th>")?;
    }
    page.write_str("</tr>\n")?;
    for load in &run.loads {
        write!(page, "<tr><td>{}</td>", escaped(&load.name))?;
        for column in columns {
            let found = load.figures.iter().find(|figure| figure.name == column);
            write!(page, "<td>{}</td>", found.map_or("–".to_owned(), |figure| number(figure.value)))?;
        }
        page.write_str("</tr>\n")?;
    }
    page.write_str("</table>\n")
}

/// Those that there is something for.
fn plots(run: &Run) -> Vec<TimePlot> {
    let all = [
        throughput(run),
        latency(run, "Ack: from due to durable", |second| second.ack_ms, &[("ack p99", "limit of p99")]),
        latency(
            run,
            "From due to in the table",
            |second| second.committed_ms,
            &[("committed p99", "limit of p99")],
        ),
        by_load_plot(run),
        lag(run),
        pods(run),
        by_pod(run, "Streams of each pod", "streams", |pod| pod.streams as f64),
        by_pod(run, "Load of each pod, of what it can take", "share", |pod| pod.load),
        by_process(run, "CPU", "cores", |usage| usage.cpus),
        by_process(run, "Memory", "MB", |usage| usage.rss_mb),
        late(run),
    ];
    let has_point = |plot: &TimePlot| {
        let mut points = plot.lines.iter().flat_map(|line| &line.points);
        points.any(|(x, y)| x.is_finite() && y.is_finite() && !(plot.is_log && *y <= 0.0))
    };
    all.into_iter().filter(has_point).collect()
}

fn plot(run: &Run, title: &str, y: &str, lines: Vec<Line>) -> TimePlot {
    let marks = run.happened.iter().flat_map(|one| {
        let begin = Mark { x: one.from_s, name: one.name.clone() };
        // Of what takes a while the end is to be seen, too.
        let is_long = one.to_s - one.from_s > LONG_S;
        std::iter::once(begin).chain(is_long.then(|| Mark { x: one.to_s, name: "done".to_owned() }))
    });
    TimePlot {
        title: title.to_owned(),
        x: "time, s".to_owned(),
        y: y.to_owned(),
        lines,
        marks: marks.collect(),
        x_span: Some((0.0, run.seconds.max(run.slot_s * run.series.len() as f64))),
        ..TimePlot::default()
    }
}

fn over_time(run: &Run, name: &str, value: impl Fn(&Second) -> f64) -> Line {
    // A whole slot stands at its middle.
    let at = |nth: usize| (nth as f64 + 0.5) * run.slot_s;
    let points = run.series.iter().enumerate().map(|(nth, second)| (at(nth), value(second))).collect();
    Line { name: name.to_owned(), points, is_stepped: false }
}

fn throughput(run: &Run) -> TimePlot {
    let rate = |name: &str, count: fn(&Second) -> u64| {
        over_time(run, name, |second| count(second) as f64 / run.slot_s)
    };
    let mut lines = vec![
        rate("due", |second| second.due),
        rate("sent", |second| second.sent),
        rate("durable", |second| second.durable),
    ];
    if run.series.iter().any(|second| second.committed > 0) {
        lines.push(rate("committed", |second| second.committed));
    }
    plot(run, "Throughput", "records/s", lines)
}

fn latency(run: &Run, title: &str, of: fn(&Second) -> Option<[f64; 3]>, limits: &[(&str, &str)]) -> TimePlot {
    let line =
        |name: &str, at: usize| over_time(run, name, |second| of(second).map_or(f64::NAN, |three| three[at]));
    let lines = vec![line("p50", 0), line("p99", 1), line("p99.9", 2)];
    let level = |(check, name): &(&str, &str)| {
        let check = run.checks.iter().find(|one| one.name == *check)?;
        Some(Level { y: check.limit, name: (*name).to_owned() })
    };
    TimePlot {
        levels: limits.iter().filter_map(level).collect(),
        is_log: true,
        ..plot(run, title, "ms", lines)
    }
}

fn by_load_plot(run: &Run) -> TimePlot {
    let line = |load: &super::report::LoadFigures| {
        let points = load.ack_p99_ms.iter().enumerate();
        let points =
            points.map(|(nth, ms)| ((nth as f64 + 0.5) * run.slot_s, ms.unwrap_or(f64::NAN))).collect();
        Line { name: load.name.clone(), points, is_stepped: false }
    };
    let lines = if run.loads.len() > 1 { run.loads.iter().map(line).collect() } else { Vec::new() };
    TimePlot { is_log: true, ..plot(run, "Ack p99 of each load", "ms", lines) }
}

/// A line for each name that there is in samples, the greatest first.
fn named(run: &Run, of: impl Fn(&Sample) -> Vec<(String, f64)>, is_stepped: bool) -> Vec<Line> {
    let mut lines: BTreeMap<String, Vec<(f64, f64)>> = BTreeMap::new();
    for sample in &run.samples {
        for (name, value) in of(sample) {
            lines.entry(name).or_default().push((sample.at_s, value));
        }
    }
    let most = |points: &[(f64, f64)]| points.iter().map(|point| point.1).fold(0.0, f64::max);
    let mut greatest: Vec<(String, f64)> =
        lines.iter().map(|(name, points)| (name.clone(), most(points))).collect();
    greatest.sort_by(|a, b| b.1.total_cmp(&a.1));
    let kept: BTreeSet<String> = greatest.into_iter().take(LINES_MAX).map(|(name, _)| name).collect();
    let lines = lines.into_iter().filter(|(name, _)| kept.contains(name));
    lines.map(|(name, points)| Line { name, points, is_stepped }).collect()
}

fn by_pod(run: &Run, title: &str, y: &str, of: fn(&super::sample::PodSeen) -> f64) -> TimePlot {
    let lines = named(
        run,
        |sample| {
            let there = sample
                .pods
                .iter()
                .filter(|(_, pod)| !matches!(pod.phase.as_str(), "drained" | "undrained" | "lost"));
            there.map(|(name, pod)| (name.clone(), of(pod))).collect()
        },
        true,
    );
    plot(run, title, y, lines)
}

fn by_process(run: &Run, title: &str, y: &str, of: fn(&super::sample::Usage) -> f64) -> TimePlot {
    let values =
        |sample: &Sample| sample.processes.iter().map(|(name, usage)| (name.clone(), of(usage))).collect();
    plot(run, title, y, named(run, values, false))
}

fn lag(run: &Run) -> TimePlot {
    let values = |sample: &Sample| {
        sample.pods.iter().filter_map(|(name, pod)| Some((name.clone(), pod.lag_ms?))).collect()
    };
    plot(run, "Lag: the oldest record that is in no table", "ms", named(run, values, false))
}

fn pods(run: &Run) -> TimePlot {
    let count = |sample: &Sample, is: fn(&str) -> bool| {
        sample.pods.values().filter(|pod| is(&pod.phase)).count() as f64
    };
    let line = |name: &str, is: fn(&str) -> bool| Line {
        name: name.to_owned(),
        points: run.samples.iter().map(|sample| (sample.at_s, count(sample, is))).collect(),
        is_stepped: true,
    };
    let running = line("running", |phase| !matches!(phase, "drained" | "undrained" | "lost"));
    let active = line("that take streams", |phase| phase == "active");
    let has_pods = run.samples.iter().any(|sample| !sample.pods.is_empty());
    let lines = if has_pods { vec![running, active] } else { Vec::new() };
    TimePlot { y_to: 5.0, ..plot(run, "Pods", "pods", lines) }
}

fn late(run: &Run) -> TimePlot {
    let line = over_time(run, "latest", |second| second.late_ms_max);
    plot(run, "How late messages were sent, at most", "ms", vec![line])
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
