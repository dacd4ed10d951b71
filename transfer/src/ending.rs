//! Ends of batches. Each batch ends exactly once, and only when no byte of it can land later.

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use crate::batch::{Batch, End, Phase};
use crate::engine::MoverCore;
use crate::slices::SliceContent;
use crate::timers::Timer;
use crate::{Effect, Failure, Reason, Stage};

impl MoverCore {
    /// Puts a batch with `fresh_bytes` more to post into its peer's queue.
    pub(super) fn enqueue(&mut self, slot: u32, fresh_bytes: u64) {
        let batch = &mut self.batches[slot];
        assert!(batch.phase == Phase::Moving, "a batch that is ending posts nothing more");
        let (peer, class) = (&mut self.peers[batch.peer], batch.priority.index());
        peer.pending_bytes[class] += fresh_bytes;
        if !batch.queued && batch.unposted_bytes > 0 {
            batch.queued = true;
            peer.queues[class].push_back(slot);
        }
    }

    /// Ends a batch if nothing holds it, or posts its notice.
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
            let phase = core::mem::replace(&mut self.batches[slot].phase, Phase::Noticed);
            assert!(phase == Phase::Noticing, "a notice is sent once");
            self.stats.notices += 1;
            let ticket = self.start_on_path(path, SliceContent::Notice { batch: slot });
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
        assert!(batch.unposted_bytes <= peer.pending_bytes[class], "I7: bytes that a peer waits for");
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
        let holds = |slice: &u32| match self.slices.get(*slice).content {
            SliceContent::Data { batch, .. } | SliceContent::Notice { batch } => batch == slot,
            SliceContent::Probe => false,
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
        let held = batch.outstanding > 0 || !batch.doubts.is_empty();
        assert!(!held, "I5: a batch ends when nothing of it can land here any more");
        assert!(!batch.queued, "a batch that ends stands in no queue");
        self.timers.set(Timer::Batch(slot), &mut batch.timer_us, None);
        let named = self.batch_slots.remove(&batch.id);
        assert!(named == Some(slot), "I5: a batch that ends is found under its name");
        assert!(batch.ops.len() as u64 <= self.ops, "I9: the ops of every batch are counted");
        self.ops -= batch.ops.len() as u64;
        self.stats.unfenced += u64::from(!batch.remote_fenced);
        effects.push(self.end_effect(&batch, end));
        let peer = &mut self.peers[batch.peer];
        let known = peer.batches.remove(&slot);
        assert!(known, "a batch that ends is among its peer's");
        self.rest(batch.peer);
    }

