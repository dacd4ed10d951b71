//! The control plane between a conductor and its nodes: versioned gRPC messages and their
//! translation from and to the words of `baton-types`.

/// The generated messages and services; their documentation is `proto/control.proto`.
#[expect(missing_docs, clippy::all, reason = "generated from proto/control.proto")]
pub mod v1 {
    tonic::include_proto!("baton.control.v1");
}

/// The version that both sides must speak.
pub const PROTOCOL_VERSION: u32 = 7;

mod costs;
mod sampling;

use baton_types::{BlockHash, BlockKey, CacheChange, Finish, Role, Run, Tier, TokenLogprob, Tokens};
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

impl From<Tier> for v1::Tier {
    fn from(tier: Tier) -> Self {
        match tier {
            Tier::Hbm => Self::Hbm,
            Tier::Dram => Self::Dram,
            Tier::Ssd => Self::Ssd,
        }
    }
}

impl v1::Tier {
    /// The tier; `None` for one of another version.
    #[must_use]
    pub const fn read(self) -> Option<Tier> {
        match self {
            Self::Unknown => None,
            Self::Hbm => Some(Tier::Hbm),
            Self::Dram => Some(Tier::Dram),
            Self::Ssd => Some(Tier::Ssd),
        }
    }
}

impl From<Role> for v1::Role {
    fn from(role: Role) -> Self {
        match role {
            Role::Prefill => Self::Prefill,
            Role::Decode => Self::Decode,
            Role::Both => Self::Both,
            Role::Store => Self::Store,
        }
    }
}

impl v1::Role {
    /// The role; `None` for one of another version.
    #[must_use]
    pub const fn read(self) -> Option<Role> {
        match self {
            Self::Unknown => None,
            Self::Prefill => Some(Role::Prefill),
            Self::Decode => Some(Role::Decode),
            Self::Both => Some(Role::Both),
            Self::Store => Some(Role::Store),
        }
    }
}

impl From<Option<Finish>> for v1::Finish {
    fn from(finish: Option<Finish>) -> Self {
        match finish {
            None => Self::None,
            Some(Finish::Stop) => Self::Stop,
            Some(Finish::Length) => Self::Length,
        }
    }
}

impl v1::Finish {
    /// How the answer ends, if it does.
    #[must_use]
    pub const fn read(self) -> Option<Finish> {
        match self {
            Self::None => None,
            Self::Stop => Some(Finish::Stop),
            Self::Length => Some(Finish::Length),
        }
    }
}

impl v1::failure::Stage {
    /// The word used in errors and metrics.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Unknown => "other",
            Self::Engine => "engine",
            Self::Store => "store",
            Self::Room => "room",
            Self::Preempted => "preempted",
            Self::Handoff => "handoff",
        }
    }
}

impl From<&CacheChange> for v1::CacheChange {
    fn from(change: &CacheChange) -> Self {
        use v1::cache_change::Kind;
        let (kind, parent, hashes, tier) = match change {
            CacheChange::Stored { parent, hashes, tier } => {
                (Kind::Stored, *parent, &hashes[..], v1::Tier::from(*tier))
            }
            CacheChange::Removed { hashes, tier } => {
                (Kind::Removed, None, &hashes[..], v1::Tier::from(*tier))
            }
            CacheChange::Cleared => (Kind::Cleared, None, &[][..], v1::Tier::Unknown),
        };
        Self {
            kind: kind.into(),
            parent: parent.map(|hash| hash.0),
            hashes: hashes.iter().map(|hash| hash.0).collect(),
            tier: tier.into(),
        }
    }
}

impl v1::CacheChange {
    /// The change that it describes; `None` if it makes no sense.
    #[must_use]
    pub fn read(&self) -> Option<CacheChange> {
        use v1::cache_change::Kind;
        let hashes = || self.hashes.iter().map(|hash| BlockHash(*hash)).collect();
        match self.kind() {
            Kind::Stored => {
                let parent = self.parent.map(BlockHash);
                Some(CacheChange::Stored { parent, hashes: hashes(), tier: self.tier().read()? })
            }
            Kind::Removed => Some(CacheChange::Removed { hashes: hashes(), tier: self.tier().read()? }),
            Kind::Cleared => Some(CacheChange::Cleared),
            Kind::Unknown => None,
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
        assert_eq!(v1::CacheChange { kind: 1, tier: 4, ..Default::default() }.read(), None);
    }

    #[test]
    fn words_survive_the_wire() {
        for tier in Tier::LOCAL {
            assert_eq!(v1::Tier::from(tier).read(), Some(tier));
        }
        for role in [Role::Prefill, Role::Decode, Role::Both, Role::Store] {
            assert_eq!(v1::Role::from(role).read(), Some(role));
        }
        for finish in [None, Some(Finish::Stop), Some(Finish::Length)] {
            assert_eq!(v1::Finish::from(finish).read(), finish);
        }
        let newer = v1::Hello { role: 9, ..Default::default() };
        assert_eq!(newer.role().read(), None);
    }

    #[test]
    fn logprobs_survive_the_wire() {
        let known = TokenLogprob { logprob: -0.25, top: vec![(4, -0.25), (9, -3.0)] };
        assert_eq!(TokenLogprob::from(&v1::Logprob::from(&known)), known);
    }
}
