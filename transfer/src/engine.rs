//! The core itself: what it keeps, and how facts come in.

use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::vec::Vec;
use core::hash::BuildHasherDefault;

use baton_types::Rng;
use hashbrown::HashMap;

use crate::batch::{Batch, End};
use crate::mix::Mix;
use crate::path::Path;
use crate::peer::Peer;
use crate::rail::{CLASSES, Rail, weights};
use crate::slab::Slab;
use crate::slices::Slices;
use crate::timers::{Timer, Timers};
use crate::{
    BatchId, BatchRequest, BoundKind, Effect, Input, MoverConfig, MoverStats, PathNumber, PeerNumber,
    Refusal, Route,
};

/// Slots by name; never iterated.
type SlotMap<Name> = HashMap<Name, u32, BuildHasherDefault<Mix>>;

/// Moves batches over paths. Each step gets the time from the driver. The [crate] docs give the rules.
#[derive(Clone, Debug)]
pub struct MoverCore {
    pub(crate) config: MoverConfig,
    pub(crate) weights: [u64; CLASSES],
    pub(crate) now_us: u64,
    pub(crate) rng: Rng,
    pub(crate) stats: MoverStats,
    pub(crate) batches: Slab<Batch>,
    pub(crate) batch_slots: SlotMap<BatchId>,
    /// Ops of all batches that live.
    pub(crate) ops: u64,
    pub(crate) peers: Slab<Peer>,
    pub(crate) peer_slots: SlotMap<PeerNumber>,
    /// Peers that have nothing to do, by when they last had.
    pub(crate) idle_peers: BTreeSet<(u64, u32)>,
    pub(crate) paths: Slab<Path>,
    /// In the order in which they were opened, as the pool's hand goes.
    pub(crate) path_slots: BTreeMap<PathNumber, u32>,
    pub(crate) next_path: u32,
    pub(crate) hand: PathNumber,
    pub(crate) closing: u32,
    /// Peers in line for a path.
    pub(crate) waiting: VecDeque<u32>,
    /// Whether something has changed by which a path may be taken from its peer.
    pub(crate) look_for_room: bool,
    pub(crate) turn_timer_us: Option<u64>,
    pub(crate) rails: Vec<Rail>,
    pub(crate) next_rail: usize,
    pub(crate) slices: Slices,
    /// Slices and notices outstanding, without probes.
    pub(crate) outstanding: u32,
    pub(crate) outstanding_bytes: u64,
    pub(crate) timers: Timers,
}

impl MoverCore {
    /// A core that knows no peer yet.
    ///
    /// `config` must keep the bounds that [`MoverConfig`] states.
    #[must_use]
    pub fn new(config: MoverConfig) -> Self {
        Self {
            weights: weights(&config),
            now_us: 0,
            rng: Rng::new(config.seed),
            stats: MoverStats::default(),
            batches: Slab::default(),
            batch_slots: HashMap::default(),
            ops: 0,
            peers: Slab::default(),
            peer_slots: HashMap::default(),
            idle_peers: BTreeSet::new(),
            paths: Slab::default(),
            path_slots: BTreeMap::new(),
            next_path: 0,
            hand: PathNumber(0),
            closing: 0,
            waiting: VecDeque::new(),
            look_for_room: false,
            turn_timer_us: None,
            rails: config.rails.iter().copied().map(Rail::new).collect(),
            next_rail: 0,
            slices: Slices::default(),
            outstanding: 0,
            outstanding_bytes: 0,
            timers: Timers::default(),
            config,
        }
    }

    /// Takes one fact in at `now_us` and appends what follows from it to `effects`.
    ///
    /// The core first handles the timers that are due by `now_us`. The call is total (I11): the core counts an input
    /// that names nothing known and changes nothing, and it treats a clock that goes back as one that stands still.
    pub fn step(&mut self, now_us: u64, input: Input, effects: &mut Vec<Effect>) {
        if now_us < self.now_us {
            self.stats.clock_regressions += 1;
        }
        self.now_us = self.now_us.max(now_us);
        while let Some(timer) = self.timers.pop_due(self.now_us) {
            self.due(timer, effects);
        }
        let known = self.take(input, effects);
        self.stats.ignored_inputs += u64::from(!known);
        self.pump(effects);
        self.assert_bounds();
    }

