//! All legs of one node, and the rules by which one waits for another.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::string::String;
use alloc::vec::Vec;

use baton_types::{FetchPlan, RequestId};

use crate::leg::{
    AwaitedTransfer, Complete, ComputingPrefill, Leg, LoadSource, LoadingPrefill, QueuedPrefill, Work,
};
use crate::{Effect, GROW_BLOCKS, Input, LegFailure, LegHoldings, LegsConfig, STRANDED_LEASE_US};

/// The legs of one node.
#[derive(Clone, Debug)]
pub struct Legs {
    config: LegsConfig,
    legs: BTreeMap<RequestId, Leg>,
    /// Prefills that are not open yet, by place.
    queue: BTreeMap<(u64, u64), RequestId>,
    /// Decode legs without room, in the order in which they are tried.
    waiting_for_room: Vec<RequestId>,
    /// Decode legs with room whose KV nobody has offered yet.
    lent_room: BTreeSet<RequestId>,
    arrivals: u64,
    /// Tokens of open prefills that are yet to be computed.
    opened_tokens: u64,
}

impl Legs {
    /// A node without legs.
    #[must_use]
    pub const fn new(config: LegsConfig) -> Self {
        Self {
            config,
            legs: BTreeMap::new(),
            queue: BTreeMap::new(),
            waiting_for_room: Vec::new(),
            lent_room: BTreeSet::new(),
            arrivals: 0,
            opened_tokens: 0,
        }
    }

    /// A request's leg, if it has one here.
    #[must_use]
    pub fn get(&self, request: RequestId) -> Option<&Leg> {
        self.legs.get(&request)
    }

