//! A request's attempts, from its arrival to its end: a pure core in front of the conductor's.
//!
//! The conductor decides where a request goes. [`Pairs`] holds what it has decided so far: the *pair* of
//! legs of each request's present attempt, and which of them may still say something. It reads what nodes
//! say ([`Fact`]) and puts it before the conductor, and turns the conductor's orders into those of one
//! attempt ([`Effect`]). A driver carries them out; the live service and the simulator are drivers.
//!
//! The rules that live here and nowhere else:
//!
//! - a leg says only what belongs to its stage and to the present attempt; anything else is out of date;
//! - each stage has a time limit that follows from the objectives of the request's class, and a stage that
//!   is late behind others is given more as long as its instances get on;
//! - a request that was admitted and fits nowhere is parked, and tried again until its time is over: the conductor
//!   places it, and does not judge it anew;
//! - a request's first failed hand-off is retried at once, each further one after a back-off, which doubles;
//! - a request that engines refuse for now is placed again, for as long as it may wait in the conductor's queue; a later
//!   refusal is a failure;
//! - a request that was in an engine when it died is tried once more, and not with others like it.

mod attempts;
mod effect;
mod facts;
mod limits;
mod progress;
mod stage;
mod suspects;
#[cfg(test)]
mod tests;
mod waiting;

use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::string::String;
use alloc::vec::Vec;

use baton_scheduler::{Effect as Order, Input, Request};
use baton_types::{ClassId, InstanceId, RequestId, RequestObjectives};

pub use effect::{Cause, Effect, PrefillOrder};
pub use facts::outgrown_room;
pub use limits::{PairsConfig, STAGE_FLOOR_US, STAGE_SLACK};
pub use stage::{AnsweredStage, DecodeStage, HandoffStage, Pair, Phase, PrefillStage, Stage, WaitingStage};

use attempts::PlacementOrder;
use progress::Pace;

/// The interface to the conductor's core and to the driver's knowledge. The driver answers each call at once.
pub trait Core {
    /// Steps the conductor.
    fn step(&mut self, now_us: u64, input: Input, orders: &mut Vec<Order>);
    /// A request as it is asked for now: with the tokens that its client has as part of its prompt.
    fn request(&mut self, request: RequestId, emitted_tokens: u32) -> Option<Request>;
    /// When the conductor predicts that a request decodes, µs.
    fn decodes_at_us(&self, request: RequestId) -> Option<u64>;
    /// How long the KV of a request takes to its decode instance with both links to itself, µs; 0 where none has to move.
    fn handoff_us(&self, request: RequestId) -> u64;
    /// When a request's latest token came, µs; 0 for none.
    fn last_token_us(&self, request: RequestId) -> u64;
    /// Whether an instance's engine moves KV by itself: it has to be asked for every leg.
    fn moves_kv(&self, instance: InstanceId) -> bool;
    /// As [`baton_scheduler::Conductor::can_serve`].
    fn can_serve(&self) -> bool;
    /// As [`baton_scheduler::Conductor::prefills`].
    fn prefills(&self) -> usize;
}

/// A request that has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arrival {
    /// Its number.
    pub request: RequestId,
    /// Its class.
    pub class: ClassId,
    /// The objectives that it names itself, in place of its class's.
    pub objectives: RequestObjectives,
    /// When its client's time limit ends, µs.
    pub time_limit_us: u64,
    /// The most tokens that it asks for.
    pub asked_tokens: u32,
}

/// How many tokens of an answer there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EmittedTokens {
    /// Of which request.
    pub request: RequestId,
    /// Tokens that the client has, in all.
    pub tokens: u32,
    /// When the first token of this attempt came, µs.
    pub first_us: u64,
    /// Whether the answer is complete with these tokens.
    pub last: bool,
}

/// A node's report about a leg.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fact {
    /// The answer's next token.
    Token {
        /// Its place in the answer.
        index: u32,
        /// Whether the answer is over with it.
        last: bool,
    },
    /// The prompt is computed.
    Prefilled {
        /// Engine time, µs.
        compute_us: u64,
        /// Tokens that were in the engine's cache.
        cached_tokens: u64,
    },
    /// The hand-off is over.
    HandedOff {
        /// Whether the decode node has all KV, verified.
        ok: bool,
    },
    /// The answer is over, with no token to say so.
    Ended,
    /// The prefill's engine says how the decode's engine gets its KV.
    Offered,
    /// A fetch is over.
    Fetched {
        /// Whether it brought what it was for.
        ok: bool,
    },
    /// Logprobs of the prompt, for the client.
    PromptLogprobs,
    /// The leg failed.
    Failed(Failure),
}

/// How a leg failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The request is at fault.
    OfRequest,
    /// The engine broke off, or is dead.
    Engine {
        /// It was in the middle of this request.
        cut_off: bool,
        /// It is dead.
        gone: bool,
    },
    /// Its engine takes nothing new for so long, µs, and did not take this leg.
    Busy {
        /// From now on, µs.
        us: u64,
    },
    /// Its KV made room for an older request's.
    Preempted,
    /// Something else went wrong.
    Other,
}

