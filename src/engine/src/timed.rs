//! The engine that only keeps time: passes take as long as a cost profile says, tokens follow from
//! hashes, and KV blocks hold a pattern that proves what was computed into them.

use std::time::{Duration, Instant};

use baton_types::{CostProfile, DecodeCost, FitReport, PrefillCost, TokenLogprob, ValidRange};

use crate::pool::layer_bytes;
use crate::roster::{Chunk, Roster};
use crate::{
    BuildError, Engine, Event, KvPool, KvShape, KvSink, ModelCard, PoolSpec, Sequence, SequenceId,
    StartError, StepTarget,
};

/// A cost profile to keep time by, and what the engine pretends to be.
#[derive(Clone, Debug, PartialEq)]
pub struct TimedSpec {
    /// Its model's name.
    pub name: String,
    /// The cost of passes, and the number of layers.
    pub profile: CostProfile,
    /// Passes take this many times what the profile says: 0 for no time at all, 1 for real time.
    pub time_scale: f64,
    /// Tokens in the vocabulary.
    pub vocab_tokens: u32,
    /// Tokens that would end an answer; none is ever drawn, so that answers end by length or by
    /// stop tokens.
    pub end_tokens: Vec<u32>,
    /// Longest prompt and answer together, tokens.
    pub max_model_tokens: u32,
    /// Bytes of a block at least; the least that holds a number for every token, layer, key and
    /// value is used where this is less.
    pub block_bytes: usize,
    /// Whether a start fails when the whole blocks of its computed tokens do not hold what their
    /// tokens would have put there: catches KV that was lost, mixed up or never sent.
    pub verify: bool,
}

/// Maximum number of layers whose KV exists. The hand-off moves a pattern: moving eighty small pieces of each block
/// would take the threads of a small machine longer than the simulated steps.
const KV_LAYERS_MAX: u32 = 8;

impl TimedSpec {
    /// In real time by `profile`.
    #[must_use]
    pub fn new(profile: CostProfile) -> Self {
        Self {
            name: profile.name.clone(),
            profile,
            time_scale: 1.0,
            vocab_tokens: 512,
            end_tokens: Vec::new(),
            max_model_tokens: 1 << 20,
            block_bytes: 0,
            verify: true,
        }
    }

    /// Passes that take no time, over blocks of one layer: what is measured with it is all else.
    #[must_use]
    pub fn zero_work() -> Self {
        let profile = CostProfile {
            name: "zero-work".into(),
            source: "passes that take no time".into(),
            kv_bytes_per_token: 1,
            kv_capacity_tokens: 1,
            layers: 1,
            shared_us: 0.0,
            fit: FitReport::default(),
            valid: ValidRange::default(),
            prefill: PrefillCost {
                knots_tokens: vec![0, 1],
                knots_us: vec![0.0, 0.0],
                attention_ps_per_pair: 0.0,
            },
            decode: DecodeCost { batches: vec![1], base_us: vec![0.0], context_ps_per_token: vec![0.0] },
        };
        Self { time_scale: 0.0, ..Self::new(profile) }
    }
}

/// Digests of a sequence's tokens.
#[derive(Clone, Copy, Debug)]
struct Digests {
    /// Of those whose KV is there.
    computed: u64,
    /// Of all.
    all: u64,
}

/// An engine that takes as long as a cost profile says and computes nothing.
///
/// A token is drawn from a digest of the sampling seed and of all tokens before it, in O(1), and is
/// a printable ASCII character where the vocabulary has them; equal wherever it runs. Logprobs, when
/// asked for, are those of an even distribution over the vocabulary. Each layer of a block holds
/// eight bytes over and over that follow from the layer and from all tokens up to the last one
/// computed in the block, so that moved KV can be verified.
#[derive(Debug)]
pub struct TimedEngine {
    shape: KvShape,
    spec: TimedSpec,
    kv: KvPool,
    roster: Roster<Digests>,
    pace: Pace,
}

