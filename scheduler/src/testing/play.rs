//! Runs a conductor by a script, checked by an [`Oracle`].

use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::format;
use alloc::sync::Arc;
use alloc::vec;
use alloc::vec::Vec;
use baton_types::{
    BlockHash, CacheChange, CacheEvent, ClassId, CostProfile, Epoch, InstanceId, RequestId, Role, SloClass,
    TenantId, Tier,
};
use proptest::prelude::*;

use super::oracle::Phase;
use super::{Oracle, assert_idle, request, spec};
use crate::{
    AdmissionMode, Conductor, Effect, Input, InstanceSpec, InstanceState, PolicyName, Request,
    SchedulerConfig,
};

/// One event; numbers pick among the candidates at that time.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Act {
    /// Time passes, µs, and timers fire.
    Wait(u32),
    /// A request arrives: length, shared blocks, kind (class and tenant).
    Arrive(u16, u8, u8),
    /// A live prefill, hand-off, fetch or decode ends.
    Advance(u8),
    /// A fetch ends, successfully or not.
    Fetched(u8, bool),
    /// A hand-off (or the decode side during a prefill) fails.
    Fails(u8),
    /// A prefill fails on a living instance.
    Spoils(u8),
    /// An engine refuses a leg for so many ms.
    Refuses(u8, u16),
    /// A decode fails on a living instance; the length of its answer so far.
    Stalls(u8, u16),
    /// A request is preempted for an older one; the length of its answer so far.
    Yields(u8, u16),
    /// An answer is longer than its room.
    Outgrows(u8, u16),
    /// A live request is cancelled.
    Cancel(u8),
    /// An instance is lost.
    Lose(u8),
    /// An instance joins, in a new epoch if it was known.
    Join(u8),
    /// An instance is drained.
    Drain(u8),
    /// An instance takes work again.
    Resume(u8),
    /// An instance changes its role.
    Role(u8, u8),
    /// The settings change, validly or not.
    Policy(u8, u16),
    /// Blocks are stored or removed: instance, number, kind of change.
    Cache(u8, u8, u8),
    /// Another router places a request.
    Peer(u8, u8, u16),
    /// The length of an answer is reported, as before the loss of its decode.
    Emits(u8, u16),
    /// A stale message: kind and number.
    Stale(u8, u8),
}

/// Scripts of up to `most` acts.
pub(crate) fn scripts(most: usize) -> impl Strategy<Value = Vec<Act>> {
    let act = prop_oneof![
        4 => (0u32..3_000_000).prop_map(Act::Wait),
        10 => (1u16..39_999, 0u8..20, any::<u8>()).prop_map(|(t, s, k)| Act::Arrive(t, s, k)),
        14 => any::<u8>().prop_map(Act::Advance),
        2 => (any::<u8>(), any::<bool>()).prop_map(|(n, ok)| Act::Fetched(n, ok)),
        2 => any::<u8>().prop_map(Act::Fails),
        2 => any::<u8>().prop_map(Act::Spoils),
        2 => (any::<u8>(), any::<u16>()).prop_map(|(n, ms)| Act::Refuses(n, ms)),
        2 => (any::<u8>(), any::<u16>()).prop_map(|(n, t)| Act::Stalls(n, t)),
        3 => (any::<u8>(), 0u16..2000).prop_map(|(n, t)| Act::Yields(n, t)),
        3 => (any::<u8>(), any::<u16>()).prop_map(|(n, t)| Act::Outgrows(n, t)),
        2 => any::<u8>().prop_map(Act::Cancel),
        1 => any::<u8>().prop_map(Act::Lose),
        2 => any::<u8>().prop_map(Act::Join),
        1 => any::<u8>().prop_map(Act::Drain),
        1 => any::<u8>().prop_map(Act::Resume),
        1 => (any::<u8>(), any::<u8>()).prop_map(|(n, r)| Act::Role(n, r)),
        1 => (any::<u8>(), any::<u16>()).prop_map(|(k, v)| Act::Policy(k, v)),
        3 => (any::<u8>(), 1u8..20, any::<u8>()).prop_map(|(i, n, w)| Act::Cache(i, n, w)),
        2 => (any::<u8>(), any::<u8>(), any::<u16>()).prop_map(|(p, d, w)| Act::Peer(p, d, w)),
        1 => (any::<u8>(), any::<u16>()).prop_map(|(n, t)| Act::Emits(n, t)),
        3 => (any::<u8>(), any::<u8>()).prop_map(|(k, n)| Act::Stale(k, n)),
    ];
    proptest::collection::vec(act, 1..most)
}

