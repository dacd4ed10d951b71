//! Why a node has no place, or is not changed; for its operator, with the remedy.

use baton_wire::PROTOCOL_VERSION;

use super::instance_ids::MAX_INSTANCES;

/// Most bytes of a node's name.
pub(super) const MAX_NAME_BYTES: usize = 256;

/// Why a node has no place.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum AttachRefusal {
    /// It is of another version.
    #[error(
        "node {node} speaks control protocol {theirs}, this conductor {PROTOCOL_VERSION}; run the same baton on both"
    )]
    Protocol {
        /// The node.
        node: String,
        /// Its protocol.
        theirs: u32,
    },
    /// It has no name, or one that is too long.
    #[error("a node's name has 1 to {MAX_NAME_BYTES} bytes; give it one with --name")]
    NoName,
    /// Its blocks are of another size than the configuration's.
    #[error(
        "node {node} has blocks of {theirs} tokens, the configuration scheduler.block_tokens = {ours}; start the node \
         with --block-tokens {ours}, or change the setting"
    )]
    Blocks {
        /// The node.
        node: String,
        /// Tokens of its blocks.
        theirs: u32,
        /// Tokens of the conductor's.
        ours: u32,
    },
    /// It has another model than one that is here, or another kind of engine that cannot stand beside it.
    #[error(
        "node {node} cannot share KV with node {other}: {differences}; serve one model a conductor, by one kind of engine"
    )]
    Foreign {
        /// The node.
        node: String,
        /// The one that is here.
        other: String,
        /// In what they differ.
        differences: String,
    },
    /// It has other tokens than the front door makes.
    #[error(
        "node {0} has another tokenizer or chat template than the front door: its engine would answer other prompts; give \
         `baton serve` and the node the same --model"
    )]
    Tokenizer(String),
    /// Its role is unknown.
    #[error("node {0} has a role that is none")]
    NoRole(String),
    /// Its cost profile has parts missing.
    #[error("node {0}: cost profile: it is not whole")]
    NoProfile(String),
    /// Its cost profile cannot be.
    #[error("node {node}: {why}")]
    Profile {
        /// The node.
        node: String,
        /// What is wrong with it.
        why: baton_types::ProfileError,
    },
    /// It holds no KV, or reaches nobody.
    #[error("node {0} has no room or no network")]
    NoRoom(String),
    /// It has no engine, and a role that needs one.
    #[error("node {0} computes nothing: its role can be store alone")]
    NoEngine(String),
    /// Its engine runs nothing.
    #[error("node {0} runs no request: its limit is 0")]
    RunsNothing(String),
    /// There is no number left for it.
    #[error(
        "{MAX_INSTANCES} instances are attached, or have left with work still under way; attach node {0} to another \
         conductor"
    )]
    Full(String),
    /// Another process has its name and is heard: it may ask again.
    #[error(
        "another process is attached as node {node} (host '{host}', heard {heard_ms} ms ago); start this one with a --name \
         of its own, or stop the other: it gets in once the other is gone"
    )]
    NameTaken {
        /// The name.
        node: String,
        /// The host of the other process.
        host: String,
        /// When that one was heard last, ms ago.
        heard_ms: u64,
    },
}

/// Why a node is not drained, or keeps its role.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NodeChangeError {
    /// There is no such node.
    #[error("no node '{name}' is attached; there are: {known}")]
    Unknown {
        /// The name that was given.
        name: String,
        /// The names that there are.
        known: String,
    },
    /// It can only lend blocks.
    #[error("node '{0}' has no engine: its role stays store")]
    NoEngine(String),
}

/// A word that is no role.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is no role; it is prefill, decode, both or store")]
pub struct RoleError(String);

impl RoleError {
    pub(super) fn new(word: &str) -> Self {
        Self(word.to_owned())
    }
}
