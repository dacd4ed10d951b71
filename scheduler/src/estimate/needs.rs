//! What requests need of a decode instance, and how much of what is free one of them may take.
//!
//! A resource that fills up serves most requests if large ones leave what is left to small ones: in place of three times
//! the mean need, three are served. So a request leaves some of what is free, the more the larger it is (trunk
//! reservation, Kelly 1991). What is worth leaving is measured by how much demand fluctuates: where random arrivals with
//! needs of mean `m` and deviation `s` fill a capacity `C`, what they hold together has the deviation
//! `sqrt(C * (m * m + s * s) / m)`, as in the square-root rule of staffing (Halfin, Whitt 1981). Where all need the same,
//! nothing is left: nobody would be served in the place of what was refused.

use serde::{Deserialize, Serialize};

/// About so many of the latest requests count.
const WINDOW: f64 = 512.0;
/// Deviations that a request leaves free for each mean need that it exceeds a small one by.
const DEVIATIONS: f64 = 0.5;
/// Deviations of room that are left besides where the whole slack of first tokens is not promised, and in proportion:
/// where first tokens come late, starts of decodes are predicted badly.
const UNPROMISED_DEVIATIONS: f64 = 3.0;

/// Mean and variance of the latest needs of a resource.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct NeedMoments {
    count: f64,
    mean: f64,
    variance: f64,
}

impl NeedMoments {
    #[expect(clippy::cast_precision_loss, reason = "needs are far below 2^53")]
    pub(crate) fn note(&mut self, need: u64) {
        self.count = (self.count + 1.0).min(WINDOW);
        let off = need as f64 - self.mean;
        self.mean += off / self.count;
        self.variance += (off * (need as f64 - self.mean) - self.variance) / self.count;
    }

    pub(crate) const fn mean(&self) -> f64 {
        self.mean
    }

    /// What was read may be anything.
    pub(crate) fn is_sound(&self) -> bool {
        let bounded = |value: f64| (0.0..=1e39).contains(&value);
        (0.0..=WINDOW).contains(&self.count) && bounded(self.mean) && bounded(self.variance)
    }

    /// Whether a need may be taken from what is free of a capacity. A small need is one deviation below the mean.
    fn may_take(&self, need: f64, (free, capacity): (f64, f64), deviations: f64) -> bool {
        let small = (self.mean - libm::sqrt(self.variance)).max(0.0);
        let fluctuation = libm::sqrt(capacity * (self.mean * self.mean + self.variance) / self.mean.max(1.0));
        (need - small) * deviations * fluctuation <= self.mean * free
    }
}

/// The latest needs of room and of steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct NeedEstimator {
    room: NeedMoments,
    context: NeedMoments,
}

impl NeedEstimator {
    /// Counts a request that arrived: the room that it needs, and its mean context, tokens.
    pub(crate) fn note(&mut self, room_tokens: u64, context_tokens: u64) {
        self.room.note(room_tokens);
        self.context.note(context_tokens);
    }

    /// Whether the values are ones that could have been learnt.
    pub(crate) fn is_sound(&self) -> bool {
        self.room.is_sound() && self.context.is_sound()
    }

    /// Mean context of a request, tokens.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a positive mean of tokens")]
    pub(crate) fn context_tokens(&self) -> u64 {
        self.context.mean as u64
    }

    /// Whether so much room may be taken from what is free of a capacity, tokens, where this part of the slack of first
    /// tokens is not promised.
    #[expect(clippy::cast_precision_loss, reason = "tokens are far below 2^53")]
    pub(crate) fn may_take_room(
        &self,
        tokens: u64,
        (free_tokens, capacity_tokens): (u64, u64),
        unpromised_percent: u64,
    ) -> bool {
        let deviations = DEVIATIONS + UNPROMISED_DEVIATIONS / 100.0 * unpromised_percent as f64;
        self.room.may_take(tokens as f64, (free_tokens as f64, capacity_tokens as f64), deviations)
    }

