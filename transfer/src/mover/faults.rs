//! What breaks, and what then becomes of what was on its way.

use alloc::vec::Vec;

use super::batch::{End, Phase, Piece};
use super::engine::MoverCore;
use super::path::PathState;
use super::slices::Cargo;
use super::timers::Timer;
use super::{Effect, Failure, Fault, PathEnd, PathNumber, RailNumber, Reason, Stage, Ticket};

impl MoverCore {
    /// Ends a path: what is on its way is in doubt, and is to be posted again. With a fault its route rests
    /// before it is opened again.
    pub(super) fn retire(&mut self, slot: u32, fault: Option<Fault>, effects: &mut Vec<Effect>) {
        let path = &mut self.paths[slot];
        let (number, peer, rail) = (path.number, path.peer, path.rail);
        path.state = PathState::Closing;
        self.timers.set(Timer::Path(slot), &mut path.timer_us, None);
        if let Some((probe, _)) = path.probe.take() {
            self.slices.remove(probe);
        }
        effects.push(Effect::ClosePath { path: number });
        self.closing += 1;
        self.detach(slot);
        self.peers[peer].closing += 1;
        if let Some(fault) = fault {
            self.stats.paths_broken += 1;
            self.blame(peer, rail, fault, false);
        }
        while let Some(&slice) = self.paths[slot].outstanding.last() {
            self.orphan(slice, fault.unwrap_or(Fault::Path), effects);
        }
        self.give_up(peer, effects);
        self.wake(peer, effects);
        self.consider(peer, effects);
    }

    /// One slice of a path that has ended: its batch is in doubt until the path has closed.
    fn orphan(&mut self, slot: u32, fault: Fault, effects: &mut Vec<Effect>) {
        let slice = self.take_off(slot);
        match slice.cargo {
            Cargo::Data { batch, piece } => {
                let path = &mut self.paths[slice.path];
                let writes = self.batches[batch].writes(piece.op);
                let doubts = &mut self.batches[batch].doubts;
                match doubts.get_mut(&path.number) {
                    Some(wrote) => *wrote |= writes,
                    None => {
                        doubts.insert(path.number, writes);
                        path.doubtful.push(batch);
                    }
                }
                self.repeat(batch, piece, fault, effects);
            }
            Cargo::Notice { batch } => {
                let failure = Failure { stage: Stage::Notify, reason: Reason::Fault(fault) };
                self.begin_end(batch, End::Failed(failure), effects);
                self.settle_if_live(batch, effects);
            }
            Cargo::Probe => {}
        }
    }

    /// Lets a piece go again, if that is worth it.
    fn repeat(&mut self, batch: u32, piece: Piece, fault: Fault, effects: &mut Vec<Effect>) {
        if self.batches[batch].phase != Phase::Moving {
            return;
        }
        if piece.tries >= self.config.slice_tries {
            let failure = Failure { stage: Stage::Move, reason: Reason::Fault(fault) };
            return self.begin_end(batch, End::Failed(failure), effects);
        }
        self.stats.repeated_slices += 1;
        self.batches[batch].put_back(piece);
        self.enqueue(batch, u64::from(piece.bytes));
    }

    /// After `begin_end`, which does nothing to a batch that was ending before.
    fn settle_if_live(&mut self, slot: u32, effects: &mut Vec<Effect>) {
        if self.batches.get(slot).is_some() {
            self.settle(slot, effects);
        }
    }

    /// Books a failure of a route, which then rests: longer each time, and not all peers' for equally long.
    pub(super) fn blame(&mut self, peer: u32, rail: RailNumber, fault: Fault, opening: bool) {
        let (least_us, most_us) = (self.config.backoff_min_us, self.config.backoff_max_us);
        let tries = self.config.route_tries;
        let peer = &mut self.peers[peer];
        peer.last_fault = fault;
        let Some(route) = peer.route_mut(rail) else { return };
        route.fails = route.fails.saturating_add(1);
        let mut rest_us = least_us.saturating_mul(1 << (route.fails - 1).min(32)).min(most_us);
        if opening && fault == Fault::Invalid {
            // The two do not fit together, which does not change soon.
            route.fails = route.fails.max(tries);
            rest_us = most_us;
        }
        let jitter_us = self.rng.below(rest_us / 2 + 1);
        route.retry_at_us = self.now_us.saturating_add(rest_us - rest_us / 4 + jitter_us);
    }

    /// Fails what waits for a peer that cannot be reached.
    pub(super) fn give_up(&mut self, slot: u32, effects: &mut Vec<Effect>) {
        let peer = &self.peers[slot];
        let tries = self.config.route_tries;
        if !peer.paths.is_empty() || peer.routes.iter().any(|state| state.fails < tries) {
            return;
        }
        let failure = Failure { stage: Stage::Connect, reason: Reason::Fault(peer.last_fault) };
        self.fail_all(slot, failure, effects);
    }

    /// A life of a peer is over.
    pub(super) fn end_peer(&mut self, slot: u32, effects: &mut Vec<Effect>) {
        self.peers[slot].ended = true;
        let failure = Failure { stage: Stage::Connect, reason: Reason::Fault(Fault::Stale) };
        self.fail_all(slot, failure, effects);
        for path in self.peers[slot].paths.clone() {
            if self.paths[path].state != PathState::Opening {
                self.retire(path, None, effects);
            }
        }
    }

    fn fail_all(&mut self, peer: u32, failure: Failure, effects: &mut Vec<Effect>) {
        // All at once, for taking them out one by one would look through the queue for each.
        for queue in &mut self.peers[peer].queues {
            queue.drain(..).for_each(|batch| self.batches[batch].queued = false);
        }
        let batches: Vec<u32> = self.peers[peer].batches.iter().copied().collect();
        for batch in batches {
            self.begin_end(batch, End::Failed(failure), effects);
        }
    }

