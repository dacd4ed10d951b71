//! Samples of a latency: exact while they are few, in narrow buckets when they are many.

use super::LatencySummary;

/// Samples kept one by one; a run with more of them folds them into buckets.
const EXACT: usize = 1 << 20;
/// A bucket is named by the sign, exponent and 7 mantissa bits of its samples, so that it is less
/// than 0.8 % wide. Samples are never negative, hence half of the 16-bit names.
const BUCKETS: usize = 1 << 15;
/// Points of a distribution below its last hundredth.
const HUNDREDTHS: u32 = 100;

/// Times of one kind, in µs. Memory is bounded: at most 4 MiB while exact, 256 KiB when folded.
#[derive(Clone, Debug, Default)]
pub struct Samples {
    exact: Vec<f32>,
    /// Counts by bucket; empty while samples are kept one by one.
    folded: Vec<u64>,
    count: u64,
    sum: f64,
    max: f32,
}

impl Samples {
    /// Takes in one sample.
    #[expect(clippy::cast_precision_loss, reason = "a figure for percentiles")]
    pub fn push(&mut self, us: u64) {
        let sample = us as f32;
        self.count += 1;
        self.sum += f64::from(sample);
        self.max = self.max.max(sample);
        if self.folded.is_empty() && self.exact.len() < EXACT {
            self.exact.push(sample);
            return;
        }
        self.fold();
        self.folded[bucket(sample)] += 1;
    }

    /// Moves the samples kept so far into buckets.
    fn fold(&mut self) {
        if self.folded.is_empty() {
            self.folded = vec![0; BUCKETS];
            for sample in std::mem::take(&mut self.exact) {
                self.folded[bucket(sample)] += 1;
            }
        }
    }

    /// Mean and percentiles, divided by `unit`; and the distribution as `(share, value)`: every
    /// hundredth, then the tail's finer steps, 103 points in all, or none of no samples. Percentiles
    /// are nearest rank: exact up to 2^20 samples, then within 0.4 %.
    #[must_use]
    pub fn figures(&self, unit: f64) -> (LatencySummary, Vec<(f32, f32)>) {
        let ranked = RankedSamples::new(self);
        if self.count == 0 {
            return (LatencySummary::default(), Vec::new());
        }
        let at = |q: f64| Some(f64::from(ranked.at(q)) / unit);
        #[expect(clippy::cast_precision_loss, reason = "counts are far below 2^53")]
        let mean = self.sum / self.count as f64;
        let summary = LatencySummary {
            mean: Some(mean / unit),
            p50: at(0.5),
            p90: at(0.9),
            p99: at(0.99),
            max: Some(f64::from(self.max) / unit),
        };
        (summary, Self::quantiles(&ranked, unit))
    }

    fn quantiles(ranked: &RankedSamples, unit: f64) -> Vec<(f32, f32)> {
        let hundredths = (0..HUNDREDTHS).map(|i| f64::from(i) / f64::from(HUNDREDTHS));
        let shares = hundredths.chain([0.995, 0.999, 1.0]);
        #[expect(clippy::cast_possible_truncation, reason = "points of a drawing")]
        shares.map(|q| (q as f32, (f64::from(ranked.at(q)) / unit) as f32)).collect()
    }
}

fn bucket(sample: f32) -> usize {
    (sample.to_bits() >> 16) as usize % BUCKETS
}

/// The samples in order of size.
struct RankedSamples<'a> {
    sorted: Vec<f32>,
    samples: &'a Samples,
}

impl<'a> RankedSamples<'a> {
    fn new(samples: &'a Samples) -> Self {
        let mut sorted = samples.exact.clone();
        sorted.sort_unstable_by(f32::total_cmp);
        Self { sorted, samples }
    }

    /// Nearest rank: the smallest sample that at least this share does not exceed.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "a rank"
    )]
    fn at(&self, q: f64) -> f32 {
        let count = self.samples.count;
        let rank = ((q * count as f64).ceil() as u64).clamp(1, count.max(1));
        if self.samples.folded.is_empty() {
            return self.sorted.get(rank as usize - 1).copied().unwrap_or(0.0);
        }
        let mut below = 0;
        let holds = |n: &u64| {
            below += n;
            below >= rank
        };
        let at = self.samples.folded.iter().position(holds).unwrap_or(0) as u32;
        // The middle of the bucket, but never past the largest sample.
        f32::from_bits(at << 16 | 0x8000).min(self.samples.max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(values: impl Iterator<Item = u64>) -> Samples {
        let mut samples = Samples::default();
        values.for_each(|v| samples.push(v));
        samples
    }

    #[test]
    fn percentiles_are_nearest_rank() {
        let (s, curve) = of((1..=100).rev()).figures(1.0);
        assert_eq!((s.p50, s.p90, s.p99, s.max), (Some(50.0), Some(90.0), Some(99.0), Some(100.0)));
        assert_eq!(s.mean, Some(50.5));
        assert_eq!((curve[0], curve[50], curve[102]), ((0.0, 1.0), (0.5, 50.0), (1.0, 100.0)));
        assert!(curve.is_sorted_by(|a, b| a.0 < b.0 && a.1 <= b.1), "a distribution rises");
    }

    #[test]
    fn nothing_measured_is_no_figure() {
        assert_eq!(of(std::iter::empty()).figures(1.0), (LatencySummary::default(), Vec::new()));
        assert_eq!(of([3].into_iter()).figures(1.0).0.p99, Some(3.0));
    }

    #[test]
    fn folding_bounds_memory_and_keeps_the_figures() {
        let values = || (0..EXACT as u64 + 1000).map(|i| (i * 7919) % 1_000_003);
        let many = of(values());
        assert!(many.exact.is_empty() && many.exact.capacity() == 0, "folded samples are not kept twice");
        assert_eq!(many.folded.iter().sum::<u64>(), many.count);
        let mut all: Vec<u64> = values().collect();
        all.sort_unstable();
        let (s, _) = many.figures(1.0);
        for (q, got) in [(0.5, s.p50), (0.9, s.p90), (0.99, s.p99)] {
            let exact = all[(q * all.len() as f64).ceil() as usize - 1] as f64;
            let error = (got.unwrap() - exact).abs() / exact;
            assert!(error < 0.005, "the {q} quantile is {got:?}, exactly {exact}");
        }
        assert_eq!(s.max, Some(1_000_002.0));
    }

    #[test]
    fn extremes_stay_in_the_buckets() {
        let mut samples = of([0, u64::MAX].into_iter());
        samples.fold();
        let (s, _) = samples.figures(1.0);
        assert!(s.p50.unwrap() < 1e-30, "zero is its own bucket");
        assert_eq!(s.max.unwrap(), u64::MAX as f32 as f64);
    }
}