impl TimedEngine {
    /// An engine over a pool of zeros.
    ///
    /// # Errors
    /// Names the field that is out of bounds.
    pub fn new(spec: TimedSpec, pool: PoolSpec) -> Result<Self, BuildError> {
        pool.validate()?;
        spec.profile.validate().map_err(|e| BuildError(format!("timed engine: {e}")))?;
        let fail = |what: &str| Err(BuildError(format!("timed engine: {what}")));
        if !(spec.time_scale.is_finite() && spec.time_scale >= 0.0) {
            return fail("time_scale must be 0 or more");
        }
        if spec.vocab_tokens < 2 || spec.max_model_tokens < 2 {
            return fail("vocab_tokens and max_model_tokens must be at least 2");
        }
        let layers = spec.profile.layers.min(KV_LAYERS_MAX);
        let least = 2 * size_of::<u16>();
        let tokens = layers as usize * pool.block_tokens as usize;
        let head_dim = spec.block_bytes.div_ceil(least * tokens).max(1);
        let layer_bytes = layer_bytes(&pool, layers as usize, least * head_dim)?;
        let Ok(head_dim) = u32::try_from(head_dim) else { return fail("block_bytes is too large") };
        let shape = KvShape {
            layers,
            kv_heads: 1,
            head_dim,
            dtype: "f16",
            block_tokens: pool.block_tokens,
            layer_bytes,
            blocks: pool.blocks,
        };
        let model = ModelCard {
            name: spec.name.clone(),
            revision: format!("timed-{}", spec.vocab_tokens),
            vocab_tokens: spec.vocab_tokens,
            end_tokens: spec.end_tokens.clone(),
            max_model_tokens: spec.max_model_tokens,
        };
        Ok(Self {
            kv: KvPool::new(&shape),
            shape,
            roster: Roster::new(pool, model),
            spec,
            pace: Pace::default(),
        })
    }

    /// How long a pass over these chunks takes, µs.
    fn pass_us(&self, chunks: &[Chunk]) -> f64 {
        let profile = &self.spec.profile;
        let (mut batch, mut context, mut new, mut attention_us) = (0, 0, 0, 0.0);
        for chunk in chunks {
            if chunk.decodes {
                batch += 1;
                context += u64::from(chunk.tokens.end);
            } else {
                let tokens = chunk.tokens.end - chunk.tokens.start;
                new += tokens;
                attention_us += profile.attention_us(u64::from(tokens), u64::from(chunk.tokens.start));
            }
        }
        let prefill_us = if new == 0 { 0.0 } else { profile.dense_us(f64::from(new)) + attention_us };
        let decode_us = profile.decode_us(batch, context);
        let shared_us = if new > 0 && batch > 0 { profile.shared_us } else { 0.0 };
        (prefill_us + decode_us - shared_us).max(0.0) * self.spec.time_scale
    }

    /// Puts the patterns of a chunk's tokens into its blocks.
    fn fill(&mut self, chunk: &Chunk) {
        let block_tokens = self.shape.block_tokens;
        let entry = self.roster.entry_mut(chunk.id);
        for position in chunk.tokens.clone() {
            entry.extra.computed = extended(entry.extra.computed, entry.sequence.tokens[position as usize]);
            if (position + 1) % block_tokens == 0 || position + 1 == chunk.tokens.end {
                let block = entry.sequence.blocks[(position / block_tokens) as usize];
                fill(&mut self.kv, self.shape.layers, (block, entry.extra.computed));
            }
        }
    }

