//! The pool of paths: who gets one, and whose is taken.
//!
//! There may be far more peers than paths. A peer with work and no path waits in a queue. The pool makes room by
//! closing an unused path, found as SIEVE does (a hand goes from old to new, and spares once each path used since it
//! last passed). Where all paths are in use, the pool drains one that its peer has held for a turn. That peer goes to
//! the end of the queue if it has more to send. So each waiting peer is served after a bounded number of turns.

use alloc::vec::Vec;

use crate::engine::MoverCore;
use crate::path::{Path, PathState};
use crate::slices::SliceContent;
use crate::timers::Timer;
use crate::{Effect, Fault, PathNumber, Route};

impl MoverCore {
    /// Looks whether a peer with work has the paths that it should have.
    pub(super) fn consider(&mut self, slot: u32, effects: &mut Vec<Effect>) {
        let peer = &self.peers[slot];
        // With a path on every route there is nothing to open, and this is asked often.
        if peer.ended || peer.paths.len() == peer.routes.len() || !peer.wants() {
            return;
        }
        let tier = self.served_tier(slot);
        match (tier, self.due_route(slot)) {
            (None, Some(_)) if !peer.waiting => {
                self.peers[slot].waiting = true;
                self.waiting.push_back(slot);
                self.look_for_room = true;
            }
            (Some(tier), Some(route)) if route.tier < tier || self.is_worth_one_more(slot, route, tier) => {
                self.open_extra(slot, route, effects);
            }
            _ => {}
        }
        self.arm_peer(slot);
    }

    /// The best tier in which the peer has a path that serves it, or soon will.
    fn served_tier(&self, slot: u32) -> Option<u8> {
        let paths = self.peers[slot].paths.iter().map(|&path| &self.paths[path]);
        paths.filter(|path| path.serves() || self.soon_us(path).is_some()).map(|path| path.tier).min()
    }

    /// Until when a path that is being opened is counted on.
    fn soon_us(&self, path: &Path) -> Option<u64> {
        let until_us = path.opened_us.saturating_add(self.config.open_time_limit_us);
        let opening = matches!(path.state, PathState::Opening | PathState::Trial);
        (opening && until_us > self.now_us).then_some(until_us)
    }

    fn is_worth_one_more(&self, slot: u32, route: Route, tier: u8) -> bool {
        let peer = &self.peers[slot];
        let paths = peer.paths.len() as u64;
        route.tier == tier
            && paths < u64::from(self.config.max_paths_per_peer)
            && peer.backlog_bytes() >= self.config.spread_bytes.saturating_mul(paths)
    }

    /// The route without a path that is to be tried first, if one may be tried now.
    fn due_route(&self, slot: u32) -> Option<Route> {
        let peer = &self.peers[slot];
        let front = peer.queues.iter().find_map(|queue| queue.front());
        let location = front.and_then(|&batch| self.batches[batch].ops.first()).map_or(0, |op| op.location);
        let free =
            peer.routes.iter().filter(|state| state.path.is_none() && state.retry_at_us <= self.now_us);
        let first = free.min_by_key(|state| {
            let rail = state.route.rail;
            let rank = self.config.rank(location, rail.index());
            (state.route.tier, state.fails, rank, self.rails[rail.index()].paths, rail)
        });
        first.map(|state| state.route)
    }

    /// Wakes the peer when a route that would serve it better has rested, or one takes long to open.
    fn arm_peer(&mut self, slot: u32) {
        let tier = self.served_tier(slot);
        let peer = &self.peers[slot];
        let rested = peer.routes.iter().filter(|state| {
            let better = tier.is_none_or(|tier| state.route.tier < tier);
            state.path.is_none() && better && state.retry_at_us > self.now_us
        });
        let soon = peer.paths.iter().filter_map(|&path| self.soon_us(&self.paths[path]));
        let at_us = rested.map(|state| state.retry_at_us).chain(soon).min();
        self.timers.set(Timer::Peer(slot), &mut self.peers[slot].timer_us, at_us);
    }

    /// Opens a path that would be good to have, where that takes none from others in use.
    fn open_extra(&mut self, slot: u32, route: Route, effects: &mut Vec<Effect>) {
        if !self.waiting.is_empty() {
            return;
        }
        if self.paths.len() < self.config.max_paths as usize {
            self.open(slot, route, effects);
        } else if self.closing == 0 {
            self.evict_idle(effects);
        }
    }

