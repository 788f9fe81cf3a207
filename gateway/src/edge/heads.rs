//! The heads of HTTP/1 requests, as bytes: what proxies and servers read differently is refused before it is read.
//!
//! A head that one of them takes for shorter or longer than the other lets a producer hide a request in another one's
//! connection (RFC 9112 section 11.2). The HTTP library takes a bare LF for the end of a line, and passes over a
//! `Content-Length` beside a `Transfer-Encoding`; here neither passes. After a request with a chunked body or an upgrade
//! the connection is not looked at any more: it is closed behind the answer (`gate`).
//!
//! *Owns*: where heads begin and end, what may not be in one.
//! *Does not own*: what a request means, all other faults of a head: the library refuses those.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use memchr::memchr;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::socket::Socket;

/// Bytes of a request's head; the library refuses a larger one.
pub(crate) const HEAD_BYTES_MAX: usize = 16 << 10;
/// No head has this first byte: the library answers 400, and closes. It looks at a head once that has an end.
const NO_HEAD: &[u8] = b"\0\r\n\r\n";

/// Follows the bytes of one connection.
#[derive(Debug)]
pub(crate) struct Heads {
    at: At,
    /// The part of a line that came before.
    line: Vec<u8>,
    head: Head,
}

#[derive(Debug)]
enum At {
    Head,
    /// So many bytes of a body are still to come.
    Body(u64),
    /// Nothing is looked at any more.
    Rest,
}

/// What a head has said so far.
#[derive(Debug, Default)]
struct Head {
    has_request_line: bool,
    length: Option<u64>,
    is_chunked: bool,
    upgrades: bool,
    bytes: usize,
}

/// Such a head must not be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Malformed;

impl Heads {
    pub(crate) fn new() -> Self {
        Self { at: At::Head, line: Vec::new(), head: Head::default() }
    }

    /// Takes the next bytes.
    ///
    /// # Errors
    /// From where on they must not be read: the beginning of a head, or of these bytes.
    pub(crate) fn feed(&mut self, mut bytes: &[u8]) -> Result<(), usize> {
        let (all, mut head_at) = (bytes.len(), 0);
        while !bytes.is_empty() {
            match &mut self.at {
                At::Rest => return Ok(()),
                At::Body(left) => {
                    let skipped = (*left).min(bytes.len() as u64);
                    *left -= skipped;
                    bytes = &bytes[skipped as usize..];
                    if *left == 0 {
                        self.at = At::Head;
                        head_at = all - bytes.len();
                    }
                }
                At::Head => {
                    let line_end = memchr(b'\n', bytes).map_or(bytes.len(), |at| at + 1);
                    let (line, rest) = bytes.split_at(line_end);
                    bytes = rest;
                    if self.line(line).is_err() {
                        self.at = At::Rest;
                        return Err(head_at);
                    }
                    if !self.head.has_request_line && self.line.is_empty() {
                        head_at = all - bytes.len();
                    }
                }
            }
        }
        Ok(())
    }

    /// Takes a line of a head, or a part of one.
    fn line(&mut self, line: &[u8]) -> Result<(), Malformed> {
        self.head.bytes += line.len();
        if self.head.bytes > HEAD_BYTES_MAX {
            // The library refuses it.
            self.at = At::Rest;
            return Ok(());
        }
        if !line.ends_with(b"\n") {
            self.line.extend_from_slice(line);
            return Ok(());
        }
        let whole = if self.line.is_empty() {
            self.head.take(line)
        } else {
            self.line.extend_from_slice(line);
            let before = std::mem::take(&mut self.line);
            self.head.take(&before)
        };
        if whole? {
            let head = std::mem::take(&mut self.head);
            self.at = head.body();
        }
        Ok(())
    }
}

impl Head {
    /// Takes a whole line; whether it ends the head.
    fn take(&mut self, line: &[u8]) -> Result<bool, Malformed> {
        let line = line.strip_suffix(b"\r\n").ok_or(Malformed)?;
        if line.contains(&b'\r') {
            return Err(Malformed);
        }
        if !self.has_request_line {
            // Empty lines before a request are passed over (RFC 9112 section 2.2).
            self.has_request_line = !line.is_empty();
            return Ok(false);
        }
        if line.is_empty() {
            return if self.is_chunked && self.length.is_some() { Err(Malformed) } else { Ok(true) };
        }
        self.field(line)?;
        Ok(false)
    }

