//! How tokens are drawn and what is said of them: the words that the router, the wire and the engines share.

use alloc::vec::Vec;
use serde::{Deserialize, Serialize};

/// How one answer's tokens are drawn. The draw at a position depends on `seed`, on the position and
/// on the tokens before it, on nothing else: wherever a request goes on, it goes on alike.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Sampling {
    /// Divides the logits; 0 takes the likeliest token.
    pub temperature: f32,
    /// Share of probability that the candidates make up, 0–1.
    pub top_p: f32,
    /// Candidates at most; 0 for all.
    pub top_k: u32,
    /// Candidates have at least this share of the likeliest one's probability.
    pub min_p: f32,
    /// Subtracted once from the logit of each token that the answer already has.
    pub presence_penalty: f32,
    /// Subtracted for each time that the answer already has the token.
    pub frequency_penalty: f32,
    /// Divides positive and multiplies negative logits of tokens that prompt or answer have; 1 for none.
    pub repetition_penalty: f32,
    /// Added to logits, by token, in ascending order of tokens.
    pub logit_bias: Vec<(u32, f32)>,
    /// Seed of the draws.
    pub seed: u64,
    /// Output tokens at most, at least 1.
    pub max_tokens: u32,
    /// No end before this many output tokens.
    pub min_tokens: u32,
    /// Tokens that end the answer beside the model's own; they are emitted with `Finish::Stop`.
    pub stop_token_ids: Vec<u32>,
    /// Whether the model's own end tokens are ordinary ones.
    pub ignore_eos: bool,
    /// Whether each token's logprob is wanted, with this many of the likeliest (0 for none beside it).
    pub logprobs: Option<u8>,
    /// The same for the prompt's tokens.
    pub prompt_logprobs: Option<u8>,
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repetition_penalty: 1.0,
            logit_bias: Vec::new(),
            seed: 0,
            max_tokens: 16,
            min_tokens: 0,
            stop_token_ids: Vec::new(),
            ignore_eos: false,
            logprobs: None,
            prompt_logprobs: None,
        }
    }
}

/// A token with its logprob among the likeliest.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TokenLogprob {
    /// The token's own natural-log probability, before temperature and penalties.
    pub logprob: f32,
    /// The likeliest tokens, likeliest first, ties by lower id.
    pub top: Vec<(u32, f32)>,
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Finish {
    /// The model's end token or a stop token.
    Stop,
    /// `max_tokens` or the model's context length.
    Length,
}

impl Finish {
    /// OpenAI's word.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_those_of_the_api() {
        let plain = Sampling::default();
        assert!((plain.temperature - 1.0).abs() < f32::EPSILON && (plain.top_p - 1.0).abs() < f32::EPSILON);
        assert_eq!((plain.top_k, plain.min_tokens, plain.max_tokens), (0, 0, 16));
        assert!(!plain.ignore_eos && plain.logprobs.is_none() && plain.logit_bias.is_empty());
    }

    #[test]
    fn ends_have_the_words_of_the_api() {
        assert_eq!([Finish::Stop.name(), Finish::Length.name()], ["stop", "length"]);
    }
}