    /// Asserts the invariants that are cheap to check after each step. [`MoverCore::check`] audits the rest.
    fn assert_bounds(&self) {
        let most_bytes = self.config.max_bytes.saturating_add(u64::from(self.config.slice_bytes_max));
        assert!(self.outstanding_bytes <= most_bytes, "I9: at most one slice goes beyond max_bytes");
        assert!(self.outstanding > 0 || self.outstanding_bytes == 0, "I9: bytes are outstanding in no slice");
        assert!(self.closing as usize <= self.paths.len(), "I9: more paths are closing than there are");
    }

    /// When to step next (with `TimerFired`) if no other input comes first.
    #[must_use]
    pub fn next_deadline(&self) -> Option<u64> {
        self.timers.first_us()
    }

    /// Counters since the start, and how much there is now.
    #[must_use]
    pub fn stats(&self) -> MoverStats {
        MoverStats {
            live_batches: self.batches.len() as u64,
            outstanding_slices: u64::from(self.outstanding),
            outstanding_bytes: self.outstanding_bytes,
            paths: self.paths.len() as u64,
            peers: self.peers.len() as u64,
            waiting_peers: self.waiting.len() as u64,
            ..self.stats
        }
    }

    /// Bytes of a batch that are in place; none for one that does not live.
    #[must_use]
    pub fn done_bytes(&self, batch: BatchId) -> Option<u64> {
        self.batch_slots.get(&batch).map(|&slot| self.batches[slot].done_bytes)
    }

    /// Bytes of slices that ended well, by rail.
    pub fn moved_bytes(&self) -> impl Iterator<Item = u64> {
        self.rails.iter().map(|rail| rail.moved_bytes)
    }

    /// False for a fact about something that is not known.
    fn take(&mut self, input: Input, effects: &mut Vec<Effect>) -> bool {
        match input {
            Input::PeerKnown { peer, routes } => self.peer_known(peer, routes, effects),
            Input::PeerEnded { peer } => self.peer_ended(peer, effects),
            Input::Submit(request) => self.submit(request, effects),
            Input::Cancel { batch } => self.cancel(batch, effects),
            Input::PathOpened { path } => self.path_opened(path, effects),
            Input::PathOpenFailed { path, fault } => self.path_open_failed(path, fault, effects),
            Input::PathBroken { path, fault } => self.path_broken(path, fault, effects),
            Input::PathClosed { path, end } => self.path_closed(path, end, effects),
            Input::PathRoom { path } => self.path_room(path, effects),
            Input::PathRefused { path, ticket } => self.path_refused(path, ticket, effects),
            Input::SliceDone { path, ticket } | Input::Notified { path, ticket } => {
                self.completed(path, ticket, effects)
            }
            Input::Failed { path, ticket, fault } => self.failed((path, ticket), fault, effects),
            Input::TimerFired => true,
        }
    }

    fn due(&mut self, timer: Timer, effects: &mut Vec<Effect>) {
        let note = match timer {
            Timer::Batch(slot) => &mut self.batches[slot].timer_us,
            Timer::Path(slot) => &mut self.paths[slot].timer_us,
            Timer::Peer(slot) => &mut self.peers[slot].timer_us,
            Timer::Turn => &mut self.turn_timer_us,
        };
        let due_us = note.take();
        assert!(due_us.is_some_and(|at_us| at_us <= self.now_us), "what is due is in its owner's note");
        match timer {
            Timer::Batch(slot) => self.batch_due(slot, effects),
            Timer::Path(slot) => self.path_due(slot, effects),
            Timer::Peer(slot) => self.consider(slot, effects),
            Timer::Turn => self.look_for_room = true,
        }
    }

    fn peer_known(&mut self, number: PeerNumber, mut routes: Vec<Route>, effects: &mut Vec<Effect>) -> bool {
        if self.peer_slots.contains_key(&number) {
            return false;
        }
        if self.peers.len() >= self.config.max_peers as usize && !self.forget_idle_peer(effects) {
            effects.push(Effect::PeerRefused { peer: number });
            return true;
        }
        routes.retain(|route| route.rail.index() < self.rails.len());
        let slot = self.peers.insert(Peer::new(number, routes, self.now_us));
        self.peer_slots.insert(number, slot);
        self.idle_peers.insert((self.now_us, slot));
        assert!(self.peers.len() <= self.config.max_peers as usize, "I9: peers");
        true
    }

