//! Nodes' reports about their legs. Each fact is about one attempt; the core drops an outdated one (I12).

use alloc::vec::Vec;

use baton_scheduler::Input;
use baton_types::{Epoch, InstanceId, RequestId};

use super::{Cause, Core, Effect, EmittedTokens, Fact, FactOutcome, Failure, Pair, Pairs, Stage};

impl Pair {
    /// Whether a node has a say in this: each leg says what it does, and at its stage.
    fn accepts(&self, instance: InstanceId, fact: &Fact) -> bool {
        let [prefills, decodes] = self.legs().map(|leg| leg == Some(instance));
        match (&self.stage, fact) {
            // A prefill draws one token, the first of its attempt.
            (Stage::Prefilling(prefilling), Fact::Token { index, .. }) => {
                prefills && *index == prefilling.given_tokens()
            }
            (
                Stage::Prefilling(_) | Stage::Answered(_),
                Fact::Prefilled { .. } | Fact::Fetched { .. } | Fact::PromptLogprobs | Fact::Ended,
            ) => prefills,
            (Stage::Prefilling(_), Fact::Offered) => prefills && !decodes && self.legs()[1].is_some(),
            (
                Stage::Prefilling(_) | Stage::Answered(_) | Stage::HandingOff(_),
                Fact::HandedOff { ok: true },
            ) => decodes,
            (
                Stage::Prefilling(_) | Stage::Answered(_) | Stage::HandingOff(_),
                Fact::HandedOff { ok: false } | Fact::Failed(_),
            ) => prefills || decodes,
            (Stage::Decoding(_), Fact::Token { .. } | Fact::Ended | Fact::Failed(_)) => decodes,
            _ => false,
        }
    }
}

/// The room of an answer that outgrew `room_tokens`: the conductor keeps at least so much more, and need not hear of
/// each token.
#[must_use]
pub const fn outgrown_room(room_tokens: u32) -> u32 {
    room_tokens.saturating_add(room_tokens / 4).saturating_add(1)
}

impl Pairs {
    /// Whether an instance may say this of an attempt now.
    #[must_use]
    pub fn accepts(&self, (request, attempt, instance): (RequestId, u32, InstanceId), fact: &Fact) -> bool {
        let current = self.pairs.get(&request).filter(|pair| pair.attempt == attempt);
        current.is_some_and(|pair| pair.accepts(instance, fact))
    }

    /// A node says something of its leg of an attempt.
    pub fn on_fact(
        &mut self,
        now_us: u64,
        ((request, attempt, instance), fact): ((RequestId, u32, InstanceId), Fact),
        core: &mut impl Core,
        effects: &mut Vec<Effect>,
    ) -> FactOutcome {
        self.now_us = now_us;
        if !self.accepts((request, attempt, instance), &fact) {
            return FactOutcome::Stale;
        }
        let answered = self.pairs.get(&request).is_some_and(Pair::is_answered);
        if answered && matches!(fact, Fact::Failed(_) | Fact::HandedOff { ok: false }) {
            self.end_if_answered(request, core, effects);
            return FactOutcome::Yes;
        }
        match fact {
            Fact::Ended if answered => return FactOutcome::Stale,
            Fact::Token { index, last } => return self.token(request, (index, last), core, effects),
            Fact::Prefilled { compute_us, cached_tokens } => {
                self.prefilled(request, (compute_us, cached_tokens), core, effects);
            }
            Fact::HandedOff { ok: true } => self.landed(request, core, effects),
            Fact::HandedOff { ok: false } => {
                effects.push(Effect::Blame { request, cause: Cause::Handoff });
                self.handoff_failed(request, core, effects);
            }
            Fact::Fetched { ok } => self.feed(Input::FetchFinished { request, ok }, core, effects),
            Fact::Offered => return self.offered(request),
            Fact::Failed(failure) => self.leg_failed((request, instance), failure, core, effects),
            Fact::Ended | Fact::PromptLogprobs => {}
        }
        FactOutcome::Yes
    }

