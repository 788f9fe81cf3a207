//! A connection that many calls share: what they write at about the same time goes out together.
//!
//! *Owns*: when bytes that were written are passed on.
//! *Does not own*: what they say, and the connection.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, BufWriter, ReadBuf};
use tonic::transport::server::Connected;

/// Bytes of small writes that go out together at most; what is larger goes on as it is.
const TOGETHER_BYTES: usize = 64 << 10;

/// Asked to flush, it lets all other tasks that can run do so first: each of a thousand streams with a record of its own would
/// else have it sent alone, and read alone. Where nobody else wants to run nothing is waited for.
pub struct Gathered<S> {
    io: BufWriter<S>,
    /// The others have been let go first, since bytes were last passed on.
    has_yielded: bool,
}

impl<S: AsyncWrite> Gathered<S> {
    /// All that is written to `io` from now on.
    pub fn new(io: S) -> Self {
        Self { io: BufWriter::with_capacity(TOGETHER_BYTES, io), has_yielded: false }
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncRead for Gathered<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(self.io.get_mut()).poll_read(cx, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Gathered<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write_vectored(cx, parts)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if !self.io.buffer().is_empty() && !self.has_yielded {
            self.has_yielded = true;
            // A task that wakes itself while it runs comes behind all others that are ready.
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        let flushed = Pin::new(&mut self.io).poll_flush(cx);
        self.has_yielded = flushed.is_pending();
        flushed
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}

impl<S: AsyncWrite + Connected> Connected for Gathered<S> {
    type ConnectInfo = S::ConnectInfo;

    fn connect_info(&self) -> Self::ConnectInfo {
        self.io.get_ref().connect_info()
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt, split};
    use tokio::sync::mpsc;
    use tokio::task::JoinSet;

    use super::*;

    /// Counts what comes through in one piece.
    struct Pieces(mpsc::Sender<usize>);

    impl AsyncWrite for Pieces {
        fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
            self.0.try_send(bytes.len()).expect("somebody counts");
            Poll::Ready(Ok(bytes.len()))
        }

        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }

        fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }
    }

    /// Takes what has come whenever it is polled, as an HTTP/2 connection does.
    #[tokio::test]
    async fn what_tasks_write_at_once_goes_out_together() {
        let (pieces, mut counted) = mpsc::channel(100);
        let (records, mut waiting) = mpsc::channel::<[u8; 100]>(100);
        records.try_send([0; 100]).expect("it waits");
        let mut io = Gathered::new(Pieces(pieces));
        let mut tasks = JoinSet::new();
        tasks.spawn(std::future::poll_fn(move |cx| {
            while let Ok(record) = waiting.try_recv() {
                assert!(Pin::new(&mut io).poll_write(cx, &record).is_ready(), "there is room");
            }
            Pin::new(&mut io).poll_flush(cx).map(|flushed| flushed.expect("flushed"))
        }));
        for number in 1..=10 {
            let records = records.clone();
            tasks.spawn(async move { records.try_send([number; 100]).expect("the link is there") });
        }
        tasks.join_all().await;
        assert_eq!(counted.recv().await, Some(1_100));
        assert_eq!(counted.recv().await, None);
    }

    #[tokio::test]
    async fn nothing_stays_behind_a_flush_or_the_end() {
        let (near, far) = tokio::io::duplex(1 << 20);
        let (_, mut writer) = split(Gathered::new(near));
        let mut reader = far;
        let mut read = vec![0; 200_000];
        for length in [1, 1_000, 200_000, 7] {
            let sent: Vec<u8> = (0..length).map(|index: usize| (index % 251) as u8).collect();
            writer.write_all(&sent).await.expect("written");
            writer.flush().await.expect("flushed");
            reader.read_exact(&mut read[..length]).await.expect("read");
            assert_eq!(read[..length], sent[..]);
        }
        writer.write_all(b"last words").await.expect("written");
        writer.shutdown().await.expect("ended");
        let mut rest = Vec::new();
        reader.read_to_end(&mut rest).await.expect("read");
        assert_eq!(rest, b"last words");
    }
}
