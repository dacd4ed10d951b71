//! A hash of names that is the same on every machine.

use core::hash::Hasher;

/// A fixed mix of a 64-bit name, the same on every machine.
#[derive(Clone, Copy, Default)]
pub(crate) struct Mix(u64);

impl Hasher for Mix {
    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(u64::from(byte));
        }
    }

    fn write_u64(&mut self, value: u64) {
        let mixed = (self.0 ^ value).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        self.0 = mixed ^ (mixed >> 32);
    }

    fn finish(&self) -> u64 {
        self.0.wrapping_mul(0xD6E8_FEB8_6659_FD93).rotate_left(29)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dense_and_strided_names_spread_over_both_ends_of_the_hash() {
        for stride in [1u64, 1 << 16, 1 << 32] {
            let (mut low, mut high) = ([0u32; 64], [0u32; 64]);
            for i in 0..6_400u64 {
                let mut hasher = Mix::default();
                hasher.write_u64(i * stride);
                let hash = hasher.finish();
                low[(hash % 64) as usize] += 1;
                high[(hash >> 58) as usize] += 1;
            }
            assert!(low.iter().chain(&high).all(|&n| n < 300), "stride {stride}: {low:?} {high:?}");
        }
    }

    #[test]
    fn bytes_and_words_are_both_hashed() {
        let (mut a, mut b) = (Mix::default(), Mix::default());
        a.write(&[1, 2]);
        b.write(&[2, 1]);
        assert_ne!(a.finish(), b.finish());
    }
}
