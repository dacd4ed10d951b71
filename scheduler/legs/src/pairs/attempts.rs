//! The states of a request, and how the conductor's orders change them.

use alloc::vec::Vec;

use baton_scheduler::{FailStage, Input, RejectReason, Rejection};
use baton_types::{ClassId, FetchPlan, InstanceId, RequestId};

use super::progress::{Pace, StageProgress};
use super::{Arrival, Core, Effect, Pairs};

/// Where a request is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// Sent nowhere.
    Waiting,
    /// Sent to its prefill instance.
    Prefilling,
    /// Prefilled; KV is on the way to its decode instance.
    HandingOff,
    /// The decode instance generates tokens.
    Decoding,
}

impl Phase {
    /// The word in errors, metrics and on the admin page.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Waiting => "queue",
            Self::Prefilling => "prefill",
            Self::HandingOff => "handoff",
            Self::Decoding => "decode",
        }
    }

    /// The word where its time was over.
    #[must_use]
    pub const fn timeout(self) -> &'static str {
        match self {
            Self::Waiting => "queue_timeout",
            Self::Prefilling => "prefill_timeout",
            Self::HandingOff => "handoff_timeout",
            Self::Decoding => "decode_timeout",
        }
    }
}

/// The state of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Its client was promised nothing: it has just come, or nothing could take it so far.
    Unpromised,
    /// The conductor holds it back.
    Queued,
    /// Nothing can take it right now. The conductor does not know it, or was asked again and holds it back.
    Parked,
    /// Sent to its prefill instance.
    Prefilling(PrefillStage),
    /// The client has all of its answer, and the prefill is not over yet: both legs are let go then.
    Answered(AttemptLegs),
    /// Prefilled; KV is on the way.
    HandingOff(HandoffStage),
    /// The decode instance generates tokens.
    Decoding(DecodeStage),
}

/// The legs of an attempt. A leg that was let go is none, and so is the decode leg where the prefill draws all that is
/// left of the answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AttemptLegs {
    pub(super) prefill: Option<InstanceId>,
    pub(super) decode: Option<InstanceId>,
}

/// See [`Stage::Prefilling`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefillStage {
    pub(super) legs: AttemptLegs,
    pub(super) turn: StageProgress,
    /// The hand-off was acknowledged before the prefill's own report came.
    pub(super) landed: bool,
}

/// See [`Stage::HandingOff`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HandoffStage {
    pub(super) legs: AttemptLegs,
    pub(super) turn: StageProgress,
    /// When it began, µs.
    pub(super) since_us: u64,
}

/// See [`Stage::Decoding`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecodeStage {
    pub(super) legs: AttemptLegs,
    /// When it was ordered, µs.
    pub(super) since_us: u64,
}

/// A placement, as the conductor ordered it.
pub(super) struct PlacementOrder {
    pub instance: InstanceId,
    pub decode: InstanceId,
    pub fetch: Option<FetchPlan>,
    pub room_tokens: u32,
    pub order: u64,
}

/// A request under way.
#[derive(Clone, Debug)]
pub struct Pair {
    pub(super) class: ClassId,
    pub(super) time_limit_us: u64,
    pub(super) asked_tokens: u32,
    /// Tokens that the client has.
    pub(super) emitted_tokens: u32,
    /// Counts placements and hand-offs; facts about an earlier one are out of date.
    pub(super) attempt: u32,
    /// Answer tokens with which it was last prefilled.
    pub(super) given_tokens: u32,
    /// Tokens that the client had with the first of this attempt, and when it came, µs.
    pub(super) first_drawn: (u32, u64),
    pub(super) room_tokens: u32,
    moves: u32,
    /// Predicted time to its first token when it was last placed, µs.
    pub(super) foreseen_us: u64,
    /// Hand-offs that failed, and the attempt of the latest.
    pub(super) failed_handoffs: (u32, u32),
    /// Engines that died while it was in them.
    pub(super) deaths: u32,
    /// It was once in an engine that died with another in it that was on trial: that death was the other's.
    pub(super) spared: bool,
    pub(super) stage: Stage,
    /// When the present stage is given up, µs.
    pub(super) deadline_us: u64,
}

impl Pair {
    pub(super) const fn new(arrival: &Arrival) -> Self {
        Self {
            class: arrival.class,
            time_limit_us: arrival.time_limit_us,
            asked_tokens: arrival.asked_tokens,
            emitted_tokens: 0,
            attempt: 0,
            given_tokens: 0,
            first_drawn: (0, 0),
            room_tokens: 0,
            moves: 0,
            foreseen_us: 0,
            failed_handoffs: (0, 0),
            deaths: 0,
            spared: false,
            stage: Stage::Unpromised,
            deadline_us: 0,
        }
    }

