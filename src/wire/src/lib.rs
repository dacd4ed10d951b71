//! The control plane between a conductor and its nodes: versioned gRPC messages and their
//! translation from and to the words of `baton-types`.

/// The generated messages and services; their documentation is `proto/control.proto`.
#[expect(missing_docs, clippy::all, reason = "generated from proto/control.proto")]
pub mod v1 {
    tonic::include_proto!("baton.control.v1");
}

/// The version that both sides must speak.
pub const PROTOCOL_VERSION: u32 = 4;

use baton_types::{BlockHash, BlockKey, CacheChange, Tier, TokenLogprob};
use bytes::{BufMut, Bytes, BytesMut};

/// Block keys as the wire carries them: 16 bytes each, little endian.
#[must_use]
pub fn pack_keys(keys: &[BlockKey]) -> Bytes {
    let mut packed = BytesMut::with_capacity(keys.len() * 16);
    keys.iter().for_each(|key| packed.put_u128_le(key.0));
    packed.freeze()
}

/// The keys in `packed`; a torn last one is dropped.
#[must_use]
pub fn unpack_keys(packed: &[u8]) -> Vec<BlockKey> {
    let (whole, _) = packed.as_chunks::<16>();
    whole.iter().map(|bytes| BlockKey(u128::from_le_bytes(*bytes))).collect()
}

/// Tokens as the wire carries them, parts one after another: each as many bytes as the largest needs, little
/// endian; and how many bytes that is. A long prompt of small numbers goes at a quarter of its size.
#[must_use]
pub fn pack_tokens(parts: &[&[u32]]) -> (Bytes, u32) {
    let most = parts.iter().fold(0, |most, part| part.iter().fold(most, |most, token| most | *token));
    let width = (4 - most.leading_zeros() / 8).max(1);
    let packed = match width {
        1 => pack_as::<1>(parts),
        2 => pack_as::<2>(parts),
        3 => pack_as::<3>(parts),
        _ => pack_as::<4>(parts),
    };
    (packed, width)
}

/// A plain loop a part: the compiler turns it into a few instructions for many tokens.
fn pack_as<const WIDTH: usize>(parts: &[&[u32]]) -> Bytes {
    let mut packed: Vec<[u8; WIDTH]> = Vec::with_capacity(parts.iter().map(|part| part.len()).sum());
    for part in parts {
        packed.extend(part.iter().map(|token| {
            let mut low = [0; WIDTH];
            low.copy_from_slice(&token.to_le_bytes()[..WIDTH]);
            low
        }));
    }
    packed.into_flattened().into()
}

/// The tokens in `packed`, `width` bytes each; `None` for a width that is none, or a torn last one.
#[must_use]
pub fn unpack_tokens(packed: &[u8], width: u32) -> Option<Vec<u32>> {
    match width {
        1 => unpack_as::<1>(packed),
        2 => unpack_as::<2>(packed),
        3 => unpack_as::<3>(packed),
        4 => unpack_as::<4>(packed),
        _ => None,
    }
}

fn unpack_as<const WIDTH: usize>(packed: &[u8]) -> Option<Vec<u32>> {
    let (whole, rest) = packed.as_chunks::<WIDTH>();
    let read = |bytes: &[u8; WIDTH]| {
        let mut token = [0; 4];
        token[..WIDTH].copy_from_slice(bytes);
        u32::from_le_bytes(token)
    };
    rest.is_empty().then(|| whole.iter().map(read).collect())
}

/// A tier by its word.
#[must_use]
pub fn tier(word: &str) -> Option<Tier> {
    [Tier::Hbm, Tier::Dram, Tier::Ssd, Tier::Remote].into_iter().find(|tier| tier.name() == word)
}

