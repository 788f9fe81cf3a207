//! One WebSocket connection that carries one stream, subprotocol `sluice.v1`.
//!
//! *Owns*: the handshake, its errors, reading while writing, tungstenite's limits.
//! *Does not own*: what the frames mean.

use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures_util::{Sink, SinkExt, Stream};
use http::HeaderValue;
use http::header::SEC_WEBSOCKET_PROTOCOL;
use serde::Deserialize;
use sluice_shared::error::{Error as GatewayError, ErrorKind};
use sluice_shared::frame::{GatewayFrame, SUBPROTOCOL};
use sluice_shared::link::Wire;
use tokio::time::Instant;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;
use tokio_tungstenite::tungstenite::protocol::{CloseFrame, WebSocketConfig};
use tokio_tungstenite::tungstenite::{Error as WsError, Message};
use tokio_tungstenite::{Connector, MaybeTlsStream, WebSocketStream, client_async_tls_with_config};

use crate::error::Error;
use crate::transport::trust;
use crate::transport::{
    CONNECT_TIMEOUT, Event, FRAME_BYTES_MAX, GatewayUrl, Way, broke_protocol, lost, timed_out,
};

const READ_BUFFER_BYTES: usize = 16 << 10;
/// Frames gather here before the socket is asked.
const WRITE_BUFFER_BYTES: usize = 128 << 10;
/// One frame of the largest size that any gateway grants, above the buffer; reaching it ends the connection.
const WRITE_BUFFER_BYTES_MAX: usize = 256 << 20;
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);
/// Frames written before the socket is read again.
const WRITES_PER_READ: usize = 16;

pub(crate) struct Connection {
    socket: WebSocketStream<MaybeTlsStream<Wire>>,
    url: GatewayUrl,
    flush_due: bool,
    heard_at: Instant,
}

impl Connection {
    /// Connects by this way, over TLS where that is given, and upgrades.
    pub(crate) async fn connect(
        url: &GatewayUrl,
        table: &str,
        way: &Way,
        tls: Option<Arc<rustls::ClientConfig>>,
    ) -> Result<Self, Error> {
        let mut request = url.stream(table).into_client_request().map_err(|error| failed(url, &error))?;
        request.headers_mut().insert(SEC_WEBSOCKET_PROTOCOL, HeaderValue::from_static(SUBPROTOCOL));
        let config = WebSocketConfig::default()
            .read_buffer_size(READ_BUFFER_BYTES)
            .write_buffer_size(WRITE_BUFFER_BYTES)
            .max_write_buffer_size(WRITE_BUFFER_BYTES_MAX)
            .max_message_size(Some(FRAME_BYTES_MAX))
            .max_frame_size(Some(FRAME_BYTES_MAX));
        let connector = tls.map_or(Connector::Plain, Connector::Rustls);
        let connecting = Box::pin(async {
            let wire = way.to(url.authority()).await.map_err(WsError::Io)?;
            client_async_tls_with_config(request, wire, Some(config), Some(connector)).await
        });
        let (socket, _) = tokio::time::timeout(CONNECT_TIMEOUT, connecting)
            .await
            .map_err(|_| timed_out(url, "connecting", CONNECT_TIMEOUT))?
            .map_err(|error| failed(url, &error))?;
        Ok(Self { socket, url: url.clone(), flush_due: false, heard_at: Instant::now() })
    }

