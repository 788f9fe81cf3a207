//! OTLP over HTTP: one post an export, in protobuf or JSON.
//!
//! *Owns*: headers and statuses of these posts.
//! *Does not own*: what is in them (`otlp`), reading and decompressing bodies (`post`).

use std::sync::Arc;

use axum::extract::Request;
use axum::response::{IntoResponse, Response};
use http::HeaderValue;
use http::StatusCode;
use http::header::{CONTENT_TYPE, HeaderMap};
use http::request::Parts;
use sluice_shared::error::Error;

use super::answer::{self, Partial};
use super::{Form, Otlp, Signal, TOO_LARGE};
use crate::edge::http::{Code, Refusal};
use crate::edge::post::body::{Body, Rest};
use crate::edge::post::{behind, coding};

/// Answers a post.
pub(super) async fn export(otlp: Arc<Otlp>, signal: Signal, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let version = parts.version;
    let form = match form(&parts.headers) {
        Ok(form) => form,
        Err(refusal) => return behind(refused(refusal, Form::Json), Rest::all(body), version),
    };
    let coding = match coding(&parts.headers) {
        Ok(coding) => coding,
        Err(refusal) => return behind(refused(refusal, form), Rest::all(body), version),
    };
    let mut body = Body::new(body, coding, otlp.app.config.write_timeout());
    let answer = match take(&otlp, signal, form, (&parts, &mut body)).await {
        Ok(partial) => answered(answer::response(signal, &partial, form), form),
        Err(error) => refused(answer::with_retry(error).into(), form),
    };
    behind(answer, body.into_rest(), version)
}

async fn take(
    otlp: &Arc<Otlp>,
    signal: Signal,
    form: Form,
    (parts, body): (&Parts, &mut Body),
) -> Result<Partial, Error> {
    let message = otlp.read(body).await?;
    otlp.export(signal, &parts.headers, form, message).await
}

fn form(headers: &HeaderMap) -> Result<Form, Refusal> {
    let stated = headers.get(CONTENT_TYPE).and_then(|stated| stated.to_str().ok()).unwrap_or_default();
    let essence = stated.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    [Form::Protobuf, Form::Json].into_iter().find(|form| form.content_type() == essence).ok_or_else(|| {
        let shown: String = stated.chars().take(100).collect();
        let message = format!(
            "Content-Type {shown:?} is not taken here: send {} or {}",
            Form::Protobuf.content_type(),
            Form::Json.content_type()
        );
        Refusal::with("unsupported_type", message, StatusCode::UNSUPPORTED_MEDIA_TYPE)
    })
}

fn answered(body: Vec<u8>, form: Form) -> Response {
    ([(CONTENT_TYPE, HeaderValue::from_static(form.content_type()))], body).into_response()
}

fn refused(mut refusal: Refusal, form: Form) -> Response {
    match refusal.error.code.as_str() {
        "body_timeout" => refusal.status = StatusCode::REQUEST_TIMEOUT,
        TOO_LARGE => refusal.status = StatusCode::PAYLOAD_TOO_LARGE,
        _ => {}
    }
    let mut response = answered(answer::status_message(&refusal.error, form), form);
    *response.status_mut() = refusal.status;
    response.headers_mut().extend(refusal.header);
    response.extensions_mut().insert(Code(*refusal.error));
    response
}
