//! Cost profiles: what a prefill pass and a decode step cost on one kind of node.
//!
//! Shapes. A prefill of `new` tokens behind `prefix` cached ones costs a piecewise linear function
//! of `new` (matrix products, launch overhead) plus an attention term in
//! `new · (prefix + new / 2)` token pairs. A decode step over a batch of `b` requests holding `c`
//! context tokens together costs `base(b) + slope(b) · c`, both interpolated over the batch sizes
//! that were measured. Every profile file names the measurements it was fitted to, the fit's
//! error and the range in which it holds.

use alloc::string::String;
use alloc::vec::Vec;
use serde::{Deserialize, Serialize};

/// Picoseconds in a microsecond.
const PS_PER_US: f64 = 1e6;

/// What one kind of node costs, and how much KV it holds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CostProfile {
    /// Short name, as used in configs.
    pub name: String,
    /// Where the measurements come from.
    pub source: String,
    /// Bytes of KV for one token, over all layers.
    pub kv_bytes_per_token: u64,
    /// KV tokens that fit in HBM beside the weights.
    pub kv_capacity_tokens: u64,
    /// Transformer layers: the grain of a layer-wise hand-off.
    pub layers: u32,
    /// Cost that a mixed step (decodes and a prefill chunk together) pays once instead of twice, µs.
    pub shared_us: f64,
    /// How well the formulas fit the measurements.
    pub fit: FitReport,
    /// Where the formulas hold.
    pub valid: ValidRange,
    /// Prefill formula.
    pub prefill: PrefillCost,
    /// Decode formula.
    pub decode: DecodeCost,
}

/// Fit errors against the measurements named in `source`, in per cent.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FitReport {
    /// Measurements used for the prefill formula.
    pub prefill_points: u32,
    /// Mean absolute percentage error over them.
    pub prefill_mape_pct: f64,
    /// Worst absolute percentage error over them.
    pub prefill_worst_pct: f64,
    /// Measurements used for the decode formula.
    pub decode_points: u32,
    /// Mean absolute percentage error over them.
    pub decode_mape_pct: f64,
    /// Worst absolute percentage error over them.
    pub decode_worst_pct: f64,
}

/// The range of the measurements; outside it the formulas extrapolate.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ValidRange {
    /// Longest prompt measured, tokens.
    pub max_prompt_tokens: u64,
    /// Largest decode batch measured.
    pub max_batch: u32,
    /// Longest context of one decoding request measured, tokens.
    pub max_context_tokens: u64,
}

/// Prefill formula: `knots(new) + attention_ps_per_pair · new · (prefix + new / 2)`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PrefillCost {
    /// New tokens at each knot, ascending.
    pub knots_tokens: Vec<u32>,
    /// Cost without attention at each knot, µs, ascending.
    pub knots_us: Vec<f64>,
    /// Attention cost of one (query, key) pair, ps.
    pub attention_ps_per_pair: f64,
}

/// Decode formula: `base_us(batch) + context_ps_per_token(batch) · context_tokens`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DecodeCost {
    /// Batch sizes measured, ascending.
    pub batches: Vec<u32>,
    /// Cost of a step at zero context for each batch size, µs.
    pub base_us: Vec<f64>,
    /// Cost of one more context token anywhere in the batch, ps.
    pub context_ps_per_token: Vec<f64>,
}

/// A decode step's cost at one batch size: linear in the batch's context, in integer
/// picoseconds so that a sum over many steps is exact.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepCost {
    /// At zero context, ps.
    pub base_ps: u64,
    /// For each context token, ps.
    pub slope_ps: u64,
}

impl StepCost {
    /// One step over `context_tokens`, ps.
    #[must_use]
    pub const fn step_ps(self, context_tokens: u64) -> u64 {
        // Saturating: a profile that a stranger wrote may cost more than any time.
        self.base_ps.saturating_add(self.slope_ps.saturating_mul(context_tokens))
    }

