//! A request's body: read when asked, decompressed, and not waited for without end.
//!
//! *Owns*: the way from chunks to pieces, how long a body may bring nothing, what is done with a rest.
//! *Does not own*: codings (`coding`), records (`split`).
//! Keeps P7: a chunk is read when the session wants more, not before.

use std::convert::Infallible;
use std::time::Duration;

use axum::body::{Body as AnyBody, BodyDataStream};
use axum::response::Response;
use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::stream;
use sluice_shared::error::Error;
use tokio::time::{Instant, timeout, timeout_at};

use super::coding::Coding;

/// Behind a refusal the rest of the body is thrown away for this long. Without it the kernel answers unread bytes
/// with a reset, which takes the answer with it.
const LINGER: Duration = Duration::from_secs(2);
/// A producer that stops sending has read the answer.
const LINGER_IDLE: Duration = Duration::from_millis(250);

/// A body that is being read.
pub(in crate::edge) struct Body {
    chunks: BodyDataStream,
    coding: Coding,
    /// Of the last chunk, what is not decompressed.
    chunk: Bytes,
    ended: bool,
    timeout: Duration,
    /// While a chunk is waited for: until when it has to come.
    due: Option<Instant>,
}

impl Body {
    /// `timeout`: how long it may bring nothing while it is read.
    pub(in crate::edge) fn new(body: AnyBody, coding: Coding, timeout: Duration) -> Self {
        let chunks = body.into_data_stream();
        Self { chunks, coding, chunk: Bytes::new(), ended: false, timeout, due: None }
    }

    /// The next piece; None at the end. Safe to drop and call again.
    ///
    /// # Errors
    /// `Invalid`: it is cut off, does not come, or is not compressed as it says.
    pub(in crate::edge) async fn next(&mut self) -> Result<Option<Bytes>, Error> {
        loop {
            let piece = self.coding.step(&mut self.chunk)?;
            if !piece.is_empty() {
                return Ok(Some(piece));
            }
            if self.ended {
                return if self.coding.is_whole() {
                    Ok(None)
                } else {
                    Err(cut_off("its compression goes on"))
                };
            }
            let due = *self.due.get_or_insert_with(|| Instant::now() + self.timeout);
            match timeout_at(due, self.chunks.next()).await {
                Ok(Some(Ok(chunk))) => self.chunk = chunk,
                Ok(Some(Err(error))) => return Err(cut_off(&error.to_string())),
                Ok(None) => self.ended = true,
                Err(_) => {
                    let message = format!("the body brought nothing for {:?}: send it again", self.timeout);
                    return Err(Error::invalid("body_timeout", message));
                }
            }
            self.due = None;
        }
    }

    /// It is not read for a while: the producer is not to blame.
    pub(in crate::edge) fn pause(&mut self) {
        self.due = None;
    }

    /// What has not been read.
    pub(in crate::edge) fn into_rest(self) -> Rest {
        Rest((!self.ended).then_some(self.chunks))
    }
}

fn cut_off(why: &str) -> Error {
    Error::invalid("body_cut_off", format!("the end of the body is missing: {why}"))
}

/// What has not been read of a body.
pub(in crate::edge) struct Rest(Option<BodyDataStream>);

impl Rest {
    /// Of a body that was not touched.
    pub(in crate::edge) fn all(body: AnyBody) -> Self {
        let is_empty = hyper::body::Body::is_end_stream(&body);
        Self((!is_empty).then(|| body.into_data_stream()))
    }

    /// Sends the answer at once, and throws the rest away behind it.
    pub(in crate::edge) fn behind(self, response: Response) -> Response {
        let Some(rest) = self.0 else { return response };
        response.map(|answer| {
            let thrown_away =
                stream::once(throw_away(rest)).filter_map(|()| async { None::<Result<Bytes, Infallible>> });
            let answer = answer.into_data_stream().filter_map(|chunk| async { chunk.ok().map(Ok) });
            AnyBody::from_stream(answer.chain(thrown_away))
        })
    }
}

async fn throw_away(mut rest: BodyDataStream) {
    let all = async { while let Ok(Some(Ok(_))) = timeout(LINGER_IDLE, rest.next()).await {} };
    let _ = timeout(LINGER, all).await;
}
