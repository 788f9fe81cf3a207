//! A producer's connection, plain or under TLS.
//!
//! *Owns*: the two kinds as one, the first bytes and what they say, how many bytes the peer has taken, the write deadline.
//! *Does not own*: handshakes (`edge/tcp`), what is said over it (`edge`).
//! Keeps P7: a peer that takes no bytes is given up.

use std::io::{Error, ErrorKind, IoSlice, Result};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use sluice_shared::link::Wire;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf};
use tokio_rustls::server::TlsStream;

use crate::progress::Progress;

/// How an HTTP/2 connection begins (RFC 9113 section 3.4).
const PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// How a TLS handshake begins: the type of its record.
pub(crate) const TLS_HANDSHAKE: u8 = 0x16;

/// What the first bytes of a connection say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Begins {
    Http1,
    Http2,
    /// TLS, where none is spoken.
    Tls,
}

/// A connection.
pub(crate) struct Socket {
    io: Io,
    /// The first bytes: read ahead, and to be read again.
    start: [u8; PREFACE.len()],
    start_read: usize,
    start_len: usize,
    /// While a write waits; None where whoever writes has a deadline of its own.
    write: Option<Progress>,
}

enum Io {
    Plain(Counted),
    Tls(Box<TlsStream<Counted>>),
}

/// A socket that counts what it has taken.
pub(crate) struct Counted {
    wire: Wire,
    written: u64,
}

impl Counted {
    pub(crate) fn new(wire: Wire) -> Self {
        Self { wire, written: 0 }
    }
}

impl Socket {
    /// A connection without TLS.
    pub(crate) fn plain(tcp: Counted, write_timeout: Duration) -> Self {
        Self::new(Io::Plain(tcp), write_timeout)
    }

    /// A connection whose TLS handshake is done.
    pub(crate) fn tls(tls: TlsStream<Counted>, write_timeout: Duration) -> Self {
        Self::new(Io::Tls(Box::new(tls)), write_timeout)
    }

    fn new(io: Io, write_timeout: Duration) -> Self {
        let write = Some(Progress::new(write_timeout, 1));
        Self { io, start: [0; PREFACE.len()], start_read: 0, start_len: 0, write }
    }

    /// Reads on until it is clear what is spoken. What was read will be read again.
    ///
    /// # Errors
    /// Those of the socket; `UnexpectedEof` where nothing came.
    pub(crate) async fn begins(&mut self) -> Result<Begins> {
        loop {
            let got = &self.start[..self.start_len];
            match got.first() {
                Some(&TLS_HANDSHAKE) => return Ok(Begins::Tls),
                Some(_) if !PREFACE.starts_with(got) => return Ok(Begins::Http1),
                _ if got.len() == PREFACE.len() => return Ok(Begins::Http2),
                _ => {}
            }
            let read = match &mut self.io {
                Io::Plain(io) => io.wire.read(&mut self.start[self.start_len..]).await?,
                Io::Tls(io) => io.read(&mut self.start[self.start_len..]).await?,
            };
            if read == 0 && self.start_len == 0 {
                return Err(ErrorKind::UnexpectedEof.into());
            }
            if read == 0 {
                // What there is of a request is none: HTTP/1 has an answer to that.
                return Ok(Begins::Http1);
            }
            self.start_len += read;
        }
    }

    /// Bytes that the peer's side of the socket has taken, TLS included.
    pub(crate) fn written(&self) -> u64 {
        match &self.io {
            Io::Plain(io) => io.written,
            Io::Tls(io) => io.get_ref().0.written,
        }
    }

    /// Whoever writes watches for itself whether the peer takes bytes.
    pub(crate) fn without_write_deadline(mut self) -> Self {
        self.write = None;
        self
    }

    /// While the peer takes nothing the deadline runs.
    fn in_time<T>(&mut self, cx: &mut Context<'_>, done: Poll<Result<T>>) -> Poll<Result<T>> {
        let count = self.written();
        let Some(write) = &mut self.write else { return done };
        if done.is_ready() {
            write.rest();
        } else if write.poll(cx, count, false).is_ready() {
            return Poll::Ready(Err(Error::new(ErrorKind::TimedOut, "the peer takes no bytes")));
        }
        done
    }
}

impl AsyncRead for Socket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<Result<()>> {
        let ahead = &self.start[self.start_read..self.start_len];
        if !ahead.is_empty() {
            let taken = ahead.len().min(buffer.remaining());
            buffer.put_slice(&ahead[..taken]);
            self.start_read += taken;
            return Poll::Ready(Ok(()));
        }
        match &mut self.io {
            Io::Plain(io) => Pin::new(&mut io.wire).poll_read(cx, buffer),
            Io::Tls(io) => Pin::new(&mut **io).poll_read(cx, buffer),
        }
    }
}

impl AsyncWrite for Socket {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<Result<usize>> {
        let written = match &mut self.io {
            Io::Plain(io) => Pin::new(io).poll_write(cx, bytes),
            Io::Tls(io) => Pin::new(&mut **io).poll_write(cx, bytes),
        };
        self.in_time(cx, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<Result<usize>> {
        let written = match &mut self.io {
            Io::Plain(io) => Pin::new(io).poll_write_vectored(cx, bytes),
            Io::Tls(io) => Pin::new(&mut **io).poll_write_vectored(cx, bytes),
        };
        self.in_time(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        match &self.io {
            Io::Plain(io) => io.is_write_vectored(),
            Io::Tls(io) => io.is_write_vectored(),
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        let flushed = match &mut self.io {
            Io::Plain(io) => Pin::new(io).poll_flush(cx),
            Io::Tls(io) => Pin::new(&mut **io).poll_flush(cx),
        };
        self.in_time(cx, flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        let shut = match &mut self.io {
            Io::Plain(io) => Pin::new(io).poll_shutdown(cx),
            Io::Tls(io) => Pin::new(&mut **io).poll_shutdown(cx),
        };
        self.in_time(cx, shut)
    }
}

impl AsyncRead for Counted {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<Result<()>> {
        Pin::new(&mut self.wire).poll_read(cx, buffer)
    }
}

impl AsyncWrite for Counted {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<Result<usize>> {
        let written = Pin::new(&mut self.wire).poll_write(cx, bytes);
        self.count(written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<Result<usize>> {
        let written = Pin::new(&mut self.wire).poll_write_vectored(cx, bytes);
        self.count(written)
    }

    fn is_write_vectored(&self) -> bool {
        self.wire.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.wire).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.wire).poll_shutdown(cx)
    }
}

impl Counted {
    fn count(&mut self, written: Poll<Result<usize>>) -> Poll<Result<usize>> {
        if let Poll::Ready(Ok(bytes)) = written {
            self.written += bytes as u64;
        }
        written
    }
}
