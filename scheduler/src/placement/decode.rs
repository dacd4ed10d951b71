//! Chooses the decode instance of a request by its predicted TBT when the prefill ends.

use core::cell::OnceCell;

use alloc::vec::Vec;
use baton_types::{BlockHash, ClassId, InstanceId, Role};

use crate::conductor::Conductor;
use crate::estimate::{ChainPosition, DecodeLedger, DecodeSlot, NewTurn, mixed_step_us, moments_of_stay};
use crate::fleet::Instance;
use crate::placement::retry_after::WAIT_SHARE;
use crate::prediction::ROOM_PERMILLE;
use crate::request::Entry;
use crate::{RejectReason, Request};

/// The outcome of choosing a decode instance.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum DecodeChoice {
    /// This one, and how long after the prefill its KV is there, µs.
    At(InstanceId, u64),
    /// None, and why.
    Never(RejectReason),
}

/// A prefill as its decode sees it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlannedEnd {
    pub on: InstanceId,
    /// When it ends, µs.
    pub at_us: u64,
    /// How long it takes, µs; the KV leaves meanwhile.
    pub work_us: u64,
}

/// The needs of a request on a decode instance.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DecodeNeed<'a> {
    /// Its prompt's blocks.
    pub chain: &'a [BlockHash],
    /// When it arrives, µs.
    pub arrives_us: u64,
    /// When it will start, µs.
    pub at_us: u64,
    /// Decodes that are predicted to end by this time do not count where steps are scarce, µs.
    pub ends_by_us: u64,
    /// Prompt and reserved output, tokens.
    pub tokens: u64,
    /// Mean context, tokens.
    pub context_tokens: u64,
    /// TBT objective, µs.
    pub tbt_us: u64,
    /// The TTFT that holds for it, µs.
    pub ttft_us: u64,
    /// Its class.
    pub class: ClassId,
    /// The class whose TBT objective holds for its steps.
    pub steps_for: ClassId,
    /// Whether every ticket counts as if its client came back, and not by the chance that it does.
    pub counts_all_tickets: bool,
}

/// The role of the instances that prefill most of what an instance decodes.
fn prefilled_by(instance: &Instance) -> Role {
    if instance.spec.role == Role::Both { Role::Both } else { Role::Prefill }
}

impl Conductor {
    /// Output tokens to reserve: most answers of its class are no longer.
    pub(crate) fn room_tokens(&self, request: &Request) -> u32 {
        self.further_tokens(request, request.emitted_tokens, ROOM_PERMILLE)
    }

    /// Expected number of tokens after the first `emitted` ones: at most so many follow in `permille` of the answers of
    /// its class that became as long. It is at most what the client takes.
    pub(crate) fn further_tokens(&self, request: &Request, emitted: u32, permille: u32) -> u32 {
        let key = (request.class, request.prompt_tokens);
        let whole = request
            .known_output_tokens
            .unwrap_or_else(|| self.lengths.quantile_tokens(key, emitted, permille))
            .min(request.max_output_tokens.unwrap_or(u32::MAX));
        // If the prompt leaves less room, the answer gets what is left.
        let drawn = u64::from(emitted.saturating_sub(request.emitted_tokens));
        let left = self.fleet.largest_decode_tokens.saturating_sub(request.prompt_tokens + drawn);
        let left = u32::try_from(left).unwrap_or(u32::MAX);
        whole.saturating_sub(emitted).min(left).max(1)
    }

    /// Tokens reserved for a prompt and its output: whole blocks, counted separately for prompt and output.
    pub(crate) fn reserved_for(&self, prompt_tokens: u64, room_tokens: u32) -> u64 {
        let block = u64::from(self.config.block_tokens);
        let whole = |tokens: u64| baton_types::blocks_for(tokens, self.config.block_tokens) * block;
        (whole(prompt_tokens) + whole(room_tokens.into())).min(self.fleet.largest_decode_tokens)
    }

    /// Output tokens expected.
    pub(crate) fn expected_tokens(&self, request: &Request) -> u32 {
        let mean = || self.lengths.mean_tokens(request.class, request.prompt_tokens);
        let most = request.max_output_tokens.unwrap_or(u32::MAX);
        let whole = request.known_output_tokens.unwrap_or_else(mean).min(most);
        whole.saturating_sub(request.emitted_tokens).max(1)
    }