/// First id of the requests that other routers place.
const PEERS: u64 = 1 << 32;

/// The conductor, the oracle, and all orders.
#[derive(Debug)]
pub(crate) struct Play {
    pub conductor: Conductor,
    pub oracle: Oracle,
    pub now_us: u64,
    pub effects: Vec<Effect>,
    /// All inputs of the conductor, with their times.
    pub inputs: Vec<(u64, Input)>,
    epochs: BTreeMap<u32, u32>,
    roles: Vec<Role>,
    /// Whether instances are of two kinds, and change their kind with each new epoch.
    upgrades: bool,
    /// The cost profile that instances announce, if not the usual one.
    profile: Option<Arc<CostProfile>>,
    next_id: u64,
    foreign: Vec<(RequestId, Phase)>,
}

fn pick<T: Copy>(from: &[T], n: u8) -> Option<T> {
    (!from.is_empty()).then(|| from[usize::from(n) % from.len()])
}

impl Play {
    /// A conductor over instances of the given roles.
    pub(crate) fn new(config: SchedulerConfig, roles: &[Role]) -> Self {
        Self::of_kinds(config, roles, false)
    }

    /// As [`Self::new`], with instances of two kinds if `upgrades`.
    pub(crate) fn of_kinds(config: SchedulerConfig, roles: &[Role], upgrades: bool) -> Self {
        Self::of(config, roles, (upgrades, None))
    }

    /// As [`Self::new`], with instances that announce this profile.
    pub(crate) fn at_cost(config: SchedulerConfig, roles: &[Role], profile: CostProfile) -> Self {
        Self::of(config, roles, (false, Some(Arc::new(profile))))
    }

    fn of(
        config: SchedulerConfig,
        roles: &[Role],
        (upgrades, profile): (bool, Option<Arc<CostProfile>>),
    ) -> Self {
        let mut play = Self {
            conductor: Conductor::new(config).expect("a valid test config"),
            oracle: Oracle::default(),
            now_us: 0,
            effects: Vec::new(),
            inputs: Vec::new(),
            epochs: BTreeMap::new(),
            roles: roles.to_vec(),
            upgrades,
            profile,
            next_id: 0,
            foreign: Vec::new(),
        };
        (0..roles.len()).for_each(|id| play.join(u32::try_from(id).expect("few")));
        play
    }

    /// Steps the conductor, audits it, and returns its orders.
    pub(crate) fn feed(&mut self, input: Input) -> Vec<Effect> {
        self.oracle.hears(&input);
        self.inputs.push((self.now_us, input.clone()));
        let mut effects = Vec::new();
        self.conductor.step(self.now_us, input.clone(), &mut effects);
        self.oracle.sees(&input, &effects);
        assert_eq!(self.conductor.check(), Ok(()), "after {input:?}");
        self.audit_flights();
        self.audit_ledgers();
        self.effects.extend(effects.iter().cloned());
        effects
    }

