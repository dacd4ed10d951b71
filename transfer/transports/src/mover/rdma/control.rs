//! The TCP side of paths: the handshake, and the fence at their end.
//!
//! A path's connection lives as long as the path; when it breaks off, each end knows that the other is gone. To end a
//! path, its opener destroys its own queue pairs and asks the peer to destroy the other ends and confirm it. The
//! request goes over the path's connection, or over a new one where that is broken.

use std::io;
use std::net::{TcpStream, ToSocketAddrs};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use super::config::RdmaConfig;
use super::path::OpenedPath;
use super::threads::ready;
use super::wire::Record;
use crate::mover::sockets::{KeepaliveTimes, connect, set_keepalive, time_left};
use crate::mover::{Fault, PathEnd, PeerId};

/// How long a connection without a sign of the peer's host lasts: probes after 5 s, one each second.
const VIGIL: KeepaliveTimes =
    KeepaliveTimes { idle: Duration::from_secs(5), step: Duration::from_secs(1), count: 5 };

/// The peer's word may be faster than our own device's, which knows which request was refused, and why. It
/// has the peer's refusal already, or will have it in a moment.
const VERDICT: Duration = Duration::from_millis(100);

/// Connects to a peer's handshake port before `until`.
pub(super) fn dial(config: &RdmaConfig, peer: &PeerId, until: Instant) -> Result<TcpStream, Fault> {
    let wrong = || Fault::Invalid(format!("'{}' is not an address; give host:port", peer.address));
    let (host, port) = peer.address.rsplit_once(':').ok_or_else(wrong)?;
    let port = port.parse::<u16>().ok().and_then(|port| port.checked_add(config.handshake_port_offset));
    let port = port.ok_or_else(wrong)?;
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let silent = |error: io::Error| Fault::Silent(format!("{}, port {port}: {error}", peer.address));
    let connected = (host, port).to_socket_addrs().and_then(|found| connect(found, until));
    connected.and_then(|(stream, _)| tuned(stream, until)).map_err(silent)
}

/// Sets a connection up: no delay, limits of time until `until`, and signs of life for later.
pub(super) fn tuned(stream: TcpStream, until: Instant) -> io::Result<TcpStream> {
    stream.set_nodelay(true)?;
    set_keepalive(&stream, VIGIL)?;
    limit(&stream, until)?;
    Ok(stream)
}

fn limit(stream: &TcpStream, until: Instant) -> io::Result<()> {
    stream.set_read_timeout(Some(time_left(until)))?;
    stream.set_write_timeout(Some(time_left(until)))
}

/// Says something and takes the answer.
pub(super) fn ask(stream: &TcpStream, record: &Record, until: Instant) -> io::Result<Record> {
    limit(stream, until)?;
    record.send(stream)?;
    Record::receive(stream)
}

/// Lives as long as a path: waits for its end, then ends it at both sides and says how far that went.
pub(super) fn keep(
    path: &OpenedPath,
    config: &RdmaConfig,
    stream: &TcpStream,
    (peer, session): (&PeerId, u128),
) {
    while path.ending().is_none() {
        let limit = path.time_limit(config.answer_timeout());
        let [readable, _] = ready([stream.as_fd(), path.bell().as_fd()], limit);
        path.bell().clear();
        if readable {
            let why = match Record::receive(stream) {
                Ok(Record::Broken { text }) => {
                    path.wait_ending(VERDICT);
                    format!("the peer: {text}")
                }
                Ok(_) => "the peer said what it must not".into(),
                Err(error) => format!("the peer's end is gone ({error})"),
            };
            path.end(Fault::Path(why), true);
        }
    }
    path.cut();
    path.ended(fence(config, stream, peer, session));
}

/// Has the peer destroy its end; ours is destroyed already.
fn fence(config: &RdmaConfig, stream: &TcpStream, peer: &PeerId, session: u128) -> PathEnd {
    let until = Instant::now() + config.fence_timeout();
    if closed(stream, until).is_ok() {
        return PathEnd::Fenced;
    }
    // The connection is of no use: a new one. A peer in another life has no queue pairs of the former.
    let record = Record::Fence { to_epoch: peer.epoch, session };
    let asked = dial(config, peer, until).map(|stream| ask(&stream, &record, until));
    match asked {
        Ok(Ok(Record::Closed | Record::Stale { .. })) => PathEnd::Fenced,
        _ => PathEnd::PeerUnknown,
    }
}

fn closed(stream: &TcpStream, until: Instant) -> io::Result<()> {
    limit(stream, until)?;
    Record::Close.send(stream)?;
    // Its own news may have crossed ours.
    for _ in 0..2 {
        if Record::receive(stream)? == Record::Closed {
            return Ok(());
        }
    }
    Err(io::Error::other("no confirmation"))
}
