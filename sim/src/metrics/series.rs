//! Figures over time: a bounded number of bins, however long the run.

use serde::Serialize;

/// Most bins kept; a longer run gets wider ones.
const MAX_BINS: usize = 480;

/// One bin.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Bin {
    /// Requests that arrived.
    pub arrived: u64,
    /// Of those offered in it, completed.
    pub completed: u64,
    /// Of those, in SLO.
    pub in_slo: u64,
    /// Refusals.
    pub rejected: u64,
    /// Sum of TTFT of those completed, µs.
    pub ttft_us: u64,
    /// Prompt blocks reused by them.
    pub hit_blocks: u64,
    /// Prompt blocks of them.
    pub blocks: u64,
    /// Samples of each pool's load.
    pub samples: u64,
    /// Sum of sampled prefill backlog, µs.
    pub backlog_us: u64,
    /// Sum of sampled decode batch sizes.
    pub batch: u64,
}

/// One sampled load.
#[derive(Clone, Copy, Debug)]
pub struct LoadSample {
    /// Which instance.
    pub instance: u32,
    /// Its prefill backlog, µs.
    pub backlog_us: u64,
    /// Its decode batch.
    pub batch: u32,
    /// Context of that batch, tokens.
    pub context_tokens: u64,
    /// Its step time by the conductor's prediction, µs.
    pub step_us: u64,
    /// Whether it is in the prefill pool.
    pub prefills: bool,
    /// Whether it is in the decode pool.
    pub decodes: bool,
}

/// Loads and counts over time.
#[derive(Clone, Debug, Serialize)]
pub struct Series {
    /// Width of a bin, µs.
    pub bin_us: u64,
    /// The bins.
    pub bins: Vec<Bin>,
    /// Prefill time of each instance in each bin, µs: `[instance][bin]`.
    pub prefill_us: Vec<Vec<u32>>,
    #[serde(skip)]
    prefill_load: Moments,
    #[serde(skip)]
    decode_load: Moments,
    #[serde(skip)]
    product: f64,
    #[serde(skip)]
    tick: (u64, f64, f64, u32, u32),
}

/// Running sums for mean and variance.
#[derive(Clone, Copy, Debug, Default)]
struct Moments {
    n: f64,
    sum: f64,
    squares: f64,
}

impl Moments {
    fn add(&mut self, x: f64) {
        self.n += 1.0;
        self.sum += x;
        self.squares += x * x;
    }
    fn mean(&self) -> f64 {
        self.sum / self.n.max(1.0)
    }
    fn variance(&self) -> f64 {
        (self.squares / self.n.max(1.0) - self.mean().powi(2)).max(0.0)
    }
}

impl Series {
    /// Empty bins over a run of about `span_us`.
    #[must_use]
    pub fn new(span_us: u64, instances: u32) -> Self {
        // A tail after the last arrival shares the last bin.
        let bin_us = (span_us.div_ceil(120)).max(1_000_000);
        let rows = if instances <= 256 { instances as usize } else { 0 };
        Self {
            bin_us,
            bins: Vec::new(),
            prefill_us: vec![Vec::new(); rows],
            prefill_load: Moments::default(),
            decode_load: Moments::default(),
            product: 0.0,
            tick: (u64::MAX, 0.0, 0.0, 0, 0),
        }
    }

    fn bin(&self, now_us: u64) -> usize {
        usize::try_from(now_us / self.bin_us).unwrap_or(usize::MAX).min(MAX_BINS - 1)
    }

    pub(crate) fn at(&mut self, now_us: u64) -> &mut Bin {
        let at = self.bin(now_us);
        if self.bins.len() <= at {
            self.bins.resize(at + 1, Bin::default());
        }
        &mut self.bins[at]
    }

    pub(crate) fn prefill(&mut self, now_us: u64, instance: u32, _tokens: u64, compute_us: u64) {
        let at = self.bin(now_us);
        if let Some(row) = self.prefill_us.get_mut(instance as usize) {
            if row.len() <= at {
                row.resize(at + 1, 0);
            }
            row[at] = row[at].saturating_add(u32::try_from(compute_us).unwrap_or(u32::MAX));
        }
    }

    /// Takes in one instance's load; samples of one moment form one point of the pools' loads.
    #[expect(clippy::cast_precision_loss, reason = "loads for a statistic")]
    pub(crate) fn sample(&mut self, now_us: u64, load: &LoadSample) {
        if self.tick.0 != now_us {
            self.close_tick();
            self.tick = (now_us, 0.0, 0.0, 0, 0);
        }
        if load.prefills {
            self.tick.1 += load.backlog_us as f64;
            self.tick.3 += 1;
        }
        if load.decodes {
            self.tick.2 += load.context_tokens as f64;
            self.tick.4 += 1;
        }
        let bin = self.at(now_us);
        bin.samples += 1;
        bin.backlog_us += load.backlog_us;
        bin.batch += u64::from(load.batch);
    }

    fn close_tick(&mut self) {
        let (_, backlog, context, prefills, decodes) = self.tick;
        if prefills > 0 && decodes > 0 {
            let (p, d) = (backlog / f64::from(prefills), context / f64::from(decodes));
            self.prefill_load.add(p);
            self.decode_load.add(d);
            self.product += p * d;
        }
    }

    /// How strongly prefill and decode load swing against each other: the geometric mean of their
    /// relative amplitudes, times their anticorrelation (0 when they do not move in antiphase).
    #[must_use]
    pub fn oscillation_index(&self) -> f64 {
        let (p, d) = (&self.prefill_load, &self.decode_load);
        let amplitude = (p.variance() * d.variance()).sqrt();
        if amplitude <= 0.0 || p.mean() <= 0.0 || d.mean() <= 0.0 {
            return 0.0;
        }
        let covariance = self.product / p.n - p.mean() * d.mean();
        let antiphase = (-covariance / amplitude).clamp(0.0, 1.0);
        antiphase * (amplitude / (p.mean() * d.mean())).sqrt()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn index(f: impl Fn(f64) -> (f64, f64)) -> f64 {
        let mut series = Series::new(1, 2);
        for t in 0..1000u32 {
            let (p, d) = f(f64::from(t) / 20.0);
            let sample = |instance, backlog: f64, context: f64| LoadSample {
                instance,
                backlog_us: backlog as u64,
                batch: 1,
                context_tokens: context as u64,
                step_us: 0,
                prefills: instance == 0,
                decodes: instance == 1,
            };
            series.sample(u64::from(t), &sample(0, p, 0.0));
            series.sample(u64::from(t), &sample(1, 0.0, d));
        }
        series.oscillation_index()
    }

    #[test]
    fn only_swings_in_antiphase_count() {
        let against = index(|t| (1e6 * (1.0 + t.sin()), 1e6 * (1.0 - t.sin())));
        let together = index(|t| (1e6 * (1.0 + t.sin()), 1e6 * (1.0 + t.sin())));
        let calm = index(|_| (1e6, 1e6));
        assert!(against > 0.6, "{against}");
        assert!(together.abs() < 1e-9 && calm.abs() < 1e-9);
    }

    #[test]
    fn bins_are_bounded() {
        let mut series = Series::new(10, 1);
        series.at(u64::MAX / 2).arrived += 1;
        assert_eq!(series.bins.len(), MAX_BINS);
    }
}
