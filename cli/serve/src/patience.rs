//! A connection whose other end must take what it is sent within a time: else it is cut, and with it the
//! answer that nobody takes.
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep};

/// A stream that waits only so long to be able to write.
pub struct Patience<S> {
    stream: S,
    limit: Duration,
    /// Set while a write waits.
    until: Option<Pin<Box<Sleep>>>,
}

impl<S> Patience<S> {
    /// Waits for `limit` at most.
    pub fn new(stream: S, limit: Duration) -> Self {
        Self { stream, limit, until: None }
    }

    fn bounded<T>(&mut self, cx: &mut Context<'_>, written: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.until = None;
            return written;
        }
        let limit = self.limit;
        let until = self.until.get_or_insert_with(|| Box::pin(sleep(limit)));
        match until.as_mut().poll(cx) {
            Poll::Pending => Poll::Pending,
            Poll::Ready(()) => {
                until.as_mut().reset(Instant::now() + limit);
                Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the client takes nothing")))
            }
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Patience<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

/// One buffer at a time: several would be written by a call (`writev`) that a client who has left turns into
/// SIGPIPE, which ends the program. A single one goes out by `send`, which is told not to.
impl<S: AsyncWrite + Unpin> AsyncWrite for Patience<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.bounded(cx, written)
    }
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(cx);
        self.bounded(cx, flushed)
    }
    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    /// A stream that would take several buffers at once.
    #[tokio::test]
    async fn several_buffers_are_not_written_at_once() -> io::Result<()> {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
        let stream = tokio::net::TcpStream::connect(listener.local_addr()?).await?;
        assert!(stream.is_write_vectored());
        assert!(!Patience::new(stream, Duration::from_secs(60)).is_write_vectored());
        Ok(())
    }

    #[tokio::test(start_paused = true)]
    async fn a_reader_that_takes_nothing_is_cut() {
        let (ours, _theirs) = tokio::io::duplex(8);
        let mut ours = Patience::new(ours, Duration::from_secs(60));
        let error = ours.write_all(&[0; 20]).await.expect_err("nobody reads");
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }

    #[tokio::test(start_paused = true)]
    async fn a_reader_that_is_slow_is_not() {
        let (ours, mut theirs) = tokio::io::duplex(8);
        let mut ours = Patience::new(ours, Duration::from_secs(60));
        let read = async {
            let mut all = Vec::new();
            while all.len() < 40 {
                sleep(Duration::from_secs(50)).await;
                all.push(theirs.read_u8().await.expect("a byte"));
            }
        };
        let (written, ()) = tokio::join!(ours.write_all(&[0; 40]), read);
        written.expect("all of it");
    }
}
