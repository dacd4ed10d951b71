//! How one link divides its rate among the flights on it: water-filling by weight.

use crate::network::NetworkConfig;
use crate::network::units::UNLIMITED;

/// Number of priorities.
pub(crate) const CLASSES: usize = crate::network::Priority::ALL.len();
/// Weights are counted in millionths, so that the floor can be met closely.
const WEIGHT_SCALE: u64 = 1_000_000;

/// The most that a flight of each class gets on a link, grains a nanosecond. A flight that can use
/// less takes less; [`UNLIMITED`] where no flight is held back by the link.
pub(crate) type Shares = [u64; CLASSES];

/// A flight that cannot use more than `cap`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CappedFlight {
    pub(crate) cap: u64,
    pub(crate) class: usize,
}

/// The weights of the classes and the floor of the lowest.
#[derive(Clone, Debug)]
pub(crate) struct SharingLaw {
    weights: [u64; CLASSES],
    floor_permille: u64,
}

impl SharingLaw {
    pub(crate) fn new(config: &NetworkConfig) -> Self {
        Self {
            weights: config.weights().map(|w| u64::from(w) * WEIGHT_SCALE),
            floor_permille: u64::from(config.floor_permille),
        }
    }

    /// The weight of one flight of each class where `counts` flights of each share a link: the
    /// configured one, but the lowest class present is lifted until it has its floor together.
    pub(crate) fn effective(&self, counts: &[u32; CLASSES]) -> [u64; CLASSES] {
        let mut weights = self.weights;
        let Some(lowest) = counts.iter().rposition(|&n| n > 0) else { return weights };
        let above: u64 = weights[..lowest].iter().zip(counts).map(|(&w, &n)| w * u64::from(n)).sum();
        let others_permille = 1_000 - self.floor_permille;
        let floor = (above * self.floor_permille).div_ceil(others_permille * u64::from(counts[lowest]));
        weights[lowest] = weights[lowest].max(floor);
        weights
    }

    /// Divides `rate` among `counts` flights of each class, of which `capped` can use only so
    /// much. The sum of what the flights then take is at most `rate`, and is `rate` (less rounding)
    /// unless all of them are content. The order of `capped` does not matter.
    pub(crate) fn divide(&self, rate: u64, counts: &[u32; CLASSES], capped: &mut [CappedFlight]) -> Shares {
        let weights = self.effective(counts);
        let mut rest = rate;
        let mut weight: u64 = weights.iter().zip(counts).map(|(&w, &n)| w * u64::from(n)).sum();
        let wide = |a: u64, b: u64| u128::from(a) * u128::from(b);
        capped.sort_unstable_by(|a, b| wide(a.cap, weights[b.class]).cmp(&wide(b.cap, weights[a.class])));
        for flight in capped.iter() {
            if wide(flight.cap, weight) > wide(rest, weights[flight.class]) {
                break;
            }
            rest -= flight.cap;
            weight -= weights[flight.class];
        }
        core::array::from_fn(|class| {
            if counts[class] == 0 || weight == 0 {
                return UNLIMITED;
            }
            u64::try_from(wide(rest, weights[class]) / u128::from(weight)).unwrap_or(UNLIMITED)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::vec::Vec;

    fn law(floor_permille: u32) -> SharingLaw {
        SharingLaw::new(&NetworkConfig { floor_permille, ..NetworkConfig::default() })
    }

    #[test]
    fn weights_divide_the_rate() {
        let shares = law(0).divide(24_000, &[1, 1, 0, 0], &mut []);
        assert_eq!(shares, [16_000, 8_000, UNLIMITED, UNLIMITED]);
    }

    #[test]
    fn the_lowest_class_has_its_floor_together() {
        // 16 hand-offs weigh 256, 4 offloads 4: 15 ‰ without the floor, 50 ‰ with it.
        let shares = law(50).divide(1_000_000, &[16, 0, 0, 4], &mut []);
        assert!((12_500..=12_501).contains(&shares[3]), "{shares:?}");
        assert!((59_374..=59_375).contains(&shares[0]), "{shares:?}");
        let alone = law(50).divide(1_000_000, &[0, 0, 0, 4], &mut []);
        assert_eq!(alone[3], 250_000);
    }

    #[test]
    fn what_a_capped_flight_leaves_goes_to_the_others() {
        let mut capped = [CappedFlight { cap: 100, class: 0 }];
        assert_eq!(law(0).divide(1_000, &[3, 0, 0, 0], &mut capped)[0], 450);
        let mut all = [CappedFlight { cap: 100, class: 0 }, CappedFlight { cap: 300, class: 0 }];
        assert_eq!(law(0).divide(1_000, &[2, 0, 0, 0], &mut all)[0], UNLIMITED);
        let mut tight = [CappedFlight { cap: 100, class: 0 }, CappedFlight { cap: 900, class: 0 }];
        assert_eq!(law(0).divide(600, &[2, 0, 0, 0], &mut tight)[0], 500);
    }

    #[test]
    fn a_stalled_link_gives_nothing() {
        let mut capped = [CappedFlight { cap: 0, class: 1 }, CappedFlight { cap: 5, class: 1 }];
        assert_eq!(law(50).divide(0, &[0, 2, 0, 0], &mut capped)[1], 0);
    }

    proptest! {
        #[test]
        fn nothing_is_taken_twice_and_nothing_wanted_is_left(
            rate in 0u64..1_000_000_000,
            flights in proptest::collection::vec((0usize..4, proptest::option::of(0u64..2_000_000)), 1..40),
            floor in 0u32..=500,
        ) {
            let mut counts = [0u32; CLASSES];
            let mut capped = Vec::new();
            for &(class, cap) in &flights {
                counts[class] += 1;
                capped.extend(cap.map(|cap| CappedFlight { cap, class }));
            }
            let law = law(floor);
            let shares = law.divide(rate, &counts, &mut capped.clone());
            capped.reverse();
            prop_assert_eq!(shares, law.divide(rate, &counts, &mut capped), "order does not matter");
            let take = |&(class, cap): &(usize, Option<u64>)| cap.unwrap_or(UNLIMITED).min(shares[class]);
            let taken: u64 = flights.iter().map(take).sum();
            prop_assert!(taken <= rate);
            let content = flights.iter().all(|f| f.1 == Some(take(f)));
            prop_assert!(content || taken + flights.len() as u64 > rate, "{} of {}", taken, rate);
            let lowest = counts.iter().rposition(|&n| n > 0).unwrap();
            let theirs = u128::from(shares[lowest]) * u128::from(counts[lowest]);
            let due = u128::from(rate) * u128::from(floor) / 1_000;
            prop_assert!(theirs + u128::from(counts[lowest]) >= due, "{} < {}", theirs, due);
            prop_assert!(lowest == 3 || floor > 0 || shares.is_sorted_by(|a, b| a >= b || *b == UNLIMITED));
        }
    }
}