    fn open(&mut self, slot: u32, route: Route, effects: &mut Vec<Effect>) {
        let number = PathNumber(self.next_path);
        self.next_path = self.next_path.wrapping_add(1);
        let rail = &mut self.rails[route.rail.index()];
        rail.paths += 1;
        let path = self.paths.insert(Path::new(number, slot, route, rail, self.now_us));
        assert!(self.paths.len() <= self.config.max_paths as usize, "I9: paths");
        let other = self.path_slots.insert(number, path);
        assert!(other.is_none(), "the number of a path that stands is not given again");
        let peer = &mut self.peers[slot];
        peer.paths.push(path);
        peer.route_mut(route.rail).path = Some(path);
        let peer = peer.number;
        self.arm_peer(slot);
        effects.push(Effect::OpenPath { path: number, peer, rail: route.rail });
    }

    /// Gives paths to the peers in line, and makes room for those that remain.
    pub(super) fn serve_waiting(&mut self, effects: &mut Vec<Effect>) {
        while let Some(&slot) = self.waiting.front() {
            let peer = &self.peers[slot];
            let route = self.due_route(slot);
            let waits = peer.wants() && !peer.ended && self.served_tier(slot).is_none() && route.is_some();
            if waits && self.paths.len() >= self.config.max_paths as usize {
                break;
            }
            self.waiting.pop_front();
            self.peers[slot].waiting = false;
            match route {
                Some(route) if waits => self.open(slot, route, effects),
                _ => self.consider(slot, effects),
            }
        }
        if !self.waiting.is_empty() && core::mem::take(&mut self.look_for_room) {
            self.make_room(effects);
        }
    }

    fn make_room(&mut self, effects: &mut Vec<Effect>) {
        let draining = self.paths.iter().filter(|(_, path)| path.draining && path.state == PathState::Open);
        let mut coming = draining.count() + self.closing as usize;
        while coming < self.waiting.len() && (self.evict_idle(effects) || self.drain_one(effects)) {
            coming += 1;
        }
    }

    /// Closes one unused path, if there is one.
    fn evict_idle(&mut self, effects: &mut Vec<Effect>) -> bool {
        for _ in 0..2 {
            let after = self.path_slots.range(self.hand..).chain(self.path_slots.range(..self.hand));
            let order: Vec<(PathNumber, u32)> = after.map(|(&number, &slot)| (number, slot)).collect();
            for (number, slot) in order {
                if !self.is_idle(slot) || core::mem::take(&mut self.paths[slot].visited) {
                    continue;
                }
                self.hand = PathNumber(number.0.wrapping_add(1));
                self.stats.paths_evicted += 1;
                self.retire(slot, None, effects);
                return true;
            }
        }
        false
    }

    fn is_idle(&self, slot: u32) -> bool {
        let path = &self.paths[slot];
        path.state == PathState::Open && path.outstanding.is_empty() && !self.peers[path.peer].wants()
    }

    /// Drains the path that has been held longest, of those whose peer has had its turn or has others.
    fn drain_one(&mut self, effects: &mut Vec<Effect>) -> bool {
        let serving = || self.paths.iter().filter(|(_, path)| path.serves());
        let turn_ends = |path: &Path| match self.peers[path.peer].paths.len() {
            0 | 1 => path.opened_us.saturating_add(self.config.turn_us),
            _ => path.opened_us,
        };
        let Some((slot, ends_us)) =
            serving().map(|(slot, path)| (slot, turn_ends(path))).min_by_key(|&(slot, ends)| (ends, slot))
        else {
            return false;
        };
        if ends_us > self.now_us {
            self.timers.set(Timer::Turn, &mut self.turn_timer_us, Some(ends_us));
            return false;
        }
        self.paths[slot].draining = true;
        let peer = self.paths[slot].peer;
        if self.paths[slot].outstanding.is_empty() {
            self.stats.paths_evicted += 1;
            self.retire(slot, None, effects);
        }
        self.consider(peer, effects);
        true
    }

