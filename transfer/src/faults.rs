//! Faults of slices, paths and peers, and what happens to slices that were on their way.

use alloc::vec::Vec;

use crate::batch::{End, Phase, Piece};
use crate::engine::MoverCore;
use crate::path::PathState;
use crate::slices::SliceContent;
use crate::timers::Timer;
use crate::{Effect, Failure, Fault, PathEnd, PathNumber, RailNumber, Reason, SliceTicket, Stage};

impl MoverCore {
    /// Ends a path: what is on its way is in doubt, and is to be posted again. With a fault its route rests
    /// before it is opened again.
    pub(super) fn retire(&mut self, slot: u32, fault: Option<Fault>, effects: &mut Vec<Effect>) {
        let path = &mut self.paths[slot];
        let (number, peer, rail) = (path.number, path.peer, path.rail);
        let before = core::mem::replace(&mut path.state, PathState::Closing);
        assert!(matches!(before, PathState::Open | PathState::Trial), "only an open path closes, and once");
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
        assert!(self.paths[slot].bytes == 0, "I9: a path without slices has no bytes on their way");
        self.give_up(peer, effects);
        self.wake(peer, effects);
        self.consider(peer, effects);
    }

    /// One slice of a path that has ended: its batch is in doubt until the path has closed.
    fn orphan(&mut self, slot: u32, fault: Fault, effects: &mut Vec<Effect>) {
        let slice = self.remove_from_path(slot);
        match slice.content {
            SliceContent::Data { batch, piece } => {
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
            SliceContent::Notice { batch } => {
                let failure = Failure { stage: Stage::Notify, reason: Reason::Fault(fault) };
                self.begin_end(batch, End::Failed(failure), effects);
                self.settle_if_live(batch, effects);
            }
            SliceContent::Probe => {}
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
        let route = peer.route_mut(rail);
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
        (path, ticket): (PathNumber, SliceTicket),
        fault: Fault,
        effects: &mut Vec<Effect>,
    ) -> bool {
        let Some(slot) = self.find(path, ticket) else { return false };
        let (path, content) = (self.slices.get(slot).path, self.slices.get(slot).content);
        match (content, fault) {
            // The peer refused the slice: no byte of it can land, and the path itself is sound.
            (SliceContent::Data { batch, .. }, Fault::Stale | Fault::Invalid) => {
                self.refused((slot, batch), Stage::Move, fault, effects);
            }
            (SliceContent::Notice { batch }, Fault::Stale | Fault::Invalid) => {
                self.refused((slot, batch), Stage::Notify, fault, effects);
            }
            (SliceContent::Data { batch, piece }, Fault::Corrupt) => {
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
        let slice = self.remove_from_path(slot);
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

    /// Removes a closed path and settles the batches that it held in doubt.
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
        let closing = &mut self.peers[path.peer].closing;
        assert!(0 < *closing && *closing <= self.closing, "I9: a path that has closed was closing");
        *closing -= 1;
        self.closing -= 1;
        for batch in path.doubtful {
            let doubt = self.batches[batch].doubts.remove(&number);
            let wrote = doubt.expect("a batch that a path holds in doubt knows of it");
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
        let asked = path.probe.take();
        assert!(asked.is_some_and(|(probe, _)| probe == slot), "a path knows the probe that it answers");
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
        assert!(matches!(path.state, PathState::Open | PathState::Trial), "only an open path is watched");
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::bench::*;
    use crate::*;
    use alloc::vec;
    use baton_types::Rng;

    const ALL: [Fault; 5] = [Fault::Path, Fault::Silent, Fault::Stale, Fault::Invalid, Fault::Corrupt];

    fn refusal(fault: Fault) -> bool {
        matches!(fault, Fault::Stale | Fault::Invalid)
    }

    /// A path in each of its states, with a batch that waits or moves.
    fn path_in(state: &str) -> (Bench, PathNumber) {
        let mut bench = Bench::new(rails(2), 1, &[0, 1]);
        let path = opens(&bench.submit(write(1, 0, 1_000)))[0];
        match state {
            "opening" => {}
            "trial" => {
                bench.core.peers[0].routes[0].fails = 1;
                assert_eq!(probes(&bench.opened(path)).len(), 1);
            }
            "open" => drop(bench.opened(path)),
            "draining" => {
                bench.opened(path);
                bench.core.paths[0].draining = true;
            }
            "closing" => {
                bench.opened(path);
                assert_eq!(closes(&bench.broken(path, Fault::Path)), [path]);
            }
            other => panic!("{other}"),
        }
        assert_eq!(bench.core.snapshot().paths[0].state, state);
        (bench, path)
    }

    #[test]
    fn a_path_breaks_once_whatever_its_fault_and_only_where_it_stands() {
        for fault in ALL {
            for state in ["opening", "closing"] {
                let (mut bench, path) = path_in(state);
                bench.ignores(Input::PathBroken { path, fault });
            }
            for state in ["trial", "open", "draining"] {
                let (mut bench, path) = path_in(state);
                let effects = bench.broken(path, fault);
                assert_eq!(closes(&effects), [path], "{fault:?} {state}");
                let stale = fault == Fault::Stale;
                assert_eq!(bench.core.snapshot().peers[0].ended, stale, "{fault:?} {state}");
                assert_eq!(bench.core.stats().paths_broken, u64::from(!stale));
                bench.ignores(Input::PathBroken { path, fault });
            }
        }
    }

    #[test]
    fn a_path_may_close_in_every_state_but_while_it_opens() {
        for end in [PathEnd::Fenced, PathEnd::PeerUnknown] {
            let (mut bench, path) = path_in("opening");
            bench.ignores(Input::PathClosed { path, end });
            for state in ["trial", "open", "draining", "closing"] {
                let (mut bench, path) = path_in(state);
                let effects = bench.closed(path, end);
                assert_eq!(closes(&effects).len(), usize::from(state != "closing"), "{state}");
                let held = state != "trial";
                let failed = held && end == PathEnd::PeerUnknown;
                assert_eq!(ends(&effects).len(), usize::from(failed), "{state} {end:?}");
                bench.ignores(Input::PathClosed { path, end });
            }
        }
    }

    #[test]
    fn a_path_that_does_not_open_says_why_and_is_heard_once() {
        for fault in ALL {
            let (mut bench, path) = path_in("opening");
            let effects = bench.open_failed(path, fault);
            let (fails, retry_at_us) = bench.route(0, 0);
            match fault {
                Fault::Stale => {
                    let reason = Reason::Fault(Fault::Stale);
                    let failure = Failure { stage: Stage::Connect, reason };
                    assert_eq!(ends(&effects), [(1, "failed", Some(failure), true)]);
                }
                Fault::Invalid => {
                    assert_eq!((fails, opens_to(&effects)), (6, vec![(0, 1)]));
                    assert!(retry_at_us >= bench.now_us + 3_750_000, "it rests as long as any");
                }
                _ => assert_eq!((fails, opens_to(&effects)), (1, vec![(0, 1)])),
            }
            bench.ignores(Input::PathOpenFailed { path, fault });
            for state in ["trial", "open", "draining", "closing"] {
                let (mut bench, path) = path_in(state);
                bench.ignores(Input::PathOpenFailed { path, fault });
                bench.ignores(Input::PathOpened { path });
            }
        }
    }

    #[test]
    fn a_failed_slice_is_refused_or_breaks_its_path() {
        for fault in ALL {
            let mut bench = Bench::new(rails(2), 1, &[0, 1]);
            let post = bench.start(write(1, 0, 1_000));
            let effects = bench.failed(post.path, post.ticket, fault);
            if refusal(fault) {
                let failure = Failure { stage: Stage::Move, reason: Reason::Fault(fault) };
                assert_eq!(effects.len(), 1, "{fault:?}: the path is not to blame");
                assert_eq!(ends(&effects), [(1, "failed", Some(failure), true)]);
                assert_eq!(bench.route(0, 0).0, 0);
            } else {
                assert_eq!((closes(&effects), opens_to(&effects)), (vec![post.path], vec![(0, 1)]));
                assert_eq!((bench.route(0, 0).0, ends(&effects).len()), (1, 0), "{fault:?}");
                assert_eq!(bench.core.stats().damaged_slices, u64::from(fault == Fault::Corrupt));
                let again = posts(&bench.opened(opens(&effects)[0]));
                assert_eq!((again.len(), again[0].bytes), (1, 1_000));
            }
        }
    }

    #[test]
    fn a_failed_notice_is_never_sent_again() {
        for fault in ALL {
            let mut bench = Bench::new(MoverConfig::default(), 1, &[0]);
            let post = bench.start(BatchRequest { notice: true, ..write(1, 0, 1_000) });
            let sent = bench.done(post);
            let [(path, ticket)] = notices(&sent)[..] else { panic!("{sent:?}") };
            let effects = bench.failed(path, ticket, fault);
            let failure = Failure { stage: Stage::Notify, reason: Reason::Fault(fault) };
            assert_eq!(ends(&effects), [(1, "failed", Some(failure), true)]);
            assert_eq!(closes(&effects).len(), usize::from(!refusal(fault)), "{fault:?}");
            bench.ignores(Input::Notified { path, ticket });
            assert_eq!(bench.core.stats().notices, 1);
        }
    }

    #[test]
    fn a_failed_probe_breaks_its_path_whatever_the_fault() {
        for fault in ALL {
            let (mut bench, post) = Bench::moving(MoverConfig::default());
            let effects = bench.pass(500_000);
            let [ticket] = probes(&effects)[..] else { panic!("{effects:?}") };
            let effects = bench.failed(post.path, ticket, fault);
            assert_eq!((closes(&effects), ends(&effects)), (vec![post.path], vec![]), "{fault:?}");
            bench.ignores(Input::Notified { path: post.path, ticket });
        }
    }

    #[test]
    fn a_slice_is_posted_as_often_as_the_setting_says() {
        for slice_tries in [1, 2, 5] {
            let mut bench = Bench::new(MoverConfig { slice_tries, ..rails(8) }, 1, &[0; 8]);
            let mut effects = bench.submit(write(1, 0, 1_000));
            let mut tries = 0;
            while let Some(&path) = opens(&effects).first() {
                tries += posts(&bench.opened(path)).len();
                effects = bench.broken(path, Fault::Path);
                effects.extend(bench.closed(path, PathEnd::Fenced));
            }
            let failure = Failure { stage: Stage::Move, reason: Reason::Fault(Fault::Path) };
            assert_eq!(ends(&effects), [(1, "failed", Some(failure), true)]);
            assert_eq!(tries, usize::from(slice_tries));
            assert_eq!(bench.core.stats().repeated_slices, u64::from(slice_tries) - 1);
        }
    }

    #[test]
    fn damage_is_worth_one_more_try_and_is_remembered_between_other_faults() {
        for between in [false, true] {
            let mut bench = Bench::new(rails(4), 1, &[0; 4]);
            let mut post = bench.start(write(1, 0, 1_000));
            let faults: &[Fault] = if between { &[Fault::Corrupt, Fault::Path] } else { &[Fault::Corrupt] };
            for &fault in faults {
                let effects = bench.failed(post.path, post.ticket, fault);
                bench.closed(post.path, PathEnd::Fenced);
                post = posts(&bench.opened(opens(&effects)[0]))[0];
            }
            bench.failed(post.path, post.ticket, Fault::Corrupt);
            let failure = Failure { stage: Stage::Move, reason: Reason::Fault(Fault::Corrupt) };
            let effects = bench.closed(post.path, PathEnd::Fenced);
            assert_eq!(ends(&effects), [(1, "failed", Some(failure), true)]);
            assert_eq!(bench.core.stats().damaged_slices, 2);
        }
    }

    #[test]
    fn rests_double_up_to_the_limit_and_are_spread_by_a_quarter_each_way() {
        let mut rng = Rng::new(3);
        let mut seen = [u64::MAX, 0];
        for _ in 0..300 {
            let least_us = 1 + rng.below(1_000);
            let most_us = least_us + rng.below(1_000_000);
            let (backoff_min_us, backoff_max_us) = (least_us, most_us);
            let seed = rng.below(u64::MAX);
            let config = MoverConfig { seed, backoff_min_us, backoff_max_us, ..rails(1) };
            let mut bench = Bench::new(config, 1, &[0]);
            let mut wanted_us = least_us;
            for fails in 1..70 {
                bench.core.blame(0, RailNumber(0), Fault::Path, true);
                let (counted, at_us) = bench.route(0, 0);
                let rest_us = at_us - bench.core.now_us;
                assert_eq!(counted, fails);
                let (low, high) = (wanted_us - wanted_us / 4, wanted_us + wanted_us / 4 + 1);
                assert!((low..=high).contains(&rest_us), "{rest_us} for {wanted_us} after {fails}");
                if wanted_us > 1_000 {
                    let part = rest_us * 1_000 / wanted_us;
                    seen = [seen[0].min(part), seen[1].max(part)];
                }
                wanted_us = (wanted_us * 2).min(most_us);
            }
        }
        assert!(seen[0] < 770 && seen[1] > 1_230, "per mille of the rest: {seen:?}");
    }

    #[test]
    fn a_slice_that_ends_well_clears_its_route_and_a_fault_elsewhere_does_not_touch_it() {
        let mut bench = Bench::new(rails(2), 1, &[0, 1]);
        let path = opens(&bench.submit(write(1, 0, 1_000)))[0];
        let other = opens(&bench.open_failed(path, Fault::Path))[0];
        let post = posts(&bench.opened(other))[0];
        assert_eq!([bench.route(0, 0).0, bench.route(0, 1).0], [1, 0]);
        bench.done(post);
        assert_eq!([bench.route(0, 0).0, bench.route(0, 1).0], [1, 0]);
        let path = opens(&bench.submit(write(2, 0, 1_000)));
        assert_eq!(path, [], "it rests");
        bench.pass(30_000);
        let effects = bench.submit(write(3, 0, 1_000));
        let [ticket] = probes(&bench.opened(opens(&effects)[0]))[..] else { panic!("{effects:?}") };
        bench.feed(Input::Notified { path: opens(&effects)[0], ticket });
        let post = posts(&bench.submit(write(4, 0, 1_000)))[0];
        assert_eq!((post.path, bench.route(0, 0).0), (opens(&effects)[0], 1));
        bench.done(post);
        assert_eq!(bench.route(0, 0).0, 0);
    }

    #[test]
    fn a_peer_is_given_up_when_every_route_has_failed_so_often_and_no_path_stands() {
        for route_tries in [1, 3] {
            let config = MoverConfig { route_tries, backoff_max_us: 20_000, ..rails(2) };
            let mut bench = Bench::new(config, 1, &[0, 0]);
            let (mut effects, mut opened) = (bench.submit(write(1, 0, 1_000)), 0);
            while ends(&effects).is_empty() {
                let paths = opens(&effects);
                effects = if paths.is_empty() { bench.pass(50_000) } else { Vec::new() };
                for path in paths {
                    opened += 1;
                    effects.extend(bench.open_failed(path, Fault::Silent));
                }
            }
            let failure = Failure { stage: Stage::Connect, reason: Reason::Fault(Fault::Silent) };
            assert_eq!(ends(&effects), [(1, "failed", Some(failure), true)]);
            assert_eq!(opened, 2 * route_tries);
        }
    }

    #[test]
    fn silence_is_counted_from_the_last_sign_and_a_probe_has_its_time() {
        let config = MoverConfig { silent_us: 700, probe_us: 300, stuck_us: 1_500, ..rails(1) };
        let mut bench = Bench::new(config, 1, &[0]);
        let path = opens(&bench.submit(write(1, 0, 1 << 20)))[0];
        let moving = posts(&bench.opened(path));
        assert_eq!(bench.pass(600), []);
        bench.done(moving[0]);
        assert_eq!(bench.pass(699), []);
        let effects = bench.pass(1);
        assert_eq!((effects.len(), probes(&effects).len()), (1, 1));
        assert_eq!(bench.pass(299), []);
        // Moving a slice is no answer to the probe.
        bench.done(moving[1]);
        assert_eq!(closes(&bench.pass(1)), [path]);
        assert_eq!(bench.core.peers[0].last_fault, Fault::Silent);
    }

    #[test]
    fn a_path_whose_slices_do_not_end_is_stuck_to_the_microsecond() {
        let config = MoverConfig { silent_us: 400, probe_us: 400, stuck_us: 1_000, ..rails(1) };
        let (mut bench, post) = Bench::moving(config);
        let (mut effects, mut probed) = (Vec::new(), 0);
        for _ in 0..999 {
            effects.extend(bench.pass(1));
            for ticket in probes(&core::mem::take(&mut effects)) {
                probed += 1;
                effects = bench.feed(Input::Notified { path: post.path, ticket });
            }
            assert_eq!(effects, []);
        }
        assert_eq!((closes(&bench.pass(1)), probed), (vec![post.path], 2));
    }

    #[test]
    fn a_full_path_that_forgets_to_say_that_it_has_room_is_tried_again() {
        let config = MoverConfig { silent_us: 400, ..MoverConfig::default() };
        let (mut bench, post) = Bench::moving(config);
        bench.feed(Input::PathRefused { path: post.path, ticket: post.ticket });
        assert_eq!(bench.pass(399), []);
        let effects = bench.pass(1);
        assert_eq!((effects.len(), posts(&effects)[0].path), (1, post.path));
    }
}
