//! The whole state in a form that tests read.

use alloc::vec::Vec;

use crate::Priority;
use crate::batch::{Batch, Phase};
use crate::engine::MoverCore;
use crate::path::{Path, PathState};
use crate::peer::Peer;
use crate::{BatchId, MoverStats, PathNumber, PeerNumber, RailNumber};

/// The state of a [`MoverCore`], sorted by name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MoverSnapshot {
    /// The time of the last input.
    pub(crate) now_us: u64,
    /// Every rail.
    pub(crate) rails: Vec<RailSnapshot>,
    /// Every peer with work or a path.
    pub(crate) peers: Vec<PeerSnapshot>,
    /// Every path.
    pub(crate) paths: Vec<PathSnapshot>,
    /// Every batch that lives.
    pub(crate) batches: Vec<BatchSnapshot>,
    /// The counters.
    pub(crate) stats: MoverStats,
}

/// One rail.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RailSnapshot {
    /// Index of the rail in the configuration.
    pub(crate) rail: RailNumber,
    /// Bytes outstanding on it.
    pub(crate) outstanding_bytes: u64,
    /// Bytes of slices on it that ended well.
    pub(crate) moved_bytes: u64,
    /// Paths on it.
    pub(crate) paths: u32,
    /// Its speed, as its paths have shown.
    pub(crate) bytes_per_s: u64,
    /// Its latency, as its paths have shown.
    pub(crate) latency_us: u64,
}

/// One peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PeerSnapshot {
    /// The number of the peer.
    pub(crate) peer: PeerNumber,
    /// Whether its life is over.
    pub(crate) ended: bool,
    /// Batches that live.
    pub(crate) batches: u64,
    /// Bytes to post, by priority.
    pub(crate) pending_bytes: [u64; Priority::ALL.len()],
    /// Whether it stands in line for a path.
    pub(crate) waiting: bool,
    /// By route: failures in a row, and when it may be tried again.
    pub(crate) routes: Vec<(RailNumber, u32, u64)>,
}

/// One path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PathSnapshot {
    /// The number of the path.
    pub(crate) path: PathNumber,
    /// The peer at its other end.
    pub(crate) peer: PeerNumber,
    /// The rail that it uses.
    pub(crate) rail: RailNumber,
    /// `opening`, `trial`, `open`, `draining` or `closing`.
    pub(crate) state: &'static str,
    /// Whether it has refused a slice and not said since that it takes some.
    pub(crate) full: bool,
    /// Slices and notices on their way.
    pub(crate) outstanding_slices: u64,
    /// Their bytes.
    pub(crate) outstanding_bytes: u64,
    /// Its measured speed.
    pub(crate) bytes_per_s: u64,
    /// Its measured latency.
    pub(crate) latency_us: u64,
    /// Batches that cannot end before it has closed.
    pub(crate) batches_in_doubt: u64,
}

/// One batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BatchSnapshot {
    /// The number of the batch.
    pub(crate) batch: BatchId,
    /// The peer that it exchanges bytes with.
    pub(crate) peer: PeerNumber,
    /// The priority given with the request.
    pub(crate) priority: Priority,
    /// `moving`, `fencing`, `noticing` or `ending`.
    pub(crate) state: &'static str,
    /// Its size.
    pub(crate) bytes: u64,
    /// Bytes in place.
    pub(crate) done_bytes: u64,
    /// Slices and notices on their way.
    pub(crate) outstanding: u32,
    /// Paths that must close before it ends.
    pub(crate) doubts: u64,
    /// Time of its submission, µs.
    pub(crate) submitted_us: u64,
    /// Time at which it fails at the latest, µs.
    pub(crate) deadline_us: u64,
}

