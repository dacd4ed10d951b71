//! A connection that distinguishes a slow server from a frozen one.
//!
//! A server that moves nothing for a while may be busy with a large value, or stopped. After [`SILENCE`] it is asked
//! on another connection, with a `PING`, whether it answers anything at all, and has [`ANSWER`] for that. One that
//! does not is given up: together they are what a frozen server costs a call.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use baton_objects::resp::client::reach;

/// How long a server may move nothing before it is asked whether it lives.
const SILENCE: Duration = Duration::from_millis(200);
/// How long it has to be reached, and to answer that.
pub(super) const ANSWER: Duration = Duration::from_millis(300);
/// How long one that answers may move nothing while something is outstanding.
const TIME_LIMIT: Duration = Duration::from_secs(5);

/// A TCP stream that detects a frozen server.
pub(super) struct WatchedStream {
    stream: TcpStream,
    address: SocketAddr,
    silent: bool,
}

impl WatchedStream {
    /// Connects to the first of a name's addresses that answers, all within [`ANSWER`].
    pub(super) fn connect(addresses: &[SocketAddr]) -> io::Result<Self> {
        let stream = reach(addresses, ANSWER)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(SILENCE))?;
        stream.set_write_timeout(Some(SILENCE))?;
        let address = stream.peer_addr()?;
        Ok(Self { stream, address, silent: false })
    }

    /// The address that answered.
    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Whether the server was given up because it moved nothing: not that the connection ended.
    pub(super) fn is_silent(&self) -> bool {
        self.silent
    }

    fn persist<T>(&mut self, mut act: impl FnMut(&mut TcpStream) -> io::Result<T>) -> io::Result<T> {
        let start = Instant::now();
        loop {
            let done = act(&mut self.stream);
            if !done.as_ref().is_err_and(is_silence) {
                return done;
            }
            if start.elapsed() >= TIME_LIMIT || !lives(self.address) {
                self.silent = true;
                let text = "the server moves nothing; is it stopped or overloaded?";
                return Err(io::Error::new(io::ErrorKind::TimedOut, text));
            }
        }
    }
}

fn is_silence(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}

/// Whether a server answers anything within [`ANSWER`], be it a refusal.
fn lives(address: SocketAddr) -> bool {
    let asked = || {
        let until = Instant::now() + ANSWER;
        let mut stream = TcpStream::connect_timeout(&address, ANSWER)?;
        let left = until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        stream.set_read_timeout(Some(left))?;
        stream.write_all(b"*1\r\n$4\r\nPING\r\n")?;
        stream.read(&mut [0; 64])
    };
    asked().is_ok_and(|bytes: usize| bytes > 0)
}

impl Read for WatchedStream {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.persist(|stream| stream.read(into))
    }
}

impl Write for WatchedStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.persist(|stream| stream.write(bytes))
    }

    fn write_vectored(&mut self, slices: &[io::IoSlice<'_>]) -> io::Result<usize> {
        self.persist(|stream| stream.write_vectored(slices))
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn every_address_of_a_name_is_tried() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let served = listener.local_addr().unwrap();
        let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        // Nobody has this address: it refuses at once or never answers.
        let silent = SocketAddr::from(([192, 0, 2, 1], served.port()));
        let connect =
            |addresses: &[SocketAddr]| WatchedStream::connect(addresses).map(|stream| stream.address);
        assert_eq!(connect(&[closed, silent, served]).unwrap(), served);
        assert_eq!(connect(&[served, closed]).unwrap(), served);
        assert!(connect(&[closed]).is_err() && connect(&[]).is_err());
    }
}
