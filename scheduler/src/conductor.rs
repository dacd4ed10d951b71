//! The core itself: one mutator, one wake-up time, plain statistics.

use alloc::vec::Vec;
use baton_types::{CacheChange, CacheEvent, Epoch, InstanceId, RequestId, Rng};
use core::hash::{BuildHasher, Hasher};

use crate::cold::ColdPrefixes;
use crate::coming::PendingPrefixes;
use crate::estimate::{LengthEstimator, MarginEstimator};
use crate::expected::ReserveEstimator;
use crate::fleet::Fleet;
use crate::index::{MatchScratch, PrefixIndex};
use crate::last_copies::LastCopies;
use crate::placement::Hits;
use crate::replicate::Replicator;
use crate::request::Requests;
use crate::roles::DemandWindow;
use crate::shares::FairShares;
use crate::stats::SchedulerStats;
use crate::tickets::{KeptPlaces, TicketLedger};
use crate::timers::Timers;
use crate::{ConfigError, Effect, Input, InstanceState, SchedulerConfig};

/// The latest time, µs: 36,000 years. Times of predictions can be added to it without overflow.
/// Nor do accounts and counters of a saved state go further.
pub(crate) const LATEST_US: u64 = 1 << 60;

/// A hasher for ids that are dense or already hashed: the same on every machine (I10).
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct FixedState;

/// See [`FixedState`].
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct FixedHasher(u64);

impl BuildHasher for FixedState {
    type Hasher = FixedHasher;
    fn build_hasher(&self) -> FixedHasher {
        FixedHasher(0)
    }
}

impl Hasher for FixedHasher {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }
    fn write_u64(&mut self, value: u64) {
        let mixed = (self.0 ^ value).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        self.0 = mixed ^ (mixed >> 32);
    }
}

/// Decides where each request goes. See the crate's documentation.
#[derive(Debug)]
pub struct Conductor {
    pub(crate) config: SchedulerConfig,
    pub(crate) now_us: u64,
    pub(crate) fleet: Fleet,
    pub(crate) index: PrefixIndex,
    pub(crate) scratch: MatchScratch,
    pub(crate) hits: Hits,
    pub(crate) requests: Requests,
    pub(crate) coming: PendingPrefixes,
    /// This router's requests that wait to be sent.
    pub(crate) queued: PendingPrefixes,
    pub(crate) cold: ColdPrefixes,
    /// Requests not yet placed, in order of arrival (`dynamo_wspt` only).
    pub(crate) unplaced: Vec<RequestId>,
    pub(crate) fair: FairShares,
    pub(crate) tickets: TicketLedger,
    /// What tickets keep from the request that is being placed.
    pub(crate) kept: KeptPlaces,
    pub(crate) lengths: LengthEstimator,
    pub(crate) margins: MarginEstimator,
    pub(crate) demand: DemandWindow,
    pub(crate) reserve: ReserveEstimator,
    pub(crate) replicator: Replicator,
    pub(crate) last_copies: LastCopies,
    pub(crate) timers: Timers,
    pub(crate) rng: Rng,
    pub(crate) turn: u64,
    pub(crate) sequence: u64,
    pub(crate) stats: SchedulerStats,
    /// The number of this router among those that share the cluster; none where it is alone.
    pub(crate) router: Option<u32>,
    /// Room was released, in this step or while held requests were last checked.
    pub(crate) room_came: bool,
    /// Sends work this long ahead; only tests set it.
    #[cfg(test)]
    pub(crate) ahead_for_test_us: Option<u64>,
}

impl Conductor {
    /// A conductor without instances.
    ///
    /// # Errors
    /// Names the setting that is out of bounds.
    pub fn new(config: SchedulerConfig) -> Result<Self, ConfigError> {
        config.validate()?;
        let lengths = LengthEstimator::new(config.classes.len(), config.prior_output_tokens);
        let rng = Rng::fork(config.seed, 1);
        let mut conductor = Self {
            now_us: 0,
            fleet: Fleet::default(),
            index: PrefixIndex::new(),
            scratch: MatchScratch::default(),
            hits: Hits::default(),
            requests: Requests::default(),
            coming: PendingPrefixes::default(),
            queued: PendingPrefixes::default(),
            cold: ColdPrefixes::default(),
            unplaced: Vec::new(),
            fair: FairShares::default(),
            tickets: TicketLedger::default(),
            kept: KeptPlaces::default(),
            margins: MarginEstimator::new(config.classes.len()),
            lengths,
            demand: DemandWindow::default(),
            reserve: ReserveEstimator::default(),
            replicator: Replicator::default(),
            last_copies: LastCopies::default(),
            timers: Timers::default(),
            rng,
            turn: 0,
            sequence: 0,
            stats: SchedulerStats::default(),
            router: None,
            room_came: false,
            #[cfg(test)]
            ahead_for_test_us: None,
            config,
        };
        conductor.fleet.keep_orders(conductor.config.step_target_us());
        Ok(conductor)
    }

