//! A small seeded generator, for the pure cores: equal seeds give equal streams on every machine.

use serde::{Deserialize, Serialize};

/// SplitMix64 (Steele, Lea, Flood 2014): 64 bits of state, enough for tie-breaks and faults.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rng {
    state: u64,
}

impl Rng {
    /// A generator whose whole stream follows from `seed`.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self { state: seed }
    }

    /// A generator for one purpose, independent of others drawn from the same seed.
    #[must_use]
    pub fn fork(seed: u64, purpose: u64) -> Self {
        let mut rng = Self::new(seed ^ purpose.wrapping_mul(0xD6E8_FEB8_6659_FD93));
        rng.next_u64();
        rng
    }

    /// The next 64 random bits.
    pub const fn next_u64(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number in `0..bound`; 0 when `bound` is 0. The bias is below 2⁻³² for bounds under 2³².
    pub const fn below(&mut self, bound: u64) -> u64 {
        ((self.next_u64() as u128 * bound as u128) >> 64) as u64
    }

    /// A number in `[0, 1)` with 53 bits.
    #[expect(clippy::cast_precision_loss, reason = "53 bits fit an f64 exactly")]
    pub const fn unit(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// True with probability `permille` / 1000.
    pub const fn chance_permille(&mut self, permille: u32) -> bool {
        self.below(1000) < permille as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stream_is_the_published_one() {
        // First outputs of SplitMix64 seeded with 1234567 (reference values of the public-domain C code).
        let mut rng = Rng::new(1_234_567);
        assert_eq!(rng.next_u64(), 6_457_827_717_110_365_317);
        assert_eq!(rng.next_u64(), 3_203_168_211_198_807_973);
    }

    #[test]
    fn below_stays_below_and_reaches_every_value() {
        let mut rng = Rng::new(3);
        let mut seen = [false; 7];
        for _ in 0..500 {
            seen[usize::try_from(rng.below(7)).expect("small")] = true;
        }
        assert!(seen.iter().all(|&s| s));
        assert_eq!(rng.below(0), 0);
    }

    #[test]
    fn forks_differ_and_repeat() {
        assert_ne!(Rng::fork(1, 1).next_u64(), Rng::fork(1, 2).next_u64());
        assert_eq!(Rng::fork(1, 2).next_u64(), Rng::fork(1, 2).next_u64());
        let mut rng = Rng::new(9);
        assert!((0..1000).all(|_| (0.0..1.0).contains(&rng.unit())));
        assert!(!rng.chance_permille(0) && rng.chance_permille(1000));
    }

    #[test]
    fn values_are_even_and_so_are_their_bits() {
        let mut rng = Rng::new(11);
        let mut counts = [0u32; 10];
        let mut bits = [0u32; 64];
        for _ in 0..20_000 {
            counts[usize::try_from(rng.below(10)).expect("small")] += 1;
            let value = rng.next_u64();
            bits.iter_mut().enumerate().for_each(|(at, count)| *count += u32::from(value >> at & 1 == 1));
        }
        // 2,000 expected in each, the standard deviation is 42; 10,000 for a bit, with 71.
        assert!(counts.iter().all(|c| (1_800..2_200).contains(c)), "{counts:?}");
        assert!(bits.iter().all(|c| (9_600..10_400).contains(c)), "{bits:?}");
    }

    #[test]
    fn chances_come_true_as_often_as_they_say() {
        for permille in [10, 250, 900] {
            let mut rng = Rng::fork(5, u64::from(permille));
            let hits = (0..20_000).filter(|_| rng.chance_permille(permille)).count();
            let expected = permille as usize * 20;
            assert!(hits.abs_diff(expected) < 300, "{hits} of {expected}");
        }
        let mut rng = Rng::new(1);
        let mean = (0..20_000).map(|_| rng.unit()).sum::<f64>() / 20_000.0;
        assert!((mean - 0.5).abs() < 0.01, "{mean}");
    }

    #[test]
    fn streams_of_different_purposes_do_not_run_in_step() {
        for purpose in 1..20u64 {
            let (mut one, mut two) = (Rng::fork(9, 0), Rng::fork(9, purpose));
            let equal = (0..200).filter(|_| one.below(16) == two.below(16)).count();
            // One in sixteen agrees by chance: 12.5 of 200.
            assert!(equal < 35, "purpose {purpose}: {equal} of 200");
            let mut shifted = Rng::fork(9, purpose);
            let own: [u64; 4] = core::array::from_fn(|_| shifted.next_u64());
            let mut base = Rng::fork(9, 0);
            assert!((0..500).all(|_| !own.contains(&base.next_u64())), "one stream is a part of the other");
        }
    }
}
