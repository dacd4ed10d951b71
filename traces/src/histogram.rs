//! Counts of whole numbers, exact up to a million and to a thousandth above, in bounded memory.

use serde::Serialize;

/// Values below this are counted one by one.
const EXACT: u64 = 1 << 20;
/// Above, every power of two is cut into this many parts.
const PARTS: u64 = 1 << 10;

/// How often each value came.
#[derive(Debug, Default, Clone)]
pub(crate) struct Histogram {
    exact: Vec<u64>,
    coarse: Vec<u64>,
    count: u64,
    sum: u128,
    least: Option<u64>,
    most: u64,
}

/// Mean and percentiles (nearest rank) of a column.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Default)]
pub struct Spread {
    /// Arithmetic mean.
    pub mean: f64,
    /// Smallest value.
    pub min: u64,
    /// 10th percentile.
    pub p10: u64,
    /// Median (50th percentile).
    pub p50: u64,
    /// 90th percentile.
    pub p90: u64,
    /// 95th percentile.
    pub p95: u64,
    /// 99th percentile.
    pub p99: u64,
    /// Largest value.
    pub max: u64,
}

impl Histogram {
    pub(crate) fn add(&mut self, value: u64) {
        self.add_times(value, 1);
    }

    pub(crate) fn add_times(&mut self, value: u64, times: u64) {
        if times == 0 {
            return;
        }
        let (counts, at) =
            if value < EXACT { (&mut self.exact, value) } else { (&mut self.coarse, coarse_index(value)) };
        let at = usize::try_from(at).expect("an index is below 2^20");
        if counts.len() <= at {
            counts.resize((at + 1).next_power_of_two(), 0);
        }
        counts[at] += times;
        self.count += times;
        self.sum += u128::from(value) * u128::from(times);
        self.least = Some(self.least.map_or(value, |least| least.min(value)));
        self.most = self.most.max(value);
    }

    #[expect(clippy::cast_precision_loss, reason = "a mean needs no more than 53 bits")]
    pub(crate) fn mean(&self) -> f64 {
        if self.count == 0 { 0.0 } else { self.sum as f64 / self.count as f64 }
    }

    /// The smallest value that at least `permille` / 1000 of all values do not exceed.
    pub(crate) fn percentile(&self, permille: u64) -> u64 {
        let wanted = (u128::from(self.count) * u128::from(permille)).div_ceil(1000).max(1);
        let mut so_far = 0u128;
        let exact = self.exact.iter().enumerate().map(|(at, n)| (at as u64, *n));
        let coarse = self.coarse.iter().enumerate().map(|(at, n)| (coarse_value(at as u64), *n));
        for (value, n) in exact.chain(coarse) {
            so_far += u128::from(n);
            if n > 0 && so_far >= wanted {
                return value.min(self.most);
            }
        }
        0
    }

    pub(crate) fn spread(&self) -> Spread {
        Spread {
            mean: self.mean(),
            min: self.least.unwrap_or(0),
            p10: self.percentile(100),
            p50: self.percentile(500),
            p90: self.percentile(900),
            p95: self.percentile(950),
            p99: self.percentile(990),
            max: self.most,
        }
    }
}

fn coarse_index(value: u64) -> u64 {
    let power = u64::from(value.ilog2());
    (power - 20) * PARTS + ((value - (1 << power)) >> (power - 10))
}

/// The largest value of a coarse part.
fn coarse_value(index: u64) -> u64 {
    let power = 20 + index / PARTS;
    let part = index % PARTS;
    (1u64 << power).saturating_add((part << (power - 10)) + ((1 << (power - 10)) - 1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn percentiles_are_those_of_the_sorted_list(
            mut values in proptest::collection::vec(prop_oneof![0u64..50, 0u64..3_000_000, any::<u64>()], 1..200),
            permille in 1u64..=1000,
        ) {
            let mut histogram = Histogram::default();
            values.iter().for_each(|v| histogram.add(*v));
            values.sort_unstable();
            let rank = (values.len() as u64 * permille).div_ceil(1000) as usize;
            let (got, wanted) = (histogram.percentile(permille), values[rank - 1]);
            prop_assert!(got >= wanted && got - wanted <= wanted >> 10, "{got} for {wanted}");
            let spread = histogram.spread();
            prop_assert_eq!(spread.min, values[0]);
            prop_assert_eq!(spread.max, values[values.len() - 1]);
        }
    }
}
