//! Clients: they offer their requests to a conductor, retry or give up. Each request ends once.

use baton_legs::pairs::EmittedTokens;
use baton_scheduler::{FetchPlan, Rejection, Request};
use baton_types::{BlockKey, ClassId, RequestId, RequestObjectives, TenantId};

use super::World;
use super::inbox::ConductorInput;
use crate::events::Event;
use crate::metrics::{Outcome, Status};

/// Reads of a fetch source are held under an id of their own: its request may hold blocks there too.
pub(crate) const READER: u64 = 1 << 63;

/// Longest time that a client waits before a retry, without jitter, µs.
const LONGEST_WAIT_US: u64 = 3_600_000_000;

/// Which use of its slot a request is.
const fn generation(id: RequestId) -> u32 {
    (id.0 >> 32) as u32
}

/// A request that has not ended.
#[derive(Clone, Debug)]
pub(crate) struct LiveRequest {
    pub id: RequestId,
    pub used: bool,
    /// Its place in the order of arrival.
    pub row: u64,
    pub router: u32,
    /// The attempt that was ordered last. Reports about an earlier one are out of date.
    pub attempt: u32,
    pub keys: Vec<BlockKey>,
    /// Prompt tokens that its client sent.
    pub asked_tokens: u64,
    /// Tokens to prefill: those that its client sent, and those emitted before a decode died.
    pub prompt_tokens: u64,
    pub output_tokens: u32,
    /// Tokens that left for its client, as far as engines have reported.
    pub streamed_tokens: u32,
    /// Gaps of decodes that died, µs, and when the last token of them left.
    pub gaps_us: Vec<u32>,
    pub last_token_us: u64,
    pub class: u16,
    pub objectives: RequestObjectives,
    pub tenant: u32,
    pub first_offer_us: u64,
    pub offer_us: u64,
    pub attempts: u32,
    pub retry_after_us: u64,
    pub prefill: u32,
    pub decode: u32,
    pub order: u64,
    /// Tokens that it had when it was last prefilled.
    pub given_tokens: u32,
    /// Answer tokens beyond them that its pair has room for.
    pub room_tokens: u32,
    /// Tokens that fit into the blocks of the leg that decodes, or will.
    pub kv_tokens: u64,
    pub fetch: Option<FetchPlan>,
    /// Leading blocks that its prefill node has, or is about to have.
    pub hit_blocks: u32,
    /// Prompt tokens that its prefill need not compute; set when it starts to compute.
    pub cached_tokens: u64,
    /// Copies from slower tiers of its prefill node that are under way.
    pub loads: u8,
    pub shares: bool,
    /// Leading blocks that must be readable before a prefill that shares may run.
    pub shared_blocks: u32,
    pub reading_from: Option<u32>,
    /// Blocks that its decode node had already.
    pub decode_blocks: u32,
    /// All of its KV is at its decode node.
    pub landed: bool,
    pub handoff: Option<u64>,
    pub first_token_us: u64,
    /// When the first token of its latest stay in an engine came.
    pub attempt_first_us: u64,
    pub wasted_tokens: u64,
}

impl LiveRequest {
    /// What its conductor hears when its answer has so many tokens.
    pub(crate) const fn tokens(&self, tokens: u32) -> EmittedTokens {
        EmittedTokens { request: self.id, tokens, first_us: self.attempt_first_us, last: false }
    }

    pub(crate) const fn emitted(&self, tokens: u32) -> ConductorInput {
        ConductorInput::Emitted(self.tokens(tokens))
    }

    /// Tokens that may be emitted until its answer, of `answer_tokens` so far, is longer than was promised; at least
    /// the next one.
    pub(crate) fn promised_tokens(&self, answer_tokens: u32) -> u32 {
        self.given_tokens.saturating_add(self.room_tokens).saturating_sub(answer_tokens).max(1)
    }

    /// Whether its prefill drew a token with which its decode begins.
    pub(crate) const fn drawn_token(&self) -> bool {
        self.prefill == self.decode
    }

    /// Tokens that its decode may emit, from its start where it runs, before its KV is full. Each step writes the KV of
    /// the token before it.
    pub(crate) fn free_tokens(&self) -> u32 {
        let written_tokens = self.prompt_tokens - u64::from(!self.drawn_token());
        u32::try_from(self.kv_tokens.saturating_sub(written_tokens)).unwrap_or(u32::MAX)
    }

