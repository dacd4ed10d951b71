//! Waiting requests and their limits: each stage of a request has a time at which the core gives it up. The core
//! retries an admitted request that fits nowhere right now.

use alloc::collections::BTreeSet;
use alloc::vec::Vec;

use baton_scheduler::Input;
use baton_types::{InstanceId, RequestId};

use super::{Cause, Core, Effect, Pair, Pairs, PairsConfig, Phase, Stage, WaitingStage};

/// How often requests that nothing could take are tried again, µs.
pub(super) const TRY_EVERY_US: u64 = 50_000;
/// How long requests, both those in progress and new ones, wait for a pair of instances after the last one was lost,
/// µs. A restarted node, or one whose connection broke, is back within this; a server that loads a model is not.
const PAIR_BACK_WITHIN_US: u64 = 5_000_000;
/// Placements and hand-offs of one request at most (I9).
pub(super) const MAX_ATTEMPTS: u32 = 32;
/// The first back-off of a request's failed hand-offs, µs. It doubles with each further failure.
const HANDOFF_BACKOFF_US: u64 = 100_000;

impl Pairs {
    /// Retries a failed hand-off: at once the first time, after a back-off each further time. The back-off gives
    /// the conductor time to detect that an instance has died, before the request has spent all attempts on it.
    pub(super) fn handoff_failed(
        &mut self,
        request: RequestId,
        core: &mut impl Core,
        effects: &mut Vec<Effect>,
    ) {
        let Some(pair) = self.pairs.get_mut(&request) else { return };
        let (count, latest) = pair.failed_handoffs;
        debug_assert!(latest <= pair.attempt, "an attempt of {request} failed that was never made");
        if latest == pair.attempt {
            // Both legs say so.
            return;
        }
        pair.failed_handoffs = (count + 1, pair.attempt);
        if count == 0 {
            return self.feed(Input::HandoffFailed { request }, core, effects);
        }
        let backoff_us = HANDOFF_BACKOFF_US << (count - 1).min(4);
        self.again.insert((self.now_us + backoff_us, request, pair.attempt));
    }

    fn retry_handoffs(&mut self, core: &mut impl Core, effects: &mut Vec<Effect>) {
        while let Some(&(at_us, request, attempt)) = self.again.first().filter(|(at, ..)| *at <= self.now_us)
        {
            self.again.remove(&(at_us, request, attempt));
            let open = |pair: &Pair| {
                pair.attempt == attempt
                    && !pair.is_answered()
                    && matches!(pair.stage, Stage::Prefilling(_) | Stage::HandingOff(_))
            };
            let later = self.pairs.get(&request).is_none_or(|pair| pair.attempt >= attempt);
            debug_assert!(later, "attempts of {request} went back");
            if self.pairs.get(&request).is_some_and(open) {
                self.feed(Input::HandoffFailed { request }, core, effects);
            }
        }
    }

    /// Notes whether there is a pair of instances after a step of the conductor; in it, an instance may have been
    /// `lost`. No pair that an operator took away by draining is waited for, only one whose instance went.
    pub(super) fn note_service(&mut self, lost: bool, core: &impl Core) {
        if lost {
            self.lost_us = Some(self.now_us);
        }
        if core.can_serve() {
            self.unserved_since_us = None;
        } else if lost {
            self.unserved_since_us.get_or_insert(self.now_us);
        }
    }

    /// Whether the last pair was lost so lately that its nodes may be about to come back.
    fn may_be_served(&self) -> bool {
        self.is_recent(self.unserved_since_us)
    }

    /// Whether an instance was lost so lately that it may be about to come back.
    pub(super) fn may_come_back(&self) -> bool {
        self.is_recent(self.lost_us)
    }

    fn is_recent(&self, at_us: Option<u64>) -> bool {
        at_us.is_some_and(|at_us| self.now_us < at_us + PAIR_BACK_WITHIN_US)
    }

    /// A request that nothing can take right now waits for its stage's time. False: it has waited for too long, or
    /// there is no pair of instances, and none is expected back.
    pub(super) fn park(&mut self, request: RequestId, core: &impl Core, effects: &mut Vec<Effect>) -> bool {
        let waits = |pair: &Pair| !pair.is_answered() && pair.attempt < MAX_ATTEMPTS;
        let parks = self.pairs.get(&request).is_some_and(waits) && (core.can_serve() || self.may_be_served());
        if parks {
            self.hold(request, effects);
        }
        parks
    }