    /// A slice, a notice or a probe failed.
    pub(super) fn failed(
        &mut self,
        (path, ticket): (PathNumber, Ticket),
        fault: Fault,
        effects: &mut Vec<Effect>,
    ) -> bool {
        let Some(slot) = self.find(path, ticket) else { return false };
        let (path, cargo) = (self.slices.get(slot).path, self.slices.get(slot).cargo);
        match (cargo, fault) {
            // Refused: nothing of it lands any more, and nothing is wrong with the path.
            (Cargo::Data { batch, .. }, Fault::Stale | Fault::Invalid) => {
                self.refused((slot, batch), Stage::Move, fault, effects);
            }
            (Cargo::Notice { batch }, Fault::Stale | Fault::Invalid) => {
                self.refused((slot, batch), Stage::Notify, fault, effects);
            }
            (Cargo::Data { batch, piece }, Fault::Corrupt) => {
                self.stats.damaged_slices += 1;
                if piece.damaged {
                    let failure = Failure { stage: Stage::Move, reason: Reason::Fault(fault) };
                    self.begin_end(batch, End::Failed(failure), effects);
                }
                self.slices.mark_damaged(slot);
                self.retire(path, Some(fault), effects);
            }
            _ => self.retire(path, Some(fault), effects),
        }
        true
    }

    fn refused(&mut self, (slot, batch): (u32, u32), stage: Stage, fault: Fault, effects: &mut Vec<Effect>) {
        let slice = self.take_off(slot);
        self.paths[slice.path].alive_us = self.now_us;
        self.paths[slice.path].moved_us = self.now_us;
        let ending = matches!(self.batches[batch].phase, Phase::Ending(_));
        if ending {
            self.settle(batch, effects);
        } else {
            self.begin_end(batch, End::Failed(Failure { stage, reason: Reason::Fault(fault) }), effects);
        }
        self.moved_on(slice.path, effects);
    }

    pub(super) fn path_broken(
        &mut self,
        number: PathNumber,
        fault: Fault,
        effects: &mut Vec<Effect>,
    ) -> bool {
        let Some(&slot) = self.path_slots.get(&number) else { return false };
        if !matches!(self.paths[slot].state, PathState::Open | PathState::Trial) {
            return false;
        }
        let peer = self.paths[slot].peer;
        if fault == Fault::Stale {
            self.end_peer(peer, effects);
        } else {
            self.retire(slot, Some(fault), effects);
        }
        true
    }

    /// The last of a path: what it held in doubt is so no more, or will be for ever.
    pub(super) fn path_closed(
        &mut self,
        number: PathNumber,
        end: PathEnd,
        effects: &mut Vec<Effect>,
    ) -> bool {
        let Some(&slot) = self.path_slots.get(&number) else { return false };
        match self.paths[slot].state {
            PathState::Opening => return false,
            PathState::Open | PathState::Trial => self.retire(slot, Some(Fault::Path), effects),
            PathState::Closing => {}
        }
        let path = self.remove_path(slot);
        self.closing -= 1;
        self.peers[path.peer].closing -= 1;
        for batch in path.doubtful {
            let wrote = self.batches[batch].doubts.remove(&number).unwrap_or(false);
            if wrote && end == PathEnd::PeerUnknown {
                self.batches[batch].remote_fenced = false;
                let failure = Failure { stage: Stage::Fence, reason: Reason::PeerUnknown };
                self.begin_end(batch, End::Failed(failure), effects);
            }
            self.settle_if_live(batch, effects);
        }
        self.rest(path.peer);
        self.consider(path.peer, effects);
        true
    }

    /// A probe was answered.
    pub(super) fn answered(&mut self, slot: u32, effects: &mut Vec<Effect>) {
        let slice = self.slices.remove(slot);
        let path = &mut self.paths[slice.path];
        path.probe = None;
        path.alive_us = self.now_us;
        if path.state == PathState::Trial {
            path.state = PathState::Open;
            let peer = path.peer;
            self.wake(peer, effects);
            self.consider(peer, effects);
        }
    }

    /// Looks after a path: probes it when it is silent, and ends it when it stays so.
    pub(super) fn path_due(&mut self, slot: u32, effects: &mut Vec<Effect>) {
        let (now_us, config) = (self.now_us, &self.config);
        let path = &mut self.paths[slot];
        let busy = !path.outstanding.is_empty();
        let unanswered = path.probe.is_some_and(|(_, due_us)| due_us <= now_us);
        if unanswered || (busy && now_us - path.moved_us >= config.stuck_us) {
            return self.retire(slot, Some(Fault::Silent), effects);
        }
        if !busy && core::mem::take(&mut path.full) {
            // Its word that it has room may have been lost; being refused again costs little.
            let peer = path.peer;
            self.wake(peer, effects);
        } else if busy && path.probe.is_none() && now_us - path.alive_us >= config.silent_us {
            self.probe(slot, effects);
        }
        self.arm_path(slot);
    }

    fn arm_path(&mut self, slot: u32) {
        let path = &mut self.paths[slot];
        let mut at_us = path.probe.map(|(_, due_us)| due_us);
        if !path.outstanding.is_empty() {
            let stuck_us = path.moved_us.saturating_add(self.config.stuck_us);
            let silent_us = path.alive_us.saturating_add(self.config.silent_us);
            let next_us = if path.probe.is_some() { stuck_us } else { stuck_us.min(silent_us) };
            at_us = Some(at_us.map_or(next_us, |at| at.min(next_us)));
        }
        self.timers.set(Timer::Path(slot), &mut path.timer_us, at_us);
    }
}
