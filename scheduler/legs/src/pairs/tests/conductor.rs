//! Pairs before the real conductor, over nodes that draw lots: every request ends once, every leg that was ordered ends
//! once, both know the same requests, and at rest nothing is left in either.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec;
use alloc::vec::Vec;

use baton_scheduler::{
    AdmissionMode, Conductor, Effect as Order, Input, PolicyName, Request, SchedulerConfig,
};
use baton_types::{BlockHash, ClassId, Epoch, InstanceId, RequestId, Rng, SloClass};

use super::super::{Arrival, Core, Effect, Fact, FactOutcome, Failure, Pairs, PairsConfig, PrefillOrder};
use super::NONE;
use super::scripted::{ROLES, spec};

/// A node's leg of a request.
#[derive(Clone, Copy, Debug)]
struct Leg {
    attempt: u32,
    prefills: bool,
    /// Where its KV goes; itself: it stays.
    to: Option<InstanceId>,
    /// The hand-off was reported.
    told: bool,
    computed: bool,
    decodes: bool,
    /// It failed, and says nothing more: it waits to be released.
    failed: bool,
}

/// The conductor and what the driver knows.
struct RealCore {
    conductor: Conductor,
    alive: [bool; 5],
    /// They end what they have, and take nothing new.
    draining: [bool; 5],
    epochs: [u32; 5],
    prompts: BTreeMap<RequestId, u64>,
    tokens_us: BTreeMap<RequestId, u64>,
}

impl Core for RealCore {
    fn step(&mut self, now_us: u64, input: Input, orders: &mut Vec<Order>) {
        self.conductor.step(now_us, input, orders);
        assert_eq!(self.conductor.check(), Ok(()));
    }

    fn request(&mut self, id: RequestId, emitted_tokens: u32) -> Option<Request> {
        let own_tokens = *self.prompts.get(&id)?;
        let chain = (0..own_tokens.div_ceil(512)).map(|at| BlockHash(id.0 * 1000 + at)).collect();
        let prompt_tokens = own_tokens + u64::from(emitted_tokens);
        Some(Request { id, prompt_tokens, chain, emitted_tokens, ..Request::default() })
    }

    fn handoff_us(&self, request: RequestId) -> u64 {
        self.conductor.handoff_us(request).unwrap_or(0)
    }

    fn decodes_at_us(&self, request: RequestId) -> Option<u64> {
        self.conductor.decodes_at_us(request)
    }

    fn last_token_us(&self, request: RequestId) -> u64 {
        self.tokens_us.get(&request).copied().unwrap_or(0)
    }

    fn moves_kv(&self, _: InstanceId) -> bool {
        false
    }

    fn can_serve(&self) -> bool {
        self.conductor.can_serve()
    }

    fn prefills(&self) -> usize {
        self.conductor.prefills()
    }
}

struct World {
    rng: Rng,
    now_us: u64,
    pairs: Pairs,
    core: RealCore,
    /// By request and instance.
    legs: BTreeMap<(RequestId, InstanceId), Leg>,
    asked: BTreeMap<RequestId, u32>,
    ended: BTreeSet<RequestId>,
    /// A leg whose end is being reported.
    over: Option<(RequestId, InstanceId)>,
    /// Ordered, released, over by themselves, dead.
    counts: [u32; 4],
}

/// A conductor of one of some kinds.
fn config(rng: &mut Rng) -> SchedulerConfig {
    let policies: Vec<PolicyName> = PolicyName::ALL.into_iter().filter(|policy| !policy.foresees()).collect();
    let admissions = [AdmissionMode::Auto, AdmissionMode::None, AdmissionMode::AtDecode];
    let class = SloClass { ttft_us: 2_000_000, tbt_us: 50_000, ..SloClass::default() };
    SchedulerConfig {
        policy: policies[usize::try_from(rng.below(policies.len() as u64)).unwrap()],
        admission: admissions[usize::try_from(rng.below(3)).unwrap()],
        local_prefill: rng.chance_permille(500),
        explain_every: 7,
        seed: rng.next_u64(),
        classes: vec![class],
        ..SchedulerConfig::default()
    }
}

