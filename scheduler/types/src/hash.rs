//! Chained block hashing: each key commits to its parent key and its own tokens (I1).

use xxhash_rust::xxh3::xxh3_128_with_seed;

use crate::BlockKey;

/// Turns a prompt's tokens (or a trace's block ids) into a chain of block keys.
///
/// The root commits to a secret seed and to the namespace (model revision, LoRA, salt, tenant),
/// so equal tokens in different namespaces never share a block.
#[derive(Clone, Debug)]
pub struct ChainHasher {
    seed: u64,
    parent: BlockKey,
}

impl ChainHasher {
    /// Starts a chain. `seed` is the deployment's secret; `namespace` is everything besides
    /// tokens that must match for two blocks to be the same.
    #[must_use]
    pub fn new(seed: u64, namespace: &[u8]) -> Self {
        Self { seed, parent: BlockKey(xxh3_128_with_seed(namespace, seed)) }
    }

    /// The key of the next block, whose content is `tokens`.
    pub fn push_tokens(&mut self, tokens: &[u32]) -> BlockKey {
        let mut state = xxhash_rust::xxh3::Xxh3::with_seed(self.seed);
        state.update(&self.parent.0.to_le_bytes());
        for token in tokens {
            state.update(&token.to_le_bytes());
        }
        self.parent = BlockKey(state.digest128());
        self.parent
    }

    /// The key of the next block of a trace, whose content is known only by its id there.
    pub fn push_id(&mut self, id: u64) -> BlockKey {
        let mut bytes = [0u8; 24];
        bytes[..16].copy_from_slice(&self.parent.0.to_le_bytes());
        bytes[16..].copy_from_slice(&id.to_le_bytes());
        self.parent = BlockKey(xxh3_128_with_seed(&bytes, self.seed));
        self.parent
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec::Vec;
    use proptest::prelude::*;

    fn chain(seed: u64, namespace: &[u8], ids: &[u64]) -> Vec<BlockKey> {
        let mut hasher = ChainHasher::new(seed, namespace);
        ids.iter().map(|&id| hasher.push_id(id)).collect()
    }

    #[test]
    fn a_key_commits_to_everything_before_it() {
        let a = chain(1, b"m", &[1, 2, 3]);
        let b = chain(1, b"m", &[9, 2, 3]);
        assert_ne!(a[2], b[2]);
        assert_ne!(a[0], chain(2, b"m", &[1])[0], "the seed is part of the key");
        assert_ne!(a[0], chain(1, b"other", &[1])[0], "the namespace is part of the key");
    }

    #[test]
    fn tokens_hash_by_content_not_by_call_shape() {
        let mut a = ChainHasher::new(5, b"");
        let mut b = ChainHasher::new(5, b"");
        assert_eq!(a.push_tokens(&[1, 2]), b.push_tokens(&[1, 2]));
        assert_ne!(a.push_tokens(&[3]), b.push_tokens(&[3, 0]));
    }

    proptest! {
        #[test]
        fn equal_prefixes_and_only_those_share_keys(
            a in proptest::collection::vec(0u64..4, 0..12),
            b in proptest::collection::vec(0u64..4, 0..12),
        ) {
            let common = a.iter().zip(&b).take_while(|(x, y)| x == y).count();
            let (ka, kb) = (chain(7, b"n", &a), chain(7, b"n", &b));
            let shared = ka.iter().zip(&kb).take_while(|(x, y)| x == y).count();
            prop_assert_eq!(common, shared);
            prop_assert!(ka.iter().skip(common).all(|k| !kb[common.min(kb.len())..].contains(k)));
        }
    }
}
