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
}
