//! The pool of paths: who gets one, and whose is taken.
//!
//! There may be many more peers than paths. A peer with work and no path stands in line. Room is made by
//! closing a path that nobody uses, found as SIEVE does (a hand goes from old to new, and spares once what was
//! used since it last passed); where all are in use, one that its peer has held for a turn is drained, and
//! its peer, if it has more to send, goes to the end of the line. So each in line is served after a bounded
//! number of turns.

use alloc::vec::Vec;

use super::engine::MoverCore;
use super::path::{Path, PathState};
use super::slices::Cargo;
use super::timers::Timer;
use super::{Effect, Fault, PathNumber, Route};

impl MoverCore {
    /// Looks whether a peer with work has the paths that it should have.
    pub(super) fn consider(&mut self, slot: u32, effects: &mut Vec<Effect>) {
        let peer = &self.peers[slot];
        if peer.ended || !peer.wants() {
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
        let until_us = path.opened_us.saturating_add(self.config.open_patience_us);
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
        self.path_slots.insert(number, path);
        let peer = &mut self.peers[slot];
        peer.paths.push(path);
        peer.route_mut(route.rail).expect("the route was found there").path = Some(path);
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

    /// Closes one path that nobody uses, unless there is none.
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
        if self.peers[peer].route_mut(rail).is_some_and(|route| route.fails > 0) {
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
        if let Some(route) = peer.route_mut(self.paths[slot].rail) {
            route.path = None;
        }
    }

    /// Forgets a path that has no batch in doubt.
    pub(super) fn remove_path(&mut self, slot: u32) -> Path {
        let mut path = self.paths.remove(slot);
        self.timers.set(Timer::Path(slot), &mut path.timer_us, None);
        self.path_slots.remove(&path.number);
        self.rails[path.rail.index()].paths -= 1;
        self.look_for_room = true;
        path
    }

    /// Asks a path for a sign of life.
    pub(super) fn probe(&mut self, slot: u32, effects: &mut Vec<Effect>) {
        self.stats.probes += 1;
        let (probe, ticket) = self.slices.insert(slot, 0, self.now_us, Cargo::Probe);
        let path = &mut self.paths[slot];
        let due_us = self.now_us.saturating_add(self.config.probe_us);
        path.probe = Some((probe, due_us));
        let at_us = path.timer_us.map_or(due_us, |at| at.min(due_us));
        self.timers.set(Timer::Path(slot), &mut path.timer_us, Some(at_us));
        effects.push(Effect::Probe { path: path.number, ticket });
    }
}
