//! Intervals over time blocks: how far a figure of a run would move if other stretches of time had come.
//!
//! Requests that arrive together share queues and caches, so they are no independent samples. Stretches of time that are
//! longer than a queue lasts nearly are: the bootstrap draws whole blocks of time (Künsch 1989), the same ones for both
//! sides of a comparison.

use baton_types::Rng;
use serde::Serialize;

use crate::metrics::{Bin, Series};

/// Blocks of time that a run is cut into.
pub const BLOCKS: usize = 12;
/// Draws of a bootstrap.
const DRAWS: usize = 2_000;

/// A figure with the bounds that hold 95 % of its draws.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct FigureInterval {
    /// The figure of all blocks, each once.
    pub figure: f64,
    /// Lower bound.
    pub low: f64,
    /// Upper bound.
    pub high: f64,
}

impl FigureInterval {
    /// Whether zero lies outside the bounds: a difference is more than chance.
    #[must_use]
    pub fn excludes_zero(&self) -> bool {
        self.low > 0.0 || self.high < 0.0
    }
}

/// The interval of a figure that `statistic` makes of drawn blocks, which are given by number and may repeat. Draws of
/// which it makes none, since nothing is in them, are left out; where nothing is in any, the figure is 0.
#[must_use]
pub fn bootstrap(blocks: usize, seed: u64, statistic: impl Fn(&[usize]) -> Option<f64>) -> FigureInterval {
    let all: Vec<usize> = (0..blocks).collect();
    let figure = statistic(&all).unwrap_or(0.0);
    let mut rng = Rng::fork(seed, 0x626c_6f63);
    let mut drawn = all;
    let mut figures: Vec<f64> = (0..DRAWS)
        .filter_map(|_| {
            drawn.fill_with(|| usize::try_from(rng.below(blocks.max(1) as u64)).expect("a block's number"));
            statistic(&drawn)
        })
        .collect();
    figures.sort_by(f64::total_cmp);
    let tail = figures.len() / 40;
    let low = figures.get(tail).copied().unwrap_or(figure);
    let high = figures.iter().rev().nth(tail).copied().unwrap_or(figure);
    FigureInterval { figure, low, high }
}

/// Sum of `parts` over sum of `wholes` in the drawn blocks; none where there is nothing.
#[must_use]
pub fn ratio(drawn: &[usize], parts: &[f64], wholes: &[f64]) -> Option<f64> {
    let sum = |of: &[f64]| drawn.iter().map(|block| of[*block]).sum::<f64>();
    let whole = sum(wholes);
    (whole > 0.0).then(|| sum(parts) / whole)
}

/// The share in SLO of `one` less that of `other`, over the blocks of time that both ran through.
#[must_use]
pub fn difference(one: &Series, other: &Series, seed: u64) -> FigureInterval {
    let span_us = span_us(one).max(span_us(other)).max(1);
    let (one, other) = (blocks(one, span_us), blocks(other, span_us));
    let gains: Vec<f64> = one.iter().zip(&other).map(|(a, b)| a.0 - b.0).collect();
    let arrived: Vec<f64> = one.iter().map(|block| block.1).collect();
    bootstrap(BLOCKS, seed, |drawn| ratio(drawn, &gains, &arrived))
}

/// Time to the end of the last bin with an arrival.
fn span_us(series: &Series) -> u64 {
    let last = series.bins.iter().rposition(|bin| bin.arrived > 0);
    last.map_or(0, |at| (at as u64 + 1) * series.bin_us)
}

/// Requests in SLO and requests that arrived, by block of time.
#[expect(clippy::cast_precision_loss, reason = "counts for a statistic")]
fn blocks(series: &Series, span_us: u64) -> Vec<(f64, f64)> {
    let mut blocks = vec![(0.0, 0.0); BLOCKS];
    for (at, Bin { in_slo, arrived, .. }) in series.bins.iter().enumerate() {
        let block = &mut blocks[block_of(at as u64 * series.bin_us, span_us)];
        *block = (block.0 + *in_slo as f64, block.1 + *arrived as f64);
    }
    blocks
}

