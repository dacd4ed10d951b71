//! Helpers that the tests share: small engines, sequences, and a player that steps an engine and collects events.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use baton_engine::{
    Builtin, Engine, Event, KvPool, KvSink, PoolSpec, SeededSpec, Sequence, SequenceId, TimedEngine,
    TimedSpec,
};
use baton_types::{Finish, Rng, Sampling, TokenLogprob};

/// Tokens in a block of all pools here: small, so that texts span many.
pub const BLOCK_TOKENS: u32 = 4;

/// Sees nothing.
pub struct NullSink;

impl KvSink for NullSink {
    fn layer_computed(&mut self, _: SequenceId, _: u32, _: Range<u32>, _: (&[u32], &KvPool)) {}
}

/// A pool with room for a few texts.
pub fn pool(pass_tokens: u32) -> PoolSpec {
    PoolSpec { block_tokens: BLOCK_TOKENS, blocks: 256, pass_tokens, max_running: 8, threads: None }
}

/// A model small enough for thousands of passes.
pub fn tiny() -> SeededSpec {
    SeededSpec {
        seed: 7,
        layers: 2,
        dim: 40,
        heads: 4,
        kv_heads: 2,
        ffn_dim: 52,
        vocab_tokens: 300,
        max_model_tokens: 400,
        ..SeededSpec::default()
    }
}

/// A transformer.
pub fn builtin(pass_tokens: u32) -> Builtin {
    Builtin::seeded(&tiny(), pool(pass_tokens)).unwrap()
}

/// An engine that takes no time.
pub fn idle(pool: PoolSpec) -> TimedEngine {
    TimedEngine::new(TimedSpec::zero_work(), pool).unwrap()
}

/// A prompt to be computed from its start over the given slots.
pub fn sequence(id: u64, tokens: Vec<u32>, sampling: Sampling, blocks: Vec<u32>) -> Sequence {
    Sequence {
        id: SequenceId(id),
        prompt_tokens: u32::try_from(tokens.len()).unwrap(),
        computed_tokens: 0,
        tokens,
        blocks,
        sampling: Arc::new(sampling),
        leaves: false,
        order: 0,
    }
}

/// A random text.
pub fn text(rng: &mut Rng, len: u64) -> Vec<u32> {
    (0..len).map(|_| u32::try_from(rng.below(256)).unwrap()).collect()
}

/// `count` different slots in random order.
pub fn slots(rng: &mut Rng, from: Range<u32>, count: usize) -> Vec<u32> {
    let mut slots: Vec<u32> = from.collect();
    for n in 0..slots.len() {
        let other = n + usize::try_from(rng.below((slots.len() - n) as u64)).unwrap();
        slots.swap(n, other);
    }
    slots.truncate(count);
    slots
}

/// How many blocks hold `tokens`.
pub fn blocks_of(tokens: usize) -> usize {
    tokens.div_ceil(BLOCK_TOKENS as usize)
}

/// Copies blocks between engines, layer by layer.
pub fn carry(from: &dyn Engine, to: &mut dyn Engine, pairs: impl Iterator<Item = (u32, u32)>) {
    for (source, target) in pairs {
        for layer in 0..from.shape().layers {
            to.kv_mut().layer_mut(target, layer).copy_from_slice(from.kv().layer(source, layer));
        }
    }
}

/// The result of a sequence.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Outcome {
    /// Token by token, with the bits of logprobs.
    pub answer: Vec<(u32, u32, Vec<u32>)>,
    /// Bits of the prompt's logprobs.
    pub prompt: Vec<Vec<u32>>,
    /// Number of times that the engine reported it as computed.
    pub computed: u32,
    /// Times that it starved.
    pub starved: u32,
    /// How it ended.
    pub finish: Option<Finish>,
}

impl Outcome {
    /// The tokens alone.
    pub fn tokens(&self) -> Vec<u32> {
        self.answer.iter().map(|(_, token, _)| *token).collect()
    }
}

/// All bits of a logprob.
fn bits(logprob: &TokenLogprob) -> Vec<u32> {
    let top = logprob.top.iter().flat_map(|(token, logprob)| [*token, logprob.to_bits()]);
    std::iter::once(logprob.logprob.to_bits()).chain(top).collect()
}

/// Sorts events by sequence.
pub fn note(outcomes: &mut BTreeMap<u64, Outcome>, events: impl IntoIterator<Item = Event>) {
    for event in events {
        match event {
            Event::Computed { id, .. } => outcomes.entry(id.0).or_default().computed += 1,
            Event::Starved { id } => outcomes.entry(id.0).or_default().starved += 1,
            Event::PromptLogprobs { id, logprobs } => {
                let outcome = outcomes.entry(id.0).or_default();
                assert_eq!(outcome.computed, 0, "prompt logprobs come first");
                outcome.prompt = logprobs.iter().map(bits).collect();
            }
            Event::Token { id, index, token, logprob, finish } => {
                let outcome = outcomes.entry(id.0).or_default();
                assert_eq!(outcome.computed, 1, "computed comes before the first token");
                assert_eq!(outcome.finish, None, "nothing comes after the last token");
                outcome.answer.push((index, token, logprob.as_ref().map(bits).unwrap_or_default()));
                outcome.finish = finish;
            }
        }
    }
}

/// Steps until nothing runs.
pub fn play(engine: &mut dyn Engine) -> BTreeMap<u64, Outcome> {
    let mut outcomes = BTreeMap::new();
    let mut events = Vec::new();
    while engine.step(&mut events, &mut NullSink) {
        note(&mut outcomes, events.drain(..));
    }
    note(&mut outcomes, events);
    outcomes
}
