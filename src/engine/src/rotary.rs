//! Rotary position embedding, with the two kinds of frequency scaling that Llama checkpoints use.

/// How a checkpoint stretches its frequencies to longer texts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Scaling {
    /// Not at all.
    None,
    /// Positions divided by a factor.
    Linear {
        /// The factor.
        factor: f64,
    },
    /// Slow frequencies divided by a factor, quick ones kept, a ramp between.
    Llama3 {
        /// The factor.
        factor: f64,
        /// Wavelengths above `original_tokens / low` are slow.
        low: f64,
        /// Wavelengths below `original_tokens / high` are quick.
        high: f64,
        /// Context that the model was first trained with, tokens.
        original_tokens: f64,
    },
}

/// The frequencies of a model's heads.
#[derive(Debug)]
pub(crate) struct Rotary {
    frequencies: Vec<f32>,
}

impl Rotary {
    /// Frequencies for heads of `head_dim` numbers.
    #[expect(clippy::cast_possible_truncation, clippy::cast_precision_loss, reason = "f32 by design")]
    pub(crate) fn new(head_dim: usize, theta: f64, scaling: Scaling) -> Self {
        let frequency = |i: usize| 1.0 / libm::pow(theta, (2 * i) as f64 / head_dim as f64);
        let frequencies = (0..head_dim / 2).map(|i| scaled(frequency(i), scaling) as f32).collect();
        Self { frequencies }
    }

    /// Appends the cosines, then the sines, of one position.
    #[expect(clippy::cast_possible_truncation, clippy::cast_precision_loss, reason = "f32 by design")]
    pub(crate) fn angles(&self, position: u32, out: &mut Vec<f32>) {
        let angle = |frequency: &f32| f64::from(position as f32 * frequency);
        out.extend(self.frequencies.iter().map(|f| libm::cos(angle(f)) as f32));
        out.extend(self.frequencies.iter().map(|f| libm::sin(angle(f)) as f32));
    }
}

fn scaled(frequency: f64, scaling: Scaling) -> f64 {
    match scaling {
        Scaling::None => frequency,
        Scaling::Linear { factor } => frequency / factor,
        Scaling::Llama3 { factor, low, high, original_tokens } => {
            let waves = original_tokens * frequency / std::f64::consts::TAU;
            // 1 for the quick ones, 0 for the slow ones.
            let keep = ((waves - low) / (high - low)).clamp(0.0, 1.0);
            frequency * (keep + (1.0 - keep) / factor)
        }
    }
}

/// Turns every head of a row by the angles of its position: the first half of a head is paired with
/// the second, as in Hugging Face checkpoints.
pub(crate) fn rotate(row: &mut [f32], head_dim: usize, angles: &[f32]) {
    let (cosines, sines) = angles.split_at(head_dim / 2);
    for head in row.chunks_exact_mut(head_dim) {
        let (first, second) = head.split_at_mut(head_dim / 2);
        for (((a, b), cosine), sine) in first.iter_mut().zip(second).zip(cosines).zip(sines) {
            (*a, *b) = (*a * cosine - *b * sine, *b * cosine + *a * sine);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_turn_keeps_lengths_and_position_zero_keeps_all() {
        let rotary = Rotary::new(4, 10_000.0, Scaling::None);
        let row = [1.0, 2.0, 3.0, 4.0];
        for position in [0, 7] {
            let mut angles = Vec::new();
            rotary.angles(position, &mut angles);
            let mut turned = row;
            rotate(&mut turned, 4, &angles);
            assert_eq!(turned == row, position == 0);
            assert!((turned[0].hypot(turned[2]) - 10f32.sqrt()).abs() < 1e-5);
            assert!((turned[1].hypot(turned[3]) - 20f32.sqrt()).abs() < 1e-5);
        }
    }

    #[test]
    fn llama3_keeps_quick_frequencies_and_divides_slow_ones() {
        let scaling = Scaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original_tokens: 8192.0 };
        assert_eq!(scaled(1.0, scaling), 1.0);
        assert_eq!(scaled(1e-5, scaling), 1e-5 / 8.0);
        let between = std::f64::consts::TAU * 2.5 / 8192.0;
        assert!((scaled(between, scaling) - between * (0.5 + 0.5 / 8.0)).abs() < 1e-12);
        assert_eq!(scaled(1.0, Scaling::Linear { factor: 4.0 }), 0.25);
    }
}
