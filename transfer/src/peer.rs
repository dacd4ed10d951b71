//! A peer: its routes, the batches that wait for it, and the paths to it.

use alloc::collections::{BTreeSet, VecDeque};
use alloc::vec::Vec;

use crate::rail::CLASSES;
use crate::{Fault, PeerNumber, RailNumber, Route};

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
    /// Number of paths that are closing.
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

    /// The route over `rail`. Only the rail of one of its paths may be asked for: paths are opened over its
    /// routes, and routes do not change.
    pub(crate) fn route_mut(&mut self, rail: RailNumber) -> &mut RouteState {
        let found = self.routes.iter_mut().find(|state| state.route.rail == rail);
        found.expect("a path is over a rail on its peer's routes")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;

    fn peer(rails: &[u8]) -> Peer {
        let route = |&rail: &u8| Route { rail: RailNumber(rail), tier: rail };
        Peer::new(PeerNumber(4), rails.iter().map(route).collect(), 77)
    }

    #[test]
    fn a_new_peer_wants_nothing_and_has_done_nothing_wrong() {
        let peer = peer(&[3, 1]);
        assert!(peer.is_idle() && !peer.wants() && !peer.ended && !peer.waiting);
        assert_eq!((peer.used_us, peer.backlog_bytes(), peer.timer_us), (77, 0, None));
        assert!(
            peer.routes
                .iter()
                .all(|route| route.path.is_none() && route.fails + route.retry_at_us as u32 == 0)
        );
    }

    #[test]
    fn it_wants_a_path_for_a_batch_of_any_class_or_a_notice_and_for_nothing_else() {
        for class in 0..CLASSES {
            let mut peer = peer(&[0]);
            peer.queues[class].push_back(9);
            assert!(peer.wants(), "class {class}");
        }
        let mut told = peer(&[0]);
        told.notices.push_back(9);
        assert!(told.wants());
        let mut busy = peer(&[0]);
        (busy.batches, busy.paths, busy.closing) = (BTreeSet::from([1]), vec![2], 3);
        assert!(!busy.wants(), "all of it is on its way");
    }

    #[test]
    fn it_is_idle_only_without_batches_and_paths_those_that_close_included() {
        let changes: [fn(&mut Peer); 3] =
            [|p| p.batches = BTreeSet::from([0]), |p| p.paths.push(0), |p| p.closing = 1];
        for change in changes {
            let mut peer = peer(&[0]);
            change(&mut peer);
            assert!(!peer.is_idle(), "{peer:?}");
        }
        let mut ended = peer(&[0]);
        ended.ended = true;
        assert!(ended.is_idle(), "an ended one may be forgotten");
    }

    #[test]
    fn its_backlog_is_that_of_all_classes_and_its_routes_go_by_rail() {
        let mut peer = peer(&[3, 1]);
        peer.pending_bytes = [1, 20, 300, 4_000];
        assert_eq!(peer.backlog_bytes(), 4_321);
        peer.route_mut(RailNumber(1)).fails = 5;
        assert_eq!([peer.routes[0].fails, peer.routes[1].fails], [0, 5]);
    }

    #[test]
    #[should_panic(expected = "on its peer's routes")]
    fn a_rail_without_a_route_is_a_programmer_s_error() {
        peer(&[3, 1]).route_mut(RailNumber(2));
    }
}
