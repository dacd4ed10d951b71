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
    /// Moments at which loads were sampled.
    pub ticks: u64,
    /// Loads sampled: one of each living instance at each tick.
    pub samples: u64,
    /// Sum of sampled prefill backlog, µs.
    pub backlog_us: u64,
    /// Sum of sampled decode batch sizes.
    pub batch: u64,
}

impl Bin {
    /// Neighbouring bins as one.
    #[must_use]
    pub fn sum(bins: &[Self]) -> Self {
        bins.iter().fold(Self::default(), |a, b| Self {
            arrived: a.arrived + b.arrived,
            completed: a.completed + b.completed,
            in_slo: a.in_slo + b.in_slo,
            rejected: a.rejected + b.rejected,
            ttft_us: a.ttft_us + b.ttft_us,
            hit_blocks: a.hit_blocks + b.hit_blocks,
            blocks: a.blocks + b.blocks,
            ticks: a.ticks + b.ticks,
            samples: a.samples + b.samples,
            backlog_us: a.backlog_us + b.backlog_us,
            batch: a.batch + b.batch,
        })
    }
}

/// Adds to one bin of an instance's row.
fn add(row: &mut Vec<u32>, at: usize, us: u64) {
    if row.len() <= at {
        row.resize(at + 1, 0);
    }
    row[at] = row[at].saturating_add(u32::try_from(us).unwrap_or(u32::MAX));
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
    /// Sum of each instance's sampled decode step times in each bin, µs: `[instance][bin]`. Over the
    /// bin's `ticks` it is the mean; an idle or lost instance counts as 0.
    pub decode_step_us: Vec<Vec<u32>>,
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
        let bin_us = (span_us.div_ceil(120)).max(1_000_000);
        let rows = if instances <= 256 { instances as usize } else { 0 };
        Self {
            bin_us,
            bins: Vec::new(),
            prefill_us: vec![Vec::new(); rows],
            decode_step_us: vec![Vec::new(); rows],
            prefill_load: Moments::default(),
            decode_load: Moments::default(),
            product: 0.0,
            tick: (u64::MAX, 0.0, 0.0, 0, 0),
        }
    }

    /// The bin of a moment. A run that outlasts its bins gets bins of twice the width.
    fn bin(&mut self, now_us: u64) -> usize {
        while now_us / self.bin_us >= MAX_BINS as u64 {
            self.widen();
        }
        usize::try_from(now_us / self.bin_us).expect("less than MAX_BINS")
    }

    fn widen(&mut self) {
        self.bin_us = self.bin_us.saturating_mul(2);
        self.bins = self.bins.chunks(2).map(Bin::sum).collect();
        for row in self.prefill_us.iter_mut().chain(&mut self.decode_step_us) {
            *row = row
                .chunks(2)
                .map(|pair| pair.iter().fold(0, |sum: u32, us| sum.saturating_add(*us)))
                .collect();
        }
    }

    pub(crate) fn at(&mut self, now_us: u64) -> &mut Bin {
        let at = self.bin(now_us);
        if self.bins.len() <= at {
            self.bins.resize(at + 1, Bin::default());
        }
        &mut self.bins[at]
    }

    /// Takes in a prefill that ended now: its time counts in the bins in which it was spent.
    pub(crate) fn prefill(&mut self, now_us: u64, instance: u32, _tokens: u64, compute_us: u64) {
        let mut at = self.bin(now_us);
        let bin_us = self.bin_us;
        let Some(row) = self.prefill_us.get_mut(instance as usize) else { return };
        let (mut end_us, mut left_us) = (now_us, compute_us);
        loop {
            let start_us = at as u64 * bin_us;
            let here_us = if at == 0 { left_us } else { left_us.min(end_us - start_us) };
            add(row, at, here_us);
            left_us -= here_us;
            if left_us == 0 {
                return;
            }
            (end_us, at) = (start_us, at - 1);
        }
    }

    /// Takes in one instance's load; samples of one moment form one point of the pools' loads.
    #[expect(clippy::cast_precision_loss, reason = "loads for a statistic")]
    pub(crate) fn sample(&mut self, now_us: u64, load: &LoadSample) {
        if self.tick.0 != now_us {
            self.close_tick();
            self.tick = (now_us, 0.0, 0.0, 0, 0);
            self.at(now_us).ticks += 1;
        }
        if load.prefills {
            self.tick.1 += load.backlog_us as f64;
            self.tick.3 += 1;
        }
        if load.decodes {
            self.tick.2 += load.context_tokens as f64;
            self.tick.4 += 1;
        }
        let at = self.bin(now_us);
        if let Some(row) = self.decode_step_us.get_mut(load.instance as usize).filter(|_| load.batch > 0) {
            add(row, at, load.step_us);
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
        for t in 0..2000u64 {
            series.at(t * 1_000_000).arrived += 1;
            series.prefill(t * 1_000_000, 0, 0, 500_000);
        }
        assert!(series.bins.len() <= MAX_BINS && series.prefill_us[0].len() <= MAX_BINS);
        assert_eq!(series.bin_us, 8_000_000, "bins of a second widened three times");
        assert!(
            series.bins[1..series.bins.len() - 1].iter().all(|b| b.arrived == 8),
            "rates stay comparable"
        );
        assert_eq!(series.bins.iter().map(|b| b.arrived).sum::<u64>(), 2000, "widening loses nothing");
        assert_eq!(series.prefill_us[0].iter().map(|us| u64::from(*us)).sum::<u64>(), 1_000_000_000);
        series.at(u64::MAX / 2).arrived += 1;
        assert!(series.bins.len() <= MAX_BINS);
    }

    #[test]
    fn a_prefill_counts_where_its_time_was_spent() {
        let mut series = Series::new(1, 1);
        series.prefill(3_250_000, 0, 0, 2_000_000);
        assert_eq!(series.prefill_us[0], [0, 750_000, 1_000_000, 250_000]);
        // Time that would lie before the start of the run counts in the first bin.
        series.prefill(100_000, 0, 0, 300_000);
        assert_eq!(series.prefill_us[0][0], 300_000);
        series.prefill(1, 9, 0, 5);
    }

    #[test]
    fn decode_steps_are_sums_over_ticks() {
        let mut series = Series::new(1, 2);
        let sample = |instance, batch, step_us| LoadSample {
            instance,
            backlog_us: 0,
            batch,
            context_tokens: 1,
            step_us,
            prefills: false,
            decodes: true,
        };
        for t in 0..4 {
            series.sample(t * 100, &sample(0, 1, 40));
            series.sample(t * 100, &sample(1, 0, 99));
        }
        assert_eq!((series.bins[0].ticks, series.bins[0].samples), (4, 8));
        assert_eq!(series.decode_step_us[0], [160]);
        assert!(series.decode_step_us[1].is_empty(), "an instance without a batch takes no steps");
    }
}