    /// As of any transport: see `transport::Connection`.
    pub(crate) fn poll_io(
        &mut self,
        cx: &mut Context<'_>,
        unsent: &mut dyn FnMut() -> Option<Bytes>,
    ) -> Poll<Result<Event, Error>> {
        if let Poll::Ready(event) = self.poll_read(cx) {
            return Poll::Ready(event);
        }
        for _ in 0..WRITES_PER_READ {
            match self.socket.poll_ready_unpin(cx) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(ready) => ready.map_err(|error| failed(&self.url, &error))?,
            }
            let Some(frame) = unsent() else {
                return self.poll_flush(cx);
            };
            let written = std::pin::Pin::new(&mut self.socket).start_send(Message::Binary(frame));
            written.map_err(|error| failed(&self.url, &error))?;
            self.flush_due = true;
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    fn poll_read(&mut self, cx: &mut Context<'_>) -> Poll<Result<Event, Error>> {
        loop {
            let message = match std::pin::Pin::new(&mut self.socket).poll_next(cx) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(None) => return Poll::Ready(Err(lost(&self.url, "it closed the connection"))),
                Poll::Ready(Some(message)) => message,
            };
            self.heard_at = Instant::now();
            match message {
                Ok(Message::Binary(bytes)) => {
                    let frame = GatewayFrame::decode(&bytes);
                    return Poll::Ready(
                        frame.map(Event::Frame).map_err(|error| broke_protocol(&self.url, &error.message)),
                    );
                }
                Ok(Message::Close(frame)) => return Poll::Ready(Ok(self.closed(frame))),
                // A pong is due, and goes out with the next flush.
                Ok(Message::Ping(_)) => self.flush_due = true,
                Ok(Message::Pong(_) | Message::Frame(_)) => {}
                Ok(Message::Text(_)) => {
                    let what = format!("a text message: it does not speak {SUBPROTOCOL}");
                    return Poll::Ready(Err(broke_protocol(&self.url, &what)));
                }
                Err(error) => return Poll::Ready(Err(failed(&self.url, &error))),
            }
        }
    }

    fn poll_flush(&mut self, cx: &mut Context<'_>) -> Poll<Result<Event, Error>> {
        if self.flush_due {
            match self.socket.poll_flush_unpin(cx) {
                Poll::Pending => {}
                Poll::Ready(flushed) => {
                    flushed.map_err(|error| failed(&self.url, &error))?;
                    self.flush_due = false;
                }
            }
        }
        Poll::Pending
    }

    /// When the gateway was last heard of.
    pub(crate) fn heard_at(&self) -> Instant {
        self.heard_at
    }

    /// Says goodbye, without insisting.
    pub(crate) async fn close(mut self) {
        // Everything that mattered has been acknowledged: a failure here is of no consequence.
        let _ = tokio::time::timeout(CLOSE_TIMEOUT, self.socket.close(None)).await;
    }

    fn closed(&self, frame: Option<CloseFrame>) -> Event {
        let Some(frame) = frame else {
            return Event::Closed(lost(&self.url, "it closed the connection"));
        };
        let code = u16::from(frame.code);
        let message = format!("gateway {} closed the stream with code {code}: {}", self.url, frame.reason);
        let kind = match code {
            1000 => return Event::Finished,
            1007..=1009 => ErrorKind::Invalid,
            4401 => ErrorKind::Unauthorized,
            4403 => ErrorKind::Forbidden,
            4404 => ErrorKind::NotFound,
            4409 => ErrorKind::Fenced,
            1013 => ErrorKind::Busy,
            _ => ErrorKind::Unavailable,
        };
        Event::Closed(GatewayError::new(kind, "closed", message).into())
    }
}

fn failed(url: &GatewayUrl, error: &WsError) -> Error {
    match error {
        WsError::Http(response) => refused(url, response.status(), response.body().as_deref().unwrap_or(&[])),
        other => match trust::refusal(other) {
            Some(what) => Error::Insecure { url: url.to_string(), what },
            None => Error::Connection { url: url.to_string(), what: other.to_string() },
        },
    }
}

/// The gateway answered the upgrade with an HTTP error: its JSON body, or what the status means.
fn refused(url: &GatewayUrl, status: http::StatusCode, body: &[u8]) -> Error {
    #[derive(Deserialize)]
    struct Body {
        error: GatewayError,
    }
    if let Ok(body) = serde_json::from_slice::<Body>(body) {
        return body.error.into();
    }
    let kind = match status.as_u16() {
        401 => ErrorKind::Unauthorized,
        403 => ErrorKind::Forbidden,
        404 => ErrorKind::NotFound,
        409 => ErrorKind::Fenced,
        408 | 429 => ErrorKind::Busy,
        500.. => ErrorKind::Unavailable,
        _ => ErrorKind::Invalid,
    };
    GatewayError::new(kind, "upgrade_refused", format!("gateway {url} refused the connection: {status}"))
        .into()
}