    /// Its state.
    #[must_use]
    pub const fn stage(&self) -> &Stage {
        &self.stage
    }

    /// Where it is.
    #[must_use]
    pub const fn phase(&self) -> Phase {
        match self.stage {
            Stage::Unpromised | Stage::Queued | Stage::Parked => Phase::Waiting,
            Stage::Prefilling(_) | Stage::Answered(_) => Phase::Prefilling,
            Stage::HandingOff(_) => Phase::HandingOff,
            Stage::Decoding(_) => Phase::Decoding,
        }
    }

    /// Placements and hand-offs so far.
    #[must_use]
    pub const fn attempt(&self) -> u32 {
        self.attempt
    }

    /// Times that it went on elsewhere in the middle of its answer.
    #[must_use]
    pub const fn moves(&self) -> u32 {
        self.moves
    }

    /// Where it is prefilled, and where it is decoded; none for a leg that it does not have.
    #[must_use]
    pub const fn legs(&self) -> [Option<InstanceId>; 2] {
        let both = self.both();
        [both.prefill, both.decode]
    }

    pub(super) const fn both(&self) -> AttemptLegs {
        match self.stage {
            Stage::Unpromised | Stage::Queued | Stage::Parked => AttemptLegs { prefill: None, decode: None },
            Stage::Answered(legs)
            | Stage::Prefilling(PrefillStage { legs, .. })
            | Stage::HandingOff(HandoffStage { legs, .. })
            | Stage::Decoding(DecodeStage { legs, .. }) => legs,
        }
    }

    /// Whether its client has all of its answer, and its legs have not been let go yet.
    #[must_use]
    pub const fn is_answered(&self) -> bool {
        matches!(self.stage, Stage::Answered(_))
    }

    /// Whether its hand-off failed and is tried again after a pause.
    #[must_use]
    pub const fn retries_handoff(&self) -> bool {
        let (failed, latest) = self.failed_handoffs;
        failed > 1
            && latest == self.attempt
            && matches!(self.stage, Stage::Prefilling(_) | Stage::HandingOff(_))
    }

    /// Whether an instance works on it, as far as is known here.
    pub(super) fn is_in(&self, instance: InstanceId) -> bool {
        match &self.stage {
            Stage::Prefilling(prefilling) => prefilling.legs.prefill == Some(instance),
            Stage::Decoding(decoding) => decoding.legs.decode == Some(instance),
            Stage::Unpromised | Stage::Queued | Stage::Parked | Stage::Answered(_) | Stage::HandingOff(_) => {
                false
            }
        }
    }
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
        debug_assert_eq!(pair.both(), AttemptLegs::default(), "{request} is sent while it has legs");
        debug_assert!(!self.parked.contains(&request), "{request} is sent, and would be asked for again");
        let PlacementOrder { instance, decode, fetch, room_tokens, order } = sent;
        // A prefill that draws the last token of the answer needs no decode leg, and no KV has to move.
        let left_tokens = pair.asked_tokens.saturating_sub(pair.emitted_tokens);
        let goes_on = left_tokens > 1 || decode == instance || core.moves_kv(decode);
        let decode = goes_on.then_some(decode);
        let legs = AttemptLegs { prefill: Some(instance), decode };
        let turn = StageProgress::new(self.prefilled_by(legs));
        let Some(pair) = self.pairs.get_mut(&request) else { return };
        pair.attempt += 1;
        pair.moves += u32::from(pair.attempt > 1 && pair.emitted_tokens > 0);
        pair.foreseen_us = foreseen_us.unwrap_or(pair.foreseen_us);
        (pair.given_tokens, pair.room_tokens) = (pair.emitted_tokens, room_tokens);
        pair.first_drawn = (pair.emitted_tokens, now_us);
        pair.stage = Stage::Prefilling(PrefillStage { legs, turn, landed: false });
        let (attempt, given_tokens) = (pair.attempt, pair.given_tokens);
        let stage_us = self.config.prefill_stage_us(pair);
        self.set_deadline(request, now_us + stage_us);
        self.entered(request, effects);
        effects.push(Effect::Prefill {
            request,
            attempt,
            instance,
            decode: decode.unwrap_or(instance),
            fetch,
            room_tokens: if goes_on { room_tokens } else { 0 },
            order,
            given_tokens,
        });
        if let Some(instance) = decode.filter(|to| *to != instance) {
            effects.push(Effect::Expect { request, attempt, instance, room_tokens, given_tokens });
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
        debug_assert_eq!(pair.both().decode, Some(instance), "{request} decodes where it has no leg");
        pair.stage = Stage::Decoding(DecodeStage { legs: pair.both(), since_us: now_us });
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
        let holder = AttemptLegs { prefill: Some(from), decode: None };
        debug_assert_eq!(pair.both(), holder, "{request} is handed off with another leg, or without KV");
        debug_assert!(!pair.is_answered(), "{request} is handed off for nobody");
        let legs = AttemptLegs { decode: Some(to), ..pair.both() };
        let turn = StageProgress::new(self.handed_by(legs));
        let Some(pair) = self.pairs.get_mut(&request) else { return };
        pair.attempt += 1;
        pair.room_tokens = room_tokens;
        pair.stage = Stage::HandingOff(HandoffStage { legs, turn, since_us: self.now_us });
        let (attempt, given_tokens) = (pair.attempt, pair.given_tokens);
        let stage_us = self.config.handoff_stage_us(pair);
        self.set_deadline(request, self.now_us + stage_us);
        self.entered(request, effects);
        effects.push(Effect::Expect { request, attempt, instance: to, room_tokens, given_tokens });
        effects.push(Effect::Handoff { request, attempt, from, to });
    }

