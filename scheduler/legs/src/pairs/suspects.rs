//! Requests that were in an engine when it died: each of them may be what it died of.
//!
//! The core retries such a request on trial. At most as many requests are on trial as there are instances, so that a
//! poisonous one has an instance without others on trial, as far as there is a choice. The trial is over with the
//! request's next token. If a second engine dies with the request in it, the core fails the request by name. When an
//! engine dies with a request on trial in it, that request is blamed. The others there are spared, once each; so the
//! core finds a poisonous request even if it draws tokens first.

use alloc::vec::Vec;

use baton_scheduler::{FailStage, Input};
use baton_types::{InstanceId, RequestId};

use super::waiting::MAX_ATTEMPTS;
use super::{Cause, Core, Effect, Pair, Pairs, Phase};

/// Engines that may die with a request in them; then it is failed.
const DEATHS_MOST: u32 = 2;

impl Pairs {
    /// Handles the death of an instance in the middle of its work. A spared request is served elsewhere, as after any
    /// loss.
    pub(super) fn suspect_all(
        &mut self,
        instance: InstanceId,
        requests: &[RequestId],
        core: &mut impl Core,
        effects: &mut Vec<Effect>,
    ) {
        let is_in = |request: &RequestId| self.pairs.get(request).is_some_and(|pair| pair.is_in(instance));
        let mut suspects: Vec<RequestId> = requests.iter().copied().filter(is_in).collect();
        if suspects.iter().any(|request| self.on_trial.contains(request)) {
            let (on_trial, pairs) = (&self.on_trial, &mut self.pairs);
            suspects.retain(|request| {
                let spared =
                    pairs.get_mut(request).is_some_and(|pair| core::mem::replace(&mut pair.spared, true));
                on_trial.contains(request) || spared
            });
        }
        for request in suspects {
            self.suspect(request, Cause::Lost, core, effects);
        }
    }

    /// A request was in an engine that died.
    fn suspect(&mut self, request: RequestId, cause: Cause, core: &mut impl Core, effects: &mut Vec<Effect>) {
        let Some(pair) = self.pairs.get_mut(&request) else { return };
        pair.deaths += 1;
        let deaths = pair.deaths;
        debug_assert!(deaths <= DEATHS_MOST, "{request} lives on in a third engine");
        effects.push(Effect::Blame { request, cause });
        // Its other leg is let go while it is known.
        self.feed(Input::RequestCancelled { request }, core, effects);
        if deaths >= DEATHS_MOST {
            if self.end(request) {
                effects.push(Effect::Condemn { request });
            }
            return;
        }
        self.try_at_once(request, effects);
    }

    /// Handles a leg whose engine broke off or is dead, so that it cannot be asked. The driver reports the loss of
    /// the instance next.
    pub(super) fn engine_broke(
        &mut self,
        (request, instance): (RequestId, InstanceId),
        (cut_off, gone): (bool, bool),
        core: &mut impl Core,
        effects: &mut Vec<Effect>,
    ) {
        // Then it is judged with the others that were there, when the instance is given up.
        let Some(pair) = self.pairs.get(&request) else { return };
        let died_with_it = gone && pair.is_in(instance);
        let (attempts, decodes) = (pair.attempt, pair.phase() == Phase::Decoding);
        if !cut_off {
            // It never reached the engine.
            self.feed(Input::RequestCancelled { request }, core, effects);
            if attempts < MAX_ATTEMPTS {
                self.try_at_once(request, effects);
            } else if self.end(request) {
                let stage = if decodes { FailStage::DecodeFailed } else { FailStage::PrefillFailed };
                effects.push(Effect::Fail { request, stage, attempts });
            }
        } else if !died_with_it {
            self.suspect(request, Cause::Lost, core, effects);
        }
    }

    /// Parks a suspect and makes its retry due now: it starts as soon as an instance is free for it.
    fn try_at_once(&mut self, request: RequestId, effects: &mut Vec<Effect>) {
        self.hold(request, effects);
        self.try_at_us = self.now_us;
    }

    /// Whether a request that waits may be tried now; one that is suspected of an engine's death takes its turn.
    pub(super) fn goes_on_trial(&mut self, request: RequestId, core: &impl Core) -> bool {
        if self.pairs.get(&request).is_none_or(|pair: &Pair| pair.deaths == 0) {
            return true;
        }
        // Without a pair of instances none is tried, and the conductor says so.
        if self.on_trial.len() >= core.prefills().max(1) && core.can_serve() {
            return false;
        }
        let new = self.on_trial.insert(request);
        debug_assert!(new, "{request} is tried twice at once");
        true
    }

    /// An engine drew the request's next token and lives, or the request ended: the next one can be tried.
    pub(super) fn trial_is_over(&mut self, request: RequestId) {
        if self.on_trial.remove(&request) {
            self.try_at_us = self.now_us;
        }
    }
}