    /// The request as its conductor receives it.
    pub(crate) fn request(&self) -> Request {
        Request {
            id: self.id,
            class: ClassId(self.class),
            objectives: self.objectives,
            tenant: TenantId(self.tenant),
            prompt_tokens: self.prompt_tokens,
            chain: self.keys.iter().map(|k| k.short()).collect(),
            // A client that wants one token says so; how long other answers become is not known before.
            max_output_tokens: (self.output_tokens == 1).then_some(1),
            ..Request::default()
        }
    }
}

impl World {
    /// Makes the next arrival of the workload an event.
    pub(crate) fn pull_arrival(&mut self) {
        let horizon_us = self.setup.foresight_us;
        if horizon_us > 0 {
            self.look_ahead(horizon_us);
            self.upcoming = self.foreseen.pop_front();
        } else {
            self.upcoming = self.workload.next();
        }
        if let Some(arrival) = &self.upcoming {
            self.events.push(arrival.at_us.max(self.now_us), Event::Arrival);
        }
    }

    fn look_ahead(&mut self, horizon_us: u64) {
        let until = |w: &Self| w.foreseen.front().map_or(0, |a| a.at_us) + horizon_us;
        while self.foreseen.back().is_none_or(|last| last.at_us <= until(self)) {
            let Some(next) = self.workload.next() else { break };
            self.foreseen.push_back(next);
        }
    }

    pub(crate) fn arrive(&mut self) {
        let Some(arrival) = self.upcoming.take() else { return };
        let mut hasher = super::chain_hasher();
        let mut keys: Vec<BlockKey> = arrival.ids.iter().map(|id| hasher.push_id(*id)).collect();
        let slot = self.free_slot();
        if self.nodes.iter().any(|n| !n.prefix_cache) {
            // Without a prefix cache no block is like any other.
            let own = u128::from(self.arrivals + 1) << 64;
            keys.iter_mut().for_each(|k| {
                k.0 ^=
                    own.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ (own >> 64).wrapping_mul(0x9E37_79B9_7F4A_7C15)
            });
        }
        self.metrics.arrived(self.now_us, &arrival);
        let index = self.conductors[0].index();
        self.metrics.asked(&keys, |block| index.holders(block));
        let generation = self.live[slot as usize].id.0 >> 32;
        let id = RequestId((generation + 1) << 32 | u64::from(slot));
        let live = &mut self.live[slot as usize];
        *live = fresh(id, keys);
        (live.asked_tokens, live.prompt_tokens) = (arrival.prompt_tokens, arrival.prompt_tokens);
        live.output_tokens = match self.setup.cut_outputs {
            0 => arrival.output_tokens,
            cut => arrival.output_tokens.min(cut),
        };
        (live.class, live.objectives, live.tenant) = (arrival.class, arrival.objectives, arrival.tenant);
        (live.first_offer_us, live.row) = (self.now_us, self.arrivals);
        live.router = u32::try_from(self.arrivals % u64::from(self.setup.routers)).expect("few routers");
        self.arrivals += 1;
        self.in_flight += 1;
        self.plan_departure(slot, arrival.cancel_after_us);
        self.offer(slot);
        self.pull_arrival();
    }

    fn free_slot(&mut self) -> u32 {
        self.free.pop().unwrap_or_else(|| {
            let slot = u32::try_from(self.live.len()).expect("live requests are far below 2^32");
            self.live.push(fresh(RequestId(u64::from(slot)), Vec::new()));
            slot
        })
    }

    /// Some clients leave: as their trace says, or at random.
    fn plan_departure(&mut self, slot: u32, told_us: Option<u64>) {
        let random = self.rng.chance_permille(self.setup.clients.leave_permille);
        let time_limit_us = self.setup.scheduler.classes[0].ttft_us;
        let after_us = told_us.or_else(|| random.then(|| self.rng.below(time_limit_us)));
        if let Some(after_us) = after_us {
            let generation = generation(self.live[slot as usize].id);
            self.events.push(self.now_us + after_us, Event::Cancel(slot, generation));
        }
    }

    /// A refused client retries, unless it has left in the meantime.
    pub(crate) fn comes_back(&mut self, slot: u32, of_generation: u32) {
        let live = &self.live[slot as usize];
        if live.used && generation(live.id) == of_generation {
            self.offer(slot);
        }
    }

    /// Hands a request to its conductor.
    pub(crate) fn offer(&mut self, slot: u32) {
        let live = &mut self.live[slot as usize];
        live.offer_us = self.now_us;
        live.attempts += 1;
        let (router, request) = (live.router, live.request());
        let request = self.foresee(slot, request);
        self.send(router, ConductorInput::Arrived(Box::new(request)));
    }

    pub(crate) fn slot_of(&self, id: RequestId) -> Option<u32> {
        #[expect(clippy::cast_possible_truncation, reason = "the low half is the slot")]
        let slot = id.0 as u32;
        self.live.get(slot as usize).filter(|l| l.used && l.id == id).map(|_| slot)
    }

