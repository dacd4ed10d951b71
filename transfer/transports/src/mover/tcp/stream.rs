//! A connected socket that never waits.

use std::io;
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};

use super::vectored::{self, Gathered, Target};

/// See the module.
pub(super) struct Stream {
    socket: TcpStream,
}

impl Stream {
    /// Takes a connected socket over.
    ///
    /// # Errors
    /// As the system.
    pub(super) fn plain(socket: TcpStream) -> io::Result<Self> {
        socket.set_nonblocking(true)?;
        socket.set_nodelay(true)?;
        Ok(Self { socket })
    }

    pub(super) fn file(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Sends what goes now.
    pub(super) fn send(&mut self, gathered: &Gathered<'_>) -> io::Result<usize> {
        vectored::send(&self.socket, gathered)
    }

    /// Receives what is there, first into the target, then into `stage`.
    pub(super) fn receive(&mut self, target: Option<&Target<'_>>, stage: &mut [u8]) -> io::Result<usize> {
        vectored::receive(&self.socket, target, stage)
    }

    /// Whether a call that brought less than it asked for has emptied the socket.
    pub(super) fn short_is_empty(&self) -> bool {
        true
    }
}
