//! The common parts of all stand-ins: the record of requests, faults, and the shutdown.

use super::fault::{Fault, Faults};
use super::request_log::{ReceivedRequest, RequestLog};
use super::server::Life;

/// The parts that every stand-in has.
pub struct Stand {
    pub(super) log: RequestLog,
    pub(super) faults: Faults,
    pub(super) life: Life,
}

impl Stand {
    pub(super) fn new(life: Life) -> Self {
        Self { log: RequestLog::default(), faults: Faults::default(), life }
    }

    /// The violations among the requests it received.
    #[must_use]
    pub fn violations(&self) -> Vec<String> {
        self.log.violations()
    }

    /// The requests that it was sent, in order.
    #[must_use]
    pub fn received(&self) -> Vec<ReceivedRequest> {
        self.log.received()
    }

    /// The next `times` requests meet this fault, after those that were ordered before.
    pub fn fault(&self, fault: Fault, times: usize) {
        self.faults.push(fault, times);
    }

    /// Clears the pending faults.
    pub fn heal(&self) {
        self.faults.clear();
    }

    /// Whether its engine has died, while the server lives on.
    #[must_use]
    pub fn engine_is_dead(&self) -> bool {
        self.faults.is_dead()
    }

    /// Whether it is gone.
    #[must_use]
    pub fn exited(&self) -> bool {
        self.life.exited()
    }
}