impl World {
    fn new(seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let config = config(&mut rng);
        let pairs = Pairs::new(PairsConfig::new(&config.classes, 4, 1_000_000));
        let conductor = Conductor::new(config).expect("a valid configuration");
        let (prompts, tokens_us) = (BTreeMap::new(), BTreeMap::new());
        let core = RealCore {
            conductor,
            alive: [false; 5],
            draining: [false; 5],
            epochs: [0; 5],
            prompts,
            tokens_us,
        };
        let (legs, asked, ended) = (BTreeMap::new(), BTreeMap::new(), BTreeSet::new());
        let mut world = Self { rng, now_us: 1, pairs, core, legs, asked, ended, over: None, counts: [0; 4] };
        (0..5).for_each(|at| world.join(at));
        world
    }

    fn act<T>(&mut self, act: impl FnOnce(&mut Pairs, u64, &mut RealCore, &mut Vec<Effect>) -> T) -> T {
        let mut effects = Vec::new();
        let result = act(&mut self.pairs, self.now_us, &mut self.core, &mut effects);
        effects.into_iter().for_each(|effect| self.carry_out(effect));
        let conductor = &self.core.conductor;
        assert_eq!(self.pairs.check(|request| conductor.knows(request)), Ok(()));
        assert_eq!(conductor.live_requests(), self.pairs.len() - self.pairs.parked());
        result
    }

    fn order(&mut self, request: RequestId, at: InstanceId, leg: Leg) {
        self.counts[0] += 1;
        let before = self.legs.insert((request, at), leg);
        assert!(before.is_none(), "{request} has a leg at {at} already: {before:?}");
    }

    /// A leg is over without a word of the conductor.
    fn conclude(&mut self, request: RequestId, at: InstanceId) {
        self.counts[2] += 1;
        assert!(self.legs.remove(&(request, at)).is_some(), "{request} has no leg at {at}");
    }

    fn carry_out(&mut self, effect: Effect) {
        let idle = Leg {
            attempt: 0,
            prefills: false,
            to: None,
            told: false,
            computed: false,
            decodes: false,
            failed: false,
        };
        match effect {
            Effect::Prefill(PrefillOrder { request, attempt, instance, decode, .. }) => {
                self.order(request, instance, Leg { attempt, prefills: true, to: Some(decode), ..idle });
            }
            Effect::Expect { request, attempt, instance, .. } => {
                self.order(request, instance, Leg { attempt, ..idle });
            }
            Effect::Handoff { request, attempt, from, to } => {
                let leg = self.legs.get_mut(&(request, from)).expect("the KV is there");
                (leg.attempt, leg.to, leg.told, leg.failed) = (attempt, Some(to), false, false);
            }
            Effect::Decode { request, attempt, instance } => {
                let leg = self.legs.get_mut(&(request, instance)).expect("it was ordered");
                assert_eq!(leg.attempt, attempt);
                leg.decodes = true;
                // A prefill elsewhere has handed its KV off, and is over.
                let over = |((whose, at), _): (&(RequestId, InstanceId), &Leg)| {
                    (*whose == request && *at != instance).then_some(*at)
                };
                let over: Vec<InstanceId> = self.legs.iter().filter_map(over).collect();
                over.into_iter().for_each(|at| self.conclude(request, at));
            }
            Effect::Release { request, attempt, instance } => {
                let leg = self.legs.remove(&(request, instance));
                if let Some(leg) = leg {
                    self.counts[1] += 1;
                    assert!(leg.attempt <= attempt);
                } else {
                    // A node may have died, or have let go by itself just now.
                    let gone = !self.core.alive[instance.index()] || self.over == Some((request, instance));
                    assert!(gone, "{request} is released twice at {instance}");
                }
            }
            Effect::Ended { request }
            | Effect::Condemn { request }
            | Effect::Fail { request, .. }
            | Effect::GiveUp { request, .. } => self.end(request),
            Effect::Refuse(rejection) | Effect::CutShort(rejection) => self.end(rejection.request),
            Effect::Order(_)
            | Effect::Entered { .. }
            | Effect::Admitted { .. }
            | Effect::Blame { .. }
            | Effect::Late { .. } => {}
        }
    }

    fn end(&mut self, request: RequestId) {
        assert!(self.ended.insert(request), "{request} ends twice");
        assert!(self.pairs.get(request).is_none());
        assert!(!self.core.conductor.knows(request), "{request} is over, and the conductor has it");
        assert!(
            self.legs.keys().all(|(whose, _)| *whose != request),
            "{request} leaves legs: {:?}",
            self.legs
        );
    }

