//! Fits a [`CostProfile`] to measured latencies.
//!
//! Pure: measurements in, profile out, the same bits for the same input. Every fit minimises the
//! sum of squared *relative* errors, since a profile has to be as right about a 10 ms step as about
//! a 30 s prompt. The errors written into the profile are those of the finished, rounded formulas
//! over all measurements, taken by the same functions that the simulator and the conductor call.

pub mod measured;
mod prefill;

use baton_types::{CostProfile, DecodeCost, FitReport, PrefillCost, ValidRange};
use measured::{DecodePoint, Measurements, PrefillPoint};
use prefill::Attention;

/// The facts about the fitted profile that the measurements do not contain.
#[derive(Clone, Debug)]
pub struct FitSpec {
    /// Name of the profile.
    pub name: String,
    /// Where the measurements come from: kept in the profile, word for word.
    pub source: String,
    /// Transformer layers of the measured model.
    pub layers: u32,
    /// Which prefill formula to fit.
    pub shape: PrefillShape,
}

/// Which prefill formula to fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PrefillShape {
    /// The cost grows with the new tokens and with the (query, key) pairs, cached prefix included.
    NewAndPrefix,
    /// The cost is read off the rows without a prefix, whatever is cached: what a simulator does
    /// that interpolates over new tokens alone. For comparisons only.
    NewOnly,
}

/// Why no profile could be fitted, with the remedy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("profile fit: {0}")]
pub struct FitError(pub String);

/// Fits both formulas and reports how well they do over all of `measured`.
///
/// # Errors
/// When the measurements cannot determine the formulas: too few prompt lengths, no spread of
/// prefixes and no attention column, or a decode batch seen at one context only.
pub fn fit(measured: &Measurements, spec: FitSpec) -> Result<CostProfile, FitError> {
    check(measured)?;
    let mut profile = CostProfile {
        name: spec.name,
        source: spec.source,
        kv_bytes_per_token: measured.kv_bytes_per_token,
        kv_capacity_tokens: measured.kv_capacity_tokens,
        layers: spec.layers,
        shared_us: 0.0,
        fit: FitReport::default(),
        valid: valid_range(measured),
        prefill: PrefillCost { knots_tokens: Vec::new(), knots_us: Vec::new(), attention_ps_per_pair: 0.0 },
        decode: fit_decode(&measured.decode)?,
    };
    profile.prefill = best_prefill(&profile, &measured.prefill)?;
    if spec.shape == PrefillShape::NewOnly {
        profile.prefill = prefill::new_only(&profile, &measured.prefill)?;
    }
    profile.shared_us = profile.prefill.knots_us[0].min(profile.decode.base_us[0]);
    profile.fit = errors_over(&profile, measured);
    profile.validate().map_err(|e| FitError(e.to_string()))?;
    Ok(profile)
}

/// The fit errors of `profile` over `measured`, in per cent rounded to hundredths.
#[must_use]
pub fn errors_over(profile: &CostProfile, measured: &Measurements) -> FitReport {
    let prefill = Errors::over(&measured.prefill, |p| {
        let at = profile.prefill_us(u64::from(p.new_tokens), p.prefix_tokens);
        (at, p.latency_us)
    });
    let decode = Errors::over(&measured.decode, |p| {
        let at = profile.decode_us(p.batch, p.context_sum_tokens());
        (at, p.latency_us)
    });
    FitReport {
        prefill_points: prefill.points,
        prefill_mape_pct: round_to(prefill.mape_pct, 0.01),
        prefill_worst_pct: round_to(prefill.worst_pct, 0.01),
        decode_points: decode.points,
        decode_mape_pct: round_to(decode.mape_pct, 0.01),
        decode_worst_pct: round_to(decode.worst_pct, 0.01),
    }
}

/// Absolute relative errors of a formula over some measurements, in per cent.
struct Errors {
    points: u32,
    mape_pct: f64,
    worst_pct: f64,
}

impl Errors {
    /// `both` gives (predicted, measured) for one point.
    fn over<P>(points: &[P], both: impl Fn(&P) -> (f64, f64)) -> Self {
        let (mut count, mut sum, mut worst) = (0, 0.0, 0.0_f64);
        for point in points {
            let (predicted, measured) = both(point);
            let error_pct = 100.0 * (predicted - measured).abs() / measured;
            count += 1;
            sum += error_pct;
            worst = worst.max(error_pct);
        }
        let mape_pct = sum / f64::from(count.max(1));
        Self { points: count, mape_pct, worst_pct: worst }
    }
}

