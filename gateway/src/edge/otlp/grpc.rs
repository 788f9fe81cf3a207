//! OTLP over gRPC: one call an export.
//!
//! The calls are taken apart here, and not by generated code: a request goes from its bytes into columns without a tree of
//! messages between, and what its compression makes of it is bounded.
//!
//! *Owns*: the frame of a unary call, its compression, its trailers.
//! *Does not own*: what is in it (`otlp`), HTTP/2 (`app`).

use std::sync::Arc;

use axum::body::Body as AnyBody;
use axum::extract::Request;
use axum::response::{IntoResponse, Response};
use bytes::{Buf, BufMut, BytesMut};
use http::header::{CONTENT_TYPE, HeaderMap};
use http::{HeaderValue, StatusCode};
use http_body_util::{BodyExt, Full};
use sluice_shared::error::Error;
use tonic::Status;

use super::answer::{self, Partial};
use super::{Form, Held, Otlp, Signal};
use crate::edge::http::Code;
use crate::edge::post::body::Body;
use crate::edge::post::coding::{Coding, KNOWN};

/// Before a message: whether it is compressed, and its length.
const PREFIX_BYTES: usize = 5;
const GRPC: &str = "application/grpc";
const ENCODING: &str = "grpc-encoding";
const ACCEPT_ENCODING: &str = "grpc-accept-encoding";
const STATUS: &str = "grpc-status";

/// Answers a call.
pub(super) async fn export(otlp: Arc<Otlp>, signal: Signal, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    if !is_grpc(&parts.headers) {
        let message = format!("this path speaks gRPC: send {GRPC}, or POST {} over HTTP", signal.path());
        return (StatusCode::UNSUPPORTED_MEDIA_TYPE, message).into_response();
    }
    let exported = async {
        let mut body = Body::new(body, Coding::Identity, otlp.app.config.write_timeout());
        let call = otlp.read(&mut body).await?;
        let message = message(&otlp, &parts.headers, call)?;
        otlp.export(signal, &parts.headers, Form::Protobuf, message).await
    };
    match exported.await {
        Ok(partial) => succeeded(signal, &partial),
        Err(error) => failed(answer::with_retry(error)),
    }
}

fn is_grpc(headers: &HeaderMap) -> bool {
    let stated = headers.get(CONTENT_TYPE).and_then(|stated| stated.to_str().ok());
    let kind = stated.and_then(|stated| stated.split(';').next()).unwrap_or_default().trim();
    kind == GRPC || kind == "application/grpc+proto"
}

/// The one message of a call, decompressed.
fn message(otlp: &Otlp, headers: &HeaderMap, call: Held) -> Result<Held, Error> {
    let malformed = |why: String| Error::invalid("malformed_call", format!("the call's body: {why}"));
    let mut bytes = call.bytes.clone();
    if bytes.len() < PREFIX_BYTES {
        return Err(malformed(format!("{} bytes, of {PREFIX_BYTES} before a message", bytes.len())));
    }
    let (compressed, length) = (bytes.get_u8(), bytes.get_u32());
    if usize::try_from(length).ok() != Some(bytes.len()) {
        let message = format!("a message of {length} bytes, {} bytes follow: send one message", bytes.len());
        return Err(malformed(message));
    }
    match compressed {
        0 => Ok(Held { bytes, ..call }),
        1 => otlp.decompress(coding(headers)?, bytes),
        other => Err(malformed(format!("{other} where 0 or 1 says whether the message is compressed"))),
    }
}

fn coding(headers: &HeaderMap) -> Result<Coding, Error> {
    let named = headers.get(ENCODING).and_then(|named| named.to_str().ok()).unwrap_or_default();
    let known = Coding::named(named).filter(|_| !named.is_empty() && named != "identity");
    known.unwrap_or_else(|| {
        let message = format!("{ENCODING} {named:?} is not known: known are {KNOWN}");
        Err(Error::invalid(UNKNOWN_ENCODING, message))
    })
}

/// Code of the error that gRPC wants to be `UNIMPLEMENTED`.
const UNKNOWN_ENCODING: &str = "unsupported_encoding";

fn succeeded(signal: Signal, partial: &Partial) -> Response {
    let message = answer::response(signal, partial, Form::Protobuf);
    let mut framed = BytesMut::with_capacity(PREFIX_BYTES + message.len());
    framed.put_u8(0);
    framed.put_u32(u32::try_from(message.len()).expect("answers are short"));
    framed.put_slice(&message);
    let trailers =
        HeaderMap::from_iter([(http::HeaderName::from_static(STATUS), HeaderValue::from_static("0"))]);
    let body = Full::new(framed.freeze()).with_trailers(async move { Some(Ok(trailers)) });
    let mut response = AnyBody::new(body).into_response();
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(GRPC));
    response
}

fn failed(error: Error) -> Response {
    let mut status = answer::grpc_status(&error);
    if error.code == UNKNOWN_ENCODING {
        status = Status::unimplemented(status.message());
    }
    let mut response: Response = status.into_http();
    if error.code == UNKNOWN_ENCODING {
        response.headers_mut().insert(ACCEPT_ENCODING, HeaderValue::from_static("identity,gzip,zstd"));
    }
    response.extensions_mut().insert(Code(error));
    response
}
