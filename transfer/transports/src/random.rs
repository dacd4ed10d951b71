//! Numbers that nobody can foretell, for names that no other process may have.

use std::hash::{BuildHasher, Hasher, RandomState};

/// Such a number: the standard library's seed for hash maps.
pub(crate) fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}

/// The same, twice as long.
pub(crate) fn random_128() -> u128 {
    u128::from(random()) << 64 | u128::from(random())
}
