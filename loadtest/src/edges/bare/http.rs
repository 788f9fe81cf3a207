//! A bare receiver of posts: each chunk of the body goes on as it came.
//!
//! *Owns*: hyper's set-up, the one answer.
//! *Does not own*: the link to the pod (`bare`).

use std::convert::Infallible;
use std::future::poll_fn;
use std::pin::Pin;

use hyper::body::{Body, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

use super::{Forward, Payload, Receiver, carry};

/// Serves one connection to its end.
pub(super) async fn serve(socket: TcpStream, forward: Forward) -> anyhow::Result<()> {
    let service = service_fn(move |request: Request<Incoming>| {
        let forward = forward.clone();
        async move { Ok::<_, Infallible>(answer(post(request, &forward).await)) }
    });
    Ok(http1::Builder::new().serve_connection(TokioIo::new(socket), service).await?)
}

async fn post(request: Request<Incoming>, forward: &Forward) -> anyhow::Result<()> {
    let link = forward.open().await?;
    carry(&mut BodyReceiver { body: request.into_body() }, link).await
}

fn answer(carried: anyhow::Result<()>) -> Response<String> {
    let (status, text) = match carried {
        Ok(()) => (StatusCode::OK, "{}".to_owned()),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{error:#}")),
    };
    let mut response = Response::new(text);
    *response.status_mut() = status;
    response
}

struct BodyReceiver {
    body: Incoming,
}

impl Receiver for BodyReceiver {
    /// A chunk, which counts as one record: how many there are in it, only a look into it would say.
    async fn next(&mut self) -> anyhow::Result<Option<Payload>> {
        loop {
            let Some(frame) = poll_fn(|cx| Pin::new(&mut self.body).poll_frame(cx)).await else {
                return Ok(None);
            };
            match frame?.into_data() {
                Ok(bytes) if !bytes.is_empty() => {
                    return Ok(Some(Payload { count: 1, bytes, is_line: false }));
                }
                Ok(_) | Err(_) => {}
            }
        }
    }

    async fn ack(&mut self, _: u64) -> anyhow::Result<()> {
        Ok(())
    }
}
