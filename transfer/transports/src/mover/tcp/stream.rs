//! A connected socket that never waits.

use std::io;
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use rustix::net::sockopt;

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
        // A peer whose machine is gone says nothing, and an idle connection would wait for it for ever.
        sockopt::set_socket_keepalive(&socket, true)?;
        sockopt::set_tcp_keepidle(&socket, Duration::from_secs(30))?;
        sockopt::set_tcp_keepintvl(&socket, Duration::from_secs(10))?;
        sockopt::set_tcp_keepcnt(&socket, 3)?;
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
