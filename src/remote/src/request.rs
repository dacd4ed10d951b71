//! A request to an engine: token ids, sampling, and the client's further fields.

use std::sync::Arc;

use baton_types::{Finish, Sampling, TokenLogprob};

use crate::fields::ClientBody;
use crate::prompt::Prompt;

/// One answer wanted. Both legs of a pair are made of one and the same request.
#[derive(Clone, Debug)]
pub struct Request {
    /// The request's id as Baton knows it. Engines get it with a suffix, for clients may repeat theirs.
    pub id: Arc<str>,
    /// The prompt.
    pub tokens: Prompt,
    /// How tokens are drawn.
    pub sampling: Arc<Sampling>,
    /// The client's body. Fields that Baton does not know go to the engine from here.
    pub body: ClientBody,
    /// KV of requests with different salts is kept apart: sent as `cache_salt`, in place of what the body may have.
    pub salt: Option<Arc<str>>,
}

impl Request {
    /// Baton's own request for one token, which any engine can draw: what counts is that the prompt is computed.
    #[must_use]
    pub fn of_one_token(id: Arc<str>, tokens: Prompt) -> Self {
        let sampling = Sampling { temperature: 0.0, max_tokens: 1, ignore_eos: true, ..Sampling::default() };
        Self { id, tokens, sampling: Arc::new(sampling), body: ClientBody::default(), salt: None }
    }
}

/// A drawn token.
#[derive(Clone, Debug, PartialEq)]
pub struct Token {
    /// Its id.
    pub id: u32,
    /// Present when asked for and reported. After a hand-off SGLang may not report it for the first token.
    pub logprob: Option<TokenLogprob>,
}

/// The usage of an answer, as the engine counted it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Tokens of the prompt.
    pub prompt_tokens: Option<u64>,
    /// Tokens of the answer.
    pub answer_tokens: Option<u64>,
    /// Prompt tokens that were not computed again. Not every engine reports it: vLLM needs
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
        /// The way in which it ended.
        finish: Finish,
        /// The usage of the request.
        counts: Counts,
    },
}