    /// Handles one fact and appends the effects. It is total: an input that does not fit the state (an unknown request,
    /// an older epoch) is counted and otherwise ignored. Time never goes back: an earlier `now_us` counts as the latest
    /// seen (I11). A time that no clock shows, as in a damaged journal, counts as the largest allowed.
    pub fn step(&mut self, now_us: u64, input: Input, effects: &mut Vec<Effect>) {
        self.now_us = self.now_us.max(now_us.min(LATEST_US));
        self.share_input(&input, effects);
        match input {
            Input::InstanceJoined(spec) => self.instance_joined(spec, effects),
            Input::InstanceDrained { instance } => self.instance_drained(instance, effects),
            Input::InstanceResumed { instance } => self.instance_resumed(instance),
            Input::RoleChanged { instance, role } => self.role_changed(instance, role, effects),
            Input::PolicyChanged(config) => self.policy_changed(*config),
            Input::InstanceLost { instance, epoch } => self.instance_lost(instance, epoch, effects),
            Input::RequestArrived(request) => self.request_arrived(request, effects),
            Input::RequestCancelled { request } => self.request_cancelled(request, effects),
            Input::Cache(event) => self.cache_changed(&event, effects),
            Input::PrefillFinished { request, compute_us, cached_tokens } => {
                self.prefill_finished(request, (compute_us, cached_tokens), effects);
            }
            Input::PrefillFailed { request } => self.prefill_failed(request, effects),
            Input::LegRefused { request, instance, emitted_tokens, busy_us } => {
                self.leg_refused((request, instance), (emitted_tokens, busy_us), effects);
            }
            Input::HandoffFinished { request } => self.handoff_finished(request, effects),
            Input::HandoffFailed { request } => self.handoff_failed(request, effects),
            Input::FetchFinished { request, ok } => self.fetch_finished(request, ok),
            Input::TokensEmitted { request, emitted_tokens } => self.tokens_emitted(request, emitted_tokens),
            Input::DecodeFailed { request, emitted_tokens } => {
                self.decode_failed(request, emitted_tokens, effects);
            }
            Input::Preempted { request, emitted_tokens } => self.preempted(request, emitted_tokens, effects),
            Input::RoomOutgrown { request, emitted_tokens } => self.room_outgrown(request, emitted_tokens),
            Input::DecodeFinished { request, output_tokens, first_us, tbt_us } => {
                self.decode_finished(request, (output_tokens, first_us, tbt_us), effects);
            }
            Input::ReplicateFinished { to } => self.replicate_finished(to, effects),
            Input::PeerPlaced(placed) => self.peer_placed(*placed, effects),
            Input::PeerDisplaced { request } => self.peer_displaced(request, effects),
            Input::PeerTicket(ticket) => self.peer_ticket(*ticket),
            Input::PeerTicketTaken { name } => _ = self.tickets.take_named(name),
            Input::TimerFired => {}
        }
        self.retry_held(effects);
        self.run_queues(effects);
        assert!(
            self.requests.len() <= self.config.max_waiting_requests as usize + 1,
            "{} live requests exceed the bound (I9)",
            self.requests.len()
        );
        assert!(self.stats.last_decision.is_none(), "a decision is handed out in the step that made it");
    }

    /// The latest time at which the conductor must be stepped with [`Input::TimerFired`].
    pub fn next_deadline(&mut self) -> Option<u64> {
        self.timers.next()
    }

    /// Whether a request is live here.
    #[must_use]
    pub fn knows(&self, request: RequestId) -> bool {
        self.requests.contains(request)
    }

    /// Whether some instance decodes what another of its kind, or itself, is there to prefill.
    #[must_use]
    pub fn has_pair(&self) -> bool {
        self.fleet.prefills.iter().any(|id| self.fleet.decodes_of(*id).next().is_some())
    }