    fn token(
        &mut self,
        request: RequestId,
        (index, last): (u32, bool),
        core: &mut impl Core,
        effects: &mut Vec<Effect>,
    ) -> FactOutcome {
        let Some(pair) = self.pairs.get_mut(&request) else { return FactOutcome::Stale };
        if index != pair.emitted_tokens {
            return FactOutcome::Repeated;
        }
        debug_assert!(pair.attempt > 0, "{request} has a token and was never sent");
        let drawn = EmittedTokens { request, tokens: index + 1, first_us: self.now_us, last };
        self.drawn(drawn, core, effects);
        FactOutcome::Yes
    }

    /// Takes in how many answer tokens there are by now. For a driver whose engines do not report each token: it calls
    /// this with the first token of a local prefill, when an answer outgrows its room (see [`outgrown_room`]), and before
    /// anything else that ends a stay in an engine.
    pub fn emitted(
        &mut self,
        now_us: u64,
        emitted: EmittedTokens,
        core: &mut impl Core,
        effects: &mut Vec<Effect>,
    ) {
        self.now_us = now_us;
        let EmittedTokens { request, tokens, first_us, .. } = emitted;
        let Some(pair) = self.pairs.get(&request) else { return };
        debug_assert!(tokens >= pair.emitted_tokens, "{request}: no client gives tokens back");
        debug_assert!(first_us <= now_us, "{request}: its first token is to come");
        if tokens > pair.emitted_tokens {
            self.drawn(emitted, core, effects);
        }
    }

    fn drawn(&mut self, drawn: EmittedTokens, core: &mut impl Core, effects: &mut Vec<Effect>) {
        let EmittedTokens { request, tokens: emitted_tokens, first_us, last } = drawn;
        let Some(pair) = self.pairs.get_mut(&request) else { return };
        pair.emitted_tokens = emitted_tokens;
        pair.refused_since_us = None;
        let decodes = matches!(pair.stage, Stage::Decoding(_));
        let early = !last && pair.decodes_elsewhere();
        let outgrown = pair.stage.tokens_mut().is_some_and(|tokens| {
            if tokens.first_us == 0 && !early {
                tokens.first_us = first_us;
            }
            let outgrown = !last && decodes && emitted_tokens.saturating_sub(tokens.given) >= tokens.room;
            if outgrown {
                tokens.room = outgrown_room(tokens.room);
            }
            outgrown
        });
        self.trial_is_over(request);
        if outgrown {
            self.feed(Input::RoomOutgrown { request, emitted_tokens }, core, effects);
        }
    }

    fn prefilled(
        &mut self,
        request: RequestId,
        (compute_us, cached_tokens): (u64, u64),
        core: &mut impl Core,
        effects: &mut Vec<Effect>,
    ) {
        let Some(pair) = self.pairs.get(&request) else { return };
        let (legs, attempt, answered) = (pair.legs(), pair.attempt, pair.is_answered());
        let landed = pair.has_landed_early();
        if let [Some(prefill), _] = legs {
            self.paces.entry(prefill).or_default().prefilled += 1;
        }
        // An answered pair stays answered: no instance decodes it, and no client would see a refusal now.
        if !answered {
            self.prefill_is_over(request, effects);
        }
        self.feed(Input::PrefillFinished { request, compute_us, cached_tokens }, core, effects);
        if answered {
            self.conclude_early((request, attempt), legs, core, effects);
        } else if landed {
            self.feed(Input::HandoffFinished { request }, core, effects);
        }
    }

    /// The first token was the last: both legs are let go without a decode.
    fn conclude_early(
        &mut self,
        (request, attempt): (RequestId, u32),
        legs: [Option<InstanceId>; 2],
        core: &mut impl Core,
        effects: &mut Vec<Effect>,
    ) {
        let Some(pair) = self.pairs.get(&request) else { return };
        debug_assert!(pair.is_answered() && pair.attempt == attempt, "{request} went on: {pair:?}");
        if legs[0] != legs[1] {
            self.feed(Input::HandoffFinished { request }, core, effects);
        }
        // A node that had nothing to hand off has let go by itself.
        if let [Some(prefill), Some(decode)] = legs
            && prefill != decode
        {
            effects.extend([prefill, decode].map(|instance| Effect::Release { request, attempt, instance }));
        }
        self.conclude((request, 0), core, effects);
    }