    pub(crate) fn decode_need<'a>(&self, request: &'a Request, at_us: u64) -> DecodeNeed<'a> {
        let steps_for = self.config.steps_for(request.class);
        DecodeNeed {
            chain: &request.chain,
            arrives_us: self.now_us,
            at_us,
            ends_by_us: self.now_us,
            tokens: self.reserved_for(request.prompt_tokens, self.room_tokens(request)),
            context_tokens: request.prompt_tokens + u64::from(self.expected_tokens(request)) / 2,
            tbt_us: self.config.classes[steps_for.index()].tbt_us,
            ttft_us: self.ttft_objective_us(request),
            class: request.class,
            steps_for,
            counts_all_tickets: false,
        }
    }

    /// Batch and context that are predicted beside the request: what is there, and what is kept for others.
    fn load_beside(&self, instance: &Instance, need: &DecodeNeed<'_>) -> (u32, u64) {
        let kept = self.kept.decodes_at(need.at_us, need.counts_all_tickets, self.fleet.decodes.len());
        let coming = self.still_expected(instance, Some(need.at_us));
        let (batch, context_tokens, _) = instance.decode.at(self.now_us, need.at_us);
        let batch = batch + kept.batch() + coming.batch;
        let context_tokens = context_tokens + kept.context_tokens + coming.context_tokens;
        // The others wait for their turn.
        match instance.spec.max_running.map(|most| most.saturating_sub(1)) {
            Some(most) if batch > most => (most, context_tokens / u64::from(batch) * u64::from(most)),
            _ => (batch, context_tokens),
        }
    }

    /// Predicted step time of the instance with the request in its batch, and without prompt tokens, µs.
    fn lone_step_us(&self, instance: &Instance, need: &DecodeNeed<'_>) -> f64 {
        let (batch, context_tokens) = self.load_beside(instance, need);
        instance.step_us(batch + 1, context_tokens + need.context_tokens)
    }

    /// Predicted step time of the instance with the request in its batch, µs.
    pub(crate) fn predicted_step_us(&self, instance: &Instance, need: &DecodeNeed<'_>) -> f64 {
        self.step_beside_prefills_us(instance, need, self.lone_step_us(instance, need))
    }

    /// A step that is `alone` so long, µs, where local prefills stretch it: it counts at its target, or at the time of the
    /// longest chunk where that is less.
    fn step_beside_prefills_us(&self, instance: &Instance, need: &DecodeNeed<'_>, alone: f64) -> f64 {
        let spec = &instance.spec;
        let left = instance.backlog_us(self.now_us);
        let mixed = self.config.local_prefill && left > need.at_us.saturating_sub(self.now_us);
        if !mixed {
            return alone;
        }
        #[expect(clippy::cast_precision_loss, reason = "times are far below 2^53 µs")]
        let target = (need.tbt_us / 1000 * u64::from(self.config.mixed_step_permille)) as f64;
        let chunk_tokens = spec.mixed_chunk_tokens.unwrap_or(spec.pass_tokens);
        let chunk_us = spec.profile.prefill_us(chunk_tokens.into(), need.context_tokens);
        target.min(alone + chunk_us).max(alone)
    }

    /// The position of a prompt among those of a ledger.
    pub(crate) fn chain_position(&self, ledger: &DecodeLedger, chain: &[BlockHash]) -> ChainPosition {
        ledger.chain_position(chain, self.config.block_tokens, |id| self.requests.chain_of(id))
    }

    /// Whether the requests that decode there at this moment leave no room.
    pub(crate) fn is_full(&self, instance: &Instance, need: &DecodeNeed<'_>) -> bool {
        let decode = &instance.decode;
        let roomy = |chain_position| decode.has_room_now(need.tokens, &instance.spec, chain_position);
        !roomy(ChainPosition::default()) && !roomy(self.chain_position(decode, need.chain))
    }

    /// Reserves a slot for a prompt on an instance.
    pub(crate) fn keep(&mut self, at: InstanceId, slot: DecodeSlot, chain: &[BlockHash]) {
        let chain_position = self.chain_position(&self.fleet.known(at).decode, chain);
        self.fleet.known_mut(at).decode.reserve(slot, chain_position);
    }

    /// Whether an instance can take the request at all, and if not, why.
    pub(crate) fn decode_fits(
        &self,
        instance: &Instance,
        need: &DecodeNeed<'_>,
    ) -> Result<f64, RejectReason> {
        self.decode_fits_beside(instance, need, &OnceCell::new())
    }

    /// As [`Self::decode_fits`], for several calls about one instance: `chain_position` caches the part that does not change.
    pub(crate) fn decode_fits_beside(
        &self,
        instance: &Instance,
        need: &DecodeNeed<'_>,
        chain_position: &OnceCell<ChainPosition>,
    ) -> Result<f64, RejectReason> {
        if instance.prefill.busy_until_us(need.at_us).is_some() {
            return Err(RejectReason::Room);
        }
        let (when, stay_us) = ((self.now_us, need.at_us), self.lengths.mean_duration_us(1));
        let fits = |chain_position| {
            instance.decode.fits_throughout(when, stay_us, chain_position, |at_us, promised, shared| {
                self.takes_room(instance, need, (at_us, promised, shared))
            })
        };
        // Mostly there is room for all of it: then nobody asks what others hold of it.
        if !fits(ChainPosition::default())
            && !fits(*chain_position.get_or_init(|| self.chain_position(&instance.decode, need.chain)))
        {
            return Err(RejectReason::Room);
        }
        if !self.gets_turn(instance, need, chain_position) {
            return Err(RejectReason::Room);
        }
        // Prompt tokens stretch steps up to the target, which is within the objective: the margin is for the batch.
        let (batch, context_tokens) = self.load_beside(instance, need);
        let alone_us = instance.step_us(batch + 1, context_tokens + need.context_tokens);
        let longest_us = self.longest_step_us(instance, need).unwrap_or(alone_us).max(alone_us);
        let longest_us = longest_us.max(self.crowded_step_us(instance, need, chain_position).unwrap_or(0.0));
        let promised_us = self.promised_step_us(instance, need);
        if longest_us > promised_us
            || !self.takes_step(instance, need, (batch, context_tokens), (alone_us, promised_us))
            || self.later_step_us(instance, need, stay_us) > Some(promised_us)
        {
            Err(RejectReason::Tbt)
        } else {
            Ok(self.step_beside_prefills_us(instance, need, alone_us))
        }
    }

    /// When an engine, which takes requests in turn as it has places and room, takes this one, and what that does to others.
    /// Those that wait before it may never be there all at one moment, and take their room all the same.
    pub(crate) fn turn_of(
        &self,
        instance: &Instance,
        need: &DecodeNeed<'_>,
        chain_position: &OnceCell<ChainPosition>,
    ) -> NewTurn {
        let decode = &instance.decode;
        let mut tokens = need.tokens;
        if decode.reserved_tokens().saturating_add(tokens) > instance.spec.capacity_tokens {
            let position = *chain_position.get_or_init(|| self.chain_position(decode, need.chain));
            tokens = tokens.saturating_sub(decode.shared_with(position));
        }
        let stay_us = self.lengths.mean_duration_us(1);
        decode.turn(&instance.spec, self.now_us, (need.at_us, stay_us, tokens))
    }

    /// Whether the engine takes the request soon enough after it comes, and the others in time for their promises.
    fn gets_turn(
        &self,
        instance: &Instance,
        need: &DecodeNeed<'_>,
        chain_position: &OnceCell<ChainPosition>,
    ) -> bool {
        let turn = self.turn_of(instance, need, chain_position);
        turn.at_us - need.at_us <= self.left_us(instance, need) / WAIT_SHARE && !turn.makes_late
    }

    /// What its objective leaves of the time after its start, µs.
    pub(super) fn left_us(&self, instance: &Instance, need: &DecodeNeed<'_>) -> u64 {
        let slack_us = self.margins.of_slack_us(need.class, prefilled_by(instance), need.ttft_us);
        (need.arrives_us + need.ttft_us - slack_us).saturating_sub(need.at_us)
    }

    /// Whether the request may take its room beside what is promised to others, at a moment or in all. Up to half of an
    /// instance, it may take whatever is free; beyond, it leaves the more to smaller ones the larger it is. Of its prompt
    /// only what nobody else holds counts.
    pub(crate) fn takes_room(
        &self,
        instance: &Instance,
        need: &DecodeNeed<'_>,
        (at_us, promised_tokens, shared_tokens): (Option<u64>, u64, u64),
    ) -> bool {
        let decodes = self.fleet.decodes.len();
        let by_tickets = match at_us {
            Some(at_us) => self.kept.decodes_at(at_us, need.counts_all_tickets, decodes),
            None => self.kept.decodes(need.counts_all_tickets, decodes),
        };
        let expected = self.still_expected(instance, at_us);
        let promised_tokens = promised_tokens + by_tickets.room_tokens + expected.room_tokens;
        let capacity_tokens = instance.spec.capacity_tokens;
        let tokens = need.tokens.saturating_sub(shared_tokens);
        let free_tokens = capacity_tokens.saturating_sub(promised_tokens);
        let unpromised_percent = self.margins.percent(need.class, prefilled_by(instance));
        tokens <= free_tokens
            && (promised_tokens <= capacity_tokens / 2
                || self.margins.needs(need.class).may_take_room(
                    tokens,
                    (free_tokens, capacity_tokens),
                    unpromised_percent,
                ))
    }

    /// As [`Self::takes_room`], of a step with that batch and context beside the request: it is `alone_us` long with it, and
    /// may be promised to be `promised_us` long.
    fn takes_step(
        &self,
        instance: &Instance,
        need: &DecodeNeed<'_>,
        (batch, context_tokens): (u32, u64),
        (alone_us, promised_us): (f64, f64),
    ) -> bool {
        if alone_us * 2.0 <= promised_us {
            return true;
        }
        let without_us = instance.step_us(batch, context_tokens);
        let (left_us, most_us) = (promised_us - without_us, promised_us - instance.step_us(1, 0));
        let needs = self.margins.needs(need.class);
        let mean_us = || instance.step_us(batch + 1, context_tokens + needs.context_tokens()) - without_us;
        left_us * 2.0 >= most_us || needs.may_take_step(need.context_tokens, (left_us, most_us), mean_us())
    }

    /// The longest step that may be predicted for a request there, µs: the objective less the learnt margin. The margin
    /// scales what the others of the batch add, so a request that decodes alone is never refused for it.
    #[expect(clippy::cast_precision_loss, reason = "times are far below 2^53 µs")]
    pub(crate) fn promised_step_us(&self, instance: &Instance, need: &DecodeNeed<'_>) -> f64 {
        let slack_us = instance.step_slack_us(need.tbt_us, need.context_tokens);
        need.tbt_us as f64 - self.margins.of_step_slack_us(need.steps_for, slack_us)
    }

    /// The longest step while the request decodes, µs, where higher bands expect to find their place beside it: looked at
    /// when a third of its stay is over, two thirds, and all of it. Its own band comes later than it, and takes what is
    /// left.
    fn later_step_us(&self, instance: &Instance, need: &DecodeNeed<'_>, stay_us: u64) -> Option<f64> {
        self.kept.expected?;
        let later = moments_of_stay(need.at_us, stay_us).skip(1).map(|at_us| DecodeNeed { at_us, ..*need });
        later.map(|then| self.lone_step_us(instance, &then)).max_by(f64::total_cmp)
    }

    /// The longest step that the instance may have with prompt tokens in it, µs. `None` where its engine bounds its
    /// steps. A decode instance has chunks of a fixed length. So has an instance of both roles, but where there are no
    /// others for its prefills they have to be there.
    fn longest_step_us(&self, instance: &Instance, need: &DecodeNeed<'_>) -> Option<f64> {
        let minds = instance.spec.role == Role::Decode || self.has_place_beside(instance);
        let fixed = instance.spec.mixed_chunk_tokens.filter(|_| minds)?;
        let mixed = instance.prefill.dispatched_left_us(self.now_us) > need.at_us.saturating_sub(self.now_us);
        mixed.then(|| mixed_step_us(instance, fixed, 0, need.context_tokens))
    }

    /// The step time with all requests of the instance, µs, where they fit together only because they share blocks.
    /// Then steps are the scarce resource, not room: a decode that ends later than predicted makes the steps too long
    /// for all.
    fn crowded_step_us(
        &self,
        instance: &Instance,
        need: &DecodeNeed<'_>,
        chain_position: &OnceCell<ChainPosition>,
    ) -> Option<f64> {
        let (decode, capacity_tokens) = (&instance.decode, instance.spec.capacity_tokens);
        let stay = (need.at_us, self.lengths.mean_duration_us(1));
        let (batch, context_tokens) = decode.may_meet(self.now_us, stay, need.ends_by_us);
        let context_tokens = context_tokens + need.context_tokens;
        if context_tokens <= capacity_tokens {
            return None;
        }
        let shared_tokens =
            decode.shared_with(*chain_position.get_or_init(|| self.chain_position(decode, need.chain)));
        let own_tokens = need.tokens.saturating_sub(shared_tokens);
        let together = decode.reserved_tokens() + own_tokens <= capacity_tokens;
        together.then(|| instance.step_us(batch + 1, context_tokens))
    }

    /// The decode instance with the soonest first step among those that keep the objective and take KV from where the
    /// prefill is.
    pub(crate) fn choose_decode(&self, request: &Request, prefill: PlannedEnd) -> DecodeChoice {
        let need = self.decode_need(request, prefill.at_us);
        let mut best: Option<(f64, InstanceId, u64)> = None;
        let mut reason = RejectReason::NoInstance;
        for id in self.roomiest_decodes(request, prefill.on) {
            let instance = self.fleet.known(id);
            match self.decode_fits(instance, &need) {
                Ok(step_us) => {
                    let delay_us = self.landing_delay_us(instance, request, prefill);
                    #[expect(clippy::cast_precision_loss, reason = "times are far below 2^53 µs")]
                    let first_us = step_us + delay_us as f64;
                    if best.is_none_or(|(least, ..)| first_us < least) {
                        best = Some((first_us, id, delay_us));
                    }
                }
                Err(why) => reason = why,
            }
        }
        match best {
            Some((_, id, delay_us)) => DecodeChoice::At(id, delay_us),
            None => DecodeChoice::Never(reason),
        }
    }

    /// Decode instances that may take the request `from` this prefill instance and are compared in detail, in id order:
    /// all of a small fleet, those with the most room of a large one.
    pub(crate) fn roomiest_decodes(&self, request: &Request, from: InstanceId) -> Vec<InstanceId> {
        let most = if self.fleet.orders().is_some() { self.config.candidates / 2 } else { usize::MAX };
        self.first_decodes(request, from, most)
    }

    /// As [`Self::roomiest_decodes`], where the pool is looked at as a whole unless it is larger than all candidates
    /// together.
    pub(crate) fn decodes_to_ask(&self, request: &Request, from: InstanceId) -> Vec<InstanceId> {
        let few = self.fleet.decodes.len() <= self.config.candidates;
        if few { self.first_decodes(request, from, usize::MAX) } else { self.roomiest_decodes(request, from) }
    }

    fn first_decodes(&self, request: &Request, from: InstanceId, most: usize) -> Vec<InstanceId> {
        let able = self.fleet.decodes_of(from).filter(|id| self.holds(*id, request));
        let mut ids: Vec<InstanceId> = able.take(most).collect();
        ids.sort_unstable();
        ids
    }

    /// The decode instance with the least promised context, whatever its state. Policies that ignore objectives use it.
    pub(crate) fn least_loaded_decode(&self, request: &Request, from: InstanceId) -> Option<InstanceId> {
        let busy_until_us = |i: &Instance| i.prefill.busy_until_us(self.now_us);
        let load = |i: &Instance| (busy_until_us(i), i.decode.reserved_tokens(), i.decode.all().0, i.spec.id);
        let able = self.roomiest_decodes(request, from).into_iter();
        able.filter_map(|id| self.fleet.get(id)).min_by_key(|i| load(i)).map(|i| i.spec.id)
    }

    /// How long the decode of this request is predicted to take, µs.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a positive product far below 2^53"
    )]
    pub(crate) fn decode_duration_us(&self, request: &Request, step_us: f64) -> u64 {
        if !self.config.policy.orders_queues() {
            // The paper's system-level prediction: every decode lasts the same.
            return match self.config.decode_duration_us {
                0 => self.lengths.mean_duration_us(5_000_000),
                fixed => fixed,
            };
        }
        (f64::from(self.expected_tokens(request)) * step_us) as u64 + 1
    }

    /// Reserves room for an entry that is about to be prefilled for `decode` (I8), or plans to
    /// while its prefill still waits here. Returns the predicted step time, µs.
    pub(crate) fn reserve_decode(&mut self, entry: &mut Entry, decode: InstanceId, at_us: u64) -> f64 {
        assert!(entry.decode.is_none(), "request {} keeps room twice (I8)", entry.request.id);
        let need = self.decode_need(&entry.request, at_us);
        let room = self.room_tokens(&entry.request);
        let instance = self.fleet.known(decode);
        let alone_us = self.lone_step_us(instance, &need);
        let step_us = self.step_beside_prefills_us(instance, &need, alone_us);
        // Where all prompts come here, what they do to steps is learnt: whether one is there now says little of later steps.
        let lasting_us = if instance.spec.role == Role::Both { alone_us } else { step_us };
        let prior_us = self.decode_duration_us(&entry.request, lasting_us);
        let duration = instance.decode_residual.scale_us(prior_us);
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "at most the objective")]
        let promised_us = self.promised_step_us(instance, &need) as u64;
        entry.promised_step_us = promised_us;
        entry.decode_prior_us = prior_us;
        entry.decode = Some(decode);
        entry.room_tokens = room;
        entry.decode_at_us = at_us;
        entry.finish_us = at_us + duration;
        let slot = DecodeSlot {
            request: entry.request.id,
            priority: self.class(&entry.request).priority,
            start_us: at_us,
            finish_us: entry.finish_us,
            due_us: entry.promised_us.max(at_us),
            context_tokens: need.context_tokens,
            output_tokens: u64::from(self.expected_tokens(&entry.request)),
            reserved_tokens: need.tokens,
            common_tokens: 0,
            running: false,
            waits: false,
            held: false,
        };
        self.keep(decode, slot, &entry.request.chain);
        step_us
    }
}
