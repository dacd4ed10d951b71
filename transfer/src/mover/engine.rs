//! The core itself: what it keeps, and how facts come in.

use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::vec::Vec;
use core::hash::BuildHasherDefault;

use baton_types::Rng;
use hashbrown::HashMap;

use super::batch::{Batch, End};
use super::path::Path;
use super::peer::Peer;
use super::rail::{CLASSES, Rail, weights};
use super::slab::Slab;
use super::slices::Slices;
use super::timers::{Timer, Timers};
use super::{
    BatchId, BatchRequest, Bound, Effect, Input, MoverConfig, MoverStats, PathNumber, PeerNumber, Refusal,
    Route,
};
use crate::ids::Mix;

/// Slots by name; never iterated.
type SlotsBy<Name> = HashMap<Name, u32, BuildHasherDefault<Mix>>;

/// Moves batches over paths, in time that is handed in. See [`crate::mover`] for the rules.
#[derive(Clone, Debug)]
pub struct MoverCore {
    pub(crate) config: MoverConfig,
    pub(crate) weights: [u64; CLASSES],
    pub(crate) now_us: u64,
    pub(crate) rng: Rng,
    pub(crate) stats: MoverStats,
    pub(crate) batches: Slab<Batch>,
    pub(crate) batch_slots: SlotsBy<BatchId>,
    /// Ops of all batches that live.
    pub(crate) ops: u64,
    pub(crate) peers: Slab<Peer>,
    pub(crate) peer_slots: SlotsBy<PeerNumber>,
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
    /// `config` must be valid: check it when it is read.
    #[must_use]
    pub fn new(config: MoverConfig) -> Self {
        debug_assert_eq!(config.validate(), Ok(()), "validate the config before it is used");
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
    /// What is due by `now_us` happens first. Total: an input that names nothing known is counted and changes
    /// nothing, and time that goes back is taken as standing still (I11).
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
                self.ended_well(path, ticket, effects)
            }
            Input::Failed { path, ticket, fault } => self.failed((path, ticket), fault, effects),
            Input::TimerFired => true,
        }
    }

    fn due(&mut self, timer: Timer, effects: &mut Vec<Effect>) {
        match timer {
            Timer::Batch(slot) => {
                self.batches[slot].timer_us = None;
                self.batch_due(slot, effects);
            }
            Timer::Path(slot) => {
                self.paths[slot].timer_us = None;
                self.path_due(slot, effects);
            }
            Timer::Peer(slot) => {
                self.peers[slot].timer_us = None;
                self.consider(slot, effects);
            }
            Timer::Turn => {
                self.turn_timer_us = None;
                self.look_for_room = true;
            }
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
        true
    }

    fn forget_idle_peer(&mut self, effects: &mut Vec<Effect>) -> bool {
        let Some((_, slot)) = self.idle_peers.pop_first() else { return false };
        let mut peer = self.peers.remove(slot);
        self.timers.set(Timer::Peer(slot), &mut peer.timer_us, None);
        if peer.waiting {
            self.waiting.retain(|&other| other != slot);
        }
        for rail in &mut self.rails {
            rail.remove(slot);
        }
        self.peer_slots.remove(&peer.number);
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
            return Err(full(Bound::Batches, config.max_batches));
        }
        if self.ops + request.ops.len() as u64 > u64::from(config.max_ops) {
            return Err(full(Bound::Ops, config.max_ops));
        }
        Ok(slot)
    }

    fn cancel(&mut self, id: BatchId, effects: &mut Vec<Effect>) -> bool {
        let Some(&slot) = self.batch_slots.get(&id) else { return false };
        self.begin_end(slot, End::Cancelled, effects);
        true
    }
}
