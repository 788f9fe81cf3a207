//! Sends messages back, so that conformance suites can test the socket that producers have.
//!
//! *Owns*: the loop.
//! *Does not own*: the socket, its limits, what ends it and with which code (`websocket`).

use std::sync::Arc;

use futures_util::{SinkExt, StreamExt};
use tokio_tungstenite::tungstenite::Message;

use super::{WebSocketEdge, close_code, read_failure};
use crate::app::App;
use crate::session::Input;
use crate::socket::Socket;

/// Speaks to one client until one side ends it.
pub(in crate::edge) async fn serve(socket: Socket, buffered: Vec<u8>, app: Arc<App>) {
    let mut edge = WebSocketEdge::new(socket, buffered, false, &app).await;
    while let Some(read) = edge.socket.next().await {
        match read {
            Ok(message @ (Message::Text(_) | Message::Binary(_))) => {
                if edge.socket.send(message).await.is_err() {
                    return;
                }
            }
            // Pongs wait in the socket.
            Ok(Message::Ping(_) | Message::Pong(_) | Message::Frame(_)) => {
                if edge.socket.flush().await.is_err() {
                    return;
                }
            }
            Ok(Message::Close(_)) => return edge.leave(None, String::new()).await,
            Err(error) => {
                if let Input::Refused(error) = read_failure(&error) {
                    edge.leave(Some(close_code(&error)), error.code).await;
                }
                return;
            }
        }
    }
}
