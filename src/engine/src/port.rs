//! The engine port.

use std::ops::Range;
use std::sync::Arc;

use baton_types::{CostProfile, Finish, Sampling, TokenLogprob};

use crate::KvPool;

/// Names a sequence on one engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SequenceId(pub u64);

/// The shape of an engine's KV. Two engines exchange blocks only if all of it is equal but `blocks`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvShape {
    /// Transformer layers.
    pub layers: u32,
    /// KV heads of a layer.
    pub kv_heads: u32,
    /// Numbers in a head.
    pub head_dim: u32,
    /// How a number is stored: `f32`, `f16`, `bf16`.
    pub dtype: &'static str,
    /// Tokens in a block.
    pub block_tokens: u32,
    /// Bytes of one layer of one block, keys and values together; a block is its layers, one after another.
    pub layer_bytes: usize,
    /// Slots of the pool.
    pub blocks: u32,
}

impl KvShape {
    /// Bytes of a block.
    #[must_use]
    pub const fn block_bytes(&self) -> usize {
        self.layer_bytes * self.layers as usize
    }
}

/// The properties of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelCard {
    /// Its name, as clients ask for it.
    pub name: String,
    /// A digest of its weights and configuration: equal digests answer equally.
    pub revision: String,
    /// Tokens in its vocabulary.
    pub vocab_tokens: u32,
    /// Tokens that end an answer.
    pub end_tokens: Vec<u32>,
    /// Longest prompt and answer together, tokens.
    pub max_model_tokens: u32,
}

/// One sequence to run: compute the KV of `tokens[computed..]`, then draw token after token.
///
/// A prefill is a sequence with much to compute; a decode that continues elsewhere's prefill is one
/// with its last token to compute.
#[derive(Clone, Debug)]
pub struct Sequence {
    /// Its name here.
    pub id: SequenceId,
    /// Prompt and answer so far, at least one token.
    pub tokens: Vec<u32>,
    /// How many of `tokens` are the prompt's; the rest was drawn before, perhaps elsewhere.
    pub prompt_tokens: u32,
    /// Leading tokens whose KV is in the blocks already, fewer than `tokens`.
    pub computed_tokens: u32,
    /// Slots of the pool, in order of position; they may cover less than the whole answer.
    pub blocks: Vec<u32>,
    /// How tokens are drawn.
    pub sampling: Arc<Sampling>,
    /// Whether its KV is for elsewhere: each layer is shown to the sink as soon as it is computed, and after its
    /// first token it rests until [`Engine::stop`].
    pub leaves: bool,
    /// Sequences with much to compute are begun in ascending order of this, then of arrival; one that has
    /// begun is not overtaken.
    pub order: u64,
}

/// What a pass may take that has both decodes and prompt tokens in it.
#[derive(Clone, Debug)]
pub struct StepTarget {
    /// What passes cost on this engine.
    pub profile: Arc<CostProfile>,
    /// In µs, as the profile counts.
    pub time_us: u64,
}

/// Why a sequence could not start.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct StartError(pub String);

/// An event of a sequence.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// The KV of all the tokens that it started with is there. Precedes its first token.
    Computed {
        /// The sequence.
        id: SequenceId,
        /// Engine time from its first pass to its last, µs.
        compute_us: u64,
    },
    /// A logprob for each prompt token but the first; only when asked for. Precedes `Computed`.
    PromptLogprobs {
        /// The sequence.
        id: SequenceId,
        /// In order.
        logprobs: Vec<TokenLogprob>,
    },
    /// A token was drawn.
    Token {
        /// The sequence.
        id: SequenceId,
        /// Position in the answer, from 0 over the whole answer, wherever it began.
        index: u32,
        /// The token.
        token: u32,
        /// When asked for.
        logprob: Option<TokenLogprob>,
        /// Set on the last one; the sequence is gone then.
        finish: Option<Finish>,
    },
    /// The next token has no slot; it waits for [`Engine::extend`].
    Starved {
        /// The sequence.
        id: SequenceId,
    },
}

/// Is shown KV as it is computed.
pub trait KvSink {
    /// `layer` of `tokens` (positions) of a sequence has been computed; `blocks` is its slot table.
    fn layer_computed(&mut self, id: SequenceId, layer: u32, tokens: Range<u32>, at: (&[u32], &KvPool));
}

/// A paged KV pool and the sequences that run over it.
///
/// Results depend on a sequence's own tokens and sampling and on nothing else: not on what runs
/// beside it, on how it was cut into chunks, on which slots hold it or on where its KV was computed.
pub trait Engine: Send {
    /// The shape of its KV.
    fn shape(&self) -> &KvShape;
    /// The model that it runs.
    fn model(&self) -> &ModelCard;
    /// Takes in a sequence.
    ///
    /// # Errors
    /// Names what does not fit: an id in use, a slot or token out of range, too few slots for the
    /// tokens, nothing left to compute, too many tokens for the model.
    fn start(&mut self, sequence: Sequence) -> Result<(), StartError>;
    /// Appends slots to a sequence's table. Unknown ones are ignored.
    fn extend(&mut self, id: SequenceId, blocks: &[u32]);
    /// Drops a sequence; its slots are not touched from here on. Unknown ones are ignored.
    fn stop(&mut self, id: SequenceId);
    /// From the next pass on, prompt tokens beside decodes are as many as fit in the target; without one, passes are
    /// filled.
    fn set_step_target(&mut self, target: Option<StepTarget>);
    /// One pass: a token for every sequence that draws, and prompt tokens up to the pass's bound.
    /// False when nothing could run. A timed engine sleeps for as long as a pass takes.
    fn step(&mut self, events: &mut Vec<Event>, sink: &mut dyn KvSink) -> bool;
    /// Its KV.
    fn kv(&self) -> &KvPool;
    /// Its KV, to be written: blocks that no sequence reads or writes.
    fn kv_mut(&mut self) -> &mut KvPool;
    /// Sequences that run, and those that wait for their turn to compute.
    fn load(&self) -> (u32, u32);
}
