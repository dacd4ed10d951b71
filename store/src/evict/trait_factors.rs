//! How much each trait of a class raises or lowers its rate of return, corrected for the other traits.
//!
//! There are too many classes to learn each from scratch: most see few requests. So the rate of
//! return of a class at an age is first taken to be the usual one at that age times one factor for
//! each of its traits. The factors are fitted to what was seen by scaling them, one trait after the
//! other, until the returns expected of all who share a value are those that were counted.

use super::ages::CELLS;
use super::chance::{CLASSES, ClassStats};

/// Values that the traits of a class have: uses, blocks that were new, length of the chain.
pub(crate) const VALUES: [usize; 3] = [4, 6, 5];
const TRAITS: usize = VALUES.len();
const MOST_VALUES: usize = 6;
/// Spans of age that have their own factors: below half a minute, below three minutes, beyond.
pub(super) const SPANS: usize = 3;
/// Pseudo-count added to both counted and expected returns, so that few samples change a factor little.
const IMAGINED: f64 = 100.0;
/// Bounds of a factor: 1 / `MOST` to `MOST`.
const MOST: f64 = 64.0;

const _: () = assert!(CLASSES == VALUES[0] * VALUES[1] * VALUES[2], "every class has its number");

/// The factors.
#[derive(Debug)]
pub(super) struct TraitFactors {
    factors: [[[f64; MOST_VALUES]; SPANS]; TRAITS],
}

/// The number of the class of these values.
pub(crate) const fn class_of(values: [usize; 3]) -> usize {
    (values[2] * VALUES[1] + values[1]) * VALUES[0] + values[0]
}

/// The values of a class.
pub(crate) const fn values_of(class: usize) -> [usize; 3] {
    [class % VALUES[0], class / VALUES[0] % VALUES[1], class / (VALUES[0] * VALUES[1])]
}

/// The span of a cell.
pub(super) const fn span_of(cell: usize) -> usize {
    match cell {
        0..10 => 0,
        10..15 => 1,
        _ => 2,
    }
}

impl TraitFactors {
    /// All classes are alike.
    pub(super) const fn new() -> Self {
        Self { factors: [[[1.0; MOST_VALUES]; SPANS]; TRAITS] }
    }

    /// How many times as often as usual a block of `class` returns, in each span of age.
    pub(super) fn times_usual(&self, class: usize) -> [f64; SPANS] {
        let values = values_of(class);
        core::array::from_fn(|span| {
            self.factors.iter().zip(values).map(|(of, value)| of[span][value]).product()
        })
    }

    /// Scales every trait's factors once to what was `seen`; `usual` is the rate of all.
    pub(super) fn fit(&mut self, seen: &[ClassStats; CLASSES], usual: &[f64; CELLS]) {
        for fitted in 0..TRAITS {
            let mut counted = [[IMAGINED; MOST_VALUES]; SPANS];
            let mut expected = counted;
            for (class, seen) in seen.iter().enumerate().filter(|(_, seen)| seen.rested) {
                let value = values_of(class)[fitted];
                let times = self.times_usual(class);
                for (cell, usual) in usual.iter().enumerate() {
                    let span = span_of(cell);
                    counted[span][value] += f64::from(seen.returns[cell]);
                    #[expect(clippy::cast_precision_loss, reason = "a count of ticks as a weight")]
                    let ticks = seen.waited[cell] as f64;
                    expected[span][value] += times[span] * usual * ticks;
                }
            }
            for (span, factors) in self.factors[fitted].iter_mut().enumerate() {
                for (value, factor) in factors.iter_mut().enumerate() {
                    let scale = counted[span][value] / expected[span][value];
                    *factor = (*factor * scale).clamp(1.0 / MOST, MOST);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;

    #[test]
    fn a_class_has_the_values_that_it_was_made_of() {
        for class in 0..CLASSES {
            let values = values_of(class);
            assert_eq!(class_of(values), class);
            assert!(values.iter().zip(VALUES).all(|(value, all)| *value < all));
        }
    }

    /// Rates that are products of one factor for each trait are found, also for a class unseen.
    #[test]
    fn it_finds_what_each_trait_says() {
        let (uses, lens) = ([0.5, 1.0, 2.0, 3.0], [1.0, 0.25, 1.5, 1.0, 1.0]);
        let rate = |class: usize| uses[values_of(class)[0]] * lens[values_of(class)[2]] / 1000.0;
        let mut seen = vec![ClassStats::NOTHING; CLASSES];
        let left_out = class_of([3, 2, 1]);
        let (mut returns, mut ticks) = (0.0, 0.0);
        for (class, seen) in seen.iter_mut().enumerate().filter(|(class, _)| *class != left_out) {
            // Not all alike: who is used more is also seen less.
            let waited = 8_000_000 / (1 + values_of(class)[0] as u64);
            seen.rested = true;
            (seen.waited[12], seen.returns[12]) = (waited, (waited as f64 * rate(class)) as u32);
            returns += f64::from(seen.returns[12]);
            ticks += waited as f64;
        }
        let seen: &[ClassStats; CLASSES] = seen.first_chunk().expect("as many");
        let mut usual = [0.0; CELLS];
        usual[12] = returns / ticks;
        let mut factors = TraitFactors::new();
        (0..20).for_each(|_| factors.fit(seen, &usual));
        for class in 0..CLASSES {
            let told = factors.times_usual(class)[1] * usual[12];
            assert!((told / rate(class) - 1.0).abs() < 0.05, "{:?} {told}", values_of(class));
        }
        assert!((factors.times_usual(7)[0] - 1.0).abs() < 1e-9, "nothing was seen at that age");
    }

    #[test]
    fn few_returns_say_little_and_none_say_no_more_than_the_bound() {
        let mut seen = [ClassStats::NOTHING; CLASSES];
        seen[0].rested = true;
        (seen[0].waited[2], seen[0].returns[2]) = (1000, 10);
        let mut usual = [0.0; CELLS];
        usual[2] = 0.001;
        let mut factors = TraitFactors::new();
        factors.fit(&seen, &usual);
        assert!((1.0..1.4).contains(&factors.times_usual(0)[0]), "{}", factors.times_usual(0)[0]);
        seen[0].waited[2] = 1 << 50;
        (0..50).for_each(|_| factors.fit(&seen, &usual));
        assert!(factors.times_usual(0)[0] > 0.0);
        seen[0].waited[2] = 0;
        seen[0].returns[2] = u32::MAX;
        (0..50).for_each(|_| factors.fit(&seen, &usual));
        assert!(factors.times_usual(0)[0] <= MOST * MOST * MOST);
    }
}