    /// Keeps a request that the conductor does not know, until it is tried again.
    pub(super) fn hold(&mut self, request: RequestId, effects: &mut Vec<Effect>) {
        // One that is parked again from its trial comes in its turn.
        self.on_trial.remove(&request);
        let Some(pair) = self.pairs.get_mut(&request) else { return };
        if pair.phase() != Phase::Waiting {
            return debug_assert!(false, "{request} is parked with its legs: {pair:?}");
        }
        if pair.stage == Stage::Waiting(WaitingStage::Queued) {
            pair.if_waiting(|waiting| Stage::Waiting(waiting.parked()));
            let wait_us = self.config.parked_stage_us(pair);
            self.set_deadline(request, self.now_us + wait_us);
            self.entered(request, effects);
        }
        self.parked.insert(request);
    }

    /// Tries parked requests again.
    pub fn try_parked(&mut self, now_us: u64, core: &mut impl Core, effects: &mut Vec<Effect>) {
        self.now_us = now_us;
        if self.parked.is_empty() || now_us < self.try_at_us {
            return;
        }
        self.try_at_us = now_us + TRY_EVERY_US;
        for request in core::mem::take(&mut self.parked) {
            if self.goes_on_trial(request, core) {
                self.submit(request, core, effects);
            } else {
                self.parked.insert(request);
            }
        }
        let sent = |request| self.pairs.get(request).is_none_or(|pair| pair.phase() != Phase::Waiting);
        debug_assert!(!self.parked.iter().any(sent), "what waits is sent nowhere: {:?}", self.parked);
    }

    /// When there is something to do at the latest, µs, unless an input comes before.
    #[must_use]
    pub fn next_deadline(&self) -> Option<u64> {
        let stage_us = self.deadlines.first().map(|(at_us, _)| *at_us);
        let again_us = self.again.first().map(|(at_us, ..)| *at_us);
        let tried_us = (!self.parked.is_empty()).then_some(self.try_at_us);
        [stage_us, again_us, tried_us].into_iter().flatten().min()
    }

    /// Gives the present stage of a request until `at_us`, or until its client's time limit ends.
    pub(super) fn set_deadline(&mut self, request: RequestId, at_us: u64) {
        let Some(pair) = self.pairs.get_mut(&request) else { return };
        let had = self.deadlines.remove(&(pair.deadline_us, request));
        debug_assert!(had || pair.deadline_us == 0, "{request} had no time");
        pair.deadline_us = at_us.min(pair.time_limit_us);
        self.deadlines.insert((pair.deadline_us, request));
    }

    /// The driver was itself away for `pause_us`: no stage took that time. Clients' own limits go on.
    pub fn excuse(&mut self, now_us: u64, pause_us: u64) {
        self.back_us = now_us;
        self.unserved_since_us = self.unserved_since_us.map(|at_us| at_us + pause_us);
        self.lost_us = self.lost_us.map(|at_us| at_us + pause_us);
        let again = core::mem::take(&mut self.again);
        self.again = again.into_iter().map(|(at_us, r, attempt)| (at_us + pause_us, r, attempt)).collect();
        let mut deadlines = BTreeSet::new();
        for (request, pair) in &mut self.pairs {
            let later_us = pair.deadline_us.saturating_add(pause_us).min(pair.time_limit_us);
            pair.deadline_us = pair.deadline_us.max(later_us);
            deadlines.insert((pair.deadline_us, *request));
        }
        debug_assert_eq!(deadlines.len(), self.deadlines.len(), "each has its time, before and after");
        self.deadlines = deadlines;
    }

    /// Ends stages whose time is over.
    pub fn expire(&mut self, now_us: u64, core: &mut impl Core, effects: &mut Vec<Effect>) {
        self.now_us = now_us;
        self.retry_handoffs(core, effects);
        while let Some(&(at_us, request)) = self.deadlines.first().filter(|(at_us, _)| *at_us <= now_us) {
            self.stage_expired(request, core, effects);
            debug_assert!(!self.deadlines.contains(&(at_us, request)), "{request} is late for ever");
        }
    }

    fn stage_expired(&mut self, request: RequestId, core: &mut impl Core, effects: &mut Vec<Effect>) {
        if let Some(until_us) = self.has_time_until_us(request, core) {
            return self.set_deadline(request, until_us);
        }
        if self.end_if_answered(request, core, effects) {
            return;
        }
        let now_us = self.now_us;
        let Some(pair) = self.pairs.get(&request) else { return };
        let (phase, emitted_tokens, impatient) =
            (pair.phase(), pair.emitted_tokens, pair.time_limit_us <= now_us);
        effects.push(Effect::Late { request, attempt: pair.attempt, phase });
        let lacks_pair = pair.is_unpromised() || (!impatient && !core.can_serve());
        let input = match phase {
            Phase::Waiting if lacks_pair => {
                if !self.parked.contains(&request) {
                    // The conductor holds it back, and would send it to the next instances that come.
                    self.feed(Input::RequestCancelled { request }, core, effects);
                }
                return self.refuse_unserved(request, effects);
            }
            Phase::Waiting => return self.give_up(request, impatient, core, effects),
            _ if impatient => return self.give_up(request, true, core, effects),
            Phase::Prefilling => Input::PrefillFailed { request },
            Phase::HandingOff => Input::HandoffFailed { request },
            Phase::Decoding => Input::DecodeFailed { request, emitted_tokens },
        };
        effects.push(Effect::Blame { request, cause: Cause::Late(phase) });
        self.feed(input, core, effects);
        // After any decision of the conductor, each request has a time at which something happens.
        if self.pairs.get(&request).is_some_and(|pair| pair.deadline_us <= now_us) {
            self.give_up(request, false, core, effects);
        }
    }

