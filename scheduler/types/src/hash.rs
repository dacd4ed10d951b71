//! Chained block hashing: each key commits to its parent key and its own tokens (I1).

use xxhash_rust::xxh3::xxh3_128_with_seed;

use crate::BlockKey;

/// Bytes of a key.
const KEY_BYTES: usize = 16;

/// Writes tokens, little endian; returns the bytes written.
fn write_tokens(bytes: &mut [u8], tokens: &[u32]) -> usize {
    for (place, token) in bytes.chunks_exact_mut(4).zip(tokens) {
        place.copy_from_slice(&token.to_le_bytes());
    }
    tokens.len() * 4
}

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

    /// Goes on after the block named `parent`, or from a chain's root, which [`Self::parent`] returned.
    #[must_use]
    pub const fn resume(seed: u64, parent: BlockKey) -> Self {
        Self { seed, parent }
    }

    /// The key of the last block, or the root's before the first.
    #[must_use]
    pub const fn parent(&self) -> BlockKey {
        self.parent
    }

    /// The key of the next block, whose content is `tokens`.
    pub fn push_tokens(&mut self, tokens: &[u32]) -> BlockKey {
        // A buffer is made for each block: one no longer than it, for the usual sizes.
        let digest = match tokens.len() {
            0..=16 => self.digest::<{ KEY_BYTES + 4 * 16 }>(tokens),
            17..=64 => self.digest::<{ KEY_BYTES + 4 * 64 }>(tokens),
            _ => self.digest::<{ KEY_BYTES + 4 * 512 }>(tokens),
        };
        self.parent = BlockKey(digest);
        self.parent
    }

    /// Of the parent and the tokens, through a buffer of `BYTES`.
    fn digest<const BYTES: usize>(&self, tokens: &[u32]) -> u128 {
        // One call over one buffer: feeding the hash token by token costs five times as much.
        let mut bytes = [0u8; BYTES];
        bytes[..KEY_BYTES].copy_from_slice(&self.parent.0.to_le_bytes());
        let (first, rest) = tokens.split_at(tokens.len().min((BYTES - KEY_BYTES) / 4));
        let filled = KEY_BYTES + write_tokens(&mut bytes[KEY_BYTES..], first);
        if rest.is_empty() {
            return xxh3_128_with_seed(&bytes[..filled], self.seed);
        }
        let mut state = xxhash_rust::xxh3::Xxh3::with_seed(self.seed);
        state.update(&bytes[..filled]);
        for part in rest.chunks(BYTES / 4) {
            let filled = write_tokens(&mut bytes, part);
            state.update(&bytes[..filled]);
        }
        state.digest128()
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

    #[test]
    fn a_chain_goes_on_from_any_of_its_keys() {
        let mut whole = ChainHasher::new(3, b"n");
        let root = whole.parent();
        let first = whole.push_tokens(&[1]);
        let second = whole.push_tokens(&[2]);
        assert_eq!(ChainHasher::resume(3, root).push_tokens(&[1]), first);
        assert_eq!(ChainHasher::resume(3, first).push_tokens(&[2]), second);
        assert_ne!(ChainHasher::resume(4, first).push_tokens(&[2]), second, "the seed goes on counting");
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

    /// The chain from scratch: each key hashes its parent's bytes and its own content.
    fn naive_tokens(seed: u64, namespace: &[u8], blocks: &[Vec<u32>]) -> Vec<BlockKey> {
        let mut parent = xxh3_128_with_seed(namespace, seed);
        let key = |block: &Vec<u32>| {
            let mut bytes = parent.to_le_bytes().to_vec();
            block.iter().for_each(|token| bytes.extend(token.to_le_bytes()));
            parent = xxh3_128_with_seed(&bytes, seed);
            BlockKey(parent)
        };
        blocks.iter().map(key).collect()
    }

    #[test]
    fn hashing_has_not_changed() {
        // Nodes of different builds must agree on names: these were written down once.
        let mut hasher = ChainHasher::new(42, b"model-a");
        let keys = [hasher.push_tokens(&[1, 2, 3]), hasher.push_tokens(&[4]), hasher.push_id(7)];
        let shorts: Vec<u64> = keys.iter().map(|k| k.short().0).collect();
        assert_eq!(
            shorts,
            [13_609_785_541_540_393_098, 1_881_363_537_616_904_990, 14_808_801_650_242_089_396]
        );
    }

    #[test]
    fn every_token_of_a_long_block_counts() {
        let block: Vec<u32> = (0..512).collect();
        let key = ChainHasher::new(1, b"").push_tokens(&block);
        for at in 0..512 {
            let mut other = block.clone();
            other[at] ^= 1 << 31;
            assert_ne!(ChainHasher::new(1, b"").push_tokens(&other), key, "token {at}");
        }
    }

    #[test]
    fn a_copy_goes_its_own_way() {
        let mut trunk = ChainHasher::new(3, b"n");
        trunk.push_id(1);
        let mut branch = trunk.clone();
        assert_eq!(branch.push_id(2), trunk.push_id(2));
        assert_ne!(branch.push_id(3), trunk.push_id(4));
        assert_ne!(branch.push_id(5), trunk.push_id(5), "what differs before differs for ever");
    }

    #[test]
    fn blocks_of_every_small_size_hash_alike() {
        for tokens in 0..=70 {
            let blocks = [0, u32::MAX - 80].map(|first| (first..first + tokens).collect::<Vec<u32>>());
            let mut hasher = ChainHasher::new(9, b"n");
            let keys: Vec<BlockKey> = blocks.iter().map(|block| hasher.push_tokens(block)).collect();
            assert_eq!(keys, naive_tokens(9, b"n", &blocks), "{tokens} tokens");
        }
    }

    proptest! {
        #[test]
        fn pushing_in_pieces_is_hashing_parent_and_content(
            seed in any::<u64>(),
            namespace in proptest::collection::vec(any::<u8>(), 0..20),
            blocks in proptest::collection::vec(proptest::collection::vec(any::<u32>(), 0..1200), 0..6),
        ) {
            let mut hasher = ChainHasher::new(seed, &namespace);
            let keys: Vec<BlockKey> = blocks.iter().map(|b| hasher.push_tokens(b)).collect();
            prop_assert_eq!(keys, naive_tokens(seed, &namespace, &blocks));
        }
    }
}