    /// Whether a request may take its part of a step from what is left of it, µs, of all that may be added to it. One of
    /// the mean context adds `mean_us`.
    #[expect(clippy::cast_precision_loss, reason = "tokens are far below 2^53")]
    pub(crate) fn may_take_step(
        &self,
        context_tokens: u64,
        (left_us, most_us): (f64, f64),
        mean_us: f64,
    ) -> bool {
        let tokens = |us: f64| us / mean_us * self.context.mean;
        mean_us <= 0.0
            || self.context.may_take(context_tokens as f64, (tokens(left_us), tokens(most_us)), DEVIATIONS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec::Vec;
    use baton_types::Rng;
    use proptest::prelude::*;

    const CAPACITY: u64 = 1_000_000;

    fn of(needs: impl IntoIterator<Item = u64>) -> NeedEstimator {
        let mut estimator = NeedEstimator::default();
        needs.into_iter().for_each(|tokens| estimator.note(tokens, tokens));
        estimator
    }

    /// The largest of these needs that may be taken where so much is free.
    fn largest(estimator: &NeedEstimator, free_tokens: u64, percent: u64) -> u64 {
        let takes = |tokens: &u64| estimator.may_take_room(*tokens, (free_tokens, CAPACITY), percent);
        (0..=CAPACITY / 100).map(|hundreds| hundreds * 100).take_while(takes).last().unwrap_or(0)
    }

    #[test]
    fn what_all_need_is_taken_to_the_last() {
        let estimator = of([10_000; 600]);
        assert!(estimator.may_take_room(10_000, (10_000, CAPACITY), 0));
        assert!(estimator.may_take_step(10_000, (1.0, 30_000.0), 300.0));
        assert!(NeedEstimator::default().may_take_room(10_000, (10_000, CAPACITY), 0), "nothing is known");
    }

    /// One in five needs 50,000 tokens, the others 5,000: mean 14,000, deviation 18,000. A hundred of them would fluctuate by
    /// 190,000.
    #[test]
    fn the_larger_a_need_the_more_it_leaves() {
        let estimator = of((0..600).map(|at| if at % 5 == 0 { 50_000 } else { 5_000 }));
        assert_eq!(largest(&estimator, 100_000, 0), 14_500);
        assert_eq!(largest(&estimator, 340_000, 0), 49_300);
        assert_eq!(largest(&estimator, 340_000, 30), 17_600, "first tokens have been late");
        assert!(!estimator.may_take_step(50_000, (8_500.0, 30_000.0), 300.0));
        assert!(estimator.may_take_step(50_000, (9_000.0, 30_000.0), 300.0));
        assert!(estimator.may_take_step(14_000, (2_500.0, 30_000.0), 300.0));
        assert!(estimator.may_take_step(50_000, (1.0, 30_000.0), 0.0), "steps that no context lengthens");
    }

    #[test]
    fn what_was_is_forgotten() {
        let mut estimator = of([50_000; 600]);
        (0..5_000).for_each(|_| estimator.note(5_000, 5_000));
        assert!((4_999..5_010).contains(&estimator.context_tokens()));
        assert!(estimator.may_take_room(5_000, (5_000, CAPACITY), 0));
        assert!(!estimator.may_take_room(20_000, (20_000, CAPACITY), 0));
    }

    #[test]
    fn moments_that_nobody_could_have_learnt_are_not_sound() {
        let with = |change: fn(&mut NeedMoments)| {
            let mut estimator = of([7, 9]);
            change(&mut estimator.room);
            estimator.is_sound()
        };
        assert!(with(|_| {}));
        assert!(!with(|moments| moments.count = 513.0));
        assert!(!with(|moments| moments.mean = f64::NAN));
        assert!(!with(|moments| moments.variance = -1.0));
    }

    proptest! {
        /// The moments are those of the needs while all of them count.
        #[test]
        fn moments_are_those_of_the_needs(needs in proptest::collection::vec(1u64..200_000, 1..500)) {
            let estimator = of(needs.iter().copied());
            let count = needs.len() as f64;
            let mean = needs.iter().sum::<u64>() as f64 / count;
            let variance = needs.iter().map(|need| (*need as f64 - mean).powi(2)).sum::<f64>() / count;
            prop_assert!((estimator.room.mean - mean).abs() < 1e-6 * mean);
            prop_assert!((estimator.room.variance - variance).abs() < 1e-6 * mean * mean);
        }

        /// What leaves enough leaves enough where more is free, and so does a smaller need.
        #[test]
        fn more_free_or_less_needed_is_no_worse(seed in any::<u64>(), need in 1u64..200_000, free in 1u64..1_000_000) {
            let mut rng = Rng::new(seed);
            let needs: Vec<u64> = (0..100).map(|_| 1 + rng.below(100_000)).collect();
            let estimator = of(needs);
            if estimator.may_take_room(need, (free, CAPACITY), 10) {
                prop_assert!(estimator.may_take_room(need / 2, (free, CAPACITY), 10));
                prop_assert!(estimator.may_take_room(need, (free + 1, CAPACITY), 10));
                prop_assert!(estimator.may_take_room(need, (free, CAPACITY), 9));
            }
        }
    }
}
