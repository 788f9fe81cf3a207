//! `POST /oidc/v1/token`: OAuth's client credentials grant (RFC 6749 section 4.4), as Databricks's clients ask for it.
//!
//! `authorization_details` (RFC 9396) names tables and privileges in Unity Catalog's words: SELECT is `describe`, MODIFY
//! is `write`. What it says of catalogs and schemas goes without saying here. Without it the token has all that the client
//! was granted.
//!
//! *Owns*: the form of requests, answers and errors.
//! *Does not own*: who gets a token (`auth`).

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use http::header::{AUTHORIZATION, CACHE_CONTROL, PRAGMA, WWW_AUTHENTICATE};
use http::{HeaderMap, HeaderValue, StatusCode};
use serde::Deserialize;
use serde_json::json;
use sluice_shared::error::{Error, ErrorKind};
use sluice_shared::ids::TableName;

use crate::app::App;
use crate::auth::{Issued, NotIssued, Privilege};
use crate::edge::http::{Code, json_response};

/// A request names some tables.
const FORM_BYTES_MAX: usize = 64 << 10;
const BODY_TIMEOUT: Duration = Duration::from_secs(10);
const TABLE: &str = "TABLE";
const DETAILS_TYPE: &str = "unity_catalog_privileges";
const BAD_DETAILS: &str = "invalid_authorization_details";

/// A request's fields; others are passed over, as RFC 6749 has it.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Form {
    grant_type: Option<String>,
    client_id: Option<String>,
    client_secret: Option<String>,
    authorization_details: Option<String>,
}

/// One of the details.
#[derive(Deserialize)]
struct Detail {
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    object_type: String,
    #[serde(default)]
    object_full_path: String,
    #[serde(default)]
    privileges: Vec<String>,
}

/// Why there is no token: RFC 6749 section 5.2.
struct Refused {
    status: StatusCode,
    error: &'static str,
    description: String,
}

impl Refused {
    fn invalid(error: &'static str, description: impl Into<String>) -> Self {
        Self { status: StatusCode::BAD_REQUEST, error, description: description.into() }
    }

    fn client(description: &str) -> Self {
        let (error, description) = ("invalid_client", description.to_owned());
        Self { status: StatusCode::UNAUTHORIZED, error, description }
    }
}

impl IntoResponse for Refused {
    fn into_response(self) -> Response {
        let Self { status, error, description } = self;
        let kind = match status {
            StatusCode::UNAUTHORIZED => ErrorKind::Unauthorized,
            StatusCode::FORBIDDEN => ErrorKind::Forbidden,
            StatusCode::INTERNAL_SERVER_ERROR => ErrorKind::Internal,
            _ => ErrorKind::Invalid,
        };
        let mut response =
            json_response(json!({ "error": error, "error_description": description }).to_string());
        *response.status_mut() = status;
        if status == StatusCode::UNAUTHORIZED {
            let how = HeaderValue::from_static("Basic realm=\"sluice\"");
            response.headers_mut().insert(WWW_AUTHENTICATE, how);
        }
        response.extensions_mut().insert(Code(Error::new(kind, error, description)));
        response
    }
}

/// Answers a request for a token. No cache keeps the answer.
pub(super) async fn token(State(app): State<Arc<App>>, request: Request) -> Response {
    let mut response = issue(&app, request).await.unwrap_or_else(Refused::into_response);
    response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response.headers_mut().insert(PRAGMA, HeaderValue::from_static("no-cache"));
    response
}

async fn issue(app: &App, request: Request) -> Result<Response, Refused> {
    let (parts, body) = request.into_parts();
    let reading = axum::body::to_bytes(body, FORM_BYTES_MAX);
    let body =
        tokio::time::timeout(BODY_TIMEOUT, reading).await.ok().and_then(Result::ok).ok_or_else(|| {
            let what =
                format!("a body of at most {FORM_BYTES_MAX} bytes was expected within {BODY_TIMEOUT:?}");
            Refused::invalid("invalid_request", what)
        })?;
    let form: Form = serde_urlencoded::from_bytes(&body).map_err(|_| {
        let what = "the body is not application/x-www-form-urlencoded with each field once";
        Refused::invalid("invalid_request", what)
    })?;
    match form.grant_type.as_deref() {
        Some("client_credentials") => {}
        None => {
            return Err(Refused::invalid(
                "invalid_request",
                "grant_type is missing: send client_credentials",
            ));
        }
        Some(_) => {
            let what = "this grant_type is not offered: send grant_type=client_credentials";
            return Err(Refused::invalid("unsupported_grant_type", what));
        }
    }
    let (client, secret) = credentials(&parts.headers, &form)?;
    let wanted = form.authorization_details.as_deref().map(wanted).transpose()?;
    let Issued { token, expires_in } =
        app.auth.issue(&client, &secret, wanted.as_deref()).map_err(|not| refused(&client, not))?;
    tracing::debug!(client, "token issued");
    let body = json!({ "access_token": token, "token_type": "Bearer", "expires_in": expires_in.as_secs() });
    Ok(json_response(body.to_string()))
}

