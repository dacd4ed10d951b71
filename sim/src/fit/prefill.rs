//! The prefill formula: a piecewise linear cost of the new tokens plus attention by pairs.

use super::measured::PrefillPoint;
use super::{FitError, as_f64, round_to};
use baton_types::{CostProfile, PrefillCost};

/// Two measured lengths closer than this factor share one knot: the shorter is then a check on
/// the longer's segment instead of a free parameter of its own.
const KNOT_SPACING: f64 = 1.25;

/// Where the attention coefficient comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Attention {
    /// From the latencies, jointly with the knots.
    FromLatencies,
    /// From the measured share of attention alone.
    FromColumn,
}

/// Fits the prefix-aware formula. None if the measurements do not determine the attention
/// coefficient in that way.
///
/// # Errors
/// When fewer than two prompt lengths are far enough apart.
pub(super) fn fit(points: &[PrefillPoint], attention: Attention) -> Result<Option<PrefillCost>, FitError> {
    let knots = knots_of(points)?;
    let coefficient_us = match attention {
        Attention::FromLatencies => attention_from_latencies(&knots, points),
        Attention::FromColumn => attention_from_column(points),
    };
    Ok(coefficient_us.map(|us| {
        let attention_ps_per_pair = round_to(us.max(0.0) * 1e6, 0.1);
        let rest = |p: &PrefillPoint| p.latency_us - attention_ps_per_pair / 1e6 * p.pairs();
        let values = ascending(knots.least_squares(points, rest));
        let (knots_tokens, knots_us) = with_zero(&knots.0, &values);
        PrefillCost { knots_tokens, knots_us, attention_ps_per_pair }
    }))
}

/// Reads the cost off the rows without a prefix. Below the shortest of them it is what the
/// prefix-aware `fitted` says of a prompt without a prefix.
///
/// # Errors
/// When there are fewer than two rows without a prefix.
pub(super) fn new_only(fitted: &CostProfile, points: &[PrefillPoint]) -> Result<PrefillCost, FitError> {
    let bare: Vec<PrefillPoint> = points.iter().filter(|p| p.prefix_tokens == 0).cloned().collect();
    let above = Knots::new(bare.iter().map(|p| p.new_tokens), 1.0);
    if above.0.len() < 2 {
        return Err(FitError(String::from(
            "a cost of new tokens alone needs prefill rows without a prefix at two lengths or more",
        )));
    }
    let below: Vec<u32> =
        fitted.prefill.knots_tokens.iter().copied().filter(|&k| k > 0 && k < above.0[0]).collect();
    let mut values: Vec<f64> = below.iter().map(|&k| fitted.prefill_us(u64::from(k), 0)).collect();
    values.extend(above.least_squares(&bare, |p| p.latency_us));
    let tokens: Vec<u32> = below.into_iter().chain(above.0).collect();
    let (knots_tokens, knots_us) = with_zero(&tokens, &ascending(values));
    Ok(PrefillCost { knots_tokens, knots_us, attention_ps_per_pair: 0.0 })
}

fn knots_of(points: &[PrefillPoint]) -> Result<Knots, FitError> {
    let knots = Knots::new(points.iter().map(|p| p.new_tokens), KNOT_SPACING);
    if knots.0.len() < 2 {
        return Err(FitError(format!(
            "prefill rows are needed at two counts of new tokens at least {KNOT_SPACING} times \
             apart; found {}",
            knots.0.len()
        )));
    }
    Ok(knots)
}

/// The attention coefficient of least squared relative error with free knots, µs a pair. `None` if
/// pairs and new tokens never vary independently.
///
/// The fit first subtracts the part that the knots explain from the latencies and from the pairs. The
/// coefficient is the slope between the two residuals.
fn attention_from_latencies(knots: &Knots, points: &[PrefillPoint]) -> Option<f64> {
    let latency = knots.least_squares(points, |p| p.latency_us);
    let pairs = knots.least_squares(points, PrefillPoint::pairs);
    let (mut both, mut left, mut all) = (0.0, 0.0, 0.0);
    for p in points {
        let weight = 1.0 / p.latency_us;
        let rest_us = weight * (p.latency_us - knots.at(&latency, p.new_tokens));
        let rest_pairs = weight * (p.pairs() - knots.at(&pairs, p.new_tokens));
        both += rest_us * rest_pairs;
        left += rest_pairs * rest_pairs;
        all += (weight * p.pairs()).powi(2);
    }
    (left > 1e-12 * all).then(|| both / left)
}

/// The coefficient that fits the measured attention times, each weighted as its row's latency is.
/// None unless every row has one.
fn attention_from_column(points: &[PrefillPoint]) -> Option<f64> {
    let (mut both, mut all) = (0.0, 0.0);
    for p in points {
        let weight = (p.pairs() / p.latency_us).powi(2);
        both += weight * p.attention_us? / p.pairs();
        all += weight;
    }
    (all > 0.0).then(|| both / all)
}

