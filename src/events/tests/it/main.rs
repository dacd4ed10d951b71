//! Recordings of other engines, and the two ends of this crate against each other.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod captures;
mod engine;
mod hostile;
mod loopback;
mod mirrored;
mod routed;
mod truth;
mod vllm_hashes;
mod wire;
