//! A path's opener on the I/O thread, and its farewell.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::route::Route;
use crate::mover::reactor::{Connection, Turn};
use crate::mover::{Fault, PathEnd};

/// Bytes copied in one turn, at most about.
const TURN_BYTES: u64 = 4 << 20;
/// How long after the last movement the time is still watched.
const LINGER: Duration = Duration::from_millis(500);

/// The opener's end of a path, on the I/O thread.
pub(super) struct Lane {
    route: Arc<Route>,
    /// Wakes us.
    bell: OwnedFd,
    /// The channel may have something to say.
    channel_ready: bool,
    still_since: Instant,
    /// Nothing was outstanding when the time was last looked at.
    idle: bool,
}

impl Lane {
    pub(super) fn new(route: Arc<Route>, bell: OwnedFd) -> Self {
        Self { route, bell, channel_ready: true, still_since: Instant::now(), idle: true }
    }

    fn work(&mut self) -> Turn {
        self.route.thread_sleeps(false);
        let mut heard = Ok(());
        if std::mem::take(&mut self.channel_ready) {
            // Answers that came before the end still count, so they are taken first.
            let worked = self.route.work(TURN_BYTES);
            heard = worked.and_then(|_| self.route.listen());
        }
        match heard.and_then(|()| self.route.work(TURN_BYTES)) {
            Ok(true) => Turn::Again,
            Ok(false) => Turn::Wait,
            Err(error) => {
                self.broken(Fault::Path(format!("the path to {}: {error}", self.route.peer.address)))
            }
        }
    }

    fn broken(&self, fault: Fault) -> Turn {
        self.route.end(fault, true);
        Turn::End
    }
}

impl Connection for Lane {
    fn files(&self) -> Vec<BorrowedFd<'_>> {
        vec![self.route.channel.file(), self.bell.as_fd()]
    }

    fn event(&mut self, file: usize, _hung: bool) {
        // The bell carries only the wake-up itself, so its count stays unread.
        self.channel_ready |= file == 0;
    }

    fn turn(&mut self) -> Turn {
        self.work()
    }

    fn tick(&mut self, now: Instant) -> Turn {
        // For callers that were to poll and do not.
        let turn = self.work();
        if turn != Turn::Wait {
            return turn;
        }
        let (outstanding, moved) = self.route.pulse();
        if moved || self.idle && outstanding {
            self.still_since = now;
        }
        self.idle = !outstanding;
        let still = now.duration_since(self.still_since);
        let limit = Duration::from_millis(self.route.site.config.progress_timeout_ms);
        if !outstanding {
            if still >= LINGER {
                self.route.unwatch();
            }
            return Turn::Wait;
        }
        if still < limit {
            return Turn::Wait;
        }
        let text = format!("{} moved nothing for {} ms", self.route.peer.address, limit.as_millis());
        self.broken(Fault::Silent(text))
    }

    fn waits(&self) -> bool {
        self.route.watched()
    }

    fn rest(&mut self) -> bool {
        if self.route.site.config.poll {
            return true;
        }
        self.route.thread_sleeps(true);
        if self.route.busy() {
            self.route.thread_sleeps(false);
            return false;
        }
        true
    }

    fn cut(self: Box<Self>) {
        // When the thread stops, no other code has begun the end yet.
        self.route.end(Fault::Path("the transport is shutting down".into()), false);
        self.route.cut();
    }
}

/// Waits for the peer to close its end, which it does once it has stopped copying for this path.
pub(super) struct ClosingLane {
    route: Arc<Route>,
    until: Instant,
    end: PathEnd,
}

impl ClosingLane {
    pub(super) fn new(route: Arc<Route>) -> Self {
        let until = Instant::now() + Duration::from_millis(route.site.config.fence_timeout_ms);
        Self { route, until, end: PathEnd::PeerUnknown }
    }
}

impl Connection for ClosingLane {
    fn files(&self) -> Vec<BorrowedFd<'_>> {
        vec![self.route.channel.file()]
    }

    fn event(&mut self, _file: usize, _hung: bool) {}

    fn turn(&mut self) -> Turn {
        loop {
            match self.route.channel.receive(&mut [0; 16], false) {
                // News of memories have no effect at this point.
                Ok((1.., _)) => {}
                Ok((0, _)) => {
                    self.end = PathEnd::Fenced;
                    return Turn::End;
                }
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return Turn::Wait,
                Err(error) => {
                    // Its end is closed, with packets of ours unread.
                    if error.kind() == std::io::ErrorKind::ConnectionReset {
                        self.end = PathEnd::Fenced;
                    }
                    return Turn::End;
                }
            }
        }
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
