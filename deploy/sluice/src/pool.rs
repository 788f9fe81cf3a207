//! `sluice pods`, `drain`, `join`, `explain`, `top`: the pool, for people, by the admin API of any gateway.
//!
//! *Owns*: asking and printing.
//! *Does not own*: what is shown (`sluice_gateway`); `--json` prints it as it is.

use std::fmt::Write as _;
use std::io::IsTerminal;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Args;
use serde_json::Value;
use sluice_shared::config::ByteSize;
use sluice_shared::ids::{PodId, TableName};

use crate::{config, http, print};

/// How often `drain --wait` and `top` look.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);
/// Characters of a load's bar.
const BAR_CHARS: usize = 20;
/// Back to the top left, and what comes after the cursor is cleared line by line: no flicker.
const HOME: &str = "\x1b[H";
const CLEAR: &str = "\x1b[2J";
const CLEAR_LINE: &str = "\x1b[K";
const CLEAR_BELOW: &str = "\x1b[J";

/// Where the admin API is.
#[derive(Args)]
pub(crate) struct AdminArgs {
    /// A gateway's admin API.
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:7073")]
    admin: String,
    /// Its secret, where it has one. Rather in the variable: other users of the machine see command lines.
    #[arg(long, value_name = "SECRET", env = "SLUICE_ADMIN_SECRET", hide_env_values = true)]
    admin_secret: Option<String>,
}

impl AdminArgs {
    pub(crate) async fn ask(&self, method: &str, path: &str) -> Result<Value> {
        self.ask_within(http::TIMEOUT, method, path).await
    }

    /// As `ask`, where the answer may take longer.
    pub(crate) async fn ask_within(&self, patience: Duration, method: &str, path: &str) -> Result<Value> {
        config::Config::check_environment()?;
        let secret = self.admin_secret.as_deref();
        let answer = http::ask_admin(&self.admin, method, path, secret, patience).await?;
        let body: Value = serde_json::from_slice(&answer.body).with_context(|| {
            format!("{} answered {method} {path} with status {} and no JSON", self.admin, answer.status)
        })?;
        if !(200..300).contains(&answer.status) {
            bail!("{}", body["error"]["message"].as_str().unwrap_or("the gateway refused"));
        }
        Ok(body)
    }
}

/// What `sluice pods` can be told.
#[derive(Args)]
pub(crate) struct PodsArgs {
    /// One pod; else all.
    pod: Option<PodId>,
    /// Print the API's answer as it is.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    admin: AdminArgs,
}

/// What `sluice drain` can be told.
#[derive(Args)]
pub(crate) struct DrainArgs {
    /// Which pod.
    pod: PodId,
    /// For how long streams are handed over, such as 60s; what is left then is ended, and opened elsewhere.
    #[arg(long)]
    deadline: Option<String>,
    /// Streams that are handed over in a second.
    #[arg(long)]
    pace: Option<f64>,
    /// The last active pod, too.
    #[arg(long)]
    force: bool,
    /// Wait until the pod has drained.
    #[arg(long)]
    wait: bool,
    #[command(flatten)]
    admin: AdminArgs,
}

/// What `sluice join` can be told.
#[derive(Args)]
pub(crate) struct JoinArgs {
    /// Which pod.
    pod: PodId,
    #[command(flatten)]
    admin: AdminArgs,
}

/// What `sluice explain` can be told.
#[derive(Args)]
pub(crate) struct ExplainArgs {
    /// The table that a stream would send to.
    table: TableName,
    /// A stream of that gateway: where it would go if it were opened again.
    #[arg(long)]
    stream: Option<String>,
    /// Bytes per second that it would send.
    #[arg(long)]
    rate: Option<u64>,
    /// Print the API's answer as it is.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    admin: AdminArgs,
}

/// What `sluice top` can be told.
#[derive(Args)]
pub(crate) struct TopArgs {
    /// Show it once, and end.
    #[arg(long)]
    once: bool,
    #[command(flatten)]
    admin: AdminArgs,
}

