//! How long a batch would take, from what is known now.

use super::engine::MoverCore;
use super::path::{Path, wire_ns};
use super::{PeerNumber, Route};
use crate::Priority;

impl MoverCore {
    /// Microseconds until `bytes` more of this priority would be at the peer, or here. None for a peer that
    /// is not known or has ended, or to which no route leads.
    ///
    /// Counts what is on its way over the peer's paths, what waits before it (all that is as urgent or more,
    /// and of the rest the share that its weight gives it), and the speeds that were measured. Without a path
    /// it goes by what the rail has shown, and by when its route may be tried again.
    #[must_use]
    pub fn estimate(&self, peer: PeerNumber, bytes: u64, priority: Priority) -> Option<u64> {
        let slot = *self.peer_slots.get(&peer)?;
        let peer = &self.peers[slot];
        if peer.ended {
            return None;
        }
        let ahead = self.ahead_bytes(slot, bytes, priority).saturating_add(bytes);
        let serving = peer.paths.iter().map(|&path| &self.paths[path]).filter(|path| path.serves());
        let Some(tier) = serving.clone().map(|path| path.tier).min() else {
            return self.estimate_unopened(peer.routes.iter().map(|s| (s.route, s.retry_at_us)), ahead);
        };
        let used = serving.filter(|path| path.tier == tier);
        // Together they carry the sum of their rates; rates are per nanosecond and MiB, inverted.
        let rates = used.clone().map(|path| u64::MAX / path.ns_per_mib.max(1));
        let ns_per_mib = u64::MAX / rates.fold(1, u64::saturating_add);
        let outstanding: u64 = used.clone().map(|path| path.bytes).sum();
        let overhead_ns = used.map(|path| late_ns(path, self.now_us)).min().unwrap_or(0);
        let ns = wire_ns(outstanding.saturating_add(ahead), ns_per_mib).saturating_add(overhead_ns);
        Some(ns.div_ceil(1_000))
    }

    /// The same for a peer that is not known yet, over these routes: by what their rails have shown.
    #[must_use]
    pub fn estimate_cold(&self, routes: &[Route], bytes: u64) -> Option<u64> {
        let known = routes.iter().filter(|route| route.rail.index() < self.rails.len());
        self.estimate_unopened(known.map(|&route| (route, 0)), bytes)
    }

    /// Bytes of the peer's that go before the last of `bytes` more.
    fn ahead_bytes(&self, slot: u32, bytes: u64, priority: Priority) -> u64 {
        let own = self.weights[priority.index()];
        let pending = self.peers[slot].pending_bytes.iter().zip(self.weights).enumerate();
        let ahead = pending.map(|(class, (&waiting, weight))| {
            if class <= priority.index() {
                return waiting;
            }
            let share = u128::from(bytes) * u128::from(weight) / u128::from(own);
            waiting.min(u64::try_from(share).unwrap_or(u64::MAX))
        });
        ahead.fold(0, u64::saturating_add)
    }

    fn estimate_unopened(&self, routes: impl Iterator<Item = (Route, u64)>, bytes: u64) -> Option<u64> {
        let times = routes.map(|(route, retry_at_us)| {
            let rail = &self.rails[route.rail.index()];
            let rest_us = retry_at_us.saturating_sub(self.now_us);
            let wire_us = wire_ns(bytes, rail.ns_per_mib).div_ceil(1_000);
            // Opening takes a few exchanges; then come the bytes.
            rest_us.saturating_add(rail.latency_us.saturating_mul(4)).saturating_add(wire_us)
        });
        times.min()
    }
}

