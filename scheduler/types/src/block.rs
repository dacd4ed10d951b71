//! KV blocks: fixed runs of prompt tokens, named by a hash of everything up to their end (I1).

use serde::{Deserialize, Serialize};

/// The 64-bit short name of a block, used where a stale or colliding name costs time, never
/// correctness: the conductor's prefix index and the events that feed it (I6).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct BlockHash(pub u64);

/// The 128-bit keyed name of a block, used where bytes are vouched for: the store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct BlockKey(pub u128);

impl BlockKey {
    /// The short name of the same block.
    #[must_use]
    pub const fn short(self) -> BlockHash {
        #[expect(clippy::cast_possible_truncation, reason = "the low half is the short name")]
        BlockHash(self.0 as u64)
    }
}

/// How many blocks of `block_tokens` hold `tokens` tokens, the last one possibly partial.
///
/// A block size of zero is a programmer error and counts as one token a block.
#[must_use]
pub const fn blocks_for(tokens: u64, block_tokens: u32) -> u64 {
    let size = if block_tokens == 0 { 1 } else { block_tokens as u64 };
    tokens.div_ceil(size)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_short_name_is_the_low_half() {
        assert_eq!(BlockKey(0xAAAA_0000_0000_0000_0000_0000_0000_0007).short(), BlockHash(7));
    }

    #[test]
    fn a_partial_block_counts_whole() {
        assert_eq!(blocks_for(0, 512), 0);
        assert_eq!(blocks_for(1, 512), 1);
        assert_eq!(blocks_for(512, 512), 1);
        assert_eq!(blocks_for(513, 512), 2);
        assert_eq!(blocks_for(5, 0), 5);
    }

    proptest::proptest! {
        #[test]
        fn blocks_are_as_many_as_needed_and_no_more(tokens in 0u64..1 << 40, block in 1u32..70_000) {
            let blocks = blocks_for(tokens, block);
            proptest::prop_assert!(blocks * u64::from(block) >= tokens);
            proptest::prop_assert!(blocks == 0 || (blocks - 1) * u64::from(block) < tokens);
        }
    }
}
