//! The cost that a step of decodes and a prefill chunk together pays once instead of twice.

use super::measured::MixedPoint;
use super::round_to;
use baton_types::CostProfile;

/// The shared cost of least squared relative error over `points`, µs. It lies between nothing and the smaller of the
/// costs that a prefill and a decode step have without any work, and is that one where nothing was measured.
pub(super) fn shared_us(profile: &CostProfile, points: &[MixedPoint]) -> f64 {
    let most_us = profile.prefill.knots_us[0].min(profile.decode.base_us[0]);
    let (mut saved, mut all) = (0.0, 0.0);
    for point in points {
        let weight = 1.0 / (point.latency_us * point.latency_us);
        saved += weight * (apart_us(profile, point) - point.latency_us);
        all += weight;
    }
    if all > 0.0 { round_to((saved / all).clamp(0.0, most_us), 0.1) } else { most_us }
}

/// The time of the decodes and of the chunk, each in a step of its own, µs.
pub(super) fn apart_us(profile: &CostProfile, point: &MixedPoint) -> f64 {
    profile.decode_us(point.batch, u64::from(point.batch) * point.context_tokens)
        + profile.prefill_us(u64::from(point.new_tokens), point.prefix_tokens)
}