/// Positions of the knots, ascending, at least two.
struct Knots(Vec<u32>);

impl Knots {
    /// Keeps the longest length and every next shorter one that lies `spacing` times below the
    /// last kept: long lengths carry most of the time, so they keep their own knots.
    fn new(lengths: impl Iterator<Item = u32>, spacing: f64) -> Self {
        let mut sorted: Vec<u32> = lengths.collect();
        sorted.sort_unstable_by(|a, b| b.cmp(a));
        sorted.dedup();
        let mut kept: Vec<u32> = Vec::new();
        for length in sorted {
            if kept.last().is_none_or(|&last| f64::from(length) * spacing <= f64::from(last)) {
                kept.push(length);
            }
        }
        kept.reverse();
        Self(kept)
    }

    /// The segment that holds `new`, by its upper knot, and how far along it `new` lies
    /// (0 at the lower knot, 1 at the upper, beyond both outside the range).
    fn segment(&self, new: u32) -> (usize, f64) {
        let upper = self.0.partition_point(|&k| k < new).clamp(1, self.0.len() - 1);
        let (x0, x1) = (f64::from(self.0[upper - 1]), f64::from(self.0[upper]));
        (upper, (f64::from(new) - x0) / (x1 - x0))
    }

    fn at(&self, values: &[f64], new: u32) -> f64 {
        let (upper, t) = self.segment(new);
        values[upper - 1] * (1.0 - t) + values[upper] * t
    }

    /// Knot values of least squared error against `target`, each row weighted by one over its
    /// latency. Each row touches two neighbouring knots, so the normal equations have three
    /// diagonals, and they are positive definite because each knot is a measured length.
    fn least_squares(&self, points: &[PrefillPoint], target: impl Fn(&PrefillPoint) -> f64) -> Vec<f64> {
        let n = self.0.len();
        let (mut diagonal, mut beside, mut right) = (vec![0.0; n], vec![0.0; n - 1], vec![0.0; n]);
        for p in points {
            let (upper, t) = self.segment(p.new_tokens);
            let weight = 1.0 / (p.latency_us * p.latency_us);
            let goal = weight * target(p);
            diagonal[upper - 1] += weight * (1.0 - t) * (1.0 - t);
            diagonal[upper] += weight * t * t;
            beside[upper - 1] += weight * t * (1.0 - t);
            right[upper - 1] += goal * (1.0 - t);
            right[upper] += goal * t;
        }
        solve_tridiagonal(diagonal, &beside, right)
    }
}

/// Solves a symmetric positive definite system of three diagonals by elimination.
fn solve_tridiagonal(mut diagonal: Vec<f64>, beside: &[f64], mut right: Vec<f64>) -> Vec<f64> {
    for i in 1..diagonal.len() {
        let factor = beside[i - 1] / diagonal[i - 1];
        diagonal[i] -= factor * beside[i - 1];
        right[i] -= factor * right[i - 1];
    }
    let last = diagonal.len() - 1;
    right[last] /= diagonal[last];
    for i in (0..last).rev() {
        right[i] = (right[i] - beside[i] * right[i + 1]) / diagonal[i];
    }
    right
}

/// The values rounded to microseconds, none below zero and none below the one before it: where
/// measurements disorder them, neighbours share their mean.
pub fn ascending(values: Vec<f64>) -> Vec<f64> {
    let mut runs: Vec<(f64, u32)> = Vec::new();
    for value in values {
        let mut run = (value.max(0.0), 1);
        while let Some(&(sum, count)) = runs.last() {
            if sum / f64::from(count) <= run.0 / f64::from(run.1) {
                break;
            }
            run = (run.0 + sum, run.1 + count);
            runs.pop();
        }
        runs.push(run);
    }
    let flat = runs
        .into_iter()
        .flat_map(|(sum, count)| std::iter::repeat_n(round_to(sum / f64::from(count), 1.0), count as usize));
    flat.collect()
}

/// Adds the knot at zero new tokens: the first segment extended, not below zero.
fn with_zero(tokens: &[u32], values: &[f64]) -> (Vec<u32>, Vec<f64>) {
    let (x0, x1) = (f64::from(tokens[0]), f64::from(tokens[1]));
    let slope = (values[1] - values[0]) / (x1 - x0);
    let fixed = round_to((values[0] - slope * x0).max(0.0), 1.0);
    let knots = std::iter::once(0).chain(tokens.iter().copied());
    let costs = std::iter::once(fixed).chain(values.iter().copied());
    (knots.collect(), costs.collect())
}

/// Pairs of one row, as the formula counts them.
impl PrefillPoint {
    pub(super) fn pairs(&self) -> f64 {
        let new = f64::from(self.new_tokens);
        new * (as_f64(self.prefix_tokens) + (new + 1.0) / 2.0)
    }
}
