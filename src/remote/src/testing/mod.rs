//! Strict stand-ins for real engines, for tests: HTTP on loopback, a toy model whose answers anyone can work out, and KV
//! that is really lent.
//!
//! They behave as the real engines were seen to, the bad parts included: wrong tokens with status 200, a whole server
//! that exits over a missing field. They record every forbidden use by a router as a violation, so that a test can
//! assert that there is none. They report the KV that they hold, so that a test can assert that none is held after a
//! cancel.

mod body;
mod compute;
mod fabric;
mod fault;
mod nixl;
mod play;
mod pool;
mod prefix;
mod request_log;
mod server;
mod sglang;
mod stand;
mod steps;
mod text;
mod toy;
mod vllm;

pub use compute::Cost;
pub use fabric::Fabric;
pub use fault::Fault;
pub use request_log::ReceivedRequest;
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