/// The outcome of a fact.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FactOutcome {
    /// It is taken in.
    Yes,
    /// It is out of date, or not for that leg to say.
    Stale,
    /// The client has this token.
    Repeated,
}

/// All requests under way.
#[derive(Clone, Debug)]
pub struct Pairs {
    config: PairsConfig,
    now_us: u64,
    pairs: BTreeMap<RequestId, Pair>,
    /// The deadline of each request's present stage, µs.
    deadlines: BTreeSet<(u64, RequestId)>,
    /// Failed hand-offs in back-off: when each is retried, µs, with the attempt that failed.
    again: BTreeSet<(u64, RequestId, u32)>,
    /// Requests that nothing can take right now.
    parked: BTreeSet<RequestId>,
    /// The next time at which parked requests are retried, µs.
    try_at_us: u64,
    /// When an instance was lost and none was left that could serve, µs, unless there is one again.
    unserved_since_us: Option<u64>,
    /// When the latest instance was lost, µs.
    lost_us: Option<u64>,
    /// Requests that were in an engine when it died and that are tried once more now.
    on_trial: BTreeSet<RequestId>,
    /// Progress of the instances.
    paces: BTreeMap<InstanceId, Pace>,
    /// When the driver's latest pause ended, µs.
    back_us: u64,
    pending: VecDeque<Input>,
    orders: Vec<Order>,
}

impl Pairs {
    /// No request yet.
    #[must_use]
    pub fn new(config: PairsConfig) -> Self {
        Self {
            config,
            now_us: 0,
            pairs: BTreeMap::new(),
            deadlines: BTreeSet::new(),
            again: BTreeSet::new(),
            parked: BTreeSet::new(),
            try_at_us: 0,
            unserved_since_us: None,
            lost_us: None,
            on_trial: BTreeSet::new(),
            paces: BTreeMap::new(),
            back_us: 0,
            pending: VecDeque::new(),
            orders: Vec::new(),
        }
    }

    /// Other limits from now on.
    pub fn configure(&mut self, config: PairsConfig) {
        self.config = config;
    }

    /// How many requests are under way.
    #[must_use]
    pub fn len(&self) -> usize {
        self.pairs.len()
    }

