//! Which slice goes next, and over which path.

use alloc::vec::Vec;

use crate::batch::{End, Phase};
use crate::engine::MoverCore;
use crate::path::blend;
use crate::rail::CLASSES;
use crate::slices::{Slice, SliceContent};
use crate::timers::Timer;
use crate::{Effect, PathNumber, RailNumber, SliceTicket};

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
        let (class, peer) = self.rails[rail].pop().expect("the caller saw that a peer is ready");
        #[expect(clippy::cast_possible_truncation, reason = "at most 64 rails")]
        let number = RailNumber(rail as u8);
        let ready = &mut self.peers[peer].ready[class];
        assert!(*ready & number.bit() != 0, "a peer stands before a rail that it is not ready for");
        *ready &= !number.bit();
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
        let peer_state = &mut self.peers[peer];
        assert!(
            u64::from(piece.bytes) <= peer_state.pending_bytes[class],
            "I7: a peer waits for fewer bytes than one of its pieces has"
        );
        peer_state.pending_bytes[class] -= u64::from(piece.bytes);
        if queued {
            peer_state.queues[class].push_back(slot);
        }
        let ticket = self.start_on_path(path, SliceContent::Data { batch: slot, piece });
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
    pub(super) fn start_on_path(&mut self, path_slot: u32, content: SliceContent) -> SliceTicket {
        let path = &mut self.paths[path_slot];
        let has_room = path.has_room(&self.rails[path.rail.index()]);
        assert!(path.serves() && has_room, "what is posted goes over an open path with room");
        #[expect(clippy::cast_possible_truncation, reason = "bounded by path_slices")]
        let position = path.outstanding.len() as u32;
        let (slot, ticket) = self.slices.insert(path_slot, position, self.now_us, content);
        if position == 0 {
            (path.alive_us, path.moved_us) = (self.now_us, self.now_us);
        }
        path.outstanding.push(slot);
        path.visited = true;
        if let SliceContent::Data { batch, piece } = content {
            path.bytes += u64::from(piece.bytes);
            self.rails[path.rail.index()].bytes += u64::from(piece.bytes);
            self.outstanding_bytes += u64::from(piece.bytes);
            self.batches[batch].outstanding += 1;
        } else if let SliceContent::Notice { batch } = content {
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
    pub(super) fn remove_from_path(&mut self, slot: u32) -> Slice {
        let slice = self.slices.remove(slot);
        let path = &mut self.paths[slice.path];
        let left = path.outstanding.swap_remove(slice.position as usize);
        assert!(left == slot, "a slice is not at its recorded position on its path");
        if let Some(&moved) = path.outstanding.get(slice.position as usize) {
            self.slices.reseat(moved, slice.position);
        }
        let rail = &mut self.rails[path.rail.index()];
        // In release builds a count that goes below zero would wrap, and nothing would be posted again.
        assert!(slice.bytes() <= path.bytes, "I9: a path counts fewer bytes than a slice on it has");
        assert!(path.bytes <= rail.bytes, "I9: a rail counts fewer bytes than one of its paths");
        assert!(rail.bytes <= self.outstanding_bytes, "I9: fewer bytes are outstanding than a rail counts");
        path.bytes -= slice.bytes();
        rail.bytes -= slice.bytes();
        self.outstanding_bytes -= slice.bytes();
        assert!(self.outstanding > 0, "I9: a slice is removed and none is outstanding");
        self.outstanding -= 1;
        if let SliceContent::Data { batch, .. } | SliceContent::Notice { batch } = slice.content {
            let batch = &mut self.batches[batch];
            assert!(batch.outstanding > 0, "I5: a slice of a batch ends and none of it is outstanding");
            batch.outstanding -= 1;
        }
        slice
    }

    /// The slot of what is outstanding under a ticket on that very path.
    pub(super) fn find(&self, path: PathNumber, ticket: SliceTicket) -> Option<u32> {
        let slot = self.slices.find(ticket)?;
        (self.paths[self.slices.get(slot).path].number == path).then_some(slot)
    }

    /// A slice, a notice or a probe ended well.
    pub(super) fn completed(
        &mut self,
        path: PathNumber,
        ticket: SliceTicket,
        effects: &mut Vec<Effect>,
    ) -> bool {
        let Some(slot) = self.find(path, ticket) else { return false };
        if self.slices.get(slot).content == SliceContent::Probe {
            self.answered(slot, effects);
            return true;
        }
        let slice = self.remove_from_path(slot);
        self.learn(&slice);
        match slice.content {
            SliceContent::Data { batch, piece } => {
                self.stats.moved_slices += 1;
                self.stats.moved_bytes += u64::from(piece.bytes);
                self.rails[self.paths[slice.path].rail.index()].moved_bytes += u64::from(piece.bytes);
                let moving = &mut self.batches[batch];
                moving.done_bytes += u64::from(piece.bytes);
                assert!(moving.counts_once(), "I7: a byte is done once");
                self.settle(batch, effects);
            }
            SliceContent::Notice { batch } => {
                let told = &mut self.batches[batch];
                assert!(told.done_bytes == told.bytes, "a notice leaves when every byte is in place");
                if told.phase == Phase::Noticed {
                    told.phase = Phase::Ending(End::Done);
                }
                self.settle(batch, effects);
            }
            SliceContent::Probe => {}
        }
        self.moved_on(slice.path, effects);
        true
    }

    /// Updates the speed and the health of a path after a slice or notice ended well.
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
            self.peers[path.peer].route_mut(path.rail).fails = 0;
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

    /// Puts a peer's work before the rails of its paths that take more. One that is full wakes the peer
    /// itself when it is not.
    pub(super) fn wake(&mut self, peer: u32, effects: &mut Vec<Effect>) {
        for class in 0..CLASSES {
            if self.peers[peer].queues[class].is_empty() {
                continue;
            }
            for at in 0..self.peers[peer].paths.len() {
                let path = &self.paths[self.peers[peer].paths[at]];
                if path.serves() && path.has_room(&self.rails[path.rail.index()]) {
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
        ticket: SliceTicket,
        effects: &mut Vec<Effect>,
    ) -> bool {
        let Some(slot) = self.find(path, ticket) else { return false };
        let SliceContent::Data { batch, mut piece } = self.slices.get(slot).content else { return false };
        let slice = self.remove_from_path(slot);
        self.paths[slice.path].full = true;
        self.stats.refused_slices += 1;
        assert!(piece.tries > 0, "what was posted was tried");
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Priority;
    use crate::testing::bench::*;
    use crate::*;
    use alloc::collections::VecDeque;
    use alloc::vec;
    use baton_types::Rng;

    /// The bytes of `total` that a plain division by weights gives each class that has work.
    fn naive_shares(config: &MoverConfig, present: &[usize], total: f64) -> [f64; CLASSES] {
        let mut weights = config.weights.map(f64::from);
        let above: f64 = weights[..CLASSES - 1].iter().sum();
        let floor = f64::from(config.floor_permille) / 1_000.0;
        weights[CLASSES - 1] = weights[CLASSES - 1].max(above * floor / (1.0 - floor));
        let sum: f64 = present.iter().map(|&class| weights[class]).sum();
        let mut shares = [0.0; CLASSES];
        for &class in present {
            shares[class] = total * weights[class] / sum;
        }
        shares
    }

    /// Bytes of each class that a path carries of endless work of these classes.
    fn shared(config: MoverConfig, present: &[usize]) -> [u64; CLASSES] {
        let mut bench = Bench::new(config, 1, &[0]);
        let mut orders = Vec::new();
        for &class in present {
            let priority = Priority::ALL[class];
            orders.extend(bench.submit(BatchRequest { priority, ..write(class as u64, 0, 1 << 38) }));
        }
        orders.extend(bench.opened(PathNumber(0)));
        let (mut moving, mut sent) = (VecDeque::from(posts(&orders)), [0; CLASSES]);
        for _ in 0..4_000 {
            let post = moving.pop_front().expect("there is always more to send");
            sent[post.batch.0 as usize] += u64::from(post.bytes);
            moving.extend(posts(&bench.done(post)));
        }
        sent
    }

    #[test]
    fn classes_share_a_path_by_weight_and_the_lowest_has_its_floor() {
        let cases: [([u32; CLASSES], u32, &[usize]); 8] = [
            ([16, 8, 2, 1], 50, &[0, 1, 2, 3]),
            ([16, 8, 2, 1], 0, &[0, 1, 2, 3]),
            ([16, 8, 2, 1], 500, &[0, 1, 2, 3]),
            ([1, 1, 1, 1], 0, &[0, 1, 2, 3]),
            ([10_000, 1, 1, 1], 100, &[0, 3]),
            ([5, 5, 5, 5], 50, &[1, 3]),
            ([9, 3, 1, 1], 50, &[0, 2]),
            ([16, 8, 2, 1], 50, &[2]),
        ];
        let rail = RailSpec { path_slices: 4, ..RailSpec::default() };
        for (weights, floor_permille, present) in cases {
            let rails = vec![rail];
            let config = MoverConfig { weights, floor_permille, rails, ..MoverConfig::default() };
            let sent = shared(config.clone(), present);
            let total = sent.iter().sum::<u64>() as f64;
            for (sent, wanted) in sent.into_iter().zip(naive_shares(&config, present, total)) {
                let off = (sent as f64 - wanted).abs();
                assert!(off <= total / 200.0, "{weights:?} {floor_permille} {present:?}: {sent} {wanted}");
            }
        }
    }

    #[test]
    fn each_bound_on_what_is_outstanding_is_met_and_not_passed() {
        let slice = 64 << 10;
        let rail = |change: fn(&mut RailSpec)| {
            let mut spec = RailSpec { queue_us: 1 << 40, ..RailSpec::default() };
            change(&mut spec);
            MoverConfig { rails: vec![spec], ..MoverConfig::default() }
        };
        let all = |change: fn(&mut MoverConfig)| {
            let mut config = rail(|_| {});
            change(&mut config);
            config
        };
        let cases = [
            ("path_slices", rail(|r| r.path_slices = 7), 7),
            ("one slice", rail(|r| r.path_slices = 1), 1),
            ("path_bytes", rail(|r| (r.path_bytes, r.path_bytes_min) = (6 * 65_536, 1)), 6),
            ("path_bytes is passed by less than a slice", rail(|r| r.path_bytes = (2 << 20) + 1), 33),
            ("path_bytes of less than a slice", rail(|r| (r.path_bytes, r.path_bytes_min) = (1, 1)), 1),
            ("path_bytes_min", rail(|r| (r.queue_us, r.path_bytes_min) = (0, 5 * 65_536)), 5),
            ("rail_bytes", rail(|r| r.rail_bytes = 3 * 65_536), 3),
            ("rail_bytes of less than a slice", rail(|r| r.rail_bytes = 1), 1),
            ("max_slices", all(|c| c.max_slices = 9), 9),
            ("max_bytes", all(|c| c.max_bytes = 4 * 65_536), 4),
            ("max_bytes of less than a slice", all(|c| c.max_bytes = 1), 1),
        ];
        for (what, config, wanted) in cases {
            let mut bench = Bench::new(config, 1, &[0]);
            let path = opens(&bench.submit(write(1, 0, 100 * slice)))[0];
            let first = posts(&bench.opened(path));
            assert_eq!(first.len(), wanted, "{what}");
            let next = posts(&bench.done(first[0]));
            assert_eq!(next.len(), 1, "{what}: one ends, one goes");
        }
    }

    #[test]
    fn credit_is_what_the_path_carries_in_its_time_and_two_latencies() {
        // Bytes per second, the time, the latency, and slices of 64 KiB in that.
        for (bytes_per_s, queue_us, latency_us, wanted) in [
            (1 << 30, 1_000, 0, 17),
            (1 << 30, 0, 500, 17),
            (1 << 30, 2_000, 500, 50),
            (1 << 20, 5_000, 30, 2),
            (1 << 40, 5_000, 30, 64),
        ] {
            let (path_bytes_min, path_bytes) = (100_000, 4 << 20);
            let spec = RailSpec { path_slices: 1_000, path_bytes, path_bytes_min, ..RailSpec::default() };
            let spec = RailSpec { bytes_per_s, queue_us, latency_us, ..spec };
            let mut bench = Bench::new(MoverConfig { rails: vec![spec], ..MoverConfig::default() }, 1, &[0]);
            let path = opens(&bench.submit(write(1, 0, 8 << 20)))[0];
            let count = posts(&bench.opened(path)).len();
            assert_eq!(count, wanted, "{bytes_per_s} B/s, {queue_us} us, {latency_us} us");
        }
    }

    /// The path that a plain look at every path would take.
    fn naive_best(bench: &Bench, bytes: u64, location: u16) -> Option<u32> {
        let core = &bench.core;
        let mut best: Option<(u8, u128, PathNumber, u32)> = None;
        for (slot, path) in core.paths.iter() {
            if path.state != crate::path::PathState::Open || path.draining {
                continue;
            }
            let wire_ns = u128::from(path.bytes + bytes) * u128::from(path.ns_per_mib) / (1 << 20);
            let rank = u128::from(core.config.rank(location, path.rail.index()));
            let penalty = 1_000 + rank * u128::from(core.config.rank_penalty_permille);
            let cost = (wire_ns + u128::from(path.latency_us) * 1_000) * penalty / 1_000;
            let this = (path.tier, cost, path.number, slot);
            best = Some(best.map_or(this, |best| best.min(this)));
        }
        best.map(|best| best.3)
    }

    #[test]
    fn the_best_path_is_the_one_that_a_plain_look_at_each_finds() {
        let mut rng = Rng::new(7);
        for round in 0..2_000 {
            let ranks = (0..3).map(|_| (0..4).map(|_| rng.below(4) as u8).collect()).collect();
            let rank_penalty_permille = rng.below(3) as u32 * 250;
            let config = MoverConfig { ranks, rank_penalty_permille, spread_bytes: 1, ..rails(4) };
            let tiers: Vec<u8> = (0..4).map(|_| rng.below(2) as u8).collect();
            let mut bench = Bench::new(config, 1, &tiers);
            let orders = bench.submit(write(1, 0, 4 << 20));
            bench.obey(orders);
            for slot in 0..bench.core.paths.len() as u32 {
                let path = &mut bench.core.paths[slot];
                path.ns_per_mib = 1 + rng.below(1_000_000);
                path.latency_us = rng.below(200);
                path.bytes = rng.below(1 << 20);
                path.draining = rng.below(5) == 0;
            }
            let (bytes, location) = (rng.below(1 << 20), rng.below(4) as u16);
            let found = bench.core.best_path(0, bytes, location);
            assert_eq!(found, naive_best(&bench, bytes, location), "round {round}");
        }
    }

    #[test]
    fn peers_of_one_class_take_turns_slice_by_slice() {
        let rail = RailSpec { rail_bytes: 1, ..RailSpec::default() };
        let config = MoverConfig { rails: vec![rail], ..MoverConfig::default() };
        let mut bench = Bench::new(config, 3, &[0]);
        let mut moving = VecDeque::new();
        for peer in 0..3 {
            let path = opens(&bench.submit(write(u64::from(peer), peer, 1 << 20)))[0];
            moving.extend(posts(&bench.opened(path)));
        }
        let mut order = Vec::new();
        while let Some(post) = moving.pop_front() {
            order.push(post.batch.0);
            moving.extend(posts(&bench.done(post)));
        }
        assert_eq!(order.len(), 48);
        let tail = &order[3..45];
        assert!(tail.windows(3).all(|w| w[0] != w[1] && w[1] != w[2] && w[0] != w[2]), "{order:?}");
    }

    #[test]
    fn batches_of_one_peer_and_class_take_turns_too() {
        let rail = RailSpec { path_slices: 1, ..RailSpec::default() };
        let config = MoverConfig { rails: vec![rail], ..MoverConfig::default() };
        let mut bench = Bench::new(config, 1, &[0]);
        let path = opens(&bench.submit(write(0, 0, 256 << 10)))[0];
        bench.submit(write(1, 0, 128 << 10));
        let mut moving = posts(&bench.opened(path));
        let mut order = Vec::new();
        while let Some(post) = moving.pop() {
            order.push(post.batch.0);
            moving.extend(posts(&bench.done(post)));
        }
        assert_eq!(order, [0, 1, 0, 1, 0, 0]);
    }

    #[test]
    fn rails_take_turns_when_all_have_room() {
        let config = MoverConfig { max_slices: 1, ..rails(3) };
        let mut bench = Bench::new(config, 3, &[0, 0, 0]);
        for (peer, rail) in [(0, 0), (1, 1), (2, 2)] {
            for other in (0..3).filter(|&other| other != rail) {
                bench.core.peers[peer].routes[other].retry_at_us = u64::MAX;
            }
        }
        let mut moving = VecDeque::new();
        for peer in 0..3 {
            let path = opens(&bench.submit(write(u64::from(peer), peer, 512 << 10)))[0];
            moving.extend(posts(&bench.opened(path)));
        }
        let mut order = Vec::new();
        while let Some(post) = moving.pop_front() {
            order.push(post.path.0);
            moving.extend(posts(&bench.done(post)));
        }
        let (middle, count) = (&order[2..22], order.len());
        assert!(count == 24 && middle.windows(3).all(|w| w[0] != w[1] && w[0] != w[2]), "{order:?}");
    }

    #[test]
    fn what_a_full_path_refused_goes_again_and_no_try_is_lost_by_it() {
        let config = MoverConfig { slice_tries: 2, ..MoverConfig::default() };
        let (mut bench, mut post) = Bench::moving(config);
        for turn in 1..20 {
            let Post { path, ticket, .. } = post;
            assert_eq!(bench.feed(Input::PathRefused { path, ticket }), []);
            assert!(bench.core.snapshot().paths[0].full);
            assert_eq!(bench.submit(write(1 + turn, 0, 10)), [], "a full path is given nothing");
            bench.cancel(1 + turn);
            let again = posts(&bench.feed(Input::PathRoom { path }));
            assert_eq!((again.len(), again[0].batch), (1, BatchId(1)), "turn {turn}");
            post = again[0];
        }
        assert_eq!(bench.core.stats().refused_slices, 19);
        // Were each refusal a try, this break would be one too many.
        assert_eq!(ends(&bench.broken(post.path, Fault::Path)), []);
        let failed = bench.closed(post.path, PathEnd::Fenced);
        assert_eq!((ends(&failed).len(), bench.core.stats().repeated_slices), (0, 1));
    }

    #[test]
    fn a_full_path_is_waited_for_and_no_other_tier_is_opened_instead() {
        let config = MoverConfig { spread_bytes: 1, ..rails(2) };
        let mut bench = Bench::new(config, 1, &[0, 1]);
        let orders = bench.submit(write(0, 0, 10));
        bench.obey(orders);
        let post = posts(&bench.submit(write(1, 0, 10)))[0];
        let Post { path, ticket, .. } = post;
        assert_eq!(bench.feed(Input::PathRefused { path, ticket }), []);
        assert_eq!(bench.pass(400_000), []);
        assert_eq!(posts(&bench.feed(Input::PathRoom { path }))[0].path, path);
    }

    #[test]
    fn a_ticket_counts_on_its_own_path_only_and_once() {
        let config = MoverConfig { spread_bytes: 1, ..rails(2) };
        let mut bench = Bench::new(config, 1, &[0, 0]);
        let first = opens(&bench.submit(write(1, 0, 1 << 20)))[0];
        let mut effects = bench.opened(first);
        let second = opens(&effects)[0];
        effects.extend(bench.opened(second));
        let post = posts(&effects)[0];
        let elsewhere = if post.path == first { second } else { first };
        bench.ignores(Input::SliceDone { path: elsewhere, ticket: post.ticket });
        bench.ignores(Input::Failed { path: elsewhere, ticket: post.ticket, fault: Fault::Path });
        bench.ignores(Input::PathRefused { path: elsewhere, ticket: post.ticket });
        bench.done(post);
        bench.ignores(Input::SliceDone { path: post.path, ticket: post.ticket });
        bench.ignores(Input::PathRefused { path: post.path, ticket: post.ticket });
        assert_eq!(bench.core.done_bytes(BatchId(1)), Some(u64::from(post.bytes)));
    }

    #[test]
    fn slices_that_end_in_any_order_are_each_counted_once() {
        let mut rng = Rng::new(11);
        let config = MoverConfig { spread_bytes: 1, ..rails(3) };
        let mut bench = Bench::new(config, 1, &[0, 0, 0]);
        let (mut moving, mut ended, mut sum) = (Vec::new(), Vec::new(), 0);
        for batch in 0..30 {
            let bytes = 1 + rng.below(3 << 20);
            sum += bytes;
            let mut effects = bench.submit(write(batch, 0, bytes));
            let mut at = 0;
            while at < effects.len() {
                let more = opens(&effects[at..=at]).into_iter().flat_map(|path| bench.opened(path));
                let more: Vec<Effect> = more.collect();
                effects.extend(more);
                at += 1;
            }
            moving.extend(posts(&effects));
        }
        while !moving.is_empty() {
            bench.now_us += rng.below(50);
            let post = moving.swap_remove(rng.below(moving.len() as u64) as usize);
            let effects = bench.done(post);
            moving.extend(posts(&effects));
            ended.extend(ends(&effects).iter().map(|end| end.0));
        }
        ended.sort_unstable();
        assert_eq!(ended, (0..30).collect::<Vec<u64>>());
        assert_eq!((bench.core.stats().moved_bytes, bench.core.outstanding_bytes), (sum, 0));
        let by_rail: Vec<u64> = bench.core.moved_bytes().collect();
        assert!(by_rail.len() == 3 && by_rail.iter().all(|bytes| *bytes > 0), "{by_rail:?}");
    }
}