fn refused(client: &str, not: NotIssued) -> Refused {
    match not {
        NotIssued::UnknownClient => Refused::client("no client of this gateway has this id and this secret"),
        NotIssued::Lacks(privilege, table) => {
            let in_their_words = match privilege {
                Privilege::Write => " (MODIFY)",
                Privilege::Describe => " (SELECT)",
                Privilege::Create => "",
            };
            let description = format!(
                "client {client:?} lacks the privilege `{privilege}`{in_their_words} on {table}: grant it in gateway.clients"
            );
            Refused { status: StatusCode::FORBIDDEN, error: "access_denied", description }
        }
        NotIssued::Failed(error) if error.kind == ErrorKind::Invalid => {
            Refused::invalid("invalid_request", error.message)
        }
        NotIssued::Failed(error) => Refused {
            status: StatusCode::INTERNAL_SERVER_ERROR,
            error: "server_error",
            description: error.message,
        },
    }
}

/// Id and secret, of the header or of the form.
fn credentials(headers: &HeaderMap, form: &Form) -> Result<(String, String), Refused> {
    let in_form = (form.client_id.as_ref(), form.client_secret.as_ref());
    let Some(header) = headers.get(AUTHORIZATION) else {
        let (Some(id), Some(secret)) = in_form else {
            return Err(Refused::client(
                "send the client's id and secret, with Basic authentication or in the form",
            ));
        };
        return Ok((id.clone(), secret.clone()));
    };
    if in_form.1.is_some() {
        return Err(Refused::invalid(
            "invalid_request",
            "credentials in the header and in the form: send one of them",
        ));
    }
    let basic = || {
        let (scheme, encoded) = header.to_str().ok()?.split_once(' ')?;
        let decoded =
            STANDARD.decode(encoded.trim()).ok().filter(|_| scheme.eq_ignore_ascii_case("basic"))?;
        let (id, secret) = std::str::from_utf8(&decoded).ok()?.split_once(':')?;
        Some((id.to_owned(), secret.to_owned()))
    };
    basic().ok_or_else(|| Refused::client("the Authorization header is not `Basic` with base64 of ID:SECRET"))
}

/// The tables and privileges that details name.
fn wanted(details: &str) -> Result<Vec<(TableName, Privilege)>, Refused> {
    let details: Vec<Detail> = serde_json::from_str(details).map_err(|error| {
        let what = format!("authorization_details is not a JSON array of objects with a type: {error}");
        Refused::invalid(BAD_DETAILS, what)
    })?;
    let mut wanted = Vec::new();
    for detail in details {
        if detail.kind != DETAILS_TYPE {
            let what = format!("authorization_details of another type than {DETAILS_TYPE}");
            return Err(Refused::invalid(BAD_DETAILS, what));
        }
        match detail.object_type.as_str() {
            TABLE => wanted.extend(of_table(&detail)?),
            "CATALOG" | "SCHEMA" => {}
            _ => return Err(Refused::invalid(BAD_DETAILS, "object_type has to be TABLE, SCHEMA or CATALOG")),
        }
    }
    if wanted.is_empty() {
        return Err(Refused::invalid(BAD_DETAILS, "authorization_details without a privilege on a TABLE"));
    }
    Ok(wanted)
}

fn of_table(detail: &Detail) -> Result<Vec<(TableName, Privilege)>, Refused> {
    let table: TableName =
        detail.object_full_path.parse().map_err(|error| Refused::invalid(BAD_DETAILS, format!("{error}")))?;
    let privilege = |named: &String| match named.to_ascii_uppercase().as_str() {
        "MODIFY" | "WRITE" => Ok((table.clone(), Privilege::Write)),
        "SELECT" | "DESCRIBE" => Ok((table.clone(), Privilege::Describe)),
        "CREATE" => Ok((table.clone(), Privilege::Create)),
        _ => {
            let what = format!(
                "on {table}: privileges of a TABLE are MODIFY or write, SELECT or describe, and create"
            );
            Err(Refused::invalid(BAD_DETAILS, what))
        }
    };
    detail.privileges.iter().map(privilege).collect()
}