impl MoverCore {
    /// The state now, sorted. Peers that have neither work nor a path are left out.
    pub(crate) fn snapshot(&self) -> MoverSnapshot {
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

    fn rail_snapshots(&self) -> Vec<RailSnapshot> {
        let numbers = (0..).map(RailNumber);
        let rails = numbers.zip(&self.rails).map(|(rail, state)| RailSnapshot {
            rail,
            outstanding_bytes: state.bytes,
            moved_bytes: state.moved_bytes,
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

mod tests {
    use super::*;
    use crate::testing::bench::*;
    use crate::{BatchRequest, Direction, Fault, Input, MoverConfig, Op, PathEnd};
    use alloc::vec;
    use baton_types::Rng;

    #[test]
    fn everything_is_there_once_and_sorted_by_name() {
        let mut rng = Rng::new(2);
        for _ in 0..40 {
            let mut bench = Bench::new(MoverConfig { spread_bytes: 1, ..rails(2) }, 0, &[]);
            // Names that come in any order, and slots that are used again.
            let mut names: Vec<u32> = (0..20).collect();
            for at in (1..names.len()).rev() {
                names.swap(at, rng.below(at as u64 + 1) as usize);
            }
            names.iter().for_each(|&name| drop(bench.know(name, &[0, 0])));
            let mut live = Vec::new();
            for &name in &names[..12] {
                let batch = u64::from(name) * 7 % 31;
                let mut effects = bench.submit(write(batch, name, 1 + rng.below(1 << 20)));
                live.push((BatchId(batch), PeerNumber(name)));
                match rng.below(3) {
                    0 => drop(bench.opened(opens(&effects)[0])),
                    1 => {
                        effects = bench.obey(effects);
                        assert_eq!(ends(&effects).len(), 1);
                        live.pop();
                    }
                    _ => {}
                }
            }
            live.sort_unstable();
            let snapshot = bench.core.snapshot();
            let batches: Vec<_> = snapshot.batches.iter().map(|batch| (batch.batch, batch.peer)).collect();
            assert_eq!(batches, live);
            let peers: Vec<u32> = snapshot.peers.iter().map(|peer| peer.peer.0).collect();
            let mut busy = names[..12].to_vec();
            busy.sort_unstable();
            assert_eq!(peers, busy, "those with work or a path, and no others");
            assert!(snapshot.paths.is_sorted_by(|a, b| a.path < b.path));
            assert_eq!(snapshot.paths.len() as u64, bench.core.stats().paths);
            let rails: Vec<u8> = snapshot.rails.iter().map(|rail| rail.rail.0).collect();
            assert_eq!(rails, [0, 1]);
            sums_agree(&snapshot);
        }
    }

    /// Asserts that the sums over paths, rails, batches and peers agree.
    fn sums_agree(snapshot: &MoverSnapshot) {
        let paths = &snapshot.paths;
        for rail in &snapshot.rails {
            let on = || paths.iter().filter(|path| path.rail == rail.rail);
            assert_eq!(on().count(), rail.paths as usize);
            assert_eq!(on().map(|path| path.outstanding_bytes).sum::<u64>(), rail.outstanding_bytes);
        }
        for peer in &snapshot.peers {
            let with = || snapshot.batches.iter().filter(|batch| batch.peer == peer.peer);
            let to = paths.iter().filter(|path| path.peer == peer.peer);
            let whole: u64 = with().map(|batch| batch.bytes - batch.done_bytes).sum();
            let on_way: u64 = to.map(|path| path.outstanding_bytes).sum();
            assert_eq!(peer.pending_bytes.iter().sum::<u64>() + on_way, whole);
            assert_eq!(peer.batches, with().count() as u64);
        }
        let slices: u64 = paths.iter().map(|path| path.outstanding_slices).sum();
        assert_eq!(slices, snapshot.stats.outstanding_slices);
        let held: u64 = snapshot.batches.iter().map(|batch| u64::from(batch.outstanding)).sum();
        assert_eq!(slices, held);
    }

    #[test]
    fn a_path_and_a_batch_tell_each_of_their_states() {
        let mut bench = Bench::new(rails(2), 1, &[0, 1]);
        let seen = |bench: &Bench| {
            let snapshot = bench.core.snapshot();
            (snapshot.paths[0].state, snapshot.batches.first().map(|batch| batch.state))
        };
        let request = BatchRequest { notice: true, ..write(1, 0, 1_000) };
        let path = opens(&bench.submit(request))[0];
        assert_eq!(seen(&bench), ("opening", Some("moving")));
        let post = posts(&bench.opened(path))[0];
        assert_eq!(seen(&bench), ("open", Some("moving")));
        let again = opens(&bench.broken(path, Fault::Path))[0];
        assert_eq!(seen(&bench), ("closing", Some("moving")));
        let repeated = posts(&bench.opened(again))[0];
        bench.done(repeated);
        assert_eq!(seen(&bench), ("closing", Some("fencing")));
        assert_eq!(bench.core.snapshot().batches[0].doubts, 1);
        assert_eq!(bench.core.snapshot().paths[0].batches_in_doubt, 1);
        bench.closed(post.path, PathEnd::Fenced);
        assert_eq!(seen(&bench), ("open", Some("noticing")));
        bench.core.paths[1].draining = true;
        assert_eq!(seen(&bench), ("draining", Some("noticing")));
        bench.cancel(1);
        assert_eq!(seen(&bench), ("draining", Some("ending")));
        bench.core.paths[1].state = PathState::Trial;
        assert_eq!(seen(&bench).0, "trial");
    }

    #[test]
    fn every_number_of_a_busy_core_is_told() {
        let mut bench = Bench::new(rails(1), 1, &[0]);
        bench.now_us = 5_000;
        let op = Op { direction: Direction::Read, bytes: 100_000, location: 0 };
        let (deadline_us, priority) = (Some(9_000), Priority::Handoff);
        let request = BatchRequest { deadline_us, priority, ops: vec![op], ..write(8, 0, 0) };
        let path = opens(&bench.submit(request))[0];
        bench.now_us = 5_500;
        let post = posts(&bench.opened(path))[0];
        bench.done(post);
        bench.submit(write(9, 0, 64 << 20));
        let snapshot = bench.core.snapshot();
        let batch = BatchSnapshot {
            batch: BatchId(8),
            peer: PeerNumber(0),
            priority,
            state: "moving",
            bytes: 100_000,
            done_bytes: 65_536,
            outstanding: 1,
            doubts: 0,
            submitted_us: 5_000,
            deadline_us: 9_000,
        };
        assert_eq!((snapshot.now_us, &snapshot.batches[0]), (5_500, &batch));
        let path = &snapshot.paths[0];
        assert_eq!(path.outstanding_bytes, 34_464 + (8 << 20), "slices of 256 KiB until 8 MiB are passed");
        let pending = snapshot.peers[0].pending_bytes;
        assert_eq!(pending[Priority::Fetch.index()] + path.outstanding_bytes, (64 << 20) + 34_464);
        let speed = 3_000_000_000;
        assert!(path.bytes_per_s.abs_diff(speed) < speed / 1_000 && path.latency_us == 30, "{path:?}");
        assert_eq!((snapshot.rails[0].paths, snapshot.stats), (1, bench.core.stats()));
    }

    #[test]
    fn routes_tell_their_failures_and_rests_and_who_stands_in_line() {
        let mut bench = Bench::new(MoverConfig { max_paths: 1, ..rails(2) }, 2, &[0, 1]);
        let path = opens(&bench.submit(write(1, 0, 10)))[0];
        bench.submit(write(2, 1, 10));
        let effects = bench.open_failed(path, Fault::Silent);
        assert_eq!(opens_to(&effects), [(1, 0)]);
        let [first, second] = &bench.core.snapshot().peers[..] else { panic!() };
        let (fails, retry_at_us) = bench.route(0, 0);
        assert_eq!(first.routes, [(RailNumber(0), fails, retry_at_us), (RailNumber(1), 0, 0)]);
        assert_eq!((fails, first.waiting, second.waiting), (1, true, false));
        bench.feed(Input::PeerEnded { peer: PeerNumber(1) });
        let ended: Vec<bool> = bench.core.snapshot().peers.iter().map(|peer| peer.ended).collect();
        assert_eq!(ended, [false, true]);
    }

    #[test]
    fn speeds_are_told_in_bytes_of_a_second() {
        for (ns_per_mib, wanted) in
            [(1_000_000_000, 1 << 20), (1_000_000, 1_000 << 20), (0, 1_000_000_000 << 20), (u64::MAX, 0)]
        {
            assert_eq!(bytes_per_s(ns_per_mib), wanted);
        }
    }
}