    pub(super) fn path_opened(&mut self, number: PathNumber, effects: &mut Vec<Effect>) -> bool {
        let Some(&slot) = self.path_slots.get(&number) else { return false };
        let path = &mut self.paths[slot];
        if path.state != PathState::Opening {
            return false;
        }
        self.stats.paths_opened += 1;
        (path.opened_us, path.alive_us, path.moved_us) = (self.now_us, self.now_us, self.now_us);
        path.state = PathState::Open;
        let (peer, rail) = (path.peer, path.rail);
        self.look_for_room = true;
        if self.peers[peer].ended {
            self.retire(slot, None, effects);
            return true;
        }
        if self.peers[peer].route_mut(rail).fails > 0 {
            self.paths[slot].state = PathState::Trial;
            self.probe(slot, effects);
            return true;
        }
        self.wake(peer, effects);
        self.consider(peer, effects);
        true
    }

    pub(super) fn path_open_failed(
        &mut self,
        number: PathNumber,
        fault: Fault,
        effects: &mut Vec<Effect>,
    ) -> bool {
        let Some(&slot) = self.path_slots.get(&number) else { return false };
        if self.paths[slot].state != PathState::Opening {
            return false;
        }
        self.stats.opens_failed += 1;
        let peer = self.paths[slot].peer;
        self.detach(slot);
        let path = self.remove_path(slot);
        self.blame(peer, path.rail, fault, true);
        if fault == Fault::Stale {
            self.end_peer(peer, effects);
        }
        self.give_up(peer, effects);
        self.consider(peer, effects);
        self.rest(peer);
        true
    }

    /// Takes a path from its peer's list and its route.
    pub(super) fn detach(&mut self, slot: u32) {
        let peer = &mut self.peers[self.paths[slot].peer];
        peer.paths.retain(|&other| other != slot);
        peer.route_mut(self.paths[slot].rail).path = None;
    }

    /// Forgets a path that has no batch in doubt.
    pub(super) fn remove_path(&mut self, slot: u32) -> Path {
        let mut path = self.paths.remove(slot);
        let is_empty = path.outstanding.is_empty() && path.probe.is_none();
        assert!(is_empty, "a path is forgotten when nothing is on its way over it");
        self.timers.set(Timer::Path(slot), &mut path.timer_us, None);
        let named = self.path_slots.remove(&path.number);
        assert!(named == Some(slot), "a path is found under its number");
        let rail = &mut self.rails[path.rail.index()];
        assert!(rail.paths > 0, "I9: a rail counts each of its paths");
        rail.paths -= 1;
        self.look_for_room = true;
        path
    }

