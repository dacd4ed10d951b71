//! Keys and their hash.

use std::hash::{BuildHasher as _, RandomState};

use baton_types::{Rng, TenantId};
use xxhash_rust::xxh3::xxh3_128_with_secret;

use crate::refusal::Refusal;

/// Longest key, bytes.
pub const KEY_MAX_BYTES: usize = 1024;

/// A key of one tenant. Equal keys of two tenants are two keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key<'a> {
    /// The tenant that owns the key.
    pub tenant: TenantId,
    /// From 1 to [`KEY_MAX_BYTES`] bytes, any of them.
    pub bytes: &'a [u8],
}

impl<'a> Key<'a> {
    /// A key of the anonymous tenant.
    #[must_use]
    pub fn anonymous(bytes: &'a [u8]) -> Self {
        Self { tenant: TenantId(0), bytes }
    }

    pub(crate) fn check(&self) -> Result<(), Refusal> {
        let bytes = self.bytes.len();
        if (1..=KEY_MAX_BYTES).contains(&bytes) { Ok(()) } else { Err(Refusal::Key { bytes }) }
    }
}

/// Where a key belongs: half of its hash chooses the shard, the other half the place in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Hashed {
    pub(crate) shard_hash: u64,
    pub(crate) place: u64,
}

/// XXH3 of 128 bits under a secret of this store, so that nobody outside can aim at one shard. A collision costs
/// a comparison: entries keep their whole key.
#[derive(Debug)]
pub(crate) struct Hasher {
    secret: [u8; 192],
}

impl Hasher {
    pub(crate) fn new() -> Self {
        // The standard library's map keys are the randomness at hand without another crate.
        let mut secret = [0; 192];
        for (at, chunk) in secret.chunks_exact_mut(8).enumerate() {
            let mut rng = Rng::fork(RandomState::new().hash_one(at), at as u64);
            chunk.copy_from_slice(&rng.next_u64().to_le_bytes());
        }
        Self { secret }
    }

    #[expect(clippy::cast_possible_truncation, reason = "halves of a hash")]
    pub(crate) fn hash(&self, key: &Key<'_>) -> Hashed {
        let hash = xxh3_128_with_secret(key.bytes, &self.secret);
        let tenant = u64::from(key.tenant.0).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        Hashed { shard_hash: (hash >> 64) as u64 ^ tenant.rotate_left(32), place: hash as u64 ^ tenant }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_and_tenants_spread_and_stores_differ() {
        let (one, other) = (Hasher::new(), Hasher::new());
        let mut counts = [0u32; 16];
        for n in 0..16_000u32 {
            let bytes = n.to_le_bytes();
            let key = Key { tenant: TenantId(n % 3), bytes: &bytes };
            let hashed = one.hash(&key);
            assert_ne!(hashed, other.hash(&key));
            assert_ne!(hashed, one.hash(&Key { tenant: TenantId(9), bytes: &bytes }));
            counts[usize::try_from(hashed.shard_hash & 15).unwrap()] += 1;
        }
        assert!(counts.iter().all(|count| (800..1_200).contains(count)), "{counts:?}");
    }

    #[test]
    fn only_keys_of_sensible_length_pass() {
        for (bytes, good) in [(0, false), (1, true), (1024, true), (1025, false)] {
            assert_eq!(Key::anonymous(&vec![0; bytes]).check().is_ok(), good, "{bytes}");
        }
    }
}
