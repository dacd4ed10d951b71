//! A client's socket that can be looked at beside the protocol that reads it.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

/// Passes reads and writes on.
pub(crate) struct Line(Arc<Mutex<TcpStream>>);

/// A second handle of the socket, to detect that the client closed it. The protocol stops reading while it has bytes of
/// a next request. Without this handle the router would notice a closed connection only when it writes the answer.
pub(crate) struct DisconnectWatch(Arc<Mutex<TcpStream>>);

impl Line {
    pub(crate) fn new(stream: TcpStream) -> (Self, DisconnectWatch) {
        let shared = Arc::new(Mutex::new(stream));
        (Self(Arc::clone(&shared)), DisconnectWatch(shared))
    }
}

impl DisconnectWatch {
    /// Ready when the client has closed its side and all that it sent before was read. To be polled by the task that
    /// polls the line.
    pub(crate) fn poll_left(&self, cx: &mut Context<'_>) -> Poll<()> {
        let mut byte = [0];
        match self.0.lock().poll_peek(cx, &mut ReadBuf::new(&mut byte)) {
            Poll::Ready(Ok(0) | Err(_)) => Poll::Ready(()),
            // Unread bytes hide a close that comes after them.
            Poll::Ready(Ok(_)) | Poll::Pending => Poll::Pending,
        }
    }
}

impl AsyncRead for Line {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.0.lock()).poll_read(cx, buffer)
    }
}

impl AsyncWrite for Line {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut *self.0.lock()).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut *self.0.lock()).poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.0.lock().is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.0.lock()).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.0.lock()).poll_shutdown(cx)
    }
}
