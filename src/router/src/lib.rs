//! The front door: OpenAI's API in front of whatever serves tokens.
//!
//! [`Backend`] is the port to what is behind: the router turns a client's call into token ids, a
//! block chain and sampling settings, and turns tokens back into text, streams and errors.
//!
//! # What a client can say beside OpenAI's fields
//!
//! | header or field | meaning |
//! |---|---|
//! | `x-request-id` | name of the request, sent back; made here when absent or not plain text |
//! | `Authorization: Bearer` | the API key, when there are keys; it names the tenant |
//! | `x-tenant-id` | the tenant, where no key names one; tenants share no blocks |
//! | `cache_salt` | calls with different salts share no blocks |
//! | `x-slo-class` (or `x-baton-class`), else `service_tier` | the service class (`auto` and `default` leave it open) |
//! | `priority` | the service class, by the rules of [`RouterConfig::class_rules`], where the others leave it open |
//! | `x-slo-ttft-ms`, `x-slo-tbt-ms` | the TTFT and the TBT of this call, whole ms from 1 to 86,400,000, in place of its class's |
//! | [`RouterConfig::session_headers`], else `prompt_cache_key`, `user`, `previous_response_id` | the conversation |
//! | `x-request-timeout-ms`, `x-stainless-timeout` (s) | how long the client waits |
//! | `x-stainless-read-timeout`, `x-stainless-timeout` with `x-stainless-lang: js` (s) | the same, for calls that are not streamed |
//! | `traceparent` | the trace that the call belongs to; ignored when it breaks the standard |
//! | `x-baton-explain: 1` | the decision is sent back in `x-baton-decision` |
//! | `top_k`, `min_p`, `repetition_penalty`, `min_tokens`, `ignore_eos`, `stop_token_ids`, `include_stop_str_in_output`, `skip_special_tokens`, `add_special_tokens`, `add_generation_prompt`, `chat_template_kwargs`, `prompt_logprobs` | as engines know them |
//!
//! Tool calls in answers become `tool_calls`, see [`ToolParser`]; reasoning may become
//! `reasoning_content`, see [`ReasoningParser`].
//!
//! All other fields are not read here; the body goes along as it came, without `priority`.

mod activity;
mod answer;
mod aside;
mod backend;
mod body;
mod call;
mod caller;
mod chat;
mod choices;
mod class_rules;
mod config;
mod convert;
mod engine_body;
mod error;
mod fields;
#[cfg(test)]
mod fuzz;
mod json;
mod line;
mod output_parsing;
mod plan;
mod reasoning;
mod receive;
mod router;
mod sampling;
mod serve;
mod stats;
mod stops;
mod stream;
mod tokenize;
mod tools;
mod trace;
mod write;

pub use backend::{Backend, Event, Fault, Model, Readiness, Refusal, Submission, SubmissionStream, Usage};
pub use body::{Body, CutOffError, Reply};
pub use caller::{API_TIERS, OBJECTIVE_HEADERS, same_key};
pub use class_rules::{ClassRule, ClassRules};
pub use config::{ApiKey, ApiKeys, Extra, Mount, ReplyFuture, RouterConfig};
pub use engine_body::IN_THE_TOKENS;
pub use error::ApiError;
pub use reasoning::ReasoningParser;
pub use router::{Router, percent_decoded};
pub use stats::{CloseReason, ErrorCount, RouterStats};
pub use tokenize::{Lineage, LoadError, Prompt, Sample, Tokenization};
pub use tools::{ToolFormat, ToolParser};
pub use trace::TraceParent;
