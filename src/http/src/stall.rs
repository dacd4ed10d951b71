//! A connection that fails when its peer does not read what is written to it.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep};

/// Passes reads and writes on. A write that gets nothing across for the whole limit fails.
pub struct StallGuard<T, F> {
    inner: T,
    limit: Duration,
    alarm: Pin<Box<Sleep>>,
    stalled: bool,
    on_cut: F,
}

impl<T, F: FnMut()> StallGuard<T, F> {
    /// Wraps `inner`; `on_cut` is called for each write that fails.
    pub fn new(inner: T, limit: Duration, on_cut: F) -> Self {
        Self { inner, limit, alarm: Box::pin(tokio::time::sleep(limit)), stalled: false, on_cut }
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
        (self.on_cut)();
        let message = "write: the client reads nothing of its answer; it was cut off";
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, message)))
    }
}

impl<T: AsyncRead + Unpin, F: Unpin> AsyncRead for StallGuard<T, F> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_read(cx, buffer)
    }
}

impl<T: AsyncWrite + Unpin, F: FnMut() + Unpin> AsyncWrite for StallGuard<T, F> {
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
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};
    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};

    fn limited(inner: DuplexStream) -> (StallGuard<DuplexStream, impl FnMut() + Unpin>, Arc<AtomicU64>) {
        let cuts = Arc::<AtomicU64>::default();
        let counted = Arc::clone(&cuts);
        let on_cut = move || {
            counted.fetch_add(1, Ordering::Relaxed);
        };
        (StallGuard::new(inner, Duration::from_millis(200), on_cut), cuts)
    }

    #[tokio::test]
    async fn a_slow_reader_is_not_cut_off() {
        // A machine that is held up for longer than the limit says nothing: once more.
        for _ in 0..10 {
            let (near, mut far) = tokio::io::duplex(4);
            let (mut near, cuts) = limited(near);
            let slow = tokio::spawn(async move {
                let (mut bytes, mut longest, mut last) = ([0; 4], Duration::ZERO, Instant::now());
                for _ in 0..6 {
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    if far.read_exact(&mut bytes).await.is_err() {
                        break;
                    }
                    longest = longest.max(std::mem::replace(&mut last, Instant::now()).elapsed());
                }
                longest.max(last.elapsed())
            });
            let begun = Instant::now();
            let written = near.write_all(&[7; 24]).await;
            let took = begun.elapsed();
            drop(near);
            let longest = slow.await.unwrap();
            if longest >= Duration::from_millis(150) {
                continue;
            }
            assert!(written.is_ok(), "{written:?}");
            assert!(took > Duration::from_millis(200), "longer than the limit: {took:?}");
            assert_eq!(cuts.load(Ordering::Relaxed), 0);
            return;
        }
    }

    #[tokio::test]
    async fn a_peer_that_does_not_read_is_cut_off() {
        let (near, _far) = tokio::io::duplex(4);
        let (mut near, cuts) = limited(near);
        near.write_all(&[7; 4]).await.unwrap();
        let begun = Instant::now();
        let error = near.write_all(&[7; 4]).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert!(begun.elapsed() >= Duration::from_millis(190));
        assert_eq!(cuts.load(Ordering::Relaxed), 1);
    }
}