    fn forget_idle_peer(&mut self, effects: &mut Vec<Effect>) -> bool {
        let Some((_, slot)) = self.idle_peers.pop_first() else { return false };
        let mut peer = self.peers.remove(slot);
        assert!(peer.is_idle(), "only a peer without batches and paths is forgotten");
        self.timers.set(Timer::Peer(slot), &mut peer.timer_us, None);
        if peer.waiting {
            self.waiting.retain(|&other| other != slot);
        }
        for rail in &mut self.rails {
            rail.remove(slot);
        }
        let named = self.peer_slots.remove(&peer.number);
        assert!(named == Some(slot), "a peer is found under its number");
        effects.push(Effect::PeerForgotten { peer: peer.number });
        true
    }

    fn peer_ended(&mut self, number: PeerNumber, effects: &mut Vec<Effect>) -> bool {
        let Some(&slot) = self.peer_slots.get(&number) else { return false };
        self.end_peer(slot, effects);
        true
    }

    fn submit(&mut self, request: BatchRequest, effects: &mut Vec<Effect>) -> bool {
        let peer = match self.admit(&request) {
            Ok(peer) => peer,
            Err(refusal) => {
                self.stats.refused += 1;
                effects.push(Effect::Refused { batch: request.batch, refusal });
                return true;
            }
        };
        self.stats.submitted += 1;
        self.ops += request.ops.len() as u64;
        let id = request.batch;
        let batch = Batch::new(request, peer, &self.config, self.now_us);
        let deadline_us = batch.deadline_us;
        let slot = self.batches.insert(batch);
        self.batch_slots.insert(id, slot);
        assert!(self.batches.len() <= self.config.max_batches as usize, "I9: batches");
        assert!(self.ops <= u64::from(self.config.max_ops), "I9: ops");
        self.idle_peers.remove(&(self.peers[peer].used_us, peer));
        self.peers[peer].batches.insert(slot);
        self.enqueue(slot, self.batches[slot].unposted_bytes);
        if deadline_us <= self.now_us {
            self.late(slot, effects);
            return true;
        }
        self.timers.set(Timer::Batch(slot), &mut self.batches[slot].timer_us, Some(deadline_us));
        self.settle(slot, effects);
        self.wake(peer, effects);
        self.consider(peer, effects);
        true
    }

    /// The slot of the peer, or why the batch is not taken.
    fn admit(&self, request: &BatchRequest) -> Result<u32, Refusal> {
        let config = &self.config;
        let full = |bound, limit: u32| Refusal::Full { bound, limit: u64::from(limit) };
        if request.ops.iter().any(|op| op.bytes == 0) || (request.ops.is_empty() && !request.notice) {
            return Err(Refusal::Empty);
        }
        if request.ops.len() > config.max_ops_per_batch as usize {
            return Err(Refusal::TooManyOps);
        }
        let bytes_max = u64::from(config.slices_per_batch_max) * u64::from(config.slice_bytes_max);
        let bytes = request.ops.iter().try_fold(0u64, |sum, op| sum.checked_add(op.bytes));
        if bytes.is_none_or(|bytes| bytes > bytes_max) {
            return Err(Refusal::TooLarge);
        }
        if self.batch_slots.contains_key(&request.batch) {
            return Err(Refusal::Duplicate);
        }
        let slot = *self.peer_slots.get(&request.peer).ok_or(Refusal::PeerUnknown)?;
        if self.peers[slot].ended {
            return Err(Refusal::PeerEnded);
        }
        if self.peers[slot].routes.is_empty() {
            return Err(Refusal::PeerUnknown);
        }
        if self.batches.len() >= config.max_batches as usize {
            return Err(full(BoundKind::Batches, config.max_batches));
        }
        if self.ops + request.ops.len() as u64 > u64::from(config.max_ops) {
            return Err(full(BoundKind::Ops, config.max_ops));
        }
        Ok(slot)
    }