    /// Until when a stage whose time is over may go on all the same, µs: its tokens come, or its instances get on
    /// with what is ahead of it.
    fn has_time_until_us(&mut self, request: RequestId, core: &impl Core) -> Option<u64> {
        let (now_us, live, back_us) = (self.now_us, self.pairs.len() as u64, self.back_us);
        let pair = self.pairs.get(&request)?;
        if pair.is_answered() {
            return None;
        }
        let (time_limit_us, legs) = (pair.time_limit_us, pair.legs());
        if let Stage::Decoding(decoding) = &pair.stage {
            // Tokens since then have moved the deadline without touching the queue.
            let since_us = core.last_token_us(request).max(decoding.since_us()).max(back_us);
            let due_us = since_us + self.config.token_stage_us(pair.class);
            return (due_us.min(time_limit_us) > now_us).then_some(due_us);
        }
        if time_limit_us <= now_us {
            return None;
        }
        if let Stage::HandingOff(handing_off) = &pair.stage {
            let limit_us = self.config.slack(self.handoff_us(request, legs, core));
            let due_us = handing_off.since_us().saturating_add(limit_us);
            if due_us > now_us {
                return Some(due_us);
            }
        }
        let prefills = matches!(pair.stage, Stage::Prefilling(_));
        let turn = *self.pairs.get_mut(&request)?.stage.turn_mut()?;
        let done = if prefills { self.prefilled_by(legs) } else { self.handed_by(legs) };
        let waits = |at| (prefills && self.holds_back(at)) || self.decodes_on(at, core);
        let others = !turn.gets_on(done) && legs[usize::from(!prefills)].is_some_and(waits);
        let pair = self.pairs.get_mut(&request)?;
        let to_come = pair.stage.turn_mut()?.is_to_come(done, others, live);
        let limit_us = if prefills { PairsConfig::prefill_stage_us } else { PairsConfig::handoff_stage_us };
        let stage_us = limit_us(&self.config, pair);
        to_come.then_some(now_us + stage_us)
    }

    /// How long the KV of a request takes to its decode instance beside all others that use its links, µs.
    fn handoff_us(&self, request: RequestId, legs: [Option<InstanceId>; 2], core: &impl Core) -> u64 {
        let streams = |pair: &&Pair| {
            let [prefill, decode] = pair.legs();
            let open = matches!(pair.stage, Stage::Prefilling(_) | Stage::HandingOff(_));
            open && decode.is_some() && (decode == legs[1] || prefill == legs[0])
        };
        let streams = self.pairs.values().filter(streams).count() as u64;
        core.handoff_us(request).saturating_mul(streams)
    }

    /// Whether an instance holds KV that has yet to leave: a prefill that has no room there waits for it, and each such
    /// hand-off has a time of its own.
    fn holds_back(&self, instance: InstanceId) -> bool {
        let leaves = |pair: &Pair| pair.phase() == Phase::HandingOff && pair.legs()[0] == Some(instance);
        self.pairs.values().any(leaves)
    }

    /// Whether an instance decodes: KV that has no room there yet waits for one of these answers to end.
    fn decodes_on(&self, instance: InstanceId, core: &impl Core) -> bool {
        self.pairs.iter().any(|(request, pair)| {
            let Stage::Decoding(decoding) = &pair.stage else { return false };
            let since_us = core.last_token_us(*request).max(decoding.since_us());
            decoding.decode() == instance && since_us + self.config.token_stage_us(pair.class) > self.now_us
        })
    }

    fn give_up(
        &mut self,
        request: RequestId,
        impatient: bool,
        core: &mut impl Core,
        effects: &mut Vec<Effect>,
    ) {
        let Some(phase) = self.pairs.get(&request).map(Pair::phase) else { return };
        self.feed(Input::RequestCancelled { request }, core, effects);
        if self.end(request) {
            effects.push(Effect::GiveUp { request, phase, impatient });
        }
    }
}
