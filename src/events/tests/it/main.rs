//! What other engines really sent, and the two ends talking to each other.

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
