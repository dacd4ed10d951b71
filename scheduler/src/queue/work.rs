//! Work of a prefill queue: what waits, what was sent, and what may join.

use baton_types::{RequestId, TenantId};
use serde::{Deserialize, Serialize};

/// Placed on an instance, held back by the conductor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct WaitingPrefill {
    pub request: RequestId,
    pub work_us: u64,
    /// Its work if no other prompt shared its passes, µs: by this it takes its turn, so that equals go in the order of their arrival.
    pub alone_us: u64,
    pub new_tokens: u64,
    pub arrived_us: u64,
    /// Latest moment for its prefill to end, µs.
    pub deadline_us: u64,
    /// Its place by deadline, µs: its own deadline, or the place of what it follows.
    pub order_us: u64,
    pub priority: i32,
    pub tenant: TenantId,
    /// Weight of its class.
    pub weight: u32,
    /// It is held until then, µs, because there is no room yet to decode it.
    pub held_until_us: u64,
    /// Its fair-share tag: see [`FairShares`](crate::shares::FairShares).
    pub tag_us: u64,
    /// When it was put here, µs.
    pub since_us: u64,
    /// The other router that sends it, if it is not this one.
    pub peer: Option<u32>,
    /// The request before it whose blocks it counts on, which is served first.
    pub after: Option<RequestId>,
}

impl WaitingPrefill {
    /// Its place by deadline.
    pub(super) const fn turn(&self) -> (u64, u64, RequestId) {
        (self.order_us, self.arrived_us, self.request)
    }

    /// Whether it has waited for twice its promised time: then it is served whatever that does to others.
    pub(super) const fn is_aged(&self, now_us: u64) -> bool {
        let promised_us = self.deadline_us.saturating_sub(self.arrived_us);
        now_us.saturating_sub(self.arrived_us) > promised_us.saturating_mul(2)
    }
}

/// Sent to the engine, not yet finished.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DispatchedPrefill {
    pub request: RequestId,
    pub work_us: u64,
    pub new_tokens: u64,
    /// Latest moment for its prefill to end, µs.
    pub deadline_us: u64,
    /// When it was sent, µs.
    pub sent_us: u64,
    /// Tokens of others that were sent before either had begun.
    pub beside_tokens: u64,
}

/// Work that may join a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NewWork {
    pub work_us: u64,
    /// Latest moment for its prefill to end, µs.
    pub deadline_us: u64,
    /// Its place by deadline, µs.
    pub order_us: u64,
    pub priority: i32,
    /// The work that decides its place in the order of service, µs: its own, or that of what it follows if that is more.
    pub rank_us: u64,
}

/// The state of a queue as new work would find it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Outlook {
    /// Wait by the order of service, µs.
    pub expected_wait_us: u64,
    /// Wait if served by deadline, the latest that it can be, µs.
    pub deadline_wait_us: u64,
    /// Number of requests that would be served after it.
    pub behind: u32,
    /// Whether all work that meets its deadline now still would.
    pub keeps_promises: bool,
}