/// Shows the pods.
pub(crate) async fn pods(args: PodsArgs) -> Result<ExitCode> {
    let path = args.pod.as_ref().map_or_else(|| "/v1/pods".to_owned(), |pod| format!("/v1/pods/{pod}"));
    let body = args.admin.ask("GET", &path).await?;
    if args.json {
        print::answer(format_args!("{body:#}"))?;
        return Ok(ExitCode::SUCCESS);
    }
    let one = [body.clone()];
    let pods = if args.pod.is_some() { one.iter().collect() } else { list(&body["pods"]) };
    pods_table(&pods).lines().try_for_each(print::answer)?;
    if let Some(left) = pods.iter().find_map(|pod| pod.get("left")) {
        print::answer(format_args!("left to do: {}", left_text(left)))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Asks a pod to drain.
pub(crate) async fn drain(args: DrainArgs) -> Result<ExitCode> {
    let mut query = vec![format!("force={}", args.force)];
    query.extend(args.deadline.as_ref().map(|deadline| format!("deadline={deadline}")));
    query.extend(args.pace.map(|pace| format!("pace={pace}")));
    let (pod, path) = (&args.pod, format!("/v1/pods/{}/drain?{}", args.pod, query.join("&")));
    let mut body = args.admin.ask("POST", &path).await?;
    let (mut was_draining, mut left) = (false, Value::Null);
    loop {
        was_draining |= body["phase"] == "draining";
        let phase = body["phase"].as_str().unwrap_or("?");
        left = body.get("left").cloned().unwrap_or(left);
        let shown = body.get("left").filter(|_| phase == "draining");
        let shown = shown.map(|left| format!(": {}", left_text(left))).unwrap_or_default();
        print::answer(format_args!("{pod} is {phase}{shown}"))?;
        match phase {
            "drained" => return Ok(ExitCode::SUCCESS),
            "undrained" => bail!("{}", undrained_text(pod, &left)),
            // It hears the wish and says so at once; a moment later it acts.
            "lost" if was_draining && body["load"].is_null() => {
                print::note(format_args!(
                    "{pod} answers no more: whether it has drained, the status of its process says (0, else keep its volume)"
                ));
                return Ok(ExitCode::SUCCESS);
            }
            "lost" => bail!(
                "{pod} was lost before it had drained: what is in its log is committed when it is started again"
            ),
            _ if !args.wait => return Ok(ExitCode::SUCCESS),
            "active" if was_draining => bail!(
                "{pod} takes streams again: it was told to, or no other pod does; start another one, or say --force"
            ),
            _ => tokio::time::sleep(LOOK_INTERVAL).await,
        }
        body = args.admin.ask("GET", &format!("/v1/pods/{pod}")).await?;
    }
}

/// Lets a pod in.
pub(crate) async fn join(args: JoinArgs) -> Result<ExitCode> {
    let body = args.admin.ask("POST", &format!("/v1/pods/{}/join", args.pod)).await?;
    print::answer(format_args!("{} is {}", args.pod, body["phase"].as_str().unwrap_or("?")))?;
    Ok(ExitCode::SUCCESS)
}

/// Shows where a stream would go.
pub(crate) async fn explain(args: ExplainArgs) -> Result<ExitCode> {
    let mut path = format!("/v1/explain?table={}", args.table);
    if let Some(stream) = &args.stream {
        let _ = write!(path, "&stream={}", encoded(stream));
    }
    if let Some(rate) = args.rate {
        let _ = write!(path, "&rate={rate}");
    }
    let body = args.admin.ask("GET", &path).await?;
    if args.json {
        print::answer(format_args!("{body:#}"))?;
        return Ok(ExitCode::SUCCESS);
    }
    let text = |key: &str| body[key].as_str().map(str::to_owned);
    let pod = text("pod");
    let decided = match (&pod, text("rule")) {
        (Some(pod), Some(rule)) => format!("{pod}, by rule {rule}"),
        _ => format!("nowhere: {}", text("refusal").unwrap_or_else(|| "no pod takes it".to_owned())),
    };
    print::answer(format_args!("a stream to {} goes to {decided}", args.table))?;
    print::answer(format_args!(
        "home {}; the table stands on {} pod(s); pods take streams up to a load of {:.2}",
        text("home").unwrap_or_else(|| "–".to_owned()),
        body["spread"],
        body["bound"].as_f64().unwrap_or_default()
    ))?;
    let mut rows = vec![["POD", "LOAD", "REPORTED", "PLACED", "ADDS", "AGE", ""].map(str::to_owned)];
    for candidate in list(&body["candidates"]) {
        let number = |key: &str| format!("{:.3}", candidate[key].as_f64().unwrap_or_default());
        let name = candidate["pod"].as_str().unwrap_or("?").to_owned();
        let why = match candidate["why_not"].as_str() {
            Some(why) => why.to_owned(),
            None if Some(&name) == pod.as_ref() => "chosen".to_owned(),
            None => String::new(),
        };
        let age = format!("{:.1} s", candidate["report_age_ms"].as_f64().unwrap_or_default() / 1e3);
        rows.push([name, number("load"), number("reported"), number("placed"), number("adds"), age, why]);
    }
    aligned(&rows).lines().try_for_each(print::answer)?;
    Ok(ExitCode::SUCCESS)
}

/// A text as it may stand in a query.
pub(crate) fn encoded(text: &str) -> String {
    text.bytes().map(|byte| format!("%{byte:02x}")).collect()
}

/// Shows the pool until it is interrupted; once where nobody looks at a terminal.
pub(crate) async fn top(args: TopArgs) -> Result<ExitCode> {
    let is_live = !args.once && std::io::stdout().is_terminal();
    if is_live {
        print::answer(CLEAR)?;
    }
    loop {
        let shown = match view(&args.admin).await {
            Ok(shown) => shown,
            // A gateway that is started again comes back.
            Err(error) if is_live => format!("{error:#}\n"),
            Err(error) => return Err(error),
        };
        if !is_live {
            shown.lines().try_for_each(print::answer)?;
            return Ok(ExitCode::SUCCESS);
        }
        print::answer(frame(&shown, console::Term::stdout().size_checked()))?;
        tokio::time::sleep(LOOK_INTERVAL).await;
    }
}

/// One view as a terminal of so many rows and columns takes it. Lines that go on in the next row, and rows that push others
/// out at the top, would stand beside what the next view draws.
fn frame(shown: &str, size: Option<(u16, u16)>) -> String {
    let (rows, columns) =
        size.map_or((usize::MAX, usize::MAX), |(rows, columns)| (rows.into(), columns.into()));
    // The last row is the cursor's.
    let lines = shown.lines().take(rows.saturating_sub(1).max(1));
    let cut = |line: &str| line.chars().take(columns).collect::<String>();
    let lines: Vec<String> = lines.map(|line| format!("{}{CLEAR_LINE}", cut(line))).collect();
    format!("{HOME}{}{CLEAR_BELOW}", lines.join("\n"))
}

async fn view(admin: &AdminArgs) -> Result<String> {
    let (pool, tables) = (admin.ask("GET", "/v1/pods").await?, admin.ask("GET", "/v1/tables").await?);
    let pods = list(&pool["pods"]);
    let sum = |key: &str| pods.iter().fold(0.0, |sum, pod| sum + pod[key].as_f64().unwrap_or_default());
    let mut shown = format!(
        "sluice {} · {} · {} · {} · {} MB/s\n\n",
        admin.admin,
        counted(pods.len() as f64, "pod"),
        counted(pool["gateways"].as_f64().unwrap_or_default(), "gateway"),
        counted(sum("streams"), "stream"),
        megabytes(sum("bytes_per_s"))
    );
    shown.push_str(&pods_table(&pods));
    let tables = list(&tables["tables"]);
    if !tables.is_empty() {
        let mut rows = vec![["TABLE", "MB/S", "STREAMS", "HOME", "PODS"].map(str::to_owned)];
        rows.extend(tables.iter().take(10).map(|table| {
            let text = |key: &str| table[key].as_str().unwrap_or("–").to_owned();
            let rate = megabytes(table["bytes_per_s"].as_f64().unwrap_or_default());
            let pods = table["pods"].as_array().map_or(0, Vec::len).to_string();
            [text("table"), rate, table["streams"].to_string(), text("home"), pods]
        }));
        let _ = write!(shown, "\n{}", aligned(&rows));
    }
    Ok(shown)
}

/// The entries of a list; none where it is not one.
pub(crate) fn list(value: &Value) -> Vec<&Value> {
    value.as_array().map(|list| list.iter().collect()).unwrap_or_default()
}

fn pods_table(pods: &[&Value]) -> String {
    let header = ["POD", "PHASE", "LOAD", "", "STREAMS", "MB/S", "LAG", "ADDRESS", "ZONE"];
    let mut rows = vec![header.map(str::to_owned)];
    rows.extend(pods.iter().map(|pod| {
        let text = |key: &str| pod[key].as_str().unwrap_or("–").to_owned();
        let number = |key: &str| pod[key].as_f64().unwrap_or_default();
        // Of a pod that was named by hand there are no reports.
        let told = |key: &str, shown: String| if pod[key].is_null() { "–".to_owned() } else { shown };
        [
            text("id"),
            text("phase"),
            bar(number("load")),
            told("load", format!("{:.2} {}", number("load"), largest(&pod["fractions"]))),
            pod["streams"].to_string(),
            told("bytes_per_s", megabytes(number("bytes_per_s"))),
            told("lag_ms", format!("{:.1} s", number("lag_ms") / 1e3)),
            text("address"),
            text("zone"),
        ]
    }));
    aligned(&rows)
}

/// Which of a load's fractions is the largest.
fn largest(fractions: &Value) -> String {
    let fractions = fractions.as_object().into_iter().flatten();
    let value = |value: &Value| value.as_f64().unwrap_or_default();
    let largest = fractions.max_by(|a, b| value(a.1).total_cmp(&value(b.1)));
    largest.filter(|(_, fraction)| value(fraction) > 0.0).map(|(name, _)| name.clone()).unwrap_or_default()
}

fn counted(count: f64, what: &str) -> String {
    format!("{count} {what}{}", if count == 1.0 { "" } else { "s" })
}

/// What is no traffic has no sign.
fn megabytes(bytes: f64) -> String {
    let bytes = if bytes > 0.0 { bytes } else { 0.0 };
    format!("{:.2}", bytes / 1e6)
}

fn bar(load: f64) -> String {
    let full = (load.clamp(0.0, 1.0) * BAR_CHARS as f64).round() as usize;
    format!("{}{}", "█".repeat(full), "·".repeat(BAR_CHARS - full))
}

fn left_text(left: &Value) -> String {
    format!(
        "{} streams, {} log entries of {} tables; it waits for gateways {:.0} s more",
        left["streams"],
        left["log_entries"],
        left["tables"],
        left["deadline_ms"].as_f64().unwrap_or_default() / 1e3
    )
}

/// What to do about a pod that has ended before all that it had was committed; `left` is what it said last.
fn undrained_text(pod: &PodId, left: &Value) -> String {
    let log = left["log"].as_str().map(|log| format!(" in {log}")).unwrap_or_default();
    let entries = left["log_entries"].as_u64().filter(|entries| *entries > 0);
    let holds = entries.map(|entries| {
        format!(
            "{entries} entries ({}) that are in no table",
            ByteSize(left["bytes"].as_u64().unwrap_or_default())
        )
    });
    let holds = holds.unwrap_or_else(|| "what is in no table".to_owned());
    let former =
        list(&left["former_logs"]).into_iter().filter_map(Value::as_str).collect::<Vec<_>>().join(", ");
    if entries.is_none() && !former.is_empty() {
        return format!(
            "{pod} has not drained: the log of a former life of it was not taken over to its end ({former}); its last word \
             says why. Restore what is damaged and start {pod} again, or give up what is lost: `sluice release --log`"
        );
    }
    format!(
        "{pod} has not drained: its deadline came while its log{log} still held {holds}; keep its volume, and start {pod} again \
         on it, which commits them as soon as what they wait for is there (`sluice tables TABLE` says what that is)"
    )
}

/// Rows of columns that stand below each other.
pub(crate) fn aligned<const COLUMNS: usize>(rows: &[[String; COLUMNS]]) -> String {
    let chars = |text: &String| text.chars().count();
    let width = |column: usize| rows.iter().map(|row| chars(&row[column])).max().unwrap_or_default();
    let widths: Vec<usize> = (0..COLUMNS).map(width).collect();
    let mut text = String::new();
    for row in rows {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}"));
        let line = cells.collect::<Vec<_>>().join("  ");
        let _ = writeln!(text, "{}", line.trim_end());
    }
    text
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_frame_fits_its_terminal() {
        let shown = "sluice · 2 pods\n\nPOD    LOAD\npod-1  ██··\npod-2  ····\n";
        let cut = frame(shown, Some((4, 9)));
        let plain = cut.replace(HOME, "").replace(CLEAR_LINE, "").replace(CLEAR_BELOW, "");
        assert_eq!(plain, "sluice · \n\nPOD    LO");
        assert!(cut.starts_with(HOME) && cut.ends_with(CLEAR_BELOW), "{cut:?}");
        let all = frame(shown, None);
        assert_eq!(all.matches(CLEAR_LINE).count(), 5, "{all:?}");
    }

    #[test]
    fn no_traffic_has_no_sign() {
        for bytes in [0.0, -0.0, -1e-9, f64::NAN] {
            assert_eq!(megabytes(bytes), "0.00");
        }
        assert_eq!(megabytes(2.5e6), "2.50");
        assert_eq!((counted(1.0, "pod"), counted(0.0, "pod")), ("1 pod".to_owned(), "0 pods".to_owned()));
    }

    #[test]
    fn pods_are_shown_below_each_other() {
        let pod = |id: &str, load: f64| {
            json!({ "id": id, "phase": "active", "load": load, "streams": 3, "bytes_per_s": 2.5e6, "lag_ms": 700,
                "address": "127.0.0.1:7171", "zone": null, "fractions": { "cpu": load, "log": 0.0 } })
        };
        let (one, two) = (pod("pod-1", 0.5), pod("a-longer-name", 0.0));
        let shown = pods_table(&[&one, &two]);
        let lines: Vec<&str> = shown.lines().collect();
        assert_eq!(lines[0].find("PHASE"), lines[2].find("active"));
        assert!(lines[1].contains("██████████··········  0.50 cpu"), "{shown}");
        assert!(lines[1].ends_with("3        2.50  0.7 s  127.0.0.1:7171  –"), "{shown}");
    }
}