    /// `steps` steps in a row, the context growing by `batch` tokens at each, ps. Exactly the sum
    /// of [`StepCost::step_ps`] over those steps.
    #[must_use]
    pub const fn run_ps(self, context_tokens: u64, batch: u64, steps: u64) -> u64 {
        if steps == 0 {
            return 0;
        }
        let growth = self.slope_ps.saturating_mul(batch).saturating_mul(steps.saturating_mul(steps - 1) / 2);
        steps.saturating_mul(self.step_ps(context_tokens)).saturating_add(growth)
    }
}

/// Why a profile cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cost profile: {0}")]
pub struct ProfileError(pub String);

impl CostProfile {
    /// Checks the shape of the tables: equal lengths, ascending, finite, not negative.
    ///
    /// # Errors
    /// Names the table and the rule that it breaks.
    pub fn validate(&self) -> Result<(), ProfileError> {
        let fail = |what: &str| Err(ProfileError(String::from(what)));
        let ok = |v: &[f64]| v.iter().all(|x| x.is_finite() && *x >= 0.0);
        let (p, d) = (&self.prefill, &self.decode);
        if p.knots_tokens.len() < 2 || p.knots_tokens.len() != p.knots_us.len() {
            return fail("prefill.knots_tokens and prefill.knots_us need the same length, at least 2");
        }
        if !p.knots_tokens.is_sorted_by(|a, b| a < b) || !p.knots_us.is_sorted() || !ok(&p.knots_us) {
            return fail("prefill knots must ascend and be finite and not negative");
        }
        if d.batches.is_empty()
            || d.batches.len() != d.base_us.len()
            || d.batches.len() != d.context_ps_per_token.len()
        {
            return fail("decode.batches, base_us and context_ps_per_token need the same length, at least 1");
        }
        if !d.batches.is_sorted_by(|a, b| a < b) || !ok(&d.base_us) || !ok(&d.context_ps_per_token) {
            return fail("decode batches must ascend, costs must be finite and not negative");
        }
        if !ok(&[p.attention_ps_per_pair, self.shared_us]) {
            return fail("attention_ps_per_pair and shared_us must be finite and not negative");
        }
        if self.kv_bytes_per_token == 0 || self.kv_capacity_tokens == 0 || self.layers == 0 {
            return fail("kv_bytes_per_token, kv_capacity_tokens and layers must be at least 1");
        }
        Ok(())
    }

    /// Time to prefill `new` tokens behind `prefix` cached ones in one pass, µs.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "token counts are far below 2^53")]
    pub fn prefill_us(&self, new: u64, prefix: u64) -> f64 {
        if new == 0 {
            return 0.0;
        }
        self.dense_us(new as f64) + self.attention_us(new, prefix)
    }

    /// The attention part of [`CostProfile::prefill_us`]: it adds up over the prompts of a pass,
    /// while the rest depends on the tokens of the pass together, µs.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "token counts are far below 2^53")]
    pub fn attention_us(&self, new: u64, prefix: u64) -> f64 {
        let n = new as f64;
        let pairs = n * (prefix as f64 + (n + 1.0) / 2.0);
        self.prefill.attention_ps_per_pair * pairs / PS_PER_US
    }

    /// The largest number of new tokens, at most `cap`, whose prefill behind `prefix` cached ones
    /// fits in `budget_us`; 0 when none does.
    #[must_use]
    pub fn chunk_within(&self, budget_us: f64, prefix: u64, cap: u64) -> u64 {
        let fits = |n: u64| self.prefill_us(n, prefix) <= budget_us;
        let mut n = self.chunk_near(budget_us, prefix, cap);
        // What was found by other arithmetic may be off by the last digit.
        while n > 0 && !fits(n) {
            n -= 1;
        }
        while n < cap && fits(n + 1) {
            n += 1;
        }
        n
    }

