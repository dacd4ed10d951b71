//! A model whose weights follow from a seed: nothing to download, the same everywhere.

use baton_types::Rng;
use xxhash_rust::xxh3::xxh3_64;

use crate::BuildError;
use crate::config::ModelConfig;
use crate::rotary::Scaling;
use crate::weights::Source;

/// The token that ends an answer of a seeded model, if its vocabulary reaches so far.
pub const END_TOKEN: u32 = 257;

/// Above this a seeded model is a mistake: it would take minutes to draw and all memory to hold.
const MOST_WEIGHTS: u128 = 1 << 31;

/// The shape and seed of a model of random weights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SeededSpec {
    /// Its name.
    pub name: String,
    /// The seed of its weights.
    pub seed: u64,
    /// Number of layers.
    pub layers: u32,
    /// Width of the residual stream, a multiple of `2 · heads`.
    pub dim: u32,
    /// Query heads.
    pub heads: u32,
    /// Key and value heads, a divisor of `heads`.
    pub kv_heads: u32,
    /// Width of the feed-forward part.
    pub ffn_dim: u32,
    /// Tokens in the vocabulary: 0–255 are bytes, those above are special.
    pub vocab_tokens: u32,
    /// Longest prompt and answer together, tokens.
    pub max_model_tokens: u32,
}

impl Default for SeededSpec {
    /// About 3 million weights: quick on one core, and still a real transformer.
    fn default() -> Self {
        Self {
            name: "baton-seeded".into(),
            seed: 0,
            layers: 4,
            dim: 256,
            heads: 8,
            kv_heads: 4,
            ffn_dim: 688,
            vocab_tokens: 512,
            max_model_tokens: 8192,
        }
    }
}

impl SeededSpec {
    /// The model's shape.
    ///
    /// # Errors
    /// Names what does not fit together.
    pub(crate) fn config(&self) -> Result<ModelConfig, BuildError> {
        if self.heads == 0 || !self.dim.is_multiple_of(2 * self.heads) {
            return Err(BuildError(format!(
                "seeded model: dim {} must be a multiple of 2 · heads ({})",
                self.dim, self.heads
            )));
        }
        let config = ModelConfig {
            layers: self.layers as usize,
            dim: self.dim as usize,
            heads: self.heads as usize,
            kv_heads: self.kv_heads as usize,
            head_dim: (self.dim / self.heads) as usize,
            ffn_dim: self.ffn_dim as usize,
            vocab_tokens: self.vocab_tokens as usize,
            max_model_tokens: self.max_model_tokens,
            epsilon: 1e-5,
            theta: 10_000.0,
            scaling: Scaling::None,
            tied: false,
        };
        config.validate()?;
        let [dim, ffn_dim, vocab, layers] =
            [self.dim, self.ffn_dim, self.vocab_tokens, self.layers].map(u128::from);
        if dim * (layers * (4 * dim + 3 * ffn_dim) + 2 * vocab) > MOST_WEIGHTS {
            return Err(BuildError(format!(
                "seeded model: more than {MOST_WEIGHTS} weights; make it smaller"
            )));
        }
        Ok(config)
    }

    /// The tokens that end an answer.
    pub(crate) fn end_tokens(&self) -> Vec<u32> {
        if self.vocab_tokens > END_TOKEN { vec![END_TOKEN] } else { Vec::new() }
    }
}

/// The first number of the residual stream is the same for every token, and no layer writes to it,
/// so that the output matrix can make some tokens rare: answers are printable text, then an end.
const CONSTANT: f32 = 4.0;
/// The logit that the output matrix makes of it for the other tokens.
const RARE: f32 = -6.0;

/// Draws tensors from a seed; a tensor depends on the seed, its name and its shape alone.
#[derive(Debug)]
pub(crate) struct SeededSource(pub(crate) u64);

impl Source for SeededSource {
    fn tensor(&mut self, name: &str, shape: &[usize]) -> Result<Vec<f32>, BuildError> {
        let &[outputs, inputs] = shape else { return Ok(vec![1.0; shape.iter().product()]) };
        let mut rng = Rng::fork(self.0, xxh3_64(name.as_bytes()));
        let embeds = name.contains("embed_tokens");
        #[expect(clippy::cast_precision_loss, reason = "widths are far below 2^24")]
        let spread = if embeds { 1.0 } else { 1.0 / (inputs as f32).sqrt() };
        #[expect(clippy::cast_possible_truncation, reason = "random bits")]
        let mut numbers: Vec<f32> =
            (0..outputs * inputs).map(|_| (rng.unit() * 2.0 - 1.0) as f32 * 1.732 * spread).collect();
        if embeds {
            numbers.iter_mut().step_by(inputs).for_each(|x| *x = CONSTANT);
        } else if name.contains("lm_head") {
            for (token, row) in numbers.chunks_exact_mut(inputs).enumerate() {
                row.iter_mut().for_each(|x| *x *= 2.0);
                row[0] = if speaks(token) { 0.0 } else { RARE };
            }
        } else if name.contains("o_proj") || name.contains("down_proj") {
            numbers[..inputs].fill(0.0);
        }
        Ok(numbers)
    }
}

/// Whether a token belongs into an answer: a line's end, a printable character, the answer's end.
fn speaks(token: usize) -> bool {
    token == 10 || (32..127).contains(&token) || token == END_TOKEN as usize
}
