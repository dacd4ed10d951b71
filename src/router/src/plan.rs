//! The properties that all answers of one call share.

use std::sync::Arc;

use baton_http::MemoryShare;
use baton_types::Tokens;

use crate::output_parsing::OutputPlan;
use crate::sampling::Endpoint;
use crate::tokenize::Tokenization;

/// A prompt of the call.
#[derive(Debug)]
pub(crate) struct PlannedPrompt {
    pub(crate) tokens: Tokens,
    /// As text, when it is to be echoed.
    pub(crate) text: String,
}

/// How a call's answers are turned into text and JSON.
pub(crate) struct Plan {
    pub(crate) endpoint: Endpoint,
    pub(crate) tokenization: Arc<Tokenization>,
    pub(crate) prompts: Vec<PlannedPrompt>,
    /// Name of the response, made here.
    pub(crate) id: String,
    /// Time of the call, s since 1970.
    pub(crate) created_s: u64,
    /// The model as the client calls it.
    pub(crate) model: String,
    pub(crate) stops: Vec<String>,
    pub(crate) keep_stop: bool,
    pub(crate) skip_special: bool,
    /// Whether answers are more than their text.
    pub(crate) output: OutputPlan,
    pub(crate) min_tokens: u32,
    /// Tokens that end the answer and have no text in it, ascending.
    pub(crate) ends: Vec<u32>,
    /// Those of them that the client named and that are not the model's own: the answer says which of them ended it.
    pub(crate) named_ends: Vec<u32>,
    pub(crate) echo: bool,
    /// Only the prompt is wanted: engines make one token at least.
    pub(crate) discards_tokens: bool,
    pub(crate) logprobs: bool,
    /// Logprobs name tokens by number.
    pub(crate) names_by_id: bool,
    /// The tokens themselves go along with the text.
    pub(crate) tells_ids: bool,
    pub(crate) wants_prompt_logs: bool,
    /// The prompt's logprobs are a field of their own.
    pub(crate) shows_prompt_logs: bool,
    pub(crate) include_usage: bool,
    /// The client gets the usage of the call.
    pub(crate) tells_usage: bool,
    pub(crate) continuous_usage: bool,
    /// The memory share of the prompts.
    pub(crate) _room: Option<MemoryShare>,
}

impl Plan {
    pub(crate) fn is_end(&self, token: u32) -> bool {
        self.ends.binary_search(&token).is_ok()
    }

    /// Tokens of all prompts, each counted once.
    pub(crate) fn prompt_tokens(&self) -> u64 {
        self.prompts.iter().map(|prompt| prompt.tokens.len() as u64).sum()
    }
}