    /// Checks that the flights that the conductor counts on each link are those in progress.
    fn audit_flights(&self) {
        for instance in self.conductor.fleet.iter().filter(|i| i.state != InstanceState::Lost) {
            let id = instance.spec.id;
            let (mut out, mut into) = (0, 0);
            for account in self.oracle.live.values() {
                let moves = matches!(account.phase, Phase::Prefilling | Phase::HandingOff);
                let handoff = moves && account.prefill != account.decode;
                out += usize::from(account.fetch == Some(id));
                out += usize::from(handoff && account.prefill == Some(id));
                into += usize::from(account.fetch.is_some() && account.prefill == Some(id));
                into += usize::from(handoff && account.decode == Some(id));
            }
            // Those of other routers are not in the oracle's books.
            let own = |link: &crate::estimate::LinkLedger| {
                link.requests().filter(|id| self.oracle.live.contains_key(id)).count()
            };
            let counted = (own(&instance.prefill.outbound), own(&instance.inbound));
            assert_eq!(counted, (out, into), "flights out of and into {id}");
        }
    }

    /// Accepted = finished + failed + cancelled + rejected + live, on both sides.
    fn audit_ledgers(&self) {
        let (oracle, stats) = (&self.oracle, self.conductor.stats());
        let ended = oracle.finished + oracle.failed + oracle.cancelled + oracle.rejected;
        assert_eq!(oracle.accepted, ended + oracle.live.len() as u64, "{oracle:?}");
        let counted = (stats.finished, stats.failed, stats.cancelled, stats.rejected_total());
        assert_eq!(counted, (oracle.finished, oracle.failed, oracle.cancelled, oracle.rejected));
        for id in oracle.live.keys() {
            assert!(self.conductor.knows(*id), "request {id} was dropped without a word");
        }
        let foreign = self.foreign.iter().filter(|(id, _)| self.conductor.knows(*id)).count();
        assert_eq!(self.conductor.snapshot().requests as usize, oracle.live.len() + foreign);
    }

    /// Lets an instance join in a new epoch.
    pub(crate) fn join(&mut self, id: u32) {
        let epoch = self.epochs.entry(id).and_modify(|e| *e += 1).or_insert(1);
        let role = self.roles[id as usize];
        // Room for two or three of the longest prompts: decode room runs out all the time.
        let kind = if self.upgrades { (id + *epoch) % 2 } else { 0 };
        let plain = spec(id, role);
        let profile = self.profile.clone().unwrap_or_else(|| plain.profile.clone());
        let spec = InstanceSpec {
            epoch: Epoch(*epoch),
            capacity_tokens: 40_000,
            kind,
            profile,
            may_change_role: true,
            ..plain
        };
        if *epoch > 1 {
            // The oracle learns of the death first: everything of the old epoch ends in this step.
            self.oracle.dies(InstanceId(id));
        }
        let back = Input::InstanceJoined(spec);
        self.feed(back);
    }

    /// Loses an instance.
    pub(crate) fn lose(&mut self, id: u32) -> Vec<Effect> {
        self.oracle.dies(InstanceId(id));
        self.feed(Input::InstanceLost { instance: InstanceId(id), epoch: Epoch(self.epochs[&id]) })
    }

    /// A fresh request arrives.
    pub(crate) fn arrive(&mut self, tokens: u64, shared: u64, kind: u8) -> Vec<Effect> {
        let classes = self.conductor.config().classes.len();
        let class = ClassId(u16::from(kind) % (u16::try_from(classes).expect("few") + 1));
        let request = Request {
            class,
            tenant: TenantId(u32::from(kind / 16)),
            ..request(self.next_id, tokens, shared)
        };
        self.next_id += 1;
        self.feed(Input::RequestArrived(request))
    }