    /// [`CostProfile::chunk_within`] to within a token. Between two knots the cost is a parabola
    /// that bends upwards: a chord meets the budget too early and a tangent too late, so that the
    /// two close in on the answer in a step or two.
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "token counts are positive and far below 2^53"
    )]
    fn chunk_near(&self, budget_us: f64, prefix: u64, cap: u64) -> u64 {
        let (x, y) = (&self.prefill.knots_tokens, &self.prefill.knots_us);
        let cap = cap as f64;
        let pair_us = self.prefill.attention_ps_per_pair / PS_PER_US;
        let attention = |n: f64| pair_us * n * (prefix as f64 + f64::midpoint(n, 1.0));
        let below = |k: usize| f64::from(x[k]) < cap && y[k] + attention(f64::from(x[k])) <= budget_us;
        let upper = (1..x.len() - 1).take_while(|k| below(*k)).count() + 1;
        let (x0, y0) = (f64::from(x[upper - 1]), y[upper - 1]);
        let dense = (y[upper] - y0) / (f64::from(x[upper]) - x0);
        let cost = |n: f64| y0 + dense * (n - x0) + attention(n);
        let end = if upper == x.len() - 1 { cap } else { cap.min(f64::from(x[upper])) };
        let (mut low, mut high) = (x0.min(end), end);
        if cost(high) <= budget_us {
            return high as u64;
        }
        for _ in 0..8 {
            let (low_us, high_us) = (cost(low), cost(high));
            if high - low <= 1.0 || low_us > budget_us || high_us <= budget_us {
                break;
            }
            let chord = low + (budget_us - low_us) / (high_us - low_us) * (high - low);
            let slope = dense + pair_us * (prefix as f64 + chord + 0.5);
            let tangent = chord + (budget_us - cost(chord)) / slope;
            (low, high) = (chord.max(low), tangent.min(high));
        }
        low as u64
    }

    /// Time to prefill `new` tokens behind `prefix` cached ones in passes of at most
    /// `pass_tokens`, µs.
    #[must_use]
    pub fn chunked_prefill_us(&self, new: u64, prefix: u64, pass_tokens: u64) -> f64 {
        let pass = if pass_tokens == 0 { new } else { pass_tokens };
        if new <= pass {
            return self.prefill_us(new, prefix);
        }
        let full = new / pass;
        let rest = new % pass;
        #[expect(clippy::cast_precision_loss, reason = "token counts are far below 2^53")]
        let (f, p, pre) = (full as f64, pass as f64, prefix as f64);
        // Σ over full passes of pass · (prefix + i·pass + (pass + 1)/2)
        let pairs = f * p * (pre + (p + 1.0) / 2.0) + p * p * f * (f - 1.0) / 2.0;
        let dense = f * self.dense_us(p);
        dense
            + self.prefill.attention_ps_per_pair * pairs / PS_PER_US
            + self.prefill_us(rest, prefix + full * pass)
    }

    /// The part of a pass that depends only on its new tokens, piecewise linear over the knots,
    /// the last slope beyond them, µs.
    #[must_use]
    pub fn dense_us(&self, new: f64) -> f64 {
        let (x, y) = (&self.prefill.knots_tokens, &self.prefill.knots_us);
        // Counting is quicker than searching: a table is short and its turns are hard to foresee.
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "saturates, which is right"
        )]
        let whole = new as u32;
        let above = whole.saturating_add(u32::from(f64::from(whole) < new));
        let upper = 1 + x[1..x.len() - 1].iter().map(|&k| usize::from(k < above)).sum::<usize>();
        let (x0, x1) = (f64::from(x[upper - 1]), f64::from(x[upper]));
        let (y0, y1) = (y[upper - 1], y[upper]);
        let value = y0 + (y1 - y0) * (new - x0) / (x1 - x0);
        if value > 0.0 { value } else { 0.0 }
    }

    /// Cost of a decode step at batch size `batch`.
    #[must_use]
    pub fn step_cost(&self, batch: u32) -> StepCost {
        let d = &self.decode;
        let last = d.batches.len() - 1;
        let upper = d.batches.partition_point(|&b| b < batch).min(last);
        let lower = upper.saturating_sub(1);
        let mix = |v: &[f64], extrapolate: bool| {
            let (x0, x1) = (f64::from(d.batches[lower]), f64::from(d.batches[upper]));
            if lower == upper {
                return v[upper];
            }
            let t = (f64::from(batch) - x0) / (x1 - x0);
            let t = if extrapolate { t } else { t.clamp(0.0, 1.0) };
            v[lower] + (v[upper] - v[lower]) * t
        };
        let to_ps = |x: f64| if x > 0.0 { x } else { 0.0 };
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "clamped above zero, far below 2^63"
        )]
        StepCost {
            base_ps: to_ps(mix(&d.base_us, true) * PS_PER_US) as u64,
            slope_ps: to_ps(mix(&d.context_ps_per_token, false)) as u64,
        }
    }

    /// Time of one decode step, µs.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "step times are far below 2^53 ps")]
    pub fn decode_us(&self, batch: u32, context_tokens: u64) -> f64 {
        if batch == 0 {
            return 0.0;
        }
        self.step_cost(batch).step_ps(context_tokens) as f64 / PS_PER_US
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;
    use proptest::prelude::*;

    fn profile() -> CostProfile {
        CostProfile {
            name: String::from("test"),
            source: String::from("made up"),
            kv_bytes_per_token: 1000,
            kv_capacity_tokens: 1_000_000,
            layers: 10,
            shared_us: 10.0,
            fit: FitReport::default(),
            valid: ValidRange::default(),
            prefill: PrefillCost {
                knots_tokens: vec![0, 100, 1100],
                knots_us: vec![50.0, 150.0, 2150.0],
                attention_ps_per_pair: 1_000_000.0,
            },
            decode: DecodeCost {
                batches: vec![1, 3],
                base_us: vec![10.0, 20.0],
                context_ps_per_token: vec![5.0, 1.0],
            },
        }
    }

    #[test]
    fn prefill_interpolates_and_charges_pairs() {
        let p = profile();
        assert_eq!(p.prefill_us(0, 99), 0.0);
        let dense = 150.0 + 2.0 * 500.0;
        let pairs = 600.0 * (10.0 + 601.0 / 2.0);
        assert!((p.prefill_us(600, 10) - dense - pairs).abs() < 1e-6);
    }

    #[test]
    fn decode_interpolates_between_batches_and_extends_the_base_beyond() {
        let p = profile();
        assert_eq!(p.step_cost(2), StepCost { base_ps: 15_000_000, slope_ps: 3 });
        assert_eq!(p.step_cost(5), StepCost { base_ps: 30_000_000, slope_ps: 1 });
        assert_eq!(p.decode_us(0, 5), 0.0);
    }

    /// Asserts that the change makes the profile unusable and that the complaint names the field.
    fn refused(field: &str, change: impl Fn(&mut CostProfile)) {
        let mut p = profile();
        change(&mut p);
        let error = p.validate().expect_err(field);
        assert!(error.0.contains(field), "{error} does not name {field}");
        assert!(alloc::format!("{error}").starts_with("cost profile: "));
    }

    #[test]
    fn broken_tables_are_named() {
        assert_eq!(profile().validate(), Ok(()));
        refused("knots", |p| p.prefill.knots_us = vec![3.0]);
        refused("knots", |p| (p.prefill.knots_tokens, p.prefill.knots_us) = (vec![5], vec![1.0]));
        refused("knots", |p| p.prefill.knots_tokens = vec![0, 100, 100]);
        refused("knots", |p| p.prefill.knots_us = vec![50.0, 20.0, 2150.0]);
        refused("knots", |p| p.prefill.knots_us[2] = f64::INFINITY);
        refused("knots", |p| p.prefill.knots_us[0] = -1.0);
        refused("decode", |p| p.decode.base_us[0] = f64::NAN);
        refused("decode", |p| p.decode.context_ps_per_token = vec![5.0]);
        refused("decode", |p| p.decode.batches = vec![3, 1]);
        refused("decode", |p| {
            p.decode = DecodeCost { batches: vec![], base_us: vec![], context_ps_per_token: vec![] };
        });
        refused("attention_ps_per_pair", |p| p.prefill.attention_ps_per_pair = f64::NAN);
        refused("shared_us", |p| p.shared_us = -0.5);
        refused("kv_bytes_per_token", |p| p.kv_bytes_per_token = 0);
        refused("kv_capacity_tokens", |p| p.kv_capacity_tokens = 0);
        refused("layers", |p| p.layers = 0);
    }

    #[test]
    fn beyond_the_last_knot_the_last_slope_goes_on() {
        let p = profile();
        let slope = (2150.0 - 150.0) / 1000.0;
        assert!((p.dense_us(5100.0) - (2150.0 + 4000.0 * slope)).abs() < 1e-6);
        assert!((p.dense_us(1e12) - (2150.0 + (1e12 - 1100.0) * slope)).abs() < 1.0);
    }

    #[test]
    fn one_batch_size_measured_serves_for_all() {
        let mut p = profile();
        p.decode = DecodeCost { batches: vec![8], base_us: vec![7.0], context_ps_per_token: vec![2.0] };
        for batch in [1, 8, 500] {
            assert_eq!(p.step_cost(batch), StepCost { base_ps: 7_000_000, slope_ps: 2 });
        }
    }

    #[test]
    fn a_step_never_costs_less_than_nothing() {
        let mut p = profile();
        p.decode.base_us = vec![20.0, 5.0];
        assert_eq!(p.step_cost(50).base_ps, 0, "the falling base is not followed below zero");
    }

    #[test]
    fn no_budget_buys_no_chunk_and_no_cap_no_token() {
        let p = profile();
        assert_eq!(p.chunk_within(-1.0, 0, 1000), 0);
        assert_eq!(p.chunk_within(0.0, 0, 1000), 0);
        assert_eq!(p.chunk_within(1e9, 0, 0), 0);
        assert_eq!(p.chunk_within(1e12, 0, 1000), 1000);
    }

    /// The dense cost by walking the table from its start.
    fn naive_dense_us(p: &CostProfile, new: f64) -> f64 {
        let points: Vec<(f64, f64)> = p
            .prefill
            .knots_tokens
            .iter()
            .map(|&k| f64::from(k))
            .zip(p.prefill.knots_us.iter().copied())
            .collect();
        let mut at = 0;
        while at + 2 < points.len() && points[at + 1].0 < new {
            at += 1;
        }
        let ((x0, y0), (x1, y1)) = (points[at], points[at + 1]);
        y0 + (y1 - y0) * (new - x0) / (x1 - x0)
    }

    proptest! {
        #[test]
        fn a_run_of_steps_is_the_sum_of_its_steps(
            base in 0u64..1_000_000_000, slope in 0u64..100_000,
            context in 0u64..2_000_000, batch in 1u64..256, steps in 0u64..300,
        ) {
            let cost = StepCost { base_ps: base, slope_ps: slope };
            let stepped: u64 = (0..steps).map(|i| cost.step_ps(context + i * batch)).sum();
            prop_assert_eq!(cost.run_ps(context, batch, steps), stepped);
        }

        #[test]
        fn a_chunk_is_the_largest_that_fits(budget in 0f64..5000.0, prefix in 0u64..500, cap in 0u64..3000) {
            let p = profile();
            let n = p.chunk_within(budget, prefix, cap);
            prop_assert!(n <= cap);
            prop_assert!(n == 0 || p.prefill_us(n, prefix) <= budget);
            prop_assert!(n == cap || p.prefill_us(n + 1, prefix) > budget);
        }

        #[test]
        fn the_dense_cost_is_the_line_between_its_neighbours(
            steps in proptest::collection::vec((1u32..5_000, 0u32..1_000_000), 1..9), new in 0u32..60_000, part in 0f64..1.0,
        ) {
            let mut p = profile();
            (p.prefill.knots_tokens, p.prefill.knots_us) = (vec![0], vec![10.0]);
            for (tokens, us) in steps {
                let last = p.prefill.knots_tokens.len() - 1;
                p.prefill.knots_tokens.push(p.prefill.knots_tokens[last] + tokens);
                p.prefill.knots_us.push(p.prefill.knots_us[last] + f64::from(us));
            }
            for new in [f64::from(new), f64::from(new) + part] {
                let (got, naive) = (p.dense_us(new), naive_dense_us(&p, new));
                prop_assert!((got - naive).abs() <= 1e-9 * naive.max(1.0), "{} vs {} at {}", got, naive, new);
            }
        }

        #[test]
        fn more_tokens_or_a_longer_prefix_never_cost_less(new in 1u64..4_000, prefix in 0u64..4_000, more in 0u64..500) {
            let p = profile();
            let cost = p.prefill_us(new, prefix);
            prop_assert!(p.prefill_us(new + more, prefix) >= cost);
            prop_assert!(p.prefill_us(new, prefix + more) >= cost);
            prop_assert!(p.chunked_prefill_us(new + more, prefix, 512) >= p.chunked_prefill_us(new, prefix, 512));
        }

        #[test]
        fn attention_adds_up_however_a_prompt_is_cut(first in 1u64..3_000, second in 1u64..3_000, prefix in 0u64..3_000) {
            let p = profile();
            let whole = p.attention_us(first + second, prefix);
            let parts = p.attention_us(first, prefix) + p.attention_us(second, prefix + first);
            prop_assert!((whole - parts).abs() <= 1e-9 * whole, "{} vs {}", whole, parts);
        }

        #[test]
        fn a_step_grows_with_its_batch_and_its_context(batch in 1u32..40, context in 0u64..100_000, more in 1u64..5_000) {
            let mut p = profile();
            p.decode = DecodeCost {
                batches: vec![1, 4, 32],
                base_us: vec![10.0, 12.0, 40.0],
                context_ps_per_token: vec![3.0, 3.0, 5.0],
            };
            let step = p.decode_us(batch, context);
            prop_assert!(p.decode_us(batch, context + more) > step);
            prop_assert!(p.decode_us(batch + 1, context) >= step);
            prop_assert!(step >= 10.0, "never below the least that was measured");
        }

        #[test]
        fn a_chunk_is_found_without_a_search(
            steps in proptest::collection::vec((1u32..40_000, 0u32..4_000_000), 1..9),
            (start_us, pair_ps) in (0u32..30_000, 0u32..4_000),
            (budget_us, prefix, cap) in (0u32..40_000_000, 0u64..200_000, 1u64..140_000),
        ) {
            let mut p = profile();
            (p.prefill.knots_tokens, p.prefill.knots_us) = (vec![0], vec![start_us.into()]);
            for (tokens, us) in steps {
                let last = p.prefill.knots_tokens.len() - 1;
                p.prefill.knots_tokens.push(p.prefill.knots_tokens[last] + tokens);
                p.prefill.knots_us.push(p.prefill.knots_us[last] + f64::from(us));
            }
            p.prefill.attention_ps_per_pair = pair_ps.into();
            let budget_us = f64::from(budget_us);
            let n = p.chunk_within(budget_us, prefix, cap);
            prop_assert!(n == 0 || p.prefill_us(n, prefix) <= budget_us);
            prop_assert!(n == cap || p.prefill_us(n + 1, prefix) > budget_us);
            let near = p.chunk_near(budget_us, prefix, cap);
            prop_assert!(near.abs_diff(n) <= 2, "{} is far from {}", near, n);
        }

        #[test]
        fn chunked_prefill_is_the_sum_of_its_passes(
            new in 1u64..5_000, prefix in 0u64..5_000, pass in 1u64..2_000,
        ) {
            let p = profile();
            let (mut done, mut sum) = (0, 0.0);
            while done < new {
                let n = pass.min(new - done);
                sum += p.prefill_us(n, prefix + done);
                done += n;
            }
            let got = p.chunked_prefill_us(new, prefix, pass);
            prop_assert!((got - sum).abs() <= 1e-6 * sum.max(1.0), "{} vs {}", got, sum);
        }
    }
}
