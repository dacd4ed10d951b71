//! How batches end: exactly once, and not before nothing of them can land any more.

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use super::batch::{Batch, End, Phase};
use super::engine::MoverCore;
use super::slices::Cargo;
use super::timers::Timer;
use super::{Effect, Failure, Reason, Stage};

impl MoverCore {
    /// Puts a batch with `fresh_bytes` more to post into its peer's queue.
    pub(super) fn enqueue(&mut self, slot: u32, fresh_bytes: u64) {
        let batch = &mut self.batches[slot];
        let (peer, class) = (&mut self.peers[batch.peer], batch.priority.index());
        peer.pending_bytes[class] += fresh_bytes;
        if !batch.queued && batch.unposted_bytes > 0 {
            batch.queued = true;
            peer.queues[class].push_back(slot);
        }
    }

    /// Ends a batch if nothing holds it any more, or lets its notice go.
    pub(super) fn settle(&mut self, slot: u32, effects: &mut Vec<Effect>) {
        let batch = &mut self.batches[slot];
        if batch.outstanding > 0 || !batch.doubts.is_empty() {
            return;
        }
        match batch.phase {
            Phase::Moving if batch.done_bytes < batch.bytes => {}
            Phase::Moving if batch.notice => {
                batch.phase = Phase::Noticing;
                let peer = batch.peer;
                self.peers[peer].notices.push_back(slot);
                self.send_notices(peer, effects);
            }
            Phase::Moving => self.finish(slot, End::Done, effects),
            Phase::Noticing | Phase::Noticed => {}
            Phase::Ending(end) => self.finish(slot, end, effects),
        }
    }

    /// Sends what notices of a peer can go now.
    pub(super) fn send_notices(&mut self, peer: u32, effects: &mut Vec<Effect>) {
        while let Some(&slot) = self.peers[peer].notices.front() {
            let Some(path) = self.best_path(peer, 0, 0) else {
                self.consider(peer, effects);
                return;
            };
            if !self.paths[path].has_room(&self.rails[self.paths[path].rail.index()]) {
                return;
            }
            self.peers[peer].notices.pop_front();
            self.batches[slot].phase = Phase::Noticed;
            self.stats.notices += 1;
            let ticket = self.put_on(path, Cargo::Notice { batch: slot });
            let (path, batch) = (self.paths[path].number, self.batches[slot].id);
            effects.push(Effect::Notify { path, ticket, batch });
        }
    }

    /// Posts nothing more of a batch; it ends so when nothing of it is on its way. Does nothing to one that
    /// is ending already.
    pub(super) fn begin_end(&mut self, slot: u32, end: End, effects: &mut Vec<Effect>) {
        let batch = &mut self.batches[slot];
        if matches!(batch.phase, Phase::Ending(_)) {
            return;
        }
        let (peer, class) = (&mut self.peers[batch.peer], batch.priority.index());
        peer.pending_bytes[class] -= batch.unposted_bytes;
        if core::mem::take(&mut batch.queued) {
            leave(&mut peer.queues[class], slot);
        }
        if batch.phase == Phase::Noticing {
            leave(&mut peer.notices, slot);
        }
        batch.drop_unposted();
        batch.phase = Phase::Ending(end);
        let grace_us = self.now_us.saturating_add(self.config.grace_us);
        let at_us = (batch.outstanding > 0).then_some(grace_us);
        self.timers.set(Timer::Batch(slot), &mut batch.timer_us, at_us);
        self.settle(slot, effects);
    }

    /// The deadline of a batch, or the end of its grace: then the paths that still hold slices of it close.
    pub(super) fn batch_due(&mut self, slot: u32, effects: &mut Vec<Effect>) {
        if !matches!(self.batches[slot].phase, Phase::Ending(_)) {
            return self.late(slot, effects);
        }
        let holds = |slice: &u32| match self.slices.get(*slice).cargo {
            Cargo::Data { batch, .. } | Cargo::Notice { batch } => batch == slot,
            Cargo::Probe => false,
        };
        let paths = self.peers[self.batches[slot].peer].paths.iter();
        let paths: Vec<u32> =
            paths.copied().filter(|&path| self.paths[path].outstanding.iter().any(holds)).collect();
        for path in paths {
            self.retire(path, None, effects);
        }
    }

    /// Fails a batch whose time is over.
    pub(super) fn late(&mut self, slot: u32, effects: &mut Vec<Effect>) {
        let batch = &self.batches[slot];
        let reached = batch.outstanding > 0
            || batch.done_bytes > 0
            || self.peers[batch.peer].paths.iter().any(|&path| self.paths[path].serves());
        let stage = match batch.phase {
            Phase::Noticing | Phase::Noticed => Stage::Notify,
            _ if batch.done_bytes == batch.bytes => Stage::Fence,
            _ if reached => Stage::Move,
            _ => Stage::Connect,
        };
        self.begin_end(slot, End::Failed(Failure { stage, reason: Reason::Deadline }), effects);
    }

    fn finish(&mut self, slot: u32, end: End, effects: &mut Vec<Effect>) {
        let mut batch = self.batches.remove(slot);
        self.timers.set(Timer::Batch(slot), &mut batch.timer_us, None);
        self.batch_slots.remove(&batch.id);
        self.ops -= batch.ops.len() as u64;
        self.stats.unfenced += u64::from(!batch.remote_fenced);
        effects.push(self.told(&batch, end));
        let peer = &mut self.peers[batch.peer];
        peer.batches.remove(&slot);
        self.rest(batch.peer);
    }

    fn told(&mut self, batch: &Batch, end: End) -> Effect {
        let (id, remote_fenced) = (batch.id, batch.remote_fenced);
        match end {
            End::Done => {
                self.stats.done += 1;
                let took_us = self.now_us - batch.submitted_us;
                Effect::Done { batch: id, bytes: batch.bytes, took_us }
            }
            End::Failed(failure) => {
                self.stats.failed += 1;
                Effect::Failed { batch: id, failure, remote_fenced }
            }
            End::Cancelled => {
                self.stats.cancelled += 1;
                Effect::Cancelled { batch: id, remote_fenced }
            }
        }
    }

    /// Puts a peer that has nothing to do among those that may be forgotten.
    pub(super) fn rest(&mut self, slot: u32) {
        let peer = &mut self.peers[slot];
        if peer.is_idle() {
            self.idle_peers.remove(&(peer.used_us, slot));
            peer.used_us = self.now_us;
            self.idle_peers.insert((self.now_us, slot));
        } else if !peer.wants() {
            // Its paths are free for others now.
            self.look_for_room = true;
        }
    }
}

/// Takes a slot out of a queue; it is mostly near the front.
fn leave(queue: &mut VecDeque<u32>, slot: u32) {
    if let Some(at) = queue.iter().position(|&other| other == slot) {
        queue.remove(at);
    }
}
