//! Names of blocks as RFC 1527 recommends them: XXH3-64 of a block's tokens, rolled into that of the chain.
//!
//! Following an engine needs none of them ([`Mirror`](crate::Mirror) goes by tokens and parents): they are for
//! publishing, and for indexes of what was published.

use xxhash_rust::xxh3::{Xxh3, xxh3_64_with_seed};

/// A chain of standard hashes.
///
/// A block's own hash is XXH3-64 of its tokens as little-endian words under the seed. The first block of a chain
/// is named by it; each later one by XXH3-64 of its parent's name and its own hash, both little endian.
#[derive(Clone, Debug)]
pub struct Rolling {
    seed: u64,
    parent: Option<u64>,
}

impl Rolling {
    /// A chain that starts with the next block.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self { seed, parent: None }
    }

    /// A chain that goes on after `parent`.
    #[must_use]
    pub const fn after(seed: u64, parent: u64) -> Self {
        Self { seed, parent: Some(parent) }
    }

    /// The name of the next block, whose content is `tokens`.
    pub fn push(&mut self, tokens: &[u32]) -> u64 {
        let mut state = Xxh3::with_seed(self.seed);
        tokens.iter().for_each(|token| state.update(&token.to_le_bytes()));
        let local = state.digest();
        let name = match self.parent {
            None => local,
            Some(parent) => {
                let mut pair = [0; 16];
                pair[..8].copy_from_slice(&parent.to_le_bytes());
                pair[8..].copy_from_slice(&local.to_le_bytes());
                xxh3_64_with_seed(&pair, self.seed)
            }
        };
        self.parent = Some(name);
        name
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chain_is_what_the_definition_says() {
        let bytes: Vec<u8> = [1u32, 2, 3, 4].iter().flat_map(|token| token.to_le_bytes()).collect();
        let (first, second) = (xxh3_64_with_seed(&bytes[..8], 9), xxh3_64_with_seed(&bytes[8..], 9));
        let joined = [first.to_le_bytes(), second.to_le_bytes()].concat();
        let mut chain = Rolling::new(9);
        assert_eq!(chain.push(&[1, 2]), first);
        assert_eq!(chain.push(&[3, 4]), xxh3_64_with_seed(&joined, 9));
        assert_eq!(Rolling::after(9, first).push(&[3, 4]), xxh3_64_with_seed(&joined, 9));
        assert_ne!(Rolling::new(8).push(&[1, 2]), first, "the seed is part of the name");
    }

    #[test]
    fn names_are_those_of_another_implementation_of_xxh3() {
        // Computed with Python's xxhash 3.x: xxh3_64_intdigest over the same bytes.
        let mut chain = Rolling::new(0);
        assert_eq!(
            (chain.push(&[1, 2, 3, 4]), chain.push(&[5, 6, 7, 8])),
            (0x6fc1_ebd4_f4d6_ea31, 0x3a14_937f_d534_0c7a)
        );
        let mut seeded = Rolling::new(42);
        assert_eq!(
            (seeded.push(&[1, 2, 3, 4]), seeded.push(&[5, 6, 7, 8])),
            (0xcabc_6cf2_91a3_ba46, 0x1c4c_b0b7_5e17_05ce)
        );
    }
}
