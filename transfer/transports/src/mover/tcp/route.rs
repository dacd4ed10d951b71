//! One path as its opener sees it: the gate, its lanes, and how both end.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::fence::FenceCall;
use super::site::Site;
use crate::mover::gate::Gate;
use crate::mover::reactor::ReactorSlot;
use crate::mover::{Fault, Notice, Path, PathEnd, PeerId, Slice};

/// A piece of work for a lane.
pub(super) enum Work {
    Slice(Slice),
    Notice(u64, Notice),
    Probe(u64),
}

/// The way to a lane, which lives on an I/O thread.
pub(super) struct LaneDoor {
    slot: ReactorSlot,
    work: Mutex<VecDeque<Work>>,
    nudged: AtomicBool,
    /// Bytes given to it and not ended.
    load: AtomicU64,
}

impl LaneDoor {
    pub(super) fn new(slot: ReactorSlot) -> Self {
        Self { slot, work: Mutex::default(), nudged: AtomicBool::new(false), load: AtomicU64::new(0) }
    }

    pub(super) fn slot(&self) -> ReactorSlot {
        self.slot
    }

    /// Takes the work added since the last call; called on the lane's thread.
    pub(super) fn take(&self) -> VecDeque<Work> {
        if !self.nudged.swap(false, Ordering::AcqRel) {
            return VecDeque::new();
        }
        self.rest()
    }

    /// All that is left, when the lane ends.
    pub(super) fn rest(&self) -> VecDeque<Work> {
        std::mem::take(&mut *self.work.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(super) fn relieve(&self, bytes: u64) {
        self.load.fetch_sub(bytes, Ordering::Relaxed);
    }

    fn put(&self, work: Work) {
        if let Work::Slice(slice) = &work {
            self.load.fetch_add(u64::from(slice.bytes), Ordering::Relaxed);
        }
        self.work.lock().unwrap_or_else(PoisonError::into_inner).push_back(work);
    }
}

/// One path as its opener sees it.
pub(super) struct Route {
    pub(super) site: Arc<Site>,
    pub(super) gate: Gate,
    pub(super) peer: PeerId,
    pub(super) address: SocketAddr,
    pub(super) session: u128,
    pub(super) doors: Vec<LaneDoor>,
    /// Lanes that have not been cut yet.
    pub(super) lanes_left: AtomicUsize,
}

impl Route {
    /// Begins the end: every lane is cut by its own thread, so that nothing lands here after that.
    pub(super) fn end(&self, fault: Fault, by_itself: bool) {
        if self.gate.end(fault, by_itself) {
            self.doors.iter().for_each(|door| self.site.pool.cut(door.slot));
        }
    }

    /// A lane has been cut. After the last, the peer is asked to cut its side.
    pub(super) fn lane_is_cut(self: &Arc<Self>) {
        if self.lanes_left.fetch_sub(1, Ordering::AcqRel) != 1 {
            return;
        }
        match FenceCall::new(self.clone()) {
            Ok(call) => self.site.pool.adopt(self.site.pool.slot(), Box::new(call)),
            Err(_) => self.gate.ended(PathEnd::PeerUnknown),
        }
    }

    fn nudge(&self, door: &LaneDoor) {
        if !door.nudged.swap(true, Ordering::AcqRel) {
            self.site.pool.nudge(door.slot);
        }
    }

    fn lightest(&self) -> &LaneDoor {
        let load = |door: &&LaneDoor| door.load.load(Ordering::Relaxed);
        self.doors.iter().min_by_key(load).expect("a path has at least one lane")
    }
}

/// The handle of a path's owner.
pub(super) struct TcpPath(pub(super) Arc<Route>);

impl Path for TcpPath {
    fn post(&self, slices: &[Slice]) -> usize {
        let route = &self.0;
        let taken = route.gate.take(slices, |slice| route.lightest().put(Work::Slice(slice.clone())));
        for door in &route.doors {
            if door.load.load(Ordering::Relaxed) > 0 {
                route.nudge(door);
            }
        }
        taken
    }

    fn notify(&self, ticket: u64, notice: Notice) {
        let route = &self.0;
        let door = route.lightest();
        route.gate.take_notice(ticket, Some(&notice), || door.put(Work::Notice(ticket, notice.clone())));
        route.nudge(door);
    }

    fn probe(&self, ticket: u64) {
        let route = &self.0;
        let door = route.lightest();
        route.gate.take_notice(ticket, None, || door.put(Work::Probe(ticket)));
        route.nudge(door);
    }

    fn close(&self) {
        self.0.end(Fault::Path("the path was closed".into()), false);
    }
}

impl Drop for TcpPath {
    fn drop(&mut self) {
        self.close();
    }
}