    /// Whether a request could be prefilled and decoded: by a pair, or by a decode instance alone where it may prefill.
    #[must_use]
    pub fn can_serve(&self) -> bool {
        self.has_pair() || self.mixing().next().is_some()
    }

    /// How many instances that are there to prefill take work.
    #[must_use]
    pub fn prefills(&self) -> usize {
        self.fleet.prefills.len()
    }

    /// When a request's decode began or is predicted to begin, µs.
    #[must_use]
    pub fn decodes_at_us(&self, request: RequestId) -> Option<u64> {
        self.requests.get(request).map(|entry| entry.decode_at_us)
    }

    /// What was predicted of a request when it was first placed.
    #[must_use]
    pub fn prediction(&self, request: RequestId) -> Option<crate::Prediction> {
        self.requests.get(request)?.prediction
    }

    /// How long all KV of a placed request takes from its prefill to its decode instance with both links to itself, µs.
    #[must_use]
    pub fn handoff_us(&self, request: RequestId) -> Option<u64> {
        let entry = self.requests.get(request)?;
        let (source, target) = (self.fleet.get(entry.prefill)?, self.fleet.get(entry.decode?)?);
        Some(crate::estimate::alone_us(source, target, entry.request.prompt_tokens))
    }

    /// Live requests, other routers' included.
    #[must_use]
    pub fn live_requests(&self) -> usize {
        self.requests.len()
    }

    /// Calls `each` with every instance that a live request refers to; some come more than once. While a request refers
    /// to an instance, its number must not be given to another.
    pub fn referenced_instances(&self, each: impl FnMut(InstanceId)) {
        let of = |entry: &crate::request::Entry| {
            let prefill = (entry.stage != crate::request::Stage::Unplaced).then_some(entry.prefill);
            [prefill, entry.decode, entry.excluded, entry.fetch.map(|fetch| fetch.from)]
        };
        self.requests.iter().flat_map(of).flatten().for_each(each);
    }

    /// The configuration in force.
    #[must_use]
    pub const fn config(&self) -> &SchedulerConfig {
        &self.config
    }

    /// The prefix index, for questions about replicas and memory.
    #[must_use]
    pub const fn index(&self) -> &PrefixIndex {
        &self.index
    }

    fn instance_joined(&mut self, spec: crate::InstanceSpec, effects: &mut Vec<Effect>) {
        let (id, epoch) = (spec.id, spec.epoch);
        if let Some(known) = self.fleet.get(id).map(|i| i.spec.epoch)
            && known < epoch
        {
            self.instance_lost(id, known, effects);
        }
        if !self.fleet.join(spec) {
            self.stats.stale_inputs += 1;
            return;
        }
        self.wake_waiting();
    }

    /// Retries requests that wait for a decode instance.
    pub(crate) fn wake_waiting(&mut self) {
        self.room_came = true;
        let now_us = self.now_us;
        let waiting = self.fleet.iter().filter(|i| !i.prefill.waiting().is_empty());
        waiting.for_each(|i| self.timers.set(i.spec.id, now_us));
    }

    fn cache_changed(&mut self, event: &CacheEvent, effects: &mut Vec<Effect>) {
        if !self.is_current(event.instance, event.epoch) {
            self.stats.stale_inputs += 1;
            return;
        }
        match &event.change {
            CacheChange::Stored { parent, hashes, tier } => {
                let outcome = self.index.insert(*parent, hashes, event.instance, *tier);
                self.stats.index_refused_blocks += outcome.refused as u64;
                self.last_copies.blocks_added(event.instance, outcome.added);
                self.save_from(event.instance, effects);
            }
            CacheChange::Removed { hashes, tier } => {
                let before = self.index.held_blocks(event.instance);
                self.index.remove(hashes, event.instance, *tier);
                if self.index.held_blocks(event.instance) < before {
                    self.last_copies.blocks_removed(event.instance);
                }
            }
            CacheChange::Cleared => {
                self.index.clear(event.instance);
                self.last_copies.cleared(event.instance);
            }
        }
    }

    /// Whether `epoch` is the present life of a living instance (I12).
    pub(crate) fn is_current(&self, instance: InstanceId, epoch: Epoch) -> bool {
        self.fleet.get(instance).is_some_and(|i| i.spec.epoch == epoch && i.state != InstanceState::Lost)
    }
}
