//! Fits a [`CostProfile`] to measured latencies.
//!
//! Pure: measurements in, profile out, the same bits for the same input. Every fit minimises the
//! sum of squared *relative* errors, since a profile has to be as right about a 10 ms step as about
//! a 30 s prompt. The errors written into the profile are those of the finished, rounded formulas
//! over all measurements, taken by the same functions that the simulator and the conductor call.

pub mod curvature;
pub mod measured;
mod mixed;
mod prefill;

use baton_types::{CostProfile, DecodeCost, FitReport, PrefillCost, ValidRange};
use measured::{DecodePoint, Measurements, PrefillPoint};
use prefill::Attention;
pub use prefill::ascending;

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
    profile.shared_us = mixed::shared_us(&profile, &measured.mixed);
    profile.fit = errors_over(&profile, measured);
    profile.validate().map_err(|e| FitError(e.to_string()))?;
    Ok(profile)
}

/// The fit errors of `profile` over `measured`, in per cent rounded to hundredths.
#[must_use]
pub fn errors_over(profile: &CostProfile, measured: &Measurements) -> FitReport {
    let (prefill, decode) = (prefill_errors(profile, &measured.prefill), decode_errors(profile, measured));
    FitReport {
        prefill_points: prefill.points(),
        prefill_mape_pct: round_to(prefill.mean_pct(), 0.01),
        prefill_worst_pct: round_to(prefill.quantile_pct(1.0), 0.01),
        decode_points: decode.points(),
        decode_mape_pct: round_to(decode.mean_pct(), 0.01),
        decode_worst_pct: round_to(decode.quantile_pct(1.0), 0.01),
    }
}

/// The errors of each section that was measured, with its name.
#[must_use]
pub fn sections(profile: &CostProfile, measured: &Measurements) -> Vec<(&'static str, SectionErrors)> {
    let mixed = SectionErrors::over(&measured.mixed, |p| {
        let at = (mixed::apart_us(profile, p) - profile.shared_us).max(0.0);
        (at, p.latency_us)
    });
    let prefill = prefill_errors(profile, &measured.prefill);
    let all = [("prefill", prefill), ("decode", decode_errors(profile, measured)), ("mixed", mixed)];
    all.into_iter().filter(|(_, errors)| errors.points() > 0).collect()
}

fn prefill_errors(profile: &CostProfile, points: &[PrefillPoint]) -> SectionErrors {
    SectionErrors::over(points, |p| {
        let at = profile.prefill_us(u64::from(p.new_tokens), p.prefix_tokens);
        (at, p.latency_us)
    })
}

fn decode_errors(profile: &CostProfile, measured: &Measurements) -> SectionErrors {
    SectionErrors::over(&measured.decode, |p| {
        let at = profile.decode_us(p.batch, p.context_sum_tokens());
        (at, p.latency_us)
    })
}

/// Absolute relative errors of a formula over some measurements, in per cent, ascending.
#[derive(Clone, Debug, PartialEq)]
pub struct SectionErrors(Vec<f64>);

impl SectionErrors {
    /// `both` gives (predicted, measured) for one point.
    fn over<P>(points: &[P], both: impl Fn(&P) -> (f64, f64)) -> Self {
        let error_pct = |point| {
            let (predicted, measured) = both(point);
            100.0 * (predicted - measured).abs() / measured
        };
        let mut errors: Vec<f64> = points.iter().map(error_pct).collect();
        errors.sort_unstable_by(f64::total_cmp);
        Self(errors)
    }

    /// How many measurements there are.
    #[must_use]
    pub fn points(&self) -> u32 {
        u32::try_from(self.0.len()).unwrap_or(u32::MAX)
    }

    /// Their mean, per cent; 0 of none.
    #[must_use]
    pub fn mean_pct(&self) -> f64 {
        self.0.iter().sum::<f64>() / f64::from(self.points().max(1))
    }

    /// The smallest error that this share of the points does not exceed, per cent; 0 of none.
    #[must_use]
    pub fn quantile_pct(&self, share: f64) -> f64 {
        let rank = (share * f64::from(self.points())).ceil().max(1.0) - 1.0;
        let last = self.0.len().saturating_sub(1);
        self.0.get((rank as usize).min(last)).copied().unwrap_or(0.0)
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
        let mape_pct = prefill_errors(&candidate, points).mean_pct();
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
    let latencies = (measured.prefill.iter().map(|p| p.latency_us))
        .chain(measured.decode.iter().map(|p| p.latency_us))
        .chain(measured.mixed.iter().map(|p| p.latency_us));
    if !latencies.into_iter().all(|us| us.is_finite() && us > 0.0) {
        return Err(FitError(String::from("every latency must be finite and above zero")));
    }
    if measured.prefill.iter().any(|p| p.new_tokens == 0) {
        return Err(FitError(String::from("a prefill of no new tokens cannot be fitted; drop it")));
    }
    if measured.decode.is_empty() || measured.decode.iter().any(|p| p.batch == 0) {
        return Err(FitError(String::from("decode rows are needed, each with a batch of at least 1")));
    }
    if measured.mixed.iter().any(|p| p.batch == 0 || p.new_tokens == 0) {
        return Err(FitError(String::from("a mixed row needs a batch and new tokens of at least 1 each")));
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
