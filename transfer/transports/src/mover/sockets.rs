//! Options set on every connected socket, for every protocol.

use std::io::{self, Read};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::net::sockopt;

use super::Fault;

/// The time left, and at least a little, for a limit of zero means none.
pub(super) fn time_left(until: Instant) -> Duration {
    until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1))
}

/// Connects to the first of a peer's addresses that answers before `until`.
pub(super) fn connect(
    addresses: impl Iterator<Item = SocketAddr>,
    until: Instant,
) -> io::Result<(TcpStream, SocketAddr)> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "it has no address");
    for address in addresses {
        match TcpStream::connect_timeout(&address, time_left(until)) {
            Ok(socket) => return Ok((socket, address)),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// The fault for an error at a peer: silence, or a broken path.
pub(super) fn trouble(what: &str, peer: &str, error: &io::Error) -> Fault {
    let text = format!("{what} {peer}: {error}");
    match error.kind() {
        io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => Fault::Silent(text),
        _ => Fault::Path(text),
    }
}

/// How soon it is noticed that the machine of a silent peer is gone.
#[derive(Clone, Copy, Debug)]
pub(super) struct KeepaliveTimes {
    /// Silence before the kernel asks.
    pub(super) idle: Duration,
    /// Time between two questions.
    pub(super) step: Duration,
    /// Questions without an answer that end the connection.
    pub(super) count: u32,
}

/// That of connections on which silence is usual.
const IDLE_KEEPALIVE: KeepaliveTimes =
    KeepaliveTimes { idle: Duration::from_secs(30), step: Duration::from_secs(10), count: 3 };

/// Has the kernel ask a silent peer for a sign of life: one whose machine is gone says nothing.
pub(super) fn set_keepalive(socket: impl AsFd, keepalive: KeepaliveTimes) -> io::Result<()> {
    sockopt::set_socket_keepalive(&socket, true)?;
    sockopt::set_tcp_keepidle(&socket, keepalive.idle)?;
    sockopt::set_tcp_keepintvl(&socket, keepalive.step)?;
    sockopt::set_tcp_keepcnt(&socket, keepalive.count)?;
    Ok(())
}

/// For a socket that a reactor serves: it never waits, sends at once, and ends with its peer's machine.
pub(super) fn never_waiting(socket: &TcpStream) -> io::Result<()> {
    socket.set_nonblocking(true)?;
    socket.set_nodelay(true)?;
    set_keepalive(socket, IDLE_KEEPALIVE)
}

/// Reads until `into` is full, no longer than until then; `clock` is the socket whose limits of time count.
pub(super) fn fill(
    stream: &mut impl Read,
    clock: &TcpStream,
    into: &mut [u8],
    until: Instant,
) -> io::Result<()> {
    let mut came = 0;
    while came < into.len() {
        if Instant::now() >= until {
            return Err(io::ErrorKind::TimedOut.into());
        }
        clock.set_read_timeout(Some(time_left(until)))?;
        match stream.read(&mut into[came..]) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(more) => came += more,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
