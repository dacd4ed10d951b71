//! Maps by a block's short name.

use baton_types::BlockHash;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// A map by short name. Short names are keyed hashes already, so nobody outside can choose them
/// to collide; the product only spreads those that a test numbers by hand.
pub(crate) type ShortNameMap<T> = HashMap<BlockHash, T, BuildHasherDefault<Spread>>;

/// Hashes a 64-bit number.
#[derive(Default)]
pub(crate) struct Spread(u64);

impl Hasher for Spread {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(self.0.rotate_left(8) ^ u64::from(byte));
        }
    }

    fn write_u64(&mut self, number: u64) {
        let product = number.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        self.0 = product ^ (product >> 32);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_next_to_each_other_are_spread() {
        let of = |number: u64| {
            let mut spread = Spread::default();
            spread.write_u64(number);
            spread.finish()
        };
        let tops: std::collections::BTreeSet<_> = (0..128).map(|number| of(number) >> 57).collect();
        assert!(tops.len() > 64, "{}", tops.len());
    }
}