    /// Asks a path for a sign of life.
    pub(super) fn probe(&mut self, slot: u32, effects: &mut Vec<Effect>) {
        self.stats.probes += 1;
        let (probe, ticket) = self.slices.insert(slot, 0, self.now_us, SliceContent::Probe);
        let path = &mut self.paths[slot];
        let due_us = self.now_us.saturating_add(self.config.probe_us);
        let before = path.probe.replace((probe, due_us));
        assert!(before.is_none(), "one probe at a time: an earlier one would never be taken off");
        let at_us = path.timer_us.map_or(due_us, |at| at.min(due_us));
        self.timers.set(Timer::Path(slot), &mut path.timer_us, Some(at_us));
        effects.push(Effect::Probe { path: path.number, ticket });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::bench::*;
    use crate::*;
    use alloc::collections::VecDeque;
    use alloc::vec;
    use baton_types::Rng;

    /// SIEVE as a plain list with an index for its hand. A new entry counts as used once.
    struct NaiveSieve {
        kept: Vec<(u32, bool)>,
        hand: usize,
        most: usize,
    }

    impl NaiveSieve {
        fn touch(&mut self, peer: u32) {
            if let Some(entry) = self.kept.iter_mut().find(|entry| entry.0 == peer) {
                entry.1 = true;
                return;
            }
            if self.kept.len() == self.most {
                while core::mem::take(&mut self.kept[self.hand].1) {
                    self.hand = (self.hand + 1) % self.most;
                }
                self.kept.remove(self.hand);
            }
            self.kept.push((peer, true));
        }
    }

    #[test]
    fn the_pool_keeps_the_paths_that_sieve_keeps() {
        for seed in 0..12 {
            let mut rng = Rng::new(seed);
            let most = 1 + rng.below(9) as usize;
            let config = MoverConfig { max_paths: most as u32, ..MoverConfig::default() };
            let mut bench = Bench::new(config, 24, &[0]);
            let mut naive = NaiveSieve { kept: Vec::new(), hand: 0, most };
            for batch in 0..600 {
                // Few peers are asked for often, as in life.
                let reach = 1 + rng.below(24);
                let peer = rng.below(reach) as u32;
                let orders = bench.submit(write(batch, peer, 1_000));
                let seen = bench.obey(orders);
                assert_eq!(ends(&seen), [(batch, "done", None, true)]);
                naive.touch(peer);
                let paths = bench.core.snapshot().paths;
                let kept: Vec<u32> = paths.iter().map(|path| path.peer.0).collect();
                let wanted: Vec<u32> = naive.kept.iter().map(|entry| entry.0).collect();
                assert_eq!(kept, wanted, "seed {seed}, batch {batch}, {most} paths");
            }
            assert!(bench.core.stats().paths_evicted > 50, "seed {seed}: {:?}", bench.core.stats());
        }
    }

    #[test]
    fn peers_with_endless_work_each_have_one_turn_in_every_round() {
        for (peers, max_paths) in [(2, 1), (7, 2), (9, 4)] {
            let rail = RailSpec { path_slices: 2, ..RailSpec::default() };
            let rails = vec![rail];
            let config = MoverConfig { max_paths, turn_us: 1_000, rails, ..MoverConfig::default() };
            let mut bench = Bench::new(config, peers, &[0]);
            let mut orders = VecDeque::new();
            for peer in 0..peers {
                orders.extend(bench.submit(write(u64::from(peer), peer, 1 << 30)));
            }
            let (mut moving, mut served) = (VecDeque::new(), Vec::new());
            while served.len() < 5 * peers as usize {
                while let Some(order) = orders.pop_front() {
                    served.extend(opens_to(core::slice::from_ref(&order)).iter().map(|open| open.0));
                    match order {
                        Effect::OpenPath { path, .. } => orders.extend(bench.opened(path)),
                        Effect::ClosePath { path } => orders.extend(bench.closed(path, PathEnd::Fenced)),
                        other => moving.extend(posts(&[other])),
                    }
                }
                bench.now_us += 100;
                let post = moving.pop_front().expect("there is always something on its way");
                orders.extend(bench.done(post));
            }
            // Within a round, of paths whose turns end together the one that is empty first goes first.
            for round in served.chunks_exact_mut(peers as usize) {
                round.sort_unstable();
                assert!(round.iter().copied().eq(0..peers), "{round:?}");
            }
            assert_eq!(ends(&orders.into_iter().collect::<Vec<_>>()), []);
        }
    }

    #[test]
    fn a_path_is_kept_for_its_turn_and_then_drained_to_the_last_slice() {
        let config = MoverConfig { max_paths: 1, turn_us: 700, slice_tries: 1, ..MoverConfig::default() };
        let mut bench = Bench::new(config, 2, &[0]);
        let path = opens(&bench.submit(write(1, 0, 1 << 30)))[0];
        let mut moving = posts(&bench.opened(path));
        assert_eq!(bench.submit(write(2, 1, 10)), []);
        assert_eq!(bench.core.stats().waiting_peers, 1);
        assert_eq!(bench.pass(699), []);
        assert_eq!(bench.core.snapshot().paths[0].state, "open");
        assert_eq!(bench.pass(1), []);
        assert_eq!(bench.core.snapshot().paths[0].state, "draining");
        let last = moving.pop().expect("more than one slice went");
        for post in moving {
            assert_eq!(bench.done(post), [], "nothing new goes on a path that drains");
        }
        assert_eq!(closes(&bench.done(last)), [path]);
        // Its peer has more to send, and stands at the end of the line.
        assert_eq!(bench.core.stats().waiting_peers, 2);
        assert_eq!(opens_to(&bench.closed(path, PathEnd::Fenced)), [(1, 0)]);
    }

    #[test]
    fn of_two_paths_one_is_given_up_before_the_turn_is_over() {
        let config = MoverConfig { max_paths: 2, turn_us: 1_000_000, ..rails(2) };
        let mut bench = Bench::new(config, 2, &[0, 0]);
        let first = opens(&bench.submit(write(1, 0, 1 << 30)))[0];
        let second = opens(&bench.opened(first))[0];
        bench.opened(second);
        bench.submit(write(2, 1, 10));
        let states: Vec<_> = bench.core.snapshot().paths.iter().map(|path| path.state).collect();
        assert_eq!(states, ["draining", "open"], "the one that was held longest goes");
    }

    #[test]
    fn who_no_longer_wants_a_path_is_passed_over_in_line() {
        let config = MoverConfig { max_paths: 1, ..MoverConfig::default() };
        let mut bench = Bench::new(config, 4, &[0]);
        let post = bench.start(write(0, 0, 1_000));
        for peer in 1..4 {
            assert_eq!(bench.submit(write(u64::from(peer), peer, 1_000)), []);
        }
        assert_eq!(ends(&bench.cancel(1)), [(1, "cancelled", None, true)]);
        bench.feed(Input::PeerEnded { peer: PeerNumber(2) });
        assert_eq!(closes(&bench.done(post)), [post.path]);
        assert_eq!(opens_to(&bench.closed(post.path, PathEnd::Fenced)), [(3, 0)]);
        assert_eq!(bench.core.stats().waiting_peers, 0);
    }

    /// A route's tier, failures, rank, paths on its rail, and until when it rests.
    type Standing = (u8, u32, u8, u32, u64);

    #[test]
    fn the_route_tried_first_is_of_the_best_tier_then_least_failed_nearest_and_emptiest() {
        let table: [(&str, [Standing; 2], Option<u8>); 8] = [
            ("all alike: the first", [(0, 0, 0, 0, 0), (0, 0, 0, 0, 0)], Some(0)),
            ("tier before failures", [(1, 0, 0, 0, 0), (0, 5, 9, 9, 0)], Some(1)),
            ("failures before rank", [(0, 1, 0, 0, 0), (0, 0, 9, 9, 0)], Some(1)),
            ("rank before paths", [(0, 0, 1, 0, 0), (0, 0, 0, 9, 0)], Some(1)),
            ("paths before number", [(0, 0, 0, 1, 0), (0, 0, 0, 0, 0)], Some(1)),
            ("one that rests is not tried", [(0, 0, 0, 0, 1_001), (1, 0, 0, 0, 0)], Some(1)),
            ("its rest is over now", [(0, 0, 0, 0, 1_000), (1, 0, 0, 0, 0)], Some(0)),
            ("all rest", [(0, 0, 0, 0, 1_001), (0, 0, 0, 0, 1_001)], None),
        ];
        for (what, routes, wanted) in table {
            let ranks = vec![routes.iter().map(|route| route.2).collect()];
            let mut bench = Bench::new(MoverConfig { ranks, ..rails(2) }, 1, &[0, 0]);
            // Its first path is lost, so that the batch waits in the queue.
            let path = opens(&bench.submit(write(1, 0, 10)))[0];
            bench.open_failed(path, Fault::Path);
            let core = &mut bench.core;
            for (rail, (tier, fails, _, paths, retry_at_us)) in routes.into_iter().enumerate() {
                let state = &mut core.peers[0].routes[rail];
                (state.route.tier, state.fails) = (tier, fails);
                (state.path, state.retry_at_us) = (None, retry_at_us);
                core.rails[rail].paths = paths;
            }
            assert_eq!(core.due_route(0).map(|route| route.rail.0), wanted, "{what}");
        }
    }

    #[test]
    fn one_more_path_is_opened_for_each_so_many_bytes_that_wait() {
        // Bytes that wait, the limit for one peer, and the paths that are opened in the end.
        for (bytes, limit, wanted) in [
            (9_999, 8, 1),
            (10_000, 8, 2),
            (19_999, 8, 2),
            (20_000, 8, 3),
            (30_000, 8, 4),
            (1 << 20, 3, 3),
            (1 << 20, 1, 1),
        ] {
            let config = MoverConfig { spread_bytes: 10_000, max_paths_per_peer: limit, ..rails(5) };
            let mut bench = Bench::new(config, 1, &[0, 0, 0, 0, 1]);
            let mut count = opens(&bench.submit(write(1, 0, bytes))).len();
            // Nothing is posted meanwhile, so no path stands yet. The loop asks until the core opens no further path.
            loop {
                let mut effects = Vec::new();
                bench.core.consider(0, &mut effects);
                count += effects.len();
                if effects.is_empty() {
                    break;
                }
            }
            let tiers: Vec<u8> = bench.core.paths.iter().map(|(_, path)| path.tier).collect();
            assert_eq!((count, tiers), (wanted, vec![0; wanted]), "{bytes} bytes, {limit} paths");
        }
    }

    #[test]
    fn another_tier_is_tried_when_the_better_one_takes_too_long_to_open() {
        let config = MoverConfig { open_time_limit_us: 300, ..rails(2) };
        let mut bench = Bench::new(config, 1, &[0, 1]);
        assert_eq!(opens_to(&bench.submit(write(1, 0, 1_000))), [(0, 0)]);
        assert_eq!(bench.pass(299), []);
        let effects = bench.pass(1);
        assert_eq!(opens_to(&effects), [(0, 1)]);
        let slow = posts(&bench.opened(opens(&effects)[0]))[0];
        // The better one opens after all, and takes what comes next.
        assert_eq!(bench.opened(PathNumber(0)), []);
        assert_eq!(posts(&bench.submit(write(2, 0, 1_000)))[0].path, PathNumber(0));
        assert_eq!(ends(&bench.done(slow)), [(1, "done", None, true)]);
    }

    #[test]
    fn what_is_good_to_have_takes_an_idle_path_but_none_while_others_wait() {
        let config = MoverConfig { max_paths: 2, spread_bytes: 1_000, turn_us: 1 << 40, ..rails(2) };
        let mut bench = Bench::new(config, 3, &[0, 0]);
        let orders = bench.submit(write(0, 1, 10));
        bench.obey(orders);
        let mut effects = bench.submit(write(1, 0, 1 << 30));
        let own = opens(&effects)[0];
        effects.extend(bench.opened(own));
        assert_eq!(closes(&effects), [PathNumber(0)], "the idle one makes room, once");
        bench.submit(write(2, 2, 10));
        let next = opens_to(&bench.closed(PathNumber(0), PathEnd::Fenced));
        assert_eq!(next, [(2, 0)], "who has none comes before who wants more");
    }

    #[test]
    fn a_path_that_opens_too_late_is_closed_at_once() {
        let mut bench = Bench::new(MoverConfig::default(), 1, &[0]);
        let path = opens(&bench.submit(write(1, 0, 1_000)))[0];
        let stale = Failure { stage: Stage::Connect, reason: Reason::Fault(Fault::Stale) };
        assert_eq!(
            ends(&bench.feed(Input::PeerEnded { peer: PeerNumber(0) })),
            [(1, "failed", Some(stale), true)]
        );
        assert_eq!(bench.opened(path), [Effect::ClosePath { path }]);
        assert_eq!(bench.closed(path, PathEnd::PeerUnknown), []);
        assert_eq!((bench.core.stats().paths, bench.core.peers[0].is_idle()), (0, true));
    }

    #[test]
    fn a_route_that_failed_is_on_trial_until_its_probe_is_answered() {
        for fault in [None, Some(Fault::Path), Some(Fault::Silent)] {
            let mut bench = Bench::new(MoverConfig::default(), 1, &[0]);
            let path = opens(&bench.submit(write(1, 0, 1_000)))[0];
            bench.open_failed(path, Fault::Path);
            let path = opens(&bench.pass(1_000_000))[0];
            let effects = bench.opened(path);
            let [ticket] = probes(&effects)[..] else { panic!("{effects:?}") };
            assert_eq!(posts(&bench.submit(write(2, 0, 1_000))), []);
            match fault {
                None => {
                    assert_eq!(posts(&bench.feed(Input::Notified { path, ticket })).len(), 2);
                    assert_eq!(bench.route(0, 0).0, 1, "proved by a slice only");
                }
                Some(fault) => {
                    assert_eq!(closes(&bench.failed(path, ticket, fault)), [path]);
                    assert_eq!(bench.route(0, 0).0, 2);
                }
            }
        }
    }
}
