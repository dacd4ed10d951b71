//! How many prompt tokens an engine puts into one pass: Baton's own engines and the simulated ones ask the same code.

use crate::CostProfile;

/// Prompt tokens that the first prompt of a pass gets at least, where it has so many left and the pass may hold them. A
/// decode step that is too long by itself would otherwise stop the prompts beside it for good.
const LEAST_TOKENS: u64 = 16;

/// The bounds of one pass.
#[derive(Clone, Copy, Debug)]
pub struct PassLimit<'a> {
    tokens: u64,
    /// What prompt tokens cost, and the time for them at that speed, µs; none where it does not matter.
    time: Option<(&'a CostProfile, f64)>,
}

impl<'a> PassLimit<'a> {
    /// A pass of at most so many prompt tokens, however long it takes.
    #[must_use]
    pub const fn whole(tokens: u64) -> Self {
        Self { tokens, time: None }
    }

    /// The same beside decodes, whose step leaves `free_us` of what it should take at most, at the profile's speed.
    #[must_use]
    pub fn beside(tokens: u64, profile: &'a CostProfile, free_us: f64) -> Self {
        Self { tokens, time: Some((profile, free_us + profile.shared_us)) }
    }
}

/// A pass as far as it is filled with prompt tokens.
#[derive(Clone, Copy, Debug)]
pub struct PassLoad<'a> {
    limit: PassLimit<'a>,
    tokens: u64,
    attention_us: f64,
}

impl<'a> PassLoad<'a> {
    /// An empty pass within `limit`.
    #[must_use]
    pub const fn new(limit: PassLimit<'a>) -> Self {
        Self { limit, tokens: 0, attention_us: 0.0 }
    }

    /// Adds as many tokens as fit of the next prompt, which has `left` to compute behind `prefix`; 0 where none fits.
    pub fn take(&mut self, left: u64, prefix: u64) -> u64 {
        let most = left.min(self.limit.tokens - self.tokens);
        let mut taken = most;
        if let Some((profile, time_us)) = self.limit.time {
            let attention_us = |taken| self.attention_us + profile.attention_us(taken, prefix);
            #[expect(clippy::cast_precision_loss, reason = "token counts are far below 2^53")]
            let dense_us = |taken| profile.dense_us((self.tokens + taken) as f64);
            let fits = |taken| dense_us(taken) + attention_us(taken) <= time_us;
            let (mut low, mut high) = (if fits(most) { most } else { 0 }, most);
            while low < high {
                let middle = low + (high - low).div_ceil(2);
                if fits(middle) { low = middle } else { high = middle - 1 }
            }
            let least = if self.tokens == 0 { LEAST_TOKENS.min(most) } else { 0 };
            taken = low.max(least);
            self.attention_us = attention_us(taken);
        }
        self.tokens += taken;
        taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DecodeCost, FitReport, PrefillCost, ValidRange};
    use alloc::string::String;
    use alloc::vec;
    use alloc::vec::Vec;
    use proptest::prelude::*;

    /// 50 µs and 1 µs a token, from the knot on 2, and `attention` ps a pair; 10 µs are paid once beside decodes.
    fn profile(knot: u32, attention_ps_per_pair: f64) -> CostProfile {
        let end_us = 50.0 + f64::from(knot) + 2.0 * 1000.0;
        CostProfile {
            name: String::from("test"),
            source: String::from("made up"),
            kv_bytes_per_token: 1,
            kv_capacity_tokens: 1,
            layers: 1,
            shared_us: 10.0,
            fit: FitReport::default(),
            valid: ValidRange::default(),
            prefill: PrefillCost {
                knots_tokens: vec![0, knot, knot + 1000],
                knots_us: vec![50.0, 50.0 + f64::from(knot), end_us],
                attention_ps_per_pair,
            },
            decode: DecodeCost { batches: vec![1], base_us: vec![1.0], context_ps_per_token: vec![0.0] },
        }
    }

    fn filled(limit: PassLimit<'_>, prompts: &[(u64, u64)]) -> Vec<u64> {
        let mut load = PassLoad::new(limit);
        prompts.iter().map(|(left, prefix)| load.take(*left, *prefix)).collect()
    }

    /// Token by token: one more while the pass with it keeps both bounds, and the least of the first in any case.
    fn naive((most, free_us): (u64, f64), profile: &CostProfile, prompts: &[(u64, u64)]) -> Vec<u64> {
        let time_us = free_us + 10.0;
        let (mut all, mut pairs) = (0, 0);
        let chunk = |(left, prefix): &(u64, u64)| {
            let before = all;
            while all - before < *left && all < most {
                let pairs_with = pairs + prefix + (all - before) + 1;
                let attention_us = pairs_with as f64 * profile.prefill.attention_ps_per_pair / 1e6;
                let must = before == 0 && all < 16;
                if profile.dense_us((all + 1) as f64) + attention_us > time_us && !must {
                    break;
                }
                (all, pairs) = (all + 1, pairs_with);
            }
            all - before
        };
        prompts.iter().map(chunk).collect()
    }

    #[test]
    fn a_whole_pass_is_filled_however_long_it_takes() {
        assert_eq!(filled(PassLimit::whole(500), &[(200, 0), (1, 9), (900, 0), (7, 0)]), [200, 1, 299, 0]);
    }

    #[test]
    fn beside_decodes_it_ends_in_time_and_pays_once_for_what_both_need() {
        let profile = profile(100, 0.0);
        // 90 µs are left and 10 shared: 50 for the pass, 50 tokens.
        let chunks = |most, prompts: &[_]| filled(PassLimit::beside(most, &profile, 90.0), prompts);
        assert_eq!(chunks(500, &[(30, 0), (400, 0), (1, 0)]), [30, 20, 0]);
        assert_eq!(chunks(40, &[(400, 0)]), [40]);
    }

    #[test]
    fn a_step_that_is_too_long_already_lets_the_first_prompt_go_on() {
        let profile = profile(100, 1000.0);
        let chunks = |most, prompts: &[_]| filled(PassLimit::beside(most, &profile, -1e9), prompts);
        assert_eq!(chunks(500, &[(400, 7), (400, 0)]), [16, 0]);
        assert_eq!(chunks(500, &[(3, 7), (400, 0)]), [3, 0]);
        assert_eq!(chunks(5, &[(400, 0)]), [5]);
    }

    proptest! {
        #[test]
        fn chunks_are_those_of_counting_token_by_token(
            prompts in proptest::collection::vec((1u64..600, 0u64..5000), 1..6),
            knot in 1u32..300,
            attention in 0u32..300,
            most in 1u64..1500,
            free_us in -200i32..2000,
        ) {
            // Costs of whole 64ths are added without error, whatever the order.
            let profile = profile(knot, f64::from(attention) * 1e6 / 64.0);
            let chunks = filled(PassLimit::beside(most, &profile, free_us.into()), &prompts);
            prop_assert_eq!(&chunks, &naive((most, free_us.into()), &profile, &prompts));
        }
    }
}
