//! Benchmarks of the store, beside the machine's own speed in the same run. `baton store bench` and the crate's
//! benchmark run them.

mod copies;
mod metadata;
mod pressure;
mod socket;

use std::time::{Duration, Instant};

pub use copies::copies;
pub use metadata::metadata;
pub use pressure::pressure;
pub use socket::socket;

/// How much is measured.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// Memory of each store, bytes.
    pub memory_bytes: u64,
    /// Time for each figure.
    pub each: Duration,
}

/// One figure.
#[derive(Clone, Debug, PartialEq)]
pub struct Figure {
    /// The operation measured.
    pub what: String,
    /// The quantity counted: the unit last.
    pub unit: &'static str,
    /// The figure's value.
    pub value: f64,
    /// The bar that it should keep, if there is one.
    pub bar: Option<Bar>,
}

/// A bar.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Bar {
    /// This or more.
    Least(f64),
    /// This or less.
    Most(f64),
}

impl Figure {
    fn new(what: impl Into<String>, unit: &'static str, value: f64) -> Self {
        Self { what: what.into(), unit, value, bar: None }
    }

    fn least(mut self, bar: f64) -> Self {
        self.bar = Some(Bar::Least(bar));
        self
    }

    fn most(mut self, bar: f64) -> Self {
        self.bar = Some(Bar::Most(bar));
        self
    }

    /// Whether the figure keeps its bar; one without always does.
    #[must_use]
    pub fn holds(&self) -> bool {
        match self.bar {
            Some(Bar::Least(bar)) => self.value >= bar,
            Some(Bar::Most(bar)) => self.value <= bar,
            None => true,
        }
    }
}

/// The value below which `permille` of the samples are. Sorts them.
#[expect(clippy::cast_precision_loss, reason = "figures for a report")]
fn percentile_us(samples_ns: &mut [u64], permille: usize) -> f64 {
    samples_ns.sort_unstable();
    let at = (samples_ns.len() * permille / 1000).min(samples_ns.len().saturating_sub(1));
    samples_ns.get(at).map_or(f64::NAN, |ns| *ns as f64 / 1_000.0)
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Processor time of this thread so far: what others on the machine do does not count. Ticks of a few ms.
fn cpu_ns() -> u64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    text.split_whitespace().next().and_then(|ns| ns.parse().ok()).unwrap_or(0)
}

fn elapsed_ns(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_judged_by_their_bars() {
        let figure = |value| Figure::new("x", "us", value);
        assert!(figure(1.0).holds() && figure(1.0).least(1.0).holds() && figure(1.0).most(1.0).holds());
        assert!(!figure(0.9).least(1.0).holds() && !figure(1.1).most(1.0).holds());
        assert!(!figure(f64::NAN).least(1.0).holds(), "nothing measured keeps no bar");
        let mut samples: Vec<u64> = (1..=1000).rev().map(|n| n * 1_000).collect();
        assert!((percentile_us(&mut samples, 990) - 991.0).abs() < 0.1);
        assert!((median(&mut [3.0, 1.0, 2.0]) - 2.0).abs() < 1e-9);
    }

    #[test]
    fn every_measurement_measures_something() {
        let effort = Effort { memory_bytes: 160 << 20, each: Duration::from_millis(20) };
        let mut reports = Vec::new();
        let mut report = |what: &str| reports.push(what.to_owned());
        let all = [
            copies(effort, &mut report),
            metadata(effort, &mut report),
            pressure(effort, &mut report),
            socket(effort, &mut report),
        ];
        for figures in all {
            let figures = figures.unwrap();
            assert!(
                figures.iter().all(|figure| figure.value.is_finite() && figure.value > 0.0),
                "{figures:?}"
            );
        }
        assert!(reports.len() >= 8, "{reports:?}");
    }
}
