//! Simulates an engine's prefill time: prompts are computed one after the other, without their cached prefix.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use super::prefix::PrefixCache;
use super::server::pass;
use super::steps::{Pace, StepClock};

/// How an engine computes prompts.
#[derive(Clone, Copy, Debug)]
pub struct Cost {
    /// Blocks of prompts that it keeps; 0: none, and every token is computed.
    pub cache_blocks: u32,
    /// Time of each prompt token that is computed; prompts wait for each other.
    pub prompt_token_time: Duration,
    /// Prompt tokens of one step at most, which every answer waits for; 0: answers go on beside prompts.
    pub step_tokens: u32,
}

impl Cost {
    /// No cache, and no time.
    pub const NONE: Self = Self { cache_blocks: 0, prompt_token_time: Duration::ZERO, step_tokens: 0 };

    /// Blocks that the engine says it has room for: those of its cache, or all of a pool of `blocks` without one.
    pub(super) const fn announced_blocks(&self, blocks: u32) -> u32 {
        if self.cache_blocks > 0 { self.cache_blocks } else { blocks }
    }
}

/// An engine's prompts.
#[derive(Debug)]
pub(super) struct Prompts {
    cost: Cost,
    cache: Mutex<PrefixCache>,
    turn: tokio::sync::Mutex<()>,
    token_time: Duration,
    steps: Option<StepClock>,
    asked_tokens: AtomicU64,
    cached_tokens: AtomicU64,
}

impl Prompts {
    /// Of an engine whose steps without prompt tokens take `token_time`.
    pub(super) fn new(cost: Cost, token_time: Duration, block_tokens: u32) -> Self {
        let budget = u64::from(cost.step_tokens);
        let steps = (budget > 0).then(|| StepClock::start(token_time, cost.prompt_token_time, budget));
        Self {
            token_time,
            steps,
            cost,
            cache: Mutex::new(PrefixCache::new(cost.cache_blocks, block_tokens)),
            turn: tokio::sync::Mutex::default(),
            asked_tokens: AtomicU64::new(0),
            cached_tokens: AtomicU64::new(0),
        }
    }

    /// Computes a prompt; how many of its tokens were there already.
    pub(super) async fn compute(&self, salt: &str, prompt: &[u32]) -> usize {
        let serial = !self.cost.prompt_token_time.is_zero() && self.steps.is_none();
        let turn = if serial { Some(self.turn.lock().await) } else { None };
        let cached = self.cache.lock().take(salt, prompt);
        self.asked_tokens.fetch_add(prompt.len() as u64, Ordering::Relaxed);
        self.cached_tokens.fetch_add(cached as u64, Ordering::Relaxed);
        let computed = u32::try_from(prompt.len() - cached).unwrap_or(u32::MAX);
        match &self.steps {
            Some(steps) => steps.prompt(computed.into()).await,
            None => pass(self.cost.prompt_token_time * computed).await,
        }
        drop(turn);
        cached
    }

    /// How the tokens of an answer come, whose prompt was `computed` here or whose KV was brought.
    pub(super) fn pace(&self, computed: bool) -> Pace {
        self.steps.as_ref().map_or(Pace::Timed(self.token_time), |steps| steps.answer(computed))
    }

    /// Prompt tokens since the start, and those of them that were not computed.
    pub(super) fn counts(&self) -> (u64, u64) {
        (self.asked_tokens.load(Ordering::Relaxed), self.cached_tokens.load(Ordering::Relaxed))
    }
}