/// A path's latency, and how late it is.
fn late_ns(path: &Path, now_us: u64) -> u64 {
    path.predicted_ns(0, now_us).saturating_sub(wire_ns(path.bytes, path.ns_per_mib))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mover::path::{Path, PathState};
    use crate::mover::{Input, MoverConfig, PathNumber, RailNumber, RailSpec};
    use alloc::vec;
    use alloc::vec::Vec;
    use baton_types::Rng;

    const PEER: PeerNumber = PeerNumber(1);

    /// A core that knows one peer, over rails of these speeds and tiers.
    fn core(rails: &[(u64, u8)]) -> MoverCore {
        let spec =
            |&(bytes_per_s, _): &(u64, u8)| RailSpec { bytes_per_s, latency_us: 100, ..RailSpec::default() };
        let rails_of = rails.iter().map(spec).collect();
        let mut core = MoverCore::new(MoverConfig { rails: rails_of, ..MoverConfig::default() });
        core.step(1_000, Input::PeerKnown { peer: PEER, routes: routes(rails) }, &mut Vec::new());
        core
    }

    fn routes(rails: &[(u64, u8)]) -> Vec<Route> {
        (0..).zip(rails).map(|(rail, &(_, tier))| Route { rail: RailNumber(rail), tier }).collect()
    }

    /// Puts an open path with so many bytes on it onto a rail.
    fn open(core: &mut MoverCore, rail: u8, tier: u8, bytes: u64) -> u32 {
        let (slot, route) = (core.peer_slots[&PEER], Route { rail: RailNumber(rail), tier });
        let mut path =
            Path::new(PathNumber(u32::from(rail)), slot, route, &core.rails[usize::from(rail)], 1_000);
        path.state = PathState::Open;
        path.bytes = bytes;
        path.outstanding = vec![0; usize::from(bytes > 0)];
        let path = core.paths.insert(path);
        core.peers[slot].paths.push(path);
        path
    }

    fn wait(core: &mut MoverCore, pending_bytes: [u64; 4]) {
        let slot = core.peer_slots[&PEER];
        core.peers[slot].pending_bytes = pending_bytes;
    }

    const MIB_S: u64 = 1 << 20;

    #[test]
    fn one_path_needs_latency_and_what_is_on_it_and_what_waits() {
        let mut core = core(&[(1_000 * MIB_S, 0)]);
        open(&mut core, 0, 0, 3 << 20);
        let estimate = |core: &MoverCore| core.estimate(PEER, 2 << 20, Priority::Handoff).unwrap();
        assert_eq!(estimate(&core), 100 + 3_000 + 2_000);
        wait(&mut core, [5 << 20, 0, 0, 0]);
        assert_eq!(estimate(&core), 100 + 3_000 + 2_000 + 5_000);
    }

    /// What waits is ahead in full if it is as urgent, else by its weight's share of what is asked.
    #[test]
    fn what_waits_counts_by_how_urgent_it_is() {
        let mut rng = Rng::new(4);
        for _ in 0..2_000 {
            let mut core = core(&[(1_000 * MIB_S, 0)]);
            let waiting = [0; 4].map(|_: u64| rng.below(64 << 20));
            wait(&mut core, waiting);
            let (slot, bytes) = (core.peer_slots[&PEER], rng.below(64 << 20));
            for priority in Priority::ALL {
                let own = core.weights[priority.index()] as f64;
                let mut ahead = 0.0;
                for (class, &waits) in waiting.iter().enumerate() {
                    let share = bytes as f64 * core.weights[class] as f64 / own;
                    let urgent = class <= priority.index();
                    ahead += if urgent { waits as f64 } else { (waits as f64).min(share) };
                }
                let got = core.ahead_bytes(slot, bytes, priority) as f64;
                assert!((got - ahead).abs() < 5.0, "{priority:?}: {got} for {ahead}, {waiting:?}, {bytes}");
            }
        }
    }

    #[test]
    fn paths_of_one_tier_carry_together_and_those_of_a_worse_one_do_not_count() {
        let mut rng = Rng::new(9);
        for _ in 0..1_000 {
            let speeds = [0; 3].map(|_: u64| (1 + rng.below(20_000)) * MIB_S);
            let mut core = core(&[(speeds[0], 1), (speeds[1], 1), (speeds[2], 2)]);
            let on = [0; 3].map(|_: u64| rng.below(8 << 20));
            open(&mut core, 0, 1, on[0]);
            open(&mut core, 1, 1, on[1]);
            open(&mut core, 2, 2, on[2]);
            let bytes = 1 + rng.below(256 << 20);
            let expected = (on[0] + on[1] + bytes) as f64 / (speeds[0] + speeds[1]) as f64 * 1e6 + 100.0;
            let got = core.estimate(PEER, bytes, Priority::Fetch).unwrap() as f64;
            assert!(
                (got - expected).abs() < 3.0 + expected / 1_000.0,
                "{got} for {expected}: {speeds:?} {on:?}"
            );
        }
    }

    #[test]
    fn only_paths_that_serve_count() {
        let rails = [(1_000 * MIB_S, 0), (1_000 * MIB_S, 0)];
        let mut core = core(&rails);
        open(&mut core, 0, 0, 0);
        let other = open(&mut core, 1, 0, 0);
        let estimate = |core: &MoverCore| core.estimate(PEER, 10 << 20, Priority::Fetch).unwrap();
        assert_eq!(estimate(&core), 100 + 5_000);
        for state in [PathState::Opening, PathState::Trial, PathState::Closing] {
            core.paths[other].state = state;
            assert_eq!(estimate(&core), 100 + 10_000, "{state:?}");
        }
        (core.paths[other].state, core.paths[other].draining) = (PathState::Open, true);
        assert_eq!(estimate(&core), 100 + 10_000, "draining");
    }

    #[test]
    fn a_peer_whose_every_path_is_late_is_estimated_later_by_the_least_late() {
        let mut core = core(&[(1_000 * MIB_S, 0), (1_000 * MIB_S, 0)]);
        let paths = [open(&mut core, 0, 0, 1 << 20), open(&mut core, 1, 0, 1 << 20)];
        let before = core.estimate(PEER, 1 << 20, Priority::Fetch).unwrap();
        core.paths[paths[1]].moved_us = 51_100;
        core.now_us = 101_100;
        let after = core.estimate(PEER, 1 << 20, Priority::Fetch).unwrap();
        assert_eq!(after - before, 50_000 - 1_100, "50 ms without a sign, of which 1.1 were due");
    }

    #[test]
    fn without_a_path_it_goes_by_the_best_route_and_when_that_has_rested() {
        let mut core = core(&[(1_000 * MIB_S, 0), (100 * MIB_S, 0)]);
        let slot = core.peer_slots[&PEER];
        let estimate = |core: &MoverCore| core.estimate(PEER, 10 << 20, Priority::Fetch).unwrap();
        assert_eq!(estimate(&core), 4 * 100 + 10_000);
        core.peers[slot].routes[0].retry_at_us = core.now_us + 50_000;
        assert_eq!(estimate(&core), 50_000 + 4 * 100 + 10_000, "rests, and still is sooner");
        core.peers[slot].routes[0].retry_at_us = core.now_us + 500_000;
        assert_eq!(estimate(&core), 4 * 100 + 100_000, "the slow one need not rest");
        core.peers[slot].routes[0].retry_at_us = core.now_us - 1;
        assert_eq!(estimate(&core), 4 * 100 + 10_000, "has rested");
        core.rails[0].ns_per_mib *= 2;
        core.rails[0].latency_us = 200;
        assert_eq!(estimate(&core), 4 * 200 + 20_000, "by what the rail has shown, not its setting");
    }

    #[test]
    fn cold_is_as_for_a_peer_just_told_of() {
        let mut rng = Rng::new(3);
        for _ in 0..500 {
            let rails = [(); 3].map(|()| ((1 + rng.below(5_000)) * MIB_S, 0));
            let core = core(&rails);
            let bytes = rng.below(1 << 32);
            let cold = core.estimate_cold(&routes(&rails), bytes);
            assert_eq!(cold, core.estimate(PEER, bytes, Priority::Fetch));
            let fastest = rails.iter().map(|rail| rail.0).max().unwrap();
            let expected = bytes as f64 / fastest as f64 * 1e6 + 400.0;
            assert!((cold.unwrap() as f64 - expected).abs() < 2.0 + expected / 1_000.0);
        }
    }

    #[test]
    fn nobody_knows_how_long_it_takes_to_where_nothing_leads() {
        let mut core = core(&[(MIB_S, 0)]);
        assert_eq!(core.estimate(PeerNumber(2), 1, Priority::Fetch), None, "not known");
        assert_eq!(
            (core.estimate_cold(&[], 1), core.estimate_cold(&[Route { rail: RailNumber(1), tier: 0 }], 1)),
            (None, None)
        );
        let stranger =
            Input::PeerKnown { peer: PeerNumber(2), routes: vec![Route { rail: RailNumber(9), tier: 0 }] };
        core.step(2_000, stranger, &mut Vec::new());
        assert_eq!(core.estimate(PeerNumber(2), 1, Priority::Fetch), None, "known, but by no rail of ours");
        core.step(2_000, Input::PeerEnded { peer: PEER }, &mut Vec::new());
        assert_eq!(core.estimate(PEER, 1, Priority::Fetch), None, "its life is over");
    }

    #[test]
    fn an_estimate_of_what_is_immense_does_not_go_round() {
        let mut core = core(&[(1, 0)]);
        assert_eq!(core.estimate(PEER, u64::MAX, Priority::Fetch), Some(u64::MAX.div_ceil(1_000) + 400));
        open(&mut core, 0, 0, 1);
        wait(&mut core, [1; 4]);
        let most = core.estimate(PEER, u64::MAX, Priority::Offload).unwrap();
        assert_eq!(most, u64::MAX.div_ceil(1_000));
    }
}