    fn cancel(&mut self, id: BatchId, effects: &mut Vec<Effect>) -> bool {
        let Some(&slot) = self.batch_slots.get(&id) else { return false };
        self.begin_end(slot, End::Cancelled, effects);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Priority;
    use crate::testing::bench::*;
    use crate::*;
    use alloc::vec;

    const FAULTS: [Fault; 5] = [Fault::Path, Fault::Silent, Fault::Stale, Fault::Invalid, Fault::Corrupt];

    /// Every fact about a path or a ticket, for these names.
    fn facts(path: PathNumber, ticket: SliceTicket) -> Vec<Input> {
        let mut facts = vec![
            Input::PathOpened { path },
            Input::PathClosed { path, end: PathEnd::Fenced },
            Input::PathClosed { path, end: PathEnd::PeerUnknown },
            Input::PathRoom { path },
            Input::PathRefused { path, ticket },
            Input::SliceDone { path, ticket },
            Input::Notified { path, ticket },
        ];
        for fault in FAULTS {
            facts.push(Input::PathOpenFailed { path, fault });
            facts.push(Input::PathBroken { path, fault });
            facts.push(Input::Failed { path, ticket, fault });
        }
        facts
    }

    fn ops(sizes: &[u64]) -> Vec<Op> {
        let op = |&bytes: &u64| Op { direction: Direction::Read, bytes, location: 0 };
        sizes.iter().map(op).collect()
    }

    #[test]
    fn facts_about_what_is_not_known_change_nothing_in_any_state() {
        let mut bench = Bench::new(rails(2), 2, &[0, 0]);
        let mut unknown = facts(PathNumber(99), SliceTicket(99));
        unknown.extend([
            Input::PeerEnded { peer: PeerNumber(99) },
            Input::Cancel { batch: BatchId(99) },
            Input::PeerKnown { peer: PeerNumber(0), routes: Vec::new() },
        ]);
        let try_all = |bench: &mut Bench| unknown.iter().for_each(|input| bench.ignores(input.clone()));
        try_all(&mut bench);
        let path = opens(&bench.submit(write(1, 0, 1_000)))[0];
        try_all(&mut bench);
        let post = posts(&bench.opened(path))[0];
        try_all(&mut bench);
        bench.broken(post.path, Fault::Path);
        try_all(&mut bench);
        bench.cancel(1);
        bench.closed(post.path, PathEnd::PeerUnknown);
        try_all(&mut bench);
        assert_eq!(bench.core.stats().ignored_inputs, 5 * unknown.len() as u64);
    }

    #[test]
    fn a_path_that_is_gone_is_never_heard_of_again() {
        let (mut bench, post) = Bench::moving(MoverConfig::default());
        bench.done(post);
        bench.broken(post.path, Fault::Path);
        bench.closed(post.path, PathEnd::Fenced);
        facts(post.path, post.ticket).into_iter().for_each(|fact| bench.ignores(fact));
    }

    #[test]
    fn a_closing_path_hears_only_that_it_has_closed() {
        let (mut bench, post) = Bench::moving(MoverConfig::default());
        bench.broken(post.path, Fault::Path);
        for fact in facts(post.path, post.ticket) {
            if !matches!(fact, Input::PathClosed { .. } | Input::PathRoom { .. }) {
                bench.ignores(fact);
            }
        }
        assert_eq!(bench.core.stats().paths, 1);
    }

    /// Any fact, true or not, about names that mostly exist.
    fn noise(rng: &mut Rng, core: &MoverCore, seen: &[(PathNumber, SliceTicket)]) -> Input {
        let batch = BatchId(rng.below(12));
        // Lives go by: the names of peers move on with time.
        let peer = PeerNumber((core.now_us / 1_000_000) as u32 + rng.below(3) as u32);
        if rng.below(3) == 0 {
            let sizes: Vec<u64> = (0..rng.below(3)).map(|_| rng.below(100_000)).collect();
            let priority = Priority::ALL[rng.below(4) as usize];
            let deadline_us = (rng.below(3) == 0).then(|| core.now_us + rng.below(100_000));
            let notice = rng.below(2) == 0;
            let ops = ops(&sizes);
            return Input::Submit(BatchRequest { batch, peer, priority, deadline_us, notice, ops });
        }
        match rng.below(200) {
            0..5 => return Input::Cancel { batch },
            5 => return Input::PeerEnded { peer },
            6..20 => {
                let route = |rail| Route { rail: RailNumber(rail), tier: rng.below(2) as u8 };
                return Input::PeerKnown { peer, routes: (0..4).map(route).collect() };
            }
            20..25 => return Input::TimerFired,
            _ => {}
        }
        let newest = seen.len().saturating_sub(1 + rng.below(6) as usize);
        let (path, ticket) = seen.get(newest).copied().unwrap_or((PathNumber(0), SliceTicket(0)));
        let path = if rng.below(8) == 0 { PathNumber(rng.below(40) as u32) } else { path };
        let mut facts = facts(path, ticket);
        if rng.below(4) > 0 {
            facts.retain(|fact| matches!(fact, Input::PathOpened { .. } | Input::SliceDone { .. }));
        }
        facts[rng.below(facts.len() as u64) as usize].clone()
    }

    #[test]
    fn no_order_of_facts_however_wrong_breaks_an_invariant() {
        let mut sum = MoverStats::default();
        for seed in 0..40 {
            let mut rng = Rng::new(seed);
            let config = MoverConfig {
                max_peers: 5,
                max_paths: 3,
                max_batches: 6,
                slice_tries: 2,
                route_tries: 3,
                ..rails(3)
            };
            let mut bench = Bench::new(config, 3, &[0, 0, 1]);
            let mut seen = Vec::new();
            for _ in 0..1_500 {
                bench.now_us += rng.below(20_000);
                let input = noise(&mut rng, &bench.core, &seen);
                for effect in bench.feed(input) {
                    match effect {
                        Effect::OpenPath { path, .. } => seen.push((path, SliceTicket(0))),
                        Effect::Post { path, ticket, .. }
                        | Effect::Probe { path, ticket }
                        | Effect::Notify { path, ticket, .. } => seen.push((path, ticket)),
                        _ => {}
                    }
                }
            }
            let stats = bench.core.stats();
            sum.done += stats.done;
            sum.failed += stats.failed;
            sum.refused += stats.refused;
            sum.paths_broken += stats.paths_broken;
            sum.ignored_inputs += stats.ignored_inputs;
        }
        let all = [sum.done, sum.failed, sum.refused, sum.paths_broken, sum.ignored_inputs];
        assert!(all.iter().all(|&count| count > 100), "the noise reached too little: {sum:?}");
    }

    /// A description, the batch's number, its peer, the sizes of its ops, and the expected refusal.
    type Request = (&'static str, u64, u32, &'static [u64], Option<Refusal>);

    #[test]
    fn each_bound_of_a_batch_is_met_and_not_passed_and_the_first_breach_is_told() {
        let config = MoverConfig {
            max_ops_per_batch: 3,
            max_ops: 5,
            max_batches: 3,
            slices_per_batch_max: 2,
            slice_bytes: 4_096,
            slice_bytes_max: 8_192,
            ..MoverConfig::default()
        };
        let full = |bound, limit| Some(Refusal::Full { bound, limit });
        // In order, each on top of those that were taken before.
        let script: [Request; 13] = [
            ("no ops, no notice", 1, 0, &[], Some(Refusal::Empty)),
            ("an op of nothing", 1, 0, &[1, 0, 1, 1], Some(Refusal::Empty)),
            ("one op too many", 1, 0, &[1; 4], Some(Refusal::TooManyOps)),
            ("one byte too many", 1, 0, &[8_192, 8_193], Some(Refusal::TooLarge)),
            ("more than can be counted", 1, 0, &[u64::MAX, 1], Some(Refusal::TooLarge)),
            ("nobody", 1, 7, &[1], Some(Refusal::PeerUnknown)),
            ("nowhere", 1, 1, &[1], Some(Refusal::PeerUnknown)),
            ("as much as may be", 1, 0, &[8_192, 8_191, 1], None),
            ("its name again, too large", 1, 0, &[8_193, 8_192], Some(Refusal::TooLarge)),
            ("its name again", 1, 7, &[1], Some(Refusal::Duplicate)),
            ("too many ops in all", 2, 0, &[1; 3], full(BoundKind::Ops, 5)),
            ("just so many", 2, 0, &[1; 2], None),
            ("no op left", 3, 0, &[1], full(BoundKind::Ops, 5)),
        ];
        let mut bench = Bench::new(config, 1, &[0]);
        bench.know(1, &[]);
        for (what, batch, peer, sizes, wanted) in script {
            let effects = bench.submit(BatchRequest { ops: ops(sizes), ..write(batch, peer, 1) });
            let refused = effects.iter().find_map(|effect| match effect {
                Effect::Refused { refusal, .. } => Some(*refusal),
                _ => None,
            });
            assert_eq!(refused, wanted, "{what}");
        }
        let told = |batch| BatchRequest { notice: true, ops: Vec::new(), ..write(batch, 0, 1) };
        assert_eq!(bench.submit(told(3)), [], "a notice needs no op");
        let refusal = Refusal::Full { bound: BoundKind::Batches, limit: 3 };
        assert_eq!(bench.submit(told(4)), [Effect::Refused { batch: BatchId(4), refusal }]);
        bench.cancel(2);
        assert_eq!(bench.submit(told(4)), [], "what ends makes room");
        assert_eq!((bench.core.stats().submitted, bench.core.stats().refused), (4, 12));
    }

    #[test]
    fn the_peer_that_rested_longest_is_forgotten_for_a_new_one() {
        let config = MoverConfig { max_peers: 3, ..MoverConfig::default() };
        let mut bench = Bench::new(config, 0, &[]);
        for peer in 0..3 {
            bench.now_us += 10;
            bench.know(peer, &[0]);
        }
        bench.now_us += 10;
        // The first has just been of use, without ever having had a path.
        bench.submit(BatchRequest { deadline_us: Some(0), ..write(1, 0, 10) });
        let forgotten = |peer| [Effect::PeerForgotten { peer: PeerNumber(peer) }];
        assert_eq!(bench.know(3, &[0]), forgotten(1));
        assert_eq!(bench.know(4, &[0]), forgotten(2));
        bench.start(write(2, 3, 10));
        bench.submit(write(3, 4, 10));
        assert_eq!(bench.know(5, &[0]), forgotten(0));
        bench.submit(write(4, 5, 10));
        assert_eq!(bench.know(6, &[0]), [Effect::PeerRefused { peer: PeerNumber(6) }]);
        bench.ignores(Input::PeerEnded { peer: PeerNumber(1) });
        assert_eq!(bench.core.stats().peers, 3);
    }

    #[test]
    fn routes_over_rails_that_do_not_exist_are_left_out() {
        let mut bench = Bench::new(rails(2), 1, &[2, 1, 0, 0, 0]);
        assert_eq!(opens_to(&bench.submit(write(1, 0, 10))), [(0, 1)]);
        assert_eq!(bench.core.peers[0].routes.len(), 2);
    }

    #[test]
    fn all_that_is_due_happens_before_the_fact_and_in_the_order_of_its_time() {
        let mut bench = Bench::new(MoverConfig::default(), 1, &[0]);
        for (batch, deadline_us) in [(1, 3_000), (2, 2_000), (3, 9_000), (4, 5_000)] {
            bench.submit(BatchRequest { deadline_us: Some(deadline_us), ..write(batch, 0, 10) });
        }
        assert_eq!(bench.core.next_deadline(), Some(2_000));
        bench.now_us = 5_000;
        let effects = bench.cancel(4);
        assert_eq!(ends(&effects).iter().map(|end| end.0).collect::<Vec<_>>(), [2, 1, 4]);
        assert_eq!(ends(&effects)[2].1, "failed", "it was late before it was cancelled");
        assert_eq!(bench.core.stats().ignored_inputs, 1);
        bench.now_us = 1;
        assert_eq!(bench.feed(Input::TimerFired), []);
        assert_eq!((bench.core.now_us, bench.core.stats().clock_regressions), (5_000, 1));
    }

    #[test]
    fn an_idle_core_sleeps() {
        let mut bench = Bench::new(MoverConfig::default(), 2, &[0]);
        assert_eq!(bench.core.next_deadline(), None);
        let orders = bench.submit(write(1, 0, 1 << 20));
        assert!(bench.core.next_deadline().is_some());
        bench.obey(orders);
        bench.pass(1_000_000);
        assert_eq!(bench.core.next_deadline(), None, "an idle path needs no care");
    }
}