impl From<&CacheChange> for v1::CacheChange {
    fn from(change: &CacheChange) -> Self {
        let numbers = |hashes: &[BlockHash]| hashes.iter().map(|hash| hash.0).collect();
        match change {
            CacheChange::Stored { parent, hashes, tier } => Self {
                kind: 0,
                parent: parent.map(|hash| hash.0),
                hashes: numbers(hashes),
                tier: tier.name().into(),
            },
            CacheChange::Removed { hashes, tier } => {
                Self { kind: 1, parent: None, hashes: numbers(hashes), tier: tier.name().into() }
            }
            CacheChange::Cleared => Self { kind: 2, ..Self::default() },
        }
    }
}

impl v1::CacheChange {
    /// The change that it tells; `None` if it makes no sense.
    #[must_use]
    pub fn read(&self) -> Option<CacheChange> {
        let hashes = || self.hashes.iter().map(|hash| BlockHash(*hash)).collect();
        match self.kind {
            0 => Some(CacheChange::Stored {
                parent: self.parent.map(BlockHash),
                hashes: hashes(),
                tier: tier(&self.tier)?,
            }),
            1 => Some(CacheChange::Removed { hashes: hashes(), tier: tier(&self.tier)? }),
            2 => Some(CacheChange::Cleared),
            _ => None,
        }
    }
}

impl From<&TokenLogprob> for v1::Logprob {
    fn from(known: &TokenLogprob) -> Self {
        let (top_tokens, top_logprobs) = known.top.iter().copied().unzip();
        Self { logprob: known.logprob, top_tokens, top_logprobs }
    }
}

impl From<&v1::Logprob> for TokenLogprob {
    fn from(told: &v1::Logprob) -> Self {
        let top = told.top_tokens.iter().copied().zip(told.top_logprobs.iter().copied()).collect();
        Self { logprob: told.logprob, top }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_survive_the_wire_and_torn_ones_do_not() {
        let keys = [BlockKey(1), BlockKey(u128::MAX), BlockKey(7 << 70)];
        let packed = pack_keys(&keys);
        assert_eq!(unpack_keys(&packed), keys);
        assert_eq!(unpack_keys(&packed[..40]), keys[..2]);
    }

    #[test]
    fn tokens_survive_the_wire_in_as_few_bytes_as_the_largest_needs() {
        for (most, width) in
            [(0, 1), (255, 1), (256, 2), (65_535, 2), (65_536, 3), (1 << 24, 4), (u32::MAX, 4)]
        {
            let (prompt, answer) = ([3, most, 0], [7]);
            let (packed, told) = pack_tokens(&[&prompt, &answer]);
            assert_eq!((told, packed.len()), (width, 4 * width as usize));
            assert_eq!(unpack_tokens(&packed, told), Some(vec![3, most, 0, 7]));
            assert_eq!(unpack_tokens(&packed[..packed.len() - 1], told).is_none(), width > 1, "a torn one");
        }
        assert_eq!(pack_tokens(&[]), (Bytes::new(), 1));
        assert_eq!((unpack_tokens(&[0; 10], 5), unpack_tokens(&[1], 0)), (None, None));
    }

    #[test]
    fn cache_changes_survive_the_wire() {
        let hashes = vec![BlockHash(3), BlockHash(u64::MAX)];
        let changes = [
            CacheChange::Stored { parent: None, hashes: hashes.clone(), tier: Tier::Hbm },
            CacheChange::Stored { parent: Some(BlockHash(0)), hashes: hashes.clone(), tier: Tier::Ssd },
            CacheChange::Removed { hashes, tier: Tier::Dram },
            CacheChange::Cleared,
        ];
        for change in changes {
            assert_eq!(v1::CacheChange::from(&change).read(), Some(change));
        }
        assert_eq!(v1::CacheChange { kind: 9, ..Default::default() }.read(), None);
        assert_eq!(v1::CacheChange { tier: "tape".into(), ..Default::default() }.read(), None);
    }

    #[test]
    fn logprobs_survive_the_wire() {
        let known = TokenLogprob { logprob: -0.25, top: vec![(4, -0.25), (9, -3.0)] };
        assert_eq!(TokenLogprob::from(&v1::Logprob::from(&known)), known);
    }
}
