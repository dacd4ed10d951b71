//! A peer: its routes, the batches that wait for it, and the paths to it.

use alloc::collections::{BTreeSet, VecDeque};
use alloc::vec::Vec;

use super::rail::CLASSES;
use super::{Fault, PeerNumber, RailNumber, Route};

/// A rail to this peer, and how it has done.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RouteState {
    pub(crate) route: Route,
    /// The slot of the path that is open or being opened on it.
    pub(crate) path: Option<u32>,
    /// Failures since a slice last ended well.
    pub(crate) fails: u32,
    pub(crate) retry_at_us: u64,
}

#[derive(Clone, Debug)]
pub(crate) struct Peer {
    pub(crate) number: PeerNumber,
    pub(crate) routes: Vec<RouteState>,
    /// Whether its life is over.
    pub(crate) ended: bool,
    /// Slots of the batches that live.
    pub(crate) batches: BTreeSet<u32>,
    /// Slots of the batches with something to post, by priority, in turns.
    pub(crate) queues: [VecDeque<u32>; CLASSES],
    /// Bytes to post, by priority.
    pub(crate) pending_bytes: [u64; CLASSES],
    /// Slots of the batches whose notice is to be sent.
    pub(crate) notices: VecDeque<u32>,
    /// Slots of the paths that are not closing.
    pub(crate) paths: Vec<u32>,
    /// How many paths are closing.
    pub(crate) closing: u32,
    /// By priority: the rails in whose queues it stands.
    pub(crate) ready: [u64; CLASSES],
    /// Whether it stands in line for a path.
    pub(crate) waiting: bool,
    pub(crate) used_us: u64,
    pub(crate) timer_us: Option<u64>,
    pub(crate) last_fault: Fault,
}

impl Peer {
    pub(crate) fn new(number: PeerNumber, routes: Vec<Route>, now_us: u64) -> Self {
        let state = |route| RouteState { route, path: None, fails: 0, retry_at_us: 0 };
        Self {
            number,
            routes: routes.into_iter().map(state).collect(),
            ended: false,
            batches: BTreeSet::new(),
            queues: Default::default(),
            pending_bytes: [0; CLASSES],
            notices: VecDeque::new(),
            paths: Vec::new(),
            closing: 0,
            ready: [0; CLASSES],
            waiting: false,
            used_us: now_us,
            timer_us: None,
            last_fault: Fault::Path,
        }
    }

    /// Whether a path to it has something to do.
    pub(crate) fn wants(&self) -> bool {
        !self.notices.is_empty() || self.queues.iter().any(|queue| !queue.is_empty())
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.batches.is_empty() && self.paths.is_empty() && self.closing == 0
    }

    pub(crate) fn backlog_bytes(&self) -> u64 {
        self.pending_bytes.iter().sum()
    }

    pub(crate) fn route_mut(&mut self, rail: RailNumber) -> Option<&mut RouteState> {
        self.routes.iter_mut().find(|state| state.route.rail == rail)
    }
}
