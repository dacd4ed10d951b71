//! One leg of a request on this node.

use std::sync::Arc;
use std::time::Instant;

use baton_tiers::Hold;
use baton_types::{BlockKey, ChainHasher, Run, Sampling};
use baton_wire::v1;

/// Where a leg is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// A prefill in the queue.
    Queued,
    /// Its blocks are being brought.
    Loading,
    /// Its engine sequence runs up to the first token.
    Computing,
    /// Computed; its KV leaves, or it waits for the word to decode here.
    Held,
    /// KV is expected from a peer.
    Expecting,
    /// All of it arrived.
    Landed,
    /// Decoding.
    Decoding,
}

/// One leg.
pub(super) struct Job {
    pub attempt: u32,
    pub stage: Stage,
    /// What the engine was, or will be, started with; a decode leg's come with its KV.
    pub tokens: Vec<u32>,
    /// How many they are, also before they have come.
    pub token_count: usize,
    pub prompt_tokens: u32,
    /// Keys of the prompt's full blocks.
    pub chain: Vec<BlockKey>,
    pub root: BlockKey,
    pub sampling: Arc<Sampling>,
    /// Where the KV goes; `None` for a local decode and for the decode leg.
    pub to: Option<v1::Peer>,
    pub fetch: Option<(v1::Peer, u32)>,
    pub room_tokens: u32,
    pub order: u64,
    pub arrival: u64,
    pub hold: Option<Hold>,
    pub readable_blocks: u32,
    pub awaits_cache: bool,
    pub awaits_fetch: bool,
    pub compute_us: u64,
    pub cached_tokens: u64,
    /// Tokens drawn here, for the cache at the end.
    pub drawn: Vec<u32>,
    /// When its hand-off failed: the conductor says soon what shall become of it, or has forgotten it.
    pub stranded: Option<Instant>,
}

impl Job {
    /// What an order to prefill says; the keys of the prompt's blocks follow from its tokens.
    ///
    /// # Errors
    /// With the reason, when it makes no sense on any node.
    pub(super) fn to_prefill(
        attempt: u32,
        work: Option<v1::Work>,
        room_tokens: u32,
        naming: (u64, u32),
    ) -> Result<Self, String> {
        let mut job = Self::expected(attempt, work, room_tokens, naming.1)?;
        if job.tokens.is_empty() {
            return Err("an order to prefill without its tokens".into());
        }
        if job.chain.is_empty() {
            let (seed, block_tokens) = naming;
            let prompt = &job.tokens[..job.prompt_tokens as usize];
            let mut hasher = ChainHasher::resume(seed, job.root);
            job.chain =
                prompt.chunks_exact(block_tokens as usize).map(|block| hasher.push_tokens(block)).collect();
        }
        Ok(job)
    }

    /// What an order says to expect KV.
    ///
    /// # Errors
    /// With the reason, when it makes no sense on any node.
    pub(super) fn expected(
        attempt: u32,
        work: Option<v1::Work>,
        room_tokens: u32,
        block_tokens: u32,
    ) -> Result<Self, String> {
        let work = work.ok_or("an order without work")?;
        let sampling: Sampling =
            serde_json::from_str(&work.sampling).map_err(|e| format!("sampling settings: {e}"))?;
        let count = work.token_count as usize;
        if count == 0 || work.prompt_tokens == 0 || work.prompt_tokens > work.token_count {
            return Err("an order without tokens".into());
        }
        let tokens = baton_wire::unpack_tokens(&work.tokens).ok_or("tokens that are torn, or of no width")?;
        if !tokens.is_empty() && tokens.len() != count {
            return Err(format!("{} tokens where {count} were announced", tokens.len()));
        }
        let chain = baton_wire::unpack_keys(&work.chain);
        // A key of tokens that are not there would name what nobody computes.
        if chain.len() * block_tokens as usize > count {
            return Err(format!("a chain of {} blocks of {block_tokens} for {count} tokens", chain.len()));
        }
        Ok(Self {
            attempt,
            stage: Stage::Queued,
            prompt_tokens: work.prompt_tokens,
            chain,
            root: baton_wire::unpack_keys(&work.root).first().copied().unwrap_or_default(),
            tokens,
            token_count: count,
            sampling: Arc::new(sampling),
            to: None,
            fetch: None,
            room_tokens,
            order: 0,
            arrival: 0,
            hold: None,
            readable_blocks: 0,
            awaits_cache: false,
            awaits_fetch: false,
            compute_us: 0,
            cached_tokens: 0,
            drawn: Vec::new(),
            stranded: None,
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

    /// Takes what [`Job::packed_tokens`] of the prefill leg told.
    ///
    /// # Errors
    /// With the reason, when they are not as many as were announced.
    pub(super) fn take_tokens(&mut self, note: &[u8]) -> Result<(), String> {
        let (width, packed) = note.split_first().ok_or("a note without tokens")?;
        let mut tokens = Vec::new();
        let whole =
            Run::unpack(packed, u32::from(*width), &mut tokens).filter(|()| tokens.len() == self.token_count);
        whole.ok_or_else(|| {
            format!("{} bytes are not {} tokens of {width} bytes", packed.len(), self.token_count)
        })?;
        self.tokens = tokens;
        Ok(())
    }

    /// Slots of the pool that it computes in.
    pub(super) fn slots(&self) -> &[u32] {
        self.hold.as_ref().map_or(&[], |hold| &hold.slots)
    }

    /// Tokens to come that need room here: none where the KV leaves after the prefill.
    pub(super) const fn leg_room_tokens(&self) -> usize {
        if self.to.is_none() { self.room_tokens as usize } else { 0 }
    }

    /// Blocks beyond its chain that it needs for `tokens` tokens.
    pub(super) fn room_blocks(&self, tokens: usize, block_tokens: u32) -> u32 {
        let blocks = tokens.div_ceil(block_tokens as usize);
        u32::try_from(blocks.saturating_sub(self.chain.len())).unwrap_or(u32::MAX)
    }

    /// Leading tokens whose KV need not be computed: the last token always is.
    pub(super) fn computed_tokens(&self, block_tokens: u32) -> u32 {
        let last = u32::try_from(self.token_count - 1).unwrap_or(u32::MAX);
        self.readable_blocks.saturating_mul(block_tokens).min(last)
    }
}
