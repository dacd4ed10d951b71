//! What is asked of an engine: token ids, how to draw, and what else the client said.

use std::sync::Arc;

use baton_types::{ChainHasher, Finish, Sampling, TokenLogprob};
use bytes::Bytes;

/// One answer wanted. Both legs of a pair are made of one and the same request.
#[derive(Clone, Debug)]
pub struct Request {
    /// The request's id as Baton knows it. Engines get it with a suffix, for clients may repeat theirs.
    pub id: Arc<str>,
    /// The prompt.
    pub tokens: Arc<Vec<u32>>,
    /// How tokens are drawn.
    pub sampling: Arc<Sampling>,
    /// The client's body, as it came, or empty. Fields that Baton does not know go to the engine from here.
    pub body: Bytes,
}

/// The prompt's tokens as a number: two legs with the same one have the same prompt.
pub(crate) fn digest(tokens: &[u32]) -> u64 {
    ChainHasher::new(0, b"hand-off").push_tokens(tokens).short().0
}

/// A drawn token.
#[derive(Clone, Debug, PartialEq)]
pub struct Token {
    /// Its id.
    pub id: u32,
    /// When asked for and told. After a hand-off SGLang may not tell it of the first token.
    pub logprob: Option<TokenLogprob>,
}

/// What an answer took, as the engine counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Tokens of the prompt.
    pub prompt_tokens: Option<u64>,
    /// Tokens of the answer.
    pub answer_tokens: Option<u64>,
    /// Prompt tokens that were not computed again. Not told by every engine: vLLM needs
    /// `--enable-prompt-tokens-details`.
    pub cached_tokens: Option<u64>,
}

/// A piece of an answer. The last one is `Finished`, exactly once.
#[derive(Clone, Debug, PartialEq)]
pub enum Piece {
    /// Logprobs of the prompt's tokens but the first, when asked for; before any token.
    PromptLogprobs(Vec<TokenLogprob>),
    /// The next tokens, at least one.
    Tokens(Vec<Token>),
    /// The answer is complete.
    Finished {
        /// Why.
        finish: Finish,
        /// What it took.
        counts: Counts,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_differ_by_their_digests() {
        assert_eq!(digest(&[1, 2, 3]), digest(&[1, 2, 3]));
        assert_ne!(digest(&[1, 2, 3]), digest(&[1, 3, 2]));
        assert_ne!(digest(&[1, 2, 3]), digest(&[1, 2, 3, 0]));
        let long: Vec<u32> = (0..5_000).collect();
        assert_ne!(digest(&long), digest(&long[..4_999]));
    }
}