    /// Lets the pass take its time, layer by layer where one is shown to the sink.
    fn spend(&mut self, chunks: &[Chunk], sink: &mut dyn KvSink) {
        let pass = Duration::try_from_secs_f64(self.pass_us(chunks) / 1e6).unwrap_or(Duration::MAX);
        let roster = &self.roster;
        let shown: Vec<_> = chunks
            .iter()
            .map(|chunk| (chunk, &roster.entry(chunk.id).sequence))
            .filter(|(_, sequence)| sequence.leaves)
            .collect();
        if shown.is_empty() {
            return self.pace.wait(pass);
        }
        for layer in 0..self.shape.layers {
            self.pace.wait(pass / self.shape.layers);
            for (chunk, sequence) in &shown {
                sink.layer_computed(chunk.id, layer, chunk.tokens.clone(), (&sequence.blocks, &self.kv));
            }
        }
    }

    fn draw(&mut self, chunk: &Chunk, events: &mut Vec<Event>) {
        let vocab_tokens = self.spec.vocab_tokens;
        let entry = self.roster.entry_mut(chunk.id);
        let sampling = &entry.sequence.sampling;
        if let Some(top) = sampling.prompt_logprobs {
            let count = entry.sequence.prompt_tokens as usize - 1;
            entry.prompt_logprobs = vec![even(vocab_tokens, top); count];
        }
        let logprob = sampling.logprobs.map(|top| even(vocab_tokens, top));
        let token = drawn(entry.extra.all, sampling.seed, &self.spec);
        entry.extra.all = extended(entry.extra.all, token);
        self.roster.computed(chunk, events);
        self.roster.drawn(chunk.id, token, logprob, events);
    }

    /// Whether the whole blocks of the computed tokens hold what those tokens put there.
    fn verify(&self, sequence: &Sequence) -> Result<(), StartError> {
        let mut digest = START;
        let block_tokens = self.shape.block_tokens as usize;
        let computed = &sequence.tokens[..sequence.computed_tokens as usize];
        for (n, tokens) in computed.chunks_exact(block_tokens).enumerate() {
            digest = tokens.iter().fold(digest, |digest, token| extended(digest, *token));
            let block = sequence.blocks[n];
            if let Some(layer) = differs(&self.kv, self.shape.layers, (block, digest)) {
                return Err(StartError(format!(
                    "engine start: layer {layer} of slot {block} does not hold the KV of tokens {}..{}; \
                     send it again",
                    n * block_tokens,
                    (n + 1) * block_tokens
                )));
            }
        }
        Ok(())
    }
}

impl Engine for TimedEngine {
    fn shape(&self) -> &KvShape {
        &self.shape
    }

    fn model(&self) -> &ModelCard {
        self.roster.model()
    }

    fn start(&mut self, sequence: Sequence) -> Result<(), StartError> {
        self.roster.admits(&sequence)?;
        if self.spec.verify {
            self.verify(&sequence)?;
        }
        let digest = |from, tokens: &[u32]| tokens.iter().fold(from, |digest, t| extended(digest, *t));
        let (computed, rest) = sequence.tokens.split_at(sequence.computed_tokens as usize);
        let computed = digest(START, computed);
        let digests = Digests { computed, all: digest(computed, rest) };
        self.roster.start(sequence, digests);
        Ok(())
    }

    fn extend(&mut self, id: SequenceId, blocks: &[u32]) {
        self.roster.extend(id, blocks);
    }

    fn stop(&mut self, id: SequenceId) {
        self.roster.stop(id);
    }

    fn set_step_target(&mut self, target: Option<StepTarget>) {
        self.roster.set_step_target(target);
    }

    fn step(&mut self, events: &mut Vec<Event>, sink: &mut dyn KvSink) -> bool {
        let chunks = self.roster.plan(events);
        if chunks.is_empty() {
            self.pace.rest();
            return false;
        }
        chunks.iter().for_each(|chunk| self.fill(chunk));
        self.spend(&chunks, sink);
        for chunk in &chunks {
            if chunk.draws {
                self.draw(chunk, events);
            } else {
                self.roster.computed(chunk, events);
            }
        }
        self.roster.starve(events);
        true
    }

    fn kv(&self) -> &KvPool {
        &self.kv
    }

