//! Numbers drawn from described distributions.

use baton_types::Rng;

/// A distribution given by its quantiles at [`POINTS`], logarithmic in between.
#[derive(Debug, Clone, Copy)]
pub(super) struct Quantiles(pub(super) [f64; 11]);

/// The shares at which quantiles are given.
pub(super) const POINTS: [f64; 11] = [0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0];

impl Quantiles {
    /// One draw. Values may be negative or zero: the logarithm is of the distance from the least.
    pub(super) fn draw(&self, rng: &mut Rng) -> f64 {
        self.at(rng.unit())
    }

    /// The value that a share of all draws stays below.
    pub(super) fn at(&self, share: f64) -> f64 {
        let above = POINTS.iter().position(|p| *p > share).unwrap_or(10).max(1);
        let (low, high) = (self.0[above - 1], self.0[above]);
        let part = (share - POINTS[above - 1]) / (POINTS[above] - POINTS[above - 1]);
        if low > 0.0 { low * (high / low).powf(part) } else { low + (high - low) * part }
    }
}

/// Draws that fill `[0, 1)` evenly: a sequence of them strays far less from its distribution than
/// random draws do.
#[derive(Debug, Clone)]
pub(super) struct EvenDraws {
    at: f64,
    step: f64,
}

impl EvenDraws {
    /// Starts anywhere; `step` is an irrational number.
    pub(super) fn new(rng: &mut Rng, step: f64) -> Self {
        Self { at: rng.unit(), step: step.fract() }
    }

    pub(super) fn next(&mut self) -> f64 {
        self.at = (self.at + self.step).fract();
        self.at
    }
}

/// An exponential draw.
pub(super) fn exponential(rng: &mut Rng, mean: f64) -> f64 {
    -mean * (1.0 - rng.unit()).ln()
}

/// A log-normal draw of the given mean; `spread` is the deviation of its logarithm.
pub(super) fn log_normal(rng: &mut Rng, mean: f64, spread: f64) -> f64 {
    let radius = (-2.0 * (1.0 - rng.unit()).ln()).sqrt();
    let normal = radius * (std::f64::consts::TAU * rng.unit()).cos();
    mean * (spread * normal - spread * spread / 2.0).exp()
}

/// A whole number of tokens, at least `least`.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "clamped to a sensible range first"
)]
pub(super) fn tokens(value: f64, least: u64) -> u64 {
    (value.clamp(0.0, 1e12).round() as u64).max(least)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_have_the_described_quantiles() {
        let quantiles = Quantiles([-10.0, 0.0, 1.0, 2.0, 5.0, 10.0, 50.0, 90.0, 100.0, 500.0, 900.0]);
        let mut rng = Rng::new(3);
        let mut draws: Vec<f64> = (0..20_000).map(|_| quantiles.draw(&mut rng)).collect();
        draws.sort_by(f64::total_cmp);
        for (share, wanted) in POINTS.iter().zip(quantiles.0).skip(3).take(5) {
            let got = draws[(share * 20_000.0) as usize];
            assert!((got - wanted).abs() < 0.06 * wanted + 0.2, "{got} at {share}, wanted {wanted}");
        }
    }

    #[test]
    fn means_are_as_asked() {
        let mut rng = Rng::new(5);
        let mean = |draw: &mut dyn FnMut(&mut Rng) -> f64, rng: &mut Rng| {
            (0..50_000).map(|_| draw(rng)).sum::<f64>() / 50_000.0
        };
        assert!((mean(&mut |r| exponential(r, 7.0), &mut rng) - 7.0).abs() < 0.2);
        assert!((mean(&mut |r| log_normal(r, 7.0, 0.8), &mut rng) - 7.0).abs() < 0.2);
    }
}
