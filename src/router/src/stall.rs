//! A connection that fails when its peer does not read what is written to it.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep};

/// Passes reads and writes on. A write that gets nothing across for the whole limit fails.
pub(crate) struct StallLimited<T> {
    inner: T,
    limit: Duration,
    alarm: Pin<Box<Sleep>>,
    stalled: bool,
}

impl<T> StallLimited<T> {
    pub(crate) fn new(inner: T, limit: Duration) -> Self {
        Self { inner, limit, alarm: Box::pin(tokio::time::sleep(limit)), stalled: false }
    }

    /// Judges a write: time runs from the first that got nothing across.
    fn judge<R>(&mut self, cx: &mut Context<'_>, wrote: Poll<io::Result<R>>) -> Poll<io::Result<R>> {
        if wrote.is_ready() {
            self.stalled = false;
            return wrote;
        }
        if !self.stalled {
            self.stalled = true;
            self.alarm.as_mut().reset(Instant::now() + self.limit);
        }
        ready!(self.alarm.as_mut().poll(cx));
        let message = "write: the client reads nothing of its answer; it was cut off";
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, message)))
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for StallLimited<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_read(cx, buffer)
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for StallLimited<T> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let wrote = Pin::new(&mut self.inner).poll_write(cx, bytes);
        self.judge(cx, wrote)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let wrote = Pin::new(&mut self.inner).poll_write_vectored(cx, slices);
        self.judge(cx, wrote)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.inner).poll_flush(cx);
        if flushed.is_ready() {
            return flushed;
        }
        self.judge(cx, flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    #[tokio::test]
    async fn a_peer_that_does_not_read_is_cut_off_and_a_slow_one_is_not() {
        let (near, mut far) = tokio::io::duplex(4);
        let mut near = StallLimited::new(near, Duration::from_millis(200));
        let slow = tokio::spawn(async move {
            let mut byte = [0; 4];
            for _ in 0..4 {
                tokio::time::sleep(Duration::from_millis(80)).await;
                far.read_exact(&mut byte).await.unwrap();
            }
            far
        });
        near.write_all(&[7; 16]).await.unwrap();
        let _far = slow.await.unwrap();
        near.write_all(&[7; 4]).await.unwrap();
        let begun = Instant::now();
        let error = near.write_all(&[7; 4]).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert!(begun.elapsed() >= Duration::from_millis(190));
    }
}
