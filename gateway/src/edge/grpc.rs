//! A gRPC call as HTTP/2 carries it: whether the messages that have begun go on.
//!
//! *Owns*: the boundaries of messages in a request's body, their read deadline, how a call is cut off.
//! *Does not own*: what messages mean (`zerobus`), HTTP/2 (`tcp`).
//! Keeps P7: a message that has begun ends, or its call does.

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use hyper::body::Frame;
use tokio_util::sync::CancellationToken;
use tonic::Status;

use crate::app::Connection;
use crate::progress::{FRAME_STEP_BYTES, Progress};

/// Before each message: a flag and its length (4 bytes, big-endian).
const PREFIX_BYTES: usize = 5;

tokio::task_local! {
    /// Of the call that this task serves.
    pub(crate) static CALL: CallEnd;
}

/// Cuts a call off. An answer that its client does not read is in the way of any other end.
#[derive(Debug, Clone, Default)]
pub(crate) struct CallEnd(CancellationToken);

impl CallEnd {
    pub(crate) fn cut_off(&self) {
        self.0.cancel();
    }

    pub(crate) async fn is_cut_off(&self) {
        self.0.cancelled().await;
    }
}

/// Where the messages of a body begin and end.
#[derive(Debug, Default)]
struct Messages {
    prefix: [u8; PREFIX_BYTES],
    prefix_len: usize,
    /// Of the message that has begun.
    left: u64,
    /// Rises with every byte, and by a whole step with every message.
    count: u64,
}

impl Messages {
    fn feed(&mut self, mut bytes: &[u8]) {
        while let Some(&byte) = bytes.first() {
            if self.left > 0 {
                let skipped = self.left.min(bytes.len() as u64);
                self.left -= skipped;
                self.count += skipped;
                bytes = &bytes[skipped as usize..];
            } else {
                self.prefix[self.prefix_len] = byte;
                self.prefix_len += 1;
                bytes = &bytes[1..];
                if self.prefix_len < PREFIX_BYTES {
                    continue;
                }
                let [_, length @ ..] = self.prefix;
                (self.prefix_len, self.left) = (0, u64::from(u32::from_be_bytes(length)));
            }
            if self.left == 0 {
                self.count += FRAME_STEP_BYTES;
            }
        }
    }

    fn has_begun(&self) -> bool {
        self.left > 0 || self.prefix_len > 0
    }
}

/// The body of a call.
struct Watched {
    body: Body,
    messages: Messages,
    progress: Progress,
    connection: Option<Connection>,
}

/// Watches the body of a call's request.
pub(crate) fn watched(request: http::Request<Body>, read_timeout: Duration) -> http::Request<Body> {
    let connection = request.extensions().get::<Connection>().cloned();
    request.map(|body| {
        let progress = Progress::new(read_timeout, FRAME_STEP_BYTES);
        Body::new(Watched { body, messages: Messages::default(), progress, connection })
    })
}

impl hyper::body::Body for Watched {
    type Data = Bytes;
    type Error = Box<dyn std::error::Error + Send + Sync>;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let this = &mut *self;
        match Pin::new(&mut this.body).poll_frame(cx) {
            Poll::Ready(Some(Ok(frame))) => {
                if let Some(bytes) = frame.data_ref() {
                    this.messages.feed(bytes);
                }
                Poll::Ready(Some(Ok(frame)))
            }
            Poll::Ready(other) => Poll::Ready(other.map(|failed| failed.map_err(Into::into))),
            Poll::Pending if this.messages.has_begun() => {
                // What the connection's other calls do not read keeps this one's bytes away.
                let excused = this.connection.as_ref().is_some_and(Connection::is_paused);
                ready!(this.progress.poll(cx, this.messages.count, excused));
                let late =
                    "a message that has begun brought too little in gateway.read_timeout_ms [frame_timeout]";
                Poll::Ready(Some(Err(Status::deadline_exceeded(late).into())))
            }
            Poll::Pending => Poll::Pending,
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> hyper::body::SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_seen_however_they_are_cut() {
        let bytes = [&[0, 0, 0, 0, 3][..], b"abc", &[0; 5], &[0, 0, 0, 1, 0], &[7; 256]].concat();
        for cut in 1..bytes.len() {
            let mut messages = Messages::default();
            let mut begun = 0;
            for piece in bytes.chunks(cut) {
                messages.feed(piece);
                begun += usize::from(messages.has_begun());
            }
            assert!(!messages.has_begun());
            assert_eq!(messages.count, 3 * FRAME_STEP_BYTES + 3 + 256);
            assert!(begun > 0 || cut >= bytes.len());
        }
    }
}
