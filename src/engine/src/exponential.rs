//! The exponential function in one fixed order of plain operations, so that it gives equal bits on
//! every machine and in every position of a vector, and so that loops over it run in vector lanes.

/// 1.5 · 2²³: adding it rounds a small number to the nearest whole one, kept in the low bits.
const ROUND: f32 = 12_582_912.0;
/// ln 2 in two parts, so that a multiple of the first is exact.
const LN2_HIGH: f32 = 0.693_359_4;
const LN2_LOW: f32 = -2.121_944_4e-4;

/// eˣ to within 3 units in the last place for `x` in −87 … 88; held at the ends beyond.
#[inline]
pub(crate) fn exp(x: f32) -> f32 {
    // Comparisons of this form are single vector instructions; one that is no number becomes the low end.
    let x = if x > -87.0 { x } else { -87.0 };
    let x = if x < 88.0 { x } else { 88.0 };
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let whole = shifted - ROUND;
    let rest = (x - whole * LN2_HIGH) - whole * LN2_LOW;
    // The Taylor terms up to the seventh: the eighth is below 2⁻²⁶ for |rest| ≤ ln 2 / 2.
    let sum = 1.0 / 5040.0;
    let sum = sum * rest + 1.0 / 720.0;
    let sum = sum * rest + 1.0 / 120.0;
    let sum = sum * rest + 1.0 / 24.0;
    let sum = sum * rest + 1.0 / 6.0;
    let sum = sum * rest + 0.5;
    let sum = sum * rest + 1.0;
    let sum = sum * rest + 1.0;
    // Wrapping, because a check for overflow would keep loops out of vector lanes.
    let power = shifted.to_bits().wrapping_sub(ROUND.to_bits()).wrapping_add(127) << 23;
    sum * f32::from_bits(power)
}

/// `x / (1 + e⁻ˣ)`.
#[inline]
pub(crate) fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn close_to_the_true_value_everywhere() {
        for i in -870_000..=880_000 {
            let x = i as f32 / 10_000.0;
            let (got, want) = (f64::from(exp(x)), libm::exp(f64::from(x)));
            assert!((got - want).abs() <= want * 3.6e-7, "exp({x}) = {got}, not {want}");
        }
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), exp(-87.0));
    }

    #[test]
    fn silu_is_half_at_zero_slope_and_identity_far_up() {
        assert_eq!(silu(0.0), 0.0);
        assert_eq!(silu(80.0), 80.0);
        assert!((silu(1.0) - 0.731_058_6).abs() < 1e-6);
    }
}
