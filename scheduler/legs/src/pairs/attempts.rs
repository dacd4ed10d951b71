//! How the conductor's orders change the states of requests.

use alloc::vec::Vec;

use baton_scheduler::{FailStage, Input, RejectReason, Rejection};
use baton_types::{FetchPlan, InstanceId, RequestId};

use super::progress::{Pace, StageProgress};
use super::stage::{AttemptLegs, AttemptTokens};
use super::{Core, Effect, Pair, Pairs, Phase, PrefillOrder, Stage, WaitingStage};

/// A placement, as the conductor ordered it.
pub(super) struct PlacementOrder {
    pub instance: InstanceId,
    pub decode: InstanceId,
    pub fetch: Option<FetchPlan>,
    pub room_tokens: u32,
    pub order: u64,
}

impl Pairs {
    pub(super) fn start_prefill(
        &mut self,
        request: RequestId,
        sent: PlacementOrder,
        core: &impl Core,
        effects: &mut Vec<Effect>,
    ) {
        let now_us = self.now_us;
        let foreseen_us = core.decodes_at_us(request).map(|at_us| at_us.saturating_sub(now_us));
        let Some(pair) = self.pairs.get(&request) else { return };
        if pair.is_answered() {
            self.pending.push_back(Input::RequestCancelled { request });
            self.end(request);
            effects.push(Effect::Ended { request });
            return;
        }
        if pair.phase() != Phase::Waiting {
            return debug_assert!(false, "{request} is sent while it has legs: {pair:?}");
        }
        debug_assert!(!self.parked.contains(&request), "{request} is sent, and would be asked for again");
        let PlacementOrder { instance, decode, fetch, room_tokens, order } = sent;
        // A prefill that draws the last token of the answer needs no decode leg, and no KV has to move.
        let left_tokens = pair.asked_tokens.saturating_sub(pair.emitted_tokens);
        let goes_on = left_tokens > 1 || decode == instance || core.moves_kv(decode);
        let (both, alone) = (AttemptLegs::Both { prefill: instance, decode }, AttemptLegs::Prefill(instance));
        let legs = if goes_on { both } else { alone };
        let turn = StageProgress::new(self.prefilled_by(legs.instances()));
        let Some(pair) = self.pairs.get_mut(&request) else { return };
        pair.attempt += 1;
        pair.moves += u32::from(pair.attempt > 1 && pair.emitted_tokens > 0);
        pair.foreseen_us = foreseen_us.unwrap_or(pair.foreseen_us);
        let (attempt, given_tokens) = (pair.attempt, pair.emitted_tokens);
        let tokens = AttemptTokens { given: given_tokens, first_us: 0, room: room_tokens };
        pair.if_waiting(|waiting| Stage::Prefilling(waiting.sent(legs, tokens, turn)));
        let stage_us = self.config.prefill_stage_us(pair);
        self.set_deadline(request, now_us + stage_us);
        self.entered(request, effects);
        effects.push(Effect::Prefill(PrefillOrder {
            request,
            attempt,
            instance,
            decode: if goes_on { decode } else { instance },
            fetch,
            room_tokens: if goes_on { room_tokens } else { 0 },
            order,
            given_tokens,
        }));
        if goes_on && decode != instance {
            effects.push(Effect::Expect { request, attempt, instance: decode, room_tokens, given_tokens });
        }
    }

    pub(super) fn start_decode(
        &mut self,
        request: RequestId,
        instance: InstanceId,
        effects: &mut Vec<Effect>,
    ) {
        let now_us = self.now_us;
        let Some(pair) = self.pairs.get_mut(&request).filter(|pair| !pair.is_answered()) else { return };
        if pair.phase() != Phase::HandingOff {
            return debug_assert!(false, "{request} decodes without a hand-off: {pair:?}");
        }
        pair.if_handing_off(|handing_off| Stage::Decoding(handing_off.landed(instance, now_us)));
        let (attempt, stage_us) = (pair.attempt, self.config.token_stage_us(pair.class));
        self.set_deadline(request, now_us + stage_us);
        self.entered(request, effects);
        effects.push(Effect::Decode { request, attempt, instance });
    }

    pub(super) fn hand_off(
        &mut self,
        request: RequestId,
        (from, to): (InstanceId, InstanceId),
        room_tokens: u32,
        effects: &mut Vec<Effect>,
    ) {
        let Some(pair) = self.pairs.get(&request) else { return };
        if pair.phase() != Phase::HandingOff {
            return debug_assert!(false, "{request} is handed off before its KV is complete: {pair:?}");
        }
        let (turn, now_us) = (StageProgress::new(self.handed_by([Some(from), Some(to)])), self.now_us);
        let Some(pair) = self.pairs.get_mut(&request) else { return };
        pair.attempt += 1;
        pair.if_handing_off(|at| Stage::HandingOff(at.handed_off((from, to), room_tokens, turn, now_us)));
        let given_tokens = pair.stage.tokens_mut().map_or(0, |tokens| tokens.given);
        let attempt = pair.attempt;
        let stage_us = self.config.handoff_stage_us(pair);
        self.set_deadline(request, self.now_us + stage_us);
        self.entered(request, effects);
        effects.push(Effect::Expect { request, attempt, instance: to, room_tokens, given_tokens });
        effects.push(Effect::Handoff { request, attempt, from, to });
    }