    fn end_effect(&mut self, batch: &Batch, end: End) -> Effect {
        let (id, remote_fenced) = (batch.id, batch.remote_fenced);
        match end {
            End::Done => {
                assert!(batch.done_bytes == batch.bytes, "I7: a batch is done when every byte is in place");
                assert!(remote_fenced, "a batch is done when nothing of it can land at the peer either");
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
    let at = queue.iter().position(|&other| other == slot);
    queue.remove(at.expect("a batch that says it is in a queue stands there"));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::bench::*;
    use crate::*;
    use alloc::vec;

    const CLOSED: [PathEnd; 2] = [PathEnd::Fenced, PathEnd::PeerUnknown];

    fn failure(stage: Stage, reason: Reason) -> Option<Failure> {
        Some(Failure { stage, reason })
    }

    fn with_notice(batch: u64, bytes: u64) -> BatchRequest {
        BatchRequest { notice: true, ..write(batch, 0, bytes) }
    }

    fn read(batch: u64, bytes: u64) -> BatchRequest {
        let op = Op { direction: Direction::Read, bytes, location: 0 };
        BatchRequest { ops: vec![op], ..write(batch, 0, bytes) }
    }

    /// A batch that is at each of its stages when its time is over.
    fn at_stage(stage: &str) -> Bench {
        // Time limits so long that only the batch's own matters.
        let far_us = 1 << 50;
        let time_limit =
            MoverConfig { silent_us: far_us, stuck_us: far_us, batch_limit_us: 5_000, ..rails(2) };
        let mut bench = Bench::new(time_limit, 1, &[0, 0]);
        let notice = stage.contains("notice");
        let path = opens(&bench.submit(BatchRequest { notice, ..write(1, 0, 100_000) }))[0];
        if stage == "no path" {
            return bench;
        }
        let moving = posts(&bench.opened(path));
        match stage {
            "moving" => {}
            "some moved, then no path" => {
                bench.done(moving[0]);
                let again = opens(&bench.broken(path, Fault::Path))[0];
                bench.open_failed(again, Fault::Path);
            }
            "all moved, in doubt" => {
                let again = opens(&bench.broken(path, Fault::Path))[0];
                let effects = bench.opened(again);
                posts(&effects).into_iter().for_each(|post| drop(bench.done(post)));
            }
            "notice sent" => moving.into_iter().for_each(|post| drop(bench.done(post))),
            "notice waits" => {
                bench.done(moving[0]);
                bench.core.paths[0].draining = true;
                bench.done(moving[1]);
            }
            other => panic!("{other}"),
        }
        bench
    }

    #[test]
    fn a_deadline_names_the_stage_at_which_it_found_the_batch() {
        for (what, stage) in [
            ("no path", Stage::Connect),
            ("moving", Stage::Move),
            ("some moved, then no path", Stage::Move),
            ("all moved, in doubt", Stage::Fence),
            ("notice sent", Stage::Notify),
            ("notice waits", Stage::Notify),
        ] {
            let mut bench = at_stage(what);
            assert_eq!(ends(&bench.pass(4_999)), [], "{what}");
            // Where slices are still out, their paths are closed when the grace is over.
            let mut effects = bench.pass(1_000_001);
            for path in bench.core.snapshot().paths.iter().filter(|path| path.state == "closing") {
                effects.extend(bench.closed(path.path, PathEnd::Fenced));
            }
            assert_eq!(ends(&effects), [(1, "failed", failure(stage, Reason::Deadline), true)], "{what}");
        }
    }

    #[test]
    fn the_earlier_of_deadline_and_limit_counts_to_the_microsecond() {
        let config = MoverConfig { batch_limit_us: 700, ..MoverConfig::default() };
        for (deadline_us, after_us) in
            [(None, 700), (Some(1_300), 300), (Some(1_700), 700), (Some(u64::MAX), 700), (Some(1_001), 1)]
        {
            let mut bench = Bench::new(config.clone(), 1, &[0]);
            bench.submit(BatchRequest { deadline_us, ..write(1, 0, 10) });
            assert_eq!(ends(&bench.pass(after_us - 1)), [], "{deadline_us:?}");
            let late = failure(Stage::Connect, Reason::Deadline);
            assert_eq!(ends(&bench.pass(1)), [(1, "failed", late, true)], "{deadline_us:?}");
        }
        let mut bench = Bench::new(config, 1, &[0]);
        for deadline_us in [0, 999, 1_000] {
            let effects = bench.submit(BatchRequest { deadline_us: Some(deadline_us), ..write(1, 0, 10) });
            assert_eq!((effects.len(), ends(&effects).len()), (1, 1), "it fails at once, and opens nothing");
        }
    }

    #[test]
    fn the_first_end_stands_and_later_ones_change_nothing() {
        type Happening = (&'static str, fn(&mut Bench) -> Vec<Effect>);
        let first: [(Happening, &str); 3] = [
            (("cancelled", |bench| bench.cancel(1)), "cancelled"),
            (("deadline", |bench| bench.pass(60_000_000 - 1_000)), "failed"),
            (("peer ended", |bench| bench.feed(Input::PeerEnded { peer: PeerNumber(0) })), "failed"),
        ];
        let time_limit = MoverConfig {
            silent_us: 1 << 50,
            stuck_us: 1 << 50,
            grace_us: 10_000,
            batch_limit_us: 60_000_000 - 1_000,
            ..MoverConfig::default()
        };
        for ((what, happens), how) in first {
            for (next, follows) in first.map(|(happening, _)| happening) {
                let (mut bench, post) = Bench::moving(time_limit.clone());
                let mut effects = happens(&mut bench);
                effects.extend(follows(&mut bench));
                for path in closes(&effects) {
                    effects.extend(bench.closed(path, PathEnd::Fenced));
                }
                effects.extend(bench.feed(Input::SliceDone { path: post.path, ticket: post.ticket }));
                let ended = ends(&effects);
                assert_eq!((ended.len(), ended[0].1), (1, how), "{what}, then {next}");
                assert_eq!(bench.core.stats().live_batches, 0);
            }
        }
    }

    #[test]
    fn a_late_end_waits_for_its_grace_and_then_closes_only_the_paths_that_hold_it() {
        let config = MoverConfig { grace_us: 400, spread_bytes: 1, ..rails(2) };
        let mut bench = Bench::new(config, 1, &[0, 0]);
        let first = opens(&bench.submit(write(1, 0, 1_000)))[0];
        let effects = bench.opened(first);
        let post = posts(&effects)[0];
        let other = opens(&effects)[0];
        assert_eq!(bench.opened(other), [], "there is nothing left to post");
        assert!(posts(&bench.submit(write(2, 0, 8 << 20))).iter().any(|post| post.path == other));
        assert_eq!(bench.cancel(1), []);
        assert_eq!(bench.pass(399), []);
        let effects = bench.pass(1);
        assert_eq!(closes(&effects), [post.path]);
        assert_eq!(ends(&effects), [], "not before the path has closed");
        assert_eq!(ends(&bench.closed(post.path, PathEnd::Fenced)), [(1, "cancelled", None, true)]);
    }

    #[test]
    fn what_was_read_is_done_whatever_the_peer_knows_and_what_was_written_is_not() {
        for (request, end, how) in [
            (read(1, 1_000), CLOSED[0], "done"),
            (read(1, 1_000), CLOSED[1], "done"),
            (write(1, 0, 1_000), CLOSED[0], "done"),
            (write(1, 0, 1_000), CLOSED[1], "failed"),
        ] {
            let mut bench = Bench::new(rails(2), 1, &[0, 0]);
            let post = bench.start(request);
            let again = opens(&bench.broken(post.path, Fault::Path))[0];
            let repeated = posts(&bench.opened(again))[0];
            assert_eq!(bench.done(repeated), [], "{how}: the doubt holds it");
            let ended = ends(&bench.closed(post.path, end));
            assert_eq!((ended[0].1, ended[0].3), (how, how == "done"));
            assert_eq!(bench.core.stats().unfenced, u64::from(how == "failed"));
        }
    }

    #[test]
    fn a_batch_in_two_doubts_waits_for_both_and_one_unknown_taints_it() {
        for first in CLOSED {
            for second in CLOSED {
                let mut bench = Bench::new(rails(3), 1, &[0, 0, 0]);
                let mut held = Vec::new();
                let mut path = opens(&bench.submit(write(1, 0, 1_000)))[0];
                for _ in 0..2 {
                    assert_eq!(posts(&bench.opened(path)).len(), 1);
                    held.push(path);
                    path = opens(&bench.broken(path, Fault::Path))[0];
                }
                bench.cancel(1);
                assert_eq!(bench.core.snapshot().batches[0].doubts, 2);
                assert_eq!(ends(&bench.closed(held[1], first)), []);
                let fenced = [first, second] == [PathEnd::Fenced; 2];
                assert_eq!(ends(&bench.closed(held[0], second)), [(1, "cancelled", None, fenced)]);
            }
        }
    }

    #[test]
    fn a_notice_alone_needs_a_path_and_nothing_else() {
        let mut bench = Bench::new(MoverConfig::default(), 1, &[0]);
        let request = BatchRequest { ops: Vec::new(), ..with_notice(1, 0) };
        let path = opens(&bench.submit(request))[0];
        let effects = bench.opened(path);
        let [(on, ticket)] = notices(&effects)[..] else { panic!("{effects:?}") };
        bench.ignores(Input::PathRefused { path: on, ticket });
        bench.now_us += 77;
        let effects = bench.feed(Input::Notified { path: on, ticket });
        assert_eq!(effects, [Effect::Done { batch: BatchId(1), bytes: 0, took_us: 77 }]);
    }

    #[test]
    fn a_notice_waits_for_every_doubt_and_for_room() {
        let rail = RailSpec { path_slices: 1, ..RailSpec::default() };
        let mut bench =
            Bench::new(MoverConfig { rails: vec![rail; 2], ..MoverConfig::default() }, 1, &[0, 0]);
        let post = bench.start(with_notice(1, 1_000));
        let again = opens(&bench.broken(post.path, Fault::Path))[0];
        let repeated = posts(&bench.opened(again))[0];
        assert_eq!(notices(&bench.done(repeated)), []);
        let other = posts(&bench.submit(write(2, 0, 1_000)))[0];
        assert_eq!(notices(&bench.closed(post.path, PathEnd::Fenced)), [], "the path is taken");
        assert_eq!(notices(&bench.done(other)).len(), 1);
        assert_eq!(bench.core.stats().notices, 1);
    }

    #[test]
    fn a_batch_that_ends_leaves_every_queue_and_the_others_their_places() {
        // Cancelled in turn: each place of three that wait, with slices and as notices.
        for gone in 1..=3 {
            for notice in [false, true] {
                let mut bench = Bench::new(MoverConfig::default(), 1, &[0]);
                let path = PathNumber(0);
                for batch in 1..=3 {
                    let ops = if notice { Vec::new() } else { write(batch, 0, 500).ops };
                    bench.submit(BatchRequest { notice, ops, ..write(batch, 0, 500) });
                }
                assert_eq!(ends(&bench.cancel(gone)), [(gone, "cancelled", None, true)]);
                let left: Vec<u64> = (1..=3).filter(|&batch| batch != gone).collect();
                let orders = bench.opened(path);
                let seen = bench.obey(orders);
                let done: Vec<u64> = ends(&seen).iter().map(|end| end.0).collect();
                assert_eq!(done, left);
                bench.ignores(Input::Cancel { batch: BatchId(gone) });
            }
        }
    }

    #[test]
    fn a_batch_is_done_after_its_last_byte_and_says_how_long_it_took() {
        let mut bench = Bench::new(MoverConfig::default(), 1, &[0]);
        let path = opens(&bench.submit(write(1, 0, 150_000)))[0];
        let moving = posts(&bench.opened(path));
        let (last, first) = moving.split_first().expect("three slices");
        for (post, done_bytes) in first.iter().zip([65_536, 84_464]) {
            bench.now_us += 100;
            assert_eq!(bench.done(*post), []);
            assert_eq!(bench.core.done_bytes(BatchId(1)), Some(done_bytes));
        }
        bench.now_us += 100;
        assert_eq!(bench.done(*last), [Effect::Done { batch: BatchId(1), bytes: 150_000, took_us: 300 }]);
        assert_eq!(bench.core.done_bytes(BatchId(1)), None);
    }
}
