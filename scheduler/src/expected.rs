//! Decode room for higher bands: what their decodes are expected to take is kept from requests of lower bands.
//!
//! In a queue a request of a higher band overtakes. A decode that has begun keeps its part of the batch until its answer
//! ends, so nothing can overtake it. Hence a request of a lower band is admitted only where the decodes of higher bands
//! will find their usual place beside it: as many as their demand of the last minutes keeps under way (Little 1961), and
//! some standard deviations of such a number more. Telephone networks keep trunks free for some of their calls in this
//! way (trunk reservation, Kelly 1991). How many deviations is learnt: a higher request that is refused for want of a
//! decode raises their number, each admitted one lowers it by what the class's target lets be refused. In the long run
//! that share of them is refused (Gibbs and Candès 2021).

use baton_types::SloClass;
use serde::{Deserialize, Serialize};

use crate::conductor::Conductor;
use crate::fleet::Instance;
use crate::{RejectReason, Request};

/// Standard deviations that are kept before anything was learnt, and at most.
const FIRST_DEVIATIONS: f64 = 2.0;
const MAX_DEVIATIONS: f64 = 10.0;
/// Refusals count once in this part of a mean decode: what was kept more has no effect before some decodes have ended.
const PAUSES: u64 = 10;

/// How many standard deviations are kept for higher bands beyond what they take in the mean.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct ReserveEstimator {
    deviations: f64,
    /// When a refusal counts again, µs.
    raises_us: u64,
}

impl Default for ReserveEstimator {
    fn default() -> Self {
        Self { deviations: FIRST_DEVIATIONS, raises_us: 0 }
    }
}

impl ReserveEstimator {
    /// A request of a higher band was refused for want of a decode.
    fn raise(&mut self, now_us: u64, mean_decode_us: u64) {
        if now_us >= self.raises_us {
            self.deviations = (self.deviations + 1.0).min(MAX_DEVIATIONS);
            self.raises_us = now_us.saturating_add(mean_decode_us / PAUSES);
        }
    }

    /// A request of a higher band was admitted.
    fn lower(&mut self, target_permille: u32) {
        self.deviations = (self.deviations - f64::from(1000 - target_permille.min(1000)) / 1000.0).max(0.0);
    }

    /// What was read may be anything.
    pub(crate) fn is_sound(&self) -> bool {
        (0.0..=MAX_DEVIATIONS).contains(&self.deviations)
    }
}

/// What decodes of the bands above one take of a decode instance, all instances taking the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ExpectedLoad {
    /// The band that this is kept from.
    priority: i32,
    pub batch: u32,
    pub context_tokens: u64,
    pub room_tokens: u64,
}

impl Conductor {
    /// Works out what is kept for higher bands from a request that is about to be placed.
    pub(crate) fn expect_higher(&mut self, request: &Request) {
        let priority = self.class(request).priority;
        let higher = |class: &SloClass| class.priority > priority;
        if !self.config.classes.iter().any(higher) {
            return;
        }
        let of_higher = |at: usize| self.config.classes.get(at).is_some_and(higher);
        let rates = self.demand.rates(self.now_us, |class| of_higher(class.index()));
        let Some([_, tokens, context, room]) = rates.filter(|rates| rates[1] > 0.0) else { return };
        let Some(usual) = self.fleet.decodes.first().and_then(|id| self.fleet.get(*id)) else { return };
        // Where decodes are scarce, steps are as long as may be promised.
        let step_us = self.promised_step_us(usual, &self.decode_need(request, self.now_us)).max(1.0);
        #[expect(clippy::cast_precision_loss, reason = "a count")]
        let decodes = self.fleet.decodes.len() as f64;
        let deviation = 1.0 / libm::sqrt(tokens * step_us);
        let part = (1.0 + self.reserve.deviations * deviation) * step_us / decodes;
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "bounded, and not negative"
        )]
        let of = |rate: f64| (rate * part).min(1e15) as u64;
        self.kept.expected = Some(ExpectedLoad {
            priority,
            batch: u32::try_from(of(tokens)).unwrap_or(u32::MAX / 2),
            context_tokens: of(context),
            room_tokens: of(room),
        });
    }

    /// What is expected on an instance beside the decodes of higher bands that will be there at a moment, or beside none.
    pub(crate) fn still_expected(&self, instance: &Instance, at_us: Option<u64>) -> ExpectedLoad {
        let Some(expected) = self.kept.expected else { return ExpectedLoad::default() };
        let Some(at_us) = at_us else { return expected };
        let (batch, context, room) = instance.decode.at_of_higher(self.now_us, at_us, expected.priority);
        ExpectedLoad {
            priority: expected.priority,
            batch: expected.batch.saturating_sub(batch),
            context_tokens: expected.context_tokens.saturating_sub(context),
            room_tokens: expected.room_tokens.saturating_sub(room),
        }
    }

    /// Learns how much is to be kept, from a request that was admitted, or refused for this reason.
    pub(crate) fn learn_reserve(&mut self, request: &Request, refused: Option<RejectReason>) {
        let class = self.class(request);
        let (priority, target_permille) = (class.priority, class.target_permille);
        if !self.config.classes.iter().any(|other| other.priority < priority) {
            return;
        }
        match refused {
            Some(RejectReason::Tbt | RejectReason::Room) => {
                let mean_us = self.lengths.mean_duration_us(1_000_000);
                self.reserve.raise(self.now_us, mean_us);
            }
            Some(_) => {}
            None => self.reserve.lower(target_permille),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_share_that_is_refused_becomes_that_of_the_target() {
        let mut reserve = ReserveEstimator::default();
        // One of ten is refused with less than six deviations, none with more.
        let mut refused = [0, 0];
        for at in 0..100_000_u64 {
            if at % 10 == 0 && reserve.deviations < 6.0 {
                reserve.raise(at, 0);
                refused[usize::from(at >= 50_000)] += 1;
            } else {
                reserve.lower(995);
            }
            assert!(reserve.is_sound());
        }
        assert!((240..260).contains(&refused[1]), "five of a thousand: {refused:?}");
    }

    #[test]
    fn refusals_of_a_moment_count_once() {
        let mut reserve = ReserveEstimator::default();
        (0..50).for_each(|_| reserve.raise(5, 1_000));
        assert!((reserve.deviations - FIRST_DEVIATIONS - 1.0).abs() < 1e-9);
        (0..50).for_each(|at| reserve.raise(5 + at * 100, 1_000));
        assert!((reserve.deviations - MAX_DEVIATIONS).abs() < 1e-9, "and no further");
        assert!(!ReserveEstimator { deviations: f64::NAN, raises_us: 0 }.is_sound());
    }
}