    fn join(&mut self, at: usize) {
        self.core.epochs[at] += 1;
        let spec = spec(u32::try_from(at).unwrap(), ROLES[at], self.core.epochs[at]);
        (self.core.alive[at], self.core.draining[at]) = (true, false);
        self.act(|pairs, now_us, core, effects| {
            pairs.step(now_us, Input::InstanceJoined(spec), core, effects)
        });
    }

    fn drain(&mut self, at: usize, drains: bool) {
        let instance = InstanceId(u32::try_from(at).unwrap());
        let input =
            if drains { Input::InstanceDrained { instance } } else { Input::InstanceResumed { instance } };
        self.core.draining[at] = drains;
        self.act(|pairs, now_us, core, effects| pairs.step(now_us, input, core, effects));
    }

    fn lose(&mut self, at: usize, died: bool) {
        let (instance, epoch) = (InstanceId(u32::try_from(at).unwrap()), Epoch(self.core.epochs[at]));
        self.core.alive[at] = false;
        let before = self.legs.len();
        self.legs.retain(|(_, here), _| *here != instance);
        self.counts[3] += u32::try_from(before - self.legs.len()).unwrap();
        self.act(|pairs, now_us, core, effects| pairs.lost(now_us, (instance, epoch, died), core, effects));
    }

    fn arrive(&mut self) {
        let request = RequestId(self.asked.len() as u64 + 1);
        let asked_tokens = 1 + u32::try_from(self.rng.below(6)).unwrap();
        let time_limit_us = if self.rng.chance_permille(900) { 1 << 60 } else { self.now_us + 700_000 };
        self.asked.insert(request, asked_tokens);
        self.core.prompts.insert(request, 1 + self.rng.below(6000));
        let arrival = Arrival { request, class: ClassId(0), objectives: NONE, time_limit_us, asked_tokens };
        self.act(|pairs, now_us, core, effects| pairs.arrive(now_us, arrival, core, effects));
    }

    fn cancel(&mut self, request: RequestId) {
        if self.pairs.get(request).is_some() {
            self.act(|pairs, now_us, core, effects| pairs.cancel(now_us, request, core, effects));
            self.end(request);
        }
    }

    fn on_fact(&mut self, request: RequestId, at: InstanceId, fact: Fact) -> FactOutcome {
        let Some(leg) = self.legs.get(&(request, at)) else { return FactOutcome::Stale };
        self.on_fact_of((request, leg.attempt, at), fact)
    }

    fn on_fact_of(&mut self, about: (RequestId, u32, InstanceId), fact: Fact) -> FactOutcome {
        self.act(|pairs, now_us, core, effects| pairs.on_fact(now_us, (about, fact), core, effects))
    }

    /// The next token of an answer; the leg is over with the last one, unless its KV has yet to be let go.
    fn token(&mut self, request: RequestId, at: InstanceId) {
        let index = self.pairs.get(request).map_or(0, |pair| pair.emitted_tokens);
        let last = index + 1 >= self.asked[&request];
        if self.on_fact(request, at, Fact::Token { index, last }) != FactOutcome::Yes {
            return;
        }
        self.core.tokens_us.insert(request, self.now_us);
        if last {
            if self.legs.get(&(request, at)).is_some_and(|leg| leg.decodes) {
                self.conclude(request, at);
            }
            self.act(|pairs, now_us, core, effects| pairs.complete(now_us, (request, 0), core, effects));
        }
    }

    /// A prompt is computed. One that draws the only token, or that stays after its last, is over with it.
    fn computed(&mut self, request: RequestId, at: InstanceId, leg: Leg) {
        if self.pairs.get(request).is_some_and(|pair| Some(pair.emitted_tokens) == pair.given_tokens()) {
            self.token(request, at);
        }
        let answered = self.pairs.get(request).is_some_and(|pair| pair.is_answered());
        let over = answered && leg.to == Some(at);
        if over {
            self.conclude(request, at);
            self.over = Some((request, at));
        } else if let Some(leg) = self.legs.get_mut(&(request, at)) {
            leg.computed = true;
        }
        let about = (request, leg.attempt, at);
        self.on_fact_of(about, Fact::Prefilled { compute_us: 900, cached_tokens: 0 });
        self.over = None;
    }