    /// The prefill is over; its KV may be on the way still.
    pub(super) fn prefill_is_over(
        &mut self,
        request: RequestId,
        legs: AttemptLegs,
        effects: &mut Vec<Effect>,
    ) {
        let turn = StageProgress::new(self.handed_by(legs));
        let Some(pair) = self.pairs.get_mut(&request) else { return };
        debug_assert!(matches!(pair.stage, Stage::Prefilling(_)), "{request} was not prefilling: {pair:?}");
        pair.stage = Stage::HandingOff(HandoffStage { legs, turn, since_us: self.now_us });
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
        let (decodes, answered) = (pair.phase() == Phase::Decoding, pair.is_answered());
        let legs = match &mut pair.stage {
            Stage::Unpromised | Stage::Queued | Stage::Parked => return,
            Stage::Answered(legs)
            | Stage::Prefilling(PrefillStage { legs, .. })
            | Stage::HandingOff(HandoffStage { legs, .. })
            | Stage::Decoding(DecodeStage { legs, .. }) => legs,
        };
        if decodes || legs.prefill == Some(instance) {
            legs.prefill = None;
        }
        if legs.decode == Some(instance) {
            legs.decode = None;
        }
        if *legs == AttemptLegs::default() && !answered {
            pair.stage = Stage::Queued;
            let stage_us = self.config.queue_stage_us(pair.class);
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
    fn done_by(&self, legs: AttemptLegs, count: fn(&Pace) -> u64) -> u64 {
        [legs.prefill, legs.decode].iter().flatten().filter_map(|leg| self.paces.get(leg)).map(count).sum()
    }

    pub(super) fn prefilled_by(&self, legs: AttemptLegs) -> u64 {
        self.done_by(legs, |pace| pace.prefilled)
    }

    pub(super) fn handed_by(&self, legs: AttemptLegs) -> u64 {
        self.done_by(legs, |pace| pace.handed + pace.answered)
    }

    pub(super) fn rejected(&mut self, rejection: Rejection, core: &impl Core, effects: &mut Vec<Effect>) {
        // A request that was sent somewhere is not refused for what happened to its instances since; a
        // policy that looks again after the prefill means it.
        let lacks_pair = rejection.reason == RejectReason::NoInstance && !core.can_serve();
        let waits = |pair: &Pair| pair.attempt > 0 || pair.stage == Stage::Parked || lacks_pair;
        let waits = self.pairs.get(&rejection.request).is_some_and(waits);
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
        let answered = self.pairs.get(&rejection.request).is_some_and(Pair::is_answered);
        if !self.end(rejection.request) {
            return;
        }
        if answered {
            effects.push(Effect::Ended { request: rejection.request });
            return;
        }
        effects.push(Effect::Refuse(rejection));
    }

    pub(super) fn failed(
        &mut self,
        request: RequestId,
        stage: FailStage,
        core: &impl Core,
        effects: &mut Vec<Effect>,
    ) {
        let promised = self.pairs.get(&request).is_some_and(|pair| pair.stage != Stage::Unpromised);
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
