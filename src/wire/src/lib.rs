//! The control plane between a conductor and its nodes: versioned gRPC messages and their
//! translation from and to the words of `baton-types`.

/// The generated messages and services; their documentation is `proto/control.proto`.
#[expect(missing_docs, clippy::all, reason = "generated from proto/control.proto")]
pub mod v1 {
    tonic::include_proto!("baton.control.v1");
}

/// The version that both sides must speak.
pub const PROTOCOL_VERSION: u32 = 6;

use baton_types::{BlockHash, BlockKey, CacheChange, Run, Tier, TokenLogprob, Tokens};
use bytes::Bytes;

/// Block keys as the wire carries them: 16 bytes each, little endian.
#[must_use]
pub fn pack_keys(keys: &[BlockKey]) -> Bytes {
    let packed: Vec<[u8; 16]> = keys.iter().map(|key| key.0.to_le_bytes()).collect();
    packed.into_flattened().into()
}

/// The keys in `packed`; a torn last one is dropped.
#[must_use]
pub fn unpack_keys(packed: &[u8]) -> Vec<BlockKey> {
    let (whole, _) = packed.as_chunks::<16>();
    whole.iter().map(|bytes| BlockKey(u128::from_le_bytes(*bytes))).collect()
}

/// Tokens as the wire carries them: the very bytes that they are kept in.
#[must_use]
pub fn pack_tokens(tokens: &Tokens) -> Vec<v1::TokenRun> {
    let pack = |run: &Run| v1::TokenRun {
        packed: Bytes::from_owner(Shared(run.clone())),
        width: run.width().into(),
    };
    tokens.runs().iter().map(pack).collect()
}

/// The tokens of `runs`; `None` for a width that is none, or a torn last one of a run.
#[must_use]
pub fn unpack_tokens(runs: &[v1::TokenRun]) -> Option<Vec<u32>> {
    let most = runs.iter().map(|run| run.packed.len() / run.width.max(1) as usize).sum();
    let mut tokens = Vec::with_capacity(most);
    runs.iter().try_for_each(|run| Run::unpack(&run.packed, run.width, &mut tokens))?;
    Some(tokens)
}

/// Keeps a run for as long as its bytes are wanted.
struct Shared(Run);

impl AsRef<[u8]> for Shared {
    fn as_ref(&self) -> &[u8] {
        self.0.packed()
    }
}

/// A tier by its word.
#[must_use]
pub fn tier(word: &str) -> Option<Tier> {
    Tier::LOCAL.into_iter().find(|tier| tier.name() == word)
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
    fn tokens_go_in_the_bytes_that_they_are_kept_in() {
        let tokens = Tokens::from(vec![3, 70_000, 0]).and(&[5; 2000]);
        let packed = pack_tokens(&tokens);
        assert_eq!(packed[0].packed.as_ptr(), tokens.runs()[0].packed().as_ptr());
        let all = tokens.to_vec();
        drop(tokens);
        assert_eq!(unpack_tokens(&packed), Some(all));
        for (bytes, width) in [(3, 2), (4, 0), (4, 5), (4, u32::MAX)] {
            let wrong = v1::TokenRun { packed: vec![0; bytes].into(), width };
            assert_eq!(unpack_tokens(&[packed[0].clone(), wrong]), None, "{bytes} bytes of {width}");
        }
        assert_eq!(unpack_tokens(&[]), Some(vec![]));
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
