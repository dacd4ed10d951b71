//! Which slice goes next, and over which path.

use alloc::vec::Vec;

use super::batch::{End, Phase};
use super::engine::MoverCore;
use super::path::blend;
use super::rail::CLASSES;
use super::slices::{Cargo, Slice};
use super::timers::Timer;
use super::{Effect, PathNumber, RailNumber, Ticket};

impl MoverCore {
    /// Posts all that may be posted, and opens what paths may be opened.
    pub(super) fn pump(&mut self, effects: &mut Vec<Effect>) {
        while self.in_bounds() {
            let Some(rail) = self.next_ready_rail() else { break };
            self.serve_rail(rail, effects);
        }
        self.serve_waiting(effects);
    }

    fn in_bounds(&self) -> bool {
        self.outstanding < self.config.max_slices
            && (self.outstanding_bytes < self.config.max_bytes || self.outstanding == 0)
    }

    /// The next rail, in turns, with work and room.
    fn next_ready_rail(&mut self) -> Option<usize> {
        let count = self.rails.len();
        let from = self.next_rail;
        let mut turns = (from..count).chain(0..from);
        let found = turns.find(|&rail| self.rails[rail].is_ready() && self.rails[rail].has_room())?;
        self.next_rail = (found + 1) % count;
        Some(found)
    }

    /// One turn of a rail: posts one slice, or finds that its peer must wait for something that will wake it:
    /// a completion or room on the path that is best for it, another rail, or a path.
    fn serve_rail(&mut self, rail: usize, effects: &mut Vec<Effect>) {
        let Some((class, peer)) = self.rails[rail].pop() else { return };
        #[expect(clippy::cast_possible_truncation, reason = "at most 64 rails")]
        let number = RailNumber(rail as u8);
        self.peers[peer].ready[class] &= !number.bit();
        let Some(&batch) = self.peers[peer].queues[class].front() else { return };
        let piece = self.batches[batch].next_piece().expect("a batch in a queue has something to post");
        let location = self.batches[batch].ops[piece.op as usize].location;
        let Some(path) = self.best_path(peer, u64::from(piece.bytes), location) else {
            return self.consider(peer, effects);
        };
        let on = self.paths[path].rail;
        if !self.paths[path].has_room(&self.rails[on.index()]) {
            return self.consider(peer, effects);
        }
        if on != number {
            return self.make_ready(peer, class, on);
        }
        self.post(peer, class, path, effects);
    }

    /// The path over which `bytes` would be there first. The preferred transport comes before all; within
    /// it, rails far from the memory count as slower.
    pub(super) fn best_path(&self, peer: u32, bytes: u64, location: u16) -> Option<u32> {
        let paths = &self.peers[peer].paths;
        let serving = paths.iter().copied().filter(|&path| self.paths[path].serves());
        serving.min_by_key(|&slot| {
            let path = &self.paths[slot];
            let rank = u64::from(self.config.rank(location, path.rail.index()));
            let penalty = 1_000 + rank * u64::from(self.config.rank_penalty_permille);
            let cost = path.predicted_ns(bytes, self.now_us).saturating_mul(penalty) / 1_000;
            (path.tier, cost, path.number)
        })
    }

    fn post(&mut self, peer: u32, class: usize, path: u32, effects: &mut Vec<Effect>) {
        let slot = self.peers[peer].queues[class].pop_front().expect("the caller saw it there");
        let batch = &mut self.batches[slot];
        let piece = batch.take_piece().expect("a batch in a queue has something to post");
        batch.queued = batch.unposted_bytes > 0;
        let (id, queued) = (batch.id, batch.queued);
        self.peers[peer].pending_bytes[class] -= u64::from(piece.bytes);
        if queued {
            self.peers[peer].queues[class].push_back(slot);
        }
        let ticket = self.put_on(path, Cargo::Data { batch: slot, piece });
        let on = self.paths[path].rail;
        self.rails[on.index()].charge(class, u64::from(piece.bytes), &self.weights);
        let path = self.paths[path].number;
        effects.push(Effect::Post {
            path,
            ticket,
            batch: id,
            op: piece.op,
            at: piece.at,
            bytes: piece.bytes,
        });
        if !self.peers[peer].queues[class].is_empty() {
            self.make_ready(peer, class, on);
        }
    }

    /// Books a slice or a notice as on its way.
    pub(super) fn put_on(&mut self, path_slot: u32, cargo: Cargo) -> Ticket {
        let path = &mut self.paths[path_slot];
        #[expect(clippy::cast_possible_truncation, reason = "bounded by path_slices")]
        let seat = path.outstanding.len() as u32;
        let (slot, ticket) = self.slices.insert(path_slot, seat, self.now_us, cargo);
        if seat == 0 {
            (path.alive_us, path.moved_us) = (self.now_us, self.now_us);
        }
        path.outstanding.push(slot);
        path.visited = true;
        if let Cargo::Data { batch, piece } = cargo {
            path.bytes += u64::from(piece.bytes);
            self.rails[path.rail.index()].bytes += u64::from(piece.bytes);
            self.outstanding_bytes += u64::from(piece.bytes);
            self.batches[batch].outstanding += 1;
        } else if let Cargo::Notice { batch } = cargo {
            self.batches[batch].outstanding += 1;
        }
        self.outstanding += 1;
        if path.timer_us.is_none() {
            let at_us = self.now_us.saturating_add(self.config.silent_us);
            self.timers.set(Timer::Path(path_slot), &mut path.timer_us, Some(at_us));
        }
        ticket
    }

