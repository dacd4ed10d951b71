//! Why a node cannot start or go on, and what it refuses.

use std::io;

use baton_engine::{BuildError, StartError};
use baton_events::EventError;
use baton_remote::RemoteError;
use baton_tiers::CacheError;
use baton_transports::TransportError;
use baton_wire::v1;
use tokio::task::JoinError;

/// Why a node cannot start, or cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    /// A node that lends memory has none, or more than there can be.
    #[error(
        "node {name}: a store node lends --dram-blocks = {blocks} blocks of memory; give 2 to {}",
        u32::MAX
    )]
    LentBlocks {
        /// The node.
        name: String,
        /// What it was given.
        blocks: u64,
    },
    /// Its engine cannot be built.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// A part of it panicked.
    #[error("{part}: {error}")]
    Panicked {
        /// The part.
        part: &'static str,
        /// How its task ended.
        error: JoinError,
    },
    /// There is no memory for its KV.
    #[error("node {name}: {bytes} bytes of memory for the engine's KV: {error}")]
    Memory {
        /// The node.
        name: String,
        /// What it asked for.
        bytes: usize,
        /// The system's words.
        error: io::Error,
    },
    /// Its KV port cannot be opened.
    #[error("node {name}: KV endpoint on {address}: {error}")]
    Endpoint {
        /// The node.
        name: String,
        /// The address.
        address: std::net::SocketAddr,
        /// What the transports say.
        error: TransportError,
    },
    /// Its cache cannot be opened.
    #[error("node {name}: KV cache: {error}")]
    Cache {
        /// The node.
        name: String,
        /// What the cache says.
        error: CacheError,
    },
    /// Its cache's changes cannot be published.
    #[error("--publish: {0}")]
    Publish(EventError),
    /// The system gives it no thread.
    #[error("node {name}: cannot start its thread: {error}")]
    Thread {
        /// The node.
        name: String,
        /// The system's words.
        error: io::Error,
    },
    /// What does its work is gone.
    #[error("node {name}: its {what}; please report this")]
    Gone {
        /// The node.
        name: String,
        /// What ended, and how.
        what: &'static str,
    },
    /// The conductor will not have it.
    #[error("the conductor refused: {0}")]
    Refused(String),
    /// The conductor does not know its key.
    #[error("not let in: {0}")]
    NotLetIn(String),
    /// The settings of the server behind it cannot work.
    #[error("node {name}: {error}")]
    Remote {
        /// The node.
        name: String,
        /// What is wrong.
        error: RemoteError,
    },
    /// The server behind it does not say what has no default.
    #[error("node {name}: the engine does not tell its {what}; give --{option}")]
    NotTold {
        /// The node.
        name: String,
        /// What it does not say.
        what: &'static str,
        /// The option that says it.
        option: &'static str,
    },
}

/// Why a node's engine cannot be built, or measured.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// It cannot be built.
    #[error(transparent)]
    Build(#[from] BuildError),
    /// It does not start what its passes are measured with.
    #[error("calibration: {0}")]
    Start(StartError),
    /// Its pool holds not even the shortest pass.
    #[error("calibration: a pool of {0} tokens is too small; give the engine more blocks")]
    Pool(u32),
    /// So much memory cannot be named.
    #[error("{blocks} blocks of {block_bytes} bytes are more than memory has")]
    Memory {
        /// Blocks.
        blocks: u32,
        /// Bytes of each.
        block_bytes: usize,
    },
}

/// Why an order, or what came with it, makes no sense.
#[derive(Debug, thiserror::Error)]
pub(super) enum OrderError {
    #[error("an order without work")]
    Work,
    #[error("an order without sampling settings, or with ones out of range")]
    Sampling,
    #[error("an order without tokens")]
    Tokens,
    #[error("an order to prefill without its tokens")]
    Prompt,
    #[error("tokens that are torn, or of no width")]
    Torn,
    #[error("{tokens} tokens where {announced} were announced")]
    Count { tokens: usize, announced: usize },
    #[error("a chain of {blocks} blocks of {block_tokens} for {tokens} tokens")]
    Chain { blocks: usize, block_tokens: u32, tokens: usize },
    #[error("a note without tokens")]
    Note,
    #[error("{bytes} bytes are not {tokens} tokens of {width} bytes")]
    NoteCount { bytes: usize, tokens: usize, width: u8 },
    #[error("an answer cannot go on from its tokens: penalties count the answer's tokens only")]
    Penalties,
    #[error("an answer cannot go on from its tokens: it has all its tokens")]
    Whole,
    #[error("an answer cannot go on from its tokens: {0} binds the answer as a whole")]
    Bound(&'static str),
    #[error("{0} legs are under way on this node")]
    Busy(usize),
}

impl OrderError {
    /// What its conductor hears of it. An answer that cannot go on here cannot anywhere.
    pub(super) fn failure(&self) -> v1::Failure {
        let cannot_go_on = matches!(self, Self::Penalties | Self::Bound(_));
        let (stage, message) = (v1::failure::Stage::Engine.into(), self.to_string());
        v1::Failure { stage, message, cannot_go_on, ..v1::Failure::default() }
    }
}

/// Why a hand-off did not arrive.
#[derive(Debug, thiserror::Error)]
pub(super) enum HandoffError {
    #[error("this node's KV endpoint is closed")]
    Closed,
    #[error(transparent)]
    Transport(#[from] TransportError),
}
