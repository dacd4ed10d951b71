//! Online correction: the running ratio of measured over predicted time.

use serde::{Deserialize, Serialize};

use super::{as_f64, whole_us};

/// Measured over predicted work. Both sums fade. The ratio is one of sums, so a tiny prefill that shared a pass with
/// another weighs as little as it costs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Residual {
    measured_us: f64,
    prior_us: f64,
    /// Sum of |measured − corrected prediction|, and of what was measured, for the error figure.
    error_us: f64,
    total_us: f64,
}

/// Each new sample multiplies the weight of the past by this.
const FADE: f64 = 0.95;
/// Weight of the prior (a ratio of 1), µs of work.
const PRIOR_US: f64 = 1_000_000.0;
/// A sample counts as at most this many times its prediction: a longer time is a fault, not a cost.
const OUTLIER: f64 = 8.0;
/// The largest correction, and its reciprocal the smallest. The profile may be that of quite another model or machine.
const FURTHEST: f64 = 1000.0;

impl Default for Residual {
    fn default() -> Self {
        Self { measured_us: PRIOR_US, prior_us: PRIOR_US, error_us: 0.0, total_us: 0.0 }
    }
}

impl Residual {
    /// The factor by which a prior is multiplied.
    pub(crate) fn ratio(&self) -> f64 {
        (self.measured_us / self.prior_us).clamp(1.0 / FURTHEST, FURTHEST)
    }

    /// The factor as far as it makes an objective one that nobody could meet: at most two, since a stall will pass.
    pub(crate) fn lasting_ratio(&self) -> f64 {
        self.ratio().min(2.0)
    }

    /// From now on the next measurement counts more than all before it.
    pub(crate) fn doubt(&mut self) {
        self.measured_us = self.ratio();
        self.prior_us = 1.0;
    }

    /// A prior with the correction, µs.
    pub(crate) fn scale_us(&self, prior_us: u64) -> u64 {
        whole_us(as_f64(prior_us) * self.ratio())
    }

    /// Error of the corrected predictions so far: Σ|measured − predicted| / Σ measured.
    pub(crate) fn mean_error(&self) -> f64 {
        if self.total_us <= 0.0 { 0.0 } else { self.error_us / self.total_us }
    }

    /// Records one measurement; `prior_us` is the uncorrected prediction.
    pub(crate) fn observe(&mut self, prior_us: f64, measured_us: f64) {
        if prior_us <= 0.0 || measured_us <= 0.0 {
            return;
        }
        let predicted_us = prior_us * self.ratio();
        self.error_us += libm::fabs(measured_us - predicted_us);
        self.total_us += measured_us;
        self.measured_us = self.measured_us * FADE + measured_us.min(predicted_us * OUTLIER);
        self.prior_us = self.prior_us * FADE + prior_us;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_twice_as_slow_is_learnt() {
        let mut residual = Residual::default();
        for _ in 0..100 {
            residual.observe(1e6, 2e6);
        }
        assert!((residual.ratio() - 2.0).abs() < 0.02, "{}", residual.ratio());
        assert!(residual.mean_error() > 0.0 && residual.mean_error() < 0.5);
    }

    /// A regression: corrections stopped at a factor of eight, so an engine 50 times as fast as its profile was
    /// mispredicted for ever.
    #[test]
    fn a_profile_of_quite_another_engine_is_corrected() {
        for factor in [0.02, 50.0] {
            let mut residual = Residual::default();
            for _ in 0..200 {
                residual.observe(1e6, 1e6 * factor);
            }
            assert!((residual.ratio() / factor - 1.0).abs() < 0.02, "{}", residual.ratio());
        }
    }

    #[test]
    fn nonsense_is_ignored_and_outliers_are_bounded() {
        let mut residual = Residual::default();
        residual.observe(0.0, 5.0);
        residual.observe(5.0, 0.0);
        assert_eq!(residual, Residual::default());
        residual.observe(1e6, 1e15);
        assert!(residual.ratio() <= OUTLIER, "{}", residual.ratio());
        (0..1_000).for_each(|_| residual.observe(1e6, 1e15));
        assert!(residual.ratio() <= FURTHEST);
    }

    #[test]
    fn a_tiny_sample_moves_the_ratio_as_little_as_it_costs() {
        let mut residual = Residual::default();
        for _ in 0..20 {
            residual.observe(1e6, 1e6);
            residual.observe(13_000.0, 100.0);
        }
        assert!((residual.ratio() - 1.0).abs() < 0.03, "{}", residual.ratio());
    }
}
