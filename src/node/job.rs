//! One leg of a request on this node.

use std::sync::Arc;

use baton_legs::Work;
use baton_tiers::Hold;
use baton_types::{BlockKey, ChainHasher, Run, Sampling};
use baton_wire::v1;

use super::error::OrderError;

/// The keys of full blocks. `naming` is the seed of the keys and the tokens in a block.
pub(super) fn block_keys(tokens: &[u32], root: BlockKey, (seed, block_tokens): (u64, u32)) -> Vec<BlockKey> {
    let mut hasher = ChainHasher::resume(seed, root);
    tokens.chunks_exact(block_tokens as usize).map(|block| hasher.push_tokens(block)).collect()
}

/// The content of a leg. The node's [`baton_legs::Legs`] hold its state.
pub(super) struct Job {
    pub attempt: u32,
    /// The tokens that the engine was, or will be, started with. Those of a decode leg arrive with its KV.
    pub tokens: Vec<u32>,
    /// How many they are, also before they have come.
    pub token_count: usize,
    pub prompt_tokens: u32,
    /// Keys of the full blocks of what is to be prefilled: the prompt, and the answer so far.
    pub chain: Vec<BlockKey>,
    pub root: BlockKey,
    pub sampling: Arc<Sampling>,
    /// Where the KV goes; `None` for a local decode and for the decode leg.
    pub to: Option<v1::Peer>,
    /// The holder of more of it, until a fetch begins.
    pub fetch_from: Option<v1::Peer>,
    pub room_tokens: u32,
    pub order: u64,
    pub hold: Option<Hold>,
    pub readable_blocks: u32,
    /// Tokens that its client has already, when it decodes on.
    pub answer: Vec<u32>,
    pub compute_us: u64,
    pub cached_tokens: u64,
    /// Tokens drawn here, for the cache at the end.
    pub drawn: Vec<u32>,
}

impl Job {
    /// The job of an order to prefill. The keys of its blocks follow from the tokens.
    ///
    /// # Errors
    /// When it makes no sense on any node.
    pub(super) fn to_prefill(
        attempt: u32,
        work: Option<v1::Work>,
        room_tokens: u32,
        naming: (u64, u32),
    ) -> Result<Self, OrderError> {
        let mut job = Self::expected(attempt, work, room_tokens, naming.1)?;
        if job.tokens.is_empty() {
            return Err(OrderError::Prompt);
        }
        if job.chain.is_empty() {
            job.chain = block_keys(&job.tokens, job.root, naming);
        }
        Ok(job)
    }

    /// The job of an order to expect KV.
    ///
    /// # Errors
    /// When it makes no sense on any node.
    pub(super) fn expected(
        attempt: u32,
        work: Option<v1::Work>,
        room_tokens: u32,
        block_tokens: u32,
    ) -> Result<Self, OrderError> {
        let work = work.ok_or(OrderError::Work)?;
        let sampling = work.sampling.as_ref().and_then(v1::Sampling::read);
        let sampling = sampling.ok_or(OrderError::Sampling)?;
        let count = work.token_count as usize;
        if count == 0 || work.prompt_tokens == 0 || work.prompt_tokens > work.token_count {
            return Err(OrderError::Tokens);
        }
        let tokens = baton_wire::unpack_tokens(&work.tokens).ok_or(OrderError::Torn)?;
        if !tokens.is_empty() && tokens.len() != count {
            return Err(OrderError::Count { tokens: tokens.len(), announced: count });
        }
        let chain = baton_wire::unpack_keys(&work.chain);
        // A key of tokens that are not there would name what nobody computes.
        if chain.len() * block_tokens as usize > count {
            return Err(OrderError::Chain { blocks: chain.len(), block_tokens, tokens: count });
        }
        Ok(Self {
            attempt,
            prompt_tokens: work.prompt_tokens,
            chain,
            root: baton_wire::unpack_keys(&work.root).first().copied().unwrap_or_default(),
            tokens,
            token_count: count,
            sampling: Arc::new(sampling),
            to: None,
            fetch_from: None,
            room_tokens,
            order: 0,
            hold: None,
            readable_blocks: 0,
            answer: Vec::new(),
            compute_us: 0,
            cached_tokens: 0,
            drawn: Vec::new(),
        })
    }

    /// The tokens as a note to the decode leg: their width in the first byte.
    pub(super) fn packed_tokens(&self) -> Vec<u8> {
        let run = Run::pack(&self.tokens);
        let mut note = Vec::with_capacity(1 + run.packed().len());
        note.push(run.width());
        note.extend_from_slice(run.packed());
        note
    }

    /// Takes the tokens that [`Job::packed_tokens`] of the prefill leg sent.
    ///
    /// # Errors
    /// When they are not as many as were announced.
    pub(super) fn take_tokens(&mut self, note: &[u8]) -> Result<(), OrderError> {
        let (width, packed) = note.split_first().ok_or(OrderError::Note)?;
        let mut tokens = Vec::new();
        let whole =
            Run::unpack(packed, u32::from(*width), &mut tokens).filter(|()| tokens.len() == self.token_count);
        whole.ok_or(OrderError::NoteCount {
            bytes: packed.len(),
            tokens: self.token_count,
            width: *width,
        })?;
        self.tokens = tokens;
        Ok(())
    }

    /// Slots of the pool that it computes in.
    pub(super) fn slots(&self) -> &[u32] {
        self.hold.as_ref().map_or(&[], |hold| &hold.slots)
    }

    /// The memory and blocks that the job needs on its node.
    pub(super) fn work(&self) -> Work {
        Work {
            prompt_tokens: self.token_count as u64,
            named_blocks: u32::try_from(self.chain.len()).unwrap_or(u32::MAX),
            room_tokens: self.room_tokens,
        }
    }
}