    /// The prefill is over; its KV may be on the way still.
    pub(super) fn prefill_is_over(&mut self, request: RequestId, effects: &mut Vec<Effect>) {
        let Some(pair) = self.pairs.get(&request) else { return };
        let (turn, now_us) = (StageProgress::new(self.handed_by(pair.legs())), self.now_us);
        let Some(pair) = self.pairs.get_mut(&request) else { return };
        pair.if_prefilling(|prefilling| Stage::HandingOff(prefilling.prefilled(turn, now_us)));
        let stage_us = self.config.handoff_stage_us(pair);
        self.set_deadline(request, self.now_us + stage_us);
        self.entered(request, effects);
    }

    pub(super) fn release(&mut self, request: RequestId, instance: InstanceId, effects: &mut Vec<Effect>) {
        let pair = self.pairs.get(&request);
        if pair.is_none_or(|pair| pair.legs().contains(&Some(instance))) {
            let attempt = pair.map_or(0, |pair| pair.attempt);
            effects.push(Effect::Release { request, attempt, instance });
            self.leg_is_over(request, instance, effects);
        }
    }

    /// Nothing more is believed of a leg that was let go. Without any, the request waits again.
    fn leg_is_over(&mut self, request: RequestId, instance: InstanceId, effects: &mut Vec<Effect>) {
        let Some(pair) = self.pairs.get_mut(&request) else { return };
        let sent = pair.phase() != Phase::Waiting;
        pair.advance(|stage| stage.without(instance));
        if sent && pair.phase() == Phase::Waiting {
            let stage_us = self.config.queue_stage_us(pair);
            self.set_deadline(request, self.now_us + stage_us);
            self.entered(request, effects);
        }
    }

    pub(super) fn entered(&self, request: RequestId, effects: &mut Vec<Effect>) {
        let Some(pair) = self.pairs.get(&request) else { return };
        let phase = pair.phase();
        let attempt = pair.attempt + u32::from(phase == Phase::Waiting);
        effects.push(Effect::Entered { request, phase, attempt, legs: pair.legs() });
    }

    /// The summed progress of both legs' instances.
    fn done_by(&self, legs: [Option<InstanceId>; 2], count: fn(&Pace) -> u64) -> u64 {
        legs.iter().flatten().filter_map(|leg| self.paces.get(leg)).map(count).sum()
    }

    pub(super) fn prefilled_by(&self, legs: [Option<InstanceId>; 2]) -> u64 {
        self.done_by(legs, |pace| pace.prefilled)
    }

    pub(super) fn handed_by(&self, legs: [Option<InstanceId>; 2]) -> u64 {
        self.done_by(legs, |pace| pace.handed + pace.answered)
    }

    pub(super) fn rejected(&mut self, rejection: Rejection, core: &impl Core, effects: &mut Vec<Effect>) {
        // A request that was sent somewhere is not refused for what happened to its instances since; a
        // policy that looks again after the prefill means it.
        let lacks_pair = rejection.reason == RejectReason::NoInstance && !core.can_serve();
        let waits = |pair: &Pair| {
            pair.attempt > 0 || pair.stage == Stage::Waiting(WaitingStage::Parked) || lacks_pair
        };
        // What its answer has become fits nowhere: that no wait will cure, unless a larger instance comes back.
        let outgrown = rejection.reason == RejectReason::TooLong && !self.may_come_back();
        let waits = !outgrown && self.pairs.get(&rejection.request).is_some_and(waits);
        if waits && rejection.wasted_tokens == 0 && self.park(rejection.request, core, effects) {
            return;
        }
        self.refuse(rejection, effects);
    }

    /// Refuses a request that waited for a pair of instances: none came back.
    pub(super) fn refuse_unserved(&mut self, request: RequestId, effects: &mut Vec<Effect>) {
        let rejection = Rejection {
            request,
            reason: RejectReason::NoInstance,
            retry_after_us: 1_000_000,
            predicted_ttft_us: None,
            wasted_tokens: 0,
        };
        self.refuse(rejection, effects);
    }

    fn refuse(&mut self, rejection: Rejection, effects: &mut Vec<Effect>) {
        let request = rejection.request;
        let Some(pair) = self.pairs.get(&request) else { return };
        effects.push(match pair.emitted_tokens {
            _ if pair.is_answered() => Effect::Ended { request },
            0 => Effect::Refuse(rejection),
            _ => Effect::CutShort(rejection),
        });
        self.end(request);
    }

    pub(super) fn failed(
        &mut self,
        request: RequestId,
        stage: FailStage,
        core: &impl Core,
        effects: &mut Vec<Effect>,
    ) {
        let promised = self.pairs.get(&request).is_some_and(|pair| !pair.is_unpromised());
        if stage == FailStage::NoPlacement {
            if promised && self.park(request, core, effects) {
                return;
            }
            if !core.can_serve() {
                return self.refuse_unserved(request, effects);
            }
        }
        let attempts = self.pairs.get(&request).map_or(0, |pair| pair.attempt);
        if self.end(request) {
            effects.push(Effect::Fail { request, stage, attempts });
        }
    }
}
