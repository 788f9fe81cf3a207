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
    Ok(ExitCode::SUCCESS)
}

/// Names in a list of tables; None where the answer has another shape.
fn names(body: &Value) -> Option<Vec<&str>> {
    let list = body.as_array().or_else(|| body["tables"].as_array())?;
    list.iter().map(|entry| entry.as_str().or_else(|| entry["table"].as_str())).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn names_are_found() {
        assert_eq!(names(&json!({"tables": ["a.b.c"]})), Some(vec!["a.b.c"]));
        assert_eq!(names(&json!([{"table": "a.b.c"}])), Some(vec!["a.b.c"]));
        assert_eq!(names(&json!({"table": "a.b.c"})), None);
    }
}