    /// Whether none is.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.pairs.is_empty()
    }

    /// A request under way.
    #[must_use]
    pub fn get(&self, request: RequestId) -> Option<&Pair> {
        self.pairs.get(&request)
    }

    /// All of them, the oldest first.
    pub fn iter(&self) -> impl Iterator<Item = (RequestId, &Pair)> {
        self.pairs.iter().map(|(request, pair)| (*request, pair))
    }

    /// How many wait for instances that could take them.
    #[must_use]
    pub fn parked(&self) -> usize {
        self.parked.len()
    }

    /// Puts a fact before the conductor that is about no one request, or about time.
    pub fn step(&mut self, now_us: u64, input: Input, core: &mut impl Core, effects: &mut Vec<Effect>) {
        self.now_us = now_us;
        self.feed(input, core, effects);
    }

    /// A request has come.
    pub fn arrive(&mut self, now_us: u64, arrival: Arrival, core: &mut impl Core, effects: &mut Vec<Effect>) {
        self.now_us = now_us;
        let request = arrival.request;
        let pair = Pair::new(&arrival);
        let wait_us = self.config.parked_stage_us(&pair);
        let before = self.pairs.insert(request, pair);
        debug_assert!(before.is_none(), "{request} arrived twice");
        self.set_deadline(request, now_us + wait_us);
        self.submit(request, core, effects);
    }

    /// The client left, or will not hear more.
    pub fn cancel(
        &mut self,
        now_us: u64,
        request: RequestId,
        core: &mut impl Core,
        effects: &mut Vec<Effect>,
    ) {
        self.now_us = now_us;
        // The releases of the request carry the attempt, so the pair stays known until they are sent.
        self.feed(Input::RequestCancelled { request }, core, effects);
        self.end(request);
    }

    /// The client has all of its answer, whose TBT was so long, µs; 0 where that is not known.
    pub fn complete(
        &mut self,
        now_us: u64,
        (request, tbt_us): (RequestId, u64),
        core: &mut impl Core,
        effects: &mut Vec<Effect>,
    ) {
        self.now_us = now_us;
        let Some(pair) = self.pairs.get_mut(&request) else { return };
        pair.if_prefilling(|prefilling| Stage::Answered(prefilling.answered()));
        if let Stage::Decoding(_) = pair.stage {
            self.conclude((request, tbt_us), core, effects);
        }
    }

    /// The conductor hears of the end; the decode node has let go by itself.
    fn conclude(
        &mut self,
        (request, tbt_us): (RequestId, u64),
        core: &mut impl Core,
        effects: &mut Vec<Effect>,
    ) {
        let Some(pair) = self.pairs.get_mut(&request) else { return };
        let output_tokens = pair.emitted_tokens;
        let first_us = pair.stage.tokens_mut().map_or(0, |tokens| tokens.first_us);
        if let Stage::Decoding(decoding) = &pair.stage {
            self.paces.entry(decoding.decode()).or_default().answered += 1;
        }
        self.feed(Input::DecodeFinished { request, output_tokens, first_us, tbt_us }, core, effects);
        if self.end(request) {
            effects.push(Effect::Ended { request });
        }
    }

    /// Lets the legs of a request go whose client has all of its answer. False: it has not.
    fn end_if_answered(
        &mut self,
        request: RequestId,
        core: &mut impl Core,
        effects: &mut Vec<Effect>,
    ) -> bool {
        let answered = self.pairs.get(&request).is_some_and(Pair::is_answered);
        if answered {
            self.feed(Input::RequestCancelled { request }, core, effects);
            if self.end(request) {
                effects.push(Effect::Ended { request });
            }
        }
        answered
    }

    /// Puts a request before the conductor, and admits it unless it is refused or parked.
    fn submit(&mut self, request: RequestId, core: &mut impl Core, effects: &mut Vec<Effect>) {
        let Some(pair) = self.pairs.get(&request) else { return };
        debug_assert_eq!(pair.legs(), [None; 2], "{request} is asked for while it is sent");
        let promised = !pair.is_unpromised();
        let Some(submitted) = core.request(request, pair.emitted_tokens) else { return };
        let submitted = Request { let_in: promised, ..submitted };
        self.feed(Input::RequestArrived(submitted), core, effects);
        if promised || self.parked.contains(&request) {
            return;
        }
        let Some(pair) = self.pairs.get_mut(&request) else { return };
        if pair.is_unpromised() {
            pair.if_waiting(|waiting| Stage::Waiting(waiting.admitted()));
            let stage_us = self.config.queue_stage_us(pair);
            self.set_deadline(request, self.now_us + stage_us);
        }
        effects.push(Effect::Admitted { request });
    }

    /// One step of the conductor, its orders read, and what follows from them.
    fn feed(&mut self, input: Input, core: &mut impl Core, effects: &mut Vec<Effect>) {
        debug_assert!(self.pending.is_empty(), "a step begins when the one before is over");
        self.pending.push_back(input);
        while let Some(input) = self.pending.pop_front() {
            let mut orders = core::mem::take(&mut self.orders);
            let lost = matches!(input, Input::InstanceLost { .. });
            core.step(self.now_us, input, &mut orders);
            self.note_service(lost, core);
            for order in orders.drain(..) {
                self.ordered(order, core, effects);
            }
            self.orders = orders;
        }
        debug_assert_eq!(self.deadlines.len(), self.pairs.len(), "each request has its time");
    }

    fn ordered(&mut self, order: Order, core: &impl Core, effects: &mut Vec<Effect>) {
        match order {
            Order::StartPrefill { request, instance, decode, fetch, room_tokens, order } => {
                let sent = PlacementOrder { instance, decode, fetch, room_tokens, order };
                self.start_prefill(request, sent, core, effects);
            }
            Order::StartDecode { request, instance } => self.start_decode(request, instance, effects),
            Order::Handoff { request, from, to, room_tokens } => {
                self.hand_off(request, (from, to), room_tokens, effects);
            }
            Order::Release { request, instance } => self.release(request, instance, effects),
            Order::Reject(rejection) => self.rejected(rejection, core, effects),
            Order::Fail { request, stage } => self.failed(request, stage, core, effects),
            Order::Replicate { .. } | Order::ChangeRole { .. } | Order::Explain(_) | Order::Share(_) => {
                effects.push(Effect::Order(order))
            }
        }
    }

    /// Forgets a request. False: it was forgotten before.
    fn end(&mut self, request: RequestId) -> bool {
        let Some(pair) = self.pairs.remove(&request) else { return false };
        let had = self.deadlines.remove(&(pair.deadline_us, request));
        debug_assert!(had, "{request} had no time: {pair:?}");
        self.parked.remove(&request);
        self.trial_is_over(request);
        true
    }

    /// Checks that pairs, deadlines and the conductor agree; `knows` says whether the conductor knows a request.
    ///
    /// # Errors
    /// The first that does not.
    pub fn check(&self, knows: impl Fn(RequestId) -> bool) -> Result<(), String> {
        use alloc::format;
        if self.deadlines.len() != self.pairs.len() {
            return Err(format!("{} deadlines of {} pairs", self.deadlines.len(), self.pairs.len()));
        }
        for (request, pair) in &self.pairs {
            let parked = self.parked.contains(request);
            if !self.deadlines.contains(&(pair.deadline_us, *request)) {
                return Err(format!("{request} has no time: {pair:?}"));
            }
            if knows(*request) == parked {
                return Err(format!("{request} is parked: {parked}, and the conductor disagrees: {pair:?}"));
            }
            if parked
                && !matches!(pair.stage, Stage::Waiting(WaitingStage::Unpromised | WaitingStage::Parked))
            {
                return Err(format!("{request} is parked and sent: {pair:?}"));
            }
        }
        let known = |request: &&RequestId| !self.pairs.contains_key(request);
        match self.parked.iter().chain(&self.on_trial).find(known) {
            Some(request) => Err(format!("{request} is parked or on trial, and over")),
            None => Ok(()),
        }
    }
}