/// Fits the prefix-aware formula with the attention coefficient from each source that is there,
/// and keeps the one with the lower mean error on the whole latency.
fn best_prefill(profile: &CostProfile, points: &[PrefillPoint]) -> Result<PrefillCost, FitError> {
    let mut best: Option<(f64, PrefillCost)> = None;
    for attention in [Attention::FromLatencies, Attention::FromColumn] {
        let Some(cost) = prefill::fit(points, attention)? else {
            continue;
        };
        let candidate = CostProfile { prefill: cost, ..profile.clone() };
        let mape_pct = Errors::over(points, |p| {
            let at = candidate.prefill_us(u64::from(p.new_tokens), p.prefix_tokens);
            (at, p.latency_us)
        })
        .mape_pct;
        if best.as_ref().is_none_or(|(lowest, _)| mape_pct < *lowest) {
            best = Some((mape_pct, candidate.prefill));
        }
    }
    best.map(|(_, cost)| cost).ok_or_else(|| {
        FitError(String::from(
            "the attention cost is undetermined: measure some prompt length with two different \
             prefixes, or add an attention_ms column",
        ))
    })
}

/// Fits base and slope for each batch size measured.
fn fit_decode(points: &[DecodePoint]) -> Result<DecodeCost, FitError> {
    let mut batches: Vec<u32> = points.iter().map(|p| p.batch).collect();
    batches.sort_unstable();
    batches.dedup();
    let mut cost = DecodeCost { batches: Vec::new(), base_us: Vec::new(), context_ps_per_token: Vec::new() };
    for batch in batches {
        let line: Vec<(f64, f64)> = points
            .iter()
            .filter(|p| p.batch == batch)
            .map(|p| (as_f64(p.context_sum_tokens()), p.latency_us))
            .collect();
        let (base_us, slope_us) = fit_line(&line).ok_or_else(|| {
            FitError(format!("decode batch {batch} was measured at one context only; measure at least two"))
        })?;
        cost.batches.push(batch);
        cost.base_us.push(round_to(base_us, 0.1));
        cost.context_ps_per_token.push(round_to(slope_us * 1e6, 1.0));
    }
    Ok(cost)
}

/// The line `base + slope · x` of least squared relative error with neither below zero, or none
/// if all points share one `x`.
fn fit_line(points: &[(f64, f64)]) -> Option<(f64, f64)> {
    let (mut w, mut wx, mut wxx, mut wy, mut wxy) = (0.0, 0.0, 0.0, 0.0, 0.0);
    for &(x, y) in points {
        let weight = 1.0 / (y * y);
        w += weight;
        wx += weight * x;
        wxx += weight * x * x;
        wy += weight * y;
        wxy += weight * x * y;
    }
    let determinant = w * wxx - wx * wx;
    if points.iter().all(|p| p.0 == points[0].0) || determinant <= 0.0 {
        return None;
    }
    let slope = (w * wxy - wx * wy) / determinant;
    let base = (wy * wxx - wx * wxy) / determinant;
    // With two unknowns the constrained optimum lies on the one violated bound.
    Some(match (base >= 0.0, slope >= 0.0) {
        (true, true) => (base, slope),
        (false, _) => (0.0, wxy / wxx),
        (true, false) => (wy / w, 0.0),
    })
}

/// The range that the measurements span.
fn valid_range(measured: &Measurements) -> ValidRange {
    let prompts = measured.prefill.iter().map(|p| u64::from(p.new_tokens) + p.prefix_tokens);
    ValidRange {
        max_prompt_tokens: prompts.max().unwrap_or(0),
        max_batch: measured.decode.iter().map(|p| p.batch).max().unwrap_or(0),
        max_context_tokens: measured.decode.iter().map(|p| p.context_tokens).max().unwrap_or(0),
    }
}

/// Refuses what no relative error can be taken of.
fn check(measured: &Measurements) -> Result<(), FitError> {
    let latencies =
        (measured.prefill.iter().map(|p| p.latency_us)).chain(measured.decode.iter().map(|p| p.latency_us));
    if !latencies.into_iter().all(|us| us.is_finite() && us > 0.0) {
        return Err(FitError(String::from("every latency must be finite and above zero")));
    }
    if measured.prefill.iter().any(|p| p.new_tokens == 0) {
        return Err(FitError(String::from("a prefill of no new tokens cannot be fitted; drop it")));
    }
    if measured.decode.is_empty() || measured.decode.iter().any(|p| p.batch == 0) {
        return Err(FitError(String::from("decode rows are needed, each with a batch of at least 1")));
    }
    Ok(())
}

/// Rounds `value` to the nearest multiple of `grain`. So a written profile reads back bit for bit and
/// shows only the digits that the measurements carry.
fn round_to(value: f64, grain: f64) -> f64 {
    // Dividing by the inverse keeps short decimals short: 3 · 0.1 is not 0.3, 3 / 10 is.
    let inverse = (1.0 / grain).round();
    (value * inverse).round() / inverse
}

#[expect(clippy::cast_precision_loss, reason = "token counts are far below 2^53")]
fn as_f64(tokens: u64) -> f64 {
    tokens as f64
}

#[cfg(test)]
mod tests;