    fn kv_mut(&mut self) -> &mut KvPool {
        &mut self.kv
    }

    fn load(&self) -> (u32, u32) {
        self.roster.load()
    }
}

/// The digest of no tokens.
const START: u64 = 0x243F_6A88_85A3_08D3;

/// Spreads every bit over all others.
const fn mixed(x: u64) -> u64 {
    let x = (x ^ (x >> 32)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let x = (x ^ (x >> 29)).wrapping_mul(0xD6E8_FEB8_6659_FD93);
    x ^ (x >> 32)
}

/// The digest of some tokens and one more.
const fn extended(digest: u64, token: u32) -> u64 {
    mixed(digest.rotate_left(5) ^ (token as u64 + 1))
}

/// The token after those of a digest.
fn drawn(digest: u64, seed: u64, spec: &TimedSpec) -> u32 {
    let random = mixed(digest ^ mixed(seed ^ START));
    let (from, to) = if spec.vocab_tokens >= 127 { (32, 127) } else { (0, spec.vocab_tokens) };
    let below = u64::from(to - from);
    let offset = u32::try_from(random % below).expect("below a 32-bit bound");
    // The next one on where that would end the answer; itself if every one of them would.
    let tokens = (0..to - from).map(|step| from + (offset + step) % (to - from));
    tokens.clone().find(|token| !spec.end_tokens.contains(token)).unwrap_or(from + offset)
}

/// The logprob of any token under an even distribution.
fn even(vocab_tokens: u32, top: u8) -> TokenLogprob {
    #[expect(clippy::cast_possible_truncation, reason = "logprobs are given in 32 bits")]
    let logprob = -libm::log(f64::from(vocab_tokens)) as f32;
    TokenLogprob { logprob, top: (0..u32::from(top).min(vocab_tokens)).map(|t| (t, logprob)).collect() }
}

/// Puts a digest's pattern into all layers of a block.
fn fill(kv: &mut KvPool, layers: u32, (block, digest): (u32, u64)) {
    for layer in 0..layers {
        let pattern = pattern(digest, layer);
        for part in kv.layer_mut(block, layer).chunks_mut(8) {
            part.copy_from_slice(&pattern[..part.len()]);
        }
    }
}

/// The first layer of a block that does not hold a digest's pattern.
fn differs(kv: &KvPool, layers: u32, (block, digest): (u32, u64)) -> Option<u32> {
    (0..layers).find(|layer| {
        let pattern = pattern(digest, *layer);
        kv.layer(block, *layer).chunks(8).any(|part| part != &pattern[..part.len()])
    })
}

fn pattern(digest: u64, layer: u32) -> [u8; 8] {
    mixed(digest ^ (u64::from(layer) << 32)).to_le_bytes()
}

/// Keeps the time of passes that follow each other: what goes by between two waits is part of the second, and
/// a wait that took too long shortens the next.
#[derive(Debug, Default)]
struct Pace {
    /// When the pass before ended, by the profile; none after a rest.
    ended: Option<Instant>,
}

impl Pace {
    /// Maximum delay that later passes make up for: after a pause the engine need not hurry through all passes it
    /// missed.
    const MOST: Duration = Duration::from_millis(20);
    const FOR_EVER: Duration = Duration::from_secs(365 * 24 * 3600);

    fn wait(&mut self, time: Duration) {
        let now = Instant::now();
        let least = now.checked_sub(Self::MOST).unwrap_or(now);
        let from = self.ended.map_or(now, |ended| ended.max(least));
        // A profile may ask for more time than a clock can tell: then it is as good as for ever.
        let due = from.checked_add(time).unwrap_or(from + Self::FOR_EVER);
        std::thread::sleep(due.saturating_duration_since(now));
        self.ended = Some(due);
    }

    /// There is nothing to do: the next pass begins when it begins.
    fn rest(&mut self) {
        self.ended = None;
    }
}
