//! vLLM's chains: a digest over parent, tokens and extra keys, written as CBOR or as a pickle.

use sha2::{Digest as _, Sha256};
use xxhash_rust::xxh3::xxh3_128;

use super::{cbor, pickle};
use crate::model::EngineHash;

/// An extra key and what it is, such as `("cache_salt", "s")` or `("lora", "name")`.
pub type Tagged<'a> = (&'a str, &'a str);

/// vLLM's `--prefix-caching-hash-algo`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Algorithm {
    /// `sha256_cbor`: sha-256 over canonical CBOR.
    Sha256Cbor,
    /// `sha256`, its default: sha-256 over a pickle, protocol 5.
    Sha256Pickle,
    /// `xxhash_cbor`: xxh3-128 over canonical CBOR.
    Xxh3Cbor,
}

/// The seed of a root where `PYTHONHASHSEED` is not set.
const UNSEEDED: &str = "vllm-none-hash";

/// A chain of hashes as vLLM computes them.
#[derive(Clone, Debug)]
pub struct EngineChain {
    algorithm: Algorithm,
    parent: EngineHash,
    scratch: Vec<u8>,
}

impl EngineChain {
    /// A chain from its root, which depends on the engine's `PYTHONHASHSEED`.
    #[must_use]
    pub fn new(algorithm: Algorithm, python_hash_seed: Option<&str>) -> Self {
        let seed = python_hash_seed.unwrap_or(UNSEEDED);
        let mut bytes = Vec::new();
        match algorithm {
            Algorithm::Sha256Pickle => bytes = pickle::root(seed),
            _ => cbor::root(&mut bytes, seed),
        }
        Self { algorithm, parent: digest(algorithm, &bytes), scratch: bytes }
    }

    /// A chain that goes on after `parent`, a digest of this algorithm.
    #[must_use]
    pub const fn after(algorithm: Algorithm, parent: EngineHash) -> Self {
        Self { algorithm, parent, scratch: Vec::new() }
    }

    /// The hash of the last block, or the root's before the first.
    #[must_use]
    pub const fn parent(&self) -> EngineHash {
        self.parent
    }

    /// The hash of the next block; its low 64 bits are [`EngineHash::low64`].
    pub fn push(&mut self, tokens: &[u32], extra: &[Tagged<'_>]) -> EngineHash {
        self.scratch.clear();
        let word;
        let parent: &[u8] = match &self.parent {
            EngineHash::Full(bytes) => bytes,
            EngineHash::Half(bytes) => bytes,
            EngineHash::Word(bits) => {
                word = bits.to_be_bytes();
                &word
            }
        };
        match self.algorithm {
            Algorithm::Sha256Pickle => self.scratch = pickle::block(parent, tokens, extra),
            _ => cbor::block(&mut self.scratch, parent, tokens, extra),
        }
        self.parent = digest(self.algorithm, &self.scratch);
        self.parent
    }
}

fn digest(algorithm: Algorithm, bytes: &[u8]) -> EngineHash {
    match algorithm {
        Algorithm::Xxh3Cbor => EngineHash::Half(xxh3_128(bytes).to_be_bytes()),
        _ => EngineHash::Full(Sha256::digest(bytes).into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn roots_depend_on_the_seed_and_on_the_algorithm() {
        let root = |algorithm, seed| EngineChain::new(algorithm, seed).parent().to_string();
        // Computed with CPython; the first is what the captured engine started from.
        let seeded = "1973e23848344dc43a988a9b478663803cfffe1243480253f9a3cf004b14aa7c";
        let unseeded = "066b1e8987e027138e98701c46128929378935f9b6cd1549105ae6b4f0d71198";
        assert_eq!(root(Algorithm::Sha256Pickle, Some("0")), seeded);
        assert_eq!(root(Algorithm::Sha256Pickle, None), unseeded);
        let cbor = root(Algorithm::Sha256Cbor, None);
        assert!(cbor.starts_with("9bd96a48") && cbor.ends_with("eef0"), "{cbor}");
        assert_eq!(root(Algorithm::Xxh3Cbor, None).len(), 32);
    }

    #[test]
    fn a_chain_goes_on_from_any_of_its_hashes_and_extra_keys_count() {
        for algorithm in [Algorithm::Sha256Cbor, Algorithm::Sha256Pickle, Algorithm::Xxh3Cbor] {
            let mut chain = EngineChain::new(algorithm, Some("0"));
            let first = chain.push(&[1, 2], &[]);
            let second = chain.push(&[3, 4], &[]);
            assert_eq!(EngineChain::after(algorithm, first).push(&[3, 4], &[]), second);
            let salted = EngineChain::after(algorithm, first).push(&[3, 4], &[("cache_salt", "s")]);
            assert_ne!(salted, second);
        }
    }
}