    /// A leg does what comes next for it, or fails.
    fn work(&mut self, (request, at): (RequestId, InstanceId), trouble_permille: u32) {
        let leg = self.legs[&(request, at)];
        if leg.failed {
            return;
        }
        if self.rng.chance_permille(trouble_permille) {
            return self.trouble((request, at), leg);
        }
        if leg.decodes {
            self.token(request, at);
        } else if leg.prefills && !leg.computed {
            self.computed(request, at, leg);
        } else if let Some(to) = leg.to.filter(|to| *to != at && !leg.told) {
            // The decode node says that all is there; a prefill node says that it is not.
            if let Some(leg) = self.legs.get_mut(&(request, at)) {
                leg.told = true;
            }
            if self.rng.chance_permille(trouble_permille) {
                self.on_fact(request, at, Fact::HandedOff { ok: false });
            } else {
                self.on_fact(request, to, Fact::HandedOff { ok: true });
            }
        }
    }

    fn trouble(&mut self, (request, at): (RequestId, InstanceId), leg: Leg) {
        let failure = match self.rng.below(7) {
            0 => Failure::Engine { cut_off: true, gone: false },
            1 => Failure::Engine { cut_off: false, gone: false },
            2 => Failure::Preempted,
            3 => Failure::Busy { us: 1_000_000 },
            4 => return,
            _ => Failure::Other,
        };
        // A failed leg is kept until it is released, and does nothing further.
        if let Some(leg) = self.legs.get_mut(&(request, at)) {
            leg.failed = true;
        }
        let heard = self.on_fact(request, at, Fact::Failed(failure));
        assert!(heard == FactOutcome::Yes || leg.prefills, "{request} at {at}: {leg:?}");
    }

    /// Time passes, and each leg does something or not.
    fn turn(&mut self, trouble_permille: u32) {
        self.now_us += self.rng.below(60_000);
        let legs: Vec<(RequestId, InstanceId)> = self.legs.keys().copied().collect();
        for leg in legs {
            if self.legs.contains_key(&leg) && self.rng.chance_permille(300) {
                self.work(leg, trouble_permille);
            }
        }
        self.wake();
    }

    fn wake(&mut self) {
        self.act(|pairs, now_us, core, effects| pairs.expire(now_us, core, effects));
        self.act(|pairs, now_us, core, effects| pairs.try_parked(now_us, core, effects));
        self.act(|pairs, now_us, core, effects| pairs.step(now_us, Input::TimerFired, core, effects));
        assert!(self.pairs.next_deadline().is_none_or(|at_us| at_us > self.now_us), "overdue");
    }

    /// A life of the whole: with deaths, rebirths and clients that leave.
    fn live(&mut self) {
        for _ in 0..200 {
            match self.rng.below(100) {
                0..30 => self.arrive(),
                30..33 => {
                    let request = RequestId(1 + self.rng.below(self.asked.len().max(1) as u64));
                    self.cancel(request);
                }
                33..36 => {
                    let (at, died) =
                        (usize::try_from(self.rng.below(5)).unwrap(), self.rng.chance_permille(600));
                    if self.core.alive[at] {
                        self.lose(at, died);
                    }
                }
                36..46 => {
                    let at = usize::try_from(self.rng.below(5)).unwrap();
                    if !self.core.alive[at] {
                        self.join(at);
                    }
                }
                46..50 => {
                    let at = usize::try_from(self.rng.below(5)).unwrap();
                    if self.core.alive[at] {
                        self.drain(at, !self.core.draining[at]);
                    }
                }
                50..53 => {
                    self.now_us += self.rng.below(3_000_000);
                    self.wake();
                }
                _ => self.turn(60),
            }
        }
    }

    /// No request arrives and nothing fails: all requests come to their end.
    fn come_to_rest(&mut self) {
        for _ in 0..4000 {
            if self.pairs.is_empty() {
                break;
            }
            self.turn(0);
        }
        assert!(self.pairs.is_empty(), "{:?}", self.pairs);
        assert_eq!(self.core.conductor.live_requests(), 0);
        assert!(self.legs.is_empty(), "{:?}", self.legs);
        assert_eq!((self.ended.len(), self.pairs.parked()), (self.asked.len(), 0));
        let [ordered, released, over, dead] = self.counts;
        assert_eq!(ordered, released + over + dead);
    }
}

#[test]
fn before_the_real_conductor_every_request_and_every_leg_ends_once() {
    let mut all = [0; 4];
    for seed in 0..120 {
        let mut world = World::new(seed);
        world.live();
        world.come_to_rest();
        all.iter_mut().zip(world.counts).for_each(|(sum, count)| *sum += count);
    }
    assert!(all.iter().all(|count| *count > 200), "{all:?}");
}