    /// All legs, in order of their requests' numbers.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = (RequestId, &Leg)> {
        self.legs.iter().map(|(request, leg)| (*request, leg))
    }

    /// How many prefills are not open yet.
    #[must_use]
    pub fn queued(&self) -> usize {
        self.queue.len()
    }

    /// How many decode legs wait for room.
    #[must_use]
    pub fn waiting_for_room(&self) -> usize {
        self.waiting_for_room.len()
    }

    /// Forgets all legs: the node has died, or the conductor that ordered them is gone.
    pub fn clear(&mut self) {
        *self = Self { arrivals: self.arrivals, ..Self::new(self.config) };
    }

    /// Takes one event in. An event for a request without a leg here, or with a leg that it does not fit, changes
    /// nothing.
    pub fn step(&mut self, input: Input, effects: &mut Vec<Effect>) {
        match input {
            Input::Prefill { request, work, stays, fetch, order } => {
                self.prefill(request, (work, stays, fetch), order, effects);
            }
            Input::Expect { request, work } => self.expect(request, work, effects),
            Input::Offered { request } => self.offered(request, effects),
            Input::Withdrawn { request, to } => self.withdrawn(request, to, effects),
            Input::RoomFreed => self.room_freed(effects),
            Input::OpenNext => self.open_next(effects),
            Input::Opened { request, cached_blocks, waits } => {
                self.opened(request, cached_blocks, waits, effects);
            }
            Input::NoRoom { request } => self.no_room(request, effects),
            Input::Cached { request, cached_blocks, waits } => {
                self.cached(request, cached_blocks, waits, effects);
            }
            Input::FetchEnded { request, cached_blocks } => {
                self.fetch_ended(request, cached_blocks, effects);
            }
            Input::Computed { request } => self.computed(request, effects),
            Input::HandedOff { request, ok, now_us } => self.handed_off(request, ok, now_us, effects),
            Input::HandOff { request } => self.hand_off(request, effects),
            Input::Landed { request } => {
                if let Some(leg @ Leg::Expecting(_)) = self.legs.get_mut(&request) {
                    *leg = Leg::Landed;
                    self.lent_room.remove(&request);
                    effects.push(Effect::Seal { request });
                }
            }
            Input::StartDecode { request } => self.start_decode(request, effects),
            Input::Starved { request } => self.grow(request, GROW_BLOCKS, effects),
            Input::NotGrown { request, blocks: 1 } => self.preempt_for(request, effects),
            Input::NotGrown { request, .. } => self.grow(request, 1, effects),
            Input::Ended { request } | Input::Release { request } => self.release(request, effects),
            Input::Tick { now_us } => self.reap_stranded(now_us, effects),
        }
    }

    fn prefill(
        &mut self,
        request: RequestId,
        (work, stays, fetch): (Work, bool, Option<FetchPlan>),
        order: u64,
        effects: &mut Vec<Effect>,
    ) {
        debug_assert!(!self.legs.contains_key(&request), "{request} is released before it is ordered again");
        if self.is_too_large(request, work, effects) {
            return;
        }
        self.arrivals += 1;
        let place = (order, self.arrivals);
        let fetch = fetch.map(|plan| FetchPlan { blocks: plan.blocks.min(work.named_blocks), ..plan });
        self.queue.insert(place, request);
        self.legs.insert(request, Leg::Queued(QueuedPrefill { work, stays, fetch, place }));
    }

    fn expect(&mut self, request: RequestId, work: Work, effects: &mut Vec<Effect>) {
        debug_assert!(!self.legs.contains_key(&request), "{request} is released before it is ordered again");
        if self.is_too_large(request, work, effects) {
            return;
        }
        if !self.offered_wait() {
            self.open_decode(request, work, effects);
        }
        self.waiting_for_room.push(request);
        self.legs.insert(request, Leg::WaitingForRoom(AwaitedTransfer { work, offered: false }));
    }

    /// The KV that a decode leg without room waits for.
    fn awaited(&self, request: RequestId) -> Option<&AwaitedTransfer> {
        match self.legs.get(&request) {
            Some(Leg::WaitingForRoom(kv)) => Some(kv),
            _ => None,
        }
    }

    /// Whether KV that is offered waits for room.
    fn offered_wait(&self) -> bool {
        self.waiting_for_room.iter().any(|request| self.awaited(*request).is_some_and(|kv| kv.offered))
    }

    fn open_decode(&self, request: RequestId, work: Work, effects: &mut Vec<Effect>) {
        effects.push(Effect::Open { request, room_blocks: work.room_blocks(true, &self.config) });
    }

    fn offered(&mut self, request: RequestId, effects: &mut Vec<Effect>) {
        match self.legs.get_mut(&request) {
            Some(Leg::Expecting(kv)) => {
                kv.offered = true;
                self.lent_room.remove(&request);
            }
            Some(Leg::WaitingForRoom(kv)) if !kv.offered => {
                kv.offered = true;
                let work = kv.work;
                self.open_decode(request, work, effects);
            }
            _ => {}
        }
    }

    /// A leg gave its room to another whose KV is offered: it waits for some again.
    fn withdrawn(&mut self, request: RequestId, to: RequestId, effects: &mut Vec<Effect>) {
        match self.legs.remove(&request) {
            Some(Leg::Expecting(kv)) => {
                debug_assert!(!kv.offered, "the KV of {request} may be on its way into its room");
                self.lent_room.remove(&request);
                self.waiting_for_room.push(request);
                self.legs.insert(request, Leg::WaitingForRoom(kv));
            }
            other => self.keep(request, other),
        }
        if let Some(kv) = self.awaited(to) {
            self.open_decode(to, kv.work, effects);
        }
    }

    fn is_too_large(&self, request: RequestId, work: Work, effects: &mut Vec<Effect>) -> bool {
        let needed_blocks = work.prompt_blocks(&self.config);
        let too_large = needed_blocks > self.config.pool_blocks;
        if too_large {
            effects.push(Effect::Fail { request, why: LegFailure::TooLarge { needed_blocks } });
            effects.push(Effect::Close { request, held: LegHoldings { blocks: false, engine: false } });
        }
        too_large
    }

    fn room_freed(&mut self, effects: &mut Vec<Effect>) {
        // Room for KV that is still to be computed is no use while KV that is there waits for some: its prefill may
        // wait for the room that this KV has at its node.
        let offered = self.offered_wait();
        for request in &self.waiting_for_room {
            if let Some(kv) = self.awaited(*request).filter(|kv| kv.offered == offered) {
                self.open_decode(*request, kv.work, effects);
            }
        }
    }

    fn open_next(&self, effects: &mut Vec<Effect>) {
        if self.opened_tokens >= self.config.ahead_tokens {
            return;
        }
        let Some((_, request)) = self.queue.first_key_value() else { return };
        let Some(Leg::Queued(queued)) = self.legs.get(request) else { return };
        let room_blocks = queued.work.room_blocks(queued.stays, &self.config);
        effects.push(Effect::Open { request: *request, room_blocks });
    }

    fn opened(&mut self, request: RequestId, cached_blocks: u32, waits: bool, effects: &mut Vec<Effect>) {
        match self.legs.remove(&request) {
            Some(Leg::Queued(queued)) => {
                self.queue.remove(&queued.place);
                self.go_on(request, queued.opened(cached_blocks), waits, effects);
            }
            Some(Leg::WaitingForRoom(kv)) => {
                self.waiting_for_room.retain(|other| *other != request);
                if !kv.offered {
                    self.lent_room.insert(request);
                }
                self.legs.insert(request, Leg::Expecting(kv));
                effects.push(Effect::Admit { request });
            }
            other => self.keep(request, other),
        }
    }

    /// There is no room. For a prefill, if nothing here holds any that will come free, waiting would be for ever. KV
    /// that is offered gets the room of the youngest leg whose KV is not.
    fn no_room(&mut self, request: RequestId, effects: &mut Vec<Effect>) {
        match self.legs.get(&request) {
            Some(Leg::Queued(_)) if !self.others_hold(request) => {
                effects.push(Effect::Fail { request, why: LegFailure::NoRoom });
                self.release(request, effects);
            }
            Some(Leg::WaitingForRoom(kv)) if kv.offered => {
                let lent = self.lent_room.last();
                effects.extend(lent.map(|from| Effect::Withdraw { request: *from, to: request }));
            }
            _ => {}
        }
    }

    fn others_hold(&self, request: RequestId) -> bool {
        self.legs.iter().any(|(other, leg)| *other != request && leg.held().blocks)
    }

    /// Takes out a prefill that waits for a fetch, or one that waits for its cache.
    fn take_loading(&mut self, request: RequestId, fetches: bool) -> Option<LoadingPrefill> {
        let waits = |loading: &LoadingPrefill| matches!(loading.source, LoadSource::Fetch(_)) == fetches;
        match self.legs.remove(&request) {
            Some(Leg::Loading(loading)) if waits(&loading) => {
                self.opened_tokens -= loading.open_tokens(&self.config);
                Some(loading)
            }
            other => {
                self.keep(request, other);
                None
            }
        }
    }

    /// A leg that an input does not fit stays as it is.
    fn keep(&mut self, request: RequestId, leg: Option<Leg>) {
        self.legs.extend(leg.map(|leg| (request, leg)));
    }

    fn put(&mut self, request: RequestId, leg: Leg) {
        self.opened_tokens += leg.open_tokens(&self.config);
        self.legs.insert(request, leg);
    }

    /// The cache says how a prefill stands that waits for it.
    fn cached(&mut self, request: RequestId, cached_blocks: u32, waits: bool, effects: &mut Vec<Effect>) {
        let Some(mut loading) = self.take_loading(request, false) else { return };
        loading.pinned.cached_blocks = cached_blocks;
        self.go_on(request, loading, waits, effects);
    }

    /// A prefill waits for its cache. Once that has brought what it has, blocks that are missing still are fetched, or
    /// it computes.
    fn go_on(&mut self, request: RequestId, loading: LoadingPrefill, waits: bool, effects: &mut Vec<Effect>) {
        let have_blocks = loading.pinned.cached_blocks;
        match loading.source.plan() {
            _ if waits => self.put(request, Leg::Loading(loading)),
            Some(plan) if plan.blocks > have_blocks => {
                effects.push(Effect::Fetch { request, have_blocks, plan });
                self.put(request, Leg::Loading(loading.fetching(plan)));
            }
            plan => {
                // The blocks in the plan have come here meanwhile.
                effects.extend(plan.map(|_| Effect::Fetched { request, ok: true }));
                self.compute(request, loading.complete(), effects);
            }
        }
    }

    fn fetch_ended(&mut self, request: RequestId, cached_blocks: u32, effects: &mut Vec<Effect>) {
        let Some(mut loading) = self.take_loading(request, true) else { return };
        let ok = cached_blocks > loading.pinned.cached_blocks;
        loading.pinned.cached_blocks = cached_blocks;
        effects.push(Effect::Fetched { request, ok });
        self.compute(request, loading.complete(), effects);
    }

    fn compute(&mut self, request: RequestId, computing: ComputingPrefill, effects: &mut Vec<Effect>) {
        let cached_tokens = computing.pinned.cached_tokens(&self.config);
        effects.push(Effect::Compute { request, cached_tokens });
        self.put(request, Leg::Computing(computing));
    }

    fn computed(&mut self, request: RequestId, effects: &mut Vec<Effect>) {
        let leg = match self.legs.remove(&request) {
            Some(Leg::Computing(computing)) => {
                self.opened_tokens -= computing.open_tokens(&self.config);
                // Its engine goes on by itself: to wait for the conductor's word would cost a pass.
                let stays = computing.pinned.stays;
                if stays { Leg::Decoding { local: true } } else { Leg::Held(computing.computed()) }
            }
            other => return self.keep(request, other),
        };
        self.legs.insert(request, leg);
        effects.push(Effect::Seal { request });
    }

    fn handed_off(&mut self, request: RequestId, ok: bool, now_us: u64, effects: &mut Vec<Effect>) {
        match self.legs.get_mut(&request) {
            Some(Leg::Held(Complete::Leaves)) if ok => self.release(request, effects),
            Some(leg @ Leg::Held(Complete::Leaves)) => *leg = Leg::Held(Complete::Stranded(now_us)),
            Some(Leg::Computing(computing)) if !ok => computing.failed_us = Some(now_us),
            _ => {}
        }
    }

    fn hand_off(&mut self, request: RequestId, effects: &mut Vec<Effect>) {
        if let Some(Leg::Held(complete)) = self.legs.get_mut(&request) {
            *complete = Complete::Leaves;
            effects.push(Effect::Send { request });
        } else {
            effects.push(Effect::Fail { request, why: LegFailure::NothingToSend });
        }
    }

    fn start_decode(&mut self, request: RequestId, effects: &mut Vec<Effect>) {
        match self.legs.get(&request) {
            Some(Leg::Landed) => {
                self.legs.insert(request, Leg::Decoding { local: false });
                effects.push(Effect::Decode { request });
            }
            // The request is gone, it decodes where it was computed, or the order came twice.
            None | Some(Leg::Decoding { .. }) => {}
            Some(_) => {
                effects.push(Effect::Fail { request, why: LegFailure::NotReady });
                self.release(request, effects);
            }
        }
    }

    fn grow(&self, request: RequestId, blocks: u32, effects: &mut Vec<Effect>) {
        if let Some(Leg::Decoding { .. }) = self.legs.get(&request) {
            effects.push(Effect::Grow { request, blocks });
        }
    }

    /// KV is short: preempts the youngest leg that holds some. Requests are numbered in order of arrival.
    fn preempt_for(&mut self, request: RequestId, effects: &mut Vec<Effect>) {
        // A prefill whose KV is on its way elsewhere leaves soon by itself.
        let gives = |leg: &Leg| leg.held().blocks && !leg.leaves();
        let youngest = self.legs.iter().rev().find(|(_, leg)| gives(leg)).map(|(id, _)| *id);
        let victim = youngest.unwrap_or(request).max(request);
        // Alone it has all there is: elsewhere there may be more.
        let why = if self.others_hold(victim) { LegFailure::GaveWay } else { LegFailure::NoRoom };
        effects.push(Effect::Fail { request: victim, why });
        self.release(victim, effects);
        self.grow(request, GROW_BLOCKS, effects);
    }

    fn release(&mut self, request: RequestId, effects: &mut Vec<Effect>) {
        if let Some(leg) = self.remove(request) {
            effects.push(Effect::Close { request, held: leg.held() });
        }
    }

    fn remove(&mut self, request: RequestId) -> Option<Leg> {
        let leg = self.legs.remove(&request)?;
        self.opened_tokens -= leg.open_tokens(&self.config);
        match &leg {
            Leg::Queued(queued) => _ = self.queue.remove(&queued.place),
            Leg::WaitingForRoom(_) => self.waiting_for_room.retain(|other| *other != request),
            Leg::Expecting(_) => _ = self.lent_room.remove(&request),
            Leg::Loading(_) | Leg::Computing(_) | Leg::Held(_) => {}
            Leg::Landed | Leg::Decoding { .. } => {}
        }
        Some(leg)
    }

    fn reap_stranded(&mut self, now_us: u64, effects: &mut Vec<Effect>) {
        let over = |leg: &Leg| matches!(leg, Leg::Held(Complete::Stranded(since_us)) if now_us > since_us + STRANDED_LEASE_US);
        let requests: Vec<RequestId> =
            self.legs.iter().filter(|(_, leg)| over(leg)).map(|(request, _)| *request).collect();
        for request in requests {
            self.release(request, effects);
        }
    }

    /// Checks that the ledgers agree with the legs.
    ///
    /// # Errors
    /// The first that does not.
    pub fn check(&self) -> Result<(), String> {
        use alloc::format;
        let mut opened_tokens = 0;
        let (mut queued, mut waiting_for_room, mut lent_room) = (0, 0, 0);
        for (request, leg) in &self.legs {
            opened_tokens += leg.open_tokens(&self.config);
            match leg {
                Leg::Queued(q) => {
                    queued += 1;
                    if self.queue.get(&q.place) != Some(request) {
                        return Err(format!("{request} is in no queue"));
                    }
                }
                Leg::WaitingForRoom(_) => {
                    waiting_for_room += 1;
                    if !self.waiting_for_room.contains(request) {
                        return Err(format!("{request} waits for room that nobody gives it"));
                    }
                }
                Leg::Expecting(kv) => {
                    lent_room += usize::from(!kv.offered);
                    if self.lent_room.contains(request) == kv.offered {
                        return Err(format!("the room of {request} is lent, or it is not"));
                    }
                }
                Leg::Loading(_) | Leg::Computing(_) | Leg::Held(_) => {}
                Leg::Landed | Leg::Decoding { .. } => {}
            }
        }
        let counted =
            (self.queue.len(), self.waiting_for_room.len(), self.lent_room.len(), self.opened_tokens);
        if (queued, waiting_for_room, lent_room, opened_tokens) != counted {
            return Err(format!(
                "{queued} queued, {waiting_for_room} waiting for room, {lent_room} with room lent, {opened_tokens} \
                 tokens open; counted {counted:?}"
            ));
        }
        Ok(())
    }
}