    fn field(&mut self, line: &[u8]) -> Result<(), Malformed> {
        let colon = memchr(b':', line).ok_or(Malformed)?;
        let (name, value) = (&line[..colon], line[colon + 1..].trim_ascii());
        // A line that begins with a space goes on with the one before, for some; for others it is a name.
        if name.iter().any(u8::is_ascii_whitespace) {
            return Err(Malformed);
        }
        if name.eq_ignore_ascii_case(b"content-length") {
            let length = std::str::from_utf8(value).ok().filter(|_| value.iter().all(u8::is_ascii_digit));
            let length = length.and_then(|length| length.parse().ok()).ok_or(Malformed)?;
            if self.length.replace(length).is_some() {
                return Err(Malformed);
            }
        } else if name.eq_ignore_ascii_case(b"transfer-encoding") {
            if self.is_chunked || !value.eq_ignore_ascii_case(b"chunked") {
                return Err(Malformed);
            }
            self.is_chunked = true;
        } else if name.eq_ignore_ascii_case(b"upgrade") {
            self.upgrades = true;
        }
        Ok(())
    }

    fn body(&self) -> At {
        match self.length {
            _ if self.is_chunked || self.upgrades => At::Rest,
            None | Some(0) => At::Head,
            Some(length) => At::Body(length),
        }
    }
}

/// A connection that speaks HTTP/1.
pub(crate) struct Http1Socket {
    pub(crate) socket: Socket,
    heads: Heads,
    /// What is still to be read in place of a head that must not be. Nothing is read behind it.
    refusal: Option<&'static [u8]>,
}

impl Http1Socket {
    pub(crate) fn new(socket: Socket) -> Self {
        Self { socket, heads: Heads::new(), refusal: None }
    }
}

impl AsyncRead for Http1Socket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        let before = buffer.filled().len();
        if self.refusal.is_none() {
            ready!(Pin::new(&mut self.socket).poll_read(cx, buffer))?;
            if let Err(at) = self.heads.feed(&buffer.filled()[before..]) {
                // In place of the bytes that must not be read, so that the answer comes after those to earlier requests.
                buffer.set_filled(before + at);
                self.refusal = Some(NO_HEAD);
            }
        }
        if let Some(refusal) = &mut self.refusal {
            let (now, later) = refusal.split_at(refusal.len().min(buffer.remaining()));
            buffer.put_slice(now);
            *refusal = later;
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Http1Socket {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.socket).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[std::io::IoSlice<'_>],
    ) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.socket).poll_write_vectored(cx, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.socket.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.socket).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.socket).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GET: &str = "GET / HTTP/1.1\r\nhost: x\r\n\r\n";

    /// From where on the bytes are refused, however they are cut.
    fn refused_at(text: &str) -> Option<usize> {
        let whole = Heads::new().feed(text.as_bytes()).err();
        for cut in 1..text.len() {
            let mut heads = Heads::new();
            let refused = text.as_bytes().chunks(cut).any(|piece| heads.feed(piece).is_err());
            assert_eq!(refused, whole.is_some(), "{text:?} in pieces of {cut}");
        }
        whole
    }

    #[test]
    fn requests_and_their_bodies_pass() {
        let post = "POST /x HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\na\nb\r\n\r\n:\n";
        let chunked = "POST / HTTP/1.1\r\nTransfer-Encoding: Chunked\r\n\r\n1\r\na\n\n";
        let upgrade = "GET / HTTP/1.1\r\nupgrade: websocket\r\n\r\n\u{1}\n\n";
        for text in
            [GET.to_owned(), format!("\r\n{GET}{post}{GET}{post}{chunked}"), format!("{GET}{upgrade}")]
        {
            assert_eq!(refused_at(&text), None, "{text:?}");
        }
    }

    #[test]
    fn what_is_read_in_two_ways_is_refused_from_its_head_on() {
        for head in [
            "content-length: 3\r\ntransfer-encoding: chunked",
            "transfer-encoding: chunked\r\ncontent-length: 3",
            "content-length: 3\r\ncontent-length: 3",
            "content-length: 3\r\nContent-Length: 4",
            "content-length: 3, 3",
            "content-length: +3",
            "content-length:",
            "transfer-encoding: xchunked",
            "transfer-encoding: chunked, identity",
            "transfer-encoding: gzip, chunked",
            "transfer-encoding: chunked\r\ntransfer-encoding: chunked",
            "transfer-encoding : chunked",
            "transfer-encoding\t: chunked",
            " transfer-encoding: chunked",
            "x: y\r\n folded: z",
            "x: a\nb: c",
            "x: a\rb: c",
            "x",
        ] {
            let text = format!("{GET}POST / HTTP/1.1\r\nhost: x\r\n{head}\r\n\r\n");
            assert_eq!(refused_at(&text), Some(GET.len()), "{head:?}");
        }
        assert_eq!(refused_at("GET / HTTP/1.1\nhost: x\r\n\r\n"), Some(0));
        assert_eq!(refused_at("GET / HTTP/1.1\r\nhost: x\r\n\n"), Some(0));
    }

    #[test]
    fn memory_is_bounded_by_the_largest_head() {
        let mut heads = Heads::new();
        for _ in 0..1000 {
            heads.feed(&[b'a'; 1000]).expect("the library refuses it");
        }
        assert!(heads.line.len() <= HEAD_BYTES_MAX);
    }
}
