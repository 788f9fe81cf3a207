//! `sluice tables`: lists the tables, or describes one.
//!
//! *Owns*: asking and printing.
//! *Does not own*: the description; the gateway's JSON is printed as it is.

use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use serde_json::Value;
use sluice_client::Client;
use sluice_shared::ids::TableName;

use crate::auth::{AuthArgs, TlsArgs};
use crate::{http, print};

/// Lists the tables, or describes one.
#[derive(clap::Args)]
pub(crate) struct TablesArgs {
    /// Describe this table; else list all.
    name: Option<String>,
    /// The gateway.
    #[arg(long, default_value = "ws://127.0.0.1:7070")]
    url: String,
    #[command(flatten)]
    auth: AuthArgs,
    #[command(flatten)]
    tls: TlsArgs,
}

pub(crate) async fn run(args: TablesArgs) -> Result<ExitCode> {
    let path = match &args.name {
        Some(name) => format!("/v1/tables/{}", name.parse::<TableName>()?),
        None => "/v1/tables".to_owned(),
    };
    let client = args.tls.give(args.auth.give(Client::connect(&args.url).await?))?;
    let answer = http::get_from_any(&args.url, &path, &client).await?;
    let body: Value = serde_json::from_slice(&answer.body).with_context(|| {
        format!("{} answered GET {path} with status {} and no JSON", args.url, answer.status)
    })?;
    if answer.status != 200 {
        bail!("{}", body["error"]["message"].as_str().unwrap_or("the gateway refused"));
    }
    match names(&body) {
        Some(names) if args.name.is_none() => names.iter().try_for_each(print::answer)?,
        _ => print::answer(format_args!("{body:#}"))?,
    }
    if let Some(note) = waiting(&body) {
        print::note(note);
    }
    Ok(ExitCode::SUCCESS)
}

/// Names in a list of tables; None where the answer has another shape.
fn names(body: &Value) -> Option<Vec<&str>> {
    let list = body.as_array().or_else(|| body["tables"].as_array())?;
    list.iter().map(|entry| entry.as_str().or_else(|| entry["table"].as_str())).collect()
}

/// What to do about records that wait.
fn waiting(body: &Value) -> Option<String> {
    let held = body["held"].as_array().filter(|held| !held.is_empty())?;
    let count = held.len() as u64 + body["held_left_out"].as_u64().unwrap_or(0);
    let logs = body["waits_for_logs"].as_array().map(Vec::as_slice).unwrap_or_default();
    let shown: Vec<String> = logs
        .iter()
        .filter_map(|log| {
            let (log, pod) = (log["log"].as_str()?, log["pod"].as_str());
            Some(format!("log {log}{}", pod.map(|pod| format!(" of {pod}")).unwrap_or_default()))
        })
        .collect();
    let how = match shown.is_empty() {
        true => {
            format!("see: sluice release --table {} --dry-run", body["table"].as_str().unwrap_or("TABLE"))
        }
        false => format!(
            "which may be in {}: start its pod again with that log; where it is lost for good, see what would be given up: \
             sluice release --log {} --dry-run",
            shown.join(", "),
            logs.iter().find_map(|log| log["log"].as_str()).unwrap_or("LOG"),
        ),
    };
    Some(format!("{count} gap(s) of its streams wait for records that are not here, {how}"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_waits_is_told_with_what_to_do() {
        assert_eq!(waiting(&json!({"held": []})), None);
        let mut body = json!({"table": "a.b.c", "held": [{}], "held_left_out": 2, "waits_for_logs": []});
        let note = waiting(&body).expect("some wait");
        assert!(note.starts_with("3 gap(s)") && note.contains("--table a.b.c --dry-run"), "{note}");
        body["waits_for_logs"] = json!([{"log": "l", "pod": "pod-1"}, {"log": "m", "pod": null}]);
        let note = waiting(&body).expect("some wait");
        assert!(
            note.contains("log l of pod-1, log m: start") && note.contains("--log l --dry-run"),
            "{note}"
        );
    }

    #[test]
    fn names_are_found() {
        assert_eq!(names(&json!({"tables": ["a.b.c"]})), Some(vec!["a.b.c"]));
        assert_eq!(names(&json!([{"table": "a.b.c"}])), Some(vec!["a.b.c"]));
        assert_eq!(names(&json!({"table": "a.b.c"})), None);
    }
}
