//! Strict stand-ins for real engines, for tests: HTTP on loopback, a toy model whose answers anyone can work out, and KV
//! that is really lent.
//!
//! They do what the real ones were seen to do, the bad parts included: wrong tokens with status 200, a whole server that
//! exits over a missing field. Whatever a router must not do is written down as a violation, so that a test can ask for
//! there to be none. What is held is told, so that a test can ask for nothing to be held after a cancel.

mod body;
mod book;
mod compute;
mod fabric;
mod fault;
mod nixl;
mod play;
mod pool;
mod prefix;
mod server;
mod sglang;
mod stand;
mod text;
mod toy;
mod vllm;

pub use book::Received;
pub use compute::Cost;
pub use fabric::Fabric;
pub use fault::Fault;
pub use sglang::{FakeSglang, SglangSpec};
pub use stand::Stand;
pub use text::{FakeTokenizer, TrainedTokenizer};
pub use toy::{END_TOKEN, VOCAB_TOKENS, toy_answer, toy_logprob, toy_next};
pub use vllm::{FakeConnector, FakeVllm, VllmSpec};

/// Which leg a stand-in is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FakeRole {
    /// Prefill legs.
    Prefill,
    /// Decode legs.
    Decode,
    /// Whole requests.
    Whole,
}