    /// Plays one act. An act without a candidate is skipped.
    pub(crate) fn act(&mut self, act: Act) {
        let count = u8::try_from(self.roles.len()).expect("few");
        match act {
            Act::Wait(us) => {
                self.now_us += u64::from(us);
                self.feed(Input::TimerFired);
            }
            Act::Arrive(tokens, shared, kind) => {
                self.arrive(u64::from(tokens), u64::from(shared), kind);
            }
            Act::Advance(n) => self.advance(n),
            Act::Fetched(n, ok) => {
                let fetching: Vec<RequestId> =
                    self.oracle.live.iter().filter(|(_, a)| a.fetch.is_some()).map(|(id, _)| *id).collect();
                if let Some(request) = pick(&fetching, n) {
                    self.feed(Input::FetchFinished { request, ok });
                }
            }
            Act::Fails(n) => {
                let mut open = self.oracle.in_phase(Phase::HandingOff);
                open.extend(self.oracle.in_phase(Phase::Prefilling));
                if let Some(request) = pick(&open, n) {
                    self.feed(Input::HandoffFailed { request });
                }
            }
            Act::Spoils(n) => {
                let mut open = self.oracle.in_phase(Phase::Prefilling);
                open.extend(self.oracle.in_phase(Phase::HandingOff));
                if let Some(request) = pick(&open, n) {
                    self.feed(Input::PrefillFailed { request });
                }
            }
            Act::Refuses(n, ms) => self.refuse(n, u64::from(ms) * 1000),
            Act::Stalls(n, tokens) => {
                if let Some(request) = pick(&self.oracle.in_phase(Phase::Decoding), n) {
                    self.feed(Input::DecodeFailed { request, emitted_tokens: tokens.into() });
                }
            }
            Act::Yields(n, tokens) => {
                let mut sent = self.oracle.in_phase(Phase::Decoding);
                sent.extend(self.oracle.in_phase(Phase::HandingOff));
                sent.extend(self.oracle.in_phase(Phase::Prefilling));
                if let Some(request) = pick(&sent, n) {
                    self.feed(Input::Preempted { request, emitted_tokens: tokens.into() });
                }
            }
            Act::Outgrows(n, tokens) => {
                if let Some(request) = pick(&self.oracle.in_phase(Phase::Decoding), n) {
                    self.feed(Input::RoomOutgrown { request, emitted_tokens: tokens.into() });
                }
            }
            Act::Cancel(n) => {
                let live: Vec<RequestId> = self.oracle.live.keys().copied().collect();
                if let Some(request) = pick(&live, n) {
                    self.feed(Input::RequestCancelled { request });
                }
            }
            Act::Lose(n) => {
                self.lose(u32::from(n % count));
            }
            Act::Join(n) => self.join(u32::from(n % count)),
            Act::Drain(n) => {
                self.feed(Input::InstanceDrained { instance: InstanceId(u32::from(n % count)) });
            }
            Act::Resume(n) => {
                self.feed(Input::InstanceResumed { instance: InstanceId(u32::from(n % count)) });
            }
            Act::Role(n, role) => {
                let role = [Role::Prefill, Role::Decode, Role::Both, Role::Store][usize::from(role) % 4];
                self.feed(Input::RoleChanged { instance: InstanceId(u32::from(n % count)), role });
            }
            Act::Policy(kind, value) => self.change_policy(kind, value),
            Act::Cache(n, blocks, what) => self.cache(u32::from(n % count), u64::from(blocks), what),
            Act::Peer(p, d, work) => self.peer(p, d, work),
            Act::Emits(n, tokens) => {
                if let Some(request) = pick(&self.oracle.in_phase(Phase::Decoding), n) {
                    self.feed(Input::TokensEmitted { request, emitted_tokens: tokens.into() });
                }
            }
            Act::Stale(kind, n) => self.stale(kind, n),
        }
    }

    /// The engine of one leg takes nothing new for so long.
    fn refuse(&mut self, n: u8, busy_us: u64) {
        let sent = self.oracle.live.iter().filter(|(_, account)| !account.held.is_empty());
        let legs: Vec<(RequestId, InstanceId)> =
            sent.flat_map(|(id, account)| account.held.iter().map(|at| (*id, *at))).collect();
        let Some((request, instance)) = pick(&legs, n) else { return };
        let emitted_tokens = u32::from(n);
        let effects = self.feed(Input::LegRefused { request, instance, emitted_tokens, busy_us });
        let ids = |to: &super::PrefillStart| [to.prefill, to.decode];
        let holds = self.conductor.config().policy.orders_queues() && busy_us > 0;
        let sent = super::starts(&effects).iter().flat_map(ids).any(|to| to == instance.0);
        assert!(!holds || !sent, "{instance} is busy, and was sent something");
    }