    /// Takes a slice or a notice off its path.
    pub(super) fn take_off(&mut self, slot: u32) -> Slice {
        let slice = self.slices.remove(slot);
        let path = &mut self.paths[slice.path];
        path.outstanding.swap_remove(slice.seat as usize);
        if let Some(&moved) = path.outstanding.get(slice.seat as usize) {
            self.slices.reseat(moved, slice.seat);
        }
        path.bytes -= slice.bytes();
        self.rails[path.rail.index()].bytes -= slice.bytes();
        self.outstanding_bytes -= slice.bytes();
        self.outstanding -= 1;
        if let Cargo::Data { batch, .. } | Cargo::Notice { batch } = slice.cargo {
            self.batches[batch].outstanding -= 1;
        }
        slice
    }

    /// The slot of what is outstanding under a ticket on that very path.
    pub(super) fn find(&self, path: PathNumber, ticket: Ticket) -> Option<u32> {
        let slot = self.slices.find(ticket)?;
        (self.paths[self.slices.get(slot).path].number == path).then_some(slot)
    }

    /// A slice, a notice or a probe ended well.
    pub(super) fn ended_well(&mut self, path: PathNumber, ticket: Ticket, effects: &mut Vec<Effect>) -> bool {
        let Some(slot) = self.find(path, ticket) else { return false };
        if self.slices.get(slot).cargo == Cargo::Probe {
            self.answered(slot, effects);
            return true;
        }
        let slice = self.take_off(slot);
        self.learn(&slice);
        match slice.cargo {
            Cargo::Data { batch, piece } => {
                self.stats.moved_slices += 1;
                self.stats.moved_bytes += u64::from(piece.bytes);
                self.batches[batch].done_bytes += u64::from(piece.bytes);
                self.settle(batch, effects);
            }
            Cargo::Notice { batch } => {
                if self.batches[batch].phase == Phase::Noticed {
                    self.batches[batch].phase = Phase::Ending(End::Done);
                }
                self.settle(batch, effects);
            }
            Cargo::Probe => {}
        }
        self.moved_on(slice.path, effects);
        true
    }

    /// What a good end says of its path.
    fn learn(&mut self, slice: &Slice) {
        let path = &mut self.paths[slice.path];
        if slice.bytes() > 0 {
            let rail = &mut self.rails[path.rail.index()];
            path.measure(slice.bytes(), slice.posted_us, self.now_us, &rail.spec);
            rail.ns_per_mib = blend(rail.ns_per_mib, path.ns_per_mib).max(1);
            rail.latency_us = blend(rail.latency_us, path.latency_us);
        }
        (path.alive_us, path.moved_us) = (self.now_us, self.now_us);
        if !core::mem::replace(&mut path.proved, true) {
            let rail = path.rail;
            if let Some(route) = self.peers[path.peer].route_mut(rail) {
                route.fails = 0;
            }
        }
    }

    /// A path has room for one more: closes it if it only waited to be empty, else wakes its peer.
    pub(super) fn moved_on(&mut self, slot: u32, effects: &mut Vec<Effect>) {
        let path = &self.paths[slot];
        let peer = path.peer;
        if path.draining && path.outstanding.is_empty() {
            self.stats.paths_evicted += 1;
            self.retire(slot, None, effects);
        }
        self.wake(peer, effects);
    }

    /// Puts a peer's work before the rails of its paths.
    pub(super) fn wake(&mut self, peer: u32, effects: &mut Vec<Effect>) {
        for class in 0..CLASSES {
            if self.peers[peer].queues[class].is_empty() {
                continue;
            }
            for at in 0..self.peers[peer].paths.len() {
                let path = &self.paths[self.peers[peer].paths[at]];
                if path.serves() {
                    self.make_ready(peer, class, path.rail);
                }
            }
        }
        if !self.peers[peer].notices.is_empty() {
            self.send_notices(peer, effects);
        }
    }

    fn make_ready(&mut self, peer: u32, class: usize, rail: RailNumber) {
        let ready = &mut self.peers[peer].ready[class];
        if *ready & rail.bit() == 0 {
            *ready |= rail.bit();
            self.rails[rail.index()].push(class, peer);
        }
    }

    /// A full path did not take a slice: it stays to be posted.
    pub(super) fn path_refused(
        &mut self,
        path: PathNumber,
        ticket: Ticket,
        effects: &mut Vec<Effect>,
    ) -> bool {
        let Some(slot) = self.find(path, ticket) else { return false };
        let Cargo::Data { batch, mut piece } = self.slices.get(slot).cargo else { return false };
        let slice = self.take_off(slot);
        self.paths[slice.path].full = true;
        self.stats.refused_slices += 1;
        piece.tries -= 1;
        if self.batches[batch].phase == Phase::Moving {
            self.batches[batch].put_back(piece);
            self.enqueue(batch, u64::from(piece.bytes));
        }
        self.settle(batch, effects);
        true
    }

    /// A full path takes slices again.
    pub(super) fn path_room(&mut self, number: PathNumber, effects: &mut Vec<Effect>) -> bool {
        let Some(&slot) = self.path_slots.get(&number) else { return false };
        self.paths[slot].full = false;
        self.wake(self.paths[slot].peer, effects);
        true
    }
}