    fn landed(&mut self, request: RequestId, core: &mut impl Core, effects: &mut Vec<Effect>) {
        let Some(pair) = self.pairs.get_mut(&request) else { return };
        for leg in pair.legs().into_iter().flatten() {
            self.paces.entry(leg).or_default().handed += 1;
        }
        pair.lands_early();
        if let Stage::HandingOff(_) = pair.stage {
            self.feed(Input::HandoffFinished { request }, core, effects);
        }
    }

    fn offered(&mut self, request: RequestId) -> FactOutcome {
        let Some(pair) = self.pairs.get_mut(&request) else { return FactOutcome::Stale };
        if pair.has_landed_early() {
            return FactOutcome::Stale;
        }
        pair.lands_early();
        FactOutcome::Yes
    }

    fn leg_failed(
        &mut self,
        (request, instance): (RequestId, InstanceId),
        failure: Failure,
        core: &mut impl Core,
        effects: &mut Vec<Effect>,
    ) {
        let failure = match failure {
            Failure::Busy { .. } if self.was_refused_for_long(request) => Failure::Other,
            failure => failure,
        };
        let Some(pair) = self.pairs.get(&request) else { return };
        let emitted_tokens = pair.emitted_tokens;
        let [prefill, decode] = pair.legs();
        let on_decode = decode == Some(instance) && prefill != Some(instance);
        let input = match (failure, &pair.stage) {
            // The driver answers the client, and cancels.
            (Failure::OfRequest, _) => return,
            (Failure::Engine { cut_off, gone }, _) => {
                return self.engine_broke((request, instance), (cut_off, gone), core, effects);
            }
            (Failure::Busy { us: busy_us }, _) => {
                Input::LegRefused { request, instance, emitted_tokens, busy_us }
            }
            // Nothing went wrong: it waits for room.
            (Failure::Preempted, _) => Input::Preempted { request, emitted_tokens },
            (Failure::Other, Stage::Decoding(_)) => Input::DecodeFailed { request, emitted_tokens },
            (Failure::Other, _) if on_decode => Input::HandoffFailed { request },
            // The KV is not there, or has left.
            (Failure::Other, _) => Input::PrefillFailed { request },
        };
        effects.push(Effect::Blame { request, cause: Cause::Leg });
        self.feed(input, core, effects);
    }

    /// Whether engines have refused a request for longer than it may wait in the conductor's queue.
    fn was_refused_for_long(&mut self, request: RequestId) -> bool {
        let now_us = self.now_us;
        let Some(pair) = self.pairs.get_mut(&request) else { return false };
        let since_us = *pair.refused_since_us.get_or_insert(now_us);
        now_us - since_us > self.config.queue_stage_us(pair)
    }

    /// A life of an instance is over: all requests that it held move elsewhere. `died` if that was in the middle of
    /// its work.
    pub fn lost(
        &mut self,
        now_us: u64,
        (instance, epoch, died): (InstanceId, Epoch, bool),
        core: &mut impl Core,
        effects: &mut Vec<Effect>,
    ) {
        self.now_us = now_us;
        self.paces.remove(&instance);
        let here = self.pairs.iter().filter(|(_, pair)| pair.legs().contains(&Some(instance)));
        let requests: Vec<RequestId> = here.map(|(request, _)| *request).collect();
        for request in &requests {
            self.end_if_answered(*request, core, effects);
        }
        if died {
            self.suspect_all(instance, &requests, core, effects);
        }
        let mut emitted = Vec::new();
        for request in requests {
            let Some(pair) = self.pairs.get(&request) else { continue };
            let [prefill, decode] = pair.legs().map(|leg| leg == Some(instance));
            if !prefill && !decode {
                continue;
            }
            let decodes = matches!(pair.stage, Stage::Decoding(_));
            let cause = if decodes && !decode { Cause::LostBehind } else { Cause::Lost };
            effects.push(Effect::Blame { request, cause });
            if decodes && decode {
                emitted.push((request, pair.emitted_tokens));
            }
        }
        for (request, emitted_tokens) in emitted {
            self.feed(Input::TokensEmitted { request, emitted_tokens }, core, effects);
        }
        self.feed(Input::InstanceLost { instance, epoch }, core, effects);
    }
}