    /// The operator changes a setting. The conductor accepts it exactly when the check beforehand does.
    fn change_policy(&mut self, kind: u8, value: u16) {
        let old = self.conductor.config().clone();
        let mut new = old.clone();
        match kind % 8 {
            0 => new.prior_output_tokens = 1 + u32::from(value),
            1 => new.admission = AdmissionMode::Slo,
            2 => new.max_retries = u32::from(value % 20),
            3 => new.classes.reverse(),
            4 => new.classes.truncate(1),
            5 => new.classes.push(SloClass { name: format!("class {value}"), ..SloClass::default() }),
            6 => new.max_waiting_requests = u32::from(value % 30),
            _ => new.policy = PolicyName::ALL[usize::from(value) % PolicyName::ALL.len()],
        }
        let allowed = self.conductor.can_change(&new).is_ok();
        let stale = self.conductor.stats().stale_inputs;
        self.feed(Input::PolicyChanged(Box::new(new.clone())));
        assert_eq!(self.conductor.config(), if allowed { &new } else { &old });
        assert_eq!(self.conductor.stats().stale_inputs, stale + u64::from(!allowed));
    }

    /// A running part reaches its next stage.
    fn advance(&mut self, n: u8) {
        let mut open: Vec<(RequestId, Phase)> = self.foreign.clone();
        for phase in [Phase::Prefilling, Phase::HandingOff, Phase::Decoding] {
            open.extend(self.oracle.in_phase(phase).into_iter().map(|id| (id, phase)));
        }
        let Some((request, phase)) = pick(&open, n) else { return };
        self.now_us += 1000;
        self.feed(match phase {
            Phase::Queued | Phase::Prefilling => Input::PrefillFinished {
                request,
                compute_us: u64::from(n) * 5000,
                cached_tokens: u64::from(n),
            },
            Phase::HandingOff => Input::HandoffFinished { request },
            Phase::Decoding => Input::DecodeFinished {
                request,
                output_tokens: u32::from(n) + 1,
                first_us: u64::from(n) * 40_000,
                tbt_us: u64::from(n) * 3_000,
            },
        });
        if let Some(at) = self.foreign.iter().position(|(id, _)| *id == request) {
            match phase {
                Phase::Decoding => {
                    self.foreign.remove(at);
                }
                Phase::HandingOff => self.foreign[at].1 = Phase::Decoding,
                Phase::Queued | Phase::Prefilling => self.foreign[at].1 = Phase::HandingOff,
            }
        }
    }

    fn cache(&mut self, id: u32, blocks: u64, what: u8) {
        let hashes: Vec<BlockHash> = (1..=blocks).map(BlockHash).collect();
        let tier = Tier::LOCAL[usize::from(what) % 3];
        let change = match what % 8 {
            0 => CacheChange::Cleared,
            1 => CacheChange::Removed { hashes, tier },
            2 => CacheChange::Stored { parent: Some(BlockHash(u64::from(what))), hashes, tier },
            _ => CacheChange::Stored { parent: None, hashes, tier },
        };
        // Sometimes the message is of an older epoch.
        let epoch = Epoch(self.epochs[&id] - u32::from(what % 5 == 4));
        self.feed(Input::Cache(CacheEvent { instance: InstanceId(id), epoch, change }));
    }

    fn peer(&mut self, prefill: u8, decode: u8, work: u16) {
        let id = PEERS + self.next_id;
        self.next_id += 1;
        // The index one past the fleet is an instance that this router does not know.
        let beyond = u8::try_from(self.roles.len() + 1).expect("few");
        let at = (InstanceId(u32::from(prefill % beyond)), InstanceId(u32::from(decode % beyond)));
        let request = Request { chain: Vec::new(), ..request(id, u64::from(work) / 2 + 1, 0) };
        self.peer_places(request, at, u64::from(work) * 10);
    }

    /// Another router places that request.
    pub(crate) fn peer_places(&mut self, request: Request, at: (InstanceId, InstanceId), work_us: u64) {
        self.foreign.push((request.id, Phase::Prefilling));
        let placed = super::peer_sent(request, at, work_us);
        self.feed(Input::PeerPlaced(Box::new(placed)));
    }

