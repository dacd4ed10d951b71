//! The whole state in a form to read: for the admin page, golden tests and bug reports.

use alloc::vec::Vec;

use serde::Serialize;

use super::batch::{Batch, Phase};
use super::engine::MoverCore;
use super::path::{Path, PathState};
use super::peer::Peer;
use super::{BatchId, MoverStats, PathNumber, PeerNumber, RailNumber};
use crate::Priority;

/// The state of a [`MoverCore`], sorted by name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MoverSnapshot {
    /// The time of the last input.
    pub now_us: u64,
    /// Every rail.
    pub rails: Vec<RailSnapshot>,
    /// Every peer with work or a path.
    pub peers: Vec<PeerSnapshot>,
    /// Every path.
    pub paths: Vec<PathSnapshot>,
    /// Every batch that lives.
    pub batches: Vec<BatchSnapshot>,
    /// The counters.
    pub stats: MoverStats,
}

/// One rail.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RailSnapshot {
    /// Which.
    pub rail: RailNumber,
    /// Bytes outstanding on it.
    pub outstanding_bytes: u64,
    /// Paths on it.
    pub paths: u32,
    /// Its speed, as its paths have shown.
    pub bytes_per_s: u64,
    /// Its latency, as its paths have shown.
    pub latency_us: u64,
}

/// One peer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PeerSnapshot {
    /// Which.
    pub peer: PeerNumber,
    /// Whether its life is over.
    pub ended: bool,
    /// Batches that live.
    pub batches: u64,
    /// Bytes to post, by priority.
    pub pending_bytes: [u64; Priority::ALL.len()],
    /// Whether it stands in line for a path.
    pub waiting: bool,
    /// By route: failures in a row, and when it may be tried again.
    pub routes: Vec<(RailNumber, u32, u64)>,
}

/// One path.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PathSnapshot {
    /// Which.
    pub path: PathNumber,
    /// To whom.
    pub peer: PeerNumber,
    /// Over which rail.
    pub rail: RailNumber,
    /// `opening`, `trial`, `open`, `draining` or `closing`.
    pub state: &'static str,
    /// Whether it has refused a slice and not said since that it takes some.
    pub full: bool,
    /// Slices and notices on their way.
    pub outstanding_slices: u64,
    /// Their bytes.
    pub outstanding_bytes: u64,
    /// Its measured speed.
    pub bytes_per_s: u64,
    /// Its measured latency.
    pub latency_us: u64,
    /// Batches that cannot end before it has closed.
    pub batches_in_doubt: u64,
}

/// One batch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BatchSnapshot {
    /// Which.
    pub batch: BatchId,
    /// With whom.
    pub peer: PeerNumber,
    /// How urgent.
    pub priority: Priority,
    /// `moving`, `fencing`, `noticing` or `ending`.
    pub state: &'static str,
    /// Its size.
    pub bytes: u64,
    /// Bytes in place.
    pub done_bytes: u64,
    /// Slices and notices on their way.
    pub outstanding: u32,
    /// Paths that must close before it ends.
    pub doubts: u64,
    /// When it was submitted.
    pub submitted_us: u64,
    /// When it fails at the latest.
    pub deadline_us: u64,
}

impl MoverCore {
    /// The state now, sorted. Peers that have neither work nor a path are left out.
    #[must_use]
    pub fn snapshot(&self) -> MoverSnapshot {
        let busy = self.peers.iter().filter(|(_, peer)| !peer.is_idle());
        let mut peers: Vec<_> = busy.map(|(_, peer)| peer_snapshot(peer)).collect();
        peers.sort_unstable_by_key(|peer| peer.peer);
        let mut batches: Vec<_> = self.batches.iter().map(|(_, batch)| self.batch_snapshot(batch)).collect();
        batches.sort_unstable_by_key(|batch| batch.batch);
        MoverSnapshot {
            now_us: self.now_us,
            rails: self.rail_snapshots(),
            peers,
            paths: self.path_slots.values().map(|&slot| self.path_snapshot(&self.paths[slot])).collect(),
            batches,
            stats: self.stats(),
        }
    }

    /// Bytes of a batch that are in place; none for one that does not live.
    #[must_use]
    pub fn done_bytes(&self, batch: BatchId) -> Option<u64> {
        self.batch_slots.get(&batch).map(|&slot| self.batches[slot].done_bytes)
    }

    fn rail_snapshots(&self) -> Vec<RailSnapshot> {
        let numbers = (0..).map(RailNumber);
        let rails = numbers.zip(&self.rails).map(|(rail, state)| RailSnapshot {
            rail,
            outstanding_bytes: state.bytes,
            paths: state.paths,
            bytes_per_s: bytes_per_s(state.ns_per_mib),
            latency_us: state.latency_us,
        });
        rails.collect()
    }

    fn path_snapshot(&self, path: &Path) -> PathSnapshot {
        PathSnapshot {
            path: path.number,
            peer: self.peers[path.peer].number,
            rail: path.rail,
            state: match path.state {
                PathState::Opening => "opening",
                PathState::Trial => "trial",
                PathState::Open if path.draining => "draining",
                PathState::Open => "open",
                PathState::Closing => "closing",
            },
            full: path.full,
            outstanding_slices: path.outstanding.len() as u64,
            outstanding_bytes: path.bytes,
            bytes_per_s: bytes_per_s(path.ns_per_mib),
            latency_us: path.latency_us,
            batches_in_doubt: path.doubtful.len() as u64,
        }
    }

    fn batch_snapshot(&self, batch: &Batch) -> BatchSnapshot {
        BatchSnapshot {
            batch: batch.id,
            peer: self.peers[batch.peer].number,
            priority: batch.priority,
            state: match batch.phase {
                Phase::Moving if batch.done_bytes == batch.bytes => "fencing",
                Phase::Moving => "moving",
                Phase::Noticing | Phase::Noticed => "noticing",
                Phase::Ending(_) => "ending",
            },
            bytes: batch.bytes,
            done_bytes: batch.done_bytes,
            outstanding: batch.outstanding,
            doubts: batch.doubts.len() as u64,
            submitted_us: batch.submitted_us,
            deadline_us: batch.deadline_us,
        }
    }
}

fn peer_snapshot(peer: &Peer) -> PeerSnapshot {
    let routes = peer.routes.iter().map(|state| (state.route.rail, state.fails, state.retry_at_us));
    PeerSnapshot {
        peer: peer.number,
        ended: peer.ended,
        batches: peer.batches.len() as u64,
        pending_bytes: peer.pending_bytes,
        waiting: peer.waiting,
        routes: routes.collect(),
    }
}

fn bytes_per_s(ns_per_mib: u64) -> u64 {
    (1_000_000_000 << 20) / ns_per_mib.max(1)
}