/// The block of a moment; what comes after the span is of the last.
#[must_use]
pub fn block_of(at_us: u64, span_us: u64) -> usize {
    let block = u128::from(at_us) * BLOCKS as u128 / u128::from(span_us.max(1));
    usize::try_from(block).unwrap_or(BLOCKS).min(BLOCKS - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every way to draw three blocks of three, each equally likely.
    fn all_draws() -> Vec<[usize; 3]> {
        (0..27).map(|n| [n / 9, n / 3 % 3, n % 3]).collect()
    }

    #[test]
    fn the_bounds_are_those_of_all_draws() {
        let (parts, wholes) = ([10.0, 40.0, 90.0], [100.0, 50.0, 100.0]);
        let interval = bootstrap(3, 7, |drawn| ratio(drawn, &parts, &wholes));
        let mut exact: Vec<f64> =
            all_draws().iter().filter_map(|draw| ratio(draw, &parts, &wholes)).collect();
        exact.sort_by(f64::total_cmp);
        // A 40th of 27 draws is less than one of them: the least and the greatest are in the tails.
        assert_eq!((interval.low, interval.high), (exact[0], exact[26]));
        assert!((interval.figure - 140.0 / 250.0).abs() < 1e-12);
        assert_eq!(interval, bootstrap(3, 7, |drawn| ratio(drawn, &parts, &wholes)), "a seed, one answer");
    }

    #[test]
    fn draws_with_nothing_in_them_are_left_out() {
        let (parts, wholes) = ([0.0, 40.0, 0.0], [0.0, 50.0, 0.0]);
        let once = bootstrap(3, 7, |drawn| ratio(drawn, &parts, &wholes));
        assert_eq!(once, FigureInterval { figure: 0.8, low: 0.8, high: 0.8 });
        let never = bootstrap(3, 7, |drawn| ratio(drawn, &[0.0; 3], &[0.0; 3]));
        assert_eq!(never, FigureInterval { figure: 0.0, low: 0.0, high: 0.0 });
    }

    #[test]
    fn many_blocks_come_to_the_error_of_a_mean() {
        // Independent values: 1.96 standard errors on each side of the mean.
        let mut rng = Rng::new(3);
        let values: Vec<f64> = (0..400).map(|_| rng.unit()).collect();
        let ones = vec![1.0; values.len()];
        let interval = bootstrap(values.len(), 1, |drawn| ratio(drawn, &values, &ones));
        let mean = values.iter().sum::<f64>() / 400.0;
        let variance = values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / 400.0;
        let error = 1.96 * (variance / 400.0).sqrt();
        assert!((interval.figure - mean).abs() < 1e-12);
        assert!(((interval.high - interval.low) / (2.0 * error) - 1.0).abs() < 0.1, "{interval:?}");
    }

    #[test]
    fn a_difference_in_every_block_is_more_than_chance_and_one_in_a_single_block_is_not() {
        let series = |in_slo: &dyn Fn(u64) -> u64| {
            let mut series = Series::new(120_000_000, 1);
            for second in 0..120 {
                let bin = series.at(second * 1_000_000);
                (bin.arrived, bin.in_slo) = (10, in_slo(second));
            }
            series
        };
        let (all, most) = (series(&|_| 10), series(&|_| 9));
        let steady = difference(&all, &most, 1);
        assert!((steady.figure - 0.1).abs() < 1e-12 && steady.excludes_zero(), "{steady:?}");
        let once = difference(&all, &series(&|second| if second < 10 { 0 } else { 10 }), 1);
        assert!(once.figure > 0.0 && !once.excludes_zero(), "{once:?}");
        assert!(!difference(&all, &all, 1).excludes_zero());
    }

    #[test]
    fn every_moment_has_its_block() {
        assert_eq!([0, 99, 100, 1199, 1200, u64::MAX].map(|at| block_of(at, 1200)), [0, 0, 1, 11, 11, 11]);
        assert_eq!(block_of(5, 0), BLOCKS - 1);
    }
}
