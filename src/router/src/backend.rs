//! The port to what serves tokens.

use std::any::Any;
use std::sync::Arc;

use baton_types::{BlockKey, Finish, RequestObjectives, Sampling, TokenLogprob, Tokens};
use bytes::Bytes;
use tokio::sync::mpsc;

use crate::trace::TraceParent;

/// One answer wanted: a call with `n` choices or several prompts makes several.
#[derive(Clone, Debug)]
pub struct Submission {
    /// The client's request id, with the choice's number when there are several.
    pub request_id: Arc<str>,
    /// The prompt.
    pub tokens: Tokens,
    /// The root key of the namespace, from which the chain starts (`ChainHasher::parent` before any block).
    pub root: BlockKey,
    /// Keys of the prompt's full blocks, from the root.
    pub chain: Arc<[BlockKey]>,
    /// How tokens are drawn.
    pub sampling: Arc<Sampling>,
    /// Service class asked for, by name; the first one when `None`.
    pub class: Option<Arc<str>>,
    /// The header or field in which the client named that class, for `error.param` where it is refused for it.
    pub class_param: Option<&'static str>,
    /// Objectives that the client named for this call, in place of its class's.
    pub objectives: RequestObjectives,
    /// The tenant's name; the anonymous tenant when `None`.
    pub tenant: Option<Arc<str>>,
    /// Names the conversation, hashed: calls with the same one belong together.
    pub session: Option<u64>,
    /// The client's body for engines: without what became tokens.
    pub body: Bytes,
    /// The length of the answer that the client named, tokens; none, where `sampling.max_tokens` is only what fits.
    pub asked_tokens: Option<u32>,
    /// The client wants to know where it went, and why.
    pub explain: bool,
    /// How long the client waits at most, µs.
    pub timeout_us: Option<u64>,
    /// The trace that the client says it belongs to.
    pub trace: Option<TraceParent>,
}

/// An event of a submission. The first event is `Admitted`, `Refused` or `Failed`. The last is `Refused`, `Finished` or
/// `Failed`, exactly once, unless the ticket was dropped before.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// It will be served.
    Admitted {
        /// Instance names, predicted TTFT and why, for the response header on demand.
        decision: Option<Arc<str>>,
    },
    /// Logprobs of the prompt's tokens but the first, when asked for; before the first token.
    PromptLogprobs(Vec<TokenLogprob>),
    /// The next token.
    Token {
        /// The token.
        token: u32,
        /// When asked for.
        logprob: Option<TokenLogprob>,
    },
    /// The answer is complete.
    Finished {
        /// The way in which it ended.
        finish: Finish,
        /// The usage of the request.
        usage: Usage,
    },
    /// It is not served, before any work was done.
    Refused(Refusal),
    /// It was admitted and could not be served to its end.
    Failed(Fault),
}

/// Tokens of one answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Prompt tokens that were not computed again, as the engine counted them.
    pub cached_tokens: u64,
    /// Times that the answer moved to another instance.
    pub moves: u32,
}

/// Why and for how long a request is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// HTTP status: 429, 503 or 400.
    pub status: u16,
    /// The predicate that failed.
    pub reason: Arc<str>,
    /// For a person.
    pub message: Arc<str>,
    /// The header or field at fault, if there is one.
    pub param: Option<&'static str>,
    /// When the same request is predicted to be admitted, from now, µs.
    pub retry_after_us: Option<u64>,
    /// Best TTFT predicted for it, µs.
    pub predicted_ttft_us: Option<u64>,
}

/// Why a request ended without its answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// HTTP status: 502, 503 or 504, or the engine's own 4xx.
    pub status: u16,
    /// The stage: `prefill_failed`, `handoff_timeout`, `decode_lost` and so on.
    pub stage: Arc<str>,
    /// For a person.
    pub message: Arc<str>,
}

/// A submission under way. Dropping it cancels the request on every leg.
///
/// A receiver that drops only the guard, after a stop string, may still get the usage. If the prompt was computed,
/// [`Event::Finished`] arrives with the usage so far; otherwise the channel ends.
pub struct SubmissionStream {
    /// The events of the submission.
    pub events: mpsc::Receiver<Event>,
    /// Cancels when dropped.
    pub guard: Box<dyn Any + Send + Sync>,
}

/// The model that is served.
#[derive(Clone, Debug, PartialEq)]
pub struct Model {
    /// Name that clients ask for.
    pub name: String,
    /// Other names that it answers to.
    pub aliases: Vec<String>,
    /// Revision: part of every block key.
    pub revision: String,
    /// Tokens in the vocabulary.
    pub vocab_tokens: u32,
    /// Tokens that end an answer.
    pub end_tokens: Vec<u32>,
    /// Longest prompt and answer together.
    pub max_model_tokens: u32,
    /// Tokens in a block.
    pub block_tokens: u32,
    /// Whether its engines can be held to a grammar: `response_format` of JSON, a tool choice of `required`.
    pub constrains: bool,
}

/// Whether calls can be served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Readiness {
    /// A canary passed through a pair, and the pair is still there.
    pub ready: bool,
    /// For a person: what there is and what is missing.
    pub detail: String,
}

/// The service behind the router that answers requests with tokens.
pub trait Backend: Send + Sync + 'static {
    /// Takes in a submission; never blocks, and answers through the ticket even when it refuses.
    fn submit(&self, submission: Submission) -> SubmissionStream;
    /// The model, once a node has said what it runs.
    fn model(&self) -> Option<Arc<Model>>;
    /// Whether calls can be served.
    fn readiness(&self) -> Readiness;
}