    /// A message about something that never existed, has ended, or is elsewhere.
    fn stale(&mut self, kind: u8, n: u8) {
        let unknown = RequestId(1 << 40 | u64::from(n));
        let queued = pick(&self.oracle.in_phase(Phase::Queued), n).unwrap_or(unknown);
        let decoding = pick(&self.oracle.in_phase(Phase::Decoding), n).unwrap_or(unknown);
        let request = match n % 3 {
            0 => unknown,
            1 => queued,
            _ => decoding,
        };
        let some = pick(&[InstanceId(999), InstanceId(0), InstanceId(1)], n).expect("three");
        self.feed(match kind % 16 {
            0 => Input::PrefillFinished { request, compute_us: u64::MAX, cached_tokens: u64::MAX },
            1 if request != decoding => {
                Input::DecodeFinished { request, output_tokens: u32::MAX, first_us: u64::MAX, tbt_us: 0 }
            }
            2 => Input::HandoffFinished { request },
            3 => Input::FetchFinished { request, ok: n.is_multiple_of(2) },
            4 => Input::InstanceLost { instance: some, epoch: Epoch(0) },
            5 => Input::RequestArrived(Request { id: request, ..Request::default() }),
            6 => Input::ReplicateFinished { to: some },
            7 => Input::RequestCancelled { request: unknown },
            9 if request != decoding => Input::TokensEmitted { request, emitted_tokens: u32::MAX },
            8 if request != queued => Input::HandoffFailed { request },
            10 if request != decoding => Input::DecodeFailed { request, emitted_tokens: u32::MAX },
            11 => Input::PrefillFailed { request },
            12 => Input::RoleChanged { instance: InstanceId(999), role: Role::Both },
            13 => Input::InstanceResumed { instance: InstanceId(999) },
            14 if n % 3 < 2 => Input::Preempted { request, emitted_tokens: u32::MAX },
            15 if request != decoding => Input::RoomOutgrown { request, emitted_tokens: u32::MAX },
            _ => Input::InstanceDrained { instance: InstanceId(999) },
        });
    }

    /// Lets all requests end, with the whole fleet present, and checks that nothing is left over.
    pub(crate) fn finish(&mut self) {
        let serves =
            |id: &u32| self.conductor.fleet.get(InstanceId(*id)).is_some_and(crate::fleet::Instance::serves);
        let away: Vec<u32> = self.epochs.keys().copied().filter(|id| !serves(id)).collect();
        away.into_iter().for_each(|id| self.join(id));
        // The upgrade is completed first. If all prefill instances were of one kind and all decode instances of the
        // other, waiting requests would wait for ever. Joining again changes the kind.
        let kind = |id: &u32| self.conductor.fleet.get(InstanceId(*id)).map(|instance| instance.spec.kind);
        let old: Vec<u32> = self.epochs.keys().copied().filter(|id| kind(id) == Some(1)).collect();
        old.into_iter().for_each(|id| self.join(id));
        for (id, role) in (0..).zip(self.roles.clone()) {
            self.feed(Input::RoleChanged { instance: InstanceId(id), role });
        }
        for round in 0.. {
            if self.oracle.live.is_empty() && self.foreign.is_empty() {
                break;
            }
            assert!(round < 2000, "stuck with {:?}", self.oracle.live);
            let idle = self.oracle.in_phase(Phase::Queued).len() == self.oracle.live.len();
            if idle && self.foreign.is_empty() {
                let wake = self.conductor.next_deadline();
                let wake = wake.unwrap_or_else(|| panic!("nothing would ever wake {:?}", self.oracle.live));
                self.now_us = self.now_us.max(wake);
                self.feed(Input::TimerFired);
            } else {
                self.advance(0);
            }
        }
        // No engine is busy for longer.
        self.now_us += 60_000_000;
        self.feed(Input::TimerFired);
        assert_idle(&self.conductor.snapshot());
    }
}