    /// The conductor refused. Where `may_return`, the client may come back after the wait that it names.
    pub(crate) fn rejected(&mut self, rejection: &Rejection, may_return: bool) {
        let Some(slot) = self.slot_of(rejection.request) else { return };
        let clients = self.setup.clients;
        let live = &mut self.live[slot as usize];
        let begun = may_return && live.streamed_tokens > 0;
        self.oracle.witness(!begun, || format!("{} is refused, and has half of its answer", live.id));
        live.wasted_tokens += rejection.wasted_tokens;
        live.retry_after_us = rejection.retry_after_us;
        let returns = may_return && live.attempts <= clients.retries && rejection.retry_after_us > 0;
        self.metrics.refused(self.now_us, rejection, returns);
        if !returns {
            self.end(slot, Status::Rejected, None);
            return;
        }
        let generation = generation(live.id);
        let wait_us = rejection.retry_after_us.clamp(1000, LONGEST_WAIT_US);
        let jitter_us = self.rng.below(wait_us / 1000 * u64::from(clients.jitter_permille) + 1);
        self.events.push(self.now_us + wait_us + jitter_us, Event::Retry(slot, generation));
    }

    pub(crate) fn client_leaves(&mut self, slot: u32, of_generation: u32) {
        let live = &self.live[slot as usize];
        if !live.used || generation(live.id) != of_generation {
            return;
        }
        let (router, request) = (live.router, live.id);
        self.release_all(slot);
        self.end(slot, Status::Cancelled, None);
        if self.pairs[router as usize].get(request).is_some() {
            self.send(router, ConductorInput::Left(request));
        }
    }

    /// A request ends, exactly once.
    pub(crate) fn end(&mut self, slot: u32, status: Status, gaps: Option<crate::engine::GapSummary>) {
        let live = &mut self.live[slot as usize];
        self.oracle.witness(live.used, || format!("I5: {} ended twice", live.id));
        live.used = false;
        let (request, offer_us) = (live.id, live.offer_us);
        let conductor = &self.conductors[live.router as usize];
        let as_predicted = status == Status::Completed && live.attempt == 1;
        let decodes_at_us = conductor.decodes_at_us(request).unwrap_or(0);
        let outcome = Outcome {
            row: live.row,
            status,
            class: live.class,
            objectives: live.objectives,
            tenant: live.tenant,
            first_offer_us: live.first_offer_us,
            offer_us: live.offer_us,
            end_us: self.now_us,
            prompt_tokens: live.asked_tokens,
            output_tokens: live.output_tokens,
            cached_tokens: live.cached_tokens,
            hit_blocks: live.hit_blocks,
            blocks: u32::try_from(live.keys.len()).unwrap_or(u32::MAX),
            ttft_us: live.first_token_us.saturating_sub(live.offer_us),
            gaps: gaps.unwrap_or_default(),
            attempts: live.attempts,
            retry_after_us: live.retry_after_us,
            prefill: live.prefill,
            decode: live.decode,
            wasted_tokens: live.wasted_tokens,
            decode_start_us: decodes_at_us.saturating_sub(offer_us),
            prediction: conductor.prediction(request).filter(|_| as_predicted),
        };
        (live.keys, live.gaps_us) = (Vec::new(), Vec::new());
        self.free.push(slot);
        self.in_flight -= 1;
        self.oracle.ended(status);
        self.metrics.ended(request, &outcome);
    }
}

fn fresh(id: RequestId, keys: Vec<BlockKey>) -> LiveRequest {
    LiveRequest {
        id,
        used: !keys.is_empty(),
        row: 0,
        router: 0,
        attempt: 0,
        keys,
        asked_tokens: 0,
        prompt_tokens: 0,
        output_tokens: 0,
        streamed_tokens: 0,
        gaps_us: Vec::new(),
        last_token_us: 0,
        class: 0,
        objectives: RequestObjectives::default(),
        tenant: 0,
        first_offer_us: 0,
        offer_us: 0,
        attempts: 0,
        retry_after_us: 0,
        prefill: 0,
        decode: 0,
        order: 0,
        given_tokens: 0,
        room_tokens: 0,
        kv_tokens: 0,
        fetch: None,
        hit_blocks: 0,
        cached_tokens: 0,
        loads: 0,
        shares: false,
        shared_blocks: 0,
        reading_from: None,
        decode_blocks: 0,
        landed: false,
        handoff: None,
        first_token_us: 0,
        attempt_first_us: 0,
        wasted_tokens: 0,
    }
}
