//! The opener's last word: a fresh, short connection that asks the peer to cut what is left of a session.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketFlags, SocketType};

use super::incoming::{IncomingStage, ReceiveOutcome};
use super::route::Route;
use super::stream::Stream;
use super::vectored::GatheredPieces;
use crate::mover::PathEnd;
use crate::mover::greeting::{GREETING_BYTES, Greeting, Purpose};
use crate::mover::reactor::{Connection, Turn};

/// A short connection that asks the peer to cut what is left of a session.
pub(super) struct FenceCall {
    route: Arc<Route>,
    stream: Stream,
    incoming: IncomingStage,
    record: [u8; GREETING_BYTES],
    sent: usize,
    until: Instant,
    end: PathEnd,
}

impl FenceCall {
    /// # Errors
    /// As the system, when not even the call can be begun.
    pub(super) fn new(route: Arc<Route>) -> io::Result<Self> {
        let family = match route.address {
            SocketAddr::V4(_) => AddressFamily::INET,
            SocketAddr::V6(_) => AddressFamily::INET6,
        };
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
        match rustix::net::connect(&socket, &route.address) {
            Ok(()) | Err(rustix::io::Errno::INPROGRESS) => {}
            Err(error) => return Err(error.into()),
        }
        let (site, peer) = (&route.site, &route.peer);
        let greeting = site.greeting(Purpose::Fence, peer.epoch, route.session, site.address.clone());
        let until = Instant::now() + Duration::from_millis(site.config.fence_timeout_ms);
        let tls = match &site.config.tls {
            Some(tls) => Some(tls.connect(&peer.address)?.into()),
            None => None,
        };
        Ok(Self {
            record: greeting.encode(),
            stream: Stream::new(TcpStream::from(socket), tls)?,
            incoming: IncomingStage::new(),
            sent: 0,
            until,
            end: PathEnd::PeerUnknown,
            route,
        })
    }

    fn advance(&mut self) -> io::Result<Turn> {
        while self.sent < GREETING_BYTES {
            let mut rest = GatheredPieces::default();
            rest.plain(&self.record[self.sent..]);
            match self.stream.send(&rest) {
                Ok(sent) => self.sent += sent,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(Turn::Wait),
                // The connection is still being made.
                Err(error) if error.kind() == io::ErrorKind::NotConnected => return Ok(Turn::Wait),
                Err(error) => return Err(error),
            }
        }
        loop {
            if let Some(answer) = self.incoming.take::<GREETING_BYTES>() {
                // Where another life answers, the one that was meant has ended with all its connections.
                let fenced = Greeting::decode(&answer)
                    .is_ok_and(|answer| matches!(answer.purpose, Purpose::Welcome | Purpose::Stale));
                if fenced {
                    self.end = PathEnd::Fenced;
                }
                return Ok(Turn::End);
            }
            if self.incoming.fill(&mut self.stream)? == ReceiveOutcome::Nothing {
                return Ok(Turn::Wait);
            }
        }
    }
}

impl Connection for FenceCall {
    fn files(&self) -> Vec<BorrowedFd<'_>> {
        vec![self.stream.file()]
    }

    fn event(&mut self, _file: usize, hung: bool) {
        self.incoming.awake(hung);
    }

    fn turn(&mut self) -> Turn {
        self.advance().unwrap_or(Turn::End)
    }

    fn tick(&mut self, now: Instant) -> Turn {
        if now < self.until { Turn::Wait } else { Turn::End }
    }

    fn waits(&self) -> bool {
        true
    }

    fn cut(self: Box<Self>) {
        self.route.gate.ended(self.end);
    }
}
